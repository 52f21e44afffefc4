//! When the caller stops waiting.

use std::time::{Duration, Instant};

/// The instant after which the caller no longer waits: a request extension.
///
/// Covers every attempt and every wait of the operation, and, unless the builder says
/// [`DeadlineScope::Headers`], the reading of the final response body. Fixed at the first send and
/// never renewed by a retry.
///
/// ```
/// use std::time::Duration;
/// use reqwest_idempotent_retry::Deadline;
///
/// let soon = Deadline::after(Duration::from_millis(2500));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline(When);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    After(Duration),
    At(Instant),
}

impl Deadline {
    /// So long after the first send of each operation that it is attached to. Plain data: the same
    /// value may be cloned into every request. `Duration::MAX` is no deadline.
    #[must_use]
    pub fn after(span: Duration) -> Self {
        Self(When::After(span))
    }

    /// At this instant, however many operations share it: for a loop of your own around several
    /// calls, or a deadline that came from elsewhere.
    #[must_use]
    pub fn at(instant: Instant) -> Self {
        Self(When::At(instant))
    }

    /// The instant, for an operation whose first send is `now`. `None`: too far away to ever come.
    pub(crate) fn resolve(self, now: Instant) -> Option<Instant> {
        match self.0 {
            When::After(span) => now.checked_add(span),
            When::At(instant) => Some(instant),
        }
    }

    /// Whether each operation gets its own instant.
    pub(crate) fn is_relative(self) -> bool {
        matches!(self.0, When::After(_))
    }
}

/// What the deadline covers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeadlineScope {
    /// Up to the end of the response body: bytes that are not read by then are not handed on, and the
    /// read fails with [`std::io::ErrorKind::TimedOut`]. The default, since a caller waits for the
    /// body too.
    #[default]
    Body,
    /// Up to the response head. For long downloads.
    Headers,
}
