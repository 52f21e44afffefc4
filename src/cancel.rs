//! Who may end an operation early.

use http::Extensions;
use tokio_util::sync::CancellationToken;

use crate::surroundings::Surroundings;

/// The request's own token and the ambient one: either ends the operation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cancel {
    own: Option<CancellationToken>,
    ambient: Option<CancellationToken>,
}

impl Cancel {
    pub(crate) fn of(extensions: &Extensions, around: &Surroundings) -> Self {
        Self {
            own: extensions.get().cloned(),
            ambient: around.cancel.clone(),
        }
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        let mut tokens = self.own.iter().chain(&self.ambient);
        tokens.any(CancellationToken::is_cancelled)
    }

    pub(crate) fn own(&self) -> Option<&CancellationToken> {
        self.own.as_ref()
    }

    pub(crate) fn ambient(&self) -> Option<&CancellationToken> {
        self.ambient.as_ref()
    }
}
