//! Shards: writes one, and finishes a tree that all of them have written.

use rustix::fs::{FileType, Stat};

use super::copy_plan::CopyPlan;
use super::entry_reader::{EntryError, check_names, compare, link_to, paths, read_entries};
use super::error::{Cause, Error};
use super::materializer::Materializer;
use super::options::Summary;
use super::shard_records::ShardRecords;
use super::write::{Identity, PendingDirectory, member_of};
use crate::archive::{Archive, Version, Volume};
use crate::base::archive_path::ArchivePath;
use crate::index::{Entry, EntryKind, Index, Ino, ShardPlan};

/// Maximum number of problems that the end of a run reports one by one.
const MAX_REPORTED_PROBLEMS: u64 = 20;

impl Materializer {
    /// Writes shard `number` of `plan`, which cuts `index`, and records the version of `archive` below the destination.
    /// The attributes of directories are left to [`Self::finish_shards`].
    ///
    /// # Errors
    /// The first result is about the archive, the second one is the error that stopped the run.
    pub fn write_shard(
        mut self,
        archive: &Archive,
        index: &Index,
        plan: &ShardPlan,
        number: u32,
    ) -> (Result<u64, EntryError<Error>>, Result<Summary, Error>) {
        let version = Version::of(archive);
        let top = self.tree.destination.top.clone();
        let records = ShardRecords::new(&top, index, &version);
        if let Err(error) = records.add() {
            self.tree.context.problems.stop(error);
            return (Ok(0), self.close());
        }
        let read = read_entries(archive, index, plan.entries(number), &mut self);
        self.cut_payload();
        self.tree.make_deferred_links();
        let closed = self.close();
        (read, closed.and_then(|tree| records.add().map(|()| tree)))
    }

    /// Finishes a tree that all shards of `index` of this version have written: makes missing hard links, and sets the
    /// attributes of directories. If an entry is missing, it only reports that. A second call changes nothing.
    ///
    /// # Errors
    /// As [`Self::write_shard`], [`Error::OtherVersion`] among those of the run.
    pub fn finish_shards(
        mut self,
        volume: &dyn Volume,
        index: &Index,
        version: &Version,
    ) -> (Result<u64, EntryError<Error>>, Result<Summary, Error>) {
        let finished = self.complete_shards(volume, index, version);
        let closed = self.close();
        match finished {
            Ok(()) => (Ok(0), closed),
            Err(EntryError::Sink(error)) => (Ok(0), Err(error)),
            Err(error) => (Err(error), closed),
        }
    }

    fn complete_shards(
        &mut self,
        volume: &dyn Volume,
        index: &Index,
        version: &Version,
    ) -> Result<(), EntryError<Error>> {
        let top = self.tree.destination.top.clone();
        let records = ShardRecords::new(&top, index, version);
        if let Err(error) = records.check() {
            self.tree.context.problems.stop(error);
            return Ok(());
        }
        check_names(volume, index)?;
        let names = CopyPlan::new(index, Ino::ROOT);
        let mut directories = Vec::new();
        for entry in index.entries() {
            let paths = paths(index, &names, entry).unwrap_or_default();
            let Some((path, links)) = paths.split_first() else {
                continue;
            };
            match self.check(entry, path) {
                // It keeps the attributes that it was made with.
                Ok(_) if entry.is_implied() => compare(volume, index, path)?,
                Ok(stat) if entry.kind() == EntryKind::Directory => {
                    compare(volume, index, path)?;
                    let (path, identity) = (path.clone(), Identity::of(&stat));
                    let (member, policy) = (member_of(entry), &self.tree.context.policy);
                    let pending = PendingDirectory::new(path, identity, false, member, policy);
                    directories.push(pending);
                }
                Ok(stat) => self.restore_links((volume, index), entry, (path, links), &stat)?,
                Err(cause) => self.report(path, cause),
            }
            let problems = &self.tree.context.problems;
            problems.check_fatal().map_err(EntryError::Sink)?;
        }
        if self.tree.context.problems.count() > 0 {
            return Ok(());
        }
        // That changes the time of the top, which is set below.
        if let Err(error) = records.remove() {
            let text = format!("cannot remove the records of shards in the destination: {error}");
            self.tree.context.problems.warn(&text);
        }
        for pending in directories {
            self.tree.defer_attributes(pending, None);
        }
        self.tree.apply_deferred_attributes();
        Ok(())
    }

    /// Compares the entry at `path` on disk with `entry`.
    fn check(&mut self, entry: Entry<'_>, path: &ArchivePath) -> Result<Stat, Cause> {
        let stat = self.tree.destination.stat(path).ok_or(Cause::NotWritten)?;
        let kind = match entry.kind() {
            EntryKind::File => FileType::RegularFile,
            EntryKind::Directory => FileType::Directory,
            EntryKind::Symlink(_) => FileType::Symlink,
            EntryKind::CharDevice(_) => FileType::CharacterDevice,
            EntryKind::BlockDevice(_) => FileType::BlockDevice,
            EntryKind::Fifo => FileType::Fifo,
        };
        let size = u64::try_from(stat.st_size).ok();
        let has_size = matches!(kind, FileType::RegularFile | FileType::Symlink);
        if FileType::from_raw_mode(stat.st_mode) != kind || has_size && size != Some(entry.size()) {
            return Err(Cause::Differs);
        }
        Ok(stat)
    }

    /// Makes the `links` that are not the file of `stat`.
    fn restore_links(
        &mut self,
        (volume, index): (&dyn Volume, &Index),
        entry: Entry<'_>,
        (path, links): (&ArchivePath, &[ArchivePath]),
        stat: &Stat,
    ) -> Result<(), EntryError<Error>> {
        for link in links {
            let found = self.tree.destination.stat(link);
            if found.is_none_or(|found| Identity::of(&found) != Identity::of(stat)) {
                compare(volume, index, link)?;
                let member = link_to(entry, path, link);
                self.tree.begin_member(member, link.clone());
            }
        }
        Ok(())
    }

    fn report(&self, path: &ArchivePath, cause: Cause) {
        let problems = &self.tree.context.problems;
        if problems.count() < MAX_REPORTED_PROBLEMS {
            problems.add(path, cause);
        } else {
            problems.add_count(1);
        }
    }
}
