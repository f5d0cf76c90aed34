//! Errors of index files.

use std::io;
use std::path::{Path, PathBuf};

use crate::base::redact::redact;
use crate::base::trusted_dir::PermissionProblem;
use crate::index::format::Error as Cause;

/// A failed operation on an index file.
#[derive(Debug, thiserror::Error)]
#[error("index file {}", redact(&path.to_string_lossy()))]
pub struct Error {
    /// The file, or the directory for it.
    pub path: PathBuf,
    /// The reason.
    #[source]
    pub cause: Cause,
}

pub(super) fn store_error(path: &Path, error: io::Error) -> Error {
    Error {
        path: path.to_owned(),
        cause: classify_error(error),
    }
}

pub(super) fn classify_error(error: io::Error) -> Cause {
    match PermissionProblem::from_error(&error) {
        Some(untrusted) => Cause::Untrusted(untrusted.clone()),
        None => Cause::Io(error),
    }
}
