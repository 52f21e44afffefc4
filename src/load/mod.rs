//! Load control: what the operations on one host share, host by host.

mod builder;
mod limiter;
mod snapshot;

use std::borrow::Cow;
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::Extensions;
use lru::LruCache;
use reqwest::Request;
use url::Position;

pub use self::builder::LoadControlBuilder;
pub(crate) use self::limiter::{Limiter, Permit};
pub use self::snapshot::LoadSnapshot;
use crate::policy::{CircuitBreaker, FirstSends, Pushback, RetryBudget, StopReason};

/// Load state per host, shared by every client that is given it: put one into your service's state.
///
/// Each host (or whatever [`key_by`](LoadControlBuilder::key_by) says: tenant, route, shard) has
///
/// * a retry **budget** of its own ([`RetryBudget::default`] unless set otherwise),
/// * a shared **pushback**: when it answers 429 or 503 with `Retry-After` to one operation, the
///   retries of all others wait at least as long, each with its own jitter on top,
/// * a circuit **breaker**, if one is set,
/// * a **concurrency limit**, if one is set,
/// * and counts of how operations ended: [`snapshot`](Self::snapshot).
///
/// # Memory
///
/// At most [`capacity`](LoadControlBuilder::capacity) keys are kept, 1,024 by default; the one that was
/// used least recently is forgotten for a new one, and starts afresh when it is seen again. Keys of
/// operations under way count as used now: one of them is only forgotten where all are in use. A key takes under 1 KiB with the map's share, beside its own
/// text and beside the events of a budget made by [`RetryBudget::window`].
///
/// # Which key?
///
/// The URL's host and port as [`snapshot`](Self::snapshot) wants them: `api.example`, or
/// `127.0.0.1:8080`. A port that is the scheme's own is left out, so `http` and `https` share their state.
///
/// ```
/// use std::sync::Arc;
/// use reqwest_idempotent_retry::{CircuitBreaker, LoadControl, RetryBudget, RetryMiddleware};
///
/// # fn main() -> Result<(), reqwest_idempotent_retry::InvalidInput> {
/// let load = Arc::new(
///     LoadControl::builder()
///         .budget(RetryBudget::builder().burst(20).build()?)
///         .breaker(CircuitBreaker::default())
///         .concurrency_limit(64)
///         .build()?,
/// );
/// let orders = RetryMiddleware::builder().load_control(load.clone()).build()?;
/// let search = RetryMiddleware::builder().load_control(load.clone()).max_attempts(2).build()?;
/// // … and at 3 a.m.:
/// for host in load.snapshots() {
///     println!("{host}");
/// }
/// # Ok(())
/// # }
/// ```
pub struct LoadControl {
    loads: Mutex<LruCache<Arc<str>, Arc<Load>>>,
    model: Model,
    key: Option<Arc<KeyOf>>,
}

type KeyOf = dyn Fn(&Request, &Extensions) -> Cow<'static, str> + Send + Sync;

/// What the state of each key is made after.
#[derive(Debug)]
struct Model {
    budget: Option<RetryBudget>,
    breaker: Option<CircuitBreaker>,
    first_sends: FirstSends,
    concurrency: Option<usize>,
    #[cfg(feature = "metrics")]
    key_metrics: bool,
}

impl fmt::Debug for LoadControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadControl")
            .field("keys", &self.len())
            .field("model", &self.model)
            .finish_non_exhaustive()
    }
}

impl LoadControl {
    /// The settings to make one from.
    pub fn builder() -> LoadControlBuilder {
        LoadControlBuilder::default()
    }

    fn with(model: Model, key: Option<Arc<KeyOf>>, capacity: NonZeroUsize) -> Self {
        // `LruCache::new` would take the memory of all keys at once.
        let mut loads = LruCache::unbounded();
        loads.resize(capacity);
        Self {
            loads: Mutex::new(loads),
            model,
            key,
        }
    }

    /// How many keys are kept at the moment.
    #[must_use]
    pub fn len(&self) -> usize {
        self.loads().len()
    }

    /// Whether no operation has gone through it yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The state of the key of this request, whose body need not be there any more.
    pub(crate) fn of(&self, request: &Request, extensions: &Extensions) -> Arc<Load> {
        match &self.key {
            Some(key) => self.load(&key(request, extensions)),
            None => self.load(host(request)),
        }
    }

    /// The state of this key, made if there is none.
    fn load(&self, key: &str) -> Arc<Load> {
        let mut loads = self.loads();
        if let Some(load) = loads.get(key) {
            return Arc::clone(load);
        }
        make_room(&mut loads);
        let load = Arc::new(self.model.load(key));
        loads.put(Arc::clone(&load.key), Arc::clone(&load));
        load
    }

    /// A panic elsewhere must not take the map with it: it is never left half changed.
    fn loads(&self) -> MutexGuard<'_, LruCache<Arc<str>, Arc<Load>>> {
        self.loads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Host and port as the URL has them, `api.example` or `127.0.0.1:8080`: never its credentials.
fn host(request: &Request) -> &str {
    &request.url()[Position::BeforeHost..Position::AfterPort]
}

/// Forgets the key that was used least recently, if there is no room for another. Those in use are put in
/// front as what they are, used now, so they are not looked at again soon. Where all are in use, one of
/// them is forgotten all the same.
fn make_room(loads: &mut LruCache<Arc<str>, Arc<Load>>) {
    if loads.len() < loads.cap().get() {
        return;
    }
    for left in (0..loads.len()).rev() {
        match loads.pop_lru() {
            Some((key, load)) if is_in_use(&load) && left > 0 => {
                loads.put(key, load);
            }
            _ => return,
        }
    }
}

fn is_in_use(load: &Arc<Load>) -> bool {
    Arc::strong_count(load) > 1
}

impl Model {
    fn load(&self, key: &str) -> Load {
        Load {
            key: key.into(),
            #[cfg(feature = "metrics")]
            shows_key: self.key_metrics,
            budget: self.budget.as_ref().map(RetryBudget::another),
            breaker: self.breaker.as_ref().map(CircuitBreaker::another),
            pushback: Pushback::new(self.first_sends),
            limiter: self.concurrency.map(Limiter::new),
            ended: AtomicU64::new(0),
            retries: AtomicU64::new(0),
            stops: Default::default(),
        }
    }
}

/// The state of one key.
#[derive(Debug)]
pub(crate) struct Load {
    pub(crate) key: Arc<str>,
    /// Whether metrics are to show it.
    #[cfg(feature = "metrics")]
    pub(crate) shows_key: bool,
    pub(crate) budget: Option<RetryBudget>,
    pub(crate) breaker: Option<CircuitBreaker>,
    pub(crate) pushback: Pushback,
    pub(crate) limiter: Option<Limiter>,
    ended: AtomicU64,
    retries: AtomicU64,
    /// In the order of [`StopReason::ALL`].
    stops: [AtomicU64; StopReason::ALL.len()],
}

impl Load {
    /// An operation has ended, for this reason, after so many attempts.
    pub(crate) fn count(&self, stop: Option<StopReason>, attempts: usize) {
        self.ended.fetch_add(1, Ordering::Relaxed);
        if let Some(retries @ 1..) = attempts.checked_sub(1) {
            self.retries.fetch_add(retries as u64, Ordering::Relaxed);
        }
        let reasons = StopReason::ALL.iter().zip(&self.stops);
        for (reason, count) in reasons {
            if Some(*reason) == stop {
                count.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}
