//! Seven cases against a real order service on 127.0.0.1, and the numbers that prove them.
//!
//! ```text
//! cargo run --example quickstart
//! ```
//!
//! Orders are counted in the service's SQLite table and sends in its request log, never by the
//! client. Exits with 1 when any number is not the expected one.

#![allow(
    clippy::disallowed_methods,
    reason = "the service reads the time and waits, as its own program would"
)]

mod case;
mod server;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use case::Case;
use reqwest_idempotent_retry::{
    Backoff, Certainty, Deadline, IdempotencyKey, KeyContract, NextStep, NoRetry, RetryBudget,
    RetryErrorExt, RetryMiddleware, RetryResponseExt, StopReason,
};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware};
use serde_json::{Value, json};
use server::fault;
use tokio::task::JoinSet;

type AnyError = Box<dyn std::error::Error + Send + Sync>;
type Result<T, E = AnyError> = std::result::Result<T, E>;

/// **The call site to copy.** `http` is your own `reqwest::Client::builder()`.
fn client(http: reqwest::ClientBuilder, budget: Arc<RetryBudget>) -> Result<ClientWithMiddleware> {
    let retry = RetryMiddleware::builder()
        .deadline(Duration::from_secs(10))
        .attempt_timeout(Duration::from_secs(2))
        .backoff(Backoff::full_jitter(ms(50), ms(500)))
        .budget(budget) // the same `Arc` for every client of the service
        .key_contract(KeyContract::default()) // the service honours `Idempotency-Key`
        .client_is_prepared(true) // by the next statement
        .build()?;
    let http = RetryMiddleware::prepare(http).build()?;
    Ok(ClientBuilder::new(http).with(retry).build())
}

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let wrong = [
        new_key_for_each_try().await?,
        one_key_kept().await?,
        same_key_other_body().await?,
        slower_than_the_deadline().await?,
        two_503_then_200().await?,
        retry_after_beyond_the_deadline().await?,
        shared_budget_in_an_outage().await?,
    ]
    .concat();
    if wrong.is_empty() {
        println!("All seven cases ended as expected.");
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("Not as expected:\n  {}", wrong.join("\n  "));
    Ok(ExitCode::FAILURE)
}

/// What goes wrong without this crate: the application's own loop makes a new key for each try.
async fn new_key_for_each_try() -> Result<Vec<String>> {
    let mut case = Case::begin("1. DO NOT: answer lost after the commit, new key per try").await?;
    for _ in 0..3 {
        let order = case.order(fault::LOSE_FIRST_ANSWER);
        let order = order.with_extension(IdempotencyKey::generate());
        if case.send(order.with_extension(NoRetry)).await.is_ok() {
            break;
        }
    }
    case.expect_counts(2, 2, 2)?;
    case.end("To the service a new key is a new order.").await
}

async fn one_key_kept() -> Result<Vec<String>> {
    let mut case = Case::begin("2. Answer lost after the commit, one key made and kept").await?;
    let answer = case.send(case.order(fault::LOSE_FIRST_ANSWER)).await?;

    case.expect_counts(1, 2, 1)?;
    let replayed = answer.headers().get(server::REPLAYED);
    let replayed = replayed.is_some_and(|value| value == "true");
    case.expect("receipt replayed", true, replayed);
    case.end("The service knew the key.").await
}

async fn same_key_other_body() -> Result<Vec<String>> {
    let mut case = Case::begin("3. The same key with another body").await?;
    let key = IdempotencyKey::new("order-17")?;
    let order = case.order(fault::NONE);
    case.send(order.with_extension(key.clone())).await?;

    // A 409 may also mean "your first request is still running", so the advice is to look it up.
    let conflict = send_other_body(&case, fault::NONE, &key).await?;
    let key_to_ask = Some(key.clone());
    let confirm = NextStep::ConfirmOutcome { key: key_to_ask };
    case.expect("refusal", (409, confirm), conflict);
    let refusal = send_other_body(&case, fault::REUSED_KEY_IS_422, &key).await?;
    case.expect("refusal", (422, NextStep::FixRequest), refusal);

    case.expect_counts(1, 3, 1)?;
    let is_unchanged = case.server.orders()? == [case::order().to_string()];
    case.expect("order unchanged", true, is_unchanged);
    case.end("Refused, and not retried.").await
}

type Refusal = (u16, NextStep);

async fn send_other_body(case: &Case, fault: &str, key: &IdempotencyKey) -> Result<Refusal> {
    let body = json!({ "item": "tea", "boxes": 200 });
    let request = case.order(fault).json(&body);
    let answer = case.send(request.with_extension(key.clone())).await?;
    let report = answer.retry_report().ok_or("no report")?;
    Ok((answer.status().as_u16(), report.next_step()))
}

async fn slower_than_the_deadline() -> Result<Vec<String>> {
    let mut case = Case::begin("4. The service commits, and answers after the deadline").await?;
    let deadline = Deadline::after(ms(500));
    let order = case.order(fault::SLOW).with_extension(deadline);
    let error = case.send(order).await.err().ok_or("an answer came")?;
    let stopped = error.retry_error().ok_or("another layer's error")?;
    case.expect("stop", StopReason::DeadlineTooClose, stopped.stop());
    case.expect("certainty", Certainty::Unknown, stopped.certainty());
    let key = stopped.key().ok_or("no key")?;
    case.say(&format!("unknown; look it up by key {}", key.as_str()));

    let url = case.server.url(&format!("/orders/by-key/{}", key.as_str()));
    let found = case.send(case.client.get(url)).await?;
    let receipt: Value = found.json().await?;
    let is_completed = receipt["status"] == "completed";
    case.expect("found completed", true, is_completed);
    case.expect_counts(1, 1, 1)?;
    case.end("A timeout says nothing; the key does.").await
}

async fn two_503_then_200() -> Result<Vec<String>> {
    let mut case = Case::begin("5. Two answers 503, then 200").await?;
    let answer = case.send(case.order(fault::TWO_503)).await?;
    case.expect("status", 200, answer.status().as_u16());
    case.expect_counts(1, 3, 1)?;
    case.end("Three sends, one order.").await
}

async fn retry_after_beyond_the_deadline() -> Result<Vec<String>> {
    let mut case = Case::begin("6. 429 with Retry-After 60 s, deadline 10 s").await?;
    let answer = case.send(case.order(fault::RETRY_AFTER_60_S)).await?;

    case.expect("status", 429, answer.status().as_u16());
    let report = answer.retry_report().ok_or("no report")?;
    let stop = report.stop().ok_or("no stop")?;
    case.expect("stop", StopReason::RetryAfterTooLong, stop);
    let after = Some(Duration::from_secs(60));
    let later = NextStep::TryLater { after };
    case.expect("next step", later, report.next_step());
    let is_early = report.elapsed() < Duration::from_secs(1);
    case.expect("back within 1 s", true, is_early);
    case.expect_counts(0, 1, 1)?;
    case.end("Not worth a wait.").await
}

async fn shared_budget_in_an_outage() -> Result<Vec<String>> {
    let mut case = Case::begin("7. Only 503; 1000 orders, 2 clients, one budget of 100").await?;
    let budget = Arc::new(RetryBudget::fixed(100));
    let mut workers = JoinSet::new();
    case.say("orders start, 20 at a time");
    for _ in 0..2 {
        let client = client(case::plain_http(), Arc::clone(&budget))?;
        for _ in 0..10 {
            let url = case.server.orders_url(fault::ALWAYS_503);
            workers.spawn(send_orders(client.clone(), url, 50));
        }
    }
    let refused: usize = workers.join_all().await.iter().sum();
    case.say("end: budget exhausted, every order refused");

    case.expect("refused", 1000, refused);
    case.expect_counts(0, 1100, 1000)?;
    case.end("Without a budget: 3000 sends.").await
}

/// Sends so many orders, one after the other, and counts the answers 503.
async fn send_orders(client: ClientWithMiddleware, url: String, count: usize) -> usize {
    let mut refused = 0;
    for _ in 0..count {
        let answer = client.post(&url).json(&case::order()).send().await;
        refused += usize::from(answer.is_ok_and(|answer| answer.status() == 503));
    }
    refused
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}
