//! What other operations do meanwhile, to the load state and to the oracle's alike.

use std::collections::VecDeque;

use super::operations::{Timeline, draw};
use super::oracle::{NaiveFigures, NaiveLoad, NaivePass, NaiveTurn, nanos};
use super::plan::Event;
use super::tally::Tally;
use crate::policy::breaker::Refused;
use crate::policy::{BreakerState, Health, Pass, Terms, Turned};

pub(super) struct Others<'r> {
    terms: Terms<'r>,
    /// In the order in which they have started.
    under_way: VecDeque<Leave<'r>>,
    tally: &'r Tally,
}

/// A breaker's leave for one attempt, and the oracle's.
pub(super) struct Leave<'r> {
    pass: Pass<'r>,
    naive: NaivePass,
}

impl<'r> Others<'r> {
    pub(super) fn new(terms: Terms<'r>, tally: &'r Tally) -> Self {
        Self {
            terms,
            under_way: VecDeque::new(),
            tally,
        }
    }

    /// An operation that is neither dropped nor polled any more.
    pub(super) fn keep(&mut self, leave: Option<Leave<'r>>) {
        self.under_way.extend(leave);
    }

    pub(super) fn play(&mut self, event: Event, time: Timeline, load: &mut NaiveLoad<'_>) {
        match event {
            Event::Nothing => {}
            Event::ToldToWait(wait) => {
                if let Some(pushback) = self.terms.pushback {
                    pushback.note(time.instant(), wait);
                    load.push_back(time.now, nanos(wait));
                }
            }
            Event::Starts { is_first } => {
                let leave = self.enter(is_first, time, load);
                self.under_way.extend(leave);
            }
            Event::Ends { health, draw } => {
                if let Some(leave) = self.under_way.pop_front() {
                    leave.settle(health, draw, time, load, self.tally);
                }
            }
            Event::Vanishes => {
                if let Some(leave) = self.under_way.pop_front() {
                    leave.forgo(load);
                }
            }
            Event::Flashes { health, draw } => {
                if let Some(leave) = self.enter(true, time, load) {
                    leave.settle(health, draw, time, load, self.tally);
                }
            }
        }
        agree(&self.terms, time, load);
    }

    fn enter(&self, is_first: bool, time: Timeline, load: &mut NaiveLoad<'_>) -> Option<Leave<'r>> {
        let breaker = self.terms.breaker?;
        let entered = breaker.enter(time.instant(), is_first);
        match (entered, load.breaker().enter(time.now, is_first)) {
            (Ok(pass), Ok(naive)) => Some(Leave { pass, naive }),
            (Err(Refused { after }), Err(expected)) => {
                assert_eq!(after.map(nanos), expected);
                self.tally.count("another one is refused");
                None
            }
            (entered, _) => panic!("{entered:?}"),
        }
    }
}

impl<'r> Leave<'r> {
    pub(super) fn of(pass: Option<Pass<'r>>, naive: Option<NaivePass>) -> Option<Self> {
        assert_eq!(pass.is_some(), naive.is_some());
        let (pass, naive) = pass.zip(naive)?;
        Some(Self { pass, naive })
    }

    pub(super) fn has_permit(&self) -> bool {
        self.naive.has_permit()
    }

    /// The attempt did not start, or tells nothing.
    pub(super) fn forgo(self, load: &mut NaiveLoad<'_>) {
        drop(self.pass);
        load.breaker().leave(self.naive);
    }

    /// The operation has ended with this attempt.
    pub(super) fn settle(
        self,
        health: Health,
        drawn: u32,
        time: Timeline,
        load: &mut NaiveLoad<'_>,
        tally: &Tally,
    ) {
        let Self { pass, naive } = self;
        let before = load.breaker().figures(time.now).state;
        count_end(naive, health, time, load, tally);
        let turned = pass.settle(health, time.instant(), || draw(drawn));
        let expected = load.breaker().end(naive, health, time.now, drawn);
        let turned = turned.map(|turned| match turned {
            Turned::Closed => NaiveTurn::Closed,
            Turned::Open(time) => NaiveTurn::Open(nanos(time)),
        });
        assert_eq!(turned, expected);
        match (before, turned) {
            (_, None) => {}
            (BreakerState::Closed, _) => tally.count("opens"),
            (_, Some(NaiveTurn::Open(_))) => tally.count("opens again"),
            (_, Some(NaiveTurn::Closed)) => tally.count("closes again"),
        }
    }
}

fn count_end(
    pass: NaivePass,
    health: Health,
    time: Timeline,
    load: &mut NaiveLoad<'_>,
    tally: &Tally,
) {
    let breaker = load.breaker();
    let is_believed = breaker.believes(pass, time.now);
    let is_half_open = breaker.figures(time.now).state == BreakerState::HalfOpen;
    let is_late = breaker.has_expired(pass, time.now);
    tally.count_if(!is_believed && health != Health::NotShown, "straggler");
    tally.count_if(is_late && is_believed, "late result of an expired permit");
    tally.count_if(
        is_believed && is_half_open && !pass.has_permit(),
        "first send that began half-open",
    );
}

/// Load state and oracle show the same figures.
pub(super) fn agree(terms: &Terms<'_>, time: Timeline, load: &mut NaiveLoad<'_>) {
    let now = time.instant();
    if let Some(breaker) = terms.breaker {
        let figures = NaiveFigures::from(breaker.at(now));
        assert_eq!(figures, load.breaker().figures(time.now));
        assert!(figures.permits_out <= load.breaker().most_permits());
    }
    if let Some(pushback) = terms.pushback {
        assert_eq!(nanos(pushback.remaining(now)), load.pushed_back(time.now));
    }
    if let Some(budget) = terms.budget {
        let figures = budget.snapshot();
        assert_eq!(Some(figures.balance()), load.purse.balance());
        let counts = (figures.given(), figures.returned(), figures.refused());
        assert_eq!(counts, load.purse.counts());
    }
}
