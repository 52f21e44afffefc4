//! The circuit breaker: from the ends of operations to whether more load may be sent.

mod state;
mod tally;

use std::time::{Duration, Instant};

use self::state::State;
pub(crate) use self::state::Turned;
pub use self::state::{BreakerSnapshot, BreakerState};
use self::tally::Ratio;
use super::{Backoff, Health};
use crate::invalid::InvalidInput;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard, PoisonError};

/// A circuit breaker: after many failed operations it stops retries for a while, then lets a few
/// through to see whether the service is back.
///
/// Give it to [`LoadControlBuilder::breaker`](crate::LoadControlBuilder::breaker): each key (each
/// host, by default) then has one of its own with these settings.
///
/// # What it gates
///
/// By default **retries only**: first sends pass whatever its state. A breaker on all traffic turns
/// a partial outage into a larger one: with one of three shards down, where 67 % of the callers could
/// be served, this one would serve 36 %, and one that counts attempts 4 % (`examples/storm`).
/// [`gate_first_sends`](CircuitBreakerBuilder::gate_first_sends)
/// is for services that need all load taken off them to recover; a refused first send is an error,
/// *never sent*, with [`NextStep::TryLater`](crate::NextStep::TryLater).
///
/// # What it counts
///
/// Operations, not attempts, by how they ended:
///
/// | the operation ended with | counts as |
/// |---|---|
/// | 1xx to 3xx | success |
/// | 5xx, or any status that is retryable (429 and 408 among them) | failure |
/// | no connection, an attempt's time limit, a broken connection | failure |
/// | any other 4xx: the request was at fault | nothing |
/// | never sent for a local reason: limits, deadline, body, no socket left, another layer's error | nothing |
/// | the caller's cancel, or a dropped future | nothing |
/// | an answer from another host, after a redirect | nothing |
///
/// # States
///
/// *Closed* until failures trip it, *open* for a time that grows with each trip in a row and is
/// drawn at random so that clients do not return together, then *half-open*: a few retries get a
/// permit. A success closes it, a failure opens it for longer. Only operations whose last attempt
/// began in the present state are believed, so that a straggler from before an outage neither closes
/// nor opens anything. While it gates retries only, first sends that began half-open are believed too.
///
/// An operation keeps its permit to its end, through a backoff too: with one permit, a probe that fails
/// is not repeated. What is made within its attempt is part of the probe. A permit that is not returned (its future is neither dropped nor polled) expires, and goes to
/// another; should its operation end after all while the breaker is still half-open, it is believed.
///
/// ```
/// use std::time::Duration;
/// use reqwest_idempotent_retry::{Backoff, CircuitBreaker, LoadControl};
///
/// # fn main() -> Result<(), reqwest_idempotent_retry::InvalidInput> {
/// let breaker = CircuitBreaker::builder()
///     .failure_ratio(0.5, 20, Duration::from_secs(10))   // half of at least 20 in 10 s
///     .open_for(Backoff::equal_jitter(Duration::from_secs(1), Duration::from_secs(60)))
///     .build()?;
/// let load = LoadControl::builder().breaker(breaker).build()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct CircuitBreaker {
    rules: Rules,
    state: Mutex<State>,
    /// What of the state can be seen without its lock.
    seen: AtomicU64,
}

/// A closed breaker as it is seen: `epoch << 2 | CLOSED`, with `CALM` where a success changes nothing.
/// Zero: closed it is not. Written with the lock held, so that it never shows what never was.
const CLOSED: u64 = 1;
const CALM: u64 = 2;

/// Failures in a row after which it opens: more than the attempts of one operation, few enough to
/// notice a dead host within seconds.
const DEFAULT_CONSECUTIVE: u32 = 5;

/// The first open time, about that of a restart.
const DEFAULT_OPEN: Duration = Duration::from_secs(1);

/// The longest open time: a service that has come back is noticed within a minute.
const DEFAULT_LONGEST_OPEN: Duration = Duration::from_secs(60);

/// One request tells as much as many whether a service is back, and costs it least.
const DEFAULT_PERMITS: u32 = 1;

/// More than most attempts take, so that a permit is only taken away from those who are gone.
const DEFAULT_PERMIT_TIMEOUT: Duration = Duration::from_secs(30);

/// The settings, checked.
#[derive(Clone, Debug)]
struct Rules {
    consecutive: Option<u32>,
    ratio: Option<Ratio>,
    open: Backoff,
    permits: u32,
    permit_timeout: Duration,
    gates_first_sends: bool,
}

/// The breaker is open, or its permits are out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    /// Time until it is half-open; `None` where it already is.
    pub(crate) after: Option<Duration>,
}

impl Default for CircuitBreaker {
    /// 5 failures in a row, open for 0.5 to 1 s at first and 30 to 60 s at most, one permit.
    fn default() -> Self {
        Self::with(CircuitBreakerBuilder::default().rules())
    }
}

impl CircuitBreaker {
    /// The settings to make one from.
    pub fn builder() -> CircuitBreakerBuilder {
        CircuitBreakerBuilder::default()
    }

    fn with(rules: Rules) -> Self {
        let state = State::new(rules.ratio);
        Self {
            rules,
            seen: AtomicU64::new(state.seen()),
            state: Mutex::new(state),
        }
    }

    /// Another one with the same settings, closed.
    pub(crate) fn another(&self) -> Self {
        Self::with(self.rules.clone())
    }

    /// Whether an attempt could start now. Takes no permit.
    pub(crate) fn check(&self, now: Instant, is_first: bool) -> Result<(), Refused> {
        if self.lets_pass(is_first) || self.closed().is_some() {
            return Ok(());
        }
        self.state().check(&self.rules, now)
    }

    /// An attempt is about to start.
    pub(crate) fn enter(&self, now: Instant, is_first: bool) -> Result<Pass<'_>, Refused> {
        if let Some(epoch) = self.closed() {
            return Ok(Pass {
                breaker: self,
                epoch,
                permit: None,
            });
        }
        let mut state = self.state();
        let permit = match self.lets_pass(is_first) {
            true => None,
            false => state.take_permit(&self.rules, now)?,
        };
        Ok(Pass {
            breaker: self,
            epoch: state.epoch(now),
            permit,
        })
    }

    /// An attempt is about to start that is part of another one, which has a permit.
    pub(super) fn accompany(&self, now: Instant) -> Pass<'_> {
        Pass {
            breaker: self,
            epoch: self.state().epoch(now),
            permit: None,
        }
    }

    /// Figures as of `now`.
    pub(crate) fn at(&self, now: Instant) -> BreakerSnapshot {
        self.state().snapshot(now)
    }

    fn lets_pass(&self, is_first: bool) -> bool {
        is_first && !self.rules.gates_first_sends
    }

    /// The phase, if it is a closed one. It turns to another one with the end of an operation only.
    fn closed(&self) -> Option<u64> {
        let seen = self.seen.load(Ordering::Acquire);
        (seen & CLOSED != 0).then_some(seen >> 2)
    }

    /// Whether a success of an operation that began in this phase is nothing new.
    fn is_calm_in(&self, epoch: u64) -> bool {
        self.seen.load(Ordering::Acquire) == epoch << 2 | CLOSED | CALM
    }

    /// A panic elsewhere must not take the breaker with it: every update leaves a whole state behind.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Leave for one attempt, with a half-open breaker's permit where one was needed. Dropped, the
/// permit goes back; [`settle`](Self::settle) tells the breaker how the operation ended as well.
#[derive(Debug)]
#[must_use = "a pass that is dropped gives no evidence"]
pub(crate) struct Pass<'b> {
    breaker: &'b CircuitBreaker,
    /// The state of the breaker that the attempt began in.
    epoch: u64,
    permit: Option<u64>,
}

impl<'b> Pass<'b> {
    /// The half-open breaker that it holds a permit of.
    pub(crate) fn is_probe_of(&self) -> Option<&'b CircuitBreaker> {
        self.permit.map(|_| self.breaker)
    }
}

impl Pass<'_> {
    /// The operation ended with this attempt. Returns what that has made of the breaker, if it has
    /// changed. `draw` is a uniform draw from `[0, 1)`.
    pub(crate) fn settle(
        self,
        health: Health,
        now: Instant,
        draw: impl FnOnce() -> f64,
    ) -> Option<Turned> {
        let Self { breaker, epoch, .. } = &self;
        if health == Health::Good && breaker.is_calm_in(*epoch) {
            return None;
        }
        let mut state = breaker.state();
        let turned = state.record(&breaker.rules, *epoch, health, now, draw);
        breaker.seen.store(state.seen(), Ordering::Release);
        turned
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if let Some(permit) = self.permit {
            self.breaker.state().give_back(permit);
        }
    }
}

/// Settings for a [`CircuitBreaker`].
#[derive(Clone, Debug)]
#[must_use]
pub struct CircuitBreakerBuilder {
    consecutive: Option<u32>,
    ratio: Option<Ratio>,
    open: Backoff,
    permits: u32,
    permit_timeout: Duration,
    gates_first_sends: bool,
}

impl Default for CircuitBreakerBuilder {
    fn default() -> Self {
        Self {
            consecutive: None,
            ratio: None,
            open: Backoff::equal_jitter(DEFAULT_OPEN, DEFAULT_LONGEST_OPEN),
            permits: DEFAULT_PERMITS,
            permit_timeout: DEFAULT_PERMIT_TIMEOUT,
            gates_first_sends: false,
        }
    }
}

impl CircuitBreakerBuilder {
    /// Opens after so many failed operations in a row: quick to see a total outage. Default 5, unless
    /// [`failure_ratio`](Self::failure_ratio) is set; with both set, either opens it.
    pub fn consecutive_failures(mut self, operations: u32) -> Self {
        self.consecutive = Some(operations);
        self
    }

    /// Opens when at least `ratio` of the operations that ended in the last `span` have failed, and
    /// there were at least `minimum_volume` of them: sees a partial outage. Counted in tenths of the
    /// span, and judged at each failure. Default: off.
    pub fn failure_ratio(mut self, ratio: f64, minimum_volume: u32, span: Duration) -> Self {
        self.ratio = Some(Ratio {
            ratio,
            minimum_volume,
            span,
        });
        self
    }

    /// How long it stays open: the first wait of this backoff, and the next one for each time that it
    /// opens again without having closed. Default: equal jitter, base 1 s, cap 60 s.
    pub fn open_for(mut self, backoff: Backoff) -> Self {
        self.open = backoff;
        self
    }

    /// How many may be under way at once while it is half-open. Default 1.
    pub fn half_open_permits(mut self, permits: u32) -> Self {
        self.permits = permits;
        self
    }

    /// After this time a permit that was not returned is given to another. Default 30 s; choose more
    /// than an attempt may take.
    pub fn permit_timeout(mut self, longest: Duration) -> Self {
        self.permit_timeout = longest;
        self
    }

    /// Whether first sends need its leave too. Default: no, it gates retries only.
    ///
    /// A success closes it. Where a service answers nothing but definite 4xx, nothing does: then no more
    /// pass at once than there are permits.
    pub fn gate_first_sends(mut self, gate: bool) -> Self {
        self.gates_first_sends = gate;
        self
    }

    /// # Errors
    ///
    /// Names the setting that cannot be used: a count of zero, a ratio that is not over 0 and at most
    /// 1, a span under 10 ms or over an hour, no permits, a zero permit timeout, or an invalid backoff.
    pub fn build(self) -> Result<CircuitBreaker, InvalidInput> {
        let invalid = |field, problem| Err(InvalidInput::new(field, problem));
        if self.consecutive == Some(0) {
            return invalid("breaker.consecutive_failures", "must be at least 1");
        }
        if let Some(ratio) = &self.ratio {
            ratio.validate()?;
        }
        if self.permits == 0 {
            return invalid("breaker.half_open_permits", "must be at least 1");
        }
        if self.permit_timeout.is_zero() {
            return invalid("breaker.permit_timeout", "must not be zero");
        }
        self.open.validate()?;
        Ok(CircuitBreaker::with(self.rules()))
    }

    fn rules(self) -> Rules {
        let by_default = self.ratio.is_none().then_some(DEFAULT_CONSECUTIVE);
        Rules {
            consecutive: self.consecutive.or(by_default),
            ratio: self.ratio,
            open: self.open,
            permits: self.permits,
            permit_timeout: self.permit_timeout,
            gates_first_sends: self.gates_first_sends,
        }
    }
}
