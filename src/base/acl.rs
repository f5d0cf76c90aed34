//! POSIX ACLs: from the text that tar carries to the bytes that Linux keeps.
//!
//! The text is that of `acl_to_text(3)` (`user::rwx,user:1000:r-x,group::r--,mask::r-x,other::---`,
//! separated by commas or newlines; star appends a numeric id as a fourth field), the bytes are
//! those of the `system.posix_acl_access` attribute (`linux/posix_acl_xattr.h`).

/// `POSIX_ACL_XATTR_VERSION`.
const VERSION: u32 = 2;
/// The id of entries that have none.
const UNDEFINED_ID: u32 = u32::MAX;

/// Whose permissions an entry of an ACL holds; the numbers are Linux's `ACL_*` tags.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Tag {
    UserObject = 0x01,
    User = 0x02,
    GroupObject = 0x04,
    Group = 0x08,
    Mask = 0x10,
    Other = 0x20,
}

/// Turns user and group names into numbers.
pub trait Names {
    /// The number of the user called `name`.
    fn user(&self, name: &[u8]) -> Option<u32>;
    /// The number of the group called `name`.
    fn group(&self, name: &[u8]) -> Option<u32>;
}

/// Knows no name: only numbers in the text count.
#[derive(Clone, Copy, Debug)]
pub struct NoNames;

impl Names for NoNames {
    fn user(&self, _name: &[u8]) -> Option<u32> {
        None
    }
    fn group(&self, _name: &[u8]) -> Option<u32> {
        None
    }
}

/// The attribute's bytes for an ACL's text; `None` when the text is malformed or names a user or
/// group that neither `names` nor a number in the text identifies.
pub fn xattr_from_text(text: &[u8], names: &impl Names) -> Option<Vec<u8>> {
    let mut entries = text
        .split(|byte| matches!(byte, b',' | b'\n'))
        .map(|line| {
            line.split(|&byte| byte == b'#')
                .next()
                .unwrap_or_default()
                .trim_ascii()
        })
        .filter(|line| !line.is_empty())
        .map(|line| entry(line, names))
        .collect::<Option<Vec<_>>>()?;
    if entries.is_empty() {
        return None;
    }
    // The kernel insists on this order.
    entries.sort_by_key(|&(tag, _, id)| (tag, id));
    let mut bytes = VERSION.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend_from_slice(&(tag as u16).to_le_bytes());
        bytes.extend_from_slice(&permissions.to_le_bytes());
        bytes.extend_from_slice(&id.to_le_bytes());
    }
    Some(bytes)
}

/// The permission bits that go with an ACL, given as the attribute's bytes: those of the owner, of the
/// mask or else the group, and of all others. `None` when it is no ACL.
pub fn mode_of_xattr(value: &[u8]) -> Option<u32> {
    let (version, rows) = value.split_first_chunk::<4>()?;
    if u32::from_le_bytes(*version) != VERSION {
        return None;
    }
    let (mut owner, mut mask, mut group, mut others) = (None, None, None, None);
    for &[low, high, bits, _, _, _, _, _] in rows.as_chunks::<8>().0 {
        let slot = match u16::from_le_bytes([low, high]) {
            tag if tag == Tag::UserObject as u16 => &mut owner,
            tag if tag == Tag::GroupObject as u16 => &mut group,
            tag if tag == Tag::Mask as u16 => &mut mask,
            tag if tag == Tag::Other as u16 => &mut others,
            _ => continue,
        };
        *slot = Some(u32::from(bits & 7));
    }
    Some(owner? << 6 | mask.or(group)? << 3 | others?)
}

fn entry(line: &[u8], names: &impl Names) -> Option<(Tag, u16, u32)> {
    let mut fields = line.split(|&byte| byte == b':').map(<[u8]>::trim_ascii);
    let kind = fields.next()?;
    let qualifier = fields.next()?;
    // Solaris and some libraries write `mask:r-x` and `other:r-x` with one field less.
    let (qualifier, permissions) = match (kind, fields.next()) {
        (b"mask" | b"m" | b"other" | b"o", None) => (&b""[..], qualifier),
        (_, permissions) => (qualifier, permissions?),
    };
    let numeric = fields.next().and_then(number);
    let (tag, id) = match kind {
        b"user" | b"u" if qualifier.is_empty() => (Tag::UserObject, UNDEFINED_ID),
        b"user" | b"u" => (
            Tag::User,
            numeric
                .or_else(|| names.user(qualifier))
                .or_else(|| number(qualifier))?,
        ),
        b"group" | b"g" if qualifier.is_empty() => (Tag::GroupObject, UNDEFINED_ID),
        b"group" | b"g" => (
            Tag::Group,
            numeric
                .or_else(|| names.group(qualifier))
                .or_else(|| number(qualifier))?,
        ),
        b"mask" | b"m" => (Tag::Mask, UNDEFINED_ID),
        b"other" | b"o" => (Tag::Other, UNDEFINED_ID),
        _ => return None,
    };
    Some((tag, permission_bits(permissions)?, id))
}

fn number(text: &[u8]) -> Option<u32> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn permission_bits(text: &[u8]) -> Option<u16> {
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

    struct Lisa;

    impl Names for Lisa {
        fn user(&self, name: &[u8]) -> Option<u32> {
            (name == b"lisa").then_some(1001)
        }
        fn group(&self, _name: &[u8]) -> Option<u32> {
            None
        }
    }

    #[test]
    fn text_becomes_the_kernels_bytes_in_the_kernels_order() {
        let text = b"user::rw-\nother::r--\nuser:1000:r-x\ngroup::r--\nmask::r-x\n";
        let bytes = xattr_from_text(text, &NoNames).expect("well-formed");
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
    fn mode_is_that_of_owner_mask_and_others() {
        let mode = |text: &[u8]| mode_of_xattr(&xattr_from_text(text, &NoNames)?);
        assert_eq!(mode(b"u::rwx,g::r-x,o::--x"), Some(0o751));
        assert_eq!(mode(b"u::rw-,u:5:rwx,g::r-x,m::rwx,o::---"), Some(0o670));
        assert_eq!(mode(b"u::rwx,o::---"), None, "no group");
        assert_eq!(mode_of_xattr(b""), None);
        assert_eq!(mode_of_xattr(&[3, 0, 0, 0]), None, "another version");
    }

    #[test]
    fn commas_comments_and_a_fourth_field_are_understood() {
        let text = b"user::rwx,user:someone:r--:1234,group::---,mask::r--,other::--- # x";
        let bytes = xattr_from_text(text, &NoNames).expect("well-formed");
        assert_eq!(bytes.get(16..20), Some(&1234u32.to_le_bytes()[..]));
    }

    #[test]
    fn names_are_looked_up() {
        let text = b"user::rwx,user:lisa:r--,group::---,mask::r--,other::---";
        assert_eq!(xattr_from_text(text, &NoNames), None);
        let bytes = xattr_from_text(text, &Lisa).expect("known");
        assert_eq!(bytes.get(16..20), Some(&1001u32.to_le_bytes()[..]));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [&b""[..], b"user", b"user::q", b"nobody::rwx", b"user:x:rwx"] {
            assert_eq!(xattr_from_text(text, &NoNames), None);
        }
    }
}
