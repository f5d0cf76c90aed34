//! Memory of the trees of a server, which have a common limit.

use std::sync::Arc;

use crate::archive::scan::MIN_MEMORY;
use crate::base::sync::Mutex;

/// The limit for all trees together, unless one asks for more than half of it. Each has [`MIN_MEMORY`] even beyond it.
const LIMIT_BYTES: u64 = 1 << 30;

/// Memory of the trees of a server. A tree keeps what it got, so no archive waits for the memory of another.
#[derive(Clone, Debug, Default)]
pub(in crate::serve) struct TreeMemory {
    granted: Arc<Mutex<u64>>,
}

/// The memory of one tree, in bytes, which others can have when this is dropped.
#[derive(Debug)]
pub(in crate::serve) struct Granted {
    pub(in crate::serve) bytes: u64,
    granted: Arc<Mutex<u64>>,
}

impl TreeMemory {
    /// Grants a tree the memory that it `wants`, but at most half of what the others leave, and at least [`MIN_MEMORY`].
    pub(in crate::serve) fn grant(&self, wants: u64) -> Granted {
        let mut granted = self.granted.lock();
        let limit = LIMIT_BYTES.max(wants.saturating_mul(2));
        let left = limit.saturating_sub(*granted);
        let bytes = wants.min(left / 2).max(MIN_MEMORY);
        *granted += bytes;
        Granted {
            bytes,
            granted: Arc::clone(&self.granted),
        }
    }
}

impl Drop for Granted {
    fn drop(&mut self) {
        *self.granted.lock() -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    // Promises: shared-memory
    #[test]
    fn first_trees_have_all_that_they_want_and_each_has_the_minimum() {
        let memory = TreeMemory::default();
        let granted: Vec<_> = (0..100).map(|_| memory.grant(128 * MIB)).collect();
        let bytes: Vec<_> = granted.iter().map(|granted| granted.bytes / MIB).collect();
        assert_eq!(bytes[..10], [128, 128, 128, 128, 128, 128, 128, 64, 32, 32]);
        assert!(bytes[10..].iter().all(|&bytes| bytes == 32));
        drop(granted);
        assert_eq!(memory.grant(1 << 40).bytes, 1 << 40, "one that is alone");
        assert_eq!(memory.grant(MIB).bytes, MIN_MEMORY);
    }
}
