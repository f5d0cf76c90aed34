//! Resumable runs: journals its progress, and restores the state of an interrupted run.
//!
//! A member may be made twice, before and after the interruption, and the result must be the same. This
//! holds because nothing that an earlier member depends on changes between two checkpoints. So the run
//! writes a checkpoint before each member that finds an existing entry. Exceptions are a file over a file
//! with one name, and a directory over a directory. It also writes a checkpoint after each member that
//! could not be made as archived, or was deferred.

pub(super) mod journal;
pub(super) mod sidecar;

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Stat};

use self::journal::{CheckpointInfo, Journal, RecoveredState, StatSnapshot, TreeRecord};
use crate::archive::ResumePoint;
use crate::base::archive_path::ArchivePath;
use crate::base::extent::Plain;
use crate::base::stats::Stats;
use crate::materialize::error::Error;
use crate::materialize::write::destination::{Directory, IfMissing, lstat_at, name_of, parent_of};
use crate::materialize::write::directories::PendingDirectories;
use crate::materialize::write::file::Job;
use crate::materialize::write::pool::Watermark;
use crate::materialize::{Materializer, Options, Summary};
use crate::tar::Kind;

/// Plain bytes between two periodic checkpoints.
const CHECKPOINT_INTERVAL_BYTES: u64 = 2 << 20;

/// Position before a member.
#[derive(Clone, Debug)]
struct MemberPosition {
    /// Number of members before it.
    number: u64,
    resume_point: ResumePoint,
    /// Entries counted against the limit so far.
    entries: u64,
}

/// Progress of a resumable run.
#[derive(Debug)]
pub(crate) struct ResumeState {
    journal: Arc<Journal>,
    /// Number of members before the current one.
    number: u64,
    /// Number of members that an earlier run finished. They are not made again.
    done_members: u64,
    /// Position before the previous member.
    previous_position: Option<MemberPosition>,
    /// Position before the current member.
    position: Option<MemberPosition>,
    /// The next checkpoint, to be written when the writers reach the watermark.
    next_checkpoint: Option<(Watermark, MemberPosition)>,
    /// Plain offset of the last checkpoint.
    last_checkpoint: Plain,
    /// Directories made by an interrupted run.
    new_directories: HashSet<ArchivePath>,
    /// Names of inodes with several names.
    names_by_inode: HashMap<u64, Vec<ArchivePath>>,
    /// Counts of problems and deferred links at the start of the current member.
    problem_counts: (u64, usize),
}

impl ResumeState {
    pub(crate) fn journal(&self) -> &Journal {
        &self.journal
    }

    pub(crate) fn member_number(&self) -> u64 {
        self.number
    }
}

impl Materializer {
    /// Like [`Materializer::new`], with a journal beside `destination` for a later run.
    ///
    /// The later run must have the same `run_key`. If the journal of an earlier run exists and its tree is
    /// unchanged, this restores its state. The scan then starts at the returned resume point.
    ///
    /// # Errors
    /// Those of [`Materializer::new`], and [`Error::Journal`].
    pub fn with_journal(
        destination: &Path,
        options: Options,
        stats: Arc<Stats>,
        run_key: &str,
    ) -> Result<(Self, Option<ResumePoint>), Error> {
        let mut materializer = Self::new(destination, options, stats)?;
        let (journal, recovered) = Journal::open(destination, run_key)?;
        let journal = Arc::new(journal);
        materializer.start_journal(&journal);
        let Some(recovered) = recovered else {
            return Ok((materializer, None));
        };
        if !materializer.is_tree_unchanged(&recovered) {
            materializer.context.problems.warn(
                "files of the interrupted run were changed since then; starting from the beginning",
            );
            let restarted = journal.restart();
            restarted.map_err(|error| journal.write_error(&error))?;
            return Ok((materializer, None));
        }
        let resume_point = recovered.resume_point.clone();
        materializer.restore_state(recovered);
        Ok((materializer, Some(resume_point)))
    }

    fn start_journal(&mut self, journal: &Arc<Journal>) {
        self.context.set_journal(journal);
        self.resume_state = Some(ResumeState {
            journal: Arc::clone(journal),
            number: 0,
            done_members: 0,
            previous_position: None,
            position: None,
            next_checkpoint: None,
            last_checkpoint: Plain(0),
            new_directories: HashSet::new(),
            names_by_inode: HashMap::new(),
            problem_counts: (0, 0),
        });
    }

    /// Whether every complete entry is still as recorded.
    fn is_tree_unchanged(&mut self, recovered: &RecoveredState) -> bool {
        let mut expected = HashMap::new();
        let mut inodes = HashMap::new();
        for record in &recovered.tree_records {
            match record {
                TreeRecord::Complete(path, snapshot) => {
                    expected.insert(path, snapshot.inode);
                    // An additional name of an inode changes its times.
                    inodes.insert(snapshot.inode, (*snapshot, false));
                }
                TreeRecord::Touched(inode) => {
                    if let Some((_, is_touched)) = inodes.get_mut(inode) {
                        *is_touched = true;
                    }
                }
                // A directory is checked when it gets its attributes.
                TreeRecord::Directory(path) | TreeRecord::Replaced(path) => {
                    expected.remove(path);
                }
            }
        }
        expected.into_iter().all(|(path, inode)| {
            let Some(stat) = self.stat_path(path) else {
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

    fn stat_path(&mut self, path: &ArchivePath) -> Option<Stat> {
        if path.is_root() {
            return rustix::fs::fstat(self.root.top()).ok();
        }
        let parent =
            self.root
                .resolve_directory(parent_of(path), IfMissing::Fail, &mut self.writers);
        lstat_at(&parent.ok()?, name_of(path)).ok()
    }

    fn restore_state(&mut self, recovered: RecoveredState) {
        self.context.entry_quota.add_resumed(recovered.entries);
        self.context.problems.add_count(recovered.errors);
        if recovered.errors > 0 {
            self.context.problems.warn(&format!(
                "{} entries were missing or incomplete when the run was interrupted",
                recovered.errors
            ));
        }
        self.selection.merge_found_flags(&recovered.found);
        self.directories = PendingDirectories::from_journal(recovered.directories);
        self.restore_deferred_links(recovered.links);
        let problem_counts = self.problem_counts();
        if let Some(resume_state) = &mut self.resume_state {
            for record in recovered.tree_records {
                if let TreeRecord::Complete(path, snapshot) = record {
                    resume_state
                        .names_by_inode
                        .entry(snapshot.inode)
                        .or_default()
                        .push(path);
                }
            }
            resume_state
                .names_by_inode
                .retain(|_, names| names.len() > 1);
            resume_state.new_directories = recovered.new_directories;
            resume_state.number = recovered.before;
            resume_state.done_members = recovered.members;
            resume_state.last_checkpoint = recovered.resume_point.member;
            resume_state.problem_counts = problem_counts;
        }
    }

    fn problem_counts(&self) -> (u64, usize) {
        (self.context.problems.count(), self.links.count())
    }

    /// Sets the position of the next member.
    pub(crate) fn set_resume_point(&mut self, resume_point: ResumePoint) {
        if let Some(resume_state) = &mut self.resume_state {
            resume_state.position = Some(MemberPosition {
                number: resume_state.number,
                resume_point,
                entries: self.context.entry_quota.count(),
            });
        }
    }

    /// Starts the next member, and writes a checkpoint if one is due.
    ///
    /// False if an earlier run has finished this member.
    pub(crate) fn before_member(&mut self) -> bool {
        let Some(resume_state) = &self.resume_state else {
            return true;
        };
        if resume_state.number < resume_state.done_members {
            return false;
        }
        // From here on, the journal knows the initial state of the destination.
        if resume_state.number == 0
            && let Some(position) = resume_state.position.clone()
        {
            self.write_checkpoint(&position);
        }
        self.checkpoint_if_due();
        true
    }

    fn checkpoint_if_due(&mut self) {
        let problem_counts = self.problem_counts();
        let Some(resume_state) = &mut self.resume_state else {
            return;
        };
        let is_as_archived = resume_state.problem_counts == problem_counts;
        resume_state.problem_counts = problem_counts;
        if !is_as_archived {
            self.checkpoint_now();
            return;
        }
        if let Some((watermark, _)) = &resume_state.next_checkpoint
            && self.writers.has_reached(watermark)
            && let Some((_, position)) = resume_state.next_checkpoint.take()
        {
            self.write_checkpoint(&position);
        }
        let Some(resume_state) = &mut self.resume_state else {
            return;
        };
        if resume_state.next_checkpoint.is_none()
            && let Some(position) = &resume_state.position
            && position
                .resume_point
                .member
                .0
                .saturating_sub(resume_state.last_checkpoint.0)
                >= CHECKPOINT_INTERVAL_BYTES
        {
            resume_state.next_checkpoint = Some((self.writers.watermark(), position.clone()));
        }
    }

    /// Ends the current member on the scan thread; writers may still be busy with it.
    pub(crate) fn after_member(&mut self) {
        if let Some(resume_state) = &mut self.resume_state {
            resume_state.previous_position = resume_state.position.take();
            resume_state.number += 1;
        }
    }

    /// Prepares for making a member at the job's path.
    ///
    /// Returns the inode of the existing entry if it has other names. The caller then calls
    /// [`Materializer::after_replace`].
    pub(crate) fn before_create(&mut self, job: &Job) -> Option<u64> {
        self.resume_state.as_ref()?;
        let name = name_of(&job.path);
        self.writers.wait_for_name(job.directory.identity(), name);
        let Ok(stat) = lstat_at(&job.directory, name) else {
            self.before_create_directory(job);
            return None;
        };
        let is_file = job.member.kind == Kind::File;
        let is_shared = stat.st_nlink > 1;
        let is_harmless = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => is_file && !is_shared,
            FileType::Directory => job.member.kind == Kind::Directory,
            _ => false,
        };
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if !is_harmless {
            self.checkpoint_now();
        }
        if let Some(resume_state) = &self.resume_state
            && !(is_harmless && is_directory)
        {
            resume_state
                .journal
                .record_replace(&job.directory, &job.path);
        }
        if is_harmless {
            return None;
        }
        self.before_create_directory(job);
        // The link count of a directory is the number of its subdirectories.
        if !is_shared || is_directory {
            return None;
        }
        if let Some(resume_state) = &self.resume_state {
            resume_state.journal.record_touch(stat.st_ino);
        }
        if is_file {
            // Removed here instead of later by a writer, so that the journal can record the effect on the
            // inode.
            self.writers.note_replacement();
            rustix::fs::unlinkat(&job.directory, name, AtFlags::empty()).ok();
            self.after_replace(stat.st_ino);
            return None;
        }
        Some(stat.st_ino)
    }

    /// Records that a directory is about to be made, if the job's member is one.
    fn before_create_directory(&self, job: &Job) {
        if let Some(resume_state) = &self.resume_state
            && job.member.kind == Kind::Directory
        {
            resume_state
                .journal
                .record_make(job.number, &job.directory, &job.path);
        }
    }

    /// Whether an interrupted run has made the directory at the job's path, for the same member.
    pub(crate) fn was_made_before(&self, job: &Job) -> bool {
        self.resume_state.as_ref().is_some_and(|resume_state| {
            let made = &resume_state.new_directories;
            !made.is_empty()
                && made.contains(
                    &resume_state
                        .journal
                        .resolved_path(&job.directory, &job.path),
                )
        })
    }

    /// Records the current attributes of an inode that may have lost a name.
    pub(crate) fn after_replace(&mut self, inode: u64) {
        let names = self
            .resume_state
            .as_ref()
            .and_then(|resume_state| resume_state.names_by_inode.get(&inode));
        let number = self.member_number();
        for path in names.cloned().unwrap_or_default() {
            if let Some(stat) = self.stat_path(&path).filter(|stat| stat.st_ino == inode)
                && let Some(resume_state) = &self.resume_state
            {
                resume_state.journal.record_entry_at(number, &path, &stat);
                return;
            }
        }
    }

    /// Records that the entry `name` in `directory` is about to get another name.
    pub(crate) fn before_link(&self, directory: &Directory, name: &[u8]) {
        if let Some(resume_state) = &self.resume_state
            && let Ok(stat) = lstat_at(directory, name)
        {
            resume_state.journal.record_touch(stat.st_ino);
        }
    }

    /// Notes that `path` and `target` are names of the same inode.
    pub(crate) fn after_link(&mut self, path: &ArchivePath, target: &ArchivePath) {
        if self.resume_state.is_none() {
            return;
        }
        if let Some(stat) = self.stat_path(path)
            && let Some(resume_state) = &mut self.resume_state
        {
            let names = resume_state.names_by_inode.entry(stat.st_ino).or_default();
            names.extend([path.clone(), target.clone()]);
        }
    }

    /// Waits for the writers and writes a checkpoint before the current member.
    fn checkpoint_now(&mut self) {
        self.writers.wait_for_all();
        let Some(resume_state) = &mut self.resume_state else {
            return;
        };
        resume_state.next_checkpoint = None;
        let written = match resume_state.position.clone() {
            Some(position) => self.write_checkpoint(&position),
            None => false,
        };
        if !written && let Some(resume_state) = &self.resume_state {
            resume_state.journal.invalidate();
        }
    }

    /// Records that all members are done.
    ///
    /// The final steps may run twice, but the members must not.
    pub(crate) fn before_finish(&mut self) {
        if let Some(resume_state) = &mut self.resume_state {
            resume_state.next_checkpoint = None;
            let members = resume_state.number;
            if let Some(position) = resume_state.previous_position.clone() {
                let entries = self.context.entry_quota.count();
                self.write_checkpoint_with(&position, members, entries);
            }
        }
    }

    /// Like [`Materializer::write_checkpoint_with`], with only the members before `position` done.
    fn write_checkpoint(&mut self, position: &MemberPosition) -> bool {
        self.write_checkpoint_with(position, position.number, position.entries)
    }

    /// Writes a checkpoint and returns whether it is in the file. After a fatal error, it writes nothing.
    fn write_checkpoint_with(
        &mut self,
        position: &MemberPosition,
        members: u64,
        entries: u64,
    ) -> bool {
        let Some(resume_state) = &mut self.resume_state else {
            return false;
        };
        if self.context.problems.fatal().is_some() {
            // The run ends here, and the last checkpoint stays valid.
            return true;
        }
        let progress = CheckpointInfo {
            before: position.number,
            members,
            entries,
            errors: self.context.problems.count(),
            found: &self.selection.found_flags(),
        };
        resume_state.last_checkpoint = position.resume_point.member;
        resume_state
            .journal
            .checkpoint(&position.resume_point, &progress)
    }

    /// Records that the most recent pending directory gets its attributes at the end.
    pub(crate) fn journal_directory(&self, parent: &Directory) {
        if let Some(resume_state) = &self.resume_state
            && let Some(pending) = self.directories.last()
        {
            resume_state.journal().record_directory(
                resume_state.member_number(),
                Some(parent),
                pending,
            );
        }
    }

    /// Records that the most recent implied directory gets its time at the end.
    ///
    /// It is recorded for member 0, because a repeated member finds the directory and does not record it
    /// again.
    pub(crate) fn journal_implied(&self) {
        if let Some(resume_state) = &self.resume_state
            && let Some(pending) = self.directories.last()
        {
            resume_state.journal().record_directory(0, None, pending);
        }
    }

    /// Records that the most recently deferred link is made at the end.
    pub(crate) fn journal_link(&self) {
        if let Some(resume_state) = &self.resume_state
            && let Some(link) = self.links.last()
        {
            resume_state
                .journal()
                .record_link(resume_state.member_number(), link);
        }
    }

    /// Records that the entry of the job is complete.
    pub(crate) fn journal_entry(&self, job: &Job) {
        self.journal_name(job.number, &job.directory, &job.path);
    }

    /// Records that the entry of member `number` at `path`, in `directory`, is complete.
    pub(crate) fn journal_name(&self, number: u64, directory: &Directory, path: &ArchivePath) {
        if let Some(resume_state) = &self.resume_state
            && let Ok(stat) = lstat_at(directory, name_of(path))
        {
            resume_state
                .journal()
                .record_entry(number, directory, path, &stat);
        }
    }

    /// Number of the current member.
    pub(crate) fn member_number(&self) -> u64 {
        self.resume_state
            .as_ref()
            .map_or(0, ResumeState::member_number)
    }

    /// Whether a later run continues at the last checkpoint. Directories must stay writable for it.
    pub(crate) fn needs_resume(&self) -> bool {
        self.resume_state.is_some() && self.context.problems.fatal().is_some()
    }

    /// Ends a run that a later run resumes.
    ///
    /// Unlike [`Materializer::finish`], it leaves the final steps to the later run.
    ///
    /// # Errors
    /// The error that stopped the run, if the destination caused it.
    pub fn suspend(mut self) -> Result<Summary, Error> {
        if !matches!(self.current, crate::materialize::CurrentFile::Nothing) {
            self.end_payload(true);
        }
        self.writers.wait_for_all();
        // Checkpoint before the truncated or last member, which is made again.
        let previous = self
            .resume_state
            .as_ref()
            .map(|resume_state| &resume_state.previous_position);
        if let Some(position) = previous.cloned().flatten() {
            self.write_checkpoint(&position);
        }
        self.writers.close();
        match self.context.problems.fatal() {
            Some(error) => Err(error.clone()),
            None => Ok(Summary {
                entries: self.context.stats.written_entries.get(),
                bytes: self.context.stats.written_bytes.get(),
                errors: self.context.problems.count(),
                problems: self.context.problems.take_problems(),
            }),
        }
    }
}
