//! A request for one chunk.

use bytes::Bytes;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::adaptive::CHEAP_FACTOR;
use crate::base::buffer_pool::{Buffer, BufferPool};
use crate::base::extent::{Extent, Packed};
use crate::base::stats::Stats;
use crate::source::{Error, ReadHandle, ReadMode, Source};

#[derive(Debug)]
pub(super) struct ChunkRequest {
    pub(super) extent: Extent<Packed>,
    pub(super) started: Instant,
    pub(super) read_handle: ReadHandle,
    hedge_requested: Notify,
}

/// Bytes of a chunk in two parts, either of which may be empty.
#[derive(Debug)]
pub(super) struct ChunkBytes {
    pub(super) front: Bytes,
    pub(super) rest: Bytes,
}

impl ChunkBytes {
    pub(super) fn len(&self) -> u64 {
        (self.front.len() + self.rest.len()) as u64
    }
}

impl From<Bytes> for ChunkBytes {
    fn from(front: Bytes) -> Self {
        Self {
            front,
            rest: Bytes::new(),
        }
    }
}

impl ChunkRequest {
    pub(super) fn new(extent: Extent<Packed>, read_handle: ReadHandle) -> Self {
        Self {
            extent,
            started: Instant::now(),
            read_handle,
            hedge_requested: Notify::new(),
        }
    }

    /// Whether its content has been transferring for at least [`CHEAP_FACTOR`] times the answer's cost.
    pub(super) fn is_cheap(&self) -> bool {
        let (Some(latency), Some(cost)) = (self.read_handle.latency(), self.read_handle.cost())
        else {
            return false;
        };
        self.started.elapsed().saturating_sub(latency) >= cost * CHEAP_FACTOR
    }

    /// Sends a second request for the missing bytes, if there is memory for it.
    pub(super) fn request_hedge(&self) {
        self.hedge_requested.notify_one();
    }

    /// Fills `buffer`, of the extent's length; with a hedge, by the request that finishes first.
    pub(super) async fn receive(
        &self,
        source: &dyn Source,
        buffer: Buffer,
        pool: &BufferPool,
        stats: &Stats,
    ) -> Result<ChunkBytes, Error> {
        let mode = ReadMode::Controlled(&self.read_handle);
        let mut read = source.read(self.extent.start(), buffer, mode);
        let (received, rest) = tokio::select! {
            biased;
            completed = &mut read => return completed.map(ChunkBytes::from),
            rest = self.hedge_rest(source, pool, stats) => rest,
        };
        self.read_handle.stop();
        let front = read.await?;
        if front.len() as u64 == self.extent.len() {
            return Ok(front.into());
        }
        // The first request received more while the hedge was in flight.
        Ok(ChunkBytes {
            front: front.slice(..received.min(front.len())),
            rest,
        })
    }

    /// Reads the rest if a hedge is requested, and returns the front's length and the rest. Never returns if
    /// the hedge fails, because the first request may still succeed.
    async fn hedge_rest(
        &self,
        source: &dyn Source,
        pool: &BufferPool,
        stats: &Stats,
    ) -> (usize, Bytes) {
        loop {
            self.hedge_requested.notified().await;
            let received = self.read_handle.received();
            let (Ok(front_len), Ok(len)) = (
                usize::try_from(received),
                usize::try_from(self.extent.len().saturating_sub(received)),
            ) else {
                continue;
            };
            let Some(buffer) = pool.try_acquire(len) else {
                continue;
            };
            stats.source_hedges.increment();
            let start = Packed(self.extent.start().0 + received);
            match source.read_at(start, buffer).await {
                Ok(rest) => return (front_len, rest),
                Err(error) => {
                    tracing::debug!(cause = %error.cause, "the hedged request failed");
                    return std::future::pending().await;
                }
            }
        }
    }
}
