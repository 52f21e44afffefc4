//! An order service over plain TCP that fails as its plan says, and now and then goes down whole.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use reqwest_idempotent_retry::CancellationToken;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Notify, RwLock, RwLockReadGuard};
use tokio::task::{JoinHandle, JoinSet};

use super::books::{Books, Conflict, Order};
use super::plan::{Fault, SLOW, Seed, Wish};
use crate::support::ms;

/// It goes down once in so many requests, at whatever point the others are.
const RESTART_EVERY: u64 = 700;

/// It stays away for so long: some operations have all their attempts in it, others just the first.
const DOWNTIME: Duration = ms(12);

/// A port of our own, whether anybody listens there or not: while this exists nobody else gets it,
/// not even as the near end of a connection. (Linux lets one socket listen beside others that are
/// only bound, if all of them set `SO_REUSEADDR`.)
#[derive(Debug)]
pub(crate) struct Port {
    _reserve: TcpSocket,
    address: SocketAddr,
}

impl Port {
    pub(crate) fn reserve() -> Self {
        let any = "127.0.0.1:0".parse().expect("an address");
        let reserve = bind(any).expect("a port");
        let address = reserve.local_addr().expect("its address");
        Self {
            _reserve: reserve,
            address,
        }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    fn listen(&self) -> TcpListener {
        let socket = bind(self.address).expect("our port");
        socket.listen(1024).expect("a listener")
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

/// The running service.
#[derive(Debug)]
pub(crate) struct Server {
    address: SocketAddr,
    shop: Arc<Shop>,
    running: JoinHandle<()>,
}

impl Server {
    pub(crate) fn start(seed: Seed) -> Self {
        let port = Port::reserve();
        let address = port.address();
        let shop = Arc::new(Shop {
            seed,
            books: Books::default(),
            calm: AtomicBool::new(false),
            work: RwLock::new(()),
            restart: Notify::new(),
            restarts: AtomicU64::new(0),
            stop: CancellationToken::new(),
        });
        let running = tokio::spawn(run(port, Arc::clone(&shop)));
        Self {
            address,
            shop,
            running,
        }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn restarts(&self) -> u64 {
        self.shop.restarts.load(Ordering::Relaxed)
    }

    pub(crate) fn requests(&self) -> u64 {
        self.shop.books.requests()
    }

    /// From here on nothing fails. Returns once all that was begun before has ended.
    pub(crate) async fn calm_down(&self) {
        self.shop.calm.store(true, Ordering::SeqCst);
        let _all_work_is_done = self.shop.work.write().await;
    }

    /// Closes once every client has, and hands over the books.
    pub(crate) async fn close(self) -> Arc<Shop> {
        self.shop.stop.cancel();
        self.running.await.expect("no fault of the server itself");
        self.shop
    }
}

/// What outlives a restart.
#[derive(Debug)]
pub(crate) struct Shop {
    seed: Seed,
    pub(crate) books: Books,
    calm: AtomicBool,
    /// Held, as one of many readers, by whoever handles a request or brings the server back.
    work: RwLock<()>,
    restart: Notify,
    restarts: AtomicU64,
    stop: CancellationToken,
}

impl Shop {
    fn is_calm(&self) -> bool {
        self.calm.load(Ordering::SeqCst)
    }

    /// Waits until it is time to go down, which is never once it is calm.
    async fn goes_down(&self) -> RwLockReadGuard<'_, ()> {
        loop {
            self.restart.notified().await;
            let work = self.work.read().await;
            if !self.is_calm() {
                return work;
            }
        }
    }

    /// Notes a request, and says which of its operation's it is. To be called before anything is
    /// waited for, so that no restart can come between reading and noting.
    fn reads(&self, operation: u64, key: Option<&str>) -> u32 {
        let nth = self.books.note_read(operation, key);
        if self.books.requests().is_multiple_of(RESTART_EVERY) {
            self.restart.notify_one();
        }
        nth
    }

    fn fault(&self, operation: u64, nth: u32) -> Fault {
        if self.is_calm() {
            Fault::None
        } else {
            self.seed.fault(operation, nth)
        }
    }
}

async fn run(port: Port, shop: Arc<Shop>) {
    let mut connections = JoinSet::new();
    let mut accepted = 0;
    let mut listener = port.listen();
    loop {
        let _work = tokio::select! {
            never = accept(&listener, &mut connections, &mut accepted, &shop) => match never {},
            work = shop.goes_down() => work,
            () = shop.stop.cancelled() => break,
        };
        drop(listener);
        connections.shutdown().await;
        shop.restarts.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(DOWNTIME).await;
        listener = port.listen();
    }
    while let Some(ended) = connections.join_next().await {
        ended.expect("no fault of the server itself");
    }
}

async fn accept(
    listener: &TcpListener,
    connections: &mut JoinSet<()>,
    accepted: &mut u64,
    shop: &Arc<Shop>,
) -> std::convert::Infallible {
    loop {
        let (stream, _) = listener.accept().await.expect("a connection");
        let peer = Peer {
            stream,
            unread: BytesMut::new(),
            shop: Arc::clone(shop),
        };
        connections.spawn(peer.serve(*accepted));
        *accepted += 1;
        while let Some(ended) = connections.try_join_next() {
            ended.expect("no fault of the server itself");
        }
    }
}

struct Head {
    target: Target,
    key: Option<String>,
    length: usize,
}

enum Target {
    Order(u64),
    Receipt(String),
}

struct Peer {
    stream: TcpStream,
    unread: BytesMut,
    shop: Arc<Shop>,
}

impl Peer {
    /// Until either side has had enough.
    async fn serve(mut self, connection: u64) {
        let cut = self.shop.seed.cut(connection);
        let _ = match cut.filter(|_| !self.shop.is_calm()) {
            Some(after) => self.cut(after).await,
            None => self.converse().await,
        };
    }

    async fn cut(&mut self, after: usize) -> io::Result<()> {
        let mut start = vec![0; after];
        self.stream.read_exact(&mut start).await?;
        if let Some(Target::Order(operation)) = target(&String::from_utf8_lossy(&start)) {
            self.shop.reads(operation, None);
        }
        self.reset()
    }

    async fn converse(&mut self) -> io::Result<()> {
        loop {
            let head = self.head().await?;
            match &head.target {
                Target::Order(operation) => self.order(*operation, &head).await?,
                Target::Receipt(key) => match self.shop.books.receipt(key) {
                    Some(receipt) => self.answer(200, "", &receipt).await?,
                    None => self.answer(404, "", "").await?,
                },
            }
        }
    }

    async fn order(&mut self, operation: u64, head: &Head) -> io::Result<()> {
        let shop = Arc::clone(&self.shop);
        let nth = shop.reads(operation, head.key.as_deref());
        let _work = shop.work.read().await;
        let fault = shop.fault(operation, nth);
        if fault == Fault::ResetWhileReading {
            return self.reset();
        }
        let body = self.body(head.length).await?;
        let order = Order {
            operation,
            key: head.key.clone(),
            body,
        };
        if fault == Fault::CommitLate {
            tokio::time::sleep(SLOW).await;
        }
        let receipt = match fault.commits().then(|| shop.books.commit(&order)) {
            Some(Err(Conflict)) => return self.answer(422, "", "").await,
            Some(Ok(receipt)) => receipt,
            None => String::new(),
        };
        if fault == Fault::CommitAndAnswerLate {
            tokio::time::sleep(SLOW).await;
        }
        self.respond(fault, &receipt).await
    }

    /// All that is still to be done.
    async fn respond(&mut self, fault: Fault, receipt: &str) -> io::Result<()> {
        match fault {
            Fault::None | Fault::CommitLate | Fault::CommitAndAnswerLate => {
                self.answer(201, "", receipt).await
            }
            Fault::CommitAndClose => Err(closed()),
            Fault::CommitAndReset | Fault::Reset | Fault::ResetWhileReading => self.reset(),
            Fault::TooManyRequests(wish) => self.answer(429, wish.header(), "").await,
            Fault::Unavailable(wish) => self.answer(503, wish.header(), "").await,
            Fault::CommitAndUnavailable => self.answer(503, "", "").await,
            Fault::TooEarly => self.answer(425, "", "").await,
            Fault::PaymentRequired => self.answer(402, "", "").await,
            Fault::InternalError => self.answer(500, "", "").await,
            Fault::CommitAndHalfHead => self.say_and_close("HTTP/1.1 201 Cre").await,
            Fault::CommitAndCutBody => {
                let cut = "HTTP/1.1 201 Created\r\ncontent-length: 100\r\n\r\nreceipt";
                self.say_and_close(cut).await
            }
            Fault::CommitAndGibberish => self.say_and_close("order made, have a nice day").await,
        }
    }

    async fn answer(&mut self, status: u16, header: &str, body: &str) -> io::Result<()> {
        let length = body.len();
        let text =
            format!("HTTP/1.1 {status} status\r\n{header}content-length: {length}\r\n\r\n{body}");
        self.stream.write_all(text.as_bytes()).await
    }

    async fn say_and_close(&mut self, text: &str) -> io::Result<()> {
        self.stream.write_all(text.as_bytes()).await?;
        Err(closed())
    }

    fn reset(&mut self) -> io::Result<()> {
        self.stream.set_zero_linger()?;
        Err(closed())
    }

    async fn head(&mut self) -> io::Result<Head> {
        let end = loop {
            match self.unread.windows(4).position(|end| end == b"\r\n\r\n") {
                Some(at) => break at + 4,
                None => self.read_more().await?,
            }
        };
        let text = String::from_utf8(self.unread.split_to(end).to_vec()).expect("an ASCII head");
        Ok(Head {
            target: target(&text).expect("a known path"),
            key: header(&text, "idempotency-key").map(str::to_owned),
            length: header(&text, "content-length")
                .map_or(0, |length| length.parse().expect("a length")),
        })
    }

    async fn body(&mut self, length: usize) -> io::Result<Vec<u8>> {
        while self.unread.len() < length {
            self.read_more().await?;
        }
        let body = self.unread[..length].to_vec();
        self.unread.advance(length);
        Ok(body)
    }

    async fn read_more(&mut self) -> io::Result<()> {
        match self.stream.read_buf(&mut self.unread).await? {
            0 => Err(closed()),
            _ => Ok(()),
        }
    }
}

impl Wish {
    fn header(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Short => "retry-after-ms: 8\r\n",
            Self::Long => "retry-after: 1\r\n",
        }
    }
}

fn closed() -> io::Error {
    io::ErrorKind::ConnectionAborted.into()
}

/// What a request is for, as soon as that much of it is there.
fn target(head: &str) -> Option<Target> {
    let (path, _) = head.split_once(' ')?.1.split_once(' ')?;
    match path.strip_prefix("/orders/")?.strip_prefix("by-key/") {
        Some(key) => Some(Target::Receipt(key.to_owned())),
        None => path["/orders/".len()..].parse().ok().map(Target::Order),
    }
}

fn header<'h>(head: &'h str, name: &str) -> Option<&'h str> {
    let mut rows = head.lines().filter_map(|row| row.split_once(": "));
    rows.find_map(|(found, value)| found.eq_ignore_ascii_case(name).then_some(value))
}
