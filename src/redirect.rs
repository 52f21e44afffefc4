//! Redirects: followed below every middleware, so an answer or an error may belong to another
//! request than ours.
//!
//! A POST that is answered 303 has been carried out, and what happens to the GET that follows says
//! nothing about it. A client made with [`RetryMiddleware::prepare`](crate::RetryMiddleware::prepare)
//! tells of each hop it follows, and keeps keyed and unsafe operations at their origin.

use std::cell::Cell;

use reqwest::{Url, redirect};

thread_local! {
    /// The attempt that this thread is polling. The redirect policy is called from within the poll.
    static POLLED: Cell<Option<Hops>> = const { Cell::new(None) };
}

/// What is known of the redirects of one attempt.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Hops {
    /// The operation is not to be carried to another origin.
    pub(crate) confined: bool,
    pub(crate) followed: bool,
}

/// Whether the answer or error in hand may belong to another request than ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Redirected {
    /// No redirect was followed.
    No,
    /// None is known of, but the client below cannot be relied on to tell.
    Unknown,
    /// One was followed.
    Yes,
}

/// reqwest's default policy, plus what the head of this file says.
pub(crate) fn policy() -> redirect::Policy {
    redirect::Policy::custom(|hop| {
        if let Some(attempt) = POLLED.get() {
            if attempt.confined && leaves_origin(&hop) {
                return hop.stop();
            }
            POLLED.set(Some(Hops {
                followed: true,
                ..attempt
            }));
        }
        redirect::Policy::default().redirect(hop)
    })
}

fn leaves_origin(hop: &redirect::Attempt<'_>) -> bool {
    hop.previous()
        .last()
        .is_none_or(|from| from.origin() != hop.url().origin())
}

/// Polls an attempt so that the policy above can tell it of the hops it follows.
pub(crate) fn while_polling<T>(hops: &mut Hops, poll: impl FnOnce() -> T) -> T {
    let outer = Outer(POLLED.replace(Some(*hops)));
    let result = poll();
    *hops = POLLED.get().unwrap_or_default();
    drop(outer);
    result
}

/// Puts the outer attempt back, also when the poll panics.
struct Outer(Option<Hops>);

impl Drop for Outer {
    fn drop(&mut self) {
        POLLED.set(self.0);
    }
}

/// The same resource as far as a server can tell: fragments are never sent.
pub(crate) fn is_same_url(one: &Url, other: &Url) -> bool {
    without_fragment(one) == without_fragment(other)
}

fn without_fragment(url: &Url) -> Option<&str> {
    url.as_str().split('#').next()
}
