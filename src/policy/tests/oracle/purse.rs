//! Budgets that remember everything.

use std::time::Duration;

use super::{MILLISECOND, Nanos, nanos};
use crate::policy::tests::plan::{Purse, RATIOS};

pub(in crate::policy::tests) struct NaivePurse {
    kind: Kind,
    given: u64,
    returned: u64,
    refused: u64,
}

enum Kind {
    Unlimited,
    Tokens(Tokens),
    Window(Window),
}

struct Tokens {
    /// In ten-thousandths, as all amounts here.
    balance: Nanos,
    /// What it held at first, has earned and was paid, less what did not fit.
    income: Nanos,
    capacity: Nanos,
    earned: Nanos,
    trickle: Option<Nanos>,
    first_use: Option<Nanos>,
    trickled: Nanos,
}

struct Window {
    ratio: usize,
    reserve: usize,
    span: Nanos,
    first_use: Option<Nanos>,
    last_use: Nanos,
    operations: Vec<Nanos>,
    retries: Vec<Nanos>,
    waited_for: usize,
}

const TOKEN: Nanos = RATIOS as Nanos;

impl NaivePurse {
    pub(super) fn of(purse: &Purse) -> Self {
        Self {
            kind: Kind::of(purse),
            given: 0,
            returned: 0,
            refused: 0,
        }
    }

    pub(super) fn begin(&mut self, now: Nanos, counted: &mut Option<Nanos>) {
        if let Kind::Window(window) = &mut self.kind {
            window.count(now, counted);
        }
    }

    pub(super) fn take(&mut self, now: Nanos, counted: &mut Option<Nanos>) -> bool {
        let is_taken = match &mut self.kind {
            Kind::Unlimited => true,
            Kind::Tokens(tokens) => {
                tokens.trickle(now);
                tokens.take()
            }
            Kind::Window(window) => {
                window.count(now, counted);
                window.take()
            }
        };
        match is_taken {
            true => self.given += 1,
            false => self.refused += 1,
        }
        is_taken
    }

    pub(super) fn spend(&mut self, now: Nanos) {
        if let Kind::Window(window) = &mut self.kind {
            window.spend(now);
        }
    }

    pub(super) fn give_back(&mut self) {
        self.returned += 1;
        match &mut self.kind {
            Kind::Unlimited => {}
            Kind::Tokens(tokens) => {
                tokens.income -= TOKEN;
                tokens.add(TOKEN);
            }
            Kind::Window(window) => window.waited_for -= 1,
        }
    }

    pub(super) fn earn(&mut self, now: Nanos) {
        if let Kind::Tokens(tokens) = &mut self.kind {
            tokens.trickle(now);
            tokens.add(tokens.earned);
        }
    }

    /// What a bucket must hold after so many retries were started from it.
    pub(in crate::policy::tests) fn after(&self, retries: u32) -> Option<f64> {
        match &self.kind {
            Kind::Tokens(tokens) => {
                let left = tokens.income - Nanos::from(retries) * TOKEN;
                Some(left as f64 / TOKEN as f64)
            }
            Kind::Unlimited | Kind::Window(_) => None,
        }
    }

    pub(in crate::policy::tests) fn balance(&self) -> Option<f64> {
        match &self.kind {
            Kind::Unlimited => None,
            Kind::Tokens(tokens) => Some(tokens.balance as f64 / TOKEN as f64),
            Kind::Window(window) => Some(window.free() as f64),
        }
    }

    /// Tokens given, returned and refused.
    pub(in crate::policy::tests) fn counts(&self) -> (u64, u64, u64) {
        (self.given, self.returned, self.refused)
    }
}

impl Kind {
    fn of(purse: &Purse) -> Self {
        let tokens = |balance, capacity, earned, trickle| {
            Self::Tokens(Tokens {
                balance: Nanos::from(balance) * TOKEN,
                income: Nanos::from(balance) * TOKEN,
                capacity: Nanos::from(capacity) * TOKEN,
                earned: Nanos::from(earned),
                trickle,
                first_use: None,
                trickled: 0,
            })
        };
        match *purse {
            Purse::Unlimited => Self::Unlimited,
            Purse::Fixed(count) => tokens(count, count, 0, None),
            Purse::Earning {
                ratio,
                burst,
                initial,
                trickle,
            } => {
                let trickle = (trickle != Duration::MAX).then(|| nanos(trickle));
                tokens(initial, burst, ratio, trickle)
            }
            Purse::Window {
                ratio,
                per_second,
                span,
            } => {
                let span = span.as_millis();
                Self::Window(Window {
                    ratio: ratio as usize,
                    reserve: per_second as usize * span as usize / 1000,
                    span: span as Nanos,
                    first_use: None,
                    last_use: 0,
                    operations: Vec::new(),
                    retries: Vec::new(),
                    waited_for: 0,
                })
            }
        }
    }
}

impl Tokens {
    fn add(&mut self, amount: Nanos) {
        let before = self.balance;
        self.balance = (before + amount).min(self.capacity);
        self.income += self.balance - before;
    }

    fn take(&mut self) -> bool {
        let is_enough = self.balance >= TOKEN;
        if is_enough {
            self.balance -= TOKEN;
        }
        is_enough
    }

    fn trickle(&mut self, now: Nanos) {
        if let Some(every) = self.trickle {
            let spans = (now - *self.first_use.get_or_insert(now)) / every;
            self.add((spans - self.trickled) * TOKEN);
            self.trickled = spans;
        }
    }
}

impl Window {
    fn is_recent(&self, then: Nanos) -> bool {
        self.last_use - then < self.span
    }

    fn count(&mut self, now: Nanos, counted: &mut Option<Nanos>) {
        self.last_use = (now - *self.first_use.get_or_insert(now)) / MILLISECOND;
        if !counted.is_some_and(|then| self.is_recent(then)) {
            *counted = Some(self.last_use);
            self.operations.push(self.last_use);
        }
    }

    fn take(&mut self) -> bool {
        let is_free = self.free() > 0;
        self.waited_for += usize::from(is_free);
        is_free
    }

    fn spend(&mut self, now: Nanos) {
        self.last_use = (now - *self.first_use.get_or_insert(now)) / MILLISECOND;
        self.waited_for -= 1;
        self.retries.push(self.last_use);
    }

    fn free(&self) -> usize {
        let recent = |events: &[Nanos]| events.iter().filter(|&&at| self.is_recent(at)).count();
        let allowed = recent(&self.operations) * self.ratio / RATIOS as usize + self.reserve;
        allowed.saturating_sub(recent(&self.retries) + self.waited_for)
    }
}
