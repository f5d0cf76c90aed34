//! Access log: which parts of files were read, in order; pure.

use std::collections::BTreeMap;

use crate::index::Ino;

/// Maximum number of ranges. The log ignores new ranges beyond that.
pub const MAX_ACCESSED_RANGES: usize = 1 << 20;

/// A range of a file that was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AccessedRange {
    /// Inode of the file.
    pub ino: Ino,
    /// Start of the range.
    pub offset: u64,
    /// Length of the range.
    pub len: u64,
}

/// Records reads. Adjacent or overlapping reads of one file become one range.
#[derive(Debug, Default)]
pub(crate) struct AccessLog {
    /// Ranges by file and start, with their end and the number of their first read.
    ranges: BTreeMap<(Ino, u64), (u64, u64)>,
    /// Number of recorded reads. The ranges do not change while it stays the same.
    reads: u64,
}

impl AccessLog {
    /// Adds a read of up to `len` bytes at `offset` of a file of `size` bytes.
    pub(crate) fn add_read(&mut self, ino: Ino, size: u64, offset: u64, len: u32) {
        self.add(ino, offset, u64::from(len).min(size.saturating_sub(offset)));
    }

    fn add(&mut self, ino: Ino, offset: u64, len: u64) {
        let (mut start, mut end) = (offset, offset.saturating_add(len));
        if end == start {
            return;
        }
        let mut first = self.reads;
        self.reads += 1;
        // Searches backwards: the last range that starts at or before the end may touch, then the one before.
        loop {
            let before = self.ranges.range((ino, 0)..=(ino, end)).next_back();
            let Some((&(_, from), &(until, read))) =
                before.filter(|(_, (until, _))| *until >= start)
            else {
                break;
            };
            if from <= start && until >= end {
                return;
            }
            self.ranges.remove(&(ino, from));
            start = start.min(from);
            end = end.max(until);
            first = first.min(read);
        }
        if self.ranges.len() < MAX_ACCESSED_RANGES {
            self.ranges.insert((ino, start), (end, first));
        }
    }

    /// Returns the ranges and the number of reads, if more than `reads`.
    pub(crate) fn ranges_since(&self, reads: u64) -> Option<(Vec<AccessedRange>, u64)> {
        (self.reads > reads).then(|| (self.ranges(), self.reads))
    }

    /// Returns the ranges, in the order of their first reads.
    fn ranges(&self) -> Vec<AccessedRange> {
        let mut ranges: Vec<_> = self.ranges.iter().collect();
        ranges.sort_unstable_by_key(|(_, (_, first))| *first);
        let ranges = ranges
            .into_iter()
            .map(|(&(ino, offset), &(end, _))| AccessedRange {
                ino,
                offset,
                len: end - offset,
            });
        ranges.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ranges(reads: &[(u32, u64, u64)]) -> Vec<(u32, u64, u64)> {
        let mut access_log = AccessLog::default();
        for &(ino, offset, len) in reads {
            access_log.add(Ino(ino), offset, len);
        }
        let ranges = access_log.ranges().into_iter();
        ranges
            .map(|range| (range.ino.0, range.offset, range.len))
            .collect()
    }

    // Promises: profile-record
    #[test]
    fn adjacent_reads_merge_in_the_order_of_the_first() {
        let reads = [(7, 0, 10), (8, 5, 5), (7, 10, 10), (7, 30, 5), (8, 0, 6)];
        assert_eq!(ranges(&reads), [(7, 0, 20), (8, 0, 10), (7, 30, 5)]);
        assert_eq!(ranges(&[(7, 0, 1), (7, 2, 1), (7, 1, 1)]), [(7, 0, 3)]);
        assert_eq!(ranges(&[(7, 5, 1), (7, 7, 1), (7, 0, 20)]), [(7, 0, 20)]);
        assert_eq!(ranges(&[(7, 5, 0)]), []);
    }

    proptest! {
        // Promises: profile-record
        #[test]
        fn ranges_cover_exactly_the_bytes_read(
            reads in prop::collection::vec((1..4_u32, 0..60_u64, 0..20_u64), 0..40)
        ) {
            let bytes = |ranges: &[(u32, u64, u64)]| {
                let bytes = ranges.iter().flat_map(|&(ino, offset, len)| {
                    (offset..offset + len).map(move |byte| (ino, byte))
                });
                let mut bytes: Vec<_> = bytes.collect();
                bytes.sort_unstable();
                bytes
            };
            let mut expected = bytes(&reads);
            expected.dedup();
            prop_assert_eq!(bytes(&ranges(&reads)), expected);
        }
    }
}
