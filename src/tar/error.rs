//! Errors, warnings and damage of an archive.

use crate::base::escape::escape;
use crate::base::extent::Plain;

/// Why the parser cannot continue.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{}", place(*.offset, .cause))]
pub struct Error {
    /// The record at fault, or the end of the bytes if some are missing. Of a limit on sums, where it was noticed.
    pub offset: Plain,
    /// The reason.
    #[source]
    pub cause: Cause,
}

/// The record at fault. No single record exceeds a limit on sums.
fn place(offset: Plain, cause: &Cause) -> String {
    match cause {
        Cause::LimitExceeded {
            which: Limit::MetadataBytes,
            ..
        }
        | Cause::TooManyEntries { .. }
        | Cause::TooLarge { .. }
        | Cause::TooLong { .. } => cause.to_string(),
        _ => format!("tar record at plain byte {offset}"),
    }
}

/// Reasons to stop parsing.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Cause {
    /// The bytes do not begin with a tar header, or are shorter than one record.
    #[error("this does not look like a tar archive")]
    NotTar,
    /// The bytes end early. The parser has reported all complete members.
    #[error("the archive is truncated: it ends in the middle of {0}")]
    Truncated(TruncatedIn),
    /// The archive exceeds a limit.
    #[error("more {which} than the limit of {limit} allows")]
    LimitExceeded {
        /// The exceeded limit.
        which: Limit,
        /// Its value.
        limit: u64,
    },
    /// The archive has more members than [`entries`](super::Limits::entries) allows.
    #[error("member '{name}' makes more entries than the {limit} that are allowed")]
    TooManyEntries {
        /// The first member beyond the limit, printable.
        name: String,
        /// The limit.
        limit: u64,
    },
    /// The files' sizes add up to more than [`size`](super::Limits::size) allows.
    #[error(
        "member '{name}' of {size} bytes brings the sizes of all files to {total}, and {limit} \
         bytes are allowed"
    )]
    TooLarge {
        /// The first member beyond the limit, printable.
        name: String,
        /// Its size in bytes, holes included.
        size: u64,
        /// Bytes of all files up to it.
        total: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// The plain stream, in total, is longer than [`size`](super::Limits::size) allows.
    #[error(
        "after {members} members the archive has unpacked to more than {limit} bytes, most of them \
         not in files"
    )]
    TooLong {
        /// Members so far.
        members: u64,
        /// Allowed bytes for so many members.
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

/// One of the [`Limits`](super::Limits).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Limit {
    /// [`path_depth`](super::Limits::path_depth).
    #[error("components in a name")]
    PathDepth,
    /// [`metadata_bytes`](super::Limits::metadata_bytes).
    #[error("bytes of names, attributes and sparse maps")]
    MetadataBytes,
    /// [`pax_bytes`](super::Limits::pax_bytes).
    #[error("bytes in a pax header")]
    PaxBytes,
    /// [`global_bytes`](super::Limits::global_bytes).
    #[error("bytes of global pax keywords")]
    GlobalBytes,
    /// [`name_bytes`](super::Limits::name_bytes).
    #[error("bytes in a name or link target")]
    NameBytes,
    /// [`sparse_segments`](super::Limits::sparse_segments).
    #[error("pieces of a sparse file")]
    SparseSegments,
}

/// The part of an archive that is cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TruncatedIn {
    /// Inside a record that should be a header.
    #[error("a header")]
    Header,
    /// Inside an extension, or between it and the header that it amends.
    #[error("an extended header")]
    Extension,
    /// Inside a payload.
    #[error("a member's payload")]
    Payload,
    /// Inside the zeros that pad a payload's last record.
    #[error("a member's padding")]
    Padding,
}

/// An oddity of an archive.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Warning {
    /// The record it concerns.
    pub offset: Plain,
    /// The oddity, and how the parser treats it.
    pub text: String,
}

/// A note about a member under construction, to which the parser adds the offset.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Note {
    /// Odd, but the result is as complete as GNU tar's.
    Warning(String),
    /// Data is lost. GNU tar's exit status is 2.
    Damaged(String),
}

/// Bytes for display: escaped, on one line, and of bounded length.
pub(super) fn printable(bytes: &[u8]) -> String {
    const MAX_BYTES: usize = 200;
    let head = bytes.get(..MAX_BYTES).unwrap_or(bytes);
    let dots = if head.len() < bytes.len() { "…" } else { "" };
    escape(head) + dots
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: error-line
    #[test]
    fn limit_on_sums_names_no_record() {
        let text = |cause| {
            let offset = Plain(512);
            crate::base::error_chain::error_chain(&Error { offset, cause })
        };
        let too_long = Cause::TooLong {
            members: 3,
            limit: 7,
        };
        assert_eq!(text(too_long.clone()), too_long.to_string());
        let of_names = |which| Cause::LimitExceeded { which, limit: 1 };
        assert_eq!(
            text(of_names(Limit::MetadataBytes)),
            of_names(Limit::MetadataBytes).to_string()
        );
        let of_record = text(of_names(Limit::PaxBytes));
        assert!(
            of_record.starts_with("tar record at plain byte 512: "),
            "{of_record}"
        );
    }

    // Promises: error-line
    #[test]
    fn names_are_shown_on_one_line_of_bounded_length() {
        assert_eq!(printable(b"a\nb\xff"), "a\\nb\\377");
        assert_eq!(printable(&[b'x'; 300]).chars().count(), 201);
    }
}
