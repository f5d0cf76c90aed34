//! Waiting for what happens by itself.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use tarfs::base::task::Thread;

/// How long it may take.
const DEADLINE: Duration = Duration::from_secs(20);

/// Longer than anything takes unless it hangs.
const LONG: Duration = Duration::from_secs(50);

/// Waits until `happened` says so; `what` is told if that takes too long.
#[track_caller]
pub(crate) fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let start = Instant::now();
    while !happened() {
        assert!(start.elapsed() < DEADLINE, "waited for: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What `work` comes to, provided that it ends.
#[track_caller]
pub(crate) fn ends<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    let thread = Thread::spawn("worker", move || {
        // Nobody waits any longer: then the test has failed.
        drop(done.send(work()));
    });
    let thread = thread.expect("a thread");
    match result.recv_timeout(LONG) {
        Ok(result) => result,
        Err(error) => {
            // A hanging thread must not be waited for.
            std::mem::forget(thread);
            panic!("it hangs: {error}");
        }
    }
}
