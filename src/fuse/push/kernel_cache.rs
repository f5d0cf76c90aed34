//! The kernel's caches of a mount: inodes, dentries and pages, as the daemon fills them.
//!
//! The kernel accepts pushed bytes only for inodes that it knows. Three bits for each inode say that the
//! kernel knows the inode, knows its name, and probably caches the file's bytes. The last one is set when the
//! start of the file is stored or read. Such a file is not pushed again. All are cleared when the kernel
//! forgets the inode, because it drops the pages, too.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};

use fuser::Notifier;
use rustix::io::Errno;

use super::dentries;
use super::mount_root::MountRoot;
use super::priming_dir::PrimingDir;
use crate::archive::{PageCache, Volume};
use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::base::thread::Thread;
use crate::fuse::subtree::{Subtree, is_listable_name};
use crate::index::{Child, Index, Ino};

/// Number of inodes in a leaf of an [`InodeSet`]. A leaf is an allocation of 128 KiB.
const INODES_PER_LEAF: u32 = 1 << 20;

const LEAF_COUNT: usize = 1 << 12;

/// Number of consecutive cache misses that shows an eviction of pages by the kernel.
const MAX_CONSECUTIVE_MISSES: u32 = 8;

/// Number of following names that are primed unless the kernel knows all.
const DENTRY_LOOKAHEAD: usize = 16;

/// Maximum number of queued invalidations. Beyond it, old attributes stay until their TTL ends.
const MAX_PENDING_INVALIDATIONS: usize = 1024;

#[derive(Debug)]
pub(in crate::fuse) struct KernelCache {
    subtree: Subtree,
    stats: Arc<Stats>,
    /// `None` before and after the mount, because a notifier keeps the connection open.
    notifier: Mutex<Option<Notifier>>,
    pub(in crate::fuse) priming_dir: PrimingDir,
    /// Set once the mount answers.
    root: Mutex<Option<MountRoot>>,
    /// Set when the kernel rejects priming, or this process may not do it.
    is_priming_disabled: AtomicBool,
    known_inodes: InodeSet,
    known_dentries: InodeSet,
    stored_or_read_inodes: InodeSet,
    /// Consecutive first reads of files that the page cache should hold.
    consecutive_misses: AtomicU32,
    /// Inodes whose attributes have changed; `None` if nothing changes.
    invalidations: Mutex<Option<SyncSender<Ino>>>,
}

impl KernelCache {
    pub(in crate::fuse) fn new(subtree: Subtree, stats: Arc<Stats>) -> Self {
        Self {
            subtree,
            stats,
            notifier: Mutex::default(),
            priming_dir: PrimingDir::default(),
            root: Mutex::default(),
            is_priming_disabled: AtomicBool::new(false),
            known_inodes: InodeSet::default(),
            known_dentries: InodeSet::default(),
            stored_or_read_inodes: InodeSet::default(),
            consecutive_misses: AtomicU32::new(0),
            invalidations: Mutex::default(),
        }
    }

    /// Sets the mount's root, when the mount answers, when it is shared, and when an overlay covers it. A copy stays.
    pub(in crate::fuse) fn set_root(&self, root: MountRoot) {
        let mut current = self.root.lock();
        if !matches!(*current, Some(MountRoot::Copy(_))) {
            *current = Some(root);
        }
    }

    pub(in crate::fuse) fn attach(&self, notifier: Notifier) {
        *self.notifier.lock() = Some(notifier);
    }

    /// Ends all notifications and priming. The path may lead to another mount from now on.
    pub(in crate::fuse) fn detach(&self) {
        *self.root.lock() = None;
        *self.notifier.lock() = None;
        *self.invalidations.lock() = None;
    }

    /// Starts the thread that invalidates attributes of `volume` in the kernel. A separate thread, so that
    /// the scan never waits for the kernel. It ends after [`detach`](Self::detach). Returns `None` for a
    /// complete index, because nothing will change.
    pub(in crate::fuse) fn start_invalidator(
        self: &Arc<Self>,
        volume: &Arc<dyn Volume>,
    ) -> io::Result<Option<Thread<()>>> {
        if volume.index().is_complete() {
            return Ok(None);
        }
        let (sender, changed_inodes) = sync_channel(MAX_PENDING_INVALIDATIONS);
        let kernel_cache = Arc::downgrade(self);
        let thread = Thread::spawn("tarfs-inval", move || {
            while let Ok(ino) = changed_inodes.recv() {
                if let Some(kernel_cache) = kernel_cache.upgrade() {
                    kernel_cache.invalidate_attributes(ino);
                }
            }
        })?;
        *self.invalidations.lock() = Some(sender);
        let kernel_cache = Arc::downgrade(self);
        volume.watch(Box::new(move |changed| {
            let kernel_cache = kernel_cache.upgrade();
            let kernel_cache = kernel_cache.filter(|cache| cache.is_open());
            for &ino in changed {
                if let Some(kernel_cache) = &kernel_cache {
                    kernel_cache.queue_invalidation(ino);
                }
            }
            kernel_cache.is_some()
        }));
        Ok(Some(thread))
    }

    /// Queues an invalidation if the kernel may know `ino`. Never waits.
    fn queue_invalidation(&self, ino: Ino) {
        if (ino == self.subtree.root || self.known_inodes.contains(ino))
            && let Some(invalidations) = &*self.invalidations.lock()
        {
            // If the queue is full, the TTL ends soon enough.
            let _sent = invalidations.try_send(ino).is_ok();
        }
    }

    fn invalidate_attributes(&self, ino: Ino) {
        let Some(notifier) = self.notifier.lock().clone() else {
            return;
        };
        // A negative offset keeps the page cache. A failure for a forgotten inode is harmless.
        if notifier.inval_inode(self.subtree.inode(ino), -1, 0).is_ok() {
            self.stats.invalidated_inodes.increment();
        }
    }

    pub(in crate::fuse) fn mark_inode_known(&self, ino: Ino) {
        self.known_inodes.insert(ino);
    }

    pub(in crate::fuse) fn mark_dentry_known(&self, ino: Ino) {
        self.known_inodes.insert(ino);
        self.known_dentries.insert(ino);
    }

    /// Records that the kernel has dropped `ino`, or a part of its references. It is not pushed or
    /// invalidated until the kernel asks for it again.
    pub(in crate::fuse) fn forget_inode(&self, ino: Ino) {
        self.known_inodes.remove(ino);
        self.known_dentries.remove(ino);
        self.stored_or_read_inodes.remove(ino);
    }

    /// Records that the kernel reads the first bytes of `ino`, and so will cache them.
    pub(in crate::fuse) fn record_first_read(&self, ino: Ino) {
        if !self.stored_or_read_inodes.contains(ino) {
            self.stored_or_read_inodes.insert(ino);
            self.consecutive_misses.store(0, Ordering::Relaxed);
            return;
        }
        // A single miss proves nothing: the file may have been pushed during the read.
        if self.consecutive_misses.fetch_add(1, Ordering::Relaxed) + 1 == MAX_CONSECUTIVE_MISSES {
            self.stored_or_read_inodes.clear();
            self.consecutive_misses.store(0, Ordering::Relaxed);
        }
    }

    fn try_prime(&self, prime: impl FnOnce(&MountRoot) -> io::Result<()>) {
        if self.is_priming_disabled.load(Ordering::Relaxed) {
            return;
        }
        // Release the lock first: `prime` waits for the kernel, which may wait for this process.
        let Some(root) = self.root.lock().clone() else {
            return;
        };
        if let Err(error) = prime(&root) {
            tracing::debug!(%error, "cannot prime the kernel's caches");
            // Permission or the system call is missing, another mount covers ours, or the kernel asked for
            // nothing. Other errors concern one directory, or are temporary.
            if matches!(
                Errno::from_io_error(&error),
                Some(Errno::PERM | Errno::NOSYS | Errno::INVAL | Errno::XDEV | Errno::NODATA)
            ) {
                self.is_priming_disabled.store(true, Ordering::Relaxed);
            }
        }
    }
}

impl PageCache for KernelCache {
    fn is_open(&self) -> bool {
        self.notifier.lock().is_some()
    }

    fn can_store(&self, ino: Ino) -> bool {
        self.known_inodes.contains(ino) && !self.stored_or_read_inodes.contains(ino)
    }

    fn is_visible(&self, index: &Index, ino: Ino) -> bool {
        self.subtree.contains(index, ino)
    }

    fn prime_inodes(&self, files: &[Ino]) -> usize {
        let is_unknown = |ino: &Ino| !self.known_inodes.contains(*ino);
        let unknown: Vec<_> = files.iter().copied().filter(is_unknown).collect();
        self.try_prime(|root| self.priming_dir.prime(|| root.open(), unknown.clone()));
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
            let subtree = self.subtree;
            self.try_prime(|root| dentries::prime_dentries(|| root.open(), subtree, index, from));
        }
    }

    fn store(&self, ino: Ino, offset: u64, bytes: &[u8]) -> io::Result<u64> {
        // Do not hold the lock: the kernel may wait for a page that is being read.
        let Some(notifier) = self.notifier.lock().clone() else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        if offset == 0 {
            self.stored_or_read_inodes.insert(ino);
        }
        notifier.store(self.subtree.inode(ino), offset, bytes)?;
        Ok(bytes.len() as u64)
    }
}

/// A bitmap of inode numbers. It allocates leaves only for numbers that occur.
#[derive(Debug)]
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

    // Promises: ahead-small-files
    #[test]
    fn known_file_is_wanted_until_first_read() {
        let kernel_cache = KernelCache::new(Subtree::WHOLE, Arc::default());
        for ino in [Ino(1), Ino(64), Ino(INODES_PER_LEAF + 3), Ino(u32::MAX)] {
            assert!(!kernel_cache.can_store(ino));
            kernel_cache.mark_dentry_known(ino);
            assert!(kernel_cache.can_store(ino));
            assert!(!kernel_cache.can_store(Ino(ino.0 ^ 1)), "its neighbour");
            kernel_cache.record_first_read(ino);
            assert!(!kernel_cache.can_store(ino));
            kernel_cache.forget_inode(ino);
            kernel_cache.mark_dentry_known(ino);
            assert!(kernel_cache.can_store(ino), "again");
        }
    }

    // Promises: ahead-small-files
    #[test]
    fn files_with_evicted_pages_are_wanted_again() {
        let kernel_cache = KernelCache::new(Subtree::WHOLE, Arc::default());
        for number in 1..100 {
            kernel_cache.mark_dentry_known(Ino(number));
            kernel_cache.record_first_read(Ino(number));
        }
        for number in 1..MAX_CONSECUTIVE_MISSES {
            kernel_cache.record_first_read(Ino(number));
        }
        assert!(
            !kernel_cache.can_store(Ino(50)),
            "one or two may have been pushed late"
        );
        kernel_cache.record_first_read(Ino(MAX_CONSECUTIVE_MISSES));
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
