//! Zstandard. This module walks headers, and libzstd decodes all else: frames that are short enough by jobs,
//! long ones, whose blocks refer to each other, in order.

mod header;
mod sys;

use ::zstd::zstd_safe::{DCtx, DParameter, ErrorCode, InBuffer, OutBuffer, get_error_name};
use bytes::Bytes;

use super::job::MAX_PARTS_PER_JOB;
use super::seek_point::{STATE_BETWEEN_FRAMES, Spacing};
use super::walker::input_queue::{InputQueue, SegmentedBytes};
use super::walker::output_buffer::OutputBuffer;
use super::walker::{
    FrameDecoder, FrameWalker, PullQueue, Step, error, foreign_seek_point, next_magic, no_magic,
};
use super::{
    Cause, Compression, ContentChecksum, Context, Error, Job, Pull, SeekPoint, UNKNOWN_PLAIN,
};
use crate::base::buffer_pool::{Buffer, BufferPool};
use crate::base::extent::{Packed, Plain};
use crate::base::memory_reclaim::MemoryGrant;
use header::{BLOCK_HEADER_LEN, Block, Header, MAGIC, MAGIC_LEN, is_legacy};
use sys::BlockDecoder;

/// Plain bytes of a job into which short frames are joined.
const MIN_JOB_LEN: usize = 1 << 20;

/// Maximum plain bytes of a frame that is a job. The decoder waits until it has all of it.
const MAX_JOB_LEN: u64 = 8 << 20;

/// Maximum packed bytes of a frame that is a job. Only empty blocks make more.
const MAX_JOB_PACKED_LEN: usize = 9 << 20;

/// Plain bytes of a piece of a frame that is decoded in order.
const PIECE_LEN: usize = 512 << 10;

/// Regions that must fit into the pool: the current one, the one before, and those that are still read.
const REGIONS_IN_POOL: u64 = 4;

/// The largest window, as a power of two, that libzstd knows: the limit is ours to check.
const WINDOW_LOG_MAX: u32 = if usize::BITS == 32 { 30 } else { 31 };

/// [`SeekPoint::state`]; there are none but at the start of a frame.
const STATE: u32 = STATE_BETWEEN_FRAMES;

pub(super) type Decoder = FrameDecoder<Frames>;

impl Decoder {
    pub(super) fn start(context: Context) -> Self {
        let spacing = Spacing::start(context.wants_seek_points);
        Self::new(Frames::new(context, spacing, 0, true), Packed(0))
    }

    pub(super) fn resume(context: Context, seek_point: &SeekPoint) -> Result<Self, Error> {
        let packed = seek_point.packed;
        if (seek_point.state, seek_point.bit) != (STATE, 0) {
            let cause = foreign_seek_point::<Frames>();
            return Err(error::<Frames>(packed, cause));
        }
        let spacing = Spacing::resume(context.wants_seek_points, seek_point);
        let frames = Frames::new(context, spacing, seek_point.plain.0, false);
        Ok(Self::new(frames, packed))
    }
}

pub(super) struct Frames {
    context: Context,
    spacing: Spacing,
    /// Upper bound of the plain bytes so far; jobs may make fewer.
    plain_upper_bound: u64,
    is_first: bool,
    state: State,
    group: Group,
    serial: Option<Serial>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    BetweenFrames,
    FindingEnd(FrameEndFinder),
    Serial,
}

impl Frames {
    fn new(context: Context, spacing: Spacing, plain_upper_bound: u64, is_first: bool) -> Self {
        Self {
            context,
            spacing,
            plain_upper_bound,
            is_first,
            state: State::BetweenFrames,
            group: Group::default(),
            serial: None,
        }
    }

    fn start_frame(&mut self, input: &InputQueue, pulls: &mut PullQueue) -> Result<Step, Error> {
        let magic = match next_magic(input, &mut self.is_first) {
            Ok(magic) => magic,
            Err(step) => return Ok(step),
        };
        let packed = input.offset();
        if magic != MAGIC {
            return Err(error::<Self>(packed, self.bad_magic(magic)));
        }
        let header = match Header::read(|target| input.peek_into(MAGIC_LEN, target)) {
            None => return Ok(Step::NeedInput),
            Some(read) => read.map_err(|cause| error::<Self>(packed, cause))?,
        };
        self.is_first = false;
        if self.spacing.try_mark_frame(Plain(self.plain_upper_bound)) {
            pulls.extend(self.group.flush(&self.context.pool)?);
            let point = SeekPoint::without_window(packed, UNKNOWN_PLAIN, STATE);
            pulls.push_back(Pull::SeekPoint(point));
        }
        if header.content_len.is_some_and(|len| len > MAX_JOB_LEN) {
            return self.start_serial(header, packed, pulls);
        }
        self.state = State::FindingEnd(FrameEndFinder::new(header));
        Ok(Step::Progressed)
    }

    fn bad_magic(&self, magic: u32) -> Cause {
        if is_legacy(magic) {
            return Cause::unsupported("a zstd frame of a version before 0.8");
        }
        no_magic(self.is_first, "zstd", "frame")
    }

    fn find_frame_end(
        &mut self,
        mut finder: FrameEndFinder,
        input: &mut InputQueue,
        pulls: &mut PullQueue,
    ) -> Result<Step, Error> {
        let packed = input.offset();
        let end = finder.find_end(input);
        self.state = State::FindingEnd(finder);
        match end {
            FrameEnd::Unknown if !input.is_finished() => Ok(Step::NeedInput),
            // Decodes as much as possible of a cut frame.
            FrameEnd::Unknown | FrameEnd::TooFar => self.start_serial(finder.header, packed, pulls),
            FrameEnd::At(len) => {
                let Some(segments) = input.take(len) else {
                    return Ok(Step::NeedInput);
                };
                let room = finder.buffer_len();
                self.group.frames.push(Frame { packed, segments });
                self.group.buffer_len += room;
                if self.group.buffer_len >= MIN_JOB_LEN
                    || self.group.frames.len() == MAX_PARTS_PER_JOB
                {
                    pulls.extend(self.group.flush(&self.context.pool)?);
                }
                self.plain_upper_bound = self.plain_upper_bound.saturating_add(room as u64);
                self.state = State::BetweenFrames;
                Ok(Step::Progressed)
            }
        }
    }

    fn start_serial(
        &mut self,
        header: Header,
        packed: Packed,
        pulls: &mut PullQueue,
    ) -> Result<Step, Error> {
        pulls.extend(self.group.flush(&self.context.pool)?);
        let started = Serial::start(self.serial.take(), header.window_len, &self.context);
        let serial = started.map_err(|cause| error::<Self>(packed, cause))?;
        // libzstd's own stream verifies itself.
        if header.has_checksum && !serial.is_stream() {
            pulls.push_back(Pull::ChecksumStart(ContentChecksum::zstd()));
        }
        self.serial = Some(serial);
        self.state = State::Serial;
        Ok(Step::Progressed)
    }

    fn step_serial(
        &mut self,
        input: &mut InputQueue,
        pulls: &mut PullQueue,
    ) -> Result<Step, Error> {
        let Some(serial) = &mut self.serial else {
            self.state = State::BetweenFrames;
            return Ok(Step::Progressed);
        };
        let packed = input.offset();
        let progress = serial.run(input, &self.context.pool, pulls);
        let (step, produced, ended) = progress.map_err(|cause| error::<Self>(packed, cause))?;
        self.plain_upper_bound = self.plain_upper_bound.saturating_add(produced as u64);
        if ended {
            pulls.extend(serial.flush());
            self.state = State::BetweenFrames;
            // Returns the memory that it borrowed.
            self.serial = self.serial.take().filter(|serial| !serial.is_stream());
        }
        Ok(step)
    }
}

impl FrameWalker for Frames {
    const COMPRESSION: Compression = Compression::Zstd;

    fn step(&mut self, input: &mut InputQueue, pulls: &mut PullQueue) -> Result<Step, Error> {
        match &mut self.state {
            State::BetweenFrames => self.start_frame(input, pulls),
            State::FindingEnd(finder) => {
                let finder = *finder;
                self.find_frame_end(finder, input, pulls)
            }
            State::Serial => self.step_serial(input, pulls),
        }
    }

    fn flush(&mut self, pulls: &mut PullQueue) -> Result<(), Error> {
        pulls.extend(self.group.flush(&self.context.pool)?);
        pulls.extend(self.serial.as_mut().and_then(Serial::flush));
        Ok(())
    }
}

#[derive(Clone, Copy, Debug)]
struct FrameEndFinder {
    header: Header,
    /// From the magic to the next block header.
    next_header_offset: usize,
    plain_upper_bound: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FrameEnd {
    Unknown,
    /// Too far for a job, or unknown because a block is malformed.
    TooFar,
    /// Bytes behind its start.
    At(usize),
}

impl FrameEndFinder {
    fn new(header: Header) -> Self {
        Self {
            header,
            next_header_offset: MAGIC_LEN + header.len,
            plain_upper_bound: 0,
        }
    }

    fn find_end(&mut self, input: &InputQueue) -> FrameEnd {
        loop {
            let Some(block) = input.peek_at::<BLOCK_HEADER_LEN>(self.next_header_offset) else {
                return FrameEnd::Unknown;
            };
            let Some(block) = Block::parse(block) else {
                return FrameEnd::TooFar;
            };
            let end = self.next_header_offset + BLOCK_HEADER_LEN + block.packed_len;
            if end > MAX_JOB_PACKED_LEN
                || self.plain_upper_bound + block.plain_upper_bound > MAX_JOB_LEN
            {
                return FrameEnd::TooFar;
            }
            let checksum_len = if self.header.has_checksum { 4 } else { 0 };
            if block.is_last && end + checksum_len > input.len() {
                return FrameEnd::Unknown;
            }
            self.next_header_offset = end;
            self.plain_upper_bound += block.plain_upper_bound;
            if block.is_last {
                return FrameEnd::At(end + checksum_len);
            }
        }
    }

    /// Upper bound of the frame's plain bytes, once its end is known.
    fn buffer_len(&self) -> usize {
        let len = self.header.content_len.unwrap_or(self.plain_upper_bound);
        usize::try_from(len.min(MAX_JOB_LEN)).unwrap_or_default()
    }
}

struct Frame {
    packed: Packed,
    segments: SegmentedBytes,
}

#[derive(Default)]
struct Group {
    frames: Vec<Frame>,
    buffer_len: usize,
}

impl Group {
    /// Makes a job of the frames so far. Its buffer is taken in stream order, or it could wait for itself.
    fn flush(&mut self, pool: &BufferPool) -> Result<Option<Pull>, Error> {
        let Self { frames, buffer_len } = std::mem::take(self);
        let Some(packed) = frames.first().map(|frame| frame.packed) else {
            return Ok(None);
        };
        let taken = pool.acquire(buffer_len);
        let buffer = taken.map_err(|closed| error::<Frames>(packed, closed.into()))?;
        let job = Job::new(move || decode_group(&frames, buffer));
        Ok(Some(Pull::Job(job)))
    }
}

/// Decodes frames one after the other into one buffer, which is large enough for all.
fn decode_group(frames: &[Frame], mut buffer: Buffer) -> Result<Bytes, Error> {
    let mut filled = 0;
    let mut decoder = decoder();
    for frame in frames {
        let target = buffer.get_mut(filled..).unwrap_or_default();
        let decoded = match &mut decoder {
            Ok(decoder) => frame
                .segments
                .with_contiguous(|packed| decoder.decompress(target, packed).map_err(cause)),
            Err(cause) => Err(cause.clone()),
        };
        filled += decoded.map_err(|cause| error::<Frames>(frame.packed, cause))?;
    }
    Ok(buffer.freeze().slice(..filled))
}

fn decoder() -> Result<DCtx<'static>, Cause> {
    DCtx::try_create().ok_or_else(no_memory)
}

fn no_memory() -> Cause {
    Cause::unsupported("libzstd could not allocate a decoder")
}

fn cause(code: ErrorCode) -> Cause {
    Cause::Malformed(get_error_name(code).to_lowercase())
}

enum Serial {
    /// Block by block, with our buffers as the window.
    Blocks {
        blocks: BlockDecoder,
        region_len: usize,
    },
    /// By libzstd's own window, when our buffers would have to be too large for the pool.
    Stream(Stream),
}

impl Serial {
    /// Gets ready for a frame with this window, with what decoded the one before, if any.
    fn start(last: Option<Self>, window_len: u64, context: &Context) -> Result<Self, Cause> {
        let needed_bytes = window_len;
        let window_len = usize::try_from(window_len).unwrap_or(usize::MAX);
        let region_len = BlockDecoder::region_len(window_len.min(isize::MAX.cast_unsigned()));
        if region_len as u64 > context.pool.budget() / REGIONS_IN_POOL {
            return Stream::start(context.borrow_memory(needed_bytes)?).map(Self::Stream);
        }
        // With less memory the window has to be borrowed.
        context.broker.record_need(needed_bytes);
        let blocks = match last {
            Some(Self::Blocks { mut blocks, .. }) => {
                blocks.begin_frame();
                blocks
            }
            _ => BlockDecoder::new().ok_or_else(no_memory)?,
        };
        Ok(Self::Blocks { blocks, region_len })
    }

    fn is_stream(&self) -> bool {
        matches!(self, Self::Stream(_))
    }

    /// Decodes some of the input. Returns also the number of plain bytes, and whether the frame ended.
    fn run(
        &mut self,
        input: &mut InputQueue,
        pool: &BufferPool,
        pulls: &mut PullQueue,
    ) -> Result<(Step, usize, bool), Cause> {
        match self {
            Self::Blocks { blocks, region_len } => {
                if blocks.is_full() && blocks.len() > 0 {
                    // Before waiting for more space, because these bytes may occupy it.
                    pulls.extend(plain_pull(blocks.take()));
                    return Ok((Step::Progressed, 0, false));
                }
                let checksum = blocks
                    .is_at_checksum()
                    .then(|| (input.offset(), input.peek()));
                let Some(packed) = input.take(blocks.next_input_len()) else {
                    return Ok((Step::NeedInput, 0, false));
                };
                if blocks.is_full() {
                    // Releases a region out of reach before waiting for another.
                    blocks.retire_region();
                    blocks.add_region(pool.acquire(*region_len)?);
                }
                let step = packed.with_contiguous(|packed| blocks.step(packed));
                let produced = step.map_err(Cause::Malformed)?;
                if blocks.len() >= PIECE_LEN || checksum.is_some() {
                    pulls.extend(plain_pull(blocks.take()));
                }
                if let Some((packed, Some(stored))) = checksum {
                    let expected = u32::from_le_bytes(stored);
                    pulls.push_back(Pull::ChecksumEnd { expected, packed });
                }
                Ok((Step::Progressed, produced, blocks.next_input_len() == 0))
            }
            Self::Stream(stream) => stream.run(input, pool, pulls),
        }
    }

    fn flush(&mut self) -> Option<Pull> {
        match self {
            Self::Blocks { blocks, .. } => plain_pull(blocks.take()),
            Self::Stream(stream) => stream.piece.flush(),
        }
    }
}

fn plain_pull(bytes: Bytes) -> Option<Pull> {
    (!bytes.is_empty()).then_some(Pull::Plain(bytes))
}

struct Stream {
    decoder: DCtx<'static>,
    _grant: MemoryGrant,
    piece: OutputBuffer,
    /// The decoder had no more to give for the input it has seen.
    is_drained: bool,
}

impl Stream {
    fn start(grant: MemoryGrant) -> Result<Self, Cause> {
        let mut decoder = decoder()?;
        let parameter = DParameter::WindowLogMax(WINDOW_LOG_MAX);
        decoder.set_parameter(parameter).map_err(cause)?;
        Ok(Self {
            decoder,
            _grant: grant,
            piece: OutputBuffer::default(),
            is_drained: true,
        })
    }

    fn run(
        &mut self,
        input: &mut InputQueue,
        pool: &BufferPool,
        pulls: &mut PullQueue,
    ) -> Result<(Step, usize, bool), Cause> {
        if self.is_drained && input.len() == 0 {
            return Ok((Step::NeedInput, 0, false));
        }
        let target = self.piece.spare_capacity(pool)?;
        let room = target.len();
        let mut source = InBuffer::around(input.front());
        let mut target = OutBuffer::around(target);
        let left = self
            .decoder
            .decompress_stream(&mut target, &mut source)
            .map_err(cause)?;
        let (read, produced) = (source.pos(), target.pos());
        if read == 0 && produced == 0 && left > 0 && input.len() > 0 {
            return Err(Cause::malformed("libzstd makes no progress"));
        }
        self.is_drained = produced < room;
        pulls.extend(self.piece.advance(produced));
        input.skip(read as u64);
        Ok((Step::Progressed, produced, left == 0))
    }
}

#[cfg(test)]
mod tests;
