//! The only randomness: the same seed gives the same simulation, on any number of threads.

use std::f64::consts::TAU;
use std::time::Duration;

pub(crate) struct Dice(fastrand::Rng);

impl Dice {
    /// Dice of their own for whatever has this name.
    pub(crate) fn new(seed: u64, name: &str) -> Self {
        Self(fastrand::Rng::with_seed(fnv(seed, name.as_bytes())))
    }

    /// From `[0, 1)`.
    pub(crate) fn uniform(&mut self) -> f64 {
        self.0.f64()
    }

    pub(crate) fn chance(&mut self, probability: f64) -> bool {
        self.uniform() < probability
    }

    pub(crate) fn below(&mut self, count: usize) -> usize {
        self.0.usize(..count)
    }

    /// From nothing to `longest`.
    pub(crate) fn part_of(&mut self, longest: Duration) -> Duration {
        longest.mul_f64(self.uniform())
    }

    /// The time to the next of so many independent arrivals a second.
    pub(crate) fn gap(&mut self, per_second: f64) -> Duration {
        Duration::from_secs_f64(-(1.0 - self.uniform()).ln() / per_second)
    }

    /// A normal distribution (Box and Muller).
    pub(crate) fn normal(&mut self, mean: f64, deviation: f64) -> f64 {
        let length = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        mean + deviation * length * (TAU * self.uniform()).cos()
    }
}

fn fnv(seed: u64, bytes: &[u8]) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325 ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bytes.iter().fold(start, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
