//! Forced exit of a process whose threads may not end.

use std::time::Duration;
use std::{mem, process, thread};

use tarfs::base::thread::Thread;

/// Ends the process successfully after `timeout`. That may cut off the output of threads, like a kill.
#[expect(
    clippy::exit,
    reason = "threads that do not end cannot be ended by returning"
)]
pub(crate) fn force_exit_after(timeout: Duration) {
    let thread = Thread::spawn("exit-deadline", move || {
        thread::sleep(timeout);
        tracing::warn!(
            ?timeout,
            "some threads have not ended; the process exits without them"
        );
        process::exit(0);
    });
    match thread {
        // Dropping it would wait for it. It ends with the process.
        Ok(thread) => mem::forget(thread),
        Err(error) => tracing::warn!(%error, "cannot start a thread that ends the process in time"),
    }
}
