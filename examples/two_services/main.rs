//! Two clients, two services, one load control: one service fails for three seconds, and recovers.
//!
//! ```text
//! cargo run --example two_services
//! ```
//!
//! Both clients send to both services all the time, on real sockets. Watch three things:
//!
//! * The service that is well notices nothing: budget and breaker are kept host by host.
//! * The one that fails gets its first sends and hardly more, where three attempts without a budget
//!   would be three times the load.
//! * What one client has seen counts for the other as well: it does not have to find out by itself.
//!
//! What was sent is counted by the services, never by the clients. Ends with its checks, and exits
//! with 1 when one of them fails.

#![allow(
    clippy::disallowed_methods,
    reason = "services and callers read the time and wait, as their own programs would"
)]

mod caller;
mod checks;
mod service;
mod table;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use caller::Caller;
use checks::Checks;
use http::HeaderName;
use reqwest_idempotent_retry::{
    Backoff, CancellationToken, CircuitBreaker, LoadControl, RetryMiddleware,
};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware};
use service::Service;
use table::Table;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval_at};

type AnyError = Box<dyn std::error::Error + Send + Sync>;
type Result<T, E = AnyError> = std::result::Result<T, E>;

/// In seconds from the start.
const FAILS_AT: u32 = 2;
const RECOVERS_AT: u32 = 5;
const ENDS_AT: u32 = 8;

/// Of each client, to each service.
const SENDS_PER_SECOND: u32 = 100;

/// Says which attempt of an operation a request is, so that the services can count first sends.
const ATTEMPT: HeaderName = HeaderName::from_static("x-retry-attempt");

/// **One for the whole process**: each host gets a budget of its own (10 retries at once, then one for
/// ten successes) and a breaker of its own.
fn load_control() -> Result<Arc<LoadControl>> {
    // Short, as this outage is. The default starts with a second and ends with a minute.
    let open_for = Backoff::equal_jitter(ms(300), ms(1000));
    let breaker = CircuitBreaker::builder().open_for(open_for).build()?;
    Ok(Arc::new(LoadControl::builder().breaker(breaker).build()?))
}

/// **As many clients as you like**, each with settings of its own. What they share is `load`.
fn client(load: &Arc<LoadControl>) -> Result<ClientWithMiddleware> {
    let retry = RetryMiddleware::builder()
        .deadline(Duration::from_secs(10))
        .attempt_timeout(Duration::from_secs(5))
        .backoff(Backoff::full_jitter(ms(50), ms(500)))
        .load_control(Arc::clone(load))
        .attempt_header(ATTEMPT)
        .client_is_prepared(true)
        .build()?;
    let http = RetryMiddleware::prepare(plain_http()).build()?;
    Ok(ClientBuilder::new(http).with(retry).build())
}

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let load = load_control()?;
    let well = Service::start("catalog").await?;
    let ill = Service::start("orders").await?;
    let mut callers = Vec::new();
    for name in ["web", "jobs"] {
        let client = client(&load)?;
        callers.push(Caller::new(name, &client, &well));
        callers.push(Caller::new(name, &client, &ill));
    }

    let (mut traffic, end) = (JoinSet::new(), CancellationToken::new());
    for caller in &callers {
        let until = end.clone();
        traffic.spawn(Arc::clone(caller).keeps_sending(SENDS_PER_SECOND, until));
    }
    let recovered = run(Table::new([&well, &ill], &load, &callers), &ill).await;
    end.cancel();
    traffic.join_all().await;

    let mut checks = Checks::new(&load, &callers);
    checks.of_the_one_that_was_well(&well)?;
    checks.of_the_one_that_failed(&ill, recovered)?;
    well.stop().await?;
    ill.stop().await?;
    Ok(checks.end())
}

/// Prints a row for each second, and switches the one service off and on. Returns when it was back.
async fn run(mut table: Table<'_>, ill: &Service) -> Instant {
    let mut recovered = Instant::now();
    let second = Duration::from_secs(1);
    let mut seconds = interval_at(tokio::time::Instant::now() + second, second);
    seconds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    table.head();
    for number in 1..=ENDS_AT {
        seconds.tick().await;
        table.row(number);
        match number {
            FAILS_AT => {
                ill.fails();
                println!(
                    "     {} answers 503, every third time with Retry-After: 1",
                    ill.name
                );
            }
            RECOVERS_AT => {
                ill.recovers();
                recovered = Instant::now();
                println!("     {} is back", ill.name);
            }
            _ => {}
        }
    }
    recovered
}

/// For loopback without TLS. Yours is `reqwest::Client::builder()`.
fn plain_http() -> reqwest::ClientBuilder {
    // An error says that the other client has installed it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().tls_certs_only([]).no_proxy()
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}
