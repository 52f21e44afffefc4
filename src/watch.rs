//! One run of the layers below, watched for what its result alone would not show.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use reqwest::{Response, Url};
use reqwest_middleware::Result;

use crate::nesting::{Holding, Within};
use crate::redirect::Hops;
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
    /// Where the request was sent once more, after a redirect that needed its body.
    moved_to: Option<Box<Url>>,
    /// The run has had to wait, as all that is sent must.
    has_waited: bool,
    within: Within,
}

/// Whether the request has left, as far as its body can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// Nothing was sent, whatever the error says.
    No,
    /// The head may have reached the server, whatever the error says.
    Maybe,
    /// It was not tracked.
    Untracked,
}

impl Watch {
    pub(crate) fn new(hops: Hops, evidence: Option<Arc<Evidence>>, within: Within) -> Self {
        Self {
            hops,
            evidence,
            body_discarded: false,
            moved_to: None,
            has_waited: false,
            within,
        }
    }

    /// Watches `run` from here on, which holds these permits.
    pub(crate) fn over<'a>(&'a mut self, run: Run<'a>, holding: Holding) -> Watched<'a> {
        Watched {
            run: Some(run),
            holding,
            watch: self,
            ended: false,
        }
    }

    /// The request has been answered with a redirect to this place, and is sent once more so that
    /// it is followed.
    pub(crate) fn note_moved(&mut self, to: Url) {
        self.moved_to = Some(Box::new(to));
    }

    pub(crate) fn hops(&self) -> &Hops {
        &self.hops
    }

    /// Whether an operation that was made within it must not be made once more.
    pub(crate) fn is_spent_below(&self) -> bool {
        self.within.is_spent()
    }

    /// Whether another attempt could have the effect of an operation that was made within it a second
    /// time.
    pub(crate) fn may_be_doubled_below(&self) -> bool {
        self.within.may_be_doubled()
    }

    /// Whether an operation that was made within it has left its retries to us.
    pub(crate) fn is_left_to_us(&self) -> bool {
        self.within.is_left()
    }

    pub(crate) fn moved_to(&self) -> Option<&Url> {
        self.moved_to.as_deref()
    }

    /// What the run's body is to note.
    pub(crate) fn evidence(&self) -> Option<&Arc<Evidence>> {
        self.evidence.as_ref()
    }

    pub(crate) fn is_tracked(&self) -> bool {
        self.evidence.is_some()
    }

    /// To be asked when the run is over or gone: a body that is still held then is in the hands of a
    /// connection, which may be about to send it.
    pub(crate) fn sent(&self) -> Sent {
        match &self.evidence {
            None => Sent::Untracked,
            Some(evidence) if self.moved_to.is_none() && self.is_unsent(evidence) => Sent::No,
            Some(_) => Sent::Maybe,
        }
    }

    /// The body is gone unread, and it is the one that would have been sent: it got as far as the
    /// HTTP client, and was not given up before the run was. Or the run ended without ever having
    /// to wait, as all that is sent must.
    fn is_unsent(&self, evidence: &Evidence) -> bool {
        evidence.is_gone_unread()
            && !self.body_discarded
            && (evidence.is_handed_over() || !self.has_waited)
    }

    /// A body that is gone unread while the run goes on is not the one being sent.
    fn note_discarded_body(&mut self) {
        self.body_discarded |= self
            .evidence
            .as_ref()
            .is_some_and(|evidence| evidence.is_gone_unread());
    }
}

/// A run that tells its [`Watch`] what happens in it.
pub(crate) struct Watched<'a> {
    /// `None` only once it is dropped.
    run: Option<Run<'a>>,
    holding: Holding,
    watch: &'a mut Watch,
    ended: bool,
}

impl Future for Watched<'_> {
    type Output = Result<Response>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self {
            run,
            holding,
            watch,
            ended,
        } = self.get_mut();
        watch.note_discarded_body();
        let Some(run) = run else {
            return Poll::Pending;
        };
        let Watch { within, hops, .. } = &mut **watch;
        let result = {
            let _within = within.enter();
            let _held = holding.enter();
            let _followed = hops.follow_on();
            run.as_mut().poll(context)
        };
        *ended = result.is_ready();
        watch.has_waited |= result.is_pending();
        result
    }
}

impl Drop for Watched<'_> {
    /// An abandoned run still holds the body that it would have sent, and operations of its own.
    fn drop(&mut self) {
        if !self.ended {
            self.watch.note_discarded_body();
        }
        let run = self.run.take();
        let _within = self.watch.within.enter();
        drop(run);
    }
}
