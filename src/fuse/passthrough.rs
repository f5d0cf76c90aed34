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
const BACKING_IO_THREADS: usize = 2;

/// Who may have complete copies of files.
pub trait BackingFiles: Send + Sync + fmt::Debug + 'static {
    /// Whether there may be a copy of file `ino`; never waits.
    fn may_have(&self, ino: Ino) -> bool;

    /// A copy of all of file `ino`, open for reading.
    fn open(&self, ino: Ino) -> Option<File>;

    /// Somebody opens file `ino`, of which there is no copy.
    fn request_copy(&self, ino: Ino);
}

/// What is open, and how.
pub(super) struct OpenFiles {
    backing_files: Arc<dyn BackingFiles>,
    inodes: Mutex<HashMap<Ino, OpenInode>>,
    /// Whether the kernel takes files to read by itself.
    is_passthrough_enabled: AtomicBool,
    /// Why not, once it has said no.
    disabled_reason: Mutex<Option<String>>,
    stats: Arc<Stats>,
}

/// The threads that wait for disks, and what they have to do with. They end when it is dropped.
#[derive(Debug)]
pub(super) struct BackingFileIo {
    pub(super) open_files: Arc<OpenFiles>,
    workers: ThreadPool,
}

/// An open inode.
#[derive(Debug)]
struct OpenInode {
    /// Handles, at least one.
    handle_count: u64,
    mode: ReadMode,
}

/// How an open inode is read.
#[derive(Clone, Debug)]
enum ReadMode {
    /// By the kernel.
    Passthrough(Arc<BackingId>),
    /// By requests, which are answered from a copy if there is one.
    Requests(Option<Arc<File>>),
}

impl fmt::Debug for OpenFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenFiles")
            .field("backing_files", &self.backing_files)
            .field("passthrough", &self.is_passthrough_enabled)
            .finish_non_exhaustive()
    }
}

impl BackingFileIo {
    /// Nothing is open.
    ///
    /// # Errors
    /// When the system has no thread left to give.
    pub(super) fn new(backing_files: Arc<dyn BackingFiles>, stats: Arc<Stats>) -> io::Result<Self> {
        Ok(Self {
            open_files: Arc::new(OpenFiles {
                backing_files,
                inodes: Mutex::default(),
                is_passthrough_enabled: AtomicBool::new(false),
                disabled_reason: Mutex::default(),
                stats,
            }),
            workers: ThreadPool::start("fuse-backing", BACKING_IO_THREADS)?,
        })
    }

    /// Opens `ino`, at once or when its copy is open.
    pub(super) fn open(&self, ino: Ino, reply: ReplyOpen) {
        let open_files = &self.open_files;
        if let Some(mode) = open_files.add_handle_if_open(ino) {
            return open_files.reply_opened(&mode, reply);
        }
        if !open_files.backing_files.may_have(ino) {
            open_files.backing_files.request_copy(ino);
            let mode = open_files.add_handle(ino, ReadMode::Requests(None));
            return open_files.reply_opened(&mode, reply);
        }
        let open_files = Arc::clone(open_files);
        self.workers.submit(move || {
            let mode = open_files.choose_mode(ino, &reply);
            let mode = open_files.add_handle(ino, mode);
            open_files.reply_opened(&mode, reply);
        });
    }

    /// Reads `len` bytes at `offset` of the copy of `ino`, if there is one, and hands them to
    /// `done`; `None` stands for a copy that is of no use after all. Gives `done` back when there
    /// is no copy. Never waits; `len` lies within the file.
    pub(super) fn read<D>(&self, ino: Ino, offset: u64, len: u32, done: D) -> Option<D>
    where
        D: FnOnce(Option<Bytes>) + Send + 'static,
    {
        let open_files = &self.open_files;
        let file = open_files.backing_file(ino);
        if file.is_none() && !open_files.backing_files.may_have(ino) {
            return Some(done);
        }
        if let Some(file) = &file
            && let Some(bytes) = read_cached(file, offset, len)
        {
            open_files.stats.copied_bytes.add(bytes.len() as u64);
            done(Some(bytes));
            return None;
        }
        let open_files = Arc::clone(open_files);
        self.workers.submit(move || {
            let file = file.or_else(|| open_files.open_backing_file(ino));
            let bytes = file.and_then(|file| read_all(&file, offset, len));
            if let Some(bytes) = &bytes {
                open_files.stats.copied_bytes.add(bytes.len() as u64);
            }
            done(bytes);
        });
        None
    }
}

impl OpenFiles {
    /// What the kernel said about passthrough when the session began.
    pub(super) fn set_passthrough_offered(&self, is_offered: bool) {
        self.is_passthrough_enabled
            .store(is_offered, Ordering::Relaxed);
        if !is_offered {
            self.record_disabled_reason("the kernel offers none (it takes Linux 6.9)".to_owned());
        }
    }

    /// Why the kernel reads no copy by itself; `None` as long as it may.
    pub(super) fn disabled_reason(&self) -> Option<String> {
        lock(&self.disabled_reason).clone()
    }

    /// The best way to read `ino`, which nobody has open.
    fn choose_mode(&self, ino: Ino, reply: &ReplyOpen) -> ReadMode {
        let Some(file) = self.backing_files.open(ino) else {
            return ReadMode::Requests(None);
        };
        if !self.is_passthrough_enabled.load(Ordering::Relaxed) {
            return ReadMode::Requests(Some(Arc::new(file)));
        }
        match reply.open_backing(&file) {
            // The kernel has the file open by itself now.
            Ok(id) => ReadMode::Passthrough(Arc::new(id)),
            Err(error) => {
                // What it does not permit now it will not permit later; other errors may pass.
                if is_permanent_error(&error) {
                    self.is_passthrough_enabled.store(false, Ordering::Relaxed);
                    self.record_disabled_reason(error.to_string());
                }
                ReadMode::Requests(Some(Arc::new(file)))
            }
        }
    }

    /// One more handle of `ino`, if it is open.
    fn add_handle_if_open(&self, ino: Ino) -> Option<ReadMode> {
        let mut inodes = lock(&self.inodes);
        let found = inodes.get_mut(&ino)?;
        found.handle_count += 1;
        Some(found.mode.clone())
    }

    /// One more handle of `ino`, which is opened `way` unless it is open.
    fn add_handle(&self, ino: Ino, mode: ReadMode) -> ReadMode {
        match lock(&self.inodes).entry(ino) {
            Entry::Occupied(mut found) => {
                found.get_mut().handle_count += 1;
                found.get().mode.clone()
            }
            Entry::Vacant(free) => free
                .insert(OpenInode {
                    handle_count: 1,
                    mode,
                })
                .mode
                .clone(),
        }
    }

    fn reply_opened(&self, mode: &ReadMode, reply: ReplyOpen) {
        let flags = FopenFlags::FOPEN_NOFLUSH;
        match mode {
            ReadMode::Passthrough(id) => {
                self.stats.passthrough_opens.increment();
                // Not to keep the cache: that is no flag of such files, and an error.
                reply.opened_passthrough(FileHandle(0), flags, id);
            }
            ReadMode::Requests(_) => {
                self.stats.served_opens.increment();
                // Nothing changes, so what the page cache holds stays right.
                reply.opened(FileHandle(0), flags | FopenFlags::FOPEN_KEEP_CACHE);
            }
        }
    }

    /// One handle of `ino` less.
    pub(super) fn release(&self, ino: Ino) {
        let mut inodes = lock(&self.inodes);
        let Entry::Occupied(mut found) = inodes.entry(ino) else {
            return;
        };
        found.get_mut().handle_count -= 1;
        if found.get().handle_count == 0 {
            let closed = found.remove();
            // The kernel is told outside.
            drop(inodes);
            drop(closed);
        }
    }

    /// The copy that reads of `ino` are answered from, as far as it is open.
    fn backing_file(&self, ino: Ino) -> Option<Arc<File>> {
        match &lock(&self.inodes).get(&ino)?.mode {
            ReadMode::Requests(file) => file.clone(),
            // A read that was under way when the last handle was closed.
            ReadMode::Passthrough(_) => None,
        }
    }

    /// The copy of `ino`, which became complete while it was open.
    fn open_backing_file(&self, ino: Ino) -> Option<Arc<File>> {
        let file = Arc::new(self.backing_files.open(ino)?);
        if let Some(open) = lock(&self.inodes).get_mut(&ino)
            && let ReadMode::Requests(copy @ None) = &mut open.mode
        {
            *copy = Some(Arc::clone(&file));
        }
        Some(file)
    }

    fn record_disabled_reason(&self, why: String) {
        let mut disabled_reason = lock(&self.disabled_reason);
        if disabled_reason.is_none() {
            tracing::info!(why, "the kernel does not read copies by itself");
            *disabled_reason = Some(why);
        }
    }
}

/// Whether the kernel says no for good: not permitted (it takes `CAP_SYS_ADMIN`), the copies' file
/// system is stacked itself, or there is no passthrough at all.
fn is_permanent_error(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let permanent_errors = [
        Errno::PERM,
        Errno::LOOP,
        Errno::OPNOTSUPP,
        Errno::NOTTY,
        Errno::NOSYS,
    ];
    Errno::from_io_error(error).is_some_and(|errno| permanent_errors.contains(&errno))
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
