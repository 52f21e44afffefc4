//! A terminal middleware that follows a script in virtual time, and what it saw.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test binary uses its own part of this module"
)]

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Extensions, HeaderMap, HeaderValue, Method, StatusCode};
use http_body::Body as _;
use http_body_util::BodyExt;
use reqwest::{Request, Response, ResponseBuilderExt};
use reqwest_idempotent_retry::{
    Attempt, Deadline, IdempotencyKey, RetryErrorExt, RetryMiddleware, RetryMiddlewareBuilder,
    RetryReport, RetryResponseExt,
};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Error, Middleware, Next};
use tokio::time::Instant;

pub const URL: &str = "http://orders.test/orders";

/// What the server does with one attempt.
#[derive(Debug)]
pub enum Step {
    /// Takes the request and never answers.
    Hang,
    /// Takes the request, and answers after so long.
    Answer(Duration, Answer),
    /// Takes the request, and answers this status at once with a body that never comes.
    Stall(u16),
    /// Takes the request, and answers this status at once with a body that breaks off after some bytes.
    Break(u16),
    /// Never gets as far as taking the request, as a name that is never resolved.
    Connect,
    /// Fails at once, without taking the request, as a closed port does.
    Refuse(reqwest::Error),
    /// Takes the request, then fails like this.
    Fail(reqwest::Error),
}

#[derive(Clone, Debug)]
pub struct Answer {
    /// Where it comes from, if a redirect was followed below all layers.
    pub url: Option<String>,
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Bytes,
}

impl Step {
    pub fn after(ms: u64, status: u16, headers: &[(&str, &str)]) -> Self {
        let headers = headers
            .iter()
            .map(|&(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        Self::Answer(
            Duration::from_millis(ms),
            Answer {
                url: None,
                status,
                headers,
                body: Bytes::from_static(b"why"),
            },
        )
    }

    /// At once, from another URL than it was sent to.
    pub fn from(url: &str, status: u16, headers: &[(&str, &str)]) -> Self {
        let mut step = Self::after(0, status, headers);
        if let Self::Answer(_, answer) = &mut step {
            answer.url = Some(url.to_owned());
        }
        step
    }

    /// At once, without headers.
    pub fn status(status: u16) -> Self {
        Self::after(0, status, &[])
    }

    pub fn retry_after(status: u16, value: &str) -> Self {
        Self::after(0, status, &[("retry-after", value)])
    }
}

/// One attempt as the server saw it.
#[derive(Clone, Debug)]
pub struct Seen {
    pub at: Duration,
    pub method: Method,
    pub url: String,
    pub headers: HeaderMap,
    pub body: Bytes,
    /// What the extensions told the layers below.
    pub attempt: Option<Attempt>,
    pub key: Option<IdempotencyKey>,
    pub deadline: Option<Deadline>,
}

/// The server of a test: its script, and its log.
#[derive(Clone, Debug)]
pub struct Server {
    start: Instant,
    steps: Arc<Mutex<VecDeque<Step>>>,
    repeats: Option<Answer>,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Server {
    /// Answers by the script; a request past its end is a fault of the test.
    pub fn script(steps: impl IntoIterator<Item = Step>) -> Self {
        Self {
            start: Instant::now(),
            steps: Arc::new(Mutex::new(steps.into_iter().collect())),
            repeats: None,
            seen: Arc::default(),
        }
    }

    /// Answers with this status for ever, after the script.
    pub fn then_always(mut self, status: u16) -> Self {
        self.repeats = Some(Answer {
            url: None,
            status,
            headers: Vec::new(),
            body: Bytes::new(),
        });
        self
    }

    pub fn always(status: u16) -> Self {
        Self::script([]).then_always(status)
    }

    /// The client of this server, with these layers on it, the outermost first.
    pub fn client(
        &self,
        layers: impl IntoIterator<Item = RetryMiddleware>,
    ) -> ClientWithMiddleware {
        let builder = ClientBuilder::new(plain_http());
        layers
            .into_iter()
            .fold(builder, ClientBuilder::with)
            .with(self.clone())
            .build()
    }

    pub fn seen(&self) -> Vec<Seen> {
        lock(&self.seen).clone()
    }

    pub fn sends(&self) -> usize {
        lock(&self.seen).len()
    }

    /// When each attempt started, in milliseconds.
    pub fn starts(&self) -> Vec<u128> {
        self.seen().iter().map(|seen| seen.at.as_millis()).collect()
    }

    /// The key header's lines of each request.
    pub fn key_lines(&self) -> Vec<Vec<String>> {
        self.seen()
            .iter()
            .map(|seen| lines(&seen.headers, "idempotency-key"))
            .collect()
    }

    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    fn next_step(&self) -> Step {
        let scripted = lock(&self.steps).pop_front();
        scripted.unwrap_or_else(|| match &self.repeats {
            Some(answer) => Step::Answer(Duration::ZERO, answer.clone()),
            None => panic!("the script has no step for this request"),
        })
    }
}

pub fn lines(headers: &HeaderMap, name: &str) -> Vec<String> {
    headers
        .get_all(name)
        .iter()
        .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
        .collect()
}

#[async_trait::async_trait]
impl Middleware for Server {
    async fn handle(
        &self,
        mut request: Request,
        extensions: &mut Extensions,
        _: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let at = self.start.elapsed();
        let step = self.next_step();
        let mut seen = Seen {
            at,
            method: request.method().clone(),
            url: request.url().to_string(),
            headers: request.headers().clone(),
            body: Bytes::new(),
            attempt: extensions.get().copied(),
            key: extensions.get().cloned(),
            deadline: extensions.get().copied(),
        };
        match step {
            Step::Refuse(error) => {
                lock(&self.seen).push(seen);
                return Err(error.into());
            }
            Step::Connect => {
                // As the client does before it connects.
                let _ = request.body().map(http_body::Body::size_hint);
                lock(&self.seen).push(seen);
                return std::future::pending().await;
            }
            _ => {}
        }
        // As a connection does: look at the body, then read it.
        if let Some(body) = request.body_mut().take() {
            let _ = body.is_end_stream();
            seen.body = body.collect().await?.to_bytes();
        }
        lock(&self.seen).push(seen);
        match step {
            Step::Hang | Step::Connect => std::future::pending().await,
            Step::Stall(status) => {
                let body = reqwest::Body::wrap(NeverComes);
                Ok(with_body(status, request.url(), body))
            }
            Step::Break(status) => {
                let body = reqwest::Body::wrap(BreaksOff(Some(Bytes::from_static(b"wh"))));
                Ok(with_body(status, request.url(), body))
            }
            Step::Fail(error) | Step::Refuse(error) => Err(error.into()),
            Step::Answer(after, answer) => {
                tokio::time::sleep(after).await;
                Ok(answer.response(request.url().clone()))
            }
        }
    }
}

impl Answer {
    fn response(&self, url: reqwest::Url) -> Response {
        let elsewhere = self.url.as_ref().map(|url| url.parse().expect("a URL"));
        let url = elsewhere.unwrap_or(url);
        let mut response = http::Response::builder()
            .status(self.status)
            .url(url)
            .body(self.body.clone())
            .expect("a valid response");
        for (name, value) in &self.headers {
            response.headers_mut().append(
                http::HeaderName::try_from(name.as_str()).expect("a header name"),
                HeaderValue::from_bytes(value.as_bytes()).expect("a header value"),
            );
        }
        Response::from(response)
    }
}

fn with_body(status: u16, url: &reqwest::Url, body: reqwest::Body) -> Response {
    let response = http::Response::builder().status(status).url(url.clone());
    Response::from(response.body(body).expect("a valid response"))
}

/// A body of which the end never comes, but an error.
struct BreaksOff(Option<Bytes>);

impl http_body::Body for BreaksOff {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
        Poll::Ready(Some(match self.0.take() {
            Some(bytes) => Ok(http_body::Frame::data(bytes)),
            None => Err(std::io::ErrorKind::ConnectionReset.into()),
        }))
    }
}

/// A body that has been announced, and does not come.
pub struct NeverComes;

impl http_body::Body for NeverComes {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
        Poll::Pending
    }
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A reqwest client without TLS material to load, for tests that never use TLS.
pub fn plain_http() -> reqwest::Client {
    plain_http_builder().build().expect("a client")
}

pub fn plain_http_builder() -> reqwest::ClientBuilder {
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().tls_certs_only([]).no_proxy()
}

/// A real error of a closed port, made on a runtime of its own so that no paused clock is in play.
pub fn refused() -> reqwest::Error {
    std::thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let port = {
                let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
                listener.local_addr().expect("its address").port()
            };
            let url = format!("http://127.0.0.1:{port}/");
            let error = plain_http().get(url).send().await.expect_err("refused");
            assert!(error.is_connect(), "{error:?}");
            error
        })
    })
    .join()
    .expect("the thread")
}

/// A real error of a server that has read the request and closed.
pub fn read_and_closed() -> reqwest::Error {
    std::thread::spawn(|| {
        use std::io::Read as _;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/", listener.local_addr().expect("its address"));
        let server = std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().expect("a connection");
            let mut seen = Vec::new();
            while !seen.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                peer.read_exact(&mut byte).expect("the head");
                seen.push(byte[0]);
            }
        });
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let error =
            runtime.block_on(async { plain_http().get(url).send().await.expect_err("closed") });
        server.join().expect("the server");
        assert!(!error.is_connect() && !error.is_timeout(), "{error:?}");
        error
    })
    .join()
    .expect("the thread")
}

/// The settings that most bug reports are told with: no jitter, 100 ms doubling up to 1 s.
pub fn plain_builder() -> RetryMiddlewareBuilder {
    use reqwest_idempotent_retry::Backoff;
    RetryMiddleware::builder()
        .max_attempts(4)
        .backoff(Backoff::exponential(
            Duration::from_millis(100),
            Duration::from_secs(1),
        ))
        .deadline(Duration::from_secs(10))
        .without_budget()
}

pub const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

pub fn key(key: &str) -> IdempotencyKey {
    IdempotencyKey::new(key).expect("a valid key")
}

/// The report, wherever it is: in the answer's extensions or in the error.
pub fn report(result: &Result<Response, Error>) -> Option<RetryReport> {
    match result {
        Ok(response) => response.retry_report().cloned(),
        Err(error) => error.retry_error().map(|error| error.report().clone()),
    }
}

pub fn status(result: &Result<Response, Error>) -> Option<StatusCode> {
    result.as_ref().ok().map(Response::status)
}
