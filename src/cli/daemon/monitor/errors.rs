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

/// Why a writable mount cannot be restarted.
pub(super) const NO_WRITABLE_RESTART: &str = "--restart with --writable needs Linux 6.9 or later and a source that identifies each \
     version reliably";

pub(super) fn unexpected(packet: &Packet) -> anyhow::Error {
    tracing::debug!(?packet, "unexpected");
    anyhow!("the process that serves the mount has answered something else")
}
