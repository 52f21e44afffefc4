//! Between attempts: what one leaves to the next, or to the end of the operation.

use std::time::{Duration, Instant};

use reqwest::Response;
use reqwest_middleware::Result;

use crate::end::Answer;
use crate::load::Permit;
use crate::nesting::Holding;
use crate::policy::{Health, Pass, Reservation};

/// An attempt may start.
pub(crate) struct Admitted<'t> {
    /// The instant that this was decided for.
    pub(crate) now: Instant,
    pub(crate) limit: Option<Duration>,
    /// What was waited before it, as planned.
    pub(crate) waited: Duration,
    pub(crate) pass: Option<Pass<'t>>,
    pub(crate) permit: Option<Permit<'t>>,
}

impl<'t> Admitted<'t> {
    /// What operations made within the attempt need not ask for again.
    pub(crate) fn holding(&self) -> Holding {
        let breaker = self.pass.as_ref().and_then(Pass::is_probe_of);
        Holding::of(self.permit.as_ref().map(Permit::limiter), breaker)
    }

    /// When the attempt is given up.
    pub(crate) fn until(&self) -> Option<Instant> {
        self.limit.and_then(|limit| self.now.checked_add(limit))
    }

    /// It is the one that was waited for, and its token is spent.
    pub(crate) fn after(self, wait: Wait<'_>) -> Self {
        wait.token.spend(self.now);
        Self {
            waited: self.waited.saturating_add(wait.delay),
            ..self
        }
    }

    /// The attempt is over: its permit goes to the next in line.
    pub(crate) fn lands(self) -> Option<Pass<'t>> {
        drop(self.permit);
        self.pass
    }
}

/// An attempt that has ended, and may have been the operation's last.
pub(crate) struct Ended<'t> {
    pub(crate) pass: Option<Pass<'t>>,
    pub(crate) health: Health,
}

/// What follows an attempt.
pub(crate) enum Landed<'t> {
    Over(Result<Response>),
    Again(Box<Again<'t>>),
}

/// Another attempt, after a wait.
pub(crate) struct Again<'t> {
    /// The answer that is given up for it.
    pub(crate) answer: Option<Answer>,
    pub(crate) landed: Instant,
    pub(crate) wait: Wait<'t>,
}

impl<'t> Again<'t> {
    /// Takes it out of its box, which is gone then: the wait may be long, and is to keep no more than it
    /// needs.
    pub(crate) fn parts(self: Box<Self>) -> (Option<Answer>, Instant, Wait<'t>) {
        (self.answer, self.landed, self.wait)
    }
}

/// A wait after an attempt, with the token of the attempt that it is for.
pub(crate) struct Wait<'t> {
    pub(crate) delay: Duration,
    pub(crate) token: Reservation<'t>,
    pub(crate) ended: Ended<'t>,
}

impl<'t> Wait<'t> {
    /// The attempt does not start, and the token goes back.
    pub(crate) fn abandon(self) -> Ended<'t> {
        self.ended
    }
}
