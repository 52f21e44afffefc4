//! A shop, the way to it, and its books.

use std::time::Duration;

use crate::caller::{Caller, Model, Next, Seen, Start};
use crate::dice::Dice;
use crate::policy::Certainty;
use crate::time::{Time, Timeline, ms, secs};

const PER_SECOND: f64 = 1000.0;

/// A caller gives an attempt up after this time.
const ATTEMPT: Duration = ms(800);

/// A late request arrives within this time after that.
const LATEST: Duration = secs(5);

/// What happens to how many of the attempts. All others are answered.
#[derive(Clone, Copy)]
pub(crate) struct Faults {
    pub(crate) name: &'static str,
    pub(crate) not_sent: f64,
    /// The order is made, and the answer is lost.
    pub(crate) lost: f64,
    /// The request reaches the service only after its caller has given it up, and perhaps looked.
    pub(crate) late: f64,
    /// Answered with 503, and nothing done.
    pub(crate) unavailable: f64,
    /// Reset before anything was done.
    pub(crate) reset: f64,
}

/// A shop, and the way to it.
pub(crate) struct Shop {
    pub(crate) faults: Faults,
    /// It knows an order by its key.
    pub(crate) honours_keys: bool,
    /// Its callers look whether their order is there after an attempt without an answer.
    pub(crate) looks_up: bool,
    /// How many it gets.
    pub(crate) orders: usize,
    pub(crate) dice: Dice,
}

/// What came of it.
#[derive(Debug, Default)]
pub(crate) struct Books {
    pub(crate) orders: usize,
    pub(crate) requests: usize,
    pub(crate) look_ups: usize,
    pub(crate) made_twice: usize,
    pub(crate) succeeded: usize,
    pub(crate) told_unknown: usize,
    /// Told to be made and not made, or told to be not made and made.
    pub(crate) told_wrongly: usize,
}

#[derive(Clone, Copy, Default)]
struct Order {
    made: u32,
    told: Told,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Told {
    Made,
    Unknown,
    #[default]
    NotMade,
}

enum Event<O> {
    Arrival,
    /// An operation may start its next attempt.
    Due(usize, O),
    /// An attempt has been given up.
    GivenUp(usize, O),
    /// A request arrives whose caller has gone.
    Late(usize),
}

impl Model for Shop {
    type Result = Books;

    fn play<C: Caller>(self, callers: &mut [C]) -> Books {
        let mut day = Day {
            shop: self,
            caller: &mut callers[0],
            orders: Vec::new(),
            timeline: Timeline::new(),
            books: Books::default(),
        };
        day.timeline.put(Time::ZERO, Event::Arrival);
        while let Some((now, event)) = day.timeline.next() {
            match event {
                Event::Arrival => day.arrives(now),
                Event::Due(order, operation) => day.starts(order, operation, now),
                Event::GivenUp(order, operation) => day.is_given_up(order, operation, now),
                Event::Late(order) => day.make(order),
            }
        }
        day.close()
    }
}

struct Day<'c, C: Caller> {
    shop: Shop,
    caller: &'c mut C,
    orders: Vec<Order>,
    timeline: Timeline<Event<C::Operation>>,
    books: Books,
}

impl<C: Caller> Day<'_, C> {
    fn arrives(&mut self, now: Time) {
        let operation = self.caller.begin(now);
        self.orders.push(Order::default());
        if self.orders.len() < self.shop.orders {
            let gap = self.shop.dice.gap(PER_SECOND);
            self.timeline.put(now + gap, Event::Arrival);
        }
        self.starts(self.orders.len() - 1, operation, now);
    }

    fn starts(&mut self, order: usize, mut operation: C::Operation, now: Time) {
        match self.caller.start(&mut operation, now, &mut self.shop.dice) {
            Start::Now(_) => self.send(order, operation, now),
            Start::Later(wait) => {
                self.timeline.put(now + wait, Event::Due(order, operation));
            }
            Start::Never => self.tell(order, &operation),
        }
    }

    fn send(&mut self, order: usize, operation: C::Operation, now: Time) {
        self.books.requests += 1;
        let Faults {
            not_sent,
            lost,
            late,
            unavailable,
            reset,
            ..
        } = self.shop.faults;
        let mut left = self.shop.dice.uniform();
        let mut falls_to = |share: f64| {
            left -= share;
            left < 0.0
        };
        let given_up = now + ATTEMPT;
        if falls_to(not_sent) {
            self.ends(order, operation, Seen::NotSent, now);
        } else if falls_to(lost) {
            self.make(order);
            self.timeline
                .put(given_up, Event::GivenUp(order, operation));
        } else if falls_to(late) {
            let arrives = given_up + self.shop.dice.part_of(LATEST);
            self.timeline.put(arrives, Event::Late(order));
            self.timeline
                .put(given_up, Event::GivenUp(order, operation));
        } else if falls_to(unavailable) {
            self.ends(order, operation, Seen::Unavailable, now);
        } else if falls_to(reset) {
            self.is_given_up(order, operation, now);
        } else {
            self.make(order);
            self.ends(order, operation, Seen::Success, now);
        }
    }

    /// A request has reached the service.
    fn make(&mut self, order: usize) {
        let made = &mut self.orders[order].made;
        if *made == 0 || !self.shop.honours_keys {
            *made += 1;
        }
    }

    fn is_given_up(&mut self, order: usize, operation: C::Operation, now: Time) {
        if self.shop.looks_up {
            self.books.look_ups += 1;
            if self.orders[order].made > 0 {
                self.orders[order].told = Told::Made;
                return;
            }
        }
        self.ends(order, operation, Seen::NoAnswer, now);
    }

    fn ends(&mut self, order: usize, mut operation: C::Operation, seen: Seen, now: Time) {
        let dice = &mut self.shop.dice;
        match self.caller.end(&mut operation, seen, now, dice) {
            Next::Again(wait) => self.timeline.put(now + wait, Event::Due(order, operation)),
            Next::Over if seen == Seen::Success => self.orders[order].told = Told::Made,
            Next::Over => self.tell(order, &operation),
        }
    }

    /// The operation has ended without success.
    fn tell(&mut self, order: usize, operation: &C::Operation) {
        self.orders[order].told = match C::certainty(operation) {
            Some(Certainty::Unknown) => Told::Unknown,
            _ => Told::NotMade,
        };
    }

    fn close(self) -> Books {
        let count = |is_counted: fn(&&Order) -> bool| self.orders.iter().filter(is_counted).count();
        Books {
            orders: self.orders.len(),
            made_twice: count(|order| order.made > 1),
            succeeded: count(|order| order.told == Told::Made),
            told_unknown: count(|order| order.told == Told::Unknown),
            told_wrongly: count(|order| match order.told {
                Told::Made => order.made == 0,
                Told::NotMade => order.made > 0,
                Told::Unknown => false,
            }),
            ..self.books
        }
    }
}
