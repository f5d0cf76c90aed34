//! What a scan decodes goes into the kernel's page cache while it passes.
//!
//! A span is in memory when the scan has just made it, and then gives way to the next ones. Who reads
//! a file after that has it made again, or read back from disk, and handed over; handed over at once
//! it costs one copy. So files are stored as soon as their bytes are known, long ones in parts.
//! The scan waits for that [a little](super::lag_limit); what has left memory before its turn is left out.

use std::sync::Arc;

use super::available_memory::available_bytes;
use super::lag_limit::LagLimit;
use super::prefetch::{PageCache, file_read};
use super::read::Reader;
use crate::base::extent::Plain;
use crate::codec::Compression;
use crate::index::{Entry, Index, Ino};

/// Bytes that are stored at once. Longer files are stored in parts of whole pages.
const MAX_PART_BYTES: u64 = 1 << 20;

/// The longest page there is; parts begin and end with one.
const MAX_PAGE_BYTES: u64 = 64 << 10;

/// What a file takes at the least.
const MIN_PAGE_BYTES: u64 = 4 << 10;

/// What the kernel takes for a name and its inode, roughly.
const INODE_BYTES: u64 = 2 << 10;

/// Bytes of a batch.
const MAX_BATCH_BYTES: u64 = 4 << 20;

/// Entries looked at for a batch.
const MAX_BATCH_ENTRIES: u32 = 512;

/// What of the memory to spare may be filled in this way: its divisor. Who reads nothing of it shall
/// not drive everyone else's files out.
const AVAILABLE_MEMORY_DIVISOR: u64 = 4;

/// Goes through the files that a scan has passed.
#[derive(Debug)]
pub(super) struct ScanPusher {
    next: Ino,
    /// How much of that file has been dealt with; whole pages.
    offset: u64,
    /// The file that is left out, though its end may be yet to come.
    skipped_file: Option<Ino>,
    /// Bytes that may still be stored.
    budget_bytes: u64,
    lag_limit: Arc<LagLimit>,
}

/// How far a [`step`](ScanPusher::step) came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PushProgress {
    /// There may be more.
    More,
    /// There is no more until the scan has come to this offset.
    Until(Plain),
    /// There will be no more.
    Done,
}

/// A part of a file that is to be stored.
#[derive(Clone, Copy, Debug)]
struct FilePart {
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
    parts: Vec<FilePart>,
    bytes: u64,
    /// Where the last part ends.
    end: Plain,
    /// How far the scan had come.
    scanned_end: Plain,
    /// Whether there is nothing behind it until the scan goes on.
    is_at_end: bool,
}

impl Drop for ScanPusher {
    fn drop(&mut self) {
        self.lag_limit.detach();
    }
}

impl ScanPusher {
    /// For the scan that fills `reader`'s live index; `None` when all of it is known.
    pub(super) fn new(reader: &Reader) -> Option<Self> {
        reader.live_index.completed().is_none().then(|| Self {
            next: Ino::ROOT,
            offset: 0,
            skipped_file: None,
            budget_bytes: available_bytes() / AVAILABLE_MEMORY_DIVISOR,
            lag_limit: Arc::clone(&reader.lag_limit),
        })
    }

    /// Stores some of what has passed and is still in memory.
    pub(super) fn step(&mut self, reader: &Reader, pages: &dyn PageCache) -> PushProgress {
        // Before it looks: what the scan had not found by then it never will.
        let is_over = reader.live_index.is_scan_over();
        let batch = {
            let index = reader.live_index.read();
            if is_local_and_uncompressed(reader, &index) {
                return PushProgress::Done;
            }
            self.collect_batch(&index, pages)
        };
        let parts: Vec<_> = batch
            .parts
            .iter()
            .filter_map(|part| Some((part, reader.read_cached(part.ino, part.offset, part.len)?)))
            .collect();
        // What has left memory is not worth a name.
        let mut files: Vec<_> = parts.iter().map(|(part, _)| part.ino).collect();
        files.dedup();
        let names = pages.prime_inodes(&files) as u64;
        self.budget_bytes = self.budget_bytes.saturating_sub(INODE_BYTES * names);
        for (part, bytes) in parts {
            self.store(reader, pages, *part, &bytes);
            if self.budget_bytes == 0 {
                return PushProgress::Done;
            }
            self.lag_limit.advance(part.end);
        }
        if !batch.is_at_end {
            // Also past what was not there any more.
            self.lag_limit.advance(batch.end);
            return PushProgress::More;
        }
        self.lag_limit.advance(batch.scanned_end);
        if is_over {
            return PushProgress::Done;
        }
        PushProgress::Until(Plain(batch.scanned_end.0.saturating_add(1)))
    }

    /// Finds what is to be done next, and goes past it.
    fn collect_batch(&mut self, index: &Index, pages: &dyn PageCache) -> Batch {
        let mut batch = Batch::default();
        for _ in 0..MAX_BATCH_ENTRIES {
            if batch.bytes >= MAX_BATCH_BYTES {
                break;
            }
            if self.next > index.last_ino() {
                batch.is_at_end = true;
                break;
            }
            let entry = index.entry(self.next);
            let file = entry
                .and_then(file_extent)
                .filter(|_| pages.is_visible(index, self.next));
            let Some((start, size)) = file else {
                self.next_file();
                continue;
            };
            let known = index.origin().plain_bytes.saturating_sub(start.0).min(size);
            let end = known.min(self.offset + MAX_PART_BYTES);
            let end = if end < size {
                end / MAX_PAGE_BYTES * MAX_PAGE_BYTES
            } else {
                end
            };
            if end <= self.offset {
                batch.is_at_end = true;
                break;
            }
            let is_last = end == size;
            batch.parts.push(FilePart {
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
                self.next_file();
            }
        }
        batch.scanned_end = Plain(index.origin().plain_bytes);
        batch
    }

    fn next_file(&mut self) {
        self.next.0 = self.next.0.saturating_add(1);
        self.offset = 0;
    }

    fn store(&mut self, reader: &Reader, pages: &dyn PageCache, part: FilePart, bytes: &[u8]) {
        if self.skipped_file == Some(part.ino) {
            return;
        }
        if part.offset == 0 && !pages.can_store(part.ino) {
            self.skipped_file = Some(part.ino);
            return;
        }
        if pages.store(part.ino, part.offset, bytes).is_err() {
            return;
        }
        let len = bytes.len() as u64;
        let pages_len = len.next_multiple_of(MIN_PAGE_BYTES);
        self.budget_bytes = self.budget_bytes.saturating_sub(pages_len);
        reader.stats.pushed_bytes.add(len);
        if part.is_last {
            reader.stats.pushed_files.increment();
        }
    }
}

/// Where the bytes of a file begin, and how many there are; `None` for what is not to be stored.
fn file_extent(entry: Entry<'_>) -> Option<(Plain, u64)> {
    let file = file_read(entry, 0, entry.size())?.file;
    // What has holes is put together by who reads it.
    (file.len() == entry.size()).then(|| (file.start(), entry.size()))
}

/// Whether the scan only reads what anyone can read as fast.
fn is_local_and_uncompressed(reader: &Reader, index: &Index) -> bool {
    index.origin().compression == Compression::None && !reader.source.is_remote()
}
