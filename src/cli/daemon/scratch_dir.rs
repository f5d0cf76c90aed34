//! Removal of the scratch directory of a writable mount, by its process or by the supervisor.

use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use tarfs::fuse::SCRATCH_PREFIX;
use tarfs::tree::remove_tree;

/// Removes a scratch directory if it exists, but no directory without the scratch prefix.
pub(crate) fn remove_scratch(scratch: &Path) {
    let (Some(parent), Some(name)) = (scratch.parent(), scratch.file_name()) else {
        return;
    };
    if !name.as_bytes().starts_with(SCRATCH_PREFIX.as_bytes()) {
        return;
    }
    let removed = File::open(parent).and_then(|parent| Ok(remove_tree(&parent, name.as_bytes())?));
    if let Err(error) = removed {
        let scratch = scratch.display();
        tracing::warn!(%error, %scratch, "cannot remove the directory with the files written to the mount");
    }
}
