//! Ends of mounts.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use rustix::net::{SendFlags, Shutdown, shutdown};

use crate::base::sync::Mutex;
use crate::serve::link::{Link, Packet};

/// The end of a mount, once.
#[derive(Debug)]
pub(super) struct Ending {
    link: Arc<Link>,
    /// Whether others that shared the connection have lost it, too. Then the monitor mounts again.
    was_aborted: AtomicBool,
    running: Mutex<Option<mpsc::Sender<()>>>,
}

impl Ending {
    /// That of the mount behind `link`, and what closes with it.
    pub(super) fn of(link: &Arc<Link>) -> (Arc<Self>, mpsc::Receiver<()>) {
        let (sender, ended) = mpsc::channel();
        let ending = Self {
            link: Arc::clone(link),
            was_aborted: AtomicBool::default(),
            running: Mutex::new(Some(sender)),
        };
        (Arc::new(ending), ended)
    }

    /// The mount has ended.
    pub(super) fn reach(&self) {
        self.reach_by(&Packet::Ended);
    }

    /// Whether its monitor mounts again.
    pub(super) fn was_aborted(&self) -> bool {
        self.was_aborted.load(Ordering::SeqCst)
    }

    /// Tells the monitor, and ends the wait for its requests.
    fn reach_by(&self, packet: &Packet) {
        let mut running = self.running.lock();
        if running.is_some() {
            self.was_aborted
                .store(*packet == Packet::Aborted, Ordering::SeqCst);
            *running = None;
            // The monitor may be gone.
            drop(self.link.send(packet, &[], SendFlags::DONTWAIT));
            shutdown(&*self.link, Shutdown::Read).ok();
        }
    }
}

/// The ends of all mounts of a file system, which come with its own end at the latest.
#[derive(Debug, Default)]
pub(super) struct Endings {
    /// `None` when it has ended.
    of_mounts: Mutex<Option<Vec<Arc<Ending>>>>,
    was_shared: AtomicBool,
}

impl Endings {
    /// Those of a file system with one mount.
    pub(super) fn of_first(ending: &Arc<Ending>) -> Self {
        Self {
            of_mounts: Mutex::new(Some(vec![Arc::clone(ending)])),
            was_shared: AtomicBool::default(),
        }
    }

    /// Adds that of another mount. False if the file system has ended.
    pub(super) fn add(&self, ending: &Arc<Ending>) -> bool {
        let mut of_mounts = self.of_mounts.lock();
        let Some(endings) = &mut *of_mounts else {
            return false;
        };
        // A mount that has ended holds nothing else of it.
        endings.retain(|other| Arc::strong_count(other) > 1);
        endings.push(Arc::clone(ending));
        self.was_shared.store(true, Ordering::SeqCst);
        true
    }

    /// Sets whether another one of its mounts may have ended it. Returns what it was.
    pub(super) fn set_shared(&self, was_shared: bool) -> bool {
        self.was_shared.swap(was_shared, Ordering::SeqCst)
    }

    /// The file system has ended. If one of several mounts is still in the tree of mounts, the connection was aborted. The
    /// one that was unmounted may have ended before.
    pub(super) fn reach_all(&self, is_mounted: impl FnOnce() -> bool) {
        let endings = self.of_mounts.lock().take().unwrap_or_default();
        let running = endings
            .iter()
            .filter(|ending| ending.running.lock().is_some());
        let is_aborted =
            running.count() > 1 || self.was_shared.load(Ordering::SeqCst) && is_mounted();
        let packet = if is_aborted {
            Packet::Aborted
        } else {
            Packet::Ended
        };
        for ending in endings {
            ending.reach_by(&packet);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_of_the_last_of_several_mounts_is_an_abort_unless_it_is_unmounted_here() {
        for (is_unmounted_here, packet) in [(false, Packet::Aborted), (true, Packet::Ended)] {
            let (first, _first_monitor) = Link::pair().expect("sockets");
            let (last, last_monitor) = Link::pair().expect("sockets");
            let (first, _first_ended) = Ending::of(&Arc::new(first));
            let (last, _last_ended) = Ending::of(&Arc::new(last));
            let endings = Endings::of_first(&first);
            assert!(endings.add(&last));
            first.reach();
            if is_unmounted_here {
                assert!(endings.set_shared(false));
            }
            endings.reach_all(|| true);
            let (told, _) = last_monitor.receive().expect("whole").expect("there");
            assert_eq!((told, last.was_aborted()), (packet, !is_unmounted_here));
        }
    }
}
