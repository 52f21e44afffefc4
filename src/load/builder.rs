//! Settings of load control, checked once.

use std::borrow::Cow;
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;

use http::Extensions;
use reqwest::Request;
use tokio::sync::Semaphore;

use super::{KeyOf, LoadControl, Model};
use crate::invalid::InvalidInput;
use crate::policy::{CircuitBreaker, FirstSends, RetryBudget};

/// Hosts that a service calls are few; tenants and shards fit as well, in about a megabyte.
const DEFAULT_CAPACITY: usize = 1024;

/// Sets up a [`LoadControl`].
#[must_use]
pub struct LoadControlBuilder {
    budget: Option<RetryBudget>,
    breaker: Option<CircuitBreaker>,
    first_sends: FirstSends,
    concurrency: Option<usize>,
    capacity: usize,
    #[cfg(feature = "metrics")]
    key_metrics: bool,
    key: Option<Arc<KeyOf>>,
}

impl Default for LoadControlBuilder {
    fn default() -> Self {
        Self {
            budget: Some(RetryBudget::default()),
            breaker: None,
            first_sends: FirstSends::default(),
            concurrency: None,
            capacity: DEFAULT_CAPACITY,
            #[cfg(feature = "metrics")]
            key_metrics: false,
            key: None,
        }
    }
}

impl fmt::Debug for LoadControlBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadControlBuilder")
            .field("budget", &self.budget)
            .field("breaker", &self.breaker)
            .field("first_sends", &self.first_sends)
            .field("concurrency", &self.concurrency)
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}

impl LoadControlBuilder {
    /// Each key gets a budget of its own with the settings of this one, as it is at the start. Default:
    /// [`RetryBudget::default`]. A client that is given a budget itself
    /// ([`RetryMiddlewareBuilder::budget`](crate::RetryMiddlewareBuilder::budget)) pays from that
    /// instead.
    pub fn budget(mut self, like: RetryBudget) -> Self {
        self.budget = Some(like);
        self
    }

    /// No budget: retries are bounded by attempts, deadline, breaker and pushback.
    pub fn without_budget(mut self) -> Self {
        self.budget = None;
        self
    }

    /// Each key gets a circuit breaker of its own with the settings of this one. Default: none.
    pub fn breaker(mut self, like: CircuitBreaker) -> Self {
        self.breaker = Some(like);
        self
    }

    /// What becomes of first sends while a host wants to be left alone. Default: they pass; retries
    /// wait.
    pub fn pushback(mut self, first_sends: FirstSends) -> Self {
        self.first_sends = first_sends;
        self
    }

    /// At most so many attempts under way at once for each key, from their start to their response head
    /// (to the end of their body, where it is read within the attempt). Waits between attempts need
    /// no permit. Others wait in line until too little time is left before their deadline. Default: no
    /// limit.
    pub fn concurrency_limit(mut self, attempts: usize) -> Self {
        self.concurrency = Some(attempts);
        self
    }

    /// How many keys are kept. Default 1,024.
    pub fn capacity(mut self, keys: usize) -> Self {
        self.capacity = keys;
        self
    }

    /// Whether metrics show budget balance and breaker state of each key, with the key as a label.
    /// Default: no. Recorders keep every label that they have seen, so say yes only where keys are few.
    #[cfg(feature = "metrics")]
    pub fn key_metrics(mut self, show: bool) -> Self {
        self.key_metrics = show;
        self
    }

    /// What shares its state: operations with the same key do. Default: host and port of the URL.
    ///
    /// The request comes without its body. Choose a key that can take few values, and never a secret:
    /// snapshots show it.
    ///
    /// ```
    /// use reqwest_idempotent_retry::LoadControl;
    ///
    /// #[derive(Clone)]
    /// struct Tenant(String);
    ///
    /// let load = LoadControl::builder().key_by(|request, extensions| {
    ///     match extensions.get::<Tenant>() {
    ///         Some(Tenant(name)) => name.clone().into(),
    ///         None => request.url().host_str().unwrap_or_default().to_owned().into(),
    ///     }
    /// });
    /// ```
    pub fn key_by(
        mut self,
        key: impl Fn(&Request, &Extensions) -> Cow<'static, str> + Send + Sync + 'static,
    ) -> Self {
        self.key = Some(Arc::new(key));
        self
    }

    /// # Errors
    ///
    /// When the capacity is zero, or the concurrency limit is zero or over `usize::MAX >> 3`.
    pub fn build(self) -> Result<LoadControl, InvalidInput> {
        let Some(capacity) = NonZeroUsize::new(self.capacity) else {
            return Err(InvalidInput::new(
                "load_control.capacity",
                "must be at least 1",
            ));
        };
        let permits = 1..=Semaphore::MAX_PERMITS;
        if self
            .concurrency
            .is_some_and(|limit| !permits.contains(&limit))
        {
            return Err(InvalidInput::new(
                "load_control.concurrency_limit",
                "must be at least 1, and no more than can be counted",
            ));
        }
        let model = Model {
            budget: self.budget,
            breaker: self.breaker,
            first_sends: self.first_sends,
            concurrency: self.concurrency,
            #[cfg(feature = "metrics")]
            key_metrics: self.key_metrics,
        };
        Ok(LoadControl::with(model, self.key, capacity))
    }
}
