//! Operations within operations: a layer between that answers an attempt by calls of its own, in the
//! same task. One layer retries, or attempts would multiply.
//!
//! The outermost one does, where its repeat makes the inner operation alike. Where it would make it
//! anew (a POST without a key, or with a key that is made afresh), the inner operation retries by
//! itself, and the outer one does not.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use http::Extensions;

use crate::load::Limiter;
use crate::policy::CircuitBreaker;

/// The number of the next attempt.
static NEXT: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The attempt that this thread is polling.
    static POLLED: Cell<Option<Within>> = const { Cell::new(None) };

    /// What attempts around have permits of, by address: an attempt outlives its poll.
    static HELD: RefCell<Vec<Holding>> = const { RefCell::new(Vec::new()) };
}

/// An attempt, to the operations made within it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Within {
    /// Tells it from all others: an operation may end within another attempt than it began in.
    number: u64,
    /// Its extensions, by address: nobody else has them while it is polled.
    map: usize,
    /// Another attempt may follow it.
    may_be_repeated: bool,
    /// An operation within it has been repeated already, or must not be.
    is_spent: bool,
    /// A repeat could have the effect of an operation within it a second time.
    may_be_doubled: bool,
    /// An operation within it has left its retries to this one.
    is_left: bool,
}

impl Within {
    pub(crate) fn attempt(map: &Extensions, may_be_repeated: bool) -> Self {
        Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            map: ptr::from_ref(map).addr(),
            may_be_repeated,
            is_spent: false,
            may_be_doubled: false,
            is_left: false,
        }
    }

    /// Whether no other attempt must follow it.
    pub(crate) fn is_spent(self) -> bool {
        self.is_spent
    }

    /// Whether another attempt could have an effect a second time.
    pub(crate) fn may_be_doubled(self) -> bool {
        self.may_be_doubled
    }

    /// Whether an operation within it counts on another attempt to follow.
    pub(crate) fn is_left(self) -> bool {
        self.is_left
    }

    /// The attempt is polled, or dropped.
    pub(crate) fn enter(&mut self) -> Entered<'_> {
        let outer = POLLED.get();
        let may_be_repeated = outer.is_some_and(|outer| outer.may_be_repeated);
        POLLED.set(Some(Self {
            may_be_repeated: self.may_be_repeated || may_be_repeated,
            ..*self
        }));
        Entered {
            within: self,
            outer,
        }
    }
}

/// While it is there, what runs on this thread runs within an attempt.
pub(crate) struct Entered<'w> {
    within: &'w mut Within,
    outer: Option<Within>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(noted) = POLLED.replace(self.outer) {
            self.within.is_spent = noted.is_spent;
            self.within.may_be_doubled = noted.may_be_doubled;
            self.within.is_left = noted.is_left;
        }
    }
}

/// What an attempt has permits of, by address.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Holding {
    limiter: Option<NonZeroUsize>,
    breaker: Option<NonZeroUsize>,
}

impl Holding {
    pub(crate) fn of(limiter: Option<&Limiter>, breaker: Option<&CircuitBreaker>) -> Self {
        Self {
            limiter: limiter.map(address),
            breaker: breaker.map(address),
        }
    }

    /// The attempt is polled.
    pub(crate) fn enter(self) -> Option<Held> {
        if self == Self::default() {
            return None;
        }
        HELD.with_borrow_mut(|held| held.push(self));
        Some(Held)
    }
}

/// While it is there, what runs on this thread runs within an attempt that holds permits.
pub(crate) struct Held;

impl Drop for Held {
    fn drop(&mut self) {
        HELD.with_borrow_mut(Vec::pop);
    }
}

/// Runs what an attempt does before its run.
pub(crate) fn holding<F: Future + Unpin>(
    holding: Holding,
    mut work: F,
) -> impl Future<Output = F::Output> {
    poll_fn(move |task| {
        let _held = holding.enter();
        Pin::new(&mut work).poll(task)
    })
}

/// Whether an attempt around is this half-open breaker's probe: what is made within it is part of it.
pub(crate) fn is_probe_of(breaker: &CircuitBreaker) -> bool {
    let breaker = Some(address(breaker));
    HELD.with_borrow(|held| held.iter().any(|held| held.breaker == breaker))
}

/// Whether an attempt around holds a permit of this limiter: to wait for another one could be to wait
/// for itself.
pub(crate) fn is_held(limiter: &Limiter) -> bool {
    let limiter = Some(address(limiter));
    HELD.with_borrow(|held| held.iter().any(|held| held.limiter == limiter))
}

fn address<T>(of: &T) -> NonZeroUsize {
    NonNull::from(of).addr()
}

/// Whether this map is the one of an attempt around.
pub(crate) fn is_map_of_an_attempt(map: &Extensions) -> bool {
    POLLED
        .get()
        .is_some_and(|within| within.map == ptr::from_ref(map).addr())
}

/// Whether what runs now runs within an attempt that another layer of this crate may repeat.
pub(crate) fn is_within_an_attempt() -> bool {
    POLLED.get().is_some_and(|within| within.may_be_repeated)
}

/// The attempt that what runs now runs within.
pub(crate) fn attempt_around() -> Option<u64> {
    POLLED.get().map(|within| within.number)
}

/// An operation has ended that began within this attempt, and must not be repeated from outside.
/// `may_be_doubled`: a repeat could have its effect a second time.
pub(crate) fn note_spent(around: Option<u64>, may_be_doubled: bool) {
    note(around, |within| Within {
        is_spent: true,
        may_be_doubled: within.may_be_doubled || may_be_doubled,
        ..within
    });
}

/// An operation has ended that would have been repeated, had it not been for this attempt around it.
pub(crate) fn note_left(around: Option<u64>) {
    note(around, |within| Within {
        is_left: true,
        ..within
    });
}

fn note(around: Option<u64>, change: impl FnOnce(Within) -> Within) {
    if let Some(within) = POLLED.get().filter(|within| Some(within.number) == around) {
        POLLED.set(Some(change(within)));
    }
}
