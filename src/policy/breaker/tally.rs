//! How recent operations have ended: in a row, and within a span.

use std::time::{Duration, Instant};

use super::Rules;
use crate::invalid::InvalidInput;

/// Slices that a span is counted in: at most a tenth of it is forgotten too early.
const SLICES: usize = 10;

const SHORTEST_SPAN: Duration = Duration::from_millis(10);
const LONGEST_SPAN: Duration = Duration::from_secs(3600);

/// Opens at this share of failures.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ratio {
    pub(super) ratio: f64,
    pub(super) minimum_volume: u32,
    pub(super) span: Duration,
}

impl Ratio {
    pub(super) fn validate(&self) -> Result<(), InvalidInput> {
        if !(self.ratio > 0.0 && self.ratio <= 1.0) {
            return Err(InvalidInput::new(
                "breaker.failure_ratio",
                "must be a number over 0, at most 1",
            ));
        }
        if self.minimum_volume == 0 {
            return Err(InvalidInput::new(
                "breaker.minimum_volume",
                "must be at least 1",
            ));
        }
        if !(SHORTEST_SPAN..=LONGEST_SPAN).contains(&self.span) {
            return Err(InvalidInput::new(
                "breaker.span",
                "must be from 10 milliseconds to one hour",
            ));
        }
        Ok(())
    }
}

/// Both counts.
#[derive(Debug)]
pub(super) struct Tally {
    in_a_row: u32,
    window: Option<Window>,
}

impl Tally {
    pub(super) fn new(ratio: Option<Ratio>) -> Self {
        Self {
            in_a_row: 0,
            window: ratio.map(|ratio| Window::new(ratio.span)),
        }
    }

    pub(super) fn clear(&mut self) {
        self.in_a_row = 0;
        if let Some(window) = &mut self.window {
            window.slices = [Ends::default(); SLICES];
        }
    }

    /// Whether a success changes nothing.
    pub(super) fn is_calm(&self) -> bool {
        self.in_a_row == 0 && self.window.is_none()
    }

    pub(super) fn success(&mut self, now: Instant) {
        self.in_a_row = 0;
        if let Some(window) = &mut self.window {
            let ends = window.slice(now);
            ends.all = ends.all.saturating_add(1);
        }
    }

    /// Whether that was one too many.
    pub(super) fn failure(&mut self, rules: &Rules, now: Instant) -> bool {
        self.in_a_row = self.in_a_row.saturating_add(1);
        let in_a_row = rules.consecutive.is_some_and(|most| self.in_a_row >= most);
        let by_share = match (&mut self.window, &rules.ratio) {
            (Some(window), Some(ratio)) => {
                let ends = window.slice(now);
                ends.all = ends.all.saturating_add(1);
                ends.failed = ends.failed.saturating_add(1);
                window.total().reaches(ratio)
            }
            _ => false,
        };
        in_a_row || by_share
    }

    pub(super) fn in_a_row(&self) -> u32 {
        self.in_a_row
    }

    /// All and failed operations of the span.
    pub(super) fn recent(&mut self, now: Instant) -> Option<(u64, u64)> {
        let window = self.window.as_mut()?;
        window.slide(now);
        let Ends { all, failed } = window.total();
        Some((all, failed))
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Ends {
    all: u64,
    failed: u64,
}

impl Ends {
    fn reaches(&self, ratio: &Ratio) -> bool {
        let share = self.failed as f64 / self.all as f64;
        self.all >= u64::from(ratio.minimum_volume) && share >= ratio.ratio
    }
}

/// The ends of the last span, slice by slice, as a ring.
#[derive(Debug)]
struct Window {
    slice: Duration,
    origin: Option<Instant>,
    /// The number of the newest slice, counted from the origin.
    newest: u64,
    slices: [Ends; SLICES],
}

impl Window {
    fn new(span: Duration) -> Self {
        Self {
            slice: span / SLICES as u32,
            origin: None,
            newest: 0,
            slices: [Ends::default(); SLICES],
        }
    }

    /// The slice of `now`. Another thread's slightly older reading of the clock counts as the newest.
    fn slice(&mut self, now: Instant) -> &mut Ends {
        self.slide(now);
        self.at(self.newest)
    }

    /// Forgets what is older than the span.
    fn slide(&mut self, now: Instant) {
        let origin = *self.origin.get_or_insert(now);
        let passed = now.saturating_duration_since(origin).as_nanos() / self.slice.as_nanos();
        let number = u64::try_from(passed).unwrap_or(u64::MAX);
        for older in (self.newest.saturating_add(1)..=number).take(SLICES) {
            *self.at(older) = Ends::default();
        }
        self.newest = self.newest.max(number);
    }

    fn at(&mut self, number: u64) -> &mut Ends {
        let [first, rest @ ..] = &mut self.slices;
        let index = (number % SLICES as u64) as usize;
        index
            .checked_sub(1)
            .and_then(|index| rest.get_mut(index))
            .unwrap_or(first)
    }

    fn total(&self) -> Ends {
        self.slices.iter().fold(Ends::default(), |sum, ends| Ends {
            all: sum.all.saturating_add(ends.all),
            failed: sum.failed.saturating_add(ends.failed),
        })
    }
}
