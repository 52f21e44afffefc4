//! What an attempt proves behind TLS, over HTTP/2, through proxies, after redirects and with large
//! bodies: first what the other side saw, then what the caller is told.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod net;
mod support;

use std::net::SocketAddr;
use std::time::Duration;

use http::{Extensions, StatusCode};
use http_body_util::BodyExt;
use net::call::{
    ATTEMPTS, Call, Http, LIMIT, ORDER, Outcome, Told, never_sent_if_tracked, over, retry, send,
};
use net::gate::{Certificate, Gate};
use net::raw::{Raw, Then};
use net::{Act, ClosedPort, Seen, Wire, answer, redirect};
use reqwest::{Body, Proxy, Request, Response};
use reqwest_idempotent_retry::{Certainty, Failure, NextStep, RetryMiddlewareBuilder, StopReason};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Error, Middleware, Next};
use rustls::version::{TLS12, TLS13};
use support::{key, ms, plain_http, plain_http_builder};
use tokio::task::JoinSet;

/// Ten megabytes: more than any buffer on the way takes in.
const LARGE: usize = 10 << 20;
const HALF: usize = LARGE / 2;

fn large() -> Vec<u8> {
    vec![b'x'; LARGE]
}

/// An attempt's limit where it must see a handshake through first, on a busy machine too.
const AMPLE: Duration = ms(400);

/// Ends attempts that have no other end. All others take the time they need.
fn limited(act: &Act) -> RetryMiddlewareBuilder {
    match act {
        Act::Hang => retry().attempt_timeout(AMPLE),
        _ => retry(),
    }
}

/// What is told when each attempt, for reasons of its own, proved either this or no more than that.
fn gives_up_as_far_as_sent(call: Call, outcome: &Outcome) -> Told {
    let is_unsent = |certainty| certainty == Certainty::NotSent;
    let attempts = outcome.report.attempts();
    let unsent = attempts
        .iter()
        .take_while(|attempt| is_unsent(attempt.certainty()))
        .count();
    match (unsent == attempts.len(), call) {
        (true, _) => call.gives_up(Certainty::NotSent),
        (_, Call::Post) => {
            let stop = Some(StopReason::UnsafeToRepeat);
            call.ends(unsent + 1, stop, Certainty::Unknown)
        }
        _ => call.gives_up(Certainty::Unknown),
    }
}

/// Each of one with each of the other.
fn rows<A: Clone, B: Clone>(
    one: impl IntoIterator<Item = A>,
    other: impl IntoIterator<Item = B> + Clone,
) -> Vec<(A, B)> {
    let with = |a: A| other.clone().into_iter().map(move |b| (a.clone(), b));
    one.into_iter().flat_map(with).collect()
}

/// Checks all rows side by side, since most of their time is spent waiting.
async fn at_once<R, F>(rows: impl IntoIterator<Item = R>, check: impl Fn(R) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let checks: JoinSet<()> = rows.into_iter().map(check).collect();
    checks.join_all().await;
}

// ---- TLS ----

/// A peer that hangs up in the middle of the handshake may be back in a moment.
#[tokio::test]
async fn a_peer_that_closes_during_the_handshake_is_never_sent_anything() {
    for call in Call::ALL {
        for then in [Then::Close, Then::Reset] {
            let row = format!("{call:?}, {then:?}");
            let peer = Raw::reads(1, then).await;
            let client = over(plain_http(), retry());
            let outcome = send(call.to(&client, &peer.https("/orders"))).await;
            assert_eq!(peer.read().len(), ATTEMPTS, "{row}");
            assert_eq!(outcome.told(), call.gives_up(Certainty::NotSent), "{row}");
        }
    }
}

#[tokio::test]
async fn a_peer_that_hears_the_handshake_and_says_nothing_is_never_sent_anything() {
    at_once(Call::ALL, |call| async move {
        let peer = Raw::reads(1, Then::Hold).await;
        let client = over(plain_http(), retry().attempt_timeout(LIMIT));
        let outcome = send(call.to(&client, &peer.https("/orders"))).await;
        assert_eq!(peer.read().len(), ATTEMPTS, "{call:?}");
        let expected = call.gives_up(never_sent_if_tracked(call));
        assert_eq!(outcome.told(), expected, "{call:?}");
    })
    .await;
}

/// Never sent, and met once: the next try would find the same peer.
fn is_permanent(call: Call) -> Told {
    let stop = Some(StopReason::NotRetryable);
    call.ends(1, stop, Certainty::NotSent)
}

#[tokio::test]
async fn case_53_a_peer_that_speaks_plain_http_is_never_sent_anything_and_met_once() {
    let refusal = "HTTP/1.1 400 plain\r\ncontent-length: 0\r\n\r\n";
    for call in Call::ALL {
        let peer = Raw::reads(1, Then::SayAndClose(refusal)).await;
        let client = over(plain_http(), retry());
        let outcome = send(call.to(&client, &peer.https("/orders"))).await;
        assert_eq!(peer.read().len(), 1, "{call:?}");
        assert_eq!(outcome.told(), is_permanent(call), "{call:?}");
    }
}

/// The client has the root of each certificate, so it is only the certificate's own fault.
#[tokio::test]
async fn case_53_a_certificate_that_is_no_good_is_never_sent_anything_and_met_once() {
    let rows = [
        ("expired", Certificate::expired("127.0.0.1")),
        ("for another name", Certificate::new("orders.test")),
    ];
    for (row, certificate) in rows {
        for call in Call::ALL {
            let row = format!("{row}, {call:?}");
            let server = Wire::script([answer(200)]).await;
            let gate = Gate::tls(certificate.offers("http/1.1"), server.address()).await;
            let client = over(trusting(&certificate), retry());
            let outcome = send(call.to(&client, &gate.https("/orders"))).await;
            assert_eq!((gate.passed(), server.connections()), (0, 0), "{row}");
            assert_eq!(outcome.told(), is_permanent(call), "{row}");
        }
    }
}

fn trusting(certificate: &Certificate) -> reqwest::Client {
    let builder = plain_http_builder().tls_certs_only([certificate.root()]);
    builder.build().expect("a client")
}

/// In TLS 1.2 the server's alert ends the handshake.
#[tokio::test]
async fn case_53_an_alert_within_the_handshake_is_never_sent_anything_and_met_once() {
    for call in Call::ALL {
        let certificate = Certificate::new("127.0.0.1");
        let server = Wire::script([answer(200)]).await;
        let gate = Gate::tls(certificate.demands_one(&TLS12), server.address()).await;
        let client = over(trusting(&certificate), retry());
        let outcome = send(call.to(&client, &gate.https("/orders"))).await;
        assert_eq!(server.connections(), 0, "{call:?}");
        assert_eq!(outcome.told(), is_permanent(call), "{call:?}");
    }
}

/// In TLS 1.3 the client is through with the handshake before the server looks at its certificate,
/// so the alert comes while the request is on its way, or has been written.
#[tokio::test]
async fn an_alert_after_the_handshake_is_unknown_where_anything_was_written() {
    for call in Call::ALL {
        let certificate = Certificate::new("127.0.0.1");
        let server = Wire::script([answer(200)]).await;
        let gate = Gate::tls(certificate.demands_one(&TLS13), server.address()).await;
        let client = over(trusting(&certificate), retry());
        let outcome = send(call.to(&client, &gate.https("/orders"))).await;
        assert_eq!((gate.passed(), server.connections()), (0, 0), "{call:?}");
        let expected = gives_up_as_far_as_sent(call, &outcome);
        assert_eq!(outcome.told(), expected, "{call:?}");
    }
}

/// What a server behind TLS has read may have been carried out, as without TLS.
#[tokio::test]
async fn case_52_behind_tls_what_was_read_may_have_been_carried_out() {
    let acts = [Act::Close, Act::Reset, Act::Hang];
    at_once(rows(acts, Call::ALL), |(act, call)| async move {
        let row = format!("{act:?}, {call:?}");
        let certificate = Certificate::new("127.0.0.1");
        let server = Wire::script([act.clone()]).await;
        let gate = Gate::tls(certificate.offers("http/1.1"), server.address()).await;
        let client = over(trusting(&certificate), limited(&act));
        let outcome = send(call.to(&client, &gate.https("/orders"))).await;
        let expected = call.gives_up(Certainty::Unknown);
        let seen = server.saw(expected.attempts).await;
        assert_eq!(seen.len(), expected.attempts, "{row}");
        call.check_all_arrived(&seen, &row);
        assert_eq!(outcome.told(), expected, "{row}");
    })
    .await;
}

/// The end of a process, which says no goodbye in TLS.
#[tokio::test]
async fn case_52_behind_tls_a_server_that_dies_may_have_carried_it_out() {
    for call in Call::ALL {
        let certificate = Certificate::new("127.0.0.1");
        let server = Wire::script([Act::Close]).await;
        let gate = Gate::curt_tls(certificate.offers("http/1.1"), server.address()).await;
        let client = over(trusting(&certificate), retry());
        let outcome = send(call.to(&client, &gate.https("/orders"))).await;
        let expected = call.gives_up(Certainty::Unknown);
        let seen = server.saw(expected.attempts).await;
        assert_eq!(seen.len(), expected.attempts, "{call:?}");
        call.check_all_arrived(&seen, "a death");
        assert_eq!(outcome.told(), expected, "{call:?}");
    }
}

// ---- Large bodies, and a server that says "go on" ----

async fn a_large_body_is_broken_off(least: usize, then: Then) {
    at_once(Call::POSTS, |call| async move {
        let row = format!("{call:?}, {then:?} after {least}");
        let server = Raw::reads(least, then).await;
        let retry = match then {
            Then::Hold => retry().attempt_timeout(AMPLE),
            _ => retry(),
        };
        let client = over(plain_http(), retry);
        let request = call.to(&client, &server.url("/orders")).body(large());
        let outcome = send(request).await;
        let expected = call.gives_up(Certainty::Unknown);
        let read = server.read();
        assert_eq!(read.len(), expected.attempts, "{row}");
        let is_part = |read: &usize| (least..LARGE).contains(read);
        assert!(read.iter().all(is_part), "{read:?} of: {row}");
        assert_eq!(outcome.told(), expected, "{row}");
    })
    .await;
}

#[tokio::test]
async fn a_write_that_is_cut_half_way_is_unknown() {
    a_large_body_is_broken_off(HALF, Then::Reset).await;
}

/// The client sees a RST here as well, since it was still writing.
#[tokio::test]
async fn a_write_that_is_hung_up_on_half_way_is_unknown() {
    a_large_body_is_broken_off(HALF, Then::Close).await;
}

#[tokio::test]
async fn a_write_that_stops_half_way_is_unknown() {
    a_large_body_is_broken_off(1 << 16, Then::Hold).await;
}

/// All that the client knows is that the kernel took some of it.
#[tokio::test]
async fn a_write_to_a_server_that_never_reads_is_unknown() {
    a_large_body_is_broken_off(0, Then::Hold).await;
}

/// reqwest does not wait for "100 Continue", so the body is on its way with the head.
#[tokio::test]
async fn a_body_that_waits_for_no_continue_is_on_its_way() {
    type Expected = fn(Call) -> Told;
    let refused = "HTTP/1.1 417 no\r\ncontent-length: 0\r\n\r\n";
    let go_on = "HTTP/1.1 100 Continue\r\n\r\n";
    let done = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
    let acts: [(Act, Expected); 5] = [
        (Act::Hang, is_unknown),
        (Act::Close, is_unknown),
        (Act::SayAndClose(go_on), is_unknown),
        (Act::SayAndClose(done), |call| call.is_done(1)),
        (Act::SayAndClose(refused), is_refused),
    ];
    let rows = rows(acts, Call::POSTS);
    at_once(rows, |((act, expected), call)| async move {
        let row = format!("{call:?}, {act:?}");
        let server = Wire::script([act.clone()]).await;
        let client = over(plain_http(), limited(&act));
        let request = call.to(&client, &server.url("/orders"));
        let outcome = send(request.header("expect", "100-continue")).await;
        let expected = expected(call);
        let seen = server.saw(expected.attempts).await;
        assert_eq!(seen.len(), expected.attempts, "{row}");
        call.check_all_arrived(&seen, &row);
        assert_eq!(outcome.told(), expected, "{row}");
    })
    .await;
}

fn is_unknown(call: Call) -> Told {
    call.gives_up(Certainty::Unknown)
}

/// The answer says so.
fn is_refused(call: Call) -> Told {
    let stop = Some(StopReason::NotRetryable);
    call.ends(1, stop, Certainty::Answered)
}

/// A server that waits for nothing and never reads the body that it did not ask for.
#[tokio::test]
async fn a_large_body_that_was_not_asked_for_is_unknown() {
    let server = Raw::reads(1, Then::Hold).await;
    let client = over(plain_http(), retry().attempt_timeout(AMPLE));
    let request = client.post(server.url("/orders")).body(large());
    let outcome = send(request.header("expect", "100-continue")).await;
    assert_eq!(server.read().len(), 1);
    let expected = Call::Post.gives_up(Certainty::Unknown);
    assert_eq!(outcome.told(), expected);
}

/// HTTP/1.1 waits for no other request: it takes another connection. So a timeout there is one of
/// the server, whatever the size of the pool.
#[tokio::test]
async fn a_request_beside_one_that_hangs_takes_a_connection_of_its_own() {
    let server = Wire::script([Act::Hang]).await;
    let http = plain_http_builder().pool_max_idle_per_host(1).build();
    let http = http.expect("a client");
    let hanging = tokio::spawn(http.get(server.url("/slow")).send());
    server.saw(1).await;
    let client = over(http, retry().attempt_timeout(AMPLE));
    let outcome = send(Call::Post.to(&client, &server.url("/orders"))).await;
    assert_eq!((server.saw(2).await.len(), server.connections()), (2, 2));
    let expected = Call::Post.gives_up(Certainty::Unknown);
    assert_eq!(outcome.told(), expected);
    hanging.abort();
}

// ---- Proxies ----

fn through(proxy: &str) -> reqwest::ClientBuilder {
    plain_http_builder().proxy(Proxy::all(proxy).expect("a proxy"))
}

const BEHIND: &str = "http://orders.test/orders";
const BEHIND_TLS: &str = "https://orders.test/orders";

#[tokio::test]
async fn a_proxy_that_is_not_there_is_never_sent_anything() {
    for url in [BEHIND, BEHIND_TLS] {
        for call in Call::ALL {
            let proxy = ClosedPort::new();
            let client = over(through(&proxy.url("")).build().expect("a client"), retry());
            let outcome = send(call.to(&client, url)).await;
            let expected = call.gives_up(Certainty::NotSent);
            assert_eq!(outcome.told(), expected, "{call:?} {url}");
        }
    }
}

/// A proxy for plain HTTP is handed the request itself, so it is as good as a server.
#[tokio::test]
async fn what_a_plain_proxy_has_read_may_have_been_carried_out() {
    type Expected = fn(Call) -> Told;
    let acts: [(Act, Expected); 6] = [
        (Act::Close, is_unknown),
        (Act::Reset, is_unknown),
        (Act::Hang, is_unknown),
        (answer(502).into(), is_unknown),
        (answer(504).into(), is_unknown),
        (answer(407).into(), is_refused),
    ];
    let rows = rows(acts, Call::POSTS);
    at_once(rows, |((act, expected), call)| async move {
        let row = format!("{act:?}, {call:?}");
        let proxy = Wire::script([act.clone()]).await;
        let http = through(&proxy.url("")).build().expect("a client");
        let client = over(http, limited(&act));
        let outcome = send(call.to(&client, BEHIND)).await;
        let expected = expected(call);
        let seen = proxy.saw(expected.attempts).await;
        assert_eq!(seen.len(), expected.attempts, "{row}");
        call.check_all_arrived(&seen, &row);
        assert!(seen.iter().all(|seen| seen.path == BEHIND), "{row}");
        assert_eq!(outcome.told(), expected, "{row}");
    })
    .await;
}

/// The proxy sees the name of the server, and nothing of the request.
async fn no_tunnel(act: Act, expected: fn(Call) -> Certainty) {
    at_once(
        Call::ALL.map(|call| (act.clone(), call)),
        |(act, call)| async move {
            let row = format!("{act:?}, {call:?}");
            let proxy = Wire::script([act.clone()]).await;
            let http = through(&proxy.url("")).build().expect("a client");
            let client = over(http, limited(&act));
            let outcome = send(call.to(&client, BEHIND_TLS)).await;
            let seen = proxy.saw(ATTEMPTS).await;
            let lines: Vec<_> = seen.iter().map(Seen::line).collect();
            assert_eq!(lines, ["CONNECT orders.test:443"; ATTEMPTS], "{row}");
            assert!(seen.iter().all(|seen| seen.keys().is_empty()), "{row}");
            assert_eq!(outcome.told(), call.gives_up(expected(call)), "{row}");
        },
    )
    .await;
}

#[tokio::test]
async fn a_proxy_that_refuses_the_tunnel_is_never_sent_the_request() {
    for status in [502, 407] {
        no_tunnel(answer(status).into(), |_| Certainty::NotSent).await;
    }
}

#[tokio::test]
async fn a_proxy_that_closes_before_the_tunnel_is_never_sent_the_request() {
    for act in [Act::Close, Act::Reset, Act::SayAndClose("HTTP/1.1 20")] {
        no_tunnel(act, |_| Certainty::NotSent).await;
    }
}

#[tokio::test]
async fn a_proxy_that_never_answers_is_never_sent_the_request() {
    no_tunnel(Act::Hang, never_sent_if_tracked).await;
}

/// Through a tunnel that the proxy has opened, to a server that never says hello.
#[tokio::test]
async fn a_silent_server_behind_a_tunnel_is_never_sent_anything() {
    at_once(Call::ALL, |call| async move {
        let server = Wire::script([Act::Mute]).await;
        let proxy = Gate::tunnel(server.address()).await;
        let http = through(&proxy.url()).build().expect("a client");
        let client = over(http, retry().attempt_timeout(AMPLE));
        let outcome = send(call.to(&client, BEHIND_TLS)).await;
        assert_eq!(proxy.passed(), ATTEMPTS, "{call:?}");
        assert_eq!(proxy.asked(), ["CONNECT orders.test:443"; ATTEMPTS]);
        let expected = call.gives_up(never_sent_if_tracked(call));
        assert_eq!(outcome.told(), expected, "{call:?}");
    })
    .await;
}

#[tokio::test]
async fn a_server_behind_a_tunnel_that_closes_during_the_handshake_is_never_sent_anything() {
    for call in Call::ALL {
        let server = Raw::reads(1, Then::Close).await;
        let proxy = Gate::tunnel(server.address()).await;
        let client = over(through(&proxy.url()).build().expect("a client"), retry());
        let outcome = send(call.to(&client, BEHIND_TLS)).await;
        assert_eq!(server.read().len(), ATTEMPTS, "{call:?}");
        assert_eq!(
            outcome.told(),
            call.gives_up(Certainty::NotSent),
            "{call:?}"
        );
    }
}

#[tokio::test]
async fn what_a_server_behind_a_tunnel_has_read_may_have_been_carried_out() {
    let acts = [Act::Close, Act::Reset, Act::Hang, answer(201).into()];
    at_once(rows(acts, Call::ALL), |(act, call)| async move {
        let row = format!("{act:?}, {call:?}");
        let certificate = Certificate::new("orders.test");
        let server = Wire::script([act.clone()]).await;
        let tls = Gate::tls(certificate.offers("http/1.1"), server.address()).await;
        let proxy = Gate::tunnel(tls.address()).await;
        let http = through(&proxy.url()).tls_certs_only([certificate.root()]);
        let client = over(http.build().expect("a client"), limited(&act));
        let outcome = send(call.to(&client, BEHIND_TLS)).await;
        let expected = match act {
            Act::Answer(_) => call.is_done(1),
            _ => call.gives_up(Certainty::Unknown),
        };
        let seen = server.saw(expected.attempts).await;
        assert_eq!(seen.len(), expected.attempts, "{row}");
        call.check_all_arrived(&seen, &row);
        assert_eq!(outcome.told(), expected, "{row}");
    })
    .await;
}

// ---- Layers below that send again ----

/// Sends once more after a 401, with what it has kept of the request.
#[derive(Clone, Copy, Debug)]
enum Renews {
    /// A copy, if there can be one. A tracked body has none.
    IfItCan,
    /// A copy, or it fails.
    OrFails,
    /// The bytes of the body, which it has read.
    FromMemory,
}

#[async_trait::async_trait]
impl Middleware for Renews {
    async fn handle(
        &self,
        mut request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let copy = match self {
            Self::IfItCan => request.try_clone(),
            Self::OrFails => {
                let none = || Error::middleware(std::io::Error::other("cannot be cloned"));
                Some(request.try_clone().ok_or_else(none)?)
            }
            Self::FromMemory => {
                if let Some(body) = request.body_mut().take() {
                    let bytes = body.collect().await?.to_bytes();
                    *request.body_mut() = Some(Body::from(bytes));
                }
                request.try_clone()
            }
        };
        let answer = next.clone().run(request, extensions).await?;
        match copy {
            Some(copy) if answer.status() == StatusCode::UNAUTHORIZED => {
                drop(answer);
                next.run(copy, extensions).await
            }
            _ => Ok(answer),
        }
    }
}

fn above(
    layer: impl Middleware,
    http: Http,
    retry: RetryMiddlewareBuilder,
) -> ClientWithMiddleware {
    let retry = retry.client_is_prepared(http == Http::Prepared);
    ClientBuilder::new(http.builder().build().expect("a client"))
        .with(retry.build().expect("valid settings"))
        .with(layer)
        .build()
}

/// The usual one asks for a copy first, gets none, and has nothing to send again: the 401 is the
/// answer. Nothing is claimed that is not so, but the layer has lost its use.
#[tokio::test]
async fn a_layer_that_renews_with_a_copy_hands_the_401_on() {
    for call in Call::POSTS {
        let server = Wire::script([answer(401)]).await;
        let client = above(Renews::IfItCan, Http::Prepared, retry());
        let outcome = send(call.to(&client, &server.url("/orders"))).await;
        let seen = server.saw(1).await;
        assert_eq!(seen.len(), 1, "{call:?}");
        call.check_all_arrived(&seen, "401");
        assert_eq!(outcome.told(), is_refused(call), "{call:?}");
        assert_eq!(outcome.status(), Some(StatusCode::UNAUTHORIZED));
    }
}

#[tokio::test]
async fn a_layer_that_must_have_a_copy_sends_nothing_and_says_so() {
    for call in Call::POSTS {
        let server = Wire::script([answer(200)]).await;
        let client = above(Renews::OrFails, Http::Prepared, retry());
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
    }
}

/// What becomes of the request that is sent after the 401.
#[derive(Clone, Copy, Debug)]
enum SecondLeg {
    Close,
    Hang,
    /// Nobody listens any more.
    Refused,
}

/// The first leg was sent, whatever becomes of the second.
async fn a_second_leg(layer: Renews, tracks: bool) {
    let legs = [SecondLeg::Close, SecondLeg::Hang, SecondLeg::Refused];
    at_once(rows(legs, Call::POSTS), |(leg, call)| async move {
        let row = format!("{layer:?}, {leg:?}, {call:?}, tracks: {tracks}");
        let renew = || Act::from(answer(401));
        let (acts, retry) = match leg {
            SecondLeg::Close => (vec![renew(), Act::Close], retry()),
            SecondLeg::Hang => (vec![renew(), Act::Hang], limited(&Act::Hang)),
            SecondLeg::Refused => (vec![answer(401).farewell().into()], retry()),
        };
        let legs = acts.len();
        let server = Wire::script(acts).await;
        let retry = retry.max_attempts(1).send_tracking(tracks);
        let client = above(layer, Http::Unprepared, retry);
        let outcome = send(call.to(&client, &server.url("/orders"))).await;
        let seen = server.saw(legs).await;
        assert_eq!(seen.len(), legs, "{row}");
        call.check_all_arrived(&seen, &row);
        let certainty = outcome.report.certainty();
        assert_eq!(certainty, Certainty::Unknown, "{row}");
    })
    .await;
}

#[tokio::test]
async fn a_second_leg_from_memory_makes_for_no_false_certainty() {
    a_second_leg(Renews::FromMemory, true).await;
}

#[tokio::test]
async fn without_tracking_a_second_leg_from_a_copy_makes_for_no_false_certainty() {
    a_second_leg(Renews::IfItCan, false).await;
    a_second_leg(Renews::OrFails, false).await;
}

/// Both kinds do what they are for where they can.
#[tokio::test]
async fn a_layer_that_renews_is_followed_by_the_answer_to_its_second_leg() {
    for (layer, tracks) in [(Renews::FromMemory, true), (Renews::IfItCan, false)] {
        for call in Call::POSTS {
            let row = format!("{layer:?}, {call:?}");
            let server = Wire::script([answer(401), answer(201)]).await;
            let client = above(layer, Http::Unprepared, retry().send_tracking(tracks));
            let outcome = send(call.to(&client, &server.url("/orders"))).await;
            let seen = server.saw(2).await;
            assert_eq!(seen.len(), 2, "{row}");
            call.check_all_arrived(&seen, &row);
            assert_eq!(outcome.told(), call.is_done(1), "{row}");
        }
    }
}

fn reqwest_retry()
-> reqwest_retry::RetryTransientMiddleware<reqwest_retry::policies::ExponentialBackoff> {
    let policy = reqwest_retry::policies::ExponentialBackoff::builder()
        .retry_bounds(Duration::from_nanos(1), Duration::from_nanos(2))
        .build_with_max_retries(2);
    reqwest_retry::RetryTransientMiddleware::new_with_policy(policy)
}

#[tokio::test]
async fn reqwest_retry_below_cannot_copy_a_tracked_body_and_sends_nothing() {
    for http in Http::BOTH {
        let server = Wire::script([Act::Close]).await;
        let client = above(reqwest_retry(), http, retry());
        let outcome = send(Call::Post.to(&client, &server.url("/orders"))).await;
        assert_eq!(server.connections(), 0, "{http:?}");
        let certainty = outcome.report.certainty();
        assert_eq!(certainty, Certainty::NotSent, "{http:?}");
    }
}

/// It sends the order again after a 503, and what it reports in the end is a closed port.
#[tokio::test]
async fn reqwest_retry_below_without_tracking_makes_for_no_false_certainty() {
    for http in Http::BOTH {
        for call in Call::POSTS {
            let row = format!("{http:?}, {call:?}");
            let server = Wire::script([answer(503).farewell()]).await;
            let retry = retry().max_attempts(1).send_tracking(false);
            let client = above(reqwest_retry(), http, retry);
            let outcome = send(call.to(&client, &server.url("/orders"))).await;
            assert_eq!(server.saw(1).await.len(), 1, "{row}");
            assert!(outcome.result.is_err(), "{row}");
            let certainty = outcome.report.certainty();
            assert_eq!(certainty, Certainty::Unknown, "{row}");
        }
    }
}

// ---- Redirects ----

const LOCAL: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

/// Where an order is redirected to.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Hop {
    SameOrigin,
    OtherPort,
    OtherHost,
    OutOfTls,
}

impl Hop {
    const ALL: [Self; 4] = [
        Self::SameOrigin,
        Self::OtherPort,
        Self::OtherHost,
        Self::OutOfTls,
    ];
}

/// A shop that redirects its orders, and the place where they are redirected to.
struct Shop {
    hop: Hop,
    /// The shop is behind it.
    gate: Gate,
    shop: Wire,
    /// Elsewhere, where the hop leads away from the shop.
    other: Wire,
    certificate: Certificate,
}

impl Shop {
    async fn redirects(status: u16, hop: Hop) -> Self {
        let certificate = Certificate::new("shop.test");
        let other = Wire::script([answer(200)]).await;
        let port = other.address().port();
        let location = match hop {
            Hop::SameOrigin => "/moved".to_owned(),
            Hop::OtherPort | Hop::OutOfTls => format!("http://shop.test:{port}/moved"),
            // The port of the shop itself: see below.
            Hop::OtherHost => "//other.test:PORT/moved".to_owned(),
        };
        let shop = Wire::routes(move |seen| match &*seen.path {
            "/orders" => {
                let host = seen.headers["host"].to_str().expect("ASCII");
                let (_, port) = host.split_once(':').expect("a port");
                redirect(status, location.replace("PORT", port)).into()
            }
            _ => answer(200).into(),
        })
        .await;
        let gate = Gate::tls(certificate.offers("http/1.1"), shop.address()).await;
        Self {
            hop,
            gate,
            shop,
            other,
            certificate,
        }
    }

    fn url(&self) -> String {
        match self.hop {
            Hop::OutOfTls => format!("https://shop.test:{}/orders", self.gate.address().port()),
            _ => format!("http://shop.test:{}/orders", self.shop.address().port()),
        }
    }

    fn client(&self, http: Http) -> ClientWithMiddleware {
        let builder = http
            .builder()
            .tls_certs_only([self.certificate.root()])
            .resolve("shop.test", LOCAL)
            .resolve("other.test", LOCAL);
        let retry = retry().client_is_prepared(http == Http::Prepared);
        over(builder.build().expect("a client"), retry)
    }

    fn at_home(&self) -> Vec<Seen> {
        let is_order = |seen: &Seen| seen.path == "/orders";
        self.shop.requests().into_iter().filter(is_order).collect()
    }

    /// What came to the place that the order was redirected to.
    fn moved(&self) -> Vec<Seen> {
        let is_moved = |seen: &Seen| seen.path == "/moved";
        let all = [self.shop.requests(), self.other.requests()].concat();
        all.into_iter().filter(is_moved).collect()
    }
}

/// Whether it gets there: a prepared client keeps keyed and unsafe operations at their origin.
fn is_carried(http: Http, hop: Hop) -> bool {
    http == Http::Unprepared || hop == Hop::SameOrigin
}

/// An order, redirected with its body.
#[tokio::test]
async fn case_24_a_key_goes_with_its_order_or_both_stay() {
    for hop in Hop::ALL {
        for http in Http::BOTH {
            for (status, call) in rows([307, 308], Call::POSTS) {
                let row = format!("{status}, {hop:?}, {http:?}, {call:?}");
                let shop = Shop::redirects(status, hop).await;
                let outcome = send(call.to(&shop.client(http), &shop.url())).await;
                let (home, moved) = (shop.at_home(), shop.moved());
                call.check_all_arrived(&home, &row);
                call.check_all_arrived(&moved, &row);
                let (sends, told) = if is_carried(http, hop) {
                    // Once more in a body that reqwest can repeat.
                    ((2, 1), call.is_done(1))
                } else {
                    let next = NextStep::FixRequest;
                    (
                        (1, 0),
                        Told {
                            next,
                            ..call.is_done(1)
                        },
                    )
                };
                assert_eq!((home.len(), moved.len()), sends, "{row}");
                assert_eq!(outcome.told(), told, "{row}");
            }
        }
    }
}

/// An order that has been carried out, and the page that tells of it.
#[tokio::test]
async fn case_24_a_key_goes_along_to_the_receipt_or_both_stay() {
    for hop in Hop::ALL {
        for http in Http::BOTH {
            for call in Call::POSTS {
                let row = format!("{hop:?}, {http:?}, {call:?}");
                let shop = Shop::redirects(303, hop).await;
                let outcome = send(call.to(&shop.client(http), &shop.url())).await;
                let home = shop.at_home();
                assert_eq!(home.len(), 1, "{row}");
                call.check_all_arrived(&home, &row);
                let moved = shop.moved();
                assert_eq!(moved.len(), usize::from(is_carried(http, hop)), "{row}");
                for seen in &moved {
                    let key = call.key().map(|key| key.as_str().to_owned());
                    assert_eq!(seen.line(), "GET /moved", "{row}");
                    assert_eq!(seen.keys(), Vec::from_iter(key), "{row}");
                }
                let told = match http {
                    Http::Prepared => call.is_done(1),
                    // It cannot tell what made another request of the order.
                    Http::Unprepared => call.ends(1, None, Certainty::Unknown),
                };
                assert_eq!(outcome.told(), told, "{row}");
            }
        }
    }
}

/// What has no key and may be repeated has nothing to lose elsewhere; what has a key stays with it,
/// whatever its method.
#[tokio::test]
async fn case_24_it_is_the_key_that_keeps_an_idempotent_request_at_home() {
    for hop in Hop::ALL {
        for has_key in [false, true] {
            let row = format!("{hop:?}, key: {has_key}");
            let shop = Shop::redirects(307, hop).await;
            let client = shop.client(Http::Prepared);
            let mut request = client.get(shop.url());
            if has_key {
                request = request.with_extension(key("order-17"));
            }
            let outcome = send(request).await;
            let is_carried = !has_key || hop == Hop::SameOrigin;
            assert_eq!(shop.moved().len(), usize::from(is_carried), "{row}");
            let status = if is_carried { 200 } else { 307 };
            let seen = outcome.status().map(|status| status.as_u16());
            assert_eq!(seen, Some(status), "{row}");
        }
    }
}

/// 307, then read and closed: attempt 2 starts at the original URL with the same key, and what has
/// no key is not sent again.
#[tokio::test]
async fn case_24_a_retry_starts_at_home_again_after_an_order_failed_elsewhere() {
    for call in Call::POSTS {
        let other = Wire::script([Act::Close, answer(201).into()]).await;
        let server = Wire::script([redirect(307, other.url("/moved"))]).await;
        let client = Http::Unprepared.client(retry());
        let outcome = send(call.to(&client, &server.url("/orders"))).await;
        let expected = match call {
            Call::Post => call.gives_up(Certainty::Unknown),
            _ => call.is_done(2),
        };
        let away = other.saw(expected.attempts).await;
        let home = server.saw(2 * expected.attempts).await;
        let sends = (home.len(), away.len());
        assert_eq!(
            sends,
            (2 * expected.attempts, expected.attempts),
            "{call:?}"
        );
        call.check_all_arrived(&home, "at home");
        call.check_all_arrived(&away, "away");
        assert!(home.iter().all(|seen| seen.path == "/orders"), "{call:?}");
        assert_eq!(outcome.told(), expected, "{call:?}");
    }
}

// ---- HTTP/2 ----

#[cfg(feature = "http2")]
mod http2 {
    use std::sync::Arc;

    use bytes::Bytes;
    use h2::Reason;
    use http::Version;
    use reqwest_idempotent_retry::RetryBudget;

    use super::net::http2::{Http2, Reply};
    use super::*;

    const REFUSED: Reply = Reply::Reset(Reason::REFUSED_STREAM);
    const DONE: Reply = Reply::Status(200);

    /// The two ways to say "not processed" (RFC 9113 §8.7).
    const REFUSALS: [Reply; 2] = [REFUSED, Reply::GoAway(0, Reason::NO_ERROR)];

    /// The same of the second stream of a connection, and again of those that reqwest makes of it:
    /// after a GOAWAY on other connections.
    const LATER_REFUSALS: [[Reply; HIDDEN]; 2] = [
        [REFUSED; HIDDEN],
        [
            Reply::GoAway(1, Reason::NO_ERROR),
            Reply::GoAway(0, Reason::NO_ERROR),
            Reply::GoAway(0, Reason::NO_ERROR),
        ],
    ];

    /// Every other end of a stream.
    const OTHER_ENDS: [Reply; 8] = [
        Reply::GoAway(0, Reason::ENHANCE_YOUR_CALM),
        Reply::GoAway(1, Reason::ENHANCE_YOUR_CALM),
        Reply::GoAway(1, Reason::NO_ERROR),
        Reply::Reset(Reason::CANCEL),
        Reply::Reset(Reason::INTERNAL_ERROR),
        Reply::Reset(Reason::ENHANCE_YOUR_CALM),
        Reply::Close,
        Reply::Abort,
    ];

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Over {
        Clear,
        Tls,
    }

    impl Over {
        const BOTH: [Self; 2] = [Self::Clear, Self::Tls];
    }

    /// An HTTP/2 server, and the way to it.
    struct Site {
        server: Http2,
        tls: Option<(Gate, Certificate)>,
    }

    impl Site {
        async fn script(over: Over, replies: impl IntoIterator<Item = Reply>) -> Self {
            Self::new(over, Http2::script(replies).await).await
        }

        async fn new(over: Over, server: Http2) -> Self {
            if over == Over::Clear {
                return Self { server, tls: None };
            }
            let certificate = Certificate::new("127.0.0.1");
            let gate = Gate::tls(certificate.offers("h2"), server.address()).await;
            let tls = Some((gate, certificate));
            Self { server, tls }
        }

        fn url(&self, path: &str) -> String {
            match &self.tls {
                None => self.server.url(path),
                Some((gate, _)) => gate.https(path),
            }
        }

        fn http(&self, http: Http) -> reqwest::Client {
            let builder = match &self.tls {
                None => http.builder().http2_prior_knowledge(),
                Some((_, certificate)) => http.builder().tls_certs_only([certificate.root()]),
            };
            builder.build().expect("a client")
        }

        fn client(&self, http: Http, retry: RetryMiddlewareBuilder) -> ClientWithMiddleware {
            let retry = retry.client_is_prepared(http == Http::Prepared);
            over(self.http(http), retry)
        }

        async fn send(&self, call: Call, http: Http, retry: RetryMiddlewareBuilder) -> Outcome {
            send(call.to(&self.client(http, retry), &self.url("/orders"))).await
        }
    }

    /// Retries that are counted, and cost nothing else.
    fn counted(tokens: u32) -> (Arc<RetryBudget>, RetryMiddlewareBuilder) {
        let budget = Arc::new(RetryBudget::fixed(tokens));
        let retry = retry().budget(Arc::clone(&budget));
        (budget, retry)
    }

    fn first(outcome: &Outcome) -> (Certainty, Option<Failure>) {
        let first = &outcome.report.attempts()[0];
        (first.certainty(), first.failure())
    }

    #[tokio::test]
    async fn case_55_what_was_refused_is_repeated_whatever_the_method() {
        for over in Over::BOTH {
            for (reply, call) in rows(REFUSALS, Call::ALL) {
                let row = format!("{over:?}, {reply:?}, {call:?}");
                let site = Site::script(over, [reply, DONE]).await;
                let (budget, retry) = counted(5);
                let outcome = site.send(call, Http::Prepared, retry).await;
                let seen = site.server.requests();
                assert_eq!(seen.len(), 2, "{row}");
                call.check_all_arrived(&seen, &row);
                assert_eq!(outcome.told(), call.is_done(2), "{row}");
                let refused = (Certainty::NotProcessed, Some(Failure::Refused));
                assert_eq!(first(&outcome), refused, "{row}");
                assert_eq!(outcome.report.attempts()[1].waited(), ms(20), "{row}");
                assert_eq!(budget.balance(), 4.0, "{row}");
                assert_eq!(outcome.response().version(), Version::HTTP_2, "{row}");
            }
        }
    }

    #[tokio::test]
    async fn case_55_what_is_always_refused_ends_with_the_attempts_or_the_budget() {
        let refused = rows(REFUSALS, Call::ALL);
        at_once(
            rows(Over::BOTH, refused),
            |(over, (reply, call))| async move {
                let row = format!("{over:?}, {reply:?}, {call:?}");
                let site = Site::script(over, [reply; ATTEMPTS]).await;
                let (budget, retry) = counted(5);
                let outcome = site.send(call, Http::Prepared, retry).await;
                assert_eq!(site.server.requests().len(), ATTEMPTS, "{row}");
                let expected = call.gives_up(Certainty::NotProcessed);
                assert_eq!(outcome.told(), expected, "{row}");
                assert_eq!(budget.balance(), 3.0, "{row}");

                let site = Site::script(over, [reply; ATTEMPTS]).await;
                let (budget, retry) = counted(1);
                let outcome = site.send(call, Http::Prepared, retry).await;
                assert_eq!(site.server.requests().len(), 2, "{row}");
                let stop = Some(StopReason::BudgetExhausted);
                let expected = call.ends(2, stop, Certainty::NotProcessed);
                assert_eq!(outcome.told(), expected, "{row}");
                assert_eq!(budget.balance(), 0.0, "{row}");
            },
        )
        .await;
    }

    #[tokio::test]
    async fn case_55_a_stream_that_was_refused_was_not_processed_and_cannot_be_repeated() {
        for over in Over::BOTH {
            for reply in REFUSALS {
                let row = format!("{over:?}, {reply:?}");
                let site = Site::script(over, [reply]).await;
                let client = site.client(Http::Prepared, retry());
                let stream = Body::wrap(http_body_util::Full::new(Bytes::from(ORDER)));
                let outcome = send(client.post(site.url("/orders")).body(stream)).await;
                let seen = site.server.requests();
                assert_eq!(seen.len(), 1, "{row}");
                Call::Post.check_all_arrived(&seen, &row);
                let stop = Some(StopReason::BodyNotReplayable);
                let expected = Call::Post.ends(1, stop, Certainty::NotProcessed);
                assert_eq!(outcome.told(), expected, "{row}");
            }
        }
    }

    #[tokio::test]
    async fn case_55_any_other_end_of_a_stream_is_unknown() {
        let ends = rows(OTHER_ENDS, Call::ALL);
        at_once(rows(Over::BOTH, ends), |(over, (reply, call))| async move {
            let row = format!("{over:?}, {reply:?}, {call:?}");
            let site = Site::script(over, [reply, DONE]).await;
            let outcome = site.send(call, Http::Prepared, retry()).await;
            let expected = match call {
                Call::Post => call.gives_up(Certainty::Unknown),
                _ => call.is_done(2),
            };
            let seen = site.server.requests();
            assert_eq!(seen.len(), expected.attempts, "{row}");
            call.check_all_arrived(&seen, &row);
            assert_eq!(outcome.told(), expected, "{row}");
            let unknown = (Certainty::Unknown, Some(Failure::Connection));
            assert_eq!(first(&outcome), unknown, "{row}");
        })
        .await;
    }

    /// A request that is refused to the end: how often it is sent, and what is said of it.
    #[derive(Clone)]
    struct Refused {
        http: Http,
        call: Call,
        tracks: bool,
        sends: usize,
        certainty: Certainty,
    }

    /// reqwest sends a refused request up to three times for each attempt of ours, in no budget of
    /// ours, if it can copy the body. A tracked one it cannot.
    const HIDDEN: usize = 3;

    fn refused_to_the_end() -> Vec<Refused> {
        use Certainty::{NotProcessed, Unknown};
        let row = |http, call, tracks, sends, certainty| Refused {
            http,
            call,
            tracks,
            sends,
            certainty,
        };
        let (prepared, not) = (Http::Prepared, Http::Unprepared);
        vec![
            row(prepared, Call::Get, true, ATTEMPTS, NotProcessed),
            row(prepared, Call::Post, true, ATTEMPTS, NotProcessed),
            row(prepared, Call::KeyedPost, true, ATTEMPTS, NotProcessed),
            row(prepared, Call::Post, false, ATTEMPTS, NotProcessed),
            row(prepared, Call::KeyedPost, false, ATTEMPTS, NotProcessed),
            row(not, Call::Get, true, HIDDEN * ATTEMPTS, NotProcessed),
            row(not, Call::Post, true, 1, Unknown),
            row(not, Call::KeyedPost, true, ATTEMPTS, Unknown),
            row(not, Call::Post, false, HIDDEN, Unknown),
            row(not, Call::KeyedPost, false, HIDDEN * ATTEMPTS, Unknown),
        ]
    }

    #[tokio::test]
    async fn case_50_reqwests_own_retries_are_off_on_a_prepared_client_and_multiply_on_any_other() {
        let ways = rows(Over::BOTH, REFUSALS);
        at_once(
            rows(ways, refused_to_the_end()),
            |((over, reply), case)| async move {
                let Refused { http, call, .. } = case;
                let row = format!("{over:?}, {reply:?}, {http:?}, {call:?}, {}", case.tracks);
                let site = Site::script(over, [reply; HIDDEN * ATTEMPTS]).await;
                let (budget, retry) = counted(5);
                let retry = retry.send_tracking(case.tracks);
                let outcome = site.send(call, http, retry).await;
                let seen = site.server.requests();
                assert_eq!(seen.len(), case.sends, "sends of: {row}");
                call.check_all_arrived(&seen, &row);
                let expected = call.gives_up(case.certainty);
                let retries = expected.attempts - 1;
                assert_eq!(outcome.told(), expected, "{row}");
                assert_eq!(budget.balance(), 5.0 - retries as f64, "{row}");
            },
        )
        .await;
    }

    /// The end of a process, which says no goodbye in TLS either.
    #[tokio::test]
    async fn case_55_a_server_that_dies_within_tls_is_unknown() {
        for call in Call::ALL {
            let server = Http2::script([Reply::Close, DONE]).await;
            let certificate = Certificate::new("127.0.0.1");
            let gate = Gate::curt_tls(certificate.offers("h2"), server.address()).await;
            let tls = Some((gate, certificate));
            let site = Site { server, tls };
            let outcome = site.send(call, Http::Prepared, retry()).await;
            let expected = match call {
                Call::Post => call.gives_up(Certainty::Unknown),
                _ => call.is_done(2),
            };
            let seen = site.server.requests();
            assert_eq!(seen.len(), expected.attempts, "{call:?}");
            call.check_all_arrived(&seen, "a death");
            assert_eq!(outcome.told(), expected, "{call:?}");
            assert_eq!(first(&outcome).0, Certainty::Unknown, "{call:?}");
        }
    }

    // ---- what was sent ----

    const TOLD_HALF: [Reply; 6] = [
        Reply::After(HALF, &Reply::Abort),
        Reply::After(HALF, &Reply::Close),
        Reply::After(HALF, &Reply::Reset(Reason::CANCEL)),
        Reply::After(HALF, &Reply::GoAway(1, Reason::NO_ERROR)),
        Reply::After(0, &Reply::Hang),
        Reply::Never,
    ];

    #[tokio::test]
    async fn a_large_body_that_is_broken_off_is_unknown() {
        for reply in TOLD_HALF {
            at_once(rows(Over::BOTH, Call::POSTS), |(over, call)| async move {
                let row = format!("{over:?}, {reply:?}, {call:?}");
                let site = Site::script(over, [reply; ATTEMPTS]).await;
                let retry = match reply {
                    Reply::After(_, Reply::Hang) | Reply::Never => retry().attempt_timeout(AMPLE),
                    _ => retry(),
                };
                let client = site.client(Http::Prepared, retry);
                let request = call.to(&client, &site.url("/orders")).body(large());
                let outcome = send(request).await;
                let expected = call.gives_up(Certainty::Unknown);
                let seen = site.server.requests();
                assert_eq!(seen.len(), expected.attempts, "{row}");
                assert!(seen.iter().all(|seen| seen.body.len() < LARGE), "{row}");
                assert_eq!(outcome.told(), expected, "{row}");
            })
            .await;
        }
    }

    /// The server's word holds for what it has read of the body too.
    #[tokio::test]
    async fn case_55_a_large_body_that_is_refused_half_way_was_not_processed() {
        for over in Over::BOTH {
            for call in Call::POSTS {
                let row = format!("{over:?}, {call:?}");
                let site = Site::script(over, [Reply::After(HALF, &REFUSED), DONE]).await;
                let client = site.client(Http::Prepared, retry());
                let request = call.to(&client, &site.url("/orders")).body(large());
                let outcome = send(request).await;
                let seen = site.server.requests();
                assert_eq!(seen.len(), 2, "{row}");
                assert!((HALF..LARGE).contains(&seen[0].body.len()), "{row}");
                assert_eq!(seen[1].body.len(), LARGE, "{row}");
                assert_eq!(outcome.told(), call.is_done(2), "{row}");
                assert_eq!(first(&outcome).0, Certainty::NotProcessed, "{row}");
            }
        }
    }

    /// With bytes, with none, and with no body at all: the head needs no window.
    #[tokio::test]
    async fn a_request_that_no_window_lets_through_is_never_called_unsent() {
        let bodies = [("bytes", Some(ORDER)), ("empty", Some("")), ("none", None)];
        at_once(
            rows(Over::BOTH, bodies),
            |(over, (name, body))| async move {
                let row = format!("{over:?}, {name}");
                let site = Site::script(over, [DONE, Reply::Never]).await;
                let client = site.client(Http::Prepared, retry().attempt_timeout(AMPLE));
                // From here on the client knows the window.
                send(client.get(site.url("/hello"))).await.response();
                let mut request = client.post(site.url("/orders"));
                if let Some(body) = body {
                    request = request.body(body);
                }
                let outcome = send(request).await;
                assert_eq!(site.server.lines(), ["GET /hello", "POST /orders"], "{row}");
                let expected = Call::Post.gives_up(Certainty::Unknown);
                assert_eq!(outcome.told(), expected, "{row}");
            },
        )
        .await;
    }

    /// In clear there is nothing to wait for before the request is written.
    #[tokio::test]
    async fn a_request_to_a_peer_that_never_says_a_word_is_unknown() {
        let peer = Raw::reads(1, Then::Hold).await;
        let http = Http::Prepared.builder().http2_prior_knowledge().build();
        let client = over(http.expect("a client"), retry().attempt_timeout(AMPLE));
        let outcome = send(Call::Post.to(&client, &peer.url("/orders"))).await;
        assert_eq!(peer.read().len(), 1);
        let expected = Call::Post.gives_up(Certainty::Unknown);
        assert_eq!(outcome.told(), expected);
    }

    fn one_stream(h2: &mut h2::server::Builder) {
        h2.max_concurrent_streams(1);
    }

    /// The connection has taken the request, and keeps it until the other one is done: it has not
    /// been sent, but nobody can stop it any more.
    #[tokio::test]
    async fn a_request_that_waits_for_a_stream_of_its_connection_is_unknown() {
        at_once(Over::BOTH, |over| async move {
            let replies = [DONE, Reply::Hang, DONE, DONE];
            let server = Http2::tuned(replies, one_stream).await;
            let site = Site::new(over, server).await;
            let http = site.http(Http::Prepared);
            let client = super::over(http.clone(), retry().attempt_timeout(AMPLE));
            // From here on the client knows of the limit.
            send(client.get(site.url("/hello"))).await.response();
            let hanging = tokio::spawn(http.get(site.url("/slow")).send());
            site.server.saw(2).await;
            // The first is in the hands of the connection, the second in its queue.
            for waiting in ["first", "second"] {
                let row = format!("{over:?}, {waiting}");
                let outcome = send(Call::Post.to(&client, &site.url("/orders"))).await;
                assert_eq!(site.server.lines(), ["GET /hello", "GET /slow"], "{row}");
                let expected = Call::Post.gives_up(Certainty::Unknown);
                assert_eq!(outcome.told(), expected, "{row}");
            }
            hanging.abort();
            send(client.get(site.url("/hello"))).await.response();
            // What was in the hands of the connection was given up, and is sent all the same.
            let lines = ["GET /hello", "GET /slow", "POST /orders", "GET /hello"];
            assert_eq!(site.server.lines(), lines, "{over:?}");
        })
        .await;
    }

    /// Where the protocol is known beforehand there is to be one connection, and whoever comes
    /// second waits for it to be made. That is before the request is in anyone's hands.
    #[tokio::test]
    async fn a_request_that_waits_for_a_connection_in_the_making_is_never_sent() {
        let peer = Raw::reads(1, Then::Hold).await;
        let http = Http::Prepared.builder().http2_prior_knowledge().build();
        let http = http.expect("a client");
        let first = tokio::spawn(http.get(peer.https("/slow")).send());
        peer.connected(1).await;
        let retry = retry().max_attempts(1).attempt_timeout(LIMIT);
        let outcome = send(Call::Post.to(&over(http, retry), &peer.https("/orders"))).await;
        assert_eq!(peer.read().len(), 1, "connections");
        let stop = Some(StopReason::AttemptsExhausted);
        let expected = Call::Post.ends(1, stop, Certainty::NotSent);
        assert_eq!(outcome.told(), expected);
        first.abort();
    }

    // ---- redirects ----

    /// The order has been carried out, and what was refused is the page that tells of it.
    #[tokio::test]
    async fn case_24_what_is_refused_after_a_303_is_not_the_order() {
        const AWAY: Reply = Reply::Redirect(303, "/receipt");
        for over in Over::BOTH {
            for (refusals, call) in rows(LATER_REFUSALS, Call::POSTS) {
                for http in Http::BOTH {
                    let row = format!("{over:?}, {refusals:?}, {call:?}, {http:?}");
                    // reqwest repeats what it can copy, which is the GET alone.
                    let gets = match http {
                        Http::Prepared => 1,
                        Http::Unprepared => HIDDEN,
                    };
                    let expected = call.gives_up(Certainty::Unknown);
                    let attempt = [&[AWAY], &refusals[..gets]].concat();
                    let site = Site::script(over, attempt.repeat(expected.attempts)).await;
                    let outcome = site.send(call, http, retry()).await;
                    let lines = site.server.lines();
                    let attempt = [&["POST /orders"][..], &vec!["GET /receipt"; gets]].concat();
                    assert_eq!(lines, attempt.repeat(expected.attempts), "{row}");
                    let posts = site.server.requests().into_iter();
                    let posts: Vec<_> = posts.filter(|seen| seen.method == "POST").collect();
                    call.check_all_arrived(&posts, &row);
                    assert_eq!(outcome.told(), expected, "{row}");
                }
            }
        }
    }

    /// Our request again, elsewhere: it might be repeated after all, but nothing is claimed.
    #[tokio::test]
    async fn case_24_what_is_refused_after_a_307_is_unknown() {
        const AWAY: Reply = Reply::Redirect(307, "/moved");
        for over in Over::BOTH {
            for call in Call::POSTS {
                let row = format!("{over:?}, {call:?}");
                let replies = [AWAY, AWAY, REFUSED, DONE];
                let site = Site::script(over, replies).await;
                let outcome = site.send(call, Http::Prepared, retry()).await;
                let expected = match call {
                    Call::Post => call.gives_up(Certainty::Unknown),
                    _ => call.is_done(2),
                };
                let lines = [
                    "POST /orders",
                    "POST /orders",
                    "POST /moved",
                    "POST /orders",
                ];
                let seen = site.server.requests();
                call.check_all_arrived(&seen, &row);
                assert_eq!(site.server.lines(), lines[..2 + expected.attempts], "{row}");
                assert_eq!(outcome.told(), expected, "{row}");
            }
        }
    }
}

// ---- Failures to connect that pass, and such that do not ----

/// The waiter's error is "request was canceled", in no `io::Error`: not to be taken for a refusal by
/// TLS, which is in none either with other TLS libraries.
#[cfg(feature = "http2")]
#[tokio::test]
async fn requests_that_wait_for_one_connection_are_repeated_if_it_fails() {
    for then in [Then::Close, Then::Reset] {
        let peer = Raw::reads(1, then).await;
        let http = Http::Prepared.builder().http2_prior_knowledge().build();
        let client = over(http.expect("a client"), retry());
        let url = peer.https("/orders");
        let order = |call: Call| send(call.to(&client, &url));
        let (one, other) = tokio::join!(order(Call::Post), order(Call::KeyedPost));
        for (call, outcome) in [(Call::Post, one), (Call::KeyedPost, other)] {
            let expected = call.gives_up(Certainty::NotSent);
            assert_eq!(outcome.told(), expected, "{call:?}, {then:?}");
        }
    }
}

/// Whether TLS was spoken is a matter of the hop that failed, not of the URL that was asked for.
#[tokio::test]
async fn case_53_a_bad_certificate_after_a_redirect_into_tls_is_met_once() {
    for http in Http::BOTH {
        let certificate = Certificate::expired("127.0.0.1");
        let server = Wire::script([answer(200)]).await;
        let gate = Gate::tls(certificate.offers("http/1.1"), server.address()).await;
        let plain = Wire::script([redirect(301, gate.https("/orders"))]).await;
        let builder = http.builder().tls_certs_only([certificate.root()]);
        let retry = retry().client_is_prepared(http == Http::Prepared);
        let client = over(builder.build().expect("a client"), retry);
        let outcome = send(client.get(plain.url("/orders"))).await;
        assert_eq!(server.connections(), 0, "{http:?}");
        assert_eq!(outcome.report.stop(), Some(StopReason::NotRetryable));
        assert_eq!(plain.saw(1).await.len(), 1, "{http:?}");
    }
}
