//! What went wrong: with one entry, or with the whole destination.

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::io::Errno;

use crate::archive::HINT_RAISE_INDEX_MEMORY;
use crate::base::archive_path::ArchivePath;
use crate::base::resolve::PathError;
use crate::index::TooMuchMemory;

/// Problems kept for the summary; further ones are counted and told to the [`Reporter`] only.
const MAX_KEPT_PROBLEMS: usize = 100;

/// Hears of things as they happen, on any thread.
pub trait Reporter: Send + Sync + fmt::Debug {
    /// An entry is about to be written, or would be.
    fn entry(&self, path: &ArchivePath) {
        let _ = path;
    }

    /// An entry could not be written, or not wholly.
    fn problem(&self, problem: &Problem);

    /// Something is odd and nothing is lost.
    fn warning(&self, text: &str);
}

/// Why one entry is missing or incomplete.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{path}: {cause}")]
pub struct Problem {
    /// Which entry.
    pub path: ArchivePath,
    /// Why.
    // Not `#[source]`: its text is already in ours, and its own source is what comes next.
    pub cause: Cause,
}

/// Why, without saying which entry.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Cause {
    /// The operating system refused a step.
    #[error("cannot {action}: {errno}")]
    System {
        /// The step, as an infinitive: `create the file`.
        action: &'static str,
        /// The system's reason.
        errno: Errno,
    },
    /// The entry would lie outside the destination.
    #[error("refused: {0}")]
    Rejected(PathError),
    /// The member's name has a `..` component.
    #[error("refused: the name contains '..'")]
    ParentComponent,
    /// The member is not a directory and its name leads to the destination itself.
    #[error("refused: the name is that of the destination itself")]
    IsRoot,
    /// A hard link whose target is not there, even at the end.
    #[error("cannot link to {target}: no such file")]
    NoTarget {
        /// The target.
        target: ArchivePath,
    },
    /// A hard link whose target lost all its components, or has none.
    #[error("cannot link: nothing is left of the target's name")]
    EmptyTarget,
    /// It is not in the tree that the layers make.
    #[error("{0}")]
    LeftOut(String),
    /// The archive ends inside the member.
    #[error("the archive ends in the middle of this file, what is there was kept")]
    Truncated,
    /// A path that was asked for.
    #[error("not in the archive (`tarfs ls -R` shows what is; -C names a directory to write to)")]
    NotFound,
}

/// Why nothing can be written any more, or could not in the first place.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The destination cannot be opened.
    #[error("{}: cannot open the destination directory", path.display())]
    Destination {
        /// Which.
        path: PathBuf,
        /// The system's reason.
        #[source]
        errno: Errno,
    },
    /// Nothing can be written to the destination.
    #[error("{}: cannot write to the destination directory", path.display())]
    Unwritable {
        /// Which.
        path: PathBuf,
        /// The system's reason.
        #[source]
        errno: Errno,
    },
    /// A tree is to appear whole where something is already.
    #[error("{}: is there already and not empty; a whole tree replaces nothing", path.display())]
    NotEmpty {
        /// Where.
        path: PathBuf,
    },
    /// A tree is to appear whole where nothing can be renamed to.
    #[error("{}: {why}, so that no whole tree can be renamed to it", path.display())]
    CannotRename {
        /// Where.
        path: PathBuf,
        /// What it is.
        why: &'static str,
    },
    /// The place where a tree is to appear whole cannot be used.
    #[error("{}: cannot {action}", path.display())]
    Staging {
        /// Where.
        path: PathBuf,
        /// The step, as an infinitive.
        action: &'static str,
        /// The system's reason.
        #[source]
        errno: Errno,
    },
    /// What was built and is not wanted any more cannot be removed.
    #[error("{}: cannot remove the unfinished tree", path.display())]
    Leftover {
        /// Where it is.
        path: PathBuf,
        /// The system's reason.
        #[source]
        errno: Errno,
    },
    /// A mount's copy is to be kept where something else is.
    #[error("{}: is not empty, and is no copy that a mount of this archive keeps", path.display())]
    NotACopy {
        /// Where.
        path: PathBuf,
    },
    /// A mount's copy is kept there already.
    #[error("{}: another mount keeps its copy there", path.display())]
    InUse {
        /// Where.
        path: PathBuf,
    },
    /// The file beside a mount's copy that says what is whole cannot be used.
    #[error("{}: cannot {action}", path.display())]
    Ledger {
        /// Which file.
        path: PathBuf,
        /// The step, as an infinitive.
        action: &'static str,
        /// The system's reason.
        #[source]
        errno: Errno,
    },
    /// The file beside the tree that says how far a run has come cannot be used.
    #[error("{}: cannot write down there how far the run has come", path.display())]
    Journal {
        /// Which file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        errno: Errno,
    },
    /// The indexes of layers need more memory than is allowed.
    #[error(transparent)]
    TooMuchMemory(#[from] TooMuchMemory),
    /// The run was ended from outside.
    #[error("interrupted")]
    Interrupted,
    /// What was written is not known to be on disk.
    #[error("{}: cannot bring to disk what was written", path.display())]
    Sync {
        /// What was synced.
        path: PathBuf,
        /// The system's reason.
        #[source]
        errno: Errno,
    },
    /// No thread to write with.
    #[error("cannot start a writer thread")]
    Thread(#[source] Arc<std::io::Error>),
    /// No space left.
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
    /// No inode left, though bytes are.
    #[error("{path}: no inode left on the destination ({written_entries} entries were written)")]
    NoInodes {
        /// The entry that did not fit.
        path: ArchivePath,
        /// Entries written so far.
        written_entries: u64,
    },
    /// There are more entries than [`Options::max_entries`](super::Options::max_entries) allows.
    #[error("{path}: this is one entry more than the {limit} that are allowed")]
    TooManyEntries {
        /// The first member that needs one more.
        path: ArchivePath,
        /// How many are allowed.
        limit: u64,
    },
    /// The user's quota is used up.
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
    /// The destination cannot be written to, or fails.
    #[error("{path}: the destination fails, cannot {action}")]
    DestinationFailed {
        /// The entry at hand.
        path: ArchivePath,
        /// The step, as an infinitive.
        action: &'static str,
        /// The system's reason.
        #[source]
        errno: Errno,
    },
    /// The output that file contents go to fails.
    #[error("cannot write to the output")]
    Output(#[source] Arc<std::io::Error>),
}

impl Error {
    /// Whether it names the entry at which the destination failed, and not the destination.
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

    /// What the user can do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Destination {
                errno: Errno::NOENT,
                ..
            } => Some("make the directory first, or correct -C"),
            Self::Destination { .. } | Self::Unwritable { .. } => {
                Some("name a directory with -C that you may write to")
            }
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
                Some("name a directory in a directory with -C, or do without --atomic")
            }
            Self::Staging { .. } => Some("choose another place, or do without --atomic"),
            Self::Leftover { .. } => Some("remove it by hand"),
            Self::NotACopy { .. } => Some("name an empty directory; what is there is left alone"),
            Self::InUse { .. } => Some("name another directory, or unmount that one first"),
            Self::Ledger { .. } => Some("name a directory in a directory that is yours"),
            Self::Journal {
                errno: Errno::WOULDBLOCK,
                ..
            } => Some("another run writes there: wait for its end"),
            Self::Journal { .. } => {
                Some("name a directory in a directory that is yours, or do without --resume")
            }
            Self::Sync { .. } => Some("look at the disk, and write it again"),
            Self::TooMuchMemory(_) => Some(HINT_RAISE_INDEX_MEMORY),
            Self::Interrupted | Self::Thread(_) | Self::Output(_) => None,
        }
    }
}

/// A step that the operating system refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct StepError {
    /// The step, as an infinitive.
    pub(super) action: &'static str,
    pub(super) errno: Errno,
}

impl StepError {
    /// Whether the destination as a whole is at fault and the next entry would fail as well.
    pub(super) fn is_fatal(self) -> bool {
        matches!(
            self.errno,
            Errno::NOSPC | Errno::DQUOT | Errno::ROFS | Errno::IO
        )
    }
}

impl From<StepError> for Cause {
    fn from(error: StepError) -> Self {
        Self::System {
            action: error.action,
            errno: error.errno,
        }
    }
}

/// Names the step that an error belongs to.
pub(super) trait WithAction<T> {
    /// `action` is an infinitive: `create the file`.
    fn with_action(self, action: &'static str) -> Result<T, StepError>;
}

impl<T> WithAction<T> for rustix::io::Result<T> {
    fn with_action(self, action: &'static str) -> Result<T, StepError> {
        self.map_err(|errno| StepError { action, errno })
    }
}

/// Everyone's problems, and the one error that stops all.
#[derive(Debug, Default)]
pub(super) struct Problems {
    reporter: Option<Arc<dyn Reporter>>,
    problems: Mutex<Vec<Problem>>,
    count: AtomicU64,
    /// Shared with whoever may end the run from outside.
    fatal: Arc<OnceLock<Error>>,
}

impl Problems {
    pub(super) fn new(reporter: Option<Arc<dyn Reporter>>) -> Self {
        Self {
            reporter,
            ..Self::default()
        }
    }

    /// As [`Self::new`]; what is set in `end` stops everything.
    pub(super) fn with_stop_error(
        stop_error: Arc<OnceLock<Error>>,
        reporter: Option<Arc<dyn Reporter>>,
    ) -> Self {
        Self {
            fatal: stop_error,
            ..Self::new(reporter)
        }
    }

    /// The same, counted apart.
    pub(super) fn fork(&self) -> Self {
        Self::with_stop_error(Arc::clone(&self.fatal), self.reporter.clone())
    }

    pub(super) fn add(&self, path: &ArchivePath, cause: impl Into<Cause>) {
        // The tree is being removed under our feet; nobody wants to hear how that feels.
        if matches!(self.fatal(), Some(Error::Interrupted)) {
            return;
        }
        let problem = Problem {
            path: path.clone(),
            cause: cause.into(),
        };
        if let Some(reporter) = &self.reporter {
            reporter.problem(&problem);
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        let mut problems = self.problems.lock().unwrap_or_else(PoisonError::into_inner);
        if problems.len() < MAX_KEPT_PROBLEMS {
            problems.push(problem);
        }
    }

    /// Counts problems that are told elsewhere.
    pub(super) fn add_count(&self, count: u64) {
        self.count.fetch_add(count, Ordering::Relaxed);
    }

    /// Counts an entry whose reason was reported for all such entries together.
    pub(super) fn count_reported(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn warn(&self, text: &str) {
        // The tree is being removed while it is written.
        if matches!(self.fatal(), Some(Error::Interrupted)) {
            return;
        }
        if let Some(reporter) = &self.reporter {
            reporter.warning(text);
        }
    }

    /// Tells of a damaged place, and counts the member that may be lost there.
    pub(super) fn damage(&self, text: &str) {
        self.warn(text);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn entry(&self, path: &ArchivePath) {
        if let Some(reporter) = &self.reporter {
            reporter.entry(path);
        }
    }

    /// Stops everything; the first one stays.
    pub(super) fn stop(&self, error: Error) {
        drop(self.fatal.set(error));
    }

    /// Why everything must stop, if it must.
    pub(super) fn fatal(&self) -> Option<&Error> {
        self.fatal.get()
    }

    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    pub(super) fn take_problems(&self) -> Vec<Problem> {
        std::mem::take(&mut *self.problems.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
