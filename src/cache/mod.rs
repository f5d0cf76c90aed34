//! Spans of plain bytes kept for readers: in memory, and in a spool on disk.
//!
//! The unit is the span, not a fixed block: it is what one seek point decodes to and what the
//! index holds a hash of, so whatever comes out of a cache can be verified, and made again from
//! its lineage when it is lost.

use std::path::Path;

mod memory;
mod spool;

pub use memory::Memory;
pub use spool::{Spool, SpoolError};

/// Which span of which archive.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Key {
    /// The archive's layer in the mounted tree.
    pub layer: u16,
    /// The span's number in that layer's index.
    pub span: u32,
}

/// Bytes that may be written below `directory` without taking the last tenth of its disk; 0 when
/// that cannot be found out.
pub fn spare_bytes(directory: &Path) -> u64 {
    let existing = directory.ancestors().find(|ancestor| ancestor.exists());
    let Some(Ok(disk)) = existing.map(rustix::fs::statvfs) else {
        return 0;
    };
    let available = disk.f_bavail.saturating_mul(disk.f_frsize);
    let tenth = disk.f_blocks.saturating_mul(disk.f_frsize) / 10;
    available.saturating_sub(tenth)
}
