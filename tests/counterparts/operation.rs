//! An operation of these tests, and what its caller is told.

#![allow(unreachable_pub, reason = "the one user is the test next door")]

use std::fmt;
use std::time::Duration;

use reqwest::Response;
use reqwest_idempotent_retry::{
    AttemptRecord, Backoff, Certainty, IdempotencyKey, NextStep, ReportHandle, RetryMiddleware,
    RetryMiddlewareBuilder, RetryReport,
};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Error};

use crate::net::patiently;
use crate::support::{self, key, ms, plain_http_builder, secs};

pub const ATTEMPTS: usize = 3;

pub fn retry() -> RetryMiddlewareBuilder {
    RetryMiddleware::builder()
        .max_attempts(u32::try_from(ATTEMPTS).expect("small"))
        .backoff(Backoff::fixed([ms(20)]))
        .deadline(secs(8))
        .without_budget()
        .random_with(|| 0.0)
}

/// Made as the README says.
pub fn client(retry: RetryMiddlewareBuilder) -> ClientWithMiddleware {
    layered(retry).build()
}

pub fn layered(retry: RetryMiddlewareBuilder) -> ClientBuilder {
    over(plain_http_builder(), retry)
}

#[cfg(feature = "http2")]
pub fn http2_client(retry: RetryMiddlewareBuilder) -> ClientWithMiddleware {
    over(plain_http_builder().http2_prior_knowledge(), retry).build()
}

fn over(http: reqwest::ClientBuilder, retry: RetryMiddlewareBuilder) -> ClientBuilder {
    let http = RetryMiddleware::prepare(http).build();
    let retry = retry.client_is_prepared(true).build();
    ClientBuilder::new(http.expect("a client")).with(retry.expect("valid settings"))
}

/// The creation of the one order that has this name.
#[derive(Clone, Debug)]
pub struct Order {
    pub name: String,
    is_keyed: bool,
    quantity: u32,
    headers: Vec<(&'static str, String)>,
}

/// Under its name as the key.
pub fn keyed(name: impl Into<String>) -> Order {
    let name = name.into();
    Order {
        headers: vec![("operation", name.clone())],
        name,
        is_keyed: true,
        quantity: 1,
    }
}

pub fn unkeyed(name: impl Into<String>) -> Order {
    Order {
        is_keyed: false,
        ..keyed(name)
    }
}

impl Order {
    pub fn both(name: &str) -> [Self; 2] {
        [
            keyed(format!("keyed {name}").replace(' ', "-")),
            unkeyed(format!("unkeyed {name}").replace(' ', "-")),
        ]
    }

    /// What mitmproxy does to it, and how often.
    pub fn fault(mut self, fault: &str, times: usize) -> Self {
        self.headers.push(("fault", fault.to_owned()));
        self.headers.push(("fault-times", times.to_string()));
        self
    }

    /// What the first run of the order's handler does.
    pub fn handler(mut self, how: &str) -> Self {
        self.headers.push(("handler", how.to_owned()));
        self
    }

    /// Another body under the same name and key.
    pub fn quantity(mut self, quantity: u32) -> Self {
        self.quantity = quantity;
        self
    }

    pub fn key(&self) -> Option<IdempotencyKey> {
        self.is_keyed.then(|| key(&self.name))
    }

    /// How often it is sent if every attempt leaves it unknown.
    pub fn most_sends(&self) -> usize {
        if self.is_keyed { ATTEMPTS } else { 1 }
    }

    fn body(&self) -> String {
        let Self { name, quantity, .. } = self;
        serde_json::json!({ "operation": name, "quantity": quantity }).to_string()
    }

    pub async fn send(&self, client: &ClientWithMiddleware, url: &str) -> Outcome {
        let handle = ReportHandle::new();
        let mut request = client
            .post(url)
            .header("content-type", "application/json")
            .body(self.body())
            .with_extension(handle.clone());
        for (name, value) in &self.headers {
            request = request.header(*name, value);
        }
        if let Some(key) = self.key() {
            request = request.with_extension(key);
        }
        let result = patiently("a result", request.send()).await;
        let report = handle.report().expect("every operation is reported");
        Outcome { result, report }
    }

    // ---- What may be told of it ----

    /// It was created, by the last of these attempts.
    pub fn is_done(&self, attempts: &[Certainty]) -> Told {
        self.is_told(Some(201), attempts, Certainty::Answered, NextStep::Done)
    }

    /// It may have been created. `status`: that of the answer handed on, if there is one.
    pub fn is_unknown(&self, status: Option<u16>, attempts: &[Certainty]) -> Told {
        let next = NextStep::ConfirmOutcome { key: self.key() };
        self.is_told(status, attempts, Certainty::Unknown, next)
    }

    /// Every attempt that it may have leaves it unknown.
    pub fn stays_unknown(&self, status: Option<u16>) -> Told {
        self.is_unknown(status, &vec![Certainty::Unknown; self.most_sends()])
    }

    /// The request is at fault.
    pub fn is_refused(&self, status: u16) -> Told {
        let answered = Certainty::Answered;
        self.is_told(Some(status), &[answered], answered, NextStep::FixRequest)
    }

    /// It was not created, and may be sent again.
    pub fn may_be_sent_later(
        &self,
        status: Option<u16>,
        attempts: &[Certainty],
        after: Option<Duration>,
    ) -> Told {
        let certainty = *attempts.last().expect("an attempt");
        self.is_told(status, attempts, certainty, NextStep::TryLater { after })
    }

    fn is_told(
        &self,
        status: Option<u16>,
        attempts: &[Certainty],
        certainty: Certainty,
        next: NextStep,
    ) -> Told {
        Told {
            attempts: attempts.to_vec(),
            status,
            certainty,
            next,
        }
    }
}

#[derive(Debug)]
pub struct Outcome {
    pub result: Result<Response, Error>,
    pub report: RetryReport,
}

impl Outcome {
    pub fn told(&self) -> Told {
        let attempts = self.report.attempts().iter();
        Told {
            attempts: attempts.map(AttemptRecord::certainty).collect(),
            status: support::status(&self.result).map(|status| status.as_u16()),
            certainty: self.report.certainty(),
            next: self.report.next_step(),
        }
    }
}

/// What the caller is told.
#[derive(Clone, Debug, PartialEq)]
pub struct Told {
    pub attempts: Vec<Certainty>,
    pub status: Option<u16>,
    pub certainty: Certainty,
    pub next: NextStep,
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = self
            .status
            .map_or("none".into(), |status| status.to_string());
        let sends = self.attempts.len();
        let certainty = self.certainty;
        write!(f, "{sends} sends, answer {status}, {certainty}")
    }
}
