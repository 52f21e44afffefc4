//! A server that speaks HTTP/2 without TLS, one scripted reply per stream.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use h2::server::SendResponse;
use http::{HeaderMap, Method, Request, Response};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::Seen;
use crate::support::lock;

/// What becomes of a stream whose request has been read to its end.
#[derive(Clone, Copy, Debug)]
pub enum Reply {
    Reset(h2::Reason),
    Status(u16),
    /// GOAWAY with this last stream and code, as the connection's only answer; then the connection
    /// is closed. The first stream of a client is 1.
    GoAway(u32, h2::Reason),
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
    let next = lock(&shared.replies).front().copied();
    if let Some(Reply::GoAway(last, reason)) = next {
        return go_away(stream, connection, shared, last, reason).await;
    }
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
        Reply::GoAway(..) => panic!("GOAWAY is the first reply of a connection"),
    }
}

const PREFACE: usize = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len();
const DATA: u8 = 0;
const HEADERS: u8 = 1;

/// Frame by frame (RFC 9113 §4.1), since h2 would not say what it has not done: reads the first
/// request to its end, without decoding its head, and goes away.
async fn go_away(
    mut stream: TcpStream,
    connection: usize,
    shared: Shared,
    last: u32,
    reason: h2::Reason,
) {
    lock(&shared.replies).pop_front();
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    stream.write_all(&settings).await.expect("settings");
    stream
        .read_exact(&mut [0; PREFACE])
        .await
        .expect("the preface");
    let mut body = BytesMut::new();
    loop {
        let (mut head, mut length) = ([0; 9], [0; 4]);
        stream.read_exact(&mut head).await.expect("a frame");
        length[1..].copy_from_slice(&head[..3]);
        let mut payload = vec![0; u32::from_be_bytes(length) as usize];
        stream.read_exact(&mut payload).await.expect("its payload");
        let (kind, ends_stream) = (head[3], head[4] & 1 == 1);
        if kind == DATA {
            body.extend_from_slice(&payload);
        }
        if matches!(kind, DATA | HEADERS) && ends_stream {
            break;
        }
    }
    lock(&shared.seen).push(Seen {
        connection,
        method: Method::POST,
        path: "/orders".to_owned(),
        headers: HeaderMap::new(),
        body: body.freeze(),
    });
    let mut frame = vec![0, 0, 8, 7, 0, 0, 0, 0, 0];
    frame.extend_from_slice(&last.to_be_bytes());
    frame.extend_from_slice(&u32::from(reason).to_be_bytes());
    stream.write_all(&frame).await.expect("GOAWAY");
    // The client has read it when it says goodbye itself; what it says is of no interest.
    let _ = stream.shutdown().await;
    while stream.read(&mut [0; 64]).await.is_ok_and(|read| read > 0) {}
}

async fn read(mut body: RecvStream) -> Bytes {
    let mut bytes = BytesMut::new();
    while let Some(Ok(chunk)) = body.data().await {
        let _ = body.flow_control().release_capacity(chunk.len());
        bytes.extend_from_slice(&chunk);
    }
    bytes.freeze()
}
