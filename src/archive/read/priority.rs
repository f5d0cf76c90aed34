//! Priority of reads over prefetch.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::base::sync::{Condvar, Mutex};

/// The active reads of all archives that share memory, from the view of one archive.
#[derive(Debug, Default)]
pub(crate) struct ReadPriority {
    shared: Arc<Shared>,
    /// Whether this archive is closed. Written under the lock of `shared`.
    is_closed: AtomicBool,
}

#[derive(Debug, Default)]
struct Shared {
    active: Mutex<u32>,
    changed: Condvar,
}

/// A read that is filling a span, counted until it is dropped.
#[derive(Debug)]
pub(super) struct ActiveRead<'a>(&'a ReadPriority);

impl ReadPriority {
    /// The same reads, for another archive.
    pub(crate) fn for_archive(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            is_closed: AtomicBool::default(),
        }
    }

    pub(super) fn start_read(&self) -> ActiveRead<'_> {
        *self.shared.active.lock() += 1;
        ActiveRead(self)
    }

    /// Waits until no read fills a span; returns false if the archive is closed.
    pub(crate) fn wait_until_idle(&self) -> bool {
        let mut active = self.shared.active.lock();
        while *active > 0 && !self.is_closed() {
            active = self.shared.changed.wait(active);
        }
        !self.is_closed()
    }

    pub(crate) fn pause(&self, time: Duration) -> bool {
        let active = self.shared.active.lock();
        if self.is_closed() {
            return false;
        }
        let (_active, _) = self.shared.changed.wait_timeout(active, time);
        !self.is_closed()
    }

    /// Ends all waits of this archive, now and later.
    pub(crate) fn close(&self) {
        let active = self.shared.active.lock();
        self.is_closed.store(true, Ordering::Relaxed);
        drop(active);
        self.shared.changed.notify_all();
    }

    /// Whether reads must end soon.
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Relaxed)
    }
}

impl Drop for ActiveRead<'_> {
    fn drop(&mut self) {
        let shared = &self.0.shared;
        let mut active = shared.active.lock();
        *active -= 1;
        if *active == 0 {
            shared.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    // Promises: ahead-shared
    #[test]
    fn prefetch_waits_for_active_reads() {
        let read_priority = ReadPriority::default();
        assert!(read_priority.wait_until_idle());
        let (one, two) = (read_priority.start_read(), read_priority.start_read());
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                assert!(read_priority.wait_until_idle());
                assert!(ended.load(Ordering::SeqCst));
            });
            drop(one);
            ended.store(true, Ordering::SeqCst);
            drop(two);
            waiter.join().expect("woken");
        });
    }

    // Promises: ahead-shared
    #[test]
    fn closed_archive_ends_all_waits() {
        let read_priority = ReadPriority::default();
        let _active_read = read_priority.start_read();
        read_priority.close();
        assert!(!read_priority.wait_until_idle());
        assert!(!read_priority.pause(Duration::from_hours(1)));
    }

    #[test]
    fn closed_archive_does_not_end_waits_of_others() {
        let (closed, other) = (ReadPriority::default(), AtomicBool::new(false));
        let open = closed.for_archive();
        let active_read = closed.start_read();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                assert!(open.wait_until_idle());
                assert!(other.load(Ordering::SeqCst), "the read is still active");
            });
            closed.close();
            assert!(!closed.wait_until_idle());
            other.store(true, Ordering::SeqCst);
            drop(active_read);
            waiter.join().expect("woken");
        });
        assert!(open.pause(Duration::ZERO));
    }
}
