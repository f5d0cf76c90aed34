//! A run that can be taken up again: what it writes down while it goes on, and what a later one
//! believes of it.
//!
//! A member may be made twice, once before the interruption and once after it, and the tree must be
//! the same. What makes that so: between two checkpoints nothing changes that an earlier member has
//! looked at. So there is a checkpoint in front of each member that finds something in its place,
//! unless it is a file over a file of one name or a directory over a directory; and behind each one
//! that could not be made as the archive says, or not yet.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Stat};

use super::Materializer;
use super::directories::Directories;
use super::file::Job;
use super::journal::{Journal, Known, Past, Progress, Was};
use super::problem::Error;
use super::root::{Directory, Missing, name_of, parent_of, status};
use super::writers::Mark;
use super::{Options, Summary};
use crate::archive::ResumePoint;
use crate::base::extent::Plain;
use crate::base::archive_path::ArchivePath;
use crate::base::stats::Stats;
use crate::tar::Kind;

/// Plain bytes between two checkpoints that nothing else calls for.
const EVERY: u64 = 2 << 20;

/// In front of a member.
#[derive(Clone, Debug)]
struct Place {
    /// So many members came before it.
    number: u64,
    bookmark: ResumePoint,
    /// What has been counted against the limit of entries by then.
    claims: u64,
}

/// What a run knows of its own progress.
#[derive(Debug)]
pub(super) struct Keeping {
    journal: Arc<Journal>,
    /// The member at hand: so many came before it.
    number: u64,
    /// So many members were done by an earlier run, and are not made again.
    done: u64,
    /// Where the member before the one at hand can be found again.
    previous: Option<Place>,
    /// Where the member at hand can be found again.
    place: Option<Place>,
    /// The next checkpoint, as soon as the writers have come so far.
    next: Option<(Mark, Place)>,
    /// Where the last one stood.
    last: Plain,
    /// Directories that an interrupted run has made.
    made: HashSet<ArchivePath>,
    /// Names of inodes that have more than one.
    names: HashMap<u64, Vec<ArchivePath>>,
    /// Problems and late links when the member at hand began.
    seen: (u64, usize),
}

impl Keeping {
    pub(super) fn journal(&self) -> &Journal {
        &self.journal
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }
}

impl Materializer {
    /// As [`Materializer::new`], and what was done is written down beside `destination`, to be taken
    /// up by a later run that `owner` describes by the same words. With what an earlier one has done,
    /// if all of it is still there: then the scan goes on at the bookmark.
    ///
    /// # Errors
    /// As [`Materializer::new`], and [`Error::Journal`].
    pub fn resuming(
        destination: &Path,
        options: Options,
        stats: Arc<Stats>,
        owner: &str,
    ) -> Result<(Self, Option<ResumePoint>), Error> {
        let mut materializer = Self::new(destination, options, stats)?;
        let (journal, past) = Journal::open(destination, owner)?;
        let journal = Arc::new(journal);
        materializer.keep(&journal);
        let Some(past) = past else {
            return Ok((materializer, None));
        };
        if !materializer.believes(&past) {
            materializer.context.problems.warn(
                "what an interrupted run has written was changed since: beginning at the front",
            );
            let restarted = journal.restart();
            restarted.map_err(|error| journal.broken(&error))?;
            return Ok((materializer, None));
        }
        let bookmark = past.bookmark.clone();
        materializer.take_up(past);
        Ok((materializer, Some(bookmark)))
    }

    fn keep(&mut self, journal: &Arc<Journal>) {
        self.context.keep(journal);
        self.keeping = Some(Keeping {
            journal: Arc::clone(journal),
            number: 0,
            done: 0,
            previous: None,
            place: None,
            next: None,
            last: Plain(0),
            made: HashSet::new(),
            names: HashMap::new(),
            seen: (0, 0),
        });
    }

    /// Whether every entry is as it was written down when it was whole.
    fn believes(&mut self, past: &Past) -> bool {
        let mut wanted = HashMap::new();
        let mut inodes = HashMap::new();
        for was in &past.was {
            match was {
                Was::Whole(path, known) => {
                    wanted.insert(path, known.inode);
                    // Further names of an inode change its times.
                    inodes.insert(known.inode, (*known, false));
                }
                Was::Touched(inode) => {
                    if let Some((_, is_touched)) = inodes.get_mut(inode) {
                        *is_touched = true;
                    }
                }
                // A directory is looked at when it gets its attributes.
                Was::Directory(path) | Was::Replaced(path) => {
                    wanted.remove(path);
                }
            }
        }
        wanted.into_iter().all(|(path, inode)| {
            let Some(stat) = self.look_at(path) else {
                return false;
            };
            let is_same = inodes.get(&inode).is_some_and(|(known, is_touched)| {
                if *is_touched {
                    known.fits_but_for_ctime(&stat)
                } else {
                    *known == Known::of(&stat)
                }
            });
            stat.st_ino == inode && is_same
        })
    }

    fn look_at(&mut self, path: &ArchivePath) -> Option<Stat> {
        if path.is_root() {
            return rustix::fs::fstat(self.root.top()).ok();
        }
        let parent = self
            .root
            .directory(parent_of(path), Missing::Fail, &mut self.writers);
        status(&parent.ok()?, name_of(path)).ok()
    }

    fn take_up(&mut self, past: Past) {
        self.context.claims.add_earlier(past.claims);
        self.context.problems.count_more(past.errors);
        if past.errors > 0 {
            self.context.problems.warn(&format!(
                "{} entries were missing or incomplete when the run was interrupted",
                past.errors
            ));
        }
        self.selection.set_found(&past.found);
        self.directories = Directories::earlier(past.directories);
        self.put_off_again(past.links);
        let seen = self.seen();
        if let Some(keeping) = &mut self.keeping {
            for was in past.was {
                if let Was::Whole(path, known) = was {
                    keeping.names.entry(known.inode).or_default().push(path);
                }
            }
            keeping.names.retain(|_, names| names.len() > 1);
            keeping.made = past.made;
            keeping.number = past.before;
            keeping.done = past.members;
            keeping.last = past.bookmark.member;
            keeping.seen = seen;
        }
    }

    fn seen(&self) -> (u64, usize) {
        (self.context.problems.count(), self.links.count())
    }

    /// The next member can be found at `bookmark`.
    pub(super) fn place(&mut self, bookmark: ResumePoint) {
        if let Some(keeping) = &mut self.keeping {
            keeping.place = Some(Place {
                number: keeping.number,
                bookmark,
                claims: self.context.claims.count(),
            });
        }
    }

    /// The next member begins: writes down how far the run has come, if it is time. False when an
    /// earlier run has dealt with it.
    pub(super) fn come_to_member(&mut self) -> bool {
        let Some(keeping) = &self.keeping else {
            return true;
        };
        if keeping.number < keeping.done {
            return false;
        }
        // From here on it is known what was there before.
        if keeping.number == 0
            && let Some(place) = keeping.place.clone()
        {
            self.write_down(&place);
        }
        self.note_progress();
        true
    }

    fn note_progress(&mut self) {
        let seen = self.seen();
        let Some(keeping) = &mut self.keeping else {
            return;
        };
        let is_as_archived = keeping.seen == seen;
        keeping.seen = seen;
        if !is_as_archived {
            self.checkpoint();
            return;
        }
        if let Some((mark, _)) = &keeping.next
            && self.writers.has_done(mark)
            && let Some((_, place)) = keeping.next.take()
        {
            self.write_down(&place);
        }
        let Some(keeping) = &mut self.keeping else {
            return;
        };
        if keeping.next.is_none()
            && let Some(place) = &keeping.place
            && place.bookmark.member.0.saturating_sub(keeping.last.0) >= EVERY
        {
            keeping.next = Some((self.writers.mark(), place.clone()));
        }
    }

    /// The member at hand has been dealt with, but for what writers do.
    pub(super) fn leave_member(&mut self) {
        if let Some(keeping) = &mut self.keeping {
            keeping.previous = keeping.place.take();
            keeping.number += 1;
        }
    }

    /// A member is to be made at the job's place. The inode that has this name and others too, if
    /// there is one: what becomes of it is for [`Materializer::leave_place`].
    pub(super) fn come_to_place(&mut self, job: &Job) -> Option<u64> {
        self.keeping.as_ref()?;
        let name = name_of(&job.path);
        self.writers.settle(job.directory.identity(), name);
        let Ok(stat) = status(&job.directory, name) else {
            self.come_to_directory(job);
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
            self.checkpoint();
        }
        if let Some(keeping) = &self.keeping
            && !(is_harmless && is_directory)
        {
            keeping.journal.replace(&job.directory, &job.path);
        }
        if is_harmless {
            return None;
        }
        self.come_to_directory(job);
        // A directory is counted by those in it.
        if !is_shared || is_directory {
            return None;
        }
        if let Some(keeping) = &self.keeping {
            keeping.journal.touch(stat.st_ino);
        }
        if is_file {
            // Here, and not by a writer later: what that changes can be written down.
            self.writers.replaced();
            rustix::fs::unlinkat(&job.directory, name, AtFlags::empty()).ok();
            self.leave_place(stat.st_ino);
            return None;
        }
        Some(stat.st_ino)
    }

    /// A directory is to be made, if the job's member is one, and there is none.
    fn come_to_directory(&self, job: &Job) {
        if let Some(keeping) = &self.keeping
            && job.member.kind == Kind::Directory
        {
            keeping.journal.make(job.number, &job.directory, &job.path);
        }
    }

    /// Whether the directory in the job's place is there only because an interrupted run has made
    /// it for the same member.
    pub(super) fn was_made(&self, job: &Job) -> bool {
        self.keeping.as_ref().is_some_and(|keeping| {
            let made = &keeping.made;
            !made.is_empty() && made.contains(&keeping.journal.place(&job.directory, &job.path))
        })
    }

    /// The inode has lost a name, or may have: writes down what it is like now.
    pub(super) fn leave_place(&mut self, inode: u64) {
        let names = self
            .keeping
            .as_ref()
            .and_then(|keeping| keeping.names.get(&inode));
        let number = self.number();
        for path in names.cloned().unwrap_or_default() {
            if let Some(stat) = self.look_at(&path).filter(|stat| stat.st_ino == inode)
                && let Some(keeping) = &self.keeping
            {
                keeping.journal.entry_at(number, &path, &stat);
                return;
            }
        }
    }

    /// What has the name `target` is about to get another one.
    pub(super) fn come_to_link(&self, directory: &Directory, name: &[u8]) {
        if let Some(keeping) = &self.keeping
            && let Ok(stat) = status(directory, name)
        {
            keeping.journal.touch(stat.st_ino);
        }
    }

    /// What has the name `target` has the name `path`, too.
    pub(super) fn leave_link(&mut self, path: &ArchivePath, target: &ArchivePath) {
        if self.keeping.is_none() {
            return;
        }
        if let Some(stat) = self.look_at(path)
            && let Some(keeping) = &mut self.keeping
        {
            let names = keeping.names.entry(stat.st_ino).or_default();
            names.extend([path.clone(), target.clone()]);
        }
    }

    /// Writes down, before anything else happens, that all before the member at hand is done.
    fn checkpoint(&mut self) {
        self.writers.settle_all();
        let Some(keeping) = &mut self.keeping else {
            return;
        };
        keeping.next = None;
        let written = match keeping.place.clone() {
            Some(place) => self.write_down(&place),
            None => false,
        };
        if !written && let Some(keeping) = &self.keeping {
            keeping.journal.give_up();
        }
    }

    /// All members are done; what is left to do at the very end may be done twice, and they must
    /// not.
    pub(super) fn come_to_end(&mut self) {
        if let Some(keeping) = &mut self.keeping {
            keeping.next = None;
            let members = keeping.number;
            if let Some(place) = keeping.previous.clone() {
                let claims = self.context.claims.count();
                self.write_down_done(&place, members, claims);
            }
        }
    }

    /// As [`Materializer::write_down_done`], and no more is done than what comes before `place`.
    fn write_down(&mut self, place: &Place) -> bool {
        self.write_down_done(place, place.number, place.claims)
    }

    /// Whether it is written; nothing is once the destination has failed.
    fn write_down_done(&mut self, place: &Place, members: u64, claims: u64) -> bool {
        let Some(keeping) = &mut self.keeping else {
            return false;
        };
        if self.context.problems.fatal().is_some() {
            // The run ends here, and the last checkpoint stands.
            return true;
        }
        let progress = Progress {
            before: place.number,
            members,
            claims,
            errors: self.context.problems.count(),
            found: &self.selection.found(),
        };
        keeping.last = place.bookmark.member;
        keeping.journal.checkpoint(&place.bookmark, &progress)
    }

    /// Notes in the journal that the directory remembered last gets its attributes at the end.
    pub(super) fn journal_directory(&self, parent: &Directory) {
        if let Some(keeping) = &self.keeping
            && let Some(pending) = self.directories.last()
        {
            keeping
                .journal()
                .directory(keeping.number(), Some(parent), pending);
        }
    }

    /// Notes in the journal that the directory remembered last gets its time at the end. Who makes the member
    /// once more finds the directory, so this counts in any case.
    pub(super) fn journal_implied(&self) {
        if let Some(keeping) = &self.keeping
            && let Some(pending) = self.directories.last()
        {
            keeping.journal().directory(0, None, pending);
        }
    }

    /// Notes in the journal that the link put off last is made at the end.
    pub(super) fn journal_link(&self) {
        if let Some(keeping) = &self.keeping
            && let Some(link) = self.links.last()
        {
            keeping.journal().link(keeping.number(), link);
        }
    }

    /// Notes in the journal that the entry of the job is whole.
    pub(super) fn journal_entry(&self, job: &Job) {
        self.journal_name(job.number, &job.directory, &job.path);
    }

    /// Notes in the journal that what member `number` has left at `path`, in `directory`, is whole.
    pub(super) fn journal_name(&self, number: u64, directory: &Directory, path: &ArchivePath) {
        if let Some(keeping) = &self.keeping
            && let Ok(stat) = status(directory, name_of(path))
        {
            keeping.journal().entry(number, directory, path, &stat);
        }
    }

    /// The number of the member at hand.
    pub(super) fn number(&self) -> u64 {
        self.keeping.as_ref().map_or(0, Keeping::number)
    }

    /// Whether a later run goes on at the last checkpoint, and so must find directories that it can write
    /// to.
    pub(super) fn must_be_taken_up(&self) -> bool {
        self.keeping.is_some() && self.context.problems.fatal().is_some()
    }

    /// Ends a run that is to be taken up again: as [`Materializer::finish`], but what is done at the
    /// very end is left to the run that comes to it.
    ///
    /// # Errors
    /// What stopped the run, if the destination did.
    pub fn suspend(mut self) -> Result<Summary, Error> {
        if !matches!(self.current, super::Current::Nothing) {
            self.end_of_file(true);
        }
        self.writers.settle_all();
        // In front of the member that was cut, or of the last one, which is made again.
        let previous = self.keeping.as_ref().map(|keeping| &keeping.previous);
        if let Some(place) = previous.cloned().flatten() {
            self.write_down(&place);
        }
        self.writers.close();
        match self.context.problems.fatal() {
            Some(error) => Err(error.clone()),
            None => Ok(Summary {
                entries: self.context.stats.written_entries.get(),
                bytes: self.context.stats.written_bytes.get(),
                errors: self.context.problems.count(),
                problems: self.context.problems.take_kept(),
            }),
        }
    }
}
