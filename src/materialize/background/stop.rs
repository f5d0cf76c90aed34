//! The end, and waiting for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Set once, seen by all, and waited for.
#[derive(Debug, Default)]
pub(super) struct Stop {
    set: AtomicBool,
    lock: Mutex<()>,
    told: Condvar,
}

impl Stop {
    /// Ends everything.
    pub(super) fn set(&self) {
        self.set.store(true, Ordering::SeqCst);
        // Who has seen it unset is waiting by now, or has the lock.
        drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.told.notify_all();
    }

    /// Whether everything ends.
    pub(super) fn is_set(&self) -> bool {
        self.set.load(Ordering::SeqCst)
    }

    /// Waits for the end, at most so long; whether it came.
    pub(super) fn wait(&self, at_most: Duration) -> bool {
        let guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let is_unset = |(): &mut ()| !self.is_set();
        let waited = self.told.wait_timeout_while(guard, at_most, is_unset);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        self.is_set()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::base::thread::Thread;

    #[test]
    fn who_waits_is_woken_by_the_end_and_by_nothing_else() {
        let stop = Arc::new(Stop::default());
        assert!(!stop.wait(Duration::from_millis(1)) && !stop.is_set());
        let waiting = Arc::clone(&stop);
        let waiter = Thread::spawn("test", move || waiting.wait(Duration::from_hours(1)));
        stop.set();
        assert!(waiter.expect("a thread").join());
        assert!(stop.wait(Duration::from_hours(1)));
    }
}
