//! The ambient context: who sees it, what it leaves behind, and what operations make of it.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod support;

mod ambient {
    mod operations;
    mod panics;
    mod scopes;
}

use std::future::{Future, poll_fn};
use std::panic::resume_unwind;
use std::pin::Pin;
use std::sync::{Arc, Barrier};
use std::task::Poll;

use reqwest_idempotent_retry::ambient::{Context, current, scope, spawn};
use tokio::runtime::{Builder, Handle};
use tokio::task::JoinHandle;

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

const THREADS: usize = 4;

/// Runs the test as a task of a runtime with one thread, then of one with several.
fn on_each_runtime<T>(test: impl Fn() -> T)
where
    T: Future<Output = ()> + Send + 'static,
{
    for mut builder in [Builder::new_current_thread(), Builder::new_multi_thread()] {
        let runtime = builder.worker_threads(THREADS).enable_time().build();
        let runtime = runtime.expect("a runtime");
        let ended = runtime.block_on(runtime.spawn(test()));
        if let Err(failed) = ended {
            resume_unwind(failed.into_panic());
        }
    }
}

/// A context that is told from others by its number.
fn numbered(number: u32) -> Context {
    Context::new().inbound_attempt(number)
}

/// The number of the context that is seen here.
fn seen() -> Option<u32> {
    current().and_then(|context| context.attempt())
}

/// Spawns a task of ours from a scope that is over then.
async fn spawn_from<T>(context: Context, work: T) -> JoinHandle<T::Output>
where
    T: Future<Output: Send + 'static> + Send + 'static,
{
    let mut work = Some(work);
    let spawns = poll_fn(|_| Poll::Ready(spawn(work.take().expect("polled once"))));
    scope(context, spawns).await
}

/// A task on each thread of the runtime looks around, all at the same time.
async fn assert_no_other_task_sees_a_context(when: &str) {
    let threads = Handle::current().metrics().num_workers();
    let all_at_once = Arc::new(Barrier::new(threads));
    let look = || {
        let all_at_once = Arc::clone(&all_at_once);
        tokio::spawn(async move {
            all_at_once.wait();
            current().is_some()
        })
    };
    let looking: Vec<_> = (0..threads).map(|_| look()).collect();
    for sees_one in looking {
        assert!(!sees_one.await.expect("no panic"), "{when}");
    }
}
