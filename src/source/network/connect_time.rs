//! Measurement of connection setup times.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::future::{BoxFuture, FutureExt};
use tower_layer::Layer;
use tower_service::Service;

/// Measures connection setup. Clones share the measurements.
#[derive(Clone, Debug, Default)]
pub(super) struct ConnectTimer {
    /// Fastest setup, in microseconds; zero before the first one.
    micros: Arc<AtomicU64>,
}

impl ConnectTimer {
    /// Time of the fastest setup, DNS lookup and TLS included; zero before the first one.
    pub(super) fn fastest(&self) -> Duration {
        Duration::from_micros(self.micros.load(Ordering::Relaxed))
    }

    fn record(&self, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX).max(1);
        // Zero means unset, and wraps to the maximum here.
        let fastest = (self.micros.load(Ordering::Relaxed).wrapping_sub(1)).min(micros - 1);
        self.micros.store(fastest + 1, Ordering::Relaxed);
    }
}

impl<S> Layer<S> for ConnectTimer {
    type Service = TimedConnector<S>;

    fn layer(&self, inner: S) -> TimedConnector<S> {
        TimedConnector {
            inner,
            connect_timer: self.clone(),
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct TimedConnector<S> {
    inner: S,
    connect_timer: ConnectTimer,
}

impl<S, R> Service<R> for TimedConnector<S>
where
    S: Service<R>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, target: R) -> Self::Future {
        let (making, connect_timer) = (self.inner.call(target), self.connect_timer.clone());
        async move {
            let started = Instant::now();
            let made = making.await?;
            connect_timer.record(started.elapsed());
            Ok(made)
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connect_time_is_that_of_the_fastest_connection() {
        let connect_timer = ConnectTimer::default();
        assert_eq!(connect_timer.fastest(), Duration::ZERO);
        for millis in [40, 20, 30] {
            connect_timer.clone().record(Duration::from_millis(millis));
        }
        assert_eq!(connect_timer.fastest(), Duration::from_millis(20));
    }
}
