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
pub struct Persistence(Arc<AtomicBool>);

impl Persistence {
    /// From now on they do.
    pub fn begin(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether they do.
    pub fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The rest of an answer to a request that reached beyond the buffer of its read, for the next read to go
/// on with; the server is kept waiting meanwhile, and hears nothing more when this is dropped.
#[derive(Debug, Default)]
pub struct Continuation(Mutex<Option<Rest>>);

/// What is still to come of an answer.
#[derive(Debug)]
pub(super) struct Rest {
    /// Where its first byte lies in the source, and where it ends.
    pub(super) start: u64,
    pub(super) end: u64,
    /// Of that, what has come already.
    pub(super) came: Bytes,
    pub(super) content: Content,
}

impl Continuation {
    /// The rest that begins at `start`, or a little before, if that is kept.
    pub(super) fn take(&self, start: u64) -> Option<Rest> {
        let is_near = |rest: &mut Rest| {
            let gap = start.checked_sub(rest.start);
            rest.end > start && gap.is_some_and(|gap| gap <= LONGEST_GAP)
        };
        self.lock().take_if(is_near)
    }

    /// Keeps `rest` for the next read.
    pub(super) fn put(&self, rest: Rest) {
        *self.lock() = Some(rest);
    }

    /// Drops what is kept.
    pub(super) fn clear(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<Rest>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes that are read and dropped rather than that another request is sent.
const LONGEST_GAP: u64 = 1 << 20;

/// How far a read is, and the means to interfere with it; for a single read.
#[derive(Debug, Default)]
pub struct Watch {
    /// Whether it is one of many that were asked for ahead, and wait for each other.
    is_ahead: bool,
    persistence: Persistence,
    /// The bytes behind the buffer that are read next, and where the answer for them is kept.
    sequel: Option<(u64, Arc<Continuation>)>,
    received: AtomicU64,
    state: Mutex<State>,
    ordered: Notify,
}

#[derive(Debug, Default)]
struct State {
    latency: Option<Duration>,
    cost: Option<Duration>,
    /// Whether a request is under way, which alone can be cut.
    is_asking: bool,
    order: Option<Order>,
}

/// What the read should do instead of going on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Order {
    /// Drop the request that is under way, and ask anew for what lacks.
    Cut,
    /// Return what is there.
    Stop,
}

impl Watch {
    /// Of one of many reads that were asked for ahead, which goes on beyond its deadline as
    /// `persistence` says.
    pub fn ahead(persistence: Persistence) -> Self {
        Self {
            is_ahead: true,
            persistence,
            ..Self::default()
        }
    }

    /// So many bytes behind its buffer are wanted next, by reads with the same `continuation`, one after
    /// the other: one request may ask for all of them.
    #[must_use]
    pub fn followed_by(self, bytes: u64, continuation: Arc<Continuation>) -> Self {
        Self {
            sequel: Some((bytes, continuation)),
            ..self
        }
    }

    /// As told to [`followed_by`](Self::followed_by).
    pub(super) fn sequel(&self) -> Option<&(u64, Arc<Continuation>)> {
        self.sequel.as_ref()
    }

    /// Whether it is one of many that were asked for ahead: then it has all its time when its turn comes.
    pub fn is_ahead(&self) -> bool {
        self.is_ahead
    }

    /// Whether the read goes on beyond its deadline.
    pub fn persists(&self) -> bool {
        self.persistence.is_on()
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
        if state.is_asking {
            state.order = state.order.or(Some(Order::Cut));
            self.ordered.notify_one();
        }
    }

    /// Makes the read return what it has, at least the [`received`](Self::received) bytes.
    pub fn stop(&self) {
        self.lock().order = Some(Order::Stop);
        self.ordered.notify_one();
    }

    /// So many bytes are there now.
    pub(super) fn set_received(&self, len: usize) {
        self.received.store(len as u64, Ordering::Relaxed);
    }

    /// A request was answered after `latency`, of which `cost` was not spent on the way.
    pub(super) fn answered(&self, latency: Duration, cost: Duration) {
        let mut state = self.lock();
        (state.latency, state.cost) = (Some(latency), Some(cost));
    }

    /// A request begins.
    pub(super) fn begin(&self) {
        self.set_asking(true);
    }

    /// No request is under way until the next one begins.
    pub(super) fn pause(&self) {
        self.set_asking(false);
    }

    /// Sets whether a request is under way; an order to cut was for the one before.
    fn set_asking(&self, is_asking: bool) {
        let mut state = self.lock();
        state.is_asking = is_asking;
        state.order = state.order.filter(|&order| order != Order::Cut);
    }

    /// Waits for an order.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(super) async fn order(&self) -> Order {
        loop {
            let order = self.lock().order;
            if let Some(order) = order {
                return order;
            }
            self.ordered.notified().await;
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

    fn order(watch: &Watch) -> Option<Order> {
        watch.order().now_or_never()
    }

    #[test]
    fn a_cut_is_for_the_request_under_way() {
        let watch = Watch::default();
        watch.cut();
        assert_eq!(order(&watch), None);
        watch.begin();
        watch.cut();
        assert_eq!(order(&watch), Some(Order::Cut));
        watch.begin();
        assert_eq!(order(&watch), None);
        watch.pause();
        watch.cut();
        assert_eq!(order(&watch), None);
    }

    #[test]
    fn a_stop_is_for_the_whole_read() {
        let watch = Watch::default();
        watch.stop();
        watch.begin();
        watch.cut();
        assert_eq!(order(&watch), Some(Order::Stop));
    }
}
