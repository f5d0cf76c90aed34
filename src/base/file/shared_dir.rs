//! A directory of files that processes share, and evict while no process uses them.
//!
//! Processes synchronize by flock(2). Users of a file, and the writer of one without a name yet, hold a
//! shared lock; a process that removes it holds the exclusive lock. A process checks the name after locking,
//! because the file may be removed by then.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustix::fs::{Mode, OFlags, fstat, openat};
use rustix::io::Errno;

use super::lock::{LockKind, lock};
use super::publish::TEMPORARY_PREFIX;
use super::trusted_dir::TrustedDir;

/// Timeout for a lock, which others hold for a few milliseconds, unless they are stopped.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of attempts to open a file that is not being removed.
const MAX_ATTEMPTS: u32 = 1000;

/// Minimum age at which the writer of a [temporary](TEMPORARY_PREFIX) file counts as dead.
pub(crate) const STALE_TEMPORARY_AGE: Duration = Duration::from_hours(24);

/// A subdirectory of a cache directory.
#[derive(Clone, Debug)]
pub(crate) struct SharedDir {
    cache_dir: PathBuf,
    name: &'static str,
}

impl SharedDir {
    /// Names the directory, and does not touch it.
    pub(crate) fn new(cache_dir: &Path, name: &'static str) -> Self {
        Self {
            cache_dir: cache_dir.to_owned(),
            name,
        }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.cache_dir.join(self.name)
    }

    pub(crate) fn create(&self) -> io::Result<Arc<TrustedDir>> {
        let cache_dir = TrustedDir::create(&self.cache_dir)?;
        Ok(Arc::new(cache_dir.create_dir(self.name)?))
    }

    /// Opens the directory as it is now. It may differ from the one opened before.
    pub(crate) fn open(&self) -> io::Result<Arc<TrustedDir>> {
        let cache_dir = TrustedDir::open(&self.cache_dir)?;
        Ok(Arc::new(cache_dir.open_dir(self.name)?))
    }

    /// Its files, least recently used first; none if it does not exist.
    pub(crate) fn files(&self) -> io::Result<Vec<SharedFile>> {
        let directory = match self.open() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            opened => opened?,
        };
        let names = directory.names()?.into_iter();
        let files = names.filter_map(|name| SharedFile::stat(&directory, name));
        let mut files: Vec<_> = files.collect();
        files.sort_by_key(|file| file.used);
        Ok(files)
    }
}

/// A file of a directory that processes share, as it was listed.
#[derive(Clone, Debug)]
pub struct SharedFile {
    pub(crate) directory: Arc<TrustedDir>,
    /// Its name in the directory.
    pub name: String,
    /// Bytes that it occupies on disk.
    pub held_bytes: u64,
    /// Time of last use.
    pub used: SystemTime,
    identity: (u64, u64),
}

impl SharedFile {
    fn stat(directory: &Arc<TrustedDir>, name: String) -> Option<Self> {
        let found = directory.stat_file(&name).ok()?;
        Some(Self {
            directory: Arc::clone(directory),
            name,
            held_bytes: found.held_bytes,
            used: found.modified,
            identity: found.identity,
        })
    }

    /// Opens it without a lock; `None` if it cannot be opened, or was replaced.
    pub(crate) fn open(&self, flags: OFlags) -> Option<File> {
        let file = self.directory.file(&self.name, flags).ok()?;
        self.is_same_file(&file).then_some(file)
    }

    pub(crate) fn is_same_file(&self, file: impl AsFd) -> bool {
        fstat(file).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == self.identity)
    }

    /// Whether a process uses it, this one included, or may still be writing it.
    pub fn is_in_use(&self) -> bool {
        self.is_recent_temporary() || self.lock_exclusive().is_err()
    }

    /// Whether its writer may still be alive without a lock, as other versions of the program are.
    fn is_recent_temporary(&self) -> bool {
        let age = self.used.elapsed();
        self.name.starts_with(TEMPORARY_PREFIX) && age.is_ok_and(|age| age < STALE_TEMPORARY_AGE)
    }

    /// Takes the exclusive lock; `None` if no process can use the file, because it is gone, was replaced or is no file.
    /// Fails with [`Errno::WOULDBLOCK`] while a process uses it, and with another error if this process lacks
    /// descriptors, memory or permissions to know.
    pub(crate) fn lock_exclusive(&self) -> Result<Option<File>, Errno> {
        // NFS gives an exclusive lock only to a descriptor that can write.
        let file = match self.directory.file(&self.name, OFlags::RDWR) {
            Ok(file) if self.is_same_file(&file) => file,
            Ok(_) => return Ok(None),
            // It may be whole, and a process may use it.
            Err(error) => {
                let errno = Errno::from_io_error(&error);
                let may_exist = |errno: &Errno| {
                    matches!(
                        *errno,
                        Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::ACCESS
                    )
                };
                return errno.filter(may_exist).map_or(Ok(None), Err);
            }
        };
        match lock(&file, LockKind::Exclusive, Duration::ZERO) {
            Err(Errno::WOULDBLOCK) => Err(Errno::WOULDBLOCK),
            Ok(()) | Err(_) => Ok(Some(file)),
        }
    }

    /// Removes it, unless it is in use or was replaced. Returns whether it did.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub fn remove(&self) -> io::Result<bool> {
        // Held until the removal. A process that opens the file meanwhile waits, and then finds no name.
        let Ok(_alone) = self.lock_exclusive() else {
            return Ok(false);
        };
        if self.is_recent_temporary()
            || self.directory.stat_file(&self.name)?.identity != self.identity
        {
            return Ok(false);
        }
        self.directory.remove(&self.name)?;
        Ok(true)
    }
}

/// Opens the file `name`, and locks it as in use as long as it is open. The second result is that of the lock:
/// `WOULDBLOCK` while another process checks or removes the file, past the timeout.
pub(crate) fn open_for_use(
    directory: &TrustedDir,
    name: &str,
    flags: OFlags,
) -> io::Result<(File, Result<(), Errno>)> {
    for _ in 0..MAX_ATTEMPTS {
        let file = directory.file(name, flags)?;
        let locked = lock(&file, LockKind::Shared, LOCK_TIMEOUT);
        // Otherwise it was removed after it was opened.
        if locked.is_err() || file.metadata()?.nlink() > 0 {
            return Ok((file, locked));
        }
    }
    Err(ErrorKind::ResourceBusy.into())
}

/// Excludes other processes that lock `directory`, until dropped. `None` when another process holds the lock
/// past the timeout. Excludes no process where network file systems lock no directories.
pub(crate) fn lock_directory(directory: &TrustedDir) -> Option<OwnedFd> {
    // An own descriptor, because users of a shared one share its lock.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let own = openat(directory, ".", flags, Mode::empty()).ok()?;
    let locked = lock(&own, LockKind::Exclusive, LOCK_TIMEOUT);
    (locked != Err(Errno::WOULDBLOCK)).then_some(own)
}
