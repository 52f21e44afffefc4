//! With tonic's router, over HTTP/2: what a generated service is mounted in.

use std::convert::Infallible;
use std::future::{Future, pending};
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, Version};
use reqwest_idempotent_retry::CancellationToken;
use reqwest_idempotent_retry::ambient::{self, Context};
use reqwest_idempotent_retry::server::ContextLayer;
use tokio::sync::mpsc;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::service::Routes;
use tower::Service;

use crate::App;
use crate::net::patiently;
use crate::support::{plain_http_builder, secs};

/// What `tonic-build` would write for a service with the methods `Tell` and `Wait`.
#[derive(Clone)]
struct Orders {
    tell: mpsc::UnboundedSender<Context>,
}

impl NamedService for Orders {
    const NAME: &'static str = "shop.Orders";
}

impl Service<Request<Body>> for Orders {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut TaskContext<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let tell = self.tell.clone();
        Box::pin(async move {
            let context = ambient::current().expect("a context");
            tell.send(context).expect("the test listens");
            if request.uri().path().ends_with("/Wait") {
                pending::<()>().await;
            }
            let answer = Response::builder()
                .header("content-type", "application/grpc")
                .header("grpc-status", "0")
                .body(Body::empty());
            Ok(answer.expect("a valid response"))
        })
    }
}

struct Setting {
    app: App,
    layer: ContextLayer,
    http: reqwest::Client,
    told: mpsc::UnboundedReceiver<Context>,
}

impl Setting {
    async fn new() -> Self {
        let (tell, told) = mpsc::unbounded_channel();
        let layer = ContextLayer::new();
        let routes = Routes::new(Orders { tell }).prepare();
        let routes = routes.into_axum_router().layer(layer.clone());
        let http = plain_http_builder().http2_prior_knowledge();
        Self {
            app: App::serve(routes).await,
            layer,
            http: http.build().expect("a client"),
            told,
        }
    }

    fn call(&self, method: &str, timeout: &str) -> reqwest::RequestBuilder {
        let no_message = Bytes::from_static(&[0; 5]);
        self.http
            .post(self.app.url(&format!("/shop.Orders/{method}")))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("grpc-timeout", timeout)
            .body(no_message)
    }

    async fn told(&mut self) -> Context {
        let told = patiently("a call", self.told.recv()).await;
        told.expect("told")
    }
}

fn token(context: &Context) -> CancellationToken {
    context.cancellation().expect("a token").clone()
}

#[tokio::test]
async fn a_grpc_timeout_reaches_the_method() {
    let mut setting = Setting::new().await;
    for (timeout, expected) in [
        ("100S", Some(secs(100))),
        ("100000m", Some(secs(100))),
        ("2M", Some(secs(120))),
        ("soon", None),
    ] {
        let answer = setting.call("Tell", timeout).send().await.expect("a head");
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.version(), Version::HTTP_2);
        assert_eq!(answer.headers()["grpc-status"], "0");
        let left = setting.told().await.time_left();
        let is_less = |left: Duration| expected.is_some_and(|told| left <= told && left > secs(30));
        assert_eq!(left.is_some(), expected.is_some(), "{timeout}");
        assert!(left.is_none_or(is_less), "{left:?} of {timeout}");
    }
    assert_eq!(setting.layer.malformed(), 1);
}

/// A cancelled call is a reset stream; the connection stays.
#[tokio::test]
async fn a_stream_that_is_reset_cancels_its_token_and_no_other() {
    let mut setting = Setting::new().await;
    let stays = tokio::spawn(setting.call("Wait", "100S").send());
    let of_the_one_that_stays = token(&setting.told().await);
    let leaves = tokio::spawn(setting.call("Wait", "100S").send());
    let of_the_one_that_leaves = token(&setting.told().await);

    leaves.abort();
    let cancelled = of_the_one_that_leaves.cancelled();
    patiently("the token to be cancelled", cancelled).await;
    assert!(!of_the_one_that_stays.is_cancelled());

    stays.abort();
    let cancelled = of_the_one_that_stays.cancelled();
    patiently("the other token to be cancelled", cancelled).await;
}

#[tokio::test]
async fn a_method_that_has_ended_leaves_its_token_as_it_is() {
    let mut setting = Setting::new().await;
    let answer = setting.call("Tell", "100S").send().await.expect("a head");
    answer.bytes().await.expect("an empty body");
    assert!(!token(&setting.told().await).is_cancelled());
}
