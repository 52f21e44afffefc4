//! A peer that does not care for protocols: reads some bytes, then does one thing.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::patiently;
use crate::support::lock;

#[derive(Clone, Copy, Debug)]
pub enum Then {
    /// Closes: a FIN, as long as it has read all there is.
    Close,
    /// Closes with a RST.
    Reset,
    /// Keeps the connection, and reads no more.
    Hold,
    SayAndClose(&'static str),
}

#[derive(Default)]
struct Shared {
    read: Mutex<Vec<usize>>,
    read_on: Notify,
}

pub struct Raw {
    address: SocketAddr,
    shared: Arc<Shared>,
    /// Aborted when it is dropped, and its own tasks with it.
    _serving: JoinSet<()>,
}

impl Raw {
    /// Reads at least so many bytes of every connection before it does that.
    pub async fn reads(least: usize, then: Then) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let shared = Arc::<Shared>::default();
        let mut serving = JoinSet::new();
        serving.spawn(accept(listener, least, then, Arc::clone(&shared)));
        Self {
            address,
            shared,
            _serving: serving,
        }
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

    /// Waits until so many connections have been made, and something was read of each.
    pub async fn connected(&self, connections: usize) {
        patiently(&format!("{connections} connections"), async {
            loop {
                let mut read = pin!(self.shared.read_on.notified());
                read.as_mut().enable();
                if self.read().iter().filter(|&&read| read > 0).count() >= connections {
                    return;
                }
                read.await;
            }
        })
        .await;
    }

    /// The bytes read of each connection.
    pub fn read(&self) -> Vec<usize> {
        lock(&self.shared.read).clone()
    }
}

async fn accept(listener: TcpListener, least: usize, then: Then, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    for connection in 0.. {
        let (stream, _) = listener.accept().await.expect("a connection");
        lock(&shared.read).push(0);
        connections.spawn(serve(stream, connection, least, then, Arc::clone(&shared)));
    }
}

async fn serve(
    mut stream: TcpStream,
    connection: usize,
    least: usize,
    then: Then,
    shared: Arc<Shared>,
) {
    let mut bytes = vec![0; 1 << 16];
    while lock(&shared.read)[connection] < least {
        match stream.read(&mut bytes).await {
            Ok(0) | Err(_) => return,
            Ok(more) => lock(&shared.read)[connection] += more,
        }
        shared.read_on.notify_waiters();
    }
    match then {
        Then::Close => {}
        Then::Reset => stream.set_zero_linger().expect("a RST to come"),
        Then::Hold => std::future::pending().await,
        Then::SayAndClose(text) => {
            let _ = stream.write_all(text.as_bytes()).await;
        }
    }
}
