//! What a scan decodes goes into the kernel's page cache while it passes.
//!
//! A span is in memory when the scan has just made it, and then gives way to the next ones. Who reads
//! a file after that has it made again, or read back from disk, and handed over; handed over at once
//! it costs one copy. So files are stored as soon as their bytes are known, long ones in parts.
//! The scan waits for that [a little](super::leash); what has left memory before its turn is left out.

use std::sync::Arc;

use super::leash::Leash;
use super::prefetch::{PageCache, touch};
use super::read::Reader;
use super::room::available_bytes;
use crate::base::extent::Plain;
use crate::codec::Compression;
use crate::index::{Entry, Index, Ino};

/// Bytes that are stored at once. Longer files are stored in parts of whole pages.
const PART: u64 = 1 << 20;

/// The longest page there is; parts begin and end with one.
const PAGE: u64 = 64 << 10;

/// What a file takes at the least.
const SHORTEST_PAGE: u64 = 4 << 10;

/// What the kernel takes for a name and its inode, roughly.
const NAME_BYTES: u64 = 2 << 10;

/// Bytes of a batch.
const BATCH: u64 = 4 << 20;

/// Entries looked at for a batch.
const STEPS: u32 = 512;

/// What of the memory to spare may be filled in this way: its divisor. Who reads nothing of it shall
/// not drive everyone else's files out.
const ROOM_SHARE: u64 = 4;

/// Goes through the files that a scan has passed.
#[derive(Debug)]
pub(super) struct Passing {
    next: Ino,
    /// How much of that file has been dealt with; whole pages.
    offset: u64,
    /// The file that is left out, though its end may be yet to come.
    left_out: Option<Ino>,
    /// Bytes that may still be stored.
    room: u64,
    leash: Arc<Leash>,
}

/// How far a [`step`](Passing::step) came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Passed {
    /// There may be more.
    More,
    /// There is no more until the scan has come to this offset.
    Until(Plain),
    /// There will be no more.
    All,
}

/// A part of a file that is to be stored.
#[derive(Clone, Copy, Debug)]
struct Part {
    ino: Ino,
    offset: u64,
    len: u32,
    /// Where it ends in the archive.
    end: Plain,
    /// Whether the file ends with it.
    is_last: bool,
}

/// What one look at the index finds to be done.
#[derive(Debug, Default)]
struct Batch {
    parts: Vec<Part>,
    bytes: u64,
    /// Where the last part ends.
    end: Plain,
    /// How far the scan had come.
    known: Plain,
    /// Whether there is nothing behind it until the scan goes on.
    is_at_end: bool,
}

impl Drop for Passing {
    fn drop(&mut self) {
        self.leash.let_go();
    }
}

impl Passing {
    /// For the scan that fills `reader`'s catalog; `None` when all of it is known.
    pub(super) fn new(reader: &Reader) -> Option<Self> {
        reader.catalog.completed().is_none().then(|| Self {
            next: Ino::ROOT,
            offset: 0,
            left_out: None,
            room: available_bytes() / ROOM_SHARE,
            leash: Arc::clone(&reader.leash),
        })
    }

    /// Stores some of what has passed and is still in memory.
    pub(super) fn step(&mut self, reader: &Reader, pages: &dyn PageCache) -> Passed {
        // Before it looks: what the scan had not found by then it never will.
        let is_over = reader.catalog.is_over();
        let batch = {
            let index = reader.catalog.known();
            if is_plain_and_near(reader, &index) {
                return Passed::All;
            }
            self.gather(&index, pages)
        };
        let parts: Vec<_> = batch
            .parts
            .iter()
            .filter_map(|part| Some((part, reader.peek(part.ino, part.offset, part.len)?)))
            .collect();
        // What has left memory is not worth a name.
        let mut files: Vec<_> = parts.iter().map(|(part, _)| part.ino).collect();
        files.dedup();
        let names = pages.introduce(&files) as u64;
        self.room = self.room.saturating_sub(NAME_BYTES * names);
        for (part, bytes) in parts {
            self.store(reader, pages, *part, &bytes);
            if self.room == 0 {
                return Passed::All;
            }
            self.leash.follow(part.end);
        }
        if !batch.is_at_end {
            // Also past what was not there any more.
            self.leash.follow(batch.end);
            return Passed::More;
        }
        self.leash.follow(batch.known);
        if is_over {
            return Passed::All;
        }
        Passed::Until(Plain(batch.known.0.saturating_add(1)))
    }

    /// Finds what is to be done next, and goes past it.
    fn gather(&mut self, index: &Index, pages: &dyn PageCache) -> Batch {
        let mut batch = Batch::default();
        for _ in 0..STEPS {
            if batch.bytes >= BATCH {
                break;
            }
            if self.next > index.last_ino() {
                batch.is_at_end = true;
                break;
            }
            let entry = index.entry(self.next);
            let file = entry
                .and_then(file)
                .filter(|_| pages.shows(index, self.next));
            let Some((start, size)) = file else {
                self.go_on();
                continue;
            };
            let known = index.origin().plain_bytes.saturating_sub(start.0).min(size);
            let end = known.min(self.offset + PART);
            let end = if end < size { end / PAGE * PAGE } else { end };
            if end <= self.offset {
                batch.is_at_end = true;
                break;
            }
            let is_last = end == size;
            batch.parts.push(Part {
                ino: self.next,
                offset: self.offset,
                len: u32::try_from(end - self.offset).unwrap_or(u32::MAX),
                end: Plain(start.0 + end),
                is_last,
            });
            batch.bytes += end - self.offset;
            batch.end = Plain(start.0 + end);
            self.offset = end;
            if is_last {
                self.go_on();
            }
        }
        batch.known = Plain(index.origin().plain_bytes);
        batch
    }

    fn go_on(&mut self) {
        self.next.0 = self.next.0.saturating_add(1);
        self.offset = 0;
    }

    fn store(&mut self, reader: &Reader, pages: &dyn PageCache, part: Part, bytes: &[u8]) {
        if self.left_out == Some(part.ino) {
            return;
        }
        if part.offset == 0 && !pages.wants(part.ino) {
            self.left_out = Some(part.ino);
            return;
        }
        if pages.store(part.ino, part.offset, bytes).is_err() {
            return;
        }
        let len = bytes.len() as u64;
        let pages_len = len.next_multiple_of(SHORTEST_PAGE);
        self.room = self.room.saturating_sub(pages_len);
        reader.stats.pushed_bytes.add(len);
        if part.is_last {
            reader.stats.pushed_files.increment();
        }
    }
}

/// Where the bytes of a file begin, and how many there are; `None` for what is not to be stored.
fn file(entry: Entry<'_>) -> Option<(Plain, u64)> {
    let file = touch(entry, 0, entry.size())?.file;
    // What has holes is put together by who reads it.
    (file.len() == entry.size()).then(|| (file.start(), entry.size()))
}

/// Whether the scan only reads what anyone can read as fast.
fn is_plain_and_near(reader: &Reader, index: &Index) -> bool {
    index.origin().compression == Compression::None && !reader.source.is_remote()
}
