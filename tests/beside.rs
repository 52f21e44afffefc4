//! Beside other layers: reqwest-tracing and a layer that puts credentials in, outside of this crate's
//! layer and inside of it. In a binary of its own: see `tests/support/tree.rs`.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod support;
#[path = "support/tree.rs"]
mod tree;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use http::header::AUTHORIZATION;
use http::{Extensions, HeaderValue, StatusCode};
use reqwest::{Request, Response};
use reqwest_idempotent_retry::{
    Attempt, Certainty, Idempotent, KeyContract, RetryErrorExt, RetryMiddleware,
    RetryMiddlewareBuilder, StopReason,
};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Middleware, Next, RequestBuilder};
use reqwest_tracing::{
    DefaultSpanBackend, ReqwestOtelSpanBackend, TracingMiddleware, default_on_request_end,
    reqwest_otel_span,
};
use support::{Server, Step, URL, key, lines, ms, plain_builder, plain_http, refused};
use tracing::Span;
use tracing::field::Empty;
use tree::{Node, OPERATION, Tree};

const RESENDS: &str = "http.request.resend_count";
const STATUS: &str = "http.response.status_code";

fn build(builder: RetryMiddlewareBuilder) -> RetryMiddleware {
    builder.build().expect("valid settings")
}

/// The layer of this crate, with this one outside or inside of it.
fn beside<M: Middleware>(
    other: M,
    place: Place,
    layer: RetryMiddlewareBuilder,
    server: &Server,
) -> ClientWithMiddleware {
    let client = ClientBuilder::new(plain_http());
    let client = match place {
        Place::Outside => client.with(other).with(build(layer)),
        Place::Inside => client.with(build(layer)).with(other),
    };
    client.with(server.clone()).build()
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Outside,
    Inside,
}

/// What this work has told.
async fn told_by(work: impl Future) -> Tree {
    let (tree, listening) = Tree::grow();
    work.await;
    drop(listening);
    tree
}

// ---- reqwest-tracing ----

/// What reqwest-tracing calls its spans.
const REQUEST: &str = "HTTP request";

fn tracing_layer() -> TracingMiddleware<DefaultSpanBackend> {
    TracingMiddleware::default()
}

fn twice_busy() -> Server {
    Server::script([Step::status(503), Step::status(503), Step::status(200)])
}

fn ends(spans: &[(usize, Node)]) -> Vec<[String; 2]> {
    let end = |(_, span): &(usize, Node)| span.all([STATUS, "otel.status_code"]);
    spans.iter().map(end).collect()
}

#[tokio::test(start_paused = true)]
async fn outside_reqwest_tracing_has_one_span_around_the_operation() {
    let server = twice_busy();
    let client = beside(tracing_layer(), Place::Outside, plain_builder(), &server);
    let tree = told_by(async { client.get(URL).send().await.expect("an answer") }).await;
    let spans = tree.spans(REQUEST);
    assert_eq!(ends(&spans), [["200", "-"]]);
    let (_, operation) = tree.operation();
    assert_eq!(operation.parent, Some(spans[0].0));
    assert_eq!(operation.all([STATUS, RESENDS]), ["200", "2"]);
}

#[tokio::test(start_paused = true)]
async fn inside_reqwest_tracing_has_a_span_for_each_attempt_in_the_operations() {
    let server = twice_busy();
    let client = beside(tracing_layer(), Place::Inside, plain_builder(), &server);
    let tree = told_by(async { client.get(URL).send().await.expect("an answer") }).await;
    let (place, operation) = tree.operation();
    let busy = ["503".to_owned(), "ERROR".to_owned()];
    assert_eq!(
        ends(&tree.spans_in(place)),
        [busy.clone(), busy, ["200".into(), "-".into()]]
    );
    assert_eq!(tree.spans(REQUEST).len(), 3);
    assert_eq!(operation.all([STATUS, RESENDS]), ["200", "2"]);
}

#[tokio::test(start_paused = true)]
async fn on_both_sides_the_three_kinds_of_span_stand_in_each_other() {
    let server = twice_busy();
    let client = ClientBuilder::new(plain_http())
        .with(tracing_layer())
        .with(build(plain_builder()))
        .with(tracing_layer())
        .with(server.clone())
        .build();
    let tree = told_by(async { client.get(URL).send().await.expect("an answer") }).await;
    let (place, operation) = tree.operation();
    let outer = operation.parent.expect("a span around it");
    assert_eq!(tree.nodes()[outer].name, REQUEST);
    assert_eq!(
        (tree.spans_in(outer).len(), tree.spans_in(place).len()),
        (1, 3)
    );
    assert!(
        tree.nodes()
            .iter()
            .all(|node| node.is_event || node.is_closed)
    );
}

#[tokio::test(start_paused = true)]
async fn spans_of_a_dropped_operation_are_closed_on_both_sides() {
    for place in [Place::Outside, Place::Inside] {
        let server = Server::script([Step::Hang]);
        let client = beside(tracing_layer(), place, plain_builder(), &server);
        let tree = told_by(async {
            let sent = tokio::time::timeout(ms(50), client.get(URL).send()).await;
            assert!(sent.is_err());
        })
        .await;
        assert_eq!(
            (tree.spans(REQUEST).len(), tree.spans(OPERATION).len()),
            (1, 1)
        );
        assert!(
            tree.nodes()
                .iter()
                .all(|node| node.is_event || node.is_closed),
            "{place:?}"
        );
    }
}

/// Numbers the spans of attempts as OpenTelemetry has it.
struct Numbered;

impl ReqwestOtelSpanBackend for Numbered {
    fn on_request_start(request: &Request, extensions: &mut Extensions) -> Span {
        let span = reqwest_otel_span!(
            name = request.method().as_str(),
            request,
            http.request.resend_count = Empty
        );
        let number = extensions.get::<Attempt>().map(Attempt::number);
        if let Some(number @ 2..) = number {
            span.record(RESENDS, number - 1);
        }
        span
    }

    fn on_request_end(
        span: &Span,
        outcome: &reqwest_middleware::Result<Response>,
        _: &mut Extensions,
    ) {
        default_on_request_end(span, outcome);
    }
}

#[tokio::test(start_paused = true)]
async fn inside_a_backend_of_ones_own_can_number_the_spans_of_attempts() {
    let server = twice_busy();
    let layer = TracingMiddleware::<Numbered>::new();
    let client = beside(layer, Place::Inside, plain_builder(), &server);
    let tree = told_by(async { client.get(URL).send().await.expect("an answer") }).await;
    let numbers: Vec<_> = tree
        .spans(REQUEST)
        .into_iter()
        .map(|(_, span)| span.all([RESENDS]))
        .collect();
    assert_eq!(numbers, [["-"], ["1"], ["2"]]);
}

#[tokio::test(start_paused = true)]
async fn reqwest_tracing_shows_the_urls_of_errors_inside_and_none_outside() {
    let url = "http://orders.test/PATHTOK?api_key=SECRET";
    let refused = || Step::Refuse(refused().with_url(url.parse().expect("a URL")));
    for place in [Place::Outside, Place::Inside] {
        let server = Server::script([refused(), refused()]);
        let layer = plain_builder().max_attempts(2);
        let client = beside(tracing_layer(), place, layer, &server);
        let tree = told_by(async { client.get(url).send().await.expect_err("refused") }).await;
        let messages: Vec<_> = tree
            .spans(REQUEST)
            .into_iter()
            .filter_map(|(_, span)| Some(span.field("error.message")?.to_owned()))
            .collect();
        match place {
            Place::Outside => {
                let told = "GET orders.test: attempts exhausted after 2 attempt(s) in 100ms; \
                            never sent";
                assert!(
                    messages.len() == 1 && messages[0].starts_with(told),
                    "{messages:?}"
                );
                assert!(!tree.text().contains("SECRET") && !tree.text().contains("PATHTOK"));
            }
            // What that layer writes is not in our hands. README says so.
            Place::Inside => {
                assert!(
                    messages.iter().all(|message| message.contains(url)),
                    "{messages:?}"
                );
                assert_eq!(messages.len(), 2);
            }
        }
    }
}

// ---- credentials ----

/// Puts a new token into each request that passes, in place of the one that is there.
#[derive(Clone, Default)]
struct FreshToken {
    issued: Arc<AtomicU32>,
    /// The sum of the numbers of the attempts that it was told of.
    told: Arc<AtomicU32>,
}

#[async_trait::async_trait]
impl Middleware for FreshToken {
    async fn handle(
        &self,
        mut request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let number = self.issued.fetch_add(1, Ordering::Relaxed) + 1;
        let attempt = extensions.get().map_or(0, Attempt::number);
        self.told.fetch_add(attempt, Ordering::Relaxed);
        put(&mut request, number);
        next.run(request, extensions).await
    }
}

fn put(request: &mut Request, number: u32) {
    let token = HeaderValue::try_from(format!("Bearer token-{number}")).expect("a value");
    request.headers_mut().insert(AUTHORIZATION, token);
}

/// The tokens that the server was shown.
fn tokens(server: &Server) -> Vec<Vec<String>> {
    let seen = server.seen();
    seen.iter()
        .map(|seen| lines(&seen.headers, "authorization"))
        .collect()
}

#[tokio::test(start_paused = true)]
async fn inside_each_attempt_has_a_fresh_token_and_outside_all_have_the_same() {
    let sent = async |place: Place| {
        let server = Server::script([
            Step::status(503),
            Step::Refuse(refused()),
            Step::status(201),
        ]);
        let auth = FreshToken::default();
        let layer = plain_builder().key_contract(KeyContract::default());
        let client = beside(auth.clone(), place, layer, &server);
        told_by(async {
            let order = client.post(URL).body("order").bearer_auth("stale");
            assert_eq!(order.send().await.expect("an answer").status(), 201);
        })
        .await;
        // The key is the operation's, in both orders.
        let keys = server.key_lines();
        assert!(
            keys[0].len() == 1 && keys.iter().all(|key| *key == keys[0]),
            "{keys:?}"
        );
        (tokens(&server), auth.told.load(Ordering::Relaxed))
    };
    let [one, two, three] = ["1", "2", "3"].map(|number| vec![format!("Bearer token-{number}")]);
    // Inside it is told of attempts 1, 2 and 3, and outside of none.
    assert_eq!(
        sent(Place::Inside).await,
        (vec![one.clone(), two, three], 6)
    );
    assert_eq!(sent(Place::Outside).await, (vec![one; 3], 0));
}

/// Sends once more with a new token after a 401.
struct Renews;

#[async_trait::async_trait]
impl Middleware for Renews {
    async fn handle(
        &self,
        mut request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        put(&mut request, 1);
        let copy = request.try_clone();
        let answer = next.clone().run(request, extensions).await?;
        match copy {
            Some(mut copy) if answer.status() == StatusCode::UNAUTHORIZED => {
                put(&mut copy, 2);
                next.run(copy, extensions).await
            }
            _ => Ok(answer),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn outside_a_401_is_answered_with_a_new_token_and_the_same_key() {
    let server = Server::script([Step::status(401), Step::status(503), Step::status(201)]);
    let layer = plain_builder().key_contract(KeyContract::default());
    let client = beside(Renews, Place::Outside, layer, &server);
    told_by(async {
        let answer = client.post(URL).body("order").send().await;
        assert_eq!(answer.expect("an answer").status(), 201);
    })
    .await;
    let [one, two] = ["1", "2"].map(|number| vec![format!("Bearer token-{number}")]);
    assert_eq!(tokens(&server), [one, two.clone(), two]);
    let keys = server.key_lines();
    assert!(keys.iter().all(|key| *key == keys[0]), "{keys:?}");
}

#[tokio::test(start_paused = true)]
async fn outside_an_order_without_a_key_is_not_sent_again_with_a_new_token() {
    let server = Server::script([Step::status(401)]);
    let client = beside(Renews, Place::Outside, plain_builder(), &server);
    told_by(async {
        let error = client.post(URL).body("order").send().await;
        let error = error.expect_err("it is not sent again");
        let stop = error.retry_error().expect("ours").stop();
        assert_eq!(stop, StopReason::UnsafeToRepeat);
    })
    .await;
    assert_eq!(server.sends(), 1);
}

// ---- a token that is had by a call through a client with a layer of its own ----

/// What makes a repeat of the refresh the same refresh.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Refresh {
    /// Nothing: a POST like any other.
    Plain,
    /// `Idempotent(true)`.
    Idempotent,
    /// A key of the caller's own.
    Keyed,
    /// A key that is made for each refresh anew.
    Contract,
}

impl Refresh {
    const ALL: [Self; 4] = [Self::Plain, Self::Idempotent, Self::Keyed, Self::Contract];

    fn client(self, server: &Server) -> ClientWithMiddleware {
        let layer = quick(ms(100));
        server.client([build(match self {
            Self::Contract => layer.key_contract(KeyContract::default()),
            _ => layer,
        })])
    }

    fn request(self, client: &ClientWithMiddleware) -> RequestBuilder {
        let grant = client.post("http://tokens.test/").body("grant");
        match self {
            Self::Plain | Self::Contract => grant,
            Self::Idempotent => grant.with_extension(Idempotent(true)),
            Self::Keyed => grant.with_extension(key("refresh-17")),
        }
    }
}

/// Three attempts of so long.
fn quick(attempt: Duration) -> RetryMiddlewareBuilder {
    plain_builder().max_attempts(3).attempt_timeout(attempt)
}

/// Has a token by a refresh for each request, and passes on what that fails with.
struct Refreshes {
    refresh: Refresh,
    client: ClientWithMiddleware,
}

#[async_trait::async_trait]
impl Middleware for Refreshes {
    async fn handle(
        &self,
        mut request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let answer = self.refresh.request(&self.client).send().await?;
        answer.error_for_status()?;
        put(&mut request, 1);
        next.run(request, extensions).await
    }
}

/// How the refresh fails.
#[derive(Clone, Copy, Debug)]
enum Fails {
    Refused,
    Busy,
    Silent,
}

impl Fails {
    const ALL: [Self; 3] = [Self::Refused, Self::Busy, Self::Silent];

    fn step(self) -> Step {
        match self {
            Self::Refused => Step::Refuse(refused()),
            Self::Busy => Step::status(503),
            Self::Silent => Step::Hang,
        }
    }
}

/// What became of one order.
#[derive(Debug, PartialEq)]
struct Became {
    refreshes: usize,
    orders: usize,
    stop: Option<StopReason>,
}

fn became(refreshes: usize, orders: usize, stop: impl Into<Option<StopReason>>) -> Became {
    let stop = stop.into();
    Became {
        refreshes,
        orders,
        stop,
    }
}

/// An order with a key of its own, whose refresh fails so many times.
async fn order(refresh: Refresh, fails: Fails, times: usize) -> Became {
    let tokens = Server::script((0..times).map(|_| fails.step())).then_always(200);
    let server = Server::always(201);
    let auth = Refreshes {
        refresh,
        client: refresh.client(&tokens),
    };
    let client = beside(auth, Place::Inside, quick(Duration::from_secs(1)), &server);
    let (tree, _listening) = Tree::grow();
    let order = client.post(URL).body("order");
    let result = order.with_extension(key("order-17")).send().await;
    let stop = support::report(&result).and_then(|report| report.stop());
    assert_eq!(result.is_ok(), server.sends() > 0);
    // Each refresh is told of in a span of its own, within that of the order.
    let (place, _) = tree.spans(OPERATION).remove(0);
    assert_eq!(tree.spans_in(place).len() + 1, tree.spans(OPERATION).len());
    became(tokens.sends(), server.sends(), stop)
}

#[tokio::test(start_paused = true)]
async fn a_refresh_that_fails_once_is_made_again_where_a_repeat_is_the_same_refresh() {
    for fails in Fails::ALL {
        for refresh in [Refresh::Idempotent, Refresh::Keyed, Refresh::Contract] {
            let became = order(refresh, fails, 1).await;
            assert_eq!(became, self::became(2, 1, None), "{refresh:?} {fails:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_plain_refresh_is_made_again_only_where_it_was_never_sent() {
    let became = order(Refresh::Plain, Fails::Refused, 1).await;
    assert_eq!(became, self::became(2, 1, None));
    // It may have used its grant up, so neither layer makes another.
    for fails in [Fails::Busy, Fails::Silent] {
        let became = order(Refresh::Plain, fails, 1).await;
        let stop = StopReason::SpentBelow;
        assert_eq!(became, self::became(1, 0, stop), "{fails:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_refresh_that_always_fails_is_never_made_more_often_than_one_layer_allows() {
    for fails in Fails::ALL {
        for refresh in Refresh::ALL {
            let may_be_used_up = refresh == Refresh::Plain && !matches!(fails, Fails::Refused);
            let refreshes = if may_be_used_up { 1 } else { 3 };
            let became = order(refresh, fails, 12).await;
            let sent = (became.refreshes, became.orders);
            assert_eq!(sent, (refreshes, 0), "{refresh:?} {fails:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_refresh_failed_with_is_found_in_the_error_of_the_order() {
    let tokens = Server::script([Step::Hang]);
    let auth = Refreshes {
        refresh: Refresh::Plain,
        client: Refresh::Plain.client(&tokens),
    };
    let server = Server::script([]);
    let client = beside(auth, Place::Inside, quick(Duration::from_secs(1)), &server);
    told_by(async {
        let error = client.get(URL).send().await.expect_err("no token");
        let ours = error.retry_error().expect("ours");
        assert_eq!(ours.report().host(), "orders.test");
        let below = std::error::Error::source(ours).expect("a cause");
        assert!(
            below.to_string().starts_with("POST tokens.test: "),
            "{below}"
        );
    })
    .await;
}

/// For all that can be seen the layer may have sent another request in place of this one.
#[tokio::test(start_paused = true)]
async fn an_order_whose_refresh_failed_after_a_wait_is_told_as_unknown() {
    let tokens = Server::script([Step::Hang]);
    let auth = Refreshes {
        refresh: Refresh::Plain,
        client: Refresh::Plain.client(&tokens),
    };
    let server = Server::script([]);
    let client = beside(auth, Place::Inside, quick(Duration::from_secs(1)), &server);
    told_by(async {
        let order = client.post(URL).body("order").send().await;
        let error = order.expect_err("no token");
        let certainty = error.retry_error().expect("ours").certainty();
        assert_eq!(certainty, Certainty::Unknown);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn outside_a_refresh_is_made_once_and_retries_by_itself() {
    let tokens = Server::script([Step::status(503), Step::status(200)]);
    let auth = Refreshes {
        refresh: Refresh::Idempotent,
        client: Refresh::Idempotent.client(&tokens),
    };
    let server = Server::script([Step::status(503), Step::status(201)]);
    let client = beside(auth, Place::Outside, plain_builder(), &server);
    told_by(async {
        let order = client
            .post(URL)
            .body("order")
            .with_extension(key("order-17"));
        assert_eq!(order.send().await.expect("an answer").status(), 201);
    })
    .await;
    assert_eq!((tokens.sends(), server.sends()), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn outside_an_order_whose_token_could_not_be_had_is_no_operation() {
    let tokens = Server::script([Step::Refuse(refused())]);
    let auth = Refreshes {
        refresh: Refresh::Plain,
        client: tokens.client([build(plain_builder().max_attempts(1))]),
    };
    let client = beside(auth, Place::Outside, plain_builder(), &Server::script([]));
    let tree = told_by(async {
        let order = client.post(URL).body("order").send().await;
        let error = order.expect_err("no token");
        let refresh = error.retry_error().expect("the refresh's");
        assert_eq!(refresh.report().host(), "tokens.test");
        assert_eq!(refresh.certainty(), Certainty::NotSent);
    })
    .await;
    let (_, refresh) = tree.operation();
    assert_eq!(refresh.field("server.address"), Some("tokens.test"));
}
