//! The last failed reads, for `status`. Logs repeated errors once, not for every page.

use std::collections::VecDeque;
use std::error::Error;
use std::time::SystemTime;

use crate::base::error_chain::error_chain;
use crate::base::sync::Mutex;

/// Maximum number of errors kept, so that the status fits a screen.
const MAX_RECENT_ERRORS: usize = 16;

/// A failed read, and how often it was repeated in a row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecentError {
    /// Time of the last failure.
    pub last: SystemTime,
    /// Number of consecutive failures.
    pub count: u64,
    /// The file's path in the archive.
    pub path: String,
    /// The error and its causes.
    pub reason: String,
}

#[derive(Debug, Default)]
pub(super) struct RecentErrors {
    recent: Mutex<VecDeque<RecentError>>,
}

impl RecentErrors {
    pub(super) fn record(&self, path: &str, error: &(dyn Error + 'static)) {
        let reason = error_chain(error);
        let mut recent = self.recent.lock();
        let last = SystemTime::now();
        if let Some(same) = recent
            .back_mut()
            .filter(|back| back.path == path && back.reason == reason)
        {
            same.count += 1;
            same.last = last;
            return;
        }
        if recent.len() == MAX_RECENT_ERRORS {
            recent.pop_front();
        }
        recent.push_back(RecentError {
            last,
            count: 1,
            path: path.to_owned(),
            reason: reason.clone(),
        });
        // Release the lock first, because logging may be slow.
        drop(recent);
        tracing::error!(path, reason, "read failed");
    }

    pub(super) fn recent(&self) -> Vec<RecentError> {
        let recent = self.recent.lock();
        recent.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    // Promises: error-reported
    #[test]
    fn repeated_error_is_counted_and_oldest_is_dropped() {
        let recent_errors = RecentErrors::default();
        for number in 0..=MAX_RECENT_ERRORS {
            recent_errors.record(&format!("file {number}"), &io::Error::other("cut"));
        }
        recent_errors.record(
            &format!("file {MAX_RECENT_ERRORS}"),
            &io::Error::other("cut"),
        );
        let recent = recent_errors.recent();
        assert_eq!(recent.len(), MAX_RECENT_ERRORS);
        assert_eq!(recent.first().map(|f| f.path.as_str()), Some("file 1"));
        assert_eq!(recent.last().map(|f| f.count), Some(2));
    }
}
