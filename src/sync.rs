//! What is shared between threads, under one name for the core: `tests/model` puts its model checker
//! in this place.

pub(crate) use std::sync::atomic;
pub(crate) use std::sync::{Mutex, MutexGuard, PoisonError};
