//! LRU cache of spans in memory, bounded in bytes.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use moka::policy::EvictionPolicy;

use super::CacheKey;
use crate::base::memory_reclaim::Reclaim;
use crate::base::sync::Mutex;

/// LRU cache of decoded spans and windows. Clones share one cache.
#[derive(Clone)]
pub(crate) struct SpanCache {
    /// Its weights are in units of [`UNIT_BYTES`]. The entry without a key weighs what is lent.
    entries: moka::sync::Cache<Option<CacheKey>, Entry>,
    budget: u64,
    /// Held during each insertion, so that the last one knows what is lent.
    lent_bytes: Arc<Mutex<u64>>,
}

#[derive(Clone)]
struct Entry {
    /// Taken at the entry's eviction. The crate drops its own copies of an evicted entry only later, many at
    /// once, when the memory of one would have served for the next.
    bytes: Arc<Mutex<Option<Bytes>>>,
    weight: u32,
}

impl Entry {
    fn new(bytes: Option<Bytes>, weight: u32) -> Self {
        Self {
            bytes: Arc::new(Mutex::new(bytes)),
            weight,
        }
    }
}

/// Bytes of a unit of weight, which is also the overhead of an entry. The crate's weights have 32 bits.
const UNIT_BYTES: u64 = 256;

/// Maximum number of evictions in a row, each of hundreds of spans.
const MAX_EVICTIONS: usize = 1_000;

impl SpanCache {
    /// Creates a cache of at most `budget` bytes, which keeps no larger span.
    pub(crate) fn new(budget: u64) -> Self {
        let budget = budget.min(u64::from(u32::MAX) * UNIT_BYTES);
        let entries = moka::sync::Cache::builder()
            .max_capacity(budget / UNIT_BYTES)
            // Not LFU, because spans read often must not evict the newest, which a reader still needs.
            .eviction_policy(EvictionPolicy::lru())
            .weigher(|_, entry: &Entry| entry.weight)
            .eviction_listener(|_, entry, _| drop(entry.bytes.lock().take()))
            .build();
        Self {
            entries,
            budget,
            lent_bytes: Arc::default(),
        }
    }

    pub(crate) fn get(&self, key: impl Into<CacheKey>) -> Option<Bytes> {
        let entry = self.entries.get(&Some(key.into()))?;
        entry.bytes.lock().clone()
    }

    /// Whether `key` is cached. The check does not count as a read.
    pub(crate) fn contains(&self, key: impl Into<CacheKey>) -> bool {
        self.entries.contains_key(&Some(key.into()))
    }

    pub(crate) fn budget(&self) -> u64 {
        self.budget
    }

    /// Bytes of the limit that are not lent.
    pub(crate) fn available_bytes(&self) -> u64 {
        self.budget - *self.lent_bytes.lock()
    }

    /// Caches the bytes of `key`, which should own their memory: a slice's whole allocation is not charged.
    pub(crate) fn insert(&self, key: impl Into<CacheKey>, bytes: Bytes) {
        let lent = self.lent_bytes.lock();
        let charged = units(UNIT_BYTES.saturating_add(bytes.len() as u64));
        // Bytes that exceed the available budget must not evict others.
        if charged <= self.max_weight() - self.lent_weight(*lent) {
            self.touch_lent(*lent);
            self.entries
                .insert(Some(key.into()), Entry::new(Some(bytes), charged));
            self.evict(*lent);
        }
    }

    /// Makes what is lent the newest entry, so that the least recently used spans are evicted for it.
    fn touch_lent(&self, lent: u64) {
        self.entries
            .insert(None, Entry::new(None, self.lent_weight(lent)));
    }

    fn set_lent(&self, lent: &mut u64, bytes: u64) {
        *lent = bytes;
        self.touch_lent(bytes);
        self.evict(bytes);
    }

    /// Evicts entries until the others fit. The crate alone would first exceed the budget by dozens of spans, and ends
    /// an eviction after 100 ms.
    fn evict(&self, lent: u64) {
        for _ in 0..MAX_EVICTIONS {
            self.entries.run_pending_tasks();
            if lent > 0 && !self.entries.contains_key(&None) {
                // Meanwhile a span was read, and so was newer than what is lent.
                self.touch_lent(lent);
            } else if self.entries.weighted_size() <= self.max_weight().into() {
                return;
            }
        }
    }

    fn max_weight(&self) -> u32 {
        u32::try_from(self.budget / UNIT_BYTES).unwrap_or(u32::MAX)
    }

    fn lent_weight(&self, lent: u64) -> u32 {
        units(lent).min(self.max_weight())
    }

    /// Bytes cached now, bookkeeping included.
    pub(crate) fn cached_bytes(&self) -> u64 {
        let lent = self.lent_bytes.lock();
        let weight = self.entries.weighted_size();
        weight.saturating_sub(self.lent_weight(*lent).into()) * UNIT_BYTES
    }
}

fn units(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX)
}

impl Reclaim for SpanCache {
    fn reclaimable_bytes(&self) -> u64 {
        self.budget
    }

    fn reclaim(&self, bytes: u64) -> u64 {
        let mut lent = self.lent_bytes.lock();
        let granted = bytes.min(self.budget - *lent);
        let total = *lent + granted;
        self.set_lent(&mut lent, total);
        granted
    }

    fn restore(&self, bytes: u64) {
        let mut lent = self.lent_bytes.lock();
        let total = lent.saturating_sub(bytes);
        self.set_lent(&mut lent, total);
    }
}

impl fmt::Debug for SpanCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpanCache")
            .field("cached_bytes", &self.cached_bytes())
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

    // Promises: memory-bound
    #[test]
    fn span_cache_never_exceeds_its_budget() {
        let memory = SpanCache::new(100_000);
        for span in 0..100 {
            memory.insert(key(span), Bytes::from(vec![0; 10_000]));
            assert!(memory.cached_bytes() <= 100_000);
        }
        assert!(memory.cached_bytes() > 50_000);
    }

    #[test]
    fn memory_of_evicted_spans_is_free_at_once() {
        struct Owner(Vec<u8>, #[expect(dead_code, reason = "counted")] Arc<()>);
        impl AsRef<[u8]> for Owner {
            fn as_ref(&self) -> &[u8] {
                &self.0
            }
        }
        let memory = SpanCache::new(100_000);
        let living = Arc::new(());
        for span in 0..100 {
            let owner = Owner(vec![0; 10_000], Arc::clone(&living));
            memory.insert(key(span), Bytes::from_owner(owner));
            assert!(Arc::strong_count(&living) <= 10, "at span {span}");
        }
        assert_eq!(memory.reclaim(100_000), 100_000);
        assert_eq!(Arc::strong_count(&living), 1);
    }

    #[test]
    fn slow_eviction_continues_until_lent_memory_is_free() {
        struct Slow;
        impl AsRef<[u8]> for Slow {
            fn as_ref(&self) -> &[u8] {
                b"span"
            }
        }
        impl Drop for Slow {
            fn drop(&mut self) {
                std::thread::sleep(std::time::Duration::from_micros(300));
            }
        }
        let memory = SpanCache::new(1_000_000);
        for span in 0..1_000 {
            memory.insert(key(span), Bytes::from_owner(Slow));
        }
        assert_eq!(memory.reclaim(1_000_000), 1_000_000);
        assert_eq!(memory.cached_bytes(), 0);
        assert_eq!(
            (0..1_000)
                .filter(|&span| memory.contains(key(span)))
                .count(),
            0
        );
    }

    // Promises: memory-decoder
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

    // Promises: memory-decoder
    #[test]
    fn lent_memory_evicts_the_least_recently_used_spans() {
        let memory = SpanCache::new(1_000_000);
        let insert = |span| memory.insert(key(span), Bytes::from(vec![0; 10_000]));
        let cached = |spans: std::ops::Range<u32>| spans.filter(|&span| memory.contains(key(span)));
        (0..90).for_each(insert);
        assert_eq!(memory.reclaim(400_000), 400_000);
        let kept = cached(0..90).collect::<Vec<_>>();
        assert!(kept.len() > 55, "{kept:?}");
        let count = u32::try_from(kept.len()).expect("few");
        assert_eq!(kept, (90 - count..90).collect::<Vec<_>>());
        for span in 90..1_000 {
            assert!(memory.get(key(60)).is_some(), "the span that is read");
            insert(span);
            let newest = cached(span + 2 - count..span + 1).count();
            assert_eq!(newest, kept.len() - 1, "after span {span}");
        }
    }

    #[test]
    fn concurrent_inserts_and_loans_stay_within_the_budget() {
        let memory = SpanCache::new(1_000_000);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let memory = &memory;
                scope.spawn(move || {
                    for span in 0..500 {
                        memory.insert(key(thread * 1000 + span), Bytes::from(vec![0; 5_000]));
                        let lent = memory.reclaim(100_000);
                        assert!(memory.cached_bytes() <= memory.budget() - lent);
                        memory.restore(lent);
                        memory.get(key(span));
                    }
                });
            }
        });
        assert_eq!(memory.available_bytes(), memory.budget());
        assert!(memory.cached_bytes() > 500_000);
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
