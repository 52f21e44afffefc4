//! "Come back later", said to one operation and heeded by all.

use std::time::{Duration, Instant};

use crate::sync::{Mutex, MutexGuard, PoisonError};

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
    until: Mutex<Option<Instant>>,
}

impl Pushback {
    pub(crate) fn new(first_sends: FirstSends) -> Self {
        Self {
            first_sends,
            until: Mutex::new(None),
        }
    }

    /// The host has asked for this wait. The latest instant that it has asked for counts.
    pub(crate) fn note(&self, now: Instant, wait: Duration) {
        let until = now.checked_add(wait.min(LONGEST));
        let mut latest = self.until();
        *latest = (*latest).max(until);
    }

    /// Time that an attempt must still wait.
    pub(crate) fn remaining(&self, now: Instant) -> Duration {
        self.until()
            .map_or(Duration::ZERO, |until| until.saturating_duration_since(now))
    }

    pub(super) fn first_sends(&self) -> FirstSends {
        self.first_sends
    }

    fn until(&self) -> MutexGuard<'_, Option<Instant>> {
        self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
