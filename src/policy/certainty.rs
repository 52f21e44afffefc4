//! What is known of an effect: of one attempt, and of a whole operation.

use std::fmt;

use super::{Outcome, ReplayClass};

/// What is known about the effect of an attempt, or of a whole operation, at the server.
///
/// Ordered by how much may have happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Certainty {
    /// Nothing left this process: the server cannot have acted.
    NotSent,
    /// The request was sent, and the server has said that it did no work for it
    /// (RFC 9113 §8.7, RFC 8470 §5.2, or a status that the caller declared so).
    NotProcessed,
    /// The server may or may not have acted. Confirm before doing anything that would count twice.
    Unknown,
    /// The server has answered, and the answer settles what happened.
    Answered,
}

impl fmt::Display for Certainty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotSent => "never sent",
            Self::NotProcessed => "not processed",
            Self::Unknown => "outcome unknown",
            Self::Answered => "answered",
        })
    }
}

/// The certainty of a whole operation, folded from its attempts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fold {
    /// The worst that may have happened if no answer settles it. Never `Answered`.
    residue: Certainty,
    /// Some attempt may have been carried out.
    unknown: bool,
    /// The latest answer settles the operation.
    settled: bool,
}

impl Fold {
    pub(super) fn carry(earlier: Option<Certainty>) -> Self {
        let earlier = earlier.unwrap_or(Certainty::NotSent);
        Self {
            residue: earlier.min(Certainty::Unknown),
            unknown: earlier == Certainty::Unknown,
            settled: false,
        }
    }

    pub(super) fn record(&mut self, outcome: &Outcome, replay: ReplayClass) {
        self.settled =
            outcome.certainty == Certainty::Answered && self.is_settled_by(outcome, replay);
        self.unknown |= outcome.certainty == Certainty::Unknown;
        self.residue = self.residue.max(outcome.certainty.min(Certainty::Unknown));
    }

    /// An answer speaks for the earlier attempts only where none of them can have acted, where
    /// acting was not asked for, or where it is the success of the same operation.
    fn is_settled_by(&self, answer: &Outcome, replay: ReplayClass) -> bool {
        !self.unknown
            || replay == ReplayClass::Safe
            || (answer.success && replay.survives_a_repeat())
    }

    /// Whether some attempt may have been carried out.
    pub(super) fn is_unclear(&self) -> bool {
        self.unknown
    }

    /// Whether anything has, or may have, left this process.
    pub(super) fn is_sent(&self) -> bool {
        self.residue > Certainty::NotSent
    }

    pub(super) fn certainty(&self) -> Certainty {
        if self.settled {
            Certainty::Answered
        } else {
            self.residue
        }
    }
}
