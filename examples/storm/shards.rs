//! A service in several shards, one of them down: what a circuit breaker makes of it.

use crate::caller::{Make, Seen};
use crate::client::Client;
use crate::dice::Dice;
use crate::goals::Goals;
use crate::options::Scale;
use crate::parallel;
use crate::peers::{Blind, NoRetries, Peer, Polly, Terms};
use crate::policy::{Backoff, CircuitBreaker, CircuitBreakerBuilder};
use crate::table::Table;
use crate::time::secs;
use crate::traffic::{Route, Service, Tally, Traffic};

const SHARDS: [usize; 3] = [3, 10, 20];

const PER_SECOND: f64 = 100.0;

/// How often the other shards fail: never, or as services do.
const OTHERS: [f64; 2] = [0.0, 0.01];

#[derive(Clone, Copy)]
struct Row {
    name: &'static str,
    make: Make,
    /// Whether each shard has a state of its own: a key for each, in terms of `LoadControl`.
    by_shard: bool,
}

const BASELINE: &str = "ours, no breaker";
const GOAL: [&str; 2] = [
    "ours, breaker (retries only)",
    "ours, breaker, a key per shard",
];

fn rows() -> Vec<Row> {
    let polly = || -> Box<dyn Peer> { Box::<Polly>::default() };
    vec![
        Row::new(GOAL[0], Make::Ours(|| with(breaker()))),
        Row::new(GOAL[1], Make::Ours(|| with(breaker()))).by_shard(),
        Row::new(BASELINE, Make::Ours(Client::default)),
        Row::new(
            "ours, breaker on first sends too",
            Make::Ours(|| with(breaker().gate_first_sends(true))),
        ),
        Row::new(
            "the same, a key per shard",
            Make::Ours(|| with(breaker().gate_first_sends(true))),
        )
        .by_shard(),
        Row::new(
            "ours, Polly's settings, on first sends too",
            Make::Ours(|| with(as_polly())),
        ),
        Row::new(
            "Polly: breaker on all sends, 3 retries",
            Make::Theirs(polly),
        ),
        Row::new("the same, one per shard", Make::Theirs(polly)).by_shard(),
        Row::new("no retries", Make::Theirs(|| Box::new(NoRetries))),
        Row::new("3 retries, no budget", Make::Theirs(|| Box::new(Blind))),
    ]
}

fn with(breaker: CircuitBreakerBuilder) -> Client {
    Client::default().breaker(breaker.build().expect("valid settings"))
}

fn breaker() -> CircuitBreakerBuilder {
    CircuitBreaker::builder()
}

fn as_polly() -> CircuitBreakerBuilder {
    breaker()
        .failure_ratio(0.1, 100, secs(30))
        .open_for(Backoff::fixed([secs(5)]))
        .gate_first_sends(true)
}

impl Row {
    fn new(name: &'static str, make: Make) -> Self {
        Self {
            name,
            make,
            by_shard: false,
        }
    }

    fn by_shard(self) -> Self {
        Self {
            by_shard: true,
            ..self
        }
    }
}

/// The first shard is down.
struct Sharded {
    shards: usize,
    others_fail: f64,
}

impl Service for Sharded {
    fn route(&mut self, callers: usize, dice: &mut Dice) -> Route {
        let shard = dice.below(self.shards);
        let caller = if callers == 1 { 0 } else { shard };
        Route { caller, shard }
    }

    fn answer(&mut self, shard: usize, dice: &mut Dice) -> Seen {
        match shard == 0 || dice.chance(self.others_fail) {
            true => Seen::Unavailable,
            false => Seen::Success,
        }
    }
}

/// Part (e).
pub(crate) fn run(scale: &Scale, goals: &mut Goals) {
    let rows = rows();
    let columns: Vec<_> = OTHERS
        .iter()
        .flat_map(|others_fail| SHARDS.map(|shards| (shards, *others_fail)))
        .collect();
    let cells: Vec<_> = rows
        .iter()
        .flat_map(|row| columns.iter().map(move |column| (*row, *column)))
        .collect();
    let tallies = parallel::map(&cells, |(row, (shards, others_fail))| {
        let service = Sharded {
            shards: *shards,
            others_fail: *others_fail,
        };
        let traffic = Traffic {
            per_second: PER_SECOND,
            length: scale.pick(secs(1800), secs(300)),
            service,
            // The same operations for all rows.
            arrivals: Dice::new(scale.seed, &format!("{shards} shards")),
            dice: Dice::new(scale.seed, &format!("{} {shards} {others_fail}", row.name)),
        };
        let states = if row.by_shard { *shards } else { 1 };
        row.make.play(states, Terms::default(), traffic)
    });
    let results: Vec<_> = rows.iter().zip(tallies.chunks(columns.len())).collect();
    print(&columns, &results);
    check(&results, goals);
}

fn print(columns: &[(usize, f64)], results: &[(&Row, &[Tally])]) {
    let heads: Vec<_> = columns
        .iter()
        .map(|(shards, others_fail)| match *others_fail {
            0.0 => format!("1 of {shards} down"),
            others_fail => format!("1 of {shards}, others fail {:.0} %", 100.0 * others_fail),
        })
        .collect();
    let mut table = Table::new("callers: load, success in %", &heads);
    for (row, tallies) in results {
        let cell = |tally: &Tally| format!("{:.2}×, {:.1}", tally.amplification(), tally.success());
        table.row(row.name, tallies.iter().map(cell));
    }
    table.print();
}

fn check(results: &[(&Row, &[Tally])], goals: &mut Goals) {
    let find = |name| results.iter().find(|(row, _)| row.name == name);
    let Some((_, baseline)) = find(BASELINE) else {
        return goals.note(false, "no baseline");
    };
    for (row, tallies) in GOAL.iter().filter_map(|name| find(name)) {
        let lost = tallies
            .iter()
            .zip(*baseline)
            .map(|(own, base)| base.success() - own.success());
        let what = format!("points of success lost to the breaker: {}", row.name);
        goals.at_most(&what, lost.reduce(f64::max), 0.5);
    }
}
