//! What happened in a storm, second by second.

use std::ops::Range;

use crate::time::{Time, secs};

/// When the server has a fifth of its capacity.
pub(crate) const TRIGGER: Range<Time> = secs(30)..secs(40);

pub(crate) const LENGTH: Time = secs(180);

pub(crate) struct Course {
    pub(crate) begun: Seconds,
    pub(crate) sent: Seconds,
    /// Answers that came in time.
    pub(crate) served: Seconds,
    /// Operations that succeeded, by the second in which they began.
    pub(crate) succeeded: Seconds,
}

pub(crate) struct Seconds(Vec<u32>);

impl Seconds {
    pub(crate) fn count(&mut self, now: Time) {
        if let Some(count) = self.0.get_mut(now.as_secs() as usize) {
            *count += 1;
        }
    }

    pub(crate) fn at(&self, second: usize) -> u32 {
        self.0.get(second).copied().unwrap_or_default()
    }

    fn sum(&self, seconds: Range<usize>) -> f64 {
        seconds.map(|second| f64::from(self.at(second))).sum()
    }
}

const STARTS: usize = TRIGGER.start.as_secs() as usize;
const ENDS: usize = TRIGGER.end.as_secs() as usize;

impl Course {
    pub(crate) fn new() -> Self {
        let seconds = || Seconds(vec![0; LENGTH.as_secs() as usize]);
        Self {
            begun: seconds(),
            sent: seconds(),
            served: seconds(),
            succeeded: seconds(),
        }
    }

    /// Seconds from the end of the trigger to the first of five in which 95 % are served.
    pub(crate) fn recovery(&self) -> Option<usize> {
        let is_well = |second: usize| {
            let (served, begun) = (self.served.at(second), self.begun.at(second));
            f64::from(served) >= 0.95 * f64::from(begun)
        };
        let last = LENGTH.as_secs() as usize - 5;
        let mut starts = ENDS..last;
        let start = starts.find(|start| (*start..start + 5).all(is_well));
        start.map(|start| start - ENDS)
    }

    /// Requests for each operation, in the 30 seconds from the start of the trigger.
    pub(crate) fn amplification(&self) -> f64 {
        let seconds = STARTS..STARTS + 30;
        self.sent.sum(seconds.clone()) / self.begun.sum(seconds)
    }

    /// Percent of the operations begun in the minute from the start of the trigger.
    pub(crate) fn success(&self) -> f64 {
        let seconds = STARTS..STARTS + 60;
        100.0 * self.succeeded.sum(seconds.clone()) / self.begun.sum(seconds)
    }
}
