//! The span of each operation and the events in it, as OpenTelemetry's conventions for HTTP clients name
//! them. In a binary of its own: see `tests/support/tree.rs`.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod support;
#[path = "support/tree.rs"]
mod tree;

use std::future::Future;
use std::sync::Arc;

use http::{Extensions, Method};
use reqwest::{Body, Request, Response};
use reqwest_idempotent_retry::{
    Backoff, BodyFactory, CancellationToken, CircuitBreaker, Deadline, Idempotent, KeyContract,
    LoadControl, RetryBudget, RetryErrorExt, RetryMiddleware, RetryMiddlewareBuilder,
    RetryObserver, RetryOverride, RetryReport,
};
use reqwest_middleware::{ClientBuilder, Error, Middleware, Next, RequestBuilder};
use support::{
    NeverComes, Server, Step, URL, key, ms, plain_builder, plain_http, read_and_closed, refused,
    secs,
};
use tracing::{Instrument, Level, info, info_span};
use tree::{Node, OPERATION, Tree};

const RESENDS: &str = "http.request.resend_count";
const STATUS: &str = "http.response.status_code";
const ERROR: &str = "error.type";

fn build(builder: RetryMiddlewareBuilder) -> RetryMiddleware {
    builder.build().expect("valid settings")
}

fn get(server: &Server, layer: RetryMiddlewareBuilder) -> RequestBuilder {
    server.client([build(layer)]).get(URL)
}

fn post(server: &Server, layer: RetryMiddlewareBuilder) -> RequestBuilder {
    server.client([build(layer)]).post(URL).body("order")
}

/// What this work has told.
async fn told_by(work: impl Future) -> Tree {
    let (tree, listening) = Tree::grow();
    work.await;
    drop(listening);
    tree
}

/// What the operation said of its end: resends, status, error, certainty.
async fn end_of(work: impl Future) -> [String; 4] {
    let tree = told_by(work).await;
    let (place, span) = tree.operation();
    assert!(span.is_closed);
    assert_eq!(ends(&tree.events_in(place)), 1, "{}", tree.text());
    span.all([RESENDS, STATUS, ERROR, "certainty"])
}

fn ends(events: &[Node]) -> usize {
    let is_end = |event: &&Node| event.name.starts_with("operation ");
    events.iter().filter(is_end).count()
}

/// The event that an operation ends with: its message, level and reason.
async fn last_word_of(work: impl Future) -> (String, Level, String) {
    let tree = told_by(work).await;
    let (place, _) = tree.operation();
    let last = tree.events_in(place).pop().expect("an event");
    let reason = last.field("reason").unwrap_or("-").to_owned();
    (last.name, last.level, reason)
}

async fn dropped_after(millis: u64, request: RequestBuilder) {
    let sent = tokio::time::timeout(ms(millis), request.send()).await;
    assert!(sent.is_err(), "it is still under way");
}

async fn cancelled_after(millis: u64, request: RequestBuilder) {
    let token = CancellationToken::new();
    let request = request.with_extension(token.clone());
    let (sent, ()) = tokio::join!(request.send(), async {
        tokio::time::sleep(ms(millis)).await;
        token.cancel();
    });
    sent.expect_err("cancelled");
}

// ---- the span ----

#[tokio::test(start_paused = true)]
async fn an_operation_is_one_span_named_as_opentelemetry_has_it() {
    let server = Server::script([Step::status(503), Step::status(200)]);
    let client = server.client([build(plain_builder())]);
    let url = "https://orders.test:8443/orders";
    let tree = told_by(async { client.get(url).send().await.expect("an answer") }).await;
    let (_, span) = tree.operation();
    assert_eq!((span.level, span.parent), (Level::INFO, None));
    assert_eq!(
        span.all([
            "otel.kind",
            "otel.name",
            "http.request.method",
            "server.address",
            "server.port",
        ]),
        ["internal", "GET", "GET", "orders.test", "8443"]
    );
    assert_eq!(
        span.field_names(),
        [
            "certainty",
            "http.request.method",
            RESENDS,
            STATUS,
            "otel.kind",
            "otel.name",
            "server.address",
            "server.port",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn the_port_is_the_schemes_own_where_the_url_names_none() {
    for (url, port) in [("http://a.test/", "80"), ("https://a.test/", "443")] {
        let server = Server::always(200);
        let client = server.client([build(plain_builder())]);
        let tree = told_by(async { client.get(url).send().await.expect("an answer") }).await;
        assert_eq!(tree.operation().1.field("server.port"), Some(port));
    }
}

#[tokio::test(start_paused = true)]
async fn at_its_end_the_span_says_resends_status_and_error() {
    let all = |make: fn() -> Step| Server::script((0..4).map(|_| make()));
    let quick = || plain_builder().attempt_timeout(ms(50));

    let server = Server::script([Step::status(200)]);
    let plain = end_of(get(&server, plain_builder()).send()).await;
    assert_eq!(plain, ["-", "200", "-", "answered"]);

    let server = Server::script([Step::status(503), Step::Hang, Step::status(200)]);
    let after_two = end_of(get(&server, quick()).send()).await;
    assert_eq!(after_two, ["2", "200", "-", "answered"]);

    let server = Server::script([Step::status(404)]);
    let refused_once = end_of(get(&server, plain_builder()).send()).await;
    assert_eq!(refused_once, ["-", "404", "404", "answered"]);

    let exhausted = end_of(get(&Server::always(503), plain_builder()).send()).await;
    assert_eq!(exhausted, ["3", "503", "503", "answered"]);

    let keyed = post(&Server::always(503), plain_builder()).with_extension(key("order-17"));
    let exhausted = end_of(keyed.send()).await;
    assert_eq!(exhausted, ["3", "503", "503", "outcome unknown"]);

    let silent = end_of(get(&all(|| Step::Hang), quick()).send()).await;
    assert_eq!(silent, ["3", "-", "timeout", "outcome unknown"]);

    let closed = all(|| Step::Refuse(refused()));
    let closed = end_of(get(&closed, plain_builder()).send()).await;
    assert_eq!(closed, ["3", "-", "connect", "never sent"]);

    let broken = all(|| Step::Fail(read_and_closed()));
    let broken = end_of(get(&broken, plain_builder()).send()).await;
    assert_eq!(broken, ["3", "-", "connection", "outcome unknown"]);

    let half = all(|| Step::Break(200));
    let half = end_of(get(&half, plain_builder().buffer_response(9)).send()).await;
    assert_eq!(half, ["3", "200", "body", "answered"]);

    // What was last is said: here a silence, and no status of an answer before it.
    let server = Server::script([Step::status(503), Step::Hang]);
    let last = end_of(get(&server, quick().max_attempts(2)).send()).await;
    assert_eq!(last, ["1", "-", "timeout", "outcome unknown"]);
}

#[tokio::test(start_paused = true)]
async fn where_nothing_was_sent_the_error_is_the_reason() {
    let request = || get(&Server::script([]), plain_builder());
    let cancelled = CancellationToken::new();
    cancelled.cancel();
    for (request, reason) in [
        (
            request().with_extension(RetryOverride::new().max_attempts(0)),
            "invalid_input",
        ),
        (
            request().with_extension(Deadline::after(ms(0))),
            "deadline_too_close",
        ),
        (request().with_extension(cancelled), "cancelled"),
    ] {
        let end = end_of(request.send()).await;
        assert_eq!(end, ["-", "-", reason, "never sent"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_or_cancelled_operation_says_its_end_too() {
    let silent = || Server::script([Step::Hang]);
    let busy = || Server::script([Step::status(503)]);

    let in_flight = dropped_after(50, post(&silent(), plain_builder()));
    let in_flight = end_of(in_flight).await;
    assert_eq!(in_flight, ["-", "-", "cancelled", "outcome unknown"]);
    let in_flight = cancelled_after(50, post(&silent(), plain_builder()));
    let in_flight = end_of(in_flight).await;
    assert_eq!(in_flight, ["-", "-", "cancelled", "outcome unknown"]);

    let unconnected = Server::script([Step::Connect]);
    let unconnected = end_of(dropped_after(50, post(&unconnected, plain_builder()))).await;
    assert_eq!(unconnected, ["-", "-", "cancelled", "never sent"]);

    let in_a_wait = end_of(dropped_after(50, get(&busy(), plain_builder()))).await;
    assert_eq!(in_a_wait, ["-", "503", "cancelled", "answered"]);
    let in_a_wait = end_of(cancelled_after(50, get(&busy(), plain_builder()))).await;
    assert_eq!(in_a_wait, ["-", "503", "cancelled", "answered"]);
}

#[tokio::test(start_paused = true)]
async fn an_operation_that_is_never_polled_is_none() {
    let tree = told_by(async { drop(get(&Server::script([]), plain_builder()).send()) }).await;
    assert!(tree.nodes().is_empty(), "{}", tree.text());
}

#[tokio::test(start_paused = true)]
async fn the_span_ends_with_the_operation_and_not_with_the_body_of_its_answer() {
    let (tree, _listening) = Tree::grow();
    let server = Server::script([Step::Stall(200)]);
    let answer = get(&server, plain_builder()).send().await;
    assert!(tree.operation().1.is_closed);
    drop(answer);
}

// ---- the events in it ----

#[tokio::test(start_paused = true)]
async fn each_attempt_is_an_event_in_the_span_with_the_resends_before_it() {
    let server = Server::script([
        Step::after(20, 503, &[]),
        Step::Refuse(refused()),
        Step::after(5, 200, &[]),
    ]);
    let request = get(&server, plain_builder().max_attempts(3));
    let tree = told_by(request.send()).await;
    let (place, _) = tree.operation();
    let events = tree.events_in(place);
    let names: Vec<&str> = events.iter().map(|event| event.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "attempt ended",
            "waiting before the next attempt",
            "attempt ended",
            "waiting before the next attempt",
            "attempt ended",
            "operation done",
        ]
    );
    let attempts: Vec<_> = attempts(&events)
        .map(|event| event.all([RESENDS, STATUS, ERROR, "certainty", "took"]))
        .collect();
    assert_eq!(
        attempts,
        [
            ["-", "503", "503", "answered", "20ms"],
            ["1", "-", "connect", "never sent", "0ns"],
            ["2", "200", "-", "answered", "5ms"],
        ]
    );
    for attempt in self::attempts(&events) {
        let named = attempt.all(["http.request.method", "server.address"]);
        assert_eq!(named, ["GET", "orders.test"]);
        assert_eq!(attempt.level, Level::DEBUG);
    }
    let waits: Vec<_> = events.iter().filter_map(|it| it.field("wait")).collect();
    assert_eq!(waits, ["100ms", "200ms"]);
    let end = events.last().expect("the end");
    assert_eq!(
        end.all(["attempts", "elapsed", "certainty"]),
        ["3", "325ms", "answered"]
    );
}

fn attempts(events: &[Node]) -> impl Iterator<Item = &Node> {
    let is_attempt = |event: &&Node| event.name == "attempt ended";
    events.iter().filter(is_attempt)
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_was_dropped_is_an_event_as_well() {
    let silent = Server::script([Step::status(503), Step::Hang]);
    let tree = told_by(dropped_after(300, get(&silent, plain_builder()))).await;
    let (place, _) = tree.operation();
    let events = tree.events_in(place);
    let attempts: Vec<_> = attempts(&events)
        .map(|event| event.all([RESENDS, ERROR, "took"]))
        .collect();
    assert_eq!(attempts, [["-", "503", "0ns"], ["1", "cancelled", "200ms"]]);
}

#[tokio::test(start_paused = true)]
async fn the_last_event_says_why_and_is_louder_where_somebody_must_look() {
    let busy = || Server::always(503);
    let silent = || Server::script([Step::Hang]);
    let paid = |tokens| {
        let budget = Arc::new(RetryBudget::fixed(tokens));
        RetryMiddleware::builder().budget(budget)
    };
    let stopped = |level, reason: &str| ("operation stopped".to_owned(), level, reason.to_owned());

    let done = last_word_of(get(&Server::always(200), plain_builder()).send()).await;
    assert_eq!(done, ("operation done".into(), Level::DEBUG, "-".into()));
    let word = last_word_of(get(&busy(), plain_builder()).send()).await;
    assert_eq!(word, stopped(Level::INFO, "attempts exhausted"));
    let word = last_word_of(get(&busy(), paid(0)).send()).await;
    assert_eq!(word, stopped(Level::WARN, "retry budget exhausted"));
    let word = last_word_of(post(&busy(), plain_builder()).send()).await;
    assert_eq!(word, stopped(Level::WARN, "unsafe to repeat"));
    let word = last_word_of(dropped_after(50, post(&silent(), plain_builder()))).await;
    assert_eq!(word, stopped(Level::WARN, "cancelled"));
    let word = last_word_of(dropped_after(50, get(&busy(), plain_builder()))).await;
    assert_eq!(word, stopped(Level::INFO, "cancelled"));
}

#[tokio::test(start_paused = true)]
async fn a_breaker_is_told_of_in_the_span_of_the_operation_that_turned_it() {
    let breaker = CircuitBreaker::builder()
        .consecutive_failures(1)
        .open_for(Backoff::fixed([secs(1)]))
        .build()
        .expect("valid");
    let load = LoadControl::builder()
        .breaker(breaker)
        .build()
        .expect("valid");
    let layer = plain_builder().max_attempts(1).load_control(Arc::new(load));
    let server = Server::script([Step::status(503), Step::status(200)]);
    let client = server.client([build(layer)]);
    let tree = told_by(async {
        client.get(URL).send().await.expect("an answer");
        tokio::time::sleep(secs(1)).await;
        client.get(URL).send().await.expect("an answer");
    })
    .await;
    let turns: Vec<_> = tree
        .spans(OPERATION)
        .into_iter()
        .map(|(place, _)| {
            let mut events = tree.events_in(place);
            events.retain(|event| event.name.starts_with("circuit breaker"));
            let turn = events.pop().expect("a turn");
            (turn.name.clone(), turn.level, turn.all(["host", "wait"]))
        })
        .collect();
    assert_eq!(
        turns,
        [
            (
                "circuit breaker opened".to_owned(),
                Level::WARN,
                ["orders.test".to_owned(), "1s".to_owned()]
            ),
            (
                "circuit breaker closed".to_owned(),
                Level::INFO,
                ["orders.test".to_owned(), "-".to_owned()]
            ),
        ]
    );
}

// ---- the spans around it and below it ----

/// A layer with a span of its own for each request, and an event in it.
struct Notes;

#[async_trait::async_trait]
impl Middleware for Notes {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let below = async {
            let result = next.run(request, extensions).await;
            tracing::info!("below");
            result
        };
        below.instrument(info_span!("note")).await
    }
}

#[tokio::test(start_paused = true)]
async fn the_span_stands_in_the_callers_and_around_those_of_the_layers_below() {
    let server = Server::script([Step::status(503), Step::Hang, Step::status(200)]);
    let client = ClientBuilder::new(plain_http())
        .with(build(plain_builder().attempt_timeout(ms(50))))
        .with(Notes)
        .with(server.clone())
        .build();
    let handler = async {
        let send = client.get(URL).send();
        send.instrument(info_span!("handler")).await
    };
    let tree = told_by(handler).await;
    let (operation, span) = tree.operation();
    let (handler, _) = tree.spans("handler").remove(0);
    assert_eq!(span.parent, Some(handler));
    let notes = tree.spans_in(operation);
    assert_eq!((notes.len(), tree.spans("note").len()), (3, 3));
    assert!(notes.iter().all(|(_, note)| note.is_closed));
    // The events of the layer are in its own span, ours are not.
    let below: Vec<_> = notes
        .iter()
        .map(|&(place, _)| tree.events_in(place).len())
        .collect();
    assert_eq!(below, [1, 0, 1]);
    assert!(tree.events_in(handler).is_empty(), "{}", tree.text());
}

#[tokio::test(start_paused = true)]
async fn an_operation_that_is_dropped_elsewhere_still_ends_in_its_own_span() {
    let server = Server::script([Step::Hang]);
    let (tree, _listening) = Tree::grow();
    let mut sent = Box::pin(post(&server, plain_builder()).send());
    assert!(tokio::time::timeout(ms(50), &mut sent).await.is_err());
    info_span!("elsewhere").in_scope(|| drop(sent));
    let (place, span) = tree.operation();
    let (elsewhere, _) = tree.spans("elsewhere").remove(0);
    assert_eq!(ends(&tree.events_in(place)), 1);
    assert_eq!((tree.events_in(elsewhere).len(), span.is_closed), (0, true));
}

/// Says so when an operation ends.
struct SaysSo;

impl RetryObserver for SaysSo {
    fn operation_ended(&self, _: &RetryReport) {
        info!("an observer was told");
    }
}

#[tokio::test(start_paused = true)]
async fn observers_are_told_in_the_span_of_the_operation() {
    let observed = plain_builder()
        .deadline(ms(500))
        .buffer_request(1000)
        .observer(Arc::new(SaysSo));
    let put = |body| {
        let server = Server::script([Step::Hang]);
        server.client([build(observed.clone())]).put(URL).body(body)
    };
    let is_told = |tree: &Tree| {
        let (place, _) = tree.operation();
        let told = |event: &Node| event.name.contains("an observer was told");
        assert!(tree.events_in(place).iter().any(told), "{}", tree.text());
    };
    is_told(&told_by(put(Body::from("order")).send()).await);
    is_told(&told_by(put(Body::wrap(NeverComes)).send()).await);
    let two_keys = put(Body::from("order"))
        .with_extension(key("one"))
        .header("idempotency-key", "another");
    is_told(&told_by(two_keys.send()).await);

    let (tree, _listening) = Tree::grow();
    let mut sent = Box::pin(put(Body::from("order")).send());
    assert!(tokio::time::timeout(ms(50), &mut sent).await.is_err());
    info_span!("elsewhere").in_scope(|| drop(sent));
    is_told(&tree);
}

#[tokio::test(start_paused = true)]
async fn operations_that_run_at_once_keep_their_events_apart() {
    let server = Server::always(503);
    let client = server.client([build(plain_builder())]);
    let send = async |host: &str| {
        let request = client.get(format!("http://{host}/"));
        let limits = RetryOverride::new().max_attempts(2);
        request.with_extension(limits).send().await
    };
    let tree =
        told_by(async { tokio::join!(send("a.test"), send("b.test"), send("c.test")) }).await;
    let spans = tree.spans(OPERATION);
    assert_eq!(spans.len(), 3);
    for (place, span) in spans {
        let events = tree.events_in(place);
        let hosts: Vec<_> = attempts(&events)
            .map(|event| event.field("server.address"))
            .collect();
        assert_eq!(hosts, [span.field("server.address"); 2]);
    }
}

#[tokio::test(start_paused = true)]
async fn several_layers_on_one_client_are_one_operation_and_one_span() {
    let server = Server::script([Step::status(503), Step::status(200)]);
    let client = server.client([build(plain_builder()), build(plain_builder())]);
    let end = end_of(client.get(URL).send()).await;
    assert_eq!(end, ["1", "200", "-", "answered"]);
}

// ---- what is in none of them ----

/// A layer that fails with a text of its own.
struct Fails;

#[async_trait::async_trait]
impl Middleware for Fails {
    async fn handle(
        &self,
        _: Request,
        _: &mut Extensions,
        _: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        Err(Error::middleware(std::io::Error::other("LAYERTEXT")))
    }
}

const SECRET_URL: &str = "http://USER:PASSWORD@orders.test/t/PATHTOK?api_key=QUERY#FRAGMENT";

const SECRETS: [&str; 12] = [
    "USER",
    "PASSWORD",
    "PATHTOK",
    "QUERY",
    "FRAGMENT",
    "CREDENTIAL",
    "BODYBYTES",
    "KEYKEYKEYKEY",
    "ANSWERHEADER",
    "LAYERTEXT",
    "FACTORYTEXT",
    "OTHERKEY",
];

/// An order with secrets in every part of it.
fn secretly(server: &Server, layer: RetryMiddlewareBuilder) -> RequestBuilder {
    server
        .client([build(layer)])
        .post(SECRET_URL)
        .body("BODYBYTES")
        .bearer_auth("CREDENTIAL")
        .with_extension(key("KEYKEYKEYKEY"))
}

fn refused_at_the_secret_url() -> reqwest::Error {
    refused().with_url(SECRET_URL.parse().expect("a URL"))
}

#[tokio::test(start_paused = true)]
async fn no_span_and_no_event_shows_path_query_userinfo_headers_body_or_key() {
    let answer = || Step::after(0, 503, &[("x-answer", "ANSWERHEADER")]);
    let every_end = async {
        let server = Server::script([
            Step::Refuse(refused_at_the_secret_url()),
            answer(),
            Step::from(SECRET_URL, 404, &[("location", "/PATHTOK")]),
        ]);
        let _ = secretly(&server, plain_builder()).send().await;

        let failing = Server::script([Step::Fail(refused_at_the_secret_url())]);
        let _ = secretly(&failing, plain_builder().max_attempts(1))
            .send()
            .await;

        let silent = || Server::script([Step::Hang]);
        dropped_after(50, secretly(&silent(), plain_builder())).await;
        dropped_after(50, secretly(&Server::script([answer()]), plain_builder())).await;
        cancelled_after(50, secretly(&silent(), plain_builder())).await;

        let other_key = secretly(&silent(), plain_builder()).header("idempotency-key", "OTHERKEY");
        other_key.send().await.expect_err("two keys");
        let unfit = secretly(&silent(), plain_builder()).header("idempotency-key", "OTHERKEY\"");
        unfit.send().await.expect_err("no key");

        let no_body = async || Err::<reqwest::Body, _>(std::io::Error::other("FACTORYTEXT"));
        let factory =
            secretly(&silent(), plain_builder()).with_extension(BodyFactory::new(no_body));
        factory.send().await.expect_err("no body");

        let layers = ClientBuilder::new(plain_http())
            .with(build(plain_builder().key_contract(KeyContract::default())))
            .with(Fails)
            .build();
        let failed = layers.post(SECRET_URL).body("BODYBYTES").send().await;
        failed
            .expect_err("the layer fails")
            .retry_error()
            .expect("ours");

        // A request builder takes user and password out of the URL; this one has them there to the end.
        let url = SECRET_URL.parse().expect("a URL");
        let whole = Request::new(Method::POST, url);
        let busy = Server::script([answer()]).client([build(plain_builder())]);
        busy.execute(whole).await.expect("an answer");

        let unsafe_one = Server::script([answer()]);
        let request = secretly(&unsafe_one, plain_builder()).with_extension(Idempotent(false));
        request.send().await.expect("an answer");
    };
    let text = told_by(every_end).await.text();
    assert!(
        text.contains("orders.test") && text.contains("POST"),
        "{text}"
    );
    assert!(text.matches("operation stopped").count() > 8, "{text}");
    for secret in SECRETS {
        assert!(!text.contains(secret), "{secret} in {text}");
    }
}
