//! The core against scripts, oracles and examples, all in virtual time.

mod backoff;
mod budget;
mod call;
mod limits;
mod operations;
mod oracle;
mod plan;

use std::time::Duration;

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}
