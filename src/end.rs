//! How an attempt ended, and what that means.

use std::iter;
use std::time::Instant;

use http::StatusCode;
use reqwest::{Response, Url};
use reqwest_middleware::Result;

use crate::classify::{self, Circumstances};
use crate::clock::Bounded;
use crate::deadline::DeadlineScope;
use crate::error::{AttemptTimeout, Cause};
use crate::operation::Operation;
use crate::policy::{Health, Outcome, Stop, Terms, Verdict};
use crate::progress::Progress;
use crate::redirect::{self, Redirected};
use crate::report::{Failure, RetryResponseExt};
use crate::response_body::{self, IncompleteBody};
use crate::settings::Settings;
use crate::watch::{Sent, Watch};

/// The end of an attempt: an answer, a failure, or an answer whose body failed.
pub(crate) struct End {
    pub(crate) outcome: Outcome,
    pub(crate) answer: Option<Answer>,
    status: Option<StatusCode>,
    failure: Option<(Failure, Cause)>,
}

/// An answer in hand.
pub(crate) struct Answer {
    pub(crate) response: Response,
    /// Its body has been read, and is part of it.
    pub(crate) is_whole: bool,
}

impl End {
    /// Reads what came back. `None`: the caller cancelled the attempt.
    pub(crate) fn of(
        result: Bounded<Result<Response>>,
        settings: &Settings,
        operation: &Operation,
        watch: Option<&Watch>,
    ) -> Option<Self> {
        let call = &operation.call;
        let mut on = Circumstances {
            replay: call.replay,
            maybe_applied: call.maybe_applied(),
            redirected: watch.map_or(Redirected::Unknown, |watch| {
                watch.hops().redirected(settings.client_is_prepared)
            }),
            left_host: false,
            sent: watch.map_or(Sent::Untracked, Watch::sent),
        };
        let url = operation.template.url();
        let is_spent_below = watch.is_some_and(Watch::is_spent_below);
        let mut end = match result {
            Bounded::Cancelled => None,
            Bounded::TimedOut => {
                let (outcome, failure) = classify::timeout(on);
                let cause = Cause::Timeout(AttemptTimeout);
                Some(Self::failed(outcome, failure, cause))
            }
            Bounded::Done(Err(error)) => {
                on.left_host = is_of_another_host(&error, url);
                let is_https = url.scheme() == "https";
                let (mut outcome, failure) = classify::error(&error, is_https, on);
                if let Some(status) = error.status() {
                    settings.rules.answer_as_error(&mut outcome, status, on);
                }
                Some(Self::failed(outcome, failure, Cause::from(error)))
            }
            Bounded::Done(Ok(response)) => {
                if !is_to_our_url(&response, url, watch, on.redirected) {
                    on.redirected = Redirected::Changed;
                }
                let is_elsewhere = response.url() != url;
                on.left_host = is_elsewhere && !is_same_host(response.url(), url);
                let Settings { rules, clock, .. } = settings;
                let (status, headers) = (response.status(), response.headers());
                let mut outcome = rules.answer(status, headers, || clock.wall(), on);
                if let Some(below) = response.retry_report() {
                    outcome.heed(
                        below.is_spent(),
                        below.may_be_doubled(),
                        below.retry_after(),
                    );
                }
                Some(Self::answered(outcome, response))
            }
        }?;
        end.outcome.retried_below |= is_spent_below;
        if matches!(end.failure, Some((Failure::Layer, _)))
            && watch.is_some_and(Watch::is_left_to_us)
        {
            // The layer has failed for want of an answer that another attempt may get.
            end.outcome.verdict = Verdict::Retryable;
        }
        Some(end)
    }

    fn failed(outcome: Outcome, failure: Failure, cause: Cause) -> Self {
        Self {
            outcome,
            answer: None,
            status: None,
            failure: Some((failure, cause)),
        }
    }

    fn answered(outcome: Outcome, response: Response) -> Self {
        Self {
            outcome,
            status: Some(response.status()),
            answer: Some(Answer {
                response,
                is_whole: false,
            }),
            failure: None,
        }
    }

    /// The answer's body broke off while it was read within the attempt. What the head has proved
    /// stays proved.
    pub(crate) fn breaks_off(&mut self, incomplete: IncompleteBody) {
        self.outcome.verdict = Verdict::Retryable;
        self.outcome.health = Health::Bad;
        self.failure = Some((Failure::Body, Cause::Incomplete(incomplete)));
    }

    /// Books it with the core and the account.
    pub(crate) fn record(
        &mut self,
        operation: &mut Operation,
        progress: &mut Progress,
        terms: &Terms<'_>,
        now: Instant,
    ) {
        let call = &mut operation.call;
        call.record(&self.outcome, terms, now);
        let failure = self.failure.take();
        progress.attempt_ends(&self.outcome, self.status, failure, call.certainty(), now);
    }
}

/// Whether the answer comes from where our request went, as far as its URL shows. Hops that are known
/// of say more than that.
fn is_to_our_url(
    response: &Response,
    url: &Url,
    watch: Option<&Watch>,
    redirected: Redirected,
) -> bool {
    let is_noted = !matches!(redirected, Redirected::No | Redirected::Unknown);
    let moved_to = watch.and_then(Watch::moved_to);
    let mut ours = iter::once(url).chain(moved_to);
    is_noted || ours.any(|url| redirect::is_same_url(response.url(), url))
}

/// Whether the error is about a request to another host: a later hop, or a call that a layer has made
/// on its own account.
fn is_of_another_host(error: &reqwest_middleware::Error, url: &Url) -> bool {
    let reqwest_middleware::Error::Reqwest(error) = error else {
        return false;
    };
    error.url().is_some_and(|other| !is_same_host(other, url))
}

/// By the same measure as the keys of load control: `http` and `https` share a host.
fn is_same_host(one: &Url, other: &Url) -> bool {
    one.host() == other.host() && one.port() == other.port()
}

impl Answer {
    /// The final answer, with its body guarded and with what is to be told of the operation.
    pub(crate) fn hand_on(
        self,
        stop: Option<Stop>,
        settings: &Settings,
        operation: &Operation,
        progress: &mut Progress,
        now: Instant,
    ) -> Response {
        let Self { response, is_whole } = self;
        let deadline = match settings.scope {
            DeadlineScope::Body => operation.call.deadline,
            DeadlineScope::Headers => None,
        };
        let mut response = match is_whole {
            true => response,
            false => response_body::guard(response, deadline),
        };
        // A client below may have left its own.
        tell(&mut response, operation.key.clone());
        tell(&mut response, progress.answered(stop, now));
        response
    }
}

/// Leaves this with the answer, in place of what may be there.
fn tell<T: Clone + Send + Sync + 'static>(answer: &mut Response, what: Option<T>) {
    match what {
        Some(what) => drop(answer.extensions_mut().insert(what)),
        None => drop(answer.extensions_mut().remove::<T>()),
    }
}
