//! How far a scan may be ahead of who stores what it passes.
//!
//! What leaves memory before it is stored is made again later, or read back from disk, and handed
//! over by itself: that costs more than the scan gains by running on. But the scan is what everyone
//! waits for, so it never waits for a follower that does not move.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::base::extent::Plain;

/// How long a scan waits for a follower that does not move: it may be waiting for a page that
/// someone reads who waits for the scan.
const PATIENCE: Duration = Duration::from_millis(50);

/// Between one scan and one follower.
#[derive(Debug, Default)]
pub(super) struct Leash {
    state: Mutex<State>,
    moved: Condvar,
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
        let mut state = self.state();
        while let Some(follower) = state.follower
            && !state.is_stuck
            && offset.0.saturating_sub(follower.0) > most
        {
            let is_there = |state: &mut State| state.follower == Some(follower);
            let waited = self.moved.wait_timeout_while(state, PATIENCE, is_there);
            let (woken, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.is_stuck |= timeout.timed_out();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
