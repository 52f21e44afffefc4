//! One attempt: its request, its limits, and what lower layers may know of it.

use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode, header};
use http_body::Body as _;
use reqwest::{Body, Request, Response, Url};

use crate::body_factory::{BodyFactory, FreshBody};
use crate::continuation::{BodyIdentity, Identity};
use crate::frames::Frames;
use crate::redirect::is_same_url;
use crate::tracking::{Evidence, TrackedBody};

/// The attempt that is being made: in the extensions of each request, for layers below.
///
/// ```
/// use http::Extensions;
/// use reqwest_idempotent_retry::Attempt;
///
/// // in a middleware further down:
/// fn is_a_repeat(extensions: &Extensions) -> bool {
///     extensions.get::<Attempt>().is_some_and(|attempt| attempt.number() > 1)
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempt {
    pub(crate) number: u32,
    pub(crate) max_attempts: u32,
    pub(crate) limit: Option<Duration>,
}

impl Attempt {
    /// 1 for the first.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The most attempts that the operation may have.
    #[must_use]
    pub fn max_attempts(&self) -> u32 {
        self.max_attempts
    }

    /// The longest that this attempt may take to its response head. `None`: no limit.
    #[must_use]
    pub fn limit(&self) -> Option<Duration> {
        self.limit
    }
}

/// The request that all attempts are copies of. Its body is kept apart, as bytes that are shared.
#[derive(Debug)]
pub(crate) struct Template {
    head: TemplateHead,
    body: TemplateBody,
}

#[derive(Debug)]
enum TemplateHead {
    Here(Box<Request>),
    /// The last permitted attempt has taken it, to this place.
    GoneTo(Box<Url>),
}

#[derive(Debug)]
enum TemplateBody {
    Absent,
    Bytes(Bytes),
    Factory(BodyFactory),
    /// Sent with the first attempt, and gone.
    Stream(Option<Body>),
}

impl Template {
    pub(crate) fn take(mut request: Box<Request>, factory: Option<BodyFactory>) -> Self {
        let body = match (factory, request.body_mut().take()) {
            (Some(factory), _) => TemplateBody::Factory(factory),
            (None, None) => TemplateBody::Absent,
            (None, Some(body)) if body.as_bytes().is_some() => TemplateBody::Bytes(bytes(body)),
            (None, Some(body)) => TemplateBody::Stream(Some(body)),
        };
        Self {
            head: TemplateHead::Here(request),
            body,
        }
    }

    /// The stream, to be read before the first attempt.
    pub(crate) fn take_stream(&mut self) -> Option<Body> {
        match &mut self.body {
            TemplateBody::Stream(stream) => stream.take(),
            _ => None,
        }
    }

    /// The stream has been read: bytes that can be sent again if that was all, a stream otherwise.
    pub(crate) fn put_back(&mut self, frames: Frames) {
        self.body = match frames.into_bytes() {
            Ok(bytes) => TemplateBody::Bytes(bytes),
            Err(frames) => TemplateBody::Stream(Some(Body::wrap(frames))),
        };
    }

    /// What the request is recognised by.
    pub(crate) fn identity(&self) -> Option<Identity> {
        let request = self.head()?;
        Some(Identity::of(
            request.method(),
            request.url(),
            self.body_identity(),
        ))
    }

    pub(crate) fn is(&self, identity: &Identity) -> bool {
        self.head()
            .is_some_and(|head| identity.is_to(head.method(), head.url()))
            && self.body_identity() == identity.body
    }

    fn body_identity(&self) -> BodyIdentity {
        match &self.body {
            TemplateBody::Absent => BodyIdentity::Bytes(Bytes::new()),
            TemplateBody::Bytes(bytes) => BodyIdentity::Bytes(bytes.clone()),
            TemplateBody::Factory(factory) => BodyIdentity::Factory(factory.clone()),
            TemplateBody::Stream(_) => BodyIdentity::Stream,
        }
    }

    /// Where the request goes.
    pub(crate) fn url(&self) -> &Url {
        match &self.head {
            TemplateHead::Here(request) => request.url(),
            TemplateHead::GoneTo(url) => url,
        }
    }

    /// The request without its body, unless it is gone.
    pub(crate) fn head(&self) -> Option<&Request> {
        match &self.head {
            TemplateHead::Here(request) => Some(request),
            TemplateHead::GoneTo(_) => None,
        }
    }

    pub(crate) fn headers_mut(&mut self) -> Option<&mut HeaderMap> {
        match &mut self.head {
            TemplateHead::Here(request) => Some(request.headers_mut()),
            TemplateHead::GoneTo(_) => None,
        }
    }

    pub(crate) fn factory(&self) -> Option<&BodyFactory> {
        match &self.body {
            TemplateBody::Factory(factory) => Some(factory),
            _ => None,
        }
    }

    pub(crate) fn is_replayable(&self) -> bool {
        !matches!(self.body, TemplateBody::Stream(_))
    }

    /// The request of one attempt; `None` only where a stream, or the template itself, is used up.
    ///
    /// `time_left` clips the request's own timeout, which covers the body too. None is set where
    /// there was none: it would replace the client's.
    pub(crate) fn request(
        &mut self,
        is_last: bool,
        fresh: Option<FreshBody>,
        evidence: Option<&Arc<Evidence>>,
        time_left: Option<Duration>,
    ) -> Option<Request> {
        let is_last = is_last || !self.is_replayable();
        let fresh = fresh.map(|fresh| (fresh.body, fresh.content_type));
        let (body, content_type) = match (&mut self.body, fresh) {
            (_, Some((body, content_type))) => (Some(body), content_type),
            (TemplateBody::Absent | TemplateBody::Factory(_), None) => (None, None),
            (TemplateBody::Bytes(bytes), None) => (Some(Body::from(bytes.clone())), None),
            (TemplateBody::Stream(stream), None) => (Some(stream.take()?), None),
        };
        let may_be_sent_again = evidence.is_some() && matches!(self.body, TemplateBody::Bytes(_));
        let mut request = if is_last && !may_be_sent_again {
            let gone = TemplateHead::GoneTo(Box::new(self.url().clone()));
            match mem::replace(&mut self.head, gone) {
                TemplateHead::Here(request) => *request,
                TemplateHead::GoneTo(_) => return None,
            }
        } else {
            self.head()?.try_clone()?
        };
        if let Some(content_type) = content_type {
            request
                .headers_mut()
                .insert(header::CONTENT_TYPE, content_type);
        }
        if let (Some(left), Some(own)) = (time_left, request.timeout().copied()) {
            *request.timeout_mut() = Some(own.min(left));
        }
        *request.body_mut() = match evidence {
            None => body,
            Some(evidence) => Some(TrackedBody::wrap(
                body.unwrap_or_default(),
                Arc::clone(evidence),
            )),
        };
        Some(request)
    }
}

/// The bytes of a buffered body, without a copy: it yields them in one frame.
fn bytes(mut body: Body) -> Bytes {
    let mut context = Context::from_waker(Waker::noop());
    match Pin::new(&mut body).poll_frame(&mut context) {
        Poll::Ready(Some(Ok(frame))) => frame.into_data().unwrap_or_default(),
        _ => Bytes::new(),
    }
}

/// Where this answer to a tracked attempt would have been followed to, had reqwest been able to
/// repeat the body: 307 and 308, and 301 and 302 of any method but POST.
///
/// 307 and 308 say that the request is to be made elsewhere. 301 and 302 may also follow a commit,
/// so an operation that is unsafe to repeat is not sent again for them.
pub(crate) fn wants_the_body_at(
    answer: &Response,
    url: &Url,
    identity: &Identity,
    is_unsafe: bool,
) -> Option<Url> {
    let keeps_method = match answer.status() {
        StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT => true,
        StatusCode::MOVED_PERMANENTLY | StatusCode::FOUND => {
            identity.method != Method::POST && !is_unsafe
        }
        _ => false,
    };
    let has_body = matches!(&identity.body, BodyIdentity::Bytes(bytes) if !bytes.is_empty());
    if !(keeps_method && has_body && is_same_url(answer.url(), url)) {
        return None;
    }
    let location = answer.headers().get(header::LOCATION)?.to_str().ok()?;
    url.join(location).ok()
}
