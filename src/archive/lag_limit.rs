//! How far a scan may be ahead of who stores what it passes.
//!
//! What leaves memory before it is stored is made again later, or read back from disk, and handed
//! over by itself: that costs more than the scan gains by running on. But the scan is what everyone
//! waits for, so it waits a little for each span, and not at all for a follower that does not move.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::base::extent::Plain;

/// How long a scan waits for a follower that does not move: it may be waiting for a page that
/// someone reads who waits for the scan.
const STALL_TIMEOUT: Duration = Duration::from_millis(100);

/// What a follower may cost that moves, as a multiple of that, for each span.
const MAX_STALL_TIMEOUTS: u32 = 4;

/// Between one scan and one follower.
#[derive(Debug)]
pub(super) struct LagLimit {
    state: Mutex<State>,
    moved: Condvar,
    stall_timeout: Duration,
}

impl Default for LagLimit {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            moved: Condvar::new(),
            stall_timeout: STALL_TIMEOUT,
        }
    }
}

#[derive(Debug, Default)]
struct State {
    /// Where the follower is; `None` when there is none.
    pusher: Option<Plain>,
    /// Whether it was waited for in vain, and has not moved since.
    is_stalled: bool,
}

impl LagLimit {
    /// The follower has done with everything before `offset`.
    pub(super) fn advance(&self, offset: Plain) {
        let mut state = self.state();
        state.pusher = state.pusher.max(Some(offset));
        state.is_stalled = false;
        drop(state);
        self.moved.notify_one();
    }

    /// Nobody follows any more.
    pub(super) fn detach(&self) {
        self.state().pusher = None;
        self.moved.notify_one();
    }

    /// Waits until the follower, if there is one that moves, is at most `max_lag` bytes behind
    /// `offset`.
    pub(super) fn wait_for_pusher(&self, offset: Plain, max_lag: u64) {
        let start = Instant::now();
        let mut state = self.state();
        while let Some(pusher) = state.pusher
            && !state.is_stalled
            && offset.0.saturating_sub(pusher.0) > max_lag
            && start.elapsed() < self.stall_timeout * MAX_STALL_TIMEOUTS
        {
            let has_not_moved = |state: &mut State| state.pusher == Some(pusher);
            let waited = self
                .moved
                .wait_timeout_while(state, self.stall_timeout, has_not_moved);
            let (woken, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.is_stalled |= timeout.timed_out();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
        assert!(!lag_limit.state().is_stalled);
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
            assert_eq!(lag_limit.state().pusher, Some(Plain(90)));
        });
    }

    #[test]
    fn stalled_pusher_is_waited_for_once() {
        let mut lag_limit = lag_limit(Duration::from_millis(1));
        lag_limit.advance(Plain(0));
        lag_limit.wait_for_pusher(Plain(100), 10);
        assert!(lag_limit.state().is_stalled);
        lag_limit.stall_timeout = Duration::from_hours(1);
        lag_limit.wait_for_pusher(Plain(1000), 10);
        lag_limit.advance(Plain(1));
        assert!(!lag_limit.state().is_stalled, "it moves");
    }

    #[test]
    fn pusher_position_never_goes_back() {
        let lag_limit = LagLimit::default();
        lag_limit.advance(Plain(50));
        lag_limit.advance(Plain(20));
        assert_eq!(lag_limit.state().pusher, Some(Plain(50)));
    }
}
