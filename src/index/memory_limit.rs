//! The memory limit for indexes, and for merging them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A memory limit for all indexes and merges that share it, as clones do.
#[derive(Clone, Debug)]
pub struct MemoryLimit {
    bytes: u64,
    used: Arc<AtomicU64>,
}

impl MemoryLimit {
    /// Default limit of the program. Ten million ordinary entries need about half of it.
    pub const DEFAULT_BYTES: u64 = 2 << 30;

    /// A limit of `bytes`, of which none are in use.
    pub fn new(bytes: u64) -> Self {
        Self {
            bytes,
            used: Arc::default(),
        }
    }

    /// No limit.
    pub fn none() -> Self {
        Self::new(u64::MAX)
    }

    /// The limit in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes in use by all that share the limit.
    pub fn used_bytes(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub(crate) fn charge(&self) -> Charge {
        Charge {
            limit: self.clone(),
            bytes: 0,
        }
    }
}

impl Default for MemoryLimit {
    fn default() -> Self {
        Self::new(Self::DEFAULT_BYTES)
    }
}

/// Error: the indexes need more memory than their limit allows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the index needs more than the {limit} bytes of memory that --index-memory allows")]
pub struct TooMuchMemory {
    /// The limit in bytes.
    pub limit: u64,
}

/// The memory of one index or merge. It counts against the limit until dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    limit: MemoryLimit,
    bytes: u64,
}

impl Charge {
    /// Counts `bytes` more, before the caller allocates them.
    pub(crate) fn add(&mut self, bytes: usize) -> Result<(), TooMuchMemory> {
        self.set(self.bytes.saturating_add(bytes as u64))
    }

    /// Makes room for exactly `more` rows, and counts it before the allocation.
    pub(crate) fn reserve<T>(
        &mut self,
        rows: &mut Vec<T>,
        more: usize,
    ) -> Result<(), TooMuchMemory> {
        let room = rows.capacity() - rows.len();
        let added = more.saturating_sub(room);
        self.add(added.saturating_mul(size_of::<T>()))?;
        rows.reserve_exact(more);
        Ok(())
    }

    /// Appends `row`, and counts the growth of `rows` before the allocation.
    pub(crate) fn push<T>(&mut self, rows: &mut Vec<T>, row: T) -> Result<(), TooMuchMemory> {
        if rows.len() == rows.capacity() {
            self.reserve(rows, (rows.len() / 4).max(64))?;
        }
        rows.push(row);
        Ok(())
    }

    pub(super) fn set(&mut self, bytes: u64) -> Result<(), TooMuchMemory> {
        let used = &self.limit.used;
        let others = if bytes >= self.bytes {
            used.fetch_add(bytes - self.bytes, Ordering::Relaxed)
        } else {
            used.fetch_sub(self.bytes - bytes, Ordering::Relaxed)
        };
        let all = others.saturating_add(bytes).saturating_sub(self.bytes);
        self.bytes = bytes;
        if all > self.limit.bytes {
            let limit = self.limit.bytes;
            return Err(TooMuchMemory { limit });
        }
        Ok(())
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.limit.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: limit-index-memory
    #[test]
    fn indexes_share_a_limit_while_they_live() {
        let limit = MemoryLimit::new(100);
        let (mut one, mut other) = (limit.charge(), limit.clone().charge());
        assert_eq!(one.set(60), Ok(()));
        assert_eq!(other.set(50), Err(TooMuchMemory { limit: 100 }));
        assert_eq!(other.set(40), Ok(()));
        assert_eq!(one.set(61), Err(TooMuchMemory { limit: 100 }));
        drop(one);
        assert_eq!(other.set(100), Ok(()));
        drop(other);
        assert_eq!(limit.used.load(Ordering::Relaxed), 0);
    }

    // Promises: memory-index
    #[test]
    fn rows_beyond_the_limit_are_not_allocated() {
        let limit = MemoryLimit::new(1000);
        let mut charge = limit.charge();
        let mut rows: Vec<u64> = Vec::new();
        let refused = (0..1000).find_map(|row| charge.push(&mut rows, row).err());
        assert_eq!(refused, Some(TooMuchMemory { limit: 1000 }));
        assert!(rows.capacity() * 8 <= 1000, "{}", rows.capacity());
        drop(charge);
        assert_eq!(limit.used.load(Ordering::Relaxed), 0);
    }
}
