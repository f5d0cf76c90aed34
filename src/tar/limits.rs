//! What a hostile archive may cost us.

use std::fmt;

/// Explicit limits, each with the attack it stops. The defaults lie far above anything that an
/// honest archive holds.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of one pax header's body. Stops an archive from making us gather gigabytes before
    /// its first member. A sparse map of format 0.1 is the largest honest one.
    pub pax_bytes: u64,
    /// Bytes of names and values that global pax headers leave in force. Stops an archive from
    /// copying a large header into each of millions of members that cost it 512 bytes each.
    pub global_bytes: u64,
    /// Extended attributes of one member, ACLs included. Stops quadratic work on duplicates.
    pub xattrs: u64,
    /// Bytes of the names and values of one member's extended attributes. Stops members that
    /// need megabytes of index each.
    pub xattr_bytes: u64,
    /// Bytes of a name or a link target. Stops paths of megabytes, which every later layer would
    /// have to walk; Linux refuses more than 4,096 in one call.
    pub name_bytes: u64,
    /// Stored pieces of one sparse file. Stops maps of single bytes from filling the memory
    /// (16 bytes each).
    pub sparse_segments: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            pax_bytes: 16 << 20,
            global_bytes: 64 << 10,
            xattrs: 1 << 10,
            xattr_bytes: 4 << 20,
            name_bytes: 64 << 10,
            sparse_segments: 2 << 20,
        }
    }
}

/// One of the [`Limits`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Limit {
    /// [`Limits::pax_bytes`].
    PaxBytes,
    /// [`Limits::global_bytes`].
    GlobalBytes,
    /// [`Limits::xattrs`].
    Xattrs,
    /// [`Limits::xattr_bytes`].
    XattrBytes,
    /// [`Limits::name_bytes`].
    NameBytes,
    /// [`Limits::sparse_segments`].
    SparseSegments,
}

impl Limit {
    /// Whether `found` is within this limit; the error to raise when it is not.
    pub(super) fn check(self, limits: &Limits, found: u64) -> Result<(), Exceeded> {
        let limit = match self {
            Self::PaxBytes => limits.pax_bytes,
            Self::GlobalBytes => limits.global_bytes,
            Self::Xattrs => limits.xattrs,
            Self::XattrBytes => limits.xattr_bytes,
            Self::NameBytes => limits.name_bytes,
            Self::SparseSegments => limits.sparse_segments,
        };
        if found > limit {
            return Err(Exceeded { which: self, limit });
        }
        Ok(())
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PaxBytes => "bytes in a pax header",
            Self::GlobalBytes => "bytes of global pax keywords",
            Self::Xattrs => "extended attributes of a member",
            Self::XattrBytes => "bytes of extended attributes of a member",
            Self::NameBytes => "bytes in a name or link target",
            Self::SparseSegments => "pieces of a sparse file",
        })
    }
}

/// A limit that was exceeded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Exceeded {
    pub(super) which: Limit,
    pub(super) limit: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_itself_is_still_allowed() {
        let limits = Limits {
            xattrs: 3,
            ..Limits::default()
        };
        assert_eq!(Limit::Xattrs.check(&limits, 3), Ok(()));
        let exceeded = Exceeded {
            which: Limit::Xattrs,
            limit: 3,
        };
        assert_eq!(Limit::Xattrs.check(&limits, 4), Err(exceeded));
    }
}
