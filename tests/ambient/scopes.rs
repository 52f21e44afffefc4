//! Who sees a context, and until when.

use std::future::pending;
use std::pin::{Pin, pin};
use std::task::{self, Poll, Waker};
use std::time::Duration;

use reqwest_idempotent_retry::CancellationToken;
use reqwest_idempotent_retry::ambient::{self, Context};
use task_local_extensions::{Extensions, get_local_item, with_extensions};
use tokio::task::{JoinSet, yield_now};
use tokio::time::Instant;

use crate::support::{ms, secs};
use crate::{
    Task, assert_no_other_task_sees_a_context, numbered, on_each_runtime, seen, spawn_from,
};

#[test]
fn a_handler_and_all_that_it_calls_see_the_context() {
    async fn three_calls_down(depth: u32) -> Option<u32> {
        yield_now().await;
        match depth {
            0 => seen(),
            depth => Box::pin(three_calls_down(depth - 1)).await,
        }
    }
    on_each_runtime(|| async {
        assert!(ambient::current().is_none());
        let found = ambient::scope(numbered(1), three_calls_down(3)).await;
        assert_eq!(found, Some(1));
        assert!(ambient::current().is_none(), "gone after the scope");
        assert_no_other_task_sees_a_context("after the scope").await;
    });
}

#[test]
fn a_context_gives_back_what_was_put_in() {
    let token = CancellationToken::new();
    let deadline = std::time::Instant::now() + secs(60);
    let context = Context::new()
        .deadline_at(deadline)
        .cancelled_by(token.clone())
        .retried_by(2)
        .inbound_attempt(3);
    assert_eq!(context.deadline(), Some(deadline));
    assert!(context.time_left() <= Some(secs(60)));
    assert_eq!((context.retry_depth(), context.attempt()), (2, Some(3)));
    token.cancel();
    assert!(context.cancellation().expect("a token").is_cancelled());

    let empty = Context::new();
    assert_eq!((empty.deadline(), empty.time_left()), (None, None));
    assert_eq!((empty.retry_depth(), empty.attempt()), (0, None));
    assert!(empty.cancellation().is_none());
    assert_eq!(empty.deadline_in(Duration::MAX).deadline(), None);
}

#[tokio::test(start_paused = true)]
async fn the_time_left_shrinks_to_zero() {
    ambient::scope(Context::new().deadline_in(ms(100)), async {
        let left = || ambient::current().and_then(|context| context.time_left());
        assert_eq!(left(), Some(ms(100)));
        tokio::time::sleep(ms(60)).await;
        assert_eq!(left(), Some(ms(40)));
        tokio::time::sleep(ms(60)).await;
        assert_eq!(left(), Some(ms(0)));
    })
    .await;
}

#[test]
fn branches_of_join_and_select_see_it() {
    async fn branch() -> Option<u32> {
        yield_now().await;
        seen()
    }
    on_each_runtime(|| {
        ambient::scope(numbered(1), async {
            assert_eq!(tokio::join!(branch(), branch()), (Some(1), Some(1)));
            let first = tokio::select! {
                found = branch() => found,
                () = pending() => None,
            };
            assert_eq!(first, Some(1));
        })
    });
}

#[test]
fn a_task_of_tokio_does_not_see_it_and_one_of_ours_does() {
    on_each_runtime(|| {
        ambient::scope(numbered(1), async {
            let plain = tokio::spawn(async { ambient::current().is_none() });
            assert!(plain.await.expect("no panic"));
            let blocking = tokio::task::spawn_blocking(|| ambient::current().is_none());
            assert!(blocking.await.expect("no panic"));

            let ours = ambient::spawn(async {
                yield_now().await;
                let of_a_task = ambient::spawn(async { seen() });
                (seen(), of_a_task.await.expect("no panic"))
            });
            assert_eq!(ours.await.expect("no panic"), (Some(1), Some(1)));
        })
    });
}

#[test]
fn a_task_of_ours_keeps_the_context_of_where_it_was_spawned() {
    on_each_runtime(|| async {
        let (go, gone) = tokio::sync::oneshot::channel();
        let task = spawn_from(numbered(1), async {
            gone.await.expect("to be told");
            seen()
        })
        .await;
        ambient::scope(numbered(2), async { go.send(()) })
            .await
            .expect("the task listens");
        assert_eq!(task.await.expect("no panic"), Some(1));
    });
}

#[test]
fn outside_of_a_scope_ours_is_a_plain_spawn() {
    on_each_runtime(|| async {
        let task = ambient::spawn(async { ambient::current().is_none() });
        assert!(task.await.expect("no panic"));
    });
}

#[test]
fn a_join_set_gets_it_by_a_scope_of_its_own() {
    on_each_runtime(|| {
        ambient::scope(numbered(1), async {
            let mut tasks = JoinSet::new();
            for _ in 0..3 {
                let here = ambient::current().expect("a context");
                tasks.spawn(ambient::scope(here, async { seen() }));
            }
            assert_eq!(tasks.join_all().await, [Some(1); 3]);
        })
    });
}

#[test]
fn a_nested_scope_keeps_what_it_does_not_replace() {
    on_each_runtime(|| async {
        let outer_token = CancellationToken::new();
        let deadline = std::time::Instant::now() + secs(60);
        let outer = Context::new()
            .deadline_at(deadline)
            .cancelled_by(outer_token.clone())
            .retried_by(1)
            .inbound_attempt(2);
        ambient::scope(outer, async {
            ambient::scope(Context::new(), async {
                let kept = ambient::current().expect("a context");
                assert_eq!(kept.deadline(), Some(deadline));
                assert_eq!((kept.retry_depth(), kept.attempt()), (1, Some(2)));
                assert!(kept.cancellation().is_some());
            })
            .await;

            let inner_token = CancellationToken::new();
            let inner = numbered(5).cancelled_by(inner_token.clone()).retried_by(0);
            ambient::scope(inner, async {
                let mixed = ambient::current().expect("a context");
                assert_eq!(mixed.deadline(), Some(deadline));
                assert_eq!((mixed.retry_depth(), mixed.attempt()), (0, Some(5)));
                inner_token.cancel();
                assert!(mixed.cancellation().expect("a token").is_cancelled());
            })
            .await;

            let after = ambient::current().expect("a context");
            assert_eq!((after.retry_depth(), after.attempt()), (1, Some(2)));
            let token = after.cancellation().expect("the outer token");
            assert!(!token.is_cancelled(), "the inner token replaced it");
            outer_token.cancel();
            assert!(token.is_cancelled());
        })
        .await;
    });
}

#[test]
fn a_nested_deadline_can_only_come_earlier() {
    on_each_runtime(|| async {
        let now = std::time::Instant::now();
        let within_ten_seconds = |span| async move {
            let inner = Context::new().deadline_at(now + span);
            ambient::scope(Context::new().deadline_at(now + secs(10)), async {
                ambient::scope(inner, async { ambient::current() }).await
            })
            .await
            .and_then(|context| context.deadline())
        };
        assert_eq!(within_ten_seconds(secs(5)).await, Some(now + secs(5)));
        assert_eq!(within_ten_seconds(secs(20)).await, Some(now + secs(10)));
    });
}

#[test]
fn a_scope_that_is_dropped_midway_leaves_nothing_behind() {
    on_each_runtime(|| async {
        let nested = || ambient::scope(numbered(2), pending::<()>());
        let midway: [(&str, Task); 2] = [
            ("one", Box::pin(ambient::scope(numbered(1), pending()))),
            ("nested", Box::pin(ambient::scope(numbered(1), nested()))),
        ];
        for (name, mut scope) in midway {
            poll_once(scope.as_mut());
            assert!(ambient::current().is_none(), "between polls: {name}");
            drop(scope);
            assert!(ambient::current().is_none(), "after the drop: {name}");
            assert_no_other_task_sees_a_context(name).await;
        }
    });
}

#[test]
fn what_is_dropped_midway_is_dropped_outside_of_the_scope() {
    struct LooksAround<'a>(&'a mut bool);
    impl Drop for LooksAround<'_> {
        fn drop(&mut self) {
            *self.0 = ambient::current().is_some();
        }
    }
    let mut sees_one = false;
    let held = LooksAround(&mut sees_one);
    let mut scope = Box::pin(ambient::scope(numbered(1), async move {
        let _held = held;
        pending::<()>().await;
    }));
    poll_once(scope.as_mut());
    drop(scope);
    assert!(!sees_one);
}

fn poll_once(work: Pin<&mut (impl Future<Output = ()> + ?Sized)>) {
    let mut task = task::Context::from_waker(Waker::noop());
    assert!(work.poll(&mut task).is_pending());
}

#[test]
fn a_scope_that_wanders_from_thread_to_thread_takes_it_along() {
    let mut scope = Box::pin(ambient::scope(numbered(1), async {
        assert_eq!(seen(), Some(1));
        yield_now().await;
        assert_eq!(seen(), Some(1));
        pending::<()>().await;
    }));
    for _ in 0..3 {
        scope = std::thread::spawn(move || {
            poll_once(scope.as_mut());
            assert!(ambient::current().is_none(), "nothing stays on the thread");
            scope
        })
        .join()
        .expect("no panic");
    }
}

#[test]
fn a_hundred_tasks_in_turn_on_one_thread_do_not_mix() {
    on_each_runtime(|| async {
        let mut tasks = JoinSet::new();
        for number in 1..=100 {
            tasks.spawn(ambient::scope(numbered(number), async move {
                for _ in 0..20 {
                    assert_eq!(seen(), Some(number));
                    yield_now().await;
                }
            }));
            tasks.spawn(async {
                for _ in 0..20 {
                    assert_eq!(seen(), None);
                    yield_now().await;
                }
            });
        }
        tasks.join_all().await;
    });
}

#[test]
fn a_scope_is_entered_where_it_is_first_polled() {
    on_each_runtime(|| async {
        let made_outside = ambient::scope(Context::new(), async { seen() });
        let found = ambient::scope(numbered(1), made_outside).await;
        assert_eq!(found, Some(1));
    });
}

// ---- items of other crates ----

#[derive(Clone, Debug, PartialEq)]
struct Foreign(u32);

#[test]
fn items_of_other_crates_are_hidden_in_a_scope_and_back_after_it() {
    on_each_runtime(|| async {
        let theirs = Extensions::new().with(Foreign(7));
        let (theirs, ()) = with_extensions(theirs, async {
            let within = ambient::scope(numbered(1), get_local_item::<Foreign>()).await;
            assert_eq!(within, None);
            assert_eq!(get_local_item().await, Some(Foreign(7)));
        })
        .await;
        assert_eq!(theirs.get(), Some(&Foreign(7)));
    });
}

/// The same, seen from the other side: a scope does not reach through another crate's map.
#[test]
fn within_another_crates_map_the_context_is_hidden() {
    on_each_runtime(|| {
        ambient::scope(numbered(1), async {
            let theirs = Extensions::new().with(Foreign(7));
            let (_, within) = with_extensions(theirs, async { ambient::current() }).await;
            assert!(within.is_none());
            assert_eq!(seen(), Some(1), "and back after it");
        })
    });
}

#[test]
fn spans_of_time_count_from_the_call() {
    let before = Instant::now().into_std();
    let deadline = Context::new().deadline_in(secs(60)).deadline();
    let after = Instant::now().into_std();
    assert!(deadline >= Some(before + secs(60)) && deadline <= Some(after + secs(60)));
}

/// A context is found only while the scope is being polled, so that a waker cannot see it either.
#[test]
fn a_ready_scope_ends_at_its_first_poll() {
    let mut task = task::Context::from_waker(Waker::noop());
    let scope = pin!(ambient::scope(numbered(1), async { seen() }));
    assert_eq!(scope.poll(&mut task), Poll::Ready(Some(1)));
}
