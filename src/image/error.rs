//! Why an image cannot be had.

use super::platform::Platform;
use crate::base::sha256::Sha256;
use crate::source;
use std::borrow::Cow;

/// What is wrong with an image, and where.
#[derive(Debug, thiserror::Error)]
#[error("{location}{}", document_suffix(.document.as_deref()))]
pub struct Error {
    /// Where the image is, without secrets.
    pub location: String,
    /// The file in it that is at fault, if one is.
    pub document: Option<String>,
    /// What is wrong.
    #[source]
    pub cause: Box<Cause>,
}

fn document_suffix(document: Option<&str>) -> String {
    document.map_or_else(String::new, |document| {
        format!(": {}", document.escape_debug())
    })
}

/// What is wrong with an image.
#[derive(Debug, thiserror::Error)]
pub enum Cause {
    /// It cannot be read.
    #[error(transparent)]
    Source(#[from] source::Error),
    /// What makes it an image of this kind is not there.
    #[error("there is no {missing}, so this is no image of the kind '{kind}'")]
    NotAnImage {
        /// What is missing.
        missing: &'static str,
        /// As which it was named.
        kind: &'static str,
    },
    /// Something that it speaks of is not there.
    #[error("it is not there")]
    Missing,
    /// It is not what the specification wants.
    #[error("{0}")]
    Malformed(String),
    /// It is, and is not supported.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// A document that nobody needs to be so long.
    #[error("it has {len} bytes, and {limit} are allowed")]
    TooLong {
        /// Its bytes.
        len: u64,
        /// As many are read.
        limit: u64,
    },
    /// It has another length than what speaks of it says.
    #[error("it has {found} bytes, not {expected}")]
    SizeMismatch {
        /// What was said.
        expected: u64,
        /// What is there.
        found: u64,
    },
    /// It is another one than what speaks of it says.
    #[error("its SHA-256 is {found}, not {expected}")]
    DigestMismatch {
        /// What was said.
        expected: Sha256,
        /// What is there.
        found: Sha256,
    },
    /// No image here has the name.
    #[error("no image there is called '{}'; there {}", .wanted.escape_debug(), name_list(.known))]
    NoSuchName {
        /// The name.
        wanted: String,
        /// What they are called.
        known: Vec<String>,
    },
    /// There are several, and no name was given.
    #[error("several images are there; there {}", name_list(.0))]
    AmbiguousImage(Vec<String>),
    /// None is for the platform.
    #[error("no image there is for {wanted}; there {}", name_list(.known))]
    NoSuchPlatform {
        /// The platform.
        wanted: Platform,
        /// Those that there are.
        known: Vec<String>,
    },
    /// The image's configuration names a user whom its files do not know.
    #[error("it runs as '{}', who is not in the image's /etc/{file}", .name.escape_debug())]
    UnknownUser {
        /// The user or group.
        name: String,
        /// Where it was looked for.
        file: &'static str,
    },
    /// It names a user or group, or its files do, by a number that runtimes do not agree about.
    #[error("the user or group {number} that it runs as is larger than {max}")]
    IdTooLarge {
        /// The number.
        number: u32,
        /// The largest that there may be.
        max: u32,
    },
    /// There is nothing to run.
    #[error("it names no command")]
    NoCommand,
}

/// So many names are told.
const MAX_LISTED_NAMES: usize = 10;

fn name_list(known: &[String]) -> String {
    let listed: Vec<_> = known
        .iter()
        .take(MAX_LISTED_NAMES)
        .map(|name| format!("'{}'", name.escape_debug()))
        .collect();
    match known.len().saturating_sub(listed.len()) {
        _ if listed.is_empty() => "is none that has a name".to_owned(),
        0 => format!("is {}", listed.join(", ")),
        more => format!("is {}, and {more} more", listed.join(", ")),
    }
}

impl Cause {
    /// What the user can do about it.
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
