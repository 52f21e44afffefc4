//! **Read this first**: the loop, and every `.await` of the retry path.
//!
//! identify → admit → attempt → classify → decide → wait → admit again → … → answer, or a typed stop.
//! What each step means is in the file named after it; whether it may happen is decided in
//! [`policy`](crate::policy), which this file tells the time.

use std::future::{Future, pending};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::Extensions;
use reqwest::{ClientBuilder, Response, Url};
use reqwest_middleware::{Error, Middleware, Next, Result};

use crate::attempt::{self, Attempt, Template};
use crate::builder::{RetryMiddlewareBuilder, Settings};
use crate::classify::{self, Circumstances};
use crate::clock;
use crate::continuation::Continuation;
use crate::deadline::DeadlineScope;
use crate::error::{AttemptTimeout, Cause, LastAnswer};
use crate::invalid::InvalidInput;
use crate::operation::Operation;
use crate::policy::{Decision, Moment, Outcome, ReplayClass, Reservation, StopReason};
use crate::progress::Progress;
use crate::redirect::{self, Redirected};
use crate::response_body;
use crate::tracking::Evidence;
use crate::watch::{Sent, Watch};

/// The retry layer. Add it to a `reqwest_middleware::ClientBuilder` with `.with(retry)`.
///
/// Cheap to clone; clones share the budget.
///
/// # Cancel safety
///
/// Dropping the future of a request ends the operation at once: nothing is sent after it, no timer
/// stays, a token reserved for an attempt that had not started goes back to the budget. An attempt
/// in the air is abandoned, which does not undo what the server does with it: what is known then is
/// in the request's [`ReportHandle`](crate::ReportHandle).
#[derive(Clone, Debug)]
pub struct RetryMiddleware {
    settings: Arc<Settings>,
}

impl RetryMiddleware {
    /// The settings to build one from.
    pub fn builder() -> RetryMiddlewareBuilder {
        RetryMiddlewareBuilder::default()
    }

    /// Prepares the HTTP client below: switches reqwest's own hidden retries off, which no budget
    /// bounds, and follows redirects so that this layer knows of them.
    ///
    /// Redirects go as reqwest's default policy has them (at most 10 hops), but operations with a
    /// key, and those that are unsafe to repeat, are not carried to another origin: the redirect is
    /// handed on as the answer. Replaces a redirect policy and a retry policy set before.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use reqwest_idempotent_retry::RetryMiddleware;
    /// use reqwest_middleware::ClientBuilder;
    ///
    /// let retry = RetryMiddleware::builder().client_is_prepared(true).build()?;
    /// # let builder = reqwest::Client::builder().tls_certs_only([]);
    /// # let _ = rustls::crypto::ring::default_provider().install_default();
    /// # /*
    /// let builder = reqwest::Client::builder();
    /// # */
    /// let http = RetryMiddleware::prepare(builder).build()?;
    /// let client = ClientBuilder::new(http).with(retry).build();
    /// # Ok(())
    /// # }
    /// ```
    pub fn prepare(client: ClientBuilder) -> ClientBuilder {
        client
            .retry(reqwest::retry::never())
            .redirect(redirect::policy())
    }

    pub(crate) fn with(settings: Settings) -> Self {
        Self {
            settings: Arc::new(settings),
        }
    }
}

#[async_trait::async_trait]
impl Middleware for RetryMiddleware {
    async fn handle(
        &self,
        request: reqwest::Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> Result<Response> {
        if Continuation::in_map(extensions).is_some_and(Continuation::is_running) {
            return next.run(request, extensions).await;
        }
        let now = clock::now();
        let (template, identity) = Template::take(request);
        let mut progress = Progress::begin(
            identity.method.clone(),
            identity.url.host_str(),
            extensions.get().cloned(),
            now,
        );
        match Operation::identify(template, identity, extensions, &self.settings, now) {
            Err(error) => Err(progress.refused(error)),
            Ok(mut operation) => {
                progress.identified(&operation);
                operation.stamp_key(&self.settings);
                let result = self
                    .run(&mut operation, &mut progress, extensions, next)
                    .await;
                operation.mark(extensions);
                result
            }
        }
    }
}

impl RetryMiddleware {
    /// The loop.
    async fn run(
        &self,
        operation: &mut Operation,
        progress: &mut Progress,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> Result<Response> {
        let budget = self.settings.budget.as_deref();
        let mut waited: Option<Wait<'_>> = None;
        loop {
            let now = clock::now();
            let admitted = match operation.call.admit(now, operation.is_cancelled()) {
                Ok(limit) => Admitted { now, limit },
                Err(reason) => return Err(progress.stopped(reason)),
            };
            let delay = waited.take().map_or(Duration::ZERO, |wait| wait.end(now));

            let result = self
                .attempt(operation, progress, extensions, &next, delay, admitted)
                .await;
            let landed = clock::now();
            let Some((outcome, answer)) = self.classify(operation, progress, result, landed) else {
                return Err(progress.cancelled_in_flight(landed));
            };

            let at = Moment {
                now: landed,
                draw: self.settings.clock.draw(),
                cancelled: operation.is_cancelled(),
            };
            let decision = operation
                .call
                .decide(&outcome, &self.settings.pacing, budget, at);
            let (delay, token) = match (decision, answer) {
                (Decision::Wait { delay, token }, answer) => {
                    progress.waits(delay);
                    if let Some(answer) = answer {
                        progress.gives_up(give_up(answer, landed, delay, operation).await);
                    }
                    (delay, token)
                }
                (Decision::Return(stop), Some(answer)) => {
                    return Ok(self.hand_on(answer, stop, &outcome, operation, progress));
                }
                (Decision::Return(stop), None) => {
                    return Err(progress.stopped(stop.unwrap_or(StopReason::NotRetryable)));
                }
            };

            let wake = landed.checked_add(delay);
            if let Bounded::Cancelled = bounded(pending::<()>(), wake, operation).await {
                drop(token);
                return Err(progress.stopped(StopReason::Cancelled));
            }
            waited = Some(Wait { delay, token });
        }
    }

    /// One attempt, ended by its answer, its failure, its limit or the caller.
    async fn attempt(
        &self,
        operation: &mut Operation,
        progress: &mut Progress,
        extensions: &mut Extensions,
        next: &Next<'_>,
        waited: Duration,
        admitted: Admitted,
    ) -> Bounded<Result<Response>> {
        let Admitted { now, limit } = admitted;
        let call = &mut operation.call;
        let is_tracked = self.settings.send_tracking && call.replay != ReplayClass::Safe;
        let evidence = is_tracked.then(Arc::<Evidence>::default);
        let (is_last, time_left) = (call.is_last_attempt(), call.time_left(now));
        let request = operation
            .template
            .request(is_last, evidence.as_ref(), time_left);
        let Some(request) = request else {
            // The core starts no second attempt of a stream.
            return Bounded::Done(Err(Error::middleware(InvalidInput::new(
                "body",
                "has been sent, and cannot be sent again",
            ))));
        };
        call.start_attempt(self.settings.budget.as_deref(), now);
        let attempt = Attempt {
            number: call.attempts(),
            max_attempts: call.limits.max_attempts,
            limit,
        };
        operation.mark(extensions);
        extensions.insert(attempt);
        let watch = Watch::new(operation.no_hops_yet(), evidence);
        let watch = progress.attempt_starts(attempt.number, waited, limit, watch, now);

        let until = limit.and_then(|limit| now.checked_add(limit));
        let run = watch.over(next.clone().run(request, extensions));
        match bounded(run, until, operation).await {
            Bounded::Done(Ok(answer)) if watch.is_tracked() => {
                self.follow(answer, watch, operation, extensions, next, until)
                    .await
            }
            result => result,
        }
    }

    /// reqwest cannot repeat a tracked body, so it hands us a redirect that needs one. The same
    /// attempt is then sent once more in a plain body, and reqwest follows.
    async fn follow(
        &self,
        answer: Response,
        watch: &mut Watch,
        operation: &mut Operation,
        extensions: &mut Extensions,
        next: &Next<'_>,
        until: Option<Instant>,
    ) -> Bounded<Result<Response>> {
        let Some(target) = self.redirect_target(&answer, watch, operation, until) else {
            return Bounded::Done(Ok(answer));
        };
        let time_left = operation.call.time_left(clock::now());
        let Some(request) = operation.template.request(false, None, time_left) else {
            return Bounded::Done(Ok(answer));
        };
        drop(answer);
        watch.note_moved(target);
        let run = watch.over(next.clone().run(request, extensions));
        bounded(run, until, operation).await
    }

    /// Where the attempt is to be sent once more, if there is anything to follow and time for it.
    fn redirect_target(
        &self,
        answer: &Response,
        watch: &Watch,
        operation: &Operation,
        until: Option<Instant>,
    ) -> Option<Url> {
        let (call, identity) = (&operation.call, &operation.identity);
        let is_unsafe = call.replay == ReplayClass::Unsafe;
        let target = attempt::wants_the_body_at(answer, identity, is_unsafe)?;
        let is_confined = self.settings.client_is_prepared && watch.hops().is_confined();
        let stays = !is_confined || target.origin() == identity.url.origin();
        let left = until.map(|until| until.saturating_duration_since(clock::now()));
        let is_in_time = left.is_none_or(|left| left >= call.limits.least_attempt());
        (stays && is_in_time && !operation.is_cancelled()).then_some(target)
    }

    /// What the attempt's end means. `None`: the caller cancelled it.
    fn classify(
        &self,
        operation: &mut Operation,
        progress: &mut Progress,
        result: Bounded<Result<Response>>,
        now: Instant,
    ) -> Option<(Outcome, Option<Response>)> {
        let call = &mut operation.call;
        let watch = progress.watch();
        let client_tells = self.settings.client_is_prepared;
        let redirected = watch.map_or(Redirected::Unknown, |watch| {
            watch.hops().redirected(client_tells)
        });
        let mut on = Circumstances {
            replay: call.replay,
            maybe_applied: call.maybe_applied(),
            redirected,
            sent: watch.map_or(Sent::Untracked, Watch::sent),
        };
        let (outcome, end, answer) = match result {
            Bounded::Cancelled => return None,
            Bounded::TimedOut => {
                let (outcome, failure) = classify::timeout(on);
                let cause = Cause::Timeout(AttemptTimeout);
                (outcome, Err((failure, cause)), None)
            }
            Bounded::Done(Err(error)) => {
                let is_https = operation.identity.url.scheme() == "https";
                let (outcome, failure) = classify::error(&error, is_https, on);
                (outcome, Err((failure, Cause::from(error))), None)
            }
            Bounded::Done(Ok(answer)) => {
                let target = watch.and_then(Watch::moved_to);
                let ours = [Some(&operation.identity.url), target];
                let is_ours = |url| redirect::is_same_url(answer.url(), url);
                let is_noted = !matches!(redirected, Redirected::No | Redirected::Unknown);
                if !is_noted && !ours.into_iter().flatten().any(is_ours) {
                    on.redirected = Redirected::Changed;
                }
                let Settings { rules, clock, .. } = &*self.settings;
                let wall = || clock.wall();
                let outcome = rules.answer(answer.status(), answer.headers(), wall, on);
                (outcome, Ok(answer.status()), Some(answer))
            }
        };
        call.record(&outcome);
        progress.attempt_ends(&outcome, end, call.certainty(), now);
        Some((outcome, answer))
    }

    /// The final answer, with its body ending at the deadline, and what is to be told of it.
    fn hand_on(
        &self,
        answer: Response,
        stop: Option<StopReason>,
        outcome: &Outcome,
        operation: &Operation,
        progress: &mut Progress,
    ) -> Response {
        if let Some(budget) = &self.settings.budget
            && classify::earns(answer.status(), outcome)
        {
            budget.earn(clock::now());
        }
        let mut answer = match (self.settings.scope, operation.call.deadline) {
            (DeadlineScope::Body, Some(deadline)) => response_body::end_at(answer, deadline),
            _ => answer,
        };
        if let Some(key) = &operation.key {
            answer.extensions_mut().insert(key.clone());
        }
        if let Some(report) = progress.answered(stop) {
            answer.extensions_mut().insert(report);
        }
        answer
    }
}

/// An attempt may start: the instant that this was decided for, and how long it may take.
#[derive(Clone, Copy)]
struct Admitted {
    now: Instant,
    limit: Option<Duration>,
}

/// A wait that has been waited out, with the token of the attempt that it was for.
struct Wait<'b> {
    delay: Duration,
    token: Reservation<'b>,
}

impl Wait<'_> {
    /// The attempt starts, and its token is spent.
    fn end(self, now: Instant) -> Duration {
        self.token.spend(now);
        self.delay
    }
}

/// How something that was waited for has ended.
enum Bounded<T> {
    Done(T),
    TimedOut,
    Cancelled,
}

/// Waits for `work` until `until`, or until the caller cancels. Work that is done wins over both.
async fn bounded<T>(
    work: impl Future<Output = T> + Send,
    until: Option<Instant>,
    operation: &Operation,
) -> Bounded<T> {
    let timed = async {
        match until {
            None => Bounded::Done(work.await),
            Some(until) => clock::limit(until, work)
                .await
                .map_or(Bounded::TimedOut, Bounded::Done),
        }
    };
    match &operation.cancel {
        None => timed.await,
        Some(token) => token
            .run_until_cancelled(timed)
            .await
            .unwrap_or(Bounded::Cancelled),
    }
}

/// The most of a failed answer that is read to keep its connection.
const DRAINED_BYTES: usize = 64 * 1024;

/// The longest that is spent on it.
const DRAINED_FOR: Duration = Duration::from_millis(50);

/// Reads a failed answer to its end if that is quick, within the wait, so that its connection can
/// be used again; otherwise drops it, which closes the connection.
async fn give_up(
    mut answer: Response,
    now: Instant,
    delay: Duration,
    operation: &Operation,
) -> LastAnswer {
    let is_small = |length| length <= DRAINED_BYTES as u64;
    let body = if answer.content_length().is_none_or(is_small) {
        let until = now.checked_add(DRAINED_FOR.min(delay));
        match bounded(read_to_end(&mut answer), until, operation).await {
            Bounded::Done(body) => body,
            Bounded::TimedOut | Bounded::Cancelled => None,
        }
    } else {
        None
    };
    LastAnswer {
        status: answer.status(),
        headers: std::mem::take(answer.headers_mut()),
        body,
    }
}

/// `None` where the body is too long, or breaks off.
async fn read_to_end(answer: &mut Response) -> Option<Bytes> {
    let mut body = BytesMut::new();
    loop {
        match answer.chunk().await {
            Ok(None) => return Some(body.freeze()),
            Ok(Some(chunk)) if body.len() + chunk.len() <= DRAINED_BYTES => {
                body.extend_from_slice(&chunk);
            }
            Ok(Some(_)) | Err(_) => return None,
        }
    }
}
