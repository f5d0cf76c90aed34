//! The origin of a tree: the party that vouches for it.

use serde::{Deserialize, Serialize};

/// The party that vouches for a tree, from the weakest to the strongest.
///
/// A run accepts an origin and those that are stronger. The writer of an index chooses names, links, owners and modes, and
/// with decoder windows also contents.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug, Serialize, Deserialize)]
pub enum TreeOrigin {
    /// All who can write beside the archive, or attach an artifact to its image.
    Publisher,
    /// The manifest of the image, which has the digest of the index.
    Manifest,
    /// The user, who names the index or its digest.
    User,
    /// The archive, whose bytes this user has read.
    #[default]
    Archive,
}

impl TreeOrigin {
    /// The weakest origin that verbs accept which only show a tree.
    pub const SHOWN: Self = Self::Publisher;

    /// The weakest origin that verbs accept which write a tree. Tables of contents of other programs give another tree
    /// than a scan, for example whole seconds.
    pub const WRITTEN: Self = Self::User;
}

/// The origin of the tree of an opened archive.
#[derive(Clone, Debug, Default)]
pub(crate) struct TreeSource {
    pub(crate) origin: TreeOrigin,
    /// Location of the index that another program or user made, without secrets.
    pub(crate) location: String,
}

impl TreeSource {
    /// A note for the user, unless the tree is the archive's own.
    pub(crate) fn note(&self) -> Option<String> {
        let voucher = match self.origin {
            TreeOrigin::Publisher => {
                "whose publisher chooses names, links and owners (--no-published-index reads the archive); each \
                 file and link is compared with its header in the archive before it is read"
            }
            TreeOrigin::Manifest => "which the manifest of the image names",
            TreeOrigin::User => "which --index or --index-sha256 names",
            TreeOrigin::Archive => return None,
        };
        let location = &self.location;
        Some(format!(
            "the tree comes from the published index {location}, {voucher}"
        ))
    }
}
