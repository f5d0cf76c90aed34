//! Notes at the start whether standard output is closed.

#![expect(unsafe_code, reason = "a function before `main` has no safe interface")]

use std::sync::atomic::{AtomicBool, Ordering};

static IS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Runs before the runtime of Rust, which opens /dev/null in the place of a closed descriptor.
// SAFETY: the C library calls each function in this section once, before any thread starts.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = check;

extern "C" fn check() {
    // SAFETY: it changes nothing, whether the descriptor is open or not.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
    IS_CLOSED.store(flags == -1, Ordering::Relaxed);
}

/// Whether standard output was closed when the program started.
pub(crate) fn is_closed() -> bool {
    IS_CLOSED.load(Ordering::Relaxed)
}
