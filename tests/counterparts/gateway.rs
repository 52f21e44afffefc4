//! nginx, haproxy and Envoy, each in front of an origin of the test.

#![allow(unreachable_pub, reason = "the one user is the test next door")]

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use super::programs::{Folder, Process, ReservedPort, at_home, on_path, source};
use crate::net::patiently;
use crate::support::{ms, plain_http};

/// How long a gateway waits for the origin, in milliseconds.
const PATIENCE_MS: u16 = 1200;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Nginx,
    Haproxy,
    /// As it is by default: callers are strangers, whose `x-envoy-` headers it takes away.
    Envoy,
    TrustfulEnvoy,
}

pub struct Gateway {
    kind: Kind,
    program: PathBuf,
    /// `None`: it is down.
    process: Option<Process>,
    port: ReservedPort,
    /// Where nginx speaks HTTP/2 without TLS, and where Envoy trusts its callers.
    second_port: ReservedPort,
    /// Where it looks for a backend and finds none.
    closed: ReservedPort,
    folder: Folder,
}

impl Kind {
    /// Those of the system.
    pub const BOTH: [Self; 2] = [Self::Nginx, Self::Haproxy];

    /// Starts it in front of `origin`, an address and port. `None`: it is not installed.
    pub async fn before(self, origin: &str) -> Option<Gateway> {
        let program = match self {
            Self::Nginx => on_path("nginx"),
            Self::Haproxy => on_path("haproxy"),
            Self::Envoy | Self::TrustfulEnvoy => at_home("envoy", "python/bin/envoy"),
        }?;
        let mut gateway = Gateway {
            kind: self,
            program,
            process: None,
            port: ReservedPort::any(),
            second_port: ReservedPort::any(),
            closed: ReservedPort::any(),
            folder: Folder::new(),
        };
        gateway.configure(origin);
        gateway.start().await;
        Some(gateway)
    }

    fn template(self) -> &'static str {
        match self {
            Self::Nginx => "nginx.conf",
            Self::Haproxy => "haproxy.cfg",
            // By the end of its name Envoy knows what it is.
            Self::Envoy | Self::TrustfulEnvoy => "envoy.yaml",
        }
    }
}

impl Gateway {
    pub fn url(&self, path: &str) -> String {
        match self.kind {
            Kind::TrustfulEnvoy => self.second_port.url(path),
            Kind::Nginx | Kind::Haproxy | Kind::Envoy => self.port.url(path),
        }
    }

    #[cfg(feature = "http2")]
    pub fn http2_url(&self, path: &str) -> String {
        self.second_port.url(path)
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
        let template = source("gateways").join(self.kind.template());
        let (origin_host, origin_port) = origin.split_once(':').expect("an address and port");
        let text = fs::read_to_string(template)
            .expect("a template")
            .replace("@PORT@", &self.port.number().to_string())
            .replace("@SECOND_PORT@", &self.second_port.number().to_string())
            .replace("@CLOSED@", &self.closed.address())
            .replace("@ORIGIN@", origin)
            .replace("@ORIGIN_HOST@", origin_host)
            .replace("@ORIGIN_PORT@", origin_port)
            .replace("@PATIENCE@", &PATIENCE_MS.to_string());
        fs::write(self.config(), text).expect("a file");
    }

    fn config(&self) -> PathBuf {
        self.folder.path().join(self.kind.template())
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
            // One process that shares nothing with another Envoy.
            Kind::Envoy | Kind::TrustfulEnvoy => command
                .args(["--disable-hot-restart", "--concurrency", "1"])
                .args(["--log-level", "error", "-c"]),
        };
        command.arg(self.config());
        command
    }
}
