//! Warm path: reads files from spans.
//! 1. A read is divided into parts of spans, and each part is looked up in memory.
//! 2. From a local disk, or from the disk cache, it reads only the blocks of the part.
//! 3. A remote uncompressed archive is read by windows, which are parts of spans.
//! 4. Otherwise one thread fills the span, and decodes it from the nearest seek point.
//! 5. The parts are assembled to the bytes of the file.
//!
//! The reader decodes packed bytes only after their blocks match the digests in the index (`packed.rs`).
//! Checksums of blocks verify plain bytes from disk. A hash over these checksums verifies a decoded span.
//! Bytes that the scan skipped have neither.

pub(super) mod assemble;
mod batch;
pub(super) mod checked_headers;
mod decode_span;
mod fill_span;
mod first_read_hashes;
mod header_check;
pub(super) mod packed;
pub(super) mod priority;
mod samples;
pub(super) mod single_flight;
pub(super) mod span_store;
mod window_layout;
pub(super) mod windows;

use std::sync::{Arc, OnceLock};

use self::assemble::{Assembly, SpanPart, plan_parts};
use self::checked_headers::HeaderChecks;
pub use self::decode_span::PlainStream;
use self::packed::{PackedReader, Request};
use self::priority::ReadPriority;
use self::span_store::SpanStore;
use self::window_layout::{LONG_READ_BYTES, Layout};
use self::windows::{WindowFetches, WindowReader};
use super::error::ReadError;
use super::index_source::tree_origin::TreeSource;
use super::live_index::LiveIndex;
use super::peers::PeerArchive;
use super::scan::lag_limit::LagLimit;
use crate::base::buffer_pool::BufferPool;
use crate::base::cancel_token::CancelToken;
use crate::base::extent::{Extent, Packed, Plain};
use crate::base::free_list::FreeList;
use crate::base::memory_reclaim::MemoryBroker;
use crate::base::random_reads::Wait;
use crate::base::stats::Stats;
use crate::cache::SparseExtent;
use crate::codec::Compression;
use crate::index::store::IndexLock;
use crate::index::{Index, Ino};
use crate::source::Access;
use bytes::Bytes;

#[derive(Debug)]
pub(crate) struct Reader {
    /// The packed bytes of the source.
    pub(crate) packed: PackedReader,
    pub(crate) live_index: LiveIndex,
    /// Name of its saved index.
    pub(crate) name: String,
    /// The same archive in other processes.
    pub(crate) peer: Option<PeerArchive>,
    pub(crate) spans: SpanStore,
    pub(crate) free_list: FreeList,
    /// Whether the archive has the digest that the caller, or its source, expects.
    pub(crate) has_expected_digest: bool,
    pub(crate) window_fetches: WindowFetches,
    pub(crate) read_priority: ReadPriority,
    pub(crate) lag_limit: Arc<LagLimit>,
    /// Memory that reads hold while they decode. A read waits here if there is too little.
    pub(crate) budget: BufferPool,
    /// Additional memory for the decoders of these reads.
    pub(crate) broker: MemoryBroker,
    /// Limit for cached spans, reads and their decoders together, in bytes.
    pub(crate) memory_bytes: u64,
    pub(crate) stats: Arc<Stats>,
    /// The party that vouches for the tree.
    pub(crate) tree: TreeSource,
    /// For a published index, the files whose headers matched.
    pub(crate) header_checks: Option<HeaderChecks>,
    /// Lock that keeps the saved index from being removed.
    pub(crate) index_lock: OnceLock<IndexLock>,
}

impl Reader {
    /// As [`Self::cancel`], and ends at once the reads that wait for memory.
    pub(crate) fn close(&self) {
        self.cancel();
        self.budget.close();
        self.broker.close();
    }

    /// Ends the scan, prefetch and all fetches at once, and reads at their next span, now and later. The memory stays open
    /// to other archives.
    pub(crate) fn cancel(&self) {
        self.read_priority.close();
        self.cancel_token().cancel();
    }

    pub(crate) fn cancel_token(&self) -> &CancelToken {
        self.packed.cancel_token()
    }

    /// As [`crate::archive::Volume::try_read`].
    pub(crate) fn try_read(
        &self,
        ino: Ino,
        offset: u64,
        len: u32,
    ) -> Option<Result<Bytes, ReadError>> {
        if self.header_checks.is_some() {
            if self.must_check_header(ino) {
                return None;
            }
            let index = self.live_index.lock();
            return (index.try_read(|_| self.try_read_rows(ino, offset, len))).unwrap_or(None);
        }
        self.try_read_rows(ino, offset, len)
    }

    fn try_read_rows(&self, ino: Ino, offset: u64, len: u32) -> Option<Result<Bytes, ReadError>> {
        let mut found_spans = 0;
        let bytes = self.read_with(ino, offset, len, |part| {
            if let Some(bytes) = self.cached_part(part)? {
                found_spans += 1;
                return Ok(bytes);
            }
            self.read_part_from_disk(part, Wait::NoWait).ok_or(None)
        });
        match bytes {
            Ok(bytes) => {
                self.stats.memory_hit_spans.add(found_spans);
                Some(Ok(bytes))
            }
            // The caller retries with a blocking read, which counts spans again and waits for the scan.
            Err(None | Some(ReadError::Unscanned)) => None,
            Err(Some(error)) => Some(Err(error)),
        }
    }

    /// As [`crate::archive::Volume::read`], on the calling thread.
    pub(crate) fn read(&self, ino: Ino, offset: u64, len: u32) -> Result<Bytes, ReadError> {
        if self.must_check_header(ino) {
            self.check_header(ino)?;
        }
        self.read_with(ino, offset, len, |part| self.load_part(part))
            .map_err(|error| self.index_error(error.unwrap_or(ReadError::Index)))
    }

    /// `error`, which must not advise to delete an index that others published.
    fn index_error(&self, error: ReadError) -> ReadError {
        match error {
            ReadError::Index if self.header_checks.is_some() => ReadError::IndexUnavailable,
            error => error,
        }
    }

    fn load_part(&self, part: &SpanPart) -> Result<Bytes, Option<ReadError>> {
        if let Some(bytes) = self.cached_part(part)? {
            self.stats.memory_hit_spans.increment();
            return Ok(bytes);
        }
        if let Some(bytes) = self.read_part_from_disk(part, Wait::ForDisk) {
            return Ok(bytes);
        }
        let load_span = || self.load_span(part.span);
        if let Some(windows) = self.windows() {
            return Ok(windows.read(part, load_span)?);
        }
        Ok(part.slice_of(&load_span()?)?)
    }

    /// As [`Reader::try_read`], for prefetch, but may wait for a local disk; `None` also if it fails.
    pub(crate) fn read_cached(&self, ino: Ino, offset: u64, len: u32) -> Option<Bytes> {
        if self.must_check_header(ino) {
            self.check_header(ino).ok()?;
        }
        let find = |part: &SpanPart| {
            let found = self.cached_part(part)?;
            found
                .or_else(|| self.read_part_from_disk(part, Wait::ForDisk))
                .ok_or(None)
        };
        self.read_with(ino, offset, len, find).ok()
    }

    /// Reads `part` from a local disk, with at most its whole blocks.
    fn read_part_from_disk(&self, part: &SpanPart, wait: Wait) -> Option<Bytes> {
        let bytes = self.read_locally(part.plain, wait);
        let bytes = bytes.or_else(|| self.part_from_disk_cache(part, wait))?;
        self.stats.exact_reads.increment();
        Some(bytes)
    }

    fn part_from_disk_cache(&self, part: &SpanPart, wait: Wait) -> Option<Bytes> {
        let disk_cache = self.spans.disk()?;
        // Prefetch is filling this span, so a sequential reader shares it.
        if part.plain.len() >= LONG_READ_BYTES && self.spans.flights().find(part.span).is_some() {
            return None;
        }
        let checksums_of =
            |index: &Index| index.span_checksums(part.span).ok()??.blocks(&part.range);
        let (blocks, extent) = self.live_index.read(checksums_of).ok()??;
        let sparse = self.spans.sparse(&self.live_index, extent);
        // Holes have the checksums of zeros.
        if !self.spans.proves_zeros() && !disk_cache.covers(&sparse) {
            return None;
        }
        let bytes = disk_cache.read_part(&sparse, wait)?;
        let verified_span = |index: &Index| {
            let checksums = index.span_checksums(part.span).ok()??;
            // If not, the block was never written, or is damaged. A read of the whole span finds out which.
            let is_same = checksums.match_bytes(blocks.start, &bytes);
            let span = is_same.then(|| index.span_extent(part.span))??;
            Some((span, index.decode_cost(part.span)))
        };
        let (span, cost) = self.live_index.read(verified_span).ok()??;
        // Only these windows count as used, because the disk cache may lack others of the span.
        let windows = self.windows();
        let used = windows.map_or(span, |windows| windows.align(part.plain));
        disk_cache.mark_used(&SparseExtent::from(used).with_cost(cost));
        self.stats.disk_cache_hit_spans.increment();
        self.stats.disk_cache_read_bytes.add(sparse.stored_bytes());
        Some(bytes.slice(part.range.start - blocks.start..part.range.end - blocks.start))
    }

    fn cached_part(&self, part: &SpanPart) -> Result<Option<Bytes>, Option<ReadError>> {
        if let Some(span) = self.span_in_memory(part.span) {
            return Ok(Some(part.slice_of(&span)?));
        }
        let windows = self.windows();
        Ok(windows.and_then(|windows| windows.cached(part.plain)))
    }

    /// The window reader; `None` if reads use whole spans.
    pub(crate) fn windows(&self) -> Option<WindowReader<'_>> {
        let index = self.live_index.completed()?;
        let (origin, source) = (index.origin(), self.packed.source());
        let is_windowed = origin.compression == Compression::None
            && source.access() == Access::Ranges
            && !source.can_read_inline();
        is_windowed.then(|| WindowReader {
            layout: Layout::new(index.block_len(), origin.packed_bytes),
            live_index: &self.live_index,
            packed: &self.packed,
            spans: &self.spans,
            fetches: &self.window_fetches,
            read_priority: &self.read_priority,
            budget: &self.budget,
            free_list: &self.free_list,
            stats: &self.stats,
        })
    }

    /// Assembles a file's bytes from parts of spans. `None` as an error means that a part is missing.
    fn read_with(
        &self,
        ino: Ino,
        offset: u64,
        len: u32,
        mut part_bytes: impl FnMut(&SpanPart) -> Result<Bytes, Option<ReadError>>,
    ) -> Result<Bytes, Option<ReadError>> {
        let plan = |index: &Index| plan_parts(index, ino, offset, len);
        let (len, parts) = self.live_index.read(plan).map_err(ReadError::from)??;
        let mut assembly = Assembly::new(offset, len);
        for part in parts {
            let bytes = part_bytes(&part)?;
            assembly.add(&part.piece, part.plain, bytes, &self.free_list);
        }
        Ok(assembly.finish())
    }

    /// Whether plain bytes can be read directly from a local disk.
    pub(crate) fn is_read_locally(&self) -> bool {
        self.packed.source().can_read_inline() && self.compression() == Compression::None
    }

    /// Reads and verifies `extent` of a local uncompressed archive on the calling thread, by whole blocks.
    /// `None` for any other archive, and if bytes are unreadable, wrong, or, with [`Wait::NoWait`], not in the
    /// page cache. A fill of the whole span then reports the reason.
    pub(super) fn read_locally(&self, extent: Extent<Plain>, wait: Wait) -> Option<Bytes> {
        if !self.is_read_locally() {
            return None;
        }
        let wanted = Extent::with_len(Packed(extent.start().0), extent.len());
        let find = |index: &Index| index.blocks(wanted);
        let blocks = self.live_index.read(find).ok()?.ok()??;
        let fetched = blocks.extent();
        if fetched.intersection(&wanted) != Some(wanted) {
            return None;
        }
        let bytes = self.packed.read_inline(&blocks, wait)?;
        let request = Request {
            extent: wanted,
            blocks,
        };
        Some(request.slice(fetched, &bytes))
    }

    pub(crate) fn compression(&self) -> Compression {
        self.live_index.lock().origin().compression
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use tokio::runtime::Runtime;

    use crate::base::span_hash;
    use crate::cache::{DiskCache, DiskCacheDir, DiskCacheOptions, SpanCache};
    use crate::index::{self, Builder, Origin};
    use crate::source::{MemorySource, Source};

    /// A reader of an archive with one span of these checksums.
    fn reader(
        plain_bytes: u64,
        checksums: &[u64],
        disk_cache: Option<DiskCache>,
    ) -> (Reader, Runtime) {
        let origin = Origin {
            packed_bytes: 512,
            plain_bytes,
            ..Origin::default()
        };
        let mut builder = Builder::new(index::Options::default());
        builder.add_span(
            Extent::with_len(Plain(0), plain_bytes),
            Some(checksums),
            None,
        );
        let network = tokio::runtime::Builder::new_multi_thread()
            .build()
            .expect("a runtime");
        let source: Arc<dyn Source> = Arc::new(MemorySource::new("test", vec![0; 512]));
        let reader = Reader {
            packed: PackedReader::new(
                source,
                network.handle().clone(),
                BufferPool::new(0),
                FreeList::new(0),
                Arc::default(),
                CancelToken::default(),
            ),
            live_index: LiveIndex::complete(builder.finish(origin)),
            name: String::new(),
            peer: None,
            spans: SpanStore::new(SpanCache::new(0), 0, disk_cache.map(Arc::new), true),
            free_list: FreeList::new(0),
            has_expected_digest: false,
            window_fetches: WindowFetches::default(),
            read_priority: ReadPriority::default(),
            lag_limit: Arc::default(),
            budget: BufferPool::new(0),
            broker: MemoryBroker::with_limit(0),
            memory_bytes: 0,
            stats: Arc::default(),
            tree: TreeSource::default(),
            header_checks: None,
            index_lock: OnceLock::new(),
        };
        (reader, network)
    }

    #[test]
    fn oversized_span_of_an_index_is_not_allocated() {
        let (reader, _network) = reader(1 << 50, &[0], None);
        assert!(matches!(reader.verify_source(0), Err(ReadError::Index)));
        assert!(reader.batches(0..1, Plain(0), None).is_empty());
    }

    // Promises: disk-zeros
    #[test]
    fn zeros_are_believed_of_an_own_index_of_this_version_only() {
        const LEN: u64 = 16 << 10;
        let directory = tempfile::tempdir().expect("a directory");
        let cache_dir = DiskCacheDir::new(directory.path(), Some(1 << 30));
        let options = DiskCacheOptions {
            write_pool: BufferPool::new(1 << 20),
            is_only_copy: false,
            free_list: FreeList::new(0),
            read_rate: Arc::default(),
            stats: Arc::default(),
        };
        let disk_cache = DiskCache::open(cache_dir, "a", options).expect("a disk cache");
        // A file with a hole in place of the span.
        let after = Extent::with_len(Plain(LEN), LEN);
        disk_cache.insert(
            after,
            vec![1; 16 << 10].into(),
            crate::cache::QueueTimeout::Unlimited,
        );
        disk_cache.flush();
        let zeros = span_hash::of_zeros(16 << 10);
        let (mut reader, _network) = reader(LEN, &[zeros], Some(disk_cache));
        let all = Extent::with_len(Plain(0), LEN);
        let part = || SpanPart {
            span: 0,
            piece: index::Piece {
                offset: 0,
                plain: all,
            },
            plain: all,
            range: 0..16 << 10,
        };
        let found = |reader: &Reader| {
            let span = reader.live_index.span(0).expect("in the index");
            let is_stored = reader.spans.sparse(&reader.live_index, all).stored_bytes() > 0;
            let bytes = reader.part_from_disk_cache(&part(), Wait::ForDisk);
            let whole = reader.span_from_disk_cache(&span);
            assert_eq!(bytes.is_some(), whole.is_some());
            (is_stored, bytes.is_some())
        };
        assert_eq!(found(&reader), (false, true));
        let disk_cache = reader.spans.disk().cloned();
        reader.spans = SpanStore::new(SpanCache::new(0), 0, disk_cache, false);
        assert_eq!(found(&reader), (true, false));
    }
}
