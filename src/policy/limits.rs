//! How often and how long an operation may try.

use std::time::Duration;

use crate::invalid::InvalidInput;

/// The limits of one operation: the client's settings with the request's own on top.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) max_attempts: u32,
    pub(crate) attempt_timeout: Option<Duration>,
    pub(crate) minimum_attempt: Duration,
    pub(crate) reserve: Duration,
}

impl Limits {
    /// Whether an attempt can ever fit a deadline of this length.
    pub(crate) fn validate(&self, deadline: Duration) -> Result<(), InvalidInput> {
        if deadline.is_zero() {
            return Err(InvalidInput::new("deadline", "must not be zero"));
        }
        if self.reserve >= deadline {
            return Err(InvalidInput::new(
                "reserve",
                "leaves nothing of the deadline",
            ));
        }
        if self.least_attempt() > deadline.saturating_sub(self.reserve) {
            return Err(InvalidInput::new(
                "minimum_attempt",
                "does not fit the deadline less the reserve",
            ));
        }
        Ok(())
    }

    /// The least time worth starting an attempt with. Never zero: a zero timeout still sends.
    pub(crate) fn least_attempt(&self) -> Duration {
        self.minimum_attempt.max(SHORTEST_ATTEMPT)
    }
}

/// A request given less than this is sent and then abandoned, so it is not sent at all.
const SHORTEST_ATTEMPT: Duration = Duration::from_millis(1);

pub(crate) fn at_least_one(attempts: u32) -> Result<u32, InvalidInput> {
    match attempts {
        0 => Err(InvalidInput::new("max_attempts", "must be at least 1")),
        attempts => Ok(attempts),
    }
}

pub(crate) fn attempt_timeout(timeout: Duration) -> Result<Option<Duration>, InvalidInput> {
    match timeout {
        Duration::ZERO => Err(InvalidInput::new("attempt_timeout", "must not be zero")),
        Duration::MAX => Ok(None),
        timeout => Ok(Some(timeout)),
    }
}
