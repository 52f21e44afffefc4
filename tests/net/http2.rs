//! A server that speaks HTTP/2 without TLS, one scripted reply per stream.

use std::collections::VecDeque;
use std::io::{self, Write as _};
use std::net::{self, Shutdown, SocketAddr};
use std::pin::pin;
use std::sync::{Arc, Mutex};

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use h2::server::{Builder, SendResponse};
use http::{Request, Response};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::{Seen, patiently, settle};
use crate::support::lock;

/// What becomes of a stream whose request has been read to its end.
#[derive(Clone, Copy, Debug)]
pub enum Reply {
    Reset(h2::Reason),
    Status(u16),
    Redirect(u16, &'static str),
    /// GOAWAY with this last stream and code, as the connection's only answer; then the connection
    /// is closed. The first stream of a client is 1.
    GoAway(u32, h2::Reason),
    /// The connection is closed, with a FIN, in the middle of the stream.
    Close,
    /// The same with a RST.
    Abort,
    /// None.
    Hang,
    /// None, and none of the body is let in either: no stream of this server has a window.
    Never,
    /// This one, as soon as so much of the body has been read.
    After(usize, &'static Reply),
}

/// How the server differs from h2's defaults.
type Tune = fn(&mut Builder);

#[derive(Clone)]
struct Shared {
    tune: Tune,
    replies: Arc<Mutex<VecDeque<Reply>>>,
    seen: Arc<Mutex<Vec<Seen>>>,
    logged: Arc<Notify>,
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
        Self::tuned(replies, |_| {}).await
    }

    /// The same, with other settings.
    pub async fn tuned(replies: impl IntoIterator<Item = Reply>, tune: Tune) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let shared = Shared {
            tune,
            replies: Arc::new(Mutex::new(replies.into_iter().collect())),
            seen: Arc::default(),
            logged: Arc::default(),
        };
        let mut serving = JoinSet::new();
        serving.spawn(accept(listener, shared.clone()));
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

    pub fn requests(&self) -> Vec<Seen> {
        lock(&self.shared.seen).clone()
    }

    /// Waits until so many requests have come, and returns them and any more that have.
    pub async fn saw(&self, requests: usize) -> Vec<Seen> {
        patiently(&format!("{requests} requests at the server"), async {
            loop {
                let mut logged = pin!(self.shared.logged.notified());
                logged.as_mut().enable();
                if self.requests().len() >= requests {
                    return;
                }
                logged.await;
            }
        })
        .await;
        settle().await;
        self.requests()
    }

    /// As in `POST /orders`.
    pub fn lines(&self) -> Vec<String> {
        self.requests().iter().map(Seen::line).collect()
    }
}

async fn accept(listener: TcpListener, shared: Shared) {
    let mut connections = JoinSet::new();
    for connection in 0.. {
        let (stream, _) = listener.accept().await.expect("a connection");
        // Otherwise each window takes its time to be opened again.
        stream.set_nodelay(true).expect("an open socket");
        connections.spawn(serve(stream, connection, shared.clone()));
    }
}

async fn serve(stream: TcpStream, connection: usize, shared: Shared) {
    let (stream, cord) = Cord::of(stream).expect("a second handle of the socket");
    let mut streams = JoinSet::new();
    let mut builder = Builder::new();
    let is_never = |reply: &Reply| matches!(reply, Reply::Never);
    if lock(&shared.replies).iter().any(is_never) {
        builder.initial_window_size(0);
    }
    (shared.tune)(&mut builder);
    // A client that gives up early is no fault of the server.
    let Ok(mut h2) = builder.handshake(stream).await else {
        return;
    };
    loop {
        tokio::select! {
            () = cord.cut.notified() => return,
            next = h2.accept() => {
                let Some(Ok((request, respond))) = next else {
                    return;
                };
                let stream = reply(request, respond, connection, shared.clone(), Arc::clone(&cord));
                streams.spawn(stream);
            }
        }
    }
}

async fn reply(
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    connection: usize,
    shared: Shared,
    cord: Arc<Cord>,
) {
    let (head, body) = request.into_parts();
    let reply = lock(&shared.replies).pop_front();
    let reply = reply.expect("the script has no reply for this stream");
    let (most, reply) = match reply {
        Reply::Never => (0, reply),
        Reply::After(most, reply) => (most, *reply),
        _ => (usize::MAX, reply),
    };
    // Held to the end: to drop it unread would reset the stream.
    let (body, _rest) = read(body, most).await;
    lock(&shared.seen).push(Seen {
        connection,
        method: head.method,
        path: head.uri.path().to_owned(),
        headers: head.headers,
        body,
    });
    shared.logged.notify_waiters();
    match reply {
        Reply::Reset(reason) => return respond.send_reset(reason),
        Reply::Status(status) => return say(&mut respond, Response::builder().status(status)),
        Reply::Redirect(status, to) => {
            let response = Response::builder().status(status).header("location", to);
            return say(&mut respond, response);
        }
        Reply::GoAway(last, reason) => cord.go_away(last, reason).expect("GOAWAY"),
        Reply::Close => cord.close().expect("a FIN"),
        Reply::Abort => cord.abort().expect("a RST"),
        Reply::Hang | Reply::Never => {}
        Reply::After(..) => panic!("a reply has one condition"),
    }
    std::future::pending().await
}

fn say(respond: &mut SendResponse<Bytes>, response: http::response::Builder) {
    let response = response.body(()).expect("a valid response");
    // A client may have given up by now.
    let _ = respond.send_response(response, true);
}

/// Reads so much or a little more, and returns what is left as well.
async fn read(mut body: RecvStream, most: usize) -> (Bytes, RecvStream) {
    let mut bytes = BytesMut::new();
    while bytes.len() < most {
        let Some(Ok(chunk)) = body.data().await else {
            break;
        };
        let _ = body.flow_control().release_capacity(chunk.len());
        bytes.extend_from_slice(&chunk);
    }
    (bytes.freeze(), body)
}

/// A second handle of a connection's socket, for what h2 would not say or do.
struct Cord {
    socket: net::TcpStream,
    cut: Notify,
}

impl Cord {
    fn of(stream: TcpStream) -> io::Result<(TcpStream, Arc<Self>)> {
        let stream = stream.into_std()?;
        let cord = Self {
            socket: stream.try_clone()?,
            cut: Notify::new(),
        };
        Ok((TcpStream::from_std(stream)?, Arc::new(cord)))
    }

    /// Frame by frame (RFC 9113 §6.8), since h2 never denies what it has read.
    fn go_away(&self, last: u32, reason: h2::Reason) -> io::Result<()> {
        let mut frame = vec![0, 0, 8, 7, 0, 0, 0, 0, 0];
        frame.extend_from_slice(&last.to_be_bytes());
        frame.extend_from_slice(&u32::from(reason).to_be_bytes());
        (&self.socket).write_all(&frame)?;
        self.close()
    }

    /// The client sees a FIN; what it says afterwards is still read.
    fn close(&self) -> io::Result<()> {
        self.socket.shutdown(Shutdown::Write)
    }

    /// The client sees a RST, once the connection's task has let go of its handle.
    fn abort(&self) -> io::Result<()> {
        // A setting of the socket, whichever handle it is made through.
        TcpStream::from_std(self.socket.try_clone()?)?.set_zero_linger()?;
        self.cut.notify_one();
        Ok(())
    }
}
