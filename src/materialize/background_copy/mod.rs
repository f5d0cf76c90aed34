//! Background copy: a mount writes the archive's tree to a local directory while it serves.
//!
//! The copy is made from an index and by reads, and equals the tree that a scan would write. A later mount
//! continues where the last one stopped.
//!
//! Directories are made first, then all other entries in archive order. A file that a reader opens is moved
//! to the front. Owners, modes and times of directories are last. A file is complete when it has all its
//! names and attributes and a record in the [`Ledger`]. Each open compares it with that record. The reader
//! of the archive has verified the bytes.

mod bit_set;
mod cancel_token;
mod directory;
mod ledger;
mod plan;

use std::collections::VecDeque;
use std::fs::File;
use std::ops::{ControlFlow, Range};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use rustix::fs::{AtFlags, fstat};
use rustix::io::Errno;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use self::bit_set::BitSet;
use self::directory::{CopyDirectory, errno, is_file};
use self::ledger::{Ledger, Record};
use self::plan::{CopyPlan, Name, output_path};

use self::cancel_token::CancelToken;
pub(super) use self::plan::member_of;
use super::error::{Error, Problem, Problems, Reporter};
use super::write::attributes::AttributeTarget;
use super::write::context::Context;
use super::write::destination::{Directory, IfMissing, lstat_at, name_of, parent_of};
use super::write::file::{FileWriter, Job};
use super::write::fs_type;
use super::{Materializer, Options, XattrFilter};
use crate::archive::ReadError;
use crate::base::archive_path::ArchivePath;
use crate::base::stats::Stats;
use crate::base::sync::{Mutex, MutexGuard};
use crate::base::thread::Thread;
use crate::index::{self, Entry, Index, Ino, Kind, Piece};
use crate::tar;

/// Maximum stored bytes of one read. A read also ends with its span, which is in memory as a whole.
const MAX_READ_BYTES: u64 = 8 << 20;
/// Buffer size for hashing a file of the copy.
const HASH_BUFFER_BYTES: usize = 1 << 20;
/// Maximum number of files queued ahead of their turn. Further requested files wait for their turn.
const MAX_PRIORITY_FILES: usize = 1024;
/// Note about an entry that is inconsistent in its index.
const CORRUPT_INDEX: &str = "the index is inconsistent; delete it and mount again";
/// Delay before retrying an unreachable source. It doubles from the minimum to the maximum.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_RETRY_DELAY: Duration = Duration::from_mins(1);

/// Reads a file of the archive, from an offset, at most so many bytes.
pub type ReadFn = Arc<dyn Fn(Ino, u64, u32) -> Result<Bytes, ReadError> + Send + Sync>;

/// The background copy of a mount.
pub struct BackgroundCopy {
    directory: CopyDirectory,
    /// Filter of the attributes to set.
    xattrs: XattrFilter,
    /// Identifies the current boot of the system.
    boot_id: u64,
    cancel_token: CancelToken,
    task: OnceLock<CopyTask>,
    report: Mutex<Report>,
}

/// State that exists only once the index is complete.
struct CopyTask {
    index: Arc<Index>,
    root: Ino,
    read: ReadFn,
    ledger: Ledger,
    plan: CopyPlan,
    context: Context,
    /// Entries that can be opened in the copy.
    complete: BitSet,
    /// Files that a reader has requested.
    requested: BitSet,
    /// Entries that a worker has claimed.
    claimed: BitSet,
    /// Entries counted as complete. `files` and `bytes` count the files among them.
    counted: BitSet,
    /// Requested files. It has its own lock, because requests of the mount take it.
    priority_files: Mutex<VecDeque<Ino>>,
    /// Position in the plan of the next unclaimed batch.
    next_name: Mutex<usize>,
    /// Makes directories and special files, and resolves directories.
    materializer: Mutex<Option<Materializer>>,
    files: AtomicU64,
    bytes: AtomicU64,
}

/// Status of the copy for the user.
#[derive(Debug, Default)]
struct Report {
    state: CopyState,
    /// Number of entries that are missing or wrong.
    failures: u64,
    /// The latest failure, or the reason why the copy waits or has stopped.
    note: Option<String>,
}

/// State of a background copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CopyState {
    /// The index is not complete yet.
    #[default]
    Waiting,
    /// Files are being written, or verified after a restart.
    Writing,
    /// The source is unreachable, and the copy retries.
    Retrying,
    /// All entries are complete.
    Complete,
    /// The copy has ended, but some entries are missing.
    Incomplete,
    /// The copy has stopped, because the directory or the source failed.
    Stopped,
}

/// Progress of a background copy at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BackgroundCopyProgress {
    /// State of the copy.
    pub state: CopyState,
    /// Number of complete regular files.
    pub files: u64,
    /// Number of all regular files; 0 before the index is complete.
    pub total_files: u64,
    /// Stored bytes of complete files.
    pub bytes: u64,
    /// Stored bytes of all files.
    pub total_bytes: u64,
    /// Number of entries that could not be written, or that another process changed.
    pub failures: u64,
    /// Description of the latest problem.
    pub note: Option<String>,
}

/// Handle of a running copy. Dropping it stops the writing.
#[derive(Debug)]
pub struct RunningCopy {
    background: Arc<BackgroundCopy>,
    _thread: Thread<()>,
}

impl std::fmt::Debug for BackgroundCopy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BackgroundCopy")
            .field("directory", &self.directory)
            .field("progress", &self.progress())
            .finish_non_exhaustive()
    }
}

impl BackgroundCopy {
    /// Opens `directory` for a copy, and makes it if it is missing.
    ///
    /// Entries get the extended attributes that `xattrs` selects.
    ///
    /// # Errors
    /// When it is not writable, or unsuitable: [`Error::NotACopy`], [`Error::InUse`].
    pub fn open(directory: &Path, xattrs: XattrFilter) -> Result<Arc<Self>, Error> {
        Ok(Arc::new(Self {
            xattrs,
            ..Self::new(directory)?
        }))
    }

    fn new(directory: &Path) -> Result<Self, Error> {
        Ok(Self {
            directory: CopyDirectory::open(directory)?,
            xattrs: XattrFilter::default(),
            boot_id: this_boot_id(),
            cancel_token: CancelToken::default(),
            task: OnceLock::new(),
            report: Mutex::default(),
        })
    }

    /// Absolute path of the copy without symbolic links.
    pub fn directory(&self) -> &Path {
        &self.directory.path
    }

    /// Starts to copy the tree below `root` of a complete `index`.
    ///
    /// It continues until all is written or the result is dropped. Entries of an earlier mount can be
    /// opened immediately. `stats` counts the written entries and bytes.
    ///
    /// # Errors
    /// [`Error::NotACopy`] when an earlier mount wrote another tree, and errors of the system.
    pub fn start(
        self: &Arc<Self>,
        index: &Arc<Index>,
        root: Ino,
        read: ReadFn,
        stats: &Arc<Stats>,
    ) -> Result<RunningCopy, Error> {
        let task = self.build_task(index, root, read, stats);
        let task = task.inspect_err(|error| self.halt(error))?;
        if self.task.set(task).is_err() {
            return Err(Error::InUse {
                path: self.directory.path.clone(),
            });
        }
        let background = Arc::clone(self);
        let thread = Thread::spawn("copy", move || {
            if let Some(task) = background.task.get() {
                background.run(task);
            }
        });
        let thread = thread
            .map_err(|error| Error::Thread(Arc::new(error)))
            .inspect_err(|error| self.halt(error))?;
        Ok(RunningCopy {
            background: Arc::clone(self),
            _thread: thread,
        })
    }

    fn build_task(
        &self,
        index: &Arc<Index>,
        root: Ino,
        read: ReadFn,
        stats: &Arc<Stats>,
    ) -> Result<CopyTask, Error> {
        let tree_hash = tree_hash(index, root, &self.xattrs);
        let ledger = self.directory.ledger(tree_hash, self.boot_id)?;
        let last = index.last_ino().0;
        let complete = BitSet::new(last);
        let known = ledger.for_each_recent(last, |number| {
            complete.insert(number);
        });
        known.map_err(|error| {
            self.directory
                .ledger_error("read the record of complete files")(errno(&error))
        })?;
        let options = Options {
            // Its writer is idle, because the workers write the contents.
            writers: Some(1),
            xattrs: self.xattrs.clone(),
            ..Options::for_this_user()
        };
        let problems = Problems::new(Some(Arc::new(LogReporter)));
        let root_directory = self.directory.root().map_err(|errno| Error::Destination {
            path: self.directory.path.clone(),
            errno,
        })?;
        let materializer =
            Materializer::start(root_directory, problems, options, Arc::clone(stats))?;
        Ok(CopyTask {
            plan: CopyPlan::new(index, root),
            index: Arc::clone(index),
            root,
            read,
            ledger,
            context: materializer.context.fork(),
            complete,
            requested: BitSet::new(last),
            claimed: BitSet::new(last),
            counted: BitSet::new(last),
            priority_files: Mutex::default(),
            next_name: Mutex::default(),
            materializer: Mutex::new(Some(materializer)),
            files: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        })
    }

    /// Whether [`open_copy`](Self::open_copy) may succeed. Does not access the disk.
    pub fn is_complete(&self, ino: Ino) -> bool {
        self.task
            .get()
            .is_some_and(|task| task.complete.contains(ino.0))
    }

    /// Opens the copy of file `ino` if it is complete and unchanged.
    ///
    /// Its content starts at offset 0, and its holes are holes.
    pub fn open_copy(&self, ino: Ino) -> Option<File> {
        let task = self.task.get()?;
        if !task.complete.contains(ino.0) {
            return None;
        }
        let entry = task.index.entry(ino)?;
        let path = task
            .plan
            .path(&task.index, task.plan.names_of(ino).first()?)?;
        match self.open_verified(task, entry, &path) {
            Ok(Some((file, record))) if task.ledger.is_recent(&record) => Some(file.into()),
            Err(error) => {
                tracing::debug!(%error, %path, "cannot open the copy of a file");
                None
            }
            Ok(_) => {
                if task.complete.remove(ino.0) {
                    self.record_change(task, entry, &path);
                }
                None
            }
        }
    }

    /// Moves file `ino` to the front.
    pub fn prioritize(&self, ino: Ino) {
        let Some(task) = self.task.get() else {
            return;
        };
        if task.complete.contains(ino.0)
            || task.claimed.contains(ino.0)
            || !task.requested.insert(ino.0)
        {
            return;
        }
        let mut priority_files = lock(&task.priority_files);
        if priority_files.len() < MAX_PRIORITY_FILES {
            priority_files.push_back(ino);
        }
    }

    /// Progress of the copy.
    pub fn progress(&self) -> BackgroundCopyProgress {
        let task = self.task.get();
        let report = lock(&self.report);
        BackgroundCopyProgress {
            state: report.state,
            files: task.map_or(0, |task| task.files.load(Ordering::Relaxed)),
            total_files: task.map_or(0, |task| task.plan.files),
            bytes: task.map_or(0, |task| task.bytes.load(Ordering::Relaxed)),
            total_bytes: task.map_or(0, |task| task.plan.bytes),
            failures: report.failures,
            note: report.note.clone(),
        }
    }

    /// Stops the copy, without finishing the files in progress.
    pub fn cancel(&self) {
        self.cancel_token.cancel();
    }

    /// Runs the copy's main thread.
    fn run(self: &Arc<Self>, task: &CopyTask) {
        self.set_state(CopyState::Writing, None);
        if self.make_directories(task).is_break() {
            return;
        }
        self.write_all(task);
        if self.cancel_token.is_cancelled() {
            return;
        }
        // Existing directories get their attributes even if some entries could not be written.
        let materializer = lock(&task.materializer).take();
        let finished = materializer.map(Materializer::finish);
        match finished {
            Some(Err(error)) => self.halt(&error),
            Some(Ok(summary)) => {
                self.finish_report(summary.errors + task.context.problems.count());
            }
            None => {}
        }
    }

    /// Reports the end of the copy. `errors` counts all entries, directories included.
    fn finish_report(&self, errors: u64) {
        let mut report = lock(&self.report);
        if report.state == CopyState::Stopped {
            return;
        }
        report.failures = report.failures.max(errors);
        report.state = if report.failures == 0 {
            report.note = None;
            CopyState::Complete
        } else {
            CopyState::Incomplete
        };
        tracing::info!(directory = %self.directory.path.display(), state = ?report.state, "the copy has ended");
    }

    fn make_directories(&self, task: &CopyTask) -> ControlFlow<()> {
        let mut materializer = lock(&task.materializer);
        let Some(materializer) = materializer.as_mut() else {
            return ControlFlow::Break(());
        };
        let root = task.index.entry(task.root);
        if let Some(root) = root.filter(|root| !plan::is_implied(*root)) {
            materializer.begin_member(member_of(root), output_path(ArchivePath::root()));
        }
        for &ino in &task.plan.directories {
            if self.cancel_token.is_cancelled() {
                return ControlFlow::Break(());
            }
            let path = task.plan.directory(&task.index, ino);
            if let (Some(entry), Some(path)) = (task.index.entry(ino), path) {
                materializer.begin_member(member_of(entry), output_path(path.clone()));
                materializer.grant_owner_access(&path);
            } else {
                self.record_failure(Some(CORRUPT_INDEX.to_owned()));
            }
            self.check_stop(task)?;
        }
        ControlFlow::Continue(())
    }

    /// Writes all entries, with as many threads as suit the file system.
    fn write_all(self: &Arc<Self>, task: &CopyTask) {
        let count = self
            .directory
            .root()
            .map_or(1, |root| fs_type::default_writer_count(root.top()));
        let spawn = |number| {
            let background = Arc::clone(self);
            Thread::spawn(&format!("copy-{number}"), move || {
                if let Some(task) = background.task.get() {
                    background.run_worker(task);
                }
            })
        };
        // If the system cannot start more threads, fewer are enough.
        let workers: Vec<_> = (1..count).map_while(|number| spawn(number).ok()).collect();
        self.run_worker(task);
        drop(workers);
    }

    /// Runs a worker.
    fn run_worker(&self, task: &CopyTask) {
        while !self.cancel_token.is_cancelled() {
            let next = lock(&task.priority_files).pop_front();
            if let Some(ino) = next {
                if self
                    .ensure_written(task, task.plan.names_of(ino))
                    .is_break()
                {
                    return;
                }
                continue;
            }
            let batch = {
                let mut next = lock(&task.next_name);
                let batch = task.plan.batch(&task.index, *next);
                *next = batch.end;
                batch
            };
            if batch.is_empty() || self.write_batch(task, batch).is_break() {
                return;
            }
        }
    }

    fn write_batch(&self, task: &CopyTask, batch: Range<usize>) -> ControlFlow<()> {
        let mut place = batch.start;
        while place < batch.end {
            let names = task.plan.names_at(place);
            self.ensure_written(task, names)?;
            place += names.len().max(1);
        }
        ControlFlow::Continue(())
    }

    /// Makes the entry of these `names`, unless it is claimed or exists.
    fn ensure_written(&self, task: &CopyTask, names: &[Name]) -> ControlFlow<()> {
        let Some(first) = names.first() else {
            return ControlFlow::Continue(());
        };
        if !task.claimed.insert(first.ino.0) {
            return ControlFlow::Continue(());
        }
        let paths = names.iter().map(|name| task.plan.path(&task.index, name));
        let paths: Vec<_> = paths.flatten().collect();
        let (Some(entry), Some(path), true) = (
            task.index.entry(first.ino),
            paths.first(),
            paths.len() == names.len(),
        ) else {
            self.record_failure(Some(CORRUPT_INDEX.to_owned()));
            return ControlFlow::Continue(());
        };
        if self.is_already_written(task, entry, path) {
            task.count_complete(entry);
            return self.check_stop(task);
        }
        task.complete.remove(first.ino.0);
        let mut delay = MIN_RETRY_DELAY;
        loop {
            if self.cancel_token.is_cancelled() {
                return ControlFlow::Break(());
            }
            match self.create_entry(task, entry, &paths) {
                Ok(()) => {
                    task.count_complete(entry);
                    return self.check_stop(task);
                }
                Err(Failure::Recorded) => {
                    self.record_failure(None);
                    return self.check_stop(task);
                }
                Err(Failure::Ledger(error)) => {
                    self.halt(&error);
                    return ControlFlow::Break(());
                }
                Err(Failure::Cancelled) => return ControlFlow::Break(()),
                Err(Failure::Read(
                    ReadError::Unreachable(error)
                    | ReadError::TimedOut(error)
                    | ReadError::AccessDenied(error)
                    | ReadError::NotFound(error),
                )) => {
                    let why = format!("the archive cannot be reached: {error}");
                    self.set_state(CopyState::Retrying, Some(why));
                    if self.cancel_token.wait_timeout(delay) {
                        return ControlFlow::Break(());
                    }
                    self.set_state(CopyState::Writing, None);
                    delay = MAX_RETRY_DELAY.min(delay * 2);
                }
                Err(Failure::Read(error @ ReadError::Changed(_))) => {
                    self.halt(&error);
                    return ControlFlow::Break(());
                }
                Err(Failure::Read(error)) => {
                    self.record_failure(Some(format!("{path}: {error}")));
                    return ControlFlow::Continue(());
                }
            }
        }
    }

    /// Whether an earlier mount has completed the entry.
    fn is_already_written(&self, task: &CopyTask, entry: Entry<'_>, path: &ArchivePath) -> bool {
        let Ok(Some((found, record))) = self.open_verified(task, entry, path) else {
            return false;
        };
        if task.ledger.is_recent(&record) {
            return true;
        }
        // After a reboot, the content must have the recorded hash.
        let is_same = entry.kind() == Kind::File
            && member_of(entry).sparse.is_none()
            && self.hash(&found) == Some(record.hash);
        let stat = fstat(&found).ok().filter(|stat| record.matches(stat));
        let Some(stat) = stat.filter(|_| is_same) else {
            return false;
        };
        task.ledger.put(entry.ino().0, &stat, record.hash).is_ok()
    }

    /// Opens the entry if it matches its record in the ledger.
    ///
    /// # Errors
    /// When this process or the system has no descriptor or memory left. That says nothing about
    /// the entry.
    fn open_verified(
        &self,
        task: &CopyTask,
        entry: Entry<'_>,
        path: &ArchivePath,
    ) -> Result<Option<(OwnedFd, Record)>, Errno> {
        let Some(record) = task.ledger.get(entry.ino().0) else {
            return Ok(None);
        };
        let wants_file = entry.kind() == Kind::File;
        let found = match self.directory.open_entry(path, wants_file) {
            Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => return Err(error),
            Err(_) => return Ok(None),
            Ok(found) => found,
        };
        let Ok(stat) = fstat(&found) else {
            return Ok(None);
        };
        let is_unchanged = record.matches(&stat) && is_file(&stat) == wants_file;
        Ok(is_unchanged.then_some((found, record)))
    }

    /// xxh3-64 of a file without holes. `None` when it cannot be read, or the copy is cancelled.
    fn hash(&self, file: &OwnedFd) -> Option<u64> {
        let file = File::from(file.try_clone().ok()?);
        let mut hasher = Xxh3Default::new();
        let mut buffer = vec![0; HASH_BUFFER_BYTES];
        let mut offset = 0;
        while !self.cancel_token.is_cancelled() {
            let len = match file.read_at(&mut buffer, offset) {
                Ok(0) => return Some(hasher.digest()),
                Ok(len) => len,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(_) => return None,
            };
            hasher.update(buffer.get(..len)?);
            offset += len as u64;
        }
        None
    }

    /// Makes an entry with all its `paths` and records that it is complete.
    fn create_entry(
        &self,
        task: &CopyTask,
        entry: Entry<'_>,
        paths: &[ArchivePath],
    ) -> Result<(), Failure> {
        let (path, more) = paths.split_first().ok_or(Failure::Recorded)?;
        let (file, hash) = if entry.kind() == Kind::File {
            let (file, hash) = self.write_file(task, entry, path)?;
            (Some(file), hash)
        } else {
            task.create_node(member_of(entry), path)?;
            (None, 0)
        };
        for other in more {
            let link = tar::Kind::HardLink(path.as_bytes().to_vec());
            let link = tar::Member {
                kind: link,
                xattrs: Vec::new(),
                ..member_of(entry)
            };
            task.create_node(link, other)?;
        }
        let made = match file {
            Some(file) => Ok(file),
            None => self.directory.open_entry(path, false),
        };
        // If another process has already removed it, it is reported as a failure.
        let stat = made.and_then(fstat).map_err(|_| Failure::Recorded)?;
        let number = entry.ino().0;
        task.ledger.put(number, &stat, hash).map_err(|error| {
            let ledger_error = self
                .directory
                .ledger_error("write the record of complete files");
            Failure::Ledger(ledger_error(errno(&error)))
        })?;
        task.complete.insert(number);
        Ok(())
    }

    /// Writes a file with its attributes, under its first name. Removes it if it is incomplete.
    ///
    /// Returns the file and the hash of its stored bytes.
    fn write_file(
        &self,
        task: &CopyTask,
        entry: Entry<'_>,
        path: &ArchivePath,
    ) -> Result<(OwnedFd, u64), Failure> {
        let directory = task.parent_directory(path)?;
        let job = Job {
            number: 0,
            directory: directory.clone(),
            path: path.clone(),
            name: None,
            member: Box::new(member_of(entry)),
        };
        let file = FileWriter::create(job, &task.context, || ()).ok_or(Failure::Recorded)?;
        let mut unfinished = RemoveUnlessFinished {
            directory: &directory,
            path,
            is_finished: false,
        };
        let written = self.write_contents(task, entry, file);
        unfinished.is_finished = written.is_ok();
        written
    }

    fn write_contents(
        &self,
        task: &CopyTask,
        entry: Entry<'_>,
        mut file: FileWriter,
    ) -> Result<(OwnedFd, u64), Failure> {
        let mut hasher = Xxh3Default::new();
        for piece in entry.pieces(0, u64::MAX) {
            let mut done = 0;
            while done < piece.plain.len() {
                if self.cancel_token.is_cancelled() {
                    return Err(Failure::Cancelled);
                }
                let len = read_len(&task.index, &piece, done);
                let bytes =
                    (task.read)(entry.ino(), piece.offset + done, len).map_err(Failure::Read)?;
                if bytes.is_empty() {
                    return Err(Failure::Read(ReadError::Index));
                }
                hasher.update(&bytes);
                done += bytes.len() as u64;
                file = file.write(&bytes, &task.context).ok_or(Failure::Recorded)?;
            }
        }
        let file = file.finish(false, &task.context).ok_or(Failure::Recorded)?;
        Ok((file, hasher.digest()))
    }

    /// Reports a complete file that was changed.
    fn record_change(&self, task: &CopyTask, entry: Entry<'_>, path: &ArchivePath) {
        if task.counted.remove(entry.ino().0) {
            task.files.fetch_sub(1, Ordering::Relaxed);
            let bytes = entry.stored_bytes();
            task.bytes.fetch_sub(bytes, Ordering::Relaxed);
            let what = format!("{path}: was changed in the copy, and is served from the archive");
            self.record_failure(Some(what));
            let mut report = lock(&self.report);
            if report.state == CopyState::Complete {
                report.state = CopyState::Incomplete;
            }
        }
    }

    /// Whether the copy must stop.
    fn check_stop(&self, task: &CopyTask) -> ControlFlow<()> {
        match task.context.problems.fatal() {
            Some(error) => {
                self.halt(error);
                ControlFlow::Break(())
            }
            None if self.cancel_token.is_cancelled() => ControlFlow::Break(()),
            None => ControlFlow::Continue(()),
        }
    }

    /// Stops the copy and reports the error once.
    fn halt(&self, error: &dyn std::error::Error) {
        let mut report = lock(&self.report);
        if report.state == CopyState::Stopped {
            return;
        }
        let why = error_chain(error);
        let directory = self.directory.path.display();
        tracing::error!(%directory, why, "the copy is stopped");
        report.state = CopyState::Stopped;
        report.note = Some(why);
    }

    fn record_failure(&self, what: Option<String>) {
        let mut report = lock(&self.report);
        report.failures += 1;
        if let Some(what) = what {
            tracing::warn!(what, "missing from the copy");
            // The reason for stopping stays the final note.
            if report.state != CopyState::Stopped {
                report.note = Some(what);
            }
        }
    }

    fn set_state(&self, state: CopyState, note: Option<String>) {
        let mut report = lock(&self.report);
        if report.state != CopyState::Stopped {
            report.state = state;
            report.note = note.or(report.note.take().filter(|_| report.failures > 0));
        }
    }
}

impl Drop for RunningCopy {
    /// Cancels the copy. The thread's own drop waits for its end.
    fn drop(&mut self) {
        self.background.cancel();
    }
}

impl CopyTask {
    /// Marks an entry as complete.
    fn count_complete(&self, entry: Entry<'_>) {
        self.complete.insert(entry.ino().0);
        if self.counted.insert(entry.ino().0) && entry.kind() == Kind::File {
            self.files.fetch_add(1, Ordering::Relaxed);
            self.bytes
                .fetch_add(entry.stored_bytes(), Ordering::Relaxed);
        }
    }

    /// The parent directory of `path`, made if it is missing.
    fn parent_directory(&self, path: &ArchivePath) -> Result<Directory, Failure> {
        let mut materializer = lock(&self.materializer);
        let materializer = materializer.as_mut().ok_or(Failure::Cancelled)?;
        materializer
            .parent_directory_of(path)
            .ok_or(Failure::Recorded)
    }

    /// Makes an entry that is not a regular file.
    fn create_node(&self, member: tar::Member, path: &ArchivePath) -> Result<(), Failure> {
        let mut materializer = lock(&self.materializer);
        let materializer = materializer.as_mut().ok_or(Failure::Cancelled)?;
        let context = Arc::clone(&materializer.context);
        // The lock ensures that no other thread adds problems meanwhile.
        let before = context.problems.count();
        materializer.begin_member(member, output_path(path.clone()));
        let has_succeeded =
            context.problems.count() == before && context.problems.fatal().is_none();
        has_succeeded.then_some(()).ok_or(Failure::Recorded)
    }
}

impl Materializer {
    /// The parent directory of `path`, made if it is missing; `None` after a reported error.
    fn parent_directory_of(&mut self, path: &ArchivePath) -> Option<Directory> {
        self.root.invalidate(path.as_bytes());
        let parent =
            self.root
                .resolve_directory(parent_of(path), IfMissing::Create, &mut self.writers);
        match parent {
            Ok(directory) => Some(directory),
            Err(error) => {
                self.record_unreachable(path, &error, 0);
                None
            }
        }
    }

    /// Adds owner access to a directory that an earlier mount made read-only. Its final mode is set at the
    /// end.
    fn grant_owner_access(&mut self, path: &ArchivePath) {
        const OWNER_RWX: u32 = 0o700;
        let parent =
            self.root
                .resolve_directory(parent_of(path), IfMissing::Fail, &mut self.writers);
        let Ok(parent) = parent else {
            return;
        };
        if let Ok(stat) = lstat_at(&parent, name_of(path))
            && stat.st_mode & OWNER_RWX != OWNER_RWX
        {
            let directory = AttributeTarget::Name(parent.as_fd(), name_of(path));
            // If chmod(2) is not permitted, making an entry in the directory reports the error.
            directory.chmod(stat.st_mode & 0o7777 | OWNER_RWX).ok();
        }
    }
}

/// Removes a new file on drop unless it is finished, even after a panic.
struct RemoveUnlessFinished<'a> {
    directory: &'a Directory,
    path: &'a ArchivePath,
    is_finished: bool,
}

impl Drop for RemoveUnlessFinished<'_> {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        let name = name_of(self.path);
        if let Err(errno) = rustix::fs::unlinkat(self.directory, name, AtFlags::empty()) {
            tracing::warn!(path = %self.path, %errno, "cannot remove an incomplete file");
        }
    }
}

/// Reason why an entry is missing or not recorded.
#[derive(Debug)]
enum Failure {
    /// The reason was already reported as a problem.
    Recorded,
    /// Reading from the archive failed.
    Read(ReadError),
    /// The entry exists, but its record could not be written.
    Ledger(Error),
    /// The copy was cancelled.
    Cancelled,
}

/// Writes problems and warnings to the log.
#[derive(Debug)]
struct LogReporter;

impl Reporter for LogReporter {
    fn problem(&self, problem: &Problem) {
        tracing::warn!(%problem, "missing from the copy");
    }

    fn warning(&self, text: &str) {
        tracing::warn!(text, "problem in the copy");
    }
}

/// Size of the next read of `piece` after `done` bytes.
fn read_len(index: &Index, piece: &Piece, done: u64) -> u32 {
    let left = piece.plain.len().saturating_sub(done);
    let here = crate::base::extent::Plain(piece.plain.start().0.saturating_add(done));
    let span = index
        .span_at(here)
        .and_then(|number| index.span_extent(number));
    let in_span = span.map_or(left, |span| span.end().0.saturating_sub(here.0));
    u32::try_from(left.min(in_span).clamp(1, MAX_READ_BYTES)).unwrap_or(u32::MAX)
}

/// Hash that identifies the copied tree: archive, `root`, and the attributes that `xattrs` selects.
fn tree_hash(index: &Index, root: Ino, xattrs: &XattrFilter) -> u128 {
    let origin = index.origin();
    let mut hasher = Xxh3Default::new();
    hasher.update(&index::format::VERSION.to_le_bytes());
    hasher.update(&root.0.to_le_bytes());
    hasher.update(&index.last_ino().0.to_le_bytes());
    hasher.update(&index.entry_count().to_le_bytes());
    hasher.update(&origin.plain_bytes.to_le_bytes());
    hasher.update(&origin.content_id);
    if origin.content_id == [0; 32] {
        for number in 0..index.span_count() {
            let hash = index.span(number).and_then(|span| span.hash);
            hasher.update(&hash.unwrap_or_default().to_le_bytes());
        }
        if !index.is_hashed() {
            // Without content hashes, the source has a strong version identifier.
            hasher.update(origin.locator.canonical.as_bytes());
            hasher.update(origin.locator.fingerprint.as_bytes());
        }
    }
    if *xattrs != XattrFilter::default() {
        hasher.update(format!("{xattrs:?}").as_bytes());
    }
    hasher.digest128()
}

/// Number that identifies the current boot. If the system has no boot ID, it identifies this process.
fn this_boot_id() -> u64 {
    let boot_id = super::resume::sidecar::boot_id();
    if boot_id.is_empty() {
        use std::hash::BuildHasher;
        return std::hash::RandomState::new().hash_one(std::process::id());
    }
    xxh3_64(&boot_id)
}

/// An error and its causes in one line.
fn error_chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", error_chain(cause)),
        None => error.to_string(),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

#[cfg(test)]
mod tests;
