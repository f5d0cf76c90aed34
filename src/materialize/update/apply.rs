//! Carries out the plan of an update from an archive.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use bytes::Bytes;
use rustix::fs::{AtFlags, FileType};
use rustix::io::Errno;

use super::plan::{Change, UpdatePlan};
use crate::archive::scan::Sink;
use crate::archive::{ReadError, Volume};
use crate::base::archive_path::ArchivePath;
use crate::base::buffer_pool::BufferPool;
use crate::base::extent::Plain;
use crate::base::resolve::ResolveError;
use crate::index::{Entry, EntryKind, Index, Ino};
use crate::list::change::{is_mount, remove_tree};
use crate::materialize::error::{Error, StepError, WithAction};
use crate::materialize::materializer::Materializer;
use crate::materialize::options::Summary;
use crate::materialize::shard::{ShardError, named};
use crate::materialize::write::{
    AttributeTarget, Attributes, Directory, IfMissing, PendingDirectory, name_of, parent_of,
};
use crate::tar::{Member, MemberKind};

/// Memory for contents that the writers have not written yet.
const BUFFER_BYTES: u64 = 32 << 20;
/// Maximum bytes of one read.
const READ_BYTES: u64 = 1 << 20;
/// Reads that are in flight, or whose bytes wait for their turn.
const MAX_READS_AHEAD: usize = 16;

/// Whether the archive was read without damage, or why not.
type Read = Result<bool, ShardError<Error>>;

impl Materializer {
    /// Brings the destination to the state of `index`, whose contents `volume` has, as `plan` says. Removes what the
    /// index lacks only if it is to `delete` and everything else succeeded.
    ///
    /// # Errors
    /// The first result is about the archive, the second one about the destination.
    pub fn update(
        mut self,
        volume: &dyn Volume,
        index: &Index,
        plan: &UpdatePlan,
        delete: bool,
    ) -> (Read, Result<Summary, Error>) {
        let root = index.entry(Ino::ROOT);
        self.tree.was_empty &= root.is_some_and(|root| root.is_implied());
        self.prepare(plan, delete);
        let read = self.write_entries(volume, index, plan);
        self.cut_payload();
        if read.is_ok() && self.tree.context.problems.fatal().is_none() {
            self.change_existing(plan, delete && matches!(read, Ok(true)));
        }
        (read, self.finish())
    }

    /// The same for the directory `source`, which is copied by the threads of a walk.
    ///
    /// # Errors
    /// As [`Materializer::copy_directory`].
    pub fn update_from(
        mut self,
        source: &Path,
        jobs: Option<NonZeroUsize>,
        plan: &UpdatePlan,
        delete: bool,
    ) -> Result<Summary, Error> {
        self.tree.was_empty = false;
        self.prepare(plan, delete);
        let written: HashSet<_> = plan.written.keys().cloned().collect();
        if !written.is_empty() {
            let filter = Box::new(move |path: &ArchivePath| written.contains(path));
            self = self.copy_selected(source, jobs, false, Some(filter))?;
        }
        if self.tree.context.problems.fatal().is_none() {
            self.change_existing(plan, delete);
        }
        self.finish()
    }

    /// Lets the owner into the directories in which entries change, and removes entries of another type. At the end
    /// of the run these directories get their attributes again, and changed ones their new attributes.
    fn prepare(&mut self, plan: &UpdatePlan, delete: bool) {
        let extra = plan.extra.iter().filter(|_| delete);
        let entries = plan.written.keys().chain(plan.links.keys()).chain(extra);
        let parents = entries.map(|path| ArchivePath::sanitize(parent_of(path)).path);
        let mut directories: BTreeSet<_> = parents.collect();
        let changed = plan.changed.iter().filter(|(_, it)| it.is_directory);
        directories.extend(changed.map(|(path, _)| path.clone()));
        // Those that are made get their attributes then.
        directories.retain(|path| !plan.written.contains_key(path));
        for path in directories {
            if let Some(stat) = self.tree.destination.stat(&path)
                && FileType::from_raw_mode(stat.st_mode) == FileType::Directory
            {
                self.tree.grant_owner_access(&path);
                let change = plan.changed.get(&path);
                let attributes = change.map_or((None, None), |it| (it.owner, it.mode));
                let mtime = change.map(|it| it.mtime);
                let pending = PendingDirectory::existing(path, &stat, attributes, mtime);
                self.tree.defer_attributes(pending, None);
            }
        }
        for (path, is_directory) in &plan.replaced {
            // Without `delete` the writer removes only an empty directory.
            if delete || !is_directory {
                self.remove(path);
            }
        }
    }

    /// Makes links, changes attributes, and removes what the source lacks, unless there were errors.
    fn change_existing(&mut self, plan: &UpdatePlan, delete: bool) {
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
        let problems = &self.tree.context.problems;
        if !delete || plan.extra.is_empty() {
            return;
        }
        if problems.count() > 0 {
            return problems.warn("nothing was deleted, because of the errors above");
        }
        for path in &plan.extra {
            self.remove(path);
        }
    }

    fn write_entries(&mut self, volume: &dyn Volume, index: &Index, plan: &UpdatePlan) -> Read {
        let mut names: BTreeMap<Ino, Vec<&ArchivePath>> = BTreeMap::new();
        for (path, &inode) in &plan.written {
            let ino = u32::try_from(inode);
            let ino = ino.map_err(|_| ShardError::Read(path.clone(), ReadError::Index))?;
            names.entry(Ino(ino)).or_default().push(path);
        }
        let found = names.keys().filter_map(|ino| index.entry(*ino));
        let mut entries: Vec<_> = found.filter(|entry| !entry.is_implied()).collect();
        // Directories first, those above others before them, and then files in the order of their contents.
        let start = |entry: &Entry<'_>| entry.pieces(0, u64::MAX).next().map(|it| it.plain.start());
        entries.sort_by_key(|entry| {
            let is_directory = entry.kind() == EntryKind::Directory;
            (!is_directory, start(entry), entry.ino())
        });
        let mut reads = ReadsAhead {
            volume,
            requests: entries.iter().flat_map(|entry| requests(*entry)),
            in_flight: VecDeque::new(),
            pool: BufferPool::new(BUFFER_BYTES),
        };
        let mut is_complete = true;
        for &entry in &entries {
            let paths = names.get(&entry.ino()).map(Vec::as_slice);
            let Some((path, others)) = paths.and_then(<[_]>::split_first) else {
                continue;
            };
            self.member(named(entry, path)).map_err(ShardError::Sink)?;
            let read = self.send(entry, path, &mut reads)?;
            if let Err(error) = &read {
                is_complete = false;
                self.damage(Plain(0), &format!("{path}: {error}"));
            }
            self.member_end(read.is_err()).map_err(ShardError::Sink)?;
            for other in others {
                self.link(other, path);
            }
        }
        Ok(is_complete)
    }

    /// Sends the content of `entry` to the writers. Returns why it is damaged, if it is.
    fn send(
        &mut self,
        entry: Entry<'_>,
        path: &ArchivePath,
        reads: &mut ReadsAhead<'_, impl Iterator<Item = Request>>,
    ) -> Result<Result<(), ReadError>, ShardError<Error>> {
        let mut sent = Ok(());
        for (_, _, len) in requests(entry) {
            match reads.next(len) {
                Ok(_) if sent.is_err() => {}
                Ok(bytes) => self.payload(bytes).map_err(ShardError::Sink)?,
                Err(error @ ReadError::Damaged { .. }) => sent = Err(error),
                Err(error) => return Err(ShardError::Read(path.clone(), error)),
            }
        }
        Ok(sent)
    }

    /// Makes `path` a name of the file at `first`.
    fn link(&mut self, path: &ArchivePath, first: &ArchivePath) {
        let target = MemberKind::HardLink(first.as_bytes().to_vec());
        let member = Member::new(path.as_bytes(), target);
        self.tree.begin_member(member, path.clone());
    }

    fn change(&mut self, path: &ArchivePath, change: &Change) -> Result<(), StepError> {
        let parent = self.parent(path)?;
        let (target, context) = (
            AttributeTarget::named(&parent, name_of(path)),
            &self.tree.context,
        );
        let mut xattrs = Vec::new();
        if change.owner.is_some() {
            // chown(2) removes them.
            xattrs = target.xattrs(&context.policy.xattrs)?;
            xattrs.retain(|(name, _)| name == b"security.capability");
        }
        let attributes = Attributes {
            path,
            owner: change.owner,
            mode: change.mode,
            mtime: change.mtime,
            xattrs: &xattrs,
            removes_inherited_acls: false,
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
                Err(Errno::BUSY) if is_mount(&parent, name) => Ok(()),
                removed => removed,
            };
            match removed {
                // Something is mounted below, and stays.
                Err(Errno::NOENT | Errno::XDEV) => Ok(()),
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
            Ok(parent) if parent.resolved_path_of(name_of(path)).is_none() => Ok(parent),
            Ok(_) => Err(Errno::LOOP).with_action(ACTION),
            Err(ResolveError::Path(_)) => Err(Errno::NOTDIR).with_action(ACTION),
            Err(ResolveError::Tree(error)) => Err(error),
        }
    }
}

/// A read of an entry: offset and length.
type Request = (Ino, u64, u32);

/// The reads of the content of an entry.
fn requests(entry: Entry<'_>) -> impl Iterator<Item = Request> + use<'_> {
    entry.pieces(0, u64::MAX).flat_map(move |piece| {
        let len = piece.plain.len();
        (0..len.div_ceil(READ_BYTES)).map(move |number| {
            let done = number * READ_BYTES;
            let wanted = (len - done).min(READ_BYTES);
            let wanted = u32::try_from(wanted).unwrap_or(u32::MAX);
            (entry.ino(), piece.offset.saturating_add(done), wanted)
        })
    })
}

/// Reads contents ahead, on the threads of the archive.
struct ReadsAhead<'a, I> {
    volume: &'a dyn Volume,
    requests: I,
    in_flight: VecDeque<Receiver<Result<Bytes, ReadError>>>,
    /// Copies for the writers.
    pool: BufferPool,
}

impl<I: Iterator<Item = Request>> ReadsAhead<'_, I> {
    /// The bytes of the next request, which has this length.
    fn next(&mut self, len: u32) -> Result<Bytes, ReadError> {
        while self.in_flight.len() < MAX_READS_AHEAD
            && let Some((ino, offset, len)) = self.requests.next()
        {
            let (sender, receiver) = sync_channel(1);
            let reply = move |read: Result<Bytes, ReadError>| {
                // A slice would keep memory for which other reads wait.
                let copied = read.map(|bytes| Bytes::copy_from_slice(&bytes));
                // After an error there is no receiver.
                drop(sender.send(copied));
            };
            let wanted = Arc::new(|| true);
            self.volume.read(ino, offset, len, wanted, Box::new(reply));
            self.in_flight.push_back(receiver);
        }
        let receiver = self.in_flight.pop_front().ok_or(ReadError::Index)?;
        let bytes = receiver.recv().map_err(|_| ReadError::Unscanned)??;
        if bytes.len() as u64 != u64::from(len) {
            return Err(ReadError::Index);
        }
        let copy = self.pool.acquire(bytes.len());
        let mut copy = copy.map_err(|_| ReadError::Unscanned)?;
        copy.copy_from_slice(&bytes);
        Ok(copy.freeze())
    }
}
