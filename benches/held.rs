//! What operations keep while nothing happens: answers that nobody has read yet, and operations that wait,
//! 10,000 at once. In bytes for each, counted at the allocator, of the client's thread alone.
//!
//! `cargo bench --manifest-path tests/cost/Cargo.toml --bench held`
#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark reads the time and waits, which the crate leaves to its clock"
)]
#![allow(unsafe_code, reason = "an allocator cannot be counted without one")]

mod loopback;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http::Extensions;
use loopback::{one_thread, serve};
use reqwest::{Body, Method, Request, Response, ResponseBuilderExt};
use reqwest_idempotent_retry::{
    Backoff, CircuitBreaker, KeyContract, LoadControl, LoadControlBuilder, RetryBudget,
    RetryMiddleware,
};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Middleware, Next};
use reqwest_retry::policies::ExponentialBackoff;
use reqwest_retry::{Jitter, RetryTransientMiddleware};
use tokio::task::JoinSet;

/// The system's allocator, and the bytes of this thread that are out.
struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
}

fn add(bytes: isize) {
    LIVE.set(LIVE.get() + bytes);
}

// SAFETY: everything is the system allocator's; only a figure is kept besides.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size().cast_signed());
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        add(-layout.size().cast_signed());
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size.cast_signed() - layout.size().cast_signed());
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What stands at the bottom in place of a connection.
struct Service {
    /// So many requests are refused with 503, the others are answered.
    refuses: usize,
    /// Otherwise it answers nobody.
    answers: bool,
    received: AtomicUsize,
}

impl Service {
    fn new(refuses: usize, answers: bool) -> Arc<Self> {
        let received = AtomicUsize::new(0);
        Arc::new(Self {
            refuses,
            answers,
            received,
        })
    }

    fn received(&self) -> usize {
        self.received.load(Ordering::Relaxed)
    }
}

struct Bottom(Arc<Service>);

#[async_trait::async_trait]
impl Middleware for Bottom {
    async fn handle(
        &self,
        request: Request,
        _: &mut Extensions,
        _: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let turn = self.0.received.fetch_add(1, Ordering::Relaxed);
        if !self.0.answers {
            std::future::pending::<()>().await;
        }
        let status = if turn < self.0.refuses { 503 } else { 200 };
        let answer = http::Response::builder()
            .status(status)
            .url(request.url().clone())
            .body(Body::from("received"));
        Ok(Response::from(answer.expect("a valid response")))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layer {
    None,
    ReqwestRetry,
    Ours,
    /// Deadline, budget, breaker, and a key for POST.
    OursWithAll,
    /// And one permit.
    OneAtATime,
}

impl Layer {
    fn name(self) -> &'static str {
        match self {
            Self::None => "no layer",
            Self::ReqwestRetry => "reqwest-retry",
            Self::Ours => "this crate, bare",
            Self::OursWithAll => "this crate, with all",
            Self::OneAtATime => "this crate, with all and one permit",
        }
    }

    /// Retries come after `wait`.
    fn stack(self, wait: Duration) -> ClientBuilder {
        let http = reqwest::Client::builder().tls_certs_only([]).no_proxy();
        let stack = ClientBuilder::new(http.build().expect("a client"));
        let ours = RetryMiddleware::builder().backoff(Backoff::fixed([wait]));
        let layer = match self {
            Self::None => return stack,
            Self::ReqwestRetry => {
                let policy = ExponentialBackoff::builder()
                    .retry_bounds(wait, wait)
                    .jitter(Jitter::None)
                    .build_with_max_retries(2);
                return stack.with(RetryTransientMiddleware::new_with_policy(policy));
            }
            Self::Ours => ours.without_budget(),
            Self::OursWithAll | Self::OneAtATime => {
                let load = match self {
                    Self::OneAtATime => load().concurrency_limit(1),
                    _ => load(),
                };
                ours.load_control(Arc::new(load.build().expect("valid settings")))
                    .deadline(wait * 3 + Duration::from_secs(60))
                    .key_contract(KeyContract::default())
            }
        };
        stack.with(layer.build().expect("valid settings"))
    }

    fn over(self, service: &Arc<Service>, wait: Duration) -> ClientWithMiddleware {
        self.stack(wait).with(Bottom(Arc::clone(service))).build()
    }
}

/// A budget that has enough for all.
fn load() -> LoadControlBuilder {
    let budget = RetryBudget::builder().burst(400_000).build();
    LoadControl::builder()
        .budget(budget.expect("valid figures"))
        .breaker(CircuitBreaker::default())
}

/// A GET, or a POST of 1 KiB.
fn request(method: &Method, url: &str) -> Request {
    let mut request = Request::new(method.clone(), url.parse().expect("a URL"));
    if *method == Method::POST {
        *request.body_mut() = Some(Body::from(vec![b'x'; 1024]));
    }
    request
}

const URL: &str = "http://orders.test/orders";
const LONG: Duration = Duration::from_secs(3600);

/// Fewer where it is only to be seen that it works (`-- --test`).
fn number() -> usize {
    let has = |wanted: &str| std::env::args().any(|argument| argument == wanted);
    match has("--bench") && !has("--test") {
        true => 10_000,
        false => 200,
    }
}

/// What each of so many keeps, and what is left of each once they are gone.
struct Kept {
    bytes: isize,
    left: isize,
}

impl Kept {
    /// `first` is called once before, so that what is made once is not counted.
    async fn by<T>(first: impl Future, number: usize, all: impl AsyncFnOnce(usize) -> T) -> Self {
        first.await;
        let before = LIVE.get();
        let kept = all(number).await;
        let bytes = LIVE.get() - before;
        drop(kept);
        // What tasks hold is dropped by the runtime.
        all_have_run(number).await;
        let each = |bytes: isize| bytes / number.cast_signed();
        Self {
            bytes: each(bytes),
            left: each(LIVE.get() - before),
        }
    }

    fn print(&self, layer: Layer, method: &Method, beside: &Self) {
        let (name, Self { bytes, left }) = (layer.name(), self);
        let added = bytes - beside.bytes;
        println!("  {method:<5} {name:<38} {bytes:>7} {added:>+7} {left:>6}");
    }
}

fn main() {
    // An error says that it has been installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let number = number();
    println!(
        "{number} at once, bytes for each        {:>17} {:>7} {:>6}",
        "kept", "added", "left"
    );
    let runtime = one_thread();
    let layers = [
        Layer::None,
        Layer::ReqwestRetry,
        Layer::Ours,
        Layer::OursWithAll,
    ];

    println!("answers that nobody has read yet");
    for method in [Method::GET, Method::POST] {
        let kept =
            layers.map(|layer| runtime.block_on(answers(layer, &method, number, URL, false)));
        print(&layers, &method, &kept);
    }
    let connections = number.min(1000);
    println!("the same, {connections} of them, each with its connection");
    let url = format!("http://{}/orders", serve());
    let kept =
        layers.map(|layer| runtime.block_on(answers(layer, &Method::GET, connections, &url, true)));
    print(&layers, &Method::GET, &kept);

    println!("operations in tasks: no layer, under way; the others, waiting for their retry");
    let kept = layers.map(|layer| runtime.block_on(waiting(layer, &Method::GET, number)));
    print(&layers, &Method::GET, &kept);
    // Without a key, ours does not repeat a POST.
    let layers = [Layer::None, Layer::ReqwestRetry, Layer::OursWithAll];
    let kept = layers.map(|layer| runtime.block_on(waiting(layer, &Method::POST, number)));
    print(&layers, &Method::POST, &kept);
    println!("operations in tasks: no layer, under way; the other, waiting for a permit");
    let layers = [Layer::None, Layer::OneAtATime];
    for method in [Method::GET, Method::POST] {
        let kept = layers.map(|layer| runtime.block_on(in_line(layer, &method, number)));
        print(&layers, &method, &kept);
    }

    println!("\n{number} wait for half a second at once, then all are answered");
    for layer in [Layer::ReqwestRetry, Layer::Ours, Layer::OursWithAll] {
        let (answered, took) = runtime.block_on(all_come_back(layer, number));
        let name = layer.name();
        println!("  {name:<38} {answered} answered, the last {took:?} after the first");
        assert_eq!(answered, number);
    }
}

fn print(layers: &[Layer], method: &Method, kept: &[Kept]) {
    for (layer, one) in layers.iter().zip(kept) {
        one.print(*layer, method, &kept[0]);
    }
}

async fn answers(layer: Layer, method: &Method, number: usize, url: &str, real: bool) -> Kept {
    let service = Service::new(0, true);
    let client = match real {
        true => layer.stack(LONG).build(),
        false => layer.over(&service, LONG),
    };
    let answer = async || {
        let answer = client.execute(request(method, url)).await;
        answer.expect("an answer")
    };
    let all = async |number| {
        let mut answers = Vec::with_capacity(number);
        for _ in 0..number {
            answers.push(answer().await);
        }
        answers
    };
    Kept::by(answer(), number, all).await
}

/// Each waits in a task of its own, as in a server.
async fn wait_in_tasks(
    client: &ClientWithMiddleware,
    method: &Method,
    number: usize,
    until: impl Fn() -> bool,
) -> JoinSet<bool> {
    let mut tasks = JoinSet::new();
    for _ in 0..number {
        let (client, request) = (client.clone(), request(method, URL));
        tasks.spawn(async move { client.execute(request).await.is_ok() });
    }
    while !until() {
        tokio::task::yield_now().await;
    }
    // The last one has to come from there to its wait.
    all_have_run(number).await;
    tasks
}

/// Every task that could run has: at least one does for each turn that we leave out.
async fn all_have_run(number: usize) {
    for _ in 0..=number {
        tokio::task::yield_now().await;
    }
}

async fn waiting(layer: Layer, method: &Method, number: usize) -> Kept {
    let service = Service::new(usize::MAX, layer != Layer::None);
    let client = layer.over(&service, LONG);
    let first = async { drop(wait_in_tasks(&client, method, 1, || service.received() == 1).await) };
    let all = async |number| {
        wait_in_tasks(&client, method, number, || service.received() == number + 1).await
    };
    Kept::by(first, number, all).await
}

async fn in_line(layer: Layer, method: &Method, number: usize) -> Kept {
    let service = Service::new(0, false);
    let client = layer.over(&service, LONG);
    // The first one has the permit, and keeps it.
    let _first = wait_in_tasks(&client, method, 1, || service.received() == 1).await;
    let all = async |number| {
        let tasks = wait_in_tasks(&client, method, number, || true).await;
        let received = if layer == Layer::None { number + 1 } else { 1 };
        assert_eq!(service.received(), received);
        tasks
    };
    Kept::by(async {}, number, all).await
}

async fn all_come_back(layer: Layer, number: usize) -> (usize, Duration) {
    let service = Service::new(number, true);
    let client = layer.over(&service, Duration::from_millis(500));
    let mut tasks = wait_in_tasks(&client, &Method::GET, number, || {
        service.received() == number
    })
    .await;
    let mut answered = usize::from(
        tasks
            .join_next()
            .await
            .is_some_and(|one| one.is_ok_and(|ok| ok)),
    );
    let begun = Instant::now();
    while let Some(one) = tasks.join_next().await {
        answered += usize::from(one.is_ok_and(|ok| ok));
    }
    (answered, begun.elapsed())
}
