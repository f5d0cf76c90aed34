//! Progress and problems of a background copy.

use super::directory::CopyDirectory;
use crate::base::cancel_token::CancelToken;
use crate::base::error_chain::error_chain;
use crate::base::sync::Mutex;

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
