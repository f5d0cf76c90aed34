//! bzip2. This module cuts streams into blocks, which begin at any bit, by searching for their magic. A job
//! decodes each block as if it were the only one. A cut is right if the block decodes and ends exactly there.

mod bit_io;
mod block_finder;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ::bzip2::{Decompress, Status};
use bytes::Bytes;

use super::seek_point::{MIN_SPAN_LEN, Spacing};
use super::walker::input_queue::{InputQueue, SegmentedBytes};
use super::walker::{FrameDecoder, FrameWalker, PullQueue, Step, error, foreign_seek_point};
use super::{Cause, Compression, Context, Error, Job, Output, Pull, SeekPoint, UNKNOWN_PLAIN};
use crate::base::buffer_pool::{Buffer, BufferPool, Reservation};
use crate::base::extent::{Packed, Plain};
use bit_io::{BitReader, BitWriter, shift};
use block_finder::{
    BLOCK_HEADER_LEN, BLOCK_MAGIC, FoundMagic, MAGIC_BITS, MagicScanner, STREAM_END_MAGIC,
    check_block_header,
};

const STREAM_HEADER_LEN: usize = 4;

/// Magic and checksum, which begin a block as well as the end of a stream.
const MAGIC_AND_CRC_BITS: usize = MAGIC_BITS + 32;

/// Bytes that a block works on, per level. Only runs make more plain bytes, [`MAX_CODE_BITS`] more packed.
const BLOCK_LEN_PER_LEVEL: usize = 100_000;

const MAX_CODE_BITS: usize = 20;

/// Bytes of libbz2's state for each byte that a block works on.
const STATE_BYTES_PER_BYTE: usize = 4;

/// Minimum ratio of block length to packed length for long runs, which make up to 51 times the block length.
const RUNS_RATIO: usize = 8;

/// The longest buffer of a job, as a multiple of what a block works on.
const MAX_BUFFER_FACTOR: usize = 2;

/// Plain bytes of a piece beyond a job's buffer.
const PIECE_LEN: usize = 512 << 10;

pub(super) const READ_POOL_BYTES: u64 = 12 << 20;

/// The one being made, and those that the consumer still uses.
const MAX_LIVE_PIECES: usize = 4;

const MAX_PACKED_LEN: usize = 9 * BLOCK_LEN_PER_LEVEL * MAX_CODE_BITS / 8 + BLOCK_HEADER_LEN;

// A job of any block must fit beside the reserved bytes, or it would wait forever.
const _: () = {
    let job =
        9 * BLOCK_LEN_PER_LEVEL * (MAX_BUFFER_FACTOR + STATE_BYTES_PER_BYTE) + 2 * MAX_PACKED_LEN;
    assert!((MAX_LIVE_PIECES * PIECE_LEN + job) as u64 <= READ_POOL_BYTES);
};

pub(super) type Decoder = FrameDecoder<Streams>;

impl Decoder {
    pub(super) fn start(context: Context) -> Self {
        let spacing = Spacing::start(context.wants_seek_points);
        Self::new(Streams::new(context, spacing, 0, None), Packed(0))
    }

    /// [`SeekPoint::state`] is the level of the stream, 1 to 9.
    pub(super) fn resume(context: Context, seek_point: &SeekPoint) -> Result<Self, Error> {
        let [level, zeros @ ..] = seek_point.state.to_le_bytes();
        if !(1..=9).contains(&level) || zeros != [0; 3] || seek_point.bit > 7 {
            let cause = foreign_seek_point::<Streams>();
            return Err(error::<Streams>(seek_point.packed, cause));
        }
        let spacing = Spacing::resume(context.wants_seek_points, seek_point);
        let stream = Stream {
            has_all_blocks: false,
            bit: seek_point.bit,
            ..Stream::start(level)
        };
        let streams = Streams::new(context, spacing, seek_point.plain.0, Some(stream));
        Ok(Self::new(streams, seek_point.packed))
    }
}

pub(super) struct Streams {
    context: Context,
    spacing: Spacing,
    plain_estimate: u64,
    is_first: bool,
    max_block_len: Arc<AtomicUsize>,
    overflow: Option<Arc<OverflowPool>>,
    stream: Stream,
    state: State,
}

#[derive(Clone, Copy, Debug)]
struct Stream {
    level: u8,
    /// Whether all blocks so far are in the checksum.
    has_all_blocks: bool,
    checksum: u32,
    /// Bits of the next byte that belong to the block before, 0 to 7.
    bit: u8,
}

impl Stream {
    fn start(level: u8) -> Self {
        Self {
            level,
            has_all_blocks: true,
            checksum: 0,
            bit: 0,
        }
    }
}

enum State {
    BetweenStreams,
    Boundary,
    /// Before a block with this checksum, looking for its end.
    Scanning(u32, MagicScanner),
}

impl FrameWalker for Streams {
    const COMPRESSION: Compression = Compression::Bzip2;

    fn step(&mut self, input: &mut InputQueue, pulls: &mut PullQueue) -> Result<Step, Error> {
        let packed = input.offset();
        match &mut self.state {
            State::BetweenStreams => self.start_stream(input, pulls),
            State::Boundary => self.read_boundary(input),
            State::Scanning(checksum, _) => {
                let checksum = *checksum;
                self.scan(checksum, input, pulls)
            }
        }
        .map_err(|cause| error::<Self>(packed, cause))
    }

    fn flush(&mut self, _: &mut PullQueue) -> Result<(), Error> {
        Ok(())
    }
}

impl Streams {
    fn new(
        context: Context,
        spacing: Spacing,
        plain_estimate: u64,
        stream: Option<Stream>,
    ) -> Self {
        let state = stream.map_or(State::BetweenStreams, |_| State::Boundary);
        Self {
            context,
            spacing,
            plain_estimate,
            is_first: stream.is_none(),
            max_block_len: Arc::default(),
            overflow: None,
            stream: stream.unwrap_or(Stream::start(9)),
            state,
        }
    }

    fn start_stream(
        &mut self,
        input: &mut InputQueue,
        pulls: &mut PullQueue,
    ) -> Result<Step, Cause> {
        if input.is_exhausted() && !self.is_first {
            return Ok(Step::End);
        }
        let header = input.peek::<STREAM_HEADER_LEN>();
        if let Some([b'B', b'Z', b'h', level @ b'1'..=b'9']) = header {
            input.skip(STREAM_HEADER_LEN as u64);
            self.is_first = false;
            self.stream = Stream::start(level - b'0');
            self.state = State::Boundary;
            return Ok(Step::Progressed);
        }
        if header.is_none() && (self.is_first || !input.is_finished()) {
            return Ok(Step::NeedInput);
        }
        if self.is_first {
            return Err(Cause::malformed("this is no bzip2 stream"));
        }
        let text = "bytes that are no bzip2 stream follow the last stream and are ignored";
        pulls.push_back(Pull::Warning(text.to_owned()));
        Ok(Step::End)
    }

    fn read_boundary(&mut self, input: &mut InputQueue) -> Result<Step, Cause> {
        let bit = usize::from(self.stream.bit);
        let mut bytes = [0; (7 + MAGIC_AND_CRC_BITS).div_ceil(8)];
        let len = (bit + MAGIC_AND_CRC_BITS).div_ceil(8);
        let bytes = bytes.get_mut(..len).unwrap_or_default();
        if !input.peek_into(0, bytes) {
            return Ok(Step::NeedInput);
        }
        let mut reader = BitReader::new(bytes, bit);
        let magic = reader.read_bits(MAGIC_BITS);
        let checksum = reader.read_bits(32).and_then(|sum| u32::try_from(sum).ok());
        let checksum = checksum.unwrap_or_default();
        match magic {
            Some(BLOCK_MAGIC) => self.state = State::Scanning(checksum, MagicScanner::default()),
            Some(STREAM_END_MAGIC) => {
                if self.stream.has_all_blocks {
                    Cause::compare_checksums("stream", checksum, self.stream.checksum)?;
                }
                input.skip(len as u64);
                self.state = State::BetweenStreams;
            }
            _ => {
                return Err(Cause::malformed(
                    "neither a block nor the end of the stream",
                ));
            }
        }
        Ok(Step::Progressed)
    }

    fn scan(
        &mut self,
        checksum: u32,
        input: &mut InputQueue,
        pulls: &mut PullQueue,
    ) -> Result<Step, Cause> {
        let State::Scanning(_, scanner) = &mut self.state else {
            return Ok(Step::Progressed);
        };
        let before = scanner.clone();
        let found = input
            .slices_from(scanner.scanned)
            .find_map(|bytes| scanner.find(bytes));
        let level = self.stream.level;
        let Some(found) = found else {
            let max_block_len =
                usize::from(level) * BLOCK_LEN_PER_LEVEL * MAX_CODE_BITS / 8 + BLOCK_HEADER_LEN;
            if scanner.scanned > max_block_len {
                return Err(Cause::malformed("a block that is longer than any"));
            }
            return Ok(Step::NeedInput);
        };
        let computed = self.stream.checksum.rotate_left(1) ^ checksum;
        let plausible = if found.bit < usize::from(self.stream.bit) + MAGIC_AND_CRC_BITS {
            // The magic of this very block, or one that overlaps it.
            Some(false)
        } else if found.is_stream_end {
            let computed = self.stream.has_all_blocks.then_some(computed);
            check_stream_end(found, input, computed)
        } else {
            check_block_start(found, input, level)
        };
        match plausible {
            Some(false) => return Ok(Step::Progressed),
            None if !input.is_finished() => {
                *scanner = before;
                return Ok(Step::NeedInput);
            }
            None | Some(true) => {}
        }
        let packed = input.offset();
        let tail = input.peek_at(found.bit / 8);
        let Some(segments) = input.take(found.bit / 8) else {
            return Ok(Step::NeedInput);
        };
        let block = Block {
            level,
            bit: self.stream.bit,
            segments,
            tail: tail.map_or(0, |[byte]| byte),
            tail_bits: found.bit % 8,
            checksum,
        };
        self.stream.checksum = computed;
        self.stream.bit = u8::try_from(found.bit % 8).unwrap_or_default();
        self.state = State::Boundary;
        self.emit_block(block, packed, pulls)?;
        Ok(Step::Progressed)
    }

    fn emit_block(
        &mut self,
        block: Block,
        packed: Packed,
        pulls: &mut PullQueue,
    ) -> Result<(), Cause> {
        if self.spacing.try_mark_frame(Plain(self.plain_estimate)) {
            pulls.push_back(Pull::SeekPoint(SeekPoint {
                bit: block.bit,
                ..SeekPoint::without_window(packed, UNKNOWN_PLAIN, block.level.into())
            }));
        }
        let usual_len = usize::from(block.level) * BLOCK_LEN_PER_LEVEL;
        let runs = block.segments.len() * RUNS_RATIO < usual_len;
        let len = if runs { MIN_SPAN_LEN } else { usual_len as u64 };
        self.plain_estimate = self.plain_estimate.saturating_add(len);
        // Before the first buffer.
        let overflow = match self.overflow.take() {
            Some(overflow) => overflow,
            None => Arc::new(OverflowPool::new(&self.context.pool)?),
        };
        self.overflow = Some(Arc::clone(&overflow));
        let max_block_len = Arc::clone(&self.max_block_len);
        let most = usual_len * MAX_BUFFER_FACTOR;
        let room = max_block_len.load(Ordering::Relaxed).clamp(usual_len, most);
        // In stream order, and both at once: see `BufferPool::acquire_with`.
        let (buffer, state) = self.context.pool.acquire_with(room, block.needed_bytes())?;
        pulls.push_back(Pull::Job(Job::new(move || {
            let decoding = BlockDecoding {
                packed,
                stream: block.stream(),
                decoder: Decompress::new(false),
                is_ended: false,
                max_block_len,
                overflow,
                _state: state,
            };
            // All of it is in the stream now.
            drop(block);
            decoding.run(buffer)
        })));
        Ok(())
    }
}

fn check_block_start(found: FoundMagic, input: &InputQueue, level: u8) -> Option<bool> {
    let start = found.bit / 8;
    let len = input.len().saturating_sub(start).min(BLOCK_HEADER_LEN);
    let mut bytes = vec![0; len];
    input.peek_into(start, &mut bytes);
    check_block_header(BitReader::new(&bytes, found.bit % 8 + MAGIC_BITS), level)
}

/// Whether the end of a stream may begin at `found`: with the checksum `computed`, or, where that is unknown
/// or perhaps wrong, with nothing or another stream after it. `None` when the bytes end before that is known.
fn check_stream_end(found: FoundMagic, input: &InputQueue, computed: Option<u32>) -> Option<bool> {
    let start = found.bit / 8;
    let mut bytes = [0; (7 + MAGIC_AND_CRC_BITS).div_ceil(8)];
    let bits = found.bit % 8 + MAGIC_AND_CRC_BITS;
    let bytes = bytes.get_mut(..bits.div_ceil(8)).unwrap_or_default();
    if !input.peek_into(start, bytes) {
        return None;
    }
    let stored = BitReader::new(bytes, found.bit % 8 + MAGIC_BITS).read_bits(32);
    if computed.is_some_and(|computed| stored == Some(computed.into())) {
        return Some(true);
    }
    let len = start + bytes.len();
    match input.peek_at(len) {
        Some([b'B', b'Z', b'h']) => Some(true),
        // Where no checksum can be compared, garbage may follow.
        Some(_) if computed.is_none() => Some(true),
        Some(_) => Some(false),
        None if input.len() == len && input.is_finished() => Some(true),
        None => None,
    }
}

struct Block {
    level: u8,
    /// Bits of the first byte before the block, 0 to 7.
    bit: u8,
    /// All bytes but the last, if that is not whole.
    segments: SegmentedBytes,
    /// The byte behind, and how many of its bits belong to the block.
    tail: u8,
    tail_bits: usize,
    checksum: u32,
}

impl Block {
    /// Memory besides the buffer: libbz2's state, and a copy of the block as a stream.
    fn needed_bytes(&self) -> u64 {
        let state = usize::from(self.level) * BLOCK_LEN_PER_LEVEL * STATE_BYTES_PER_BYTE;
        (state + 2 * self.segments.len()) as u64
    }

    fn stream(&self) -> Vec<u8> {
        self.segments
            .with_contiguous(|packed| self.stream_of(packed))
    }

    fn stream_of(&self, packed: &[u8]) -> Vec<u8> {
        let mut stream = Vec::with_capacity(packed.len() + 32);
        stream.extend_from_slice(b"BZh");
        stream.push(b'0' + self.level);
        stream.extend(shift(packed, self.bit));
        let mut writer = BitWriter::new(stream);
        let bit = usize::from(self.bit);
        if let Some(last) = packed.last().filter(|_| bit > 0) {
            writer.write_bits((*last).into(), 8 - u32::from(self.bit));
        }
        let mut tail = BitReader::new(std::slice::from_ref(&self.tail), 0);
        for _ in 0..self.tail_bits {
            writer.write_bit(tail.read_bit().unwrap_or_default());
        }
        writer.write_bits(STREAM_END_MAGIC, 48);
        writer.write_bits(self.checksum.into(), 32);
        writer.finish()
    }
}

/// Memory for output beyond jobs' buffers, used in stream order. Decoders of later blocks must not use it.
struct OverflowPool {
    pieces: BufferPool,
    _reserved: Reservation,
}

impl OverflowPool {
    fn new(pool: &BufferPool) -> Result<Self, Cause> {
        let bytes = (MAX_LIVE_PIECES * PIECE_LEN) as u64;
        Ok(Self {
            _reserved: pool.reserve(bytes)?,
            pieces: BufferPool::new(bytes),
        })
    }
}

/// A block being decoded. Bytes beyond its buffer are decoded when they are pulled.
struct BlockDecoding {
    packed: Packed,
    stream: Vec<u8>,
    decoder: Decompress,
    is_ended: bool,
    max_block_len: Arc<AtomicUsize>,
    overflow: Arc<OverflowPool>,
    _state: Reservation,
}

impl BlockDecoding {
    /// Decodes into `buffer` until it is full, and leaves the rest to the consumer.
    fn run(mut self, mut buffer: Buffer) -> Result<Output, Error> {
        let filled = self.fill(&mut buffer)?;
        let first = buffer.freeze().slice(..filled);
        Ok(if self.is_ended {
            Output::from(first)
        } else {
            Output::with_rest(first, Box::new(move || self.next_piece()))
        })
    }

    fn fill(&mut self, target: &mut [u8]) -> Result<usize, Error> {
        let mut filled = 0;
        while !self.is_ended
            && let Some(target) = target.get_mut(filled..).filter(|rest| !rest.is_empty())
        {
            filled += self.decompress(target).ok_or_else(|| {
                let text = "a block does not decode, or not to what its checksum says";
                error::<Streams>(self.packed, Cause::malformed(text))
            })?;
        }
        let plain_len = usize::try_from(self.decoder.total_out()).unwrap_or(usize::MAX);
        self.max_block_len.fetch_max(plain_len, Ordering::Relaxed);
        Ok(filled)
    }

    /// Decodes some bytes into `target`; `None` if malformed. The end must be that of the whole stream.
    fn decompress(&mut self, target: &mut [u8]) -> Option<usize> {
        let (read, made) = (self.decoder.total_in(), self.decoder.total_out());
        let rest = self.stream.get(usize::try_from(read).ok()?..)?;
        let status = self.decoder.decompress(rest, target).ok()?;
        let consumed = self.decoder.total_in() - read;
        let produced = usize::try_from(self.decoder.total_out() - made).ok()?;
        self.is_ended = status == Status::StreamEnd;
        let is_valid = if self.is_ended {
            consumed == rest.len() as u64
        } else {
            consumed > 0 || produced > 0
        };
        is_valid.then_some(produced)
    }

    fn next_piece(&mut self) -> Result<Option<Bytes>, Error> {
        let taken = self.overflow.pieces.acquire(PIECE_LEN);
        let mut buffer = taken.map_err(|closed| error::<Streams>(self.packed, closed.into()))?;
        let filled = self.fill(&mut buffer)?;
        Ok((filled > 0).then(|| buffer.freeze().slice(..filled)))
    }
}

#[cfg(test)]
mod tests;
