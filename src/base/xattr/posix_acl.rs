//! POSIX ACLs: conversion from the two forms in tar to Linux's binary form. One form is a pax keyword with
//! the text of `acl_to_text(3)`, separated by commas or newlines (star appends a numeric id as a fourth
//! field). The other is an attribute with the bytes of `linux/posix_acl_xattr.h`.

use crate::base::passwd::Accounts;

/// `POSIX_ACL_XATTR_VERSION`.
const VERSION: u32 = 2;
const UNDEFINED_ID: u32 = u32::MAX;

/// An ACL of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// The ACL that controls access to the file.
    Access,
    /// The ACL that new entries of a directory inherit.
    Default,
}

impl Kind {
    /// Both kinds.
    pub const ALL: [Self; 2] = [Self::Access, Self::Default];

    /// The pax keyword of the text form.
    pub const fn keyword(self) -> &'static [u8] {
        match self {
            Self::Access => b"SCHILY.acl.access",
            Self::Default => b"SCHILY.acl.default",
        }
    }

    /// The extended attribute in which Linux stores it.
    pub const fn attribute(self) -> &'static str {
        match self {
            Self::Access => "system.posix_acl_access",
            Self::Default => "system.posix_acl_default",
        }
    }

    /// The kind that `name` names in either form.
    pub fn of(name: &[u8]) -> Option<Self> {
        let is_name = |kind: &Self| name == kind.keyword() || name == kind.attribute().as_bytes();
        Self::ALL.into_iter().find(is_name)
    }
}

/// The ACL is malformed, or names a user or group that is unknown here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InvalidAcl;

/// An ACL as Linux stores it in this user namespace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Acl {
    /// The attribute's bytes.
    pub bytes: Vec<u8>,
    /// Number of entries omitted because their id is not mapped here, which Linux would reject.
    pub unmapped: usize,
}

/// Finds the ACL `kind` among a member's `xattrs`. The text has priority, if readable, because its names are
/// resolved on this host.
///
/// # Errors
/// If an ACL is present but unreadable in each form.
pub fn find<'a>(
    xattrs: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    kind: Kind,
    names: &Accounts,
) -> Result<Option<Acl>, InvalidAcl> {
    let (mut text, mut bytes) = (None, None);
    for (name, value) in xattrs {
        if name == kind.keyword() {
            text = Some(value);
        } else if name == kind.attribute().as_bytes() {
            bytes = Some(value);
        }
    }
    let from_text = text.and_then(|text| acl_from_text(text, names));
    match from_text.or_else(|| acl_from_xattr(bytes?, names)) {
        None if text.is_some() || bytes.is_some() => Err(InvalidAcl),
        found => Ok(found),
    }
}

/// Whether the attribute's bytes have entries for owner, group and others only, which a mode has, too.
pub(crate) fn is_minimal(value: &[u8]) -> bool {
    value.len() == 4 + 3 * 8
}

/// The bytes of the ACL `kind` among `xattrs`, if a file system would store it. Linux stores no access ACL
/// that only repeats the mode, as tar writes beside every default ACL.
pub(crate) fn find_stored<'a>(
    xattrs: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    kind: Kind,
    names: &Accounts,
) -> Option<Vec<u8>> {
    let bytes = find(xattrs, kind, names).ok()??.bytes;
    let is_mode = kind == Kind::Access && is_minimal(&bytes);
    (!is_mode).then_some(bytes)
}

/// The bytes of the access ACL among `xattrs`, if there is one.
pub(crate) fn find_access<'a>(
    xattrs: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    names: &Accounts,
) -> Option<Vec<u8>> {
    Some(find(xattrs, Kind::Access, names).ok()??.bytes)
}

/// The `mode` of a file with the access ACL `acl`.
pub(crate) fn mode_with_acl(mode: u32, acl: Option<Vec<u8>>) -> u32 {
    let permissions = acl.and_then(|acl| mode_of_xattr(&acl));
    permissions.map_or(mode, |permissions| mode & !0o777 | permissions)
}

/// The `mode` that gives owner, group and others the rights of the access ACL `acl` in a file that lacks it. The mask
/// limits the group, and is no right of it.
pub(crate) fn mode_without_acl(mode: u32, acl: &[u8]) -> u32 {
    match permissions_of_xattr(acl) {
        Some([Some(owner), Some(group), Some(others), mask]) => {
            mode & !0o777 | owner << 6 | (group & mask.unwrap_or(7)) << 3 | others
        }
        _ => mode,
    }
}

/// Whether the access ACLs `one` and `other` differ at most in what chmod(2) changes: the rights of owner and others, and
/// the mask.
pub(crate) fn differ_only_in_mode(one: &[u8], other: &[u8]) -> bool {
    let named = |acl: &[u8]| {
        let (version, rows) = acl.split_first_chunk::<4>()?;
        let mut rows = rows.as_chunks::<8>().0.to_vec();
        rows.retain(|&[low, high, ..]| {
            let tag = Tag::from_number(u16::from_le_bytes([low, high]));
            matches!(tag, Some(Tag::User | Tag::GroupObject | Tag::Group))
        });
        rows.sort_unstable();
        Some((*version, rows))
    };
    named(one) == named(other)
}

/// Subject of an ACL entry; the values are Linux's `ACL_*` tags.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Tag {
    UserObject = 0x01,
    User = 0x02,
    GroupObject = 0x04,
    Group = 0x08,
    Mask = 0x10,
    Other = 0x20,
}

impl Tag {
    const ALL: [Self; 6] = [
        Self::UserObject,
        Self::User,
        Self::GroupObject,
        Self::Group,
        Self::Mask,
        Self::Other,
    ];

    fn from_number(number: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|&tag| tag as u16 == number)
    }
}

/// An entry of an ACL: its tag, its permission bits and its id.
type Entry = (Tag, u16, u32);

/// Parses an ACL's text. `None` if malformed, or a user or group is unknown.
fn acl_from_text(text: &[u8], names: &Accounts) -> Option<Acl> {
    let entries = text
        .split(|byte| matches!(byte, b',' | b'\n'))
        .map(|line| {
            line.split(|&byte| byte == b'#')
                .next()
                .unwrap_or_default()
                .trim_ascii()
        })
        .filter(|line| !line.is_empty())
        .map(|line| parse_entry(line, names))
        .collect::<Option<Vec<_>>>()?;
    acl_from_entries(entries, names)
}

/// Parses the attribute's bytes `value`, whose entries may be in any order.
fn acl_from_xattr(value: &[u8], names: &Accounts) -> Option<Acl> {
    let (version, rows) = value.split_first_chunk::<4>()?;
    let (rows, rest) = rows.as_chunks::<8>();
    if u32::from_le_bytes(*version) != VERSION || !rest.is_empty() {
        return None;
    }
    let entries = rows
        .iter()
        .map(|&[tag_low, tag_high, low, high, a, b, c, d]| {
            let tag = Tag::from_number(u16::from_le_bytes([tag_low, tag_high]))?;
            let permissions = u16::from_le_bytes([low, high]);
            let id = match tag {
                Tag::User | Tag::Group => u32::from_le_bytes([a, b, c, d]),
                _ => UNDEFINED_ID,
            };
            (permissions <= 7).then_some((tag, permissions, id))
        })
        .collect::<Option<Vec<_>>>()?;
    acl_from_entries(entries, names)
}

/// Encodes `entries`; `None` if the kernel would reject them in any user namespace.
fn acl_from_entries(mut entries: Vec<Entry>, names: &Accounts) -> Option<Acl> {
    let count = |wanted| entries.iter().filter(|&&(tag, ..)| tag == wanted).count();
    let is_single = [Tag::UserObject, Tag::GroupObject, Tag::Other].map(count) == [1; 3];
    let has_named = count(Tag::User) + count(Tag::Group) > 0;
    let has_valid_mask = count(Tag::Mask) == 1 || count(Tag::Mask) == 0 && !has_named;
    if !is_single || !has_valid_mask {
        return None;
    }
    let all = entries.len();
    entries.retain(|&(tag, _, id)| match tag {
        Tag::User => names.has_user_id(id),
        Tag::Group => names.has_group_id(id),
        _ => true,
    });
    // The kernel requires this order.
    entries.sort_by_key(|&(tag, _, id)| (tag, id));
    let mut bytes = VERSION.to_le_bytes().to_vec();
    for &(tag, permissions, id) in &entries {
        bytes.extend_from_slice(&(tag as u16).to_le_bytes());
        bytes.extend_from_slice(&permissions.to_le_bytes());
        bytes.extend_from_slice(&id.to_le_bytes());
    }
    let unmapped = all - entries.len();
    Some(Acl { bytes, unmapped })
}

/// Permission bits of owner, mask (or else group) and others in the attribute's bytes; `None` if malformed.
pub fn mode_of_xattr(value: &[u8]) -> Option<u32> {
    let [owner, group, others, mask] = permissions_of_xattr(value)?;
    Some(owner? << 6 | mask.or(group)? << 3 | others?)
}

/// Permission bits of owner, group, others and mask in the attribute's bytes; `None` if malformed.
fn permissions_of_xattr(value: &[u8]) -> Option<[Option<u32>; 4]> {
    let (version, rows) = value.split_first_chunk::<4>()?;
    if u32::from_le_bytes(*version) != VERSION {
        return None;
    }
    let tags = [Tag::UserObject, Tag::GroupObject, Tag::Other, Tag::Mask];
    let mut found = [None; 4];
    for &[low, high, bits, _, _, _, _, _] in rows.as_chunks::<8>().0 {
        let tag = Tag::from_number(u16::from_le_bytes([low, high]));
        for (slot, _) in found
            .iter_mut()
            .zip(tags)
            .filter(|(_, of)| Some(*of) == tag)
        {
            *slot = Some(u32::from(bits & 7));
        }
    }
    Some(found)
}

fn parse_entry(line: &[u8], names: &Accounts) -> Option<Entry> {
    let mut fields = line.split(|&byte| byte == b':').map(<[u8]>::trim_ascii);
    let kind = fields.next()?;
    let qualifier = fields.next()?;
    // Solaris and some libraries write `mask:r-x` and `other:r-x` with one field less.
    let (qualifier, permissions) = match (kind, fields.next()) {
        (b"mask" | b"m" | b"other" | b"o", None) => (&b""[..], qualifier),
        (_, permissions) => (qualifier, permissions?),
    };
    let numeric = fields.next().and_then(parse_number);
    let id = |named: Option<u32>| numeric.or(named).or_else(|| parse_number(qualifier));
    let (tag, id) = match kind {
        b"user" | b"u" if qualifier.is_empty() => (Tag::UserObject, UNDEFINED_ID),
        b"user" | b"u" => (Tag::User, id(names.user(qualifier))?),
        b"group" | b"g" if qualifier.is_empty() => (Tag::GroupObject, UNDEFINED_ID),
        b"group" | b"g" => (Tag::Group, id(names.group(qualifier))?),
        b"mask" | b"m" => (Tag::Mask, UNDEFINED_ID),
        b"other" | b"o" => (Tag::Other, UNDEFINED_ID),
        _ => return None,
    };
    Some((tag, parse_permissions(permissions)?, id))
}

fn parse_number(text: &[u8]) -> Option<u32> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn parse_permissions(text: &[u8]) -> Option<u16> {
    text.iter().try_fold(0, |bits, letter| {
        Some(
            bits | match letter {
                b'r' => 4,
                b'w' => 2,
                b'x' => 1,
                b'-' => 0,
                _ => return None,
            },
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::passwd::IdMap;

    fn xattr_from_text(text: &[u8], names: &Accounts) -> Option<Vec<u8>> {
        acl_from_text(text, names).map(|acl| acl.bytes)
    }

    #[test]
    fn text_acl_is_encoded_in_kernel_order() {
        let text = b"user::rw-\nother::r--\nuser:1000:r-x\ngroup::r--\nmask::r-x\n";
        let bytes = xattr_from_text(text, &Accounts::default()).expect("well-formed");
        let mut expected = vec![2, 0, 0, 0];
        for (tag, permissions, id) in [
            (1u16, 6u16, u32::MAX),
            (2, 5, 1000),
            (4, 4, u32::MAX),
            (16, 5, u32::MAX),
            (32, 4, u32::MAX),
        ] {
            expected.extend(tag.to_le_bytes());
            expected.extend(permissions.to_le_bytes());
            expected.extend(id.to_le_bytes());
        }
        assert_eq!(bytes, expected);
    }

    #[test]
    fn chmod_changes_no_named_entry() {
        let acl = |text: &str| xattr_from_text(text.as_bytes(), &Accounts::default());
        let acl = |text: &str| acl(text).expect("well-formed");
        let one = acl("u::rw-,u:5:rwx,u:6:r--,g::r-x,m::rwx,o::---");
        for (text, expected) in [
            ("u::rwx,u:6:r--,u:5:rwx,g::r-x,m::r--,o::r--", true),
            ("u::rw-,u:5:rwx,u:7:r--,g::r-x,m::rwx,o::---", false),
            ("u::rw-,u:5:rwx,u:6:r--,g::rwx,m::rwx,o::---", false),
            ("u::rw-,u:5:rw-,u:6:r--,g::r-x,m::rwx,o::---", false),
            ("u::rw-,u:5:rwx,g::r-x,m::rwx,o::---", false),
        ] {
            assert_eq!(differ_only_in_mode(&one, &acl(text)), expected, "{text}");
        }
    }

    #[test]
    fn mode_comes_from_owner_mask_and_others() {
        let mode = |text: &[u8]| mode_of_xattr(&xattr_from_text(text, &Accounts::default())?);
        assert_eq!(mode(b"u::rwx,g::r-x,o::--x"), Some(0o751));
        assert_eq!(mode(b"u::rw-,u:5:rwx,g::r-x,m::rwx,o::---"), Some(0o670));
        assert_eq!(mode(b"u::rwx,o::---"), None, "no group");
        assert_eq!(mode_of_xattr(b""), None);
        assert_eq!(mode_of_xattr(&[3, 0, 0, 0]), None, "another version");
    }

    #[test]
    fn text_acl_with_commas_comments_and_ids_is_parsed() {
        let text = b"user::rwx,user:someone:r--:1234,group::---,mask::r--,other::--- # x";
        let bytes = xattr_from_text(text, &Accounts::default()).expect("well-formed");
        assert_eq!(bytes.get(16..20), Some(&1234u32.to_le_bytes()[..]));
    }

    // Promises: acl-impossible
    #[test]
    fn text_acl_names_are_looked_up() {
        let text = b"user::rwx,user:lisa:r--,group::---,mask::r--,other::---";
        assert_eq!(xattr_from_text(text, &Accounts::default()), None);
        let accounts = Accounts::parse(b"lisa:x:1001:\n", b"");
        let bytes = xattr_from_text(text, &accounts).expect("known");
        assert_eq!(bytes.get(16..20), Some(&1001u32.to_le_bytes()[..]));
    }

    #[test]
    fn malformed_text_acl_is_rejected() {
        let texts = ["", "user", "user::q", "nobody::rwx", "user:x:rwx", "u::r"];
        let invalid = [
            "u::r,u:5:r,g::r,o::r",
            "u::r,u::r,g::r,o::r",
            "u::r,g::r,m::r,m::r,o::r",
        ];
        for text in texts.into_iter().chain(invalid) {
            assert_eq!(
                xattr_from_text(text.as_bytes(), &Accounts::default()),
                None,
                "{text}"
            );
        }
    }

    // Promises: acl-forms
    #[test]
    fn text_acl_beats_xattr_unless_it_is_invalid() {
        let xattr =
            |text: &str| xattr_from_text(text.as_bytes(), &Accounts::default()).expect("valid");
        let stored = xattr("u::rwx,u:5:r,g::r,m::r,o::-");
        let found = |text: &[u8], bytes: &[u8]| {
            let xattrs = [
                (Kind::Access.attribute().as_bytes(), bytes),
                (Kind::Access.keyword(), text),
            ];
            let found = find(xattrs.into_iter(), Kind::Access, &Accounts::default())?;
            Ok(found.map(|acl| acl.bytes))
        };
        assert_eq!(
            found(b"u::r,g::-,o::-", &stored),
            Ok(Some(xattr("u::r,g::-,o::-")))
        );
        assert_eq!(found(b"user:lisa:r", &stored), Ok(Some(stored.clone())));
        assert_eq!(found(b"user:lisa:r", b"\x02\0\0\0"), Err(InvalidAcl));
        let none = find(
            [(&b"user.a"[..], &b"b"[..])].into_iter(),
            Kind::Access,
            &Accounts::default(),
        );
        assert_eq!(none, Ok(None));
    }

    // Promises: acl-impossible
    #[test]
    fn malformed_acl_xattr_is_invalid_and_valid_one_is_sorted() {
        let stored =
            xattr_from_text(b"u::rw,u:5:r,g::r,m::r,o::-", &Accounts::default()).expect("valid");
        let checked =
            |value: &[u8]| acl_from_xattr(value, &Accounts::default()).map(|acl| acl.bytes);
        assert_eq!(checked(&stored).as_ref(), Some(&stored));
        let (head, rows) = stored.split_at(4);
        let mut rows: Vec<_> = rows.chunks(8).collect();
        rows.reverse();
        let reversed = [head, &rows.concat()].concat();
        assert_eq!(checked(&reversed).as_ref(), Some(&stored));
        for len in (0..stored.len()).filter(|len| len % 8 != 4) {
            assert_eq!(checked(stored.get(..len).expect("inside")), None, "{len}");
        }
        for (at, byte) in [(0, 3), (4, 3), (6, 8), (7, 1)] {
            let mut malformed = stored.clone();
            *malformed.get_mut(at).expect("inside") = byte;
            assert_eq!(checked(&malformed), None, "{at}");
        }
    }

    // Promises: acl-impossible
    #[test]
    fn acl_entries_of_unmapped_ids_are_skipped_and_counted() {
        let only = |id: u32| IdMap::parse(&format!("{id} 0 1"));
        let mut mapped = Accounts::parse(b"", b"");
        (mapped.user_ids, mapped.group_ids) = (only(5), only(6));
        let text = b"u::rw,u:5:r,u:6:r,g::r,g:5:r,g:6:r,m::rw,o::-";
        let bytes = |text| xattr_from_text(text, &Accounts::default()).expect("valid");
        let found = acl_from_text(text, &mapped).expect("valid");
        assert_eq!(found.unmapped, 2);
        assert_eq!(
            found.bytes,
            bytes(&b"u::rw,u:5:r,g::r,g:6:r,m::rw,o::-"[..])
        );
        assert_eq!(acl_from_xattr(&bytes(&text[..]), &mapped), Some(found));
        // No user namespace maps this id.
        let undefined = acl_from_text(b"u::r,u:4294967295:r,g::r,m::r,o::-", &Accounts::default());
        assert_eq!(undefined.map(|acl| acl.unmapped), Some(1));
    }
}
