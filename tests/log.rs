//! What the crate writes to a log. In a binary of its own: `tracing` caches for the whole process
//! which events anybody listens to.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod support;

use std::sync::{Arc, Mutex};

use reqwest_idempotent_retry::{Backoff, CircuitBreaker, LoadControl, RetryErrorExt};
use support::{Server, Step, key, plain_builder, refused, secs};

/// What is written to a log at its finest level.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        support::lock(&self.0).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// Listens on this thread for as long as the guard lives.
    fn listen(&self) -> tracing::subscriber::DefaultGuard {
        let writer = self.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .finish();
        tracing::subscriber::set_default(subscriber)
    }

    fn text(&self) -> String {
        String::from_utf8(support::lock(&self.0).clone()).expect("text")
    }
}

#[tokio::test(start_paused = true)]
async fn case_66_neither_errors_nor_logs_show_path_query_headers_or_bodies() {
    let log = Log::default();
    let guard = log.listen();
    let server = Server::script([
        Step::Refuse(refused_at("/t/PATHTOK?api_key=SECRET")),
        Step::after(0, 503, &[("x-answer", "ANSWERHEADER")]),
        Step::Refuse(refused_at("/t/PATHTOK?api_key=SECRET")),
    ]);
    let url = "http://user:PASSWORD@orders.test/t/PATHTOK?api_key=SECRET";
    let layer = plain_builder().max_attempts(3).build().expect("valid");
    let request = server
        .client([layer])
        .post(url)
        .body("BODYBYTES")
        .bearer_auth("CREDENTIAL")
        .with_extension(key("KEYKEYKEYKEY"));
    let error = request.send().await.expect_err("refused");
    drop(guard);

    let error = error.retry_error().expect("ours");
    let log = log.text();
    for line in [
        "attempt ended",
        "waiting before the next attempt",
        "operation stopped",
    ] {
        assert!(log.contains(line), "{log}");
    }
    assert!(log.contains("orders.test") && log.contains("POST"), "{log}");
    let mut told = vec![
        log,
        format!("{error}"),
        format!("{error:?}"),
        format!("{error:#?}"),
        format!("{:?}", error.report()),
    ];
    // The whole chain below is without its URL too.
    let mut cause = std::error::Error::source(error);
    assert!(cause.is_some_and(|cause| cause.is::<reqwest::Error>()));
    while let Some(error) = cause {
        told.push(format!("{error} {error:?}"));
        cause = error.source();
    }
    for secret in [
        "PATHTOK",
        "SECRET",
        "PASSWORD",
        "ANSWERHEADER",
        "BODYBYTES",
        "CREDENTIAL",
        "KEYKEYKEYKEY",
    ] {
        for text in &told {
            assert!(!text.contains(secret), "{secret} in {text}");
        }
    }
}

/// The state of a breaker is the host's, so the event names it, and nothing of the request that turned it.
#[tokio::test(start_paused = true)]
async fn a_breaker_that_opens_or_closes_says_so_once_and_of_the_host_alone() {
    let log = Log::default();
    let guard = log.listen();
    let breaker = CircuitBreaker::builder()
        .consecutive_failures(1)
        .open_for(Backoff::fixed([secs(1)]))
        .build();
    let load = LoadControl::builder()
        .breaker(breaker.expect("valid"))
        .key_by(|_, _| "KEYOFTENANT".into())
        .build();
    let layer = plain_builder()
        .max_attempts(1)
        .load_control(Arc::new(load.expect("valid")))
        .build()
        .expect("valid");
    let server = Server::script([503, 503, 200, 200].map(Step::status));
    let client = server.client([layer]);
    let url = "http://user:PASSWORD@orders.test/t/PATHTOK?api_key=SECRET";
    let send = || client.post(url).body("BODYBYTES").send();
    send().await.expect("503: opens");
    send().await.expect("503: still open");
    tokio::time::sleep(secs(1)).await;
    send().await.expect("200: closes");
    send().await.expect("200: still closed");
    drop(guard);

    let log = log.text();
    let turns: Vec<_> = log
        .lines()
        .filter(|line| line.contains("circuit breaker"))
        .map(|line| {
            line.rsplit_once("reqwest_idempotent_retry: ")
                .expect("our target")
                .1
        })
        .collect();
    // Message and fields, and no more.
    assert_eq!(
        turns,
        [
            "circuit breaker opened host=\"orders.test\" wait=1s",
            "circuit breaker closed host=\"orders.test\"",
        ],
        "{log}"
    );
    for secret in ["PASSWORD", "PATHTOK", "SECRET", "BODYBYTES", "KEYOFTENANT"] {
        assert!(!log.contains(secret), "{secret} in {log}");
    }
}

/// A real error whose own text holds this URL.
fn refused_at(path: &str) -> reqwest::Error {
    let url = format!("http://orders.test{path}");
    let error = refused().with_url(url.parse().expect("a URL"));
    assert!(format!("{error:?}").contains("SECRET"));
    error
}
