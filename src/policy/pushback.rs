//! "Come back later", said to one operation and heeded by all.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::sync::atomic::{AtomicU64, Ordering};

/// What becomes of first sends to a host that has asked, by 429 or 503 with `Retry-After`, to be left
/// alone for a while. Retries wait in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FirstSends {
    /// They go out: the host may well serve them.
    #[default]
    Pass,
    /// They wait, each with jitter of its own on top; where that does not fit, they are refused.
    Wait,
    /// They are refused at once: never sent, to be tried later.
    Refuse,
}

/// A wait longer than this says that a host is gone, not that it is busy: retries are then stopped for
/// this long, and one that comes later finds out anew.
const LONGEST: Duration = Duration::from_secs(3600);

/// Until when a host wants to be left alone.
#[derive(Debug)]
pub(crate) struct Pushback {
    first_sends: FirstSends,
    /// The first instant at which it has asked.
    origin: OnceLock<Instant>,
    /// Nanoseconds from there on. It stands alone, so no ordering with other memory is needed.
    until: AtomicU64,
}

impl Pushback {
    pub(crate) fn new(first_sends: FirstSends) -> Self {
        Self {
            first_sends,
            origin: OnceLock::new(),
            until: AtomicU64::new(0),
        }
    }

    /// The host has asked for this wait. The latest instant that it has asked for counts.
    pub(crate) fn note(&self, now: Instant, wait: Duration) {
        let origin = *self.origin.get_or_init(|| now);
        let until = now.saturating_duration_since(origin) + wait.min(LONGEST);
        let until = u64::try_from(until.as_nanos()).unwrap_or(u64::MAX);
        self.until.fetch_max(until, Ordering::Relaxed);
    }

    /// Time that an attempt must still wait.
    pub(crate) fn remaining(&self, now: Instant) -> Duration {
        let Some(origin) = self.origin.get() else {
            return Duration::ZERO;
        };
        let until = Duration::from_nanos(self.until.load(Ordering::Relaxed));
        until.saturating_sub(now.saturating_duration_since(*origin))
    }

    pub(super) fn first_sends(&self) -> FirstSends {
        self.first_sends
    }
}
