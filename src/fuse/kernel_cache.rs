//! The kernel's page cache, as far as it can be filled from here.
//!
//! The kernel takes bytes only of inodes that it knows, so what it has heard of is remembered, a bit for
//! each inode, and another for those of which it was told a name. A third says that a file's bytes are
//! there already. All go when the kernel forgets the inode, and its pages with it.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use fuser::{INodeNo, Notifier};
use rustix::io::Errno;

use super::priming_dir::PrimingDir;
use super::{Subtree, dentries, is_listable_name};
use crate::archive::PageCache;
use crate::base::stats::Stats;
use crate::index::{Child, Index, Ino};

/// Inodes whose bits share one allocation, of 128 KiB.
const INODES_PER_LEAF: u32 = 1 << 20;

/// Of any inode number a leaf has the bits.
const LEAF_COUNT: usize = 1 << 12;

/// So many files asked for in a row that should have been there mean that the kernel has dropped
/// pages.
const MAX_CONSECUTIVE_MISSES: u32 = 8;

/// Whose next names are known up to here is not told more.
const DENTRY_LOOKAHEAD: usize = 16;

/// What the kernel knows and has.
pub(super) struct KernelCache {
    subtree: Subtree,
    stats: Arc<Stats>,
    /// `None` before and after the mount: who holds a notifier keeps its connection open.
    notifier: Mutex<Option<Notifier>>,
    /// How the kernel hears of files ahead.
    pub(super) priming_dir: PrimingDir,
    /// Where it is mounted, and its device number, once it answers.
    mountpoint: Mutex<Option<(PathBuf, u64)>>,
    /// The kernel cannot be told of anything ahead, or not by us.
    is_priming_disabled: AtomicBool,
    known_inodes: InodeSet,
    /// Of what it also knows a name.
    known_dentries: InodeSet,
    stored_inodes: InodeSet,
    /// How many files in a row were asked for that should have been there.
    consecutive_misses: AtomicU32,
    /// Whom to tell what has changed of what the kernel knows; `None` when nothing does.
    invalidations: Mutex<Option<SyncSender<Ino>>>,
}

impl KernelCache {
    /// Of a mount that shows `subtree`.
    pub(super) fn new(subtree: Subtree, stats: Arc<Stats>) -> Self {
        Self {
            subtree,
            stats,
            notifier: Mutex::default(),
            priming_dir: PrimingDir::default(),
            mountpoint: Mutex::default(),
            is_priming_disabled: AtomicBool::new(false),
            known_inodes: InodeSet::default(),
            known_dentries: InodeSet::default(),
            stored_inodes: InodeSet::default(),
            consecutive_misses: AtomicU32::new(0),
            invalidations: Mutex::default(),
        }
    }

    /// The mount answers there; or is seen there from now on, through what lies over it.
    pub(super) fn set_mountpoint(&self, mountpoint: &Path, device: u64) {
        *self.lock_mountpoint() = Some((mountpoint.to_owned(), device));
    }

    fn lock_mountpoint(&self) -> MutexGuard<'_, Option<(PathBuf, u64)>> {
        self.mountpoint
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The mount's notifier, from now on.
    pub(super) fn attach(&self, notifier: Notifier) {
        *self.lock() = Some(notifier);
    }

    /// Nothing is mounted any more.
    pub(super) fn detach(&self) {
        *self.lock() = None;
        *self.invalidations() = None;
    }

    /// Has changes sent to `invalidations`, until detached.
    pub(super) fn set_invalidator(&self, invalidations: SyncSender<Ino>) {
        *self.invalidations() = Some(invalidations);
    }

    /// Attributes of `ino` are not as they were, and the kernel may have been told of them. Never
    /// waits.
    pub(super) fn queue_invalidation(&self, ino: Ino) {
        if (ino == self.subtree.root() || self.known_inodes.contains(ino))
            && let Some(invalidations) = &*self.invalidations()
        {
            // Else it is asked for again soon enough.
            let _sent = invalidations.try_send(ino).is_ok();
        }
    }

    /// Tells the kernel that attributes of `ino` have changed.
    pub(super) fn invalidate_attributes(&self, ino: Ino) {
        let Some(notifier) = self.lock().clone() else {
            return;
        };
        // Attributes alone, not what is in the page cache. Also well if it does not know it any more.
        if notifier.inval_inode(self.subtree.inode(ino), -1, 0).is_ok() {
            self.stats.invalidated_inodes.increment();
        }
    }

    /// The kernel hears of `ino`.
    pub(super) fn mark_inode_known(&self, ino: Ino) {
        self.known_inodes.insert(ino);
    }

    /// The kernel hears of `ino` and its name.
    pub(super) fn mark_dentry_known(&self, ino: Ino) {
        self.known_inodes.insert(ino);
        self.known_dentries.insert(ino);
    }

    /// The kernel has dropped `ino`, or a part of its references: then it is not pushed, nor told of
    /// changes before it asks again, which does no harm.
    pub(super) fn forget_inode(&self, ino: Ino) {
        self.known_inodes.remove(ino);
        self.known_dentries.remove(ino);
        self.stored_inodes.remove(ino);
    }

    /// The kernel asks for the first bytes of `ino`, and will have them.
    pub(super) fn note_first_read(&self, ino: Ino) {
        if !self.stored_inodes.contains(ino) {
            self.stored_inodes.insert(ino);
            self.consecutive_misses.store(0, Ordering::Relaxed);
            return;
        }
        // One may have been read while it was pushed.
        if self.consecutive_misses.fetch_add(1, Ordering::Relaxed) + 1 == MAX_CONSECUTIVE_MISSES {
            self.stored_inodes.clear();
            self.consecutive_misses.store(0, Ordering::Relaxed);
        }
    }

    /// Tells the kernel of something ahead by `prime`, on the mount at this place, if it listens.
    fn try_prime(&self, prime: impl FnOnce((&Path, u64)) -> io::Result<()>) {
        if self.is_priming_disabled.load(Ordering::Relaxed) {
            return;
        }
        // Who tells waits for the kernel, which may wait for us: not under the lock.
        let Some((mountpoint, device)) = self.lock_mountpoint().clone() else {
            return;
        };
        if let Err(error) = prime((&mountpoint, device)) {
            tracing::debug!(%error, "the kernel hears of nothing ahead");
            // Other errors are one directory's, or pass.
            if is_permanent_error(&error) {
                self.is_priming_disabled.store(true, Ordering::Relaxed);
            }
        }
    }

    fn invalidations(&self) -> MutexGuard<'_, Option<SyncSender<Ino>>> {
        self.invalidations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Notifier>> {
        self.notifier.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PageCache for KernelCache {
    fn can_store(&self, ino: Ino) -> bool {
        self.known_inodes.contains(ino) && !self.stored_inodes.contains(ino)
    }

    fn is_visible(&self, index: &Index, ino: Ino) -> bool {
        self.subtree.contains(index, ino)
    }

    fn prime_inodes(&self, files: &[Ino]) -> usize {
        let is_unknown = |ino: &Ino| !self.known_inodes.contains(*ino);
        let unknown: Vec<_> = files.iter().copied().filter(is_unknown).collect();
        self.try_prime(|mount| self.priming_dir.prime(mount, unknown.clone()));
        unknown
            .iter()
            .filter(|ino| self.known_inodes.contains(**ino))
            .count()
    }

    fn prime_dentries(&self, index: &Index, ino: Ino) {
        let Some((directory, number)) = index.listing_position(ino) else {
            return;
        };
        let mut next = index.children(directory, number).take(DENTRY_LOOKAHEAD);
        let is_unknown = |child: &Child<'_>| {
            !self.known_dentries.contains(child.ino) && is_listable_name(child.name)
        };
        if let Some(next) = next.find(is_unknown) {
            let from = (directory, next.number);
            self.try_prime(|mount| dentries::prime_dentries(mount, self.subtree, index, from));
        }
    }

    fn store(&self, ino: Ino, offset: u64, bytes: &[u8]) -> io::Result<()> {
        // Not under the lock: the kernel may wait for a page that is being read.
        let Some(notifier) = self.lock().clone() else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        if offset == 0 {
            self.stored_inodes.insert(ino);
        }
        notifier.store(INodeNo(ino.0.into()), offset, bytes)
    }
}

/// Whether an error will be the same for everything: not permitted, not known to this kernel, not our
/// mount any more, or nothing heard for all that.
fn is_permanent_error(error: &io::Error) -> bool {
    let permanent_errors = [
        Errno::PERM,
        Errno::NOSYS,
        Errno::INVAL,
        Errno::XDEV,
        Errno::NODATA,
    ];
    Errno::from_io_error(error).is_some_and(|error| permanent_errors.contains(&error))
}

impl fmt::Debug for KernelCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelCache").finish_non_exhaustive()
    }
}

/// A bit for each inode; takes memory for the numbers that occur.
struct InodeSet {
    leaves: Box<[OnceLock<Box<[AtomicU64]>>]>,
}

impl Default for InodeSet {
    fn default() -> Self {
        let leaves = (0..LEAF_COUNT).map(|_| OnceLock::new());
        Self {
            leaves: leaves.collect(),
        }
    }
}

impl InodeSet {
    fn insert(&self, ino: Ino) {
        let Some(leaf) = self.leaves.get((ino.0 / INODES_PER_LEAF) as usize) else {
            return;
        };
        let leaf = leaf.get_or_init(|| {
            let words = (0..INODES_PER_LEAF / u64::BITS).map(|_| AtomicU64::new(0));
            words.collect()
        });
        if let Some(word) = leaf.get(word(ino)) {
            word.fetch_or(bit(ino), Ordering::Relaxed);
        }
    }

    fn remove(&self, ino: Ino) {
        if let Some(word) = self.word(ino) {
            word.fetch_and(!bit(ino), Ordering::Relaxed);
        }
    }

    fn clear(&self) {
        let leaves = self.leaves.iter().filter_map(OnceLock::get);
        for word in leaves.flat_map(|leaf| leaf.iter()) {
            word.store(0, Ordering::Relaxed);
        }
    }

    fn contains(&self, ino: Ino) -> bool {
        self.word(ino)
            .is_some_and(|word| word.load(Ordering::Relaxed) & bit(ino) != 0)
    }

    fn word(&self, ino: Ino) -> Option<&AtomicU64> {
        let leaf = self.leaves.get((ino.0 / INODES_PER_LEAF) as usize)?;
        leaf.get()?.get(word(ino))
    }
}

fn word(ino: Ino) -> usize {
    (ino.0 % INODES_PER_LEAF / u64::BITS) as usize
}

fn bit(ino: Ino) -> u64 {
    1 << (ino.0 % u64::BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_file_is_wanted_until_first_read() {
        let kernel_cache = KernelCache::new(Subtree::WHOLE, Arc::default());
        for ino in [Ino(1), Ino(64), Ino(INODES_PER_LEAF + 3), Ino(u32::MAX)] {
            assert!(!kernel_cache.can_store(ino));
            kernel_cache.mark_dentry_known(ino);
            assert!(kernel_cache.can_store(ino));
            assert!(!kernel_cache.can_store(Ino(ino.0 ^ 1)), "its neighbour");
            kernel_cache.note_first_read(ino);
            assert!(!kernel_cache.can_store(ino));
            kernel_cache.forget_inode(ino);
            kernel_cache.mark_dentry_known(ino);
            assert!(kernel_cache.can_store(ino), "again");
        }
    }

    #[test]
    fn files_with_evicted_pages_are_wanted_again() {
        let kernel_cache = KernelCache::new(Subtree::WHOLE, Arc::default());
        for number in 1..100 {
            kernel_cache.mark_dentry_known(Ino(number));
            kernel_cache.note_first_read(Ino(number));
        }
        for number in 1..MAX_CONSECUTIVE_MISSES {
            kernel_cache.note_first_read(Ino(number));
        }
        assert!(
            !kernel_cache.can_store(Ino(50)),
            "one or two may have been pushed late"
        );
        kernel_cache.note_first_read(Ino(MAX_CONSECUTIVE_MISSES));
        assert!(kernel_cache.can_store(Ino(50)));
    }

    #[test]
    fn store_without_mount_fails() {
        let kernel_cache = KernelCache::new(Subtree::WHOLE, Arc::default());
        kernel_cache.mark_dentry_known(Ino(7));
        assert!(kernel_cache.store(Ino(7), 0, b"bytes").is_err());
        assert!(kernel_cache.can_store(Ino(7)));
    }
}
