//! The final response's body: it ends at the deadline, and says what it means when it breaks off.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http::StatusCode;
use http_body::{Body, Frame, SizeHint};
use reqwest::{Response, ResponseBuilderExt, Url};

use crate::clock::Alarm;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A response without its body.
#[derive(Debug)]
pub(crate) struct Head {
    url: Url,
    parts: http::response::Parts,
}

impl Head {
    pub(crate) fn split(response: Response) -> (Self, reqwest::Body) {
        let url = response.url().clone();
        let (parts, body) = http::Response::<reqwest::Body>::from(response).into_parts();
        (Self { url, parts }, body)
    }

    pub(crate) fn parts(&self) -> &http::response::Parts {
        &self.parts
    }

    /// Status, headers, URL and extensions stay as they are.
    pub(crate) fn with(self, body: reqwest::Body) -> Response {
        let Self { url, mut parts } = self;
        // reqwest keeps a response's URL in a private extension that only its own builder can set. The
        // builder is given the map that there is, since a new one would be dearer.
        let mut carrier = http::Response::builder();
        if let Some(extensions) = carrier.extensions_mut() {
            std::mem::swap(extensions, &mut parts.extensions);
        }
        if let Ok(carrier) = carrier.url(url).body(()) {
            parts.extensions = carrier.into_parts().0.extensions;
        }
        Response::from(http::Response::from_parts(parts, body))
    }
}

/// Hands `response` on with a body that fails with [`IncompleteBody`] where it breaks off, and at
/// `deadline`. Size hint and trailers stay as they are.
pub(crate) fn guard(response: Response, deadline: Option<Instant>) -> Response {
    if response.content_length() == Some(0) {
        return response;
    }
    let (head, body) = Head::split(response);
    let guarded = GuardedBody {
        inner: body,
        status: head.parts.status,
        alarm: deadline.map(Alarm::at),
        ended: false,
    };
    head.with(reqwest::Body::wrap(guarded))
}

/// The server has answered, and the body of its answer broke off, or was not there by the deadline.
///
/// In the chain of the error that reading the body gives. The answer itself was had: its status says
/// what became of the operation, and nothing was repeated for it, unless
/// [`buffer_response`](crate::RetryMiddlewareBuilder::buffer_response) asked for that.
#[derive(Debug, thiserror::Error)]
#[error("answered with status {}, body incomplete", status.as_u16())]
pub struct IncompleteBody {
    status: StatusCode,
    source: BoxError,
}

impl IncompleteBody {
    pub(crate) fn new(status: StatusCode, source: impl Into<BoxError>) -> Self {
        let source = source.into();
        Self { status, source }
    }

    /// Not there in time.
    pub(crate) fn late(status: StatusCode) -> Self {
        let late = "the body was not there in time";
        Self::new(status, io::Error::new(io::ErrorKind::TimedOut, late))
    }

    pub(crate) fn is_timeout(&self) -> bool {
        let io = self.source.downcast_ref::<io::Error>();
        let below = self.source.downcast_ref::<reqwest::Error>();
        io.is_some_and(|error| error.kind() == io::ErrorKind::TimedOut)
            || below.is_some_and(reqwest::Error::is_timeout)
    }

    /// The status of the answer.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }
}

#[derive(Debug)]
struct GuardedBody {
    inner: reqwest::Body,
    status: StatusCode,
    alarm: Option<Alarm>,
    ended: bool,
}

impl GuardedBody {
    /// A read that must wait is woken at the deadline; bytes that come after it come too late.
    fn poll_in_time(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, IncompleteBody>>> {
        let status = self.status;
        let late = || Poll::Ready(Some(Err(IncompleteBody::late(status))));
        let is_past = |alarm: &Option<Alarm>| alarm.as_ref().is_some_and(Alarm::is_past);
        match Pin::new(&mut self.inner).poll_frame(context) {
            Poll::Ready(Some(Ok(_))) if is_past(&self.alarm) => late(),
            Poll::Ready(frame) => {
                let incomplete = |error| IncompleteBody::new(status, error);
                Poll::Ready(frame.map(|frame| frame.map_err(incomplete)))
            }
            Poll::Pending => match self.alarm.as_mut().map(|alarm| alarm.poll(context)) {
                Some(Poll::Ready(())) => late(),
                _ => Poll::Pending,
            },
        }
    }
}

impl Body for GuardedBody {
    type Data = Bytes;
    type Error = IncompleteBody;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, IncompleteBody>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let frame = self.poll_in_time(context);
        self.ended = matches!(frame, Poll::Ready(None | Some(Err(_))));
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.ended || self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
