//! Waiting for what happens by itself.

use std::time::{Duration, Instant};

/// How long it may take.
const DEADLINE: Duration = Duration::from_secs(20);

/// Waits until `happened` says so; `what` is told if that takes too long.
#[track_caller]
pub(crate) fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let start = Instant::now();
    while !happened() {
        assert!(start.elapsed() < DEADLINE, "waited for: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
