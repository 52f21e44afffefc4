//! What was seen of the services, second by second.

use std::sync::Arc;

use reqwest_idempotent_retry::{BreakerState, LoadControl, StopReason};

use crate::caller::Caller;
use crate::service::Service;

pub(crate) struct Table<'a> {
    services: [&'a Service; 2],
    load: &'a LoadControl,
    callers: &'a [Arc<Caller>],
    before: [Figures; 2],
}

/// Of one service, since the start.
#[derive(Clone, Copy, Debug, Default)]
struct Figures {
    first: u64,
    all: u64,
    operations: u64,
    succeeded: u64,
    by_breaker: u64,
    by_budget: u64,
    breaker: Option<BreakerState>,
    tokens: f64,
}

impl<'a> Table<'a> {
    pub(crate) fn new(
        services: [&'a Service; 2],
        load: &'a LoadControl,
        callers: &'a [Arc<Caller>],
    ) -> Self {
        Self {
            services,
            load,
            callers,
            before: Default::default(),
        }
    }

    pub(crate) fn head(&self) {
        println!("sends    first sends / all requests, as the service has counted them");
        println!("ok       share of the operations that ended with success");
        println!(
            "tokens   what the retry budget holds; like the breaker, at the end of the second"
        );
        println!("refused  retries not sent: for the open breaker + for the empty budget");
        println!();
        let names = self.services.map(|service| format!("{:^46}", service.name));
        print_row("", &names);
        let titles = cells(["sends", "ok", "breaker", "tokens", "refused"]);
        print_row("s", &[titles.clone(), titles]);
    }

    /// What has happened since the last row.
    pub(crate) fn row(&mut self, second: u32) {
        let now = self.services.map(|service| self.figures(service));
        let rows = [0, 1].map(|service| now[service].since(&self.before[service]).cells());
        print_row(&second.to_string(), &rows);
        self.before = now;
    }

    fn figures(&self, service: &Service) -> Figures {
        let arrivals = service.received().ever;
        let mut figures = Figures {
            first: arrivals.first,
            all: arrivals.all,
            ..Figures::default()
        };
        let callers = self.callers.iter();
        for caller in callers.filter(|caller| caller.service == service.name) {
            let told = caller.told();
            figures.operations += told.operations;
            figures.succeeded += told.succeeded;
        }
        if let Some(load) = self.load.snapshot(&service.key()) {
            figures.by_breaker = load.stopped(StopReason::BreakerOpen);
            figures.by_budget = load.stopped(StopReason::BudgetExhausted);
            figures.breaker = load.breaker().map(|breaker| breaker.state());
            figures.tokens = load.budget().map_or(0.0, |budget| budget.balance());
        }
        figures
    }
}

impl Figures {
    fn since(&self, before: &Self) -> Self {
        Self {
            first: self.first - before.first,
            all: self.all - before.all,
            operations: self.operations - before.operations,
            succeeded: self.succeeded - before.succeeded,
            by_breaker: self.by_breaker - before.by_breaker,
            by_budget: self.by_budget - before.by_budget,
            ..*self
        }
    }

    fn cells(&self) -> String {
        let ok = match self.operations {
            0 => "-".to_owned(),
            operations => format!("{} %", self.succeeded * 100 / operations),
        };
        let breaker = self.breaker.map(|state| state.to_string());
        cells([
            &format!("{} / {}", self.first, self.all),
            &ok,
            &breaker.unwrap_or_default(),
            &format!("{:.1}", self.tokens),
            &format!("{} + {}", self.by_breaker, self.by_budget),
        ])
    }
}

fn cells([sends, ok, breaker, tokens, refused]: [&str; 5]) -> String {
    format!("{sends:>11} {ok:>6}  {breaker:<9} {tokens:>6}  {refused:<8}")
}

fn print_row(second: &str, [one, other]: &[String; 2]) {
    println!("{second:>4} |{one}|{}", other.trim_end());
}
