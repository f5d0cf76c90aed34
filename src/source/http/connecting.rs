//! How long connections take to be made.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::future::{BoxFuture, FutureExt};
use tower_layer::Layer;
use tower_service::Service;

/// Measures connections; the clones of one know what all of them measured.
#[derive(Clone, Debug, Default)]
pub(super) struct Connecting {
    /// Of the fastest one, in microseconds; zero while there was none.
    micros: Arc<AtomicU64>,
}

impl Connecting {
    /// How long the fastest one took, name lookup and TLS included; zero while there was none.
    pub(super) fn time(&self) -> Duration {
        Duration::from_micros(self.micros.load(Ordering::Relaxed))
    }

    fn took(&self, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX).max(1);
        // None at all counts as the longest.
        let fastest = (self.micros.load(Ordering::Relaxed).wrapping_sub(1)).min(micros - 1);
        self.micros.store(fastest + 1, Ordering::Relaxed);
    }
}

impl<S> Layer<S> for Connecting {
    type Service = Measured<S>;

    fn layer(&self, inner: S) -> Measured<S> {
        Measured {
            inner,
            connecting: self.clone(),
        }
    }
}

/// What makes connections, measured.
#[derive(Clone, Debug)]
pub(super) struct Measured<S> {
    inner: S,
    connecting: Connecting,
}

impl<S, R> Service<R> for Measured<S>
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
        let (making, connecting) = (self.inner.call(target), self.connecting.clone());
        async move {
            let began = Instant::now();
            let made = making.await?;
            connecting.took(began.elapsed());
            Ok(made)
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_connection_counts() {
        let connecting = Connecting::default();
        assert_eq!(connecting.time(), Duration::ZERO);
        for millis in [40, 20, 30] {
            connecting.clone().took(Duration::from_millis(millis));
        }
        assert_eq!(connecting.time(), Duration::from_millis(20));
    }
}
