//! Options of a scan.

use std::sync::Arc;

use super::resume_point::ResumePoint;
use crate::archive::index_source::saved_index::SavedIndex;
use crate::base::cancel_token::CancelToken;
use crate::base::memory_budget::MemoryShare;
use crate::base::memory_reclaim::{MemoryBroker, Reclaim};
use crate::base::sha256::Sha256;
use crate::codec::Compression;
use crate::fetch;
use crate::source::{RetryForever, Source};
use crate::tar;

/// Options of a scan.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
pub struct Options {
    /// Packed format; `None` detects it by magic bytes.
    pub compression: Option<Compression>,
    /// Options of the tar parser.
    pub tar: tar::Options,
    /// Whether a truncated archive counts as complete.
    pub allow_truncated: bool,
    /// Whether the scan makes seek points, span hashes, digests of packed blocks, and the content ID.
    pub spans: bool,
    /// Maximum number of requests in flight.
    pub connections: usize,
    /// Maximum number of bytes in one chunk.
    pub chunk_len: u64,
    /// Speed below which a request counts as too slow.
    pub min_speed: fetch::MinSpeed,
    /// Whether the scan keeps retrying while the source is unreachable.
    pub retry_forever: RetryForever,
    /// Ends the scan.
    pub cancel_token: CancelToken,
    /// Memory for all buffers and decoder state, in bytes. The scan uses at least [`MIN_MEMORY`](super::MIN_MEMORY).
    pub memory: u64,
    /// How `memory` follows from the user's, which errors name.
    pub memory_share: MemoryShare,
    /// Lends memory to later reads, which must be able to decode the same stream. `None` without reads.
    pub readers: Option<MemoryBroker>,
    /// Memory that decoder state, also that of later reads, reclaims before it reclaims the scan's buffers.
    pub reclaimers: Vec<Arc<dyn Reclaim>>,
    /// Number of threads for data that can be decoded out of order.
    pub workers: usize,
    /// Whether to skip large payloads of an uncompressed archive, if a strong validator pins its version and the
    /// [sink](super::Sink::needs_payloads) does not need them. Skipped bytes have no hashes, and the source has no
    /// content ID.
    pub allow_skipping: bool,
    /// Whether the sink receives [resume points](super::Sink::resume_point). Disables `saved_index`.
    pub resume_points: bool,
    /// Point at which to resume; `None` starts at the front. Excludes `spans` and digests. Checksums that
    /// also cover earlier parts of the stream are not verified.
    pub resume: Option<ResumePoint>,
    /// SHA-256 of the packed bytes; prevents skipping. Always expected of a source that is known by its
    /// digest ([`Fingerprint::sha256`](crate::source::Fingerprint::sha256)).
    pub sha256: Digest,
    /// SHA-256 of the whole plain stream; excludes `resume`. A source can name the expected one
    /// ([`Fingerprint::plain_sha256`](crate::source::Fingerprint::plain_sha256)).
    pub plain_sha256: Digest,
    /// Saved index of this version of the source, if there is one; not used if `spans` are wanted. With it,
    /// all job threads decode a stream that otherwise must be decoded from the front.
    pub saved_index: Option<SavedIndex>,
}

impl Default for Options {
    /// Scans the whole archive for its members, with 128 MiB of memory and one decoding thread.
    fn default() -> Self {
        Self {
            compression: None,
            tar: tar::Options::default(),
            allow_truncated: false,
            spans: false,
            connections: fetch::DEFAULT_CONNECTIONS,
            chunk_len: fetch::DEFAULT_CHUNK_LEN,
            min_speed: fetch::MinSpeed::default(),
            retry_forever: RetryForever::default(),
            cancel_token: CancelToken::default(),
            memory: 128 << 20,
            memory_share: MemoryShare::Whole,
            readers: None,
            reclaimers: Vec::new(),
            workers: 1,
            allow_skipping: false,
            resume_points: false,
            resume: None,
            sha256: Digest::default(),
            plain_sha256: Digest::default(),
            saved_index: None,
        }
    }
}

impl Options {
    /// Sets the user's memory, and the limits that follow from it.
    pub fn set_memory(&mut self, bytes: u64) {
        self.memory = bytes;
        self.tar.limits.metadata_bytes = tar::Limits::metadata_bytes_for(bytes);
    }

    /// Returns these options with the digests that `source` names, unless they choose one explicitly.
    pub(crate) fn for_source(&self, source: &dyn Source) -> Self {
        let fingerprint = source.fingerprint();
        let expected = |asked, known: Option<Sha256>| match (asked, known) {
            (Digest::Ignore, Some(sha256)) => Digest::Expect(sha256),
            _ => asked,
        };
        Self {
            sha256: expected(self.sha256, fingerprint.sha256()),
            plain_sha256: expected(self.plain_sha256, fingerprint.plain_sha256()),
            ..self.clone()
        }
    }

    pub(crate) fn expects_digest(&self) -> bool {
        let mut digests = [self.sha256, self.plain_sha256].into_iter();
        digests.any(|digest| matches!(digest, Digest::Expect(_)))
    }
}

/// How a scan treats the SHA-256 of a whole stream.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Digest {
    /// Does not compute it, because that takes as long as decoding.
    #[default]
    Ignore,
    /// Computes it, even if the archive cannot be decoded to its end.
    Compute,
    /// Computes it, and fails at the end if it differs.
    Expect(Sha256),
}

impl Digest {
    /// The expected digest, if there is one.
    pub(crate) fn expected(self) -> Option<Sha256> {
        match self {
            Self::Expect(expected) => Some(expected),
            Self::Ignore | Self::Compute => None,
        }
    }
}
