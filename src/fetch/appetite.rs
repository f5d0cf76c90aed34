//! How much the reader of a stream has read, and how long it has waited.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::base::extent::Packed;

/// Shared by the reader, who waits, and the driver, who wants to know.
#[derive(Debug, Default)]
pub(super) struct Appetite {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Where the last request ends.
    asked: u64,
    /// There must be no other request.
    is_sated: bool,
    read: u64,
    /// All waits that are over.
    waited: Duration,
    /// Since when there is another one.
    since: Option<Instant>,
}

impl Appetite {
    /// The reader waits as long as `wait` takes.
    pub(super) fn waiting<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.lock().since = Some(Instant::now());
        self.changed.notify_one();
        let came = wait();
        let mut state = self.lock();
        if let Some(since) = state.since.take() {
            state.waited += since.elapsed();
        }
        came
    }

    /// Everything before `end` is asked for now; false when nothing more may be.
    pub(super) fn asks(&self, end: Packed) -> bool {
        let mut state = self.lock();
        if !state.is_sated {
            state.asked = end.0;
        }
        !state.is_sated
    }

    /// Where what is not asked for begins; 0 before the first request.
    pub(super) fn asked(&self) -> Packed {
        Packed(self.lock().asked)
    }

    /// As [`Appetite::asked`], and nothing more will be.
    pub(super) fn sate(&self) -> Packed {
        let mut state = self.lock();
        state.is_sated = true;
        Packed(state.asked)
    }

    /// The reader got `len` bytes.
    pub(super) fn took(&self, len: u64) {
        self.lock().read += len;
        self.changed.notify_one();
    }

    /// Bytes that the reader got, and how long it has waited, up to now.
    pub(super) fn sums(&self) -> (u64, Duration) {
        let state = self.lock();
        let wait = state.since.map_or(Duration::ZERO, |since| since.elapsed());
        (state.read, state.waited + wait)
    }

    /// Whether the reader waits at this moment.
    pub(super) fn is_waiting(&self) -> bool {
        self.lock().since.is_some()
    }

    /// Returns when a wait has begun, or something was read, since the last call.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(super) async fn changes(&self) {
        self.changed.notified().await;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
