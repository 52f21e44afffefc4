//! The time that is left, as a header says it: relative, so that no two clocks have to agree.

use std::time::Duration;

use http::{HeaderName, HeaderValue};

/// How a header says how much time is left: to a server, by
/// [`timeout_header`](crate::RetryMiddlewareBuilder::timeout_header), and from a client, by
#[cfg_attr(
    feature = "server",
    doc = " [`server::ContextLayer`](crate::server::ContextLayer)."
)]
#[cfg_attr(not(feature = "server"), doc = " `server::ContextLayer`.")]
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TimeoutHeader {
    /// `grpc-timeout`: at most eight digits and a unit, `2500m`
    /// ([gRPC over HTTP/2](https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md#requests)).
    Grpc,
    /// `x-envoy-expected-rq-timeout-ms`: whole milliseconds, as
    /// [Envoy](https://www.envoyproxy.io/docs/envoy/latest/configuration/http/http_filters/router_filter#x-envoy-expected-rq-timeout-ms)
    /// tells the services behind it.
    Envoy,
    /// A header of your choice: whole milliseconds.
    Millis(HeaderName),
}

static GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");
static ENVOY_EXPECTED: HeaderName = HeaderName::from_static("x-envoy-expected-rq-timeout-ms");

/// What fits the eight digits of a `grpc-timeout`.
const LARGEST: u128 = 99_999_999;
#[cfg(feature = "server")]
const MOST_DIGITS: usize = 8;

/// The units of a `grpc-timeout` in nanoseconds, finest first.
const UNITS: [(char, u128); 6] = [
    ('n', 1),
    ('u', 1_000),
    ('m', 1_000_000),
    ('S', 1_000_000_000),
    ('M', 60_000_000_000),
    ('H', 3_600_000_000_000),
];

impl TimeoutHeader {
    /// The header's name.
    #[must_use]
    pub fn name(&self) -> &HeaderName {
        match self {
            Self::Grpc => &GRPC_TIMEOUT,
            Self::Envoy => &ENVOY_EXPECTED,
            Self::Millis(name) => name,
        }
    }

    /// `left`, rounded down: never more than there is.
    pub(crate) fn write(&self, left: Duration) -> HeaderValue {
        match self {
            Self::Grpc => grpc(left),
            Self::Envoy | Self::Millis(_) => {
                HeaderValue::from(u64::try_from(left.as_millis()).unwrap_or(u64::MAX))
            }
        }
    }

    /// `None`: it is not what this header may be.
    #[cfg(feature = "server")]
    pub(crate) fn read(&self, value: &HeaderValue) -> Option<Duration> {
        let text = value.to_str().ok()?;
        match self {
            Self::Grpc => {
                let unit = text.chars().next_back()?;
                let (_, nanos) = UNITS.iter().find(|known| known.0 == unit)?;
                let digits = text.strip_suffix(unit)?;
                let is_short = digits.len() <= MOST_DIGITS;
                let count = whole_number(digits).filter(|_| is_short)?;
                let nanos = u128::from(count).checked_mul(*nanos)?;
                let seconds = u64::try_from(nanos / NANOS_PER_SECOND).ok()?;
                let rest = u32::try_from(nanos % NANOS_PER_SECOND).ok()?;
                Some(Duration::new(seconds, rest))
            }
            Self::Envoy | Self::Millis(_) => whole_number(text).map(Duration::from_millis),
        }
    }
}

#[cfg(feature = "server")]
const NANOS_PER_SECOND: u128 = 1_000_000_000;

/// Digits and nothing else, not even a sign.
#[cfg(feature = "server")]
pub(crate) fn whole_number(text: &str) -> Option<u64> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok()).flatten()
}

/// In milliseconds where that loses nothing of note, in the finest unit that fits otherwise.
fn grpc(left: Duration) -> HeaderValue {
    let nanos = left.as_nanos();
    let is_short = nanos < 1_000_000;
    let mut units = UNITS.iter().skip(if is_short { 1 } else { 2 });
    let fitting = units.find(|unit| nanos / unit.1 <= LARGEST);
    let text = match fitting {
        Some((unit, size)) => format!("{}{unit}", nanos / size),
        None => format!("{LARGEST}H"),
    };
    HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static("0m"))
}
