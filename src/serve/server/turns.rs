//! Turns of those who would make the same file system at the same time.

use std::time::{Duration, Instant};

use crate::base::sync::{Condvar, Mutex};

/// Turns for what `K` names.
#[derive(Debug)]
pub(super) struct Turns<K> {
    taken: Mutex<Vec<K>>,
    given: Condvar,
}

/// A turn, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a, K: PartialEq> {
    turns: &'a Turns<K>,
    key: K,
}

impl<K> Default for Turns<K> {
    fn default() -> Self {
        Self {
            taken: Mutex::default(),
            given: Condvar::default(),
        }
    }
}

impl<K: PartialEq + Clone> Turns<K> {
    /// Waits for the turn for `key`; `None` after `timeout`.
    pub(super) fn take(&self, key: &K, timeout: Duration) -> Option<Turn<'_, K>> {
        let deadline = Instant::now() + timeout;
        let mut taken = self.taken.lock();
        while taken.contains(key) {
            let left = deadline.checked_duration_since(Instant::now())?;
            (taken, _) = self.given.wait_timeout(taken, left);
        }
        taken.push(key.clone());
        Some(Turn {
            turns: self,
            key: key.clone(),
        })
    }
}

impl<K: PartialEq> Drop for Turn<'_, K> {
    fn drop(&mut self) {
        let mut taken = self.turns.taken.lock();
        taken.retain(|key| *key != self.key);
        self.turns.given.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_mins(1);

    #[test]
    fn turns_of_one_key_exclude_each_other() {
        let turns = Turns::default();
        let first = turns.take(&1, LONG).expect("free");
        assert!(turns.take(&1, Duration::ZERO).is_none());
        assert!(turns.take(&2, Duration::ZERO).is_some());
        std::thread::scope(|scope| {
            let next = scope.spawn(|| turns.take(&1, LONG).is_some());
            drop(first);
            assert!(next.join().expect("no panic"));
        });
        assert!(turns.take(&1, Duration::ZERO).is_some());
    }
}
