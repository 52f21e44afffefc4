//! A host's wishes, all of them kept.

use super::Nanos;

const HOUR: Nanos = 3_600_000_000_000;

#[derive(Default)]
pub(in crate::policy::tests) struct NaivePushback {
    /// When each was told, and the wait that it was told.
    wishes: Vec<(Nanos, Nanos)>,
}

impl NaivePushback {
    pub(super) fn note(&mut self, now: Nanos, wait: Nanos) {
        self.wishes.push((now, wait));
    }

    pub(in crate::policy::tests) fn remaining(&self, now: Nanos) -> Nanos {
        let ends = self
            .wishes
            .iter()
            .map(|(told, wait)| told + wait.min(&HOUR));
        ends.map(|end| end - now).max().unwrap_or(0).max(0)
    }
}
