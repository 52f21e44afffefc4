//! What operations make of the context that they start in.

use std::convert::Infallible;
use std::future::{Future, IntoFuture, pending, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{self, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::Extensions;
use http_body::Frame;
use reqwest::{Body, Request, Response};
use reqwest_idempotent_retry::ambient::{self, Context};
use reqwest_idempotent_retry::{
    BodyFactory, CancellationToken, Certainty, Deadline, IncompleteBody, KeyContract, LoadControl,
    ReportHandle, RetryErrorExt, RetryMiddlewareBuilder, RetryReport, StopReason,
};
use reqwest_middleware::{
    ClientBuilder, ClientWithMiddleware, Error, Middleware, Next, RequestBuilder,
};

use tokio::time::{Instant, Sleep, sleep};

use crate::spawn_from;
use crate::support::{Server, Step, URL, key, ms, plain_builder, plain_http, report, secs, status};

fn client(server: &Server) -> ClientWithMiddleware {
    server.client([plain_builder().build().expect("valid")])
}

/// Sends it in this context.
async fn send_in(context: Context, request: RequestBuilder) -> Result<Response, Error> {
    ambient::scope(context, request.send()).await
}

fn stop(result: &Result<Response, Error>) -> Option<StopReason> {
    report(result).and_then(|report| report.stop())
}

// ---- deadline ----

/// Of the context, of the request, and which of them ends the operation. The client's default is 10 s.
const DEADLINES: [(Option<u64>, Option<u64>, u64); 5] = [
    (Some(300), None, 300),
    (Some(300), Some(500), 300),
    (Some(500), Some(300), 300),
    (Some(20_000), None, 10_000),
    (None, Some(300), 300),
];

fn in_context(deadline: Option<u64>) -> Context {
    match deadline {
        Some(span) => Context::new().deadline_in(ms(span)),
        None => Context::new(),
    }
}

fn with_own(request: RequestBuilder, deadline: Option<u64>) -> RequestBuilder {
    match deadline {
        Some(span) => request.with_extension(Deadline::after(ms(span))),
        None => request,
    }
}

/// The body of a request, which takes a second to come.
struct AfterASecond(Option<Pin<Box<Sleep>>>);

impl http_body::Body for AfterASecond {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut task::Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Some(wait) = &mut self.0 else {
            return Poll::Ready(None);
        };
        ready!(wait.as_mut().poll(context));
        self.0 = None;
        Poll::Ready(Some(Ok(Frame::data(Bytes::from("order")))))
    }
}

#[tokio::test(start_paused = true)]
async fn the_context_is_that_of_the_start_also_where_the_body_is_read_first() {
    let read_first = plain_builder().buffer_request(1000).max_attempts(2);
    for comes_late in [false, true] {
        let server = Server::script([Step::Hang]);
        let client = server.client([read_first.clone().build().expect("valid")]);
        let body = match comes_late {
            false => Body::from("order"),
            true => Body::wrap(AfterASecond(Some(Box::pin(sleep(secs(1)))))),
        };
        let sending = client.put(URL).body(body).send();
        let mut sending = pin!(sending.into_future());
        let started = Instant::now();
        ambient::scope(Context::new().deadline_in(secs(3)), async {
            let begun = poll_fn(|task| Poll::Ready(sending.as_mut().poll(task))).await;
            assert!(begun.is_pending());
        })
        .await;
        let error = sending.await.expect_err("the deadline of the scope");
        assert!(error.retry_error().expect("ours").is_timeout());
        assert_eq!(started.elapsed().as_secs(), 3, "comes late: {comes_late}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_earlier_deadline_limits_an_attempt() {
    for (ambient, own, earlier) in DEADLINES {
        let row = format!("ambient {ambient:?}, own {own:?}");
        let server = Server::script([Step::Hang]);
        let deadline = tokio::time::Instant::now() + ms(earlier);
        let request = with_own(client(&server).get(URL), own);
        let result = send_in(in_context(ambient), request).await;
        assert_eq!(server.elapsed(), ms(earlier), "{row}");
        assert_eq!(stop(&result), Some(StopReason::DeadlineTooClose), "{row}");
        let report = report(&result).expect("a report");
        assert_eq!(report.attempts()[0].limit(), Some(ms(earlier)), "{row}");
        let told = server.seen()[0].deadline;
        assert_eq!(told, Some(Deadline::at(deadline.into_std())), "{row}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_earlier_deadline_ends_the_retries() {
    for (ambient, own) in [(Some(350), Some(5000)), (Some(5000), Some(350))] {
        let server = Server::always(503);
        let request = with_own(client(&server).get(URL), own);
        let result = send_in(in_context(ambient), request).await;
        assert_eq!(server.starts(), [0, 100, 300]);
        assert_eq!(stop(&result), Some(StopReason::DeadlineTooClose));
    }
}

#[tokio::test(start_paused = true)]
async fn the_earlier_deadline_ends_the_body() {
    for (ambient, own) in [(Some(350), Some(5000)), (Some(5000), Some(350))] {
        let server = Server::script([Step::Stall(200)]);
        let request = with_own(client(&server).get(URL), own);
        let answer = send_in(in_context(ambient), request).await.expect("a head");
        // Read outside of the scope, and still by its deadline.
        let error = answer.bytes().await.expect_err("no body by then");
        assert!(incomplete(&error).is_some(), "{error:?}");
        assert_eq!(server.elapsed(), ms(350));
    }
}

fn incomplete(error: &reqwest::Error) -> Option<&IncompleteBody> {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        cause = error.source();
    }
    None
}

#[tokio::test(start_paused = true)]
async fn calls_one_after_the_other_share_what_is_left() {
    let server = Server::script([
        Step::after(200, 200, &[]),
        Step::after(200, 200, &[]),
        Step::Hang,
    ]);
    let client = client(&server);
    // It knows nothing of deadlines.
    let handler = async {
        for _ in 0..2 {
            client.get(URL).send().await.expect("in time");
        }
        client.get(URL).send().await
    };
    let result = ambient::scope(Context::new().deadline_in(ms(500)), handler).await;
    assert_eq!(stop(&result), Some(StopReason::DeadlineTooClose));
    assert_eq!(server.elapsed(), ms(500));
}

#[tokio::test(start_paused = true)]
async fn parallel_and_spawned_calls_end_by_the_same_deadline() {
    let server = Server::script([Step::Hang, Step::Hang, Step::Hang]);
    let client = client(&server);
    let handler = async {
        let spawned = ambient::spawn(client.get(URL).send());
        let parallel = tokio::join!(client.get(URL).send(), client.get(URL).send());
        [parallel.0, parallel.1, spawned.await.expect("no panic")]
    };
    let results = ambient::scope(Context::new().deadline_in(ms(500)), handler).await;
    assert_eq!(server.elapsed(), ms(500));
    for result in &results {
        assert_eq!(stop(result), Some(StopReason::DeadlineTooClose));
    }
}

#[tokio::test(start_paused = true)]
async fn a_deadline_that_has_passed_sends_nothing() {
    let passed = tokio::time::Instant::now().into_std();
    tokio::time::sleep(ms(1)).await;
    let server = Server::always(200);
    for context in [
        Context::new().deadline_at(passed),
        Context::new().deadline_in(ms(0)),
    ] {
        let request = client(&server).post(URL).with_extension(key("order-17"));
        let error = send_in(context, request).await.expect_err("too late");
        let error = error.retry_error().expect("ours");
        assert_eq!(error.stop(), StopReason::DeadlineTooClose);
        assert_eq!(error.certainty(), Certainty::NotSent);
        assert_eq!(error.key(), Some(&key("order-17")));
        assert!(error.report().attempts().is_empty());
    }
    assert_eq!(server.sends(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_reserve_is_kept_free_before_the_ambient_deadline() {
    let server = Server::script([Step::Hang]);
    let layer = plain_builder().reserve(ms(100)).build().expect("valid");
    let context = Context::new().deadline_in(ms(500));
    let result = send_in(context, server.client([layer]).get(URL)).await;
    assert_eq!(stop(&result), Some(StopReason::DeadlineTooClose));
    assert_eq!(server.elapsed(), ms(400));
}

// ---- token ----

/// Where an operation waits when it is cancelled, and what is true then.
struct Place {
    name: &'static str,
    steps: fn() -> Vec<Step>,
    body: fn(RequestBuilder) -> RequestBuilder,
    at: Duration,
    sends: usize,
    certainty: Certainty,
}

fn places() -> [Place; 4] {
    let of_bytes = |request: RequestBuilder| request.body("order");
    let never_made = |request: RequestBuilder| {
        let body = BodyFactory::new(pending::<Result<reqwest::Body, std::io::Error>>);
        request.with_extension(body)
    };
    [
        Place {
            name: "while a body is made",
            steps: Vec::new,
            body: never_made,
            at: ms(50),
            sends: 0,
            certainty: Certainty::NotSent,
        },
        Place {
            name: "in an attempt",
            steps: || vec![Step::Hang],
            body: of_bytes,
            at: ms(50),
            sends: 1,
            certainty: Certainty::Unknown,
        },
        Place {
            name: "in a wait",
            steps: || vec![Step::status(503)],
            body: of_bytes,
            at: ms(50),
            sends: 1,
            certainty: Certainty::Unknown,
        },
        Place {
            name: "in the second attempt",
            steps: || vec![Step::status(503), Step::Hang],
            body: of_bytes,
            at: ms(150),
            sends: 2,
            certainty: Certainty::Unknown,
        },
    ]
}

/// The ambient token and the request's own: whichever is cancelled ends the operation.
#[derive(Clone, Copy, Debug)]
enum Cancelled {
    Ambient,
    Own,
}

async fn cancels(
    which: Cancelled,
    at: Duration,
    request: RequestBuilder,
) -> Result<Response, Error> {
    let [ambient, own] = [CancellationToken::new(), CancellationToken::new()];
    let context = Context::new().cancelled_by(ambient.clone());
    let request = request.with_extension(own.clone());
    let sending = tokio::spawn(ambient::scope(context, request.send()));
    tokio::time::sleep(at).await;
    match which {
        Cancelled::Ambient => ambient.cancel(),
        Cancelled::Own => own.cancel(),
    }
    sending.await.expect("no panic")
}

fn assert_cancelled(result: &Result<Response, Error>, row: &str) -> RetryReport {
    let report = report(result).expect("a report");
    assert_eq!(report.stop(), Some(StopReason::Cancelled), "{row}");
    assert_eq!(report.key(), Some(&key("order-17")), "{row}");
    report
}

#[tokio::test(start_paused = true)]
async fn either_token_ends_an_operation_wherever_it_waits() {
    for which in [Cancelled::Ambient, Cancelled::Own] {
        for place in places() {
            let row = format!("{which:?} {}", place.name);
            let server = Server::script((place.steps)());
            let request = client(&server).post(URL).with_extension(key("order-17"));
            let result = cancels(which, place.at, (place.body)(request)).await;
            assert_eq!(server.elapsed(), place.at, "{row}");
            let report = assert_cancelled(&result, &row);
            assert_eq!(report.certainty(), place.certainty, "{row}");
            tokio::time::sleep(secs(60)).await;
            assert_eq!(server.sends(), place.sends, "nothing later: {row}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn either_token_ends_the_wait_for_a_permit() {
    for which in [Cancelled::Ambient, Cancelled::Own] {
        let row = format!("{which:?}");
        let load = LoadControl::builder().concurrency_limit(1).build();
        let load = Arc::new(load.expect("valid"));
        let server = Server::script([Step::Hang]);
        let layer = plain_builder().load_control(Arc::clone(&load));
        let client = server.client([layer.build().expect("valid")]);
        let holds_the_permit = tokio::spawn(client.get(URL).send());
        tokio::time::sleep(ms(10)).await;

        let request = client.post(URL).with_extension(key("order-17"));
        let result = cancels(which, ms(50), request).await;
        let report = assert_cancelled(&result, &row);
        assert_eq!(report.certainty(), Certainty::NotSent, "{row}");
        assert_eq!((server.elapsed(), server.sends()), (ms(60), 1), "{row}");
        let in_line = load.snapshots()[0].waiting();
        assert_eq!(in_line, Some(0), "its place is free again: {row}");
        holds_the_permit.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn a_token_cancelled_before_sends_nothing() {
    let token = CancellationToken::new();
    token.cancel();
    let server = Server::always(200);
    let request = client(&server).post(URL).with_extension(key("order-17"));
    let result = send_in(Context::new().cancelled_by(token), request).await;
    let report = assert_cancelled(&result, "before");
    assert_eq!(report.certainty(), Certainty::NotSent);
    assert!(report.attempts().is_empty(), "not even begun");
    assert_eq!(server.sends(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_token_ends_spawned_calls_as_well() {
    let token = CancellationToken::new();
    let server = Server::script([Step::Hang]);
    let request = client(&server).post(URL).with_extension(key("order-17"));
    let context = Context::new().cancelled_by(token.clone());
    let task = spawn_from(context, request.send()).await;
    tokio::time::sleep(ms(50)).await;
    token.cancel();
    let report = assert_cancelled(&task.await.expect("no panic"), "spawned");
    assert_eq!(report.certainty(), Certainty::Unknown);
    assert_eq!(server.elapsed(), ms(50));
}

#[tokio::test(start_paused = true)]
async fn a_scope_that_is_dropped_ends_its_operations_and_tells_how() {
    let server = Server::script([Step::Hang]);
    let handle = ReportHandle::new();
    let request = client(&server).post(URL).with_extension(key("order-17"));
    let request = request.with_extension(handle.clone());
    let sending = send_in(Context::new().deadline_in(secs(5)), request);
    let dropped = tokio::time::timeout(ms(50), sending).await;
    assert!(dropped.is_err());
    let report = handle.report().expect("a report is left behind");
    assert_eq!(report.stop(), Some(StopReason::Cancelled));
    assert_eq!(report.certainty(), Certainty::Unknown);
    assert!(ambient::current().is_none());
}

// ---- depth ----

#[tokio::test(start_paused = true)]
async fn what_is_repeated_around_is_sent_once() {
    for (layers, sends, why) in [
        (0, 4, StopReason::AttemptsExhausted),
        (1, 1, StopReason::NestedLayer),
        (7, 1, StopReason::NestedLayer),
    ] {
        let server = Server::always(503);
        let request = client(&server).get(URL);
        let result = send_in(Context::new().retried_by(layers), request).await;
        assert_eq!(server.sends(), sends, "{layers} layers");
        assert_eq!(stop(&result), Some(why), "{layers} layers");
        assert_eq!(status(&result).map(|status| status.as_u16()), Some(503));
    }
}

/// A layer that answers by a call of its own, made in a task, and hands on nothing of its answer.
struct CallsInATask {
    inner: ClientWithMiddleware,
    by: Spawn,
}

#[derive(Clone, Copy, Debug)]
enum Spawn {
    Ours,
    Tokio,
}

#[async_trait::async_trait]
impl Middleware for CallsInATask {
    async fn handle(
        &self,
        _: Request,
        _: &mut Extensions,
        _: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let call = self.inner.get(URL).send();
        let answer = match self.by {
            Spawn::Ours => ambient::spawn(call).await,
            Spawn::Tokio => tokio::spawn(call).await,
        };
        let answer = answer.map_err(Error::middleware)??;
        let bare = http::Response::builder().status(answer.status()).body("");
        Ok(Response::from(bare.map_err(Error::middleware)?))
    }
}

async fn sends_of_nested_operations(by: Spawn, context: Option<Context>) -> usize {
    let server = Server::always(503);
    let three = || plain_builder().max_attempts(3).build().expect("valid");
    let calls = CallsInATask {
        inner: server.client([three()]),
        by,
    };
    let outer = ClientBuilder::new(plain_http()).with(three()).with(calls);
    let call = outer.build().get(URL).send();
    let result = match context {
        Some(context) => ambient::scope(context, call).await,
        None => call.await,
    };
    assert_eq!(status(&result).map(|status| status.as_u16()), Some(503));
    server.sends()
}

#[tokio::test(start_paused = true)]
async fn a_task_of_ours_within_an_attempt_leaves_retries_to_the_operation_around() {
    for context in [
        None,
        Some(Context::new()),
        Some(Context::new().retried_by(0)),
    ] {
        assert_eq!(sends_of_nested_operations(Spawn::Ours, context).await, 3);
    }
    let repeated_before = Some(Context::new().retried_by(1));
    assert_eq!(
        sends_of_nested_operations(Spawn::Ours, repeated_before).await,
        1
    );
}

#[tokio::test(start_paused = true)]
async fn a_task_of_tokio_within_an_attempt_retries_by_itself() {
    assert_eq!(sends_of_nested_operations(Spawn::Tokio, None).await, 9);
}

#[tokio::test(start_paused = true)]
async fn the_depth_counts_the_attempts_around() {
    struct LooksAround;
    #[async_trait::async_trait]
    impl Middleware for LooksAround {
        async fn handle(
            &self,
            request: Request,
            extensions: &mut Extensions,
            next: Next<'_>,
        ) -> reqwest_middleware::Result<Response> {
            let here = ambient::current().expect("an attempt is around");
            assert_eq!((here.retry_depth(), here.attempt()), (1, Some(3)));
            next.run(request, extensions).await
        }
    }
    let server = Server::always(200);
    let client = ClientBuilder::new(plain_http())
        .with(plain_builder().build().expect("valid"))
        .with(LooksAround)
        .with(server.clone())
        .build();
    let context = Context::new().inbound_attempt(3);
    send_in(context, client.get(URL)).await.expect("an answer");
    assert_eq!(server.sends(), 1);
}

// ---- one map of extensions, more than one context ----

fn order(client: &ClientWithMiddleware, body: &'static str) -> Request {
    client.post(URL).body(body).build().expect("valid")
}

/// Without a deadline of its own, which would be bound to a request by itself.
fn timeless() -> RetryMiddlewareBuilder {
    plain_builder().deadline(Duration::MAX)
}

fn timeless_client(server: &Server) -> ClientWithMiddleware {
    server.client([timeless().build().expect("valid")])
}

fn keyed_client(server: &Server) -> ClientWithMiddleware {
    let layer = timeless().key_contract(KeyContract::default());
    server.client([layer.build().expect("valid")])
}

async fn sends_with<'m>(
    client: &'m ClientWithMiddleware,
    body: &'static str,
    map: &'m mut Extensions,
) -> Result<Response, Error> {
    client
        .execute_with_extensions(order(client, body), map)
        .await
}

#[tokio::test(start_paused = true)]
async fn an_ambient_deadline_stays_in_its_scope_when_the_map_goes_on() {
    let server = Server::always(200);
    let client = timeless_client(&server);
    let mut map = Extensions::new();
    let first = Context::new().deadline_in(secs(1));
    ambient::scope(first, sends_with(&client, "one", &mut map))
        .await
        .expect("sent");
    tokio::time::sleep(secs(2)).await;

    let later = Context::new().deadline_in(secs(5));
    for (body, context) in [("two", Some(later)), ("three", None)] {
        let sending = sends_with(&client, body, &mut map);
        let result = match context {
            Some(context) => ambient::scope(context, sending).await,
            None => sending.await,
        };
        assert_eq!(
            crate::support::status(&result).map(|status| status.as_u16()),
            Some(200)
        );
    }
    assert_eq!(server.sends(), 3);
}

#[tokio::test(start_paused = true)]
async fn the_same_request_goes_on_under_its_key_and_the_deadline_of_its_scope() {
    let server = Server::script([Step::status(200), Step::Hang]);
    let client = keyed_client(&server);
    let mut map = Extensions::new();
    let first = Context::new().deadline_in(secs(1));
    ambient::scope(first, sends_with(&client, "one", &mut map))
        .await
        .expect("sent");

    let later = Context::new().deadline_in(secs(5));
    let result = ambient::scope(later, sends_with(&client, "one", &mut map)).await;
    assert_eq!(stop(&result), Some(StopReason::DeadlineTooClose));
    assert_eq!(server.elapsed(), secs(5));
    let keys: Vec<_> = server.seen().into_iter().map(|seen| seen.key).collect();
    assert!(keys[0].is_some() && keys[0] == keys[1], "{keys:?}");
}

#[tokio::test(start_paused = true)]
async fn a_later_context_can_only_shorten_it() {
    let server = Server::script([Step::status(200), Step::Hang]);
    let client = keyed_client(&server);
    let mut map = Extensions::new();
    for span in [secs(5), secs(1)] {
        let context = Context::new().deadline_in(span);
        let _ = ambient::scope(context, sends_with(&client, "one", &mut map)).await;
    }
    assert_eq!(server.elapsed(), secs(1));
}

/// A deadline of the caller's own is plain data, which may be in as many requests as the caller likes.
#[tokio::test(start_paused = true)]
async fn a_map_with_an_earlier_deadline_of_the_callers_own_may_be_used_again() {
    let server = Server::always(200);
    let client = timeless_client(&server);
    let mut map = Extensions::new();
    let own = tokio::time::Instant::now() + secs(1);
    map.insert(Deadline::at(own.into_std()));
    for body in ["one", "other"] {
        let context = Context::new().deadline_in(secs(5));
        ambient::scope(context, sends_with(&client, body, &mut map))
            .await
            .expect("sent");
    }
    assert_eq!(server.sends(), 2);
}

/// Runs the whole thing on threads, in real time: the context reaches the layer wherever it is polled.
#[test]
fn operations_find_their_own_context_on_any_thread() {
    crate::on_each_runtime(|| async {
        let server = Server::always(503);
        let client = server.client([plain_builder().build().expect("valid")]);
        let in_turn = (0..50).map(|number: u32| {
            let (client, layers) = (client.clone(), number % 2);
            let repeated = layers > 0;
            let span = if repeated { secs(5) } else { ms(50) };
            let context = Context::new().retried_by(layers).deadline_in(span);
            tokio::spawn(ambient::scope(context, async move {
                tokio::task::yield_now().await;
                let result = client.get(URL).send().await;
                let expected = match repeated {
                    true => StopReason::NestedLayer,
                    // The first wait, of 100 ms, does not fit.
                    false => StopReason::DeadlineTooClose,
                };
                (stop(&result), expected)
            }))
        });
        let tasks: Vec<_> = in_turn.collect();
        for task in tasks {
            let (stop, expected) = task.await.expect("no panic");
            assert_eq!(stop, Some(expected));
        }
        assert_eq!(server.sends(), 50);
    });
}

#[test]
fn a_scope_is_send_where_its_work_is() {
    fn assert_send(_: impl Send) {}
    assert_send(ambient::scope(Context::new(), async {}));
}
