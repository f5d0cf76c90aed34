//! The files of a published index whose headers were compared with the archive.

use crate::base::sync::Mutex;
use crate::index::Ino;

/// The files whose headers matched, by inode number.
#[derive(Debug, Default)]
pub(crate) struct HeaderChecks {
    /// Location of the published index, without secrets.
    pub(crate) location: String,
    /// A bit for each number, as long as the highest that matched.
    matched: Mutex<Vec<u64>>,
}

impl HeaderChecks {
    pub(crate) fn new(location: String) -> Self {
        Self {
            location,
            matched: Mutex::default(),
        }
    }

    pub(super) fn contains(&self, ino: Ino) -> bool {
        let words = self.matched.lock();
        let word = words.get(ino.0 as usize / 64);
        word.is_some_and(|word| word >> (ino.0 % 64) & 1 == 1)
    }

    pub(super) fn insert(&self, ino: Ino) {
        let mut words = self.matched.lock();
        let place = ino.0 as usize / 64;
        if words.len() <= place {
            words.resize(place + 1, 0);
        }
        if let Some(word) = words.get_mut(place) {
            *word |= 1 << (ino.0 % 64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_inserted_numbers_count_as_matched() {
        let checks = HeaderChecks::default();
        assert!(!checks.contains(Ino(64)));
        checks.insert(Ino(64));
        assert!(checks.contains(Ino(64)) && !checks.contains(Ino(0)) && !checks.contains(Ino(65)));
        assert!(!checks.contains(Ino(u32::MAX)));
    }
}
