//! Errors of a monitor.

use std::io::{self, ErrorKind};

use anyhow::anyhow;
use tarfs::serve::Packet;

/// The monitor was ended by a signal.
#[derive(Debug, thiserror::Error)]
#[error("ended by signal {0}")]
pub(super) struct EndedBySignal(pub(super) i32);

/// The process that serves the mount has died before it was ready.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct ServerDied(pub(super) String);

/// Whether a link has failed because the other process is gone. A daemon that dies accepts clients until its sockets are
/// closed.
pub(super) fn is_disconnection(error: &io::Error) -> bool {
    let kinds = [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset];
    kinds.contains(&error.kind())
}

/// Whether a daemon may be reached later although a connection to it has failed with `error`.
pub(super) fn may_pass(error: &io::Error) -> bool {
    let kinds = [
        ErrorKind::ConnectionRefused,
        ErrorKind::Interrupted,
        ErrorKind::TimedOut,
        ErrorKind::WouldBlock,
    ];
    is_disconnection(error) || kinds.contains(&error.kind())
}

/// Why a writable mount cannot be restarted.
pub(super) const NO_WRITABLE_RESTART: &str = "--restart with --writable needs Linux 6.9 or later and a source that identifies each \
     version reliably";

pub(super) fn unexpected(packet: &Packet) -> anyhow::Error {
    tracing::debug!(?packet, "unexpected");
    anyhow!("the process that serves the mount has answered something else")
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    // Promises: shared-restart
    #[test]
    fn only_errors_that_may_pass_are_worth_another_try() {
        let may_pass = |errno: Errno| may_pass(&errno.into());
        for errno in [
            Errno::AGAIN,
            Errno::CONNREFUSED,
            Errno::CONNRESET,
            Errno::TIMEDOUT,
        ] {
            assert!(may_pass(errno), "{errno}");
        }
        for errno in [Errno::NOENT, Errno::NOSPC, Errno::ACCESS] {
            assert!(!may_pass(errno), "{errno}");
        }
    }
}
