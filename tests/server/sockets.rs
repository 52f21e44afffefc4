//! On real sockets, with axum: contexts of requests at once, and clients that go away.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::routing::get;
use http::HeaderName;
use reqwest_idempotent_retry::ambient::{self, Context};
use reqwest_idempotent_retry::server::ContextLayer;
use reqwest_idempotent_retry::{
    Backoff, CancellationToken, ReportHandle, RetryErrorExt, StopReason, TimeoutHeader,
};
use reqwest_middleware::ClientWithMiddleware;
use tokio::sync::{Barrier, mpsc, oneshot};
use tokio::task::JoinSet;

use crate::App;
use crate::net::call::{over, retry};
use crate::net::{Act, Rest, Wire, answer, patiently, settle};
use crate::support::{plain_http, secs};

const LEFT: HeaderName = HeaderName::from_static("x-left-ms");
const ATTEMPT: HeaderName = HeaderName::from_static("x-retry-attempt");

/// How long a busy machine may take between a header and its handler.
const SLACK: Duration = secs(30);

fn layer() -> ContextLayer {
    let plain = TimeoutHeader::Millis(LEFT);
    ContextLayer::new()
        .timeout_headers([TimeoutHeader::Grpc, TimeoutHeader::Envoy, plain])
        .attempt_header(ATTEMPT)
}

fn here() -> Context {
    ambient::current().expect("a context")
}

/// A handler's side of a test: tells what it sees.
type Tell<T> = mpsc::UnboundedSender<T>;

async fn tells_its_context(State(tell): State<Tell<Context>>) {
    tell.send(here()).expect("the test listens");
}

fn assert_about(left: Option<Duration>, told: Duration) {
    let left = left.expect("a deadline");
    assert!(
        left <= told && left > told.saturating_sub(SLACK),
        "{left:?} of {told:?}"
    );
}

#[tokio::test]
async fn each_dialect_reaches_the_handler() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let routes = Router::new().route("/", get(tells_its_context));
    let layer = layer();
    let app = App::serve(routes.with_state(tell).layer(layer.clone())).await;
    for (name, value) in [
        ("grpc-timeout", "100S"),
        ("grpc-timeout", "100000m"),
        ("x-envoy-expected-rq-timeout-ms", "100000"),
        ("x-left-ms", "100000"),
    ] {
        let request = plain_http().get(app.url("/")).header(name, value);
        let request = request.header(ATTEMPT, "2");
        assert_eq!(request.send().await.expect("an answer").status(), 200);
        let context = told.recv().await.expect("told");
        assert_about(context.time_left(), secs(100));
        assert_eq!(context.attempt(), Some(2));
    }
    assert_eq!(layer.malformed(), 0);
}

#[tokio::test]
async fn a_malformed_header_is_no_reason_to_refuse_a_request() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let routes = Router::new().route("/", get(tells_its_context));
    let layer = layer();
    let app = App::serve(routes.with_state(tell).layer(layer.clone())).await;
    let values: [&[u8]; 5] = [b"", b"+5m", b"123456789m", b"soon", b"5\xff"];
    for value in values {
        let request = plain_http().get(app.url("/"));
        let answer = request.header("grpc-timeout", value).send().await;
        assert_eq!(answer.expect("an answer").status(), 200);
        let context = told.recv().await.expect("told");
        assert_eq!(context.deadline(), None, "{value:?}");
    }
    assert_eq!(layer.malformed(), 5);
}

// ---- what the handler calls ----

/// What a handler works with.
#[derive(Clone)]
struct Desk {
    client: ClientWithMiddleware,
    upstream: String,
    tell: Tell<CancellationToken>,
    spawned: ReportHandle,
}

impl Desk {
    fn tells_its_token(&self) {
        let token = here().cancellation().expect("a token").clone();
        self.tell.send(token).expect("the test listens");
    }

    /// Calls the upstream in a task of its own.
    fn spawns_a_call(&self) {
        let request = self.client.get(&self.upstream);
        let call = request.with_extension(self.spawned.clone()).send();
        ambient::spawn(call);
    }
}

/// A service with one handler, which calls the upstream.
struct Setting {
    app: App,
    tokens: mpsc::UnboundedReceiver<CancellationToken>,
    spawned: ReportHandle,
}

impl Setting {
    async fn new<H, T>(upstream: &Wire, handler: H) -> Self
    where
        H: axum::handler::Handler<T, Desk>,
        T: 'static,
    {
        let (tell, tokens) = mpsc::unbounded_channel();
        let patient = retry().backoff(Backoff::fixed([secs(3600)]));
        let desk = Desk {
            client: over(plain_http(), patient),
            upstream: upstream.url("/"),
            tell,
            spawned: ReportHandle::new(),
        };
        let spawned = desk.spawned.clone();
        let routes = Router::new().route("/", get(handler)).with_state(desk);
        Self {
            app: App::serve(routes.layer(layer())).await,
            tokens,
            spawned,
        }
    }

    /// A request that is given up, and its connection closed, when the upstream has seen so much.
    async fn client_leaves_when(&mut self, upstream: &Wire, calls: usize) -> CancellationToken {
        let http = plain_http();
        let request = tokio::spawn(http.get(self.app.url("/")).send());
        upstream.saw(calls).await;
        let token = self.tokens.recv().await.expect("told");
        assert!(!token.is_cancelled(), "the client still waits");
        request.abort();
        drop(http);
        patiently("the token to be cancelled", token.cancelled()).await;
        token
    }
}

async fn reported(handle: &ReportHandle) -> Option<StopReason> {
    patiently("a report", async {
        while handle.report().is_none() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    handle.report().and_then(|report| report.stop())
}

#[tokio::test]
async fn no_time_left_sends_nothing() {
    async fn calls(State(desk): State<Desk>) -> String {
        let result = desk.client.get(&desk.upstream).send().await;
        let error = result.expect_err("no time");
        error.retry_error().expect("ours").stop().to_string()
    }
    let upstream = Wire::script([answer(200)]).await;
    let setting = Setting::new(&upstream, calls).await;
    for (name, value) in [("grpc-timeout", "0m"), ("x-left-ms", "0")] {
        let request = plain_http().get(setting.app.url("/")).header(name, value);
        let answer = request.send().await.expect("an answer");
        assert_eq!(answer.text().await.expect("a text"), "deadline too close");
    }
    assert_eq!(upstream.connections(), 0);
}

#[tokio::test]
async fn a_call_ends_by_the_time_that_the_client_gives() {
    async fn calls(State(desk): State<Desk>) -> String {
        let result = desk.client.get(&desk.upstream).send().await;
        let error = result.expect_err("no answer in time");
        let report = error.retry_error().expect("ours").report();
        let limit = report.attempts()[0].limit().expect("a limit");
        assert!(limit <= Duration::from_millis(300), "{limit:?}");
        report.stop().expect("a reason").to_string()
    }
    let upstream = Wire::script([Act::Hang]).await;
    let setting = Setting::new(&upstream, calls).await;
    let request = plain_http().get(setting.app.url("/"));
    let answer = patiently("an answer", request.header(LEFT, "300").send()).await;
    let text = answer.expect("an answer").text().await.expect("a text");
    assert_eq!(text, "deadline too close");
}

#[tokio::test]
async fn a_client_that_goes_away_ends_the_calls_of_its_handler() {
    async fn calls(State(desk): State<Desk>) {
        desk.tells_its_token();
        desk.spawns_a_call();
        let _ = desk.client.get(&desk.upstream).send().await;
    }
    let upstream = Wire::script([Act::Hang]).await;
    let mut setting = Setting::new(&upstream, calls).await;
    setting.client_leaves_when(&upstream, 2).await;
    let gone = |wire: &Wire| {
        let log = wire.log().into_iter();
        let gone = log.filter(|event| matches!(event, crate::net::Event::Gone(_)));
        gone.count() == 2
    };
    upstream.until("both calls to end", gone).await;
    let stop = reported(&setting.spawned).await;
    assert_eq!(stop, Some(StopReason::Cancelled));
    settle().await;
    assert_eq!(upstream.requests().len(), 2, "and none is sent later");
}

#[tokio::test]
async fn a_client_that_goes_away_ends_the_wait_before_a_retry() {
    async fn calls(State(desk): State<Desk>) {
        desk.tells_its_token();
        desk.spawns_a_call();
        pending::<()>().await;
    }
    let upstream = Wire::script([answer(503)]).await;
    let mut setting = Setting::new(&upstream, calls).await;
    setting.client_leaves_when(&upstream, 1).await;
    // The wait is an hour.
    let stop = reported(&setting.spawned).await;
    assert_eq!(stop, Some(StopReason::Cancelled));
    assert_eq!(upstream.requests().len(), 1);
}

#[tokio::test]
async fn a_handler_that_has_ended_leaves_its_tasks_alone() {
    async fn calls(State(desk): State<Desk>) -> &'static str {
        desk.tells_its_token();
        desk.spawns_a_call();
        "done"
    }
    let rest = Rest {
        text: "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        ..Rest::default()
    };
    let release = Arc::clone(&rest.release);
    let upstream = Wire::script([Act::SayAndStall("", rest)]).await;
    let mut setting = Setting::new(&upstream, calls).await;
    let http = plain_http();
    let answer = http.get(setting.app.url("/")).send().await;
    assert_eq!(
        answer.expect("a head").text().await.expect("a text"),
        "done"
    );
    drop(http);

    upstream.saw(1).await;
    let token = setting.tokens.recv().await.expect("told");
    settle().await;
    assert!(!token.is_cancelled());
    assert!(setting.spawned.report().is_none(), "it still goes on");
    release.notify_one();
    assert_eq!(reported(&setting.spawned).await, None, "answered");
    assert!(!token.is_cancelled());
}

#[tokio::test]
async fn a_handler_that_panics_ends_its_tasks_and_leaves_nothing_to_the_next_request() {
    async fn panics_if_told_to(State(desk): State<Desk>, headers: HeaderMap) -> String {
        desk.tells_its_token();
        if headers.contains_key(LEFT) {
            std::panic::resume_unwind(Box::new("without a message on the terminal"));
        }
        format!("{:?}", here().deadline())
    }
    let upstream = Wire::script([answer(200)]).await;
    let mut setting = Setting::new(&upstream, panics_if_told_to).await;
    let (http, url) = (plain_http(), setting.app.url("/"));
    for _ in 0..3 {
        let broken = http.get(&url).header(LEFT, "100000").send().await;
        assert!(broken.is_err(), "the connection breaks off");
        let token = setting.tokens.recv().await.expect("told");
        patiently("the token to be cancelled", token.cancelled()).await;

        assert!(ambient::current().is_none(), "on this thread");
        let answer = http.get(&url).send().await.expect("an answer");
        assert_eq!(answer.text().await.expect("a text"), "None");
        let token = setting.tokens.recv().await.expect("told");
        assert!(!token.is_cancelled());
    }
}

// ---- many at once ----

const AT_ONCE: u32 = 100;

/// Each waits until all are there, and then looks at its own.
async fn a_hundred_at_once_do_not_mix() {
    async fn waits_and_tells(State(all_here): State<Arc<Barrier>>) -> String {
        all_here.wait().await;
        let in_a_task = ambient::spawn(async { here() });
        tokio::task::yield_now().await;
        let (context, in_a_task) = (here(), in_a_task.await.expect("no panic"));
        assert_eq!(context.deadline(), in_a_task.deadline());
        let left = context.time_left().expect("a deadline").as_millis();
        format!("{} {left}", context.attempt().expect("an attempt"))
    }
    let all_here = Arc::new(Barrier::new(AT_ONCE as usize));
    let routes = Router::new().route("/", get(waits_and_tells));
    let app = App::serve(routes.with_state(all_here).layer(layer())).await;
    let mut requests = JoinSet::new();
    let http = plain_http();
    for number in 1..=AT_ONCE {
        let told = SLACK * (number + 1);
        let request = http
            .get(app.url("/"))
            .header(ATTEMPT, number.to_string())
            .header(LEFT, told.as_millis().to_string());
        requests.spawn(async move {
            let answer = patiently("an answer", request.send()).await;
            let text = answer.expect("an answer").text().await.expect("a text");
            let (attempt, left) = text.split_once(' ').expect("two numbers");
            assert_eq!(attempt, number.to_string());
            let left = Duration::from_millis(left.parse().expect("a number"));
            assert_about(Some(left), told);
        });
    }
    requests.join_all().await;
}

#[tokio::test]
async fn a_hundred_requests_at_once_do_not_mix_on_one_thread() {
    a_hundred_at_once_do_not_mix().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_hundred_requests_at_once_do_not_mix_on_four_threads() {
    a_hundred_at_once_do_not_mix().await;
}

/// Reading a body is up to the client: what was spawned goes on, and the token stays as it is.
#[tokio::test]
async fn a_client_that_goes_away_while_the_body_is_streamed_cancels_nothing() {
    struct NeverEnds(Option<oneshot::Sender<()>>);
    impl http_body::Body for NeverEnds {
        type Data = bytes::Bytes;
        type Error = std::convert::Infallible;
        fn poll_frame(
            self: std::pin::Pin<&mut Self>,
            _: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Result<http_body::Frame<Self::Data>, Self::Error>>> {
            std::task::Poll::Pending
        }
    }
    impl Drop for NeverEnds {
        fn drop(&mut self) {
            let _ = self.0.take().map(|gone| gone.send(()));
        }
    }
    type Told = (CancellationToken, oneshot::Receiver<()>);
    async fn streams(State(tell): State<Tell<Told>>) -> axum::body::Body {
        let (gone, is_gone) = oneshot::channel();
        let token = here().cancellation().expect("a token").clone();
        tell.send((token, is_gone)).expect("the test listens");
        axum::body::Body::new(NeverEnds(Some(gone)))
    }
    let (tell, mut told) = mpsc::unbounded_channel();
    let routes = Router::new().route("/", get(streams)).with_state(tell);
    let app = App::serve(routes.layer(layer())).await;
    let http = plain_http();
    let answer = http.get(app.url("/")).send().await.expect("a head");
    let (token, is_gone) = told.recv().await.expect("told");
    drop((answer, http));
    let gone = patiently("the body to be dropped", is_gone).await;
    gone.expect("told by its drop");
    assert!(!token.is_cancelled());
}
