//! The three ways to ask, what the caller is told, and how to send so that both can be compared.

use std::time::Duration;

use http::StatusCode;
use reqwest::Response;
use reqwest_idempotent_retry::{
    Backoff, Certainty, IdempotencyKey, NextStep, ReportHandle, RetryErrorExt, RetryMiddleware,
    RetryMiddlewareBuilder, RetryReport, StopReason,
};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Error, RequestBuilder};

use super::{Seen, patiently};
use crate::support::{self, key, ms, plain_http_builder};

pub const KEY: &str = "order-17";
pub const ORDER: &str = "item=17&count=1";
pub const ATTEMPTS: usize = 3;

/// An attempt's limit where something never answers: short, yet long enough for a busy machine.
pub const LIMIT: Duration = ms(200);

/// The three ways to ask, by what they may be repeated after.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Call {
    Get,
    Post,
    KeyedPost,
}

impl Call {
    pub const ALL: [Self; 3] = [Self::Get, Self::Post, Self::KeyedPost];
    pub const POSTS: [Self; 2] = [Self::Post, Self::KeyedPost];

    pub fn to(self, client: &ClientWithMiddleware, url: &str) -> RequestBuilder {
        match self {
            Self::Get => client.get(url),
            Self::Post => client.post(url).body(ORDER),
            Self::KeyedPost => client.post(url).body(ORDER).with_extension(key(KEY)),
        }
    }

    pub fn key(self) -> Option<IdempotencyKey> {
        (self == Self::KeyedPost).then(|| key(KEY))
    }

    /// What is told when every attempt proves no more than this.
    pub fn gives_up(self, certainty: Certainty) -> Told {
        let may_repeat = self != Self::Post || certainty <= Certainty::NotProcessed;
        let (attempts, stop) = if may_repeat {
            (ATTEMPTS, StopReason::AttemptsExhausted)
        } else {
            (1, StopReason::UnsafeToRepeat)
        };
        self.ends(attempts, Some(stop), certainty)
    }

    pub fn ends(self, attempts: usize, stop: Option<StopReason>, certainty: Certainty) -> Told {
        let key = self.key();
        let next = match (certainty, stop) {
            // Nothing was to be done, so there is nothing to confirm.
            (Certainty::Unknown, _) if self == Self::Get => NextStep::TryLater { after: None },
            (Certainty::Unknown, _) => NextStep::ConfirmOutcome { key: key.clone() },
            (Certainty::Answered, None) => NextStep::Done,
            (_, Some(StopReason::NotRetryable)) => NextStep::FixRequest,
            _ => NextStep::TryLater { after: None },
        };
        Told {
            attempts,
            stop,
            certainty,
            next,
            key,
        }
    }

    pub fn is_done(self, attempts: usize) -> Told {
        self.ends(attempts, None, Certainty::Answered)
    }

    /// The request arrived whole, with the key exactly once or not at all.
    pub fn check_arrived(self, seen: &Seen, row: &str) {
        let (method, body) = match self {
            Self::Get => ("GET", ""),
            Self::Post | Self::KeyedPost => ("POST", ORDER),
        };
        let keys: Vec<_> = self
            .key()
            .iter()
            .map(|key| key.as_str().to_owned())
            .collect();
        assert_eq!(seen.method, method, "{row}");
        assert_eq!(seen.body, body, "body of: {row}");
        assert_eq!(seen.keys(), keys, "key lines of: {row}");
    }

    pub fn check_all_arrived(self, seen: &[Seen], row: &str) {
        seen.iter().for_each(|seen| self.check_arrived(seen, row));
    }
}

/// What the caller is told.
#[derive(Debug, PartialEq)]
pub struct Told {
    pub attempts: usize,
    pub stop: Option<StopReason>,
    pub certainty: Certainty,
    pub next: NextStep,
    pub key: Option<IdempotencyKey>,
}

impl From<&RetryReport> for Told {
    fn from(report: &RetryReport) -> Self {
        Self {
            attempts: report.attempts().len(),
            stop: report.stop(),
            certainty: report.certainty(),
            next: report.next_step(),
            key: report.key().cloned(),
        }
    }
}

/// How an operation came out.
#[derive(Debug)]
pub struct Outcome {
    pub result: Result<Response, Error>,
    pub report: RetryReport,
}

impl Outcome {
    pub fn told(&self) -> Told {
        Told::from(&self.report)
    }

    pub fn status(&self) -> Option<StatusCode> {
        support::status(&self.result)
    }

    pub fn response(self) -> Response {
        self.result.expect("an answer")
    }

    pub fn error(&self) -> &Error {
        self.result.as_ref().expect_err("an error")
    }
}

/// Sends, and makes sure that error and report handle tell the same.
pub async fn send(request: RequestBuilder) -> Outcome {
    let handle = ReportHandle::new();
    let request = request.with_extension(handle.clone());
    let result = patiently("a result", request.send()).await;
    let report = handle.report().expect("every operation is reported");
    if let Err(error) = &result {
        let error = error.retry_error().expect("an error of this crate");
        assert_eq!(Told::from(error.report()), Told::from(&report));
    }
    Outcome { result, report }
}

pub fn retry() -> RetryMiddlewareBuilder {
    RetryMiddleware::builder()
        .max_attempts(u32::try_from(ATTEMPTS).expect("small"))
        .backoff(Backoff::fixed([ms(20)]))
        .without_budget()
        .random_with(|| 0.0)
}

pub fn over(http: reqwest::Client, retry: RetryMiddlewareBuilder) -> ClientWithMiddleware {
    ClientBuilder::new(http)
        .with(retry.build().expect("valid settings"))
        .build()
}

/// Whether the client below was made with [`RetryMiddleware::prepare`], and the layer was told so.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Http {
    Prepared,
    Unprepared,
}

impl Http {
    pub const BOTH: [Self; 2] = [Self::Prepared, Self::Unprepared];

    pub fn builder(self) -> reqwest::ClientBuilder {
        match self {
            Self::Prepared => RetryMiddleware::prepare(plain_http_builder()),
            Self::Unprepared => plain_http_builder(),
        }
    }

    pub fn client(self, retry: RetryMiddlewareBuilder) -> ClientWithMiddleware {
        let retry = retry.client_is_prepared(self == Self::Prepared);
        over(self.builder().build().expect("a client"), retry)
    }
}

/// A request without effect is not tracked, so only the client's own connect timeout can tell that
/// it was not sent. It may be repeated either way.
pub fn never_sent_if_tracked(call: Call) -> Certainty {
    match call {
        Call::Get => Certainty::Unknown,
        Call::Post | Call::KeyedPost => Certainty::NotSent,
    }
}
