//! Bytes that a stream's reader has read, and the time it has waited.

use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::base::extent::Packed;
use crate::base::sync::Mutex;

/// Shared by the reader, which waits, and the scheduler.
#[derive(Debug, Default)]
pub(super) struct Demand {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    requested_end: u64,
    is_stopped: bool,
    read: u64,
    waited: Duration,
    waiting_since: Option<Instant>,
}

impl Demand {
    pub(super) fn time_wait<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.state.lock().waiting_since = Some(Instant::now());
        self.changed.notify_one();
        let result = wait();
        let mut state = self.state.lock();
        if let Some(waiting_since) = state.waiting_since.take() {
            state.waited += waiting_since.elapsed();
        }
        result
    }

    /// Records that everything before `end` is requested; false if requests are stopped.
    pub(super) fn request_until(&self, end: Packed) -> bool {
        let mut state = self.state.lock();
        if !state.is_stopped {
            state.requested_end = end.0;
        }
        !state.is_stopped
    }

    /// End of the requested bytes; 0 before the first request.
    pub(super) fn requested_end(&self) -> Packed {
        Packed(self.state.lock().requested_end)
    }

    /// Stops further requests, and returns [`Demand::requested_end`].
    pub(super) fn stop_requesting(&self) -> Packed {
        let mut state = self.state.lock();
        state.is_stopped = true;
        Packed(state.requested_end)
    }

    pub(super) fn record_read(&self, len: u64) {
        self.state.lock().read += len;
        self.changed.notify_one();
    }

    pub(super) fn read_and_waited(&self) -> (u64, Duration) {
        let state = self.state.lock();
        let wait = state
            .waiting_since
            .map_or(Duration::ZERO, |waiting_since| waiting_since.elapsed());
        (state.read, state.waited + wait)
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.state.lock().waiting_since.is_some()
    }

    /// Waits until the reader begins a wait or reads something since the last call. Cancel safe.
    pub(super) async fn wait_for_change(&self) {
        self.changed.notified().await;
    }
}
