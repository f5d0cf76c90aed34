//! Priority of reads over prefetch.

use std::time::Duration;

use crate::base::sync::{Condvar, Mutex};

#[derive(Debug, Default)]
pub(crate) struct ReadPriority {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    active: u32,
    is_over: bool,
}

/// A read that is filling a span, counted until it is dropped.
#[derive(Debug)]
pub(super) struct ActiveRead<'a>(&'a ReadPriority);

impl ReadPriority {
    pub(super) fn start_read(&self) -> ActiveRead<'_> {
        self.state.lock().active += 1;
        ActiveRead(self)
    }

    /// Waits until no read fills a span; returns false if the archive is closed.
    pub(crate) fn wait_until_idle(&self) -> bool {
        let mut state = self.state.lock();
        while state.active > 0 && !state.is_over {
            state = self.changed.wait(state);
        }
        !state.is_over
    }

    pub(crate) fn pause(&self, time: Duration) -> bool {
        let state = self.state.lock();
        if state.is_over {
            return false;
        }
        let (state, _) = self.changed.wait_timeout(state, time);
        !state.is_over
    }

    /// Ends all waits, now and later.
    pub(crate) fn close(&self) {
        self.state.lock().is_over = true;
        self.changed.notify_all();
    }
}

impl Drop for ActiveRead<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.active -= 1;
        if state.active == 0 {
            self.0.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

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

    #[test]
    fn closed_archive_ends_all_waits() {
        let read_priority = ReadPriority::default();
        let _active_read = read_priority.start_read();
        read_priority.close();
        assert!(!read_priority.wait_until_idle());
        assert!(!read_priority.pause(Duration::from_hours(1)));
    }
}
