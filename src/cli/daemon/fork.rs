//! fork(2), so that a monitor in the background shares the pages of the program that it does not touch.

#![expect(unsafe_code, reason = "fork(2) has no safe interface")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::pipe::{PipeFlags, pipe_with};
use tarfs::internal::wait::wait_until;

/// Timeout for ended threads.
const THREAD_END_TIMEOUT: Duration = Duration::from_secs(1);

/// The two processes after a fork.
pub(super) enum Fork {
    Parent(Child),
    Child(Parent),
}

/// The child, for its parent.
pub(super) struct Child(OwnedFd);

/// The parent, for its child.
pub(super) struct Parent(OwnedFd);

impl Child {
    /// Waits until the child reports that it has taken over. False if it ends before.
    pub(super) fn wait_for_report(self) -> bool {
        File::from(self.0).read_exact(&mut [0]).is_ok()
    }
}

impl Parent {
    /// Reports that this process has taken over.
    pub(super) fn report(self) {
        // A parent that was killed needs no report.
        drop(File::from(self.0).write_all(&[1]));
    }
}

/// Divides this process into two. It must have one thread.
pub(super) fn fork() -> anyhow::Result<Fork> {
    let count = || std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    // A thread is listed for a moment after it was joined.
    wait_until(THREAD_END_TIMEOUT, Duration::from_millis(1), || {
        count() <= 1
    });
    let threads = count();
    ensure!(threads == 1, "this process has {threads} threads");
    let (reports, reporting) = pipe_with(PipeFlags::CLOEXEC).context("cannot make a pipe")?;
    // SAFETY: no other thread exists, so no lock is held that the child could wait for.
    let child = unsafe { libc::fork() };
    match child {
        -1 => Err(std::io::Error::last_os_error()).context("cannot start a process"),
        0 => Ok(Fork::Child(Parent(reporting))),
        _ => Ok(Fork::Parent(Child(reports))),
    }
}
