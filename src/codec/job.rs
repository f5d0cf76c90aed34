//! Decoding work for other threads, and its output.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;

use super::Error;
use crate::base::buffer_pool::Buffer;
use crate::base::once_job::OnceJob;

/// Maximum number of blocks, frames or members in one job, because even empty ones take memory.
pub(super) const MAX_PARTS_PER_JOB: usize = 4096;

/// Independent work that makes plain bytes, possibly none.
pub struct Job {
    work: Box<dyn FnOnce() -> Result<Output, Error> + Send>,
}

impl Job {
    /// A job whose `work` makes one piece, several, or output that is made piece by piece.
    pub fn new<T: Into<Output>>(work: impl FnOnce() -> Result<T, Error> + Send + 'static) -> Self {
        Self {
            work: Box::new(move || Ok(work()?.into())),
        }
    }

    /// Runs the work on this thread.
    ///
    /// # Errors
    /// As [`Decoder::pull`](super::Decoder::pull).
    pub fn run(self) -> Result<Output, Error> {
        (self.work)()
    }
}

/// Makes the next piece of a job's output, on the consumer's thread; `None` at its end.
type NextPieceFn = Box<dyn FnMut() -> Result<Option<Bytes>, Error> + Send>;

/// The plain bytes of a job, in order. A job has a buffer of its format's usual frame or block size. The
/// output keeps the decoder for further bytes, and decodes them when they are pulled.
#[derive(Default)]
pub struct Output {
    buffer: Option<Buffer>,
    pieces: VecDeque<Bytes>,
    rest: Option<NextPieceFn>,
    /// Counts its bytes.
    count: Option<Arc<OutputCount>>,
    has_bytes: bool,
}

/// Number of the bytes of several jobs together, whose outputs are pulled in order.
#[derive(Debug)]
pub(super) struct OutputCount {
    made: AtomicU64,
    /// The highest number until it is known.
    expected: AtomicU64,
}

impl Default for OutputCount {
    fn default() -> Self {
        Self {
            made: AtomicU64::new(0),
            expected: AtomicU64::new(u64::MAX),
        }
    }
}

impl OutputCount {
    /// Expects `bytes` in all. After these, errors of outputs without bytes do not count.
    pub(super) fn expect(&self, bytes: u64) {
        self.expected.store(bytes, Ordering::SeqCst);
    }

    /// Whether fewer or more bytes than expected were made.
    fn difference(&self) -> std::cmp::Ordering {
        let expected = self.expected.load(Ordering::SeqCst);
        self.made.load(Ordering::SeqCst).cmp(&expected)
    }

    /// Whether exactly the expected bytes were made.
    pub(super) fn is_as_expected(&self) -> bool {
        self.difference().is_eq()
    }

    /// `job`, whose bytes count.
    pub(super) fn count(self: &Arc<Self>, job: Job) -> Job {
        let count = Some(Arc::clone(self));
        Job::new(move || {
            let failed = |error: Error| {
                Output::with_rest(Bytes::new(), Box::new(move || Err(error.clone())))
            };
            let output = job.run().unwrap_or_else(failed);
            Ok(Output { count, ..output })
        })
    }
}

impl Output {
    /// Output that begins with `first` and continues with the bytes of `rest`.
    pub(super) fn with_rest(first: Bytes, rest: NextPieceFn) -> Self {
        Self {
            rest: Some(rest),
            ..Self::from(first)
        }
    }

    /// The next piece, never empty; `None` at the end. May wait for the consumer to drop earlier pieces.
    ///
    /// # Errors
    /// As [`Decoder::pull`](super::Decoder::pull). Nothing follows an error.
    pub fn next_piece(&mut self) -> Result<Option<Bytes>, Error> {
        let piece = self.make_piece();
        let Some(count) = &self.count else {
            return piece;
        };
        match piece {
            // An output with bytes may fail by their checksum.
            Err(_) if !self.has_bytes && count.difference().is_ge() => Ok(None),
            Ok(Some(piece)) => {
                self.has_bytes = true;
                count.made.fetch_add(piece.len() as u64, Ordering::SeqCst);
                Ok(Some(piece))
            }
            other => other,
        }
    }

    fn make_piece(&mut self) -> Result<Option<Bytes>, Error> {
        if let Some(buffer) = self.buffer.take().filter(|buffer| !buffer.is_empty()) {
            return Ok(Some(buffer.freeze()));
        }
        while let Some(piece) = self.pieces.pop_front() {
            if !piece.is_empty() {
                return Ok(Some(piece));
            }
        }
        let Some(next_piece) = &mut self.rest else {
            return Ok(None);
        };
        let made = next_piece();
        if !matches!(made, Ok(Some(_))) {
            self.rest = None;
        }
        made
    }

    /// The next piece, if it has a buffer of its own.
    pub fn take_buffer(&mut self) -> Option<Buffer> {
        self.buffer.take_if(|_| self.count.is_none())
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

impl From<Bytes> for Output {
    fn from(piece: Bytes) -> Self {
        Self::from(vec![piece])
    }
}

impl From<Vec<Bytes>> for Output {
    fn from(pieces: Vec<Bytes>) -> Self {
        Self {
            pieces: pieces.into(),
            ..Self::default()
        }
    }
}

impl From<Buffer> for Output {
    fn from(buffer: Buffer) -> Self {
        Self {
            buffer: Some(buffer),
            ..Self::default()
        }
    }
}

impl fmt::Debug for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Output").finish_non_exhaustive()
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Job")
    }
}

/// Work whose result the decoder itself may use.
pub trait SpeculativeJob: Send + Sync + fmt::Debug {
    /// Runs the work on this thread, unless it has begun or is cancelled.
    fn run(&self);

    /// Waits while the work runs on another thread.
    fn wait(&self);
}

impl<T: Send> SpeculativeJob for OnceJob<T> {
    fn run(&self) {
        OnceJob::run(self);
    }

    fn wait(&self) {
        OnceJob::wait(self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::extent::Packed;
    use crate::codec::{Cause, Compression};

    #[test]
    fn error_after_the_expected_bytes_counts_if_it_is_of_an_output_with_bytes() {
        let error = || Cause::Truncated.at(Compression::Bzip2, Packed(0));
        for (bytes, is_error) in [(&b"ab"[..], true), (b"", false)] {
            let count = Arc::<OutputCount>::default();
            let rest: NextPieceFn = Box::new(move || Err(error()));
            let output = Output::with_rest(Bytes::from_static(bytes), rest);
            count.expect(bytes.len() as u64);
            let output = count.count(Job::new(move || Ok(output))).run();
            let made = output.and_then(Output::concat);
            assert_eq!((made.is_err(), count.is_as_expected()), (is_error, true));
        }
    }
}
