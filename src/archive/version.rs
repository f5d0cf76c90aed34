//! Version of an opened tree, as text that another process can compare.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use super::Archive;
use super::TreeOrigin;
use super::error::{Error, ReadError};
use super::volume::Volume;
use crate::source::{self, Cause};

/// Bytes of the hash of a fingerprint.
const FINGERPRINT_BYTES: usize = 16;

/// Version of the archive of a tree, or of the archives of all its layers.
///
/// Its text has no blanks and no slashes, and is at most 98 bytes long for each archive.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Version(Vec<ArchiveVersion>);

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct ArchiveVersion {
    /// Hash of all packed bytes; `None` if the index was made without some of them, or only its publisher vouches for it.
    content_id: Option<blake3::Hash>,
    /// Hash of the source's fingerprint, as every machine sees it.
    fingerprint: [u8; FINGERPRINT_BYTES],
}

/// Error: a text is no version.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("not a version of an archive")]
pub struct ParseVersionError;

impl Version {
    /// The version of `volume`, whose scan is over.
    pub fn of(volume: &dyn Volume) -> Self {
        let archives = volume.archives().into_iter();
        Self(archives.map(ArchiveVersion::of).collect())
    }

    /// Whether both are the same version: by the content of each archive, or by what its server says of it if one of the
    /// two has no content id.
    pub fn is_same(&self, other: &Self) -> bool {
        let mut pairs = self.0.iter().zip(&other.0);
        self.0.len() == other.0.len() && pairs.all(|(one, other)| one.is_same(other))
    }

    /// Checks that `volume` has this version.
    ///
    /// # Errors
    /// [`ReadError::Changed`].
    pub fn check(&self, volume: &dyn Volume) -> Result<(), ReadError> {
        if self.is_same(&Self::of(volume)) {
            return Ok(());
        }
        let archives = volume.archives();
        let mut pairs = self.0.iter().zip(&archives);
        let other = pairs.find(|(pinned, found)| !pinned.is_same(&ArchiveVersion::of(found)));
        let named = other.map(|(_, archive)| archive).or(archives.first());
        let location = named.map_or("", |archive| archive.source().location());
        let changed = source::Error::new(location, Cause::Changed);
        Err(ReadError::Changed(Arc::new(Error::Source(changed))))
    }
}

impl ArchiveVersion {
    fn of(archive: &Archive) -> Self {
        // A publisher may claim any.
        let content_id = match archive.tree_origin() {
            TreeOrigin::Publisher => [0; 32],
            _ => archive.index().origin().content_id,
        };
        let fingerprint = archive.source().fingerprint().without_device();
        let hash = blake3::hash(fingerprint.to_string().as_bytes());
        let mut fingerprint = [0; FINGERPRINT_BYTES];
        fingerprint.copy_from_slice(hash.as_bytes().split_at(FINGERPRINT_BYTES).0);
        Self {
            content_id: (content_id != [0; 32]).then(|| content_id.into()),
            fingerprint,
        }
    }

    fn is_same(&self, other: &Self) -> bool {
        match (self.content_id, other.content_id) {
            (Some(ours), Some(theirs)) => ours == theirs,
            _ => self.fingerprint == other.fingerprint,
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, one) in self.0.iter().enumerate() {
            if number > 0 {
                f.write_str("+")?;
            }
            if let Some(content_id) = one.content_id {
                write!(f, "{content_id}")?;
            }
            write!(f, "-{:032x}", u128::from_be_bytes(one.fingerprint))?;
        }
        Ok(())
    }
}

impl FromStr for Version {
    type Err = ParseVersionError;

    fn from_str(text: &str) -> Result<Self, ParseVersionError> {
        let parts = text.split('+').map(|part| {
            let (content_id, fingerprint) = part.split_once('-')?;
            let content_id = match content_id {
                "" => None,
                hex => Some(blake3::Hash::from_hex(hex).ok()?),
            };
            let has_len = fingerprint.len() == 2 * FINGERPRINT_BYTES;
            let fingerprint = u128::from_str_radix(fingerprint, 16)
                .ok()
                .filter(|_| has_len)?;
            Some(ArchiveVersion {
                content_id,
                fingerprint: fingerprint.to_be_bytes(),
            })
        });
        let parts = parts.collect::<Option<_>>();
        parts.map(Self).ok_or(ParseVersionError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(content_id: Option<u8>, fingerprint: u8) -> Version {
        Version(vec![ArchiveVersion {
            content_id: content_id.map(|byte| [byte; 32].into()),
            fingerprint: [fingerprint; FINGERPRINT_BYTES],
        }])
    }

    #[test]
    fn version_is_that_of_its_text() {
        let both = Version([version(Some(1), 2).0, version(None, 3).0].concat());
        for version in [version(Some(200), 0), version(None, 255), both] {
            let text = version.to_string();
            assert_eq!(text.parse(), Ok(version), "{text}");
        }
        for text in [
            "",
            "-",
            "+",
            "-0",
            "x-00000000000000000000000000000000",
            "a",
        ] {
            assert_eq!(text.parse::<Version>(), Err(ParseVersionError), "{text}");
        }
    }

    // Promises: shard-version
    #[test]
    fn content_decides_if_both_know_it() {
        assert!(version(Some(1), 2).is_same(&version(Some(1), 3)));
        assert!(!version(Some(1), 2).is_same(&version(Some(2), 2)));
        assert!(version(Some(1), 2).is_same(&version(None, 2)));
        assert!(!version(None, 1).is_same(&version(Some(1), 2)));
        let two = Version([version(None, 1).0, version(None, 1).0].concat());
        assert!(!two.is_same(&version(None, 1)));
    }
}
