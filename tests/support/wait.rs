//! Waiting with a timeout.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use tarfs::internal::thread::Thread;

/// Longer than anything takes unless it hangs, also on a machine that is busy with other tests.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_mins(3);

/// Waits until `happened` returns true. Fails with `what` after the timeout.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut happened: impl FnMut() -> bool) {
    wait_for(what, || happened().then_some(()));
}

/// Waits until `find` returns something. Fails with `what` after the timeout.
#[track_caller]
pub(crate) fn wait_for<T>(what: &str, mut find: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = find() {
            return found;
        }
        assert!(start.elapsed() < WAIT_TIMEOUT, "waited for: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The result of `work`, which must end in time.
#[track_caller]
pub(crate) fn finish_in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    let thread = Thread::spawn("worker", move || {
        // The receiver is gone if the test has failed.
        drop(done.send(work()));
    });
    let thread = thread.expect("a thread");
    match result.recv_timeout(WAIT_TIMEOUT) {
        Ok(result) => result,
        Err(error) => {
            // Dropping the handle would wait for the hanging thread.
            std::mem::forget(thread);
            panic!("it hangs: {error}");
        }
    }
}

/// Whether a process ends within the timeout.
pub(crate) fn process_exits(process: &OwnedFd) -> bool {
    let timeout = Timespec::try_from(WAIT_TIMEOUT).expect("short");
    let mut polled = [PollFd::new(process, PollFlags::IN)];
    poll(&mut polled, Some(&timeout)) == Ok(1)
}
