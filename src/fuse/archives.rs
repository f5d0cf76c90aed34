//! A directory of archives: one mount that shows each archive of a place as a directory.
//!
//! The tree of the mount is the listing of the place. Its directories without entries are those of archives, and
//! their inode numbers are the archives' ids. Inode numbers in an archive have its id above their lower 32 bits,
//! which depend only on its index. So an archive is opened when a request arrives for anything in it, and can be
//! closed and opened again.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use fuser::INodeNo;
use serde::{Deserialize, Serialize};

use super::pending_replies::{FailReply, WaitError, WaitReason};
use super::push::KernelCache;
use super::state::FilesystemState;
use super::subtree::Subtree;
use crate::archive::directory::{ArchiveDirectory, DirectoryError, ScanFn, ScanTurn};
use crate::archive::{Archive, Callback, OpenError, Volume, WaitFor};
use crate::base::error_chain::error_chain;
use crate::base::sync::Mutex;
use crate::base::thread::Thread;
use crate::base::thread_pool::ThreadPool;
use crate::index::{Entry, Index, Ino};

/// Maximum number of archives that are open or being opened, unless they are being scanned.
const MAX_OPEN_ARCHIVES: usize = 32;

/// Time for which an archive that could not be opened or scanned fails without another attempt.
const REOPEN_DELAY: Duration = Duration::from_secs(10);

/// Time after which an archive whose scan has not begun may be scanned in a spare turn.
const SPARE_TURN_DELAY: Duration = Duration::from_secs(2);

/// Time for which an opening waits until others are closed for it. Their last disk writes may take longer.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of archives whose errors the status shows.
const MAX_NAMED_FAILURES: usize = 10;

/// Maximum number of notes in a status.
const MAX_NOTES: usize = 100;

/// Numbers of a directory, for the status.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct DirectoryStatus {
    /// Archives of the listing.
    pub archives: u64,
    /// Archives that are open.
    pub open: u64,
    /// Archives that could not be opened.
    pub failed: u64,
    /// Parts of the place that are not listed, and the first archives that could not be opened.
    #[serde(skip)]
    pub notes: Vec<String>,
}

/// The archives of a directory, each of which `T` shows while it is open.
pub(super) struct Archives<T> {
    directory: Arc<dyn ArchiveDirectory>,
    listing: Arc<dyn Volume>,
    /// The settings and counters of all archives.
    state: Arc<FilesystemState>,
    show: fn(Arc<dyn Volume>, Arc<FilesystemState>) -> T,
    idle_timeout: Duration,
    /// The archives that were opened at least once.
    managed: Mutex<HashMap<u32, ManagedArchive<T>>>,
    /// Each thread scans one archive at a time, and waits for the end.
    scanners: Vec<(ScanTurn, ThreadPool)>,
    /// The thread that closes archives, and the openings that need room. The channel closes at the end.
    idle_watch: OnceLock<(Sender<Sender<()>>, Thread<()>)>,
}

struct ManagedArchive<T> {
    phase: Phase<T>,
    /// Version of the archive when it was opened first. The kernel knows inode numbers of it.
    version: Option<String>,
    used: Instant,
}

enum Phase<T> {
    Closed,
    /// The thread that opens it, and then answers the requests that wait.
    Opening(ThreadPool),
    Open(Arc<OpenArchive<T>>),
    Failed(Instant, String),
}

struct OpenArchive<T> {
    filesystem: T,
    volume: Arc<dyn Volume>,
    state: Arc<FilesystemState>,
}

impl<T> ManagedArchive<T> {
    /// When it was last used, if it can be closed, after whether requests wait for a part of it. They share its
    /// state.
    fn last_use(&self) -> Option<(bool, Instant)> {
        match &self.phase {
            Phase::Open(open) if open.volume.is_scan_over() => {
                Some((Arc::strong_count(&open.state) > 2, self.used))
            }
            _ => None,
        }
    }
}

impl<T> fmt::Debug for Archives<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Archives")
            .field("directory", &self.directory)
            .finish_non_exhaustive()
    }
}

impl<T: Send + Sync + 'static> Archives<T> {
    /// Shows the archives of `directory`, each by `show` with the settings of the filesystem of their listing.
    pub(super) fn start(
        (listing, state): (Arc<dyn Volume>, Arc<FilesystemState>),
        show: fn(Arc<dyn Volume>, Arc<FilesystemState>) -> T,
        directory: Arc<dyn ArchiveDirectory>,
        idle_timeout: Duration,
    ) -> io::Result<Arc<Self>> {
        let turns = [ScanTurn::Regular, ScanTurn::Spare].into_iter();
        let turns = turns.filter(|turn| directory.max_scans(*turn) > 0);
        let scanners = turns.map(|turn| {
            let pool = ThreadPool::start("tarfs-scan", directory.max_scans(turn))?;
            Ok((turn, pool))
        });
        let archives = Arc::new(Self {
            listing,
            state,
            show,
            idle_timeout,
            managed: Mutex::default(),
            scanners: scanners.collect::<io::Result<_>>()?,
            idle_watch: OnceLock::new(),
            directory,
        });
        let (openings, waiting) = channel();
        let watched = Arc::downgrade(&archives);
        let thread = Thread::spawn("tarfs-idle", move || {
            loop {
                let opening = waiting.recv_timeout(idle_timeout / 4);
                if matches!(opening, Err(RecvTimeoutError::Disconnected)) {
                    break;
                }
                if let Some(archives) = watched.upgrade() {
                    archives.close_unused(opening.is_ok());
                }
            }
        })?;
        archives.idle_watch.get_or_init(|| (openings, thread));
        Ok(archives)
    }

    /// Id of the archive that has `inode`, or whose directory it is, if that `is_entered`.
    pub(super) fn id(&self, inode: INodeNo, is_entered: bool) -> Option<u32> {
        let id = u32::try_from(inode.0 >> u32::BITS).unwrap_or(u32::MAX);
        if id > 0 {
            return Some(id);
        }
        let ino = Ino(u32::try_from(inode.0).ok()?);
        // The listing is in memory.
        let is_empty = |index: &Index| index.children(ino, 0).next().is_none();
        let is_archive = || self.listing.index().read(is_empty).unwrap_or(false);
        (is_entered && ino != Ino::ROOT && is_archive()).then_some(ino.0)
    }

    /// Calls `answer` with `reply` and the filesystem of archive `id`, which has `inode`, once it is open.
    pub(super) fn with_archive<R: FailReply>(
        self: &Arc<Self>,
        (caller, inode): (u32, INodeNo),
        id: u32,
        reply: R,
        answer: impl FnOnce(&T, R) + Send + 'static,
    ) {
        let mut all = self.managed.lock();
        let managed = all.entry(id).or_insert_with(|| ManagedArchive {
            phase: Phase::Closed,
            version: None,
            used: Instant::now(),
        });
        managed.used = Instant::now();
        match &managed.phase {
            Phase::Open(open) => {
                let open = Arc::clone(open);
                drop(all);
                return answer_loaded(&open, (caller, inode), reply, answer);
            }
            Phase::Closed => start_opening(managed),
            Phase::Failed(at, _) if at.elapsed() >= REOPEN_DELAY => start_opening(managed),
            Phase::Opening(_) | Phase::Failed(..) => {}
        }
        let Phase::Opening(thread) = &managed.phase else {
            drop(all);
            return reply.fail(WaitError::Closed);
        };
        let replies = &self.state.pending_replies;
        let pending = replies.register(reply, caller, WaitReason::Scan);
        let archives = Arc::downgrade(self);
        thread.submit(move || {
            let Some(archives) = archives.upgrade() else {
                return;
            };
            archives.open(id);
            if let Some(reply) = pending.take() {
                archives.with_archive((caller, inode), id, reply, answer);
            }
        });
    }

    /// Opens archive `id`, unless that was done before.
    fn open(self: &Arc<Self>, id: u32) {
        let phase_is_opening =
            |managed: &ManagedArchive<T>| matches!(managed.phase, Phase::Opening(_));
        if !self.managed.lock().get(&id).is_some_and(phase_is_opening) {
            return;
        }
        self.make_room();
        let open = |scanners| {
            let found = self.directory.open(&self.path(id))?;
            found.or_else(|scan| self.scan(id, scan, scanners))
        };
        let needs_more = |error: &DirectoryError| {
            let error = error.downcast_ref();
            error.is_some_and(OpenError::is_out_of_memory)
        };
        let mut opened = open(&self.scanners);
        if self.scanners.len() > 1 && opened.as_ref().is_err_and(needs_more) {
            // A regular turn has more memory than a spare one.
            opened = open(self.scanners.get(..1).unwrap_or_default());
        }
        match opened {
            Ok(archive) => self.publish(id, archive),
            Err(error) => self.fail(id, error_chain(&*error)),
        }
        self.check_scan(id);
    }

    fn path(&self, id: u32) -> String {
        // Not as text for the user, which is escaped. Paths of a listing are UTF-8.
        let path = self.listing.index().read(|index| index.path(Ino(id)));
        let path = path.ok().flatten().unwrap_or_default();
        String::from_utf8_lossy(path.as_bytes()).into_owned()
    }

    /// Scans archive `id` when it has its turn. Returns when the first member is found.
    fn scan(
        self: &Arc<Self>,
        id: u32,
        scan: ScanFn,
        scanners: &[(ScanTurn, ThreadPool)],
    ) -> Result<Arc<Archive>, DirectoryError> {
        let (sender, scanned) = channel();
        // The first thread that is free takes it.
        let unscanned = Arc::new(Mutex::new(Some((scan, sender))));
        for (turn, scanners) in scanners {
            let (archives, unscanned) = (Arc::downgrade(self), Arc::clone(&unscanned));
            let turn = *turn;
            scanners.submit(move || {
                let Some((scan, sender)) = unscanned.lock().take() else {
                    return;
                };
                let (end, ended) = channel::<()>();
                let result = scan(turn);
                match &result {
                    Ok(archive) => {
                        archive.on_available(WaitFor::End, Callback::new(move || drop(end)));
                    }
                    Err(_) => drop(end),
                }
                sender.send(result).unwrap_or_default();
                // The channel only closes.
                ended.recv().unwrap_or_default();
                if let Some(archives) = archives.upgrade() {
                    archives.check_scan(id);
                }
            });
            match scanned.recv_timeout(SPARE_TURN_DELAY) {
                Err(RecvTimeoutError::Timeout) => {}
                result => return result?,
            }
        }
        drop(unscanned);
        scanned.recv()?
    }

    /// Shows `archive`, unless it has another version than when it was opened first.
    fn publish(&self, id: u32, archive: Arc<Archive>) {
        let path = self.path(id);
        let version = archive.source().fingerprint().to_string();
        let mut all = self.managed.lock();
        let Some(managed) = all.get_mut(&id) else {
            return;
        };
        if managed.version.get_or_insert_with(|| version.clone()) != &version {
            drop(all);
            return self.fail(
                id,
                "it has changed since it was opened; mount again".to_owned(),
            );
        }
        let subtree = Subtree::of_archive(id);
        let state = Arc::new(FilesystemState {
            subtree,
            archive_path: Some(format!("{path}/")),
            has_labels: OnceLock::new(),
            has_shown_xattrs: OnceLock::new(),
            kernel_cache: Arc::new(KernelCache::new(subtree, Arc::clone(&self.state.stats))),
            timed_out_reads: Arc::default(),
            ..FilesystemState::clone(&self.state)
        });
        let volume: Arc<dyn Volume> = archive;
        let filesystem = (self.show)(Arc::clone(&volume), Arc::clone(&state));
        managed.used = Instant::now();
        managed.phase = Phase::Open(Arc::new(OpenArchive {
            filesystem,
            volume,
            state,
        }));
        self.state.stats.opened_archives.increment();
    }

    /// Closes archive `id`, which is not opened again until [`REOPEN_DELAY`] is over.
    fn fail(&self, id: u32, reason: String) {
        tracing::error!(path = self.path(id), reason, "cannot open the archive");
        let failed = Phase::Failed(Instant::now(), reason);
        let mut all = self.managed.lock();
        let managed = all.get_mut(&id);
        let phase = managed.map(|managed| std::mem::replace(&mut managed.phase, failed));
        drop(all);
        if let Some(Phase::Open(open)) = phase {
            self.drop_closed(open);
        }
    }

    /// Fails archive `id` if its scan has failed.
    fn check_scan(&self, id: u32) {
        let mut all = self.managed.lock();
        let Some(managed) = all.get_mut(&id) else {
            return;
        };
        let Phase::Open(open) = &managed.phase else {
            return;
        };
        let open = Arc::clone(open);
        let archives = open.volume.archives();
        let Some(failure) = archives.iter().find_map(|archive| archive.failure()) else {
            return;
        };
        let reason = error_chain(&*failure);
        tracing::error!(path = self.path(id), reason, "cannot open the archive");
        // Under the same lock, because another thread may open it again.
        managed.phase = Phase::Failed(Instant::now(), reason);
        drop(all);
        drop(archives);
        self.drop_closed(open);
    }

    /// Waits until archives are closed for another one, but not for a closing that takes long.
    fn make_room(&self) {
        if let Some((openings, _)) = self.idle_watch.get() {
            let (opening, closed) = channel();
            openings.send(opening).unwrap_or_default();
            // The thread drops its end.
            closed.recv_timeout(CLOSE_TIMEOUT).unwrap_or_default();
        }
    }

    /// Closes idle archives. If another one `needs_room`, also those that are not in use while too many are open,
    /// the least recently used first.
    fn close_unused(&self, needs_room: bool) {
        loop {
            let is_memory_low = self.directory.is_index_memory_low();
            let mut all = self.managed.lock();
            let in_use = all
                .values()
                .filter(|managed| matches!(managed.phase, Phase::Opening(_) | Phase::Open(_)));
            let is_full = is_memory_low || in_use.count() > MAX_OPEN_ARCHIVES;
            let candidates = all
                .values_mut()
                .filter_map(|managed| Some((managed.last_use()?, managed)));
            let oldest = candidates.min_by_key(|(last_use, _)| *last_use);
            let closed = oldest.filter(|((is_busy, used), _)| {
                !is_busy && (needs_room && is_full || used.elapsed() >= self.idle_timeout)
            });
            let closed =
                closed.map(|(_, managed)| std::mem::replace(&mut managed.phase, Phase::Closed));
            drop(all);
            match closed {
                Some(Phase::Open(open)) => self.drop_closed(open),
                _ => return,
            }
        }
    }

    /// Drops a closed archive. Waits for requests that are using it on other threads, which never wait
    /// themselves.
    fn drop_closed(&self, closed: Arc<OpenArchive<T>>) {
        while Arc::strong_count(&closed) > 1 {
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(closed);
        self.state.stats.closed_archives.increment();
    }

    pub(super) fn status(&self) -> DirectoryStatus {
        let listing = self.directory.listing();
        let mut status = DirectoryStatus {
            archives: listing.archives.len() as u64,
            notes: listing.notes.clone(),
            ..DirectoryStatus::default()
        };
        for (id, managed) in &*self.managed.lock() {
            if let Phase::Failed(_, reason) = &managed.phase {
                status.failed += 1;
                if status.failed <= MAX_NAMED_FAILURES as u64 {
                    let path = self.path(*id);
                    status
                        .notes
                        .push(format!("{path} cannot be opened: {reason}"));
                }
            }
            if let Phase::Open(open) = &managed.phase {
                status.open += 1;
                let archives = open.volume.archives().into_iter();
                let notes = archives.filter_map(Archive::foreign_tree_note);
                let room = MAX_NOTES.saturating_sub(status.notes.len());
                let path = self.path(*id);
                status
                    .notes
                    .extend(notes.take(room).map(|note| format!("{path}: {note}")));
            }
        }
        status
    }
}

/// Makes the next request for the archive open it. It fails if the system cannot start a thread.
fn start_opening<T>(managed: &mut ManagedArchive<T>) {
    // Each has its own thread, because a stalled archive must not delay another one.
    if let Ok(thread) = ThreadPool::start("tarfs-open", 1) {
        managed.phase = Phase::Opening(thread);
    }
}

/// Calls `answer` with `reply` once `inode` is found and its rows are loaded. The kernel also knows inodes that an
/// archive that was opened again has not scanned or loaded yet.
fn answer_loaded<T: Send + Sync + 'static, R: FailReply>(
    open: &Arc<OpenArchive<T>>,
    (caller, inode): (u32, INodeNo),
    reply: R,
    answer: impl FnOnce(&T, R) + Send + 'static,
) {
    let touch = move |state: &FilesystemState, index: &Index| {
        let entry = state.subtree.entry(index, inode);
        entry.inspect(Entry::load_rows);
    };
    let (state, volume) = (&open.state, &open.volume);
    let weak = Arc::downgrade(open);
    let answer = move |_: &Arc<FilesystemState>, _: &Arc<dyn Volume>, reply: R| match weak.upgrade()
    {
        Some(open) => answer(&open.filesystem, reply),
        None => reply.fail(WaitError::Closed),
    };
    let is_missing = |index: &Index| state.subtree.entry(index, inode).is_none();
    // Rows that are not loaded are of a complete index.
    if volume.index().try_read(is_missing) == Ok(true) && !volume.is_scan_over() {
        state.wait_for_scan(volume, WaitFor::End, caller, reply, answer);
    } else {
        state.when_loaded(volume, caller, reply, touch, answer);
    }
}
