//! Layers within layers, and clients within clients: how often something is sent is decided in one
//! place. First what the server saw, then what each layer is told.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod support;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::Extensions;
use reqwest::{Request, Response};
use reqwest_idempotent_retry::{
    Backoff, BreakerState, Certainty, CircuitBreaker, FirstSends, IdempotencyKey, KeyContract,
    LoadControl, NextStep, NoRetry, ReportHandle, RetryBudget, RetryErrorExt, RetryMiddleware,
    RetryMiddlewareBuilder, RetryReport, RetryResponseExt, StopReason,
};
use reqwest_middleware::{
    ClientBuilder, ClientWithMiddleware, Error, Middleware, Next, RequestBuilder,
};
use support::{
    Server, Step, URL, key, lock, ms, plain_builder, plain_http, read_and_closed, refused, secs,
};

const OUTER_URL: &str = "http://gateway.test/";

// ---- The parts that tests are made of ----

fn thrice() -> RetryMiddlewareBuilder {
    plain_builder().max_attempts(3)
}

fn layer(retry: RetryMiddlewareBuilder) -> RetryMiddleware {
    retry.build().expect("valid settings")
}

type Ask = dyn Fn(&ClientWithMiddleware, &Extensions) -> RequestBuilder + Send + Sync;

/// A layer that answers by calling another service, as a gateway does. Whatever comes of it, it hands on.
#[derive(Clone)]
struct Calls {
    client: ClientWithMiddleware,
    ask: Arc<Ask>,
    on_a_task_of_its_own: bool,
    told: Arc<Mutex<Vec<RetryReport>>>,
}

impl Calls {
    fn by(
        client: ClientWithMiddleware,
        ask: impl Fn(&ClientWithMiddleware, &Extensions) -> RequestBuilder + Send + Sync + 'static,
    ) -> Self {
        Self {
            client,
            ask: Arc::new(ask),
            on_a_task_of_its_own: false,
            told: Arc::default(),
        }
    }

    fn get(client: ClientWithMiddleware) -> Self {
        Self::by(client, |client, _| client.get(URL))
    }

    fn order(client: ClientWithMiddleware) -> Self {
        Self::by(client, |client, _| client.post(URL).body("order"))
    }

    fn on_a_task_of_its_own(mut self) -> Self {
        self.on_a_task_of_its_own = true;
        self
    }

    /// A client whose every request ends up here.
    fn under(&self, retry: RetryMiddlewareBuilder) -> ClientWithMiddleware {
        ClientBuilder::new(plain_http())
            .with(layer(retry))
            .with(self.clone())
            .build()
    }

    /// Attempts and reason for stopping, of each operation made here.
    fn told(&self) -> Vec<(usize, Option<StopReason>)> {
        let told = lock(&self.told);
        told.iter()
            .map(|report| (report.attempts().len(), report.stop()))
            .collect()
    }
}

#[async_trait::async_trait]
impl Middleware for Calls {
    async fn handle(
        &self,
        _: Request,
        extensions: &mut Extensions,
        _: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let handle = ReportHandle::new();
        let request = (self.ask)(&self.client, extensions).with_extension(handle.clone());
        let result = match self.on_a_task_of_its_own {
            true => tokio::spawn(request.send()).await.expect("no panic"),
            false => request.send().await,
        };
        let report = handle.report().expect("every operation is reported");
        lock(&self.told).push(report);
        result
    }
}

/// What came of the outermost operation.
#[derive(Debug)]
struct Came {
    result: Result<Response, Error>,
    report: RetryReport,
}

impl Came {
    /// Status of the answer in hand, reason for stopping, attempts.
    fn told(&self) -> (Option<u16>, Option<StopReason>, usize) {
        (
            support::status(&self.result).map(|status| status.as_u16()),
            self.report.stop(),
            self.report.attempts().len(),
        )
    }
}

async fn send(request: RequestBuilder) -> Came {
    let handle = ReportHandle::new();
    let result = request.with_extension(handle.clone()).send().await;
    let report = handle.report().expect("every operation is reported");
    Came { result, report }
}

const EXHAUSTED: Option<StopReason> = Some(StopReason::AttemptsExhausted);
const NESTED: Option<StopReason> = Some(StopReason::NestedLayer);
const SPENT: Option<StopReason> = Some(StopReason::SpentBelow);

// ---- One client, several layers ----

#[tokio::test(start_paused = true)]
async fn case_49_three_layers_on_one_client_send_as_often_as_one() {
    let server = Server::always(503);
    let client = server.client([thrice(), thrice(), thrice()].map(layer));
    let came = send(client.get(OUTER_URL)).await;
    assert_eq!(server.sends(), 3);
    assert_eq!(came.told(), (Some(503), EXHAUSTED, 3));
    let answer = came.result.expect("an answer");
    assert_eq!(answer.retry_report().expect("a report").attempts().len(), 3);
    let numbers: Vec<_> = server
        .seen()
        .iter()
        .map(|seen| seen.attempt.map(|attempt| attempt.number()))
        .collect();
    assert_eq!(numbers, [Some(1), Some(2), Some(3)]);
}

#[tokio::test(start_paused = true)]
async fn case_49_three_layers_on_one_client_make_one_key_for_all_attempts() {
    let server = Server::script((0..3).map(|_| Step::Fail(read_and_closed())));
    let keyed = || layer(thrice().key_contract(KeyContract::default()));
    let client = server.client([keyed(), keyed(), keyed()]);
    let came = send(client.post(OUTER_URL).body("order")).await;
    assert_eq!((server.sends(), came.told()), (3, (None, EXHAUSTED, 3)));
    let keys: HashSet<_> = server.key_lines().into_iter().collect();
    assert_eq!(keys.len(), 1, "{keys:?}");
}

/// What the inner layers of one client are set to does not matter, and is not paid for.
#[tokio::test(start_paused = true)]
async fn the_outermost_layer_of_a_client_decides_alone() {
    let budget = Arc::new(RetryBudget::fixed(0));
    let load = Arc::new(LoadControl::builder().build().expect("valid"));
    let inner = || {
        thrice()
            .budget(Arc::clone(&budget))
            .load_control(Arc::clone(&load))
    };
    let server = Server::always(503);
    let client = server.client([layer(thrice()), layer(inner())]);
    assert_eq!(
        send(client.get(OUTER_URL)).await.told(),
        (Some(503), EXHAUSTED, 3)
    );
    assert_eq!((server.sends(), load.len()), (3, 0));
    assert_eq!(budget.snapshot().refused(), 0);
    let client = server.client([layer(inner()), layer(thrice())]);
    let exhausted = Some(StopReason::BudgetExhausted);
    assert_eq!(
        send(client.get(OUTER_URL)).await.told(),
        (Some(503), exhausted, 1)
    );
    assert_eq!((server.sends(), load.len()), (4, 1));
}

// ---- Three clients, one within the attempt of another ----

/// Client 1 is answered by a call of client 2, that by one of client 3, that by the server.
fn three_deep(server: &Server) -> (ClientWithMiddleware, Calls, Calls) {
    let third = server.client([layer(thrice())]);
    let innermost = Calls::get(third);
    let second = innermost.under(thrice());
    let middle = Calls::by(second, |client, _| client.get("http://between.test/"));
    (middle.under(thrice()), middle, innermost)
}

#[tokio::test(start_paused = true)]
async fn answers_to_three_clients_deep_are_retried_by_the_outermost_alone() {
    let server = Server::always(503);
    let (client, middle, innermost) = three_deep(&server);
    let came = send(client.get(OUTER_URL)).await;
    assert_eq!(server.sends(), 3);
    assert_eq!(server.starts(), [0, 100, 300]);
    assert_eq!(came.told(), (Some(503), EXHAUSTED, 3));
    assert_eq!(came.report.host(), "gateway.test");
    assert_eq!(middle.told(), [(1, NESTED); 3]);
    assert_eq!(innermost.told(), [(1, NESTED); 3]);
    let answer = came.result.expect("an answer");
    let report = answer.retry_report().expect("a report");
    assert_eq!(
        (report.host(), report.attempts().len()),
        ("gateway.test", 3)
    );
}

#[tokio::test(start_paused = true)]
async fn errors_of_three_clients_deep_are_retried_by_the_outermost_alone() {
    for fault in [refused, read_and_closed] {
        let server = Server::script((0..3).map(|_| Step::Fail(fault())));
        let (client, middle, innermost) = three_deep(&server);
        let came = send(client.get(OUTER_URL)).await;
        assert_eq!(server.starts(), [0, 100, 300]);
        assert_eq!(came.told(), (None, EXHAUSTED, 3));
        assert_eq!(middle.told(), [(1, NESTED); 3]);
        assert_eq!(innermost.told(), [(1, NESTED); 3]);
        let error = came.result.expect_err("no answer");
        let ours = error.retry_error().expect("ours");
        assert_eq!(
            (ours.report().host(), ours.next_step()),
            ("gateway.test", NextStep::TryLater { after: None })
        );
        assert!(error.root().is_some(), "the cause is there to its root");
    }
    let server = Server::script((0..3).map(|_| Step::Refuse(refused())));
    let (client, middle, innermost) = three_deep(&server);
    let came = send(client.get(OUTER_URL)).await;
    assert_eq!((server.sends(), came.told()), (3, (None, EXHAUSTED, 3)));
    assert_eq!(middle.told(), [(1, NESTED); 3]);
    assert_eq!(innermost.told(), [(1, NESTED); 3]);
    assert!(
        came.result
            .expect_err("refused")
            .root()
            .is_some_and(reqwest::Error::is_connect)
    );
}

#[tokio::test(start_paused = true)]
async fn three_clients_deep_a_recovery_is_an_answer_like_any_other() {
    let server = Server::script([
        Step::status(503),
        Step::Fail(read_and_closed()),
        Step::status(200),
    ]);
    let (client, middle, innermost) = three_deep(&server);
    let came = send(client.get(OUTER_URL)).await;
    assert_eq!((server.sends(), came.told()), (3, (Some(200), None, 3)));
    let expected = [(1, NESTED), (1, NESTED), (1, None)];
    assert_eq!(
        (middle.told(), innermost.told()),
        (expected.to_vec(), expected.to_vec())
    );
}

#[tokio::test(start_paused = true)]
async fn an_attempt_timeout_of_a_client_within_is_retried_by_the_outermost_alone() {
    let server = Server::script([Step::Hang, Step::Hang, Step::status(200)]);
    let inner = server.client([layer(thrice().attempt_timeout(ms(50)))]);
    let calls = Calls::get(inner);
    let came = send(calls.under(thrice()).get(OUTER_URL)).await;
    assert_eq!(server.starts(), [0, 150, 400]);
    assert_eq!(came.told(), (Some(200), None, 3));
    assert_eq!(calls.told(), [(1, NESTED), (1, NESTED), (1, None)]);
}

#[tokio::test(start_paused = true)]
async fn what_a_repeat_cannot_change_is_repeated_by_nobody() {
    let server = Server::script([Step::status(404)]);
    let (client, middle, innermost) = three_deep(&server);
    let came = send(client.get(OUTER_URL)).await;
    let not_retryable = Some(StopReason::NotRetryable);
    assert_eq!(
        (server.sends(), came.told()),
        (1, (Some(404), not_retryable, 1))
    );
    assert_eq!(middle.told(), [(1, not_retryable)]);
    assert_eq!(innermost.told(), [(1, not_retryable)]);
}

#[tokio::test(start_paused = true)]
async fn the_outermost_pays_for_all_retries_and_those_within_pay_nothing() {
    let (outer_budget, inner_budget) = (
        Arc::new(RetryBudget::fixed(5)),
        Arc::new(RetryBudget::fixed(5)),
    );
    let server = Server::always(503);
    let inner = server.client([layer(thrice().budget(Arc::clone(&inner_budget)))]);
    let client = Calls::get(inner).under(thrice().budget(Arc::clone(&outer_budget)));
    let _ = send(client.get(OUTER_URL)).await;
    assert_eq!(server.sends(), 3);
    assert_eq!((outer_budget.balance(), inner_budget.balance()), (3.0, 5.0));
}

#[tokio::test(start_paused = true)]
async fn a_client_within_that_is_given_the_same_map_for_another_request_is_refused() {
    struct SameMap(ClientWithMiddleware);

    #[async_trait::async_trait]
    impl Middleware for SameMap {
        async fn handle(
            &self,
            _: Request,
            extensions: &mut Extensions,
            _: Next<'_>,
        ) -> reqwest_middleware::Result<Response> {
            let request = self.0.post(URL).body("order").build()?;
            self.0.execute_with_extensions(request, extensions).await
        }
    }

    let server = Server::always(503);
    let keyed = || layer(thrice().key_contract(KeyContract::default()));
    let client = ClientBuilder::new(plain_http())
        .with(keyed())
        .with(SameMap(server.client([keyed()])))
        .build();
    let came = send(client.get(OUTER_URL)).await;
    assert_eq!(
        (server.sends(), came.told()),
        (0, (None, Some(StopReason::NotRetryable), 1))
    );
}

// ---- What becomes of orders within ----

fn keyed() -> RetryMiddlewareBuilder {
    thrice().key_contract(KeyContract::default())
}

/// How many different orders this server has been given, by key.
fn orders(server: &Server) -> usize {
    let keys = server.key_lines();
    assert!(keys.iter().all(|lines| lines.len() == 1), "{keys:?}");
    keys.into_iter().collect::<HashSet<_>>().len()
}

/// The outermost operation's key is the same for all its attempts, so what is done under it within is
/// the same operation each time.
#[tokio::test(start_paused = true)]
async fn an_order_within_that_is_given_the_outer_key_is_one_order() {
    let under_the_outer_key = |client: &ClientWithMiddleware, extensions: &Extensions| {
        let key: &IdempotencyKey = extensions.get().expect("the outer one");
        client.post(URL).body("order").with_extension(key.clone())
    };
    for steps in [
        [
            Step::Fail(read_and_closed()),
            Step::status(503),
            Step::status(200),
        ],
        [
            Step::status(503),
            Step::Fail(read_and_closed()),
            Step::status(200),
        ],
    ] {
        let server = Server::script(steps);
        let calls = Calls::by(server.client([layer(keyed())]), under_the_outer_key);
        let came = send(calls.under(keyed()).post(OUTER_URL).body("order")).await;
        assert_eq!((server.sends(), came.told()), (3, (Some(200), None, 3)));
        assert_eq!(orders(&server), 1);
        let outer = came.report.key().expect("keyed").as_str().to_owned();
        assert_eq!(server.key_lines()[0], [outer]);
    }
}

#[tokio::test(start_paused = true)]
async fn an_order_within_that_was_never_sent_is_made_anew() {
    let server = Server::script([
        Step::Refuse(refused()),
        Step::Refuse(refused()),
        Step::status(200),
    ]);
    let calls = Calls::order(server.client([layer(keyed())]));
    let came = send(calls.under(thrice()).get(OUTER_URL)).await;
    assert_eq!((server.sends(), came.told()), (3, (Some(200), None, 3)));
    assert_eq!(calls.told(), [(1, NESTED), (1, NESTED), (1, None)]);
    // A new operation each time, with a key of its own.
    assert_eq!(orders(&server), 3);
}

/// An outer layer that runs the layer between again makes it place a new order, under a new key. That
/// must not happen once the first one may have been carried out.
async fn is_one_order(row: &str, fault: impl Fn() -> Step, outer: &str) {
    let server = Server::script([fault(), fault(), fault()]);
    let inner = keyed().attempt_timeout(ms(50));
    let calls = Calls::order(server.client([layer(inner)]));
    let client = calls.under(keyed());
    let request = match outer {
        "GET" => client.get(OUTER_URL),
        _ => client.post(OUTER_URL).body("order"),
    };
    let came = send(request).await;
    assert_eq!(
        orders(&server),
        1,
        "{row} within a {outer}: {:?}",
        calls.told()
    );
    // And whoever has to confirm it finds its key where the operation was made.
    let told = lock(&calls.told);
    let last = told.last().expect("a report");
    let key = last.key().expect("keyed").as_str().to_owned();
    assert_eq!(
        (last.certainty(), &server.key_lines()[0]),
        (Certainty::Unknown, &vec![key]),
        "{came:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn an_order_within_that_broke_off_is_not_made_twice() {
    for outer in ["GET", "POST"] {
        is_one_order("read and closed", || Step::Fail(read_and_closed()), outer).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_order_within_that_timed_out_is_not_made_twice() {
    for outer in ["GET", "POST"] {
        is_one_order("silence", || Step::Hang, outer).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_order_within_that_was_answered_503_is_not_made_twice() {
    for outer in ["GET", "POST"] {
        is_one_order("503", || Step::status(503), outer).await;
    }
}

/// The outer attempt is given up over the order within it, of which then neither answer nor error tells.
#[tokio::test(start_paused = true)]
async fn an_order_within_an_attempt_that_is_given_up_is_not_made_twice() {
    for outer in ["GET", "POST"] {
        let server = Server::script([Step::Hang, Step::Hang, Step::Hang]);
        let calls = Calls::order(server.client([layer(keyed())]));
        let client = calls.under(keyed().attempt_timeout(ms(50)));
        let request = match outer {
            "GET" => client.get(OUTER_URL),
            _ => client.post(OUTER_URL).body("order"),
        };
        let _ = send(request).await;
        assert_eq!(orders(&server), 1, "within a {outer}");
    }
}

/// The order within was carried out, and what came after it failed.
#[tokio::test(start_paused = true)]
async fn an_order_within_that_was_answered_well_is_not_made_twice() {
    /// Orders, then asks another service.
    struct OrdersThenAsks(ClientWithMiddleware, ClientWithMiddleware);

    #[async_trait::async_trait]
    impl Middleware for OrdersThenAsks {
        async fn handle(
            &self,
            _: Request,
            _: &mut Extensions,
            _: Next<'_>,
        ) -> reqwest_middleware::Result<Response> {
            self.0.post(URL).body("order").send().await?;
            self.1.get("http://stock.test/").send().await
        }
    }

    let (shop, stock) = (Server::always(201), Server::always(503));
    let client = ClientBuilder::new(plain_http())
        .with(layer(thrice()))
        .with(OrdersThenAsks(
            shop.client([layer(keyed())]),
            stock.client([layer(thrice())]),
        ))
        .build();
    let _ = send(client.get(OUTER_URL)).await;
    assert_eq!(orders(&shop), 1);
}

#[tokio::test(start_paused = true)]
async fn an_order_within_that_has_no_key_is_not_made_twice() {
    for fault in [
        || Step::Fail(read_and_closed()),
        || Step::status(503),
        || Step::Hang,
    ] {
        let server = Server::script([fault()]);
        let inner = thrice().attempt_timeout(ms(50));
        let calls = Calls::order(server.client([layer(inner)]));
        let came = send(calls.under(thrice()).get(OUTER_URL)).await;
        assert_eq!(server.sends(), 1);
        assert_eq!(calls.told(), [(1, Some(StopReason::UnsafeToRepeat))]);
        // Which of the two reasons it is, is for the caller the same: not again.
        let unsafe_to_repeat = Some(StopReason::UnsafeToRepeat);
        assert!([SPENT, unsafe_to_repeat].contains(&came.report.stop()));
        assert_eq!(came.report.attempts().len(), 1);
    }
}

// ---- Where the outer layer cannot be seen ----

#[tokio::test(start_paused = true)]
async fn a_call_on_a_task_of_its_own_retries_and_the_outer_layer_then_does_not() {
    let server = Server::always(503);
    let calls = Calls::get(server.client([layer(thrice())])).on_a_task_of_its_own();
    let came = send(calls.under(thrice()).get(OUTER_URL)).await;
    assert_eq!(server.sends(), 3);
    assert_eq!(came.told(), (Some(503), SPENT, 1));
    assert_eq!(calls.told(), [(3, EXHAUSTED)]);
}

/// The word that retries are used up is passed on from layer to layer, whichever of them is on a task of
/// its own.
#[tokio::test(start_paused = true)]
async fn retries_that_were_used_up_two_layers_below_are_not_made_again() {
    for (outer_task, inner_task) in [(false, true), (true, true), (true, false)] {
        for fails in [|| Step::status(503), || Step::Fail(read_and_closed())] {
            let server = Server::script((0..9).map(|_| fails()));
            let mut innermost = Calls::get(server.client([layer(thrice())]));
            innermost.on_a_task_of_its_own = inner_task;
            let second = innermost.under(thrice());
            let mut middle = Calls::by(second, |client, _| client.get("http://between.test/"));
            middle.on_a_task_of_its_own = outer_task;
            let came = send(middle.under(thrice()).get(OUTER_URL)).await;
            assert_eq!(
                server.sends(),
                3,
                "tasks of their own: middle {outer_task}, innermost {inner_task}; {:?}, {:?}, {:?}",
                came.told(),
                middle.told(),
                innermost.told()
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_of_a_task_of_its_own_that_was_retried_is_not_retried_again() {
    for fault in [refused, read_and_closed] {
        let server = Server::script((0..3).map(|_| Step::Fail(fault())));
        let calls = Calls::get(server.client([layer(thrice())])).on_a_task_of_its_own();
        let came = send(calls.under(thrice()).get(OUTER_URL)).await;
        assert_eq!((server.sends(), came.told()), (3, (None, SPENT, 1)));
        assert_eq!(calls.told(), [(3, EXHAUSTED)]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_task_of_its_own_that_recovers_is_an_answer_like_any_other() {
    let server = Server::script([503, 503, 200].map(Step::status));
    let calls = Calls::get(server.client([layer(thrice())])).on_a_task_of_its_own();
    let came = send(calls.under(thrice()).get(OUTER_URL)).await;
    assert_eq!((server.sends(), came.told()), (3, (Some(200), None, 1)));
    assert_eq!(calls.told(), [(3, None)]);
}

#[tokio::test(start_paused = true)]
async fn an_order_on_a_task_of_its_own_is_one_order() {
    let server = Server::script((0..3).map(|_| Step::Fail(read_and_closed())));
    let calls = Calls::order(server.client([layer(keyed())])).on_a_task_of_its_own();
    let came = send(calls.under(keyed()).get(OUTER_URL)).await;
    assert_eq!((server.sends(), came.told()), (3, (None, SPENT, 1)));
    assert_eq!(orders(&server), 1);
}

/// One attempt each, so nothing was used up, and yet the outer layer would make another order.
#[tokio::test(start_paused = true)]
async fn an_order_on_a_task_of_its_own_that_was_tried_once_is_one_order_too() {
    for fault in [|| Step::Fail(read_and_closed()), || Step::status(503)] {
        let server = Server::script([fault(), fault(), fault()]);
        let once = keyed().max_attempts(1);
        let calls = Calls::order(server.client([layer(once)])).on_a_task_of_its_own();
        let _ = send(calls.under(keyed()).get(OUTER_URL)).await;
        assert_eq!(orders(&server), 1, "{:?}", calls.told());
    }
}

// ---- Where the outer layer does not retry ----

#[tokio::test(start_paused = true)]
async fn an_outer_layer_that_sends_once_leaves_retries_to_those_within() {
    let once = || thrice().max_attempts(1);
    for (row, outer, request) in [
        ("max_attempts", once(), None),
        ("NoRetry", thrice(), Some(NoRetry)),
    ] {
        let server = Server::always(503);
        let calls = Calls::get(server.client([layer(thrice())]));
        let mut get = calls.under(outer).get(OUTER_URL);
        if let Some(no_retry) = request {
            get = get.with_extension(no_retry);
        }
        let came = send(get).await;
        assert_eq!(server.sends(), 3, "{row}");
        assert_eq!(calls.told(), [(3, EXHAUSTED)], "{row}");
        assert_eq!(came.report.attempts().len(), 1, "{row}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_outermost_that_may_retry_is_the_one_that_does() {
    let server = Server::always(503);
    let innermost = Calls::get(server.client([layer(thrice())]));
    let middle = Calls::by(innermost.under(thrice()), |client, _| {
        client.get("http://between.test/")
    });
    let client = middle.under(thrice().max_attempts(1));
    let came = send(client.get(OUTER_URL)).await;
    assert_eq!((server.sends(), came.report.attempts().len()), (3, 1));
    assert_eq!(middle.told(), [(3, EXHAUSTED)]);
    assert_eq!(innermost.told(), [(1, NESTED); 3]);
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_sent_once_so_those_within_retry() {
    let server = Server::always(503);
    let calls = Calls::get(server.client([layer(thrice())]));
    let stream = reqwest::Body::wrap(http_body_util::Full::new(bytes::Bytes::from_static(
        b"order",
    )));
    let request = calls.under(thrice()).post(OUTER_URL).body(stream);
    let came = send(request.with_extension(key("one"))).await;
    assert_eq!((server.sends(), came.report.attempts().len()), (3, 1));
    assert_eq!(calls.told(), [(3, EXHAUSTED)]);
}

/// Fetches what the request needs before it is sent, through a client that retries.
struct Credentials(ClientWithMiddleware);

#[async_trait::async_trait]
impl Middleware for Credentials {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let credential = self.0.get("http://login.test/token").send().await?;
        if !credential.status().is_success() {
            let message = format!("no credential: {}", credential.status());
            return Err(Error::middleware(std::io::Error::other(message)));
        }
        next.run(request, extensions).await
    }
}

/// A credential is no order, though it is fetched by POST: what was sent with it is repeated as ever.
#[tokio::test(start_paused = true)]
async fn a_post_within_that_went_well_leaves_the_outer_operation_its_retries() {
    struct Login(ClientWithMiddleware);

    #[async_trait::async_trait]
    impl Middleware for Login {
        async fn handle(
            &self,
            request: Request,
            extensions: &mut Extensions,
            next: Next<'_>,
        ) -> reqwest_middleware::Result<Response> {
            self.0.post("http://login.test/token").send().await?;
            next.run(request, extensions).await
        }
    }

    let (login, shop) = (
        Server::always(200),
        Server::script([503, 503, 200].map(Step::status)),
    );
    let client = ClientBuilder::new(plain_http())
        .with(layer(thrice()))
        .with(Login(login.client([layer(thrice())])))
        .with(shop.clone())
        .build();
    let came = send(client.get(OUTER_URL)).await;
    assert_eq!((login.sends(), shop.sends()), (3, 3));
    assert_eq!(came.told(), (Some(200), None, 3));
}

/// An operation that is neither idempotent nor keyed is not repeated after it may have been sent, so
/// leaving retries to it would leave them to nobody.
#[tokio::test(start_paused = true)]
async fn an_order_that_cannot_be_repeated_leaves_retries_to_those_within() {
    let login = Server::script([503, 200].map(Step::status));
    let shop = Server::script([Step::status(201)]);
    let client = ClientBuilder::new(plain_http())
        .with(layer(thrice()))
        .with(Credentials(login.client([layer(thrice())])))
        .with(shop.clone())
        .build();
    let came = send(client.post(OUTER_URL).body("order")).await;
    assert_eq!((login.sends(), shop.sends()), (2, 1), "{:?}", came.told());
    assert_eq!(came.told(), (Some(201), None, 1));
}

// ---- What protects a service within ----

fn guarded(breaker: bool, gates: bool) -> Arc<LoadControl> {
    let control = LoadControl::builder().budget(RetryBudget::fixed(0));
    let control = match breaker {
        false => control,
        true => control.without_budget().breaker(
            CircuitBreaker::builder()
                .consecutive_failures(1)
                .open_for(Backoff::fixed([secs(60)]))
                .gate_first_sends(gates)
                .build()
                .expect("valid"),
        ),
    };
    Arc::new(control.build().expect("valid"))
}

/// The client of this server with this load control alone, no budget of its own in the way.
fn with_load(server: &Server, load: &Arc<LoadControl>) -> ClientWithMiddleware {
    let retry = RetryMiddleware::builder()
        .backoff(Backoff::fixed([ms(100)]))
        .deadline(secs(10))
        .load_control(Arc::clone(load));
    server.client([layer(retry)])
}

/// Has the host's breaker opened, by one failed operation.
async fn opened(server: &Server, load: &Arc<LoadControl>) -> ClientWithMiddleware {
    let client = with_load(server, load);
    let _ = send(client.get(URL).with_extension(NoRetry)).await;
    let now = load.snapshot("orders.test").expect("known");
    assert_eq!(now.breaker().expect("one").state(), BreakerState::Open);
    client
}

#[tokio::test(start_paused = true)]
async fn a_first_send_within_that_a_breaker_refuses_is_not_tried_again() {
    let load = guarded(true, true);
    let server = Server::script([Step::status(503)]);
    let calls = Calls::get(opened(&server, &load).await);
    let came = send(calls.under(thrice()).get(OUTER_URL)).await;
    assert_eq!((server.sends(), came.told()), (1, (None, SPENT, 1)));
    assert_eq!(calls.told(), [(0, Some(StopReason::BreakerOpen))]);
}

#[tokio::test(start_paused = true)]
async fn a_retry_within_that_a_breaker_would_refuse_is_not_made_by_the_outer_layer() {
    let load = guarded(true, false);
    let server = Server::always(503);
    let calls = Calls::get(opened(&server, &load).await);
    let came = send(calls.under(thrice()).get(OUTER_URL)).await;
    assert_eq!(
        server.sends() - 1,
        1,
        "{:?}, within: {:?}",
        came.told(),
        calls.told()
    );
}

#[tokio::test(start_paused = true)]
async fn a_retry_within_that_a_budget_would_refuse_is_not_made_by_the_outer_layer() {
    let load = guarded(false, false);
    let server = Server::always(503);
    let calls = Calls::get(with_load(&server, &load));
    let came = send(calls.under(thrice()).get(OUTER_URL)).await;
    assert_eq!(
        server.sends(),
        1,
        "{:?}, within: {:?}",
        came.told(),
        calls.told()
    );
}

#[tokio::test(start_paused = true)]
async fn a_retry_on_a_task_of_its_own_that_is_refused_is_not_made_by_the_outer_layer() {
    for (breaker, reason) in [
        (true, StopReason::BreakerOpen),
        (false, StopReason::BudgetExhausted),
    ] {
        let load = guarded(breaker, false);
        let server = Server::always(503);
        let client = match breaker {
            true => opened(&server, &load).await,
            false => with_load(&server, &load),
        };
        let before = server.sends();
        let calls = Calls::get(client).on_a_task_of_its_own();
        let came = send(calls.under(thrice()).get(OUTER_URL)).await;
        assert_eq!(server.sends() - before, 1, "{reason}");
        assert_eq!(came.told(), (Some(503), SPENT, 1));
        assert_eq!(calls.told(), [(1, Some(reason))]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_host_within_that_wants_to_be_left_alone_is_left_alone_by_the_outer_layer_too() {
    let load = Arc::new(LoadControl::builder().build().expect("valid"));
    let server = Server::script([
        Step::retry_after(429, "1"),
        Step::status(503),
        Step::status(200),
    ]);
    let client = with_load(&server, &load);
    let _ = send(client.get(URL).with_extension(NoRetry)).await;
    let calls = Calls::get(client);
    let came = send(calls.under(thrice()).get(OUTER_URL)).await;
    assert_eq!(came.told(), (Some(200), None, 2));
    assert_eq!(server.starts(), [0, 0, 1000]);
}

#[tokio::test(start_paused = true)]
async fn first_sends_within_that_wait_keep_the_outer_layers_retries_waiting() {
    let load = LoadControl::builder().pushback(FirstSends::Wait).build();
    let load = Arc::new(load.expect("valid"));
    let server = Server::script([
        Step::retry_after(429, "1"),
        Step::status(503),
        Step::status(200),
    ]);
    let client = with_load(&server, &load);
    let _ = send(client.get(URL).with_extension(NoRetry)).await;
    let came = send(Calls::get(client).under(thrice()).get(OUTER_URL)).await;
    assert_eq!(came.told(), (Some(200), None, 2));
    assert_eq!(server.starts(), [0, 1000, 1100]);
}

/// As a layer does that fetches a credential from the very host that the request goes to.
#[tokio::test(start_paused = true)]
async fn an_operation_within_an_attempt_does_not_wait_for_that_attempts_own_permit() {
    let load = LoadControl::builder().concurrency_limit(1).build();
    let load = Arc::new(load.expect("valid"));
    let server = Server::script([Step::status(200)]);
    let calls = Calls::get(with_load(&server, &load));
    let outer = thrice().load_control(Arc::clone(&load));
    let came = send(calls.under(outer).get(URL)).await;
    assert_eq!(
        (server.starts(), came.told()),
        (vec![0], (Some(200), None, 1)),
        "at {:?}, within: {:?}",
        server.elapsed(),
        calls.told()
    );
}

// ---- The mark is where it belongs, and nowhere else ----

/// Panics on the first request, in the middle of an attempt.
struct PanicsOnce(AtomicBool);

#[async_trait::async_trait]
impl Middleware for PanicsOnce {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        tokio::task::yield_now().await;
        assert!(self.0.swap(true, Ordering::Relaxed), "the first request");
        next.run(request, extensions).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_within_an_attempt_leaves_later_operations_their_retries() {
    let server = Server::script([503, 503, 200, 503, 503, 200].map(Step::status));
    let inner = ClientBuilder::new(plain_http())
        .with(layer(thrice()))
        .with(PanicsOnce(AtomicBool::new(false)))
        .with(server.clone())
        .build();
    let outer = Calls::get(inner.clone()).under(thrice());
    // One thread polls them all.
    let panicked = tokio::spawn(outer.get(OUTER_URL).send()).await;
    assert!(panicked.is_err_and(|error| error.is_panic()));
    assert_eq!(server.sends(), 0);
    for sends in [3, 6] {
        let came = send(inner.get(URL)).await;
        assert_eq!((server.sends(), came.told()), (sends, (Some(200), None, 3)));
    }
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_is_dropped_leaves_later_operations_their_retries() {
    let server = Server::script([
        Step::Hang,
        Step::status(503),
        Step::status(503),
        Step::status(200),
    ]);
    let inner = server.client([layer(thrice())]);
    let outer = Calls::get(inner.clone()).under(thrice());
    let dropped = tokio::time::timeout(ms(10), outer.get(OUTER_URL).send());
    assert!(dropped.await.is_err());
    let came = send(inner.get(URL)).await;
    assert_eq!((server.sends(), came.told()), (4, (Some(200), None, 3)));
}

#[tokio::test(start_paused = true)]
async fn operations_joined_in_one_task_are_not_within_each_other() {
    let slow = |status| Step::after(30, status, &[]);
    let (one, two) = (
        Server::script([slow(503), slow(503), slow(200)]),
        Server::script([slow(503), slow(503), slow(200)]),
    );
    let (first, second) = (one.client([layer(thrice())]), two.client([layer(thrice())]));
    let (first, second) = tokio::join!(send(first.get(URL)), async {
        // Its attempts start while those of the other are in the air.
        tokio::time::sleep(ms(10)).await;
        send(second.get(URL)).await
    });
    assert_eq!(first.told(), (Some(200), None, 3));
    assert_eq!(second.told(), (Some(200), None, 3));
    assert_eq!(one.starts(), [0, 130, 360]);
    assert_eq!(two.starts(), [10, 140, 370]);
}

#[tokio::test(start_paused = true)]
async fn one_after_the_other_in_a_layer_between_all_leave_retries_to_the_outermost() {
    /// Asks twice at the same time and once more, and hands on the last answer.
    struct AsksThrice(ClientWithMiddleware);

    #[async_trait::async_trait]
    impl Middleware for AsksThrice {
        async fn handle(
            &self,
            _: Request,
            _: &mut Extensions,
            _: Next<'_>,
        ) -> reqwest_middleware::Result<Response> {
            let (one, two) = tokio::join!(self.0.get(URL).send(), self.0.get(URL).send());
            one?;
            two?;
            self.0.get(URL).send().await
        }
    }

    let server = Server::always(503);
    let client = ClientBuilder::new(plain_http())
        .with(layer(thrice()))
        .with(AsksThrice(server.client([layer(thrice())])))
        .build();
    let came = send(client.get(OUTER_URL)).await;
    assert_eq!(
        (server.sends(), came.told()),
        (3 * 3, (Some(503), EXHAUSTED, 3))
    );
}

// ---- reqwest-retry above and below ----

/// reqwest-retry with two retries and next to no wait.
fn reqwest_retry()
-> reqwest_retry::RetryTransientMiddleware<reqwest_retry::policies::ExponentialBackoff> {
    let policy = reqwest_retry::policies::ExponentialBackoff::builder()
        .retry_bounds(Duration::from_nanos(1), Duration::from_nanos(2))
        .build_with_max_retries(2);
    reqwest_retry::RetryTransientMiddleware::new_with_policy(policy)
}

fn above(server: &Server, retry: RetryMiddlewareBuilder) -> ClientWithMiddleware {
    ClientBuilder::new(plain_http())
        .with(reqwest_retry())
        .with(layer(retry))
        .with(server.clone())
        .build()
}

fn below(server: &Server, retry: RetryMiddlewareBuilder) -> ClientWithMiddleware {
    ClientBuilder::new(plain_http())
        .with(layer(retry))
        .with(reqwest_retry())
        .with(server.clone())
        .build()
}

#[tokio::test]
async fn case_49_reqwest_retry_above_multiplies_answers_and_not_errors() {
    let quick = || thrice().backoff(Backoff::fixed([Duration::ZERO]));
    let budget = Arc::new(RetryBudget::fixed(100));
    let server = Server::always(503);
    let client = above(&server, quick().budget(Arc::clone(&budget)));
    let answer = client.get(OUTER_URL).send().await.expect("an answer");
    // Ours, three each, as often as it runs us: its first time and two retries.
    assert_eq!(server.sends(), 3 * 3);
    // All of ours are paid for; our report tells of the last run only.
    assert_eq!(budget.balance(), 100.0 - 3.0 * 2.0);
    assert_eq!(answer.retry_report().expect("ours").attempts().len(), 3);

    let server = Server::always(503);
    let request = above(&server, quick()).post(OUTER_URL).body("order");
    let _ = request.with_extension(key("one")).send().await;
    assert_eq!((server.sends(), orders(&server)), (3 * 3, 1));

    let server = Server::always(503);
    let generated = quick().key_contract(KeyContract::default());
    let _ = above(&server, generated)
        .post(OUTER_URL)
        .body("order")
        .send()
        .await;
    assert_eq!((server.sends(), orders(&server)), (3 * 3, 1));

    let server = Server::script((0..3).map(|_| Step::Refuse(refused())));
    let error = above(&server, quick()).get(OUTER_URL).send().await;
    assert_eq!(server.sends(), 3);
    assert!(
        error
            .expect_err("refused")
            .root()
            .is_some_and(reqwest::Error::is_connect)
    );
}

#[tokio::test]
async fn case_49_reqwest_retry_below_multiplies_answers_and_hides_errors() {
    let quick = || thrice().backoff(Backoff::fixed([Duration::ZERO]));
    let budget = Arc::new(RetryBudget::fixed(100));
    let server = Server::always(503);
    let client = below(&server, quick().budget(Arc::clone(&budget)));
    let came = send(client.get(OUTER_URL)).await;
    // Each of our attempts is three of its sends, and only ours are told of and paid for.
    assert_eq!(
        (server.sends(), came.told()),
        (3 * 3, (Some(503), EXHAUSTED, 3))
    );
    assert_eq!(budget.balance(), 100.0 - 2.0);

    // Its errors are another layer's to us: not retried.
    let server = Server::script((0..3).map(|_| Step::Refuse(refused())));
    let came = send(below(&server, quick()).get(OUTER_URL)).await;
    let not_retryable = Some(StopReason::NotRetryable);
    assert_eq!((server.sends(), came.told()), (3, (None, not_retryable, 1)));

    // A body that is watched cannot be copied by it, and nothing is sent at all.
    let server = Server::always(503);
    let order = |retry| below(&server, retry).post(OUTER_URL).body("order");
    let came = send(order(quick()).with_extension(key("one"))).await;
    assert_eq!((server.sends(), came.told()), (0, (None, not_retryable, 1)));
    assert_eq!(came.report.certainty(), Certainty::NotSent);
    let came = send(order(quick().send_tracking(false)).with_extension(key("one"))).await;
    assert_eq!(
        (server.sends(), came.told()),
        (3 * 3, (Some(503), EXHAUSTED, 3))
    );
}

#[tokio::test]
async fn reqwest_retry_on_both_sides_multiplies_twice() {
    let server = Server::always(503);
    let client = ClientBuilder::new(plain_http())
        .with(reqwest_retry())
        .with(layer(thrice().backoff(Backoff::fixed([Duration::ZERO]))))
        .with(reqwest_retry())
        .with(server.clone())
        .build();
    let _ = client.get(OUTER_URL).send().await;
    assert_eq!(server.sends(), 3 * 3 * 3);
}
