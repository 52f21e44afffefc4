//! Whole operations, played as `src/middleware.rs` plays them, against the oracle at every step and
//! against the promises of the crate over the whole course.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::oracle::{ExpectedWait, NaivePurse, Nanos, Oracle, is_maybe_done, nanos};
use super::plan::{Curve, DRAWS, Interrupt, Plan, Purse, Script, Step, plans};
use crate::clock;
use crate::policy::{
    Admission, Call, Certainty, Decision, Moment, Outcome, ReplayClass, Reservation, RetryBudget,
    Stop, StopReason, Terms,
};

const CASES: u32 = 24_000;

/// How often each branch must have been taken for the run to prove anything.
const ENOUGH: u32 = 100;

const REASONS: [StopReason; 10] = [
    StopReason::Cancelled,
    StopReason::NotRetryable,
    StopReason::KeyExpired,
    StopReason::UnsafeToRepeat,
    StopReason::ServerVeto,
    StopReason::AttemptsExhausted,
    StopReason::BodyNotReplayable,
    StopReason::RetryAfterTooLong,
    StopReason::DeadlineTooClose,
    StopReason::BudgetExhausted,
];

const BRANCHES: [&str; 31] = [
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
    "cancelled before start",
    "cancelled in flight",
    "cancelled at landing",
    "cancelled in wait",
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
    for reason in REASONS {
        tally.demand(&format!("decided {reason:?}"));
    }
    for reason in [
        StopReason::Cancelled,
        StopReason::KeyExpired,
        StopReason::UnsafeToRepeat,
        StopReason::DeadlineTooClose,
    ] {
        tally.demand(&format!("not admitted {reason:?}"));
    }
}

/// Plays all operations of a plan on one budget.
fn play(plan: &Plan, tally: &Tally) {
    tally.count_settings(plan);
    let budget = plan.purse.budget();
    let pacing = plan.pacing();
    let terms = Terms {
        pacing: &pacing,
        pushback: None,
        breaker: None,
        budget: budget.as_ref(),
    };
    let mut purse = NaivePurse::of(&plan.purse);
    let mut time = Timeline {
        base: clock::now(),
        now: 0,
    };
    let mut retries = 0;
    for script in &plan.scripts {
        time.pass(nanos(script.gap));
        let run = Run::begin(plan, terms, &mut purse, time, tally);
        let course = run.play(script);
        course.keeps_its_promises(plan);
        retries += course.retries;
        time = course.time;
        let balance = budget.as_ref().map(RetryBudget::balance);
        assert_eq!(balance, purse.balance());
        if let Some(left) = purse.after(retries) {
            assert_eq!(balance, Some(left), "initial + earned - started");
        }
        if let Purse::Fixed(tokens) = plan.purse {
            assert_eq!(balance, Some(f64::from(tokens) - f64::from(retries)));
        }
    }
}

/// Virtual time.
#[derive(Clone, Copy)]
struct Timeline {
    base: Instant,
    now: Nanos,
}

impl Timeline {
    fn pass(&mut self, span: Nanos) {
        self.now += span;
    }

    fn instant(&self) -> Instant {
        self.base + duration(self.now)
    }
}

fn duration(span: Nanos) -> Duration {
    Duration::from_nanos(u64::try_from(span).expect("virtual time goes forward"))
}

/// An operation on its way, with the oracle beside it.
struct Run<'r> {
    plan: &'r Plan,
    terms: Terms<'r>,
    oracle: Oracle<'r>,
    call: Call,
    time: Timeline,
    tally: &'r Tally,
    course: Course,
}

/// A token that is out.
type Token<'r> = Reservation<'r>;

impl<'r> Run<'r> {
    fn begin(
        plan: &'r Plan,
        terms: Terms<'r>,
        purse: &'r mut NaivePurse,
        time: Timeline,
        tally: &'r Tally,
    ) -> Self {
        let mut call = Call::new(plan.replay, plan.limits, plan.earlier);
        call.deadline = plan.deadline.map(|span| time.instant() + span);
        call.key_expires = plan.key_lifetime.map(|span| time.instant() + span);
        call.body_replayable = plan.body_replayable;
        let oracle = Oracle::begin(plan, purse, time.now);
        Self {
            plan,
            terms,
            course: Course::new(time, &oracle),
            oracle,
            call,
            time,
            tally,
        }
    }

    /// The loop of `src/middleware.rs`.
    fn play(mut self, script: &Script) -> Course {
        let mut waited: Option<Token<'r>> = None;
        let mut steps = script.steps.iter();
        loop {
            let step = steps.next().expect("every operation ends");
            let admitted = self.admit(step);
            let Ok(limit) = admitted else {
                self.refund(waited);
                break;
            };
            self.start(waited.take(), limit);
            let Some(outcome) = self.attempt(step, limit) else {
                break;
            };
            let Some((wait, token)) = self.decide(step, &outcome) else {
                break;
            };
            if self.is_interrupted(step, Interrupt::InWait, "cancelled in wait") {
                self.refund(Some(token));
                break;
            }
            self.time.pass(wait.delay + nanos(step.late));
            waited = Some(token);
        }
        self.course.time = self.time;
        self.course
    }

    fn admit(&mut self, step: &Step) -> Result<Option<Nanos>, StopReason> {
        let cancelled = self.is_interrupted(step, Interrupt::BeforeStart, "cancelled before start");
        let at = Moment {
            now: self.time.instant(),
            cancelled,
            draw: &|| 0.0,
        };
        let admitted = match self.call.admit(&self.terms, at, at.now) {
            Ok(Admission::Start { limit, .. }) => Ok(limit.map(nanos)),
            Ok(Admission::Wait(_)) => panic!("nobody pushes back"),
            Err(stop) => Err(stop.reason),
        };
        assert_eq!(admitted, self.oracle.admit(self.time.now, cancelled));
        if let Err(reason) = admitted {
            self.tally.count(&format!("not admitted {reason:?}"));
        }
        admitted
    }

    fn start(&mut self, waited: Option<Token<'r>>, limit: Option<Nanos>) {
        if let Some(token) = waited {
            token.spend(self.time.instant());
            self.oracle.spend(self.time.now);
            self.course.retries += 1;
            self.tally.count("retry");
        }
        if limit.is_none() {
            self.tally.count("attempt without limit");
        }
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
            outcome: None,
        });
    }

    /// `None`: the caller gave up while it was in the air.
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
        self.time.pass(takes);
        self.land(&outcome);
        Some(outcome)
    }

    fn land(&mut self, outcome: &Outcome) {
        let was_unclear = self.call.maybe_applied();
        let before = self.call.certainty();
        self.call.record(outcome, &self.terms, self.time.instant());
        self.oracle.record(outcome);
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
    }

    /// `None`: the operation is over.
    fn decide(&mut self, step: &Step, outcome: &Outcome) -> Option<(ExpectedWait, Token<'r>)> {
        let cancelled = self.is_interrupted(step, Interrupt::AtLanding, "cancelled at landing");
        let at = Moment {
            now: self.time.instant(),
            cancelled,
            draw: &|| f64::from(step.draw) / f64::from(DRAWS),
        };
        let decided = self.call.decide(outcome, &self.terms, at);
        let expected = self
            .oracle
            .decide(outcome, self.time.now, step.draw, cancelled);
        match (decided, expected) {
            (Decision::Wait { delay, token }, Ok(Some(wait))) => {
                assert_eq!(nanos(delay), wait.delay, "{wait:?}");
                self.note_wait(wait);
                Some((wait, token))
            }
            (Decision::Return(Some(Stop { reason, .. })), Err(expected)) => {
                assert_eq!(reason, expected);
                self.tally.count(&format!("decided {reason:?}"));
                None
            }
            (Decision::Return(None), Ok(None)) => {
                self.hand_on();
                None
            }
            (decided, expected) => panic!("{decided:?} in place of {expected:?}"),
        }
    }

    fn note_wait(&mut self, wait: ExpectedWait) {
        if wait.floor > 0 {
            self.tally.count("floor in the wait");
        }
        let ends = self.time.now + wait.delay;
        if wait.floor > 0 && Some(ends + self.oracle.least_attempt()) == self.course.end {
            self.tally.count("floor with jitter clipped");
        }
        self.course.tokens += 1;
        self.course.waits.push((ends, wait));
    }

    fn hand_on(&mut self) {
        self.tally.count("handed on");
        if let Some(budget) = self.terms.budget {
            budget.earn(self.time.instant());
            self.oracle.earn(self.time.now);
        }
    }

    fn refund(&mut self, token: Option<Token<'r>>) {
        if let Some(token) = token {
            drop(token);
            self.oracle.give_back();
            self.course.refunds += 1;
            if self.terms.budget.is_some() {
                self.tally.count("refund");
            }
        }
    }

    fn is_interrupted(&self, step: &Step, by: Interrupt, branch: &str) -> bool {
        let is_interrupted = step.interrupt == Some(by);
        if is_interrupted {
            self.tally.count(branch);
        }
        is_interrupted
    }
}

/// What has happened in one operation.
struct Course {
    time: Timeline,
    end: Option<Nanos>,
    least_attempt: Nanos,
    attempts: Vec<Try>,
    /// When each wait was to end.
    waits: Vec<(Nanos, ExpectedWait)>,
    tokens: u32,
    refunds: u32,
    retries: u32,
    certainty: Certainty,
}

/// One attempt.
struct Try {
    limit: Option<Nanos>,
    ends: Option<Nanos>,
    outcome: Option<Outcome>,
}

impl Course {
    fn new(time: Timeline, oracle: &Oracle<'_>) -> Self {
        Self {
            time,
            end: oracle.end(),
            least_attempt: oracle.least_attempt(),
            attempts: Vec::new(),
            waits: Vec::new(),
            tokens: 0,
            refunds: 0,
            retries: 0,
            certainty: oracle.certainty(),
        }
    }

    fn keeps_its_promises(&self, plan: &Plan) {
        self.no_attempt_outlives_the_deadline(plan);
        self.no_wait_ends_too_late();
        self.waits_keep_to_floor_and_window();
        self.attempts_and_tokens_add_up(plan);
        self.nothing_maybe_done_is_repeated(plan);
        self.certainty_is_never_understated(plan);
    }

    fn no_attempt_outlives_the_deadline(&self, plan: &Plan) {
        for attempt in &self.attempts {
            if let Some(end) = self.end {
                assert!(attempt.ends.expect("a deadline limits every attempt") <= end);
            }
            if let Some(timeout) = plan.limits.attempt_timeout {
                assert!(attempt.limit.expect("so does a timeout") <= nanos(timeout));
            }
            assert_ne!(attempt.limit, Some(0), "a zero timeout still sends");
        }
    }

    fn no_wait_ends_too_late(&self) {
        for (ends, _) in &self.waits {
            if let Some(end) = self.end {
                assert!(ends + self.least_attempt <= end);
            }
        }
    }

    fn waits_keep_to_floor_and_window(&self) {
        for (_, wait) in &self.waits {
            assert!(wait.delay >= wait.floor);
            assert!(wait.delay <= wait.floor + wait.window);
        }
    }

    fn attempts_and_tokens_add_up(&self, plan: &Plan) {
        let attempts = u32::try_from(self.attempts.len()).expect("few attempts");
        assert!(attempts <= plan.limits.max_attempts);
        assert_eq!(self.retries, attempts.saturating_sub(1));
        assert_eq!(self.retries, self.tokens - self.refunds);
    }

    fn nothing_maybe_done_is_repeated(&self, plan: &Plan) {
        if plan.replay != ReplayClass::Unsafe {
            return;
        }
        if plan.earlier.is_some_and(is_maybe_done) {
            assert!(self.attempts.is_empty());
        }
        let before_the_last = self.attempts.len().saturating_sub(1);
        for attempt in self.attempts.iter().take(before_the_last) {
            let outcome = attempt.outcome.expect("it ended before the next one");
            assert!(!is_maybe_done(outcome.certainty));
        }
    }

    fn certainty_is_never_understated(&self, plan: &Plan) {
        let landed = self.attempts.iter().filter_map(|attempt| attempt.outcome);
        let mut all = landed.map(|outcome| outcome.certainty);
        let worst = all.clone().chain(plan.earlier).max();
        let is_answered = all.next_back() == Some(Certainty::Answered);
        match worst {
            _ if self.certainty == Certainty::Answered => assert!(is_answered),
            Some(worst) if is_maybe_done(worst) => assert_eq!(self.certainty, Certainty::Unknown),
            worst => assert_eq!(self.certainty, worst.unwrap_or(Certainty::NotSent)),
        }
    }
}

/// How often each branch was taken.
#[derive(Default)]
struct Tally(RefCell<BTreeMap<String, u32>>);

impl Tally {
    fn count(&self, branch: &str) {
        let mut counts = self.0.borrow_mut();
        match counts.get_mut(branch) {
            Some(count) => *count += 1,
            None => {
                counts.insert(branch.to_owned(), 1);
            }
        }
    }

    fn count_settings(&self, plan: &Plan) {
        self.count(&format!("class {:?}", plan.replay));
        self.count(match plan.curve {
            Curve::Exponential { jitter: 0, .. } => "backoff exponential",
            Curve::Exponential { .. } => "backoff jittered",
            Curve::Decorrelated { .. } => "backoff decorrelated",
            Curve::Fixed(_) => "backoff fixed",
        });
        self.count(match plan.purse {
            Purse::Unlimited => "no budget",
            Purse::Fixed(_) => "budget fixed",
            Purse::Earning { .. } => "budget earning",
            Purse::Window { .. } => "budget window",
        });
        if plan.earlier.is_some() {
            self.count("carried over");
        }
    }

    fn demand(&self, branch: &str) {
        let count = self.0.borrow().get(branch).copied().unwrap_or_default();
        assert!(count >= ENOUGH, "{branch}: only {count} times");
    }

    /// Shown by `cargo test -- --nocapture`.
    fn print(&self) {
        for (branch, count) in self.0.borrow().iter() {
            println!("{count:>8} {branch}");
        }
    }
}
