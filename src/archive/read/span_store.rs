//! Stored spans and windows of one archive: in memory, in the disk cache, and being filled.

use std::sync::Arc;

use bytes::Bytes;

use super::single_flight::SingleFlight;
use crate::archive::error::ReadError;
use crate::archive::live_index::LiveIndex;
use crate::base::extent::{Extent, Plain};
use crate::base::sync::{Mutex, MutexGuard};
use crate::cache::{CacheKey, DiskCache, SpanCache, SpanKey, SparseExtent};
use crate::index::Index;

/// The decoded spans and windows of one archive.
#[derive(Debug)]
pub(crate) struct SpanStore {
    memory: SpanCache,
    /// Owner of this archive's spans in `memory`, which layers share.
    owner: u32,
    disk: Option<Arc<DiskCache>>,
    /// Whether zeros of the index are zeros of the source: this user scanned this version of it.
    proves_zeros: bool,
    flights: SingleFlight<ReadError>,
    far_decode_lock: Mutex<()>,
}

impl SpanStore {
    pub(crate) fn new(
        memory: SpanCache,
        owner: u32,
        disk: Option<Arc<DiskCache>>,
        proves_zeros: bool,
    ) -> Self {
        Self {
            memory,
            owner,
            disk,
            proves_zeros,
            flights: SingleFlight::default(),
            far_decode_lock: Mutex::default(),
        }
    }

    /// Span `number` from memory.
    pub(super) fn get(&self, number: u32) -> Option<Bytes> {
        self.memory.get(self.key(number))
    }

    /// Whether span `number` is in memory. The check does not count as a read.
    pub(super) fn contains(&self, number: u32) -> bool {
        self.memory.contains(self.key(number))
    }

    pub(super) fn insert(&self, number: u32, bytes: Bytes) {
        self.memory.insert(self.key(number), bytes);
    }

    /// Window `number` from memory.
    pub(super) fn window(&self, number: u64) -> Option<Bytes> {
        self.memory.get(self.window_key(number))
    }

    /// Whether window `number` is in memory. The check does not count as a read.
    pub(super) fn contains_window(&self, number: u64) -> bool {
        self.memory.contains(self.window_key(number))
    }

    pub(super) fn insert_window(&self, number: u64, bytes: Bytes) {
        self.memory.insert(self.window_key(number), bytes);
    }

    fn key(&self, span: u32) -> SpanKey {
        let span_owner = self.owner;
        SpanKey { span_owner, span }
    }

    fn window_key(&self, window: u64) -> CacheKey {
        let span_owner = self.owner;
        CacheKey::Window { span_owner, window }
    }

    /// The span cache, which other archives may use, too.
    pub(crate) fn memory(&self) -> &SpanCache {
        &self.memory
    }

    /// Owner of this archive's spans in [`Self::memory`].
    pub(crate) fn owner(&self) -> u32 {
        self.owner
    }

    pub(crate) fn disk(&self) -> Option<&Arc<DiskCache>> {
        self.disk.as_ref()
    }

    /// The spans that are being filled.
    pub(super) fn flights(&self) -> &SingleFlight<ReadError> {
        &self.flights
    }

    /// Lock of a decode from far away. A second reader may then find its span in the disk cache.
    pub(super) fn lock_far_decode(&self) -> MutexGuard<'_, ()> {
        self.far_decode_lock.lock()
    }

    /// Whether the disk cache has all of `extent`, perhaps damaged.
    pub(super) fn is_on_disk(&self, index: &LiveIndex, extent: Extent<Plain>) -> bool {
        let disk_cache = self.disk.as_ref();
        disk_cache.is_some_and(|disk_cache| disk_cache.covers(&self.sparse(index, extent)))
    }

    /// `extent` with the runs of zeros that need no place on disk. There are none unless [`Self::proves_zeros`],
    /// because another writer of an index could turn any bytes into zeros.
    pub(super) fn sparse(&self, index: &LiveIndex, extent: Extent<Plain>) -> SparseExtent {
        if !self.proves_zeros {
            return extent.into();
        }
        let sparse = index.read(|index| {
            let first = index.span_at(extent.start())?;
            let spans = (first..index.span_count()).take_while(|&number| {
                let span = index.span_extent(number);
                span.is_some_and(|span| span.start() < extent.end())
            });
            let runs = spans.flat_map(|number| zero_runs_of(index, number));
            Some(SparseExtent::new(extent, runs))
        });
        sparse.ok().flatten().unwrap_or_else(|| extent.into())
    }

    /// Bytes of the archive that are stored if the disk cache has all of it.
    pub(crate) fn stored_bytes(&self, index: &Index) -> u64 {
        let all = index.origin().plain_bytes;
        if !self.proves_zeros {
            return all;
        }
        let runs = (0..index.span_count()).flat_map(|number| zero_runs_of(index, number));
        all.saturating_sub(runs.map(|run| run.len()).sum())
    }

    pub(super) fn proves_zeros(&self) -> bool {
        self.proves_zeros
    }
}

fn zero_runs_of(index: &Index, span: u32) -> Vec<Extent<Plain>> {
    let checksums = index.span_checksums(span).ok().flatten();
    checksums.map_or_else(Vec::new, |checksums| checksums.zero_runs())
}
