//! A token bucket in one atomic word: balance and trickle mark change together or not at all.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::sync::atomic::{AtomicU64, Ordering};

/// Parts of a token that an earning bucket counts in: fractions of four decimals are exact.
const PARTS: u32 = 10_000;

/// `LARGEST_BURST · PARTS` fits the 32 bits of a balance.
pub(super) const LARGEST_BURST: u32 = 400_000;

/// A tick of the trickle. Their count wraps after 2³² of them, at 1 ms after 49 days without any
/// use; what was due from before the wrap is then lost, which a full bucket does not notice.
pub(super) const SHORTEST_TRICKLE: Duration = Duration::from_millis(1);

/// Ticks by which a thread's clock reading may be older than the last update: 17 minutes at 1 ms.
const TICKS_BEHIND: u32 = 1 << 20;

#[derive(Debug)]
pub(super) struct TokenBucket {
    word: AtomicU64,
    /// What one token is in the units of the balance.
    token: u32,
    /// What one success earns, in the same units.
    earned: u32,
    /// The most that is held, in the same units.
    capacity: u32,
    /// What is held at the start, in the same units.
    initial: u32,
    trickle: Option<Trickle>,
}

#[derive(Debug)]
struct Trickle {
    every: Duration,
    /// The first instant this bucket was used at: ticks are counted from it.
    origin: OnceLock<Instant>,
}

/// The two halves of the word.
#[derive(Clone, Copy)]
struct State {
    balance: u32,
    /// The tick up to which the trickle has been paid.
    tick: u32,
}

impl TokenBucket {
    pub(super) fn fixed(tokens: u32) -> Self {
        Self::new(1, 0, tokens, tokens, None)
    }

    /// The figures have been checked: `ratio` in `[0, 1]`, `initial <= burst <= LARGEST_BURST`.
    pub(super) fn earning(ratio: f64, burst: u32, initial: u32, trickle: Option<Duration>) -> Self {
        Self::new(PARTS, parts(ratio), burst * PARTS, initial * PARTS, trickle)
    }

    fn new(
        token: u32,
        earned: u32,
        capacity: u32,
        initial: u32,
        trickle: Option<Duration>,
    ) -> Self {
        let first = State {
            balance: initial,
            tick: 0,
        };
        Self {
            word: AtomicU64::new(first.pack()),
            token,
            earned,
            capacity,
            initial,
            trickle: trickle.map(|every| Trickle {
                every,
                origin: OnceLock::new(),
            }),
        }
    }

    /// Another one with the same figures, as it is at the start.
    pub(super) fn another(&self) -> Self {
        let trickle = self.trickle.as_ref().map(|trickle| trickle.every);
        Self::new(
            self.token,
            self.earned,
            self.capacity,
            self.initial,
            trickle,
        )
    }

    pub(super) fn balance(&self) -> f64 {
        let state = State::unpack(self.word.load(Ordering::Relaxed));
        f64::from(state.balance) / f64::from(self.token)
    }

    pub(super) fn take(&self, now: Instant) -> bool {
        self.update(Some(now), |balance| balance.checked_sub(self.token))
    }

    pub(super) fn earn(&self, now: Instant) {
        if self.earned == 0 && self.trickle.is_none() {
            return;
        }
        self.update(Some(now), |balance| Some(self.held(balance, self.earned)));
    }

    pub(super) fn give_back(&self) {
        self.update(None, |balance| Some(self.held(balance, self.token)));
    }

    fn held(&self, balance: u32, more: u32) -> u32 {
        balance.saturating_add(more).min(self.capacity)
    }

    /// Pays the trickle, then applies `change`; both or neither. The word stands alone, so no
    /// ordering with other memory is needed. What changes nothing writes nothing: to earn in a bucket that
    /// is full keeps no other thread waiting.
    fn update(&self, now: Option<Instant>, change: impl Fn(u32) -> Option<u32>) -> bool {
        let tick = now.and_then(|now| self.tick(now));
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            let state = self.trickled(State::unpack(word), tick);
            let Some(balance) = change(state.balance) else {
                return false;
            };
            let changed = State { balance, ..state }.pack();
            if changed == word {
                return true;
            }
            let swapped = self.word.compare_exchange_weak(
                word,
                changed,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
            match swapped {
                Ok(_) => return true,
                Err(meanwhile) => word = meanwhile,
            }
        }
    }

    /// The whole trickle spans since the first use, wrapping.
    fn tick(&self, now: Instant) -> Option<u32> {
        let trickle = self.trickle.as_ref()?;
        let origin = *trickle.origin.get_or_init(|| now);
        let spans = now.saturating_duration_since(origin).as_nanos() / trickle.every.as_nanos();
        Some((spans & u128::from(u32::MAX)) as u32)
    }

    /// A thread that read the clock earlier than the last update finds its tick behind the mark:
    /// then nothing is due.
    fn trickled(&self, state: State, tick: Option<u32>) -> State {
        let Some(tick) = tick else { return state };
        let due = tick.wrapping_sub(state.tick);
        if due > u32::MAX - TICKS_BEHIND {
            return state;
        }
        State {
            balance: self.held(state.balance, due.saturating_mul(self.token)),
            tick,
        }
    }
}

impl State {
    fn pack(self) -> u64 {
        u64::from(self.tick) << 32 | u64::from(self.balance)
    }

    fn unpack(word: u64) -> Self {
        Self {
            balance: (word & u64::from(u32::MAX)) as u32,
            tick: (word >> 32) as u32,
        }
    }
}

/// A share from 0 to 1 in parts, rounded to the nearest.
pub(super) fn parts(ratio: f64) -> u32 {
    (ratio * f64::from(PARTS)).round() as u32
}

/// What [`parts`] counts in.
pub(super) const WHOLE: u32 = PARTS;
