//! What must hold over the whole course of an operation, whatever the oracle says.

use super::operations::Timeline;
use super::oracle::{ExpectedWait, Nanos, Oracle, is_maybe_done, nanos};
use super::plan::Plan;
use crate::policy::{Certainty, FirstSends, Outcome, ReplayClass, StopReason};

/// What has happened in one operation.
pub(super) struct Course {
    pub(super) time: Timeline,
    pub(super) end: Option<Nanos>,
    least_attempt: Nanos,
    pub(super) attempts: Vec<Try>,
    pub(super) waits: Vec<Wait>,
    /// Why it was not admitted.
    pub(super) refused: Option<StopReason>,
    pub(super) tokens: u32,
    pub(super) refunds: u32,
    pub(super) retries: u32,
    pub(super) certainty: Certainty,
}

/// One attempt.
pub(super) struct Try {
    pub(super) limit: Option<Nanos>,
    pub(super) ends: Option<Nanos>,
    /// How long the host still wanted to be left alone when it started.
    pub(super) pushed_back: Nanos,
    pub(super) outcome: Option<Outcome>,
}

/// One wait.
pub(super) struct Wait {
    /// How many attempts there were before it.
    pub(super) attempts: usize,
    pub(super) begins: Nanos,
    pub(super) expected: ExpectedWait,
}

impl Wait {
    pub(super) fn ends(&self) -> Nanos {
        self.begins + self.expected.delay
    }
}

impl Course {
    pub(super) fn new(time: Timeline, oracle: &Oracle<'_, '_>) -> Self {
        Self {
            time,
            end: oracle.end(),
            least_attempt: oracle.least_attempt(),
            attempts: Vec::new(),
            waits: Vec::new(),
            refused: None,
            tokens: 0,
            refunds: 0,
            retries: 0,
            certainty: oracle.certainty(),
        }
    }

    pub(super) fn keeps_its_promises(&self, plan: &Plan) {
        self.no_attempt_outlives_the_deadline(plan);
        self.no_wait_ends_too_late();
        self.waits_keep_to_floor_and_window();
        self.floors_stay_within_the_longest_wish(plan);
        self.nothing_is_sent_before_its_time(plan);
        self.first_sends_are_gated_only_where_that_was_chosen(plan);
        self.attempts_and_tokens_add_up(plan);
        self.nothing_maybe_done_is_repeated(plan);
        self.certainty_is_never_understated(plan);
    }

    fn no_attempt_outlives_the_deadline(&self, plan: &Plan) {
        for attempt in &self.attempts {
            if let Some(end) = self.end {
                assert!(attempt.ends.expect("a deadline limits every attempt") <= end);
            }
            if let Some(timeout) = plan.limits.attempt_timeout {
                assert!(attempt.limit.expect("so does a timeout") <= nanos(timeout));
            }
            assert_ne!(attempt.limit, Some(0), "a zero timeout still sends");
        }
    }

    fn no_wait_ends_too_late(&self) {
        for wait in &self.waits {
            if let Some(end) = self.end {
                assert!(wait.ends() + self.least_attempt <= end);
            }
        }
    }

    fn waits_keep_to_floor_and_window(&self) {
        for ExpectedWait {
            floor,
            window,
            delay,
        } in self.waits.iter().map(|wait| wait.expected)
        {
            assert!((floor..=floor + window).contains(&delay));
        }
    }

    fn floors_stay_within_the_longest_wish(&self, plan: &Plan) {
        for wait in &self.waits {
            let for_the_same = self
                .waits
                .iter()
                .filter(|other| other.attempts == wait.attempts);
            let floors: Nanos = for_the_same.map(|other| other.expected.floor).sum();
            assert!(floors == 0 || floors <= nanos(plan.max_retry_after));
        }
    }

    fn nothing_is_sent_before_its_time(&self, plan: &Plan) {
        for (retries, attempt) in self.attempts.iter().enumerate() {
            let passes = retries == 0 && passes_first_sends(plan);
            assert!(passes || attempt.pushed_back == 0);
        }
    }

    fn first_sends_are_gated_only_where_that_was_chosen(&self, plan: &Plan) {
        if passes_first_sends(plan) {
            assert!(self.waits.iter().all(|wait| wait.attempts > 0));
        }
        let Some(reason) = self.refused.filter(|_| self.attempts.is_empty()) else {
            return;
        };
        match reason {
            StopReason::RetryAfterTooLong => assert!(!passes_first_sends(plan)),
            StopReason::BreakerOpen => {
                assert!(
                    plan.fuse
                        .as_ref()
                        .is_some_and(|fuse| fuse.gates_first_sends)
                );
            }
            _ => {}
        }
    }

    fn attempts_and_tokens_add_up(&self, plan: &Plan) {
        let attempts = u32::try_from(self.attempts.len()).expect("few attempts");
        assert!(attempts <= plan.limits.max_attempts);
        assert_eq!(self.retries, attempts.saturating_sub(1));
        assert_eq!(self.retries, self.tokens - self.refunds);
    }

    fn nothing_maybe_done_is_repeated(&self, plan: &Plan) {
        if plan.replay != ReplayClass::Unsafe {
            return;
        }
        if plan.earlier.is_some_and(is_maybe_done) {
            assert!(self.attempts.is_empty());
        }
        let before_the_last = self.attempts.len().saturating_sub(1);
        for attempt in self.attempts.iter().take(before_the_last) {
            let outcome = attempt.outcome.expect("it ended before the next one");
            assert!(!is_maybe_done(outcome.certainty));
        }
    }

    fn certainty_is_never_understated(&self, plan: &Plan) {
        let landed = self.attempts.iter().filter_map(|attempt| attempt.outcome);
        let mut all = landed.map(|outcome| outcome.certainty);
        let worst = all.clone().chain(plan.earlier).max();
        let is_answered = all.next_back() == Some(Certainty::Answered);
        match worst {
            _ if self.certainty == Certainty::Answered => assert!(is_answered),
            Some(worst) if is_maybe_done(worst) => assert_eq!(self.certainty, Certainty::Unknown),
            worst => assert_eq!(self.certainty, worst.unwrap_or(Certainty::NotSent)),
        }
    }
}

fn passes_first_sends(plan: &Plan) -> bool {
    plan.first_sends.unwrap_or_default() == FirstSends::Pass
}
