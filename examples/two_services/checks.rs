//! What must be true in the end.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use reqwest_idempotent_retry::{BreakerState, LoadControl, LoadSnapshot, StopReason};

use crate::Result;
use crate::caller::{Caller, Told};
use crate::service::{Arrivals, Service};

/// A service that is back serves everybody again within this time.
const RECOVERY: Duration = Duration::from_secs(2);

pub(crate) struct Checks<'a> {
    load: &'a LoadControl,
    callers: &'a [Arc<Caller>],
    wrong: usize,
}

impl<'a> Checks<'a> {
    pub(crate) fn new(load: &'a LoadControl, callers: &'a [Arc<Caller>]) -> Self {
        println!();
        Self {
            load,
            callers,
            wrong: 0,
        }
    }

    pub(crate) fn of_the_one_that_was_well(&mut self, service: &Service) -> Result<()> {
        let Arrivals { all, first } = service.received().ever;
        let told = self.told(service);
        let (operations, succeeded) = sum(&told);
        self.check(
            succeeded == operations,
            service,
            &format!("{succeeded} of {operations} operations succeeded"),
        );
        self.check(
            all == first && first == operations,
            service,
            &format!("{all} requests, all of them first sends"),
        );
        let breaker = self.snapshot(service)?.breaker().map(|it| it.opened());
        self.check(breaker == Some(0), service, "its breaker never opened");
        Ok(())
    }

    pub(crate) fn of_the_one_that_failed(
        &mut self,
        service: &Service,
        recovered: Instant,
    ) -> Result<()> {
        let received = service.received();
        self.check_load(service, "while it failed", received.while_failing);
        self.check_load(service, "in all", received.ever);
        self.check_breaker(service)?;
        self.check_refusals(service)?;
        self.check_recovery(service, recovered);
        Ok(())
    }

    fn check_load(&mut self, service: &Service, when: &str, arrivals: Arrivals) {
        let Arrivals { all, first } = arrivals;
        let share = all as f64 / first as f64;
        let what =
            format!("{all} requests for {first} first sends {when}: {share:.2}, at most 1.1");
        self.check(first > 0 && all * 10 <= first * 11, service, &what);
    }

    fn check_breaker(&mut self, service: &Service) -> Result<()> {
        let load = self.snapshot(service)?;
        let breaker = load.breaker().ok_or("no breaker")?;
        let (opened, state) = (breaker.opened(), breaker.state());
        self.check(
            opened > 0 && state == BreakerState::Closed,
            service,
            &format!("its breaker opened {opened} times, and is {state} in the end"),
        );
        Ok(())
    }

    /// Each caller is told why; both are refused for what either has seen; and nothing is counted that
    /// nobody was told.
    fn check_refusals(&mut self, service: &Service) -> Result<()> {
        for caller in self.callers_of(service) {
            let told = caller.told().clone();
            let [breaker, budget] = [StopReason::BreakerOpen, StopReason::BudgetExhausted]
                .map(|reason| (told.stopped(reason), reason));
            let what = format!(
                "{} was told {} × {}, {} × {}",
                caller.name, breaker.0, breaker.1, budget.0, budget.1
            );
            self.check(breaker.0 > 0, service, &what);
        }
        let load = self.snapshot(service)?;
        let told = self.told(service);
        let is_told = |(reason, count)| {
            let told: u64 = told.iter().map(|told| told.stopped(reason)).sum();
            told == count
        };
        let counted: u64 = load.stops().map(|(_, count)| count).sum();
        let all: u64 = told.iter().flat_map(|told| told.stops.values()).sum();
        let what = format!("{all} reasons told, the same {counted} counted by load control");
        self.check(all == counted && load.stops().all(is_told), service, &what);
        Ok(())
    }

    fn check_recovery(&mut self, service: &Service, recovered: Instant) {
        let told = self.told(service);
        let last_failure = told.iter().filter_map(|told| told.last_failure).max();
        let last = told.iter().filter_map(|told| told.last).max();
        let well_again = recovered + RECOVERY;
        let is_served = last_failure < Some(well_again) && last > Some(well_again);
        self.check(
            is_served,
            service,
            "everybody was served within 2 s of its return",
        );
    }

    /// Prints the verdict.
    pub(crate) fn end(self) -> ExitCode {
        match self.wrong {
            0 => {
                println!("\nAll as expected.");
                ExitCode::SUCCESS
            }
            wrong => {
                eprintln!("\n{wrong} checks failed: see WRONG above.");
                ExitCode::FAILURE
            }
        }
    }

    fn check(&mut self, is_right: bool, service: &Service, what: &str) {
        let verdict = if is_right { "OK   " } else { "WRONG" };
        println!("{verdict}  {}: {what}", service.name);
        self.wrong += usize::from(!is_right);
    }

    fn snapshot(&self, service: &Service) -> Result<LoadSnapshot> {
        let snapshot = self.load.snapshot(&service.key());
        snapshot.ok_or_else(|| format!("load control does not know {}", service.name).into())
    }

    fn callers_of(&self, service: &Service) -> impl Iterator<Item = &'a Caller> + use<'a> {
        let (callers, service) = (self.callers.iter(), service.name);
        let callers = callers.filter(move |caller| caller.service == service);
        callers.map(AsRef::as_ref)
    }

    fn told(&self, service: &Service) -> Vec<Told> {
        let callers = self.callers_of(service);
        callers.map(|caller| caller.told().clone()).collect()
    }
}

fn sum(told: &[Told]) -> (u64, u64) {
    let operations = told.iter().map(|told| told.operations).sum();
    let succeeded = told.iter().map(|told| told.succeeded).sum();
    (operations, succeeded)
}
