//! The least that we have found a layer to ask of reqwest and http if it is to promise what this crate
//! promises. It decides nothing, records nothing and repeats nothing.
//!
//! It copies requests by `Request::try_clone`. `Request::new` and the public parts would take three
//! allocations less, and lose what is private: today a later layer's view of the request's extensions, with
//! a later reqwest whatever setting of a request is kept there next.
#![allow(dead_code, reason = "each benchmark uses its own part of this module")]

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Extensions, HeaderName, HeaderValue};
use http_body::{Frame, SizeHint};
use reqwest::{Body, Request, Response, ResponseBuilderExt};
use reqwest_idempotent_retry::Deadline;
use reqwest_middleware::{Middleware, Next, Result};
use smallvec::SmallVec;
use uuid::Uuid;

/// The layer.
pub(crate) struct Floor {
    /// With a deadline, and a key for what is not safe.
    pub(crate) with_all: bool,
}

/// Layers below read which attempt it is.
#[derive(Clone)]
#[expect(dead_code, reason = "nobody reads it here")]
struct Attempt {
    number: u32,
    limit: Option<Duration>,
}

/// In header, map and answer.
#[derive(Clone)]
struct Key(HeaderValue);

impl Key {
    fn random() -> Self {
        let mut text = [0; uuid::fmt::Hyphenated::LENGTH];
        Uuid::new_v4().hyphenated().encode_lower(&mut text);
        Self(HeaderValue::from_maybe_shared(Bytes::from_owner(text)).expect("visible ASCII"))
    }
}

/// Key and deadline belong to this request, and to no other that is sent with the same map.
#[expect(dead_code, reason = "nobody reads it here")]
#[derive(Clone)]
struct Mark {
    url: SmallVec<[u8; 96]>,
}

#[async_trait::async_trait]
impl Middleware for Floor {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> Result<Response> {
        let is_safe = request.method().is_safe();
        let key = (self.with_all && !is_safe).then(Key::random);
        if self.with_all {
            extensions.insert(Mark {
                url: SmallVec::from_slice(request.url().as_str().as_bytes()),
            });
            extensions.insert(Deadline::after(Duration::from_secs(5)));
        }
        extensions.insert(Attempt {
            number: 1,
            limit: None,
        });
        // What is sent is gone, so that there must be a copy before it is known whether one is needed.
        let mut copy = request.try_clone().expect("bytes");
        if let Some(key) = &key {
            extensions.insert(key.clone());
            let name = HeaderName::from_static("idempotency-key");
            copy.headers_mut().insert(name, key.0.clone());
        }
        if let (false, Some(body)) = (is_safe, copy.body_mut().take()) {
            let evidence = Arc::new(AtomicBool::new(false));
            let tracked = Tracked {
                body,
                evidence: Some(evidence),
            };
            *copy.body_mut() = Some(Body::wrap(tracked));
        }
        let answer = next.run(copy, extensions).await?;
        let mut answer = guard(answer);
        if let Some(key) = key {
            answer.extensions_mut().insert(key);
        }
        Ok(answer)
    }
}

/// Where a body breaks off, or when the deadline comes, its reader is told. A `Response` has no place for
/// that, and is taken apart and put together again.
fn guard(answer: Response) -> Response {
    let url = answer.url().clone();
    let (mut parts, body) = http::Response::<Body>::from(answer).into_parts();
    let mut carrier = http::Response::builder();
    if let Some(extensions) = carrier.extensions_mut() {
        std::mem::swap(extensions, &mut parts.extensions);
    }
    let carrier = carrier.url(url).body(()).expect("valid");
    parts.extensions = carrier.into_parts().0.extensions;
    let guarded = Body::wrap(Tracked {
        body,
        evidence: None,
    });
    Response::from(http::Response::from_parts(parts, guarded))
}

/// A body that sees itself read.
struct Tracked {
    body: Body,
    evidence: Option<Arc<AtomicBool>>,
}

impl http_body::Body for Tracked {
    type Data = Bytes;
    type Error = reqwest::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, reqwest::Error>>> {
        if let Some(evidence) = &self.evidence {
            evidence.store(true, Ordering::Relaxed);
        }
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
