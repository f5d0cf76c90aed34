//! Fills spans from memory, the disk cache, or the source.

use std::time::Duration;

use bytes::Bytes;

use super::Reader;
use super::assemble::span_len;
use super::packed::FetchMode;
use crate::archive::error::ReadError;
use crate::base::extent::{Extent, Plain};
use crate::base::span_hash;
use crate::cache::{DiskCache, QueueTimeout, SparseExtent};
use crate::codec::ExpectedSpan;
use crate::index::Span;
use crate::source::Access;

impl Reader {
    /// Loads span `number` from memory, or fills it. Concurrent callers and prefetch share one fill.
    pub(super) fn load_span(&self, number: u32) -> Result<Bytes, ReadError> {
        let find = || self.spans.get(number);
        if let Some(bytes) = self.span_in_memory(number) {
            self.stats.memory_hit_spans.increment();
            return Ok(bytes);
        }
        let fill = || {
            let _active_read = self.read_priority.start_read();
            self.stats.memory_miss_spans.increment();
            let bytes = self.fill_span(number)?;
            self.spans.insert(number, bytes.clone());
            Ok(bytes)
        };
        let (bytes, is_new) = self.spans.flights().get_or_fill(number, find, fill)?;
        if !is_new {
            self.stats.memory_shared_spans.increment();
        }
        Ok(bytes)
    }

    /// Span `number` from memory, for a read. If it is not on disk yet, it may be written earlier.
    pub(super) fn span_in_memory(&self, number: u32) -> Option<Bytes> {
        let bytes = self.spans.get(number)?;
        if let Some(disk_cache) = self.spans.disk()
            && disk_cache.is_behind()
            && let Ok(Some(extent)) = self.live_index.read(|index| index.span_extent(number))
        {
            disk_cache.note_read(extent, &bytes, || self.valued_extent(number, extent));
        }
        Some(bytes)
    }

    fn fill_span(&self, number: u32) -> Result<Bytes, ReadError> {
        let span = self.live_index.span(number)?;
        span_len(&span)?;
        if let Some(bytes) = self.find_in_disk_cache(&span) {
            return Ok(bytes);
        }
        let is_far = span.seek_point.is_none();
        let _far_decode = is_far.then(|| self.spans.lock_far_decode());
        if is_far && let Some(bytes) = self.find_in_disk_cache(&span) {
            return Ok(bytes);
        }
        if self.spans.disk().is_some() {
            self.stats.disk_cache_miss_spans.increment();
        }
        match self.span_from_peer(&span) {
            Some(bytes) => Ok(bytes),
            None => self.fetch_span(&span),
        }
    }

    /// A span that another process has, or decodes at this moment.
    pub(super) fn span_from_peer(&self, span: &Span) -> Option<Bytes> {
        let (peer, hash) = (self.peer.as_ref()?, span.hash?);
        let len = span_len(span).ok()? as u64;
        let block_len = self.live_index.lock().block_len();
        peer.span(span.number, ExpectedSpan { len, hash }, block_len)
    }

    /// As [`Archive::span_for_peer`](crate::archive::Archive::span_for_peer).
    pub(in crate::archive) fn shared_span(&self, number: u32, timeout: Duration) -> Option<Bytes> {
        if let Some(bytes) = self.spans.get(number) {
            return Some(bytes);
        }
        let flight = self.spans.flights().find(number)?;
        flight.wait_timeout(timeout)
    }

    fn find_in_disk_cache(&self, span: &Span) -> Option<Bytes> {
        let bytes = self.span_from_disk_cache(span)?;
        self.stats.disk_cache_hit_spans.increment();
        Some(bytes)
    }

    pub(super) fn fetch_span(&self, span: &Span) -> Result<Bytes, ReadError> {
        if self.packed.source().access() == Access::Stream {
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
    pub(super) fn cache_span_on_disk(&self, span: &Span, bytes: &Bytes, is_for_read: bool) {
        if let Some(disk_cache) = self.disk_cache_for(span) {
            // A span for a read, or decoded from far away, is worth a short wait for the disk. Prefetch
            // does not wait, because it would become as slow as the disk.
            let disk_wait = if is_for_read || span.seek_point.is_none() {
                QueueTimeout::Short
            } else {
                QueueTimeout::NoWait
            };
            disk_cache.insert_evicting(
                self.valued_extent(span.number, span.plain),
                bytes.clone(),
                is_for_read.into(),
                disk_wait,
            );
        }
    }

    /// The disk cache, if `span` is worth its place there.
    fn disk_cache_for(&self, span: &Span) -> Option<&DiskCache> {
        let disk_cache = self.spans.disk().map(|disk_cache| &**disk_cache);
        let disk_cache = disk_cache.filter(|_| self.should_cache_on_disk(span))?;
        if self.is_declined(span, disk_cache) {
            self.stats.disk_cache_declined_spans.increment();
            return None;
        }
        Some(disk_cache)
    }

    /// Caches a span on disk that no reader requested. It evicts nothing, and may wait.
    pub(super) fn cache_prefetched_span_on_disk(&self, span: &Span, bytes: &Bytes) {
        if let Some(disk_cache) = self.disk_cache_for(span) {
            let extent = self.valued_extent(span.number, span.plain);
            disk_cache.insert_skipped(extent, bytes.clone(), QueueTimeout::Short);
        }
    }

    pub(super) fn span_from_disk_cache(&self, span: &Span) -> Option<Bytes> {
        let hash = span.hash?;
        // The disk cache file is only as long as the archive, whatever an index claims.
        span_len(span).ok()?;
        let disk_cache = self.spans.disk()?;
        let extent = self.valued_extent(span.number, span.plain);
        let bytes = disk_cache.read(extent.clone())?;
        if bytes.len() as u64 != span.plain.len() || self.hash(&bytes) != hash {
            self.stats.disk_cache_damaged_spans.increment();
            return None;
        }
        disk_cache.mark_used(&extent);
        self.stats.disk_cache_read_bytes.add(extent.stored_bytes());
        Some(bytes)
    }

    /// The extent of a span, with its runs of zeros and its cost.
    fn valued_extent(&self, number: u32, extent: Extent<Plain>) -> SparseExtent {
        let cost = self.live_index.read(|index| index.decode_cost(number));
        let sparse = self.spans.sparse(&self.live_index, extent);
        sparse.with_cost(cost.unwrap_or(1))
    }

    pub(super) fn hash(&self, bytes: &[u8]) -> u64 {
        let block_len = self.live_index.lock().block_len();
        span_hash::of_bytes(bytes, block_len)
    }
}
