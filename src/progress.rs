//! The account of a running operation, kept so that it is true at any moment, also when the future
//! is dropped.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::StatusCode;
use reqwest::Request;
use reqwest_middleware::Error;
use smallvec::SmallVec;
use tracing::Span;

use crate::clock;
use crate::continuation::Continuation;
use crate::error::{Cause, LastAnswer, RetryError};
use crate::invalid::InvalidInput;
use crate::load::Load;
use crate::nesting;
use crate::observe::Listeners;
use crate::operation::Operation;
use crate::policy::{Certainty, Outcome, ReplayClass, Stop, StopReason, Turned};
use crate::report::{Account, AttemptRecord, Failure, ReportHandle, RetryReport};
use crate::settings::Settings;
use crate::watch::Watch;

/// What has happened so far in one operation. Dropped before its end, it reports the abandonment.
#[derive(Debug)]
pub(crate) struct Progress {
    account: Account,
    handle: Option<ReportHandle>,
    continuation: Option<Arc<Continuation>>,
    load: Option<Arc<Load>>,
    listeners: Listeners,
    started: Instant,
    /// The attempt in the air, if any.
    flight: Option<Flight>,
    /// What the last failed attempt failed with.
    cause: Option<Box<Cause>>,
    /// The last answer that was given up for a retry.
    last_answer: Option<Box<LastAnswer>>,
    client_is_prepared: bool,
    /// The attempt that the operation was made in.
    around: Option<u64>,
    has_ended: bool,
}

/// An attempt in the air. Its record is the last of the account's, unfinished until it lands.
#[derive(Debug)]
struct Flight {
    watch: Watch,
    /// Its answer's status and what that proves, while the body is being read.
    head: Option<(StatusCode, Certainty)>,
}

impl Progress {
    pub(crate) fn begin(
        request: &Request,
        handle: Option<ReportHandle>,
        settings: &Settings,
        started: Instant,
    ) -> Self {
        if let Some(handle) = &handle {
            handle.begin(None);
        }
        let (method, url) = (request.method().clone(), request.url());
        Self {
            listeners: Listeners::of(settings, &method, url),
            account: Account {
                method,
                host: url.host_str().unwrap_or_default().to_owned(),
                key: None,
                stop: None,
                certainty: Certainty::NotSent,
                attempts: SmallVec::new(),
                elapsed: Duration::ZERO,
                retry_after: None,
                has_effect: true,
                repeats_alike: true,
                is_spent_below: false,
                may_be_doubled_below: false,
            },
            handle,
            continuation: None,
            load: None,
            started,
            flight: None,
            cause: None,
            last_answer: None,
            client_is_prepared: settings.client_is_prepared,
            around: nesting::attempt_around(),
            has_ended: false,
        }
    }

    /// The operation has been identified: from here on there is something to confirm it with.
    pub(crate) fn identified(&mut self, operation: &Operation, load: Option<Arc<Load>>) {
        self.load = load;
        let key = operation.key.as_ref();
        self.account.key = key.cloned();
        self.account.certainty = operation.call.certainty();
        self.account.has_effect = operation.call.replay != ReplayClass::Safe;
        self.account.repeats_alike = operation.call.repeats_alike;
        self.continuation = operation.continuation.clone();
        if let Some(handle) = &self.handle {
            handle.begin(key);
        }
    }

    /// An attempt starts. What its layers show of it is noted in the returned watch.
    pub(crate) fn attempt_starts(
        &mut self,
        number: u32,
        waited: Duration,
        limit: Option<Duration>,
        watch: Watch,
        now: Instant,
    ) -> &mut Watch {
        self.account.attempts.push(AttemptRecord {
            number,
            waited,
            started_at: now.saturating_duration_since(self.started),
            took: Duration::ZERO,
            limit,
            status: None,
            failure: None,
            certainty: Certainty::Unknown,
        });
        self.cause = None;
        let flight = Flight { watch, head: None };
        &mut self.flight.insert(flight).watch
    }

    /// The watch over the attempt in the air.
    pub(crate) fn watch(&self) -> Option<&Watch> {
        self.flight.as_ref().map(|flight| &flight.watch)
    }

    /// The attempt has been answered, and the body of the answer is being read.
    pub(crate) fn attempt_is_answered(&mut self, status: StatusCode, certainty: Certainty) {
        if let Some(flight) = &mut self.flight {
            flight.head = Some((status, certainty));
        }
    }

    /// The attempt has ended. `certainty` is the operation's.
    pub(crate) fn attempt_ends(
        &mut self,
        outcome: &Outcome,
        status: Option<StatusCode>,
        failure: Option<(Failure, Cause)>,
        certainty: Certainty,
        now: Instant,
    ) {
        self.account.retry_after = outcome.retry_after;
        self.account.is_spent_below = outcome.retried_below;
        self.account.may_be_doubled_below = outcome.may_be_doubled_below;
        self.account.certainty = certainty;
        let failure = failure.map(|(failure, cause)| {
            self.cause = Some(Box::new(cause));
            failure
        });
        self.land(status, failure, outcome.certainty, now);
    }

    fn land(
        &mut self,
        status: Option<StatusCode>,
        failure: Option<Failure>,
        certainty: Certainty,
        now: Instant,
    ) {
        let account = &mut self.account;
        let (Some(flight), Some(record)) = (self.flight.take(), account.attempts.last_mut()) else {
            return;
        };
        account.is_spent_below |= flight.watch.is_spent_below();
        account.may_be_doubled_below |= flight.watch.may_be_doubled_below();
        record.took = now
            .saturating_duration_since(self.started)
            .saturating_sub(record.started_at);
        record.status = status;
        record.failure = failure;
        record.certainty = certainty;
        self.listeners.attempt_ended(&self.account);
    }

    pub(crate) fn waits(&self, delay: Duration) {
        self.listeners.waiting(&self.account, delay);
    }

    /// What the server asked for has been waited out.
    pub(crate) fn wait_is_over(&mut self) {
        self.account.retry_after = None;
    }

    /// The operation's span.
    pub(crate) fn span(&self) -> Span {
        self.listeners.span()
    }

    /// The end of this operation has turned the breaker of its key.
    pub(crate) fn turned(&self, turned: Turned) {
        let key = self.load.as_ref().map_or("", |load| &load.key);
        self.listeners.breaker_turned(&self.account, key, turned);
    }

    /// An answer is given up for a retry.
    pub(crate) fn gives_up(&mut self, answer: LastAnswer) {
        self.last_answer = Some(Box::new(answer));
        self.cause = None;
    }

    /// The operation ends with an answer. The report is for its extensions; there is none after a
    /// first answer that needed no retry.
    pub(crate) fn answered(&mut self, stop: Option<Stop>, now: Instant) -> Option<RetryReport> {
        stop.into_iter().for_each(|stop| self.stops(stop));
        let is_plain = stop.is_none() && self.account.attempts.len() == 1;
        if is_plain && self.handle.is_none() {
            self.close(now);
            return None;
        }
        Some(self.end(now)).filter(|_| !is_plain)
    }

    /// The operation ends without one.
    pub(crate) fn stopped(&mut self, stop: impl Into<Stop>) -> Error {
        self.stops(stop.into());
        let report = self.end(clock::now());
        Error::middleware(RetryError::new(
            report,
            self.last_answer.take().map(|answer| *answer),
            self.cause.take().map(|cause| *cause),
        ))
    }

    fn stops(&mut self, stop: Stop) {
        self.account.stop = Some(stop.reason);
        self.account.retry_after = self.account.retry_after.max(stop.after);
    }

    /// Nothing was sent, since the input could not be used.
    pub(crate) fn refused(&mut self, error: InvalidInput) -> Error {
        self.cause = Some(Box::new(Cause::Invalid(error)));
        self.stopped(StopReason::InvalidInput)
    }

    /// Nothing was sent, since the request's body could not be read.
    pub(crate) fn unreadable(&mut self, error: reqwest::Error) -> Error {
        self.cause = Some(Box::new(Cause::Transport(error.without_url())));
        self.stopped(StopReason::NotRetryable)
    }

    /// The caller cancelled while an attempt was in the air.
    pub(crate) fn cancelled_in_flight(&mut self, now: Instant) -> Error {
        self.abandon_flight(now);
        self.stopped(StopReason::Cancelled)
    }

    fn abandon_flight(&mut self, now: Instant) {
        let Some(flight) = &self.flight else { return };
        let (status, certainty) = match flight.head {
            Some((status, certainty)) => (Some(status), certainty),
            None => (None, crate::classify::abandoned(flight.watch.sent())),
        };
        let before = self.account.certainty.min(Certainty::Unknown);
        self.account.certainty = before.max(certainty);
        self.land(status, Some(Failure::Cancelled), certainty, now);
    }

    fn end(&mut self, now: Instant) -> RetryReport {
        self.close(now);
        let report = RetryReport::from(self.account.clone());
        if let Some(handle) = &self.handle {
            handle.finish(report.clone());
        }
        report
    }

    /// What another run of the same operation must reckon with: a success that this one has told of
    /// is no longer in anybody's hands there.
    fn left_open(&self) -> Certainty {
        let may_have_applied = |attempt: &AttemptRecord| {
            attempt.certainty == Certainty::Unknown
                || attempt.status.is_some_and(|status| status.is_success())
        };
        match self.account.attempts.iter().any(may_have_applied) {
            true => Certainty::Unknown,
            false if self.lacks_credentials() => Certainty::NotProcessed,
            false => self.account.certainty,
        }
    }

    /// Its credentials were refused, and another run may bring others. As with every refusal that lets a
    /// request be sent again, no redirect must be able to hide whose answer it is.
    fn lacks_credentials(&self) -> bool {
        let last = self.account.attempts.last().and_then(AttemptRecord::status);
        let wants = [
            StatusCode::UNAUTHORIZED,
            StatusCode::PROXY_AUTHENTICATION_REQUIRED,
        ];
        self.client_is_prepared
            && self.account.certainty == Certainty::Answered
            && last.is_some_and(|status| wants.contains(&status))
    }

    fn close(&mut self, now: Instant) {
        self.has_ended = true;
        self.account.elapsed = now.saturating_duration_since(self.started);
        if let Some(continuation) = &self.continuation {
            continuation.state.end(self.left_open());
        }
        if self.account.is_spent() {
            nesting::note_spent(self.around, self.account.may_be_doubled());
        } else if self.account.stop == Some(StopReason::NestedLayer) {
            nesting::note_left(self.around);
        }
        self.listeners.ended(&self.account, self.load.as_deref());
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if !self.has_ended {
            let now = clock::now();
            self.abandon_flight(now);
            self.account.stop = Some(StopReason::Cancelled);
            self.end(now);
        }
    }
}
