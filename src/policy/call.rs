//! The state of one operation, and its arithmetic of time.

use std::time::{Duration, Instant};

use super::backoff::Previous;
use super::budget::Counted;
use super::certainty::Fold;
use super::{Certainty, Limits, Outcome, ReplayClass, Terms};

/// The state of one operation.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) replay: ReplayClass,
    pub(crate) limits: Limits,
    pub(crate) deadline: Option<Instant>,
    /// The instant after which the server no longer knows the key.
    pub(crate) key_expires: Option<Instant>,
    pub(crate) body_replayable: bool,
    /// It is made within an attempt of another operation, which may be repeated.
    pub(crate) nested: bool,
    /// Sent again by its caller, it would be the same operation: its effect is that of one, or its key
    /// is the caller's.
    pub(crate) repeats_alike: bool,
    pub(super) attempts: u32,
    pub(super) backoff: Previous,
    pub(super) counted: Counted,
    /// What was waited before the coming attempt because the host asked for it.
    pub(super) heeded: Duration,
    pub(super) fold: Fold,
}

impl Call {
    /// `earlier` is what an earlier run of the same operation left behind (an outer layer's retry).
    pub(crate) fn new(replay: ReplayClass, limits: Limits, earlier: Option<Certainty>) -> Self {
        Self {
            replay,
            limits,
            deadline: None,
            key_expires: None,
            body_replayable: true,
            nested: false,
            repeats_alike: true,
            attempts: 0,
            backoff: Previous::default(),
            counted: Counted::default(),
            heeded: Duration::ZERO,
            fold: Fold::carry(earlier),
        }
    }

    /// Attempts started so far.
    pub(crate) fn attempts(&self) -> u32 {
        self.attempts
    }

    /// An attempt starts: from here on it counts, however it ends. With the first one the operation
    /// becomes load, which some budgets measure.
    pub(crate) fn start_attempt(&mut self, terms: &Terms<'_>, now: Instant) {
        self.attempts = self.attempts.saturating_add(1);
        self.heeded = Duration::ZERO;
        if let (1, Some(budget)) = (self.attempts, terms.budget) {
            budget.begin(now, &mut self.counted);
        }
    }

    /// An attempt has ended. What the host asked for there holds for others too.
    pub(crate) fn record(&mut self, outcome: &Outcome, terms: &Terms<'_>, now: Instant) {
        self.fold.record(outcome, self.replay);
        if let (true, Some(wait), Some(pushback)) =
            (outcome.pushes_back, outcome.retry_after, terms.pushback)
        {
            pushback.note(now, wait);
        }
    }

    /// What is known of the whole operation, never only of its last attempt.
    pub(crate) fn certainty(&self) -> Certainty {
        self.fold.certainty()
    }

    /// Whether an attempt before this moment may have been carried out.
    pub(crate) fn maybe_applied(&self) -> bool {
        self.fold.is_unclear()
    }

    /// Whether no attempt could follow the one about to start, so that its request may be moved
    /// instead of copied.
    pub(crate) fn is_last_attempt(&self) -> bool {
        self.attempts.saturating_add(1) >= self.limits.max_attempts
    }

    /// Whether an attempt of it may be followed by another whatever comes of it, so that operations made
    /// within it can leave their retries to it.
    pub(crate) fn may_be_repeated(&self) -> bool {
        self.limits.max_attempts > 1 && self.body_replayable && self.replay.survives_a_repeat()
    }

    /// Whether it is the outer operation's to repeat this one: only what would be alike, or what has
    /// not been sent.
    pub(super) fn leaves_retries_to_outer(&self) -> bool {
        let is_unsent = self.certainty() <= Certainty::NotProcessed;
        self.nested && (self.repeats_alike || is_unsent)
    }

    /// Time left for attempts: up to the deadline, less the reserve. `Duration::MAX` without one.
    pub(super) fn available(&self, now: Instant) -> Duration {
        self.time_left(now).map_or(Duration::MAX, |left| {
            left.saturating_sub(self.limits.reserve)
        })
    }

    /// The last instant at which an attempt may start. `None`: any.
    pub(crate) fn latest_start(&self) -> Option<Instant> {
        let kept = self
            .limits
            .reserve
            .saturating_add(self.limits.least_attempt());
        let deadline = self.deadline?;
        deadline.checked_sub(kept).or(Some(deadline))
    }

    /// Time left until the deadline itself.
    pub(crate) fn time_left(&self, now: Instant) -> Option<Duration> {
        self.deadline
            .map(|deadline| deadline.saturating_duration_since(now))
    }

    /// The longest that an attempt may take which starts after `delay`.
    pub(super) fn attempt_limit(&self, now: Instant, delay: Duration) -> Option<Duration> {
        let left = self
            .deadline
            .map(|_| self.available(now).saturating_sub(delay));
        match (self.limits.attempt_timeout, left) {
            (Some(timeout), Some(left)) => Some(timeout.min(left)),
            (timeout, left) => timeout.or(left),
        }
    }

    /// Whether the key would no longer be honoured by the end of an attempt started after `delay`.
    ///
    /// An attempt without a limit is judged by its start.
    pub(super) fn key_expires_before(&self, now: Instant, delay: Duration) -> bool {
        let Some(expires) = self.key_expires else {
            return false;
        };
        let attempt = self.attempt_limit(now, delay).unwrap_or_default();
        let needed = delay.saturating_add(attempt);
        expires.saturating_duration_since(now) < needed || expires <= now
    }
}
