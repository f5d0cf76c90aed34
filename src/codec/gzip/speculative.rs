//! Decodes the middle of a deflate stream without the bytes before it.
//!
//! The decoder searches a *partition* of a packed stream for the start of a block. From there it decodes
//! twice, with windows that differ in every byte and have no pair of bytes twice. So where the results
//! differ, the pair gives the position in the true window; where they agree, they are right for any window.
//! Once they agree for as long as deflate can refer back, one decoding is enough.
//! Nothing is trusted: a [`SpeculativeOutput`] counts only if decoding of the bytes before it ends exactly
//! where it begins.

use bytes::Bytes;

use super::block_finder::{Candidate, Candidates};
use crate::base::buffer_pool::Buffer;
use crate::codec::gzip::sys::{Inflate, StopAt, StopReason, WINDOW_LEN};
use crate::codec::walker::input_queue::SegmentedBytes;

static MARKER_WINDOWS: [[u8; WINDOW_LEN]; 2] = marker_windows();

/// Minimum plain bytes between recorded block ends.
const MIN_BLOCK_END_SPACING: usize = 256 << 10;
/// Plain bytes between checks whether the second decoding is still needed.
const CONVERGENCE_CHECK_INTERVAL: usize = 128 << 10;

#[expect(clippy::large_stack_arrays, reason = "when compiled")]
const fn marker_windows() -> [[u8; WINDOW_LEN]; 2] {
    let mut windows = [[0; WINDOW_LEN]; 2];
    let mut position = 0_u16;
    while (position as usize) < WINDOW_LEN {
        let [low, high] = position.to_le_bytes();
        #[expect(clippy::indexing_slicing, reason = "when compiled")]
        {
            windows[0][position as usize] = low;
            windows[1][position as usize] = low.wrapping_add(high).wrapping_add(1);
        }
        position += 1;
    }
    windows
}

/// Replaces bytes by those of `window` where `first` and `second` differ.
fn resolve(first: &mut [u8], second: &[u8], window: &[u8]) {
    for (first, second) in first.chunks_mut(64).zip(second.chunks(64)) {
        if first == second {
            continue;
        }
        for (first, &second) in first.iter_mut().zip(second) {
            if *first != second {
                let high = second.wrapping_sub(*first).wrapping_sub(1);
                let position = usize::from(u16::from_le_bytes([*first, high]));
                *first = window.get(position).copied().unwrap_or_default();
            }
        }
    }
}

pub(super) struct SpeculativeTask {
    /// With some bytes behind it for the block that crosses its end.
    pub(super) packed: SegmentedBytes,
    /// In the stream, in bits.
    pub(super) start: u64,
    pub(super) partition_len: usize,
    /// Each at least as long as a window.
    pub(super) buffers: Vec<Buffer>,
}

/// Plain bytes from a block's start on, except those from the unknown window.
pub(super) struct SpeculativeOutput {
    /// In bits of the stream.
    first: Candidate,
    pub(super) end: BlockEnd,
    /// The byte that holds the last bit before the end.
    pub(super) last_byte: u8,
    pub(super) is_last: bool,
    pub(super) inner_ends: Vec<BlockEnd>,
    pub(super) pieces: Vec<UnresolvedPiece>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BlockEnd {
    /// In bits of the stream.
    pub(super) bit: u64,
    /// In plain bytes since the speculative output began.
    pub(super) plain: usize,
}

#[derive(Default)]
struct BlockEnds {
    inner: Vec<BlockEnd>,
    last: Option<BlockEnd>,
    is_flush: bool,
}

impl BlockEnds {
    /// Adds an end. That of a flush is recorded sooner, because it may be a seek point without a window.
    fn push(&mut self, end: BlockEnd, is_flush: bool) {
        let was_flush = std::mem::replace(&mut self.is_flush, is_flush);
        let Some(last) = self.last.replace(end) else {
            return;
        };
        let before = self.inner.last().map_or(0, |inner| inner.plain);
        let spacing = if was_flush {
            WINDOW_LEN
        } else {
            MIN_BLOCK_END_SPACING
        };
        if last.plain - before >= spacing && last.plain < end.plain {
            self.inner.push(last);
        }
    }
}

pub(super) struct UnresolvedPiece {
    first: Buffer,
    pub(super) len: usize,
    /// Output of the second decoding, for the start of the piece.
    second: Option<(Buffer, usize)>,
}

impl SpeculativeTask {
    /// Decodes to the first block end after the partition, or to full buffers. `None` if no block is found.
    pub(super) fn run(self) -> Option<SpeculativeOutput> {
        let packed = self.packed.clone();
        packed.with_contiguous(|packed| self.run_in(packed))
    }

    fn run_in(self, packed: &[u8]) -> Option<SpeculativeOutput> {
        let mut decoding = PartitionDecoder {
            packed,
            partition_end: self.partition_len as u64 * 8,
            free_buffers: self.buffers,
            inflaters: MARKER_WINDOWS.each_ref().map(WindowedInflate::new),
        };
        let mut probe = Inflate::new();
        // Maximum work of all false starts together.
        let mut wasted_limit: usize = decoding
            .free_buffers
            .iter()
            .map(|buffer| buffer.len())
            .sum();
        for candidate in Candidates::new(packed, self.partition_len) {
            if !is_valid_block_start(&mut probe, packed, candidate.bit) {
                continue;
            }
            match decoding.decode(candidate) {
                Ok(mut output) => {
                    output.first.bit += self.start;
                    output.end.bit += self.start;
                    for end in &mut output.inner_ends {
                        end.bit += self.start;
                    }
                    return Some(output);
                }
                Err(wasted) => wasted_limit = wasted_limit.checked_sub(wasted)?,
            }
        }
        None
    }
}

fn is_valid_block_start(inflate: &mut Inflate, packed: &[u8], bit: u64) -> bool {
    let (rest, split) = from_bit(packed, bit);
    inflate.resume(&[], split);
    let progress = inflate.decode(rest, &mut [], StopAt::StreamEnd);
    !matches!(progress.reason, StopReason::Damaged(_))
}

/// The bytes after `bit`: the partial byte and its bit position, then whole bytes.
fn from_bit(packed: &[u8], bit: u64) -> (&[u8], Option<(u8, u8)>) {
    let at = usize::try_from(bit / 8).unwrap_or(usize::MAX);
    let rest = packed.get(at..).unwrap_or_default();
    match (rest.split_first(), u8::try_from(bit % 8)) {
        (Some((&byte, rest)), Ok(bit @ 1..8)) => (rest, Some((byte, bit))),
        _ => (rest, None),
    }
}

struct WindowedInflate {
    inflate: Inflate,
    window: &'static [u8],
    at: usize,
}

impl WindowedInflate {
    fn new(window: &'static [u8; WINDOW_LEN]) -> Self {
        Self {
            inflate: Inflate::new(),
            window,
            at: 0,
        }
    }

    fn begin(&mut self, packed: &[u8], bit: u64) {
        let (rest, split) = from_bit(packed, bit);
        self.at = packed.len() - rest.len();
        self.inflate.resume(self.window, split);
    }

    fn decode(&mut self, packed: &[u8], output: &mut [u8], stop: StopAt) -> (usize, StopReason) {
        let rest = packed.get(self.at..).unwrap_or_default();
        let progress = self.inflate.decode(rest, output, stop);
        self.at += progress.consumed;
        (progress.produced, progress.reason)
    }
}

#[derive(PartialEq, Eq)]
enum FillEnd {
    /// It is full, and there is more.
    BufferFull,
    InputExhausted,
    /// The partition's end was reached, or the stream's when `is_last`.
    Done {
        is_last: bool,
    },
}

struct PartitionDecoder<'a> {
    packed: &'a [u8],
    /// In bits.
    partition_end: u64,
    free_buffers: Vec<Buffer>,
    inflaters: [WindowedInflate; 2],
}

impl PartitionDecoder<'_> {
    /// Decodes from `candidate`. The error is the number of bytes decoded until it failed.
    fn decode(&mut self, candidate: Candidate) -> Result<SpeculativeOutput, usize> {
        for inflater in &mut self.inflaters {
            inflater.begin(self.packed, candidate.bit);
        }
        let (mut pieces, mut ends) = (Vec::new(), BlockEnds::default());
        let mut start = 0;
        let mut needs_second = true;
        let mut filled = Ok(FillEnd::BufferFull);
        // A piece needs two buffers as long as the window matters, else one.
        while filled == Ok(FillEnd::BufferFull)
            && self.free_buffers.len() > usize::from(needs_second)
            && let Some(first) = self.free_buffers.pop()
        {
            let second = needs_second.then(|| self.free_buffers.pop()).flatten();
            let mut piece = UnresolvedPiece {
                first,
                len: 0,
                second: second.map(|buffer| (buffer, 0)),
            };
            filled = self.fill_first(&mut piece, start, &mut ends);
            if needs_second && filled.is_ok() {
                match self.fill_second(&mut piece) {
                    Ok(agree) => needs_second = !agree,
                    Err(()) => filled = Err(()),
                }
            }
            start += piece.len;
            pieces.push(piece);
        }
        let (Some(end), Ok(filled)) = (ends.last, filled) else {
            for piece in pieces {
                self.free_buffers.push(piece.first);
                self.free_buffers
                    .extend(piece.second.map(|(buffer, _)| buffer));
            }
            // Each false start has a minimum cost, even a very short one.
            return Err(start + WINDOW_LEN);
        };
        truncate_pieces(&mut pieces, end.plain);
        let last_byte = usize::try_from(end.bit.saturating_sub(1) / 8).unwrap_or(usize::MAX);
        Ok(SpeculativeOutput {
            first: candidate,
            end,
            last_byte: self.packed.get(last_byte).copied().unwrap_or_default(),
            is_last: filled == FillEnd::Done { is_last: true },
            inner_ends: ends.inner,
            pieces,
        })
    }

    /// Fills the first side of `piece`, from plain byte `start` on, and appends its block ends to `ends`.
    fn fill_first(
        &mut self,
        piece: &mut UnresolvedPiece,
        start: usize,
        ends: &mut BlockEnds,
    ) -> Result<FillEnd, ()> {
        let [inflater, _] = &mut self.inflaters;
        loop {
            let room = piece.first.get_mut(piece.len..).unwrap_or_default();
            let room_len = room.len();
            let (produced, reason) = inflater.decode(self.packed, room, StopAt::BlockEnd);
            piece.len += produced;
            let unused_bits = match reason {
                StopReason::Damaged(_) => return Err(()),
                StopReason::Exhausted if produced == room_len => return Ok(FillEnd::BufferFull),
                StopReason::Exhausted => return Ok(FillEnd::InputExhausted),
                StopReason::BlockEnd { unused_bits } => unused_bits.into(),
                StopReason::StreamEnd => 0,
            };
            let bit = (inflater.at as u64 * 8).saturating_sub(unused_bits);
            let end = BlockEnd {
                bit,
                plain: start + piece.len,
            };
            let used = self.packed.get(..inflater.at).unwrap_or_default();
            ends.push(end, unused_bits == 0 && used.ends_with(&[0, 0, 0xff, 0xff]));
            let is_last = reason == StopReason::StreamEnd;
            if is_last || bit >= self.partition_end {
                return Ok(FillEnd::Done { is_last });
            }
        }
    }

    /// Fills the second side up to an equal window (`true`) or the first's end. A shorter one proves nothing.
    fn fill_second(&mut self, piece: &mut UnresolvedPiece) -> Result<bool, ()> {
        let [_, inflater] = &mut self.inflaters;
        let Some((second, len)) = &mut piece.second else {
            return Ok(true);
        };
        while *len < piece.len {
            let check_end = piece.len.min(*len + CONVERGENCE_CHECK_INTERVAL);
            let room = second.get_mut(*len..check_end).unwrap_or_default();
            let (produced, _) = inflater.decode(self.packed, room, StopAt::StreamEnd);
            // Both decodings take the same path, because the window has no influence on it.
            debug_assert!(produced > 0, "the second decoding stops before the first");
            if produced == 0 {
                return Err(());
            }
            *len += produced;
            let window = len.saturating_sub(WINDOW_LEN)..*len;
            if window.len() == WINDOW_LEN && piece.first.get(window.clone()) == second.get(window) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

fn truncate_pieces(pieces: &mut Vec<UnresolvedPiece>, mut len: usize) {
    pieces.retain_mut(|piece| {
        piece.len = piece.len.min(len);
        len -= piece.len;
        piece.len > 0
    });
}

impl SpeculativeOutput {
    pub(super) fn begins_at(&self, bit: u64) -> bool {
        bit <= self.first.bit && self.first.bit - bit <= self.first.ambiguous_bits
    }

    pub(super) fn begins_before(&self, bit: u64) -> bool {
        self.first.bit < bit
    }

    /// The window at plain byte `plain`, given the whole one before the speculative output.
    pub(super) fn window_at(&self, plain: usize, window: &[u8]) -> Bytes {
        let mut tail = Vec::with_capacity(WINDOW_LEN);
        tail.extend_from_slice(window.get(plain..).unwrap_or_default());
        let wanted = plain.saturating_sub(WINDOW_LEN)..plain;
        let mut start = 0;
        for piece in &self.pieces {
            let within = |position: usize| position.clamp(start, start + piece.len) - start;
            let range = within(wanted.start)..within(wanted.end);
            let first = tail.len();
            tail.extend_from_slice(piece.first.get(range.clone()).unwrap_or_default());
            if let Some((second, len)) = &piece.second {
                let second = second.get(range.start..range.end.min(*len));
                let second = second.unwrap_or_default();
                let tail = tail.get_mut(first..first + second.len());
                resolve(tail.unwrap_or_default(), second, window);
            }
            start += piece.len;
        }
        tail.into()
    }
}

impl UnresolvedPiece {
    /// The plain bytes, given the whole window before the speculative output.
    pub(super) fn resolve(mut self, window: &[u8]) -> Bytes {
        self.first.truncate(self.len);
        if let Some((second, len)) = self.second.take() {
            let second = second.get(..len.min(self.len)).unwrap_or_default();
            resolve(&mut self.first, second, window);
        }
        self.first.freeze()
    }
}

#[cfg(test)]
mod tests {
    use super::super::block_finder::tests::{blocks, deflate};
    use super::super::tests::text;
    use super::*;
    use crate::base::buffer_pool::BufferPool;
    use crate::base::extent::Packed;
    use crate::codec::test_support::noise;
    use crate::codec::walker::input_queue::InputQueue;

    /// Decodes the `partition_len` bytes at `start`, with this number of buffers of 64 KiB.
    fn decode_speculatively(
        packed: &[u8],
        start: usize,
        partition_len: usize,
        buffers: usize,
    ) -> Option<SpeculativeOutput> {
        let mut input = InputQueue::new(Packed(0));
        // In several slices, like real input.
        for slice in packed.chunks(30_011) {
            input.push(Bytes::copy_from_slice(slice));
        }
        let pool = BufferPool::new(64 << 20);
        let task = SpeculativeTask {
            packed: input.slice(start..start + partition_len + 100_000),
            start: start as u64 * 8,
            partition_len,
            buffers: (0..buffers)
                .map(|_| pool.acquire(64 << 10).expect("open"))
                .collect(),
        };
        task.run()
    }

    /// Expects `output` to be `plain` between two block ends of `packed`; returns the bit where it ends.
    fn assert_right(output: SpeculativeOutput, packed: &[u8], plain: &[u8]) -> u64 {
        let blocks = blocks(packed);
        let begins = |(bit, _): &&(u64, usize)| output.begins_at(*bit);
        let (bit, start) = *blocks.iter().find(begins).expect("a block");
        assert!(!output.begins_before(bit));
        let end = start + output.end.plain;
        assert!(blocks.contains(&(output.end.bit, end)));
        for inner in &output.inner_ends {
            assert!(blocks.contains(&(inner.bit, start + inner.plain)));
        }
        let window = &plain[start - WINDOW_LEN..start];
        for at in [0, 1, 20_000, 40_000, 65_536, output.end.plain] {
            let at = at.min(output.end.plain);
            let expected = &plain[start + at - WINDOW_LEN..start + at];
            assert!(output.window_at(at, window) == expected, "{at}");
        }
        let last_byte = usize::try_from((output.end.bit - 1) / 8).expect("small");
        assert_eq!(output.last_byte, packed[last_byte]);
        let bit = output.end.bit;
        let pieces = output.pieces.into_iter();
        let bytes: Vec<_> = pieces.flat_map(|piece| piece.resolve(window)).collect();
        assert!(bytes == plain[start..end]);
        bit
    }

    #[test]
    fn partitions_decode_to_the_bytes_of_the_stream() {
        let plain = text(2_000_000, 1);
        let (mut right, mut wrong) = (0, 0);
        for level in [2, 6, 9] {
            let packed = deflate(&plain, level);
            let blocks = blocks(&packed);
            for start in (60_000..packed.len() - 60_000).step_by(40_009) {
                let output = decode_speculatively(&packed, start, 50_000, 20).expect("a guess");
                if blocks.iter().any(|(bit, _)| output.begins_at(*bit)) {
                    let end = assert_right(output, &packed, &plain);
                    assert!(end >= 8 * (start as u64 + 50_000));
                    right += 1;
                } else {
                    wrong += 1;
                }
            }
        }
        // A stored block that is none is found once in half a million bytes.
        assert!(right > 40 && wrong <= 2, "{right} {wrong}");
    }

    #[test]
    fn highly_compressible_partition_ends_with_a_block_that_fits() {
        let plain = [b"so it goes ".repeat(200_000), text(300_000, 1)].concat();
        let packed = deflate(&plain, 6);
        let start = 1000;
        let output = decode_speculatively(&packed, start, packed.len(), 8).expect("a guess");
        assert!(!output.is_last);
        let end = assert_right(output, &packed, &plain);
        assert!(end < 8 * packed.len() as u64);
    }

    #[test]
    fn second_decoding_stops_when_the_window_is_not_needed() {
        let plain = noise(1_000_000);
        let packed = deflate(&plain, 6);
        let output = decode_speculatively(&packed, 100_000, 300_000, 7).expect("a guess");
        let seconds: Vec<_> = output
            .pieces
            .iter()
            .map(|piece| piece.second.is_some())
            .collect();
        // Each piece has one buffer but for the first.
        assert_eq!(seconds, [true, false, false, false, false]);
        assert_right(output, &packed, &plain);
    }

    #[test]
    fn end_of_stream_ends_the_last_partition() {
        let plain = text(500_000, 1);
        let mut packed = deflate(&plain, 6);
        let len = packed.len() as u64;
        packed.extend(noise(100_000));
        let output = decode_speculatively(&packed, 60_000, 200_000, 40).expect("a guess");
        assert_eq!((output.is_last, output.end.bit), (true, len * 8));
    }

    #[test]
    fn partition_without_a_block_decodes_to_nothing() {
        let bytes = [vec![0; 50_000], noise(30_000), vec![0xff; 50_000]].concat();
        assert!(decode_speculatively(&bytes, 0, bytes.len(), 4).is_none());
    }

    #[test]
    fn false_block_candidates_are_skipped() {
        // Beginnings of blocks, in stored blocks.
        let fakes = deflate(&text(40_000, 1), 6);
        let parts = noise(1_000_000);
        let parts = parts.chunks(15_000);
        let plain: Vec<_> = parts
            .flat_map(|part| [&fakes[..3000], part].concat())
            .collect();
        let packed = deflate(&plain, 0);
        let blocks = blocks(&packed);
        let (mut right, mut wrong) = (0, 0);
        for start in (100_000..packed.len() - 300_000).step_by(70_001) {
            let output = decode_speculatively(&packed, start, 150_000, 40).expect("a guess");
            if blocks.iter().any(|(bit, _)| output.begins_at(*bit)) {
                assert_right(output, &packed, &plain);
                right += 1;
            } else {
                wrong += 1;
            }
        }
        assert!(right > 2 * wrong, "{right} {wrong}");
    }
}
