//! What jitter is for: writers in each other's way. The model, its figures and its network are AWS's
//! ("Exponential Backoff And Jitter", 2015).

use std::time::Duration;

use crate::caller::{Caller, Next, Seen, Start};
use crate::client::Client;
use crate::dice::Dice;
use crate::goals::Goals;
use crate::options::Scale;
use crate::parallel;
use crate::policy::Backoff;
use crate::race::{Figures, Race};
use crate::table::Table;
use crate::time::{Time, ms};

const CLIENTS: [usize; 4] = [10, 50, 100, 190];

const CAP: Duration = ms(2000);

/// AWS counts from 1, so its first window is twice its base of 5 ms.
const BASE: Duration = ms(10);

/// Its decorrelated jitter starts from the base itself.
const DECORRELATED_BASE: Duration = ms(5);

struct Row {
    name: &'static str,
    backoff: fn() -> Backoff,
    /// Of AWS's simulator in Python, for each number of clients: milliseconds and writes. Means of 100 to
    /// 20,000 races, uncertain by 0.4 %. (The means of 100 that are in circulation are off by up to 5 %.)
    means: [(f64, f64); 4],
    is_goal: bool,
}

const ROWS: [Row; 5] = [
    Row {
        name: "full jitter (our default)",
        backoff: || Backoff::full_jitter(BASE, CAP),
        means: [
            (466.0, 39.0),
            (2885.1, 332.6),
            (4894.8, 796.1),
            (7460.1, 1771.9),
        ],
        is_goal: true,
    },
    Row {
        name: "equal jitter",
        backoff: || Backoff::equal_jitter(BASE, CAP),
        means: [
            (728.1, 42.5),
            (4255.4, 347.2),
            (6622.4, 812.3),
            (9368.0, 1759.6),
        ],
        is_goal: true,
    },
    Row {
        name: "decorrelated",
        backoff: || Backoff::decorrelated(DECORRELATED_BASE, CAP),
        means: [
            (437.2, 37.7),
            (2218.5, 374.6),
            (4577.9, 1001.4),
            (7909.9, 2436.9),
        ],
        is_goal: true,
    },
    Row {
        name: "exponential, no jitter",
        backoff: || Backoff::exponential(BASE, CAP),
        means: [
            (3481.0, 50.9),
            (36411.6, 623.5),
            (63426.9, 1854.0),
            (101_294.9, 5167.8),
        ],
        is_goal: false,
    },
    Row {
        name: "no wait at all",
        backoff: || Backoff::fixed([Duration::ZERO]),
        means: [
            (379.7, 50.8),
            (1142.1, 690.8),
            (2025.7, 2421.7),
            (3535.3, 8000.2),
        ],
        is_goal: false,
    },
];

/// Part (a).
pub(crate) fn run(scale: &Scale, goals: &mut Goals) {
    let cells: Vec<_> = ROWS
        .iter()
        .flat_map(|row| CLIENTS.map(|clients| (row, clients)))
        .collect();
    let figures = parallel::map(&cells, |(row, clients)| mean_of_races(row, *clients, scale));
    let results = ROWS.iter().zip(figures.chunks(CLIENTS.len()));
    print(results.clone());
    print_headline(&figures);
    for (row, figures) in results.filter(|(row, _)| row.is_goal) {
        let both = figures.iter().zip(row.means);
        let off = both.flat_map(|(own, mean)| own.percent_off(mean));
        let furthest = off.map(f64::abs).reduce(f64::max);
        goals.at_most(&format!("{}: % off AWS's means", row.name), furthest, 5.0);
    }
}

fn print<'r>(results: impl Iterator<Item = (&'r Row, &'r [Figures])> + Clone) {
    let heads = CLIENTS.map(|clients| format!("{clients} clients"));
    let mut table = Table::new("backoff: time until all have written, writes", &heads);
    for (row, figures) in results.clone() {
        table.row(row.name, figures.iter().map(Figures::cell));
    }
    table.print();
    let mut table = Table::new("% off AWS's means: time, writes", &heads);
    for (row, figures) in results {
        let both = figures.iter().zip(row.means);
        let cell = |(own, mean): (&Figures, _)| {
            let [millis, writes] = own.percent_off(mean);
            format!("{millis:+.1}, {writes:+.1}")
        };
        table.row(row.name, both.map(cell));
    }
    table.print();
}

/// AWS's headline: how much faster, and with how many fewer writes, a hundred clients are done.
fn print_headline(figures: &[Figures]) {
    let at = |row: usize| {
        figures
            .get(row * CLIENTS.len() + 2)
            .copied()
            .unwrap_or_default()
    };
    let (full, exponential) = (at(0), at(3));
    println!(
        "100 clients, full jitter against exponential: {:.1}× faster, {:.2}× fewer writes",
        exponential.millis / full.millis,
        exponential.writes / full.writes
    );
}

fn mean_of_races(row: &Row, clients: usize, scale: &Scale) -> Figures {
    let races = scale.pick(WRITERS, QUICK_WRITERS) / clients;
    let mut dice = Dice::new(scale.seed, &format!("{} {clients}", row.name));
    let client = Client::default()
        .backoff((row.backoff)())
        .no_budget()
        .max_attempts(u32::MAX);
    let mut sum = Figures::default();
    for _ in 0..races {
        let race = Race::new(&client, clients, &mut dice).run();
        sum.millis += race.millis;
        sum.writes += race.writes;
    }
    Figures {
        millis: sum.millis / races as f64,
        writes: sum.writes / races as f64,
    }
}

/// In all races of a row.
const WRITERS: usize = 50_000;
const QUICK_WRITERS: usize = 10_000;

impl Figures {
    fn cell(&self) -> String {
        format!("{:.0} ms, {:.1}", self.millis, self.writes)
    }

    fn percent_off(&self, (millis, writes): (f64, f64)) -> [f64; 2] {
        [(self.millis, millis), (self.writes, writes)].map(|(own, mean)| 100.0 * (own / mean - 1.0))
    }
}

/// For the plot: when a hundred clients send again that have failed together, and fail each time.
pub(crate) fn instants(backoff: Backoff, seed: u64) -> Vec<Time> {
    let client = Client::default()
        .backoff(backoff)
        .no_budget()
        .max_attempts(5);
    let mut dice = Dice::new(seed, "instants");
    let mut instants = Vec::new();
    for _ in 0..100 {
        let (mut caller, mut now) = (&client, Time::ZERO);
        let mut operation = caller.begin(now);
        while let Start::Now(_) = caller.start(&mut operation, now, &mut dice) {
            match caller.end(&mut operation, Seen::Unavailable, now, &mut dice) {
                Next::Again(wait) => now += wait,
                Next::Over => break,
            }
            instants.push(now);
        }
    }
    instants
}
