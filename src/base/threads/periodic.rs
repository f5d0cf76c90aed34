//! Work that a thread repeats.

use std::convert::Infallible;
use std::io;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use super::thread::Thread;

/// A thread that repeats its work until this is dropped.
#[derive(Debug)]
pub struct PeriodicThread {
    // Declared before the thread, because dropping it ends the thread.
    _stop: Sender<Infallible>,
    _thread: Thread<()>,
}

impl PeriodicThread {
    /// Calls `work` at each `interval` on a thread called `name`, and at the end once more with true.
    ///
    /// # Errors
    /// If the system cannot start a thread.
    pub fn start(
        name: &str,
        interval: Duration,
        mut work: impl FnMut(bool) + Send + 'static,
    ) -> io::Result<Self> {
        let (stop, stopped) = channel();
        let thread = Thread::spawn(name, move || {
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                work(false);
            }
            work(true);
        })?;
        Ok(Self {
            _stop: stop,
            _thread: thread,
        })
    }
}
