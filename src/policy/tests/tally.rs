//! How often each branch of the rules was taken.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::plan::{Curve, Fuse, Plan, Purse};
use crate::policy::FirstSends;

/// How often each branch must have been taken for a run to prove anything.
const ENOUGH: u32 = 100;

#[derive(Default)]
pub(super) struct Tally(RefCell<BTreeMap<String, u32>>);

impl Tally {
    pub(super) fn count(&self, branch: &str) {
        let mut counts = self.0.borrow_mut();
        match counts.get_mut(branch) {
            Some(count) => *count += 1,
            None => {
                counts.insert(branch.to_owned(), 1);
            }
        }
    }

    pub(super) fn count_if(&self, condition: bool, branch: &str) {
        if condition {
            self.count(branch);
        }
    }

    pub(super) fn count_settings(&self, plan: &Plan) {
        self.count(&format!("class {:?}", plan.replay));
        self.count(match plan.curve {
            Curve::Exponential { jitter: 0, .. } => "backoff exponential",
            Curve::Exponential { .. } => "backoff jittered",
            Curve::Decorrelated { .. } => "backoff decorrelated",
            Curve::Fixed(_) => "backoff fixed",
        });
        self.count(match plan.purse {
            Purse::Unlimited => "no budget",
            Purse::Fixed(_) => "budget fixed",
            Purse::Earning { .. } => "budget earning",
            Purse::Window { .. } => "budget window",
        });
        self.count(match plan.first_sends {
            None => "no pushback",
            Some(FirstSends::Pass) => "first sends pass",
            Some(FirstSends::Wait) => "first sends wait",
            Some(FirstSends::Refuse) => "first sends are refused",
        });
        self.count_if(plan.earlier.is_some(), "carried over");
        match &plan.fuse {
            None => self.count("no breaker"),
            Some(fuse) => self.count_breaker(fuse),
        }
    }

    fn count_breaker(&self, fuse: &Fuse) {
        self.count(match (fuse.consecutive, fuse.share) {
            (_, None) => "breaker by failures in a row",
            (None, Some(_)) => "breaker by share",
            (Some(_), Some(_)) => "breaker by both",
        });
        self.count_if(fuse.gates_first_sends, "breaker gates first sends");
        self.count(&format!("breaker with {} permits", fuse.permits));
    }

    pub(super) fn demand(&self, branch: &str) {
        let count = self.0.borrow().get(branch).copied().unwrap_or_default();
        assert!(count >= ENOUGH, "{branch}: only {count} times");
    }

    /// Shown by `cargo test -- --nocapture`.
    pub(super) fn print(&self) {
        for (branch, count) in self.0.borrow().iter() {
            println!("{count:>8} {branch}");
        }
    }
}
