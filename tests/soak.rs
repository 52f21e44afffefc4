//! A soak: thousands of orders through random faults of server and network, and then the claims of
//! the layer against the server's own books.
//!
//! `SOAK_OPERATIONS` says how many (from 500 on the shares are checked too), `SOAK_SEED` which
//! faults. Whatever the seed and however busy the machine, what is claimed must be
//! true: only how often each thing happens depends on them.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod net;
mod support;

mod soak {
    pub(crate) mod audit;
    pub(crate) mod books;
    pub(crate) mod callers;
    pub(crate) mod plan;
    pub(crate) mod server;
}

use std::collections::HashMap;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use net::{Act, Wire};
use reqwest_idempotent_retry::Certainty;
use soak::audit::{Audit, Figures};
use soak::callers::{Callers, Confirmation, Confirmed, Told, Ways};
use soak::plan::Seed;
use soak::server::{Port, Server};
use support::{ms, secs};
use tokio::task::JoinSet;

const DEFAULT_OPERATIONS: usize = 6000;
const DEFAULT_SEED: u64 = 17;

/// Most of them wait most of the time.
const CALLERS: usize = 32;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_told_of_an_order_is_true_whatever_fails() {
    let soak = Soak::from_environment();
    println!(
        "SOAK_OPERATIONS={} SOAK_SEED={}",
        soak.operations, soak.seed.0
    );
    let limit = soak.time_limit();
    let Ok(figures) = tokio::time::timeout(limit, soak.run()).await else {
        panic!("not done within {limit:?}");
    };
    println!("{figures}");
    figures.check();
}

#[derive(Clone, Copy, Debug)]
struct Soak {
    operations: usize,
    seed: Seed,
}

impl Soak {
    fn from_environment() -> Self {
        Self {
            operations: number("SOAK_OPERATIONS").unwrap_or(DEFAULT_OPERATIONS),
            seed: Seed(number("SOAK_SEED").unwrap_or(DEFAULT_SEED)),
        }
    }

    /// Many times what it takes: only something that hangs gets there.
    fn time_limit(self) -> Duration {
        let each = u32::try_from(self.operations).expect("a number of operations");
        secs(60) + ms(5) * each
    }

    /// The storm, the calm after it, and the audit.
    async fn run(self) -> Figures {
        let server = Server::start(self.seed);
        let begun = Instant::now();
        let told = self.storm(&server).await;
        let elapsed = begun.elapsed();
        let (requests, restarts) = (server.requests(), server.restarts());
        server.calm_down().await;
        let confirmed = confirm_unknown(&server, &told).await;
        let shop = server.close().await;
        let audit = Audit {
            told: &told,
            books: &shop.books,
            confirmed: &confirmed,
            fixed_retries: self.fixed_retries(),
        };
        audit.figures(requests, restarts, elapsed)
    }

    async fn storm(self, server: &Server) -> Vec<Told> {
        let closed_port = Port::reserve();
        let silent_peer = Wire::script([Act::Mute]).await;
        let ways = Ways {
            seed: self.seed,
            server: server.address(),
            closed_port: closed_port.address(),
            silent_peer: address(&silent_peer),
            asked: Mutex::default(),
        };
        let callers = Arc::new(Callers::new(self.seed, ways, self.fixed_retries()));
        side_by_side(self.operations, move |operation| {
            let callers = Arc::clone(&callers);
            async move { callers.call(operation as u64).await }
        })
        .await
    }

    /// Fewer than are wanted.
    fn fixed_retries(self) -> u32 {
        u32::try_from(self.operations / 50).expect("a number of operations")
    }
}

fn address(wire: &Wire) -> SocketAddr {
    let url = wire.url("");
    url["http://".len()..].parse().expect("an address")
}

fn number<T: std::str::FromStr>(variable: &str) -> Option<T> {
    let text = std::env::var(variable).ok()?;
    let number = text.parse().ok();
    assert!(number.is_some(), "{variable} is not a number: {text}");
    number
}

/// Looks up every unknown operation that has a key.
async fn confirm_unknown(server: &Server, told: &[Told]) -> HashMap<u64, Confirmed> {
    let is_unknown = |told: &&Told| told.certainty == Certainty::Unknown;
    let unknown = told.iter().filter(is_unknown);
    let keyed = unknown.filter_map(|told| Some((told.plan, told.key.clone()?)));
    let keyed: Arc<[_]> = keyed.collect();
    let service = Arc::new(Confirmation::with(server.address()));
    let confirmed = side_by_side(keyed.len(), move |at| {
        let (keyed, service) = (Arc::clone(&keyed), Arc::clone(&service));
        async move {
            let (plan, key) = &keyed[at];
            (plan.operation, service.confirm(plan, key).await)
        }
    });
    confirmed.await.into_iter().collect()
}

/// Does the work for each number below `count`, a few at a time.
async fn side_by_side<T, W>(
    count: usize,
    work: impl Fn(usize) -> W + Clone + Send + 'static,
) -> Vec<T>
where
    T: Send + 'static,
    W: Future<Output = T> + Send,
{
    let next = Arc::new(AtomicUsize::new(0));
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        let (next, work) = (Arc::clone(&next), work.clone());
        callers.spawn(async move {
            let mut done = Vec::new();
            loop {
                match next.fetch_add(1, Ordering::Relaxed) {
                    mine if mine < count => done.push(work(mine).await),
                    _ => return done,
                }
            }
        });
    }
    callers.join_all().await.into_iter().flatten().collect()
}
