//! The lock of a destination: one update, resumable run or background copy at a time.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;

use super::error::Error;
use crate::base::lock::{LockHolder, LockKind, lock};

/// Time for which a process that ends may still hold its lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// The right to bring a destination to the state of a source, which one process has at a time.
///
/// A second process would remove the temporary files of the first one, and delete what that one has just written. It is a
/// lock on the directory itself, so that all of its names lead to it, and a directory above need not be writable.
/// Another user who may read the directory can lock it as well, which ends a run with an error that names the process.
/// The kernel releases the lock of a killed process.
#[derive(Debug)]
pub struct DestinationLock(OwnedFd);

impl AsFd for DestinationLock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl DestinationLock {
    /// Locks the directory at `destination`. Succeeds where the file system has no locks.
    ///
    /// # Errors
    /// The directory cannot be opened, or another process has locked it.
    pub fn acquire(destination: &Path) -> Result<Self, Error> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = openat(CWD, destination, flags, Mode::empty());
        let opened = opened.map_err(|errno| Error::Destination(destination.to_owned(), errno))?;
        if is_locked(&opened) {
            let holder = LockHolder::of(&opened);
            return Err(Error::InUse(destination.to_owned(), holder));
        }
        Ok(Self(opened))
    }
}

/// Locks `file`, and waits a moment for it. Returns whether another process has kept its lock.
pub(super) fn is_locked(file: impl AsFd) -> bool {
    lock(file, LockKind::Exclusive, LOCK_TIMEOUT) == Err(Errno::WOULDBLOCK)
}
