//! A body that has been read, in part or to its end, and is there to be read again.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};

/// The frames read so far, and what is still to come.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    read: VecDeque<Frame<Bytes>>,
    length: usize,
    rest: Option<reqwest::Body>,
}

impl Frames {
    pub(crate) fn push(&mut self, frame: Frame<Bytes>) {
        self.length += frame.data_ref().map_or(0, Bytes::len);
        self.read.push_back(frame);
    }

    /// Bytes read so far.
    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// More is to come: `rest` follows what has been read, each byte once.
    pub(crate) fn followed_by(mut self, rest: reqwest::Body) -> Self {
        self.rest = Some(rest);
        self
    }

    pub(crate) fn is_whole(&self) -> bool {
        self.rest.is_none()
    }

    /// All bytes in one piece, where nothing more is to come and there are no trailers.
    pub(crate) fn into_bytes(self) -> Result<Bytes, Self> {
        if !self.is_whole() || self.read.iter().any(Frame::is_trailers) {
            return Err(self);
        }
        let mut pieces = self
            .read
            .into_iter()
            .filter_map(|frame| frame.into_data().ok());
        let first = pieces.next().unwrap_or_default();
        let Some(second) = pieces.next() else {
            return Ok(first);
        };
        let mut all = BytesMut::with_capacity(self.length);
        [first, second]
            .into_iter()
            .chain(pieces)
            .for_each(|piece| all.extend_from_slice(&piece));
        Ok(all.freeze())
    }
}

impl Body for Frames {
    type Data = Bytes;
    type Error = reqwest::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, reqwest::Error>>> {
        if let Some(frame) = self.read.pop_front() {
            self.length -= frame.data_ref().map_or(0, Bytes::len);
            return Poll::Ready(Some(Ok(frame)));
        }
        match &mut self.rest {
            Some(rest) => Pin::new(rest).poll_frame(context),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.read.is_empty() && self.rest.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let read = self.length as u64;
        let rest = self
            .rest
            .as_ref()
            .map_or(SizeHint::with_exact(0), Body::size_hint);
        let mut hint = SizeHint::new();
        hint.set_lower(read + rest.lower());
        if let Some(upper) = rest.upper() {
            hint.set_upper(read + upper);
        }
        hint
    }
}
