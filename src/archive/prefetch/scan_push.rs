//! Scan pusher: pushes files into the kernel's page cache while the scan decodes them.
//! A later read must decode an evicted span again, or read it from disk, and copy it. A push at once costs
//! only the copy, and the scan waits for it [briefly](LagLimit). Files of evicted spans are skipped.

use std::sync::Arc;

use super::available_memory::available_bytes;
use super::options::PageCache;
use super::sequential::FileRead;
use crate::archive::read::Reader;
use crate::archive::scan::lag_limit::LagLimit;
use crate::base::extent::Plain;
use crate::codec::Compression;
use crate::index::{Entry, Index, Ino};

/// Maximum number of bytes in one store. Longer files are stored in parts of whole pages.
const MAX_PART_BYTES: u64 = 1 << 20;

/// Largest page size. Parts start and end at its multiples.
const MAX_PAGE_BYTES: u64 = 64 << 10;

/// Minimum page cache memory of a file.
const MIN_PAGE_BYTES: u64 = 4 << 10;

/// Approximate kernel memory for a name and its inode.
const INODE_BYTES: u64 = 2 << 10;

const MAX_BATCH_BYTES: u64 = 4 << 20;

/// Maximum number of entries that are examined for a batch.
const MAX_BATCH_ENTRIES: u32 = 512;

/// Divisor of the available memory for the push budget, so that unread files do not evict everything else.
const AVAILABLE_MEMORY_DIVISOR: u64 = 4;

#[derive(Debug)]
pub(super) struct ScanPusher {
    next: Ino,
    /// Offset in that file up to which it has been handled; whole pages.
    offset: u64,
    /// A file that is not pushed, although its end may not be decoded yet.
    skipped_file: Option<Ino>,
    budget_bytes: u64,
    lag_limit: Arc<LagLimit>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PushProgress {
    More,
    /// There is nothing to push until the scan reaches this offset.
    Until(Plain),
    Done,
}

#[derive(Clone, Copy, Debug)]
struct FilePart {
    ino: Ino,
    offset: u64,
    len: u32,
    end: Plain,
    is_last: bool,
}

#[derive(Debug, Default)]
struct Batch {
    parts: Vec<FilePart>,
    bytes: u64,
    end: Plain,
    scanned_end: Plain,
    /// Whether the pusher must wait for the scan to find more.
    is_at_end: bool,
}

impl Drop for ScanPusher {
    fn drop(&mut self) {
        self.lag_limit.detach();
    }
}

impl ScanPusher {
    /// Creates a pusher for the scan that fills `reader`'s index; `None` if the index is complete.
    pub(super) fn new(reader: &Reader) -> Option<Self> {
        reader.live_index.completed().is_none().then(|| Self {
            next: Ino::ROOT,
            offset: 0,
            skipped_file: None,
            budget_bytes: available_bytes() / AVAILABLE_MEMORY_DIVISOR,
            lag_limit: Arc::clone(&reader.lag_limit),
        })
    }

    /// Stores some files that the scan has passed and that are still in memory.
    pub(super) fn step(&mut self, reader: &Reader, pages: &dyn PageCache) -> PushProgress {
        // Read before the index, because a scan that is over adds no more entries.
        let is_over = reader.live_index.is_scan_over();
        let batch = {
            let index = reader.live_index.lock();
            // Any reader of a local uncompressed archive is as fast as the scan.
            if index.origin().compression == Compression::None
                && !reader.packed.source().is_remote()
            {
                return PushProgress::Done;
            }
            match index.read(|index| self.collect_batch(index, pages)) {
                Ok(batch) => batch,
                Err(_) => return PushProgress::Done,
            }
        };
        let parts: Vec<_> = batch
            .parts
            .iter()
            .filter_map(|part| Some((part, reader.read_cached(part.ino, part.offset, part.len)?)))
            .collect();
        // Files whose spans were evicted are not worth an inode.
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
            // Also advances past parts that were evicted.
            self.lag_limit.advance(batch.end);
            return PushProgress::More;
        }
        self.lag_limit.advance(batch.scanned_end);
        if is_over {
            return PushProgress::Done;
        }
        PushProgress::Until(Plain(batch.scanned_end.0.saturating_add(1)))
    }

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
        let Ok(stored) = pages.store(part.ino, part.offset, bytes) else {
            return;
        };
        let pages_len = stored.next_multiple_of(MIN_PAGE_BYTES);
        self.budget_bytes = self.budget_bytes.saturating_sub(pages_len);
        reader.stats.pushed_bytes.add(stored);
        if part.is_last {
            reader.stats.pushed_files.increment();
        }
    }
}

/// Plain start and length of a file; `None` if it is not to be pushed.
fn file_extent(entry: Entry<'_>) -> Option<(Plain, u64)> {
    let file = FileRead::new(entry, 0, entry.size())?.file;
    // A sparse file must be assembled by a read.
    (file.len() == entry.size()).then(|| (file.start(), entry.size()))
}
