//! A context that is set where a request enters a service, and found by every call made for it.
//!
//! A deadline that is given to each request has to be passed through every function in between, and
//! cannot reach the requests of a generated SDK. The ambient context is set once, around the future of
//! the handler; every operation that starts within it ends by its deadline and with its token.
//!
//! ```
//! use std::time::Duration;
//! use reqwest_idempotent_retry::ambient::{self, Context};
//!
//! # async fn handler() { let left = ambient::current().and_then(|context| context.time_left()); assert!(left.is_some()); }
//! # #[tokio::main(flavor = "current_thread")] async fn main() {
//! let context = Context::new().deadline_in(Duration::from_secs(2));
//! ambient::scope(context, handler()).await;
//! # }
//! ```
//!
//! A request's own [`Deadline`](crate::Deadline) counts as well: the earlier of both ends the operation.
//! Its own [`CancellationToken`] does not replace the ambient one: either ends it. For everything
//! else an extension of the request wins.
//!
//! `tokio::spawn` does not inherit the context: use [`spawn`]. Nor does `spawn_blocking`.
//!
//! The context is one item of [`task_local_extensions`], which hides the items of an outer scope: those
//! that other crates have put there with `with_extensions` are not seen within [`scope`], nor is the context
//! within such a call of theirs.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::pin;
use std::task::{self, Poll, Waker};
use std::time::{Duration, Instant};

use task_local_extensions::{Extensions, get_local_item, with_extensions};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::clock;
use crate::nesting;

/// What the operations within a scope go by.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct Context {
    deadline: Option<Instant>,
    cancel: Option<CancellationToken>,
    retry_depth: Option<u32>,
    attempt: Option<u32>,
}

impl Context {
    /// Says nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Operations end by this instant.
    pub fn deadline_at(mut self, deadline: Instant) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Operations end so long from now. `Duration::MAX` is no deadline.
    pub fn deadline_in(mut self, span: Duration) -> Self {
        self.deadline = clock::now().checked_add(span);
        self
    }

    /// Operations end when this token is cancelled.
    pub fn cancelled_by(mut self, token: CancellationToken) -> Self {
        self.cancel = Some(token);
        self
    }

    /// How many layers around these operations repeat them already, in this process or before it. With
    /// one or more they leave their retries to it
    /// ([`StopReason::NestedLayer`](crate::StopReason::NestedLayer)).
    pub fn retried_by(mut self, layers: u32) -> Self {
        self.retry_depth = Some(layers);
        self
    }

    /// The attempt of our caller that we work for, 1 for its first.
    pub fn inbound_attempt(mut self, number: u32) -> Self {
        self.attempt = Some(number);
        self
    }

    /// The instant by which operations end.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// The time until then; zero once it has passed. `None`: there is no deadline.
    #[must_use]
    pub fn time_left(&self) -> Option<Duration> {
        let now = clock::now();
        self.deadline
            .map(|deadline| deadline.saturating_duration_since(now))
    }

    /// The token that ends operations.
    #[must_use]
    pub fn cancellation(&self) -> Option<&CancellationToken> {
        self.cancel.as_ref()
    }

    /// How many layers around repeat what is done here.
    #[must_use]
    pub fn retry_depth(&self) -> u32 {
        self.retry_depth.unwrap_or_default()
    }

    /// The attempt of our caller that we work for.
    #[must_use]
    pub fn attempt(&self) -> Option<u32> {
        self.attempt
    }

    /// What an outer scope has said, where this one says nothing. A deadline can only come earlier.
    fn within(self, outer: Self) -> Self {
        let deadlines = [self.deadline, outer.deadline];
        Self {
            deadline: deadlines.into_iter().flatten().min(),
            cancel: self.cancel.or(outer.cancel),
            retry_depth: self.retry_depth.or(outer.retry_depth),
            attempt: self.attempt.or(outer.attempt),
        }
    }
}

/// Runs `work` with this context. What it does not say is taken from the scope around, if there is one;
/// of two deadlines the earlier holds. A token replaces that of the outer scope: make it with
/// [`CancellationToken::child_token`] if the outer one is to count as well.
///
/// # Panics
///
/// Where `work` does; the context does not leak to other tasks of the thread then.
///
/// # Cancel safety
///
/// Dropped, `work` is dropped, outside of the scope.
pub async fn scope<F: Future>(context: Context, work: F) -> F::Output {
    let context = match found() {
        Some(outer) => context.within(outer),
        None => context,
    };
    let extensions = Extensions::new().with(context);
    // A panic that passed through `with_extensions` would leave our map behind for the next task. `work`
    // is dropped outside of it, since that may panic as well.
    let mut work = pin!(work);
    let caught =
        poll_fn(
            |task| match catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(task))) {
                Ok(polled) => polled.map(Ok),
                Err(panic) => Poll::Ready(Err(panic)),
            },
        );
    match with_extensions(extensions, caught).await {
        (_, Ok(output)) => output,
        (_, Err(panic)) => resume_unwind(panic),
    }
}

/// The context of the innermost scope around. `None`: there is none, and no attempt around either.
///
/// Within an attempt of an operation that may be repeated the retry depth counts that one too.
#[must_use]
pub fn current() -> Option<Context> {
    let found = found();
    if !nesting::is_within_an_attempt() {
        return found;
    }
    let context = found.unwrap_or_default();
    let depth = context.retry_depth().saturating_add(1);
    Some(context.retried_by(depth))
}

/// `tokio::spawn` with the context of here, if there is one. A task that is spawned within an attempt
/// of an operation leaves retries to that operation.
///
/// # Panics
///
/// Outside of a tokio runtime.
///
/// # Cancel safety
///
/// Dropping the handle detaches the task, as with `tokio::spawn`.
pub fn spawn<F>(work: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    match current() {
        Some(context) => tokio::spawn(scope(context, work)),
        None => tokio::spawn(work),
    }
}

/// The context in this task's map. Asking for it is async in name only.
fn found() -> Option<Context> {
    let mut task = task::Context::from_waker(Waker::noop());
    match pin!(get_local_item::<Context>()).poll(&mut task) {
        Poll::Ready(found) => found,
        Poll::Pending => None,
    }
}
