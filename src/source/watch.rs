//! A read seen from outside.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

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

/// How far a read is, and the means to interfere with it; for a single read.
#[derive(Debug, Default)]
pub struct Watch {
    /// Whether it is one of many that were asked for ahead, and wait for each other.
    is_ahead: bool,
    persistence: Persistence,
    received: AtomicU64,
    state: Mutex<State>,
    ordered: Notify,
}

#[derive(Debug, Default)]
struct State {
    latency: Option<Duration>,
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

    /// A request was answered.
    pub(super) fn answered(&self, latency: Duration) {
        self.lock().latency = Some(latency);
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
