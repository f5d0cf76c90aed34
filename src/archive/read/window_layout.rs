//! Division of an archive into windows, and the recent fetches of them.

use std::collections::VecDeque;
use std::ops::Range;

use super::single_flight::Claim;
use crate::archive::error::ReadError;
use crate::base::extent::{Extent, Plain};

/// Length of a window, unless the blocks of the index are longer.
const WINDOW_BYTES: u64 = 128 << 10;

/// Maximum number of bytes that one read fetches in addition to those that it needs.
pub(super) const MAX_FETCH_BYTES: u64 = 1 << 20;

/// Length of a read within one span that indicates a sequential reader.
pub(super) const LONG_READ_BYTES: u64 = 256 << 10;

/// Growth factor of fetches, for a read that continues a fetch.
pub(super) const FETCH_GROWTH_FACTOR: u64 = 4;

/// Maximum number of fetches that a read can continue. The oldest is dropped first.
pub(super) const MAX_RECENT_FETCHES: usize = 16;

pub(super) type WindowClaim = Claim<ReadError, u64>;

/// Window ranges of recent fetches, latest first; pure.
#[derive(Debug, Default)]
pub(super) struct RecentFetches(VecDeque<Range<u64>>);

#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) window_bytes: u64,
    pub(super) end: u64,
}

impl RecentFetches {
    /// Number of windows to fetch from `number` on, for a read that misses it.
    pub(super) fn next_len(&self, number: u64, max: u64) -> u64 {
        let continued = self.0.iter().find(|fetch| fetch.end == number);
        let len = continued.map_or(1, |fetch| {
            (fetch.end - fetch.start).saturating_mul(FETCH_GROWTH_FACTOR)
        });
        len.min(max)
    }

    pub(super) fn add(&mut self, fetched: Range<u64>) {
        self.0.retain(|fetch| fetch.end != fetched.start);
        self.0.push_front(fetched);
        self.0.truncate(MAX_RECENT_FETCHES);
    }
}

impl Layout {
    /// The layout of an archive of `archive_bytes`, whose index has blocks of `block_len`.
    pub(super) fn new(block_len: u64, archive_bytes: u64) -> Self {
        Self {
            window_bytes: WINDOW_BYTES.max(block_len),
            end: archive_bytes,
        }
    }

    pub(super) fn windows(&self, plain: Extent<Plain>) -> Range<u64> {
        plain.start().0 / self.window_bytes..plain.end().0.div_ceil(self.window_bytes)
    }

    pub(super) fn windows_starting_in(&self, plain: Extent<Plain>) -> Range<u64> {
        let number = |at: Plain| at.0.div_ceil(self.window_bytes);
        number(plain.start())..number(plain.end())
    }

    pub(super) fn extent(&self, windows: &Range<u64>) -> Extent<Plain> {
        let start = windows
            .start
            .saturating_mul(self.window_bytes)
            .min(self.end);
        let end = windows.end.saturating_mul(self.window_bytes).min(self.end);
        Extent::with_len(Plain(start), end.saturating_sub(start))
    }

    /// The bytes of `count` adjacent windows that are claimed, from `first` on.
    pub(super) fn claimed_extent(
        &self,
        first: Option<&WindowClaim>,
        count: usize,
    ) -> Extent<Plain> {
        let first = first.map_or(0, Claim::span);
        self.extent(&(first..first.saturating_add(count as u64)))
    }

    pub(super) fn window(&self, number: u64) -> Extent<Plain> {
        self.extent(&(number..number.saturating_add(1)))
    }

    pub(super) fn max_windows(&self) -> u64 {
        (MAX_FETCH_BYTES / self.window_bytes).max(1)
    }

    /// The aligned group of windows around `number` that one fetch can cover.
    pub(super) fn group(&self, number: u64) -> Range<u64> {
        let len = self.max_windows();
        let start = number / len * len;
        start..start.saturating_add(len).min(self.window_count())
    }

    /// Number of windows of the archive.
    pub(super) fn window_count(&self) -> u64 {
        self.end.div_ceil(self.window_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;

    fn layout() -> Layout {
        Layout {
            window_bytes: WINDOW_BYTES,
            end: 10 * WINDOW_BYTES + 5,
        }
    }

    fn extent(start: u64, end: u64) -> Extent<Plain> {
        Extent::new(Plain(start), Plain(end)).expect("in order")
    }

    #[test]
    fn windows_are_aligned_and_end_with_the_archive() {
        let layout = layout();
        assert_eq!(layout.windows(extent(1, 2)), 0..1);
        assert_eq!(layout.windows(extent(127 * KIB, 129 * KIB)), 0..2);
        assert_eq!(layout.windows(extent(128 * KIB, 256 * KIB)), 1..2);
        assert_eq!(layout.windows_starting_in(extent(1, 256 * KIB)), 1..2);
        assert_eq!(layout.window(10), extent(1280 * KIB, 1280 * KIB + 5));
        assert!(layout.window(11).is_empty());
        assert_eq!(layout.group(7), 0..8);
        assert_eq!(layout.group(9), 8..11);
    }

    #[test]
    fn blocks_longer_than_windows_are_groups_of_one() {
        let layout = Layout {
            window_bytes: 2 * MAX_FETCH_BYTES,
            end: u64::MAX,
        };
        assert_eq!(layout.group(3), 3..4);
        assert_eq!(layout.max_windows(), 1);
    }

    #[test]
    fn fetch_size_grows_only_with_sequential_reads() {
        let mut recent = RecentFetches::default();
        assert_eq!(recent.next_len(7, 8), 1);
        recent.add(7..8);
        assert_eq!(recent.next_len(7, 8), 1, "evicted and read again");
        assert_eq!(recent.next_len(9, 8), 1, "a gap");
        assert_eq!(recent.next_len(8, 8), 4);
        recent.add(8..12);
        assert_eq!(recent.next_len(8, 8), 1, "continued already");
        assert_eq!(recent.next_len(12, 8), 8, "at most");
        for number in 0..MAX_RECENT_FETCHES as u64 {
            recent.add(100 * number..100 * number + 1);
        }
        assert_eq!(recent.next_len(12, 8), 1, "dropped");
        assert_eq!(recent.next_len(1, 8), 4, "not dropped");
    }
}
