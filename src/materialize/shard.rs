//! Shards: reads the entries of one from an index, and finishes a tree that all of them have written.
//!
//! A shard is decoded once, from front to back, and its entries go to any [`Sink`] as members. Directories that
//! no member describes are left to the sink.

use bytes::Bytes;
use rustix::fs::{FileType, Stat};

use super::background_copy::CopyPlan;
use super::error::{Cause, Error};
use super::materializer::Materializer;
use super::options::Summary;
use super::shard_records::ShardRecords;
use super::write::{Identity, PendingDirectory, member_of};
use crate::archive::scan::Sink;
use crate::archive::{Archive, PlainStream, ReadError, Version, Volume};
use crate::base::archive_path::ArchivePath;
use crate::base::buffer_pool::BufferPool;
use crate::base::extent::{Extent, Plain};
use crate::index::{Entry, EntryKind, Index, Ino, Piece, ShardPlan};
use crate::tar::{Member, MemberKind};

/// Memory for contents that the sink has not written yet.
const BUFFER_BYTES: u64 = 32 << 20;
/// Maximum length of a piece for the sink.
const MAX_PIECE_BYTES: u64 = 1 << 20;
/// Plain bytes between two contents that are seeked over instead of decoded.
const MIN_SEEK_BYTES: u64 = 8 << 20;
/// Maximum number of problems that the end of a run reports one by one.
const MAX_REPORTED_PROBLEMS: u64 = 20;

/// Reason why a shard was not read to its end.
#[derive(Debug)]
pub enum ShardError<E> {
    /// The sink stopped.
    Sink(E),
    /// The content of this entry could not be read.
    Read(ArchivePath, ReadError),
}

/// Sends `entries`, which are in archive order, to `sink`, and each hard link after its file. Returns the number of
/// damaged files.
///
/// # Errors
/// When the archive cannot be read or the sink stops.
pub fn read_entries<S: Sink>(
    archive: &Archive,
    index: &Index,
    entries: &[Ino],
    sink: &mut S,
) -> Result<u64, ShardError<S::Error>> {
    let ends = entries.iter().filter_map(|ino| index.entry(*ino));
    let ends = ends.filter_map(|entry| Some(entry.pieces(0, u64::MAX).last()?.plain.end()));
    let mut contents = Contents {
        archive,
        end: ends.max().unwrap_or_default(),
        stream: None,
        position: Plain(0),
        rest: Bytes::new(),
        pool: BufferPool::new(BUFFER_BYTES),
    };
    let names = CopyPlan::new(index, Ino::ROOT);
    let mut damaged = 0;
    for &ino in entries {
        let found = index.entry(ino).filter(|entry| !entry.is_implied());
        let Some(entry) = found else {
            continue;
        };
        let paths = paths(index, &names, entry);
        let damaged_index = || ShardError::Read(ArchivePath::root(), ReadError::Index);
        let paths = paths.ok_or_else(damaged_index)?;
        let Some((path, links)) = paths.split_first() else {
            continue;
        };
        sink.member(named(entry, path)).map_err(ShardError::Sink)?;
        let read = contents.send(entry, path, sink);
        let is_cut = match read {
            Ok(()) => false,
            Err(ShardError::Read(_, error @ ReadError::Damaged { .. })) => {
                damaged += 1;
                sink.damage(Plain(0), &format!("{path}: {error}"));
                true
            }
            Err(error) => return Err(error),
        };
        sink.member_end(is_cut).map_err(ShardError::Sink)?;
        for link in links {
            let sent = sink.member(link_to(entry, path, link));
            let sent = sent.and_then(|()| sink.member_end(false));
            sent.map_err(ShardError::Sink)?;
        }
    }
    Ok(damaged)
}

/// All paths of an entry, the one of its first member first; `None` if the index contradicts itself.
fn paths(index: &Index, names: &CopyPlan, entry: Entry<'_>) -> Option<Vec<ArchivePath>> {
    if entry.kind() == EntryKind::Directory {
        return Some(vec![names.directory(index, entry.ino())?]);
    }
    let names_of = names.names_of(entry.ino()).iter();
    let paths = names_of.map(|name| names.path(index, name));
    let mut paths = paths.collect::<Option<Vec<_>>>()?;
    let first = index.path(entry.ino());
    if let Some(first) = paths.iter().position(|path| Some(path) == first.as_ref()) {
        paths.swap(0, first);
    }
    Some(paths)
}

pub(super) fn named(entry: Entry<'_>, path: &ArchivePath) -> Member {
    let mut name = path.as_bytes().to_vec();
    if path.is_root() {
        name.push(b'.');
    }
    if entry.kind() == EntryKind::Directory {
        name.push(b'/');
    }
    Member {
        name,
        ..member_of(entry)
    }
}

/// A hard link at `path` to the file `entry` at `target`.
fn link_to(entry: Entry<'_>, target: &ArchivePath, path: &ArchivePath) -> Member {
    Member {
        kind: MemberKind::HardLink(target.as_bytes().to_vec()),
        payload: Extent::default(),
        size: 0,
        sparse: None,
        xattrs: Vec::new(),
        ..named(entry, path)
    }
}

/// The contents of a shard's files, read in order.
struct Contents<'a> {
    archive: &'a Archive,
    /// Highest end of a content in the shard.
    end: Plain,
    stream: Option<PlainStream<'a>>,
    /// Offset of the next byte of `rest`, or of the stream.
    position: Plain,
    rest: Bytes,
    /// Copies for the sink, because a queued slice would keep the memory of a whole span.
    pool: BufferPool,
}

impl Contents<'_> {
    fn send<S: Sink>(
        &mut self,
        entry: Entry<'_>,
        path: &ArchivePath,
        sink: &mut S,
    ) -> Result<(), ShardError<S::Error>> {
        let read_error = |error| ShardError::Read(path.clone(), error);
        for piece in entry.pieces(0, u64::MAX) {
            let mut done = 0;
            let found = self.seek(piece.plain);
            let mut can_stream = self.unless_damaged(found).map_err(read_error)?;
            while done < piece.plain.len() {
                let wanted = (piece.plain.len() - done).min(MAX_PIECE_BYTES);
                let bytes = if can_stream {
                    let taken = self.take(wanted);
                    self.unless_damaged(taken)
                } else {
                    self.read(entry.ino(), &piece, done, wanted)
                };
                let bytes = bytes.map_err(read_error)?;
                if bytes.is_empty() {
                    // The stream has ended, or is damaged here.
                    if !std::mem::take(&mut can_stream) {
                        return Err(read_error(ReadError::Index));
                    }
                    continue;
                }
                done += bytes.len() as u64;
                let copy = self.pool.acquire(bytes.len());
                let mut copy = copy.map_err(|_| read_error(ReadError::Unscanned))?;
                copy.copy_from_slice(&bytes);
                sink.payload(copy.freeze()).map_err(ShardError::Sink)?;
            }
        }
        Ok(())
    }

    /// `result`, or the default without a stream, because a read fetches damaged bytes once more.
    fn unless_damaged<T: Default>(&mut self, result: Result<T, ReadError>) -> Result<T, ReadError> {
        match result {
            Err(ReadError::Damaged { .. }) => {
                self.stream = None;
                Ok(T::default())
            }
            result => result,
        }
    }

    /// Moves the stream to the start of `plain`, or starts another one. Returns whether there is a stream.
    fn seek(&mut self, plain: Extent<Plain>) -> Result<bool, ReadError> {
        let start = plain.start();
        let gap = start.0.checked_sub(self.position.0);
        let is_near = gap.is_some_and(|gap| gap < MIN_SEEK_BYTES);
        if !(self.stream.is_some() && is_near) {
            // A content behind the last one is read alone, because only damaged indexes have such an order.
            let end = if gap.is_some() { self.end } else { plain.end() };
            // The memory of one stream is free before another one starts.
            (self.stream, self.rest) = (None, Bytes::new());
            let extent = Extent::new(start, end.max(plain.end())).ok_or(ReadError::Index)?;
            self.stream = self.archive.stream(extent)?;
            self.position = start;
        }
        while self.stream.is_some() && self.position < start {
            if self.take(start.0 - self.position.0)?.is_empty() {
                return Err(ReadError::Index);
            }
        }
        Ok(self.stream.is_some())
    }

    /// Takes up to `len` bytes of the stream; none at its end.
    fn take(&mut self, len: u64) -> Result<Bytes, ReadError> {
        if self.rest.is_empty()
            && let Some(stream) = &mut self.stream
        {
            self.rest = Bytes::new();
            self.rest = stream.next_bytes()?.unwrap_or_default();
        }
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let bytes = self.rest.split_to(len.min(self.rest.len()));
        self.position = Plain(self.position.0.saturating_add(bytes.len() as u64));
        Ok(bytes)
    }

    /// Reads a part of a piece as a mount does.
    fn read(&self, ino: Ino, piece: &Piece, done: u64, len: u64) -> Result<Bytes, ReadError> {
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        self.archive
            .read_blocking(ino, piece.offset.saturating_add(done), len)
    }
}

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
    ) -> (Result<u64, ShardError<Error>>, Result<Summary, Error>) {
        let version = Version::of(archive);
        let records = ShardRecords::new(&self.tree.destination.top, index, &version);
        if let Err(error) = records.add() {
            self.tree.context.problems.stop(error);
            return (Ok(0), self.close());
        }
        let read = read_entries(archive, index, plan.entries(number), &mut self);
        self.cut_payload();
        self.tree.make_deferred_links();
        (read, self.close())
    }

    /// Finishes a tree that all shards of `index` of this version have written: makes missing hard links, and sets the
    /// attributes of directories. If an entry is missing, it only reports that. A second call changes nothing.
    ///
    /// # Errors
    /// The error that stopped the run, [`Error::OtherVersion`] among them.
    pub fn finish_shards(mut self, index: &Index, version: &Version) -> Result<Summary, Error> {
        let top = self.tree.destination.top.clone();
        let records = ShardRecords::new(&top, index, version);
        if let Err(error) = records.check() {
            self.tree.context.problems.stop(error);
            return self.close();
        }
        let names = CopyPlan::new(index, Ino::ROOT);
        let mut directories = Vec::new();
        for entry in index.entries() {
            let paths = paths(index, &names, entry).unwrap_or_default();
            let Some((path, links)) = paths.split_first() else {
                continue;
            };
            match self.check(entry, path) {
                Ok(stat) if entry.kind() == EntryKind::Directory => {
                    let (path, identity) = (path.clone(), Identity::of(&stat));
                    let policy = &self.tree.context.policy;
                    directories.push(if entry.is_implied() {
                        PendingDirectory::implied(path, identity)
                    } else {
                        PendingDirectory::new(path, identity, false, member_of(entry), policy)
                    });
                }
                Ok(stat) => self.restore_links(entry, path, links, &stat),
                Err(cause) => self.report(path, cause),
            }
            self.tree.context.problems.check_fatal()?;
        }
        if self.tree.context.problems.count() > 0 {
            return self.close();
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
        self.close()
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
        entry: Entry<'_>,
        path: &ArchivePath,
        links: &[ArchivePath],
        stat: &Stat,
    ) {
        for link in links {
            let found = self.tree.destination.stat(link);
            if found.is_none_or(|found| Identity::of(&found) != Identity::of(stat)) {
                let member = link_to(entry, path, link);
                self.tree.begin_member(member, link.clone());
            }
        }
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
