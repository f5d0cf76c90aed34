//! A hash table of row numbers whose growth never moves more than a small part of it.

use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;

/// Number of parts, each of which grows by itself. An addition moves the rows of one part at most.
const SHARD_COUNT: usize = 256;

/// Finds rows by the hash of what they hold. A row takes eight bytes, a control byte, and spare room.
#[derive(Debug)]
pub(in crate::index) struct RowTable {
    shards: Vec<HashTable<HashedRow>>,
    shard_bytes: usize,
    /// Random per process, so that no archive can contain keys that collide.
    pub(in crate::index) seed: u64,
}

/// The hash is stored, because hashing a row again takes two cache misses.
#[derive(Clone, Copy, Debug)]
struct HashedRow {
    hash: u32,
    row: u32,
}

impl HashedRow {
    /// Both halves are equal, because the table takes its control bytes from the upper bits.
    fn table_hash(self) -> u64 {
        u64::from(self.hash) << 32 | u64::from(self.hash)
    }
}

impl RowTable {
    pub(in crate::index) fn new() -> Self {
        Self {
            shards: (0..SHARD_COUNT).map(|_| HashTable::new()).collect(),
            shard_bytes: 0,
            seed: RandomState::new().hash_one(0_u8),
        }
    }

    /// The row of this hash for which `is_same` holds.
    pub(in crate::index) fn find(&self, hash: u64, is_same: impl Fn(u32) -> bool) -> Option<u32> {
        let (shard, key) = locate(hash, 0);
        let is_same = |found: &HashedRow| found.hash == key.hash && is_same(found.row);
        let found = self.shards.get(shard)?.find(key.table_hash(), is_same)?;
        Some(found.row)
    }

    /// Adds `row`, which the table does not contain.
    pub(in crate::index) fn add(&mut self, hash: u64, row: u32) {
        let (shard, added) = locate(hash, row);
        let Some(shard) = self.shards.get_mut(shard) else {
            return;
        };
        self.shard_bytes -= shard.allocation_size();
        shard.insert_unique(added.table_hash(), added, |row| row.table_hash());
        self.shard_bytes += shard.allocation_size();
    }

    pub(in crate::index) fn memory_bytes(&self) -> usize {
        SHARD_COUNT * size_of::<HashTable<HashedRow>>() + self.shard_bytes
    }
}

/// The shard, and what it stores of the hash. They have no bit in common.
fn locate(hash: u64, row: u32) -> (usize, HashedRow) {
    let [shard, _, _, _, stored @ ..] = hash.to_be_bytes();
    let hash = u32::from_be_bytes(stored);
    (usize::from(shard), HashedRow { hash, row })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(key: u32) -> u64 {
        xxhash_rust::xxh3::xxh3_64(&key.to_le_bytes())
    }

    #[test]
    fn rows_are_found_by_hash_and_content() {
        let mut table = RowTable::new();
        for row in 0..10_000 {
            table.add(hash(row / 2), row);
        }
        for row in 0..10_000 {
            assert_eq!(table.find(hash(row / 2), |found| found == row), Some(row));
        }
        assert_eq!(table.find(hash(0), |found| found == 2), None);
        assert_eq!(table.find(hash(10_000), |_| true), None);
    }

    // Promises: memory-lock
    #[test]
    fn growth_moves_a_small_part_and_memory_stays_bounded() {
        let mut table = RowTable::new();
        let rows = 500_000;
        for row in 0..rows {
            table.add(hash(row), row);
        }
        let largest = table.shards.iter().map(HashTable::len).max();
        assert!(largest < Some(rows as usize / 128), "{largest:?}");
        // Nine bytes each, of which seven in sixteen are used right after growth.
        assert!(table.memory_bytes() < rows as usize * 21, "{table:?}");
    }
}
