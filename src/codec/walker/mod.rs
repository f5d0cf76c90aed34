//! Shared by codecs that walk frames and blocks: queues of input, output and pulls, and fused errors.

pub(super) mod input_queue;
pub(super) mod output_buffer;

use std::collections::VecDeque;

use bytes::Bytes;

use self::input_queue::InputQueue;
use super::{Cause, Compression, Error, Pull};
use crate::base::extent::Packed;

/// A codec that moves through its format in small steps.
pub(super) trait FrameWalker: Send {
    const COMPRESSION: Compression;

    /// Takes from `input` and appends to `pulls`, or only returns [`Step::NeedInput`]; never `Truncated`.
    fn step(&mut self, input: &mut InputQueue, pulls: &mut PullQueue) -> Result<Step, Error>;

    /// Appends output held back to be joined with more, when the walk pauses or stops.
    fn flush(&mut self, pulls: &mut PullQueue) -> Result<(), Error>;
}

pub(super) type PullQueue = VecDeque<Pull>;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// The step took input, appended output, or changed the state.
    Progressed,
    NeedInput,
    /// So many bytes of input have no meaning, from the next one on.
    Skip(u64),
    End,
}

pub(super) struct FrameDecoder<W> {
    walker: W,
    input: InputQueue,
    skip_len: u64,
    pulls: PullQueue,
    outcome: Option<Result<(), Error>>,
    is_flushed: bool,
}

impl<W: FrameWalker> FrameDecoder<W> {
    pub(super) fn new(walker: W, offset: Packed) -> Self {
        Self {
            walker,
            input: InputQueue::new(offset),
            skip_len: 0,
            pulls: PullQueue::new(),
            outcome: None,
            is_flushed: false,
        }
    }

    fn step(&mut self) -> Result<Step, Error> {
        self.skip_len -= self.input.skip(self.skip_len);
        if self.skip_len > 0 {
            return Ok(Step::NeedInput);
        }
        self.walker.step(&mut self.input, &mut self.pulls)
    }
}

impl<W: FrameWalker> super::Decoder for FrameDecoder<W> {
    fn push(&mut self, packed: Bytes) {
        self.input.push(packed);
    }

    fn finish(&mut self) {
        self.input.finish();
    }

    fn pull(&mut self) -> Result<Pull, Error> {
        loop {
            if let Some(result) = self.pulls.pop_front() {
                return Ok(result);
            }
            if let Some(stop) = &self.outcome {
                let stop = stop.clone();
                if self.is_flushed {
                    return stop.map(|()| Pull::End);
                }
                self.is_flushed = true;
                let flushed = self.walker.flush(&mut self.pulls);
                self.outcome = Some(stop.and(flushed));
                continue;
            }
            match self.step() {
                Ok(Step::Progressed) => {}
                Ok(Step::Skip(len)) => self.skip_len = len,
                Ok(Step::End) => self.outcome = Some(Ok(())),
                Err(error) => self.outcome = Some(Err(error)),
                Ok(Step::NeedInput) if !self.pulls.is_empty() => {}
                Ok(Step::NeedInput) if self.input.is_finished() => {
                    let truncated = error::<W>(self.input.end(), Cause::Truncated);
                    self.outcome = Some(Err(truncated));
                }
                Ok(Step::NeedInput) => match self.walker.flush(&mut self.pulls) {
                    Ok(()) if self.pulls.is_empty() => return Ok(Pull::NeedInput),
                    Ok(()) => {}
                    Err(error) => self.outcome = Some(Err(error)),
                },
            }
        }
    }
}

pub(super) fn error<W: FrameWalker>(packed: Packed, cause: Cause) -> Error {
    cause.at(W::COMPRESSION, packed)
}

pub(super) fn foreign_seek_point<W: FrameWalker>() -> Cause {
    Cause::malformed(format!("a seek point that is not of {}", W::COMPRESSION))
}

/// The cause for bytes that do not begin with the magic of a frame, or of whatever `unit` is.
pub(super) fn no_magic(is_first: bool, format: &str, unit: &str) -> Cause {
    Cause::malformed(if is_first {
        format!("this is no {format} {unit}")
    } else {
        format!("bytes that are no {format} {unit} follow the last {unit}")
    })
}

/// The magic of the next frame; else the step there. Skips skippable frames, which lz4 and zstd share.
pub(super) fn next_magic(input: &InputQueue, is_first: &mut bool) -> Result<u32, Step> {
    if input.is_exhausted() && !*is_first {
        return Err(Step::End);
    }
    let number_at = |at| input.peek_at(at).map(u32::from_le_bytes);
    let magic = number_at(0).ok_or(Step::NeedInput)?;
    if magic & 0xffff_fff0 != 0x184d_2a50 {
        return Ok(magic);
    }
    let len = number_at(4).ok_or(Step::NeedInput)?;
    *is_first = false;
    Err(Step::Skip(8 + u64::from(len)))
}
