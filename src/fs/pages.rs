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

use super::roster::Roster;
use super::{View, is_listed, names};
use crate::archive::PageCache;
use crate::base::stats::Stats;
use crate::index::{Child, Index, Ino};

/// Inodes whose bits share one allocation, of 128 KiB.
const INODES_A_LEAF: u32 = 1 << 20;

/// Of any inode number a leaf has the bits.
const LEAVES: usize = 1 << 12;

/// So many files asked for in a row that should have been there mean that the kernel has dropped
/// pages.
const LOST: u32 = 8;

/// Whose next names are known up to here is not told more.
const NAMES_AHEAD: usize = 16;

/// What the kernel knows and has.
pub(super) struct Pages {
    view: View,
    stats: Arc<Stats>,
    /// `None` before and after the mount: who holds a notifier keeps its connection open.
    notifier: Mutex<Option<Notifier>>,
    /// How the kernel hears of files ahead.
    pub(super) roster: Roster,
    /// Where it is mounted, and its device number, once it answers.
    place: Mutex<Option<(PathBuf, u64)>>,
    /// The kernel cannot be told of anything ahead, or not by us.
    is_deaf: AtomicBool,
    known: Bits,
    /// Of what it also knows a name.
    named: Bits,
    stored: Bits,
    /// How many files in a row were asked for that should have been there.
    lost: AtomicU32,
    /// Whom to tell what has changed of what the kernel knows; `None` when nothing does.
    news: Mutex<Option<SyncSender<Ino>>>,
}

impl Pages {
    /// Of a mount that shows `view`.
    pub(super) fn new(view: View, stats: Arc<Stats>) -> Self {
        Self {
            view,
            stats,
            notifier: Mutex::default(),
            roster: Roster::default(),
            place: Mutex::default(),
            is_deaf: AtomicBool::new(false),
            known: Bits::default(),
            named: Bits::default(),
            stored: Bits::default(),
            lost: AtomicU32::new(0),
            news: Mutex::default(),
        }
    }

    /// The mount answers there; or is seen there from now on, through what lies over it.
    pub(super) fn mounted(&self, mountpoint: &Path, device: u64) {
        *self.place() = Some((mountpoint.to_owned(), device));
    }

    fn place(&self) -> MutexGuard<'_, Option<(PathBuf, u64)>> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The mount's notifier, from now on.
    pub(super) fn attach(&self, notifier: Notifier) {
        *self.lock() = Some(notifier);
    }

    /// Nothing is mounted any more.
    pub(super) fn detach(&self) {
        *self.lock() = None;
        *self.news() = None;
    }

    /// Has changes sent to `news`, until detached.
    pub(super) fn send_news(&self, news: SyncSender<Ino>) {
        *self.news() = Some(news);
    }

    /// Attributes of `ino` are not as they were, and the kernel may have been told of them. Never
    /// waits.
    pub(super) fn changed(&self, ino: Ino) {
        if (ino == self.view.root() || self.known.has(ino))
            && let Some(news) = &*self.news()
        {
            // Else it is asked for again soon enough.
            let _sent = news.try_send(ino).is_ok();
        }
    }

    /// Tells the kernel that attributes of `ino` have changed.
    pub(super) fn tell(&self, ino: Ino) {
        let Some(notifier) = self.lock().clone() else {
            return;
        };
        // Attributes alone, not what is in the page cache. Also well if it does not know it any more.
        if notifier.inval_inode(self.view.inode(ino), -1, 0).is_ok() {
            self.stats.invalidated_inodes.increment();
        }
    }

    /// The kernel hears of `ino`.
    pub(super) fn heard_of(&self, ino: Ino) {
        self.known.set(ino);
    }

    /// The kernel hears of `ino` and its name.
    pub(super) fn named(&self, ino: Ino) {
        self.known.set(ino);
        self.named.set(ino);
    }

    /// The kernel has dropped `ino`, or a part of its references: then it is not pushed, nor told of
    /// changes before it asks again, which does no harm.
    pub(super) fn forgotten(&self, ino: Ino) {
        self.known.clear(ino);
        self.named.clear(ino);
        self.stored.clear(ino);
    }

    /// The kernel asks for the first bytes of `ino`, and will have them.
    pub(super) fn asked_for(&self, ino: Ino) {
        if !self.stored.has(ino) {
            self.stored.set(ino);
            self.lost.store(0, Ordering::Relaxed);
            return;
        }
        // One may have been read while it was pushed.
        if self.lost.fetch_add(1, Ordering::Relaxed) + 1 == LOST {
            self.stored.clear_all();
            self.lost.store(0, Ordering::Relaxed);
        }
    }

    /// Tells the kernel of something ahead by `tell`, on the mount at this place, if it listens.
    fn ahead(&self, tell: impl FnOnce((&Path, u64)) -> io::Result<()>) {
        if self.is_deaf.load(Ordering::Relaxed) {
            return;
        }
        // Who tells waits for the kernel, which may wait for us: not under the lock.
        let Some((mountpoint, device)) = self.place().clone() else {
            return;
        };
        if let Err(error) = tell((&mountpoint, device)) {
            tracing::debug!(%error, "the kernel hears of nothing ahead");
            // Other errors are one directory's, or pass.
            if is_final(&error) {
                self.is_deaf.store(true, Ordering::Relaxed);
            }
        }
    }

    fn news(&self) -> MutexGuard<'_, Option<SyncSender<Ino>>> {
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Notifier>> {
        self.notifier.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PageCache for Pages {
    fn can_store(&self, ino: Ino) -> bool {
        self.known.has(ino) && !self.stored.has(ino)
    }

    fn is_visible(&self, index: &Index, ino: Ino) -> bool {
        self.view.shows(index, ino)
    }

    fn prime_inodes(&self, files: &[Ino]) -> usize {
        let is_unknown = |ino: &Ino| !self.known.has(*ino);
        let unknown: Vec<_> = files.iter().copied().filter(is_unknown).collect();
        self.ahead(|place| self.roster.show(place, unknown.clone()));
        unknown.iter().filter(|ino| self.known.has(**ino)).count()
    }

    fn prime_dentries(&self, index: &Index, ino: Ino) {
        let Some((directory, number)) = index.listing_position(ino) else {
            return;
        };
        let mut next = index.children(directory, number).take(NAMES_AHEAD);
        let is_news = |child: &Child<'_>| !self.named.has(child.ino) && is_listed(child.name);
        if let Some(next) = next.find(is_news) {
            let from = (directory, next.number);
            self.ahead(|place| names::learn(place, self.view, index, from));
        }
    }

    fn store(&self, ino: Ino, offset: u64, bytes: &[u8]) -> io::Result<()> {
        // Not under the lock: the kernel may wait for a page that is being read.
        let Some(notifier) = self.lock().clone() else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        if offset == 0 {
            self.stored.set(ino);
        }
        notifier.store(INodeNo(ino.0.into()), offset, bytes)
    }
}

/// Whether an error will be the same for everything: not permitted, not known to this kernel, not our
/// mount any more, or nothing heard for all that.
fn is_final(error: &io::Error) -> bool {
    let finals = [
        Errno::PERM,
        Errno::NOSYS,
        Errno::INVAL,
        Errno::XDEV,
        Errno::NODATA,
    ];
    Errno::from_io_error(error).is_some_and(|error| finals.contains(&error))
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pages").finish_non_exhaustive()
    }
}

/// A bit for each inode; takes memory for the numbers that occur.
struct Bits {
    leaves: Box<[OnceLock<Box<[AtomicU64]>>]>,
}

impl Default for Bits {
    fn default() -> Self {
        let leaves = (0..LEAVES).map(|_| OnceLock::new());
        Self {
            leaves: leaves.collect(),
        }
    }
}

impl Bits {
    fn set(&self, ino: Ino) {
        let Some(leaf) = self.leaves.get((ino.0 / INODES_A_LEAF) as usize) else {
            return;
        };
        let leaf = leaf.get_or_init(|| {
            let words = (0..INODES_A_LEAF / u64::BITS).map(|_| AtomicU64::new(0));
            words.collect()
        });
        if let Some(word) = leaf.get(word(ino)) {
            word.fetch_or(bit(ino), Ordering::Relaxed);
        }
    }

    fn clear(&self, ino: Ino) {
        if let Some(word) = self.word(ino) {
            word.fetch_and(!bit(ino), Ordering::Relaxed);
        }
    }

    fn clear_all(&self) {
        let leaves = self.leaves.iter().filter_map(OnceLock::get);
        for word in leaves.flat_map(|leaf| leaf.iter()) {
            word.store(0, Ordering::Relaxed);
        }
    }

    fn has(&self, ino: Ino) -> bool {
        self.word(ino)
            .is_some_and(|word| word.load(Ordering::Relaxed) & bit(ino) != 0)
    }

    fn word(&self, ino: Ino) -> Option<&AtomicU64> {
        let leaf = self.leaves.get((ino.0 / INODES_A_LEAF) as usize)?;
        leaf.get()?.get(word(ino))
    }
}

fn word(ino: Ino) -> usize {
    (ino.0 % INODES_A_LEAF / u64::BITS) as usize
}

fn bit(ino: Ino) -> u64 {
    1 << (ino.0 % u64::BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_wanted_once_while_the_kernel_knows_it() {
        let pages = Pages::new(View::WHOLE, Arc::default());
        for ino in [Ino(1), Ino(64), Ino(INODES_A_LEAF + 3), Ino(u32::MAX)] {
            assert!(!pages.can_store(ino));
            pages.named(ino);
            assert!(pages.can_store(ino));
            assert!(!pages.can_store(Ino(ino.0 ^ 1)), "its neighbour");
            pages.asked_for(ino);
            assert!(!pages.can_store(ino));
            pages.forgotten(ino);
            pages.named(ino);
            assert!(pages.can_store(ino), "again");
        }
    }

    #[test]
    fn files_whose_pages_were_dropped_are_wanted_again() {
        let pages = Pages::new(View::WHOLE, Arc::default());
        for number in 1..100 {
            pages.named(Ino(number));
            pages.asked_for(Ino(number));
        }
        for number in 1..LOST {
            pages.asked_for(Ino(number));
        }
        assert!(
            !pages.can_store(Ino(50)),
            "one or two may have been pushed late"
        );
        pages.asked_for(Ino(LOST));
        assert!(pages.can_store(Ino(50)));
    }

    #[test]
    fn nothing_is_stored_without_a_mount() {
        let pages = Pages::new(View::WHOLE, Arc::default());
        pages.named(Ino(7));
        assert!(pages.store(Ino(7), 0, b"bytes").is_err());
        assert!(pages.can_store(Ino(7)));
    }
}
