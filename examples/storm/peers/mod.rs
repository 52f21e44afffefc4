//! How others retry, in a few lines each: to compare with, not to use.

mod breakers;
mod buckets;
mod shares;

use std::time::Duration;

pub(crate) use self::breakers::{Polly, RetryBreaker};
pub(crate) use self::buckets::{Aws, Brooker, Grpc};
pub(crate) use self::shares::{Envoy, Finagle, Sre, SreWindow, Throttle};
use crate::caller::{Caller, Next, Seen, Start};
use crate::dice::Dice;
use crate::time::Time;

/// What makes a way of retrying. All methods but one have nothing to do by default.
pub(crate) trait Peer {
    fn begins(&mut self, _now: Time) {}

    /// Whether anything may be sent, first sends included.
    fn lets_pass(&mut self, _now: Time) -> bool {
        true
    }

    /// Whether an operation that has failed may be sent again.
    fn allows(&mut self, tries: &mut Tries, now: Time, dice: &mut Dice) -> bool;

    fn succeeds(&mut self, _tries: &Tries, _now: Time) {}

    fn fails(&mut self, _now: Time) {}

    fn ends(&mut self, _tries: &Tries) {}
}

/// What an operation has had so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tries {
    pub(crate) retries: u32,
    /// What its last retry has cost.
    pub(crate) paid: u32,
}

/// What the same in all of them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Terms {
    pub(crate) attempt: Option<Duration>,
    pub(crate) deadline: Option<Duration>,
    /// Full jitter on this base, doubled for each retry up to 20 s. `None`: retries at once.
    pub(crate) backoff: Option<Duration>,
}

const LONGEST_BACKOFF: Duration = Duration::from_secs(20);

pub(crate) struct PeerCaller {
    peer: Box<dyn Peer>,
    terms: Terms,
}

pub(crate) struct PeerOperation {
    tries: Tries,
    deadline: Option<Time>,
}

impl PeerCaller {
    pub(crate) fn new(peer: Box<dyn Peer>, terms: Terms) -> Self {
        Self { peer, terms }
    }

    fn again(&mut self, operation: &mut PeerOperation, now: Time, dice: &mut Dice) -> Next {
        let wait = self.backoff(operation.tries.retries, dice);
        let is_in_time = operation.deadline.is_none_or(|end| now + wait < end);
        if is_in_time && self.peer.allows(&mut operation.tries, now, dice) {
            operation.tries.retries += 1;
            return Next::Again(wait);
        }
        self.peer.ends(&operation.tries);
        Next::Over
    }

    fn backoff(&self, retries: u32, dice: &mut Dice) -> Duration {
        self.terms.backoff.map_or(Duration::ZERO, |base| {
            dice.part_of((base * (1 << retries)).min(LONGEST_BACKOFF))
        })
    }
}

impl Caller for PeerCaller {
    type Operation = PeerOperation;

    fn begin(&mut self, now: Time) -> PeerOperation {
        self.peer.begins(now);
        PeerOperation {
            tries: Tries::default(),
            deadline: self.terms.deadline.map(|span| now + span),
        }
    }

    /// What the breaker does not let pass has failed, and may be tried again after a wait.
    fn start(&mut self, operation: &mut PeerOperation, now: Time, dice: &mut Dice) -> Start {
        if self.peer.lets_pass(now) {
            let left = operation.deadline.map(|end| end.saturating_sub(now));
            let limits = [self.terms.attempt, left];
            return Start::Now(limits.into_iter().flatten().min());
        }
        if self.terms.backoff.is_none() {
            return Start::Never;
        }
        match self.again(operation, now, dice) {
            Next::Again(wait) => Start::Later(wait),
            Next::Over => Start::Never,
        }
    }

    fn end(
        &mut self,
        operation: &mut PeerOperation,
        seen: Seen,
        now: Time,
        dice: &mut Dice,
    ) -> Next {
        if seen == Seen::Success {
            self.peer.succeeds(&operation.tries, now);
            self.peer.ends(&operation.tries);
            return Next::Over;
        }
        self.peer.fails(now);
        self.again(operation, now, dice)
    }
}

/// Sends everything once.
pub(crate) struct NoRetries;

impl Peer for NoRetries {
    fn allows(&mut self, _: &mut Tries, _: Time, _: &mut Dice) -> bool {
        false
    }
}

/// Three retries for everybody, and nothing that bounds their sum.
pub(crate) struct Blind;

impl Peer for Blind {
    fn allows(&mut self, tries: &mut Tries, _: Time, _: &mut Dice) -> bool {
        tries.retries < 3
    }
}
