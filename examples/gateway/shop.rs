//! Service A: a page is made of two answers of the stock service, and each visit is told to it.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use metrics_exporter_prometheus::PrometheusHandle;
use reqwest_idempotent_retry::server::ContextLayer;
use reqwest_idempotent_retry::{CancellationToken, TimeoutHeader, ambient};
use reqwest_middleware::{ClientWithMiddleware, Error};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::stock::Stock;
use crate::{BROWSER_TIMEOUT, REFUSED, Result, client, ms};

/// What the shop does by itself before it calls anybody.
pub(crate) const OWN_WORK: Duration = Duration::from_millis(100);

/// The names of its clients in the metrics.
pub(crate) const CATALOG: &str = "catalog";
pub(crate) const VISITS: &str = "visits";

#[derive(Clone)]
struct Clients {
    catalog: ClientWithMiddleware,
    visits: ClientWithMiddleware,
    stock: String,
}

/// **The handler, which knows nothing of deadlines, tokens and retries**, but to spawn by
/// [`ambient::spawn`].
async fn page(State(clients): State<Clients>, Path(product): Path<String>) -> Response {
    tokio::time::sleep(OWN_WORK).await;
    let Clients {
        catalog,
        visits,
        stock,
    } = clients;
    let visit = visits.post(format!("{stock}/visit/{product}")).send();
    ambient::spawn(visit);
    let price = catalog.get(format!("{stock}/price/{product}")).send();
    let reviews = catalog.get(format!("{stock}/reviews/{product}")).send();
    let (price, reviews) = tokio::join!(price, reviews);
    match (text(price).await, text(reviews).await) {
        (Ok(price), Ok(reviews)) => format!("{product}: {price}, {reviews}").into_response(),
        (Err(failed), _) | (_, Err(failed)) => failed,
    }
}

/// The text of an answer, or what the browser is told in place of a page.
async fn text(answer: Result<reqwest::Response, Error>) -> Result<String, Response> {
    let too_late = |why: String| (StatusCode::GATEWAY_TIMEOUT, why).into_response();
    let answer = answer.map_err(|error| too_late(error.to_string()))?;
    if answer.status().is_success() {
        let text = answer.text().await;
        return text.map_err(|error| too_late(error.to_string()));
    }
    let mut failed = answer.status().into_response();
    if let Some(reason) = answer.headers().get(REFUSED) {
        failed.headers_mut().insert(REFUSED, reason.clone());
    }
    Err(failed)
}

/// **Where a request enters**: all that has to be said about deadlines is said here.
fn routes(clients: Clients, log: Log, recorder: PrometheusHandle) -> Router {
    let deadlines = ContextLayer::new()
        .timeout_headers([TimeoutHeader::Millis(BROWSER_TIMEOUT)])
        .longest(ms(30_000));
    let metrics = move || async move { recorder.render() };
    Router::new()
        .route("/page/{product}", get(page))
        .with_state(clients)
        .layer(from_fn_with_state(log, note_the_time_left)) // for the table of this example
        .layer(deadlines)
        .route("/metrics", get(metrics))
}

/// The time that was left for each page when its request came in.
type Log = Arc<Mutex<Vec<(String, Duration)>>>;

async fn note_the_time_left(State(log): State<Log>, request: Request, next: Next) -> Response {
    let left = ambient::current().and_then(|context| context.time_left());
    let page = request.uri().path().to_owned();
    let entry = left.map(|left| (page, left));
    log.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .extend(entry);
    next.run(request).await
}

pub(crate) struct Shop {
    address: SocketAddr,
    log: Log,
    stop: CancellationToken,
    task: JoinHandle<std::io::Result<()>>,
}

impl Shop {
    pub(crate) async fn start(stock: &Stock, recorder: PrometheusHandle) -> Result<Self> {
        let clients = Clients {
            catalog: client(CATALOG)?,
            visits: client(VISITS)?,
            stock: stock.url(),
        };
        let (log, stop) = (Log::default(), CancellationToken::new());
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let routes = routes(clients, Arc::clone(&log), recorder);
        let stopped = stop.clone().cancelled_owned();
        let serve = axum::serve(listener, routes).with_graceful_shutdown(stopped);
        Ok(Self {
            address,
            log,
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

    /// The time that was left for this page when its request came in.
    pub(crate) fn had(&self, product: &str) -> Option<Duration> {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let mut entries = log.iter();
        let entry = entries.find(|(page, _)| page.ends_with(&format!("/{product}")))?;
        Some(entry.1)
    }
}
