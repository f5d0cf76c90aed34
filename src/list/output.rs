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
}

impl SharedOutput {
    /// Output to `writer`, through a buffer.
    pub fn new(writer: impl Write + Send + 'static) -> Self {
        Self(Mutex::new(State {
            writer: BufWriter::with_capacity(64 << 10, Box::new(writer)),
            error: None,
        }))
    }

    /// Writes `bytes` as one piece. Breaks after an error.
    pub fn write(&self, bytes: &[u8]) -> ControlFlow<()> {
        let mut state = self.0.lock();
        if state.error.is_none() {
            state.error = state.writer.write_all(bytes).err();
        }
        match state.error {
            None => ControlFlow::Continue(()),
            Some(_) => ControlFlow::Break(()),
        }
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
