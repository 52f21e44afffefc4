//! After an attempt: hand on its result, wait for another, or stop and say why.

use std::time::{Duration, Instant};

use super::backoff::Drawn;
use super::{Call, Certainty, Outcome, Pacing, Reservation, RetryBudget, StopReason, Verdict};

/// What follows from an attempt's outcome.
#[derive(Debug)]
pub(crate) enum Decision<'b> {
    /// What there is goes to the caller: the answer that was wanted, or the reason for which there
    /// is no further attempt.
    Return(Option<StopReason>),
    /// Another attempt after `delay`. Its token goes back if it is dropped unspent.
    Wait {
        delay: Duration,
        token: Reservation<'b>,
    },
}

/// What the decision is made from besides the state of the call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub(crate) now: Instant,
    /// A uniform draw from `[0, 1)`.
    pub(crate) draw: f64,
    pub(crate) cancelled: bool,
}

impl Call {
    /// Decides what follows from `outcome`, which has been recorded before.
    pub(crate) fn decide<'b>(
        &mut self,
        outcome: &Outcome,
        pacing: &Pacing,
        budget: Option<&'b RetryBudget>,
        at: Moment,
    ) -> Decision<'b> {
        if outcome.verdict == Verdict::Done {
            return Decision::Return(None);
        }
        let delay = match self.may_repeat(outcome, pacing, at) {
            Ok(delay) => delay,
            Err(reason) => return Decision::Return(Some(reason)),
        };
        match budget {
            None => Decision::Wait {
                delay,
                token: Reservation::unlimited(),
            },
            Some(budget) => match budget.reserve(at.now, &mut self.counted) {
                Some(token) => Decision::Wait { delay, token },
                None => Decision::Return(Some(StopReason::BudgetExhausted)),
            },
        }
    }

    /// Every check but the budget, in the documented order. Returns the wait.
    fn may_repeat(
        &mut self,
        outcome: &Outcome,
        pacing: &Pacing,
        at: Moment,
    ) -> Result<Duration, StopReason> {
        if at.cancelled {
            return Err(StopReason::Cancelled);
        }
        if outcome.verdict == Verdict::Final {
            return Err(StopReason::NotRetryable);
        }
        let wait = self.next_wait(outcome, pacing, at);
        if self.key_expires_before(at.now, wait.delay) {
            return Err(StopReason::KeyExpired);
        }
        if !self.is_safe_to_repeat(outcome) {
            return Err(StopReason::UnsafeToRepeat);
        }
        if outcome.veto {
            return Err(StopReason::ServerVeto);
        }
        if self.attempts >= self.limits.max_attempts {
            return Err(StopReason::AttemptsExhausted);
        }
        if !self.body_replayable {
            return Err(StopReason::BodyNotReplayable);
        }
        if wait.floor > pacing.max_retry_after || !self.fits_floor(at.now, wait.floor) {
            return Err(StopReason::RetryAfterTooLong);
        }
        if !self.fits(at.now, wait.delay) {
            return Err(StopReason::DeadlineTooClose);
        }
        Ok(wait.delay)
    }

    /// RFC 9110 §9.2.2: repeat only what is idempotent by method, by key or by the caller's word,
    /// or what is known not to have been applied.
    fn is_safe_to_repeat(&self, outcome: &Outcome) -> bool {
        self.replay.survives_a_repeat() || outcome.certainty <= Certainty::NotProcessed
    }

    /// `now + delay` leaves at least the least useful attempt before the deadline and reserve.
    fn fits(&self, now: Instant, delay: Duration) -> bool {
        delay.saturating_add(self.limits.least_attempt()) <= self.available(now)
    }

    /// Whether what the server asked for can be waited out at all; asking for nothing always can.
    fn fits_floor(&self, now: Instant, floor: Duration) -> bool {
        floor.is_zero() || self.fits(now, floor)
    }

    /// The wait before the next attempt. The server's wish is a floor: jitter only adds to it, and
    /// only the jitter may be clipped to the time left.
    fn next_wait(&mut self, outcome: &Outcome, pacing: &Pacing, at: Moment) -> Wait {
        let retry = self.attempts.saturating_sub(1);
        let backoff = pacing.backoff.draw(retry, at.draw, &mut self.backoff);
        let floor = outcome.retry_after.unwrap_or_default();
        let delay = match backoff {
            backoff if floor.is_zero() => backoff.delay(),
            Drawn::Fixed(delay) => delay.max(floor),
            Drawn::Jittered { random, .. } => {
                let longest = self
                    .available(at.now)
                    .saturating_sub(self.limits.least_attempt());
                floor.saturating_add(random).min(longest).max(floor)
            }
        };
        Wait { floor, delay }
    }
}

struct Wait {
    /// What the server asked for; zero where it asked for nothing.
    floor: Duration,
    delay: Duration,
}
