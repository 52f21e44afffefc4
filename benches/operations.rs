//! What one use of the shared state costs, alone and with eight threads at it: budget, breaker and
//! pushback of the real core, beside what others have in their place.
//!
//! The core is handed the time; the others read it themselves. The row "reading the clock" is the difference.
//! aws-smithy-runtime's `TokenBucket::acquire` is not public (1.16.2): a row does to a semaphore what it does.
//!
//! `cargo bench --manifest-path tests/cost/Cargo.toml --bench operations`
#![allow(
    missing_docs,
    reason = "criterion's macro makes an undocumented function"
)]
#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark reads the time, which the crate is told"
)]

#[allow(dead_code, reason = "the benchmark uses a part of it")]
#[path = "../src/invalid.rs"]
mod invalid;
#[allow(
    dead_code,
    unused_imports,
    unreachable_pub,
    reason = "the benchmark uses a part of it"
)]
#[path = "../src/policy"]
mod policy {
    //! The core's shared state, as it is. Not by way of its own `mod.rs`: cargo builds benchmarks with
    //! `cfg(test)`, and the core's tests would come with it.

    mod backoff;
    mod breaker;
    mod budget;
    mod pushback;

    use std::time::Instant;

    pub(crate) use self::backoff::Backoff;
    pub(crate) use self::breaker::CircuitBreaker;
    use self::budget::Counted;
    pub(crate) use self::budget::{Reservation, RetryBudget};
    pub(crate) use self::pushback::{FirstSends, Pushback};

    /// That of the core's `mod.rs`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Health {
        Good,
        Bad,
        NotShown,
    }

    /// As an operation asks that has not been counted.
    pub(crate) fn reserve(budget: &RetryBudget, now: Instant) -> Option<Reservation<'_>> {
        budget.reserve(now, &mut Counted::default())
    }
}
#[allow(unused_imports, reason = "the benchmark uses a part of it")]
#[path = "../src/sync.rs"]
mod sync;

use std::fs;
use std::hint::black_box;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use cpu_time::{ProcessTime, ThreadTime};
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
use policy::{Backoff, CircuitBreaker, FirstSends, Health, Pushback, RetryBudget, reserve};
use recloser::Recloser;
use tokio::sync::Semaphore;
use tower::retry::budget::{Budget as _, TpsBudget};

const THREADS: u32 = 8;

const ROUNDS: usize = 15;

/// How often one thread does it in its turn.
const TURN: u64 = 50_000;

/// How long all threads do it in theirs: each core is shared by some of them, so several times over.
const TURN_OF_ALL: Duration = Duration::from_millis(150);

/// Of the cores' time, what other processes may have had in a turn that counts: with a core to
/// themselves, they would have kept our threads apart.
const LEFT_TO_OTHERS: f64 = 0.1;

/// Does it so many times.
type Run = dyn Fn(u64) + Send + Sync;

struct Operation {
    name: &'static str,
    run: Arc<Run>,
}

impl Operation {
    /// `once` is handed the instant: long after the state was made, the same each time.
    fn new(
        name: &'static str,
        first: Instant,
        once: impl Fn(Instant) + Send + Sync + 'static,
    ) -> Self {
        let now = first + Duration::from_secs(7);
        Self {
            name,
            run: Arc::new(move |times| {
                for _ in 0..times {
                    once(black_box(now));
                }
            }),
        }
    }

    /// Time goes on, by a millisecond for each use.
    fn as_time_goes_by(
        name: &'static str,
        first: Instant,
        once: impl Fn(Instant) + Send + Sync + 'static,
    ) -> Self {
        let gone_by = AtomicU64::new(0);
        Self {
            name,
            run: Arc::new(move |times| {
                let gone_by = gone_by.fetch_add(times, Ordering::Relaxed);
                let mut now = first + Duration::from_millis(gone_by);
                for _ in 0..times {
                    now += Duration::from_millis(1);
                    once(black_box(now));
                }
            }),
        }
    }
}

/// A minute's trickle, as the default has it.
fn bucket(ratio: f64, burst: u32, initial: u32) -> RetryBudget {
    let budget = RetryBudget::builder()
        .ratio(ratio)
        .burst(burst)
        .initial(initial);
    budget.build().expect("valid figures")
}

fn budgets(first: Instant) -> Vec<Operation> {
    let paid_for = RetryBudget::builder()
        .burst(400_000)
        .trickle(Duration::from_millis(1));
    let paid_for = paid_for.build().expect("valid figures");
    // Each has been used before.
    let used = |budget: RetryBudget| {
        drop(reserve(&budget, first));
        budget
    };
    let (paid_for, kept) = (used(paid_for), used(bucket(0.1, 10, 10)));
    let (empty, full) = (used(bucket(0.1, 10, 0)), used(bucket(0.1, 10, 10)));
    let filling = used(bucket(0.0001, 400_000, 0));
    let window = RetryBudget::window(1.0, 0, Duration::from_secs(1));
    let window = used(window.expect("valid figures"));
    let sent = RetryBudget::window(1.0, 0, Duration::from_secs(1));
    let sent = used(sent.expect("valid figures"));
    vec![
        Operation::as_time_goes_by("bucket: reserve + spend", first, move |now| {
            if let Some(token) = reserve(&paid_for, now) {
                token.spend(now);
            }
        }),
        Operation::new("bucket: reserve + give back", first, move |now| {
            drop(black_box(reserve(&kept, now)));
        }),
        Operation::new("bucket: refused", first, move |now| {
            assert!(reserve(&empty, now).is_none());
        }),
        Operation::new("bucket: earn, full", first, move |now| full.earn(now)),
        Operation::new("bucket: earn, filling", first, move |now| filling.earn(now)),
        Operation::as_time_goes_by("window: reserve + give back", first, move |now| {
            drop(black_box(reserve(&window, now)));
        }),
        Operation::as_time_goes_by("window: reserve + spend", first, move |now| {
            if let Some(token) = reserve(&sent, now) {
                token.spend(now);
            }
        }),
    ]
}

fn breakers(first: Instant) -> Vec<Operation> {
    let by_ratio = || {
        let breaker = CircuitBreaker::builder().failure_ratio(0.5, 20, Duration::from_secs(10));
        breaker.build().expect("valid settings")
    };
    let open = CircuitBreaker::builder()
        .consecutive_failures(1)
        .open_for(Backoff::fixed([Duration::from_secs(3600)]))
        .build()
        .expect("valid settings");
    fail(&open, first);
    let closed = CircuitBreaker::default();
    let in_a_row = CircuitBreaker::default();
    let ratio = by_ratio();
    let one_failed = CircuitBreaker::default();
    vec![
        Operation::new("breaker: check, closed", first, move |now| {
            assert!(closed.check(now, false).is_ok());
        }),
        Operation::new("breaker: check, open", first, move |now| {
            assert!(open.check(now, false).is_err());
        }),
        Operation::new("breaker: enter + good end", first, move |now| {
            end(&in_a_row, now, Health::Good);
        }),
        Operation::new("breaker: enter + good end, by ratio", first, move |now| {
            end(&ratio, now, Health::Good);
        }),
        Operation::new(
            "breaker: enter + bad, enter + good end",
            first,
            move |now| {
                end(&one_failed, now, Health::Bad);
                end(&one_failed, now, Health::Good);
            },
        ),
    ]
}

fn fail(breaker: &CircuitBreaker, now: Instant) {
    end(breaker, now, Health::Bad);
}

fn end(breaker: &CircuitBreaker, now: Instant, health: Health) {
    if let Ok(pass) = breaker.enter(now, true) {
        black_box(pass.settle(health, now, || 0.5));
    }
}

fn pushbacks(first: Instant) -> Vec<Operation> {
    let none = Pushback::new(FirstSends::Pass);
    let some = Pushback::new(FirstSends::Pass);
    some.note(first, Duration::from_secs(3600));
    vec![
        Operation::new("pushback: none", first, move |now| {
            black_box(none.remaining(now));
        }),
        Operation::new("pushback: some", first, move |now| {
            black_box(some.remaining(now));
        }),
    ]
}

fn others(first: Instant) -> Vec<Operation> {
    let tower = || TpsBudget::new(Duration::from_secs(10), 0, 1.0);
    let (deposits, both, empty) = (tower(), tower(), tower());
    let most = NonZeroU32::MAX;
    let governor: DefaultDirectRateLimiter = RateLimiter::direct(Quota::per_second(most));
    let one = NonZeroU32::MIN;
    let used_up: DefaultDirectRateLimiter = RateLimiter::direct(Quota::per_hour(one));
    let _ = used_up.check();
    let recloser = Recloser::default();
    let semaphore = Arc::new(Semaphore::new(500));
    let (added, exchanged) = (AtomicU64::new(0), AtomicU64::new(0));
    let locked = Mutex::new(0_u64);
    vec![
        Operation::new("reading the clock", first, |_| {
            black_box(Instant::now());
        }),
        // For comparison: the simplest state that is shared and written.
        Operation::new("one word: added to", first, move |_| {
            added.fetch_add(1, Ordering::Relaxed);
        }),
        Operation::new("one word: read and exchanged", first, move |_| {
            let next = |word: u64| Some(word.wrapping_add(1));
            let _ = exchanged.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        }),
        Operation::new("one word in a mutex", first, move |_| {
            *locked.lock().expect("nobody panics") += 1;
        }),
        Operation::new("tower TpsBudget: deposit", first, move |_| {
            deposits.deposit()
        }),
        Operation::new("tower TpsBudget: deposit + withdraw", first, move |_| {
            both.deposit();
            black_box(both.withdraw());
        }),
        Operation::new("tower TpsBudget: refused", first, move |_| {
            assert!(!empty.withdraw());
        }),
        Operation::new("governor: check", first, move |_| {
            let _ = black_box(governor.check());
        }),
        Operation::new("governor: refused", first, move |_| {
            assert!(used_up.check().is_err());
        }),
        Operation::new("recloser: call, good end", first, move |_| {
            let result: Result<(), recloser::Error<()>> = recloser.call(|| Ok(()));
            black_box(result.is_ok());
        }),
        Operation::new(
            "semaphore, as aws-smithy's bucket uses it",
            first,
            move |_| {
                let permits = Arc::clone(&semaphore).try_acquire_many_owned(5);
                drop(black_box(permits));
            },
        ),
    ]
}

fn all() -> Vec<Operation> {
    let first = Instant::now();
    [budgets, breakers, pushbacks, others]
        .into_iter()
        .flat_map(|some| some(first))
        .collect()
}

fn alone(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("operations");
    for operation in all() {
        group.bench_function(BenchmarkId::from_parameter(operation.name), |bencher| {
            bencher.iter_custom(|times| {
                let begun = Instant::now();
                (operation.run)(times);
                begun.elapsed()
            });
        });
    }
    group.finish();
}

/// Where other things run on the machine, what is measured one after the other is not measured alike.
/// So all take turns, and are measured by the time that they had of the processor.
fn in_turns(_: &mut Criterion) {
    let has = |wanted: &str| std::env::args().any(|argument| argument == wanted);
    if !has("--bench") || has("--test") {
        return;
    }
    let operations: Vec<Operation> = all();
    let mut taken: Vec<Taken> = operations.iter().map(|_| Taken::default()).collect();
    for _ in 0..ROUNDS {
        for (operation, taken) in operations.iter().zip(&mut taken) {
            taken.alone.push(alone_once(&operation.run));
            let AtOnce {
                processor,
                passed,
                of_others,
            } = at_once(&operation.run);
            if of_others <= LEFT_TO_OTHERS {
                taken.together.push(processor);
                taken.passed.push(passed);
            }
        }
    }
    println!(
        "In turns, ns of the processor for each: median (quartiles); `passed`: ns by the clock, by all threads\n\
         {:<44} {:>20} {:>22} {:>6} {:>7} {:>7}",
        "", "alone", "8 threads", "ratio", "passed", "rounds"
    );
    for (operation, mut taken) in operations.iter().zip(taken) {
        let (alone, together) = (spread(&mut taken.alone), spread(&mut taken.together));
        if taken.together.is_empty() {
            let name = operation.name;
            println!(
                "{name:<44} {:>20} {:>22}",
                shown(alone),
                "others had the cores"
            );
            continue;
        }
        println!(
            "{:<44} {:>20} {:>22} {:>6.1} {:>7.1} {:>7}",
            operation.name,
            shown(alone),
            shown(together),
            together[1] / alone[1],
            spread(&mut taken.passed)[1],
            taken.together.len(),
        );
    }
}

/// Nanoseconds for each use, round by round.
#[derive(Default)]
struct Taken {
    alone: Vec<f64>,
    together: Vec<f64>,
    passed: Vec<f64>,
}

fn alone_once(run: &Arc<Run>) -> f64 {
    let begun = ThreadTime::now();
    run(TURN);
    begun.elapsed().as_nanos() as f64 / TURN as f64
}

/// Uses by many threads at once.
struct AtOnce {
    /// Nanoseconds of the processor for each.
    processor: f64,
    /// Nanoseconds by the clock from one to the next, whichever thread's.
    passed: f64,
    /// What other processes had of the cores' time.
    of_others: f64,
}

fn at_once(run: &Arc<Run>) -> AtOnce {
    const BETWEEN_LOOKS: u64 = 500;
    let line = Arc::new(Barrier::new(THREADS as usize + 1));
    let is_over = Arc::new(AtomicBool::new(false));
    let thread = |_| {
        let (run, line, is_over) = (Arc::clone(run), Arc::clone(&line), Arc::clone(&is_over));
        thread::spawn(move || {
            line.wait();
            let begun = ThreadTime::now();
            let mut uses = 0;
            while !is_over.load(Ordering::Relaxed) {
                run(BETWEEN_LOOKS);
                uses += BETWEEN_LOOKS;
            }
            (begun.elapsed(), uses)
        })
    };
    let threads: Vec<_> = (0..THREADS).map(thread).collect();
    line.wait();
    let (begun, ours, all) = (Instant::now(), ProcessTime::now(), cores_time());
    thread::sleep(TURN_OF_ALL);
    let passed = begun.elapsed();
    let of_others = cores_time()
        .saturating_sub(all)
        .saturating_sub(ours.elapsed());
    is_over.store(true, Ordering::Relaxed);
    let mut processor = Duration::ZERO;
    let mut uses = 0;
    for thread in threads {
        let (of_one, uses_of_one) = thread.join().expect("it ends");
        processor += of_one;
        uses += uses_of_one;
    }
    let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    AtOnce {
        processor: processor.as_nanos() as f64 / uses as f64,
        passed: begun.elapsed().as_nanos() as f64 / uses as f64,
        of_others: of_others.as_secs_f64() / passed.as_secs_f64() / cores as f64,
    }
}

/// What all processes have had of the processor so far, to the hundredth of a second. Zero where the system does not say.
fn cores_time() -> Duration {
    let read = fs::read_to_string("/proc/stat").unwrap_or_default();
    let figures = read.lines().next().unwrap_or_default().split_whitespace();
    let idle = [3, 4];
    let ticks: u64 = figures
        .skip(1)
        .take(8)
        .enumerate()
        .filter(|(index, _)| !idle.contains(index))
        .filter_map(|(_, ticks)| ticks.parse::<u64>().ok())
        .sum();
    Duration::from_millis(10 * ticks)
}

/// Quartiles.
fn spread(figures: &mut [f64]) -> [f64; 3] {
    figures.sort_unstable_by(f64::total_cmp);
    let at = |percent| figures.get(figures.len() * percent / 100).copied();
    [25, 50, 75].map(|percent| at(percent).unwrap_or(f64::NAN))
}

fn shown([quarter, median, three_quarters]: [f64; 3]) -> String {
    format!("{median:.1} ({quarter:.1}–{three_quarters:.1})")
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600))
        .sample_size(30);
    targets = alone, in_turns
}
criterion_main!(benches);
