//! The formats of whiteouts in layers; pure.

use serde::{Deserialize, Serialize};

use super::tree::{Entry, EntryKind};
use crate::tar::Device;

/// Prefix of whiteout names in layers of OCI images.
const WHITEOUT_PREFIX: &[u8] = b".wh.";

const OPAQUE: &[u8] = b".wh..wh..opq";

/// How a layer marks entries of lower layers as removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum WhiteoutFormat {
    /// The image specification: `.wh.NAME` hides NAME, `.wh..wh..opq` all of lower layers in its directory.
    #[default]
    Oci,
    /// The format of overlayfs. A character device 0/0 hides its own name, as does an empty file with the
    /// attribute `trusted.overlay.whiteout`. The attribute `trusted.overlay.opaque` with value `y` makes a
    /// directory opaque. The attributes may begin with `user.` instead.
    Overlay,
    /// No whiteouts. Every member of a layer is an entry.
    Keep,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum NameKind<'a> {
    Entry,
    /// Hides this name in its directory. A name that no entry can have hides nothing.
    Whiteout(&'a [u8]),
    /// Hides everything of lower layers in its directory.
    Opaque,
}

impl WhiteoutFormat {
    /// Whether `entry` is a whiteout of its own name.
    pub fn is_whiteout(self, entry: &Entry<'_>) -> bool {
        const NONE: Device = Device { major: 0, minor: 0 };
        let is_mark = |(name, _)| matches!(overlay_mark(name), Some(b"whiteout"));
        self == Self::Overlay
            && match entry.kind() {
                EntryKind::CharDevice(device) => device == NONE,
                // The format of overlayfs nested in overlayfs, since Linux 6.7.
                EntryKind::File => entry.size() == 0 && entry.xattrs().any(is_mark),
                _ => false,
            }
    }

    pub(crate) fn classify_name(self, name: &[u8]) -> NameKind<'_> {
        match self {
            Self::Oci if name == OPAQUE => NameKind::Opaque,
            Self::Oci => name
                .strip_prefix(WHITEOUT_PREFIX)
                .map_or(NameKind::Entry, NameKind::Whiteout),
            Self::Overlay | Self::Keep => NameKind::Entry,
        }
    }

    /// Whether `directory` itself is marked as opaque.
    pub fn is_opaque(self, directory: &Entry<'_>) -> bool {
        let is_mark = |(name, value): (&[u8], &[u8])| {
            matches!(overlay_mark(name), Some(b"opaque")) && value == b"y"
        };
        self == Self::Overlay && directory.xattrs().any(is_mark)
    }

    /// Whether attribute `name` is only a mark of the layer, and hidden from users.
    pub fn hides_xattr(self, name: &[u8]) -> bool {
        self == Self::Overlay && overlay_mark(name).is_some()
    }

    /// Whether overlayfs would take `entry`'s content from another path below, which is not supported.
    pub fn is_redirected(self, entry: &Entry<'_>) -> bool {
        let is_mark = |(name, _)| matches!(overlay_mark(name), Some(b"redirect" | b"metacopy"));
        self == Self::Overlay && entry.xattrs().any(is_mark)
    }

    /// Whether `name` is reserved for whiteouts, so that it names no entry.
    pub fn is_reserved_name(self, name: &[u8]) -> bool {
        self == Self::Oci && name.starts_with(WHITEOUT_PREFIX)
    }
}

fn overlay_mark(name: &[u8]) -> Option<&[u8]> {
    let suffix = name.strip_prefix(b"trusted.overlay.");
    suffix.or_else(|| name.strip_prefix(b"user.overlay."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::archive_path::ArchivePath;
    use crate::index::test_support::{directory, file, index, member};
    use crate::tar;

    // Promises: whiteout-oci, whiteout-scope
    #[test]
    fn oci_whiteout_hides_a_name_and_opaque_marker_hides_all() {
        for (name, expected) in [
            ("x", NameKind::Entry),
            (".wh", NameKind::Entry),
            (".whx", NameKind::Entry),
            (".wh.x", NameKind::Whiteout(b"x")),
            (".wh.", NameKind::Whiteout(b"")),
            (".wh..", NameKind::Whiteout(b".")),
            (".wh...", NameKind::Whiteout(b"..")),
            (".wh..wh.x", NameKind::Whiteout(b".wh.x")),
            (".wh..wh..opq", NameKind::Opaque),
        ] {
            let meaning = |whiteouts: WhiteoutFormat| whiteouts.classify_name(name.as_bytes());
            assert_eq!(meaning(WhiteoutFormat::Oci), expected, "{name}");
            assert_eq!(meaning(WhiteoutFormat::Keep), NameKind::Entry, "{name}");
            assert_eq!(meaning(WhiteoutFormat::Overlay), NameKind::Entry, "{name}");
        }
    }

    // Promises: whiteout-overlay
    #[test]
    fn overlay_whiteouts_are_devices_or_xattrs() {
        let device = |name, minor| {
            let device = Device { major: 0, minor };
            member(name, tar::MemberKind::CharDevice(device))
        };
        let marked = |name, key: &str, value: &str| tar::Member {
            xattrs: vec![(key.as_bytes().to_vec(), value.as_bytes().to_vec())],
            ..directory(name, 0o755)
        };
        let index = index(&[
            device("gone", 0),
            device("null", 3),
            tar::Member {
                xattrs: vec![(b"user.overlay.whiteout".to_vec(), Vec::new())],
                ..file("erased", 0..0)
            },
            marked("trusted", "trusted.overlay.opaque", "y"),
            marked("user", "user.overlay.opaque", "y"),
            marked("other", "trusted.overlay.opaque", "x"),
            marked("moved", "trusted.overlay.redirect", "/elsewhere"),
        ]);
        let entry = |name: &str| {
            let path = ArchivePath::sanitize(name.as_bytes()).path;
            index.find(&path).unwrap()
        };
        let overlay = WhiteoutFormat::Overlay;
        for (name, is_whiteout) in [("gone", true), ("null", false), ("erased", true)] {
            assert_eq!(overlay.is_whiteout(&entry(name)), is_whiteout, "{name}");
            assert!(!WhiteoutFormat::Oci.is_whiteout(&entry(name)));
        }
        for (name, is_opaque) in [("trusted", true), ("user", true), ("other", false)] {
            assert_eq!(overlay.is_opaque(&entry(name)), is_opaque, "{name}");
            assert!(!WhiteoutFormat::Oci.is_opaque(&entry(name)));
        }
        assert!(overlay.is_redirected(&entry("moved")));
        assert!(!overlay.is_redirected(&entry("trusted")));
        assert!(overlay.hides_xattr(b"trusted.overlay.opaque"));
        assert!(!WhiteoutFormat::Oci.hides_xattr(b"trusted.overlay.opaque"));
    }
}
