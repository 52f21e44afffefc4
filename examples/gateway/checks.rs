//! What is shown of each page, and what must be true of it.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use axum::http::Method;

use crate::browser::{Answer, Browser};
use crate::figures::{Figures, REASONS};
use crate::shop::{CATALOG, OWN_WORK, Shop, VISITS};
use crate::stock::{Call, Ending, Stock};
use crate::{Result, ms};

/// How late a busy machine may be. Work that never ends would be later.
const SLACK: Duration = Duration::from_secs(3);

/// How often the metrics are asked for until they have caught up with the end of the last call.
const LOOKS: u32 = 50;

/// A page that a browser has asked for.
pub(crate) struct Page {
    product: &'static str,
    begun: Instant,
    gave: Duration,
    calls: Vec<Call>,
}

impl Page {
    pub(crate) fn new(
        product: &'static str,
        begun: Instant,
        gave: Duration,
        calls: Vec<Call>,
    ) -> Self {
        Self {
            product,
            begun,
            gave,
            calls,
        }
    }

    fn all(&self, ending: Ending) -> bool {
        self.calls.iter().all(|call| call.is(ending))
    }

    /// From the browser's start to the end of this call, as the stock service has seen it.
    fn end_of(&self, call: &Call) -> Duration {
        let ended = call.ended.map(|(_, at)| at.duration_since(self.begun));
        ended.unwrap_or_default()
    }

    fn last_end(&self) -> Duration {
        let ends = self.calls.iter().map(|call| self.end_of(call));
        ends.max().unwrap_or_default()
    }
}

pub(crate) struct Checks<'a> {
    shop: &'a Shop,
    stock: &'a Stock,
    wrong: usize,
}

impl<'a> Checks<'a> {
    pub(crate) fn new(shop: &'a Shop, stock: &'a Stock) -> Self {
        println!(
            "browser → shop → stock: the time that is left, in ms, as each of them knows it.\n\
             \"told\" is the shop's grpc-timeout, written at the moment of each attempt: it has worked\n\
             100 ms by then, and keeps 100 ms for its own answer."
        );
        let wrong = 0;
        Self { shop, stock, wrong }
    }

    pub(crate) fn print(&self, page: &Page, answer: Option<&Answer>) {
        let titles = ["browser", "shop", "told", "stock"];
        let [browser, shop, told, stock] = titles;
        println!(
            "      {:<22} {browser:>8} {shop:>6} {told:>6} {stock:>6}   ended",
            "call (attempt)"
        );
        let had = self.shop.had(page.product);
        for call in &page.calls {
            let attempt = call.attempt.unwrap_or_default();
            println!(
                "      {:<22} {:>8} {:>6} {:>6} {:>6}   after {} ms: {}",
                format!("{} {} ({attempt})", call.method, call.part),
                page.gave.as_millis(),
                millis(had),
                millis(call.told()),
                millis(call.had),
                page.end_of(call).as_millis(),
                name(call.ended),
            );
        }
        match answer {
            None => println!("      the browser is gone"),
            Some(answer) => println!(
                "      the browser got {} after {} ms: {}",
                answer.status,
                answer.took.as_millis(),
                answer.refused.as_ref().unwrap_or(&answer.text)
            ),
        }
    }

    /// It only ever gets less on its way.
    pub(crate) fn of_the_time_left(&mut self, page: &Page) {
        let shop = self.shop.had(page.product);
        let is_less = |call: &Call| {
            let (Some(shop), Some(told), Some(stock)) = (shop, call.told(), call.had) else {
                return false;
            };
            shop <= page.gave && told + OWN_WORK <= shop && stock <= told
        };
        self.check(
            page.calls.iter().all(is_less),
            &format!(
                "{} calls: never more time than the hop before, and none for the {} ms of the shop",
                page.calls.len(),
                OWN_WORK.as_millis()
            ),
        );
    }

    pub(crate) fn of_a_page_in_time(&mut self, page: &Page, answer: &Answer) {
        self.check(answer.status == 200, "the browser has its page");
        let prices: Vec<_> = page
            .calls
            .iter()
            .filter(|call| call.part == "price")
            .collect();
        let is_repeated = match prices[..] {
            [first, second] => {
                first.is(Ending::Failed)
                    && second.is(Ending::Answered)
                    && second.told().map(|told| told + ms(50)) <= first.told()
            }
            _ => false,
        };
        self.check(
            is_repeated,
            "the price was asked for twice, the second time with less time",
        );
        let visit = page.calls.iter().find(|call| call.part == "visit");
        let went_on =
            visit.is_some_and(|visit| visit.is(Ending::Answered) && page.end_of(visit) > ms(300));
        self.check(
            went_on,
            "the visit went on in its task when the page was there, and was answered",
        );
    }

    pub(crate) fn of_work_that_never_ends(&mut self, page: &Page, answer: &Answer) {
        let last = page.last_end();
        let what = format!(
            "all {} calls were given up in time: after {} ms of {}",
            page.calls.len(),
            last.as_millis(),
            page.gave.as_millis()
        );
        let is_ended = page.calls.len() == 3 && page.all(Ending::BrokenOff);
        self.check(is_ended && last < page.gave + SLACK, &what);
        let told = answer.status == 504 && answer.text.contains("deadline too close");
        self.check(told, "the browser was told why there is no page");
    }

    pub(crate) fn of_too_little_time(&mut self, page: &Page, answer: &Answer) {
        let is_refused = page.calls.len() == 3 && page.all(Ending::Refused);
        self.check(is_refused, "all 3 calls were refused before any work, once");
        let reason = answer.refused.as_deref();
        let told = answer.status == 503 && reason == Some("too little time left");
        self.check(told, "the browser was told so");
    }

    pub(crate) fn of_a_browser_that_goes_away(&mut self, page: &Page, left: Duration) {
        let last = page.last_end();
        let what = format!(
            "it left after {} ms, and all {} calls had ended after {} ms, of {} that were given",
            left.as_millis(),
            page.calls.len(),
            last.as_millis(),
            page.gave.as_millis()
        );
        let is_ended = page.calls.len() == 3 && page.all(Ending::BrokenOff);
        self.check(is_ended && last < left + SLACK, &what);
    }

    /// What an operator reads is what the stock service has counted.
    pub(crate) async fn of_the_metrics(&mut self, browser: &Browser) -> Result<()> {
        println!(
            "\n{}, next to what the stock service has counted",
            browser.metrics_url()
        );
        let counted = [Method::GET, Method::POST].map(|method| self.counted(&method));
        let mut read = counted;
        for _ in 0..LOOKS {
            let text = browser.metrics().await?;
            read = [CATALOG, VISITS].map(|client| Figures::of(client, &text));
            if read == counted {
                break;
            }
            tokio::time::sleep(ms(100)).await;
        }
        print_figures(read, counted);
        self.check(
            read == counted,
            "the metrics say what the stock service has counted",
        );
        let is_whole = |figures: &Figures| figures.stops.iter().sum::<u64>() == figures.all_stops;
        self.check(
            read.iter().all(is_whole),
            "and no other reason to stop was counted",
        );
        Ok(())
    }

    /// What the metrics must say of the client that uses this method.
    fn counted(&self, method: &Method) -> Figures {
        let count = |is_of_kind: &dyn Fn(&Call) -> bool| self.stock.count(method, is_of_kind);
        let broken_off = |product: &'static str| {
            count(&|call| call.product == product && call.is(Ending::BrokenOff))
        };
        let refused = count(&|call| call.is(Ending::Refused));
        let (late, cancelled) = (broken_off("jam"), broken_off("honey"));
        // A GET asks for no effect, so nobody needs to know whether it happened.
        let unknown = match *method {
            Method::GET => 0,
            _ => count(&|call| call.is(Ending::BrokenOff)),
        };
        Figures {
            first_sends: count(&|call| call.attempt == Some(1)),
            retries: count(&|call| call.attempt > Some(1)),
            stops: [late, refused, cancelled],
            all_stops: late + refused + cancelled,
            unknown,
        }
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

    fn check(&mut self, is_right: bool, what: &str) {
        let verdict = if is_right { "OK   " } else { "WRONG" };
        println!("{verdict} {what}");
        self.wrong += usize::from(!is_right);
    }
}

pub(crate) fn chapter(product: &str, what: &str) {
    println!("\n{product}: {what}");
}

fn print_figures(read: [Figures; 2], counted: [Figures; 2]) {
    let [late, refused, cancelled] = REASONS.map(|reason| format!("stopped: {reason}"));
    let questions = [
        "first sends",
        "extra attempts",
        &late,
        &refused,
        &cancelled,
        "outcomes unknown",
    ];
    println!(
        "      {:<30} {CATALOG:>10} {VISITS:>10}   counted",
        "client"
    );
    let (read, counted) = (
        read.map(|figures| figures.cells()),
        counted.map(|figures| figures.cells()),
    );
    for (row, question) in questions.iter().enumerate() {
        println!(
            "      {question:<30} {:>10} {:>10}   {} + {}",
            read[0][row], read[1][row], counted[0][row], counted[1][row]
        );
    }
}

fn millis(span: Option<Duration>) -> String {
    span.map_or("-".to_owned(), |span| span.as_millis().to_string())
}

fn name(ended: Option<(Ending, Instant)>) -> &'static str {
    match ended.map(|(how, _)| how) {
        None => "not yet",
        Some(Ending::Answered) => "answered",
        Some(Ending::Failed) => "failed with 503",
        Some(Ending::Refused) => "refused with 503",
        Some(Ending::BrokenOff) => "broken off by the shop",
    }
}
