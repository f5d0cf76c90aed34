//! Extended attributes for getxattr(2) and listxattr(2); pure.

use std::borrow::Cow;
use std::cell::LazyCell;

use crate::base::passwd::Accounts;
use crate::base::xattr::XATTR_LIST_MAX;
use crate::base::xattr::filter::XattrFilter;
use crate::base::xattr::posix_acl;
use crate::index::{Entry, Index};

/// Namespace that Linux lists only for processes with `CAP_SYS_ADMIN`.
const TRUSTED_PREFIX: &[u8] = b"trusted.";

/// Name of the `SELinux` label.
pub(super) const SELINUX_LABEL: &[u8] = b"security.selinux";

pub(super) fn value<'a>(
    mut xattrs: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    wanted: &[u8],
    accounts: &Accounts,
) -> Option<Cow<'a, [u8]>> {
    if let Some(kind) = posix_acl::Kind::of(wanted) {
        // A pax header's keyword is not an attribute's name.
        let is_attribute = wanted == kind.attribute().as_bytes();
        let acl = is_attribute.then(|| posix_acl::find_stored(xattrs, kind, accounts));
        return acl.flatten().map(Cow::Owned);
    }
    xattrs
        .find(|&(name, _)| name == wanted)
        .map(|(_, value)| Cow::Borrowed(value))
}

/// The names of `xattrs`, as listxattr(2) returns them. Omits unreadable ACLs, and lists no names at
/// all if Linux returns no list so long. `lists_trusted`, whether the caller sees `trusted.*`, is called only if there are any.
pub(super) fn list_names<'a>(
    xattrs: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    accounts: &Accounts,
    lists_trusted: impl FnOnce() -> bool,
) -> Vec<u8> {
    let lists_trusted = LazyCell::new(lists_trusted);
    let (acls, plain): (Vec<_>, Vec<_>) =
        xattrs.partition(|&(name, _)| posix_acl::Kind::of(name).is_some());
    let kinds = posix_acl::Kind::ALL.into_iter();
    let is_stored = |kind| posix_acl::find_stored(acls.iter().copied(), kind, accounts).is_some();
    let stored = kinds.filter(|&kind| is_stored(kind));
    let plain = plain.into_iter().map(|(name, _)| name);
    let listed = plain.filter(|name| !name.starts_with(TRUSTED_PREFIX) || *lists_trusted);
    let mut names = Vec::new();
    for name in listed.chain(stored.map(|kind| kind.attribute().as_bytes())) {
        names.extend_from_slice(name);
        names.push(0);
        if names.len() > XATTR_LIST_MAX {
            return Vec::new();
        }
    }
    names
}

/// Counts of extended attributes that a mount leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LeftOutXattrs {
    /// Entries of ACLs whose user or group this user namespace does not map.
    pub acl_entries: usize,
    /// Attributes other than ACLs that Linux cannot hold.
    pub attributes: usize,
}

/// Counts the extended attributes in `index` that a mount leaves out.
pub fn left_out_xattrs(index: &Index) -> LeftOutXattrs {
    if !index.has_xattrs() {
        return LeftOutXattrs::default();
    }
    let accounts = Accounts::load_system();
    let mut left_out = LeftOutXattrs::default();
    for entry in index.entries() {
        let found =
            posix_acl::Kind::ALL.map(|kind| posix_acl::find(entry.xattrs(), kind, &accounts));
        let acls = found.into_iter().filter_map(|found| found.ok().flatten());
        left_out.acl_entries += acls.map(|acl| acl.unmapped).sum::<usize>();
        left_out.attributes += unlisted(entry);
    }
    left_out
}

/// Number of the entry's attributes other than ACLs that are not listed.
fn unlisted(entry: Entry<'_>) -> usize {
    let is_plain = |(name, _): &(&[u8], &[u8])| posix_acl::Kind::of(name).is_none();
    let all = XattrFilter::everything();
    let supported = entry.shown_xattrs(&all).filter(is_plain);
    let listed = list_names(supported, &Accounts::default(), || true);
    let plain = entry.xattrs().filter(is_plain).count();
    plain - listed.split_inclusive(|&byte| byte == 0).count()
}

/// Whether file systems with attributes know the namespace of `name`. A missing ACL is no missing feature.
pub(super) fn is_known_namespace(name: &[u8]) -> bool {
    const NAMESPACES: [&[u8]; 4] = [b"user.", b"trusted.", b"security.", b"system.posix_acl_"];
    NAMESPACES.iter().any(|space| name.starts_with(space))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACL: &[u8] = b"user::rw-,user:1000:r--,group::r--,mask::r--,other::---";

    fn xattrs() -> impl Iterator<Item = (&'static [u8], &'static [u8])> {
        let pairs: [(&[u8], &[u8]); 5] = [
            (b"user.comment", b"hello"),
            (b"SCHILY.acl.access", ACL),
            (b"SCHILY.acl.default", b"user:nobody-knows-me:r--"),
            (b"security.selinux", b"label\0"),
            (b"trusted.note", b"secret"),
        ];
        pairs.into_iter()
    }

    fn get(name: &[u8]) -> Option<Vec<u8>> {
        value(xattrs(), name, &Accounts::default()).map(Cow::into_owned)
    }

    #[test]
    fn xattr_value_is_returned_unchanged() {
        assert_eq!(get(b"user.comment"), Some(b"hello".to_vec()));
        assert_eq!(get(b"security.selinux"), Some(b"label\0".to_vec()));
        assert_eq!(get(b"user.missing"), None);
    }

    // Promises: acl-forms, acl-mode
    #[test]
    fn acl_is_shown_only_as_posix_acl_xattr() {
        let bytes = get(b"system.posix_acl_access").expect("convertible");
        assert_eq!(bytes.get(..4), Some(&[2u8, 0, 0, 0][..]));
        assert_eq!(get(b"SCHILY.acl.access"), None);
        assert_eq!(get(b"system.posix_acl_default"), None);
    }

    #[test]
    fn access_acl_that_repeats_mode_is_hidden() {
        let text: &[u8] = b"user::rwx,group::r-x,other::r-x";
        let xattrs = || {
            posix_acl::Kind::ALL
                .map(|kind| (kind.keyword(), text))
                .into_iter()
        };
        let accounts = Accounts::default();
        let listed = list_names(xattrs(), &accounts, || false);
        assert_eq!(listed, b"system.posix_acl_default\0");
        assert_eq!(value(xattrs(), b"system.posix_acl_access", &accounts), None);
    }

    #[test]
    fn listxattr_lists_exactly_the_readable_names() {
        let listed = |lists_trusted| list_names(xattrs(), &Accounts::default(), || lists_trusted);
        let (plain, acl) = (
            &b"user.comment\0security.selinux\0"[..],
            b"system.posix_acl_access\0",
        );
        assert_eq!(listed(false), [plain, acl].concat());
        assert_eq!(listed(true), [plain, b"trusted.note\0", acl].concat());
    }

    // Promises: xattr-impossible
    #[test]
    fn names_over_64_kib_are_not_listed() {
        let listed = |count| {
            let names: Vec<_> = (0..count)
                .map(|number| format!("user.{number:0250}"))
                .collect();
            let xattrs = names.iter().map(|name| (name.as_bytes(), &b"v"[..]));
            list_names(xattrs, &Accounts::default(), || true).len()
        };
        assert_eq!((listed(256), listed(257)), (XATTR_LIST_MAX, 0));
    }

    // Promises: acl-forms
    #[test]
    fn acl_in_both_forms_is_listed_once() {
        let bytes = get(b"system.posix_acl_access").expect("convertible");
        let both = || {
            let stored = (posix_acl::Kind::Access.attribute().as_bytes(), &*bytes);
            [(posix_acl::Kind::Access.keyword(), ACL), stored].into_iter()
        };
        let accounts = Accounts::default();
        let listed = list_names(both(), &accounts, || false);
        assert_eq!(listed, b"system.posix_acl_access\0");
        let stored = both().skip(1);
        let found = value(stored, b"system.posix_acl_access", &accounts);
        assert_eq!(found.as_deref(), Some(&*bytes));
    }
}
