//! Before an attempt: may it start now, and how long may it take?

use std::time::Duration;

use super::breaker::Pass;
use super::{Call, Certainty, FirstSends, Moment, Stop, StopReason, Terms};

/// What an operation that asks to start an attempt is told.
#[derive(Debug)]
pub(crate) enum Admission<'t> {
    /// It may start, and take so long (`None`: unlimited).
    Start {
        limit: Option<Duration>,
        /// The breaker's leave, where there is one.
        pass: Option<Pass<'t>>,
    },
    /// The host wants to be left alone for so long: ask again then.
    Wait(Duration),
}

impl Call {
    /// Asked before every attempt: the first, and again after each wait, so that what it goes by is
    /// never a stale figure.
    ///
    /// The number of attempts and the budget are not asked again: `decide` has settled them.
    pub(crate) fn admit<'t>(
        &mut self,
        terms: &Terms<'t>,
        at: Moment<'_>,
    ) -> Result<Admission<'t>, Stop> {
        self.may_start(at)?;
        if let Some(wait) = self.pushed_back(terms, at)? {
            return Ok(Admission::Wait(wait));
        }
        let is_first = self.attempts == 0;
        let pass = match terms.breaker {
            None => None,
            Some(breaker) if terms.is_within_a_probe => Some(breaker.accompany(at.now)),
            Some(breaker) => Some(breaker.enter(at.now, is_first)?),
        };
        Ok(Admission::Start {
            limit: self.attempt_limit(at.now, Duration::ZERO),
            pass,
        })
    }

    fn may_start(&self, at: Moment<'_>) -> Result<(), StopReason> {
        if at.cancelled {
            return Err(StopReason::Cancelled);
        }
        if self.is_a_repeat() && self.key_expires_before(at.now, Duration::ZERO) {
            return Err(StopReason::KeyExpired);
        }
        if !self.replay.survives_a_repeat() && self.certainty() > Certainty::NotProcessed {
            return Err(StopReason::UnsafeToRepeat);
        }
        if self.limits.least_attempt() > self.available(at.now) {
            return Err(StopReason::DeadlineTooClose);
        }
        Ok(())
    }

    /// The wait that the host has asked somebody for meanwhile, with jitter of this operation's own
    /// on top. What it heeds before one attempt adds up to no more than `max_retry_after`.
    fn pushed_back(&mut self, terms: &Terms<'_>, at: Moment<'_>) -> Result<Option<Duration>, Stop> {
        let Some(pushback) = terms.pushback else {
            return Ok(None);
        };
        let is_first = self.attempts == 0;
        if is_first && pushback.first_sends() == FirstSends::Pass {
            return Ok(None);
        }
        let floor = pushback.remaining(at.now);
        if floor.is_zero() {
            return Ok(None);
        }
        let heeded = self.heeded.saturating_add(floor);
        let is_refused = is_first && pushback.first_sends() == FirstSends::Refuse;
        if is_refused || heeded > terms.pacing.max_retry_after || !self.fits(at.now, floor) {
            return Err(Stop {
                reason: StopReason::RetryAfterTooLong,
                after: Some(floor),
            });
        }
        let jitter = self.draw(terms.pacing, at).jitter();
        let wait = self.above(floor, jitter, at.now);
        if self.is_a_repeat() && self.key_expires_before(at.now, wait) {
            return Err(StopReason::KeyExpired.into());
        }
        self.heeded = heeded;
        Ok(Some(wait))
    }

    /// A first send needs no key lifetime: there is nothing yet that the server must remember.
    fn is_a_repeat(&self) -> bool {
        self.attempts > 0 || self.fold.is_sent()
    }
}
