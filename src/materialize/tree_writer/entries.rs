//! Makes directories, links and special files, immediately and on the scan thread.

use rustix::fs::{AtFlags, FileType, Stat};
use rustix::io::Errno;

use super::TreeWriter;
use crate::base::archive_path::ArchivePath;
use crate::base::resolve::ResolveError;
use crate::index::{self, MAX_FORWARD_LINK_PASSES};
use crate::materialize::error::{Cause, StepError, WithAction};
use crate::materialize::options::Existing;
use crate::materialize::write::{
    DeferredLink, Directory, Identity, IfMissing, Job, PendingDirectory, is_directory, lstat_at,
    name_of, parent_of,
};
use crate::tar::MemberKind;

const CREATE_LINK: &str = "create the hard link";

impl TreeWriter {
    /// Makes an entry that is not a regular file.
    pub(crate) fn make_entry(&mut self, job: Job) {
        let writers = &mut self.destination.writers;
        writers.wait_for_name(job.directory.identity(), name_of(&job.path));
        let made = match &job.member.kind {
            MemberKind::File => return,
            MemberKind::Directory => return self.make_directory(job),
            MemberKind::HardLink(target) => return self.make_link(&job, target),
            _ => self.context.make_special(&job, || writers.wait_for_all()),
        };
        if made {
            self.resume
                .record_entry(job.number, &job.directory, &job.path);
        }
    }

    fn make_directory(&mut self, job: Job) {
        match self.try_make_directory(&job) {
            Ok(Some((directory, is_new))) => {
                let identity = directory.identity();
                self.destination
                    .cache
                    .insert(job.path.as_bytes(), directory);
                self.context.stats.written_entries.increment();
                let path = job.directory.place_of(&job.path);
                let policy = &self.context.policy;
                let pending = PendingDirectory::new(path, identity, is_new, *job.member, policy);
                self.defer_attributes(pending, Some(&job.directory));
            }
            Ok(None) => {}
            Err(error) => self.context.record_job_failure(&job, error, 0),
        }
    }

    /// Makes or opens the directory, and says whether it is new; `None` if another entry is kept.
    pub(crate) fn try_make_directory(
        &mut self,
        job: &Job,
    ) -> Result<Option<(Directory, bool)>, StepError> {
        let destination = &mut self.destination;
        let invalidate = || destination.invalidate(job.path.as_bytes());
        let Some(is_new) = self.context.make_directory(job, invalidate)? else {
            return Ok(None);
        };
        let directory = destination.open_child(&job.directory, job.name(), is_new);
        let is_new = is_new || self.resume.was_made_before(job);
        Ok(Some((directory.with_action("open the directory")?, is_new)))
    }

    /// Whether the path of `job` goes through the link that is in its place, and that it replaces.
    pub(super) fn removes_link_on_its_way(&mut self, job: &Job) -> bool {
        let is_link = |stat: Stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink;
        let name = name_of(&job.path);
        self.context.existing == Existing::Replace
            && self.context.replace_rules.get().is_none()
            && job.directory.resolved_path_of(name).is_some()
            && lstat_at(&job.directory, name).is_ok_and(is_link)
            && self.destination.goes_through_itself(&job.path)
            && self.replaces_link(job)
    }

    /// Whether `job` replaces a link in its place.
    fn replaces_link(&mut self, job: &Job) -> bool {
        let kind = &job.member.kind;
        let MemberKind::HardLink(target) = kind else {
            return index::check_kind(kind).is_ok();
        };
        let Some(target) = self.link_target(target) else {
            return false;
        };
        let (parent, name) = (parent_of(&target), name_of(&target));
        let Ok(directory) = self.destination.resolve_directory(parent, IfMissing::Fail) else {
            return false;
        };
        let writers = &mut self.destination.writers;
        writers.wait_for_name(directory.identity(), name);
        lstat_at(&directory, name).is_ok_and(|stat| {
            FileType::from_raw_mode(stat.st_mode) != FileType::Directory
                && !is_same_file(&directory, name, &job.directory, name_of(&job.path))
        })
    }

    /// Removes the link in the place of `job`, whose inode may be `shared` with other names. `None` after an error.
    pub(super) fn remove_link(&mut self, job: &Job, shared: Option<u64>) -> Option<()> {
        let (directory, name) = (&job.directory, name_of(&job.path));
        self.context.note_replacement();
        match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
            // The link had replaced a deferred link of the same name.
            Ok(()) | Err(Errno::NOENT) => self.context.reserved_names.release(directory, name),
            Err(errno) => {
                let action = "remove the link in its place";
                let error = StepError { action, errno };
                let missing_bytes = job.member.payload.len();
                self.context.record_job_failure(job, error, missing_bytes);
                return None;
            }
        }
        if let Some(inode) = shared {
            self.resume.after_replace(inode, &mut self.destination);
        }
        Some(())
    }

    /// Path of a hard link's target in the destination; `None` if no component remains.
    fn link_target(&self, target: &[u8]) -> Option<ArchivePath> {
        let target = ArchivePath::sanitize(target).path;
        let target = self.selection.strip_path(target);
        target.filter(|target| !target.is_root())
    }

    fn make_link(&mut self, job: &Job, target: &[u8]) {
        let Some(target) = self.link_target(target) else {
            self.context.problems.add(&job.path, Cause::EmptyTarget);
            return;
        };
        match self.try_make_link(&job.directory, &job.path, &target) {
            Ok(()) => {
                self.resume
                    .record_entry(job.number, &job.directory, &job.path);
                self.resume
                    .after_link(&job.path, &target, &mut self.destination);
            }
            Err(error) if is_missing(&error) => self.defer_link(job, target),
            Err(error) => self.record_link_failure(&job.path, &job.directory, &error),
        }
    }

    /// Defers a link to the end of the run. Until it can be made, an existing entry stays, as in GNU tar.
    fn defer_link(&mut self, job: &Job, target: ArchivePath) {
        let name = name_of(&job.path);
        let is_taken = match lstat_at(&job.directory, name) {
            Ok(_) => true,
            Err(Errno::NOENT) => self.context.reserved_names.contains(&job.directory, name),
            Err(errno) => {
                let action = CREATE_LINK;
                let error = StepError { action, errno };
                return self.context.record_job_failure(job, error, 0);
            }
        };
        match self.context.existing {
            Existing::Skip if is_taken => {}
            _ if is_taken => {
                let problems = &self.context.problems;
                problems.add(&job.path, Cause::NoTarget(target));
            }
            _ => {
                self.context.reserved_names.reserve(&job.directory, name);
                let path = job.directory.place_of(&job.path);
                let link = DeferredLink { path, target };
                self.resume.record_link(&link);
                self.links.push(link);
            }
        }
    }

    fn try_make_link(
        &mut self,
        directory: &Directory,
        path: &ArchivePath,
        target: &ArchivePath,
    ) -> Result<(), ResolveError<StepError>> {
        let name = name_of(path);
        let parent = parent_of(target);
        let destination = &mut self.destination;
        let target_directory = destination.resolve_directory(parent, IfMissing::Fail)?;
        let target_name = name_of(target);
        destination
            .writers
            .wait_for_name(target_directory.identity(), target_name);
        self.resume.before_link(&target_directory, target_name);
        let link = |name: &[u8]| {
            let flags = AtFlags::empty();
            rustix::fs::linkat(&target_directory, target_name, directory, name, flags)
        };
        // If both names are the same file already, the name must not be removed first.
        let made = match link(name) {
            Err(Errno::EXIST) if is_same_file(&target_directory, target_name, directory, name) => {
                Ok(Some(()))
            }
            // A directory cannot be linked, so nothing is removed for such a link.
            Err(Errno::EXIST) if is_directory(&target_directory, target_name) => Err(Errno::PERM),
            Err(Errno::EXIST) => {
                let wait_for_files = || destination.writers.wait_for_all();
                let made = self.context.create(directory, name, wait_for_files, link);
                made.and_then(|made| match made {
                    Some(((), Some(temporary))) => temporary
                        .place(name, || self.context.note_replacement())
                        .map(Some),
                    made => Ok(made.map(drop)),
                })
            }
            result => result.map(Some),
        };
        match made {
            Ok(Some(())) => self.context.stats.written_entries.increment(),
            Ok(None) => {}
            Err(errno) => {
                let action = CREATE_LINK;
                return Err(ResolveError::Tree(StepError { action, errno }));
            }
        }
        Ok(())
    }

    /// Makes `path` a name of the existing file `target`. Reports errors.
    pub(crate) fn link(&mut self, path: &ArchivePath, target: &ArchivePath) {
        if let Some(directory) = self.parent_directory(path, 0)
            && let Err(error) = self.try_make_link(&directory, path, target)
        {
            self.record_link_failure(path, &directory, &error);
        }
    }

    fn record_link_failure(
        &self,
        path: &ArchivePath,
        directory: &Directory,
        error: &ResolveError<StepError>,
    ) {
        match *error {
            ResolveError::Path(error) => self.context.problems.add(path, Cause::Rejected(error)),
            ResolveError::Tree(error) => self.context.record_failure(path, directory, error, 0),
        }
    }

    /// Makes the deferred links in reverse order, because one before its target often starts a chain.
    pub(crate) fn make_deferred_links(&mut self) {
        let mut links = std::mem::take(&mut self.links);
        for _ in 0..MAX_FORWARD_LINK_PASSES {
            let before = links.len();
            links = links
                .into_iter()
                .rev()
                .filter(|link| !self.make_deferred_link(link))
                .collect();
            if links.is_empty() || links.len() == before {
                break;
            }
        }
        for link in links {
            let problems = &self.context.problems;
            problems.add(&link.path, Cause::NoTarget(link.target));
        }
        self.context.reserved_names.clear();
    }

    /// Returns false if the target is missing, and reports other errors.
    fn make_deferred_link(&mut self, link: &DeferredLink) -> bool {
        let parent = parent_of(&link.path);
        let result = match self
            .destination
            .resolve_directory(parent, IfMissing::Create)
        {
            Ok(directory) if lstat_at(&directory, name_of(&link.path)).is_ok() => Ok(()),
            Ok(directory) => {
                let made = self.try_make_link(&directory, &link.path, &link.target);
                // Recorded for member 0, because no later member makes it again.
                self.resume.record_entry(0, &directory, &link.path);
                made
            }
            Err(error) => Err(error),
        };
        match result {
            Err(error) if is_missing(&error) => return false,
            Err(error) => self.record_link_failure(&link.path, &self.destination.top, &error),
            Ok(()) => {}
        }
        true
    }
}

fn is_missing(error: &ResolveError<StepError>) -> bool {
    matches!(error, ResolveError::Tree(error) if error.errno == Errno::NOENT)
}

fn is_same_file(one: &Directory, one_name: &[u8], other: &Directory, other_name: &[u8]) -> bool {
    match (lstat_at(one, one_name), lstat_at(other, other_name)) {
        (Ok(one), Ok(other)) => Identity::of(&one) == Identity::of(&other),
        _ => false,
    }
}
