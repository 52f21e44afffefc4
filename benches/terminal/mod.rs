//! The bottom of a stack, in place of a connection.

use std::hint::black_box;

use http::Extensions;
use reqwest::{Body, Request, Response, ResponseBuilderExt};
use reqwest_middleware::{ClientBuilder, Middleware, Next};

/// Answers 200 at once.
pub(crate) struct Terminal;

#[async_trait::async_trait]
impl Middleware for Terminal {
    async fn handle(
        &self,
        request: Request,
        _: &mut Extensions,
        _: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        // As a connection would: a request whose body nobody asks for is one that was not sent.
        if let Some(body) = request.body() {
            black_box(http_body::Body::is_end_stream(body));
        }
        let answer = http::Response::builder()
            .url(request.url().clone())
            .body(Body::default());
        Ok(Response::from(answer.expect("a valid response")))
    }
}

/// A stack without layers, whose client is never reached.
pub(crate) fn stack() -> ClientBuilder {
    // An error says that another stack has installed it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let http = reqwest::Client::builder().tls_certs_only([]).build();
    ClientBuilder::new(http.expect("a client"))
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime")
}
