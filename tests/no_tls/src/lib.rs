//! `https` without TLS compiled in: nothing can be sent, and no repeat will change that.

#![cfg(test)]

use reqwest_idempotent_retry::{Certainty, NextStep, RetryErrorExt, RetryMiddleware, StopReason};
use reqwest_middleware::ClientBuilder;

#[tokio::test]
async fn case_53_https_without_tls_is_never_sent_and_met_once() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let url = format!(
        "https://{}/orders",
        listener.local_addr().expect("its address")
    );
    let retry = RetryMiddleware::builder().build().expect("valid settings");
    let client = ClientBuilder::new(reqwest::Client::new())
        .with(retry)
        .build();
    for request in [client.get(&url), client.post(&url).body("order")] {
        let error = request.send().await.expect_err("no TLS");
        let error = error.retry_error().expect("an error of the layer");
        assert_eq!(error.report().attempts().len(), 1);
        assert_eq!(error.stop(), StopReason::NotRetryable);
        assert_eq!(error.certainty(), Certainty::NotSent);
        assert_eq!(error.next_step(), NextStep::FixRequest);
    }
    let waiting = std::time::Duration::ZERO;
    assert!(
        tokio::time::timeout(waiting, listener.accept())
            .await
            .is_err(),
        "nobody came"
    );
}
