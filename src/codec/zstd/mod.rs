//! Zstandard.
//!
//! Frame and block headers are walked here, everything else is libzstd's. Frames that are short
//! enough are decoded by jobs; the others, whose blocks refer to each other, in order.

mod header;
mod sys;

use std::fmt;

use ::zstd::zstd_safe::{DCtx, DParameter, ErrorCode, InBuffer, OutBuffer, get_error_name};
use bytes::Bytes;

use super::input::{Input, Pieces};
use super::piece::Piece;
use super::seek_point::Spacing;
use super::walk::{Results, Step, Walk, Walker, error};
use super::{
    Cause, Compression, ContentHash, Context, Error, JOB_PARTS, Job, Pull, SeekPoint, UNCOUNTED,
};
use crate::base::buffer_pool::{Buffer, BufferPool};
use crate::base::extent::{Packed, Plain};
use crate::base::memory_reclaim::MemoryGrant;
use header::{BLOCK_HEADER_LEN, Block, Header, MAGIC, MAGIC_LEN, is_ancient, is_skippable};
use sys::Blocks;

/// Short frames are joined to jobs of about so many plain bytes.
const GROUP_LEN: usize = 1 << 20;

/// A frame of at most so many plain bytes is a job, and waits until all of it is at hand.
const JOB_LEN: u64 = 8 << 20;

/// A frame that is a job has at most so many packed bytes; only empty blocks make more.
const JOB_PACKED_LEN: usize = 9 << 20;

/// Frames that are decoded in order are given out in pieces of about so many plain bytes.
const PIECE_LEN: usize = 512 << 10;

/// A region must fit into the pool so many times: the one at hand, the one before, and those that
/// are still being read.
const REGIONS: u64 = 4;

/// The largest window, as a power of two, that libzstd knows: the limit is ours to check.
const WINDOW_LOG_MAX: u32 = if usize::BITS == 32 { 30 } else { 31 };

/// [`SeekPoint::state`]; there are none but at the start of a frame.
const STATE: u32 = 0;

/// Decodes Zstandard.
pub(super) type Decoder = Walker<Frames>;

impl Decoder {
    pub(super) fn start(context: Context) -> Self {
        let spacing = Spacing::start(&context);
        Self::new(Frames::new(context, spacing, 0, true), Packed(0))
    }

    pub(super) fn resume(context: Context, seek_point: &SeekPoint) -> Result<Self, Error> {
        let packed = seek_point.packed;
        if (seek_point.state, seek_point.bit) != (STATE, 0) {
            let text = "a seek point that is not of zstd".to_owned();
            return Err(error::<Frames>(packed, Cause::Malformed(text)));
        }
        let spacing = Spacing::resume(&context, seek_point);
        let frames = Frames::new(context, spacing, seek_point.plain.0, false);
        Ok(Self::new(frames, packed))
    }
}

/// A stream of frames.
#[derive(Debug)]
pub(super) struct Frames {
    context: Context,
    spacing: Spacing,
    /// Plain bytes so far at the most; jobs may make fewer.
    plain_at_most: u64,
    /// No frame has begun yet.
    first: bool,
    state: State,
    group: Group,
    serial: Option<Serial>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// Before a frame's magic, or at the end.
    Between,
    /// So many bytes of a skippable frame are left.
    Skipping(u64),
    /// Before a frame's magic, looking for the frame's end.
    Measuring(Measure),
    /// In a frame that is decoded in order.
    Serial,
}

impl Frames {
    fn new(context: Context, spacing: Spacing, plain_at_most: u64, first: bool) -> Self {
        Self {
            context,
            spacing,
            plain_at_most,
            first,
            state: State::Between,
            group: Group::default(),
            serial: None,
        }
    }

    fn frame_start(&mut self, input: &Input, results: &mut Results) -> Result<Step, Error> {
        if input.is_over() && !self.first {
            return Ok(Step::End);
        }
        let Some(magic) = input.peek().map(u32::from_le_bytes) else {
            return Ok(Step::Hungry);
        };
        if is_skippable(magic) {
            let Some(len) = input.peek_at(MAGIC_LEN).map(u32::from_le_bytes) else {
                return Ok(Step::Hungry);
            };
            self.first = false;
            self.state = State::Skipping(MAGIC_LEN as u64 + 4 + u64::from(len));
            return Ok(Step::Moved);
        }
        let packed = input.offset();
        if magic != MAGIC {
            return Err(error::<Self>(packed, self.foreign(magic)));
        }
        let header = match Header::read(|target| input.peek_into(MAGIC_LEN, target)) {
            None => return Ok(Step::Hungry),
            Some(read) => read.map_err(|cause| error::<Self>(packed, cause))?,
        };
        self.first = false;
        if self.spacing.frame(Plain(self.plain_at_most)) {
            results.extend(self.group.flush(&self.context.pool)?);
            results.push_back(Pull::SeekPoint(SeekPoint {
                packed,
                bit: 0,
                plain: UNCOUNTED,
                state: STATE,
                window: Bytes::new(),
            }));
        }
        if header.content_len.is_some_and(|len| len > JOB_LEN) {
            return self.serial_start(header, packed, results);
        }
        self.state = State::Measuring(Measure::new(header));
        Ok(Step::Moved)
    }

    fn foreign(&self, magic: u32) -> Cause {
        if is_ancient(magic) {
            let text = "a zstd frame of a version before 0.8".to_owned();
            return Cause::Unsupported(text);
        }
        let what = if self.first {
            "this is no zstd frame"
        } else {
            "bytes that are no zstd frame follow the last frame"
        };
        Cause::Malformed(what.to_owned())
    }

    fn measure(
        &mut self,
        mut measure: Measure,
        input: &mut Input,
        results: &mut Results,
    ) -> Result<Step, Error> {
        let packed = input.offset();
        let end = measure.walk(input);
        self.state = State::Measuring(measure);
        match end {
            FrameEnd::Unknown if !input.is_ended() => Ok(Step::Hungry),
            // What can be decoded of a cut frame is.
            FrameEnd::Unknown | FrameEnd::Far => self.serial_start(measure.header, packed, results),
            FrameEnd::At(len) => {
                let Some(pieces) = input.take(len) else {
                    return Ok(Step::Hungry);
                };
                let room = measure.room();
                self.group.push(Frame { packed, pieces }, room);
                if self.group.room >= GROUP_LEN || self.group.frames.len() == JOB_PARTS {
                    results.extend(self.group.flush(&self.context.pool)?);
                }
                self.plain_at_most = self.plain_at_most.saturating_add(room as u64);
                self.state = State::Between;
                Ok(Step::Moved)
            }
        }
    }

    fn serial_start(
        &mut self,
        header: Header,
        packed: Packed,
        results: &mut Results,
    ) -> Result<Step, Error> {
        results.extend(self.group.flush(&self.context.pool)?);
        let started = Serial::start(self.serial.take(), header.window_len, &self.context);
        let serial = started.map_err(|cause| error::<Self>(packed, cause))?;
        // libzstd's own stream verifies itself.
        if header.checksum && !serial.is_stream() {
            results.push_back(Pull::HashStart(ContentHash::zstd()));
        }
        self.serial = Some(serial);
        self.state = State::Serial;
        Ok(Step::Moved)
    }

    fn serial_step(&mut self, input: &mut Input, results: &mut Results) -> Result<Step, Error> {
        let Some(serial) = &mut self.serial else {
            self.state = State::Between;
            return Ok(Step::Moved);
        };
        let packed = input.offset();
        let ran = serial.run(input, &self.context.pool, results);
        let (step, made, ended) = ran.map_err(|cause| error::<Self>(packed, cause))?;
        self.plain_at_most = self.plain_at_most.saturating_add(made as u64);
        if ended {
            results.extend(serial.flush());
            self.state = State::Between;
            // What it borrowed is wanted back.
            self.serial = self.serial.take().filter(|serial| !serial.is_stream());
        }
        Ok(step)
    }
}

impl Walk for Frames {
    const COMPRESSION: Compression = Compression::Zstd;

    fn step(&mut self, input: &mut Input, results: &mut Results) -> Result<Step, Error> {
        match &mut self.state {
            State::Between => self.frame_start(input, results),
            State::Skipping(left) => {
                *left -= input.skip(*left);
                if *left > 0 {
                    return Ok(Step::Hungry);
                }
                self.state = State::Between;
                Ok(Step::Moved)
            }
            State::Measuring(measure) => {
                let measure = *measure;
                self.measure(measure, input, results)
            }
            State::Serial => self.serial_step(input, results),
        }
    }

    fn flush(&mut self, results: &mut Results) -> Result<(), Error> {
        results.extend(self.group.flush(&self.context.pool)?);
        results.extend(self.serial.as_mut().and_then(Serial::flush));
        Ok(())
    }
}

/// Looks for the end of a frame, block by block.
#[derive(Clone, Copy, Debug)]
struct Measure {
    header: Header,
    /// From the magic to the next block header.
    walked: usize,
    plain_at_most: u64,
}

/// Where a frame ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FrameEnd {
    /// Not among the bytes at hand.
    Unknown,
    /// Too far for a job; or nowhere, as a block is malformed.
    Far,
    /// So many bytes behind its start.
    At(usize),
}

impl Measure {
    fn new(header: Header) -> Self {
        Self {
            header,
            walked: MAGIC_LEN + header.len,
            plain_at_most: 0,
        }
    }

    fn walk(&mut self, input: &Input) -> FrameEnd {
        loop {
            let Some(block) = input.peek_at::<BLOCK_HEADER_LEN>(self.walked) else {
                return FrameEnd::Unknown;
            };
            let Some(block) = Block::parse(block) else {
                return FrameEnd::Far;
            };
            let end = self.walked + BLOCK_HEADER_LEN + block.packed_len;
            if end > JOB_PACKED_LEN || self.plain_at_most + block.plain_at_most > JOB_LEN {
                return FrameEnd::Far;
            }
            let checksum_len = if self.header.checksum { 4 } else { 0 };
            if block.last && end + checksum_len > input.len() {
                return FrameEnd::Unknown;
            }
            self.walked = end;
            self.plain_at_most += block.plain_at_most;
            if block.last {
                return FrameEnd::At(end + checksum_len);
            }
        }
    }

    /// Plain bytes of the frame at the most, when its end was found.
    fn room(&self) -> usize {
        let len = self.header.content_len.unwrap_or(self.plain_at_most);
        usize::try_from(len.min(JOB_LEN)).unwrap_or_default()
    }
}

/// A frame cut out of the packed stream.
#[derive(Debug)]
struct Frame {
    packed: Packed,
    pieces: Pieces,
}

/// Frames that will be one job.
#[derive(Debug, Default)]
struct Group {
    frames: Vec<Frame>,
    room: usize,
}

impl Group {
    fn push(&mut self, frame: Frame, room: usize) {
        self.frames.push(frame);
        self.room += room;
    }

    /// A job for the frames so far. Its buffer is taken now, so that buffers are taken in stream
    /// order: a job that waited for one could wait for those who wait for its own bytes.
    fn flush(&mut self, pool: &BufferPool) -> Result<Option<Pull>, Error> {
        let Self { frames, room } = std::mem::take(self);
        let Some(packed) = frames.first().map(|frame| frame.packed) else {
            return Ok(None);
        };
        let taken = pool.acquire(room);
        let buffer = taken.map_err(|closed| error::<Frames>(packed, closed.into()))?;
        let job = Job::new(move || decode_group(&frames, buffer));
        Ok(Some(Pull::Job(job)))
    }
}

/// Decodes frames one after the other into one buffer, which has room for all.
fn decode_group(frames: &[Frame], mut buffer: Buffer) -> Result<Bytes, Error> {
    let mut filled = 0;
    let mut decoder = decoder();
    for frame in frames {
        let target = buffer.get_mut(filled..).unwrap_or_default();
        let decoded = match &mut decoder {
            Ok(decoder) => frame
                .pieces
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
    Cause::Unsupported("libzstd could not allocate a decoder".to_owned())
}

fn cause(code: ErrorCode) -> Cause {
    Cause::Malformed(get_error_name(code).to_lowercase())
}

/// Decodes long frames, one after the other.
#[derive(Debug)]
enum Serial {
    /// Block by block, with our buffers as the window.
    Blocks { blocks: Blocks, region_len: usize },
    /// By libzstd's own window, when our buffers would have to be too large for the pool.
    Stream(Stream),
}

impl Serial {
    /// Gets ready for a frame with this window, with what decoded the one before, if any.
    fn start(last: Option<Self>, window_len: u64, context: &Context) -> Result<Self, Cause> {
        let needed_bytes = window_len;
        let window_len = usize::try_from(window_len).unwrap_or(usize::MAX);
        let region_len = Blocks::region_len(window_len.min(isize::MAX.cast_unsigned()));
        if region_len as u64 > context.pool.budget() / REGIONS {
            return Stream::start(context.borrow(needed_bytes)?).map(Self::Stream);
        }
        let blocks = match last {
            Some(Self::Blocks { mut blocks, .. }) => {
                blocks.begin();
                blocks
            }
            _ => Blocks::new().ok_or_else(no_memory)?,
        };
        Ok(Self::Blocks { blocks, region_len })
    }

    fn is_stream(&self) -> bool {
        matches!(self, Self::Stream(_))
    }

    /// Decodes some of what is at hand; answers also how many bytes that made, and whether the
    /// frame ended.
    fn run(
        &mut self,
        input: &mut Input,
        pool: &BufferPool,
        results: &mut Results,
    ) -> Result<(Step, usize, bool), Cause> {
        match self {
            Self::Blocks { blocks, region_len } => {
                if blocks.is_full() && blocks.len() > 0 {
                    // Before more room is waited for, which these bytes may take up.
                    results.extend(pull(blocks.take()));
                    return Ok((Step::Moved, 0, false));
                }
                let checksum = blocks
                    .is_at_checksum()
                    .then(|| (input.offset(), input.peek()));
                let Some(packed) = input.take(blocks.next_len()) else {
                    return Ok((Step::Hungry, 0, false));
                };
                if blocks.is_full() {
                    // What is out of reach must not be held while more is waited for.
                    blocks.leave();
                    blocks.add(pool.acquire(*region_len)?);
                }
                let step = packed.with_contiguous(|packed| blocks.step(packed));
                let made = step.map_err(Cause::Malformed)?;
                if blocks.len() >= PIECE_LEN || checksum.is_some() {
                    results.extend(pull(blocks.take()));
                }
                if let Some((packed, Some(stored))) = checksum {
                    let expected = u32::from_le_bytes(stored);
                    results.push_back(Pull::HashEnd { expected, packed });
                }
                Ok((Step::Moved, made, blocks.next_len() == 0))
            }
            Self::Stream(stream) => stream.run(input, pool, results),
        }
    }

    fn flush(&mut self) -> Option<Pull> {
        match self {
            Self::Blocks { blocks, .. } => pull(blocks.take()),
            Self::Stream(stream) => stream.piece.flush(),
        }
    }
}

fn pull(bytes: Bytes) -> Option<Pull> {
    (!bytes.is_empty()).then_some(Pull::Plain(bytes))
}

/// Decodes by libzstd's streaming interface.
struct Stream {
    decoder: DCtx<'static>,
    /// For its window.
    _grant: MemoryGrant,
    piece: Piece,
    /// The decoder had no more to give for the input it has seen.
    drained: bool,
}

impl Stream {
    fn start(grant: MemoryGrant) -> Result<Self, Cause> {
        let mut decoder = decoder()?;
        let parameter = DParameter::WindowLogMax(WINDOW_LOG_MAX);
        decoder.set_parameter(parameter).map_err(cause)?;
        Ok(Self {
            decoder,
            _grant: grant,
            piece: Piece::default(),
            drained: true,
        })
    }

    /// Decodes as much as the next slice and the piece allow; answers also how many bytes that
    /// made, and whether the frame ended.
    fn run(
        &mut self,
        input: &mut Input,
        pool: &BufferPool,
        results: &mut Results,
    ) -> Result<(Step, usize, bool), Cause> {
        if self.drained && input.len() == 0 {
            return Ok((Step::Hungry, 0, false));
        }
        let target = self.piece.room(pool)?;
        let room = target.len();
        let mut source = InBuffer::around(input.front());
        let mut target = OutBuffer::around(target);
        let left = self
            .decoder
            .decompress_stream(&mut target, &mut source)
            .map_err(cause)?;
        let (read, made) = (source.pos(), target.pos());
        if read == 0 && made == 0 && left > 0 && input.len() > 0 {
            let text = "libzstd makes no progress".to_owned();
            return Err(Cause::Malformed(text));
        }
        self.drained = made < room;
        results.extend(self.piece.advance(made));
        input.skip(read as u64);
        Ok((Step::Moved, made, left == 0))
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("piece", &self.piece)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::super::start;
    use super::super::walk::tests::{
        Outcome, check, check_flips, check_truncation, context, decode, drive, noise, text,
    };
    use super::*;
    use crate::base::memory_reclaim::MemoryBroker;
    use ::zstd::stream::raw::CParameter;
    use proptest::prelude::*;
    use std::io::Write;

    /// A frame with a checksum, and with its content size if wanted.
    fn frame(plain: &[u8], content_len: bool) -> Vec<u8> {
        let mut encoder = ::zstd::Encoder::new(Vec::new(), 1).unwrap();
        encoder.include_checksum(true).unwrap();
        if content_len {
            let len = plain.len() as u64;
            encoder.set_pledged_src_size(Some(len)).unwrap();
        }
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    fn skippable(len: u32) -> Vec<u8> {
        let mut frame = 0x184d_2a5e_u32.to_le_bytes().to_vec();
        frame.extend(len.to_le_bytes());
        frame.extend(noise(len as usize));
        frame
    }

    #[test]
    fn frames_that_make_nothing_are_no_more_to_a_job_than_others() {
        let packed = frame(b"", true).repeat(3 * JOB_PARTS);
        let outcome = decode(Compression::Zstd, &packed, packed.len());
        assert_eq!(outcome.end, Ok(()));
        assert_eq!((outcome.plain.len(), outcome.jobs), (0, 3));
    }

    fn cause(outcome: Outcome) -> Cause {
        outcome.end.unwrap_err().cause
    }

    /// A frame that refers back as far as its window of 2 MiB lets it, all the way through.
    fn far_referring_frame() -> (Vec<u8>, Vec<u8>) {
        let plain = noise(3 << 19).repeat(10);
        let mut encoder = ::zstd::Encoder::new(Vec::new(), 3).unwrap();
        encoder.set_parameter(CParameter::WindowLog(21)).unwrap();
        encoder.long_distance_matching(true).unwrap();
        encoder.include_checksum(true).unwrap();
        encoder.write_all(&plain).unwrap();
        let packed = encoder.finish().unwrap();
        assert!(packed.len() < 3 << 20, "nothing refers back");
        (plain, packed)
    }

    #[test]
    fn a_window_reaches_into_the_region_before() {
        let (plain, packed) = far_referring_frame();
        for push_len in [100_000, packed.len()] {
            let outcome = decode(Compression::Zstd, &packed, push_len);
            outcome.end.unwrap();
            assert!(outcome.plain == plain, "pushed by {push_len}");
        }
    }

    #[test]
    fn a_window_too_large_for_the_pool_is_libzstds_own() {
        let (plain, packed) = far_referring_frame();
        let pool = BufferPool::new(4 << 20);
        let context = Context {
            pool: pool.clone(),
            ..context()
        };
        let outcome = drive(start(Compression::Zstd, context), &packed, packed.len(), 0);
        outcome.end.unwrap();
        assert!(outcome.plain == plain);
        assert!(pool.peak_bytes() <= 4 << 20);
    }

    #[test]
    fn bytes_outlive_what_decoded_them() {
        let (plain, packed) = far_referring_frame();
        let mut decoder = start(Compression::Zstd, context());
        decoder.push(packed.into());
        decoder.finish();
        let mut pieces = Vec::new();
        loop {
            match decoder.pull().unwrap() {
                Pull::Plain(piece) => pieces.push(piece),
                Pull::End => break,
                _ => {}
            }
        }
        drop(decoder);
        assert!(pieces.concat() == plain);
    }

    #[test]
    fn short_frames_are_joined_to_jobs() {
        let plain = text(6 << 20);
        for content_len in [false, true] {
            let frames = plain.chunks(100_000).map(|plain| frame(plain, content_len));
            let packed = frames.collect::<Vec<_>>().concat();
            let seek_points = check(Compression::Zstd, &packed, &plain);
            // Without a content size, 100,000 bytes are taken for a full block of 128 KiB.
            let count = if content_len { 6 } else { 8 };
            assert_eq!(seek_points.len(), count);
            let jobs = decode(Compression::Zstd, &packed, packed.len()).jobs;
            assert_eq!(jobs, count);
        }
    }

    #[test]
    fn a_long_frame_is_decoded_in_order_and_has_one_seek_point() {
        let plain = text(20 << 20);
        for content_len in [false, true] {
            let packed = frame(&plain, content_len);
            assert_eq!(check(Compression::Zstd, &packed, &plain).len(), 1);
            assert_eq!(decode(Compression::Zstd, &packed, 1 << 20).jobs, 0);
        }
    }

    #[test]
    fn the_hash_of_a_long_frame_is_taken_behind_it() {
        let plain = text(9 << 20);
        let mut packed = [frame(&plain, false), frame(&plain, true)].concat();
        let last = packed.len() - 1;
        packed[last] ^= 1;
        let outcome = decode(Compression::Zstd, &packed, 100_000);
        assert!(outcome.plain == plain.repeat(2));
        let error = outcome.end.unwrap_err();
        assert_eq!(error.packed, Packed(packed.len() as u64 - 4));
        assert!(matches!(error.cause, Cause::Checksum { .. }), "{error}");
    }

    #[test]
    fn frames_of_every_kind_follow_each_other() {
        let parts = [
            text(100),
            text(9 << 20),
            Vec::new(),
            noise(3 << 20),
            vec![0; 30 << 20],
        ];
        let packed = [
            skippable(4),
            frame(&parts[0], true),
            frame(&parts[1], false),
            frame(&parts[2], true),
            skippable(0),
            frame(&parts[3], false),
            frame(&parts[4], true),
            skippable(200_000),
        ];
        check(Compression::Zstd, &packed.concat(), &parts.concat());
    }

    #[test]
    fn a_cut_anywhere_is_found() {
        let plain = [text(3000), noise(1000)].concat();
        for content_len in [false, true] {
            let packed = frame(&plain, content_len);
            check_truncation(Compression::Zstd, &packed, &plain, &[]);
        }
    }

    #[test]
    fn a_cut_frame_gives_what_was_whole() {
        let plain = noise(1 << 20);
        let packed = frame(&plain, true);
        let outcome = decode(Compression::Zstd, &packed[..packed.len() / 2], 10_000);
        assert!(outcome.plain.len() > 300_000);
        assert!(plain.starts_with(&outcome.plain));
        assert_eq!(cause(outcome), Cause::Truncated);
    }

    #[test]
    fn damage_anywhere_is_found() {
        let plain = [text(1000), noise(300)].concat();
        check_flips(Compression::Zstd, &frame(&plain, true), &plain);
        check_flips(Compression::Zstd, &frame(&plain, false), &plain);
    }

    #[test]
    fn a_window_beyond_the_limit_is_refused_with_what_it_needs() {
        let plain = text(20 << 20);
        let mut encoder = ::zstd::Encoder::new(Vec::new(), 1).unwrap();
        encoder.set_parameter(CParameter::WindowLog(24)).unwrap();
        encoder.write_all(&plain).unwrap();
        let packed = encoder.finish().unwrap();
        let with_limit = |limit_bytes| {
            let context = Context {
                // Too small for regions that hold the window.
                pool: BufferPool::new(32 << 20),
                broker: MemoryBroker::with_limit(limit_bytes),
                ..context()
            };
            drive(Box::new(Decoder::start(context)), &packed, 1 << 20, 0)
        };
        assert_eq!(
            cause(with_limit((16 << 20) - 1)),
            Cause::Memory {
                needed_bytes: 16 << 20,
                limit_bytes: (16 << 20) - 1
            }
        );
        assert!(with_limit(16 << 20).plain == plain);
    }

    #[test]
    fn garbage_after_the_last_frame_is_an_error_behind_all_bytes() {
        let plain = text(10_000);
        let mut packed = frame(&plain, true);
        packed.extend([0; 512]);
        let outcome = decode(Compression::Zstd, &packed, 1000);
        assert!(outcome.plain == plain);
        assert!(matches!(cause(outcome), Cause::Malformed(_)));
    }

    #[test]
    fn foreign_seek_points_are_refused() {
        let packed = frame(&text(1000), true);
        let point = decode(Compression::Zstd, &packed, 1000)
            .seek_points
            .remove(0);
        for (state, bit) in [(1, 0), (0, 1)] {
            let foreign = SeekPoint {
                bit,
                state,
                ..point.clone()
            };
            assert!(Decoder::resume(context(), &foreign).is_err());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_bytes_behind_a_magic_are_survived(
            bytes in proptest::collection::vec(any::<u8>(), 0..400),
            push_len in 1..50_usize,
        ) {
            let packed = [&MAGIC.to_le_bytes(), &bytes[..]].concat();
            let outcome = decode(Compression::Zstd, &packed, push_len);
            prop_assert!(outcome.end.is_err() || bytes.len() > 4);
        }

        #[test]
        fn push_sizes_do_not_matter(
            content_len: bool,
            lens in proptest::collection::vec(0..5000_usize, 1..8),
            push_len in 1..3000_usize,
        ) {
            let parts = lens.into_iter().map(text).collect::<Vec<_>>();
            let packed = parts.iter().map(|plain| frame(plain, content_len));
            let packed = packed.collect::<Vec<_>>().concat();
            let outcome = decode(Compression::Zstd, &packed, push_len);
            prop_assert_eq!(outcome.end, Ok(()));
            prop_assert!(outcome.plain == parts.concat());
        }
    }
}
