//! Complete copies of files on disk, and which way an open file is read.
//!
//! With copies, files are opened with handles, which are counted by inode: the kernel reads a copy
//! by itself (passthrough) from the first open on at which the copy is complete and no handle is
//! open that reads through its page cache; it refuses to mix the two on one inode. Until then, and
//! where passthrough is not permitted, reads come to this process, which reads the copy for them
//! once there is one.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use fuser::{BackingId, FileHandle, FopenFlags, ReplyOpen};
use rustix::io::ReadWriteFlags;

use crate::base::stats::Stats;
use crate::base::thread_pool::ThreadPool;
use crate::index::Ino;

/// Threads that open and read copies, for which a disk may have to be waited for.
const THREADS: usize = 2;

/// Who may have complete copies of files.
pub trait Copies: Send + Sync + fmt::Debug + 'static {
    /// Whether there may be a copy of file `ino`; never waits.
    fn has(&self, ino: Ino) -> bool;

    /// A copy of all of file `ino`, open for reading.
    fn open(&self, ino: Ino) -> Option<File>;

    /// Somebody opens file `ino`, of which there is no copy.
    fn wanted(&self, ino: Ino);
}

/// What is open, and how.
pub(super) struct Handles {
    copies: Arc<dyn Copies>,
    open: Mutex<HashMap<Ino, Open>>,
    /// Whether the kernel takes files to read by itself.
    passthrough: AtomicBool,
    /// Why not, once it has said no.
    refusal: Mutex<Option<String>>,
    stats: Arc<Stats>,
}

/// The threads that wait for disks, and what they have to do with. They end when it is dropped.
#[derive(Debug)]
pub(super) struct Desk {
    pub(super) handles: Arc<Handles>,
    workers: ThreadPool,
}

/// An open inode.
#[derive(Debug)]
struct Open {
    /// Handles, at least one.
    handles: u64,
    way: Way,
}

/// How an open inode is read.
#[derive(Clone, Debug)]
enum Way {
    /// By the kernel.
    Passthrough(Arc<BackingId>),
    /// By requests, which are answered from a copy if there is one.
    Requests(Option<Arc<File>>),
}

impl fmt::Debug for Handles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handles")
            .field("copies", &self.copies)
            .field("passthrough", &self.passthrough)
            .finish_non_exhaustive()
    }
}

impl Desk {
    /// Nothing is open.
    ///
    /// # Errors
    /// When the system has no thread left to give.
    pub(super) fn new(copies: Arc<dyn Copies>, stats: Arc<Stats>) -> io::Result<Self> {
        Ok(Self {
            handles: Arc::new(Handles {
                copies,
                open: Mutex::default(),
                passthrough: AtomicBool::new(false),
                refusal: Mutex::default(),
                stats,
            }),
            workers: ThreadPool::start("fuse-copies", THREADS)?,
        })
    }

    /// Opens `ino`, at once or when its copy is open.
    pub(super) fn open(&self, ino: Ino, reply: ReplyOpen) {
        let handles = &self.handles;
        if let Some(way) = handles.join(ino) {
            return handles.answer(&way, reply);
        }
        if !handles.copies.has(ino) {
            handles.copies.wanted(ino);
            let way = handles.enter(ino, Way::Requests(None));
            return handles.answer(&way, reply);
        }
        let handles = Arc::clone(handles);
        self.workers.submit(move || {
            let way = handles.way(ino, &reply);
            let way = handles.enter(ino, way);
            handles.answer(&way, reply);
        });
    }

    /// Reads `len` bytes at `offset` of the copy of `ino`, if there is one, and hands them to
    /// `done`; `None` stands for a copy that is of no use after all. Gives `done` back when there
    /// is no copy. Never waits; `len` lies within the file.
    pub(super) fn read<D>(&self, ino: Ino, offset: u64, len: u32, done: D) -> Option<D>
    where
        D: FnOnce(Option<Bytes>) + Send + 'static,
    {
        let handles = &self.handles;
        let file = handles.copy(ino);
        if file.is_none() && !handles.copies.has(ino) {
            return Some(done);
        }
        if let Some(file) = &file
            && let Some(bytes) = read_cached(file, offset, len)
        {
            handles.stats.copied_bytes.add(bytes.len() as u64);
            done(Some(bytes));
            return None;
        }
        let handles = Arc::clone(handles);
        self.workers.submit(move || {
            let file = file.or_else(|| handles.adopt(ino));
            let bytes = file.and_then(|file| read_all(&file, offset, len));
            if let Some(bytes) = &bytes {
                handles.stats.copied_bytes.add(bytes.len() as u64);
            }
            done(bytes);
        });
        None
    }
}

impl Handles {
    /// What the kernel said about passthrough when the session began.
    pub(super) fn offer_passthrough(&self, is_offered: bool) {
        self.passthrough.store(is_offered, Ordering::Relaxed);
        if !is_offered {
            self.refuse("the kernel offers none (it takes Linux 6.9)".to_owned());
        }
    }

    /// Why the kernel reads no copy by itself; `None` as long as it may.
    pub(super) fn refusal(&self) -> Option<String> {
        lock(&self.refusal).clone()
    }

    /// The best way to read `ino`, which nobody has open.
    fn way(&self, ino: Ino, reply: &ReplyOpen) -> Way {
        let Some(file) = self.copies.open(ino) else {
            return Way::Requests(None);
        };
        if !self.passthrough.load(Ordering::Relaxed) {
            return Way::Requests(Some(Arc::new(file)));
        }
        match reply.open_backing(&file) {
            // The kernel has the file open by itself now.
            Ok(id) => Way::Passthrough(Arc::new(id)),
            Err(error) => {
                // What it does not permit now it will not permit later; other errors may pass.
                if is_refusal(&error) {
                    self.passthrough.store(false, Ordering::Relaxed);
                    self.refuse(error.to_string());
                }
                Way::Requests(Some(Arc::new(file)))
            }
        }
    }

    /// One more handle of `ino`, if it is open.
    fn join(&self, ino: Ino) -> Option<Way> {
        let mut open = lock(&self.open);
        let found = open.get_mut(&ino)?;
        found.handles += 1;
        Some(found.way.clone())
    }

    /// One more handle of `ino`, which is opened `way` unless it is open.
    fn enter(&self, ino: Ino, way: Way) -> Way {
        match lock(&self.open).entry(ino) {
            Entry::Occupied(mut found) => {
                found.get_mut().handles += 1;
                found.get().way.clone()
            }
            Entry::Vacant(free) => free.insert(Open { handles: 1, way }).way.clone(),
        }
    }

    fn answer(&self, way: &Way, reply: ReplyOpen) {
        let flags = FopenFlags::FOPEN_NOFLUSH;
        match way {
            Way::Passthrough(id) => {
                self.stats.passthrough_opens.increment();
                // Not to keep the cache: that is no flag of such files, and an error.
                reply.opened_passthrough(FileHandle(0), flags, id);
            }
            Way::Requests(_) => {
                self.stats.served_opens.increment();
                // Nothing changes, so what the page cache holds stays right.
                reply.opened(FileHandle(0), flags | FopenFlags::FOPEN_KEEP_CACHE);
            }
        }
    }

    /// One handle of `ino` less.
    pub(super) fn release(&self, ino: Ino) {
        let mut open = lock(&self.open);
        let Entry::Occupied(mut found) = open.entry(ino) else {
            return;
        };
        found.get_mut().handles -= 1;
        if found.get().handles == 0 {
            let closed = found.remove();
            // The kernel is told outside.
            drop(open);
            drop(closed);
        }
    }

    /// The copy that reads of `ino` are answered from, as far as it is open.
    fn copy(&self, ino: Ino) -> Option<Arc<File>> {
        match &lock(&self.open).get(&ino)?.way {
            Way::Requests(file) => file.clone(),
            // A read that was under way when the last handle was closed.
            Way::Passthrough(_) => None,
        }
    }

    /// The copy of `ino`, which became complete while it was open.
    fn adopt(&self, ino: Ino) -> Option<Arc<File>> {
        let file = Arc::new(self.copies.open(ino)?);
        if let Some(open) = lock(&self.open).get_mut(&ino)
            && let Way::Requests(copy @ None) = &mut open.way
        {
            *copy = Some(Arc::clone(&file));
        }
        Some(file)
    }

    fn refuse(&self, why: String) {
        let mut refusal = lock(&self.refusal);
        if refusal.is_none() {
            tracing::info!(why, "the kernel does not read copies by itself");
            *refusal = Some(why);
        }
    }
}

/// Whether the kernel says no for good: not permitted (it takes `CAP_SYS_ADMIN`), the copies' file
/// system is stacked itself, or there is no passthrough at all.
fn is_refusal(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let refusals = [
        Errno::PERM,
        Errno::LOOP,
        Errno::OPNOTSUPP,
        Errno::NOTTY,
        Errno::NOSYS,
    ];
    Errno::from_io_error(error).is_some_and(|errno| refusals.contains(&errno))
}

/// What is in the page cache of all `len` bytes; `None` when a disk would have to be waited for.
fn read_cached(file: &File, offset: u64, len: u32) -> Option<Bytes> {
    let mut bytes = vec![0; len as usize];
    let buffer = &mut [IoSliceMut::new(&mut bytes)];
    let read = rustix::io::preadv2(file, buffer, offset, ReadWriteFlags::NOWAIT);
    (read == Ok(bytes.len())).then(|| bytes.into())
}

/// All `len` bytes; `None` when they cannot be had.
fn read_all(file: &File, offset: u64, len: u32) -> Option<Bytes> {
    let mut bytes = vec![0; len as usize];
    match file.read_exact_at(&mut bytes, offset) {
        Ok(()) => Some(bytes.into()),
        Err(error) => {
            tracing::warn!(%error, "a copy cannot be read, the archive is");
            None
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
