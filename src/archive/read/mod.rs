//! Reads files from spans, and fills spans from memory, the disk cache, or the source.
//!
//! A span that is neither in memory nor on disk is decoded from the nearest seek point.
//!
//! The reader decodes packed bytes only after their blocks match the digests in the index
//! (`packed.rs`). It checks plain bytes from disk against the checksums of their blocks. It checks
//! a decoded span against its hash, which covers these checksums. Bytes that the scan skipped have
//! neither.

pub(super) mod batch;
pub(super) mod disk_cache_policy;
pub(super) mod member_source;
pub(super) mod packed;
pub(super) mod priority;
pub(super) mod single_flight;
pub(super) mod windows;

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use tokio::runtime::Handle;

use crate::archive::error::Error;
use crate::archive::live_index::LiveIndex;
use crate::archive::prefetch::lag_limit::LagLimit;
use crate::base::buffer_pool::{Buffer, BufferPool, Closed};
use crate::base::extent::{Extent, Packed, Plain};
use crate::base::free_list::{self, FreeList};
use crate::base::memory_reclaim::MemoryBroker;
use crate::base::random_reads::Wait;
use crate::base::span_hash;
use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::cache::{DiskCache, QueueTimeout, SpanCache, SpanKey};
use crate::codec::seek_point::MAX_SPAN_LEN;
use crate::codec::{self, Compression, Context, Decoder, Output, Pull, SeekPoint};
use crate::fetch;
use crate::index::store::IndexLock;
use crate::index::{Entry, Index, Ino, Kind, Piece, Span};
use crate::source::{Access, Cause, Source};
use packed::{FetchMode, FirstReadHashes, PackedBytes};
use priority::ReadPriority;
use single_flight::{FlightError, SingleFlight};
use windows::{LONG_READ_BYTES, Windows};

/// Number of random samples, in addition to the front and the end of a source.
const RANDOM_SAMPLES: u64 = 4;

/// Maximum number of packed bytes that are fetched to decode one sample.
const MAX_SAMPLE_BYTES: u64 = 4 << 20;

/// Maximum number of spans that are decoded for one sample.
const MAX_SAMPLE_SPANS: u32 = 4;

/// Reason why a read failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ReadError {
    /// The inode is missing, or is not a regular file.
    #[error("not a regular file")]
    NotAFile,
    /// The source has another version than the indexed one.
    #[error("the archive changed at its source")]
    Changed(#[source] Arc<Error>),
    /// The source no longer exists.
    #[error("the archive is gone from its source")]
    NotFound(#[source] Arc<Error>),
    /// The source's bytes are unavailable.
    #[error("the archive cannot be reached")]
    Unreachable(#[source] Arc<Error>),
    /// The source did not deliver in time: its server was unreachable or busy.
    #[error("the archive could not be reached in time")]
    TimedOut(#[source] Arc<Error>),
    /// The source's server refuses access.
    #[error("the archive's server refuses access")]
    AccessDenied(#[source] Arc<Error>),
    /// The bytes arrived, but differ from the indexed ones.
    #[error("plain bytes {extent:?} of the archive are damaged")]
    Damaged {
        /// The damaged span.
        extent: Extent<Plain>,
        /// Reason why it cannot be decoded; `None` if it decodes to other bytes.
        #[source]
        cause: Option<Arc<Error>>,
    },
    /// The scan ended before these bytes.
    #[error("the scan of the archive ended before these bytes")]
    Unscanned,
    /// The index contradicts itself.
    #[error("the index is damaged; delete it and mount again")]
    Index,
}

impl FlightError for ReadError {
    fn is_shared(&self) -> bool {
        match self {
            Self::Changed(_) | Self::NotFound(_) | Self::TimedOut(_) | Self::AccessDenied(_) => {
                true
            }
            // If one thread was interrupted, that says nothing about the source.
            Self::Unreachable(error) => match &**error {
                Error::Source(source) => !matches!(source.cause, Cause::Cancelled),
                _ => false,
            },
            // The damage may be in bytes that a waiter does not need.
            Self::Damaged { .. } | Self::NotAFile | Self::Unscanned | Self::Index => false,
        }
    }
}

/// Reads files of one archive.
#[derive(Debug)]
pub(crate) struct Reader {
    pub(crate) source: Arc<dyn Source>,
    pub(crate) live_index: LiveIndex,
    pub(crate) span_cache: SpanCache,
    /// Free list that provides the memory of spans.
    pub(crate) free_list: FreeList,
    pub(crate) disk_cache: Option<Arc<DiskCache>>,
    /// Held during a decode from far away, because a second reader may then find its span in the
    /// disk cache.
    pub(crate) far_decode_lock: Mutex<()>,
    /// Spans that a read or prefetch is filling.
    pub(crate) single_flight: SingleFlight<ReadError>,
    /// Windows in which a remote uncompressed archive is read.
    pub(crate) windows: Windows,
    /// Active reads that fill spans. Prefetch waits for them.
    pub(crate) read_priority: Arc<ReadPriority>,
    /// Layer that tells this archive's spans from others in the shared memory.
    pub(crate) layer: u16,
    /// Limit on how far the scan runs ahead of the scan pusher.
    pub(crate) lag_limit: Arc<LagLimit>,
    pub(crate) network: Handle,
    /// Range requests of reads.
    pub(crate) reads: fetch::RangeReader,
    /// Memory that reads hold while they decode. A read waits here if there is too little.
    pub(crate) budget: BufferPool,
    /// Additional memory for the decoders of these reads.
    pub(crate) broker: MemoryBroker,
    /// Limit for cached spans, reads and their decoders together, in bytes.
    pub(crate) memory_bytes: u64,
    pub(crate) stats: Arc<Stats>,
    pub(crate) first_read_hashes: FirstReadHashes,
    /// Lock that keeps the saved index from being removed.
    pub(crate) in_use: OnceLock<IndexLock>,
    /// Whether the reader is closed, so that no caller waits for a span.
    pub(crate) is_closed: AtomicBool,
}

impl Reader {
    /// Ends all reads soon, now and later. Reads that wait for memory end at once, others at their
    /// next span.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
        self.read_priority.close();
        self.budget.close();
        self.broker.close();
    }

    /// As [`crate::archive::Archive::try_read`].
    pub(crate) fn try_read(
        &self,
        ino: Ino,
        offset: u64,
        len: u32,
    ) -> Option<Result<Bytes, ReadError>> {
        let mut found_spans = 0;
        let bytes = self.read_with(ino, offset, len, |part| {
            if let Some(bytes) = self.cached_part(part)? {
                found_spans += 1;
                return Ok(bytes);
            }
            self.read_part_from_disk(part, Wait::Never).ok_or(None)
        });
        match bytes {
            Ok(bytes) => {
                self.stats.memory_hit_spans.add(found_spans);
                Some(Ok(bytes))
            }
            // The caller retries with a blocking read. That retry counts the spans found here
            // again, and it waits for spans that the scan has not reached.
            Err(None | Some(ReadError::Unscanned)) => None,
            Err(Some(error)) => Some(Err(error)),
        }
    }

    /// As [`crate::archive::Archive::read`], on the calling thread.
    pub(crate) fn read(&self, ino: Ino, offset: u64, len: u32) -> Result<Bytes, ReadError> {
        self.read_with(ino, offset, len, |part| {
            if let Some(bytes) = self.cached_part(part)? {
                self.stats.memory_hit_spans.increment();
                return Ok(bytes);
            }
            if let Some(bytes) = self.read_part_from_disk(part, Wait::ForDisk) {
                return Ok(bytes);
            }
            if let Some(bytes) = self.read_windows(part)? {
                return Ok(bytes);
            }
            part.slice_of(&self.load_span(part.span)?)
        })
        .map_err(|error| error.unwrap_or(ReadError::Index))
    }

    /// Reads `part` from a local disk, with at most its whole blocks.
    fn read_part_from_disk(&self, part: &SpanPart, wait: Wait) -> Option<Bytes> {
        let bytes = self.read_here(part.plain, wait);
        let bytes = bytes.or_else(|| self.part_from_disk_cache(part, wait))?;
        self.stats.exact_reads.increment();
        Some(bytes)
    }

    /// Reads `part` from the disk cache.
    ///
    /// Reads the blocks that contain it, and checks each against its checksum in the index.
    fn part_from_disk_cache(&self, part: &SpanPart, wait: Wait) -> Option<Bytes> {
        let disk_cache = self.disk_cache.as_ref()?;
        // Read-ahead is filling this span, so a sequential reader shares it.
        if part.plain.len() >= LONG_READ_BYTES && self.single_flight.find(part.span).is_some() {
            return None;
        }
        let checksums_of =
            |index: &Index| Some(index.span_checksums(part.span)?.blocks(&part.range));
        let (blocks, extent) = checksums_of(&self.live_index.read())??;
        let bytes = disk_cache.read_part(extent, wait)?;
        let index = self.live_index.read();
        // The block was never written, or is damaged. A read of the whole span finds out which.
        if !index
            .span_checksums(part.span)?
            .match_bytes(blocks.start, &bytes)
        {
            return None;
        }
        let span = index.span_extent(part.span)?;
        drop(index);
        // Only these windows count as used, because the disk cache may lack others of the span.
        disk_cache.mark_used(
            self.layout()
                .map_or(span, |layout| layout.extent(&layout.windows(part.plain))),
        );
        self.stats.disk_cache_hit_spans.increment();
        self.stats.disk_cache_read_bytes.add(bytes.len() as u64);
        Some(bytes.slice(part.range.start - blocks.start..part.range.end - blocks.start))
    }

    /// `part` from a span, or from windows, in memory.
    fn cached_part(&self, part: &SpanPart) -> Result<Option<Bytes>, Option<ReadError>> {
        match self.span_cache.get(self.key(part.span)) {
            Some(span) => part.slice_of(&span).map(Some),
            None => Ok(self.cached_windows(part.plain)),
        }
    }

    /// Plain offset that the scan must reach for this read; 0 if the read needs no bytes.
    pub(crate) fn required_scan_end(&self, ino: Ino, offset: u64, len: u32) -> Plain {
        let index = self.live_index.read();
        let Some(entry) = regular_file(&index, ino) else {
            return Plain(0);
        };
        let len = entry.size().saturating_sub(offset).min(len.into());
        let assembly = Assembly::new(offset, len);
        let wanted = entry
            .pieces(offset, len)
            .filter_map(|piece| assembly.wanted(&piece));
        wanted.map(|wanted| wanted.end()).max().unwrap_or_default()
    }

    /// Assembles a file's bytes from parts of spans.
    ///
    /// `None` as an error means that a part is missing.
    fn read_with(
        &self,
        ino: Ino,
        offset: u64,
        len: u32,
        mut part_bytes: impl FnMut(&SpanPart) -> Result<Bytes, Option<ReadError>>,
    ) -> Result<Bytes, Option<ReadError>> {
        let (len, parts) = self.plan_parts(ino, offset, len)?;
        let mut assembly = Assembly::new(offset, len);
        for part in parts {
            let bytes = part_bytes(&part)?;
            assembly.add(&part.piece, part.plain, bytes, &self.free_list);
        }
        Ok(assembly.finish())
    }

    /// Plans the parts and the length of a read.
    ///
    /// Runs before any wait, because a thread must not wait while it holds the index.
    fn plan_parts(
        &self,
        ino: Ino,
        offset: u64,
        len: u32,
    ) -> Result<(u64, Vec<SpanPart>), ReadError> {
        let index = self.live_index.read();
        let entry = regular_file(&index, ino).ok_or(if index.is_complete() {
            ReadError::NotAFile
        } else {
            // A failed scan may have removed entries that it had found.
            ReadError::Unscanned
        })?;
        let len = entry.size().saturating_sub(offset).min(len.into());
        let assembly = Assembly::new(offset, len);
        let mut parts = Vec::new();
        for piece in entry.pieces(offset, len) {
            let Some(mut wanted) = assembly.wanted(&piece) else {
                continue;
            };
            while !wanted.is_empty() {
                let Some(span) = index.span_at(wanted.start()) else {
                    let nothing = if index.is_complete() {
                        ReadError::Index
                    } else {
                        ReadError::Unscanned
                    };
                    return Err(nothing);
                };
                let extent = index.span_extent(span).ok_or(ReadError::Index)?;
                let plain = extent.intersection(&wanted).ok_or(ReadError::Index)?;
                let within =
                    |at: Plain| usize::try_from(at.0 - extent.start().0).unwrap_or(usize::MAX);
                parts.push(SpanPart {
                    span,
                    piece,
                    plain,
                    range: within(plain.start())..within(plain.end()),
                });
                wanted = Extent::new(plain.end(), wanted.end()).ok_or(ReadError::Index)?;
            }
        }
        Ok((len, parts))
    }

    /// Loads span `number` from a cache or the source, and checks its hash.
    ///
    /// # Errors
    /// When its bytes are unavailable, or differ from the indexed ones.
    pub(crate) fn verify(&self, number: u32) -> Result<(), ReadError> {
        self.indexed_span(number)?.hash.ok_or(ReadError::Index)?;
        self.load_span(number).map(drop)
    }

    /// Whether the disk cache holds every span, undamaged.
    pub(crate) fn is_fully_on_disk(&self) -> bool {
        let count = self.live_index.read().span_count();
        (0..count).all(|number| {
            let span = self.indexed_span(number).ok();
            span.is_some_and(|span| self.span_from_disk_cache(&span).is_some())
        })
    }

    /// Verifies span `number` as [`Reader::verify`] does, but from the source alone.
    ///
    /// The disk cache proves nothing about the bytes that the source has now.
    ///
    /// # Errors
    /// As [`Reader::verify`]; always if the source can be read only once.
    pub(crate) fn verify_source(&self, number: u32) -> Result<(), ReadError> {
        let span = self.indexed_span(number)?;
        span.hash.ok_or(ReadError::Index)?;
        self.fetch_span(&span).map(drop)
    }

    /// Checks samples with `verify`: the front and the end of the archive, and some random spans.
    ///
    /// # Errors
    /// The first error of `verify`.
    pub(crate) fn verify_samples(
        &self,
        verify: impl Fn(&Self, u32) -> Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        let mut samples = self.sample_spans().into_iter();
        samples.try_for_each(|span| verify(self, span))
    }

    /// Numbers of the sampled spans; at least one.
    fn sample_spans(&self) -> BTreeSet<u32> {
        let index = self.live_index.read();
        let starts = (0..index.span_count()).filter(|&span| index.seek_offset(span).is_some());
        let starts: Vec<u32> = starts.collect();
        let random = RandomState::new();
        let count = starts.len().max(1) as u64;
        let random_samples = (0..RANDOM_SAMPLES).map(|sample| random.hash_one(sample) % count);
        let stretches = [0, count - 1].into_iter().chain(random_samples);
        let spans = stretches.map(|stretch| self.sample_span(&starts, stretch));
        spans.collect()
    }

    /// The last span that is cheap to decode from the seek point at `starts[stretch]`.
    fn sample_span(&self, starts: &[u32], stretch: u64) -> u32 {
        let place = usize::try_from(stretch).unwrap_or(usize::MAX);
        let Some(&first) = starts.get(place) else {
            return 0;
        };
        let index = self.live_index.read();
        let next = starts.get(place + 1).copied();
        let packed_end = next.and_then(|next| index.seek_offset(next));
        let packed_end = packed_end.map_or(index.origin().packed_bytes, |end| end.0);
        let packed_start = index.seek_offset(first).map_or(0, |start| start.0);
        if packed_end.saturating_sub(packed_start) > MAX_SAMPLE_BYTES {
            return first;
        }
        let last = next.unwrap_or(index.span_count()).saturating_sub(1);
        last.min(first.saturating_add(MAX_SAMPLE_SPANS - 1))
    }

    /// Cache key of span `span`.
    pub(crate) fn key(&self, span: u32) -> SpanKey {
        let layer = self.layer;
        SpanKey { layer, span }
    }

    pub(crate) fn indexed_span(&self, number: u32) -> Result<Span, ReadError> {
        self.live_index.read().span(number).ok_or(ReadError::Index)
    }

    /// Loads span `number` from memory, or fills it.
    ///
    /// Concurrent callers share one fill.
    pub(crate) fn load_span(&self, number: u32) -> Result<Bytes, ReadError> {
        if let Some(bytes) = self.span_cache.get(self.key(number)) {
            self.stats.memory_hit_spans.increment();
            return Ok(bytes);
        }
        let fill = || {
            let _active_read = self.read_priority.start_read();
            self.stats.memory_miss_spans.increment();
            let bytes = self.fill_span(number)?;
            self.span_cache.insert(self.key(number), bytes.clone());
            Ok(bytes)
        };
        let (bytes, is_new) = self.single_flight.get_or_fill(number, find, fill)?;
        if !is_new {
            self.stats.memory_shared_spans.increment();
        }
        Ok(bytes)
    }

    /// Reads from memory or a local disk, on behalf of prefetch.
    ///
    /// Otherwise as [`Reader::try_read`], but it may wait for the disk. Returns `None` also if it
    /// fails.
    pub(crate) fn read_cached(&self, ino: Ino, offset: u64, len: u32) -> Option<Bytes> {
        let find = |part: &SpanPart| {
            let found = self.cached_part(part)?;
            found
                .or_else(|| self.read_part_from_disk(part, Wait::ForDisk))
                .ok_or(None)
        };
        self.read_with(ino, offset, len, find).ok()
    }

    fn fill_span(&self, number: u32) -> Result<Bytes, ReadError> {
        let span = self.indexed_span(number)?;
        span_len(&span)?;
        if let Some(bytes) = self.find_in_disk_cache(&span) {
            return Ok(bytes);
        }
        let is_far = span.seek_point.is_none();
        let _far_decode = is_far.then(|| self.far_decode_lock.lock());
        if is_far && let Some(bytes) = self.find_in_disk_cache(&span) {
            return Ok(bytes);
        }
        if self.disk_cache.is_some() {
            self.stats.disk_cache_miss_spans.increment();
        }
        self.fetch_span(&span)
    }

    /// Reads `span` from the disk cache, and counts a cache hit.
    fn find_in_disk_cache(&self, span: &Span) -> Option<Bytes> {
        let bytes = self.span_from_disk_cache(span)?;
        self.stats.disk_cache_hit_spans.increment();
        Some(bytes)
    }

    /// Fetches and decodes `span` from the source.
    fn fetch_span(&self, span: &Span) -> Result<Bytes, ReadError> {
        if self.source.access() == Access::Stream {
            return Err(ReadError::Damaged {
                extent: span.plain,
                cause: None,
            });
        }
        // The network path may have corrupted the bytes, so a retry fetches them by another path.
        match self.decode_span(span, FetchMode::Normal) {
            Err(ReadError::Damaged { .. }) => self.decode_span(span, FetchMode::Refetch),
            result => result,
        }
    }

    /// Caches a span on disk, if that is cheaper than decoding it again.
    pub(crate) fn cache_span_on_disk(&self, span: &Span, bytes: &Bytes, is_for_read: bool) {
        if let Some(disk_cache) = &self.disk_cache
            && self.should_cache_on_disk(span)
        {
            // A span that a read needs, or that was decoded from far away, is worth a short wait
            // for the disk. Read-ahead does not wait, because it would become as slow as the disk.
            let disk_wait = if is_for_read || span.seek_point.is_none() {
                QueueTimeout::Short
            } else {
                QueueTimeout::NoWait
            };
            disk_cache.insert_evicting(span.plain, bytes.clone(), disk_wait);
        }
    }

    /// Caches a span on disk that no reader requested.
    ///
    /// It evicts nothing, and may wait.
    pub(crate) fn cache_prefetched_span_on_disk(&self, span: &Span, bytes: &Bytes) {
        if let Some(disk_cache) = &self.disk_cache
            && self.should_cache_on_disk(span)
        {
            disk_cache.insert_skipped(span.plain, bytes.clone(), QueueTimeout::Short);
        }
    }

    /// Computes the span hash of `bytes`.
    fn hash(&self, bytes: &[u8]) -> u64 {
        let block_len = self.live_index.read().block_len();
        span_hash::of_bytes(bytes, block_len)
    }

    pub(crate) fn span_from_disk_cache(&self, span: &Span) -> Option<Bytes> {
        // A span without a hash cannot be verified.
        let hash = span.hash?;
        // The disk cache file is only as long as the archive, whatever an index claims.
        span_len(span).ok()?;
        let disk_cache = self.disk_cache.as_ref()?;
        let bytes = disk_cache.read(span.plain)?;
        if bytes.len() as u64 != span.plain.len() || self.hash(&bytes) != hash {
            self.stats.disk_cache_damaged_spans.increment();
            return None;
        }
        disk_cache.mark_used(span.plain);
        self.stats.disk_cache_read_bytes.add(bytes.len() as u64);
        Some(bytes)
    }

    /// Decodes from the nearest seek point up to the end of `span`.
    ///
    /// Also caches the spans in between, because a sequential reader will need them.
    fn decode_span(&self, span: &Span, mode: FetchMode) -> Result<Bytes, ReadError> {
        let first = self.seekable_before(span)?;
        let seek_point = first.seek_point.as_ref().ok_or(ReadError::Index)?;
        let extent =
            Extent::new(seek_point.packed, self.packed_end(span.number)).ok_or(ReadError::Index)?;
        let request = self.request(extent)?;
        let read_error = |error: Error| self.read_error(span, error);
        // Reserves everything at once, so that a running decoder never waits for another one.
        let needed_bytes = request.buffer_bytes()
            + codec::read_pool_bytes(self.compression())
            + span_len(span)? as u64;
        let reserved = self.budget.reserve(needed_bytes);
        let _reserved = reserved.map_err(|Closed| read_error(Error::Interrupted))?;
        let mut decoder = self.resume_decoder(seek_point).map_err(read_error)?;
        let mut packed = PackedBytes::open(self, request, mode).map_err(read_error)?;
        for number in first.number..span.number {
            let between = self.indexed_span(number)?;
            let bytes = self.decode_next(&between, &mut decoder, &mut packed)?;
            let disk_cache = self.disk_cache.as_ref();
            // Between the seek point and `span` may be all of a long stream, which the scan put on
            // disk.
            if !disk_cache.is_some_and(|disk_cache| disk_cache.covers(between.plain)) {
                self.cache_span_on_disk(&between, &bytes, true);
            }
            self.span_cache.insert(self.key(number), bytes);
        }
        let bytes = self.decode_next(span, &mut decoder, &mut packed)?;
        self.cache_span_on_disk(span, &bytes, true);
        Ok(bytes)
    }

    /// Builds a decoder that resumes at `seek_point`.
    pub(crate) fn resume_decoder(&self, seek_point: &SeekPoint) -> Result<SpanDecoder, Error> {
        let context = Context {
            pool: BufferPool::with_free_list(codec::READ_POOL_BYTES, self.free_list.clone()),
            wants_seek_points: false,
            broker: self.broker.clone(),
            workers: 0,
        };
        let decoder = codec::resume(self.compression(), context, seek_point)?;
        Ok(SpanDecoder::new(decoder))
    }

    pub(crate) fn compression(&self) -> Compression {
        self.live_index.read().origin().compression
    }

    /// Decodes and checks the plain bytes of `span`, which are next in `decoder`.
    pub(crate) fn decode_next(
        &self,
        span: &Span,
        decoder: &mut SpanDecoder,
        packed: &mut PackedBytes,
    ) -> Result<Bytes, ReadError> {
        let len = span_len(span)?;
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(self.read_error(span, Error::Interrupted));
        }
        let bytes = decoder
            .take_bytes(&self.free_list, span.plain.start(), len, packed)
            .map_err(|error| self.read_error(span, error))?;
        self.stats.decoded_spans.increment();
        self.stats.decoded_bytes.add(bytes.len() as u64);
        let has_hash = || span.hash.is_none_or(|hash| self.hash(&bytes) == hash);
        if bytes.len() != len || !(self.is_digested(span) || has_hash()) {
            self.stats.damaged_spans.increment();
            return Err(ReadError::Damaged {
                extent: span.plain,
                cause: None,
            });
        }
        Ok(bytes)
    }

    /// Whether each block that only `span` is decoded from has a digest.
    ///
    /// Decoding is deterministic, so blocks with these digests, and a window from the index, prove
    /// the plain bytes.
    fn is_digested(&self, span: &Span) -> bool {
        let seek_point = span.seek_point.as_ref();
        let extent =
            seek_point.and_then(|point| Extent::new(point.packed, self.packed_end(span.number)));
        let request = extent.and_then(|extent| self.request(extent).ok());
        request.is_some_and(|request| request.is_digested())
    }

    /// Converts `error` for a reader of `span`, and counts damage.
    pub(crate) fn read_error(&self, span: &Span, error: Error) -> ReadError {
        self.read_error_at(span.plain, error)
    }

    /// Converts `error` as [`Reader::read_error`] does, for a reader of the plain bytes `extent`.
    pub(crate) fn read_error_at(&self, extent: Extent<Plain>, error: Error) -> ReadError {
        let error = Arc::new(error);
        match &*error {
            Error::Source(source) => match &source.cause {
                Cause::Changed => ReadError::Changed(error),
                Cause::NotFound => ReadError::NotFound(error),
                Cause::Unauthorized(_) => ReadError::AccessDenied(error),
                cause if cause.is_outage() => ReadError::TimedOut(error),
                _ => ReadError::Unreachable(error),
            },
            Error::Interrupted
            | Error::Codec(codec::Error {
                cause: codec::Cause::Cancelled,
                ..
            }) => ReadError::Unreachable(error),
            Error::Codec(_)
            | Error::Tar(_)
            | Error::NotAnArchive
            | Error::Empty
            | Error::TooManyEntries { .. }
            | Error::TooMuchMemory(_)
            | Error::EndlessZeros
            | Error::UnsupportedFormat(_)
            | Error::Encrypted(_)
            | Error::WebPage
            | Error::DigestMismatch { .. }
            | Error::PlainDigestMismatch { .. }
            | Error::BlockMismatch { .. } => {
                self.stats.damaged_spans.increment();
                ReadError::Damaged {
                    extent,
                    cause: Some(error),
                }
            }
        }
    }

    /// The last span at or before `span` at which decoding can start.
    fn seekable_before(&self, span: &Span) -> Result<Span, ReadError> {
        let index = self.live_index.read();
        let number = (0..=span.number)
            .rev()
            .find(|&number| index.seek_offset(number).is_some())
            .ok_or(ReadError::Index)?;
        index.span(number).ok_or(ReadError::Index)
    }

    /// End of the packed bytes that span `number` is decoded from.
    ///
    /// That is the next seek point, or the end of the source.
    pub(crate) fn packed_end(&self, number: u32) -> Packed {
        let index = self.live_index.read();
        let next = (number + 1..index.span_count()).find_map(|number| index.seek_offset(number));
        let origin = index.origin();
        let slack = match origin.compression {
            Compression::None => 0,
            _ => codec::LOOKAHEAD_LEN as u64,
        };
        let len = origin.packed_bytes;
        Packed(next.map_or(len, |next| next.0.saturating_add(slack).min(len)))
    }
}

/// The bytes of one span that a read needs.
pub(crate) struct SpanPart {
    pub(crate) span: u32,
    /// The stored piece of the file that contains these bytes.
    piece: Piece,
    pub(crate) plain: Extent<Plain>,
    /// Range of these bytes in the span.
    range: Range<usize>,
}

impl SpanPart {
    /// Cuts this part out of `span`, which holds all bytes of the span.
    pub(crate) fn slice_of(&self, span: &Bytes) -> Result<Bytes, Option<ReadError>> {
        if self.range.end > span.len() {
            return Err(Some(ReadError::Index));
        }
        Ok(span.slice(self.range.clone()))
    }
}

fn regular_file(index: &Index, ino: Ino) -> Option<Entry<'_>> {
    index
        .entry(ino)
        .filter(|entry| matches!(entry.kind(), Kind::File))
}

/// The length of `span`.
///
/// An index file can claim any length, but a scan never makes spans longer than the limit.
pub(crate) fn span_len(span: &Span) -> Result<usize, ReadError> {
    usize::try_from(span.plain.len())
        .ok()
        .filter(|&len| len as u64 <= MAX_SPAN_LEN)
        .ok_or(ReadError::Index)
}

/// A range of a file that is assembled from span parts. Bytes without a piece are a hole.
struct Assembly {
    offset: u64,
    len: u64,
    /// The single piece that covers everything, which needs no copy; or all pieces, copied.
    content: Content,
}

enum Content {
    Nothing,
    Whole(Bytes),
    Copied(free_list::RecycledBuffer),
}

impl Assembly {
    fn new(offset: u64, len: u64) -> Self {
        Self {
            offset,
            len,
            content: Content::Nothing,
        }
    }

    /// The plain bytes of `piece` that this range needs.
    fn wanted(&self, piece: &Piece) -> Option<Extent<Plain>> {
        let from = self.offset.saturating_sub(piece.offset);
        let until = (self.offset + self.len).checked_sub(piece.offset)?;
        let until = until.min(piece.plain.len());
        let start = Plain(piece.plain.start().0.checked_add(from)?);
        Extent::new(start, Plain(piece.plain.start().0.checked_add(until)?))
    }

    /// Adds `bytes`, the plain bytes of `part`, at their offset in `piece`. Parts arrive in file
    /// order.
    fn add(&mut self, piece: &Piece, part: Extent<Plain>, bytes: Bytes, free_list: &FreeList) {
        if bytes.len() as u64 == self.len {
            self.content = Content::Whole(bytes);
            return;
        }
        let mut copied = match std::mem::replace(&mut self.content, Content::Nothing) {
            Content::Copied(copied) => copied,
            Content::Nothing | Content::Whole(_) => free_list.allocate_empty(to_usize(self.len), 0),
        };
        let in_file = piece.offset + (part.start().0 - piece.plain.start().0);
        copied.append_zeros(to_usize(in_file - self.offset));
        copied.append(&bytes);
        self.content = Content::Copied(copied);
    }

    fn finish(self) -> Bytes {
        match self.content {
            Content::Whole(bytes) => bytes,
            Content::Copied(mut copied) => {
                copied.append_zeros(to_usize(self.len));
                copied.freeze()
            }
            Content::Nothing => vec![0; to_usize(self.len)].into(),
        }
    }
}

/// Converts a length, which is at most that of one read, a `u32`.
fn to_usize(len: u64) -> usize {
    usize::try_from(len).unwrap_or_default()
}

/// A decoder with the output that no caller has taken yet.
pub(crate) struct SpanDecoder {
    decoder: Box<dyn Decoder>,
    /// Output of a decoder job.
    output: Option<Output>,
    /// Rest of the last piece.
    rest: Bytes,
}

/// Next output of a decoder.
enum DecodedPiece {
    /// A piece with a buffer of its own.
    Buffer(Buffer),
    /// Bytes that may share memory with others.
    Shared(Bytes),
}

impl From<DecodedPiece> for Bytes {
    fn from(piece: DecodedPiece) -> Self {
        match piece {
            DecodedPiece::Buffer(buffer) => buffer.freeze(),
            DecodedPiece::Shared(bytes) => bytes,
        }
    }
}

impl SpanDecoder {
    pub(crate) fn new(decoder: Box<dyn Decoder>) -> Self {
        Self {
            decoder,
            output: None,
            rest: Bytes::new(),
        }
    }

    /// Takes the next `len` plain bytes, which begin at `start`, in memory of `free_list`.
    ///
    /// Returns fewer at the end of the stream. Does not copy a piece that is exactly these bytes.
    fn take_bytes(
        &mut self,
        free_list: &FreeList,
        start: Plain,
        len: usize,
        packed: &mut PackedBytes,
    ) -> Result<Bytes, Error> {
        let mut taken: Option<free_list::RecycledBuffer> = None;
        let mut missing = len;
        while missing > 0 {
            if self.rest.is_empty() {
                // Even an empty rest would keep its buffer from the decoder.
                self.rest = Bytes::new();
                match self.next_piece(packed)? {
                    Some(DecodedPiece::Buffer(buffer)) if missing == len && buffer.len() == len => {
                        match buffer.detach(start.0) {
                            Ok(memory) => return Ok(memory.freeze()),
                            Err(buffer) => self.rest = buffer.freeze(),
                        }
                    }
                    Some(piece) => self.rest = piece.into(),
                    None => break,
                }
            }
            let part = self.rest.split_to(self.rest.len().min(missing));
            missing -= part.len();
            let taken = taken.get_or_insert_with(|| free_list.allocate_empty(len, start.0));
            taken.append(&part);
        }
        Ok(taken.map_or_else(Bytes::new, free_list::RecycledBuffer::freeze))
    }

    /// Returns the next piece; `None` at the end of the stream.
    fn next_piece(&mut self, packed: &mut PackedBytes) -> Result<Option<DecodedPiece>, Error> {
        loop {
            if let Some(output) = &mut self.output {
                if let Some(buffer) = output.take_buffer() {
                    return Ok(Some(DecodedPiece::Buffer(buffer)));
                }
                if let Some(piece) = output.next_piece()? {
                    return Ok(Some(DecodedPiece::Shared(piece)));
                }
                self.output = None;
            }
            match self.decoder.pull()? {
                Pull::NeedInput => match packed.next()? {
                    Some(bytes) => self.decoder.push(bytes),
                    None => self.decoder.finish(),
                },
                Pull::Plain(bytes) => return Ok(Some(DecodedPiece::Shared(bytes))),
                Pull::Job(job) | Pull::OrderedJob(job) => self.output = Some(job.run()?),
                Pull::WaitFor(ahead) => ahead.wait(),
                // Spans have hashes of their own, and a single read has no other threads.
                Pull::SeekPoint(_)
                | Pull::Speculative(_)
                | Pull::ChecksumStart(_)
                | Pull::ChecksumEnd { .. }
                | Pull::Warning(_) => {}
                Pull::End => return Ok(None),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::index::{self, Builder, Locator, Origin};
    use crate::source::MemorySource;

    #[test]
    fn oversized_span_of_an_index_is_not_allocated() {
        let origin = Origin {
            locator: Locator::default(),
            content_id: [0; 32],
            sha256: None,
            compression: Compression::None,
            packed_bytes: 512,
            plain_bytes: 1 << 50,
        };
        let mut builder = Builder::new(index::Options::default());
        builder.add_span(Extent::with_len(Plain(0), 1 << 50), Some(&[0]), None);
        let network = tokio::runtime::Builder::new_multi_thread()
            .build()
            .expect("a runtime");
        let source: Arc<dyn Source> = Arc::new(MemorySource::new("test", vec![0; 512]));
        let reader = Reader {
            reads: fetch::RangeReader::new(
                network.handle().clone(),
                Arc::clone(&source),
                BufferPool::new(0),
                Arc::default(),
            ),
            source,
            live_index: LiveIndex::complete(builder.finish(origin)),
            span_cache: SpanCache::new(0),
            free_list: FreeList::new(0),
            disk_cache: None,
            far_decode_lock: Mutex::default(),
            single_flight: SingleFlight::default(),
            windows: Windows::default(),
            read_priority: Arc::default(),
            layer: 0,
            lag_limit: Arc::default(),
            network: network.handle().clone(),
            budget: BufferPool::new(0),
            broker: MemoryBroker::with_limit(0),
            memory_bytes: 0,
            stats: Arc::default(),
            first_read_hashes: FirstReadHashes::default(),
            in_use: OnceLock::new(),
            is_closed: AtomicBool::default(),
        };
        assert!(matches!(reader.verify(0), Err(ReadError::Index)));
        assert!(reader.batches(0..1, Plain(0), None).is_empty());
    }

    /// Span length in these tests. A piece is cut at each span end.
    const SPAN: u64 = 4;

    /// Pieces of a sparse file: a piece, a hole, two adjacent pieces, a hole at the end.
    fn pieces() -> [Piece; 3] {
        let piece = |offset, plain, len| Piece {
            offset,
            plain: Extent::with_len(Plain(plain), len),
        };
        [piece(2, 101, 5), piece(10, 106, 3), piece(13, 300, 6)]
    }

    const FILE_LEN: u64 = 22;

    fn plain_byte(offset: u64) -> u8 {
        u8::try_from(offset % 251 + 1).expect("below 252")
    }

    fn expected() -> Vec<u8> {
        let mut file = vec![0; 22];
        for piece in pieces() {
            for number in 0..piece.plain.len() {
                let at = usize::try_from(piece.offset + number).expect("small");
                file[at] = plain_byte(piece.plain.start().0 + number);
            }
        }
        file
    }

    fn assemble(offset: u64, len: u64, pieces: &[Piece]) -> Bytes {
        let mut assembly = Assembly::new(offset, len);
        for piece in pieces {
            let Some(mut wanted) = assembly.wanted(piece) else {
                continue;
            };
            while !wanted.is_empty() {
                let end = Plain((wanted.start().0 / SPAN + 1) * SPAN).min(wanted.end());
                let part = Extent::new(wanted.start(), end).expect("in order");
                let bytes = (part.start().0..part.end().0).map(plain_byte);
                assembly.add(piece, part, bytes.collect(), &FreeList::new(0));
                wanted = Extent::new(end, wanted.end()).expect("in order");
            }
        }
        assembly.finish()
    }

    #[test]
    fn every_range_of_a_sparse_file_is_assembled() {
        let file = expected();
        for offset in 0..=FILE_LEN {
            for len in 0..=FILE_LEN - offset {
                let from = usize::try_from(offset).expect("small");
                let until = usize::try_from(offset + len).expect("small");
                let assembled = assemble(offset, len, &pieces());
                assert_eq!(assembled, file[from..until], "{len} at {offset}");
            }
        }
    }

    #[test]
    fn read_within_one_span_is_not_copied() {
        let piece = Piece {
            offset: 0,
            plain: Extent::with_len(Plain(0), 4),
        };
        let mut assembly = Assembly::new(1, 2);
        let wanted = assembly.wanted(&piece).expect("wanted");
        let span = Bytes::from_static(b"span");
        assembly.add(&piece, wanted, span.slice(1..3), &FreeList::new(0));
        assert_eq!(assembly.finish().as_ptr(), span.slice(1..).as_ptr());
    }

    #[test]
    fn file_without_pieces_reads_as_zeros() {
        assert_eq!(assemble(3, 5, &[]), [0; 5][..]);
        assert!(assemble(0, 0, &pieces()).is_empty());
    }
}
