//! The directory of all cache files, and the disk limit that all processes share.

use std::cmp::Reverse;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::cache_file::{CacheFile, is_temporary};
use crate::base::extent::{Extent, Plain};
use crate::base::shared_dir::{SharedDir, SharedFile, lock_directory};

/// Directory of cache files, with a common limit.
#[derive(Clone, Debug)]
pub struct DiskCacheDir {
    pub(super) directory: SharedDir,
    limit_bytes: Option<u64>,
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
    _lock: Option<OwnedFd>,
}

impl DiskCacheDir {
    /// Names the files below `cache_dir`, with a common limit; `None` leaves a tenth of the disk free.
    pub fn new(cache_dir: &Path, limit_bytes: Option<u64>) -> Self {
        Self {
            directory: SharedDir::new(cache_dir, DIRECTORY_NAME),
            limit_bytes,
        }
    }

    /// Returns the directory's path.
    pub fn path(&self) -> PathBuf {
        self.directory.path()
    }

    /// Returns the disk usage of all files and their current limit, in bytes.
    pub fn usage_and_limit(&self) -> (u64, u64) {
        let held = total_disk_bytes(&self.files().unwrap_or_default());
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
        let lock = match self.directory.open() {
            Ok(directory) => Some(lock_directory(&directory)?),
            Err(_) => None,
        };
        Some(WriteLock { _lock: lock })
    }

    /// Returns the cache files, least recently used first; none if there is no directory.
    ///
    /// # Errors
    /// If the directory is not exclusive to this user, or cannot be read.
    pub fn files(&self) -> io::Result<Vec<SharedFile>> {
        self.directory.files()
    }

    /// Bytes to evict before `needed` more may be written, given all `files`.
    pub(super) fn bytes_to_free(&self, files: &[SharedFile], needed: u64) -> u64 {
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
    pub(super) fn fair_share(&self, files: &[SharedFile], users: usize) -> u64 {
        let limit = self.limit_bytes.unwrap_or_else(|| total_disk_bytes(files));
        limit / (users.max(1) as u64)
    }

    /// Removes unfinished files of dead processes.
    pub(super) fn remove_stale(&self) {
        for listed in self.files().unwrap_or_default() {
            if is_temporary(&listed.name)
                && let Some(file) = CacheFile::open_listed(&listed)
                && file.try_lock_exclusive()
            {
                file.remove();
            }
        }
    }
}

/// The content key in the name of a cache file; `None` if the file is unfinished.
pub(crate) fn content_key(name: &str) -> Option<&str> {
    let content = name.strip_suffix(ONLY_COPY_SUFFIX);
    let content = content.or_else(|| name.strip_suffix(EVICTABLE_SUFFIX))?;
    (!is_temporary(name)).then_some(content)
}

/// Whether `name` is that of an unfinished cache file.
pub(crate) fn is_unfinished(name: &str) -> bool {
    is_temporary(name) && name.ends_with(EVICTABLE_SUFFIX)
}

/// Whether parts can be evicted while in use: the file is finished and can be fetched again.
pub(super) fn can_evict_parts(file: &SharedFile) -> bool {
    !file.name.ends_with(ONLY_COPY_SUFFIX) && !is_temporary(&file.name)
}

/// The cost to make a byte of `listed` again, relative to other files.
pub(super) fn recovery_cost(listed: &SharedFile) -> u64 {
    CacheFile::open_listed(listed).map_or(1, |file| file.recovery_cost())
}

/// Rank of a file that was last used so long ago. The highest is evicted first.
pub(super) fn eviction_rank(age: u128, recovery_cost: u64) -> u128 {
    age / u128::from(recovery_cost)
}

/// The files in the order of their eviction: by age, but one that costs ten times as much stays ten times as long.
pub(super) fn in_eviction_order<'a>(
    files: impl IntoIterator<Item = &'a SharedFile>,
) -> impl Iterator<Item = &'a SharedFile> {
    let now = SystemTime::now();
    let aged = files.into_iter().map(|listed| {
        let age = now.duration_since(listed.used).unwrap_or_default();
        (
            eviction_rank(age.as_millis(), recovery_cost(listed)),
            listed,
        )
    });
    // Stable, so that equal ages keep the order of their last uses.
    let mut aged: Vec<_> = aged.collect();
    aged.sort_by_key(|(age, _)| Reverse(*age));
    aged.into_iter().map(|(_, listed)| listed)
}

/// Evicts `wanted` bytes of `listed` from the front, or the whole file. Returns the number of freed bytes.
pub(super) fn evict(listed: &SharedFile, wanted: u64) -> u64 {
    let Some(file) = CacheFile::open_listed(listed) else {
        return 0;
    };
    if file.try_lock_exclusive() && (wanted >= listed.held_bytes || !can_evict_parts(listed)) {
        let held_bytes = file.held_bytes();
        file.remove();
        return held_bytes;
    }
    if !can_evict_parts(listed) {
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
    file.set_last_used(listed.used);
    freed
}

fn total_disk_bytes(files: &[SharedFile]) -> u64 {
    let bytes = files.iter().map(|file| file.held_bytes);
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
    use std::time::{Duration, SystemTime};

    use rustix::fs::OFlags;

    use super::super::tests::directory;
    use super::*;

    const BLOCKS: u64 = 1 << 20;

    fn cache_file(cache_dir: &DiskCacheDir, name: &str, minutes: u64) -> CacheFile {
        let directory = cache_dir.directory.create().expect("made");
        let file = CacheFile::open(&directory, name, OFlags::CREATE).expect("made");
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
        let files = cache_dir.files().expect("readable").into_iter();
        files.map(|file| file.name).collect()
    }

    // Promises: disk-limit
    #[test]
    fn bytes_to_free_counts_all_disk_cache_files() {
        let directory = directory();
        let limit = 3 * BLOCKS + SPACE_MARGIN_BYTES;
        let cache_dir = DiskCacheDir::new(directory.path(), Some(limit));
        drop(cache_file(&cache_dir, "a", 1));
        drop(cache_file(&cache_dir, "b", 2));
        assert_eq!(names(&cache_dir), ["b", "a"], "the oldest first");
        let files = cache_dir.files().expect("readable");
        assert_eq!(cache_dir.bytes_to_free(&files, BLOCKS), 0);
        assert_eq!(cache_dir.bytes_to_free(&files, BLOCKS + 1), 1);
        assert_eq!(cache_dir.usage_and_limit(), (2 * BLOCKS, limit));
        let smaller = DiskCacheDir::new(directory.path(), Some(BLOCKS));
        assert_eq!(smaller.bytes_to_free(&files, 0), BLOCKS);
        assert_eq!(smaller.fair_share(&files, 2), BLOCKS / 2);
    }

    #[test]
    fn disk_cache_without_limit_keeps_a_tenth_of_disk_free() {
        let directory = directory();
        let cache_dir = DiskCacheDir::new(&directory.path().join("not/yet"), None);
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
        let cache_dir = DiskCacheDir::new(directory.path(), Some(0));
        drop(cache_file(&cache_dir, "a", 10));
        let [before] = &cache_dir.files().expect("readable")[..] else {
            panic!("one");
        };
        assert_eq!(evict(before, 65536), 65536);
        let [after] = &cache_dir.files().expect("readable")[..] else {
            panic!("one");
        };
        assert_eq!(after.held_bytes, BLOCKS - 65536);
        assert_eq!(after.used, before.used, "that was no use");
        let file = CacheFile::open_listed(after).expect("there");
        assert_eq!(
            file.next_data(Plain(0)).map(|data| data.start()),
            Some(Plain(65536))
        );
        drop(file);
        assert_eq!(evict(after, BLOCKS), BLOCKS - 65536);
        assert!(names(&cache_dir).is_empty());
    }

    #[test]
    fn eviction_keeps_files_in_use_and_only_copies_whole() {
        let directory = directory();
        let cache_dir = DiskCacheDir::new(directory.path(), Some(0));
        let files = || cache_dir.files().expect("readable");
        let part = cache_file(&cache_dir, "a.data", 3);
        let whole = cache_file(&cache_dir, "b.once.data", 2);
        let temporary =
            CacheFile::create(&cache_dir.directory.create().expect("made")).expect("made");
        let page = Extent::with_len(Plain(0), 4096).into();
        temporary.write(&page, &[1; 4096], false).expect("room");
        let freed = files()
            .iter()
            .map(|file| evict(file, BLOCKS))
            .collect::<Vec<_>>();
        assert_eq!(freed, [BLOCKS, 0, 0]);
        assert!(files().iter().all(SharedFile::is_in_use));
        cache_dir.remove_stale();
        assert_eq!(names(&cache_dir).len(), 3);
        drop((part, whole, temporary));
        assert!(!files().iter().any(SharedFile::is_in_use));
        cache_dir.remove_stale();
        assert_eq!(names(&cache_dir), ["a.data", "b.once.data"]);
        let freed = files()
            .iter()
            .map(|file| evict(file, 4096))
            .collect::<Vec<_>>();
        assert_eq!(freed, [0, BLOCKS]);
        assert!(names(&cache_dir).is_empty());
    }
}
