//! Operations that come in at random, whether the earlier ones have ended or not, and a service that
//! answers at once.

use std::time::Duration;

use crate::caller::{Caller, Model, Next, Seen, Start};
use crate::dice::Dice;
use crate::time::{Time, Timeline};

/// What takes in operations, and knows where they go.
pub(crate) trait Service {
    /// Whose operation it is, of so many callers, and to which shard it goes.
    fn route(&mut self, callers: usize, dice: &mut Dice) -> Route;

    fn answer(&mut self, shard: usize, dice: &mut Dice) -> Seen;
}

#[derive(Clone, Copy)]
pub(crate) struct Route {
    pub(crate) caller: usize,
    pub(crate) shard: usize,
}

pub(crate) struct Traffic<S> {
    pub(crate) per_second: f64,
    pub(crate) length: Duration,
    pub(crate) service: S,
    /// When operations begin, and where they go.
    pub(crate) arrivals: Dice,
    /// All else.
    pub(crate) dice: Dice,
}

/// What became of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) operations: u64,
    pub(crate) sent: u64,
    pub(crate) succeeded: u64,
}

impl Tally {
    /// Requests sent for each operation.
    pub(crate) fn amplification(&self) -> f64 {
        self.sent as f64 / self.operations as f64
    }

    /// Percent of the operations.
    pub(crate) fn success(&self) -> f64 {
        100.0 * self.succeeded as f64 / self.operations as f64
    }
}

enum Event<O> {
    Arrival,
    Again(Route, O),
}

impl<S: Service> Model for Traffic<S> {
    type Result = Tally;

    fn play<C: Caller>(mut self, callers: &mut [C]) -> Tally {
        let mut tally = Tally::default();
        let mut timeline = Timeline::new();
        timeline.put(self.next_arrival(Time::ZERO), Event::Arrival);
        while let Some((now, event)) = timeline.next() {
            let (route, mut operation) = match event {
                Event::Again(route, operation) => (route, operation),
                Event::Arrival if now > self.length => continue,
                Event::Arrival => {
                    timeline.put(self.next_arrival(now), Event::Arrival);
                    tally.operations += 1;
                    let route = self.service.route(callers.len(), &mut self.arrivals);
                    (route, callers[route.caller].begin(now))
                }
            };
            let caller = &mut callers[route.caller];
            let next = match caller.start(&mut operation, now, &mut self.dice) {
                Start::Now(_) => {
                    let seen = self.service.answer(route.shard, &mut self.dice);
                    tally.sent += 1;
                    tally.succeeded += u64::from(seen == Seen::Success);
                    caller.end(&mut operation, seen, now, &mut self.dice)
                }
                Start::Later(wait) => Next::Again(wait),
                Start::Never => Next::Over,
            };
            if let Next::Again(wait) = next {
                timeline.put(now + wait, Event::Again(route, operation));
            }
        }
        tally
    }
}

impl<S> Traffic<S> {
    fn next_arrival(&mut self, now: Time) -> Time {
        now + self.arrivals.gap(self.per_second)
    }
}
