//! Extended attributes: ACLs, the selection by name, and the limits of Linux.

pub(crate) mod filter;
pub mod posix_acl;

/// Longest value that Linux holds, in bytes.
pub(crate) const XATTR_SIZE_MAX: usize = 64 << 10;

/// Longest list of names that Linux returns, in bytes with a NUL each.
pub(crate) const XATTR_LIST_MAX: usize = 64 << 10;

/// Longest name that Linux holds, in bytes.
pub(crate) const XATTR_NAME_MAX: usize = 255;

const CAPABILITY: &[u8] = b"security.capability";

/// Flag of a capability that is effective at once (`linux/capability.h`).
const EFFECTIVE: u32 = 1;

/// Whether setxattr(2) accepts this attribute on some file system.
pub(crate) fn is_storable(name: &[u8], value: &[u8]) -> bool {
    let is_prefix = matches!(name, b"user." | b"trusted." | b"security." | b"system.");
    (1..=XATTR_NAME_MAX).contains(&name.len())
        && !name.contains(&0)
        && !is_prefix
        && value.len() <= XATTR_SIZE_MAX
        && (name != CAPABILITY || is_capability(value))
}

/// Whether these are capabilities of revision 2, or of 3 with the user ID of a namespace's root.
fn is_capability(value: &[u8]) -> bool {
    const REVISION_2: u32 = 0x0200_0000;
    const REVISION_3: u32 = 0x0300_0000;
    let magic = value.first_chunk().map(|magic| u32::from_le_bytes(*magic));
    matches!(
        (value.len(), magic.map(|magic| magic & !EFFECTIVE)),
        (20, Some(REVISION_2)) | (24, Some(REVISION_3))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_attributes_that_setxattr_accepts_are_storable() {
        assert!(is_storable(b"user.a", &vec![0; XATTR_SIZE_MAX]));
        assert!(!is_storable(b"user.a", &vec![0; XATTR_SIZE_MAX + 1]));
        assert!(is_storable(&[b'n'; XATTR_NAME_MAX], b""));
        assert!(!is_storable(&[b'n'; XATTR_NAME_MAX + 1], b""));
        for name in [&b""[..], b"user.", b"trusted.", b"security.", b"user.\0"] {
            assert!(!is_storable(name, b"1"), "{name:?}");
        }
    }

    #[test]
    fn capabilities_have_revision_2_or_3() {
        let value = |magic: u32, len: usize| {
            let mut value = vec![0; len];
            value.splice(..4, magic.to_le_bytes());
            is_storable(CAPABILITY, &value)
        };
        assert!(value(0x0200_0000, 20) && value(0x0200_0001, 20) && value(0x0300_0001, 24));
        assert!(!value(0x0100_0001, 12) && !value(0x0200_0000, 24) && !value(0x0300_0000, 20));
        assert!(!is_storable(CAPABILITY, b"") && !is_storable(CAPABILITY, b"\0\0"));
    }
}
