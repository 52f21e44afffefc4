//! The final response's body, which ends at the deadline.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use reqwest::{Response, ResponseBuilderExt};

use crate::clock::Alarm;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Hands `response` on with a body that fails with [`io::ErrorKind::TimedOut`] once `deadline` has
/// come. Status, headers, URL, extensions, size hint and trailers stay as they are.
pub(crate) fn end_at(response: Response, deadline: Instant) -> Response {
    let url = response.url().clone();
    let (mut parts, body) = http::Response::<reqwest::Body>::from(response).into_parts();
    let body = DeadlineBody {
        inner: body,
        alarm: Alarm::at(deadline),
        ended: false,
    };
    // reqwest keeps a response's URL in a private extension that only its own builder can set.
    if let Ok(carrier) = http::Response::builder().url(url).body(()) {
        parts.extensions.extend(carrier.into_parts().0.extensions);
    }
    Response::from(http::Response::from_parts(parts, reqwest::Body::wrap(body)))
}

#[derive(Debug)]
struct DeadlineBody {
    inner: reqwest::Body,
    alarm: Alarm,
    ended: bool,
}

impl Body for DeadlineBody {
    type Data = Bytes;
    type Error = BoxError;

    /// A read that must wait is woken at the deadline; bytes that come after it come too late.
    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        match Pin::new(&mut self.inner).poll_frame(context) {
            Poll::Ready(Some(Ok(_))) if self.alarm.is_past() => {}
            Poll::Ready(frame) => {
                return Poll::Ready(frame.map(|frame| frame.map_err(BoxError::from)));
            }
            Poll::Pending => ready!(self.alarm.poll(context)),
        }
        self.ended = true;
        let late = io::Error::new(
            io::ErrorKind::TimedOut,
            "the deadline came before the end of the response body",
        );
        Poll::Ready(Some(Err(late.into())))
    }

    fn is_end_stream(&self) -> bool {
        self.ended || self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
