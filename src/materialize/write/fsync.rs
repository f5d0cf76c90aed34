//! Syncs written data to disk.

use std::os::fd::AsFd;
use std::path::Path;

use crate::base::stats::Stats;
use crate::materialize::error::Error;

/// Syncs the file system of `directory`.
///
/// It also fails for a write-back error that occurred since the descriptor was opened, even if that was
/// long ago.
pub(crate) fn sync_file_system(
    directory: impl AsFd,
    path: &Path,
    stats: &Stats,
) -> Result<(), Error> {
    rustix::fs::syncfs(directory).map_err(|errno| Error::Sync {
        path: path.to_owned(),
        errno,
    })?;
    stats.synced_file_systems.increment();
    Ok(())
}

/// Syncs the names in `directory`.
pub(crate) fn sync_directory(directory: impl AsFd, path: &Path) -> Result<(), Error> {
    rustix::fs::fsync(directory).map_err(|errno| Error::Sync {
        path: path.to_owned(),
        errno,
    })
}
