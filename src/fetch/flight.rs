//! One chunk on its way.

use std::time::Instant;

use bytes::Bytes;
use tokio::sync::Notify;

use super::pace::CHEAP;
use crate::base::buffer::{Buffer, Pool};
use crate::base::extent::{Extent, Packed};
use crate::base::stats::Stats;
use crate::source::{Error, Source, Watch};

/// A chunk that was asked for.
#[derive(Debug)]
pub(super) struct Flight {
    extent: Extent<Packed>,
    began: Instant,
    watch: Watch,
    is_late: Notify,
}

/// A chunk that came: its bytes in two parts, of which either may be empty.
#[derive(Debug)]
pub(super) struct Landed {
    pub(super) front: Bytes,
    pub(super) rest: Bytes,
}

impl Landed {
    pub(super) fn len(&self) -> u64 {
        (self.front.len() + self.rest.len()) as u64
    }
}

impl From<Bytes> for Landed {
    fn from(front: Bytes) -> Self {
        Self {
            front,
            rest: Bytes::new(),
        }
    }
}

impl Flight {
    /// Of `extent`, watched by `watch`.
    pub(super) fn new(extent: Extent<Packed>, watch: Watch) -> Self {
        Self {
            extent,
            began: Instant::now(),
            watch,
            is_late: Notify::new(),
        }
    }

    pub(super) fn extent(&self) -> Extent<Packed> {
        self.extent
    }

    pub(super) fn began(&self) -> Instant {
        self.began
    }

    pub(super) fn watch(&self) -> &Watch {
        &self.watch
    }

    /// Whether its content has been coming for at least [`CHEAP`] times as long as the answer cost.
    pub(super) fn is_cheap(&self) -> bool {
        let (Some(latency), Some(cost)) = (self.watch.latency(), self.watch.cost()) else {
            return false;
        };
        self.began.elapsed().saturating_sub(latency) >= cost * CHEAP
    }

    /// Asks for what is still missing a second time, if there is memory for it.
    pub(super) fn hedge(&self) {
        self.is_late.notify_one();
    }

    /// Fills `buffer`, of the extent's length; whichever request for the rest ends first wins.
    ///
    /// # Errors
    /// When the source cannot be read there.
    pub(super) async fn land(
        &self,
        source: &dyn Source,
        buffer: Buffer,
        pool: &Pool,
        stats: &Stats,
    ) -> Result<Landed, Error> {
        let mut read = source.read_watched(self.extent.start(), buffer, &self.watch);
        let (received, rest) = tokio::select! {
            biased;
            landed = &mut read => return landed.map(Landed::from),
            rest = self.rest(source, pool, stats) => rest,
        };
        self.watch.stop();
        let front = read.await?;
        if front.len() as u64 == self.extent.len() {
            return Ok(front.into());
        }
        // The first request went on while the second one was under way.
        Ok(Landed {
            front: front.slice(..received.min(front.len())),
            rest,
        })
    }

    /// Waits to be told that the flight is late, and requests the rest: how many bytes are not
    /// in it, and the others. Never returns if that fails: the first request may still succeed.
    async fn rest(&self, source: &dyn Source, pool: &Pool, stats: &Stats) -> (usize, Bytes) {
        loop {
            self.is_late.notified().await;
            let received = self.watch.received();
            let (Ok(front_len), Ok(len)) = (
                usize::try_from(received),
                usize::try_from(self.extent.len().saturating_sub(received)),
            ) else {
                continue;
            };
            let Some(buffer) = pool.try_take(len) else {
                continue;
            };
            stats.source_hedges.increment();
            let start = Packed(self.extent.start().0 + received);
            match source.read_at(start, buffer).await {
                Ok(rest) => return (front_len, rest),
                Err(error) => {
                    tracing::debug!(cause = %error.cause, "the second request failed");
                    return std::future::pending().await;
                }
            }
        }
    }
}
