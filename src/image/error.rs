//! Why an image cannot be opened.

use std::borrow::Cow;

use crate::base::escape::escape;
use crate::base::sha256::Sha256;
use crate::source;
use crate::source::documents::{DocumentError, Platform};

/// An error about an image, and its location.
#[derive(Debug, thiserror::Error)]
#[error("{location}{}", document_suffix(.document.as_deref()))]
pub struct Error {
    /// Location of the image, without secrets.
    pub location: String,
    /// The file of the image at fault, if any.
    pub document: Option<String>,
    /// The reason.
    #[source]
    pub cause: Box<Cause>,
}

fn document_suffix(document: Option<&str>) -> String {
    document.map_or_else(String::new, |document| {
        format!(": {}", escape(document.as_bytes()))
    })
}

/// Reasons why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Cause {
    /// It cannot be read.
    #[error(transparent)]
    Source(#[from] source::Error),
    /// The image lacks the document that marks its kind.
    #[error("there is no {missing}, so this is no image of the kind '{kind}'")]
    NotAnImage {
        /// The missing document.
        missing: &'static str,
        /// The kind of image that the user named.
        kind: &'static str,
    },
    /// The image refers to a missing file.
    #[error("it is missing")]
    Missing,
    /// A document violates the specification.
    #[error("{0}")]
    Malformed(String),
    /// A feature of the image is not supported.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// A document exceeds the maximum length.
    #[error("it has {len} bytes, and {limit} are allowed")]
    TooLong {
        /// Its length in bytes.
        len: u64,
        /// The maximum.
        limit: u64,
    },
    /// The length differs from that in the descriptor.
    #[error("it has {found} bytes, not {expected}")]
    SizeMismatch {
        /// Length in the descriptor.
        expected: u64,
        /// Actual length.
        found: u64,
    },
    /// The digest differs from that in the descriptor.
    #[error("its SHA-256 is {found}, not {expected}")]
    DigestMismatch {
        /// Digest in the descriptor.
        expected: Sha256,
        /// Actual digest.
        found: Sha256,
    },
    /// There is no image with this name.
    #[error("there is no image called '{}'{}", escape(.wanted.as_bytes()), name_list(", only ", .known))]
    NoSuchName {
        /// The name.
        wanted: String,
        /// The names of the images.
        known: Vec<String>,
    },
    /// There are several images, and the user gave no name.
    #[error("there are several images{}", name_list(": ", .0))]
    AmbiguousImage(Vec<String>),
    /// There is no image for the platform.
    #[error("there is no image for {wanted}{}", name_list(", only for ", .known))]
    NoSuchPlatform {
        /// The platform.
        wanted: Platform,
        /// The available platforms.
        known: Vec<String>,
    },
    /// The image's files do not define the user of its configuration.
    #[error("it runs as '{}', who is not in the image's /etc/{file}", escape(.name.as_bytes()))]
    UnknownUser {
        /// The user or group.
        name: String,
        /// The file without the name.
        file: &'static str,
    },
    /// The configuration or the files use an id that runtimes interpret differently.
    #[error("the user or group {number} that it runs as is larger than {max}")]
    IdTooLarge {
        /// The number.
        number: u32,
        /// The largest valid id.
        max: u32,
    },
    /// The configuration has no command.
    #[error("it names no command")]
    NoCommand,
}

const MAX_LISTED_NAMES: usize = 10;

/// `before` and the names of images; in their place, that there are none.
fn name_list(before: &str, known: &[String]) -> String {
    let listed: Vec<_> = known
        .iter()
        .take(MAX_LISTED_NAMES)
        .map(|name| format!("'{}'", escape(name.as_bytes())))
        .collect();
    match known.len().saturating_sub(listed.len()) {
        _ if listed.is_empty() => ", and none has a name".to_owned(),
        0 => format!("{before}{}", listed.join(", ")),
        more => format!("{before}{}, and {more} more", listed.join(", ")),
    }
}

impl From<DocumentError> for Cause {
    fn from(error: DocumentError) -> Self {
        match error {
            DocumentError::Malformed(what) => Self::Malformed(what),
            DocumentError::Unsupported(what) => Self::Unsupported(what),
        }
    }
}

impl Cause {
    /// Advice for the user.
    pub fn hint(&self) -> Option<Cow<'static, str>> {
        Some(Cow::from(match self {
            Self::Source(error) => return error.cause.hint(),
            Self::NotAnImage { .. } => {
                "'oci-archive:' is for OCI layouts, 'docker-archive:' for what docker save writes, \
                 'oci:' for a directory; an archive that is no image is named without any of them"
            }
            Self::Missing
            | Self::Malformed(_)
            | Self::TooLong { .. }
            | Self::SizeMismatch { .. }
            | Self::DigestMismatch { .. } => {
                "the image is damaged or incomplete: make it again or get another copy"
            }
            Self::Unsupported(_) => "convert the image, for instance with skopeo copy",
            Self::NoSuchName { .. } | Self::AmbiguousImage(_) => {
                "put a colon and the image's name or digest behind SOURCE"
            }
            Self::NoSuchPlatform { .. } => "choose one with --platform",
            Self::UnknownUser { .. } => "the image is broken: make it with a numeric user",
            Self::IdTooLarge { .. } => "the image is broken: make it with another user",
            Self::NoCommand => "put one behind SOURCE and DIR: -- COMMAND",
        }))
    }
}
