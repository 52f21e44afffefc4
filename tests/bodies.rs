//! Bodies that break off, and bodies that can be sent only once: what is repeated, and what is told.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod net;
mod support;

use std::error::Error as StdError;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, StatusCode};
use net::{Act, Wire, answer};
use reqwest::Body;
use reqwest_idempotent_retry::{
    Backoff, BodyFactory, CancellationToken, Certainty, Failure, FreshBody, IncompleteBody,
    NextStep, NoRetry, ReportHandle, RetryBudget, RetryErrorExt, RetryMiddleware,
    RetryMiddlewareBuilder, RetryResponseExt, StopReason,
};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware};
use support::{Server, Step, URL, key, ms, plain_builder, plain_http, refused, secs};

fn build(builder: RetryMiddlewareBuilder) -> RetryMiddleware {
    builder.build().expect("valid settings")
}

fn incomplete<'e>(error: &'e (dyn StdError + 'static)) -> Option<&'e IncompleteBody> {
    std::iter::successors(Some(error), |&cause| cause.source())
        .find_map(<dyn StdError>::downcast_ref)
}

// ---- Answers ----

const CUT: Act = Act::SayAndClose("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc");

fn over_wire(layer: RetryMiddlewareBuilder) -> ClientWithMiddleware {
    let layer = layer.backoff(Backoff::fixed([ms(10)]));
    ClientBuilder::new(plain_http()).with(build(layer)).build()
}

#[tokio::test]
async fn case_17_a_body_that_breaks_off_is_told_as_an_answer_and_not_repeated() {
    for deadline in [Duration::MAX, secs(8)] {
        let server = Wire::script([CUT, answer(200).into()]).await;
        let client = over_wire(plain_builder().deadline(deadline));
        let answer = client.get(server.url("/")).send().await.expect("an answer");
        let error = answer.bytes().await.expect_err("cut");
        let told = incomplete(&error).expect("ours in the chain");
        assert_eq!(told.status(), StatusCode::OK);
        assert_eq!(
            told.to_string(),
            "answered with status 200, body incomplete"
        );
        assert!(!error.is_timeout());
        assert_eq!(server.requests().len(), 1);
    }
}

#[tokio::test]
async fn case_17_a_buffered_body_that_breaks_off_is_asked_for_again() {
    let whole = || answer(200).body("0123456789");
    let server = Wire::script([CUT, whole().into()]).await;
    let client = over_wire(plain_builder().buffer_response(10));
    let answer = client.get(server.url("/")).send().await.expect("an answer");
    let report = answer.retry_report().expect("a report").clone();
    assert_eq!(answer.content_length(), Some(10));
    assert_eq!(answer.bytes().await.expect("the body"), "0123456789");
    assert_eq!(server.saw(2).await.len(), 2);
    let first = &report.attempts()[0];
    assert_eq!(
        (first.status(), first.failure()),
        (Some(StatusCode::OK), Some(Failure::Body))
    );
    assert_eq!(
        (report.stop(), report.certainty()),
        (None, Certainty::Answered)
    );

    // The answer was had; asking again would make a second order.
    let server = Wire::script([CUT]).await;
    let client = over_wire(plain_builder().buffer_response(10));
    let error = client
        .post(server.url("/"))
        .body("order")
        .send()
        .await
        .expect_err("cut");
    let error = error.retry_error().expect("ours");
    assert_eq!(
        (error.stop(), error.certainty()),
        (StopReason::UnsafeToRepeat, Certainty::Answered)
    );
    assert_eq!(
        (error.status(), error.next_step()),
        (Some(StatusCode::OK), NextStep::Done)
    );
    assert_eq!(
        incomplete(error).expect("ours in the chain").status(),
        StatusCode::OK
    );
    assert_eq!(server.requests().len(), 1);

    // With a key it is the same order.
    let server = Wire::script([CUT, whole().into()]).await;
    let client = over_wire(plain_builder().buffer_response(10));
    let keyed = client
        .post(server.url("/"))
        .body("order")
        .with_extension(key("order-17"));
    keyed.send().await.expect("an answer");
    let keys: Vec<_> = server.saw(2).await.iter().map(|seen| seen.keys()).collect();
    assert_eq!(keys, [["order-17"], ["order-17"]]);
}

#[tokio::test(start_paused = true)]
async fn a_buffered_body_that_stalls_is_asked_for_again_within_the_attempts_limit() {
    let budget = Arc::new(RetryBudget::fixed(5));
    let layer = plain_builder()
        .buffer_response(100)
        .attempt_timeout(secs(1))
        .budget(Arc::clone(&budget));
    let server = Server::script([Step::Stall(200), Step::Break(200), Step::status(200)]);
    let answer = server
        .client([build(layer)])
        .get(URL)
        .send()
        .await
        .expect("an answer");
    // 1 s of stall, 100 ms of wait, 200 ms of wait.
    assert_eq!(
        (server.starts(), server.elapsed()),
        (vec![0, 1100, 1300], ms(1300))
    );
    assert_eq!(budget.balance(), 3.0);
    assert_eq!(answer.text().await.expect("the body"), "why");

    let layer = plain_builder().buffer_response(100).deadline(secs(1));
    let server = Server::script([Step::Stall(200)]);
    let error = server
        .client([build(layer)])
        .get(URL)
        .send()
        .await
        .expect_err("stalled");
    let error = error.retry_error().expect("ours");
    assert_eq!(
        (server.elapsed(), error.stop()),
        (secs(1), StopReason::DeadlineTooClose)
    );
    assert!(error.is_timeout() && incomplete(error).is_some());
}

#[tokio::test]
async fn a_body_over_the_limit_is_handed_on_as_it_comes() {
    let long = "x".repeat(100_000);
    for (limit, announced) in [(99_999, true), (10, true), (99_999, false), (10, false)] {
        let act: Act = match announced {
            true => answer(200).body(long.clone()).into(),
            false => Act::SayAndClose("HTTP/1.1 200 OK\r\n\r\nas long as the connection lasts"),
        };
        let server = Wire::script([act]).await;
        let client = over_wire(plain_builder().buffer_response(limit));
        let answer = client.get(server.url("/")).send().await.expect("an answer");
        let read = answer.text().await.expect("the body");
        match announced {
            true => assert_eq!(read, long, "{limit}"),
            false => assert_eq!(read, "as long as the connection lasts", "{limit}"),
        }
        assert_eq!(server.requests().len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_buffered_body_is_there_after_the_deadline() {
    let layer = plain_builder().buffer_response(3).deadline(secs(2));
    let server = Server::script([Step::status(200)]);
    let answer = server
        .client([build(layer)])
        .get(URL)
        .send()
        .await
        .expect("an answer");
    tokio::time::sleep(secs(3)).await;
    assert_eq!(answer.text().await.expect("the body"), "why");
}

#[tokio::test(start_paused = true)]
async fn giving_up_while_a_body_is_read_does_not_make_the_answer_unknown() {
    let layer = || build(plain_builder().buffer_response(100));
    let handle = ReportHandle::new();
    let request = |server: &Server| {
        let request = server.client([layer()]).post(URL).body("order");
        request.with_extension(handle.clone())
    };
    let server = Server::script([Step::Stall(201)]);
    assert!(
        tokio::time::timeout(secs(1), request(&server).send())
            .await
            .is_err()
    );
    let report = handle.report().expect("a report");
    assert_eq!(
        (report.stop(), report.certainty()),
        (Some(StopReason::Cancelled), Certainty::Answered)
    );
    assert_eq!(
        (report.status(), report.next_step()),
        (Some(StatusCode::CREATED), NextStep::Done)
    );

    let server = Server::script([Step::Stall(201)]);
    let token = CancellationToken::new();
    let sending = tokio::spawn(request(&server).with_extension(token.clone()).send());
    tokio::time::sleep(secs(1)).await;
    token.cancel();
    let error = sending.await.expect("no panic").expect_err("cancelled");
    let error = error.retry_error().expect("ours");
    assert_eq!(
        (error.stop(), error.certainty()),
        (StopReason::Cancelled, Certainty::Answered)
    );
}

// ---- Requests: streams that are read ahead ----

const CAP: usize = 64 * 1024;

/// A stream of so many bytes, in pieces, that counts what has been asked of it.
struct Pieces {
    left: usize,
    asked: Arc<AtomicUsize>,
}

const PIECE: usize = 10_000;

impl Pieces {
    fn body(length: usize) -> (Body, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let pieces = Self {
            left: length,
            asked: Arc::clone(&asked),
        };
        (Body::wrap(pieces), asked)
    }
}

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        let piece = PIECE.min(self.left);
        // Bytes that tell their place, so that none can be lost, doubled or swapped unseen.
        let place = self.asked.fetch_add(piece, Ordering::SeqCst);
        let bytes: Vec<u8> = (place..place + piece).map(|at| (at % 251) as u8).collect();
        self.left -= piece;
        Poll::Ready(Some(Ok(http_body::Frame::data(bytes.into()))))
    }
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at % 251) as u8).collect()
}

#[tokio::test]
async fn case_38_a_stream_up_to_the_cap_is_read_ahead_and_repeated() {
    for (length, sends) in [
        (0, 2),
        (1, 2),
        (CAP - 1, 2),
        (CAP, 2),
        (CAP + 1, 1),
        (3 * CAP, 1),
    ] {
        let server = Wire::script([answer(503), answer(200)]).await;
        let client = over_wire(plain_builder().buffer_request(CAP));
        let (body, asked) = Pieces::body(length);
        let request = client
            .post(server.url("/"))
            .body(body)
            .with_extension(key("order-17"));
        let handle = ReportHandle::new();
        request
            .with_extension(handle.clone())
            .send()
            .await
            .expect("an answer");
        let seen = server.saw(sends).await;
        assert_eq!(seen.len(), sends, "{length}");
        for seen in &seen {
            assert_eq!(seen.body, pattern(length), "{length}");
        }
        assert_eq!(asked.load(Ordering::SeqCst), length, "each byte once");
        let stop = (sends == 1).then_some(StopReason::BodyNotReplayable);
        assert_eq!(handle.report().expect("a report").stop(), stop, "{length}");
    }
}

#[tokio::test(start_paused = true)]
async fn case_38_nothing_is_read_ahead_where_one_attempt_is_all() {
    let buffering = || plain_builder().buffer_request(CAP);
    for (layer, no_retry) in [(buffering().max_attempts(1), false), (buffering(), true)] {
        let server = Server::script([Step::Refuse(refused())]);
        let (body, asked) = Pieces::body(100);
        let request = server.client([build(layer)]).put(URL).body(body);
        let request = match no_retry {
            true => request.with_extension(NoRetry),
            false => request,
        };
        request.send().await.expect_err("refused");
        assert_eq!((server.sends(), asked.load(Ordering::SeqCst)), (1, 0));
    }
}

/// A stream that never comes to its end, or breaks off.
struct Endless {
    breaks: bool,
}

impl http_body::Body for Endless {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
        match self.breaks {
            true => Poll::Ready(Some(Err(std::io::Error::other("the disk is gone")))),
            false => Poll::Pending,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_cannot_be_read_ahead_sends_nothing() {
    let server = Server::script([]);
    let client = server.client([build(plain_builder().buffer_request(CAP).deadline(secs(2)))]);
    let put = |breaks| client.put(URL).body(Body::wrap(Endless { breaks }));

    let error = put(false).send().await.expect_err("too slow");
    let error = error.retry_error().expect("ours");
    assert_eq!(
        (error.stop(), error.certainty()),
        (StopReason::DeadlineTooClose, Certainty::NotSent)
    );
    assert_eq!(server.elapsed(), secs(2));

    let error = put(true).send().await.expect_err("broken");
    let error = error.retry_error().expect("ours");
    assert_eq!(
        (error.stop(), error.certainty()),
        (StopReason::NotRetryable, Certainty::NotSent)
    );
    assert!(format!("{:?}", error.source()).contains("the disk is gone"));

    let token = CancellationToken::new();
    let sending = tokio::spawn(put(false).with_extension(token.clone()).send());
    tokio::time::sleep(secs(1)).await;
    token.cancel();
    let error = sending.await.expect("no panic").expect_err("cancelled");
    let error = error.retry_error().expect("ours");
    assert_eq!(
        (error.stop(), error.certainty()),
        (StopReason::Cancelled, Certainty::NotSent)
    );
    assert_eq!(server.sends(), 0);
}

// ---- Requests: bodies that are made anew ----

#[tokio::test]
async fn a_file_is_opened_again_for_each_attempt() {
    let path = std::env::temp_dir().join(format!("orders-{}.csv", std::process::id()));
    std::fs::write(&path, pattern(100_000)).expect("a file");
    let opened = Arc::new(AtomicUsize::new(0));
    let (counted, file) = (Arc::clone(&opened), path.clone());
    let factory = BodyFactory::new(move || {
        counted.fetch_add(1, Ordering::SeqCst);
        let bytes = std::fs::read(&file).map(Bytes::from);
        async move { bytes.map(|bytes| Body::wrap(http_body_util::Full::new(bytes))) }
    });
    let server = Wire::script([answer(503), answer(503), answer(200)]).await;
    let request = over_wire(plain_builder())
        .put(server.url("/"))
        .with_extension(factory);
    request.send().await.expect("an answer");
    let seen = server.saw(3).await;
    assert!(seen.iter().all(|seen| seen.body == pattern(100_000)));
    assert_eq!(opened.load(Ordering::SeqCst), 3);
    std::fs::remove_file(path).expect("it is there");
}

#[tokio::test]
async fn a_multipart_form_is_put_together_again_with_its_boundary() {
    let factory = BodyFactory::new(|| async {
        let form = reqwest::multipart::Form::new()
            .text("item", "17")
            .text("count", "1");
        let kind = format!("multipart/form-data; boundary={}", form.boundary());
        let kind = HeaderValue::try_from(kind)?;
        Ok::<_, http::Error>(
            FreshBody::new(Body::wrap_stream(form.into_stream())).content_type(kind),
        )
    });
    let server = Wire::script([answer(503), answer(200)]).await;
    let request = over_wire(plain_builder())
        .post(server.url("/"))
        .with_extension(factory);
    request
        .with_extension(key("order-17"))
        .send()
        .await
        .expect("an answer");
    let seen = server.saw(2).await;
    let boundaries: Vec<_> = seen
        .iter()
        .map(|seen| {
            let kind = seen.headers["content-type"].to_str().expect("text");
            let boundary = kind
                .split("boundary=")
                .nth(1)
                .expect("a boundary")
                .to_owned();
            let body = String::from_utf8(seen.body.to_vec()).expect("text");
            assert!(body.starts_with(&format!("--{boundary}\r\n")), "{body}");
            assert!(body.contains("name=\"item\"\r\n\r\n17"), "{body}");
            boundary
        })
        .collect();
    assert_ne!(boundaries[0], boundaries[1]);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_cannot_be_made_sends_nothing() {
    let server = Server::script([Step::status(503)]);
    let made = Arc::new(AtomicUsize::new(0));
    let once = Arc::clone(&made);
    let factory = BodyFactory::new(move || {
        let is_first = once.fetch_add(1, Ordering::SeqCst) == 0;
        async move {
            match is_first {
                true => Ok(Body::from("order")),
                false => Err(std::io::Error::other("the file is gone")),
            }
        }
    });
    let client = server.client([build(plain_builder())]);
    let request = client.put(URL).with_extension(factory.clone());
    let error = request.send().await.expect_err("no second body");
    let error = error.retry_error().expect("ours");
    assert_eq!(
        (server.sends(), error.stop()),
        (1, StopReason::NotRetryable)
    );
    assert_eq!(
        error.certainty(),
        Certainty::Unknown,
        "the first one was answered 503"
    );
    let told: Vec<_> = error
        .report()
        .attempts()
        .iter()
        .map(|attempt| (attempt.failure(), attempt.certainty()))
        .collect();
    assert_eq!(
        told,
        [
            (None, Certainty::Unknown),
            (Some(Failure::Request), Certainty::NotSent)
        ]
    );
    assert!(
        format!("{:?}", error.source().and_then(StdError::source)).contains("the file is gone")
    );

    // At the first attempt nothing at all was sent; and the making counts within the limit.
    let error = client
        .post(URL)
        .with_extension(factory)
        .send()
        .await
        .expect_err("no body");
    let error = error.retry_error().expect("ours");
    assert_eq!(
        (error.certainty(), error.next_step()),
        (Certainty::NotSent, NextStep::FixRequest)
    );
    let never = BodyFactory::new(std::future::pending::<Result<Body, std::io::Error>>);
    let limited = server.client([build(
        plain_builder().attempt_timeout(secs(1)).max_attempts(2),
    )]);
    let error = limited
        .post(URL)
        .with_extension(never)
        .send()
        .await
        .expect_err("no body");
    let error = error.retry_error().expect("ours");
    assert_eq!(
        (error.stop(), error.certainty()),
        (StopReason::AttemptsExhausted, Certainty::NotSent)
    );
    assert!(error.is_timeout());
    assert_eq!(server.sends(), 1);
}
