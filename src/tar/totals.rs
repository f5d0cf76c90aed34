//! Totals of the members of an archive, held to its limits.

use super::error::printable;
use super::pax::xattr_bytes;
use super::{Cause, Limit, Limits, Member, MemberKind, Segment};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct MemberTotals {
    /// Not counting the root.
    pub(super) members: u64,
    /// Bytes of files, holes included.
    size: u64,
    metadata_bytes: u64,
}

impl MemberTotals {
    /// Converts to the stored form.
    pub(crate) fn to_array(self) -> [u64; 3] {
        [self.members, self.size, self.metadata_bytes]
    }

    pub(crate) fn from_array([members, size, metadata_bytes]: [u64; 3]) -> Self {
        Self {
            members,
            size,
            metadata_bytes,
        }
    }

    /// Adds `member`; an error if the totals then exceed a limit.
    pub(crate) fn add(&mut self, member: &Member, limits: &Limits) -> Result<(), Cause> {
        let sums = Self {
            members: self.members + u64::from(!is_root(&member.name)),
            size: self.size.saturating_add(member.size),
            metadata_bytes: self.metadata_bytes.saturating_add(metadata_bytes(member)),
        };
        if sums.members > limits.entries {
            return Err(Cause::too_many_entries(&member.name, limits.entries));
        }
        if sums.size > limits.size {
            return Err(Cause::TooLarge {
                name: printable(&member.name),
                size: member.size,
                total: sums.size,
                limit: limits.size,
            });
        }
        let limit = limits.max_metadata_bytes(sums.members);
        if sums.metadata_bytes > limit {
            let which = Limit::MetadataBytes;
            return Err(Cause::LimitExceeded { which, limit });
        }
        *self = sums;
        Ok(())
    }
}

/// Checks the components of the name, and of the target of a hard link.
pub(super) fn check_depth(member: &Member, limits: &Limits) -> Result<(), Cause> {
    let depth = |path: &[u8]| {
        let components = path.split(|&byte| byte == b'/');
        components.filter(|name| !name.is_empty()).count() as u64
    };
    let link = match &member.kind {
        MemberKind::HardLink(target) => depth(target),
        _ => 0,
    };
    Limit::PathDepth.check(limits, depth(&member.name).max(link))
}

/// Whether it is `.`, `./` or such.
fn is_root(name: &[u8]) -> bool {
    let mut components = name.split(|&byte| byte == b'/');
    components.all(|component| matches!(component, b"" | b"."))
}

/// Beyond the fixed part.
fn metadata_bytes(member: &Member) -> u64 {
    let link = match &member.kind {
        MemberKind::HardLink(target) | MemberKind::Symlink(target) => target.len(),
        _ => 0,
    };
    let map = member.sparse.as_ref().map_or(0, Vec::len);
    let other = (member.name.len() + link + map * size_of::<Segment>()) as u64;
    other + xattr_bytes(&member.xattrs)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: limit-entries
    #[test]
    fn root_directory_names_are_recognised() {
        for name in [".", "./", "", "/", "././/."] {
            assert!(is_root(name.as_bytes()), "{name}");
        }
        for name in ["..", "./a", ".a/", "a/."] {
            assert!(!is_root(name.as_bytes()), "{name}");
        }
    }
}
