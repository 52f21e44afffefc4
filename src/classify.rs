//! From what an attempt returned to what it means: verdict, certainty, and the server's wishes.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::SystemTime;

use http::{HeaderMap, HeaderName, StatusCode};
use reqwest_middleware::Error;

use crate::error::{BodyNotMade, RetryErrorExt};
use crate::policy::{Certainty, Health, Outcome, ReplayClass, StopReason, Verdict};
use crate::redirect::Redirected;
use crate::report::Failure;
use crate::retry_after::requested_wait;
use crate::watch::Sent;

/// What a status means, in the eyes of a [`classify`](crate::RetryMiddlewareBuilder::classify) hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StatusClass {
    /// Hand the answer on: repeating the request would not change it.
    Final,
    /// A repeat may end differently, if the operation may be repeated at all.
    Retryable,
    /// The same, and the server has done no work for this request.
    RefusedBeforeWork,
}

type Hook = dyn Fn(StatusCode, &HeaderMap) -> Option<StatusClass> + Send + Sync;

/// Statuses that say "not now" about the request itself: RFC 9110 (408, 502, 503, 504), RFC 8470
/// (425), RFC 6585 (429). Other 4xx and 5xx say that the answer will not change.
const RETRYABLE: [StatusCode; 6] = [
    StatusCode::REQUEST_TIMEOUT,
    StatusCode::TOO_EARLY,
    StatusCode::TOO_MANY_REQUESTS,
    StatusCode::BAD_GATEWAY,
    StatusCode::SERVICE_UNAVAILABLE,
    StatusCode::GATEWAY_TIMEOUT,
];

/// How answers are read.
#[derive(Clone)]
pub(crate) struct Rules {
    pub(crate) retryable: Vec<StatusCode>,
    pub(crate) refused_before_work: Vec<StatusCode>,
    pub(crate) hook: Option<Arc<Hook>>,
    pub(crate) wait_for_conflict: bool,
    pub(crate) retry_after_ms: Vec<HeaderName>,
    pub(crate) veto: Option<HeaderName>,
    pub(crate) no_retry: Vec<HeaderName>,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            retryable: RETRYABLE.to_vec(),
            refused_before_work: Vec::new(),
            hook: None,
            wait_for_conflict: false,
            retry_after_ms: Vec::new(),
            veto: None,
            no_retry: Vec::new(),
        }
    }
}

impl fmt::Debug for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rules")
            .field("retryable", &self.retryable)
            .field("refused_before_work", &self.refused_before_work)
            .field("wait_for_conflict", &self.wait_for_conflict)
            .field("retry_after_ms", &self.retry_after_ms)
            .field("veto", &self.veto)
            .field("no_retry", &self.no_retry)
            .finish_non_exhaustive()
    }
}

/// What the result is judged by, besides itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Circumstances {
    pub(crate) replay: ReplayClass,
    /// An attempt before this one may have been carried out.
    pub(crate) maybe_applied: bool,
    pub(crate) redirected: Redirected,
    /// The answer, or the error, comes from another host than the request went to.
    pub(crate) left_host: bool,
    pub(crate) sent: Sent,
}

impl Rules {
    /// Reads a response head.
    pub(crate) fn answer(
        &self,
        status: StatusCode,
        headers: &HeaderMap,
        wall: impl FnOnce() -> SystemTime,
        on: Circumstances,
    ) -> Outcome {
        let class = self.class(status, headers, on);
        let wish = self.veto.as_ref().and_then(|name| headers.get(name));
        let permits = wish.is_some_and(|value| value == "true") && !is_success(status);
        let retryable = permits || class.is_some_and(|class| class != StatusClass::Final);
        let verdict = match class {
            _ if retryable => Verdict::Retryable,
            None => Verdict::Done,
            Some(_) => Verdict::Final,
        };
        let retry_after = retryable
            .then(|| requested_wait(headers, &self.retry_after_ms, wall))
            .flatten();
        Outcome {
            verdict,
            certainty: answer_certainty(status, class, on),
            success: status.is_success() && is_to_our_request(on),
            retry_after,
            pushes_back: is_for_everybody(status) && !on.left_host,
            veto: wish.is_some_and(|value| value == "false") || self.forbids_retry(headers),
            retried_below: false,
            may_be_doubled_below: false,
            health: match verdict {
                _ if on.left_host => Health::NotShown,
                Verdict::Retryable => Health::Bad,
                _ if status.is_server_error() => Health::Bad,
                Verdict::Final => Health::NotShown,
                Verdict::Done => Health::Good,
            },
        }
    }

    /// A layer has made an error of an answer: what that would have meant, but for its headers.
    pub(crate) fn answer_as_error(
        &self,
        outcome: &mut Outcome,
        status: StatusCode,
        on: Circumstances,
    ) {
        let nothing = HeaderMap::new();
        let read = self.answer(status, &nothing, || SystemTime::UNIX_EPOCH, on);
        outcome.health = read.health;
        outcome.verdict = match read.verdict {
            Verdict::Retryable => Verdict::Retryable,
            Verdict::Done | Verdict::Final => Verdict::Final,
        };
    }

    /// Any value but "no" is a "do not retry".
    fn forbids_retry(&self, headers: &HeaderMap) -> bool {
        let mut signals = self.no_retry.iter().filter_map(|name| headers.get(name));
        signals.any(|value| value != "false" && value != "0")
    }

    /// `None`: an answer like any other, not a failure.
    fn class(
        &self,
        status: StatusCode,
        headers: &HeaderMap,
        on: Circumstances,
    ) -> Option<StatusClass> {
        if let Some(class) = self.hook.as_ref().and_then(|hook| hook(status, headers)) {
            return Some(class).filter(|&class| class != StatusClass::Final || !is_success(status));
        }
        if is_success(status) {
            None
        } else if self.refused_before_work.contains(&status) {
            Some(StatusClass::RefusedBeforeWork)
        } else if self.retryable.contains(&status) || self.is_own_conflict(status, on) {
            Some(StatusClass::Retryable)
        } else {
            Some(StatusClass::Final)
        }
    }

    /// "The first request with this key is still running": the first one being ours, time is all
    /// that is needed (draft-ietf-httpapi-idempotency-key-header §2.7).
    fn is_own_conflict(&self, status: StatusCode, on: Circumstances) -> bool {
        self.wait_for_conflict
            && on.maybe_applied
            && on.replay == ReplayClass::Keyed
            && matches!(status, StatusCode::CONFLICT | StatusCode::LOCKED)
    }
}

/// Whether an operation that was answered so counts as well answered for the retry budget.
pub(crate) fn earns(status: StatusCode, outcome: &Outcome) -> bool {
    outcome.verdict != Verdict::Retryable && !status.is_server_error()
}

/// What a server answers so is about its load, not about the request.
fn is_for_everybody(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
    )
}

/// 1xx to 3xx: nothing here that a retry would be for.
fn is_success(status: StatusCode) -> bool {
    status.as_u16() < 400
}

/// Whether the answer is to the request as it was meant, so that it speaks for what came of it.
fn is_to_our_request(on: Circumstances) -> bool {
    match on.redirected {
        Redirected::No | Redirected::Unknown | Redirected::Kept => true,
        Redirected::SeeOther | Redirected::Changed => on.replay == ReplayClass::Safe,
    }
}

fn answer_certainty(
    status: StatusCode,
    class: Option<StatusClass>,
    on: Circumstances,
) -> Certainty {
    let refused = status == StatusCode::TOO_EARLY || class == Some(StatusClass::RefusedBeforeWork);
    match (status, on.redirected) {
        _ if on.replay == ReplayClass::Safe => Certainty::Answered,
        (_, Redirected::Changed) => Certainty::Unknown,
        (_, Redirected::SeeOther) if status.is_success() => Certainty::Answered,
        (_, Redirected::SeeOther) => Certainty::Unknown,
        // What would let a request be repeated must be beyond doubt.
        (_, Redirected::Unknown) if refused => Certainty::Unknown,
        _ if refused => Certainty::NotProcessed,
        _ if status.is_server_error() => Certainty::Unknown,
        // 301 and 302 may follow a commit as well as stand in place of one.
        (
            StatusCode::REQUEST_TIMEOUT
            | StatusCode::CONFLICT
            | StatusCode::MOVED_PERMANENTLY
            | StatusCode::FOUND,
            _,
        ) => Certainty::Unknown,
        // Of a key: its first request, which may be an earlier operation's of ours, is still running.
        (StatusCode::LOCKED, _) if on.replay == ReplayClass::Keyed => Certainty::Unknown,
        _ => Certainty::Answered,
    }
}

/// Reads the end of an attempt at its own time limit.
pub(crate) fn timeout(on: Circumstances) -> (Outcome, Failure) {
    let outcome = failed(Verdict::Retryable, abandoned(on.sent), Health::Bad);
    (outcome, Failure::Timeout)
}

/// What is known of an attempt that was abandoned at this moment.
pub(crate) fn abandoned(sent: Sent) -> Certainty {
    match sent {
        Sent::No => Certainty::NotSent,
        Sent::Maybe | Sent::Untracked => Certainty::Unknown,
    }
}

/// Reads the error that an attempt ended with.
///
/// Send evidence beats the class of the error: what the body has seen happened to this request,
/// while an error may be about another hop.
pub(crate) fn error(error: &Error, is_https: bool, on: Circumstances) -> (Outcome, Failure) {
    let Error::Reqwest(error) = error else {
        return layer_error(error, on);
    };
    let failure = failure(error);
    let certainty = match on.sent {
        Sent::No if never_left(error) || error.is_timeout() => Certainty::NotSent,
        // Only a request that was sent can fail so: another body than ours was.
        Sent::No => Certainty::Unknown,
        _ if !is_about_our_request(on) => Certainty::Unknown,
        _ if is_refused_stream(error) => Certainty::NotProcessed,
        Sent::Untracked if never_left(error) => Certainty::NotSent,
        Sent::Maybe | Sent::Untracked => Certainty::Unknown,
    };
    let (verdict, health) = if is_permanent(error, is_https) {
        (Verdict::Final, Health::NotShown)
    } else if on.left_host || is_canceled(error) || is_local(error) {
        (Verdict::Retryable, Health::NotShown)
    } else {
        (Verdict::Retryable, Health::Bad)
    };
    (failed(verdict, certainty, health), failure)
}

/// Reads the error of a layer below. A layer of this crate says more than any other: what is certain,
/// and whether it has left the retries to us.
fn layer_error(error: &Error, on: Circumstances) -> (Outcome, Failure) {
    let certainty = abandoned(on.sent);
    let outcome = failed(Verdict::Final, certainty, Health::NotShown);
    let is_unmade = matches!(error, Error::Middleware(error) if error.is::<BodyNotMade>());
    match error.retry_error() {
        _ if is_unmade => (outcome, Failure::Request),
        Some(below) if below.stop() == StopReason::NestedLayer || below.report().is_spent() => {
            let mut outcome = Outcome {
                verdict: Verdict::Retryable,
                certainty: certainty.max(below.certainty().min(Certainty::Unknown)),
                ..outcome
            };
            let report = below.report();
            outcome.heed(
                report.is_spent(),
                report.may_be_doubled(),
                report.retry_after(),
            );
            (outcome, Failure::Layer)
        }
        _ => (outcome, Failure::Layer),
    }
}

fn failed(verdict: Verdict, certainty: Certainty, health: Health) -> Outcome {
    Outcome {
        verdict,
        certainty,
        success: false,
        retry_after: None,
        pushes_back: false,
        veto: false,
        retried_below: false,
        may_be_doubled_below: false,
        health,
    }
}

/// Whether the error can only be about the request as we sent it. For a method without effect it
/// does not matter which of its hops failed, unless one is known to have been answered.
fn is_about_our_request(on: Circumstances) -> bool {
    match on.redirected {
        Redirected::No => true,
        Redirected::Unknown => on.replay == ReplayClass::Safe,
        Redirected::Kept | Redirected::SeeOther | Redirected::Changed => false,
    }
}

/// `is_connect` is tested before `is_timeout`: a connect timeout is both.
fn failure(error: &reqwest::Error) -> Failure {
    if error.is_status() {
        // The HTTP client never fails so: a layer has made an error of an answer.
        Failure::Layer
    } else if is_refused_stream(error) {
        Failure::Refused
    } else if error.is_connect() {
        Failure::Connect
    } else if error.is_timeout() {
        Failure::Timeout
    } else if error.is_redirect() {
        Failure::Redirect
    } else if error.is_builder() || error.is_body() {
        Failure::Request
    } else {
        Failure::Connection
    }
}

/// Errors that arise before the connection is handed the request.
fn never_left(error: &reqwest::Error) -> bool {
    error.is_connect() || error.is_builder() || is_canceled(error)
}

/// Failures that another try would meet again. They may well be "never sent": that says that a
/// repeat is safe, not that it is worth anything.
fn is_permanent(error: &reqwest::Error, is_https: bool) -> bool {
    error.is_builder()
        || error.is_redirect()
        || error.is_body()
        || error.is_decode()
        || error.is_upgrade()
        || (error.is_connect() && is_tls_failure(error, is_https))
}

/// A certificate or protocol that the TLS library refused. rustls puts `InvalidData` at the bottom.
/// native-tls, and "no TLS compiled in", are not about I/O at all, so there everything else that is
/// not has to be told apart. A peer that hangs up or stays silent is an I/O error of another kind.
fn is_tls_failure(error: &reqwest::Error, is_https: bool) -> bool {
    if error.is_timeout() || error.is_dns() {
        return false;
    }
    let deepest = causes(error)
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .last();
    match deepest {
        Some(error) => error.kind() == io::ErrorKind::InvalidData,
        None => is_https && !causes(error).any(may_pass),
    }
}

/// Failures to connect that another try may not meet: of a proxy, or of another request's attempt to
/// make the connection that this one waited for. hyper-util keeps their types to itself.
fn may_pass(cause: &(dyn StdError + 'static)) -> bool {
    const TEXTS: [&str; 3] = ["tunnel error", "SOCKS error", "request was canceled"];
    let text = cause.to_string();
    TEXTS.iter().any(|known| text.starts_with(known))
}

/// hyper gave the request back before it was written to a connection.
fn is_canceled(error: &reqwest::Error) -> bool {
    causes(error)
        .filter_map(|cause| cause.downcast_ref::<hyper::Error>())
        .any(hyper::Error::is_canceled)
}

/// This machine, not the service, had nothing left to connect with, or no way to reach anybody.
fn is_local(error: &reqwest::Error) -> bool {
    use io::ErrorKind::{
        AddrInUse, AddrNotAvailable, NetworkDown, NetworkUnreachable, OutOfMemory, PermissionDenied,
    };
    causes(error)
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|error| {
            matches!(
                error.kind(),
                AddrInUse
                    | AddrNotAvailable
                    | NetworkDown
                    | NetworkUnreachable
                    | OutOfMemory
                    | PermissionDenied
            ) || error.raw_os_error().is_some_and(is_out_of_files)
        })
}

/// `EMFILE` and `ENFILE`, which have no [`io::ErrorKind`] of their own.
#[cfg(unix)]
fn is_out_of_files(code: i32) -> bool {
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    matches!(code, ENFILE | EMFILE)
}

#[cfg(not(unix))]
fn is_out_of_files(_: i32) -> bool {
    false
}

/// RFC 9113 §8.7: the two ways in which a server guarantees that it has not processed a request.
/// hyper reports both only for a stream that is beyond doubt.
#[cfg(feature = "http2")]
fn is_refused_stream(error: &reqwest::Error) -> bool {
    causes(error)
        .filter_map(|cause| cause.downcast_ref::<h2::Error>())
        .any(|error| {
            let reset = error.is_reset() && error.reason() == Some(h2::Reason::REFUSED_STREAM);
            let away = error.is_go_away() && error.reason() == Some(h2::Reason::NO_ERROR);
            error.is_remote() && (reset || away)
        })
}

#[cfg(not(feature = "http2"))]
fn is_refused_stream(_: &reqwest::Error) -> bool {
    false
}

/// What is below an error, outermost first. An `io::Error` that carries another error leaves just
/// that one out of its `source()`.
fn causes(error: &reqwest::Error) -> impl Iterator<Item = &(dyn StdError + 'static)> {
    std::iter::successors(error.source(), |&cause| {
        let carried = cause.downcast_ref().and_then(io::Error::get_ref);
        carried.map_or_else(|| cause.source(), |inner| Some(inner as _))
    })
}
