//! What an operation leaves in the request's extensions, for whoever runs with the same map again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Instant;

use bytes::Bytes;
use http::{Extensions, Method};
use reqwest::Url;
use smallvec::SmallVec;

use crate::body_factory::BodyFactory;
use crate::policy::Certainty;

/// The mark of an operation in a map of extensions.
///
/// Once it has ended, or was dropped, the same map with the same request continues it: an outer layer's
/// retry has the same key, the same deadline and what is already known. While the operation runs, a
/// second layer of this crate that finds the mark lets requests with its method and URL pass.
///
/// An operation that asks for no effect, has no key, and no deadline that counts from its own start,
/// leaves none, unless it continues one that has: there is nothing to continue.
#[derive(Debug)]
pub(crate) struct Continuation {
    pub(crate) request: Identity,
    pub(crate) first_sent: Instant,
    /// Whether the map holds what was made for this request alone: a generated key, a deadline
    /// that was resolved.
    pub(crate) is_bound: bool,
    pub(crate) state: State,
}

/// The request that an operation is for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Identity {
    pub(crate) method: Method,
    /// Its text, kept here unless it is a long one.
    url: SmallVec<[u8; SHORT_URL]>,
    pub(crate) body: BodyIdentity,
}

/// Bytes of a URL that need no memory of their own: enough for many URLs of an API.
const SHORT_URL: usize = 96;

impl Identity {
    pub(crate) fn of(method: &Method, url: &Url, body: BodyIdentity) -> Self {
        Self {
            method: method.clone(),
            url: SmallVec::from_slice(url.as_str().as_bytes()),
            body,
        }
    }

    /// Whether it is for this, whatever the body.
    pub(crate) fn is_to(&self, method: &Method, url: &Url) -> bool {
        self.method == *method && *self.url == *url.as_str().as_bytes()
    }
}

/// A stream cannot be compared, so no two are the same.
#[derive(Clone, Debug)]
pub(crate) enum BodyIdentity {
    Bytes(Bytes),
    Factory(BodyFactory),
    Stream,
}

impl PartialEq for BodyIdentity {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Bytes(one), Self::Bytes(two)) => one == two,
            (Self::Factory(one), Self::Factory(two)) => one == two,
            _ => false,
        }
    }
}

/// The part of the mark that changes while the operation runs, or when it is dropped.
#[derive(Debug, Default)]
pub(crate) struct State {
    running: AtomicBool,
    certainty: AtomicU8,
}

impl State {
    pub(crate) fn running() -> Self {
        Self {
            running: AtomicBool::new(true),
            certainty: AtomicU8::new(0),
        }
    }

    pub(crate) fn end(&self, certainty: Certainty) {
        self.certainty.store(certainty as u8, Ordering::Relaxed);
        self.running.store(false, Ordering::Release);
    }

    fn certainty(&self) -> Certainty {
        const ALL: [Certainty; 4] = [
            Certainty::NotSent,
            Certainty::NotProcessed,
            Certainty::Unknown,
            Certainty::Answered,
        ];
        let stored = usize::from(self.certainty.load(Ordering::Relaxed));
        ALL.get(stored).copied().unwrap_or(Certainty::Unknown)
    }
}

impl Continuation {
    pub(crate) fn in_map(extensions: &Extensions) -> Option<&Self> {
        extensions.get::<Arc<Self>>().map(Arc::as_ref)
    }

    pub(crate) fn is_running(&self) -> bool {
        self.state.running.load(Ordering::Acquire)
    }

    /// What the earlier run left open.
    pub(crate) fn certainty(&self) -> Certainty {
        self.state.certainty()
    }
}
