//! Programs of other people: where they are, started and stopped.
#![allow(unreachable_pub, reason = "the one user is the test next door")]

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::net::TcpSocket;

/// Longer than a program takes to start: on a busy machine mitmproxy takes many seconds.
const START: Duration = Duration::from_secs(60);

/// The sources of what is started, in the project.
pub fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/counterparts")
        .join(path)
}

/// Where `.ci/counterparts-setup` installs what is not a package of the system.
fn home() -> PathBuf {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/counterparts");
    std::env::var_os("COUNTERPARTS_HOME").map_or(target, PathBuf::from)
}

/// Finds a program of the system. Without it the test has nothing to say, and says so; where the
/// programs must be there, it fails.
pub fn on_path(name: &str) -> Option<PathBuf> {
    // Debian's gateways are where only root looks.
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path)
        .chain(["/usr/sbin".into()])
        .map(|folder| folder.join(name))
        .find(|program| program.is_file());
    found.or_else(|| missing(name))
}

/// Finds what was installed for these tests: the `name` that `path` leads to or belongs to.
pub fn at_home(name: &str, path: &str) -> Option<PathBuf> {
    let found = Some(home().join(path)).filter(|path| path.exists());
    found.or_else(|| missing(name))
}

fn missing(name: &str) -> Option<PathBuf> {
    let is = |name, value| std::env::var_os(name).is_some_and(|it| it == value);
    let required = is("CI", "true") || is("COUNTERPARTS", "required");
    assert!(
        !required,
        "{name} is not installed: run .ci/counterparts-setup"
    );
    println!("skipped: {name} is not installed");
    None
}

/// A port that the system gives to nobody else while this lives. Nobody listens there but a program
/// that binds it with `SO_REUSEPORT`.
#[derive(Debug)]
pub struct ReservedPort(TcpSocket);

impl ReservedPort {
    pub fn any() -> Self {
        Self::take(0)
    }

    /// This one, which somebody has just left.
    pub fn take(port: u16) -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        // The first for connections that are not quite gone.
        socket.set_reuseaddr(port != 0).expect("a socket");
        socket.set_reuseport(true).expect("a socket");
        let address = (Ipv4Addr::LOCALHOST, port).into();
        socket.bind(address).expect("a free port");
        Self(socket)
    }

    pub fn number(&self) -> u16 {
        self.0.local_addr().expect("its address").port()
    }

    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.number())
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address())
    }
}

/// A folder that goes with its owner.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("counterparts-{}-{count}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).expect("a new folder");
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A process that ends when this is dropped, be it by a panic.
#[derive(Debug)]
pub struct Process {
    child: Child,
    errors: PathBuf,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    /// What it complains about goes into `folder`.
    pub fn start(mut command: Command, folder: &Path) -> Self {
        let errors = folder.join("stderr");
        let file = fs::File::create(&errors).expect("a file");
        let child = command.stderr(file).spawn();
        let child = child.unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
        Self { child, errors }
    }

    /// Starts a program of ours, which prints its port and ends with its input: so it does not
    /// outlive a test that is killed.
    pub async fn start_with_port(mut command: Command, folder: &Path) -> (Self, u16) {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Self::start(command, folder);
        let port = process.port().await;
        (process, port)
    }

    pub fn has_ended(&mut self) -> bool {
        let status = self.child.try_wait().expect("a child of ours");
        status.is_some()
    }

    /// Ends it, and returns what it has complained about.
    pub fn complaint(&mut self) -> String {
        let _ = self.child.kill();
        let _ = self.child.wait();
        fs::read_to_string(&self.errors).unwrap_or_default()
    }

    /// The port that a program prints as its first line.
    async fn port(&mut self) -> u16 {
        let output = self.child.stdout.take().expect("a pipe");
        let reading = tokio::task::spawn_blocking(move || {
            let mut output = BufReader::new(output);
            let mut line = String::new();
            output.read_line(&mut line).map(|_| (line, output))
        });
        let read = tokio::time::timeout(START, reading).await;
        let read = read.unwrap_or_else(|_| panic!("it does not start: {}", self.complaint()));
        let (line, output) = read.expect("no panic").expect("text");
        self.child.stdout = Some(output.into_inner());
        let port = line.trim().parse();
        port.unwrap_or_else(|_| panic!("it printed {line:?}, and: {}", self.complaint()))
    }
}
