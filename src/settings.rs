//! What a middleware has been set to, checked.

use std::fmt;
use std::sync::Arc;

use http::HeaderName;

use crate::classify::Rules;
use crate::clock::Clock;
use crate::deadline::{Deadline, DeadlineScope};
use crate::key::KeyContract;
use crate::load::{Load, LoadControl};
use crate::observe::RetryObserver;
use crate::policy::{Limits, Pacing, RetryBudget, Terms};
use crate::timeout_header::TimeoutHeader;

/// The checked settings of a middleware.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) limits: Limits,
    pub(crate) pacing: Pacing,
    pub(crate) deadline: Option<Deadline>,
    pub(crate) scope: DeadlineScope,
    pub(crate) budget: Budget,
    pub(crate) load: Option<Arc<LoadControl>>,
    pub(crate) contract: Option<KeyContract>,
    pub(crate) rules: Rules,
    pub(crate) buffer_request: Option<usize>,
    pub(crate) buffer_response: Option<usize>,
    pub(crate) send_tracking: bool,
    pub(crate) client_is_prepared: bool,
    pub(crate) attempt_header: Option<HeaderName>,
    pub(crate) max_attempts_header: Option<HeaderName>,
    pub(crate) timeout_header: Option<TimeoutHeader>,
    pub(crate) sidecar_retries: bool,
    pub(crate) observer: Option<Arc<dyn RetryObserver>>,
    #[cfg(feature = "metrics")]
    pub(crate) name: std::borrow::Cow<'static, str>,
    pub(crate) clock: Clock,
    /// What a key is carried by where there is no contract.
    pub(crate) bare: KeyContract,
}

/// Where retries are paid from.
#[derive(Clone, Debug)]
pub(crate) enum Budget {
    /// The budget of the operation's key.
    OfKey,
    One(Arc<RetryBudget>),
    None,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("limits", &self.limits)
            .field("pacing", &self.pacing)
            .field("deadline", &self.deadline)
            .field("budget", &self.budget)
            .field("load", &self.load)
            .field("contract", &self.contract)
            .field("rules", &self.rules)
            .field("client_is_prepared", &self.client_is_prepared)
            .finish_non_exhaustive()
    }
}

impl Settings {
    /// What an operation must get past whose key has this load.
    pub(crate) fn terms<'t>(&'t self, load: Option<&'t Load>) -> Terms<'t> {
        Terms {
            pacing: &self.pacing,
            pushback: load.map(|load| &load.pushback),
            breaker: load.and_then(|load| load.breaker.as_ref()),
            is_within_a_probe: false,
            budget: match &self.budget {
                Budget::OfKey => load.and_then(|load| load.budget.as_ref()),
                Budget::One(budget) => Some(budget),
                Budget::None => None,
            },
        }
    }

    /// How a key is read and written, contract or not.
    pub(crate) fn key_header(&self) -> &KeyContract {
        self.contract.as_ref().unwrap_or(&self.bare)
    }
}
