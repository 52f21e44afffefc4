//! After an attempt: hand on its result, wait for another, or stop and say why.

use std::time::{Duration, Instant};

use super::backoff::Drawn;
use super::breaker::Refused;
use super::{
    Call, Certainty, Moment, Outcome, Pacing, Reservation, Stop, StopReason, Terms, Verdict,
};

/// What follows from an attempt's outcome.
#[derive(Debug)]
pub(crate) enum Decision<'t> {
    /// What there is goes to the caller: the answer that was wanted, or the reason for which there
    /// is no further attempt.
    Return(Option<Stop>),
    /// Another attempt after `delay`. Its token goes back if it is dropped unspent.
    Wait {
        delay: Duration,
        token: Reservation<'t>,
    },
}

impl Call {
    /// Decides what follows from `outcome`, which has been recorded before.
    pub(crate) fn decide<'t>(
        &mut self,
        outcome: &Outcome,
        terms: &Terms<'t>,
        at: Moment<'_>,
    ) -> Decision<'t> {
        if outcome.verdict == Verdict::Done {
            return Decision::Return(None);
        }
        let delay = match self.may_repeat(outcome, terms, at) {
            Ok(delay) => delay,
            Err(stop) => return Decision::Return(Some(stop)),
        };
        let token = match terms.budget {
            None => Some(Reservation::unlimited()),
            Some(budget) => budget.reserve(at.now, &mut self.counted),
        };
        match token {
            None => Decision::Return(Some(StopReason::BudgetExhausted.into())),
            // The token goes back: whoever repeats it pays for it.
            Some(_) if self.leaves_retries_to_outer() => Decision::Return(Some(Stop {
                reason: StopReason::NestedLayer,
                after: Some(self.heeded).filter(|floor| !floor.is_zero()),
            })),
            Some(token) => Decision::Wait { delay, token },
        }
    }

    /// Every check but the budget, in the documented order. Returns the wait.
    fn may_repeat(
        &mut self,
        outcome: &Outcome,
        terms: &Terms<'_>,
        at: Moment<'_>,
    ) -> Result<Duration, Stop> {
        if at.cancelled {
            return Err(StopReason::Cancelled.into());
        }
        if outcome.verdict == Verdict::Final {
            return Err(StopReason::NotRetryable.into());
        }
        let wait = self.next_wait(outcome, terms, at);
        if self.key_expires_before(at.now, wait.delay) {
            return Err(StopReason::KeyExpired.into());
        }
        if !self.is_safe_to_repeat(outcome) {
            return Err(StopReason::UnsafeToRepeat.into());
        }
        if outcome.veto {
            return Err(StopReason::ServerVeto.into());
        }
        if outcome.retried_below {
            return Err(StopReason::SpentBelow.into());
        }
        if self.attempts >= self.limits.max_attempts {
            return Err(StopReason::AttemptsExhausted.into());
        }
        if !self.body_replayable {
            return Err(StopReason::BodyNotReplayable.into());
        }
        let longest = terms.pacing.max_retry_after;
        if wait.own_floor > longest || !self.fits_floor(at.now, wait.own_floor) {
            return Err(StopReason::RetryAfterTooLong.into());
        }
        if !self.fits(at.now, wait.own_delay) {
            return Err(StopReason::DeadlineTooClose.into());
        }
        if wait.floor > longest || !self.fits_floor(at.now, wait.floor) {
            return Err(Stop {
                reason: StopReason::RetryAfterTooLong,
                after: Some(wait.floor),
            });
        }
        if let Some(breaker) = terms.breaker.filter(|_| !terms.is_within_a_probe) {
            breaker.check(at.now, false)?;
        }
        self.heeded = wait.floor;
        Ok(wait.delay)
    }

    /// RFC 9110 §9.2.2: repeat only what is idempotent by method, by key or by the caller's word,
    /// or what is known not to have been applied.
    fn is_safe_to_repeat(&self, outcome: &Outcome) -> bool {
        self.replay.survives_a_repeat() || outcome.certainty <= Certainty::NotProcessed
    }

    /// `now + delay` leaves at least the least useful attempt before the deadline and reserve.
    pub(super) fn fits(&self, now: Instant, delay: Duration) -> bool {
        delay.saturating_add(self.limits.least_attempt()) <= self.available(now)
    }

    /// Whether what the server asked for can be waited out at all; asking for nothing always can.
    fn fits_floor(&self, now: Instant, floor: Duration) -> bool {
        floor.is_zero() || self.fits(now, floor)
    }

    /// The wait before the next attempt: by what this operation was told, and by what the host has
    /// told others.
    fn next_wait(&mut self, outcome: &Outcome, terms: &Terms<'_>, at: Moment<'_>) -> Wait {
        let backoff = self.draw(terms.pacing, at);
        let own_floor = outcome.retry_after.unwrap_or_default();
        let shared = terms
            .pushback
            .map_or(Duration::ZERO, |pushback| pushback.remaining(at.now));
        let floor = own_floor.max(shared);
        Wait {
            own_floor,
            own_delay: self.above(own_floor, backoff, at.now),
            floor,
            delay: self.above(floor, backoff, at.now),
        }
    }

    /// The backoff before the coming attempt.
    pub(super) fn draw(&mut self, pacing: &Pacing, at: Moment<'_>) -> Drawn {
        let retry = self.attempts.saturating_sub(1);
        pacing.backoff.draw(retry, (at.draw)(), &mut self.backoff)
    }

    /// The server's wish is a floor: jitter only adds to it, and only the jitter may be clipped to the
    /// time left.
    pub(super) fn above(&self, floor: Duration, backoff: Drawn, now: Instant) -> Duration {
        match backoff {
            backoff if floor.is_zero() => backoff.delay(),
            Drawn::Fixed(delay) => delay.max(floor),
            Drawn::Jittered { random, .. } => {
                let longest = self
                    .available(now)
                    .saturating_sub(self.limits.least_attempt());
                floor.saturating_add(random).min(longest).max(floor)
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Wait {
    /// What the server asked this operation for; zero where it asked for nothing.
    own_floor: Duration,
    own_delay: Duration,
    /// The same, with what it asked others for.
    floor: Duration,
    delay: Duration,
}

impl From<Refused> for Stop {
    fn from(refused: Refused) -> Self {
        Self {
            reason: StopReason::BreakerOpen,
            after: refused.after,
        }
    }
}
