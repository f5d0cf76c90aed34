//! LRU cache of spans in memory, bounded in bytes.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use moka::policy::EvictionPolicy;

use super::CacheKey;
use crate::base::memory_reclaim::Reclaim;

/// LRU cache of decoded spans and windows. Clones share one cache.
#[derive(Clone)]
pub(crate) struct SpanCache {
    spans: moka::sync::Cache<CacheKey, Bytes>,
    budget: u64,
    granted: Arc<AtomicU64>,
}

/// Bytes of the cache's own bookkeeping for each entry.
const ENTRY_OVERHEAD_BYTES: u32 = 256;

impl SpanCache {
    /// Creates a cache of at most `budget` bytes, which keeps no larger span.
    pub(crate) fn new(budget: u64) -> Self {
        let spans = moka::sync::Cache::builder()
            .max_capacity(budget)
            // Not LFU, because spans read often must not evict the newest, which a reader still needs.
            .eviction_policy(EvictionPolicy::lru())
            .weigher(|_, span| weight(span))
            .build();
        let granted = Arc::default();
        Self {
            spans,
            budget,
            granted,
        }
    }

    pub(crate) fn get(&self, key: impl Into<CacheKey>) -> Option<Bytes> {
        self.spans.get(&key.into())
    }

    /// Whether `key` is cached. The check does not count as a read.
    pub(crate) fn contains(&self, key: impl Into<CacheKey>) -> bool {
        self.spans.contains_key(&key.into())
    }

    pub(crate) fn budget(&self) -> u64 {
        self.budget
    }

    /// Bytes of the limit that are not lent.
    pub(crate) fn available_bytes(&self) -> u64 {
        self.budget
            .saturating_sub(self.granted.load(Ordering::Relaxed))
    }

    /// Caches the bytes of `key`, which should own their memory: a slice's whole allocation is not charged.
    pub(crate) fn insert(&self, key: impl Into<CacheKey>, bytes: Bytes) {
        // Bytes that exceed the available budget must not evict others.
        if bytes.len() as u64 <= self.available_bytes() {
            self.spans.insert(key.into(), bytes);
            self.evict_excess();
        }
    }

    /// Evicts at once what exceeds the budget. The cache itself would first exceed it by dozens of spans.
    fn evict_excess(&self) {
        self.spans.run_pending_tasks();
        let granted = self.granted.load(Ordering::Relaxed);
        if granted > 0 {
            self.evict_to(self.budget.saturating_sub(granted));
        }
    }

    fn evict_to(&self, limit: u64) {
        let mut kept = self.spans.weighted_size();
        for (key, span) in &self.spans {
            if kept <= limit {
                break;
            }
            self.spans.invalidate(&*key);
            kept = kept.saturating_sub(weight(&span).into());
        }
        self.spans.run_pending_tasks();
    }

    /// Bytes cached now, bookkeeping included.
    pub(crate) fn cached_bytes(&self) -> u64 {
        self.evict_excess();
        self.spans.weighted_size()
    }
}

fn weight(span: &Bytes) -> u32 {
    u32::try_from(span.len())
        .unwrap_or(u32::MAX)
        .saturating_add(ENTRY_OVERHEAD_BYTES)
}

impl Reclaim for SpanCache {
    fn reclaimable_bytes(&self) -> u64 {
        self.budget
    }

    fn reclaim(&self, bytes: u64) -> u64 {
        let lend = |granted| Some(bytes.saturating_add(granted).min(self.budget));
        let granted = self
            .granted
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, lend);
        self.evict_excess();
        // The closure never returns `None`, so both cases hold the previous value.
        let (Ok(granted) | Err(granted)) = granted;
        bytes.min(self.budget - granted)
    }

    fn restore(&self, bytes: u64) {
        self.granted.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl fmt::Debug for SpanCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpanCache")
            .field("cached_bytes", &self.spans.weighted_size())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::SpanKey;

    fn key(span: u32) -> SpanKey {
        SpanKey {
            span_owner: 0,
            span,
        }
    }

    #[test]
    fn span_cache_never_exceeds_its_budget() {
        let memory = SpanCache::new(100_000);
        for span in 0..100 {
            memory.insert(key(span), Bytes::from(vec![0; 10_000]));
            assert!(memory.spans.weighted_size() <= 100_000);
        }
        assert!(memory.cached_bytes() > 50_000);
    }

    #[test]
    fn granted_memory_is_evicted_and_unused_until_returned() {
        let memory = SpanCache::new(100_000);
        let fill = || {
            for span in 0..20 {
                memory.insert(key(span), Bytes::from(vec![0; 10_000]));
            }
            memory.cached_bytes()
        };
        assert!(fill() > 80_000);
        assert_eq!(memory.reclaim(70_000), 70_000);
        assert!(memory.cached_bytes() <= 30_000);
        assert!((10_000..=30_000).contains(&fill()));
        memory.insert(key(99), Bytes::from(vec![0; 31_000]));
        assert!(memory.cached_bytes() <= 30_000);
        assert_eq!(memory.reclaim(70_000), 30_000, "there is no more");
        assert_eq!(fill(), 0);
        memory.restore(100_000);
        assert!(fill() > 80_000);
    }

    #[test]
    fn new_span_stays_cached_despite_hot_old_spans() {
        let memory = SpanCache::new(100_000);
        for span in 0..9 {
            memory.insert(key(span), Bytes::from(vec![0; 10_000]));
        }
        for _ in 0..100 {
            assert!((0..9).all(|span| memory.get(key(span)).is_some()));
        }
        for span in 9..30 {
            memory.insert(key(span), Bytes::from(vec![0; 10_000]));
            assert!(memory.get(key(span)).is_some(), "span {span}");
        }
    }
}
