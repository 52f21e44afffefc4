//! The decision core: what may be repeated, when, and why not.
//!
//! Everything here is a function of its arguments. The current instant, the random draw and
//! whether the caller has cancelled are handed in; nothing in this folder reads a clock, waits,
//! or knows how a request travels. [`Call`] is the state of one operation, [`Outcome`] what one
//! attempt proved, [`Decision`] what follows from it.

mod admit;
mod backoff;
mod budget;
mod call;
mod certainty;
mod decide;
mod limits;
mod stop;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use self::backoff::Backoff;
pub(crate) use self::budget::Reservation;
pub use self::budget::{RetryBudget, RetryBudgetBuilder};
pub(crate) use self::call::Call;
pub use self::certainty::Certainty;
pub(crate) use self::decide::{Decision, Moment};
pub(crate) use self::limits::{Limits, at_least_one, attempt_timeout};
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

/// What the edge learned from one attempt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    pub(crate) verdict: Verdict,
    pub(crate) certainty: Certainty,
    /// The answer says that the operation has been carried out (2xx).
    pub(crate) success: bool,
    /// The wait that the server asked for, if any.
    pub(crate) retry_after: Option<Duration>,
    /// The server asked not to be called again.
    pub(crate) veto: bool,
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
