//! What the scan's thread and the writers share.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::fs::{AtFlags, FileType};
use rustix::io::Errno;

use super::Existing;
use super::attribute_policy::AttributePolicy;
use super::destination::{Directory, Identity, lstat_at};
use super::error::{Error, Problems, StepError};
use super::file::Job;
use super::journal::Journal;
use super::unwritable::Unwritable;
use crate::base::archive_path::ArchivePath;
use crate::base::stats::Stats;
use crate::index::Options;

/// How often something in the way is removed before giving up; more than once only when another
/// process makes it again.
const MAX_CREATE_ATTEMPTS: usize = 3;

/// Rules, counters and problems of one run.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) policy: AttributePolicy,
    pub(super) existing: Existing,
    pub(super) device_placeholders: bool,
    pub(super) stats: Arc<Stats>,
    pub(super) problems: Problems,
    /// Where it is written down what is whole, if this run is to be taken up again.
    pub(super) journal: OnceLock<Arc<Journal>>,
    /// Links and directories removed to make room; paths through them may lead elsewhere now.
    pub(super) replacements: Arc<AtomicUsize>,
    pub(super) entry_quota: EntryQuota,
    pub(super) reserved_names: ReservedNames,
    pub(super) failed_files: FailedFiles,
    /// The destination directory, if nothing can be made in it.
    pub(super) unwritable: OnceLock<Unwritable>,
}

/// Entries that a run makes, those included that only paths speak of.
#[derive(Debug)]
pub(super) struct EntryQuota {
    used: AtomicU64,
    limit: u64,
}

impl EntryQuota {
    /// Up to `limit` entries.
    pub(super) fn new(limit: u64) -> Self {
        Self {
            used: AtomicU64::new(0),
            limit,
        }
    }

    /// Takes one more entry; `Quota` stands for the limit, also in [`Context::record_failure`].
    pub(super) fn acquire(&self) -> Result<(), Errno> {
        if self.used.fetch_add(1, Ordering::Relaxed) >= self.limit {
            return Err(Errno::DQUOT);
        }
        Ok(())
    }

    /// How many there may be.
    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    /// Numbers that an index of as many entries gives out at the most: those of the root and of
    /// nothing are two more. Never more than an index gives out by itself.
    pub(super) fn max_inodes(&self) -> u32 {
        let limit = u32::try_from(self.limit.saturating_add(2)).unwrap_or(u32::MAX);
        limit.min(Options::default().max_entries)
    }

    /// How many were taken.
    pub(super) fn count(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Counts those that an earlier run has made.
    pub(super) fn add_resumed(&self, count: u64) {
        self.used.fetch_add(count, Ordering::Relaxed);
    }

    fn is_exceeded(&self) -> bool {
        self.used.load(Ordering::Relaxed) > self.limit
    }
}

/// Names that links get at the end, as their targets have not come yet. Nothing is there on disk, and
/// yet they are taken, as in an index.
#[derive(Debug, Default)]
pub(super) struct ReservedNames(Mutex<HashMap<Identity, HashSet<Vec<u8>>>>);

impl ReservedNames {
    fn lock(&self) -> MutexGuard<'_, HashMap<Identity, HashSet<Vec<u8>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes `name` in `directory`.
    pub(super) fn reserve(&self, directory: &Directory, name: &[u8]) {
        let mut all = self.lock();
        let names = all.entry(directory.identity()).or_default();
        names.insert(name.to_vec());
    }

    /// Whether `name` in `directory` is taken, where nothing is.
    pub(super) fn contains(&self, directory: &Directory, name: &[u8]) -> bool {
        let all = self.lock();
        all.get(&directory.identity())
            .is_some_and(|names| names.contains(name))
    }

    /// None is taken any more.
    pub(super) fn clear(&self) {
        self.lock().clear();
    }

    /// Whether a name is taken in the directory, which therefore is not empty.
    fn has_any_in(&self, directory: Identity) -> bool {
        self.lock().contains_key(&directory)
    }
}

/// Names of unplaced files of layers that could not be created. Their errors are reported, so they are not
/// reported again when the files are missing at the end.
#[derive(Debug, Default)]
pub(super) struct FailedFiles(Mutex<HashSet<Vec<u8>>>);

impl FailedFiles {
    fn lock(&self) -> MutexGuard<'_, HashSet<Vec<u8>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds `name`.
    pub(super) fn add(&self, name: &[u8]) {
        self.lock().insert(name.to_vec());
    }

    /// Whether `name` was added.
    pub(super) fn contains(&self, name: &[u8]) -> bool {
        self.lock().contains(name)
    }
}

/// What became of a name.
#[derive(Debug)]
pub(super) enum CreateOutcome<T> {
    /// It is new.
    Created(T),
    /// Something was there and stays.
    Kept,
}

impl Context {
    /// As this one, for threads whose problems are counted apart: what stops them stops all.
    pub(super) fn fork(&self) -> Self {
        Self {
            policy: self.policy.clone(),
            existing: self.existing,
            device_placeholders: self.device_placeholders,
            stats: Arc::clone(&self.stats),
            problems: self.problems.fork(),
            journal: OnceLock::new(),
            replacements: Arc::clone(&self.replacements),
            entry_quota: EntryQuota::new(self.entry_quota.limit),
            reserved_names: ReservedNames::default(),
            failed_files: FailedFiles::default(),
            unwritable: OnceLock::new(),
        }
    }

    /// Has it written down in `journal` what is whole.
    pub(super) fn set_journal(&self, journal: &Arc<Journal>) {
        // There is one for a run.
        drop(self.journal.set(Arc::clone(journal)));
    }

    /// Whether this run is to be taken up again.
    pub(super) fn is_resumable(&self) -> bool {
        self.journal.get().is_some()
    }

    /// Writes down that the file of `job`, open as `fd`, is whole.
    pub(super) fn journal_file(&self, job: &Job, fd: &OwnedFd) {
        if let Some(journal) = self.journal.get()
            && let Ok(stat) = rustix::fs::fstat(fd)
        {
            journal.record_entry(job.number, &job.directory, &job.path, &stat);
        }
    }

    /// Makes `name` by `attempt`; what is in the way is removed, kept, or an error, as
    /// [`Existing`] says. Directories go only when they are empty, and `wait_for_files` sees to it that
    /// all files from earlier members are there before that is found out.
    ///
    /// # Errors
    /// Those of `attempt`; "exists" also when what is in the way cannot be removed.
    pub(super) fn create_or_replace<T>(
        &self,
        directory: &Directory,
        name: &[u8],
        mut wait_for_files: impl FnMut(),
        mut attempt: impl FnMut() -> Result<T, Errno>,
    ) -> Result<CreateOutcome<T>, Errno> {
        for _ in 0..MAX_CREATE_ATTEMPTS {
            match attempt() {
                Ok(made) => return Ok(CreateOutcome::Created(made)),
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
            match self.existing {
                Existing::Replace => self.remove_existing(directory, name, &mut wait_for_files)?,
                Existing::Keep => return Err(Errno::EXIST),
                Existing::Skip => return Ok(CreateOutcome::Kept),
            }
        }
        Err(Errno::EXIST)
    }

    /// Removes whatever is at `name`, if it is not a directory with something in it.
    fn remove_existing(
        &self,
        directory: &Directory,
        name: &[u8],
        wait_for_files: &mut impl FnMut(),
    ) -> Result<(), Errno> {
        let removed = match lstat_at(directory, name) {
            Err(errno) => Err(errno),
            Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory if self.reserved_names.has_any_in(Identity::of(&stat)) => {
                    Err(Errno::NOTEMPTY)
                }
                FileType::Directory => {
                    wait_for_files();
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
    pub(super) fn record_failure(
        &self,
        path: &ArchivePath,
        directory: &Directory,
        error: StepError,
        missing_bytes: u64,
    ) {
        if error.is_fatal() {
            self.problems
                .stop(self.fatal_error(path, directory, error, missing_bytes));
        } else if !self.is_unwritable(path, error) {
            self.problems.add(path, error);
        }
    }

    /// As [`Context::record_failure`], for the entry of `job`.
    pub(super) fn record_job_failure(&self, job: &Job, error: StepError, missing_bytes: u64) {
        if let Some(name) = &job.name {
            self.failed_files.add(name);
        }
        self.record_failure(&job.path, &job.directory, error, missing_bytes);
    }

    /// Whether `error` with the entry at `path` comes of a destination that cannot be written to.
    fn is_unwritable(&self, path: &ArchivePath, error: StepError) -> bool {
        let unwritable = self.unwritable.get();
        unwritable.is_some_and(|unwritable| unwritable.explains(path, error, &self.problems))
    }

    fn fatal_error(
        &self,
        path: &ArchivePath,
        directory: &Directory,
        error: StepError,
        missing_bytes: u64,
    ) -> Error {
        let path = path.clone();
        let written_bytes = self.stats.written_bytes.get();
        match error.errno {
            Errno::DQUOT if self.entry_quota.is_exceeded() => Error::TooManyEntries {
                path,
                limit: self.entry_quota.limit,
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
                space => Error::NoSpace {
                    path,
                    available_bytes: space
                        .map_or(0, |space| space.f_bavail.saturating_mul(space.f_frsize)),
                    missing_bytes,
                    written_bytes,
                },
            },
            errno => Error::DestinationFailed {
                path,
                action: error.action,
                errno,
            },
        }
    }
}
