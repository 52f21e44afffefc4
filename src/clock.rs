//! The only reader of time and randomness, and the only one who waits.
#![allow(
    clippy::disallowed_methods,
    reason = "everything that clippy.toml bans elsewhere is meant to be here"
)]

use std::fmt;
use std::future::{Future, Pending, pending};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Instant, SystemTime};

use pin_project_lite::pin_project;
use tokio::time::{Sleep, Timeout, sleep_until, timeout_at};
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};

use crate::cancel::Cancel;

/// Where a middleware gets its random draws and its wall clock from.
#[derive(Clone, Default)]
pub(crate) struct Clock {
    pub(crate) random: Option<Arc<dyn Fn() -> f64 + Send + Sync>>,
    pub(crate) wall: Option<Arc<dyn Fn() -> SystemTime + Send + Sync>>,
}

impl Clock {
    /// A uniform draw from `[0, 1)`.
    pub(crate) fn draw(&self) -> f64 {
        self.random
            .as_ref()
            .map_or_else(fastrand::f64, |draw| draw())
    }

    /// The wall clock, which only turns an HTTP-date into a span.
    pub(crate) fn wall(&self) -> SystemTime {
        self.wall
            .as_ref()
            .map_or_else(SystemTime::now, |wall| wall())
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Clock").finish_non_exhaustive()
    }
}

/// The monotonic clock that tokio's timers follow.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// How something that was waited for has ended.
#[derive(Debug)]
pub(crate) enum Bounded<T> {
    Done(T),
    TimedOut,
    Cancelled,
}

/// `work`, until `until`, or until the caller cancels. Work that is done wins over both.
pub(crate) fn bounded<F: Future>(work: F, until: Option<Instant>, cancel: &Cancel) -> Race<'_, F> {
    Race {
        timed: match until {
            None => Timed::Unlimited { work },
            Some(until) => Timed::Limited {
                work: timeout_at(until.into(), work),
            },
        },
        own: cancel.own().map(CancellationToken::cancelled),
        ambient: cancel.ambient().map(CancellationToken::cancelled),
    }
}

/// Nothing, until `until`, or until the caller cancels.
pub(crate) fn wait(until: Option<Instant>, cancel: &Cancel) -> Race<'_, Pending<()>> {
    bounded(pending(), until, cancel)
}

pin_project! {
    /// Work, and what may end it early. A type of its own, since an `async fn` would keep the work
    /// twice.
    pub(crate) struct Race<'c, F> {
        #[pin]
        timed: Timed<F>,
        #[pin]
        own: Option<WaitForCancellationFuture<'c>>,
        #[pin]
        ambient: Option<WaitForCancellationFuture<'c>>,
    }
}

pin_project! {
    #[project = TimedProjection]
    enum Timed<F> {
        Limited {
            #[pin]
            work: Timeout<F>,
        },
        Unlimited {
            #[pin]
            work: F,
        },
    }
}

impl<F: Future> Future for Race<'_, F> {
    type Output = Bounded<F::Output>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let timed = match this.timed.project() {
            TimedProjection::Limited { work } => work
                .poll(context)
                .map(|done| done.map_or(Bounded::TimedOut, Bounded::Done)),
            TimedProjection::Unlimited { work } => work.poll(context).map(Bounded::Done),
        };
        if timed.is_ready() {
            return timed;
        }
        for token in [this.own, this.ambient] {
            if token
                .as_pin_mut()
                .is_some_and(|token| token.poll(context).is_ready())
            {
                return Poll::Ready(Bounded::Cancelled);
            }
        }
        Poll::Pending
    }
}

/// A timer that exists only once something had to wait for it.
#[derive(Debug)]
pub(crate) struct Alarm {
    at: Instant,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Alarm {
    pub(crate) fn at(at: Instant) -> Self {
        Self { at, sleep: None }
    }

    pub(crate) fn is_past(&self) -> bool {
        now() > self.at
    }

    /// Ready once the instant has come; otherwise the task is woken then.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.sleep
            .get_or_insert_with(|| Box::pin(sleep_until(self.at.into())))
            .as_mut()
            .poll(context)
    }
}
