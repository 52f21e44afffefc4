//! One client that calls one service, and what it was told.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use reqwest::Response;
use reqwest_idempotent_retry::{CancellationToken, RetryErrorExt, RetryResponseExt, StopReason};
use reqwest_middleware::{ClientWithMiddleware, Error};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::service::Service;

/// Operations of a caller under way at once.
const AT_ONCE: usize = 32;

#[derive(Debug)]
pub(crate) struct Caller {
    pub(crate) name: &'static str,
    pub(crate) service: &'static str,
    client: ClientWithMiddleware,
    url: String,
    told: Mutex<Told>,
}

/// How its operations have ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told {
    pub(crate) operations: u64,
    pub(crate) succeeded: u64,
    pub(crate) stops: HashMap<StopReason, u64>,
    /// When the last operation was begun that failed, and the last of all.
    pub(crate) last_failure: Option<Instant>,
    pub(crate) last: Option<Instant>,
}

impl Caller {
    pub(crate) fn new(
        name: &'static str,
        client: &ClientWithMiddleware,
        service: &Service,
    ) -> Arc<Self> {
        Arc::new(Self {
            name,
            service: service.name,
            client: client.clone(),
            url: service.url(),
            told: Mutex::default(),
        })
    }

    pub(crate) fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins operations at a steady rate, and returns when all have ended. What the machine is too
    /// slow for is made up for later.
    pub(crate) async fn keeps_sending(self: Arc<Self>, per_second: u32, until: CancellationToken) {
        let free = Arc::new(Semaphore::new(AT_ONCE));
        let mut ticks = tokio::time::interval(Duration::from_secs(1) / per_second);
        let mut under_way = JoinSet::new();
        while !until.is_cancelled() {
            ticks.tick().await;
            let place = Arc::clone(&free).acquire_owned().await;
            let caller = Arc::clone(&self);
            under_way.spawn(async move {
                caller.sends().await;
                drop(place);
            });
        }
        under_way.join_all().await;
    }

    async fn sends(&self) {
        let begun = Instant::now();
        let result = self.client.get(&self.url).send().await;
        self.told().add(begun, &result);
        if let Ok(answer) = result {
            // Read to its end, so that the connection can be used again.
            let _ = answer.bytes().await;
        }
    }
}

impl Told {
    fn add(&mut self, begun: Instant, result: &Result<Response, Error>) {
        self.operations += 1;
        self.last = self.last.max(Some(begun));
        if result
            .as_ref()
            .is_ok_and(|answer| answer.status().is_success())
        {
            self.succeeded += 1;
        } else {
            self.last_failure = self.last_failure.max(Some(begun));
        }
        if let Some(stop) = stop(result) {
            *self.stops.entry(stop).or_default() += 1;
        }
    }

    pub(crate) fn stopped(&self, reason: StopReason) -> u64 {
        self.stops.get(&reason).copied().unwrap_or_default()
    }
}

/// Why there was no further attempt: an answer that is no success has it in its report.
fn stop(result: &Result<Response, Error>) -> Option<StopReason> {
    match result {
        Ok(answer) => answer.retry_report()?.stop(),
        Err(error) => Some(error.retry_error()?.stop()),
    }
}
