//! Progress and control of a read in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Notify;

use super::network::Content;
use crate::base::sync::Mutex;

/// Whether the reads of a scan continue past their deadline while the source is unreachable.
///
/// A mount enables it as soon as it serves callers, also for reads in flight, to work again when the network
/// is back. HTTP sources also take it as the sign that a read belongs to a scan, whose progress they count.
#[derive(Clone, Debug, Default)]
pub struct RetryForever(Arc<AtomicBool>);

impl RetryForever {
    /// Makes reads continue past their deadline.
    pub fn enable(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether reads continue past their deadline.
    pub fn is_enabled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Unread rest of a response, which the next read continues. Until then the server is blocked. Dropping this
/// ends the response.
#[derive(Debug, Default)]
pub struct Continuation(Mutex<Option<ResponseRest>>);

#[derive(Debug)]
pub(super) struct ResponseRest {
    /// Identity of the source. Two sources have different bytes at one offset.
    pub(super) source: Arc<()>,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) buffered: Bytes,
    pub(super) content: Content,
}

impl Continuation {
    /// Takes the stored rest of `source`, if it begins at `start` or slightly before.
    pub(super) fn take(&self, source: &Arc<()>, start: u64) -> Option<ResponseRest> {
        let is_near = |rest: &mut ResponseRest| {
            let gap = start.checked_sub(rest.start);
            let is_near = rest.end > start && gap.is_some_and(|gap| gap <= MAX_SKIPPED_GAP);
            is_near && Arc::ptr_eq(&rest.source, source)
        };
        self.0.lock().take_if(is_near)
    }

    pub(super) fn put(&self, rest: ResponseRest) {
        *self.0.lock() = Some(rest);
    }

    pub(super) fn clear(&self) {
        *self.0.lock() = None;
    }
}

/// Maximum number of bytes to skip instead of sending another request.
const MAX_SKIPPED_GAP: u64 = 1 << 20;

/// Progress and control of a single read.
#[derive(Debug, Default)]
pub struct ReadHandle {
    /// Whether it fetches a chunk of a stream ahead. Its timeout then starts when its turn begins.
    pub(super) is_stream_read: bool,
    retry_forever: RetryForever,
    pub(super) continuation: Option<(u64, Arc<Continuation>)>,
    received: AtomicU64,
    /// Bytes before the buffer that were received, each counted once.
    skipped: AtomicU64,
    state: Mutex<State>,
    command_given: Notify,
}

#[derive(Debug, Default)]
struct State {
    latency: Option<Duration>,
    cost: Option<Duration>,
    /// Whether a request is in flight. Only such a request can be cut.
    is_in_flight: bool,
    command: Option<ReadCommand>,
}

/// Command that interrupts a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReadCommand {
    /// Drop the request in flight, and request the missing bytes again.
    Cut,
    /// Return the bytes received so far.
    Stop,
}

impl ReadHandle {
    /// Creates the handle of a read that a stream sends ahead.
    pub fn for_stream(retry_forever: RetryForever) -> Self {
        Self {
            is_stream_read: true,
            retry_forever,
            ..Self::default()
        }
    }

    /// Announces that reads with the same `continuation` want `bytes` more. One request may ask for all.
    #[must_use]
    pub fn with_continuation(self, bytes: u64, continuation: Arc<Continuation>) -> Self {
        Self {
            continuation: Some((bytes, continuation)),
            ..self
        }
    }

    /// Returns the handle of a read of the same kind in a part of the source.
    pub(super) fn for_part(&self) -> Self {
        Self {
            is_stream_read: self.is_stream_read,
            retry_forever: self.retry_forever.clone(),
            ..Self::default()
        }
    }

    pub(super) fn is_in_flight(&self) -> bool {
        self.state.lock().is_in_flight
    }

    /// Whether the read continues past its deadline.
    pub fn retries_forever(&self) -> bool {
        self.retry_forever.is_enabled()
    }

    /// Bytes received at the front of the buffer.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Latency of the last request; `None` before its answer, and if there is no server.
    pub fn latency(&self) -> Option<Duration> {
        self.state.lock().latency
    }

    /// The part of [`latency`](Self::latency) that is not network time.
    pub fn cost(&self) -> Option<Duration> {
        self.state.lock().cost
    }

    /// Makes the read drop the request in flight, if any, and request the rest again.
    pub fn cut(&self) {
        let mut state = self.state.lock();
        if state.is_in_flight {
            state.command = state.command.or(Some(ReadCommand::Cut));
            self.command_given.notify_one();
        }
    }

    /// Makes the read return what it has, at least the [`received`](Self::received) bytes.
    pub fn stop(&self) {
        self.state.lock().command = Some(ReadCommand::Stop);
        self.command_given.notify_one();
    }

    pub(super) fn set_skipped(&self, len: u64) {
        self.skipped.fetch_max(len, Ordering::Relaxed);
    }

    /// Bytes received in the buffer and before it, which extend the deadline.
    pub(super) fn progress(&self) -> u64 {
        let skipped = self.skipped.load(Ordering::Relaxed);
        self.received().saturating_add(skipped)
    }

    pub(super) fn set_received(&self, len: usize) {
        self.received.store(len as u64, Ordering::Relaxed);
    }

    /// Records an answer after `latency`, of which `cost` is not network time.
    pub(super) fn set_latency(&self, latency: Duration, cost: Duration) {
        let mut state = self.state.lock();
        (state.latency, state.cost) = (Some(latency), Some(cost));
    }

    /// Sets whether a request is in flight, and discards a cut of the previous one.
    pub(super) fn set_in_flight(&self, is_in_flight: bool) {
        let mut state = self.state.lock();
        state.is_in_flight = is_in_flight;
        state.command = state.command.filter(|&command| command != ReadCommand::Cut);
    }

    /// Waits for a command. Cancel safe.
    pub(super) async fn next_command(&self) -> ReadCommand {
        loop {
            let command = self.state.lock().command;
            if let Some(command) = command {
                return command;
            }
            self.command_given.notified().await;
        }
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
        read_handle.set_in_flight(true);
        read_handle.cut();
        assert_eq!(command(&read_handle), Some(ReadCommand::Cut));
        read_handle.set_in_flight(true);
        assert_eq!(command(&read_handle), None);
        read_handle.set_in_flight(false);
        read_handle.cut();
        assert_eq!(command(&read_handle), None);
    }

    #[test]
    fn stop_applies_to_the_whole_read() {
        let read_handle = ReadHandle::default();
        read_handle.stop();
        read_handle.set_in_flight(true);
        read_handle.cut();
        assert_eq!(command(&read_handle), Some(ReadCommand::Stop));
    }
}
