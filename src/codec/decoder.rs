//! The interface of decoders: packed bytes in, plain bytes, jobs and seek points out.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use super::{Cause, ContentChecksum, Error, Job, SeekPoint, SpeculativeJob};
use crate::base::buffer_pool::{BufferPool, Closed};
use crate::base::extent::{Packed, Plain};
use crate::base::memory_reclaim::{GrantError, MemoryBroker, MemoryGrant};

/// Packed bytes that a decoder may need after a seek point. bzip2 finds a piece's end by the next magic.
pub(crate) const LOOKAHEAD_LEN: usize = 16;

/// Turns a packed stream into plain bytes.
///
/// After [`Pull::NeedInput`] the caller calls [`push`](Self::push) once, or [`finish`](Self::finish) at the
/// end of the packed stream. Errors are fused: after one, every pull repeats it.
pub trait Decoder: Send {
    /// Adds the next packed bytes, in order. Call it only after [`Pull::NeedInput`].
    fn push(&mut self, packed: Bytes);

    /// Marks the end of the packed bytes. An incomplete stream is [`Truncated`](super::Cause::Truncated),
    /// after all bytes that can be decoded.
    fn finish(&mut self);

    /// Returns the next item of the stream.
    ///
    /// # Errors
    /// When the stream is malformed, damaged, unsupported or cut short.
    fn pull(&mut self) -> Result<Pull, Error>;
}

impl fmt::Debug for dyn Decoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Decoder")
    }
}

/// The result of [`Decoder::pull`].
#[derive(Debug)]
pub enum Pull {
    /// The decoder needs more packed bytes.
    NeedInput,
    /// Decoding can start again here, before the plain bytes that are pulled next.
    ///
    /// The driver, which counts plain bytes, replaces [`SeekPoint::plain`] if it is [`UNKNOWN_PLAIN`]. It
    /// drops self-contained ones within `MIN_SPAN_LEN` of the last one kept.
    SeekPoint(SeekPoint),
    /// The next plain bytes; never empty.
    Plain(Bytes),
    /// A job that makes the next plain bytes, on any thread.
    Job(Job),
    /// As [`Pull::Job`], but it must run after all jobs before it.
    OrderedJob(Job),
    /// Optional work for another thread, whose result the decoder may use later.
    Speculative(Arc<dyn SpeculativeJob>),
    /// The decoder is blocked on this work. Call [`SpeculativeJob::wait`], then pull again.
    WaitFor(Arc<dyn SpeculativeJob>),
    /// The driver must compute this checksum up to [`Pull::ChecksumEnd`]: jobs end out of order.
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

/// Resources of a decoder.
#[derive(Clone, Debug)]
pub struct Context {
    /// Pool of plain buffers. Taking one may wait until the consumer of pulled pieces drops some.
    pub pool: BufferPool,
    /// Whether the driver wants seek points. Without them checkpoints cost nothing.
    pub wants_seek_points: bool,
    /// Memory that is not made of buffers: an xz dictionary, a zstd window.
    pub broker: MemoryBroker,
    /// Threads that run jobs, 0 for only the driver's. With fewer than four, decoders do not speculate.
    pub workers: usize,
}

impl Context {
    pub(super) fn borrow_memory(&self, needed_bytes: u64) -> Result<MemoryGrant, Cause> {
        self.broker.record_need(needed_bytes);
        self.broker
            .grant(needed_bytes)
            .map_err(|error| match error {
                GrantError::OverLimit => Cause::over_limit(&self.broker, needed_bytes),
                GrantError::Closed(Closed) => Cause::Cancelled,
            })
    }
}
