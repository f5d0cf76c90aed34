//! Limit on how far the scan runs ahead of the scan pusher.
//! A span evicted before the pusher stores it must be decoded again, or read back from disk. That costs more
//! than the scan gains by running ahead. But all readers wait for the scan. So it waits briefly for each
//! span. For a pusher that does not move, it waits a tenth of a second, and then not until the pusher moves.

use std::time::{Duration, Instant};

use crate::base::extent::Plain;
use crate::base::sync::{Condvar, Mutex};

/// Timeout for a stalled pusher, which may wait for a page locked by a reader that waits for the scan.
const STALL_TIMEOUT: Duration = Duration::from_millis(100);

/// Maximum wait for a span if the pusher moves, as a multiple of [`STALL_TIMEOUT`].
const MAX_STALL_TIMEOUTS: u32 = 4;

#[derive(Debug)]
pub(crate) struct LagLimit {
    state: Mutex<State>,
    moved: Condvar,
    stall_timeout: Duration,
}

impl Default for LagLimit {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            moved: Condvar::default(),
            stall_timeout: STALL_TIMEOUT,
        }
    }
}

#[derive(Debug, Default)]
struct State {
    pusher: Option<Plain>,
    /// Whether a wait timed out, and the pusher has not moved since.
    is_stalled: bool,
}

impl LagLimit {
    /// Reports that the pusher has handled everything before `offset`.
    pub(crate) fn advance(&self, offset: Plain) {
        let mut state = self.state.lock();
        state.pusher = state.pusher.max(Some(offset));
        state.is_stalled = false;
        drop(state);
        self.moved.notify_one();
    }

    pub(crate) fn detach(&self) {
        self.state.lock().pusher = None;
        self.moved.notify_one();
    }

    /// Waits until the pusher is at most `max_lag` bytes behind `offset`, or is stalled.
    pub(crate) fn wait_for_pusher(&self, offset: Plain, max_lag: u64) {
        let start = Instant::now();
        let mut state = self.state.lock();
        while let Some(pusher) = state.pusher
            && !state.is_stalled
            && offset.0.saturating_sub(pusher.0) > max_lag
            && start.elapsed() < self.stall_timeout * MAX_STALL_TIMEOUTS
        {
            let has_not_moved = |state: &mut State| state.pusher == Some(pusher);
            let (woken, is_over) =
                self.moved
                    .wait_timeout_while(state, self.stall_timeout, has_not_moved);
            state = woken;
            state.is_stalled |= is_over;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lag_limit(stall_timeout: Duration) -> LagLimit {
        LagLimit {
            stall_timeout,
            ..LagLimit::default()
        }
    }

    #[test]
    fn scan_without_pusher_does_not_wait() {
        let lag_limit = LagLimit::default();
        lag_limit.wait_for_pusher(Plain(1000), 10);
        lag_limit.advance(Plain(5));
        lag_limit.detach();
        lag_limit.wait_for_pusher(Plain(1000), 10);
        assert!(!lag_limit.state.lock().is_stalled);
    }

    #[test]
    fn scan_waits_until_the_pusher_is_near() {
        let lag_limit = lag_limit(Duration::from_mins(1));
        lag_limit.advance(Plain(0));
        lag_limit.wait_for_pusher(Plain(10), 10);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for offset in (0..=90).step_by(10) {
                    lag_limit.advance(Plain(offset));
                    std::thread::sleep(Duration::from_millis(2));
                }
            });
            lag_limit.wait_for_pusher(Plain(100), 10);
            assert_eq!(lag_limit.state.lock().pusher, Some(Plain(90)));
        });
    }

    // Promises: scan-pages
    #[test]
    fn stalled_pusher_is_waited_for_once() {
        let mut lag_limit = lag_limit(Duration::from_millis(1));
        lag_limit.advance(Plain(0));
        lag_limit.wait_for_pusher(Plain(100), 10);
        assert!(lag_limit.state.lock().is_stalled);
        lag_limit.stall_timeout = Duration::from_hours(1);
        lag_limit.wait_for_pusher(Plain(1000), 10);
        lag_limit.advance(Plain(1));
        assert!(!lag_limit.state.lock().is_stalled, "it moves");
    }

    #[test]
    fn pusher_position_never_goes_back() {
        let lag_limit = LagLimit::default();
        lag_limit.advance(Plain(50));
        lag_limit.advance(Plain(20));
        assert_eq!(lag_limit.state.lock().pusher, Some(Plain(50)));
    }
}
