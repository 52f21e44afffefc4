//! Those who call the service, and what they are told.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use reqwest::Response;
use reqwest::dns::{Name, Resolve, Resolving};
use reqwest_idempotent_retry::{
    AttemptRecord, Backoff, Certainty, Deadline, Idempotent, KeyContract, ReportHandle,
    RetryBudget, RetryMiddleware, StopReason,
};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Error, RequestBuilder};

use super::plan::{ATTEMPT_LIMIT, Keying, Obstacle, Plan, Purse, Seed, Time};
use crate::support::{key, lock, ms, plain_http_builder};

/// What a caller is told of an operation.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) plan: Plan,
    pub(crate) certainty: Certainty,
    pub(crate) stop: Option<StopReason>,
    pub(crate) key: Option<String>,
    pub(crate) attempts: Vec<AttemptRecord>,
    pub(crate) status: Option<u16>,
    /// The answer's body, if it came whole.
    pub(crate) receipt: Option<String>,
}

impl Told {
    pub(crate) fn is_success(&self) -> bool {
        self.certainty == Certainty::Answered && matches!(self.status, Some(200..300))
    }

    pub(crate) fn sends(&self) -> usize {
        self.attempts.len()
    }

    pub(crate) fn retries(&self) -> usize {
        self.attempts.len().saturating_sub(1)
    }
}

/// One client for each purse.
#[derive(Debug)]
pub(crate) struct Callers {
    seed: Seed,
    rich: ClientWithMiddleware,
    fixed: ClientWithMiddleware,
    poor: ClientWithMiddleware,
}

impl Callers {
    pub(crate) fn new(seed: Seed, ways: Ways, fixed_retries: u32) -> Self {
        let ways = Arc::new(ways);
        let rich = RetryBudget::builder().ratio(1.0).burst(400_000).build();
        let poor = RetryBudget::builder().ratio(0.05).burst(10).build();
        let client = |budget| client(Arc::clone(&ways), budget);
        Self {
            seed,
            rich: client(rich.expect("a budget")),
            fixed: client(RetryBudget::fixed(fixed_retries)),
            poor: client(poor.expect("a budget")),
        }
    }

    pub(crate) async fn call(&self, operation: u64) -> Told {
        let plan = self.seed.plan(operation);
        let handle = ReportHandle::new();
        let request = self.request(&plan).with_extension(handle.clone());
        let result = patiently_or_not(&plan, request).await;
        let report = handle.report().expect("every operation is reported");
        let status = report.status().map(|status| status.as_u16());
        Told {
            plan,
            certainty: report.certainty(),
            stop: report.stop(),
            key: report.key().map(|key| key.as_str().to_owned()),
            attempts: report.attempts().to_vec(),
            status,
            receipt: receipt(result).await,
        }
    }

    fn request(&self, plan: &Plan) -> RequestBuilder {
        let request = self.client(plan.purse).post(plan.url()).body(plan.body());
        let request = match plan.keying {
            Keying::Extension => request.with_extension(key(&plan.key())),
            Keying::Header => request.header("idempotency-key", plan.key()),
            Keying::Generated => request,
            Keying::None => request.with_extension(Idempotent(false)),
        };
        match plan.time {
            Time::Unlimited => request,
            Time::Deadline(after) => request.with_extension(Deadline::after(after)),
        }
    }

    fn client(&self, purse: Purse) -> &ClientWithMiddleware {
        match purse {
            Purse::Rich => &self.rich,
            Purse::Fixed => &self.fixed,
            Purse::Poor => &self.poor,
        }
    }
}

fn client(ways: Arc<Ways>, budget: RetryBudget) -> ClientWithMiddleware {
    let http = RetryMiddleware::prepare(plain_http_builder().dns_resolver(ways));
    let retry = RetryMiddleware::builder()
        .max_attempts(4)
        .attempt_timeout(ATTEMPT_LIMIT)
        .minimum_attempt(ms(20))
        .backoff(Backoff::full_jitter(ms(4), ms(30)))
        .max_retry_after(ms(500))
        .retry_after_ms_headers([http::HeaderName::from_static("retry-after-ms")])
        // This service keeps to it: see `Fault`.
        .refused_before_work([http::StatusCode::TOO_MANY_REQUESTS])
        .budget(Arc::new(budget))
        .key_contract(KeyContract::default())
        .client_is_prepared(true)
        .build()
        .expect("valid settings");
    ClientBuilder::new(http.build().expect("a client"))
        .with(retry)
        .build()
}

/// `None`: the caller has dropped the future.
async fn patiently_or_not(plan: &Plan, request: RequestBuilder) -> Option<Result<Response, Error>> {
    match plan.patience {
        None => Some(request.send().await),
        Some(patience) => tokio::time::timeout(patience, request.send()).await.ok(),
    }
}

async fn receipt(result: Option<Result<Response, Error>>) -> Option<String> {
    result?.ok()?.text().await.ok()
}

/// Where names lead: to the server, or to the obstacle that is planned.
#[derive(Debug)]
pub(crate) struct Ways {
    pub(crate) seed: Seed,
    pub(crate) server: SocketAddr,
    pub(crate) closed_port: SocketAddr,
    pub(crate) silent_peer: SocketAddr,
    pub(crate) asked: Mutex<HashMap<u64, usize>>,
}

impl Ways {
    fn obstacle(&self, name: &str) -> Option<Obstacle> {
        let operation = name.strip_prefix("op-")?.strip_suffix(".test")?;
        let operation = operation.parse().expect("an operation");
        let mut asked = lock(&self.asked);
        let asked = asked.entry(operation).or_default();
        *asked += 1;
        self.seed.plan(operation).way.obstacle(*asked - 1)
    }
}

impl Resolve for Ways {
    fn resolve(&self, name: Name) -> Resolving {
        let address = match self.obstacle(name.as_str()) {
            None => Ok(self.server),
            Some(Obstacle::ClosedPort) => Ok(self.closed_port),
            Some(Obstacle::SilentTls) => Ok(self.silent_peer),
            Some(Obstacle::UnknownName) => Err(io::Error::other("no such name")),
            Some(Obstacle::StalledDns) => return Box::pin(std::future::pending()),
        };
        Box::pin(std::future::ready(match address {
            Ok(address) => Ok(Box::new(std::iter::once(address)) as _),
            Err(error) => Err(error.into()),
        }))
    }
}

/// What an unknown outcome turned out to be.
#[derive(Debug)]
pub(crate) struct Confirmed {
    pub(crate) was_made: bool,
    /// What the service should not have answered.
    pub(crate) wrong: Vec<String>,
}

/// Asks the service itself, with no layer in between and after the storm.
#[derive(Debug)]
pub(crate) struct Confirmation {
    http: reqwest::Client,
    server: SocketAddr,
}

impl Confirmation {
    pub(crate) fn with(server: SocketAddr) -> Self {
        let http = plain_http_builder().build().expect("a client");
        Self { http, server }
    }

    /// Looks an unknown outcome up by its key, repeats it, and tries the key with another body.
    pub(crate) async fn confirm(&self, plan: &Plan, key: &str) -> Confirmed {
        let found = self.look_up(key).await;
        let repeated = self.order(plan.operation, key, plan.body()).await;
        let other = self.order(plan.operation, key, plan.other_body()).await;
        let mut wrong = Vec::new();
        match &found {
            (404, _) => {}
            (200, receipt) if *receipt == repeated.1 => {}
            found => wrong.push(format!("was found as {found:?}, repeated as {repeated:?}")),
        }
        if repeated.0 != 201 {
            wrong.push(format!("repeated with its key it gave {repeated:?}"));
        }
        if other.0 != 422 {
            wrong.push(format!("its key with another body gave {other:?}"));
        }
        Confirmed {
            was_made: found.0 == 200,
            wrong,
        }
    }

    async fn look_up(&self, key: &str) -> (u16, String) {
        let url = format!("http://{}/orders/by-key/{key}", self.server);
        answer(self.http.get(url)).await
    }

    async fn order(&self, operation: u64, key: &str, body: bytes::Bytes) -> (u16, String) {
        let url = format!("http://{}/orders/{operation}", self.server);
        let order = self.http.post(url).body(body);
        answer(order.header("idempotency-key", key)).await
    }
}

async fn answer(request: reqwest::RequestBuilder) -> (u16, String) {
    let response = request.send().await.expect("the service is calm");
    let status = response.status().as_u16();
    (status, response.text().await.expect("a whole answer"))
}
