//! The interface of decoders: packed bytes in, plain bytes, jobs and seek points out.

use std::fmt;

use bytes::Bytes;

use super::{ContentChecksum, Error, Job, SeekPoint, SpeculativeJob};
use crate::base::extent::{Packed, Plain};

/// Packed bytes that a decoder may need after the next seek point.
///
/// Some formats mark the end of a piece only by the start of the next (bzip2: 48 bits of magic).
pub const LOOKAHEAD_LEN: usize = 16;

/// Turns a packed stream into plain bytes.
///
/// The caller calls [`pull`](Self::pull) until it returns [`Pull::NeedInput`]. Then it calls
/// [`push`](Self::push) once, or [`finish`](Self::finish) at the end of the packed stream. Errors are fused:
/// after one, every pull repeats it.
pub trait Decoder: Send + fmt::Debug {
    /// Adds the next packed bytes, in order. Call it only after [`Pull::NeedInput`].
    fn push(&mut self, packed: Bytes);

    /// Marks the end of the packed bytes.
    ///
    /// If the stream is incomplete, the error is [`Truncated`](super::Cause::Truncated), after all bytes that
    /// can be decoded.
    fn finish(&mut self);

    /// Returns the next item of the stream.
    ///
    /// # Errors
    /// When the stream is malformed, damaged, unsupported or cut short.
    fn pull(&mut self) -> Result<Pull, Error>;
}

/// The result of [`Decoder::pull`].
#[derive(Debug)]
pub enum Pull {
    /// The decoder needs more packed bytes.
    NeedInput,
    /// Decoding can start again here, before the plain bytes that are pulled next.
    ///
    /// The end of a job's output is known only after it ran. Therefore the driver, which counts plain bytes,
    /// replaces [`SeekPoint::plain`] if it is [`UNKNOWN_PLAIN`]. It also drops a self-contained seek point
    /// closer than [`MIN_SPAN_LEN`](super::seek_point::MIN_SPAN_LEN) to the last one it kept.
    SeekPoint(SeekPoint),
    /// The next plain bytes; never empty.
    Plain(Bytes),
    /// A job that makes the next plain bytes, on any thread.
    Job(Job),
    /// As [`Pull::Job`], but it must run after all jobs before it.
    OrderedJob(Job),
    /// Optional work for another thread, whose result the decoder may use later.
    Speculative(SpeculativeJob),
    /// The decoder is blocked on this work. Call [`SpeculativeJob::wait`], then pull again.
    WaitFor(SpeculativeJob),
    /// The driver must compute this checksum from here to [`Pull::ChecksumEnd`].
    ///
    /// Jobs end out of order, and a decoder that sees every byte has enough work.
    ChecksumStart(ContentChecksum),
    /// End of the bytes of [`Pull::ChecksumStart`], with the stored checksum.
    ChecksumEnd {
        /// The stored hash.
        expected: u32,
        /// Where it is stored.
        packed: Packed,
    },
    /// An oddity without loss of data, for example garbage after the last gzip member.
    Warning(String),
    /// The stream is complete; what follows, if anything, was reported as a warning.
    End,
}

/// Plain offset of a seek point after jobs, which only the driver can compute.
pub const UNKNOWN_PLAIN: Plain = Plain(u64::MAX);
