//! A service on a port of its own: it is well or it fails, and counts what it receives.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::Router;
use axum::extract::State;
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use reqwest_idempotent_retry::CancellationToken;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::{ATTEMPT, Result};

#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) name: &'static str,
    address: SocketAddr,
    desk: Arc<Desk>,
    stop: CancellationToken,
    task: JoinHandle<std::io::Result<()>>,
}

/// Requests that have arrived.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Arrivals {
    pub(crate) all: u64,
    /// Those that are the first attempt of their operation.
    pub(crate) first: u64,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Received {
    pub(crate) ever: Arrivals,
    pub(crate) while_failing: Arrivals,
}

impl Service {
    pub(crate) async fn start(name: &'static str) -> Result<Self> {
        let desk = Arc::new(Desk::default());
        let routes = Router::new()
            .route("/", get(answer))
            .with_state(Arc::clone(&desk));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let stop = CancellationToken::new();
        let stopped = stop.clone().cancelled_owned();
        let serve = axum::serve(listener, routes).with_graceful_shutdown(stopped);
        Ok(Self {
            name,
            address,
            desk,
            stop,
            task: tokio::spawn(serve.into_future()),
        })
    }

    pub(crate) async fn stop(self) -> Result<()> {
        self.stop.cancel();
        Ok(self.task.await??)
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    /// What load control knows it by: its host and port.
    pub(crate) fn key(&self) -> String {
        self.address.to_string()
    }

    pub(crate) fn fails(&self) {
        self.desk.is_failing.store(true, Ordering::SeqCst);
    }

    pub(crate) fn recovers(&self) {
        self.desk.is_failing.store(false, Ordering::SeqCst);
    }

    pub(crate) fn received(&self) -> Received {
        *self.desk.received()
    }
}

#[derive(Debug, Default)]
struct Desk {
    is_failing: AtomicBool,
    failures: AtomicU64,
    received: Mutex<Received>,
}

impl Desk {
    fn received(&self) -> MutexGuard<'_, Received> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn receives(&self, is_first: bool, is_failing: bool) {
        let mut received = self.received();
        received.ever.add(is_first);
        if is_failing {
            received.while_failing.add(is_first);
        }
    }

    fn fails(&self) -> Response {
        let busy = StatusCode::SERVICE_UNAVAILABLE;
        match self.failures.fetch_add(1, Ordering::SeqCst) % 3 {
            0 => (busy, [(RETRY_AFTER, "1")]).into_response(),
            _ => busy.into_response(),
        }
    }
}

impl Arrivals {
    fn add(&mut self, is_first: bool) {
        self.all += 1;
        self.first += u64::from(is_first);
    }
}

async fn answer(State(desk): State<Arc<Desk>>, headers: HeaderMap) -> Response {
    let is_failing = desk.is_failing.load(Ordering::SeqCst);
    let is_first = headers.get(ATTEMPT).is_some_and(|number| number == "1");
    desk.receives(is_first, is_failing);
    if is_failing {
        desk.fails()
    } else {
        "tea".into_response()
    }
}
