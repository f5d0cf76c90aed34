//! A read seen from outside.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Notify;

use super::http::Content;

/// Whether reads go on beyond their deadline when a source cannot be reached: those of a mount that
/// answers, which is there when the network comes back. Can be decided while they are under way.
#[derive(Clone, Debug, Default)]
pub struct RetryForever(Arc<AtomicBool>);

impl RetryForever {
    /// From now on they do.
    pub fn enable(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether they do.
    pub fn is_enabled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The rest of an answer to a request that reached beyond the buffer of its read, for the next read to go
/// on with; the server is kept waiting meanwhile, and hears nothing more when this is dropped.
#[derive(Debug, Default)]
pub struct Continuation(Mutex<Option<ResponseRest>>);

/// What is still to come of an answer.
#[derive(Debug)]
pub(super) struct ResponseRest {
    /// Where its first byte lies in the source, and where it ends.
    pub(super) start: u64,
    pub(super) end: u64,
    /// Of that, what has come already.
    pub(super) buffered: Bytes,
    pub(super) content: Content,
}

impl Continuation {
    /// The rest that begins at `start`, or a little before, if that is kept.
    pub(super) fn take(&self, start: u64) -> Option<ResponseRest> {
        let is_near = |rest: &mut ResponseRest| {
            let gap = start.checked_sub(rest.start);
            rest.end > start && gap.is_some_and(|gap| gap <= MAX_SKIPPED_GAP)
        };
        self.lock().take_if(is_near)
    }

    /// Keeps `rest` for the next read.
    pub(super) fn put(&self, rest: ResponseRest) {
        *self.lock() = Some(rest);
    }

    /// Drops what is kept.
    pub(super) fn clear(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<ResponseRest>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes that are read and dropped rather than that another request is sent.
const MAX_SKIPPED_GAP: u64 = 1 << 20;

/// How far a read is, and the means to interfere with it; for a single read.
#[derive(Debug, Default)]
pub struct ReadHandle {
    /// Whether it is one of many that were asked for ahead, and wait for each other.
    is_prefetch: bool,
    retry_forever: RetryForever,
    /// The bytes behind the buffer that are read next, and where the answer for them is kept.
    continuation: Option<(u64, Arc<Continuation>)>,
    received: AtomicU64,
    state: Mutex<State>,
    command_given: Notify,
}

#[derive(Debug, Default)]
struct State {
    latency: Option<Duration>,
    cost: Option<Duration>,
    /// Whether a request is under way, which alone can be cut.
    is_in_flight: bool,
    command: Option<ReadCommand>,
}

/// What the read should do instead of going on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReadCommand {
    /// Drop the request that is under way, and ask anew for what lacks.
    Cut,
    /// Return what is there.
    Stop,
}

impl ReadHandle {
    /// Of one of many reads that were asked for ahead, which goes on beyond its deadline as
    /// `retry_forever` says.
    pub fn prefetch(retry_forever: RetryForever) -> Self {
        Self {
            is_prefetch: true,
            retry_forever,
            ..Self::default()
        }
    }

    /// So many bytes behind its buffer are wanted next, by reads with the same `continuation`, one after
    /// the other: one request may ask for all of them.
    #[must_use]
    pub fn with_continuation(self, bytes: u64, continuation: Arc<Continuation>) -> Self {
        Self {
            continuation: Some((bytes, continuation)),
            ..self
        }
    }

    /// As told to [`with_continuation`](Self::with_continuation).
    pub(super) fn continuation(&self) -> Option<&(u64, Arc<Continuation>)> {
        self.continuation.as_ref()
    }

    /// Whether it is one of many that were asked for ahead: then it has all its time when its turn comes.
    pub fn is_prefetch(&self) -> bool {
        self.is_prefetch
    }

    /// Whether the read goes on beyond its deadline.
    pub fn retries_forever(&self) -> bool {
        self.retry_forever.is_enabled()
    }

    /// Bytes at the front of the buffer that are there.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// From the last request until it was answered; `None` before, and where nobody is asked.
    pub fn latency(&self) -> Option<Duration> {
        self.lock().latency
    }

    /// Of [`latency`](Self::latency), what was not spent on the way.
    pub fn cost(&self) -> Option<Duration> {
        self.lock().cost
    }

    /// Makes the read drop the request that is under way, if any, and ask for the rest anew.
    pub fn cut(&self) {
        let mut state = self.lock();
        if state.is_in_flight {
            state.command = state.command.or(Some(ReadCommand::Cut));
            self.command_given.notify_one();
        }
    }

    /// Makes the read return what it has, at least the [`received`](Self::received) bytes.
    pub fn stop(&self) {
        self.lock().command = Some(ReadCommand::Stop);
        self.command_given.notify_one();
    }

    /// So many bytes are there now.
    pub(super) fn set_received(&self, len: usize) {
        self.received.store(len as u64, Ordering::Relaxed);
    }

    /// A request was answered after `latency`, of which `cost` was not spent on the way.
    pub(super) fn set_latency(&self, latency: Duration, cost: Duration) {
        let mut state = self.lock();
        (state.latency, state.cost) = (Some(latency), Some(cost));
    }

    /// A request begins.
    pub(super) fn request_started(&self) {
        self.set_in_flight(true);
    }

    /// No request is under way until the next one begins.
    pub(super) fn request_ended(&self) {
        self.set_in_flight(false);
    }

    /// Sets whether a request is under way; an order to cut was for the one before.
    fn set_in_flight(&self, is_in_flight: bool) {
        let mut state = self.lock();
        state.is_in_flight = is_in_flight;
        state.command = state.command.filter(|&command| command != ReadCommand::Cut);
    }

    /// Waits for an order.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(super) async fn next_command(&self) -> ReadCommand {
        loop {
            let command = self.lock().command;
            if let Some(command) = command {
                return command;
            }
            self.command_given.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn command(read_handle: &ReadHandle) -> Option<ReadCommand> {
        read_handle.next_command().now_or_never()
    }

    #[test]
    fn cut_applies_to_the_request_in_flight() {
        let read_handle = ReadHandle::default();
        read_handle.cut();
        assert_eq!(command(&read_handle), None);
        read_handle.request_started();
        read_handle.cut();
        assert_eq!(command(&read_handle), Some(ReadCommand::Cut));
        read_handle.request_started();
        assert_eq!(command(&read_handle), None);
        read_handle.request_ended();
        read_handle.cut();
        assert_eq!(command(&read_handle), None);
    }

    #[test]
    fn stop_applies_to_the_whole_read() {
        let read_handle = ReadHandle::default();
        read_handle.stop();
        read_handle.request_started();
        read_handle.cut();
        assert_eq!(command(&read_handle), Some(ReadCommand::Stop));
    }
}
