//! The core against scripts, oracles and examples, all in virtual time.

mod backoff;
mod breaker;
mod budget;
mod call;
mod limits;
mod operations;
mod oracle;
mod others;
mod plan;
mod promises;
mod pushback;
mod tally;

use std::time::Duration;

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}
