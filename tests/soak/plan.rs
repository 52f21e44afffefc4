//! What shall go wrong, with which operation: drawn from the seed alone, whoever asks.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use bytes::Bytes;

use crate::support::ms;

/// An attempt's limit: a slow answer comes well after it, a prompt one well before.
pub(crate) const ATTEMPT_LIMIT: Duration = ms(200);

/// How long a slow server takes.
pub(crate) const SLOW: Duration = ms(450);

/// Draws the plans.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seed(pub(crate) u64);

impl Seed {
    /// All there is to know beforehand of one operation.
    pub(crate) fn plan(self, operation: u64) -> Plan {
        let mut dice = self.dice(("plan", operation));
        Plan {
            operation,
            keying: dice.pick(&KEYINGS),
            purse: dice.pick(&PURSES),
            way: dice.pick(&WAYS),
            time: dice.pick(&TIMES),
            patience: dice.pick(&PATIENCE).map(|longest| dice.up_to(longest)),
            weather: dice.pick(&WEATHERS),
            body_length: dice.pick(&BODY_LENGTHS),
        }
    }

    /// What the server does with the `nth` request of an operation that it reads.
    pub(crate) fn fault(self, operation: u64, nth: u32) -> Fault {
        let weather = self.plan(operation).weather;
        match weather {
            Weather::Calm => Fault::None,
            Weather::Changing => self.dice(("fault", operation, nth)).pick(&FAULTS),
            Weather::Stuck => self.dice(("fault", operation)).pick(&FAULTS[1..]),
        }
    }

    /// After how many bytes a connection is reset, whatever they say.
    pub(crate) fn cut(self, connection: u64) -> Option<usize> {
        let mut dice = self.dice(("cut", connection));
        dice.one_in(40).then(|| dice.0.usize(0..150))
    }

    fn dice(self, what: impl Hash) -> Dice {
        let mut hasher = DefaultHasher::new();
        (self.0, what).hash(&mut hasher);
        Dice(fastrand::Rng::with_seed(hasher.finish()))
    }
}

struct Dice(fastrand::Rng);

impl Dice {
    fn one_in(&mut self, chances: u32) -> bool {
        self.0.u32(0..chances) == 0
    }

    fn up_to(&mut self, longest: Duration) -> Duration {
        longest.mul_f64(self.0.f64())
    }

    fn pick<T: Copy>(&mut self, weighted: &[(u32, T)]) -> T {
        let total = weighted.iter().map(|(weight, _)| weight).sum();
        let mut left = self.0.u32(0..total);
        for &(weight, choice) in weighted {
            match left.checked_sub(weight) {
                Some(rest) => left = rest,
                None => return choice,
            }
        }
        unreachable!("the draw is below the sum of the weights")
    }
}

/// One operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) operation: u64,
    pub(crate) keying: Keying,
    pub(crate) purse: Purse,
    pub(crate) way: Way,
    pub(crate) time: Time,
    /// When the caller drops the future, if it is not done by then.
    pub(crate) patience: Option<Duration>,
    weather: Weather,
    body_length: usize,
}

impl Plan {
    pub(crate) fn key(&self) -> String {
        format!("soak-{}", self.operation)
    }

    pub(crate) fn url(&self) -> String {
        let Self { operation, way, .. } = self;
        match way {
            Way::Open => format!("http://orders.test/orders/{operation}"),
            Way::Blocked(Obstacle::SilentTls) => {
                format!("https://op-{operation}.test/orders/{operation}")
            }
            // A name of its own: no connection to be had but over this operation's obstacle.
            Way::Bumpy(_) | Way::Blocked(_) => {
                format!("http://op-{operation}.test/orders/{operation}")
            }
        }
    }

    pub(crate) fn body(&self) -> Bytes {
        let mut body = format!("operation={}&filler=", self.operation).into_bytes();
        body.resize(body.len().max(self.body_length), b'x');
        body.into()
    }

    pub(crate) fn other_body(&self) -> Bytes {
        format!("operation={}&other", self.operation).into()
    }
}

/// Where the operation's key is from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Keying {
    Extension,
    Header,
    /// Made by the layer.
    Generated,
    /// There is none: an effect must not be asked for twice.
    None,
}

const KEYINGS: [(u32, Keying); 4] = [
    (40, Keying::Extension),
    (20, Keying::Header),
    (20, Keying::Generated),
    (20, Keying::None),
];

/// The budget that retries are paid from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Purse {
    /// Enough for whatever comes.
    Rich,
    /// A fixed number for all, which is soon gone.
    Fixed,
    /// A few, earned by successes.
    Poor,
}

const PURSES: [(u32, Purse); 3] = [(60, Purse::Rich), (15, Purse::Fixed), (25, Purse::Poor)];

/// The way to the server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Way {
    Open,
    /// The obstacle is there the first time only.
    Bumpy(Obstacle),
    Blocked(Obstacle),
}

impl Way {
    /// What is in the way of the `nth` attempt to connect.
    pub(crate) fn obstacle(self, nth: usize) -> Option<Obstacle> {
        match self {
            Self::Blocked(obstacle) => Some(obstacle),
            Self::Bumpy(obstacle) if nth == 0 => Some(obstacle),
            Self::Bumpy(_) | Self::Open => None,
        }
    }
}

/// A fault before the send.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Obstacle {
    ClosedPort,
    StalledDns,
    UnknownName,
    /// Accepts the connection, and never says a word.
    SilentTls,
}

const WAYS: [(u32, Way); 8] = [
    (88, Way::Open),
    (2, Way::Bumpy(Obstacle::ClosedPort)),
    (1, Way::Bumpy(Obstacle::StalledDns)),
    (2, Way::Bumpy(Obstacle::UnknownName)),
    (3, Way::Blocked(Obstacle::ClosedPort)),
    (1, Way::Blocked(Obstacle::StalledDns)),
    (2, Way::Blocked(Obstacle::UnknownName)),
    (1, Way::Blocked(Obstacle::SilentTls)),
];

/// How long the caller has.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Time {
    Unlimited,
    Deadline(Duration),
}

const TIMES: [(u32, Time); 4] = [
    (50, Time::Deadline(ms(5000))),
    (28, Time::Unlimited),
    // A slow first attempt leaves too little for another.
    (20, Time::Deadline(ms(220))),
    (2, Time::Deadline(Duration::ZERO)),
];

/// The longest until a caller drops the future, if it ever does.
const PATIENCE: [(u32, Option<Duration>); 3] = [(92, None), (4, Some(ms(6))), (4, Some(ms(80)))];

#[derive(Clone, Copy, Debug)]
enum Weather {
    Calm,
    /// Each request has a fault of its own, or none.
    Changing,
    /// Each request has the same fault.
    Stuck,
}

const WEATHERS: [(u32, Weather); 3] = [
    (45, Weather::Calm),
    (30, Weather::Changing),
    (25, Weather::Stuck),
];

const BODY_LENGTHS: [(u32, usize); 3] = [(90, 0), (8, 8 * 1024), (2, 256 * 1024)];

/// What the server does with a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    None,
    /// Commits, and closes: the client sees a FIN.
    CommitAndClose,
    /// Commits, and closes with a RST.
    CommitAndReset,
    /// Closes with a RST after the request was read.
    Reset,
    /// Closes with a RST before the body was read.
    ResetWhileReading,
    TooManyRequests(Wish),
    Unavailable(Wish),
    CommitAndUnavailable,
    TooEarly,
    /// A definite refusal: not retryable.
    PaymentRequired,
    /// Not retryable either, and says nothing of what has been done.
    InternalError,
    CommitAndAnswerLate,
    /// The caller has gone long before the order is made.
    CommitLate,
    CommitAndHalfHead,
    CommitAndCutBody,
    CommitAndGibberish,
}

/// The wait that a refusal asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Wish {
    None,
    /// A few milliseconds, by a header of its own.
    Short,
    /// As long as `Retry-After` can say: longer than these callers wait.
    Long,
}

impl Fault {
    /// Whether the order is in the books before anything is said.
    pub(crate) fn commits(self) -> bool {
        matches!(
            self,
            Self::None
                | Self::CommitAndClose
                | Self::CommitAndReset
                | Self::CommitAndUnavailable
                | Self::CommitAndAnswerLate
                | Self::CommitLate
                | Self::CommitAndHalfHead
                | Self::CommitAndCutBody
                | Self::CommitAndGibberish
        )
    }
}

const FAULTS: [(u32, Fault); 20] = [
    (40, Fault::None),
    (6, Fault::CommitAndClose),
    (6, Fault::CommitAndReset),
    (5, Fault::Reset),
    (5, Fault::ResetWhileReading),
    (4, Fault::TooManyRequests(Wish::None)),
    (4, Fault::TooManyRequests(Wish::Short)),
    (3, Fault::TooManyRequests(Wish::Long)),
    (4, Fault::Unavailable(Wish::None)),
    (4, Fault::Unavailable(Wish::Short)),
    (3, Fault::Unavailable(Wish::Long)),
    (5, Fault::CommitAndUnavailable),
    (10, Fault::TooEarly),
    (2, Fault::PaymentRequired),
    (2, Fault::InternalError),
    (2, Fault::CommitAndAnswerLate),
    (2, Fault::CommitLate),
    (4, Fault::CommitAndHalfHead),
    (4, Fault::CommitAndCutBody),
    (3, Fault::CommitAndGibberish),
];
