//! The documented rules once more, naively: whole nanoseconds that may go below zero, lists that
//! are never pruned, one line for each check.

mod breaker;
mod purse;
mod pushback;

use std::time::Duration;

pub(super) use self::breaker::{NaiveBreaker, NaiveFigures, NaivePass, NaiveTurn};
use self::purse::NaivePurse;
use self::pushback::NaivePushback;
use super::plan::{Curve, DRAWS, JITTERS, Plan};
use crate::policy::{Certainty, FirstSends, Outcome, ReplayClass, StopReason, Verdict};

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

/// Why there is no further attempt, and after what time another try may be let through.
pub(super) type ExpectedStop = (StopReason, Option<Nanos>);

/// What an operation that asks to start is to be told.
pub(super) enum Expected {
    Start {
        limit: Option<Nanos>,
        pass: Option<NaivePass>,
    },
    Wait(ExpectedWait),
}

/// What all operations share.
pub(super) struct NaiveLoad<'p> {
    pub(super) purse: NaivePurse,
    pub(super) pushback: Option<NaivePushback>,
    pub(super) breaker: Option<NaiveBreaker<'p>>,
}

impl<'p> NaiveLoad<'p> {
    pub(super) fn of(plan: &'p Plan) -> Self {
        Self {
            purse: NaivePurse::of(&plan.purse),
            pushback: plan.first_sends.map(|_| NaivePushback::default()),
            breaker: plan.fuse.as_ref().map(NaiveBreaker::of),
        }
    }

    /// An operation was asked to wait, with all others.
    pub(super) fn push_back(&mut self, now: Nanos, wait: Nanos) {
        if let Some(pushback) = &mut self.pushback {
            pushback.note(now, wait);
        }
    }

    pub(super) fn pushed_back(&self, now: Nanos) -> Nanos {
        let pushback = self.pushback.as_ref();
        pushback.map_or(0, |pushback| pushback.remaining(now))
    }

    pub(super) fn breaker(&mut self) -> &mut NaiveBreaker<'p> {
        self.breaker.as_mut().expect("the plan has one")
    }
}

pub(super) struct Oracle<'o, 'p> {
    plan: &'p Plan,
    pub(super) load: &'o mut NaiveLoad<'p>,
    started: Nanos,
    counted: Option<Nanos>,
    attempts: u32,
    previous_wait: Option<Nanos>,
    /// The floors waited out for the coming attempt.
    heeded: Vec<Nanos>,
    certainties: Vec<Certainty>,
    last: Option<Outcome>,
}

impl<'o, 'p> Oracle<'o, 'p> {
    pub(super) fn begin(plan: &'p Plan, load: &'o mut NaiveLoad<'p>, now: Nanos) -> Self {
        Self {
            plan,
            load,
            started: now,
            counted: None,
            attempts: 0,
            previous_wait: None,
            heeded: Vec::new(),
            certainties: plan.earlier.into_iter().collect(),
            last: None,
        }
    }

    pub(super) fn admit(
        &mut self,
        now: Nanos,
        draw: u32,
        cancelled: bool,
    ) -> Result<Expected, ExpectedStop> {
        let is_first = self.attempts == 0;
        let is_repeat = !is_first || self.certainties.len() > self.unsent();
        let floor = self.pushed_back(now);
        let refuses_first = self.first_sends() == FirstSends::Refuse;
        let is_refused = floor > 0
            && ((is_first && refuses_first)
                || self.heeded.iter().sum::<Nanos>() + floor > nanos(self.plan.max_retry_after)
                || !self.fits(now, floor));
        let checks = [
            (StopReason::Cancelled, None, cancelled),
            (
                StopReason::KeyExpired,
                None,
                is_repeat && self.outlives_key(now, 0),
            ),
            (
                StopReason::UnsafeToRepeat,
                None,
                self.plan.replay == ReplayClass::Unsafe && is_maybe_done(self.certainty()),
            ),
            (StopReason::DeadlineTooClose, None, !self.fits(now, 0)),
            (StopReason::RetryAfterTooLong, Some(floor), is_refused),
        ];
        if let Some(stop) = first(&checks) {
            return Err(stop);
        }
        if floor > 0 {
            let wait = self.wait_on(floor, now, draw);
            if is_repeat && self.outlives_key(now, wait.delay) {
                return Err((StopReason::KeyExpired, None));
            }
            self.heeded.push(floor);
            return Ok(Expected::Wait(wait));
        }
        let pass = match &mut self.load.breaker {
            None => None,
            Some(breaker) => Some(breaker.enter(now, is_first).map_err(breaker_open)?),
        };
        let limit = self.limit(now, 0);
        Ok(Expected::Start { limit, pass })
    }

    /// What a host that others were asked to spare asks of the coming attempt.
    fn pushed_back(&self, now: Nanos) -> Nanos {
        let is_spared = self.attempts > 0 || self.first_sends() != FirstSends::Pass;
        match is_spared {
            true => self.load.pushed_back(now),
            false => 0,
        }
    }

    fn first_sends(&self) -> FirstSends {
        self.plan.first_sends.unwrap_or_default()
    }

    pub(super) fn start(&mut self, now: Nanos) {
        self.attempts += 1;
        self.heeded.clear();
        if self.attempts == 1 {
            self.load.purse.begin(now, &mut self.counted);
        }
    }

    pub(super) fn record(&mut self, outcome: &Outcome, now: Nanos) {
        if let (Some(wait), true) = (outcome.retry_after, outcome.pushes_back) {
            self.load.push_back(now, nanos(wait));
        }
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
    ) -> Result<Option<ExpectedWait>, ExpectedStop> {
        if outcome.verdict == Verdict::Done {
            return Ok(None);
        }
        let plan = self.plan;
        let backoff = self.backoff(draw);
        let own = self.wait(outcome.retry_after.map_or(0, nanos), backoff, now);
        let wait = self.wait(own.floor.max(self.load.pushed_back(now)), backoff, now);
        let is_too_long =
            |floor| floor > nanos(plan.max_retry_after) || (floor > 0 && !self.fits(now, floor));
        let checks = [
            (StopReason::Cancelled, None, cancelled),
            (
                StopReason::NotRetryable,
                None,
                outcome.verdict == Verdict::Final,
            ),
            (
                StopReason::KeyExpired,
                None,
                self.outlives_key(now, wait.delay),
            ),
            (
                StopReason::UnsafeToRepeat,
                None,
                plan.replay == ReplayClass::Unsafe && is_maybe_done(outcome.certainty),
            ),
            (StopReason::ServerVeto, None, outcome.veto),
            (StopReason::SpentBelow, None, outcome.retried_below),
            (
                StopReason::AttemptsExhausted,
                None,
                self.attempts >= plan.limits.max_attempts,
            ),
            (StopReason::BodyNotReplayable, None, !plan.body_replayable),
            (StopReason::RetryAfterTooLong, None, is_too_long(own.floor)),
            (
                StopReason::DeadlineTooClose,
                None,
                !self.fits(now, own.delay),
            ),
            (
                StopReason::RetryAfterTooLong,
                Some(wait.floor),
                is_too_long(wait.floor),
            ),
        ];
        if let Some(stop) = first(&checks) {
            return Err(stop);
        }
        if let Some(breaker) = &mut self.load.breaker {
            breaker.check(now, false).map_err(breaker_open)?;
        }
        if !self.load.purse.take(now, &mut self.counted) {
            return Err((StopReason::BudgetExhausted, None));
        }
        let is_left_to_outer =
            plan.nested && (plan.repeats_alike || !is_maybe_done(self.certainty()));
        if is_left_to_outer {
            self.give_back();
            let after = Some(wait.floor).filter(|&floor| floor > 0);
            return Err((StopReason::NestedLayer, after));
        }
        self.heeded.push(wait.floor);
        Ok(Some(wait))
    }

    pub(super) fn spend(&mut self, now: Nanos) {
        self.load.purse.spend(now);
    }

    pub(super) fn give_back(&mut self) {
        self.load.purse.give_back();
    }

    pub(super) fn earn(&mut self, now: Nanos) {
        self.load.purse.earn(now);
    }

    /// The instant from which no attempt may run.
    pub(super) fn end(&self) -> Option<Nanos> {
        let deadline = self.plan.deadline?;
        Some(self.started + nanos(deadline) - nanos(self.plan.limits.reserve))
    }

    /// The last instant at which an attempt still has the least time.
    pub(super) fn latest_start(&self) -> Option<Nanos> {
        self.end().map(|end| end - self.least_attempt())
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

    fn wait(&self, floor: Nanos, backoff: Backoff, now: Nanos) -> ExpectedWait {
        let Backoff {
            window,
            least,
            random,
        } = backoff;
        let delay = match random {
            Some(random) if floor > 0 => self.on_top(floor, random, now),
            random => floor.max(least + random.unwrap_or(0)),
        };
        ExpectedWait {
            floor,
            window,
            delay,
        }
    }

    /// The backoff has been waited before, or is not asked for: only its jitter goes on top.
    fn wait_on(&mut self, floor: Nanos, now: Nanos, draw: u32) -> ExpectedWait {
        let Backoff { window, random, .. } = self.backoff(draw);
        ExpectedWait {
            floor,
            window,
            delay: self.on_top(floor, random.unwrap_or(0), now),
        }
    }

    /// Jitter is clipped to the time left, a floor never.
    fn on_top(&self, floor: Nanos, random: Nanos, now: Nanos) -> Nanos {
        let room = self.latest_start().map(|latest| latest - now);
        let wished = floor + random;
        wished.min(room.unwrap_or(wished)).max(floor)
    }

    fn backoff(&mut self, draw: u32) -> Backoff {
        let retry = self.attempts.saturating_sub(1) as usize;
        let backoff = draw_from(&self.plan.curve, retry, draw, self.previous_wait);
        self.previous_wait = Some(backoff.least + backoff.random.unwrap_or(0));
        backoff
    }
}

#[derive(Clone, Copy)]
struct Backoff {
    window: Nanos,
    least: Nanos,
    random: Option<Nanos>,
}

/// The wait before a retry, `previous` having been the one before it.
fn draw_from(curve: &Curve, retry: usize, draw: u32, previous: Option<Nanos>) -> Backoff {
    match curve {
        &Curve::Exponential {
            base,
            cap,
            factor,
            jitter,
        } => {
            let growth = (0..retry).fold(1, |growth: Nanos, _| {
                growth.saturating_mul(Nanos::from(factor))
            });
            let window = nanos(base).saturating_mul(growth).min(nanos(cap));
            let spread = part(window, jitter, JITTERS);
            Backoff {
                window,
                least: window - spread,
                random: (jitter > 0).then(|| part(spread, draw, DRAWS)),
            }
        }
        &Curve::Decorrelated { base, cap } => {
            let (base, cap) = (nanos(base), nanos(cap));
            let longest = 3 * previous.unwrap_or(base);
            let wait = (base + part(longest - base, draw, DRAWS)).min(cap);
            Backoff {
                window: cap,
                least: base,
                random: Some(wait - base),
            }
        }
        Curve::Fixed(delays) => {
            let window = nanos(delays[delays.len().min(retry + 1) - 1]);
            Backoff {
                window,
                least: window,
                random: None,
            }
        }
    }
}

fn part(whole: Nanos, part: u32, of: u32) -> Nanos {
    let product = whole * Nanos::from(part);
    assert_eq!(product % Nanos::from(of), 0, "plans keep to whole numbers");
    product / Nanos::from(of)
}

fn breaker_open(after: Option<Nanos>) -> ExpectedStop {
    (StopReason::BreakerOpen, after)
}

fn first(checks: &[(StopReason, Option<Nanos>, bool)]) -> Option<ExpectedStop> {
    let holds = checks.iter().find(|check| check.2);
    holds.map(|&(reason, after, _)| (reason, after))
}

pub(super) fn is_maybe_done(certainty: Certainty) -> bool {
    matches!(certainty, Certainty::Unknown | Certainty::Answered)
}
