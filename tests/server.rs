//! Where requests enter: what their headers say of the time left, and what becomes of the work when the
//! client goes away.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod net;
mod support;

mod server {
    mod grpc;
    mod headers;
    mod sockets;
}

use std::net::SocketAddr;

use axum::Router;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// A service on a port of its own, over HTTP/1.1 or HTTP/2 as the client wishes.
struct App {
    address: SocketAddr,
    /// Aborted when it is dropped.
    _serving: JoinSet<std::io::Result<()>>,
}

impl App {
    async fn serve(routes: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let mut serving = JoinSet::new();
        serving.spawn(axum::serve(listener, routes).into_future());
        Self {
            address,
            _serving: serving,
        }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}
