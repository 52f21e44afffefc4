//! What load control adds to a GET that is answered at once, by how many hosts it keeps: the
//! difference to the same calls without it. The state of a host is looked up once for each operation,
//! in one map behind one lock.
//!
//! `cargo bench --manifest-path tests/cost/Cargo.toml --bench load`
#![allow(
    missing_docs,
    reason = "criterion's macro makes an undocumented function"
)]
#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark reads the time, which the crate is told"
)]

mod terminal;

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use reqwest::{Method, Request, Url};
use reqwest_idempotent_retry::{CircuitBreaker, LoadControl, LoadControlBuilder, RetryMiddleware};
use reqwest_middleware::ClientWithMiddleware;
use terminal::{Terminal, stack};
use tokio::runtime::Runtime;

/// What is measured.
#[derive(Clone, Copy, Debug)]
enum Load {
    Without,
    Budget,
    Breaker,
    BreakerAndLimit,
}

impl Load {
    const ALL: [Self; 4] = [
        Self::Without,
        Self::Budget,
        Self::Breaker,
        Self::BreakerAndLimit,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Without => "without load control",
            Self::Budget => "budget",
            Self::Breaker => "budget + breaker",
            Self::BreakerAndLimit => "budget + breaker + limit",
        }
    }

    fn control(self, capacity: usize) -> Option<LoadControlBuilder> {
        let control = LoadControl::builder().capacity(capacity);
        let breaker = CircuitBreaker::default();
        match self {
            Self::Without => None,
            Self::Budget => Some(control),
            Self::Breaker => Some(control.breaker(breaker)),
            Self::BreakerAndLimit => Some(control.breaker(breaker).concurrency_limit(64)),
        }
    }

    fn client(self, capacity: usize) -> ClientWithMiddleware {
        let mut retry = RetryMiddleware::builder();
        if let Some(control) = self.control(capacity) {
            retry = retry.load_control(Arc::new(control.build().expect("valid settings")));
        }
        let retry = retry.build().expect("valid settings");
        stack()
            .with(retry)
            .with(Terminal::answering(&[200]))
            .build()
    }
}

/// A prime: strides of it lead through all hosts, in an order that no cache foresees.
const STRIDE: usize = 7_919;

/// Calls to one host after the other, over and over.
struct Calls<'r> {
    runtime: &'r Runtime,
    client: ClientWithMiddleware,
    hosts: Arc<[Url]>,
    next: usize,
}

impl<'r> Calls<'r> {
    /// Each host has been called once.
    fn new(runtime: &'r Runtime, load: Load, hosts: &Arc<[Url]>, capacity: usize) -> Self {
        let mut calls = Self {
            runtime,
            client: load.client(capacity),
            hosts: Arc::clone(hosts),
            next: 0,
        };
        for _ in hosts.iter() {
            calls.call(1);
        }
        calls
    }

    fn call(&mut self, stride: usize) {
        let url = self.hosts[self.next].clone();
        self.next = (self.next + stride) % self.hosts.len();
        let call = self.client.execute(Request::new(Method::GET, url));
        self.runtime.block_on(call).expect("an answer");
    }
}

fn hosts(count: usize) -> Arc<[Url]> {
    let url = |host| format!("http://host-{host}.test/").parse().expect("a URL");
    (0..count).map(url).collect()
}

/// Not when run by `cargo test`, which only wants to see that it runs.
fn is_measuring() -> bool {
    // `cargo bench -- --test` says both.
    let has = |wanted: &str| std::env::args().any(|argument| argument == wanted);
    has("--bench") && !has("--test")
}

fn numbers_of_hosts() -> &'static [usize] {
    if is_measuring() {
        &[1, 1_000, 1_000_000]
    } else {
        &[1, 1_000]
    }
}

fn lookup(criterion: &mut Criterion) {
    for &count in numbers_of_hosts() {
        let hosts = hosts(count);
        bench_group(criterion, &format!("{count} hosts"), &hosts, count);
    }
}

/// More hosts than are kept: each call makes the state of its host anew, and has another forgotten.
fn every_host_is_new(criterion: &mut Criterion) {
    bench_group(criterion, "every host is new", &hosts(10_000), 1_000);
}

fn bench_group(criterion: &mut Criterion, name: &str, hosts: &Arc<[Url]>, capacity: usize) {
    let runtime = terminal::runtime();
    let mut group = criterion.benchmark_group(name);
    for load in Load::ALL {
        let mut calls = Calls::new(&runtime, load, hosts, capacity);
        group.bench_function(BenchmarkId::from_parameter(load.name()), |bencher| {
            bencher.iter(|| calls.call(STRIDE));
        });
    }
    group.finish();
}

/// The differences are a few hundredths of what a call takes, and drown in the noise of a machine that
/// does other things between one benchmark and the next. So here they take turns.
fn side_by_side(_: &mut Criterion) {
    if !is_measuring() {
        return;
    }
    println!("In turns, each call timed, in ns      added      p50      p99    p99.9");
    let runtime = terminal::runtime();
    for &count in numbers_of_hosts() {
        let hosts = hosts(count);
        let mut calls = Load::ALL.map(|load| Calls::new(&runtime, load, &hosts, count));
        let timed = take_turns(&mut calls).map(Timed::of);
        println!("{count} hosts");
        for (load, it) in Load::ALL.iter().zip(&timed) {
            let (name, Timed { p50, p99, p999 }) = (load.name(), it);
            let added = p50 - timed[0].p50;
            println!("  {name:<32} {added:>8} {p50:>8} {p99:>8} {p999:>8}");
        }
    }
}

/// How long each call took, in nanoseconds, the reading of the clock included.
fn take_turns<const N: usize>(calls: &mut [Calls<'_>; N]) -> [Vec<i128>; N] {
    const ROUNDS: usize = 100;
    const TURN: usize = 5_000;
    let mut took = [(); N].map(|()| Vec::with_capacity(ROUNDS * TURN));
    for _ in 0..ROUNDS {
        for (calls, took) in calls.iter_mut().zip(&mut took) {
            for _ in 0..TURN {
                let start = Instant::now();
                calls.call(STRIDE);
                took.push(start.elapsed().as_nanos().cast_signed());
            }
        }
    }
    took
}

struct Timed {
    p50: i128,
    p99: i128,
    p999: i128,
}

impl Timed {
    fn of(mut took: Vec<i128>) -> Self {
        took.sort_unstable();
        let at = |per_mille| took[took.len() * per_mille / 1000];
        Self {
            p50: at(500),
            p99: at(990),
            p999: at(999),
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .sample_size(50);
    targets = lookup, every_host_is_new, side_by_side
}
criterion_main!(benches);
