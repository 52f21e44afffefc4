//! What an operation finds around it when it starts.

use std::time::Instant;

use tokio_util::sync::CancellationToken;

#[cfg(not(feature = "ambient"))]
use crate::nesting;

/// The ambient context, and the attempt that an operation is made in.
#[derive(Debug, Default)]
pub(crate) struct Surroundings {
    pub(crate) deadline: Option<Instant>,
    pub(crate) cancel: Option<CancellationToken>,
    /// Another layer repeats what is done here.
    pub(crate) are_repeated: bool,
}

impl Surroundings {
    #[cfg(feature = "ambient")]
    pub(crate) fn here() -> Self {
        match crate::ambient::current() {
            None => Self::default(),
            Some(context) => Self {
                deadline: context.deadline(),
                cancel: context.cancellation().cloned(),
                are_repeated: context.retry_depth() > 0,
            },
        }
    }

    #[cfg(not(feature = "ambient"))]
    pub(crate) fn here() -> Self {
        Self {
            are_repeated: nesting::is_within_an_attempt(),
            ..Self::default()
        }
    }
}
