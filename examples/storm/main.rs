//! Retry storms in simulated time: this crate's own decision core, and how others retry.
//!
//! ```text
//! cargo run --release --example storm
//! cargo run --release --example storm -- --quick                 # the same goals, in seconds
//! cargo run --release --example storm -- --plots docs/img a b d  # with plots, of some parts
//! ```
//!
//! `src/policy` is compiled in as it is, and told a time and draws of its own. The same seed gives the
//! same output, byte for byte. Exits with 1 when a goal is missed.

mod amplification;
mod caller;
mod client;
mod course;
mod dice;
mod goals;
#[allow(
    dead_code,
    unreachable_pub,
    reason = "the simulation uses a part of it"
)]
#[path = "../../src/invalid.rs"]
mod invalid;
mod jitter;
mod metastable;
mod options;
mod orders;
mod parallel;
mod peers;
mod plot;
#[allow(
    dead_code,
    unused_imports,
    unreachable_pub,
    reason = "the simulation uses a part of it"
)]
#[path = "../../src/policy/mod.rs"]
mod policy;
mod race;
mod server;
mod shards;
mod shop;
mod storm;
mod table;
mod time;
mod traffic;

/// As `src/sync.rs`.
mod sync {
    pub(crate) use std::sync::atomic;
    pub(crate) use std::sync::{Mutex, MutexGuard, PoisonError};
}

use std::process::ExitCode;

use goals::Goals;
use options::Options;
use plot::Plots;

fn main() -> ExitCode {
    let Some(options) = Options::parse(std::env::args().skip(1)) else {
        eprintln!("{}", Options::USAGE);
        return ExitCode::FAILURE;
    };
    let scale = options.scale;
    let mut goals = Goals::default();
    let (mut curves, mut courses) = (Vec::new(), Vec::new());
    if begins(
        &options,
        "a",
        "Jitter: clients that write one row, as in AWS's model",
    ) {
        jitter::run(&scale, &mut goals);
    }
    if begins(
        &options,
        "b",
        "Load and success in %, while a service fails at random",
    ) {
        curves = amplification::run(&scale, &mut goals);
    }
    if begins(
        &options,
        "c",
        "Load while everything fails, and the number of clients",
    ) {
        amplification::run_independence(&scale, &mut goals);
    }
    if begins(
        &options,
        "d",
        "Load, recovery and success, after ten bad seconds of a busy server",
    ) {
        courses = metastable::run(&scale, &mut goals);
    }
    if begins(&options, "e", "Load and success in %, with one shard down") {
        shards::run(&scale, &mut goals);
    }
    if begins(&options, "f", "Orders whose answers are lost") {
        orders::run(&scale, &mut goals);
    }
    let plots = Plots {
        curves: &curves,
        courses: &courses,
        scale,
    };
    if let Some(folder) = &options.plots
        && let Err(error) = plots.write(folder)
    {
        goals.note(false, &format!("plots in {}: {error}", folder.display()));
    }
    goals.end()
}

fn begins(options: &Options, part: &str, title: &str) -> bool {
    let wanted = options.wants(part);
    if wanted {
        println!("\n## ({part}) {title}\n");
    }
    wanted
}
