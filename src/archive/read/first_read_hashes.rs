//! Hashes of skipped blocks, which detect that a later read differs from the first.

use std::collections::HashMap;

use xxhash_rust::xxh3::xxh3_64;

use crate::base::sync::Mutex;

/// Number of hashes in one allocation.
const HASHES_PER_LEAF: usize = 512;

/// Hashes of blocks without digests, from their first read: eight bytes for each block near a read one.
#[derive(Debug, Default)]
pub(crate) struct FirstReadHashes {
    /// Hashes of adjacent blocks; zero means that there is none.
    leaves: Mutex<HashMap<usize, Box<[u64]>>>,
}

impl FirstReadHashes {
    /// Whether block `number` equals its first read, if there was one.
    pub(super) fn matches(&self, number: usize, block: &[u8]) -> bool {
        let hash = xxh3_64(block).max(1);
        let mut leaves = self.leaves.lock();
        let leaf = leaves.entry(number / HASHES_PER_LEAF);
        let leaf = leaf.or_insert_with(|| vec![0; HASHES_PER_LEAF].into());
        let Some(first) = leaf.get_mut(number % HASHES_PER_LEAF) else {
            return false;
        };
        if *first == 0 {
            *first = hash;
        }
        *first == hash
    }
}
