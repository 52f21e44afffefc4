//! One operation's limits and certainty, by example: the sides of every boundary.

use std::time::{Duration, Instant};

use super::{ms, secs};
use crate::clock;
use crate::policy::{
    Admission, Backoff, Call, Certainty, Decision, Health, Limits, Moment, Outcome, Pacing,
    ReplayClass, StopReason, Terms, Verdict,
};

pub(super) const LIMITS: Limits = Limits {
    max_attempts: 3,
    attempt_timeout: None,
    minimum_attempt: Duration::ZERO,
    reserve: Duration::ZERO,
};

pub(super) const NANOSECOND: Duration = Duration::from_nanos(1);

pub(super) fn call(replay: ReplayClass, limits: Limits) -> Call {
    Call::new(replay, limits, None)
}

pub(super) fn call_until(deadline: Instant, limits: Limits) -> Call {
    let mut call = call(ReplayClass::Safe, limits);
    call.deadline = Some(deadline);
    call
}

/// An attempt that ended so.
pub(super) fn ended(certainty: Certainty) -> Outcome {
    Outcome {
        verdict: Verdict::Retryable,
        certainty,
        success: false,
        retry_after: None,
        pushes_back: false,
        veto: false,
        retried_below: false,
        may_be_doubled_below: false,
        health: Health::Bad,
    }
}

pub(super) fn asked_to_wait(retry_after: Duration) -> Outcome {
    Outcome {
        retry_after: Some(retry_after),
        ..ended(Certainty::NotProcessed)
    }
}

pub(super) const SUCCESS: Outcome = Outcome {
    verdict: Verdict::Done,
    certainty: Certainty::Answered,
    success: true,
    retry_after: None,
    pushes_back: false,
    veto: false,
    retried_below: false,
    may_be_doubled_below: false,
    health: Health::Good,
};

pub(super) fn at(now: Instant) -> Moment<'static> {
    Moment {
        now,
        cancelled: false,
        draw: &|| 0.5,
    }
}

/// Nothing is shared with other operations.
fn alone(pacing: &Pacing) -> Terms<'_> {
    Terms {
        pacing,
        pushback: None,
        breaker: None,
        is_within_a_probe: false,
        budget: None,
    }
}

/// The limit of an attempt that may start.
fn admit(call: &mut Call, at: Moment<'_>) -> Result<Option<Duration>, StopReason> {
    let pacing = always(ms(1));
    match call.admit(&alone(&pacing), at) {
        Ok(Admission::Start { limit, .. }) => Ok(limit),
        Ok(Admission::Wait(delay)) => panic!("asked to wait for {delay:?}"),
        Err(stop) => Err(stop.reason),
    }
}

fn start(call: &mut Call) {
    call.start_attempt(&alone(&always(ms(1))), clock::now());
}

fn attempt(call: &mut Call, outcome: &Outcome) {
    start(call);
    call.record(outcome, &alone(&always(ms(1))), clock::now());
}

/// The wait or the stop after a first attempt.
fn after_first(
    call: &mut Call,
    outcome: &Outcome,
    pacing: &Pacing,
    now: Instant,
) -> Result<Duration, Option<StopReason>> {
    attempt(call, outcome);
    match call.decide(outcome, &alone(pacing), at(now)) {
        Decision::Wait { delay, .. } => Ok(delay),
        Decision::Return(stop) => Err(stop.map(|stop| stop.reason)),
    }
}

pub(super) fn pacing(backoff: Backoff) -> Pacing {
    Pacing {
        backoff,
        max_retry_after: secs(60),
    }
}

pub(super) fn always(delay: Duration) -> Pacing {
    pacing(Backoff::fixed([delay]))
}

mod limits {
    use super::*;

    fn field_at_fault(minimum_attempt: Duration, reserve: Duration) -> Option<&'static str> {
        let limits = Limits {
            minimum_attempt,
            reserve,
            ..LIMITS
        };
        limits.validate(ms(100)).err().map(|error| error.field())
    }

    #[test]
    fn a_reserve_leaves_something_of_the_deadline() {
        assert_eq!(field_at_fault(Duration::ZERO, ms(99)), None);
        assert_eq!(field_at_fault(Duration::ZERO, ms(100)), Some("reserve"));
        assert_eq!(field_at_fault(Duration::ZERO, ms(101)), Some("reserve"));
    }

    #[test]
    fn the_least_attempt_fits_what_the_reserve_leaves() {
        let minimum = Some("minimum_attempt");
        assert_eq!(field_at_fault(ms(70), ms(30)), None);
        assert_eq!(field_at_fault(ms(70) + NANOSECOND, ms(30)), minimum);
        assert_eq!(field_at_fault(Duration::ZERO, ms(99) + NANOSECOND), minimum);
    }

    #[test]
    fn an_attempt_is_given_the_time_up_to_the_reserve() {
        let now = clock::now();
        let reserved = Limits {
            reserve: ms(30),
            ..LIMITS
        };
        let mut call = call_until(now + ms(100), reserved);
        assert_eq!(admit(&mut call, at(now)), Ok(Some(ms(70))));
        assert_eq!(call.time_left(now), Some(ms(100)));
        assert_eq!(admit(&mut call, at(now + ms(69))), Ok(Some(ms(1))));
        let late = now + ms(69) + NANOSECOND;
        assert_eq!(
            admit(&mut call, at(late)),
            Err(StopReason::DeadlineTooClose)
        );
    }

    #[test]
    fn an_attempt_timeout_is_clipped_to_the_time_left() {
        let now = clock::now();
        let timed = Limits {
            attempt_timeout: Some(ms(40)),
            ..LIMITS
        };
        assert_eq!(
            admit(&mut call(ReplayClass::Safe, timed), at(now)),
            Ok(Some(ms(40)))
        );
        let mut call = call_until(now + ms(100), timed);
        assert_eq!(admit(&mut call, at(now)), Ok(Some(ms(40))));
        assert_eq!(admit(&mut call, at(now + ms(75))), Ok(Some(ms(25))));
    }

    #[test]
    fn without_a_deadline_nothing_is_limited() {
        let now = clock::now();
        let mut call = call(ReplayClass::Safe, LIMITS);
        assert_eq!(admit(&mut call, at(now)), Ok(None));
        assert_eq!(call.time_left(now), None);
    }

    #[test]
    fn a_deadline_that_has_passed_admits_nothing() {
        let now = clock::now();
        let mut call = call_until(now, LIMITS);
        for late in [Duration::ZERO, secs(1)] {
            let admitted = admit(&mut call, at(now + late));
            assert_eq!(admitted, Err(StopReason::DeadlineTooClose));
            assert_eq!(call.time_left(now + late), Some(Duration::ZERO));
        }
    }

    #[test]
    fn a_cancelled_operation_is_not_admitted() {
        let mut call = call(ReplayClass::Safe, LIMITS);
        assert_eq!(
            admit(
                &mut call,
                Moment {
                    cancelled: true,
                    ..at(clock::now())
                }
            ),
            Err(StopReason::Cancelled)
        );
    }

    #[test]
    fn the_last_attempt_is_known_before_it_starts() {
        let mut call = call(ReplayClass::Safe, LIMITS);
        for expected in [false, false, true] {
            assert_eq!(call.is_last_attempt(), expected);
            start(&mut call);
        }
        assert_eq!(call.attempts(), 3);
    }
}

mod waits {
    use super::*;

    #[test]
    fn a_wait_leaves_room_for_the_least_attempt() {
        let start = clock::now();
        let after = |minimum_attempt, delay| {
            let limits = Limits {
                minimum_attempt,
                reserve: ms(10),
                ..LIMITS
            };
            let mut call = call_until(start + ms(100), limits);
            after_first(&mut call, &ended(Certainty::NotSent), &always(delay), start)
        };
        let too_close = Err(Some(StopReason::DeadlineTooClose));
        assert_eq!(after(ms(20), ms(70)), Ok(ms(70)));
        assert_eq!(after(ms(20), ms(70) + NANOSECOND), too_close);
        assert_eq!(after(Duration::ZERO, ms(89)), Ok(ms(89)));
        assert_eq!(after(Duration::ZERO, ms(89) + NANOSECOND), too_close);
        assert_eq!(after(Duration::ZERO, Duration::MAX), too_close);
    }

    #[test]
    fn without_a_deadline_the_longest_wait_is_waited() {
        let outcome = ended(Certainty::NotSent);
        let mut call = call(ReplayClass::Safe, LIMITS);
        assert_eq!(
            after_first(&mut call, &outcome, &always(Duration::MAX), clock::now()),
            Ok(Duration::MAX)
        );
    }

    #[test]
    fn a_floor_is_raised_by_the_random_part_only() {
        let after = |backoff| {
            let mut call = call(ReplayClass::Safe, LIMITS);
            let outcome = asked_to_wait(secs(2));
            after_first(&mut call, &outcome, &pacing(backoff), clock::now())
        };
        let (base, cap) = (ms(400), secs(10));
        assert_eq!(after(Backoff::full_jitter(base, cap)), Ok(ms(2_200)));
        assert_eq!(after(Backoff::equal_jitter(base, cap)), Ok(ms(2_100)));
        assert_eq!(after(Backoff::decorrelated(base, cap)), Ok(ms(2_400)));
        assert_eq!(after(Backoff::exponential(base, cap)), Ok(secs(2)));
        assert_eq!(after(Backoff::exponential(secs(3), cap)), Ok(secs(3)));
        assert_eq!(after(Backoff::fixed([secs(3)])), Ok(secs(3)));
    }

    #[test]
    fn a_floor_of_zero_is_none() {
        let mut call = call(ReplayClass::Safe, LIMITS);
        let equal = pacing(Backoff::equal_jitter(ms(400), secs(10)));
        let outcome = asked_to_wait(Duration::ZERO);
        assert_eq!(
            after_first(&mut call, &outcome, &equal, clock::now()),
            Ok(ms(300))
        );
    }

    #[test]
    fn jitter_is_clipped_to_the_time_left_and_the_floor_is_not() {
        let start = clock::now();
        let full = pacing(Backoff::full_jitter(ms(400), secs(10)));
        let after = |floor| {
            let mut call = call_until(start + secs(3), LIMITS);
            after_first(&mut call, &asked_to_wait(floor), &full, start)
        };
        assert_eq!(after(ms(2_700)), Ok(ms(2_900)));
        assert_eq!(after(ms(2_900)), Ok(ms(2_999)));
        assert_eq!(after(ms(2_999)), Ok(ms(2_999)));
        assert_eq!(
            after(ms(2_999) + NANOSECOND),
            Err(Some(StopReason::RetryAfterTooLong))
        );
    }

    #[test]
    fn the_longest_wish_holds_without_a_deadline_too() {
        let after = |floor| {
            let mut call = call(ReplayClass::Safe, LIMITS);
            let outcome = asked_to_wait(floor);
            after_first(&mut call, &outcome, &always(ms(1)), clock::now())
        };
        assert_eq!(after(secs(60)), Ok(secs(60)));
        let too_long = Err(Some(StopReason::RetryAfterTooLong));
        assert_eq!(after(secs(60) + NANOSECOND), too_long);
        assert_eq!(after(Duration::MAX), too_long);
    }

    #[test]
    fn a_backoff_that_does_not_fit_is_not_blamed_on_the_server() {
        let start = clock::now();
        let after = |floor| {
            let mut call = call_until(start + secs(1), LIMITS);
            after_first(&mut call, &asked_to_wait(floor), &always(secs(2)), start)
        };
        let too_close = Err(Some(StopReason::DeadlineTooClose));
        assert_eq!(after(ms(999)), too_close);
        assert_eq!(after(Duration::ZERO), too_close);
    }

    #[test]
    fn no_time_at_all_is_not_blamed_on_a_server_that_asked_for_nothing() {
        let start = clock::now();
        let mut call = call_until(start, LIMITS);
        let outcome = asked_to_wait(Duration::ZERO);
        assert_eq!(
            after_first(&mut call, &outcome, &always(Duration::ZERO), start),
            Err(Some(StopReason::DeadlineTooClose))
        );
    }

    #[test]
    fn work_that_is_done_wins_over_a_cancellation() {
        let mut call = call(ReplayClass::Safe, LIMITS);
        attempt(&mut call, &SUCCESS);
        let cancelled = Moment {
            cancelled: true,
            ..at(clock::now())
        };
        let pacing = always(ms(1));
        let decision = call.decide(&SUCCESS, &alone(&pacing), cancelled);
        assert!(matches!(decision, Decision::Return(None)));
    }
}

mod key_lifetime {
    use super::*;

    fn keyed(expires: Instant, attempt_timeout: Option<Duration>) -> Call {
        let limits = Limits {
            attempt_timeout,
            ..LIMITS
        };
        let mut call = call(ReplayClass::Keyed, limits);
        call.key_expires = Some(expires);
        call
    }

    #[test]
    fn a_key_outlasts_the_wait_and_the_attempt() {
        let start = clock::now();
        let after = |delay| {
            let mut call = keyed(start + ms(100), Some(ms(40)));
            let outcome = ended(Certainty::Unknown);
            after_first(&mut call, &outcome, &always(delay), start)
        };
        assert_eq!(after(ms(60)), Ok(ms(60)));
        let expired = Err(Some(StopReason::KeyExpired));
        assert_eq!(after(ms(60) + NANOSECOND), expired);
        assert_eq!(after(Duration::MAX), expired);
    }

    #[test]
    fn an_attempt_without_a_limit_is_judged_by_its_start() {
        let start = clock::now();
        let mut call = keyed(start + ms(100), None);
        let outcome = ended(Certainty::Unknown);
        assert_eq!(
            after_first(&mut call, &outcome, &always(ms(100)), start),
            Ok(ms(100))
        );
        assert_eq!(admit(&mut call, at(start + ms(99))), Ok(None));
        assert_eq!(
            admit(&mut call, at(start + ms(100))),
            Err(StopReason::KeyExpired)
        );
    }

    #[test]
    fn a_first_send_needs_no_key_that_lives() {
        let now = clock::now();
        assert_eq!(admit(&mut keyed(now, None), at(now)), Ok(None));
    }

    #[test]
    fn what_an_earlier_run_sent_makes_the_first_send_a_repeat() {
        let now = clock::now();
        let admitted_after = |earlier| {
            let mut call = Call::new(ReplayClass::Keyed, LIMITS, Some(earlier));
            call.key_expires = Some(now);
            admit(&mut call, at(now))
        };
        let expired = Err(StopReason::KeyExpired);
        assert_eq!(admitted_after(Certainty::NotSent), Ok(None));
        assert_eq!(admitted_after(Certainty::NotProcessed), expired);
        assert_eq!(admitted_after(Certainty::Unknown), expired);
        assert_eq!(admitted_after(Certainty::Answered), expired);
    }
}

mod certainty {
    use super::*;
    use Certainty::{Answered, NotProcessed, NotSent, Unknown};

    /// What is known after attempts that ended so.
    fn known(replay: ReplayClass, attempts: &[Outcome]) -> Certainty {
        let mut call = call(replay, LIMITS);
        for outcome in attempts {
            attempt(&mut call, outcome);
        }
        call.certainty()
    }

    fn known_after(attempts: &[Certainty]) -> Certainty {
        let attempts: Vec<_> = attempts.iter().copied().map(ended).collect();
        known(ReplayClass::Keyed, &attempts)
    }

    #[test]
    fn the_worst_attempt_counts_and_never_only_the_last() {
        assert_eq!(known_after(&[]), NotSent);
        assert_eq!(known_after(&[NotSent, NotSent]), NotSent);
        assert_eq!(known_after(&[NotSent, NotProcessed, NotSent]), NotProcessed);
        assert_eq!(known_after(&[NotSent, Unknown, NotSent, NotSent]), Unknown);
        assert_eq!(known_after(&[Answered, NotSent]), Unknown);
        assert_eq!(known_after(&[NotProcessed, NotSent, Answered]), Answered);
    }

    #[test]
    fn an_earlier_unknown_is_settled_only_by_what_speaks_for_it() {
        let refusal = ended(Answered);
        let settled = |replay, last| known(replay, &[ended(Unknown), last]) == Answered;
        assert!(settled(ReplayClass::Keyed, SUCCESS));
        assert!(!settled(ReplayClass::Keyed, refusal));
        assert!(settled(ReplayClass::Idempotent, SUCCESS));
        assert!(!settled(ReplayClass::Idempotent, refusal));
        assert!(settled(ReplayClass::Safe, refusal));
        assert!(!settled(ReplayClass::Unsafe, SUCCESS));
    }

    #[test]
    fn an_unclear_success_settles_nothing() {
        let unclear = Outcome {
            certainty: Unknown,
            ..SUCCESS
        };
        assert_eq!(known(ReplayClass::Keyed, &[unclear]), Unknown);
    }

    #[test]
    fn an_earlier_run_is_part_of_the_operation() {
        let known = |earlier, last: Certainty| {
            let mut call = Call::new(ReplayClass::Keyed, LIMITS, Some(earlier));
            attempt(&mut call, &ended(last));
            (call.certainty(), call.maybe_applied())
        };
        assert_eq!(known(NotSent, NotSent), (NotSent, false));
        assert_eq!(known(NotProcessed, NotSent), (NotProcessed, false));
        assert_eq!(known(Unknown, NotSent), (Unknown, true));
        assert_eq!(known(Unknown, Answered), (Unknown, true));
        assert_eq!(known(Answered, NotSent), (Unknown, false));
        assert_eq!(known(NotSent, Unknown), (Unknown, true));
    }

    #[test]
    fn an_unsafe_operation_that_an_earlier_run_left_open_is_not_sent() {
        let admitted_after = |earlier| {
            let mut call = Call::new(ReplayClass::Unsafe, LIMITS, Some(earlier));
            admit(&mut call, at(clock::now()))
        };
        assert_eq!(admitted_after(NotSent), Ok(None));
        assert_eq!(admitted_after(NotProcessed), Ok(None));
        assert_eq!(admitted_after(Unknown), Err(StopReason::UnsafeToRepeat));
        assert_eq!(admitted_after(Answered), Err(StopReason::UnsafeToRepeat));
    }

    #[test]
    fn it_is_ordered_by_how_much_may_have_happened_and_says_so() {
        let all = [NotSent, NotProcessed, Unknown, Answered];
        assert!(all.is_sorted());
        assert_eq!(
            all.map(|certainty| certainty.to_string()),
            ["never sent", "not processed", "outcome unknown", "answered"]
        );
    }
}

#[test]
fn every_stop_reason_has_words_of_its_own() {
    let words = [
        "invalid input",
        "cancelled",
        "not retryable",
        "idempotency key expired",
        "unsafe to repeat",
        "the server asked not to retry",
        "used up by an operation within",
        "attempts exhausted",
        "body not replayable",
        "Retry-After too long",
        "deadline too close",
        "breaker open",
        "retry budget exhausted",
        "nested layer",
        "concurrency limit reached",
    ];
    assert_eq!(StopReason::ALL.map(|reason| reason.to_string()), words);
}

mod below {
    //! What operations made within an attempt say of their own.

    use super::*;

    fn heeding(below: &[(bool, bool, Option<Duration>)], own: Outcome) -> Outcome {
        let mut outcome = own;
        for &(is_spent, may_be_doubled, wait) in below {
            outcome.heed(is_spent, may_be_doubled, wait);
        }
        outcome
    }

    #[test]
    fn what_one_of_them_has_said_none_takes_back() {
        let own = ended(Certainty::NotProcessed);
        for (below, spent, doubled) in [
            (&[(false, false, None)] as &[_], false, false),
            (&[(true, false, None), (false, false, None)], true, false),
            (&[(false, true, None), (false, false, None)], false, true),
        ] {
            let heard = heeding(below, own);
            assert_eq!(heard.retried_below, spent, "{below:?}");
            assert_eq!(heard.may_be_doubled_below, doubled, "{below:?}");
        }
    }

    #[test]
    fn the_longest_wait_holds_and_is_for_all_only_where_it_is_our_own() {
        let for_all = Outcome {
            pushes_back: true,
            ..asked_to_wait(secs(2))
        };
        for (wait, heeded, is_for_all) in [
            (None, secs(2), true),
            (Some(secs(1)), secs(2), true),
            (Some(secs(2)), secs(2), true),
            (Some(secs(2) + NANOSECOND), secs(2) + NANOSECOND, false),
        ] {
            let heard = heeding(&[(false, false, wait)], for_all);
            assert_eq!(heard.retry_after, Some(heeded), "{wait:?}");
            assert_eq!(heard.pushes_back, is_for_all, "{wait:?}");
        }
    }
}

mod within_a_probe {
    //! An operation made within the attempt that has the half-open breaker's permit.

    use super::*;
    use crate::policy::CircuitBreaker;

    /// Half-open, with its permit out.
    fn probed(now: Instant) -> CircuitBreaker {
        let opens_at_once = CircuitBreaker::builder()
            .consecutive_failures(1)
            .open_for(Backoff::fixed([secs(1)]))
            .gate_first_sends(true);
        let breaker = opens_at_once.build().expect("valid settings");
        let first = breaker.enter(now, true).expect("closed");
        assert!(first.settle(Health::Bad, now, || 0.5).is_some());
        breaker
    }

    #[test]
    fn it_needs_no_permit_and_is_refused_nothing() {
        let start = clock::now();
        let breaker = probed(start);
        let now = start + secs(1);
        let permit = breaker.enter(now, true).expect("half-open");
        assert!(permit.is_probe_of().is_some());
        let pacing = always(ms(1));
        for is_within_a_probe in [false, true] {
            let terms = Terms {
                breaker: Some(&breaker),
                is_within_a_probe,
                ..alone(&pacing)
            };
            let admitted = call(ReplayClass::Safe, LIMITS).admit(&terms, at(now));
            assert_eq!(admitted.is_ok(), is_within_a_probe);
            if let Ok(Admission::Start { pass, .. }) = &admitted {
                let pass = pass.as_ref().expect("it takes part in the evidence");
                assert!(
                    pass.is_probe_of().is_none(),
                    "the permit is the outer one's"
                );
            }
            let mut failed = call(ReplayClass::Safe, LIMITS);
            let outcome = ended(Certainty::NotProcessed);
            failed.start_attempt(&terms, now);
            failed.record(&outcome, &terms, now);
            let waits = matches!(
                failed.decide(&outcome, &terms, at(now)),
                Decision::Wait { .. }
            );
            assert_eq!(waits, is_within_a_probe);
        }
        drop(permit);
    }
}

/// What operations made within it may leave to it.
#[test]
fn only_what_can_be_repeated_whatever_comes_of_it_repeats_for_others() {
    let attempts = |max_attempts| Limits {
        max_attempts,
        ..LIMITS
    };
    for (replay, max_attempts, has_its_body, may_be_repeated) in [
        (ReplayClass::Keyed, 2, true, true),
        (ReplayClass::Safe, 2, true, true),
        (ReplayClass::Keyed, 1, true, false),
        (ReplayClass::Keyed, 2, false, false),
        (ReplayClass::Unsafe, 2, true, false),
    ] {
        let mut call = call(replay, attempts(max_attempts));
        call.body_replayable = has_its_body;
        assert_eq!(
            call.may_be_repeated(),
            may_be_repeated,
            "{replay:?}, {max_attempts}, {has_its_body}"
        );
    }
}

#[test]
fn a_loop_around_is_told_where_it_must_not_go_round_again() {
    let goes_on = StopReason::ALL
        .into_iter()
        .filter(|reason| !reason.forbids_retry());
    assert_eq!(
        goes_on.collect::<Vec<_>>(),
        [
            StopReason::InvalidInput,
            StopReason::NotRetryable,
            StopReason::AttemptsExhausted,
            StopReason::BodyNotReplayable,
            StopReason::DeadlineTooClose,
            StopReason::NestedLayer,
        ]
    );
}
