//! Windows: parts of spans, in which a remote uncompressed archive is read.
//! Plain byte *n* of such an archive is packed byte *n*, and the index has a digest of each block. So a cache
//! miss fetches only the aligned windows that the read needs. A read that continues the last fetch fetches
//! more, up to [`MAX_FETCH_BYTES`]. A sequential reader and [prefetch](super::batch) fetch whole spans.
//! Windows are cached in memory, and on disk at their plain offset, verified by these digests.

use std::collections::VecDeque;
use std::time::Instant;

use bytes::Bytes;

use super::assemble::{SpanPart, span_len};
use super::packed::{FetchMode, PackedReader, Request};
use super::priority::ReadPriority;
use super::single_flight::{Claim, FlightError, SingleFlight};
use super::span_store::SpanStore;
use super::window_layout::{
    FETCH_GROWTH_FACTOR, LONG_READ_BYTES, Layout, MAX_FETCH_BYTES, RecentFetches, WindowClaim,
};
use crate::archive::error::{Error, ReadError};
use crate::archive::live_index::LiveIndex;
use crate::base::buffer_pool::{BufferPool, Closed, Reservation};
use crate::base::extent::{Extent, Packed, Plain};
use crate::base::free_list::FreeList;
use crate::base::random_reads::Wait;
use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::cache::QueueTimeout;
use crate::index::Index;

/// Windows of one span that prefetch must fetch.
pub(super) enum MissingWindows {
    All(Vec<WindowClaim>),
    /// Some windows, in runs without gaps. Empty if the others are cached or being fetched.
    Runs(Vec<Vec<WindowClaim>>),
}

/// The windows that are being fetched, and the recent fetches.
#[derive(Debug, Default)]
pub(crate) struct WindowFetches {
    single_flight: SingleFlight<ReadError, u64>,
    recent: Mutex<RecentFetches>,
}

/// Reads a remote uncompressed archive by windows.
pub(crate) struct WindowReader<'a> {
    pub(super) layout: Layout,
    pub(super) live_index: &'a LiveIndex,
    pub(super) packed: &'a PackedReader,
    pub(super) spans: &'a SpanStore,
    pub(super) fetches: &'a WindowFetches,
    pub(super) read_priority: &'a ReadPriority,
    pub(super) budget: &'a BufferPool,
    pub(super) free_list: &'a FreeList,
    pub(super) stats: &'a Stats,
}

impl WindowReader<'_> {
    /// The windows around `plain`, whole.
    pub(super) fn align(&self, plain: Extent<Plain>) -> Extent<Plain> {
        self.layout.extent(&self.layout.windows(plain))
    }

    /// The packed bytes of adjacent claimed windows.
    pub(super) fn packed_extent(&self, claims: &[WindowClaim]) -> Extent<Packed> {
        packed_extent(self.layout.claimed_extent(claims.first(), claims.len()))
    }

    /// Reads `plain` from memory; `None` unless all of its windows are there.
    pub(super) fn cached(&self, plain: Extent<Plain>) -> Option<Bytes> {
        let cached = |number| Some((self.layout.window(number), self.spans.window(number)?));
        let windows: Option<Vec<_>> = self.layout.windows(plain).map(cached).collect();
        self.join(plain, &windows?)
    }

    /// Reads `part`, and fetches missing windows. For a sequential reader, `load_span` loads the whole span if no
    /// window of it is cached.
    pub(super) fn read(
        &self,
        part: &SpanPart,
        load_span: impl FnOnce() -> Result<Bytes, ReadError>,
    ) -> Result<Bytes, ReadError> {
        // Prefetch that fills the span fetches all of its windows.
        if let Some(flight) = self.spans.flights().find(part.span)
            && let Some(bytes) = flight.wait()?
        {
            self.stats.memory_shared_spans.increment();
            return part.slice_of(&bytes);
        }
        let span = self.live_index.span(part.span)?;
        span_len(&span)?;
        let span = span.plain;
        if part.plain.end().0 > self.layout.end {
            return Err(ReadError::Index);
        }
        let wanted = self.layout.windows(part.plain);
        let missing = wanted.clone().find(|&number| !self.has_window(number));
        let of_span = self.layout.windows_starting_in(span);
        // The kernel makes such long requests only for sequential readers.
        let is_long = part.plain.len() >= LONG_READ_BYTES;
        if let Some(missing) = missing
            && (is_long || self.is_sequential(missing))
            && let Some(bytes) = self.read_span(part, span, is_long, load_span)?
        {
            return Ok(bytes);
        }
        let mut windows: Vec<(Extent<Plain>, Bytes)> = Vec::new();
        for number in wanted.clone() {
            let extent = self.layout.window(number);
            if windows.iter().all(|(found, _)| *found != extent) {
                let limits = (wanted.end, of_span.end);
                self.load_window(number, limits, &mut windows)?;
            }
        }
        self.join(part.plain, &windows).ok_or(ReadError::Index)
    }

    /// Reads `part` from `span`, which `load_span` loads as a whole. `None` if another part is damaged, or windows
    /// are in flight or cached, of which a long read may fetch one again.
    fn read_span(
        &self,
        part: &SpanPart,
        span: Extent<Plain>,
        is_long: bool,
        load_span: impl FnOnce() -> Result<Bytes, ReadError>,
    ) -> Result<Option<Bytes>, ReadError> {
        let windows = self.layout.windows_starting_in(span);
        let is_missing = || {
            let present = windows.clone().filter(|&number| self.has_window(number));
            present.count() <= usize::from(is_long)
        };
        if !is_missing() {
            return Ok(None);
        }
        // The claims keep other reads from fetching windows of the span in the meantime.
        let claims = windows
            .clone()
            .map(|number| self.fetches.single_flight.claim(number).ok());
        let Some(mut claims) = claims.collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        // Windows that were in flight just now may be cached.
        if !is_missing() {
            return Ok(None);
        }
        self.fetches.recent.lock().add(windows.clone());
        match load_span() {
            Ok(bytes) => {
                self.complete(span, &bytes, &mut claims);
                part.slice_of(&bytes).map(Some)
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
        number: u64,
        limits: (u64, u64),
        found: &mut Vec<(Extent<Plain>, Bytes)>,
    ) -> Result<(), ReadError> {
        let extent = self.layout.window(number);
        let bytes = loop {
            if self.read_priority.is_closed() {
                return Err(ReadError::at(self.stats, extent, Error::Interrupted));
            }
            let claim = match self.fetches.single_flight.claim(number) {
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
            if let Some(bytes) = self.cached_window(number) {
                self.stats.memory_hit_spans.increment();
                claim.complete(bytes.clone());
                break bytes;
            }
            if let Some(bytes) = self.window_from_disk_cache(extent) {
                claim.complete(bytes.clone());
                break bytes;
            }
            let claims = self.claim_neighbours(claim, limits);
            found.extend(self.fetch_windows(number, claims)?);
            return Ok(());
        };
        found.push((extent, bytes));
        Ok(())
    }

    /// Window `number` from memory, cached by itself or as a part of a span.
    fn cached_window(&self, number: u64) -> Option<Bytes> {
        if let Some(bytes) = self.spans.window(number) {
            return Some(bytes);
        }
        let (span, plain) = self.span_containing(self.layout.window(number))?;
        let bytes = self.spans.get(span)?;
        slice_extent(plain, &bytes, self.layout.window(number))
    }

    fn span_containing(&self, extent: Extent<Plain>) -> Option<(u32, Extent<Plain>)> {
        let find = |index: &Index| {
            let span = index.span_at(extent.start())?;
            Some((span, index.span_extent(span)?))
        };
        let (span, plain) = self.live_index.read(find).ok()??;
        (plain.intersection(&extent) == Some(extent)).then_some((span, plain))
    }

    /// Whether window `number` seems to be cached, without reading it.
    fn has_window(&self, number: u64) -> bool {
        let extent = self.layout.window(number);
        let is_in_span = |(span, _)| self.spans.contains(span);
        self.spans.contains_window(number)
            || self.span_containing(extent).is_some_and(is_in_span)
            || self.spans.is_on_disk(self.live_index, extent) && self.is_digested_extent(extent)
    }

    fn window_from_disk_cache(&self, extent: Extent<Plain>) -> Option<Bytes> {
        let disk_cache = self.spans.disk()?;
        let request = self.whole_request(extent).ok()?;
        let sparse = self.spans.sparse(self.live_index, extent);
        if !request.blocks.are_all_digested() || !disk_cache.covers(&sparse) {
            return None;
        }
        // Reads in parts, because a queued write may hold the window together with others.
        let bytes = disk_cache.read_part(&sparse, Wait::ForDisk)?;
        if request.blocks.mismatch(&bytes).is_some() {
            self.stats.disk_cache_damaged_spans.increment();
            return None;
        }
        disk_cache.mark_used(&sparse);
        self.stats.disk_cache_hit_spans.increment();
        self.stats.disk_cache_read_bytes.add(sparse.stored_bytes());
        Some(bytes)
    }

    /// Claims the windows next to `claim` that are worth fetching with it. That is up to `end`, and up to
    /// `span_end` for a read that continues a fetch. If half of the group is cached, it claims the rest.
    fn claim_neighbours(
        &self,
        claim: WindowClaim,
        (end, span_end): (u64, u64),
    ) -> VecDeque<WindowClaim> {
        let number = claim.span();
        let group = self.layout.group(number);
        let present = group.clone().filter(|&other| self.has_window(other));
        let is_half_present = present.count() as u64 * 2 >= group.end.saturating_sub(group.start);
        let max = self.layout.max_windows();
        let len = match self.fetches.recent.lock().next_len(number, max) {
            1 if self.continues_all(number) => max,
            len => len,
        };
        let archive_end = self.layout.window_count();
        let growth_end = number.saturating_add(len).min(span_end);
        let mut wanted = number..end.max(growth_end).min(archive_end);
        if is_half_present {
            wanted = group.start..wanted.end.max(group.end);
        }
        let mut claims = VecDeque::from([claim]);
        let after = number.saturating_add(1)..wanted.end;
        claims.extend(after.map_while(|other| self.claim_missing(other)));
        let before = (wanted.start..number).rev();
        for claim in before.map_while(|other| self.claim_missing(other)) {
            claims.push_front(claim);
        }
        let first = claims.front().map_or(number, Claim::span);
        let fetched = first..first.saturating_add(claims.len() as u64);
        self.fetches.recent.lock().add(fetched);
        claims
    }

    fn is_sequential(&self, number: u64) -> bool {
        let len = self.fetches.recent.lock().next_len(number, u64::MAX);
        len > FETCH_GROWTH_FACTOR || len == 1 && self.continues_all(number)
    }

    /// Whether the windows before `number` are cached, as many as one fetch can cover.
    fn continues_all(&self, number: u64) -> bool {
        let mut before = number.saturating_sub(self.layout.max_windows())..number;
        !before.is_empty() && before.all(|other| self.has_window(other))
    }

    fn claim_missing(&self, number: u64) -> Option<WindowClaim> {
        let claim = self.fetches.single_flight.claim(number).ok()?;
        // Checked after the claim, because the window may just have been fetched.
        (!self.has_window(number)).then_some(claim)
    }

    /// Fetches adjacent windows, for a read that needs window `number`; if some are damaged, only this one.
    /// An error that other readers would also meet is shared with the readers that wait.
    fn fetch_windows(
        &self,
        number: u64,
        mut claims: VecDeque<WindowClaim>,
    ) -> Result<Vec<(Extent<Plain>, Bytes)>, ReadError> {
        let _active_read = self.read_priority.start_read();
        self.stats.memory_miss_spans.increment();
        if self.spans.disk().is_some() {
            self.stats.disk_cache_miss_spans.increment();
        }
        let extent = self.layout.claimed_extent(claims.front(), claims.len());
        // The network path may have corrupted the bytes, so a retry uses another path.
        let mut fetched = self.fetch_extent(extent, FetchMode::Normal);
        if let Err(ReadError::Damaged { .. }) = fetched {
            fetched = self.fetch_extent(extent, FetchMode::Refetch);
        }
        if let Err(ReadError::Damaged { .. }) = fetched
            && claims.len() > 1
        {
            claims.retain(|claim| claim.span() == number);
            fetched = self.fetch_extent(self.layout.window(number), FetchMode::Refetch);
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
        Ok(self.cache(claims.into(), &bytes, disk_wait, true))
    }

    fn fetch_extent(
        &self,
        extent: Extent<Plain>,
        mode: FetchMode,
    ) -> Result<(Bytes, Reservation), ReadError> {
        let read_error = |error: Error| ReadError::at(self.stats, extent, error);
        let request = self.whole_request(extent)?;
        // Memory for the bytes as fetched, and as cached.
        let reserved = self.budget.reserve(2 * request.buffer_bytes());
        let reserved = reserved.map_err(|Closed| read_error(Error::Interrupted))?;
        let start = Instant::now();
        let fetched = self.packed.fetch_verified(&request, mode);
        self.stats.fill_nanoseconds.add_time_since(start);
        Ok((fetched.map_err(read_error)?, reserved))
    }

    /// Caches verified adjacent windows, and completes `claims`. `can_evict` allows disk cache evictions.
    pub(super) fn cache(
        &self,
        claims: Vec<WindowClaim>,
        bytes: &Bytes,
        disk_wait: QueueTimeout,
        can_evict: bool,
    ) -> Vec<(Extent<Plain>, Bytes)> {
        let extent = self.layout.claimed_extent(claims.first(), claims.len());
        self.stats.filled_bytes.add(extent.len());
        // Bytes without digests cannot be verified when they are read back.
        if let Some(disk_cache) = self.spans.disk()
            && self.is_digested_extent(extent)
        {
            let sparse = self.spans.sparse(self.live_index, extent);
            if can_evict {
                disk_cache.insert_evicting(sparse, bytes.clone(), 1, disk_wait);
            } else {
                disk_cache.insert(sparse, bytes.clone(), disk_wait);
            }
        }
        let cache = |claim: WindowClaim| {
            let window = self.layout.window(claim.span());
            // Copies, because a slice would keep all bytes of the fetch in memory.
            let bytes = Bytes::copy_from_slice(&slice_extent(extent, bytes, window)?);
            self.spans.insert_window(claim.span(), bytes.clone());
            claim.complete(bytes.clone());
            Some((window, bytes))
        };
        claims.into_iter().filter_map(cache).collect()
    }

    pub(super) fn complete(
        &self,
        span: Extent<Plain>,
        bytes: &Bytes,
        claims: &mut Vec<WindowClaim>,
    ) {
        for claim in claims.drain(..) {
            if let Some(window) = slice_extent(span, bytes, self.layout.window(claim.span())) {
                claim.complete(window);
            }
        }
    }

    /// Claims missing windows of `span` that begin at or after `from`; all if the disk cache `is_damaged`.
    pub(super) fn missing(
        &self,
        span: Extent<Plain>,
        from: Plain,
        is_damaged: bool,
    ) -> MissingWindows {
        let windows = self.layout.windows(span);
        let first = windows.start.max(from.0 / self.layout.window_bytes);
        let claim = |number| {
            let claim = self.fetches.single_flight.claim(number).ok();
            claim.filter(|_| is_damaged || !self.has_window(number))
        };
        let claims: Vec<_> = (first..windows.end).filter_map(claim).collect();
        if claims.len() as u64 == windows.end - windows.start {
            return MissingWindows::All(claims);
        }
        let mut runs: Vec<Vec<WindowClaim>> = Vec::new();
        for claim in claims {
            match runs.last_mut() {
                Some(run) if run.last().map(Claim::span) == claim.span().checked_sub(1) => {
                    run.push(claim);
                }
                _ => runs.push(vec![claim]),
            }
        }
        MissingWindows::Runs(runs)
    }

    fn is_digested_extent(&self, extent: Extent<Plain>) -> bool {
        let request = self.whole_request(extent);
        request.is_ok_and(|request| request.blocks.are_all_digested())
    }

    /// The request for an extent that the index must cover completely.
    fn whole_request(&self, extent: Extent<Plain>) -> Result<Request, ReadError> {
        let request = Request::find(self.live_index, packed_extent(extent))?;
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

fn packed_extent(plain: Extent<Plain>) -> Extent<Packed> {
    Extent::with_len(Packed(plain.start().0), plain.len())
}
