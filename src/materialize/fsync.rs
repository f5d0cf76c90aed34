//! Waiting for the disk, for those who ask for it.

use std::os::fd::AsFd;
use std::path::Path;

use super::error::Error;
use crate::base::stats::Stats;

/// Returns when all that was written to the file system of `directory` is on its disk. What went
/// wrong with any of it since the descriptor was opened is an error here, even if it was written
/// back long ago.
pub(super) fn sync_file_system(
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

/// Returns when the names in `directory` are on disk.
pub(super) fn sync_directory(directory: impl AsFd, path: &Path) -> Result<(), Error> {
    rustix::fs::fsync(directory).map_err(|errno| Error::Sync {
        path: path.to_owned(),
        errno,
    })
}
