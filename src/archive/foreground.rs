//! Whether someone waits for bytes; who works ahead lets them go first.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Counts reads that make spans.
#[derive(Debug, Default)]
pub(super) struct Foreground {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    active: u32,
    is_over: bool,
}

/// A read that makes a span, until dropped.
#[derive(Debug)]
pub(super) struct Busy<'a>(&'a Foreground);

impl Foreground {
    /// Counts a read.
    pub(super) fn enter(&self) -> Busy<'_> {
        self.state().active += 1;
        Busy(self)
    }

    /// Waits until no read makes a span; false when the archive is closed instead.
    pub(super) fn await_idle(&self) -> bool {
        let mut state = self.state();
        while state.active > 0 && !state.is_over {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        !state.is_over
    }

    /// Waits for `time`, or less; false when the archive is closed.
    pub(super) fn pause(&self, time: Duration) -> bool {
        let state = self.state();
        if state.is_over {
            return false;
        }
        let waited = self.changed.wait_timeout(state, time);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !state.is_over
    }

    /// Ends all waiting, now and later.
    pub(super) fn close(&self) {
        self.state().is_over = true;
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.active -= 1;
        if state.active == 0 {
            self.0.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn who_works_ahead_waits_for_reads() {
        let foreground = Foreground::default();
        assert!(foreground.await_idle());
        let (one, two) = (foreground.enter(), foreground.enter());
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                assert!(foreground.await_idle());
                assert!(ended.load(Ordering::SeqCst));
            });
            drop(one);
            ended.store(true, Ordering::SeqCst);
            drop(two);
            waiter.join().expect("woken");
        });
    }

    #[test]
    fn a_closed_archive_lets_no_one_wait() {
        let foreground = Foreground::default();
        let _busy = foreground.enter();
        foreground.close();
        assert!(!foreground.await_idle());
        assert!(!foreground.pause(Duration::from_hours(1)));
    }
}
