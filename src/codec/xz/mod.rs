//! xz. This module walks streams, block headers, the LZMA2 chunks inside blocks, and the index. liblzma
//! decodes each block as if it were the only one of its stream: it gets an artificial header, the block, and
//! an artificial index and footer, and so checks everything. Blocks with stored, short lengths are jobs.

mod header;
mod index;
mod lzma;
mod serial;

use bytes::Bytes;

use self::index::{BlockLengths, Index};
use self::lzma::{decoder, index_and_footer, run, unpadded_len};
use self::serial::Serial;
use super::seek_point::Spacing;
use super::walker::input_queue::{InputQueue, SegmentedBytes};
use super::walker::{
    FrameDecoder, FrameWalker, PullQueue, Step, error, foreign_seek_point, no_magic,
};
use super::{Cause, Compression, Context, Error, Job, Pull, SeekPoint};
use crate::base::buffer_pool::Buffer;
use crate::base::extent::{Packed, Plain};
use header::{Block, Check, STREAM_HEADER_LEN, block_header_len};

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

#[cfg(test)]
mod tests;
