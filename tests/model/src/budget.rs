use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

use crate::policy::{Backoff, Certainty, Decision, Health, Moment, Outcome, Verdict};
use crate::policy::{Call, Limits, Pacing, ReplayClass, RetryBudget, Terms};
use crate::{now, secs};

const FAILED: Outcome = Outcome {
    verdict: Verdict::Retryable,
    certainty: Certainty::Unknown,
    success: false,
    retry_after: None,
    pushes_back: false,
    veto: false,
    retried_below: false,
    may_be_doubled_below: false,
    health: Health::Bad,
};

/// An operation whose first attempt has failed asks for a retry; `sent`: and sends it.
fn asks(budget: &RetryBudget, sent: bool) -> bool {
    let pacing = Pacing {
        backoff: Backoff::fixed([secs(1)]),
        max_retry_after: secs(60),
    };
    let terms = Terms {
        pacing: &pacing,
        pushback: None,
        breaker: None,
        is_within_a_probe: false,
        budget: Some(budget),
    };
    let limits = Limits {
        max_attempts: 3,
        attempt_timeout: None,
        minimum_attempt: secs(0),
        reserve: secs(0),
    };
    let mut call = Call::new(ReplayClass::Safe, limits, None);
    call.start_attempt(&terms, now());
    call.record(&FAILED, &terms, now());
    let at = Moment {
        now: now(),
        cancelled: false,
        draw: &|| 0.0,
    };
    match call.decide(&FAILED, &terms, at) {
        Decision::Wait { token, .. } if sent => token.spend(now()),
        Decision::Wait { token, .. } => drop(token),
        Decision::Return(_) => return false,
    }
    true
}

fn two_ask(budget: &Arc<RetryBudget>, sent: bool) -> usize {
    let granted = Arc::new(AtomicUsize::new(0));
    let ask = |budget: Arc<RetryBudget>, granted: Arc<AtomicUsize>| {
        move || {
            let is_granted = usize::from(asks(&budget, sent));
            granted.fetch_add(is_granted, Ordering::SeqCst);
        }
    };
    let other = thread::spawn(ask(budget.clone(), granted.clone()));
    ask(budget.clone(), granted.clone())();
    other.join().expect("it ends");
    granted.load(Ordering::SeqCst)
}

pub(crate) fn one_token_two_takers() {
    let budget = Arc::new(RetryBudget::fixed(1));
    assert_eq!(two_ask(&budget, true), 1);
    assert_eq!(budget.balance(), 0.0);
    assert_eq!(budget.snapshot().refused(), 1);
}

pub(crate) fn a_token_comes_back() {
    let budget = Arc::new(RetryBudget::fixed(1));
    assert!(two_ask(&budget, false) >= 1);
    assert_eq!(budget.balance(), 1.0);
    let figures = budget.snapshot();
    assert_eq!(figures.given(), figures.returned());
}

/// One retry a second, and two ask within the same one.
pub(crate) fn the_window_gives_no_more() {
    let budget = Arc::new(RetryBudget::window(0.0, 1, secs(1)).expect("valid figures"));
    assert_eq!(two_ask(&budget, true), 1);
}
