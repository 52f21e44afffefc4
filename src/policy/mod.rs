//! The decision core: what may be repeated, when, and why not.
//!
//! Everything here is a function of its arguments. The current instant, the random draw and
//! whether the caller has cancelled are handed in; nothing in this folder reads a clock, waits,
//! or knows how a request travels. [`Call`] is the state of one operation, [`Outcome`] what one
//! attempt proved, [`Decision`] what follows from it.

mod admit;
mod backoff;
mod breaker;
mod budget;
mod call;
mod certainty;
mod decide;
mod limits;
mod pushback;
mod stop;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

pub(crate) use self::admit::Admission;
pub use self::backoff::Backoff;
pub use self::breaker::{BreakerSnapshot, BreakerState, CircuitBreaker, CircuitBreakerBuilder};
pub(crate) use self::breaker::{Pass, Turned};
pub(crate) use self::budget::Reservation;
pub use self::budget::{BudgetSnapshot, RetryBudget, RetryBudgetBuilder};
pub(crate) use self::call::Call;
pub use self::certainty::Certainty;
pub(crate) use self::decide::Decision;
pub(crate) use self::limits::{Limits, at_least_one, attempt_timeout};
pub use self::pushback::FirstSends;
pub(crate) use self::pushback::Pushback;
pub(crate) use self::stop::Stop;
pub use self::stop::StopReason;

/// On what ground an operation may be repeated (RFC 9110 §9.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ReplayClass {
    /// The method asks for no effect: GET, HEAD, OPTIONS, TRACE.
    Safe,
    /// A repeat has the intended effect of one: PUT, DELETE, or the caller said so.
    Idempotent,
    /// The server recognises a repeat by its idempotency key.
    Keyed,
    /// A repeat may be a second operation.
    Unsafe,
}

impl ReplayClass {
    /// Whether a repeat is the same operation even where the first one may have been carried out.
    pub(crate) fn survives_a_repeat(self) -> bool {
        self != Self::Unsafe
    }
}

/// The settings of the core that no request can override.
#[derive(Clone, Debug)]
pub(crate) struct Pacing {
    pub(crate) backoff: Backoff,
    pub(crate) max_retry_after: Duration,
}

/// What an operation must get past before each attempt: the client's pacing, and what it shares with
/// other operations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms<'t> {
    pub(crate) pacing: &'t Pacing,
    pub(crate) pushback: Option<&'t Pushback>,
    pub(crate) breaker: Option<&'t CircuitBreaker>,
    /// The operation is made within an attempt that is the half-open breaker's probe, and so is part of
    /// it.
    pub(crate) is_within_a_probe: bool,
    pub(crate) budget: Option<&'t RetryBudget>,
}

/// What a decision is made from besides the state of the call.
#[derive(Clone, Copy)]
pub(crate) struct Moment<'m> {
    pub(crate) now: Instant,
    pub(crate) cancelled: bool,
    /// A uniform draw from `[0, 1)`.
    pub(crate) draw: &'m (dyn Fn() -> f64 + Sync),
}

/// What the edge learned from one attempt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    pub(crate) verdict: Verdict,
    pub(crate) certainty: Certainty,
    /// The answer says that the operation has been carried out (2xx).
    pub(crate) success: bool,
    /// The wait that the server asked for, if any.
    pub(crate) retry_after: Option<Duration>,
    /// That wait is meant for everybody (429 and 503).
    pub(crate) pushes_back: bool,
    /// The server asked not to be called again.
    pub(crate) veto: bool,
    /// A layer of this crate below has used up or refused the retries.
    pub(crate) retried_below: bool,
    /// And could have its effect a second time.
    pub(crate) may_be_doubled_below: bool,
    pub(crate) health: Health,
}

impl Outcome {
    /// What an operation made within the attempt says of its own: whether it is spent, and the wait that
    /// its host has asked for, which is not a wish of ours.
    pub(crate) fn heed(&mut self, is_spent: bool, may_be_doubled: bool, wait: Option<Duration>) {
        self.retried_below |= is_spent;
        self.may_be_doubled_below |= may_be_doubled;
        if wait > self.retry_after {
            self.retry_after = wait;
            self.pushes_back = false;
        }
    }
}

/// What an operation that ends with this outcome shows of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    Good,
    Bad,
    /// It was never asked, or the request was at fault.
    NotShown,
}

/// What the attempt's result means for a repeat, safety aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// An answer to hand on.
    Done,
    /// A refusal or failure that a repeat cannot change.
    Final,
    /// A repeat may end differently.
    Retryable,
}
