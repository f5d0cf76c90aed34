//! Extended attributes as the kernel asks for them: by name, or all names at once; pure.

use std::borrow::Cow;

use crate::base::accounts::Accounts;
use crate::base::acl;

/// The pax keyword of the ACL that is asked for access.
const ACCESS: &[u8] = b"SCHILY.acl.access";

/// Bytes of an ACL with entries for owner, group and others alone: a version, and eight each.
const MODE_ACL_BYTES: usize = 4 + 3 * 8;

/// ACLs: the pax keyword that carries one as text, and the attribute Linux keeps it in.
const ACLS: [(&[u8], &[u8]); 2] = [
    (ACCESS, b"system.posix_acl_access"),
    (b"SCHILY.acl.default", b"system.posix_acl_default"),
];

/// `SELinux`' label.
pub(super) const LABEL: &[u8] = b"security.selinux";

/// `XATTR_NAME_MAX`: longer names cannot be asked for.
const NAME_MAX_BYTES: usize = 255;

/// Whether `keyword` names an ACL as tar carries it.
pub(super) fn is_acl(keyword: &[u8]) -> bool {
    ACLS.iter().any(|&(acl, _)| acl == keyword)
}

/// The bytes of an ACL that a file system would keep: of an access ACL that says no more than the
/// mode, which tar writes beside every default ACL, Linux keeps nothing.
fn kept_acl(keyword: &[u8], text: &[u8], accounts: &Accounts) -> Option<Vec<u8>> {
    let bytes = acl::xattr_from_text(text, accounts)?;
    let is_mode = keyword == ACCESS && bytes.len() == MODE_ACL_BYTES;
    (!is_mode).then_some(bytes)
}

/// The value of the attribute `wanted` among an entry's `xattrs`.
pub(super) fn value<'a>(
    mut xattrs: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    wanted: &[u8],
    accounts: &Accounts,
) -> Option<Cow<'a, [u8]>> {
    let keyword = ACLS.iter().find(|&&(_, shown)| shown == wanted);
    if let Some(&(keyword, _)) = keyword {
        let (_, text) = xattrs.find(|&(name, _)| name == keyword)?;
        return kept_acl(keyword, text, accounts).map(Cow::Owned);
    }
    if is_acl(wanted) || !can_be_asked_for(wanted) {
        return None;
    }
    xattrs
        .find(|&(name, _)| name == wanted)
        .map(|(_, value)| Cow::Borrowed(value))
}

/// All names of an entry's `xattrs`, each ended by a zero byte, as listxattr(2) returns them. An
/// ACL that cannot be told in numbers is left out, and so is a name that cannot be asked for.
pub(super) fn names<'a>(
    xattrs: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    accounts: &Accounts,
) -> Vec<u8> {
    let mut names = Vec::new();
    for (name, value) in xattrs {
        let shown = match ACLS.iter().find(|&&(keyword, _)| keyword == name) {
            Some(_) if kept_acl(name, value, accounts).is_none() => continue,
            Some(&(_, shown)) => shown,
            None if !can_be_asked_for(name) => continue,
            None => name,
        };
        names.extend_from_slice(shown);
        names.push(0);
    }
    names
}

fn can_be_asked_for(name: &[u8]) -> bool {
    (1..=NAME_MAX_BYTES).contains(&name.len()) && !name.contains(&0)
}

/// Whether file systems that keep attributes know any of such a name. ACLs are asked for by one of the
/// system's, and not having one is no lack of support.
pub(super) fn has_namespace(name: &[u8]) -> bool {
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
            (b"user.\0odd", b"x"),
            (b"security.selinux", b"label\0"),
        ];
        pairs.into_iter()
    }

    fn get(name: &[u8]) -> Option<Vec<u8>> {
        value(xattrs(), name, &Accounts::default()).map(Cow::into_owned)
    }

    #[test]
    fn attributes_are_given_as_they_are() {
        assert_eq!(get(b"user.comment"), Some(b"hello".to_vec()));
        assert_eq!(get(b"security.selinux"), Some(b"label\0".to_vec()));
        assert_eq!(get(b"user.missing"), None);
    }

    #[test]
    fn an_acl_is_shown_in_the_kernels_form_and_only_there() {
        let bytes = get(b"system.posix_acl_access").expect("convertible");
        assert_eq!(bytes.get(..4), Some(&[2u8, 0, 0, 0][..]));
        assert_eq!(get(b"SCHILY.acl.access"), None);
        assert_eq!(get(b"system.posix_acl_default"), None);
    }

    #[test]
    fn an_access_acl_that_says_no_more_than_the_mode_is_not_shown() {
        let text: &[u8] = b"user::rwx,group::r-x,other::r-x";
        let xattrs = || [(ACCESS, text), (b"SCHILY.acl.default", text)].into_iter();
        let accounts = Accounts::default();
        assert_eq!(names(xattrs(), &accounts), b"system.posix_acl_default\0");
        assert_eq!(value(xattrs(), b"system.posix_acl_access", &accounts), None);
    }

    #[test]
    fn the_list_holds_exactly_what_can_be_had() {
        assert_eq!(
            names(xattrs(), &Accounts::default()),
            b"user.comment\0system.posix_acl_access\0security.selinux\0"
        );
    }
}
