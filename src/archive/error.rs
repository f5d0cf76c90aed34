//! Why an archive cannot be scanned or read.

use crate::{codec, source, tar};

/// What went wrong, by layer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The packed bytes cannot be had.
    #[error(transparent)]
    Source(#[from] source::Error),
    /// The packed bytes cannot be decoded.
    #[error(transparent)]
    Codec(#[from] codec::Error),
    /// The plain bytes are not what tar allows.
    #[error(transparent)]
    Tar(#[from] tar::Error),
    /// The first bytes are neither a tar archive nor a known packed format.
    #[error("this is neither a tar archive nor gzip, lz4, zstd, xz or bzip2")]
    NotAnArchive,
    /// A packed format that is recognised and not supported.
    #[error("{0} is not supported; repack it as gzip, lz4, zstd, xz or bzip2, or unpack it first")]
    UnsupportedFormat(&'static str),
    /// A thread of ours is gone.
    #[error("decoding was interrupted")]
    Interrupted,
}

impl Error {
    /// Whether the archive simply ends too early, so that what was read so far is good.
    pub fn is_truncation(&self) -> bool {
        match self {
            Self::Source(error) => matches!(error.cause, source::Cause::Truncated),
            Self::Codec(error) => matches!(error.cause, codec::Cause::Truncated),
            Self::Tar(error) => matches!(error.cause, tar::Cause::Truncated(_)),
            Self::NotAnArchive | Self::UnsupportedFormat(_) | Self::Interrupted => false,
        }
    }
}
