//! What the layer adds to a call that is answered at once: beside nothing, a layer that does
//! nothing, and `reqwest-retry`. Below all of them a terminal that answers without a socket.
//!
//! `cargo bench --bench overhead`
#![allow(
    missing_docs,
    reason = "criterion's macro makes an undocumented function"
)]

mod terminal;

use std::sync::Arc;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use http::Extensions;
use reqwest::{Body, Method, Request, Response};
use reqwest_idempotent_retry::{KeyContract, RetryBudget, RetryMiddleware};
use reqwest_middleware::{ClientWithMiddleware, Middleware, Next};
use reqwest_retry::RetryTransientMiddleware;
use reqwest_retry::policies::ExponentialBackoff;
use terminal::{Terminal, stack};

const URL: &str = "http://orders.test/orders";

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
    let runtime = terminal::runtime();
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
