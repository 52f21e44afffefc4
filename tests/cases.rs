//! Bug reports of other retry clients as test inputs, in virtual time. The number in a test's name
//! is the report's; the ones missing here are in `wire.rs` (real sockets) and `log.rs`.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod support;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use http::{Extensions, HeaderName};
use reqwest::{Body, Request, Response};
use reqwest_idempotent_retry::{
    Attempt, Backoff, CancellationToken, Certainty, Deadline, IdempotencyKey, Idempotent,
    KeyContract, NextStep, ReportHandle, RetryBudget, RetryErrorExt, RetryMiddleware,
    RetryMiddlewareBuilder, RetryOverride, RetryResponseExt, StatusClass, StopReason,
};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Error, Middleware, Next};
use support::{Server, Step, URL, key, ms, plain_builder, read_and_closed, refused, secs, status};
use tokio::time::Instant;

/// Thursday, 1 January 2026, 00:00:00 UTC.
const W: Duration = Duration::from_secs(1_767_225_600);

/// A wall clock that shows `W` now and moves with the virtual clock.
fn wall_clock() -> impl Fn() -> SystemTime + Send + Sync + 'static {
    let start = Instant::now();
    move || SystemTime::UNIX_EPOCH + W + start.elapsed()
}

fn client(server: &Server, builder: RetryMiddlewareBuilder) -> ClientWithMiddleware {
    server.client([builder
        .wall_clock_with(wall_clock())
        .build()
        .expect("valid settings")])
}

/// What came of one operation.
#[derive(Debug)]
struct Came {
    result: Result<Response, Error>,
    /// Attempts that the server saw.
    sends: usize,
    /// When the caller had the result.
    at: Duration,
    stop: Option<StopReason>,
    certainty: Certainty,
}

impl Came {
    fn status(&self) -> Option<u16> {
        status(&self.result).map(|status| status.as_u16())
    }
}

async fn send(server: &Server, request: reqwest_middleware::RequestBuilder) -> Came {
    let handle = ReportHandle::new();
    let result = request.with_extension(handle.clone()).send().await;
    let report = handle.report().expect("every operation is reported");
    Came {
        result,
        sends: server.sends(),
        at: server.elapsed(),
        stop: report.stop(),
        certainty: report.certainty(),
    }
}

/// One GET with these settings against this script.
async fn get(steps: impl IntoIterator<Item = Step>, builder: RetryMiddlewareBuilder) -> Came {
    let server = Server::script(steps);
    send(&server, client(&server, builder).get(URL)).await
}

/// One POST of five bytes, with a key or without.
async fn post(
    with_key: bool,
    steps: impl IntoIterator<Item = Step>,
    builder: RetryMiddlewareBuilder,
) -> Came {
    let server = Server::script(steps);
    let request = client(&server, builder).post(URL).body("order");
    let request = match with_key {
        true => request.with_extension(key("order-17")),
        false => request,
    };
    let came = send(&server, request).await;
    let expected: &[&str] = if with_key { &["order-17"] } else { &[] };
    for lines in server.key_lines() {
        assert_eq!(lines, expected, "every attempt carries the key, once");
    }
    came
}

// ---- R1: Retry-After, read ----

#[tokio::test(start_paused = true)]
async fn case_01_retry_after_is_digits_or_a_date_and_nothing_else() {
    let waited = async |value: &str| {
        let came = get(
            [Step::retry_after(429, value), Step::status(200)],
            plain_builder(),
        )
        .await;
        assert_eq!((came.sends, came.status()), (2, Some(200)), "{value:?}");
        came.at
    };
    assert_eq!(waited("2").await, secs(2));
    for ignored in [
        "1m0s", "2s", "", "abc", "0x10", "1e3", "+2", "٢", "1.2", "299.997", "1;2",
    ] {
        assert_eq!(waited(ignored).await, ms(100), "{ignored:?}");
    }
    // A list, as a proxy makes of two lines: the longest wish counts.
    for list in ["1,3", "3, 1", "3,nonsense,1"] {
        assert_eq!(waited(list).await, secs(3), "{list:?}");
    }
    let two_lines = Step::after(0, 429, &[("retry-after", "1"), ("retry-after", "3")]);
    let came = get([two_lines, Step::status(200)], plain_builder()).await;
    assert_eq!(came.at, secs(3));
}

#[tokio::test(start_paused = true)]
async fn case_02_impossible_dates_are_not_repaired() {
    for ignored in [
        "-3",
        "3.",
        "12 Jan",
        "Tue, 31 Feb 2026 00:00:03 GMT",
        "Mon, 01 Jan 2026 00:00:03 GMT",
        "Thu, 01 Jan 2026 00:00:03 +0000",
        "2026-01-01T00:00:03Z",
    ] {
        let came = get(
            [Step::retry_after(429, ignored), Step::status(200)],
            plain_builder(),
        )
        .await;
        assert_eq!((came.sends, came.at), (2, ms(100)), "{ignored:?}");
    }
    // The three forms of RFC 9110 §5.6.7, against the local clock and against the server's own.
    for date in [
        "Thu, 01 Jan 2026 00:00:03 GMT",
        "Thursday, 01-Jan-26 00:00:03 GMT",
        "Thu Jan  1 00:00:03 2026",
    ] {
        let came = get(
            [Step::retry_after(429, date), Step::status(200)],
            plain_builder(),
        )
        .await;
        assert_eq!(came.at, secs(3), "{date}");
        let skewed = Step::after(
            0,
            429,
            &[
                ("retry-after", date),
                ("date", "Wed, 31 Dec 2025 23:59:58 GMT"),
            ],
        );
        let came = get([skewed, Step::status(200)], plain_builder()).await;
        assert_eq!(came.at, secs(5), "{date} by the server's clock");
    }
    let came = get([Step::retry_after(429, "2026")], plain_builder()).await;
    assert_eq!(
        (came.sends, came.stop),
        (1, Some(StopReason::RetryAfterTooLong))
    );
    assert_eq!((came.status(), came.at), (Some(429), Duration::ZERO));
}

#[tokio::test(start_paused = true)]
async fn case_04_millisecond_headers_are_opt_in_and_have_an_order() {
    let listed = || {
        plain_builder().retry_after_ms_headers([
            HeaderName::from_static("retry-after-ms"),
            HeaderName::from_static("x-ms-retry-after-ms"),
        ])
    };
    let both = || Step::after(0, 429, &[("retry-after-ms", "250"), ("retry-after", "1")]);
    let came = get([both(), Step::status(200)], listed()).await;
    assert_eq!(came.at, ms(250));
    let second = Step::after(0, 429, &[("x-ms-retry-after-ms", "700")]);
    assert_eq!(get([second, Step::status(200)], listed()).await.at, ms(700));
    assert_eq!(
        get([both(), Step::status(200)], plain_builder()).await.at,
        secs(1)
    );
    let unreadable = Step::after(0, 429, &[("retry-after-ms", "abc"), ("retry-after", "1")]);
    assert_eq!(
        get([unreadable, Step::status(200)], listed()).await.at,
        secs(1)
    );
}

// ---- R2: longer than there is time ----

#[tokio::test(start_paused = true)]
async fn case_05_a_wait_that_cannot_fit_is_not_begun() {
    let within = |deadline| plain_builder().deadline(deadline);
    for too_long in ["60", "Thu, 01 Jan 2026 00:01:00 GMT"] {
        let came = get([Step::retry_after(429, too_long)], within(secs(30))).await;
        assert_eq!((came.sends, came.at), (1, Duration::ZERO));
        assert_eq!(came.stop, Some(StopReason::RetryAfterTooLong));
        assert_eq!(came.status(), Some(429));
    }
    let came = get(
        [Step::retry_after(429, "29"), Step::status(200)],
        within(secs(30)),
    )
    .await;
    assert_eq!((came.sends, came.at), (2, secs(29)));
    // Where the header fits but the backoff is what does not, it is the deadline.
    let slow = plain_builder()
        .backoff(Backoff::fixed([secs(40)]))
        .deadline(secs(30));
    let came = get([Step::retry_after(429, "29")], slow).await;
    assert_eq!(came.stop, Some(StopReason::DeadlineTooClose));
}

#[tokio::test(start_paused = true)]
async fn case_06_the_longest_wait_is_capped_even_without_a_deadline() {
    let patient = || {
        plain_builder()
            .deadline(Duration::MAX)
            .max_retry_after(secs(120))
    };
    let came = get([Step::retry_after(503, "3600")], patient()).await;
    assert_eq!((came.sends, came.at), (1, Duration::ZERO));
    assert_eq!(
        (came.stop, came.status()),
        (Some(StopReason::RetryAfterTooLong), Some(503))
    );
    let came = get(
        [Step::retry_after(503, "100"), Step::status(200)],
        patient(),
    )
    .await;
    assert_eq!((came.sends, came.at), (2, secs(100)));
    // The builder's own cap is 60 s, inclusive.
    let unset = || RetryMiddleware::builder().random_with(|| 0.0);
    let came = get([Step::retry_after(503, "61")], unset()).await;
    assert_eq!(came.stop, Some(StopReason::RetryAfterTooLong));
    let came = get([Step::retry_after(503, "60"), Step::status(200)], unset()).await;
    assert_eq!((came.sends, came.at), (2, secs(60)));
    // A number beyond every type is a number, and too long.
    let came = get(
        [Step::retry_after(503, "99999999999999999999999999")],
        patient(),
    )
    .await;
    assert_eq!(came.stop, Some(StopReason::RetryAfterTooLong));
}

// ---- R3: zero and past ----

#[tokio::test(start_paused = true)]
async fn case_08_zero_and_past_dates_leave_the_backoff_as_it_is() {
    for value in ["0", "Wed, 31 Dec 2025 23:59:50 GMT"] {
        let steps = (0..5).map(|_| Step::retry_after(429, value));
        let server = Server::script(steps);
        let settings = plain_builder().max_attempts(1000).deadline(secs(2));
        let came = send(&server, client(&server, settings).get(URL)).await;
        assert_eq!(server.starts(), [0, 100, 300, 700, 1500], "{value}");
        assert_eq!(
            (came.at, came.stop),
            (ms(1500), Some(StopReason::DeadlineTooClose))
        );
        assert_eq!(came.status(), Some(429));
    }
}

// ---- R4: used wrongly ----

#[tokio::test(start_paused = true)]
async fn case_10_jitter_only_adds_and_each_answer_speaks_for_itself() {
    let step = ms(100);
    let mut waits = HashSet::new();
    for seed in 0..500 {
        let random = Mutex::new(fastrand::Rng::with_seed(seed));
        let jittered = plain_builder()
            .backoff(Backoff::full_jitter(step, secs(1)))
            .random_with(move || support::lock(&random).f64());
        let came = get([Step::retry_after(429, "1"), Step::status(200)], jittered).await;
        // Timers tick in milliseconds, upwards.
        assert!(
            came.at >= secs(1) && came.at <= secs(1) + step + ms(1),
            "{:?}",
            came.at
        );
        waits.insert(came.at);
    }
    assert!(waits.len() > 50, "{} different waits", waits.len());
    let steps = [
        Step::retry_after(429, "2"),
        Step::status(503),
        Step::status(200),
    ];
    let server = Server::script(steps);
    let came = send(&server, client(&server, plain_builder()).get(URL)).await;
    assert_eq!((server.starts(), came.at), (vec![0, 2000, 2200], ms(2200)));
}

// ---- D1: attempt timeout and deadline ----

#[tokio::test(start_paused = true)]
async fn case_12_attempts_share_the_deadline_and_never_renew_it() {
    let within = |deadline| plain_builder().attempt_timeout(ms(600)).deadline(deadline);
    let server = Server::script([Step::Hang, Step::Hang]);
    let came = send(&server, client(&server, within(secs(1))).get(URL)).await;
    assert_eq!((server.starts(), came.at), (vec![0, 700], secs(1)));
    let limits: Vec<_> = server
        .seen()
        .iter()
        .map(|seen| seen.attempt.and_then(|a| a.limit()))
        .collect();
    assert_eq!(limits, [Some(ms(600)), Some(ms(300))]);
    assert_eq!(came.stop, Some(StopReason::DeadlineTooClose));
    assert_eq!(came.certainty, Certainty::Unknown);
    assert!(
        came.result
            .expect_err("no answer")
            .retry_error()
            .expect("ours")
            .is_timeout()
    );
    let came = get([Step::Hang, Step::status(200)], within(secs(5))).await;
    assert_eq!(
        (came.sends, came.at, came.status()),
        (2, ms(700), Some(200))
    );
}

#[tokio::test(start_paused = true)]
async fn case_14_attempt_timeout_deadline_and_cancel_are_three_signals() {
    let limited = || plain_builder().attempt_timeout(secs(1));
    let came = get([Step::Hang, Step::status(200)], limited()).await;
    assert_eq!(
        (came.sends, came.at, came.status()),
        (2, ms(1100), Some(200))
    );
    let came = post(true, [Step::Hang, Step::status(200)], limited()).await;
    assert_eq!(
        (came.sends, came.at, came.status()),
        (2, ms(1100), Some(200))
    );
    let came = post(false, [Step::Hang], limited()).await;
    assert_eq!(
        (came.sends, came.stop),
        (1, Some(StopReason::UnsafeToRepeat))
    );
    assert_eq!(came.certainty, Certainty::Unknown);

    let server = Server::script([Step::Hang]);
    let handle = ReportHandle::new();
    let request = client(&server, limited())
        .get(URL)
        .with_extension(handle.clone());
    assert!(tokio::time::timeout(ms(500), request.send()).await.is_err());
    tokio::time::sleep(secs(10)).await;
    assert_eq!(server.sends(), 1);
    assert_eq!(
        handle.report().expect("told").stop(),
        Some(StopReason::Cancelled)
    );
}

// ---- D2: past the deadline ----

#[tokio::test(start_paused = true)]
async fn case_15_nothing_waits_or_starts_past_the_deadline() {
    let fixed = || plain_builder().backoff(Backoff::fixed([ms(700)]));
    let came = get(
        [Step::status(503), Step::status(503)],
        fixed().deadline(secs(1)),
    )
    .await;
    assert_eq!((came.sends, came.at), (2, ms(700)));
    assert_eq!(
        (came.status(), came.stop),
        (Some(503), Some(StopReason::DeadlineTooClose))
    );

    let server = Server::script([]);
    let past = std::time::Instant::from(Instant::now());
    tokio::time::sleep(ms(1)).await;
    let request = client(&server, plain_builder())
        .get(URL)
        .with_extension(Deadline::at(past));
    let came = send(&server, request).await;
    assert_eq!(
        (came.sends, came.stop),
        (0, Some(StopReason::DeadlineTooClose))
    );
    assert_eq!(came.certainty, Certainty::NotSent);

    // 100 ms are left after the wait, and at least 200 ms are wanted.
    let least = fixed().deadline(ms(800)).minimum_attempt(ms(200));
    let came = get([Step::status(503)], least).await;
    assert_eq!((came.sends, came.at), (1, Duration::ZERO));
    assert_eq!(came.stop, Some(StopReason::DeadlineTooClose));
}

// ---- D4: clocks ----

#[tokio::test(start_paused = true)]
async fn case_19_a_step_of_the_wall_clock_changes_nothing() {
    for back in [false, true] {
        let reads = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&reads);
        let stepping = move || {
            let now = SystemTime::UNIX_EPOCH + W;
            match (counted.fetch_add(1, Ordering::Relaxed), back) {
                (0, _) => now,
                (_, true) => now - secs(3600),
                (_, false) => now + secs(3600),
            }
        };
        let date = Step::retry_after(503, "Thu, 01 Jan 2026 00:00:01 GMT");
        let server = Server::script([date, Step::status(503), Step::status(200)]);
        let layer = plain_builder().deadline(secs(2)).wall_clock_with(stepping);
        let client = server.client([layer.build().expect("valid")]);
        let came = send(&server, client.get(URL)).await;
        assert_eq!(
            (came.sends, came.at, came.status()),
            (3, ms(1200), Some(200))
        );
        // Read once, to turn the date into a span.
        assert_eq!(reads.load(Ordering::Relaxed), 1);
    }
    let tiny = plain_builder().backoff(Backoff::full_jitter(Duration::from_micros(1), ms(1)));
    let server =
        Server::script((0..20_000).map(|n| Step::status(if n % 2 == 0 { 503 } else { 200 })));
    let client = client(&server, tiny);
    for _ in 0..10_000 {
        let answer = client.get(URL).send().await.expect("no negative span");
        assert_eq!(answer.status(), 200);
    }
    assert_eq!(server.sends(), 20_000);
}

// ---- I1: one key for all attempts ----

/// An inner layer that changes the credential of every attempt.
struct NewToken(AtomicUsize);

#[async_trait::async_trait]
impl Middleware for NewToken {
    async fn handle(
        &self,
        mut request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let token = format!("Bearer {}", self.0.fetch_add(1, Ordering::Relaxed));
        let value = token.parse().expect("a header value");
        request.headers_mut().insert("authorization", value);
        next.run(request, extensions).await
    }
}

#[tokio::test(start_paused = true)]
async fn case_20_the_key_is_made_once_for_all_attempts() {
    let server = Server::script([
        Step::status(503),
        Step::Fail(read_and_closed()),
        Step::retry_after(429, "1"),
        Step::status(200),
        Step::status(200),
    ]);
    let layer = plain_builder()
        .key_contract(KeyContract::default())
        .build()
        .expect("valid");
    let client = ClientBuilder::new(support::plain_http())
        .with(layer)
        .with(NewToken(AtomicUsize::new(0)))
        .with(server.clone())
        .build();
    let answer = client
        .post(URL)
        .body("order")
        .send()
        .await
        .expect("an answer");
    let second = client
        .post(URL)
        .body("order")
        .send()
        .await
        .expect("an answer");
    let lines = server.key_lines();
    assert_eq!(lines.len(), 5);
    let first_key = &lines[0];
    assert!(first_key.len() == 1 && !first_key[0].is_empty());
    assert!(lines[..4].iter().all(|line| line == first_key), "{lines:?}");
    assert_ne!(&lines[4], first_key);
    assert_eq!(
        answer.idempotency_key().expect("a key").as_str(),
        first_key[0]
    );
    assert_eq!(
        second.idempotency_key().expect("a key").as_str(),
        lines[4][0]
    );
    let tokens: HashSet<_> = server
        .seen()
        .iter()
        .map(|seen| seen.headers["authorization"].clone())
        .collect();
    assert_eq!(tokens.len(), 5);
    // Lower layers find the key in the extensions, from the first attempt on.
    assert!(
        server
            .seen()
            .iter()
            .zip(&lines)
            .all(|(seen, line)| { seen.key.as_ref().is_some_and(|key| key.as_str() == line[0]) })
    );
}

// ---- I2: the caller's key ----

#[tokio::test(start_paused = true)]
async fn case_22_the_callers_header_is_adopted_never_doubled() {
    for name in ["idempotency-key", "Idempotency-Key", "IDEMPOTENCY-KEY"] {
        let server = Server::script([Step::status(503), Step::status(200)]);
        let contract = plain_builder().key_contract(KeyContract::default());
        let request = client(&server, contract)
            .post(URL)
            .header(name, "mine")
            .body("order");
        let came = send(&server, request).await;
        assert_eq!(server.key_lines(), [["mine"], ["mine"]]);
        assert!(
            server
                .seen()
                .iter()
                .all(|seen| seen.key == Some(key("mine")))
        );
        assert_eq!(
            came.result.expect("an answer").idempotency_key(),
            Some(&key("mine"))
        );
    }
    // The same key in both places is one key.
    let server = Server::script([Step::status(200)]);
    let request = client(&server, plain_builder())
        .post(URL)
        .header("idempotency-key", "mine");
    let came = send(&server, request.with_extension(key("mine"))).await;
    assert_eq!(
        (came.status(), server.key_lines()),
        (Some(200), vec![vec!["mine".to_owned()]])
    );

    let refused_input: [&[(&str, &str)]; 4] = [
        &[("idempotency-key", "other")],
        &[("idempotency-key", "one"), ("idempotency-key", "two")],
        &[("idempotency-key", "two words")],
        &[("idempotency-key", "")],
    ];
    for headers in refused_input {
        let server = Server::script([]);
        let mut request = client(&server, plain_builder())
            .post(URL)
            .with_extension(key("mine"));
        for &(name, value) in headers {
            let mut lines = http::HeaderMap::new();
            lines.append(
                HeaderName::try_from(name).expect("a name"),
                value.parse().expect("a value"),
            );
            request = request.header(name, &lines[name]);
        }
        let came = send(&server, request).await;
        assert_eq!(
            (came.sends, came.stop),
            (0, Some(StopReason::InvalidInput)),
            "{headers:?}"
        );
        assert_eq!(came.certainty, Certainty::NotSent);
        let error = came.result.expect_err("refused");
        let error = error.retry_error().expect("ours");
        assert_eq!(error.next_step(), NextStep::FixRequest);
        let source = std::error::Error::source(error)
            .expect("a source")
            .to_string();
        assert!(source.starts_with("idempotency key "), "{source}");
    }
}

/// An inner layer that loses the extensions.
struct ClearsMap;

#[async_trait::async_trait]
impl Middleware for ClearsMap {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        extensions.clear();
        next.run(request, extensions).await
    }
}

#[tokio::test(start_paused = true)]
async fn case_25_the_key_survives_whatever_happens_to_the_map() {
    let contract = || {
        plain_builder()
            .key_contract(KeyContract::default())
            .build()
            .expect("valid")
    };
    let steps = || [Step::status(503), Step::status(200)];

    // (a) `build` + `execute` loses the map: the operation gets a key of its own, one for all attempts.
    let server = Server::script(steps());
    let with_contract = server.client([contract()]);
    let request = with_contract
        .post(URL)
        .body("order")
        .with_extension(key("lost"));
    with_contract
        .execute(request.build().expect("a request"))
        .await
        .expect("an answer");
    let lines = server.key_lines();
    assert!(
        lines[0] == lines[1] && lines[0].len() == 1 && lines[0][0] != "lost",
        "{lines:?}"
    );

    // (b) A layer below clears the map.
    let server = Server::script(steps());
    let clearing = ClientBuilder::new(support::plain_http())
        .with(contract())
        .with(ClearsMap)
        .with(server.clone())
        .build();
    clearing
        .post(URL)
        .body("order")
        .send()
        .await
        .expect("an answer");
    let lines = server.key_lines();
    assert!(
        lines.len() == 2 && lines[0] == lines[1] && lines[0].len() == 1,
        "{lines:?}"
    );

    // (c) An outer layer reads the key after the call.
    let server = Server::script(steps());
    let mut map = Extensions::new();
    let outer = server.client([contract()]);
    let request = outer.post(URL).body("order").build().expect("a request");
    outer
        .execute_with_extensions(request, &mut map)
        .await
        .expect("an answer");
    let read = map
        .get::<IdempotencyKey>()
        .expect("the key")
        .as_str()
        .to_owned();
    assert_eq!(server.key_lines(), [[read.clone()], [read]]);
    assert_eq!(map.get::<Attempt>().expect("the attempt").number(), 2);

    // (d) Clones of a builder share an explicit key; a generated one is made for each.
    let server = Server::always(200);
    let cloning = server.client([contract()]);
    let explicit = cloning
        .post(URL)
        .body("order")
        .with_extension(key("explicit"));
    explicit
        .try_clone()
        .expect("a clone")
        .send()
        .await
        .expect("an answer");
    explicit.send().await.expect("an answer");
    let generated = cloning.post(URL).body("order");
    generated
        .try_clone()
        .expect("a clone")
        .send()
        .await
        .expect("an answer");
    generated.send().await.expect("an answer");
    let lines = server.key_lines();
    assert_eq!(lines[..2], [["explicit"], ["explicit"]]);
    assert_ne!(lines[2], lines[3]);
}

// ---- I3: what must not be repeated ----

#[tokio::test(start_paused = true)]
async fn case_26_an_incomplete_message_is_no_proof_that_nothing_was_done() {
    let came = post(false, [Step::Fail(read_and_closed())], plain_builder()).await;
    assert_eq!(
        (came.sends, came.stop),
        (1, Some(StopReason::UnsafeToRepeat))
    );
    assert_eq!(came.certainty, Certainty::Unknown);
    let came = post(
        true,
        [Step::Fail(read_and_closed()), Step::status(200)],
        plain_builder(),
    )
    .await;
    assert_eq!((came.sends, came.status()), (2, Some(200)));
}

#[tokio::test(start_paused = true)]
async fn case_27_reads_and_writes_have_different_rules() {
    let limited = || {
        plain_builder()
            .attempt_timeout(secs(1))
            .retryable_statuses(LISTED.map(listed))
    };
    const LISTED: [u16; 7] = [408, 425, 429, 500, 502, 503, 504];
    fn listed(status: u16) -> http::StatusCode {
        http::StatusCode::from_u16(status).expect("a status")
    }
    type MakeStep = fn() -> Step;
    let unknown: [(&str, MakeStep); 8] = [
        ("hang", || Step::Hang),
        ("read+closed", || Step::Fail(read_and_closed())),
        ("502", || Step::status(502)),
        ("503", || Step::status(503)),
        ("504", || Step::status(504)),
        ("500", || Step::status(500)),
        ("408", || Step::status(408)),
        ("429", || Step::status(429)),
    ];
    for (what, step) in unknown {
        let came = post(false, [step()], limited()).await;
        assert_eq!(
            (came.sends, came.stop),
            (1, Some(StopReason::UnsafeToRepeat)),
            "{what}"
        );
        let expected = if what == "429" {
            Certainty::Answered
        } else {
            Certainty::Unknown
        };
        assert_eq!(came.certainty, expected, "{what}");
        let came = post(true, [step(), Step::status(200)], limited()).await;
        assert_eq!(
            (came.sends, came.status()),
            (2, Some(200)),
            "{what} with a key"
        );
        assert_eq!(came.certainty, Certainty::Answered, "{what} with a key");
        let came = get([step(), Step::status(200)], limited()).await;
        assert_eq!((came.sends, came.status()), (2, Some(200)), "{what} as GET");
    }
    let came = post(
        false,
        [Step::Refuse(refused()), Step::status(200)],
        limited(),
    )
    .await;
    assert_eq!((came.sends, came.status()), (2, Some(200)));

    // Declared: this API says with 429 and 503 that it has done nothing.
    for status in [429, 503] {
        let declared = limited()
            .refused_before_work([429, 503].map(listed))
            .client_is_prepared(true);
        let came = post(false, [Step::status(status), Step::status(200)], declared).await;
        assert_eq!(
            (came.sends, came.status()),
            (2, Some(200)),
            "{status} declared"
        );
    }
    // The caller's word goes both ways.
    let server = Server::script([Step::status(503), Step::status(200), Step::status(503)]);
    let client = client(
        &server,
        plain_builder().key_contract(KeyContract::default()),
    );
    let came = send(&server, client.delete(URL).with_extension(Idempotent(true))).await;
    assert_eq!((came.sends, came.status()), (2, Some(200)));
    let came = send(&server, client.put(URL).with_extension(Idempotent(false))).await;
    assert_eq!(
        (came.sends, came.stop),
        (3, Some(StopReason::UnsafeToRepeat))
    );
}

// ---- I4: what should be repeated ----

#[tokio::test(start_paused = true)]
async fn case_31_an_attempt_timeout_is_retried_where_that_is_safe() {
    let quick = plain_builder().attempt_timeout(ms(30)).max_attempts(5);
    let came = get([Step::Hang, Step::Hang, Step::status(200)], quick).await;
    assert_eq!(
        (came.sends, came.status(), came.at),
        (3, Some(200), ms(360))
    );
}

// ---- I5: conflicts ----

#[tokio::test(start_paused = true)]
async fn case_34_a_conflict_with_an_own_attempt_is_waited_out() {
    let limited = || plain_builder().attempt_timeout(secs(1));
    for conflict in [409, 423] {
        let still_running = || Step::retry_after(conflict, "1");
        let waiting = limited().wait_for_conflict(true);
        let came = post(
            true,
            [Step::Hang, still_running(), Step::status(200)],
            waiting,
        )
        .await;
        assert_eq!((came.sends, came.status()), (3, Some(200)), "{conflict}");
        assert_eq!(came.certainty, Certainty::Answered);

        let came = post(true, [Step::Hang, still_running()], limited()).await;
        assert_eq!(
            (came.sends, came.status()),
            (2, Some(conflict)),
            "{conflict}, rule off"
        );
        assert_eq!(
            (came.stop, came.certainty),
            (Some(StopReason::NotRetryable), Certainty::Unknown)
        );

        let came = post(true, [still_running()], limited().wait_for_conflict(true)).await;
        assert_eq!(
            (came.sends, came.status()),
            (1, Some(conflict)),
            "{conflict} first"
        );
        assert_eq!(came.stop, Some(StopReason::NotRetryable));
    }
    // Another caller's conflict is not ours: without a key, or after a refusal, nothing waits.
    let refused_first = [Step::Refuse(refused()), Step::status(409)];
    let came = post(true, refused_first, limited().wait_for_conflict(true)).await;
    assert_eq!((came.sends, came.stop), (2, Some(StopReason::NotRetryable)));
}

#[tokio::test(start_paused = true)]
async fn case_35_the_body_is_frozen_with_the_key() {
    let came = post(
        true,
        [Step::status(503), Step::status(422)],
        plain_builder(),
    )
    .await;
    assert_eq!((came.sends, came.status()), (2, Some(422)));
    assert_eq!(came.stop, Some(StopReason::NotRetryable));
    assert_eq!(
        came.certainty,
        Certainty::Unknown,
        "the 503 may have been carried out"
    );

    // A layer below spoils the first attempt's body; the second has the order's again.
    let server = Server::script([Step::status(503), Step::status(200)]);
    let client = ClientBuilder::new(support::plain_http())
        .with(plain_builder().build().expect("valid"))
        .with(SpoilsFirstBody)
        .with(server.clone())
        .build();
    let request = client
        .post(URL)
        .body("order")
        .with_extension(key("order-17"));
    request.send().await.expect("an answer");
    let bodies: Vec<_> = server.seen().into_iter().map(|seen| seen.body).collect();
    assert_eq!(bodies, ["spoilt", "order"]);
}

struct SpoilsFirstBody;

#[async_trait::async_trait]
impl Middleware for SpoilsFirstBody {
    async fn handle(
        &self,
        mut request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        if extensions
            .get::<Attempt>()
            .is_some_and(|attempt| attempt.number() == 1)
        {
            *request.body_mut() = Some("spoilt".into());
        }
        next.run(request, extensions).await
    }
}

// ---- U1: unknown is a result of its own ----

#[tokio::test(start_paused = true)]
async fn case_29_unknown_is_told_apart_and_keeps_its_key() {
    let limited = || plain_builder().attempt_timeout(secs(1));
    let came = post(true, (0..4).map(|_| Step::Hang), limited()).await;
    assert_eq!(
        (came.sends, came.stop),
        (4, Some(StopReason::AttemptsExhausted))
    );
    let error = came.result.expect_err("no answer");
    let error = error.retry_error().expect("ours");
    assert_eq!(
        (error.certainty(), error.key()),
        (Certainty::Unknown, Some(&key("order-17")))
    );
    let next = NextStep::ConfirmOutcome {
        key: Some(key("order-17")),
    };
    assert_eq!(error.next_step(), next);
    assert_eq!(error.report().attempts().len(), 4);

    let came = post(true, (0..4).map(|_| Step::Refuse(refused())), limited()).await;
    assert_eq!(
        (came.stop, came.certainty),
        (Some(StopReason::AttemptsExhausted), Certainty::NotSent)
    );
    let error = came.result.expect_err("no answer");
    let error = error.retry_error().expect("ours");
    assert!(error.is_connect() && !error.is_timeout());
    assert_eq!(error.next_step(), NextStep::TryLater { after: None });

    let one_may_have_arrived = [
        Step::Refuse(refused()),
        Step::Fail(read_and_closed()),
        Step::Refuse(refused()),
        Step::Refuse(refused()),
    ];
    let came = post(true, one_may_have_arrived, limited()).await;
    assert_eq!((came.sends, came.certainty), (4, Certainty::Unknown));

    let came = post(
        true,
        [Step::Fail(read_and_closed()), Step::status(402)],
        limited(),
    )
    .await;
    assert_eq!(
        (came.sends, came.status(), came.certainty),
        (2, Some(402), Certainty::Unknown)
    );
    let report = support::report(&came.result).expect("a report");
    assert_eq!(report.attempts()[0].certainty(), Certainty::Unknown);
    assert_eq!(report.next_step(), next);

    // The caller's own look-up by key, as a safe request: an answer settles it one way only.
    let came = get([Step::status(404)], limited()).await;
    assert_eq!(
        (came.status(), came.certainty),
        (Some(404), Certainty::Answered)
    );
}

// ---- B1, first half: bodies that can be sent only once ----

/// A body of five bytes that reqwest has no copy of.
fn stream() -> Body {
    Body::wrap(http_body_util::Full::new(bytes::Bytes::from_static(
        b"order",
    )))
}

#[tokio::test(start_paused = true)]
async fn case_37_a_stream_is_sent_once_and_never_refused() {
    let stream_to = async |steps: Vec<Step>| {
        let server = Server::script(steps);
        let request = client(&server, plain_builder()).post(URL).body(stream());
        let came = send(&server, request.with_extension(key("order-17"))).await;
        (came, server)
    };
    let (came, server) = stream_to(vec![Step::status(200)]).await;
    assert_eq!(
        (came.status(), server.seen()[0].body.as_ref()),
        (Some(200), &b"order"[..])
    );
    let (came, server) = stream_to(vec![Step::status(503)]).await;
    assert_eq!((came.sends, came.status()), (1, Some(503)));
    assert_eq!(came.stop, Some(StopReason::BodyNotReplayable));
    assert_eq!(server.seen()[0].body, "order");
    let (came, _) = stream_to(vec![Step::Refuse(refused())]).await;
    assert_eq!(
        (came.sends, came.stop),
        (1, Some(StopReason::BodyNotReplayable))
    );
    assert_eq!(came.certainty, Certainty::NotSent);
}

#[tokio::test(start_paused = true)]
async fn case_38_a_later_attempt_never_has_a_shorter_body() {
    let server = Server::script([Step::status(503), Step::status(200)]);
    let request = client(&server, plain_builder()).post(URL).body("order");
    let came = send(&server, request.with_extension(key("order-17"))).await;
    assert_eq!(came.status(), Some(200));
    let lengths: Vec<_> = server.seen().iter().map(|seen| seen.body.len()).collect();
    assert_eq!(lengths, [5, 5]);
}

// ---- B2: tokens ----

#[tokio::test(start_paused = true)]
async fn case_40_a_token_comes_back_unless_its_attempt_started() {
    let budget = Arc::new(RetryBudget::fixed(1));
    let shared = || plain_builder().budget(Arc::clone(&budget));

    let server = Server::script([Step::status(503)]);
    let dropped = client(&server, shared()).get(URL).send();
    assert!(tokio::time::timeout(ms(50), dropped).await.is_err());
    assert_eq!((server.sends(), budget.balance()), (1, 1.0));
    let came = get([Step::status(503), Step::status(200)], shared()).await;
    assert_eq!(
        (came.sends, came.status(), budget.balance()),
        (2, Some(200), 0.0)
    );

    // Dropped inside the second attempt: that one was sent, and paid for.
    let budget = Arc::new(RetryBudget::fixed(1));
    let server = Server::script([Step::status(503), Step::Hang]);
    let inside = client(&server, plain_builder().budget(Arc::clone(&budget)))
        .get(URL)
        .send();
    assert!(tokio::time::timeout(ms(150), inside).await.is_err());
    assert_eq!((server.sends(), budget.balance()), (2, 0.0));
}

/// An inner layer that panics at the second attempt of its first operation.
struct PanicsOnce(AtomicBool);

#[async_trait::async_trait]
impl Middleware for PanicsOnce {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let is_repeat = extensions
            .get::<Attempt>()
            .is_some_and(|attempt| attempt.number() == 2);
        assert!(
            !is_repeat || self.0.swap(true, Ordering::Relaxed),
            "the test's own panic"
        );
        next.run(request, extensions).await
    }
}

#[tokio::test(start_paused = true)]
async fn case_40_a_panic_in_another_layer_leaves_the_budget_usable() {
    for budget in [
        RetryBudget::fixed(10),
        RetryBudget::window(1.0, 0, secs(10)).expect("valid"),
    ] {
        let server = Server::script([503, 503, 200].map(Step::status));
        let layer = plain_builder()
            .budget(Arc::new(budget))
            .build()
            .expect("valid");
        let client = ClientBuilder::new(support::plain_http())
            .with(layer)
            .with(PanicsOnce(AtomicBool::new(false)))
            .with(server.clone())
            .build();
        assert!(
            tokio::spawn(client.get(URL).send())
                .await
                .is_err_and(|error| error.is_panic())
        );
        let answer = client.get(URL).send().await.expect("an answer");
        assert_eq!((answer.status().as_u16(), server.sends()), (200, 3));
    }
}

// ---- B3: the budget, both ways ----

#[tokio::test(start_paused = true)]
async fn case_42_the_budget_is_connected_in_both_directions() {
    let budget = RetryBudget::builder()
        .ratio(0.1)
        .burst(5)
        .trickle(Duration::MAX)
        .build();
    let budget = Arc::new(budget.expect("valid"));
    let settings = plain_builder().budget(Arc::clone(&budget));
    let failing = Server::always(503);
    let to_failing = client(&failing, settings.clone());
    let mut reasons = Vec::new();
    for _ in 0..10 {
        reasons.push(send(&failing, to_failing.get(URL)).await.stop);
    }
    assert_eq!(failing.sends(), 15);
    let exhausted = Some(StopReason::BudgetExhausted);
    assert_eq!(reasons[0], Some(StopReason::AttemptsExhausted));
    assert!(
        reasons[1..].iter().all(|reason| *reason == exhausted),
        "{reasons:?}"
    );

    let healthy = Server::always(200);
    let to_healthy = client(&healthy, settings);
    for _ in 0..20 {
        assert_eq!(
            send(&healthy, to_healthy.get(URL)).await.status(),
            Some(200)
        );
    }
    assert_eq!(budget.balance(), 2.0);
    assert_eq!(send(&failing, to_failing.get(URL)).await.stop, exhausted);
    assert_eq!((failing.sends(), budget.balance()), (18, 0.0));
}

#[tokio::test(start_paused = true)]
async fn case_43_a_share_of_the_load_has_a_reserve_and_counts_the_asking_call() {
    let window = |ratio, per_second| {
        let budget = RetryBudget::window(ratio, per_second, secs(10)).expect("valid");
        plain_builder().budget(Arc::new(budget))
    };
    let fails_once = || [Step::status(503), Step::status(200)];
    assert_eq!(get(fails_once(), window(0.2, 1)).await.sends, 2);
    let came = get([Step::status(503)], window(0.0, 0)).await;
    assert_eq!(
        (came.sends, came.stop),
        (1, Some(StopReason::BudgetExhausted))
    );

    let server = Server::script((0..6).map(|_| Step::status(503))).then_always(200);
    let client = client(&server, window(1.0, 0));
    let calls: Vec<_> = (0..6)
        .map(|_| tokio::spawn(client.get(URL).send()))
        .collect();
    for call in calls {
        assert_eq!(
            call.await.expect("no panic").expect("an answer").status(),
            200
        );
    }
    assert_eq!(server.sends(), 12);
}

#[test]
fn case_44_the_bucket_is_exact_under_threads_and_refuses_bad_figures() {
    let budget = Arc::new(RetryBudget::fixed(100));
    let sends: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..64)
            .map(|_| {
                scope.spawn(|| {
                    let runtime = tokio::runtime::Builder::new_current_thread()
                        .enable_all()
                        .start_paused(true)
                        .build()
                        .expect("a runtime");
                    runtime.block_on(async {
                        let server = Server::always(503);
                        let settings = plain_builder().max_attempts(2).budget(Arc::clone(&budget));
                        let client = client(&server, settings);
                        for _ in 0..200 / 64 + 1 {
                            client.get(URL).send().await.expect("an answer");
                        }
                        server.sends()
                    })
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .sum()
    });
    let operations = 64 * (200 / 64 + 1);
    assert_eq!((sends - operations, budget.balance()), (100, 0.0));

    let builder = RetryBudget::builder;
    for (bad, field) in [
        (builder().ratio(f64::NAN), "budget.ratio"),
        (builder().ratio(-0.1), "budget.ratio"),
        (builder().ratio(1.1), "budget.ratio"),
        (builder().burst(5).initial(6), "budget.initial"),
        (builder().burst(400_001), "budget.burst"),
        (
            builder().trickle(Duration::from_micros(999)),
            "budget.trickle",
        ),
    ] {
        assert_eq!(bad.build().expect_err("refused").field(), field);
    }
    for ratio in [f64::NAN, -1.0, 1.5, f64::INFINITY] {
        let error = RetryBudget::window(ratio, 1, secs(10)).expect_err("refused");
        assert_eq!(error.field(), "budget.ratio");
    }
}

// ---- C3: statuses ----

#[tokio::test(start_paused = true)]
async fn case_57_only_listed_statuses_are_retried_and_a_hook_sees_the_headers() {
    for status in [
        400, 401, 403, 404, 405, 409, 410, 421, 422, 500, 501, 505, 506, 510, 511,
    ] {
        let came = get([Step::status(status)], plain_builder()).await;
        assert_eq!((came.sends, came.status()), (1, Some(status)));
        assert_eq!(came.stop, Some(StopReason::NotRetryable));
    }
    for status in [408, 425, 429, 502, 503, 504] {
        let came = get([Step::status(status), Step::status(200)], plain_builder()).await;
        assert_eq!((came.sends, came.status()), (2, Some(200)), "{status}");
    }
    let listed = plain_builder().retryable_statuses([http::StatusCode::INTERNAL_SERVER_ERROR]);
    let came = get([Step::status(500), Step::status(200)], listed).await;
    assert_eq!(came.sends, 2);

    let quota = |status: http::StatusCode, headers: &http::HeaderMap| {
        let used_up = headers.get("x-quota").is_some_and(|left| left == "0");
        (status == 429 && used_up).then_some(StatusClass::Final)
    };
    let hooked = || plain_builder().classify(quota);
    let came = get([Step::after(0, 429, &[("x-quota", "0")])], hooked()).await;
    assert_eq!((came.sends, came.stop), (1, Some(StopReason::NotRetryable)));
    let came = get([Step::status(429), Step::status(200)], hooked()).await;
    assert_eq!(came.sends, 2);
    // Retry-After never makes a status retryable.
    let came = get([Step::retry_after(404, "1")], plain_builder()).await;
    assert_eq!((came.sends, came.stop), (1, Some(StopReason::NotRetryable)));
}

// ---- X1: cancelling ----

#[tokio::test(start_paused = true)]
async fn case_62_cancelling_a_wait_ends_it_at_once() {
    let server = Server::script([Step::retry_after(429, "3")]);
    let dropped = client(&server, plain_builder()).get(URL).send();
    assert!(tokio::time::timeout(ms(100), dropped).await.is_err());
    assert_eq!(server.elapsed(), ms(100));
    tokio::time::sleep(secs(10)).await;
    assert_eq!(server.sends(), 1);

    let server = Server::script([Step::retry_after(429, "3")]);
    let token = CancellationToken::new();
    let request = client(&server, plain_builder())
        .get(URL)
        .with_extension(token.clone());
    let sending = tokio::spawn(request.send());
    tokio::time::sleep(ms(100)).await;
    token.cancel();
    let error = sending.await.expect("no panic").expect_err("cancelled");
    assert_eq!(server.elapsed(), ms(100));
    let error = error.retry_error().expect("ours");
    assert_eq!(
        (error.stop(), error.status()),
        (
            StopReason::Cancelled,
            Some(http::StatusCode::TOO_MANY_REQUESTS)
        )
    );
    let answer = error.last_answer().expect("the 429");
    assert_eq!(
        (
            answer.headers()["retry-after"].as_bytes(),
            answer.body().map(AsRef::as_ref)
        ),
        (&b"3"[..], Some(&b"why"[..]))
    );
    assert_eq!(
        error.next_step(),
        NextStep::TryLater {
            after: Some(secs(3))
        }
    );
    tokio::time::sleep(secs(10)).await;
    assert_eq!(server.sends(), 1);
}

// ---- O1: the last answer is the caller's ----

#[tokio::test(start_paused = true)]
async fn case_64_the_last_answer_comes_back_whole_with_every_attempt_told() {
    let steps = (0..4).map(|_| Step::after(0, 503, &[("x-request-id", "7")]));
    let came = get(steps, plain_builder()).await;
    assert_eq!(
        (came.sends, came.stop),
        (4, Some(StopReason::AttemptsExhausted))
    );
    let answer = came.result.expect("the last answer");
    let report = answer.retry_report().expect("a report").clone();
    assert_eq!(
        (
            answer.status().as_u16(),
            answer.headers()["x-request-id"].as_bytes()
        ),
        (503, &b"7"[..])
    );
    assert_eq!(answer.url().as_str(), URL);
    assert_eq!(answer.text().await.expect("the body"), "why");
    let told: Vec<_> = report
        .attempts()
        .iter()
        .map(|attempt| {
            (
                attempt.number(),
                attempt.status().map(|s| s.as_u16()),
                attempt.waited(),
                attempt.certainty(),
            )
        })
        .collect();
    let answered = Certainty::Answered;
    assert_eq!(
        told,
        [
            (1, Some(503), ms(0), answered),
            (2, Some(503), ms(100), answered),
            (3, Some(503), ms(200), answered),
            (4, Some(503), ms(400), answered),
        ]
    );
}

// ---- J1: arithmetic ----

#[tokio::test(start_paused = true)]
async fn case_69_windows_saturate_before_they_are_capped() {
    let minute = secs(60);
    let steps = (0..70).map(|_| Step::status(503));
    let server = Server::script(steps).then_always(200);
    let settings = plain_builder()
        .max_attempts(u32::MAX)
        .backoff(Backoff::exponential(secs(1), minute))
        .deadline(Duration::MAX);
    let came = send(&server, client(&server, settings).get(URL)).await;
    let report = support::report(&came.result).expect("a report");
    let waits: Vec<_> = report.attempts()[1..]
        .iter()
        .map(|attempt| attempt.waited())
        .collect();
    assert_eq!(waits[..7], [1, 2, 4, 8, 16, 32, 60].map(secs));
    assert!(waits.len() == 70 && waits[7..].iter().all(|&wait| wait == minute));

    let none = plain_builder().backoff(Backoff::full_jitter(Duration::ZERO, minute));
    assert_eq!(
        get([Step::status(503), Step::status(200)], none).await.at,
        Duration::ZERO
    );

    let backoff = || Backoff::exponential(secs(1), minute);
    for (bad, field) in [
        (backoff().factor(f64::NAN), "backoff.factor"),
        (backoff().factor(f64::INFINITY), "backoff.factor"),
        (backoff().factor(0.5), "backoff.factor"),
        (backoff().jitter(f64::NAN), "backoff.jitter"),
        (backoff().jitter(-0.1), "backoff.jitter"),
        (backoff().jitter(1.1), "backoff.jitter"),
        (Backoff::exponential(minute, secs(1)), "backoff.base"),
        (Backoff::decorrelated(minute, secs(1)), "backoff.base"),
        (Backoff::fixed([]), "backoff.delays"),
    ] {
        let error = RetryMiddleware::builder()
            .backoff(bad)
            .build()
            .expect_err("refused");
        assert_eq!(error.field(), field);
    }
}

#[tokio::test(start_paused = true)]
async fn case_70_endless_spans_are_no_limit_and_no_panic() {
    for endless in [
        Duration::MAX,
        Duration::from_secs(u64::MAX),
        secs(1_000_000_000_000),
    ] {
        let settings = RetryMiddleware::builder()
            .attempt_timeout(endless)
            .deadline(endless)
            .max_retry_after(endless)
            .backoff(Backoff::full_jitter(ms(100), endless));
        let server = Server::script([503, 200, 503, 200].map(Step::status));
        let client = client(&server, settings);
        let came = send(&server, client.get(URL)).await;
        assert_eq!((came.sends, came.status()), (2, Some(200)), "{endless:?}");
        let own = RetryOverride::new()
            .attempt_timeout(endless)
            .max_attempts(2);
        let request = client.get(URL).with_extension(Deadline::after(endless));
        let came = send(&server, request.with_extension(own)).await;
        assert_eq!((came.sends, came.status()), (4, Some(200)), "{endless:?}");
        let lifetime = KeyContract::default().lifetime(endless);
        let came = post(
            true,
            [Step::status(503), Step::status(200)],
            plain_builder().key_contract(lifetime),
        )
        .await;
        assert_eq!((came.sends, came.status()), (2, Some(200)), "{endless:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn case_72_late_retries_stay_spread_below_the_cap() {
    let random = Mutex::new(fastrand::Rng::with_seed(72));
    let settings = plain_builder()
        .max_attempts(1010)
        .backoff(Backoff::full_jitter(ms(100), secs(1)))
        .deadline(Duration::MAX)
        .random_with(move || support::lock(&random).f64());
    let server = Server::script((0..1009).map(|_| Step::status(503))).then_always(200);
    let came = send(&server, client(&server, settings).get(URL)).await;
    let report = support::report(&came.result).expect("a report");
    let waits: Vec<_> = report.attempts()[10..]
        .iter()
        .map(|attempt| attempt.waited())
        .collect();
    assert_eq!(waits.len(), 1000);
    assert!(waits.iter().all(|&wait| wait <= secs(1)));
    assert!(waits.iter().filter(|&&wait| wait == secs(1)).count() < 50);
    let mean = waits.iter().sum::<Duration>() / 1000;
    assert!((ms(400)..=ms(600)).contains(&mean), "{mean:?}");
}

// ---- S1: state ----

#[tokio::test(start_paused = true)]
async fn case_73_each_call_has_its_own_attempts_and_time() {
    let server = Server::script((0..50).map(|_| Step::status(503))).then_always(200);
    let client = client(&server, plain_builder());
    let calls: Vec<_> = (0..50)
        .map(|_| tokio::spawn(client.clone().get(URL).send()))
        .collect();
    for call in calls {
        let answer = call.await.expect("no panic").expect("an answer");
        assert_eq!(answer.retry_report().expect("a report").attempts().len(), 2);
    }
    assert_eq!(server.sends(), 100);

    let failing = Server::always(503);
    let exhausting = self::client(&failing, plain_builder());
    for expected in [4, 8] {
        assert_eq!(send(&failing, exhausting.get(URL)).await.sends, expected);
    }

    let server = Server::script([Step::Hang]);
    let waiting = self::client(&server, plain_builder()).get(URL);
    tokio::time::sleep(secs(20)).await;
    let came = send(&server, waiting).await;
    assert_eq!((came.sends, came.at), (1, secs(30)));
}
