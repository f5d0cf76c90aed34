//! Opened trees, each of which is shared by all mounts that ask for the same.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::volume_key::VolumeKey;
use crate::archive::Volume;
use crate::base::sync::Mutex;
use crate::locate::Error;

/// The trees that mounts have open. A tree is closed with its last mount.
#[derive(Debug, Default)]
pub struct VolumeTable {
    slots: Mutex<HashMap<VolumeKey, Arc<Slot>>>,
}

#[derive(Debug, Default)]
struct Slot {
    volume: Mutex<Weak<SharedVolume>>,
    /// Locked while a caller opens the tree. Why the last attempt failed.
    opening: Mutex<Option<Arc<Error>>>,
    /// Number of attempts that failed.
    failures: AtomicU64,
}

impl Slot {
    fn is_open(&self) -> bool {
        self.volume.lock().strong_count() > 0
    }

    fn usable_volume(&self) -> Option<Arc<SharedVolume>> {
        let volume = self.volume.lock().upgrade()?;
        volume.is_usable().then_some(volume)
    }
}

/// A tree that mounts share. The last one closes it.
#[derive(Debug)]
pub struct SharedVolume(Arc<dyn Volume>);

impl Deref for SharedVolume {
    type Target = Arc<dyn Volume>;

    fn deref(&self) -> &Arc<dyn Volume> {
        &self.0
    }
}

impl Drop for SharedVolume {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl SharedVolume {
    /// Whether another mount may use it. After a failed scan it lacks entries for ever.
    fn is_usable(&self) -> bool {
        let archives = self.0.archives();
        archives.iter().all(|archive| archive.failure().is_none())
    }
}

impl VolumeTable {
    /// Returns the tree of `key`, which `open` opens if no mount has it. Meanwhile others that want the same wait for
    /// this attempt, and get its result.
    ///
    /// # Errors
    /// As of the one call of `open`.
    pub fn open(
        &self,
        key: VolumeKey,
        open: impl FnOnce() -> Result<Arc<dyn Volume>, Error>,
    ) -> Result<Arc<SharedVolume>, Arc<Error>> {
        let (slot, failures) = self.slot(key);
        let mut last_failure = slot.opening.lock();
        if let Some(volume) = slot.usable_volume() {
            return Ok(volume);
        }
        // An attempt that failed while this caller waited is its own, too.
        if let Some(failure) = &*last_failure
            && slot.failures.load(Ordering::SeqCst) != failures
        {
            return Err(Arc::clone(failure));
        }
        match open() {
            Ok(volume) => {
                let volume = Arc::new(SharedVolume(volume));
                *slot.volume.lock() = Arc::downgrade(&volume);
                *last_failure = None;
                Ok(volume)
            }
            Err(error) => {
                let error = Arc::new(error);
                slot.failures.fetch_add(1, Ordering::SeqCst);
                *last_failure = Some(Arc::clone(&error));
                Err(error)
            }
        }
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
    fn slot(&self, key: VolumeKey) -> (Arc<Slot>, u64) {
        let mut slots = self.slots.lock();
        // One that others hold is in use, or about to be.
        slots.retain(|_, slot| Arc::strong_count(slot) > 1 || slot.is_open());
        let slot = Arc::clone(slots.entry(key).or_default());
        let failures = slot.failures.load(Ordering::SeqCst);
        (slot, failures)
    }
}
