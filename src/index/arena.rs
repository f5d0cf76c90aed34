//! The arena for bytes of any length, and vectors that grow slowly.

use super::rows::Name;

/// Byte strings in one allocation: names, link targets, attribute values.
#[derive(Clone, Debug, Default)]
pub(super) struct Arena(pub(super) Vec<u8>);

impl Arena {
    /// The bytes of `name`; `None` when they are out of range.
    pub(super) fn name(&self, name: Name) -> Option<&[u8]> {
        self.bytes_at(name.offset(), name.len())
    }

    /// The `len` bytes at `offset`; `None` when they are out of range.
    pub(super) fn bytes_at(&self, offset: u64, len: u64) -> Option<&[u8]> {
        let end = usize::try_from(offset.checked_add(len)?).ok()?;
        self.0.get(usize::try_from(offset).ok()?..end)
    }

    /// Appends `bytes` and returns their offset.
    pub(super) fn push(&mut self, bytes: &[u8]) -> usize {
        let offset = self.0.len();
        reserve(&mut self.0, bytes.len());
        self.0.extend_from_slice(bytes);
        offset
    }

    /// Appends `bytes`, at most 65,535 of them, as a name.
    pub(super) fn push_name(&mut self, bytes: &[u8]) -> Name {
        let offset = self.push(bytes);
        Name::new(offset, bytes.len()).expect("a name fits 16 bits, and memory 48")
    }
}

/// Appends to a vector that grows by a quarter.
///
/// Doubling could let the capacity of an index under construction be twice its content.
pub(super) fn push<T>(rows: &mut Vec<T>, row: T) {
    reserve(rows, 1);
    rows.push(row);
}

/// Makes room for `more` elements. An allocation grows the vector by a quarter.
fn reserve<T>(rows: &mut Vec<T>, more: usize) {
    if rows.capacity() - rows.len() < more {
        rows.reserve_exact(more.max(rows.len() / 4).max(64));
    }
}

/// Allocated bytes of a vector.
pub(super) fn capacity_bytes<T>(rows: &Vec<T>) -> usize {
    rows.capacity() * size_of::<T>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arena_range_past_the_end_is_none() {
        let mut arena = Arena::default();
        assert_eq!(arena.push(b"abc"), 0);
        assert_eq!(arena.bytes_at(1, 2), Some(&b"bc"[..]));
        assert_eq!(arena.bytes_at(3, 0), Some(&b""[..]));
        assert_eq!(arena.bytes_at(1, 3), None);
        assert_eq!(arena.bytes_at(u64::MAX, 2), None);
    }

    #[test]
    fn capacity_stays_within_a_quarter_of_the_content() {
        let mut rows = Vec::new();
        for row in 0..10_000_u32 {
            push(&mut rows, row);
        }
        assert!(capacity_bytes(&rows) <= 10_000 * 4 * 5 / 4);
    }
}
