//! What the breaker is in, and what turns it.

use std::fmt;
use std::time::{Duration, Instant};

use super::tally::{Ratio, Tally};
use super::{CALM, CLOSED, Refused, Rules};
use crate::policy::Health;
use crate::policy::backoff::Previous;

/// The state of a [`CircuitBreaker`](crate::CircuitBreaker).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BreakerState {
    /// Everything passes.
    Closed,
    /// Nothing passes that it gates.
    Open,
    /// A few pass, to see whether the service is back.
    HalfOpen,
}

impl fmt::Display for BreakerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::HalfOpen => "half-open",
        })
    }
}

/// The breaker has been turned by the end of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turned {
    Closed,
    Open(Duration),
}

impl Turned {
    pub(crate) fn state(self) -> BreakerState {
        match self {
            Self::Closed => BreakerState::Closed,
            Self::Open(_) => BreakerState::Open,
        }
    }
}

/// Figures of a [`CircuitBreaker`](crate::CircuitBreaker) at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerSnapshot {
    state: BreakerState,
    open_for: Option<Duration>,
    failures_in_a_row: u32,
    recent: Option<(u64, u64)>,
    permits_out: usize,
    opened: u64,
    refused: u64,
}

impl BreakerSnapshot {
    /// Closed, open or half-open.
    #[must_use]
    pub fn state(&self) -> BreakerState {
        self.state
    }

    /// Time until it is half-open, while it is open.
    #[must_use]
    pub fn open_for(&self) -> Option<Duration> {
        self.open_for
    }

    /// Operations that have failed one after the other, while it is closed.
    #[must_use]
    pub fn failures_in_a_row(&self) -> u32 {
        self.failures_in_a_row
    }

    /// Operations that ended within the span of the failure ratio, since it was last closed. `None`:
    /// no ratio is set.
    #[must_use]
    pub fn recent_operations(&self) -> Option<u64> {
        self.recent.map(|(all, _)| all)
    }

    /// Those of them that failed.
    #[must_use]
    pub fn recent_failures(&self) -> Option<u64> {
        self.recent.map(|(_, failed)| failed)
    }

    /// Operations under way with a half-open permit that has not expired.
    #[must_use]
    pub fn permits_out(&self) -> usize {
        self.permits_out
    }

    /// How often it has opened.
    #[must_use]
    pub fn opened(&self) -> u64 {
        self.opened
    }

    /// How many attempts it has refused.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }
}

#[derive(Debug)]
pub(super) struct State {
    phase: Phase,
    /// Counts the phases: what began in another one is no evidence in this.
    epoch: u64,
    /// How often it has opened since it was last closed.
    in_a_row: u32,
    previous: Previous,
    tally: Tally,
    next_permit: u64,
    opened: u64,
    refused: u64,
}

#[derive(Debug)]
enum Phase {
    Closed,
    /// `None`: for longer than the clock can say.
    Open {
        until: Option<Instant>,
    },
    HalfOpen {
        permits: Vec<Permit>,
    },
}

#[derive(Debug)]
struct Permit {
    number: u64,
    expires: Option<Instant>,
}

impl State {
    pub(super) fn new(ratio: Option<Ratio>) -> Self {
        Self {
            phase: Phase::Closed,
            epoch: 0,
            in_a_row: 0,
            previous: Previous::default(),
            tally: Tally::new(ratio),
            next_permit: 0,
            opened: 0,
            refused: 0,
        }
    }

    /// What is seen of it without its lock.
    pub(super) fn seen(&self) -> u64 {
        let calm = if self.tally.is_calm() { CALM } else { 0 };
        match self.phase {
            Phase::Closed => self.epoch << 2 | CLOSED | calm,
            Phase::Open { .. } | Phase::HalfOpen { .. } => 0,
        }
    }

    /// The phase that something which begins now begins in.
    pub(super) fn epoch(&mut self, now: Instant) -> u64 {
        self.wake(now);
        self.epoch
    }

    pub(super) fn check(&mut self, rules: &Rules, now: Instant) -> Result<(), Refused> {
        self.wake(now);
        let refused = match &mut self.phase {
            Phase::Closed => return Ok(()),
            Phase::Open { until } => Refused {
                after: until.map(|until| until.saturating_duration_since(now)),
            },
            Phase::HalfOpen { permits } => {
                forget_expired(permits, now);
                if permits.len() < rules.permits as usize {
                    return Ok(());
                }
                Refused { after: None }
            }
        };
        self.refused = self.refused.saturating_add(1);
        Err(refused)
    }

    /// `None`: none is needed.
    pub(super) fn take_permit(
        &mut self,
        rules: &Rules,
        now: Instant,
    ) -> Result<Option<u64>, Refused> {
        self.check(rules, now)?;
        let Phase::HalfOpen { permits } = &mut self.phase else {
            return Ok(None);
        };
        let number = self.next_permit;
        self.next_permit = number.wrapping_add(1);
        permits.push(Permit {
            number,
            expires: now.checked_add(rules.permit_timeout),
        });
        Ok(Some(number))
    }

    /// A permit that has expired, or is of an earlier phase, is not there any more.
    pub(super) fn give_back(&mut self, number: u64) {
        if let Phase::HalfOpen { permits } = &mut self.phase {
            permits.retain(|permit| permit.number != number);
        }
    }

    /// An operation has ended whose last attempt began in `epoch`.
    pub(super) fn record(
        &mut self,
        rules: &Rules,
        epoch: u64,
        health: Health,
        now: Instant,
        draw: impl FnOnce() -> f64,
    ) -> Option<Turned> {
        self.wake(now);
        if epoch != self.epoch {
            return None;
        }
        match (&self.phase, health) {
            (Phase::Closed, Health::Good) => {
                self.tally.success(now);
                None
            }
            (Phase::Closed, Health::Bad) => self
                .tally
                .failure(rules, now)
                .then(|| self.open(rules, now, draw())),
            (Phase::HalfOpen { .. }, Health::Good) => Some(self.close()),
            (Phase::HalfOpen { .. }, Health::Bad) => Some(self.open(rules, now, draw())),
            (Phase::Open { .. }, _) | (_, Health::NotShown) => None,
        }
    }

    pub(super) fn snapshot(&mut self, now: Instant) -> BreakerSnapshot {
        self.wake(now);
        let (state, open_for, permits_out) = match &mut self.phase {
            Phase::Closed => (BreakerState::Closed, None, 0),
            Phase::Open { until } => {
                let left = until.map(|until| until.saturating_duration_since(now));
                (BreakerState::Open, Some(left.unwrap_or(Duration::MAX)), 0)
            }
            Phase::HalfOpen { permits } => {
                forget_expired(permits, now);
                (BreakerState::HalfOpen, None, permits.len())
            }
        };
        BreakerSnapshot {
            state,
            open_for,
            failures_in_a_row: self.tally.in_a_row(),
            recent: self.tally.recent(now),
            permits_out,
            opened: self.opened,
            refused: self.refused,
        }
    }

    /// Open becomes half-open by itself.
    fn wake(&mut self, now: Instant) {
        if matches!(self.phase, Phase::Open { until: Some(until) } if until <= now) {
            self.turn(Phase::HalfOpen {
                permits: Vec::new(),
            });
        }
    }

    fn open(&mut self, rules: &Rules, now: Instant, draw: f64) -> Turned {
        let wait = rules.open.draw(self.in_a_row, draw, &mut self.previous);
        let wait = wait.delay();
        self.in_a_row = self.in_a_row.saturating_add(1);
        self.opened = self.opened.saturating_add(1);
        self.turn(Phase::Open {
            until: now.checked_add(wait),
        });
        Turned::Open(wait)
    }

    fn close(&mut self) -> Turned {
        self.in_a_row = 0;
        self.previous = Previous::default();
        self.turn(Phase::Closed);
        Turned::Closed
    }

    fn turn(&mut self, phase: Phase) {
        self.phase = phase;
        self.epoch = self.epoch.wrapping_add(1);
        self.tally.clear();
    }
}

fn forget_expired(permits: &mut Vec<Permit>, now: Instant) {
    permits.retain(|permit| permit.expires.is_none_or(|expires| now < expires));
}
