//! How long to wait before a retry, as a function of its number and one random draw.

use std::sync::Arc;
use std::time::Duration;

use crate::invalid::InvalidInput;

/// The wait before each retry.
///
/// Retry `k` (0 is the first) has the window `min(cap, base · factor^k)`; jitter decides which part
/// of the window is random. The window is capped *before* the draw, so late retries stay spread
/// out instead of all waiting exactly the cap. A `Retry-After` of the server is a floor below the
/// random part: it is never shortened, and clients that were told the same wait do not all return
/// at the same instant.
///
/// Checked when the middleware is built, not here.
///
/// ```
/// use std::time::Duration;
/// use reqwest_idempotent_retry::Backoff;
///
/// let base = Duration::from_millis(200);
/// let cap = Duration::from_secs(10);
/// let spread = Backoff::full_jitter(base, cap);        // anywhere in [0, 200 ms], [0, 400 ms], …
/// let gentle = Backoff::equal_jitter(base, cap);       // in [100 ms, 200 ms], [200 ms, 400 ms], …
/// let listed = Backoff::fixed([base, 3 * base]);       // 200 ms, then 600 ms for all further ones
/// let slower = Backoff::full_jitter(base, cap).factor(3.0);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Backoff {
    shape: Shape,
}

#[derive(Clone, Debug, PartialEq)]
enum Shape {
    Exponential {
        base: Duration,
        cap: Duration,
        factor: f64,
        jitter: f64,
    },
    Decorrelated {
        base: Duration,
        cap: Duration,
    },
    Fixed(Arc<[Duration]>),
}

/// Base of the default backoff: about the time in which a restarted process or a failed-over
/// connection answers again.
pub(crate) const DEFAULT_BASE: Duration = Duration::from_millis(200);

/// Cap of the default backoff: longer waits belong to a job queue, not to a caller that waits.
pub(crate) const DEFAULT_CAP: Duration = Duration::from_secs(10);

/// Doubling is what the published comparisons of jitter use.
const DEFAULT_FACTOR: f64 = 2.0;

/// Each decorrelated wait is drawn from up to three times the one before it (AWS, "Exponential
/// Backoff And Jitter").
const DECORRELATED_GROWTH: u32 = 3;

impl Default for Backoff {
    /// Full jitter, base 200 ms, cap 10 s.
    fn default() -> Self {
        Self::full_jitter(DEFAULT_BASE, DEFAULT_CAP)
    }
}

impl Backoff {
    /// Waits anywhere in `[0, window]`. The best spread; the default.
    #[must_use]
    pub fn full_jitter(base: Duration, cap: Duration) -> Self {
        Self::exponential(base, cap).jitter(1.0)
    }

    /// Waits anywhere in `[window / 2, window]`: never at once, at the price of a narrower spread.
    #[must_use]
    pub fn equal_jitter(base: Duration, cap: Duration) -> Self {
        Self::exponential(base, cap).jitter(0.5)
    }

    /// Waits `min(cap, draw from [base, 3 · previous wait])`.
    #[must_use]
    pub fn decorrelated(base: Duration, cap: Duration) -> Self {
        Self {
            shape: Shape::Decorrelated { base, cap },
        }
    }

    /// Waits exactly the window. Callers that failed together return together: for tests, or where
    /// something else spreads them.
    #[must_use]
    pub fn exponential(base: Duration, cap: Duration) -> Self {
        Self {
            shape: Shape::Exponential {
                base,
                cap,
                factor: DEFAULT_FACTOR,
                jitter: 0.0,
            },
        }
    }

    /// Waits exactly as listed; the last entry serves for all further retries.
    #[must_use]
    pub fn fixed(delays: impl IntoIterator<Item = Duration>) -> Self {
        Self {
            shape: Shape::Fixed(delays.into_iter().collect()),
        }
    }

    /// The part of the window that is random, from 0 (none) to 1 (all). Only for exponential shapes.
    #[must_use]
    pub fn jitter(mut self, part: f64) -> Self {
        if let Shape::Exponential { jitter, .. } = &mut self.shape {
            *jitter = part;
        }
        self
    }

    /// How much the window grows from one retry to the next, at least 1. Only for exponential shapes.
    #[must_use]
    pub fn factor(mut self, growth: f64) -> Self {
        if let Shape::Exponential { factor, .. } = &mut self.shape {
            *factor = growth;
        }
        self
    }

    pub(crate) fn validate(&self) -> Result<(), InvalidInput> {
        match &self.shape {
            Shape::Exponential { base, cap, .. } | Shape::Decorrelated { base, cap }
                if base > cap =>
            {
                Err(InvalidInput::new("backoff.base", "is longer than the cap"))
            }
            Shape::Exponential { factor, .. } if !(factor.is_finite() && *factor >= 1.0) => Err(
                InvalidInput::new("backoff.factor", "must be a finite number of at least 1"),
            ),
            Shape::Exponential { jitter, .. } if !(0.0..=1.0).contains(jitter) => Err(
                InvalidInput::new("backoff.jitter", "must be a number from 0 to 1"),
            ),
            Shape::Fixed(delays) if delays.is_empty() => {
                Err(InvalidInput::new("backoff.delays", "lists no delay"))
            }
            _ => Ok(()),
        }
    }

    /// The wait before retry `k`, for a uniform `draw` from `[0, 1)`.
    pub(super) fn draw(&self, k: u32, draw: f64, previous: &mut Previous) -> Drawn {
        match &self.shape {
            Shape::Exponential {
                base,
                cap,
                factor,
                jitter,
            } => {
                let window = window(*base, *cap, *factor, k);
                if *jitter == 0.0 {
                    return Drawn::Fixed(window);
                }
                let spread = scale(window, *jitter);
                Drawn::Jittered {
                    least: window.saturating_sub(spread),
                    random: scale(spread, draw),
                }
            }
            Shape::Decorrelated { base, cap } => {
                let longest = previous
                    .0
                    .unwrap_or(*base)
                    .saturating_mul(DECORRELATED_GROWTH);
                let random = scale(longest.saturating_sub(*base), draw);
                let random = random.min(cap.saturating_sub(*base));
                previous.0 = Some(base.saturating_add(random));
                Drawn::Jittered {
                    least: *base,
                    random,
                }
            }
            Shape::Fixed(delays) => {
                let last = delays.len().saturating_sub(1);
                let index = usize::try_from(k).unwrap_or(last).min(last);
                Drawn::Fixed(delays.get(index).copied().unwrap_or_default())
            }
        }
    }
}

/// The wait drawn last, which only the decorrelated shape looks back at.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Previous(Option<Duration>);

/// A drawn wait, with its random part apart: that part goes on top of a server's wish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Drawn {
    Fixed(Duration),
    Jittered { least: Duration, random: Duration },
}

impl Drawn {
    pub(super) fn delay(self) -> Duration {
        match self {
            Self::Fixed(delay) => delay,
            Self::Jittered { least, random } => least.saturating_add(random),
        }
    }

    /// Its random part alone: nothing where there is none.
    pub(super) fn jitter(self) -> Self {
        let random = match self {
            Self::Fixed(_) => Duration::ZERO,
            Self::Jittered { random, .. } => random,
        };
        Self::Jittered {
            least: Duration::ZERO,
            random,
        }
    }
}

/// `min(cap, base · factor^k)`, saturating: never a wrap to zero, never a panic.
fn window(base: Duration, cap: Duration, factor: f64, k: u32) -> Duration {
    let growth = factor.powi(i32::try_from(k).unwrap_or(i32::MAX));
    scale_up(base, growth).min(cap)
}

fn scale_up(duration: Duration, factor: f64) -> Duration {
    if duration.is_zero() {
        return Duration::ZERO;
    }
    let seconds = duration.as_secs_f64() * factor;
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

/// `duration · part` for a part from 0 to 1; a part outside of it (a caller's random source) is
/// taken as the nearer end.
fn scale(duration: Duration, part: f64) -> Duration {
    if part.is_nan() || part <= 0.0 {
        return Duration::ZERO;
    }
    scale_up(duration, part.min(1.0)).min(duration)
}
