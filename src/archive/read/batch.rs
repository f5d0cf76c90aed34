//! Batches of spans: prefetch fetches them by one request, and decodes them on several threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::Reader;
use super::assemble::span_len;
use super::decode_span::SpanDecoder;
use super::packed::{FetchMode, PackedBytes, Request};
use super::single_flight::Claim;
use super::window_layout::WindowClaim;
use super::windows::{MissingWindows, WindowReader};
use crate::archive::error::ReadError;
use crate::archive::scan::disk_cache_policy::{is_decoded_faster, is_local};
use crate::base::buffer_pool::Reservation;
use crate::base::extent::{Extent, Packed, Plain};
use crate::base::thread_pool::ThreadPool;
use crate::cache::{DiskCache, QueueTimeout};
use crate::codec::{self, Compression};
use crate::index::Span;
use crate::source::Access;

/// Maximum number of packed bytes in one background request, which may share the link with a new reader.
const MAX_REQUEST_BYTES: u64 = 8 << 20;

const MAX_REQUEST_SPANS: usize = 8;

/// Interval at which a wait for memory checks whether the archive is closed.
const RESERVE_POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) packed: Extent<Packed>,
    /// Ranges that decode independently.
    ranges: Vec<SpanRange>,
}

/// The spans from one seek point to the next.
#[derive(Debug)]
struct SpanRange {
    packed: Extent<Packed>,
    /// Claims to the spans, in order, without gaps. Empty if only windows of a span are missing.
    claims: Vec<Claim<ReadError>>,
    /// Claims to missing windows, in order without gaps; or to all, so that no read fetches them.
    windows: Vec<WindowClaim>,
    /// Number of window runs that are still missing, if the span is fetched in runs.
    missing_runs: Option<Arc<AtomicUsize>>,
}

impl Reader {
    /// Claims the missing ones of `spans`, which ascend, and groups them into requests.
    /// Leaves out spans that are cached, in flight, or only decodable from far away. `found` counts spans
    /// that need no fill. If some windows of a span are cached, it fetches only missing ones from `from` on.
    pub(crate) fn batches(
        &self,
        spans: impl Iterator<Item = u32>,
        from: Plain,
        found: Option<&AtomicU64>,
    ) -> Vec<Batch> {
        let mut batches = Vec::new();
        for number in spans {
            match self.spans.flights().claim(number) {
                // Checked after the claim, because the span may just have been filled.
                Ok(claim) if !self.spans.contains(number) => {
                    self.add_missing(&mut batches, claim, from, found);
                }
                Ok(_) | Err(_) => count_span(found),
            }
        }
        batches
    }

    /// Adds the missing bytes of a claimed span to `batches`, unless the disk cache or another process has the span.
    fn add_missing(
        &self,
        batches: &mut Vec<Batch>,
        claim: Claim<ReadError>,
        from: Plain,
        found: Option<&AtomicU64>,
    ) {
        let number = claim.span();
        let span = self.live_index.span(number).ok();
        // An index file can claim any length.
        let Some(span) = span.filter(|span| span_len(span).is_ok()) else {
            return;
        };
        // Prefetch of all spans does not decode spans that are on disk.
        let may_read = found.is_some() || !self.is_faster_to_decode(&span);
        // Checked before the read, because a reader may complete the span on disk in the meantime.
        let was_on_disk = may_read && self.spans.is_on_disk(&self.live_index, span.plain);
        let on_disk = may_read.then(|| self.span_from_disk_cache(&span)).flatten();
        let is_on_disk = on_disk.is_some();
        if let Some(bytes) = on_disk.or_else(|| self.span_from_peer(&span)) {
            count_span(found);
            // Prefetch without a reader leaves memory to readers.
            if found.is_none() || !is_on_disk {
                self.spans.insert(number, bytes.clone());
                self.stats.prefetched_spans.increment();
            }
            return claim.complete(bytes);
        }
        if self.packed.source().access() != Access::Ranges {
            return;
        }
        let mut windows = Vec::new();
        if let Some(reader) = self.windows() {
            // The whole span was on disk and still is, so its hash was wrong just now.
            let is_damaged = was_on_disk && self.spans.is_on_disk(&self.live_index, span.plain);
            match reader.missing(span.plain, from, is_damaged) {
                MissingWindows::All(all) => windows = all,
                MissingWindows::Runs(runs) => return add_runs(batches, &reader, runs, found),
            }
        }
        let Ok(end) = self.packed_end(number) else {
            return;
        };
        let seek_offset = self.live_index.read(|index| index.seek_offset(number));
        let Ok(Some(start)) = seek_offset else {
            return extend_range(batches, end, claim);
        };
        let packed = Extent::new(start, end);
        if let Some(packed) = packed.filter(|packed| packed.len() <= MAX_REQUEST_BYTES) {
            let range = SpanRange {
                packed,
                claims: vec![claim],
                windows,
                missing_runs: None,
            };
            add_range(batches, range);
        }
    }

    pub(crate) fn fetch_batch(&self, batch: &Batch) -> Result<Bytes, ReadError> {
        let request = Request::find(&self.live_index, batch.packed)?;
        let start = Instant::now();
        let fetched = self.packed.fetch_verified(&request, FetchMode::Background);
        self.stats.fill_nanoseconds.add_time_since(start);
        fetched.or_else(|error| {
            let claims = batch.ranges.iter().flat_map(|range| &range.claims);
            let Some(first) = claims.map(Claim::span).next() else {
                let start = Plain(batch.packed.start().0);
                let extent = Extent::with_len(start, batch.packed.len());
                return Err(ReadError::at(&self.stats, extent, error));
            };
            let span = self.live_index.span(first)?;
            Err(ReadError::at(&self.stats, span.plain, error))
        })
    }

    /// Whether decoding is faster than reading from disk. LZ4 decodes as fast as a disk reads, from less.
    fn is_faster_to_decode(&self, span: &Span) -> bool {
        is_local(&**self.packed.source())
            && self.compression() == Compression::Lz4
            && span.seek_point.is_some()
    }

    pub(crate) fn should_cache_on_disk(&self, span: &Span) -> bool {
        // A span without a hash cannot be verified.
        self.spans.disk().is_some() && span.hash.is_some()
    }

    /// Whether a local `span` is so compressed that it is decoded faster than read from disk.
    pub(super) fn is_declined(&self, span: &Span, disk_cache: &DiskCache) -> bool {
        let (Some(point), Ok(end)) = (&span.seek_point, self.packed_end(span.number)) else {
            return false;
        };
        let packed = end.0.saturating_sub(point.packed.0);
        let plain = span.plain.len();
        is_local(&**self.packed.source())
            && is_decoded_faster(packed, plain, disk_cache, &self.stats)
    }

    fn fill_range(
        &self,
        mut range: SpanRange,
        packed: Bytes,
        filled_spans: Option<&AtomicU64>,
    ) -> Result<(), ReadError> {
        if range.claims.is_empty() {
            let windows = self.windows().ok_or(ReadError::Index)?;
            // Copies, because a queued disk write would keep all bytes of the request in memory.
            let mut bytes = self.free_list.allocate_empty(packed.len(), 0);
            bytes.append(&packed);
            let bytes = bytes.freeze();
            let (disk_wait, can_evict) = match filled_spans {
                Some(_) => (QueueTimeout::Short, false),
                None => (QueueTimeout::NoWait, true),
            };
            windows.cache(range.windows, &bytes, disk_wait, can_evict);
            // A run that failed stays missing.
            let missing_runs = range.missing_runs.as_ref();
            if missing_runs.is_some_and(|runs| runs.fetch_sub(1, Ordering::SeqCst) == 1) {
                count_span(filled_spans);
            }
            return Ok(());
        }
        let mut filled: Option<(SpanDecoder, PackedBytes)> = None;
        let mut packed = Some(packed);
        for claim in std::mem::take(&mut range.claims) {
            let span = self.live_index.span(claim.span())?;
            span_len(&span)?;
            let (decoder, packed) = if let Some(filled) = &mut filled {
                filled
            } else {
                let seek_point = span.seek_point.as_ref().ok_or(ReadError::Index)?;
                let decoder = self.resume_decoder(seek_point);
                let read_error = |error| ReadError::at(&self.stats, span.plain, error);
                let decoder = decoder.map_err(read_error)?;
                filled.insert((decoder, PackedBytes::Fetched(packed.take())))
            };
            let bytes = self.decode_next(&span, decoder, packed)?;
            match filled_spans {
                Some(_) => self.cache_prefetched_span_on_disk(&span, &bytes),
                // It may be on disk already.
                None if self.is_faster_to_decode(&span)
                    && self.spans.is_on_disk(&self.live_index, span.plain) => {}
                None => self.cache_span_on_disk(&span, &bytes, false),
            }
            self.spans.insert(span.number, bytes.clone());
            self.stats.prefetched_spans.increment();
            count_span(filled_spans);
            claim.complete(bytes.clone());
            if let Some(windows) = self.windows() {
                windows.complete(span.plain, &bytes, &mut range.windows);
            }
        }
        Ok(())
    }

    /// Waits for the memory to fetch and decode `batch` with `threads`; returns `None` if the archive is closed.
    pub(crate) fn reserve_batch(&self, batch: &Batch, threads: usize) -> Option<Reservation> {
        let decoding = codec::read_pool_bytes(self.compression()) + codec::seek_point::MAX_SPAN_LEN;
        let threads = batch.ranges.len().min(threads) as u64;
        let request = Request::find(&self.live_index, batch.packed);
        let fetched = request.map_or(batch.packed.len(), |request| request.buffer_bytes());
        let bytes = fetched + threads * decoding;
        // Other archives, which may be stalled, share the memory.
        let poll = || (!self.read_priority.is_closed()).then_some(RESERVE_POLL_INTERVAL);
        self.budget.reserve_while(bytes, poll)
    }
}

fn count_span(spans: Option<&AtomicU64>) {
    if let Some(spans) = spans {
        spans.fetch_add(1, Ordering::SeqCst);
    }
}

impl Batch {
    fn span_count(&self) -> usize {
        let counts = self.ranges.iter();
        counts.map(|range| range.claims.len().max(1)).sum()
    }

    /// Whether `next` starts with the next span, or the next packed byte.
    fn is_continued_by(&self, next: &SpanRange) -> bool {
        let last = self.ranges.last().and_then(|last| last.claims.last());
        let first = next.claims.first();
        let is_next = match last.zip(first) {
            Some((last, first)) => last.span().checked_add(1) == Some(first.span()),
            None => self.packed.end() == next.packed.start(),
        };
        is_next && self.span_count() < MAX_REQUEST_SPANS
    }

    /// Decodes on `workers`. `filled` counts filled spans. `job` is dropped after the last one, filled or failed.
    pub(crate) fn decode(
        self,
        reader: &Arc<Reader>,
        packed: &Bytes,
        reserved: Reservation,
        workers: &ThreadPool,
        filled: Option<&Arc<AtomicU64>>,
        job: impl Send + Sync + 'static,
    ) {
        let start = self.packed.start();
        let last = Arc::new((job, reserved));
        for range in self.ranges {
            let from = range.packed.start().0 - start.0;
            let until = range.packed.end().0 - start.0;
            let (Ok(from), Ok(until)) = (usize::try_from(from), usize::try_from(until)) else {
                continue;
            };
            if until > packed.len() {
                continue;
            }
            let packed = packed.slice(from..until);
            let (reader, last) = (Arc::clone(reader), Arc::clone(&last));
            let filled = filled.cloned();
            workers.submit(move || {
                // A reader of that span decodes it again and gets the error.
                if let Err(error) = reader.fill_range(range, packed, filled.as_deref()) {
                    tracing::debug!(%error, "cannot decode prefetched data");
                }
                drop(last);
            });
        }
    }
}

fn add_runs(
    batches: &mut Vec<Batch>,
    reader: &WindowReader<'_>,
    runs: Vec<Vec<WindowClaim>>,
    found: Option<&AtomicU64>,
) {
    if runs.is_empty() {
        count_span(found);
    }
    let missing_runs = Arc::new(AtomicUsize::new(runs.len()));
    for windows in runs {
        let range = SpanRange {
            packed: reader.packed_extent(&windows),
            claims: Vec::new(),
            windows,
            missing_runs: Some(Arc::clone(&missing_runs)),
        };
        add_range(batches, range);
    }
}

/// Adds a range that starts at a seek point to the last batch, or to a new one.
fn add_range(batches: &mut Vec<Batch>, range: SpanRange) {
    let packed = range.packed;
    if let Some(last) = batches.last_mut()
        && last.is_continued_by(&range)
        && let Some(whole) = Extent::new(last.packed.start(), packed.end().max(last.packed.end()))
        && whole.len() <= MAX_REQUEST_BYTES
    {
        last.packed = whole;
        last.ranges.push(range);
        return;
    }
    batches.push(Batch {
        packed,
        ranges: vec![range],
    });
}

/// Adds a span to the range that it is decoded from. Drops it if that range is missing.
fn extend_range(batches: &mut [Batch], end: Packed, claim: Claim<ReadError>) {
    let Some(batch) = batches.last_mut() else {
        return;
    };
    let spans = batch.span_count();
    let Some(range) = batch.ranges.last_mut() else {
        return;
    };
    let before = range.claims.last().map(Claim::span);
    if before.and_then(|before| before.checked_add(1)) != Some(claim.span())
        || spans >= MAX_REQUEST_SPANS
    {
        return;
    }
    if let Some(longer) = Extent::new(range.packed.start(), end)
        && let Some(whole) = Extent::new(batch.packed.start(), end)
        && whole.len() <= MAX_REQUEST_BYTES
    {
        range.packed = longer;
        batch.packed = whole;
        range.claims.push(claim);
    }
}
