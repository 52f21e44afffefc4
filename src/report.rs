//! What is told of an operation: its attempts, why it ended, what is certain and what to do next.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::{Method, StatusCode};
use smallvec::SmallVec;

use crate::key::IdempotencyKey;
use crate::policy::{Certainty, StopReason};

/// The account of one operation.
///
/// In the extensions of a response after more than one attempt or a refused retry
/// ([`RetryResponseExt::retry_report`]), in every [`RetryError`](crate::RetryError), and in a
/// [`ReportHandle`] in any case. Cheap to clone. Its `Debug` names method and host, never path,
/// query, header values or bodies, and shortens the key.
#[derive(Clone)]
pub struct RetryReport(Arc<Account>);

#[derive(Clone, Debug)]
pub(crate) struct Account {
    pub(crate) method: Method,
    pub(crate) host: String,
    pub(crate) key: Option<IdempotencyKey>,
    pub(crate) stop: Option<StopReason>,
    pub(crate) certainty: Certainty,
    /// The first one in place, since most operations have no other.
    pub(crate) attempts: SmallVec<[AttemptRecord; 1]>,
    pub(crate) elapsed: Duration,
    pub(crate) retry_after: Option<Duration>,
    /// Whether the request asks for an effect, which could then have happened or not.
    pub(crate) has_effect: bool,
    /// Whether the caller's own repeat would be the same operation.
    pub(crate) repeats_alike: bool,
    /// An operation made within the last attempt must not be made once more.
    pub(crate) is_spent_below: bool,
    /// It could have its effect a second time.
    pub(crate) may_be_doubled_below: bool,
}

impl Account {
    /// Whether it has been repeated already, or must not be, or would be made a second time.
    pub(crate) fn is_spent(&self) -> bool {
        self.attempts.len() > 1
            || self.is_spent_below
            // Given up by who asked, which says nothing against asking again.
            || self.stop.is_some_and(|stop| {
                stop.forbids_retry() && stop != StopReason::Cancelled
            })
            || self.may_be_doubled()
    }

    /// Whether it may have had an effect that a repeat would have again. What was sent without a key, and
    /// went well, is its caller's to make again: such is the fetching of a token.
    pub(crate) fn may_be_doubled(&self) -> bool {
        let is_ours_to_count = self.key.is_some();
        let last = self.attempts.last().and_then(|last| last.status);
        let went_well = last.is_some_and(|status| status.is_success());
        let may_have_had_one =
            self.certainty == Certainty::Unknown || (is_ours_to_count && went_well);
        (self.has_effect && !self.repeats_alike && may_have_had_one) || self.may_be_doubled_below
    }
}

impl From<Account> for RetryReport {
    fn from(account: Account) -> Self {
        Self(Arc::new(account))
    }
}

impl RetryReport {
    /// The request's method.
    #[must_use]
    pub fn method(&self) -> &Method {
        &self.0.method
    }

    /// The host the request was for.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.0.host
    }

    /// The key under which the operation can be confirmed or repeated, if it has one.
    #[must_use]
    pub fn key(&self) -> Option<&IdempotencyKey> {
        self.0.key.as_ref()
    }

    /// Why there was no further attempt. `None`: the answer needed none.
    #[must_use]
    pub fn stop(&self) -> Option<StopReason> {
        self.0.stop
    }

    /// What is known of the whole operation, earlier attempts included.
    #[must_use]
    pub fn certainty(&self) -> Certainty {
        self.0.certainty
    }

    /// Every attempt, the first one first. Empty when nothing was sent for lack of time or input.
    #[must_use]
    pub fn attempts(&self) -> &[AttemptRecord] {
        &self.0.attempts
    }

    /// From the first check to the result.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.0.elapsed
    }

    /// The last answer's status, if the last attempt was answered.
    #[must_use]
    pub fn status(&self) -> Option<StatusCode> {
        self.0.attempts.last().and_then(AttemptRecord::status)
    }

    /// What the caller may do about it.
    #[must_use]
    pub fn next_step(&self) -> NextStep {
        let Account {
            certainty,
            stop,
            has_effect,
            ..
        } = *self.0;
        let later = NextStep::TryLater {
            after: self.0.retry_after,
        };
        let confirm = NextStep::ConfirmOutcome {
            key: self.0.key.clone(),
        };
        match certainty {
            // Not of this operation's own, but of one made within it.
            _ if stop == Some(StopReason::SpentBelow) && self.0.may_be_doubled_below => confirm,
            // Nothing was to be done, so there is nothing to confirm.
            Certainty::Unknown if !has_effect => later,
            Certainty::Unknown => confirm,
            Certainty::NotSent | Certainty::NotProcessed => match stop {
                Some(StopReason::NotRetryable) if self.is_another_layers_failure() => later,
                Some(StopReason::InvalidInput | StopReason::NotRetryable) => NextStep::FixRequest,
                _ => later,
            },
            Certainty::Answered => match self.status().map(|status| status.as_u16()) {
                None | Some(..300 | 303) => NextStep::Done,
                Some(300..400) if !has_effect => NextStep::Done,
                Some(300..400) => NextStep::FixRequest,
                Some(400..500) if stop == Some(StopReason::NotRetryable) => NextStep::FixRequest,
                Some(_) => later,
            },
        }
    }

    /// Whether a layer around the one that this report is of must not repeat the operation.
    pub(crate) fn is_spent(&self) -> bool {
        self.0.is_spent()
    }

    /// Whether a repeat could have an effect a second time.
    pub(crate) fn may_be_doubled(&self) -> bool {
        self.0.may_be_doubled()
    }

    /// The wait that a caller who tries again has to make.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    fn is_another_layers_failure(&self) -> bool {
        let last = self.0.attempts.last();
        last.is_some_and(|attempt| attempt.failure == Some(Failure::Layer))
    }
}

impl fmt::Debug for RetryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryReport")
            .field("method", &self.0.method)
            .field("host", &self.0.host)
            .field("stop", &self.0.stop)
            .field("certainty", &self.0.certainty)
            .field("key", &self.0.key)
            .field("elapsed", &self.0.elapsed)
            .field("attempts", &self.0.attempts)
            .finish()
    }
}

impl fmt::Display for RetryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Account {
            method,
            host,
            attempts,
            elapsed,
            certainty,
            ..
        } = &*self.0;
        write!(f, "{method} {host}: ")?;
        match self.0.stop {
            Some(reason) => write!(f, "{reason}")?,
            None => f.write_str("done")?,
        }
        write!(
            f,
            " after {} attempt(s) in {elapsed:?}; {certainty}",
            attempts.len()
        )?;
        match (&self.0.key, certainty) {
            (Some(key), Certainty::Unknown) => write!(f, ", confirm it with key {key}"),
            _ => Ok(()),
        }
    }
}

/// What to do with the result of an operation: never just "failed".
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NextStep {
    /// Nothing: it was carried out.
    Done,
    /// It was refused or sent elsewhere (a redirect that was not followed), and the same request would
    /// be again.
    FixRequest,
    /// It may have been carried out. Look it up, or send the same request with the same key; never
    /// send it as a new operation.
    ConfirmOutcome {
        /// The key to ask with. Without one, only the service's own records can tell.
        key: Option<IdempotencyKey>,
    },
    /// It may be sent again later: it was not carried out, or it asks for no effect.
    TryLater {
        /// The wait that the server asked for, counted from its answer, or the time until the circuit
        /// breaker may let it through.
        after: Option<Duration>,
    },
}

/// One attempt as it went.
#[derive(Clone, Debug)]
pub struct AttemptRecord {
    pub(crate) number: u32,
    pub(crate) waited: Duration,
    pub(crate) started_at: Duration,
    pub(crate) took: Duration,
    pub(crate) limit: Option<Duration>,
    pub(crate) status: Option<StatusCode>,
    pub(crate) failure: Option<Failure>,
    pub(crate) certainty: Certainty,
}

impl AttemptRecord {
    /// 1 for the first.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The wait that was planned before it; zero for the first, unless first sends wait while a host
    /// pushes back.
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// Its start, counted from the start of the operation.
    #[must_use]
    pub fn started_at(&self) -> Duration {
        self.started_at
    }

    /// From its start to its response head or failure.
    #[must_use]
    pub fn took(&self) -> Duration {
        self.took
    }

    /// The longest it was allowed to take. `None`: no limit.
    #[must_use]
    pub fn limit(&self) -> Option<Duration> {
        self.limit
    }

    /// The status of its answer, if there was one.
    #[must_use]
    pub fn status(&self) -> Option<StatusCode> {
        self.status
    }

    /// How it failed, if there was no answer, or not the whole of it.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        self.failure
    }

    /// What this attempt alone proves.
    #[must_use]
    pub fn certainty(&self) -> Certainty {
        self.certainty
    }
}

/// How an attempt failed that got no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Failure {
    /// No connection: refused, name not resolved, TLS not agreed.
    Connect,
    /// The attempt's own limit, or a timeout of the client below.
    Timeout,
    /// The connection broke, or what came was not HTTP.
    Connection,
    /// The server refused the stream before any work (HTTP/2).
    Refused,
    /// A redirect could not be followed.
    Redirect,
    /// The request could not be built or written.
    Request,
    /// It was answered, but the answer's body broke off or was not there in time (only where
    /// responses are buffered).
    Body,
    /// Another middleware failed.
    Layer,
    /// The caller cancelled it, or dropped the future.
    Cancelled,
}

/// A slot that receives key and report whatever becomes of the operation: a request extension.
///
/// For callers who may drop the future, read the body late, or use `error_for_status`, which
/// throws the response's extensions away. Clones share the slot.
///
/// ```
/// # async fn order(client: reqwest_middleware::ClientWithMiddleware) {
/// use std::time::Duration;
/// use reqwest_idempotent_retry::{Certainty, ReportHandle};
///
/// let handle = ReportHandle::new();
/// let send = client.post("http://localhost/orders").with_extension(handle.clone()).send();
/// if tokio::time::timeout(Duration::from_secs(1), send).await.is_err() {
///     let report = handle.report().expect("the operation has ended");
///     assert_ne!(report.certainty(), Certainty::Answered);
/// }
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct ReportHandle(Arc<Mutex<Slot>>);

#[derive(Debug, Default)]
struct Slot {
    key: Option<IdempotencyKey>,
    report: Option<RetryReport>,
}

impl ReportHandle {
    /// An empty slot.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The operation's key, from before its first send on.
    #[must_use]
    pub fn key(&self) -> Option<IdempotencyKey> {
        self.with(|slot| slot.key.clone())
    }

    /// The report, once the operation has ended or its future has been dropped.
    #[must_use]
    pub fn report(&self) -> Option<RetryReport> {
        self.with(|slot| slot.report.clone())
    }

    pub(crate) fn begin(&self, key: Option<&IdempotencyKey>) {
        self.with(|slot| {
            *slot = Slot {
                key: key.cloned(),
                report: None,
            }
        });
    }

    pub(crate) fn finish(&self, report: RetryReport) {
        self.with(|slot| slot.report = Some(report));
    }

    fn with<T>(&self, f: impl FnOnce(&mut Slot) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Reads what this crate has left in a response.
pub trait RetryResponseExt: sealed::Sealed {
    /// The report: there after more than one attempt, and where a retry was refused.
    fn retry_report(&self) -> Option<&RetryReport>;

    /// The key of a keyed operation, also after a single attempt.
    fn idempotency_key(&self) -> Option<&IdempotencyKey>;
}

impl RetryResponseExt for reqwest::Response {
    fn retry_report(&self) -> Option<&RetryReport> {
        self.extensions().get()
    }

    fn idempotency_key(&self) -> Option<&IdempotencyKey> {
        self.extensions().get()
    }
}

pub(crate) mod sealed {
    /// Keeps extension traits ours, so that they may grow.
    pub trait Sealed {}
    impl Sealed for reqwest::Response {}
    impl Sealed for reqwest_middleware::Error {}
}
