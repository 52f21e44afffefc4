//! **Read this first**: the loop, and every `.await` of the retry path.
//!
//! identify → admit → attempt → classify → decide → wait → admit again → … → answer, or a typed stop.
//! What each step means is in the file named after it; whether it may happen is decided in
//! [`policy`](crate::policy), which this file tells the time.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::Extensions;
use http_body_util::BodyExt;
use reqwest::{Body, ClientBuilder, Request, Response};
use reqwest_middleware::{Error, Middleware, Next, Result};
use tracing::Instrument;

use crate::attempt::{Attempt, Template};
use crate::between::{Admitted, Again, Ended, Landed, Wait};
use crate::body_factory::{BodyFactory, FreshBody};
use crate::builder::RetryMiddlewareBuilder;
use crate::cancel::Cancel;
use crate::classify;
use crate::clock::{self, Bounded, bounded};
use crate::continuation::Continuation;
use crate::end::{Answer, End};
use crate::error::{BodyNotMade, LastAnswer};
use crate::frames::Frames;
use crate::invalid::InvalidInput;
use crate::load::{Limiter, Load};
use crate::nesting::{self, Within};
use crate::operation::{self, Operation};
use crate::policy::{
    Admission, Decision, Moment, ReplayClass, Stop, StopReason, Terms, Turned, Verdict,
};
use crate::progress::Progress;
use crate::redirect;
use crate::response_body::{Head, IncompleteBody};
use crate::settings::Settings;
use crate::surroundings::Surroundings;
use crate::tracking::Evidence;
use crate::watch::Watch;

/// The retry layer. Add it to a `reqwest_middleware::ClientBuilder` with `.with(retry)`.
///
/// Cheap to clone; clones share the budget.
///
/// # Cancel safety
///
/// Dropping the future of a request ends the operation at once: no attempt starts after it, no timer
/// stays, a token reserved for an attempt that had not started goes back to the budget. An attempt
/// in the air is abandoned, which does not undo what the server does with it, nor what a connection
/// does that has it in hand (an HTTP/2 connection may send it once a stream is free). What is known
/// then is in the request's [`ReportHandle`](crate::ReportHandle).
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
        // `never` alone still copies every request, in case.
        client
            .retry(reqwest::retry::never().max_retries_per_request(0))
            .redirect(redirect::policy())
    }

    pub(crate) fn with(settings: Settings) -> Self {
        Self {
            settings: Arc::new(settings),
        }
    }
}

impl Middleware for RetryMiddleware {
    /// As `async_trait` would write it, but for the box around the request: a future keeps room for what
    /// it was given until it ends, and a request is large.
    fn handle<'s, 'e, 'n, 'f>(
        &'s self,
        request: Request,
        extensions: &'e mut Extensions,
        next: Next<'n>,
    ) -> Pin<Box<dyn Future<Output = Result<Response>> + Send + 'f>>
    where
        's: 'f,
        'e: 'f,
        'n: 'f,
        Self: 'f,
    {
        let request = Box::new(request);
        Box::pin(async move {
            if is_an_attempt_already(&request, extensions) {
                return next.run(*request, extensions).await;
            }
            let settings = &*self.settings;
            let now = clock::now();
            let handle = extensions.get().cloned();
            let mut progress = Progress::begin(&request, handle, settings, now);
            let (template, reads_ahead) = template_of(request, extensions, settings);
            let (template, around) = match reads_ahead {
                false => (template, Surroundings::here()),
                true => {
                    let span = progress.span();
                    let reading = read_ahead(template, &mut progress, extensions, settings, now);
                    Box::pin(reading.instrument(span)).await?
                }
            };
            let mut operation = Operation::identify(template, extensions, settings, around, now)
                .map_err(|error| progress.refused(error))?;
            let load = self.load(&operation, extensions);
            progress.identified(&operation, load.clone());
            operation.stamp(settings);
            let mut terms = settings.terms(load.as_deref());
            terms.is_within_a_probe = terms.breaker.is_some_and(nesting::is_probe_of);
            let limiter = load.as_ref().and_then(|load| load.limiter.as_ref());
            let span = progress.span();
            let mut run = Run {
                settings,
                operation: &mut operation,
                progress: &mut progress,
                extensions,
                next,
                terms,
                limiter: limiter.filter(|limiter| !nesting::is_held(limiter)),
            };
            let result = match span.is_disabled() {
                true => run.answer().await,
                false => Box::pin(run.answer()).instrument(span).await,
            };
            operation.leave_mark(extensions);
            result
        })
    }
}

impl RetryMiddleware {
    /// What the operation shares with others.
    fn load(&self, operation: &Operation, extensions: &Extensions) -> Option<Arc<Load>> {
        let control = self.settings.load.as_ref()?;
        Some(control.of(operation.template.head()?, extensions))
    }
}

/// The run of an operation through its attempts.
struct Run<'r> {
    settings: &'r Settings,
    operation: &'r mut Operation,
    progress: &'r mut Progress,
    extensions: &'r mut Extensions,
    next: Next<'r>,
    terms: Terms<'r>,
    /// Of whose permits each attempt needs one.
    limiter: Option<&'r Limiter>,
}

impl<'r> Run<'r> {
    /// The loop.
    async fn answer(&mut self) -> Result<Response> {
        let mut admitted = match self.admit().await {
            Ok(admitted) => admitted,
            Err(stop) => return Err(self.stop(None, stop)),
        };
        loop {
            let result = self.attempt(&admitted).await;
            let end = End::of(result, self.settings, self.operation, self.progress.watch());
            let end = match self.settings.buffer_response {
                None => end,
                Some(cap) => Box::pin(self.read_answer(end, cap, &admitted)).await,
            };
            let again = match self.land(end, admitted) {
                Landed::Over(result) => return result,
                Landed::Again(again) => again,
            };
            admitted = Box::pin(self.wait(again)).await?;
        }
    }

    /// Waits until the coming attempt may start: for a host that wants to be left alone, and for one
    /// of the permits.
    async fn admit(&mut self) -> std::result::Result<Admitted<'r>, Stop> {
        let mut now = clock::now();
        let mut waited = Duration::ZERO;
        let mut permit = None;
        loop {
            let draw = || self.settings.clock.draw();
            let at = Moment {
                now,
                cancelled: self.operation.is_cancelled(),
                draw: &draw,
            };
            let (limit, pass) = match self.operation.call.admit(&self.terms, at)? {
                Admission::Start { limit, pass } => (limit, pass),
                Admission::Wait(delay) => {
                    permit = None;
                    self.progress.waits(delay);
                    waited = waited.saturating_add(delay);
                    let wake = now.checked_add(delay);
                    Box::pin(clock::wait(wake, &self.operation.cancel)).await;
                    now = clock::now();
                    continue;
                }
            };
            if permit.is_none() {
                permit = self.limiter.and_then(Limiter::try_acquire);
            }
            match self.limiter.filter(|_| permit.is_none()) {
                None => {
                    return Ok(Admitted {
                        now,
                        limit,
                        waited,
                        pass,
                        permit,
                    });
                }
                Some(limiter) => {
                    drop(pass);
                    let place = limiter.line_up();
                    let until = self.operation.call.latest_start();
                    let turn = bounded(place.turn(), until, &self.operation.cancel);
                    match Box::pin(turn).await {
                        Bounded::Done(Ok(turn)) => permit = Some(place.take(turn)),
                        Bounded::Cancelled => return Err(StopReason::Cancelled.into()),
                        Bounded::TimedOut | Bounded::Done(Err(_)) => {
                            return Err(StopReason::ConcurrencyLimit.into());
                        }
                    }
                    now = clock::now();
                }
            }
        }
    }

    /// One attempt, ended by its answer, its failure, its limit or the caller.
    async fn attempt(&mut self, admitted: &Admitted<'r>) -> Bounded<Result<Response>> {
        let &Admitted {
            now, limit, waited, ..
        } = admitted;
        let operation = &mut *self.operation;
        let call = &mut operation.call;
        let is_tracked = self.settings.send_tracking && call.replay != ReplayClass::Safe;
        let evidence = is_tracked.then(Arc::<Evidence>::default);
        let (is_last, time_left) = (call.is_last_attempt(), call.time_left(now));
        call.start_attempt(&self.terms, now);
        let attempt = Attempt {
            number: call.attempts(),
            max_attempts: call.limits.max_attempts,
            limit,
        };
        operation.mark(self.extensions);
        self.extensions.insert(attempt);
        let within = Within::attempt(self.extensions, operation.call.may_be_repeated());
        let watch = Watch::new(operation.no_hops_yet(), evidence, within);
        let progress = &mut *self.progress;
        let watch = progress.attempt_starts(attempt.number, waited, limit, watch, now);

        let until = admitted.until();
        let fresh = match operation.template.factory() {
            None => None,
            Some(factory) => {
                let making = fresh_body(factory, until, &operation.cancel);
                match nesting::holding(admitted.holding(), Box::pin(making)).await {
                    Bounded::Done(Ok(_)) if left_until(until) == Some(Duration::ZERO) => {
                        return Bounded::TimedOut;
                    }
                    Bounded::Done(Ok(fresh)) => Some(fresh),
                    Bounded::Done(Err(error)) => return Bounded::Done(Err(error)),
                    Bounded::TimedOut => return Bounded::TimedOut,
                    Bounded::Cancelled => return Bounded::Cancelled,
                }
            }
        };
        operation.stamp_attempt(self.settings, || left_until(until));
        let template = &mut operation.template;
        let Some(request) = template.request(is_last, fresh, watch.evidence(), time_left) else {
            // The core starts no second attempt of a stream.
            return Bounded::Done(Err(Error::middleware(InvalidInput::new(
                "body",
                "has been sent, and cannot be sent again",
            ))));
        };
        let is_tracked = watch.is_tracked();
        let run = self.next.clone().run(request, self.extensions);
        let run = watch.over(run, admitted.holding());
        let answer = match bounded(run, until, &operation.cancel).await {
            Bounded::Done(Ok(answer)) if is_tracked => answer,
            result => return result,
        };
        let request = match operation.resend_for_redirect(answer, watch, self.settings, until) {
            Err(answer) => return Bounded::Done(Ok(answer)),
            Ok(request) => request,
        };
        let run = self.next.clone().run(*request, self.extensions);
        let run = watch.over(run, admitted.holding());
        bounded(run, until, &operation.cancel).await
    }

    /// Reads the body of an answer that would be handed on, within the attempt's limit, if that is
    /// wanted: a body that breaks off then ends the attempt as a failure.
    async fn read_answer(
        &mut self,
        end: Option<End>,
        cap: usize,
        admitted: &Admitted<'r>,
    ) -> Option<End> {
        let mut end = end?;
        let is_for_the_caller = end.outcome.verdict != Verdict::Retryable;
        let is_short = |length| length <= cap as u64;
        let fits = |answer: &mut Answer| answer.response.content_length().is_none_or(is_short);
        let Some(answer) = end
            .answer
            .take_if(|answer| is_for_the_caller && fits(answer))
        else {
            return Some(end);
        };
        let (head, body) = Head::split(answer.response);
        let status = head.parts().status;
        self.progress
            .attempt_is_answered(status, end.outcome.certainty);
        let reading = read(body, cap);
        let reading = bounded(reading, admitted.until(), &self.operation.cancel);
        let incomplete = match reading.await {
            Bounded::Cancelled => return None,
            Bounded::Done(Ok(frames)) => {
                end.answer = Some(Answer {
                    is_whole: frames.is_whole(),
                    response: head.with(Body::wrap(frames)),
                });
                return Some(end);
            }
            Bounded::Done(Err(error)) => IncompleteBody::new(status, error),
            Bounded::TimedOut => IncompleteBody::late(status),
        };
        self.progress.gives_up(LastAnswer {
            status,
            headers: head.parts().headers.clone(),
            body: None,
        });
        end.breaks_off(incomplete);
        Some(end)
    }

    /// An attempt has ended. What follows?
    fn land(&mut self, end: Option<End>, admitted: Admitted<'r>) -> Landed<'r> {
        let landed = clock::now();
        let Some(mut end) = end else {
            return Landed::Over(Err(self.progress.cancelled_in_flight(landed)));
        };
        let pass = admitted.lands();
        end.record(self.operation, self.progress, &self.terms, landed);
        let End {
            outcome, answer, ..
        } = end;
        let ended = Ended {
            pass,
            health: outcome.health,
        };

        let draw = || self.settings.clock.draw();
        let at = Moment {
            now: landed,
            cancelled: self.operation.is_cancelled(),
            draw: &draw,
        };
        let stop = match self.operation.call.decide(&outcome, &self.terms, at) {
            Decision::Wait { delay, token } => {
                self.progress.waits(delay);
                return Landed::Again(Box::new(Again {
                    answer,
                    landed,
                    wait: Wait {
                        delay,
                        token,
                        ended,
                    },
                }));
            }
            Decision::Return(stop) => self.settle(Some(ended), stop, landed),
        };
        Landed::Over(match answer {
            Some(answer) => {
                if let Some(budget) = self.terms.budget
                    && classify::earns(answer.response.status(), &outcome)
                {
                    budget.earn(landed);
                }
                let (operation, progress) = (&*self.operation, &mut *self.progress);
                Ok(answer.hand_on(stop, self.settings, operation, progress, landed))
            }
            None => Err(self
                .progress
                .stopped(stop.unwrap_or(StopReason::NotRetryable.into()))),
        })
    }

    /// From an attempt that has failed to the start of the next one.
    async fn wait(&mut self, again: Box<Again<'r>>) -> Result<Admitted<'r>> {
        let (answer, landed, wait) = again.parts();
        let giving_up = give_up(answer, landed, wait.delay, self.operation);
        if let Some(given_up) = Box::pin(giving_up).await {
            self.progress.gives_up(given_up);
        }
        let wake = landed.checked_add(wait.delay);
        if let Bounded::Cancelled = clock::wait(wake, &self.operation.cancel).await {
            drop(wait);
            return Err(self.progress.stopped(StopReason::Cancelled));
        }
        self.progress.wait_is_over();
        match self.admit().await {
            Ok(admitted) => Ok(admitted.after(wait)),
            Err(stop) => Err(self.stop(Some(wait.abandon()), stop)),
        }
    }

    /// No attempt may start any more.
    fn stop(&mut self, ended: Option<Ended<'r>>, stop: Stop) -> Error {
        let settled = self.settle(ended, Some(stop), clock::now());
        self.progress.stopped(settled.unwrap_or(stop))
    }

    /// The operation has ended: its breaker is told how, unless it was the caller who ended it. A breaker
    /// that it opens by that is the one that the caller has to wait for.
    fn settle(&self, ended: Option<Ended<'_>>, stop: Option<Stop>, now: Instant) -> Option<Stop> {
        let is_cancelled = stop.is_some_and(|stop| stop.reason == StopReason::Cancelled);
        let Some(Ended { pass, health }) = ended.filter(|_| !is_cancelled) else {
            return stop;
        };
        let draw = || self.settings.clock.draw();
        let Some(turned) = pass.and_then(|pass| pass.settle(health, now, draw)) else {
            return stop;
        };
        self.progress.turned(turned);
        match (stop, turned) {
            (Some(stop), Turned::Open(wait)) if stop.reason == StopReason::BreakerOpen => {
                let after = stop.after.or(Some(wait));
                Some(Stop { after, ..stop })
            }
            _ => stop,
        }
    }
}

/// Whether a layer of this crate around has a request like this one in an attempt: the one that asks is
/// then a second one on the same stack, and lets it pass. A mark says which method and URL that one goes
/// to, since a layer in between may have given the map to a request of its own. Where a safe operation
/// has left no mark, the map itself has to do.
fn is_an_attempt_already(request: &Request, extensions: &Extensions) -> bool {
    match Continuation::in_map(extensions).filter(|around| around.is_running()) {
        Some(around) => around.request.is_to(request.method(), request.url()),
        None => nesting::is_map_of_an_attempt(extensions) && request.method().is_safe(),
    }
}

/// What attempts are to be copies of, and whether its body is a stream that is wanted, and of use, before
/// the first of them.
fn template_of(
    request: Box<Request>,
    extensions: &Extensions,
    settings: &Settings,
) -> (Template, bool) {
    let template = Template::take(request, extensions.get().cloned());
    let may_repeat = || {
        let limits = operation::limits(extensions, settings);
        limits.is_ok_and(|limits| limits.max_attempts > 1)
    };
    let reads_ahead =
        settings.buffer_request.is_some() && !template.is_replayable() && may_repeat();
    (template, reads_ahead)
}

/// Reads a streamed request body.
async fn read_ahead(
    mut template: Template,
    progress: &mut Progress,
    extensions: &Extensions,
    settings: &Settings,
    now: Instant,
) -> Result<(Template, Surroundings)> {
    let around = Surroundings::here();
    let cap = settings.buffer_request.unwrap_or_default();
    let Some(stream) = template.take_stream() else {
        return Ok((template, around));
    };
    let until = operation::deadline(extensions, settings, &around, now);
    let cancel = Cancel::of(extensions, &around);
    let reading = bounded(read(stream, cap), until, &cancel);
    match reading.await {
        Bounded::Done(Ok(frames)) => {
            template.put_back(frames);
            Ok((template, around))
        }
        Bounded::Done(Err(error)) => Err(progress.unreadable(error)),
        Bounded::TimedOut => Err(progress.stopped(StopReason::DeadlineTooClose)),
        Bounded::Cancelled => Err(progress.stopped(StopReason::Cancelled)),
    }
}

/// Time until this instant.
fn left_until(until: Option<Instant>) -> Option<Duration> {
    until.map(|until| until.saturating_duration_since(clock::now()))
}

/// The body of the coming attempt, of a request that has a factory for it.
async fn fresh_body(
    factory: &BodyFactory,
    until: Option<Instant>,
    cancel: &Cancel,
) -> Bounded<Result<FreshBody>> {
    match bounded(factory.make(), until, cancel).await {
        Bounded::Done(Ok(body)) => Bounded::Done(Ok(body)),
        Bounded::Done(Err(error)) => Bounded::Done(Err(Error::middleware(BodyNotMade(error)))),
        Bounded::TimedOut => Bounded::TimedOut,
        Bounded::Cancelled => Bounded::Cancelled,
    }
}

/// The most of a failed answer that is read to keep its connection.
const DRAINED_BYTES: usize = 64 * 1024;

/// The longest that is spent on it.
const DRAINED_FOR: Duration = Duration::from_millis(50);

/// Reads a failed answer to its end if that is quick, within the wait, so that its connection can
/// be used again; otherwise drops it, which closes the connection.
async fn give_up(
    answer: Option<Answer>,
    now: Instant,
    delay: Duration,
    operation: &Operation,
) -> Option<LastAnswer> {
    let mut answer = answer?.response;
    let is_small = |length| length <= DRAINED_BYTES as u64;
    let body = if answer.content_length().is_none_or(is_small) {
        let until = now.checked_add(DRAINED_FOR.min(delay));
        match bounded(read_to_end(&mut answer), until, &operation.cancel).await {
            Bounded::Done(body) => body,
            Bounded::TimedOut | Bounded::Cancelled => None,
        }
    } else {
        None
    };
    Some(LastAnswer {
        status: answer.status(),
        headers: std::mem::take(answer.headers_mut()),
        body,
    })
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

/// Reads a body to its end, or until there is more than `cap`: what has been read then comes first,
/// and the rest after it.
async fn read(mut body: Body, cap: usize) -> reqwest::Result<Frames> {
    let mut frames = Frames::default();
    while let Some(frame) = body.frame().await {
        frames.push(frame?);
        if frames.length() > cap {
            return Ok(frames.followed_by(body));
        }
    }
    Ok(frames)
}
