//! What operations made within an attempt may do to the one around them, and what they must not.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod support;

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use http::Extensions;
use reqwest::{Request, Response};
use reqwest_idempotent_retry::{
    Backoff, BodyFactory, BreakerState, CircuitBreaker, KeyContract, LoadControl, NextStep,
    RetryBudget, RetryErrorExt, RetryMiddleware, RetryMiddlewareBuilder, StopReason, ambient,
};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Middleware, Next};
use support::{Server, Step, URL, ms, plain_builder, plain_http, read_and_closed, secs};

const OUTER: &str = "http://gateway.test/";

fn thrice() -> RetryMiddlewareBuilder {
    plain_builder().max_attempts(3)
}

fn layer(builder: RetryMiddlewareBuilder) -> RetryMiddleware {
    builder.build().expect("valid")
}

fn stop(result: &Result<Response, reqwest_middleware::Error>) -> Option<StopReason> {
    support::report(result).and_then(|report| report.stop())
}

fn answered(result: &Result<Response, reqwest_middleware::Error>) -> Option<u16> {
    support::status(result).map(|status| status.as_u16())
}

/// Answers by a GET of its own.
struct Calls(ClientWithMiddleware);
#[async_trait::async_trait]
impl Middleware for Calls {
    async fn handle(
        &self,
        _: Request,
        _: &mut Extensions,
        _: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        self.0.get(URL).send().await
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_the_outer_limit_ends_is_made_again() {
    let server = Server::script([Step::Hang]).then_always(200);
    let client = ClientBuilder::new(plain_http())
        .with(layer(thrice().attempt_timeout(ms(50))))
        .with(Calls(server.client([layer(thrice())])))
        .build();
    let r = client.get(OUTER).send().await;
    assert_eq!((answered(&r), server.sends()), (Some(200), 2));
}

/// Asks a side service with a short patience, then lets the request go on.
struct Asks(ClientWithMiddleware);
#[async_trait::async_trait]
impl Middleware for Asks {
    async fn handle(
        &self,
        r: Request,
        e: &mut Extensions,
        n: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let _ = tokio::time::timeout(ms(10), self.0.get("http://flags.test/").send()).await;
        n.run(r, e).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_side_call_that_was_given_up_says_nothing_of_the_request() {
    let flags = Server::script([Step::Hang]).then_always(200);
    let server = Server::script([Step::status(503)]).then_always(200);
    let client = ClientBuilder::new(plain_http())
        .with(layer(thrice()))
        .with(Asks(flags.client([layer(thrice())])))
        .with(server.clone())
        .build();
    let r = client.get(URL).send().await;
    assert_eq!((answered(&r), server.sends()), (Some(200), 2));
}

#[tokio::test(start_paused = true)]
async fn a_body_that_is_fetched_from_the_same_host_needs_no_second_permit() {
    let load = Arc::new(
        LoadControl::builder()
            .concurrency_limit(1)
            .build()
            .expect("valid"),
    );
    let server = Server::always(200);
    let client = server.client([layer(thrice().load_control(load.clone()).deadline(secs(5)))]);
    let c2 = client.clone();
    let factory = BodyFactory::new(move || {
        let c = c2.clone();
        async move {
            let a = c.get(URL).send().await?;
            Ok::<_, reqwest_middleware::Error>(reqwest::Body::from(a.bytes().await?))
        }
    });
    let r = client.put(URL).with_extension(factory).send().await;
    assert_eq!(answered(&r), Some(200));
}

struct ErrorForStatus;
#[async_trait::async_trait]
impl Middleware for ErrorForStatus {
    async fn handle(
        &self,
        r: Request,
        e: &mut Extensions,
        n: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        Ok(n.run(r, e).await?.error_for_status()?)
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_that_a_layer_makes_of_a_404_is_final_and_no_failure_of_the_host() {
    let load = Arc::new(
        LoadControl::builder()
            .breaker(CircuitBreaker::default())
            .build()
            .expect("valid"),
    );
    let server = Server::always(404);
    let client = ClientBuilder::new(plain_http())
        .with(layer(thrice().load_control(load.clone())))
        .with(ErrorForStatus)
        .with(server.clone())
        .build();
    let _ = client.get(URL).send().await;
    assert_eq!(
        (
            server.sends(),
            load.snapshots()[0]
                .breaker()
                .expect("valid")
                .failures_in_a_row()
        ),
        (1, 0)
    );
}

#[tokio::test(start_paused = true)]
async fn an_order_refused_with_402_is_final_also_as_an_error() {
    let server = Server::always(402);
    let client = ClientBuilder::new(plain_http())
        .with(layer(thrice().key_contract(KeyContract::default())))
        .with(ErrorForStatus)
        .with(server.clone())
        .build();
    let _ = client.post(URL).body("x").send().await;
    assert_eq!(server.sends(), 1);
}

/// Answers by an order of its own.
struct Orders(ClientWithMiddleware);
#[async_trait::async_trait]
impl Middleware for Orders {
    async fn handle(
        &self,
        _: Request,
        _: &mut Extensions,
        _: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        self.0.post(URL).body("order").send().await
    }
}

#[tokio::test(start_paused = true)]
async fn a_loop_that_asks_before_it_goes_round_makes_one_order() {
    let server = Server::script([
        Step::Fail(read_and_closed()),
        Step::Fail(read_and_closed()),
        Step::Fail(read_and_closed()),
    ])
    .then_always(200);
    let inner = server.client([layer(thrice().key_contract(KeyContract::default()))]);
    let client = ClientBuilder::new(plain_http())
        .with(layer(thrice()))
        .with(Orders(inner))
        .build();
    for _ in 0..3 {
        match client.get(OUTER).send().await {
            Ok(_) => break,
            Err(error) => {
                let stopped = error.retry_error().expect("ours");
                // Not of the GET, which asks for nothing, but of the order made for it.
                let confirm = NextStep::ConfirmOutcome { key: None };
                assert_eq!(stopped.next_step(), confirm);
                if stopped.stop().forbids_retry() {
                    break;
                }
            }
        }
    }
    let mut keys: Vec<_> = server.key_lines();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), 1, "orders at the server: {keys:?}");
}

#[tokio::test(start_paused = true)]
async fn what_a_budget_refuses_within_is_forbidden_outside() {
    let server = Server::always(503);
    let inner = server.client([layer(thrice().budget(Arc::new(RetryBudget::fixed(0))))]);
    let client = ClientBuilder::new(plain_http())
        .with(layer(thrice()))
        .with(Calls(inner))
        .build();
    let r = client.get(OUTER).send().await;
    let stop = stop(&r);
    assert!(stop.expect("valid").forbids_retry());
}

#[tokio::test(start_paused = true)]
async fn keys_in_use_are_kept_while_others_are_idle() {
    let load = Arc::new(
        LoadControl::builder()
            .capacity(100)
            .concurrency_limit(1)
            .build()
            .expect("valid"),
    );
    let server = Server::script((0..16).map(|_| Step::Hang)).then_always(200);
    let client = server.client([layer(
        thrice().load_control(load.clone()).deadline(secs(100)),
    )]);
    let mut ops = vec![];
    for h in 0..16 {
        let c = client.clone();
        ops.push(tokio::spawn(async move {
            c.get(format!("http://busy{h}.test/")).send().await
        }));
    }
    tokio::time::sleep(ms(1)).await;
    for h in 0..85 {
        client
            .get(format!("http://idle{h}.test/"))
            .send()
            .await
            .expect("valid");
    }
    let kept: Vec<_> = (0..16)
        .filter(|h| load.snapshot(&format!("busy{h}.test")).is_some())
        .collect();
    let _ = &ops;
    assert_eq!(
        kept.len(),
        16,
        "{kept:?}; {} keys, {} of them idle",
        load.len(),
        load.len() - kept.len()
    );
}

#[tokio::test(start_paused = true)]
async fn one_map_serves_two_requests_within_an_ambient_deadline_too() {
    let server = Server::always(200);
    let client = server.client([layer(RetryMiddleware::builder())]);
    let go = || async {
        let mut map = Extensions::new();
        for p in 1..3 {
            let req = client
                .get(format!("{URL}?page={p}"))
                .build()
                .expect("valid");
            client.execute_with_extensions(req, &mut map).await?;
        }
        Ok::<_, reqwest_middleware::Error>(())
    };
    go().await.expect("without");
    ambient::scope(ambient::Context::new().deadline_in(secs(10)), go())
        .await
        .expect("with an ambient deadline");
}

#[tokio::test(start_paused = true)]
async fn a_call_within_a_probe_is_part_of_it() {
    let breaker = CircuitBreaker::builder()
        .consecutive_failures(1)
        .open_for(Backoff::fixed([secs(1)]))
        .gate_first_sends(true)
        .build()
        .expect("valid");
    let load = Arc::new(
        LoadControl::builder()
            .breaker(breaker)
            .key_by(|_, _| "tenant-1".into())
            .build()
            .expect("valid"),
    );
    let server = Server::script([Step::status(503)]).then_always(200);
    let inner = server.client([layer(thrice().load_control(load.clone()))]);
    let client = ClientBuilder::new(plain_http())
        .with(layer(thrice().load_control(load.clone())))
        .with(Calls(inner))
        .build();
    let _ = client.get(OUTER).send().await;
    for _ in 0..20 {
        tokio::time::sleep(secs(10)).await;
        let _ = client.get(OUTER).send().await;
    }
    let s = load.snapshots()[0].breaker().expect("valid").state();
    assert_eq!(
        (s, server.sends() > 1),
        (BreakerState::Closed, true),
        "200 s after the service has come back"
    );
}

#[tokio::test(start_paused = true)]
async fn a_token_from_the_same_host_does_not_keep_its_breaker_from_closing() {
    // a nested call of an outer layer that sends once
    let breaker = CircuitBreaker::builder()
        .consecutive_failures(1)
        .open_for(Backoff::fixed([secs(1)]))
        .gate_first_sends(true)
        .build()
        .expect("valid");
    let load = Arc::new(
        LoadControl::builder()
            .breaker(breaker)
            .build()
            .expect("valid"),
    );
    let server = Server::script([Step::status(503)]).then_always(200);
    // a token fetch from the same host, through a client that shares the load control
    struct Token(ClientWithMiddleware);
    #[async_trait::async_trait]
    impl Middleware for Token {
        async fn handle(
            &self,
            r: Request,
            e: &mut Extensions,
            n: Next<'_>,
        ) -> reqwest_middleware::Result<Response> {
            self.0.get(URL).send().await?;
            n.run(r, e).await
        }
    }
    let inner = server.client([layer(thrice().load_control(load.clone()))]);
    let client = ClientBuilder::new(plain_http())
        .with(layer(thrice().load_control(load.clone())))
        .with(Token(inner))
        .with(server.clone())
        .build();
    let _ = client.get(URL).send().await;
    for _ in 0..20 {
        tokio::time::sleep(secs(10)).await;
        let _ = client.get(URL).send().await;
    }
    assert_eq!(
        load.snapshots()[0].breaker().expect("valid").state(),
        BreakerState::Closed
    );
}

/// Gives its map to a request of its own.
struct Forwards(ClientWithMiddleware);
#[async_trait::async_trait]
impl Middleware for Forwards {
    async fn handle(
        &self,
        _: Request,
        e: &mut Extensions,
        _: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let order = self
            .0
            .post("http://shop.test/orders")
            .body("order")
            .build()
            .expect("valid");
        self.0.execute_with_extensions(order, e).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_map_that_is_bound_to_one_request_is_refused_for_another() {
    let shop = Server::always(503);
    let client = ClientBuilder::new(plain_http())
        .with(layer(thrice()))
        .with(Forwards(shop.client([layer(
            thrice().key_contract(KeyContract::default()),
        )])))
        .build();
    let r = client.get(OUTER).send().await;
    assert_eq!(
        (shop.sends(), stop(&r)),
        (0, Some(StopReason::NotRetryable))
    );
}

type Foreign = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Drops what belongs to another task.
struct Drops(Arc<Mutex<Option<Foreign>>>);
#[async_trait::async_trait]
impl Middleware for Drops {
    async fn handle(
        &self,
        r: Request,
        e: &mut Extensions,
        n: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let foreign = self.0.lock().expect("valid").take();
        drop(foreign);
        n.run(r, e).await
    }
}

#[tokio::test(start_paused = true)]
async fn an_operation_of_another_task_that_is_dropped_here_says_nothing_of_us() {
    let other = Server::script([Step::Hang]);
    let c = other.client([layer(thrice())]);
    let mut foreign: Foreign = Box::pin(async move {
        let _ = c.get(URL).send().await;
    });
    std::future::poll_fn(|cx| {
        let _ = foreign.as_mut().poll(cx);
        std::task::Poll::Ready(())
    })
    .await;
    let server = Server::script([Step::status(503)]).then_always(200);
    let client = ClientBuilder::new(plain_http())
        .with(layer(thrice()))
        .with(Drops(Arc::new(Mutex::new(Some(foreign)))))
        .with(server.clone())
        .build();
    let r = client.get(URL).send().await;
    assert_eq!((answered(&r), server.sends()), (Some(200), 2));
}
