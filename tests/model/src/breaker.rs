use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

use crate::policy::{Backoff, BreakerState, CircuitBreaker, Health};
use crate::{now, secs};

/// Opened by one failure and, after a second, half-open with one permit of ten seconds.
fn half_open() -> Arc<CircuitBreaker> {
    let breaker = CircuitBreaker::builder()
        .consecutive_failures(1)
        .open_for(Backoff::fixed([secs(1)]))
        .permit_timeout(secs(10))
        .gate_first_sends(true)
        .build()
        .expect("valid settings");
    let pass = breaker.enter(now(), true).expect("it is closed");
    pass.settle(Health::Bad, now(), || 0.0);
    let later = now() + secs(1);
    assert_eq!(breaker.at(later).state(), BreakerState::HalfOpen);
    Arc::new(breaker)
}

/// Never two at once, and never none for all.
pub(crate) fn one_permit_three_takers() {
    let breaker = half_open();
    let held = Arc::new(AtomicUsize::new(0));
    let had = Arc::new(AtomicUsize::new(0));
    let take = |breaker: Arc<CircuitBreaker>, held: Arc<AtomicUsize>, had: Arc<AtomicUsize>| {
        move || {
            let Ok(pass) = breaker.enter(now() + secs(1), false) else {
                return;
            };
            assert_eq!(
                held.fetch_add(1, Ordering::SeqCst),
                0,
                "two hold the permit"
            );
            had.fetch_add(1, Ordering::SeqCst);
            held.fetch_sub(1, Ordering::SeqCst);
            drop(pass);
        }
    };
    let threads: Vec<_> = (0..2)
        .map(|_| thread::spawn(take(breaker.clone(), held.clone(), had.clone())))
        .collect();
    take(breaker.clone(), held.clone(), had.clone())();
    threads
        .into_iter()
        .for_each(|one| one.join().expect("it ends"));
    assert!(had.load(Ordering::SeqCst) >= 1, "nobody had it");
    assert_eq!(breaker.at(now() + secs(1)).permits_out(), 0);
}

/// Dropped by one while another asks: asked again after that, it is there.
pub(crate) fn a_permit_comes_back() {
    let breaker = half_open();
    let other = breaker.clone();
    let holder = thread::spawn(move || drop(other.enter(now() + secs(1), false)));
    drop(breaker.enter(now() + secs(1), false));
    holder.join().expect("it ends");
    assert!(breaker.enter(now() + secs(1), false).is_ok());
}

/// A holder that comes back late gives back its own permit, not that of its successor.
pub(crate) fn an_expired_permit_is_not_anothers() {
    let breaker = half_open();
    let other = breaker.clone();
    let late = thread::spawn(move || {
        let pass = other.enter(now() + secs(1), false);
        thread::yield_now();
        drop(pass);
    });
    let successor = breaker.enter(now() + secs(20), false);
    late.join().expect("it ends");
    assert!(successor.is_ok(), "an expired permit is free");
    assert_eq!(breaker.at(now() + secs(20)).permits_out(), 1);
}

/// Whichever ends first decides; the other began in a state that is gone.
pub(crate) fn a_success_and_a_failure_together() {
    let breaker = half_open();
    let ends = |health| {
        let breaker = breaker.clone();
        thread::spawn(move || {
            if let Ok(pass) = breaker.enter(now() + secs(1), false) {
                pass.settle(health, now() + secs(1), || 0.0);
            }
        })
    };
    let both = [ends(Health::Good), ends(Health::Bad)];
    both.into_iter()
        .for_each(|one| one.join().expect("it ends"));
    let after = breaker.at(now() + secs(1));
    // A success that came first lets the other in through a closed breaker, which its failure opens.
    match after.state() {
        BreakerState::Closed => assert_eq!(after.opened(), 1),
        BreakerState::Open => assert_eq!(after.opened(), 2),
        other => panic!("{other}"),
    }
    assert_eq!(after.permits_out(), 0);
}

/// What began before the outage neither closes nor opens anything after it.
pub(crate) fn a_straggler_and_a_probe() {
    let breaker = Arc::new(
        CircuitBreaker::builder()
            .consecutive_failures(1)
            .open_for(Backoff::fixed([secs(1)]))
            .build()
            .expect("valid settings"),
    );
    let straggler = breaker.clone();
    let began = thread::spawn(move || {
        let pass = straggler.enter(now(), true).expect("first sends pass");
        pass.settle(Health::Good, now() + secs(1), || 0.0);
    });
    let pass = breaker.enter(now(), true).expect("first sends pass");
    pass.settle(Health::Bad, now(), || 0.0);
    began.join().expect("it ends");
    assert_eq!(breaker.at(now() + secs(1)).state(), BreakerState::HalfOpen);
}
