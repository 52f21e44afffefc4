//! The only reader of time and of the draws for waits, and the only one who waits for an instant. (A
//! key's random number is made with the key.)
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
use tokio::time::{Sleep, sleep_until};
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
        work,
        alarm: until.map(Alarm::at),
        own: cancel.own().map(CancellationToken::cancelled).map(Box::pin),
        ambient: cancel
            .ambient()
            .map(CancellationToken::cancelled)
            .map(Box::pin),
    }
}

/// Nothing, until `until`, or until the caller cancels.
pub(crate) fn wait(until: Option<Instant>, cancel: &Cancel) -> Race<'_, Pending<()>> {
    bounded(pending(), until, cancel)
}

pin_project! {
    /// Work, and what may end it early. A type of its own, since an `async fn` would keep the work
    /// twice; small where nothing else is waited for, since every operation has room for one.
    pub(crate) struct Race<'c, F> {
        #[pin]
        work: F,
        alarm: Option<Alarm>,
        own: Option<Cancelled<'c>>,
        ambient: Option<Cancelled<'c>>,
    }
}

type Cancelled<'c> = Pin<Box<WaitForCancellationFuture<'c>>>;

impl<F: Future> Future for Race<'_, F> {
    type Output = Bounded<F::Output>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        if let Poll::Ready(done) = this.work.poll(context) {
            return Poll::Ready(Bounded::Done(done));
        }
        if let Some(alarm) = this.alarm
            && alarm.poll(context).is_ready()
        {
            return Poll::Ready(Bounded::TimedOut);
        }
        for token in [this.own, this.ambient].into_iter().flatten() {
            if token.as_mut().poll(context).is_ready() {
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
    ///
    /// Work that has used up the task's share of polls (tokio's cooperative scheduling) keeps a timer
    /// from being asked, and may do so each time: then the clock is, which knows no ticks of a millisecond
    /// and may be that much ahead of the timer.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let is_waiting = self.sleep.is_some();
        let sleep = self
            .sleep
            .get_or_insert_with(|| Box::pin(sleep_until(self.at.into())));
        match sleep.as_mut().poll(context) {
            Poll::Pending if is_waiting && self.is_past() => Poll::Ready(()),
            polled => polled,
        }
    }
}
