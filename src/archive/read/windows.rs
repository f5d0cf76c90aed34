//! Windows: parts of spans, in which a remote uncompressed archive is read.
//! Plain byte *n* of such an archive is packed byte *n*, and the index has a digest of each block. So a cache
//! miss fetches only the aligned windows that the read needs. A read that continues the last fetch fetches
//! more, up to [`MAX_FETCH_BYTES`]. A sequential reader and [prefetch](super::batch) fetch whole spans.
//! Windows are cached in memory, and on disk at their plain offset, verified by these digests.

use std::collections::VecDeque;

use bytes::Bytes;

use super::Reader;
use super::assemble::SpanPart;
use super::decode_span::span_len;
use super::packed::{FetchMode, Request};
use super::single_flight::{Claim, FlightError};
use super::window_layout::{
    FETCH_GROWTH_FACTOR, LONG_READ_BYTES, Layout, MAX_FETCH_BYTES, WINDOW_BYTES, WindowClaim,
};
use crate::archive::error::{Error, ReadError};
use crate::base::buffer_pool::{Closed, Reservation};
use crate::base::extent::{Extent, Packed, Plain};
use crate::base::random_reads::Wait;
use crate::cache::QueueTimeout;
use crate::codec::Compression;
use crate::index::Index;
use crate::source::Access;

/// Windows of one span that prefetch must fetch.
pub(super) enum MissingWindows {
    All(Vec<WindowClaim>),
    /// Some windows, in runs without gaps. Empty if the others are cached or being fetched.
    Runs(Vec<Vec<WindowClaim>>),
}

impl Reader {
    /// Division of the archive into windows; `None` if reads use whole spans.
    pub(crate) fn layout(&self) -> Option<Layout> {
        let index = self.live_index.completed()?;
        let origin = index.origin();
        let is_windowed = origin.compression == Compression::None
            && self.packed.source().access() == Access::Ranges
            && !self.packed.source().can_read_inline();
        is_windowed.then(|| Layout {
            window_bytes: WINDOW_BYTES.max(index.block_len()),
            end: origin.packed_bytes,
        })
    }

    /// Reads `plain` from memory; `None` unless all of its windows are there.
    pub(super) fn cached_windows(&self, plain: Extent<Plain>) -> Option<Bytes> {
        let layout = self.layout()?;
        let windows = layout.windows(plain).map(|number| {
            let bytes = self.spans.window(number)?;
            Some((layout.window(number), bytes))
        });
        let windows: Option<Vec<_>> = windows.collect();
        self.join(plain, &windows?)
    }

    /// Reads `part` by windows, and fetches missing ones; `None` if the archive is not read by windows. Loads
    /// a whole span for a sequential reader if no window of it is cached.
    pub(super) fn read_windows(&self, part: &SpanPart) -> Result<Option<Bytes>, ReadError> {
        let Some(layout) = self.layout() else {
            return Ok(None);
        };
        // Prefetch that fills the span fetches all of its windows.
        if let Some(flight) = self.spans.flights().find(part.span)
            && let Some(bytes) = flight.wait()?
        {
            self.stats.memory_shared_spans.increment();
            let bytes = part.slice_of(&bytes);
            return bytes.map(Some).map_err(|_| ReadError::Index);
        }
        let span = self.indexed_span(part.span)?;
        span_len(&span)?;
        let span = span.plain;
        if part.plain.end().0 > layout.end {
            return Err(ReadError::Index);
        }
        let wanted = layout.windows(part.plain);
        let missing = wanted
            .clone()
            .find(|&number| !self.has_window(layout, number));
        let of_span = layout.windows_starting_in(span);
        // The kernel makes such long requests only for sequential readers.
        let is_long = part.plain.len() >= LONG_READ_BYTES;
        if let Some(missing) = missing
            && (is_long || self.is_sequential(layout, missing))
            && let Some(bytes) = self.read_span(layout, part, span, is_long)?
        {
            return Ok(Some(bytes));
        }
        let mut windows: Vec<(Extent<Plain>, Bytes)> = Vec::new();
        for number in wanted.clone() {
            let extent = layout.window(number);
            if windows.iter().all(|(found, _)| *found != extent) {
                let limits = (wanted.end, of_span.end);
                self.load_window(layout, number, limits, &mut windows)?;
            }
        }
        let bytes = self.join(part.plain, &windows);
        bytes.map(Some).ok_or(ReadError::Index)
    }

    /// Reads `part` from `span`, which is loaded as a whole. `None` if another part is damaged, or windows
    /// are in flight or cached, of which a long read may fetch one again.
    fn read_span(
        &self,
        layout: Layout,
        part: &SpanPart,
        span: Extent<Plain>,
        is_long: bool,
    ) -> Result<Option<Bytes>, ReadError> {
        let windows = layout.windows_starting_in(span);
        let is_missing = || {
            let present = windows
                .clone()
                .filter(|&number| self.has_window(layout, number));
            present.count() <= usize::from(is_long)
        };
        if !is_missing() {
            return Ok(None);
        }
        // The claims keep other reads from fetching windows of the span in the meantime.
        let claims = windows
            .clone()
            .map(|number| self.windows.single_flight.claim(number).ok());
        let Some(mut claims) = claims.collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        // Windows that were in flight just now may be cached.
        if !is_missing() {
            return Ok(None);
        }
        self.windows.recent.lock().add(windows.clone());
        match self.load_span(part.span) {
            Ok(bytes) => {
                self.complete_windows(span, &bytes, &mut claims);
                let bytes = part.slice_of(&bytes);
                bytes.map(Some).map_err(|_| ReadError::Index)
            }
            // Damage in other windows must not fail this read.
            Err(ReadError::Damaged { .. }) => Ok(None),
            Err(error) => {
                if error.is_shared() {
                    fail_all(claims, &error);
                }
                Err(error)
            }
        }
    }

    /// Adds window `number` to `found`, with all windows that are fetched together with it.
    /// A fetch covers missing windows at least up to the first of `limits`, and for a sequential reader at
    /// most up to the second, the end of the span.
    fn load_window(
        &self,
        layout: Layout,
        number: u64,
        limits: (u64, u64),
        found: &mut Vec<(Extent<Plain>, Bytes)>,
    ) -> Result<(), ReadError> {
        let extent = layout.window(number);
        let bytes = loop {
            if self.read_priority.is_closed() {
                return Err(self.read_error_at(extent, Error::Interrupted));
            }
            let claim = match self.windows.single_flight.claim(number) {
                Ok(claim) => claim,
                Err(flight) => match flight.wait()? {
                    Some(bytes) => {
                        self.stats.memory_shared_spans.increment();
                        break bytes;
                    }
                    // The fetch failed for its own reason, or another fetch cached the window.
                    None => continue,
                },
            };
            if let Some(bytes) = self.cached_window(layout, number) {
                self.stats.memory_hit_spans.increment();
                claim.complete(bytes.clone());
                break bytes;
            }
            if let Some(bytes) = self.window_from_disk_cache(extent) {
                claim.complete(bytes.clone());
                break bytes;
            }
            let claims = self.claim_neighbours(layout, claim, limits);
            found.extend(self.fetch_windows(layout, number, claims)?);
            return Ok(());
        };
        found.push((extent, bytes));
        Ok(())
    }

    /// Window `number` from memory, cached by itself or as a part of a span.
    fn cached_window(&self, layout: Layout, number: u64) -> Option<Bytes> {
        if let Some(bytes) = self.spans.window(number) {
            return Some(bytes);
        }
        let (span, plain) = self.span_containing(layout.window(number))?;
        let bytes = self.spans.get(span)?;
        slice_extent(plain, &bytes, layout.window(number))
    }

    fn span_containing(&self, extent: Extent<Plain>) -> Option<(u32, Extent<Plain>)> {
        let find = |index: &Index| {
            let span = index.span_at(extent.start())?;
            Some((span, index.span_extent(span)?))
        };
        let (span, plain) = self.read_index(find).ok()??;
        (plain.intersection(&extent) == Some(extent)).then_some((span, plain))
    }

    /// Whether window `number` seems to be cached, without reading it.
    fn has_window(&self, layout: Layout, number: u64) -> bool {
        let extent = layout.window(number);
        if self.spans.contains_window(number) {
            return true;
        }
        let span = self.span_containing(extent);
        if span.is_some_and(|(span, _)| self.spans.contains(span)) {
            return true;
        }
        self.spans.is_on_disk(&self.live_index, extent) && self.is_digested_extent(extent)
    }

    fn window_from_disk_cache(&self, extent: Extent<Plain>) -> Option<Bytes> {
        let disk_cache = self.spans.disk()?;
        let request = self.whole_request(extent).ok()?;
        if !request.blocks.are_all_digested() {
            return None;
        }
        // Reads in parts, because a queued write may hold the window together with others.
        let sparse = self.spans.sparse(&self.live_index, extent);
        let bytes = disk_cache
            .covers(&sparse)
            .then(|| disk_cache.read_part(&sparse, Wait::ForDisk));
        let bytes = bytes??;
        if request.blocks.mismatch(&bytes).is_some() {
            self.stats.disk_cache_damaged_spans.increment();
            return None;
        }
        disk_cache.mark_used(extent);
        self.stats.disk_cache_hit_spans.increment();
        self.stats.disk_cache_read_bytes.add(sparse.stored_bytes());
        Some(bytes)
    }

    /// Claims the windows next to `claim` that are worth fetching with it. That is up to `end`, and up to
    /// `span_end` for a read that continues a fetch. If half of the group is cached, it claims the rest.
    fn claim_neighbours(
        &self,
        layout: Layout,
        claim: WindowClaim,
        (end, span_end): (u64, u64),
    ) -> VecDeque<WindowClaim> {
        let number = claim.span();
        let group = layout.group(number);
        let present = group
            .clone()
            .filter(|&other| self.has_window(layout, other));
        let is_half_present = present.count() as u64 * 2 >= group.end.saturating_sub(group.start);
        let max = layout.max_windows();
        let len = match self.windows.recent.lock().next_len(number, max) {
            1 if self.continues_all(layout, number) => max,
            len => len,
        };
        let archive_end = layout.end.div_ceil(layout.window_bytes);
        let growth_end = number.saturating_add(len).min(span_end);
        let mut wanted = number..end.max(growth_end).min(archive_end);
        if is_half_present {
            wanted = group.start..wanted.end.max(group.end);
        }
        let mut claims = VecDeque::from([claim]);
        for after in number.saturating_add(1)..wanted.end {
            match self.claim_missing(layout, after) {
                Some(claim) => claims.push_back(claim),
                None => break,
            }
        }
        for before in (wanted.start..number).rev() {
            match self.claim_missing(layout, before) {
                Some(claim) => claims.push_front(claim),
                None => break,
            }
        }
        let first = claims.front().map_or(number, Claim::span);
        let fetched = first..first.saturating_add(claims.len() as u64);
        self.windows.recent.lock().add(fetched);
        claims
    }

    fn is_sequential(&self, layout: Layout, number: u64) -> bool {
        let len = self.windows.recent.lock().next_len(number, u64::MAX);
        len > FETCH_GROWTH_FACTOR || len == 1 && self.continues_all(layout, number)
    }

    /// Whether the windows before `number` are cached, as many as one fetch can cover.
    fn continues_all(&self, layout: Layout, number: u64) -> bool {
        let mut before = number.saturating_sub(layout.max_windows())..number;
        !before.is_empty() && before.all(|other| self.has_window(layout, other))
    }

    fn claim_missing(&self, layout: Layout, number: u64) -> Option<WindowClaim> {
        let claim = self.windows.single_flight.claim(number).ok()?;
        // Checked after the claim, because the window may just have been fetched.
        (!self.has_window(layout, number)).then_some(claim)
    }

    /// Fetches adjacent windows, for a read that needs window `number`; if some are damaged, only this one.
    /// An error that other readers would also meet is shared with the readers that wait.
    fn fetch_windows(
        &self,
        layout: Layout,
        number: u64,
        mut claims: VecDeque<WindowClaim>,
    ) -> Result<Vec<(Extent<Plain>, Bytes)>, ReadError> {
        let _active_read = self.read_priority.start_read();
        self.stats.memory_miss_spans.increment();
        if self.spans.disk().is_some() {
            self.stats.disk_cache_miss_spans.increment();
        }
        let extent = layout.claimed_extent(claims.front(), claims.len());
        // The network path may have corrupted the bytes, so a retry uses another path.
        let mut fetched = self.fetch_extent(extent, FetchMode::Normal);
        if let Err(ReadError::Damaged { .. }) = fetched {
            fetched = self.fetch_extent(extent, FetchMode::Refetch);
        }
        if let Err(ReadError::Damaged { .. }) = fetched
            && claims.len() > 1
        {
            claims.retain(|claim| claim.span() == number);
            fetched = self.fetch_extent(layout.window(number), FetchMode::Refetch);
        }
        let (bytes, _reserved) = match fetched {
            Ok(fetched) => fetched,
            Err(error) => {
                // Damage is now known to be in this window, the only one that is still claimed.
                if error.is_shared() || matches!(error, ReadError::Damaged { .. }) {
                    fail_all(claims, &error);
                }
                return Err(error);
            }
        };
        // A sequential reader must not wait, because it would become as slow as the disk.
        let disk_wait = if extent.len() < MAX_FETCH_BYTES {
            QueueTimeout::Short
        } else {
            QueueTimeout::NoWait
        };
        Ok(self.cache_windows(layout, claims.into(), &bytes, disk_wait, true))
    }

    fn fetch_extent(
        &self,
        extent: Extent<Plain>,
        mode: FetchMode,
    ) -> Result<(Bytes, Reservation), ReadError> {
        let read_error = |error: Error| self.read_error_at(extent, error);
        let request = self.whole_request(extent)?;
        // Memory for the bytes as fetched, and as cached.
        let reserved = self.budget.reserve(2 * request.buffer_bytes());
        let reserved = reserved.map_err(|Closed| read_error(Error::Interrupted))?;
        let bytes = self
            .packed
            .fetch_verified(&request, mode)
            .map_err(read_error)?;
        Ok((bytes, reserved))
    }

    /// Caches verified adjacent windows, and completes `claims`. `can_evict` allows disk cache evictions.
    pub(super) fn cache_windows(
        &self,
        layout: Layout,
        claims: Vec<WindowClaim>,
        bytes: &Bytes,
        disk_wait: QueueTimeout,
        can_evict: bool,
    ) -> Vec<(Extent<Plain>, Bytes)> {
        let extent = layout.claimed_extent(claims.first(), claims.len());
        // Bytes without digests cannot be verified when they are read back.
        if let Some(disk_cache) = self.spans.disk()
            && self.is_digested_extent(extent)
        {
            if can_evict {
                disk_cache.insert_evicting(
                    self.spans.sparse(&self.live_index, extent),
                    bytes.clone(),
                    disk_wait,
                );
            } else {
                disk_cache.insert(
                    self.spans.sparse(&self.live_index, extent),
                    bytes.clone(),
                    disk_wait,
                );
            }
        }
        let cache = |claim: WindowClaim| {
            let window = layout.window(claim.span());
            // Copies, because a slice would keep all bytes of the fetch in memory.
            let bytes = Bytes::copy_from_slice(&slice_extent(extent, bytes, window)?);
            self.spans.insert_window(claim.span(), bytes.clone());
            claim.complete(bytes.clone());
            Some((window, bytes))
        };
        claims.into_iter().filter_map(cache).collect()
    }

    pub(super) fn complete_windows(
        &self,
        span: Extent<Plain>,
        bytes: &Bytes,
        claims: &mut Vec<WindowClaim>,
    ) {
        let Some(layout) = self.layout() else { return };
        for claim in claims.drain(..) {
            if let Some(window) = slice_extent(span, bytes, layout.window(claim.span())) {
                claim.complete(window);
            }
        }
    }

    /// Claims missing windows of `span` that begin at or after `from`; all if the disk cache `is_damaged`.
    pub(super) fn missing_windows(
        &self,
        layout: Layout,
        span: Extent<Plain>,
        from: Plain,
        is_damaged: bool,
    ) -> MissingWindows {
        let windows = layout.windows(span);
        let first = windows.start.max(from.0 / layout.window_bytes);
        let mut runs: Vec<Vec<WindowClaim>> = Vec::new();
        let mut is_all = first == windows.start;
        for number in first..windows.end {
            let claim = if is_damaged {
                self.windows.single_flight.claim(number).ok()
            } else {
                self.claim_missing(layout, number)
            };
            let Some(claim) = claim else {
                is_all = false;
                continue;
            };
            let last = runs.last().and_then(|run| run.last()).map(Claim::span);
            match runs.last_mut() {
                Some(run) if last.and_then(|last| last.checked_add(1)) == Some(number) => {
                    run.push(claim);
                }
                _ => runs.push(vec![claim]),
            }
        }
        if is_all {
            MissingWindows::All(runs.into_iter().flatten().collect())
        } else {
            MissingWindows::Runs(runs)
        }
    }

    fn is_digested_extent(&self, extent: Extent<Plain>) -> bool {
        let request = self.whole_request(extent);
        request.is_ok_and(|request| request.blocks.are_all_digested())
    }

    /// Builds a [`Reader::request`] for an extent that the index must cover completely.
    fn whole_request(&self, extent: Extent<Plain>) -> Result<Request, ReadError> {
        let request = self.request(packed_extent(extent))?;
        if request.extent.len() == extent.len() {
            Ok(request)
        } else {
            Err(ReadError::Index)
        }
    }

    /// Joins `wanted` from pieces that cover it, in any order.
    fn join(&self, wanted: Extent<Plain>, pieces: &[(Extent<Plain>, Bytes)]) -> Option<Bytes> {
        let find = |at: Plain| {
            let (extent, bytes) = pieces
                .iter()
                .find(|(extent, _)| extent.start() <= at && at < extent.end())?;
            let rest = Extent::new(at, wanted.end())?.intersection(extent)?;
            Some((rest, slice_extent(*extent, bytes, rest)?))
        };
        let (first, bytes) = find(wanted.start())?;
        if first == wanted {
            return Some(bytes);
        }
        let mut joined = self
            .free_list
            .allocate_empty(usize::try_from(wanted.len()).ok()?, 0);
        joined.append(&bytes);
        let mut at = first.end();
        while at < wanted.end() {
            let (part, bytes) = find(at)?;
            joined.append(&bytes);
            at = part.end();
        }
        Some(joined.freeze())
    }
}

fn fail_all(claims: impl IntoIterator<Item = WindowClaim>, error: &ReadError) {
    for claim in claims {
        claim.fail(error.clone());
    }
}

fn slice_extent(extent: Extent<Plain>, bytes: &Bytes, wanted: Extent<Plain>) -> Option<Bytes> {
    let start = usize::try_from(wanted.start().0.checked_sub(extent.start().0)?).ok()?;
    let end = start.checked_add(usize::try_from(wanted.len()).ok()?)?;
    (end <= bytes.len()).then(|| bytes.slice(start..end))
}

pub(super) fn packed_extent(plain: Extent<Plain>) -> Extent<Packed> {
    Extent::with_len(Packed(plain.start().0), plain.len())
}
