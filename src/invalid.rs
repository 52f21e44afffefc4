//! The one error for bad input: which field, and what is wrong with it.

/// A setting, key, header or extension that cannot be used.
///
/// Given by builders and constructors at once, and by a request before anything is sent (then as
/// the source of a [`RetryError`](crate::RetryError) with
/// [`StopReason::InvalidInput`](crate::StopReason::InvalidInput)). Names the field, never its value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} {problem}")]
pub struct InvalidInput {
    field: &'static str,
    problem: &'static str,
}

impl InvalidInput {
    pub(crate) fn new(field: &'static str, problem: &'static str) -> Self {
        Self { field, problem }
    }

    /// The setting, header or extension at fault, such as `"max_attempts"` or `"idempotency key"`.
    #[must_use]
    pub fn field(&self) -> &'static str {
        self.field
    }
}
