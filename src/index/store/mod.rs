//! Index files: found by locator, published by rename; and short documents about archives, found by name. Only this
//! file of the index does I/O. A lock on the directory makes renaming and removing exclude each other.

mod error;
mod load;

use self::error::{classify_error, store_error};
use self::load::{BUFFER_BYTES, load, open_file};

pub use self::error::Error;
pub use self::load::{RowsToLoad, read, write, write_unnamed};

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::OFlags;

use super::format::Error as Cause;
use super::format::framed;
use super::format::framed::Packing;
use super::{Index, Locator, MemoryLimit, Origin};
use crate::base::bounded_read::read_at_most;
use crate::base::publish::{TEMPORARY_PREFIX, temporary_name};
use crate::base::retention::{RetainedItem, RetentionPolicy};
use crate::base::shared_dir::{SharedDir, SharedFile, lock_directory, open_for_use};
use crate::base::trusted_dir::TrustedDir;

const DIRECTORY_NAME: &str = "index";

/// Suffix of the names of documents.
const DOCUMENT_SUFFIX: &str = ".json";

/// The saved indexes of a cache directory.
#[derive(Clone, Debug)]
pub struct Store {
    directory: SharedDir,
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
            directory: SharedDir::new(cache_dir, DIRECTORY_NAME),
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
        self.directory.path().join(locator.file_name())
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
            .directory
            .open()
            .and_then(|directory| open_locked(&directory, &locator.file_name(), OFlags::RDONLY));
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
        let path = self.directory.path().join(name);
        let saved = self.try_save(name, write);
        saved.map_err(|error| store_error(&path, error))
    }

    fn try_save(
        &self,
        name: &str,
        write: impl FnOnce(File) -> io::Result<()>,
    ) -> io::Result<Option<IndexLock>> {
        let directory = self.directory.create()?;
        let temporary = temporary_name();
        // Not only for writing, because NFS gives a shared lock only to a descriptor that can read.
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        // Without a lock, the age of the file protects it.
        let (file, index_lock) = open_locked(&directory, &temporary, flags)?;
        let written = write(file).and_then(|()| {
            let _lock = lock_directory(&directory);
            directory.rename(&temporary, name)
        });
        if written.is_err() {
            directory.remove(&temporary).ok();
        }
        self.evict(name);
        written.map(|()| index_lock)
    }

    /// Removes the index for `locator`, although processes may use it, because it is wrong.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn discard(&self, locator: &Locator) -> Result<(), Error> {
        let removed = self.directory.open().and_then(|directory| {
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
        let directory = self.directory.open().ok()?;
        let file = directory.file(&document_name(name), OFlags::RDONLY).ok()?;
        file.set_modified(SystemTime::now()).ok();
        read_at_most(file, limit).ok()
    }

    /// All index files, including unfinished ones and those of other versions.
    ///
    /// # Errors
    /// When the directory exists and other users have access to it, or it cannot be read.
    pub fn files(&self) -> io::Result<Vec<SharedFile>> {
        let mut files = self.directory.files()?;
        files.retain(|file| is_finished(&file.name) || file.name.starts_with(TEMPORARY_PREFIX));
        Ok(files)
    }

    /// Removes expired files but `name`. Ignores failures, because the next publication tries again.
    fn evict(&self, name: &str) {
        let files = self.files().unwrap_or_default();
        let expired = RETENTION_POLICY.expired(&files, SystemTime::now(), |file| RetainedItem {
            last_used: file.used,
            bytes: file.held_bytes,
            in_use: file.is_in_use(),
            is_finished: is_finished(&file.name),
        });
        let Some(_lock) = files
            .first()
            .and_then(|file| lock_directory(&file.directory))
        else {
            return;
        };
        for surplus in expired.into_iter().filter(|file| file.name != name) {
            surplus.remove().ok();
        }
    }
}

/// The source from which the index `file` claims to be made. Only for display.
pub fn origin(file: &SharedFile) -> Option<Origin> {
    let index = open_file(file.open(OFlags::RDONLY)?, &MemoryLimit::none()).ok()?;
    Some(index.origin)
}

/// Whether the file `name` is a document instead of an index.
pub fn is_document(name: &str) -> bool {
    name.ends_with(DOCUMENT_SUFFIX)
}

/// Removes `file`, unless it is in use or was replaced. Returns whether it did.
///
/// # Errors
/// When it cannot be removed.
pub fn remove(file: &SharedFile) -> io::Result<bool> {
    // Another process might rename the file meanwhile.
    match lock_directory(&file.directory) {
        Some(_lock) => file.remove(),
        None => Ok(false),
    }
}

fn open_locked(
    directory: &TrustedDir,
    name: &str,
    flags: OFlags,
) -> io::Result<(File, Option<IndexLock>)> {
    let (file, locked) = open_for_use(directory, name, flags)?;
    let locked = locked.ok().and_then(|()| file.try_clone().ok());
    Ok((file, locked.map(|locked| IndexLock { locked })))
}

fn document_name(name: &str) -> String {
    format!(
        "{}{DOCUMENT_SUFFIX}",
        blake3::hash(name.as_bytes()).to_hex()
    )
}

/// Whether the index or document `name` is complete. An incomplete one may still be in the making.
pub fn is_finished(name: &str) -> bool {
    let digits = name.strip_suffix(".idx");
    let digits = digits.or_else(|| name.strip_suffix(DOCUMENT_SUFFIX));
    digits.is_some_and(|digits| {
        digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}

#[cfg(test)]
mod tests;
