//! Ordered, parallel, bounded prefetch: a source's bytes as one stream of chunks.
//!
//! [`Stream`] is for a scan: everything from one offset to the end, as many requests at once as
//! bring something, as far ahead as the pool's budget allows. [`read`] is for what is read later:
//! one range.

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
use crate::source::{Cause, Error, Source};

pub use range_reader::RangeReader;
pub use stream::{Config, Stream, StreamControl};

/// Requests in flight at once, at the most. Sixteen are needed where a server gives each
/// connection 60 MB/s, or at 40 ms round trip; how many there are is measured.
pub const DEFAULT_CONNECTIONS: usize = 16;

/// The longest chunk in bytes, at the most; more only delays the first byte and holds memory.
pub const DEFAULT_CHUNK_LEN: u64 = 8 << 20;

/// Below which speed a request is cut and sent again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MinSpeed {
    /// Bytes a second; 0 cuts nothing.
    pub bytes_per_second: u64,
    /// How long it must have been slower; zero cuts nothing.
    pub wait: Duration,
}

impl Default for MinSpeed {
    /// 64 KiB a second is slower than any link that sixteen requests make sense on; five seconds
    /// are longer than most servers think.
    fn default() -> Self {
        Self {
            bytes_per_second: 64 << 10,
            wait: Duration::from_secs(5),
        }
    }
}

/// Bytes a second.
fn per_second(bytes: u64, time: Duration) -> u64 {
    let micros = time.as_micros().max(1);
    u64::try_from(u128::from(bytes) * 1_000_000 / micros).unwrap_or(u64::MAX)
}

/// Reads `extent` by one request, waiting for memory and for the bytes.
///
/// Only for threads outside the runtime.
///
/// # Errors
/// When the source cannot be read there.
pub fn read(
    handle: &Handle,
    source: &Arc<dyn Source>,
    extent: Extent<Packed>,
    pool: &BufferPool,
) -> Result<Bytes, Error> {
    let buffer = acquire_buffer(source, pool, checked_len(source, extent)?)?;
    block_on_read(handle, source, source.read_at(extent.start(), buffer))
}

/// As [`read`], for who got bytes there that cannot be right: see [`Source::read_uncached`].
///
/// # Errors
/// As [`read`].
pub fn read_uncached(
    handle: &Handle,
    source: &Arc<dyn Source>,
    extent: Extent<Packed>,
    pool: &BufferPool,
) -> Result<Bytes, Error> {
    let buffer = acquire_buffer(source, pool, checked_len(source, extent)?)?;
    block_on_read(handle, source, source.read_uncached(extent.start(), buffer))
}

/// A buffer to read `len` bytes of `source` into.
fn acquire_buffer(
    source: &Arc<dyn Source>,
    pool: &BufferPool,
    len: usize,
) -> Result<Buffer, Error> {
    let cancelled = |Closed| Error::new(source.location(), Cause::Cancelled);
    pool.acquire(len).map_err(cancelled)
}

/// What `reading` of `source` comes to; that it was cancelled when the runtime ends before.
fn block_on_read(
    handle: &Handle,
    source: &Arc<dyn Source>,
    reading: impl Future<Output = Result<Bytes, Error>>,
) -> Result<Bytes, Error> {
    let read = block_on_until_shutdown(handle, reading);
    read.unwrap_or_else(|| Err(Error::new(source.location(), Cause::Cancelled)))
}

/// What `work` comes to on this thread; `None` when the runtime ends before.
fn block_on_until_shutdown<T>(handle: &Handle, work: impl Future<Output = T>) -> Option<T> {
    // A runtime that ends drops its tasks first, and then its clock: who waits for that panics.
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

/// Bytes of `extent`, all of which `source` has.
fn checked_len(source: &Arc<dyn Source>, extent: Extent<Packed>) -> Result<usize, Error> {
    let truncated = || Error::new(source.location(), Cause::Truncated);
    let end = source.fingerprint().len;
    if end.is_some_and(|len| extent.end().0 > len) {
        return Err(truncated());
    }
    // Longer than memory is longer than any source.
    usize::try_from(extent.len()).map_err(|_| truncated())
}

#[cfg(test)]
mod tests {
    use tokio::runtime::Builder;
    use tokio::time::sleep;

    use super::*;
    use crate::base::thread::Thread;

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
                        // Only now it waits: a runtime that ends before would end the wait with a panic.
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
