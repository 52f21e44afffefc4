//! One run of the layers below, watched for what its result alone would not show.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use reqwest::Response;
use reqwest_middleware::Result;

use crate::redirect::{Hops, while_polling};
use crate::tracking::Evidence;

/// What `Next::run` returns.
type Run<'a> = Pin<Box<dyn Future<Output = Result<Response>> + Send + 'a>>;

/// What a run has shown so far: whether the request left, and which redirects were followed.
/// Stays readable when the run is abandoned.
#[derive(Debug)]
pub(crate) struct Watch {
    hops: Hops,
    evidence: Option<Arc<Evidence>>,
    body_discarded: bool,
    sent_again: bool,
    /// The run has had to wait, as all that is sent must.
    has_waited: bool,
}

/// Whether the request has left, as far as its body can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// Nothing was sent, whatever the error says.
    No,
    /// The head may have reached the server, whatever the error says.
    Maybe,
    /// There is no evidence: not tracked, or a layer below sends another body.
    Untracked,
}

impl Watch {
    /// `confined`: the operation is not to be carried to another origin.
    pub(crate) fn new(confined: bool, evidence: Option<Arc<Evidence>>) -> Self {
        Self {
            hops: Hops {
                confined,
                followed: false,
            },
            evidence,
            body_discarded: false,
            sent_again: false,
            has_waited: false,
        }
    }

    /// Watches `run` from here on.
    pub(crate) fn over<'a>(&'a mut self, run: Run<'a>) -> Watched<'a> {
        Watched {
            run,
            watch: self,
            ended: false,
        }
    }

    /// The request has been answered with a redirect, and is sent once more to be carried there.
    pub(crate) fn note_sent_again(&mut self) {
        self.sent_again = true;
    }

    pub(crate) fn followed_redirect(&self) -> bool {
        self.hops.followed
    }

    pub(crate) fn is_confined(&self) -> bool {
        self.hops.confined
    }

    pub(crate) fn is_tracked(&self) -> bool {
        self.evidence.is_some()
    }

    /// To be asked when the run is over or gone: a body that is still held then is in the hands of a
    /// connection, which may be about to send it.
    pub(crate) fn sent(&self) -> Sent {
        match &self.evidence {
            _ if self.sent_again => Sent::Maybe,
            None => Sent::Untracked,
            Some(evidence) if !evidence.is_dropped_unread() => Sent::Maybe,
            Some(evidence) if self.is_the_body_sent(evidence) => Sent::No,
            Some(_) => Sent::Untracked,
        }
    }

    /// Whether this body, and no other, is what would have been sent. It has got as far as the HTTP
    /// client, and was not given up before the run was; or nothing can have been sent at all, since
    /// the run ended without ever having to wait.
    fn is_the_body_sent(&self, evidence: &Evidence) -> bool {
        !self.body_discarded && (evidence.is_handed_over() || !self.has_waited)
    }

    /// A body that is gone unread while the run goes on is not the one being sent.
    fn note_discarded_body(&mut self) {
        self.body_discarded |= self
            .evidence
            .as_ref()
            .is_some_and(|evidence| evidence.is_dropped_unread());
    }
}

/// A run that tells its [`Watch`] what happens in it.
pub(crate) struct Watched<'a> {
    run: Run<'a>,
    watch: &'a mut Watch,
    ended: bool,
}

impl Future for Watched<'_> {
    type Output = Result<Response>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { run, watch, ended } = self.get_mut();
        watch.note_discarded_body();
        let result = while_polling(&mut watch.hops, || run.as_mut().poll(context));
        *ended = result.is_ready();
        watch.has_waited |= result.is_pending();
        result
    }
}

impl Drop for Watched<'_> {
    /// An abandoned run still holds the body that it would have sent.
    fn drop(&mut self) {
        if !self.ended {
            self.watch.note_discarded_body();
        }
    }
}
