//! A browser, a shop, and the stock service behind it: how little time is left travels along, and ends
//! every call made for a caller who no longer waits.
//!
//! ```text
//! cargo run --example gateway
//! ```
//!
//! Four pages are opened, on real sockets. Watch three things:
//!
//! * The handler of the shop ([`shop`]) knows nothing of deadlines. Its calls end in time all the same:
//!   two in parallel, and one in a task of its own that outlives the page.
//! * Each hop is told less time than the one before had, measured when the request is sent. The stock
//!   service ([`stock`]) refuses work that could not end in time.
//! * What the metrics say is what the stock service has counted itself.
//!
//! Ends with its checks, and exits with 1 when one of them fails.

#![allow(
    clippy::disallowed_methods,
    reason = "services and callers read the time and wait, as their own programs would"
)]

mod browser;
mod checks;
mod figures;
mod shop;
mod stock;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use browser::Browser;
use checks::{Checks, Page, chapter};
use http::HeaderName;
use metrics_exporter_prometheus::PrometheusBuilder;
use reqwest_idempotent_retry::{
    Backoff, KeyContract, RetryMiddleware, StatusClass, TimeoutHeader, metrics,
};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware};
use shop::Shop;
use stock::Stock;

type AnyError = Box<dyn std::error::Error + Send + Sync>;
type Result<T, E = AnyError> = std::result::Result<T, E>;

/// How a browser tells the shop what time it gives; the shop tells the stock service by `grpc-timeout`.
const BROWSER_TIMEOUT: HeaderName = HeaderName::from_static("x-request-timeout-ms");

/// Says which attempt of an operation a request is.
const ATTEMPT: HeaderName = HeaderName::from_static("x-retry-attempt");

/// Why the stock service has not even begun.
const REFUSED: HeaderName = HeaderName::from_static("x-refused");

/// **The client to copy** for calls to another service: `name` is its label in the metrics.
fn client(name: &'static str) -> Result<ClientWithMiddleware> {
    let retry = RetryMiddleware::builder()
        .name(name)
        .timeout_header(TimeoutHeader::Grpc) // tells what is left when an attempt starts
        .reserve(ms(100)) // leaves the shop time to say why there is no page
        .backoff(Backoff::fixed([ms(50)]))
        .attempt_header(ATTEMPT)
        .key_contract(KeyContract::default())
        .no_retry_headers([REFUSED])
        .classify(|_, headers| {
            let is_refused = headers.contains_key(REFUSED);
            is_refused.then_some(StatusClass::RefusedBeforeWork)
        })
        .client_is_prepared(true)
        .build()?;
    let http = RetryMiddleware::prepare(plain_http()).build()?;
    Ok(ClientBuilder::new(http).with(retry).build())
}

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let recorder = PrometheusBuilder::new().install_recorder()?;
    metrics::describe();
    let stock = Stock::start().await?;
    let shop = Shop::start(&stock, recorder).await?;
    let browser = Browser::new(&shop)?;
    let mut checks = Checks::new(&shop, &stock);

    a_page_in_time(&browser, &stock, &mut checks).await?;
    work_that_never_ends(&browser, &stock, &mut checks).await?;
    too_little_time(&browser, &stock, &mut checks).await?;
    a_browser_that_goes_away(&browser, &stock, &mut checks).await?;
    checks.of_the_metrics(&browser).await?;
    let verdict = checks.end();

    shop.stop().await?;
    stock.stop().await?;
    Ok(verdict)
}

async fn a_page_in_time(browser: &Browser, stock: &Stock, checks: &mut Checks<'_>) -> Result<()> {
    chapter("tea", "the stock service is well, but for one hiccup");
    let (begun, gave) = (Instant::now(), ms(3000));
    let answer = browser.opens("tea", gave).await?;
    let calls = stock.ended("tea", 4).await?;
    let page = Page::new("tea", begun, gave, calls);
    checks.print(&page, Some(&answer));
    checks.of_the_time_left(&page);
    checks.of_a_page_in_time(&page, &answer);
    Ok(())
}

async fn work_that_never_ends(
    browser: &Browser,
    stock: &Stock,
    checks: &mut Checks<'_>,
) -> Result<()> {
    chapter("jam", "the stock service never answers");
    let (begun, gave) = (Instant::now(), ms(2000));
    let answer = browser.opens("jam", gave).await?;
    let calls = stock.ended("jam", 3).await?;
    let page = Page::new("jam", begun, gave, calls);
    checks.print(&page, Some(&answer));
    checks.of_the_time_left(&page);
    checks.of_work_that_never_ends(&page, &answer);
    Ok(())
}

async fn too_little_time(browser: &Browser, stock: &Stock, checks: &mut Checks<'_>) -> Result<()> {
    chapter(
        "cake",
        "needs 1900 ms of the stock service, and less is left",
    );
    let (begun, gave) = (Instant::now(), ms(1950));
    let answer = browser.opens("cake", gave).await?;
    let calls = stock.ended("cake", 3).await?;
    let page = Page::new("cake", begun, gave, calls);
    checks.print(&page, Some(&answer));
    checks.of_the_time_left(&page);
    checks.of_too_little_time(&page, &answer);
    Ok(())
}

async fn a_browser_that_goes_away(
    browser: &Browser,
    stock: &Stock,
    checks: &mut Checks<'_>,
) -> Result<()> {
    chapter(
        "honey",
        "the browser goes away while the stock service works",
    );
    let (begun, gave) = (Instant::now(), ms(20_000));
    tokio::select! {
        answer = browser.opens("honey", gave) => {
            return Err(format!("nobody can have answered {:?}", answer?).into());
        }
        all_there = stock.under_way("honey", 3) => all_there?,
    }
    let left = begun.elapsed();
    let calls = stock.ended("honey", 3).await?;
    let page = Page::new("honey", begun, gave, calls);
    checks.print(&page, None);
    checks.of_the_time_left(&page);
    checks.of_a_browser_that_goes_away(&page, left);
    Ok(())
}

/// For loopback without TLS. Yours is `reqwest::Client::builder()`.
fn plain_http() -> reqwest::ClientBuilder {
    // An error says that another client has installed it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().tls_certs_only([]).no_proxy()
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}
