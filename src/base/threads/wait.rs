//! Waits with a timeout.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, Result};

/// Waits until one of `polled` is ready. False after `timeout`, if there is one.
///
/// # Errors
/// If the system cannot wait.
pub fn wait_for(polled: &mut [PollFd<'_>], timeout: impl Into<Option<Duration>>) -> Result<bool> {
    let start = Instant::now();
    let timeout = timeout.into();
    loop {
        let left = timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(polled, left.as_ref()) {
            Err(Errno::INTR) => {}
            count => return Ok(count? > 0),
        }
    }
}

/// Whether `condition` holds before `timeout`. It is asked at each `interval`.
pub fn wait_until(
    timeout: Duration,
    interval: Duration,
    mut condition: impl FnMut() -> bool,
) -> bool {
    let start = Instant::now();
    loop {
        if condition() {
            return true;
        }
        if start.elapsed() >= timeout {
            return false;
        }
        std::thread::sleep(interval);
    }
}

/// Whether `descriptor` has data, or has ended, before `timeout`.
pub fn is_readable(descriptor: impl AsFd, timeout: impl Into<Option<Duration>>) -> bool {
    let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
    wait_for(&mut polled, timeout) == Ok(true)
}
