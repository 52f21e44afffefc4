//! Simulated time: spans since the start, and the instants that the core is told.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Since the start of the simulation.
pub(crate) type Time = Duration;

/// The same as the core knows it.
#[allow(clippy::disallowed_methods, reason = "where else would time start?")]
pub(crate) fn instant(at: Time) -> Instant {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    *ORIGIN.get_or_init(Instant::now) + at
}

pub(crate) const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub(crate) const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// What is still to come, in the order of time; what is due at the same time comes in the order in
/// which it was put here.
pub(crate) struct Timeline<E> {
    due: BinaryHeap<Reverse<Due<E>>>,
    number: u64,
}

struct Due<E> {
    at: Time,
    number: u64,
    event: E,
}

impl<E> Timeline<E> {
    pub(crate) fn new() -> Self {
        Self {
            due: BinaryHeap::new(),
            number: 0,
        }
    }

    pub(crate) fn put(&mut self, at: Time, event: E) {
        let number = self.number;
        self.number += 1;
        self.due.push(Reverse(Due { at, number, event }));
    }

    /// The next event, and its time.
    pub(crate) fn next(&mut self) -> Option<(Time, E)> {
        let Reverse(due) = self.due.pop()?;
        Some((due.at, due.event))
    }
}

impl<E> Due<E> {
    fn rank(&self) -> (Time, u64) {
        (self.at, self.number)
    }
}

impl<E> PartialEq for Due<E> {
    fn eq(&self, other: &Self) -> bool {
        self.rank() == other.rank()
    }
}

impl<E> Eq for Due<E> {}

impl<E> PartialOrd for Due<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Due<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.rank().cmp(&other.rank())
    }
}
