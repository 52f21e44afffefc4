//! How many attempts may be under way at once.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{AcquireError, Semaphore, SemaphorePermit};

/// Permits for attempts, handed out in the order in which they were asked for.
#[derive(Debug)]
pub(crate) struct Limiter {
    permits: Semaphore,
    limit: usize,
    waiting: AtomicUsize,
}

impl Limiter {
    /// `limit` has been checked.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            permits: Semaphore::new(limit),
            limit,
            waiting: AtomicUsize::new(0),
        }
    }

    /// A permit, if one is free.
    pub(crate) fn try_acquire(&self) -> Option<Permit<'_>> {
        let permit = self.permits.try_acquire().ok()?;
        Some(Permit {
            of: self,
            _permit: permit,
        })
    }

    /// Takes a place in the line for a permit, which comes once [`Place::turn`] is waited for.
    pub(crate) fn line_up(&self) -> Place<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Place(self)
    }

    /// Attempts under way.
    pub(super) fn in_flight(&self) -> usize {
        self.limit.saturating_sub(self.permits.available_permits())
    }

    /// Attempts waiting for a permit.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}

/// Leave for one attempt to be under way. Dropped, it goes to the next in line.
#[derive(Debug)]
pub(crate) struct Permit<'l> {
    of: &'l Limiter,
    _permit: SemaphorePermit<'l>,
}

impl<'l> Permit<'l> {
    /// Who gave it.
    pub(crate) fn limiter(&self) -> &'l Limiter {
        self.of
    }
}

/// One in the line. Dropped, it has left.
pub(crate) struct Place<'l>(&'l Limiter);

impl<'l> Place<'l> {
    /// Waits for its turn. It fails only for a closed semaphore, and nobody closes ours.
    pub(crate) fn turn(
        &self,
    ) -> impl Future<Output = Result<SemaphorePermit<'l>, AcquireError>> + use<'l> {
        self.0.permits.acquire()
    }

    /// Its turn has come.
    pub(crate) fn take(self, permit: SemaphorePermit<'l>) -> Permit<'l> {
        Permit {
            of: self.0,
            _permit: permit,
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}
