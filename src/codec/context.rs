//! Resources of a decoder.

use super::Cause;
use crate::base::buffer_pool::{BufferPool, Closed};
use crate::base::memory_reclaim::{GrantError, MemoryBroker, MemoryGrant};

/// Resources of a decoder.
#[derive(Clone, Debug)]
pub struct Context {
    /// Pool of plain buffers. Taking one may wait until the consumer of pulled pieces drops some.
    pub pool: BufferPool,
    /// Whether the driver wants seek points. Without them checkpoints cost nothing.
    pub wants_seek_points: bool,
    /// Memory that is not made of buffers: an xz dictionary, a zstd window.
    pub broker: MemoryBroker,
    /// Threads that run jobs, 0 for only the driver's. With fewer than four, decoders do not speculate.
    pub workers: usize,
}

impl Context {
    pub(super) fn borrow_memory(&self, needed_bytes: u64) -> Result<MemoryGrant, Cause> {
        self.broker
            .grant(needed_bytes)
            .map_err(|error| match error {
                GrantError::OverLimit => Cause::MemoryLimit {
                    needed_bytes,
                    limit_bytes: self.broker.limit_bytes(),
                },
                GrantError::Closed(Closed) => Cause::Cancelled,
            })
    }
}
