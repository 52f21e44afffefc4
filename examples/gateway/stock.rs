//! Service B: answers about products, refuses what it could not end in time, and keeps its own books.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use reqwest_idempotent_retry::server::ContextLayer;
use reqwest_idempotent_retry::{CancellationToken, ambient};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::{ATTEMPT, REFUSED, Result, ms};

/// Longer than anything takes here, unless it has gone wrong.
const PATIENCE: Duration = Duration::from_secs(10);

/// One request, as it came in and as it ended.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) method: Method,
    pub(crate) part: String,
    pub(crate) product: String,
    /// Of the caller's attempts.
    pub(crate) attempt: Option<u32>,
    /// The time that the caller says is left, as it says it.
    pub(crate) told: Option<String>,
    /// The time that was left when the work began.
    pub(crate) had: Option<Duration>,
    pub(crate) ended: Option<(Ending, Instant)>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Ending {
    Answered,
    /// With a 503, as it happens.
    Failed,
    /// Before any work.
    Refused,
    /// The caller went away.
    BrokenOff,
}

/// How long the work takes. `None`: for ever.
fn work(part: &str, product: &str) -> Option<Duration> {
    match (product, part) {
        ("tea", "visit") => Some(ms(300)),
        ("tea", _) => Some(ms(20)),
        ("cake", _) => Some(ms(1900)),
        _ => None,
    }
}

async fn answer(
    State(books): State<Arc<Books>>,
    Path((part, product)): Path<(String, String)>,
    request: Request,
) -> Response {
    let context = ambient::current().unwrap_or_default();
    let (left, attempt) = (context.time_left(), context.attempt());
    let told = request.headers().get("grpc-timeout");
    let entry = books.open(Call {
        method: request.method().clone(),
        part: part.clone(),
        product: product.clone(),
        attempt,
        told: told.and_then(|told| Some(told.to_str().ok()?.to_owned())),
        had: left,
        ended: None,
    });
    let needs = work(&part, &product);
    if left.is_some_and(|left| Some(left) < needs) {
        entry.ends(Ending::Refused);
        return (
            StatusCode::SERVICE_UNAVAILABLE,
            [(REFUSED, "too little time left")],
        )
            .into_response();
    }
    if (&*product, &*part, attempt) == ("tea", "price", Some(1)) {
        entry.ends(Ending::Failed);
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    match needs {
        Some(needs) => sleep(needs).await,
        None => std::future::pending().await,
    }
    entry.ends(Ending::Answered);
    format!("{part} of {product}").into_response()
}

#[derive(Debug, Default)]
struct Books {
    calls: Mutex<Vec<Call>>,
    changed: Notify,
}

impl Books {
    fn calls(&self) -> MutexGuard<'_, Vec<Call>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(self: &Arc<Self>, call: Call) -> Entry {
        let mut calls = self.calls();
        calls.push(call);
        self.changed.notify_waiters();
        Entry {
            books: Arc::clone(self),
            number: calls.len() - 1,
        }
    }
}

/// A call in the books. Dropped before its end, it is broken off.
struct Entry {
    books: Arc<Books>,
    number: usize,
}

impl Entry {
    fn ends(&self, how: Ending) {
        if let Some(call) = self.books.calls().get_mut(self.number) {
            call.ended.get_or_insert((how, Instant::now()));
        }
        self.books.changed.notify_waiters();
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.ends(Ending::BrokenOff);
    }
}

pub(crate) struct Stock {
    address: SocketAddr,
    books: Arc<Books>,
    stop: CancellationToken,
    task: JoinHandle<std::io::Result<()>>,
}

impl Stock {
    pub(crate) async fn start() -> Result<Self> {
        let (books, stop) = (Arc::<Books>::default(), CancellationToken::new());
        let routes = Router::new()
            .route("/{part}/{product}", any(answer))
            .with_state(Arc::clone(&books))
            .layer(ContextLayer::new().attempt_header(ATTEMPT));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let stopped = stop.clone().cancelled_owned();
        let serve = axum::serve(listener, routes).with_graceful_shutdown(stopped);
        Ok(Self {
            address,
            books,
            stop,
            task: tokio::spawn(serve.into_future()),
        })
    }

    pub(crate) async fn stop(self) -> Result<()> {
        self.stop.cancel();
        Ok(self.task.await??)
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// How many calls by this method are of that kind.
    pub(crate) fn count(&self, method: &Method, is_of_kind: impl Fn(&Call) -> bool) -> u64 {
        let calls = self.books.calls();
        let calls = calls.iter().filter(|call| call.method == method);
        calls.filter(|call| is_of_kind(call)).count() as u64
    }

    /// Waits until so many calls about a product have come.
    pub(crate) async fn under_way(&self, product: &str, calls: usize) -> Result<()> {
        self.until(product, "have come", calls, |_| true).await?;
        Ok(())
    }

    /// Waits until so many calls about a product have ended, and returns them.
    pub(crate) async fn ended(&self, product: &str, calls: usize) -> Result<Vec<Call>> {
        self.until(product, "have ended", calls, |call| call.ended.is_some())
            .await
    }

    async fn until(
        &self,
        product: &str,
        what: &str,
        wanted: usize,
        counts: impl Fn(&Call) -> bool,
    ) -> Result<Vec<Call>> {
        let waits = async {
            loop {
                let mut changed = pin!(self.books.changed.notified());
                changed.as_mut().enable();
                let calls = self.about(product);
                if calls.iter().filter(|call| counts(call)).count() >= wanted {
                    return calls;
                }
                changed.await;
            }
        };
        let waited = timeout(PATIENCE, waits).await;
        waited.map_err(|_| {
            let calls = self.about(product);
            format!("not {wanted} calls about {product} {what} in {PATIENCE:?}: {calls:#?}").into()
        })
    }

    fn about(&self, product: &str) -> Vec<Call> {
        let calls = self.books.calls();
        let calls = calls.iter().filter(|call| call.product == product);
        calls.cloned().collect()
    }
}

impl Call {
    pub(crate) fn is(&self, ending: Ending) -> bool {
        self.ended.is_some_and(|(how, _)| how == ending)
    }

    /// What the caller has told is left. `grpc-timeout` has a unit; ours sends milliseconds, as long as
    /// there is one left.
    pub(crate) fn told(&self) -> Option<Duration> {
        self.told.as_ref()?.strip_suffix('m')?.parse().ok().map(ms)
    }
}
