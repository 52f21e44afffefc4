//! What a request's headers make of its context: to the nanosecond, in virtual time.

use std::convert::Infallible;
use std::time::Duration;

use ::metrics::set_default_local_recorder;
use http::{HeaderName, HeaderValue, Request};
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use reqwest_idempotent_retry::TimeoutHeader::{Envoy, Grpc, Millis};
use reqwest_idempotent_retry::ambient::{self, Context};
use reqwest_idempotent_retry::metrics::MALFORMED;
use reqwest_idempotent_retry::server::ContextLayer;
use tokio::time::Instant;
use tower::{Layer, ServiceExt, service_fn};

use crate::support::{ms, secs};

const LEFT: HeaderName = HeaderName::from_static("x-left-ms");
const ATTEMPT: HeaderName = HeaderName::from_static("x-retry-attempt");

fn all_three() -> ContextLayer {
    ContextLayer::new().timeout_headers([Grpc, Envoy, Millis(LEFT)])
}

/// The context that a request with these headers is handled in.
async fn context(layer: &ContextLayer, headers: &[(&HeaderName, &[u8])]) -> Context {
    let handler = service_fn(|_: Request<()>| async { Ok::<_, Infallible>(ambient::current()) });
    let mut request = Request::new(());
    for &(name, value) in headers {
        let value = HeaderValue::from_bytes(value).expect("what a header may hold");
        request.headers_mut().append(name, value);
    }
    let answer = layer.layer(handler).oneshot(request).await;
    answer.expect("served").expect("in a context")
}

/// The time left in it. The clock stands still.
async fn left(layer: &ContextLayer, headers: &[(&HeaderName, &[u8])]) -> Option<Duration> {
    let context = context(layer, headers).await;
    let left = context.time_left();
    let deadline = context.deadline().map(Instant::from_std);
    assert_eq!(left, deadline.map(|deadline| deadline - Instant::now()));
    left
}

#[tokio::test(start_paused = true)]
async fn every_unit_of_a_grpc_timeout_is_read() {
    for (value, expected) in [
        ("3H", secs(3 * 3600)),
        ("3M", secs(3 * 60)),
        ("3S", secs(3)),
        ("2500m", ms(2500)),
        ("2500u", Duration::from_micros(2500)),
        ("2500n", Duration::from_nanos(2500)),
        ("99999999n", Duration::from_nanos(99_999_999)),
        ("99999999H", secs(99_999_999 * 3600)),
        ("00000001S", secs(1)),
        ("0S", secs(0)),
        ("0n", secs(0)),
    ] {
        let layer = ContextLayer::new();
        let left = left(&layer, &[(Grpc.name(), value.as_bytes())]).await;
        assert_eq!(left, Some(expected), "{value}");
        assert_eq!(layer.malformed(), 0, "{value}");
    }
}

#[tokio::test(start_paused = true)]
async fn milliseconds_are_read_from_envoys_header_and_from_one_of_your_choice() {
    for header in [Envoy, Millis(LEFT)] {
        for (value, expected) in [
            ("1500", ms(1500)),
            ("0", ms(0)),
            ("0000000000000000000000001", ms(1)),
            ("18446744073709551615", ms(u64::MAX)),
        ] {
            let layer = all_three();
            let left = left(&layer, &[(header.name(), value.as_bytes())]).await;
            assert_eq!(left, Some(expected), "{header:?} {value}");
            assert_eq!(layer.malformed(), 0, "{header:?} {value}");
        }
    }
}

#[test]
fn the_names_of_the_headers_are_the_known_ones() {
    assert_eq!(Grpc.name(), "grpc-timeout");
    assert_eq!(Envoy.name(), "x-envoy-expected-rq-timeout-ms");
    assert_eq!(Millis(LEFT).name(), "x-left-ms");
}

#[tokio::test(start_paused = true)]
async fn of_several_headers_and_lines_the_shortest_counts() {
    let layer = all_three();
    let (grpc, envoy, plain) = (Grpc, Envoy, Millis(LEFT));
    let (grpc, envoy, plain) = (grpc.name(), envoy.name(), plain.name());
    for (headers, expected) in [
        ([(grpc, "1S"), (envoy, "2000"), (plain, "3000")], 1000),
        ([(grpc, "3S"), (envoy, "1000"), (plain, "2000")], 1000),
        ([(grpc, "3S"), (envoy, "2000"), (plain, "1000")], 1000),
        ([(grpc, "3S"), (grpc, "1S"), (grpc, "2S")], 1000),
        ([(grpc, "3S"), (envoy, "0"), (plain, "1000")], 0),
    ] {
        let headers = headers.map(|(name, value)| (name, value.as_bytes()));
        assert_eq!(left(&layer, &headers).await, Some(ms(expected)));
    }
}

const LONGEST: Duration = secs(10);

#[tokio::test(start_paused = true)]
async fn the_longest_caps_what_is_told_and_serves_where_nothing_is() {
    let layer = all_three().longest(LONGEST);
    let grpc = Grpc;
    for (told, expected) in [
        (Some("60S"), LONGEST),
        (Some("99999999H"), LONGEST),
        (Some("10S"), LONGEST),
        (Some("3S"), secs(3)),
        (Some("0S"), secs(0)),
        (Some("soon"), LONGEST),
        (None, LONGEST),
    ] {
        let headers: Vec<_> = told
            .iter()
            .map(|value| (grpc.name(), value.as_bytes()))
            .collect();
        assert_eq!(left(&layer, &headers).await, Some(expected), "{told:?}");
    }
    assert_eq!(layer.malformed(), 1);
}

#[tokio::test(start_paused = true)]
async fn without_a_word_and_a_longest_there_is_no_deadline() {
    assert_eq!(left(&ContextLayer::new(), &[]).await, None);
    let context = context(&ContextLayer::new(), &[]).await;
    assert!(context.cancellation().is_some(), "but a token");
}

const NO_NUMBERS: [&[u8]; 15] = [
    b"",
    b"+5",
    b"-1",
    b"1.5",
    b"0x10",
    b"1e3",
    b"five",
    b"5 0",
    b"5,6",
    b"\xff5",
    b"5\xff",
    "\u{665}".as_bytes(), // an Arabic 5
    b"18446744073709551616",
    b"infinity",
    b"1_000",
];

#[tokio::test(start_paused = true)]
async fn what_is_not_milliseconds_is_ignored_and_counted() {
    for header in [Envoy, Millis(LEFT)] {
        let layer = all_three();
        for (before, value) in (0..).zip(NO_NUMBERS) {
            assert_eq!(layer.malformed(), before);
            let left = left(&layer, &[(header.name(), value)]).await;
            assert_eq!(left, None, "{header:?} {value:?}");
        }
        assert_eq!(layer.malformed(), NO_NUMBERS.len() as u64, "{header:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_no_grpc_timeout_is_ignored_and_counted() {
    let (grpc, layer) = (Grpc, ContextLayer::new());
    let with_a_unit = NO_NUMBERS.map(|value| [value, b"m"].concat());
    let others: [&[u8]; 13] = [
        b"",
        b"5",
        b"m",
        b"5s",
        b"5h",
        b"5x",
        b"5ms",
        b"5 m",
        b"m5",
        b"123456789m",
        b"000000001S",
        b"5\xff",
        "5\u{b5}".as_bytes(), // 5 µ
    ];
    let values: Vec<_> = with_a_unit
        .iter()
        .map(Vec::as_slice)
        .chain(others)
        .collect();
    for value in &values {
        let left = left(&layer, &[(grpc.name(), value)]).await;
        assert_eq!(left, None, "{:?}", String::from_utf8_lossy(value));
    }
    assert_eq!(layer.malformed(), values.len() as u64);
}

#[tokio::test(start_paused = true)]
async fn what_can_be_read_counts_beside_what_cannot() {
    let (layer, grpc, envoy) = (ContextLayer::new(), Grpc, Envoy);
    let headers: [(_, &[u8]); 4] = [
        (grpc.name(), b"soon"),
        (grpc.name(), b"2S"),
        (envoy.name(), b"-1"),
        (envoy.name(), b"3000"),
    ];
    assert_eq!(left(&layer, &headers).await, Some(secs(2)));
    assert_eq!(layer.clone().malformed(), 2, "clones count together");
}

#[tokio::test(start_paused = true)]
async fn headers_that_were_not_asked_for_are_not_looked_at() {
    let (grpc, envoy) = (Grpc, Envoy);
    let headers: [(_, &[u8]); 3] = [
        (grpc.name(), b"1S"),
        (envoy.name(), b"soon"),
        (&LEFT, b"3000"),
    ];
    let only_ours = ContextLayer::new().timeout_headers([Millis(LEFT)]);
    assert_eq!(left(&only_ours, &headers).await, Some(secs(3)));
    let none = ContextLayer::new().timeout_headers([]);
    assert_eq!(left(&none, &headers).await, None);
    assert_eq!((only_ours.malformed(), none.malformed()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn the_metric_names_the_header() {
    let recorder = DebuggingRecorder::new();
    let read = recorder.snapshotter();
    let _while_this_lives = set_default_local_recorder(&recorder);
    let (layer, envoy) = (all_three(), Envoy);
    for (of_ours, expected) in [("late", None), ("1000", Some(secs(1)))] {
        let headers: [(_, &[u8]); 2] = [(envoy.name(), b"soon"), (&LEFT, of_ours.as_bytes())];
        assert_eq!(left(&layer, &headers).await, expected);
    }
    let mut counted: Vec<_> = read
        .snapshot()
        .into_vec()
        .into_iter()
        .filter(|(key, ..)| key.key().name() == MALFORMED)
        .map(|(key, _, _, value)| {
            let label = key.key().labels().next().expect("a label").clone();
            (label.key().to_owned(), label.value().to_owned(), value)
        })
        .collect();
    counted.sort_by(|one, other| one.1.cmp(&other.1));
    let row = |header: &str, count| {
        let count = DebugValue::Counter(count);
        ("header".to_owned(), header.to_owned(), count)
    };
    let expected = [
        row("x-envoy-expected-rq-timeout-ms", 2),
        row("x-left-ms", 1),
    ];
    assert_eq!(counted, expected);
}

// ---- attempt ----

async fn attempt(layer: &ContextLayer, value: &[u8]) -> Option<u32> {
    context(layer, &[(&ATTEMPT, value)]).await.attempt()
}

#[tokio::test(start_paused = true)]
async fn the_attempt_is_read_where_it_is_asked_for() {
    let layer = ContextLayer::new().attempt_header(ATTEMPT);
    assert_eq!(attempt(&layer, b"1").await, Some(1));
    assert_eq!(attempt(&layer, b"4294967295").await, Some(u32::MAX));
    assert_eq!(attempt(&ContextLayer::new(), b"1").await, None);
    assert_eq!(context(&layer, &[]).await.attempt(), None);
}

#[tokio::test(start_paused = true)]
async fn what_is_no_attempt_is_ignored() {
    let layer = ContextLayer::new().attempt_header(ATTEMPT);
    let values: [&[u8]; 7] = [b"", b"0", b"-1", b"1.5", b"second", b"\xff", b"4294967296"];
    for value in values {
        assert_eq!(attempt(&layer, value).await, None, "{value:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_number_with_a_sign_is_no_attempt() {
    let layer = ContextLayer::new().attempt_header(ATTEMPT);
    assert_eq!(attempt(&layer, b"+3").await, None);
}

// ---- scopes around ----

#[tokio::test(start_paused = true)]
async fn a_layer_within_a_layer_can_only_shorten_the_time() {
    let grpc = Grpc;
    for (outer, inner, expected) in [(5, 10, 5), (10, 5, 5)] {
        let inner = ContextLayer::new().longest(secs(inner));
        let around = Context::new().deadline_in(secs(outer));
        let left = ambient::scope(around, left(&inner, &[(grpc.name(), b"1H")])).await;
        assert_eq!(left, Some(secs(expected)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_scope_around_the_layer_still_cancels() {
    let token = reqwest_idempotent_retry::CancellationToken::new();
    let around = Context::new().cancelled_by(token.clone());
    let within = ambient::scope(around, context(&ContextLayer::new(), &[])).await;
    token.cancel();
    assert!(within.cancellation().expect("a token").is_cancelled());
}
