//! Runs before `main`: notes where the arguments are and whether standard output is closed, and disables core files and
//! tracing.

#![expect(unsafe_code, reason = "a function before `main` has no safe interface")]

use std::ffi::{CStr, OsString, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

static IS_STDOUT_CLOSED: AtomicBool = AtomicBool::new(false);
/// The first argument, and the length of all, each with the NUL after it.
static ARGUMENTS: AtomicPtr<c_char> = AtomicPtr::new(ptr::null_mut());
static ARGUMENTS_LEN: AtomicUsize = AtomicUsize::new(0);

static IS_DUMPABLE: AtomicBool = AtomicBool::new(false);

/// Runs before the runtime of Rust, which opens /dev/null in the place of a closed descriptor.
// SAFETY: the C library calls each function in this section once, before any thread starts.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn(c_int, *const *mut c_char) = run;

extern "C" fn run(count: c_int, arguments: *const *mut c_char) {
    if cfg!(target_env = "gnu") {
        note_arguments(usize::try_from(count).unwrap_or(0), arguments);
    }
    // First, because arguments and environment of any verb may have secrets.
    // SAFETY: it changes an attribute of the process, and reads no memory.
    let disabled = unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
    IS_DUMPABLE.store(disabled != 0, Ordering::Relaxed);
    // SAFETY: it changes nothing, whether the descriptor is open or not.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
    IS_STDOUT_CLOSED.store(flags == -1, Ordering::Relaxed);
}

/// Notes where the kernel has put the arguments: one after another.
fn note_arguments(count: usize, arguments: *const *mut c_char) {
    let (mut first, mut len) = (ptr::null_mut(), 0);
    for number in 0..count {
        // SAFETY: glibc passes main's `argv` to these functions, which has `count` strings that live as long as the
        // process.
        let argument = unsafe { *arguments.add(number) };
        if number == 0 {
            first = argument;
        } else if argument != first.wrapping_add(len) {
            return;
        }
        // SAFETY: as above.
        len += unsafe { CStr::from_ptr(argument) }
            .to_bytes_with_nul()
            .len();
    }
    ARGUMENTS.store(first, Ordering::Relaxed);
    ARGUMENTS_LEN.store(len, Ordering::Relaxed);
}

/// Replaces the arguments of this process, which every user can read, by `shown`, as far as there is room. This process
/// must not read its arguments any more.
pub(crate) fn show_arguments(shown: &[OsString]) {
    let (first, len) = (
        ARGUMENTS.swap(ptr::null_mut(), Ordering::Relaxed),
        ARGUMENTS_LEN.load(Ordering::Relaxed),
    );
    if first.is_null() || len == 0 {
        return;
    }
    let mut bytes = Vec::new();
    for word in shown {
        bytes.extend_from_slice(word.as_bytes());
        bytes.push(0);
    }
    // The last byte stays NUL, or the kernel would also show the environment.
    bytes.resize(len - 1, 0);
    bytes.push(0);
    // SAFETY: `first` is the start of `len` bytes of the process's own stack, to which no other reference exists: Rust copies
    // arguments when they are read, and each is shorter than the whole and ends with NUL.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr().cast(), first, len) };
}

/// Whether standard output was closed when the program started.
pub(crate) fn is_stdout_closed() -> bool {
    IS_STDOUT_CLOSED.load(Ordering::Relaxed)
}

/// Whether core files and tracing could not be disabled.
pub(crate) fn is_dumpable() -> bool {
    IS_DUMPABLE.load(Ordering::Relaxed)
}
