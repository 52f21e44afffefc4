//! Operations within operations: a layer between that answers an attempt by calls of its own, in the
//! same task. One layer retries, or attempts would multiply.
//!
//! The outermost one does, where its repeat makes the inner operation alike. Where it would make it
//! anew (a POST without a key, or with a key that is made afresh), the inner operation retries by
//! itself, and the outer one does not.

use std::cell::{Cell, RefCell};
use std::ptr;

use http::Extensions;

use crate::load::Limiter;

thread_local! {
    /// The attempt that this thread is polling.
    static POLLED: Cell<Option<Within>> = const { Cell::new(None) };

    /// The limiters that attempts around have permits of, by address: an attempt outlives its poll.
    static HELD: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// An attempt, to the operations made within it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Within {
    /// Its extensions, by address: nobody else has them while it is polled.
    map: usize,
    /// Another attempt may follow it.
    may_be_repeated: bool,
    /// An operation within it has been repeated already, or must not be.
    is_spent: bool,
    /// An operation within it has left its retries to this one.
    is_left: bool,
}

impl Within {
    pub(crate) fn attempt(map: &Extensions, may_be_repeated: bool) -> Self {
        Self {
            map: ptr::from_ref(map).addr(),
            may_be_repeated,
            is_spent: false,
            is_left: false,
        }
    }

    /// Whether no other attempt must follow it.
    pub(crate) fn is_spent(self) -> bool {
        self.is_spent
    }

    /// Whether an operation within it counts on another attempt to follow.
    pub(crate) fn is_left(self) -> bool {
        self.is_left
    }

    /// Polls or drops the attempt.
    pub(crate) fn during<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let outer = POLLED.get();
        let may_be_repeated = outer.is_some_and(|outer| outer.may_be_repeated);
        POLLED.set(Some(Self {
            may_be_repeated: self.may_be_repeated || may_be_repeated,
            ..*self
        }));
        let _outer = PutBack(outer);
        let result = work();
        self.is_spent = POLLED.get().is_some_and(Self::is_spent);
        self.is_left = POLLED.get().is_some_and(Self::is_left);
        result
    }
}

/// Polls an attempt that holds a permit of this limiter.
pub(crate) fn while_holding<T>(limiter: Option<&Limiter>, poll: impl FnOnce() -> T) -> T {
    let Some(limiter) = limiter else {
        return poll();
    };
    HELD.with_borrow_mut(|held| held.push(ptr::from_ref(limiter).addr()));
    let _released = Released;
    poll()
}

/// Whether an attempt around holds a permit of this limiter: to wait for another one could be to wait
/// for itself.
pub(crate) fn is_held(limiter: &Limiter) -> bool {
    HELD.with_borrow(|held| held.contains(&ptr::from_ref(limiter).addr()))
}

/// Takes the limiter off again, also when the poll panics.
struct Released;

impl Drop for Released {
    fn drop(&mut self) {
        HELD.with_borrow_mut(Vec::pop);
    }
}

/// Whether this map is the one of an attempt around: then the layer that asks is a second one on the
/// same stack, and the request in its hands is that attempt.
pub(crate) fn is_map_of_an_attempt(map: &Extensions) -> bool {
    POLLED
        .get()
        .is_some_and(|within| within.map == ptr::from_ref(map).addr())
}

/// Whether what runs now runs within an attempt that another layer of this crate may repeat.
pub(crate) fn is_within_an_attempt() -> bool {
    POLLED.get().is_some_and(|within| within.may_be_repeated)
}

/// An operation has ended that must not be repeated from outside.
pub(crate) fn note_spent() {
    let within = POLLED.get();
    POLLED.set(within.map(|within| Within {
        is_spent: true,
        ..within
    }));
}

/// An operation has ended that would have been repeated, had it not been for the attempt around it.
pub(crate) fn note_left() {
    let within = POLLED.get();
    POLLED.set(within.map(|within| Within {
        is_left: true,
        ..within
    }));
}

/// Puts the outer attempt back, also when the poll panics.
struct PutBack(Option<Within>);

impl Drop for PutBack {
    fn drop(&mut self) {
        POLLED.set(self.0);
    }
}
