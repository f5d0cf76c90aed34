//! Packed bytes that were pushed and not yet decoded.

use std::cell::Cell;
use std::collections::VecDeque;
use std::ops::Range;

use bytes::{Buf, Bytes};

use crate::base::extent::Packed;

/// A queue of packed slices that knows where in the stream it stands.
#[derive(Debug, Default)]
pub(super) struct Input {
    /// None is empty.
    slices: VecDeque<Bytes>,
    len: usize,
    offset: Packed,
    ended: bool,
}

impl Input {
    /// Nothing yet; the first byte pushed is the one at `offset`.
    pub(super) fn at(offset: Packed) -> Self {
        Self {
            offset,
            ..Self::default()
        }
    }

    /// Appends the next packed bytes.
    pub(super) fn push(&mut self, packed: Bytes) {
        if !packed.is_empty() {
            self.len += packed.len();
            self.slices.push_back(packed);
        }
    }

    /// Says that nothing follows.
    pub(super) fn finish(&mut self) {
        self.ended = true;
    }

    /// Where the next byte lies.
    pub(super) fn offset(&self) -> Packed {
        self.offset
    }

    /// Where the bytes at hand end.
    pub(super) fn end(&self) -> Packed {
        Packed(self.offset.0.saturating_add(self.len as u64))
    }

    /// Bytes at hand.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Whether the stream is over: no bytes at hand, and none to come.
    pub(super) fn is_over(&self) -> bool {
        self.ended && self.len == 0
    }

    /// Whether no more bytes will come than are at hand.
    pub(super) fn is_ended(&self) -> bool {
        self.ended
    }

    /// The first bytes at hand as one slice; empty only when there are none.
    pub(super) fn front(&self) -> &[u8] {
        self.slices.front().map_or(&[], |slice| slice)
    }

    /// The bytes at hand from `distance` ahead on, slice by slice.
    pub(super) fn from(&self, mut distance: usize) -> impl Iterator<Item = &[u8]> {
        self.slices.iter().map(move |slice| {
            let rest = slice.get(distance..).unwrap_or_default();
            distance = distance.saturating_sub(slice.len());
            rest
        })
    }

    /// Fills `target` from `distance` bytes ahead; false when not so many bytes are at hand.
    pub(super) fn peek_into(&self, mut distance: usize, mut target: &mut [u8]) -> bool {
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

    /// The `N` bytes that lie `distance` bytes ahead.
    pub(super) fn peek_at<const N: usize>(&self, distance: usize) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.peek_into(distance, &mut bytes).then_some(bytes)
    }

    /// The next `N` bytes, left where they are.
    pub(super) fn peek<const N: usize>(&self) -> Option<[u8; N]> {
        self.peek_at(0)
    }

    /// Drops the next `len` bytes or, when fewer are at hand, these; says how many.
    pub(super) fn skip(&mut self, len: u64) -> u64 {
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

    /// Takes the next `len` bytes without copying; `None`, and nothing taken, when not so many
    /// are at hand.
    pub(super) fn take(&mut self, len: usize) -> Option<Pieces> {
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
        Some(Pieces { slices, len })
    }

    /// The bytes at hand in `range`, which counts from the next one, left where they are and not
    /// copied; fewer when not so many are at hand.
    pub(super) fn slice(&self, range: Range<usize>) -> Pieces {
        let mut pieces = Pieces::default();
        let mut start = 0;
        for slice in &self.slices {
            let within = |position: usize| position.clamp(start, start + slice.len()) - start;
            let (first, last) = (within(range.start), within(range.end));
            if first < last {
                pieces.len += last - first;
                pieces.slices.push(slice.slice(first..last));
            }
            start += slice.len();
        }
        pieces
    }
}

/// The most memory that a thread keeps for [`Pieces::with_contiguous`], in bytes; no budget counts it,
/// nor a longer copy.
const MOST_KEPT: usize = 4 << 20;

thread_local! {
    static JOINED: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Packed bytes that follow each other, in as many slices as they were pushed in.
#[derive(Clone, Debug, Default)]
pub(super) struct Pieces {
    slices: Vec<Bytes>,
    len: usize,
}

impl Pieces {
    /// Bytes in all slices.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The slices in order; none is empty.
    pub(super) fn slices(&self) -> &[Bytes] {
        &self.slices
    }

    /// Gives `look` all bytes as one slice, copied only when there are several: into memory that the
    /// thread keeps for the next time, as that of a fresh copy would have to be cleared first.
    pub(super) fn with_contiguous<T>(&self, look: impl FnOnce(&[u8]) -> T) -> T {
        match self.slices.as_slice() {
            [] => look(&[]),
            [one] => look(one),
            several if self.len > MOST_KEPT => look(&several.concat()),
            several => {
                // Taken out, so that nothing is amiss when `look` comes here, too.
                let mut joined = JOINED.take();
                joined.clear();
                joined.reserve_exact(self.len);
                for slice in several {
                    joined.extend_from_slice(slice);
                }
                let seen = look(&joined);
                JOINED.set(joined);
                seen
            }
        }
    }
}

impl IntoIterator for Pieces {
    type Item = Bytes;
    type IntoIter = std::vec::IntoIter<Bytes>;
    fn into_iter(self) -> Self::IntoIter {
        self.slices.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input() -> Input {
        let mut input = Input::at(Packed(100));
        for slice in ["", "ab", "c", "defg"] {
            input.push(Bytes::from_static(slice.as_bytes()));
        }
        input
    }

    #[test]
    fn peeking_crosses_slices_and_takes_nothing() {
        let input = input();
        assert_eq!(input.peek(), Some(*b"abcd"));
        assert_eq!(input.peek_at(2), Some(*b"cde"));
        assert_eq!(input.peek_at(3), Some(*b"defg"));
        assert_eq!(input.peek_at::<5>(3), None);
        assert_eq!(input.peek_at::<1>(9), None);
        assert_eq!((input.offset(), input.len()), (Packed(100), 7));
    }

    #[test]
    fn bytes_from_anywhere_on_are_those_that_peeking_finds() {
        let input = input();
        for distance in 0..8 {
            let found = input.from(distance).collect::<Vec<_>>().concat();
            assert_eq!(found, b"abcdefg"[distance.min(7)..]);
        }
    }

    #[test]
    fn slices_of_what_is_ahead_are_those_that_taking_finds() {
        let input = input();
        for start in 0..9 {
            for end in start..9 {
                let pieces = input.slice(start..end);
                let expected = &b"abcdefg"[start.min(7)..end.min(7)];
                pieces.with_contiguous(|bytes| assert_eq!(bytes, expected));
                assert_eq!(pieces.len(), expected.len());
            }
        }
        assert_eq!((input.offset(), input.len()), (Packed(100), 7));
    }

    #[test]
    fn taking_more_than_there_is_takes_nothing() {
        let mut input = input();
        assert!(input.take(8).is_none());
        assert_eq!(
            input
                .take(5)
                .map(|pieces| pieces.with_contiguous(<[u8]>::to_vec)),
            Some(b"abcde".to_vec())
        );
        assert_eq!(
            (input.offset(), input.len(), input.end()),
            (Packed(105), 2, Packed(107))
        );
    }

    #[test]
    fn one_slice_is_not_copied() {
        let bytes = Bytes::from_static(b"abcdef");
        let mut input = Input::default();
        input.push(bytes.clone());
        let pieces = input.take(4).unwrap();
        assert_eq!(pieces.with_contiguous(<[u8]>::as_ptr), bytes.as_ptr());
    }

    #[test]
    fn skipping_goes_as_far_as_there_are_bytes() {
        let mut input = input();
        assert_eq!(input.skip(3), 3);
        assert_eq!(input.front(), b"defg");
        assert_eq!(input.skip(u64::MAX), 4);
        input.finish();
        assert!(input.is_over());
    }
}
