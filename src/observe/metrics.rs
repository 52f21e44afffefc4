//! Metrics through the [`metrics`](https://docs.rs/metrics) facade, for whatever recorder is installed.
//!
//! Labels are of few values: `client` is the name given to the builder, `method` one of the known
//! methods or `_OTHER`, `class` a status class or a kind of failure, `reason` a stop reason. There are no
//! hosts among them, unless [`LoadControlBuilder::key_metrics`](crate::LoadControlBuilder::key_metrics)
//! asks for the `key`.
//!
//! | name | kind, unit | labels | counts |
//! |---|---|---|---|
//! | [`OPERATIONS`] | counter | `client`, `method`, `certainty` | operations that have ended |
//! | [`FIRST_SENDS`] | counter | `client`, `method` | first attempts |
//! | [`ATTEMPTS`] | counter | `client`, `class` | all attempts, by what they came to |
//! | [`RETRIES`] | counter | `client`, `class` | attempts beyond the first, by what the one before came to |
//! | [`STOPS`] | counter | `client`, `reason` | operations that ended without the answer that was wanted |
//! | [`UNKNOWN`] | counter | `client`, `method` | operations with an effect of which nobody knows whether it happened |
//! | [`BUDGET_REFUSALS`] | counter | `client` | retries refused for want of a token |
//! | [`BUDGET_BALANCE`] | gauge, tokens | `client` or `key` | what is left of a budget |
//! | [`BREAKER_TURNS`] | counter | `client`, `to` | breakers opened and closed |
//! | [`BREAKER_STATE`] | gauge | `key` | 0 closed, 1 half-open, 2 open, as of the last operation |
//! | [`WAITED`] | histogram, seconds | `client` | time of an operation with no attempt in the air |
//! | [`ELAPSED`] | histogram, seconds | `client` | time of an operation |
//! | [`MALFORMED`] | counter | `header` | remaining times of clients that could not be read |

use std::sync::Arc;
use std::time::Duration;

use ::metrics::{
    SharedString, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge,
    histogram,
};
#[cfg(feature = "server")]
use http::HeaderName;

use super::{failure_class, method_label, reason_label};
use crate::clock;
use crate::load::Load;
use crate::policy::{BreakerState, Certainty, RetryBudget, StopReason, Turned};
use crate::report::{Account, AttemptRecord};
use crate::settings::{Budget, Settings};

/// Operations that have ended.
pub const OPERATIONS: &str = "idempotent_retry_operations_total";
/// First attempts.
pub const FIRST_SENDS: &str = "idempotent_retry_first_sends_total";
/// All attempts.
pub const ATTEMPTS: &str = "idempotent_retry_attempts_total";
/// Attempts beyond the first.
pub const RETRIES: &str = "idempotent_retry_retries_total";
/// Operations that ended without the answer that was wanted.
pub const STOPS: &str = "idempotent_retry_stops_total";
/// Operations of which nobody knows whether they were carried out.
pub const UNKNOWN: &str = "idempotent_retry_unknown_outcomes_total";
/// Retries refused for want of a token.
pub const BUDGET_REFUSALS: &str = "idempotent_retry_budget_refusals_total";
/// What is left of a budget.
pub const BUDGET_BALANCE: &str = "idempotent_retry_budget_balance";
/// Circuit breakers opened and closed.
pub const BREAKER_TURNS: &str = "idempotent_retry_breaker_turns_total";
/// The state of a circuit breaker.
pub const BREAKER_STATE: &str = "idempotent_retry_breaker_state";
/// Time of an operation with no attempt in the air.
pub const WAITED: &str = "idempotent_retry_wait_seconds";
/// Time of an operation.
pub const ELAPSED: &str = "idempotent_retry_elapsed_seconds";
/// Remaining times of clients that could not be read.
pub const MALFORMED: &str = "idempotent_retry_malformed_timeouts_total";

/// Tells the installed recorder what each metric is. Call it once, after installing one.
pub fn describe() {
    describe_counter!(OPERATIONS, Unit::Count, "operations that have ended");
    describe_counter!(FIRST_SENDS, Unit::Count, "first attempts of operations");
    describe_counter!(ATTEMPTS, Unit::Count, "attempts, by what they came to");
    describe_counter!(
        RETRIES,
        Unit::Count,
        "attempts beyond the first, by what the one before came to"
    );
    describe_counter!(
        STOPS,
        Unit::Count,
        "operations that ended without the answer that was wanted, by reason"
    );
    describe_counter!(
        UNKNOWN,
        Unit::Count,
        "operations with an effect that may or may not have happened"
    );
    describe_counter!(
        BUDGET_REFUSALS,
        Unit::Count,
        "retries refused for want of a token"
    );
    describe_gauge!(BUDGET_BALANCE, Unit::Count, "tokens left in a retry budget");
    describe_counter!(
        BREAKER_TURNS,
        Unit::Count,
        "circuit breakers opened and closed"
    );
    describe_gauge!(
        BREAKER_STATE,
        "circuit breaker: 0 closed, 1 half-open, 2 open"
    );
    describe_histogram!(
        WAITED,
        Unit::Seconds,
        "time of an operation with no attempt in the air"
    );
    describe_histogram!(ELAPSED, Unit::Seconds, "time of an operation");
    describe_counter!(
        MALFORMED,
        Unit::Count,
        "remaining times of clients that could not be read"
    );
}

/// Where the figures of one client go.
#[derive(Clone)]
pub(super) struct Meters {
    client: SharedString,
    /// The budget that all operations of the client share.
    budget: Option<Arc<RetryBudget>>,
}

impl Meters {
    pub(super) fn of(settings: &Settings) -> Self {
        Self {
            client: settings.name.clone().into(),
            budget: match &settings.budget {
                Budget::One(budget) => Some(Arc::clone(budget)),
                Budget::OfKey | Budget::None => None,
            },
        }
    }

    fn client(&self) -> SharedString {
        self.client.clone()
    }

    /// The last attempt of `account` has ended.
    pub(super) fn attempt(&self, account: &Account) {
        let Some((record, earlier)) = account.attempts.split_last() else {
            return;
        };
        counter!(ATTEMPTS, "client" => self.client(), "class" => class(record)).increment(1);
        match earlier.last() {
            None => {
                let method = method_label(&account.method);
                counter!(FIRST_SENDS, "client" => self.client(), "method" => method).increment(1);
            }
            Some(before) => {
                counter!(RETRIES, "client" => self.client(), "class" => class(before)).increment(1);
            }
        }
    }

    pub(super) fn breaker(&self, turned: Turned) {
        let to = match turned {
            Turned::Open(_) => "open",
            Turned::Closed => "closed",
        };
        counter!(BREAKER_TURNS, "client" => self.client(), "to" => to).increment(1);
    }

    pub(super) fn end(&self, account: &Account, load: Option<&Load>) {
        let method = method_label(&account.method);
        let certainty = certainty_label(account.certainty);
        counter!(
            OPERATIONS,
            "client" => self.client(), "method" => method, "certainty" => certainty
        )
        .increment(1);
        if account.certainty == Certainty::Unknown && account.has_effect {
            counter!(UNKNOWN, "client" => self.client(), "method" => method).increment(1);
        }
        if let Some(reason) = account.stop {
            counter!(STOPS, "client" => self.client(), "reason" => reason_label(reason))
                .increment(1);
        }
        if account.stop == Some(StopReason::BudgetExhausted) {
            counter!(BUDGET_REFUSALS, "client" => self.client()).increment(1);
        }
        let in_the_air: Duration = account.attempts.iter().map(AttemptRecord::took).sum();
        let waited = account.elapsed.saturating_sub(in_the_air);
        histogram!(WAITED, "client" => self.client()).record(waited);
        histogram!(ELAPSED, "client" => self.client()).record(account.elapsed);
        if let Some(budget) = &self.budget {
            gauge!(BUDGET_BALANCE, "client" => self.client()).set(budget.balance());
        }
        if let Some(load) = load.filter(|load| load.shows_key) {
            gauges_of_key(load);
        }
    }
}

fn gauges_of_key(load: &Load) {
    let key = &load.key;
    if let Some(budget) = &load.budget {
        gauge!(BUDGET_BALANCE, "key" => Arc::clone(key)).set(budget.balance());
    }
    if let Some(breaker) = &load.breaker {
        let state = match breaker.at(clock::now()).state() {
            BreakerState::Closed => 0.0,
            BreakerState::HalfOpen => 1.0,
            BreakerState::Open => 2.0,
        };
        gauge!(BREAKER_STATE, "key" => Arc::clone(key)).set(state);
    }
}

#[cfg(feature = "server")]
pub(super) fn malformed(header: &HeaderName) {
    counter!(MALFORMED, "header" => header.as_str().to_owned()).increment(1);
}

/// The class of what an attempt came to, of few values: the kind of failure, or the class of its
/// status.
fn class(record: &AttemptRecord) -> &'static str {
    match (record.failure, record.status) {
        (Some(failure), _) => failure_class(failure),
        (None, Some(status)) => match status.as_u16() {
            ..200 => "1xx",
            200..300 => "2xx",
            300..400 => "3xx",
            400..500 => "4xx",
            500.. => "5xx",
        },
        (None, None) => "_OTHER",
    }
}

fn certainty_label(certainty: Certainty) -> &'static str {
    match certainty {
        Certainty::NotSent => "not_sent",
        Certainty::NotProcessed => "not_processed",
        Certainty::Unknown => "unknown",
        Certainty::Answered => "answered",
    }
}
