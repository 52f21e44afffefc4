//! The shared allowance of retries.

mod bucket;
mod window;

use std::time::{Duration, Instant};

use self::bucket::TokenBucket;
use self::window::SlidingWindow;
use crate::invalid::InvalidInput;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard, PoisonError};

/// Shared tokens: every retry of every operation spends one, well answered operations earn them.
///
/// Put one behind an `Arc` and give it to every client that calls the same service.
///
/// # Why a budget, and not only a number of attempts?
///
/// *Three attempts* is a promise to one caller. To a service that is failing it means three times
/// the load, from every caller, at the moment it can bear least. A budget bounds the sum: with
/// 100 tokens, 1,000 operations against a dead server send 1,100 requests, not 3,000.
///
/// # Why earn on success?
///
/// A budget that earns per *request* keeps paying through an outage, and so helps to keep it going.
/// One that earns per *success* runs dry during an outage, and fills again as the service recovers.
/// The first send of an operation is never refused by a budget.
///
/// # Kinds
///
/// | constructor | allows |
/// |---|---|
/// | [`RetryBudget::default`] | 10 at once, then a tenth of the successes, and one a minute for quiet clients |
/// | [`RetryBudget::builder`] | the same with your own figures |
/// | [`RetryBudget::fixed`] | so many and no more |
/// | [`RetryBudget::window`] | a share of the operations of the last seconds, plus a reserve per second |
///
/// Balances are exact under any number of threads, never below zero and never above the burst. A
/// token is taken before the wait and comes back if the attempt is not started: when the deadline
/// forbids it, on cancellation, and when the future is dropped.
///
/// ```
/// use std::sync::Arc;
/// use reqwest_idempotent_retry::{RetryBudget, RetryMiddleware};
///
/// # fn main() -> Result<(), reqwest_idempotent_retry::InvalidInput> {
/// let budget = Arc::new(RetryBudget::builder().ratio(0.1).burst(20).build()?);
/// let orders = RetryMiddleware::builder().budget(budget.clone()).build()?;
/// let payments = RetryMiddleware::builder().budget(budget).build()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct RetryBudget {
    ledger: Ledger,
    given: AtomicU64,
    returned: AtomicU64,
    refused: AtomicU64,
}

#[derive(Debug)]
enum Ledger {
    Bucket(TokenBucket),
    Window(Mutex<SlidingWindow>),
}

/// Tokens earned per success: one retry for ten successes keeps the extra load at most 10 %.
const DEFAULT_RATIO: f64 = 0.1;

/// Tokens held at most: enough for a blip, too few to matter in an outage.
const DEFAULT_BURST: u32 = 10;

/// One token in this time, so that a client with few successes is not starved for ever.
const DEFAULT_TRICKLE: Duration = Duration::from_secs(60);

impl Default for RetryBudget {
    /// Ratio 0.1, burst 10, full at the start, one token a minute.
    fn default() -> Self {
        Self::from(TokenBucket::earning(
            DEFAULT_RATIO,
            DEFAULT_BURST,
            DEFAULT_BURST,
            Some(DEFAULT_TRICKLE),
        ))
    }
}

impl From<TokenBucket> for RetryBudget {
    fn from(bucket: TokenBucket) -> Self {
        Self::with(Ledger::Bucket(bucket))
    }
}

impl RetryBudget {
    /// A budget that earns per success, with your own figures.
    pub fn builder() -> RetryBudgetBuilder {
        RetryBudgetBuilder::default()
    }

    /// Exactly `tokens` retries, and none after them.
    #[must_use]
    pub fn fixed(tokens: u32) -> Self {
        Self::from(TokenBucket::fixed(tokens))
    }

    /// Retries up to `ratio` of the operations begun in the last `span`, plus `per_second` for each
    /// second of it. The operation that asks counts itself, so `ratio` 1 always allows one retry
    /// for each.
    ///
    /// Exact to the millisecond; holds a mutex for the length of a count.
    ///
    /// # Errors
    ///
    /// When `ratio` is not a number from 0 to 1, or `span` is under 1 s or over an hour.
    pub fn window(ratio: f64, per_second: u32, span: Duration) -> Result<Self, InvalidInput> {
        if !(0.0..=1.0).contains(&ratio) {
            return Err(InvalidInput::new(
                "budget.ratio",
                "must be a number from 0 to 1",
            ));
        }
        if !(Duration::from_secs(1)..=Duration::from_secs(3600)).contains(&span) {
            return Err(InvalidInput::new(
                "budget.span",
                "must be from one second to one hour",
            ));
        }
        let window = SlidingWindow::new(ratio, per_second, span);
        Ok(Self::with(Ledger::Window(Mutex::new(window))))
    }

    fn with(ledger: Ledger) -> Self {
        Self {
            ledger,
            given: AtomicU64::new(0),
            returned: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }
    }

    /// Another one with the same settings, as it is at the start.
    pub(crate) fn another(&self) -> Self {
        Self::with(match &self.ledger {
            Ledger::Bucket(bucket) => Ledger::Bucket(bucket.another()),
            Ledger::Window(window) => Ledger::Window(Mutex::new(lock(window).another())),
        })
    }

    /// The retries that could be started now, as of the last operation that used this budget:
    /// tokens in the bucket with their fraction, or whole retries still free in the window.
    #[must_use]
    pub fn balance(&self) -> f64 {
        match &self.ledger {
            Ledger::Bucket(bucket) => bucket.balance(),
            Ledger::Window(window) => lock(window).balance(),
        }
    }

    /// Figures for a dashboard or a log.
    #[must_use]
    pub fn snapshot(&self) -> BudgetSnapshot {
        BudgetSnapshot {
            balance: self.balance(),
            given: self.given.load(Ordering::Relaxed),
            returned: self.returned.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
        }
    }

    /// An operation begins.
    pub(super) fn begin(&self, now: Instant, counted: &mut Counted) {
        if let Ledger::Window(window) = &self.ledger {
            lock(window).count(now, counted);
        }
    }

    /// Takes a token, if there is one.
    pub(super) fn reserve(&self, now: Instant, counted: &mut Counted) -> Option<Reservation<'_>> {
        let is_taken = match &self.ledger {
            Ledger::Bucket(bucket) => bucket.take(now),
            Ledger::Window(window) => lock(window).reserve(now, counted),
        };
        let count = match is_taken {
            true => &self.given,
            false => &self.refused,
        };
        count.fetch_add(1, Ordering::Relaxed);
        is_taken.then(|| Reservation { budget: Some(self) })
    }

    /// An operation was well answered.
    pub(crate) fn earn(&self, now: Instant) {
        if let Ledger::Bucket(bucket) = &self.ledger {
            bucket.earn(now);
        }
    }

    /// A reserved retry is sent.
    fn spend(&self, now: Instant) {
        if let Ledger::Window(window) = &self.ledger {
            lock(window).spend(now);
        }
    }

    fn give_back(&self) {
        self.returned.fetch_add(1, Ordering::Relaxed);
        match &self.ledger {
            Ledger::Bucket(bucket) => bucket.give_back(),
            Ledger::Window(window) => lock(window).give_back(),
        }
    }
}

/// Figures of a [`RetryBudget`] at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BudgetSnapshot {
    balance: f64,
    given: u64,
    returned: u64,
    refused: u64,
}

impl BudgetSnapshot {
    /// As [`RetryBudget::balance`].
    #[must_use]
    pub fn balance(&self) -> f64 {
        self.balance
    }

    /// Tokens given out for retries so far.
    #[must_use]
    pub fn given(&self) -> u64 {
        self.given
    }

    /// Those of them that came back unused: the retry was not sent.
    #[must_use]
    pub fn returned(&self) -> u64 {
        self.returned
    }

    /// Retries refused for want of a token.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }
}

/// A panic elsewhere must not take the budget with it: every update leaves whole figures behind.
fn lock(window: &Mutex<SlidingWindow>) -> MutexGuard<'_, SlidingWindow> {
    window.lock().unwrap_or_else(PoisonError::into_inner)
}

/// When an operation was last counted in the window, in its milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counted(Option<u64>);

/// A token taken for one attempt. Dropped, it goes back; [`spend`](Self::spend) keeps it.
#[derive(Debug)]
#[must_use = "a reservation that is dropped goes back to the budget"]
pub(crate) struct Reservation<'b> {
    budget: Option<&'b RetryBudget>,
}

impl Reservation<'_> {
    /// Where no budget is configured.
    pub(super) fn unlimited() -> Self {
        Self { budget: None }
    }

    /// The attempt starts: its token is gone.
    pub(crate) fn spend(mut self, now: Instant) {
        if let Some(budget) = self.budget.take() {
            budget.spend(now);
        }
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if let Some(budget) = self.budget {
            budget.give_back();
        }
    }
}

/// Figures for a [`RetryBudget`] that earns per success.
#[derive(Clone, Debug)]
#[must_use]
pub struct RetryBudgetBuilder {
    ratio: f64,
    burst: u32,
    initial: Option<u32>,
    trickle: Option<Duration>,
}

impl Default for RetryBudgetBuilder {
    fn default() -> Self {
        Self {
            ratio: DEFAULT_RATIO,
            burst: DEFAULT_BURST,
            initial: None,
            trickle: Some(DEFAULT_TRICKLE),
        }
    }
}

impl RetryBudgetBuilder {
    /// Tokens earned per operation answered below 500 and not retryable, from 0 to 1; kept to four
    /// decimals. Default 0.1.
    pub fn ratio(mut self, tokens: f64) -> Self {
        self.ratio = tokens;
        self
    }

    /// Tokens held at most, up to 400,000. Default 10.
    pub fn burst(mut self, tokens: u32) -> Self {
        self.burst = tokens;
        self
    }

    /// Tokens at the start. Default: full.
    pub fn initial(mut self, tokens: u32) -> Self {
        self.initial = Some(tokens);
        self
    }

    /// One more token in each such span, whether anything succeeds or not; at least 1 ms. Zero and
    /// `Duration::MAX` turn it off. Default: one a minute.
    pub fn trickle(mut self, every: Duration) -> Self {
        self.trickle =
            Some(every).filter(|every| !matches!(*every, Duration::ZERO | Duration::MAX));
        self
    }

    /// # Errors
    ///
    /// When the ratio is not a number from 0 to 1, the burst is over its limit, the initial balance
    /// is over the burst, or the trickle is under 1 ms.
    pub fn build(self) -> Result<RetryBudget, InvalidInput> {
        let initial = self.initial.unwrap_or(self.burst);
        let invalid = |field, problem| Err(InvalidInput::new(field, problem));
        if !(0.0..=1.0).contains(&self.ratio) {
            return invalid("budget.ratio", "must be a number from 0 to 1");
        }
        if self.burst > bucket::LARGEST_BURST {
            return invalid("budget.burst", "is over 400,000");
        }
        if initial > self.burst {
            return invalid("budget.initial", "is over the burst");
        }
        if self
            .trickle
            .is_some_and(|every| every < bucket::SHORTEST_TRICKLE)
        {
            return invalid("budget.trickle", "is under one millisecond");
        }
        Ok(RetryBudget::from(TokenBucket::earning(
            self.ratio,
            self.burst,
            initial,
            self.trickle,
        )))
    }
}
