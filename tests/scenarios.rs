//! Every row and total of `data/scenarios.json`, in virtual time, exact to the millisecond.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use reqwest_idempotent_retry::{
    Attempt, Backoff, CancellationToken, Certainty, Deadline, ReportHandle, RetryBudget,
    RetryMiddleware, StopReason,
};
use serde_json::Value;
use support::{Server, Step, key, ms, refused, secs, status};
use tokio::time::Instant;

const DATA: &str = include_str!("data/scenarios.json");

/// The vectors' backoff: full jitter with base 200 ms, so that their draws of 100 and 300 ms lie
/// inside the windows of 200 and 400 ms.
const BASE_MS: u64 = 200;

fn data() -> Value {
    serde_json::from_str(DATA).expect("the vectors are JSON")
}

/// A row's own setting, or the default of all rows.
fn setting<'v>(data: &'v Value, row: &'v Value, name: &str) -> &'v Value {
    row.get(name).unwrap_or(&data["defaults"][name])
}

fn number(value: &Value) -> u64 {
    value.as_u64().expect("a number")
}

fn numbers(value: &Value) -> Vec<u64> {
    value
        .as_array()
        .expect("an array")
        .iter()
        .map(number)
        .collect()
}

fn step(step: &Value) -> Step {
    match step {
        Value::String(what) if what == "hang" => Step::Hang,
        Value::String(what) if what == "refused" => Step::Refuse(refused()),
        answer => {
            let headers: Vec<_> = answer["headers"]
                .as_object()
                .into_iter()
                .flatten()
                .map(|(name, value)| (name.as_str(), value.as_str().expect("text")))
                .collect();
            let status = u16::try_from(number(&answer["status"])).expect("a status");
            Step::after(number(&answer["ms"]), status, &headers)
        }
    }
}

/// The draws, as fractions of the windows that they are draws from.
fn draws(waits: &[u64]) -> impl Fn() -> f64 + Send + Sync + 'static {
    let fractions: Vec<f64> = waits
        .iter()
        .enumerate()
        .map(|(k, &wait)| wait as f64 / (BASE_MS << k) as f64)
        .collect();
    let drawn = AtomicUsize::new(0);
    move || {
        let k = drawn.fetch_add(1, Ordering::Relaxed);
        fractions.get(k).copied().unwrap_or(0.0)
    }
}

fn stop_reason(name: &str) -> StopReason {
    match name {
        "Cancelled" => StopReason::Cancelled,
        "NotRetryable" => StopReason::NotRetryable,
        "UnsafeToRepeat" => StopReason::UnsafeToRepeat,
        "AttemptsExhausted" => StopReason::AttemptsExhausted,
        "RetryAfterTooLong" => StopReason::RetryAfterTooLong,
        "DeadlineTooClose" => StopReason::DeadlineTooClose,
        "BudgetExhausted" => StopReason::BudgetExhausted,
        other => panic!("no such stop reason: {other}"),
    }
}

fn certainty(name: &str) -> Certainty {
    match name {
        "NotSent" => Certainty::NotSent,
        "Unknown" => Certainty::Unknown,
        "Answered" => Certainty::Answered,
        other => panic!("no such certainty: {other}"),
    }
}

async fn run(data: &Value, row: &Value) {
    let name = row["name"].as_str().expect("a name");
    let of = |name| setting(data, row, name);
    let steps: Vec<_> = row["attempts"]
        .as_array()
        .expect("attempts")
        .iter()
        .map(step)
        .collect();

    let server = Server::script(steps);
    let start = Instant::now();
    let builder = RetryMiddleware::builder()
        .max_attempts(u32::try_from(number(of("max_attempts"))).expect("small"))
        .attempt_timeout(ms(number(of("attempt_timeout"))))
        .minimum_attempt(ms(number(of("minimum_attempt"))))
        .reserve(ms(number(of("reserve"))))
        .backoff(Backoff::full_jitter(ms(BASE_MS), secs(10)))
        .random_with(draws(&numbers(of("waits"))));
    let builder = match of("budget") {
        Value::Null => builder.without_budget(),
        tokens => builder.budget(Arc::new(RetryBudget::fixed(
            u32::try_from(number(tokens)).expect("small"),
        ))),
    };
    let client = server.client([builder.build().expect("valid settings")]);

    let handle = ReportHandle::new();
    let request = of("request").as_str().expect("a request");
    let mut request = match request {
        "GET" => client.get(support::URL),
        "POST" => client.post(support::URL).body("order"),
        "POST+key" => client
            .post(support::URL)
            .body("order")
            .with_extension(key("order-17")),
        other => panic!("no such request: {other}"),
    }
    .with_extension(Deadline::after(ms(number(of("deadline")))))
    .with_extension(handle.clone());
    if let Some(at) = of("cancel_at").as_u64() {
        let token = CancellationToken::new();
        request = request.with_extension(token.clone());
        match at {
            0 => token.cancel(),
            at => {
                tokio::spawn(async move {
                    tokio::time::sleep_until(start + ms(at)).await;
                    token.cancel();
                });
            }
        }
    }

    let result = request.send().await;
    let end = start.elapsed();
    let report = handle.report().expect("every operation is reported");
    let expect = &row["expect"];
    assert_eq!(end, ms(number(&expect["end"])), "end of: {name}");
    let starts: Vec<_> = server.seen().iter().map(|seen| seen.at).collect();
    let expected: Vec<_> = numbers(&expect["starts"]).into_iter().map(ms).collect();
    assert_eq!(starts, expected, "starts of: {name}");
    if let Some(limits) = expect.get("limits") {
        let seen: Vec<_> = server
            .seen()
            .iter()
            .map(|seen| {
                seen.attempt
                    .and_then(|attempt| attempt.limit())
                    .expect("a limit")
            })
            .collect();
        let expected: Vec<_> = numbers(limits).into_iter().map(ms).collect();
        assert_eq!(seen, expected, "limits of: {name}");
    }
    let expected = expect.get("status").map(number);
    let seen = status(&result).map(|status| u64::from(status.as_u16()));
    assert_eq!(seen, expected, "status of: {name}");
    let expected = expect.get("stop").and_then(Value::as_str).map(stop_reason);
    assert_eq!(report.stop(), expected, "stop of: {name}");
    if let Some(expected) = expect.get("certainty").and_then(Value::as_str) {
        assert_eq!(
            report.certainty(),
            certainty(expected),
            "certainty of: {name}"
        );
    }
    // The same account is in the result itself, unless there was nothing to tell.
    if let Some(told) = support::report(&result) {
        assert_eq!(told.stop(), report.stop(), "told stop of: {name}");
        assert_eq!(
            told.certainty(),
            report.certainty(),
            "told certainty of: {name}"
        );
        assert_eq!(
            told.attempts().len(),
            starts.len(),
            "told attempts of: {name}"
        );
    } else {
        assert!(
            result.is_ok() && starts.len() == 1,
            "nothing told of: {name}"
        );
    }
    // Each attempt carried the same key and bytes, and knew its number.
    for (index, seen) in server.seen().iter().enumerate() {
        assert_eq!(
            seen.attempt.map(|attempt| attempt.number() as usize),
            Some(index + 1),
            "{name}"
        );
        if seen.method == "POST" && !seen.body.is_empty() {
            assert_eq!(seen.body, "order", "{name}");
        }
        let has_key = of("request") == "POST+key";
        let expected: &[&str] = if has_key { &["order-17"] } else { &[] };
        assert_eq!(
            support::lines(&seen.headers, "idempotency-key"),
            expected,
            "{name}"
        );
    }
}

#[test]
fn every_scenario() {
    let data = data();
    let rows = data["scenarios"].as_array().expect("scenarios");
    assert_eq!(rows.len(), 22, "a row was added or lost");
    for row in rows {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .expect("a runtime")
            .block_on(run(&data, row));
    }
}

/// The named total, with the assurance that no total is left out.
fn total(name: &str) -> Value {
    let data = data();
    let totals = data["totals"].as_array().expect("totals");
    assert_eq!(totals.len(), 4, "a total was added or lost");
    let total = totals.iter().find(|total| total["name"] == name);
    total.expect("a total of this name").clone()
}

#[tokio::test(start_paused = true)]
async fn total_stacked_layers_multiply_only_once() {
    let total = total("stacked layers of this crate multiply only once");
    let layer = || {
        RetryMiddleware::builder()
            .max_attempts(3)
            .without_budget()
            .build()
            .expect("valid")
    };
    let server = Server::always(503);
    let client = server.client([layer(), layer(), layer()]);
    let result = client.get(support::URL).send().await;
    assert_eq!(server.sends() as u64, number(&total["expect_sends"]));
    let report = support::report(&result).expect("a report");
    assert_eq!(report.attempts().len(), server.sends());
    let numbers: Vec<_> = server
        .seen()
        .iter()
        .filter_map(|seen| seen.attempt)
        .map(|a: Attempt| a.number())
        .collect();
    assert_eq!(numbers, [1, 2, 3]);
}

/// Sends `count` operations to `client`, all at once.
async fn send_all(client: &reqwest_middleware::ClientWithMiddleware, count: usize) {
    let tasks: Vec<_> = (0..count)
        .map(|_| tokio::spawn(client.get(support::URL).send()))
        .collect();
    for task in tasks {
        task.await.expect("no panic").expect("an answer");
    }
}

#[tokio::test(start_paused = true)]
async fn total_a_fixed_shared_budget_bounds_the_whole_load() {
    let total = total("a fixed shared budget bounds the whole load");
    let budget = Arc::new(RetryBudget::fixed(100));
    let server = Server::always(503);
    let layer = || {
        RetryMiddleware::builder()
            .max_attempts(3)
            .budget(Arc::clone(&budget))
            .build()
            .expect("valid")
    };
    // Two clients share the budget through its `Arc`.
    let (one, two) = (server.client([layer()]), server.client([layer()]));
    tokio::join!(send_all(&one, 500), send_all(&two, 500));
    assert_eq!(server.sends() as u64, number(&total["expect_sends"]));
    assert_eq!(budget.balance(), 0.0);

    let server = Server::always(503);
    let unlimited = RetryMiddleware::builder()
        .max_attempts(3)
        .without_budget()
        .build()
        .expect("valid");
    send_all(&server.client([unlimited]), 1000).await;
    assert_eq!(server.sends() as u64, number(&total["without_budget"]));
}

#[tokio::test(start_paused = true)]
async fn total_ten_per_cent_of_successes() {
    let total = total("ten per cent of successes");
    for (successes, retries) in [(1000, "expect_retries"), (500, "with_500_successes")] {
        let budget = RetryBudget::builder()
            .ratio(0.1)
            .burst(100)
            .initial(0)
            .trickle(Duration::MAX)
            .build()
            .expect("valid");
        let layer = RetryMiddleware::builder()
            .max_attempts(3)
            .budget(Arc::new(budget))
            .build()
            .expect("valid");
        let steps = (0..successes).map(|_| Step::status(200));
        let server = Server::script(steps).then_always(503);
        let client = server.client([layer]);
        send_all(&client, successes).await;
        assert_eq!(server.sends(), successes);
        send_all(&client, 1000).await;
        let extra = server.sends() - successes - 1000;
        assert_eq!(extra as u64, number(&total[retries]), "{retries}");
    }
}

#[test]
fn total_callers_do_not_return_together() {
    total("callers do not return together");
    const WINDOW: Duration = Duration::from_millis(300);
    const CALLERS: usize = 6;
    let mut waits = Vec::new();
    for seed in 0..1000 {
        let random = std::sync::Mutex::new(fastrand::Rng::with_seed(seed));
        let layer = RetryMiddleware::builder()
            .max_attempts(2)
            .backoff(Backoff::full_jitter(WINDOW, WINDOW))
            .random_with(move || support::lock(&random).f64())
            .without_budget()
            .build()
            .expect("valid");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let server = Server::script((0..CALLERS).map(|_| Step::status(503))).then_always(200);
            let client = server.client([layer]);
            let calls: Vec<_> = (0..CALLERS)
                .map(|_| tokio::spawn(client.get(support::URL).send()))
                .collect();
            for call in calls {
                let result = call.await.expect("no panic");
                let report = support::report(&result).expect("a report");
                waits.push(report.attempts()[1].waited());
            }
        });
    }
    assert_eq!(waits.len(), 6000);
    assert!(waits.iter().all(|&wait| wait <= WINDOW));
    let mean = waits.iter().sum::<Duration>().as_secs_f64() * 1000.0 / waits.len() as f64;
    assert!((140.0..=160.0).contains(&mean), "mean {mean} ms");
    let mut deciles = [0_usize; 10];
    for wait in &waits {
        deciles[(wait.as_millis() as usize * 10 / 300).min(9)] += 1;
    }
    let most = deciles.iter().max().copied().unwrap_or_default();
    assert!(most as f64 <= 1.3 * 600.0, "{deciles:?}");
}
