//! Send tracking: did the request leave, as seen by its body?

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

/// What one attempt's body has seen.
///
/// The connection asks a body `is_end_stream` when it writes the request's head, and `poll_frame`
/// for what follows; both set `taken`. Neither happens before there is a connection. So a body that
/// is gone, and was not taken, was not sent. One that is still held somewhere may yet be: between
/// hyper's taking a request out of its queue and asking the body there is a moment in which the
/// caller can give up.
///
/// The proof holds for this body only, and a layer below may send another one. reqwest asks every
/// body for its `size_hint` before anything else, which sets `handed_over`; what
/// [`Watch`](crate::watch::Watch) adds to that is whether the body was given up early.
#[derive(Debug, Default)]
pub(crate) struct Evidence {
    taken: AtomicBool,
    handed_over: AtomicBool,
    held: AtomicBool,
}

impl Evidence {
    /// Whether nobody holds the body any more, or yet, and nobody has read it.
    pub(crate) fn is_gone_unread(&self) -> bool {
        !self.held.load(Ordering::Acquire) && !self.is_taken()
    }

    /// Whether it got as far as the HTTP client, which asks every body for its size first of all.
    pub(crate) fn is_handed_over(&self) -> bool {
        self.handed_over.load(Ordering::Acquire)
    }

    pub(crate) fn is_taken(&self) -> bool {
        self.taken.load(Ordering::Acquire)
    }
}

/// A request body that notes when it is taken over.
#[derive(Debug)]
pub(crate) struct TrackedBody {
    inner: reqwest::Body,
    evidence: Arc<Evidence>,
}

impl TrackedBody {
    pub(crate) fn wrap(inner: reqwest::Body, evidence: Arc<Evidence>) -> reqwest::Body {
        evidence.held.store(true, Ordering::Release);
        reqwest::Body::wrap(Self { inner, evidence })
    }

    fn take(&self) {
        self.evidence.taken.store(true, Ordering::Release);
    }
}

impl Body for TrackedBody {
    type Data = Bytes;
    type Error = reqwest::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, reqwest::Error>>> {
        self.take();
        Pin::new(&mut self.inner).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.take();
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.evidence.handed_over.store(true, Ordering::Release);
        self.inner.size_hint()
    }
}

impl Drop for TrackedBody {
    fn drop(&mut self) {
        self.evidence.held.store(false, Ordering::Release);
    }
}
