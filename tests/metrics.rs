//! The figures that the crate gives to the `metrics` facade: every one by its exact value after a known
//! history.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use http::{Extensions, Method, StatusCode};
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use metrics_exporter_prometheus::PrometheusBuilder;
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use reqwest::{Request, Response};
use reqwest_idempotent_retry::server::ContextLayer;
use reqwest_idempotent_retry::{
    Attempt, Backoff, CancellationToken, CircuitBreaker, Deadline, FirstSends, LoadControl,
    RetryBudget, RetryMiddleware, RetryMiddlewareBuilder, RetryOverride, StopReason,
};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Middleware, Next, RequestBuilder};
use support::{Server, Step, URL, key, lock, ms, plain_builder, plain_http, refused, secs};
use tower::{Service, ServiceBuilder, service_fn};

const PREFIX: &str = "idempotent_retry_";

fn build(builder: RetryMiddlewareBuilder) -> RetryMiddleware {
    builder.build().expect("valid settings")
}

/// The one client of a test is called `orders`.
fn orders() -> RetryMiddlewareBuilder {
    plain_builder().name("orders")
}

fn get(server: &Server, layer: RetryMiddlewareBuilder) -> RequestBuilder {
    server.client([build(layer)]).get(URL)
}

fn post(server: &Server, layer: RetryMiddlewareBuilder) -> RequestBuilder {
    server.client([build(layer)]).post(URL).body("order")
}

async fn dropped_after(millis: u64, request: RequestBuilder) {
    let sent = tokio::time::timeout(ms(millis), request.send()).await;
    assert!(sent.is_err(), "it is still under way");
}

/// Every series that has moved since it was last asked, in order, as a line each: counters by how much,
/// gauges as they are, histograms with each of their values.
fn moved(recorder: &DebuggingRecorder) -> Vec<String> {
    let series = recorder.snapshotter().snapshot().into_vec();
    let mut lines: Vec<String> = series
        .into_iter()
        .filter_map(|(key, _, _, value)| Some(format!("{} {}", name_of(key.key()), shown(value)?)))
        .collect();
    lines.sort();
    lines
}

/// `name{label=value,…}`, without what all names begin with.
fn name_of(key: &Key) -> String {
    let labels: Vec<String> = key
        .labels()
        .map(|label| format!("{}={}", label.key(), label.value()))
        .collect();
    let name = key.name().strip_prefix(PREFIX).expect("our prefix");
    format!("{name}{{{}}}", labels.join(","))
}

fn shown(value: DebugValue) -> Option<String> {
    match value {
        DebugValue::Counter(0) => None,
        DebugValue::Counter(count) => Some(count.to_string()),
        DebugValue::Gauge(level) => Some(level.to_string()),
        DebugValue::Histogram(values) if values.is_empty() => None,
        DebugValue::Histogram(values) => {
            let values: Vec<String> = values.iter().map(ToString::to_string).collect();
            Some(format!("[{}]", values.join(", ")))
        }
    }
}

// ---- histories ----

#[tokio::test(start_paused = true)]
async fn a_plain_success_is_one_first_send_and_no_retry() {
    let recorder = DebuggingRecorder::new();
    let _here = metrics::set_default_local_recorder(&recorder);
    let server = Server::script([Step::after(40, 200, &[])]);
    let answer = get(&server, orders()).send().await;
    answer.expect("an answer");
    assert_eq!(
        moved(&recorder),
        [
            "attempts_total{client=orders,class=2xx} 1",
            "elapsed_seconds{client=orders} [0.04]",
            "first_sends_total{client=orders,method=GET} 1",
            "operations_total{client=orders,method=GET,certainty=answered} 1",
            "wait_seconds{client=orders} [0]",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn retries_are_told_by_what_came_before_and_waits_by_the_time_with_nothing_in_flight() {
    let recorder = DebuggingRecorder::new();
    let _here = metrics::set_default_local_recorder(&recorder);
    let server = Server::script([
        Step::after(20, 503, &[]),
        Step::Refuse(refused()),
        Step::Hang,
        Step::after(30, 200, &[]),
    ]);
    let request = get(&server, orders().attempt_timeout(ms(50)));
    request.send().await.expect("an answer");
    assert_eq!(
        moved(&recorder),
        [
            "attempts_total{client=orders,class=2xx} 1",
            "attempts_total{client=orders,class=5xx} 1",
            "attempts_total{client=orders,class=connect} 1",
            "attempts_total{client=orders,class=timeout} 1",
            "elapsed_seconds{client=orders} [0.8]",
            "first_sends_total{client=orders,method=GET} 1",
            "operations_total{client=orders,method=GET,certainty=answered} 1",
            "retries_total{client=orders,class=5xx} 1",
            "retries_total{client=orders,class=connect} 1",
            "retries_total{client=orders,class=timeout} 1",
            // 100 + 200 + 400 ms between them.
            "wait_seconds{client=orders} [0.7]",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn exhausted_attempts_are_a_stop() {
    let recorder = DebuggingRecorder::new();
    let _here = metrics::set_default_local_recorder(&recorder);
    let request = get(&Server::always(429), orders().max_attempts(2));
    request.send().await.expect("an answer");
    assert_eq!(
        moved(&recorder),
        [
            "attempts_total{client=orders,class=4xx} 2",
            "elapsed_seconds{client=orders} [0.1]",
            "first_sends_total{client=orders,method=GET} 1",
            "operations_total{client=orders,method=GET,certainty=answered} 1",
            "retries_total{client=orders,class=4xx} 1",
            "stops_total{client=orders,reason=attempts_exhausted} 1",
            "wait_seconds{client=orders} [0.1]",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn a_refusal_by_the_budget_is_counted_and_the_balance_shown() {
    let recorder = DebuggingRecorder::new();
    let _here = metrics::set_default_local_recorder(&recorder);
    let paid = |budget| orders().budget(budget);
    let budget = Arc::new(RetryBudget::fixed(1));
    let request = get(&Server::always(503), paid(Arc::clone(&budget)));
    request.send().await.expect("an answer");
    assert_eq!(
        moved(&recorder),
        [
            "attempts_total{client=orders,class=5xx} 2",
            "budget_balance{client=orders} 0",
            "budget_refusals_total{client=orders} 1",
            "elapsed_seconds{client=orders} [0.1]",
            "first_sends_total{client=orders,method=GET} 1",
            "operations_total{client=orders,method=GET,certainty=answered} 1",
            "retries_total{client=orders,class=5xx} 1",
            "stops_total{client=orders,reason=budget_exhausted} 1",
            "wait_seconds{client=orders} [0.1]",
        ]
    );
    // A token that comes back is in the balance again: the operation is dropped in its wait.
    let budget = Arc::new(RetryBudget::fixed(3));
    dropped_after(50, get(&Server::always(503), paid(budget))).await;
    let balance = "budget_balance{client=orders} 3".to_owned();
    assert!(moved(&recorder).contains(&balance));
}

#[tokio::test(start_paused = true)]
async fn an_outcome_is_unknown_only_where_there_was_to_be_an_effect() {
    let recorder = DebuggingRecorder::new();
    let _here = metrics::set_default_local_recorder(&recorder);
    let layer = || orders().attempt_timeout(ms(50)).max_attempts(1);
    let silent = || Server::script([Step::Hang]);
    let sent = post(&silent(), layer()).send().await;
    sent.expect_err("silent");
    assert_eq!(
        moved(&recorder),
        [
            "attempts_total{client=orders,class=timeout} 1",
            "elapsed_seconds{client=orders} [0.05]",
            "first_sends_total{client=orders,method=POST} 1",
            "operations_total{client=orders,method=POST,certainty=unknown} 1",
            "stops_total{client=orders,reason=unsafe_to_repeat} 1",
            "unknown_outcomes_total{client=orders,method=POST} 1",
            "wait_seconds{client=orders} [0]",
        ]
    );
    let sent = get(&silent(), layer()).send().await;
    sent.expect_err("silent");
    assert_eq!(
        moved(&recorder),
        [
            "attempts_total{client=orders,class=timeout} 1",
            "elapsed_seconds{client=orders} [0.05]",
            "first_sends_total{client=orders,method=GET} 1",
            "operations_total{client=orders,method=GET,certainty=unknown} 1",
            "stops_total{client=orders,reason=attempts_exhausted} 1",
            "wait_seconds{client=orders} [0]",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn a_503_to_an_order_without_a_key_is_an_unknown_outcome_though_it_was_answered() {
    let recorder = DebuggingRecorder::new();
    let _here = metrics::set_default_local_recorder(&recorder);
    let answer = post(&Server::always(503), orders()).send().await;
    answer.expect("an answer");
    let unknown = "unknown_outcomes_total{client=orders,method=POST} 1".to_owned();
    assert!(moved(&recorder).contains(&unknown));
}

#[tokio::test(start_paused = true)]
async fn a_dropped_operation_is_counted_in_full() {
    let recorder = DebuggingRecorder::new();
    let _here = metrics::set_default_local_recorder(&recorder);
    dropped_after(250, post(&Server::script([Step::Hang]), orders())).await;
    assert_eq!(
        moved(&recorder),
        [
            "attempts_total{client=orders,class=cancelled} 1",
            "elapsed_seconds{client=orders} [0.25]",
            "first_sends_total{client=orders,method=POST} 1",
            "operations_total{client=orders,method=POST,certainty=unknown} 1",
            "stops_total{client=orders,reason=cancelled} 1",
            "unknown_outcomes_total{client=orders,method=POST} 1",
            "wait_seconds{client=orders} [0]",
        ]
    );
    // In a wait: no retry that did not start is counted.
    let busy = Server::script([Step::after(20, 503, &[])]);
    dropped_after(80, get(&busy, orders())).await;
    assert_eq!(
        moved(&recorder),
        [
            "attempts_total{client=orders,class=5xx} 1",
            "elapsed_seconds{client=orders} [0.08]",
            "first_sends_total{client=orders,method=GET} 1",
            "operations_total{client=orders,method=GET,certainty=answered} 1",
            "stops_total{client=orders,reason=cancelled} 1",
            "wait_seconds{client=orders} [0.06]",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn an_operation_that_was_never_sent_is_an_operation_and_no_first_send() {
    let recorder = DebuggingRecorder::new();
    let _here = metrics::set_default_local_recorder(&recorder);
    let request = || post(&Server::script([]), orders());
    let token = CancellationToken::new();
    token.cancel();
    let invalid = request().with_extension(RetryOverride::new().max_attempts(0));
    invalid.send().await.expect_err("no attempts");
    let late = request().with_extension(Deadline::after(ms(0)));
    late.send().await.expect_err("no time");
    let cancelled = request().with_extension(token);
    cancelled.send().await.expect_err("cancelled");
    assert_eq!(
        moved(&recorder),
        [
            "elapsed_seconds{client=orders} [0, 0, 0]",
            "operations_total{client=orders,method=POST,certainty=not_sent} 3",
            "stops_total{client=orders,reason=cancelled} 1",
            "stops_total{client=orders,reason=deadline_too_close} 1",
            "stops_total{client=orders,reason=invalid_input} 1",
            "wait_seconds{client=orders} [0, 0, 0]",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn several_layers_on_one_client_count_one_operation() {
    let recorder = DebuggingRecorder::new();
    let _here = metrics::set_default_local_recorder(&recorder);
    let server = Server::script([Step::status(503), Step::status(200)]);
    let layers = [build(orders()), build(plain_builder().name("inner"))];
    let answer = server.client(layers).get(URL).send().await;
    answer.expect("an answer");
    let lines = moved(&recorder);
    assert!(
        lines.iter().all(|line| line.contains("client=orders")),
        "{lines:?}"
    );
    assert!(
        lines.contains(&"operations_total{client=orders,method=GET,certainty=answered} 1".into())
    );
}

/// Asks another service before each attempt, and passes its failure on.
struct Asks(ClientWithMiddleware);

#[async_trait::async_trait]
impl Middleware for Asks {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        self.0.get("http://tokens.test/").send().await?;
        next.run(request, extensions).await
    }
}

#[tokio::test(start_paused = true)]
async fn an_operation_within_an_attempt_counts_for_its_own_client() {
    let recorder = DebuggingRecorder::new();
    let _here = metrics::set_default_local_recorder(&recorder);
    let tokens = Server::script([Step::Refuse(refused()), Step::status(200)]);
    let server = Server::script([Step::status(200)]);
    let client = ClientBuilder::new(plain_http())
        .with(build(orders()))
        .with(Asks(tokens.client([build(plain_builder().name("tokens"))])))
        .with(server)
        .build();
    client.get(URL).send().await.expect("an answer");
    assert_eq!(
        moved(&recorder),
        [
            "attempts_total{client=orders,class=2xx} 1",
            "attempts_total{client=orders,class=layer} 1",
            "attempts_total{client=tokens,class=2xx} 1",
            "attempts_total{client=tokens,class=connect} 1",
            "elapsed_seconds{client=orders} [0.1]",
            "elapsed_seconds{client=tokens} [0, 0]",
            "first_sends_total{client=orders,method=GET} 1",
            "first_sends_total{client=tokens,method=GET} 2",
            "operations_total{client=orders,method=GET,certainty=answered} 1",
            "operations_total{client=tokens,method=GET,certainty=answered} 1",
            "operations_total{client=tokens,method=GET,certainty=not_sent} 1",
            "retries_total{client=orders,class=layer} 1",
            "stops_total{client=tokens,reason=nested_layer} 1",
            "wait_seconds{client=orders} [0.1]",
            "wait_seconds{client=tokens} [0, 0]",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn waits_for_a_host_and_for_a_permit_are_waits_too() {
    let recorder = DebuggingRecorder::new();
    let _here = metrics::set_default_local_recorder(&recorder);
    let load = LoadControl::builder()
        .without_budget()
        .pushback(FirstSends::Wait)
        .concurrency_limit(1)
        .build();
    let layer = orders()
        .load_control(Arc::new(load.expect("valid")))
        .max_attempts(1);
    let server = Server::script([
        Step::retry_after(503, "2"),
        Step::after(30, 200, &[]),
        Step::after(30, 200, &[]),
    ]);
    let client = server.client([build(layer)]);
    client.get(URL).send().await.expect("an answer");
    let _ = moved(&recorder);
    client.get(URL).send().await.expect("an answer");
    let waits = |lines: Vec<String>| {
        let mut lines = lines.into_iter();
        lines.find_map(|line| {
            Some(
                line.strip_prefix("wait_seconds{client=orders} ")?
                    .to_owned(),
            )
        })
    };
    assert_eq!(waits(moved(&recorder)).as_deref(), Some("[2]"));
    // Both at once, with one permit: the second waits while the first is in flight.
    let server = Server::script([Step::after(30, 200, &[]), Step::after(30, 200, &[])]);
    let load = LoadControl::builder().concurrency_limit(1).build();
    let layer = orders().load_control(Arc::new(load.expect("valid")));
    let client = server.client([build(layer)]);
    let (one, other) = tokio::join!(client.get(URL).send(), client.get(URL).send());
    assert!(one.is_ok() && other.is_ok());
    assert_eq!(waits(moved(&recorder)).as_deref(), Some("[0, 0.03]"));
}

#[tokio::test(start_paused = true)]
async fn a_breaker_is_counted_when_it_turns_and_shown_by_key_where_that_is_asked_for() {
    let turn = async |show: bool| {
        let recorder = DebuggingRecorder::new();
        let _here = metrics::set_default_local_recorder(&recorder);
        let breaker = CircuitBreaker::builder()
            .consecutive_failures(1)
            .open_for(Backoff::fixed([secs(1)]));
        let load = LoadControl::builder()
            .breaker(breaker.build().expect("valid"))
            .budget(RetryBudget::fixed(7))
            .key_metrics(show)
            .build();
        let layer = RetryMiddleware::builder()
            .name("orders")
            .max_attempts(2)
            .backoff(Backoff::fixed([ms(100)]))
            .load_control(Arc::new(load.expect("valid")));
        let server = Server::script([
            Step::status(503),
            Step::status(503),
            Step::status(503),
            Step::status(200),
        ]);
        let client = server.client([build(layer)]);
        let send = async || {
            client.get(URL).send().await.expect("an answer");
            moved(&recorder)
        };
        // Two attempts, and it opens; one, as it is open; and after a second it closes.
        let opened = send().await;
        let refused = send().await;
        tokio::time::sleep(secs(1)).await;
        [opened, refused, send().await]
    };
    let [opened, refused, closed] = turn(true).await;
    let of_the_breaker = |lines: &[String]| {
        let mut lines = lines.to_vec();
        let wanted = ["breaker", "budget", "stops"];
        lines.retain(|line| wanted.iter().any(|start| line.starts_with(start)));
        lines
    };
    assert_eq!(
        of_the_breaker(&opened),
        [
            "breaker_state{key=orders.test} 2",
            "breaker_turns_total{client=orders,to=open} 1",
            "budget_balance{key=orders.test} 6",
            "stops_total{client=orders,reason=attempts_exhausted} 1",
        ]
    );
    assert_eq!(
        of_the_breaker(&refused),
        [
            "breaker_state{key=orders.test} 2",
            "budget_balance{key=orders.test} 6",
            "stops_total{client=orders,reason=breaker_open} 1",
        ]
    );
    assert_eq!(
        of_the_breaker(&closed),
        [
            "breaker_state{key=orders.test} 0",
            "breaker_turns_total{client=orders,to=closed} 1",
            "budget_balance{key=orders.test} 6",
        ]
    );
    // By default there is no host in any label, and all the rest is the same.
    let quiet = turn(false).await;
    for (quiet, shown) in quiet.iter().zip([opened, refused, closed]) {
        let without_keys = |line: &&String| !line.contains("orders.test");
        let shown: Vec<_> = shown.iter().filter(without_keys).collect();
        assert_eq!(quiet.iter().collect::<Vec<_>>(), shown);
    }
}

#[tokio::test(start_paused = true)]
async fn a_remaining_time_that_cannot_be_read_is_counted_by_header() {
    let recorder = DebuggingRecorder::new();
    let _here = metrics::set_default_local_recorder(&recorder);
    let answer = async |_: http::Request<()>| Ok::<_, std::convert::Infallible>(());
    let mut service = ServiceBuilder::new()
        .layer(ContextLayer::new())
        .service(service_fn(answer));
    let request = http::Request::builder().header("grpc-timeout", "soon");
    let request = request.body(()).expect("a request");
    service.call(request).await.expect("an answer");
    assert_eq!(
        moved(&recorder),
        ["malformed_timeouts_total{header=grpc-timeout} 1"]
    );
}

// ---- what an operator can answer ----

/// The sum of these series of a counter.
fn sum(lines: &[String], series: &str) -> u64 {
    let counts = lines
        .iter()
        .filter(|line| line.starts_with(series))
        .map(|line| line.rsplit(' ').next().expect("a value"));
    counts
        .map(|count| count.parse::<u64>().expect("a count"))
        .sum()
}

#[tokio::test(start_paused = true)]
async fn first_sends_extra_attempts_stops_and_unknown_outcomes_are_in_the_figures_alone() {
    let recorder = DebuggingRecorder::new();
    let _here = metrics::set_default_local_recorder(&recorder);
    let server = Server::script([
        Step::status(200),
        Step::status(503),
        Step::status(201),
        Step::Hang,
        Step::Hang,
        Step::status(404),
        Step::Refuse(refused()),
        Step::status(503),
        Step::Hang,
    ]);
    let layer = orders().attempt_timeout(ms(50)).max_attempts(2);
    let client = server.client([build(layer)]);
    let order = || client.post(URL).body("order");
    let mut stops = BTreeMap::<String, u64>::new();
    let mut operations = 0;
    for request in [
        client.get(URL),
        client.get(URL),
        order().with_extension(key("order-17")),
        client.get(URL),
        client.get(URL),
        order(),
        order().with_extension(Deadline::after(ms(0))),
    ] {
        let result = request.send().await;
        let stop = support::report(&result).and_then(|report| report.stop());
        operations += 1;
        if let Some(stop) = stop {
            *stops.entry(label(stop)).or_default() += 1;
        }
    }
    let lines = moved(&recorder);
    let (first, extra) = (
        sum(&lines, "first_sends_total"),
        sum(&lines, "retries_total"),
    );
    let firsts = server
        .seen()
        .iter()
        .filter(|seen| is_first(seen.attempt))
        .count();
    assert_eq!(
        (first, first + extra),
        (firsts as u64, server.sends() as u64)
    );
    assert_eq!(sum(&lines, "attempts_total"), first + extra);
    assert_eq!(sum(&lines, "operations_total"), operations);
    assert_eq!(sum(&lines, "unknown_outcomes_total"), 2);
    for (reason, count) in &stops {
        let series = format!("stops_total{{client=orders,reason={reason}}}");
        assert_eq!(sum(&lines, &series), *count, "{reason}");
    }
    assert_eq!(sum(&lines, "stops_total"), stops.values().sum::<u64>());
}

fn label(stop: StopReason) -> String {
    let words = format!("{stop:?}");
    let mut label = String::new();
    for letter in words.chars() {
        if letter.is_uppercase() && !label.is_empty() {
            label.push('_');
        }
        label.push(letter.to_ascii_lowercase());
    }
    label
}

fn is_first(attempt: Option<Attempt>) -> bool {
    attempt.is_some_and(|attempt| attempt.number() == 1)
}

// ---- labels ----

/// The label values of a series.
fn label_values(line: &str) -> Vec<&str> {
    let labels = line.split(['{', '}']).nth(1).expect("labels");
    labels
        .split(',')
        .filter_map(|label| Some(label.split_once('=')?.1))
        .collect()
}

#[tokio::test(start_paused = true)]
async fn a_thousand_hosts_and_any_number_of_methods_and_statuses_make_no_new_series() {
    let recorder = DebuggingRecorder::new();
    let _here = metrics::set_default_local_recorder(&recorder);
    let breaker = CircuitBreaker::builder().consecutive_failures(1);
    let load = LoadControl::builder().breaker(breaker.build().expect("valid"));
    let layer = orders().load_control(Arc::new(load.build().expect("valid")));
    let send_all = async |hosts: std::ops::Range<u32>, statuses: std::ops::Range<u16>| {
        let methods = hosts.clone().map(|number| format!("M{number}"));
        let mut statuses = statuses.cycle();
        for (host, method) in hosts.zip(methods) {
            let status = StatusCode::from_u16(statuses.next().expect("a status"));
            let server = Server::always(status.expect("a status").as_u16());
            let client = server.client([build(layer.clone())]);
            let limits = RetryOverride::new().max_attempts(2);
            let custom = Method::from_bytes(method.as_bytes()).expect("a method");
            for method in [Method::GET, custom] {
                let url = format!("http://host-{host}.test/{host}?q={host}");
                let request = client.request(method, url).with_extension(limits);
                let _ = request.send().await;
            }
        }
        moved(&recorder)
    };
    let names = |lines: &[String]| -> BTreeSet<String> {
        let name = |line: &String| line.split(' ').next().expect("a name").to_owned();
        lines.iter().map(name).collect()
    };
    let few = names(&send_all(0..5, 200..205).await);
    let few: BTreeSet<_> = few
        .into_iter()
        .chain(names(&send_all(5..305, 300..600).await))
        .collect();
    let many = names(&send_all(305..1305, 200..1000).await);
    assert!(many.is_subset(&few), "{:?}", many.difference(&few));
    for line in &few {
        for value in label_values(line) {
            assert!(!value.contains("host") && !value.starts_with('M'), "{line}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_standard_method_is_shown_by_its_name_and_any_other_is_not() {
    let recorder = DebuggingRecorder::new();
    let _here = metrics::set_default_local_recorder(&recorder);
    let client = Server::always(200).client([build(orders())]);
    let standard = [
        "CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE",
    ];
    for method in standard.into_iter().chain(["BREW", "get"]) {
        let method = Method::from_bytes(method.as_bytes()).expect("a method");
        let answer = client.request(method, URL).send().await;
        answer.expect("an answer");
    }
    let mut lines = moved(&recorder);
    lines.retain(|line| line.starts_with("first_sends_total"));
    let line =
        |method, count| format!("first_sends_total{{client=orders,method={method}}} {count}");
    let expected = standard.map(|method| line(method, 1));
    assert_eq!(lines[..9], expected);
    assert_eq!(lines[9..], [line("_OTHER", 2)]);
}

#[tokio::test(start_paused = true)]
async fn with_key_metrics_each_key_is_two_series_and_no_more() {
    let recorder = DebuggingRecorder::new();
    let _here = metrics::set_default_local_recorder(&recorder);
    let load = LoadControl::builder()
        .breaker(CircuitBreaker::default())
        .key_metrics(true)
        .key_by(|request, _| match request.url().host_str() {
            Some("a.test") => "shard-a".into(),
            _ => "other".into(),
        });
    let layer = RetryMiddleware::builder().load_control(Arc::new(load.build().expect("valid")));
    let client = Server::always(200).client([build(layer)]);
    for host in ["a.test", "b.test", "c.test"] {
        let answer = client.get(format!("http://{host}/")).send().await;
        answer.expect("an answer");
    }
    let mut lines = moved(&recorder);
    lines.retain(|line| line.contains("key="));
    assert_eq!(
        lines,
        [
            "breaker_state{key=other} 0",
            "breaker_state{key=shard-a} 0",
            "budget_balance{key=other} 10",
            "budget_balance{key=shard-a} 10",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn no_label_shows_path_query_userinfo_header_or_key() {
    let recorder = DebuggingRecorder::new();
    let _here = metrics::set_default_local_recorder(&recorder);
    let load = LoadControl::builder().key_metrics(true).build();
    let layer = plain_builder().load_control(Arc::new(load.expect("valid")));
    let server = Server::script([Step::after(0, 503, &[("x-answer", "SECRET")]), Step::Hang]);
    let request = server
        .client([build(layer.clone())])
        .post("http://SECRET:SECRET@orders.test/SECRET?SECRET#SECRET")
        .body("SECRET")
        .bearer_auth("SECRET")
        .with_extension(key("SECRETSECRET"));
    dropped_after(300, request).await;
    // A request builder takes user and password out of the URL; this one has them there to the end.
    let url = "http://SECRET:SECRET@orders.test/".parse().expect("a URL");
    let whole = Request::new(Method::GET, url);
    let client = Server::always(200).client([build(layer)]);
    client.execute(whole).await.expect("an answer");
    let lines = moved(&recorder).join("\n");
    assert!(lines.contains("class=5xx") && lines.contains("class=cancelled"));
    assert!(!lines.contains("SECRET"), "{lines}");
}

// ---- documented names, units and labels ----

const SOURCE: &str = include_str!("../src/observe/metrics.rs");

/// A row of the module's table.
#[derive(Debug)]
struct Row {
    kind: &'static str,
    unit: Option<&'static str>,
    labels: BTreeSet<&'static str>,
}

/// The table, by the metric's own name.
fn documented() -> BTreeMap<&'static str, Row> {
    let names = names();
    let rows = SOURCE
        .lines()
        .filter_map(|line| line.strip_prefix("//! | [`"));
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let constant = cells[0].trim_end_matches("`]");
        let (kind, unit) = match cells[1].split_once(", ") {
            Some((kind, unit)) => (kind, Some(unit)),
            None => (cells[1], None),
        };
        let labels = cells[2].split('`').skip(1).step_by(2).collect();
        (names[constant], Row { kind, unit, labels })
    })
    .collect()
}

/// The constants and their values.
fn names() -> BTreeMap<&'static str, &'static str> {
    let constants = SOURCE.lines().filter_map(|line| {
        let (name, value) = line.strip_prefix("pub const ")?.split_once(": &str = \"")?;
        Some((name, value.strip_suffix("\";")?))
    });
    constants.collect()
}

/// Keeps what it is told of each metric.
#[derive(Default)]
struct Descriptions(Mutex<BTreeMap<String, Description>>);

/// Kind, unit and text.
type Description = (&'static str, Option<Unit>, String);

impl Descriptions {
    fn keep(&self, kind: &'static str, name: KeyName, unit: Option<Unit>, text: SharedString) {
        let described = (kind, unit, text.into_owned());
        let twice = lock(&self.0).insert(name.as_str().to_owned(), described);
        assert!(twice.is_none(), "{name:?} is described twice");
    }
}

impl Recorder for Descriptions {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.keep("counter", name, unit, text);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.keep("gauge", name, unit, text);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.keep("histogram", name, unit, text);
    }

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[test]
fn table_constants_and_descriptions_agree() {
    let descriptions = Descriptions::default();
    metrics::with_local_recorder(&descriptions, reqwest_idempotent_retry::metrics::describe);
    let described = lock(&descriptions.0);
    let documented = documented();
    assert_eq!(names().len(), 13);
    let constants: BTreeSet<&str> = names().into_values().collect();
    assert!(constants.iter().copied().eq(documented.keys().copied()));
    assert!(
        constants
            .iter()
            .copied()
            .eq(described.keys().map(String::as_str))
    );
    for (name, row) in &documented {
        let (kind, unit, text) = &described[*name];
        let unit_in_the_table = match (row.kind, row.unit) {
            ("counter", None) | ("gauge", Some("tokens")) => Some(Unit::Count),
            (_, Some("seconds")) => Some(Unit::Seconds),
            ("gauge", None) => None,
            other => panic!("{name} has {other:?}"),
        };
        assert_eq!((*kind, *unit), (row.kind, unit_in_the_table), "{name}");
        assert!(text.len() > 10, "{name}: {text}");
        // Prometheus' own conventions for names.
        assert_eq!(name.ends_with("_total"), row.kind == "counter", "{name}");
        assert_eq!(
            name.ends_with("_seconds"),
            row.unit == Some("seconds"),
            "{name}"
        );
    }
}

/// Something of everything.
async fn a_bit_of_everything(key_metrics: bool) {
    let breaker = CircuitBreaker::builder().consecutive_failures(1);
    let load = LoadControl::builder()
        .breaker(breaker.build().expect("valid"))
        .key_metrics(key_metrics);
    let layer = orders().load_control(Arc::new(load.build().expect("valid")));
    let busy = Server::always(503).client([build(layer)]);
    busy.get(URL).send().await.expect("an answer");
    let poor = orders().budget(Arc::new(RetryBudget::fixed(0)));
    let poor = get(&Server::always(503), poor);
    poor.send().await.expect("an answer");
    let lost = post(&Server::always(503), orders());
    lost.send().await.expect("an answer");
    let mut service = ServiceBuilder::new()
        .layer(ContextLayer::new())
        .service(service_fn(async |_: http::Request<()>| {
            Ok::<_, std::convert::Infallible>(())
        }));
    let request = http::Request::builder().header("grpc-timeout", "soon");
    let request = request.body(()).expect("a request");
    service.call(request).await.expect("an answer");
}

#[tokio::test(start_paused = true)]
async fn every_metric_has_the_labels_of_the_table() {
    let recorder = DebuggingRecorder::new();
    let _here = metrics::set_default_local_recorder(&recorder);
    a_bit_of_everything(true).await;
    // Load control without a breaker, so that the balance of keys is shown too.
    let load = LoadControl::builder().key_metrics(true).build();
    let layer = RetryMiddleware::builder().load_control(Arc::new(load.expect("valid")));
    let answer = get(&Server::always(200), layer).send().await;
    answer.expect("an answer");
    let mut seen = BTreeMap::<String, BTreeSet<String>>::new();
    for (key, _, _, _) in recorder.snapshotter().snapshot().into_vec() {
        let labels = key.key().labels().map(|label| label.key().to_owned());
        seen.entry(key.key().name().to_owned())
            .or_default()
            .extend(labels);
    }
    let documented: BTreeMap<String, BTreeSet<String>> = documented()
        .into_iter()
        .map(|(name, row)| {
            (
                name.to_owned(),
                row.labels.iter().map(ToString::to_string).collect(),
            )
        })
        .collect();
    assert_eq!(seen, documented);
}

#[tokio::test(start_paused = true)]
async fn prometheus_shows_every_metric_with_its_name_and_type() {
    for recommended_names in [false, true] {
        let recorder = PrometheusBuilder::new()
            .with_recommended_naming(recommended_names)
            .build_recorder();
        let page = recorder.handle();
        let _here = metrics::set_default_local_recorder(&recorder);
        reqwest_idempotent_retry::metrics::describe();
        a_bit_of_everything(true).await;
        let page = page.render();
        for (name, row) in documented() {
            // Without buckets of the caller's own the exporter makes summaries.
            let kind = match row.kind {
                "histogram" => "summary",
                kind => kind,
            };
            let types = format!("# TYPE {name} {kind}\n");
            assert!(page.contains(&types), "{types} in {page}");
            assert!(
                page.contains(&format!("# HELP {name} ")),
                "{name} in {page}"
            );
        }
        let sample = r#"idempotent_retry_stops_total{client="orders",reason="unsafe_to_repeat"} 1"#;
        assert!(page.contains(sample), "{page}");
    }
}
