//! Parallel writer: writes the members of a scan to a tree on disk.
//!
//! A [`Materializer`] is a [`Sink`]. On the scan thread it resolves directories, and it makes directories,
//! links and special files. It sends regular files to writer threads, piece by piece as the scan delivers
//! them. Directories get their owner, mode and times at the very end. Every entry stays below the
//! destination, whatever the archive contains and whatever the destination contains already, because the
//! kernel never follows a link for us. With `--atomic`, the tree is first written into a [`Staging`].
//!
//! Two smaller sinks write no tree: [`ContentSink`] and [`DryRunSink`].

mod background_copy;
mod dry_run;
mod error;
mod layers;
mod resume;
mod selection;
mod staging;
mod to_stdout;
mod write;

#[cfg(test)]
mod test_support;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;

use self::error::{Problems, StepError, WithAction};
use self::layers::LayerState;
use self::resume::ResumeState;
use self::selection::{OutputPath, ParentComponent};
use self::write::attribute_policy::AttributePolicy;
use self::write::attributes::AttributeTarget;
use self::write::context::{Context, EntryQuota, FailedFiles, ReservedNames};
use self::write::destination::{DestinationRoot, IfMissing, parent_of};
use self::write::directories::PendingDirectories;
use self::write::file::Job;
use self::write::nodes::DeferredLinks;
use self::write::pool::WriterPool;
use self::write::unwritable::Unwritable;
use crate::archive::ResumePoint;
use crate::archive::scan::Sink;
use crate::base::archive_path::ArchivePath;
use crate::base::passwd::Accounts;
use crate::base::resolve::ResolveError;
use crate::base::stats::Stats;
use crate::index::MemoryLimit;
use crate::tar::{Kind, Member};

pub use self::background_copy::{
    BackgroundCopy, BackgroundCopyProgress, CopyState, ReadFn, RunningCopy,
};
pub use self::dry_run::DryRunSink;
pub use self::error::{Cause, Error, Problem, Reporter};
pub use self::layers::UNPLACED_FILES;
pub use self::selection::{SelectedPath, Selection};
pub use self::staging::Staging;
pub use self::to_stdout::ContentSink;
pub use self::write::unwritable::{check_empty_destination, is_empty_directory};
pub use crate::base::glob::Glob;
pub use crate::base::xattr_filter::XattrFilter;

/// Removes the directory `name` in `parent` with all its contents.
///
/// It never follows a link, and it works whatever the modes are. Entries that are already missing are no
/// error.
///
/// # Errors
/// When an entry cannot be removed. The entries removed until then stay removed.
pub fn remove_tree(parent: impl AsFd, name: &std::ffi::OsStr) -> std::io::Result<()> {
    Ok(write::remove_tree::remove_tree(
        parent,
        name.as_encoded_bytes(),
    )?)
}

/// Maximum number of distinct stripped prefixes to warn about. GNU tar also warns once per prefix.
const MAX_REPORTED_PREFIXES: usize = 16;

/// Action in the error of a member that exceeds the entry limit.
const ADD_ENTRY: &str = "make one more entry";

/// Policy for an entry whose name already exists.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Existing {
    /// Replace the existing entry, except a non-empty directory. A directory over a directory changes only
    /// the attributes.
    #[default]
    Replace,
    /// Keep the existing entry and report an error (`--keep-old-files`). A directory member keeps the
    /// existing entry silently.
    Keep,
    /// Keep the existing entry silently (`--skip-old-files`).
    Skip,
}

/// Options of a [`Materializer`].
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
pub struct Options {
    /// The members to write, and their paths.
    pub selection: Selection,
    /// Policy for existing entries.
    pub existing: Existing,
    /// Write an empty file for a device node that this process must not create.
    pub device_placeholders: bool,
    /// Set the archive's owners.
    pub same_owner: bool,
    /// Set exactly the archive's modes, whatever the umask is.
    pub same_permissions: bool,
    /// Use only the numbers of owners, not their names.
    pub numeric_owner: bool,
    /// Filter of the extended attributes and ACLs to set.
    pub xattrs: XattrFilter,
    /// Number of writer threads, at least one. `None` chooses by the destination's file system.
    pub writers: Option<usize>,
    /// Sync the file system at the end. The commit of a [`Staging`] syncs its tree anyway.
    pub sync: bool,
    /// Maximum number of entries, implied directories included. One more entry ends the run.
    pub max_entries: u64,
    /// Memory limit for the indexes of layers.
    pub index_memory: MemoryLimit,
    /// Receives entries and problems as they occur.
    pub reporter: Option<Arc<dyn Reporter>>,
}

impl Options {
    /// GNU tar's defaults: only root sets the archive's owners and modes.
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

/// Result of a run.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Entries written.
    pub entries: u64,
    /// Payload bytes written.
    pub bytes: u64,
    /// Missing or incomplete entries, damaged places, and requested paths that the archive lacks.
    pub errors: u64,
    /// The first of these problems.
    pub problems: Vec<Problem>,
}

/// Writes members below a directory.
#[derive(Debug)]
pub struct Materializer {
    context: Arc<Context>,
    selection: Selection,
    root: DestinationRoot,
    /// Path of the root, for messages, if the run syncs it.
    sync: Option<PathBuf>,
    /// Final mode of the root, unless a member sets another one.
    root_mode: Option<u32>,
    writers: WriterPool,
    current: CurrentFile,
    directories: PendingDirectories,
    links: DeferredLinks,
    reported_prefixes: Vec<Vec<u8>>,
    /// State of a resumable run.
    resume_state: Option<ResumeState>,
    /// Whether the destination was empty and no member has arrived yet.
    was_empty: bool,
    /// State of a run over layers.
    layer_state: Option<LayerState>,
    /// Memory limit for the indexes of layers.
    index_memory: MemoryLimit,
}

/// The file that the next piece of payload belongs to.
#[derive(Debug)]
enum CurrentFile {
    /// No file; the payload is dropped.
    Nothing,
    /// A file without any payload so far.
    Waiting(Job),
    /// A file that a writer receives in pieces.
    Streaming,
}

impl Materializer {
    /// Opens the existing directory `destination` and starts the writers.
    ///
    /// # Errors
    /// [`Error::Destination`] and [`Error::Thread`].
    pub fn new(destination: &Path, options: Options, stats: Arc<Stats>) -> Result<Self, Error> {
        let root = DestinationRoot::open(destination).map_err(|errno| Error::Destination {
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

    /// Like [`Materializer::new`], but builds in a new directory of `staging`.
    ///
    /// The caller commits `staging` when the run succeeds.
    ///
    /// # Errors
    /// When the directory cannot be made, [`Error::Interrupted`], and [`Error::Thread`].
    pub fn staged(staging: &Staging, options: Options, stats: Arc<Stats>) -> Result<Self, Error> {
        let (root, mode) = staging.create()?;
        let problems = Problems::with_stop_error(staging.stop_error(), options.reporter.clone());
        let materializer = Self::start(root, problems, options, stats)?;
        Ok(Self {
            root_mode: Some(mode),
            was_empty: true,
            ..materializer
        })
    }

    fn start(
        root: DestinationRoot,
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
            entry_quota: EntryQuota::new(options.max_entries),
            reserved_names: ReservedNames::default(),
            failed_files: FailedFiles::default(),
            journal: OnceLock::new(),
            unwritable: OnceLock::new(),
        });
        let count = options
            .writers
            .unwrap_or_else(|| write::fs_type::default_writer_count(root.top()));
        let writers =
            WriterPool::start(count, &context).map_err(|error| Error::Thread(Arc::new(error)))?;
        Ok(Self {
            context,
            selection: options.selection,
            root,
            sync: None,
            root_mode: None,
            writers,
            current: CurrentFile::Nothing,
            directories: PendingDirectories::default(),
            links: DeferredLinks::default(),
            reported_prefixes: Vec::new(),
            resume_state: None,
            was_empty: false,
            layer_state: None,
            index_memory: options.index_memory,
        })
    }

    /// Number of writer threads.
    pub fn writer_count(&self) -> usize {
        self.writers.count()
    }

    /// Waits for the writers, makes deferred links, and sets directory attributes.
    ///
    /// Call it after a failure as well, so that existing directories get their attributes.
    ///
    /// # Errors
    /// The error that stopped the run, if any.
    pub fn finish(mut self) -> Result<Summary, Error> {
        if !matches!(self.current, CurrentFile::Nothing) {
            self.end_payload(true);
        }
        self.writers.wait_for_all();
        if self.needs_resume() {
            return self.suspend();
        }
        self.before_finish();
        let layer_state = self.layer_state.take();
        let merged = layer_state.and_then(|layer_state| self.place_layers(layer_state));
        self.make_deferred_links();
        if self.needs_resume() {
            return self.suspend();
        }
        self.before_finish();
        if let Some(mode) = self.root_mode {
            let root = AttributeTarget::Open(self.root.top().as_fd());
            if let Err(error) = root.chmod(mode) {
                self.context.problems.add(&ArchivePath::root(), error);
            }
        }
        if let Some(merged) = merged {
            self.finish_root(&merged.index);
        }
        self.directories
            .apply_all(&mut self.root, &mut self.writers, &self.context);
        self.writers.close();
        for path in self.selection.unmatched_paths() {
            self.context.problems.add(path, Cause::NotFound);
        }
        if let Some(error) = self.context.problems.fatal() {
            return Err(error.clone());
        }
        if let Some(path) = &self.sync {
            write::fsync::sync_file_system(self.root.top(), path, &self.context.stats)?;
        }
        if let Some(resume_state) = &self.resume_state {
            resume_state.journal().remove();
        }
        Ok(Summary {
            entries: self.context.stats.written_entries.get(),
            bytes: self.context.stats.written_bytes.get(),
            errors: self.context.problems.count(),
            problems: self.context.problems.take_problems(),
        })
    }

    fn report_stripped_prefix(&mut self, stripped: Vec<u8>) {
        if stripped.is_empty()
            || self.reported_prefixes.len() >= MAX_REPORTED_PREFIXES
            || self.reported_prefixes.contains(&stripped)
        {
            return;
        }
        self.context.problems.warn(&format!(
            "removing leading '{}' from member names",
            stripped.escape_ascii()
        ));
        self.reported_prefixes.push(stripped);
    }

    /// Makes the entry, or prepares for its payload.
    fn begin_member(&mut self, member: Member, output_path: OutputPath) {
        self.report_stripped_prefix(output_path.stripped);
        let path = output_path.path;
        self.context.problems.entry(&path);
        if path.is_root() {
            self.begin_root(member, path);
            return;
        }
        if let Err(error) = self.context.entry_quota.acquire().with_action(ADD_ENTRY) {
            let top = self.root.top();
            self.context
                .record_failure(&path, top, error, member.payload.len());
            return;
        }
        let parent =
            self.root
                .resolve_directory(parent_of(&path), IfMissing::Create, &mut self.writers);
        self.defer_implied_mtimes();
        let directory = match parent {
            Ok(directory) => directory,
            Err(error) => {
                self.record_unreachable(&path, &error, member.payload.len());
                return;
            }
        };
        let job = Job {
            directory,
            path,
            name: None,
            member: Box::new(member),
            number: self.member_number(),
        };
        let shared = self.before_create(&job);
        match job.member.kind {
            Kind::File => {
                self.root
                    .invalidate_aliases(&job.directory, job.path.as_bytes());
                self.current = CurrentFile::Waiting(job);
            }
            _ => self.make_entry(job),
        }
        if let Some(inode) = shared {
            self.after_replace(inode);
        }
    }

    /// Gives implied directories the time 0 at the end, as in an index.
    fn defer_implied_mtimes(&mut self) {
        for implied in self.root.take_implied() {
            self.directories.add_implied(implied.path, implied.identity);
            self.journal_implied();
        }
    }

    /// Gives an empty destination the time 0 at the end, as in an index.
    fn defer_root_mtime(&mut self) {
        if std::mem::replace(&mut self.was_empty, false) {
            let identity = self.root.top().identity();
            self.directories.add_implied(ArchivePath::root(), identity);
            self.journal_implied();
        }
    }

    /// Reports an unreachable parent of `path`; `missing_bytes` is the size of the lost content.
    fn record_unreachable(
        &self,
        path: &ArchivePath,
        error: &ResolveError<StepError>,
        missing_bytes: u64,
    ) {
        match error {
            ResolveError::Path(refusal) => {
                self.context.problems.add(path, Cause::Rejected(*refusal));
            }
            ResolveError::Tree(error) => {
                self.context
                    .record_failure(path, self.root.top(), *error, missing_bytes);
            }
        }
    }

    /// Handles a member that is the destination itself. Only a directory is valid, and only its attributes
    /// count.
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
            self.context.problems.add(&path, Cause::IsRoot);
        }
    }

    fn end_payload(&mut self, cut: bool) {
        match std::mem::replace(&mut self.current, CurrentFile::Nothing) {
            CurrentFile::Nothing => {}
            CurrentFile::Waiting(job) if cut => {
                self.writers.begin_file(job);
                self.writers.end_file(true);
            }
            CurrentFile::Waiting(job) => self.writers.write_file(job, Bytes::new()),
            CurrentFile::Streaming => self.writers.end_file(cut),
        }
    }

    fn check_fatal(&self) -> Result<(), Error> {
        match self.context.problems.fatal() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }
}

impl Sink for Materializer {
    type Error = Error;

    fn member(&mut self, mut member: Member) -> Result<(), Error> {
        self.check_fatal()?;
        if self.layer_state.is_some() {
            self.apply_layer_member(member);
            return Ok(());
        }
        if !self.before_member() {
            return Ok(());
        }
        self.defer_root_mtime();
        match self.selection.select_member(&mut member) {
            Ok(Some(output_path)) => self.begin_member(member, output_path),
            Ok(None) => {}
            Err(ParentComponent(path)) => self.context.problems.add(&path, Cause::ParentComponent),
        }
        Ok(())
    }

    fn payload(&mut self, bytes: Bytes) -> Result<(), Error> {
        self.check_fatal()?;
        match std::mem::replace(&mut self.current, CurrentFile::Nothing) {
            CurrentFile::Nothing => {}
            CurrentFile::Waiting(job) if job.member.payload.len() == bytes.len() as u64 => {
                self.writers.write_file(job, bytes);
            }
            // Pieces are never gathered, because a held piece would keep buffers that the rest may need.
            CurrentFile::Waiting(job) => {
                self.writers.begin_file(job);
                self.writers.write_piece(bytes);
                self.current = CurrentFile::Streaming;
            }
            CurrentFile::Streaming => {
                self.writers.write_piece(bytes);
                self.current = CurrentFile::Streaming;
            }
        }
        Ok(())
    }

    fn member_end(&mut self, cut: bool) -> Result<(), Error> {
        self.end_payload(cut);
        self.after_member();
        self.check_fatal()
    }

    fn resume_point(&mut self, bookmark: ResumePoint) {
        self.set_resume_point(bookmark);
    }

    fn warning(&mut self, text: &str) {
        self.context.problems.warn(text);
    }

    fn damage(&mut self, _offset: crate::base::extent::Plain, text: &str) {
        self.context.problems.damage(text);
    }
}

fn policy(options: &Options) -> AttributePolicy {
    AttributePolicy {
        same_owner: options.same_owner,
        same_permissions: options.same_permissions,
        numeric_owner: options.numeric_owner,
        xattrs: options.xattrs.clone(),
        umask: umask(),
        user: rustix::process::geteuid().as_raw(),
        group: rustix::process::getegid().as_raw(),
        accounts: Accounts::load_system(),
    }
}

/// The umask of the process. Setting and restoring it would be visible to other threads, so we read it.
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
