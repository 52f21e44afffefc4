//! A `tracing` subscriber that keeps spans and events as the tree that they are.
//!
//! `tracing` remembers for the whole process which callsites anybody listens to. So in a binary that uses
//! this, every test does, and nothing of the crate runs without it.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test binary uses its own part of this module"
)]

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::DefaultGuard;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

/// The name of the crate's own span.
pub const OPERATION: &str = "http.client.operation";

/// All that this thread has told since [`Tree::grow`], at every level, in the order of its beginning.
#[derive(Clone, Default)]
pub struct Tree(Arc<Mutex<Vec<Node>>>);

/// A span or an event.
#[derive(Clone, Debug)]
pub struct Node {
    /// Of a span its name, of an event its message.
    pub name: String,
    pub level: Level,
    pub is_event: bool,
    /// The place of the span that it is in.
    pub parent: Option<usize>,
    pub is_closed: bool,
    fields: Fields,
}

#[derive(Clone, Debug, Default)]
struct Fields(BTreeMap<&'static str, String>);

/// The place of a span in the tree.
struct Place(usize);

impl Tree {
    /// Listens until the guard is dropped.
    pub fn grow() -> (Self, DefaultGuard) {
        let tree = Self::default();
        let subscriber = tracing_subscriber::registry().with(tree.clone());
        (tree, tracing::subscriber::set_default(subscriber))
    }

    pub fn nodes(&self) -> Vec<Node> {
        self.lock().clone()
    }

    /// The spans of this name, with their places.
    pub fn spans(&self, name: &str) -> Vec<(usize, Node)> {
        self.places(|node| !node.is_event && node.name == name)
    }

    /// The span of the one operation that there was.
    pub fn operation(&self) -> (usize, Node) {
        let mut operations = self.spans(OPERATION);
        assert_eq!(operations.len(), 1, "{operations:#?}");
        operations.remove(0)
    }

    /// The events in this span, and none that are deeper down.
    pub fn events_in(&self, span: usize) -> Vec<Node> {
        let events = self.places(|node| node.is_event && node.parent == Some(span));
        events.into_iter().map(|(_, node)| node).collect()
    }

    /// The spans in this span.
    pub fn spans_in(&self, span: usize) -> Vec<(usize, Node)> {
        self.places(|node| !node.is_event && node.parent == Some(span))
    }

    /// Everything, for a search.
    pub fn text(&self) -> String {
        format!("{:#?}", self.nodes())
    }

    fn places(&self, wanted: impl Fn(&Node) -> bool) -> Vec<(usize, Node)> {
        let nodes = self.nodes().into_iter().enumerate();
        nodes.filter(|(_, node)| wanted(node)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Node>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn plant(&self, node: Node) -> usize {
        let mut nodes = self.lock();
        nodes.push(node);
        nodes.len() - 1
    }
}

impl Node {
    fn new(metadata: &Metadata<'_>, parent: Option<usize>, fields: Fields) -> Self {
        let message = fields.0.get("message").cloned();
        Self {
            name: message.unwrap_or_else(|| metadata.name().to_owned()),
            level: *metadata.level(),
            is_event: metadata.is_event(),
            parent,
            is_closed: false,
            fields,
        }
    }

    /// The value of this field, as text. `None` where it was never recorded.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.0.get(name).map(String::as_str)
    }

    /// The values of these fields, `-` for each that was never recorded.
    pub fn all<const N: usize>(&self, names: [&str; N]) -> [String; N] {
        names.map(|name| self.field(name).unwrap_or("-").to_owned())
    }

    /// The names of what was recorded.
    pub fn field_names(&self) -> Vec<&'static str> {
        self.fields.0.keys().copied().collect()
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

impl<S: Subscriber + for<'s> LookupSpan<'s>> Layer<S> for Tree {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let span = context.span(id).expect("a new span");
        let parent = span.parent().and_then(|parent| place(&parent));
        let place = self.plant(Node::new(attributes.metadata(), parent, fields));
        span.extensions_mut().insert(Place(place));
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let span = context.span(id).expect("a span");
        let place = place(&span).expect("its place");
        values.record(&mut self.lock()[place].fields);
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let parent = context.event_span(event).and_then(|span| place(&span));
        self.plant(Node::new(event.metadata(), parent, fields));
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let span = context.span(&id).expect("a span");
        let place = place(&span).expect("its place");
        self.lock()[place].is_closed = true;
    }
}

fn place<'s, S: LookupSpan<'s>>(
    span: &tracing_subscriber::registry::SpanRef<'s, S>,
) -> Option<usize> {
    span.extensions().get::<Place>().map(|place| place.0)
}
