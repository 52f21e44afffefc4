//! Servers with an idempotency library of other people in front of the orders, and mitmproxy
//! between them and the client.
#![allow(unreachable_pub, reason = "the one user is the test next door")]

use std::collections::HashMap;
use std::process::Command;

use reqwest::Response;

use super::operation::{Order, Told};
use super::programs::{Folder, Process, ReservedPort, at_home, on_path, source};
use crate::net::patiently;
use crate::support::{ms, plain_http};

/// An idempotency library, and what runs it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Library {
    Idemkit,
    /// The same with Stripe's statuses.
    IdemkitAsStripe,
    FastapiIdempotency,
    AsgiIdempotencyHeader,
    NestIdempotency,
    ExpressIdempotency,
}

/// The orders behind a library.
#[derive(Debug)]
pub struct KeyServer {
    library: Library,
    _process: Process,
    _folder: Folder,
    port: u16,
}

/// mitmproxy, which breaks what passes through it as the request asks for.
#[derive(Debug)]
pub struct FaultyPath {
    process: Process,
    _folder: Folder,
    port: u16,
}

impl Library {
    /// `None`: it is not installed.
    pub async fn start(self) -> Option<KeyServer> {
        let folder = Folder::new();
        let (process, port) = Process::start_with_port(self.command()?, folder.path()).await;
        let server = KeyServer {
            library: self,
            _process: process,
            _folder: folder,
            port,
        };
        patiently("the first answer", server.orders()).await;
        Some(server)
    }

    fn command(self) -> Option<Command> {
        match self {
            Self::Idemkit => python("idemkit"),
            Self::IdemkitAsStripe => python("idemkit-stripe"),
            Self::FastapiIdempotency => python("fastapi-idempotency"),
            Self::AsgiIdempotencyHeader => python("asgi-idempotency-header"),
            Self::NestIdempotency => node("node-idempotency", "node/nest.js"),
            Self::ExpressIdempotency => node("express-idempotency", "node/express.js"),
        }
    }
}

fn python(library: &str) -> Option<Command> {
    let mut command = Command::new(at_home(library, "python/bin/python")?);
    command.arg(source("python/orders.py")).arg(library);
    Some(command)
}

fn node(library: &str, script: &str) -> Option<Command> {
    let modules = at_home(library, "node/node_modules")?;
    let modules = std::path::absolute(modules).expect("a path");
    let mut command = Command::new(on_path("node")?);
    command.arg(source(script)).env("NODE_PATH", modules);
    Some(command)
}

impl KeyServer {
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub fn url(&self) -> String {
        format!("http://{}/orders", self.address())
    }

    /// How many orders there are of each operation.
    pub async fn orders(&self) -> HashMap<String, usize> {
        let answer = plain_http().get(self.url()).send().await;
        let text = answer.expect("an answer").text().await.expect("a body");
        serde_json::from_str(&text).expect("counts by operation")
    }

    /// A GET of it lets the handler that holds this operation go on.
    pub fn release_url(&self, operation: &str) -> String {
        format!("http://{}/release/{operation}", self.address())
    }

    pub async fn release(&self, operation: &str) {
        let answer = plain_http().get(self.release_url(operation)).send().await;
        let answer = answer.and_then(Response::error_for_status);
        answer.expect("it is released");
    }

    /// Waits until what is on its way has become an order.
    pub async fn has_order(&self, operation: &str) {
        patiently("an order", async {
            while self.orders_of(operation).await == 0 {
                tokio::time::sleep(ms(10)).await;
            }
        })
        .await;
    }

    /// Prints the row of an operation, and makes sure that there are so many orders of it.
    pub async fn counts(&self, order: &Order, told: &Told, expected: usize) {
        let orders = self.orders_of(&order.name).await;
        let row = format!("{:?} {}: {told}, {orders} orders", self.library, order.name);
        println!("{row}");
        assert_eq!(orders, expected, "{row}");
    }

    pub async fn orders_of(&self, operation: &str) -> usize {
        let orders = self.orders().await;
        orders.get(operation).copied().unwrap_or_default()
    }
}

impl FaultyPath {
    /// `None`: mitmproxy is not installed.
    pub async fn to(server: &KeyServer) -> Option<Self> {
        let mut command = Command::new(at_home("mitmproxy", "mitmproxy/bin/mitmdump")?);
        let folder = Folder::new();
        command
            .args(["--quiet", "--listen-host", "127.0.0.1"])
            .args(["--listen-port", "0"])
            .args(["--mode", &format!("reverse:http://{}", server.address())])
            // A connection to the server is made when there is a request for it, not before.
            .args(["--set", "connection_strategy=lazy"])
            .arg("--set")
            .arg(format!("confdir={}", folder.path().display()))
            .arg("--scripts")
            .arg(source("mitmproxy/faults.py"));
        let (process, port) = Process::start_with_port(command, folder.path()).await;
        Some(Self {
            process,
            _folder: folder,
            port,
        })
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/orders", self.port)
    }

    /// Ends it. Its port is closed and kept from others.
    pub fn close(self) -> ReservedPort {
        drop(self.process);
        ReservedPort::take(self.port)
    }
}
