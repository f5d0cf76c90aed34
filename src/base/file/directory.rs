//! Directories that users name.

use std::fs::DirBuilder;
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Resolves symbolic links in `directory`, which may not exist yet.
///
/// # Errors
/// If its parent does not exist.
pub fn resolve_destination(directory: &Path) -> io::Result<PathBuf> {
    match std::fs::canonicalize(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let directory = std::path::absolute(directory)?;
            let parent = directory.parent().unwrap_or(Path::new("/"));
            let name = directory.file_name().unwrap_or_default();
            Ok(std::fs::canonicalize(parent)?.join(name))
        }
        found => found,
    }
}

/// Creates a directory, unless something is there. Returns whether it did.
///
/// # Errors
/// If it cannot be created.
pub fn create_missing_dir(path: &Path, mode: u32) -> io::Result<bool> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        made => made.map(|()| true),
    }
}
