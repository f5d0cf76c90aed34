//! xz. This module walks streams, block headers, the LZMA2 chunks inside blocks, and the index. liblzma
//! decodes each block as if it were the only one of its stream: it gets an artificial header, the block, and
//! an artificial index and footer, and so checks everything. Blocks with stored, short lengths are jobs.

mod header;

use bytes::Bytes;
use flate2::Crc;
use liblzma::stream::{Action, Error as LzmaError, Status, Stream};
use xxhash_rust::xxh3::Xxh3Default;

use super::seek_point::Spacing;
use super::walker::input_queue::{InputQueue, SegmentedBytes};
use super::walker::output_buffer::OutputBuffer;
use super::walker::{
    FrameDecoder, FrameWalker, PullQueue, Step, error, foreign_seek_point, no_magic,
};
use super::{Cause, Compression, Context, Error, Job, Pull, SeekPoint};
use crate::base::buffer_pool::{Buffer, BufferPool};
use crate::base::extent::{Packed, Plain};
use crate::base::memory_reclaim::MemoryGrant;
use header::{
    Block, CHUNK_HEADER_LEN, Check, Chunk, MAX_INTEGER_LEN, STREAM_HEADER_LEN, block_header_len,
    padding_len, put_integer, take_integer,
};

/// Minimum ratio of the buffer budget to a job's bytes (packed, plain, dictionary), for several jobs at once.
const JOB_POOL_DIVISOR: u64 = 4;

pub(super) type Decoder = FrameDecoder<Streams>;

impl Decoder {
    pub(super) fn start(context: Context) -> Self {
        let streams = Streams {
            spacing: Spacing::start(context.wants_seek_points),
            context,
            plain: Plain(0),
            is_first: true,
            state: State::BetweenStreams,
        };
        Self::new(streams, Packed(0))
    }

    /// [`SeekPoint::state`] is the number of the stream's check.
    pub(super) fn resume(context: Context, seek_point: &SeekPoint) -> Result<Self, Error> {
        let [number, zeros @ ..] = seek_point.state.to_le_bytes();
        let is_valid = zeros == [0; 3] && seek_point.bit == 0;
        let Some(check) = Check::new(number).filter(|_| is_valid) else {
            let cause = foreign_seek_point::<Streams>();
            return Err(error::<Streams>(seek_point.packed, cause));
        };
        let streams = Streams {
            spacing: Spacing::resume(context.wants_seek_points, seek_point),
            context,
            plain: seek_point.plain,
            is_first: false,
            state: State::Blocks(BlockLengths::new(check, false)),
        };
        Ok(Self::new(streams, seek_point.packed))
    }
}

pub(super) struct Streams {
    context: Context,
    spacing: Spacing,
    plain: Plain,
    is_first: bool,
    state: State,
}

enum State {
    /// Before a stream, in the padding behind one, or at the end.
    BetweenStreams,
    Blocks(BlockLengths),
    Serial(BlockLengths, Box<Serial>),
    Index(Box<Index>),
    /// Before the footer of a stream, with the length of its index.
    Footer(Check, u64),
}

/// Summary of the lengths of the blocks so far, to compare with the index.
struct BlockLengths {
    check: Check,
    has_all_blocks: bool,
    count: u64,
    hash: Xxh3Default,
}

impl BlockLengths {
    fn new(check: Check, has_all_blocks: bool) -> Self {
        Self {
            check,
            has_all_blocks,
            count: 0,
            hash: Xxh3Default::new(),
        }
    }

    fn take(&mut self) -> Self {
        let empty = Self::new(self.check, self.has_all_blocks);
        std::mem::replace(self, empty)
    }

    fn add(&mut self, unpadded_len: u64, plain_len: u64) {
        self.count += 1;
        self.hash.update(&unpadded_len.to_le_bytes());
        self.hash.update(&plain_len.to_le_bytes());
    }
}

impl FrameWalker for Streams {
    const COMPRESSION: Compression = Compression::Xz;

    fn step(&mut self, input: &mut InputQueue, pulls: &mut PullQueue) -> Result<Step, Error> {
        let packed = input.offset();
        let stepped = match &mut self.state {
            State::BetweenStreams => self.start_stream(input),
            State::Blocks(_) => self.start_block(input, pulls),
            State::Serial(lengths, serial) => {
                let len = self.plain.0;
                match serial.step(input, &self.context.pool, &mut self.plain, pulls) {
                    Ok(Step::End) => {
                        pulls.extend(serial.piece.flush());
                        lengths.add(serial.unpadded_len(), serial.plain_len);
                        self.state = State::Blocks(lengths.take());
                        Ok(Step::Progressed)
                    }
                    Ok(Step::NeedInput) if self.plain.0 > len => Ok(Step::Progressed),
                    other => other,
                }
            }
            State::Index(index) => match index.step(input) {
                Ok(Some(len)) => {
                    self.state = State::Footer(index.expected.check, len);
                    Ok(Step::Progressed)
                }
                Ok(None) if input.offset() > packed => Ok(Step::Progressed),
                Ok(None) => Ok(Step::NeedInput),
                Err(cause) => Err(cause),
            },
            State::Footer(check, index_len) => {
                let expected = check.stream_footer(*index_len);
                self.end_stream(input, &expected)
            }
        };
        stepped.map_err(|cause| error::<Self>(packed, cause))
    }

    fn flush(&mut self, pulls: &mut PullQueue) -> Result<(), Error> {
        if let State::Serial(_, serial) = &mut self.state {
            pulls.extend(serial.piece.flush());
        }
        Ok(())
    }
}

impl Streams {
    fn start_stream(&mut self, input: &mut InputQueue) -> Result<Step, Cause> {
        if input.is_exhausted() && !self.is_first {
            return Ok(Step::End);
        }
        if !self.is_first && input.peek() == Some([0; 4]) {
            input.skip(4);
            return Ok(Step::Progressed);
        }
        let Some(magic) = input.peek() else {
            return Ok(Step::NeedInput);
        };
        if magic != header::MAGIC {
            return Err(no_magic(self.is_first, "xz", "stream"));
        }
        let Some(header) = input.peek::<STREAM_HEADER_LEN>() else {
            return Ok(Step::NeedInput);
        };
        let check = Check::parse_stream_header(header)?;
        input.skip(STREAM_HEADER_LEN as u64);
        self.is_first = false;
        self.state = State::Blocks(BlockLengths::new(check, true));
        Ok(Step::Progressed)
    }

    fn start_block(
        &mut self,
        input: &mut InputQueue,
        pulls: &mut PullQueue,
    ) -> Result<Step, Cause> {
        let State::Blocks(lengths) = &mut self.state else {
            return Ok(Step::Progressed);
        };
        let check = lengths.check;
        let Some([first]) = input.peek() else {
            return Ok(Step::NeedInput);
        };
        if first == 0 {
            input.skip(1);
            self.state = State::Index(Box::new(Index::new(lengths.take())));
            return Ok(Step::Progressed);
        }
        let mut header = vec![0; block_header_len(first)];
        if !input.peek_into(0, &mut header) {
            return Ok(Step::NeedInput);
        }
        let block = Block::parse(&header)?;
        let packed = input.offset();
        let job = job_len(&block, check, self.context.pool.budget());
        // A block that is cut is decoded as far as possible.
        let job = job.filter(|len| *len <= input.len() || !input.is_finished());
        if let Some(len) = job {
            let Some(segments) = input.take(len) else {
                return Ok(Step::NeedInput);
            };
            self.mark_block(packed, check, pulls);
            self.emit_job(&block, segments, packed, pulls)?;
        } else {
            let grant = self.context.borrow_memory(block.needed_bytes)?;
            let serial = Serial::new(check, block.header_len, grant)?;
            let lengths = lengths.take();
            self.mark_block(packed, check, pulls);
            self.state = State::Serial(lengths, Box::new(serial));
        }
        Ok(Step::Progressed)
    }

    fn mark_block(&mut self, packed: Packed, check: Check, pulls: &mut PullQueue) {
        if self.spacing.try_mark_frame(self.plain) {
            let state = check.0.into();
            let point = SeekPoint::without_window(packed, self.plain, state);
            pulls.push_back(Pull::SeekPoint(point));
        }
    }

    fn emit_job(
        &mut self,
        block: &Block,
        segments: SegmentedBytes,
        packed: Packed,
        pulls: &mut PullQueue,
    ) -> Result<(), Cause> {
        let State::Blocks(lengths) = &mut self.state else {
            return Ok(());
        };
        let (check, plain_len) = (lengths.check, block.plain_len.unwrap_or_default());
        let unpadded_len = unpadded_len(block, check);
        lengths.add(unpadded_len, plain_len);
        let len = usize::try_from(plain_len).unwrap_or(usize::MAX);
        // In stream order, and both at once: see `BufferPool::acquire_with`.
        let pool = &self.context.pool;
        let (buffer, state) = pool.acquire_with(len, block.needed_bytes)?;
        self.plain.0 = self.plain.0.saturating_add(plain_len);
        pulls.push_back(Pull::Job(Job::new(move || {
            let decoded = decode_block(&segments, check, unpadded_len, buffer);
            drop(state);
            decoded.map_err(|cause| error::<Self>(packed, cause))
        })));
        Ok(())
    }

    fn end_stream(&mut self, input: &mut InputQueue, expected: &[u8]) -> Result<Step, Cause> {
        let Some(footer) = input.peek::<STREAM_HEADER_LEN>() else {
            return Ok(Step::NeedInput);
        };
        if footer != expected {
            return Err(Cause::malformed(
                "the stream footer does not fit the stream",
            ));
        }
        input.skip(STREAM_HEADER_LEN as u64);
        self.state = State::BetweenStreams;
        Ok(Step::Progressed)
    }
}

/// The length of the block as a whole, when it is to be a job.
fn job_len(block: &Block, check: Check, budget: u64) -> Option<usize> {
    let len = block
        .len_after_header(check)?
        .checked_add(block.header_len as u64)?;
    let plain_len = block.plain_len?;
    let all = len
        .checked_add(plain_len)?
        .checked_add(block.needed_bytes)?;
    (all <= budget / JOB_POOL_DIVISOR).then(|| usize::try_from(len).ok())?
}

/// The index's length of `block`, from the block's own header.
fn unpadded_len(block: &Block, check: Check) -> u64 {
    let packed_len = block.packed_len.unwrap_or_default();
    packed_len.saturating_add((block.header_len + check.len()) as u64)
}

/// Decodes a whole block into a buffer as long as its plain bytes.
fn decode_block(
    segments: &SegmentedBytes,
    check: Check,
    unpadded_len: u64,
    mut buffer: Buffer,
) -> Result<Bytes, Cause> {
    let mut decoder = decoder()?;
    let before = check.stream_header();
    let after = index_and_footer(check, unpadded_len, buffer.len() as u64);
    let block = segments.slices.iter().map(Bytes::as_ref);
    let mut filled = 0;
    for mut slice in [before.as_slice()]
        .into_iter()
        .chain(block)
        .chain([&*after])
    {
        while !slice.is_empty() {
            let target = buffer.get_mut(filled..).unwrap_or_default();
            let progress = run(&mut decoder, slice, target)?;
            if progress.is_ended {
                return Ok(buffer.freeze());
            }
            if progress.consumed == 0 && progress.produced == 0 {
                return Err(Cause::malformed("a block is longer than its header says"));
            }
            slice = slice.get(progress.consumed..).unwrap_or_default();
            filled += progress.produced;
        }
    }
    Err(Cause::malformed("a block is shorter than its header says"))
}

fn index_and_footer(check: Check, unpadded_len: u64, plain_len: u64) -> Vec<u8> {
    let mut index = vec![0, 1];
    put_integer(&mut index, unpadded_len);
    put_integer(&mut index, plain_len);
    index.resize(index.len().next_multiple_of(4), 0);
    index.extend(header::crc32(&index).to_le_bytes());
    index.extend(check.stream_footer(index.len() as u64));
    index
}

fn decoder() -> Result<Stream, Cause> {
    // The limit was held against the dictionary's length, which is what takes the memory.
    Stream::new_stream_decoder(u64::MAX, 0).map_err(cause)
}

fn cause(error: LzmaError) -> Cause {
    match error {
        LzmaError::Options | LzmaError::UnsupportedCheck | LzmaError::NoCheck => {
            Cause::unsupported("a filter or an option of a block")
        }
        LzmaError::Mem | LzmaError::MemLimit => {
            Cause::unsupported("liblzma could not allocate a decoder")
        }
        LzmaError::Data | LzmaError::Format | LzmaError::Program => {
            Cause::malformed("a block does not decode, or not to what its check says")
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Progress {
    consumed: usize,
    produced: usize,
    is_ended: bool,
}

fn run(decoder: &mut Stream, source: &[u8], target: &mut [u8]) -> Result<Progress, Cause> {
    let (read, made) = (decoder.total_in(), decoder.total_out());
    let status = decoder
        .process(source, target, Action::Run)
        .map_err(cause)?;
    let since = |now: u64, before: u64| usize::try_from(now - before).unwrap_or_default();
    Ok(Progress {
        consumed: since(decoder.total_in(), read),
        produced: since(decoder.total_out(), made),
        is_ended: status == Status::StreamEnd,
    })
}

struct Serial {
    decoder: Stream,
    _grant: MemoryGrant,
    check: Check,
    piece: OutputBuffer,
    part: BlockPart,
    left: u64,
    header_len: usize,
    /// Of LZMA2 data.
    packed_len: u64,
    plain_len: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum BlockPart {
    /// The block header, or an LZMA2 chunk.
    Chunk,
    /// The end of LZMA2 data, padding and check.
    Trailer,
}

impl Serial {
    fn new(check: Check, header_len: usize, grant: MemoryGrant) -> Result<Self, Cause> {
        let mut decoder = decoder()?;
        run(&mut decoder, &check.stream_header(), &mut [])?;
        Ok(Self {
            decoder,
            _grant: grant,
            check,
            piece: OutputBuffer::default(),
            part: BlockPart::Chunk,
            left: header_len as u64,
            header_len,
            packed_len: 0,
            plain_len: 0,
        })
    }

    fn unpadded_len(&self) -> u64 {
        self.packed_len + (self.header_len + self.check.len()) as u64
    }

    /// Decodes one part, or a piece of one. [`Step::End`] is the end of the block.
    fn step(
        &mut self,
        input: &mut InputQueue,
        pool: &BufferPool,
        plain: &mut Plain,
        pulls: &mut PullQueue,
    ) -> Result<Step, Cause> {
        if self.left == 0 {
            return match self.part {
                BlockPart::Chunk => self.next_part(input),
                BlockPart::Trailer => self.end(),
            };
        }
        let front = input.front();
        if front.is_empty() {
            return Ok(Step::NeedInput);
        }
        let len = usize::try_from(self.left).map_or(front.len(), |left| left.min(front.len()));
        let source = front.get(..len).unwrap_or_default();
        let progress = run(&mut self.decoder, source, self.piece.spare_capacity(pool)?)?;
        if progress.is_ended || (progress.consumed == 0 && progress.produced == 0) {
            return Err(Cause::malformed("a block ends before its end"));
        }
        input.skip(progress.consumed as u64);
        self.left -= progress.consumed as u64;
        plain.0 = plain.0.saturating_add(progress.produced as u64);
        pulls.extend(self.piece.advance(progress.produced));
        Ok(Step::Progressed)
    }

    fn next_part(&mut self, input: &InputQueue) -> Result<Step, Cause> {
        let mut header = [0; CHUNK_HEADER_LEN];
        let len = input.len().min(CHUNK_HEADER_LEN);
        let header = header.get_mut(..len).unwrap_or_default();
        input.peek_into(0, header);
        match Chunk::parse(header) {
            None => return Ok(Step::NeedInput),
            Some(Err(cause)) => return Err(cause),
            Some(Ok(Chunk::End)) => {
                self.packed_len += 1;
                self.part = BlockPart::Trailer;
                self.left = 1 + padding_len(self.packed_len) + self.check.len() as u64;
            }
            Some(Ok(Chunk::Data {
                packed_len,
                plain_len,
            })) => {
                self.packed_len += packed_len;
                self.plain_len += plain_len;
                self.left = packed_len;
            }
        }
        Ok(Step::Progressed)
    }

    /// Makes liblzma confirm that the block is complete.
    fn end(&mut self) -> Result<Step, Cause> {
        let rest = index_and_footer(self.check, self.unpadded_len(), self.plain_len);
        if run(&mut self.decoder, &rest, &mut [])?.is_ended {
            return Ok(Step::End);
        }
        Err(Cause::malformed("a block does not end at its end"))
    }
}

/// Reads an index, block by block, and compares it with the stream's blocks.
struct Index {
    expected: BlockLengths,
    /// Number of remaining blocks; `None` before the first integer.
    left: Option<u64>,
    found: BlockLengths,
    /// Bytes so far, and their CRC-32.
    len: u64,
    crc: Crc,
}

impl Index {
    /// Behind the first byte, a zero.
    fn new(expected: BlockLengths) -> Self {
        let mut crc = Crc::new();
        crc.update(&[0]);
        Self {
            found: BlockLengths::new(expected.check, true),
            expected,
            left: None,
            len: 1,
            crc,
        }
    }

    /// Reads an integer, a block's lengths, or the end, which yields the index's length; nothing if cut.
    fn step(&mut self, input: &mut InputQueue) -> Result<Option<u64>, Cause> {
        match self.left {
            None => {
                let Some([count]) = self.read_integers(input)? else {
                    return Ok(None);
                };
                if self.expected.has_all_blocks && count != self.expected.count {
                    return Err(mismatch());
                }
                self.left = Some(count);
                Ok(None)
            }
            Some(0) => self.end(input),
            Some(left) => {
                let Some([unpadded_len, plain_len]) = self.read_integers(input)? else {
                    return Ok(None);
                };
                self.found.add(unpadded_len, plain_len);
                self.left = Some(left - 1);
                Ok(None)
            }
        }
    }

    /// The next `N` integers; `None`, and takes nothing, if they are incomplete.
    fn read_integers<const N: usize>(
        &mut self,
        input: &mut InputQueue,
    ) -> Result<Option<[u64; N]>, Cause> {
        let mut bytes = [0; 2 * MAX_INTEGER_LEN];
        let len = input.len().min(N * MAX_INTEGER_LEN);
        let bytes = bytes.get_mut(..len).unwrap_or_default();
        input.peek_into(0, bytes);
        let mut rest = &*bytes;
        let mut integers = [0; N];
        for integer in &mut integers {
            match take_integer(&mut rest) {
                Some(value) => *integer = value,
                None if rest.len() < MAX_INTEGER_LEN
                    && rest.iter().all(|byte| byte & 0x80 != 0) =>
                {
                    return Ok(None);
                }
                None => return Err(Cause::malformed("an integer in the index")),
            }
        }
        let len = bytes.len() - rest.len();
        self.crc.update(bytes.get(..len).unwrap_or_default());
        self.len += len as u64;
        input.skip(len as u64);
        Ok(Some(integers))
    }

    fn end(&mut self, input: &mut InputQueue) -> Result<Option<u64>, Cause> {
        let padding_len = usize::try_from(padding_len(self.len)).unwrap_or_default();
        let mut bytes = [0; 3 + 4];
        let bytes = bytes.get_mut(..padding_len + 4).unwrap_or_default();
        if !input.peek_into(0, bytes) {
            return Ok(None);
        }
        let (padding, stored) = bytes.split_at(padding_len);
        if padding.iter().any(|byte| *byte != 0) {
            return Err(Cause::malformed("the padding of the index"));
        }
        self.crc.update(padding);
        let expected = stored.first_chunk().copied().map(u32::from_le_bytes);
        Cause::compare_checksums("index", expected.unwrap_or_default(), self.crc.sum())?;
        if self.expected.has_all_blocks && self.expected.hash.digest() != self.found.hash.digest() {
            return Err(mismatch());
        }
        self.len += bytes.len() as u64;
        input.skip(bytes.len() as u64);
        Ok(Some(self.len))
    }
}

fn mismatch() -> Cause {
    Cause::malformed("the index does not fit the blocks")
}

#[cfg(test)]
mod tests {
    use super::super::test_support::{
        Outcome, assert_bit_flips_are_detected, assert_decodes, assert_truncation_is_detected,
        context, decode, decode_from, drive, noise, text,
    };
    use super::*;
    use crate::base::memory_reclaim::MemoryBroker;
    use liblzma::stream::{Check as Kind, Filters, LzmaOptions};
    use proptest::prelude::*;

    fn encode(mut encoder: Stream, plain: &[u8]) -> Vec<u8> {
        let mut packed = Vec::with_capacity(plain.len() + (1 << 16));
        loop {
            let read = usize::try_from(encoder.total_in()).unwrap();
            let status = encoder.process_vec(&plain[read..], &mut packed, Action::Finish);
            if status.unwrap() == Status::StreamEnd {
                return packed;
            }
            packed.reserve(1 << 16);
        }
    }

    /// One block without sizes in its header.
    fn one_block(plain: &[u8], kind: Kind) -> Vec<u8> {
        encode(Stream::new_easy_encoder(0, kind).unwrap(), plain)
    }

    fn index_at(packed: &[u8]) -> usize {
        let words = packed[packed.len() - 8..].first_chunk().copied();
        let words = u32::from_le_bytes(words.unwrap()) as usize;
        packed.len() - STREAM_HEADER_LEN - 4 * (words + 1)
    }

    /// Blocks with sizes in their headers, made from streams of one block without.
    fn blocks(plain: &[u8], block_len: usize, kind: Kind) -> Vec<u8> {
        let check = Check::new(u8::try_from(kind as u32).unwrap()).unwrap();
        let mut packed = check.stream_header();
        let mut index = vec![0];
        put_integer(&mut index, plain.len().div_ceil(block_len) as u64);
        for plain in plain.chunks(block_len) {
            let stream = one_block(plain, kind);
            let (block, mut record) = stream.split_at(index_at(&stream));
            let block = &block[STREAM_HEADER_LEN..];
            let header_len = block_header_len(block[0]);
            record = &record[2..];
            let unpadded_len = take_integer(&mut record).unwrap();
            let data_len = unpadded_len - (header_len + check.len()) as u64;
            let mut header = vec![0, 0xc0];
            put_integer(&mut header, data_len);
            put_integer(&mut header, plain.len() as u64);
            header.extend(&block[2..5]);
            header.resize(header.len().next_multiple_of(4), 0);
            header[0] = u8::try_from(header.len() / 4).unwrap();
            header.extend(header::crc32(&header).to_le_bytes());
            put_integer(&mut index, data_len + (header.len() + check.len()) as u64);
            put_integer(&mut index, plain.len() as u64);
            packed.extend(header);
            packed.extend(&block[header_len..]);
        }
        index.resize(index.len().next_multiple_of(4), 0);
        index.extend(header::crc32(&index).to_le_bytes());
        let index_len = index.len() as u64;
        [packed, index, check.stream_footer(index_len)].concat()
    }

    fn cause(outcome: Outcome) -> Cause {
        outcome.end.unwrap_err().cause
    }

    // Promises: seek-points
    #[test]
    fn blocks_with_sizes_become_jobs() {
        let plain = text(5_000_000);
        for kind in [Kind::None, Kind::Crc32, Kind::Crc64, Kind::Sha256] {
            let packed = blocks(&plain, 1 << 20, kind);
            let seek_points = assert_decodes(Compression::Xz, &packed, &plain);
            assert_eq!(seek_points.len(), 5);
            assert_eq!(decode(Compression::Xz, &packed, 1 << 20).jobs, 5);
        }
    }

    #[test]
    fn blocks_too_long_for_the_pool_decode_serially() {
        let plain = text(5_000_000);
        let packed = blocks(&plain, 2 << 20, Kind::Crc64);
        let context = || Context {
            pool: BufferPool::new(4 << 20),
            ..context()
        };
        let outcome = drive(Box::new(Decoder::start(context())), &packed, 100_000, 0);
        assert_eq!((outcome.jobs, outcome.end), (0, Ok(())));
        assert!(outcome.plain == plain);
        assert_eq!(outcome.seek_points.len(), 3);
        for point in outcome.seek_points {
            let at = usize::try_from(point.packed.0).unwrap();
            let decoder = Box::new(Decoder::resume(context(), &point).unwrap());
            let rest = drive(decoder, &packed[at..], 100_000, point.plain.0);
            assert_eq!(rest.end, Ok(()));
            assert!(rest.plain == plain[usize::try_from(point.plain.0).unwrap()..]);
        }
    }

    // Promises: seek-points
    #[test]
    fn one_block_has_one_seek_point() {
        let plain = [text(3 << 20), noise(1 << 20), vec![0; 9 << 20]].concat();
        for kind in [Kind::None, Kind::Crc32, Kind::Crc64, Kind::Sha256] {
            let packed = one_block(&plain, kind);
            assert_eq!(assert_decodes(Compression::Xz, &packed, &plain).len(), 1);
        }
    }

    #[test]
    fn concatenated_streams_with_padding_decode() {
        let parts = [text(100_000), Vec::new(), text(3 << 20), noise(500)];
        let packed = [
            one_block(&parts[0], Kind::Sha256),
            vec![0; 8],
            one_block(&parts[1], Kind::None),
            blocks(&parts[2], 1 << 18, Kind::Crc32),
            vec![0; 400_000],
            one_block(&parts[3], Kind::Crc64),
            vec![0; 4],
        ];
        assert_decodes(Compression::Xz, &packed.concat(), &parts.concat());
    }

    #[test]
    fn other_filters_decode() {
        let plain = text(300_000);
        let options = LzmaOptions::new_preset(0).unwrap();
        let mut filters = Filters::new();
        filters.delta_properties(&[3]).unwrap();
        filters.x86().lzma2(&options);
        let encoder = Stream::new_stream_encoder(&filters, Kind::Crc32).unwrap();
        assert_decodes(Compression::Xz, &encode(encoder, &plain), &plain);
    }

    #[test]
    fn truncation_anywhere_is_detected() {
        let plain = [text(3000), noise(1000)].concat();
        let packed = one_block(&plain, Kind::Crc64);
        assert_truncation_is_detected(Compression::Xz, &packed, &plain, &[]);
        let packed = blocks(&plain, 1500, Kind::Crc32);
        assert_truncation_is_detected(Compression::Xz, &packed, &plain, &[]);
    }

    #[test]
    fn truncated_block_gives_its_whole_chunks() {
        let plain = noise(1 << 20);
        let packed = blocks(&plain, 1 << 20, Kind::Crc64);
        let outcome = decode(Compression::Xz, &packed[..packed.len() / 2], 10_000);
        assert!(outcome.plain.len() > 300_000);
        assert!(plain.starts_with(&outcome.plain));
        assert_eq!(cause(outcome), Cause::Truncated);
    }

    #[test]
    fn damage_anywhere_is_detected() {
        let plain = [text(1000), noise(300)].concat();
        assert_bit_flips_are_detected(Compression::Xz, &one_block(&plain, Kind::Crc32), &plain);
        assert_bit_flips_are_detected(Compression::Xz, &blocks(&plain, 500, Kind::Sha256), &plain);
    }

    // Promises: decode-verified
    #[test]
    fn index_that_differs_from_the_blocks_is_detected() {
        let plain = text(3000);
        let packed = blocks(&plain, 1000, Kind::Crc32);
        let other = blocks(&text(2900), 1000, Kind::Crc32);
        let mixed = [&packed[..index_at(&packed)], &other[index_at(&other)..]];
        let outcome = decode(Compression::Xz, &mixed.concat(), 1000);
        assert!(outcome.plain == plain);
        assert_eq!(cause(outcome), mismatch());
    }

    // Promises: memory-needed
    #[test]
    fn dictionary_over_the_memory_limit_fails_with_needed_bytes() {
        let packed = one_block(&text(1000), Kind::None);
        let context = Context {
            broker: MemoryBroker::with_limit(100_000),
            ..context()
        };
        let outcome = drive(Box::new(Decoder::start(context)), &packed, 1000, 0);
        assert_eq!(
            cause(outcome),
            Cause::MemoryLimit {
                needed_bytes: 256 << 10,
                limit_bytes: 100_000,
                sufficient_memory: None
            }
        );
    }

    #[test]
    fn data_after_the_last_stream_must_be_padding_of_whole_words() {
        let plain = text(1000);
        let packed = one_block(&plain, Kind::Crc32);
        for (rest, wanted) in [(&b"garbage"[..], false), (&[0; 6], false), (&[0; 8], true)] {
            let outcome = decode(Compression::Xz, &[&packed, rest].concat(), 100);
            assert!(outcome.plain == plain);
            assert_eq!(outcome.end.is_ok(), wanted);
        }
    }

    #[test]
    fn foreign_seek_points_are_rejected_or_fail() {
        let packed = one_block(&text(1000), Kind::Crc32);
        let point = decode(Compression::Xz, &packed, 1000).seek_points.remove(0);
        for (state, bit) in [(2, 0), (1, 1), (257, 0)] {
            let foreign = SeekPoint {
                bit,
                state,
                ..point.clone()
            };
            assert!(Decoder::resume(context(), &foreign).is_err());
        }
        let other = SeekPoint { state: 4, ..point };
        assert!(
            decode_from(Compression::Xz, &packed, 9, &other)
                .end
                .is_err()
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn push_size_does_not_change_the_output(
            lens in proptest::collection::vec(0..5000_usize, 1..5),
            push_len in 1..3000_usize,
        ) {
            let parts = lens.into_iter().map(text).collect::<Vec<_>>();
            let packed = parts.iter().enumerate().map(|(number, plain)| match number % 2 {
                0 => one_block(plain, Kind::Crc64),
                _ => blocks(plain, 1000, Kind::Crc32),
            });
            let packed = packed.collect::<Vec<_>>().concat();
            let outcome = decode(Compression::Xz, &packed, push_len);
            prop_assert_eq!(outcome.end, Ok(()));
            prop_assert!(outcome.plain == parts.concat());
        }
    }
}
