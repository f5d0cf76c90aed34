//! Spans in memory, bounded in bytes; one fill however many wait.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use moka::policy::EvictionPolicy;

use super::CacheKey;
use crate::base::memory_reclaim::Reclaim;

/// Decoded spans and windows, of which those go first that were read longest ago. Clones share them.
#[derive(Clone)]
pub struct SpanCache {
    spans: moka::sync::Cache<CacheKey, Bytes>,
    budget: u64,
    /// Bytes of the budget that others have for now.
    granted: Arc<AtomicU64>,
}

/// What a span costs besides its bytes: the cache's own bookkeeping.
const ENTRY_OVERHEAD_BYTES: u32 = 256;

impl SpanCache {
    /// A cache of at most `budget` bytes. A span larger than the budget passes through unkept.
    pub fn new(budget: u64) -> Self {
        let spans = moka::sync::Cache::builder()
            .max_capacity(budget)
            // Not by frequency: a reader comes back to the newest span for its next few kilobytes,
            // and one that was read often before must not keep it out.
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

    /// The span's bytes, if they are here.
    pub fn get(&self, key: impl Into<CacheKey>) -> Option<Bytes> {
        self.spans.get(&key.into())
    }

    /// Whether the span's bytes are here; asking does not count as reading them.
    pub fn contains(&self, key: impl Into<CacheKey>) -> bool {
        self.spans.contains_key(&key.into())
    }

    /// The limit, in bytes.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// What of the limit is not granted, in bytes.
    pub fn available_bytes(&self) -> u64 {
        self.budget
            .saturating_sub(self.granted.load(Ordering::Relaxed))
    }

    /// Keeps a span's bytes. They should own their memory: a slice of something larger keeps all
    /// of that alive without being charged for it.
    pub fn insert(&self, key: impl Into<CacheKey>, bytes: Bytes) {
        // Not to be evicted for bytes that find no room then.
        if bytes.len() as u64 <= self.available_bytes() {
            self.spans.insert(key.into(), bytes);
            self.evict_excess();
        }
    }

    /// The span's bytes; made by `fill` if they are not here. Of any number of callers at once
    /// one fills and the others wait for its result.
    ///
    /// # Errors
    /// What `fill` failed with, for everyone who waited. The next call tries again.
    pub fn get_or_fill<E: Send + Sync + 'static>(
        &self,
        key: impl Into<CacheKey>,
        fill: impl FnOnce() -> Result<Bytes, E>,
    ) -> Result<Bytes, Arc<E>> {
        let mut filled = false;
        let result = self.spans.try_get_with(key.into(), || {
            filled = true;
            fill()
        });
        if filled {
            self.evict_excess();
        }
        result
    }

    /// Evicts what is over the budget now: the cache would do so only after dozens of insertions,
    /// and dozens of spans are more than the budget itself.
    fn evict_excess(&self) {
        self.spans.run_pending_tasks();
        let granted = self.granted.load(Ordering::Relaxed);
        if granted > 0 {
            self.evict_to(self.budget.saturating_sub(granted));
        }
    }

    /// Lets go of spans, whichever, until no more than `limit` bytes are kept.
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

    /// Bytes kept at this moment, bookkeeping included.
    pub fn cached_bytes(&self) -> u64 {
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
        // It never declines.
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
    use std::convert::Infallible;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::cache::SpanKey;

    fn key(span: u32) -> SpanKey {
        SpanKey { layer: 0, span }
    }

    #[test]
    fn span_cache_never_exceeds_its_budget() {
        let memory = SpanCache::new(100_000);
        for span in 0..100 {
            memory.insert(key(span), Bytes::from(vec![0; 10_000]));
            let filled = memory.get_or_fill(key(1000 + span), || {
                Ok::<_, Infallible>(Bytes::from(vec![0; 10_000]))
            });
            assert!(filled.is_ok());
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
        let filled = memory.get_or_fill(key(99), || {
            Ok::<_, Infallible>(Bytes::from(vec![0; 31_000]))
        });
        assert_eq!(filled.map(|bytes| bytes.len()).ok(), Some(31_000));
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
            let filled = memory.get_or_fill(key(span), || {
                Ok::<_, Infallible>(Bytes::from(vec![0; 10_000]))
            });
            assert!(filled.is_ok());
            assert!(memory.get(key(span)).is_some(), "span {span}");
        }
    }

    #[test]
    fn one_fill_serves_all_waiting_readers() {
        let memory = SpanCache::new(1 << 20);
        let fills = AtomicU32::new(0);
        let barrier = Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    barrier.wait();
                    let bytes = memory.get_or_fill(key(1), || {
                        fills.fetch_add(1, Ordering::SeqCst);
                        Ok::<_, Infallible>(Bytes::from_static(b"span"))
                    });
                    assert_eq!(bytes.ok().as_deref(), Some(&b"span"[..]));
                });
            }
        });
        assert_eq!(fills.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn failed_fill_is_retried() {
        let memory = SpanCache::new(1 << 20);
        assert!(memory.get_or_fill(key(1), || Err("broken")).is_err());
        let bytes = memory.get_or_fill(key(1), || Ok::<_, &str>(Bytes::from_static(b"whole")));
        assert_eq!(bytes.ok().as_deref(), Some(&b"whole"[..]));
    }
}
