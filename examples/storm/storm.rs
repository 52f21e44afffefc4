//! Operations that come in at random, at a rate that nothing slows down, and one server with a queue that
//! works on what they send.

use crate::caller::{Caller, Model, Next, Seen, Start};
use crate::course::{Course, LENGTH};
use crate::dice::Dice;
use crate::server::{Job, Server};
use crate::time::{Time, Timeline};

pub(crate) struct Storm {
    /// Operations a second.
    pub(crate) load: f64,
    pub(crate) server: Server,
    /// When operations begin, and whose they are.
    pub(crate) arrivals: Dice,
    /// All else.
    pub(crate) dice: Dice,
}

enum Event {
    Arrival,
    /// An operation may start its next attempt.
    Due(usize),
    /// The server is done with the first in its queue.
    Served,
    TimedOut {
        operation: usize,
        attempt: u32,
    },
}

struct Flight<O> {
    began: Time,
    caller: usize,
    attempt: u32,
    /// `None`: it is over.
    operation: Option<O>,
}

impl Model for Storm {
    type Result = Course;

    fn play<C: Caller>(self, callers: &mut [C]) -> Course {
        let mut run = Run {
            storm: self,
            callers,
            flights: Vec::new(),
            timeline: Timeline::new(),
            course: Course::new(),
        };
        run.timeline.put(Time::ZERO, Event::Arrival);
        while let Some((now, event)) = run.timeline.next() {
            match event {
                Event::Arrival if now < LENGTH => run.arrives(now),
                Event::Arrival => break,
                Event::Due(operation) => run.starts(operation, now),
                Event::Served => run.is_served(now),
                Event::TimedOut { operation, attempt } => run.times_out(operation, attempt, now),
            }
        }
        run.course
    }
}

struct Run<'c, C: Caller> {
    storm: Storm,
    callers: &'c mut [C],
    flights: Vec<Flight<C::Operation>>,
    timeline: Timeline<Event>,
    course: Course,
}

impl<C: Caller> Run<'_, C> {
    fn arrives(&mut self, now: Time) {
        let Storm { load, arrivals, .. } = &mut self.storm;
        self.timeline.put(now + arrivals.gap(*load), Event::Arrival);
        let caller = arrivals.below(self.callers.len());
        self.flights.push(Flight {
            began: now,
            caller,
            attempt: 0,
            operation: Some(self.callers[caller].begin(now)),
        });
        self.course.begun.count(now);
        self.starts(self.flights.len() - 1, now);
    }

    fn starts(&mut self, number: usize, now: Time) {
        let flight = &mut self.flights[number];
        let Some(operation) = &mut flight.operation else {
            return;
        };
        let caller = &mut self.callers[flight.caller];
        let limit = match caller.start(operation, now, &mut self.storm.dice) {
            Start::Now(limit) => limit.unwrap_or(LENGTH),
            Start::Later(wait) => return self.timeline.put(now + wait, Event::Due(number)),
            Start::Never => return flight.operation = None,
        };
        flight.attempt += 1;
        let (attempt, until) = (flight.attempt, now + limit);
        self.course.sent.count(now);
        let timed_out = Event::TimedOut {
            operation: number,
            attempt,
        };
        self.timeline.put(until, timed_out);
        let job = Job {
            operation: number,
            attempt,
            until,
        };
        if let Some(work) = self.storm.server.receive(job, now) {
            self.timeline.put(now + work, Event::Served);
        }
    }

    fn is_served(&mut self, now: Time) {
        let Some((job, next)) = self.storm.server.finish(now) else {
            return;
        };
        if let Some(work) = next {
            self.timeline.put(now + work, Event::Served);
        }
        let is_in_time = now <= job.until;
        if is_in_time && self.flights[job.operation].attempt == job.attempt {
            self.course.served.count(now);
            let began = self.flights[job.operation].began;
            self.course.succeeded.count(began);
            self.ends(job.operation, Seen::Success, now);
        }
    }

    fn times_out(&mut self, number: usize, attempt: u32, now: Time) {
        if self.flights[number].attempt == attempt {
            self.ends(number, Seen::NoAnswer, now);
        }
    }

    fn ends(&mut self, number: usize, seen: Seen, now: Time) {
        let flight = &mut self.flights[number];
        let Some(operation) = &mut flight.operation else {
            return;
        };
        let caller = &mut self.callers[flight.caller];
        match caller.end(operation, seen, now, &mut self.storm.dice) {
            Next::Again(wait) => self.timeline.put(now + wait, Event::Due(number)),
            Next::Over => flight.operation = None,
        }
    }
}
