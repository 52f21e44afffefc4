//! Before an attempt: may it start now, and how long may it take?

use std::time::{Duration, Instant};

use super::{Call, Certainty, StopReason};

impl Call {
    /// Asked before every attempt: the first, and again after each wait, so that the time left is
    /// never a stale figure. Returns the attempt's time limit (`None`: unlimited).
    ///
    /// The number of attempts and the budget are not asked again: `decide` has settled them.
    pub(crate) fn admit(
        &self,
        now: Instant,
        cancelled: bool,
    ) -> Result<Option<Duration>, StopReason> {
        if cancelled {
            return Err(StopReason::Cancelled);
        }
        if self.is_a_repeat() && self.key_expires_before(now, Duration::ZERO) {
            return Err(StopReason::KeyExpired);
        }
        if !self.replay.survives_a_repeat() && self.certainty() > Certainty::NotProcessed {
            return Err(StopReason::UnsafeToRepeat);
        }
        if self.limits.least_attempt() > self.available(now) {
            return Err(StopReason::DeadlineTooClose);
        }
        Ok(self.attempt_limit(now, Duration::ZERO))
    }

    /// A first send needs no key lifetime: there is nothing yet that the server must remember.
    fn is_a_repeat(&self) -> bool {
        self.attempts > 0 || self.fold.is_sent()
    }
}
