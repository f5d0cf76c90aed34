//! Ordered, parallel, bounded prefetch: a source's bytes as one stream of chunks.
//!
//! [`Stream`] is for a scan: everything from one offset to the end, several requests at once, as
//! far ahead as the pool's budget allows. [`read`] is for what is read later: one range.

mod plan;
mod stream;

use std::sync::Arc;

use bytes::Bytes;
use tokio::runtime::Handle;

use crate::base::buffer::Pool;
use crate::base::extent::{Extent, Packed};
use crate::source::{Cause, Error, Source};

pub use plan::Plan;
pub use stream::{Config, Stream};

/// Requests in flight at once. One is enough on a fast network; at 40 ms round trip, or where a
/// server gives each connection 60 MB/s, 4 to 16 were worth 1.2 to 1.4 times.
pub const CONNECTIONS: usize = 8;

/// The longest chunk in bytes. 4 to 8 MiB hide a round trip of 40 ms at a gigabit a second; more
/// only delays the first byte and holds memory.
pub const CHUNK_LEN: u64 = 8 << 20;

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
    pool: &Pool,
) -> Result<Bytes, Error> {
    // Longer than memory is longer than any source.
    let len = usize::try_from(extent.len())
        .map_err(|_| Error::new(source.location(), Cause::Truncated))?;
    if source
        .fingerprint()
        .len
        .is_some_and(|len| extent.end().0 > len)
    {
        return Err(Error::new(source.location(), Cause::Truncated));
    }
    let buffer = pool.take(len);
    handle.block_on(source.read_at(extent.start(), buffer))
}
