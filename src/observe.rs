//! `tracing` events of this crate's own target: one per attempt, wait and stop.
//!
//! They carry method, host, attempt number, class, wait and reason. Never a path, query, header
//! value, body or credential.

use std::time::Duration;

use http::Method;
use tracing::{debug, info, warn};

use crate::policy::{Certainty, StopReason, Turned};
use crate::report::{Account, AttemptRecord};

pub(crate) fn attempt(method: &Method, host: &str, record: &AttemptRecord) {
    debug!(
        %method,
        host,
        attempt = record.number,
        status = record.status.map(|status| status.as_u16()),
        failure = record.failure.map(tracing::field::debug),
        certainty = %record.certainty,
        took = ?record.took,
        "attempt ended"
    );
}

pub(crate) fn wait(method: &Method, host: &str, attempts: usize, delay: Duration) {
    debug!(%method, host, attempts, wait = ?delay, "waiting before the next attempt");
}

/// A circuit breaker has been turned by an operation on this host.
pub(crate) fn breaker(host: &str, turned: Turned) {
    match turned {
        Turned::Open(wait) => warn!(host, ?wait, "circuit breaker opened"),
        Turned::Closed => info!(host, "circuit breaker closed"),
    }
}

/// The end of an operation that needed more than its first attempt, or did not get its way.
pub(crate) fn stop(account: &Account) {
    let Account {
        method,
        host,
        certainty,
        elapsed,
        ..
    } = account;
    let attempts = account.attempts.len();
    match account.stop {
        None => debug!(%method, host, attempts, ?elapsed, %certainty, "operation done"),
        Some(reason) if is_worth_a_look(reason, *certainty) => {
            warn!(%method, host, attempts, ?elapsed, %certainty, %reason, "operation stopped");
        }
        Some(reason) => {
            info!(%method, host, attempts, ?elapsed, %certainty, %reason, "operation stopped");
        }
    }
}

/// An outcome that somebody must confirm, or a service that is being protected from us.
fn is_worth_a_look(reason: StopReason, certainty: Certainty) -> bool {
    certainty == Certainty::Unknown
        || matches!(
            reason,
            StopReason::BreakerOpen | StopReason::BudgetExhausted | StopReason::ConcurrencyLimit
        )
}
