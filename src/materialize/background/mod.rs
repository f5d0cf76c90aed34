//! A mount's copy on disk: the tree that a scan would have written, made from an index and by reads
//! while the mount serves, and taken up again where the last mount left it.
//!
//! Directories come first, then all other entries in the archive's order, a file that somebody
//! asks for before its turn; owners, modes and times of directories last. A file counts as whole
//! once it has all its names and attributes and the [`Ledger`] says so, and is held against the
//! ledger each time it is opened. The bytes were verified by whoever read them from the archive.

mod bits;
mod ledger;
mod place;
mod plan;
mod stop;

use std::collections::VecDeque;
use std::fs::File;
use std::ops::{ControlFlow, Range};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use rustix::fs::{AtFlags, fstat};
use rustix::io::Errno;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use self::bits::Bits;
use self::ledger::{Ledger, Record};
use self::place::{Place, errno, is_file};
use self::plan::{Name, Plan, placed};

pub(super) use self::plan::member as member_of;
use self::stop::Stop;
use super::attributes::Subject;
use super::context::Context;
use super::file::{Job, OpenFile};
use super::problem::{Error, Problem, Problems, Reporter};
use super::root::{Directory, Missing, name_of, parent_of, status};
use super::{Materializer, Options, XattrFilter, medium};
use crate::archive::ReadError;
use crate::base::archive_path::ArchivePath;
use crate::base::stats::Stats;
use crate::base::thread::Thread;
use crate::index::{self, Entry, Index, Ino, Kind, Piece};
use crate::tar;

/// Stored bytes read at once, at the most; and no further than to the end of their span, which
/// is in memory as a whole.
const READ_BYTES: u64 = 8 << 20;
/// Bytes read at once of what is already written.
const CHECK_BYTES: usize = 1 << 20;
/// Files that wait to be written before their turn; those that come while so many wait have to
/// wait for their turn.
const MOST_WANTED: usize = 1024;
/// What is said of an entry that its own index has no place for.
const CONTRADICTION: &str = "the index contradicts itself; delete it and mount again";
/// How long to wait for a source that cannot be reached: so long at first, then twice as long
/// each time, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_mins(1);

/// Reads a file of the archive: at most so many bytes from an offset on.
pub type Read = Arc<dyn Fn(Ino, u64, u32) -> Result<Bytes, ReadError> + Send + Sync>;

/// The copy of one mount.
pub struct Background {
    place: Place,
    /// Attributes that entries get.
    xattrs: XattrFilter,
    /// Tells one start of the system from another.
    boot: u64,
    stop: Stop,
    work: OnceLock<Work>,
    report: Mutex<Report>,
}

/// What is known once the index is complete.
struct Work {
    index: Arc<Index>,
    root: Ino,
    read: Read,
    ledger: Ledger,
    plan: Plan,
    context: Context,
    /// Entries that can be opened.
    whole: Bits,
    /// Entries that somebody has asked for.
    asked: Bits,
    /// Entries that a worker has taken.
    taken: Bits,
    /// Entries that are among `files` and `bytes`, if they are files.
    counted: Bits,
    /// Files that somebody waits for. A lock of its own, as requests of the mount take it.
    wanted: Mutex<VecDeque<Ino>>,
    /// Where in the plan nobody has been yet.
    next: Mutex<usize>,
    /// Makes all that is not a file, and finds directories.
    placer: Mutex<Option<Materializer>>,
    files: AtomicU64,
    bytes: AtomicU64,
}

/// What the user is told.
#[derive(Debug, Default)]
struct Report {
    state: State,
    /// Entries that are not as they should be.
    failures: u64,
    /// Why the last one is not, why nothing happens, or why nothing will happen any more.
    note: Option<String>,
}

/// How far a copy is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum State {
    /// The index is not complete yet.
    #[default]
    Waiting,
    /// Files are being written, or checked after a restart.
    Writing,
    /// The source cannot be reached; it is tried again.
    Retrying,
    /// Everything is there.
    Complete,
    /// Everything is there that could be written; some entries are missing.
    Incomplete,
    /// Nothing is written any more, because the directory or the source failed.
    Stopped,
}

/// A copy at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Progress {
    /// How far it is.
    pub state: State,
    /// Regular files that are whole.
    pub files: u64,
    /// Regular files there are; 0 before the index is complete.
    pub total_files: u64,
    /// Stored bytes of whole files.
    pub bytes: u64,
    /// Stored bytes of all files.
    pub total_bytes: u64,
    /// Entries that could not be written, or were changed by somebody else.
    pub failures: u64,
    /// What is wrong, in a sentence.
    pub note: Option<String>,
}

/// Writes while it lives.
#[derive(Debug)]
pub struct Running {
    background: Arc<Background>,
    _thread: Thread<()>,
}

impl std::fmt::Debug for Background {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Background")
            .field("place", &self.place)
            .field("progress", &self.progress())
            .finish_non_exhaustive()
    }
}

impl Background {
    /// Takes `directory` for a copy; it is made if it is missing. Its entries get the extended attributes
    /// that `xattrs` selects.
    ///
    /// # Errors
    /// When it cannot be written to, or is not for this: [`Error::Foreign`], [`Error::Taken`].
    pub fn open(directory: &Path, xattrs: XattrFilter) -> Result<Arc<Self>, Error> {
        Ok(Arc::new(Self {
            xattrs,
            ..Self::new(directory)?
        }))
    }

    fn new(directory: &Path) -> Result<Self, Error> {
        Ok(Self {
            place: Place::open(directory)?,
            xattrs: XattrFilter::default(),
            boot: this_boot(),
            stop: Stop::default(),
            work: OnceLock::new(),
            report: Mutex::default(),
        })
    }

    /// Where the copy is: absolute, without symbolic links.
    pub fn directory(&self) -> &Path {
        &self.place.directory
    }

    /// Begins, with a complete `index`, to write what lies below `root`, and goes on until all is
    /// written or the result is dropped. What an earlier mount wrote is there at once. `stats`
    /// counts what is written.
    ///
    /// # Errors
    /// [`Error::Foreign`] when it is another tree that an earlier mount wrote; what the system
    /// says.
    pub fn start(
        self: &Arc<Self>,
        index: &Arc<Index>,
        root: Ino,
        read: Read,
        stats: &Arc<Stats>,
    ) -> Result<Running, Error> {
        let work = self.work(index, root, read, stats);
        let work = work.inspect_err(|error| self.halt(error))?;
        if self.work.set(work).is_err() {
            return Err(Error::Taken {
                path: self.place.directory.clone(),
            });
        }
        let background = Arc::clone(self);
        let thread = Thread::spawn("copy", move || {
            if let Some(work) = background.work.get() {
                background.run(work);
            }
        });
        let thread = thread
            .map_err(|error| Error::Thread(Arc::new(error)))
            .inspect_err(|error| self.halt(error))?;
        Ok(Running {
            background: Arc::clone(self),
            _thread: thread,
        })
    }

    fn work(
        &self,
        index: &Arc<Index>,
        root: Ino,
        read: Read,
        stats: &Arc<Stats>,
    ) -> Result<Work, Error> {
        let identity = identity(index, root, &self.xattrs);
        let ledger = self.place.ledger(identity, self.boot)?;
        let last = index.last_ino().0;
        let whole = Bits::new(last);
        let known = ledger.recent(last, |number| {
            whole.set(number);
        });
        known.map_err(|error| {
            self.place.broken("read the record of what is whole")(errno(&error))
        })?;
        let options = Options {
            // Its writers have nothing to do: contents come from the workers.
            writers: Some(1),
            xattrs: self.xattrs.clone(),
            ..Options::for_this_user()
        };
        let problems = Problems::new(Some(Arc::new(Log)));
        let root_directory = self.place.root().map_err(|errno| Error::Destination {
            path: self.place.directory.clone(),
            errno,
        })?;
        let placer = Materializer::start(root_directory, problems, options, Arc::clone(stats))?;
        Ok(Work {
            plan: Plan::new(index, root),
            index: Arc::clone(index),
            root,
            read,
            ledger,
            context: placer.context.apart(),
            whole,
            asked: Bits::new(last),
            taken: Bits::new(last),
            counted: Bits::new(last),
            wanted: Mutex::default(),
            next: Mutex::default(),
            placer: Mutex::new(Some(placer)),
            files: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        })
    }

    /// Whether [`open_copy`](Self::open_copy) is worth trying; asks no disk.
    pub fn has(&self, ino: Ino) -> bool {
        self.work.get().is_some_and(|work| work.whole.get(ino.0))
    }

    /// The copy of file `ino`, if it is whole and nobody has touched it. Its content starts at
    /// offset 0, and its holes are holes.
    pub fn open_copy(&self, ino: Ino) -> Option<File> {
        let work = self.work.get()?;
        if !work.whole.get(ino.0) {
            return None;
        }
        let entry = work.index.entry(ino)?;
        let path = work
            .plan
            .path(&work.index, work.plan.names_of(ino).first()?)?;
        match self.find(work, entry, &path) {
            Ok(Some((file, record))) if work.ledger.is_recent(&record) => Some(file.into()),
            Err(error) => {
                tracing::debug!(%error, %path, "its copy cannot be opened now");
                None
            }
            Ok(_) => {
                if work.whole.clear(ino.0) {
                    self.lose(work, entry, &path);
                }
                None
            }
        }
    }

    /// Asks for file `ino` before its turn.
    pub fn wanted(&self, ino: Ino) {
        let Some(work) = self.work.get() else {
            return;
        };
        if work.whole.get(ino.0) || work.taken.get(ino.0) || !work.asked.set(ino.0) {
            return;
        }
        let mut wanted = lock(&work.wanted);
        if wanted.len() < MOST_WANTED {
            wanted.push_back(ino);
        }
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        let work = self.work.get();
        let report = lock(&self.report);
        Progress {
            state: report.state,
            files: work.map_or(0, |work| work.files.load(Ordering::Relaxed)),
            total_files: work.map_or(0, |work| work.plan.files),
            bytes: work.map_or(0, |work| work.bytes.load(Ordering::Relaxed)),
            total_bytes: work.map_or(0, |work| work.plan.bytes),
            failures: report.failures,
            note: report.note.clone(),
        }
    }

    /// Says that nothing more is to be written; what is under way is given up.
    pub fn end(&self) {
        self.stop.set();
    }

    /// The life of the copy's own thread.
    fn run(self: &Arc<Self>, work: &Work) {
        self.tell(State::Writing, None);
        if self.make_directories(work).is_break() {
            return;
        }
        self.write_all(work);
        if self.stop.is_set() {
            return;
        }
        // Of what could not be written the rest gets its attributes all the same.
        let placer = lock(&work.placer).take();
        let finished = placer.map(Materializer::finish);
        match finished {
            Some(Err(error)) => self.halt(&error),
            Some(Ok(summary)) => {
                self.settle(summary.errors + work.context.problems.count());
            }
            None => {}
        }
    }

    /// What there was to do is done; `errors` are those of all entries, directories too.
    fn settle(&self, errors: u64) {
        let mut report = lock(&self.report);
        if report.state == State::Stopped {
            return;
        }
        report.failures = report.failures.max(errors);
        report.state = if report.failures == 0 {
            report.note = None;
            State::Complete
        } else {
            State::Incomplete
        };
        tracing::info!(directory = %self.place.directory.display(), state = ?report.state, "written");
    }

    fn make_directories(&self, work: &Work) -> ControlFlow<()> {
        let mut placer = lock(&work.placer);
        let Some(placer) = placer.as_mut() else {
            return ControlFlow::Break(());
        };
        let root = work.index.entry(work.root);
        if let Some(root) = root.filter(|root| !plan::is_implied(*root)) {
            placer.begin(member_of(root), placed(ArchivePath::root()));
        }
        for &ino in &work.plan.directories {
            if self.stop.is_set() {
                return ControlFlow::Break(());
            }
            let path = work.plan.directory(&work.index, ino);
            if let (Some(entry), Some(path)) = (work.index.entry(ino), path) {
                placer.begin(member_of(entry), placed(path.clone()));
                placer.let_us_in(&path);
            } else {
                self.fail(Some(CONTRADICTION.to_owned()));
            }
            self.check(work)?;
        }
        ControlFlow::Continue(())
    }

    /// Writes all entries, with as many threads as suit the directory.
    fn write_all(self: &Arc<Self>, work: &Work) {
        let count = self
            .place
            .root()
            .map_or(1, |root| medium::writers(root.top()));
        let spawn = |number| {
            let background = Arc::clone(self);
            Thread::spawn(&format!("copy-{number}"), move || {
                if let Some(work) = background.work.get() {
                    background.work_on(work);
                }
            })
        };
        // Fewer will do when the system has no more.
        let workers: Vec<_> = (1..count).map_while(|number| spawn(number).ok()).collect();
        self.work_on(work);
        drop(workers);
    }

    /// The life of a worker.
    fn work_on(&self, work: &Work) {
        while !self.stop.is_set() {
            let next = lock(&work.wanted).pop_front();
            if let Some(ino) = next {
                if self.bring(work, work.plan.names_of(ino)).is_break() {
                    return;
                }
                continue;
            }
            let batch = {
                let mut next = lock(&work.next);
                let batch = work.plan.batch(&work.index, *next);
                *next = batch.end;
                batch
            };
            if batch.is_empty() || self.bring_batch(work, batch).is_break() {
                return;
            }
        }
    }

    fn bring_batch(&self, work: &Work, batch: Range<usize>) -> ControlFlow<()> {
        let mut place = batch.start;
        while place < batch.end {
            let names = work.plan.names_at(place);
            self.bring(work, names)?;
            place += names.len().max(1);
        }
        ControlFlow::Continue(())
    }

    /// Sees to it that the entry of these `names` is there.
    fn bring(&self, work: &Work, names: &[Name]) -> ControlFlow<()> {
        let Some(first) = names.first() else {
            return ControlFlow::Continue(());
        };
        if !work.taken.set(first.ino.0) {
            return ControlFlow::Continue(());
        }
        let paths = names.iter().map(|name| work.plan.path(&work.index, name));
        let paths: Vec<_> = paths.flatten().collect();
        let (Some(entry), Some(path), true) = (
            work.index.entry(first.ino),
            paths.first(),
            paths.len() == names.len(),
        ) else {
            self.fail(Some(CONTRADICTION.to_owned()));
            return ControlFlow::Continue(());
        };
        if self.is_there(work, entry, path) {
            work.count(entry);
            return self.check(work);
        }
        work.whole.clear(first.ino.0);
        let mut pause = FIRST_PAUSE;
        loop {
            if self.stop.is_set() {
                return ControlFlow::Break(());
            }
            match self.make(work, entry, &paths) {
                Ok(()) => {
                    work.count(entry);
                    return self.check(work);
                }
                Err(Failure::Noted) => {
                    self.fail(None);
                    return self.check(work);
                }
                Err(Failure::Ledger(error)) => {
                    self.halt(&error);
                    return ControlFlow::Break(());
                }
                Err(Failure::Ended) => return ControlFlow::Break(()),
                Err(Failure::Read(
                    ReadError::Unreachable(error)
                    | ReadError::TimedOut(error)
                    | ReadError::AccessDenied(error)
                    | ReadError::NotFound(error),
                )) => {
                    let why = format!("the archive cannot be reached: {error}");
                    self.tell(State::Retrying, Some(why));
                    if self.stop.wait(pause) {
                        return ControlFlow::Break(());
                    }
                    self.tell(State::Writing, None);
                    pause = LONGEST_PAUSE.min(pause * 2);
                }
                Err(Failure::Read(error @ ReadError::Changed(_))) => {
                    self.halt(&error);
                    return ControlFlow::Break(());
                }
                Err(Failure::Read(error)) => {
                    self.fail(Some(format!("{path}: {error}")));
                    return ControlFlow::Continue(());
                }
            }
        }
    }

    /// Whether an entry is whole already, as an earlier mount left it.
    fn is_there(&self, work: &Work, entry: Entry<'_>, path: &ArchivePath) -> bool {
        let Ok(Some((found, record))) = self.find(work, entry, path) else {
            return false;
        };
        if work.ledger.is_recent(&record) {
            return true;
        }
        // Since the system was started anew only the content itself is good enough.
        let is_same = entry.kind() == Kind::File
            && member_of(entry).sparse.is_none()
            && self.hash(&found) == Some(record.hash);
        let stat = fstat(&found).ok().filter(|stat| record.fits(stat));
        let Some(stat) = stat.filter(|_| is_same) else {
            return false;
        };
        work.ledger.put(entry.ino().0, &stat, record.hash).is_ok()
    }

    /// The entry in the directory, when it is what the ledger says.
    ///
    /// # Errors
    /// When this process or the system has no descriptor or memory left, which says nothing of it.
    fn find(
        &self,
        work: &Work,
        entry: Entry<'_>,
        path: &ArchivePath,
    ) -> Result<Option<(OwnedFd, Record)>, Errno> {
        let Some(record) = work.ledger.get(entry.ino().0) else {
            return Ok(None);
        };
        let wants_file = entry.kind() == Kind::File;
        let found = match self.place.open_entry(path, wants_file) {
            Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => return Err(error),
            Err(_) => return Ok(None),
            Ok(found) => found,
        };
        let Ok(stat) = fstat(&found) else {
            return Ok(None);
        };
        let is_it = record.fits(&stat) && is_file(&stat) == wants_file;
        Ok(is_it.then_some((found, record)))
    }

    /// xxh3-64 of all that is in a file without holes; `None` when it cannot be read, or all is
    /// over.
    fn hash(&self, file: &OwnedFd) -> Option<u64> {
        let file = File::from(file.try_clone().ok()?);
        let mut hasher = Xxh3Default::new();
        let mut buffer = vec![0; CHECK_BYTES];
        let mut offset = 0;
        while !self.stop.is_set() {
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

    /// Makes an entry under all its `paths`, and writes down that it is whole.
    fn make(&self, work: &Work, entry: Entry<'_>, paths: &[ArchivePath]) -> Result<(), Failure> {
        let (path, more) = paths.split_first().ok_or(Failure::Noted)?;
        let (file, hash) = if entry.kind() == Kind::File {
            let (file, hash) = self.write(work, entry, path)?;
            (Some(file), hash)
        } else {
            work.place(member_of(entry), path)?;
            (None, 0)
        };
        for other in more {
            let link = tar::Kind::HardLink(path.as_bytes().to_vec());
            let link = tar::Member {
                kind: link,
                xattrs: Vec::new(),
                ..member_of(entry)
            };
            work.place(link, other)?;
        }
        let made = match file {
            Some(file) => Ok(file),
            None => self.place.open_entry(path, false),
        };
        // Who takes it away again so soon does so at his own risk.
        let stat = made.and_then(fstat).map_err(|_| Failure::Noted)?;
        let number = entry.ino().0;
        work.ledger.put(number, &stat, hash).map_err(|error| {
            let broken = self.place.broken("write down what is whole");
            Failure::Ledger(broken(errno(&error)))
        })?;
        work.whole.set(number);
        Ok(())
    }

    /// Writes a file with its attributes, under its first name; the file and the hash of what is
    /// stored in it. What is not whole in the end goes.
    fn write(
        &self,
        work: &Work,
        entry: Entry<'_>,
        path: &ArchivePath,
    ) -> Result<(OwnedFd, u64), Failure> {
        let directory = work.directory(path)?;
        let job = Job {
            number: 0,
            directory: directory.clone(),
            path: path.clone(),
            name: None,
            member: Box::new(member_of(entry)),
        };
        let file = OpenFile::create(job, &work.context, || ()).ok_or(Failure::Noted)?;
        let mut unfinished = Unfinished {
            directory: &directory,
            path,
            is_finished: false,
        };
        let written = self.fill(work, entry, file);
        unfinished.is_finished = written.is_ok();
        written
    }

    fn fill(
        &self,
        work: &Work,
        entry: Entry<'_>,
        mut file: OpenFile,
    ) -> Result<(OwnedFd, u64), Failure> {
        let mut hasher = Xxh3Default::new();
        for piece in entry.pieces(0, u64::MAX) {
            let mut done = 0;
            while done < piece.plain.len() {
                if self.stop.is_set() {
                    return Err(Failure::Ended);
                }
                let len = read_len(&work.index, &piece, done);
                let bytes =
                    (work.read)(entry.ino(), piece.offset + done, len).map_err(Failure::Read)?;
                if bytes.is_empty() {
                    return Err(Failure::Read(ReadError::Index));
                }
                hasher.update(&bytes);
                done += bytes.len() as u64;
                file = file.write(&bytes, &work.context).ok_or(Failure::Noted)?;
            }
        }
        let file = file.finish(false, &work.context).ok_or(Failure::Noted)?;
        Ok((file, hasher.digest()))
    }

    /// A file that was whole is not what it was.
    fn lose(&self, work: &Work, entry: Entry<'_>, path: &ArchivePath) {
        if work.counted.clear(entry.ino().0) {
            work.files.fetch_sub(1, Ordering::Relaxed);
            let bytes = entry.stored_bytes();
            work.bytes.fetch_sub(bytes, Ordering::Relaxed);
            let what = format!("{path}: was changed in the copy, and is served from the archive");
            self.fail(Some(what));
            let mut report = lock(&self.report);
            if report.state == State::Complete {
                report.state = State::Incomplete;
            }
        }
    }

    /// Whether to go on.
    fn check(&self, work: &Work) -> ControlFlow<()> {
        match work.context.problems.fatal() {
            Some(error) => {
                self.halt(error);
                ControlFlow::Break(())
            }
            None if self.stop.is_set() => ControlFlow::Break(()),
            None => ControlFlow::Continue(()),
        }
    }

    /// Nothing is written any more; said once.
    fn halt(&self, error: &dyn std::error::Error) {
        let mut report = lock(&self.report);
        if report.state == State::Stopped {
            return;
        }
        let why = chain(error);
        let directory = self.place.directory.display();
        tracing::error!(%directory, why, "nothing more is written there");
        report.state = State::Stopped;
        report.note = Some(why);
    }

    fn fail(&self, what: Option<String>) {
        let mut report = lock(&self.report);
        report.failures += 1;
        if let Some(what) = what {
            tracing::warn!(what, "not in the copy");
            // Why nothing more is written stays the last word.
            if report.state != State::Stopped {
                report.note = Some(what);
            }
        }
    }

    fn tell(&self, state: State, note: Option<String>) {
        let mut report = lock(&self.report);
        if report.state != State::Stopped {
            report.state = state;
            report.note = note.or(report.note.take().filter(|_| report.failures > 0));
        }
    }
}

impl Drop for Running {
    /// Ends the writing; the thread is waited for.
    fn drop(&mut self) {
        self.background.end();
    }
}

impl Work {
    /// Notes that an entry is whole.
    fn count(&self, entry: Entry<'_>) {
        self.whole.set(entry.ino().0);
        if self.counted.set(entry.ino().0) && entry.kind() == Kind::File {
            self.files.fetch_add(1, Ordering::Relaxed);
            self.bytes
                .fetch_add(entry.stored_bytes(), Ordering::Relaxed);
        }
    }

    /// The directory that `path` is in, made if need be.
    fn directory(&self, path: &ArchivePath) -> Result<Directory, Failure> {
        let mut placer = lock(&self.placer);
        let placer = placer.as_mut().ok_or(Failure::Ended)?;
        placer.directory_of(path).ok_or(Failure::Noted)
    }

    /// Makes an entry that is not a regular file.
    fn place(&self, member: tar::Member, path: &ArchivePath) -> Result<(), Failure> {
        let mut placer = lock(&self.placer);
        let placer = placer.as_mut().ok_or(Failure::Ended)?;
        let context = Arc::clone(&placer.context);
        // Nobody else counts there meanwhile.
        let before = context.problems.count();
        placer.begin(member, placed(path.clone()));
        let is_fine = context.problems.count() == before && context.problems.fatal().is_none();
        is_fine.then_some(()).ok_or(Failure::Noted)
    }
}

impl Materializer {
    /// The directory that `path` is in, made if need be; `None` when it cannot be had, which is
    /// noted.
    fn directory_of(&mut self, path: &ArchivePath) -> Option<Directory> {
        self.root.forget(path.as_bytes());
        let parent = self
            .root
            .directory(parent_of(path), Missing::Make, &mut self.writers);
        match parent {
            Ok(directory) => Some(directory),
            Err(error) => {
                self.cannot_reach(path, &error, 0);
                None
            }
        }
    }

    /// Lets its owner into a directory that an earlier mount has closed already; it gets its
    /// mode at the end.
    fn let_us_in(&mut self, path: &ArchivePath) {
        const OURS: u32 = 0o700;
        let parent = self
            .root
            .directory(parent_of(path), Missing::Fail, &mut self.writers);
        let Ok(parent) = parent else {
            return;
        };
        if let Ok(stat) = status(&parent, name_of(path))
            && stat.st_mode & OURS != OURS
        {
            let directory = Subject::Name(parent.as_fd(), name_of(path));
            // Who may not will hear why when something is to be made in it.
            directory.chmod(stat.st_mode & 0o7777 | OURS).ok();
        }
    }
}

/// A new file, which goes again unless it is finished, whatever happens to who writes it.
struct Unfinished<'a> {
    directory: &'a Directory,
    path: &'a ArchivePath,
    is_finished: bool,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        let name = name_of(self.path);
        if let Err(errno) = rustix::fs::unlinkat(self.directory, name, AtFlags::empty()) {
            tracing::warn!(path = %self.path, %errno, "an incomplete file stays");
        }
    }
}

/// Why an entry is not there.
#[derive(Debug)]
enum Failure {
    /// For a reason that is among the problems.
    Noted,
    /// The archive did not give its bytes.
    Read(ReadError),
    /// It is there, but nobody would believe it later.
    Ledger(Error),
    /// All is over.
    Ended,
}

/// Tells the log.
#[derive(Debug)]
struct Log;

impl Reporter for Log {
    fn problem(&self, problem: &Problem) {
        tracing::warn!(%problem, "not in the copy");
    }

    fn warning(&self, text: &str) {
        tracing::warn!(text, "in the copy");
    }
}

/// Bytes to read of `piece` behind the first `done` ones.
fn read_len(index: &Index, piece: &Piece, done: u64) -> u32 {
    let left = piece.plain.len().saturating_sub(done);
    let here = crate::base::extent::Plain(piece.plain.start().0.saturating_add(done));
    let span = index
        .span_at(here)
        .and_then(|number| index.span_extent(number));
    let in_span = span.map_or(left, |span| span.end().0.saturating_sub(here.0));
    u32::try_from(left.min(in_span).clamp(1, READ_BYTES)).unwrap_or(u32::MAX)
}

/// What tells the tree below `root` of this archive, with the attributes that `xattrs` selects, from any
/// other.
fn identity(index: &Index, root: Ino, xattrs: &XattrFilter) -> u128 {
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
            // Then the source's own word for its version is strong.
            hasher.update(origin.locator.canonical.as_bytes());
            hasher.update(origin.locator.fingerprint.as_bytes());
        }
    }
    if *xattrs != XattrFilter::default() {
        hasher.update(format!("{xattrs:?}").as_bytes());
    }
    hasher.digest128()
}

/// A number that is another one after each start of the system; where nobody tells, each process
/// is a start.
fn this_boot() -> u64 {
    let boot = super::beside::boot();
    if boot.is_empty() {
        use std::hash::BuildHasher;
        return std::hash::RandomState::new().hash_one(std::process::id());
    }
    xxh3_64(&boot)
}

/// An error and its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", chain(cause)),
        None => error.to_string(),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
