//! A server on this machine that answers at once, on a thread of its own.

use std::net::{Ipv4Addr, SocketAddr};
use std::thread;

use axum::Router;
use axum::body::Bytes;
use axum::routing::get;
use reqwest::header::{CONTENT_TYPE, HeaderName};
use tokio::runtime::Runtime;

pub(crate) const ANSWER: &str = r#"{"order":4711,"state":"accepted","items":3,"total":"59.70"}"#;

/// Answers a GET of `/orders`, or a POST whose body it has read.
pub(crate) fn serve() -> SocketAddr {
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    listener.set_nonblocking(true).expect("it can be");
    let address = listener.local_addr().expect("it is bound");
    thread::spawn(move || {
        one_thread().block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let orders = get(async || json()).post(async |_: Bytes| json());
            axum::serve(listener, Router::new().route("/orders", orders)).await
        })
    });
    address
}

fn json() -> ([(HeaderName, &'static str); 1], &'static str) {
    ([(CONTENT_TYPE, "application/json")], ANSWER)
}

pub(crate) fn one_thread() -> Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
}
