//! The source that an index was made from, and the key under which it is saved.

use crate::base::sha256::Sha256;
use crate::codec::Compression;

/// Key of a saved index, compared byte by byte: source, version, and options. Equal keys share an index.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Locator {
    /// The URL without userinfo and signature, or the identity of a file.
    pub canonical: String,
    /// Length and validator.
    pub fingerprint: String,
    /// Every option that changes the tree or the plain bytes, in a fixed order.
    pub options: String,
}

/// The source that an index was made from.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Origin {
    /// The key of the saved index.
    pub locator: Locator,
    /// Absolute path of a local archive, in a saved index only; empty if unknown.
    pub local_path: Vec<u8>,
    /// BLAKE3 digest of the packed bytes; zeros when the scan skipped some of them.
    pub content_id: [u8; 32],
    /// SHA-256 of the packed bytes, if the caller asked for it.
    pub sha256: Option<Sha256>,
    /// SHA-256 of the plain stream, if a scan computed it.
    pub plain_sha256: Option<Sha256>,
    /// How the bytes are packed.
    pub compression: Compression,
    /// Length of the packed stream.
    pub packed_bytes: u64,
    /// Length of the plain stream.
    pub plain_bytes: u64,
    /// Memory of the largest decoder state in bytes, as far as it is known. Index files have it in whole KiB.
    pub decoder_bytes: u64,
    /// Whether the archive ends too early, which the options allowed.
    pub is_truncated: bool,
    /// Whether two zero records ended the archive. Without them it may be cut between two members.
    pub has_end_marker: bool,
}
