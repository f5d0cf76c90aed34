//! Errors of opening, scanning and reading an archive.

use std::borrow::Cow;
use std::sync::Arc;

use super::index_source::published_index::PublishedIndexError;
use super::read::single_flight::FlightError;
use crate::base::escape::escape;
use crate::base::extent::{Extent, Packed, Plain};
use crate::base::sha256::Sha256;
use crate::base::stats::Stats;
use crate::index::{MissingRow, WITHOUT_PUBLISHED_INDEX};
use crate::index::{TooMuchMemory, store};
use crate::{codec, source, tar};

/// Maximum number of consecutive zeros outside of file contents, if the source has no known length. No tape
/// record has as many. A device such as `/dev/zero`, or a server, may send zeros for ever.
pub(super) const MAX_ZERO_BYTES: u64 = 64 << 20;

/// An error, by the layer that reports it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The packed bytes are unavailable.
    #[error(transparent)]
    Source(#[from] source::Error),
    /// The packed bytes cannot be decoded.
    #[error(transparent)]
    Codec(#[from] codec::Error),
    /// The plain bytes are not valid tar.
    #[error(transparent)]
    Tar(#[from] tar::Error),
    /// The first bytes are neither a tar archive nor a known packed format.
    #[error("this is neither a tar archive nor gzip, lz4, zstd, xz or bzip2")]
    NotAnArchive,
    /// The source has no bytes.
    #[error("it is empty")]
    Empty,
    /// A saved index has more entries than [`entries`](crate::tar::Limits::entries) allows.
    #[error("the archive has {entries} entries, and {limit} are allowed")]
    TooManyEntries {
        /// Number of entries.
        entries: u64,
        /// Maximum number of entries.
        limit: u64,
    },
    /// A saved index has more bytes of files than [`size`](crate::tar::Limits::size) allows.
    #[error("the files of the archive have {bytes} bytes, and {limit} are allowed")]
    TooLarge {
        /// Bytes of its files, holes included.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// The index exceeds its memory limit.
    #[error(transparent)]
    TooMuchMemory(#[from] TooMuchMemory),
    /// The stream has too long a run of zeros, and its length is unknown.
    #[error(
        "more than {} MiB of zeros in a row, from a source of unknown length",
        MAX_ZERO_BYTES >> 20
    )]
    EndlessZeros,
    /// A known packed format that is not supported.
    #[error("{0} is not supported")]
    UnsupportedFormat(&'static str),
    /// An encrypted file.
    #[error("it is encrypted with {0}")]
    Encrypted(codec::Encryption),
    /// An HTML document.
    #[error("this is an HTML document, perhaps an error page, and no archive")]
    WebPage,
    /// A file that Git LFS has not replaced by its content.
    #[error("this is a pointer of Git LFS, and not the file itself")]
    GitLfsPointer,
    /// The packed bytes do not have the expected digest.
    #[error("its SHA-256 is {found}, not {expected}")]
    DigestMismatch {
        /// The expected digest.
        expected: Sha256,
        /// The digest of the source.
        found: Sha256,
    },
    /// The source returns other packed bytes than the scan read.
    #[error("the bytes at {} of the archive are not as they were indexed", .packed.0)]
    BlockMismatch {
        /// Start of the first block that differs.
        packed: Packed,
    },
    /// The decompressed bytes do not have the expected digest.
    #[error("the SHA-256 of its decompressed bytes is {found}, not {expected}")]
    PlainDigestMismatch {
        /// The expected digest.
        expected: Sha256,
        /// The digest of the decompressed bytes.
        found: Sha256,
    },
    /// A thread of this process ended early.
    #[error("decoding was interrupted")]
    Interrupted,
}

// Hints for the user. The public ones are also used by callers that have no [`Error`].
const HINT_DAMAGED: &str = "the archive is damaged: get another copy";
/// Note about an archive that ends too early, which the options allow.
pub const TRUNCATED_NOTE: &str = "the archive is truncated; this is its readable part";

const HINT_TRUNCATED: &str = "get a whole copy, or take its readable part with --allow-truncated";
const HINT_REPACK: &str = "repack it as gzip, lz4, zstd, xz or bzip2, or unpack it first";
const HINT_DIGEST_MISMATCH: &str =
    "its data must not be trusted: compare the digest with the published one";
const HINT_REPLACED: &str = "the archive was replaced or damaged at its source: if the new archive is \
                        right, remove its index with `tarfs cache clear` and open it again";
const HINT_CHECK_SOURCE: &str =
    "check that SOURCE names the archive itself; ls(1) and cat(1) show other files";
const HINT_RAISE_MEMORY: &str = "if that is to be expected, allow it with a larger --memory: the limit \
                         is twice its value";
const HINT_FIXED_LIMIT: &str = "no flag raises it, because ordinary archives stay far below it: this one \
                         is damaged or hostile";

/// Hint for an archive with more entries than the user allows.
pub const HINT_RAISE_MAX_ENTRIES: &str =
    "if that is to be expected, allow it with a larger --max-entries";

/// Hint for an index that exceeds its memory limit.
pub const HINT_RAISE_INDEX_MEMORY: &str =
    "if that is to be expected, allow it with a larger --index-memory";
const HINT_SAVE_TO_FILE: &str =
    "the source may be endless; if it is not, save it to a file and use that";
/// Hint for a limit on the bytes of files.
pub const HINT_RAISE_MAX_UNPACKED_SIZE: &str =
    "if that is to be expected, allow it with a larger --max-unpacked-size";

impl Error {
    /// Advice for the user, if there is any.
    pub fn hint(&self) -> Option<Cow<'static, str>> {
        let hint = match self {
            Self::Source(error) if !self.is_truncation() => return error.cause.hint(),
            Self::Source(_) => HINT_TRUNCATED,
            Self::Codec(error) => match error.cause {
                codec::Cause::Truncated => HINT_TRUNCATED,
                codec::Cause::Malformed(_) | codec::Cause::Checksum { .. } => HINT_DAMAGED,
                codec::Cause::Unsupported(_) => HINT_REPACK,
                codec::Cause::MemoryLimit {
                    sufficient_memory, ..
                } => {
                    let mebibytes = sufficient_memory?.get() >> 20;
                    return Some(format!("allow it with --memory {mebibytes}MiB").into());
                }
                codec::Cause::Cancelled => return None,
            },
            Self::Tar(error) => match error.cause {
                tar::Cause::Truncated(_) => HINT_TRUNCATED,
                tar::Cause::NotTar => HINT_CHECK_SOURCE,
                tar::Cause::LimitExceeded {
                    which: tar::Limit::MetadataBytes,
                    ..
                } => HINT_RAISE_MEMORY,
                tar::Cause::LimitExceeded { .. } => HINT_FIXED_LIMIT,
                tar::Cause::TooManyEntries { .. } => HINT_RAISE_MAX_ENTRIES,
                tar::Cause::TooLarge { .. } | tar::Cause::TooLong { .. } => {
                    HINT_RAISE_MAX_UNPACKED_SIZE
                }
            },
            Self::NotAnArchive | Self::WebPage | Self::Empty => HINT_CHECK_SOURCE,
            Self::TooManyEntries { .. } => HINT_RAISE_MAX_ENTRIES,
            Self::TooLarge { .. } => HINT_RAISE_MAX_UNPACKED_SIZE,
            Self::TooMuchMemory(_) => HINT_RAISE_INDEX_MEMORY,
            Self::EndlessZeros => HINT_SAVE_TO_FILE,
            Self::UnsupportedFormat(_) => HINT_REPACK,
            Self::GitLfsPointer => "run `git lfs pull` to get it",
            Self::Encrypted(encryption) => {
                let command = encryption.decrypt_command();
                let hint = format!(
                    "decrypt it with `{command}` to a file and name that, or pipe the output of \
                     `{command}` to `tarfs materialize -`"
                );
                return Some(hint.into());
            }
            Self::DigestMismatch { .. } | Self::PlainDigestMismatch { .. } => HINT_DIGEST_MISMATCH,
            Self::BlockMismatch { .. } => HINT_REPLACED,
            Self::Interrupted => return None,
        };
        Some(hint.into())
    }

    /// Whether the archive ends too early, so that the bytes before are good.
    pub fn is_truncation(&self) -> bool {
        match self {
            Self::Source(error) => matches!(error.cause, source::Cause::Truncated),
            Self::Codec(error) => matches!(error.cause, codec::Cause::Truncated),
            Self::Tar(error) => matches!(error.cause, tar::Cause::Truncated(_)),
            _ => false,
        }
    }
}

/// Reason why a read failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ReadError {
    /// The inode is missing, or is not a regular file.
    #[error("not a regular file")]
    NotAFile,
    /// The source has another version than the indexed one.
    #[error("the archive changed at its source")]
    Changed(#[source] Arc<Error>),
    /// The source no longer exists.
    #[error("the archive is gone from its source")]
    NotFound(#[source] Arc<Error>),
    /// The source's bytes are unavailable.
    #[error("the archive cannot be reached")]
    Unreachable(#[source] Arc<Error>),
    /// The source did not deliver in time: its server was unreachable or busy.
    #[error("the archive could not be reached in time")]
    TimedOut(#[source] Arc<Error>),
    /// The source's server refuses access.
    #[error("the archive's server refuses access")]
    AccessDenied(#[source] Arc<Error>),
    /// The bytes arrived, but differ from the indexed ones.
    #[error("plain bytes {} to {} of the archive are damaged", extent.start().0, extent.end().0)]
    Damaged {
        /// The damaged span.
        extent: Extent<Plain>,
        /// Reason why it cannot be decoded; `None` if it decodes to other bytes.
        #[source]
        cause: Option<Arc<Error>>,
    },
    /// The memory limit does not suffice to decode the bytes.
    #[error("the archive needs more memory to be decoded")]
    Memory(#[source] Arc<Error>),
    /// The scan ended before these bytes.
    #[error("the scan of the archive ended before these bytes")]
    Unscanned,
    /// The archive ends before these bytes, which was allowed.
    #[error("the archive ends in the middle of this file; the bytes before that can be read")]
    Truncated,
    /// The index contradicts itself.
    #[error("the index is damaged; delete it and open the archive again")]
    Index,
    /// A part of the published index cannot be loaded, or contradicts another.
    #[error("a part of the index cannot be loaded, or is damaged; see the log")]
    IndexUnavailable,
    /// The published index differs from the archive's headers.
    #[error(
        "the published index does not describe the archive; open it again without that ({})",
        WITHOUT_PUBLISHED_INDEX
    )]
    IndexMismatch,
}

impl ReadError {
    /// Converts `error` of reading the plain bytes `extent`, and counts damage.
    pub(super) fn at(stats: &Stats, extent: Extent<Plain>, error: Error) -> Self {
        let error = Arc::new(error);
        match &*error {
            Error::Source(source) => match source.cause.class() {
                source::Class::Changed => Self::Changed(error),
                source::Class::NotFound => Self::NotFound(error),
                source::Class::AccessDenied => Self::AccessDenied(error),
                source::Class::Outage | source::Class::TimedOut => Self::TimedOut(error),
                _ => Self::Unreachable(error),
            },
            Error::Interrupted
            | Error::Codec(codec::Error {
                cause: codec::Cause::Cancelled,
                ..
            }) => Self::Unreachable(error),
            Error::Codec(codec::Error {
                cause: codec::Cause::MemoryLimit { .. },
                ..
            }) => Self::Memory(error),
            _ => {
                stats.damaged_spans.increment();
                Self::Damaged {
                    extent,
                    cause: Some(error),
                }
            }
        }
    }

    /// The error of the source or of its bytes that it passes on.
    pub(crate) fn archive_error(&self) -> Option<&Error> {
        match self {
            Self::Changed(error)
            | Self::NotFound(error)
            | Self::Unreachable(error)
            | Self::TimedOut(error)
            | Self::AccessDenied(error)
            | Self::Memory(error) => Some(error),
            _ => None,
        }
    }
}

impl From<MissingRow> for ReadError {
    fn from(_: MissingRow) -> Self {
        Self::IndexUnavailable
    }
}

impl FlightError for ReadError {
    fn is_shared(&self) -> bool {
        match (self, self.archive_error()) {
            // If one thread was interrupted, that says nothing about the source.
            (Self::Unreachable(_), Some(Error::Source(error))) => {
                !matches!(error.cause, source::Cause::Cancelled)
            }
            (Self::Unreachable(_), _) => false,
            // Damage may be in bytes that a waiter does not need.
            (_, error) => error.is_some(),
        }
    }
}

/// Reason why an archive cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The archive cannot be read.
    #[error("{location}{}", member_text(.member.as_deref()))]
    Archive {
        /// Location of the archive, without secrets.
        location: String,
        /// Member at which the error happened.
        member: Option<Vec<u8>>,
        /// The error.
        #[source]
        error: Box<Error>,
    },
    /// The given index file cannot be used: it is not an index.
    #[error(transparent)]
    Index(store::Error),
    /// The given index file belongs to another archive, or to another version of this one.
    #[error(
        "the index {path} does not belong to {location} as it is now; \
         make a new one with `tarfs index --output`"
    )]
    ForeignIndex {
        /// Path of the index file.
        path: String,
        /// Location of the archive.
        location: String,
    },
    /// The published index that the user names cannot be used.
    #[error("cannot use the published index")]
    PublishedIndex(#[source] Box<PublishedIndexError>),
    /// The published index cannot be loaded.
    #[error(
        "cannot load the published index; leave it out ({})",
        WITHOUT_PUBLISHED_INDEX
    )]
    IndexRows(#[source] MissingRow),
    /// The source can be read only once, and there is no disk cache to keep its bytes.
    #[error(
        "{location}: the server gives no byte ranges, so files can only be read from a disk cache; \
         allow one (no --no-disk-cache, enough --cache-size), or use `tarfs materialize`"
    )]
    NoDiskCache {
        /// Location of the archive, without secrets.
        location: String,
        /// Reason why the disk cache failed, if it was tried.
        #[source]
        cause: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// A thread cannot be started.
    #[error("cannot start a thread")]
    Threads(#[source] std::io::Error),
    /// An error that another caller holds, too.
    #[error(transparent)]
    Shared(Arc<OpenError>),
}

impl OpenError {
    /// Whether the scan failed because a decoder needs more memory.
    pub(crate) fn is_out_of_memory(&self) -> bool {
        if let Self::Shared(error) = self {
            return error.is_out_of_memory();
        }
        matches!(self, Self::Archive { error, .. }
            if matches!(&**error, Error::Codec(error)
                if matches!(error.cause, codec::Cause::MemoryLimit { .. })))
    }
}

fn member_text(member: Option<&[u8]>) -> String {
    member.map_or_else(String::new, |name| {
        format!(": in member '{}'", escape(name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: limit-error
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
