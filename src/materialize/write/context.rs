//! State shared by the scan thread and the writers.

use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::fs::{AtFlags, FileType};
use rustix::io::Errno;

use super::attribute_policy::AttributePolicy;
use super::directory::{Directory, Identity, lstat_at};
use super::job::Job;
use super::temporary::{ReplaceRules, TemporaryEntry};
use super::unwritable::Unwritable;
use crate::base::archive_path::ArchivePath;
use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::index;
use crate::materialize::error::{Error, Problems, StepError};
use crate::materialize::options::{Existing, Options, Summary};

/// Maximum number of attempts to create an entry, because another process may make it again.
const MAX_CREATE_ATTEMPTS: usize = 3;

/// Rules, counters and problems of one run.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) policy: AttributePolicy,
    pub(crate) existing: Existing,
    pub(crate) device_placeholders: bool,
    pub(crate) stats: Arc<Stats>,
    pub(crate) problems: Problems,
    pub(crate) file_observer: OnceLock<Arc<dyn FileObserver>>,
    /// Number of links and directories removed to make room, which makes cached paths through them stale.
    pub(crate) replacements: Arc<AtomicUsize>,
    pub(crate) entry_quota: EntryQuota,
    pub(crate) reserved_names: ReservedNames,
    /// Files that could not be made: unplaced ones of layers by their names, which are not reported again at the end, and
    /// those of an update by their paths, of which no other name becomes a link.
    pub(crate) failed_files: Mutex<HashSet<Vec<u8>>>,
    /// The destination directory, if it is not writable.
    pub(crate) unwritable: OnceLock<Unwritable>,
    /// Set for an update, whose entries replace others only when they are complete.
    pub(crate) replace_rules: OnceLock<ReplaceRules>,
}

/// Observes complete files, on the writer threads. They are made again if the run is interrupted.
pub(crate) trait FileObserver: Debug + Send + Sync {
    fn file_complete(&self, job: &Job, fd: &OwnedFd);
}

/// Entries made by a run, implied directories included, and their limit.
#[derive(Debug)]
pub(crate) struct EntryQuota {
    used: AtomicU64,
    pub(crate) limit: u64,
}

impl EntryQuota {
    /// Uses one more entry. `DQUOT` reports an exceeded limit, also in [`Context::record_failure`].
    pub(crate) fn acquire(&self) -> Result<(), Errno> {
        if self.used.fetch_add(1, Ordering::Relaxed) >= self.limit {
            return Err(Errno::DQUOT);
        }
        Ok(())
    }

    /// Limit for an index of that many entries. The index needs two more, for the root and
    /// "no entry". Its default limit is also an upper bound.
    pub(crate) fn max_entries(&self) -> u32 {
        let limit = u32::try_from(self.limit.saturating_add(2)).unwrap_or(u32::MAX);
        limit.min(index::Options::default().max_entries)
    }

    pub(crate) fn count(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub(crate) fn add_resumed(&self, count: u64) {
        self.used.fetch_add(count, Ordering::Relaxed);
    }
}

/// Names of deferred links, whose targets have not arrived yet. Not on disk, but in use, as in an index.
#[derive(Debug, Default)]
pub(crate) struct ReservedNames(Mutex<HashMap<Identity, HashSet<Vec<u8>>>>);

impl ReservedNames {
    pub(crate) fn reserve(&self, directory: &Directory, name: &[u8]) {
        let mut all = self.0.lock();
        let names = all.entry(directory.identity()).or_default();
        names.insert(name.to_vec());
    }

    /// Whether `name` in `directory` is reserved. The caller knows that no entry exists there.
    pub(crate) fn contains(&self, directory: &Directory, name: &[u8]) -> bool {
        let all = self.0.lock();
        all.get(&directory.identity())
            .is_some_and(|names| names.contains(name))
    }

    pub(crate) fn release(&self, directory: &Directory, name: &[u8]) {
        let mut all = self.0.lock();
        if let Some(names) = all.get_mut(&directory.identity()) {
            names.remove(name);
            if names.is_empty() {
                all.remove(&directory.identity());
            }
        }
    }

    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }
}

impl Context {
    pub(crate) fn new(options: &Options, problems: Problems, stats: Arc<Stats>) -> Self {
        Self {
            policy: AttributePolicy::new(options),
            existing: options.existing,
            device_placeholders: options.device_placeholders,
            stats,
            problems,
            file_observer: OnceLock::new(),
            replacements: Arc::default(),
            entry_quota: EntryQuota {
                used: AtomicU64::new(0),
                limit: options.max_entries,
            },
            reserved_names: ReservedNames::default(),
            failed_files: Mutex::default(),
            unwritable: OnceLock::new(),
            replace_rules: OnceLock::new(),
        }
    }

    pub(crate) fn summary(&self) -> Summary {
        let (entries, bytes) = (&self.stats.written_entries, &self.stats.written_bytes);
        Summary::new(entries.get(), bytes.get(), &self.problems)
    }

    pub(crate) fn note_replacement(&self) {
        self.replacements.fetch_add(1, Ordering::Release);
    }

    /// Creates an entry by `attempt`, which receives its name: a temporary one in an update, and otherwise `name` as by
    /// [`Self::create_or_replace`].
    pub(crate) fn create<T>(
        &self,
        directory: &Directory,
        name: &[u8],
        wait_for_files: impl FnMut(),
        mut attempt: impl FnMut(&[u8]) -> Result<T, Errno>,
    ) -> Result<Option<(T, Option<TemporaryEntry>)>, Errno> {
        if let Some(&rules) = self.replace_rules.get() {
            let temporary = TemporaryEntry::new(directory, name, rules)?;
            let made = attempt(temporary.name())?;
            return Ok(Some((made, Some(temporary))));
        }
        let made = self.create_or_replace(directory, name, wait_for_files, || attempt(name));
        Ok(made?.map(|made| (made, None)))
    }

    /// Creates `name` by `attempt`, and handles an existing entry as [`Existing`] says; `None` if it is kept.
    /// Only empty directories are removed, after `wait_for_files` has waited for the files of all earlier
    /// members, so that "empty" is certain. Fails with `EXIST` also when the entry cannot be removed.
    pub(super) fn create_or_replace<T>(
        &self,
        directory: &Directory,
        name: &[u8],
        mut wait_for_files: impl FnMut(),
        mut attempt: impl FnMut() -> Result<T, Errno>,
    ) -> Result<Option<T>, Errno> {
        for _ in 0..MAX_CREATE_ATTEMPTS {
            match attempt() {
                Ok(made) => return Ok(Some(made)),
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
            match self.existing {
                Existing::Replace => self.remove_existing(directory, name, &mut wait_for_files)?,
                Existing::Keep => return Err(Errno::EXIST),
                Existing::Skip => return Ok(None),
            }
        }
        Err(Errno::EXIST)
    }

    /// Removes the entry `name`, unless it is a non-empty directory.
    fn remove_existing(
        &self,
        directory: &Directory,
        name: &[u8],
        wait_for_files: &mut impl FnMut(),
    ) -> Result<(), Errno> {
        let removed = lstat_at(directory, name).and_then(|stat| {
            let kind = FileType::from_raw_mode(stat.st_mode);
            let mut flags = AtFlags::empty();
            if kind == FileType::Directory {
                // A directory with a reserved name is not empty.
                let reserved_names = &self.reserved_names.0;
                if reserved_names.lock().contains_key(&Identity::of(&stat)) {
                    return Err(Errno::NOTEMPTY);
                }
                wait_for_files();
                flags = AtFlags::REMOVEDIR;
            }
            if matches!(kind, FileType::Directory | FileType::Symlink) {
                self.note_replacement();
            }
            rustix::fs::unlinkat(directory, name, flags)
        });
        match removed {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            // GNU tar also reports why the entry was not made, not why the old one was not removed.
            Err(Errno::NOTEMPTY | Errno::BUSY) => Err(Errno::EXIST),
            Err(errno) => Err(errno),
        }
    }

    /// Reports a failed entry, or stops the run at a fatal error. `missing_bytes` is the rest of its content.
    pub(crate) fn record_failure(
        &self,
        path: &ArchivePath,
        directory: &Directory,
        error: StepError,
        missing_bytes: u64,
    ) {
        if error.is_fatal() {
            self.problems
                .stop(self.fatal_error(path, directory, error, missing_bytes));
            return;
        }
        let unwritable = self.unwritable.get();
        if !unwritable.is_some_and(|unwritable| unwritable.absorb(path, error, &self.problems)) {
            self.problems.add(path, error);
        }
    }

    /// Whether this update could not make the file at `path`.
    pub(crate) fn has_failed(&self, path: &ArchivePath) -> bool {
        self.failed_files.lock().contains(path.as_bytes())
    }

    /// Notes that the file of `job` is not made.
    pub(super) fn note_failure(&self, job: &Job) {
        let is_update = self.replace_rules.get().is_some();
        let path = is_update.then(|| job.path.as_bytes());
        if let Some(name) = job.name.as_deref().or(path) {
            self.failed_files.lock().insert(name.to_vec());
        }
    }

    pub(crate) fn record_job_failure(&self, job: &Job, error: StepError, missing_bytes: u64) {
        self.note_failure(job);
        self.record_failure(&job.path, &job.directory, error, missing_bytes);
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
            Errno::DQUOT if self.entry_quota.count() > self.entry_quota.limit => {
                Error::TooManyEntries(path, self.entry_quota.limit)
            }
            Errno::DQUOT => Error::Quota {
                path,
                missing_bytes,
                written_bytes,
            },
            Errno::NOSPC => match rustix::fs::fstatvfs(directory) {
                Ok(space) if space.f_favail == 0 && space.f_files > 0 && space.f_bavail > 0 => {
                    Error::NoInodes(path, self.stats.written_entries.get())
                }
                space => Error::NoSpace {
                    path,
                    available_bytes: space
                        .map_or(0, |space| space.f_bavail.saturating_mul(space.f_frsize)),
                    missing_bytes,
                    written_bytes,
                },
            },
            errno => Error::DestinationFailed(path, error.action, errno),
        }
    }
}
