//! nginx and haproxy, each in front of an origin of the test.

#![allow(unreachable_pub, reason = "the one user is the test next door")]

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use super::programs::{Folder, Process, ReservedPort, on_path, source};
use crate::net::patiently;
use crate::support::{ms, plain_http};

/// How long a gateway waits for the origin, in milliseconds.
const PATIENCE_MS: u16 = 1200;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Nginx,
    Haproxy,
}

pub struct Gateway {
    kind: Kind,
    program: PathBuf,
    /// `None`: it is down.
    process: Option<Process>,
    port: ReservedPort,
    /// Of nginx, where it speaks HTTP/2 without TLS.
    http2_port: ReservedPort,
    /// Where it looks for a backend and finds none.
    closed: ReservedPort,
    folder: Folder,
}

impl Kind {
    pub const BOTH: [Self; 2] = [Self::Nginx, Self::Haproxy];

    /// Starts it in front of `origin`, an address and port. `None`: it is not installed.
    pub async fn before(self, origin: &str) -> Option<Gateway> {
        let program = match self {
            Self::Nginx => on_path("nginx"),
            Self::Haproxy => on_path("haproxy"),
        }?;
        let mut gateway = Gateway {
            kind: self,
            program,
            process: None,
            port: ReservedPort::any(),
            http2_port: ReservedPort::any(),
            closed: ReservedPort::any(),
            folder: Folder::new(),
        };
        gateway.configure(origin);
        gateway.start().await;
        Some(gateway)
    }
}

impl Gateway {
    pub fn url(&self, path: &str) -> String {
        self.port.url(path)
    }

    #[cfg(feature = "http2")]
    pub fn http2_url(&self, path: &str) -> String {
        self.http2_port.url(path)
    }

    /// From now on its ports are closed.
    pub fn stop(&mut self) {
        self.process = None;
    }

    /// At the same ports as before.
    pub async fn start(&mut self) {
        let mut process = Process::start(self.command(), self.folder.path());
        let first_answer = self.first_answer(&mut process);
        let is_up = patiently("the gateway's start", first_answer).await;
        assert!(is_up, "{:?}: {}", self.kind, process.complaint());
        self.process = Some(process);
    }

    /// `false`: it has ended instead.
    async fn first_answer(&self, process: &mut Process) -> bool {
        let http = plain_http();
        while http.get(self.url("/ready")).send().await.is_err() {
            if process.has_ended() {
                return false;
            }
            tokio::time::sleep(ms(10)).await;
        }
        true
    }

    fn configure(&self, origin: &str) {
        let template = match self.kind {
            Kind::Nginx => source("gateways/nginx.conf"),
            Kind::Haproxy => source("gateways/haproxy.cfg"),
        };
        let text = fs::read_to_string(template)
            .expect("a template")
            .replace("@PORT@", &self.port.number().to_string())
            .replace("@HTTP2_PORT@", &self.http2_port.number().to_string())
            .replace("@CLOSED@", &self.closed.address())
            .replace("@ORIGIN@", origin)
            .replace("@PATIENCE@", &PATIENCE_MS.to_string());
        fs::write(self.config(), text).expect("a file");
    }

    fn config(&self) -> PathBuf {
        self.folder.path().join("config")
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        match self.kind {
            // `-e`: else it first opens the log of the system's own nginx.
            Kind::Nginx => command
                .arg("-p")
                .arg(self.folder.path())
                .args(["-e", "stderr", "-c"]),
            Kind::Haproxy => command.args(["-db", "-f"]),
        };
        command.arg(self.config());
        command
    }
}
