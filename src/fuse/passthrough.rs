//! Backing files: complete copies of files on local disk, and FUSE passthrough to them.
//!
//! With backing files, each open has a handle, counted by inode. With passthrough the kernel reads a backing
//! file by itself. An open uses it if the copy is complete and no handle of the inode reads through the page
//! cache, because the kernel refuses to mix the two. Otherwise the daemon answers read requests, from the
//! backing file once that exists.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use fuser::{BackingId, FileHandle, FopenFlags, ReplyOpen};
use rustix::io::{Errno, ReadWriteFlags};

use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::base::thread_pool::ThreadPool;
use crate::index::Ino;

/// Number of threads that open and read backing files, because a disk may block them.
const BACKING_IO_THREADS: usize = 2;

/// The source of backing files.
pub trait BackingFiles: Send + Sync + fmt::Debug + 'static {
    /// Whether there may be a complete copy of file `ino`. Never waits.
    fn may_have(&self, ino: Ino) -> bool;

    /// Opens the complete copy of file `ino` for reading.
    fn open(&self, ino: Ino) -> Option<File>;

    /// Called when a caller opens file `ino`, which has no copy yet.
    fn request_copy(&self, ino: Ino);
}

#[derive(Debug)]
pub(super) struct OpenFiles {
    backing_files: Arc<dyn BackingFiles>,
    inodes: Mutex<HashMap<Ino, OpenInode>>,
    is_passthrough_enabled: AtomicBool,
    disabled_reason: Mutex<Option<String>>,
    stats: Arc<Stats>,
}

/// Threads for blocking reads of backing files, and the open inodes. Dropping it ends the threads.
#[derive(Debug)]
pub(super) struct BackingFileIo {
    pub(super) open_files: Arc<OpenFiles>,
    workers: ThreadPool,
}

#[derive(Debug)]
struct OpenInode {
    /// At least one.
    handle_count: u64,
    mode: ReadMode,
}

#[derive(Clone, Debug)]
enum ReadMode {
    Passthrough(Arc<BackingId>),
    Requests(Option<Arc<File>>),
}

impl BackingFileIo {
    pub(super) fn new(backing_files: Arc<dyn BackingFiles>, stats: Arc<Stats>) -> io::Result<Self> {
        Ok(Self {
            open_files: Arc::new(OpenFiles {
                backing_files,
                inodes: Mutex::default(),
                is_passthrough_enabled: AtomicBool::new(false),
                disabled_reason: Mutex::default(),
                stats,
            }),
            workers: ThreadPool::start("tarfs-backing", BACKING_IO_THREADS)?,
        })
    }

    /// Opens `ino`, and replies at once or after opening its backing file. `caching` is for reads by requests.
    pub(super) fn open(&self, ino: Ino, caching: FopenFlags, reply: ReplyOpen) {
        let open_files = &self.open_files;
        if let Some(mode) = open_files.add_handle_if_open(ino) {
            return open_files.reply_opened(&mode, caching, reply);
        }
        if !open_files.backing_files.may_have(ino) {
            open_files.backing_files.request_copy(ino);
            let mode = open_files.add_handle(ino, ReadMode::Requests(None));
            return open_files.reply_opened(&mode, caching, reply);
        }
        let open_files = Arc::clone(open_files);
        self.workers.submit(move || {
            let mode = open_files.choose_mode(ino, &reply);
            let mode = open_files.add_handle(ino, mode);
            open_files.reply_opened(&mode, caching, reply);
        });
    }

    /// Reads a range, which must be inside the file, of `ino`'s backing file. Passes the bytes, or `None` on
    /// an error, to `done`. Returns `done` without a backing file. Never waits.
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
    pub(super) fn set_passthrough_offered(&self, is_offered: bool) {
        let is_enabled = &self.is_passthrough_enabled;
        is_enabled.store(is_offered, Ordering::Relaxed);
        if !is_offered {
            self.record_disabled_reason("the kernel does not offer it (needs Linux 6.9)");
        }
    }

    pub(super) fn disabled_reason(&self) -> Option<String> {
        self.disabled_reason.lock().clone()
    }

    /// Chooses how to read `ino`, which is not open yet.
    fn choose_mode(&self, ino: Ino, reply: &ReplyOpen) -> ReadMode {
        let Some(file) = self.backing_files.open(ino) else {
            return ReadMode::Requests(None);
        };
        if !self.is_passthrough_enabled.load(Ordering::Relaxed) {
            return ReadMode::Requests(Some(Arc::new(file)));
        }
        match reply.open_backing(&file) {
            // The kernel now holds its own reference to the file.
            Ok(id) => ReadMode::Passthrough(Arc::new(id)),
            Err(error) => {
                // Permanent: CAP_SYS_ADMIN is missing, the backing file system is stacked, or the kernel is too
                // old. Other errors may be temporary.
                if matches!(
                    Errno::from_io_error(&error),
                    Some(
                        Errno::PERM | Errno::LOOP | Errno::OPNOTSUPP | Errno::NOTTY | Errno::NOSYS
                    )
                ) {
                    self.is_passthrough_enabled.store(false, Ordering::Relaxed);
                    self.record_disabled_reason(&error.to_string());
                }
                ReadMode::Requests(Some(Arc::new(file)))
            }
        }
    }

    fn add_handle_if_open(&self, ino: Ino) -> Option<ReadMode> {
        let mut inodes = self.inodes.lock();
        let found = inodes.get_mut(&ino)?;
        found.handle_count += 1;
        Some(found.mode.clone())
    }

    /// Adds a handle of `ino`. If it was not open, its reads are served as `mode` says.
    fn add_handle(&self, ino: Ino, mode: ReadMode) -> ReadMode {
        match self.inodes.lock().entry(ino) {
            Entry::Occupied(mut found) => {
                found.get_mut().handle_count += 1;
                found.get().mode.clone()
            }
            Entry::Vacant(free) => {
                let handle_count = 1;
                free.insert(OpenInode { handle_count, mode }).mode.clone()
            }
        }
    }

    fn reply_opened(&self, mode: &ReadMode, caching: FopenFlags, reply: ReplyOpen) {
        let flags = FopenFlags::FOPEN_NOFLUSH;
        match mode {
            ReadMode::Passthrough(id) => {
                self.stats.passthrough_opens.increment();
                // Without FOPEN_KEEP_CACHE: it is an error for a file with passthrough.
                reply.opened_passthrough(FileHandle(0), flags, id);
            }
            ReadMode::Requests(_) => {
                self.stats.served_opens.increment();
                reply.opened(FileHandle(0), flags | caching);
            }
        }
    }

    pub(super) fn release(&self, ino: Ino) {
        let mut inodes = self.inodes.lock();
        let Entry::Occupied(mut found) = inodes.entry(ino) else {
            return;
        };
        found.get_mut().handle_count -= 1;
        if found.get().handle_count == 0 {
            let closed = found.remove();
            // Closing the backing file calls the kernel, so release the lock before.
            drop(inodes);
            drop(closed);
        }
    }

    fn backing_file(&self, ino: Ino) -> Option<Arc<File>> {
        match &self.inodes.lock().get(&ino)?.mode {
            ReadMode::Requests(file) => file.clone(),
            // A read that was in flight when the last handle was closed.
            ReadMode::Passthrough(_) => None,
        }
    }

    /// Opens the backing file of `ino`, which became complete after the inode's open.
    fn open_backing_file(&self, ino: Ino) -> Option<Arc<File>> {
        let file = Arc::new(self.backing_files.open(ino)?);
        if let Some(open) = self.inodes.lock().get_mut(&ino)
            && let ReadMode::Requests(copy @ None) = &mut open.mode
        {
            *copy = Some(Arc::clone(&file));
        }
        Some(file)
    }

    fn record_disabled_reason(&self, why: &str) {
        self.disabled_reason.lock().get_or_insert_with(|| {
            tracing::info!(
                why,
                "passthrough is disabled; the daemon reads the local copies"
            );
            why.to_owned()
        });
    }
}

/// Reads `len` bytes from the page cache; `None` if that would wait for a disk.
fn read_cached(file: &File, offset: u64, len: u32) -> Option<Bytes> {
    let mut bytes = vec![0; len as usize];
    let buffer = &mut [IoSliceMut::new(&mut bytes)];
    let read = rustix::io::preadv2(file, buffer, offset, ReadWriteFlags::NOWAIT);
    (read == Ok(bytes.len())).then(|| bytes.into())
}

fn read_all(file: &File, offset: u64, len: u32) -> Option<Bytes> {
    let mut bytes = vec![0; len as usize];
    match file.read_exact_at(&mut bytes, offset) {
        Ok(()) => Some(bytes.into()),
        Err(error) => {
            tracing::warn!(%error, "cannot read a local copy; reading the archive instead");
            None
        }
    }
}
