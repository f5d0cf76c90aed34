//! Writes the tree of a copy: directories first, then files and other entries by several threads.

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::ops::{ControlFlow, Range};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use rustix::fs::{AtFlags, fstat};
use rustix::io::Errno;
use xxhash_rust::xxh3::Xxh3Default;

use super::bit_set::BitSet;
use super::directory::is_file;
use super::ledger::{Ledger, LedgerRow};
use super::status::{CopyState, CopyStatus};
use crate::archive::scan::{PayloadEnd, Sink};
use crate::archive::{ReadError, TreePart, Volume};
use crate::base::archive_path::ArchivePath;
use crate::base::descriptor_limit::is_descriptor_limit;
use crate::base::extent::Plain;
use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::base::thread::Thread;
use crate::base::xattr::filter::XattrFilter;
use crate::index::{Entry, EntryKind, Index, Ino};
use crate::materialize::copy_plan::{CopyPlan, Name};
use crate::materialize::entry_reader::{EntryError, EntryReader, check_names, link_to};
use crate::materialize::error::{Error, Problem, Problems, Reporter, errno_of};
use crate::materialize::materializer::Materializer;
use crate::materialize::options::Options;
use crate::materialize::write::{
    Context, Directory, FileWriter, Job, default_writer_count, member_of, name_of,
};
use crate::tar::{Member, MemberKind};

const HASH_BUFFER_BYTES: usize = 1 << 20;
/// Maximum number of files queued ahead of their turn.
const MAX_PRIORITY_FILES: usize = 1024;
const CORRUPT_INDEX: &str = "the index is inconsistent; delete it and mount again";
/// Delay before retrying an unreachable source. It doubles from the minimum to the maximum.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_RETRY_DELAY: Duration = Duration::from_mins(1);

pub(super) struct CopyTask {
    status: Arc<CopyStatus>,
    index: Arc<Index>,
    root: Ino,
    volume: Arc<dyn Volume>,
    pub(super) ledger: Ledger,
    pub(super) plan: CopyPlan,
    context: Context,
    /// Entries that can be opened in the copy.
    pub(super) complete: BitSet,
    requested: BitSet,
    claimed: BitSet,
    /// Entries counted as complete. `files` and `bytes` count the files among them.
    counted: BitSet,
    /// Has its own lock, because requests of the mount take it.
    priority_files: Mutex<VecDeque<Ino>>,
    /// Position in the plan of the next unclaimed batch.
    next_name: Mutex<usize>,
    materializer: Mutex<Option<Materializer>>,
    pub(super) files: AtomicU64,
    pub(super) bytes: AtomicU64,
}

impl CopyTask {
    /// Prepares the copy below `root`. Entries in the `ledger` are complete.
    pub(super) fn new(
        status: &Arc<CopyStatus>,
        index: &Arc<Index>,
        root: Ino,
        volume: Arc<dyn Volume>,
        ledger: Ledger,
        xattrs: &XattrFilter,
        stats: &Arc<Stats>,
    ) -> Result<Self, Error> {
        let directory = &status.directory;
        let last = index.last_ino().0;
        let complete = BitSet::new(last);
        let known = ledger.for_each_recent(last, |number| {
            complete.insert(number);
        });
        known.map_err(|error| {
            directory.ledger_error("read the list of complete files")(errno_of(&error))
        })?;
        let options = Options {
            // Its writer is idle, because the copy threads write the contents.
            writers: Some(1),
            xattrs: xattrs.clone(),
            ..Options::for_this_user()
        };
        let problems = Problems::new(Some(Arc::new(LogReporter)));
        let top = directory
            .destination()
            .map_err(|errno| Error::Destination(directory.path.clone(), errno))?;
        let materializer = Materializer::start(top, problems, options.clone(), Arc::clone(stats))?;
        // The copy threads' problems are counted separately. A fatal error of one stops both.
        let shared = &materializer.tree.context;
        let context = Context {
            replacements: Arc::clone(&shared.replacements),
            ..Context::new(&options, shared.problems.fork(), Arc::clone(stats))
        };
        Ok(Self {
            status: Arc::clone(status),
            plan: CopyPlan::new(index, root),
            index: Arc::clone(index),
            root,
            volume,
            ledger,
            context,
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

    /// As `BackgroundCopy::open_copy`.
    pub(super) fn open_copy(&self, ino: Ino) -> Option<File> {
        if !self.complete.contains(ino.0) {
            return None;
        }
        let entry = self.index.entry(ino)?;
        let name = self.plan.names_of(ino).first()?;
        let path = self.plan.path(&self.index, name)?;
        match self.open_verified(entry, &path) {
            Ok(Some((file, row))) if self.ledger.is_recent(&row) => Some(file.into()),
            Err(error) => {
                tracing::debug!(%error, %path, "cannot open the copy of a file");
                None
            }
            Ok(_) => {
                if self.complete.remove(ino.0) {
                    self.record_change(entry, &path);
                }
                None
            }
        }
    }

    pub(super) fn prioritize(&self, ino: Ino) {
        if self.complete.contains(ino.0)
            || self.claimed.contains(ino.0)
            || !self.requested.insert(ino.0)
        {
            return;
        }
        let mut priority_files = self.priority_files.lock();
        if priority_files.len() < MAX_PRIORITY_FILES {
            priority_files.push_back(ino);
        }
    }

    pub(super) fn run(self: &Arc<Self>) {
        self.status.set_state(CopyState::Writing, None);
        if check_names::<Failure>(&*self.volume, &self.index).is_err() {
            self.status.halt(&ReadError::Index);
            return;
        }
        if self.make_directories().is_break() {
            return;
        }
        self.write_all();
        if self.status.cancel_token.is_cancelled() {
            return;
        }
        // Existing directories get their attributes even if some entries could not be written.
        let materializer = self.materializer.lock().take();
        match materializer.map(Materializer::finish) {
            Some(Err(error)) => self.status.halt(&error),
            Some(Ok(summary)) => {
                let errors = summary.errors + self.context.problems.count();
                self.status.finish(errors);
            }
            None => {}
        }
    }

    fn make_directories(&self) -> ControlFlow<()> {
        // Before the lock is held, because it may wait for the source.
        let mut refused = HashSet::new();
        for &ino in std::iter::once(&self.root).chain(&self.plan.directories) {
            let path = || self.plan.directory(&self.index, ino).unwrap_or_default();
            if !self.compare_directory(ino, path)? {
                refused.insert(ino);
            }
        }
        let mut materializer = self.materializer.lock();
        let Some(Materializer { tree, .. }) = materializer.as_mut() else {
            return ControlFlow::Break(());
        };
        let root = self.index.entry(self.root);
        let root = root.filter(|root| !root.is_implied());
        if let Some(root) = root
            && !refused.contains(&self.root)
        {
            tree.begin_member(member_of(root), ArchivePath::root());
        }
        for &ino in &self.plan.directories {
            if self.status.cancel_token.is_cancelled() {
                return ControlFlow::Break(());
            }
            let path = self.plan.directory(&self.index, ino);
            if refused.contains(&ino) {
                continue;
            }
            if let (Some(entry), Some(path)) = (self.index.entry(ino), path) {
                tree.begin_member(member_of(entry), path.clone());
                tree.grant_owner_access(&path);
            } else {
                self.status.record_failure(Some(CORRUPT_INDEX.to_owned()));
            }
            self.check_stop()?;
        }
        ControlFlow::Continue(())
    }

    /// Writes all entries, with as many threads as suit the file system.
    fn write_all(self: &Arc<Self>) {
        let count = default_writer_count(&self.status.directory.top);
        let spawn = |number| {
            let task = Arc::clone(self);
            Thread::spawn(&format!("tarfs-copy-{number}"), move || {
                task.run_copy_thread();
            })
        };
        // If the system cannot start more threads, fewer are enough.
        let threads: Vec<_> = (1..count).map_while(|number| spawn(number).ok()).collect();
        self.run_copy_thread();
        drop(threads);
    }

    fn run_copy_thread(&self) {
        while !self.status.cancel_token.is_cancelled() {
            let next = self.priority_files.lock().pop_front();
            if let Some(ino) = next {
                if self.ensure_written(self.plan.names_of(ino)).is_break() {
                    return;
                }
                continue;
            }
            let batch = {
                let mut next = self.next_name.lock();
                let batch = self.plan.batch(&self.index, *next);
                *next = batch.end;
                batch
            };
            if batch.is_empty() || self.write_batch(batch).is_break() {
                return;
            }
        }
    }

    fn write_batch(&self, batch: Range<usize>) -> ControlFlow<()> {
        let mut place = batch.start;
        while place < batch.end {
            let names = self.plan.names_at(place);
            self.ensure_written(names)?;
            place += names.len().max(1);
        }
        ControlFlow::Continue(())
    }

    /// Makes the entry of these `names`, unless it is claimed or exists.
    fn ensure_written(&self, names: &[Name]) -> ControlFlow<()> {
        let Some(first) = names.first().filter(|name| self.claimed.insert(name.ino.0)) else {
            return ControlFlow::Continue(());
        };
        let paths = names.iter().map(|name| self.plan.path(&self.index, name));
        let paths: Vec<_> = paths.flatten().collect();
        let (Some(entry), Some(path), true) = (
            self.index.entry(first.ino),
            paths.first(),
            paths.len() == names.len(),
        ) else {
            self.status.record_failure(Some(CORRUPT_INDEX.to_owned()));
            return ControlFlow::Continue(());
        };
        if self.is_already_written(entry, path) {
            self.count_complete(entry);
            return self.check_stop();
        }
        self.complete.remove(first.ino.0);
        self.write_with_retries(entry, path, (names, &paths))
    }

    /// Retries while the source is unreachable.
    fn write_with_retries(
        &self,
        entry: Entry<'_>,
        path: &ArchivePath,
        (names, paths): (&[Name], &[ArchivePath]),
    ) -> ControlFlow<()> {
        let mut delay = MIN_RETRY_DELAY;
        while !self.status.cancel_token.is_cancelled() {
            match self.create_entry(entry, names, paths) {
                Ok(()) => {
                    self.count_complete(entry);
                    return self.check_stop();
                }
                Err(Failure::Recorded) => {
                    self.status.record_failure(None);
                    return self.check_stop();
                }
                Err(Failure::Ledger(error)) => {
                    self.status.halt(&error);
                    break;
                }
                Err(Failure::Cancelled) => break,
                Err(Failure::Read(error)) => {
                    if self.handle_read_error(&error, path, &mut delay)? {
                        return ControlFlow::Continue(());
                    }
                }
                Err(Failure::Damaged(text)) => {
                    self.status.record_failure(Some(text));
                    return ControlFlow::Continue(());
                }
            }
        }
        ControlFlow::Break(())
    }

    /// Waits until an archive that cannot be reached is asked again. Returns whether the entry at `path` is given up, and
    /// breaks if the copy is.
    fn handle_read_error(
        &self,
        error: &ReadError,
        path: &ArchivePath,
        delay: &mut Duration,
    ) -> ControlFlow<(), bool> {
        match error {
            ReadError::Unreachable(error)
            | ReadError::TimedOut(error)
            | ReadError::AccessDenied(error)
            | ReadError::NotFound(error) => {
                let why = format!("the archive cannot be reached: {error}");
                self.status.set_state(CopyState::Retrying, Some(why));
                if self.status.cancel_token.wait_timeout(*delay) {
                    return ControlFlow::Break(());
                }
                self.status.set_state(CopyState::Writing, None);
                *delay = MAX_RETRY_DELAY.min(*delay * 2);
                ControlFlow::Continue(false)
            }
            ReadError::Changed(_) | ReadError::Memory(_) => {
                self.status.halt(error);
                ControlFlow::Break(())
            }
            error => {
                self.status.record_failure(Some(format!("{path}: {error}")));
                ControlFlow::Continue(true)
            }
        }
    }

    /// Compares a directory with the archive. Returns whether it is made.
    fn compare_directory(&self, ino: Ino, path: impl Fn() -> ArchivePath) -> ControlFlow<(), bool> {
        let mut delay = MIN_RETRY_DELAY;
        loop {
            let Err(error) = self.volume.compare_blocking(TreePart::Entry(ino)) else {
                return ControlFlow::Continue(true);
            };
            if self.handle_read_error(&error, &path(), &mut delay)? {
                return ControlFlow::Continue(false);
            }
        }
    }

    /// Whether an earlier mount has completed the entry.
    fn is_already_written(&self, entry: Entry<'_>, path: &ArchivePath) -> bool {
        let Ok(Some((found, row))) = self.open_verified(entry, path) else {
            return false;
        };
        if self.ledger.is_recent(&row) {
            return true;
        }
        // After a reboot, the content must have the recorded hash.
        let is_same = entry.kind() == EntryKind::File
            && member_of(entry).sparse.is_none()
            && self.hash(&found) == Some(row.hash);
        let stat = fstat(&found).ok().filter(|stat| row.matches(stat));
        let Some(stat) = stat.filter(|_| is_same) else {
            return false;
        };
        self.ledger.put(entry.ino().0, &stat, row.hash).is_ok()
    }

    /// Opens the entry if it matches its row in the ledger. Fails when descriptors or memory run out.
    fn open_verified(
        &self,
        entry: Entry<'_>,
        path: &ArchivePath,
    ) -> Result<Option<(OwnedFd, LedgerRow)>, Errno> {
        let Some(row) = self.ledger.get(entry.ino().0) else {
            return Ok(None);
        };
        let wants_file = entry.kind() == EntryKind::File;
        let found = match self.status.directory.open_entry(path, wants_file) {
            Err(error) if error == Errno::NOMEM || is_descriptor_limit(&error) => {
                return Err(error);
            }
            Err(_) => return Ok(None),
            Ok(found) => found,
        };
        let Ok(stat) = fstat(&found) else {
            return Ok(None);
        };
        let is_unchanged = row.matches(&stat) && is_file(&stat) == wants_file;
        Ok(is_unchanged.then_some((found, row)))
    }

    /// xxh3-64 of a file without holes; `None` when unreadable, or the copy is cancelled.
    fn hash(&self, file: &OwnedFd) -> Option<u64> {
        let file = File::from(file.try_clone().ok()?);
        let mut hasher = Xxh3Default::new();
        let mut buffer = vec![0; HASH_BUFFER_BYTES];
        let mut offset = 0;
        while !self.status.cancel_token.is_cancelled() {
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

    /// Makes an entry with all its `paths`, and records it as complete.
    fn create_entry(
        &self,
        entry: Entry<'_>,
        names: &[Name],
        paths: &[ArchivePath],
    ) -> Result<(), Failure> {
        for (name, path) in names.iter().zip(paths) {
            let last = path.split_last().map(|(_, last)| last);
            let part = TreePart::Name(name.parent, last.unwrap_or_default());
            self.volume.compare_blocking(part).map_err(Failure::Read)?;
        }
        let (path, more) = paths.split_first().ok_or(Failure::Recorded)?;
        let mut sink = CopySink::new(self, path);
        let mut reader = EntryReader::on_this_thread(&*self.volume, &self.index);
        let read = reader.read_entry(entry, path, &mut sink);
        read.map_err(|error| match error {
            EntryError::Sink(failure) => failure,
            EntryError::Read(_, error) => Failure::Read(error),
        })?;
        let (file, hash) = (sink.made.take(), sink.hash());
        drop(sink);
        for other in more {
            self.create_node(link_to(entry, path, other), other)?;
        }
        // A cut file stays, and is served from the archive.
        let hash = hash.ok_or(Failure::Recorded)?;
        let made = match file {
            Some(file) => Ok(file),
            None => self.status.directory.open_entry(path, false),
        };
        // An entry that another process has removed already is a failure.
        let stat = made.and_then(fstat).map_err(|_| Failure::Recorded)?;
        let number = entry.ino().0;
        self.ledger.put(number, &stat, hash).map_err(|error| {
            let directory = &self.status.directory;
            let ledger_error = directory.ledger_error("write the list of complete files");
            Failure::Ledger(ledger_error(errno_of(&error)))
        })?;
        self.complete.insert(number);
        Ok(())
    }

    fn record_change(&self, entry: Entry<'_>, path: &ArchivePath) {
        if self.counted.remove(entry.ino().0) {
            self.files.fetch_sub(1, Ordering::Relaxed);
            let bytes = entry.stored_bytes();
            self.bytes.fetch_sub(bytes, Ordering::Relaxed);
            let what = format!("{path}: was changed in the copy, and is served from the archive");
            self.status.record_failure(Some(what));
            let mut report = self.status.report.lock();
            if report.state == CopyState::Complete {
                report.state = CopyState::Incomplete;
            }
        }
    }

    fn check_stop(&self) -> ControlFlow<()> {
        match self.context.problems.fatal() {
            Some(error) => {
                self.status.halt(error);
                ControlFlow::Break(())
            }
            None if self.status.cancel_token.is_cancelled() => ControlFlow::Break(()),
            None => ControlFlow::Continue(()),
        }
    }

    fn count_complete(&self, entry: Entry<'_>) {
        self.complete.insert(entry.ino().0);
        if self.counted.insert(entry.ino().0) && entry.kind() == EntryKind::File {
            self.files.fetch_add(1, Ordering::Relaxed);
            self.bytes
                .fetch_add(entry.stored_bytes(), Ordering::Relaxed);
        }
    }

    fn create_node(&self, member: Member, path: &ArchivePath) -> Result<(), Failure> {
        let mut materializer = self.materializer.lock();
        let tree = &mut materializer.as_mut().ok_or(Failure::Cancelled)?.tree;
        // The lock ensures that no other thread adds problems meanwhile.
        let before = tree.context.problems.count();
        tree.begin_member(member, path.clone());
        let problems = &tree.context.problems;
        let has_succeeded = problems.count() == before && problems.fatal().is_none();
        has_succeeded.then_some(()).ok_or(Failure::Recorded)
    }
}

/// Writes one entry under its first name. Removes a file that is incomplete, even after a panic. One that the end of a
/// truncated archive cuts stays with its available bytes.
struct CopySink<'a> {
    task: &'a CopyTask,
    path: &'a ArchivePath,
    /// The directory of a file that is not finished.
    unfinished: Option<Directory>,
    file: Option<FileWriter>,
    hasher: Xxh3Default,
    is_cut: bool,
    made: Option<OwnedFd>,
    damage: Option<String>,
}

impl<'a> CopySink<'a> {
    fn new(task: &'a CopyTask, path: &'a ArchivePath) -> Self {
        Self {
            task,
            path,
            unfinished: None,
            file: None,
            hasher: Xxh3Default::new(),
            is_cut: false,
            made: None,
            damage: None,
        }
    }

    /// Hash of all stored bytes; `None` if some are missing.
    fn hash(&self) -> Option<u64> {
        (!self.is_cut).then(|| self.hasher.digest())
    }
}

impl Sink for CopySink<'_> {
    type Error = Failure;

    fn member(&mut self, member: Member) -> Result<(), Failure> {
        if member.kind != MemberKind::File {
            return self.task.create_node(member, self.path);
        }
        let directory = {
            let mut materializer = self.task.materializer.lock();
            let tree = &mut materializer.as_mut().ok_or(Failure::Cancelled)?.tree;
            let directory = tree.reopen_parent_directory(self.path);
            directory.ok_or(Failure::Recorded)?
        };
        let job = Job::new(directory.clone(), self.path.clone(), member);
        let file = FileWriter::create(job, &self.task.context, || ());
        self.file = Some(file.ok_or(Failure::Recorded)?);
        self.unfinished = Some(directory);
        Ok(())
    }

    fn payload(&mut self, bytes: Bytes) -> Result<(), Failure> {
        if self.task.status.cancel_token.is_cancelled() {
            return Err(Failure::Cancelled);
        }
        self.hasher.update(&bytes);
        let file = self.file.take();
        let written = file.and_then(|file| file.write(&bytes, &self.task.context));
        self.file = Some(written.ok_or(Failure::Recorded)?);
        Ok(())
    }

    fn member_end(&mut self, end: PayloadEnd) -> Result<(), Failure> {
        if end == PayloadEnd::Damaged {
            let damage = self.damage.take();
            return Err(Failure::Damaged(damage.unwrap_or_default()));
        }
        self.is_cut = end == PayloadEnd::Cut;
        if let Some(file) = self.file.take() {
            let made = file.finish(end, &self.task.context);
            self.made = Some(made.ok_or(Failure::Recorded)?);
            self.unfinished = None;
        }
        Ok(())
    }

    fn warning(&mut self, _text: &str) {}

    fn damage(&mut self, _offset: Plain, text: &str) {
        self.damage = Some(text.to_owned());
    }
}

impl Drop for CopySink<'_> {
    fn drop(&mut self) {
        let Some(directory) = self.unfinished.take() else {
            return;
        };
        let name = name_of(self.path);
        if let Err(errno) = rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
            tracing::warn!(path = %self.path, %errno, "cannot remove an incomplete file");
        }
    }
}

/// Reason why an entry is missing or not recorded.
#[derive(Debug)]
enum Failure {
    /// Already reported as a problem.
    Recorded,
    Read(ReadError),
    /// The content of the entry is damaged.
    Damaged(String),
    /// The entry exists, but its row in the ledger could not be written.
    Ledger(Error),
    Cancelled,
}

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
