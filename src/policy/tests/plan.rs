//! Random operations: the settings they run under, and a script of what happens to each attempt.

use std::ops::Range;
use std::time::Duration;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

use crate::policy::{
    Backoff, Certainty, CircuitBreaker, FirstSends, Health, Limits, Outcome, Pacing, Pushback,
    ReplayClass, RetryBudget, Verdict,
};

/// The unit of nearly every span of a plan, about 17 ms. A power of two in nanoseconds divides
/// exactly by draws and parts of jitter, so the whole numbers of the oracle and the floats of the
/// core meet in the same nanosecond, and spans often meet their limits exactly.
const GRAIN: Duration = Duration::from_nanos(1 << 24);

pub(super) const MOST_ATTEMPTS: u32 = 6;

/// Draws are whole eighths, jitter is in whole quarters, ratios in whole ten-thousandths, shares of
/// failures in whole eighths.
pub(super) const DRAWS: u32 = 8;
pub(super) const JITTERS: u32 = 4;
pub(super) const RATIOS: u32 = 10_000;
pub(super) const SHARES: u32 = 8;

/// Operations that share their settings and their load state, one after the other, while others
/// share that state too.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) replay: ReplayClass,
    pub(super) limits: Limits,
    pub(super) deadline: Option<Duration>,
    pub(super) key_lifetime: Option<Duration>,
    pub(super) body_replayable: bool,
    pub(super) earlier: Option<Certainty>,
    pub(super) nested: bool,
    pub(super) repeats_alike: bool,
    pub(super) curve: Curve,
    pub(super) max_retry_after: Duration,
    pub(super) first_sends: Option<FirstSends>,
    pub(super) fuse: Option<Fuse>,
    pub(super) purse: Purse,
    pub(super) scripts: Vec<Script>,
}

/// One operation.
#[derive(Clone, Debug)]
pub(super) struct Script {
    /// The time since the operation before it.
    pub(super) gap: Duration,
    pub(super) steps: Vec<Step>,
}

/// One attempt, and the wait after it.
#[derive(Clone, Debug)]
pub(super) struct Step {
    /// `None` hangs.
    pub(super) takes: Option<Duration>,
    pub(super) outcome: Outcome,
    pub(super) draw: u32,
    /// Draws that many may have to follow, so they are halves: all of them meet in a whole number.
    pub(super) rough_draw: u32,
    /// The time in line for a concurrency permit; `None` where one is free.
    pub(super) line: Option<Duration>,
    /// By how much the wait is overslept.
    pub(super) late: Duration,
    pub(super) interrupt: Option<Interrupt>,
    /// What others do meanwhile: each time that time passes, the next of these happens.
    pub(super) meanwhile: [Meanwhile; 4],
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Meanwhile {
    /// After so many quarters of the time that passes.
    pub(super) quarters: u32,
    pub(super) event: Event,
}

/// What other operations do.
#[derive(Clone, Copy, Debug)]
pub(super) enum Event {
    Nothing,
    /// One is told to come back later, with the rest of its kind.
    ToldToWait(Duration),
    Starts {
        is_first: bool,
    },
    /// The one that has been under way longest ends.
    Ends {
        health: Health,
        draw: u32,
    },
    /// It is dropped.
    Vanishes,
    /// A first send, from its start to its end.
    Flashes {
        health: Health,
        draw: u32,
    },
}

/// When the caller cancels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Interrupt {
    BeforeStart,
    InPushback,
    InLine,
    InFlight,
    AtLanding,
    InWait,
}

/// A backoff in whole numbers.
#[derive(Clone, Debug)]
pub(super) enum Curve {
    Exponential {
        base: Duration,
        cap: Duration,
        factor: u32,
        jitter: u32,
    },
    Decorrelated {
        base: Duration,
        cap: Duration,
    },
    Fixed(Vec<Duration>),
}

/// A budget in whole numbers.
#[derive(Clone, Debug)]
pub(super) enum Purse {
    Unlimited,
    Fixed(u32),
    Earning {
        ratio: u32,
        burst: u32,
        initial: u32,
        trickle: Duration,
    },
    Window {
        ratio: u32,
        per_second: u32,
        span: Duration,
    },
}

/// A breaker in whole numbers.
#[derive(Clone, Debug)]
pub(super) struct Fuse {
    pub(super) consecutive: Option<u32>,
    pub(super) share: Option<Share>,
    pub(super) open: Curve,
    pub(super) permits: u32,
    pub(super) permit_timeout: Duration,
    pub(super) gates_first_sends: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    pub(super) failures: u32,
    pub(super) minimum_volume: u32,
    pub(super) span: Duration,
}

impl Plan {
    pub(super) fn pacing(&self) -> Pacing {
        Pacing {
            backoff: self.curve.backoff(),
            max_retry_after: self.max_retry_after,
        }
    }

    pub(super) fn pushback(&self) -> Option<Pushback> {
        self.first_sends.map(Pushback::new)
    }
}

impl Step {
    /// What the edge reports where the attempt's limit came first.
    pub(super) fn timed_out(&self) -> Outcome {
        Outcome {
            verdict: Verdict::Retryable,
            certainty: match self.outcome.certainty {
                Certainty::NotSent => Certainty::NotSent,
                _ => Certainty::Unknown,
            },
            success: false,
            retry_after: None,
            pushes_back: false,
            veto: false,
            retried_below: false,
            may_be_doubled_below: false,
            health: Health::Bad,
        }
    }
}

impl Curve {
    fn backoff(&self) -> Backoff {
        match *self {
            Self::Exponential {
                base,
                cap,
                factor,
                jitter,
            } => Backoff::exponential(base, cap)
                .factor(f64::from(factor))
                .jitter(f64::from(jitter) / f64::from(JITTERS)),
            Self::Decorrelated { base, cap } => Backoff::decorrelated(base, cap),
            Self::Fixed(ref delays) => Backoff::fixed(delays.clone()),
        }
    }
}

impl Fuse {
    pub(super) fn breaker(&self) -> CircuitBreaker {
        let mut builder = CircuitBreaker::builder()
            .open_for(self.open.backoff())
            .half_open_permits(self.permits)
            .permit_timeout(self.permit_timeout)
            .gate_first_sends(self.gates_first_sends);
        if let Some(failures) = self.consecutive {
            builder = builder.consecutive_failures(failures);
        }
        if let Some(share) = self.share {
            let ratio = f64::from(share.failures) / f64::from(SHARES);
            builder = builder.failure_ratio(ratio, share.minimum_volume, share.span);
        }
        builder.build().expect("the figures are valid")
    }
}

impl Purse {
    pub(super) fn budget(&self) -> Option<RetryBudget> {
        let share = |ratio| f64::from(ratio) / f64::from(RATIOS);
        let budget = match *self {
            Self::Unlimited => return None,
            Self::Fixed(tokens) => Ok(RetryBudget::fixed(tokens)),
            Self::Earning {
                ratio,
                burst,
                initial,
                trickle,
            } => RetryBudget::builder()
                .ratio(share(ratio))
                .burst(burst)
                .initial(initial)
                .trickle(trickle)
                .build(),
            Self::Window {
                ratio,
                per_second,
                span,
            } => RetryBudget::window(share(ratio), per_second, span),
        };
        Some(budget.expect("the figures are valid"))
    }
}

pub(super) fn plans() -> impl Strategy<Value = Plan> {
    let is_nested = (prop::bool::weighted(0.06), prop::bool::weighted(0.6));
    let effect = (
        replay_classes(),
        carried(),
        prop::bool::weighted(0.95),
        is_nested,
    );
    let time = (limits(), maybe(0.8, 10..200), maybe(0.3, 0..250));
    let longest_wish = prop_oneof![2 => grains(0..40), 1 => grains(0..150)];
    let pace = (curves(), longest_wish);
    let shared = (first_sends(), option::weighted(0.7, fuses()), purses());
    let load = (shared, vec(scripts(), 1..=3));
    (effect, time, pace, load).prop_map(|(effect, time, pace, load)| {
        let (replay, earlier, body_replayable, (nested, repeats_alike)) = effect;
        let (limits, deadline, key_lifetime) = time;
        let (curve, max_retry_after) = pace;
        let ((first_sends, fuse, purse), scripts) = load;
        Plan {
            replay,
            limits,
            deadline,
            key_lifetime,
            body_replayable,
            earlier,
            nested,
            repeats_alike,
            curve,
            max_retry_after,
            first_sends,
            fuse,
            purse,
            scripts,
        }
    })
}

fn grains(count: Range<u32>) -> impl Strategy<Value = Duration> {
    count.prop_map(|count| GRAIN * count)
}

fn maybe(probability: f64, count: Range<u32>) -> impl Strategy<Value = Option<Duration>> {
    option::weighted(probability, grains(count))
}

fn replay_classes() -> impl Strategy<Value = ReplayClass> {
    select(vec![
        ReplayClass::Safe,
        ReplayClass::Idempotent,
        ReplayClass::Keyed,
        ReplayClass::Unsafe,
    ])
}

fn certainties() -> impl Strategy<Value = Certainty> {
    select(vec![
        Certainty::NotSent,
        Certainty::NotProcessed,
        Certainty::Unknown,
        Certainty::Answered,
    ])
}

fn carried() -> impl Strategy<Value = Option<Certainty>> {
    option::weighted(0.1, certainties())
}

fn limits() -> impl Strategy<Value = Limits> {
    let minimum = prop_oneof![grains(0..1), grains(1..20)];
    let reserve = prop_oneof![grains(0..1), grains(1..20)];
    (1..=MOST_ATTEMPTS, maybe(0.7, 1..60), minimum, reserve).prop_map(
        |(max_attempts, attempt_timeout, minimum_attempt, reserve)| Limits {
            max_attempts,
            attempt_timeout,
            minimum_attempt,
            reserve,
        },
    )
}

fn curves() -> impl Strategy<Value = Curve> {
    let bounds = || {
        let base = prop_oneof![1 => grains(0..1), 9 => grains(1..32)];
        (base, grains(0..96)).prop_map(|(base, more)| (base, base + more))
    };
    prop_oneof![
        4 => (bounds(), 1..=3u32, 0..=JITTERS).prop_map(|((base, cap), factor, jitter)| {
            Curve::Exponential { base, cap, factor, jitter }
        }),
        2 => bounds().prop_map(|(base, cap)| Curve::Decorrelated { base, cap }),
        2 => vec(grains(0..30), 1..4).prop_map(Curve::Fixed),
    ]
}

fn first_sends() -> impl Strategy<Value = Option<FirstSends>> {
    select(vec![
        None,
        Some(FirstSends::Pass),
        Some(FirstSends::Wait),
        Some(FirstSends::Refuse),
    ])
}

fn fuses() -> impl Strategy<Value = Fuse> {
    let trips = (0..3u32, 1..4u32, 1..=SHARES, 1..5u32, grains(1..150));
    let permits = (1..=2u32, grains(1..120));
    (trips, curves(), permits, any::<bool>()).prop_map(
        |(trips, open, permits, gates_first_sends)| {
            let (kind, in_a_row, failures, minimum_volume, span) = trips;
            let share = Share {
                failures,
                minimum_volume,
                span,
            };
            Fuse {
                consecutive: (kind != 0).then_some(in_a_row),
                share: (kind != 1).then_some(share),
                open,
                permits: permits.0,
                permit_timeout: permits.1,
                gates_first_sends,
            }
        },
    )
}

fn purses() -> impl Strategy<Value = Purse> {
    let ratio = || select(vec![0, 1_000, 2_000, 3_333, RATIOS]);
    let trickle = prop_oneof![Just(Duration::MAX), grains(1..200)];
    prop_oneof![
        Just(Purse::Unlimited),
        (0..=5u32).prop_map(Purse::Fixed),
        (ratio(), 0..=4u32, 0..=4u32, trickle).prop_map(|(ratio, burst, initial, trickle)| {
            Purse::Earning {
                ratio,
                burst,
                initial: initial.min(burst),
                trickle,
            }
        }),
        (ratio(), 0..=2u32, 1_000..3_000u64).prop_map(|(ratio, per_second, span)| {
            Purse::Window {
                ratio,
                per_second,
                span: Duration::from_millis(span),
            }
        }),
    ]
}

fn scripts() -> impl Strategy<Value = Script> {
    let steps = vec(any::<[u64; 2]>().prop_map(step), MOST_ATTEMPTS as usize);
    (grains(0..60), steps).prop_map(|(gap, steps)| Script { gap, steps })
}

fn step([own, shared]: [u64; 2]) -> Step {
    let (mut dice, mut shared) = (Dice(own), Dice(shared));
    Step {
        takes: (!dice.is_one_in(7)).then(|| dice.grains(0..40)),
        outcome: outcome(&mut dice),
        draw: dice.below(DRAWS),
        rough_draw: shared.below(2) * DRAWS / 2,
        line: shared.is_one_in(4).then(|| shared.grains(0..40)),
        late: match dice.is_one_in(5) {
            true => dice.grains(1..100),
            false => Duration::ZERO,
        },
        // Few steps are pushed back, or wait in line.
        interrupt: dice.is_one_in(8).then(|| match dice.below(14) {
            0 => Interrupt::BeforeStart,
            1 => Interrupt::InFlight,
            2 => Interrupt::AtLanding,
            3 | 4 => Interrupt::InWait,
            5 | 6 => Interrupt::InLine,
            _ => Interrupt::InPushback,
        }),
        meanwhile: [(); 4].map(|()| meanwhile(&mut shared)),
    }
}

fn meanwhile(dice: &mut Dice) -> Meanwhile {
    Meanwhile {
        quarters: dice.below(5),
        event: match dice.below(20) {
            0..=4 => Event::Nothing,
            5 => Event::ToldToWait(match dice.is_one_in(20) {
                true => Duration::from_secs(7_200),
                false => dice.grains(0..80),
            }),
            6..=8 => Event::ToldToWait(dice.grains(0..40)),
            9..=12 => Event::Starts {
                is_first: dice.is_one_in(3),
            },
            13..=15 => Event::Ends {
                health: health(dice),
                draw: dice.below(2) * DRAWS / 2,
            },
            16 => Event::Vanishes,
            _ => Event::Flashes {
                health: health(dice),
                draw: dice.below(2) * DRAWS / 2,
            },
        },
    }
}

fn health(dice: &mut Dice) -> Health {
    match dice.below(5) {
        0 => Health::NotShown,
        1 | 2 => Health::Good,
        _ => Health::Bad,
    }
}

fn outcome(dice: &mut Dice) -> Outcome {
    Outcome {
        verdict: match dice.below(12) {
            0 => Verdict::Done,
            1 => Verdict::Final,
            _ => Verdict::Retryable,
        },
        certainty: match dice.below(4) {
            0 => Certainty::NotSent,
            1 => Certainty::NotProcessed,
            2 => Certainty::Unknown,
            _ => Certainty::Answered,
        },
        success: dice.is_one_in(3),
        retry_after: match dice.below(10) {
            0..=4 => None,
            5 => Some(Duration::ZERO),
            6..=8 => Some(dice.grains(1..40)),
            _ => Some(dice.grains(40..200)),
        },
        pushes_back: dice.is_one_in(2),
        veto: dice.is_one_in(25),
        retried_below: dice.is_one_in(25),
        may_be_doubled_below: false,
        health: health(dice),
    }
}

/// Choices packed into one number, digit by digit: a value tree of proptest for each of them would
/// take longer than all the rest. It shrinks towards 0, the plainest choice throughout.
struct Dice(u64);

impl Dice {
    fn below(&mut self, sides: u32) -> u32 {
        let sides = u64::from(sides);
        let digit = self.0 % sides;
        self.0 /= sides;
        u32::try_from(digit).expect("less than its sides")
    }

    fn is_one_in(&mut self, sides: u32) -> bool {
        self.below(sides) == sides - 1
    }

    fn grains(&mut self, count: Range<u32>) -> Duration {
        GRAIN * (count.start + self.below(count.end - count.start))
    }
}
