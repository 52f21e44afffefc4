//! What a middleware has been set to, checked.

use std::sync::Arc;

use crate::classify::Rules;
use crate::clock::Clock;
use crate::deadline::{Deadline, DeadlineScope};
use crate::key::KeyContract;
use crate::policy::{Limits, Pacing, RetryBudget};

/// The checked settings of a middleware.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) limits: Limits,
    pub(crate) pacing: Pacing,
    pub(crate) deadline: Option<Deadline>,
    pub(crate) scope: DeadlineScope,
    pub(crate) budget: Option<Arc<RetryBudget>>,
    pub(crate) contract: Option<KeyContract>,
    pub(crate) rules: Rules,
    pub(crate) buffer_request: Option<usize>,
    pub(crate) buffer_response: Option<usize>,
    pub(crate) send_tracking: bool,
    pub(crate) client_is_prepared: bool,
    pub(crate) clock: Clock,
    /// What a key is carried by where there is no contract.
    pub(crate) bare: KeyContract,
}

impl Settings {
    /// How a key is read and written, contract or not.
    pub(crate) fn key_header(&self) -> &KeyContract {
        self.contract.as_ref().unwrap_or(&self.bare)
    }
}
