//! A flag that ends work early.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use super::sync::{Condvar, Mutex};

/// A cancellation flag that threads and tasks can wait for. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// Cancels this one, too.
    parent: Option<CancelToken>,
    is_cancelled: AtomicBool,
    lock: Mutex<()>,
    threads: Condvar,
    tasks: Notify,
}

impl CancelToken {
    /// A flag that counts as set when it or this one is set. Only tasks can wait for it.
    pub(crate) fn child(&self) -> Self {
        Self(Arc::new(Shared {
            parent: Some(self.clone()),
            ..Shared::default()
        }))
    }

    /// Sets the flag, for ever.
    pub fn cancel(&self) {
        let shared = &*self.0;
        shared.is_cancelled.store(true, Ordering::SeqCst);
        // A thread that read the flag as unset now waits, or still holds the lock.
        drop(shared.lock.lock());
        shared.threads.notify_all();
        shared.tasks.notify_waiters();
    }

    /// Whether the flag is set.
    pub fn is_cancelled(&self) -> bool {
        let is_parent_cancelled = || self.0.parent.as_ref().is_some_and(Self::is_cancelled);
        self.0.is_cancelled.load(Ordering::SeqCst) || is_parent_cancelled()
    }

    /// Waits on a thread until the flag is set, at most for `timeout`. Returns whether it is set.
    pub(crate) fn wait_timeout(&self, timeout: Duration) -> bool {
        let guard = self.0.lock.lock();
        let is_active = |(): &mut ()| !self.is_cancelled();
        let threads = &self.0.threads;
        drop(threads.wait_timeout_while(guard, timeout, is_active));
        self.is_cancelled()
    }

    /// Waits in a task until the flag is set.
    pub(crate) async fn cancelled(&self) {
        // A flag that is set after this wakes them.
        let told = self.0.tasks.notified();
        let parent = self.0.parent.as_ref();
        let parent_told = parent.map(|parent| parent.0.tasks.notified());
        if self.is_cancelled() {
            return;
        }
        match parent_told {
            None => told.await,
            Some(parent_told) => tokio::select! {
                () = told => {}
                () = parent_told => {}
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::thread::Thread;

    #[test]
    fn cancel_wakes_waiters() {
        let token = CancelToken::default();
        assert!(!token.wait_timeout(Duration::from_millis(1)) && !token.is_cancelled());
        let waiting = token.clone();
        let waiter = Thread::spawn("test", move || {
            waiting.wait_timeout(Duration::from_hours(1))
        });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .build();
        let runtime = runtime.expect("a runtime");
        let waiting = token.clone();
        let task = runtime.spawn(async move { waiting.cancelled().await });
        let child = token.child();
        let waiting = child.clone();
        let child_task = runtime.spawn(async move { waiting.cancelled().await });
        let other = token.child();
        other.cancel();
        runtime.block_on(other.cancelled());
        assert!(!token.is_cancelled() && !child.is_cancelled() && other.is_cancelled());
        token.cancel();
        assert!(child.is_cancelled());
        runtime.block_on(child_task).expect("told");
        assert!(waiter.expect("a thread").join());
        runtime.block_on(task).expect("told");
        runtime.block_on(token.cancelled());
    }
}
