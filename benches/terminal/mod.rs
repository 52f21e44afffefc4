//! Stacks of layers side by side, and what is at the bottom of them in place of a connection.
#![allow(dead_code, reason = "each benchmark uses its own part of this module")]

#[path = "../floor/mod.rs"]
mod floor;

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use floor::Floor;
use http::Extensions;
use reqwest::{Body, Method, Request, Response, ResponseBuilderExt};
use reqwest_idempotent_retry::{
    Backoff, CircuitBreaker, KeyContract, LoadControl, RetryBudget, RetryMiddleware,
    RetryMiddlewareBuilder,
};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Middleware, Next};
use reqwest_retry::RetryTransientMiddleware;
use reqwest_retry::policies::ExponentialBackoff;

pub(crate) const URL: &str = "http://orders.test/orders";

/// Answers at once, with these statuses in turn.
pub(crate) struct Terminal {
    statuses: &'static [u16],
    next: AtomicUsize,
}

impl Terminal {
    pub(crate) fn answering(statuses: &'static [u16]) -> Self {
        let next = AtomicUsize::new(0);
        Self { statuses, next }
    }
}

#[async_trait::async_trait]
impl Middleware for Terminal {
    async fn handle(
        &self,
        request: Request,
        _: &mut Extensions,
        _: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        // As a connection would: a request whose body nobody asks for is one that was not sent.
        if let Some(body) = request.body() {
            black_box(http_body::Body::is_end_stream(body));
        }
        let turn = self.next.fetch_add(1, Ordering::Relaxed) % self.statuses.len();
        let answer = http::Response::builder()
            .status(self.statuses[turn])
            .url(request.url().clone())
            .body(Body::from("received"));
        Ok(Response::from(answer.expect("a valid response")))
    }
}

/// Passes on.
struct Nothing;

#[async_trait::async_trait]
impl Middleware for Nothing {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        next.run(request, extensions).await
    }
}

/// What stands above the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layer {
    None,
    Nothing,
    ReqwestRetry,
    /// The least that we have found a layer with this crate's promises to cost.
    Floor,
    FloorWithAll,
    Bare,
    BudgetAndBreaker,
    WithDeadline,
    /// Deadline, attempt timeout, budget, breaker and key.
    Everything,
}

pub(crate) const LAYERS: [Layer; 9] = [
    Layer::None,
    Layer::Nothing,
    Layer::ReqwestRetry,
    Layer::Floor,
    Layer::FloorWithAll,
    Layer::Bare,
    Layer::BudgetAndBreaker,
    Layer::WithDeadline,
    Layer::Everything,
];

impl Layer {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "terminal alone",
            Self::Nothing => "a layer that does nothing",
            Self::ReqwestRetry => "reqwest-retry",
            Self::Floor => "the floor",
            Self::FloorWithAll => "the floor, with deadline and key",
            Self::Bare => "this crate, bare",
            Self::BudgetAndBreaker => "this crate, budget + breaker",
            Self::WithDeadline => "this crate, budget + breaker + deadline",
            Self::Everything => "this crate, everything",
        }
    }

    /// A client of a service that gives these answers in turn. Nobody waits between attempts.
    pub(crate) fn over(self, statuses: &'static [u16]) -> ClientWithMiddleware {
        let stack = match self {
            Self::None => stack(),
            Self::Nothing => stack().with(Nothing),
            Self::ReqwestRetry => {
                let no_wait = ExponentialBackoff::builder()
                    .retry_bounds(Duration::ZERO, Duration::ZERO)
                    .build_with_max_retries(2);
                stack().with(RetryTransientMiddleware::new_with_policy(no_wait))
            }
            Self::Floor => stack().with(Floor { with_all: false }),
            Self::FloorWithAll => stack().with(Floor { with_all: true }),
            Self::Bare => stack().with(built(ours().without_budget())),
            Self::BudgetAndBreaker => stack().with(built(ours().load_control(load()))),
            Self::WithDeadline => {
                let layer = ours().load_control(load()).deadline(Duration::from_secs(5));
                stack().with(built(layer))
            }
            Self::Everything => {
                let layer = ours()
                    .load_control(load())
                    .deadline(Duration::from_secs(5))
                    .attempt_timeout(Duration::from_secs(1))
                    .key_contract(KeyContract::default());
                stack().with(built(layer))
            }
        };
        stack.with(Terminal::answering(statuses)).build()
    }
}

fn ours() -> RetryMiddlewareBuilder {
    RetryMiddleware::builder().backoff(Backoff::fixed([Duration::ZERO]))
}

fn load() -> Arc<LoadControl> {
    // Enough for every retry that a benchmark makes.
    let budget = RetryBudget::builder().ratio(1.0).burst(400_000).build();
    let load = LoadControl::builder()
        .budget(budget.expect("valid figures"))
        .breaker(CircuitBreaker::default());
    Arc::new(load.build().expect("valid settings"))
}

fn built(builder: RetryMiddlewareBuilder) -> RetryMiddleware {
    builder.build().expect("valid settings")
}

/// A GET, or a POST of 1 KiB.
pub(crate) fn request(method: &Method) -> Request {
    let mut request = Request::new(method.clone(), URL.parse().expect("a URL"));
    if *method == Method::POST {
        *request.body_mut() = Some(Body::from(vec![b'x'; 1024]));
    }
    request
}

/// A stack without layers, whose client is never reached.
pub(crate) fn stack() -> ClientBuilder {
    // An error says that another stack has installed it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let http = reqwest::Client::builder().tls_certs_only([]).build();
    ClientBuilder::new(http.expect("a client"))
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime")
}
