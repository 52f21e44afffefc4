//! Shares of the traffic.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Peer, Tries};
use crate::dice::Dice;
use crate::time::Time;

/// A fifth of the requests of the last ten seconds, and so many a second besides: Finagle, Linkerd and
/// tower.
pub(crate) struct Finagle {
    reserve: f64,
    requests: Recent,
    retries: Recent,
}

impl Finagle {
    const SPAN: Duration = Duration::from_secs(10);

    pub(crate) fn new(per_second: u32) -> Self {
        Self {
            reserve: f64::from(per_second) * Self::SPAN.as_secs_f64(),
            requests: Recent::new(Self::SPAN),
            retries: Recent::new(Self::SPAN),
        }
    }
}

impl Peer for Finagle {
    fn begins(&mut self, now: Time) {
        self.requests.add(now);
    }

    fn allows(&mut self, tries: &mut Tries, now: Time, _: &mut Dice) -> bool {
        let allowed = self.reserve + 0.2 * self.requests.count(now);
        let is_free = tries.retries < 3 && self.retries.count(now) + 1.0 <= allowed;
        if is_free {
            self.retries.add(now);
        }
        is_free
    }
}

/// Three attempts while fewer than a tenth of all requests ever were retries: Google's SRE book.
#[derive(Default)]
pub(crate) struct Sre {
    requests: f64,
    retries: f64,
}

impl Peer for Sre {
    fn begins(&mut self, _: Time) {
        self.requests += 1.0;
    }

    fn allows(&mut self, tries: &mut Tries, _: Time, _: &mut Dice) -> bool {
        let is_free = tries.retries < 2 && self.retries < 0.1 * self.requests;
        self.retries += f64::from(u8::from(is_free));
        is_free
    }
}

/// The same, of the requests of the last minute.
pub(crate) struct SreWindow {
    requests: Recent,
    retries: Recent,
}

impl SreWindow {
    pub(crate) fn new() -> Self {
        let recent = || Recent::new(Duration::from_secs(60));
        Self {
            requests: recent(),
            retries: recent(),
        }
    }
}

impl Peer for SreWindow {
    fn begins(&mut self, now: Time) {
        self.requests.add(now);
    }

    fn allows(&mut self, tries: &mut Tries, now: Time, _: &mut Dice) -> bool {
        let allowed = 0.1 * self.requests.count(now);
        let is_free = tries.retries < 2 && self.retries.count(now) < allowed;
        if is_free {
            self.retries.add(now);
        }
        is_free
    }
}

/// Adaptive throttling with K = 2, of retries only: the SRE book's formula.
#[derive(Default)]
pub(crate) struct Throttle {
    requests: f64,
    accepted: f64,
}

impl Peer for Throttle {
    fn allows(&mut self, tries: &mut Tries, _: Time, dice: &mut Dice) -> bool {
        let refused = (self.requests - 2.0 * self.accepted) / (self.requests + 1.0);
        tries.retries < 2 && !dice.chance(refused.max(0.0))
    }

    fn succeeds(&mut self, _: &Tries, _: Time) {
        self.requests += 1.0;
        self.accepted += 1.0;
    }

    fn fails(&mut self, _: Time) {
        self.requests += 1.0;
    }
}

/// Retries under way up to a fifth of the requests under way, or three: Envoy's retry budget.
#[derive(Default)]
pub(crate) struct Envoy {
    active: u32,
    retrying: u32,
}

impl Peer for Envoy {
    fn begins(&mut self, _: Time) {
        self.active += 1;
    }

    fn allows(&mut self, tries: &mut Tries, _: Time, _: &mut Dice) -> bool {
        let own = u32::from(tries.retries > 0);
        let allowed = (0.2 * f64::from(self.active)).max(3.0);
        let is_free = tries.retries < 3 && f64::from(self.retrying - own) < allowed;
        if is_free {
            self.retrying += 1 - own;
        }
        is_free
    }

    fn ends(&mut self, tries: &Tries) {
        self.active -= 1;
        self.retrying -= u32::from(tries.retries > 0);
    }
}

/// What has happened within the last `span`.
struct Recent {
    span: Duration,
    events: VecDeque<Time>,
}

impl Recent {
    fn new(span: Duration) -> Self {
        let events = VecDeque::new();
        Self { span, events }
    }

    fn add(&mut self, now: Time) {
        self.events.push_back(now);
    }

    fn count(&mut self, now: Time) -> f64 {
        let is_gone = |event: &Time| *event + self.span <= now;
        while self.events.front().is_some_and(is_gone) {
            self.events.pop_front();
        }
        self.events.len() as f64
    }
}
