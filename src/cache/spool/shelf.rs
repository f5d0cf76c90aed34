//! The directory of all spools, and the limit that they share, whichever process writes them.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use rustix::fs::FlockOperation;

use super::file::{self, SpoolFile, is_temporary};
use crate::base::extent::{Extent, Plain};
use crate::base::trusted_dir::TrustedDir;

/// Where spools lie, and how much disk they may take together.
#[derive(Clone, Debug)]
pub struct Shelf {
    cache_dir: PathBuf,
    limit_bytes: Option<u64>,
}

/// A spool on the shelf.
#[derive(Clone, Debug)]
pub struct Spooled {
    directory: Arc<Directory>,
    name: String,
    identity: (u64, u64),
    /// Bytes of disk that it takes.
    pub held_bytes: u64,
    /// When it was used last.
    pub used: SystemTime,
    /// A part of it is worth nothing.
    is_whole: bool,
    is_temporary: bool,
}

/// The end of the names of spools that are of use only as a whole.
pub(super) const WHOLE: &str = ".once.data";
/// The end of those of all others.
pub(super) const PART: &str = ".data";

/// Room is made in steps of so many bytes: whole blocks of any file system.
pub(super) const STEP: u64 = 64 << 10;

/// What a file may take beyond the bytes that are written to it: blocks that these fill in part,
/// and the file system's own records.
pub(super) const MARGIN: u64 = 64 << 10;

/// What the directory is called in that of the cache.
const DIRECTORY: &str = "disk-cache";

/// The right to write and to make room, until dropped.
#[derive(Debug)]
pub(super) struct Turn {
    _locked: Option<File>,
}

impl Shelf {
    /// The spools below `cache_dir`, which may take `limit_bytes` of disk together; `None` is all
    /// there is but a tenth. Nothing is touched until it is used.
    pub fn new(cache_dir: PathBuf, limit_bytes: Option<u64>) -> Self {
        Self {
            cache_dir,
            limit_bytes,
        }
    }

    /// Where it is.
    pub fn path(&self) -> PathBuf {
        self.cache_dir.join(DIRECTORY)
    }

    /// Its directory, made if it is missing.
    pub(super) fn made(&self) -> io::Result<Arc<Directory>> {
        let cache = TrustedDir::create(&self.cache_dir)?;
        Ok(Arc::new(cache.create_dir(DIRECTORY)?))
    }

    /// Its directory as it is found now: it may be another one than before.
    pub(super) fn found(&self) -> io::Result<Arc<Directory>> {
        let cache = TrustedDir::open(&self.cache_dir)?;
        Ok(Arc::new(cache.open_dir(DIRECTORY)?))
    }

    /// Bytes of disk that all its spools take, and what they may take, in bytes, as it is now.
    pub fn held_and_limit(&self) -> (u64, u64) {
        let held = sum(&self.spools());
        let limit = self.limit_bytes.unwrap_or_else(|| {
            let disk = Disk::of(&self.path());
            (held + disk.available).saturating_sub(disk.reserve)
        });
        (held, limit)
    }

    /// Waits until it is this process' turn to write; `None` when another one keeps it for long.
    pub(super) fn turn(&self) -> Option<Turn> {
        // Without a directory the write will say what is wrong.
        let directory = self
            .found()
            .and_then(|found| found.as_fd().try_clone_to_owned());
        let Ok(directory) = directory.map(File::from) else {
            return Some(Turn { _locked: None });
        };
        let locked = file::lock(&directory, FlockOperation::NonBlockingLockExclusive);
        locked.then_some(Turn {
            _locked: Some(directory),
        })
    }

    /// Whether its directory is there and can be used.
    ///
    /// # Errors
    /// When it is not this user's alone, or cannot be opened.
    pub fn check(&self) -> io::Result<()> {
        match self.found() {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Its spools, the one used longest ago first.
    pub fn spools(&self) -> Vec<Spooled> {
        let Ok(directory) = self.found() else {
            return Vec::new();
        };
        let names = directory.names().unwrap_or_default();
        let mut spools: Vec<_> = names
            .into_iter()
            .filter_map(|name| Spooled::find(&directory, name))
            .collect();
        spools.sort_by_key(|spool| spool.used);
        spools
    }

    /// Bytes that must go before `needed` more may be written, while these spools are all.
    pub(super) fn missing(&self, spools: &[Spooled], needed: u64) -> u64 {
        let (taken, limit) = if let Some(limit) = self.limit_bytes {
            (sum(spools), limit)
        } else {
            let disk = Disk::of(&self.path());
            (disk.reserve, disk.available)
        };
        let margin = if needed > 0 { MARGIN } else { 0 };
        taken.saturating_add(needed + margin).saturating_sub(limit)
    }

    /// What one of so many users may take before it has to make room for the others.
    pub(super) fn share(&self, spools: &[Spooled], users: usize) -> u64 {
        let limit = self.limit_bytes.unwrap_or_else(|| sum(spools));
        limit / (users.max(1) as u64)
    }

    /// Removes what processes have left that died before it was finished.
    pub(super) fn clean(&self) {
        for spool in self.spools() {
            if spool.is_temporary
                && let Some(file) = spool.open()
                && file.is_ours_alone()
            {
                file.remove();
            }
        }
    }
}

impl Spooled {
    fn find(directory: &Arc<Directory>, name: String) -> Option<Self> {
        let found = directory.look(&name).ok()?;
        Some(Self {
            directory: Arc::clone(directory),
            identity: found.identity,
            held_bytes: found.held_bytes,
            used: found.modified,
            is_whole: name.ends_with(WHOLE),
            is_temporary: is_temporary(&name),
            name,
        })
    }

    pub(super) fn is(&self, file: &SpoolFile) -> bool {
        let identity = file.metadata().map(|file| (file.dev(), file.ino()));
        identity.is_ok_and(|identity| identity == self.identity)
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The content that it is found by; `None` while it is not finished.
    pub fn content(&self) -> Option<&str> {
        let content = self.name.strip_suffix(WHOLE);
        let content = content.or_else(|| self.name.strip_suffix(PART))?;
        (!self.is_temporary).then_some(content)
    }

    /// Whether it has the name of a spool that is not finished.
    pub fn is_unfinished(&self) -> bool {
        self.is_temporary && self.name.ends_with(PART)
    }

    /// Removes it, unless it is in use or another one by now; whether it did.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove(&self) -> io::Result<bool> {
        match self.open() {
            Some(file) if file.is_ours_alone() => {
                self.directory.remove(&self.name)?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Whether someone, or this process, has it open.
    pub fn is_in_use(&self) -> bool {
        self.open().is_some_and(|file| !file.is_ours_alone())
    }

    /// Whether a part can go while it is in use: no one is writing all of it, and its bytes can be
    /// had again.
    pub(super) fn may_lose_parts(&self) -> bool {
        !self.is_whole && !self.is_temporary
    }

    /// Gives `wanted` bytes of it back, or all, from the front on, and says how much that was.
    pub(super) fn shrink(&self, wanted: u64) -> u64 {
        let Some(file) = self.open() else { return 0 };
        if file.is_ours_alone() && (wanted >= self.held_bytes || !self.may_lose_parts()) {
            let held_bytes = file.held_bytes();
            file.remove();
            return held_bytes;
        }
        if !self.may_lose_parts() {
            return 0;
        }
        let wanted = wanted.next_multiple_of(STEP);
        let mut freed = 0;
        let mut at = Plain(0);
        while freed < wanted
            && let Some(data) = file.next_data(at)
        {
            let len = data.len().min(wanted - freed);
            let part = Extent::with_len(data.start(), len);
            freed += file.punch(part);
            at = part.end();
        }
        // Holes changed its mtime, which stands for the last use.
        file.set_used(self.used);
        freed
    }

    fn open(&self) -> Option<SpoolFile> {
        let file = file::unlocked(&self.directory, &self.name).ok()?;
        self.is(&file).then_some(file)
    }
}

fn sum(spools: &[Spooled]) -> u64 {
    let bytes = spools.iter().map(|spool| spool.held_bytes);
    bytes.fold(0, u64::saturating_add)
}

/// A disk, in bytes.
#[derive(Clone, Copy, Default)]
struct Disk {
    available: u64,
    /// The last tenth of it, which stays free. What is set aside for root is no part of the disk
    /// here, as df(1) counts none of it: a tenth of that could be more than there ever is.
    reserve: u64,
}

impl Disk {
    /// The one that `directory` is on, or will be; nothing is available of one that is not known.
    fn of(directory: &Path) -> Self {
        let existing = directory
            .ancestors()
            .find(|ancestor| fs::metadata(ancestor).is_ok());
        let Some(Ok(disk)) = existing.map(rustix::fs::statvfs) else {
            return Self {
                available: 0,
                reserve: 0,
            };
        };
        Self::new(disk.f_frsize, disk.f_blocks, disk.f_bfree, disk.f_bavail)
    }

    /// With so many blocks of `block_bytes`, of which so many are free, and available to everyone.
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

    use super::super::file::unlocked;
    use super::super::tests::directory;
    use super::*;

    const BLOCKS: u64 = 1 << 20;

    /// A spool of a megabyte, used so many minutes ago.
    fn spool(shelf: &Shelf, name: &str, minutes: u64) -> SpoolFile {
        let file = SpoolFile::open(&shelf.made().expect("made"), name, true).expect("made");
        file.write(Plain(0), &vec![1; 1 << 20], false)
            .expect("room");
        file.set_used(SystemTime::now() - Duration::from_mins(minutes));
        file
    }

    fn names(shelf: &Shelf) -> Vec<String> {
        let spools = shelf.spools();
        spools.iter().map(|spool| spool.name.clone()).collect()
    }

    #[test]
    fn missing_room_is_counted_over_all_disk_cache_files() {
        let directory = directory();
        let limit = 3 * BLOCKS + MARGIN;
        let shelf = Shelf::new(directory.path().to_owned(), Some(limit));
        drop(spool(&shelf, "a", 1));
        drop(spool(&shelf, "b", 2));
        assert_eq!(names(&shelf), ["b", "a"], "the oldest first");
        let spools = shelf.spools();
        assert_eq!(shelf.missing(&spools, BLOCKS), 0);
        assert_eq!(shelf.missing(&spools, BLOCKS + 1), 1);
        assert_eq!(shelf.held_and_limit(), (2 * BLOCKS, limit));
        let smaller = Shelf::new(directory.path().to_owned(), Some(BLOCKS));
        assert_eq!(smaller.missing(&spools, 0), BLOCKS);
        assert_eq!(smaller.share(&spools, 2), BLOCKS / 2);
    }

    #[test]
    fn without_a_limit_a_tenth_of_the_disk_stays_free() {
        let directory = directory();
        let shelf = Shelf::new(directory.path().join("not/yet"), None);
        let disk = Disk::of(directory.path());
        assert!(disk.reserve > 0);
        let (held, limit) = shelf.held_and_limit();
        assert_eq!(held, 0);
        assert!(limit <= disk.available.saturating_sub(disk.reserve) + (1 << 30));
        let missing = shelf.missing(&[], disk.available);
        assert!(missing >= disk.reserve.saturating_sub(1 << 30), "{missing}");
    }

    #[test]
    fn what_is_set_aside_for_root_is_no_part_of_a_disk() {
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
    fn a_spool_shrinks_from_the_front_and_goes_when_nothing_is_left() {
        let directory = directory();
        let shelf = Shelf::new(directory.path().to_owned(), Some(0));
        drop(spool(&shelf, "a", 10));
        let [before] = &shelf.spools()[..] else {
            panic!("one");
        };
        assert_eq!(before.shrink(65536), 65536);
        let [after] = &shelf.spools()[..] else {
            panic!("one");
        };
        assert_eq!(after.held_bytes, BLOCKS - 65536);
        assert_eq!(after.used, before.used, "that was no use");
        let file = unlocked(&after.directory, &after.name).expect("there");
        assert_eq!(
            file.next_data(Plain(0)).map(|data| data.start()),
            Some(Plain(65536))
        );
        drop(file);
        assert_eq!(after.shrink(BLOCKS), BLOCKS - 65536);
        assert!(names(&shelf).is_empty());
    }

    #[test]
    fn what_is_in_use_stays_in_its_directory_and_what_is_of_use_as_a_whole_stays_whole() {
        let directory = directory();
        let shelf = Shelf::new(directory.path().to_owned(), Some(0));
        let part = spool(&shelf, "a.data", 3);
        let whole = spool(&shelf, "b.once.data", 2);
        let temporary = SpoolFile::create(&shelf.made().expect("made")).expect("made");
        temporary.write(Plain(0), &[1; 4096], false).expect("room");
        let freed: Vec<_> = shelf
            .spools()
            .iter()
            .map(|spool| spool.shrink(BLOCKS))
            .collect();
        assert_eq!(freed, [BLOCKS, 0, 0]);
        assert!(shelf.spools().iter().all(Spooled::is_in_use));
        shelf.clean();
        assert_eq!(names(&shelf).len(), 3);
        drop((part, whole, temporary));
        assert!(!shelf.spools().iter().any(Spooled::is_in_use));
        shelf.clean();
        assert_eq!(names(&shelf), ["a.data", "b.once.data"]);
        let freed: Vec<_> = shelf
            .spools()
            .iter()
            .map(|spool| spool.shrink(4096))
            .collect();
        assert_eq!(freed, [0, BLOCKS]);
        assert!(names(&shelf).is_empty());
    }
}
