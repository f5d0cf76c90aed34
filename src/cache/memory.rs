//! Spans in memory, bounded in bytes; one fill however many wait.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use moka::policy::EvictionPolicy;

use super::Unit;
use crate::base::memory_reclaim::Reclaim;

/// Decoded spans and windows, of which those go first that were read longest ago. Clones share them.
#[derive(Clone)]
pub struct Memory {
    spans: moka::sync::Cache<Unit, Bytes>,
    budget: u64,
    /// Bytes of the budget that others have for now.
    lent: Arc<AtomicU64>,
}

/// What a span costs besides its bytes: the cache's own bookkeeping.
const OVERHEAD_BYTES: u32 = 256;

impl Memory {
    /// A cache of at most `budget` bytes. A span larger than the budget passes through unkept.
    pub fn new(budget: u64) -> Self {
        let spans = moka::sync::Cache::builder()
            .max_capacity(budget)
            // Not by frequency: a reader comes back to the newest span for its next few kilobytes,
            // and one that was read often before must not keep it out.
            .eviction_policy(EvictionPolicy::lru())
            .weigher(|_, span| weight(span))
            .build();
        let lent = Arc::default();
        Self {
            spans,
            budget,
            lent,
        }
    }

    /// The span's bytes, if they are here.
    pub fn get(&self, key: impl Into<Unit>) -> Option<Bytes> {
        self.spans.get(&key.into())
    }

    /// Whether the span's bytes are here; asking does not count as reading them.
    pub fn contains(&self, key: impl Into<Unit>) -> bool {
        self.spans.contains_key(&key.into())
    }

    /// The limit, in bytes.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// What of the limit is not lent, in bytes.
    pub fn room(&self) -> u64 {
        self.budget
            .saturating_sub(self.lent.load(Ordering::Relaxed))
    }

    /// Keeps a span's bytes. They should own their memory: a slice of something larger keeps all
    /// of that alive without being charged for it.
    pub fn insert(&self, key: impl Into<Unit>, bytes: Bytes) {
        // Not to be evicted for bytes that find no room then.
        if bytes.len() as u64 <= self.room() {
            self.spans.insert(key.into(), bytes);
            self.settle();
        }
    }

    /// The span's bytes; made by `fill` if they are not here. Of any number of callers at once
    /// one fills and the others wait for its result.
    ///
    /// # Errors
    /// What `fill` failed with, for everyone who waited. The next call tries again.
    pub fn get_or_fill<E: Send + Sync + 'static>(
        &self,
        key: impl Into<Unit>,
        fill: impl FnOnce() -> Result<Bytes, E>,
    ) -> Result<Bytes, Arc<E>> {
        let mut filled = false;
        let result = self.spans.try_get_with(key.into(), || {
            filled = true;
            fill()
        });
        if filled {
            self.settle();
        }
        result
    }

    /// Evicts what is over the budget now: the cache would do so only after dozens of insertions,
    /// and dozens of spans are more than the budget itself.
    fn settle(&self) {
        self.spans.run_pending_tasks();
        let lent = self.lent.load(Ordering::Relaxed);
        if lent > 0 {
            self.shrink(self.budget.saturating_sub(lent));
        }
    }

    /// Lets go of spans, whichever, until no more than `limit` bytes are kept.
    fn shrink(&self, limit: u64) {
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
    pub fn kept_bytes(&self) -> u64 {
        self.settle();
        self.spans.weighted_size()
    }
}

fn weight(span: &Bytes) -> u32 {
    u32::try_from(span.len())
        .unwrap_or(u32::MAX)
        .saturating_add(OVERHEAD_BYTES)
}

impl Reclaim for Memory {
    fn reclaimable_bytes(&self) -> u64 {
        self.budget
    }

    fn reclaim(&self, bytes: u64) -> u64 {
        let lend = |lent| Some(bytes.saturating_add(lent).min(self.budget));
        let lent = self
            .lent
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, lend);
        self.settle();
        // It never declines.
        let (Ok(lent) | Err(lent)) = lent;
        bytes.min(self.budget - lent)
    }

    fn restore(&self, bytes: u64) {
        self.lent.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory")
            .field("kept_bytes", &self.spans.weighted_size())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::cache::Key;

    fn key(span: u32) -> Key {
        Key { layer: 0, span }
    }

    #[test]
    fn what_is_kept_stays_within_the_budget_at_once() {
        let memory = Memory::new(100_000);
        for span in 0..100 {
            memory.insert(key(span), Bytes::from(vec![0; 10_000]));
            let filled = memory.get_or_fill(key(1000 + span), || {
                Ok::<_, Infallible>(Bytes::from(vec![0; 10_000]))
            });
            assert!(filled.is_ok());
            assert!(memory.spans.weighted_size() <= 100_000);
        }
        assert!(memory.kept_bytes() > 50_000);
    }

    #[test]
    fn what_is_lent_is_evicted_and_not_filled_again_until_it_is_back() {
        let memory = Memory::new(100_000);
        let fill = || {
            for span in 0..20 {
                memory.insert(key(span), Bytes::from(vec![0; 10_000]));
            }
            memory.kept_bytes()
        };
        assert!(fill() > 80_000);
        assert_eq!(memory.reclaim(70_000), 70_000);
        assert!(memory.kept_bytes() <= 30_000);
        assert!((10_000..=30_000).contains(&fill()));
        let filled = memory.get_or_fill(key(99), || {
            Ok::<_, Infallible>(Bytes::from(vec![0; 31_000]))
        });
        assert_eq!(filled.map(|bytes| bytes.len()).ok(), Some(31_000));
        assert!(memory.kept_bytes() <= 30_000);
        assert_eq!(memory.reclaim(70_000), 30_000, "there is no more");
        assert_eq!(fill(), 0);
        memory.restore(100_000);
        assert!(fill() > 80_000);
    }

    #[test]
    fn a_new_span_stays_however_often_the_old_ones_were_read() {
        let memory = Memory::new(100_000);
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
    fn one_fill_serves_everyone_who_waits() {
        let memory = Memory::new(1 << 20);
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
    fn a_failed_fill_is_tried_again() {
        let memory = Memory::new(1 << 20);
        assert!(memory.get_or_fill(key(1), || Err("broken")).is_err());
        let bytes = memory.get_or_fill(key(1), || Ok::<_, &str>(Bytes::from_static(b"whole")));
        assert_eq!(bytes.ok().as_deref(), Some(&b"whole"[..]));
    }
}
