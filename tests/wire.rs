//! The layer over real sockets: first what the server saw, then what the caller is told.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod net;
mod support;

use std::error::Error as StdError;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use http::{Extensions, HeaderValue, StatusCode};
use http_body_util::BodyExt;
use net::call::{
    ATTEMPTS, Call, Http, KEY, LIMIT, ORDER, Told, never_sent_if_tracked, over, retry, send,
};
use net::{
    Act, ClosedPort, Event, Rest, Seen, StalledDns, Wire, answer, patiently, redirect, settle,
};
use reqwest::{Body, Request, Response};
use reqwest_idempotent_retry::{
    Backoff, Certainty, Deadline, DeadlineScope, Failure, NextStep, ReportHandle, RetryErrorExt,
    RetryMiddlewareBuilder, RetryResponseExt, StopReason,
};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Error, Middleware, Next};
use support::{lines, ms, plain_http, plain_http_builder, secs};

// ---- Faults of the connection ----

#[tokio::test]
async fn case_52_a_closed_port_is_never_sent() {
    for call in Call::ALL {
        let port = ClosedPort::new();
        let client = over(plain_http(), retry());
        let outcome = send(call.to(&client, &port.url("/orders"))).await;
        assert_eq!(
            outcome.told(),
            call.gives_up(Certainty::NotSent),
            "{call:?}"
        );
        let error = outcome.error().retry_error().expect("ours");
        assert!(error.is_connect() && !error.is_timeout(), "{call:?}");
    }
}

#[tokio::test]
async fn a_name_that_does_not_resolve_in_time_is_never_sent() {
    for call in Call::ALL {
        let dns = StalledDns::default();
        let http = plain_http_builder().dns_resolver(Arc::new(dns.clone()));
        let client = over(
            http.build().expect("a client"),
            retry().attempt_timeout(LIMIT),
        );
        let outcome = send(call.to(&client, "http://stalled.test/orders")).await;
        assert_eq!(dns.asked(), ATTEMPTS, "{call:?}");
        let expected = call.gives_up(never_sent_if_tracked(call));
        assert_eq!(outcome.told(), expected, "{call:?}");
        let error = outcome.error().retry_error().expect("ours");
        assert!(error.is_timeout(), "{call:?}");
    }
}

#[tokio::test]
async fn a_silent_tls_peer_is_never_sent_anything() {
    for call in Call::ALL {
        let peer = Wire::script([Act::Mute]).await;
        let client = over(plain_http(), retry().attempt_timeout(LIMIT));
        let outcome = send(call.to(&client, &peer.https("/orders"))).await;
        assert_eq!(peer.connections(), ATTEMPTS, "{call:?}");
        assert_eq!(peer.requests().len(), 0, "{call:?}");
        let expected = call.gives_up(never_sent_if_tracked(call));
        assert_eq!(outcome.told(), expected, "{call:?}");
    }
}

#[tokio::test]
async fn a_connect_timeout_of_the_client_is_never_sent() {
    for call in Call::ALL {
        let peer = Wire::script([Act::Mute]).await;
        for url in [&*peer.https("/orders"), "http://stalled.test/orders"] {
            let row = format!("{call:?} {url}");
            let http = plain_http_builder()
                .connect_timeout(ms(100))
                .dns_resolver(Arc::new(StalledDns::default()));
            let client = over(http.build().expect("a client"), retry());
            let outcome = send(call.to(&client, url)).await;
            assert_eq!(outcome.told(), call.gives_up(Certainty::NotSent), "{row}");
            let error = outcome.error().retry_error().expect("ours");
            assert!(error.is_connect() && error.is_timeout(), "{row}");
        }
        assert_eq!(peer.connections(), ATTEMPTS, "{call:?}");
        assert_eq!(peer.requests().len(), 0, "{call:?}");
    }
}

/// The same with and without bytes to send: what is tracked is not the bytes.
#[tokio::test]
async fn a_post_that_gets_no_connection_is_never_sent_with_or_without_a_body() {
    for (row, body) in [("bytes", Some(ORDER)), ("empty", Some("")), ("none", None)] {
        let dns = StalledDns::default();
        let http = plain_http_builder().dns_resolver(Arc::new(dns.clone()));
        let client = over(
            http.build().expect("a client"),
            retry().attempt_timeout(ms(100)),
        );
        let mut request = client.post("http://stalled.test/orders");
        if let Some(body) = body {
            request = request.body(body);
        }
        let outcome = send(request).await;
        assert_eq!(dns.asked(), ATTEMPTS, "{row}");
        assert_eq!(
            outcome.told(),
            Call::Post.gives_up(Certainty::NotSent),
            "{row}"
        );
    }
}

/// The server has read the whole request, so it may have carried it out, whatever it does then.
async fn may_have_been_carried_out(act: Act) {
    for call in Call::ALL {
        let row = format!("{call:?} {act:?}");
        let server = Wire::script([act.clone()]).await;
        let client = over(plain_http(), retry().attempt_timeout(LIMIT));
        let outcome = send(call.to(&client, &server.url("/orders"))).await;
        let expected = call.gives_up(Certainty::Unknown);
        let seen = server.saw(expected.attempts).await;
        assert_eq!(seen.len(), expected.attempts, "requests of: {row}");
        call.check_all_arrived(&seen, &row);
        assert_eq!(outcome.told(), expected, "{row}");
        let is_timeout = matches!(act, Act::Hang);
        let error = outcome.error().retry_error().expect("ours");
        assert_eq!(error.is_timeout(), is_timeout, "{row}");
        assert!(!error.is_connect(), "{row}");
    }
}

#[tokio::test]
async fn case_52_read_and_closed_is_unknown() {
    may_have_been_carried_out(Act::Close).await;
}

#[tokio::test]
async fn case_52_read_and_reset_is_unknown() {
    may_have_been_carried_out(Act::Reset).await;
}

#[tokio::test]
async fn case_52_read_and_never_answered_is_unknown() {
    may_have_been_carried_out(Act::Hang).await;
}

#[tokio::test]
async fn case_52_half_a_head_is_unknown() {
    may_have_been_carried_out(Act::SayAndClose("HTTP/1.1 20")).await;
}

#[tokio::test]
async fn case_52_what_is_not_http_is_unknown() {
    may_have_been_carried_out(Act::SayAndClose("SSH-2.0-OpenSSH_9.9\r\n")).await;
}

/// Whether the close is noticed before the request is written is a race that nobody can decide.
/// Either way the answer must be true.
#[tokio::test]
async fn case_52_closed_without_reading_is_repeated_only_where_nothing_was_written() {
    for call in Call::ALL {
        let server = Wire::script([Act::CloseUnread]).await;
        let client = over(plain_http(), retry());
        let outcome = send(call.to(&client, &server.url("/orders"))).await;
        let attempts = outcome.report.attempts();
        assert_eq!(server.requests().len(), 0, "{call:?}");
        assert_eq!(server.connections(), attempts.len(), "{call:?}");
        let unsent = attempts
            .iter()
            .take_while(|attempt| attempt.certainty() == Certainty::NotSent)
            .count();
        let expected = if unsent == attempts.len() {
            call.gives_up(Certainty::NotSent)
        } else if call == Call::Post {
            let stop = Some(StopReason::UnsafeToRepeat);
            call.ends(unsent + 1, stop, Certainty::Unknown)
        } else {
            call.gives_up(Certainty::Unknown)
        };
        assert_eq!(outcome.told(), expected, "{call:?}");
    }
}

#[tokio::test]
async fn a_cut_body_is_an_answer_and_not_retried() {
    for call in Call::ALL {
        let cut = Act::SayAndClose("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc");
        let server = Wire::script([cut]).await;
        let client = over(plain_http(), retry());
        let outcome = send(call.to(&client, &server.url("/orders"))).await;
        assert_eq!(outcome.told(), call.is_done(1), "{call:?}");
        let response = outcome.response();
        assert_eq!(response.status(), 200, "{call:?}");
        assert_eq!(response.idempotency_key(), call.key().as_ref(), "{call:?}");
        let error = response.bytes().await.expect_err("seven bytes are missing");
        assert!(error.is_decode() && !error.is_timeout(), "{call:?}");
        let seen = server.saw(1).await;
        assert_eq!(seen.len(), 1, "{call:?}");
        call.check_all_arrived(&seen, "cut body");
    }
}

/// hyper never polls an empty body: that it was sent shows only in `is_end_stream`.
#[tokio::test]
async fn an_empty_post_that_the_server_has_read_is_never_called_unsent() {
    for (row, body) in [("empty", Some("")), ("none", None)] {
        for http in Http::BOTH {
            let row = format!("{row}, {http:?}");
            let server = Wire::script([Act::Hang]).await;
            let client = http.client(retry().attempt_timeout(LIMIT));
            let mut request = client.post(server.url("/orders"));
            if let Some(body) = body {
                request = request.body(body);
            }
            let outcome = send(request).await;
            let seen = server.saw(1).await;
            assert_eq!(seen.len(), 1, "{row}");
            assert_eq!(seen[0].body, "", "{row}");
            let expected = Call::Post.gives_up(Certainty::Unknown);
            assert_eq!(outcome.told(), expected, "{row}");
        }
    }
}

/// A connection's task may take a request out of its queue at the very moment at which the caller
/// gives it up, and may still send it. So what is in its hands cannot be called unsent, even if it
/// is discarded in the end, as it is here.
#[test]
fn a_request_in_the_hands_of_a_connection_is_never_called_unsent() {
    let connections = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime");
    let client = over(plain_http(), retry());
    let server = connections.block_on(Wire::script([answer(200)]));
    let get_hello = || {
        let outcome = connections.block_on(send(client.get(server.url("/hello"))));
        assert_eq!(outcome.status(), Some(StatusCode::OK));
    };
    get_hello();
    let settled = connections.block_on(connections.spawn(settle()));
    settled.expect("the connection is idle");

    let handle = ReportHandle::new();
    let (blocked, is_blocked) = mpsc::channel();
    let (unblock, is_unblocked) = mpsc::channel::<()>();
    connections.spawn(async move {
        blocked.send(()).expect("the test waits");
        let _ = is_unblocked.recv();
    });
    is_blocked.recv().expect("the worker is at it");
    {
        let _context = connections.enter();
        let request = Call::Post.to(&client, &server.url("/orders"));
        let mut sending = pin!(request.with_extension(handle.clone()).send());
        let poll = sending
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()));
        assert!(poll.is_pending());
    }
    drop(unblock);

    get_hello();
    let seen = connections.block_on(server.saw(2));
    let lines: Vec<_> = seen.iter().map(Seen::line).collect();
    assert_eq!(lines, ["GET /hello", "GET /hello"]);
    let told = Told::from(&handle.report().expect("it was dropped"));
    let stop = Some(StopReason::Cancelled);
    assert_eq!(told, Call::Post.ends(1, stop, Certainty::Unknown));
}

#[tokio::test]
async fn case_32_a_connection_that_was_used_before_closes_under_the_second_request() {
    for call in Call::ALL {
        let ok = || Act::from(answer(200));
        let server = Wire::script([ok(), Act::Close, ok()]).await;
        let client = over(plain_http(), retry());
        let first = send(client.get(server.url("/hello"))).await.response();
        first.bytes().await.expect("a body");
        settle().await;
        let outcome = send(call.to(&client, &server.url("/orders"))).await;

        let (sends, expected) = match call {
            Call::Post => (1, call.gives_up(Certainty::Unknown)),
            Call::Get | Call::KeyedPost => (2, call.is_done(2)),
        };
        let seen = server.saw(1 + sends).await;
        let connections: Vec<_> = seen.iter().map(|seen| seen.connection).collect();
        assert_eq!(connections, [0, 0, 1][..1 + sends], "{call:?}");
        call.check_all_arrived(&seen[1..], "used connection");
        assert_eq!(outcome.told(), expected, "{call:?}");
        let status = (call != Call::Post).then_some(StatusCode::OK);
        assert_eq!(outcome.status(), status, "{call:?}");
    }
}

// ---- POST, redirected to a GET ----

/// What becomes of the GET that follows a POST answered with 303.
#[derive(Clone, Copy, Debug, PartialEq)]
enum SecondHop {
    /// At the same origin, which has stopped listening.
    PortNowClosed,
    OtherPortClosed,
    StalledName,
    SamePlace(u16),
    BadScheme,
}

impl SecondHop {
    fn leaves_origin(self) -> bool {
        !matches!(self, Self::PortNowClosed | Self::SamePlace(_))
    }

    /// On a client that follows it.
    fn told(self, call: Call) -> Told {
        match self {
            // The second attempt finds the port closed as well, but the first has been carried out.
            Self::PortNowClosed | Self::OtherPortClosed | Self::StalledName => {
                call.gives_up(Certainty::Unknown)
            }
            Self::SamePlace(503) => call.gives_up(Certainty::Unknown),
            Self::SamePlace(_) | Self::BadScheme => {
                call.ends(1, Some(StopReason::NotRetryable), Certainty::Unknown)
            }
        }
    }

    /// How often the POST arrives.
    fn posts(self, call: Call) -> usize {
        match self {
            Self::PortNowClosed => 1,
            _ => self.told(call).attempts,
        }
    }

    fn status(self) -> Option<u16> {
        match self {
            Self::SamePlace(status) => Some(status),
            _ => None,
        }
    }
}

async fn an_order_answered_303(hop: SecondHop) {
    for http in Http::BOTH {
        for call in Call::POSTS {
            let row = format!("{hop:?}, {http:?}, {call:?}");
            let closed = ClosedPort::new();
            let location = match hop {
                SecondHop::PortNowClosed | SecondHop::SamePlace(_) => "/receipt".to_owned(),
                SecondHop::OtherPortClosed => closed.url("/receipt"),
                SecondHop::StalledName => "http://stalled.test/receipt".to_owned(),
                SecondHop::BadScheme => "foo://x".to_owned(),
            };
            let server = Wire::routes(move |seen| match (&*seen.line(), hop) {
                ("POST /orders", SecondHop::PortNowClosed) => {
                    redirect(303, &location).farewell().into()
                }
                ("POST /orders", _) => redirect(303, &location).into(),
                ("GET /receipt", SecondHop::SamePlace(status)) => answer(status).into(),
                (line, _) => panic!("nobody asked for {line}"),
            })
            .await;
            let builder = http.builder().dns_resolver(Arc::new(StalledDns::default()));
            let retry = retry()
                .attempt_timeout(LIMIT)
                .client_is_prepared(http == Http::Prepared);
            let client = over(builder.build().expect("a client"), retry);
            let outcome = send(call.to(&client, &server.url("/orders"))).await;

            let is_handed_on = http == Http::Prepared && hop.leaves_origin();
            let (told, posts, status) = if is_handed_on {
                (call.is_done(1), 1, Some(303))
            } else {
                (hop.told(call), hop.posts(call), hop.status())
            };
            let seen = server.saw(posts).await;
            let seen: Vec<_> = seen
                .into_iter()
                .filter(|seen| seen.method == "POST")
                .collect();
            assert_eq!(seen.len(), posts, "posts of: {row}");
            call.check_all_arrived(&seen, &row);
            assert_eq!(server.orders(), 1, "orders of: {row}");
            let seen_status = outcome.status().map(|status| status.as_u16());
            assert_eq!(seen_status, status, "status of: {row}");
            assert_eq!(outcome.told(), told, "{row}");
        }
    }
}

#[tokio::test]
async fn an_order_answered_303_to_the_same_origin_that_is_gone() {
    an_order_answered_303(SecondHop::PortNowClosed).await;
}

#[tokio::test]
async fn an_order_answered_303_to_a_closed_port() {
    an_order_answered_303(SecondHop::OtherPortClosed).await;
}

#[tokio::test]
async fn an_order_answered_303_to_a_name_that_does_not_resolve() {
    an_order_answered_303(SecondHop::StalledName).await;
}

#[tokio::test]
async fn an_order_answered_303_to_a_503() {
    an_order_answered_303(SecondHop::SamePlace(503)).await;
}

#[tokio::test]
async fn an_order_answered_303_to_a_404() {
    an_order_answered_303(SecondHop::SamePlace(404)).await;
}

#[tokio::test]
async fn an_order_answered_303_to_a_scheme_that_is_not_http() {
    an_order_answered_303(SecondHop::BadScheme).await;
}

/// An answer that would allow an unkeyed POST to be repeated, were it not the answer to a GET.
#[tokio::test]
async fn a_refusal_at_the_same_url_after_a_303_is_not_the_orders() {
    for status in [503, 425] {
        let server = Wire::routes(move |seen| match &*seen.line() {
            "POST /orders" => redirect(303, "/orders").into(),
            _ => answer(status).into(),
        })
        .await;
        let client = Http::Prepared.client(retry().refused_before_work([unavailable()]));
        let outcome = send(Call::Post.to(&client, &server.url("/orders"))).await;
        let seen = server.saw(2).await;
        let lines: Vec<_> = seen.iter().map(Seen::line).collect();
        assert_eq!(lines, ["POST /orders", "GET /orders"], "{status}");
        assert_eq!(server.orders(), 1, "{status}");
        let expected = Call::Post.gives_up(Certainty::Unknown);
        assert_eq!(outcome.told(), expected, "{status}");
    }
}

#[tokio::test]
async fn a_refusal_of_the_order_itself_is_believed_on_a_prepared_client_only() {
    let rows = [
        (Http::Prepared, 503, 2),
        (Http::Prepared, 425, 2),
        (Http::Unprepared, 425, 1),
    ];
    for (http, status, sends) in rows {
        let row = format!("{http:?}, {status}");
        let server = Wire::script([answer(status), answer(200)]).await;
        let declared = (http == Http::Prepared).then(unavailable);
        let client = http.client(retry().refused_before_work(declared));
        let outcome = send(Call::Post.to(&client, &server.url("/orders"))).await;
        assert_eq!(server.saw(sends).await.len(), sends, "{row}");
        let expected = match sends {
            1 => Call::Post.gives_up(Certainty::Unknown),
            _ => Call::Post.is_done(2),
        };
        assert_eq!(outcome.told(), expected, "{row}");
    }
}

fn unavailable() -> StatusCode {
    StatusCode::SERVICE_UNAVAILABLE
}

#[tokio::test]
async fn statuses_that_refuse_an_order_need_a_prepared_client() {
    let error = retry()
        .refused_before_work([unavailable()])
        .build()
        .expect_err("a redirect could hide whose answer it is");
    assert!(error.to_string().contains("client_is_prepared"), "{error}");
}

// ---- Redirects that keep method and body ----

/// reqwest cannot repeat a tracked body, so an attempt that meets such a redirect is sent once more.
#[tokio::test]
async fn a_redirect_that_keeps_the_body_is_followed_within_the_attempt() {
    for http in Http::BOTH {
        for call in Call::POSTS {
            for status in [307, 308] {
                let row = format!("{status}, {http:?}, {call:?}");
                let server = Wire::routes(move |seen| match &*seen.path {
                    "/orders" => redirect(status, "/v2/orders").into(),
                    _ => answer(201).into(),
                })
                .await;
                let client = http.client(retry());
                let outcome = send(call.to(&client, &server.url("/orders"))).await;
                let seen = server.saw(3).await;
                let paths: Vec<_> = seen.iter().map(|seen| &*seen.path).collect();
                assert_eq!(paths, ["/orders", "/orders", "/v2/orders"], "{row}");
                call.check_all_arrived(&seen, &row);
                assert_eq!(outcome.told(), call.is_done(1), "{row}");
                let response = outcome.response();
                assert_eq!(response.status(), 201, "{row}");
                assert_eq!(response.url().path(), "/v2/orders", "{row}");
                assert!(response.retry_report().is_none(), "{row}");
            }
        }
    }
}

#[tokio::test]
async fn a_put_that_has_moved_takes_its_body_along() {
    for http in Http::BOTH {
        for status in [301, 302] {
            let row = format!("{status}, {http:?}");
            let server = Wire::routes(move |seen| match &*seen.path {
                "/orders/17" => redirect(status, "/v2/orders/17").into(),
                _ => answer(204).into(),
            })
            .await;
            let client = http.client(retry());
            let outcome = send(client.put(server.url("/orders/17")).body(ORDER)).await;
            let seen = server.saw(3).await;
            let lines: Vec<_> = seen.iter().map(Seen::line).collect();
            let old = "PUT /orders/17";
            assert_eq!(lines, [old, old, "PUT /v2/orders/17"], "{row}");
            assert!(seen.iter().all(|seen| seen.body == ORDER), "{row}");
            assert_eq!(outcome.told(), Call::Post.is_done(1), "{row}");
            assert_eq!(outcome.status(), Some(StatusCode::NO_CONTENT), "{row}");
        }
    }
}

#[tokio::test]
async fn a_prepared_client_carries_no_order_to_another_origin() {
    for call in Call::POSTS {
        let other = Wire::script([answer(201)]).await;
        let away = redirect(307, other.url("/orders")).body("moved");
        let server = Wire::script([away]).await;
        let client = Http::Prepared.client(retry());
        let outcome = send(call.to(&client, &server.url("/orders"))).await;
        assert_eq!(server.saw(1).await.len(), 1, "{call:?}");
        assert_eq!(other.connections(), 0, "{call:?}");
        // It was not made here, and is to be made elsewhere.
        let expected = Told {
            next: NextStep::FixRequest,
            ..call.is_done(1)
        };
        assert_eq!(outcome.told(), expected, "{call:?}");
        let response = outcome.response();
        assert_eq!(response.status(), 307, "{call:?}");
        let location = response.headers().get("location").cloned();
        let expected = HeaderValue::try_from(other.url("/orders")).expect("a value");
        assert_eq!(location, Some(expected), "{call:?}");
        assert_eq!(response.bytes().await.expect("a body"), "moved", "{call:?}");
    }
}

/// What reqwest does by itself: credentials stay behind, the key goes along.
#[tokio::test]
async fn an_unprepared_client_carries_an_order_and_its_key_to_another_origin() {
    for call in Call::POSTS {
        let other = Wire::script([answer(201)]).await;
        let server = Wire::script([redirect(307, other.url("/orders"))]).await;
        let client = Http::Unprepared.client(retry());
        let request = call
            .to(&client, &server.url("/orders"))
            .bearer_auth("secret");
        let outcome = send(request.header("x-tenant", "blue")).await;

        let at_home = server.saw(2).await;
        assert_eq!(at_home.len(), 2, "{call:?}");
        call.check_all_arrived(&at_home, "at home");
        for seen in &at_home {
            assert_eq!(lines(&seen.headers, "authorization"), ["Bearer secret"]);
        }
        let away = other.saw(1).await;
        assert_eq!(away.len(), 1, "{call:?}");
        call.check_all_arrived(&away, "away");
        assert_eq!(lines(&away[0].headers, "x-tenant"), ["blue"], "{call:?}");
        assert!(!away[0].headers.contains_key("authorization"), "{call:?}");
        assert_eq!(outcome.told(), call.is_done(1), "{call:?}");
    }
}

#[tokio::test]
async fn case_24_a_retry_starts_at_the_original_url_with_the_same_key() {
    for http in Http::BOTH {
        let moved = || Act::from(redirect(307, "/v2/orders"));
        let acts = [moved(), moved(), Act::Close, answer(200).into()];
        let server = Wire::script(acts).await;
        let client = http.client(retry());
        let outcome = send(Call::KeyedPost.to(&client, &server.url("/orders"))).await;
        let seen = server.saw(4).await;
        let paths: Vec<_> = seen.iter().map(|seen| &*seen.path).collect();
        let expected = ["/orders", "/orders", "/v2/orders", "/orders"];
        assert_eq!(paths, expected, "{http:?}");
        Call::KeyedPost.check_all_arrived(&seen, "redirected and repeated");
        assert_eq!(outcome.told(), Call::KeyedPost.is_done(2), "{http:?}");
    }
}

// ---- Layers below ----

fn over_layer(retry: RetryMiddlewareBuilder, layer: impl Middleware) -> ClientWithMiddleware {
    ClientBuilder::new(plain_http())
        .with(retry.build().expect("valid settings"))
        .with(layer)
        .build()
}

/// Sends another body than the one it was given, and does not read that.
#[derive(Clone, Copy, Debug)]
enum Replaces {
    /// The old body is dropped at once.
    Body,
    /// The old body is kept until the end.
    BodyKeepingTheOld,
    /// A request made anew, while the old one is kept until the end.
    WholeRequest,
}

#[async_trait::async_trait]
impl Middleware for Replaces {
    async fn handle(
        &self,
        mut request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let body = Body::from("replaced");
        match self {
            Self::Body => {
                *request.body_mut() = Some(body);
                next.run(request, extensions).await
            }
            Self::BodyKeepingTheOld => {
                let _old = request.body_mut().replace(body);
                next.run(request, extensions).await
            }
            Self::WholeRequest => {
                let mut anew = Request::new(request.method().clone(), request.url().clone());
                *anew.headers_mut() = request.headers().clone();
                *anew.body_mut() = Some(body);
                next.run(anew, extensions).await
            }
        }
    }
}

async fn a_layer_sends_another_body(layer: Replaces) {
    for act in [Act::Hang, Act::Close] {
        let row = format!("{layer:?}, {act:?}");
        let server = Wire::script([act]).await;
        let client = over_layer(retry().attempt_timeout(LIMIT), layer);
        let outcome = send(Call::Post.to(&client, &server.url("/orders"))).await;
        let seen = server.saw(1).await;
        assert_eq!(seen.len(), 1, "{row}");
        assert_eq!(seen[0].body, "replaced", "{row}");
        let expected = Call::Post.gives_up(Certainty::Unknown);
        assert_eq!(outcome.told(), expected, "{row}");
    }
}

#[tokio::test]
async fn a_layer_that_sends_another_body_is_not_taken_for_one_that_sent_nothing() {
    a_layer_sends_another_body(Replaces::Body).await;
}

#[tokio::test]
async fn a_layer_that_sends_another_body_and_keeps_the_old_is_not_either() {
    a_layer_sends_another_body(Replaces::BodyKeepingTheOld).await;
}

#[tokio::test]
async fn a_layer_that_makes_the_request_anew_is_not_either() {
    a_layer_sends_another_body(Replaces::WholeRequest).await;
}

/// Reads the body, and sends its bytes with a signature.
struct Signs;

#[async_trait::async_trait]
impl Middleware for Signs {
    async fn handle(
        &self,
        mut request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        if let Some(body) = request.body_mut().take() {
            let bytes = body.collect().await?.to_bytes();
            let signature = HeaderValue::from(bytes.len());
            request.headers_mut().insert("x-signature", signature);
            *request.body_mut() = Some(bytes.into());
        }
        next.run(request, extensions).await
    }
}

#[tokio::test]
async fn a_layer_that_reads_the_body_makes_for_no_false_certainty() {
    for call in Call::POSTS {
        for act in [Act::Hang, Act::Close] {
            let row = format!("{call:?}, {act:?}");
            let server = Wire::script([act]).await;
            let client = over_layer(retry().attempt_timeout(LIMIT), Signs);
            let outcome = send(call.to(&client, &server.url("/orders"))).await;
            let expected = call.gives_up(Certainty::Unknown);
            let seen = server.saw(expected.attempts).await;
            assert_eq!(seen.len(), expected.attempts, "{row}");
            call.check_all_arrived(&seen, &row);
            for seen in &seen {
                let signature = [ORDER.len().to_string()];
                assert_eq!(lines(&seen.headers, "x-signature"), signature, "{row}");
            }
            assert_eq!(outcome.told(), expected, "{row}");
        }
    }
}

struct Fails;

#[async_trait::async_trait]
impl Middleware for Fails {
    async fn handle(
        &self,
        _: Request,
        _: &mut Extensions,
        _: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        Err(Error::middleware(std::io::Error::other("no token")))
    }
}

#[tokio::test]
async fn a_layer_that_fails_before_it_sends_is_never_sent_and_not_repeated() {
    for call in Call::POSTS {
        let server = Wire::script([answer(200)]).await;
        let client = over_layer(retry(), Fails);
        let outcome = send(call.to(&client, &server.url("/orders"))).await;
        assert_eq!(server.connections(), 0, "{call:?}");
        let stop = Some(StopReason::NotRetryable);
        let expected = Told {
            next: NextStep::TryLater { after: None },
            ..call.ends(1, stop, Certainty::NotSent)
        };
        assert_eq!(outcome.told(), expected, "{call:?}");
        let failure = outcome.report.attempts()[0].failure();
        assert_eq!(failure, Some(Failure::Layer), "{call:?}");
        let source = outcome.error().retry_error().and_then(StdError::source);
        assert_eq!(source.expect("a source").to_string(), "no token");
    }
}

// ---- What evidence is read from: each would fail silently if the versions of a crate split ----

fn causes(error: &reqwest::Error) -> impl Iterator<Item = &(dyn StdError + 'static)> {
    std::iter::successors(error.source(), |&cause| cause.source())
}

#[tokio::test]
async fn a_hyper_error_is_found_behind_a_reqwest_error() {
    let server = Wire::script([Act::Close]).await;
    let error = plain_http().get(server.url("/")).send().await;
    let error = error.expect_err("no answer");
    let found = causes(&error).find_map(|cause| cause.downcast_ref::<hyper::Error>());
    let found = found.unwrap_or_else(|| panic!("none of our hyper's: {error:?}"));
    assert!(found.is_incomplete_message(), "{found:?}");
}

#[cfg(feature = "http2")]
mod http2 {
    use super::net::http2::{Http2, Reply};
    use super::*;

    const REFUSED: Reply = Reply::Reset(h2::Reason::REFUSED_STREAM);

    fn http() -> reqwest::Client {
        Http::Prepared
            .builder()
            .http2_prior_knowledge()
            .build()
            .expect("a client")
    }

    fn client() -> ClientWithMiddleware {
        over(http(), retry().client_is_prepared(true))
    }

    #[tokio::test]
    async fn an_h2_error_is_found_behind_a_reqwest_error() {
        let server = Http2::script([REFUSED]).await;
        let error = http().post(server.url("/orders")).send().await;
        let error = error.expect_err("refused");
        let found = causes(&error).find_map(|cause| cause.downcast_ref::<h2::Error>());
        let found = found.unwrap_or_else(|| panic!("none of our h2's: {error:?}"));
        assert!(found.is_reset() && found.is_remote(), "{found:?}");
        assert_eq!(found.reason(), Some(h2::Reason::REFUSED_STREAM));
    }

    #[tokio::test]
    async fn a_refused_stream_is_repeated_whatever_the_method() {
        for call in Call::ALL {
            let server = Http2::script([REFUSED, Reply::Status(200)]).await;
            let outcome = send(call.to(&client(), &server.url("/orders"))).await;
            let seen = server.requests();
            assert_eq!(seen.len(), 2, "{call:?}");
            call.check_all_arrived(&seen, "refused stream");
            assert_eq!(outcome.told(), call.is_done(2), "{call:?}");
            let first = &outcome.report.attempts()[0];
            assert_eq!(first.certainty(), Certainty::NotProcessed, "{call:?}");
            assert_eq!(first.failure(), Some(Failure::Refused), "{call:?}");
        }
    }

    #[tokio::test]
    async fn a_stream_that_is_always_refused_was_not_processed() {
        let server = Http2::script([REFUSED; ATTEMPTS]).await;
        let outcome = send(Call::Post.to(&client(), &server.url("/orders"))).await;
        assert_eq!(server.requests().len(), ATTEMPTS);
        let expected = Call::Post.gives_up(Certainty::NotProcessed);
        assert_eq!(outcome.told(), expected);
    }

    #[tokio::test]
    async fn any_other_reset_is_unknown() {
        for reason in [h2::Reason::CANCEL, h2::Reason::INTERNAL_ERROR] {
            for call in Call::POSTS {
                let row = format!("{reason:?}, {call:?}");
                let replies = [Reply::Reset(reason), Reply::Status(200)];
                let server = Http2::script(replies).await;
                let outcome = send(call.to(&client(), &server.url("/orders"))).await;
                let expected = match call {
                    Call::Post => call.gives_up(Certainty::Unknown),
                    _ => call.is_done(2),
                };
                let seen = server.requests();
                assert_eq!(seen.len(), expected.attempts, "{row}");
                call.check_all_arrived(&seen, &row);
                assert_eq!(outcome.told(), expected, "{row}");
                let first = outcome.report.attempts()[0].certainty();
                assert_eq!(first, Certainty::Unknown, "{row}");
            }
        }
    }

    /// The head has arrived, though no byte of the body was asked for.
    #[tokio::test]
    async fn a_body_that_no_window_lets_through_is_never_called_unsent() {
        let never = [Reply::Never; ATTEMPTS];
        let server = Http2::script([&[Reply::Status(200)], &never[..]].concat()).await;
        let retry = retry().client_is_prepared(true).attempt_timeout(LIMIT);
        let client = over(http(), retry);
        // From here on the client knows the window.
        send(client.get(server.url("/hello"))).await.response();
        let outcome = send(Call::Post.to(&client, &server.url("/orders"))).await;
        let lines: Vec<_> = server.requests().iter().map(Seen::line).collect();
        assert_eq!(lines, ["GET /hello", "POST /orders"]);
        let expected = Call::Post.gives_up(Certainty::Unknown);
        assert_eq!(outcome.told(), expected);
    }

    /// Without the caller's word a redirect could have hidden whose refusal it is.
    #[tokio::test]
    async fn a_refused_stream_is_not_enough_on_an_unprepared_client() {
        for call in Call::POSTS {
            let server = Http2::script([REFUSED, Reply::Status(200)]).await;
            let outcome = send(call.to(&over(http(), retry()), &server.url("/orders"))).await;
            let expected = match call {
                Call::Post => call.gives_up(Certainty::Unknown),
                _ => call.is_done(2),
            };
            assert_eq!(server.requests().len(), expected.attempts, "{call:?}");
            assert_eq!(outcome.told(), expected, "{call:?}");
            let first = outcome.report.attempts()[0].certainty();
            assert_eq!(first, Certainty::Unknown, "{call:?}");
        }
    }

    #[tokio::test]
    async fn statuses_prove_the_same_in_both_versions() {
        let (answered, unknown) = (Certainty::Answered, Certainty::Unknown);
        for (status, unkeyed, keyed) in [
            (201, answered, answered),
            (422, answered, answered),
            (423, answered, unknown),
            (425, Certainty::NotProcessed, Certainty::NotProcessed),
            (408, unknown, unknown),
            (409, unknown, unknown),
            (500, unknown, unknown),
            (503, unknown, unknown),
        ] {
            for (call, expected) in [(Call::Post, unkeyed), (Call::KeyedPost, keyed)] {
                let once = || retry().max_attempts(1).client_is_prepared(true);
                let one = Wire::script([answer(status)]).await;
                let told = send(call.to(&over(plain_http(), once()), &one.url("/orders"))).await;
                assert_eq!(
                    told.report.certainty(),
                    expected,
                    "HTTP/1.1, {status} {call:?}"
                );
                let two = Http2::script([Reply::Status(status)]).await;
                let told = send(call.to(&over(http(), once()), &two.url("/orders"))).await;
                assert_eq!(
                    told.report.certainty(),
                    expected,
                    "HTTP/2, {status} {call:?}"
                );
                assert_eq!((one.requests().len(), two.requests().len()), (1, 1));
            }
        }
    }

    #[tokio::test]
    async fn a_goaway_below_the_stream_says_that_it_was_not_processed() {
        for call in Call::ALL {
            let replies = [Reply::GoAway(0, h2::Reason::NO_ERROR), Reply::Status(200)];
            let server = Http2::script(replies).await;
            let outcome = send(call.to(&client(), &server.url("/orders"))).await;
            assert_eq!(server.requests().len(), 2, "{call:?}");
            assert_eq!(outcome.told(), call.is_done(2), "{call:?}");
            let first = outcome.report.attempts()[0].certainty();
            assert_eq!(first, Certainty::NotProcessed, "{call:?}");
        }
    }

    #[tokio::test]
    async fn a_goaway_that_covers_the_stream_or_complains_is_unknown() {
        for (last, reason) in [
            (1, h2::Reason::NO_ERROR),
            (0, h2::Reason::ENHANCE_YOUR_CALM),
            (1, h2::Reason::INTERNAL_ERROR),
        ] {
            let row = format!("{last} {reason:?}");
            let server = Http2::script([Reply::GoAway(last, reason), Reply::Status(200)]).await;
            let outcome = send(Call::Post.to(&client(), &server.url("/orders"))).await;
            assert_eq!(server.requests().len(), 1, "{row}");
            let expected = Call::Post.gives_up(Certainty::Unknown);
            assert_eq!(outcome.told(), expected, "{row}");
        }
    }

    /// reqwest's own retries are below every layer, in no budget, and in no count of ours.
    #[tokio::test]
    async fn an_unprepared_client_repeats_refused_streams_by_itself() {
        let server = Http2::script([REFUSED; 3 * ATTEMPTS]).await;
        let http = plain_http_builder().http2_prior_knowledge().build();
        let http = http.expect("a client");
        let outcome = send(over(http, retry()).get(server.url("/orders"))).await;
        assert_eq!(outcome.report.attempts().len(), ATTEMPTS);
        assert_eq!(server.requests().len(), 3 * ATTEMPTS);
    }
}

// ---- Failed answers and their connections ----

#[tokio::test]
async fn case_68_a_small_failed_answer_is_read_to_its_end_and_its_connection_used_again() {
    let busy = || answer(503).body(vec![b'x'; 4096]);
    let server = Wire::script([busy(), busy(), busy(), answer(200)]).await;
    let retry = retry().max_attempts(4).backoff(Backoff::fixed([ms(100)]));
    let client = over(plain_http(), retry);
    let outcome = send(client.get(server.url("/"))).await;
    assert_eq!(server.saw(4).await.len(), 4);
    assert_eq!(server.connections(), 1);
    assert_eq!(outcome.told(), Call::Get.is_done(4));
}

#[tokio::test]
async fn case_68_a_large_failed_answer_is_dropped_before_the_wait() {
    let busy = answer(503).body(vec![b'x'; 1 << 20]);
    let server = Wire::script([busy, answer(200)]).await;
    let client = over(plain_http(), retry().backoff(Backoff::fixed([ms(200)])));
    let outcome = send(client.get(server.url("/"))).await;
    assert_eq!(outcome.told(), Call::Get.is_done(2));
    let order: Vec<_> = server
        .log()
        .iter()
        .map(|event| match event {
            Event::Connected(connection) => format!("connected {connection}"),
            Event::Request(seen) => format!("request on {}", seen.connection),
            Event::Gone(connection) => format!("gone {connection}"),
        })
        .collect();
    let expected = [
        "connected 0",
        "request on 0",
        "gone 0",
        "connected 1",
        "request on 1",
    ];
    assert_eq!(order, expected);
}

/// Reading a failed answer takes place within the wait. Were it added to the wait, eight stalled
/// bodies would make the operation last twice as long.
#[tokio::test]
async fn case_68_an_answer_that_does_not_end_delays_no_attempt() {
    const FAILURES: u32 = 8;
    const WAIT: Duration = ms(50);
    let stalled = "HTTP/1.1 503 status\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n";
    let endless = [Act::Flood, Act::SayAndStall(stalled, Rest::default())];
    for act in endless {
        let row = format!("{act:?}");
        let mut acts = vec![act; FAILURES as usize];
        acts.push(answer(200).into());
        let server = Wire::script(acts).await;
        let retry = retry()
            .max_attempts(FAILURES + 1)
            .backoff(Backoff::fixed([WAIT]));
        let client = over(plain_http(), retry);
        let start = Instant::now();
        let outcome = send(client.get(server.url("/"))).await;
        let elapsed = start.elapsed();
        let sends = FAILURES as usize + 1;
        assert_eq!(server.saw(sends).await.len(), sends, "{row}");
        assert_eq!(outcome.told(), Call::Get.is_done(sends), "{row}");
        let (least, most) = (WAIT * FAILURES, WAIT * FAILURES * 2 - ms(25));
        assert!((least..most).contains(&elapsed), "{elapsed:?} for {row}");
    }
}

// ---- What time limits cover ----

/// 200, three bytes of ten, and the rest once it is released.
fn stalled_body() -> (Act, Arc<tokio::sync::Notify>) {
    let rest = Rest {
        text: "defghij",
        ..Rest::default()
    };
    let head = "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc";
    let release = Arc::clone(&rest.release);
    (Act::SayAndStall(head, rest), release)
}

#[tokio::test]
async fn a_deadline_ends_the_reading_of_the_body() {
    let (act, _release) = stalled_body();
    let server = Wire::script([act]).await;
    let client = over(plain_http(), retry());
    let start = Instant::now();
    let request = client
        .get(server.url("/"))
        .with_extension(Deadline::after(ms(300)));
    let response = send(request).await.response();
    assert_eq!(response.content_length(), Some(10));
    let body = patiently("the end of the body", response.bytes()).await;
    let error = body.expect_err("the deadline has come");
    assert!(error.is_timeout(), "{error:?}");
    assert!(start.elapsed() >= ms(300));
    assert_eq!(server.saw(1).await.len(), 1);
}

#[tokio::test]
async fn a_deadline_until_headers_lets_the_body_take_its_time() {
    let (act, release) = stalled_body();
    let server = Wire::script([act]).await;
    let client = over(plain_http(), retry().deadline_scope(DeadlineScope::Headers));
    let request = client
        .get(server.url("/"))
        .with_extension(Deadline::after(ms(200)));
    let response = send(request).await.response();
    tokio::time::sleep(ms(300)).await;
    release.notify_one();
    let body = patiently("the end of the body", response.bytes()).await;
    assert_eq!(body.expect("a whole body"), "abcdefghij");
}

/// reqwest's own timeouts, on a request or on the whole client, cover head and body alike.
#[tokio::test]
async fn timeouts_of_request_and_client_stay_in_force() {
    let client_wide = plain_http_builder().timeout(LIMIT).build();
    let client_wide = over(client_wide.expect("a client"), retry());
    let per_request = over(plain_http(), retry());
    let rows = [
        ("request", per_request, Some(LIMIT)),
        ("client", client_wide, None),
    ];
    for (row, client, timeout) in rows {
        let server = Wire::routes(|seen| match &*seen.path {
            "/body" => stalled_body().0,
            _ => Act::Hang,
        })
        .await;
        let get = |path| {
            let request = client.get(server.url(path));
            let request = request.with_extension(Deadline::after(secs(8)));
            match timeout {
                Some(timeout) => request.timeout(timeout),
                None => request,
            }
        };

        let start = Instant::now();
        let response = send(get("/body")).await.response();
        let body = patiently("the end of the body", response.bytes()).await;
        assert!(body.expect_err("a timeout").is_timeout(), "{row}");
        assert!(
            start.elapsed() >= LIMIT && start.elapsed() < secs(4),
            "{row}"
        );

        let outcome = send(get("/head")).await;
        assert_eq!(server.saw(1 + ATTEMPTS).await.len(), 1 + ATTEMPTS, "{row}");
        let expected = Call::Get.gives_up(Certainty::Unknown);
        assert_eq!(outcome.told(), expected, "{row}");
        for attempt in outcome.report.attempts() {
            assert!(attempt.took() >= LIMIT && attempt.took() < secs(2), "{row}");
            assert!(attempt.limit() > Some(secs(2)), "{row}");
        }
        let error = outcome.error().retry_error().expect("ours");
        assert!(error.is_timeout(), "{row}");
    }
}

#[tokio::test]
async fn a_requests_own_timeout_is_clipped_to_the_time_left() {
    let (act, _release) = stalled_body();
    let server = Wire::script([act]).await;
    let scope = retry().deadline_scope(DeadlineScope::Headers);
    let client = over(plain_http(), scope);
    let request = client.get(server.url("/")).timeout(secs(60));
    let request = request.with_extension(Deadline::after(LIMIT));
    let response = send(request).await.response();
    let body = patiently("the end of the body", response.bytes()).await;
    assert!(body.expect_err("a timeout").is_timeout());
}

// ---- What errors show ----

const SECRETS: &str = "/t/PATHTOK?api_key=SECRET";

async fn an_error_shows_no_secrets_of(url: &str, row: &str) {
    let client = over(plain_http(), retry().attempt_timeout(LIMIT));
    let outcome = send(Call::KeyedPost.to(&client, url)).await;
    let error = outcome.error().retry_error().expect("ours");
    assert!(error.to_string().contains("POST 127.0.0.1"), "{error}");
    let mut shown = format!("{error} {error:?} {0} {0:?}", outcome.error());
    for cause in std::iter::successors(error.source(), |&cause| cause.source()) {
        shown += &format!(" {cause} {cause:?}");
    }
    for secret in ["PATHTOK", "SECRET", "api_key", ORDER, KEY] {
        assert!(!shown.contains(secret), "{row} shows {secret}: {shown}");
    }
}

#[tokio::test]
async fn an_error_shows_neither_path_nor_query_nor_key_nor_body() {
    let port = ClosedPort::new();
    an_error_shows_no_secrets_of(&port.url(SECRETS), "closed port").await;
    for act in [Act::Close, Act::Hang, Act::SayAndClose("garbage\r\n")] {
        let row = format!("{act:?}");
        let server = Wire::script([act]).await;
        an_error_shows_no_secrets_of(&server.url(SECRETS), &row).await;
        assert_eq!(server.saw(ATTEMPTS).await.len(), ATTEMPTS, "{row}");
    }
}

// ---- Failures that another try would meet again ----

/// A TLS server whose certificate nobody has signed. It counts who connects, and whom it could talk to.
struct Untrusted {
    url: String,
    connections: Arc<AtomicUsize>,
    agreed: Arc<AtomicUsize>,
}

impl Untrusted {
    async fn start() -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let signed =
            rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
        let key = rustls::pki_types::PrivatePkcs8KeyDer::from(signed.signing_key.serialize_der());
        let config = rustls::ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![signed.cert.der().clone()], key.into())
            .expect("a TLS configuration");
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port");
        let port = listener.local_addr().expect("its address").port();
        let (connections, agreed) = <(Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
        let (connected, spoken) = (Arc::clone(&connections), Arc::clone(&agreed));
        tokio::spawn(async move {
            while let Ok((peer, _)) = listener.accept().await {
                connected.fetch_add(1, Ordering::SeqCst);
                if acceptor.accept(peer).await.is_ok() {
                    spoken.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
        Self {
            url: format!("https://localhost:{port}/orders"),
            connections,
            agreed,
        }
    }
}

#[tokio::test]
async fn case_53_an_untrusted_certificate_is_never_sent_anything_and_met_once() {
    for call in Call::ALL {
        let server = Untrusted::start().await;
        let outcome = send(call.to(&over(plain_http(), retry()), &server.url)).await;
        assert_eq!(server.connections.load(Ordering::SeqCst), 1, "{call:?}");
        assert_eq!(server.agreed.load(Ordering::SeqCst), 0, "{call:?}");
        let expected = call.ends(1, Some(StopReason::NotRetryable), Certainty::NotSent);
        assert_eq!(outcome.told(), expected, "{call:?}");
        assert!(outcome.error().retry_error().expect("ours").is_connect());
    }
}

/// A resolver that knows no name.
struct KnowsNothing(Arc<AtomicUsize>);

impl reqwest::dns::Resolve for KnowsNothing {
    fn resolve(&self, _: reqwest::dns::Name) -> reqwest::dns::Resolving {
        self.0.fetch_add(1, Ordering::SeqCst);
        Box::pin(async { Err("no such name".into()) })
    }
}

#[tokio::test]
async fn case_53_a_name_that_is_not_known_may_be_known_soon() {
    for call in Call::ALL {
        for url in ["http://nowhere.test/orders", "https://nowhere.test/orders"] {
            let asked = Arc::new(AtomicUsize::new(0));
            let dns = Arc::new(KnowsNothing(Arc::clone(&asked)));
            let http = plain_http_builder()
                .dns_resolver(dns)
                .build()
                .expect("a client");
            let outcome = send(call.to(&over(http, retry()), url)).await;
            assert_eq!(asked.load(Ordering::SeqCst), ATTEMPTS, "{call:?} {url}");
            assert_eq!(
                outcome.told(),
                call.gives_up(Certainty::NotSent),
                "{call:?} {url}"
            );
        }
    }
}

#[tokio::test]
async fn case_53_what_is_wrong_with_the_request_stays_wrong() {
    let client = || over(plain_http(), retry());
    for call in Call::ALL {
        let outcome = send(call.to(&client(), "foo://127.0.0.1/orders")).await;
        let expected = call.ends(1, Some(StopReason::NotRetryable), Certainty::NotSent);
        assert_eq!(outcome.told(), expected, "{call:?}");
    }
    // A header that is none never gets as far as this layer.
    let server = Wire::script([answer(200)]).await;
    let request = client().get(server.url("/")).header("x-bad", "line\nbreak");
    let error = request.send().await.expect_err("refused");
    assert!(
        error.is_builder() && error.retry_error().is_none(),
        "{error:?}"
    );
    assert_eq!(server.requests().len(), 0);
}

#[tokio::test]
async fn case_53_a_redirect_loop_is_followed_once() {
    let server = Wire::routes(|_| redirect(302, "/").into()).await;
    let outcome = send(over(plain_http(), retry()).get(server.url("/"))).await;
    // reqwest's own limit of ten hops, one time.
    assert_eq!(server.requests().len(), 11);
    let expected = Call::Get.ends(1, Some(StopReason::NotRetryable), Certainty::Unknown);
    assert_eq!(outcome.told(), expected);
}

/// A proxy that opens no tunnel today may open one tomorrow.
#[tokio::test]
async fn case_53_a_proxy_that_opens_no_tunnel_is_asked_again() {
    for call in Call::ALL {
        let proxy = Wire::script([answer(503)]).await;
        let http = plain_http_builder().proxy(reqwest::Proxy::all(proxy.url("")).expect("a proxy"));
        let client = over(http.build().expect("a client"), retry());
        let outcome = send(call.to(&client, "https://orders.test/orders")).await;
        let seen = proxy.saw(ATTEMPTS).await;
        assert!(seen.iter().all(|seen| seen.method == "CONNECT"), "{call:?}");
        assert_eq!(seen.len(), ATTEMPTS, "{call:?}");
        assert_eq!(
            outcome.told(),
            call.gives_up(Certainty::NotSent),
            "{call:?}"
        );
    }
}

// ---- What cannot be seen from above ----

/// The order is made, and what is told of the page that it is redirected to is not told of it.
#[tokio::test]
async fn a_refusal_after_a_303_to_the_same_url_claims_nothing_for_a_keyed_order_either() {
    for http in Http::BOTH {
        let server = Wire::routes(|seen| match seen.method.as_str() {
            "POST" => redirect(303, "/orders").into(),
            _ => answer(425).into(),
        })
        .await;
        let client = http.client(retry().max_attempts(1));
        let outcome = send(Call::KeyedPost.to(&client, &server.url("/orders"))).await;
        assert_eq!(server.orders(), 1, "{http:?}");
        assert_eq!(outcome.report.certainty(), Certainty::Unknown, "{http:?}");
    }
}

/// Sends from a task of its own, where nobody watches the redirects.
struct Detaches(reqwest::Client);

#[async_trait::async_trait]
impl Middleware for Detaches {
    async fn handle(
        &self,
        request: Request,
        _: &mut Extensions,
        _: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let http = self.0.clone();
        let sending = tokio::spawn(async move { http.execute(request).await });
        Ok(sending.await.expect("no panic")?)
    }
}

#[tokio::test]
async fn hops_that_a_layer_follows_out_of_sight_are_not_taken_for_none() {
    let server = Wire::routes(|seen| match seen.method.as_str() {
        "POST" => redirect(303, "/orders").into(),
        _ => answer(503).into(),
    })
    .await;
    let http = Http::Prepared.builder().build().expect("a client");
    let retry = retry()
        .client_is_prepared(true)
        .refused_before_work([unavailable()]);
    let client = ClientBuilder::new(http.clone())
        .with(retry.build().expect("valid settings"))
        .with(Detaches(http))
        .build();
    let outcome = send(Call::Post.to(&client, &server.url("/orders"))).await;
    assert_eq!(server.orders(), 1);
    assert_eq!(outcome.told(), Call::Post.gives_up(Certainty::Unknown));
}

#[tokio::test]
async fn tracking_changes_nothing_on_the_wire() {
    use http::Method;
    for method in [Method::POST, Method::PUT, Method::PATCH, Method::DELETE] {
        for body in [None, Some(""), Some(ORDER)] {
            let sent = async |track: bool| {
                let server = Wire::script([answer(200)]).await;
                let client = over(plain_http(), retry().send_tracking(track));
                let mut request = client.request(method.clone(), server.url("/"));
                if let Some(body) = body {
                    request = request.body(body);
                }
                send(request).await.response();
                let seen = server.saw(1).await.remove(0);
                let mut headers = seen.headers;
                headers.remove("host");
                (headers, seen.body)
            };
            assert_eq!(sent(true).await, sent(false).await, "{method} {body:?}");
        }
    }
}
