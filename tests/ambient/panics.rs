//! A panic goes through a scope unchanged, and leaves no context behind for the next task of the thread.

use std::any::Any;
use std::future::{Future, pending};
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any, resume_unwind};
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll, Waker};

use reqwest_idempotent_retry::ambient;
use task_local_extensions::{Extensions, with_extensions};
use tokio::task::{JoinError, yield_now};

use crate::{
    Task, assert_no_other_task_sees_a_context, numbered, on_each_runtime, seen, spawn_from,
};

#[derive(Debug, PartialEq)]
struct Boom(u32);

/// A panic without its message on the terminal.
fn boom() -> ! {
    resume_unwind(Box::new(Boom(7)))
}

async fn panics_at_once() {
    boom()
}

async fn panics_later() {
    yield_now().await;
    boom()
}

async fn panics_nested() {
    ambient::scope(numbered(2), panics_later()).await;
}

async fn panics_in_a_branch() {
    tokio::join!(panics_later(), pending::<()>());
}

async fn panics_within_another_crates_map() {
    with_extensions(Extensions::new().with(7_u8), panics_later()).await;
}

/// Ends well, and panics when it is dropped after that.
struct PanicsWhenDropped;

impl Future for PanicsWhenDropped {
    type Output = ();

    fn poll(self: Pin<&mut Self>, _: &mut TaskContext<'_>) -> Poll<()> {
        Poll::Ready(())
    }
}

impl Drop for PanicsWhenDropped {
    fn drop(&mut self) {
        // A second panic on top of a test's own would end the whole process.
        if !std::thread::panicking() {
            boom()
        }
    }
}

fn ways_to_panic() -> [(&'static str, Task); 6] {
    let scope = |work: Task| -> Task { Box::pin(ambient::scope(numbered(1), work)) };
    [
        ("at once", scope(Box::pin(panics_at_once()))),
        ("later", scope(Box::pin(panics_later()))),
        ("in a nested scope", scope(Box::pin(panics_nested()))),
        ("in a branch", scope(Box::pin(panics_in_a_branch()))),
        (
            "within another crate's map",
            scope(Box::pin(panics_within_another_crates_map())),
        ),
        (
            "when dropped after its end",
            scope(Box::pin(PanicsWhenDropped)),
        ),
    ]
}

fn assert_boom(way: &str, panic: &(dyn Any + Send)) {
    assert_eq!(panic.downcast_ref(), Some(&Boom(7)), "{way}");
}

#[test]
fn no_panic_leaks_the_context_to_another_task_of_its_thread() {
    on_each_runtime(|| async {
        for (way, panics) in ways_to_panic() {
            let panic = tokio::spawn(panics).await.map_err(JoinError::into_panic);
            assert_boom(way, &*panic.expect_err("a panic"));
            assert_no_other_task_sees_a_context(way).await;
        }
    });
}

#[test]
fn no_panic_leaks_it_to_whoever_catches_it_in_the_same_task() {
    on_each_runtime(|| async {
        for (way, mut panics) in ways_to_panic() {
            assert_boom(way, &*panic_of(panics.as_mut()).await);
            assert!(ambient::current().is_none(), "{way}");
        }
    });
}

#[test]
fn a_panic_caught_in_an_outer_scope_leaves_that_one_as_it_was() {
    on_each_runtime(|| async {
        for (way, mut panics) in ways_to_panic() {
            ambient::scope(numbered(9), async {
                assert_boom(way, &*panic_of(panics.as_mut()).await);
                assert_eq!(seen(), Some(9), "{way}");
                yield_now().await;
                assert_eq!(seen(), Some(9), "{way}");
            })
            .await;
        }
    });
}

#[test]
fn a_panic_in_a_task_of_ours_leaks_nothing() {
    on_each_runtime(|| async {
        for (way, panics) in ways_to_panic() {
            let task = spawn_from(numbered(9), panics).await;
            let panic = task.await.map_err(JoinError::into_panic);
            assert_boom(way, &*panic.expect_err("a panic"));
            assert_no_other_task_sees_a_context(way).await;
        }
    });
}

#[test]
fn a_scope_that_is_polled_again_after_its_panic_leaks_nothing() {
    let mut task = TaskContext::from_waker(Waker::noop());
    let mut scope = Box::pin(ambient::scope(numbered(1), panics_at_once()));
    for again in [false, true] {
        let mut poll = || scope.as_mut().poll(&mut task);
        assert!(catch_unwind(AssertUnwindSafe(&mut poll)).is_err());
        assert!(ambient::current().is_none(), "again: {again}");
    }
}

/// With a message, as `panic!` makes it: what is caught is that very message.
#[test]
fn the_message_of_a_panic_stays() {
    let mut task = TaskContext::from_waker(Waker::noop());
    let mut scope = Box::pin(ambient::scope(numbered(1), async {
        panic_any("the message");
    }));
    let panic = catch_unwind(AssertUnwindSafe(|| scope.as_mut().poll(&mut task)));
    let panic = panic.expect_err("a panic");
    assert_eq!(panic.downcast_ref(), Some(&"the message"));
}

/// Polls it to its panic.
async fn panic_of(mut work: Pin<&mut (dyn Future<Output = ()> + Send)>) -> Box<dyn Any + Send> {
    std::future::poll_fn(
        |task| match catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(task))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(())) => panic!("it ended without a panic"),
            Err(panic) => Poll::Ready(panic),
        },
    )
    .await
}
