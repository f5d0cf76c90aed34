//! Resources of a decoder.

use super::Cause;
use crate::base::buffer_pool::{BufferPool, Closed};
use crate::base::memory_reclaim::{GrantError, MemoryBroker, MemoryGrant};

/// Resources of a decoder.
#[derive(Clone, Debug)]
pub struct Context {
    /// Pool for buffers of plain bytes.
    ///
    /// Taking a buffer may wait until the consumer of pulled pieces drops some.
    pub pool: BufferPool,
    /// Whether the driver wants seek points. Without them checkpoints cost nothing.
    pub wants_seek_points: bool,
    /// Memory that is not made of buffers: an xz dictionary, a zstd window.
    pub broker: MemoryBroker,
    /// Number of threads that run jobs and speculative jobs; 0 if only the driver's does.
    ///
    /// With fewer than four, decoders do not speculate.
    pub workers: usize,
}

impl Context {
    /// Borrows `needed_bytes` for a decoder's state.
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
