//! How layers say what of the layers below them is gone; pure.

use super::{Entry, Kind};
use crate::tar::Device;

/// What names begin with by which layers of images say what is gone.
const WHITEOUT_PREFIX: &[u8] = b".wh.";

/// The name that makes its directory opaque.
const OPAQUE: &[u8] = b".wh..wh..opq";

/// How layers say what of those below is not to be seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum WhiteoutFormat {
    /// As the image specification has it: `.wh.NAME` hides NAME, and `.wh..wh..opq` all that lower
    /// layers have in its directory.
    #[default]
    Oci,
    /// As overlayfs has it: a character device 0/0 hides what has its name, as does an empty file with the
    /// attribute `trusted.overlay.whiteout` or `user.overlay.whiteout`, and a directory with the attribute
    /// `trusted.overlay.opaque` or `user.overlay.opaque` of value `y` hides all that lower layers have
    /// in it.
    Overlay,
    /// Not at all: whatever is in a layer is an entry.
    Keep,
}

/// What a name in a layer means.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum NameKind<'a> {
    /// What it says.
    Entry,
    /// That nothing of this name is to be seen in its directory; of a name that nothing can have
    /// that is nothing at all.
    Whiteout(&'a [u8]),
    /// That nothing is to be seen in its directory.
    Opaque,
}

impl WhiteoutFormat {
    /// Whether `entry` is no entry, but says that nothing of its name is to be seen.
    pub fn is_whiteout(self, entry: &Entry<'_>) -> bool {
        const NONE: Device = Device { major: 0, minor: 0 };
        let is_device = || entry.kind() == Kind::CharDevice(NONE);
        self == Self::Overlay && (is_device() || is_marked_whiteout(entry))
    }

    /// What a member means by its `name`.
    pub fn classify_name(self, name: &[u8]) -> NameKind<'_> {
        match self {
            Self::Oci if name == OPAQUE => NameKind::Opaque,
            Self::Oci => name
                .strip_prefix(WHITEOUT_PREFIX)
                .map_or(NameKind::Entry, NameKind::Whiteout),
            Self::Overlay | Self::Keep => NameKind::Entry,
        }
    }

    /// Whether `directory` says by itself that nothing of lower layers is to be seen in it.
    pub fn is_opaque(self, directory: &Entry<'_>) -> bool {
        const OPAQUE: [&[u8]; 2] = [b"trusted.overlay.opaque", b"user.overlay.opaque"];
        self == Self::Overlay
            && directory
                .xattrs()
                .any(|(name, value)| OPAQUE.contains(&name) && value == b"y")
    }

    /// Whether the attribute `name` is for the layer alone, and not shown.
    pub fn hides_xattr(self, name: &[u8]) -> bool {
        const OVERLAY: [&[u8]; 2] = [b"trusted.overlay.", b"user.overlay."];
        self == Self::Overlay && OVERLAY.iter().any(|prefix| name.starts_with(prefix))
    }

    /// Whether `entry`, a directory, would have to be read together with another place of the layers below,
    /// or, a file, has its content there: that is not done.
    pub fn is_redirected(self, entry: &Entry<'_>) -> bool {
        const REDIRECTS: [&[u8]; 4] = [
            b"trusted.overlay.redirect",
            b"user.overlay.redirect",
            b"trusted.overlay.metacopy",
            b"user.overlay.metacopy",
        ];
        self == Self::Overlay && entry.xattrs().any(|(name, _)| REDIRECTS.contains(&name))
    }

    /// Whether what is called `name` is no entry and holds none.
    pub fn is_reserved_name(self, name: &[u8]) -> bool {
        self == Self::Oci && name.starts_with(WHITEOUT_PREFIX)
    }
}

/// How overlayfs nested in overlayfs writes what is gone, since Linux 6.7.
fn is_marked_whiteout(entry: &Entry<'_>) -> bool {
    const WHITEOUT: [&[u8]; 2] = [b"trusted.overlay.whiteout", b"user.overlay.whiteout"];
    entry.kind() == Kind::File
        && entry.size() == 0
        && entry.xattrs().any(|(name, _)| WHITEOUT.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::archive_path::ArchivePath;
    use crate::index::test_support::{directory, file, index, member};
    use crate::tar;

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

    #[test]
    fn overlay_whiteouts_are_devices_or_xattrs() {
        let device = |name, minor| {
            let device = Device { major: 0, minor };
            member(name, tar::Kind::CharDevice(device))
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
