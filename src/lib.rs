#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(
    not(test),
    warn(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::print_stdout,
        clippy::print_stderr
    )
)]

#[cfg(feature = "ambient")]
pub mod ambient;
mod attempt;
mod between;
mod body_factory;
mod builder;
mod cancel;
mod classify;
mod clock;
mod continuation;
mod deadline;
mod end;
mod error;
mod frames;
mod invalid;
mod key;
mod load;
mod middleware;
mod nesting;
mod observe;
mod operation;
mod policy;
mod progress;
mod redirect;
mod report;
mod response_body;
mod retry_after;
#[cfg(feature = "server")]
pub mod server;
mod settings;
mod surroundings;
mod sync;
mod timeout_header;
mod tracking;
mod watch;

pub use tokio_util::sync::CancellationToken;

pub use crate::attempt::Attempt;
pub use crate::body_factory::{BodyFactory, FreshBody};
pub use crate::builder::RetryMiddlewareBuilder;
pub use crate::classify::StatusClass;
pub use crate::deadline::{Deadline, DeadlineScope};
pub use crate::error::{LastAnswer, RetryError, RetryErrorExt};
pub use crate::invalid::InvalidInput;
pub use crate::key::{IdempotencyKey, KeyContract};
pub use crate::load::{LoadControl, LoadControlBuilder, LoadSnapshot};
pub use crate::middleware::RetryMiddleware;
pub use crate::observe::RetryObserver;
#[cfg(feature = "metrics")]
pub use crate::observe::metrics;
pub use crate::operation::{Idempotent, NoRetry, RetryOverride};
pub use crate::policy::{
    Backoff, BreakerSnapshot, BreakerState, BudgetSnapshot, Certainty, CircuitBreaker,
    CircuitBreakerBuilder, FirstSends, RetryBudget, RetryBudgetBuilder, StopReason,
};
pub use crate::report::{
    AttemptRecord, Failure, NextStep, ReportHandle, RetryReport, RetryResponseExt,
};
pub use crate::response_body::IncompleteBody;
pub use crate::timeout_header::TimeoutHeader;
