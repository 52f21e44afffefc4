//! The decision core: what may be repeated, when, and why not.
//!
//! Everything here is a function of its arguments. The current instant, the random draw and
//! whether the caller has cancelled are handed in; nothing in this folder reads a clock, waits,
//! or knows how a request travels. [`Call`] is the state of one operation, [`Outcome`] what one
//! attempt proved, [`Decision`] what follows from it.

mod admit;
mod backoff;
mod budget;
mod decide;
#[cfg(test)]
mod tests;

use std::fmt;
use std::time::{Duration, Instant};

use crate::invalid::InvalidInput;

pub use self::backoff::Backoff;
pub(crate) use self::budget::Reservation;
pub use self::budget::{RetryBudget, RetryBudgetBuilder};
pub(crate) use self::decide::{Decision, Moment};

/// What is known about the effect of an attempt, or of a whole operation, at the server.
///
/// Ordered by how much may have happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Certainty {
    /// Nothing left this process: the server cannot have acted.
    NotSent,
    /// The request was sent, and the server has said that it did no work for it
    /// (RFC 9113 §8.7, RFC 8470 §5.2, or a status that the caller declared so).
    NotProcessed,
    /// The server may or may not have acted. Confirm before doing anything that would count twice.
    Unknown,
    /// The server has answered, and the answer settles what happened.
    Answered,
}

impl fmt::Display for Certainty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotSent => "never sent",
            Self::NotProcessed => "not processed",
            Self::Unknown => "outcome unknown",
            Self::Answered => "answered",
        })
    }
}

/// Why no (further) attempt was started.
///
/// Checked in the order in which they are listed, so a reason is only given where none of the
/// earlier ones held; the budget comes last, so that a refusal for another reason costs no token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StopReason {
    /// The request, a header or an extension was invalid. Nothing was sent.
    InvalidInput,
    /// The caller cancelled, or dropped the future.
    Cancelled,
    /// The outcome is final: repeating the same request cannot change it.
    NotRetryable,
    /// The idempotency key would no longer be honoured by the time of another attempt.
    KeyExpired,
    /// The operation may have been carried out, and a repeat could carry it out again: it has neither
    /// a key nor an idempotent method, or the caller has said that it must not be repeated.
    UnsafeToRepeat,
    /// The server asked not to be called again (the configured veto header).
    ServerVeto,
    /// As many attempts as allowed were made.
    AttemptsExhausted,
    /// The request body was a stream, which can be sent only once.
    BodyNotReplayable,
    /// The server asked for a longer wait than the deadline or `max_retry_after` allows.
    RetryAfterTooLong,
    /// Too little time is left before the deadline for a wait and a useful attempt.
    DeadlineTooClose,
    /// The circuit breaker is open. Not given yet: there is none.
    BreakerOpen,
    /// The shared retry budget has no token left.
    BudgetExhausted,
    /// Another layer of this crate around this one is responsible for retries. Not given yet: where
    /// that can be seen, requests pass through.
    NestedLayer,
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InvalidInput => "invalid input",
            Self::Cancelled => "cancelled",
            Self::NotRetryable => "not retryable",
            Self::KeyExpired => "idempotency key expired",
            Self::UnsafeToRepeat => "unsafe to repeat",
            Self::ServerVeto => "the server asked not to retry",
            Self::AttemptsExhausted => "attempts exhausted",
            Self::BodyNotReplayable => "body not replayable",
            Self::RetryAfterTooLong => "Retry-After too long",
            Self::DeadlineTooClose => "deadline too close",
            Self::BreakerOpen => "breaker open",
            Self::BudgetExhausted => "retry budget exhausted",
            Self::NestedLayer => "nested layer",
        })
    }
}

/// On what ground an operation may be repeated (RFC 9110 §9.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ReplayClass {
    /// The method asks for no effect: GET, HEAD, OPTIONS, TRACE.
    Safe,
    /// A repeat has the intended effect of one: PUT, DELETE, or the caller said so.
    Idempotent,
    /// The server recognises a repeat by its idempotency key.
    Keyed,
    /// A repeat may be a second operation.
    Unsafe,
}

impl ReplayClass {
    /// Whether a repeat is the same operation even where the first one may have been carried out.
    pub(crate) fn survives_a_repeat(self) -> bool {
        self != Self::Unsafe
    }
}

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

/// The settings of the core that no request can override.
#[derive(Clone, Debug)]
pub(crate) struct Pacing {
    pub(crate) backoff: Backoff,
    pub(crate) max_retry_after: Duration,
}

/// What the edge learned from one attempt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    pub(crate) verdict: Verdict,
    pub(crate) certainty: Certainty,
    /// The answer says that the operation has been carried out (2xx).
    pub(crate) success: bool,
    /// The wait that the server asked for, if any.
    pub(crate) retry_after: Option<Duration>,
    /// The server asked not to be called again.
    pub(crate) veto: bool,
}

/// What the attempt's result means for a repeat, safety aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// An answer to hand on.
    Done,
    /// A refusal or failure that a repeat cannot change.
    Final,
    /// A repeat may end differently.
    Retryable,
}

/// The state of one operation.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) replay: ReplayClass,
    pub(crate) limits: Limits,
    pub(crate) deadline: Option<Instant>,
    /// The instant after which the server no longer knows the key.
    pub(crate) key_expires: Option<Instant>,
    pub(crate) body_replayable: bool,
    attempts: u32,
    backoff: backoff::Previous,
    counted: budget::Counted,
    fold: Fold,
}

impl Call {
    /// `earlier` is what an earlier run of the same operation left behind (an outer layer's retry).
    pub(crate) fn new(replay: ReplayClass, limits: Limits, earlier: Option<Certainty>) -> Self {
        Self {
            replay,
            limits,
            deadline: None,
            key_expires: None,
            body_replayable: true,
            attempts: 0,
            backoff: backoff::Previous::default(),
            counted: budget::Counted::default(),
            fold: Fold::carry(earlier),
        }
    }

    /// Attempts started so far.
    pub(crate) fn attempts(&self) -> u32 {
        self.attempts
    }

    /// An attempt starts: from here on it counts, however it ends. With the first one the operation
    /// becomes load, which some budgets measure.
    pub(crate) fn start_attempt(&mut self, budget: Option<&RetryBudget>, now: Instant) {
        self.attempts = self.attempts.saturating_add(1);
        if let (1, Some(budget)) = (self.attempts, budget) {
            budget.begin(now, &mut self.counted);
        }
    }

    /// An attempt has ended.
    pub(crate) fn record(&mut self, outcome: &Outcome) {
        self.fold.record(outcome, self.replay);
    }

    /// What is known of the whole operation, never only of its last attempt.
    pub(crate) fn certainty(&self) -> Certainty {
        self.fold.certainty()
    }

    /// Whether an attempt before this moment may have been carried out.
    pub(crate) fn maybe_applied(&self) -> bool {
        self.fold.unknown
    }

    /// Whether no attempt could follow the one about to start, so that its request may be moved
    /// instead of copied.
    pub(crate) fn is_last_attempt(&self) -> bool {
        self.attempts.saturating_add(1) >= self.limits.max_attempts
    }

    /// Time left for attempts: up to the deadline, less the reserve. `Duration::MAX` without one.
    fn available(&self, now: Instant) -> Duration {
        self.time_left(now).map_or(Duration::MAX, |left| {
            left.saturating_sub(self.limits.reserve)
        })
    }

    /// Time left until the deadline itself.
    pub(crate) fn time_left(&self, now: Instant) -> Option<Duration> {
        self.deadline
            .map(|deadline| deadline.saturating_duration_since(now))
    }

    /// The longest that an attempt may take which starts after `delay`.
    fn attempt_limit(&self, now: Instant, delay: Duration) -> Option<Duration> {
        let left = self
            .deadline
            .map(|_| self.available(now).saturating_sub(delay));
        match (self.limits.attempt_timeout, left) {
            (Some(timeout), Some(left)) => Some(timeout.min(left)),
            (timeout, left) => timeout.or(left),
        }
    }

    /// Whether the key would no longer be honoured by the end of an attempt started after `delay`.
    ///
    /// An attempt without a limit is judged by its start.
    fn key_expires_before(&self, now: Instant, delay: Duration) -> bool {
        let Some(expires) = self.key_expires else {
            return false;
        };
        let attempt = self.attempt_limit(now, delay).unwrap_or_default();
        let needed = delay.saturating_add(attempt);
        expires.saturating_duration_since(now) < needed || expires <= now
    }
}

/// The certainty of a whole operation, folded from its attempts.
#[derive(Clone, Copy, Debug)]
struct Fold {
    /// The worst that may have happened if no answer settles it. Never `Answered`.
    residue: Certainty,
    /// Some attempt may have been carried out.
    unknown: bool,
    /// The latest answer settles the operation.
    settled: bool,
}

impl Fold {
    fn carry(earlier: Option<Certainty>) -> Self {
        let earlier = earlier.unwrap_or(Certainty::NotSent);
        Self {
            residue: earlier.min(Certainty::Unknown),
            unknown: earlier == Certainty::Unknown,
            settled: false,
        }
    }

    fn record(&mut self, outcome: &Outcome, replay: ReplayClass) {
        self.settled =
            outcome.certainty == Certainty::Answered && self.is_settled_by(outcome, replay);
        self.unknown |= outcome.certainty == Certainty::Unknown;
        self.residue = self.residue.max(outcome.certainty.min(Certainty::Unknown));
    }

    /// An answer speaks for the earlier attempts only where none of them can have acted, where
    /// acting was not asked for, or where it is the success of the same operation.
    fn is_settled_by(&self, answer: &Outcome, replay: ReplayClass) -> bool {
        !self.unknown
            || replay == ReplayClass::Safe
            || (answer.success && replay.survives_a_repeat())
    }

    fn certainty(&self) -> Certainty {
        if self.settled {
            Certainty::Answered
        } else {
            self.residue
        }
    }
}
