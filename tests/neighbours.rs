//! Calls that a layer makes within an attempt, and whose failures they are; operations as OpenTelemetry
//! has them where they are out of the ordinary.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod support;
#[path = "support/tree.rs"]
mod tree;

use std::sync::Arc;

use http::{Extensions, Method, StatusCode};
use reqwest::{Request, Response};
use reqwest_idempotent_retry::{
    BreakerState, CircuitBreaker, Idempotent, LoadControl, RetryMiddleware, RetryMiddlewareBuilder,
};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Error, Middleware, Next};
use support::{Server, Step, URL, key, ms, plain_builder, plain_http, refused};
use tree::Tree;

fn build(builder: RetryMiddlewareBuilder) -> RetryMiddleware {
    builder.build().expect("valid settings")
}

/// What a layer makes of a refresh that fails.
#[derive(Clone, Copy)]
enum Fails {
    /// `error_for_status()?`
    ForStatus,
    /// An error of its own that says nothing of ours.
    Opaquely,
}

struct Refreshes {
    client: ClientWithMiddleware,
    fails: Fails,
}

#[async_trait::async_trait]
impl Middleware for Refreshes {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let refresh = self.client.post("http://tokens.test/").body("grant");
        let answer = refresh.with_extension(Idempotent(true)).send().await;
        match (self.fails, answer) {
            (_, Ok(answer)) if answer.status().is_success() => {}
            (Fails::ForStatus, answer) => {
                answer?.error_for_status()?;
            }
            (Fails::Opaquely, _) => {
                return Err(Error::middleware(std::io::Error::other("no token")));
            }
        }
        next.run(request, extensions).await
    }
}

fn ordering(
    server: &Server,
    layer: RetryMiddlewareBuilder,
    auth: Refreshes,
) -> ClientWithMiddleware {
    let client = ClientBuilder::new(plain_http())
        .with(build(layer))
        .with(auth);
    client.with(server.clone()).build()
}

#[tokio::test(start_paused = true)]
async fn a_refresh_that_was_left_to_us_is_made_again_also_where_its_layer_says_so_in_its_own_words()
{
    for step in [Step::Refuse(refused()), Step::status(503)] {
        let tokens = Server::script([step]).then_always(200);
        let server = Server::always(201);
        let auth = Refreshes {
            client: tokens.client([build(plain_builder())]),
            fails: Fails::Opaquely,
        };
        let order = ordering(&server, plain_builder(), auth)
            .post(URL)
            .body("order");
        let result = order.with_extension(key("order-17")).send().await;
        assert_eq!((tokens.sends(), server.sends()), (2, 1));
        assert!(result.is_ok());
    }
}

#[tokio::test(start_paused = true)]
async fn what_fails_at_another_host_is_no_failure_of_this_one() {
    for with_layer in [true, false] {
        let elsewhere = "http://tokens.test/".parse().expect("a URL");
        let step = match with_layer {
            true => Step::status(503),
            false => Step::Fail(refused().with_url(elsewhere)),
        };
        let tokens = Server::script([step]);
        let layer = with_layer.then(|| build(plain_builder().max_attempts(1)));
        let auth = Refreshes {
            client: tokens.client(layer),
            fails: Fails::ForStatus,
        };
        let breaker = CircuitBreaker::builder().consecutive_failures(1);
        let load = LoadControl::builder().breaker(breaker.build().expect("valid"));
        let load = Arc::new(load.build().expect("valid"));
        let layer = plain_builder().max_attempts(1).load_control(load.clone());
        let order = ordering(&Server::script([]), layer, auth)
            .get(URL)
            .send()
            .await;
        order.expect_err("no token");
        let host = load.snapshot("orders.test").expect("known");
        assert_eq!(
            host.breaker().expect("one").state(),
            BreakerState::Closed,
            "{with_layer}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_that_a_layer_has_made_of_a_status_is_the_layers() {
    let (tree, _listening) = Tree::grow();
    let tokens = Server::script([Step::status(503)]);
    let auth = Refreshes {
        client: tokens.client([]),
        fails: Fails::ForStatus,
    };
    let client = ordering(&Server::script([]), plain_builder().max_attempts(1), auth);
    client.get(URL).send().await.expect_err("no token");
    assert_eq!(tree.operation().1.field("error.type"), Some("layer"));
}

/// Sends once more with a new token after a 401.
struct Renews;

#[async_trait::async_trait]
impl Middleware for Renews {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let copy = request.try_clone().expect("a copy");
        let answer = next.clone().run(request, extensions).await?;
        match answer.status() {
            StatusCode::UNAUTHORIZED => next.run(copy, extensions).await,
            _ => Ok(answer),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn outside_a_401_to_an_order_without_a_key_is_answered_with_a_new_token() {
    let (_, _listening) = Tree::grow();
    let send = async |steps: Vec<u16>| {
        let server = Server::script(steps.into_iter().map(Step::status));
        let client = ClientBuilder::new(plain_http())
            .with(Renews)
            .with(build(plain_builder().client_is_prepared(true)))
            .with(server.clone())
            .build();
        let result = client.post(URL).body("order").send().await;
        (
            server.sends(),
            support::status(&result).map(|status| status.as_u16()),
        )
    };
    assert_eq!(send(vec![401, 201]).await, (2, Some(201)));
    // A 503 may follow a commit, so there the order ends.
    assert_eq!(send(vec![401, 503]).await, (2, Some(503)));
}

#[tokio::test(start_paused = true)]
async fn an_unknown_method_is_other_and_an_error_is_one_to_opentelemetry() {
    let (tree, _listening) = Tree::grow();
    let client = Server::always(503).client([build(plain_builder().max_attempts(1))]);
    let method = Method::from_bytes(b"BREW").expect("a method");
    let _ = client.request(method, URL).send().await;
    let (place, span) = tree.operation();
    assert_eq!(
        span.all([
            "otel.name",
            "http.request.method",
            "http.request.method_original",
            "otel.status_code"
        ]),
        ["HTTP", "_OTHER", "BREW", "ERROR"]
    );
    let attempt = tree.events_in(place).remove(0);
    assert_eq!(attempt.field("http.request.method"), Some("_OTHER"));
}

#[tokio::test(start_paused = true)]
async fn an_operation_that_is_cancelled_in_its_wait_has_that_for_an_error() {
    let (tree, _listening) = Tree::grow();
    let client = Server::always(503).client([build(plain_builder())]);
    assert!(
        tokio::time::timeout(ms(50), client.get(URL).send())
            .await
            .is_err()
    );
    assert_eq!(tree.operation().1.field("error.type"), Some("cancelled"));
}

/// A body that says when it is read.
struct Speaks(bool);

impl http_body::Body for Speaks {
    type Data = bytes::Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<bytes::Bytes>, Self::Error>>> {
        tracing::info!("read");
        let frame = http_body::Frame::data(bytes::Bytes::from_static(b"order"));
        std::task::Poll::Ready(std::mem::take(&mut self.0).then_some(Ok(frame)))
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_is_read_ahead_is_read_in_the_span_of_its_operation() {
    let (tree, _listening) = Tree::grow();
    let client = Server::always(201).client([build(plain_builder().buffer_request(9))]);
    let body = reqwest::Body::wrap(Speaks(true));
    client.post(URL).body(body).send().await.expect("an answer");
    let (place, _) = tree.operation();
    let reads = tree.nodes().into_iter().filter(|node| node.name == "read");
    let spans: Vec<_> = reads.map(|read| read.parent).collect();
    assert_eq!(spans, [Some(place); 2]);
}
