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
const PATIENCE: Duration = Duration::from_millis(100);

/// What a follower may cost that moves, as a multiple of that, for each span.
const PATIENCES: u32 = 4;

/// Between one scan and one follower.
#[derive(Debug)]
pub(super) struct Leash {
    state: Mutex<State>,
    moved: Condvar,
    patience: Duration,
}

impl Default for Leash {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            moved: Condvar::new(),
            patience: PATIENCE,
        }
    }
}

#[derive(Debug, Default)]
struct State {
    /// Where the follower is; `None` when there is none.
    follower: Option<Plain>,
    /// Whether it was waited for in vain, and has not moved since.
    is_stuck: bool,
}

impl Leash {
    /// The follower has done with everything before `offset`.
    pub(super) fn follow(&self, offset: Plain) {
        let mut state = self.state();
        state.follower = state.follower.max(Some(offset));
        state.is_stuck = false;
        drop(state);
        self.moved.notify_one();
    }

    /// Nobody follows any more.
    pub(super) fn let_go(&self) {
        self.state().follower = None;
        self.moved.notify_one();
    }

    /// Waits until the follower, if there is one that moves, is at most `most` bytes behind
    /// `offset`.
    pub(super) fn wait(&self, offset: Plain, most: u64) {
        let start = Instant::now();
        let mut state = self.state();
        while let Some(follower) = state.follower
            && !state.is_stuck
            && offset.0.saturating_sub(follower.0) > most
            && start.elapsed() < self.patience * PATIENCES
        {
            let is_there = |state: &mut State| state.follower == Some(follower);
            let waited = self
                .moved
                .wait_timeout_while(state, self.patience, is_there);
            let (woken, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.is_stuck |= timeout.timed_out();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leash(patience: Duration) -> Leash {
        Leash {
            patience,
            ..Leash::default()
        }
    }

    #[test]
    fn a_scan_that_nobody_follows_waits_for_no_one() {
        let leash = Leash::default();
        leash.wait(Plain(1000), 10);
        leash.follow(Plain(5));
        leash.let_go();
        leash.wait(Plain(1000), 10);
        assert!(!leash.state().is_stuck);
    }

    #[test]
    fn a_scan_waits_until_its_follower_is_near() {
        let leash = leash(Duration::from_mins(1));
        leash.follow(Plain(0));
        leash.wait(Plain(10), 10);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for offset in (0..=90).step_by(10) {
                    leash.follow(Plain(offset));
                    std::thread::sleep(Duration::from_millis(2));
                }
            });
            leash.wait(Plain(100), 10);
            assert_eq!(leash.state().follower, Some(Plain(90)));
        });
    }

    #[test]
    fn a_follower_that_does_not_move_is_waited_for_once() {
        let mut leash = leash(Duration::from_millis(1));
        leash.follow(Plain(0));
        leash.wait(Plain(100), 10);
        assert!(leash.state().is_stuck);
        leash.patience = Duration::from_hours(1);
        leash.wait(Plain(1000), 10);
        leash.follow(Plain(1));
        assert!(!leash.state().is_stuck, "it moves");
    }

    #[test]
    fn a_follower_never_goes_back() {
        let leash = Leash::default();
        leash.follow(Plain(50));
        leash.follow(Plain(20));
        assert_eq!(leash.state().follower, Some(Plain(50)));
    }
}
