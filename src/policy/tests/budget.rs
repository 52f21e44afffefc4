//! Budgets by example: exact amounts, exact spans, and many threads.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{ms, secs};
use crate::clock;
use crate::policy::budget::Counted;
use crate::policy::{Reservation, RetryBudget, RetryBudgetBuilder};

const THREADS: u32 = 64;

const NANOSECOND: Duration = Duration::from_nanos(1);

fn reserve(budget: &RetryBudget, now: Instant) -> Option<Reservation<'_>> {
    budget.reserve(now, &mut Counted::default())
}

/// Takes a token for an attempt that starts.
fn spend(budget: &RetryBudget, now: Instant) -> bool {
    reserve(budget, now).map(|token| token.spend(now)).is_some()
}

/// Bounded, so that a budget without end fails instead of hanging.
fn spend_all(budget: &RetryBudget, now: Instant) -> usize {
    (0..10_000).take_while(|_| spend(budget, now)).count()
}

/// Empty, and filled by nothing unless more is said.
fn empty() -> RetryBudgetBuilder {
    RetryBudget::builder().initial(0).trickle(Duration::MAX)
}

fn built(builder: RetryBudgetBuilder) -> RetryBudget {
    builder.build().expect("the figures are valid")
}

/// `work` on many threads at once; returns the sum of what they report.
fn on_many_threads(work: impl Fn() -> u32 + Sync) -> u32 {
    let sum = AtomicU32::new(0);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| sum.fetch_add(work(), Ordering::Relaxed));
        }
    });
    sum.into_inner()
}

mod tokens {
    use super::*;

    #[test]
    fn a_fixed_budget_grants_so_many_and_no_more() {
        let budget = RetryBudget::fixed(3);
        let now = clock::now();
        assert_eq!(spend_all(&budget, now), 3);
        budget.earn(now + secs(1_000_000));
        assert!(!spend(&budget, now + secs(1_000_000)));
        assert_eq!(budget.balance(), 0.0);
        assert!(!spend(&RetryBudget::fixed(0), now));
        assert_eq!(RetryBudget::fixed(u32::MAX).balance(), f64::from(u32::MAX));
    }

    #[test]
    fn a_fixed_budget_is_exact_under_many_threads() {
        let budget = RetryBudget::fixed(1_000);
        let now = clock::now();
        let granted = on_many_threads(|| (0..100).map(|_| u32::from(spend(&budget, now))).sum());
        assert_eq!(granted, 1_000);
        assert_eq!(budget.balance(), 0.0);
    }

    #[test]
    fn nothing_is_lost_or_made_up_when_many_threads_take_give_back_and_earn() {
        let budget = built(empty().ratio(0.5).burst(10_000).initial(2_000));
        let now = clock::now();
        let spent = on_many_threads(|| {
            (0..100)
                .map(|round| {
                    budget.earn(now);
                    drop(reserve(&budget, now));
                    u32::from(round % 2 == 0 && spend(&budget, now))
                })
                .sum()
        });
        let earned = f64::from(THREADS * 100) * 0.5;
        assert_eq!(budget.balance(), 2_000.0 + earned - f64::from(spent));
    }

    #[test]
    fn an_unspent_reservation_goes_back() {
        let budget = RetryBudget::fixed(1);
        let now = clock::now();
        let reservation = reserve(&budget, now);
        assert_eq!(budget.balance(), 0.0);
        assert!(reserve(&budget, now).is_none());
        drop(reservation);
        assert_eq!(budget.balance(), 1.0);
        assert!(spend(&budget, now));
        assert_eq!(budget.balance(), 0.0);
    }

    #[test]
    fn the_default_starts_with_ten_earns_a_tenth_and_trickles_one_a_minute() {
        for budget in [RetryBudget::default(), built(RetryBudget::builder())] {
            let now = clock::now();
            assert_eq!(budget.balance(), 10.0);
            assert_eq!(spend_all(&budget, now), 10);
            budget.earn(now);
            assert_eq!(budget.balance(), 0.1);
            assert!(!spend(&budget, now + ms(59_999)));
            assert!(spend(&budget, now + secs(60)));
            assert_eq!(budget.balance(), 0.1);
        }
    }

    #[test]
    fn ten_successes_at_a_tenth_earn_exactly_one_token() {
        let budget = built(empty().ratio(0.1));
        let now = clock::now();
        for successes in 1..10 {
            budget.earn(now);
            assert_eq!(budget.balance(), f64::from(successes) / 10.0);
            assert!(!spend(&budget, now));
        }
        budget.earn(now);
        assert_eq!(budget.balance(), 1.0);
        assert!(spend(&budget, now));
        assert_eq!(budget.balance(), 0.0);
    }

    #[test]
    fn a_ratio_is_kept_to_four_decimals() {
        let balance_after_one = |ratio| {
            let budget = built(empty().ratio(ratio));
            budget.earn(clock::now());
            budget.balance()
        };
        assert_eq!(balance_after_one(0.0001), 0.0001);
        assert_eq!(balance_after_one(0.00006), 0.0001);
        assert_eq!(balance_after_one(0.00004), 0.0);
        assert_eq!(balance_after_one(1.0), 1.0);
        assert_eq!(balance_after_one(0.0), 0.0);
    }

    #[test]
    fn a_million_successes_fill_no_more_than_the_burst() {
        let budget = built(empty().ratio(0.1).burst(10));
        let now = clock::now();
        for _ in 0..1_000_000 {
            budget.earn(now);
        }
        assert_eq!(budget.balance(), 10.0);
        assert_eq!(spend_all(&budget, now), 10);
    }

    #[test]
    fn the_largest_burst_fits() {
        let budget = built(empty().ratio(1.0).burst(400_000).initial(400_000));
        let now = clock::now();
        assert_eq!(budget.balance(), 400_000.0);
        budget.earn(now);
        drop(reserve(&budget, now));
        assert_eq!(budget.balance(), 400_000.0);
        assert!(spend(&budget, now));
        assert_eq!(budget.balance(), 399_999.0);
    }

    #[test]
    fn what_goes_back_never_exceeds_the_burst() {
        let budget = built(empty().burst(1).initial(1).ratio(1.0));
        let now = clock::now();
        let reservation = reserve(&budget, now);
        budget.earn(now);
        drop(reservation);
        assert_eq!(budget.balance(), 1.0);
    }

    fn one_in_ten_seconds() -> (RetryBudget, Instant) {
        let budget = built(empty().trickle(secs(10)));
        let now = clock::now();
        assert!(!spend(&budget, now), "the trickle counts from here");
        (budget, now)
    }

    #[test]
    fn a_trickle_pays_exactly_at_the_end_of_its_span() {
        let (budget, start) = one_in_ten_seconds();
        assert!(!spend(&budget, start + secs(10) - Duration::from_nanos(1)));
        assert!(spend(&budget, start + secs(10)));
        assert!(!spend(&budget, start + secs(10)));
        assert!(!spend(&budget, start + ms(19_999)));
        assert!(spend(&budget, start + secs(20)));
    }

    #[test]
    fn a_trickle_loses_nothing_to_many_small_steps() {
        let (budget, start) = one_in_ten_seconds();
        let steps = (0..=100_000).step_by(7);
        let paid: u32 = steps
            .map(|step| u32::from(spend(&budget, start + ms(step))))
            .sum();
        assert_eq!(paid, 9);
        assert!(spend(&budget, start + secs(100)));
    }

    #[test]
    fn a_trickle_is_paid_on_success_too_and_never_above_the_burst() {
        let (budget, start) = one_in_ten_seconds();
        budget.earn(start + secs(30));
        assert_eq!(budget.balance(), 3.1);
        budget.earn(start + secs(1_000_000));
        assert_eq!(budget.balance(), 10.0);
    }

    #[test]
    fn a_stale_clock_reading_is_not_paid_twice() {
        let (budget, start) = one_in_ten_seconds();
        assert!(spend(&budget, start + secs(30)));
        assert_eq!(budget.balance(), 2.0);
        for stale in [secs(30), secs(20), secs(10), Duration::ZERO] {
            budget.earn(start + stale);
        }
        assert_eq!(budget.balance(), 2.4);
        budget.earn(start + ms(39_999));
        assert_eq!(budget.balance(), 2.5);
        budget.earn(start + secs(40));
        assert_eq!(budget.balance(), 3.6);
    }

    #[test]
    fn a_reading_from_before_the_first_use_pays_nothing() {
        let budget = built(empty().trickle(ms(1)));
        let start = clock::now();
        assert!(!spend(&budget, start + secs(5)));
        assert!(!spend(&budget, start));
        assert!(!spend(&budget, start + secs(5)));
    }

    /// As in bucket.rs: a reading may be 2²⁰ ticks old, and a gap may be all the rest of 2³².
    #[test]
    fn a_trickle_tells_an_old_reading_from_a_long_silence() {
        let budget = built(empty().ratio(0.0).burst(1).trickle(ms(1)));
        let start = clock::now();
        let behind = 1 << 20;
        let mark = start + ms(behind);
        assert!(!spend(&budget, start));
        assert!(spend(&budget, mark));
        assert!(!spend(&budget, start), "17 minutes old");
        let longest_silence = u64::from(u32::MAX) - behind;
        assert!(spend(&budget, mark + ms(longest_silence)));
    }

    #[test]
    fn ticks_that_have_wrapped_go_on_paying() {
        let budget = built(empty().ratio(0.0).burst(1000).trickle(ms(1)));
        let start = clock::now();
        let half = 1_u64 << 31;
        assert!(!spend(&budget, start));
        budget.earn(start + ms(half));
        assert_eq!(spend_all(&budget, start + ms(half)), 1000);
        budget.earn(start + ms(2 * half + 5));
        assert_eq!(spend_all(&budget, start + ms(2 * half + 5)), 1000);
        assert_eq!(spend_all(&budget, start + ms(2 * half + 8)), 3);
    }

    #[test]
    fn one_due_token_goes_to_one_of_many_threads() {
        let (budget, start) = one_in_ten_seconds();
        let granted = on_many_threads(|| u32::from(spend(&budget, start + secs(10))));
        assert_eq!(granted, 1);
    }

    #[test]
    fn building_names_the_field_at_fault() {
        let field = |builder: RetryBudgetBuilder| builder.build().err().map(|error| error.field());
        let builder = RetryBudget::builder;
        for ratio in [f64::NAN, f64::INFINITY, -0.1, 1.1] {
            assert_eq!(
                field(builder().ratio(ratio)),
                Some("budget.ratio"),
                "{ratio}"
            );
        }
        assert_eq!(field(builder().burst(400_001)), Some("budget.burst"));
        assert_eq!(field(builder().initial(11)), Some("budget.initial"));
        assert_eq!(field(builder().burst(3).initial(4)), Some("budget.initial"));
        let brief = builder().trickle(Duration::from_micros(999));
        assert_eq!(field(brief), Some("budget.trickle"));
        for off in [Duration::ZERO, Duration::MAX] {
            assert_eq!(field(builder().trickle(off)), None);
        }
    }

    #[test]
    fn building_lets_the_bounds_themselves_pass() {
        let builder = RetryBudget::builder;
        for builder in [
            builder().ratio(0.0),
            builder().ratio(1.0),
            builder().burst(0),
            builder().burst(400_000),
            builder().burst(3).initial(3),
            builder().trickle(ms(1)),
            builder().trickle(Duration::MAX),
        ] {
            assert!(builder.clone().build().is_ok(), "{builder:?}");
        }
    }
}

mod window {
    use super::*;

    const SPAN: Duration = Duration::from_secs(1);

    fn window(ratio: f64, per_second: u32, span: Duration) -> RetryBudget {
        RetryBudget::window(ratio, per_second, span).expect("the figures are valid")
    }

    /// An operation that begins here.
    fn begin(budget: &RetryBudget, now: Instant) -> Counted {
        let mut counted = Counted::default();
        budget.begin(now, &mut counted);
        counted
    }

    fn spend_for(counted: &mut Counted, budget: &RetryBudget, now: Instant) -> bool {
        budget
            .reserve(now, counted)
            .map(|token| token.spend(now))
            .is_some()
    }

    #[test]
    fn the_reserve_lets_an_idle_client_retry() {
        let budget = window(0.2, 1, SPAN);
        let now = clock::now();
        let mut only = begin(&budget, now);
        assert!(spend_for(&mut only, &budget, now));
        assert!(!spend_for(&mut only, &budget, now));
    }

    #[test]
    fn the_reserve_is_so_many_per_second_of_the_span() {
        assert_eq!(window(0.0, 3, ms(2_500)).balance(), 7.0);
        assert_eq!(window(0.0, 1, secs(3_600)).balance(), 3_600.0);
        assert_eq!(spend_all(&window(0.0, 3, ms(2_500)), clock::now()), 7);
    }

    #[test]
    fn a_ratio_of_one_allows_each_of_six_operations_at_once_a_retry() {
        let budget = window(1.0, 0, SPAN);
        let now = clock::now();
        let mut operations = [(); 6].map(|()| begin(&budget, now));
        assert_eq!(budget.balance(), 6.0);
        for operation in &mut operations {
            assert!(spend_for(operation, &budget, now));
        }
        assert_eq!(budget.balance(), 0.0);
        assert!(!spend_for(&mut operations[0], &budget, now));
    }

    #[test]
    fn a_ratio_of_a_fifth_allows_one_retry_for_five_operations() {
        let budget = window(0.2, 0, SPAN);
        let now = clock::now();
        for _ in 0..4 {
            begin(&budget, now);
        }
        assert_eq!(budget.balance(), 0.0);
        let mut fifth = begin(&budget, now);
        assert_eq!(budget.balance(), 1.0);
        assert!(spend_for(&mut fifth, &budget, now));
        assert!(!spend_for(&mut fifth, &budget, now));
    }

    #[test]
    fn without_ratio_and_reserve_nothing_is_allowed() {
        let budget = window(0.0, 0, SPAN);
        let now = clock::now();
        let mut operation = begin(&budget, now);
        assert!(!spend_for(&mut operation, &budget, now));
        budget.earn(now);
        assert_eq!(budget.balance(), 0.0);
    }

    #[test]
    fn retries_leave_the_window_at_the_millisecond() {
        let budget = window(0.0, 1, SPAN);
        let start = clock::now();
        assert!(spend(&budget, start));
        assert!(!spend(&budget, start + SPAN - ms(1)));
        assert!(!spend(&budget, start + SPAN - Duration::from_nanos(1)));
        assert!(spend(&budget, start + SPAN));
        assert!(!spend(&budget, start + SPAN + ms(999)));
        assert!(spend(&budget, start + SPAN + SPAN));
    }

    #[test]
    fn operations_leave_the_window_at_the_millisecond() {
        let two_of_which_one_may = |later| {
            let budget = window(0.5, 0, SPAN);
            let start = clock::now();
            begin(&budget, start);
            spend(&budget, start + later)
        };
        assert!(two_of_which_one_may(ms(999)));
        assert!(!two_of_which_one_may(ms(1_000)));
    }

    #[test]
    fn an_operation_counts_once_in_a_span_and_again_after_it() {
        let budget = window(1.0, 0, SPAN);
        let start = clock::now();
        let mut slow = begin(&budget, start);
        assert!(spend_for(&mut slow, &budget, start + secs(5)));
        assert!(!spend_for(&mut slow, &budget, start + ms(5_999)));
        assert!(spend_for(&mut slow, &budget, start + secs(6)));
        assert!(!spend_for(&mut slow, &budget, start + secs(6)));
    }

    #[test]
    fn a_retry_given_back_within_the_window_is_free_again() {
        let budget = window(0.0, 1, SPAN);
        let start = clock::now();
        drop(reserve(&budget, start));
        assert_eq!(budget.balance(), 1.0);
        let late = reserve(&budget, start + ms(300));
        assert!(!spend(&budget, start + ms(999)));
        drop(late);
        assert!(spend(&budget, start + ms(999)));
    }

    #[test]
    fn of_two_retries_in_a_millisecond_one_given_back_frees_one() {
        let budget = window(0.0, 2, SPAN);
        let now = clock::now();
        let first = reserve(&budget, now);
        assert!(spend(&budget, now));
        drop(first);
        assert_eq!(budget.balance(), 1.0);
        assert_eq!(spend_all(&budget, now), 1);
        assert_eq!(spend_all(&budget, now + SPAN), 2);
    }

    #[test]
    fn a_retry_that_is_waited_for_counts_however_long_the_wait_is() {
        let budget = window(0.0, 1, SPAN);
        let start = clock::now();
        let waiting = reserve(&budget, start);
        assert!(!spend(&budget, start + secs(60)));
        drop(waiting);
        assert!(spend(&budget, start + secs(60)));
    }

    #[test]
    fn a_retry_is_booked_when_it_is_sent() {
        let budget = window(0.0, 1, SPAN);
        let start = clock::now();
        let waited = reserve(&budget, start).expect("one is free");
        waited.spend(start + secs(5));
        assert!(!spend(&budget, start + secs(5) + ms(999)));
        assert!(spend(&budget, start + secs(6)));
    }

    #[test]
    fn an_hour_is_remembered_in_full() {
        let budget = window(0.0001, 0, secs(3_600));
        let start = clock::now();
        for second in 0..3_600 {
            for _ in 0..3 {
                begin(&budget, start + secs(second));
            }
        }
        assert_eq!(budget.balance(), 1.0);
        begin(&budget, start + secs(3_600 + 266));
        assert_eq!(budget.balance(), 1.0);
        begin(&budget, start + secs(3_600 + 267));
        assert_eq!(budget.balance(), 0.0);
    }

    #[test]
    fn a_window_is_exact_under_many_threads() {
        let budget = window(1.0, 100, SPAN);
        let now = clock::now();
        let granted = on_many_threads(|| {
            let mut operation = begin(&budget, now);
            (0..10)
                .map(|_| u32::from(spend_for(&mut operation, &budget, now)))
                .sum()
        });
        assert_eq!(granted, 100 + THREADS);
    }

    #[test]
    fn building_names_the_field_at_fault() {
        let field = |ratio, span| {
            let built = RetryBudget::window(ratio, 1, span);
            built.err().map(|error| error.field())
        };
        for ratio in [f64::NAN, f64::INFINITY, -0.1, 1.1] {
            assert_eq!(field(ratio, SPAN), Some("budget.ratio"), "{ratio}");
        }
        for span in [Duration::ZERO, ms(999), ms(3_600_001), Duration::MAX] {
            assert_eq!(field(0.1, span), Some("budget.span"), "{span:?}");
        }
        for (ratio, span) in [(0.0, ms(1_000)), (1.0, secs(3_600))] {
            assert_eq!(field(ratio, span), None);
        }
    }
}

mod figures {
    use super::*;

    /// One of each kind, with room for `tokens` at the start.
    fn kinds(tokens: u32) -> [RetryBudget; 3] {
        [
            RetryBudget::fixed(tokens),
            built(empty().burst(2 * tokens).initial(tokens)),
            RetryBudget::window(0.0, tokens, secs(1)).expect("the figures are valid"),
        ]
    }

    /// Given, returned and refused.
    fn counts(budget: &RetryBudget) -> (u64, u64, u64) {
        let figures = budget.snapshot();
        (figures.given(), figures.returned(), figures.refused())
    }

    #[test]
    fn a_new_budget_has_only_its_balance_to_show() {
        for budget in kinds(2) {
            assert_eq!(counts(&budget), (0, 0, 0));
            assert_eq!(budget.snapshot().balance(), 2.0);
        }
    }

    #[test]
    fn every_token_is_counted_as_it_goes_and_as_it_comes_back() {
        for budget in kinds(2) {
            let now = clock::now();
            assert!(spend(&budget, now));
            assert_eq!(counts(&budget), (1, 0, 0));
            let waiting = reserve(&budget, now);
            assert_eq!(counts(&budget), (2, 0, 0), "while it is waited for");
            assert!(!spend(&budget, now));
            assert_eq!(counts(&budget), (2, 0, 1));
            assert_eq!(budget.snapshot().balance(), 0.0);
            drop(waiting);
            assert_eq!(counts(&budget), (2, 1, 1));
            assert_eq!(budget.snapshot().balance(), 1.0);
        }
    }

    #[test]
    fn what_is_earned_is_balance_and_was_not_given() {
        let budget = built(empty().ratio(0.5));
        budget.earn(clock::now());
        assert_eq!(counts(&budget), (0, 0, 0));
        assert_eq!(budget.snapshot().balance(), 0.5);
    }

    #[test]
    fn what_no_longer_fits_the_burst_has_come_back_all_the_same() {
        let budget = built(empty().burst(1).initial(1).ratio(1.0));
        let now = clock::now();
        let waiting = reserve(&budget, now);
        budget.earn(now);
        drop(waiting);
        assert_eq!(counts(&budget), (1, 1, 0));
        assert_eq!(budget.snapshot().balance(), 1.0);
    }

    #[test]
    fn another_one_starts_afresh_and_pays_for_itself() {
        for budget in kinds(2) {
            let now = clock::now();
            assert_eq!(spend_all(&budget, now), 2);
            let used = budget.snapshot();
            let other = budget.another();
            assert_eq!(counts(&other), (0, 0, 0));
            assert_eq!(other.balance(), 2.0);
            assert_eq!(spend_all(&other, now), 2);
            assert_eq!(budget.snapshot(), used);
        }
    }

    #[test]
    fn another_one_earns_holds_and_trickles_as_the_first_does() {
        let first = built(empty().ratio(0.5).burst(3).initial(1).trickle(secs(10)));
        let start = clock::now();
        assert!(spend(&first, start));
        for budget in [first.another(), first.another().another()] {
            let origin = start + secs(5);
            assert!(spend(&budget, origin), "initial 1");
            budget.earn(origin);
            assert_eq!(budget.balance(), 0.5);
            assert!(!spend(&budget, origin + secs(10) - NANOSECOND));
            assert!(spend(&budget, origin + secs(10)), "from its own first use");
            budget.earn(origin + secs(1_000));
            assert_eq!(budget.balance(), 3.0);
        }
    }

    #[test]
    fn another_window_has_the_same_share_reserve_and_span() {
        let first = RetryBudget::window(0.5, 1, ms(2_500)).expect("the figures are valid");
        let other = first.another();
        let played = |budget: &RetryBudget, start| {
            let asked_at = [
                0, 0, 0, 0, 0, 2_499, 2_499, 2_500, 2_500, 2_500, 2_500, 2_500,
            ];
            asked_at.map(|at| spend(budget, start + ms(at)))
        };
        // Of 5 operations 2 + 2, of 7 operations 2 + 3, of 7 again once the first 5 are gone.
        let expected = [
            true, true, true, true, false, true, false, true, true, true, true, false,
        ];
        let start = clock::now();
        assert_eq!(played(&first, start), expected);
        assert_eq!(played(&other, start + secs(5)), expected);
        assert_eq!(played(&first.another(), start), expected);
    }

    #[test]
    fn many_threads_are_given_exactly_what_there_is() {
        const ASKED: u32 = 10;
        for budget in kinds(100) {
            let now = clock::now();
            let granted =
                on_many_threads(|| (0..ASKED).map(|_| u32::from(spend(&budget, now))).sum());
            assert_eq!(granted, 100);
            let refused = u64::from(THREADS * ASKED - 100);
            assert_eq!(counts(&budget), (100, 0, refused));
            assert_eq!(budget.snapshot().balance(), 0.0);
        }
    }

    #[test]
    fn sums_are_exact_when_many_threads_take_and_give_back() {
        const ROUNDS: u32 = 50;
        for budget in kinds(100) {
            let now = clock::now();
            let spent = on_many_threads(|| {
                (0..ROUNDS)
                    .map(|round| match reserve(&budget, now) {
                        Some(token) if round % 25 == 0 => {
                            token.spend(now);
                            1
                        }
                        unspent => {
                            drop(unspent);
                            0
                        }
                    })
                    .sum()
            });
            let (given, returned, refused) = counts(&budget);
            assert_eq!(given + refused, u64::from(THREADS * ROUNDS));
            assert_eq!(given - returned, u64::from(spent));
            assert_eq!(budget.balance(), 100.0 - f64::from(spent));
        }
    }
}
