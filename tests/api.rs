//! What callers set, read and share: settings, extensions, results.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::{Extensions, HeaderName, Method, StatusCode};
use reqwest::{Request, Response};
use reqwest_idempotent_retry::{
    Attempt, Backoff, Certainty, Deadline, DeadlineScope, IdempotencyKey, Idempotent, KeyContract,
    NextStep, NoRetry, ReportHandle, RetryBudget, RetryError, RetryErrorExt, RetryMiddleware,
    RetryMiddlewareBuilder, RetryOverride, RetryReport, RetryResponseExt, StopReason,
};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Error, Extension, Middleware, Next};
use support::{Server, Step, URL, key, ms, plain_builder, plain_http, read_and_closed, secs};
use tokio::time::Instant;

fn build(builder: RetryMiddlewareBuilder) -> RetryMiddleware {
    builder.build().expect("valid settings")
}

fn stop_of(result: Result<Response, Error>) -> Option<StopReason> {
    support::report(&result).and_then(|report| report.stop())
}

// ---- settings ----

#[test]
fn bad_settings_are_refused_by_name() {
    let builder = RetryMiddleware::builder;
    let refused = [StatusCode::SERVICE_UNAVAILABLE];
    for (bad, field) in [
        (builder().max_attempts(0), "max_attempts"),
        (builder().attempt_timeout(Duration::ZERO), "attempt_timeout"),
        (builder().deadline(Duration::ZERO), "deadline"),
        (builder().deadline(secs(1)).reserve(secs(1)), "reserve"),
        (
            builder()
                .deadline(secs(1))
                .reserve(ms(600))
                .minimum_attempt(ms(401)),
            "minimum_attempt",
        ),
        (
            builder().deadline(secs(1)).minimum_attempt(Duration::MAX),
            "minimum_attempt",
        ),
        (
            builder().backoff(Backoff::full_jitter(secs(2), secs(1))),
            "backoff.base",
        ),
        (
            builder().refused_before_work(refused),
            "refused_before_work",
        ),
    ] {
        let error = bad.build().expect_err(field);
        assert_eq!(error.field(), field);
        assert!(error.to_string().starts_with(field), "{error}");
    }
    build(
        builder()
            .deadline(secs(1))
            .reserve(ms(600))
            .minimum_attempt(ms(400)),
    );
    build(
        builder()
            .refused_before_work(refused)
            .client_is_prepared(true),
    );
}

#[tokio::test(start_paused = true)]
async fn a_request_can_be_wrong_too_and_then_nothing_is_sent() {
    let server = Server::script([]);
    let client = server.client([build(plain_builder())]);
    let no_attempts = RetryOverride::new().max_attempts(0);
    let no_time = RetryOverride::new().attempt_timeout(Duration::ZERO);
    for (wrong, field) in [(no_attempts, "max_attempts"), (no_time, "attempt_timeout")] {
        let error = client
            .get(URL)
            .with_extension(wrong)
            .send()
            .await
            .expect_err("refused");
        let error = error.retry_error().expect("ours");
        assert_eq!(
            (error.stop(), error.certainty()),
            (StopReason::InvalidInput, Certainty::NotSent)
        );
        let source = std::error::Error::source(error).expect("a source");
        let invalid: &reqwest_idempotent_retry::InvalidInput =
            source.downcast_ref().expect("typed");
        assert_eq!(invalid.field(), field);
    }
    // What can never fit this request's own deadline is a matter of time.
    let unfit = RetryOverride::new()
        .reserve(ms(600))
        .minimum_attempt(ms(401));
    let request = client
        .get(URL)
        .with_extension(Deadline::after(secs(1)))
        .with_extension(unfit);
    assert_eq!(
        stop_of(request.send().await),
        Some(StopReason::DeadlineTooClose)
    );
    assert_eq!(server.sends(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_defaults_are_the_documented_ones() {
    let seen = Arc::new(AtomicUsize::new(0));
    let draws = Arc::clone(&seen);
    let highest = move || {
        draws.fetch_add(1, Ordering::Relaxed);
        0.999_999
    };
    let server = Server::always(503);
    let client = server.client([build(RetryMiddleware::builder().random_with(highest))]);
    let result = client.get(URL).send().await;
    let report = support::report(&result).expect("a report");
    // 3 attempts; full jitter over 200 and 400 ms; no attempt limit and no deadline.
    assert_eq!(report.attempts().len(), 3);
    let waits: Vec<_> = report
        .attempts()
        .iter()
        .map(|attempt| attempt.waited().as_millis())
        .collect();
    assert_eq!(waits, [0, 199, 399]);
    assert!(
        report
            .attempts()
            .iter()
            .all(|attempt| attempt.limit().is_none())
    );
    assert_eq!(seen.load(Ordering::Relaxed), 3);
    // A budget of 10 tokens: 5 operations with 2 retries, and then none.
    for _ in 0..5 {
        client.get(URL).send().await.expect("an answer");
    }
    assert_eq!(server.sends(), 6 + 10);
    // No key is made without a contract.
    let server = Server::always(200);
    server
        .client([build(RetryMiddleware::builder())])
        .post(URL)
        .send()
        .await
        .expect("an answer");
    assert_eq!(server.key_lines(), [[""; 0]]);
}

#[tokio::test(start_paused = true)]
async fn a_quiet_client_gets_a_token_a_minute() {
    let budget = Arc::new(RetryBudget::builder().initial(0).build().expect("valid"));
    let server = Server::always(503);
    let client = server.client([build(plain_builder().budget(Arc::clone(&budget)))]);
    assert_eq!(
        stop_of(client.get(URL).send().await),
        Some(StopReason::BudgetExhausted)
    );
    tokio::time::sleep(secs(60)).await;
    client.get(URL).send().await.expect("an answer");
    assert_eq!(server.sends(), 1 + 2);
}

#[tokio::test(start_paused = true)]
async fn two_clients_share_one_budget() {
    let budget = Arc::new(RetryBudget::fixed(1));
    let layer = || build(plain_builder().budget(Arc::clone(&budget)));
    let (orders, payments) = (Server::always(503), Server::always(503));
    let (to_orders, to_payments) = (orders.client([layer()]), payments.client([layer()]));
    to_orders.get(URL).send().await.expect("an answer");
    to_payments.get(URL).send().await.expect("an answer");
    assert_eq!((orders.sends(), payments.sends()), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn every_shape_of_backoff_waits_as_documented() {
    let waits = async |backoff: Backoff, draw: f64| {
        let server = Server::always(503);
        let layer = build(plain_builder().backoff(backoff).random_with(move || draw));
        let result = server.client([layer]).get(URL).send().await;
        let report = support::report(&result).expect("a report");
        let waits: Vec<_> = report.attempts()[1..]
            .iter()
            .map(|a| a.waited().as_millis())
            .collect();
        waits
    };
    let (base, cap) = (ms(100), ms(300));
    assert_eq!(
        waits(Backoff::full_jitter(base, cap), 0.5).await,
        [50, 100, 150]
    );
    assert_eq!(
        waits(Backoff::equal_jitter(base, cap), 0.5).await,
        [75, 150, 225]
    );
    assert_eq!(
        waits(Backoff::exponential(base, cap), 0.5).await,
        [100, 200, 300]
    );
    assert_eq!(
        waits(Backoff::exponential(base, cap).factor(3.0), 0.5).await,
        [100, 300, 300]
    );
    assert_eq!(
        waits(Backoff::exponential(base, cap).jitter(0.2), 0.5).await,
        [90, 180, 270]
    );
    // 100 + (300 − 100) / 2, then 100 + (600 − 100) / 2 over the cap.
    assert_eq!(
        waits(Backoff::decorrelated(base, cap), 0.5).await,
        [200, 300, 300]
    );
    assert_eq!(waits(Backoff::fixed([ms(5), ms(7)]), 0.5).await, [5, 7, 7]);
    // Draws that are none are taken as the nearer end.
    assert_eq!(
        waits(Backoff::full_jitter(base, cap), 7.0).await,
        [100, 200, 300]
    );
    assert_eq!(
        waits(Backoff::full_jitter(base, cap), f64::NAN).await,
        [0, 0, 0]
    );
}

#[tokio::test(start_paused = true)]
async fn a_floor_takes_only_the_random_part_on_top() {
    let wait = async |backoff: Backoff| {
        let server = Server::script([Step::retry_after(503, "1"), Step::status(200)]);
        let layer = build(plain_builder().backoff(backoff).random_with(|| 0.5));
        server
            .client([layer])
            .get(URL)
            .send()
            .await
            .expect("an answer");
        server.elapsed()
    };
    let cap = secs(10);
    assert_eq!(wait(Backoff::full_jitter(ms(100), cap)).await, ms(1050));
    assert_eq!(wait(Backoff::equal_jitter(ms(100), cap)).await, ms(1025));
    assert_eq!(wait(Backoff::decorrelated(ms(100), cap)).await, ms(1100));
    assert_eq!(wait(Backoff::exponential(ms(100), cap)).await, ms(1000));
    assert_eq!(wait(Backoff::exponential(secs(3), cap)).await, ms(3000));
    assert_eq!(wait(Backoff::fixed([ms(1500)])).await, ms(1500));
    // The random part is clipped to the time left; the floor is not.
    let server = Server::script([Step::retry_after(503, "1"), Step::status(200)]);
    let clipped = plain_builder()
        .backoff(Backoff::full_jitter(secs(8), cap))
        .random_with(|| 0.5)
        .deadline(ms(1500))
        .minimum_attempt(ms(300));
    server
        .client([build(clipped)])
        .get(URL)
        .send()
        .await
        .expect("an answer");
    assert_eq!(server.elapsed(), ms(1200));
}

// ---- statuses and headers that decide ----

#[tokio::test(start_paused = true)]
async fn a_veto_header_stops_and_its_permission_is_not_absolute() {
    let should_retry = HeaderName::from_static("x-should-retry");
    let answer = |status, wish| Step::after(0, status, &[("x-should-retry", wish)]);
    let sends = async |post_without_key: bool, steps: Vec<Step>| {
        let server = Server::script(steps);
        let client = server.client([build(plain_builder().veto_header(should_retry.clone()))]);
        let request = client.post(URL).body("order");
        let request = match post_without_key {
            true => request,
            false => request.with_extension(key("order-17")),
        };
        let stop = stop_of(request.send().await);
        (server.sends(), stop)
    };
    let vetoed = sends(false, vec![answer(503, "false")]).await;
    assert_eq!(vetoed, (1, Some(StopReason::ServerVeto)));
    let permitted = sends(false, vec![answer(422, "true"), Step::status(200)]).await;
    assert_eq!(permitted, (2, None));
    let still_unsafe = sends(true, vec![answer(503, "true")]).await;
    assert_eq!(still_unsafe, (1, Some(StopReason::UnsafeToRepeat)));
    let other = sends(false, vec![answer(503, "maybe"), Step::status(200)]).await;
    assert_eq!(other, (2, None));
    let success = sends(false, vec![answer(200, "false")]).await;
    assert_eq!(success, (1, None));
    let asked_again = sends(false, vec![answer(200, "true")]).await;
    assert_eq!(asked_again, (1, None));
}

#[tokio::test(start_paused = true)]
async fn too_early_is_not_processed() {
    let post = async |prepared: bool, steps: Vec<Step>| {
        let server = Server::script(steps);
        let client = server.client([build(plain_builder().client_is_prepared(prepared))]);
        let handle = ReportHandle::new();
        let request = client
            .post(URL)
            .body("order")
            .with_extension(handle.clone());
        let _ = request.send().await;
        (server.sends(), handle.report().expect("a report"))
    };
    let (sends, report) = post(true, vec![Step::status(425), Step::status(200)]).await;
    assert_eq!(
        (sends, report.stop(), report.certainty()),
        (2, None, Certainty::Answered)
    );
    let (sends, report) = post(true, (0..4).map(|_| Step::status(425)).collect()).await;
    assert_eq!((sends, report.certainty()), (4, Certainty::NotProcessed));
    assert_eq!(report.next_step(), NextStep::TryLater { after: None });
    // Below an unprepared client the answer may belong to a redirect that led back here.
    let (sends, report) = post(false, vec![Step::status(425)]).await;
    assert_eq!(
        (sends, report.stop()),
        (1, Some(StopReason::UnsafeToRepeat))
    );
    assert_eq!(report.certainty(), Certainty::Unknown);
}

#[tokio::test(start_paused = true)]
async fn answers_say_what_to_do_next() {
    let next_step = async |status: u16, with_key: bool| {
        let server = Server::always(status);
        let client = server.client([build(plain_builder().max_attempts(1))]);
        let handle = ReportHandle::new();
        let request = client.post(URL).with_extension(handle.clone());
        let request = if with_key {
            request.with_extension(key("order-17"))
        } else {
            request
        };
        request.send().await.expect("an answer");
        handle.report().expect("a report").next_step()
    };
    assert_eq!(next_step(201, true).await, NextStep::Done);
    assert_eq!(next_step(303, true).await, NextStep::Done);
    assert_eq!(next_step(422, true).await, NextStep::FixRequest);
    assert_eq!(
        next_step(429, false).await,
        NextStep::TryLater { after: None }
    );
    for status in [408, 409, 500, 502, 503, 504] {
        let confirm = |key| NextStep::ConfirmOutcome { key };
        assert_eq!(
            next_step(status, true).await,
            confirm(Some(key("order-17"))),
            "{status}"
        );
        assert_eq!(next_step(status, false).await, confirm(None), "{status}");
    }
    // "Locked" is "still running" of a key, and a refusal of anything else.
    let confirm = NextStep::ConfirmOutcome {
        key: Some(key("order-17")),
    };
    assert_eq!(next_step(423, true).await, confirm);
    assert_eq!(next_step(423, false).await, NextStep::FixRequest);
    let handle = ReportHandle::new();
    let server = Server::always(500);
    let client = server.client([build(plain_builder())]);
    client
        .get(URL)
        .with_extension(handle.clone())
        .send()
        .await
        .expect("an answer");
    assert_eq!(
        handle.report().expect("told").next_step(),
        NextStep::TryLater { after: None }
    );
}

// ---- per request ----

#[tokio::test(start_paused = true)]
async fn a_request_overrides_the_client() {
    let server = Server::always(503);
    let client = server.client([build(plain_builder().attempt_timeout(secs(3)))]);
    client
        .get(URL)
        .with_extension(NoRetry)
        .send()
        .await
        .expect("an answer");
    assert_eq!(server.sends(), 1);
    let own = RetryOverride::new()
        .max_attempts(2)
        .attempt_timeout(secs(1));
    client
        .get(URL)
        .with_extension(own)
        .send()
        .await
        .expect("an answer");
    assert_eq!(server.sends(), 3);
    let limits: Vec<_> = server
        .seen()
        .iter()
        .map(|seen| seen.attempt.and_then(|a| a.limit()))
        .collect();
    assert_eq!(limits, [Some(secs(3)), Some(secs(1)), Some(secs(1))]);
    let unlimited = RetryOverride::new()
        .attempt_timeout(Duration::MAX)
        .max_attempts(1);
    let endless = Deadline::after(Duration::MAX);
    let request = client
        .get(URL)
        .with_extension(unlimited)
        .with_extension(endless);
    request.send().await.expect("an answer");
    assert_eq!(
        server.seen()[3].attempt.and_then(|attempt| attempt.limit()),
        None
    );
    assert_eq!(
        server.seen()[3]
            .attempt
            .map(|attempt| attempt.max_attempts()),
        Some(1)
    );
}

#[tokio::test(start_paused = true)]
async fn one_relative_deadline_serves_every_request_of_a_client() {
    let server = Server::script([Step::Hang, Step::Hang]);
    let client = ClientBuilder::new(plain_http())
        .with_init(Extension(Deadline::after(secs(2))))
        .with(build(plain_builder().deadline(secs(7))))
        .with(server.clone())
        .build();
    for end in [2, 4] {
        assert_eq!(
            stop_of(client.get(URL).send().await),
            Some(StopReason::DeadlineTooClose)
        );
        assert_eq!(server.elapsed(), secs(end));
    }
    // Lower layers find the resolved deadline, not the wish.
    let resolved = server.seen()[0].deadline.expect("the deadline");
    assert_ne!(resolved, Deadline::after(secs(2)));
}

#[tokio::test(start_paused = true)]
async fn an_absolute_deadline_is_shared_by_a_loop_of_calls() {
    let server = Server::script([Step::after(600, 200, &[]), Step::Hang]);
    let client = server.client([build(plain_builder())]);
    let deadline = Deadline::at((Instant::now() + secs(1)).into_std());
    client
        .get(URL)
        .with_extension(deadline)
        .send()
        .await
        .expect("an answer");
    let late = client.get(URL).with_extension(deadline).send().await;
    assert_eq!(stop_of(late), Some(StopReason::DeadlineTooClose));
    assert_eq!(server.elapsed(), secs(1));
}

#[tokio::test(start_paused = true)]
async fn replay_classes_have_an_order_of_precedence() {
    let contract = || build(plain_builder().key_contract(KeyContract::default()));
    type Mark = fn(reqwest_middleware::RequestBuilder) -> reqwest_middleware::RequestBuilder;
    let rows: [(&str, Method, Mark, usize, bool); 8] = [
        ("GET", Method::GET, |r| r, 2, false),
        ("DELETE", Method::DELETE, |r| r, 2, false),
        ("POST under the contract", Method::POST, |r| r, 2, true),
        (
            "a method nobody knows",
            Method::from_bytes(b"BREW").expect("a method"),
            |r| r,
            1,
            false,
        ),
        (
            "the same, by the caller's word",
            Method::from_bytes(b"BREW").expect("a method"),
            |r| r.with_extension(Idempotent(true)),
            2,
            false,
        ),
        (
            "POST, not idempotent",
            Method::POST,
            |r| r.with_extension(Idempotent(false)),
            1,
            false,
        ),
        (
            "the same with a key",
            Method::POST,
            |r| {
                r.with_extension(Idempotent(false))
                    .with_extension(key("mine"))
            },
            1,
            true,
        ),
        (
            "GET, not idempotent",
            Method::GET,
            |r| r.with_extension(Idempotent(false)),
            1,
            false,
        ),
    ];
    for (what, method, mark, sends, has_key) in rows {
        let server = Server::script([Step::status(503), Step::status(200)]);
        let request = server.client([contract()]).request(method, URL);
        mark(request).send().await.expect("an answer");
        assert_eq!(server.sends(), sends, "{what}");
        for lines in server.key_lines() {
            assert_eq!(lines.len(), usize::from(has_key), "{what}");
        }
    }
}

// ---- keys ----

#[tokio::test(start_paused = true)]
async fn a_contract_says_how_the_key_travels() {
    let sent = async |contract: KeyContract, method: Method| {
        let server = Server::always(200);
        let client = server.client([build(plain_builder().key_contract(contract))]);
        client.request(method, URL).send().await.expect("an answer");
        server.seen()[0].headers.clone()
    };
    let quoted = sent(KeyContract::default().quoted(true), Method::POST).await;
    let line = quoted["idempotency-key"].to_str().expect("text");
    assert!(
        line.len() == 38 && line.starts_with('"') && line.ends_with('"'),
        "{line}"
    );
    let own = KeyContract::default()
        .header(HeaderName::from_static("x-request-id"))
        .methods([Method::DELETE]);
    assert!(
        sent(own.clone(), Method::DELETE)
            .await
            .contains_key("x-request-id")
    );
    let uncovered = sent(own, Method::POST).await;
    assert!(!uncovered.contains_key("x-request-id") && !uncovered.contains_key("idempotency-key"));

    // A header of the caller is compared without the quotes that the contract puts around it.
    let server = Server::always(200);
    let client = server.client([build(
        plain_builder().key_contract(KeyContract::default().quoted(true)),
    )]);
    let request = client
        .post(URL)
        .header("idempotency-key", "\"mine\"")
        .with_extension(key("mine"));
    let answer = request.send().await.expect("an answer");
    assert_eq!(server.key_lines(), [["\"mine\""]]);
    assert_eq!(answer.idempotency_key().expect("the key").as_str(), "mine");
}

#[tokio::test(start_paused = true)]
async fn no_repeat_is_started_that_could_outlive_the_key() {
    let stop = async |lifetime: Duration| {
        let server = Server::always(503);
        let contract = KeyContract::default().lifetime(lifetime);
        let settings = plain_builder()
            .key_contract(contract)
            .attempt_timeout(secs(1))
            .max_attempts(2);
        let stop = stop_of(server.client([build(settings)]).post(URL).send().await);
        (server.sends(), stop)
    };
    // The wait of 100 ms and the attempt's limit of 1 s must fit.
    assert_eq!(stop(ms(1099)).await, (1, Some(StopReason::KeyExpired)));
    // The lifetime counts from the first send, so 100 ms later the next one does not fit.
    assert_eq!(stop(ms(1100)).await, (2, Some(StopReason::KeyExpired)));
    assert_eq!(
        stop(secs(3600)).await,
        (2, Some(StopReason::AttemptsExhausted))
    );
}

// ---- layers and maps ----

/// An outer layer that runs the rest a second time with the same map, as another retry layer would.
struct RunsTwice {
    after: Duration,
    cut_first_at: Option<Duration>,
}

#[async_trait::async_trait]
impl Middleware for RunsTwice {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let copy = request.try_clone().expect("a copy");
        let first = next.clone().run(copy, extensions);
        match self.cut_first_at {
            None => drop(first.await),
            Some(at) => assert!(tokio::time::timeout(at, first).await.is_err()),
        }
        tokio::time::sleep(self.after).await;
        next.run(request, extensions).await
    }
}

fn run_twice(
    server: &Server,
    outer: RunsTwice,
    inner: RetryMiddlewareBuilder,
) -> ClientWithMiddleware {
    ClientBuilder::new(plain_http())
        .with(outer)
        .with(build(inner))
        .with(server.clone())
        .build()
}

#[tokio::test(start_paused = true)]
async fn an_outer_retry_continues_the_operation() {
    let outer = || RunsTwice {
        after: secs(1),
        cut_first_at: None,
    };
    // Keyed: the same key and the same deadline.
    let server = Server::script([Step::status(503), Step::Hang]);
    let keyed = plain_builder()
        .max_attempts(1)
        .key_contract(KeyContract::default())
        .deadline(secs(3));
    let result = run_twice(&server, outer(), keyed)
        .post(URL)
        .body("order")
        .send()
        .await;
    let lines = server.key_lines();
    assert!(
        lines.len() == 2 && lines[0] == lines[1] && lines[0].len() == 1,
        "{lines:?}"
    );
    assert_eq!(
        server.elapsed(),
        secs(3),
        "the deadline was fixed at the first send"
    );
    assert_eq!(
        support::report(&result).expect("a report").certainty(),
        Certainty::Unknown
    );

    // Neither keyed nor idempotent: what may have been carried out is not sent again.
    let server = Server::script([Step::status(503)]);
    let result = run_twice(&server, outer(), plain_builder())
        .post(URL)
        .body("order")
        .send()
        .await;
    let report = support::report(&result).expect("a report");
    assert_eq!(
        (server.sends(), report.stop()),
        (1, Some(StopReason::UnsafeToRepeat))
    );
    assert_eq!(report.certainty(), Certainty::Unknown);

    // What an earlier run left unknown is not made "never sent" by a later one.
    let server = Server::script([
        Step::Fail(read_and_closed()),
        Step::Refuse(support::refused()),
    ]);
    let keyed = plain_builder()
        .max_attempts(1)
        .key_contract(KeyContract::default());
    let result = run_twice(&server, outer(), keyed)
        .post(URL)
        .body("order")
        .send()
        .await;
    assert_eq!(
        support::report(&result).expect("a report").certainty(),
        Certainty::Unknown
    );
}

#[tokio::test(start_paused = true)]
async fn a_refusal_after_a_success_that_an_outer_layer_repeated_is_not_told_as_one() {
    for (first, certainty) in [(201, Certainty::Unknown), (429, Certainty::Answered)] {
        let outer = RunsTwice {
            after: ms(0),
            cut_first_at: None,
        };
        let server = Server::script([first, 402].map(Step::status));
        let keyed = plain_builder()
            .max_attempts(1)
            .key_contract(KeyContract::default());
        let result = run_twice(&server, outer, keyed)
            .post(URL)
            .body("order")
            .send()
            .await;
        let report = support::report(&result).expect("a report");
        assert_eq!(
            (server.sends(), report.certainty()),
            (2, certainty),
            "{first}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_mark_left_by_a_dropped_operation_does_not_switch_retries_off() {
    let outer = RunsTwice {
        after: ms(0),
        cut_first_at: Some(ms(50)),
    };
    let server = Server::script([Step::Hang, Step::status(503), Step::status(200)]);
    let keyed = plain_builder().key_contract(KeyContract::default());
    let answer = run_twice(&server, outer, keyed)
        .post(URL)
        .body("order")
        .send()
        .await
        .expect("an answer");
    assert_eq!((server.sends(), answer.status().as_u16()), (3, 200));
    let lines = server.key_lines();
    assert!(lines.iter().all(|line| *line == lines[0]), "{lines:?}");
    // The unsafe one that was dropped in the air stays unsafe.
    let outer = RunsTwice {
        after: ms(0),
        cut_first_at: Some(ms(50)),
    };
    let server = Server::script([Step::Hang]);
    let result = run_twice(&server, outer, plain_builder())
        .post(URL)
        .body("order")
        .send()
        .await;
    assert_eq!(
        (server.sends(), stop_of(result)),
        (1, Some(StopReason::UnsafeToRepeat))
    );
}

#[tokio::test(start_paused = true)]
async fn a_map_that_belongs_to_another_request_is_refused() {
    let other_url = "http://orders.test/others";
    let post = |client: &ClientWithMiddleware, url: &str, body: &'static str| {
        client.post(url).body(body).build().expect("a request")
    };
    let generated = || {
        build(
            plain_builder()
                .key_contract(KeyContract::default())
                .deadline(Duration::MAX),
        )
    };
    let resolved = || build(plain_builder().deadline(secs(5)));
    for layer in [generated(), resolved()] {
        let server = Server::always(200);
        let client = server.client([layer]);
        let mut map = Extensions::new();
        client
            .execute_with_extensions(post(&client, URL, "order"), &mut map)
            .await
            .expect("an answer");
        for other in [
            post(&client, other_url, "order"),
            post(&client, URL, "another"),
            client.put(URL).body("order").build().expect("a request"),
        ] {
            let error = client
                .execute_with_extensions(other, &mut map)
                .await
                .expect_err("refused");
            let error = error.retry_error().expect("ours");
            assert_eq!(
                (error.stop(), error.certainty()),
                (StopReason::InvalidInput, Certainty::NotSent)
            );
        }
        assert_eq!(server.sends(), 1);
    }
    // An explicit key and an absolute deadline are the caller's to use as he likes.
    let server = Server::always(200);
    let client = server.client([build(plain_builder().deadline(Duration::MAX))]);
    let mut map = Extensions::new();
    map.insert(key("mine"));
    map.insert(Deadline::at((Instant::now() + secs(5)).into_std()));
    for url in [URL, other_url] {
        client
            .execute_with_extensions(post(&client, url, "order"), &mut map)
            .await
            .expect("an answer");
    }
    assert_eq!(server.key_lines(), [["mine"], ["mine"]]);
}

/// An inner layer that fails by itself.
struct Fails;

#[async_trait::async_trait]
impl Middleware for Fails {
    async fn handle(
        &self,
        _: Request,
        _: &mut Extensions,
        _: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        Err(Error::middleware(std::io::Error::other(
            "no token to be had",
        )))
    }
}

#[tokio::test(start_paused = true)]
async fn another_layers_failure_is_handed_on_and_nothing_was_sent() {
    let client = ClientBuilder::new(plain_http())
        .with(build(plain_builder()))
        .with(Fails)
        .build();
    let error = client
        .post(URL)
        .body("order")
        .send()
        .await
        .expect_err("failed");
    let error = error.retry_error().expect("ours");
    assert_eq!(
        (error.stop(), error.certainty()),
        (StopReason::NotRetryable, Certainty::NotSent)
    );
    assert_eq!(error.report().attempts().len(), 1);
    let source = std::error::Error::source(error).expect("a source");
    assert_eq!(source.to_string(), "no token to be had");
    assert!(source.downcast_ref::<std::io::Error>().is_some());
}

// ---- results ----

#[tokio::test(start_paused = true)]
async fn a_first_answer_carries_no_report_but_always_the_key() {
    let server = Server::script([
        Step::status(200),
        Step::status(422),
        Step::status(503),
        Step::status(200),
    ]);
    let client = server.client([build(plain_builder())]);
    let keyed = || client.post(URL).with_extension(key("order-17"));
    let plain = keyed().send().await.expect("an answer");
    assert!(plain.retry_report().is_none());
    assert_eq!(plain.idempotency_key(), Some(&key("order-17")));
    let refused = keyed().send().await.expect("an answer");
    assert_eq!(
        refused.retry_report().expect("a report").stop(),
        Some(StopReason::NotRetryable)
    );
    let repeated = keyed().send().await.expect("an answer");
    let report = repeated.retry_report().expect("a report");
    assert_eq!(
        (report.stop(), report.attempts().len(), report.elapsed()),
        (None, 2, ms(100))
    );
    assert_eq!(
        (report.method(), report.host()),
        (&Method::POST, "orders.test")
    );
    assert_eq!(report.next_step(), NextStep::Done);
}

#[tokio::test(start_paused = true)]
async fn a_handle_outlives_error_for_status() {
    let server = Server::always(422);
    let client = server.client([build(plain_builder())]);
    let handle = ReportHandle::new();
    let answer = client
        .post(URL)
        .with_extension(handle.clone())
        .send()
        .await
        .expect("an answer");
    answer.error_for_status().expect_err("422");
    let report = handle.report().expect("a report");
    assert_eq!(
        (report.stop(), report.certainty()),
        (Some(StopReason::NotRetryable), Certainty::Answered)
    );
    assert_eq!(report.next_step(), NextStep::FixRequest);
    assert_eq!(handle.key(), None);
}

#[tokio::test(start_paused = true)]
async fn errors_answer_the_questions_of_the_error_below() {
    let server = Server::script([Step::Refuse(support::refused())]);
    let client = server.client([build(plain_builder().max_attempts(1))]);
    let error = client.get(URL).send().await.expect_err("refused");
    assert!(error.root().expect("the error below").is_connect());
    let stopped = error.retry_error().expect("ours");
    assert!(stopped.is_connect() && !stopped.is_timeout() && stopped.status().is_none());
    assert_eq!(
        stopped.to_string(),
        "GET orders.test: attempts exhausted after 1 attempt(s) in 0ns; never sent"
    );
    let bare = Error::from(support::refused());
    assert!(bare.retry_error().is_none() && bare.root().is_some_and(reqwest::Error::is_connect));

    let server = Server::script([Step::Hang]);
    let client = server.client([build(
        plain_builder().max_attempts(1).attempt_timeout(secs(1)),
    )]);
    let error = client
        .post(URL)
        .with_extension(key("order-17-2026"))
        .send()
        .await
        .expect_err("no answer");
    let stopped = error.retry_error().expect("ours");
    assert!(stopped.is_timeout() && !stopped.is_connect() && error.root().is_none());
    assert_eq!(
        stopped.to_string(),
        "POST orders.test: attempts exhausted after 1 attempt(s) in 1s; outcome unknown, \
         confirm it with key orde…(13)"
    );
}

#[tokio::test(start_paused = true)]
async fn the_body_of_the_answer_ends_at_the_deadline() {
    let read = async |scope| {
        let server = Server::script([Step::Stall(200)]);
        let settings = plain_builder()
            .deadline(secs(2))
            .reserve(secs(1))
            .deadline_scope(scope);
        let answer = server
            .client([build(settings)])
            .get(URL)
            .send()
            .await
            .expect("an answer");
        assert_eq!(
            (answer.status(), answer.url().as_str()),
            (StatusCode::OK, URL)
        );
        let read = tokio::time::timeout(secs(60), answer.bytes()).await;
        (read, server.elapsed())
    };
    let (read_to_deadline, at) = read(DeadlineScope::Body).await;
    let error = read_to_deadline.expect("it ended").expect_err("cut");
    assert!(error.is_timeout(), "{error:?}");
    assert_eq!(at, secs(2), "the reserve does not shorten the body");
    let (read_for_ever, _) = read(DeadlineScope::Headers).await;
    assert!(read_for_ever.is_err(), "still reading");

    // A body that is there is whole, and as long as it was announced.
    let server = Server::script([Step::after(0, 200, &[("x-request-id", "7")])]);
    let client = server.client([build(plain_builder().deadline(secs(2)))]);
    let answer = client.get(URL).send().await.expect("an answer");
    assert_eq!(
        (
            answer.content_length(),
            answer.headers()["x-request-id"].as_bytes()
        ),
        (Some(3), &b"7"[..])
    );
    assert_eq!(answer.text().await.expect("the body"), "why");
}

#[test]
fn types_can_be_shared_and_sent() {
    fn shared<T: Send + Sync + 'static>() {}
    fn extension<T: Clone + Send + Sync + 'static>() {}
    shared::<RetryMiddleware>();
    shared::<RetryBudget>();
    shared::<RetryError>();
    extension::<IdempotencyKey>();
    extension::<Deadline>();
    extension::<Attempt>();
    extension::<ReportHandle>();
    extension::<RetryReport>();
    extension::<RetryOverride>();
}

// ---- beside other layers ----

/// reqwest-retry with two retries and next to no wait.
fn reqwest_retry()
-> reqwest_retry::RetryTransientMiddleware<reqwest_retry::policies::ExponentialBackoff> {
    let policy = reqwest_retry::policies::ExponentialBackoff::builder()
        .retry_bounds(Duration::from_nanos(1), Duration::from_nanos(2))
        .build_with_max_retries(2);
    reqwest_retry::RetryTransientMiddleware::new_with_policy(policy)
}

#[tokio::test]
async fn reqwest_retry_around_this_layer_repeats_answers_but_neither_errors_nor_unsafe_operations()
{
    let quick = || build(plain_builder().backoff(Backoff::fixed([Duration::ZERO])));
    let around = |server: &Server| {
        ClientBuilder::new(plain_http())
            .with(reqwest_retry())
            .with(quick())
            .with(server.clone())
            .build()
    };
    let server = Server::always(503);
    around(&server).get(URL).send().await.expect("an answer");
    assert_eq!(server.sends(), 3 * 4);
    let server = Server::script([Step::status(503)]);
    let error = around(&server)
        .post(URL)
        .body("order")
        .send()
        .await
        .expect_err("refused");
    assert_eq!(
        (server.sends(), stop_of(Err(error))),
        (1, Some(StopReason::UnsafeToRepeat))
    );
    // An error that it does not repeat it wraps so that ours is out of reach, and only the root is found.
    let server = Server::script((0..4).map(|_| Step::Refuse(support::refused())));
    let error = around(&server)
        .post(URL)
        .body("order")
        .send()
        .await
        .expect_err("refused");
    assert_eq!((server.sends(), error.retry_error().is_none()), (4, true));
    assert!(error.root().is_some_and(reqwest::Error::is_connect));
}

#[tokio::test]
async fn a_layer_that_repeats_bodies_belongs_outside() {
    let inside = |server: &Server, track: bool| {
        let layer = plain_builder()
            .backoff(Backoff::fixed([Duration::ZERO]))
            .send_tracking(track);
        ClientBuilder::new(plain_http())
            .with(build(layer))
            .with(reqwest_retry())
            .with(server.clone())
            .build()
    };
    // It cannot copy a tracked body, says so, and has sent nothing.
    let server = Server::script([]);
    let error = inside(&server, true)
        .post(URL)
        .body("order")
        .send()
        .await
        .expect_err("refused");
    let error = error.retry_error().expect("ours");
    assert_eq!(
        (error.stop(), error.certainty()),
        (StopReason::NotRetryable, Certainty::NotSent)
    );
    // Without tracking the attempts multiply, below every count of ours.
    let server = Server::always(503);
    let keyed = inside(&server, false)
        .post(URL)
        .body("order")
        .with_extension(key("order-17"));
    let report = support::report(&keyed.send().await).expect("a report");
    assert_eq!((server.sends(), report.attempts().len()), (4 * 3, 4));
}

/// An inner layer that adds a query, as some signatures do.
struct RewritesUrl;

#[async_trait::async_trait]
impl Middleware for RewritesUrl {
    async fn handle(
        &self,
        mut request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        request.url_mut().set_query(Some("signature=1"));
        next.run(request, extensions).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_layer_that_rewrites_the_url_belongs_outside() {
    let certainty = async |outside: bool| {
        let server = Server::always(422);
        let builder = ClientBuilder::new(plain_http());
        let builder = match outside {
            true => builder.with(RewritesUrl).with(build(plain_builder())),
            false => builder.with(build(plain_builder())).with(RewritesUrl),
        };
        let result = builder
            .with(server.clone())
            .build()
            .post(URL)
            .body("order")
            .send()
            .await;
        support::report(&result).expect("a report").certainty()
    };
    assert_eq!(certainty(true).await, Certainty::Answered);
    assert_eq!(certainty(false).await, Certainty::Unknown);
}

/// Runs the rest with the map emptied.
struct ClearsMap;

#[async_trait::async_trait]
impl Middleware for ClearsMap {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        extensions.clear();
        next.run(request, extensions).await
    }
}

#[tokio::test(start_paused = true)]
async fn an_outer_retry_continues_the_operation_though_a_layer_below_clears_the_map() {
    let sent = async |layer: RetryMiddlewareBuilder| {
        let server = Server::script([Step::status(503), Step::status(201)]);
        let outer = RunsTwice {
            after: ms(0),
            cut_first_at: None,
        };
        let client = ClientBuilder::new(plain_http())
            .with(outer)
            .with(build(layer.max_attempts(1)))
            .with(ClearsMap)
            .with(server.clone())
            .build();
        let _ = client.post(URL).body("order").send().await;
        server.key_lines()
    };
    assert_eq!(
        sent(plain_builder()).await.len(),
        1,
        "unsafe, and may have been carried out"
    );
    let keys = sent(plain_builder().key_contract(KeyContract::default())).await;
    assert!(
        keys.len() == 2 && keys[0] == keys[1] && keys[0].len() == 1,
        "{keys:?}"
    );
}

/// Sends a request of its own, and another one where that fails; the one it was given it drops.
struct SendsItsOwn;

#[async_trait::async_trait]
impl Middleware for SendsItsOwn {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let own = || {
            let mut own = Request::new(request.method().clone(), request.url().clone());
            *own.body_mut() = Some("signed".into());
            own
        };
        let first = next.clone().run(own(), extensions).await;
        match first {
            Ok(answer) => Ok(answer),
            Err(_) => next.run(own(), extensions).await,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_layer_sends_on_its_own_account_is_never_called_unsent() {
    for prepared in [false, true] {
        let failures = [read_and_closed(), read_and_closed()].map(Step::Fail);
        let server = Server::script(failures);
        let client = ClientBuilder::new(plain_http())
            .with(build(plain_builder().client_is_prepared(prepared)))
            .with(SendsItsOwn)
            .with(server.clone())
            .build();
        let result = client.post(URL).body("order").send().await;
        let report = support::report(&result).expect("a report");
        assert_eq!(
            (server.sends(), report.stop()),
            (2, Some(StopReason::UnsafeToRepeat)),
            "{prepared}"
        );
        assert_eq!(report.certainty(), Certainty::Unknown, "{prepared}");
    }
}

/// Puts its own body into the request, and sends that twice if need be.
struct ReplacesBody;

#[async_trait::async_trait]
impl Middleware for ReplacesBody {
    async fn handle(
        &self,
        mut request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        *request.body_mut() = Some("signed".into());
        tokio::time::sleep(ms(1)).await;
        let copy = request.try_clone().expect("a copy");
        match next.clone().run(copy, extensions).await {
            Ok(answer) => Ok(answer),
            Err(_) => next.run(request, extensions).await,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_connect_error_proves_nothing_of_a_layer_that_sends_another_body() {
    let first_arrived = [
        Step::Fail(read_and_closed()),
        Step::Refuse(support::refused()),
    ];
    let server = Server::script(first_arrived);
    let client = ClientBuilder::new(plain_http())
        .with(build(plain_builder().client_is_prepared(true)))
        .with(ReplacesBody)
        .with(server.clone())
        .build();
    let result = client.post(URL).body("order").send().await;
    let report = support::report(&result).expect("a report");
    assert_eq!(
        (server.sends(), report.certainty()),
        (2, Certainty::Unknown)
    );
}

// ---- redirects, as far as answers show them ----

const ELSEWHERE: &str = "http://orders.test/login";

async fn post_keyed(steps: Vec<Step>, layer: RetryMiddlewareBuilder) -> (usize, RetryReport) {
    let server = Server::script(steps);
    let handle = ReportHandle::new();
    let request = server.client([build(layer)]).post(URL).body("order");
    let request = request
        .with_extension(key("order-17"))
        .with_extension(handle.clone());
    let _ = request.send().await;
    (server.sends(), handle.report().expect("a report"))
}

#[tokio::test(start_paused = true)]
async fn an_answer_from_elsewhere_settles_nothing() {
    let limited = || plain_builder().attempt_timeout(secs(1));
    for status in [200, 404] {
        let steps = vec![Step::Hang, Step::from(ELSEWHERE, status, &[])];
        let (_, report) = post_keyed(steps, limited()).await;
        assert_eq!(report.certainty(), Certainty::Unknown, "{status}");
        let steps = vec![Step::from(ELSEWHERE, status, &[])];
        let (_, report) = post_keyed(steps, limited()).await;
        let confirm = NextStep::ConfirmOutcome {
            key: Some(key("order-17")),
        };
        assert_eq!(
            (report.certainty(), report.next_step()),
            (Certainty::Unknown, confirm),
            "{status}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_from_elsewhere_repeats_nothing() {
    let maintenance = |_: StatusCode, headers: &http::HeaderMap| {
        let closed = headers.contains_key("x-maintenance");
        closed.then_some(reqwest_idempotent_retry::StatusClass::RefusedBeforeWork)
    };
    let layer = || {
        build(
            plain_builder()
                .client_is_prepared(true)
                .classify(maintenance),
        )
    };
    let closed = [("x-maintenance", "1")];
    for (answer, sends) in [
        (Step::from(ELSEWHERE, 200, &closed), 1),
        (Step::from(ELSEWHERE, 503, &closed), 1),
        (Step::after(0, 503, &closed), 2),
    ] {
        let server = Server::script([answer, Step::status(201)]);
        let _ = server
            .client([layer()])
            .post(URL)
            .body("order")
            .send()
            .await;
        assert_eq!(server.sends(), sends);
    }
}

#[tokio::test(start_paused = true)]
async fn a_redirect_that_is_handed_on_is_not_done() {
    let confirm = NextStep::ConfirmOutcome {
        key: Some(key("order-17")),
    };
    for (status, certainty, next) in [
        (308, Certainty::Answered, NextStep::FixRequest),
        (307, Certainty::Answered, NextStep::FixRequest),
        (303, Certainty::Answered, NextStep::Done),
        (302, Certainty::Unknown, confirm.clone()),
        (301, Certainty::Unknown, confirm),
    ] {
        let away = Step::after(0, status, &[("location", "https://elsewhere.test/")]);
        let (sends, report) =
            post_keyed(vec![away], plain_builder().client_is_prepared(true)).await;
        assert_eq!((sends, report.certainty()), (1, certainty), "{status}");
        assert_eq!(report.next_step(), next, "{status}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_redirect_is_followed_only_while_there_is_time_for_it() {
    let moved = || Step::after(100, 307, &[("location", "/v2/orders")]);
    let limited = |minimum| {
        plain_builder()
            .deadline(ms(150))
            .minimum_attempt(ms(minimum))
            .max_attempts(1)
    };
    let server = Server::script([moved()]);
    let answer = server
        .client([build(limited(51))])
        .post(URL)
        .body("order")
        .send()
        .await;
    assert_eq!(
        (server.starts(), answer.expect("the 307").status().as_u16()),
        (vec![0], 307)
    );
    let server = Server::script([moved(), Step::status(201)]);
    let answer = server
        .client([build(limited(50))])
        .post(URL)
        .body("order")
        .send()
        .await;
    assert_eq!(
        (server.starts(), answer.expect("the 201").status().as_u16()),
        (vec![0, 100], 201)
    );
}

#[tokio::test(start_paused = true)]
async fn an_unsafe_operation_is_not_sent_again_for_a_redirect_that_may_follow_a_commit() {
    for (status, sends) in [(301, 1), (302, 1), (307, 2), (308, 2)] {
        let server = Server::script([
            Step::after(0, status, &[("location", "/orders/17")]),
            Step::status(200),
        ]);
        let client = server.client([build(plain_builder())]);
        client
            .patch(URL)
            .body("+1")
            .send()
            .await
            .expect("an answer");
        assert_eq!(server.sends(), sends, "{status}");
    }
}

// ---- what is told, to the letter ----

#[tokio::test(start_paused = true)]
async fn next_steps_never_invite_a_second_order() {
    // A success that a hook calls retryable is still a success.
    let accepted = |status: StatusCode, _: &http::HeaderMap| {
        (status == 202).then_some(reqwest_idempotent_retry::StatusClass::Retryable)
    };
    let server = Server::script([Step::status(202)]);
    let handle = ReportHandle::new();
    let client = server.client([build(plain_builder().classify(accepted))]);
    client
        .post(URL)
        .with_extension(handle.clone())
        .send()
        .await
        .expect("an answer");
    assert_eq!(handle.report().expect("told").next_step(), NextStep::Done);
    // A GET that the caller calls unsafe has an effect.
    let server = Server::script([Step::Hang]);
    let client = server.client([build(plain_builder().attempt_timeout(secs(1)))]);
    let error = client
        .get(URL)
        .with_extension(Idempotent(false))
        .send()
        .await
        .expect_err("no answer");
    let error = error.retry_error().expect("ours");
    assert_eq!(
        (error.stop(), error.certainty()),
        (StopReason::UnsafeToRepeat, Certainty::Unknown)
    );
    assert_eq!(error.next_step(), NextStep::ConfirmOutcome { key: None });
    // One that is none has nothing to confirm.
    let server = Server::script([Step::Hang]);
    let client = server.client([build(
        plain_builder().attempt_timeout(secs(1)).max_attempts(1),
    )]);
    let error = client.get(URL).send().await.expect_err("no answer");
    assert_eq!(
        error.retry_error().expect("ours").next_step(),
        NextStep::TryLater { after: None }
    );
}

#[tokio::test(start_paused = true)]
async fn another_layers_failure_is_not_the_requests_fault() {
    let client = ClientBuilder::new(plain_http())
        .with(build(plain_builder()))
        .with(Fails)
        .build();
    let error = client
        .post(URL)
        .body("order")
        .send()
        .await
        .expect_err("failed");
    let later = NextStep::TryLater { after: None };
    assert_eq!(error.retry_error().expect("ours").next_step(), later);
}

#[tokio::test(start_paused = true)]
async fn an_errors_cause_is_that_of_the_last_attempt() {
    let server = Server::script([Step::Refuse(support::refused()), Step::Hang]);
    let token = reqwest_idempotent_retry::CancellationToken::new();
    let request = server
        .client([build(plain_builder())])
        .post(URL)
        .body("order");
    let request = request
        .with_extension(key("order-17"))
        .with_extension(token.clone());
    let sending = tokio::spawn(request.send());
    tokio::time::sleep(ms(500)).await;
    token.cancel();
    let error = sending.await.expect("no panic").expect_err("cancelled");
    let error = error.retry_error().expect("ours");
    assert_eq!(error.certainty(), Certainty::Unknown);
    assert!(!error.is_connect() && std::error::Error::source(error).is_none());
}

#[tokio::test(start_paused = true)]
async fn a_handle_that_is_used_again_forgets_the_operation_before() {
    let server = Server::always(200);
    let client = server.client([build(plain_builder())]);
    let handle = ReportHandle::new();
    let first = client
        .post(URL)
        .with_extension(key("first"))
        .with_extension(handle.clone());
    first.send().await.expect("an answer");
    assert_eq!(handle.key(), Some(key("first")));
    let wrong = client
        .post(URL)
        .with_extension(RetryOverride::new().max_attempts(0));
    wrong
        .with_extension(handle.clone())
        .send()
        .await
        .expect_err("refused");
    let stop = handle.report().and_then(|report| report.stop());
    assert_eq!((handle.key(), stop), (None, Some(StopReason::InvalidInput)));
}

#[tokio::test(start_paused = true)]
async fn every_middleware_has_a_default_budget_of_its_own() {
    let builder = RetryMiddleware::builder()
        .backoff(Backoff::fixed([ms(0)]))
        .max_attempts(12);
    let (one, two) = (Server::always(503), Server::always(503));
    let (to_one, to_two) = (
        one.client([build(builder.clone())]),
        two.client([build(builder)]),
    );
    to_one.get(URL).send().await.expect("an answer");
    to_two.get(URL).send().await.expect("an answer");
    assert_eq!((one.sends(), two.sends()), (11, 11));
}

#[tokio::test(start_paused = true)]
async fn a_window_counts_retries_when_they_are_sent() {
    let budget = Arc::new(RetryBudget::window(1.0, 0, secs(1)).expect("valid"));
    let layer = || {
        build(
            plain_builder()
                .backoff(Backoff::fixed([ms(0)]))
                .budget(Arc::clone(&budget)),
        )
    };
    let patient = Server::script((0..10).map(|_| Step::retry_after(503, "5"))).then_always(200);
    let quick = Server::script((0..10).map(|_| Step::status(503))).then_always(200);
    let (to_patient, to_quick) = (patient.client([layer()]), quick.client([layer()]));
    let mut calls: Vec<_> = (0..10)
        .map(|_| tokio::spawn(to_patient.get(URL).send()))
        .collect();
    tokio::time::sleep(ms(4995)).await;
    calls.extend((0..10).map(|_| tokio::spawn(to_quick.get(URL).send())));
    for call in calls {
        call.await.expect("no panic").expect("an answer");
    }
    // Ten operations began in that second, so ten retries may be sent in it: those already waited for.
    assert_eq!((patient.sends(), quick.sends()), (20, 10));
}

#[tokio::test(start_paused = true)]
async fn bytes_that_come_after_the_deadline_come_too_late() {
    let server = Server::script([Step::status(200)]);
    let client = server.client([build(plain_builder().deadline(secs(2)))]);
    let answer = client.get(URL).send().await.expect("an answer");
    tokio::time::sleep(secs(3)).await;
    assert!(answer.text().await.expect_err("too late").is_timeout());
}

/// A terminal whose answer ends with a trailer.
struct Trails;

#[async_trait::async_trait]
impl Middleware for Trails {
    async fn handle(
        &self,
        request: Request,
        _: &mut Extensions,
        _: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        use http_body_util::BodyExt as _;
        let name = HeaderName::from_static("x-checksum");
        let trailers = http::HeaderMap::from_iter([(name, http::HeaderValue::from_static("17"))]);
        let body = http_body_util::Full::new(bytes::Bytes::from_static(b"why"))
            .with_trailers(std::future::ready(Some(Ok(trailers))));
        let answer =
            reqwest::ResponseBuilderExt::url(http::Response::builder(), request.url().clone());
        Ok(Response::from(
            answer.body(reqwest::Body::wrap(body)).expect("a response"),
        ))
    }
}

#[tokio::test(start_paused = true)]
async fn trailers_come_through_a_deadline_and_a_buffer() {
    use http_body_util::BodyExt as _;
    let layers = [
        plain_builder().deadline(secs(2)),
        plain_builder().buffer_response(3),
        plain_builder().buffer_response(2),
    ];
    for layer in layers {
        let client = ClientBuilder::new(plain_http())
            .with(build(layer))
            .with(Trails)
            .build();
        let answer = client.get(URL).send().await.expect("an answer");
        let body = http::Response::<reqwest::Body>::from(answer).into_body();
        let read = body.collect().await.expect("the body");
        assert_eq!(read.trailers().expect("trailers")["x-checksum"], "17");
        assert_eq!(read.to_bytes(), "why");
    }
}
