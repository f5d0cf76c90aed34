//! Work that is done once, by whoever comes first.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

type Work<T> = Box<dyn FnOnce() -> T + Send>;

/// Work on its way to a result that is taken once. A thread that needs the result does the work
/// itself unless another has begun, so a stage that would wait works instead.
pub struct Ticket<T> {
    state: Mutex<State<T>>,
    settled: Condvar,
}

enum State<T> {
    Waiting(Work<T>),
    Running,
    Done(T),
    /// Nothing is left: the result was taken, the work withdrawn, or it panicked.
    Gone,
}

/// What [`Ticket::claim`] finds.
#[derive(PartialEq, Eq, Debug)]
pub enum Claim<T> {
    /// The result.
    Done(T),
    /// Someone is at it.
    Running,
    /// No one had begun, and now no one will; or there is nothing any more.
    Never,
}

impl<T> Ticket<T> {
    /// A ticket for `work`.
    pub fn new(work: impl FnOnce() -> T + Send + 'static) -> Self {
        Self {
            state: Mutex::new(State::Waiting(Box::new(work))),
            settled: Condvar::new(),
        }
    }

    /// Does the work, unless someone has begun or withdrawn it.
    pub fn run(&self) {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Running) {
            State::Waiting(work) => {
                drop(state);
                // A panic must not leave others waiting for ever.
                let result = catch_unwind(AssertUnwindSafe(work));
                *self.lock() = result.map_or(State::Gone, State::Done);
                self.settled.notify_all();
            }
            other => *state = other,
        }
    }

    /// Waits while someone is at the work.
    pub fn wait(&self) {
        drop(self.settled());
    }

    /// The result; does the work when no one has begun. `None` when there is nothing any more.
    pub fn redeem(&self) -> Option<T> {
        self.run();
        match std::mem::replace(&mut *self.settled(), State::Gone) {
            State::Done(result) => Some(result),
            _ => None,
        }
    }

    /// Takes the result if there is one, and withdraws the work if no one has begun.
    pub fn claim(&self) -> Claim<T> {
        let mut state = self.lock();
        if matches!(*state, State::Running) {
            return Claim::Running;
        }
        let before = std::mem::replace(&mut *state, State::Gone);
        // Whatever the work holds is dropped when the lock is free again.
        drop(state);
        match before {
            State::Done(result) => Claim::Done(result),
            _ => Claim::Never,
        }
    }

    fn settled(&self) -> MutexGuard<'_, State<T>> {
        self.settled
            .wait_while(self.lock(), |state| matches!(state, State::Running))
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> fmt::Debug for Ticket<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &*self.lock() {
            State::Waiting(_) => "Ticket(waiting)",
            State::Running => "Ticket(running)",
            State::Done(_) => "Ticket(done)",
            State::Gone => "Ticket(gone)",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::{Arc, Barrier, mpsc};

    #[test]
    fn work_is_done_once_whoever_comes_first() {
        for _ in 0..50 {
            let runs = Arc::new(AtomicU32::new(0));
            let work = {
                let runs = Arc::clone(&runs);
                move || {
                    runs.fetch_add(1, Ordering::SeqCst);
                    "once"
                }
            };
            let (ticket, barrier) = (Ticket::new(work), Barrier::new(3));
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        barrier.wait();
                        ticket.run();
                    });
                }
                barrier.wait();
                assert_eq!(ticket.redeem(), Some("once"));
            });
            assert_eq!(runs.load(Ordering::SeqCst), 1);
        }
    }

    #[test]
    fn work_that_panics_leaves_nothing_and_no_one_waits() {
        let ticket = Ticket::new(|| panic!("on purpose"));
        ticket.run();
        ticket.wait();
        assert_eq!(ticket.redeem(), None::<()>);
        assert_eq!(ticket.claim(), Claim::Never);
    }

    #[test]
    fn what_no_one_has_begun_is_withdrawn() {
        let held = Arc::new(());
        let ticket = Ticket::new({
            let held = Arc::clone(&held);
            move || drop(held)
        });
        assert_eq!(ticket.claim(), Claim::Never);
        assert_eq!(Arc::strong_count(&held), 1, "what it held is free");
        ticket.run();
        assert_eq!(ticket.redeem(), None);
    }

    #[test]
    fn what_runs_is_not_withdrawn_and_can_be_waited_for() {
        let (begun, has_begun) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel::<()>();
        let ticket = Ticket::new(move || {
            begun.send(()).expect("someone listens");
            may_go_on.recv().expect("someone speaks");
            7
        });
        std::thread::scope(|scope| {
            scope.spawn(|| ticket.run());
            has_begun.recv().expect("it begins");
            assert_eq!(ticket.claim(), Claim::Running);
            go_on.send(()).expect("it listens");
            ticket.wait();
            assert_eq!(ticket.claim(), Claim::Done(7));
        });
    }
}
