//! How much load retries add, and whom they help, while a service fails at random.

use crate::caller::{Make, Seen};
use crate::client::{Client, small};
use crate::dice::Dice;
use crate::goals::Goals;
use crate::options::Scale;
use crate::parallel;
use crate::peers::{
    Aws, Blind, Brooker, Finagle, Grpc, NoRetries, RetryBreaker, Sre, Terms, Throttle,
};
use crate::table::Table;
use crate::time::secs;
use crate::traffic::{Route, Service, Tally, Traffic};

const PER_SECOND: f64 = 1000.0;

/// Clients with 10 operations a second each.
const CLIENTS: usize = 100;

/// In percent. The table shows some of them.
const RATES: [u32; 25] = [
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 25, 30, 35, 40, 50, 60, 70, 75, 90, 100,
];
const SHOWN: [u32; 8] = [1, 5, 10, 20, 30, 50, 75, 100];

const CLIENT_COUNTS: [usize; 4] = [10, 100, 1000, 5000];

/// The callers of one row.
struct Row {
    name: &'static str,
    make: Make,
    /// How many states they have between them.
    states: usize,
}

pub(crate) const OURS: &str = "ours: one default budget for all";
pub(crate) const BLIND: &str = "3 retries, no budget";
pub(crate) const FINAGLE: &str = "Finagle, Linkerd: 20 % + 10/s";
pub(crate) const AWS: &str = "AWS SDK 2.0: 500 tokens, 5 a retry";
pub(crate) const SRE: &str = "SRE book: 10 % of requests";

const ROWS: [Row; 13] = [
    row(OURS, ours(), 1),
    row("ours: 100 separate default budgets", ours(), CLIENTS),
    row("no retries", Make::Theirs(|| Box::new(NoRetries)), CLIENTS),
    row(BLIND, Make::Theirs(|| Box::new(Blind)), CLIENTS),
    row(
        "Brooker: 0.1 a success, 5 at most",
        Make::Theirs(|| Box::new(Brooker::new())),
        CLIENTS,
    ),
    row(
        "Brooker: retry breaker 10 %",
        Make::Theirs(|| Box::<RetryBreaker>::default()),
        CLIENTS,
    ),
    row(AWS, Make::Theirs(|| Box::new(Aws::new(5))), CLIENTS),
    row(
        "AWS SDK 2.1: 500 tokens, 14 a retry",
        Make::Theirs(|| Box::new(Aws::new(14))),
        CLIENTS,
    ),
    row(
        "gRPC: 10 tokens, 0.1",
        Make::Theirs(|| Box::new(Grpc::new())),
        CLIENTS,
    ),
    row(
        FINAGLE,
        Make::Theirs(|| Box::new(Finagle::new(10))),
        CLIENTS,
    ),
    row(
        "Finagle: 20 % + 0",
        Make::Theirs(|| Box::new(Finagle::new(0))),
        CLIENTS,
    ),
    row(SRE, Make::Theirs(|| Box::<Sre>::default()), CLIENTS),
    row(
        "SRE book: throttled retries, K = 2",
        Make::Theirs(|| Box::<Throttle>::default()),
        CLIENTS,
    ),
];

const fn row(name: &'static str, make: Make, states: usize) -> Row {
    Row { name, make, states }
}

const fn ours() -> Make {
    Make::Ours(Client::default)
}

/// A service that fails so often, and says so.
struct Failing(f64);

impl Service for Failing {
    fn route(&mut self, callers: usize, dice: &mut Dice) -> Route {
        let caller = dice.below(callers);
        Route { caller, shard: 0 }
    }

    fn answer(&mut self, _: usize, dice: &mut Dice) -> Seen {
        match dice.chance(self.0) {
            true => Seen::Unavailable,
            false => Seen::Success,
        }
    }
}

fn play(make: Make, states: usize, rate: u32, scale: &Scale, name: &str) -> Tally {
    let traffic = Traffic {
        per_second: PER_SECOND,
        length: scale.pick(secs(60), secs(15)),
        service: Failing(f64::from(rate) / 100.0),
        arrivals: Dice::new(scale.seed, &format!("{states} callers")),
        dice: Dice::new(scale.seed, &format!("{name} {rate} {states}")),
    };
    make.play(states, Terms::default(), traffic)
}

/// A row's name, and what came of it at each failure rate in percent.
pub(crate) type Curve = (&'static str, Vec<(u32, Tally)>);

/// Part (b).
pub(crate) fn run(scale: &Scale, goals: &mut Goals) -> Vec<Curve> {
    let cells: Vec<_> = ROWS
        .iter()
        .flat_map(|row| RATES.map(|rate| (row, rate)))
        .collect();
    let tallies = parallel::map(&cells, |(row, rate)| {
        play(row.make, row.states, *rate, scale, row.name)
    });
    let curves: Vec<Curve> = ROWS
        .iter()
        .zip(tallies.chunks(RATES.len()))
        .map(|(row, tallies)| (row.name, RATES.into_iter().zip(tallies.to_vec()).collect()))
        .collect();
    print(&curves);
    check(&curves[0].1, goals);
    curves
}

fn print(curves: &[Curve]) {
    let rates = SHOWN.map(|rate| format!("{rate} %"));
    let heads = [&["most load".to_owned()], &rates[..]].concat();
    let mut table = Table::new("callers, at a failure rate of", &heads);
    for (name, curve) in curves {
        let most = format!("{:.3}×", most(curve).unwrap_or_default());
        let shown = curve.iter().filter(|(rate, _)| SHOWN.contains(rate));
        let cells = shown.map(|(_, tally)| cell(tally));
        table.row(name, std::iter::once(most).chain(cells));
    }
    table.print();
}

fn cell(tally: &Tally) -> String {
    format!("{:.3}× / {:.2}", tally.amplification(), tally.success())
}

fn check(ours: &[(u32, Tally)], goals: &mut Goals) {
    let up_to_5 = ours.iter().filter(|(rate, _)| *rate <= 5);
    let least = up_to_5.map(|(_, tally)| tally.success()).reduce(f64::min);
    goals.at_least("success in % at up to 5 % failures", least, 99.9);
    goals.at_most("load at any failure rate", most(ours), 1.10);
    let last = ours.last().map(|(_, tally)| tally.amplification());
    goals.at_most("load while everything fails", last, 1.01);
}

/// The most load at any failure rate.
fn most(curve: &[(u32, Tally)]) -> Option<f64> {
    let loads = curve.iter().map(|(_, tally)| tally.amplification());
    loads.reduce(f64::max)
}

/// Part (c): everything fails, and 1000 operations a second come from more and more clients.
pub(crate) fn run_independence(scale: &Scale, goals: &mut Goals) {
    let makes: [(&'static str, Make); 7] = [
        ("ours: default budgets", ours()),
        (
            "ours: budgets with `burst(1)`",
            Make::Ours(|| Client::default().budget(small())),
        ),
        (AWS, Make::Theirs(|| Box::new(Aws::new(5)))),
        ("AWS SDK 2.1", Make::Theirs(|| Box::new(Aws::new(14)))),
        ("gRPC", Make::Theirs(|| Box::new(Grpc::new()))),
        (FINAGLE, Make::Theirs(|| Box::new(Finagle::new(10)))),
        (SRE, Make::Theirs(|| Box::<Sre>::default())),
    ];
    let states = [&CLIENT_COUNTS[..], &[1]].concat();
    let cells: Vec<_> = makes
        .iter()
        .flat_map(|(name, make)| states.iter().map(move |states| (*name, *make, *states)))
        .collect();
    let loads = parallel::map(&cells, |(name, make, states)| {
        play(*make, *states, 100, scale, name).amplification()
    });
    let mut heads: Vec<_> = CLIENT_COUNTS
        .iter()
        .map(|count| format!("{count} clients"))
        .collect();
    heads.push("any number, one shared".to_owned());
    let mut table = Table::new("a state for each of", &heads);
    for ((name, _), loads) in makes.iter().zip(loads.chunks(states.len())) {
        table.row(name, loads.iter().map(|load| format!("{load:.3}×")));
    }
    table.print();
    let shared = loads.get(CLIENT_COUNTS.len()).copied();
    goals.at_most("load with one budget for any number", shared, 1.01);
}
