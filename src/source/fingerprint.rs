//! Identity of a source's bytes.

use std::fmt;

use crate::base::sha256::Sha256;

/// Length and strongest validator of a source; pins one version of it.
///
/// The text of `Display` is stable and complete, so that it can be the key of saved state.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Fingerprint {
    /// Length in bytes; `None` if it is known only at the end.
    pub len: Option<u64>,
    /// Validator that distinguishes versions.
    pub validator: Validator,
}

/// Distinguishes versions of a source that have the same length.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Validator {
    /// A strong entity tag, with its quotes. It promises identical bytes.
    StrongEtag(String),
    /// Weak validators of a server; at least one is present.
    Weak {
        /// An entity tag that is not strong, as sent.
        etag: Option<String>,
        /// The `Last-Modified` date as sent.
        last_modified: Option<String>,
    },
    /// A local file's state.
    File {
        /// Device.
        dev: u64,
        /// Inode.
        ino: u64,
        /// Time of last modification, in ns since the epoch.
        mtime_ns: i128,
        /// Time of last status change, in ns since the epoch.
        ctime_ns: i128,
        /// Reason why the same state does not prove the same bytes, if any.
        doubt: Option<Doubt>,
    },
    /// Trusted digest of all bytes. A reader of all bytes compares it.
    Digest(Sha256),
    /// Trusted digest of the decompressed bytes. A scan compares it.
    PlainDigest {
        /// SHA-256 of the decompressed bytes.
        sha256: Sha256,
        /// Length and validator of the packed bytes.
        packed: Box<Fingerprint>,
    },
    /// Versions of the sources that are joined in this order.
    Joined(Vec<Fingerprint>),
    /// Version of the whole of which this is a part.
    Part {
        /// Offset of the part in the whole.
        start: u64,
        /// Length and validator of the whole.
        whole: Box<Fingerprint>,
    },
    /// No validator.
    None,
}

/// Reason why no validator proves the version.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
pub enum Doubt {
    /// A block device, whose change time does not change when it is written or replaced.
    #[error("the system keeps no version of a block device")]
    Device,
    /// A file whose change time is not set by this kernel.
    #[error("its file system is not known to record each change of a file")]
    FileSystem,
    /// A file whose next change may get the same change time.
    #[error("it was still being changed when it was opened, or its change time is in the future")]
    Unsettled,
    /// A server that sends neither an entity tag nor a date.
    #[error("the server names no version (neither ETag nor Last-Modified)")]
    NoValidator,
}

impl Fingerprint {
    /// Parses the `Display` text of a fingerprint with a length and a strong entity tag.
    pub fn parse_strong_etag(text: &str) -> Option<Self> {
        let (len, etag) = text.strip_prefix("len=")?.split_once(" etag=")?;
        let found = Self {
            len: Some(len.parse().ok()?),
            validator: Validator::from_http(Some(etag), None),
        };
        // The text of a weak one may have a date after its tag.
        (found.is_strong() && found.to_string() == text).then_some(found)
    }

    /// Whether equal fingerprints prove equal bytes.
    pub fn is_strong(&self) -> bool {
        match &self.validator {
            Validator::StrongEtag(_) | Validator::Digest(_) => true,
            Validator::File { doubt, .. } => doubt.is_none(),
            Validator::Part { whole, .. } => whole.is_strong(),
            Validator::Joined(parts) => parts.iter().all(Self::is_strong),
            Validator::PlainDigest { packed, .. } => packed.is_strong(),
            Validator::Weak { .. } | Validator::None => false,
        }
    }

    /// Whether a part of it is the state of a local file.
    pub fn is_local(&self) -> bool {
        match &self.validator {
            Validator::File { .. } => true,
            Validator::Part { whole, .. } => whole.is_local(),
            Validator::Joined(parts) => parts.iter().any(Self::is_local),
            Validator::PlainDigest { packed, .. } => packed.is_local(),
            Validator::StrongEtag(_)
            | Validator::Digest(_)
            | Validator::Weak { .. }
            | Validator::None => false,
        }
    }

    /// Reason why equal fingerprints prove nothing, not even about bytes that another process read.
    pub fn doubt(&self) -> Option<Doubt> {
        match &self.validator {
            Validator::File { doubt, .. } => *doubt,
            Validator::Part { whole, .. } => whole.doubt(),
            Validator::Joined(parts) => parts.iter().find_map(Self::doubt),
            Validator::PlainDigest { packed, .. } => packed.doubt(),
            Validator::None => Some(Doubt::NoValidator),
            Validator::StrongEtag(_) | Validator::Weak { .. } | Validator::Digest(_) => None,
        }
    }

    /// The fingerprint without what another machine sees otherwise of the same file: its device, and the doubts about it.
    pub(crate) fn without_device(&self) -> Self {
        let validator = match &self.validator {
            Validator::File {
                ino,
                mtime_ns,
                ctime_ns,
                ..
            } => Validator::File {
                dev: 0,
                ino: *ino,
                mtime_ns: *mtime_ns,
                ctime_ns: *ctime_ns,
                doubt: None,
            },
            Validator::PlainDigest { sha256, packed } => Validator::PlainDigest {
                sha256: *sha256,
                packed: Box::new(packed.without_device()),
            },
            Validator::Joined(parts) => {
                Validator::Joined(parts.iter().map(Self::without_device).collect())
            }
            Validator::Part { start, whole } => Validator::Part {
                start: *start,
                whole: Box::new(whole.without_device()),
            },
            other => other.clone(),
        };
        Self {
            len: self.len,
            validator,
        }
    }

    /// Trusted digest of all bytes, if any.
    pub fn sha256(&self) -> Option<Sha256> {
        match &self.validator {
            Validator::Digest(sha256) => Some(*sha256),
            Validator::PlainDigest { packed, .. } => packed.sha256(),
            _ => None,
        }
    }

    /// Trusted digest of the decompressed bytes, if any.
    pub fn plain_sha256(&self) -> Option<Sha256> {
        match self.validator {
            Validator::PlainDigest { sha256, .. } => Some(sha256),
            _ => None,
        }
    }

    /// Whether `other` may be the same version. Validators must be equal, and lengths where both are known.
    /// A digest does not contradict a server's validator; readers compare the bytes with it.
    pub fn matches(&self, other: &Self) -> bool {
        let lens_agree = match (self.len, other.len) {
            (Some(ours), Some(theirs)) => ours == theirs,
            _ => true,
        };
        let is_digest = matches!(self.validator, Validator::Digest(_));
        lens_agree && (is_digest || self.validator == other.validator)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.len {
            Some(len) => write!(f, "len={len}")?,
            None => f.write_str("len=?")?,
        }
        match &self.validator {
            Validator::StrongEtag(etag) => write!(f, " etag={etag}"),
            Validator::Weak {
                etag,
                last_modified,
            } => {
                if let Some(etag) = etag {
                    write!(f, " etag={etag}")?;
                }
                if let Some(date) = last_modified {
                    write!(f, " last-modified={date}")?;
                }
                Ok(())
            }
            Validator::File {
                dev,
                ino,
                mtime_ns,
                ctime_ns,
                doubt,
            } => {
                write!(f, " dev={dev} ino={ino} mtime={mtime_ns} ctime={ctime_ns}")?;
                // Part of the text, so that a proven version never matches state saved under a doubt.
                doubt.map_or(Ok(()), |doubt| write!(f, " doubt={doubt:?}"))
            }
            Validator::Digest(sha256) => write!(f, " sha256={sha256}"),
            Validator::PlainDigest { sha256, packed } => {
                write!(f, " plain-sha256={sha256} of {packed}")
            }
            Validator::Joined(parts) => write!(f, " joined={}", hash_texts(parts.iter())),
            Validator::Part { start, whole } => write!(f, " start={start} of {whole}"),
            Validator::None => Ok(()),
        }
    }
}

impl Validator {
    /// The strongest validator that `ETag` and `Last-Modified` provide.
    pub fn from_http(etag: Option<&str>, last_modified: Option<&str>) -> Self {
        match etag {
            Some(etag) if is_strong_etag(etag) => Self::StrongEtag(etag.to_owned()),
            None if last_modified.is_none() => Self::None,
            _ => Self::Weak {
                etag: etag.map(str::to_owned),
                last_modified: last_modified.map(str::to_owned),
            },
        }
    }
}

/// Hashes `texts`, which may be many.
pub(super) fn hash_texts(texts: impl Iterator<Item: fmt::Display>) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for text in texts {
        hasher.update(format!("{text}\n").as_bytes());
    }
    hasher.finalize()
}

/// Whether `etag` is quoted without `W/`. A tag without quotes promises nothing.
fn is_strong_etag(etag: &str) -> bool {
    etag.len() > 2 && etag.starts_with('"') && etag.ends_with('"')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn http(len: u64, etag: Option<&str>, date: Option<&str>) -> Fingerprint {
        Fingerprint {
            len: Some(len),
            validator: Validator::from_http(etag, date),
        }
    }

    #[test]
    fn only_quoted_tags_without_weak_prefix_are_strong() {
        assert!(http(1, Some("\"a\""), None).is_strong());
        for etag in ["W/\"a\"", "a", "\"\"", "\""] {
            assert!(!http(1, Some(etag), None).is_strong(), "{etag}");
        }
        assert!(!http(1, None, Some("Sat, 01 Jan 2000 00:00:00 GMT")).is_strong());
    }

    // Promises: restart-outage
    #[test]
    fn only_strong_entity_tags_are_parsed() {
        let strong = http(5, Some("\"a etag= b\""), None);
        let parsed = Fingerprint::parse_strong_etag(&strong.to_string());
        assert_eq!(parsed, Some(strong.clone()));
        let dated = http(5, Some("W/\"a\""), Some("Monday"));
        let endless = Fingerprint {
            len: None,
            ..strong
        };
        for other in [dated, endless, http(5, None, None)] {
            let text = other.to_string();
            assert_eq!(Fingerprint::parse_strong_etag(&text), None, "{text}");
        }
        assert_eq!(Fingerprint::parse_strong_etag("len=05 etag=\"a\""), None);
    }

    #[test]
    fn a_strong_tag_makes_the_date_irrelevant() {
        let pinned = http(5, Some("\"a\""), Some("Monday"));
        assert!(pinned.matches(&http(5, Some("\"a\""), Some("Tuesday"))));
        assert!(!pinned.matches(&http(5, Some("\"b\""), Some("Monday"))));
    }

    // Promises: version-file
    #[test]
    fn a_doubtful_file_state_is_weak_and_has_another_text() {
        let file = |doubt| Fingerprint {
            len: Some(5),
            validator: Validator::File {
                dev: 1,
                ino: 2,
                mtime_ns: 3,
                ctime_ns: 4,
                doubt,
            },
        };
        let part = |whole: Fingerprint| Fingerprint {
            len: Some(1),
            validator: Validator::Part {
                start: 0,
                whole: Box::new(whole),
            },
        };
        let (proven, doubtful) = (file(None), file(Some(Doubt::Unsettled)));
        assert!(proven.is_strong() && part(proven.clone()).is_strong());
        assert!(!doubtful.is_strong() && !part(doubtful.clone()).is_strong());
        assert_eq!(part(doubtful.clone()).doubt(), Some(Doubt::Unsettled));
        assert_eq!(http(5, None, None).doubt(), Some(Doubt::NoValidator));
        assert_eq!(http(5, None, Some("Monday")).doubt(), None);
        assert_ne!(proven.to_string(), doubtful.to_string());
    }

    // Promises: version-weak
    #[test]
    fn weak_validators_must_agree_in_everything() {
        let pinned = http(5, Some("W/\"a\""), Some("Monday"));
        assert!(pinned.matches(&http(5, Some("W/\"a\""), Some("Monday"))));
        assert!(!pinned.matches(&http(5, Some("W/\"a\""), Some("Tuesday"))));
        assert!(!pinned.matches(&http(5, Some("W/\"a\""), None)));
        assert!(!pinned.matches(&http(6, Some("W/\"a\""), Some("Monday"))));
    }

    // Promises: registry-ranges
    #[test]
    fn digest_agrees_with_any_validator_of_the_same_length() {
        let known = Fingerprint {
            len: Some(5),
            validator: Validator::Digest(Sha256([1; 32])),
        };
        assert!(known.matches(&http(5, Some("\"a\""), None)));
        assert!(known.matches(&http(5, None, None)));
        assert!(!known.matches(&http(6, Some("\"a\""), None)));
        assert!(!http(5, None, None).matches(&known));
    }

    #[test]
    fn an_unknown_length_agrees_with_any() {
        let known = http(5, None, Some("Monday"));
        let unknown = Fingerprint {
            len: None,
            ..known.clone()
        };
        assert!(known.matches(&unknown) && unknown.matches(&known));
        assert!(!known.matches(&http(6, None, Some("Monday"))));
    }

    #[test]
    fn different_fingerprints_have_different_texts() {
        let texts = [
            http(5, Some("\"a\""), None).to_string(),
            http(5, Some("W/\"a\""), None).to_string(),
            http(5, None, Some("Monday")).to_string(),
            http(5, None, None).to_string(),
            http(6, None, None).to_string(),
        ];
        let distinct: std::collections::BTreeSet<_> = texts.iter().collect();
        assert_eq!(distinct.len(), texts.len());
    }
}
