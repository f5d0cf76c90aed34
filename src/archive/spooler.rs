//! Which spans of a scan are kept on disk.

use std::sync::Arc;

use bytes::Bytes;

use crate::cache::{Patience, Spool};
use crate::codec::Compression;
use crate::index::Span;
use crate::source::{Access, Source};

/// Whether spans of `source`, which is packed in this way as far as that is known, are kept on disk: not
/// those of a local file that is not packed, which is as good as any copy of it.
pub(super) fn keeps_spans(source: &dyn Source, compression: Option<Compression>) -> bool {
    let is_near = !source.is_remote() && source.access() == Access::Ranges;
    !(is_near && compression == Some(Compression::None))
}

/// Keeps spans of a scan in a spool.
#[derive(Debug)]
pub(super) struct Spooler {
    spool: Arc<Spool>,
    patience: Patience,
}

impl Spooler {
    pub(super) fn new(spool: Arc<Spool>, source: &dyn Source) -> Self {
        let patience = match source.access() {
            Access::Stream => Patience::Endless,
            // Rather a moment late than made twice.
            Access::Ranges => Patience::Short,
        };
        Self { spool, patience }
    }

    /// Keeps a span; what has no hash could not be verified.
    pub(super) fn goes_by(&self, span: &Span, bytes: &Bytes) {
        if span.hash.is_some() {
            self.spool.keep(span.plain, bytes.clone(), self.patience);
        }
    }
}
