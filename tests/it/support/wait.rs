//! Waiting for what happens by itself.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use tarfs::base::thread::Thread;

/// Longer than anything takes unless it hangs, also where the disk is busy with what all other tests
/// write.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_mins(1);

/// Waits until `happened` says so; `what` is told if that takes too long.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut happened: impl FnMut() -> bool) {
    let start = Instant::now();
    while !happened() {
        assert!(start.elapsed() < WAIT_TIMEOUT, "waited for: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What `work` comes to, provided that it ends.
#[track_caller]
pub(crate) fn finish_in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    let thread = Thread::spawn("worker", move || {
        // Nobody waits any longer: then the test has failed.
        drop(done.send(work()));
    });
    let thread = thread.expect("a thread");
    match result.recv_timeout(WAIT_TIMEOUT) {
        Ok(result) => result,
        Err(error) => {
            // A hanging thread must not be waited for.
            std::mem::forget(thread);
            panic!("it hangs: {error}");
        }
    }
}

/// Whether the process that `process` is a handle of ends.
pub(crate) fn process_exits(process: &OwnedFd) -> bool {
    let timeout = Timespec::try_from(WAIT_TIMEOUT).expect("short");
    let mut polled = [PollFd::new(process, PollFlags::IN)];
    poll(&mut polled, Some(&timeout)) == Ok(1)
}
