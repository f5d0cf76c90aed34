//! Runs before `main`: notes whether standard output is closed, and disables core files and tracing.

#![expect(unsafe_code, reason = "a function before `main` has no safe interface")]

use std::sync::atomic::{AtomicBool, Ordering};

static IS_STDOUT_CLOSED: AtomicBool = AtomicBool::new(false);
static IS_DUMPABLE: AtomicBool = AtomicBool::new(false);

/// Runs before the runtime of Rust, which opens /dev/null in the place of a closed descriptor.
// SAFETY: the C library calls each function in this section once, before any thread starts.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = run;

extern "C" fn run() {
    // First, because arguments and environment of any verb may have secrets.
    // SAFETY: it changes an attribute of the process, and reads no memory.
    let disabled = unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
    IS_DUMPABLE.store(disabled != 0, Ordering::Relaxed);
    // SAFETY: it changes nothing, whether the descriptor is open or not.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
    IS_STDOUT_CLOSED.store(flags == -1, Ordering::Relaxed);
}

/// Whether standard output was closed when the program started.
pub(crate) fn is_stdout_closed() -> bool {
    IS_STDOUT_CLOSED.load(Ordering::Relaxed)
}

/// Whether core files and tracing could not be disabled.
pub(crate) fn is_dumpable() -> bool {
    IS_DUMPABLE.load(Ordering::Relaxed)
}
