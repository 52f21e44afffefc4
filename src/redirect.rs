//! Redirects: followed below every middleware, so an answer or an error may belong to another
//! request than ours.
//!
//! A POST that is answered 303 has been carried out, and what happens to the GET that follows says
//! nothing about it. A client made with [`RetryMiddleware::prepare`](crate::RetryMiddleware::prepare)
//! tells of each hop it follows, and keeps keyed and unsafe operations at their origin.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use http::StatusCode;
use reqwest::{Url, redirect};

thread_local! {
    /// The attempt that this thread is polling. The redirect policy is called from within the poll.
    static POLLED: Cell<Option<Hops>> = const { Cell::new(None) };
}

/// Hops followed outside of any such poll: by a client that is used without this layer, or by a
/// layer below that sends from a task of its own.
static UNSEEN: AtomicU64 = AtomicU64::new(0);

/// The redirects of one attempt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hops {
    /// The operation is not to be carried to another origin.
    confined: bool,
    /// 301 and 302 turn a POST into a GET, and leave other methods as they are.
    is_post: bool,
    trail: Trail,
    unseen_before: u64,
}

/// What the hops that were followed have made of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Trail {
    Empty,
    Kept,
    SeeOther,
    Changed,
}

/// Whether the answer or error in hand is about our request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Redirected {
    /// No redirect was followed.
    No,
    /// None is known of, but the client below cannot be relied on to tell.
    Unknown,
    /// Only such as repeat the request elsewhere: method and body are ours, and so is the answer.
    Kept,
    /// 303: our request was answered, and what came of it is told elsewhere.
    SeeOther,
    /// Another request was made in place of ours.
    Changed,
}

impl Hops {
    pub(crate) fn none_yet(confined: bool, is_post: bool) -> Self {
        Self {
            confined,
            is_post,
            trail: Trail::Empty,
            unseen_before: UNSEEN.load(Ordering::Acquire),
        }
    }

    /// The attempt is polled.
    pub(crate) fn follow_on(&mut self) -> Followed<'_> {
        let outer = POLLED.replace(Some(*self));
        Followed { hops: self, outer }
    }

    pub(crate) fn is_confined(&self) -> bool {
        self.confined
    }

    /// `client_tells`: the policy below is known to be ours.
    pub(crate) fn redirected(&self, client_tells: bool) -> Redirected {
        let may_have_missed = || UNSEEN.load(Ordering::Acquire) != self.unseen_before;
        match self.trail {
            Trail::Empty if !client_tells || may_have_missed() => Redirected::Unknown,
            Trail::Empty => Redirected::No,
            Trail::Kept => Redirected::Kept,
            Trail::SeeOther => Redirected::SeeOther,
            Trail::Changed => Redirected::Changed,
        }
    }

    fn follow(self, status: StatusCode) -> Self {
        let hop = match status {
            StatusCode::SEE_OTHER => Trail::SeeOther,
            StatusCode::MOVED_PERMANENTLY | StatusCode::FOUND if self.is_post => Trail::Changed,
            _ => Trail::Kept,
        };
        Self {
            trail: self.trail.max(hop),
            ..self
        }
    }
}

/// reqwest's default policy, plus what the head of this file says.
pub(crate) fn policy() -> redirect::Policy {
    redirect::Policy::custom(|hop| {
        match POLLED.get() {
            Some(attempt) if attempt.confined && leaves_origin(&hop) => return hop.stop(),
            Some(attempt) => POLLED.set(Some(attempt.follow(hop.status()))),
            None => drop(UNSEEN.fetch_add(1, Ordering::Release)),
        }
        redirect::Policy::default().redirect(hop)
    })
}

fn leaves_origin(hop: &redirect::Attempt<'_>) -> bool {
    hop.previous()
        .last()
        .is_none_or(|from| from.origin() != hop.url().origin())
}

/// While it is there, the policy above tells an attempt of the hops that are followed.
pub(crate) struct Followed<'h> {
    hops: &'h mut Hops,
    outer: Option<Hops>,
}

impl Drop for Followed<'_> {
    fn drop(&mut self) {
        *self.hops = POLLED.replace(self.outer).unwrap_or(*self.hops);
    }
}

/// The same resource as far as a server can tell: fragments are never sent.
pub(crate) fn is_same_url(one: &Url, other: &Url) -> bool {
    one == other || without_fragment(one) == without_fragment(other)
}

fn without_fragment(url: &Url) -> Option<&str> {
    url.as_str().split('#').next()
}
