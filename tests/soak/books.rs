//! The server's own books: what it has read, and what it has done.

use std::collections::{BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Mutex;

use crate::support::lock;

/// All that the server knows of one operation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Entry {
    /// Requests of which at least the request line was read.
    pub(crate) reads: u32,
    /// Orders made.
    pub(crate) effects: u32,
    /// The receipt of the last order.
    pub(crate) receipt: Option<String>,
    pub(crate) keys: BTreeSet<String>,
    /// Requests with a known key and another body.
    pub(crate) conflicts: u32,
}

/// An order as it was read.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) operation: u64,
    pub(crate) key: Option<String>,
    pub(crate) body: Vec<u8>,
}

/// The key is known, with another body.
#[derive(Debug)]
pub(crate) struct Conflict;

#[derive(Debug, Default)]
pub(crate) struct Books(Mutex<Tables>);

#[derive(Debug, Default)]
struct Tables {
    operations: HashMap<u64, Entry>,
    receipts: HashMap<String, Receipt>,
    requests: u64,
    orders: u64,
}

#[derive(Debug)]
struct Receipt {
    fingerprint: u64,
    text: String,
}

impl Books {
    /// Notes a request, and says which of its operation's it is: 0 for the first.
    pub(crate) fn note_read(&self, operation: u64, key: Option<&str>) -> u32 {
        let mut tables = lock(&self.0);
        tables.requests += 1;
        let entry = tables.operations.entry(operation).or_default();
        entry.reads += 1;
        entry.keys.extend(key.map(str::to_owned));
        entry.reads - 1
    }

    /// Makes the order and its receipt in one go, unless the key is known.
    pub(crate) fn commit(&self, order: &Order) -> Result<String, Conflict> {
        let mut tables = lock(&self.0);
        let fingerprint = fingerprint(&order.body);
        let known = order.key.as_ref().and_then(|key| tables.receipts.get(key));
        match known.map(|known| (known.fingerprint == fingerprint, known.text.clone())) {
            Some((true, receipt)) => Ok(receipt),
            Some((false, _)) => {
                tables.entry(order).conflicts += 1;
                Err(Conflict)
            }
            None => Ok(tables.make(order, fingerprint)),
        }
    }

    pub(crate) fn receipt(&self, key: &str) -> Option<String> {
        let tables = lock(&self.0);
        tables.receipts.get(key).map(|known| known.text.clone())
    }

    pub(crate) fn entry(&self, operation: u64) -> Entry {
        let tables = lock(&self.0);
        tables
            .operations
            .get(&operation)
            .cloned()
            .unwrap_or_default()
    }

    pub(crate) fn requests(&self) -> u64 {
        lock(&self.0).requests
    }

    pub(crate) fn orders(&self) -> u64 {
        lock(&self.0).orders
    }
}

impl Tables {
    fn entry(&mut self, order: &Order) -> &mut Entry {
        self.operations.entry(order.operation).or_default()
    }

    fn make(&mut self, order: &Order, fingerprint: u64) -> String {
        self.orders += 1;
        let text = format!("receipt {}", self.orders);
        let entry = self.entry(order);
        entry.effects += 1;
        entry.receipt = Some(text.clone());
        if let Some(key) = order.key.clone() {
            let text = text.clone();
            self.receipts.insert(key, Receipt { fingerprint, text });
        }
        text
    }
}

fn fingerprint(body: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    body.hash(&mut hasher);
    hasher.finish()
}
