//! Opened trees, each of which is shared by all mounts that ask for the same.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::key::VolumeKey;
use crate::base::sync::Mutex;
use crate::serve::failure::Failure;

/// A tree that mounts can share.
pub trait Shareable {
    /// Whether another mount may use it. After a failed scan it lacks entries for ever.
    fn is_usable(&self) -> bool;

    /// Ends its work soon, because no mount uses it.
    fn close(&self);
}

/// The trees that mounts have open. A tree is closed with its last mount.
#[derive(Debug)]
pub struct VolumeTable<T: Shareable> {
    slots: Mutex<HashMap<VolumeKey, Arc<Slot<T>>>>,
}

#[derive(Debug)]
struct Slot<T: Shareable> {
    tree: Mutex<Weak<SharedTree<T>>>,
    /// Locked while a caller opens the tree. Why the last attempt failed.
    opening: Mutex<Option<Failure>>,
    /// Number of attempts that failed.
    failures: AtomicU64,
}

impl<T: Shareable> Default for VolumeTable<T> {
    fn default() -> Self {
        Self {
            slots: Mutex::default(),
        }
    }
}

impl<T: Shareable> Default for Slot<T> {
    fn default() -> Self {
        Self {
            tree: Mutex::default(),
            opening: Mutex::default(),
            failures: AtomicU64::default(),
        }
    }
}

impl<T: Shareable> Slot<T> {
    fn is_open(&self) -> bool {
        self.tree.lock().strong_count() > 0
    }

    fn usable_tree(&self) -> Option<Arc<SharedTree<T>>> {
        let tree = self.tree.lock().upgrade()?;
        tree.is_usable().then_some(tree)
    }
}

/// A tree that mounts share. The last one closes it.
#[derive(Debug)]
pub struct SharedTree<T: Shareable>(T);

impl<T: Shareable> SharedTree<T> {
    /// A tree of one mount.
    pub fn of_one(tree: T) -> Arc<Self> {
        Arc::new(Self(tree))
    }
}

impl<T: Shareable> Deref for SharedTree<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Shareable> Drop for SharedTree<T> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl<T: Shareable> VolumeTable<T> {
    /// Returns the tree of `key`, which `open` opens if no mount has it, or the one that a mount has is not `current`.
    /// Meanwhile others that want the same wait for this attempt, and get its result.
    ///
    /// # Errors
    /// As of the one call of `is_current` or `open`.
    pub fn open(
        &self,
        key: VolumeKey,
        is_current: impl FnOnce(&T) -> Result<bool, Failure>,
        open: impl FnOnce() -> Result<T, Failure>,
    ) -> Result<Arc<SharedTree<T>>, Failure> {
        let (slot, failures) = self.slot(key);
        let mut last_failure = slot.opening.lock();
        // An attempt that failed while this caller waited is its own, too.
        if let Some(failure) = &*last_failure
            && !failure.is_abandoned
            && slot.failures.load(Ordering::SeqCst) != failures
        {
            return Err(failure.clone());
        }
        let attempt = || {
            if let Some(tree) = slot.usable_tree()
                && is_current(&tree)?
            {
                return Ok(tree);
            }
            let tree = SharedTree::of_one(open()?);
            *slot.tree.lock() = Arc::downgrade(&tree);
            Ok(tree)
        };
        let opened = attempt();
        *last_failure = opened.as_ref().err().cloned();
        if opened.is_err() {
            slot.failures.fetch_add(1, Ordering::SeqCst);
        }
        opened
    }

    /// The slot of `key`, and how many attempts have failed there.
    fn slot(&self, key: VolumeKey) -> (Arc<Slot<T>>, u64) {
        let mut slots = self.slots.lock();
        // One that others hold is in use, or about to be.
        slots.retain(|_, slot| Arc::strong_count(slot) > 1 || slot.is_open());
        let slot = Arc::clone(slots.entry(key).or_default());
        let failures = slot.failures.load(Ordering::SeqCst);
        (slot, failures)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::base::wait::wait_until;
    use crate::locate::{OpenSpec, SourceSpec};
    use crate::serve::mount_spec::MountSpec;

    const CALLERS: usize = 20;

    /// A tree that is never opened.
    #[derive(Debug)]
    struct NoTree;

    impl Shareable for NoTree {
        fn is_usable(&self) -> bool {
            true
        }

        fn close(&self) {}
    }

    /// Number of callers that open a tree, or wait for one that does.
    fn opening_count(table: &VolumeTable<NoTree>) -> usize {
        let slots = table.slots.lock();
        let callers = slots.values().map(|slot| Arc::strong_count(slot) - 1);
        callers.sum()
    }

    #[test]
    fn callers_that_wait_for_a_failed_attempt_share_its_error() {
        let tree = SourceSpec::from("a.tar").into();
        let mount = MountSpec::new(tree, OpenSpec::default(), "/mnt".into(), "/run".into());
        let key = VolumeKey::new(&mount).expect("no standard input");
        let (table, attempts) = (VolumeTable::<NoTree>::default(), AtomicU64::new(0));
        let current = |_: &NoTree| Ok(true);
        let (timeout, interval) = (Duration::from_mins(1), Duration::from_millis(1));
        let fail = || {
            attempts.fetch_add(1, Ordering::SeqCst);
            let all_wait = wait_until(timeout, interval, || opening_count(&table) == CALLERS);
            assert!(all_wait, "all wait");
            Err(Failure::new("refused"))
        };
        thread::scope(|scope| {
            let callers = (0..CALLERS).map(|_| scope.spawn(|| table.open(key, current, fail)));
            for caller in callers.collect::<Vec<_>>() {
                let error = caller.join().expect("no panic").expect_err("refused");
                assert_eq!(error, Failure::new("refused"));
            }
        });
        assert_eq!(attempts.load(Ordering::SeqCst), 1);
        assert_eq!(opening_count(&table), 0);
        let again = || Err(Failure::new("refused again"));
        let error = table.open(key, current, again).expect_err("tried again");
        assert_eq!(error, Failure::new("refused again"));
    }
}
