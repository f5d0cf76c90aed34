//! How much the reader of a stream has read, and how long it has waited.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::base::extent::Packed;

/// Shared by the reader, who waits, and the driver, who wants to know.
#[derive(Debug, Default)]
pub(super) struct Demand {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Where the last request ends.
    requested_end: u64,
    /// There must be no other request.
    is_stopped: bool,
    read: u64,
    /// All waits that are over.
    waited: Duration,
    /// Since when there is another one.
    waiting_since: Option<Instant>,
}

impl Demand {
    /// The reader waits as long as `wait` takes.
    pub(super) fn time_wait<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.lock().waiting_since = Some(Instant::now());
        self.changed.notify_one();
        let result = wait();
        let mut state = self.lock();
        if let Some(waiting_since) = state.waiting_since.take() {
            state.waited += waiting_since.elapsed();
        }
        result
    }

    /// Everything before `end` is asked for now; false when nothing more may be.
    pub(super) fn request_until(&self, end: Packed) -> bool {
        let mut state = self.lock();
        if !state.is_stopped {
            state.requested_end = end.0;
        }
        !state.is_stopped
    }

    /// Where what is not asked for begins; 0 before the first request.
    pub(super) fn requested_end(&self) -> Packed {
        Packed(self.lock().requested_end)
    }

    /// As [`Demand::requested_end`], and nothing more will be.
    pub(super) fn stop_requesting(&self) -> Packed {
        let mut state = self.lock();
        state.is_stopped = true;
        Packed(state.requested_end)
    }

    /// The reader got `len` bytes.
    pub(super) fn record_read(&self, len: u64) {
        self.lock().read += len;
        self.changed.notify_one();
    }

    /// Bytes that the reader got, and how long it has waited, up to now.
    pub(super) fn read_and_waited(&self) -> (u64, Duration) {
        let state = self.lock();
        let wait = state
            .waiting_since
            .map_or(Duration::ZERO, |waiting_since| waiting_since.elapsed());
        (state.read, state.waited + wait)
    }

    /// Whether the reader waits at this moment.
    pub(super) fn is_waiting(&self) -> bool {
        self.lock().waiting_since.is_some()
    }

    /// Returns when a wait has begun, or something was read, since the last call.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(super) async fn wait_for_change(&self) {
        self.changed.notified().await;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
