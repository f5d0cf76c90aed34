//! Extended attributes of an entry as Linux shows them, and its mode.

use super::{Entry, EntryKind};
use crate::base::passwd::Accounts;
use crate::base::xattr::filter::XattrFilter;
use crate::base::xattr::{is_storable, posix_acl};

/// Namespace that Linux allows only for files and directories.
const USER_PREFIX: &[u8] = b"user.";

/// Whether Linux can hold the attribute for an entry of this kind. overlayfs could not copy up a file that
/// lists another one.
fn is_supported(name: &[u8], value: &[u8], kind: EntryKind<'_>) -> bool {
    match posix_acl::Kind::of(name) {
        Some(posix_acl::Kind::Default) => matches!(kind, EntryKind::Directory),
        Some(posix_acl::Kind::Access) => !matches!(kind, EntryKind::Symlink(_)),
        None => {
            let is_allowed = !name.starts_with(USER_PREFIX)
                || matches!(kind, EntryKind::File | EntryKind::Directory);
            is_allowed && is_storable(name, value)
        }
    }
}

impl<'a> Entry<'a> {
    /// The extended attributes that `filter` selects, without those that Linux cannot hold.
    pub fn shown_xattrs<'f>(
        &self,
        filter: &'f XattrFilter,
    ) -> impl Iterator<Item = (&'a [u8], &'a [u8])> + use<'a, 'f> {
        let (xattrs, kind) = (self.xattrs(), self.kind());
        xattrs.filter(move |(name, value)| is_supported(name, value, kind) && filter.selects(name))
    }

    /// The bytes of its access ACL, if it has one that `filter` selects.
    pub fn access_acl<'n>(
        &self,
        filter: &XattrFilter,
        accounts: impl FnOnce() -> &'n Accounts,
    ) -> Option<Vec<u8>> {
        self.xattrs().next()?;
        posix_acl::find_access(self.shown_xattrs(filter), accounts())
    }

    /// The mode that a mount shows, which is that of the header without an access ACL.
    pub fn shown_mode<'n>(
        &self,
        filter: &XattrFilter,
        accounts: impl FnOnce() -> &'n Accounts,
    ) -> u32 {
        posix_acl::mode_with_acl(self.mode(), self.access_acl(filter, accounts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: xattr-impossible
    #[test]
    fn xattr_support_depends_on_kind_of_entry() {
        let kinds = [
            EntryKind::File,
            EntryKind::Directory,
            EntryKind::Symlink(b"x"),
            EntryKind::Fifo,
        ];
        let stored = |name: &[u8]| kinds.map(|kind| is_supported(name, b"", kind));
        assert_eq!(stored(b"user.x"), [true, true, false, false]);
        assert_eq!(stored(b"security.ima"), [true; 4]);
        assert_eq!(stored(b"security.capability"), [false; 4]);
        assert_eq!(stored(b"SCHILY.acl.access"), [true, true, false, true]);
        assert_eq!(
            stored(b"system.posix_acl_default"),
            [false, true, false, false]
        );
    }
}
