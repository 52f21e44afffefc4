//! What a `RetryObserver` is told, in which order, and when.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod support;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::Method;
use reqwest_idempotent_retry::{
    AttemptRecord, Backoff, BreakerState, CancellationToken, CircuitBreaker, Deadline, FirstSends,
    LoadControl, ReportHandle, RetryMiddleware, RetryMiddlewareBuilder, RetryObserver, RetryReport,
};
use reqwest_middleware::RequestBuilder;
use support::{Server, Step, URL, key, lock, ms, plain_builder, refused, secs};

/// Writes down each call in a line.
#[derive(Default)]
struct Diary {
    lines: Mutex<Vec<String>>,
    reports: Mutex<Vec<RetryReport>>,
}

impl Diary {
    fn write(&self, line: String) {
        lock(&self.lines).push(line);
    }

    fn lines(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.lines))
    }
}

impl RetryObserver for Diary {
    fn attempt_ended(&self, method: &Method, host: &str, attempt: &AttemptRecord) {
        let result = match (attempt.status(), attempt.failure()) {
            (Some(status), None) => status.as_str().to_owned(),
            (_, failure) => format!("{failure:?}"),
        };
        let (number, took) = (attempt.number(), attempt.took());
        self.write(format!(
            "{method} {host} attempt {number}: {result} in {took:?}"
        ));
    }

    fn waiting(&self, method: &Method, host: &str, delay: Duration) {
        self.write(format!("{method} {host} waits {delay:?}"));
    }

    fn operation_ended(&self, report: &RetryReport) {
        self.write(report.to_string());
        lock(&self.reports).push(report.clone());
    }

    fn breaker_turned(&self, host: &str, state: BreakerState) {
        self.write(format!("{host} breaker {state}"));
    }
}

fn watched(diary: &Arc<Diary>) -> RetryMiddlewareBuilder {
    plain_builder().observer(diary.clone())
}

fn build(builder: RetryMiddlewareBuilder) -> RetryMiddleware {
    builder.build().expect("valid settings")
}

fn get(server: &Server, layer: RetryMiddlewareBuilder) -> RequestBuilder {
    server.client([build(layer)]).get(URL)
}

fn post(server: &Server, layer: RetryMiddlewareBuilder) -> RequestBuilder {
    server.client([build(layer)]).post(URL).body("order")
}

#[tokio::test(start_paused = true)]
async fn a_plain_success_is_told_too() {
    let diary = Arc::<Diary>::default();
    let server = Server::script([Step::after(20, 200, &[])]);
    let answer = get(&server, watched(&diary)).send().await;
    answer.expect("an answer");
    assert_eq!(
        diary.lines(),
        [
            "GET orders.test attempt 1: 200 in 20ms",
            "GET orders.test: done after 1 attempt(s) in 20ms; answered",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn attempts_waits_and_the_end_are_told_in_the_order_in_which_they_happen() {
    let diary = Arc::<Diary>::default();
    let server = Server::script([
        Step::after(20, 503, &[]),
        Step::Refuse(refused()),
        Step::Hang,
    ]);
    let layer = watched(&diary).attempt_timeout(ms(50)).max_attempts(3);
    let keyed = post(&server, layer).with_extension(key("order-17"));
    keyed.send().await.expect_err("silent");
    assert_eq!(
        diary.lines(),
        [
            "POST orders.test attempt 1: 503 in 20ms",
            "POST orders.test waits 100ms",
            "POST orders.test attempt 2: Some(Connect) in 0ns",
            "POST orders.test waits 200ms",
            "POST orders.test attempt 3: Some(Timeout) in 50ms",
            "POST orders.test: attempts exhausted after 3 attempt(s) in 370ms; outcome unknown, \
             confirm it with key orde…(8)",
        ]
    );
}

/// The call comes while it happens, and not when all is over.
#[tokio::test(start_paused = true)]
async fn each_call_comes_at_its_time() {
    let diary = Arc::<Diary>::default();
    let server = Server::script([Step::after(20, 503, &[]), Step::after(20, 200, &[])]);
    let mut sent = Box::pin(get(&server, watched(&diary)).send());
    let mut told = Vec::new();
    for _ in 0..3 {
        let _ = tokio::time::timeout(ms(50), &mut sent).await;
        told.push(diary.lines().len());
    }
    // 20 ms: the attempt and its wait. 120 + 20 ms: the other one and the end.
    assert_eq!(told, [2, 0, 2]);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_operation_is_told_from_within_the_drop() {
    let diary = Arc::<Diary>::default();
    let server = Server::script([Step::status(503), Step::Hang]);
    let layer = watched(&diary);
    let mut sent = Box::pin(post(&server, layer).with_extension(key("order-17")).send());
    assert!(tokio::time::timeout(ms(150), &mut sent).await.is_err());
    assert_eq!(diary.lines().len(), 2);
    drop(sent);
    assert_eq!(
        diary.lines(),
        [
            "POST orders.test attempt 2: Some(Cancelled) in 50ms",
            "POST orders.test: cancelled after 2 attempt(s) in 150ms; outcome unknown, \
             confirm it with key orde…(8)",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn an_operation_that_is_dropped_or_cancelled_in_its_wait_had_no_other_attempt() {
    let diary = Arc::<Diary>::default();
    let told = [
        "GET orders.test attempt 1: 503 in 0ns",
        "GET orders.test waits 100ms",
        "GET orders.test: cancelled after 1 attempt(s) in 50ms; answered",
    ];
    let request = get(&Server::always(503), watched(&diary)).send();
    assert!(tokio::time::timeout(ms(50), request).await.is_err());
    assert_eq!(diary.lines(), told);
    let token = CancellationToken::new();
    let request = get(&Server::always(503), watched(&diary)).with_extension(token.clone());
    let (sent, ()) = tokio::join!(request.send(), async {
        tokio::time::sleep(ms(50)).await;
        token.cancel();
    });
    sent.expect_err("cancelled");
    assert_eq!(diary.lines(), told);
}

#[tokio::test(start_paused = true)]
async fn an_operation_that_was_never_sent_has_only_an_end() {
    let diary = Arc::<Diary>::default();
    let late = post(&Server::script([]), watched(&diary)).with_extension(Deadline::after(ms(0)));
    late.send().await.expect_err("no time");
    assert_eq!(
        diary.lines(),
        ["POST orders.test: deadline too close after 0 attempt(s) in 0ns; never sent"]
    );
}

#[tokio::test(start_paused = true)]
async fn a_breaker_is_told_before_the_end_of_the_operation_that_turned_it() {
    let diary = Arc::<Diary>::default();
    let breaker = CircuitBreaker::builder()
        .consecutive_failures(1)
        .open_for(Backoff::fixed([secs(1)]));
    let load = LoadControl::builder().breaker(breaker.build().expect("valid"));
    let layer = watched(&diary)
        .max_attempts(1)
        .load_control(Arc::new(load.build().expect("valid")));
    let server = Server::script([Step::status(503), Step::status(200)]);
    let client = server.client([build(layer)]);
    client.get(URL).send().await.expect("an answer");
    tokio::time::sleep(secs(1)).await;
    client.get(URL).send().await.expect("an answer");
    assert_eq!(
        diary.lines(),
        [
            "GET orders.test attempt 1: 503 in 0ns",
            "orders.test breaker open",
            "GET orders.test: attempts exhausted after 1 attempt(s) in 0ns; answered",
            "GET orders.test attempt 1: 200 in 0ns",
            "orders.test breaker closed",
            "GET orders.test: done after 1 attempt(s) in 0ns; answered",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn a_first_send_that_waits_for_its_host_is_told_to_wait() {
    let diary = Arc::<Diary>::default();
    let load = LoadControl::builder().pushback(FirstSends::Wait).build();
    let layer = watched(&diary)
        .max_attempts(1)
        .load_control(Arc::new(load.expect("valid")));
    let server = Server::script([Step::retry_after(503, "2"), Step::status(200)]);
    let client = server.client([build(layer)]);
    client.get(URL).send().await.expect("an answer");
    diary.lines();
    client.get(URL).send().await.expect("an answer");
    assert_eq!(
        diary.lines(),
        [
            "GET orders.test waits 2s",
            "GET orders.test attempt 1: 200 in 0ns",
            "GET orders.test: done after 1 attempt(s) in 2s; answered",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn several_layers_on_one_client_tell_of_one_operation() {
    let (outer, inner) = (Arc::<Diary>::default(), Arc::<Diary>::default());
    let server = Server::script([Step::status(503), Step::status(200)]);
    let client = server.client([build(watched(&outer)), build(watched(&inner))]);
    client.get(URL).send().await.expect("an answer");
    assert_eq!((outer.lines().len(), inner.lines().len()), (4, 0));
}

#[tokio::test(start_paused = true)]
async fn observer_and_handle_are_told_the_same() {
    let diary = Arc::<Diary>::default();
    let handle = ReportHandle::new();
    let quick = || watched(&diary).attempt_timeout(ms(50)).max_attempts(2);
    let with_handle = |request: RequestBuilder| request.with_extension(handle.clone()).send();
    let compare = || {
        let told = lock(&diary.reports).pop().expect("a report");
        let kept = handle.report().expect("a report");
        assert_eq!(format!("{told:?}"), format!("{kept:?}"));
        assert!(lock(&diary.reports).is_empty(), "it is told once");
    };
    let plain = with_handle(get(&Server::always(200), quick())).await;
    plain.expect("an answer");
    compare();
    let exhausted = with_handle(get(&Server::always(503), quick())).await;
    exhausted.expect("an answer");
    compare();
    let silent = with_handle(post(&Server::script([Step::Hang]), quick())).await;
    silent.expect_err("silent");
    compare();
    let silent = Server::script([Step::Hang]);
    let dropped = with_handle(post(&silent, watched(&diary)));
    assert!(tokio::time::timeout(ms(50), dropped).await.is_err());
    compare();
}

/// Wants to know nothing in particular.
struct Idle;

impl RetryObserver for Idle {}

#[tokio::test(start_paused = true)]
async fn an_observer_need_not_listen_to_everything() {
    let layer = plain_builder().observer(Arc::new(Idle));
    let server = Server::script([Step::status(503), Step::status(200)]);
    let answer = get(&server, layer).send().await;
    assert_eq!(answer.expect("an answer").status(), 200);
}
