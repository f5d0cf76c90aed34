//! The entries of a published index whose headers were compared with the archive, and the copy of that index in the
//! cache, which lasts only while all of them match.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::base::error_chain::error_chain;
use crate::base::sync::Mutex;
use crate::index::store::Store;
use crate::index::{DirentNumber, Index, Ino, Locator};

/// A set of numbers, with a bit for each up to the highest.
#[derive(Debug, Default)]
pub(crate) struct NumberSet(Mutex<Vec<u64>>);

impl NumberSet {
    pub(crate) fn contains(&self, number: u32) -> bool {
        let words = self.0.lock();
        let word = words.get(number as usize / 64);
        word.is_some_and(|word| word >> (number % 64) & 1 == 1)
    }

    pub(crate) fn insert(&self, number: u32) {
        let mut words = self.0.lock();
        let place = number as usize / 64;
        if words.len() <= place {
            words.resize(place + 1, 0);
        }
        if let Some(word) = words.get_mut(place) {
            *word |= 1 << (number % 64);
        }
    }
}

/// The entries and names whose headers matched.
#[derive(Debug, Default)]
pub(crate) struct HeaderChecks {
    entries: NumberSet,
    /// Names that are not the first ones of their entries.
    names: NumberSet,
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
        self.entries.contains(ino.0)
    }

    pub(super) fn insert(&self, ino: Ino) {
        self.entries.insert(ino.0);
    }

    pub(super) fn contains_name(&self, name: DirentNumber) -> bool {
        self.names.contains(name.0)
    }

    pub(super) fn insert_name(&self, name: DirentNumber) {
        self.names.insert(name.0);
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
