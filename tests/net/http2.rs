//! A server that speaks HTTP/2 without TLS, one scripted reply per stream.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use h2::server::SendResponse;
use http::{Request, Response};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::Seen;
use crate::support::lock;

/// What becomes of a stream whose request has been read to its end.
#[derive(Clone, Copy, Debug)]
pub enum Reply {
    Reset(h2::Reason),
    Status(u16),
    /// None, and none of the body is let in either: no stream of this server has a window.
    Never,
}

#[derive(Clone, Default)]
struct Shared {
    replies: Arc<Mutex<VecDeque<Reply>>>,
    seen: Arc<Mutex<Vec<Seen>>>,
}

pub struct Http2 {
    address: SocketAddr,
    shared: Shared,
    /// Aborted when it is dropped, and its own tasks with it.
    _serving: JoinSet<()>,
}

impl Http2 {
    /// Replies by the script; a stream past its end is a fault of the test.
    pub async fn script(replies: impl IntoIterator<Item = Reply>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let shared = Shared::default();
        lock(&shared.replies).extend(replies);
        let mut serving = JoinSet::new();
        serving.spawn(accept(listener, shared.clone()));
        Self {
            address,
            shared,
            _serving: serving,
        }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub fn requests(&self) -> Vec<Seen> {
        lock(&self.shared.seen).clone()
    }
}

async fn accept(listener: TcpListener, shared: Shared) {
    let mut connections = JoinSet::new();
    for connection in 0.. {
        let (stream, _) = listener.accept().await.expect("a connection");
        connections.spawn(serve(stream, connection, shared.clone()));
    }
}

async fn serve(stream: TcpStream, connection: usize, shared: Shared) {
    let mut streams = JoinSet::new();
    let mut builder = h2::server::Builder::new();
    let is_never = |reply: &Reply| matches!(reply, Reply::Never);
    if lock(&shared.replies).iter().any(is_never) {
        builder.initial_window_size(0);
    }
    let mut h2 = builder.handshake(stream).await.expect("HTTP/2");
    while let Some(Ok((request, respond))) = h2.accept().await {
        streams.spawn(reply(request, respond, connection, shared.clone()));
    }
}

async fn reply(
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    connection: usize,
    shared: Shared,
) {
    let (head, body) = request.into_parts();
    let reply = lock(&shared.replies).pop_front();
    let reply = reply.expect("the script has no reply for this stream");
    let is_read = !matches!(reply, Reply::Never);
    let bytes = if is_read {
        read(body).await
    } else {
        Bytes::new()
    };
    lock(&shared.seen).push(Seen {
        connection,
        method: head.method,
        path: head.uri.path().to_owned(),
        headers: head.headers,
        body: bytes,
    });
    match reply {
        Reply::Reset(reason) => respond.send_reset(reason),
        Reply::Status(status) => {
            let response = Response::builder().status(status).body(());
            let response = response.expect("a valid response");
            respond.send_response(response, true).expect("an answer");
        }
        Reply::Never => std::future::pending().await,
    }
}

async fn read(mut body: RecvStream) -> Bytes {
    let mut bytes = BytesMut::new();
    while let Some(Ok(chunk)) = body.data().await {
        let _ = body.flow_control().release_capacity(chunk.len());
        bytes.extend_from_slice(&chunk);
    }
    bytes.freeze()
}
