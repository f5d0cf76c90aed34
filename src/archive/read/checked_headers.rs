//! The files of a published index whose headers were compared with the archive, and the copy of that index in the
//! cache, which lasts only while all of them match.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::base::error_chain::error_chain;
use crate::base::sync::Mutex;
use crate::index::store::Store;
use crate::index::{Index, Ino, Locator};

/// The files whose headers matched, by inode number.
#[derive(Debug, Default)]
pub(crate) struct HeaderChecks {
    /// A bit for each number, as long as the highest that matched.
    matched: Mutex<Vec<u64>>,
    /// Place of the index in the cache, if it is proven to be of the archive's version.
    copy: Option<(Store, Locator)>,
    has_mismatch: AtomicBool,
}

impl HeaderChecks {
    pub(crate) fn new(copy: Option<(Store, Locator)>) -> Self {
        Self {
            copy,
            ..Self::default()
        }
    }

    /// Saves `index` for later runs, unless a header differed.
    pub(crate) fn save(&self, index: &Index) {
        let Some((store, locator)) = &self.copy else {
            return;
        };
        if self.has_mismatch.load(Ordering::SeqCst) {
            return;
        }
        if let Err(error) = store.publish(locator, index) {
            tracing::warn!(
                error = error_chain(&error),
                "cannot save the published index"
            );
        }
        if self.has_mismatch.load(Ordering::SeqCst) {
            self.remove_copy();
        }
    }

    /// Records that a header differs, so that the next run asks for the published index again.
    pub(super) fn record_mismatch(&self) {
        if !self.has_mismatch.swap(true, Ordering::SeqCst) {
            self.remove_copy();
        }
    }

    fn remove_copy(&self) {
        if let Some((store, locator)) = &self.copy
            && let Err(error) = store.discard(locator)
        {
            tracing::warn!(error = error_chain(&error), "cannot remove the saved index");
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
