//! Independent rows on all cores; the results come in the order of the rows.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

pub(crate) fn map<T: Sync, R: Send>(rows: &[T], play: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::with_capacity(rows.len()));
    let work = || {
        while let Some((number, row)) = take(rows, &next) {
            let result = play(row);
            let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
            results.push((number, result));
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|(number, _)| *number);
    results.into_iter().map(|(_, result)| result).collect()
}

fn take<'r, T>(rows: &'r [T], next: &AtomicUsize) -> Option<(usize, &'r T)> {
    let number = next.fetch_add(1, Ordering::Relaxed);
    rows.get(number).map(|row| (number, row))
}
