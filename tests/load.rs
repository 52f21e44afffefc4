//! What operations share by host, in virtual time: breaker, pushback, concurrency limit, budget, and
//! the figures of all of them. First what the server saw, then what the caller is told.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod support;

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{Extensions, HeaderName, StatusCode};
use reqwest::{Method, Request, Response};
use reqwest_idempotent_retry::{
    Backoff, BodyFactory, BreakerSnapshot, BreakerState, CancellationToken, Certainty,
    CircuitBreaker, CircuitBreakerBuilder, Deadline, Failure, FirstSends, IdempotencyKey,
    LoadControl, LoadControlBuilder, LoadSnapshot, NextStep, NoRetry, ReportHandle, RetryBudget,
    RetryErrorExt, RetryMiddleware, RetryMiddlewareBuilder, RetryReport, StopReason,
};
use reqwest_middleware::{
    ClientBuilder, ClientWithMiddleware, Error, Middleware, Next, RequestBuilder,
};
use support::{
    Seen, Server, Step, URL, key, lines, ms, plain_http, read_and_closed, refused, secs,
};
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// The key of [`URL`], and that of another host.
const HOST: &str = "orders.test";
const OTHER_HOST: &str = "search.test";
const OTHER_URL: &str = "http://search.test/find";

// ---- The parts that tests are made of ----

fn shared(builder: LoadControlBuilder) -> Arc<LoadControl> {
    Arc::new(builder.build().expect("valid settings"))
}

/// No jitter, 100 ms doubling up to 1 s, four attempts, 10 s.
fn retry(load: &Arc<LoadControl>) -> RetryMiddlewareBuilder {
    RetryMiddleware::builder()
        .max_attempts(4)
        .backoff(Backoff::exponential(ms(100), secs(1)))
        .deadline(secs(10))
        .load_control(Arc::clone(load))
}

/// The client of this server, with these settings.
fn over(server: &Server, retry: RetryMiddlewareBuilder) -> ClientWithMiddleware {
    server.client([retry.build().expect("valid settings")])
}

/// Opens for one second after so many failures in a row.
fn opens_after(failures: u32) -> CircuitBreakerBuilder {
    CircuitBreaker::builder()
        .consecutive_failures(failures)
        .open_for(Backoff::fixed([secs(1)]))
}

fn with_breaker(breaker: CircuitBreakerBuilder) -> Arc<LoadControl> {
    shared(LoadControl::builder().breaker(breaker.build().expect("valid settings")))
}

fn figures(load: &LoadControl) -> LoadSnapshot {
    load.snapshot(HOST).expect("the host is known")
}

fn breaker(load: &LoadControl) -> BreakerSnapshot {
    *figures(load).breaker().expect("a breaker")
}

fn balance(load: &LoadControl) -> f64 {
    figures(load).budget().expect("a budget").balance()
}

/// What came of one operation.
#[derive(Debug)]
struct Came {
    result: Result<Response, Error>,
    report: RetryReport,
}

impl Came {
    fn status(&self) -> Option<u16> {
        support::status(&self.result).map(|status| status.as_u16())
    }

    fn stop(&self) -> Option<StopReason> {
        self.report.stop()
    }

    fn attempts(&self) -> usize {
        self.report.attempts().len()
    }

    /// Status of the answer in hand, reason for stopping, attempts.
    fn told(&self) -> (Option<u16>, Option<StopReason>, usize) {
        (self.status(), self.stop(), self.attempts())
    }

    /// The wait that the caller is told to keep before trying again.
    fn later(&self) -> Option<Duration> {
        match self.report.next_step() {
            NextStep::TryLater { after } => after,
            other => panic!("{other:?}"),
        }
    }

    /// It ended before anything was sent, for this reason.
    fn was_never_sent(&self, reason: StopReason) {
        let error = self.result.as_ref().expect_err("nothing was answered");
        let error = error.retry_error().expect("ours");
        assert_eq!(
            (error.stop(), error.certainty(), self.attempts()),
            (reason, Certainty::NotSent, 0)
        );
    }
}

async fn send(request: RequestBuilder) -> Came {
    let handle = ReportHandle::new();
    let result = request.with_extension(handle.clone()).send().await;
    let report = handle.report().expect("every operation is reported");
    Came { result, report }
}

fn start(request: RequestBuilder) -> JoinHandle<Came> {
    tokio::spawn(send(request))
}

async fn ended(operation: JoinHandle<Came>) -> Came {
    operation.await.expect("no panic")
}

/// Lets time pass until this long after the server's start.
async fn until(server: &Server, at: Duration) {
    sleep(at.checked_sub(server.elapsed()).expect("still to come")).await;
}

/// Has operations fail, one attempt each.
async fn fails(client: &ClientWithMiddleware, times: usize) {
    for _ in 0..times {
        let came = send(client.get(URL).with_extension(NoRetry)).await;
        assert_eq!(came.status(), Some(503));
    }
}

/// The paths that the server saw, in their order.
fn paths(server: &Server) -> Vec<String> {
    let path = |seen: &Seen| seen.url.rsplit('/').next().unwrap_or_default().to_owned();
    server.seen().iter().map(path).collect()
}

/// How many of the requests, each of this length, were with the server at once at most.
fn most_at_once(server: &Server, length: Duration) -> usize {
    let starts: Vec<_> = server.seen().iter().map(|seen| seen.at).collect();
    let during = |at: &Duration| {
        let is_there = |start: &&Duration| **start <= *at && *at < **start + length;
        starts.iter().filter(is_there).count()
    };
    starts.iter().map(during).max().unwrap_or(0)
}

// ---- K1: the breaker ----

#[tokio::test(start_paused = true)]
async fn case_59_a_probe_that_is_dropped_gives_its_permit_back() {
    let load = with_breaker(opens_after(1).gate_first_sends(true));
    let server = Server::script([Step::status(503), Step::Hang, Step::status(200)]);
    let client = over(&server, retry(&load));
    fails(&client, 1).await;
    until(&server, ms(1100)).await;
    let probe = start(client.get(URL));
    until(&server, ms(1120)).await;
    assert_eq!(breaker(&load).permits_out(), 1);
    send(client.get(URL))
        .await
        .was_never_sent(StopReason::BreakerOpen);
    until(&server, ms(1150)).await;
    probe.abort();
    assert!(probe.await.is_err_and(|error| error.is_cancelled()));
    assert_eq!(
        (breaker(&load).state(), breaker(&load).permits_out()),
        (BreakerState::HalfOpen, 0)
    );
    until(&server, ms(1200)).await;
    assert_eq!(send(client.get(URL)).await.told(), (Some(200), None, 1));
    assert_eq!(server.starts(), [0, 1100, 1200]);
    assert_eq!(breaker(&load).state(), BreakerState::Closed);
}

#[tokio::test(start_paused = true)]
async fn case_59_a_probe_that_hangs_loses_its_permit_after_the_permit_timeout() {
    let breaker_of = opens_after(1)
        .gate_first_sends(true)
        .permit_timeout(secs(2));
    let load = with_breaker(breaker_of);
    // The probe is not dropped, and ends long after the next one.
    let late_failure = Step::after(5000, 503, &[]);
    let server = Server::script([Step::status(503), late_failure, Step::status(200)]);
    let client = over(&server, retry(&load));
    fails(&client, 1).await;
    until(&server, ms(1100)).await;
    let probe = start(client.get(URL).with_extension(NoRetry));
    until(&server, ms(3099)).await;
    send(client.get(URL))
        .await
        .was_never_sent(StopReason::BreakerOpen);
    until(&server, ms(3100)).await;
    assert_eq!(send(client.get(URL)).await.told(), (Some(200), None, 1));
    assert_eq!(server.starts(), [0, 1100, 3100]);
    assert_eq!(breaker(&load).state(), BreakerState::Closed);
    // What began in an earlier state is no evidence in this one.
    assert_eq!(ended(probe).await.status(), Some(503));
    assert_eq!(server.elapsed(), ms(6100));
    assert_eq!(
        (
            breaker(&load).state(),
            breaker(&load).failures_in_a_row(),
            breaker(&load).opened()
        ),
        (BreakerState::Closed, 0, 1)
    );
}

#[tokio::test(start_paused = true)]
async fn case_60_an_open_breaker_ends_the_loop_with_the_answer_in_hand() {
    let load = with_breaker(opens_after(2));
    let server = Server::always(503);
    let client = over(&server, retry(&load).max_attempts(2));
    for _ in 0..2 {
        let came = send(client.get(URL)).await;
        assert_eq!(
            came.told(),
            (Some(503), Some(StopReason::AttemptsExhausted), 2)
        );
    }
    assert_eq!((server.sends(), breaker(&load).opened()), (4, 1));
    let (before, began) = (balance(&load), server.elapsed());
    let came = send(client.get(URL)).await;
    assert_eq!(server.sends(), 5);
    assert_eq!(came.told(), (Some(503), Some(StopReason::BreakerOpen), 1));
    assert_eq!((server.elapsed(), balance(&load)), (began, before));
    assert_eq!(came.later(), Some(secs(1)));
    assert_eq!(came.report.certainty(), Certainty::Answered);
    // Refused is not failed: it did not count again.
    assert_eq!((breaker(&load).opened(), breaker(&load).refused()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn case_60_an_open_breaker_refuses_first_sends_where_it_gates_them() {
    let load = with_breaker(opens_after(2).gate_first_sends(true));
    let server = Server::always(503);
    let client = over(&server, retry(&load).max_attempts(2));
    for _ in 0..2 {
        assert_eq!(send(client.get(URL)).await.attempts(), 2);
    }
    assert_eq!((server.sends(), balance(&load)), (4, 8.0));
    let began = server.elapsed();
    sleep(ms(300)).await;
    for request in [client.get(URL), client.post(URL).body("order")] {
        let came = send(request).await;
        came.was_never_sent(StopReason::BreakerOpen);
        assert_eq!(came.later(), Some(ms(700)));
    }
    assert_eq!((server.sends(), balance(&load)), (4, 8.0));
    assert_eq!(server.elapsed(), began + ms(300));
    assert_eq!(figures(&load).stopped(StopReason::BreakerOpen), 2);
}

/// What one operation counted as for the breaker.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Counted {
    Success,
    Failure,
    Nothing,
}

/// The host has failed once when the operation in question begins, so that all three can be told apart.
struct Trial {
    load: Arc<LoadControl>,
    server: Server,
    client: ClientWithMiddleware,
}

impl Trial {
    async fn new(steps: impl IntoIterator<Item = Step>) -> Self {
        Self::with(steps, |retry| retry).await
    }

    async fn with(
        steps: impl IntoIterator<Item = Step>,
        set: impl FnOnce(RetryMiddlewareBuilder) -> RetryMiddlewareBuilder,
    ) -> Self {
        let never = opens_after(1000).failure_ratio(1.0, 1000, secs(3600));
        let load = with_breaker(never);
        let steps = [Step::status(503)].into_iter().chain(steps);
        let server = Server::script(steps);
        let client = over(&server, set(retry(&load).max_attempts(3)));
        fails(&client, 1).await;
        Self {
            load,
            server,
            client,
        }
    }

    fn get(&self) -> RequestBuilder {
        self.client.get(URL)
    }

    /// What it counted as, and how many requests it took.
    fn verdict(&self) -> (Counted, usize) {
        let breaker = breaker(&self.load);
        let all = breaker.recent_operations().expect("a ratio is set");
        let failed = breaker.recent_failures().expect("a ratio is set");
        let counted = match (all, failed, breaker.failures_in_a_row()) {
            (1, 1, 1) => Counted::Nothing,
            (2, 2, 2) => Counted::Failure,
            (2, 1, 0) => Counted::Success,
            other => panic!("counted twice? {other:?}"),
        };
        (counted, self.server.sends() - 1)
    }
}

/// What an operation counts as that is a GET, answered by this script.
async fn counted(steps: impl IntoIterator<Item = Step>) -> (Counted, usize) {
    let trial = Trial::new(steps).await;
    let _ = send(trial.get()).await;
    trial.verdict()
}

#[tokio::test(start_paused = true)]
async fn a_breaker_counts_operations_not_attempts() {
    let thrice = (0..3).map(|_| Step::status(503));
    assert_eq!(counted(thrice).await, (Counted::Failure, 3));
    let recovers = [503, 503, 200].map(Step::status);
    assert_eq!(counted(recovers).await, (Counted::Success, 3));
    let turns_out_wrong = [503, 404].map(Step::status);
    assert_eq!(counted(turns_out_wrong).await, (Counted::Nothing, 2));
}

#[tokio::test(start_paused = true)]
async fn a_breaker_counts_answers_by_whose_fault_they_are() {
    for status in [200, 204, 304] {
        assert_eq!(
            counted([Step::status(status)]).await,
            (Counted::Success, 1),
            "{status}"
        );
    }
    for status in [400, 401, 403, 404, 409, 422] {
        assert_eq!(
            counted([Step::status(status)]).await,
            (Counted::Nothing, 1),
            "{status}"
        );
    }
    for status in [500, 501, 507] {
        assert_eq!(
            counted([Step::status(status)]).await,
            (Counted::Failure, 1),
            "{status}"
        );
    }
    for status in [408, 425, 429, 502, 503, 504] {
        let trial = Trial::new([Step::status(status)]).await;
        let _ = send(trial.get().with_extension(NoRetry)).await;
        assert_eq!(trial.verdict(), (Counted::Failure, 1), "{status}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_is_told_to_slow_down_has_failed() {
    let load = with_breaker(opens_after(1).gate_first_sends(true));
    let server = Server::script([Step::status(503), Step::status(429), Step::status(404)]);
    let client = over(&server, retry(&load));
    fails(&client, 1).await;
    until(&server, ms(1000)).await;
    assert_eq!(breaker(&load).state(), BreakerState::HalfOpen);
    let came = send(client.get(URL).with_extension(NoRetry)).await;
    assert_eq!((came.status(), server.sends()), (Some(429), 2));
    assert_eq!(
        (breaker(&load).state(), breaker(&load).opened()),
        (BreakerState::Open, 2)
    );
    // A 404 shows nothing: neither closed nor opened, and the permit is free again.
    until(&server, ms(2000)).await;
    assert_eq!(send(client.get(URL)).await.status(), Some(404));
    let now = breaker(&load);
    assert_eq!(
        (now.state(), now.permits_out(), now.opened()),
        (BreakerState::HalfOpen, 0, 2)
    );
}

/// Its own permit is out until it has ended, so with one permit there is none for its retry.
#[tokio::test(start_paused = true)]
async fn a_probe_that_fails_is_not_repeated() {
    let load = with_breaker(opens_after(1).gate_first_sends(true));
    let server = Server::always(503);
    let client = over(&server, retry(&load));
    fails(&client, 1).await;
    until(&server, ms(1000)).await;
    let came = send(client.get(URL)).await;
    assert_eq!(came.told(), (Some(503), Some(StopReason::BreakerOpen), 1));
    assert_eq!(server.starts(), [0, 1000]);
    assert_eq!(
        (breaker(&load).state(), breaker(&load).open_for()),
        (BreakerState::Open, Some(secs(1)))
    );
    let budget = *figures(&load).budget().expect("a budget");
    assert_eq!((budget.given(), budget.balance()), (0, 10.0));
}

#[tokio::test(start_paused = true)]
async fn no_connection_and_no_answer_count_as_failures() {
    let ours = || URL.parse().expect("a URL");
    let refusing = (0..3).map(|_| Step::Refuse(refused().with_url(ours())));
    assert_eq!(counted(refusing).await, (Counted::Failure, 3));
    let closing = (0..3).map(|_| Step::Fail(read_and_closed().with_url(ours())));
    assert_eq!(counted(closing).await, (Counted::Failure, 3));
    let silent = (0..3).map(|_| Step::Hang);
    let trial = Trial::with(silent, |retry| retry.attempt_timeout(ms(50))).await;
    let _ = send(trial.get()).await;
    assert_eq!(trial.verdict(), (Counted::Failure, 3));
    let breaking = (0..3).map(|_| Step::Break(200));
    let trial = Trial::with(breaking, |retry| retry.buffer_response(100)).await;
    let _ = send(trial.get()).await;
    assert_eq!(trial.verdict(), (Counted::Failure, 3));
}

#[tokio::test(start_paused = true)]
async fn what_the_caller_gives_up_counts_as_nothing() {
    for (row, steps, sends) in [
        ("in the air", vec![Step::Hang], 1),
        ("in the wait", vec![Step::status(503)], 1),
        ("in a repeat", vec![Step::status(503), Step::Hang], 2),
    ] {
        let at = if sends == 2 { ms(150) } else { ms(50) };
        let trial = Trial::new(steps).await;
        let token = CancellationToken::new();
        let operation = start(trial.get().with_extension(token.clone()));
        sleep(at).await;
        token.cancel();
        assert_eq!(ended(operation).await.stop(), Some(StopReason::Cancelled));
        assert_eq!(
            trial.verdict(),
            (Counted::Nothing, sends),
            "cancelled {row}"
        );
    }
    for (row, steps, sends) in [
        ("in the air", vec![Step::Hang], 1),
        ("in the wait", vec![Step::status(503)], 1),
        ("in a repeat", vec![Step::status(503), Step::Hang], 2),
    ] {
        let at = if sends == 2 { ms(150) } else { ms(50) };
        let trial = Trial::new(steps).await;
        let dropped = tokio::time::timeout(at, trial.get().send());
        assert!(dropped.await.is_err());
        assert_eq!(trial.verdict(), (Counted::Nothing, sends), "dropped {row}");
    }
}

/// The attempt before has failed, but it is the caller who ends the operation.
#[tokio::test(start_paused = true)]
async fn what_the_caller_gives_up_while_a_retry_waits_for_leave_counts_as_nothing() {
    for dropped in [false, true] {
        let load = shared(
            LoadControl::builder()
                .concurrency_limit(1)
                .breaker(opens_after(1).build().expect("valid")),
        );
        let server = Server::script([Step::status(503), Step::Hang]);
        let client = over(&server, retry(&load));
        let token = CancellationToken::new();
        let in_line = start(client.get(URL).with_extension(token.clone()));
        until(&server, ms(50)).await;
        let hog = start(client.get(URL));
        until(&server, ms(150)).await;
        assert_eq!(in_flight_and_waiting(&load), (Some(1), Some(1)));
        match dropped {
            true => in_line.abort(),
            false => token.cancel(),
        }
        assert_eq!(in_line.await.is_err(), dropped);
        let now = figures(&load);
        assert_eq!(now.stopped(StopReason::Cancelled), 1);
        let state = now.breaker().expect("one").state();
        assert_eq!(state, BreakerState::Closed, "dropped: {dropped}");
        hog.abort();
    }
    // The same while the host wants to be left alone for longer than was planned.
    let load = with_breaker(opens_after(2));
    let server = Server::script([Step::status(503), Step::retry_after(429, "2")]);
    let client = over(&server, retry(&load));
    let token = CancellationToken::new();
    let waiting = start(client.get(URL).with_extension(token.clone()));
    until(&server, ms(50)).await;
    let _ = send(client.get(URL).with_extension(NoRetry)).await;
    until(&server, ms(500)).await;
    token.cancel();
    assert_eq!(ended(waiting).await.stop(), Some(StopReason::Cancelled));
    assert_eq!((server.elapsed(), server.sends()), (ms(500), 2));
    assert_eq!(breaker(&load).failures_in_a_row(), 1);
}

#[tokio::test(start_paused = true)]
async fn what_never_left_for_reasons_of_our_own_counts_as_nothing() {
    let late = Trial::new([]).await;
    let came = send(late.get().with_extension(Deadline::after(Duration::ZERO))).await;
    came.was_never_sent(StopReason::DeadlineTooClose);
    assert_eq!(late.verdict(), (Counted::Nothing, 0));

    let invalid = Trial::new([]).await;
    let request = invalid.client.post(URL).with_extension(key("one"));
    let came = send(request.header("idempotency-key", "another")).await;
    came.was_never_sent(StopReason::InvalidInput);
    assert_eq!(invalid.verdict(), (Counted::Nothing, 0));

    let unmade = Trial::new([]).await;
    let factory =
        BodyFactory::new(|| async { Err::<reqwest::Body, _>(std::io::Error::other("no file")) });
    let came = send(unmade.client.post(URL).with_extension(factory)).await;
    assert_eq!(came.attempts(), 1);
    assert_eq!(unmade.verdict(), (Counted::Nothing, 0));

    let error = plain_http().get("no URL").build().expect_err("no URL");
    assert!(error.is_builder());
    let never = Trial::new([Step::Refuse(error)]).await;
    let _ = send(never.get()).await;
    assert_eq!(never.verdict(), (Counted::Nothing, 1));
}

/// A layer that fails by itself.
struct FailsItself;

#[async_trait::async_trait]
impl Middleware for FailsItself {
    async fn handle(
        &self,
        _: Request,
        _: &mut Extensions,
        _: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        Err(Error::middleware(std::io::Error::other("no credential")))
    }
}

#[tokio::test(start_paused = true)]
async fn another_layers_failure_counts_as_nothing() {
    let trial = Trial::new([]).await;
    let client = ClientBuilder::new(plain_http())
        .with(retry(&trial.load).build().expect("valid"))
        .with(FailsItself)
        .with(trial.server.clone())
        .build();
    let came = send(client.get(URL)).await;
    assert_eq!(
        came.report.attempts()[0].failure(),
        Some(Failure::Layer),
        "{came:?}"
    );
    assert_eq!(trial.verdict(), (Counted::Nothing, 0));
}

#[tokio::test(start_paused = true)]
async fn answers_from_another_host_after_a_redirect_count_as_nothing() {
    for status in [200, 404, 500] {
        let elsewhere = [Step::from("http://elsewhere.test/", status, &[])];
        assert_eq!(
            counted(elsewhere).await,
            (Counted::Nothing, 1),
            "{status} elsewhere"
        );
    }
    let trial = Trial::new([Step::from("http://orders.test:8080/", 503, &[])]).await;
    let _ = send(trial.get().with_extension(NoRetry)).await;
    assert_eq!(
        trial.verdict(),
        (Counted::Nothing, 1),
        "another port is another host"
    );
    let same_host = [Step::from("http://orders.test/moved", 500, &[])];
    assert_eq!(counted(same_host).await, (Counted::Failure, 1));
}

#[tokio::test(start_paused = true)]
async fn an_open_breaker_lets_every_first_send_pass_by_default() {
    let load = with_breaker(opens_after(1));
    let server = Server::script([503, 503, 200, 200, 503, 200].map(Step::status));
    let client = over(&server, retry(&load));
    fails(&client, 1).await;
    let came = send(client.get(URL)).await;
    assert_eq!(came.told(), (Some(503), Some(StopReason::BreakerOpen), 1));
    assert_eq!(
        came.result.expect("in hand").text().await.expect("whole"),
        "why"
    );
    // A success of one that began while it was open does not close it either.
    assert_eq!(send(client.get(URL)).await.told(), (Some(200), None, 1));
    assert_eq!(breaker(&load).state(), BreakerState::Open);
    // One that began half-open is believed, though it needed no permit.
    until(&server, ms(1000)).await;
    assert_eq!(breaker(&load).state(), BreakerState::HalfOpen);
    assert_eq!(send(client.get(URL)).await.told(), (Some(200), None, 1));
    assert_eq!(breaker(&load).state(), BreakerState::Closed);
    // And retries pass again.
    assert_eq!(send(client.get(URL)).await.told(), (Some(200), None, 2));
    assert_eq!(server.sends(), 6);
}

#[tokio::test(start_paused = true)]
async fn a_first_send_that_begins_half_open_and_fails_opens_it_for_longer() {
    let longer = opens_after(1).open_for(Backoff::exponential(secs(1), secs(60)));
    let load = with_breaker(longer);
    let server = Server::always(503);
    let client = over(&server, retry(&load));
    fails(&client, 1).await;
    for (trips, opened_for) in [(1, 1), (2, 2), (3, 4)] {
        assert_eq!(breaker(&load).opened(), trips);
        assert_eq!(breaker(&load).open_for(), Some(secs(opened_for)));
        sleep(secs(opened_for)).await;
        assert_eq!(breaker(&load).state(), BreakerState::HalfOpen);
        fails(&client, 1).await;
    }
    assert_eq!(breaker(&load).open_for(), Some(secs(8)));
    assert_eq!(server.starts(), [0, 1000, 3000, 7000]);
}

#[tokio::test(start_paused = true)]
async fn a_retry_may_be_the_probe() {
    let load = with_breaker(opens_after(1));
    let server = Server::script([503, 503, 200].map(Step::status));
    let client = over(&server, retry(&load).backoff(Backoff::fixed([secs(1)])));
    fails(&client, 1).await;
    until(&server, ms(1000)).await;
    let came = send(client.get(URL)).await;
    assert_eq!(came.told(), (Some(200), None, 2));
    assert_eq!(server.starts(), [0, 1000, 2000]);
    assert_eq!(breaker(&load).state(), BreakerState::Closed);
}

#[tokio::test(start_paused = true)]
async fn a_breaker_that_opens_during_a_wait_ends_it_without_a_send() {
    let load = with_breaker(opens_after(1));
    let server = Server::script([503, 503].map(Step::status));
    let client = over(&server, retry(&load).backoff(Backoff::fixed([ms(400)])));
    let waiting = start(client.get(URL));
    sleep(ms(100)).await;
    fails(&client, 1).await;
    let came = ended(waiting).await;
    assert_eq!(server.starts(), [0, 100]);
    assert_eq!(server.elapsed(), ms(400));
    let error = came.result.as_ref().expect_err("its answer is gone");
    let error = error.retry_error().expect("ours");
    assert_eq!(
        (
            error.stop(),
            error.status(),
            came.attempts(),
            error.certainty()
        ),
        (
            StopReason::BreakerOpen,
            Some(StatusCode::SERVICE_UNAVAILABLE),
            1,
            Certainty::Answered
        )
    );
    assert_eq!(came.later(), Some(ms(700)));
    assert_eq!(balance(&load), 10.0, "its token came back");
    let budget = *figures(&load).budget().expect("a budget");
    assert_eq!((budget.given(), budget.returned()), (1, 1));
    // It began before the breaker opened, so it opens it no second time.
    assert_eq!(breaker(&load).opened(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_breaker_opens_at_a_share_of_failures() {
    let load = with_breaker(
        CircuitBreaker::builder()
            .failure_ratio(0.5, 4, secs(10))
            .open_for(Backoff::fixed([secs(1)])),
    );
    let server = Server::script([200, 503, 503, 200, 503].map(Step::status));
    let client = over(&server, retry(&load).max_attempts(1));
    for (status, all, failed) in [(200, 1, 0), (503, 2, 1), (503, 3, 2), (200, 4, 2)] {
        assert_eq!(send(client.get(URL)).await.status(), Some(status));
        let now = breaker(&load);
        assert_eq!(
            (now.recent_operations(), now.recent_failures()),
            (Some(all), Some(failed))
        );
        assert_eq!(now.state(), BreakerState::Closed);
    }
    assert_eq!(send(client.get(URL)).await.status(), Some(503));
    assert_eq!(breaker(&load).state(), BreakerState::Open);
    assert_eq!(breaker(&load).recent_operations(), Some(0));
}

#[tokio::test(start_paused = true)]
async fn failures_older_than_the_span_are_forgotten_and_a_share_needs_no_row() {
    let by_share = CircuitBreaker::builder()
        .failure_ratio(1.0, 3, secs(1))
        .open_for(Backoff::fixed([secs(1)]));
    let load = with_breaker(by_share);
    let server = Server::always(503);
    let client = over(&server, retry(&load));
    // Ten in a row, but never three within a second.
    for _ in 0..10 {
        fails(&client, 1).await;
        sleep(ms(600)).await;
    }
    let now = breaker(&load);
    assert_eq!(
        (now.state(), now.failures_in_a_row()),
        (BreakerState::Closed, 10)
    );
    assert_eq!(now.recent_operations(), Some(1));
    sleep(secs(1)).await;
    fails(&client, 2).await;
    assert_eq!(breaker(&load).state(), BreakerState::Closed);
    fails(&client, 1).await;
    assert_eq!(breaker(&load).state(), BreakerState::Open);
}

#[tokio::test(start_paused = true)]
async fn the_default_breaker_is_the_documented_one() {
    for (draw, opened_for) in [(0.0, ms(500)), (0.5, ms(750))] {
        let load = shared(LoadControl::builder().breaker(CircuitBreaker::default()));
        let server = Server::always(503);
        let client = over(&server, retry(&load).random_with(move || draw));
        fails(&client, 4).await;
        assert_eq!(breaker(&load).state(), BreakerState::Closed);
        assert_eq!(breaker(&load).recent_operations(), None);
        fails(&client, 1).await;
        assert_eq!(breaker(&load).open_for(), Some(opened_for));
        // It gates retries only.
        fails(&client, 1).await;
        assert_eq!(server.sends(), 6);
        // And has one permit: of two operations that retry in half-open, one is let through.
        let server = Server::script([
            Step::after(10, 503, &[]),
            Step::after(10, 503, &[]),
            Step::after(500, 200, &[]),
        ]);
        let client = over(&server, retry(&load));
        sleep(secs(1)).await;
        let (one, two) = tokio::join!(send(client.get(URL)), async {
            sleep(ms(1)).await;
            send(client.get(URL)).await
        });
        assert_eq!(one.told(), (Some(200), None, 2));
        assert_eq!(two.stop(), Some(StopReason::BreakerOpen));
        assert_eq!((server.sends(), two.attempts()), (3, 1));
    }
}

// ---- R4: shared pushback ----

/// The first operation is told to come back in a second, the second one fails 300 ms later.
async fn told_to_wait(server: &Server, client: &ClientWithMiddleware, status: u16) {
    let came = send(client.get(URL).with_extension(NoRetry)).await;
    assert_eq!(came.status(), Some(status));
    until(server, ms(300)).await;
}

#[tokio::test(start_paused = true)]
async fn a_wish_to_be_left_alone_holds_for_the_retries_of_all() {
    for status in [429, 503] {
        let load = shared(LoadControl::builder());
        let server = Server::script([
            Step::retry_after(status, "1"),
            Step::status(503),
            Step::status(200),
        ]);
        let client = over(&server, retry(&load));
        told_to_wait(&server, &client, status).await;
        assert_eq!(figures(&load).pushed_back_for(), ms(700));
        let came = send(client.get(URL)).await;
        assert_eq!(came.told(), (Some(200), None, 2));
        assert_eq!(server.starts(), [0, 300, 1000], "{status}");
        assert_eq!(came.report.attempts()[1].waited(), ms(700));
        assert_eq!(figures(&load).pushed_back_for(), ms(0));
    }
}

#[tokio::test(start_paused = true)]
async fn the_retries_of_other_hosts_do_not_wait() {
    let load = shared(LoadControl::builder());
    let server = Server::script([
        Step::retry_after(429, "1"),
        Step::status(503),
        Step::status(200),
    ]);
    let client = over(&server, retry(&load));
    told_to_wait(&server, &client, 429).await;
    assert_eq!(
        send(client.get(OTHER_URL)).await.told(),
        (Some(200), None, 2)
    );
    assert_eq!(server.starts(), [0, 300, 400]);
    assert_eq!(figures(&load).pushed_back_for(), ms(600));
    let other = load.snapshot(OTHER_HOST).expect("known");
    assert_eq!(other.pushed_back_for(), ms(0));
}

#[tokio::test(start_paused = true)]
async fn every_retry_keeps_the_floor_and_adds_jitter_of_its_own() {
    let mut starts = HashSet::new();
    for seed in 0..500 {
        let load = shared(LoadControl::builder());
        let server = Server::script([
            Step::retry_after(503, "1"),
            Step::status(503),
            Step::status(200),
        ]);
        let random = Mutex::new(fastrand::Rng::with_seed(seed));
        let jittered = retry(&load)
            .backoff(Backoff::full_jitter(ms(100), secs(1)))
            .random_with(move || support::lock(&random).f64());
        let client = over(&server, jittered);
        told_to_wait(&server, &client, 503).await;
        let came = send(client.get(URL)).await;
        let waited = came.report.attempts()[1].waited();
        assert!((ms(700)..=ms(800)).contains(&waited), "{seed}: {waited:?}");
        let at = server.starts()[2];
        assert!((1000..=1101).contains(&at), "{seed}: {at}");
        starts.insert(at);
    }
    assert!(starts.len() > 50, "{} different starts", starts.len());
}

#[tokio::test(start_paused = true)]
async fn who_has_no_time_for_the_wait_stops_at_once_with_the_answer_in_hand() {
    let load = shared(LoadControl::builder());
    let server = Server::script([Step::retry_after(503, "1"), Step::status(503)]);
    let client = over(&server, retry(&load));
    told_to_wait(&server, &client, 503).await;
    let before = balance(&load);
    let came = send(client.get(URL).with_extension(Deadline::after(ms(500)))).await;
    assert_eq!((server.starts(), server.elapsed()), (vec![0, 300], ms(300)));
    assert_eq!(
        came.told(),
        (Some(503), Some(StopReason::RetryAfterTooLong), 1)
    );
    assert_eq!(came.later(), Some(ms(700)));
    assert_eq!(balance(&load), before);
    assert_eq!(
        came.result.expect("in hand").text().await.expect("whole"),
        "why"
    );
}

#[tokio::test(start_paused = true)]
async fn a_shared_wait_over_max_retry_after_stops_at_once_too() {
    let load = shared(LoadControl::builder());
    let server = Server::script([Step::retry_after(503, "5"), Step::status(503)]);
    let client = over(&server, retry(&load).max_retry_after(secs(4)));
    told_to_wait(&server, &client, 503).await;
    let came = send(client.get(URL)).await;
    assert_eq!(
        came.told(),
        (Some(503), Some(StopReason::RetryAfterTooLong), 1)
    );
    assert_eq!(came.later(), Some(ms(4700)));
    assert_eq!(server.sends(), 2);
}

/// The host has asked to be left alone until 1 s; what becomes of a first send at 300 ms?
async fn first_send(mode: FirstSends, deadline: Duration) -> (Server, Came) {
    let load = shared(LoadControl::builder().pushback(mode));
    let server = Server::script([Step::retry_after(429, "1"), Step::status(200)]);
    let jittered = retry(&load)
        .backoff(Backoff::full_jitter(ms(100), secs(1)))
        .random_with(|| 0.5);
    let client = over(&server, jittered);
    told_to_wait(&server, &client, 429).await;
    let came = send(client.get(URL).with_extension(Deadline::after(deadline))).await;
    (server, came)
}

#[tokio::test(start_paused = true)]
async fn first_sends_pass_while_a_host_pushes_back_unless_told_otherwise() {
    assert_eq!(FirstSends::default(), FirstSends::Pass);
    let (server, came) = first_send(FirstSends::Pass, secs(10)).await;
    assert_eq!((server.starts(), came.status()), (vec![0, 300], Some(200)));
    assert_eq!(came.report.attempts()[0].waited(), ms(0));
}

#[tokio::test(start_paused = true)]
async fn first_sends_wait_where_they_are_to() {
    let (server, came) = first_send(FirstSends::Wait, secs(10)).await;
    assert_eq!(server.starts(), [0, 1050]);
    assert_eq!(came.told(), (Some(200), None, 1));
    let attempt = &came.report.attempts()[0];
    assert_eq!((attempt.waited(), attempt.started_at()), (ms(750), ms(750)));
}

#[tokio::test(start_paused = true)]
async fn a_first_send_that_has_no_time_to_wait_is_refused() {
    let (server, came) = first_send(FirstSends::Wait, ms(500)).await;
    assert_eq!((server.starts(), server.elapsed()), (vec![0], ms(300)));
    came.was_never_sent(StopReason::RetryAfterTooLong);
    assert_eq!(came.later(), Some(ms(700)));
}

#[tokio::test(start_paused = true)]
async fn first_sends_are_refused_where_they_are_to_be() {
    let (server, came) = first_send(FirstSends::Refuse, secs(10)).await;
    assert_eq!((server.starts(), server.elapsed()), (vec![0], ms(300)));
    came.was_never_sent(StopReason::RetryAfterTooLong);
    assert_eq!(came.later(), Some(ms(700)));
}

#[tokio::test(start_paused = true)]
async fn first_sends_that_wait_do_not_all_come_at_once() {
    let load = shared(LoadControl::builder().pushback(FirstSends::Wait));
    let server = Server::script([Step::retry_after(429, "1")]).then_always(200);
    let random = Mutex::new(fastrand::Rng::with_seed(4));
    let jittered = retry(&load)
        .backoff(Backoff::full_jitter(ms(100), secs(1)))
        .random_with(move || support::lock(&random).f64());
    let client = over(&server, jittered);
    told_to_wait(&server, &client, 429).await;
    let herd: Vec<_> = (0..100).map(|_| start(client.get(URL))).collect();
    for operation in herd {
        assert_eq!(ended(operation).await.told(), (Some(200), None, 1));
    }
    let starts = server.starts().split_off(1);
    assert!(starts.iter().all(|&at| (1000..=1101).contains(&at)));
    let distinct: HashSet<_> = starts.iter().collect();
    assert!(distinct.len() > 40, "{} different starts", distinct.len());
}

#[tokio::test(start_paused = true)]
async fn a_wish_that_arrives_during_a_wait_prolongs_it() {
    let load = shared(LoadControl::builder());
    let server = Server::script([
        Step::status(503),
        Step::retry_after(429, "2"),
        Step::status(200),
    ]);
    let client = over(&server, retry(&load));
    let waiting = start(client.get(URL));
    until(&server, ms(50)).await;
    let other = send(client.get(URL).with_extension(NoRetry)).await;
    assert_eq!(other.status(), Some(429));
    let came = ended(waiting).await;
    assert_eq!(came.told(), (Some(200), None, 2));
    assert_eq!(server.starts(), [0, 50, 2050]);
    // 100 ms as planned at first, and the 1,950 that were left of the two seconds then.
    assert_eq!(came.report.attempts()[1].waited(), ms(2050));
}

#[tokio::test(start_paused = true)]
async fn a_wish_that_arrives_during_a_wait_and_does_not_fit_ends_it() {
    let load = shared(LoadControl::builder());
    let server = Server::script([Step::status(503), Step::retry_after(429, "2")]);
    let client = over(&server, retry(&load));
    let waiting = start(client.get(URL).with_extension(Deadline::after(secs(1))));
    until(&server, ms(50)).await;
    let _ = send(client.get(URL).with_extension(NoRetry)).await;
    let came = ended(waiting).await;
    assert_eq!((server.starts(), server.elapsed()), (vec![0, 50], ms(100)));
    assert_eq!(came.stop(), Some(StopReason::RetryAfterTooLong));
    assert_eq!(came.later(), Some(ms(1950)));
    let budget = *figures(&load).budget().expect("a budget");
    assert_eq!((budget.given(), budget.returned()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_first_send_that_waits_can_be_cancelled_and_dropped() {
    let load = shared(LoadControl::builder().pushback(FirstSends::Wait));
    let server = Server::script([Step::retry_after(429, "1")]);
    let client = over(&server, retry(&load));
    told_to_wait(&server, &client, 429).await;
    let token = CancellationToken::new();
    let waiting = start(client.get(URL).with_extension(token.clone()));
    let dropped = start(client.get(URL));
    until(&server, ms(500)).await;
    token.cancel();
    dropped.abort();
    let came = ended(waiting).await;
    assert_eq!(server.elapsed(), ms(500));
    came.was_never_sent(StopReason::Cancelled);
    sleep(secs(10)).await;
    assert_eq!(server.sends(), 1);
    assert_eq!(figures(&load).stopped(StopReason::Cancelled), 2);
}

#[tokio::test(start_paused = true)]
async fn the_latest_wish_counts_not_the_last_one() {
    let load = shared(LoadControl::builder());
    let server = Server::script([
        Step::retry_after(429, "5"),
        Step::retry_after(503, "1"),
        Step::status(503),
        Step::status(200),
    ]);
    let client = over(&server, retry(&load));
    for status in [429, 503] {
        let came = send(client.get(URL).with_extension(NoRetry)).await;
        assert_eq!(came.status(), Some(status));
    }
    let _ = send(client.get(URL)).await;
    assert_eq!(server.starts(), [0, 0, 0, 5000]);
}

#[tokio::test(start_paused = true)]
async fn what_says_nothing_of_the_hosts_load_pushes_nobody_back() {
    for step in [
        Step::retry_after(500, "1"),
        Step::retry_after(502, "1"),
        Step::retry_after(504, "1"),
        Step::retry_after(404, "1"),
        Step::from("http://elsewhere.test/", 503, &[("retry-after", "1")]),
        Step::from("http://elsewhere.test/", 429, &[("retry-after", "1")]),
    ] {
        let row = format!("{step:?}");
        let load = shared(LoadControl::builder());
        let server = Server::script([step, Step::status(503), Step::status(200)]);
        let listed =
            [500, 502, 503, 504, 429].map(|status| StatusCode::from_u16(status).expect("one"));
        let client = over(&server, retry(&load).retryable_statuses(listed));
        let _ = send(client.get(URL).with_extension(NoRetry)).await;
        assert_eq!(figures(&load).pushed_back_for(), ms(0), "{row}");
        until(&server, ms(300)).await;
        assert_eq!(send(client.get(URL)).await.told(), (Some(200), None, 2));
        assert_eq!(server.starts(), [0, 300, 400], "{row}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_hour_is_the_longest_that_a_host_can_ask_for() {
    let load = shared(LoadControl::builder());
    let server = Server::script([Step::retry_after(503, "99999999999999999999")]);
    let came = send(over(&server, retry(&load)).get(URL)).await;
    assert_eq!(came.stop(), Some(StopReason::RetryAfterTooLong));
    assert_eq!(figures(&load).pushed_back_for(), secs(3600));
}

// ---- The concurrency limit ----

fn limited(attempts: usize) -> Arc<LoadControl> {
    let budget = RetryBudget::fixed(5);
    shared(
        LoadControl::builder()
            .concurrency_limit(attempts)
            .budget(budget),
    )
}

fn in_flight_and_waiting(load: &LoadControl) -> (Option<usize>, Option<usize>) {
    let figures = figures(load);
    (figures.in_flight(), figures.waiting())
}

#[tokio::test(start_paused = true)]
async fn no_more_attempts_than_allowed_are_with_a_host_at_once() {
    let load = limited(2);
    let server = Server::script((0..5).map(|_| Step::after(100, 200, &[])));
    let client = over(&server, retry(&load));
    let operations: Vec<_> = (0..5).map(|_| start(client.get(URL))).collect();
    until(&server, ms(50)).await;
    assert_eq!(in_flight_and_waiting(&load), (Some(2), Some(3)));
    for operation in operations {
        assert_eq!(ended(operation).await.told(), (Some(200), None, 1));
    }
    assert_eq!(server.elapsed(), ms(300));
    assert_eq!(server.starts(), [0, 0, 100, 100, 200]);
    assert_eq!(most_at_once(&server, ms(100)), 2);
    assert_eq!(in_flight_and_waiting(&load), (Some(0), Some(0)));
}

#[tokio::test(start_paused = true)]
async fn a_wait_between_attempts_holds_no_permit() {
    let load = limited(1);
    let server = Server::script([503, 200, 200].map(Step::status));
    let client = over(&server, retry(&load).backoff(Backoff::fixed([secs(1)])));
    let waiting = start(client.get(format!("{URL}/waits")));
    until(&server, ms(100)).await;
    assert_eq!(in_flight_and_waiting(&load), (Some(0), Some(0)));
    assert_eq!(
        send(client.get(format!("{URL}/goes"))).await.status(),
        Some(200)
    );
    assert_eq!(server.elapsed(), ms(100));
    assert_eq!(ended(waiting).await.told(), (Some(200), None, 2));
    assert_eq!(server.starts(), [0, 100, 1000]);
    assert_eq!(paths(&server), ["waits", "goes", "waits"]);
}

#[tokio::test(start_paused = true)]
async fn a_permit_is_waited_for_until_no_useful_attempt_would_fit() {
    let load = limited(1);
    let server = Server::script([Step::Hang]);
    let settings = retry(&load).reserve(ms(200)).minimum_attempt(ms(300));
    let client = over(&server, settings);
    let hog = start(client.get(URL));
    until(&server, ms(10)).await;
    let came = send(client.post(URL).with_extension(Deadline::after(secs(1)))).await;
    assert_eq!(server.elapsed(), ms(510));
    assert_eq!(server.sends(), 1);
    came.was_never_sent(StopReason::ConcurrencyLimit);
    assert_eq!(came.later(), None);
    let error = came.result.expect_err("nothing was sent");
    assert!(error.retry_error().expect("ours").is_timeout());
    assert_eq!(figures(&load).stopped(StopReason::ConcurrencyLimit), 1);
    assert_eq!(in_flight_and_waiting(&load), (Some(1), Some(0)));
    hog.abort();
}

#[tokio::test(start_paused = true)]
async fn a_permit_that_comes_at_the_last_moment_is_taken() {
    let load = limited(1);
    let server = Server::script([Step::after(509, 200, &[]), Step::after(299, 200, &[])]);
    let settings = retry(&load).reserve(ms(200)).minimum_attempt(ms(300));
    let client = over(&server, settings);
    let hog = start(client.get(URL));
    until(&server, ms(10)).await;
    let came = send(client.get(URL).with_extension(Deadline::after(secs(1)))).await;
    assert_eq!(came.told(), (Some(200), None, 1));
    assert_eq!(server.starts(), [0, 509]);
    assert_eq!(came.report.attempts()[0].limit(), Some(ms(301)));
    assert_eq!(ended(hog).await.status(), Some(200));
}

#[tokio::test(start_paused = true)]
async fn a_retry_that_gets_no_permit_gives_its_token_back_and_forgets_nothing() {
    let load = limited(1);
    let server = Server::script([Step::Fail(read_and_closed()), Step::Hang]);
    let client = over(&server, retry(&load));
    let order = client
        .post(URL)
        .body("order")
        .with_extension(key("order-17"));
    let ordering = start(order.with_extension(Deadline::after(secs(1))));
    until(&server, ms(50)).await;
    let hog = start(client.get(URL));
    until(&server, ms(500)).await;
    assert_eq!(in_flight_and_waiting(&load), (Some(1), Some(1)));
    assert_eq!(balance(&load), 4.0);
    let came = ended(ordering).await;
    assert_eq!((server.starts(), server.elapsed()), (vec![0, 50], ms(999)));
    let error = came.result.as_ref().expect_err("no answer");
    let error = error.retry_error().expect("ours");
    assert_eq!(
        (error.stop(), error.certainty(), came.attempts()),
        (StopReason::ConcurrencyLimit, Certainty::Unknown, 1)
    );
    assert_eq!(
        error.next_step(),
        NextStep::ConfirmOutcome {
            key: Some(key("order-17"))
        }
    );
    let budget = *figures(&load).budget().expect("a budget");
    assert_eq!(
        (budget.balance(), budget.given(), budget.returned()),
        (5.0, 1, 1)
    );
    assert_eq!(in_flight_and_waiting(&load), (Some(1), Some(0)));
    hog.abort();
}

#[tokio::test(start_paused = true)]
async fn who_leaves_the_line_leaves_no_permit_behind() {
    let load = limited(1);
    let server = Server::script([Step::after(500, 200, &[]), Step::status(200)]);
    let client = over(&server, retry(&load));
    let hog = start(client.get(URL));
    until(&server, ms(10)).await;
    let token = CancellationToken::new();
    let cancelled = start(client.get(URL).with_extension(token.clone()));
    let dropped = start(client.get(URL));
    let patient = start(client.get(URL));
    until(&server, ms(100)).await;
    assert_eq!(in_flight_and_waiting(&load), (Some(1), Some(3)));
    token.cancel();
    dropped.abort();
    let came = ended(cancelled).await;
    came.was_never_sent(StopReason::Cancelled);
    assert!(dropped.await.is_err_and(|error| error.is_cancelled()));
    assert_eq!(server.elapsed(), ms(100));
    assert_eq!(in_flight_and_waiting(&load), (Some(1), Some(1)));
    assert_eq!(ended(hog).await.status(), Some(200));
    assert_eq!(ended(patient).await.told(), (Some(200), None, 1));
    assert_eq!(server.starts(), [0, 500]);
    assert_eq!(in_flight_and_waiting(&load), (Some(0), Some(0)));
    assert_eq!(figures(&load).stopped(StopReason::Cancelled), 2);
}

#[tokio::test(start_paused = true)]
async fn who_leaves_just_as_the_permit_comes_leaves_it_to_the_next() {
    let load = limited(1);
    let server = Server::script([Step::after(500, 200, &[]), Step::status(200)]);
    let client = over(&server, retry(&load));
    let hog = start(client.get(URL));
    until(&server, ms(10)).await;
    let mut leaving = Box::pin(client.get(URL).send());
    assert!(has_to_wait(leaving.as_mut()).await);
    let patient = start(client.get(URL));
    until(&server, ms(400)).await;
    // The permit is handed to the first in line, whose future is not polled again.
    assert_eq!(ended(hog).await.status(), Some(200));
    sleep(ms(100)).await;
    assert_eq!(server.starts(), [0]);
    drop(leaving);
    assert_eq!(ended(patient).await.told(), (Some(200), None, 1));
    assert_eq!(server.starts(), [0, 600]);
    assert_eq!(in_flight_and_waiting(&load), (Some(0), Some(0)));
}

/// Polls once; whether it has to wait.
async fn has_to_wait<F: Future>(mut future: std::pin::Pin<&mut F>) -> bool {
    std::future::poll_fn(|context| {
        std::task::Poll::Ready(future.as_mut().poll(context).is_pending())
    })
    .await
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_is_dropped_in_the_air_gives_its_permit_back() {
    let load = limited(1);
    let server = Server::script([Step::Hang, Step::status(200)]);
    let client = over(&server, retry(&load));
    let dropped = tokio::time::timeout(ms(100), client.get(URL).send());
    assert!(dropped.await.is_err());
    assert_eq!(in_flight_and_waiting(&load), (Some(0), Some(0)));
    assert_eq!(send(client.get(URL)).await.status(), Some(200));
    assert_eq!(server.starts(), [0, 100]);
}

#[tokio::test(start_paused = true)]
async fn a_full_host_holds_no_other_up() {
    let load = limited(1);
    let server = Server::script([Step::Hang, Step::status(200)]);
    let client = over(&server, retry(&load));
    let hog = start(client.get(URL));
    let waiting = start(client.get(URL));
    until(&server, ms(10)).await;
    assert_eq!(in_flight_and_waiting(&load), (Some(1), Some(1)));
    assert_eq!(send(client.get(OTHER_URL)).await.status(), Some(200));
    assert_eq!(server.starts(), [0, 10]);
    hog.abort();
    waiting.abort();
}

#[tokio::test(start_paused = true)]
async fn permits_go_to_who_asked_first() {
    let load = limited(1);
    let server = Server::script((0..6).map(|_| Step::after(100, 200, &[])));
    let client = over(&server, retry(&load));
    let mut operations = Vec::new();
    for number in 0..6 {
        operations.push(start(client.get(format!("{URL}/{number}"))));
        sleep(ms(1)).await;
    }
    for operation in operations {
        assert_eq!(ended(operation).await.status(), Some(200));
    }
    assert_eq!(paths(&server), ["0", "1", "2", "3", "4", "5"]);
    assert_eq!(server.starts(), [0, 100, 200, 300, 400, 500]);
}

#[tokio::test(start_paused = true)]
async fn who_gets_a_permit_of_a_host_that_wants_to_be_left_alone_passes_it_on() {
    let load = limited(1);
    let told = Step::after(100, 429, &[("retry-after", "1")]);
    let server = Server::script([
        Step::status(503),
        told,
        Step::status(200),
        Step::status(200),
    ]);
    let client = over(&server, retry(&load));
    let retrying = start(client.get(format!("{URL}/retries")));
    until(&server, ms(50)).await;
    let hog = start(client.get(format!("{URL}/told")).with_extension(NoRetry));
    until(&server, ms(120)).await;
    assert_eq!(in_flight_and_waiting(&load), (Some(1), Some(1)));
    until(&server, ms(300)).await;
    assert_eq!(in_flight_and_waiting(&load), (Some(0), Some(0)));
    let first = send(client.get(format!("{URL}/first"))).await;
    assert_eq!((first.status(), server.elapsed()), (Some(200), ms(300)));
    assert_eq!(ended(hog).await.status(), Some(429));
    assert_eq!(ended(retrying).await.told(), (Some(200), None, 2));
    assert_eq!(server.starts(), [0, 50, 300, 1150]);
    assert_eq!(paths(&server), ["retries", "told", "first", "retries"]);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_is_read_within_the_attempt_keeps_its_permit() {
    for (buffered, expected) in [(true, [0, 500]), (false, [0, 10])] {
        let load = limited(1);
        let server = Server::script([Step::Stall(200), Step::status(200)]);
        let settings = retry(&load).attempt_timeout(ms(500)).max_attempts(1);
        let settings = match buffered {
            true => settings.buffer_response(100),
            false => settings,
        };
        let client = over(&server, settings);
        let slow = start(client.get(URL));
        until(&server, ms(10)).await;
        assert_eq!(send(client.get(URL)).await.status(), Some(200));
        assert_eq!(server.starts(), expected, "buffered: {buffered}");
        drop(ended(slow).await);
    }
}

#[tokio::test(start_paused = true)]
async fn a_line_of_waiters_takes_up_no_probe() {
    // One is half-open's probe, the other waits for a concurrency permit and must not hold the leave.
    let rules = opens_after(1).gate_first_sends(true).half_open_permits(2);
    let load = shared(
        LoadControl::builder()
            .breaker(rules.build().expect("valid"))
            .concurrency_limit(1),
    );
    let server = Server::script([
        Step::status(503),
        Step::after(100, 404, &[]),
        Step::status(200),
    ]);
    let client = over(&server, retry(&load));
    fails(&client, 1).await;
    until(&server, ms(1000)).await;
    let probe = start(client.get(URL));
    let waiting = start(client.get(URL));
    until(&server, ms(1050)).await;
    assert_eq!(in_flight_and_waiting(&load), (Some(1), Some(1)));
    assert_eq!(breaker(&load).permits_out(), 1);
    assert_eq!(ended(probe).await.status(), Some(404));
    assert_eq!(ended(waiting).await.status(), Some(200));
    assert_eq!(server.starts(), [0, 1000, 1100]);
}

// ---- What shares its state: keys ----

fn keys(load: &LoadControl) -> Vec<String> {
    let snapshots = load.snapshots();
    snapshots.iter().map(|load| load.key().to_owned()).collect()
}

async fn visit(client: &ClientWithMiddleware, url: &str) {
    assert_eq!(send(client.get(url)).await.status(), Some(200), "{url}");
}

#[tokio::test(start_paused = true)]
async fn state_is_kept_by_host_and_port() {
    let load = shared(LoadControl::builder());
    let server = Server::always(200);
    let client = over(&server, retry(&load));
    for url in [
        "http://127.0.0.1:1/a",
        "http://127.0.0.1:2/a",
        "http://127.0.0.1:1/b?c=d",
        "http://localhost:1/",
        "http://ORDERS.test/",
        "http://orders.test:80/",
        "http://orders.test:8080/",
        "http://[::1]:8080/",
    ] {
        visit(&client, url).await;
    }
    assert_eq!(
        keys(&load),
        [
            "[::1]:8080",
            "orders.test:8080",
            "orders.test",
            "localhost:1",
            "127.0.0.1:1",
            "127.0.0.1:2",
        ]
    );
    let operations = |key| load.snapshot(key).map(|load| load.operations());
    assert_eq!(operations("127.0.0.1:1"), Some(2));
    assert_eq!(operations("127.0.0.1:2"), Some(1));
    assert_eq!(operations("orders.test"), Some(2));
    assert_eq!(operations("127.0.0.1"), None);
}

/// The URL as it is, credentials and all: a request builder would take them out of it.
fn request_to(url: &str) -> Request {
    Request::new(Method::GET, url.parse().expect("a URL"))
}

#[tokio::test(start_paused = true)]
async fn credentials_are_no_part_of_the_key_and_are_shown_nowhere() {
    let load = shared(LoadControl::builder());
    let server = Server::always(200);
    let client = over(&server, retry(&load));
    visit(&client, URL).await;
    visit(&client, "http://USER:PASSWORD@orders.test/orders").await;
    let with_credentials = request_to("http://USER:PASSWORD@orders.test/orders?token=SECRET");
    client.execute(with_credentials).await.expect("an answer");
    let seen = server.seen();
    assert!(seen[2].url.contains("PASSWORD"), "{}", seen[2].url);
    assert_eq!(keys(&load), [HOST]);
    let figures = figures(&load);
    assert_eq!((figures.key(), figures.operations()), (HOST, 3));
    for shown in [
        format!("{load:?}"),
        format!("{load:#?}"),
        format!("{figures:?}"),
        format!("{figures}"),
        format!("{:?}", LoadControl::builder()),
    ] {
        for secret in ["USER", "PASSWORD", "SECRET"] {
            assert!(!shown.contains(secret), "{secret} in {shown}");
        }
    }
}

#[derive(Clone)]
struct Tenant(&'static str);

#[tokio::test]
async fn time_that_finding_the_key_takes_is_part_of_the_operations() {
    let slow = LoadControl::builder().key_by(|_, _| {
        std::thread::sleep(ms(60));
        "key".into()
    });
    let load = shared(slow);
    let server = Server::always(200);
    let client = over(&server, retry(&load).deadline(ms(20)));
    let order = send(client.post(URL).body("order")).await;
    assert_eq!(order.stop(), Some(StopReason::DeadlineTooClose));
    assert_eq!(server.sends(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_key_of_ones_own_decides_what_is_shared() {
    let by_tenant = LoadControl::builder().key_by(|request, extensions| {
        assert!(
            request.body().is_none(),
            "the request comes without its body"
        );
        assert_eq!(request.url().host_str(), Some(HOST));
        match extensions.get::<Tenant>() {
            Some(Tenant(name)) => (*name).into(),
            None => format!("path {}", request.url().path()).into(),
        }
    });
    let load = shared(by_tenant.budget(RetryBudget::fixed(1)));
    let server = Server::always(503);
    let client = over(&server, retry(&load).max_attempts(2));
    let order = |tenant| {
        let request = client.post(URL).body("order").with_extension(key("one"));
        send(request.with_extension(Tenant(tenant)))
    };
    let attempts = Some(StopReason::AttemptsExhausted);
    let exhausted = Some(StopReason::BudgetExhausted);
    assert_eq!(order("acme").await.stop(), attempts);
    assert_eq!(order("acme").await.stop(), exhausted);
    assert_eq!(order("umbrella").await.stop(), attempts);
    assert_eq!(send(client.get(URL)).await.stop(), attempts);
    assert_eq!(server.sends(), 2 + 1 + 2 + 2);
    assert_eq!(keys(&load), ["path /orders", "umbrella", "acme"]);
}

#[tokio::test(start_paused = true)]
async fn two_clients_with_one_registry_share_all_of_it() {
    let load = shared(
        LoadControl::builder()
            .budget(RetryBudget::fixed(2))
            .breaker(opens_after(3).build().expect("valid"))
            .concurrency_limit(1),
    );
    let (one, two) = (Server::always(503), Server::always(503));
    let first = over(&one, retry(&load).max_attempts(3));
    let second = over(&two, retry(&load).max_attempts(3));
    // The budget: the first spends what the second would have.
    assert_eq!(
        send(first.get(URL)).await.stop(),
        Some(StopReason::AttemptsExhausted)
    );
    assert_eq!(
        send(second.get(URL)).await.stop(),
        Some(StopReason::BudgetExhausted)
    );
    assert_eq!((one.sends(), two.sends()), (3, 1));
    // The breaker: the third failure, wherever it is, opens it for both.
    assert_eq!(
        send(first.get(URL)).await.stop(),
        Some(StopReason::BudgetExhausted)
    );
    for client in [&first, &second] {
        assert_eq!(
            send(client.get(URL)).await.stop(),
            Some(StopReason::BreakerOpen)
        );
    }
    assert_eq!((one.sends(), two.sends()), (5, 2));
    // And their figures are together.
    assert_eq!(figures(&load).operations(), 5);
}

#[tokio::test(start_paused = true)]
async fn two_clients_with_one_registry_share_pushback_and_permits() {
    let load = limited(1);
    let one = Server::script([Step::retry_after(429, "1"), Step::after(500, 200, &[])]);
    let two = Server::script([503, 200, 200].map(Step::status));
    let first = over(&one, retry(&load));
    let second = over(&two, retry(&load));
    let told = send(first.get(URL).with_extension(NoRetry)).await;
    assert_eq!(told.status(), Some(429));
    assert_eq!(send(second.get(URL)).await.told(), (Some(200), None, 2));
    assert_eq!(two.starts(), [0, 1000]);
    let hog = start(first.get(URL));
    until(&one, ms(1100)).await;
    assert_eq!(send(second.get(URL)).await.status(), Some(200));
    assert_eq!(two.starts(), [0, 1000, 1500]);
    assert_eq!(ended(hog).await.status(), Some(200));
}

#[tokio::test(start_paused = true)]
async fn a_clients_own_budget_comes_before_that_of_the_key() {
    let own = Arc::new(RetryBudget::fixed(1));
    let load = shared(LoadControl::builder().budget(RetryBudget::fixed(100)));
    let server = Server::always(503);
    // In either order of the two settings.
    for settings in [
        retry(&load).budget(Arc::clone(&own)),
        RetryMiddleware::builder()
            .budget(Arc::clone(&own))
            .max_attempts(4)
            .load_control(Arc::clone(&load)),
    ] {
        let came = send(over(&server, settings).get(URL)).await;
        assert_eq!(came.stop(), Some(StopReason::BudgetExhausted));
    }
    assert_eq!((server.sends(), own.balance()), (3, 0.0));
    let keyed = *figures(&load).budget().expect("it has one");
    assert_eq!(
        (keyed.balance(), keyed.given(), keyed.refused()),
        (100.0, 0, 0)
    );
    // Everything else is shared all the same.
    assert_eq!(figures(&load).operations(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_client_can_do_without_any_budget() {
    let load = shared(LoadControl::builder().budget(RetryBudget::fixed(0)));
    let server = Server::always(503);
    let came = send(over(&server, retry(&load)).get(URL)).await;
    assert_eq!(came.stop(), Some(StopReason::BudgetExhausted));
    let came = send(over(&server, retry(&load).without_budget()).get(URL)).await;
    assert_eq!(came.stop(), Some(StopReason::AttemptsExhausted));
    assert_eq!(server.sends(), 1 + 4);
    let unbounded = shared(LoadControl::builder().without_budget());
    let came = send(
        over(
            &server,
            retry(&unbounded).max_attempts(50).deadline(Duration::MAX),
        )
        .get(URL),
    )
    .await;
    assert_eq!(came.stop(), Some(StopReason::AttemptsExhausted));
    assert_eq!(server.sends(), 5 + 50);
    assert!(figures(&unbounded).budget().is_none());
}

#[tokio::test(start_paused = true)]
async fn without_load_control_a_client_is_as_it_was() {
    let server = Server::always(503);
    let plain = || {
        RetryMiddleware::builder()
            .backoff(Backoff::fixed([ms(1)]))
            .build()
            .expect("valid")
    };
    // A budget of its own, 10 tokens for all hosts together.
    let client = server.client([plain()]);
    for url in [URL, OTHER_URL, URL, OTHER_URL, URL] {
        let came = send(client.get(url)).await;
        assert_eq!(came.stop(), Some(StopReason::AttemptsExhausted));
    }
    assert_eq!(
        send(client.get(OTHER_URL)).await.stop(),
        Some(StopReason::BudgetExhausted)
    );
    assert_eq!(server.sends(), 5 * 3 + 1);
    // And no pushback of others.
    let server = Server::script([
        Step::retry_after(429, "1"),
        Step::status(503),
        Step::status(200),
    ]);
    let client = server.client([plain()]);
    let _ = send(client.get(URL).with_extension(NoRetry)).await;
    let _ = send(client.get(URL)).await;
    assert_eq!(server.starts(), [0, 0, 1]);
}

#[tokio::test(start_paused = true)]
async fn the_key_that_was_used_least_recently_is_forgotten() {
    let load = shared(LoadControl::builder().capacity(2));
    assert!(load.is_empty());
    let server = Server::always(200);
    let client = over(&server, retry(&load));
    for url in ["http://a.test/", "http://b.test/", "http://a.test/"] {
        visit(&client, url).await;
    }
    // To look is not to use.
    assert!(load.snapshot("b.test").is_some());
    assert_eq!(keys(&load), ["a.test", "b.test"]);
    visit(&client, "http://c.test/").await;
    assert_eq!(keys(&load), ["c.test", "a.test"]);
    assert!(load.snapshot("b.test").is_none());
    // It starts afresh when it is seen again.
    visit(&client, "http://b.test/").await;
    let again = load.snapshot("b.test").expect("known again");
    assert_eq!((again.operations(), load.len()), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn a_key_that_is_in_use_is_kept() {
    let load = shared(LoadControl::builder().capacity(2));
    let server = Server::script([Step::Hang]).then_always(200);
    let client = over(&server, retry(&load));
    let in_use = start(client.get(URL));
    sleep(ms(1)).await;
    for url in ["http://b.test/", "http://c.test/", "http://d.test/"] {
        visit(&client, url).await;
        assert!(load.snapshot(HOST).is_some(), "after {url}");
        assert_eq!(load.len(), 2);
    }
    in_use.abort();
    assert!(in_use.await.is_err());
    visit(&client, "http://e.test/").await;
    visit(&client, "http://f.test/").await;
    assert!(load.snapshot(HOST).is_none());
}

#[tokio::test(start_paused = true)]
async fn capacity_holds_even_where_every_key_is_in_use() {
    for capacity in [1, 2, 20] {
        let load = shared(LoadControl::builder().capacity(capacity));
        let server = Server::script((0..50).map(|_| Step::after(100, 503, &[]))).then_always(200);
        let client = over(&server, retry(&load));
        let operations: Vec<_> = (0..50)
            .map(|host| start(client.get(format!("http://h{host}.test/"))))
            .collect();
        sleep(ms(50)).await;
        assert_eq!((server.sends(), load.len()), (50, capacity));
        // Those whose key was forgotten end as if nothing had happened.
        for operation in operations {
            assert_eq!(ended(operation).await.told(), (Some(200), None, 2));
        }
        assert_eq!((server.sends(), load.len()), (100, capacity));
    }
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_keys_never_exceed_the_capacity() {
    let load = shared(LoadControl::builder().capacity(64));
    let server = Server::always(200);
    let client = over(&server, retry(&load));
    for host in 0..10_000 {
        visit(&client, &format!("http://h{host}.test/")).await;
        assert!(load.len() <= 64);
    }
    assert_eq!(load.len(), 64);
    assert_eq!(keys(&load)[0], "h9999.test");
    assert_eq!(keys(&load)[63], "h9936.test");
}

// ---- Figures ----

#[tokio::test(start_paused = true)]
async fn a_snapshot_has_every_figure_of_a_known_history() {
    let load = shared(
        LoadControl::builder()
            .budget(
                RetryBudget::builder()
                    .ratio(0.5)
                    .burst(4)
                    .trickle(Duration::MAX)
                    .build()
                    .expect("valid"),
            )
            .breaker(
                opens_after(3)
                    .failure_ratio(1.0, 100, secs(10))
                    .half_open_permits(2)
                    .build()
                    .expect("valid"),
            )
            .concurrency_limit(3),
    );
    let server = Server::script([
        // 1: two attempts and a success; 2: given up in the air; 3 and 4: out of tokens.
        Step::status(503),
        Step::status(200),
        Step::Hang,
        Step::status(503),
        Step::status(503),
        Step::status(503),
        Step::status(503),
        Step::status(503),
        // 5: asks for more time than there is, and is the third failure in a row.
        Step::retry_after(503, "30"),
        // 6: refused by the breaker, one of the two in the air.
        Step::status(503),
        Step::Hang,
        Step::Hang,
    ]);
    assert!(load.snapshot(HOST).is_none());
    let client = over(&server, retry(&load));
    assert_eq!(send(client.get(URL)).await.told(), (Some(200), None, 2));
    // 4 − 1 + 0.5.
    let now = figures(&load);
    assert_eq!((now.operations(), now.retries()), (1, 1));
    assert_eq!(now.budget().map(|budget| budget.balance()), Some(3.5));
    assert_eq!(now.breaker().expect("one").recent_operations(), Some(1));
    assert_eq!(now.breaker().expect("one").recent_failures(), Some(0));

    assert!(
        tokio::time::timeout(ms(50), client.get(URL).send())
            .await
            .is_err()
    );
    let came = send(client.get(URL)).await;
    assert_eq!(
        came.told(),
        (Some(503), Some(StopReason::AttemptsExhausted), 4)
    );
    let came = send(client.get(URL)).await;
    assert_eq!(
        came.told(),
        (Some(503), Some(StopReason::BudgetExhausted), 1)
    );
    let now = breaker(&load);
    assert_eq!(
        (
            now.state(),
            now.failures_in_a_row(),
            now.recent_operations(),
            now.recent_failures(),
            now.open_for(),
        ),
        (BreakerState::Closed, 2, Some(3), Some(2), None)
    );
    let came = send(client.get(URL)).await;
    assert_eq!(
        came.told(),
        (Some(503), Some(StopReason::RetryAfterTooLong), 1)
    );
    let refused = send(client.get(URL).with_extension(Deadline::after(secs(60)))).await;
    assert_eq!(
        refused.told(),
        (Some(503), Some(StopReason::BreakerOpen), 1)
    );
    let in_the_air = [start(client.get(OTHER_URL)), start(client.get(URL))];
    sleep(ms(200)).await;

    let now = figures(&load);
    assert_eq!(now.key(), HOST);
    assert_eq!((now.operations(), now.retries()), (6, 4));
    let budget = now.budget().expect("one");
    assert_eq!(
        (
            budget.balance(),
            budget.given(),
            budget.returned(),
            budget.refused()
        ),
        (0.5, 4, 0, 1)
    );
    let breaker = now.breaker().expect("one");
    assert_eq!(
        (breaker.state(), breaker.open_for(), breaker.opened()),
        (BreakerState::Open, Some(ms(800)), 1)
    );
    assert_eq!(
        (
            breaker.failures_in_a_row(),
            breaker.recent_operations(),
            breaker.recent_failures()
        ),
        (0, Some(0), Some(0))
    );
    assert_eq!((breaker.permits_out(), breaker.refused()), (0, 1));
    assert_eq!(now.pushed_back_for(), ms(29_800));
    assert_eq!((now.in_flight(), now.waiting()), (Some(1), Some(0)));
    let stops: Vec<_> = now.stops().collect();
    assert_eq!(
        stops,
        [
            (StopReason::Cancelled, 1),
            (StopReason::AttemptsExhausted, 1),
            (StopReason::RetryAfterTooLong, 1),
            (StopReason::BreakerOpen, 1),
            (StopReason::BudgetExhausted, 1),
        ]
    );
    for (reason, count) in stops {
        assert_eq!(now.stopped(reason), count);
    }
    assert_eq!(now.stopped(StopReason::ConcurrencyLimit), 0);
    assert_eq!(
        now.to_string(),
        "orders.test: 6 operations, 4 retries, budget 0.5, breaker open, pushed back for 29.8s, \
         1 in flight, 0 waiting, 1 × cancelled, 1 × attempts exhausted, 1 × Retry-After too long, \
         1 × breaker open, 1 × retry budget exhausted"
    );
    let other = load.snapshot(OTHER_HOST).expect("known");
    assert_eq!(
        other.to_string(),
        "search.test: 0 operations, 0 retries, budget 4.0, breaker closed, 1 in flight, 0 waiting"
    );
    assert_eq!(keys(&load), [HOST, OTHER_HOST]);
    in_the_air.iter().for_each(JoinHandle::abort);
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_says_what_there_is_none_of() {
    let load = shared(LoadControl::builder().without_budget());
    let server = Server::always(200);
    visit(&over(&server, retry(&load)), URL).await;
    let now = figures(&load);
    assert!(now.budget().is_none() && now.breaker().is_none());
    assert_eq!((now.in_flight(), now.waiting()), (None, None));
    assert_eq!(now.stops().count(), 0);
    assert_eq!(now.to_string(), "orders.test: 1 operations, 0 retries");
}

#[tokio::test(start_paused = true)]
async fn every_reason_of_load_control_is_counted_where_it_stopped_somebody() {
    let load = shared(
        LoadControl::builder()
            .budget(RetryBudget::fixed(0))
            .breaker(opens_after(2).build().expect("valid"))
            .concurrency_limit(1)
            .pushback(FirstSends::Refuse),
    );
    let server = Server::script([
        Step::status(503),
        Step::status(503),
        Step::status(503),
        Step::Hang,
        Step::retry_after(429, "60"),
    ]);
    let client = over(&server, retry(&load));
    let stopped = |reason| figures(&load).stopped(reason);
    let _ = send(client.get(URL)).await;
    assert_eq!(stopped(StopReason::BudgetExhausted), 1);
    let _ = send(client.get(URL)).await;
    assert_eq!(stopped(StopReason::BudgetExhausted), 2);
    let _ = send(client.get(URL)).await;
    assert_eq!(stopped(StopReason::BreakerOpen), 1);
    let hog = start(client.get(URL));
    sleep(ms(1)).await;
    let _ = send(client.get(URL).with_extension(Deadline::after(ms(10)))).await;
    assert_eq!(stopped(StopReason::ConcurrencyLimit), 1);
    hog.abort();
    assert!(hog.await.is_err());
    assert_eq!(stopped(StopReason::Cancelled), 1);
    let _ = send(client.get(URL)).await;
    let _ = send(client.get(URL)).await;
    assert_eq!(stopped(StopReason::RetryAfterTooLong), 2);
    assert_eq!((server.sends(), figures(&load).operations()), (5, 7));
    assert_eq!(figures(&load).retries(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_operation_that_could_not_be_meant_is_not_counted() {
    let load = shared(LoadControl::builder());
    let server = Server::always(200);
    let client = over(&server, retry(&load));
    let request = client.post(URL).with_extension(key("one"));
    let came = send(request.header("idempotency-key", "another")).await;
    came.was_never_sent(StopReason::InvalidInput);
    assert!(load.is_empty() && load.snapshot(HOST).is_none());
}

// ---- Settings ----

#[test]
fn bad_settings_are_refused_by_name() {
    let control = LoadControl::builder;
    for (bad, field) in [
        (control().capacity(0), "load_control.capacity"),
        (
            control().concurrency_limit(0),
            "load_control.concurrency_limit",
        ),
        (
            control().concurrency_limit(usize::MAX),
            "load_control.concurrency_limit",
        ),
    ] {
        assert_eq!(bad.build().expect_err("refused").field(), field);
    }
    let largest = control().concurrency_limit(usize::MAX >> 3);
    assert!(largest.build().is_ok());

    let breaker = CircuitBreaker::builder;
    let ratio = |ratio| breaker().failure_ratio(ratio, 1, secs(10));
    for (bad, field) in [
        (
            breaker().consecutive_failures(0),
            "breaker.consecutive_failures",
        ),
        (ratio(0.0), "breaker.failure_ratio"),
        (ratio(-0.5), "breaker.failure_ratio"),
        (ratio(1.01), "breaker.failure_ratio"),
        (ratio(f64::NAN), "breaker.failure_ratio"),
        (ratio(f64::INFINITY), "breaker.failure_ratio"),
        (
            breaker().failure_ratio(0.5, 0, secs(10)),
            "breaker.minimum_volume",
        ),
        (
            breaker().failure_ratio(0.5, 1, Duration::from_micros(9_999)),
            "breaker.span",
        ),
        (
            breaker().failure_ratio(0.5, 1, secs(3600) + Duration::from_nanos(1)),
            "breaker.span",
        ),
        (breaker().half_open_permits(0), "breaker.half_open_permits"),
        (
            breaker().permit_timeout(Duration::ZERO),
            "breaker.permit_timeout",
        ),
        (
            breaker().open_for(Backoff::exponential(secs(2), secs(1))),
            "backoff.base",
        ),
        (breaker().open_for(Backoff::fixed([])), "backoff.delays"),
    ] {
        assert_eq!(bad.build().expect_err("refused").field(), field);
    }
    for good in [
        ratio(1.0),
        ratio(f64::MIN_POSITIVE),
        breaker().failure_ratio(0.5, 1, ms(10)),
        breaker().failure_ratio(0.5, 1, secs(3600)),
        breaker().permit_timeout(Duration::MAX),
        breaker().open_for(Backoff::fixed([Duration::MAX])),
    ] {
        assert!(good.build().is_ok());
    }
}

/// "No limit" is a wish that people have.
#[test]
fn any_capacity_over_zero_can_be_had() {
    for capacity in [1, 1 << 20, usize::MAX] {
        let built = std::panic::catch_unwind(|| {
            let load = LoadControl::builder().capacity(capacity).build();
            load.is_ok_and(|load| load.is_empty())
        });
        assert!(built.is_ok_and(|is_built| is_built), "{capacity}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_breaker_that_opens_for_ever_stays_open() {
    let load = with_breaker(opens_after(1).open_for(Backoff::fixed([Duration::MAX])));
    let server = Server::always(503);
    let client = over(&server, retry(&load));
    fails(&client, 1).await;
    assert_eq!(breaker(&load).open_for(), Some(Duration::MAX));
    sleep(secs(1_000_000_000)).await;
    assert_eq!(breaker(&load).state(), BreakerState::Open);
    let came = send(client.get(URL)).await;
    assert_eq!(came.told(), (Some(503), Some(StopReason::BreakerOpen), 1));
    assert_eq!(came.later(), None);
}

#[test]
fn the_reasons_that_forbid_a_loop_around_to_go_on() {
    use StopReason as Why;
    for (reason, forbids) in [
        (Why::InvalidInput, false),
        (Why::Cancelled, true),
        (Why::NotRetryable, false),
        (Why::KeyExpired, true),
        (Why::UnsafeToRepeat, true),
        (Why::ServerVeto, true),
        (Why::NestedLayer, false),
        (Why::AttemptsExhausted, false),
        (Why::BodyNotReplayable, false),
        (Why::RetryAfterTooLong, true),
        (Why::DeadlineTooClose, false),
        (Why::BreakerOpen, true),
        (Why::BudgetExhausted, true),
        (Why::ConcurrencyLimit, true),
    ] {
        assert_eq!(reason.forbids_retry(), forbids, "{reason:?}");
    }
}

#[test]
fn what_is_shared_can_be_shared() {
    fn shared<T: Send + Sync + std::fmt::Debug + 'static>() {}
    shared::<LoadControl>();
    shared::<LoadControlBuilder>();
    shared::<LoadSnapshot>();
    shared::<CircuitBreaker>();
    shared::<CircuitBreakerBuilder>();
    shared::<BreakerSnapshot>();
    shared::<FirstSends>();
}

// ---- B3 and S1, host by host ----

#[tokio::test(start_paused = true)]
async fn case_42_every_host_has_a_budget_of_its_own() {
    let budget = RetryBudget::builder()
        .ratio(0.1)
        .burst(5)
        .trickle(Duration::MAX)
        .build();
    let load = shared(LoadControl::builder().budget(budget.expect("valid")));
    let server = Server::always(503);
    let client = over(&server, retry(&load));
    for url in [URL, OTHER_URL] {
        let mut reasons = Vec::new();
        for _ in 0..10 {
            reasons.push(send(client.get(url)).await.stop());
        }
        assert_eq!(reasons[0], Some(StopReason::AttemptsExhausted));
        let exhausted = Some(StopReason::BudgetExhausted);
        assert!(
            reasons[1..].iter().all(|reason| *reason == exhausted),
            "{reasons:?}"
        );
    }
    let seen = server.seen();
    for host in [HOST, OTHER_HOST] {
        let sends = seen.iter().filter(|seen| seen.url.contains(host)).count();
        assert_eq!(sends, 15, "{host}");
        let budget = *load.snapshot(host).expect("known").budget().expect("one");
        assert_eq!(
            (budget.balance(), budget.given(), budget.refused()),
            (0.0, 5, 9)
        );
    }
    // What one host earns is not the other's.
    let healthy = Server::always(200);
    let to_healthy = over(&healthy, retry(&load));
    for _ in 0..20 {
        visit(&to_healthy, URL).await;
    }
    assert_eq!(balance(&load), 2.0);
    let other = load.snapshot(OTHER_HOST).expect("known");
    assert_eq!(other.budget().expect("one").balance(), 0.0);
    assert_eq!(send(client.get(URL)).await.attempts(), 3);
    assert_eq!(send(client.get(OTHER_URL)).await.attempts(), 1);
}

#[tokio::test(start_paused = true)]
async fn case_43_a_window_is_kept_for_each_host() {
    let window = RetryBudget::window(1.0, 0, secs(10)).expect("valid");
    let load = shared(LoadControl::builder().budget(window));
    let server = Server::script((0..6).map(|_| Step::status(503))).then_always(200);
    let client = over(&server, retry(&load));
    let calls: Vec<_> = (0..6)
        .map(|call| start(client.get(if call < 3 { URL } else { OTHER_URL })))
        .collect();
    for call in calls {
        assert_eq!(ended(call).await.told(), (Some(200), None, 2));
    }
    assert_eq!(server.sends(), 12);
    for host in [HOST, OTHER_HOST] {
        let budget = *load.snapshot(host).expect("known").budget().expect("one");
        assert_eq!((budget.balance(), budget.given()), (0.0, 3), "{host}");
    }
}

#[tokio::test(start_paused = true)]
async fn case_73_each_call_has_its_own_attempts_though_all_share_their_load() {
    let load = shared(
        LoadControl::builder()
            .budget(RetryBudget::fixed(50))
            .breaker(opens_after(51).build().expect("valid"))
            .concurrency_limit(50),
    );
    let server = Server::script((0..50).map(|_| Step::status(503))).then_always(200);
    let client = over(&server, retry(&load));
    let calls: Vec<_> = (0..50).map(|_| start(client.clone().get(URL))).collect();
    for call in calls {
        assert_eq!(ended(call).await.told(), (Some(200), None, 2));
    }
    assert_eq!(server.sends(), 100);
    let now = figures(&load);
    assert_eq!((now.operations(), now.retries()), (50, 50));
    assert_eq!(balance(&load), 0.0);
    assert_eq!(breaker(&load).failures_in_a_row(), 0);
    assert_eq!(in_flight_and_waiting(&load), (Some(0), Some(0)));
}

#[test]
fn the_figures_are_exact_under_threads() {
    let load = shared(
        LoadControl::builder()
            .budget(RetryBudget::fixed(100))
            .concurrency_limit(3)
            .capacity(4),
    );
    let sends: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..16)
            .map(|_| {
                scope.spawn(|| {
                    let runtime = tokio::runtime::Builder::new_current_thread()
                        .enable_all()
                        .start_paused(true)
                        .build()
                        .expect("a runtime");
                    runtime.block_on(async {
                        let server = Server::always(503);
                        let patient = retry(&load).max_attempts(2).deadline(Duration::MAX);
                        let client = over(&server, patient);
                        for _ in 0..25 {
                            let _ = send(client.get(URL)).await;
                        }
                        server.sends()
                    })
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .sum()
    });
    let now = figures(&load);
    assert_eq!((sends, now.operations(), now.retries()), (500, 400, 100));
    assert_eq!(now.stopped(StopReason::AttemptsExhausted), 100);
    assert_eq!(now.stopped(StopReason::BudgetExhausted), 300);
    assert_eq!(balance(&load), 0.0);
    assert_eq!(in_flight_and_waiting(&load), (Some(0), Some(0)));
}

// ---- Headers by which layers in different processes tell each other ----

fn every(server: &Server, name: &str) -> Vec<Vec<String>> {
    let seen = server.seen();
    seen.iter().map(|seen| lines(&seen.headers, name)).collect()
}

#[tokio::test(start_paused = true)]
async fn the_number_of_the_attempt_is_on_the_wire_where_that_is_wanted() {
    let name = HeaderName::from_static("x-retry-attempt");
    let numbered = || support::plain_builder().attempt_header(name.clone());
    for body in [None, Some("order")] {
        let server = Server::script([503, 503, 200].map(Step::status));
        let mut request = over(&server, numbered())
            .post(URL)
            .with_extension(key("one"));
        if let Some(body) = body {
            request = request.body(body);
        }
        // Two lines of the caller's own are replaced by one of ours.
        let request = request.header(name.clone(), "7").header(name.clone(), "8");
        assert_eq!(send(request).await.told(), (Some(200), None, 3));
        assert_eq!(every(&server, name.as_str()), [["1"], ["2"], ["3"]]);
    }
    let server = Server::script([503, 200].map(Step::status));
    let request = over(&server, support::plain_builder()).get(URL);
    let _ = send(request.header(name.clone(), "7")).await;
    assert_eq!(every(&server, name.as_str()), [["7"], ["7"]]);
    let server = Server::always(200);
    let _ = send(over(&server, support::plain_builder()).get(URL)).await;
    assert_eq!(every(&server, name.as_str()), [[""; 0]]);
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_follows_a_redirect_keeps_its_number() {
    let name = HeaderName::from_static("x-retry-attempt");
    let server = Server::script([
        Step::status(503),
        Step::after(0, 307, &[("location", "/moved")]),
        Step::status(200),
    ]);
    let numbered = support::plain_builder().attempt_header(name.clone());
    let request = over(&server, numbered).post(URL).body("order");
    let came = send(request.with_extension(key("one"))).await;
    assert_eq!(came.told(), (Some(200), None, 2));
    assert_eq!(every(&server, name.as_str()), [["1"], ["2"], ["2"]]);
    assert!(server.seen().iter().all(|seen| seen.body == "order"));
}

#[tokio::test(start_paused = true)]
async fn of_two_layers_on_one_client_only_one_numbers_the_attempts() {
    let name = HeaderName::from_static("x-retry-attempt");
    let numbered = || {
        let numbered = support::plain_builder().attempt_header(name.clone());
        numbered.build().expect("valid")
    };
    let server = Server::script([503, 200].map(Step::status));
    let client = server.client([numbered(), numbered()]);
    let _ = send(client.get(URL)).await;
    assert_eq!(every(&server, name.as_str()), [["1"], ["2"]]);
}

#[tokio::test(start_paused = true)]
async fn a_header_by_which_a_server_asks_for_no_retry_is_heeded_where_it_is_named() {
    let name = HeaderName::from_static("x-envoy-overloaded");
    let heeding = || {
        let another = HeaderName::from_static("x-another");
        support::plain_builder().no_retry_headers([another, name.clone()])
    };
    let sends = async |value: Option<&str>, settings: RetryMiddlewareBuilder| {
        let headers: Vec<_> = value
            .map(|value| (name.as_str(), value))
            .into_iter()
            .collect();
        let server = Server::script([Step::after(0, 503, &headers), Step::status(200)]);
        let came = send(over(&server, settings).get(URL)).await;
        (server.sends(), came.stop())
    };
    for value in ["true", "1", "", "yes", "FALSE"] {
        assert_eq!(
            sends(Some(value), heeding()).await,
            (1, Some(StopReason::ServerVeto)),
            "{value:?}"
        );
    }
    for value in [Some("false"), Some("0"), None] {
        assert_eq!(sends(value, heeding()).await, (2, None), "{value:?}");
    }
    assert_eq!(
        sends(Some("true"), support::plain_builder()).await,
        (2, None)
    );
    // It is about retries, not about answers that need none.
    let server = Server::script([Step::after(0, 200, &[(name.as_str(), "true")])]);
    let came = send(over(&server, heeding()).get(URL)).await;
    assert_eq!(came.told(), (Some(200), None, 1));
}

#[tokio::test(start_paused = true)]
async fn a_sidecar_is_told_not_to_retry_where_that_is_wanted() {
    let name = "x-envoy-max-retries";
    let sent = async |allowed: Option<bool>, own: Option<&str>| {
        let server = Server::script([503, 200].map(Step::status));
        let settings = match allowed {
            Some(allowed) => support::plain_builder().sidecar_retries(allowed),
            None => support::plain_builder(),
        };
        let mut request = over(&server, settings).get(URL);
        if let Some(own) = own {
            request = request.header(name, own);
        }
        let _ = send(request).await;
        every(&server, name)
    };
    assert_eq!(sent(Some(false), None).await, [["0"], ["0"]]);
    assert_eq!(sent(Some(false), Some("2")).await, [["2"], ["2"]]);
    for default in [Some(true), None] {
        assert_eq!(sent(default, None).await, [[""; 0], [""; 0]]);
        assert_eq!(sent(default, Some("2")).await, [["2"], ["2"]]);
    }
}

/// Keys are the operation's and load is the host's: neither gets in the other's way.
#[tokio::test(start_paused = true)]
async fn a_keyed_order_that_waits_for_load_keeps_its_key() {
    let load = shared(
        LoadControl::builder()
            .pushback(FirstSends::Wait)
            .concurrency_limit(1),
    );
    let server = Server::script([
        Step::retry_after(429, "1"),
        Step::status(503),
        Step::status(200),
    ]);
    let contract = reqwest_idempotent_retry::KeyContract::default();
    let client = over(&server, retry(&load).key_contract(contract));
    told_to_wait(&server, &client, 429).await;
    let came = send(client.post(URL).body("order")).await;
    assert_eq!(came.told(), (Some(200), None, 2));
    assert_eq!(server.starts(), [0, 1000, 1100]);
    let keys: HashSet<_> = server.key_lines().split_off(1).into_iter().collect();
    let key = came
        .report
        .key()
        .map(IdempotencyKey::as_str)
        .expect("a key");
    assert_eq!(keys, HashSet::from([vec![key.to_owned()]]));
}
