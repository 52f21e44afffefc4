//! Why an operation ended.

use std::fmt;
use std::time::Duration;

/// Why no (further) attempt was started.
///
/// Checked in the order in which they are listed, so a reason is only given where none of the
/// earlier ones held; the budget comes last, so that a refusal for another reason costs no token (one
/// that another layer would use goes back). A concurrency permit is asked for after the wait.
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
    /// The server asked not to be called again (the configured veto and no-retry headers).
    ServerVeto,
    /// An operation made within the attempt has used up or refused its retries, or may have had an effect
    /// that a repeat would have again.
    SpentBelow,
    /// As many attempts as allowed were made.
    AttemptsExhausted,
    /// The request body was a stream, which can be sent only once.
    BodyNotReplayable,
    /// The server asked, in its answer to this operation or to another one that shares its
    /// [`LoadControl`](crate::LoadControl), for a longer wait than the deadline or
    /// `max_retry_after` allows. What others were told is asked after the deadline.
    RetryAfterTooLong,
    /// Too little time is left before the deadline for a wait and a useful attempt.
    DeadlineTooClose,
    /// The circuit breaker is open, or half-open with all its permits out.
    BreakerOpen,
    /// The shared retry budget has no token left.
    BudgetExhausted,
    /// A layer of this crate around this operation, in whose attempt it was made, repeats it if it likes:
    /// there was nothing else against a retry. The only reason that asks for one.
    NestedLayer,
    /// As many attempts as the concurrency limit allows were under way until it was too late.
    ConcurrencyLimit,
}

impl StopReason {
    /// All of them, in this order.
    pub(crate) const ALL: [Self; 15] = [
        Self::InvalidInput,
        Self::Cancelled,
        Self::NotRetryable,
        Self::KeyExpired,
        Self::UnsafeToRepeat,
        Self::ServerVeto,
        Self::SpentBelow,
        Self::AttemptsExhausted,
        Self::BodyNotReplayable,
        Self::RetryAfterTooLong,
        Self::DeadlineTooClose,
        Self::BreakerOpen,
        Self::BudgetExhausted,
        Self::NestedLayer,
        Self::ConcurrencyLimit,
    ];

    /// Whether code around this layer must not send the operation again of its own accord: another
    /// send was refused to protect the service, by the server's wish, or because it could be a second
    /// order. A loop of your own around a client asks this before it goes round again.
    ///
    /// ```
    /// use reqwest_idempotent_retry::RetryErrorExt;
    ///
    /// fn may_go_round_again(error: &reqwest_middleware::Error) -> bool {
    ///     error.retry_error().is_none_or(|stopped| !stopped.stop().forbids_retry())
    /// }
    /// ```
    #[must_use]
    pub fn forbids_retry(self) -> bool {
        matches!(
            self,
            Self::Cancelled
                | Self::KeyExpired
                | Self::UnsafeToRepeat
                | Self::ServerVeto
                | Self::SpentBelow
                | Self::RetryAfterTooLong
                | Self::BreakerOpen
                | Self::BudgetExhausted
                | Self::ConcurrencyLimit
        )
    }
}

/// A stop, with the time after which another try may be let through, where that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stop {
    pub(crate) reason: StopReason,
    pub(crate) after: Option<Duration>,
}

impl From<StopReason> for Stop {
    fn from(reason: StopReason) -> Self {
        Self {
            reason,
            after: None,
        }
    }
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
            Self::SpentBelow => "used up by an operation within",
            Self::ConcurrencyLimit => "concurrency limit reached",
        })
    }
}
