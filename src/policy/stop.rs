//! Why an operation ended.

use std::fmt;

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
