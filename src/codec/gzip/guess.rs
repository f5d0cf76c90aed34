//! Decodes the middle of a deflate stream without knowing what came before.
//!
//! A *share* of a packed stream is searched for where a block begins, and decoded from there on
//! twice, as if after two different windows. The two windows differ in every byte, and no two
//! places in them hold the same pair of bytes; so where the results differ, the pair says which
//! byte of the true window belongs there, and where they agree, they are right whatever it is.
//! Once they agree for as long as deflate can refer back to, one decoding is enough.
//!
//! Nothing here is trusted: a [`Guess`] counts only when the decoding of what is before it ends
//! exactly where it begins.

use bytes::Bytes;

use super::finder::{Candidate, Candidates};
use crate::base::buffer_pool::Buffer;
use crate::codec::input::Pieces;
use crate::codec::sys::{Inflate, Reason, Stop, WINDOW_LEN};

/// The window that the first decoding is given, and the second.
static WINDOWS: [[u8; WINDOW_LEN]; 2] = windows();

/// Block ends inside a guess are remembered when they are so many plain bytes apart.
const END_SPACING: usize = 256 << 10;
/// How many plain bytes the second decoding makes before it is asked whether it is needed.
const STRETCH_LEN: usize = 128 << 10;

#[expect(clippy::large_stack_arrays, reason = "when compiled")]
const fn windows() -> [[u8; WINDOW_LEN]; 2] {
    let mut windows = [[0; WINDOW_LEN]; 2];
    let mut place = 0_u16;
    while (place as usize) < WINDOW_LEN {
        let [low, high] = place.to_le_bytes();
        #[expect(clippy::indexing_slicing, reason = "when compiled")]
        {
            windows[0][place as usize] = low;
            windows[1][place as usize] = low.wrapping_add(high).wrapping_add(1);
        }
        place += 1;
    }
    windows
}

/// Puts the bytes of `window` where `first` and `second` differ, as far as both go.
fn resolve(first: &mut [u8], second: &[u8], window: &[u8]) {
    for (first, second) in first.chunks_mut(64).zip(second.chunks(64)) {
        if first == second {
            continue;
        }
        for (first, &second) in first.iter_mut().zip(second) {
            if *first != second {
                let high = second.wrapping_sub(*first).wrapping_sub(1);
                let place = usize::from(u16::from_le_bytes([*first, high]));
                *first = window.get(place).copied().unwrap_or_default();
            }
        }
    }
}

/// A share to be decoded.
#[derive(Debug)]
pub(super) struct Task {
    /// The share, and some bytes behind it for the block that crosses its end.
    pub(super) packed: Pieces,
    /// Where it lies in the stream, in bits.
    pub(super) start: u64,
    /// The share's length in bytes.
    pub(super) share_len: usize,
    /// Where plain bytes go; each at least as long as a window.
    pub(super) buffers: Vec<Buffer>,
}

/// Plain bytes from a block's beginning on, but for what the window before holds.
#[derive(Debug)]
pub(super) struct Guess {
    /// Where the first block begins, in bits of the stream.
    first: Candidate,
    /// Where the last block ends.
    pub(super) end: BlockEnd,
    /// The byte that holds the last bit before the end.
    pub(super) last_byte: u8,
    /// Whether the last block is the stream's last.
    pub(super) is_last: bool,
    /// Block ends inside.
    pub(super) inner_ends: Vec<BlockEnd>,
    pub(super) pieces: Vec<Piece>,
}

/// Where a block ends and the next begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BlockEnd {
    /// In bits of the stream.
    pub(super) bit: u64,
    /// In plain bytes since the guess began.
    pub(super) plain: usize,
}

/// The block ends met so far.
#[derive(Default)]
struct Ends {
    /// Far enough from each other.
    inner: Vec<BlockEnd>,
    last: Option<BlockEnd>,
}

impl Ends {
    fn push(&mut self, end: BlockEnd) {
        let Some(last) = self.last.replace(end) else {
            return;
        };
        let before = self.inner.last().map_or(0, |inner| inner.plain);
        if last.plain - before >= END_SPACING && last.plain < end.plain {
            self.inner.push(last);
        }
    }
}

/// Some of a guess' plain bytes.
#[derive(Debug)]
pub(super) struct Piece {
    first: Buffer,
    len: usize,
    /// What the second decoding made of the beginning.
    second: Option<(Buffer, usize)>,
}

impl Task {
    /// Searches and decodes up to the first block end behind the share, or as far as there are
    /// buffers. `None` when nothing in the share holds good.
    pub(super) fn run(self) -> Option<Guess> {
        let packed = self.packed.clone();
        packed.with_contiguous(|packed| self.run_in(packed))
    }

    fn run_in(self, packed: &[u8]) -> Option<Guess> {
        let mut decoding = Decoding {
            packed,
            share_end: self.share_len as u64 * 8,
            free: self.buffers,
            sides: WINDOWS.each_ref().map(Side::new),
        };
        let mut probe = Inflate::new();
        // What all false starts together may cost.
        let mut wasted_limit: usize = decoding.free.iter().map(|buffer| buffer.len()).sum();
        for candidate in Candidates::new(packed, self.share_len) {
            if !begins_block(&mut probe, packed, candidate.bit) {
                continue;
            }
            match decoding.decode(candidate) {
                Ok(mut guess) => {
                    guess.first.bit += self.start;
                    guess.end.bit += self.start;
                    for end in &mut guess.inner_ends {
                        end.bit += self.start;
                    }
                    return Some(guess);
                }
                Err(wasted) => wasted_limit = wasted_limit.checked_sub(wasted)?,
            }
        }
        None
    }
}

/// Whether zlib finds nothing wrong with the header of a block at `bit`.
fn begins_block(inflate: &mut Inflate, packed: &[u8], bit: u64) -> bool {
    let (rest, split) = from_bit(packed, bit);
    inflate.resume(&[], split);
    let progress = inflate.decode(rest, &mut [], Stop::AtEnd);
    !matches!(progress.reason, Reason::Damaged(_))
}

/// What lies behind `bit`: whole bytes, and before them the byte that `bit` splits, and where.
fn from_bit(packed: &[u8], bit: u64) -> (&[u8], Option<(u8, u8)>) {
    let at = usize::try_from(bit / 8).unwrap_or(usize::MAX);
    let rest = packed.get(at..).unwrap_or_default();
    match (rest.split_first(), u8::try_from(bit % 8)) {
        (Some((&byte, rest)), Ok(bit @ 1..8)) => (rest, Some((byte, bit))),
        _ => (rest, None),
    }
}

/// One of the two decodings.
struct Side {
    inflate: Inflate,
    window: &'static [u8],
    /// Packed bytes used.
    at: usize,
}

impl Side {
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

    /// Decodes on; answers how many bytes were made, and why no more.
    fn decode(&mut self, packed: &[u8], output: &mut [u8], stop: Stop) -> (usize, Reason) {
        let rest = packed.get(self.at..).unwrap_or_default();
        let progress = self.inflate.decode(rest, output, stop);
        self.at += progress.consumed;
        (progress.produced, progress.reason)
    }
}

/// How a piece came to its end.
#[derive(PartialEq, Eq)]
enum Filled {
    /// It is full, and there is more.
    Full,
    /// The packed bytes are used up.
    Starved,
    /// The share's end was reached, or the stream's when `is_last`.
    Done { is_last: bool },
}

/// Decodes a share from one candidate after the other.
struct Decoding<'a> {
    packed: &'a [u8],
    /// In bits.
    share_end: u64,
    free: Vec<Buffer>,
    sides: [Side; 2],
}

impl Decoding<'_> {
    /// Decodes from `candidate`, where all bits count from the first of the packed bytes. When no
    /// block begins there after all, answers how many bytes were decoded to see that.
    fn decode(&mut self, candidate: Candidate) -> Result<Guess, usize> {
        for side in &mut self.sides {
            side.begin(self.packed, candidate.bit);
        }
        let (mut pieces, mut ends) = (Vec::new(), Ends::default());
        let mut start = 0;
        let mut both = true;
        let mut filled = Ok(Filled::Full);
        // A piece needs two buffers as long as the window matters, else one.
        while filled == Ok(Filled::Full)
            && self.free.len() > usize::from(both)
            && let Some(first) = self.free.pop()
        {
            let second = both.then(|| self.free.pop()).flatten();
            let mut piece = Piece {
                first,
                len: 0,
                second: second.map(|buffer| (buffer, 0)),
            };
            filled = self.fill(&mut piece, start, &mut ends);
            if both && filled.is_ok() {
                match self.follow(&mut piece) {
                    Ok(agree) => both = !agree,
                    Err(()) => filled = Err(()),
                }
            }
            start += piece.len;
            pieces.push(piece);
        }
        let (Some(end), Ok(filled)) = (ends.last, filled) else {
            for piece in pieces {
                self.free.push(piece.first);
                self.free.extend(piece.second.map(|(buffer, _)| buffer));
            }
            // Each false start costs something, be it as short as it may.
            return Err(start + WINDOW_LEN);
        };
        cut(&mut pieces, end.plain);
        let last_byte = usize::try_from(end.bit.saturating_sub(1) / 8).unwrap_or(usize::MAX);
        Ok(Guess {
            first: candidate,
            end,
            last_byte: self.packed.get(last_byte).copied().unwrap_or_default(),
            is_last: filled == Filled::Done { is_last: true },
            inner_ends: ends.inner,
            pieces,
        })
    }

    /// Fills the first side of `piece`, which begins at plain byte `start`, and appends the block
    /// ends in it to `ends`.
    fn fill(&mut self, piece: &mut Piece, start: usize, ends: &mut Ends) -> Result<Filled, ()> {
        let [side, _] = &mut self.sides;
        loop {
            let room = piece.first.get_mut(piece.len..).unwrap_or_default();
            let room_len = room.len();
            let (produced, reason) = side.decode(self.packed, room, Stop::AtBlockEnd);
            piece.len += produced;
            let unused_bits = match reason {
                Reason::Damaged(_) => return Err(()),
                Reason::Exhausted if produced == room_len => return Ok(Filled::Full),
                Reason::Exhausted => return Ok(Filled::Starved),
                Reason::BlockEnd { unused_bits } => unused_bits.into(),
                Reason::StreamEnd => 0,
            };
            let bit = (side.at as u64 * 8).saturating_sub(unused_bits);
            let end = BlockEnd {
                bit,
                plain: start + piece.len,
            };
            ends.push(end);
            let is_last = reason == Reason::StreamEnd;
            if is_last || bit >= self.share_end {
                return Ok(Filled::Done { is_last });
            }
        }
    }

    /// Fills the second side of `piece` as far as the first, unless both come to agree on a whole
    /// window before; answers whether they do. Without a second side as long as that, nothing
    /// tells which bytes are right.
    fn follow(&mut self, piece: &mut Piece) -> Result<bool, ()> {
        let [_, side] = &mut self.sides;
        let Some((second, len)) = &mut piece.second else {
            return Ok(true);
        };
        while *len < piece.len {
            let stretch_end = piece.len.min(*len + STRETCH_LEN);
            let room = second.get_mut(*len..stretch_end).unwrap_or_default();
            let (produced, _) = side.decode(self.packed, room, Stop::AtEnd);
            // Both decodings take the same way: what stands in the window decides nothing.
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

/// Shortens `pieces` to `len` bytes together.
fn cut(pieces: &mut Vec<Piece>, mut len: usize) {
    pieces.retain_mut(|piece| {
        piece.len = piece.len.min(len);
        len -= piece.len;
        piece.len > 0
    });
}

impl Guess {
    /// Whether the first block is one that begins at `bit`.
    pub(super) fn begins_at(&self, bit: u64) -> bool {
        bit <= self.first.bit && self.first.bit - bit <= self.first.slack
    }

    /// Whether the first block begins before `bit`.
    pub(super) fn begins_before(&self, bit: u64) -> bool {
        self.first.bit < bit
    }

    /// The window at plain byte `plain`, given the whole one before the guess.
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

impl Piece {
    /// Plain bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The plain bytes, given the whole window before the guess.
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
    use super::super::finder::tests::{blocks, deflate};
    use super::super::tests::text;
    use super::*;
    use crate::base::buffer_pool::BufferPool;
    use crate::base::extent::Packed;
    use crate::codec::input::Input;
    use crate::codec::walk::tests::noise;

    /// The guess for the `share_len` bytes at `start`, with so many buffers of 64 KiB.
    fn guess(packed: &[u8], start: usize, share_len: usize, buffers: usize) -> Option<Guess> {
        let mut input = Input::at(Packed(0));
        // In several slices, as it comes.
        for slice in packed.chunks(30_011) {
            input.push(Bytes::copy_from_slice(slice));
        }
        let pool = BufferPool::new(64 << 20);
        let task = Task {
            packed: input.slice(start..start + share_len + 100_000),
            start: start as u64 * 8,
            share_len,
            buffers: (0..buffers)
                .map(|_| pool.acquire(64 << 10).expect("open"))
                .collect(),
        };
        task.run()
    }

    /// Expects `guess` to hold `plain` from one of the blocks of `packed` to another; answers
    /// the bit where it ends.
    fn assert_right(guess: Guess, packed: &[u8], plain: &[u8]) -> u64 {
        let blocks = blocks(packed);
        let begins = |(bit, _): &&(u64, usize)| guess.begins_at(*bit);
        let (bit, start) = *blocks.iter().find(begins).expect("a block");
        assert!(!guess.begins_before(bit));
        let end = start + guess.end.plain;
        assert!(blocks.contains(&(guess.end.bit, end)));
        for inner in &guess.inner_ends {
            assert!(blocks.contains(&(inner.bit, start + inner.plain)));
        }
        let window = &plain[start - WINDOW_LEN..start];
        for at in [0, 1, 20_000, 40_000, 65_536, guess.end.plain] {
            let at = at.min(guess.end.plain);
            let expected = &plain[start + at - WINDOW_LEN..start + at];
            assert!(guess.window_at(at, window) == expected, "{at}");
        }
        let last_byte = usize::try_from((guess.end.bit - 1) / 8).expect("small");
        assert_eq!(guess.last_byte, packed[last_byte]);
        let bit = guess.end.bit;
        let pieces = guess.pieces.into_iter();
        let bytes: Vec<_> = pieces.flat_map(|piece| piece.resolve(window)).collect();
        assert!(bytes == plain[start..end]);
        bit
    }

    #[test]
    fn shares_hold_what_the_stream_holds_there() {
        let plain = text(2_000_000, 1);
        let (mut right, mut wrong) = (0, 0);
        for level in [2, 6, 9] {
            let packed = deflate(&plain, level);
            let blocks = blocks(&packed);
            for start in (60_000..packed.len() - 60_000).step_by(40_009) {
                let guess = guess(&packed, start, 50_000, 20).expect("a guess");
                if blocks.iter().any(|(bit, _)| guess.begins_at(*bit)) {
                    let end = assert_right(guess, &packed, &plain);
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
    fn what_packs_too_well_ends_with_a_block_that_fits() {
        let plain = [b"so it goes ".repeat(200_000), text(300_000, 1)].concat();
        let packed = deflate(&plain, 6);
        let start = 1000;
        let guess = guess(&packed, start, packed.len(), 8).expect("a guess");
        assert!(!guess.is_last);
        let end = assert_right(guess, &packed, &plain);
        assert!(end < 8 * packed.len() as u64);
    }

    #[test]
    fn one_decoding_is_enough_where_the_window_is_forgotten() {
        let plain = noise(1_000_000);
        let packed = deflate(&plain, 6);
        let guess = guess(&packed, 100_000, 300_000, 7).expect("a guess");
        let seconds: Vec<_> = guess
            .pieces
            .iter()
            .map(|piece| piece.second.is_some())
            .collect();
        // Each piece has one buffer but for the first.
        assert_eq!(seconds, [true, false, false, false, false]);
        assert_right(guess, &packed, &plain);
    }

    #[test]
    fn the_end_of_a_stream_ends_its_last_share() {
        let plain = text(500_000, 1);
        let mut packed = deflate(&plain, 6);
        let len = packed.len() as u64;
        packed.extend(noise(100_000));
        let guess = guess(&packed, 60_000, 200_000, 40).expect("a guess");
        assert_eq!((guess.is_last, guess.end.bit), (true, len * 8));
    }

    #[test]
    fn nothing_is_made_of_what_holds_no_block() {
        let bytes = [vec![0; 50_000], noise(30_000), vec![0xff; 50_000]].concat();
        assert!(guess(&bytes, 0, bytes.len(), 4).is_none());
    }

    #[test]
    fn what_only_looks_like_a_block_is_passed_over() {
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
            let guess = guess(&packed, start, 150_000, 40).expect("a guess");
            if blocks.iter().any(|(bit, _)| guess.begins_at(*bit)) {
                assert_right(guess, &packed, &plain);
                right += 1;
            } else {
                wrong += 1;
            }
        }
        assert!(right > 2 * wrong, "{right} {wrong}");
    }
}
