//! Spans of plain bytes kept for readers: in memory, and in a disk cache on disk.
//!
//! The unit is the span, not a fixed block: it is what one seek point decodes to and what the
//! index holds a hash of, so whatever comes out of a cache can be verified, and made again from
//! its lineage when it is lost.

mod disk;
mod memory;

pub use disk::{
    CacheFileInfo, DiskCache, DiskCacheDir, DiskCacheError, DiskCacheOptions, DiskCacheUsage,
    QueueTimeout,
};
pub use memory::SpanCache;

/// Which span of which archive.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SpanKey {
    /// The archive's layer in the mounted tree.
    pub layer: u16,
    /// The span's number in that layer's index.
    pub span: u32,
}

/// A piece of plain bytes that memory keeps under one key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CacheKey {
    /// A whole span.
    Span(SpanKey),
    /// A window: an aligned part of an archive whose spans are read in parts.
    Window {
        /// The archive's layer in the mounted tree.
        layer: u16,
        /// The window's number in the archive.
        window: u64,
    },
}

impl From<SpanKey> for CacheKey {
    fn from(key: SpanKey) -> Self {
        Self::Span(key)
    }
}
