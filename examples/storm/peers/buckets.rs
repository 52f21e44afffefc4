//! Buckets of tokens.

use super::{Peer, Tries};
use crate::dice::Dice;
use crate::time::Time;

/// A tenth of a token per success, five at most: Brooker, "Fixing retries with token buckets and
/// circuit breakers" (2022).
pub(crate) struct Brooker {
    tokens: f64,
}

impl Brooker {
    const MOST: f64 = 5.0;

    pub(crate) fn new() -> Self {
        Self { tokens: Self::MOST }
    }
}

impl Peer for Brooker {
    fn allows(&mut self, tries: &mut Tries, _: Time, _: &mut Dice) -> bool {
        let is_paid = tries.retries < 3 && self.tokens >= 1.0;
        self.tokens -= f64::from(u8::from(is_paid));
        is_paid
    }

    fn succeeds(&mut self, _: &Tries, _: Time) {
        self.tokens = Self::MOST.min(self.tokens + 0.1);
    }
}

/// The "standard" mode of the AWS SDKs: 500 tokens; a success gives back what its last retry has cost,
/// or one token.
pub(crate) struct Aws {
    tokens: u32,
    cost: u32,
}

impl Aws {
    const MOST: u32 = 500;

    /// A retry costs 5 in version 2.0, and 14 in 2.1.
    pub(crate) fn new(cost: u32) -> Self {
        let tokens = Self::MOST;
        Self { tokens, cost }
    }
}

impl Peer for Aws {
    fn allows(&mut self, tries: &mut Tries, _: Time, _: &mut Dice) -> bool {
        let is_paid = tries.retries < 2 && self.tokens >= self.cost;
        if is_paid {
            self.tokens -= self.cost;
            tries.paid = self.cost;
        }
        is_paid
    }

    fn succeeds(&mut self, tries: &Tries, _: Time) {
        self.tokens = Self::MOST.min(self.tokens + tries.paid.max(1));
    }
}

/// gRPC's retry throttling: 10 tokens, one less per failure, a tenth more per success; retries while
/// more than half are there.
pub(crate) struct Grpc {
    tokens: f64,
}

impl Grpc {
    const MOST: f64 = 10.0;

    pub(crate) fn new() -> Self {
        Self { tokens: Self::MOST }
    }
}

impl Peer for Grpc {
    fn allows(&mut self, tries: &mut Tries, _: Time, _: &mut Dice) -> bool {
        tries.retries < 3 && self.tokens > Self::MOST / 2.0
    }

    fn succeeds(&mut self, _: &Tries, _: Time) {
        self.tokens = Self::MOST.min(self.tokens + 0.1);
    }

    fn fails(&mut self, _: Time) {
        self.tokens = (self.tokens - 1.0).max(0.0);
    }
}
