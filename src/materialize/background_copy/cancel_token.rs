//! Cancellation flag that threads can wait for.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::base::sync::{Condvar, Mutex};

/// A flag that is set once.
#[derive(Debug, Default)]
pub(super) struct CancelToken {
    cancelled: AtomicBool,
    lock: Mutex<()>,
    condvar: Condvar,
}

impl CancelToken {
    pub(super) fn cancel(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
        // A thread that read the flag as unset now waits, or still holds the lock.
        drop(self.lock.lock());
        self.condvar.notify_all();
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::SeqCst)
    }

    /// Waits for cancellation, at most for `timeout`. Returns whether the flag is set.
    pub(super) fn wait_timeout(&self, timeout: Duration) -> bool {
        let guard = self.lock.lock();
        let is_active = |(): &mut ()| !self.is_cancelled();
        drop(self.condvar.wait_timeout_while(guard, timeout, is_active));
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
