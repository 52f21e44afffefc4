//! What stands between a client and a server: TLS in front of it, or a proxy's tunnel to it.
//!
//! A gate passes everything on as it comes, a FIN as a FIN and a RST as a RST, so that the server
//! behind it is what the test is about.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rcgen::{CertificateParams, KeyPair, date_time_ymd};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, SupportedProtocolVersion};
use tokio::io::{
    AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy, copy_bidirectional, split,
};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::support::lock;

/// A certificate for a server, signed by itself.
pub struct Certificate {
    der: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

impl Certificate {
    pub fn new(name: &str) -> Self {
        Self::made(name, |_| {})
    }

    pub fn expired(name: &str) -> Self {
        Self::made(name, |made| made.not_after = date_time_ymd(2001, 1, 1))
    }

    fn made(name: &str, change: fn(&mut CertificateParams)) -> Self {
        let mut made = CertificateParams::new([name.to_owned()]).expect("a valid name");
        change(&mut made);
        let key = KeyPair::generate().expect("a key");
        Self {
            der: made.self_signed(&key).expect("a certificate").der().clone(),
            key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
        }
    }

    /// What a client must have to believe it.
    pub fn root(&self) -> reqwest::Certificate {
        reqwest::Certificate::from_der(&self.der).expect("a certificate")
    }

    /// For a server that speaks this protocol (ALPN).
    pub fn offers(&self, protocol: &str) -> ServerConfig {
        let mut config = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![self.der.clone()], self.key.clone_key())
            .expect("a TLS configuration");
        config.alpn_protocols = vec![protocol.into()];
        config
    }

    /// For a server that talks only to who has a certificate too.
    pub fn demands_one(&self, version: &'static SupportedProtocolVersion) -> ServerConfig {
        let mut roots = RootCertStore::empty();
        roots.add(self.der.clone()).expect("a root");
        let verifier = WebPkiClientVerifier::builder(Arc::new(roots));
        ServerConfig::builder_with_protocol_versions(&[version])
            .with_client_cert_verifier(verifier.build().expect("a verifier"))
            .with_single_cert(vec![self.der.clone()], self.key.clone_key())
            .expect("a TLS configuration")
    }
}

#[derive(Clone)]
enum Kind {
    Tls(TlsAcceptor),
    /// Ends without the goodbye of TLS, as a process that dies.
    CurtTls(TlsAcceptor),
    Tunnel,
}

/// A gate to one server.
pub struct Gate {
    address: SocketAddr,
    passed: Arc<AtomicUsize>,
    asked: Arc<Mutex<Vec<String>>>,
    /// Aborted when it is dropped, and its own tasks with it.
    _serving: JoinSet<()>,
}

#[derive(Clone)]
struct Way {
    kind: Kind,
    to: SocketAddr,
    passed: Arc<AtomicUsize>,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Gate {
    pub async fn tls(config: ServerConfig, to: SocketAddr) -> Self {
        Self::start(Kind::Tls(Arc::new(config).into()), to).await
    }

    /// The same, but a FIN of the server is passed on without the goodbye of TLS (close_notify).
    pub async fn curt_tls(config: ServerConfig, to: SocketAddr) -> Self {
        Self::start(Kind::CurtTls(Arc::new(config).into()), to).await
    }

    /// A proxy that leads every CONNECT to this server.
    pub async fn tunnel(to: SocketAddr) -> Self {
        Self::start(Kind::Tunnel, to).await
    }

    async fn start(kind: Kind, to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let (passed, asked) = <(Arc<AtomicUsize>, Arc<Mutex<Vec<String>>>)>::default();
        let way = Way {
            kind,
            to,
            passed: Arc::clone(&passed),
            asked: Arc::clone(&asked),
        };
        let mut serving = JoinSet::new();
        serving.spawn(accept(listener, way));
        Self {
            address,
            passed,
            asked,
            _serving: serving,
        }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn https(&self, path: &str) -> String {
        format!("https://{}{path}", self.address)
    }

    /// How many have got through.
    pub fn passed(&self) -> usize {
        self.passed.load(Ordering::SeqCst)
    }

    /// What a proxy was asked for, as in `CONNECT orders.test:443`.
    pub fn asked(&self) -> Vec<String> {
        lock(&self.asked).clone()
    }
}

async fn accept(listener: TcpListener, way: Way) {
    let mut connections = JoinSet::new();
    loop {
        let (client, _) = listener.accept().await.expect("a connection");
        let way = way.clone();
        connections.spawn(async move {
            // How a connection ends is seen at its ends.
            let _ = way.lead(client).await;
        });
    }
}

impl Way {
    async fn lead(self, client: TcpStream) -> io::Result<()> {
        match &self.kind {
            Kind::Tls(acceptor) => {
                let client = acceptor.accept(client).await?;
                self.pass(client, |client| client.get_ref().0).await
            }
            Kind::CurtTls(acceptor) => {
                let client = acceptor.accept(client).await?;
                self.pass_until_a_fin(client).await
            }
            Kind::Tunnel => {
                let client = self.open_tunnel(client).await?;
                self.pass(client, |client| client).await
            }
        }
    }

    async fn open_tunnel(&self, mut client: TcpStream) -> io::Result<TcpStream> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(client.read_u8().await?);
        }
        let head = String::from_utf8(head).expect("an ASCII head");
        let asked = head.split(" HTTP/1.1").next().expect("a first line");
        lock(&self.asked).push(asked.to_owned());
        client.write_all(b"HTTP/1.1 200 open\r\n\r\n").await?;
        Ok(client)
    }

    async fn pass_until_a_fin(&self, client: TlsStream<TcpStream>) -> io::Result<()> {
        self.passed.fetch_add(1, Ordering::SeqCst);
        let server = TcpStream::connect(self.to).await?;
        let (mut from_client, mut to_client) = split(client);
        let (mut from_server, mut to_server) = server.into_split();
        tokio::select! {
            ended = copy(&mut from_server, &mut to_client) => ended,
            ended = copy(&mut from_client, &mut to_server) => ended,
        }
        .map(drop)
    }

    async fn pass<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        mut client: S,
        socket: impl Fn(&S) -> &TcpStream,
    ) -> io::Result<()> {
        self.passed.fetch_add(1, Ordering::SeqCst);
        let mut server = TcpStream::connect(self.to).await?;
        socket(&client).set_nodelay(true)?;
        server.set_nodelay(true)?;
        if copy_bidirectional(&mut client, &mut server).await.is_err() {
            socket(&client).set_zero_linger()?;
            server.set_zero_linger()?;
        }
        Ok(())
    }
}
