//! A failure as its user sees it.

use std::error::Error;
use std::fmt::Display;
use std::iter::successors;

use serde::{Deserialize, Serialize};

use crate::archive;
use crate::fuse::MountError;
use crate::locate::{self, describe, unwrap_transparent};
use crate::source;

/// A failure as its user sees it. Another process can show it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
#[error("{text}")]
pub struct Failure {
    /// Text with causes and advice, without secrets.
    pub text: String,
    /// Whether a flag does not fit SOURCE.
    pub is_usage_error: bool,
    /// Whether it is a temporary outage of a source.
    pub is_outage: bool,
    /// Whether the work was ended because its own client is gone.
    #[serde(skip)]
    pub(super) is_abandoned: bool,
}

impl Failure {
    /// The failure `text`.
    pub fn new(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            is_usage_error: false,
            is_outage: false,
            is_abandoned: false,
        }
    }

    /// The end of work whose client is gone.
    pub(super) fn abandoned() -> Self {
        Self {
            is_abandoned: true,
            ..Self::new("the process that asked for it is gone")
        }
    }

    /// The failure that `error` describes with its causes.
    pub fn of(error: &(dyn Error + 'static)) -> Self {
        let mut causes = successors(Some(error), |&error| error.source()).map(unwrap_transparent);
        let is_outage = |cause: &(dyn Error + 'static)| {
            let source = match cause.downcast_ref() {
                Some(archive::Error::Source(error)) => Some(error),
                _ => cause.downcast_ref::<source::Error>(),
            };
            source.is_some_and(|error| error.cause.is_outage())
        };
        let located = error.downcast_ref::<locate::Error>();
        Self {
            text: describe(error),
            is_usage_error: located.is_some_and(locate::Error::is_usage_error),
            is_outage: causes.any(is_outage),
            is_abandoned: false,
        }
    }

    /// As [`of`](Self::of), with `what` failed before the causes.
    pub fn to(what: impl Display, error: &(dyn Error + 'static)) -> Self {
        let failure = Self::of(error);
        Self {
            text: format!("{what}: {}", failure.text),
            ..failure
        }
    }
}

impl From<locate::Error> for Failure {
    fn from(error: locate::Error) -> Self {
        Self::of(&error)
    }
}

impl From<MountError> for Failure {
    fn from(error: MountError) -> Self {
        Self::of(&error)
    }
}
