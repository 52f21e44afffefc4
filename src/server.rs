//! Where a request enters a service: its remaining time, for all calls made on its behalf.
//!
//! ```
//! use std::time::Duration;
//! use axum::{Router, routing::get};
//! use reqwest_idempotent_retry::server::ContextLayer;
//!
//! async fn handler() -> &'static str {
//!     // every call made from here through a client with the retry layer ends in time
//!     "done"
//! }
//!
//! let app: Router = Router::new()
//!     .route("/", get(handler))
//!     .layer(ContextLayer::new().longest(Duration::from_secs(30)));
//! ```

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context as TaskContext, Poll};
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderName, Request};
use tokio_util::sync::CancellationToken;
use tower_layer::Layer;
use tower_service::Service;

use crate::ambient::{self, Context};
use crate::clock;
use crate::observe;
use crate::timeout_header::{TimeoutHeader, whole_number};

/// A [`tower::Layer`](Layer) that runs each request's handler in an [ambient scope](crate::ambient): with
/// a deadline by what the request says of the time it has left, and with a token that is cancelled
/// when the client goes away.
///
/// Works with every service of `http::Request`: axum, tonic, hyper. Put it outside of layers that
/// make calls themselves.
///
/// * Of several headers the shortest time counts. A time that cannot be read is ignored and
///   counted ([`malformed`](Self::malformed)): a bad header is no reason to refuse a request.
/// * The time counts from when the request's head has been read.
/// * The client goes away when the server drops the handler's future before it is done. While the
///   response body is streamed nothing is cancelled. A handler that panics counts as gone too.
/// * The scope is around the future of the service, not around its `call`.
#[derive(Clone, Debug)]
#[must_use]
pub struct ContextLayer {
    headers: Vec<TimeoutHeader>,
    longest: Option<Duration>,
    attempt: Option<HeaderName>,
    malformed: Arc<AtomicU64>,
}

impl Default for ContextLayer {
    fn default() -> Self {
        Self {
            headers: vec![TimeoutHeader::Grpc, TimeoutHeader::Envoy],
            longest: None,
            attempt: None,
            malformed: Arc::default(),
        }
    }
}

impl ContextLayer {
    /// Reads `grpc-timeout` and `x-envoy-expected-rq-timeout-ms`.
    pub fn new() -> Self {
        Self::default()
    }

    /// The headers that are read, in place of the two.
    pub fn timeout_headers(mut self, headers: impl IntoIterator<Item = TimeoutHeader>) -> Self {
        self.headers = headers.into_iter().collect();
        self
    }

    /// The longest that a request may take, whatever it says, and what one may take that says nothing.
    /// Default: no limit.
    pub fn longest(mut self, span: Duration) -> Self {
        self.longest = Some(span);
        self
    }

    /// The header with the number of the caller's attempt, for
    /// [`Context::attempt`](crate::ambient::Context::attempt). Default: none.
    pub fn attempt_header(mut self, name: HeaderName) -> Self {
        self.attempt = Some(name);
        self
    }

    /// How many values could not be read so far, by this layer and its clones.
    #[must_use]
    pub fn malformed(&self) -> u64 {
        self.malformed.load(Ordering::Relaxed)
    }

    fn context(&self, headers: &HeaderMap, now: Instant) -> Context {
        let told = self
            .headers
            .iter()
            .filter_map(|header| self.told(header, headers));
        let left = told.chain(self.longest).min();
        let context = match left.and_then(|left| now.checked_add(left)) {
            Some(deadline) => Context::new().deadline_at(deadline),
            None => Context::new(),
        };
        match self.attempt(headers) {
            Some(number) => context.inbound_attempt(number),
            None => context,
        }
    }

    /// The shortest time that the lines of this header give.
    fn told(&self, header: &TimeoutHeader, headers: &HeaderMap) -> Option<Duration> {
        let lines = headers.get_all(header.name()).iter();
        let times = lines.filter_map(|value| {
            let time = header.read(value);
            if time.is_none() {
                self.malformed.fetch_add(1, Ordering::Relaxed);
                observe::malformed(header.name());
            }
            time
        });
        times.min()
    }

    fn attempt(&self, headers: &HeaderMap) -> Option<u32> {
        let value = headers.get(self.attempt.as_ref()?)?;
        let number = value.to_str().ok().and_then(whole_number)?;
        u32::try_from(number).ok().filter(|&number| number > 0)
    }
}

impl<S> Layer<S> for ContextLayer {
    type Service = ContextService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        ContextService {
            inner,
            layer: self.clone(),
        }
    }
}

/// What [`ContextLayer`] makes of a service.
#[derive(Clone, Debug)]
pub struct ContextService<S> {
    inner: S,
    layer: ContextLayer,
}

impl<S, B> Service<Request<B>> for ContextService<S>
where
    S: Service<Request<B>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = InContext<Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, task: &mut TaskContext<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(task)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // A scope around this service counts as well, as where one service calls another in its process.
        let around = ambient::current();
        let around = around.as_ref().and_then(Context::cancellation);
        let token = around.map_or_else(CancellationToken::new, CancellationToken::child_token);
        let context = self
            .layer
            .context(request.headers(), clock::now())
            .cancelled_by(token.clone());
        let handler = self.inner.call(request);
        InContext(Box::pin(async move {
            let client_gone = token.drop_guard();
            let answer = ambient::scope(context, handler).await;
            client_gone.disarm();
            answer
        }))
    }
}

/// A handler's future in its context.
///
/// # Cancel safety
///
/// Dropped before it is done, it cancels the token of the context (one that was never polled has none).
#[must_use = "futures do nothing unless polled"]
pub struct InContext<T>(Pin<Box<dyn Future<Output = T> + Send>>);

impl<T> Future for InContext<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, task: &mut TaskContext<'_>) -> Poll<T> {
        self.0.as_mut().poll(task)
    }
}

impl<T> fmt::Debug for InContext<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InContext").finish_non_exhaustive()
    }
}
