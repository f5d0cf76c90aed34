//! Caches of decoded spans: in memory and on disk.
//! The unit is the span, because a seek point decodes to one, and the index has its hash to verify it.

mod disk;
mod memory;

pub use disk::{
    DiskCache, DiskCacheDir, DiskCacheError, DiskCacheOptions, DiskCacheUsage, QueueTimeout,
    ReadRate, SparseExtent,
};
pub(crate) use disk::{bytes_per_second, content_key, is_unfinished};
pub(crate) use memory::SpanCache;

/// Key of a span: its owner and its number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct SpanKey {
    /// The index that has the span. A scan has another owner than a saved index of the same archive.
    pub span_owner: u32,
    pub span: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum CacheKey {
    Span(SpanKey),
    /// An aligned window of an archive whose spans are read in parts.
    Window {
        span_owner: u32,
        window: u64,
    },
}

impl From<SpanKey> for CacheKey {
    fn from(key: SpanKey) -> Self {
        Self::Span(key)
    }
}
