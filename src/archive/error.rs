//! Why an archive cannot be scanned or read.

use std::borrow::Cow;

use super::scan;
use super::zeros::MAX_ZERO_BYTES;
use crate::base::extent::Packed;
use crate::base::sha256::Sha256;
use crate::index::TooMuchMemory;
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
    /// There is not one byte.
    #[error("it is empty")]
    Empty,
    /// A saved index says that there are more entries than
    /// [`entries`](crate::tar::Limits::entries) allows.
    #[error("the archive has {entries} entries, and {limit} are allowed")]
    TooManyEntries {
        /// How many there are.
        entries: u64,
        /// How many are allowed.
        limit: u64,
    },
    /// The index needs more memory than is allowed.
    #[error(transparent)]
    TooMuchMemory(#[from] TooMuchMemory),
    /// Zeros follow each other without an end in sight, and the source does not say how long it is.
    #[error(
        "more than {} MiB of zeros follow each other, and the source does not say how long it is",
        MAX_ZERO_BYTES >> 20
    )]
    EndlessZeros,
    /// A packed format that is recognised and not supported.
    #[error("{0} is not supported")]
    UnsupportedFormat(&'static str),
    /// An encrypted file.
    #[error("it is encrypted with {0}")]
    Encrypted(codec::Encryption),
    /// An HTML document.
    #[error("this is an HTML document, perhaps an error page, and no archive")]
    WebPage,
    /// The packed bytes are not those that were asked for.
    #[error("its SHA-256 is {found}, not {expected}")]
    DigestMismatch {
        /// What was asked for.
        expected: Sha256,
        /// What is there.
        found: Sha256,
    },
    /// The source gives other packed bytes than the scan read.
    #[error("the block at byte {} of the archive is not as it was indexed", .packed.0)]
    BlockMismatch {
        /// Where the first block begins that differs.
        packed: Packed,
    },
    /// The decompressed bytes are not those that were asked for.
    #[error("the SHA-256 of its decompressed bytes is {found}, not {expected}")]
    PlainDigestMismatch {
        /// The digest that was asked for.
        expected: Sha256,
        /// The digest of the bytes that were decompressed.
        found: Sha256,
    },
    /// A thread of ours is gone.
    #[error("decoding was interrupted")]
    Interrupted,
}

/// What to do about damage.
const HINT_DAMAGED: &str = "the archive is damaged: get another copy";

/// What to do about an archive of which the end is missing.
const HINT_TRUNCATED: &str = "get a whole copy, or take its readable part with --allow-truncated";

/// What to do about a packing that nobody here can undo.
const HINT_REPACK: &str = "repack it as gzip, lz4, zstd, xz or bzip2, or unpack it first";

/// What to do about bytes that someone has vouched for in vain.
const HINT_DIGEST_MISMATCH: &str = "what came of it must not be trusted: compare the digest with the one that was \
                     published";

/// What to do about an archive that is not the indexed one, although its server says so.
const HINT_REPLACED: &str = "the archive was replaced or damaged at its source: if it is right, remove its \
                        index with `tarfs cache clear` and mount it again";

/// What to do about something else in the archive's place.
const HINT_CHECK_SOURCE: &str = "check that SOURCE names the archive itself";

/// What to do about an archive of which more has to be kept in memory than is allowed.
const HINT_RAISE_MEMORY: &str = "if that is to be expected, allow it with a larger --memory: as much may be \
                         kept as is twice that";

/// What to do about an archive that holds more of something than any that was meant well.
const HINT_FIXED_LIMIT: &str = "ordinary archives stay far below it, and no flag raises it: this one is \
                         damaged, or was made to do harm";

/// What to do about an archive with more entries than the user allowed.
pub const HINT_RAISE_MAX_ENTRIES: &str =
    "if that is to be expected, allow it with a larger --max-entries";

/// What to do about an archive whose index needs more memory than is allowed.
pub const HINT_RAISE_INDEX_MEMORY: &str =
    "if that is to be expected, allow it with a larger --index-memory";

/// What to do about a source that may never end.
const HINT_SAVE_TO_FILE: &str = "it may never end; if it does, save it to a file and name that";

/// What to do about an archive that is larger than the user allowed.
const HINT_RAISE_MAX_UNPACKED_SIZE: &str =
    "if that is to be expected, allow it with a larger --max-unpacked-size";

impl Error {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<Cow<'static, str>> {
        if let Self::Codec(error) = self
            && let codec::Cause::MemoryLimit { needed_bytes, .. } = error.cause
        {
            let mebibytes = scan::memory_for_state(needed_bytes).div_ceil(1 << 20);
            return Some(Cow::from(format!("allow it with --memory {mebibytes}MiB")));
        }
        if let Self::Source(error) = self
            && !self.is_truncation()
        {
            return error.cause.hint();
        }
        if let Self::Encrypted(encryption) = self {
            let command = encryption.decrypt_command();
            return Some(Cow::from(format!(
                "decrypt it with `{command}` to a file and name that, or pipe the output of \
                 `{command}` to `tarfs materialize -`"
            )));
        }
        self.static_hint().map(Cow::from)
    }

    fn static_hint(&self) -> Option<&'static str> {
        match self {
            // Truncated: other causes have hints of their own.
            Self::Source(_) => Some(HINT_TRUNCATED),
            Self::Codec(error) => match error.cause {
                codec::Cause::Truncated => Some(HINT_TRUNCATED),
                codec::Cause::Malformed(_) | codec::Cause::Checksum { .. } => Some(HINT_DAMAGED),
                codec::Cause::Unsupported(_) => Some(HINT_REPACK),
                codec::Cause::MemoryLimit { .. } | codec::Cause::Cancelled => None,
            },
            Self::Tar(error) => match error.cause {
                tar::Cause::Truncated(_) => Some(HINT_TRUNCATED),
                tar::Cause::NotTar => Some(HINT_CHECK_SOURCE),
                tar::Cause::LimitExceeded {
                    which: tar::Limit::MetadataBytes,
                    ..
                } => Some(HINT_RAISE_MEMORY),
                tar::Cause::LimitExceeded { .. } => Some(HINT_FIXED_LIMIT),
                tar::Cause::TooManyEntries { .. } => Some(HINT_RAISE_MAX_ENTRIES),
                tar::Cause::TooLarge { .. } | tar::Cause::TooLong { .. } => {
                    Some(HINT_RAISE_MAX_UNPACKED_SIZE)
                }
            },
            Self::NotAnArchive | Self::WebPage | Self::Empty => Some(HINT_CHECK_SOURCE),
            Self::TooManyEntries { .. } => Some(HINT_RAISE_MAX_ENTRIES),
            Self::TooMuchMemory(_) => Some(HINT_RAISE_INDEX_MEMORY),
            Self::EndlessZeros => Some(HINT_SAVE_TO_FILE),
            Self::UnsupportedFormat(_) => Some(HINT_REPACK),
            Self::DigestMismatch { .. } | Self::PlainDigestMismatch { .. } => {
                Some(HINT_DIGEST_MISMATCH)
            }
            Self::BlockMismatch { .. } => Some(HINT_REPLACED),
            Self::Encrypted(_) | Self::Interrupted => None,
        }
    }

    /// Whether the archive simply ends too early, so that what was read so far is good.
    pub fn is_truncation(&self) -> bool {
        match self {
            Self::Source(error) => matches!(error.cause, source::Cause::Truncated),
            Self::Codec(error) => matches!(error.cause, codec::Cause::Truncated),
            Self::Tar(error) => matches!(error.cause, tar::Cause::Truncated(_)),
            Self::NotAnArchive
            | Self::Empty
            | Self::TooManyEntries { .. }
            | Self::TooMuchMemory(_)
            | Self::EndlessZeros
            | Self::UnsupportedFormat(_)
            | Self::Encrypted(_)
            | Self::WebPage
            | Self::DigestMismatch { .. }
            | Self::BlockMismatch { .. }
            | Self::PlainDigestMismatch { .. }
            | Self::Interrupted => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_error_hint_names_the_flag_that_raises_the_limit() {
        let hint = |which| {
            let error = Error::Tar(tar::Error {
                offset: crate::base::extent::Plain(0),
                cause: tar::Cause::LimitExceeded { which, limit: 1 },
            });
            error.hint().expect("something to do").into_owned()
        };
        assert!(hint(tar::Limit::MetadataBytes).contains("a larger --memory"));
        assert!(hint(tar::Limit::PaxBytes).contains("no flag raises it"));
    }
}
