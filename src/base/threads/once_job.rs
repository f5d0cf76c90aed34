//! A job that one of several threads runs once.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::base::sync::{Condvar, Mutex, MutexGuard};

type Job<T> = Box<dyn FnOnce() -> T + Send>;

/// A job whose result is taken once. A thread that needs it runs it instead of waiting, unless another does.
pub(crate) struct OnceJob<T> {
    state: Mutex<State<T>>,
    finished: Condvar,
}

enum State<T> {
    Pending(Job<T>),
    Running,
    Done(T),
    /// The result was taken, the job was withdrawn, or it panicked.
    Empty,
}

#[derive(PartialEq, Eq, Debug)]
pub(crate) enum TakeOutcome<T> {
    Done(T),
    Running,
    /// No result. The job was withdrawn before it started, or its result is gone.
    Nothing,
}

impl<T> OnceJob<T> {
    pub(crate) fn new(work: impl FnOnce() -> T + Send + 'static) -> Self {
        Self {
            state: Mutex::new(State::Pending(Box::new(work))),
            finished: Condvar::default(),
        }
    }

    /// Runs the job, unless it was started or withdrawn.
    pub(crate) fn run(&self) {
        let mut state = self.state.lock();
        match std::mem::replace(&mut *state, State::Running) {
            State::Pending(work) => {
                drop(state);
                // A panic must not leave waiters blocked forever.
                let result = catch_unwind(AssertUnwindSafe(work));
                *self.state.lock() = result.map_or(State::Empty, State::Done);
                self.finished.notify_all();
            }
            other => *state = other,
        }
    }

    /// Waits while another thread runs the job.
    pub(crate) fn wait(&self) {
        drop(self.lock_finished());
    }

    /// Runs the job if no thread has begun, and returns the result; `None` if it is gone.
    pub(crate) fn run_or_take(&self) -> Option<T> {
        self.run();
        match std::mem::replace(&mut *self.lock_finished(), State::Empty) {
            State::Done(result) => Some(result),
            _ => None,
        }
    }

    /// Takes the result if there is one, and withdraws the job if it was not started.
    pub(crate) fn try_take(&self) -> TakeOutcome<T> {
        let mut state = self.state.lock();
        if matches!(*state, State::Running) {
            return TakeOutcome::Running;
        }
        let before = std::mem::replace(&mut *state, State::Empty);
        // Drop the job's captured values after the lock is released.
        drop(state);
        match before {
            State::Done(result) => TakeOutcome::Done(result),
            _ => TakeOutcome::Nothing,
        }
    }

    fn lock_finished(&self) -> MutexGuard<'_, State<T>> {
        self.finished
            .wait_while(self.state.lock(), |state| matches!(state, State::Running))
    }
}

impl<T> fmt::Debug for OnceJob<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &*self.state.lock() {
            State::Pending(_) => "OnceJob(pending)",
            State::Running => "OnceJob(running)",
            State::Done(_) => "OnceJob(done)",
            State::Empty => "OnceJob(empty)",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::{Arc, Barrier, mpsc};

    #[test]
    fn job_runs_once_under_contention() {
        for _ in 0..50 {
            let runs = Arc::new(AtomicU32::new(0));
            let work = {
                let runs = Arc::clone(&runs);
                move || {
                    runs.fetch_add(1, Ordering::SeqCst);
                    "once"
                }
            };
            let (job, barrier) = (OnceJob::new(work), Barrier::new(3));
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        barrier.wait();
                        job.run();
                    });
                }
                barrier.wait();
                assert_eq!(job.run_or_take(), Some("once"));
            });
            assert_eq!(runs.load(Ordering::SeqCst), 1);
        }
    }

    #[test]
    fn panicking_job_leaves_no_result_and_wakes_waiters() {
        let job = OnceJob::new(|| panic!("on purpose"));
        job.run();
        job.wait();
        assert_eq!(job.run_or_take(), None::<()>);
        assert_eq!(job.try_take(), TakeOutcome::Nothing);
    }

    #[test]
    fn job_not_started_is_withdrawn() {
        let held = Arc::new(());
        let job = OnceJob::new({
            let held = Arc::clone(&held);
            move || drop(held)
        });
        assert_eq!(job.try_take(), TakeOutcome::Nothing);
        assert_eq!(Arc::strong_count(&held), 1, "what it held is free");
        job.run();
        assert_eq!(job.run_or_take(), None);
    }

    #[test]
    fn running_job_is_not_withdrawn_and_can_be_awaited() {
        let (begun, has_begun) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel::<()>();
        let job = OnceJob::new(move || {
            begun.send(()).expect("a receiver");
            may_go_on.recv().expect("a sender");
            7
        });
        std::thread::scope(|scope| {
            scope.spawn(|| job.run());
            has_begun.recv().expect("it begins");
            assert_eq!(job.try_take(), TakeOutcome::Running);
            go_on.send(()).expect("a receiver");
            job.wait();
            assert_eq!(job.try_take(), TakeOutcome::Done(7));
        });
    }
}
