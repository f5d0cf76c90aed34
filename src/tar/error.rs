//! What can be wrong with an archive: enough to stop, or only to mention.

use std::fmt;

use super::limits::{Exceeded, Limit};
use crate::base::extent::Plain;

/// Why an archive cannot be read on.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("tar record at plain byte {offset}")]
pub struct Error {
    /// Where: the record at fault, or the end of the bytes when some are missing.
    pub offset: Plain,
    /// What.
    #[source]
    pub cause: Cause,
}

/// What stops a parser.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Cause {
    /// The bytes do not begin with a tar header, or are fewer than one record.
    #[error("this does not look like a tar archive")]
    NotTar,
    /// The bytes end early. What was complete has been reported.
    #[error("the archive is truncated: it ends in the middle of {0}")]
    Truncated(TruncatedIn),
    /// The archive is refused because it would cost too much.
    #[error("more {which} than the limit of {limit} allows")]
    LimitExceeded {
        /// What there is too much of.
        which: Limit,
        /// How much is allowed.
        limit: u64,
    },
    /// The archive has more members than [`entries`](super::Limits::entries) allows.
    #[error("member '{name}' makes more entries than the {limit} that are allowed")]
    TooManyEntries {
        /// The first one that does not fit, as it may be shown.
        name: String,
        /// How many are allowed.
        limit: u64,
    },
    /// The files' sizes add up to more than [`size`](super::Limits::size) allows.
    #[error(
        "member '{name}' of {size} bytes brings the sizes of all files to {total}, and {limit} \
         bytes are allowed"
    )]
    TooLarge {
        /// The first one that does not fit, as it may be shown.
        name: String,
        /// Bytes of it, with holes.
        size: u64,
        /// Bytes of all files up to it.
        total: u64,
        /// How many are allowed.
        limit: u64,
    },
    /// The plain stream has more bytes than [`size`](super::Limits::size) allows, of whatever.
    #[error(
        "after {members} members the archive has unpacked to more than {limit} bytes, most of them \
         not in files"
    )]
    TooLong {
        /// Members so far.
        members: u64,
        /// How many bytes are allowed with so many members.
        limit: u64,
    },
}

impl Cause {
    /// [`TooManyEntries`](Self::TooManyEntries), because of the member called `name`.
    pub fn too_many_entries(name: &[u8], limit: u64) -> Self {
        let name = printable(name);
        Self::TooManyEntries { name, limit }
    }
}

impl From<Exceeded> for Cause {
    fn from(Exceeded { which, limit }: Exceeded) -> Self {
        Self::LimitExceeded { which, limit }
    }
}

/// Where an archive was cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TruncatedIn {
    /// Inside a record that should be a header.
    Header,
    /// Inside an extension, or between it and the header that it amends.
    Extension,
    /// Inside a payload.
    Payload,
    /// Inside the zeros that fill a payload's last record.
    Padding,
}

impl fmt::Display for TruncatedIn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Header => "a header",
            Self::Extension => "an extended header",
            Self::Payload => "a member's payload",
            Self::Padding => "a member's padding",
        })
    }
}

/// Something odd.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Warning {
    /// The record it concerns.
    pub offset: Plain,
    /// What, and what was done about it.
    pub text: String,
}

/// Something to mention about a member under construction; the parser adds the place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Note {
    /// Odd, yet nothing is lost that GNU tar would keep.
    Warning(String),
    /// Something is lost; GNU tar's exit status is 2.
    Damaged(String),
}

/// Bytes as a user may see them: lossy, on one line, and of bounded length.
pub(super) fn printable(bytes: &[u8]) -> String {
    const MAX_BYTES: usize = 200;
    let head = bytes.get(..MAX_BYTES).unwrap_or(bytes);
    let dots = if head.len() < bytes.len() { "…" } else { "" };
    let text = String::from_utf8_lossy(head);
    let line: String = text
        .chars()
        .map(|letter| if letter.is_control() { '?' } else { letter })
        .collect();
    line + dots
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_shown_on_one_line_of_bounded_length() {
        assert_eq!(printable(b"a\nb\xff"), "a?b\u{fffd}");
        assert_eq!(printable(&[b'x'; 300]).chars().count(), 201);
    }
}
