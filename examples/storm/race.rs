//! Clients that write the same row, each with the version that it has read, and come back when another
//! was faster.

use std::time::Duration;

use crate::caller::{Caller, Next, Seen, Start};
use crate::client::{Client, Operation};
use crate::dice::Dice;
use crate::time::{Time, Timeline};

/// Of one race, or the mean of many.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Figures {
    /// Until the last client has written.
    pub(crate) millis: f64,
    pub(crate) writes: f64,
}

/// Clients that all begin at once, each to write the row one time.
pub(crate) struct Race<'c, 'd> {
    writers: Vec<Writer<'c>>,
    /// The version of the row.
    version: u64,
    timeline: Timeline<(usize, Message)>,
    writes: u32,
    dice: &'d mut Dice,
}

struct Writer<'c> {
    client: &'c Client,
    operation: Operation<'c>,
}

/// What arrives.
#[derive(Clone, Copy)]
enum Message {
    Read,
    Version(u64),
    Write(u64),
    Written(bool),
}

impl<'c, 'd> Race<'c, 'd> {
    pub(crate) fn new(client: &'c Client, clients: usize, dice: &'d mut Dice) -> Self {
        let writer = |_| Writer {
            client,
            operation: { client }.begin(Time::ZERO),
        };
        Self {
            writers: (0..clients).map(writer).collect(),
            version: 0,
            timeline: Timeline::new(),
            writes: 0,
            dice,
        }
    }

    pub(crate) fn run(mut self) -> Figures {
        for writer in 0..self.writers.len() {
            self.tries(writer, Time::ZERO, Time::ZERO);
        }
        let mut last = Time::ZERO;
        while let Some((now, (writer, message))) = self.timeline.next() {
            last = now;
            match message {
                Message::Read => self.send(writer, now, Message::Version(self.version)),
                Message::Version(version) => self.send(writer, now, Message::Write(version)),
                Message::Write(version) => self.is_written(writer, version, now),
                Message::Written(is_done) => self.ends(writer, is_done, now),
            }
        }
        Figures {
            millis: 1000.0 * last.as_secs_f64(),
            writes: f64::from(self.writes),
        }
    }

    /// Sends over the network.
    fn send(&mut self, writer: usize, from: Time, message: Message) {
        let millis = self.dice.normal(10.0, 2.0).abs();
        let at = from + Duration::from_secs_f64(millis / 1000.0);
        self.timeline.put(at, (writer, message));
    }

    /// An attempt after a wait: first of all it reads the version.
    fn tries(&mut self, number: usize, now: Time, wait: Duration) {
        let Writer { client, operation } = &mut self.writers[number];
        if let Start::Now(_) = client.start(operation, now + wait, self.dice) {
            self.send(number, now + wait, Message::Read);
        }
    }

    /// The row is written by whoever knows its version.
    fn is_written(&mut self, writer: usize, version: u64, now: Time) {
        self.writes += 1;
        let is_done = version == self.version;
        self.version += u64::from(is_done);
        self.send(writer, now, Message::Written(is_done));
    }

    fn ends(&mut self, number: usize, is_done: bool, now: Time) {
        let Writer { client, operation } = &mut self.writers[number];
        let seen = match is_done {
            true => Seen::Success,
            false => Seen::Unavailable,
        };
        if let Next::Again(wait) = client.end(operation, seen, now, self.dice) {
            self.tries(number, now, wait);
        }
    }
}
