//! Identity of the bytes.

use std::fmt;

use crate::base::sha256::Sha256;

/// Length and strongest validator of a source: pins one version of it while it is read.
///
/// The text of `Display` is stable and complete, so that saved state can be found by it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Fingerprint {
    /// Bytes of the whole source; `None` when only reading to the end tells.
    pub len: Option<u64>,
    /// What else tells versions apart.
    pub validator: Validator,
}

/// What tells one version of a source from another of the same length.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Validator {
    /// An entity tag that promises identical bytes, with its quotes.
    StrongEtag(String),
    /// What a server says that promises less; at least one is there.
    Weak {
        /// A weak entity tag, with its prefix and quotes.
        etag: Option<String>,
        /// The date as it came.
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
        /// Why the same state does not prove the same bytes, unless it does.
        doubt: Option<Doubt>,
    },
    /// The digest that all bytes must have, as somebody says who is trusted: whoever reads all of
    /// them holds them against it.
    Digest(Sha256),
    /// The digest that the decompressed bytes must have, by a trusted statement. A scan compares them.
    PlainDigest {
        /// SHA-256 of the decompressed bytes.
        sha256: Sha256,
        /// Length and validator of the packed bytes.
        packed: Box<Fingerprint>,
    },
    /// Of a part, the version of the whole.
    Part {
        /// Bytes of the whole before the part.
        start: u64,
        /// Length and validator of the whole.
        whole: Box<Fingerprint>,
    },
    /// Nothing.
    None,
}

/// Why nothing proves which version of a source it is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
pub enum Doubt {
    /// A block device, which gets no change time when it is written or replaced.
    #[error("the system keeps no version of a block device")]
    Device,
    /// A file whose change time does not come from this kernel.
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
    /// The fingerprint with a length and a strong entity tag of which `text` is the `Display`; `None` of any
    /// other text.
    pub fn parse_strong_etag(text: &str) -> Option<Self> {
        let (len, etag) = text.strip_prefix("len=")?.split_once(" etag=")?;
        let found = Self {
            len: Some(len.parse().ok()?),
            validator: Validator::from_http(Some(etag), None),
        };
        // A weak one may have a date behind its tag.
        (found.is_strong() && found.to_string() == text).then_some(found)
    }

    /// Whether equal fingerprints can be taken for equal bytes without looking at any.
    pub fn is_strong(&self) -> bool {
        match &self.validator {
            Validator::StrongEtag(_) | Validator::Digest(_) => true,
            Validator::File { doubt, .. } => doubt.is_none(),
            Validator::Part { whole, .. } => whole.is_strong(),
            Validator::PlainDigest { packed, .. } => packed.is_strong(),
            Validator::Weak { .. } | Validator::None => false,
        }
    }

    /// Why equal fingerprints say nothing about the bytes; `None` where a validator does.
    ///
    /// Without one, bytes that another process has read prove nothing about the source.
    pub fn doubt(&self) -> Option<Doubt> {
        match &self.validator {
            Validator::File { doubt, .. } => *doubt,
            Validator::Part { whole, .. } => whole.doubt(),
            Validator::PlainDigest { packed, .. } => packed.doubt(),
            Validator::None => Some(Doubt::NoValidator),
            Validator::StrongEtag(_) | Validator::Weak { .. } | Validator::Digest(_) => None,
        }
    }

    /// The digest that all bytes must have, if somebody said so who is trusted.
    pub fn sha256(&self) -> Option<Sha256> {
        match &self.validator {
            Validator::Digest(sha256) => Some(*sha256),
            Validator::PlainDigest { packed, .. } => packed.sha256(),
            _ => None,
        }
    }

    /// The digest that the decompressed bytes must have, if a trusted statement names one.
    pub fn plain_sha256(&self) -> Option<Sha256> {
        match self.validator {
            Validator::PlainDigest { sha256, .. } => Some(sha256),
            _ => None,
        }
    }

    /// Whether `other` can be of the same version: validators equal, and lengths wherever both
    /// are known.
    pub fn matches(&self, other: &Self) -> bool {
        let lens_agree = match (self.len, other.len) {
            (Some(ours), Some(theirs)) => ours == theirs,
            _ => true,
        };
        lens_agree && self.validator == other.validator
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
                // A state that proves the version finds nothing that was saved when it did not.
                doubt.map_or(Ok(()), |doubt| write!(f, " doubt={doubt:?}"))
            }
            Validator::Digest(sha256) => write!(f, " sha256={sha256}"),
            Validator::PlainDigest { sha256, packed } => {
                write!(f, " plain-sha256={sha256} of {packed}")
            }
            Validator::Part { start, whole } => write!(f, " start={start} of {whole}"),
            Validator::None => Ok(()),
        }
    }
}

impl Validator {
    /// The strongest that a server's `ETag` and `Last-Modified` amount to.
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

/// `"…"` without `W/` before it; what lacks its quotes promises nothing.
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

    #[test]
    fn weak_validators_must_agree_in_everything() {
        let pinned = http(5, Some("W/\"a\""), Some("Monday"));
        assert!(pinned.matches(&http(5, Some("W/\"a\""), Some("Monday"))));
        assert!(!pinned.matches(&http(5, Some("W/\"a\""), Some("Tuesday"))));
        assert!(!pinned.matches(&http(5, Some("W/\"a\""), None)));
        assert!(!pinned.matches(&http(6, Some("W/\"a\""), Some("Monday"))));
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
