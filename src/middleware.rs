//! **Read this first**: the loop, and every `.await` of the retry path.
//!
//! identify → admit → attempt → classify → decide → wait → admit again → … → answer, or a typed stop.
//! What each step means is in the file named after it; whether it may happen is decided in
//! [`policy`](crate::policy), which this file tells the time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::Extensions;
use http_body_util::BodyExt;
use reqwest::{Body, ClientBuilder, Response};
use reqwest_middleware::{Error, Middleware, Next, Result};
use tracing::Instrument;

use crate::attempt::{Attempt, Template};
use crate::between::{Admitted, Again, Ended, Landed, Wait};
use crate::body_factory::{BodyFactory, FreshBody};
use crate::builder::RetryMiddlewareBuilder;
use crate::cancel::Cancel;
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

#[async_trait::async_trait]
impl Middleware for RetryMiddleware {
    async fn handle(
        &self,
        request: reqwest::Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> Result<Response> {
        if is_an_attempt_already(&request, extensions) {
            return next.run(request, extensions).await;
        }
        let now = clock::now();
        let around = Surroundings::here();
        let (mut progress, template, reads_ahead) = self.begin(request, extensions, now);
        let template = match reads_ahead {
            false => template,
            true => {
                let span = progress.span();
                let reading = self.read_ahead(template, &mut progress, extensions, &around, now);
                Box::pin(reading).instrument(span).await?
            }
        };
        let mut operation = Operation::identify(template, extensions, &self.settings, around, now)
            .map_err(|error| progress.refused(error))?;
        let load = self.load(&operation, extensions);
        progress.identified(&operation, load.clone());
        operation.stamp(&self.settings);
        let span = progress.span();
        let run = self.run(&mut operation, &mut progress, extensions, next, load);
        let result = match span.is_disabled() {
            true => run.await,
            false => Box::pin(run).instrument(span).await,
        };
        operation.leave_mark(extensions);
        result
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
        load: Option<Arc<Load>>,
    ) -> Result<Response> {
        let mut terms = self.settings.terms(load.as_deref());
        terms.is_within_a_probe = terms.breaker.is_some_and(nesting::is_probe_of);
        let limiter = load.as_ref().and_then(|load| load.limiter.as_ref());
        let limiter = limiter.filter(|limiter| !nesting::is_held(limiter));
        let mut waited = None;
        loop {
            let admitted = self
                .admit(operation, progress, &terms, limiter, waited.take())
                .await?;
            let attempt = self.attempt(operation, progress, extensions, &next, &terms, &admitted);
            let end = End::of(attempt.await, &self.settings, operation, progress.watch());
            let end = match self.settings.buffer_response {
                None => end,
                Some(cap) => Box::pin(read_answer(end, cap, operation, progress, &admitted)).await,
            };
            let again = match self.land(end, admitted, operation, progress, &terms) {
                Landed::Over(result) => return result,
                Landed::Again(again) => again,
            };
            let Again {
                answer,
                landed,
                wait,
            } = *again;
            if let Some(answer) = answer {
                let drained = give_up(answer.response, landed, wait.delay, operation);
                progress.gives_up(Box::pin(drained).await);
            }
            let wake = landed.checked_add(wait.delay);
            if let Bounded::Cancelled = clock::wait(wake, &operation.cancel).await {
                drop(wait);
                return Err(progress.stopped(StopReason::Cancelled));
            }
            waited = Some(wait);
        }
    }

    /// An attempt has ended. What follows?
    fn land<'t>(
        &self,
        end: Option<End>,
        admitted: Admitted<'t>,
        operation: &mut Operation,
        progress: &mut Progress,
        terms: &Terms<'t>,
    ) -> Landed<'t> {
        let landed = clock::now();
        let Some(mut end) = end else {
            return Landed::Over(Err(progress.cancelled_in_flight(landed)));
        };
        let pass = admitted.lands();
        end.record(operation, progress, terms, landed);
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
            cancelled: operation.is_cancelled(),
            draw: &draw,
        };
        let stop = match operation.call.decide(&outcome, terms, at) {
            Decision::Wait { delay, token } => {
                progress.waits(delay);
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
            Decision::Return(stop) => self.settle(Some(ended), stop, progress, landed),
        };
        Landed::Over(match answer {
            Some(answer) => {
                let settings = &self.settings;
                Ok(answer.hand_on(stop, &outcome, settings, terms, operation, progress))
            }
            None => Err(progress.stopped(stop.unwrap_or(StopReason::NotRetryable.into()))),
        })
    }

    /// What the operation shares with others.
    fn load(&self, operation: &Operation, extensions: &Extensions) -> Option<Arc<Load>> {
        let control = self.settings.load.as_ref()?;
        Some(control.of(operation.template.head()?, extensions))
    }

    /// Waits until the coming attempt may start: for a host that wants to be left alone, and for one
    /// of the permits.
    async fn admit<'t>(
        &self,
        operation: &mut Operation,
        progress: &mut Progress,
        terms: &Terms<'t>,
        limiter: Option<&'t Limiter>,
        waited: Option<Wait<'t>>,
    ) -> Result<Admitted<'t>> {
        let mut now = clock::now();
        if waited.is_some() {
            progress.wait_is_over();
        }
        let mut pushed_back = Duration::ZERO;
        let mut permit = None;
        let stop = loop {
            let draw = || self.settings.clock.draw();
            let at = Moment {
                now,
                cancelled: operation.is_cancelled(),
                draw: &draw,
            };
            let (limit, pass) = match operation.call.admit(terms, at) {
                Err(stop) => break stop,
                Ok(Admission::Start { limit, pass }) => (limit, pass),
                Ok(Admission::Wait(delay)) => {
                    permit = None;
                    progress.waits(delay);
                    pushed_back = pushed_back.saturating_add(delay);
                    let wake = now.checked_add(delay);
                    Box::pin(clock::wait(wake, &operation.cancel)).await;
                    now = clock::now();
                    continue;
                }
            };
            if permit.is_none() {
                permit = limiter.and_then(Limiter::try_acquire);
            }
            match limiter.filter(|_| permit.is_none()) {
                None => {
                    let before = waited.map_or(Duration::ZERO, |wait| wait.end(now));
                    return Ok(Admitted {
                        now,
                        limit,
                        waited: before.saturating_add(pushed_back),
                        pass,
                        permit,
                    });
                }
                Some(limiter) => {
                    drop(pass);
                    let place = limiter.line_up();
                    let until = operation.call.latest_start();
                    match Box::pin(bounded(place.turn(), until, &operation.cancel)).await {
                        Bounded::Done(Ok(turn)) => permit = Some(place.take(turn)),
                        Bounded::Cancelled => break StopReason::Cancelled.into(),
                        Bounded::TimedOut | Bounded::Done(Err(_)) => {
                            break StopReason::ConcurrencyLimit.into();
                        }
                    }
                    now = clock::now();
                }
            }
        };
        let settled = self.settle(waited.map(Wait::abandon), Some(stop), progress, now);
        Err(progress.stopped(settled.unwrap_or(stop)))
    }

    /// The operation has ended: its breaker is told how, unless it was the caller who ended it. A breaker
    /// that it opens by that is the one that the caller has to wait for.
    fn settle(
        &self,
        ended: Option<Ended<'_>>,
        stop: Option<Stop>,
        progress: &Progress,
        now: Instant,
    ) -> Option<Stop> {
        let is_cancelled = stop.is_some_and(|stop| stop.reason == StopReason::Cancelled);
        let Some(Ended { pass, health }) = ended.filter(|_| !is_cancelled) else {
            return stop;
        };
        let draw = || self.settings.clock.draw();
        let Some(turned) = pass.and_then(|pass| pass.settle(health, now, draw)) else {
            return stop;
        };
        progress.turned(turned);
        match (stop, turned) {
            (Some(stop), Turned::Open(wait)) if stop.reason == StopReason::BreakerOpen => {
                let after = stop.after.or(Some(wait));
                Some(Stop { after, ..stop })
            }
            _ => stop,
        }
    }

    /// What can be had without waiting; last, whether the body is a stream that is wanted, and of use,
    /// before the first attempt.
    fn begin(
        &self,
        request: reqwest::Request,
        extensions: &Extensions,
        now: Instant,
    ) -> (Progress, Template, bool) {
        let handle = extensions.get().cloned();
        let progress = Progress::begin(&request, handle, &self.settings, now);
        let template = Template::take(request, extensions.get().cloned());
        let may_repeat = || {
            let limits = operation::limits(extensions, &self.settings);
            limits.is_ok_and(|limits| limits.max_attempts > 1)
        };
        let reads_ahead =
            self.settings.buffer_request.is_some() && !template.is_replayable() && may_repeat();
        (progress, template, reads_ahead)
    }

    /// Reads a streamed request body.
    async fn read_ahead(
        &self,
        mut template: Template,
        progress: &mut Progress,
        extensions: &Extensions,
        around: &Surroundings,
        now: Instant,
    ) -> Result<Template> {
        let cap = self.settings.buffer_request.unwrap_or_default();
        let Some(stream) = template.take_stream() else {
            return Ok(template);
        };
        let until = operation::deadline(extensions, &self.settings, around, now);
        let cancel = Cancel::of(extensions, around);
        match bounded(read(stream, cap), until, &cancel).await {
            Bounded::Done(Ok(frames)) => {
                template.put_back(frames);
                Ok(template)
            }
            Bounded::Done(Err(error)) => Err(progress.unreadable(error)),
            Bounded::TimedOut => Err(progress.stopped(StopReason::DeadlineTooClose)),
            Bounded::Cancelled => Err(progress.stopped(StopReason::Cancelled)),
        }
    }

    /// One attempt, ended by its answer, its failure, its limit or the caller.
    async fn attempt(
        &self,
        operation: &mut Operation,
        progress: &mut Progress,
        extensions: &mut Extensions,
        next: &Next<'_>,
        terms: &Terms<'_>,
        admitted: &Admitted<'_>,
    ) -> Bounded<Result<Response>> {
        let &Admitted {
            now, limit, waited, ..
        } = admitted;
        let holding = admitted.holding();
        let call = &mut operation.call;
        let is_tracked = self.settings.send_tracking && call.replay != ReplayClass::Safe;
        let evidence = is_tracked.then(Arc::<Evidence>::default);
        let (is_last, time_left) = (call.is_last_attempt(), call.time_left(now));
        call.start_attempt(terms, now);
        let attempt = Attempt {
            number: call.attempts(),
            max_attempts: call.limits.max_attempts,
            limit,
        };
        operation.mark(extensions);
        extensions.insert(attempt);
        let may_be_repeated = operation.call.may_be_repeated();
        let within = Within::attempt(extensions, may_be_repeated);
        let watch = Watch::new(operation.no_hops_yet(), evidence.clone(), within);
        let watch = progress.attempt_starts(attempt.number, waited, limit, watch, now);

        let until = admitted.until();
        let fresh = match operation.template.factory() {
            None => Bounded::Done(Ok(None)),
            Some(factory) => {
                let making = fresh_body(factory, until, &operation.cancel);
                Box::pin(nesting::holding(holding, making)).await
            }
        };
        let fresh = match fresh {
            Bounded::Done(Ok(fresh)) => fresh,
            Bounded::Done(Err(error)) => return Bounded::Done(Err(error)),
            Bounded::TimedOut => return Bounded::TimedOut,
            Bounded::Cancelled => return Bounded::Cancelled,
        };
        operation.stamp_attempt(&self.settings, left_until(until));
        let template = &mut operation.template;
        let Some(request) = template.request(is_last, fresh, evidence.as_ref(), time_left) else {
            // The core starts no second attempt of a stream.
            return Bounded::Done(Err(Error::middleware(InvalidInput::new(
                "body",
                "has been sent, and cannot be sent again",
            ))));
        };
        let run = watch.over(next.clone().run(request, extensions), holding);
        match bounded(run, until, &operation.cancel).await {
            Bounded::Done(Ok(answer)) if watch.is_tracked() => {
                let follow = self.follow(answer, watch, operation, extensions, next, admitted);
                Box::pin(follow).await
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
        admitted: &Admitted<'_>,
    ) -> Bounded<Result<Response>> {
        let now = clock::now();
        let until = admitted.until();
        let holding = admitted.holding();
        let left = left_until(until);
        let target = operation.redirect_target(&answer, watch, &self.settings, left);
        let Some(target) = target else {
            return Bounded::Done(Ok(answer));
        };
        let time_left = operation.call.time_left(now);
        operation.stamp_attempt(&self.settings, left);
        let Some(request) = operation.template.request(false, None, None, time_left) else {
            return Bounded::Done(Ok(answer));
        };
        drop(answer);
        watch.note_moved(target);
        let run = watch.over(next.clone().run(request, extensions), holding);
        bounded(run, until, &operation.cancel).await
    }
}

/// Whether a layer of this crate around has this very request in an attempt: the one that asks is then a
/// second one on the same stack, and lets it pass. The map alone does not say so, since a layer in
/// between may have given it to a request of its own.
fn is_an_attempt_already(request: &reqwest::Request, extensions: &Extensions) -> bool {
    match Continuation::in_map(extensions).filter(|around| around.is_running()) {
        Some(around) => around.request.is_to(request.method(), request.url()),
        None => nesting::is_map_of_an_attempt(extensions) && request.method().is_safe(),
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
) -> Bounded<Result<Option<FreshBody>>> {
    match bounded(factory.make(), until, cancel).await {
        Bounded::Done(Ok(body)) => Bounded::Done(Ok(Some(body))),
        Bounded::Done(Err(error)) => Bounded::Done(Err(Error::middleware(BodyNotMade(error)))),
        Bounded::TimedOut => Bounded::TimedOut,
        Bounded::Cancelled => Bounded::Cancelled,
    }
}

/// Reads the body of an answer that would be handed on, within the attempt's limit, if that is
/// wanted: a body that breaks off then ends the attempt as a failure.
async fn read_answer(
    end: Option<End>,
    cap: usize,
    operation: &Operation,
    progress: &mut Progress,
    admitted: &Admitted<'_>,
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
    progress.attempt_is_answered(status, end.outcome.certainty);
    let reading = read(body, cap);
    let reading = bounded(reading, admitted.until(), &operation.cancel);
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
    progress.gives_up(LastAnswer {
        status,
        headers: head.parts().headers.clone(),
        body: None,
    });
    end.breaks_off(incomplete);
    Some(end)
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
        match bounded(read_to_end(&mut answer), until, &operation.cancel).await {
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
