//! What a saved index is found by.

use super::format;

/// Where packed bytes come from, which version of them, and how they are read. Whoever has the
/// same locator may use the same index; texts are compared as they are.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Locator {
    /// The URL without userinfo and signature, or what identifies a file.
    pub canonical: String,
    /// Length and validator.
    pub fingerprint: String,
    /// Every option that changes the tree or the plain bytes, in a fixed order.
    pub options: String,
}

impl Locator {
    /// The name of the file that holds its index: 64 hexadecimal digits and a suffix. Of another
    /// format version it is another file, so that two versions of the program get along.
    pub fn file_name(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&format::VERSION.to_le_bytes());
        for text in self.texts() {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        format!("{}.idx", hasher.finalize().to_hex())
    }

    /// Its parts in the order of the format.
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
