//! Errors and problems: of one entry, or of the whole destination.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::io::Errno;

use crate::archive::HINT_RAISE_INDEX_MEMORY;
use crate::archive::scan::PayloadEnd;
use crate::base::archive_path::ArchivePath;
use crate::base::escape::escape;
use crate::base::lock::LockHolder;
use crate::base::resolve::PathError;
use crate::base::sync::Mutex;
use crate::index::TooMuchMemory;
use crate::index::{MissingRow, WITHOUT_PUBLISHED_INDEX};

/// Maximum number of problems kept for the summary. Only the [`Reporter`] sees the others.
const MAX_KEPT_PROBLEMS: usize = 100;

/// Receives entries, problems and warnings as they occur, on any thread.
pub trait Reporter: Send + Sync + fmt::Debug {
    /// An entry is about to be written, or would be in a dry run.
    fn entry(&self, path: &ArchivePath) {
        let _ = path;
    }

    /// An entry is about to be removed, because the source lacks it.
    fn deletion(&self, path: &ArchivePath) {
        let _ = path;
    }

    /// An entry could not be written completely.
    fn problem(&self, problem: &Problem);

    /// Something is unusual, but no data is lost.
    fn warning(&self, text: &str);

    /// Text about entries that count as errors.
    fn failure(&self, text: &str) {
        self.warning(text);
    }
}

/// Why one entry is missing or incomplete.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{path}: {cause}")]
pub struct Problem {
    /// The entry's path.
    pub path: ArchivePath,
    /// The cause.
    // Not `#[source]`, because our text contains it. Its own source is next in the chain.
    pub cause: Cause,
}

/// Cause of a problem, without the entry's path.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Cause {
    /// The operating system refused a step.
    #[error(transparent)]
    System(#[from] StepError),
    /// The entry would be outside the destination.
    #[error("refused: {0}")]
    Rejected(PathError),
    /// The member's name, which is shown, has a `..` component.
    #[error("refused: the name contains '..': {}", escape(.0))]
    ParentComponent(Vec<u8>),
    /// The name of a non-directory member is the destination itself.
    #[error("refused: the name is that of the destination itself")]
    IsRoot,
    /// A hard link whose target does not exist even at the end.
    #[error("cannot link to {0}: no such file")]
    NoTarget(ArchivePath),
    /// A hard link whose target has no components, or lost all of them.
    #[error("cannot link: nothing is left of the target's name")]
    EmptyTarget,
    /// An entry that has no place in the tree.
    #[error("{0}")]
    LeftOut(String),
    /// No shard has written the entry.
    #[error("missing (write its shard first, with `tarfs shard write`)")]
    NotWritten,
    /// The entry on disk is not that of the archive.
    #[error(
        "of another type or size than in the archive (write its shard again, with `tarfs shard write`)"
    )]
    Differs,
    /// The directory that is copied cannot be read there.
    // The errno is not `#[source]`, because the text contains it.
    #[error("cannot read the source: {0}")]
    Unreadable(Errno),
    /// The file was changed while it was copied.
    #[error("the source was changed meanwhile")]
    Changed,
    /// The archive ends inside the member.
    #[error("the archive ends in the middle of this file; the bytes before that are kept")]
    Truncated,
    /// As [`Truncated`](Self::Truncated), where nothing is written.
    #[error("the archive ends in the middle of this file")]
    EndsEarly,
    /// The content of the member is damaged, or cannot be read.
    #[error("its content is damaged; the bytes before that are kept")]
    Damaged,
    /// An update keeps the old file, because the content of the new one is damaged or cut.
    #[error("not written, because its content is damaged or ends early")]
    Incomplete,
    /// A requested path goes through a link that comes after what it leads to.
    #[error("goes through a symbolic link (name {0} instead)")]
    ThroughLink(ArchivePath),
    /// A requested path does not exist in the archive.
    #[error("not in the archive (`tarfs find` shows what is; -C names a directory to write to)")]
    NotFound,
}

impl Cause {
    /// The problem of a file whose content ends in this way, if it is one.
    pub(super) fn of_end(end: PayloadEnd) -> Option<Self> {
        match end {
            PayloadEnd::Complete => None,
            PayloadEnd::Cut => Some(Self::Truncated),
            PayloadEnd::Damaged => Some(Self::Damaged),
        }
    }
}

/// Reason why the run cannot start or cannot continue.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The destination cannot be opened.
    #[error("{}: cannot open the destination directory", .0.display())]
    Destination(PathBuf, #[source] Errno),
    /// The directory to copy cannot be opened.
    #[error("{}: cannot open the directory", .0.display())]
    SourceDirectory(PathBuf, #[source] Errno),
    /// The destination is in the directory to copy.
    #[error("{}: contains the destination, so the copy would contain itself", .0.display())]
    ContainsDestination(PathBuf),
    /// Nothing can be written to the destination.
    #[error("{}: cannot write to the destination directory", .0.display())]
    Unwritable(PathBuf, #[source] Errno),
    /// With `--atomic`, the destination exists and is not empty.
    #[error("{}: is there already and not empty; --atomic replaces nothing", .0.display())]
    NotEmpty(PathBuf),
    /// With `--atomic`, the kernel cannot rename a tree to the destination, for this reason.
    #[error("{}: {}, so no tree can be renamed to it", .0.display(), .1)]
    CannotRename(PathBuf, &'static str),
    /// The directory for the staged tree cannot be used. The step is an infinitive.
    #[error("{}: cannot {}", .0.display(), .1)]
    Staging(PathBuf, &'static str, #[source] Errno),
    /// An unfinished staged tree cannot be removed.
    #[error("{}: cannot remove the unfinished tree", .0.display())]
    Leftover(PathBuf, #[source] Errno),
    /// The directory for a background copy contains something else.
    #[error("{}: is not empty, and is no copy that a mount of this archive keeps", .0.display())]
    NotACopy(PathBuf),
    /// Another process has locked the destination, or the file beside it.
    #[error("{}: {} has locked it", .0.display(), .1)]
    InUse(PathBuf, LockHolder),
    /// The ledger beside a background copy cannot be used. The step is an infinitive.
    #[error("{}: cannot {}", .0.display(), .1)]
    Ledger(PathBuf, &'static str, #[source] Errno),
    /// The journal of a resumable run cannot be used.
    #[error("{}: cannot use the journal of the run", .0.display())]
    Journal(PathBuf, #[source] Errno),
    /// Shards of another version of the archive are below the destination.
    #[error("the destination has shards of another version of the archive")]
    OtherVersion,
    /// The version of the archive cannot be recorded below the destination.
    #[error("cannot record the version of the archive below the destination")]
    ShardRecord(#[source] Errno),
    /// The indexes of layers need more memory than is allowed.
    #[error(transparent)]
    TooMuchMemory(#[from] TooMuchMemory),
    /// A signal or the caller ended the run.
    #[error("interrupted")]
    Interrupted,
    /// The sync failed, so the written data may not be on disk.
    #[error("{}: cannot sync to disk", .0.display())]
    Sync(PathBuf, #[source] Errno),
    /// A part of the published index that describes the tree cannot be loaded.
    #[error("cannot list the tree")]
    IndexRows(#[source] MissingRow),
    /// A writer thread cannot be started.
    #[error("cannot start a writer thread")]
    Thread(#[source] Arc<io::Error>),
    /// No space is left.
    #[error(
        "{path}: no space left: {available_bytes} bytes are free, this file alone needs \
         {missing_bytes} more; {written_bytes} bytes were written"
    )]
    NoSpace {
        /// The entry that did not fit.
        path: ArchivePath,
        /// Bytes free for us on the destination.
        available_bytes: u64,
        /// Bytes of the entry's content not yet written.
        missing_bytes: u64,
        /// Bytes written so far by the whole run.
        written_bytes: u64,
    },
    /// No inode is left, though space is.
    #[error("{0}: no inode left on the destination ({1} entries were written)")]
    NoInodes(ArchivePath, u64),
    /// The archive has more entries than [`Options::max_entries`](super::Options::max_entries).
    #[error("{0}: this is one entry more than the {1} that are allowed")]
    TooManyEntries(ArchivePath, u64),
    /// The user's disk quota is exceeded.
    #[error(
        "{path}: the disk quota is used up: this file alone needs {missing_bytes} bytes more; \
         {written_bytes} bytes were written"
    )]
    Quota {
        /// The entry that did not fit.
        path: ArchivePath,
        /// Bytes of the entry's content not yet written.
        missing_bytes: u64,
        /// Bytes written so far by the whole run.
        written_bytes: u64,
    },
    /// The destination is read-only, or fails. The step is an infinitive.
    #[error("{0}: the destination fails, cannot {1}")]
    DestinationFailed(ArchivePath, &'static str, #[source] Errno),
    /// The output for file contents fails.
    #[error("cannot write to the output")]
    Output(#[source] Arc<io::Error>),
}

impl Error {
    /// Whether the error names an entry rather than the destination.
    pub fn is_for_entry(&self) -> bool {
        matches!(
            self,
            Self::NoSpace { .. }
                | Self::NoInodes { .. }
                | Self::Quota { .. }
                | Self::TooManyEntries { .. }
                | Self::DestinationFailed { .. }
        )
    }

    /// Advice for the user.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Destination(_, Errno::NOENT) => Some("make the directory first, or name another"),
            Self::Destination { .. } | Self::Unwritable { .. } => {
                Some("name a directory that you may write to")
            }
            Self::ShardRecord(_) => Some("name a directory that you may write to"),
            Self::OtherVersion => Some("write all shards of one version into an empty directory"),
            Self::TooManyEntries { .. } => {
                Some("if that is to be expected, allow it with a larger --max-entries")
            }
            Self::NoInodes { .. } => Some("remove files, or choose another destination"),
            Self::NoSpace { .. } | Self::Quota { .. } => {
                Some("free space, or choose another destination")
            }
            Self::DestinationFailed { .. } => Some("choose another destination"),
            Self::NotEmpty { .. } => Some("remove it, or name a directory that is not there yet"),
            Self::CannotRename { .. } => {
                Some("name a directory in another directory, or do without --atomic")
            }
            Self::Staging { .. } => Some("choose another place, or do without --atomic"),
            Self::Leftover { .. } => Some("remove it by hand"),
            Self::IndexRows(_) => Some(WITHOUT_PUBLISHED_INDEX),
            Self::NotACopy { .. } => Some("name an empty directory; what is there is left alone"),
            Self::InUse { .. } => Some(
                "one run or mount at a time writes there; wait until that one ends, or name another directory",
            ),
            Self::Ledger { .. } => Some("choose a directory whose parent belongs to you"),
            Self::Journal(_, Errno::EXIST) => {
                Some("it is no journal of tarfs; move it away, or do without --resume")
            }
            Self::Journal { .. } => {
                Some("choose a directory whose parent belongs to you, or do without --resume")
            }
            Self::Sync { .. } => Some("check the disk, then run the command again"),
            Self::TooMuchMemory(_) => Some(HINT_RAISE_INDEX_MEMORY),
            Self::ContainsDestination(_) => Some("name a directory outside of it"),
            Self::SourceDirectory(..) | Self::Interrupted | Self::Thread(_) | Self::Output(_) => {
                None
            }
        }
    }
}

/// A step that the system refused.
// The errno is not `#[source]`, because the text contains it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("cannot {action}: {errno}")]
pub struct StepError {
    /// An infinitive: `create the file`.
    pub(super) action: &'static str,
    pub(super) errno: Errno,
}

impl StepError {
    /// Whether the destination is at fault, so that the next entry would fail as well.
    pub(super) fn is_fatal(self) -> bool {
        matches!(
            self.errno,
            Errno::NOSPC | Errno::DQUOT | Errno::ROFS | Errno::IO
        )
    }
}

pub(super) fn errno_of(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

pub(super) trait WithAction<T> {
    fn with_action(self, action: &'static str) -> Result<T, StepError>;
}

impl<T> WithAction<T> for rustix::io::Result<T> {
    fn with_action(self, action: &'static str) -> Result<T, StepError> {
        self.map_err(|errno| StepError { action, errno })
    }
}

/// Maximum number of stripped prefixes to warn about. GNU tar also warns once per prefix.
const MAX_REPORTED_PREFIXES: usize = 16;

/// Problems of all threads, and the one fatal error.
#[derive(Debug, Default)]
pub(super) struct Problems {
    reporter: Option<Arc<dyn Reporter>>,
    recorded: Mutex<Vec<Problem>>,
    reported_prefixes: Mutex<Vec<Vec<u8>>>,
    count: AtomicU64,
    /// Shared with the staging, which sets it to stop the run.
    fatal: Arc<OnceLock<Error>>,
}

impl Problems {
    pub(super) fn new(reporter: Option<Arc<dyn Reporter>>) -> Self {
        Self {
            reporter,
            ..Self::default()
        }
    }

    /// Like [`Self::new`]. The caller stops the run by setting `stop_error`.
    pub(super) fn with_stop_error(
        stop_error: Arc<OnceLock<Error>>,
        reporter: Option<Arc<dyn Reporter>>,
    ) -> Self {
        Self {
            fatal: stop_error,
            ..Self::new(reporter)
        }
    }

    /// Shares the reporter and the fatal error, but counts separately.
    pub(super) fn fork(&self) -> Self {
        Self::with_stop_error(Arc::clone(&self.fatal), self.reporter.clone())
    }

    /// Whether the tree is being removed meanwhile, so that errors are expected.
    fn is_interrupted(&self) -> bool {
        matches!(self.fatal(), Some(Error::Interrupted))
    }

    pub(super) fn add(&self, path: &ArchivePath, cause: impl Into<Cause>) {
        if self.is_interrupted() {
            return;
        }
        let problem = Problem {
            path: path.clone(),
            cause: cause.into(),
        };
        if let Some(reporter) = &self.reporter {
            reporter.problem(&problem);
        }
        self.add_count(1);
        let mut problems = self.recorded.lock();
        if problems.len() < MAX_KEPT_PROBLEMS {
            problems.push(problem);
        }
    }

    /// Counts problems that are reported elsewhere, or for all such entries together.
    pub(super) fn add_count(&self, count: u64) {
        self.count.fetch_add(count, Ordering::Relaxed);
    }

    pub(super) fn warn(&self, text: &str) {
        if let Some(reporter) = self.reporter.as_ref().filter(|_| !self.is_interrupted()) {
            reporter.warning(text);
        }
    }

    /// Warns once that the prefix `stripped` is removed from names.
    pub(super) fn report_stripped_prefix(&self, stripped: Vec<u8>) {
        if stripped.is_empty() {
            return;
        }
        let mut reported = self.reported_prefixes.lock();
        if reported.len() < MAX_REPORTED_PREFIXES && !reported.contains(&stripped) {
            self.warn(&format!(
                "removing leading '{}' from member names",
                escape(&stripped)
            ));
            reported.push(stripped);
        }
    }

    /// Reports text about entries that are [counted](Self::add_count).
    pub(super) fn report(&self, text: &str) {
        if let Some(reporter) = self.reporter.as_ref().filter(|_| !self.is_interrupted()) {
            reporter.failure(text);
        }
    }

    /// Reports a damaged place. Counts the member that may be lost there, unless it `is_in_content`, whose end counts it.
    pub(super) fn damage(&self, text: &str, is_in_content: bool) {
        self.report(text);
        self.add_count((!is_in_content).into());
    }

    pub(super) fn entry(&self, path: &ArchivePath) {
        if let Some(reporter) = &self.reporter {
            reporter.entry(path);
        }
    }

    pub(super) fn report_deletion(&self, path: &ArchivePath) {
        if let Some(reporter) = &self.reporter {
            reporter.deletion(path);
        }
    }

    /// Stops the run; the first error stays.
    pub(super) fn stop(&self, error: Error) {
        drop(self.fatal.set(error));
    }

    pub(super) fn fatal(&self) -> Option<&Error> {
        self.fatal.get()
    }

    pub(super) fn check_fatal(&self) -> Result<(), Error> {
        self.fatal().map_or(Ok(()), |error| Err(error.clone()))
    }

    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    pub(super) fn take_problems(&self) -> Vec<Problem> {
        std::mem::take(&mut *self.recorded.lock())
    }
}
