//! Output that the threads of a walk share.

use std::fmt;
use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;

use crate::base::sync::Mutex;

/// A writer for several threads. It keeps the first error, after which nothing is written.
pub struct SharedOutput(Mutex<State>);

struct State {
    writer: BufWriter<Box<dyn Write + Send>>,
    error: Option<io::Error>,
    is_flushed: bool,
}

impl SharedOutput {
    /// Output to `writer`, through a buffer, which `is_flushed` after each piece.
    pub fn new(writer: impl Write + Send + 'static, is_flushed: bool) -> Self {
        Self(Mutex::new(State {
            writer: BufWriter::with_capacity(64 << 10, Box::new(writer)),
            error: None,
            is_flushed,
        }))
    }

    /// Writes `bytes` as one piece. Breaks after an error.
    pub fn write(&self, bytes: &[u8]) -> ControlFlow<()> {
        self.write_last(bytes);
        match self.0.lock().error {
            None => ControlFlow::Continue(()),
            Some(_) => ControlFlow::Break(()),
        }
    }

    /// As [`Self::write`], for a caller that ends in any case.
    pub fn write_last(&self, bytes: &[u8]) {
        let mut state = self.0.lock();
        if state.error.is_some() || bytes.is_empty() {
            return;
        }
        let mut written = state.writer.write_all(bytes);
        if state.is_flushed {
            written = written.and_then(|()| state.writer.flush());
        }
        state.error = written.err();
    }

    /// Writes what is in the buffer.
    ///
    /// # Errors
    /// The first error of all writes.
    pub fn finish(&self) -> io::Result<()> {
        let mut state = self.0.lock();
        match state.error.take() {
            Some(error) => Err(error),
            None => state.writer.flush(),
        }
    }
}

impl fmt::Debug for SharedOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedOutput").finish_non_exhaustive()
    }
}
