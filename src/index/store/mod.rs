//! Index files: found by locator, published by rename; and short documents about archives, found by name. Only this
//! file of the index does I/O.
//!
//! Processes synchronize by flock(2). Users of a file, and the writer of one without a name yet, hold a
//! shared lock; a process that removes it holds the exclusive lock. A process checks the name after locking,
//! because it may refer to another file by then. A lock on the directory makes renaming and removing exclude
//! each other.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::num::{NonZeroU64, NonZeroUsize};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use rustix::fs::{Advice, MemfdFlags, Mode, OFlags, fadvise, fstat, memfd_create, openat};
use rustix::io::Errno;

use super::format::Error as Cause;
use super::format::framed::{self, PackedIndex, Packing};
use super::{Index, Locator, MemoryLimit, Origin};
use crate::base::lock::{LockKind, lock};
use crate::base::publish::{self, TEMPORARY_PREFIX, temporary_name};
use crate::base::retention::{RetainedItem, RetentionPolicy};
use crate::base::sync::Mutex;
use crate::base::thread::scoped_thread;
use crate::base::trusted_dir::{PermissionProblem, TrustedDir};

/// Minimum age at which the writer of a temporary file counts as dead.
const STALE_TEMPORARY_AGE: Duration = Duration::from_hours(24);

/// Timeout for a lock that another process holds to check or remove a file: short, unless it is stopped.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Replacements of a file between its opening and its lock.
const MAX_REOPENS: usize = 8;

const DIRECTORY_NAME: &str = "index";

/// Suffix of the names of documents.
const DOCUMENT_SUFFIX: &str = ".json";

const BUFFER_BYTES: usize = 64 << 10;

/// Bytes of an index file that the kernel is asked to read before they are needed.
const READ_AHEAD_BYTES: u64 = 16 << 20;

/// Bytes of an index that a thread loads at once.
const LOAD_BYTES: usize = 512 << 10;

/// Most threads that load an index.
const MAX_THREADS: usize = 16;

/// The rows of a saved index that are loaded before it is used. Damage of any is found before that.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum RowsToLoad {
    /// All.
    #[default]
    All,
    /// Names and types of the entries. Others are verified, and loaded when they are used.
    Names,
}

/// A failed operation on an index file.
#[derive(Debug, thiserror::Error)]
#[error("index file {}", path.display())]
pub struct Error {
    /// The file, or the directory for it.
    pub path: PathBuf,
    /// The reason.
    #[source]
    pub cause: Cause,
}

/// The saved indexes of a cache directory.
#[derive(Clone, Debug)]
pub struct Store {
    cache_dir: PathBuf,
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
            framed::write(index, locator, Packing::Fast, file)
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
        let mut bytes = Vec::new();
        file.take(limit + 1).read_to_end(&mut bytes).ok()?;
        (bytes.len() as u64 <= limit).then_some(bytes)
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

/// Reads the index file at `path`. The caller checks the origin.
///
/// # Errors
/// When it cannot be read, or is not a complete and undamaged index of this version.
pub fn read(path: &Path, limit: &MemoryLimit) -> Result<Index, Error> {
    let loaded = open(path).and_then(|file| load(file, limit, RowsToLoad::All));
    let path = path.to_owned();
    loaded.map_err(|cause| Error { path, cause })
}

/// The framed form of `index` in a file without a name, in memory.
///
/// # Errors
/// When it cannot be written, or a row of `index` cannot be loaded.
pub fn write_unnamed(index: &Index) -> io::Result<File> {
    let file = File::from(memfd_create("tarfs-index", MemfdFlags::CLOEXEC)?);
    let out = BufWriter::with_capacity(BUFFER_BYTES, &file);
    framed::write(index, &index.origin.locator, Packing::Small, out)?;
    Ok(file)
}

/// Writes `index` in its framed form to `path` atomically, over an existing file, into an existing directory.
/// Its mode follows the umask, because the file is for the machines that may read the archive.
///
/// # Errors
/// When it cannot be written. An existing file is unchanged then.
pub fn write(path: &Path, index: &Index) -> Result<(), Error> {
    let written = publish::publish(path, |temporary| {
        let file = BufWriter::with_capacity(BUFFER_BYTES, File::create_new(temporary)?);
        framed::write(index, &index.origin.locator, Packing::Small, file)
    });
    written.map_err(|error| store_error(path, error))
}

fn store_error(path: &Path, error: io::Error) -> Error {
    Error {
        path: path.to_owned(),
        cause: classify_error(error),
    }
}

/// Opens a regular file; does not block on a FIFO.
fn open(path: &Path) -> Result<File, Cause> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(Cause::NotAFile);
    }
    Ok(file)
}

fn classify_error(error: io::Error) -> Cause {
    match PermissionProblem::from_error(&error) {
        Some(untrusted) => Cause::Untrusted(untrusted.clone()),
        None => Cause::Io(error),
    }
}

/// An index file on this machine.
#[derive(Debug)]
struct LocalFile(File);

impl PackedIndex for LocalFile {
    fn read(&self, range: Range<u64>) -> io::Result<Bytes> {
        let len = usize::try_from(range.end.saturating_sub(range.start));
        let mut bytes = vec![0; len.map_err(io::Error::other)?];
        self.0.read_exact_at(&mut bytes, range.start)?;
        Ok(bytes.into())
    }

    /// Nothing more than [`MissingRow`](super::storage::MissingRow) says.
    fn report_failure(&self, _: &io::Error) {}

    fn min_request_bytes(&self) -> u64 {
        0
    }
}

fn open_file(file: File, limit: &MemoryLimit) -> Result<Index, Cause> {
    let len = file.metadata()?.len();
    framed::open_saved(Box::new(LocalFile(file)), len, limit).map_err(find_damage)
}

fn load(file: File, limit: &MemoryLimit, rows: RowsToLoad) -> Result<Index, Cause> {
    // Only advice. The kernel reads on while frames are unpacked.
    fadvise(
        &file,
        0,
        NonZeroU64::new(READ_AHEAD_BYTES),
        Advice::WillNeed,
    )
    .ok();
    let index = open_file(file, limit)?;
    let ranges = index.bytes_to_load(rows == RowsToLoad::Names);
    let parts: Vec<_> = ranges
        .into_iter()
        .flat_map(|range| {
            let starts = range.clone().step_by(LOAD_BYTES);
            starts.map(move |start| start..range.end.min(start + LOAD_BYTES))
        })
        .collect();
    let loaded = load_parts(&index, &parts).and_then(|()| index.verify_packed_rows());
    loaded.map_err(|error| find_damage(error.into()))?;
    Ok(index)
}

/// Loads `parts` of the index file of `index`, on all processors.
fn load_parts(index: &Index, parts: &[Range<usize>]) -> io::Result<()> {
    let next = AtomicUsize::new(0);
    let result = Mutex::new(Ok(()));
    let load = || {
        while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = index.load_bytes(part) {
                *result.lock() = Err(error);
                break;
            }
        }
    };
    let processors = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let others = processors
        .min(parts.len())
        .min(MAX_THREADS)
        .saturating_sub(1);
    thread::scope(|scope| {
        for _ in 0..others {
            // This thread loads what others do not.
            scoped_thread(scope, "tarfs-load", load).ok();
        }
        load();
    });
    result.into_inner()
}

/// Tells damage from failed reading: a file that is shorter than it says, or does not decode.
fn find_damage(error: Cause) -> Cause {
    use io::ErrorKind::{InvalidData, UnexpectedEof};
    match error {
        Cause::Io(error) if matches!(error.kind(), InvalidData | UnexpectedEof) => Cause::Checksum,
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::super::Origin;
    use super::super::test_support::file;
    use super::super::{Builder, Options};
    use super::*;
    use crate::base::lock::RETRY_INTERVAL;

    fn locator(options: &str) -> Locator {
        Locator {
            canonical: "file".to_owned(),
            fingerprint: "len=1".to_owned(),
            options: options.to_owned(),
        }
    }

    fn index(locator: Locator) -> Index {
        let mut builder = Builder::new(Options::default());
        builder.add_member(&file("a", 0..1)).unwrap();
        builder.finish(Origin {
            locator,
            ..Origin::default()
        })
    }

    fn find(store: &Store, locator: &Locator) -> Result<Option<Index>, Error> {
        let found = store.find_locked(locator, &MemoryLimit::default(), RowsToLoad::All)?;
        Ok(found.map(|(index, _)| index))
    }

    fn publish(store: &Store, options: &str) -> PathBuf {
        let locator = locator(options);
        drop(store.publish(&locator, &index(locator.clone())).unwrap());
        store.path(&locator)
    }

    fn held(store: &Store, options: &str) -> IndexLock {
        let found = store
            .find_locked(&locator(options), &MemoryLimit::none(), RowsToLoad::All)
            .unwrap();
        found.expect("published").1.expect("not locked")
    }

    fn cause(found: Result<Option<Index>, Error>) -> Cause {
        found.expect_err("nothing usable").cause
    }

    #[test]
    fn published_index_is_found_by_its_locator_only() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        assert!(find(&store, &locator("")).unwrap().is_none());
        let path = publish(&store, "");
        assert_eq!(
            find(&store, &locator("")).unwrap().unwrap().entry_count(),
            2
        );
        assert!(find(&store, &locator("x")).unwrap().is_none());
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(
            fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o777,
            0o700
        );
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn an_index_can_be_published_under_another_locator() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        drop(
            store
                .publish(&locator("new"), &index(locator("old")))
                .unwrap(),
        );
        let found = find(&store, &locator("new")).unwrap().unwrap();
        assert_eq!(found.origin().locator, locator("new"));
    }

    #[test]
    fn a_file_for_another_source_is_not_used() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        let path = publish(&store, "a");
        fs::rename(path, store.path(&locator("b"))).unwrap();
        assert!(matches!(
            cause(find(&store, &locator("b"))),
            Cause::Mismatch
        ));
    }

    // Promises: index-damaged
    #[test]
    fn damaged_index_file_is_detected_and_replaced() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        let path = publish(&store, "");
        let mut bytes = fs::read(&path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&path, bytes).unwrap();
        assert!(matches!(cause(find(&store, &locator(""))), Cause::Checksum));
        fs::write(&path, b"").unwrap();
        assert!(matches!(
            cause(find(&store, &locator(""))),
            Cause::NotAnIndex
        ));
        publish(&store, "");
        assert!(find(&store, &locator("")).unwrap().is_some());
    }

    #[test]
    fn index_store_does_not_follow_symlinks() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        let elsewhere = cache.path().join("elsewhere");
        write(&elsewhere, &index(locator(""))).unwrap();
        let before = fs::read(&elsewhere).unwrap();
        let path = store.path(&locator(""));
        fs::create_dir(path.parent().unwrap()).unwrap();
        symlink(&elsewhere, &path).unwrap();
        assert!(matches!(
            cause(find(&store, &locator(""))),
            Cause::Untrusted(_)
        ));
        publish(&store, "");
        assert!(!fs::symlink_metadata(&path).unwrap().is_symlink());
        assert_eq!(fs::read(&elsewhere).unwrap(), before);
    }

    // Promises: check-cache, index-damaged
    #[test]
    fn a_file_that_others_can_write_is_not_used() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        let path = publish(&store, "");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        assert!(matches!(
            cause(find(&store, &locator(""))),
            Cause::Untrusted(_)
        ));
    }

    #[test]
    fn a_directory_in_its_place_is_an_error() {
        let cache = tempfile::tempdir().unwrap();
        assert!(matches!(
            read(cache.path(), &MemoryLimit::none()).unwrap_err().cause,
            Cause::NotAFile
        ));
        let error = write(cache.path(), &index(locator(""))).unwrap_err();
        assert!(matches!(error.cause, Cause::Io(_)));
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 0);
    }

    // Promises: cache-in-use
    #[test]
    fn temporary_files_of_dead_writers_are_removed() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        let path = publish(&store, "");
        let temporary = |name: &str| path.with_file_name(format!("{TEMPORARY_PREFIX}{name}"));
        for (name, age) in [("old", STALE_TEMPORARY_AGE * 2), ("new", Duration::ZERO)] {
            let file = File::create(temporary(name)).unwrap();
            file.set_modified(std::time::SystemTime::now() - age)
                .unwrap();
        }
        publish(&store, "");
        assert!(!temporary("old").exists());
        assert!(temporary("new").exists());
    }

    /// In a container the next process may have the same number as the one before.
    #[test]
    fn temporary_file_of_dead_writer_with_same_pid_is_no_obstacle() {
        let names: Vec<_> = (0..100).map(|_| temporary_name()).collect();
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        let path = publish(&store, "");
        for number in 0..100 {
            let left = format!("{TEMPORARY_PREFIX}{}-{number}", std::process::id());
            File::create(path.with_file_name(left)).unwrap();
        }
        publish(&store, "");
        let again: Vec<_> = (0..100).map(|_| temporary_name()).collect();
        assert!(again.iter().all(|name| !names.contains(name)));
    }

    // Promises: index-expiry
    #[test]
    fn long_unused_index_is_removed_on_next_publish() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        let long_ago = SystemTime::now() - RETENTION_POLICY.max_age - Duration::from_mins(1);
        let names = ["old", "used", "marked"];
        for name in names {
            publish(&store, name);
        }
        let _mark = held(&store, "marked");
        // Only now, because otherwise saving the next one would remove each.
        for name in names {
            let file = File::open(store.path(&locator(name))).unwrap();
            file.set_modified(long_ago).unwrap();
        }
        held(&store, "used").touch();
        fs::write(store.cache_dir.join(DIRECTORY_NAME).join("foreign"), b"").unwrap();
        File::open(store.cache_dir.join(DIRECTORY_NAME).join("foreign"))
            .unwrap()
            .set_modified(long_ago)
            .unwrap();
        publish(&store, "new");
        let left = |name: &str| store.path(&locator(name)).exists();
        assert!(!left("old"));
        assert!(left("used") && left("marked") && left("new"));
        assert!(
            store
                .cache_dir
                .join(DIRECTORY_NAME)
                .join("foreign")
                .exists(),
            "it is not ours"
        );
    }

    // Promises: cache-list
    #[test]
    fn index_file_reports_origin_and_is_removable_when_unused() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        assert!(store.files().unwrap().is_empty());
        publish(&store, "a");
        let files = store.files().unwrap();
        let [file] = &files[..] else { panic!("one") };
        assert_eq!(file.origin().unwrap().locator, locator("a"));
        let mark = held(&store, "a");
        assert!(file.is_in_use());
        assert!(!file.remove().unwrap());
        drop(mark);
        assert!(!file.is_in_use());
        // Replaces the file under the same name, which must then not be removed.
        publish(&store, "a");
        assert!(!file.remove().unwrap());
        assert!(store.files().unwrap()[0].remove().unwrap());
        assert!(find(&store, &locator("a")).unwrap().is_none());
    }

    // Promises: cache-in-use
    #[test]
    fn published_index_is_in_use_at_once() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        let in_use = store.publish(&locator(""), &index(locator(""))).unwrap();
        let files = store.files().unwrap();
        assert!(files[0].is_in_use() && !files[0].remove().unwrap());
        drop(in_use.expect("not locked"));
        assert!(files[0].remove().unwrap());
    }

    // Promises: index-shared-cache
    #[test]
    fn locks_use_descriptors_that_nfs_accepts() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        let published = store.publish(&locator(""), &index(locator(""))).unwrap();
        let shared = published.expect("not locked");
        let can = |file: &File, access| {
            let mode = rustix::fs::fcntl_getfl(file).unwrap() & OFlags::RWMODE;
            mode == OFlags::RDWR || mode == access
        };
        assert!(can(&shared.locked, OFlags::RDONLY), "a shared lock reads");
        drop(shared);
        let alone = store.files().unwrap()[0].lock_exclusive().unwrap();
        let alone = alone.expect("an index of ours");
        assert!(can(&alone, OFlags::WRONLY), "an exclusive lock writes");
    }

    // Promises: cache-in-use
    #[test]
    fn locked_temporary_file_stays_at_any_age() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        let path = publish(&store, "").with_file_name(format!("{TEMPORARY_PREFIX}old"));
        let written = File::create(&path).unwrap();
        written
            .set_permissions(fs::Permissions::from_mode(0o600))
            .unwrap();
        written
            .set_modified(SystemTime::now() - STALE_TEMPORARY_AGE * 2)
            .unwrap();
        lock(&written, LockKind::Shared, LOCK_TIMEOUT).unwrap();
        let files = store.files().unwrap();
        let file = files.iter().find(|file| !file.is_finished).unwrap();
        assert!(file.is_in_use() && !file.remove().unwrap());
        publish(&store, "");
        assert!(path.exists());
        drop(written);
        assert!(!file.is_in_use() && file.remove().unwrap());
    }

    // Promises: cache-in-use
    #[test]
    fn find_succeeds_while_lock_is_probed() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        let path = publish(&store, "");
        let looking = File::open(path).unwrap();
        lock(&looking, LockKind::Exclusive, Duration::ZERO).unwrap();
        std::thread::scope(|scope| {
            let taking = scope.spawn(|| held(&store, ""));
            std::thread::sleep(10 * RETRY_INTERVAL);
            drop(looking);
            taking.join().unwrap();
        });
    }

    // Promises: cache-in-use
    #[test]
    fn find_retries_when_index_is_replaced_before_lock() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        for is_replaced in [false, true] {
            let path = publish(&store, "");
            // Acts like a process that is about to remove the file.
            let removing = File::open(&path).unwrap();
            lock(&removing, LockKind::Exclusive, Duration::ZERO).unwrap();
            let found = std::thread::scope(|scope| {
                let taking = scope.spawn(|| {
                    store
                        .find_locked(&locator(""), &MemoryLimit::none(), RowsToLoad::All)
                        .unwrap()
                });
                std::thread::sleep(10 * RETRY_INTERVAL);
                fs::remove_file(&path).unwrap();
                if is_replaced {
                    publish(&store, "");
                }
                drop(removing);
                taking.join().unwrap()
            });
            assert_eq!(found.is_some(), is_replaced);
            if let Some((_, in_use)) = found {
                let _in_use = in_use.expect("not locked");
                let files = store.files().unwrap();
                assert!(files[0].is_in_use(), "the new one");
            }
        }
    }

    // Promises: cache-in-use
    #[test]
    fn index_in_use_survives_concurrent_removal() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        for round in 0..200 {
            publish(&store, "");
            let files = store.files().unwrap();
            std::thread::scope(|scope| {
                let removing = scope.spawn(|| files[0].remove().unwrap());
                let taken = store
                    .find_locked(&locator(""), &MemoryLimit::none(), RowsToLoad::All)
                    .unwrap();
                let is_removed = removing.join().unwrap();
                let is_there = store.path(&locator("")).exists();
                let is_held = taken.is_some_and(|(_, in_use)| in_use.is_some());
                assert_eq!((is_held, is_there), (!is_removed, !is_removed), "{round}");
            });
        }
    }

    // Promises: cache-in-use
    #[test]
    fn remove_waits_for_directory_lock() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        publish(&store, "");
        let files = store.files().unwrap();
        let naming = lock_directory(&store.open_directory().unwrap()).expect("not locked");
        assert!(!files[0].remove().unwrap());
        drop(naming);
        assert!(files[0].remove().unwrap());
    }

    #[test]
    fn cut_index_file_has_no_origin_and_is_damaged() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        let path = publish(&store, "");
        assert_eq!(
            store.files().unwrap()[0].origin().unwrap().locator,
            locator("")
        );
        let bytes = fs::read(&path).unwrap();
        for end in 0..bytes.len() {
            fs::write(&path, &bytes[..end]).unwrap();
            assert!(store.files().unwrap()[0].origin().is_none(), "{end}");
            assert!(find(&store, &locator("")).is_err(), "{end}");
        }
    }

    #[test]
    fn changed_bit_of_an_index_file_changes_nothing_or_is_an_error() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        let path = publish(&store, "");
        let bytes = fs::read(&path).unwrap();
        let mut unnoticed = 0;
        for bit in 0..8 * bytes.len() {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &changed).unwrap();
            if let Ok(found) = find(&store, &locator("")) {
                publish_again(&store, &found.unwrap());
                assert_eq!(fs::read(&path).unwrap(), bytes, "{bit}");
                unnoticed += 1;
            }
        }
        assert!(
            50 * unnoticed < 8 * bytes.len(),
            "few bits of zstd: {unnoticed}"
        );
    }

    fn publish_again(store: &Store, index: &Index) {
        drop(store.publish(&locator(""), index).unwrap());
    }

    // Promises: index-damaged
    #[test]
    fn damage_of_any_part_is_found_when_only_names_are_loaded() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        let mut builder = Builder::new(Options::default());
        for number in 0..20_000 {
            let name = format!("d/{number}");
            builder.add_member(&file(&name, 0..1)).unwrap();
        }
        let index = builder.finish(Origin::default());
        store.publish(&Locator::default(), &index).unwrap();
        let path = store.path(&Locator::default());
        let bytes = fs::read(&path).unwrap();
        let find = || {
            let limit = MemoryLimit::none();
            store.find_locked(&Locator::default(), &limit, RowsToLoad::Names)
        };
        for place in (0..bytes.len()).step_by(bytes.len() / 200) {
            let mut damaged = bytes.clone();
            damaged[place] ^= 0x55;
            fs::write(&path, &damaged).unwrap();
            assert!(find().is_err(), "byte {place} of {}", bytes.len());
        }
        fs::write(&path, &bytes).unwrap();
        assert!(find().unwrap().unwrap().0.is_on_demand());
    }

    #[test]
    fn index_that_is_loaded_for_its_names_has_no_other_rows_in_memory() {
        let cache = tempfile::tempdir().unwrap();
        let store = Store::new(cache.path());
        let mut builder = Builder::new(Options::default());
        let names: Vec<_> = (0..20_000).map(|number| format!("d/{number}")).collect();
        for name in &names {
            builder.add_member(&file(name, 0..1)).unwrap();
        }
        let index = builder.finish(Origin::default());
        store.publish(&Locator::default(), &index).unwrap();
        let open = |rows| {
            let found = store.find_locked(&Locator::default(), &MemoryLimit::none(), rows);
            found.unwrap().unwrap().0
        };
        let (all, some) = (open(RowsToLoad::All), open(RowsToLoad::Names));
        assert!(!all.is_on_demand() && some.is_on_demand());
        assert!(some.memory_bytes() < all.memory_bytes() * 2 / 3);
        let list = |index: &Index| {
            let directory = index.lookup(super::super::Ino::ROOT, b"d").unwrap().ino();
            let names = index.names(directory, 0, true);
            names
                .map(|child| (child.name.to_vec(), child.file_type))
                .collect::<Vec<_>>()
        };
        assert_eq!(list(&all), list(&some));
        assert!(some.is_on_demand(), "the listing loads no more");
    }
}
