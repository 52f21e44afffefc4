//! What the layer adds to a call that is answered at once: beside nothing, a layer that does
//! nothing, and `reqwest-retry`. Below all of them a terminal that answers without a socket.
//!
//! `cargo bench --bench overhead`
#![allow(
    missing_docs,
    reason = "criterion's macro makes an undocumented function"
)]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use http::Extensions;
use reqwest::{Body, Method, Request, Response, ResponseBuilderExt};
use reqwest_idempotent_retry::{KeyContract, RetryBudget, RetryMiddleware};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Middleware, Next};
use reqwest_retry::RetryTransientMiddleware;
use reqwest_retry::policies::ExponentialBackoff;

const URL: &str = "http://orders.test/orders";

/// Answers 200 at once.
struct Terminal;

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
        let answer = http::Response::builder()
            .url(request.url().clone())
            .body(Body::default());
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

fn stacks() -> Vec<(&'static str, ClientWithMiddleware)> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let http = reqwest::Client::builder()
        .tls_certs_only([])
        .build()
        .expect("a client");
    let stack = || ClientBuilder::new(http.clone());
    let theirs = ExponentialBackoff::builder().build_with_max_retries(2);
    let bare = RetryMiddleware::builder()
        .without_budget()
        .build()
        .expect("valid settings");
    let full = RetryMiddleware::builder()
        .attempt_timeout(Duration::from_secs(1))
        .deadline(Duration::from_secs(5))
        .budget(Arc::new(RetryBudget::default()))
        .key_contract(KeyContract::default())
        .build()
        .expect("valid settings");
    vec![
        ("terminal alone", stack()),
        ("a layer that does nothing", stack().with(Nothing)),
        (
            "reqwest-retry",
            stack().with(RetryTransientMiddleware::new_with_policy(theirs)),
        ),
        ("this crate, bare", stack().with(bare)),
        ("this crate, deadline + budget + key", stack().with(full)),
    ]
    .into_iter()
    .map(|(name, stack)| (name, stack.with(Terminal).build()))
    .collect()
}

fn overhead(criterion: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime");
    for (method, body) in [(Method::GET, None), (Method::POST, Some(vec![b'x'; 1024]))] {
        let mut group = criterion.benchmark_group(method.as_str());
        for (name, client) in stacks() {
            group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
                bencher.iter(|| {
                    let mut request = Request::new(method.clone(), URL.parse().expect("a URL"));
                    *request.body_mut() = body.clone().map(Body::from);
                    runtime
                        .block_on(client.execute(request))
                        .expect("an answer")
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, overhead);
criterion_main!(benches);
