//! Copies a directory of this machine: each thread of a walk makes the entries that it finds.
//!
//! A directory gets its attributes when the walk leaves it, after everything below it was made.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use rustix::fs::{CWD, Mode, OFlags, openat};

use super::error::{Cause, Error, WithAction, errno_of};
use super::materializer::Materializer;
use super::options::{Existing, Summary};
use super::tree_writer::{ADD_ENTRY, TreeWriter};
use super::write::{
    AttributeTarget, CAPABILITIES, Context, Directory, FileWriter, Identity, Job, PendingDirectory,
    WeakDirectory, is_on_remote,
};
use crate::base::archive_path::ArchivePath;
use crate::base::extent::{Extent, Plain};
use crate::base::sync::{Condvar, Mutex};
use crate::tar::{Device, Member, MemberKind, Timestamp};
use crate::tree::{
    DirectoryTree, FileKind, Level, Metadata, Name, OpenDirectory, Start, Tree, Visit, Visitor,
    metadata_of, walk_parallel,
};

/// Names of a directory that a thread copies at once. It adds threads only between such tasks.
const CHUNK: usize = 64;
/// Likewise, if each step waits for a remote file system.
const REMOTE_CHUNK: usize = 16;

impl Materializer {
    /// Copies the directory `source`, and ends the run. `dry_run` only reports the entries.
    ///
    /// # Errors
    /// [`Error::SourceDirectory`], [`Error::ContainsDestination`], and those of [`Materializer::finish`].
    pub fn copy_directory(
        self,
        source: &Path,
        jobs: Option<NonZeroUsize>,
        dry_run: bool,
    ) -> Result<Summary, Error> {
        self.copy_selected(source, jobs, dry_run, None)?.finish()
    }

    /// Copies those files of the directory `source` whose paths in it `filter` selects, too. The caller may make more
    /// entries, because directories then get their attributes at the end of the run.
    pub(super) fn copy_selected(
        mut self,
        source: &Path,
        jobs: Option<NonZeroUsize>,
        dry_run: bool,
        filter: Option<Filter>,
    ) -> Result<Self, Error> {
        let unreadable = |errno| Error::SourceDirectory(source.to_owned(), errno);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = openat(CWD, source, flags, Mode::empty()).map_err(unreadable)?;
        // Through a link, too.
        let metadata = metadata_of(&source.join(".")).map_err(|error| unreadable(errno_of(&error)));
        let metadata = metadata?;
        let top = self.tree.destination.top.clone();
        let path_of = |fd: i32| std::fs::canonicalize(format!("/proc/self/fd/{fd}"));
        let source_path = path_of(directory.as_raw_fd());
        if path_of(top.as_fd().as_raw_fd())
            .is_ok_and(|top| source_path.is_ok_and(|source| top.starts_with(source)))
        {
            return Err(Error::ContainsDestination(source.to_owned()));
        }
        let is_remote = is_on_remote(&directory) || is_on_remote(&top);
        let copier = Arc::new(Copier {
            context: Arc::clone(&self.tree.context),
            top: top.clone(),
            max_open: (self.tree.destination.max_open_directories / 2).max(1),
            open: Mutex::default(),
            selects_all: filter.is_none() && self.tree.selection.is_whole(),
            filter,
            tree: Mutex::new(self.tree),
            source: DirectoryTree::default(),
            first_names: Mutex::default(),
            named: Condvar::default(),
            chunk: if is_remote { REMOTE_CHUNK } else { CHUNK },
            dry_run,
        });
        let state = copier.root(&directory, &metadata);
        if state.pending.is_some() {
            self.root_mode = None;
        }
        let start = Start {
            path: Vec::new(),
            inode: metadata.inode,
            directory: directory.into(),
            state,
        };
        let _never_broken = walk_parallel(&Arc::default(), &copier, vec![start], jobs);
        let copier = Arc::into_inner(copier).ok_or(Error::Interrupted)?;
        self.tree = copier.tree.into_inner();
        Ok(self)
    }
}

/// Selects files by their paths.
pub(super) type Filter = Box<dyn Fn(&ArchivePath) -> bool + Send + Sync>;

/// The destination of a directory.
#[derive(Debug, Default)]
struct CopyTarget {
    /// It may be closed.
    directory: Mutex<WeakDirectory>,
    /// Unknown until an entry in it is made, if the directory itself is not.
    identity: OnceLock<Identity>,
    /// Its attributes, if the copy made it.
    pending: Option<PendingDirectory>,
}

/// Makes the entries of a walk.
struct Copier {
    context: Arc<Context>,
    source: DirectoryTree,
    top: Directory,
    /// The directories that were opened last. Others are closed, and opened again by their paths.
    open: Mutex<VecDeque<Directory>>,
    max_open: usize,
    /// For steps that look up paths: directories that are not selected themselves, and hard links.
    tree: Mutex<TreeWriter>,
    selects_all: bool,
    filter: Option<Filter>,
    /// The first name that was made of each file with several; `None` while it is made.
    first_names: Mutex<HashMap<Identity, Option<ArchivePath>>>,
    named: Condvar,
    chunk: usize,
    dry_run: bool,
}

impl Copier {
    /// The destination itself, which gets the attributes of the source if that is selected.
    fn root(&self, source: &OwnedFd, metadata: &Metadata) -> CopyTarget {
        let selected = self.select(ArchivePath::root());
        let mut target = CopyTarget::default();
        if let Some(root) = selected.filter(|_| self.context.existing == Existing::Replace) {
            self.context.problems.entry(&root);
            let source = AttributeTarget::Open(source.as_fd());
            let member = self.member(&root, MemberKind::Directory, metadata, source);
            let (identity, policy) = (self.top.identity(), &self.context.policy);
            let pending = PendingDirectory::new(root, identity, false, member, policy);
            if !self.dry_run {
                let pending = pending.with_atime(Some(metadata.atime));
                target.pending = self.unless_deferred(pending);
            }
        }
        self.keep_open(&target, &self.top);
        target
    }

    /// Notes that `directory` is the target, and closes the one that was opened first if too many are open.
    fn keep_open(&self, target: &CopyTarget, directory: &Directory) {
        target.identity.get_or_init(|| directory.identity());
        *target.directory.lock() = directory.downgrade();
        let mut open = self.open.lock();
        open.push_back(directory.clone());
        let closed = (open.len() > self.max_open).then(|| open.pop_front());
        drop(open);
        drop(closed);
    }

    /// The directory of the entry at `path`, which `target` is; `None` after a reported error.
    fn open_target(&self, target: &CopyTarget, path: &ArchivePath, size: u64) -> Option<Directory> {
        let open = target.directory.lock().upgrade();
        if open.is_some() {
            return open;
        }
        let opened = self.tree.lock().parent_directory(path, size)?;
        if *target.identity.get_or_init(|| opened.identity()) != opened.identity() {
            let cause = Cause::LeftOut("its directory was replaced meanwhile".to_owned());
            self.context.problems.add(path, cause);
            return None;
        }
        self.keep_open(target, &opened);
        Some(opened)
    }

    /// The path in the destination, if it is selected.
    fn select(&self, path: ArchivePath) -> Option<ArchivePath> {
        if self.selects_all {
            return Some(path);
        }
        let selection = &mut self.tree.lock().selection;
        let is_wanted = self.filter.as_ref().is_none_or(|filter| filter(&path));
        let is_selected = is_wanted && selection.selects(&path);
        selection.strip_path(path).filter(|_| is_selected)
    }

    fn member(
        &self,
        path: &ArchivePath,
        kind: MemberKind,
        metadata: &Metadata,
        source: AttributeTarget<'_>,
    ) -> Member {
        let policy = &self.context.policy;
        let keeps_ids = policy.keeps_ids((metadata.uid, metadata.gid), policy.user);
        let selects =
            |name: &[u8]| policy.xattrs.selects(name) && (keeps_ids || name != CAPABILITIES);
        let xattrs = source.xattrs(selects);
        let is_sparse = metadata.blocks.saturating_mul(512) < metadata.size;
        Member {
            mode: metadata.mode,
            uid: metadata.uid,
            gid: metadata.gid,
            mtime: metadata.mtime,
            size: metadata.size,
            payload: Extent::with_len(Plain(0), metadata.size),
            sparse: is_sparse.then(Vec::new),
            xattrs: xattrs.unwrap_or_else(|error| {
                let text = format!("{path}: cannot read the extended attributes: {error}");
                self.context.problems.warn(&text);
                Vec::new()
            }),
            ..Member::new(Vec::new(), kind)
        }
    }

    /// Copies `name`, one of `names`. Returns the target of a directory to walk.
    fn copy(
        &self,
        names: &Visit<'_, DirectoryTree, CopyTarget>,
        name: Name<'_>,
        path: ArchivePath,
    ) -> io::Result<Option<CopyTarget>> {
        let (directory, target) = (names.place.directory, &names.level.state);
        let is_directory = name.kind == FileKind::Directory;
        let Some(path) = self.select(path) else {
            return Ok(is_directory.then(CopyTarget::default));
        };
        if name.kind == FileKind::Socket {
            let problems = &self.context.problems;
            problems.warn(&format!("{path}: socket ignored"));
            return Ok(None);
        }
        if self.dry_run {
            self.context.problems.entry(&path);
            return Ok(is_directory.then(CopyTarget::default));
        }
        let metadata = self.source.metadata(directory, name)?;
        let (kind, file) = self.open(directory, name, &metadata)?;
        let source = file.as_ref().map_or_else(
            || AttributeTarget::named(directory, name.name),
            |file| AttributeTarget::Open(file.as_fd()),
        );
        let member = self.member(&path, kind, &metadata, source);
        if metadata.kind == FileKind::Directory {
            let job = self.job(path, member, target, metadata.atime);
            return Ok(job.and_then(|job| self.make_directory(&job, identity(&metadata))));
        }
        let shared = (metadata.links > 1).then(|| identity(&metadata));
        if shared.is_some_and(|file| self.make_link(file, &path)) {
            return Ok(None);
        }
        let job = self.job(path.clone(), member, target, metadata.atime);
        let is_made = job.is_some_and(|job| match &file {
            Some(file) => FileWriter::copy(job, file.as_fd(), &self.context),
            None => self.context.make_special(&job, || ()),
        });
        if let Some(file) = shared {
            let mut names = self.first_names.lock();
            if is_made {
                names.insert(file, Some(path));
            } else {
                // The next name is written instead.
                names.remove(&file);
            }
            drop(names);
            self.named.notify_all();
        }
        Ok(None)
    }

    /// The type of an entry, and a regular file opened.
    fn open(
        &self,
        directory: &OpenDirectory,
        name: Name<'_>,
        metadata: &Metadata,
    ) -> io::Result<(MemberKind, Option<OwnedFd>)> {
        let (major, minor) = metadata.device;
        let kind = match metadata.kind {
            FileKind::File => {
                // A FIFO may take its place, which nothing must wait for.
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
                let flags = flags | OFlags::CLOEXEC;
                let file = openat(directory, name.name, flags, Mode::empty())?;
                return Ok((MemberKind::File, Some(file)));
            }
            FileKind::Directory => MemberKind::Directory,
            FileKind::Symlink => {
                MemberKind::Symlink(self.source.target(directory, name)?.into_owned())
            }
            FileKind::CharDevice => MemberKind::CharDevice(Device { major, minor }),
            FileKind::BlockDevice => MemberKind::BlockDevice(Device { major, minor }),
            FileKind::Fifo => MemberKind::Fifo,
            // It has taken the place of another entry meanwhile.
            FileKind::Socket => return Err(io::ErrorKind::Unsupported.into()),
        };
        Ok((kind, None))
    }

    /// The job of an entry, in the directory that its parent has become; `None` after a reported error.
    fn job(
        &self,
        path: ArchivePath,
        member: Member,
        target: &CopyTarget,
        atime: Timestamp,
    ) -> Option<Job> {
        self.context.problems.entry(&path);
        if let Err(error) = self.context.entry_quota.acquire().with_action(ADD_ENTRY) {
            let (top, missing_bytes) = (&self.top, member.size);
            self.context
                .record_failure(&path, top, error, missing_bytes);
            return None;
        }
        let directory = self.open_target(target, &path, member.size)?;
        Some(Job {
            atime: Some(atime),
            ..Job::new(directory, path, member)
        })
    }

    fn make_directory(&self, job: &Job, source: Identity) -> Option<CopyTarget> {
        let problems = &self.context.problems;
        if source == self.top.identity() {
            let cause = Cause::LeftOut("is the destination itself, left out".to_owned());
            problems.add(&job.path, cause);
            return None;
        }
        let mut target = CopyTarget::default();
        let made = self.context.make_directory(job, || ());
        let made = made.and_then(|made| {
            // Otherwise entries are made where the name of the existing entry leads.
            if let Some(is_new) = made {
                let opened = job.directory.open_child(job.name(), is_new);
                let opened = opened.with_action("open the directory")?;
                self.context.stats.written_entries.increment();
                let (path, policy) = (job.path.clone(), &self.context.policy);
                let member = (*job.member).clone();
                let identity = opened.identity();
                let pending = PendingDirectory::new(path, identity, is_new, member, policy);
                let pending = pending.with_atime(job.atime);
                target.pending = self.unless_deferred(pending);
                self.keep_open(&target, &opened);
            }
            Ok(())
        });
        match made {
            Ok(()) => Some(target),
            Err(error) => {
                self.context.record_job_failure(job, error, 0);
                None
            }
        }
    }

    /// Makes `path` a link, if `file` was copied under another name. Otherwise that is its first name.
    fn make_link(&self, file: Identity, path: &ArchivePath) -> bool {
        let mut names = self.first_names.lock();
        // The thread that makes the first name waits for no other.
        while let Some(None) = names.get(&file) {
            names = self.named.wait(names);
        }
        let Some(first) = names.get(&file).cloned().flatten() else {
            names.insert(file, None);
            return false;
        };
        drop(names);
        self.context.problems.entry(path);
        self.tree.lock().link(path, &first);
        true
    }

    /// The attributes to set when the directory is left, unless that is done at the end of the run.
    fn unless_deferred(&self, pending: PendingDirectory) -> Option<PendingDirectory> {
        if self.filter.is_none() {
            return Some(pending);
        }
        self.tree.lock().defer_attributes(pending, None);
        None
    }
}

impl Visitor<DirectoryTree> for Copier {
    type State = CopyTarget;

    /// Those of the source and of the destination.
    fn open_trees(&self) -> usize {
        2
    }

    fn chunk(&self) -> usize {
        self.chunk
    }

    fn visit(
        &self,
        names: &Visit<'_, DirectoryTree, CopyTarget>,
        descend: &mut Vec<(usize, CopyTarget)>,
    ) -> ControlFlow<()> {
        let above = ArchivePath::sanitize(names.place.path).path;
        for (number, name) in names.names() {
            if self.context.problems.fatal().is_some() {
                return ControlFlow::Break(());
            }
            let mut path = above.clone();
            path.push(name.name);
            match self.copy(names, name, path.clone()) {
                Ok(target) => descend.extend(target.map(|target| (number, target))),
                Err(error) => self.report(path.as_bytes(), error),
            }
        }
        ControlFlow::Continue(())
    }

    fn leave(&self, level: &Arc<Level<DirectoryTree, CopyTarget>>) -> ControlFlow<()> {
        let target = &level.state;
        let Some(pending) = &target.pending else {
            return ControlFlow::Continue(());
        };
        let open = target.directory.lock().upgrade();
        match open.map(|directory| pending.apply_to(&directory, &self.context)) {
            Some(Ok(())) => {}
            Some(Err(error)) => self.context.problems.add(&pending.path, error),
            None => pending.apply_closed(&mut self.tree.lock().destination),
        }
        ControlFlow::Continue(())
    }

    fn report(&self, path: &[u8], error: io::Error) {
        let cause = Cause::Unreadable(errno_of(&error));
        let path = ArchivePath::sanitize(path).path;
        self.context.problems.add(&path, cause);
    }
}

fn identity(metadata: &Metadata) -> Identity {
    Identity {
        device: metadata.file_system,
        inode: metadata.inode,
    }
}
