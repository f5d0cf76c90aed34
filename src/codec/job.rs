//! Decoding work for other threads, and its output.

use std::collections::VecDeque;
use std::fmt;

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
        if let Some(buffer) = self.take_buffer().filter(|buffer| !buffer.is_empty()) {
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
