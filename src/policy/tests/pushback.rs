//! What a host has asked others for, by example: the sides of every boundary.

use std::array;
use std::time::{Duration, Instant};

use super::call::{LIMITS, NANOSECOND, always, asked_to_wait, at, call, call_until, ended, pacing};
use super::{ms, secs};
use crate::clock;
use crate::policy::{
    Admission, Backoff, Call, Certainty, Decision, FirstSends, Limits, Moment, Outcome, Pacing,
    Pushback, ReplayClass, Stop, StopReason, Terms,
};

const HOUR: Duration = Duration::from_secs(3_600);

/// The random part of the wait after a first attempt, at a draw of one half.
const JITTER: Duration = Duration::from_millis(200);

/// Waits up to 400 ms before the first retry, and heeds no wish of over a minute.
fn jittered() -> Pacing {
    pacing(Backoff::full_jitter(2 * JITTER, secs(10)))
}

/// A host that has just asked for this wait.
fn asked(first_sends: FirstSends, now: Instant, wait: Duration) -> Pushback {
    let pushback = Pushback::new(first_sends);
    pushback.note(now, wait);
    pushback
}

fn asked_for(wait: Duration, now: Instant) -> Pushback {
    asked(FirstSends::Pass, now, wait)
}

fn shared<'t>(pushback: &'t Pushback, pacing: &'t Pacing) -> Terms<'t> {
    Terms {
        pacing,
        pushback: Some(pushback),
        breaker: None,
        is_within_a_probe: false,
        budget: None,
    }
}

fn unbounded() -> Call {
    call(ReplayClass::Safe, LIMITS)
}

/// An attempt begins and ends at this moment.
fn attempt(call: &mut Call, outcome: &Outcome, terms: &Terms<'_>, now: Instant) {
    call.start_attempt(terms, now);
    call.record(outcome, terms, now);
}

/// The wait or the stop after a first attempt.
fn after(
    call: &mut Call,
    outcome: &Outcome,
    terms: &Terms<'_>,
    at: Moment<'_>,
) -> Result<Duration, Stop> {
    attempt(call, outcome, terms, at.now);
    match call.decide(outcome, terms, at) {
        Decision::Wait { delay, .. } => Ok(delay),
        Decision::Return(stop) => Err(stop.expect("it has failed")),
    }
}

fn after_failure(call: &mut Call, terms: &Terms<'_>, now: Instant) -> Result<Duration, Stop> {
    after(call, &ended(Certainty::NotProcessed), terms, at(now))
}

/// The wait, or `None` where the attempt may start.
fn admit(call: &mut Call, terms: &Terms<'_>, now: Instant) -> Result<Option<Duration>, Stop> {
    match call.admit(terms, at(now))? {
        Admission::Start { .. } => Ok(None),
        Admission::Wait(delay) => Ok(Some(delay)),
    }
}

fn too_long(after: Duration) -> Stop {
    Stop {
        reason: StopReason::RetryAfterTooLong,
        after: Some(after),
    }
}

mod notes {
    use super::*;

    #[test]
    fn nobody_waits_for_a_host_that_has_asked_for_nothing() {
        let pushback = Pushback::new(FirstSends::Pass);
        assert_eq!(pushback.remaining(clock::now()), Duration::ZERO);
    }

    #[test]
    fn what_remains_ends_at_zero() {
        let start = clock::now();
        let pushback = asked_for(secs(2), start);
        for (gone, remaining) in [
            (Duration::ZERO, secs(2)),
            (secs(2) - NANOSECOND, NANOSECOND),
            (secs(2), Duration::ZERO),
            (secs(1_000_000), Duration::ZERO),
        ] {
            assert_eq!(pushback.remaining(start + gone), remaining);
        }
    }

    #[test]
    fn the_latest_instant_counts_whoever_was_told_last() {
        let start = clock::now();
        let pushback = asked_for(secs(10), start);
        pushback.note(start + secs(1), secs(2));
        pushback.note(start + secs(1), Duration::ZERO);
        assert_eq!(pushback.remaining(start + secs(1)), secs(9));
        pushback.note(start + secs(1), secs(9) + NANOSECOND);
        assert_eq!(pushback.remaining(start + secs(1)), secs(9) + NANOSECOND);
    }

    #[test]
    fn it_is_heeded_for_an_hour_at_most() {
        let now = clock::now();
        for (wait, remaining) in [
            (HOUR - NANOSECOND, HOUR - NANOSECOND),
            (HOUR, HOUR),
            (HOUR + NANOSECOND, HOUR),
            (Duration::MAX, HOUR),
        ] {
            assert_eq!(asked_for(wait, now).remaining(now), remaining);
        }
    }

    #[test]
    fn only_a_wish_that_is_meant_for_everybody_is_passed_on() {
        let now = clock::now();
        let noted = |retry_after, pushes_back| {
            let pushback = Pushback::new(FirstSends::Pass);
            let outcome = Outcome {
                retry_after,
                pushes_back,
                ..ended(Certainty::NotProcessed)
            };
            attempt(
                &mut unbounded(),
                &outcome,
                &shared(&pushback, &jittered()),
                now,
            );
            pushback.remaining(now)
        };
        assert_eq!(noted(Some(secs(2)), true), secs(2));
        assert_eq!(noted(Some(secs(2)), false), Duration::ZERO);
        assert_eq!(noted(None, true), Duration::ZERO);
    }
}

mod retries {
    use super::*;

    #[test]
    fn five_hundred_retries_do_not_return_together() {
        let (now, floor, window) = (clock::now(), secs(2), 2 * JITTER);
        let (pushback, pacing) = (asked_for(floor, now), jittered());
        let terms = shared(&pushback, &pacing);
        let waits = array::from_fn::<_, 500, _>(|number| {
            let draw = number as f64 / 500.0;
            let at = Moment {
                draw: &|| draw,
                ..at(now)
            };
            after(&mut unbounded(), &ended(Certainty::NotSent), &terms, at)
                .expect("without a deadline it fits")
        });
        assert!(
            waits
                .iter()
                .all(|wait| (floor..=floor + window).contains(wait))
        );
        let within = |part: u32| {
            let until = floor + window * part / 4;
            waits.iter().filter(|wait| **wait < until).count()
        };
        let quarters = [1, 2, 3].map(within);
        assert_eq!(quarters, [125, 250, 375]);
    }

    #[test]
    fn a_backoff_without_jitter_waits_for_whichever_is_longer() {
        let now = clock::now();
        for (delay, floor, expected) in [
            (secs(1), secs(2), secs(2)),
            (secs(3), secs(2), secs(3)),
            (secs(3), Duration::ZERO, secs(3)),
        ] {
            let (pushback, pacing) = (asked_for(floor, now), always(delay));
            let waited = after_failure(&mut unbounded(), &shared(&pushback, &pacing), now);
            assert_eq!(waited, Ok(expected));
        }
    }

    #[test]
    fn of_what_it_was_told_itself_and_what_others_were_the_longer_counts() {
        let now = clock::now();
        for (own, of_others) in [(secs(1), secs(3)), (secs(3), secs(1))] {
            let (pushback, pacing) = (asked_for(of_others, now), jittered());
            let (terms, outcome) = (shared(&pushback, &pacing), asked_to_wait(own));
            let waited = after(&mut unbounded(), &outcome, &terms, at(now));
            assert_eq!(waited, Ok(secs(3) + JITTER));
        }
    }

    #[test]
    fn what_is_over_by_now_delays_nothing() {
        let start = clock::now();
        let (pushback, pacing) = (asked_for(secs(2), start), jittered());
        let terms = shared(&pushback, &pacing);
        let wait = after_failure(&mut unbounded(), &terms, start + secs(2));
        assert_eq!(wait, Ok(JITTER));
        let wait = after_failure(&mut unbounded(), &terms, start + secs(2) - NANOSECOND);
        assert_eq!(wait, Ok(JITTER + NANOSECOND));
    }

    #[test]
    fn it_fits_exactly_or_stops_at_once_and_says_for_how_long() {
        let now = clock::now();
        let after = |floor| {
            let limits = Limits {
                minimum_attempt: ms(50),
                reserve: ms(30),
                ..LIMITS
            };
            let (pushback, pacing) = (asked_for(floor, now), jittered());
            let mut call = call_until(now + secs(3), limits);
            after_failure(&mut call, &shared(&pushback, &pacing), now)
        };
        let longest = secs(3) - ms(80);
        assert_eq!(after(longest - JITTER), Ok(longest));
        assert_eq!(after(longest - NANOSECOND), Ok(longest), "less jitter");
        assert_eq!(after(longest), Ok(longest));
        let over = longest + NANOSECOND;
        assert_eq!(after(over), Err(too_long(over)));
    }

    #[test]
    fn the_longest_wish_that_is_heeded_holds_for_those_of_others() {
        let now = clock::now();
        let after = |floor| {
            let (pushback, pacing) = (asked_for(floor, now), jittered());
            after_failure(&mut unbounded(), &shared(&pushback, &pacing), now)
        };
        assert_eq!(after(secs(60)), Ok(secs(60) + JITTER));
        let over = secs(60) + NANOSECOND;
        assert_eq!(after(over), Err(too_long(over)));
    }

    #[test]
    fn its_own_wish_and_its_own_backoff_are_judged_first() {
        let now = clock::now();
        let (pushback, pacing) = (asked_for(secs(50), now), always(secs(4)));
        let terms = shared(&pushback, &pacing);
        let after = |own| {
            let mut call = call_until(now + secs(3), LIMITS);
            after(&mut call, &asked_to_wait(own), &terms, at(now))
        };
        assert_eq!(after(secs(5)), Err(StopReason::RetryAfterTooLong.into()));
        assert_eq!(after(secs(1)), Err(StopReason::DeadlineTooClose.into()));
    }

    #[test]
    fn a_key_outlasts_what_others_were_asked_for() {
        let now = clock::now();
        let after = |floor| {
            let (pushback, pacing) = (asked_for(floor, now), jittered());
            let mut call = call(ReplayClass::Keyed, LIMITS);
            call.key_expires = Some(now + secs(3));
            after_failure(&mut call, &shared(&pushback, &pacing), now)
        };
        assert_eq!(after(secs(3) - JITTER), Ok(secs(3)));
        let over = secs(3) - JITTER + NANOSECOND;
        assert_eq!(after(over), Err(StopReason::KeyExpired.into()));
    }
}

mod first_sends {
    use super::*;

    /// What becomes of a first send two seconds before the host wants to be called again.
    fn in_mode(mode: FirstSends, call: &mut Call) -> Result<Option<Duration>, Stop> {
        let now = clock::now();
        call.deadline = call.deadline.map(|_| now + secs(3));
        let (pushback, pacing) = (asked(mode, now, secs(2)), jittered());
        admit(call, &shared(&pushback, &pacing), now)
    }

    #[test]
    fn they_pass_wait_or_are_refused_as_was_chosen() {
        let in_mode = |mode| in_mode(mode, &mut unbounded());
        assert_eq!(in_mode(FirstSends::default()), Ok(None));
        assert_eq!(in_mode(FirstSends::Pass), Ok(None));
        assert_eq!(in_mode(FirstSends::Wait), Ok(Some(secs(2) + JITTER)));
        assert_eq!(in_mode(FirstSends::Refuse), Err(too_long(secs(2))));
    }

    #[test]
    fn once_the_wait_is_over_they_start_in_every_mode() {
        let start = clock::now();
        for mode in [FirstSends::Pass, FirstSends::Wait, FirstSends::Refuse] {
            let (pushback, pacing) = (asked(mode, start, secs(2)), jittered());
            let terms = shared(&pushback, &pacing);
            let end = start + secs(2);
            assert_eq!(admit(&mut unbounded(), &terms, end), Ok(None));
            let almost = end - NANOSECOND;
            let early = admit(&mut unbounded(), &terms, almost);
            assert_eq!(early == Ok(None), mode == FirstSends::Pass);
        }
    }

    #[test]
    fn where_the_wait_does_not_fit_they_are_refused() {
        let with_least_attempt = |minimum_attempt| {
            let limits = Limits {
                minimum_attempt,
                ..LIMITS
            };
            in_mode(FirstSends::Wait, &mut call_until(clock::now(), limits))
        };
        let less_jitter = secs(2) + ms(100);
        assert_eq!(with_least_attempt(ms(900)), Ok(Some(less_jitter)));
        assert_eq!(with_least_attempt(secs(1)), Ok(Some(secs(2))));
        let over = with_least_attempt(secs(1) + NANOSECOND);
        assert_eq!(over, Err(too_long(secs(2))));
    }

    #[test]
    fn a_wish_that_is_not_heeded_refuses_those_that_would_wait() {
        let now = clock::now();
        let admitted = |wait| {
            let (pushback, pacing) = (asked(FirstSends::Wait, now, wait), jittered());
            admit(&mut unbounded(), &shared(&pushback, &pacing), now)
        };
        assert_eq!(admitted(secs(60)), Ok(Some(secs(60) + JITTER)));
        let over = secs(60) + NANOSECOND;
        assert_eq!(admitted(over), Err(too_long(over)));
    }

    #[test]
    fn without_time_for_an_attempt_the_host_is_not_blamed() {
        let now = clock::now();
        for mode in [FirstSends::Wait, FirstSends::Refuse] {
            let (pushback, pacing) = (asked(mode, now, secs(2)), jittered());
            let terms = shared(&pushback, &pacing);
            let stop = admit(&mut call_until(now, LIMITS), &terms, now);
            assert_eq!(stop, Err(StopReason::DeadlineTooClose.into()));
        }
    }

    #[test]
    fn the_waits_of_a_first_send_stay_within_the_longest_together() {
        let start = clock::now();
        let (pushback, pacing) = (asked(FirstSends::Wait, start, secs(40)), jittered());
        let terms = shared(&pushback, &pacing);
        let mut call = unbounded();
        assert!(admit(&mut call, &terms, start).is_ok());
        let now = start + secs(40) + JITTER;
        let rest = secs(20);
        pushback.note(now, rest);
        let waits = admit(&mut call.clone(), &terms, now);
        assert_eq!(waits, Ok(Some(rest + JITTER)));
        pushback.note(now, rest + NANOSECOND);
        let over = too_long(rest + NANOSECOND);
        assert_eq!(admit(&mut call, &terms, now), Err(over));
    }
}

mod prolonged {
    use super::*;

    /// A call whose first attempt has failed at this moment.
    fn failed(call: Call, terms: &Terms<'_>, now: Instant) -> Call {
        let mut call = call;
        assert!(after_failure(&mut call, terms, now).is_ok());
        call
    }

    #[test]
    fn a_retry_waits_on_and_in_no_mode_less() {
        for mode in [FirstSends::Pass, FirstSends::Wait, FirstSends::Refuse] {
            let start = clock::now();
            let (pushback, pacing) = (asked(mode, start, secs(2)), jittered());
            let terms = shared(&pushback, &pacing);
            let mut call = failed(unbounded(), &terms, start);
            let woken = start + secs(2) + JITTER;
            pushback.note(start + secs(1), secs(4));
            let rest = secs(3) - JITTER;
            let waits = admit(&mut call, &terms, woken);
            assert_eq!(waits, Ok(Some(rest + JITTER)));
            assert_eq!(admit(&mut call, &terms, start + secs(5)), Ok(None));
        }
    }

    #[test]
    fn all_its_waiting_stays_within_the_longest_wish() {
        let start = clock::now();
        let (pushback, pacing) = (asked_for(secs(40), start), jittered());
        let terms = shared(&pushback, &pacing);
        let mut call = failed(unbounded(), &terms, start);
        let woken = start + secs(45);
        pushback.note(woken, secs(20));
        let waits = admit(&mut call.clone(), &terms, woken);
        assert_eq!(waits, Ok(Some(secs(20) + JITTER)));
        pushback.note(woken, secs(20) + NANOSECOND);
        let over = too_long(secs(20) + NANOSECOND);
        assert_eq!(admit(&mut call, &terms, woken), Err(over));
    }

    #[test]
    fn what_is_heeded_is_counted_anew_for_each_attempt() {
        let start = clock::now();
        let (pushback, pacing) = (asked_for(secs(40), start), jittered());
        let terms = shared(&pushback, &pacing);
        let mut call = failed(unbounded(), &terms, start);
        let woken = start + secs(41);
        pushback.note(woken, secs(40));
        let waits = after_failure(&mut call, &terms, woken);
        assert_eq!(waits, Ok(secs(40) + 2 * JITTER));
    }

    #[test]
    fn a_key_that_would_expire_meanwhile_is_not_waited_for() {
        let start = clock::now();
        let (pushback, pacing) = (asked_for(secs(2), start), jittered());
        let terms = shared(&pushback, &pacing);
        let call = failed(unbounded(), &terms, start);
        let woken = start + secs(3);
        pushback.note(woken, secs(10));
        let waits = |lifetime| {
            let mut keyed = call.clone();
            keyed.key_expires = Some(woken + lifetime);
            admit(&mut keyed, &terms, woken)
        };
        let wait = secs(10) + JITTER;
        assert_eq!(waits(wait + NANOSECOND), Ok(Some(wait)));
        let expired = StopReason::KeyExpired.into();
        assert_eq!(waits(wait - NANOSECOND), Err(expired));
    }

    #[test]
    fn it_fits_the_deadline_exactly_or_stops() {
        let start = clock::now();
        let (pushback, pacing) = (asked_for(secs(2), start), jittered());
        let terms = shared(&pushback, &pacing);
        let mut call = failed(call_until(start + secs(6), LIMITS), &terms, start);
        let woken = start + secs(3);
        let longest = secs(3) - ms(1);
        pushback.note(woken, longest - NANOSECOND);
        let less_jitter = admit(&mut call, &terms, woken);
        assert_eq!(less_jitter, Ok(Some(longest)));
        pushback.note(woken, longest);
        assert_eq!(admit(&mut call, &terms, woken), Ok(Some(longest)));
        pushback.note(woken, longest + NANOSECOND);
        let over = too_long(longest + NANOSECOND);
        assert_eq!(admit(&mut call, &terms, woken), Err(over));
    }

    #[test]
    fn what_would_stop_it_anyway_comes_first() {
        let start = clock::now();
        let (pushback, pacing) = (asked_for(secs(2), start), jittered());
        let terms = shared(&pushback, &pacing);
        let mut call = failed(call_until(start + secs(6), LIMITS), &terms, start);
        pushback.note(start + secs(5), HOUR);
        let late = start + secs(6) - ms(1) + NANOSECOND;
        let stop = admit(&mut call, &terms, late);
        assert_eq!(stop, Err(StopReason::DeadlineTooClose.into()));
        let cancelled = Moment {
            cancelled: true,
            ..at(late)
        };
        let stop = call.admit(&terms, cancelled).map(|_| ());
        assert_eq!(stop, Err(StopReason::Cancelled.into()));
    }
}

/// A list has no jitter that could go on top, and its delay has been waited, or is not asked for.
mod without_jitter {
    use super::*;

    #[test]
    fn a_first_send_waits_for_the_host_and_for_nothing_else() {
        let now = clock::now();
        let (pushback, pacing) = (asked(FirstSends::Wait, now, secs(2)), always(secs(30)));
        let terms = shared(&pushback, &pacing);
        let mut call = call_until(now + secs(5), LIMITS);
        assert_eq!(admit(&mut call, &terms, now), Ok(Some(secs(2))));
    }

    #[test]
    fn a_retry_that_waits_on_does_not_wait_out_its_backoff_again() {
        let start = clock::now();
        let (pushback, pacing) = (asked_for(Duration::ZERO, start), always(secs(4)));
        let terms = shared(&pushback, &pacing);
        let mut call = call_until(start + secs(6), LIMITS);
        assert_eq!(after_failure(&mut call, &terms, start), Ok(secs(4)));
        let woken = start + secs(4);
        pushback.note(woken, secs(1));
        assert_eq!(admit(&mut call, &terms, woken), Ok(Some(secs(1))));
    }
}
