//! Every interleaving of a few threads on what they share: half-open permits, tokens, pushback.
//! `cargo run --manifest-path tests/model/Cargo.toml`

#[allow(dead_code, reason = "the models use a part of it")]
#[path = "../../../src/invalid.rs"]
mod invalid;
#[allow(
    dead_code,
    unused_imports,
    unreachable_pub,
    reason = "the models use a part of it"
)]
#[path = "../../../src/policy/mod.rs"]
mod policy;

/// The model checker's own, in the place of `src/sync.rs`.
#[allow(unused_imports, reason = "one name for each of its items")]
mod sync {
    pub(crate) use loom::sync::atomic;
    pub(crate) use loom::sync::{Mutex, MutexGuard};
    pub(crate) use std::sync::PoisonError;
}

mod breaker;
mod budget;
mod pushback;

use std::time::{Duration, Instant};

fn main() {
    let models: [(&str, fn()); 9] = [
        ("one permit, three takers", breaker::one_permit_three_takers),
        ("a permit comes back", breaker::a_permit_comes_back),
        (
            "an expired permit is not another's",
            breaker::an_expired_permit_is_not_anothers,
        ),
        (
            "a success and a failure together",
            breaker::a_success_and_a_failure_together,
        ),
        ("a straggler and a probe", breaker::a_straggler_and_a_probe),
        ("one token, two takers", budget::one_token_two_takers),
        ("a token comes back", budget::a_token_comes_back),
        (
            "the window gives no more than it has",
            budget::the_window_gives_no_more,
        ),
        ("the latest pushback counts", pushback::the_latest_counts),
    ];
    for (name, model) in models {
        loom::model(model);
        println!("{name} ... ok");
    }
    println!("{} passed, 0 failed", models.len());
}

/// An instant that all threads of a model share.
#[allow(clippy::disallowed_methods, reason = "where else would time start?")]
fn now() -> Instant {
    static ORIGIN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    *ORIGIN.get_or_init(Instant::now)
}

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}
