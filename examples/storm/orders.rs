//! A million orders, some of whose answers are lost, and how many are made twice.

use crate::caller::Make;
use crate::client::Client;
use crate::dice::Dice;
use crate::goals::Goals;
use crate::options::Scale;
use crate::parallel;
use crate::peers::{Blind, Terms};
use crate::shop::{Books, Faults, Shop};
use crate::table::Table;

const LOST: Faults = Faults {
    name: "Orders whose answers are lost",
    not_sent: 0.01,
    lost: 0.01,
    late: 0.0,
    unavailable: 0.02,
    reset: 0.005,
};

const LATE: Faults = Faults {
    name: "Orders, half of them late",
    lost: 0.005,
    late: 0.005,
    ..LOST
};

#[derive(Clone, Copy)]
struct Row {
    name: &'static str,
    make: Make,
    is_ours: bool,
    /// The service knows an order by its key.
    honours_keys: bool,
    /// After an attempt without an answer the caller looks whether its order is there.
    looks_up: bool,
}

fn rows() -> [Row; 5] {
    let plain = Row {
        name: "",
        make: Make::Theirs(|| Box::new(Blind)),
        is_ours: false,
        honours_keys: false,
        looks_up: false,
    };
    let ours = |name, make| Row {
        name,
        make: Make::Ours(make),
        is_ours: true,
        ..plain
    };
    [
        Row {
            honours_keys: true,
            ..ours("ours, with a key that the service honours", client)
        },
        ours(
            "ours, without a key, 503 declared as refused before work",
            || client().without_keys().refused_before_work(),
        ),
        ours("ours, without a key", || client().without_keys()),
        Row {
            name: "look-up before a resend, without a key",
            looks_up: true,
            ..plain
        },
        Row {
            name: "blind retry, without a key",
            ..plain
        },
    ]
}

/// As many attempts as the others have.
fn client() -> Client {
    Client::default().max_attempts(4)
}

/// Part (f).
pub(crate) fn run(scale: &Scale, goals: &mut Goals) {
    let rows = rows();
    let cells: Vec<_> = [LOST, LATE]
        .into_iter()
        .flat_map(|faults| rows.iter().map(move |row| (faults, *row)))
        .collect();
    let books = parallel::map(&cells, |(faults, row)| {
        let shop = Shop {
            faults: *faults,
            honours_keys: row.honours_keys,
            looks_up: row.looks_up,
            orders: scale.pick(1_000_000, 100_000),
            dice: Dice::new(scale.seed, &format!("{} {}", row.name, faults.name)),
        };
        row.make.play(1, Terms::default(), shop)
    });
    let heads = [
        "made twice, of a million",
        "told wrongly, of a million",
        "requests",
        "success",
        "told: unknown",
        "look-ups",
    ];
    let results: Vec<_> = cells.iter().zip(&books).collect();
    for results in results.chunks(rows.len()) {
        let name = results.first().map_or("", |((faults, _), _)| faults.name);
        let mut table = Table::new(name, &heads);
        for ((_, row), books) in results {
            table.row(row.name, books.cells());
        }
        table.print();
    }
    check(&cells, &books, goals);
}

fn check(cells: &[(Faults, Row)], books: &[Books], goals: &mut Goals) {
    let results = cells.iter().zip(books);
    for ((faults, row), books) in results.filter(|((_, row), _)| row.is_ours) {
        let name = format!("{}, {}", faults.name, row.name);
        let (twice, wrong) = (books.made_twice as f64, books.told_wrongly as f64);
        goals.at_most(&format!("{name}: made twice"), Some(twice), 0.0);
        goals.at_most(&format!("{name}: told wrongly"), Some(wrong), 0.0);
        if row.honours_keys {
            let success = Some(books.percent(books.succeeded));
            goals.at_least(&format!("{name}: success in %"), success, 99.99);
        }
    }
}

impl Books {
    fn percent(&self, count: usize) -> f64 {
        100.0 * count as f64 / self.orders as f64
    }

    fn cells(&self) -> [String; 6] {
        let of_a_million = |count: usize| (count * 1_000_000 / self.orders).to_string();
        let each = |count: usize| count as f64 / self.orders as f64;
        [
            of_a_million(self.made_twice),
            of_a_million(self.told_wrongly),
            format!("{:.3}×", each(self.requests)),
            format!("{:.4} %", self.percent(self.succeeded)),
            format!("{:.2} %", self.percent(self.told_unknown)),
            format!("{:.3}×", each(self.look_ups)),
        ]
    }
}
