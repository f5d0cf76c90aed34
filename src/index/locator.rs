//! The key of a saved index.

use super::format;

/// Key of a saved index: the source, its version, and the options for reading it.
///
/// Two processes with equal locators may use the same index. Texts are compared byte by byte.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Locator {
    /// The URL without userinfo and signature, or the identity of a file.
    pub canonical: String,
    /// Length and validator.
    pub fingerprint: String,
    /// Every option that changes the tree or the plain bytes, in a fixed order.
    pub options: String,
}

impl Locator {
    /// The name of the index file: 64 hexadecimal digits and a suffix.
    ///
    /// Each format version has its own name, so that two versions of the program can share a directory.
    pub fn file_name(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&format::VERSION.to_le_bytes());
        for text in self.texts() {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        format!("{}.idx", hasher.finalize().to_hex())
    }

    /// The texts in the order of the format.
    pub(super) fn texts(&self) -> [&str; 3] {
        [&self.canonical, &self.fingerprint, &self.options]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moving_bytes_between_locator_fields_changes_file_name() {
        let locator = |canonical: &str, fingerprint: &str| Locator {
            canonical: canonical.to_owned(),
            fingerprint: fingerprint.to_owned(),
            options: String::new(),
        };
        assert_ne!(
            locator("ab", "c").file_name(),
            locator("a", "bc").file_name()
        );
        assert_eq!(
            locator("ab", "c").file_name(),
            locator("ab", "c").file_name()
        );
        assert_eq!(locator("", "").file_name().len(), 68);
    }
}
