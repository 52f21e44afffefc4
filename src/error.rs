//! The error of an operation that ended without an answer to hand on.

use std::error::Error as StdError;
use std::fmt;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};

use crate::invalid::InvalidInput;
use crate::key::IdempotencyKey;
use crate::policy::{Certainty, StopReason};
use crate::report::{NextStep, RetryReport, sealed};
use crate::response_body::IncompleteBody;

/// An operation has ended without a response: what is known of it, and why.
///
/// Comes as [`reqwest_middleware::Error::Middleware`]; [`RetryErrorExt::retry_error`] finds it.
/// `source()` leads to the last attempt's failure, down to the [`reqwest::Error`] without its URL;
/// the error of another layer is handed on as it is, with whatever that layer puts into it.
/// `Display` and `Debug` show method and host, and shorten the key.
///
/// ```
/// use reqwest_idempotent_retry::{NextStep, RetryErrorExt};
///
/// fn tell(error: &reqwest_middleware::Error) -> String {
///     let Some(stopped) = error.retry_error() else {
///         return "not sent by the retry layer".into();
///     };
///     match stopped.next_step() {
///         NextStep::FixRequest => "refused: change the request".into(),
///         NextStep::ConfirmOutcome { key: Some(key) } => format!("unknown: look up {}", key.as_str()),
///         NextStep::ConfirmOutcome { key: None } => "unknown: ask the service".into(),
///         NextStep::TryLater { after } => format!("not carried out: later ({after:?})"),
///         other => format!("{other:?}"),
///     }
/// }
/// ```
pub struct RetryError {
    report: RetryReport,
    last_answer: Option<LastAnswer>,
    cause: Option<Cause>,
}

/// The failure of the last attempt that failed, or the reason for which none was made.
#[derive(Debug)]
pub(crate) enum Cause {
    Invalid(InvalidInput),
    Timeout(AttemptTimeout),
    Transport(reqwest::Error),
    Incomplete(IncompleteBody),
    Layer(reqwest_middleware::Error),
}

impl From<reqwest_middleware::Error> for Cause {
    fn from(error: reqwest_middleware::Error) -> Self {
        match error {
            reqwest_middleware::Error::Reqwest(error) => Self::Transport(error.without_url()),
            layer @ reqwest_middleware::Error::Middleware(_) => Self::Layer(layer),
        }
    }
}

/// The request's [`BodyFactory`](crate::BodyFactory) has failed, so there was nothing to send.
#[derive(Debug, thiserror::Error)]
#[error("the request body could not be made")]
pub(crate) struct BodyNotMade(#[source] pub(crate) Box<dyn StdError + Send + Sync>);

/// An attempt has reached its time limit without a response head.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("no response head within the attempt's time limit")]
pub(crate) struct AttemptTimeout;

impl RetryError {
    pub(crate) fn new(
        report: RetryReport,
        last_answer: Option<LastAnswer>,
        cause: Option<Cause>,
    ) -> Self {
        Self {
            report,
            last_answer,
            cause,
        }
    }

    /// The whole account.
    #[must_use]
    pub fn report(&self) -> &RetryReport {
        &self.report
    }

    /// Why no further attempt was made.
    #[must_use]
    pub fn stop(&self) -> StopReason {
        // An operation without a stop reason ends with a response.
        self.report.stop().unwrap_or(StopReason::NotRetryable)
    }

    /// What is known of the whole operation.
    #[must_use]
    pub fn certainty(&self) -> Certainty {
        self.report.certainty()
    }

    /// The key to confirm or repeat the operation with.
    #[must_use]
    pub fn key(&self) -> Option<&IdempotencyKey> {
        self.report.key()
    }

    /// What the caller may do about it.
    #[must_use]
    pub fn next_step(&self) -> NextStep {
        self.report.next_step()
    }

    /// The last answer that was had, and given up for a retry that then did not happen or failed.
    #[must_use]
    pub fn last_answer(&self) -> Option<&LastAnswer> {
        self.last_answer.as_ref()
    }

    /// The status of [`last_answer`](Self::last_answer).
    #[must_use]
    pub fn status(&self) -> Option<StatusCode> {
        self.last_answer.as_ref().map(LastAnswer::status)
    }

    /// Whether time ran out: the deadline, or the limit of the last attempt.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(
            self.stop(),
            StopReason::DeadlineTooClose | StopReason::ConcurrencyLimit
        ) || match &self.cause {
            Some(Cause::Timeout(_)) => true,
            Some(Cause::Transport(error)) => error.is_timeout(),
            Some(Cause::Incomplete(error)) => error.is_timeout(),
            _ => false,
        }
    }

    /// Whether the last attempt got no connection.
    #[must_use]
    pub fn is_connect(&self) -> bool {
        matches!(&self.cause, Some(Cause::Transport(error)) if error.is_connect())
    }
}

impl fmt::Display for RetryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.report, f)
    }
}

impl fmt::Debug for RetryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryError")
            .field("report", &self.report)
            .field("last_answer", &self.last_answer)
            .finish_non_exhaustive()
    }
}

impl StdError for RetryError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self.cause.as_ref()? {
            Cause::Invalid(error) => Some(error),
            Cause::Timeout(error) => Some(error),
            Cause::Transport(error) => Some(error),
            Cause::Incomplete(error) => Some(error),
            Cause::Layer(reqwest_middleware::Error::Middleware(error)) => Some(&**error),
            Cause::Layer(error) => Some(error),
        }
    }
}

/// An answer that was given up for a retry.
#[derive(Clone)]
pub struct LastAnswer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Option<Bytes>,
}

impl LastAnswer {
    /// Its status.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Its headers.
    #[must_use]
    pub fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// Its body, if it was read to its end: at most 64 KiB, within 50 ms.
    #[must_use]
    pub fn body(&self) -> Option<&Bytes> {
        self.body.as_ref()
    }
}

impl fmt::Debug for LastAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LastAnswer")
            .field("status", &self.status)
            .field("body_length", &self.body.as_ref().map(Bytes::len))
            .finish_non_exhaustive()
    }
}

/// Finds this crate's error, and the one at the root, in what a middleware client returns.
pub trait RetryErrorExt: sealed::Sealed {
    /// The [`RetryError`] that the retry layer ended the operation with.
    fn retry_error(&self) -> Option<&RetryError>;

    /// The error of the HTTP client below, however it is wrapped.
    fn root(&self) -> Option<&reqwest::Error>;
}

impl RetryErrorExt for reqwest_middleware::Error {
    fn retry_error(&self) -> Option<&RetryError> {
        match self {
            Self::Middleware(error) => error.chain().find_map(|cause| {
                cause
                    .downcast_ref()
                    .or_else(|| wrapped(cause)?.retry_error())
            }),
            Self::Reqwest(_) => None,
        }
    }

    fn root(&self) -> Option<&reqwest::Error> {
        match self {
            Self::Middleware(error) => error
                .chain()
                .find_map(|cause| cause.downcast_ref().or_else(|| wrapped(cause)?.root())),
            Self::Reqwest(error) => Some(error),
        }
    }
}

/// Another layer has put a middleware error into its own. That type is transparent: its `source()`
/// leaves out the very error that it stands for.
fn wrapped<'e>(cause: &'e (dyn StdError + 'static)) -> Option<&'e reqwest_middleware::Error> {
    cause.downcast_ref()
}
