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

    /// Number of trees that mounts have open. Waits for no mount.
    pub fn open_count(&self) -> usize {
        let slots = self.slots.lock();
        slots.values().filter(|slot| slot.is_open()).count()
    }

    /// Number of callers that open a tree, or wait for one that does.
    pub fn opening_count(&self) -> usize {
        let slots = self.slots.lock();
        let callers = slots.values().map(|slot| Arc::strong_count(slot) - 1);
        callers.sum()
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
