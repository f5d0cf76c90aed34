//! The end, and waiting for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Set once, seen by all, and waited for.
#[derive(Debug, Default)]
pub(super) struct CancelToken {
    cancelled: AtomicBool,
    lock: Mutex<()>,
    condvar: Condvar,
}

impl CancelToken {
    /// Ends everything.
    pub(super) fn cancel(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
        // Who has seen it unset is waiting by now, or has the lock.
        drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.condvar.notify_all();
    }

    /// Whether everything ends.
    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::SeqCst)
    }

    /// Waits for the end, at most so long; whether it came.
    pub(super) fn wait_timeout(&self, timeout: Duration) -> bool {
        let guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let is_active = |(): &mut ()| !self.is_cancelled();
        let waited = self.condvar.wait_timeout_while(guard, timeout, is_active);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        self.is_cancelled()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::base::thread::Thread;

    #[test]
    fn cancel_wakes_waiters() {
        let token = Arc::new(CancelToken::default());
        assert!(!token.wait_timeout(Duration::from_millis(1)) && !token.is_cancelled());
        let waiting = Arc::clone(&token);
        let waiter = Thread::spawn("test", move || {
            waiting.wait_timeout(Duration::from_hours(1))
        });
        token.cancel();
        assert!(waiter.expect("a thread").join());
        assert!(token.wait_timeout(Duration::from_hours(1)));
    }
}
