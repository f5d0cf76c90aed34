//! The directory of all cache files, and the disk limit that all processes share.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use super::cache_file::{self, CacheFile, is_temporary};
use crate::base::extent::{Extent, Plain};
use crate::base::lock::LockKind;
use crate::base::trusted_dir::TrustedDir;

/// Directory of cache files, with a common limit.
#[derive(Clone, Debug)]
pub struct DiskCacheDir {
    cache_dir: PathBuf,
    limit_bytes: Option<u64>,
}

/// A cache file in the directory.
#[derive(Clone, Debug)]
pub struct CacheFileInfo {
    directory: Arc<TrustedDir>,
    name: String,
    identity: (u64, u64),
    /// Bytes of disk that it occupies.
    pub held_bytes: u64,
    /// Time of the last use.
    pub used: SystemTime,
    is_only_copy: bool,
    is_temporary: bool,
}

pub(super) const ONLY_COPY_SUFFIX: &str = ".once.data";
pub(super) const EVICTABLE_SUFFIX: &str = ".data";

/// Granularity of eviction in bytes, a multiple of the block size of any file system.
pub(super) const EVICTION_STEP_BYTES: u64 = 64 << 10;

/// Bytes that a file may occupy beyond its content: partly filled blocks and the file system's metadata.
pub(super) const SPACE_MARGIN_BYTES: u64 = 64 << 10;

const DIRECTORY_NAME: &str = "disk-cache";

/// The lock to write and to evict, held until dropped.
#[derive(Debug)]
pub(super) struct WriteLock {
    _lock: Option<File>,
}

impl DiskCacheDir {
    /// Names the files below `cache_dir`, with a common limit; `None` leaves a tenth of the disk free.
    pub fn new(cache_dir: PathBuf, limit_bytes: Option<u64>) -> Self {
        Self {
            cache_dir,
            limit_bytes,
        }
    }

    /// Returns the directory's path.
    pub fn path(&self) -> PathBuf {
        self.cache_dir.join(DIRECTORY_NAME)
    }

    pub(super) fn create_directory(&self) -> io::Result<Arc<TrustedDir>> {
        let cache = TrustedDir::create(&self.cache_dir)?;
        Ok(Arc::new(cache.create_dir(DIRECTORY_NAME)?))
    }

    /// Opens the directory as it is now. It may differ from the one opened before.
    pub(super) fn open_directory(&self) -> io::Result<Arc<TrustedDir>> {
        let cache = TrustedDir::open(&self.cache_dir)?;
        Ok(Arc::new(cache.open_dir(DIRECTORY_NAME)?))
    }

    /// Returns the disk usage of all files and their current limit, in bytes.
    pub fn usage_and_limit(&self) -> (u64, u64) {
        let held = total_disk_bytes(&self.files());
        let limit = self.limit_bytes.unwrap_or_else(|| {
            let disk = Disk::of(&self.path());
            (held + disk.available).saturating_sub(disk.reserve)
        });
        (held, limit)
    }

    /// Maximum bytes of an archive that holds `held` now: without a common limit, these or half of the disk that
    /// is free for it, because a small archive may decode to terabytes.
    pub(super) fn max_bytes_of_archive(&self, held: u64) -> u64 {
        if self.limit_bytes.is_some() {
            return u64::MAX;
        }
        let half = held.saturating_add(Disk::of(&self.path()).available) / 2;
        half.max(held)
    }

    /// Waits for the write lock; `None` if another process holds it past the timeout.
    pub(super) fn lock_for_write(&self) -> Option<WriteLock> {
        // If the directory cannot be opened, the following write reports the error.
        let directory = self
            .open_directory()
            .and_then(|found| found.as_fd().try_clone_to_owned());
        let Ok(directory) = directory.map(File::from) else {
            return Some(WriteLock { _lock: None });
        };
        let locked = cache_file::lock_in_time(&directory, LockKind::Exclusive);
        locked.then_some(WriteLock {
            _lock: Some(directory),
        })
    }

    /// Checks that the directory can be used. A missing directory is no error.
    ///
    /// # Errors
    /// If it is not exclusive to this user, or cannot be opened.
    pub fn check(&self) -> io::Result<()> {
        match self.open_directory() {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Returns the cache files, least recently used first.
    pub fn files(&self) -> Vec<CacheFileInfo> {
        let Ok(directory) = self.open_directory() else {
            return Vec::new();
        };
        let names = directory.names().unwrap_or_default();
        let mut files: Vec<_> = names
            .into_iter()
            .filter_map(|name| CacheFileInfo::stat(&directory, name))
            .collect();
        files.sort_by_key(|info| info.used);
        files
    }

    /// Bytes to evict before `needed` more may be written, given all `files`.
    pub(super) fn bytes_to_free(&self, files: &[CacheFileInfo], needed: u64) -> u64 {
        let (taken, limit) = if let Some(limit) = self.limit_bytes {
            (total_disk_bytes(files), limit)
        } else {
            let disk = Disk::of(&self.path());
            (disk.reserve, disk.available)
        };
        let margin = if needed > 0 { SPACE_MARGIN_BYTES } else { 0 };
        taken.saturating_add(needed + margin).saturating_sub(limit)
    }

    /// Bytes that one of `users` may occupy before it must free space for the others.
    pub(super) fn fair_share(&self, files: &[CacheFileInfo], users: usize) -> u64 {
        let limit = self.limit_bytes.unwrap_or_else(|| total_disk_bytes(files));
        limit / (users.max(1) as u64)
    }

    /// Removes unfinished files of dead processes.
    pub(super) fn remove_stale(&self) {
        for info in self.files() {
            if info.is_temporary
                && let Some(file) = info.open()
                && file.try_lock_exclusive()
            {
                file.remove();
            }
        }
    }
}

impl CacheFileInfo {
    fn stat(directory: &Arc<TrustedDir>, name: String) -> Option<Self> {
        let found = directory.stat_file(&name).ok()?;
        Some(Self {
            directory: Arc::clone(directory),
            identity: found.identity,
            held_bytes: found.held_bytes,
            used: found.modified,
            is_only_copy: name.ends_with(ONLY_COPY_SUFFIX),
            is_temporary: is_temporary(&name),
            name,
        })
    }

    pub(super) fn is_same_file(&self, file: &CacheFile) -> bool {
        let identity = file.metadata().map(|file| (file.dev(), file.ino()));
        identity.is_ok_and(|identity| identity == self.identity)
    }

    /// The file's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the content key in the name; `None` if the file is unfinished.
    pub fn content(&self) -> Option<&str> {
        let content = self.name.strip_suffix(ONLY_COPY_SUFFIX);
        let content = content.or_else(|| self.name.strip_suffix(EVICTABLE_SUFFIX))?;
        (!self.is_temporary).then_some(content)
    }

    /// Whether the file has the name of an unfinished cache file.
    pub fn is_unfinished(&self) -> bool {
        self.is_temporary && self.name.ends_with(EVICTABLE_SUFFIX)
    }

    /// Removes the file unless it is in use or was replaced. Returns whether it did.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub fn remove(&self) -> io::Result<bool> {
        match self.open() {
            Some(file) if file.try_lock_exclusive() => {
                self.directory.remove(&self.name)?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Whether any process, this one included, has the file open.
    pub fn is_in_use(&self) -> bool {
        self.open().is_some_and(|file| !file.try_lock_exclusive())
    }

    /// Whether parts can be evicted while in use: the file is finished and can be fetched again.
    pub(super) fn can_evict_parts(&self) -> bool {
        !self.is_only_copy && !self.is_temporary
    }

    /// Evicts `wanted` bytes from the front, or the whole file. Returns the number of freed bytes.
    pub(super) fn evict(&self, wanted: u64) -> u64 {
        let Some(file) = self.open() else { return 0 };
        if file.try_lock_exclusive() && (wanted >= self.held_bytes || !self.can_evict_parts()) {
            let held_bytes = file.held_bytes();
            file.remove();
            return held_bytes;
        }
        if !self.can_evict_parts() {
            return 0;
        }
        let wanted = wanted.next_multiple_of(EVICTION_STEP_BYTES);
        let mut freed = 0;
        let mut at = Plain(0);
        while freed < wanted
            && let Some(data) = file.next_data(at)
        {
            let len = data.len().min(wanted - freed);
            let part = Extent::with_len(data.start(), len);
            freed += file.punch_hole(part);
            at = part.end();
        }
        // Punching holes changed the mtime, which holds the last use.
        file.set_last_used(self.used);
        freed
    }

    fn open(&self) -> Option<CacheFile> {
        let file = cache_file::open_unlocked(&self.directory, &self.name).ok()?;
        self.is_same_file(&file).then_some(file)
    }
}

fn total_disk_bytes(files: &[CacheFileInfo]) -> u64 {
    let bytes = files.iter().map(|info| info.held_bytes);
    bytes.fold(0, u64::saturating_add)
}

#[derive(Clone, Copy, Default)]
struct Disk {
    available: u64,
    /// A tenth of the size in df(1), which excludes root's blocks. With them it could exceed `available`.
    reserve: u64,
}

impl Disk {
    /// Returns the disk of `directory`, which may not exist yet. An unknown disk has nothing available.
    fn of(directory: &Path) -> Self {
        let existing = directory
            .ancestors()
            .find(|ancestor| fs::metadata(ancestor).is_ok());
        let Some(Ok(disk)) = existing.map(rustix::fs::statvfs) else {
            return Self::default();
        };
        Self::new(disk.f_frsize, disk.f_blocks, disk.f_bfree, disk.f_bavail)
    }

    fn new(block_bytes: u64, blocks: u64, free: u64, available: u64) -> Self {
        let used = blocks.saturating_sub(free);
        let usable = used.saturating_add(available);
        Self {
            available: available.saturating_mul(block_bytes),
            reserve: usable.saturating_mul(block_bytes) / 10,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::cache_file::open_unlocked;
    use super::super::tests::directory;
    use super::*;

    const BLOCKS: u64 = 1 << 20;

    fn cache_file(cache_dir: &DiskCacheDir, name: &str, minutes: u64) -> CacheFile {
        let file = CacheFile::open(&cache_dir.create_directory().expect("made"), name, true)
            .expect("made");
        file.write(
            &Extent::with_len(Plain(0), 1 << 20).into(),
            &vec![1; 1 << 20],
            false,
        )
        .expect("room");
        file.set_last_used(SystemTime::now() - Duration::from_mins(minutes));
        file
    }

    fn names(cache_dir: &DiskCacheDir) -> Vec<String> {
        let files = cache_dir.files();
        files.iter().map(|info| info.name.clone()).collect()
    }

    // Promises: disk-limit
    #[test]
    fn bytes_to_free_counts_all_disk_cache_files() {
        let directory = directory();
        let limit = 3 * BLOCKS + SPACE_MARGIN_BYTES;
        let cache_dir = DiskCacheDir::new(directory.path().to_owned(), Some(limit));
        drop(cache_file(&cache_dir, "a", 1));
        drop(cache_file(&cache_dir, "b", 2));
        assert_eq!(names(&cache_dir), ["b", "a"], "the oldest first");
        let files = cache_dir.files();
        assert_eq!(cache_dir.bytes_to_free(&files, BLOCKS), 0);
        assert_eq!(cache_dir.bytes_to_free(&files, BLOCKS + 1), 1);
        assert_eq!(cache_dir.usage_and_limit(), (2 * BLOCKS, limit));
        let smaller = DiskCacheDir::new(directory.path().to_owned(), Some(BLOCKS));
        assert_eq!(smaller.bytes_to_free(&files, 0), BLOCKS);
        assert_eq!(smaller.fair_share(&files, 2), BLOCKS / 2);
    }

    #[test]
    fn disk_cache_without_limit_keeps_a_tenth_of_disk_free() {
        let directory = directory();
        let cache_dir = DiskCacheDir::new(directory.path().join("not/yet"), None);
        let disk = Disk::of(directory.path());
        assert!(disk.reserve > 0);
        let (held, limit) = cache_dir.usage_and_limit();
        assert_eq!(held, 0);
        assert!(limit <= disk.available.saturating_sub(disk.reserve) + (1 << 30));
        let missing = cache_dir.bytes_to_free(&[], disk.available);
        assert!(missing >= disk.reserve.saturating_sub(1 << 30), "{missing}");
    }

    // Promises: disk-limit
    #[test]
    fn blocks_reserved_for_root_do_not_count_as_disk() {
        let disk = Disk::new(4096, 1000, 1000, 1000);
        assert_eq!((disk.available, disk.reserve), (1000 * 4096, 100 * 4096));
        let mostly_for_root = Disk::new(4096, 1000, 800, 100);
        assert_eq!(mostly_for_root.reserve, 30 * 4096);
        let full = Disk::new(4096, 1000, 0, 0);
        assert_eq!((full.available, full.reserve), (0, 100 * 4096));
        let senseless = Disk::new(u64::MAX, 1, u64::MAX, u64::MAX);
        assert_eq!(senseless.reserve, u64::MAX / 10);
    }

    #[test]
    fn cache_file_is_evicted_from_the_front_and_removed_when_empty() {
        let directory = directory();
        let cache_dir = DiskCacheDir::new(directory.path().to_owned(), Some(0));
        drop(cache_file(&cache_dir, "a", 10));
        let [before] = &cache_dir.files()[..] else {
            panic!("one");
        };
        assert_eq!(before.evict(65536), 65536);
        let [after] = &cache_dir.files()[..] else {
            panic!("one");
        };
        assert_eq!(after.held_bytes, BLOCKS - 65536);
        assert_eq!(after.used, before.used, "that was no use");
        let file = open_unlocked(&after.directory, &after.name).expect("there");
        assert_eq!(
            file.next_data(Plain(0)).map(|data| data.start()),
            Some(Plain(65536))
        );
        drop(file);
        assert_eq!(after.evict(BLOCKS), BLOCKS - 65536);
        assert!(names(&cache_dir).is_empty());
    }

    #[test]
    fn eviction_keeps_files_in_use_and_only_copies_whole() {
        let directory = directory();
        let cache_dir = DiskCacheDir::new(directory.path().to_owned(), Some(0));
        let part = cache_file(&cache_dir, "a.data", 3);
        let whole = cache_file(&cache_dir, "b.once.data", 2);
        let temporary =
            CacheFile::create(&cache_dir.create_directory().expect("made")).expect("made");
        let page = Extent::with_len(Plain(0), 4096).into();
        temporary.write(&page, &[1; 4096], false).expect("room");
        let freed: Vec<_> = cache_dir
            .files()
            .iter()
            .map(|info| info.evict(BLOCKS))
            .collect();
        assert_eq!(freed, [BLOCKS, 0, 0]);
        assert!(cache_dir.files().iter().all(CacheFileInfo::is_in_use));
        cache_dir.remove_stale();
        assert_eq!(names(&cache_dir).len(), 3);
        drop((part, whole, temporary));
        assert!(!cache_dir.files().iter().any(CacheFileInfo::is_in_use));
        cache_dir.remove_stale();
        assert_eq!(names(&cache_dir), ["a.data", "b.once.data"]);
        let freed: Vec<_> = cache_dir
            .files()
            .iter()
            .map(|info| info.evict(4096))
            .collect();
        assert_eq!(freed, [0, BLOCKS]);
        assert!(names(&cache_dir).is_empty());
    }
}
