//! Paths of destinations, which may not exist yet.

use std::io;
use std::path::{Path, PathBuf};

/// Resolves symbolic links in `directory`, which may not exist yet.
pub(crate) fn resolve_destination(directory: &Path) -> io::Result<PathBuf> {
    match std::fs::canonicalize(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let directory = std::path::absolute(directory)?;
            let parent = directory.parent().unwrap_or(Path::new("/"));
            let name = directory.file_name().unwrap_or_default();
            Ok(std::fs::canonicalize(parent)?.join(name))
        }
        found => found,
    }
}
