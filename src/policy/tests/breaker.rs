//! The breaker by example: both sides of every boundary, and many threads.

use std::time::{Duration, Instant};

use super::{ms, secs};
use crate::clock;
use crate::policy::breaker::Refused;
use crate::policy::{
    Backoff, BreakerSnapshot, BreakerState, CircuitBreaker, CircuitBreakerBuilder, Health, Pass,
    Turned,
};

const NANOSECOND: Duration = Duration::from_nanos(1);

/// How long [`quick`] stays open at first.
const OPEN: Duration = Duration::from_secs(1);

/// Opens at once: for 1 s, 2 s, 4 s, and never longer.
fn quick() -> CircuitBreakerBuilder {
    CircuitBreaker::builder()
        .consecutive_failures(1)
        .open_for(Backoff::exponential(OPEN, secs(4)))
}

fn built(builder: CircuitBreakerBuilder) -> CircuitBreaker {
    builder.build().expect("the figures are valid")
}

/// One that has opened at this moment.
fn opened(builder: CircuitBreakerBuilder, now: Instant) -> CircuitBreaker {
    let breaker = built(builder);
    assert!(matches!(fails(&breaker, now), Some(Turned::Open(_))));
    breaker
}

/// One that has just become half-open.
fn half_open(builder: CircuitBreakerBuilder) -> (CircuitBreaker, Instant) {
    let start = clock::now();
    (opened(builder, start), start + OPEN)
}

/// A first send begins and ends at this moment.
fn ends(breaker: &CircuitBreaker, health: Health, now: Instant) -> Option<Turned> {
    first_send(breaker, now).settle(health, now, || 0.0)
}

fn fails(breaker: &CircuitBreaker, now: Instant) -> Option<Turned> {
    ends(breaker, Health::Bad, now)
}

fn succeeds(breaker: &CircuitBreaker, now: Instant) -> Option<Turned> {
    ends(breaker, Health::Good, now)
}

fn first_send(breaker: &CircuitBreaker, now: Instant) -> Pass<'_> {
    breaker.enter(now, true).expect("first sends pass")
}

fn retry(breaker: &CircuitBreaker, now: Instant) -> Result<Pass<'_>, Refused> {
    breaker.enter(now, false)
}

fn state(breaker: &CircuitBreaker, now: Instant) -> BreakerState {
    breaker.at(now).state()
}

fn is_closed(breaker: &CircuitBreaker, now: Instant) -> bool {
    state(breaker, now) == BreakerState::Closed
}

/// Open for so long from now on.
const fn open_for(after: Duration) -> Refused {
    Refused { after: Some(after) }
}

/// Half-open, with all permits out.
const OCCUPIED: Refused = Refused { after: None };

mod in_a_row {
    use super::*;

    fn opens_after(failures: u32) -> CircuitBreaker {
        built(quick().consecutive_failures(failures))
    }

    #[test]
    fn it_opens_at_the_failure_that_makes_the_number_full() {
        for number in [1, 2, 5] {
            let (breaker, now) = (opens_after(number), clock::now());
            for _ in 1..number {
                assert_eq!(fails(&breaker, now), None);
                assert!(is_closed(&breaker, now));
            }
            assert_eq!(fails(&breaker, now), Some(Turned::Open(OPEN)));
            assert_eq!(state(&breaker, now), BreakerState::Open);
        }
    }

    #[test]
    fn a_success_in_between_starts_the_count_again() {
        let (breaker, now) = (opens_after(2), clock::now());
        for _ in 0..10 {
            assert_eq!(fails(&breaker, now), None);
            assert_eq!(succeeds(&breaker, now), None);
        }
        assert_eq!(fails(&breaker, now), None);
        assert_eq!(fails(&breaker, now), Some(Turned::Open(OPEN)));
    }

    #[test]
    fn what_shows_nothing_neither_counts_nor_interrupts() {
        let (breaker, now) = (opens_after(2), clock::now());
        assert_eq!(fails(&breaker, now), None);
        for _ in 0..10 {
            assert_eq!(ends(&breaker, Health::NotShown, now), None);
        }
        assert_eq!(breaker.at(now).failures_in_a_row(), 1);
        assert_eq!(fails(&breaker, now), Some(Turned::Open(OPEN)));
    }

    #[test]
    fn an_operation_that_is_dropped_shows_nothing() {
        let (breaker, now) = (opens_after(1), clock::now());
        for _ in 0..10 {
            drop(first_send(&breaker, now));
        }
        assert_eq!(breaker.at(now), opens_after(1).at(now));
    }

    #[test]
    fn failures_in_a_row_do_not_age() {
        let (breaker, start) = (opens_after(2), clock::now());
        assert_eq!(fails(&breaker, start), None);
        let much_later = start + secs(1_000_000);
        assert_eq!(fails(&breaker, much_later), Some(Turned::Open(OPEN)));
    }
}

mod by_share {
    use super::*;

    const SPAN: Duration = Duration::from_secs(10);
    const SLICE: Duration = Duration::from_secs(1);

    fn opens_at(ratio: f64, minimum_volume: u32) -> CircuitBreakerBuilder {
        CircuitBreaker::builder()
            .failure_ratio(ratio, minimum_volume, SPAN)
            .open_for(Backoff::fixed([OPEN]))
    }

    const OPENS: Option<Turned> = Some(Turned::Open(OPEN));

    #[test]
    fn it_takes_the_minimum_volume() {
        let (breaker, now) = (built(opens_at(0.5, 4)), clock::now());
        for _ in 1..4 {
            assert_eq!(fails(&breaker, now), None);
        }
        assert_eq!(fails(&breaker, now), OPENS);
    }

    #[test]
    fn it_takes_the_share_itself_and_no_more() {
        let (breaker, now) = (built(opens_at(0.5, 4)), clock::now());
        for _ in 0..3 {
            succeeds(&breaker, now);
        }
        for _ in 0..2 {
            assert_eq!(fails(&breaker, now), None, "2 of 5 at most");
        }
        assert_eq!(fails(&breaker, now), OPENS, "3 of 6");
    }

    #[test]
    fn the_smallest_and_the_largest_share_hold() {
        let now = clock::now();
        let all = built(opens_at(1.0, 2));
        succeeds(&all, now);
        for _ in 0..1_000 {
            assert_eq!(fails(&all, now), None, "not all of them");
        }
        let any = built(opens_at(f64::MIN_POSITIVE, 1));
        for _ in 0..1_000 {
            succeeds(&any, now);
        }
        assert_eq!(fails(&any, now), OPENS);
    }

    #[test]
    fn a_share_that_is_no_binary_fraction_is_met_exactly() {
        let (breaker, now) = (built(opens_at(0.3, 10)), clock::now());
        for _ in 0..7 {
            succeeds(&breaker, now);
        }
        assert_eq!(fails(&breaker, now), None);
        assert_eq!(fails(&breaker, now), None);
        assert_eq!(fails(&breaker, now), OPENS, "3 of 10");
    }

    #[test]
    fn it_is_judged_at_failures_only() {
        let (breaker, now) = (built(opens_at(0.5, 4)), clock::now());
        for _ in 0..3 {
            fails(&breaker, now);
        }
        assert_eq!(succeeds(&breaker, now), None, "3 of 4");
        assert!(is_closed(&breaker, now));
        assert_eq!(fails(&breaker, now), OPENS, "4 of 5");
    }

    #[test]
    fn what_shows_nothing_adds_no_volume() {
        let (breaker, now) = (built(opens_at(0.5, 2)), clock::now());
        fails(&breaker, now);
        for _ in 0..10 {
            ends(&breaker, Health::NotShown, now);
        }
        assert_eq!(breaker.at(now).recent_operations(), Some(1));
    }

    #[test]
    fn without_a_number_in_a_row_only_the_share_opens_it() {
        let (breaker, now) = (built(opens_at(0.5, 1_000)), clock::now());
        for _ in 1..1_000 {
            assert_eq!(fails(&breaker, now), None);
        }
        assert_eq!(fails(&breaker, now), OPENS);
    }

    #[test]
    fn with_both_set_either_opens_it() {
        let now = clock::now();
        let both = || built(opens_at(0.5, 4).consecutive_failures(3));
        let in_a_row = both();
        assert_eq!(fails(&in_a_row, now), None);
        assert_eq!(fails(&in_a_row, now), None);
        assert_eq!(fails(&in_a_row, now), OPENS, "3 in a row, of 4");
        let by_share = both();
        for _ in 0..2 {
            assert_eq!(fails(&by_share, now), None);
            assert_eq!(succeeds(&by_share, now), None);
        }
        assert_eq!(fails(&by_share, now), OPENS, "3 of 5");
    }

    #[test]
    fn what_has_ended_counts_up_to_the_end_of_the_span() {
        let third_failure_after = |later| {
            let (breaker, start) = (built(opens_at(1.0, 3)), clock::now());
            fails(&breaker, start);
            fails(&breaker, start);
            fails(&breaker, start + later)
        };
        assert_eq!(third_failure_after(SPAN - NANOSECOND), OPENS);
        assert_eq!(third_failure_after(SPAN), None);
        assert_eq!(third_failure_after(SPAN * 1_000), None);
    }

    #[test]
    fn a_span_is_forgotten_slice_by_slice() {
        let (breaker, start) = (built(opens_at(1.0, 1_000)), clock::now());
        for slice in 0..10 {
            fails(&breaker, start + SLICE * slice);
        }
        let recent = |at| breaker.at(start + at).recent_failures();
        assert_eq!(recent(SPAN - NANOSECOND), Some(10));
        for gone in 1..=10 {
            let at = SPAN + SLICE * (gone - 1);
            assert_eq!(recent(at), Some(10 - u64::from(gone)));
            assert_eq!(recent(at + SLICE - NANOSECOND), Some(10 - u64::from(gone)));
        }
    }

    #[test]
    fn at_most_a_tenth_of_the_span_is_forgotten_too_early() {
        let (breaker, start) = (built(opens_at(1.0, 1_000)), clock::now());
        fails(&breaker, start);
        fails(&breaker, start + SLICE - NANOSECOND);
        fails(&breaker, start + SLICE);
        let recent = |at| breaker.at(start + at).recent_failures();
        assert_eq!(recent(SPAN), Some(1));
        assert_eq!(recent(SPAN + SLICE), Some(0));
    }

    #[test]
    fn a_slightly_older_reading_of_the_clock_counts_as_the_newest() {
        let (breaker, start) = (built(opens_at(1.0, 3)), clock::now());
        fails(&breaker, start);
        fails(&breaker, start + SPAN);
        fails(&breaker, start + SPAN - SLICE);
        let later = start + SPAN + SPAN - NANOSECOND;
        assert_eq!(breaker.at(later).recent_failures(), Some(2));
        assert_eq!(fails(&breaker, start), OPENS);
    }

    #[test]
    fn an_opening_forgets_what_led_to_it() {
        let (breaker, start) = (built(opens_at(1.0, 2)), clock::now());
        fails(&breaker, start);
        assert_eq!(fails(&breaker, start), OPENS);
        let back = start + OPEN;
        assert_eq!(succeeds(&breaker, back), Some(Turned::Closed));
        assert_eq!(breaker.at(back).recent_operations(), Some(0));
        assert_eq!(fails(&breaker, back), None, "1 of 1, of at least 2");
    }

    #[test]
    fn the_shortest_and_the_longest_span_count_alike() {
        for span in [ms(10), secs(3_600)] {
            let third_failure_after = |later| {
                let builder = CircuitBreaker::builder().failure_ratio(1.0, 3, span);
                let (breaker, start) = (built(builder), clock::now());
                fails(&breaker, start);
                fails(&breaker, start);
                fails(&breaker, start + later)
            };
            assert!(third_failure_after(span - NANOSECOND).is_some());
            assert_eq!(third_failure_after(span), None);
        }
    }
}

mod open {
    use super::*;

    #[test]
    fn retries_are_told_how_long_it_stays_open() {
        let start = clock::now();
        let breaker = opened(quick(), start);
        for gone in [Duration::ZERO, ms(1), OPEN - NANOSECOND] {
            let refused = open_for(OPEN - gone);
            assert_eq!(retry(&breaker, start + gone).err(), Some(refused));
            assert_eq!(breaker.check(start + gone, false), Err(refused));
        }
    }

    #[test]
    fn it_is_half_open_at_the_very_end_of_its_time() {
        let start = clock::now();
        let breaker = opened(quick(), start);
        let end = start + OPEN;
        assert_eq!(state(&breaker, end - NANOSECOND), BreakerState::Open);
        assert_eq!(state(&breaker, end), BreakerState::HalfOpen);
        assert!(retry(&breaker, end).is_ok());
    }

    #[test]
    fn it_never_opens_halfway_where_it_is_to_stay_open_for_ever() {
        let start = clock::now();
        let for_ever = quick().open_for(Backoff::fixed([Duration::MAX]));
        let breaker = opened(for_ever, start);
        let much_later = start + secs(1_000_000_000);
        assert_eq!(retry(&breaker, much_later).err(), Some(OCCUPIED));
        let figures = breaker.at(much_later);
        assert_eq!(figures.state(), BreakerState::Open);
        assert_eq!(figures.open_for(), Some(Duration::MAX));
    }

    #[test]
    fn an_open_time_of_zero_is_half_open_at_once() {
        let now = clock::now();
        let breaker = opened(quick().open_for(Backoff::fixed([Duration::ZERO])), now);
        assert_eq!(state(&breaker, now), BreakerState::HalfOpen);
    }

    #[test]
    fn first_sends_pass_and_are_no_evidence() {
        let start = clock::now();
        let breaker = opened(quick(), start);
        assert_eq!(breaker.check(start, true), Ok(()));
        assert_eq!(succeeds(&breaker, start), None);
        assert_eq!(fails(&breaker, start), None);
        assert_eq!(retry(&breaker, start).err(), Some(open_for(OPEN)));
    }

    #[test]
    fn first_sends_are_refused_where_they_are_gated() {
        let start = clock::now();
        let breaker = opened(quick().gate_first_sends(true), start);
        assert_eq!(breaker.check(start, true), Err(open_for(OPEN)));
        assert_eq!(breaker.enter(start, true).err(), Some(open_for(OPEN)));
    }

    #[test]
    fn a_straggler_of_the_time_before_is_believed_neither_way() {
        for health in [Health::Good, Health::Bad] {
            let start = clock::now();
            let breaker = built(quick());
            let while_open = first_send(&breaker, start);
            let while_half_open = first_send(&breaker, start);
            let after_it_closed = first_send(&breaker, start);
            fails(&breaker, start);
            assert_eq!(while_open.settle(health, start, || 0.0), None);
            assert_eq!(state(&breaker, start), BreakerState::Open);
            let end = start + OPEN;
            assert_eq!(while_half_open.settle(health, end, || 0.0), None);
            assert_eq!(state(&breaker, end), BreakerState::HalfOpen);
            assert_eq!(succeeds(&breaker, end), Some(Turned::Closed));
            assert_eq!(after_it_closed.settle(health, end, || 0.0), None);
            assert_eq!(breaker.at(end).failures_in_a_row(), 0);
            assert!(is_closed(&breaker, end));
        }
    }

    #[test]
    fn what_began_while_it_was_open_is_no_evidence_when_it_is_half_open() {
        for health in [Health::Good, Health::Bad] {
            let start = clock::now();
            let breaker = opened(quick(), start);
            let first = first_send(&breaker, start);
            assert_eq!(first.settle(health, start + OPEN, || 0.0), None);
            assert_eq!(state(&breaker, start + OPEN), BreakerState::HalfOpen);
        }
    }

    #[test]
    fn an_older_reading_of_the_clock_does_not_turn_it_back() {
        let start = clock::now();
        let breaker = opened(quick(), start);
        assert!(retry(&breaker, start + OPEN).is_ok());
        assert_eq!(state(&breaker, start), BreakerState::HalfOpen);
        assert!(retry(&breaker, start).is_ok());
    }
}

mod half_open {
    use super::*;

    #[test]
    fn so_many_get_a_permit_and_no_more() {
        let (breaker, now) = half_open(quick().half_open_permits(2));
        let _first = retry(&breaker, now).expect("2 are free");
        let second = retry(&breaker, now).expect("1 is free");
        assert_eq!(retry(&breaker, now).err(), Some(OCCUPIED));
        assert_eq!(breaker.check(now, false), Err(OCCUPIED));
        drop(second);
        assert_eq!(breaker.check(now, false), Ok(()));
        assert!(retry(&breaker, now).is_ok());
    }

    #[test]
    fn to_ask_is_not_to_take() {
        let (breaker, now) = half_open(quick());
        for _ in 0..10 {
            assert_eq!(breaker.check(now, false), Ok(()));
        }
        assert_eq!(breaker.at(now).permits_out(), 0);
        assert!(retry(&breaker, now).is_ok());
    }

    #[test]
    fn a_permit_comes_back_when_it_is_dropped_and_decides_nothing() {
        let (breaker, now) = half_open(quick());
        for _ in 0..10 {
            drop(retry(&breaker, now).expect("it came back"));
        }
        assert_eq!(state(&breaker, now), BreakerState::HalfOpen);
        assert_eq!(breaker.at(now).permits_out(), 0);
    }

    #[test]
    fn a_permit_comes_back_when_its_operation_shows_nothing() {
        let (breaker, now) = half_open(quick());
        let probe = retry(&breaker, now).expect("it is free");
        assert_eq!(probe.settle(Health::NotShown, now, || 0.0), None);
        assert_eq!(state(&breaker, now), BreakerState::HalfOpen);
        assert!(retry(&breaker, now).is_ok());
    }

    #[test]
    fn a_permit_that_is_kept_expires_at_its_time() {
        let (breaker, start) = half_open(quick().permit_timeout(secs(5)));
        let _lost = retry(&breaker, start).expect("it is free");
        let almost = start + secs(5) - NANOSECOND;
        assert_eq!(retry(&breaker, almost).err(), Some(OCCUPIED));
        assert!(retry(&breaker, start + secs(5)).is_ok());
    }

    #[test]
    fn a_permit_without_end_does_not_expire() {
        let (breaker, start) = half_open(quick().permit_timeout(Duration::MAX));
        let _kept = retry(&breaker, start).expect("it is free");
        let much_later = start + secs(1_000_000_000);
        assert_eq!(retry(&breaker, much_later).err(), Some(OCCUPIED));
    }

    #[test]
    fn an_expired_permit_that_comes_back_frees_no_other() {
        let (breaker, start) = half_open(quick().permit_timeout(secs(5)));
        let lost = retry(&breaker, start).expect("it is free");
        let later = start + secs(5);
        let _other = retry(&breaker, later).expect("the first one has expired");
        drop(lost);
        assert_eq!(retry(&breaker, later).err(), Some(OCCUPIED));
        assert_eq!(breaker.at(later).permits_out(), 1);
    }

    #[test]
    fn the_late_result_of_an_expired_permit_is_believed_in_the_same_state() {
        let (breaker, start) = half_open(quick().permit_timeout(secs(5)));
        let lost = retry(&breaker, start).expect("it is free");
        let later = start + secs(60);
        let other = retry(&breaker, later).expect("the first one has expired");
        let closed = Some(Turned::Closed);
        assert_eq!(lost.settle(Health::Good, later, || 0.0), closed);
        assert_eq!(other.settle(Health::Bad, later, || 0.0), None);
        assert!(is_closed(&breaker, later));
    }

    #[test]
    fn a_permit_of_an_earlier_time_takes_none_of_this() {
        let (breaker, start) = half_open(quick().half_open_permits(2));
        let straggler = retry(&breaker, start).expect("2 are free");
        let probe = retry(&breaker, start).expect("1 is free");
        probe.settle(Health::Bad, start, || 0.0);
        let again = start + secs(2);
        assert_eq!(breaker.at(again).permits_out(), 0);
        let _first = retry(&breaker, again).expect("2 are free");
        let _second = retry(&breaker, again).expect("1 is free");
        drop(straggler);
        assert_eq!(retry(&breaker, again).err(), Some(OCCUPIED));
    }

    #[test]
    fn a_success_closes_it() {
        let (breaker, now) = half_open(quick());
        let probe = retry(&breaker, now).expect("it is free");
        let turned = probe.settle(Health::Good, now, || unreachable!("nothing is drawn"));
        assert_eq!(turned, Some(Turned::Closed));
        for _ in 0..10 {
            assert!(retry(&breaker, now).is_ok());
        }
        assert_eq!(breaker.at(now).permits_out(), 0);
    }

    #[test]
    fn a_first_send_that_began_half_open_is_believed_and_needs_no_permit() {
        for (health, expected) in [
            (Health::Good, Turned::Closed),
            (Health::Bad, Turned::Open(secs(2))),
        ] {
            let (breaker, now) = half_open(quick());
            let _probe = retry(&breaker, now).expect("it is free");
            assert_eq!(ends(&breaker, health, now), Some(expected));
        }
    }

    #[test]
    fn first_sends_need_a_permit_where_they_are_gated() {
        let now = clock::now();
        let gated = quick()
            .gate_first_sends(true)
            .open_for(Backoff::fixed([Duration::ZERO]));
        let breaker = opened(gated, now);
        let probe = breaker.enter(now, true).expect("it is free");
        assert_eq!(breaker.check(now, true), Err(OCCUPIED));
        assert_eq!(breaker.enter(now, true).err(), Some(OCCUPIED));
        assert_eq!(retry(&breaker, now).err(), Some(OCCUPIED));
        let closed = Some(Turned::Closed);
        assert_eq!(probe.settle(Health::Good, now, || 0.0), closed);
        assert!(breaker.enter(now, true).is_ok());
    }

    /// The open times of a breaker that keeps failing as soon as it is half-open.
    fn open_times<const N: usize>(breaker: &CircuitBreaker, draw: f64) -> [Duration; N] {
        let mut now = clock::now();
        [(); N].map(|()| {
            let turned = first_send(breaker, now).settle(Health::Bad, now, || draw);
            let Some(Turned::Open(time)) = turned else {
                panic!("{turned:?}");
            };
            assert_eq!(breaker.at(now).open_for(), Some(time));
            now += time;
            time
        })
    }

    #[test]
    fn a_failure_opens_it_for_longer_up_to_the_cap() {
        let breaker = built(quick());
        let expected = [secs(1), secs(2), secs(4), secs(4), secs(4)];
        assert_eq!(open_times(&breaker, 0.0), expected);
    }

    #[test]
    fn once_closed_it_opens_for_the_first_time_again() {
        for backoff in [
            Backoff::exponential(OPEN, secs(60)),
            Backoff::decorrelated(OPEN, secs(60)),
        ] {
            let breaker = built(quick().open_for(backoff));
            let now = clock::now();
            let before: [Duration; 3] = open_times(&breaker, 0.5);
            let much_later = now + secs(1_000);
            assert_eq!(succeeds(&breaker, much_later), Some(Turned::Closed));
            let turned = first_send(&breaker, much_later).settle(Health::Bad, much_later, || 0.5);
            assert_eq!(turned, Some(Turned::Open(before[0])));
            assert!(before.is_sorted() && before[0] < before[2]);
        }
    }

    #[test]
    fn clients_do_not_return_together() {
        let jittered = || built(quick().open_for(Backoff::equal_jitter(secs(1), secs(4))));
        let least = [ms(500), secs(1), secs(2), secs(2)];
        assert_eq!(open_times(&jittered(), 0.0), least);
        let nearly_all = [1, 2, 4, 4].map(|most| secs(most).mul_f64(0.999_5));
        assert_eq!(open_times(&jittered(), 0.999), nearly_all);
    }
}

mod figures {
    use super::*;

    fn figures(breaker: &CircuitBreaker, now: Instant) -> BreakerSnapshot {
        breaker.at(now)
    }

    #[test]
    fn a_new_one_has_nothing_to_show() {
        let new = figures(&built(quick()), clock::now());
        assert_eq!(new.state(), BreakerState::Closed);
        assert_eq!(new.open_for(), None);
        assert_eq!(new.failures_in_a_row(), 0);
        assert_eq!(new.recent_operations(), None);
        assert_eq!(new.recent_failures(), None);
        assert_eq!((new.permits_out(), new.opened(), new.refused()), (0, 0, 0));
    }

    #[test]
    fn closed_it_shows_what_it_counts() {
        let now = clock::now();
        let builder = quick().consecutive_failures(9);
        let breaker = built(builder.failure_ratio(0.9, 9, secs(10)));
        for health in [Health::Bad, Health::Good, Health::Bad, Health::Bad] {
            ends(&breaker, health, now);
        }
        let closed = figures(&breaker, now);
        assert_eq!(closed.failures_in_a_row(), 2);
        assert_eq!(closed.recent_operations(), Some(4));
        assert_eq!(closed.recent_failures(), Some(3));
        let later = figures(&breaker, now + secs(10));
        assert_eq!(later.failures_in_a_row(), 2);
        assert_eq!(later.recent_operations(), Some(0));
        assert_eq!(later.recent_failures(), Some(0));
    }

    #[test]
    fn open_it_shows_for_how_long() {
        let start = clock::now();
        let breaker = opened(quick().failure_ratio(0.5, 1, secs(10)), start);
        let open = figures(&breaker, start + ms(300));
        assert_eq!(open.state(), BreakerState::Open);
        assert_eq!(open.open_for(), Some(ms(700)));
        assert_eq!(open.failures_in_a_row(), 0);
        assert_eq!(open.recent_operations(), Some(0));
        assert_eq!((open.opened(), open.refused()), (1, 0));
    }

    #[test]
    fn half_open_it_shows_the_permits_that_are_out() {
        let (breaker, now) = half_open(quick().half_open_permits(2));
        let one = retry(&breaker, now);
        assert_eq!(figures(&breaker, now).permits_out(), 1);
        let other = retry(&breaker, now);
        let both = figures(&breaker, now);
        assert_eq!((both.permits_out(), both.open_for()), (2, None));
        assert_eq!(both.state(), BreakerState::HalfOpen);
        drop(one);
        assert_eq!(figures(&breaker, now).permits_out(), 1);
        drop(other);
        assert_eq!(figures(&breaker, now).permits_out(), 0);
    }

    #[test]
    fn a_permit_that_has_expired_is_not_out() {
        let (breaker, start) = half_open(quick().permit_timeout(secs(5)));
        let _lost = retry(&breaker, start);
        let end = start + secs(5);
        assert_eq!(figures(&breaker, end - NANOSECOND).permits_out(), 1);
        assert_eq!(figures(&breaker, end).permits_out(), 0);
    }

    #[test]
    fn every_refusal_is_counted_once() {
        let start = clock::now();
        let breaker = opened(quick(), start);
        assert!(breaker.check(start, false).is_err());
        assert!(retry(&breaker, start).is_err());
        assert!(breaker.check(start, true).is_ok());
        assert_eq!(figures(&breaker, start).refused(), 2);
        let end = start + OPEN;
        let _probe = retry(&breaker, end);
        assert!(retry(&breaker, end).is_err());
        assert_eq!(figures(&breaker, end).refused(), 3);
    }

    #[test]
    fn every_opening_is_counted_and_no_closing() {
        let start = clock::now();
        let breaker = opened(quick(), start);
        fails(&breaker, start + OPEN);
        assert_eq!(figures(&breaker, start + OPEN).opened(), 2);
        let again = start + OPEN + secs(2);
        assert_eq!(succeeds(&breaker, again), Some(Turned::Closed));
        assert_eq!(figures(&breaker, again).opened(), 2);
        fails(&breaker, again);
        assert_eq!(figures(&breaker, again).opened(), 3);
    }

    #[test]
    fn another_one_is_closed_and_has_the_same_settings() {
        let now = clock::now();
        let breaker = opened(quick().gate_first_sends(true).half_open_permits(3), now);
        assert!(retry(&breaker, now).is_err());
        let other = breaker.another();
        assert_eq!(figures(&other, now), figures(&built(quick()), now));
        assert_eq!(fails(&other, now), Some(Turned::Open(OPEN)));
        assert_eq!(other.enter(now, true).err(), Some(open_for(OPEN)));
        let end = now + OPEN;
        let _probes = [(); 3].map(|()| retry(&other, end).expect("3 are free"));
        assert_eq!(retry(&other, end).err(), Some(OCCUPIED));
        assert_eq!(figures(&breaker, end).permits_out(), 0);
    }

    #[test]
    fn states_have_words_of_their_own() {
        use BreakerState::{Closed, HalfOpen, Open};
        let words = [Closed, Open, HalfOpen].map(|state| state.to_string());
        assert_eq!(words, ["closed", "open", "half-open"]);
    }
}

mod building {
    use super::*;

    fn field_at_fault(builder: CircuitBreakerBuilder) -> Option<&'static str> {
        builder.build().err().map(|error| error.field())
    }

    fn builder() -> CircuitBreakerBuilder {
        CircuitBreaker::builder()
    }

    #[test]
    fn it_opens_after_five_failures_for_half_a_second_at_least() {
        for breaker in [CircuitBreaker::default(), built(builder())] {
            let now = clock::now();
            for _ in 1..5 {
                assert_eq!(fails(&breaker, now), None);
            }
            assert_eq!(fails(&breaker, now), Some(Turned::Open(ms(500))));
            assert!(breaker.enter(now, true).is_ok(), "first sends pass");
            assert_eq!(breaker.at(now).recent_operations(), None);
            let end = now + ms(500);
            let _probe = retry(&breaker, end).expect("it is free");
            assert_eq!(retry(&breaker, end).err(), Some(OCCUPIED), "one permit");
            let almost = end + secs(30) - NANOSECOND;
            assert_eq!(retry(&breaker, almost).err(), Some(OCCUPIED));
            assert!(retry(&breaker, end + secs(30)).is_ok());
        }
    }

    #[test]
    fn it_opens_for_a_minute_at_most() {
        let breaker = built(builder().consecutive_failures(1));
        let mut now = clock::now();
        let mut longest = Duration::ZERO;
        for _ in 0..20 {
            let turned = first_send(&breaker, now).settle(Health::Bad, now, || 0.999_999);
            let Some(Turned::Open(time)) = turned else {
                panic!("{turned:?}");
            };
            now += time;
            longest = longest.max(time);
        }
        assert!(longest > ms(59_999) && longest <= secs(60), "{longest:?}");
    }

    #[test]
    fn building_names_the_field_at_fault() {
        let none = builder().consecutive_failures(0);
        assert_eq!(field_at_fault(none), Some("breaker.consecutive_failures"));
        for ratio in [f64::NAN, f64::INFINITY, -0.1, 0.0, 1.1, 1.0 + f64::EPSILON] {
            let by_share = builder().failure_ratio(ratio, 1, secs(1));
            let field = field_at_fault(by_share);
            assert_eq!(field, Some("breaker.failure_ratio"), "{ratio}");
        }
        let no_volume = builder().failure_ratio(0.5, 0, secs(1));
        assert_eq!(field_at_fault(no_volume), Some("breaker.minimum_volume"));
        let too_short = ms(10) - NANOSECOND;
        let too_long = secs(3_600) + NANOSECOND;
        for span in [Duration::ZERO, too_short, too_long, Duration::MAX] {
            let by_share = builder().failure_ratio(0.5, 1, span);
            assert_eq!(field_at_fault(by_share), Some("breaker.span"), "{span:?}");
        }
        let none = builder().half_open_permits(0);
        assert_eq!(field_at_fault(none), Some("breaker.half_open_permits"));
        let at_once = builder().permit_timeout(Duration::ZERO);
        assert_eq!(field_at_fault(at_once), Some("breaker.permit_timeout"));
        for (backoff, field) in [
            (Backoff::exponential(secs(2), secs(1)), "backoff.base"),
            (Backoff::default().factor(0.5), "backoff.factor"),
            (Backoff::default().jitter(1.5), "backoff.jitter"),
            (Backoff::fixed([]), "backoff.delays"),
        ] {
            assert_eq!(field_at_fault(builder().open_for(backoff)), Some(field));
        }
    }

    #[test]
    fn building_lets_the_bounds_themselves_pass() {
        for builder in [
            builder().consecutive_failures(1),
            builder().consecutive_failures(u32::MAX),
            builder().failure_ratio(f64::MIN_POSITIVE, 1, ms(10)),
            builder().failure_ratio(1.0, u32::MAX, secs(3_600)),
            builder().half_open_permits(1),
            builder().half_open_permits(u32::MAX),
            builder().permit_timeout(NANOSECOND),
            builder().permit_timeout(Duration::MAX),
            builder().open_for(Backoff::fixed([Duration::ZERO])),
            builder().open_for(Backoff::fixed([Duration::MAX])),
        ] {
            assert!(builder.clone().build().is_ok(), "{builder:?}");
        }
    }
}

mod under_many_threads {
    use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;

    const THREADS: usize = 64;

    #[test]
    fn exactly_one_gets_the_one_permit_each_time() {
        const ROUNDS: usize = 20;
        let (breaker, now) = half_open(quick());
        let gets = [const { AtomicUsize::new(0) }; ROUNDS];
        let together = Barrier::new(THREADS);
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    for got in &gets {
                        together.wait();
                        let permit = retry(&breaker, now);
                        got.fetch_add(usize::from(permit.is_ok()), Ordering::Relaxed);
                        together.wait();
                        drop(permit);
                    }
                });
            }
        });
        assert_eq!(gets.map(AtomicUsize::into_inner), [1; ROUNDS]);
        let figures = breaker.at(now);
        let refused = (THREADS - 1) * ROUNDS;
        assert_eq!(
            (figures.permits_out(), figures.refused()),
            (0, refused as u64)
        );
    }

    #[test]
    fn of_many_failures_at_once_as_many_open_it_as_it_takes() {
        let (breaker, now) = (built(quick().consecutive_failures(32)), clock::now());
        let together = Barrier::new(THREADS);
        let openings = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    let pass = first_send(&breaker, now);
                    together.wait();
                    let turned = pass.settle(Health::Bad, now, || 0.0);
                    openings.fetch_add(usize::from(turned.is_some()), Ordering::Relaxed);
                });
            }
        });
        assert_eq!(openings.into_inner(), 1, "the others are stragglers");
        assert_eq!(breaker.at(now).opened(), 1);
    }

    #[test]
    fn whoever_panics_gives_the_permit_back() {
        let (breaker, now) = half_open(quick());
        let panicked = thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let _probe = retry(&breaker, now).expect("it is free");
                panic_any("with the permit in hand");
            });
            holder.join().is_err()
        });
        assert!(panicked);
        assert_eq!(breaker.at(now).permits_out(), 0);
        assert!(retry(&breaker, now).is_ok());
    }

    /// A caller's random source panics while the lock is held.
    #[test]
    fn a_panic_in_the_draw_leaves_a_breaker_that_works() {
        let (breaker, now) = half_open(quick());
        let probe = retry(&breaker, now).expect("it is free");
        let settling = AssertUnwindSafe(|| probe.settle(Health::Bad, now, || panic_any("draw")));
        assert!(catch_unwind(settling).is_err());
        assert_eq!(state(&breaker, now), BreakerState::HalfOpen);
        assert_eq!(breaker.at(now).permits_out(), 0);
        let probe = retry(&breaker, now).expect("it came back");
        let opened = Some(Turned::Open(secs(2)));
        assert_eq!(probe.settle(Health::Bad, now, || 0.0), opened);
        assert_eq!(retry(&breaker, now).err(), Some(open_for(secs(2))));
    }
}
