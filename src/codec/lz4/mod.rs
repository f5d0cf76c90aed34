//! lz4: the frame format and its legacy form. This module walks headers, and liblz4 decodes blocks:
//! independent ones by jobs, linked ones in order, each after the 64 KiB that it may refer to.

mod block;
mod header;
mod sys;

use std::sync::Arc;

use super::job::MAX_PARTS_PER_JOB;
use super::seek_point::{STATE_BETWEEN_FRAMES, Spacing, unpack_window};
use super::walker::input_queue::InputQueue;
use super::walker::{
    FrameDecoder, FrameWalker, PullQueue, Step, error, foreign_seek_point, next_magic, no_magic,
};
use super::{
    Cause, Compression, ContentChecksum, Context, Error, Job, Pull, SeekPoint, UNKNOWN_PLAIN,
};
use crate::base::buffer_pool::Buffer;
use crate::base::extent::{Packed, Plain};
use block::{Block, ContentLenCheck, check_content_len, decode_group};
use header::{Header, LEGACY_MAGIC, MAGIC, MAGIC_LEN};
use sys::HISTORY_LEN;

/// Plain bytes of a piece into which small blocks are joined.
const PIECE_LEN: usize = 1 << 20;

/// Minimum bytes of a stored block for a piece of its own. Copying a shorter one costs less.
const MIN_ZERO_COPY_LEN: usize = 32 << 10;

const STORED_FLAG: u32 = 1 << 31;

pub(super) type Decoder = FrameDecoder<Frames>;

impl Decoder {
    pub(super) fn start(context: Context) -> Self {
        let frames = Frames {
            spacing: Spacing::start(context.wants_seek_points),
            context,
            plain_upper_bound: 0,
            is_first: true,
            state: State::BetweenFrames,
        };
        Self::new(frames, Packed(0))
    }

    pub(super) fn resume(context: Context, seek_point: &SeekPoint) -> Result<Self, Error> {
        let state =
            State::resume(seek_point).map_err(|cause| error::<Frames>(seek_point.packed, cause))?;
        let frames = Frames {
            spacing: Spacing::resume(context.wants_seek_points, seek_point),
            context,
            plain_upper_bound: seek_point.plain.0,
            is_first: false,
            state,
        };
        Ok(Self::new(frames, seek_point.packed))
    }
}

pub(super) struct Frames {
    context: Context,
    spacing: Spacing,
    /// Upper bound of the plain bytes so far; jobs may make fewer.
    plain_upper_bound: u64,
    is_first: bool,
    state: State,
}

enum State {
    BetweenFrames,
    Blocks(Frame),
}

impl State {
    fn resume(seek_point: &SeekPoint) -> Result<Self, Cause> {
        if (seek_point.bit, seek_point.state) == (0, STATE_BETWEEN_FRAMES) {
            return Ok(Self::BetweenFrames);
        }
        let header = Header::from_state(seek_point.state).filter(|_| seek_point.bit == 0);
        let header = header.ok_or_else(foreign_seek_point::<Frames>)?;
        let history = unpack_window(&seek_point.window, HISTORY_LEN)?;
        Ok(Self::Blocks(Frame::resume(header, history)))
    }
}

struct Frame {
    header: Header,
    /// Whether its first block was seen, without which nothing about the whole can be checked.
    has_first_block: bool,
    body: Body,
    /// A block that waits until the output before it is pulled.
    pending: Option<Block>,
}

enum Body {
    Independent(Group),
    Linked(LinkedDecoder),
}

impl Body {
    fn flush(&mut self, context: &Context) -> Result<Option<Pull>, Error> {
        match self {
            Self::Independent(group) => group.flush(context),
            Self::Linked(linked) => Ok(linked.flush()),
        }
    }
}

struct Group {
    max_block_len: usize,
    len_check: Option<Arc<ContentLenCheck>>,
    blocks: Vec<Block>,
    buffer_len: usize,
}

struct LinkedDecoder {
    /// The plain bytes before the piece, as far back as blocks may refer.
    history: Vec<u8>,
    /// History, then plain bytes not given out yet.
    piece: Option<LinkedBuffer>,
    plain_len: u64,
}

struct LinkedBuffer {
    buffer: Buffer,
    /// Start of new plain bytes.
    start: usize,
    filled: usize,
}

impl Frame {
    fn start(header: Header) -> Self {
        Self {
            has_first_block: true,
            ..Self::resume(header, Vec::new())
        }
    }

    fn resume(header: Header, history: Vec<u8>) -> Self {
        let body = if header.is_linked {
            Body::Linked(LinkedDecoder {
                history,
                piece: None,
                plain_len: 0,
            })
        } else {
            Body::Independent(Group {
                max_block_len: header.max_block_len,
                len_check: header.content_len.map(ContentLenCheck::new),
                blocks: Vec::new(),
                buffer_len: 0,
            })
        };
        Self {
            header,
            has_first_block: false,
            body,
            pending: None,
        }
    }

    fn is_hashed_by_driver(&self) -> bool {
        self.has_first_block && self.header.has_content_checksum
    }
}

impl FrameWalker for Frames {
    const COMPRESSION: Compression = Compression::Lz4;

    fn step(&mut self, input: &mut InputQueue, pulls: &mut PullQueue) -> Result<Step, Error> {
        match &mut self.state {
            State::BetweenFrames => self.start_frame(input, pulls),
            State::Blocks(_) => self.block(input, pulls),
        }
    }

    fn flush(&mut self, pulls: &mut PullQueue) -> Result<(), Error> {
        if let State::Blocks(frame) = &mut self.state {
            pulls.extend(frame.body.flush(&self.context)?);
        }
        Ok(())
    }
}

impl Frames {
    fn start_frame(
        &mut self,
        input: &mut InputQueue,
        pulls: &mut PullQueue,
    ) -> Result<Step, Error> {
        let magic = match next_magic(input, &mut self.is_first) {
            Ok(magic) => magic,
            Err(step) => return Ok(step),
        };
        let packed = input.offset();
        let (header, len) = match magic {
            LEGACY_MAGIC => (Header::LEGACY, 0),
            MAGIC => match Header::read(|target| input.peek_into(MAGIC_LEN, target)) {
                None => return Ok(Step::NeedInput),
                Some(read) => read.map_err(|cause| error::<Self>(packed, cause))?,
            },
            _ => {
                let cause = no_magic(self.is_first, "lz4", "frame");
                return Err(error::<Self>(packed, cause));
            }
        };
        self.is_first = false;
        if self.spacing.try_mark_frame(Plain(self.plain_upper_bound)) {
            let point = SeekPoint::without_window(packed, UNKNOWN_PLAIN, STATE_BETWEEN_FRAMES);
            pulls.push_back(Pull::SeekPoint(point));
        }
        input.skip((MAGIC_LEN + len) as u64);
        let frame = Frame::start(header);
        if frame.is_hashed_by_driver() {
            pulls.push_back(Pull::ChecksumStart(ContentChecksum::lz4()));
        }
        self.state = State::Blocks(frame);
        Ok(Step::Progressed)
    }

    /// Walks one block, or the end mark or magic in its place.
    fn block(&mut self, input: &mut InputQueue, pulls: &mut PullQueue) -> Result<Step, Error> {
        let State::Blocks(frame) = &mut self.state else {
            return Ok(Step::Progressed);
        };
        if let Some(block) = frame.pending.take() {
            self.emit_block(block, pulls)?;
            return Ok(Step::Progressed);
        }
        let header = frame.header;
        if header.is_legacy && input.is_exhausted() {
            return Ok(Step::End);
        }
        let Some(word) = input.peek().map(u32::from_le_bytes) else {
            return Ok(Step::NeedInput);
        };
        if !header.is_legacy && word == 0 {
            return self.end_frame(input, pulls);
        }
        let stored = !header.is_legacy && word & STORED_FLAG != 0;
        let len = if stored { word & !STORED_FLAG } else { word } as usize;
        if len > header.max_packed_len() {
            if header.is_legacy {
                // No block is so long: this is the magic of another frame.
                self.flush(pulls)?;
                self.state = State::BetweenFrames;
                return Ok(Step::Progressed);
            }
            return Err(error::<Self>(
                input.offset(),
                Cause::Malformed(format!(
                    "a block of {len} bytes is longer than the frame allows"
                )),
            ));
        }
        let Some(block) = take_block(input, len, stored, header.has_block_checksums) else {
            return Ok(Step::NeedInput);
        };
        self.add_seek_point_before(&block, pulls)?;
        self.emit_block(block, pulls)?;
        Ok(Step::Progressed)
    }

    fn add_seek_point_before(&mut self, block: &Block, pulls: &mut PullQueue) -> Result<(), Error> {
        let State::Blocks(frame) = &mut self.state else {
            return Ok(());
        };
        let plain = Plain(self.plain_upper_bound);
        let state = frame.header.state();
        match &mut frame.body {
            Body::Independent(group) => {
                if self.spacing.try_mark_frame(plain) {
                    pulls.extend(group.flush(&self.context)?);
                    let point = SeekPoint::without_window(block.packed, UNKNOWN_PLAIN, state);
                    pulls.push_back(Pull::SeekPoint(point));
                }
            }
            Body::Linked(linked) => {
                if !self.spacing.is_checkpoint_due(plain, block.packed) {
                    return Ok(());
                }
                pulls.extend(linked.flush());
                let window = self
                    .spacing
                    .try_checkpoint(plain, block.packed, &linked.history);
                pulls.extend(window.map(|window| {
                    let point = SeekPoint::without_window(block.packed, UNKNOWN_PLAIN, state);
                    Pull::SeekPoint(SeekPoint { window, ..point })
                }));
            }
        }
        Ok(())
    }

    /// Decodes `block` or adds it to a job, once earlier output is pulled, as waiting must hold no buffers.
    fn emit_block(&mut self, block: Block, pulls: &mut PullQueue) -> Result<(), Error> {
        let State::Blocks(frame) = &mut self.state else {
            return Ok(());
        };
        let room = block.max_plain_len(frame.header.max_block_len);
        if let Body::Linked(linked) = &mut frame.body
            && let Some(piece) = &linked.piece
            && piece.buffer.len() - piece.filled < room
        {
            pulls.extend(linked.flush());
        }
        if !pulls.is_empty() {
            frame.pending = Some(block);
            return Ok(());
        }
        match &mut frame.body {
            Body::Independent(group) => {
                if block.is_stored && room >= MIN_ZERO_COPY_LEN {
                    block.verify()?;
                    pulls.extend(group.flush(&self.context)?);
                    if let Some(len_check) = &group.len_check {
                        len_check.begin_part();
                        let counted = len_check.end_part(room as u64);
                        counted.map_err(|cause| error::<Self>(block.packed, cause))?;
                    }
                    pulls.extend(block.segments.slices.into_iter().map(Pull::Plain));
                } else {
                    group.buffer_len += room;
                    group.blocks.push(block);
                    if group.buffer_len >= PIECE_LEN || group.blocks.len() == MAX_PARTS_PER_JOB {
                        pulls.extend(group.flush(&self.context)?);
                    }
                }
                self.plain_upper_bound = self.plain_upper_bound.saturating_add(room as u64);
            }
            Body::Linked(linked) => {
                let len = linked.decode(&block, room, &self.context)?;
                self.plain_upper_bound = self.plain_upper_bound.saturating_add(len as u64);
                if let Some(expected) = frame.header.content_len.filter(|_| frame.has_first_block) {
                    check_content_len(expected, linked.plain_len, false)
                        .map_err(|cause| error::<Self>(block.packed, cause))?;
                }
            }
        }
        Ok(())
    }

    fn end_frame(&mut self, input: &mut InputQueue, pulls: &mut PullQueue) -> Result<Step, Error> {
        let State::Blocks(frame) = &self.state else {
            return Ok(Step::Progressed);
        };
        let has_checksum = frame.header.has_content_checksum;
        let expected = input.peek_at(4).map(u32::from_le_bytes);
        let expected = expected.filter(|_| has_checksum);
        if has_checksum && expected.is_none() {
            return Ok(Step::NeedInput);
        }
        let packed = input.offset();
        self.flush(pulls)?;
        let State::Blocks(frame) = std::mem::replace(&mut self.state, State::BetweenFrames) else {
            return Ok(Step::Progressed);
        };
        input.skip(if expected.is_some() { 8 } else { 4 });
        if !frame.has_first_block {
            return Ok(Step::Progressed);
        }
        let len_checked = match (&frame.body, frame.header.content_len) {
            (Body::Independent(group), _) => {
                let len_check = group.len_check.as_ref();
                len_check.map_or(Ok(()), |len_check| len_check.end_part(0))
            }
            (Body::Linked(linked), Some(expected)) => {
                check_content_len(expected, linked.plain_len, true)
            }
            (Body::Linked(_), None) => Ok(()),
        };
        len_checked.map_err(|cause| error::<Self>(packed, cause))?;
        if let Some(expected) = expected {
            pulls.push_back(Pull::ChecksumEnd { expected, packed });
        }
        Ok(Step::Progressed)
    }
}

/// Takes the next block; `None` when the input does not contain all of it.
fn take_block(input: &mut InputQueue, len: usize, stored: bool, checksum: bool) -> Option<Block> {
    let packed = input.offset();
    let checksum_len = if checksum { 4 } else { 0 };
    if input.len() < 4 + len + checksum_len {
        return None;
    }
    let checksum = input.peek_at(4 + len).map(u32::from_le_bytes);
    let checksum = checksum.filter(|_| checksum_len > 0);
    input.skip(4);
    let segments = input.take(len)?;
    input.skip(checksum_len as u64);
    Some(Block {
        packed,
        segments,
        is_stored: stored,
        checksum,
    })
}

impl Group {
    /// Makes a job of the blocks so far. Its buffer is taken in stream order, or it could wait for itself.
    fn flush(&mut self, context: &Context) -> Result<Option<Pull>, Error> {
        let blocks = std::mem::take(&mut self.blocks);
        let buffer_len = std::mem::take(&mut self.buffer_len);
        let Some(first) = blocks.first().map(|block| block.packed) else {
            return Ok(None);
        };
        let taken = context.pool.acquire(buffer_len);
        let buffer = taken.map_err(|closed| error::<Frames>(first, closed.into()))?;
        let (max_len, len_check) = (self.max_block_len, self.len_check.clone());
        if let Some(len_check) = &len_check {
            len_check.begin_part();
        }
        Ok(Some(Pull::Job(Job::new(move || {
            let plain = decode_group(&blocks, max_len, buffer)?;
            if let Some(len_check) = len_check {
                let counted = len_check.end_part(plain.len() as u64);
                counted.map_err(|cause| error::<Frames>(first, cause))?;
            }
            Ok(plain)
        }))))
    }
}

impl LinkedDecoder {
    /// Decodes `block` into the `room` free bytes of a current piece. Returns the number of plain bytes.
    fn decode(&mut self, block: &Block, room: usize, context: &Context) -> Result<usize, Error> {
        block.verify()?;
        let piece = if let Some(piece) = self.piece.take() {
            piece
        } else {
            let start = self.history.len();
            let taken = context.pool.acquire(start + room.max(PIECE_LEN));
            let mut buffer =
                taken.map_err(|closed| error::<Frames>(block.packed, closed.into()))?;
            if let Some(front) = buffer.get_mut(..start) {
                front.copy_from_slice(&self.history);
            }
            LinkedBuffer {
                buffer,
                start,
                filled: start,
            }
        };
        let piece = self.piece.insert(piece);
        let end = piece.filled.saturating_add(room).min(piece.buffer.len());
        let target = piece.buffer.get_mut(..end).unwrap_or_default();
        let len = block.decode(target, piece.filled)?;
        piece.filled += len;
        self.plain_len = self.plain_len.saturating_add(len as u64);
        Ok(len)
    }

    /// The decoded bytes that are not pulled yet. Afterwards they are history.
    fn flush(&mut self) -> Option<Pull> {
        let piece = self.piece.take()?;
        let seen = piece.buffer.get(..piece.filled).unwrap_or_default();
        let kept = seen.len().saturating_sub(HISTORY_LEN);
        self.history.clear();
        self.history
            .extend_from_slice(seen.get(kept..).unwrap_or_default());
        let LinkedBuffer {
            buffer,
            start,
            filled,
        } = piece;
        (filled > start).then(|| Pull::Plain(buffer.freeze().slice(start..filled)))
    }
}

#[cfg(test)]
mod tests;
