//! Errors of decoding.

use std::num::NonZeroU64;

use super::Compression;
use crate::base::buffer_pool::Closed;
use crate::base::extent::Packed;
use crate::base::memory_reclaim::MemoryBroker;

/// A decoding error, with its place in the packed stream.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{compression} stream at packed byte {packed}")]
pub struct Error {
    /// The format that was being decoded.
    pub compression: Compression,
    /// Offset of the frame, block or field at fault, or of the end of input.
    pub packed: Packed,
    /// The reason.
    #[source]
    pub cause: Cause,
}

impl Error {
    /// Whether the limits of this process are the reason, and not the bytes.
    pub fn is_of_this_process(&self) -> bool {
        match self.cause {
            Cause::MemoryLimit { .. } | Cause::Cancelled => true,
            Cause::Malformed(_)
            | Cause::Checksum { .. }
            | Cause::Unsupported(_)
            | Cause::Truncated => false,
        }
    }
}

/// Why decoding failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Cause {
    /// The bytes are not what the format allows.
    #[error("malformed: {0}")]
    Malformed(String),
    /// A stored checksum does not match the decoded bytes.
    #[error("checksum mismatch: {what} is stored as {expected:#x}, computed as {computed:#x}")]
    Checksum {
        /// Which checksum.
        what: &'static str,
        /// As stored.
        expected: u64,
        /// As computed.
        computed: u64,
    },
    /// The format allows it, but this program does not support it.
    #[error("not supported: {0}")]
    Unsupported(String),
    /// Decoder state would exceed what [`Context::broker`](super::Context::broker) allows.
    #[error("decoding needs {needed_bytes} bytes of memory, {limit_bytes} are allowed")]
    MemoryLimit {
        /// Memory that the stream needs.
        needed_bytes: u64,
        /// The limit.
        limit_bytes: u64,
        /// The user's memory with which they are allowed, if it is known.
        sufficient_memory: Option<NonZeroU64>,
    },
    /// The packed bytes end in the middle.
    #[error("truncated")]
    Truncated,
    /// The pool or the broker was closed, because no caller needs the bytes any more.
    #[error("cancelled")]
    Cancelled,
}

impl Cause {
    /// Memory of `needed_bytes`, which `broker` does not lend.
    pub(crate) fn over_limit(broker: &MemoryBroker, needed_bytes: u64) -> Self {
        Self::MemoryLimit {
            needed_bytes,
            limit_bytes: broker.limit_bytes(),
            sufficient_memory: broker
                .sufficient_memory(needed_bytes)
                .and_then(NonZeroU64::new),
        }
    }

    pub(super) fn malformed(text: impl Into<String>) -> Self {
        Self::Malformed(text.into())
    }

    pub(super) fn unsupported(text: impl Into<String>) -> Self {
        Self::Unsupported(text.into())
    }

    pub(super) fn compare_checksums(
        what: &'static str,
        expected: impl Into<u64>,
        computed: impl Into<u64>,
    ) -> Result<(), Self> {
        let (expected, computed) = (expected.into(), computed.into());
        if expected == computed {
            return Ok(());
        }
        Err(Self::Checksum {
            what,
            expected,
            computed,
        })
    }

    pub(super) fn at(self, compression: Compression, packed: Packed) -> Error {
        Error {
            compression,
            packed,
            cause: self,
        }
    }
}

impl From<Closed> for Cause {
    fn from(_: Closed) -> Self {
        Self::Cancelled
    }
}
