//! Progress of a resumable run, and the checks before its tree is continued.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType};

use super::journal::{CheckpointInfo, Journal, RecoveredState, TreeItem};
use crate::archive::ResumePoint;
use crate::base::archive_path::ArchivePath;
use crate::materialize::error::Problems;
use crate::materialize::selection::Selection;
use crate::materialize::sidecar::StatSnapshot;
use crate::materialize::write::{
    DeferredLink, Destination, Directory, Job, PendingDirectory, Watermark, lstat_at, name_of,
};
use crate::tar::MemberKind;

/// Plain bytes between two periodic checkpoints.
const CHECKPOINT_INTERVAL_BYTES: u64 = 2 << 20;

#[derive(Clone, Debug)]
struct MemberPosition {
    /// Number of members before it.
    number: u64,
    done_members: u64,
    resume_point: ResumePoint,
    /// Entries counted against the limit so far.
    entries: u64,
}

/// Observer of a run, which journals its progress. Without a journal, it does nothing.
#[derive(Debug, Default)]
pub(crate) struct ResumeState {
    pub(crate) journal: Option<Arc<Journal>>,
    /// Number of members before the current one.
    pub(crate) number: u64,
    /// Number of members that an earlier run finished. They are not made again.
    done_members: u64,
    previous_position: Option<MemberPosition>,
    position: Option<MemberPosition>,
    /// Written when the writers reach the watermark.
    next_checkpoint: Option<(Watermark, MemberPosition)>,
    /// Plain offset of the last checkpoint.
    last_checkpoint: u64,
    /// Directories made by an interrupted run.
    new_directories: HashSet<ArchivePath>,
    /// Names of inodes with several names.
    names_by_inode: HashMap<u64, Vec<ArchivePath>>,
    /// Counts of problems and deferred links at the start of the current member.
    problem_counts: (u64, usize),
}

impl ResumeState {
    /// Continues after the members that an earlier run finished.
    pub(crate) fn restore(
        &mut self,
        recovered: RecoveredState,
        problems: &Problems,
        links: &[DeferredLink],
    ) {
        for item in recovered.tree_items {
            if let TreeItem::Complete(path, snapshot) = item {
                let names = self.names_by_inode.entry(snapshot.inode).or_default();
                names.push(path);
            }
        }
        self.names_by_inode.retain(|_, names| names.len() > 1);
        self.new_directories = recovered.new_directories;
        self.number = recovered.progress.before;
        self.done_members = recovered.progress.members;
        self.last_checkpoint = recovered.resume_point.member.0;
        self.problem_counts = (problems.count(), links.len());
    }

    pub(crate) fn set_resume_point(&mut self, resume_point: ResumePoint, entries: u64) {
        if self.journal.is_some() {
            self.position = Some(MemberPosition {
                number: self.number,
                done_members: self.number,
                resume_point,
                entries,
            });
        }
    }

    /// Starts the next member after a due checkpoint. False if an earlier run has finished this member.
    pub(crate) fn before_member(
        &mut self,
        destination: &mut Destination,
        selection: &Selection,
        links: &[DeferredLink],
    ) -> bool {
        if self.journal.is_none() {
            return true;
        }
        if self.number < self.done_members {
            return false;
        }
        // From here on, the journal knows the initial state of the destination.
        if self.number == 0
            && let Some(position) = self.position.clone()
        {
            self.write_checkpoint(&position, destination, selection);
        }
        let problem_counts = (destination.context.problems.count(), links.len());
        let is_as_archived = self.problem_counts == problem_counts;
        self.problem_counts = problem_counts;
        if is_as_archived {
            self.checkpoint_if_due(destination, selection);
        } else {
            self.checkpoint_now(destination, selection);
        }
        true
    }

    fn checkpoint_if_due(&mut self, destination: &Destination, selection: &Selection) {
        let writers = &destination.writers;
        if let Some((_, position)) = self
            .next_checkpoint
            .take_if(|(watermark, _)| writers.has_reached(watermark))
        {
            self.write_checkpoint(&position, destination, selection);
        }
        if self.next_checkpoint.is_none()
            && let Some(position) = &self.position
        {
            let here = position.resume_point.member.0;
            if here.saturating_sub(self.last_checkpoint) >= CHECKPOINT_INTERVAL_BYTES {
                self.next_checkpoint = Some((writers.watermark(), position.clone()));
            }
        }
    }

    /// Ends the current member on the scan thread; writers may still be busy with it.
    pub(crate) fn after_member(&mut self) {
        self.previous_position = self.position.take();
        self.number += 1;
    }

    /// Prepares for making a member at the job's path. If the existing entry has other names, the caller
    /// passes its inode to [`ResumeState::after_replace`].
    pub(crate) fn before_create(
        &mut self,
        job: &Job,
        destination: &mut Destination,
        selection: &Selection,
    ) -> Option<u64> {
        let journal = Arc::clone(self.journal.as_ref()?);
        let name = name_of(&job.path);
        let is_new_directory = job.member.kind == MemberKind::Directory;
        let writers = &mut destination.writers;
        writers.wait_for_name(job.directory.identity(), name);
        let Ok(stat) = lstat_at(&job.directory, name) else {
            if is_new_directory {
                journal.record_make(job);
            }
            return None;
        };
        let is_new_file = job.member.kind == MemberKind::File;
        let is_shared = stat.st_nlink > 1;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let is_directory = kind == FileType::Directory;
        let is_harmless = match kind {
            FileType::RegularFile => is_new_file && !is_shared,
            FileType::Directory => is_new_directory,
            _ => false,
        };
        if is_harmless {
            if !is_directory {
                journal.record_replace(job);
            }
            return None;
        }
        self.checkpoint_now(destination, selection);
        journal.record_replace(job);
        if is_new_directory {
            journal.record_make(job);
        }
        // The link count of a directory is the number of its subdirectories.
        if !is_shared || is_directory {
            return None;
        }
        journal.record_touch(stat.st_ino);
        if is_new_file {
            // Not left to a writer, so that the journal can record the effect on the inode.
            destination.context.note_replacement();
            rustix::fs::unlinkat(&job.directory, name, AtFlags::empty()).ok();
            self.after_replace(stat.st_ino, destination);
            return None;
        }
        Some(stat.st_ino)
    }

    /// Whether an interrupted run has made the directory for the same member.
    pub(crate) fn was_made_before(&self, job: &Job) -> bool {
        let made = &self.new_directories;
        !made.is_empty()
            && self.journal.is_some()
            && made.contains(&job.directory.place_of(&job.path))
    }

    /// Records the current attributes of an inode that may have lost a name.
    pub(crate) fn after_replace(&self, inode: u64, destination: &mut Destination) {
        let names = self.names_by_inode.get(&inode);
        for path in names.into_iter().flatten() {
            if let Some(stat) = destination.stat(path).filter(|stat| stat.st_ino == inode)
                && let Some(journal) = &self.journal
            {
                journal.record_entry(self.number, path, &stat);
                return;
            }
        }
    }

    /// Records that the entry `name` in `directory` is about to get another name.
    pub(crate) fn before_link(&self, directory: &Directory, name: &[u8]) {
        if let Some(journal) = &self.journal
            && let Ok(stat) = lstat_at(directory, name)
        {
            journal.record_touch(stat.st_ino);
        }
    }

    pub(crate) fn after_link(
        &mut self,
        path: &ArchivePath,
        target: &ArchivePath,
        destination: &mut Destination,
    ) {
        if self.journal.is_some()
            && let Some(stat) = destination.stat(path)
        {
            let names = self.names_by_inode.entry(stat.st_ino).or_default();
            names.extend([path.clone(), target.clone()]);
        }
    }

    fn checkpoint_now(&mut self, destination: &mut Destination, selection: &Selection) {
        destination.writers.wait_for_all();
        self.next_checkpoint = None;
        let position = self.position.clone();
        let is_written = position
            .is_some_and(|position| self.write_checkpoint(&position, destination, selection));
        if let Some(journal) = self.journal.as_ref().filter(|_| !is_written) {
            journal.invalidate();
        }
    }

    /// Records that all members are done. The final steps may run twice, but the members must not.
    pub(crate) fn before_finish(&mut self, destination: &Destination, selection: &Selection) {
        self.next_checkpoint = None;
        if let Some(mut position) = self.previous_position.clone() {
            position.done_members = self.number;
            position.entries = destination.context.entry_quota.count();
            self.write_checkpoint(&position, destination, selection);
        }
    }

    /// Records that all members before the truncated or last one are done. That one is made again.
    pub(crate) fn before_suspend(&mut self, destination: &Destination, selection: &Selection) {
        if let Some(position) = self.previous_position.clone() {
            self.write_checkpoint(&position, destination, selection);
        }
    }

    /// Returns whether the checkpoint is in the file. After a fatal error, it writes nothing.
    fn write_checkpoint(
        &mut self,
        position: &MemberPosition,
        destination: &Destination,
        selection: &Selection,
    ) -> bool {
        let Some(journal) = &self.journal else {
            return false;
        };
        let problems = &destination.context.problems;
        if problems.fatal().is_some() {
            // The run ends here, and the last checkpoint stays valid.
            return true;
        }
        let progress = CheckpointInfo {
            before: position.number,
            members: position.done_members,
            entries: position.entries,
            errors: problems.count(),
            found: selection.found_flags(),
        };
        self.last_checkpoint = position.resume_point.member.0;
        journal.checkpoint(&position.resume_point, &progress)
    }

    /// Records that a directory gets its attributes at the end. An implied one has no `parent`, and is
    /// recorded for member 0, because a repeated member finds the directory and does not record it again.
    pub(crate) fn record_directory(&self, parent: Option<&Directory>, pending: &PendingDirectory) {
        if let Some(journal) = &self.journal {
            let number = parent.map_or(0, |_| self.number);
            journal.record_directory(number, parent, pending);
        }
    }

    pub(crate) fn record_link(&self, link: &DeferredLink) {
        if let Some(journal) = &self.journal {
            journal.record_link(self.number, link);
        }
    }

    pub(crate) fn record_entry(&self, number: u64, directory: &Directory, path: &ArchivePath) {
        if let Some(journal) = &self.journal
            && let Ok(stat) = lstat_at(directory, name_of(path))
        {
            journal.record_entry(number, &directory.place_of(path), &stat);
        }
    }
}

/// Whether every complete entry is still as the earlier run recorded it.
pub(crate) fn is_tree_unchanged(items: &[TreeItem], destination: &mut Destination) -> bool {
    let mut expected = HashMap::new();
    let mut inodes = HashMap::new();
    for item in items {
        match item {
            TreeItem::Complete(path, snapshot) => {
                expected.insert(path, snapshot.inode);
                // An additional name of an inode changes its times.
                inodes.insert(snapshot.inode, (*snapshot, false));
            }
            TreeItem::Touched(inode) => {
                if let Some((_, is_touched)) = inodes.get_mut(inode) {
                    *is_touched = true;
                }
            }
            TreeItem::Unchecked(path) => {
                expected.remove(path);
            }
        }
    }
    expected.into_iter().all(|(path, inode)| {
        let Some(stat) = destination.stat(path) else {
            return false;
        };
        let is_same = inodes.get(&inode).is_some_and(|(snapshot, is_touched)| {
            if *is_touched {
                snapshot.matches_except_ctime(&stat)
            } else {
                *snapshot == StatSnapshot::of(&stat)
            }
        });
        stat.st_ino == inode && is_same
    })
}
