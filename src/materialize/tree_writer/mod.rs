//! Writes the tree of a run: begins members, journals them, and keeps the work of its end.

mod entries;

use std::sync::Arc;

use crate::base::AttributeTarget;
use crate::base::archive_path::ArchivePath;
use crate::base::chmod::OWNER_RWX;
use crate::base::resolve::ResolveError;
use crate::base::stats::Stats;
use crate::materialize::error::{Cause, Error, Problems, WithAction};
use crate::materialize::options::{Existing, Options};
use crate::materialize::resume::ResumeState;
use crate::materialize::resume::journal::RecoveredState;
use crate::materialize::selection::Selection;
use crate::materialize::write::{
    Context, DeferredLink, Destination, Directory, IfMissing, Job, PendingDirectory, WriterPool,
    apply_all, default_writer_count, lstat_at, name_of, parent_of,
};
use crate::tar::{Member, MemberKind};

/// Action in the error of a member that exceeds the entry limit.
pub(crate) const ADD_ENTRY: &str = "make one more entry";

#[derive(Debug)]
pub(crate) struct TreeWriter {
    pub(crate) context: Arc<Context>,
    pub(crate) destination: Destination,
    pub(crate) selection: Selection,
    pub(crate) resume: ResumeState,
    /// In archive order.
    directories: Vec<PendingDirectory>,
    pub(crate) links: Vec<DeferredLink>,
}

impl TreeWriter {
    pub(crate) fn start(
        top: Directory,
        problems: Problems,
        options: Options,
        stats: Arc<Stats>,
    ) -> Result<Self, Error> {
        let context = Arc::new(Context::new(&options, problems, stats));
        let writers = options.writers;
        let writers = writers.unwrap_or_else(|| default_writer_count(&top));
        let writers =
            WriterPool::start(writers, &context).map_err(|error| Error::Thread(Arc::new(error)))?;
        Ok(Self {
            destination: Destination::new(top, Arc::clone(&context), writers),
            context,
            selection: options.selection,
            resume: ResumeState::default(),
            directories: Vec::new(),
            links: Vec::new(),
        })
    }

    /// Makes the entry. Returns a regular file, for its payload to be written.
    pub(crate) fn begin_member(&mut self, member: Member, path: ArchivePath) -> Option<Job> {
        self.context.problems.entry(&path);
        if path.is_root() {
            self.begin_root(member, path);
            return None;
        }
        if let Err(error) = self.context.entry_quota.acquire().with_action(ADD_ENTRY) {
            let top = &self.destination.top;
            self.context
                .record_failure(&path, top, error, member.payload.len());
            return None;
        }
        let directory = self.parent_directory(&path, member.payload.len())?;
        let mut job = Job {
            number: self.resume.number,
            ..Job::new(directory, path, member)
        };
        let shared = loop {
            let is_behind_itself = self.removes_link_on_its_way(&job);
            let shared = self
                .resume
                .before_create(&job, &mut self.destination, &self.selection);
            if !is_behind_itself {
                break shared;
            }
            self.remove_link(&job, shared)?;
            job.directory = self.parent_directory(&job.path, job.member.payload.len())?;
        };
        if job.member.kind == MemberKind::File {
            self.destination
                .invalidate_aliases(&job.directory, &job.path);
            return Some(job);
        }
        self.make_entry(job);
        if let Some(inode) = shared {
            self.resume.after_replace(inode, &mut self.destination);
        }
        None
    }

    /// Handles a member that is the destination itself. Only a directory's attributes count.
    fn begin_root(&mut self, member: Member, path: ArchivePath) {
        if member.kind != MemberKind::Directory {
            self.context.problems.add(&path, Cause::IsRoot);
        } else if self.context.existing == Existing::Replace {
            let top = self.destination.top.clone();
            let policy = &self.context.policy;
            let pending = PendingDirectory::new(path, top.identity(), false, member, policy);
            self.defer_attributes(pending, Some(&top));
        }
    }

    /// The parent of `path`, made if missing; `None` after an error that loses `missing_bytes` of content.
    pub(crate) fn parent_directory(
        &mut self,
        path: &ArchivePath,
        missing_bytes: u64,
    ) -> Option<Directory> {
        let parent = self
            .destination
            .resolve_directory(parent_of(path), IfMissing::Create);
        match parent {
            Ok(directory) => return Some(directory),
            Err(ResolveError::Path(refusal)) => {
                self.context.problems.add(path, Cause::Rejected(refusal));
            }
            Err(ResolveError::Tree(error)) => {
                let top = &self.destination.top;
                self.context.record_failure(path, top, error, missing_bytes);
            }
        }
        None
    }

    /// As [`Self::parent_directory`], for a `path` that another process may have replaced.
    pub(crate) fn reopen_parent_directory(&mut self, path: &ArchivePath) -> Option<Directory> {
        self.destination.invalidate(path.as_bytes());
        self.parent_directory(path, 0)
    }

    /// Sets the attributes of a directory at the end. That of the current member is in `parent`.
    pub(crate) fn defer_attributes(
        &mut self,
        pending: PendingDirectory,
        parent: Option<&Directory>,
    ) {
        self.resume.record_directory(parent, &pending);
        self.directories.push(pending);
    }

    pub(crate) fn apply_deferred_attributes(&mut self) {
        let pending = std::mem::take(&mut self.directories);
        apply_all(pending, &mut self.destination);
    }

    pub(crate) fn restore(&mut self, mut recovered: RecoveredState) {
        let progress = &recovered.progress;
        self.context.entry_quota.add_resumed(progress.entries);
        self.context.problems.add_count(progress.errors);
        if progress.errors > 0 {
            self.context.problems.warn(&format!(
                "{} entries were missing or incomplete when the run was interrupted",
                progress.errors
            ));
        }
        self.selection.merge_found_flags(&progress.found);
        self.directories = std::mem::take(&mut recovered.directories);
        self.links = std::mem::take(&mut recovered.links);
        for link in &self.links {
            let parent = parent_of(&link.path);
            let directory = self.destination.resolve_directory(parent, IfMissing::Fail);
            if let Ok(directory) = directory {
                let name = name_of(&link.path);
                self.context.reserved_names.reserve(&directory, name);
            }
        }
        self.resume
            .restore(recovered, &self.context.problems, &self.links);
    }

    /// Lets the owner into a read-only directory of an earlier mount. Its final mode is set at the end.
    pub(crate) fn grant_owner_access(&mut self, path: &ArchivePath) {
        let parent = self
            .destination
            .resolve_directory(parent_of(path), IfMissing::Fail);
        let Ok(parent) = parent else {
            return;
        };
        if let Ok(stat) = lstat_at(&parent, name_of(path))
            && stat.st_mode & OWNER_RWX != OWNER_RWX
        {
            let directory = AttributeTarget::named(&parent, name_of(path));
            // If chmod(2) is not permitted, making an entry in the directory reports the error.
            directory.chmod(stat.st_mode & 0o7777 | OWNER_RWX).ok();
        }
    }
}
