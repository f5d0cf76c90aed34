//! Limits on the resources that a hostile archive can consume.

use super::error::{Cause, Limit};

/// Bytes of headers for each member on top of [`Limits::size`], with padding.
const HEADER_BYTES_PER_MEMBER: u64 = 4 << 10;

/// Bytes of the plain stream on top of [`Limits::size`], for one member's attributes or a tape's padding.
const EXTRA_STREAM_BYTES: u64 = 1 << 20;

const METADATA_BYTES_PER_MEMBER: u64 = 4 << 10;

const MIN_METADATA_BYTES: u64 = 256 << 20;

pub(crate) const MAX_XATTRS: u64 = 1 << 10;

pub(crate) const MAX_XATTR_BYTES: u64 = 4 << 20;

pub(crate) const MAX_NAME_BYTES: u64 = 64 << 10;

/// Explicit limits, each with the attack it stops.
///
/// The defaults are far above any honest archive. `entries` and `size` have none, because honest archives may
/// have any size; a caller that does not trust an archive sets them.
///
/// The names in one directory need no limit: an index finds them by a hash table with a random seed, lists
/// them sorted, and stores as much for each as for names in separate directories.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Maximum number of members, without the root. Stops millions of empty members, which pack to nothing,
    /// from filling memory or a disk's inodes.
    pub entries: u64,
    /// Maximum sum of all files' sizes, holes included.
    ///
    /// Stops a decompression bomb before the first member beyond it. The plain stream may be 4 KiB for each
    /// member and 1 MiB longer, so headers, skipped bytes and bytes after the end cannot bypass the limit.
    pub size: u64,
    /// Maximum number of components of a name or of a hard link's target; beyond it only the member is lost.
    ///
    /// Stops names of thousands of directories, each to be opened again for the next member. The 4,096 bytes
    /// that a system call of Linux accepts allow as many.
    pub path_depth: u64,
    /// Maximum bytes of metadata of all members, plus 4 KiB for each member.
    ///
    /// Metadata are names, link targets, extended attributes and sparse maps. An index stores those of all
    /// members, and a writer those of directories. Stops thousands of members at the other limits.
    pub metadata_bytes: u64,
    /// Maximum bytes of one pax header's body, without keywords that have no effect. The largest honest one is
    /// a sparse map of format 0.1. Stops an archive from making the parser collect gigabytes before its first
    /// member.
    pub pax_bytes: u64,
    /// Maximum bytes of names and values that global pax headers leave in force. Stops a large header from
    /// being copied into millions of members of 512 bytes each.
    pub global_bytes: u64,
    /// Maximum number of a member's extended attributes, ACLs included; further ones are left out. Stops
    /// quadratic work on duplicates.
    pub xattrs: u64,
    /// Maximum bytes of names and values of a member's attributes; an attribute beyond it is left out. Stops
    /// megabytes of index for each.
    pub xattr_bytes: u64,
    /// Maximum bytes of a name or a link target; Linux accepts at most 4,096 in one call. Stops paths of
    /// megabytes, which every later stage would have to walk.
    pub name_bytes: u64,
    /// Maximum number of pieces of a sparse file, 16 bytes of memory each. Stops maps of single bytes.
    pub sparse_segments: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            entries: u64::MAX,
            size: u64::MAX,
            path_depth: 2 << 10,
            metadata_bytes: MIN_METADATA_BYTES,
            pax_bytes: 16 << 20,
            global_bytes: 64 << 10,
            xattrs: MAX_XATTRS,
            xattr_bytes: MAX_XATTR_BYTES,
            name_bytes: MAX_NAME_BYTES,
            sparse_segments: 2 << 20,
        }
    }
}

impl Limits {
    /// Limit on [metadata](Self::metadata_bytes) if all else has `memory` bytes: twice as much, because
    /// metadata is additional, and at least 256 MiB.
    pub fn metadata_bytes_for(memory: u64) -> u64 {
        memory.saturating_mul(2).max(MIN_METADATA_BYTES)
    }

    /// Maximum bytes of the plain stream after `members` members.
    pub fn stream_bytes(&self, members: u64) -> u64 {
        let headers = members.saturating_mul(HEADER_BYTES_PER_MEMBER);
        self.size
            .saturating_add(EXTRA_STREAM_BYTES)
            .saturating_add(headers)
    }

    pub(super) fn max_metadata_bytes(&self, members: u64) -> u64 {
        self.metadata_bytes
            .saturating_add(members.saturating_mul(METADATA_BYTES_PER_MEMBER))
    }
}

impl Limit {
    pub(super) fn check(self, limits: &Limits, found: u64) -> Result<(), Cause> {
        let limit = match self {
            Self::PathDepth => limits.path_depth,
            Self::MetadataBytes => limits.metadata_bytes,
            Self::PaxBytes => limits.pax_bytes,
            Self::GlobalBytes => limits.global_bytes,
            Self::NameBytes => limits.name_bytes,
            Self::SparseSegments => limits.sparse_segments,
        };
        if found > limit {
            return Err(Cause::LimitExceeded { which: self, limit });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_limit_covers_files_and_headers() {
        let limits = Limits {
            size: 1 << 30,
            ..Limits::default()
        };
        assert_eq!(limits.stream_bytes(0), (1 << 30) + (1 << 20));
        assert_eq!(limits.stream_bytes(3), limits.stream_bytes(0) + 3 * 4096);
        assert_eq!(Limits::default().stream_bytes(7), u64::MAX);
    }

    // Promises: limit-metadata
    #[test]
    fn metadata_limit_grows_with_memory() {
        let usual = Limits::default().metadata_bytes;
        assert_eq!(Limits::metadata_bytes_for(0), usual);
        assert_eq!(Limits::metadata_bytes_for(128 << 20), usual);
        assert_eq!(Limits::metadata_bytes_for(129 << 20), usual + (2 << 20));
        assert_eq!(Limits::metadata_bytes_for(u64::MAX), u64::MAX);
    }

    #[test]
    fn value_equal_to_the_limit_is_allowed() {
        let limits = Limits {
            sparse_segments: 3,
            ..Limits::default()
        };
        assert_eq!(Limit::SparseSegments.check(&limits, 3), Ok(()));
        let exceeded = Cause::LimitExceeded {
            which: Limit::SparseSegments,
            limit: 3,
        };
        assert_eq!(Limit::SparseSegments.check(&limits, 4), Err(exceeded));
    }
}
