//! Identify: what the request and its extensions say about the operation, before anything is sent.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{Extensions, HeaderMap, HeaderName, HeaderValue, Method};

use reqwest::{Request, Response, Url};

use crate::attempt::{Template, wants_the_body_at};

use crate::cancel::Cancel;
use crate::clock;
use crate::continuation::{Continuation, State};
use crate::deadline::Deadline;
use crate::invalid::InvalidInput;
use crate::key::{IdempotencyKey, KeyContract};
use crate::policy::{Call, Limits, ReplayClass, at_least_one, attempt_timeout};
use crate::redirect::Hops;
use crate::settings::Settings;
use crate::surroundings::Surroundings;
use crate::watch::Watch;

/// The caller's word on whether repeating the request is the same as sending it once: a request
/// extension.
///
/// `Idempotent(false)` wins over everything, a key included, and no key is made.
/// `Idempotent(true)` makes any method repeatable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Idempotent(pub bool);

/// Send this request once and hand on whatever comes: a request extension.
///
/// Redirects are followed all the same, which may mean another send of the same attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRetry;

/// Limits of one request in place of the client's: a request extension.
///
/// ```
/// use std::time::Duration;
/// use reqwest_idempotent_retry::RetryOverride;
///
/// let patient = RetryOverride::new()
///     .max_attempts(5)
///     .attempt_timeout(Duration::from_secs(20));
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[must_use]
pub struct RetryOverride {
    max_attempts: Option<u32>,
    attempt_timeout: Option<Duration>,
    minimum_attempt: Option<Duration>,
    reserve: Option<Duration>,
}

impl RetryOverride {
    /// Changes nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// At most so many attempts, the first one included. 0 is [`InvalidInput`].
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = Some(attempts);
        self
    }

    /// The longest an attempt may take to its response head; `Duration::MAX` for no limit.
    pub fn attempt_timeout(mut self, timeout: Duration) -> Self {
        self.attempt_timeout = Some(timeout);
        self
    }

    /// The least time that an attempt is worth starting with.
    pub fn minimum_attempt(mut self, least: Duration) -> Self {
        self.minimum_attempt = Some(least);
        self
    }

    /// Time kept free before the deadline.
    pub fn reserve(mut self, reserve: Duration) -> Self {
        self.reserve = Some(reserve);
        self
    }

    fn apply(self, limits: &mut Limits) -> Result<(), InvalidInput> {
        if let Some(attempts) = self.max_attempts {
            limits.max_attempts = at_least_one(attempts)?;
        }
        if let Some(timeout) = self.attempt_timeout {
            limits.attempt_timeout = attempt_timeout(timeout)?;
        }
        limits.minimum_attempt = self.minimum_attempt.unwrap_or(limits.minimum_attempt);
        limits.reserve = self.reserve.unwrap_or(limits.reserve);
        Ok(())
    }
}

/// How often Envoy may repeat a request, whatever its routes say.
const ENVOY_MAX_RETRIES: HeaderName = HeaderName::from_static("x-envoy-max-retries");

/// One intent of the caller, identified.
#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) template: Template,
    pub(crate) key: Option<IdempotencyKey>,
    pub(crate) cancel: Cancel,
    pub(crate) call: Call,
    /// What a later run with the same map must find; `None` where there is nothing to continue.
    pub(crate) continuation: Option<Arc<Continuation>>,
    /// Without the ambient one.
    own_deadline: Option<Instant>,
    is_post: bool,
}

impl Operation {
    /// # Errors
    ///
    /// Where key, header, override or map cannot be meant: nothing has been sent then.
    pub(crate) fn identify(
        template: Template,
        extensions: &Extensions,
        settings: &Settings,
        around: Surroundings,
        now: Instant,
    ) -> Result<Self, InvalidInput> {
        let Some(head) = template.head() else {
            return Err(InvalidInput::new("request", "has been sent already"));
        };
        let earlier = earlier_run(&template, extensions)?;
        let (key, key_is_new) = key(head.method(), head.headers(), extensions, settings)?;
        let replay = replay_class(head.method(), extensions, key.is_some());
        let is_post = head.method() == Method::POST;
        let first_sent = earlier.map_or(now, |earlier| earlier.first_sent);
        let mut call = Call::new(
            replay,
            limits(extensions, settings)?,
            earlier.map(Continuation::certainty),
        );
        call.body_replayable = template.is_replayable();
        call.nested = around.are_repeated;
        call.repeats_alike = replay.survives_a_repeat() && !key_is_new;
        call.key_expires = key
            .as_ref()
            .and(settings.contract.as_ref())
            .and_then(KeyContract::expires_after)
            .and_then(|lifetime| first_sent.checked_add(lifetime));
        let wished = wished_deadline(extensions, settings);
        call.deadline = deadline(extensions, settings, &around, now);
        let is_bound = key_is_new
            || wished.is_some_and(Deadline::is_relative)
            || earlier.is_some_and(|earlier| earlier.is_bound);
        let leaves_a_mark = is_bound || key.is_some() || replay != ReplayClass::Safe;
        let identity = leaves_a_mark.then(|| template.identity()).flatten();
        Ok(Self {
            cancel: Cancel::of(extensions, &around),
            continuation: identity.map(|request| {
                Arc::new(Continuation {
                    request,
                    first_sent,
                    is_bound,
                    state: State::running(),
                })
            }),
            own_deadline: wished.and_then(|deadline| deadline.resolve(now)),
            is_post,
            template,
            key,
            call,
        })
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// Keyed and unsafe operations are not to be carried to another origin.
    pub(crate) fn no_hops_yet(&self) -> Hops {
        let is_confined = matches!(self.call.replay, ReplayClass::Keyed | ReplayClass::Unsafe);
        Hops::none_yet(is_confined, self.is_post)
    }

    /// reqwest cannot repeat a tracked body, so it hands us a redirect that needs one. The same attempt
    /// is then to be sent once more in a plain body, which reqwest follows with: this is the request.
    ///
    /// # Errors
    ///
    /// The answer, where it is no redirect to be followed like this, or there is no time left for it. It is
    /// passed by value and given back, since a future that lends it would keep room for it.
    #[expect(clippy::result_large_err, reason = "the answer goes on as it came")]
    pub(crate) fn resend_for_redirect(
        &mut self,
        answer: Response,
        watch: &mut Watch,
        settings: &Settings,
        until: Option<Instant>,
    ) -> Result<Box<Request>, Response> {
        let Some(target) = self.redirect_target(&answer, watch, settings) else {
            return Err(answer);
        };
        let now = clock::now();
        let left = until.map(|until| until.saturating_duration_since(now));
        let is_in_time = left.is_none_or(|left| left >= self.call.limits.least_attempt());
        if !is_in_time || self.is_cancelled() {
            return Err(answer);
        }
        let time_left = self.call.time_left(now);
        self.stamp_attempt(settings, || left);
        let Some(request) = self.template.request(false, None, None, time_left) else {
            return Err(answer);
        };
        watch.note_moved(target);
        Ok(Box::new(request))
    }

    /// Where reqwest would have followed this answer to, with the body.
    fn redirect_target(
        &self,
        answer: &Response,
        watch: &Watch,
        settings: &Settings,
    ) -> Option<Url> {
        let is_unsafe = self.call.replay == ReplayClass::Unsafe;
        let identity = &self.continuation.as_ref()?.request;
        let url = self.template.url();
        let target = wants_the_body_at(answer, url, identity, is_unsafe)?;
        let is_confined = settings.client_is_prepared && watch.hops().is_confined();
        let stays = !is_confined || target.origin() == url.origin();
        stays.then_some(target)
    }

    /// Puts into the request that all attempts are copies of what is the same for all of them.
    pub(crate) fn stamp(&mut self, settings: &Settings) {
        let Some(headers) = self.template.headers_mut() else {
            return;
        };
        if let Some(key) = &self.key {
            settings.key_header().stamp(key, headers);
        }
        if !settings.sidecar_retries {
            headers
                .entry(ENVOY_MAX_RETRIES)
                .or_insert(HeaderValue::from_static("0"));
        }
    }

    /// Puts into the request what is of the coming attempt: its number, and how long it may take.
    pub(crate) fn stamp_attempt(
        &mut self,
        settings: &Settings,
        left: impl FnOnce() -> Option<Duration>,
    ) {
        let number = self.call.attempts();
        let most = self.call.limits.max_attempts;
        let Some(headers) = self.template.headers_mut() else {
            return;
        };
        if let Some(name) = &settings.attempt_header {
            headers.insert(name, HeaderValue::from(number));
        }
        if let Some(name) = &settings.max_attempts_header {
            headers.insert(name, HeaderValue::from(most));
        }
        if let Some(header) = &settings.timeout_header
            && let Some(left) = left()
        {
            headers.insert(header.name(), header.write(left));
        }
    }

    /// Leaves the mark behind for a later run with the same map, if a layer has cleared it away, and its
    /// own deadline: the ambient one is not for a map that may travel to another scope.
    pub(crate) fn leave_mark(&self, extensions: &mut Extensions) {
        if Continuation::in_map(extensions).is_none() {
            self.mark(extensions);
        }
        if self.call.deadline != self.own_deadline {
            extensions.remove::<Deadline>();
            self.own_deadline
                .map(|own| extensions.insert(Deadline::at(own)));
        }
    }

    /// Puts into the map what lower layers may read and a later run with it must find. Done before
    /// every attempt, since a layer may clear the map.
    pub(crate) fn mark(&self, extensions: &mut Extensions) {
        let Some(continuation) = &self.continuation else {
            return;
        };
        extensions.insert(Arc::clone(continuation));
        if let Some(key) = &self.key {
            extensions.insert(key.clone());
        }
        if let Some(deadline) = self.call.deadline {
            extensions.insert(Deadline::at(deadline));
        }
    }
}

/// An earlier run of the same operation: the same map with the same request.
fn earlier_run<'e>(
    template: &Template,
    extensions: &'e Extensions,
) -> Result<Option<&'e Continuation>, InvalidInput> {
    match Continuation::in_map(extensions) {
        Some(earlier) if template.is(&earlier.request) => Ok(Some(earlier)),
        Some(earlier) if earlier.is_bound => Err(InvalidInput::new(
            "extensions",
            "hold the key or deadline of another request",
        )),
        _ => Ok(None),
    }
}

/// The operation's key, and whether it was made here: the caller's own in extension or header, or
/// one under the contract.
fn key(
    method: &Method,
    headers: &HeaderMap,
    extensions: &Extensions,
    settings: &Settings,
) -> Result<(Option<IdempotencyKey>, bool), InvalidInput> {
    let given = extensions.get::<IdempotencyKey>();
    let adopted = settings.key_header().adopt(headers)?;
    match (given, adopted) {
        (Some(given), Some(adopted)) if *given != adopted => Err(InvalidInput::new(
            "idempotency key",
            "differs between header and extension",
        )),
        (Some(given), _) => Ok((Some(given.clone()), false)),
        (None, Some(adopted)) => Ok((Some(adopted), false)),
        (None, None) => {
            let is_wanted = extensions.get() != Some(&Idempotent(false))
                && settings
                    .contract
                    .as_ref()
                    .is_some_and(|contract| contract.covers(method));
            Ok((is_wanted.then(IdempotencyKey::generate), is_wanted))
        }
    }
}

/// RFC 9110 §9.2.1 and §9.2.2 by method; the caller's word and a key come first.
fn replay_class(method: &Method, extensions: &Extensions, has_key: bool) -> ReplayClass {
    match extensions.get::<Idempotent>() {
        Some(Idempotent(false)) => ReplayClass::Unsafe,
        _ if has_key => ReplayClass::Keyed,
        _ if method.is_safe() => ReplayClass::Safe,
        Some(Idempotent(true)) => ReplayClass::Idempotent,
        None if method.is_idempotent() => ReplayClass::Idempotent,
        None => ReplayClass::Unsafe,
    }
}

/// The deadline of an operation whose first send is `now`: the earlier of its own and the ambient one.
pub(crate) fn deadline(
    extensions: &Extensions,
    settings: &Settings,
    around: &Surroundings,
    now: Instant,
) -> Option<Instant> {
    let wished = wished_deadline(extensions, settings);
    let own = wished.and_then(|deadline| deadline.resolve(now));
    [own, around.deadline].into_iter().flatten().min()
}

fn wished_deadline(extensions: &Extensions, settings: &Settings) -> Option<Deadline> {
    extensions.get().copied().or(settings.deadline)
}

/// The client's limits with the request's own on top.
pub(crate) fn limits(extensions: &Extensions, settings: &Settings) -> Result<Limits, InvalidInput> {
    let mut limits = settings.limits;
    if let Some(wished) = extensions.get::<RetryOverride>() {
        wished.apply(&mut limits)?;
    }
    if extensions.get() == Some(&NoRetry) {
        limits.max_attempts = 1;
    }
    Ok(limits)
}
