//! What the log says of a source that cannot be read while nobody gives up.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::source::Error;

/// Tells when the first read goes on in vain, and when one goes well after that; not what all others
/// meet with meanwhile.
#[derive(Debug, Default)]
pub(super) struct OutageLog(AtomicBool);

impl OutageLog {
    /// A read has come to `error`, and asks again after `pause`.
    pub(super) fn report_failure(&self, error: &Error, pause: Duration) {
        if !self.0.swap(true, Ordering::Relaxed) {
            let seconds = pause.as_secs();
            tracing::warn!("{error}; it is asked again after {seconds} s, and on and on");
        }
    }

    /// A read of `location` went well.
    pub(super) fn report_recovery(&self, location: &str) {
        if self.0.load(Ordering::Relaxed) && self.0.swap(false, Ordering::Relaxed) {
            tracing::info!("{location} can be read again");
        }
    }
}
