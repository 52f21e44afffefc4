//! What each attempt tells the server: how much time is left, which attempt it is, and of how many.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod support;

use std::convert::Infallible;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use http::{Extensions, HeaderName};
use proptest::prelude::{Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest};
use reqwest::{Body, Request, Response};
use reqwest_idempotent_retry::TimeoutHeader::{self, Envoy, Grpc, Millis};
use reqwest_idempotent_retry::ambient::{self, Context};
use reqwest_idempotent_retry::server::ContextLayer;
use reqwest_idempotent_retry::{
    BodyFactory, Certainty, Deadline, NoRetry, RetryErrorExt, RetryMiddlewareBuilder, RetryOverride,
};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Error, Middleware, Next};
use support::{Server, Step, URL, key, lines, lock, ms, plain_builder, plain_http, secs};
use tokio::net::TcpListener;
use tokio::time::{advance, sleep};
use tower::{Layer, ServiceExt, service_fn};

const LEFT: HeaderName = HeaderName::from_static("x-left-ms");
const ATTEMPT: HeaderName = HeaderName::from_static("x-retry-attempt");
const MOST: HeaderName = HeaderName::from_static("x-retry-max");

const DIALECTS: [TimeoutHeader; 3] = [Grpc, Envoy, Millis(LEFT)];

fn telling(header: TimeoutHeader) -> RetryMiddlewareBuilder {
    plain_builder().timeout_header(header)
}

fn client(server: &Server, layer: RetryMiddlewareBuilder) -> ClientWithMiddleware {
    server.client([layer.build().expect("valid")])
}

/// What the server has been told in each request, all lines of it.
fn told(server: &Server, name: &HeaderName) -> Vec<Vec<String>> {
    let seen = server.seen().into_iter();
    seen.map(|seen| lines(&seen.headers, name.as_str()))
        .collect()
}

/// So many milliseconds in each request, and in one line.
fn assert_told(server: &Server, header: &TimeoutHeader, expected: &[u64]) {
    let unit = if *header == Grpc { "m" } else { "" };
    let expected: Vec<_> = expected
        .iter()
        .map(|ms| vec![format!("{ms}{unit}")])
        .collect();
    assert_eq!(told(server, header.name()), expected, "{header:?}");
}

// ---- time ----

#[tokio::test(start_paused = true)]
async fn each_attempt_tells_what_is_left_after_the_wait() {
    for header in DIALECTS {
        let server = Server::always(503);
        let client = client(&server, telling(header.clone()));
        let deadline = Deadline::after(secs(1));
        let _ = client.get(URL).with_extension(deadline).send().await;
        assert_eq!(server.starts(), [0, 100, 300, 700]);
        assert_told(&server, &header, &[1000, 900, 700, 300]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_the_server_asked_for_counts_as_well() {
    for header in DIALECTS {
        let server = Server::script([Step::retry_after(503, "2"), Step::status(200)]);
        let client = client(&server, telling(header.clone()));
        let deadline = Deadline::after(secs(5));
        let _ = client.get(URL).with_extension(deadline).send().await;
        let waited = server.starts()[1];
        assert!(waited >= 2000);
        let left = 5000 - u64::try_from(waited).expect("small");
        assert_told(&server, &header, &[5000, left]);
    }
}

#[tokio::test(start_paused = true)]
async fn an_attempt_timeout_is_told_where_it_is_less_than_the_deadline() {
    for header in DIALECTS {
        let server = Server::script([Step::Hang, Step::Hang]);
        let layer = telling(header.clone()).attempt_timeout(ms(400));
        let deadline = Deadline::after(ms(800));
        let request = client(&server, layer).get(URL).with_extension(deadline);
        let _ = request.send().await;
        assert_eq!(server.starts(), [0, 500]);
        assert_told(&server, &header, &[400, 300]);
    }
}

#[tokio::test(start_paused = true)]
async fn the_reserve_is_not_the_servers_to_use() {
    for header in DIALECTS {
        let server = Server::script([Step::status(503), Step::status(200)]);
        let layer = telling(header.clone()).reserve(ms(200));
        let deadline = Deadline::after(secs(1));
        let request = client(&server, layer).get(URL).with_extension(deadline);
        let _ = request.send().await;
        assert_told(&server, &header, &[800, 700]);
    }
}

#[tokio::test(start_paused = true)]
async fn an_ambient_deadline_is_told_as_any_other() {
    for header in DIALECTS {
        let server = Server::script([Step::status(503), Step::status(200)]);
        let client = client(&server, telling(header.clone()));
        let context = Context::new().deadline_in(ms(600));
        let result = ambient::scope(context, client.get(URL).send()).await;
        assert!(result.is_ok());
        assert_told(&server, &header, &[600, 500]);
    }
}

fn without_limits(header: TimeoutHeader) -> RetryMiddlewareBuilder {
    telling(header).deadline(Duration::MAX)
}

#[tokio::test(start_paused = true)]
async fn without_limits_nothing_is_told() {
    for header in DIALECTS {
        let server = Server::script([Step::status(503), Step::status(200)]);
        let client = client(&server, without_limits(header.clone()));
        client.get(URL).send().await.expect("an answer");
        assert_eq!(told(&server, header.name()), [[""; 0]; 2]);
    }
}

#[tokio::test(start_paused = true)]
async fn without_limits_the_callers_own_header_stays() {
    let server = Server::script([Step::status(503), Step::status(200)]);
    let client = client(&server, without_limits(Grpc));
    let request = client.get(URL).header(Grpc.name(), "5S");
    request.send().await.expect("an answer");
    assert_eq!(told(&server, Grpc.name()), [["5S"], ["5S"]]);
}

#[tokio::test(start_paused = true)]
async fn only_an_attempt_timeout_is_enough_to_tell() {
    for header in DIALECTS {
        let server = Server::script([Step::status(503), Step::status(200)]);
        let layer = without_limits(header.clone()).attempt_timeout(ms(400));
        let request = client(&server, layer).get(URL);
        request.send().await.expect("an answer");
        assert_told(&server, &header, &[400, 400]);
    }
}

#[tokio::test(start_paused = true)]
async fn the_callers_own_lines_are_replaced() {
    for header in DIALECTS {
        let server = Server::script([Step::status(503), Step::status(200)]);
        let client = client(&server, telling(header.clone()));
        let request = client
            .get(URL)
            .header(header.name(), "99999")
            .header(header.name(), "88888")
            .with_extension(Deadline::after(secs(1)));
        request.send().await.expect("an answer");
        assert_told(&server, &header, &[1000, 900]);
    }
}

#[tokio::test(start_paused = true)]
async fn without_the_setting_nothing_is_added() {
    let server = Server::always(200);
    let client = client(&server, plain_builder());
    client.get(URL).send().await.expect("an answer");
    for name in [Grpc.name(), Envoy.name(), &ATTEMPT, &MOST] {
        assert_eq!(told(&server, name), [[""; 0]; 1], "{name}");
    }
}

/// A body that takes its time to be made.
fn made_in<M>(takes: impl Fn() -> M + Send + Sync + 'static) -> BodyFactory
where
    M: Future<Output = ()> + Send + 'static,
{
    let takes = Arc::new(takes);
    BodyFactory::new(move || {
        let takes = Arc::clone(&takes);
        async move {
            takes().await;
            Ok::<_, Infallible>(Body::from("order"))
        }
    })
}

#[tokio::test]
async fn a_body_that_is_made_too_late_is_not_sent() {
    let server = Server::always(200);
    let blocking = || {
        std::thread::sleep(ms(60));
        std::future::ready(())
    };
    let order = client(&server, plain_builder())
        .post(URL)
        .with_extension(Deadline::after(ms(20)))
        .with_extension(made_in(blocking));
    let error = order.send().await.expect_err("too late");
    let error = error.retry_error().expect("ours");
    assert_eq!((error.certainty(), server.sends()), (Certainty::NotSent, 0));
}

#[tokio::test(start_paused = true)]
async fn the_time_to_make_a_body_is_gone_by_then() {
    for header in DIALECTS {
        let server = Server::script([Step::status(503), Step::status(200)]);
        let request = client(&server, telling(header.clone()))
            .post(URL)
            .with_extension(key("order-17"))
            .with_extension(Deadline::after(secs(1)))
            .with_extension(made_in(|| sleep(ms(100))));
        request.send().await.expect("an answer");
        assert_eq!(server.starts(), [100, 300]);
        assert_told(&server, &header, &[900, 700]);
    }
}

#[tokio::test(start_paused = true)]
async fn fractions_of_a_millisecond_are_rounded_down() {
    for header in DIALECTS {
        let server = Server::always(200);
        let client = client(&server, telling(header.clone()));
        for micros in [1900, 1000, 1999, 2000] {
            let deadline = Deadline::after(Duration::from_micros(micros));
            let request = client.get(URL).with_extension(deadline);
            request.send().await.expect("an answer");
        }
        assert_told(&server, &header, &[1, 1, 1, 2]);
    }
}

/// What is told when this is left once the body has been made.
async fn told_of(left: Duration, header: TimeoutHeader) -> String {
    let server = Server::always(200);
    let making = ms(10);
    let request = client(&server, telling(header.clone()))
        .post(URL)
        .with_extension(Deadline::after(making + left))
        .with_extension(made_in(move || advance(making)));
    let answer = request.send().await;
    assert!(answer.is_ok(), "{answer:?}");
    let told = told(&server, header.name());
    told.concat().concat()
}

#[tokio::test(start_paused = true)]
async fn less_than_a_millisecond_is_told_in_microseconds_or_as_nothing() {
    let micros = Duration::from_micros;
    for (left, grpc) in [(999, "999u"), (500, "500u"), (1, "1u")] {
        assert_eq!(told_of(micros(left), Grpc).await, grpc);
        assert_eq!(told_of(micros(left), Envoy).await, "0");
        assert_eq!(told_of(micros(left), Millis(LEFT)).await, "0");
    }
    assert_eq!(told_of(Duration::from_nanos(1999), Grpc).await, "1u");
    assert_eq!(told_of(Duration::from_nanos(999), Grpc).await, "0u");
}

const HOUR: u64 = 3600;

#[tokio::test(start_paused = true)]
async fn a_grpc_timeout_has_eight_digits_however_much_is_left() {
    for (left, expected) in [
        (ms(99_999_999), "99999999m"),
        (ms(100_000_000), "100000S"),
        (secs(27 * HOUR), "97200000m"),
        (secs(28 * HOUR), "100800S"),
        (ms(99_999_999_999), "99999999S"),
        (secs(100_000_000), "1666666M"),
        (secs(99_999_999 * 60 + 59), "99999999M"),
        (secs(100_000_000 * 60), "1666666H"),
        (secs(99_999_999 * HOUR), "99999999H"),
        (secs(100_000_000 * HOUR), "99999999H"),
        (secs(1 << 60), "99999999H"),
    ] {
        assert_eq!(told_of(left, Grpc).await, expected, "{left:?}");
    }
}

fn in_virtual_time<T>(work: impl Future<Output = T>) -> T {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_time().start_paused(true).build();
    runtime.expect("a runtime").block_on(work)
}

/// Value and unit, by the grammar of gRPC and no code of ours.
fn parsed(grpc_timeout: &str) -> (Duration, Duration) {
    let (digits, unit) = grpc_timeout.split_at(grpc_timeout.len() - 1);
    assert!((1..=8).contains(&digits.len()), "{grpc_timeout}");
    let unit = match unit {
        "n" => Duration::from_nanos(1),
        "u" => Duration::from_micros(1),
        "m" => ms(1),
        "S" => secs(1),
        "M" => secs(60),
        "H" => secs(HOUR),
        _ => panic!("no unit: {grpc_timeout}"),
    };
    let count: u32 = digits.parse().expect("digits");
    (unit * count, unit)
}

/// From nanoseconds to millennia, as many of each.
fn spans() -> impl Strategy<Value = Duration> {
    let nanos = any::<u32>().prop_map(|nanos| Duration::from_nanos(nanos.into()));
    let hours = (0..99_999_999_u64).prop_map(|hours| secs(hours * HOUR));
    let days = (0..3_000_000_000_u64).prop_map(Duration::from_micros);
    let years = any::<u32>().prop_map(|seconds| secs(seconds.into()));
    let short = (0..5_000_000_u64).prop_map(Duration::from_nanos);
    let span = prop_oneof![nanos, hours, days, years, short];
    (span, 0..1_000_000_000_u32).prop_map(|(span, more)| match more % 2 {
        0 => span,
        _ => span + Duration::from_nanos(more.into()),
    })
}

proptest! {
    #[test]
    fn a_grpc_timeout_is_never_more_than_what_is_left_and_hardly_less(left in spans()) {
        let told = in_virtual_time(told_of(left, Grpc));
        let (time, unit) = parsed(&told);
        prop_assert!(time <= left, "{} of {:?}", told, left);
        prop_assert!(left - time < unit, "{} of {:?}", told, left);
        // A finer unit than hours is left only where its digits would not do.
        let in_milliseconds = left < ms(100_000_000);
        prop_assert_eq!(unit <= ms(1), in_milliseconds, "{} of {:?}", told, left);
    }

    #[test]
    fn milliseconds_are_never_more_than_what_is_left_and_hardly_less(left in spans()) {
        for header in [Envoy, Millis(LEFT)] {
            let told = in_virtual_time(told_of(left, header));
            let time = ms(told.parse().expect("digits"));
            prop_assert!(time <= left && left - time < ms(1), "{} of {:?}", told, left);
        }
    }

    /// What one end of this crate writes the other one reads.
    #[test]
    fn what_is_told_is_understood(left in spans()) {
        for header in DIALECTS {
            let understood = in_virtual_time(async {
                let told = told_of(left, header.clone()).await;
                let name = header.name().clone();
                let layer = ContextLayer::new().timeout_headers([header]);
                let request = http::Request::builder().header(name, &told);
                let context = handled(&layer, request.body(()).expect("valid")).await;
                (context.time_left().expect("a deadline"), layer.malformed())
            });
            prop_assert!(understood.0 <= left);
            prop_assert_eq!(understood.1, 0);
        }
    }
}

// ---- attempts ----

fn counting() -> RetryMiddlewareBuilder {
    telling(Grpc)
        .attempt_header(ATTEMPT)
        .max_attempts_header(MOST)
}

#[tokio::test(start_paused = true)]
async fn each_attempt_has_its_number_and_the_most_there_may_be() {
    let server = Server::always(503);
    let request = client(&server, counting())
        .get(URL)
        .header(ATTEMPT, "77")
        .header(ATTEMPT, "78")
        .header(MOST, "79");
    let _ = request.send().await;
    assert_eq!(told(&server, &ATTEMPT), [["1"], ["2"], ["3"], ["4"]]);
    assert_eq!(told(&server, &MOST), [["4"]; 4]);
}

#[tokio::test(start_paused = true)]
async fn the_most_is_that_of_the_request() {
    let server = Server::always(503);
    let client = client(&server, counting());
    let twice = RetryOverride::new().max_attempts(2);
    let _ = client.get(URL).with_extension(twice).send().await;
    let _ = client.get(URL).with_extension(NoRetry).send().await;
    assert_eq!(told(&server, &ATTEMPT), [["1"], ["2"], ["1"]]);
    assert_eq!(told(&server, &MOST), [["2"], ["2"], ["1"]]);
}

/// The redirect is followed within the attempt: the same number, and less time.
#[tokio::test(start_paused = true)]
async fn a_followed_307_has_the_number_of_its_attempt_and_its_own_time() {
    let elsewhere = [("location", "/elsewhere")];
    let server = Server::script([
        Step::after(150, 307, &elsewhere),
        Step::status(503),
        Step::after(50, 307, &elsewhere),
        Step::status(201),
    ]);
    let request = client(&server, counting())
        .post(URL)
        .body("order")
        .with_extension(key("order-17"))
        .with_extension(Deadline::after(secs(1)));
    let answer = request.send().await.expect("an answer");
    assert_eq!(answer.status(), 201);
    assert_eq!(server.starts(), [0, 150, 250, 300]);
    assert_eq!(told(&server, &ATTEMPT), [["1"], ["1"], ["2"], ["2"]]);
    assert_eq!(told(&server, &MOST), [["4"]; 4]);
    assert_told(&server, &Grpc, &[1000, 850, 750, 700]);
}

// ---- from hop to hop ----

/// The context that a request is handled in.
async fn handled(layer: &ContextLayer, request: http::Request<()>) -> Context {
    let handler = service_fn(|_| async { Ok::<_, Infallible>(ambient::current()) });
    let answer = layer.layer(handler).oneshot(request).await;
    answer.expect("served").expect("a context")
}

/// A service one hop away: it works 100 ms, then calls the next one, if there is one.
struct Hop {
    layer: ContextLayer,
    next: Option<ClientWithMiddleware>,
    had: Arc<Mutex<Vec<Context>>>,
}

impl Hop {
    /// A client of that service, which tells its time in this dialect.
    fn behind(
        header: &TimeoutHeader,
        next: Option<ClientWithMiddleware>,
        had: &Arc<Mutex<Vec<Context>>>,
    ) -> ClientWithMiddleware {
        let hop = Self {
            layer: ContextLayer::new().timeout_headers([header.clone()]),
            next,
            had: Arc::clone(had),
        };
        let tells = telling(header.clone()).build().expect("valid");
        let client = ClientBuilder::new(plain_http()).with(tells);
        client.with(hop).build()
    }
}

#[async_trait::async_trait]
impl Middleware for Hop {
    async fn handle(
        &self,
        request: Request,
        _: &mut Extensions,
        _: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let mut inbound = http::Request::new(());
        *inbound.headers_mut() = request.headers().clone();
        let (next, had) = (self.next.clone(), Arc::clone(&self.had));
        let handler = service_fn(move |_| {
            let (next, had) = (next.clone(), Arc::clone(&had));
            async move {
                lock(&had).push(ambient::current().expect("a context"));
                sleep(ms(100)).await;
                match next {
                    None => Ok(Response::from(http::Response::new(""))),
                    Some(next) => next.get(URL).send().await,
                }
            }
        });
        // In a task of its own, as in a process of its own.
        let served = tokio::spawn(self.layer.layer(handler).oneshot(inbound));
        served.await.map_err(Error::middleware)?
    }
}

#[tokio::test(start_paused = true)]
async fn the_time_shrinks_from_hop_to_hop_in_every_dialect() {
    let start = tokio::time::Instant::now().into_std();
    for (header, elsewhere) in [(Grpc, Envoy), (Envoy, Millis(LEFT)), (Millis(LEFT), Grpc)] {
        let begun = tokio::time::Instant::now().into_std() - start;
        let had = Arc::default();
        let last = Hop::behind(&elsewhere, None, &had);
        let first = Hop::behind(&header, Some(last), &had);
        let span = Duration::from_micros(1_000_700);
        let request = first.get(URL).with_extension(Deadline::after(span));
        request.send().await.expect("an answer in time");

        let deadlines: Vec<_> = lock(&had)
            .iter()
            .map(|context: &Context| context.deadline().expect("a deadline") - start - begun)
            .collect();
        // Rounded down once, and not again: 1000 ms at the first, 900 ms at the second after 100 ms.
        assert_eq!(deadlines, [secs(1), secs(1)], "{header:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_hop_that_has_no_time_left_is_not_called() {
    let had = Arc::default();
    let last = Hop::behind(&Grpc, None, &had);
    let first = Hop::behind(&Grpc, Some(last), &had);
    // The first hop needs all of it.
    let deadline = Deadline::after(ms(100));
    let result = first.get(URL).with_extension(deadline).send().await;
    assert!(result.is_err());
    sleep(secs(60)).await;
    assert_eq!(lock(&had).len(), 1, "the second hop was never called");
}

/// The same over a real socket: what is left there is at most what the caller had.
#[tokio::test]
async fn over_a_socket_the_server_has_at_most_what_the_caller_had() {
    let left = || async {
        let left = ambient::current().and_then(|context| context.time_left());
        left.map_or(String::new(), |left| left.as_nanos().to_string())
    };
    let layer = ContextLayer::new().timeout_headers(DIALECTS);
    let routes = Router::new().route("/", get(left)).layer(layer.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}/", listener.local_addr().expect("its address"));
    let serving = tokio::spawn(axum::serve(listener, routes).into_future());
    for header in DIALECTS {
        let client = ClientBuilder::new(plain_http())
            .with(without_limits(header).build().expect("valid"))
            .build();
        let deadline = std::time::Instant::now() + secs(60);
        let context = Context::new().deadline_at(deadline);
        let answer = ambient::scope(context, client.get(&url).send()).await;
        let text = answer.expect("an answer").text().await.expect("a text");
        let at_the_server = Duration::from_nanos(text.parse().expect("a time"));
        assert!(at_the_server <= secs(60) && at_the_server > secs(20));
    }
    assert_eq!(layer.malformed(), 0);
    serving.abort();
}
