//! Requests to the process of a mount, and its responses.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::index::LazyIndex;
use crate::serve::status::Status;

/// Maximum length of a response. A status with all its errors takes a tenth of it.
pub(super) const MAX_RESPONSE_BYTES: u64 = 16 << 20;

/// Request to the process of a mount.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "verb", rename_all = "lowercase")]
pub enum Request {
    /// For its [`Status`].
    Status,
    /// To unmount.
    Umount {
        /// Even if the mount is in use.
        #[serde(default)]
        force: bool,
        /// Device number of the mount, as in a [`Status`]; may be missing if there is only one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        device: Option<String>,
        /// Number of the mount in the table of mounts, if others have the same device.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mount_id: Option<u32>,
    },
    /// For the index of an archive, by the name of its saved index.
    Archive {
        /// The name.
        name: String,
    },
    /// For a decoded block of an archive that is in memory, or is being decoded.
    Span {
        /// As of `Archive`.
        name: String,
        /// Number of the block.
        number: u32,
    },
    /// For its index.
    Index {
        /// As of `Umount`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        device: Option<String>,
    },
}

/// Response of the process of a mount.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Response {
    /// The status of its mount.
    Status(Box<Status>),
    /// An index file follows, of this length.
    IndexFollows {
        /// The length.
        index_bytes: u64,
    },
    /// To send as the two parts of [`Self::IndexFollows`].
    #[serde(skip)]
    Index(LazyIndex),
    /// The index will be there at the end of a scan, which has read this much.
    Scanning {
        /// Packed bytes.
        scanned_bytes: u64,
    },
    /// A decoded block follows, of this length.
    SpanFollows {
        /// The length.
        span_bytes: u64,
    },
    /// The process has the archive, but not this block.
    SpanMissing {
        /// Number of the block.
        missing_span: u32,
    },
    /// To send as the two parts of [`Self::SpanFollows`].
    #[serde(skip)]
    Span(Bytes),
    /// The mount is gone, and its process ends.
    Unmounted {
        /// The mountpoint.
        unmounted: String,
        /// A bind mount, an overlay or another mount namespace still uses it, so its process continues.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        elsewhere: bool,
    },
    /// The request failed.
    Error {
        /// The reason.
        error: String,
        /// Advice.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        hint: Option<String>,
    },
}

impl Response {
    /// An error without advice.
    pub(crate) fn error(text: &str) -> Self {
        Self::Error {
            error: text.to_owned(),
            hint: None,
        }
    }
}
