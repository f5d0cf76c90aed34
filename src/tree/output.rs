//! Output and errors of the threads of a walk.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;
use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::base::escape::{escape, without_controls};
use crate::base::sync::Mutex;

/// Bytes that are written to a file or pipe at once.
const BUFFER_BYTES: usize = 64 << 10;

/// A writer for several threads, which also receives errors about single files. It keeps the first error of writing,
/// after which nothing is written.
pub struct SharedOutput {
    state: Mutex<State>,
    print_error: Box<dyn Fn(&str) + Send + Sync>,
    describe: DescribeFn,
    has_failed: AtomicBool,
    is_terminal: bool,
}

/// Formats an error with its causes, and advice for the user.
type DescribeFn = fn(&(dyn Error + 'static)) -> String;

struct State {
    writer: BufWriter<Box<dyn Write + Send>>,
    error: Option<io::Error>,
}

impl SharedOutput {
    /// Output to `writer` through a buffer, unless it `is_terminal`. Errors go to `print_error`, those about files as
    /// `describe` formats them.
    pub fn new(
        writer: impl Write + Send + 'static,
        is_terminal: bool,
        print_error: impl Fn(&str) + Send + Sync + 'static,
        describe: DescribeFn,
    ) -> Self {
        let capacity = if is_terminal { 0 } else { BUFFER_BYTES };
        Self {
            state: Mutex::new(State {
                writer: BufWriter::with_capacity(capacity, Box::new(writer)),
                error: None,
            }),
            print_error: Box::new(print_error),
            describe,
            has_failed: AtomicBool::new(false),
            is_terminal,
        }
    }

    /// A name as it is written: without control characters to a terminal, and unchanged elsewhere.
    pub fn shown<'a>(&self, name: &'a [u8]) -> Cow<'a, [u8]> {
        if self.is_terminal {
            without_controls(name)
        } else {
            Cow::Borrowed(name)
        }
    }

    /// Prints an error about the file at `path`.
    pub fn report(&self, path: &[u8], error: &io::Error) {
        self.fail(&format!("{}: {}", escape(path), (self.describe)(error)));
    }

    /// Prints an error of `action` on a file.
    pub(crate) fn report_action(&self, action: &str, error: &io::Error) {
        self.fail(&format!("{action}: {}", (self.describe)(error)));
    }

    /// Prints an error about a file.
    pub fn fail(&self, text: &str) {
        self.has_failed.store(true, Ordering::Relaxed);
        (self.print_error)(text);
    }

    /// Whether an error was printed.
    pub fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    /// Writes `bytes` as one piece. Breaks after an error.
    pub fn write(&self, bytes: &[u8]) -> ControlFlow<()> {
        self.write_last(bytes);
        match self.state.lock().error {
            None => ControlFlow::Continue(()),
            Some(_) => ControlFlow::Break(()),
        }
    }

    /// As [`Self::write`], for a caller that ends in any case.
    pub fn write_last(&self, bytes: &[u8]) {
        let mut state = self.state.lock();
        if state.error.is_some() || bytes.is_empty() {
            return;
        }
        state.error = state.writer.write_all(bytes).err();
    }

    /// Writes what is in the buffer.
    ///
    /// # Errors
    /// The first error of all writes.
    pub fn finish(&self) -> io::Result<()> {
        let mut state = self.state.lock();
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
