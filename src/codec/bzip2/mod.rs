//! bzip2.
//!
//! Streams are cut into blocks, which begin at any bit, by looking for the 48 bits that start
//! one. Each block is then decoded as if it were the only one of its stream, by a job. The cut is
//! right when the block decodes: it must end exactly where it was cut.

mod bits;
mod boundary;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ::bzip2::{Decompress, Status};
use bytes::Bytes;

use super::input::{Input, Pieces};
use super::seek_point::{MIN_SPAN, Spacing};
use super::walk::{Results, Step, Walk, Walker, error};
use super::{Cause, Compression, Context, Error, Job, Output, Pull, Rest, SeekPoint, UNCOUNTED};
use crate::base::buffer_pool::{Buffer, BufferPool, Reservation};
use crate::base::extent::{Packed, Plain};
use bits::{Reader, Writer, shift};
use boundary::{BLOCK, BLOCK_HEADER_LEN, END, Found, MAGIC_BITS, Plausible, Scanner, plausible};

/// Bytes of a stream header.
const STREAM_HEADER_LEN: usize = 4;

/// Magic and checksum, which begin a block as well as the end of a stream.
const FRONT_BITS: usize = MAGIC_BITS + 32;

/// Bytes that a block works on, for each level. It has more plain bytes only where it has runs,
/// and fewer packed ones but for [`MAX_CODE_BITS`].
const LEVEL_LEN: usize = 100_000;

/// No symbol takes more bits.
const MAX_CODE_BITS: usize = 20;

/// Bytes of libbz2's state for each byte that a block works on.
const STATE_FACTOR: usize = 4;

/// A block that is packed to less than this part of what it works on may have runs and be very
/// long, up to 51 times what it works on.
const RUNS_FACTOR: usize = 8;

/// The longest buffer of a job, as a multiple of what a block works on.
const MAX_ROOM_FACTOR: usize = 2;

/// Plain bytes of a piece of those that a job's buffer has no room for.
const PIECE_LEN: usize = 512 << 10;

/// What a decoder takes from its pool at the most.
pub(super) const READING_BYTES: u64 = 12 << 20;

/// Pieces that may be alive at once: the one being made, and those that the consumer still uses.
const PIECES: usize = 4;

/// The longest block, packed.
const MAX_PACKED_LEN: usize = 9 * LEVEL_LEN * MAX_CODE_BITS / 8 + BLOCK_HEADER_LEN;

// A job of any block finds room beside what is set aside, or it would be waited for in vain.
const _: () = {
    let job = 9 * LEVEL_LEN * (MAX_ROOM_FACTOR + STATE_FACTOR) + 2 * MAX_PACKED_LEN;
    assert!((PIECES * PIECE_LEN + job) as u64 <= READING_BYTES);
};

/// Decodes bzip2.
pub(super) type Decoder = Walker<Streams>;

impl Decoder {
    pub(super) fn start(context: Context) -> Self {
        let spacing = Spacing::start(&context);
        Self::new(Streams::new(context, spacing, 0, None), Packed(0))
    }

    /// [`SeekPoint::state`] is the level of the stream, 1 to 9.
    pub(super) fn resume(context: Context, seek_point: &SeekPoint) -> Result<Self, Error> {
        let [level, zeros @ ..] = seek_point.state.to_le_bytes();
        if !(1..=9).contains(&level) || zeros != [0; 3] || seek_point.bit > 7 {
            let text = "a seek point that is not of bzip2".to_owned();
            return Err(error::<Streams>(seek_point.packed, Cause::Malformed(text)));
        }
        let spacing = Spacing::resume(&context, seek_point);
        let stream = Stream {
            level,
            whole: false,
            checksum: 0,
            bit: seek_point.bit,
        };
        let streams = Streams::new(context, spacing, seek_point.plain.0, Some(stream));
        Ok(Self::new(streams, seek_point.packed))
    }
}

/// A file of streams.
#[derive(Debug)]
pub(super) struct Streams {
    context: Context,
    spacing: Spacing,
    /// About how many plain bytes there were.
    plain_about: u64,
    /// No stream has begun yet.
    first: bool,
    /// The length of the buffer that the longest block needed.
    longest: Arc<AtomicUsize>,
    overflow: Option<Arc<Overflow>>,
    stream: Stream,
    state: State,
}

#[derive(Clone, Copy, Debug)]
struct Stream {
    level: u8,
    /// Whether all blocks went by.
    whole: bool,
    /// Of the blocks so far.
    checksum: u32,
    /// Bits of the next byte that belong to the block before, 0 to 7.
    bit: u8,
}

#[derive(Debug)]
enum State {
    /// Before a stream, or at the end.
    Between,
    /// Before a block or the end of a stream.
    Boundary,
    /// Before a block with this checksum, looking for its end.
    Scanning(u32, Scanner),
}

impl Walk for Streams {
    const COMPRESSION: Compression = Compression::Bzip2;

    fn step(&mut self, input: &mut Input, results: &mut Results) -> Result<Step, Error> {
        let packed = input.offset();
        match &mut self.state {
            State::Between => self.stream_start(input, results),
            State::Boundary => self.boundary(input),
            State::Scanning(checksum, _) => {
                let checksum = *checksum;
                self.scan(checksum, input, results)
            }
        }
        .map_err(|cause| error::<Self>(packed, cause))
    }

    fn flush(&mut self, _: &mut Results) -> Result<(), Error> {
        Ok(())
    }
}

impl Streams {
    fn new(context: Context, spacing: Spacing, plain_about: u64, stream: Option<Stream>) -> Self {
        let state = stream.map_or(State::Between, |_| State::Boundary);
        Self {
            context,
            spacing,
            plain_about,
            first: stream.is_none(),
            longest: Arc::default(),
            overflow: None,
            stream: stream.unwrap_or(Stream {
                level: 9,
                whole: true,
                checksum: 0,
                bit: 0,
            }),
            state,
        }
    }

    fn stream_start(&mut self, input: &mut Input, results: &mut Results) -> Result<Step, Cause> {
        if input.is_over() && !self.first {
            return Ok(Step::End);
        }
        let header = input.peek::<STREAM_HEADER_LEN>();
        if let Some([b'B', b'Z', b'h', level @ b'1'..=b'9']) = header {
            input.skip(STREAM_HEADER_LEN as u64);
            self.first = false;
            self.stream = Stream {
                level: level - b'0',
                whole: true,
                checksum: 0,
                bit: 0,
            };
            self.state = State::Boundary;
            return Ok(Step::Moved);
        }
        if header.is_none() && (self.first || !input.is_ended()) {
            return Ok(Step::Hungry);
        }
        if self.first {
            return Err(Cause::Malformed("this is no bzip2 stream".to_owned()));
        }
        let text = "bytes that are no bzip2 stream follow the last stream and are ignored";
        results.push_back(Pull::Warning(text.to_owned()));
        Ok(Step::End)
    }

    /// Reads the magic and checksum of a block or of the end.
    fn boundary(&mut self, input: &mut Input) -> Result<Step, Cause> {
        let bit = usize::from(self.stream.bit);
        let mut bytes = [0; (7 + FRONT_BITS).div_ceil(8)];
        let len = (bit + FRONT_BITS).div_ceil(8);
        let bytes = bytes.get_mut(..len).unwrap_or_default();
        if !input.peek_into(0, bytes) {
            return Ok(Step::Hungry);
        }
        let mut reader = Reader::new(bytes, bit);
        let magic = reader.number(MAGIC_BITS);
        let checksum = reader.number(32).and_then(|sum| u32::try_from(sum).ok());
        let checksum = checksum.unwrap_or_default();
        match magic {
            Some(BLOCK) => self.state = State::Scanning(checksum, Scanner::new()),
            Some(END) => {
                if self.stream.whole && checksum != self.stream.checksum {
                    return Err(Cause::Checksum {
                        what: "stream",
                        expected: checksum.into(),
                        computed: self.stream.checksum.into(),
                    });
                }
                input.skip(len as u64);
                self.state = State::Between;
            }
            _ => {
                let text = "neither a block nor the end of the stream";
                return Err(Cause::Malformed(text.to_owned()));
            }
        }
        Ok(Step::Moved)
    }

    fn scan(
        &mut self,
        checksum: u32,
        input: &mut Input,
        results: &mut Results,
    ) -> Result<Step, Cause> {
        let State::Scanning(_, scanner) = &mut self.state else {
            return Ok(Step::Moved);
        };
        let before = scanner.clone();
        let found = input
            .from(scanner.scanned())
            .find_map(|bytes| scanner.find(bytes));
        let level = self.stream.level;
        let Some(found) = found else {
            let longest = usize::from(level) * LEVEL_LEN * MAX_CODE_BITS / 8 + BLOCK_HEADER_LEN;
            if scanner.scanned() > longest {
                let text = "a block that is longer than any";
                return Err(Cause::Malformed(text.to_owned()));
            }
            return Ok(Step::Hungry);
        };
        let computed = self.stream.checksum.rotate_left(1) ^ checksum;
        let plausible = if found.bit < usize::from(self.stream.bit) + FRONT_BITS {
            // The magic of this very block, or one that overlaps it.
            Plausible::No
        } else if found.end {
            let computed = self.stream.whole.then_some(computed);
            plausible_end(found, input, computed)
        } else {
            plausible_block(found, input, level)
        };
        match plausible {
            Plausible::No => return Ok(Step::Moved),
            Plausible::Perhaps if !input.is_ended() => {
                *scanner = before;
                return Ok(Step::Hungry);
            }
            Plausible::Perhaps | Plausible::Yes => {}
        }
        let packed = input.offset();
        let tail = input.peek_at(found.bit / 8);
        let Some(pieces) = input.take(found.bit / 8) else {
            return Ok(Step::Hungry);
        };
        let block = Block {
            level,
            bit: self.stream.bit,
            pieces,
            tail: tail.map_or(0, |[byte]| byte),
            tail_bits: found.bit % 8,
            checksum,
        };
        self.stream.checksum = computed;
        self.stream.bit = u8::try_from(found.bit % 8).unwrap_or_default();
        self.state = State::Boundary;
        self.give_out(block, packed, results)?;
        Ok(Step::Moved)
    }

    fn give_out(
        &mut self,
        block: Block,
        packed: Packed,
        results: &mut Results,
    ) -> Result<(), Cause> {
        if self.spacing.frame(Plain(self.plain_about)) {
            results.push_back(Pull::SeekPoint(SeekPoint {
                packed,
                bit: block.bit,
                plain: UNCOUNTED,
                state: block.level.into(),
                window: Bytes::new(),
            }));
        }
        let usual_len = usize::from(block.level) * LEVEL_LEN;
        let runs = block.pieces.len() * RUNS_FACTOR < usual_len;
        let len = if runs { MIN_SPAN } else { usual_len as u64 };
        self.plain_about = self.plain_about.saturating_add(len);
        let overflow = Arc::clone(self.overflow()?);
        let longest = Arc::clone(&self.longest);
        let most = usual_len * MAX_ROOM_FACTOR;
        let room = longest.load(Ordering::Relaxed).clamp(usual_len, most);
        // In stream order, as they return, and both at once: see `BufferPool::take`.
        let (buffer, state) = self.context.pool.acquire_with(room, block.needed_bytes())?;
        results.push_back(Pull::Job(Job::with_output(move || {
            let decoding = Decoding::new(&block, packed, state, longest);
            // All of it is in the stream now.
            drop(block);
            decoding.run(buffer, overflow)
        })));
        Ok(())
    }

    /// Memory for blocks that are longer than their buffers, taken before the first buffer.
    fn overflow(&mut self) -> Result<&Arc<Overflow>, Cause> {
        let overflow = match self.overflow.take() {
            Some(overflow) => overflow,
            None => Arc::new(Overflow::new(&self.context.pool)?),
        };
        Ok(self.overflow.insert(overflow))
    }
}

/// Whether a block header may begin at `found`.
fn plausible_block(found: Found, input: &Input, level: u8) -> Plausible {
    let start = found.bit / 8;
    let len = input.len().saturating_sub(start).min(BLOCK_HEADER_LEN);
    let mut bytes = vec![0; len];
    input.peek_into(start, &mut bytes);
    plausible(Reader::new(&bytes, found.bit % 8 + MAGIC_BITS), level)
}

/// Whether the end of a stream may begin at `found`: it holds the checksum `computed` or, if that
/// is unknown or perhaps wrong, is followed by nothing or another stream.
fn plausible_end(found: Found, input: &Input, computed: Option<u32>) -> Plausible {
    let start = found.bit / 8;
    let mut bytes = [0; (7 + FRONT_BITS).div_ceil(8)];
    let bits = found.bit % 8 + FRONT_BITS;
    let bytes = bytes.get_mut(..bits.div_ceil(8)).unwrap_or_default();
    if !input.peek_into(start, bytes) {
        return Plausible::Perhaps;
    }
    let stored = Reader::new(bytes, found.bit % 8 + MAGIC_BITS).number(32);
    if computed.is_some_and(|computed| stored == Some(computed.into())) {
        return Plausible::Yes;
    }
    let len = start + bytes.len();
    match input.peek_at(len) {
        Some([b'B', b'Z', b'h']) => Plausible::Yes,
        // Where no checksum can be compared, garbage may follow.
        Some(_) if computed.is_none() => Plausible::Yes,
        Some(_) => Plausible::No,
        None if input.len() == len && input.is_ended() => Plausible::Yes,
        None => Plausible::Perhaps,
    }
}

/// A block cut out of a stream.
#[derive(Debug)]
struct Block {
    level: u8,
    /// Bits of the first byte that come before, 0 to 7.
    bit: u8,
    /// All bytes but the last, if that is not whole.
    pieces: Pieces,
    /// The byte behind, and how many of its bits belong to the block.
    tail: u8,
    tail_bits: usize,
    checksum: u32,
}

impl Block {
    /// What decoding it takes besides its buffer: libbz2's state, and the block once more, as a
    /// stream of its own.
    fn needed_bytes(&self) -> u64 {
        let state = usize::from(self.level) * LEVEL_LEN * STATE_FACTOR;
        (state + 2 * self.pieces.len()) as u64
    }

    /// A stream of this block alone.
    fn stream(&self) -> Vec<u8> {
        self.pieces.with_contiguous(|packed| self.stream_of(packed))
    }

    fn stream_of(&self, packed: &[u8]) -> Vec<u8> {
        let mut stream = Vec::with_capacity(packed.len() + 32);
        stream.extend_from_slice(b"BZh");
        stream.push(b'0' + self.level);
        stream.extend(shift(packed, self.bit));
        let mut writer = Writer::new(stream);
        let bit = usize::from(self.bit);
        if let Some(last) = packed.last().filter(|_| bit > 0) {
            writer.number((*last).into(), 8 - u32::from(self.bit));
        }
        let mut tail = Reader::new(std::slice::from_ref(&self.tail), 0);
        for _ in 0..self.tail_bits {
            writer.bit(tail.bit().unwrap_or_default());
        }
        writer.number(END, 48);
        writer.number(self.checksum.into(), 32);
        writer.finish()
    }
}

/// Memory for what does not fit into the buffers of jobs.
///
/// Only the consumer takes it, piece by piece and in stream order, so it must not be had by those who
/// decode later blocks: it is a pool of its own, set aside from the decoder's.
#[derive(Debug)]
struct Overflow {
    pieces: BufferPool,
    _reserved: Reservation,
}

impl Overflow {
    fn new(pool: &BufferPool) -> Result<Self, Cause> {
        let bytes = (PIECES * PIECE_LEN) as u64;
        Ok(Self {
            _reserved: pool.reserve(bytes)?,
            pieces: BufferPool::new(bytes),
        })
    }
}

/// A block being decoded.
struct Decoding {
    packed: Packed,
    stream: Vec<u8>,
    decoder: Decompress,
    read: usize,
    plain_len: usize,
    ended: bool,
    longest: Arc<AtomicUsize>,
    /// For the decoder's state and the stream.
    _state: Reservation,
}

impl Decoding {
    fn new(block: &Block, packed: Packed, state: Reservation, longest: Arc<AtomicUsize>) -> Self {
        Self {
            packed,
            stream: block.stream(),
            decoder: Decompress::new(false),
            read: 0,
            plain_len: 0,
            ended: false,
            longest,
            _state: state,
        }
    }

    /// Decodes as much as `buffer` has room for, and leaves the rest for the consumer to ask for.
    fn run(mut self, mut buffer: Buffer, overflow: Arc<Overflow>) -> Result<Output, Error> {
        let filled = self.fill(&mut buffer)?;
        let first = buffer.freeze().slice(..filled);
        if self.ended {
            return Ok(Output::from(vec![first]));
        }
        let rest = LongBlock {
            decoding: self,
            overflow,
        };
        Ok(Output::with_rest(first, rest))
    }

    /// Fills `target`, unless the block ends before; answers how far.
    fn fill(&mut self, target: &mut [u8]) -> Result<usize, Error> {
        let mut filled = 0;
        while !self.ended
            && let Some(target) = target.get_mut(filled..).filter(|rest| !rest.is_empty())
        {
            let ran = run(&mut self.decoder, &self.stream, self.read, target)
                .map_err(|cause| error::<Streams>(self.packed, cause))?;
            self.read += ran.read;
            self.ended = ran.ended;
            filled += ran.made;
        }
        self.plain_len += filled;
        self.longest.fetch_max(self.plain_len, Ordering::Relaxed);
        Ok(filled)
    }
}

/// The rest of a block that is longer than its buffer: long runs, which cost nothing to pack.
struct LongBlock {
    decoding: Decoding,
    overflow: Arc<Overflow>,
}

impl Rest for LongBlock {
    fn next_piece(&mut self) -> Result<Option<Bytes>, Error> {
        let taken = self.overflow.pieces.take(PIECE_LEN);
        let mut buffer = taken.map_err(|closed| {
            let packed = self.decoding.packed;
            error::<Streams>(packed, closed.into())
        })?;
        let filled = self.decoding.fill(&mut buffer)?;
        Ok((filled > 0).then(|| buffer.freeze().slice(..filled)))
    }
}

/// What libbz2 did.
#[derive(Clone, Copy, Debug)]
struct Ran {
    read: usize,
    made: usize,
    ended: bool,
}

/// Decodes from `stream` at `read`. The end is only one when it is that of `stream`.
fn run(
    decoder: &mut Decompress,
    stream: &[u8],
    read: usize,
    target: &mut [u8],
) -> Result<Ran, Cause> {
    let malformed = || {
        let text = "a block does not decode, or not to what its checksum says";
        Cause::Malformed(text.to_owned())
    };
    let rest = stream.get(read..).unwrap_or_default();
    let (total_in, total_out) = (decoder.total_in(), decoder.total_out());
    let status = decoder.decompress(rest, target).map_err(|_| malformed())?;
    let since = |now: u64, before: u64| usize::try_from(now - before).unwrap_or_default();
    let ran = Ran {
        read: since(decoder.total_in(), total_in),
        made: since(decoder.total_out(), total_out),
        ended: status == Status::StreamEnd,
    };
    let stuck = ran.read == 0 && ran.made == 0 && !ran.ended;
    let early = ran.ended && read + ran.read != stream.len();
    if stuck || early {
        return Err(malformed());
    }
    Ok(ran)
}

#[cfg(test)]
mod tests {
    use super::super::walk::tests::{
        Outcome, check, check_flips, check_truncation, context, decode, decode_from, noise, text,
    };
    use super::*;
    use proptest::prelude::*;
    use std::io::Write;

    fn stream(plain: &[u8], level: u32) -> Vec<u8> {
        let level = ::bzip2::Compression::new(level);
        let mut encoder = ::bzip2::write::BzEncoder::new(Vec::new(), level);
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    fn cause(outcome: Outcome) -> Cause {
        outcome.end.unwrap_err().cause
    }

    #[test]
    fn blocks_become_jobs_and_seek_points() {
        let plain = [text(2_000_000), noise(1_500_000)].concat();
        for (level, count) in [(1, 4), (9, 2)] {
            let packed = stream(&plain, level);
            let seek_points = check(Compression::Bzip2, &packed, &plain);
            assert!(seek_points.len() >= count, "{}", seek_points.len());
            assert!(decode(Compression::Bzip2, &packed, 1 << 20).jobs >= 4);
        }
    }

    /// Blocks with runs of 255 equal bytes, of values by chance: packed to more than an eighth of what
    /// they work on, and 45.9 MB long.
    fn runs(count: usize) -> Vec<u8> {
        let values = noise(count).into_iter();
        values.flat_map(|value| vec![value; 255]).collect()
    }

    #[test]
    fn a_block_of_long_runs_is_made_piece_by_piece() {
        for plain in [vec![7; 100 << 20], runs(540_000)] {
            let packed = stream(&plain, 9);
            let outcome = decode(Compression::Bzip2, &packed, 1000);
            assert_eq!(outcome.end, Ok(()));
            assert!(outcome.jobs >= 3, "{}", outcome.jobs);
            assert!(outcome.plain == plain);
            assert!(outcome.seek_points.len() >= 2);
        }
    }

    #[test]
    fn a_job_of_long_runs_keeps_no_more_memory_than_was_counted() {
        let packed = stream(&runs(540_000), 9);
        let pool = BufferPool::new(16 << 20);
        let context = Context {
            pool: pool.clone(),
            ..context()
        };
        let mut decoder = super::super::start(Compression::Bzip2, context);
        decoder.push(Bytes::from(packed));
        let job = loop {
            if let Pull::Job(job) = decoder.pull().expect("not damaged") {
                break job;
            }
        };
        let (before, mut plain_len) = (pool.used_bytes(), 0);
        let mut output = job.run().expect("not damaged");
        assert!(pool.used_bytes() <= before);
        while let Some(piece) = output.next_piece().expect("not damaged") {
            assert!(piece.len() <= 2 * 900_000, "{}", piece.len());
            assert!(pool.used_bytes() <= before);
            plain_len += piece.len();
        }
        assert!(plain_len > 40 << 20, "{plain_len}");
    }

    #[test]
    fn a_wait_for_memory_of_a_long_block_ends_when_the_pool_is_closed() {
        let packed = stream(&runs(540_000), 9);
        let pool = BufferPool::new(8 << 20);
        let context = Context {
            pool: pool.clone(),
            ..context()
        };
        let mut decoder = super::super::start(Compression::Bzip2, context);
        decoder.push(Bytes::from(packed));
        std::thread::scope(|scope| {
            let held = loop {
                if let Pull::Job(job) = decoder.pull().expect("not damaged") {
                    break job;
                }
            };
            // There is no room for a second one.
            let waiter = scope.spawn(move || {
                loop {
                    if let Err(error) = decoder.pull() {
                        return error.cause;
                    }
                }
            });
            pool.close();
            assert_eq!(waiter.join().expect("no panic"), Cause::Cancelled);
            drop(held);
        });
    }

    #[test]
    fn a_block_longer_than_its_buffer_is_decoded() {
        let mut plain = Vec::new();
        for part in noise(1_000_000).chunks(2500) {
            plain.extend(part);
            plain.extend(vec![0; 20_000]);
        }
        let packed = stream(&plain, 9);
        check(Compression::Bzip2, &packed, &plain);
        assert!(decode(Compression::Bzip2, &packed, packed.len()).jobs > 0);
    }

    #[test]
    fn streams_follow_each_other() {
        let parts = [text(1_000_000), Vec::new(), text(10), noise(700_000)];
        let packed = parts.iter().zip([1, 9, 5, 9]);
        let packed = packed.map(|(plain, level)| stream(plain, level));
        let packed = packed.collect::<Vec<_>>().concat();
        check(Compression::Bzip2, &packed, &parts.concat());
    }

    #[test]
    fn garbage_after_the_last_stream_is_a_warning() {
        let plain = text(10_000);
        for garbage in [&b"g"[..], b"garbage", &[0; 600]] {
            let packed = [&stream(&plain, 9), garbage].concat();
            let outcome = decode(Compression::Bzip2, &packed, 100);
            assert_eq!(outcome.end, Ok(()));
            assert!(outcome.plain == plain);
            assert_eq!(outcome.warnings.len(), 1);
        }
    }

    #[test]
    fn a_cut_anywhere_is_found() {
        let plain = text(300);
        check_truncation(Compression::Bzip2, &stream(&plain, 9), &plain, &[]);
    }

    #[test]
    fn damage_anywhere_is_found() {
        let plain = [text(300), noise(30)].concat();
        check_flips(Compression::Bzip2, &stream(&plain, 1), &plain);
    }

    #[test]
    fn a_wrong_stream_checksum_names_itself() {
        let plain = text(1000);
        let one = stream(&plain, 9);
        let mut packed = [one.clone(), one.clone()].concat();
        // The checksum lies within the last eleven bytes, at some bit.
        packed[one.len() - 3] ^= 0x10;
        let outcome = decode(Compression::Bzip2, &packed, 1000);
        assert!(outcome.plain == plain);
        assert!(matches!(
            cause(outcome),
            Cause::Checksum { what: "stream", .. }
        ));
    }

    #[test]
    fn a_magic_in_the_middle_of_a_block_does_not_cut_it() {
        let packed = stream(&noise(50_000), 9);
        let end = packed.len() * 8;
        let pieces = |bytes: &[u8]| {
            let mut input = Input::default();
            input.push(Bytes::copy_from_slice(bytes));
            input
        };
        // Behind a true magic comes a header, behind the same bits elsewhere does not.
        let input = pieces(&packed[4..]);
        let found = Found { bit: 0, end: false };
        assert_eq!(plausible_block(found, &input, 9), Plausible::Yes);
        let found = Found {
            bit: 80_000,
            end: false,
        };
        assert_eq!(plausible_block(found, &input, 9), Plausible::No);
        assert!(end > 80_000 + BLOCK_HEADER_LEN * 8 / 2);
        let false_end = Found {
            bit: 80_000,
            end: true,
        };
        assert_eq!(plausible_end(false_end, &input, Some(1)), Plausible::No);
    }

    #[test]
    fn foreign_seek_points_are_refused_or_fail() {
        let packed = stream(&text(1000), 9);
        let point = decode(Compression::Bzip2, &packed, 1000)
            .seek_points
            .remove(0);
        for (state, bit) in [(0, 0), (10, 0), (9, 8), (265, 0)] {
            let foreign = SeekPoint {
                bit,
                state,
                ..point.clone()
            };
            assert!(Decoder::resume(context(), &foreign).is_err());
        }
        let moved = SeekPoint { bit: 3, ..point };
        assert!(
            decode_from(Compression::Bzip2, &packed, 9, &moved)
                .end
                .is_err()
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn any_bytes_behind_a_magic_are_survived(
            bytes in proptest::collection::vec(any::<u8>(), 0..400),
            push_len in 1..50_usize,
        ) {
            let start = [0x42, 0x5a, 0x68, 0x39, 0x31, 0x41, 0x59, 0x26, 0x53, 0x59];
            let packed = [&start[..], &bytes].concat();
            prop_assert!(decode(Compression::Bzip2, &packed, push_len).end.is_err());
        }

        #[test]
        fn push_sizes_do_not_matter(
            lens in proptest::collection::vec(0..200_000_usize, 1..4),
            push_len in 1..30_000_usize,
        ) {
            let parts = lens.into_iter().map(text).collect::<Vec<_>>();
            let packed = parts.iter().map(|plain| stream(plain, 1));
            let packed = packed.collect::<Vec<_>>().concat();
            let outcome = decode(Compression::Bzip2, &packed, push_len);
            prop_assert_eq!(outcome.end, Ok(()));
            prop_assert!(outcome.plain == parts.concat());
        }
    }
}
