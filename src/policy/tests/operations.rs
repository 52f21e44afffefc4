//! Whole operations, played as `src/middleware.rs` plays them, against the oracle at every step and
//! against the promises of the crate over the whole course.

use std::slice;
use std::time::{Duration, Instant};

use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::oracle::{Expected, ExpectedStop, ExpectedWait, NaiveLoad, Nanos, Oracle, nanos};
use super::others::{Leave, Others, agree};
use super::plan::{DRAWS, Interrupt, Meanwhile, Plan, Purse, Script, Step, plans};
use super::promises::{Course, Try, Wait};
use super::tally::Tally;
use crate::clock;
use crate::policy::{
    Admission, BreakerState, Call, Certainty, Decision, FirstSends, Health, Moment, Outcome,
    Reservation, RetryBudget, Stop, StopReason, Terms,
};

const CASES: u32 = 30_000;

const BRANCHES: [&str; 71] = [
    "retry",
    "refund",
    "handed on",
    "timed out",
    "left hanging",
    "attempt without limit",
    "floor in the wait",
    "floor with jitter clipped",
    "certainty NotSent",
    "certainty NotProcessed",
    "certainty Unknown",
    "certainty Answered",
    "answered after unknown",
    "unknown after an answer",
    "carried over",
    "class Safe",
    "class Idempotent",
    "class Keyed",
    "class Unsafe",
    "backoff exponential",
    "backoff jittered",
    "backoff decorrelated",
    "backoff fixed",
    "no budget",
    "budget fixed",
    "budget earning",
    "budget window",
    "no pushback",
    "first sends pass",
    "first sends wait",
    "first sends are refused",
    "no breaker",
    "breaker by failures in a row",
    "breaker by share",
    "breaker by both",
    "breaker gates first sends",
    "breaker with 1 permits",
    "breaker with 2 permits",
    "cancelled before start",
    "cancelled in pushback",
    "cancelled in line",
    "cancelled in flight",
    "cancelled at landing",
    "cancelled in wait",
    "nested",
    "retry of a nested one",
    "retried below",
    "floor that others were told",
    "first send in spite of pushback",
    "first send waits",
    "retry waits on",
    "too long only in sum",
    "too long for the deadline",
    "first send refused for the host",
    "refused for an hour",
    "retry refused while open",
    "retry refused while half-open",
    "first send refused by the breaker",
    "first send in spite of the breaker",
    "retry with a permit",
    "another one is refused",
    "opens",
    "opens again",
    "closes again",
    "straggler",
    "first send that began half-open",
    "late result of an expired permit",
    "in line",
    "refund for the line",
    "waits on after the line",
    "stopped after the line",
];

/// After a wait the clock is read again, and any of these can have come to hold meanwhile.
const NOT_ADMITTED: [StopReason; 7] = [
    StopReason::Cancelled,
    StopReason::KeyExpired,
    StopReason::UnsafeToRepeat,
    StopReason::DeadlineTooClose,
    StopReason::RetryAfterTooLong,
    StopReason::BreakerOpen,
    StopReason::ConcurrencyLimit,
];

#[test]
fn every_operation_keeps_every_promise() {
    let tally = Tally::default();
    let config = Config {
        cases: CASES,
        failure_persistence: None,
        ..Config::default()
    };
    let seeded = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    TestRunner::new_with_rng(config, seeded)
        .run(&plans(), |plan| {
            play(&plan, &tally);
            Ok(())
        })
        .unwrap_or_else(|broken| panic!("{broken}"));
    tally.print();
    for branch in BRANCHES {
        tally.demand(branch);
    }
    for reason in NOT_ADMITTED {
        tally.demand(&format!("not admitted {reason:?}"));
    }
    let beside_the_core = [StopReason::InvalidInput, StopReason::ConcurrencyLimit];
    for reason in StopReason::ALL {
        if !beside_the_core.contains(&reason) {
            tally.demand(&format!("decided {reason:?}"));
        }
    }
}

/// Plays all operations of a plan on one load state.
fn play(plan: &Plan, tally: &Tally) {
    tally.count_settings(plan);
    let budget = plan.purse.budget();
    let breaker = plan.fuse.as_ref().map(|fuse| fuse.breaker());
    let pushback = plan.pushback();
    let pacing = plan.pacing();
    let terms = Terms {
        pacing: &pacing,
        pushback: pushback.as_ref(),
        breaker: breaker.as_ref(),
        is_within_a_probe: false,
        budget: budget.as_ref(),
    };
    let mut load = NaiveLoad::of(plan);
    let mut others = Others::new(terms, tally);
    let mut time = Timeline {
        base: clock::now(),
        now: 0,
    };
    agree(&terms, time, &mut load);
    let mut retries = 0;
    for script in &plan.scripts {
        time.pass(nanos(script.gap));
        let run = Run::begin(plan, terms, &mut load, &mut others, time, tally);
        let course = run.play(script);
        course.keeps_its_promises(plan);
        retries += course.retries;
        time = course.time;
        let balance = budget.as_ref().map(RetryBudget::balance);
        if let Some(left) = load.purse.after(retries) {
            assert_eq!(balance, Some(left), "initial + earned - started");
        }
        if let Purse::Fixed(tokens) = plan.purse {
            assert_eq!(balance, Some(f64::from(tokens) - f64::from(retries)));
        }
    }
}

/// Virtual time.
#[derive(Clone, Copy)]
pub(super) struct Timeline {
    base: Instant,
    pub(super) now: Nanos,
}

impl Timeline {
    fn pass(&mut self, span: Nanos) {
        self.now += span;
    }

    pub(super) fn instant(&self) -> Instant {
        self.at(self.now)
    }

    fn at(&self, point: Nanos) -> Instant {
        self.base + duration(point)
    }
}

fn duration(span: Nanos) -> Duration {
    Duration::from_nanos(u64::try_from(span).expect("virtual time goes forward"))
}

pub(super) fn draw(drawn: u32) -> f64 {
    f64::from(drawn) / f64::from(DRAWS)
}

/// An operation on its way, with the oracle beside it.
struct Run<'r, 'o> {
    plan: &'r Plan,
    terms: Terms<'r>,
    oracle: Oracle<'o, 'r>,
    others: &'o mut Others<'r>,
    meanwhile: slice::Iter<'r, Meanwhile>,
    call: Call,
    time: Timeline,
    tally: &'r Tally,
    course: Course,
}

/// A token that is out.
type Token<'r> = Reservation<'r>;

/// An attempt that may start.
struct Start<'r> {
    limit: Option<Nanos>,
    leave: Option<Leave<'r>>,
}

/// An attempt that has ended, and may have been the last.
struct Ended<'r> {
    leave: Option<Leave<'r>>,
    health: Health,
    draw: u32,
}

/// A wait after an attempt, with the token for the next one.
struct Waited<'r> {
    token: Token<'r>,
    ended: Ended<'r>,
}

/// The answer to an operation that asks to start.
enum Asked<'r> {
    Start(Start<'r>),
    Wait(ExpectedWait),
}

impl<'r, 'o> Run<'r, 'o> {
    fn begin(
        plan: &'r Plan,
        terms: Terms<'r>,
        load: &'o mut NaiveLoad<'r>,
        others: &'o mut Others<'r>,
        time: Timeline,
        tally: &'r Tally,
    ) -> Self {
        let mut call = Call::new(plan.replay, plan.limits, plan.earlier);
        call.deadline = plan.deadline.map(|span| time.instant() + span);
        call.key_expires = plan.key_lifetime.map(|span| time.instant() + span);
        call.body_replayable = plan.body_replayable;
        call.nested = plan.nested;
        call.repeats_alike = plan.repeats_alike;
        let oracle = Oracle::begin(plan, load, time.now);
        Self {
            plan,
            terms,
            course: Course::new(time, &oracle),
            oracle,
            others,
            meanwhile: [].iter(),
            call,
            time,
            tally,
        }
    }

    /// The loop of `src/middleware.rs`.
    fn play(mut self, script: &'r Script) -> Course {
        let mut waited: Option<Waited<'r>> = None;
        let mut steps = script.steps.iter();
        loop {
            let step = steps.next().expect("every operation ends");
            self.meanwhile = step.meanwhile.iter();
            let start = match self.admit(step) {
                Ok(start) => start,
                Err(reason) => {
                    self.abandon(waited, reason);
                    break;
                }
            };
            let limit = start.limit;
            self.start(waited.take(), &start);
            let Some(outcome) = self.attempt(step, limit) else {
                self.give_up(start.leave, step);
                break;
            };
            let ended = Ended {
                leave: start.leave,
                health: outcome.health,
                draw: step.rough_draw,
            };
            let (wait, token) = match self.decide(step, &outcome) {
                Ok(wait) => wait,
                Err(reason) => {
                    self.settle(ended, reason);
                    break;
                }
            };
            if self.is_interrupted(step, Interrupt::InWait, "cancelled in wait") {
                self.refund(token);
                self.settle(ended, Some(StopReason::Cancelled));
                break;
            }
            self.pass(wait.delay + nanos(step.late));
            waited = Some(Waited { token, ended });
        }
        self.agree();
        self.course.time = self.time;
        self.course
    }

    /// Time passes, and others use it.
    fn pass(&mut self, span: Nanos) {
        let Some(meanwhile) = self.meanwhile.next() else {
            return self.time.pass(span);
        };
        let before = span * Nanos::from(meanwhile.quarters) / 4;
        self.time.pass(before);
        self.others
            .play(meanwhile.event, self.time, self.oracle.load);
        self.time.pass(span - before);
    }

    fn agree(&mut self) {
        agree(&self.terms, self.time, self.oracle.load);
    }

    /// `RetryMiddleware::admit`.
    fn admit(&mut self, step: &Step) -> Result<Start<'r>, StopReason> {
        let mut cancelled =
            self.is_interrupted(step, Interrupt::BeforeStart, "cancelled before start");
        let mut line = step.line.map(nanos);
        let mut has_lined_up = false;
        loop {
            let asked = self.ask(step, cancelled);
            self.agree();
            match asked {
                Err((reason, after)) => {
                    self.count_refusal(reason, after);
                    self.tally.count_if(has_lined_up, "stopped after the line");
                    return Err(reason);
                }
                Ok(Asked::Wait(wait)) => {
                    self.note_wait(wait);
                    self.tally.count_if(has_lined_up, "waits on after the line");
                    cancelled =
                        self.is_interrupted(step, Interrupt::InPushback, "cancelled in pushback");
                    if !cancelled {
                        self.pass(wait.delay);
                    }
                }
                Ok(Asked::Start(start)) => {
                    let Some(line) = line.take() else {
                        return Ok(start);
                    };
                    self.forgo(start.leave);
                    if let Err(reason) = self.line_up(step, line) {
                        self.tally
                            .count_if(!self.course.attempts.is_empty(), "refund for the line");
                        self.count_refusal(reason, None);
                        return Err(reason);
                    }
                    has_lined_up = true;
                }
            }
        }
    }

    fn ask(&mut self, step: &Step, cancelled: bool) -> Result<Asked<'r>, ExpectedStop> {
        let at = Moment {
            now: self.time.instant(),
            cancelled,
            draw: &|| draw(step.rough_draw),
        };
        let asked = self.call.admit(&self.terms, at);
        let expected = self.oracle.admit(self.time.now, step.rough_draw, cancelled);
        match (asked, expected) {
            (
                Ok(Admission::Start { limit, pass }),
                Ok(Expected::Start {
                    limit: most,
                    pass: naive,
                }),
            ) => {
                let limit = limit.map(nanos);
                assert_eq!(limit, most);
                let leave = Leave::of(pass, naive);
                Ok(Asked::Start(Start { limit, leave }))
            }
            (Ok(Admission::Wait(delay)), Ok(Expected::Wait(wait))) => {
                assert_eq!(nanos(delay), wait.delay, "{wait:?}");
                Ok(Asked::Wait(wait))
            }
            (Err(Stop { reason, after }), Err(expected)) => {
                assert_eq!((reason, after.map(nanos)), expected);
                Err(expected)
            }
            (asked, _) => panic!("{asked:?}"),
        }
    }

    /// Waits for a concurrency permit, as long as an attempt could still start.
    fn line_up(&mut self, step: &Step, line: Nanos) -> Result<(), StopReason> {
        self.tally.count("in line");
        let latest = self.oracle.latest_start();
        let until = latest.map(|latest| self.time.at(latest));
        assert_eq!(self.call.latest_start(), until);
        if self.is_interrupted(step, Interrupt::InLine, "cancelled in line") {
            return Err(StopReason::Cancelled);
        }
        match latest.map(|latest| latest - self.time.now) {
            Some(longest) if line > longest => {
                self.pass(longest);
                Err(StopReason::ConcurrencyLimit)
            }
            _ => {
                self.pass(line);
                Ok(())
            }
        }
    }

    fn count_refusal(&mut self, reason: StopReason, after: Option<Nanos>) {
        self.course.refused = Some(reason);
        self.tally.count(&format!("not admitted {reason:?}"));
        let is_first = self.course.attempts.is_empty();
        match reason {
            StopReason::RetryAfterTooLong => {
                let first_sends = self.plan.first_sends;
                let is_refused = is_first && first_sends == Some(FirstSends::Refuse);
                let wish = after.expect("the host has told it");
                let fits_alone = wish <= nanos(self.plan.max_retry_after);
                let latest = self.oracle.latest_start();
                let fits_deadline = latest.is_none_or(|latest| self.time.now + wish <= latest);
                self.tally
                    .count(match (is_refused, fits_alone, fits_deadline) {
                        (true, _, _) => "first send refused for the host",
                        (_, _, false) => "too long for the deadline",
                        (_, true, _) => "too long only in sum",
                        (_, false, _) => "too long by itself",
                    });
                let is_about_an_hour = wish > nanos(Duration::from_secs(3_500));
                self.tally.count_if(is_about_an_hour, "refused for an hour");
            }
            StopReason::BreakerOpen if is_first => {
                self.tally.count("first send refused by the breaker");
            }
            _ => {}
        }
    }

    fn start(&mut self, waited: Option<Waited<'r>>, start: &Start<'r>) {
        if let Some(Waited { token, ended, .. }) = waited {
            token.spend(self.time.instant());
            self.oracle.spend(self.time.now);
            self.forgo(ended.leave);
            self.course.retries += 1;
        }
        let limit = start.limit;
        let pushed_back = self.oracle.load.pushed_back(self.time.now);
        self.count_start(start, pushed_back);
        let started = self.call.attempts();
        assert_eq!(
            self.call.is_last_attempt(),
            started + 1 >= self.plan.limits.max_attempts
        );
        self.call.start_attempt(&self.terms, self.time.instant());
        self.oracle.start(self.time.now);
        assert_eq!(self.call.attempts(), started + 1);
        self.course.attempts.push(Try {
            limit,
            ends: limit.map(|limit| self.time.now + limit),
            pushed_back,
            outcome: None,
        });
        self.agree();
    }

    fn count_start(&mut self, start: &Start<'r>, pushed_back: Nanos) {
        let is_retry = !self.course.attempts.is_empty();
        self.tally.count_if(is_retry, "retry");
        self.tally
            .count_if(is_retry && self.plan.nested, "retry of a nested one");
        self.tally
            .count_if(start.limit.is_none(), "attempt without limit");
        self.tally
            .count_if(pushed_back > 0, "first send in spite of pushback");
        let Some(leave) = &start.leave else { return };
        self.tally
            .count_if(is_retry && leave.has_permit(), "retry with a permit");
        let state = self.oracle.load.breaker().figures(self.time.now).state;
        self.tally.count_if(
            state == BreakerState::Open,
            "first send in spite of the breaker",
        );
    }

    /// `None`: the caller gave up while it was in the air, or it hangs for ever.
    fn attempt(&mut self, step: &Step, limit: Option<Nanos>) -> Option<Outcome> {
        if self.is_interrupted(step, Interrupt::InFlight, "cancelled in flight") {
            return None;
        }
        let lands = step.takes.map(nanos);
        let (takes, outcome) = match (lands, limit) {
            (Some(takes), None) => (takes, step.outcome),
            (Some(takes), Some(limit)) if takes <= limit => (takes, step.outcome),
            (_, Some(limit)) => {
                self.tally.count("timed out");
                (limit, step.timed_out())
            }
            (None, None) => {
                self.tally.count("left hanging");
                return None;
            }
        };
        self.pass(takes);
        self.land(&outcome);
        Some(outcome)
    }

    fn land(&mut self, outcome: &Outcome) {
        let was_unclear = self.call.maybe_applied();
        let before = self.call.certainty();
        self.call.record(outcome, &self.terms, self.time.instant());
        self.oracle.record(outcome, self.time.now);
        let after = self.call.certainty();
        assert_eq!(after, self.oracle.certainty());
        self.tally.count(&format!("certainty {after:?}"));
        if was_unclear && after == Certainty::Answered {
            self.tally.count("answered after unknown");
        }
        if before == Certainty::Answered && after == Certainty::Unknown {
            self.tally.count("unknown after an answer");
        }
        let attempt = self.course.attempts.last_mut().expect("it has started");
        attempt.outcome = Some(*outcome);
        self.course.certainty = after;
        self.agree();
    }

    /// `Err`: the operation is over, for this reason.
    fn decide(
        &mut self,
        step: &Step,
        outcome: &Outcome,
    ) -> Result<(ExpectedWait, Token<'r>), Option<StopReason>> {
        let cancelled = self.is_interrupted(step, Interrupt::AtLanding, "cancelled at landing");
        let at = Moment {
            now: self.time.instant(),
            cancelled,
            draw: &|| draw(step.draw),
        };
        let decided = self.call.decide(outcome, &self.terms, at);
        let expected = self
            .oracle
            .decide(outcome, self.time.now, step.draw, cancelled);
        self.agree();
        match (decided, expected) {
            (Decision::Wait { delay, token }, Ok(Some(wait))) => {
                assert_eq!(nanos(delay), wait.delay, "{wait:?}");
                let own = outcome.retry_after.map_or(0, nanos);
                self.tally
                    .count_if(wait.floor > own, "floor that others were told");
                self.note_wait(wait);
                self.course.tokens += 1;
                Ok((wait, token))
            }
            (Decision::Return(Some(Stop { reason, after })), Err(expected)) => {
                assert_eq!((reason, after.map(nanos)), expected);
                self.count_stop(reason, after);
                Err(Some(reason))
            }
            (Decision::Return(None), Ok(None)) => {
                self.hand_on();
                Err(None)
            }
            (decided, expected) => panic!("{decided:?} in place of {expected:?}"),
        }
    }

    fn count_stop(&self, reason: StopReason, after: Option<Duration>) {
        self.tally.count(&format!("decided {reason:?}"));
        match (reason, after) {
            (StopReason::SpentBelow, _) => self.tally.count("retried below"),
            (StopReason::NestedLayer, _) => self.tally.count("nested"),
            (StopReason::BreakerOpen, Some(_)) => self.tally.count("retry refused while open"),
            (StopReason::BreakerOpen, None) => self.tally.count("retry refused while half-open"),
            _ => {}
        }
    }

    fn note_wait(&mut self, expected: ExpectedWait) {
        let wait = Wait {
            attempts: self.course.attempts.len(),
            begins: self.time.now,
            expected,
        };
        self.tally.count_if(expected.floor > 0, "floor in the wait");
        let is_clipped = Some(wait.ends() + self.oracle.least_attempt()) == self.course.end;
        self.tally.count_if(
            expected.floor > 0 && is_clipped,
            "floor with jitter clipped",
        );
        let is_retry = wait.attempts > 0;
        let before = self.course.waits.last();
        let waits_on = before.is_some_and(|before| before.attempts == wait.attempts);
        self.tally.count_if(!is_retry, "first send waits");
        self.tally.count_if(is_retry && waits_on, "retry waits on");
        self.course.waits.push(wait);
    }

    fn hand_on(&mut self) {
        self.tally.count("handed on");
        if let Some(budget) = self.terms.budget {
            budget.earn(self.time.instant());
            self.oracle.earn(self.time.now);
        }
    }

    /// The attempt that was waited for does not start.
    fn abandon(&mut self, waited: Option<Waited<'r>>, reason: StopReason) {
        if let Some(Waited { token, ended, .. }) = waited {
            self.refund(token);
            self.settle(ended, Some(reason));
        }
    }

    fn refund(&mut self, token: Token<'r>) {
        drop(token);
        self.oracle.give_back();
        self.course.refunds += 1;
        self.tally.count_if(self.terms.budget.is_some(), "refund");
    }

    /// The breaker is told how the operation has ended, unless it was the caller who ended it.
    fn settle(&mut self, ended: Ended<'r>, reason: Option<StopReason>) {
        let Ended {
            leave,
            health,
            draw,
        } = ended;
        match leave {
            Some(leave) if reason != Some(StopReason::Cancelled) => {
                leave.settle(health, draw, self.time, self.oracle.load, self.tally);
            }
            leave => self.forgo(leave),
        }
        self.agree();
    }

    fn forgo(&mut self, leave: Option<Leave<'r>>) {
        if let Some(leave) = leave {
            leave.forgo(self.oracle.load);
        }
    }

    /// A cancelled attempt is dropped; one that hangs is left to itself.
    fn give_up(&mut self, leave: Option<Leave<'r>>, step: &Step) {
        match step.interrupt {
            Some(Interrupt::InFlight) => self.forgo(leave),
            _ => self.others.keep(leave),
        }
    }

    fn is_interrupted(&self, step: &Step, by: Interrupt, branch: &str) -> bool {
        let is_interrupted = step.interrupt == Some(by);
        self.tally.count_if(is_interrupted, branch);
        is_interrupted
    }
}
