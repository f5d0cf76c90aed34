//! gzip (RFC 1952): any number of members, with checkpoints inside long ones.
//!
//! This module reads headers and trailers, and zlib-rs inflates in between. If a checkpoint is due, inflating
//! stops at the end of the next block, where it can resume with the block's bit and the 32 KiB before it. After a
//! full flush it needs no bytes before.
//! Small members, as of pigz and eStargz, share buffers and seek points, and those of BGZF become jobs. Other
//! threads decode long members speculatively (`speculation_queue.rs`, `speculative.rs`).

mod bgzf;
mod block_finder;
mod header;
mod output_queue;
mod speculation_queue;
mod speculative;
mod sys;
mod trailer;

use bytes::Bytes;

use self::bgzf::Group;
use self::header::{Header, HeaderError};
use self::output_queue::OutputQueue;
use self::speculation_queue::{Match, SpeculationLimits, SpeculationQueue};
use self::speculative::{BlockEnd, SpeculativeOutput, UnresolvedPiece};
use self::sys::{Inflate, StopAt, StopReason, WINDOW_LEN};
use self::trailer::{MemberChecksum, Trailer};
use super::seek_point::{Spacing, pack_window, unpack_window};
use super::walker::input_queue::InputQueue;
use super::{Cause, Compression, Context, Error, Job, Pull, SeekPoint};
use crate::base::buffer_pool::BufferPool;
use crate::base::extent::{Packed, Plain};

/// [`SeekPoint::state`]: a member's header begins here.
const STATE_MEMBER: u32 = 0;
/// [`SeekPoint::state`]: a deflate block begins here, after the plain bytes in the window.
const STATE_BLOCK: u32 = 1;

/// The start of a member.
pub(crate) fn member_seek_point(packed: Packed, plain: Plain) -> SeekPoint {
    SeekPoint::without_window(packed, plain, STATE_MEMBER)
}

/// A deflate block that begins after `bit` bits of the byte at `packed`, with the plain bytes before it.
pub(crate) fn block_seek_point(packed: Packed, bit: u8, plain: Plain, window: &[u8]) -> SeekPoint {
    SeekPoint {
        bit,
        window: pack_window(window),
        ..SeekPoint::without_window(packed, plain, STATE_BLOCK)
    }
}

const MAX_BUFFER_LEN: usize = 1 << 20;
/// Minimum plain bytes of a buffer, where the fixed cost of a piece is still negligible.
const MIN_BUFFER_LEN: usize = 64 << 10;
/// Ratio of a buffer to the queued packed bytes, so that small pushes do not make mostly empty buffers.
const BUFFER_EXPANSION_FACTOR: usize = 4;
/// Maximum plain bytes of a zlib call; checkpoints may be as late. 64 KiB and 1 MiB are equally fast.
const INFLATE_STEP_LEN: usize = 256 << 10;

/// Last bytes of an empty stored block, which ends each flush.
const FLUSH_END: u32 = 0x0000_ffff;
/// Maximum packed bytes that are decoded twice to see whether a flush was a full one.
const MAX_PROBE_LEN: usize = 64 << 10;
/// Minimum plain bytes between two such attempts.
const MIN_PROBE_SPACING: u64 = 64 << 10;

pub(super) struct Decoder {
    spacing: Spacing,
    inflate: Inflate,
    input: InputQueue,
    /// The last four packed bytes that were used, the very last one lowest.
    tail: u32,
    /// The plain byte from which on a flush is examined.
    next_probe: Plain,
    plain: Plain,
    output: OutputQueue,
    pool: BufferPool,
    limits: Option<SpeculationLimits>,
    /// Start of decoding in the member.
    member_start: (Packed, Plain),
    speculation: Option<SpeculationQueue>,
    state: State,
    outcome: Option<Result<(), Error>>,
}

enum State {
    Header {
        header: Header,
        /// Whether another member precedes, so that the stream may end instead.
        is_after_member: bool,
    },
    /// A deflate block, before zlib is positioned at it.
    Block {
        /// Number of bits of its first byte before the block.
        bit: u8,
        /// Whether that byte is still in the input. Otherwise it is the last used byte.
        is_byte_pending: bool,
        window: Bytes,
        check: Option<MemberChecksum>,
    },
    Deflate {
        /// Checksum for the trailer; `None` when decoding began inside the member.
        check: Option<MemberChecksum>,
        /// Whether zlib may hold output that did not fit into the buffer.
        has_pending_output: bool,
    },
    Trailer {
        check: Option<MemberChecksum>,
        trailer: Trailer,
    },
    Zeros,
}

enum Step {
    Progressed,
    NeedInput,
    End,
}

impl Decoder {
    pub(super) fn start(context: Context) -> Self {
        let spacing = Spacing::start(context.wants_seek_points);
        let limits = SpeculationLimits::new(&context);
        let offsets = (Packed(0), Plain(0));
        Self::new(context, spacing, limits, offsets, State::member(false))
    }

    pub(super) fn resume(context: Context, seek_point: &SeekPoint) -> Result<Self, Error> {
        let error = |cause| error(seek_point.packed, cause);
        let state = match (seek_point.state, seek_point.bit) {
            (STATE_MEMBER, 0) if seek_point.window.is_empty() => State::member(false),
            (STATE_BLOCK, bit @ 0..8) => State::Block {
                bit,
                is_byte_pending: bit > 0,
                window: unpack_window(&seek_point.window, WINDOW_LEN)
                    .map_err(error)?
                    .into(),
                check: None,
            },
            _ => return Err(error(Cause::malformed("not a seek point of gzip"))),
        };
        let spacing = Spacing::resume(context.wants_seek_points, seek_point);
        let offsets = (seek_point.packed, seek_point.plain);
        // From the middle, little is decoded.
        Ok(Self::new(context, spacing, None, offsets, state))
    }

    fn new(
        context: Context,
        spacing: Spacing,
        limits: Option<SpeculationLimits>,
        (packed, plain): (Packed, Plain),
        state: State,
    ) -> Self {
        Self {
            spacing,
            inflate: Inflate::new(),
            input: InputQueue::new(packed),
            tail: 0,
            next_probe: plain,
            plain,
            output: OutputQueue::new(context.pool.clone()),
            limits,
            pool: context.pool,
            member_start: (packed, plain),
            speculation: None,
            state,
            outcome: None,
        }
    }

    fn step(&mut self) -> Result<Step, Error> {
        match self.state {
            State::Header { .. } => self.header(),
            State::Block { .. } => self.block(),
            State::Deflate { .. } => self.deflate(),
            State::Trailer { .. } => self.trailer(),
            State::Zeros => Ok(self.zeros()),
        }
    }

    fn header(&mut self) -> Result<Step, Error> {
        let State::Header {
            header,
            is_after_member,
        } = &mut self.state
        else {
            return Ok(Step::Progressed);
        };
        let (seen, is_after_member) = (header.len, *is_after_member);
        if seen == 0 && self.begin_zeros_or_bgzf(is_after_member)? {
            return Ok(Step::Progressed);
        }
        let State::Header { header, .. } = &mut self.state else {
            return Ok(Step::Progressed);
        };
        match header.push(self.input.front()) {
            Err(HeaderError::NoMagic) if is_after_member => Ok(self.end_at_garbage(seen)),
            Err(HeaderError::NoMagic) => self.fail(Cause::malformed("no gzip member begins here")),
            Err(HeaderError::Invalid(cause)) => self.fail(cause),
            Ok(len) if header.is_done() => {
                let header_len = header.len;
                self.consume(len);
                self.begin_member(Packed(self.input.offset().0.saturating_sub(header_len)));
                Ok(Step::Progressed)
            }
            // The header continues, or the stream ends with at most the first byte of a magic.
            Ok(0) if is_after_member && self.input.is_finished() && seen == 0 => Ok(Step::End),
            Ok(0) if is_after_member && self.input.is_finished() && seen == 1 => {
                Ok(self.end_at_garbage(seen))
            }
            Ok(0) => self.need_input(),
            Ok(len) => {
                self.consume(len);
                Ok(Step::Progressed)
            }
        }
    }

    /// Checks for zeros or BGZF where a member may begin.
    fn begin_zeros_or_bgzf(&mut self, is_after_member: bool) -> Result<bool, Error> {
        if is_after_member && self.input.front().first() == Some(&0) {
            self.state = State::Zeros;
            return Ok(true);
        }
        let Some(group) = Group::parse(self.input.front(), MAX_BUFFER_LEN) else {
            return Ok(false);
        };
        // First whatever holds buffers: the job's own may have to wait for them.
        if self.output.is_drained() {
            self.begin_bgzf_job(group)?;
        } else {
            self.output.flush();
        }
        Ok(true)
    }

    fn begin_member(&mut self, packed: Packed) {
        self.mark_member(packed);
        self.inflate.reset();
        self.member_start = (self.input.offset(), self.plain);
        self.state = State::deflate(Some(MemberChecksum::new(self.plain)));
    }

    fn begin_bgzf_job(&mut self, group: Group) -> Result<(), Error> {
        let (packed, plain_len) = (self.input.offset(), group.plain_len);
        // Taken here and not in the job, because later jobs must not keep an earlier one waiting.
        let taken = self.pool.acquire(plain_len);
        let buffer = taken.map_err(|closed| error(packed, closed.into()))?;
        self.mark_member(packed);
        let input = self.input.slice(0..group.packed_len);
        self.consume(input.len());
        self.plain = Plain(self.plain.0.saturating_add(plain_len as u64));
        let job =
            Job::new(move || input.with_contiguous(|bytes| group.decode(bytes, packed, buffer)));
        self.output.push(Pull::Job(job));
        self.state = State::member(true);
        Ok(())
    }

    fn mark_member(&mut self, packed: Packed) {
        if self.spacing.try_mark_frame(self.plain) {
            let seek_point = SeekPoint::without_window(packed, self.plain, STATE_MEMBER);
            self.output.push_seek_point(seek_point);
        }
    }

    fn block(&mut self) -> Result<Step, Error> {
        let State::Block {
            bit,
            is_byte_pending,
            window,
            ..
        } = &mut self.state
        else {
            return Ok(Step::Progressed);
        };
        if *is_byte_pending {
            if self.input.len() == 0 {
                return self.need_input();
            }
            *is_byte_pending = false;
            self.consume(1);
            return Ok(Step::Progressed);
        }
        let (bit, window_len) = (*bit, window.len());
        if self.begin_speculation() {
            return Ok(Step::Progressed);
        }
        let found = match window_len {
            WINDOW_LEN => self.find_match((8 - bit) % 8),
            // References to before the member's start are errors, which speculation cannot detect.
            _ => Match::Miss,
        };
        if let Match::Hit = found {
            self.accept_speculative_output();
            return Ok(Step::Progressed);
        }
        if self.wants_input() {
            return Ok(Step::NeedInput);
        }
        if let Match::Running(work) = found {
            self.output.push(Pull::WaitFor(work));
            return Ok(Step::Progressed);
        }
        if let State::Block { window, check, .. } = &mut self.state {
            let [.., last_byte] = self.tail.to_be_bytes();
            let split = (bit > 0).then_some((last_byte, bit));
            self.inflate.resume(window, split);
            self.state = State::deflate(check.take());
        }
        Ok(Step::Progressed)
    }

    fn deflate(&mut self) -> Result<Step, Error> {
        if self.begin_speculation() {
            return Ok(Step::Progressed);
        }
        if self.wants_input() {
            return Ok(Step::NeedInput);
        }
        let stop = self.next_stop();
        let State::Deflate {
            check,
            has_pending_output,
        } = &mut self.state
        else {
            return Ok(Step::Progressed);
        };
        if self.input.len() == 0 && !*has_pending_output {
            return self.need_input();
        }
        let buffer_len = self.input.len().saturating_mul(BUFFER_EXPANSION_FACTOR);
        let room = self
            .output
            .spare_capacity(buffer_len.clamp(MIN_BUFFER_LEN, MAX_BUFFER_LEN))
            .map_err(|closed| error(self.input.offset(), closed.into()))?;
        let step_len = room.len().min(INFLATE_STEP_LEN);
        let target = room.get_mut(..step_len).unwrap_or_default();
        let input = self.input.front();
        let progress = self.inflate.decode(input, target, stop);
        let stuck = progress.produced == 0 && progress.consumed == 0 && !input.is_empty();
        if let Some(check) = check {
            check.update(target.get(..progress.produced).unwrap_or_default());
        }
        *has_pending_output = progress.produced == step_len;
        self.output.advance(progress.produced);
        self.plain = Plain(self.plain.0.saturating_add(progress.produced as u64));
        self.consume(progress.consumed);
        match progress.reason {
            StopReason::Exhausted if stuck => {
                return self.fail(Cause::malformed("inflate makes no progress"));
            }
            StopReason::Exhausted => {}
            StopReason::BlockEnd { unused_bits } => self.end_block(unused_bits),
            StopReason::StreamEnd => self.end_deflate(),
            StopReason::Damaged(text) => return self.fail(Cause::Malformed(text)),
        }
        Ok(Step::Progressed)
    }

    fn next_stop(&self) -> StopAt {
        let speculation = self.speculation.as_ref();
        let is_busy = speculation.is_some_and(SpeculationQueue::is_busy);
        if is_busy || self.spacing.is_frame_due(self.plain) {
            StopAt::BlockEnd
        } else {
            StopAt::StreamEnd
        }
    }

    fn is_checkpoint_due(&self) -> bool {
        let packed = self.input.offset();
        self.spacing.is_checkpoint_due(self.plain, packed)
    }

    /// A seek point where the block ends at `bit`, if a full flush ends there.
    ///
    /// Nothing later refers to bytes before it if all that could, as many bytes as a window has, decodes without them.
    fn full_flush(&mut self, bit: u64, plain: Plain) -> Option<SeekPoint> {
        let (packed, unused_bits) = (Packed(bit / 8), bit % 8);
        let distance = packed.0.saturating_sub(self.input.offset().0);
        let distance = usize::try_from(distance).ok()?;
        let tail = match distance.checked_sub(4) {
            Some(distance) => u32::from_be_bytes(self.input.peek_at(distance)?),
            None => self.tail,
        };
        let is_due = plain >= self.next_probe && self.spacing.is_frame_due(plain);
        if unused_bits > 0 || tail != FLUSH_END || !is_due {
            return None;
        }
        self.next_probe = Plain(plain.0.saturating_add(MIN_PROBE_SPACING));
        let input = self.input.slice(distance..distance + MAX_PROBE_LEN);
        let mut window = vec![0; WINDOW_LEN];
        let decode = |input: &[u8]| Inflate::new().decode(input, &mut window, StopAt::StreamEnd);
        let progress = input.with_contiguous(decode);
        let is_full = match progress.reason {
            StopReason::StreamEnd => true,
            StopReason::Exhausted => progress.produced == WINDOW_LEN,
            StopReason::BlockEnd { .. } | StopReason::Damaged(_) => false,
        };
        (is_full && self.spacing.try_mark_frame(plain))
            .then(|| SeekPoint::without_window(packed, plain, STATE_BLOCK))
    }

    fn end_block(&mut self, unused_bits: u8) {
        if let Some(point) = self.full_flush(self.bit(unused_bits), self.plain) {
            self.output.push_seek_point(point);
        } else if self.is_checkpoint_due() {
            let (bit, window) = (self.bit(unused_bits), self.inflate.window());
            if let Some(point) = checkpoint(&mut self.spacing, bit, self.plain, &window) {
                self.output.push_seek_point(point);
            }
        }
        if !matches!(self.find_match(unused_bits), Match::Miss)
            && let State::Deflate { check, .. } = &mut self.state
        {
            self.state = State::Block {
                bit: (8 - unused_bits) % 8,
                is_byte_pending: false,
                window: self.inflate.window().into(),
                check: check.take(),
            };
        }
    }

    /// The bit that is `unused_bits` before the next packed byte.
    fn bit(&self, unused_bits: u8) -> u64 {
        let bits = self.input.offset().0.saturating_mul(8);
        bits.saturating_sub(unused_bits.into())
    }

    fn find_match(&mut self, unused_bits: u8) -> Match {
        let bit = self.bit(unused_bits);
        self.speculation
            .as_mut()
            .map_or(Match::Miss, |speculation| speculation.find_match(bit))
    }

    fn begin_speculation(&mut self) -> bool {
        let Some(limits) = self.limits else {
            return false;
        };
        let packed_len = self.input.offset().0.saturating_sub(self.member_start.0.0);
        let plain_len = self.plain.0.saturating_sub(self.member_start.1.0);
        if self.speculation.is_none() && packed_len < limits.partition_len as u64 {
            return false;
        }
        let (pool, offset) = (&self.pool, self.input.offset());
        let decoded_lens = (packed_len, plain_len);
        let speculation = self.speculation.get_or_insert_with(|| {
            SpeculationQueue::new(limits, pool.clone(), offset, decoded_lens)
        });
        let Some(work) = speculation.start_next(&self.input, decoded_lens) else {
            return false;
        };
        self.output.push_unordered(Pull::Speculative(work));
        true
    }

    fn wants_input(&self) -> bool {
        let speculation = self.speculation.as_ref();
        speculation.is_some_and(|speculation| speculation.wants_input(&self.input))
    }

    fn accept_speculative_output(&mut self) {
        let Some(decoded) = self
            .speculation
            .as_mut()
            .and_then(SpeculationQueue::take_match)
        else {
            return;
        };
        let State::Block {
            bit, window, check, ..
        } = &mut self.state
        else {
            return;
        };
        let (bit, window, mut check) = (*bit, window.clone(), check.take());
        let start = BlockEnd {
            bit: self.bit((8 - bit) % 8),
            plain: 0,
        };
        let marks = self.checkpoints(&decoded, start, &window);
        let end = decoded.end;
        let next_window = decoded.window_at(end.plain, &window);
        self.push_speculative_pieces(decoded.pieces, marks, &window, check.as_mut());
        self.plain = Plain(self.plain.0.saturating_add(end.plain as u64));
        let len = end.bit.div_ceil(8).saturating_sub(self.input.offset().0);
        let tail = usize::try_from(len.saturating_sub(4)).unwrap_or(usize::MAX);
        let tail = self.input.peek_at(tail).map(u32::from_be_bytes);
        self.tail = tail.unwrap_or(decoded.last_byte.into());
        self.input.skip(len);
        if decoded.is_last {
            self.state = State::deflate(check);
            self.end_deflate();
        } else {
            self.state = State::Block {
                bit: u8::try_from(end.bit % 8).unwrap_or_default(),
                is_byte_pending: false,
                window: next_window,
                check,
            };
        }
    }

    /// Pushes jobs that resolve `pieces`, with the seek points `marks` between their bytes.
    fn push_speculative_pieces(
        &mut self,
        pieces: Vec<UnresolvedPiece>,
        mut marks: Vec<(usize, SeekPoint)>,
        window: &Bytes,
        mut check: Option<&mut MemberChecksum>,
    ) {
        self.output.flush();
        let mut from = 0;
        for piece in pieces {
            let to = from + piece.len;
            let inside = marks.extract_if(.., |(plain, _)| *plain < to);
            let inside: Vec<_> = inside
                .map(|(plain, seek_point)| (plain - from, seek_point))
                .collect();
            let part = check.as_mut().map(|check| check.part());
            let window = window.clone();
            let finish = move || {
                let plain = piece.resolve(&window);
                if let Some(part) = part {
                    part.set_bytes(&plain);
                }
                plain
            };
            if inside.iter().all(|(plain, _)| *plain == 0) {
                for (_, seek_point) in inside {
                    self.output.push_seek_point(seek_point);
                }
                self.output.push(Pull::Job(Job::new(|| Ok(finish()))));
            } else {
                // A job makes one piece, and here there are several.
                self.output.push_with_seek_points(finish(), inside);
            }
            from = to;
        }
    }

    /// The checkpoints that are due in `decoded`, with the positions of their bytes.
    fn checkpoints(
        &mut self,
        decoded: &SpeculativeOutput,
        start: BlockEnd,
        window: &[u8],
    ) -> Vec<(usize, SeekPoint)> {
        let mut marks = Vec::new();
        for end in std::iter::once(&start).chain(&decoded.inner_ends) {
            let plain = Plain(self.plain.0.saturating_add(end.plain as u64));
            let packed = Packed(end.bit.div_ceil(8));
            if let Some(seek_point) = self.full_flush(end.bit, plain) {
                marks.push((end.plain, seek_point));
            } else if self.spacing.is_checkpoint_due(plain, packed) {
                let window = decoded.window_at(end.plain, window);
                let seek_point = checkpoint(&mut self.spacing, end.bit, plain, &window);
                marks.extend(seek_point.map(|seek_point| (end.plain, seek_point)));
            }
        }
        marks
    }

    fn end_deflate(&mut self) {
        self.speculation = None;
        if let State::Deflate { check, .. } = &mut self.state {
            self.state = State::Trailer {
                check: check.take(),
                trailer: Trailer::default(),
            };
        }
    }

    fn trailer(&mut self) -> Result<Step, Error> {
        let State::Trailer { check, trailer } = &mut self.state else {
            return Ok(Step::Progressed);
        };
        if self.input.len() == 0 {
            return self.need_input();
        }
        let len = trailer.push(self.input.front());
        if trailer.is_done() {
            let (check, trailer) = (check.take(), std::mem::take(trailer));
            if let Some(check) = check {
                self.check(check, trailer)?;
            }
            self.state = State::member(true);
        }
        self.consume(len);
        Ok(Step::Progressed)
    }

    /// Compares the finished member with its trailer, or later if jobs decoded it.
    fn check(&mut self, check: MemberChecksum, trailer: Trailer) -> Result<(), Error> {
        let (has_parts, packed, plain) = (check.has_parts(), self.input.offset(), self.plain);
        let check = move || {
            let compared = check.compare(&trailer, plain);
            compared.map_err(|cause| error(packed, cause))
        };
        if has_parts {
            let job = Job::new(|| check().map(|()| Bytes::new()));
            self.output.push(Pull::OrderedJob(job));
            return Ok(());
        }
        check()
    }

    fn zeros(&mut self) -> Step {
        let front = self.input.front().iter();
        self.consume(front.take_while(|&&byte| byte == 0).count());
        match self.input.front().first() {
            Some(0) => Step::Progressed,
            Some(_) => self.end_at_garbage(0),
            None if self.input.is_finished() => Step::End,
            None => Step::NeedInput,
        }
    }

    /// Ends at something that is no member, of which `seen` bytes are consumed.
    fn end_at_garbage(&mut self, seen: u64) -> Step {
        let packed = self.input.offset().0.saturating_sub(seen);
        self.output.push(Pull::Warning(format!(
            "garbage after the last gzip member is ignored, from packed byte {packed} on"
        )));
        Step::End
    }

    fn consume(&mut self, len: usize) {
        let used = self.input.front().get(len.saturating_sub(4)..len);
        for &byte in used.unwrap_or_default() {
            self.tail = self.tail << 8 | u32::from(byte);
        }
        self.input.skip(len as u64);
    }

    fn need_input(&self) -> Result<Step, Error> {
        if self.input.is_finished() {
            self.fail(Cause::Truncated)
        } else {
            Ok(Step::NeedInput)
        }
    }

    fn fail<T>(&self, cause: Cause) -> Result<T, Error> {
        Err(error(self.input.offset(), cause))
    }
}

fn error(packed: Packed, cause: Cause) -> Error {
    cause.at(Compression::Gzip, packed)
}

fn checkpoint(spacing: &mut Spacing, bit: u64, plain: Plain, window: &[u8]) -> Option<SeekPoint> {
    let window = spacing.try_checkpoint(plain, Packed(bit.div_ceil(8)), window)?;
    Some(SeekPoint {
        packed: Packed(bit / 8),
        bit: u8::try_from(bit % 8).unwrap_or_default(),
        plain,
        state: STATE_BLOCK,
        window,
    })
}

impl super::Decoder for Decoder {
    fn push(&mut self, packed: Bytes) {
        self.input.push(packed);
    }

    fn finish(&mut self) {
        self.input.finish();
    }

    fn pull(&mut self) -> Result<Pull, Error> {
        loop {
            if let Some(pull) = self.output.pull() {
                return Ok(pull);
            }
            if let Some(end) = &self.outcome {
                return end.clone().map(|()| Pull::End);
            }
            match self.step() {
                Ok(Step::Progressed) => continue,
                Ok(Step::NeedInput) => {
                    self.output.flush();
                    return Ok(self.output.pull().unwrap_or(Pull::NeedInput));
                }
                Ok(Step::End) => self.outcome = Some(Ok(())),
                Err(error) => self.outcome = Some(Err(error)),
            }
            self.output.flush();
        }
    }
}

impl State {
    fn member(is_after_member: bool) -> Self {
        Self::Header {
            header: Header::default(),
            is_after_member,
        }
    }

    fn deflate(check: Option<MemberChecksum>) -> Self {
        Self::Deflate {
            check,
            has_pending_output: false,
        }
    }
}

#[cfg(test)]
mod speculation_tests;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::io::Write;

    use flate2::{Compress, Compression as Level, FlushCompress, GzBuilder};
    use proptest::prelude::*;

    use super::*;
    use crate::base::memory_reclaim::MemoryBroker;
    use crate::codec::job::MAX_PARTS_PER_JOB;
    use crate::codec::test_support::noise;
    use crate::codec::{self, Decoder as _};

    fn context(seek_points: bool) -> Context {
        Context {
            pool: BufferPool::new(64 << 20),
            wants_seek_points: seek_points,
            broker: MemoryBroker::with_limit(0),
            workers: 0,
        }
    }

    pub(super) fn member(plain: &[u8], level: u32) -> Vec<u8> {
        let mut writer = GzBuilder::new().write(Vec::new(), Level::new(level));
        writer.write_all(plain).expect("a vector takes all");
        writer.finish().expect("a vector takes all")
    }

    /// A member with such a flush after every `every` bytes.
    pub(super) fn flushed_by(flush: FlushCompress, plain: &[u8], every: usize) -> Vec<u8> {
        let mut packed = member(b"", 6)[..10].to_vec();
        let mut compress = Compress::new(Level::new(6), false);
        let mut put = |part: &[u8], flush| {
            packed.reserve(part.len() + 10_000);
            let put = compress.compress_vec(part, &mut packed, flush);
            put.expect("there is room");
        };
        plain.chunks(every).for_each(|part| put(part, flush));
        put(b"", FlushCompress::Finish);
        packed.extend(&member(plain, 0)[member(plain, 0).len() - 8..]);
        packed
    }

    /// Words in no order: packs to about a third, in many blocks.
    pub(super) fn text(len: usize, mut seed: u64) -> Vec<u8> {
        let mut text = Vec::with_capacity(len + 16);
        while text.len() < len {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            text.extend_from_slice(format!("{:x} file ", seed >> 44).as_bytes());
        }
        text.truncate(len);
        text
    }

    #[derive(Default, Debug)]
    struct Run {
        plain: Vec<u8>,
        seek_points: Vec<SeekPoint>,
        warnings: Vec<String>,
        end: Option<Error>,
    }

    fn run(mut decoder: Decoder, packed: &[u8], step: usize) -> Run {
        let packed = Bytes::copy_from_slice(packed);
        let mut pushed = 0;
        let mut run = Run::default();
        let start = decoder.plain.0;
        loop {
            match decoder.pull() {
                Ok(Pull::NeedInput) if pushed == packed.len() => decoder.finish(),
                Ok(Pull::NeedInput) => {
                    let end = packed.len().min(pushed.saturating_add(step));
                    decoder.push(packed.slice(pushed..end));
                    pushed = end;
                }
                Ok(Pull::SeekPoint(seek_point)) => {
                    assert_eq!(seek_point.plain.0, start + run.plain.len() as u64);
                    run.seek_points.push(seek_point);
                }
                Ok(Pull::Plain(bytes)) => {
                    assert!(!bytes.is_empty());
                    run.plain.extend_from_slice(&bytes);
                }
                Ok(Pull::Speculative(ahead)) => ahead.run(),
                Ok(Pull::WaitFor(ahead)) => ahead.wait(),
                Ok(Pull::Job(job) | Pull::OrderedJob(job)) => {
                    match job.run().and_then(codec::Output::concat) {
                        Ok(bytes) => run.plain.extend_from_slice(&bytes),
                        Err(error) => {
                            run.end = Some(error);
                            return run;
                        }
                    }
                }
                Ok(Pull::Warning(text)) => run.warnings.push(text),
                Ok(Pull::ChecksumStart(_) | Pull::ChecksumEnd { .. }) => {
                    panic!("gzip checks itself")
                }
                Ok(Pull::End) => return run,
                Err(error) => {
                    let again = decoder.pull().err();
                    assert_eq!(again.as_ref(), Some(&error), "errors are fused");
                    run.end = Some(error);
                    return run;
                }
            }
        }
    }

    fn whole(packed: &[u8], step: usize) -> Run {
        run(Decoder::start(context(true)), packed, step)
    }

    /// Resumes at every seek point of `first` and compares the rest.
    fn resumes_everywhere(packed: &[u8], first: &Run, step: usize) {
        for seek_point in &first.seek_points {
            let decoder = Decoder::resume(context(true), seek_point).expect("its own");
            let offset = usize::try_from(seek_point.packed.0).expect("small");
            let rest = run(decoder, &packed[offset..], step);
            assert_eq!(rest.end, None, "{seek_point:?}");
            let offset = usize::try_from(seek_point.plain.0).expect("small");
            assert!(
                rest.plain == first.plain[offset..],
                "{:?}",
                seek_point.plain
            );
        }
    }

    // Promises: seek-points
    #[test]
    fn long_members_get_checkpoints_that_can_be_resumed() {
        let plain = text(26 << 20, 1);
        let packed = member(&plain, 6);
        let first = whole(&packed, 1 << 20);
        assert!(first.plain == plain);
        resumes_everywhere(&packed, &first, 777_777);

        let seek_points = &first.seek_points;
        assert!(seek_points.len() >= 6, "{}", seek_points.len());
        let windows = seek_points.iter().map(|seek_point| seek_point.window.len());
        assert!(windows.sum::<usize>() * 100 <= packed.len());
        let bits: HashSet<u8> = seek_points
            .iter()
            .map(|seek_point| seek_point.bit)
            .collect();
        assert!(bits.len() >= 3, "{bits:?}");
    }

    #[test]
    fn every_compression_level_decodes() {
        for level in [1, 9] {
            let plain = text(5 << 20, level.into());
            let packed = member(&plain, level);
            let first = whole(&packed, 1 << 20);
            assert!(first.plain == plain);
            resumes_everywhere(&packed, &first, 777_777);
        }
    }

    // Promises: seek-points
    #[test]
    fn full_flushes_become_seek_points_without_windows() {
        let plain = text(12 << 20, 1);
        let packed = flushed_by(FlushCompress::Full, &plain, 128 << 10);
        // In pieces, some flushes arrive without the bytes that show that they are full.
        for step in [usize::MAX, 100_000] {
            let first = whole(&packed, step);
            assert!(first.plain == plain);
            let seek_points = &first.seek_points;
            assert!(seek_points.len() >= 9, "{}", seek_points.len());
            assert!(seek_points.iter().all(|point| point.window.is_empty()));
            resumes_everywhere(&packed, &first, 777_777);
        }
    }

    /// More than a mebibyte with a flush at its end, and 30,000 bytes with a reference `distance` bytes back behind them.
    fn referring(distance: u32) -> (Vec<u8>, Vec<u8>) {
        let mut plain = text(1_200_000, 1);
        let mut packed = flushed_by(FlushCompress::Sync, &plain, plain.len());
        // Without the empty last block and the trailer.
        packed.truncate(packed.len() - 2 - 8);
        let literals = noise(30_000).into_iter().map(|byte| byte % 144);
        let literals: Vec<u8> = literals.collect();
        let mut bits = vec![1, 1, 0];
        let mut put =
            |value: u32, len: u32| bits.extend((0..len).rev().map(|bit| value >> bit & 1));
        for &byte in &literals {
            put(0x30 + u32::from(byte), 8);
        }
        // Three bytes, the last code of a distance with its 13 bits, and the end.
        put(1, 7);
        put(29, 5);
        (0..13).for_each(|bit| put((distance - 24_577) >> bit & 1, 1));
        put(0, 7);
        for byte in bits.chunks(8) {
            let byte = byte.iter().rev().fold(0, |byte, bit| byte << 1 | bit);
            packed.push(u8::try_from(byte).expect("eight bits"));
        }
        plain.extend(literals);
        let from = plain.len() - distance as usize;
        plain.extend_from_within(from..from + 3);
        packed.extend(&member(&plain, 0)[member(&plain, 0).len() - 8..]);
        (packed, plain)
    }

    // Promises: seek-points
    #[test]
    fn flush_that_is_referred_across_is_no_seek_point() {
        for (distance, count) in [(30_000, 2), (30_001, 1), (32_768, 1)] {
            let (packed, plain) = referring(distance);
            let first = whole(&packed, usize::MAX);
            assert_eq!((&first.end, first.plain == plain), (&None, true));
            assert_eq!(first.seek_points.len(), count, "{distance}");
            resumes_everywhere(&packed, &first, 777_777);
        }
        // Each flush but the first is referred across.
        let plain = text(12 << 20, 1);
        let packed = flushed_by(FlushCompress::Sync, &plain, 128 << 10);
        let first = whole(&packed, 1 << 20);
        let (_, others) = first.seek_points.split_first().expect("the member");
        assert!(!others.is_empty());
        assert!(others.iter().all(|point| !point.window.is_empty()));
    }

    #[test]
    fn stored_blocks_get_byte_aligned_checkpoints() {
        let plain = text(9 << 20, 1);
        let packed = member(&plain, 0);
        let first = whole(&packed, 100_000);
        assert!(first.plain == plain);
        assert_eq!(first.seek_points.len(), 3);
        resumes_everywhere(&packed, &first, usize::MAX);
    }

    // Promises: seek-points
    #[test]
    fn small_members_share_buffers_and_seek_points() {
        let plain = text(3 << 20, 1);
        let packed: Vec<u8> = plain
            .chunks(50_000)
            .flat_map(|part| member(part, 6))
            .collect();
        let mut decoder = Decoder::start(context(true));
        decoder.push(Bytes::copy_from_slice(&packed));
        let (mut pieces, mut seek_points) = (0, Vec::new());
        loop {
            match decoder.pull().expect("a good stream") {
                Pull::Plain(_) => pieces += 1,
                Pull::SeekPoint(seek_point) => seek_points.push(seek_point),
                _ => break,
            }
        }
        assert!(pieces <= 6, "{pieces}");
        assert_eq!(seek_points.len(), 3);
        assert!(
            seek_points
                .iter()
                .all(|seek_point| seek_point.window.is_empty())
        );
        let first = whole(&packed, 4096);
        assert!(first.plain == plain);
        resumes_everywhere(&packed, &first, 4096);
    }

    /// As bgzip writes it, with members of 65,280 plain bytes and an empty one at the end.
    fn bgzf(plain: &[u8]) -> Vec<u8> {
        let parts = plain.chunks(65_280).chain([&b""[..]]);
        parts.flat_map(bgzf_member).collect()
    }

    fn bgzf_member(plain: &[u8]) -> Vec<u8> {
        let builder = GzBuilder::new().extra(*b"BC\x02\0\0\0");
        let mut writer = builder.write(Vec::new(), Level::new(6));
        writer.write_all(plain).expect("a vector takes all");
        let mut packed = writer.finish().expect("a vector takes all");
        let len = u16::try_from(packed.len() - 1).expect("short");
        packed[16..18].copy_from_slice(&len.to_le_bytes());
        packed
    }

    #[test]
    fn bgzf_becomes_jobs_with_seek_points_between() {
        let plain = text(5 << 20, 1);
        let packed = bgzf(&plain);
        let mut decoder = Decoder::start(context(true));
        decoder.push(Bytes::copy_from_slice(&packed));
        let mut jobs = 0;
        loop {
            match decoder.pull().expect("a good stream") {
                Pull::Job(_) => jobs += 1,
                Pull::NeedInput => break,
                Pull::Plain(_) => panic!("all members are whole"),
                _ => {}
            }
        }
        assert_eq!(jobs, 5);
        for step in [usize::MAX, 500_000, 100_000, 5000] {
            let first = whole(&packed, step);
            assert_eq!(first.end, None);
            assert!(first.plain == plain);
            let count = first.seek_points.len();
            assert!((3..=5).contains(&count), "{count}");
            resumes_everywhere(&packed, &first, step);
        }
    }

    #[test]
    fn bgzf_members_shorter_than_their_header_says_fail() {
        let mut packed = bgzf_member(b"hello");
        packed.splice(packed.len() - 8..packed.len() - 8, [0]);
        packed[16] += 1;
        let error = whole(&packed, usize::MAX).end;
        assert!(matches!(
            error.map(|error| error.cause),
            Some(Cause::Malformed(_))
        ));
    }

    #[test]
    fn long_run_of_empty_bgzf_members_decodes_to_nothing() {
        let packed = bgzf_member(b"").repeat(30_000);
        let run = whole(&packed, usize::MAX);
        assert_eq!((run.plain.len(), run.end), (0, None));
    }

    #[test]
    fn bgzf_job_is_limited_to_a_number_of_members() {
        let member = bgzf_member(b"1");
        let input = member.repeat(2 * MAX_PARTS_PER_JOB);
        let group = Group::parse(&input, 1 << 20).expect("members");
        assert_eq!(group.plain_len, MAX_PARTS_PER_JOB);
        assert_eq!(group.packed_len, MAX_PARTS_PER_JOB * member.len());
    }

    #[test]
    fn bgzf_mixed_with_other_members_decodes() {
        let plain = text(400_000, 1);
        let packed = [
            member(&plain[..1000], 6),
            bgzf(&plain[1000..200_000]),
            member(&plain[200_000..300_000], 6),
            bgzf(&plain[300_000..]),
            vec![0; 700],
        ]
        .concat();
        for step in [usize::MAX, 77_777, 1000] {
            let run = whole(&packed, step);
            assert_eq!(run.end, None);
            assert!(run.plain == plain);
        }
    }

    #[test]
    fn decoder_does_not_wait_for_a_buffer_while_it_holds_output() {
        let plain = text(3 << 20, 1);
        let packed = [member(&plain[..100_000], 6), bgzf(&plain[100_000..])].concat();
        let context = Context {
            pool: BufferPool::new(1 << 20),
            ..context(true)
        };
        assert!(run(Decoder::start(context), &packed, usize::MAX).plain == plain);
    }

    #[test]
    fn bit_flip_in_bgzf_fails_its_job_or_its_framing() {
        let plain = text(300, 1);
        let packed = bgzf(&plain);
        for bit in 0..packed.len() * 8 {
            let mut packed = packed.clone();
            packed[bit / 8] ^= 1 << (bit % 8);
            let run = whole(&packed, usize::MAX);
            assert!(
                run.end.is_some() || run.plain == plain || !run.warnings.is_empty(),
                "{bit}"
            );
        }
    }

    #[test]
    fn bgzf_truncated_anywhere_gives_the_bytes_before() {
        let plain = text(3000, 1);
        let first = bgzf_member(&plain[..1000]);
        let packed = [first.clone(), bgzf_member(&plain[1000..])].concat();
        for len in first.len() + 2..packed.len() {
            let run = whole(&packed[..len], usize::MAX);
            assert!(plain.starts_with(&run.plain) && run.plain.len() >= 1000);
            assert_eq!(run.end.map(|error| error.cause), Some(Cause::Truncated));
        }
    }

    #[test]
    fn empty_members_and_headers_with_all_fields_decode() {
        let mut packed = member(b"", 6);
        let builder = GzBuilder::new()
            .filename("name")
            .comment("comment")
            .extra("extra");
        let mut writer = builder.write(&mut packed, Level::new(9));
        writer.write_all(b"hello ").expect("a vector takes all");
        writer.finish().expect("a vector takes all");
        packed.extend(member(b"", 0));
        packed.extend(member(b"world", 0));
        for step in 1..packed.len() {
            let run = whole(&packed, step);
            assert_eq!((run.plain.as_slice(), run.end), (&b"hello world"[..], None));
        }
    }

    #[test]
    fn no_seek_points_are_made_when_disabled() {
        let plain = text(9 << 20, 1);
        let run = run(Decoder::start(context(false)), &member(&plain, 6), 1 << 20);
        assert!(run.plain == plain);
        assert!(run.seek_points.is_empty());
    }

    #[test]
    fn pushed_input_is_decoded_before_more_is_requested() {
        let packed = member(&text(100_000, 1), 6);
        let half = packed.len() / 2;
        let mut decoder = Decoder::start(context(true));
        decoder.push(Bytes::copy_from_slice(&packed[..half]));
        let mut plain = 0;
        loop {
            match decoder.pull().expect("a good stream") {
                Pull::Plain(bytes) => plain += bytes.len(),
                Pull::NeedInput => break,
                _ => {}
            }
        }
        assert!(plain > 40_000, "{plain}");
    }

    #[test]
    fn stream_truncated_anywhere_gives_the_bytes_before() {
        let plain = text(3000, 1);
        let mut packed = member(&plain[..1000], 6);
        let first_len = packed.len();
        packed.extend(member(&plain[1000..], 9));
        for len in 0..packed.len() {
            let run = whole(&packed[..len], 100);
            assert!(plain.starts_with(&run.plain));
            match run.end {
                None => assert!(len == first_len || len == first_len + 1, "{len}"),
                Some(error) => {
                    assert_eq!(
                        (error.cause, error.packed.0),
                        (Cause::Truncated, len as u64)
                    );
                }
            }
        }
    }

    #[test]
    fn bit_flip_is_an_error_and_no_panic() {
        let plain = text(600, 1);
        let packed = member(&plain, 6);
        for bit in 0..packed.len() * 8 {
            let mut packed = packed.clone();
            packed[bit / 8] ^= 1 << (bit % 8);
            let run = whole(&packed, 50);
            match run.end {
                // Time, extra flags, operating system, and the bits before the trailer mean nothing here.
                None => {
                    assert!(bit / 8 < 10 || bit / 8 == packed.len() - 9, "bit {bit}");
                    assert!(run.plain == plain);
                }
                Some(error) => assert!(error.packed.0 <= packed.len() as u64),
            }
        }
    }

    #[test]
    fn trailing_zeros_are_ignored_and_trailing_garbage_warns() {
        let packed = member(b"hello", 6);
        for (tail, warnings) in [
            (&[0; 1000][..], 0),
            (b"\0\0x", 1),
            (b"x", 1),
            (b"\x1f", 1),
            (b"\x1fx", 1),
        ] {
            let packed = [&packed, tail].concat();
            for step in [1, 2, 5, 2000] {
                let run = whole(&packed, step);
                assert_eq!((run.plain.as_slice(), run.end), (&b"hello"[..], None));
                assert_eq!(run.warnings.len(), warnings, "{tail:?}");
            }
        }
    }

    // Promises: check-first-scan, decode-verified
    #[test]
    fn wrong_crc_and_wrong_length_are_distinguished() {
        let packed = member(b"hello", 6);
        let what = |back: usize| {
            let mut packed = packed.clone();
            let offset = packed.len() - back;
            packed[offset] ^= 1;
            match whole(&packed, 7).end.map(|error| error.cause) {
                Some(Cause::Checksum { what, .. }) => what,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(what(8), "CRC-32 of a gzip member");
        assert_eq!(what(1), "length of a gzip member");
    }

    // Promises: resume-checksums
    #[test]
    fn member_after_a_resumed_member_is_verified() {
        let mut packed = member(&text(9 << 20, 1), 6);
        let first_len = packed.len();
        packed.extend(member(b"hello", 6));
        let seek_point = whole(&packed, 1 << 20).seek_points.pop().expect("some");
        assert_eq!(seek_point.state, STATE_BLOCK);
        let offset = usize::try_from(seek_point.packed.0).expect("small");
        let resumed = |packed: &[u8]| {
            let decoder = Decoder::resume(context(true), &seek_point).expect("its own");
            run(decoder, &packed[offset..], 1 << 16).end
        };
        assert_eq!(resumed(&packed), None);
        packed[first_len - 8] ^= 1;
        assert_eq!(resumed(&packed), None, "its beginning was not seen");
        let len = packed.len();
        packed[len - 8] ^= 1;
        assert!(matches!(
            resumed(&packed),
            Some(Error {
                cause: Cause::Checksum { .. },
                ..
            })
        ));
    }

    #[test]
    fn foreign_seek_points_are_rejected() {
        let seek_point = |state, bit, window: &'static [u8]| SeekPoint {
            packed: Packed(10),
            bit,
            plain: Plain(10),
            state,
            window: Bytes::from_static(window),
        };
        for seek_point in [
            seek_point(2, 0, b""),
            seek_point(STATE_MEMBER, 1, b""),
            seek_point(STATE_MEMBER, 0, b"window"),
            seek_point(STATE_BLOCK, 8, b""),
            seek_point(STATE_BLOCK, 0, b"no zstd frame"),
        ] {
            let error = Decoder::resume(context(true), &seek_point).err();
            assert!(matches!(
                error,
                Some(Error {
                    cause: Cause::Malformed(_),
                    ..
                })
            ));
        }
    }

    #[test]
    fn decoder_that_needs_input_holds_no_buffer() {
        let pool = BufferPool::new(10);
        let mut header = pool.acquire(10).expect("open");
        header.copy_from_slice(&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0]);
        let context = Context {
            pool: BufferPool::new(u64::MAX),
            wants_seek_points: false,
            broker: MemoryBroker::with_limit(0),
            workers: 0,
        };
        let mut decoder = Decoder::start(context);
        decoder.push(header.freeze());
        while !matches!(decoder.pull(), Ok(Pull::NeedInput)) {}
        assert_eq!(pool.used_bytes(), 0);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn members_decode_at_every_push_size(
            parts in prop::collection::vec((0_usize..200_000, 0_u32..10, any::<u64>()), 0..6),
            step in 1_usize..300_000,
        ) {
            let parts: Vec<_> = parts
                .into_iter()
                .map(|(len, level, seed)| (text(len, seed), level))
                .collect();
            let packed: Vec<u8> =
                parts.iter().flat_map(|(part, level)| member(part, *level)).collect();
            let plain: Vec<u8> = parts.iter().flat_map(|(part, _)| part.clone()).collect();
            let run = whole(&packed, step);
            prop_assert_eq!(run.end.is_some(), parts.is_empty());
            prop_assert!(run.plain == plain);
        }

        #[test]
        fn noise_after_a_header_is_an_error(noise in prop::collection::vec(any::<u8>(), 0..500)) {
            let packed = [&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0][..], &noise].concat();
            let run = whole(&packed, 64);
            prop_assert!(run.end.is_some(), "noise has the right checksum");
        }
    }
}
