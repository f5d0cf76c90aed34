//! Keeps a second update out of a destination.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, openat};
use rustix::io::Errno;

use crate::materialize::error::Error;

/// The right to update a destination, which one process has at a time.
///
/// A second update would remove the temporary files of the first one, and delete what that one has just written. The
/// kernel releases the lock of a killed process.
#[derive(Debug)]
pub struct UpdateLock(#[expect(dead_code, reason = "it holds the lock")] OwnedFd);

impl UpdateLock {
    /// Locks the directory at `destination`, before it is compared. Succeeds where the file system has no locks.
    ///
    /// # Errors
    /// The directory cannot be opened, or another process updates it.
    pub fn acquire(destination: &Path) -> Result<Self, Error> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = openat(CWD, destination, flags, Mode::empty());
        let opened = opened.map_err(|errno| Error::Destination(destination.to_owned(), errno))?;
        match flock(&opened, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => Err(Error::BeingUpdated(destination.to_owned())),
            _ => Ok(Self(opened)),
        }
    }
}
