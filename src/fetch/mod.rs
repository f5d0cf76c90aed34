//! Ordered, parallel, bounded prefetch: a source's bytes as one stream of chunks.
//!
//! [`Stream`] is for a scan: everything from one offset to the end, as many requests at once as
//! bring something, as far ahead as the pool's budget allows. [`read`] is for what is read later:
//! one range.

mod appetite;
mod drive;
mod flight;
mod laggards;
mod pace;
mod plan;
mod reads;
mod stream;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::runtime::Handle;

use crate::base::buffer::Pool;
use crate::base::extent::{Extent, Packed};
use crate::source::{Cause, Error, Source};

pub use reads::Reads;
pub use stream::{Config, Control, Stream};

/// Requests in flight at once, at the most. Sixteen are needed where a server gives each
/// connection 60 MB/s, or at 40 ms round trip; how many there are is measured.
pub const CONNECTIONS: usize = 16;

/// The longest chunk in bytes, at the most; more only delays the first byte and holds memory.
pub const CHUNK_LEN: u64 = 8 << 20;

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
    pool: &Pool,
) -> Result<Bytes, Error> {
    let buffer = pool.take(whole_len(source, extent)?);
    handle.block_on(source.read_at(extent.start(), buffer))
}

/// As [`read`], for who got bytes there that cannot be right: see [`Source::read_afresh`].
///
/// # Errors
/// As [`read`].
pub fn read_afresh(
    handle: &Handle,
    source: &Arc<dyn Source>,
    extent: Extent<Packed>,
    pool: &Pool,
) -> Result<Bytes, Error> {
    let buffer = pool.take(whole_len(source, extent)?);
    handle.block_on(source.read_afresh(extent.start(), buffer))
}

/// Bytes of `extent`, all of which `source` has.
fn whole_len(source: &Arc<dyn Source>, extent: Extent<Packed>) -> Result<usize, Error> {
    let truncated = || Error::new(source.location(), Cause::Truncated);
    let end = source.fingerprint().len;
    if end.is_some_and(|len| extent.end().0 > len) {
        return Err(truncated());
    }
    // Longer than memory is longer than any source.
    usize::try_from(extent.len()).map_err(|_| truncated())
}
