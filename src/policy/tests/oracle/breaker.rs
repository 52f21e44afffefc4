//! A breaker that keeps every state it was in, every permit and every end.

use super::{Backoff, Nanos, draw_from, nanos};
use crate::policy::tests::plan::{Fuse, SHARES};
use crate::policy::{BreakerSnapshot, BreakerState, Health};

pub(in crate::policy::tests) struct NaiveBreaker<'p> {
    fuse: &'p Fuse,
    /// The last one is the present one.
    states: Vec<State>,
    permits: Vec<Permit>,
    /// Of operations that were believed while it was closed.
    ends: Vec<End>,
    refused: u64,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Closed,
    Open { since: Nanos, until: Nanos },
    HalfOpen,
}

struct Permit {
    /// The number of the state that it is for.
    state: usize,
    taken: Nanos,
    is_back: bool,
}

struct End {
    state: usize,
    at: Nanos,
    is_failure: bool,
}

/// Leave for one attempt.
#[derive(Clone, Copy)]
pub(in crate::policy::tests) struct NaivePass {
    state: usize,
    permit: Option<usize>,
}

/// What an end has made of the breaker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::policy::tests) enum NaiveTurn {
    Closed,
    Open(Nanos),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::policy::tests) struct NaiveFigures {
    pub(in crate::policy::tests) state: BreakerState,
    pub(in crate::policy::tests) open_for: Option<Nanos>,
    pub(in crate::policy::tests) failures_in_a_row: usize,
    pub(in crate::policy::tests) recent: Option<(usize, usize)>,
    pub(in crate::policy::tests) permits_out: usize,
    pub(in crate::policy::tests) opened: usize,
    pub(in crate::policy::tests) refused: u64,
}

impl NaivePass {
    pub(in crate::policy::tests) fn has_permit(self) -> bool {
        self.permit.is_some()
    }
}

impl From<BreakerSnapshot> for NaiveFigures {
    fn from(figures: BreakerSnapshot) -> Self {
        let whole = |count: u64| usize::try_from(count).expect("small counts");
        let recent = figures.recent_operations().zip(figures.recent_failures());
        Self {
            state: figures.state(),
            open_for: figures.open_for().map(nanos),
            failures_in_a_row: figures.failures_in_a_row() as usize,
            recent: recent.map(|(all, failed)| (whole(all), whole(failed))),
            permits_out: figures.permits_out(),
            opened: whole(figures.opened()),
            refused: figures.refused(),
        }
    }
}

/// The span is counted in so many slices.
const SLICES: Nanos = 10;

impl<'p> NaiveBreaker<'p> {
    pub(super) fn of(fuse: &'p Fuse) -> Self {
        Self {
            fuse,
            states: vec![State::Closed],
            permits: Vec::new(),
            ends: Vec::new(),
            refused: 0,
        }
    }

    /// Where it refuses: the time for which it stays open, `None` where it is half-open.
    pub(in crate::policy::tests) fn check(
        &mut self,
        now: Nanos,
        is_first: bool,
    ) -> Result<(), Option<Nanos>> {
        if is_first && !self.fuse.gates_first_sends {
            return Ok(());
        }
        let refused = match self.state(now) {
            State::Closed => return Ok(()),
            State::HalfOpen if self.permits_out(now) < self.most_permits() => return Ok(()),
            State::HalfOpen => None,
            State::Open { until, .. } => Some(until - now),
        };
        self.refused += 1;
        Err(refused)
    }

    pub(in crate::policy::tests) fn enter(
        &mut self,
        now: Nanos,
        is_first: bool,
    ) -> Result<NaivePass, Option<Nanos>> {
        self.check(now, is_first)?;
        let is_gated = !is_first || self.fuse.gates_first_sends;
        let takes_permit = is_gated && self.state(now) == State::HalfOpen;
        let state = self.number(now);
        let permit = takes_permit.then_some(self.permits.len());
        if takes_permit {
            self.permits.push(Permit {
                state,
                taken: now,
                is_back: false,
            });
        }
        Ok(NaivePass { state, permit })
    }

    pub(in crate::policy::tests) fn leave(&mut self, pass: NaivePass) {
        if let Some(permit) = pass.permit {
            self.permits[permit].is_back = true;
        }
    }

    pub(in crate::policy::tests) fn end(
        &mut self,
        pass: NaivePass,
        health: Health,
        now: Nanos,
        draw: u32,
    ) -> Option<NaiveTurn> {
        self.leave(pass);
        if health == Health::NotShown || !self.believes(pass, now) {
            return None;
        }
        let is_failure = health == Health::Bad;
        match self.state(now) {
            State::Open { .. } => None,
            State::HalfOpen if is_failure => Some(self.open(now, draw)),
            State::HalfOpen => {
                self.states.push(State::Closed);
                Some(NaiveTurn::Closed)
            }
            State::Closed => {
                self.ends.push(End {
                    state: pass.state,
                    at: now,
                    is_failure,
                });
                let trips = is_failure && (self.trips_in_a_row(now) || self.trips_by_share(now));
                trips.then(|| self.open(now, draw))
            }
        }
    }

    /// Whether what began then is evidence now.
    pub(in crate::policy::tests) fn believes(&mut self, pass: NaivePass, now: Nanos) -> bool {
        pass.state == self.number(now)
    }

    pub(in crate::policy::tests) fn has_expired(&self, pass: NaivePass, now: Nanos) -> bool {
        pass.permit
            .is_some_and(|permit| self.is_too_old(&self.permits[permit], now))
    }

    pub(in crate::policy::tests) fn figures(&mut self, now: Nanos) -> NaiveFigures {
        let (state, open_for) = match self.state(now) {
            State::Closed => (BreakerState::Closed, None),
            State::HalfOpen => (BreakerState::HalfOpen, None),
            State::Open { until, .. } => (BreakerState::Open, Some(until - now)),
        };
        let is_open = |state: &&State| matches!(state, State::Open { .. });
        NaiveFigures {
            state,
            open_for,
            failures_in_a_row: self.failures_in_a_row(now),
            recent: self.fuse.share.map(|_| self.recent(now)),
            permits_out: self.permits_out(now),
            opened: self.states.iter().filter(is_open).count(),
            refused: self.refused,
        }
    }

    pub(in crate::policy::tests) fn most_permits(&self) -> usize {
        self.fuse.permits as usize
    }

    fn state(&mut self, now: Nanos) -> State {
        let number = self.number(now);
        self.states[number]
    }

    fn number(&mut self, now: Nanos) -> usize {
        let last = self.states.len() - 1;
        match self.states[last] {
            State::Open { until, .. } if until <= now => {
                self.states.push(State::HalfOpen);
                last + 1
            }
            _ => last,
        }
    }

    fn open(&mut self, now: Nanos, draw: u32) -> NaiveTurn {
        let since_closed = self.states.iter().rev();
        let before: Vec<Nanos> = since_closed
            .take_while(|state| **state != State::Closed)
            .filter_map(|state| match state {
                State::Open { since, until } => Some(until - since),
                _ => None,
            })
            .collect();
        let Backoff { least, random, .. } =
            draw_from(&self.fuse.open, before.len(), draw, before.first().copied());
        let time = least + random.unwrap_or(0);
        self.states.push(State::Open {
            since: now,
            until: now + time,
        });
        NaiveTurn::Open(time)
    }

    fn permits_out(&mut self, now: Nanos) -> usize {
        let state = self.number(now);
        let is_out = |permit: &&Permit| {
            permit.state == state && !permit.is_back && !self.is_too_old(permit, now)
        };
        self.permits.iter().filter(is_out).count()
    }

    fn is_too_old(&self, permit: &Permit, now: Nanos) -> bool {
        now - permit.taken >= nanos(self.fuse.permit_timeout)
    }

    fn trips_in_a_row(&mut self, now: Nanos) -> bool {
        let failures = self.failures_in_a_row(now);
        self.fuse
            .consecutive
            .is_some_and(|most| failures >= most as usize)
    }

    fn failures_in_a_row(&mut self, now: Nanos) -> usize {
        let state = self.number(now);
        let newest_first = self.ends.iter().rev();
        newest_first
            .take_while(|end| end.state == state && end.is_failure)
            .count()
    }

    fn trips_by_share(&mut self, now: Nanos) -> bool {
        let Some(share) = self.fuse.share else {
            return false;
        };
        let (all, failed) = self.recent(now);
        all >= share.minimum_volume as usize
            && failed * SHARES as usize >= all * share.failures as usize
    }

    /// All and failed ones of the present slice and the nine before it.
    fn recent(&mut self, now: Nanos) -> (usize, usize) {
        let state = self.number(now);
        let span = self.fuse.share.map_or(SLICES, |share| nanos(share.span));
        let slice = |at: Nanos| at / (span / SLICES);
        let is_recent = |end: &&End| end.state == state && slice(now) - slice(end.at) < SLICES;
        let recent = self.ends.iter().filter(is_recent);
        let failed = recent.clone().filter(|end| end.is_failure);
        (recent.count(), failed.count())
    }
}
