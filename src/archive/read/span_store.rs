//! Stored spans and windows of one archive: in memory, in the disk cache, and being filled.

use std::sync::Arc;

use bytes::Bytes;

use super::single_flight::SingleFlight;
use crate::archive::error::ReadError;
use crate::base::sync::{Mutex, MutexGuard};
use crate::cache::{CacheKey, DiskCache, SpanCache, SpanKey};

/// The decoded spans and windows of one archive.
#[derive(Debug)]
pub(crate) struct SpanStore {
    memory: SpanCache,
    /// Owner of this archive's spans in `memory`, which layers share.
    owner: u32,
    disk: Option<Arc<DiskCache>>,
    flights: SingleFlight<ReadError>,
    far_decode_lock: Mutex<()>,
}

impl SpanStore {
    pub(crate) fn new(memory: SpanCache, owner: u32, disk: Option<Arc<DiskCache>>) -> Self {
        Self {
            memory,
            owner,
            disk,
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
}
