//! Whether a busy service comes back after ten bad seconds.

use crate::caller::Make;
use crate::client::{Client, small};
use crate::course::{Course, TRIGGER};
use crate::dice::Dice;
use crate::goals::Goals;
use crate::options::Scale;
use crate::parallel;
use crate::peers::{
    Aws, Blind, Brooker, Envoy, Finagle, Grpc, NoRetries, Peer, Polly, SreWindow, Terms,
};
use crate::policy::CircuitBreaker;
use crate::server::Server;
use crate::storm::Storm;
use crate::table::Table;
use crate::time::{Time, ms, secs};

/// What every caller has.
const ATTEMPT: Time = secs(1);
const DEADLINE: Time = secs(5);
const PEERS: Terms = Terms {
    attempt: Some(ATTEMPT),
    deadline: Some(DEADLINE),
    backoff: Some(ms(100)),
};

/// Operations a second, at a capacity of 1000.
const LOADS: [u32; 3] = [700, 800, 900];

/// The load of the plot.
pub(crate) const DRAWN: u32 = 800;

pub(crate) const OURS: &str = "ours: one default budget for all";
pub(crate) const NONE: &str = "no retries";
pub(crate) const BLIND: &str = "3 retries, full jitter";
pub(crate) const FINAGLE: &str = "Finagle, Linkerd: 20 % + 10/s, × 20";
pub(crate) const AWS: &str = "AWS SDK 2.0: 500 tokens, 5 a retry, × 20";

/// Who calls; `states`: how many states they have between them.
#[derive(Clone, Copy)]
struct Row {
    name: &'static str,
    make: Make,
    states: usize,
    drops_expired: bool,
}

fn rows() -> Vec<Row> {
    let separate = "ours: 20 separate default budgets";
    let many = "ours: 2000 separate default budgets";
    let burst_of_one = "ours: 2000 separate, with `burst(1)`";
    let breaker = "ours: one default budget and breaker";
    let none = theirs(NONE, 1, || Box::new(NoRetries));
    let blind = theirs(BLIND, 1, || Box::new(Blind));
    let sre_name = "SRE book: 10 % of the last minute, × 20";
    let sre = theirs(sre_name, 20, || Box::new(SreWindow::new()));
    vec![
        ours(OURS, 1, client),
        ours(separate, 20, client),
        ours(many, 2000, client),
        ours(burst_of_one, 2000, || client().budget(small())),
        ours(breaker, 1, || client().breaker(CircuitBreaker::default())),
        none,
        blind,
        theirs("Polly: breaker on all sends, 3 retries, × 20", 20, || {
            Box::<Polly>::default()
        }),
        theirs(AWS, 20, || Box::new(Aws::new(5))),
        theirs("AWS SDK 2.1: 14 a retry, × 20", 20, || {
            Box::new(Aws::new(14))
        }),
        theirs("AWS SDK 2.1: 14 a retry, × 2000", 2000, || {
            Box::new(Aws::new(14))
        }),
        theirs("gRPC: 10 tokens, 0.1, × 20", 20, || Box::new(Grpc::new())),
        theirs("Brooker: 0.1 a success, 5 at most, × 20", 20, || {
            Box::new(Brooker::new())
        }),
        theirs(FINAGLE, 20, || Box::new(Finagle::new(10))),
        theirs("Finagle: 20 % + 0, × 20", 20, || Box::new(Finagle::new(0))),
        theirs("Envoy: 20 % of those under way, × 20", 20, || {
            Box::<Envoy>::default()
        }),
        sre,
        ours(OURS, 1, client).and_drops(),
        none.and_drops(),
        blind.and_drops(),
        sre.and_drops(),
    ]
}

fn ours(name: &'static str, states: usize, make: fn() -> Client) -> Row {
    Row::new(name, states, Make::Ours(make))
}

fn theirs(name: &'static str, states: usize, make: fn() -> Box<dyn Peer>) -> Row {
    Row::new(name, states, Make::Theirs(make))
}

impl Row {
    fn new(name: &'static str, states: usize, make: Make) -> Self {
        Self {
            name,
            make,
            states,
            drops_expired: false,
        }
    }

    fn and_drops(self) -> Self {
        Self {
            drops_expired: true,
            ..self
        }
    }

    fn play(&self, load: u32, seed: u64) -> Course {
        let storm = Storm {
            load: f64::from(load),
            server: Server::new(TRIGGER, self.drops_expired),
            // The same arrivals for everybody.
            arrivals: Dice::new(seed, &format!("arrivals {load}")),
            dice: Dice::new(seed, &format!("{} {load}", self.name)),
        };
        self.make.play(self.states, PEERS, storm)
    }
}

/// README's advice: a deadline, an attempt timeout, and the rest by default.
fn client() -> Client {
    Client::default()
        .attempt_timeout(ATTEMPT)
        .deadline(DEADLINE)
}

/// Part (d). Returns what is drawn of it.
pub(crate) fn run(scale: &Scale, goals: &mut Goals) -> Vec<(&'static str, Course)> {
    let rows = rows();
    let seeds = scale.seed..scale.seed + scale.pick(10, 1);
    let cells: Vec<_> = rows
        .iter()
        .flat_map(|row| LOADS.map(|load| (row, load)))
        .collect();
    let mut courses = parallel::map(&cells, |(row, load)| -> Vec<Course> {
        seeds.clone().map(|seed| row.play(*load, seed)).collect()
    });
    print(&rows, &courses);
    for drops_expired in [false, true] {
        check(&cells, &courses, drops_expired, goals);
    }
    let is_drawn = |(row, load): &(&Row, u32)| {
        let has_line = [OURS, NONE, BLIND, FINAGLE, AWS].contains(&row.name);
        has_line && !row.drops_expired && *load == DRAWN
    };
    let cells = cells.iter().zip(courses.iter_mut());
    cells
        .filter(|(cell, _)| is_drawn(cell))
        .filter_map(|((row, _), courses)| Some((row.name, courses.pop()?)))
        .collect()
}

fn print(rows: &[Row], courses: &[Vec<Course>]) {
    let heads = LOADS.map(|load| format!("{} % load", load / 10));
    let mut table = Table::new("callers", &heads);
    for (row, courses) in rows.iter().zip(courses.chunks(LOADS.len())) {
        let name = format!("{}{}", row.name, drops(row.drops_expired));
        table.row(&name, courses.iter().map(|courses| cell(courses)));
    }
    table.print();
}

fn drops(expired: bool) -> &'static str {
    match expired {
        true => "; server drops expired work",
        false => "",
    }
}

/// Load, recovery at best and at worst, success.
fn cell(courses: &[Course]) -> String {
    let mean =
        |figure: fn(&Course) -> f64| courses.iter().map(figure).sum::<f64>() / courses.len() as f64;
    let recovered: Vec<_> = courses.iter().filter_map(Course::recovery).collect();
    let (first, last) = (recovered.iter().min(), recovered.iter().max());
    let recovery = match (first, last) {
        (Some(first), Some(_)) if recovered.len() < courses.len() => format!("{first} s to never"),
        (Some(first), Some(last)) if first == last => format!("{first} s"),
        (Some(first), Some(last)) => format!("{first} to {last} s"),
        _ => "never".to_owned(),
    };
    let (load, success) = (mean(Course::amplification), mean(Course::success));
    format!("{load:.2}×, {recovery}, {success:.0} %")
}

/// Seed by seed: the same arrivals, with our retries and without any.
fn check(cells: &[(&Row, u32)], courses: &[Vec<Course>], drops_expired: bool, goals: &mut Goals) {
    let seconds = |name, load| -> Vec<f64> {
        let is_it = |(row, of): &(&Row, u32)| {
            row.name == name && row.drops_expired == drops_expired && *of == load
        };
        let courses = cells.iter().position(is_it).map(|cell| &courses[cell]);
        let recoveries = courses.into_iter().flatten().map(Course::recovery);
        recoveries
            .map(|recovery| recovery.map_or(f64::INFINITY, |seconds| seconds as f64))
            .collect()
    };
    for load in LOADS {
        let (ours, none) = (seconds(OURS, load), seconds(NONE, load));
        let slower = ours.iter().zip(&none).map(|(ours, none)| ours - none);
        let what = format!(
            "seconds slower than without retries at {} % load{}",
            load / 10,
            drops(drops_expired)
        );
        goals.at_most(&what, slower.reduce(f64::max), 1.0);
    }
}
