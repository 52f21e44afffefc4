//! Throughput and latency over a real connection: calls to a server on loopback, by a client without the
//! layer, with `reqwest-retry`, with the least that such a layer can cost, and with this crate.
//!
//! Client and server have one thread each. The client's is the busier one, so what a layer costs it shows
//! in full. The stacks take turns, round by round, and each round is compared with that of the bare client:
//! what else runs on the machine hits them alike.
//!
//! `cargo bench --manifest-path tests/cost/Cargo.toml --bench end_to_end` (`-- --quick`: half a minute)
#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark reads the time, which the crate is told"
)]

mod floor;
mod loopback;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cpu_time::ThreadTime;
use floor::Floor;
use loopback::{ANSWER, one_thread, serve};
use reqwest::{Body, Method, Request, Url};
use reqwest_idempotent_retry::{
    CircuitBreaker, KeyContract, LoadControl, RetryMiddleware, RetryMiddlewareBuilder,
};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware};
use reqwest_retry::RetryTransientMiddleware;
use reqwest_retry::policies::ExponentialBackoff;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

const CONCURRENCIES: [usize; 3] = [1, 32, 256];

/// How much is measured.
struct Plan {
    rounds: usize,
    turn: Duration,
}

impl Plan {
    /// With `--test` it is only to be seen that it works.
    fn from_arguments() -> Self {
        let has = |wanted: &str| std::env::args().any(|argument| argument == wanted);
        let (rounds, turn) = match has("--bench") && !has("--test") {
            false => (1, 10),
            true if has("--quick") => (8, 60),
            true => (60, 100),
        };
        let turn = Duration::from_millis(turn);
        Self { rounds, turn }
    }
}

#[derive(Clone, Copy, Debug)]
enum Stack {
    Bare,
    /// Once more: what differs here is noise.
    BareAgain,
    ReqwestRetry,
    /// The least that we have found a layer with this crate's promises to cost.
    Floor,
    FloorWithAll,
    Ours,
    /// Deadline, budget, breaker, and a key for POST.
    OursWithAll,
}

impl Stack {
    const ALL: [Self; 7] = [
        Self::Bare,
        Self::BareAgain,
        Self::ReqwestRetry,
        Self::Floor,
        Self::FloorWithAll,
        Self::Ours,
        Self::OursWithAll,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare reqwest",
            Self::BareAgain => "bare reqwest, again",
            Self::ReqwestRetry => "reqwest-retry",
            Self::Floor => "the floor",
            Self::FloorWithAll => "the floor, with all",
            Self::Ours => "this crate, bare",
            Self::OursWithAll => "this crate, with all",
        }
    }

    /// With a connection pool of its own. Ours is prepared, as README has it: reqwest's own retries are off,
    /// which copy every request.
    fn client(self) -> ClientWithMiddleware {
        let http = reqwest::Client::builder().tls_certs_only([]).no_proxy();
        let http = match self {
            Self::Bare | Self::BareAgain | Self::ReqwestRetry => http,
            _ => RetryMiddleware::prepare(http),
        };
        let stack = ClientBuilder::new(http.build().expect("a client"));
        let stack = match self {
            Self::Bare | Self::BareAgain => stack,
            Self::ReqwestRetry => {
                let policy = ExponentialBackoff::builder().build_with_max_retries(2);
                stack.with(RetryTransientMiddleware::new_with_policy(policy))
            }
            Self::Floor => stack.with(Floor { with_all: false }),
            Self::FloorWithAll => stack.with(Floor { with_all: true }),
            Self::Ours => stack.with(built(
                RetryMiddleware::builder()
                    .client_is_prepared(true)
                    .without_budget(),
            )),
            Self::OursWithAll => {
                let load = LoadControl::builder().breaker(CircuitBreaker::default());
                let layer = RetryMiddleware::builder()
                    .client_is_prepared(true)
                    .load_control(Arc::new(load.build().expect("valid settings")))
                    .deadline(Duration::from_secs(30))
                    .key_contract(KeyContract::default());
                stack.with(built(layer))
            }
        };
        stack.build()
    }
}

fn built(builder: RetryMiddlewareBuilder) -> RetryMiddleware {
    builder.build().expect("valid settings")
}

fn main() {
    let plan = Plan::from_arguments();
    // An error says that it has been installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let server = serve();
    let url: Url = format!("http://{server}/orders").parse().expect("a URL");
    let runtime = one_thread();
    println!(
        "{} rounds of {} ms each, in turns. Ratios to bare reqwest in the same round: median (quartiles).\n\
         CPU: the client thread's processor time for each call.",
        plan.rounds,
        plan.turn.as_millis(),
    );
    for method in [Method::GET, Method::POST] {
        for concurrency in CONCURRENCIES {
            let clients = Stack::ALL.map(Stack::client);
            let rounds = take_turns(&runtime, &clients, &url, &method, concurrency, &plan);
            report(&method, concurrency, &rounds);
        }
    }
}

/// One turn of one stack.
struct Turn {
    calls_per_second: f64,
    /// Microseconds.
    p50: f64,
    p99: f64,
    processor: f64,
}

/// Round by round, in the order of [`Stack::ALL`].
type Rounds = [Vec<Turn>; Stack::ALL.len()];

fn take_turns(
    runtime: &Runtime,
    clients: &[ClientWithMiddleware; Stack::ALL.len()],
    url: &Url,
    method: &Method,
    concurrency: usize,
    plan: &Plan,
) -> Rounds {
    let mut rounds = Rounds::default();
    for client in clients {
        turn(runtime, client, url, method, concurrency, plan.turn / 4);
    }
    for round in 0..plan.rounds {
        // Nobody always follows the same one.
        for place in 0..clients.len() {
            let index = (place * (1 + round % 4) + round) % clients.len();
            let turn = turn(
                runtime,
                &clients[index],
                url,
                method,
                concurrency,
                plan.turn,
            );
            rounds[index].push(turn);
        }
    }
    rounds
}

/// So many callers, each of which calls again once it has read its answer.
fn turn(
    runtime: &Runtime,
    client: &ClientWithMiddleware,
    url: &Url,
    method: &Method,
    concurrency: usize,
    length: Duration,
) -> Turn {
    let (begun, processor) = (Instant::now(), ThreadTime::now());
    let mut took: Vec<u64> = runtime.block_on(async {
        let mut callers = JoinSet::new();
        for _ in 0..concurrency {
            callers.spawn(keeps_calling(
                client.clone(),
                url.clone(),
                method.clone(),
                begun + length,
            ));
        }
        callers.join_all().await.into_iter().flatten().collect()
    });
    let (passed, processor) = (begun.elapsed(), processor.elapsed());
    let calls = took.len();
    took.sort_unstable();
    let at = |percent: usize| took[calls * percent / 100] as f64 / 1e3;
    Turn {
        calls_per_second: calls as f64 / passed.as_secs_f64(),
        p50: at(50),
        p99: at(99),
        processor: processor.as_secs_f64() * 1e6 / calls as f64,
    }
}

/// How long each call took, in nanoseconds, from the request to the end of the answer's body.
async fn keeps_calling(
    client: ClientWithMiddleware,
    url: Url,
    method: Method,
    until: Instant,
) -> Vec<u64> {
    let mut took = Vec::with_capacity(1024);
    let mut begun = Instant::now();
    loop {
        let answer = client.execute(request(&method, &url)).await;
        let body = answer.expect("an answer").bytes().await.expect("a body");
        assert_eq!(body.len(), ANSWER.len());
        let ended = Instant::now();
        took.push((ended - begun).as_nanos() as u64);
        if ended >= until {
            return took;
        }
        begun = ended;
    }
}

/// A GET, or a POST of 1 KiB.
fn request(method: &Method, url: &Url) -> Request {
    let mut request = Request::new(method.clone(), url.clone());
    if *method == Method::POST {
        *request.body_mut() = Some(Body::from(vec![b'x'; 1024]));
    }
    request
}

fn report(method: &Method, concurrency: usize, rounds: &Rounds) {
    println!("\n{method}, concurrency {concurrency}");
    println!(
        "  {:<22} {:>19} {:>19} {:>19} {:>19} {:>8} {:>8} {:>8} {:>8}",
        "",
        "calls/s, ratio",
        "p50, ratio",
        "p99, ratio",
        "CPU, ratio",
        "calls/s",
        "p50 µs",
        "p99 µs",
        "CPU µs"
    );
    let [bare, ..] = rounds;
    for (stack, turns) in Stack::ALL.iter().zip(rounds) {
        let figures: [fn(&Turn) -> f64; 4] = [
            |turn| turn.calls_per_second,
            |turn| turn.p50,
            |turn| turn.p99,
            |turn| turn.processor,
        ];
        let ratios = figures.map(|figure| {
            let ratio = |(turn, bare)| figure(turn) / figure(bare);
            Spread::of(turns.iter().zip(bare).map(ratio)).to_string()
        });
        let medians = figures.map(|figure| Spread::of(turns.iter().map(figure)).median);
        let [calls, p50, p99, cpu] = &ratios;
        print!(
            "  {:<22} {calls:>19} {p50:>19} {p99:>19} {cpu:>19}",
            stack.name()
        );
        let [calls, p50, p99, cpu] = medians;
        println!(" {calls:>8.0} {p50:>8.0} {p99:>8.0} {cpu:>8.2}");
    }
}

struct Spread {
    quarter: f64,
    median: f64,
    three_quarters: f64,
}

impl Spread {
    fn of(figures: impl Iterator<Item = f64>) -> Self {
        let mut figures: Vec<f64> = figures.collect();
        figures.sort_unstable_by(f64::total_cmp);
        let at = |percent| figures[figures.len() * percent / 100];
        Self {
            quarter: at(25),
            median: at(50),
            three_quarters: at(75),
        }
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            quarter,
            median,
            three_quarters,
        } = self;
        write!(f, "{median:.3} ({quarter:.2}–{three_quarters:.2})")
    }
}
