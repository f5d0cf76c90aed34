//! Queue of packed bytes that were pushed and are not decoded yet.

use std::cell::Cell;
use std::collections::VecDeque;
use std::ops::Range;

use bytes::{Buf, Bytes};

use crate::base::extent::Packed;

#[derive(Debug, Default)]
pub(crate) struct InputQueue {
    /// Slices that are not empty.
    slices: VecDeque<Bytes>,
    len: usize,
    offset: Packed,
    is_finished: bool,
}

impl InputQueue {
    pub(crate) fn new(offset: Packed) -> Self {
        Self {
            offset,
            ..Self::default()
        }
    }

    pub(crate) fn push(&mut self, packed: Bytes) {
        if !packed.is_empty() {
            self.len += packed.len();
            self.slices.push_back(packed);
        }
    }

    pub(crate) fn finish(&mut self) {
        self.is_finished = true;
    }

    pub(crate) fn offset(&self) -> Packed {
        self.offset
    }

    pub(crate) fn end(&self) -> Packed {
        Packed(self.offset.0.saturating_add(self.len as u64))
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether the stream is over: no queued bytes, and none to follow.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.is_finished && self.len == 0
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.is_finished
    }

    /// The first slice; empty only when there are no bytes.
    pub(crate) fn front(&self) -> &[u8] {
        self.slices.front().map_or(&[], |slice| slice)
    }

    pub(crate) fn slices_from(&self, mut distance: usize) -> impl Iterator<Item = &[u8]> {
        self.slices.iter().map(move |slice| {
            let rest = slice.get(distance..).unwrap_or_default();
            distance = distance.saturating_sub(slice.len());
            rest
        })
    }

    /// Copies bytes from `distance` on into `target`; `false` when there are not enough.
    pub(crate) fn peek_into(&self, mut distance: usize, mut target: &mut [u8]) -> bool {
        for slice in &self.slices {
            let Some(rest) = slice.get(distance..) else {
                distance -= slice.len();
                continue;
            };
            distance = 0;
            let len = rest.len().min(target.len());
            let (now, later) = target.split_at_mut(len);
            now.copy_from_slice(rest.get(..len).unwrap_or_default());
            target = later;
        }
        target.is_empty()
    }

    pub(crate) fn peek_at<const N: usize>(&self, distance: usize) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.peek_into(distance, &mut bytes).then_some(bytes)
    }

    pub(crate) fn peek<const N: usize>(&self) -> Option<[u8; N]> {
        self.peek_at(0)
    }

    /// Drops up to `len` of the next bytes, and returns how many.
    pub(crate) fn skip(&mut self, len: u64) -> u64 {
        let wanted = usize::try_from(len).unwrap_or(usize::MAX).min(self.len);
        let mut left = wanted;
        while let Some(slice) = self.slices.front_mut() {
            if slice.len() > left {
                slice.advance(left);
                break;
            }
            left -= slice.len();
            self.slices.pop_front();
        }
        self.len -= wanted;
        self.offset.0 = self.offset.0.saturating_add(wanted as u64);
        wanted as u64
    }

    /// Takes `len` bytes without copying; `None`, and takes nothing, if there are fewer.
    pub(crate) fn take(&mut self, len: usize) -> Option<SegmentedBytes> {
        if len > self.len {
            return None;
        }
        let mut slices = Vec::with_capacity(1);
        let mut left = len;
        while left > 0 {
            let slice = self.slices.front_mut()?;
            let piece = if slice.len() > left {
                slice.split_to(left)
            } else {
                self.slices.pop_front()?
            };
            left -= piece.len();
            slices.push(piece);
        }
        self.len -= len;
        self.offset.0 = self.offset.0.saturating_add(len as u64);
        Some(SegmentedBytes { slices, len })
    }

    /// The bytes in `range` from the next one on, or fewer at the end, without copying or taking them.
    pub(crate) fn slice(&self, range: Range<usize>) -> SegmentedBytes {
        let mut segments = SegmentedBytes::default();
        let mut start = 0;
        for slice in &self.slices {
            let within = |position: usize| position.clamp(start, start + slice.len()) - start;
            let (first, last) = (within(range.start), within(range.end));
            if first < last {
                segments.len += last - first;
                segments.slices.push(slice.slice(first..last));
            }
            start += slice.len();
        }
        segments
    }
}

/// Maximum bytes of a thread for [`SegmentedBytes::with_contiguous`]. No budget counts them or longer copies.
const MAX_SCRATCH_BYTES: usize = 4 << 20;

thread_local! {
    static CONTIGUOUS_SCRATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Adjacent packed bytes, in as many slices as were pushed.
#[derive(Clone, Debug, Default)]
pub(crate) struct SegmentedBytes {
    /// In order; none is empty.
    pub(crate) slices: Vec<Bytes>,
    len: usize,
}

impl SegmentedBytes {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Calls `f` with all bytes as one slice. Copies several to the thread's memory, which needs no clearing.
    pub(crate) fn with_contiguous<T>(&self, f: impl FnOnce(&[u8]) -> T) -> T {
        match self.slices.as_slice() {
            [] => f(&[]),
            [one] => f(one),
            several if self.len > MAX_SCRATCH_BYTES => f(&several.concat()),
            several => {
                // Taken out, so that `f` may call this function too.
                let mut scratch = CONTIGUOUS_SCRATCH.take();
                scratch.clear();
                scratch.reserve_exact(self.len);
                for slice in several {
                    scratch.extend_from_slice(slice);
                }
                let result = f(&scratch);
                CONTIGUOUS_SCRATCH.set(scratch);
                result
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input() -> InputQueue {
        let mut input = InputQueue::new(Packed(100));
        for slice in ["", "ab", "c", "defg"] {
            input.push(Bytes::from_static(slice.as_bytes()));
        }
        input
    }

    #[test]
    fn peek_crosses_slices_and_consumes_nothing() {
        let input = input();
        assert_eq!(input.peek(), Some(*b"abcd"));
        assert_eq!(input.peek_at(2), Some(*b"cde"));
        assert_eq!(input.peek_at(3), Some(*b"defg"));
        assert_eq!(input.peek_at::<5>(3), None);
        assert_eq!(input.peek_at::<1>(9), None);
        assert_eq!((input.offset(), input.len()), (Packed(100), 7));
    }

    #[test]
    fn slices_from_any_offset_equal_peeked_bytes() {
        let input = input();
        for distance in 0..8 {
            let found = input.slices_from(distance).collect::<Vec<_>>().concat();
            assert_eq!(found, b"abcdefg"[distance.min(7)..]);
        }
    }

    #[test]
    fn slice_of_any_range_equals_taken_bytes() {
        let input = input();
        for start in 0..9 {
            for end in start..9 {
                let segments = input.slice(start..end);
                let expected = &b"abcdefg"[start.min(7)..end.min(7)];
                segments.with_contiguous(|bytes| assert_eq!(bytes, expected));
                assert_eq!(segments.len(), expected.len());
            }
        }
        assert_eq!((input.offset(), input.len()), (Packed(100), 7));
    }

    #[test]
    fn take_beyond_the_end_consumes_nothing() {
        let mut input = input();
        assert!(input.take(8).is_none());
        assert_eq!(
            input
                .take(5)
                .map(|segments| segments.with_contiguous(<[u8]>::to_vec)),
            Some(b"abcde".to_vec())
        );
        assert_eq!(
            (input.offset(), input.len(), input.end()),
            (Packed(105), 2, Packed(107))
        );
    }

    #[test]
    fn take_within_one_slice_does_not_copy() {
        let bytes = Bytes::from_static(b"abcdef");
        let mut input = InputQueue::default();
        input.push(bytes.clone());
        let segments = input.take(4).unwrap();
        assert_eq!(segments.with_contiguous(<[u8]>::as_ptr), bytes.as_ptr());
    }

    #[test]
    fn skip_beyond_the_end_stops_at_the_end() {
        let mut input = input();
        assert_eq!(input.skip(3), 3);
        assert_eq!(input.front(), b"defg");
        assert_eq!(input.skip(u64::MAX), 4);
        input.finish();
        assert!(input.is_exhausted());
    }
}
