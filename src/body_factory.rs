//! Bodies that can be made anew for each attempt.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use http::HeaderValue;
use reqwest::Body;

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type Making = Pin<Box<dyn Future<Output = Result<FreshBody, BoxError>> + Send>>;

/// Makes the request's body anew for each attempt: a request extension.
///
/// For streams, which can be sent only once: a file that is opened again, a form that is put together
/// again. It is called for every attempt, the first included, and its body takes the place of the
/// request's own. The bytes must be the same each time: the idempotency key speaks for them.
///
/// The making counts as part of the attempt, within its limit. If it fails, nothing was sent, and the
/// operation ends.
///
/// ```
/// use reqwest_idempotent_retry::BodyFactory;
///
/// # fn upload(client: &reqwest_middleware::ClientWithMiddleware) -> reqwest_middleware::RequestBuilder {
/// let file = BodyFactory::new(|| async {
///     let bytes = std::fs::read("report.csv")?;    // or a stream over an open file
///     Ok::<_, std::io::Error>(reqwest::Body::from(bytes))
/// });
/// client.put("http://localhost/report").with_extension(file)
/// # }
/// ```
#[derive(Clone)]
pub struct BodyFactory(Arc<dyn Fn() -> Making + Send + Sync>);

impl BodyFactory {
    /// A factory that calls `make` for each attempt. It may return a [`Body`] or a [`FreshBody`].
    #[must_use]
    pub fn new<F, M, B, E>(make: F) -> Self
    where
        F: Fn() -> M + Send + Sync + 'static,
        M: Future<Output = Result<B, E>> + Send + 'static,
        B: Into<FreshBody>,
        E: Into<BoxError>,
    {
        Self(Arc::new(move || {
            let making = make();
            Box::pin(async move { making.await.map(Into::into).map_err(Into::into) })
        }))
    }

    pub(crate) fn make(&self) -> Making {
        (self.0)()
    }
}

impl PartialEq for BodyFactory {
    /// Clones of one factory are the same.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for BodyFactory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BodyFactory").finish_non_exhaustive()
    }
}

/// A body made for one attempt, with the content type that goes with it.
#[derive(Debug)]
#[must_use]
pub struct FreshBody {
    pub(crate) body: Body,
    pub(crate) content_type: Option<HeaderValue>,
}

impl FreshBody {
    /// The request's own `Content-Type` stays, unless [`content_type`](Self::content_type) says more.
    pub fn new(body: Body) -> Self {
        Self {
            body,
            content_type: None,
        }
    }

    /// Replaces the request's `Content-Type`: a multipart form has another boundary each time.
    pub fn content_type(mut self, value: HeaderValue) -> Self {
        self.content_type = Some(value);
        self
    }
}

impl From<Body> for FreshBody {
    fn from(body: Body) -> Self {
        Self::new(body)
    }
}
