//! Makes the merged tree: directories from the root on, and files moved to their places.

use std::collections::HashMap;

use rustix::fs::AtFlags;
use rustix::io::Errno;

use super::unplaced::{
    UNPLACED_DIRECTORY, directory_name, file_name, make_private_directory, make_unplaced_top,
};
use crate::base::archive_path::ArchivePath;
use crate::index::{Entry, EntryKind, Index, Ino, LayerIno, MergedIndex};
use crate::materialize::error::{Cause, StepError, WithAction};
use crate::materialize::tree_writer::{ADD_ENTRY, TreeWriter};
use crate::materialize::write::{Directory, Identity, Job, PendingDirectory, member_of};

const MOVE_FILE: &str = "move the file to its place";
const CREATE_LINK: &str = "create the hard link";
const OPEN_PARENT: &str = "return to the parent directory";

/// Maximum number of open ancestors of the current directory.
const MAX_OPEN_ANCESTORS: usize = 16;

/// Maximum number of open directories in [`UNPLACED_DIRECTORY`].
const MAX_OPEN_DIRECTORIES: usize = 16;

/// Reports entries that are not in the merged tree.
pub(super) fn report_left_out(index: &Index, tree: &TreeWriter) {
    let problems = &tree.context.problems;
    for problem in index.problems() {
        let path = problem.path.clone().unwrap_or_default();
        problems.add(&path, Cause::LeftOut(problem.what.clone()));
    }
    let reported = index.problems().len() as u64;
    problems.add_count(index.problem_count().saturating_sub(reported));
}

/// Unused name in the tree's root for unplaced files. An existing directory `name` is renamed to a new one.
pub(super) fn find_unused_name(
    index: &Index,
    name: Vec<u8>,
    is_there: bool,
    tree: &TreeWriter,
) -> Vec<u8> {
    let is_taken = |name: &[u8]| index.lookup(Ino::ROOT, name).is_some();
    if !is_taken(&name) {
        return name;
    }
    // A directory has fewer entries than this range.
    let mut free =
        (0..=u32::MAX).map(|number| format!("{UNPLACED_DIRECTORY}-{number}").into_bytes());
    let free = free.find(|name| !is_taken(name));
    let free = free.unwrap_or_else(|| name.clone());
    if !is_there {
        return free;
    }
    let top = &tree.destination.top;
    match rustix::fs::renameat(top, &*name, top, &*free).with_action(MOVE_FILE) {
        Ok(()) => free,
        Err(error) => {
            let path = ArchivePath::root();
            tree.context.record_failure(&path, top, error, 0);
            name
        }
    }
}

/// Sets the destination's attributes, if a member describes it.
pub(in crate::materialize) fn finish_root(index: &Index, tree: &TreeWriter) {
    let entry = index.entry(Ino::ROOT);
    if let Some(entry) = entry.filter(|entry| !entry.is_implied()) {
        finish_directory(entry, &tree.destination.top, &ArchivePath::root(), tree);
    }
}

fn finish_directory(
    entry: Entry<'_>,
    directory: &Directory,
    path: &ArchivePath,
    tree: &TreeWriter,
) {
    let context = &tree.context;
    let pending = PendingDirectory::of_entry(path.clone(), entry, directory, &context.policy);
    if let Err(error) = pending.apply_to(directory, context) {
        context.problems.add(path, error);
    }
}

struct Ancestor {
    ino: Ino,
    next_child: u32,
    identity: Identity,
    /// `None` for a distant ancestor, which was closed.
    directory: Option<Directory>,
}

impl Ancestor {
    fn new(ino: Ino, directory: Directory) -> Self {
        Self {
            ino,
            next_child: 0,
            identity: directory.identity(),
            directory: Some(directory),
        }
    }
}

pub(super) struct TreePlacement<'a> {
    pub(super) tree: &'a mut TreeWriter,
    pub(super) merged: &'a MergedIndex,
    pub(super) unplaced_top: Option<Directory>,
    pub(super) name: Vec<u8>,
    /// Open directories in it, by name.
    pub(super) open: HashMap<Vec<u8>, Directory>,
}

impl TreePlacement<'_> {
    /// Makes all entries below the root, until a fatal error.
    pub(super) fn place_entries(mut self) {
        let top = self.tree.destination.top.clone();
        let mut path = ArchivePath::root();
        let mut ancestors = vec![Ancestor::new(Ino::ROOT, top)];
        while let Some(here) = ancestors.last_mut() {
            if self.tree.context.problems.fatal().is_some() {
                return;
            }
            let Some(directory) = here.directory.clone() else {
                return;
            };
            let index = &self.merged.index;
            if let Some(child) = index.children(here.ino, here.next_child).next() {
                here.next_child = child.number + 1;
                let Some(entry) = index.entry(child.ino) else {
                    continue;
                };
                let mut place = path.clone();
                place.push(child.name);
                if let Some((place, made)) = self.place_child(entry, directory, place) {
                    path = place;
                    ancestors.push(Ancestor::new(child.ino, made));
                    let far = ancestors.len().saturating_sub(MAX_OPEN_ANCESTORS);
                    // The root always stays open.
                    if let Some(far) = ancestors.get_mut(far).filter(|_| far > 0) {
                        far.directory = None;
                    }
                }
                continue;
            }
            let entry = index.entry(here.ino);
            ancestors.pop();
            if let Err(error) = self.leave_directory(&mut ancestors, entry, &directory, &path) {
                let context = &self.tree.context;
                return context.record_failure(&path, &directory, error, 0);
            }
            let above = path.split_last().map(|(above, _)| above);
            path = above.unwrap_or_default();
        }
    }

    /// Makes `entry` at `path`, in `directory`. Returns a directory and its path.
    fn place_child(
        &mut self,
        entry: Entry<'_>,
        directory: Directory,
        path: ArchivePath,
    ) -> Option<(ArchivePath, Directory)> {
        let context = &self.tree.context;
        context.problems.entry(&path);
        if let Err(error) = context.entry_quota.acquire().with_action(ADD_ENTRY) {
            context.record_failure(&path, &directory, error, 0);
            return None;
        }
        let job = Job::new(directory, path, member_of(entry));
        if entry.kind() != EntryKind::Directory {
            self.place_entry(job, entry);
            return None;
        }
        let made = self.tree.try_make_directory(&job);
        let context = &self.tree.context;
        match made {
            Ok(made) => made.map(|(directory, _)| {
                context.stats.written_entries.increment();
                (job.path, directory)
            }),
            Err(error) => {
                context.record_job_failure(&job, error, 0);
                None
            }
        }
    }

    /// Returns from `directory` to the last of `ancestors`, and sets its attributes.
    fn leave_directory(
        &mut self,
        ancestors: &mut [Ancestor],
        entry: Option<Entry<'_>>,
        directory: &Directory,
        path: &ArchivePath,
    ) -> Result<(), StepError> {
        let Some(above) = ancestors.last_mut() else {
            return Ok(());
        };
        // Reopen the parent first, because the directory's final mode may deny access.
        if above.directory.is_none() {
            let parent = self.tree.destination.open_child(directory, b"..", false);
            let parent = parent.with_action(OPEN_PARENT)?;
            if parent.identity() != above.identity {
                return Err(Errno::STALE).with_action(OPEN_PARENT);
            }
            above.directory = Some(parent);
        }
        if let Some(entry) = entry {
            finish_directory(entry, directory, path, self.tree);
        }
        Ok(())
    }

    /// Makes one name of a non-directory entry.
    fn place_entry(&mut self, job: Job, entry: Entry<'_>) {
        let is_file = entry.kind() == EntryKind::File;
        if !is_file && entry.link_count() < 2 {
            return self.tree.make_entry(job);
        }
        let Some(origin) = self.merged.layer_ino(entry.ino()) else {
            return;
        };
        let name = file_name(origin.layer as usize, origin.ino);
        let placed = self.try_place_entry(&job, entry, origin, &name);
        let context = &self.tree.context;
        match placed {
            Err(StepError { errno, .. })
                if errno == Errno::NOENT && context.failed_files.lock().contains(&name) => {}
            Err(error) => context.record_job_failure(&job, error, 0),
            // A file was already counted when it was written.
            Ok(()) if is_file && entry.link_count() < 2 => {}
            Ok(()) => context.stats.written_entries.increment(),
        }
    }

    fn try_place_entry(
        &mut self,
        job: &Job,
        entry: Entry<'_>,
        origin: LayerIno,
        name: &[u8],
    ) -> Result<(), StepError> {
        let directory = directory_name(origin.layer as usize, origin.ino);
        let from = self.open_unplaced_directory(&directory)?;
        let (to, to_name) = (&job.directory, job.name());
        if entry.link_count() < 2 {
            return rustix::fs::renameat(&from, name, to, to_name).with_action(MOVE_FILE);
        }
        let link = || rustix::fs::linkat(&from, name, to, to_name, AtFlags::empty());
        match link() {
            Err(Errno::NOENT) if entry.kind() != EntryKind::File => {
                self.tree.make_entry(Job {
                    directory: from.clone(),
                    path: job.path.clone(),
                    name: Some(name.to_vec()),
                    member: job.member.clone(),
                    number: 0,
                    atime: None,
                });
                link().with_action(CREATE_LINK)
            }
            linked => linked.with_action(CREATE_LINK),
        }
    }

    fn open_unplaced_directory(&mut self, name: &[u8]) -> Result<Directory, StepError> {
        if let Some(directory) = self.open.get(name) {
            return Ok(directory.clone());
        }
        let destination = &mut self.tree.destination;
        // Even without any file in the layers, a special file can have several names.
        let unplaced_top = make_unplaced_top(&mut self.unplaced_top, &self.name, destination)?;
        let opened = destination.open_child(&unplaced_top, name, false);
        let directory = match opened {
            Err(Errno::NOENT) => make_private_directory(&unplaced_top, name, destination)?,
            opened => opened.with_action(MOVE_FILE)?,
        };
        if self.open.len() >= MAX_OPEN_DIRECTORIES {
            self.open.clear();
        }
        self.open.insert(name.to_vec(), directory.clone());
        Ok(directory)
    }
}
