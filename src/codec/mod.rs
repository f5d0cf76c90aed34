//! Decoders: packed bytes in, plain bytes out; pure: no files, no clocks, no runtime.
//!
//! The caller pushes packed bytes into a [`Decoder`] in order, and pulls plain bytes, jobs and seek points. A
//! job makes plain bytes on any thread. Decoding can start again at a seek point. Reading from the middle
//! uses the same trait: [`resume`] makes a decoder at a seek point.

pub mod detect;

mod bzip2;
mod content_checksum;
mod frame_walker;
mod gzip;
mod indexed;
mod input_queue;
mod lz4;
mod output_buffer;
mod plain;
pub mod seek_point;
mod xz;
mod zstd;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::base::buffer_pool::{Buffer, BufferPool, Closed};
use crate::base::extent::{Packed, Plain};
use crate::base::memory_reclaim::{GrantError, MemoryBroker, MemoryGrant};
use crate::base::once_job::OnceJob;

pub use content_checksum::ContentChecksum;
pub use detect::{Compression, Detected, Encryption, UnknownCompression, detect};
pub use indexed::{ExpectedSpan, SeekRange};
pub use seek_point::SeekPoint;

/// Packed bytes that a decoder may need after the next seek point.
///
/// Some formats mark the end of a piece only by the start of the next (bzip2: 48 bits of magic).
pub const LOOKAHEAD_LEN: usize = 16;

/// Maximum number of blocks, frames or members in one job.
///
/// Each takes memory even if it makes few bytes, and a stream may consist of empty ones.
const MAX_PARTS_PER_JOB: usize = 4096;

/// Resources of a decoder.
#[derive(Clone, Debug)]
pub struct Context {
    /// Pool for buffers of plain bytes.
    ///
    /// Taking a buffer may wait. So the caller must already pass pulled pieces on to a consumer that drops
    /// them.
    pub pool: BufferPool,
    /// Whether the driver wants seek points. Without them checkpoints cost nothing.
    pub wants_seek_points: bool,
    /// Memory that is not made of buffers: an xz dictionary, a zstd window.
    pub broker: MemoryBroker,
    /// Number of threads that run jobs and [`Pull::Speculative`]; 0 if only the driver's does.
    ///
    /// With fewer than four, decoders do not speculate.
    pub workers: usize,
}

impl Context {
    /// Borrows `needed_bytes` for a decoder's state.
    fn borrow_memory(&self, needed_bytes: u64) -> Result<MemoryGrant, Cause> {
        self.broker
            .grant(needed_bytes)
            .map_err(|error| match error {
                GrantError::OverLimit => Cause::MemoryLimit {
                    needed_bytes,
                    limit_bytes: self.broker.limit_bytes(),
                },
                GrantError::Closed(Closed) => Cause::Cancelled,
            })
    }
}

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
    /// If the stream is incomplete, the error is [`Cause::Truncated`], after all bytes that can be decoded.
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
    /// The end of a job's output is known only after it ran. Therefore the driver, which counts plain bytes
    /// in stream order, replaces [`SeekPoint::plain`] if it is [`UNKNOWN_PLAIN`]. It also drops a
    /// self-contained seek point closer than [`seek_point::MIN_SPAN_LEN`] to the last one it kept.
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

/// Independent work that makes plain bytes, possibly none.
pub struct Job {
    work: Box<dyn FnOnce() -> Result<Output, Error> + Send>,
}

impl Job {
    /// A job whose `work` makes one piece.
    pub fn new(work: impl FnOnce() -> Result<Bytes, Error> + Send + 'static) -> Self {
        Self::with_pieces(move || Ok(vec![work()?]))
    }

    /// A job whose `work` makes any number of pieces.
    pub fn with_pieces(work: impl FnOnce() -> Result<Vec<Bytes>, Error> + Send + 'static) -> Self {
        Self::with_output(move || Ok(Output::from(work()?)))
    }

    /// A job whose `work` may leave some of its output to be made piece by piece.
    fn with_output(work: impl FnOnce() -> Result<Output, Error> + Send + 'static) -> Self {
        Self {
            work: Box::new(work),
        }
    }

    /// Runs the work on this thread.
    ///
    /// # Errors
    /// As [`Decoder::pull`].
    pub fn run(self) -> Result<Output, Error> {
        (self.work)()
    }
}

/// Makes the next piece of a job's output, on the consumer's thread; `None` at its end.
trait LazyOutput: Send {
    fn next_piece(&mut self) -> Result<Option<Bytes>, Error>;
}

/// The plain bytes of a job, in order.
///
/// A job has a buffer for the usual size of a frame or block of its format. If there are more bytes, the
/// output keeps the decoder, and decodes the rest when the consumer pulls it.
pub struct Output {
    /// The first piece, if it has a buffer of its own.
    buffer: Option<Buffer>,
    pieces: VecDeque<Bytes>,
    rest: Option<Box<dyn LazyOutput>>,
}

impl Output {
    /// Output that begins with `first` and continues with the bytes of `rest`.
    fn with_rest(first: Bytes, rest: impl LazyOutput + 'static) -> Self {
        Self {
            buffer: None,
            pieces: VecDeque::from([first]),
            rest: Some(Box::new(rest)),
        }
    }

    /// The next piece, never empty; `None` at the end.
    ///
    /// May wait for the consumer to drop earlier pieces.
    ///
    /// # Errors
    /// As [`Decoder::pull`]. Nothing follows an error.
    pub fn next_piece(&mut self) -> Result<Option<Bytes>, Error> {
        if let Some(buffer) = self.take_buffer().filter(|buffer| !buffer.is_empty()) {
            return Ok(Some(buffer.freeze()));
        }
        while let Some(piece) = self.pieces.pop_front() {
            if !piece.is_empty() {
                return Ok(Some(piece));
            }
        }
        let Some(rest) = &mut self.rest else {
            return Ok(None);
        };
        let made = rest.next_piece();
        if !matches!(made, Ok(Some(_))) {
            self.rest = None;
        }
        made
    }

    /// The next piece, if it has a buffer of its own.
    pub fn take_buffer(&mut self) -> Option<Buffer> {
        self.buffer.take()
    }

    /// Concatenates all pieces, for callers with enough memory.
    ///
    /// # Errors
    /// As [`Output::next_piece`].
    pub fn concat(mut self) -> Result<Vec<u8>, Error> {
        let mut whole = Vec::new();
        while let Some(piece) = self.next_piece()? {
            whole.extend_from_slice(&piece);
        }
        Ok(whole)
    }
}

impl From<Vec<Bytes>> for Output {
    fn from(pieces: Vec<Bytes>) -> Self {
        Self {
            buffer: None,
            pieces: pieces.into(),
            rest: None,
        }
    }
}

impl From<Buffer> for Output {
    fn from(buffer: Buffer) -> Self {
        Self {
            buffer: Some(buffer),
            pieces: VecDeque::new(),
            rest: None,
        }
    }
}

impl fmt::Debug for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Output")
            .field("buffer", &self.buffer)
            .field("pieces", &self.pieces.len())
            .field("has_rest", &self.rest.is_some())
            .finish()
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Job")
    }
}

/// Work whose result the decoder itself may use.
#[derive(Clone)]
pub struct SpeculativeJob {
    work: Arc<dyn SpeculativeWork>,
}

trait SpeculativeWork: Send + Sync {
    fn run(&self);
    fn wait(&self);
}

impl<T: Send> SpeculativeWork for OnceJob<T> {
    fn run(&self) {
        OnceJob::run(self);
    }

    fn wait(&self) {
        OnceJob::wait(self);
    }
}

impl SpeculativeJob {
    /// Wraps `job`, with a result of any type.
    fn new<T: Send + 'static>(job: Arc<OnceJob<T>>) -> Self {
        Self { work: job }
    }

    /// Runs the work on this thread, unless it has begun or is cancelled.
    pub fn run(&self) {
        self.work.run();
    }

    /// Waits while the work runs on another thread.
    pub fn wait(&self) {
        self.work.wait();
    }
}

impl fmt::Debug for SpeculativeJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SpeculativeJob")
    }
}

/// A decoding error, with its place in the packed stream.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{compression} stream at packed byte {packed}")]
pub struct Error {
    /// The format that was being decoded.
    pub compression: Compression,
    /// Offset of the frame, block or field at fault, or of the end of input.
    pub packed: Packed,
    /// The reason.
    #[source]
    pub cause: Cause,
}

/// Why decoding failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Cause {
    /// The bytes are not what the format allows.
    #[error("malformed: {0}")]
    Malformed(String),
    /// A stored checksum does not match the decoded bytes.
    #[error("checksum mismatch: {what} is stored as {expected:#x}, computed as {computed:#x}")]
    Checksum {
        /// Which checksum.
        what: &'static str,
        /// As stored.
        expected: u64,
        /// As computed.
        computed: u64,
    },
    /// The format allows it, but this program does not support it.
    #[error("not supported: {0}")]
    Unsupported(String),
    /// Decoder state would exceed what [`Context::broker`] allow.
    #[error("decoding needs {needed_bytes} bytes of memory, {limit_bytes} are allowed")]
    MemoryLimit {
        /// Memory that the stream needs.
        needed_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// The packed bytes end in the middle.
    #[error("truncated")]
    Truncated,
    /// The pool or the broker was closed, because no caller needs the bytes any more.
    #[error("cancelled")]
    Cancelled,
}

impl From<Closed> for Cause {
    fn from(_: Closed) -> Self {
        Self::Cancelled
    }
}

/// Maximum bytes that a decoder of `compression` takes from its pool.
///
/// It assumes a pool of [`READ_POOL_BYTES`] bytes, and that the caller drops each piece before the next pull.
pub fn read_pool_bytes(compression: Compression) -> u64 {
    match compression {
        Compression::None => 0,
        // A piece; or members of BGZF until they make as much, of which the last has 64 KiB.
        Compression::Gzip => (1 << 20) + (64 << 10),
        // A block of the legacy format, behind smaller ones that make almost a piece.
        Compression::Lz4 => (8 << 20) + (1 << 20),
        // A block, a stream made of it, libbz2's state, and pieces of a block that is long.
        Compression::Bzip2 => bzip2::READ_POOL_BYTES,
        Compression::Xz => READ_POOL_BYTES / 4,
        Compression::Zstd => READ_POOL_BYTES,
    }
}

/// A pool large enough to read spans with, in bytes.
pub const READ_POOL_BYTES: u64 = 16 << 20;

/// A decoder for a stream of `compression` that starts at packed and plain offset 0.
pub fn start(compression: Compression, context: Context) -> Box<dyn Decoder> {
    match compression {
        Compression::None => Box::new(plain::Decoder::start(&context)),
        Compression::Gzip => Box::new(gzip::Decoder::start(context)),
        Compression::Lz4 => Box::new(lz4::Decoder::start(context)),
        Compression::Zstd => Box::new(zstd::Decoder::start(context)),
        Compression::Xz => Box::new(xz::Decoder::start(context)),
        Compression::Bzip2 => Box::new(bzip2::Decoder::start(context)),
    }
}

/// As [`start`], for a stream with known seek points.
///
/// `ranges` are in stream order and cover the whole stream. Only the hashes of spans verify the decoded
/// bytes.
pub fn start_indexed(
    compression: Compression,
    context: Context,
    ranges: impl Iterator<Item = SeekRange> + Send + 'static,
) -> Box<dyn Decoder> {
    Box::new(indexed::IndexedDecoder::new(
        compression,
        context,
        Box::new(ranges),
    ))
}

/// A decoder at `seek_point`.
///
/// The first packed byte to push is the one at [`SeekPoint::packed`], and the first plain byte is the one at
/// [`SeekPoint::plain`]. It does not verify checksums over bytes before the seek point.
///
/// # Errors
/// [`Cause::Malformed`] when another codec made the seek point. Seek points come from files and are not
/// trusted.
pub fn resume(
    compression: Compression,
    context: Context,
    seek_point: &SeekPoint,
) -> Result<Box<dyn Decoder>, Error> {
    Ok(match compression {
        Compression::None => Box::new(plain::Decoder::resume(&context, seek_point)?),
        Compression::Gzip => Box::new(gzip::Decoder::resume(context, seek_point)?),
        Compression::Lz4 => Box::new(lz4::Decoder::resume(context, seek_point)?),
        Compression::Zstd => Box::new(zstd::Decoder::resume(context, seek_point)?),
        Compression::Xz => Box::new(xz::Decoder::resume(context, seek_point)?),
        Compression::Bzip2 => Box::new(bzip2::Decoder::resume(context, seek_point)?),
    })
}
