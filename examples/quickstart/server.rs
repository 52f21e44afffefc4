//! An order service: HTTP by axum, storage by SQLite, faults on request, and a log of its own.
//!
//! An order and its receipt are written in ONE transaction. That makes a repeat harmless: either
//! both are there, and the receipt is sent again, or neither is.

use std::collections::HashMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Path, Query, State};
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use reqwest_idempotent_retry::CancellationToken;
use rusqlite::{Connection, OptionalExtension};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::Result;

/// The header of a receipt that was sent before.
pub(crate) const REPLAYED: &str = "idempotent-replayed";

/// What shall go wrong with a request: `?fault=…`.
pub(crate) mod fault {
    pub(crate) const NONE: &str = "none";
    /// Commits the first order, then closes its connection without a byte of an answer.
    pub(crate) const LOSE_FIRST_ANSWER: &str = "lose-first-answer";
    /// Commits, then answers after a minute.
    pub(crate) const SLOW: &str = "slow";
    pub(crate) const TWO_503: &str = "two-503";
    pub(crate) const ALWAYS_503: &str = "always-503";
    pub(crate) const RETRY_AFTER_60_S: &str = "retry-after-60-s";
    /// A known key with another body is answered by 422 in place of 409.
    pub(crate) const REUSED_KEY_IS_422: &str = "reused-key-is-422";
}

/// A running service, with empty tables and an empty log.
#[derive(Debug)]
pub(crate) struct Server {
    address: SocketAddr,
    shop: Arc<Shop>,
    stop: CancellationToken,
    task: JoinHandle<std::io::Result<()>>,
}

impl Server {
    pub(crate) async fn start() -> Result<Self> {
        let shop = Arc::new(Shop::open()?);
        let routes = Router::new()
            .route("/orders", post(create_order))
            .route("/orders/by-key/{key}", get(find_order))
            .with_state(Arc::clone(&shop));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let stop = CancellationToken::new();
        let stopped = stop.clone().cancelled_owned();
        let serve = axum::serve(listener, routes).with_graceful_shutdown(stopped);
        Ok(Self {
            address,
            shop,
            stop,
            task: tokio::spawn(serve.into_future()),
        })
    }

    pub(crate) async fn stop(self) -> Result<()> {
        self.stop.cancel();
        Ok(self.task.await??)
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn orders_url(&self, fault: &str) -> String {
        self.url(&format!("/orders?fault={fault}"))
    }

    pub(crate) fn uptime(&self) -> Duration {
        self.shop.started.elapsed()
    }

    /// The bodies of all stored orders.
    pub(crate) fn orders(&self) -> Result<Vec<String>> {
        let tables = lock(&self.shop.tables);
        let mut query = tables.prepare("SELECT body FROM orders ORDER BY id")?;
        let bodies = query.query_map([], |row| row.get(0))?;
        Ok(bodies.collect::<rusqlite::Result<_>>()?)
    }

    pub(crate) fn log(&self) -> Vec<Entry> {
        lock(&self.shop.log).clone()
    }
}

/// One request as the service saw it.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// Since the service was started.
    pub(crate) at: Duration,
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) key: Option<String>,
    pub(crate) outcome: String,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.method, self.path)?;
        if let Some(key) = &self.key {
            write!(f, ", key {key:.8}")?;
        }
        write!(f, ": {}", self.outcome)
    }
}

async fn create_order(
    State(shop): State<Arc<Shop>>,
    Query(query): Query<HashMap<String, String>>,
    uri: Uri,
    headers: HeaderMap,
    body: String,
) -> Response {
    let key = headers.get("idempotency-key");
    let key = key.and_then(|key| key.to_str().ok());
    let number = shop.receives(Method::POST, &uri, key);
    let fault = query.get("fault").map_or(fault::NONE, String::as_str);
    let answer = match key {
        Some(key) => answer(&shop, number, key, &body, fault).unwrap_or_else(storage_failure),
        None => StatusCode::BAD_REQUEST.into_response(),
    };
    let outcome = outcome(&answer);
    match fault {
        fault::LOSE_FIRST_ANSWER if number == 1 => {
            shop.notes(number, format!("{outcome} lost, closed without a byte"));
            close_the_connection()
        }
        fault::SLOW => {
            shop.notes(number, format!("{outcome} held back for 60 s"));
            tokio::time::sleep(Duration::from_secs(60)).await;
        }
        _ => shop.notes(number, outcome),
    }
    answer
}

fn answer(
    shop: &Shop,
    number: usize,
    key: &str,
    body: &str,
    fault: &str,
) -> rusqlite::Result<Response> {
    let busy = StatusCode::SERVICE_UNAVAILABLE;
    let too_many = (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, "60")]);
    match fault {
        fault::TWO_503 if number <= 2 => Ok(busy.into_response()),
        fault::ALWAYS_503 => Ok(busy.into_response()),
        fault::RETRY_AFTER_60_S => Ok(too_many.into_response()),
        fault::REUSED_KEY_IS_422 => shop.store(key, body, StatusCode::UNPROCESSABLE_ENTITY),
        _ => shop.store(key, body, StatusCode::CONFLICT),
    }
}

fn outcome(answer: &Response) -> String {
    let what = match answer.headers().contains_key(REPLAYED) {
        true => "receipt replayed",
        false if answer.status().is_success() => "order committed",
        false => "nothing stored",
    };
    format!("{what}; {}", answer.status().as_u16())
}

/// What a crash does to a client: ends this connection's task, and its socket with it.
///
/// Unwinds as a panic does, without a panic's message.
fn close_the_connection() -> ! {
    std::panic::resume_unwind(Box::new("the answer is lost"))
}

async fn find_order(State(shop): State<Arc<Shop>>, Path(key): Path<String>, uri: Uri) -> Response {
    let number = shop.receives(Method::GET, &uri, None);
    let answer = match find_receipt(&lock(&shop.tables), &key) {
        Ok(Some((_, receipt))) => receipt.into_response(),
        Ok(None) => StatusCode::NOT_FOUND.into_response(),
        Err(error) => storage_failure(error),
    };
    shop.notes(number, format!("answer {}", answer.status().as_u16()));
    answer
}

fn storage_failure(_: rusqlite::Error) -> Response {
    StatusCode::INTERNAL_SERVER_ERROR.into_response()
}

/// The tables and the log.
#[derive(Debug)]
struct Shop {
    started: Instant,
    tables: Mutex<Connection>,
    log: Mutex<Vec<Entry>>,
}

impl Shop {
    fn open() -> Result<Self> {
        let tables = Connection::open_in_memory()?;
        tables.execute_batch(
            "CREATE TABLE orders (id INTEGER PRIMARY KEY, body TEXT NOT NULL);
             CREATE TABLE receipts (
                 key TEXT PRIMARY KEY, fingerprint INTEGER NOT NULL, receipt TEXT NOT NULL);",
        )?;
        Ok(Self {
            started: Instant::now(),
            tables: Mutex::new(tables),
            log: Mutex::default(),
        })
    }

    /// Writes order and receipt in one transaction, unless the key is known.
    fn store(&self, key: &str, body: &str, refusal: StatusCode) -> rusqlite::Result<Response> {
        let mut tables = lock(&self.tables);
        let transaction = tables.transaction()?;
        if let Some((known, receipt)) = find_receipt(&transaction, key)? {
            return Ok(match known == fingerprint(body) {
                true => ([(REPLAYED, "true")], receipt).into_response(),
                false => refusal.into_response(),
            });
        }
        transaction.execute("INSERT INTO orders (body) VALUES (?1)", [body])?;
        let receipt = json!({ "order": transaction.last_insert_rowid(), "status": "completed" });
        let receipt = receipt.to_string();
        transaction.execute(
            "INSERT INTO receipts (key, fingerprint, receipt) VALUES (?1, ?2, ?3)",
            (key, fingerprint(body), &receipt),
        )?;
        transaction.commit()?;
        Ok(receipt.into_response())
    }

    /// Logs a request, and says which one it is: 1 for the first.
    fn receives(&self, method: Method, uri: &Uri, key: Option<&str>) -> usize {
        let mut log = lock(&self.log);
        log.push(Entry {
            at: self.started.elapsed(),
            method,
            path: uri.path().to_owned(),
            key: key.map(str::to_owned),
            outcome: String::new(),
        });
        log.len()
    }

    fn notes(&self, number: usize, outcome: String) {
        if let Some(entry) = lock(&self.log).get_mut(number - 1) {
            entry.outcome = outcome;
        }
    }
}

/// Fingerprint of the body, and receipt, of the order with this key.
fn find_receipt(tables: &Connection, key: &str) -> rusqlite::Result<Option<(i64, String)>> {
    const QUERY: &str = "SELECT fingerprint, receipt FROM receipts WHERE key = ?1";
    tables
        .query_row(QUERY, [key], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()
}

/// Tells one body from another. A service that outlives its process would use SHA-256.
fn fingerprint(body: &str) -> i64 {
    let mut hasher = DefaultHasher::new();
    body.hash(&mut hasher);
    hasher.finish().cast_signed()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
