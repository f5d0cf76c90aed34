//! Ordered, parallel, bounded streams of a source, and reads of single ranges.
//!
//! [`Stream`] serves a scan, with adaptive concurrency within the pool's budget. [`read`] reads one range.

mod adaptive;
mod chunks;
mod demand;
mod range_reader;
mod request;
mod scheduler;
mod stragglers;
mod stream;

use std::future::{Future, pending};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use crate::base::buffer_pool::{Buffer, BufferPool, Closed};
use crate::base::extent::{Extent, Packed};
use crate::source::{Cause, Error, IsIntact, ReadMode, Source};

pub use crate::base::cancel_token::CancelToken;
pub use crate::source::DEFAULT_CONNECTIONS;
pub use scheduler::Config;

// For the tests.
#[doc(hidden)]
pub use {
    range_reader::RangeReader,
    stream::{Stream, StreamControl},
};

/// Default maximum length of a chunk in bytes. Longer chunks only delay the first byte and hold memory.
pub const DEFAULT_CHUNK_LEN: u64 = 8 << 20;

/// Speed below which a request is cut and sent again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MinSpeed {
    /// Bytes per second; 0 disables cuts.
    pub bytes_per_second: u64,
    /// How long a request must be slower before it is cut; zero disables cuts.
    pub wait: Duration,
}

impl Default for MinSpeed {
    /// No link for sixteen requests is slower than 64 KiB/s. Most servers answer within five seconds.
    fn default() -> Self {
        Self {
            bytes_per_second: 64 << 10,
            wait: Duration::from_secs(5),
        }
    }
}

fn per_second(bytes: u64, time: Duration) -> u64 {
    let micros = time.as_micros().max(1);
    u64::try_from(u128::from(bytes) * 1_000_000 / micros).unwrap_or(u64::MAX)
}

/// Reads `extent` with one request, blocking. Only for threads outside the runtime.
///
/// # Errors
/// If the source cannot be read there.
#[doc(hidden)]
pub fn read(
    handle: &Handle,
    source: &Arc<dyn Source>,
    extent: Extent<Packed>,
) -> Result<Bytes, Error> {
    let pool = BufferPool::new(extent.len().max(1));
    let buffer = acquire_buffer(source, &pool, extent)?;
    block_on_read(handle, source, source.read_at(extent.start(), buffer))
}

/// As [`read`], if earlier bytes were corrupt (see [`ReadMode::Uncached`]).
pub(crate) fn read_uncached(
    handle: &Handle,
    source: &Arc<dyn Source>,
    extent: Extent<Packed>,
    pool: &BufferPool,
    is_intact: IsIntact<'_>,
) -> Result<Bytes, Error> {
    let buffer = acquire_buffer(source, pool, extent)?;
    let reading = source.read(extent.start(), buffer, ReadMode::Uncached(is_intact));
    block_on_read(handle, source, reading)
}

fn acquire_buffer(
    source: &Arc<dyn Source>,
    pool: &BufferPool,
    extent: Extent<Packed>,
) -> Result<Buffer, Error> {
    let truncated = || Error::new(source.location(), Cause::Truncated);
    let end = source.fingerprint().len;
    if end.is_some_and(|len| extent.end().0 > len) {
        return Err(truncated());
    }
    // A length beyond `usize` exceeds any source.
    let len = usize::try_from(extent.len()).map_err(|_| truncated())?;
    let cancelled = |Closed| Error::new(source.location(), Cause::Cancelled);
    pool.acquire(len).map_err(cancelled)
}

fn block_on_read(
    handle: &Handle,
    source: &Arc<dyn Source>,
    reading: impl Future<Output = Result<Bytes, Error>>,
) -> Result<Bytes, Error> {
    let read = block_on_until_shutdown(handle, reading);
    read.unwrap_or_else(|| Err(Error::new(source.location(), Cause::Cancelled)))
}

fn block_on_until_shutdown<T>(handle: &Handle, work: impl Future<Output = T>) -> Option<T> {
    // A runtime that ends drops its tasks before its clock. Waiting on the clock after that panics.
    let mut guards = JoinSet::new();
    guards.spawn_on(pending::<()>(), handle);
    handle.block_on(async {
        tokio::select! {
            biased;
            _ = guards.join_next() => None,
            done = work => Some(done),
        }
    })
}

#[cfg(test)]
mod tests {
    use tokio::runtime::Builder;
    use tokio::time::sleep;

    use super::*;
    use crate::base::thread::Thread;

    // Promises: log-panic
    #[test]
    fn blocked_read_is_cancelled_when_the_runtime_ends() {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_time()
            .build()
            .expect("a runtime");
        let handle = runtime.handle().clone();
        assert_eq!(block_on_until_shutdown(&handle, async { 7 }), Some(7));
        let (began, begun) = std::sync::mpsc::channel();
        let waiter = Thread::spawn("waiter", {
            let handle = handle.clone();
            move || {
                block_on_until_shutdown(&handle, async {
                    let mut hour = Box::pin(sleep(Duration::from_hours(1)));
                    std::future::poll_fn(|context| {
                        let polled = hour.as_mut().poll(context);
                        // The read waits only now. If the runtime ended before, the wait would panic.
                        began.send(()).expect("the test listens");
                        polled
                    })
                    .await;
                })
            }
        });
        begun.recv().expect("it waits");
        runtime.shutdown_background();
        assert_eq!(waiter.expect("a thread").join(), None);
        let late = block_on_until_shutdown(&handle, async { sleep(Duration::from_hours(1)).await });
        assert_eq!(late, None);
    }
}
