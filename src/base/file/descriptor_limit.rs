//! The limit of open files, sockets and pipes, which only the user can raise.

use std::error::Error;
use std::io;

use rustix::io::Errno;

/// Advice for an error of [`is_descriptor_limit`].
pub const HINT_RAISE_DESCRIPTOR_LIMIT: &str = "allow more open files: `ulimit -n`";

/// Whether this process, or the machine, can open no more files, sockets and pipes. It is no fault of the file or
/// server, so another attempt, or another server, fails in the same way.
pub fn is_descriptor_limit(error: &(dyn Error + 'static)) -> bool {
    let number = match error.downcast_ref::<io::Error>() {
        Some(error) => error.raw_os_error(),
        None => error
            .downcast_ref::<Errno>()
            .map(|errno| errno.raw_os_error()),
    };
    let limits = [Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error);
    number.is_some_and(|number| limits.contains(&number))
}

/// Descriptors that a start of the network opens at least: those of the event loop and of signals, certificates, and a
/// connection. Some libraries panic, or go on with less, if they cannot open one.
pub const NETWORK_DESCRIPTORS: usize = 12;

/// Checks that this process can open `count` files and sockets, two at least.
///
/// # Errors
/// That of [`is_descriptor_limit`].
pub fn check_descriptor_limit(count: usize) -> io::Result<()> {
    let (end, _other) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let copies: io::Result<Vec<_>> = (2..count).map(|_| end.try_clone()).collect();
    copies.map(drop)
}
