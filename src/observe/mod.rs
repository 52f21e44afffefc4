//! What an operation tells while it runs and when it ends: to `tracing`, to `metrics`, to an observer.

mod events;
#[cfg(feature = "metrics")]
pub mod metrics;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::Method;
use reqwest::Url;
use tracing::Span;

#[cfg(feature = "server")]
pub(crate) use self::events::malformed;
#[cfg(feature = "metrics")]
use self::metrics::Meters;
use crate::load::Load;
use crate::policy::{BreakerState, StopReason, Turned};
use crate::report::{Account, AttemptRecord, Failure, RetryReport};
use crate::settings::Settings;

/// Told of every operation of a client, for those who use neither `tracing` nor the `metrics` feature.
///
/// Called in the operation's span, between its steps: return at once, never block, never panic.
/// A dropped operation is told of as well, from within the drop.
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use reqwest_idempotent_retry::{RetryMiddleware, RetryObserver, RetryReport};
///
/// #[derive(Default)]
/// struct ExtraLoad(AtomicU64);
///
/// impl RetryObserver for ExtraLoad {
///     fn operation_ended(&self, report: &RetryReport) {
///         let retries = report.attempts().len().saturating_sub(1);
///         self.0.fetch_add(retries as u64, Ordering::Relaxed);
///     }
/// }
///
/// # fn main() -> Result<(), reqwest_idempotent_retry::InvalidInput> {
/// let extra = Arc::new(ExtraLoad::default());
/// let retry = RetryMiddleware::builder().observer(extra.clone()).build()?;
/// # Ok(())
/// # }
/// ```
pub trait RetryObserver: Send + Sync {
    /// An attempt has ended, or was abandoned.
    fn attempt_ended(&self, method: &Method, host: &str, attempt: &AttemptRecord) {
        let _ = (method, host, attempt);
    }

    /// A wait of this length begins before the next attempt.
    fn waiting(&self, method: &Method, host: &str, delay: Duration) {
        let _ = (method, host, delay);
    }

    /// An operation has ended: answered, stopped, or dropped.
    fn operation_ended(&self, report: &RetryReport) {
        let _ = report;
    }

    /// The end of an operation has turned the circuit breaker of this key.
    fn breaker_turned(&self, key: &str, state: BreakerState) {
        let _ = (key, state);
    }
}

/// Everybody who listens to one operation.
#[derive(Clone)]
pub(crate) struct Listeners {
    span: Span,
    observer: Option<Arc<dyn RetryObserver>>,
    #[cfg(feature = "metrics")]
    meters: Meters,
}

impl fmt::Debug for Listeners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listeners").finish_non_exhaustive()
    }
}

impl Listeners {
    pub(crate) fn of(settings: &Settings, method: &Method, url: &Url) -> Self {
        Self {
            span: events::span(method, url),
            observer: settings.observer.clone(),
            #[cfg(feature = "metrics")]
            meters: Meters::of(settings),
        }
    }

    /// The operation's span, for everything that happens in it.
    pub(crate) fn span(&self) -> Span {
        self.span.clone()
    }

    /// The last attempt of the account has.
    pub(crate) fn attempt_ended(&self, account: &Account) {
        let Some(record) = account.attempts.last() else {
            return;
        };
        self.span.in_scope(|| {
            events::attempt(account, record);
            if let Some(observer) = &self.observer {
                observer.attempt_ended(&account.method, &account.host, record);
            }
        });
        #[cfg(feature = "metrics")]
        self.meters.attempt(account);
    }

    pub(crate) fn waiting(&self, account: &Account, delay: Duration) {
        self.span.in_scope(|| {
            events::wait(account, delay);
            if let Some(observer) = &self.observer {
                observer.waiting(&account.method, &account.host, delay);
            }
        });
    }

    pub(crate) fn breaker_turned(&self, account: &Account, key: &str, turned: Turned) {
        self.span.in_scope(|| {
            events::breaker(&account.host, turned);
            if let Some(observer) = &self.observer {
                observer.breaker_turned(key, turned.state());
            }
        });
        #[cfg(feature = "metrics")]
        self.meters.breaker(turned);
    }

    pub(crate) fn ended(&self, account: &Account, load: Option<&Load>) {
        events::record(&self.span, account);
        self.span.in_scope(|| {
            events::stop(account);
            if let Some(observer) = &self.observer {
                observer.operation_ended(&RetryReport::from(account.clone()));
            }
        });
        if let Some(load) = load {
            load.count(account.stop, account.attempts.len());
        }
        #[cfg(feature = "metrics")]
        self.meters.end(account, load);
    }
}

fn failure_class(failure: Failure) -> &'static str {
    match failure {
        Failure::Connect => "connect",
        Failure::Timeout => "timeout",
        Failure::Connection => "connection",
        Failure::Refused => "refused",
        Failure::Redirect => "redirect",
        Failure::Request => "request",
        Failure::Body => "body",
        Failure::Layer => "layer",
        Failure::Cancelled => "cancelled",
    }
}

/// A stop reason as a label.
fn reason_label(reason: StopReason) -> &'static str {
    match reason {
        StopReason::InvalidInput => "invalid_input",
        StopReason::Cancelled => "cancelled",
        StopReason::NotRetryable => "not_retryable",
        StopReason::KeyExpired => "key_expired",
        StopReason::UnsafeToRepeat => "unsafe_to_repeat",
        StopReason::ServerVeto => "server_veto",
        StopReason::NestedLayer => "nested_layer",
        StopReason::SpentBelow => "spent_below",
        StopReason::AttemptsExhausted => "attempts_exhausted",
        StopReason::BodyNotReplayable => "body_not_replayable",
        StopReason::RetryAfterTooLong => "retry_after_too_long",
        StopReason::DeadlineTooClose => "deadline_too_close",
        StopReason::BreakerOpen => "breaker_open",
        StopReason::BudgetExhausted => "budget_exhausted",
        StopReason::ConcurrencyLimit => "concurrency_limit",
    }
}

/// The methods of RFC 9110 and PATCH; any other is `_OTHER`, as OpenTelemetry has it.
fn method_label(method: &Method) -> &'static str {
    const KNOWN: [(Method, &str); 9] = [
        (Method::GET, "GET"),
        (Method::HEAD, "HEAD"),
        (Method::POST, "POST"),
        (Method::PUT, "PUT"),
        (Method::DELETE, "DELETE"),
        (Method::PATCH, "PATCH"),
        (Method::OPTIONS, "OPTIONS"),
        (Method::TRACE, "TRACE"),
        (Method::CONNECT, "CONNECT"),
    ];
    let known = KNOWN.iter().find(|known| known.0 == *method);
    known.map_or("_OTHER", |known| known.1)
}
