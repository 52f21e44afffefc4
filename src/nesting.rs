//! Operations within operations: a layer between that answers an attempt by calls of its own, in the
//! same task. Only the outermost operation retries, or attempts would multiply.

use std::cell::Cell;

thread_local! {
    /// This thread is polling an attempt of an operation that may make another one.
    static IN_AN_ATTEMPT: Cell<bool> = const { Cell::new(false) };
}

/// Whether what runs now runs within an attempt that another layer of this crate would repeat.
pub(crate) fn is_within_an_attempt() -> bool {
    IN_AN_ATTEMPT.get()
}

/// Polls an attempt. `may_be_repeated`: another one may follow it.
pub(crate) fn while_polling<T>(may_be_repeated: bool, poll: impl FnOnce() -> T) -> T {
    let _outer = Outer(IN_AN_ATTEMPT.replace(may_be_repeated || IN_AN_ATTEMPT.get()));
    poll()
}

/// Puts the outer state back, also when the poll panics.
struct Outer(bool);

impl Drop for Outer {
    fn drop(&mut self) {
        IN_AN_ATTEMPT.set(self.0);
    }
}
