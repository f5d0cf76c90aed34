//! Carries out the plan of an update from an archive.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::num::NonZeroUsize;
use std::path::Path;

use rustix::fs::{AtFlags, FileType};
use rustix::io::Errno;

use super::plan::{AttributeChange, SyncPlan};
use crate::archive::{ReadError, Volume};
use crate::base::archive_path::ArchivePath;
use crate::base::mount_point::is_mount;
use crate::base::resolve::ResolveError;
use crate::index::{Entry, EntryKind, Index, Ino};
use crate::materialize::entry_reader::{EntryError, EntryReader, check_names, compare};
use crate::materialize::error::{Error, StepError, WithAction};
use crate::materialize::materializer::Materializer;
use crate::materialize::options::Summary;
use crate::materialize::write::{
    AttributeTarget, Attributes, CAPABILITIES, Directory, IfMissing, PendingDirectory,
    ReplaceRules, lstat_at, name_of, parent_of,
};
use crate::tar::{Member, MemberKind};
use crate::tree::remove_tree;

/// Number of damaged files, or why the archive was not read to its end.
type ReadResult = Result<u64, EntryError<Error>>;

/// Compares with the archive all that is written, linked or changed, under each of its names, before anything is.
fn compare_names(
    volume: &dyn Volume,
    index: &Index,
    plan: &SyncPlan,
) -> Result<(), EntryError<Error>> {
    if !volume.is_compared() {
        return Ok(());
    }
    check_names(volume, index)?;
    let written = plan.written.keys().chain(plan.changed.keys());
    let mut paths = written.chain(plan.links.keys()).chain(plan.links.values());
    paths.try_for_each(|path| compare(volume, index, path))
}

impl Materializer {
    /// Brings the destination to the state of `index`, whose contents `volume` has, as `plan` says. Removes what the
    /// index lacks only if everything else succeeded.
    ///
    /// # Errors
    /// The first result is about the archive, the second one about the destination.
    pub fn sync(
        mut self,
        volume: &dyn Volume,
        index: &Index,
        plan: &SyncPlan,
    ) -> (ReadResult, Result<Summary, Error>) {
        if let Err(error) = compare_names(volume, index, plan) {
            return (Err(error), self.finish());
        }
        self.prepare(plan);
        let read = self.write_entries(volume, index, plan);
        self.cut_payload();
        if read.is_ok() && self.tree.context.problems.fatal().is_none() {
            self.change_existing(plan, matches!(read, Ok(0)));
        }
        (read, self.finish())
    }

    /// The same for the directory `source`, which is copied by the threads of a walk.
    ///
    /// # Errors
    /// As [`Materializer::copy_directory`].
    pub fn sync_directory(
        mut self,
        source: &Path,
        jobs: Option<NonZeroUsize>,
        plan: &SyncPlan,
    ) -> Result<Summary, Error> {
        self.prepare(plan);
        let written: HashSet<_> = plan.written.keys().cloned().collect();
        if !written.is_empty() {
            let filter = Box::new(move |path: &ArchivePath| written.contains(path));
            self = self.copy_selected(source, jobs, false, Some(filter))?;
        }
        if self.tree.context.problems.fatal().is_none() {
            self.change_existing(plan, true);
        }
        self.finish()
    }

    /// Lets the owner into the directories in which entries change, which get their new attributes at the end of the run,
    /// and removes what a killed run has left.
    fn prepare(&mut self, plan: &SyncPlan) {
        let rules = ReplaceRules {
            removes_directories: plan.deletes,
        };
        // A run has one plan.
        self.tree.context.replace_rules.set(rules).ok();
        let entries = plan.written.keys().chain(plan.links.keys());
        let mut directories = parents(entries.chain(&plan.leftovers));
        let changed = plan.changed.iter();
        let changed = changed.filter(|(_, change)| change.is_directory);
        directories.extend(changed.map(|(path, _)| path.clone()));
        // Those that are made get their attributes then.
        directories.retain(|path| !plan.written.contains_key(path));
        self.open_directories(directories, &plan.changed);
        for path in &plan.leftovers {
            self.remove(path);
        }
    }

    /// Lets the owner into the `directories`. At the end of the run they get their attributes again, with `changes`.
    fn open_directories(
        &mut self,
        directories: BTreeSet<ArchivePath>,
        changes: &BTreeMap<ArchivePath, AttributeChange>,
    ) {
        for path in directories {
            if let Some(stat) = self.tree.destination.stat(&path)
                && FileType::from_raw_mode(stat.st_mode) == FileType::Directory
            {
                self.tree.grant_owner_access(&path);
                let change = changes.get(&path);
                let attributes = change.map_or((None, None), |change| (change.owner, change.mode));
                let mtime = change.map(|change| change.mtime);
                let pending = PendingDirectory::existing(path, &stat, attributes, mtime);
                let pending =
                    pending.without_xattrs(change.is_some_and(|change| change.removes_xattrs));
                self.tree.defer_attributes(pending, None);
            }
        }
    }

    /// Makes links, changes attributes, and removes what the source lacks, if it `was_read`, and there were no errors.
    fn change_existing(&mut self, plan: &SyncPlan, was_read: bool) {
        for (path, first) in &plan.links {
            self.link(path, first);
        }
        for (path, change) in &plan.changed {
            self.tree.context.problems.entry(path);
            self.tree.context.stats.written_entries.increment();
            if !change.is_directory
                && let Err(error) = self.change(path, change)
            {
                self.tree.context.problems.add(path, error);
            }
        }
        if !was_read || plan.extra.is_empty() {
            return;
        }
        // Their errors count, too.
        self.tree.apply_deferred_attributes();
        let problems = &self.tree.context.problems;
        if problems.count() > 0 {
            return problems.warn("nothing was deleted, because of the errors above");
        }
        self.open_directories(parents(plan.extra.iter()), &BTreeMap::new());
        for path in &plan.extra {
            self.tree.context.problems.report_deletion(path);
            self.remove(path);
        }
    }

    fn write_entries(&mut self, volume: &dyn Volume, index: &Index, plan: &SyncPlan) -> ReadResult {
        let mut names: BTreeMap<Ino, Vec<&ArchivePath>> = BTreeMap::new();
        for (path, &inode) in &plan.written {
            let ino = u32::try_from(inode);
            let ino = ino.map_err(|_| EntryError::Read(path.clone(), ReadError::Index))?;
            names.entry(Ino(ino)).or_default().push(path);
        }
        let found = names.keys().filter_map(|ino| index.entry(*ino));
        let (implied, mut entries): (Vec<_>, Vec<_>) = found.partition(Entry::is_implied);
        let implied = implied.into_iter().filter_map(|entry| {
            let path = names.get(&entry.ino())?.first()?;
            Some((*path, entry))
        });
        let implied: Vec<_> = implied.collect();
        let paths = implied.iter().map(|(path, _)| path);
        paths.for_each(|path| self.make_room_for_directory(path));
        // Directories first, those above others before them, and then files in the order of their contents.
        let start = |entry: &Entry<'_>| Some(entry.pieces(0, u64::MAX).next()?.plain.start());
        entries.sort_by_key(|entry| {
            let is_directory = entry.kind() == EntryKind::Directory;
            (!is_directory, start(entry), entry.ino())
        });
        let order: Vec<_> = entries.iter().map(Entry::ino).collect();
        let mut reader = EntryReader::new(volume, index, &order);
        let mut damaged = 0;
        let mut linked = Vec::new();
        for entry in entries {
            let paths = names.get(&entry.ino()).map(Vec::as_slice);
            let Some((path, others)) = paths.and_then(<[_]>::split_first) else {
                continue;
            };
            if reader.read_entry(entry, path, self)? {
                linked.push((entry, *path, others));
            } else {
                damaged += 1; // The other names stay as they were, too.
            }
        }
        // The memory of one reader is free before another one starts.
        drop(reader);
        self.make_implied_directories(&implied, volume.is_merged());
        self.tree.destination.writers.wait_for_all();
        for (entry, mut path, others) in linked {
            for other in others {
                if !self.tree.context.has_failed(path) {
                    self.link(other, path);
                    continue;
                }
                // The next name is written instead. Its content is read once more.
                let only = [entry.ino()];
                let mut reader = EntryReader::new(volume, index, &only);
                if !reader.read_entry(entry, other, self)? {
                    damaged += 1;
                    break;
                }
                self.tree.destination.writers.wait_for_all();
                path = other;
            }
        }
        Ok(damaged)
    }

    /// Makes those of the `implied` directories in which nothing was written, because layers remove all entries there.
    /// All get their attributes in the index, but for the time, if it is merged from layers.
    fn make_implied_directories(&mut self, implied: &[(&ArchivePath, Entry<'_>)], is_merged: bool) {
        for &(path, entry) in implied {
            let destination = &mut self.tree.destination;
            match destination.resolve_directory(path.as_bytes(), IfMissing::Create) {
                Ok(made) if is_merged => {
                    let policy = &self.tree.context.policy;
                    let pending = PendingDirectory::of_entry(path.clone(), entry, &made, policy);
                    self.tree.defer_attributes(pending, None);
                }
                Err(ResolveError::Tree(error)) => self.tree.context.problems.add(path, error),
                Ok(_) | Err(ResolveError::Path(_)) => {}
            }
        }
    }

    /// Removes another entry at `path`, where the entries below it imply a directory.
    fn make_room_for_directory(&mut self, path: &ArchivePath) {
        // Behind a link there is nothing to remove, because the link is replaced, too.
        let parent = self.parent(path);
        if parent.is_ok_and(|parent| {
            lstat_at(&parent, name_of(path))
                .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) != FileType::Directory)
        }) {
            self.tree.context.note_replacement();
            self.remove(path);
        }
    }

    /// Makes `path` a name of the file at `first`.
    fn link(&mut self, path: &ArchivePath, first: &ArchivePath) {
        let target = MemberKind::HardLink(first.as_bytes().to_vec());
        let member = Member::new(path.as_bytes(), target);
        self.tree.begin_member(member, path.clone());
    }

    fn change(&mut self, path: &ArchivePath, change: &AttributeChange) -> Result<(), StepError> {
        let parent = self.parent(path)?;
        let (target, context) = (
            AttributeTarget::named(&parent, name_of(path)),
            &self.tree.context,
        );
        let mut xattrs = Vec::new();
        if change.owner.is_some() {
            // chown(2) removes them.
            let read = target.xattrs(|name| name == CAPABILITIES);
            xattrs = read.with_action("read the extended attributes")?;
        }
        let attributes = Attributes {
            path,
            owner: change.owner,
            mode: change.mode,
            mtime: change.mtime,
            atime: None,
            xattrs: &xattrs,
            removes_inherited_acls: false,
            removes_xattrs: false,
            context,
        };
        attributes.apply(target)
    }

    /// Removes an entry with all below it.
    fn remove(&mut self, path: &ArchivePath) {
        const ACTION: &str = "remove the entry";
        let removed = self.parent(path).and_then(|parent| {
            let name = name_of(path);
            let removed = match rustix::fs::unlinkat(&parent, name, AtFlags::empty()) {
                Err(Errno::ISDIR) => {
                    // It and directories below it may be open.
                    self.tree.context.note_replacement();
                    remove_tree(&parent, name)
                }
                Err(Errno::BUSY) if is_mount(&parent, name) => Err(Errno::XDEV),
                removed => removed,
            };
            match removed {
                Err(Errno::XDEV) => {
                    let text = format!("{path}: something is mounted there or below, left alone");
                    self.tree.context.problems.warn(&text);
                    Ok(())
                }
                Err(Errno::NOENT) => Ok(()),
                removed => removed.with_action(ACTION),
            }
        });
        if let Err(error) = removed {
            self.tree.context.problems.add(path, error);
        }
    }

    /// The directory of an existing entry. A link on the way is an error.
    fn parent(&mut self, path: &ArchivePath) -> Result<Directory, StepError> {
        const ACTION: &str = "open its directory";
        let destination = &mut self.tree.destination;
        match destination.resolve_directory(parent_of(path), IfMissing::Fail) {
            Ok(parent) => Ok(parent),
            Err(ResolveError::Path(_)) => Err(Errno::NOTDIR).with_action(ACTION),
            Err(ResolveError::Tree(error)) => Err(error),
        }
    }
}

/// The directories of the entries.
fn parents<'a>(paths: impl Iterator<Item = &'a ArchivePath>) -> BTreeSet<ArchivePath> {
    let parents = paths.map(|path| ArchivePath::sanitize(parent_of(path)).path);
    parents.collect()
}
