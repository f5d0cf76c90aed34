//! Log of outages while reads are retried without limit.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::source::Error;

/// Logs the first failed read and the first success after it. Failures in between are not logged.
#[derive(Debug, Default)]
pub(super) struct OutageLog(AtomicBool);

impl OutageLog {
    pub(super) fn report_failure(&self, error: &Error, pause: Duration) {
        if !self.0.swap(true, Ordering::Relaxed) {
            let seconds = pause.as_secs();
            tracing::warn!("{error}; retrying in {seconds} s and without limit");
        }
    }

    pub(super) fn report_recovery(&self, location: &str) {
        if self.0.load(Ordering::Relaxed) && self.0.swap(false, Ordering::Relaxed) {
            tracing::info!("{location} can be read again");
        }
    }
}
