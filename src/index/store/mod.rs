//! Index files: found by locator, published by rename; and short documents about archives, found by name. Only this
//! file of the index does I/O.
//!
//! Processes synchronize by flock(2). Users of a file, and the writer of one without a name yet, hold a
//! shared lock; a process that removes it holds the exclusive lock. A process checks the name after locking,
//! because it may refer to another file by then. A lock on the directory makes renaming and removing exclude
//! each other.

mod error;
mod load;

use self::error::{classify_error, store_error};
use self::load::{BUFFER_BYTES, load, open_file};

pub use self::error::Error;
pub use self::load::{RowsToLoad, read, write, write_unnamed};

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustix::fs::{Mode, OFlags, fstat, openat};
use rustix::io::Errno;

use super::format::Error as Cause;
use super::format::framed;
use super::format::framed::Packing;
use super::{Index, Locator, MemoryLimit, Origin};
use crate::base::bounded_read::read_at_most;
use crate::base::lock::{LockKind, lock};
use crate::base::publish::{TEMPORARY_PREFIX, temporary_name};
use crate::base::retention::{RetainedItem, RetentionPolicy};
use crate::base::trusted_dir::TrustedDir;

/// Minimum age at which the writer of a temporary file counts as dead.
const STALE_TEMPORARY_AGE: Duration = Duration::from_hours(24);

/// Timeout for a lock that another process holds to check or remove a file: short, unless it is stopped.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Replacements of a file between its opening and its lock.
const MAX_REOPENS: usize = 8;

const DIRECTORY_NAME: &str = "index";

/// Suffix of the names of documents.
const DOCUMENT_SUFFIX: &str = ".json";

/// The saved indexes of a cache directory.
#[derive(Clone, Debug)]
pub struct Store {
    cache_dir: PathBuf,
    local_path: Vec<u8>,
}

/// Evicts indexes unused for a quarter of a year, and the least recently used beyond 2 GiB, at each saving.
pub(crate) const RETENTION_POLICY: RetentionPolicy = RetentionPolicy {
    max_bytes: 2 << 30,
    max_age: Duration::from_hours(90 * 24),
};

/// Marks an index as in use for other processes, until dropped.
#[derive(Debug)]
pub struct IndexLock {
    locked: File,
}

impl IndexLock {
    /// Sets the time of last use to now.
    pub fn touch(&self) {
        // On failure, at worst the index is evicted too early.
        self.locked.set_modified(SystemTime::now()).ok();
    }
}

impl Store {
    /// The store below `cache_dir`. Does not touch the directory yet.
    pub fn new(cache_dir: &Path) -> Self {
        Self {
            cache_dir: cache_dir.to_owned(),
            local_path: Vec::new(),
        }
    }

    /// The store, for indexes of the archive at `local_path`, if it is on this machine.
    #[must_use]
    pub fn of_archive(self, local_path: Option<&Path>) -> Self {
        let local_path = local_path.unwrap_or(Path::new(""));
        Self {
            local_path: local_path.as_os_str().as_bytes().to_vec(),
            ..self
        }
    }

    /// Path of the index file for `locator`, whether it exists or not.
    pub fn path(&self, locator: &Locator) -> PathBuf {
        self.cache_dir
            .join(DIRECTORY_NAME)
            .join(locator.file_name())
    }

    /// The published index for `locator`, with a lock; `None` when there is none. The file exists as long as
    /// the lock. Without one (a stopped process holds the file) the index is good too.
    ///
    /// # Errors
    /// When the file, which publishing replaces, is unreadable, damaged, or of another version, user or
    /// source. Also when other users have access to the directory.
    pub fn find_locked(
        &self,
        locator: &Locator,
        limit: &MemoryLimit,
        rows: RowsToLoad,
    ) -> Result<Option<(Index, Option<IndexLock>)>, Error> {
        let path = self.path(locator);
        let held = self
            .open_directory()
            .and_then(|directory| open_locked(&directory, &locator.file_name()));
        let loaded = held
            .map_err(classify_error)
            .and_then(|(file, in_use)| Ok((load(file, limit, rows)?, in_use)));
        match loaded {
            Ok((index, _)) if index.origin.locator != *locator => {
                let cause = Cause::Mismatch;
                Err(Error { path, cause })
            }
            Ok(found) => Ok(Some(found)),
            Err(Cause::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(cause) => Err(Error { path, cause }),
        }
    }

    /// Publishes `index` for `locator`, atomically, and evicts others by `RETENTION_POLICY`. Creates missing
    /// directories for this user only. The file exists as long as the returned lock, unless another process
    /// replaces it. Without a lock, another process may remove it. Nothing is forced to disk, because reading
    /// detects damage after a power failure, and the index is made again.
    ///
    /// # Errors
    /// When the file cannot be written, or other users have access to the directory. The old index remains.
    pub fn publish(&self, locator: &Locator, index: &Index) -> Result<Option<IndexLock>, Error> {
        self.save(&locator.file_name(), |file| {
            let file = BufWriter::with_capacity(BUFFER_BYTES, file);
            let local_path = &self.local_path;
            framed::write(index, locator, Packing::Fast { local_path }, file)
        })
    }

    fn save(
        &self,
        name: &str,
        write: impl FnOnce(File) -> io::Result<()>,
    ) -> Result<Option<IndexLock>, Error> {
        let path = self.cache_dir.join(DIRECTORY_NAME).join(name);
        let saved = self.try_save(name, write);
        saved.map_err(|error| store_error(&path, error))
    }

    fn try_save(
        &self,
        name: &str,
        write: impl FnOnce(File) -> io::Result<()>,
    ) -> io::Result<Option<IndexLock>> {
        let directory = TrustedDir::create(&self.cache_dir)?.create_dir(DIRECTORY_NAME)?;
        let directory = Arc::new(directory);
        let temporary = temporary_name();
        // Not only for writing, because NFS gives a shared lock only to a descriptor that can read.
        let file = directory.file(&temporary, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL)?;
        // Before the lock, or without one, the age of the file protects it.
        let locked = file.try_clone().ok();
        let locked = locked.filter(|file| lock(file, LockKind::Shared, LOCK_TIMEOUT).is_ok());
        let written = write(file).and_then(|()| {
            let _lock = lock_directory(&directory);
            directory.rename(&temporary, name)
        });
        if written.is_err() {
            directory.remove(&temporary).ok();
        }
        evict(&directory, name);
        written.map(|()| locked.map(|locked| IndexLock { locked }))
    }

    /// Removes the index for `locator`, although processes may use it, because it is wrong.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn discard(&self, locator: &Locator) -> Result<(), Error> {
        let removed = self.open_directory().and_then(|directory| {
            let _lock = lock_directory(&directory);
            directory.remove(&locator.file_name())
        });
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(store_error(&self.path(locator), error))
            }
            _ => Ok(()),
        }
    }

    /// Saves `bytes`, a short document about archives, under `name`, and evicts files as
    /// [`publish`](Self::publish) does.
    ///
    /// # Errors
    /// When the file cannot be written, or other users have access to the directory.
    pub fn save_document(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        let saved = self.save(&document_name(name), |mut file| file.write_all(bytes));
        saved.map(drop)
    }

    /// The document that was saved last under `name`, if it has at most `limit` bytes. The caller checks it.
    pub fn document(&self, name: &str, limit: u64) -> Option<Vec<u8>> {
        let directory = self.open_directory().ok()?;
        let file = directory.file(&document_name(name), OFlags::RDONLY).ok()?;
        file.set_modified(SystemTime::now()).ok();
        read_at_most(file, limit).ok()
    }

    /// All index files, including unfinished ones and those of other versions.
    ///
    /// # Errors
    /// When the directory exists and other users have access to it, or it cannot be read.
    pub fn files(&self) -> io::Result<Vec<IndexFile>> {
        match self.open_directory() {
            Ok(directory) => files(&Arc::new(directory)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    fn open_directory(&self) -> io::Result<TrustedDir> {
        TrustedDir::open(&self.cache_dir)?.open_dir(DIRECTORY_NAME)
    }
}

/// An index file of a store.
#[derive(Clone, Debug)]
pub struct IndexFile {
    directory: Arc<TrustedDir>,
    /// Its name in the directory.
    pub name: String,
    /// Bytes that it occupies on disk.
    pub held_bytes: u64,
    /// Time of last use.
    pub used: SystemTime,
    /// Whether it is complete. An incomplete file may still be in the making.
    pub is_finished: bool,
    identity: (u64, u64),
}

impl IndexFile {
    /// The source it claims to be made from. Only for display.
    pub fn origin(&self) -> Option<Origin> {
        let file = self.directory.file(&self.name, OFlags::RDONLY).ok()?;
        let index = open_file(file, &MemoryLimit::none()).ok()?;
        Some(index.origin)
    }

    /// Whether it is a document instead of an index.
    pub fn is_document(&self) -> bool {
        self.name.ends_with(DOCUMENT_SUFFIX)
    }

    /// Whether a process uses it, or may still be writing it.
    pub fn is_in_use(&self) -> bool {
        self.is_recent_temporary() || self.lock_exclusive().is_err()
    }

    /// Whether its writer may still be alive without a lock, which it takes only after creating the file.
    /// Other versions of the program take no lock.
    fn is_recent_temporary(&self) -> bool {
        let age = self.used.elapsed();
        !self.is_finished && age.is_ok_and(|age| age < STALE_TEMPORARY_AGE)
    }

    /// Takes the exclusive lock; `None` if the file cannot be opened, so that no process uses it. Fails with
    /// [`Errno::WOULDBLOCK`] while another process uses it.
    fn lock_exclusive(&self) -> Result<Option<File>, Errno> {
        // NFS gives an exclusive lock only to a descriptor that can write.
        let Ok(file) = self.directory.file(&self.name, OFlags::RDWR) else {
            return Ok(None);
        };
        match lock(&file, LockKind::Exclusive, Duration::ZERO) {
            Err(Errno::WOULDBLOCK) => Err(Errno::WOULDBLOCK),
            Ok(()) | Err(_) => Ok(Some(file)),
        }
    }

    /// Removes it, unless it is in use or was replaced. Returns whether it did.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove(&self) -> io::Result<bool> {
        // The directory's lock first, because another process might rename the file meanwhile.
        let Some(_lock) = lock_directory(&self.directory) else {
            return Ok(false);
        };
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

fn open_locked(directory: &TrustedDir, name: &str) -> io::Result<(File, Option<IndexLock>)> {
    for _ in 0..MAX_REOPENS {
        let file = directory.file(name, OFlags::RDONLY)?;
        let locked = file.try_clone()?;
        if lock(&locked, LockKind::Shared, LOCK_TIMEOUT).is_err() {
            return Ok((file, None));
        }
        let stat = fstat(&locked)?;
        if directory.stat_file(name)?.identity == (stat.st_dev, stat.st_ino) {
            return Ok((file, Some(IndexLock { locked })));
        }
    }
    Ok((directory.file(name, OFlags::RDONLY)?, None))
}

/// Excludes other processes that rename or remove files of `directory`, until dropped. `None` when another
/// process holds the lock too long. Excludes no process where network file systems lock no directories.
fn lock_directory(directory: &TrustedDir) -> Option<OwnedFd> {
    // An own descriptor, because users of a shared one share its lock.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let own = openat(directory, ".", flags, Mode::empty()).ok()?;
    let locked = lock(&own, LockKind::Exclusive, LOCK_TIMEOUT);
    (locked != Err(Errno::WOULDBLOCK)).then_some(own)
}

fn files(directory: &Arc<TrustedDir>) -> io::Result<Vec<IndexFile>> {
    let files = directory.names()?.into_iter().filter_map(|name| {
        let is_finished = is_finished(&name);
        if !is_finished && !name.starts_with(TEMPORARY_PREFIX) {
            return None;
        }
        let found = directory.stat_file(&name).ok()?;
        Some(IndexFile {
            directory: Arc::clone(directory),
            name,
            held_bytes: found.held_bytes,
            used: found.modified,
            is_finished,
            identity: found.identity,
        })
    });
    Ok(files.collect())
}

/// Removes expired files but `name`. Ignores failures, because the next publication tries again.
fn evict(directory: &Arc<TrustedDir>, name: &str) {
    for surplus in expired(&files(directory).unwrap_or_default()) {
        if surplus.name != name {
            surplus.remove().ok();
        }
    }
}

fn document_name(name: &str) -> String {
    format!(
        "{}{DOCUMENT_SUFFIX}",
        blake3::hash(name.as_bytes()).to_hex()
    )
}

fn is_finished(name: &str) -> bool {
    let digits = name.strip_suffix(".idx");
    let digits = digits.or_else(|| name.strip_suffix(DOCUMENT_SUFFIX));
    digits.is_some_and(|digits| {
        digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}

/// The `files` beyond the retention policy, and those of dead writers.
fn expired(files: &[IndexFile]) -> Vec<&IndexFile> {
    let kept: Vec<_> = files
        .iter()
        .map(|file| RetainedItem {
            last_used: file.used,
            bytes: file.held_bytes,
            in_use: file.is_in_use(),
        })
        .collect();
    let surplus = RETENTION_POLICY.expired(&kept, SystemTime::now());
    let surplus = surplus.into_iter().filter_map(|number| files.get(number));
    let abandoned = files.iter().zip(&kept);
    let abandoned = abandoned.filter(|(file, kept)| !file.is_finished && !kept.in_use);
    surplus.chain(abandoned.map(|(file, _)| file)).collect()
}

#[cfg(test)]
mod tests;
