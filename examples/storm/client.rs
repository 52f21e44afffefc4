//! A client of this crate: the loop of `src/middleware.rs`, one step at a time, in simulated time.

use std::time::Duration;

use crate::caller::{Caller, Next, Seen, Start};
use crate::dice::Dice;
use crate::policy::{
    Admission, Backoff, Call, Certainty, CircuitBreaker, Decision, Health, Limits, Moment, Outcome,
    Pacing, Pass, ReplayClass, Reservation, RetryBudget, Terms, Verdict,
};
use crate::time::{Time, instant};

/// The settings of a `RetryMiddleware`, and what its operations share.
pub(crate) struct Client {
    pub(crate) replay: ReplayClass,
    pub(crate) limits: Limits,
    pub(crate) deadline: Option<Duration>,
    /// 503 is declared as refused before any work.
    pub(crate) refused_before_work: bool,
    pub(crate) pacing: Pacing,
    pub(crate) budget: Option<RetryBudget>,
    pub(crate) breaker: Option<CircuitBreaker>,
}

impl Default for Client {
    /// README's table of defaults, for keyed operations.
    fn default() -> Self {
        Self {
            replay: ReplayClass::Keyed,
            limits: Limits {
                max_attempts: 3,
                attempt_timeout: None,
                minimum_attempt: Duration::ZERO,
                reserve: Duration::ZERO,
            },
            deadline: None,
            refused_before_work: false,
            pacing: Pacing {
                backoff: Backoff::default(),
                max_retry_after: Duration::from_secs(60),
            },
            budget: Some(RetryBudget::default()),
            breaker: None,
        }
    }
}

impl Client {
    pub(crate) fn max_attempts(mut self, attempts: u32) -> Self {
        self.limits.max_attempts = attempts;
        self
    }

    pub(crate) fn attempt_timeout(mut self, limit: Duration) -> Self {
        self.limits.attempt_timeout = Some(limit);
        self
    }

    pub(crate) fn deadline(mut self, span: Duration) -> Self {
        self.deadline = Some(span);
        self
    }

    pub(crate) fn backoff(mut self, backoff: Backoff) -> Self {
        self.pacing.backoff = backoff;
        self
    }

    pub(crate) fn budget(mut self, budget: RetryBudget) -> Self {
        self.budget = Some(budget);
        self
    }

    pub(crate) fn no_budget(mut self) -> Self {
        self.budget = None;
        self
    }

    pub(crate) fn breaker(mut self, breaker: CircuitBreaker) -> Self {
        self.breaker = Some(breaker);
        self
    }

    /// Operations without a key.
    pub(crate) fn without_keys(mut self) -> Self {
        self.replay = ReplayClass::Unsafe;
        self
    }

    pub(crate) fn refused_before_work(mut self) -> Self {
        self.refused_before_work = true;
        self
    }

    fn terms(&self) -> Terms<'_> {
        Terms {
            pacing: &self.pacing,
            pushback: None,
            breaker: self.breaker.as_ref(),
            is_within_a_probe: false,
            budget: self.budget.as_ref(),
        }
    }

    /// What `src/classify.rs` makes of it, for a method with an effect.
    fn outcome(&self, seen: Seen) -> Outcome {
        let certainty = match seen {
            Seen::Success => Certainty::Answered,
            Seen::NotSent => Certainty::NotSent,
            Seen::Unavailable if self.refused_before_work => Certainty::NotProcessed,
            Seen::Unavailable | Seen::NoAnswer => Certainty::Unknown,
        };
        let success = seen == Seen::Success;
        let (verdict, health) = match success {
            true => (Verdict::Done, Health::Good),
            false => (Verdict::Retryable, Health::Bad),
        };
        Outcome {
            verdict,
            certainty,
            success,
            retry_after: None,
            pushes_back: false,
            veto: false,
            retried_below: false,
            may_be_doubled_below: false,
            health,
        }
    }
}

/// A budget for one of very many clients: one token at most, and all else by default.
pub(crate) fn small() -> RetryBudget {
    let budget = RetryBudget::builder().burst(1).build();
    budget.expect("valid figures")
}

/// An operation on its way.
pub(crate) struct Operation<'c> {
    client: &'c Client,
    call: Call,
    /// For the attempt that is waited for.
    token: Option<Reservation<'c>>,
    /// Of the last attempt.
    pass: Option<Pass<'c>>,
    health: Health,
}

impl Operation<'_> {
    /// The operation has ended: its breaker is told how.
    fn settle(&mut self, now: Time, dice: &mut Dice) {
        if let Some(pass) = self.pass.take() {
            pass.settle(self.health, instant(now), || dice.uniform());
        }
    }
}

impl<'c> Caller for &'c Client {
    type Operation = Operation<'c>;

    fn begin(&mut self, now: Time) -> Operation<'c> {
        let mut call = Call::new(self.replay, self.limits, None);
        call.deadline = self.deadline.map(|span| instant(now + span));
        Operation {
            client: self,
            call,
            token: None,
            pass: None,
            health: Health::NotShown,
        }
    }

    fn start(&mut self, operation: &mut Operation<'c>, now: Time, dice: &mut Dice) -> Start {
        let terms = operation.client.terms();
        let drawn = dice.uniform();
        match operation.call.admit(&terms, moment(now, &|| drawn)) {
            Err(_) => {
                operation.token = None;
                operation.settle(now, dice);
                Start::Never
            }
            Ok(Admission::Wait(delay)) => Start::Later(delay),
            Ok(Admission::Start { limit, pass }) => {
                if let Some(token) = operation.token.take() {
                    token.spend(instant(now));
                }
                operation.pass = pass;
                operation.call.start_attempt(&terms, instant(now));
                Start::Now(limit)
            }
        }
    }

    fn end(
        &mut self,
        operation: &mut Operation<'c>,
        seen: Seen,
        now: Time,
        dice: &mut Dice,
    ) -> Next {
        let terms = operation.client.terms();
        let outcome = operation.client.outcome(seen);
        operation.call.record(&outcome, &terms, instant(now));
        operation.health = outcome.health;
        let drawn = dice.uniform();
        let decision = operation
            .call
            .decide(&outcome, &terms, moment(now, &|| drawn));
        match decision {
            Decision::Wait { delay, token } => {
                operation.token = Some(token);
                Next::Again(delay)
            }
            Decision::Return(_) => {
                operation.settle(now, dice);
                if let (true, Some(budget)) = (outcome.success, terms.budget) {
                    budget.earn(instant(now));
                }
                Next::Over
            }
        }
    }

    fn certainty(operation: &Operation<'c>) -> Option<Certainty> {
        Some(operation.call.certainty())
    }
}

fn moment(now: Time, draw: &(dyn Fn() -> f64 + Sync)) -> Moment<'_> {
    Moment {
        now: instant(now),
        cancelled: false,
        draw,
    }
}
