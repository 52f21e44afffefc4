//! The documented rules once more, naively: whole nanoseconds that may go below zero, lists that
//! are never pruned, one line for each check.

use std::time::Duration;

use super::plan::{Curve, DRAWS, JITTERS, Plan, Purse, RATIOS};
use crate::policy::{Certainty, Outcome, ReplayClass, StopReason, Verdict};

/// A point in virtual time, or a span, in nanoseconds.
pub(super) type Nanos = i128;

const MILLISECOND: Nanos = 1_000_000;

pub(super) fn nanos(span: Duration) -> Nanos {
    Nanos::try_from(span.as_nanos()).expect("a Duration has less than 2^127 ns")
}

/// The wait that the oracle expects, and what it may consist of.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpectedWait {
    pub(super) floor: Nanos,
    pub(super) window: Nanos,
    pub(super) delay: Nanos,
}

pub(super) struct Oracle<'p> {
    plan: &'p Plan,
    purse: &'p mut NaivePurse,
    started: Nanos,
    counted: Option<Nanos>,
    attempts: u32,
    previous_wait: Option<Nanos>,
    certainties: Vec<Certainty>,
    last: Option<Outcome>,
}

impl<'p> Oracle<'p> {
    pub(super) fn begin(plan: &'p Plan, purse: &'p mut NaivePurse, now: Nanos) -> Self {
        Self {
            plan,
            purse,
            started: now,
            counted: None,
            attempts: 0,
            previous_wait: None,
            certainties: plan.earlier.into_iter().collect(),
            last: None,
        }
    }

    pub(super) fn admit(&self, now: Nanos, cancelled: bool) -> Result<Option<Nanos>, StopReason> {
        let is_repeat = self.certainties.len() > self.unsent();
        let checks = [
            (StopReason::Cancelled, cancelled),
            (
                StopReason::KeyExpired,
                (is_repeat || self.attempts > 0) && self.outlives_key(now, 0),
            ),
            (
                StopReason::UnsafeToRepeat,
                self.plan.replay == ReplayClass::Unsafe && is_maybe_done(self.certainty()),
            ),
            (StopReason::DeadlineTooClose, !self.fits(now, 0)),
        ];
        match first(&checks) {
            Some(reason) => Err(reason),
            None => Ok(self.limit(now, 0)),
        }
    }

    pub(super) fn start(&mut self, now: Nanos) {
        self.attempts += 1;
        if self.attempts == 1 {
            self.purse.begin(now, &mut self.counted);
        }
    }

    pub(super) fn record(&mut self, outcome: &Outcome) {
        self.certainties.push(outcome.certainty);
        self.last = Some(*outcome);
    }

    /// An answer of an earlier run is not at hand any more, so it settles nothing here.
    pub(super) fn certainty(&self) -> Certainty {
        if self.last.is_some_and(|last| self.is_settled_by(&last)) {
            return Certainty::Answered;
        }
        let refused = self.count(Certainty::NotProcessed);
        match self.certainties.len() - self.unsent() - refused {
            0 if refused == 0 => Certainty::NotSent,
            0 => Certainty::NotProcessed,
            _ => Certainty::Unknown,
        }
    }

    fn is_settled_by(&self, last: &Outcome) -> bool {
        let is_unclear = self.count(Certainty::Unknown) > 0;
        let speaks_for_all = match self.plan.replay {
            ReplayClass::Safe => true,
            ReplayClass::Idempotent | ReplayClass::Keyed => last.success || !is_unclear,
            ReplayClass::Unsafe => !is_unclear,
        };
        last.certainty == Certainty::Answered && speaks_for_all
    }

    fn count(&self, certainty: Certainty) -> usize {
        self.certainties
            .iter()
            .filter(|&&seen| seen == certainty)
            .count()
    }

    fn unsent(&self) -> usize {
        self.count(Certainty::NotSent)
    }

    /// `Ok(None)`: the answer is handed on. Takes the token where a wait follows.
    pub(super) fn decide(
        &mut self,
        outcome: &Outcome,
        now: Nanos,
        draw: u32,
        cancelled: bool,
    ) -> Result<Option<ExpectedWait>, StopReason> {
        if outcome.verdict == Verdict::Done {
            return Ok(None);
        }
        let plan = self.plan;
        let wait = self.wait(outcome, now, draw);
        let checks = [
            (StopReason::Cancelled, cancelled),
            (StopReason::NotRetryable, outcome.verdict == Verdict::Final),
            (StopReason::KeyExpired, self.outlives_key(now, wait.delay)),
            (
                StopReason::UnsafeToRepeat,
                plan.replay == ReplayClass::Unsafe && is_maybe_done(outcome.certainty),
            ),
            (StopReason::ServerVeto, outcome.veto),
            (
                StopReason::AttemptsExhausted,
                self.attempts >= plan.limits.max_attempts,
            ),
            (StopReason::BodyNotReplayable, !plan.body_replayable),
            (
                StopReason::RetryAfterTooLong,
                wait.floor > nanos(plan.max_retry_after)
                    || (wait.floor > 0 && !self.fits(now, wait.floor)),
            ),
            (StopReason::DeadlineTooClose, !self.fits(now, wait.delay)),
        ];
        if let Some(reason) = first(&checks) {
            return Err(reason);
        }
        match self.purse.take(now, &mut self.counted) {
            true => Ok(Some(wait)),
            false => Err(StopReason::BudgetExhausted),
        }
    }

    pub(super) fn spend(&mut self, now: Nanos) {
        if let NaivePurse::Window(window) = &mut *self.purse {
            window.spend(now);
        }
    }

    pub(super) fn give_back(&mut self) {
        self.purse.give_back();
    }

    pub(super) fn earn(&mut self, now: Nanos) {
        self.purse.earn(now);
    }

    /// The instant from which no attempt may run.
    pub(super) fn end(&self) -> Option<Nanos> {
        let deadline = self.plan.deadline?;
        Some(self.started + nanos(deadline) - nanos(self.plan.limits.reserve))
    }

    pub(super) fn least_attempt(&self) -> Nanos {
        nanos(self.plan.limits.minimum_attempt).max(MILLISECOND)
    }

    fn fits(&self, now: Nanos, delay: Nanos) -> bool {
        self.end()
            .is_none_or(|end| now + delay + self.least_attempt() <= end)
    }

    fn limit(&self, now: Nanos, delay: Nanos) -> Option<Nanos> {
        let left = self.end().map(|end| (end - now - delay).max(0));
        let timeout = self.plan.limits.attempt_timeout.map(nanos);
        [left, timeout].into_iter().flatten().min()
    }

    fn outlives_key(&self, now: Nanos, delay: Nanos) -> bool {
        let Some(lifetime) = self.plan.key_lifetime else {
            return false;
        };
        let expires = self.started + nanos(lifetime);
        let ends = now + delay + self.limit(now, delay).unwrap_or(0);
        now >= expires || ends > expires
    }

    fn wait(&mut self, outcome: &Outcome, now: Nanos, draw: u32) -> ExpectedWait {
        let floor = outcome.retry_after.map_or(0, nanos);
        let Backoff {
            window,
            least,
            random,
        } = self.backoff(draw);
        let delay = match random {
            Some(random) if floor > 0 => {
                let room = self.end().map(|end| end - self.least_attempt() - now);
                let wished = floor + random;
                wished.min(room.unwrap_or(wished)).max(floor)
            }
            random => floor.max(least + random.unwrap_or(0)),
        };
        ExpectedWait {
            floor,
            window,
            delay,
        }
    }

    fn backoff(&mut self, draw: u32) -> Backoff {
        let part = |whole: Nanos, part: u32, of: u32| whole * Nanos::from(part) / Nanos::from(of);
        let retry = self.attempts - 1;
        match &self.plan.curve {
            &Curve::Exponential {
                base,
                cap,
                factor,
                jitter,
            } => {
                let window = (nanos(base) * Nanos::from(factor.pow(retry))).min(nanos(cap));
                let spread = part(window, jitter, JITTERS);
                Backoff {
                    window,
                    least: window - spread,
                    random: (jitter > 0).then(|| part(spread, draw, DRAWS)),
                }
            }
            &Curve::Decorrelated { base, cap } => {
                let (base, cap) = (nanos(base), nanos(cap));
                let longest = 3 * self.previous_wait.unwrap_or(base);
                let wait = (base + part(longest - base, draw, DRAWS)).min(cap);
                self.previous_wait = Some(wait);
                Backoff {
                    window: cap,
                    least: base,
                    random: Some(wait - base),
                }
            }
            Curve::Fixed(delays) => {
                let window = nanos(delays[delays.len().min(retry as usize + 1) - 1]);
                Backoff {
                    window,
                    least: window,
                    random: None,
                }
            }
        }
    }
}

struct Backoff {
    window: Nanos,
    least: Nanos,
    random: Option<Nanos>,
}

fn first(checks: &[(StopReason, bool)]) -> Option<StopReason> {
    checks.iter().find(|check| check.1).map(|check| check.0)
}

pub(super) fn is_maybe_done(certainty: Certainty) -> bool {
    matches!(certainty, Certainty::Unknown | Certainty::Answered)
}

/// A budget that remembers everything.
pub(super) enum NaivePurse {
    Unlimited,
    Tokens(Tokens),
    Window(Window),
}

pub(super) struct Tokens {
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

pub(super) struct Window {
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

    fn begin(&mut self, now: Nanos, counted: &mut Option<Nanos>) {
        if let Self::Window(window) = self {
            window.count(now, counted);
        }
    }

    fn take(&mut self, now: Nanos, counted: &mut Option<Nanos>) -> bool {
        match self {
            Self::Unlimited => true,
            Self::Tokens(tokens) => {
                tokens.trickle(now);
                tokens.take()
            }
            Self::Window(window) => {
                window.count(now, counted);
                window.take()
            }
        }
    }

    fn give_back(&mut self) {
        match self {
            Self::Unlimited => {}
            Self::Tokens(tokens) => {
                tokens.income -= TOKEN;
                tokens.add(TOKEN);
            }
            Self::Window(window) => window.waited_for -= 1,
        }
    }

    fn earn(&mut self, now: Nanos) {
        if let Self::Tokens(tokens) = self {
            tokens.trickle(now);
            tokens.add(tokens.earned);
        }
    }

    /// What a bucket must hold after so many retries were started from it.
    pub(super) fn after(&self, retries: u32) -> Option<f64> {
        match self {
            Self::Tokens(tokens) => {
                let left = tokens.income - Nanos::from(retries) * TOKEN;
                Some(left as f64 / TOKEN as f64)
            }
            Self::Unlimited | Self::Window(_) => None,
        }
    }

    pub(super) fn balance(&self) -> Option<f64> {
        match self {
            Self::Unlimited => None,
            Self::Tokens(tokens) => Some(tokens.balance as f64 / TOKEN as f64),
            Self::Window(window) => Some(window.free() as f64),
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
