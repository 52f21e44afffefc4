//! What can be seen of load control from outside.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Load, LoadControl};
use crate::clock;
use crate::policy::{BreakerSnapshot, BudgetSnapshot, CircuitBreaker, RetryBudget, StopReason};

/// Figures of one key at one moment. `Display` puts them into a line for a log.
#[derive(Clone, Debug)]
pub struct LoadSnapshot {
    key: Arc<str>,
    budget: Option<BudgetSnapshot>,
    breaker: Option<BreakerSnapshot>,
    pushed_back_for: Duration,
    in_flight: Option<(usize, usize)>,
    operations: u64,
    retries: u64,
    stops: Vec<(StopReason, u64)>,
}

impl LoadControl {
    /// The figures of this key, if it is kept. Does not count as use.
    #[must_use]
    pub fn snapshot(&self, key: &str) -> Option<LoadSnapshot> {
        let load = self.loads().peek(key).map(Arc::clone)?;
        Some(load.at(clock::now()))
    }

    /// The figures of all keys, those used last first.
    #[must_use]
    pub fn snapshots(&self) -> Vec<LoadSnapshot> {
        let now = clock::now();
        // Nobody is to wait for the map while figures are gathered.
        let loads: Vec<_> = self
            .loads()
            .iter()
            .map(|(_, load)| Arc::clone(load))
            .collect();
        loads.iter().map(|load| load.at(now)).collect()
    }
}

impl CircuitBreaker {
    /// Figures for a dashboard or a log.
    #[must_use]
    pub fn snapshot(&self) -> BreakerSnapshot {
        self.at(clock::now())
    }
}

impl Load {
    fn at(&self, now: Instant) -> LoadSnapshot {
        let reasons = StopReason::ALL.iter().zip(&self.stops);
        LoadSnapshot {
            key: Arc::clone(&self.key),
            budget: self.budget.as_ref().map(RetryBudget::snapshot),
            breaker: self.breaker.as_ref().map(|breaker| breaker.at(now)),
            pushed_back_for: self.pushback.remaining(now),
            in_flight: self
                .limiter
                .as_ref()
                .map(|limiter| (limiter.in_flight(), limiter.waiting())),
            operations: self.ended.load(Ordering::Relaxed),
            retries: self.retries.load(Ordering::Relaxed),
            stops: reasons
                .map(|(reason, count)| (*reason, count.load(Ordering::Relaxed)))
                .filter(|(_, count)| *count > 0)
                .collect(),
        }
    }
}

impl LoadSnapshot {
    /// The host and port, or what [`key_by`](crate::LoadControlBuilder::key_by) has made of the request.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Its budget. `None`: it has none of its own.
    #[must_use]
    pub fn budget(&self) -> Option<&BudgetSnapshot> {
        self.budget.as_ref()
    }

    /// Its breaker. `None`: it has none.
    #[must_use]
    pub fn breaker(&self) -> Option<&BreakerSnapshot> {
        self.breaker.as_ref()
    }

    /// For how long it still wants to be left alone. Zero: it does not.
    #[must_use]
    pub fn pushed_back_for(&self) -> Duration {
        self.pushed_back_for
    }

    /// Attempts under way. `None`: there is no concurrency limit, and they are not counted.
    #[must_use]
    pub fn in_flight(&self) -> Option<usize> {
        self.in_flight.map(|(in_flight, _)| in_flight)
    }

    /// Attempts waiting for a concurrency permit.
    #[must_use]
    pub fn waiting(&self) -> Option<usize> {
        self.in_flight.map(|(_, waiting)| waiting)
    }

    /// Operations that have ended.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.operations
    }

    /// Attempts of theirs beyond the first.
    #[must_use]
    pub fn retries(&self) -> u64 {
        self.retries
    }

    /// How many operations ended without the answer that was wanted, by reason; those that never
    /// occurred are left out.
    pub fn stops(&self) -> impl Iterator<Item = (StopReason, u64)> + '_ {
        self.stops.iter().copied()
    }

    /// How many operations ended because another send was refused, for whatever reason: those that code
    /// around this layer must not make up for ([`StopReason::forbids_retry`]), but for the caller's own
    /// cancel.
    #[must_use]
    pub fn refused(&self) -> u64 {
        let refusals = self
            .stops()
            .filter(|(reason, _)| reason.forbids_retry() && *reason != StopReason::Cancelled);
        refusals.map(|(_, count)| count).sum()
    }

    /// How many operations ended for this reason.
    #[must_use]
    pub fn stopped(&self, reason: StopReason) -> u64 {
        let mut counts = self.stops();
        counts
            .find(|stop| stop.0 == reason)
            .map_or(0, |stop| stop.1)
    }
}

impl fmt::Display for LoadSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            key,
            operations,
            retries,
            ..
        } = self;
        write!(f, "{key}: {operations} operations, {retries} retries")?;
        if let Some(budget) = &self.budget {
            write!(f, ", budget {:.1}", budget.balance())?;
        }
        if let Some(breaker) = &self.breaker {
            write!(f, ", breaker {}", breaker.state())?;
        }
        if !self.pushed_back_for.is_zero() {
            write!(f, ", pushed back for {:?}", self.pushed_back_for)?;
        }
        if let Some((in_flight, waiting)) = self.in_flight {
            write!(f, ", {in_flight} in flight, {waiting} waiting")?;
        }
        for (reason, count) in self.stops() {
            write!(f, ", {count} × {reason}")?;
        }
        Ok(())
    }
}
