//! Rows that are loaded on demand, and the memory of an index.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use super::Index;
use crate::index::arrays::NameTable;
use crate::index::memory_limit::{MemoryLimit, TooMuchMemory};
use crate::index::storage::row_types::InodeRow;

impl Index {
    /// Counts the memory of the index against `limit` as long as the index lives.
    ///
    /// # Errors
    /// When the limit's indexes together exceed it.
    pub fn charge_to(&mut self, limit: &MemoryLimit) -> Result<(), TooMuchMemory> {
        self.charge = limit.charge();
        // Rows that are not loaded yet count, too, because any may be.
        let file_bytes = self.file.as_ref().map_or(0, |file| file.len());
        self.charge
            .set((self.memory_bytes()).max(file_bytes) as u64)
    }

    /// Whether rows may be loaded when they are used.
    pub fn is_on_demand(&self) -> bool {
        self.file.as_ref().is_some_and(|file| !file.is_loaded())
    }

    /// The bytes of its file to load, if rows are loaded on demand: all, or those of names in directories.
    pub(in crate::index) fn bytes_to_load(&self, names_only: bool) -> [Range<usize>; 2] {
        let names = &self.arrays.arena.0;
        match (self.arrays.dirents.file_range(), names.file_range()) {
            (Some(dirents), Some(names)) if names_only => [dirents, names],
            _ => [0..self.file.as_ref().map_or(0, |file| file.len()), 0..0],
        }
    }

    /// Length of the published index whose rows are loaded on demand; 0 for others.
    pub fn published_bytes(&self) -> u64 {
        self.file.as_ref().map_or(0, |file| file.packed_len())
    }

    /// Loads the next missing rows by one request; `false` if there are none.
    ///
    /// # Errors
    /// When they cannot be loaded.
    pub fn load_next_rows(&self) -> io::Result<bool> {
        self.file
            .as_ref()
            .map_or(Ok(false), |file| file.load_next())
    }

    /// Loads the bytes of `range` of its file. Damaged bytes are an error.
    pub(in crate::index) fn load_bytes(&self, range: &Range<usize>) -> io::Result<()> {
        self.file.as_ref().map_or(Ok(()), |file| file.load(range))
    }

    /// Verifies the packed rows that are not loaded, without unpacking them.
    pub(in crate::index) fn verify_packed_rows(&self) -> io::Result<()> {
        self.file.as_ref().map_or(Ok(()), |file| file.verify())
    }

    /// Uses the rows of the tree, and not those that only reads need.
    pub(in crate::index) fn load_tree_rows(&self) {
        let arrays = &self.arrays;
        arrays.inodes.load();
        arrays.dirents.load();
        arrays.by_name.load();
        arrays.arena.0.load();
        arrays.owners.load();
        arrays.extras.load();
        arrays.xattrs.load();
        arrays.pieces.load();
        arrays.spans.load();
        arrays.unresolved.load();
    }

    /// Loads all rows.
    ///
    /// # Errors
    /// When they cannot be loaded.
    pub fn load_all_rows(&self) -> io::Result<()> {
        while self.load_next_rows()? {}
        Ok(())
    }

    /// Memory of the index in bytes.
    pub fn memory_bytes(&self) -> usize {
        let names = self.names.as_ref().map_or(0, NameTable::memory_bytes);
        let replaced = self.replaced.as_ref().map_or(0, BTreeMap::len);
        let loaded = self.file.as_ref().map_or(0, |file| file.loaded_bytes());
        // Nodes of the map are at least half full.
        let replaced = replaced * 2 * size_of::<(u32, InodeRow)>();
        self.arrays.memory_bytes()
            + names
            + replaced
            + usize::try_from(loaded).unwrap_or(usize::MAX)
    }
}
