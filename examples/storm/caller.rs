//! Whoever calls a service: a client of this crate, or one that retries as others do.

use std::time::Duration;

use crate::client::Client;
use crate::dice::Dice;
use crate::peers::{Peer, PeerCaller, Terms};
use crate::policy::Certainty;
use crate::time::Time;

/// What a model asks of a caller. It keeps the operation, and tells the time.
pub(crate) trait Caller {
    type Operation;

    fn begin(&mut self, now: Time) -> Self::Operation;

    /// Asked before each attempt.
    fn start(&mut self, operation: &mut Self::Operation, now: Time, dice: &mut Dice) -> Start;

    /// Told at the end of each attempt.
    fn end(
        &mut self,
        operation: &mut Self::Operation,
        seen: Seen,
        now: Time,
        dice: &mut Dice,
    ) -> Next;

    /// What is said of the effect of an operation that ended without success. `None`: nothing, so that it
    /// looks as if there was none.
    fn certainty(_operation: &Self::Operation) -> Option<Certainty> {
        None
    }
}

pub(crate) enum Start {
    /// The attempt is sent, and given up after so long (`None`: never).
    Now(Option<Duration>),
    /// Ask again after this time.
    Later(Duration),
    /// The operation is over.
    Never,
}

/// How an attempt ended, as its caller sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// Answered with success.
    Success,
    /// Answered with 503.
    Unavailable,
    /// Sent, and no answer came: reset, or the attempt's time is up.
    NoAnswer,
    /// There was no connection.
    NotSent,
}

pub(crate) enum Next {
    Over,
    /// Another attempt after this time.
    Again(Duration),
}

/// A make of caller.
#[derive(Clone, Copy)]
pub(crate) enum Make {
    /// The core of this crate.
    Ours(fn() -> Client),
    /// A few lines that retry as another library does.
    Theirs(fn() -> Box<dyn Peer>),
}

/// A model of a service that callers of any make can be let loose on.
pub(crate) trait Model {
    type Result;

    fn play<C: Caller>(self, callers: &mut [C]) -> Self::Result;
}

impl Make {
    /// Plays the model with so many callers, each with a state of its own. Callers that share their
    /// state are one.
    pub(crate) fn play<M: Model>(self, count: usize, terms: Terms, model: M) -> M::Result {
        match self {
            Self::Ours(make) => {
                let clients: Vec<Client> = (0..count).map(|_| make()).collect();
                model.play(&mut clients.iter().collect::<Vec<_>>())
            }
            Self::Theirs(make) => {
                let caller = |_| PeerCaller::new(make(), terms);
                model.play(&mut (0..count).map(caller).collect::<Vec<_>>())
            }
        }
    }
}
