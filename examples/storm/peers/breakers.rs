//! Circuit breakers that count attempts.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Peer, Tries};
use crate::dice::Dice;
use crate::time::Time;

/// No retries while more than a tenth of all requests ever have failed: Brooker's simulator.
#[derive(Default)]
pub(crate) struct RetryBreaker {
    requests: f64,
    failures: f64,
}

impl Peer for RetryBreaker {
    fn begins(&mut self, _: Time) {
        self.requests += 1.0;
    }

    fn allows(&mut self, tries: &mut Tries, _: Time, _: &mut Dice) -> bool {
        self.failures += 1.0;
        self.failures <= 0.1 * self.requests && tries.retries < 3
    }
}

/// Three retries around a breaker on all sends, with Polly's defaults: opens for 5 s once a tenth of at
/// least 100 attempts of the last 30 s has failed, then lets one through.
#[derive(Default)]
pub(crate) struct Polly {
    recent: VecDeque<(Time, bool)>,
    failed: usize,
    open_until: Option<Time>,
    is_probing: bool,
}

impl Polly {
    const SPAN: Duration = Duration::from_secs(30);
    const OPEN: Duration = Duration::from_secs(5);
    const LEAST: usize = 100;

    fn record(&mut self, now: Time, failed: bool) {
        if std::mem::take(&mut self.is_probing) {
            *self = match failed {
                true => Self {
                    open_until: Some(now + Self::OPEN),
                    ..std::mem::take(self)
                },
                false => Self::default(),
            };
            return;
        }
        self.recent.push_back((now, failed));
        self.failed += usize::from(failed);
        let is_gone = |(then, _): &&(Time, bool)| *then + Self::SPAN <= now;
        while let Some((_, failed)) = self.recent.front().filter(is_gone) {
            self.failed -= usize::from(*failed);
            self.recent.pop_front();
        }
        let count = self.recent.len();
        if self.open_until.is_none() && count >= Self::LEAST && self.failed * 10 >= count {
            self.open_until = Some(now + Self::OPEN);
        }
    }
}

impl Peer for Polly {
    fn lets_pass(&mut self, now: Time) -> bool {
        match self.open_until {
            None => true,
            Some(until) if until <= now => {
                self.open_until = Some(now + Self::OPEN);
                self.is_probing = true;
                true
            }
            Some(_) => false,
        }
    }

    fn allows(&mut self, tries: &mut Tries, _: Time, _: &mut Dice) -> bool {
        tries.retries < 3
    }

    fn succeeds(&mut self, _: &Tries, now: Time) {
        self.record(now, false);
    }

    fn fails(&mut self, now: Time) {
        self.record(now, true);
    }
}
