//! What an operator reads of one client in the Prometheus text.

use reqwest_idempotent_retry::metrics;

/// Why operations of this example stop.
pub(crate) const REASONS: [&str; 3] = ["deadline_too_close", "server_veto", "cancelled"];

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Figures {
    pub(crate) first_sends: u64,
    pub(crate) retries: u64,
    /// By [`REASONS`].
    pub(crate) stops: [u64; 3],
    pub(crate) all_stops: u64,
    pub(crate) unknown: u64,
}

impl Figures {
    pub(crate) fn of(client: &str, text: &str) -> Self {
        let label = |name: &str, value: &str| format!("{name}=\"{value}\"");
        let client = label("client", client);
        let total = |metric| sum(text, metric, &[&client]);
        let by_reason = |reason| sum(text, metrics::STOPS, &[&client, &label("reason", reason)]);
        Self {
            first_sends: total(metrics::FIRST_SENDS),
            retries: total(metrics::RETRIES),
            stops: REASONS.map(by_reason),
            all_stops: total(metrics::STOPS),
            unknown: total(metrics::UNKNOWN),
        }
    }

    pub(crate) fn cells(&self) -> [u64; 6] {
        let [late, refused, cancelled] = self.stops;
        [
            self.first_sends,
            self.retries,
            late,
            refused,
            cancelled,
            self.unknown,
        ]
    }
}

/// Over all lines of a metric that have these labels: `name{label="value",…} 17`.
fn sum(text: &str, metric: &str, labels: &[&str]) -> u64 {
    let lines = text.lines().filter_map(|line| line.strip_prefix(metric));
    let lines = lines.filter_map(|rest| rest.strip_prefix('{')?.rsplit_once("} "));
    lines
        .filter(|(given, _)| labels.iter().all(|label| given.contains(label)))
        .filter_map(|(_, value)| value.parse::<u64>().ok())
        .sum()
}
