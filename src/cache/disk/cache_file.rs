//! One sparse file of plain bytes: plain byte *n* is at file offset *n*.
//! A shared flock(2) marks the file as in use. The kernel releases the lock of a killed process.

use std::fs::{File, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustix::fs::{
    FallocateFlags, OFlags, SeekFrom, XattrFlags, fallocate, fgetxattr, fsetxattr, seek,
};
use rustix::io::Errno;

use super::direct_io::DirectIo;
use super::sparse_extent::SparseExtent;
use crate::base::extent::{Extent, Plain};
use crate::base::free_list::{FreeList, RecycledBuffer};
use crate::base::lock::{LockKind, lock};
use crate::base::publish::random_suffix;
use crate::base::random_reads::{RandomReads, Wait};
use crate::base::shared_dir::{SharedFile, open_for_use};
use crate::base::trusted_dir::TrustedDir;

#[derive(Debug)]
pub(super) struct CacheFile {
    file: File,
    directory: Arc<TrustedDir>,
    pub(super) name: String,
    direct_io: DirectIo,
    random_reads: RandomReads,
}

/// Prefix of unfinished files. Their writers hold a lock, so one without a lock is stale at any age, unlike a file with a
/// [temporary name](crate::base::publish::temporary_name).
const UNFINISHED_PREFIX: &str = ".";

/// Maximum recovery cost, so that even such a file is evicted when it was not used for long.
const MAX_RECOVERY_COST: u64 = 1 << 8;

/// Extended attribute with the cost.
const COST_XATTR: &str = "user.tarfs.cost";

impl CacheFile {
    fn new(file: File, directory: &Arc<TrustedDir>, name: &str) -> Self {
        Self {
            file,
            directory: Arc::clone(directory),
            name: name.to_owned(),
            direct_io: DirectIo::default(),
            random_reads: RandomReads::default(),
        }
    }

    pub(super) fn create(directory: &Arc<TrustedDir>) -> io::Result<Self> {
        let name = format!("{UNFINISHED_PREFIX}{}.data", random_suffix());
        Self::open(directory, &name, OFlags::CREATE | OFlags::EXCL)
    }

    /// Opens the file, and marks it as in use. If flock(2) fails, limits are less exact.
    pub(super) fn open(directory: &Arc<TrustedDir>, name: &str, flags: OFlags) -> io::Result<Self> {
        let (file, locked) = open_for_use(directory, name, OFlags::RDWR | flags)?;
        if locked == Err(Errno::WOULDBLOCK) {
            return Err(ErrorKind::TimedOut.into());
        }
        Ok(Self::new(file, directory, name))
    }

    /// Opens the file without marking it; `None` if it was replaced.
    pub(super) fn open_listed(listed: &SharedFile) -> Option<Self> {
        let file = listed.open(OFlags::RDWR)?;
        Some(Self::new(file, &listed.directory, &listed.name))
    }

    pub(super) fn is_same_file(&self, listed: &SharedFile) -> bool {
        listed.is_same_file(&self.file)
    }

    fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }

    pub(super) fn held_bytes(&self) -> u64 {
        // `st_blocks` counts blocks of 512 bytes on every file system.
        self.metadata()
            .map_or(0, |metadata| metadata.blocks().saturating_mul(512))
    }

    /// Whether the file is still in its directory, under any name.
    pub(super) fn has_name(&self) -> bool {
        self.metadata().is_ok_and(|metadata| metadata.nlink() > 0)
    }

    /// Writes the stored parts of `bytes`, through the page cache if `is_buffered`. Otherwise it waits for the disk.
    pub(super) fn write(
        &self,
        sparse: &SparseExtent,
        bytes: &[u8],
        is_buffered: bool,
    ) -> io::Result<()> {
        sparse.stored().try_for_each(|part| {
            let bytes = bytes.get(sparse.range(part)).unwrap_or_default();
            self.direct_io
                .write_all_at(&self.file, bytes, part.start().0, is_buffered)
        })
    }

    /// Whether no stored part has a hole, and all end within the file.
    pub(super) fn covers(&self, sparse: &SparseExtent) -> bool {
        sparse.stored().all(|part| {
            let (start, end) = (part.start().0, part.end().0);
            // A file system that cannot report holes counts everything as data.
            let data = seek(&self.file, SeekFrom::Data(start)).unwrap_or(start);
            let hole = seek(&self.file, SeekFrom::Hole(start)).unwrap_or(u64::MAX);
            let len = self.metadata().map_or(0, |metadata| metadata.len());
            data <= start && end <= hole && end <= len
        })
    }

    pub(super) fn read(
        &self,
        sparse: &SparseExtent,
        free_list: &FreeList,
    ) -> Option<RecycledBuffer> {
        if !self.covers(sparse) {
            return None;
        }
        let extent = sparse.extent();
        let mut bytes = free_list.allocate(usize::try_from(extent.len()).ok()?, extent.start().0);
        sparse.fill_zeros(&mut bytes);
        for part in sparse.stored() {
            let bytes = bytes.get_mut(sparse.range(part))?;
            let read = self
                .direct_io
                .read_exact_at(&self.file, bytes, part.start().0);
            read.ok()?;
        }
        Some(bytes)
    }

    /// The bytes at `part`, with zeros for holes. `None` past the file's end, and as [`RandomReads::read`].
    pub(super) fn read_part(
        &self,
        part: &SparseExtent,
        free_list: &FreeList,
        wait: Wait,
    ) -> Option<RecycledBuffer> {
        let len = usize::try_from(part.extent().len()).ok()?;
        let mut bytes = free_list.allocate(len, 0);
        part.fill_zeros(&mut bytes);
        for stored in part.stored() {
            let bytes = bytes.get_mut(part.range(stored))?;
            let read = self
                .random_reads
                .read(&self.file, bytes, stored.start().0, wait)?;
            read.ok()?;
        }
        Some(bytes)
    }

    pub(super) fn next_data(&self, at: Plain) -> Option<Extent<Plain>> {
        let start = seek(&self.file, SeekFrom::Data(at.0)).ok()?;
        let end = seek(&self.file, SeekFrom::Hole(start)).ok()?;
        Extent::new(Plain(start), Plain(end)).filter(|data| !data.is_empty())
    }

    /// Frees the whole blocks in `extent`, and returns the number of freed bytes.
    pub(super) fn punch_hole(&self, extent: Extent<Plain>) -> u64 {
        let before = self.held_bytes();
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match fallocate(&self.file, mode, extent.start().0, extent.len()) {
            Ok(()) => before.saturating_sub(self.held_bytes()),
            Err(error) => {
                tracing::debug!(%error, name = self.name, "cannot punch a hole");
                0
            }
        }
    }

    pub(super) fn whole_blocks(&self, extent: Extent<Plain>) -> Option<Extent<Plain>> {
        let block = self.metadata().ok()?.blksize().max(1);
        let start = extent.start().0.checked_next_multiple_of(block)?;
        let end = extent.end().0 / block * block;
        Extent::new(Plain(start), Plain(end)).filter(|blocks| !blocks.is_empty())
    }

    /// Records the time of the last use in the file's mtime, for other processes.
    pub(super) fn set_last_used(&self, time: SystemTime) {
        if let Err(error) = self.file.set_modified(time) {
            tracing::debug!(%error, name = self.name, "cannot record the last use");
        }
    }

    /// Records what it costs to make a byte of the file again, relative to other files, for other processes. Without
    /// extended attributes all files cost the same.
    pub(super) fn set_recovery_cost(&self, cost: u64) {
        let text = cost.to_string();
        if let Err(error) = fsetxattr(&self.file, COST_XATTR, text.as_bytes(), XattrFlags::empty())
        {
            tracing::debug!(%error, name = self.name, "cannot record the cost");
        }
    }

    /// The cost that was recorded, or one.
    pub(super) fn recovery_cost(&self) -> u64 {
        let mut text = [0; 20];
        let len = fgetxattr(&self.file, COST_XATTR, &mut text).unwrap_or(0);
        let text = text.get(..len).and_then(|text| str::from_utf8(text).ok());
        text.and_then(|text| text.parse().ok())
            .map_or(1, |cost: u64| cost.clamp(1, MAX_RECOVERY_COST))
    }

    /// Locks the file exclusively if it is open nowhere else; others cannot open it until this is dropped.
    pub(super) fn try_lock_exclusive(&self) -> bool {
        lock(&self.file, LockKind::Exclusive, Duration::ZERO).is_ok()
    }

    pub(super) fn rename_to(&self, name: &str) -> io::Result<Self> {
        let file = self.file.try_clone()?;
        self.directory.rename(&self.name, name)?;
        Ok(Self::new(file, &self.directory, name))
    }

    /// Removes the file from its directory. It ignores a failure, because the removal is retried later.
    pub(super) fn remove(&self) {
        drop(self.directory.remove(&self.name));
    }
}

pub(super) fn is_temporary(name: &str) -> bool {
    name.starts_with(UNFINISHED_PREFIX)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    fn private(path: &Path) -> Arc<TrustedDir> {
        Arc::new(TrustedDir::open(path).expect("ours"))
    }

    fn extent(start: u64, len: u64) -> Extent<Plain> {
        Extent::with_len(Plain(start), len)
    }

    fn read(file: &CacheFile, extent: Extent<Plain>) -> Option<Vec<u8>> {
        let memory = file.read(&extent.into(), &FreeList::new(0))?;
        Some(memory.to_vec())
    }

    #[test]
    fn cache_file_read_returns_bytes_written_at_offset() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = CacheFile::create(&private(directory.path())).expect("a file");
        let far = extent(1 << 30, 3).into();
        file.write(&far, b"far", false).expect("room");
        assert_eq!(
            read(&file, extent(1 << 30, 3)).as_deref(),
            Some(&b"far"[..])
        );
        assert_eq!(
            read(&file, extent((1 << 30) + 1, 3)),
            None,
            "beyond the end"
        );
        assert_eq!(read(&file, extent(0, 3)), None, "a hole");
        assert_eq!(read(&file, extent(0, u64::MAX)), None, "not even allocated");
    }

    #[test]
    fn punch_hole_frees_whole_blocks_and_keeps_adjacent_bytes() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = CacheFile::create(&private(directory.path())).expect("a file");
        let written = file.write(&extent(0, 100_000).into(), &vec![1; 100_000], false);
        written.expect("room");
        let held = file.held_bytes();
        let freed = file.punch_hole(extent(10_001, 50_000));
        assert!((40_960..=50_000).contains(&freed), "{freed}");
        assert_eq!(file.held_bytes(), held - freed);
        assert_eq!(read(&file, extent(0, 10_001)), Some(vec![1; 10_001]));
        assert_eq!(read(&file, extent(60_001, 39_999)), Some(vec![1; 39_999]));
        let whole = file.whole_blocks(extent(10_001, 50_000)).expect("some");
        assert_eq!(file.punch_hole(whole), 0, "is gone already");
        assert_eq!(
            file.next_data(whole.start()).map(|data| data.start()),
            Some(whole.end())
        );
        assert_eq!(file.whole_blocks(extent(10_001, 100)), None);
    }

    #[test]
    fn exclusive_lock_fails_while_file_is_in_use() {
        let directory = tempfile::tempdir().expect("a directory");
        let directory = private(directory.path());
        let file = CacheFile::open(&directory, "a", OFlags::CREATE).expect("made");
        let unlocked = || directory.file("a", OFlags::RDWR).expect("there");
        let is_free = || CacheFile::new(unlocked(), &directory, "a").try_lock_exclusive();
        assert!(!is_free());
        let other = CacheFile::open(&directory, "a", OFlags::empty()).expect("there");
        assert!(!file.try_lock_exclusive());
        drop(other);
        assert!(file.try_lock_exclusive());
        drop(file);
        assert!(is_free());
    }

    // Promises: trust-cache
    #[test]
    fn cache_file_open_rejects_symlinks_and_directories() {
        let directory = tempfile::tempdir().expect("a directory");
        let elsewhere = directory.path().join("elsewhere");
        fs::write(&elsewhere, b"other").expect("written");
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&elsewhere, &link).expect("made");
        fs::create_dir(directory.path().join("directory")).expect("made");
        let directory = private(directory.path());
        assert!(CacheFile::open(&directory, "link", OFlags::CREATE).is_err());
        assert!(CacheFile::open(&directory, "directory", OFlags::CREATE).is_err());
        assert!(CacheFile::open(&directory, "none", OFlags::empty()).is_err());
    }
}
