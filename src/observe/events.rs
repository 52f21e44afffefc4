//! `tracing`: a span for each operation, and events in it for each attempt, wait and stop.
//!
//! Names follow OpenTelemetry's conventions for HTTP clients where there is one. They carry method,
//! host, attempt, class, wait and reason. Never a path, query, header value, body or credential.

use std::time::Duration;

#[cfg(feature = "server")]
use http::HeaderName;
use http::Method;
use reqwest::Url;
use tracing::field::{self, Empty};
use tracing::{Span, debug, info, info_span, warn};

use super::{failure_class, method_label, reason_label};
use crate::policy::{Certainty, StopReason, Turned};
use crate::report::{Account, AttemptRecord};

/// What filters go by.
const TARGET: &str = "reqwest_idempotent_retry";

/// The span of an operation. Spans of layers below, one for each attempt, are its children.
pub(super) fn span(method: &Method, url: &Url) -> Span {
    let known = method_label(method);
    let is_known = known == method.as_str();
    info_span!(
        target: TARGET,
        "http.client.operation",
        otel.kind = "internal",
        otel.name = if is_known { known } else { "HTTP" },
        otel.status_code = Empty,
        http.request.method = known,
        http.request.method_original = (!is_known).then_some(method.as_str()),
        server.address = url.host_str().unwrap_or_default(),
        server.port = url.port_or_known_default(),
        http.request.resend_count = Empty,
        http.response.status_code = Empty,
        error.type = Empty,
        certainty = Empty,
    )
}

/// What is known of the operation only at its end.
pub(super) fn record(span: &Span, account: &Account) {
    if span.is_disabled() {
        return;
    }
    if let Some(retries @ 1..) = account.attempts.len().checked_sub(1) {
        span.record("http.request.resend_count", retries as u64);
    }
    let last = account.attempts.last();
    if let Some(status) = last.and_then(|last| last.status) {
        span.record("http.response.status_code", status.as_u16());
    }
    if let Some(error) = error_type(last, account.stop) {
        span.record("error.type", error);
        span.record("otel.status_code", "ERROR");
    }
    span.record("certainty", field::display(account.certainty));
}

pub(super) fn attempt(account: &Account, record: &AttemptRecord) {
    debug!(
        target: TARGET,
        {
            http.request.method = method_label(&account.method),
            server.address = &*account.host,
            http.request.resend_count = record.number.checked_sub(1).filter(|&resends| resends > 0),
            http.response.status_code = record.status.map(|status| status.as_u16()),
            error.type = error_type(Some(record), None),
            certainty = %record.certainty,
            took = ?record.took,
        },
        "attempt ended"
    );
}

pub(super) fn wait(account: &Account, delay: Duration) {
    let Account { method, host, .. } = account;
    let attempts = account.attempts.len();
    debug!(target: TARGET, %method, host, attempts, wait = ?delay, "waiting before the next attempt");
}

/// A circuit breaker has been turned by an operation on this host.
pub(super) fn breaker(host: &str, turned: Turned) {
    match turned {
        Turned::Open(wait) => warn!(target: TARGET, host, ?wait, "circuit breaker opened"),
        Turned::Closed => info!(target: TARGET, host, "circuit breaker closed"),
    }
}

/// The remaining time that a client has sent could not be read.
#[cfg(feature = "server")]
pub(crate) fn malformed(header: &HeaderName) {
    debug!(target: TARGET, %header, "malformed timeout ignored");
    #[cfg(feature = "metrics")]
    super::metrics::malformed(header);
}

/// The end of an operation that needed more than its first attempt, or did not get its way.
pub(super) fn stop(account: &Account) {
    let Account {
        method,
        host,
        certainty,
        elapsed,
        ..
    } = account;
    let attempts = account.attempts.len();
    match account.stop {
        None => debug!(
            target: TARGET, %method, host, attempts, ?elapsed, %certainty, "operation done"
        ),
        Some(reason) if is_worth_a_look(reason, account) => warn!(
            target: TARGET, %method, host, attempts, ?elapsed, %certainty, %reason,
            "operation stopped"
        ),
        Some(reason) => info!(
            target: TARGET, %method, host, attempts, ?elapsed, %certainty, %reason,
            "operation stopped"
        ),
    }
}

/// An outcome that somebody must confirm, or a service that is being protected from us.
fn is_worth_a_look(reason: StopReason, account: &Account) -> bool {
    (account.certainty == Certainty::Unknown && account.has_effect)
        || matches!(
            reason,
            StopReason::BreakerOpen | StopReason::BudgetExhausted | StopReason::ConcurrencyLimit
        )
}

/// OpenTelemetry's `error.type`: the failure's class, the status where that is an error, or the reason
/// for which nothing was sent.
fn error_type(last: Option<&AttemptRecord>, stop: Option<StopReason>) -> Option<&str> {
    match last {
        _ if stop == Some(StopReason::Cancelled) => stop.map(reason_label),
        None => stop.map(reason_label),
        Some(last) => match (last.failure, &last.status) {
            (Some(failure), _) => Some(failure_class(failure)),
            (None, Some(status)) if status.as_u16() >= 400 => Some(status.as_str()),
            _ => None,
        },
    }
}
