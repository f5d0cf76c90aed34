//! Reads entries of an indexed tree in order, with their contents, for any [`Sink`].
//!
//! Contents that lie close together are decoded once, from front to back. Others, and those of layers, are read ahead on
//! the threads of the archive. Threads that read for themselves decode a span at a time. All end where a truncated archive
//! ends.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use bytes::Bytes;

use super::copy_plan::CopyPlan;
use super::write::member_of;
use crate::archive::scan::{PayloadEnd, Sink};
use crate::archive::{PlainStream, ReadError, TreePart, Volume};
use crate::base::archive_path::ArchivePath;
use crate::base::buffer_pool::BufferPool;
use crate::base::extent::{Extent, Plain};
use crate::index::{Entry, EntryKind, Index, Ino, Piece};
use crate::tar::{Member, MemberKind};

/// Memory for contents that the sink has not written yet.
const BUFFER_BYTES: u64 = 32 << 20;
/// Maximum length of a piece for the sink, and of a read.
const MAX_PIECE_BYTES: u64 = 1 << 20;
/// Maximum length of a read that the calling thread makes itself. It also ends with its span, which is in memory as a whole.
const MAX_SPAN_READ_BYTES: u64 = 8 << 20;
/// Plain bytes between two contents that are seeked over instead of decoded.
const MIN_SEEK_BYTES: u64 = 8 << 20;
/// Reads that are in flight, or whose bytes wait for their turn.
const MAX_READS_AHEAD: usize = 16;
/// Contents are decoded from front to back if they have at least this part of the bytes from first to last.
const DENSE_DIVISOR: u64 = 2;

/// Reason why entries were not read to their end.
#[derive(Debug)]
pub enum EntryError<E> {
    /// The sink stopped.
    Sink(E),
    /// The content of this entry could not be read.
    Read(ArchivePath, ReadError),
}

/// Sends `entries`, which are in archive order, to `sink`, and each hard link after its file. Returns the number of
/// damaged or cut files.
///
/// # Errors
/// When the archive cannot be read, or the sink stops.
pub fn read_entries<S: Sink>(
    volume: &dyn Volume,
    index: &Index,
    entries: &[Ino],
    sink: &mut S,
) -> Result<u64, EntryError<S::Error>> {
    check_names(volume, index)?;
    let names = CopyPlan::new(index, Ino::ROOT);
    let mut reader = EntryReader::new(volume, index, entries);
    let mut damaged = 0;
    for &ino in entries {
        let found = index.entry(ino).filter(|entry| !entry.is_implied());
        let Some(entry) = found else {
            continue;
        };
        let damaged_index = || EntryError::Read(ArchivePath::root(), ReadError::Index);
        let paths = paths(index, &names, entry).ok_or_else(damaged_index)?;
        let Some((path, links)) = paths.split_first() else {
            continue;
        };
        for path in &paths {
            compare(volume, index, path)?;
        }
        damaged += u64::from(!reader.read_entry(entry, path, sink)?);
        for link in links {
            let sent = sink.member(link_to(entry, path, link));
            let sent = sent.and_then(|()| sink.member_end(PayloadEnd::Complete));
            sent.map_err(EntryError::Sink)?;
        }
    }
    Ok(damaged)
}

/// Checks that names lead where listings say, if others may have made the index, whose names are compared by look-ups.
/// It fails if the index contradicts itself.
pub(super) fn check_names<E>(volume: &dyn Volume, index: &Index) -> Result<(), EntryError<E>> {
    let is_consistent = !volume.is_compared() || index.finds_what_it_lists();
    let contradiction = || EntryError::Read(ArchivePath::root(), ReadError::Index);
    is_consistent.then_some(()).ok_or_else(contradiction)
}

/// Compares the entry at `path`, and this name of it, with the archive, if others may have made the index.
pub(super) fn compare<E>(
    volume: &dyn Volume,
    index: &Index,
    path: &ArchivePath,
) -> Result<(), EntryError<E>> {
    if !volume.is_compared() {
        return Ok(());
    }
    let found = index.resolve(path.as_bytes(), false).ok().flatten();
    let compared = found.ok_or(ReadError::Index).and_then(|entry| {
        volume.compare_blocking(TreePart::Entry(entry.ino()))?;
        volume.compare_path_blocking(path.as_bytes(), false)
    });
    compared.map_err(|error| EntryError::Read(path.clone(), error))
}

/// All paths of an entry, the one of its first member first; `None` if the index contradicts itself.
pub(super) fn paths(index: &Index, names: &CopyPlan, entry: Entry<'_>) -> Option<Vec<ArchivePath>> {
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

fn named(entry: Entry<'_>, path: &ArchivePath) -> Member {
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
pub(super) fn link_to(entry: Entry<'_>, target: &ArchivePath, path: &ArchivePath) -> Member {
    Member {
        kind: MemberKind::HardLink(target.as_bytes().to_vec()),
        payload: Extent::default(),
        size: 0,
        sparse: None,
        xattrs: Vec::new(),
        ..named(entry, path)
    }
}

/// A read of an entry: offset and length.
type Request = (Ino, u64, u32);

/// Reads entries in a given order.
pub(super) struct EntryReader<'a> {
    contents: Contents<'a>,
    /// Copies for a sink that queues them, because a slice would keep the memory of a whole span.
    pool: Option<BufferPool>,
}

impl<'a> EntryReader<'a> {
    pub(super) fn new(volume: &'a dyn Volume, index: &'a Index, entries: &'a [Ino]) -> Self {
        let found = || entries.iter().filter_map(move |ino| index.entry(*ino));
        let pieces = || found().flat_map(|entry| available_pieces(volume, entry));
        let bytes: u64 = pieces().map(|piece| piece.plain.len()).sum();
        let first = pieces()
            .next()
            .map_or(Plain(0), |piece| piece.plain.start());
        let end = pieces().map(|piece| piece.plain.end()).max();
        let end = end.unwrap_or_default();
        let is_dense = end.0.saturating_sub(first.0) / DENSE_DIVISOR <= bytes;
        let all = entries.iter().filter_map(move |ino| index.entry(*ino));
        let ahead = all.flat_map(move |entry| requests(volume, entry));
        let way = if is_dense && volume.as_archive().is_some() {
            Way::Stream {
                end,
                stream: None,
                position: Plain(0),
                rest: Bytes::new(),
            }
        } else {
            Way::Ahead {
                requests: Box::new(ahead),
                in_flight: VecDeque::new(),
            }
        };
        Self {
            contents: Contents { volume, way },
            pool: Some(BufferPool::new(BUFFER_BYTES)),
        }
    }

    /// Reads on the calling thread, for a sink that writes each piece at once. Other threads may read other entries.
    pub(super) fn on_this_thread(volume: &'a dyn Volume, index: &'a Index) -> Self {
        let way = Way::Alone(index);
        Self {
            contents: Contents { volume, way },
            pool: None,
        }
    }

    /// Sends the next entry as `path` to `sink`. Returns whether it is whole.
    pub(super) fn read_entry<S: Sink>(
        &mut self,
        entry: Entry<'_>,
        path: &ArchivePath,
        sink: &mut S,
    ) -> Result<bool, EntryError<S::Error>> {
        let member = named(entry, path);
        let compared = (self.contents.volume).compare_blocking(TreePart::Entry(entry.ino()));
        compared.map_err(|error| EntryError::Read(path.clone(), error))?;
        sink.member(member).map_err(EntryError::Sink)?;
        let sent = self.send(entry, path, sink)?;
        let end = match &sent {
            Ok(()) => PayloadEnd::Complete,
            Err(ReadError::Truncated) => PayloadEnd::Cut,
            Err(error) => {
                sink.damage(Plain(0), &format!("{path}: {error}"));
                PayloadEnd::Damaged
            }
        };
        sink.member_end(end).map_err(EntryError::Sink)?;
        Ok(sent.is_ok())
    }

    /// Sends the content of `entry`. The result within is why it is not whole.
    fn send<S: Sink>(
        &mut self,
        entry: Entry<'_>,
        path: &ArchivePath,
        sink: &mut S,
    ) -> Result<Result<(), ReadError>, EntryError<S::Error>> {
        let mut sent = Ok(());
        for piece in available_pieces(self.contents.volume, entry) {
            let mut done = 0;
            while done < piece.plain.len() {
                let wanted = self.contents.wanted(&piece, done);
                match self.contents.next(entry.ino(), &piece, done, wanted) {
                    Ok(bytes) => {
                        done += bytes.len() as u64;
                        if sent.is_ok() {
                            let copy = self.copy(&bytes);
                            let copy =
                                copy.map_err(|error| EntryError::Read(path.clone(), error))?;
                            sink.payload(copy).map_err(EntryError::Sink)?;
                        }
                    }
                    Err(error @ ReadError::Damaged { .. }) => {
                        sent = Err(error);
                        if !self.contents.is_ahead() {
                            return Ok(sent);
                        }
                        done += wanted;
                    }
                    Err(error) => return Err(EntryError::Read(path.clone(), error)),
                }
            }
        }
        if sent.is_ok() && cut_offset(self.contents.volume, entry).is_some() {
            sent = Err(ReadError::Truncated);
        }
        Ok(sent)
    }

    fn copy(&self, bytes: &Bytes) -> Result<Bytes, ReadError> {
        let Some(pool) = &self.pool else {
            return Ok(bytes.clone());
        };
        let copy = pool.acquire(bytes.len());
        let mut copy = copy.map_err(|_| ReadError::Unscanned)?;
        copy.copy_from_slice(bytes);
        Ok(copy.freeze())
    }
}

/// The pieces of a file, up to the end of a truncated archive.
fn available_pieces<'a>(
    volume: &dyn Volume,
    entry: Entry<'a>,
) -> impl Iterator<Item = Piece> + use<'a> {
    entry.pieces_before(cut_offset(volume, entry).unwrap_or(u64::MAX))
}

/// Offset at which the end of a truncated archive cuts a file. If its row is missing, its reads fail.
fn cut_offset(volume: &dyn Volume, entry: Entry<'_>) -> Option<u64> {
    volume.cut_offset(entry.ino()).ok().flatten()
}

/// The reads of the content of an entry.
fn requests<'a>(volume: &dyn Volume, entry: Entry<'a>) -> impl Iterator<Item = Request> + use<'a> {
    available_pieces(volume, entry).flat_map(move |piece| {
        let len = piece.plain.len();
        (0..len.div_ceil(MAX_PIECE_BYTES)).map(move |number| {
            let done = number * MAX_PIECE_BYTES;
            let wanted = (len - done).min(MAX_PIECE_BYTES);
            let wanted = u32::try_from(wanted).unwrap_or(u32::MAX);
            (entry.ino(), piece.offset.saturating_add(done), wanted)
        })
    })
}

/// The contents of entries, read in their order.
struct Contents<'a> {
    volume: &'a dyn Volume,
    way: Way<'a>,
}

enum Way<'a> {
    /// Decodes the archive from front to back.
    Stream {
        /// Highest end of a content.
        end: Plain,
        stream: Option<Box<PlainStream<'a>>>,
        /// Offset of the next byte of `rest`, or of the stream.
        position: Plain,
        rest: Bytes,
    },
    /// Reads parts of files.
    Ahead {
        requests: Box<dyn Iterator<Item = Request> + 'a>,
        in_flight: VecDeque<(Request, Receiver<Result<Bytes, ReadError>>)>,
    },
    /// Reads parts of files within the spans of this index, without a thread of the archive.
    Alone(&'a Index),
}

impl Contents<'_> {
    fn is_ahead(&self) -> bool {
        matches!(self.way, Way::Ahead { .. })
    }

    /// Length of the next read of `piece` after `done` bytes.
    fn wanted(&self, piece: &Piece, done: u64) -> u64 {
        let left = piece.plain.len().saturating_sub(done);
        let Way::Alone(index) = self.way else {
            return left.min(MAX_PIECE_BYTES);
        };
        let here = Plain(piece.plain.start().0.saturating_add(done));
        let span = index.span_at(here);
        let span = span.and_then(|number| index.span_extent(number));
        let in_span = span.map_or(left, |span| span.end().0.saturating_sub(here.0));
        left.min(in_span).clamp(1, MAX_SPAN_READ_BYTES)
    }

    /// Bytes of `piece` from `done` on, at least one and at most `wanted`. A read ahead gives all that are wanted.
    fn next(
        &mut self,
        ino: Ino,
        piece: &Piece,
        done: u64,
        wanted: u64,
    ) -> Result<Bytes, ReadError> {
        let offset = piece.offset.saturating_add(done);
        let len = u32::try_from(wanted).unwrap_or(u32::MAX);
        if self.is_ahead() {
            return self.next_ahead((ino, offset, len));
        }
        let start = Plain(piece.plain.start().0.saturating_add(done));
        let rest = Extent::new(start, piece.plain.end()).ok_or(ReadError::Index)?;
        match self.next_of_stream(rest, wanted) {
            Ok(Some(bytes)) => return Ok(bytes),
            Ok(None) => {}
            // A read fetches damaged bytes once more.
            Err(ReadError::Damaged { .. }) => self.end_stream(),
            Err(error) => return Err(error),
        }
        let bytes = self.volume.read_blocking(ino, offset, len)?;
        if bytes.is_empty() {
            return Err(ReadError::Index);
        }
        Ok(bytes)
    }

    fn next_ahead(&mut self, wanted: Request) -> Result<Bytes, ReadError> {
        let Way::Ahead {
            requests,
            in_flight,
        } = &mut self.way
        else {
            return Err(ReadError::Index);
        };
        loop {
            while in_flight.len() < MAX_READS_AHEAD
                && let Some(request) = requests.next()
            {
                let (ino, offset, len) = request;
                let (sender, receiver) = sync_channel(1);
                let reply = move |read: Result<Bytes, ReadError>| {
                    // A slice would keep memory for which other reads wait.
                    let copied = read.map(|bytes| Bytes::copy_from_slice(&bytes));
                    // After an error there is no receiver.
                    drop(sender.send(copied));
                };
                let is_wanted = Arc::new(|| true);
                self.volume
                    .read(ino, offset, len, is_wanted, Box::new(reply));
                in_flight.push_back((request, receiver));
            }
            let (request, receiver) = in_flight.pop_front().ok_or(ReadError::Index)?;
            // An entry without a name was not sent.
            if request != wanted {
                continue;
            }
            let bytes = receiver.recv().map_err(|_| ReadError::Unscanned)??;
            let is_whole = bytes.len() as u64 == u64::from(wanted.2);
            return is_whole.then_some(bytes).ok_or(ReadError::Index);
        }
    }

    fn end_stream(&mut self) {
        if let Way::Stream { stream, rest, .. } = &mut self.way {
            (*stream, *rest) = (None, Bytes::new());
        }
    }

    /// Takes up to `wanted` bytes at the start of `plain` from the stream, or from another one; `None` without a stream.
    fn next_of_stream(
        &mut self,
        plain: Extent<Plain>,
        wanted: u64,
    ) -> Result<Option<Bytes>, ReadError> {
        let Some(archive) = self.volume.as_archive() else {
            return Ok(None);
        };
        let Way::Stream {
            end,
            stream,
            position,
            rest,
        } = &mut self.way
        else {
            return Ok(None);
        };
        let start = plain.start();
        let gap = start.0.checked_sub(position.0);
        let is_near = gap.is_some_and(|gap| gap < MIN_SEEK_BYTES);
        if !(stream.is_some() && is_near) {
            // A content behind the last one is read alone, because only damaged indexes have such an order.
            let end = if gap.is_some() { *end } else { plain.end() };
            // The memory of one stream is free before another one starts.
            (*stream, *rest) = (None, Bytes::new());
            let extent = Extent::new(start, end.max(plain.end())).ok_or(ReadError::Index)?;
            *stream = archive.stream(extent)?.map(Box::new);
            *position = start;
        }
        let Some(stream) = stream else {
            return Ok(None);
        };
        loop {
            if rest.is_empty() {
                // Even an empty rest would keep the memory of its span.
                *rest = Bytes::new();
                *rest = stream.next_bytes()?.ok_or(ReadError::Index)?;
            }
            let skipped = start.0.saturating_sub(position.0);
            let len = if skipped > 0 { skipped } else { wanted };
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            let bytes = rest.split_to(len.min(rest.len()));
            *position = Plain(position.0.saturating_add(bytes.len() as u64));
            if skipped == 0 {
                return Ok(Some(bytes));
            }
        }
    }
}
