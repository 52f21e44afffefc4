//! Dropping the future, and cancelling its token, at every point where the loop awaits.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod support;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::{Extensions, StatusCode};
use reqwest::{Request, Response};
use reqwest_idempotent_retry::{
    CancellationToken, Certainty, Failure, ReportHandle, RetryBudget, RetryErrorExt, RetryReport,
    StopReason,
};
use reqwest_middleware::{ClientBuilder, Next, RequestBuilder};
use support::{Server, Step, URL, key, ms, plain_builder, plain_http, secs};

/// A place where the operation waits, and what is true when it ends there.
struct Place {
    name: &'static str,
    steps: fn() -> Vec<Step>,
    /// When it is ended, from the first send.
    at: Duration,
    sends: usize,
    /// An attempt is in the air, and is abandoned.
    in_flight: bool,
    certainty: Certainty,
}

impl Place {
    /// Tokens that are gone for good: those of retries that had started.
    fn spent(&self) -> usize {
        self.sends - 1
    }

    /// Whether a 503 was given up for a retry.
    fn gave_up_an_answer(&self) -> bool {
        self.sends > 1 || !self.in_flight
    }
}

/// 503 at once, then a wait of 100 ms, and so on.
fn places() -> Vec<Place> {
    let (not_sent, unknown) = (Certainty::NotSent, Certainty::Unknown);
    let connecting: fn() -> Vec<Step> = || vec![Step::Connect];
    let hanging: fn() -> Vec<Step> = || vec![Step::Hang];
    let draining: fn() -> Vec<Step> = || vec![Step::Stall(503)];
    let failing: fn() -> Vec<Step> = || vec![Step::status(503), Step::status(503)];
    let hanging_second: fn() -> Vec<Step> = || vec![Step::status(503), Step::Hang];
    let connecting_second: fn() -> Vec<Step> = || vec![Step::status(503), Step::Connect];
    [
        (
            "before the connection is made",
            connecting,
            50,
            1,
            true,
            not_sent,
        ),
        ("in the first attempt", hanging, 50, 1, true, unknown),
        ("while draining", draining, 20, 1, false, unknown),
        ("in the first wait", failing, 80, 1, false, unknown),
        (
            "in the second attempt",
            hanging_second,
            150,
            2,
            true,
            unknown,
        ),
        ("in the second wait", failing, 250, 2, false, unknown),
        ("connecting again", connecting_second, 150, 2, true, unknown),
    ]
    .map(|(name, steps, at, sends, in_flight, certainty)| Place {
        name,
        steps,
        at: ms(at),
        sends,
        in_flight,
        certainty,
    })
    .into()
}

const TOKENS: usize = 5;

struct Ending {
    server: Server,
    budget: Arc<RetryBudget>,
    handle: ReportHandle,
    request: RequestBuilder,
}

fn operation(place: &Place) -> Ending {
    let server = Server::script((place.steps)());
    let budget = Arc::new(RetryBudget::fixed(TOKENS as u32));
    let handle = ReportHandle::new();
    let layer = plain_builder()
        .budget(Arc::clone(&budget))
        .build()
        .expect("valid");
    let request = server
        .client([layer])
        .post(URL)
        .body("order")
        .with_extension(key("order-17"))
        .with_extension(handle.clone());
    Ending {
        server,
        budget,
        handle,
        request,
    }
}

/// What holds however the operation was ended.
async fn assert_ended(place: &Place, ended: &Ending) -> RetryReport {
    let name = place.name;
    let report = ended.handle.report().expect("a report is left behind");
    assert_eq!(report.stop(), Some(StopReason::Cancelled), "{name}");
    assert_eq!(report.certainty(), place.certainty, "{name}");
    assert_eq!(report.attempts().len(), place.sends, "{name}");
    assert_eq!(report.key(), Some(&key("order-17")), "{name}");
    assert_eq!(ended.handle.key(), Some(key("order-17")), "{name}");
    assert_eq!(
        ended.budget.balance(),
        (TOKENS - place.spent()) as f64,
        "{name}"
    );
    // Neither the client nor its layer is alive in a task or timer somewhere.
    tokio::time::sleep(secs(60)).await;
    assert_eq!(
        ended.server.sends(),
        place.sends,
        "nothing is sent later: {name}"
    );
    report
}

#[tokio::test(start_paused = true)]
async fn dropping_the_future_at_every_await() {
    for place in places() {
        let mut ended = operation(&place);
        let request = std::mem::replace(&mut ended.request, unused());
        assert!(
            tokio::time::timeout(place.at, request.send())
                .await
                .is_err()
        );
        assert_eq!(ended.server.elapsed(), place.at, "{}", place.name);
        assert_eq!(Arc::strong_count(&ended.budget), 1, "{}", place.name);
        assert_ended(&place, &ended).await;
    }
}

/// Something to leave behind in place of a request that is sent.
fn unused() -> RequestBuilder {
    Server::script([]).client([]).get(URL)
}

#[tokio::test(start_paused = true)]
async fn cancelling_the_token_at_every_await() {
    for place in places() {
        let mut ended = operation(&place);
        let token = CancellationToken::new();
        let request = std::mem::replace(&mut ended.request, unused());
        let sending = tokio::spawn(request.with_extension(token.clone()).send());
        tokio::time::sleep(place.at).await;
        token.cancel();
        let error = sending.await.expect("no panic").expect_err("cancelled");
        assert_eq!(ended.server.elapsed(), place.at, "{}", place.name);
        let error = error.retry_error().expect("ours");
        assert_eq!(error.stop(), StopReason::Cancelled, "{}", place.name);
        assert_eq!(error.certainty(), place.certainty, "{}", place.name);
        let given_up = place
            .gave_up_an_answer()
            .then_some(StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(error.status(), given_up, "{}", place.name);
        let report = assert_ended(&place, &ended).await;
        let last = report.attempts().last().expect("an attempt");
        let abandoned = last.failure() == Some(Failure::Cancelled);
        assert_eq!(abandoned, place.in_flight, "{}", place.name);
    }
}

#[tokio::test(start_paused = true)]
async fn a_future_that_is_never_polled_does_nothing() {
    let ended = operation(&places()[0]);
    drop(ended.request.send());
    assert_eq!(
        (ended.server.sends(), ended.handle.report().is_none()),
        (0, true)
    );
    assert_eq!(ended.budget.balance(), TOKENS as f64);
}

#[tokio::test(start_paused = true)]
async fn a_token_cancelled_before_the_first_send_sends_nothing() {
    let ended = operation(&places()[0]);
    let token = CancellationToken::new();
    token.cancel();
    let error = ended
        .request
        .with_extension(token)
        .send()
        .await
        .expect_err("cancelled");
    let error = error.retry_error().expect("ours");
    assert_eq!(
        (error.stop(), error.certainty()),
        (StopReason::Cancelled, Certainty::NotSent)
    );
    assert_eq!(
        (ended.server.sends(), error.report().attempts().len()),
        (0, 0)
    );
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_is_there_wins_over_a_token_cancelled_meanwhile() {
    let server = Server::script([Step::after(10, 201, &[])]);
    let layer = plain_builder().build().expect("valid");
    let token = CancellationToken::new();
    let request = server
        .client([layer])
        .post(URL)
        .with_extension(token.clone());
    let sending = tokio::spawn(request.send());
    // Cancelled by a timer of the same instant as the answer's.
    tokio::time::sleep(ms(10)).await;
    token.cancel();
    assert_eq!(
        sending
            .await
            .expect("no panic")
            .expect("the answer")
            .status(),
        201
    );
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_drops_during_waits_leave_the_balance_as_it_was() {
    for budget in [
        RetryBudget::fixed(3),
        RetryBudget::builder()
            .burst(3)
            .trickle(Duration::MAX)
            .build()
            .expect("valid"),
        RetryBudget::window(0.0, 3, secs(1)).expect("valid"),
    ] {
        let budget = Arc::new(budget);
        let before = 3.0;
        let layer = plain_builder()
            .budget(Arc::clone(&budget))
            .build()
            .expect("valid");
        let server = Server::always(503);
        let client = server.client([layer]);
        for _ in 0..10_000 {
            let mut send = std::pin::pin!(client.get(URL).send());
            // Polled until it is in its wait, where the token is out.
            assert!(
                tokio::time::timeout(Duration::ZERO, &mut send)
                    .await
                    .is_err()
            );
            assert_eq!(budget.balance(), before - 1.0);
        }
        assert_eq!(budget.balance(), before);
        assert_eq!(server.sends(), 10_000);
    }
}

/// A layer that always has something to do, and gives way only where tokio makes it.
fn restless<'a>(
    _: Request,
    _: &'a mut Extensions,
    _: Next<'a>,
) -> Pin<Box<dyn Future<Output = reqwest_middleware::Result<Response>> + Send + 'a>> {
    Box::pin(async {
        loop {
            tokio::task::consume_budget().await;
        }
    })
}

/// Such work uses up the task's share of polls each time, and a timer that is asked after it would never
/// say that it is late.
#[tokio::test]
async fn work_that_never_rests_is_cut_at_its_limit_and_at_the_callers_word() {
    let limited = plain_builder().attempt_timeout(ms(50)).max_attempts(1);
    let client = ClientBuilder::new(plain_http())
        .with(limited.build().expect("valid settings"))
        .with(restless)
        .build();
    let late = tokio::time::timeout(secs(10), client.get(URL).send()).await;
    let error = late.expect("cut").expect_err("no answer");
    let error = error.retry_error().expect("ours");
    assert!(error.is_timeout(), "{error}");

    let token = CancellationToken::new();
    let unlimited = plain_builder().max_attempts(1);
    let client = ClientBuilder::new(plain_http())
        .with(unlimited.build().expect("valid settings"))
        .with(restless)
        .build();
    let waiting = client.get(URL).with_extension(token.clone()).send();
    let caller = async {
        tokio::task::yield_now().await;
        token.cancel();
    };
    let both = async { tokio::join!(waiting, caller).0 };
    let cancelled = tokio::time::timeout(secs(10), both).await;
    let error = cancelled.expect("cut").expect_err("no answer");
    let stop = error.retry_error().map(|error| error.report().stop());
    assert_eq!(stop, Some(Some(StopReason::Cancelled)));
}
