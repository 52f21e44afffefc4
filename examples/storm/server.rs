//! One server with a queue: it works on one request at a time, first come, first served, also for
//! callers who have gone away.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use crate::time::Time;

pub(crate) struct Server {
    queue: VecDeque<Job>,
    trigger: Range<Time>,
    /// Jobs whose caller has gone away are dropped when their turn comes: the caller's time limit came
    /// with the request.
    drops_expired: bool,
}

/// A request at the server.
#[derive(Clone, Copy)]
pub(crate) struct Job {
    pub(crate) operation: usize,
    pub(crate) attempt: u32,
    /// Until when its caller waits.
    pub(crate) until: Time,
}

impl Server {
    /// Requests that it can serve.
    pub(crate) const PER_SECOND: u32 = 1000;
    pub(crate) const PER_SECOND_IN_TRIGGER: u32 = 200;

    pub(crate) fn new(trigger: Range<Time>, drops_expired: bool) -> Self {
        let queue = VecDeque::new();
        Self {
            queue,
            trigger,
            drops_expired,
        }
    }

    /// A request arrives. Returns how long work on it takes, if it begins at once.
    pub(crate) fn receive(&mut self, job: Job, now: Time) -> Option<Duration> {
        let was_idle = self.queue.is_empty();
        self.queue.push_back(job);
        if was_idle { self.begin(now) } else { None }
    }

    /// The work that was begun is done. Returns the job, and how long the next one takes.
    pub(crate) fn finish(&mut self, now: Time) -> Option<(Job, Option<Duration>)> {
        let done = self.queue.pop_front()?;
        Some((done, self.begin(now)))
    }

    /// The first in the queue is being worked on from now on.
    fn begin(&mut self, now: Time) -> Option<Duration> {
        if self.drops_expired {
            while self.queue.front().is_some_and(|job| job.until < now) {
                self.queue.pop_front();
            }
        }
        self.queue.front()?;
        let per_second = match self.trigger.contains(&now) {
            true => Self::PER_SECOND_IN_TRIGGER,
            false => Self::PER_SECOND,
        };
        Some(Duration::from_secs(1) / per_second)
    }
}
