//! Settings, checked once.

#[cfg(feature = "metrics")]
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderName, StatusCode};

use crate::classify::{Rules, StatusClass};
use crate::clock::Clock;
use crate::deadline::{Deadline, DeadlineScope};
use crate::invalid::InvalidInput;
use crate::key::KeyContract;
use crate::load::LoadControl;
use crate::middleware::RetryMiddleware;
use crate::observe::RetryObserver;
use crate::policy::{Backoff, Limits, Pacing, RetryBudget, at_least_one, attempt_timeout};
use crate::settings::{self, Settings};
use crate::timeout_header::TimeoutHeader;

/// One send and two repeats: the third repeat of a request that failed three times rarely helps,
/// and every one is load on a service that is failing.
pub(crate) const DEFAULT_MAX_ATTEMPTS: u32 = 3;

/// Longer waits belong to a job queue, not to a caller that waits.
pub(crate) const DEFAULT_MAX_RETRY_AFTER: Duration = Duration::from_secs(60);

/// Sets up a [`RetryMiddleware`].
///
/// Every setting has a default; see the table in the [crate documentation](crate#defaults).
/// `Duration::MAX` means "no limit" wherever a span is asked for.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
/// use reqwest_idempotent_retry::{Backoff, KeyContract, RetryBudget, RetryMiddleware};
///
/// # fn main() -> Result<(), reqwest_idempotent_retry::InvalidInput> {
/// let retry = RetryMiddleware::builder()
///     .max_attempts(3)
///     .attempt_timeout(Duration::from_millis(800))
///     .minimum_attempt(Duration::from_millis(400))
///     .reserve(Duration::from_millis(200))
///     .backoff(Backoff::full_jitter(Duration::from_millis(200), Duration::from_secs(10)))
///     .budget(Arc::new(RetryBudget::default()))
///     .key_contract(KeyContract::default())
///     .build()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct RetryMiddlewareBuilder {
    max_attempts: u32,
    attempt_timeout: Duration,
    minimum_attempt: Duration,
    reserve: Duration,
    deadline: Duration,
    scope: DeadlineScope,
    backoff: Backoff,
    max_retry_after: Duration,
    budget: Budget,
    load: Option<Arc<LoadControl>>,
    contract: Option<KeyContract>,
    rules: Rules,
    buffer_request: Option<usize>,
    buffer_response: Option<usize>,
    send_tracking: bool,
    client_is_prepared: bool,
    attempt_header: Option<HeaderName>,
    max_attempts_header: Option<HeaderName>,
    timeout_header: Option<TimeoutHeader>,
    sidecar_retries: bool,
    observer: Option<Arc<dyn RetryObserver>>,
    #[cfg(feature = "metrics")]
    name: Cow<'static, str>,
    clock: Clock,
}

impl fmt::Debug for RetryMiddlewareBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryMiddlewareBuilder")
            .field("max_attempts", &self.max_attempts)
            .field("attempt_timeout", &self.attempt_timeout)
            .field("minimum_attempt", &self.minimum_attempt)
            .field("reserve", &self.reserve)
            .field("deadline", &self.deadline)
            .field("backoff", &self.backoff)
            .field("max_retry_after", &self.max_retry_after)
            .field("budget", &self.budget)
            .field("load", &self.load)
            .field("contract", &self.contract)
            .field("rules", &self.rules)
            .field("client_is_prepared", &self.client_is_prepared)
            .finish_non_exhaustive()
    }
}

#[derive(Clone, Debug)]
enum Budget {
    /// That of the operation's key where there is load control, otherwise one of its own for each
    /// middleware that is built.
    Own,
    Shared(Arc<RetryBudget>),
    None,
}

impl Default for RetryMiddlewareBuilder {
    fn default() -> Self {
        Self {
            max_attempts: DEFAULT_MAX_ATTEMPTS,
            attempt_timeout: Duration::MAX,
            minimum_attempt: Duration::ZERO,
            reserve: Duration::ZERO,
            deadline: Duration::MAX,
            scope: DeadlineScope::default(),
            backoff: Backoff::default(),
            max_retry_after: DEFAULT_MAX_RETRY_AFTER,
            budget: Budget::Own,
            load: None,
            contract: None,
            rules: Rules::default(),
            buffer_request: None,
            buffer_response: None,
            send_tracking: true,
            client_is_prepared: false,
            attempt_header: None,
            max_attempts_header: None,
            timeout_header: None,
            sidecar_retries: true,
            observer: None,
            #[cfg(feature = "metrics")]
            name: Cow::Borrowed("default"),
            clock: Clock::default(),
        }
    }
}

impl RetryMiddlewareBuilder {
    /// At most so many attempts, the first one included. Default 3.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = attempts;
        self
    }

    /// The longest an attempt may take to its response head, clipped to the time left.
    /// Default: no limit. Set one: without it a silent server holds the first attempt until the
    /// deadline, and nothing is ever retried.
    pub fn attempt_timeout(mut self, timeout: Duration) -> Self {
        self.attempt_timeout = timeout;
        self
    }

    /// The least time that an attempt is worth starting with. With less left before the deadline
    /// none is started. Default 0, which is taken as 1 ms.
    pub fn minimum_attempt(mut self, least: Duration) -> Self {
        self.minimum_attempt = least;
        self
    }

    /// Time kept free before the deadline, for cleaning up or looking the outcome up. Limits
    /// attempts, not the reading of the body. Default 0.
    pub fn reserve(mut self, reserve: Duration) -> Self {
        self.reserve = reserve;
        self
    }

    /// The deadline of operations that bring none of their own ([`Deadline`]). Default: none, since
    /// an added layer must not cut a healthy download.
    pub fn deadline(mut self, after_first_send: Duration) -> Self {
        self.deadline = after_first_send;
        self
    }

    /// What a deadline covers. Default: up to the end of the response body.
    pub fn deadline_scope(mut self, scope: DeadlineScope) -> Self {
        self.scope = scope;
        self
    }

    /// The wait before each retry. Default: full jitter, base 200 ms, cap 10 s.
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = backoff;
        self
    }

    /// The longest `Retry-After` that is waited out; a longer one ends the operation with the
    /// answer in hand. Default 60 s.
    pub fn max_retry_after(mut self, longest: Duration) -> Self {
        self.max_retry_after = longest;
        self
    }

    /// The one budget that all retries are paid from. Give the same `Arc` to every client of a service.
    /// Default: the budget of each operation's key in [`load_control`](Self::load_control), or without
    /// that one of its own, [`RetryBudget::default`].
    pub fn budget(mut self, budget: Arc<RetryBudget>) -> Self {
        self.budget = Budget::Shared(budget);
        self
    }

    /// Retries are bounded by attempts and deadline only.
    pub fn without_budget(mut self) -> Self {
        self.budget = Budget::None;
        self
    }

    /// What operations share host by host: budget, pushback, breaker, concurrency limit. Give the same
    /// `Arc` to all clients. Default: none.
    pub fn load_control(mut self, load: Arc<LoadControl>) -> Self {
        self.load = Some(load);
        self
    }

    /// The API honours idempotency keys, in this way: operations without one get one. Default: no
    /// contract, and no key is made.
    pub fn key_contract(mut self, contract: KeyContract) -> Self {
        self.contract = Some(contract);
        self
    }

    /// The statuses that a repeat may change. Default 408, 425, 429, 502, 503, 504.
    ///
    /// A status alone never makes an operation repeatable that is neither idempotent nor keyed: a
    /// 503 may follow a commit.
    pub fn retryable_statuses(mut self, statuses: impl IntoIterator<Item = StatusCode>) -> Self {
        self.rules.retryable = statuses.into_iter().collect();
        self
    }

    /// Statuses by which this API says that it has done no work, so that any operation may be sent
    /// again. Default: none. Needs [`client_is_prepared`](Self::client_is_prepared).
    pub fn refused_before_work(mut self, statuses: impl IntoIterator<Item = StatusCode>) -> Self {
        self.rules.refused_before_work = statuses.into_iter().collect();
        self
    }

    /// Reads statuses and headers in your own way, where it returns something; the settings above
    /// decide the rest.
    ///
    /// ```
    /// use reqwest_idempotent_retry::{RetryMiddleware, StatusClass};
    ///
    /// let retry = RetryMiddleware::builder().classify(|status, headers| {
    ///     let quota = status == 429 && headers.contains_key("x-quota-used-up");
    ///     quota.then_some(StatusClass::Final)
    /// });
    /// ```
    pub fn classify(
        mut self,
        hook: impl Fn(StatusCode, &HeaderMap) -> Option<StatusClass> + Send + Sync + 'static,
    ) -> Self {
        self.rules.hook = Some(Arc::new(hook));
        self
    }

    /// Whether 409 and 423 after an own attempt with an unknown outcome mean "still running": wait,
    /// and ask again with the same key. Default: no.
    pub fn wait_for_conflict(mut self, wait: bool) -> Self {
        self.rules.wait_for_conflict = wait;
        self
    }

    /// Headers that give the wait in milliseconds; the first that holds a number wins over
    /// `Retry-After`. Default: none. Common ones are `retry-after-ms` and `x-ms-retry-after-ms`.
    pub fn retry_after_ms_headers(mut self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.rules.retry_after_ms = names.into_iter().collect();
        self
    }

    /// A header by which the server decides: `false` ends the operation; `true` makes a failure
    /// status retryable, but never an operation that is not safe to repeat. Default: none. Common
    /// ones are `x-should-retry` and `stripe-should-retry`.
    pub fn veto_header(mut self, name: HeaderName) -> Self {
        self.rules.veto = Some(name);
        self
    }

    /// Headers by which a server, or a proxy before it, asks not to be called again for this request:
    /// any value but `false` and `0` ends the operation with
    /// [`ServerVeto`](crate::StopReason::ServerVeto). Default: none. `x-envoy-overloaded` is one; a
    /// service of your own that has used up its retries further down can send another.
    pub fn no_retry_headers(mut self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.rules.no_retry = names.into_iter().collect();
        self
    }

    /// Sends the number of the attempt in this header, `1` for the first, so that a server can tell
    /// repeats and refuse those first. Default: none. Common ones are `x-envoy-attempt-count` and
    /// `x-retry-attempt`.
    pub fn attempt_header(mut self, name: HeaderName) -> Self {
        self.attempt_header = Some(name);
        self
    }

    /// Sends the most attempts that the operation may have in this header. Default: none.
    pub fn max_attempts_header(mut self, name: HeaderName) -> Self {
        self.max_attempts_header = Some(name);
        self
    }

    /// Sends the time that the attempt may still take, so that a server need not work for a caller who
    /// has gone. Relative, rounded down, and written at the moment of each attempt: what is left of the
    /// deadline, or of the attempt timeout if that is less. Replaces the caller's own header of that
    /// name. Default: none; without deadline and attempt timeout nothing is sent.
    ///
    /// A redirect that reqwest follows below all layers carries the first value on.
    pub fn timeout_header(mut self, header: TimeoutHeader) -> Self {
        self.timeout_header = Some(header);
        self
    }

    /// Who is told of every attempt, wait and end. Default: nobody but `tracing`.
    pub fn observer(mut self, observer: Arc<dyn RetryObserver>) -> Self {
        self.observer = Some(observer);
        self
    }

    /// What this client is called in metrics: the label `client`. Default: `default`.
    #[cfg(feature = "metrics")]
    pub fn name(mut self, name: impl Into<Cow<'static, str>>) -> Self {
        self.name = name.into();
        self
    }

    /// Whether a sidecar may repeat requests by itself. `false` asks it not to, by
    /// `x-envoy-max-retries: 0`; a header of your own is left as it is. Default: yes, nothing is sent.
    ///
    /// [Envoy](https://www.envoyproxy.io/docs/envoy/latest/configuration/http/http_filters/router_filter#x-envoy-max-retries)
    /// heeds it only from callers it trusts, and **since 1.33 it trusts nobody by default**: its listener
    /// needs `use_remote_address: true` and an `internal_address_config` with the caller's address.
    /// Anywhere else it takes the header away and goes on repeating: switch retries off in its
    /// configuration there.
    pub fn sidecar_retries(mut self, allowed: bool) -> Self {
        self.sidecar_retries = allowed;
        self
    }

    /// Reads a streamed request body of at most so many bytes before the first attempt, so that it can
    /// be sent again. A longer one is sent once, each byte once, as it comes. Default: streams are
    /// not read ahead, and are sent once. A [`BodyFactory`](crate::BodyFactory) needs no memory.
    ///
    /// Nothing is read ahead where only one attempt is allowed.
    pub fn buffer_request(mut self, bytes: usize) -> Self {
        self.buffer_request = Some(bytes);
        self
    }

    /// Reads the body of an answer of at most so many bytes within the attempt, and within its time
    /// limit, so that an operation that may be repeated is repeated when it breaks off or stalls. A
    /// longer body is handed on as it comes. Default: the answer is handed on at its head.
    pub fn buffer_response(mut self, bytes: usize) -> Self {
        self.buffer_response = Some(bytes);
        self
    }

    /// Whether requests that may have an effect are watched as they leave, so that a failure before
    /// the first byte is known for one ("never sent"). Default: yes.
    ///
    /// A tracked body cannot be copied by layers below: those that read or repeat bodies belong
    /// outside of this one.
    pub fn send_tracking(mut self, track: bool) -> Self {
        self.send_tracking = track;
        self
    }

    /// Your word that the client below was made with [`RetryMiddleware::prepare`], or follows no
    /// redirects. Default: no.
    ///
    /// A redirect may lead back to the same URL, where nothing in an answer or error shows that it
    /// was followed. Only with this word are a refusal by status, 425 and HTTP/2 refusals taken for
    /// "not processed", and so enough to repeat an operation that has neither key nor an idempotent
    /// method.
    ///
    /// It is also your word that no layer below repeats requests or sends others in their place.
    pub fn client_is_prepared(mut self, prepared: bool) -> Self {
        self.client_is_prepared = prepared;
        self
    }

    /// Where random draws from `[0, 1)` come from, for tests that need the same waits every time.
    pub fn random_with(mut self, draw: impl Fn() -> f64 + Send + Sync + 'static) -> Self {
        self.clock.random = Some(Arc::new(draw));
        self
    }

    /// What the wall clock says, for tests of `Retry-After` dates in answers without a `Date`.
    pub fn wall_clock_with(mut self, now: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        self.clock.wall = Some(Arc::new(now));
        self
    }

    /// # Errors
    ///
    /// Names the setting that cannot be used: no attempts, a zero attempt timeout, a backoff whose
    /// base is over its cap or whose jitter or factor is out of range, a reserve and minimum that
    /// can never fit the deadline, or statuses that need a prepared client without one.
    pub fn build(self) -> Result<RetryMiddleware, InvalidInput> {
        let limits = Limits {
            max_attempts: at_least_one(self.max_attempts)?,
            attempt_timeout: attempt_timeout(self.attempt_timeout)?,
            minimum_attempt: self.minimum_attempt,
            reserve: self.reserve,
        };
        self.backoff.validate()?;
        let deadline = Some(self.deadline).filter(|&deadline| deadline != Duration::MAX);
        if let Some(deadline) = deadline {
            limits.validate(deadline)?;
        }
        if !self.rules.refused_before_work.is_empty() && !self.client_is_prepared {
            return Err(InvalidInput::new(
                "refused_before_work",
                "needs client_is_prepared(true): a redirect could hide whose answer it is",
            ));
        }
        Ok(RetryMiddleware::with(Settings {
            limits,
            pacing: Pacing {
                backoff: self.backoff,
                max_retry_after: self.max_retry_after,
            },
            deadline: deadline.map(Deadline::after),
            scope: self.scope,
            budget: match self.budget {
                Budget::Own if self.load.is_some() => settings::Budget::OfKey,
                Budget::Own => settings::Budget::One(Arc::default()),
                Budget::Shared(budget) => settings::Budget::One(budget),
                Budget::None => settings::Budget::None,
            },
            load: self.load,
            contract: self.contract,
            rules: self.rules,
            buffer_request: self.buffer_request,
            buffer_response: self.buffer_response,
            send_tracking: self.send_tracking,
            client_is_prepared: self.client_is_prepared,
            attempt_header: self.attempt_header,
            max_attempts_header: self.max_attempts_header,
            timeout_header: self.timeout_header,
            sidecar_retries: self.sidecar_retries,
            observer: self.observer,
            #[cfg(feature = "metrics")]
            name: self.name,
            clock: self.clock,
            bare: KeyContract::default(),
        }))
    }
}
