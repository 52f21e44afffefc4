//! Shapes, windows and arithmetic of the backoff, by example.

use std::time::Duration;

use super::{ms, secs};
use crate::policy::Backoff;
use crate::policy::backoff::{Drawn, Previous};

/// The wait before retry `k`, with nothing before it to look back at.
fn wait(backoff: &Backoff, k: u32, draw: f64) -> Duration {
    backoff.draw(k, draw, &mut Previous::default()).delay()
}

fn waits<const N: usize>(backoff: &Backoff, draw: f64) -> [Duration; N] {
    let mut previous = Previous::default();
    let mut k = 0;
    [(); N].map(|()| {
        let drawn = backoff.draw(k, draw, &mut previous);
        k += 1;
        drawn.delay()
    })
}

fn jittered(least: Duration, random: Duration) -> Drawn {
    Drawn::Jittered { least, random }
}

fn field_at_fault(backoff: &Backoff) -> Option<&'static str> {
    backoff.validate().err().map(|error| error.field())
}

const OUTSIDE: [f64; 5] = [-0.5, 1.0, 7.5, f64::INFINITY, f64::NEG_INFINITY];

#[test]
fn an_exponential_backoff_waits_the_whole_window_whatever_the_draw() {
    let doubling = Backoff::exponential(ms(100), secs(1));
    let expected = [ms(100), ms(200), ms(400), ms(800), secs(1), secs(1)];
    for draw in [0.0, 0.3, 0.999] {
        assert_eq!(waits(&doubling, draw), expected);
    }
    assert_eq!(
        doubling.draw(1, 0.5, &mut Previous::default()),
        Drawn::Fixed(ms(200))
    );
}

#[test]
fn a_factor_of_its_own_replaces_doubling() {
    let tripling = Backoff::exponential(ms(100), secs(1)).factor(3.0);
    assert_eq!(
        waits(&tripling, 0.0),
        [ms(100), ms(300), ms(900), secs(1), secs(1)]
    );
    let level = Backoff::exponential(ms(100), secs(1)).factor(1.0);
    assert_eq!(wait(&level, u32::MAX, 0.0), ms(100));
}

#[test]
fn full_jitter_draws_from_nothing_to_the_window() {
    let full = Backoff::full_jitter(ms(100), secs(1));
    assert_eq!(waits(&full, 0.0), [Duration::ZERO; 3]);
    assert_eq!(waits(&full, 0.5), [ms(50), ms(100), ms(200)]);
    assert_eq!(
        full.draw(2, 0.25, &mut Previous::default()),
        jittered(Duration::ZERO, ms(100))
    );
}

#[test]
fn equal_jitter_draws_from_half_the_window_to_all_of_it() {
    let equal = Backoff::equal_jitter(ms(100), secs(1));
    assert_eq!(waits(&equal, 0.0), [ms(50), ms(100), ms(200)]);
    assert_eq!(waits(&equal, 0.5), [ms(75), ms(150), ms(300)]);
    assert_eq!(
        equal.draw(2, 0.25, &mut Previous::default()),
        jittered(ms(200), ms(50))
    );
}

#[test]
fn a_part_of_jitter_makes_that_part_of_the_window_random() {
    let slight = Backoff::exponential(ms(100), secs(1)).jitter(0.25);
    assert_eq!(
        slight.draw(1, 0.5, &mut Previous::default()),
        jittered(ms(150), ms(25))
    );
}

#[test]
fn decorrelated_draws_from_the_base_to_three_times_the_wait_before() {
    let decorrelated = Backoff::decorrelated(ms(100), secs(1));
    assert_eq!(waits(&decorrelated, 0.0), [ms(100); 4]);
    assert_eq!(waits(&decorrelated, 0.5), [ms(200), ms(350), ms(575)]);
    assert_eq!(
        waits(&decorrelated, 1.0),
        [ms(300), ms(900), secs(1), secs(1)]
    );
    assert_eq!(
        decorrelated.draw(0, 0.5, &mut Previous::default()),
        jittered(ms(100), ms(100))
    );
}

#[test]
fn a_fixed_list_ends_in_its_last_entry() {
    let listed = Backoff::fixed([ms(10), ms(70), ms(30)]);
    assert_eq!(
        waits(&listed, 0.9),
        [ms(10), ms(70), ms(30), ms(30), ms(30)]
    );
    assert_eq!(wait(&listed, u32::MAX, 0.9), ms(30));
    assert_eq!(wait(&Backoff::fixed([]), 0, 0.9), Duration::ZERO);
}

#[test]
fn the_default_is_full_jitter_from_200_ms_to_10_s() {
    assert_eq!(
        Backoff::default(),
        Backoff::full_jitter(ms(200), secs(10)).factor(2.0)
    );
}

#[test]
fn jitter_and_factor_mean_nothing_to_other_shapes() {
    for other in [
        Backoff::decorrelated(ms(100), secs(1)),
        Backoff::fixed([ms(100)]),
    ] {
        assert_eq!(other.clone().jitter(0.3).factor(9.0), other);
    }
}

#[test]
fn a_late_window_is_the_cap_and_never_wraps() {
    let doubling = Backoff::exponential(secs(1), secs(60)).factor(2.0);
    assert_eq!(wait(&doubling, 1, 0.0), secs(2));
    for k in [7, 31, 32, 33, 63, 64, 65, 1024, u32::MAX] {
        assert_eq!(wait(&doubling, k, 0.0), secs(60), "k = {k}");
    }
}

#[test]
fn a_base_of_zero_waits_not_at_all() {
    for backoff in [
        Backoff::exponential(Duration::ZERO, secs(60)),
        Backoff::full_jitter(Duration::ZERO, secs(60)),
        Backoff::decorrelated(Duration::ZERO, secs(60)),
    ] {
        for k in [0, 1, 64, 1024, u32::MAX] {
            assert_eq!(wait(&backoff, k, 0.9), Duration::ZERO);
        }
    }
}

#[test]
fn a_cap_without_end_saturates() {
    let endless = Backoff::exponential(secs(1), Duration::MAX);
    assert_eq!(wait(&endless, 62, 0.0), secs(1 << 62));
    for k in [64, 65, 1024, u32::MAX] {
        assert_eq!(wait(&endless, k, 0.0), Duration::MAX);
    }
    for backoff in [
        Backoff::exponential(Duration::MAX, Duration::MAX),
        Backoff::full_jitter(Duration::MAX, Duration::MAX),
        Backoff::equal_jitter(Duration::MAX, Duration::MAX),
        Backoff::decorrelated(Duration::MAX, Duration::MAX),
    ] {
        assert_eq!(waits(&backoff, 1.0), [Duration::MAX; 3]);
    }
}

#[test]
fn a_wait_too_long_for_the_precision_of_a_float_is_not_rounded_over_its_window() {
    let window = Duration::new((1 << 54) - 1, 999_999_999);
    assert_eq!(window.as_secs_f64(), (1_u64 << 54) as f64, "rounds up");
    assert_eq!(wait(&Backoff::full_jitter(window, window), 0, 1.0), window);
    assert_eq!(wait(&Backoff::equal_jitter(window, window), 0, 1.0), window);
}

#[test]
fn a_draw_from_outside_is_taken_as_the_nearer_end() {
    let full = Backoff::full_jitter(ms(100), secs(1));
    let equal = Backoff::equal_jitter(ms(100), secs(1));
    let decorrelated = Backoff::decorrelated(ms(100), secs(1));
    for draw in OUTSIDE {
        let is_above = draw >= 1.0;
        let end = |least, most| if is_above { most } else { least };
        assert_eq!(wait(&full, 0, draw), end(Duration::ZERO, ms(100)));
        assert_eq!(wait(&equal, 0, draw), end(ms(50), ms(100)));
        assert_eq!(wait(&decorrelated, 0, draw), end(ms(100), ms(300)));
    }
    assert_eq!(wait(&full, 0, f64::NAN), Duration::ZERO);
    assert_eq!(wait(&equal, 0, f64::NAN), ms(50));
    assert_eq!(wait(&decorrelated, 0, f64::NAN), ms(100));
}

/// Clients that clamp after the draw nearly all wait the cap exactly.
#[test]
fn late_draws_stay_spread_over_the_whole_cap() {
    let full = Backoff::full_jitter(ms(100), secs(1));
    let drawn: Vec<_> = (0..1000)
        .map(|n| wait(&full, 10, f64::from(n) / 1000.0))
        .collect();
    assert!(drawn.iter().all(|&wait| wait <= secs(1)));
    assert!(drawn.iter().filter(|&&wait| wait == secs(1)).count() < 50);
    let mean = drawn.iter().sum::<Duration>() / 1000;
    assert!((ms(400)..ms(600)).contains(&mean), "{mean:?}");
}

#[test]
fn validation_names_the_field_at_fault() {
    let exponential = || Backoff::exponential(ms(100), secs(1));
    let base = Some("backoff.base");
    assert_eq!(
        field_at_fault(&Backoff::exponential(secs(2), secs(1))),
        base
    );
    assert_eq!(
        field_at_fault(&Backoff::decorrelated(secs(2), secs(1))),
        base
    );
    for factor in [f64::NAN, f64::INFINITY, 0.999, 0.0, -2.0] {
        let backoff = exponential().factor(factor);
        assert_eq!(field_at_fault(&backoff), Some("backoff.factor"), "{factor}");
    }
    for jitter in [f64::NAN, f64::INFINITY, 1.001, -0.001] {
        let backoff = exponential().jitter(jitter);
        assert_eq!(field_at_fault(&backoff), Some("backoff.jitter"), "{jitter}");
    }
    assert_eq!(field_at_fault(&Backoff::fixed([])), Some("backoff.delays"));
}

#[test]
fn validation_lets_the_bounds_themselves_pass() {
    for backoff in [
        Backoff::exponential(secs(1), secs(1)).factor(1.0),
        Backoff::exponential(Duration::ZERO, Duration::ZERO).factor(f64::MAX),
        Backoff::exponential(secs(1), Duration::MAX).jitter(0.0),
        Backoff::full_jitter(secs(1), secs(1)),
        Backoff::decorrelated(secs(1), secs(1)),
        Backoff::fixed([Duration::ZERO]),
        Backoff::default(),
    ] {
        assert_eq!(field_at_fault(&backoff), None, "{backoff:?}");
    }
}
