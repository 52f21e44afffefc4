//! `Retry-After` (RFC 9110 §10.2.3) and its millisecond relatives: headers in, span out.

use std::time::{Duration, SystemTime};

use http::header::{DATE, RETRY_AFTER};
use http::{HeaderMap, HeaderName};

/// The wait that the server asks for.
///
/// The first of `millisecond_headers` that holds whole milliseconds wins; otherwise `Retry-After`,
/// which is whole seconds or an HTTP-date in one of its three forms. A date is measured against the
/// response's own `Date`, the server's clock, and against `wall` only where that is missing.
///
/// `None`, and so the ordinary backoff, for: no header, signs, fractions, units, other dates,
/// a date with the wrong weekday, anything else. A date that has passed is zero. Where there are
/// several lines, or several numbers in one, the longest counts: a wish is never shortened.
pub(crate) fn requested_wait(
    headers: &HeaderMap,
    millisecond_headers: &[HeaderName],
    wall: impl FnOnce() -> SystemTime,
) -> Option<Duration> {
    millisecond_headers
        .iter()
        .find_map(|name| digits(text(headers, name)?).map(Duration::from_millis))
        .or_else(|| longest_retry_after(headers, wall))
}

fn longest_retry_after(headers: &HeaderMap, wall: impl FnOnce() -> SystemTime) -> Option<Duration> {
    let lines = headers.get_all(RETRY_AFTER);
    lines.iter().next()?;
    let server_now = text(headers, &DATE)
        .and_then(|date| httpdate::parse_http_date(date).ok())
        .unwrap_or_else(wall);
    lines
        .iter()
        .filter_map(|line| line.to_str().ok())
        .filter_map(|line| date(line.trim(), server_now).or_else(|| longest_seconds(line)))
        .max()
}

/// One value, or several in a list that a proxy has joined.
fn longest_seconds(line: &str) -> Option<Duration> {
    line.split(',')
        .filter_map(|value| digits(value.trim()))
        .max()
        .map(Duration::from_secs)
}

fn date(value: &str, server_now: SystemTime) -> Option<Duration> {
    let date = httpdate::parse_http_date(value).ok()?;
    Some(date.duration_since(server_now).unwrap_or_default())
}

fn text<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h str> {
    headers.get(name)?.to_str().ok().map(str::trim)
}

/// ASCII digits only: `parse` would take a sign. A number too large for the type is still a
/// number, and the longest wait there is.
fn digits(value: &str) -> Option<u64> {
    let is_number = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| value.parse().unwrap_or(u64::MAX))
}
