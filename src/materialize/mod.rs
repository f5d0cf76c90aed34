//! Parallel writer: a scan's members become a tree on disk.
//!
//! A [`Materializer`] is a [`Sink`]. On the scan's thread it resolves directories and makes
//! directories, links and special files; regular files go to writer threads, piece by piece as
//! they come. Directories get their owner, mode and times at the very end. Everything stays below
//! the destination, whatever the archive says and whatever lies there already: the kernel is never
//! asked to follow a link. A tree that is to appear whole is written into a [`Staging`] first.
//!
//! Two smaller sinks answer without writing a tree: [`Contents`] and [`Rehearsal`].

mod attributes;
mod background;
mod beside;
mod contents;
mod context;
mod directories;
mod durable;
mod entries;
mod file;
mod journal;
mod laying;
mod medium;
mod plan;
mod policy;
mod problem;
mod rehearsal;
mod removal;
mod resume;
mod root;
mod staging;
mod unwritable;
mod writers;

#[cfg(test)]
mod testing;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;

use self::attributes::Subject;
use self::context::{Claims, Context, FailedFiles, Promises};
use self::directories::Directories;
use self::entries::Links;
use self::file::Job;
use self::laying::Laying;
use self::plan::{Climbs, Placed};
use self::policy::Policy;
use self::problem::{Problems, Trouble, While};
use self::resume::Keeping;
use self::root::{Missing, Root, parent_of};
use self::unwritable::Unwritable;
use self::writers::Writers;
use crate::archive::ResumePoint;
use crate::archive::scan::Sink;
use crate::base::passwd::Accounts;
use crate::base::archive_path::ArchivePath;
use crate::base::resolve::ResolveError;
use crate::base::stats::Stats;
use crate::index::MemoryLimit;
use crate::tar::{Kind, Member};

pub use self::background::{Background, Progress, Read, Running, State};
pub use self::contents::Contents;
pub use self::laying::UNPLACED_FILES;
pub use self::plan::{Selection, Wanted};
pub use self::problem::{Cause, Error, Problem, Reporter};
pub use self::rehearsal::Rehearsal;
pub use self::staging::Staging;
pub use self::unwritable::{check_empty_destination, is_empty_directory};
pub use crate::base::glob::Glob;
pub use crate::base::xattr_filter::XattrFilter;

/// Removes the directory `name` in `parent` and all that is in it, never through a link and whatever its
/// modes; what is gone already is fine.
///
/// # Errors
/// When something cannot be removed; what was removed until then is gone.
pub fn remove(parent: impl AsFd, name: &std::ffi::OsStr) -> std::io::Result<()> {
    Ok(removal::remove(parent, name.as_encoded_bytes())?)
}

/// Distinct prefixes whose removal from member names is told; GNU tar tells each once as well.
const TOLD_PREFIXES: usize = 16;

/// What a member cannot do when there are too many.
const CLAIM: &str = "make one more entry";

/// What happens to an entry whose name is taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Existing {
    /// What is there goes, except directories with something in them; a directory over a
    /// directory changes its attributes only.
    #[default]
    Replace,
    /// It stays and the member is an error (`--keep-old-files`); directories excepted: whatever
    /// is in their place stays, silently.
    Keep,
    /// It stays, silently (`--skip-old-files`).
    Skip,
}

/// How members become entries.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
pub struct Options {
    /// Which members, and where.
    pub selection: Selection,
    /// What to do where something is already.
    pub existing: Existing,
    /// Write an empty file for a device node that this process may not create.
    pub device_placeholders: bool,
    /// Give entries the archive's owners.
    pub same_owner: bool,
    /// Give entries exactly the archive's modes, whatever the umask.
    pub same_permissions: bool,
    /// Look at owners' numbers only, not at their names.
    pub numeric_owner: bool,
    /// Which extended attributes and ACLs entries get.
    pub xattrs: XattrFilter,
    /// Threads that write files, at least one; as many as suit the destination when not said.
    pub writers: Option<usize>,
    /// Wait at the end until all is on disk. A tree in a [`Staging`] is synced by its commit.
    pub sync: bool,
    /// Entries that may be made, directories included that only paths speak of; one more ends the
    /// run.
    pub max_entries: u64,
    /// What the indexes of layers may have of memory.
    pub index_memory: MemoryLimit,
    /// Hears of entries and problems as they happen.
    pub reporter: Option<Arc<dyn Reporter>>,
}

impl Options {
    /// GNU tar's defaults: owners and modes are the archive's for root, and for nobody else.
    pub fn for_this_user() -> Self {
        let is_root = rustix::process::geteuid().is_root();
        Self {
            selection: Selection::default(),
            existing: Existing::default(),
            device_placeholders: false,
            same_owner: is_root,
            same_permissions: is_root,
            numeric_owner: false,
            xattrs: XattrFilter::default(),
            writers: None,
            sync: false,
            max_entries: u64::MAX,
            index_memory: MemoryLimit::default(),
            reporter: None,
        }
    }
}

/// What was done.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Entries written.
    pub entries: u64,
    /// Payload bytes written.
    pub bytes: u64,
    /// Entries that are missing or incomplete, damaged places, and paths that were not found.
    pub errors: u64,
    /// The first of these.
    pub problems: Vec<Problem>,
}

/// Writes members below a directory.
#[derive(Debug)]
pub struct Materializer {
    context: Arc<Context>,
    selection: Selection,
    root: Root,
    /// Where the root is, for messages, if it is to be synced.
    sync: Option<PathBuf>,
    /// The mode to give to the root at the end, unless a member says otherwise.
    root_mode: Option<u32>,
    writers: Writers,
    current: Current,
    directories: Directories,
    links: Links,
    told_prefixes: Vec<Vec<u8>>,
    /// Of a run that is to be taken up again.
    keeping: Option<Keeping>,
    /// Whether nothing was in the destination, and no member has come.
    was_empty: bool,
    /// Of layers.
    laying: Option<Laying>,
    /// What their indexes may have of memory.
    index_memory: MemoryLimit,
}

/// What the next piece of payload belongs to.
#[derive(Debug)]
enum Current {
    /// Nothing that is written.
    Nothing,
    /// A file of which nothing was seen yet.
    Waiting(Job),
    /// A file that is on its way to a writer in pieces.
    Streaming,
}

impl Materializer {
    /// Opens the directory `destination`, which must exist, and starts the writers.
    ///
    /// # Errors
    /// [`Error::Destination`] and [`Error::Thread`].
    pub fn new(destination: &Path, options: Options, stats: Arc<Stats>) -> Result<Self, Error> {
        let root = Root::open(destination).map_err(|errno| Error::Destination {
            path: destination.to_owned(),
            errno,
        })?;
        let problems = Problems::new(options.reporter.clone());
        let sync = options.sync.then(|| destination.to_owned());
        let unwritable = Unwritable::of(destination, root.top());
        let materializer = Self::start(root, problems, options, stats)?;
        if let Some(unwritable) = unwritable {
            drop(materializer.context.unwritable.set(unwritable));
        }
        Ok(Self {
            sync,
            was_empty: is_empty_directory(destination),
            ..materializer
        })
    }

    /// As [`Materializer::new`], for a tree that is to appear whole: makes the directory to build
    /// in. It is for the caller to commit when all went well.
    ///
    /// # Errors
    /// When no directory can be made there any more, [`Error::Interrupted`], and [`Error::Thread`].
    pub fn staged(staging: &Staging, options: Options, stats: Arc<Stats>) -> Result<Self, Error> {
        let (root, mode) = staging.make()?;
        let problems = Problems::until(staging.end(), options.reporter.clone());
        let materializer = Self::start(root, problems, options, stats)?;
        Ok(Self {
            root_mode: Some(mode),
            was_empty: true,
            ..materializer
        })
    }

    fn start(
        root: Root,
        problems: Problems,
        options: Options,
        stats: Arc<Stats>,
    ) -> Result<Self, Error> {
        let context = Arc::new(Context {
            policy: policy(&options),
            existing: options.existing,
            device_placeholders: options.device_placeholders,
            stats,
            problems,
            replacements: Arc::default(),
            claims: Claims::new(options.max_entries),
            promises: Promises::default(),
            failed_files: FailedFiles::default(),
            journal: OnceLock::new(),
            unwritable: OnceLock::new(),
        });
        let count = options
            .writers
            .unwrap_or_else(|| medium::writers(root.top()));
        let writers =
            Writers::start(count, &context).map_err(|error| Error::Thread(Arc::new(error)))?;
        Ok(Self {
            context,
            selection: options.selection,
            root,
            sync: None,
            root_mode: None,
            writers,
            current: Current::Nothing,
            directories: Directories::default(),
            links: Links::default(),
            told_prefixes: Vec::new(),
            keeping: None,
            was_empty: false,
            laying: None,
            index_memory: options.index_memory,
        })
    }

    /// Threads that write files.
    pub fn writer_count(&self) -> usize {
        self.writers.count()
    }

    /// Waits for the writers, makes the links whose targets came late, and gives directories their
    /// attributes. To be called after a failure as well: what is there gets its attributes.
    ///
    /// # Errors
    /// What stopped the run, if anything did.
    pub fn finish(mut self) -> Result<Summary, Error> {
        if !matches!(self.current, Current::Nothing) {
            self.end_of_file(true);
        }
        self.writers.settle_all();
        if self.must_be_taken_up() {
            return self.suspend();
        }
        self.come_to_end();
        let laying = self.laying.take();
        let layers = laying.and_then(|laying| self.place_layers(laying));
        self.make_late_links();
        if self.must_be_taken_up() {
            return self.suspend();
        }
        self.come_to_end();
        if let Some(mode) = self.root_mode {
            let root = Subject::Open(self.root.top().as_fd());
            if let Err(trouble) = root.chmod(mode) {
                self.context.problems.add(&ArchivePath::root(), trouble);
            }
        }
        if let Some(merged) = layers {
            self.finish_root(&merged.index);
        }
        self.directories
            .restore(&mut self.root, &mut self.writers, &self.context);
        self.writers.close();
        for path in self.selection.missing() {
            self.context.problems.add(path, Cause::NotFound);
        }
        if let Some(error) = self.context.problems.fatal() {
            return Err(error.clone());
        }
        if let Some(path) = &self.sync {
            durable::sync_file_system(self.root.top(), path, &self.context.stats)?;
        }
        if let Some(keeping) = &self.keeping {
            keeping.journal().remove();
        }
        Ok(Summary {
            entries: self.context.stats.written_entries.get(),
            bytes: self.context.stats.written_bytes.get(),
            errors: self.context.problems.count(),
            problems: self.context.problems.take_kept(),
        })
    }

    fn tell_prefix(&mut self, stripped: Vec<u8>) {
        if stripped.is_empty()
            || self.told_prefixes.len() >= TOLD_PREFIXES
            || self.told_prefixes.contains(&stripped)
        {
            return;
        }
        self.context.problems.warn(&format!(
            "removing leading '{}' from member names",
            stripped.escape_ascii()
        ));
        self.told_prefixes.push(stripped);
    }

    /// Makes the entry, or gets ready for its payload.
    fn begin(&mut self, member: Member, placed: Placed) {
        self.tell_prefix(placed.stripped);
        let path = placed.path;
        self.context.problems.entry(&path);
        if path.is_root() {
            self.begin_root(member, path);
            return;
        }
        if let Err(trouble) = self.context.claims.take().while_trying_to(CLAIM) {
            let top = self.root.top();
            self.context.fail(&path, top, trouble, member.payload.len());
            return;
        }
        let parent = self
            .root
            .directory(parent_of(&path), Missing::Make, &mut self.writers);
        self.keep_times_of_implied();
        let directory = match parent {
            Ok(directory) => directory,
            Err(error) => {
                self.cannot_reach(&path, &error, member.payload.len());
                return;
            }
        };
        let job = Job {
            directory,
            path,
            name: None,
            member: Box::new(member),
            number: self.number(),
        };
        let shared = self.come_to_place(&job);
        match job.member.kind {
            Kind::File => {
                self.root.forget_ways(&job.directory, job.path.as_bytes());
                self.current = Current::Waiting(job);
            }
            _ => self.make_entry(job),
        }
        if let Some(inode) = shared {
            self.leave_place(inode);
        }
    }

    /// Has directories that were made for the way to a member get the time 0 in the end, as in an index.
    fn keep_times_of_implied(&mut self) {
        for implied in self.root.take_implied() {
            self.directories.add_implied(implied.path, implied.identity);
            self.journal_implied();
        }
    }

    /// Has a destination that was empty get the time 0 in the end, as in an index.
    fn keep_time_of_root(&mut self) {
        if std::mem::replace(&mut self.was_empty, false) {
            let identity = self.root.top().identity();
            self.directories.add_implied(ArchivePath::root(), identity);
            self.journal_implied();
        }
    }

    /// Notes that the directory of `path` is out of reach, and with it a content of
    /// `missing_bytes`.
    fn cannot_reach(&self, path: &ArchivePath, error: &ResolveError<Trouble>, missing_bytes: u64) {
        match error {
            ResolveError::Path(refusal) => {
                self.context.problems.add(path, Cause::Refused(*refusal));
            }
            ResolveError::Tree(trouble) => {
                self.context
                    .fail(path, self.root.top(), *trouble, missing_bytes);
            }
        }
    }

    /// The member is the destination itself: only a directory can be, and its attributes count.
    fn begin_root(&mut self, member: Member, path: ArchivePath) {
        if member.kind == Kind::Directory {
            let identity = self.root.top().identity();
            if self.context.existing == Existing::Replace {
                self.directories
                    .add(path, identity, false, member, &self.context.policy);
                let top = self.root.top().clone();
                self.journal_directory(&top);
            }
        } else {
            self.context.problems.add(&path, Cause::IsTheRoot);
        }
    }

    fn end_of_file(&mut self, cut: bool) {
        match std::mem::replace(&mut self.current, Current::Nothing) {
            Current::Nothing => {}
            Current::Waiting(job) if cut => {
                self.writers.begin(job);
                self.writers.end(true);
            }
            Current::Waiting(job) => self.writers.write(job, Bytes::new()),
            Current::Streaming => self.writers.end(cut),
        }
    }

    fn check(&self) -> Result<(), Error> {
        match self.context.problems.fatal() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }
}

impl Sink for Materializer {
    type Error = Error;

    fn member(&mut self, mut member: Member) -> Result<(), Error> {
        self.check()?;
        if self.laying.is_some() {
            self.lay(member);
            return Ok(());
        }
        if !self.come_to_member() {
            return Ok(());
        }
        self.keep_time_of_root();
        match self.selection.take(&mut member) {
            Ok(Some(placed)) => self.begin(member, placed),
            Ok(None) => {}
            Err(Climbs(path)) => self.context.problems.add(&path, Cause::Climbs),
        }
        Ok(())
    }

    fn payload(&mut self, bytes: Bytes) -> Result<(), Error> {
        self.check()?;
        match std::mem::replace(&mut self.current, Current::Nothing) {
            Current::Nothing => {}
            Current::Waiting(job) if job.member.payload.len() == bytes.len() as u64 => {
                self.writers.write(job, bytes);
            }
            // Pieces are never gathered: what waits for its other half would hold on to buffers
            // that the other half may need.
            Current::Waiting(job) => {
                self.writers.begin(job);
                self.writers.piece(bytes);
                self.current = Current::Streaming;
            }
            Current::Streaming => {
                self.writers.piece(bytes);
                self.current = Current::Streaming;
            }
        }
        Ok(())
    }

    fn member_end(&mut self, cut: bool) -> Result<(), Error> {
        self.end_of_file(cut);
        self.leave_member();
        self.check()
    }

    fn resume_point(&mut self, bookmark: ResumePoint) {
        self.place(bookmark);
    }

    fn warning(&mut self, text: &str) {
        self.context.problems.warn(text);
    }

    fn damage(&mut self, _offset: crate::base::extent::Plain, text: &str) {
        self.context.problems.damage(text);
    }
}

fn policy(options: &Options) -> Policy {
    Policy {
        same_owner: options.same_owner,
        same_permissions: options.same_permissions,
        numeric_owner: options.numeric_owner,
        xattrs: options.xattrs.clone(),
        umask: umask(),
        user: rustix::process::geteuid().as_raw(),
        group: rustix::process::getegid().as_raw(),
        names: Accounts::load_system(),
    }
}

/// The process' umask, looked up rather than set and set back, which other threads would notice.
fn umask() -> u32 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    if let Some(umask) = line.and_then(|octal| u32::from_str_radix(octal.trim(), 8).ok()) {
        return umask;
    }
    let umask = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    rustix::process::umask(umask);
    umask.as_raw_mode()
}
