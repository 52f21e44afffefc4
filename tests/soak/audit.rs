//! What the callers were told, held against the server's own books.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::Duration;

use reqwest_idempotent_retry::{Certainty, Failure};

use super::books::{Books, Entry};
use super::callers::{Confirmed, Told};
use super::plan::{Keying, Purse, Way};

/// Below this many operations a share of 1 % is left to luck.
const FEWEST_FOR_SHARES: usize = 500;

/// Requests that [`Confirmation`](super::callers::Confirmation) makes of an order.
const CONFIRMING_ORDERS: usize = 2;

/// What came of it all.
#[derive(Debug)]
pub(crate) struct Audit<'a> {
    pub(crate) told: &'a [Told],
    pub(crate) books: &'a Books,
    /// Every unknown operation that has a key.
    pub(crate) confirmed: &'a HashMap<u64, Confirmed>,
    pub(crate) fixed_retries: u32,
}

impl Audit<'_> {
    pub(crate) fn figures(&self, requests: u64, restarts: u64, elapsed: Duration) -> Figures {
        let mut figures = Figures {
            requests,
            restarts,
            elapsed,
            confirmed: self.confirmed.len(),
            confirmed_as_made: self.confirmed.values().filter(|it| it.was_made).count(),
            orders: self.books.orders(),
            ..Figures::default()
        };
        for told in self.told {
            self.count(told, &mut figures);
        }
        figures.wrong.extend(self.overspent());
        figures
    }

    /// Retries that the fixed budget cannot have paid.
    fn overspent(&self) -> Option<String> {
        let is_paid_by_it = |told: &&Told| told.plan.purse == Purse::Fixed;
        let retries = self.told.iter().filter(is_paid_by_it).map(Told::retries);
        let (retries, paid) = (retries.sum::<usize>(), self.fixed_retries as usize);
        (retries > paid).then(|| format!("{retries} retries from a budget of {paid}"))
    }

    fn count(&self, told: &Told, figures: &mut Figures) {
        let entry = self.books.entry(told.plan.operation);
        let wrong = self.wrong_claims(told, &entry);
        let describe = |problem| format!("{problem}\n    {told:?}\n    {entry:?}");
        figures.wrong.extend(wrong.into_iter().map(describe));
        figures.duplicates += usize::from(entry.effects > 1);
        figures.lost += usize::from(told.is_success() && entry.effects == 0);
        figures.count(told);
    }

    fn wrong_claims(&self, told: &Told, entry: &Entry) -> Vec<String> {
        let confirmed = self.confirmed.get(&told.plan.operation);
        let mut wrong = confirmed.map_or_else(Vec::new, |it| it.wrong.clone());
        let mut check = |holds: bool, problem: &str| {
            if !holds {
                wrong.push(problem.to_owned());
            }
        };
        let Entry { effects, .. } = *entry;
        check(effects <= 1, "the order was made more than once");
        match told.certainty {
            Certainty::NotSent => {
                check(entry.reads == 0, "told as never sent, but it was read");
                check(effects == 0, "told as never sent, but it was made");
            }
            Certainty::NotProcessed => {
                check(effects == 0, "told as not processed, but it was made");
            }
            Certainty::Answered if told.is_success() => {
                check(effects == 1, "told as made, but it is not in the books");
                let is_ours = told.receipt.is_none() || told.receipt == entry.receipt;
                check(is_ours, "the receipt is of another order");
            }
            Certainty::Answered => check(effects == 0, "told as refused, but it was made"),
            _ if confirmed.is_some() => {
                check(effects == 1, "confirmed by its key, but not made once");
            }
            _ => check(told.key.is_none(), "unknown, with a key, and not confirmed"),
        }
        check(keys_are_right(told, entry), "another key than the one told");
        let confirming = confirmed.map_or(0, |_| CONFIRMING_ORDERS);
        let reads_at_most = told.sends() + confirming;
        check(entry.reads as usize <= reads_at_most, "read more than sent");
        let conflicts = u32::from(confirmed.is_some());
        check(entry.conflicts == conflicts, "the body has changed");
        wrong
    }
}

fn keys_are_right(told: &Told, entry: &Entry) -> bool {
    let is_keyed = told.plan.keying != Keying::None;
    is_keyed == told.key.is_some() && entry.keys.iter().all(|key| Some(key) == told.key.as_ref())
}

/// What is printed at the end, and what must be true of it.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    operations: usize,
    unkeyed: usize,
    sends: usize,
    retries: usize,
    requests: u64,
    orders: u64,
    restarts: u64,
    certainties: BTreeMap<Certainty, usize>,
    stops: BTreeMap<String, usize>,
    blocked: Share,
    obstacles: Share,
    refused: Share,
    confirmed: usize,
    confirmed_as_made: usize,
    duplicates: usize,
    lost: usize,
    wrong: Vec<String>,
    elapsed: Duration,
}

/// Faults before the send, and how many of them were told as never sent.
#[derive(Debug, Default)]
struct Share {
    all: usize,
    never_sent: usize,
}

impl Share {
    fn count(&mut self, certainty: Certainty) {
        self.all += 1;
        self.never_sent += usize::from(certainty == Certainty::NotSent);
    }

    fn percent(&self) -> f64 {
        100.0 * ratio(self.never_sent, self.all.max(1))
    }
}

fn ratio(part: usize, whole: usize) -> f64 {
    part as f64 / whole as f64
}

impl Figures {
    fn count(&mut self, told: &Told) {
        self.operations += 1;
        self.unkeyed += usize::from(told.key.is_none());
        self.sends += told.sends();
        self.retries += told.retries();
        *self.certainties.entry(told.certainty).or_default() += 1;
        let stop = told
            .stop
            .map_or("none: done".into(), |stop| stop.to_string());
        *self.stops.entry(stop).or_default() += 1;
        self.count_obstacles(told);
    }

    fn count_obstacles(&mut self, told: &Told) {
        let way = told.plan.way;
        if matches!(way, Way::Blocked(_)) {
            self.blocked.count(told.certainty);
        }
        for (nth, attempt) in told.attempts.iter().enumerate() {
            if way.obstacle(nth).is_some() {
                self.obstacles.count(attempt.certainty());
            } else if attempt.failure() == Some(Failure::Connect) {
                self.refused.count(attempt.certainty());
            }
        }
    }

    fn share(&self, certainty: Certainty) -> f64 {
        let count = self.certainties.get(&certainty).copied();
        100.0 * ratio(count.unwrap_or_default(), self.operations)
    }

    pub(crate) fn check(&self) {
        let first: Vec<_> = self.wrong.iter().take(10).map(String::as_str).collect();
        assert!(first.is_empty(), "wrong claims:\n{}", first.join("\n"));
        assert_eq!((self.duplicates, self.lost), (0, 0), "duplicates, lost");
        if self.operations >= FEWEST_FOR_SHARES {
            self.check_shares();
        }
    }

    fn check_shares(&self) {
        for certainty in CERTAINTIES {
            let share = self.share(certainty);
            assert!(share >= 1.0, "only {share:.2} % are {certainty}");
        }
        let made = 1..self.confirmed;
        assert!(
            made.contains(&self.confirmed_as_made),
            "{}",
            self.confirmed_as_made
        );
        for share in [&self.blocked, &self.obstacles] {
            assert!(share.percent() >= 95.0, "before the send: {share:?}");
        }
    }
}

const CERTAINTIES: [Certainty; 4] = [
    Certainty::NotSent,
    Certainty::NotProcessed,
    Certainty::Unknown,
    Certainty::Answered,
];

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row = |name: &str, value: &dyn fmt::Display| writeln!(f, "{name:<36} {value:>10}");
        row("operations", &self.operations)?;
        row("  without a key", &self.unkeyed)?;
        row("sends", &self.sends)?;
        row("  retries", &self.retries)?;
        row("requests read by the server", &self.requests)?;
        row("orders made", &self.orders)?;
        row("restarts of the server", &self.restarts)?;
        for (certainty, count) in &self.certainties {
            let share = format!("{count}  ({:.1} %)", self.share(*certainty));
            row(&format!("told: {certainty}"), &share)?;
        }
        for (stop, count) in &self.stops {
            row(&format!("stopped: {stop}"), count)?;
        }
        for (name, share) in [
            ("operations that could not be sent", &self.blocked),
            ("attempts that could not be sent", &self.obstacles),
            ("connections refused in restarts", &self.refused),
        ] {
            row(name, &share.all)?;
            let never_sent = format!("{}  ({:.1} %)", share.never_sent, share.percent());
            row("  told as never sent", &never_sent)?;
        }
        row("unknown with a key, all confirmed", &self.confirmed)?;
        row("  had been made", &self.confirmed_as_made)?;
        row("duplicates", &self.duplicates)?;
        row("lost", &self.lost)?;
        row("wrong claims", &self.wrong.len())?;
        let seconds = self.elapsed.as_secs_f64();
        row("elapsed, s", &format!("{seconds:.1}"))?;
        let per_second = ratio(self.operations, 1) / seconds;
        row("operations/s", &format!("{per_second:.0}"))
    }
}
