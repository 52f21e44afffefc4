//! A small HTTP server on a real socket: does as its test says, and logs what it saw.
//!
//! Every server takes a free port of its own and ends when it is dropped. Nothing here waits for a
//! span of time: a test that must know what a server has seen asks [`Wire::saw`].
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test binary uses its own part of this module"
)]

pub mod call;
pub mod gate;
#[cfg(feature = "http2")]
pub mod http2;
pub mod raw;

use std::collections::{HashSet, VecDeque};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use reqwest::dns::{Name, Resolve, Resolving};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Notify;
use tokio::task::{JoinHandle, JoinSet};

use crate::support::{lines, lock};

/// What the server does with a connection, or with a request that it has read to its end.
#[derive(Clone, Debug)]
pub enum Act {
    /// To a connection: closes it without reading.
    CloseUnread,
    /// To a connection: keeps it open, and never says a word.
    Mute,
    /// Closes: the client sees a FIN.
    Close,
    /// Closes with a RST.
    Reset,
    /// Never answers.
    Hang,
    /// Says this, then closes.
    SayAndClose(&'static str),
    /// Says this, and nothing more until it is told to.
    SayAndStall(&'static str, Rest),
    /// Answers 503 with a body that has no end, as fast as it is read.
    Flood,
    Answer(Answer),
}

/// What a stalled server says once it is released.
#[derive(Clone, Debug, Default)]
pub struct Rest {
    pub text: &'static str,
    pub release: Arc<Notify>,
}

#[derive(Clone, Debug)]
pub struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Bytes,
    /// Stop listening before it is sent, so that whoever gets it can no longer connect.
    is_farewell: bool,
}

/// An answer without a body.
pub fn answer(status: u16) -> Answer {
    Answer {
        status,
        headers: Vec::new(),
        body: Bytes::new(),
        is_farewell: false,
    }
}

pub fn redirect(status: u16, location: impl Into<String>) -> Answer {
    answer(status).header("location", location)
}

impl Answer {
    pub fn header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    /// The last answer: the connection closes with it, and there is no other to be had.
    pub fn farewell(mut self) -> Self {
        self.is_farewell = true;
        self.header("connection", "close")
    }

    fn closes(&self) -> bool {
        self.headers.iter().any(|(name, _)| *name == "connection")
    }

    fn bytes(&self) -> Vec<u8> {
        let mut head = format!("HTTP/1.1 {} status\r\n", self.status);
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += &format!("content-length: {}\r\n\r\n", self.body.len());
        [head.as_bytes(), &self.body].concat()
    }
}

impl From<Answer> for Act {
    fn from(answer: Answer) -> Self {
        Self::Answer(answer)
    }
}

/// One request as the server read it.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Connections count from 0.
    pub connection: usize,
    pub method: Method,
    pub path: String,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Seen {
    pub fn keys(&self) -> Vec<String> {
        lines(&self.headers, "idempotency-key")
    }

    /// As in `POST /orders`.
    pub fn line(&self) -> String {
        format!("{} {}", self.method, self.path)
    }
}

#[derive(Clone, Debug)]
pub enum Event {
    Connected(usize),
    Request(Seen),
    /// Both sides are through with the connection.
    Gone(usize),
}

enum Plan {
    /// One act for each connection or request; the last one serves for all further ones.
    Script(VecDeque<Act>),
    Routes(Box<dyn Fn(&Seen) -> Act + Send>),
}

impl Plan {
    fn next(&mut self) -> Option<Act> {
        match self {
            Self::Script(acts) if acts.len() > 1 => acts.pop_front(),
            Self::Script(acts) => acts.front().cloned(),
            Self::Routes(_) => None,
        }
    }

    fn for_connection(&mut self) -> Option<Act> {
        let Self::Script(acts) = self else {
            return None;
        };
        match acts.front() {
            Some(Act::CloseUnread | Act::Mute) => self.next(),
            _ => None,
        }
    }

    fn for_request(&mut self, seen: &Seen) -> Act {
        match self {
            Self::Routes(route) => route(seen),
            Self::Script(_) => self.next().expect("a script has at least one act"),
        }
    }
}

struct Shared {
    plan: Mutex<Plan>,
    log: Mutex<Vec<Event>>,
    logged: Notify,
    accepting: Mutex<Option<JoinHandle<()>>>,
    connections: Mutex<JoinSet<()>>,
}

/// The server.
pub struct Wire {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Drop for Wire {
    fn drop(&mut self) {
        if let Some(accepting) = lock(&self.shared.accepting).take() {
            accepting.abort();
        }
        lock(&self.shared.connections).abort_all();
    }
}

/// Longer than anything takes that a test waits for.
const PATIENCE: Duration = Duration::from_secs(10);

/// Ends a test that would hang.
pub async fn patiently<T>(what: &str, work: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, work).await {
        Ok(done) => done,
        Err(_) => panic!("waited in vain: {what}"),
    }
}

impl Wire {
    /// Does one act after the other, and the last one for ever.
    pub async fn script<A: Into<Act>>(acts: impl IntoIterator<Item = A>) -> Self {
        let acts = acts.into_iter().map(Into::into).collect();
        Self::start(Plan::Script(acts)).await
    }

    /// Does with each request what `route` says.
    pub async fn routes(route: impl Fn(&Seen) -> Act + Send + 'static) -> Self {
        Self::start(Plan::Routes(Box::new(route))).await
    }

    async fn start(plan: Plan) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let shared = Arc::new(Shared {
            plan: Mutex::new(plan),
            log: Mutex::default(),
            logged: Notify::new(),
            accepting: Mutex::default(),
            connections: Mutex::default(),
        });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared)));
        *lock(&shared.accepting) = Some(accepting);
        Self { address, shared }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub fn https(&self, path: &str) -> String {
        format!("https://{}{path}", self.address)
    }

    pub fn log(&self) -> Vec<Event> {
        lock(&self.shared.log).clone()
    }

    pub fn requests(&self) -> Vec<Seen> {
        let request = |event| match event {
            Event::Request(seen) => Some(seen),
            Event::Connected(_) | Event::Gone(_) => None,
        };
        self.log().into_iter().filter_map(request).collect()
    }

    pub fn connections(&self) -> usize {
        let is_new = |event: &&Event| matches!(event, Event::Connected(_));
        self.log().iter().filter(is_new).count()
    }

    /// Waits until the log says so.
    pub async fn until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        patiently(what, async {
            loop {
                let mut logged = pin!(self.shared.logged.notified());
                logged.as_mut().enable();
                if is_so(self) {
                    return;
                }
                logged.await;
            }
        })
        .await;
    }

    /// Waits until so many requests have come, and returns them and any more that have.
    pub async fn saw(&self, requests: usize) -> Vec<Seen> {
        let what = format!("{requests} requests at the server");
        self.until(&what, |wire| wire.requests().len() >= requests)
            .await;
        settle().await;
        self.requests()
    }

    /// What a server has carried out that takes every POST to /orders as an order, once per key.
    pub fn orders(&self) -> usize {
        let orders = self.requests();
        let orders = orders.iter().filter(|seen| seen.line() == "POST /orders");
        let (keyed, unkeyed): (Vec<_>, Vec<_>) = orders.partition(|seen| !seen.keys().is_empty());
        let keys: HashSet<_> = keyed.iter().map(|seen| seen.keys()).collect();
        keys.len() + unkeyed.len()
    }
}

/// Lets everything that is ready to run do so: the pool takes a connection back, the server reads
/// what is there.
pub async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

impl Shared {
    fn note(&self, event: Event) {
        lock(&self.log).push(event);
        self.logged.notify_waiters();
    }

    async fn stop_listening(&self) {
        let accepting = lock(&self.accepting).take();
        if let Some(accepting) = accepting {
            accepting.abort();
            // The port is closed once the task that owns it is gone.
            let _ = accepting.await;
        }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    for connection in 0.. {
        let (stream, _) = listener.accept().await.expect("a connection");
        shared.note(Event::Connected(connection));
        let peer = Peer {
            connection,
            stream,
            unread: BytesMut::new(),
        };
        let serving = serve(peer, Arc::clone(&shared));
        lock(&shared.connections).spawn(serving);
    }
}

async fn serve(mut peer: Peer, shared: Arc<Shared>) {
    let connection = peer.connection;
    let act = lock(&shared.plan).for_connection();
    match act {
        Some(Act::CloseUnread) => drop(peer),
        Some(_) => peer.wait_for_close().await,
        None => {
            let _ = peer.converse(&shared).await;
            drop(peer);
        }
    }
    shared.note(Event::Gone(connection));
}

struct Peer {
    connection: usize,
    stream: TcpStream,
    unread: BytesMut,
}

impl Peer {
    /// Reads request after request, until either side has had enough.
    async fn converse(&mut self, shared: &Shared) -> io::Result<()> {
        loop {
            let seen = self.request().await?;
            let act = lock(&shared.plan).for_request(&seen);
            shared.note(Event::Request(seen));
            self.act(act, shared).await?;
        }
    }

    /// An error ends the connection.
    async fn act(&mut self, act: Act, shared: &Shared) -> io::Result<()> {
        match act {
            Act::Close | Act::CloseUnread => Err(closed()),
            Act::Reset => {
                self.stream.set_zero_linger()?;
                Err(closed())
            }
            Act::Hang | Act::Mute => {
                self.wait_for_close().await;
                Err(closed())
            }
            Act::SayAndClose(text) => {
                self.stream.write_all(text.as_bytes()).await?;
                Err(closed())
            }
            Act::SayAndStall(text, rest) => {
                self.stream.write_all(text.as_bytes()).await?;
                tokio::select! {
                    () = rest.release.notified() => {
                        self.stream.write_all(rest.text.as_bytes()).await
                    }
                    () = self.wait_for_close() => Err(closed()),
                }
            }
            Act::Flood => self.flood().await,
            Act::Answer(answer) => {
                if answer.is_farewell {
                    shared.stop_listening().await;
                }
                self.stream.write_all(&answer.bytes()).await?;
                if answer.closes() {
                    Err(closed())
                } else {
                    Ok(())
                }
            }
        }
    }

    async fn flood(&mut self) -> io::Result<()> {
        let head = "HTTP/1.1 503 status\r\ntransfer-encoding: chunked\r\n\r\n";
        self.stream.write_all(head.as_bytes()).await?;
        let chunk = format!("1000\r\n{}\r\n", "x".repeat(0x1000));
        loop {
            self.stream.write_all(chunk.as_bytes()).await?;
        }
    }

    async fn request(&mut self) -> io::Result<Seen> {
        let end = loop {
            match find(&self.unread, b"\r\n\r\n") {
                Some(at) => break at + 4,
                None => self.read_more().await?,
            }
        };
        let head = String::from_utf8(self.unread.split_to(end).to_vec()).expect("an ASCII head");
        let mut rows = head.lines();
        let mut line = rows.next().expect("a request line").split(' ');
        let method = line.next().expect("a method").parse().expect("a method");
        let path = line.next().expect("a path").to_owned();
        let headers = rows.take_while(|row| !row.is_empty()).map(header).collect();
        let body = self.body(&headers).await?;
        Ok(Seen {
            connection: self.connection,
            method,
            path,
            headers,
            body,
        })
    }

    async fn body(&mut self, headers: &HeaderMap) -> io::Result<Bytes> {
        if headers.contains_key("transfer-encoding") {
            return self.chunks().await;
        }
        let length = headers.get("content-length").map_or(0, |value| {
            value.to_str().expect("ASCII").parse().expect("a length")
        });
        self.exactly(length).await
    }

    /// RFC 9112 §7.1, without extensions and trailers.
    async fn chunks(&mut self) -> io::Result<Bytes> {
        let mut body = BytesMut::new();
        loop {
            let end = loop {
                match find(&self.unread, b"\r\n") {
                    Some(at) => break at,
                    None => self.read_more().await?,
                }
            };
            let line = self.exactly(end + 2).await?;
            let size = std::str::from_utf8(&line[..end]).expect("ASCII");
            let size = usize::from_str_radix(size, 16).expect("a chunk's size");
            let chunk = self.exactly(size + 2).await?;
            if size == 0 {
                return Ok(body.freeze());
            }
            body.extend_from_slice(&chunk[..size]);
        }
    }

    async fn exactly(&mut self, length: usize) -> io::Result<Bytes> {
        while self.unread.len() < length {
            self.read_more().await?;
        }
        Ok(self.unread.split_to(length).freeze())
    }

    async fn read_more(&mut self) -> io::Result<()> {
        match self.stream.read_buf(&mut self.unread).await? {
            0 => Err(closed()),
            _ => Ok(()),
        }
    }

    async fn wait_for_close(&mut self) {
        while self.read_more().await.is_ok() {}
    }
}

fn closed() -> io::Error {
    io::ErrorKind::ConnectionAborted.into()
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes
        .windows(wanted.len())
        .position(|window| window == wanted)
}

fn header(row: &str) -> (HeaderName, HeaderValue) {
    let (name, value) = row.split_once(':').expect("a header");
    let name = name.parse().expect("a header name");
    (name, value.trim().parse().expect("a header value"))
}

/// A port at which nobody listens, and which nobody else can get meanwhile.
pub struct ClosedPort(TcpSocket);

impl ClosedPort {
    pub fn new() -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        let any = "127.0.0.1:0".parse().expect("an address");
        socket.bind(any).expect("a port");
        Self(socket)
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.0.local_addr().expect("an address"))
    }
}

/// A resolver that never answers, and counts how often it is asked.
#[derive(Clone, Debug, Default)]
pub struct StalledDns(Arc<AtomicUsize>);

impl StalledDns {
    pub fn asked(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Resolve for StalledDns {
    fn resolve(&self, _: Name) -> Resolving {
        self.0.fetch_add(1, Ordering::Relaxed);
        Box::pin(std::future::pending())
    }
}
