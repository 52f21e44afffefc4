//! What load control keeps, in bytes. In a binary of its own: every allocation of the process is
//! counted.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]
#![allow(unsafe_code, reason = "an allocator cannot be counted without one")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::time::Duration;

use http::Extensions;
use reqwest::{Request, Response};
use reqwest_idempotent_retry::{CircuitBreaker, LoadControl, RetryBudget, RetryMiddleware};
use reqwest_middleware::{ClientBuilder, Middleware, Next};

/// The system's allocator, and the bytes that are out.
struct Counting;

static LIVE: AtomicIsize = AtomicIsize::new(0);
static PEAK: AtomicIsize = AtomicIsize::new(0);

fn add(bytes: usize) {
    let bytes = bytes as isize;
    let live = LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(live, Ordering::Relaxed);
}

fn subtract(bytes: usize) {
    LIVE.fetch_sub(bytes as isize, Ordering::Relaxed);
}

// SAFETY: everything is the system allocator's; only figures are kept besides.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        subtract(layout.size());
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        subtract(layout.size());
        add(size);
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn live() -> isize {
    LIVE.load(Ordering::Relaxed)
}

/// Answers 503 to every request, so that each key has a failure to remember.
struct Fails;

#[async_trait::async_trait]
impl Middleware for Fails {
    async fn handle(
        &self,
        request: Request,
        _: &mut Extensions,
        _: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        use reqwest::ResponseBuilderExt;
        let answer = http::Response::builder().status(503);
        let answer = answer
            .url(request.url().clone())
            .body(reqwest::Body::default());
        Ok(Response::from(answer.expect("a response")))
    }
}

/// The key of an operation.
#[derive(Clone, Copy)]
struct Shard(u32);

/// Everything on that a key can have, but the events of a budget's window.
fn registry() -> LoadControl {
    let breaker = CircuitBreaker::builder()
        .consecutive_failures(5)
        .failure_ratio(0.5, 20, Duration::from_secs(10))
        .build();
    LoadControl::builder()
        .budget(RetryBudget::default())
        .breaker(breaker.expect("valid"))
        .concurrency_limit(64)
        .key_by(|_, extensions| {
            let Shard(number) = extensions.get().expect("every request has one");
            format!("shard-{number:07}").into()
        })
        .build()
        .expect("valid")
}

const KEYS: u32 = 1_000_000;
const CAPACITY: usize = 1024;
const KEY_TEXT: usize = "shard-0000000".len();

#[tokio::test]
async fn a_million_keys_take_no_more_than_a_megabyte() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let http = reqwest::Client::builder().tls_certs_only([]).no_proxy();
    let http = http.build().expect("a client");
    let before = live();
    let load = Arc::new(registry());
    let empty = live() - before;
    let retry = RetryMiddleware::builder()
        .max_attempts(1)
        .load_control(Arc::clone(&load))
        .build()
        .expect("valid");
    let client = ClientBuilder::new(http).with(retry).with(Fails).build();
    let send = async |number| {
        let request = client
            .get("http://orders.test/")
            .with_extension(Shard(number));
        assert_eq!(request.send().await.expect("an answer").status(), 503);
    };
    // As much as there can be, and the most that an operation needs on the way.
    for number in 0..2 * CAPACITY as u32 {
        send(number).await;
    }
    let (full, full_peak) = (live(), PEAK.load(Ordering::Relaxed));
    for number in 2 * CAPACITY as u32..KEYS {
        send(number).await;
    }
    assert_eq!(load.len(), CAPACITY);
    let last = load.snapshot("shard-0999999").expect("the last one");
    assert_eq!((last.operations(), last.in_flight()), (1, Some(0)));
    assert_eq!(last.breaker().expect("one").recent_failures(), Some(1));
    // Hash tables may be built anew, but nothing grows.
    let growth = live() - full;
    assert!(
        growth.abs() < 64 * 1024,
        "{growth} bytes more after a million keys"
    );
    let peak = PEAK.load(Ordering::Relaxed) - full_peak;
    assert!(peak < 256 * 1024, "{peak} bytes more at the most");

    // What the registry alone gives back.
    drop(client);
    let with_registry = live();
    let load = Arc::into_inner(load).expect("nobody else has it");
    drop(load);
    let registry = with_registry - live();
    let per_key = (registry - empty) as usize / CAPACITY;
    println!(
        "empty registry: {empty} B; full: {registry} B for {CAPACITY} keys; {per_key} B a key, \
         {KEY_TEXT} of it its text; growth {growth} B, peak {peak} B"
    );
    assert!(per_key - KEY_TEXT < 1024, "{per_key} bytes a key");
    assert!(
        (registry as usize) < CAPACITY * (1024 + KEY_TEXT),
        "{registry} bytes"
    );
}
