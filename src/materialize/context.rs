//! What the scan's thread and the writers share.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::fs::{AtFlags, FileType};
use rustix::io::Errno;

use super::Existing;
use super::file::Job;
use super::journal::Journal;
use super::policy::Policy;
use super::problem::{Error, Problems, Trouble};
use super::root::{Directory, Identity, status};
use super::unwritable::Unwritable;
use crate::base::archive_path::ArchivePath;
use crate::base::stats::Stats;
use crate::index::Options;

/// How often something in the way is removed before giving up; more than once only when another
/// process makes it again.
const ATTEMPTS: usize = 3;

/// Rules, counters and problems of one run.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) policy: Policy,
    pub(super) existing: Existing,
    pub(super) device_placeholders: bool,
    pub(super) stats: Arc<Stats>,
    pub(super) problems: Problems,
    /// Where it is written down what is whole, if this run is to be taken up again.
    pub(super) journal: OnceLock<Arc<Journal>>,
    /// Links and directories removed to make room; paths through them may lead elsewhere now.
    pub(super) replacements: Arc<AtomicUsize>,
    pub(super) claims: Claims,
    pub(super) promises: Promises,
    pub(super) failed_files: FailedFiles,
    /// The destination directory, if nothing can be made in it.
    pub(super) unwritable: OnceLock<Unwritable>,
}

/// Entries that a run makes, those included that only paths speak of.
#[derive(Debug)]
pub(super) struct Claims {
    made: AtomicU64,
    most: u64,
}

impl Claims {
    /// Up to `most` entries.
    pub(super) fn new(most: u64) -> Self {
        Self {
            made: AtomicU64::new(0),
            most,
        }
    }

    /// Takes one more entry; `Quota` stands for the limit, also in [`Context::fail`].
    pub(super) fn take(&self) -> Result<(), Errno> {
        if self.made.fetch_add(1, Ordering::Relaxed) >= self.most {
            return Err(Errno::DQUOT);
        }
        Ok(())
    }

    /// How many there may be.
    pub(super) fn most(&self) -> u64 {
        self.most
    }

    /// Numbers that an index of as many entries gives out at the most: those of the root and of
    /// nothing are two more. Never more than an index gives out by itself.
    pub(super) fn most_numbers(&self) -> u32 {
        let most = u32::try_from(self.most.saturating_add(2)).unwrap_or(u32::MAX);
        most.min(Options::default().max_entries)
    }

    /// How many were taken.
    pub(super) fn count(&self) -> u64 {
        self.made.load(Ordering::Relaxed)
    }

    /// Counts those that an earlier run has made.
    pub(super) fn add_earlier(&self, count: u64) {
        self.made.fetch_add(count, Ordering::Relaxed);
    }

    fn are_exceeded(&self) -> bool {
        self.made.load(Ordering::Relaxed) > self.most
    }
}

/// Names that links get at the end, as their targets have not come yet. Nothing is there on disk, and
/// yet they are taken, as in an index.
#[derive(Debug, Default)]
pub(super) struct Promises(Mutex<HashMap<Identity, HashSet<Vec<u8>>>>);

impl Promises {
    fn names(&self) -> MutexGuard<'_, HashMap<Identity, HashSet<Vec<u8>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes `name` in `directory`.
    pub(super) fn make(&self, directory: &Directory, name: &[u8]) {
        let mut all = self.names();
        let names = all.entry(directory.identity()).or_default();
        names.insert(name.to_vec());
    }

    /// Whether `name` in `directory` is taken, where nothing is.
    pub(super) fn has(&self, directory: &Directory, name: &[u8]) -> bool {
        let all = self.names();
        all.get(&directory.identity())
            .is_some_and(|names| names.contains(name))
    }

    /// None is taken any more.
    pub(super) fn clear(&self) {
        self.names().clear();
    }

    /// Whether a name is taken in the directory, which therefore is not empty.
    fn are_in(&self, directory: Identity) -> bool {
        self.names().contains_key(&directory)
    }
}

/// Names of unplaced files of layers that could not be created. Their errors are reported, so they are not
/// reported again when the files are missing at the end.
#[derive(Debug, Default)]
pub(super) struct FailedFiles(Mutex<HashSet<Vec<u8>>>);

impl FailedFiles {
    fn names(&self) -> MutexGuard<'_, HashSet<Vec<u8>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds `name`.
    pub(super) fn add(&self, name: &[u8]) {
        self.names().insert(name.to_vec());
    }

    /// Whether `name` was added.
    pub(super) fn has(&self, name: &[u8]) -> bool {
        self.names().contains(name)
    }
}

/// What became of a name.
#[derive(Debug)]
pub(super) enum Made<T> {
    /// It is new.
    New(T),
    /// Something was there and stays.
    Kept,
}

impl Context {
    /// As this one, for threads whose problems are counted apart: what stops them stops all.
    pub(super) fn apart(&self) -> Self {
        Self {
            policy: self.policy.clone(),
            existing: self.existing,
            device_placeholders: self.device_placeholders,
            stats: Arc::clone(&self.stats),
            problems: self.problems.apart(),
            journal: OnceLock::new(),
            replacements: Arc::clone(&self.replacements),
            claims: Claims::new(self.claims.most),
            promises: Promises::default(),
            failed_files: FailedFiles::default(),
            unwritable: OnceLock::new(),
        }
    }

    /// Has it written down in `journal` what is whole.
    pub(super) fn keep(&self, journal: &Arc<Journal>) {
        // There is one for a run.
        drop(self.journal.set(Arc::clone(journal)));
    }

    /// Whether this run is to be taken up again.
    pub(super) fn is_kept(&self) -> bool {
        self.journal.get().is_some()
    }

    /// Writes down that the file of `job`, open as `fd`, is whole.
    pub(super) fn journal_file(&self, job: &Job, fd: &OwnedFd) {
        if let Some(journal) = self.journal.get()
            && let Ok(stat) = rustix::fs::fstat(fd)
        {
            journal.entry(job.number, &job.directory, &job.path, &stat);
        }
    }

    /// Makes `name` by `attempt`; what is in the way is removed, kept, or an error, as
    /// [`Existing`] says. Directories go only when they are empty, and `settle` sees to it that
    /// all files from earlier members are there before that is found out.
    ///
    /// # Errors
    /// Those of `attempt`; "exists" also when what is in the way cannot be removed.
    pub(super) fn make<T>(
        &self,
        directory: &Directory,
        name: &[u8],
        mut settle: impl FnMut(),
        mut attempt: impl FnMut() -> Result<T, Errno>,
    ) -> Result<Made<T>, Errno> {
        for _ in 0..ATTEMPTS {
            match attempt() {
                Ok(made) => return Ok(Made::New(made)),
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
            match self.existing {
                Existing::Replace => self.remove(directory, name, &mut settle)?,
                Existing::Keep => return Err(Errno::EXIST),
                Existing::Skip => return Ok(Made::Kept),
            }
        }
        Err(Errno::EXIST)
    }

    /// Removes whatever is at `name`, if it is not a directory with something in it.
    fn remove(
        &self,
        directory: &Directory,
        name: &[u8],
        settle: &mut impl FnMut(),
    ) -> Result<(), Errno> {
        let removed = match status(directory, name) {
            Err(errno) => Err(errno),
            Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory if self.promises.are_in(Identity::of(&stat)) => {
                    Err(Errno::NOTEMPTY)
                }
                FileType::Directory => {
                    settle();
                    self.replacements.fetch_add(1, Ordering::Release);
                    rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR)
                }
                FileType::Symlink => {
                    self.replacements.fetch_add(1, Ordering::Release);
                    rustix::fs::unlinkat(directory, name, AtFlags::empty())
                }
                _ => rustix::fs::unlinkat(directory, name, AtFlags::empty()),
            },
        };
        match removed {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            // What GNU tar says too: the reason for not making the entry, not for not removing.
            Err(Errno::NOTEMPTY | Errno::BUSY) => Err(Errno::EXIST),
            Err(errno) => Err(errno),
        }
    }

    /// Notes that an entry could not be made: for the report, or as the end of everything.
    /// `missing_bytes` is what its content still needed.
    pub(super) fn fail(
        &self,
        path: &ArchivePath,
        directory: &Directory,
        trouble: Trouble,
        missing_bytes: u64,
    ) {
        if trouble.is_fatal() {
            self.problems
                .stop(self.fatal(path, directory, trouble, missing_bytes));
        } else if !self.is_unwritable(path, trouble) {
            self.problems.add(path, trouble);
        }
    }

    /// As [`Context::fail`], for the entry of `job`.
    pub(super) fn fail_job(&self, job: &Job, trouble: Trouble, missing_bytes: u64) {
        if let Some(name) = &job.name {
            self.failed_files.add(name);
        }
        self.fail(&job.path, &job.directory, trouble, missing_bytes);
    }

    /// Whether `trouble` with the entry at `path` comes of a destination that cannot be written to.
    fn is_unwritable(&self, path: &ArchivePath, trouble: Trouble) -> bool {
        let unwritable = self.unwritable.get();
        unwritable.is_some_and(|unwritable| unwritable.explains(path, trouble, &self.problems))
    }

    fn fatal(
        &self,
        path: &ArchivePath,
        directory: &Directory,
        trouble: Trouble,
        missing_bytes: u64,
    ) -> Error {
        let path = path.clone();
        let written_bytes = self.stats.written_bytes.get();
        match trouble.errno {
            Errno::DQUOT if self.claims.are_exceeded() => Error::TooManyEntries {
                path,
                limit: self.claims.most,
            },
            Errno::DQUOT => Error::Quota {
                path,
                missing_bytes,
                written_bytes,
            },
            Errno::NOSPC => match rustix::fs::fstatvfs(directory) {
                Ok(space) if space.f_favail == 0 && space.f_files > 0 && space.f_bavail > 0 => {
                    Error::NoInodes {
                        path,
                        written_entries: self.stats.written_entries.get(),
                    }
                }
                space => Error::Full {
                    path,
                    available_bytes: space
                        .map_or(0, |space| space.f_bavail.saturating_mul(space.f_frsize)),
                    missing_bytes,
                    written_bytes,
                },
            },
            errno => Error::Failing {
                path,
                action: trouble.action,
                errno,
            },
        }
    }
}
