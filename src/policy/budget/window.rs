//! A share of the recent operations, plus a reserve: exact counts over a sliding span.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::Counted;
use super::bucket::{WHOLE, parts};

#[derive(Debug)]
pub(super) struct SlidingWindow {
    /// Retries per operation, in parts of [`WHOLE`].
    ratio: u64,
    /// Retries in one span whether there are operations or not.
    reserve: u64,
    /// Milliseconds.
    span: u64,
    origin: Option<Instant>,
    operations: Events,
    /// Those that were sent.
    retries: Events,
    /// Those that are still waited for.
    reserved: u64,
}

impl SlidingWindow {
    pub(super) fn new(ratio: f64, per_second: u32, span: Duration) -> Self {
        let span = u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        let reserve = u64::from(per_second) * span / 1000;
        Self::empty(u64::from(parts(ratio)), reserve, span)
    }

    /// Another one with the same figures, empty.
    pub(super) fn another(&self) -> Self {
        Self::empty(self.ratio, self.reserve, self.span)
    }

    fn empty(ratio: u64, reserve: u64, span: u64) -> Self {
        Self {
            ratio,
            reserve,
            span,
            origin: None,
            operations: Events::default(),
            retries: Events::default(),
            reserved: 0,
        }
    }

    pub(super) fn balance(&self) -> f64 {
        self.allowed().saturating_sub(self.taken()) as f64
    }

    /// Counts the operation, once in any span.
    pub(super) fn count(&mut self, now: Instant, counted: &mut Counted) {
        let at = self.slide(now);
        let is_in_window = |then: u64| then + self.span > at;
        if !counted.0.is_some_and(is_in_window) {
            self.operations.add(at);
            counted.0 = Some(at);
        }
    }

    /// Takes a retry for an operation, which counts itself however long ago it began. Until it is
    /// sent, or not, it counts in every window.
    pub(super) fn reserve(&mut self, now: Instant, counted: &mut Counted) -> bool {
        self.count(now, counted);
        let is_free = self.taken() < self.allowed();
        self.reserved += u64::from(is_free);
        is_free
    }

    /// A reserved retry is sent now, and counts in the windows of the coming span.
    pub(super) fn spend(&mut self, now: Instant) {
        let at = self.slide(now);
        self.reserved = self.reserved.saturating_sub(1);
        self.retries.add(at);
    }

    pub(super) fn give_back(&mut self) {
        self.reserved = self.reserved.saturating_sub(1);
    }

    fn taken(&self) -> u64 {
        self.retries.total + self.reserved
    }

    fn allowed(&self) -> u64 {
        self.operations.total * self.ratio / u64::from(WHOLE) + self.reserve
    }

    /// Forgets what is older than the span; returns `now` in milliseconds since the first use.
    fn slide(&mut self, now: Instant) -> u64 {
        let origin = *self.origin.get_or_insert(now);
        let at = now.saturating_duration_since(origin).as_millis();
        let at = u64::try_from(at).unwrap_or(u64::MAX);
        if let Some(oldest) = (at + 1).checked_sub(self.span) {
            self.operations.forget_before(oldest);
            self.retries.forget_before(oldest);
        }
        at
    }
}

/// How many events fell into each millisecond that had some, the oldest first.
#[derive(Debug, Default)]
struct Events {
    total: u64,
    counts: VecDeque<(u64, u64)>,
}

impl Events {
    fn add(&mut self, at: u64) {
        self.total += 1;
        // From the back: only another thread's older reading of the clock belongs further in front.
        let place = self.counts.iter().rposition(|&(then, _)| then <= at);
        match place.and_then(|place| self.counts.get_mut(place)) {
            Some((then, count)) if *then == at => *count += 1,
            _ => self
                .counts
                .insert(place.map_or(0, |place| place + 1), (at, 1)),
        }
    }

    fn forget_before(&mut self, oldest: u64) {
        while let Some(&(_, count)) = self.counts.front().filter(|(then, _)| *then < oldest) {
            self.total -= count;
            self.counts.pop_front();
        }
    }
}
