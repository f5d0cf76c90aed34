//! Progress, problems and cancellation of a background copy.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::directory::CopyDirectory;
use crate::base::error_chain::error_chain;
use crate::base::sync::{Condvar, Mutex};

/// State of a background copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CopyState {
    /// The index is not complete yet.
    #[default]
    Waiting,
    /// Files are being written, or verified after a restart.
    Writing,
    /// The source is unreachable, and the copy retries.
    Retrying,
    /// All entries are complete.
    Complete,
    /// The copy has ended, but some entries are missing.
    Incomplete,
    /// The copy has stopped, because the directory or the source failed.
    Stopped,
}

/// Progress of a background copy at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BackgroundCopyProgress {
    /// State of the copy.
    pub state: CopyState,
    /// Number of complete regular files.
    pub files: u64,
    /// Number of all regular files; 0 before the index is complete.
    pub total_files: u64,
    /// Stored bytes of complete files.
    pub bytes: u64,
    /// Stored bytes of all files.
    pub total_bytes: u64,
    /// Number of entries that could not be written, or that another process changed.
    pub failures: u64,
    /// The latest failure, or the reason why the copy waits or has stopped.
    pub note: Option<String>,
}

#[derive(Debug)]
pub(super) struct CopyStatus {
    pub(super) directory: CopyDirectory,
    pub(super) cancel_token: CancelToken,
    /// Without the numbers of files and bytes, which the task counts.
    pub(super) report: Mutex<BackgroundCopyProgress>,
}

impl CopyStatus {
    pub(super) fn set_state(&self, state: CopyState, note: Option<String>) {
        let mut report = self.report.lock();
        if report.state != CopyState::Stopped {
            report.state = state;
            report.note = note.or(report.note.take().filter(|_| report.failures > 0));
        }
    }

    pub(super) fn record_failure(&self, what: Option<String>) {
        let mut report = self.report.lock();
        report.failures += 1;
        if let Some(what) = what {
            tracing::warn!(what, "missing from the copy");
            // The reason for stopping stays the final note.
            if report.state != CopyState::Stopped {
                report.note = Some(what);
            }
        }
    }

    /// Stops the copy and reports the error once.
    pub(super) fn halt(&self, error: &(dyn std::error::Error + 'static)) {
        let mut report = self.report.lock();
        if report.state == CopyState::Stopped {
            return;
        }
        let why = error_chain(error);
        let directory = self.directory.path.display();
        tracing::error!(%directory, why, "the copy is stopped");
        report.state = CopyState::Stopped;
        report.note = Some(why);
    }

    /// Reports the end of the copy. `errors` counts all entries, directories included.
    pub(super) fn finish(&self, errors: u64) {
        let mut report = self.report.lock();
        if report.state == CopyState::Stopped {
            return;
        }
        report.failures = report.failures.max(errors);
        report.state = if report.failures == 0 {
            report.note = None;
            CopyState::Complete
        } else {
            CopyState::Incomplete
        };
        tracing::info!(directory = %self.directory.path.display(), state = ?report.state, "the copy has ended");
    }
}

/// A cancellation flag that threads can wait for.
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
