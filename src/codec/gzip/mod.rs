//! gzip (RFC 1952): any number of members, with checkpoints inside long ones.
//!
//! This module reads headers and trailers, and zlib-rs inflates in between. If a checkpoint is due, inflating
//! stops at the end of the next block, where it can resume with the block's bit and the 32 KiB before it. After a
//! full flush it needs no bytes before.
//! Small members, as of pigz and eStargz, share buffers and seek points, and those of BGZF become jobs. Other
//! threads decode long members speculatively (`speculation_queue.rs`, `speculative.rs`).

mod accept_speculation;
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
use self::speculative::{BlockEnd, SpeculativeOutput};
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

enum DecodeStatus {
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

    fn step(&mut self) -> Result<DecodeStatus, Error> {
        match self.state {
            State::Header { .. } => self.header(),
            State::Block { .. } => self.block(),
            State::Deflate { .. } => self.deflate(),
            State::Trailer { .. } => self.trailer(),
            State::Zeros => Ok(self.zeros()),
        }
    }

    fn header(&mut self) -> Result<DecodeStatus, Error> {
        let State::Header {
            header,
            is_after_member,
        } = &mut self.state
        else {
            return Ok(DecodeStatus::Progressed);
        };
        let (seen, is_after_member) = (header.len, *is_after_member);
        if seen == 0 && self.begin_zeros_or_bgzf(is_after_member)? {
            return Ok(DecodeStatus::Progressed);
        }
        let State::Header { header, .. } = &mut self.state else {
            return Ok(DecodeStatus::Progressed);
        };
        match header.push(self.input.front()) {
            Err(HeaderError::NoMagic) if is_after_member => Ok(self.end_at_garbage(seen)),
            Err(HeaderError::NoMagic) => self.fail(Cause::malformed("no gzip member begins here")),
            Err(HeaderError::Invalid(cause)) => self.fail(cause),
            Ok(len) if header.is_done() => {
                let header_len = header.len;
                self.consume(len);
                self.begin_member(Packed(self.input.offset().0.saturating_sub(header_len)));
                Ok(DecodeStatus::Progressed)
            }
            // The header continues, or the stream ends with at most the first byte of a magic.
            Ok(0) if is_after_member && self.input.is_finished() && seen == 0 => {
                Ok(DecodeStatus::End)
            }
            Ok(0) if is_after_member && self.input.is_finished() && seen == 1 => {
                Ok(self.end_at_garbage(seen))
            }
            Ok(0) => self.need_input(),
            Ok(len) => {
                self.consume(len);
                Ok(DecodeStatus::Progressed)
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

    fn block(&mut self) -> Result<DecodeStatus, Error> {
        let State::Block {
            bit,
            is_byte_pending,
            window,
            ..
        } = &mut self.state
        else {
            return Ok(DecodeStatus::Progressed);
        };
        if *is_byte_pending {
            if self.input.len() == 0 {
                return self.need_input();
            }
            *is_byte_pending = false;
            self.consume(1);
            return Ok(DecodeStatus::Progressed);
        }
        let (bit, window_len) = (*bit, window.len());
        if self.begin_speculation() {
            return Ok(DecodeStatus::Progressed);
        }
        let found = match window_len {
            WINDOW_LEN => self.find_match((8 - bit) % 8),
            // References to before the member's start are errors, which speculation cannot detect.
            _ => Match::Miss,
        };
        if let Match::Hit = found {
            self.accept_speculative_output();
            return Ok(DecodeStatus::Progressed);
        }
        if self.wants_input() {
            return Ok(DecodeStatus::NeedInput);
        }
        if let Match::Running(work) = found {
            self.output.push(Pull::WaitFor(work));
            return Ok(DecodeStatus::Progressed);
        }
        if let State::Block { window, check, .. } = &mut self.state {
            let [.., last_byte] = self.tail.to_be_bytes();
            let split = (bit > 0).then_some((last_byte, bit));
            self.inflate.resume(window, split);
            self.state = State::deflate(check.take());
        }
        Ok(DecodeStatus::Progressed)
    }

    fn deflate(&mut self) -> Result<DecodeStatus, Error> {
        if self.begin_speculation() {
            return Ok(DecodeStatus::Progressed);
        }
        if self.wants_input() {
            return Ok(DecodeStatus::NeedInput);
        }
        let stop = self.next_stop();
        let State::Deflate {
            check,
            has_pending_output,
        } = &mut self.state
        else {
            return Ok(DecodeStatus::Progressed);
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
        Ok(DecodeStatus::Progressed)
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

    fn trailer(&mut self) -> Result<DecodeStatus, Error> {
        let State::Trailer { check, trailer } = &mut self.state else {
            return Ok(DecodeStatus::Progressed);
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
        Ok(DecodeStatus::Progressed)
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

    fn zeros(&mut self) -> DecodeStatus {
        let front = self.input.front().iter();
        self.consume(front.take_while(|&&byte| byte == 0).count());
        match self.input.front().first() {
            Some(0) => DecodeStatus::Progressed,
            Some(_) => self.end_at_garbage(0),
            None if self.input.is_finished() => DecodeStatus::End,
            None => DecodeStatus::NeedInput,
        }
    }

    /// Ends at something that is no member, of which `seen` bytes are consumed.
    fn end_at_garbage(&mut self, seen: u64) -> DecodeStatus {
        let packed = self.input.offset().0.saturating_sub(seen);
        self.output.push(Pull::Warning(format!(
            "garbage after the last gzip member is ignored, from packed byte {packed} on"
        )));
        DecodeStatus::End
    }

    fn consume(&mut self, len: usize) {
        let used = self.input.front().get(len.saturating_sub(4)..len);
        for &byte in used.unwrap_or_default() {
            self.tail = self.tail << 8 | u32::from(byte);
        }
        self.input.skip(len as u64);
    }

    fn need_input(&self) -> Result<DecodeStatus, Error> {
        if self.input.is_finished() {
            self.fail(Cause::Truncated)
        } else {
            Ok(DecodeStatus::NeedInput)
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
                Ok(DecodeStatus::Progressed) => continue,
                Ok(DecodeStatus::NeedInput) => {
                    self.output.flush();
                    return Ok(self.output.pull().unwrap_or(Pull::NeedInput));
                }
                Ok(DecodeStatus::End) => self.outcome = Some(Ok(())),
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
mod tests;
