//! One case: its service and client, what is printed of it, and what was expected of it.

use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use reqwest::Response;
use reqwest_idempotent_retry::{ReportHandle, RetryReport};
use reqwest_middleware::{ClientWithMiddleware, Error, RequestBuilder};
use serde_json::{Value, json};

use crate::Result;
use crate::server::{Entry, Server};

#[derive(Debug)]
pub(crate) struct Case {
    title: &'static str,
    pub(crate) server: Server,
    pub(crate) client: ClientWithMiddleware,
    right: Vec<String>,
    wrong: Vec<String>,
}

impl Case {
    pub(crate) async fn begin(title: &'static str) -> Result<Self> {
        println!("{title}");
        Ok(Self {
            title,
            server: Server::start().await?,
            client: crate::client(plain_http(), Arc::default())?,
            right: Vec::new(),
            wrong: Vec::new(),
        })
    }

    pub(crate) fn order(&self, fault: &str) -> RequestBuilder {
        let url = self.server.orders_url(fault);
        self.client.post(url).json(&order())
    }

    /// Sends, and prints how it went by the client's report and the service's log.
    pub(crate) async fn send(&self, request: RequestBuilder) -> Result<Response, Error> {
        let start = self.server.uptime();
        let logged = self.server.log().len();
        let handle = ReportHandle::new();
        let result = request.with_extension(handle.clone()).send().await;
        if let Some(report) = handle.report() {
            print_timeline(start, &report, &self.server.log().split_off(logged));
        }
        result
    }

    pub(crate) fn say(&self, what: &str) {
        print_event(self.server.uptime(), "client", what);
    }

    pub(crate) fn expect_counts(&mut self, orders: usize, sends: usize, keys: usize) -> Result<()> {
        let mut log = self.server.log();
        log.retain(|entry| entry.method == "POST");
        let seen: HashSet<_> = log.iter().map(|entry| &entry.key).collect();
        self.expect("orders", orders, self.server.orders()?.len());
        self.expect("sends", sends, log.len());
        self.expect("keys", keys, seen.len());
        Ok(())
    }

    pub(crate) fn expect<T: PartialEq + Debug>(&mut self, what: &str, expected: T, actual: T) {
        if actual == expected {
            self.right.push(format!("{what} {actual:?}"));
        } else {
            let numbers = format!("expected {expected:?}, actual {actual:?}");
            self.wrong
                .push(format!("{what}: {numbers} (case {})", self.title));
        }
    }

    /// Prints the verdict, stops the service, and returns what was wrong.
    pub(crate) async fn end(self, lesson: &str) -> Result<Vec<String>> {
        match self.wrong.as_slice() {
            [] => println!("   OK: {}. {lesson}\n", self.right.join(", ")),
            wrong => println!("   WRONG: {}\n", wrong.join("; ")),
        }
        self.server.stop().await?;
        Ok(self.wrong)
    }
}

/// Attempt by attempt: sent by the client, seen by the service, answered or lost.
fn print_timeline(start: Duration, report: &RetryReport, seen: &[Entry]) {
    let mut seen = seen.iter();
    let mut last_end = start;
    for attempt in report.attempts() {
        let sent = start + attempt.started_at();
        let name = format!("{} attempt {}", report.method(), attempt.number());
        if let wait @ 1.. = attempt.waited().as_millis() {
            print_event(last_end, "client", &format!("wait {wait} ms"));
        }
        print_event(sent, "client", &format!("{name} sent"));
        if let Some(entry) = seen.next() {
            print_event(entry.at, "server", &entry.to_string());
        }
        let end = match attempt.status() {
            Some(status) => format!("answered {}", status.as_u16()),
            None => format!("lost: {}", attempt.certainty()),
        };
        last_end = sent + attempt.took();
        print_event(last_end, "client", &format!("{name} {end}"));
    }
    let stop = report.stop().map(|stop| format!("{stop}; "));
    let end = format!("end: {}{}", stop.unwrap_or_default(), report.certainty());
    print_event(start + report.elapsed(), "client", &end);
}

fn print_event(at: Duration, who: &str, what: &str) {
    println!("{:>6} ms  {who}  {what}", at.as_millis());
}

pub(crate) fn order() -> Value {
    json!({ "item": "tea", "boxes": 2 })
}

/// For loopback without TLS. Yours is `reqwest::Client::builder()`.
pub(crate) fn plain_http() -> reqwest::ClientBuilder {
    // An error says that an earlier case has installed it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().tls_certs_only([]).no_proxy()
}
