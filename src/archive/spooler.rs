//! Which spans are worth their place on disk.

use std::sync::Arc;

use bytes::Bytes;

use crate::base::extent::{Extent, Plain};
use crate::cache::{Patience, Spool};
use crate::codec::Compression;
use crate::index::Span;
use crate::source::{Access, Source};

/// What is kept of an archive on disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Policy {
    /// Every span: its bytes come from far away, or come but once, or take long to decode.
    Everything,
    /// What lies behind other spans that would have to be decoded first.
    LongWays,
    /// Nothing: the source is a local file, and as good as any copy of it.
    Nothing,
}

impl Policy {
    /// What to keep of `source`, which is packed in this way, as far as that is known.
    pub(super) fn of(source: &dyn Source, compression: Option<Compression>) -> Self {
        if source.is_remote() || source.access() == Access::Stream {
            return Self::Everything;
        }
        match compression {
            Some(Compression::None | Compression::Lz4) => Self::Nothing,
            Some(Compression::Gzip | Compression::Xz | Compression::Bzip2) => Self::Everything,
            Some(Compression::Zstd) | None => Self::LongWays,
        }
    }

    /// Whether a span that is made for a read is kept.
    pub(super) fn keeps(self, span: &Span) -> bool {
        // What nobody has a hash of could not be verified.
        if span.hash.is_none() {
            return false;
        }
        match self {
            Self::Everything => true,
            Self::LongWays => span.seek_point.is_none(),
            Self::Nothing => false,
        }
    }
}

/// Keeps spans of a scan in a spool.
#[derive(Debug)]
pub(super) struct Spooler {
    spool: Arc<Spool>,
    policy: Policy,
    patience: Patience,
    /// The last span, if decoding can start at it: whether it ends at a seek point too, and is
    /// made again by fetching only what it needs, is known when the next one comes.
    undecided: Option<(Extent<Plain>, Bytes)>,
}

impl Spooler {
    pub(super) fn new(spool: Arc<Spool>, policy: Policy, source: &dyn Source) -> Self {
        let patience = match source.access() {
            Access::Stream => Patience::Endless,
            // Rather a moment late than fetched twice.
            Access::Ranges if source.is_remote() => Patience::Short,
            Access::Ranges => Patience::No,
        };
        Self {
            spool,
            policy,
            patience,
            undecided: None,
        }
    }

    /// Keeps what of these it is worth.
    pub(super) fn goes_by(&mut self, span: &Span, bytes: &Bytes) {
        let undecided = self.undecided.take();
        if !self.policy.keeps(span) {
            self.undecided = (self.policy == Policy::LongWays).then(|| (span.plain, bytes.clone()));
            return;
        }
        if let Some((extent, bytes)) = undecided {
            self.spool.keep(extent, bytes, self.patience);
        }
        self.spool.keep(span.plain, bytes.clone(), self.patience);
    }
}
