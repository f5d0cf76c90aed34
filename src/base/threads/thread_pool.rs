//! A fixed set of named threads that run jobs in FIFO order.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::thread::Thread;
use crate::base::sync::{Condvar, Mutex};

type Job = Box<dyn FnOnce() + Send>;

/// Threads that share one queue. Dropping the pool runs the queued jobs and joins the threads. The queue is
/// unbounded, because decoders bound their pieces, and the kernel a mount's requests.
#[derive(Debug)]
pub(crate) struct ThreadPool {
    queue: Arc<Queue>,
    threads: Vec<Thread<()>>,
}

impl ThreadPool {
    pub(crate) fn start(name: &str, count: usize) -> io::Result<Self> {
        let mut workers = Self {
            queue: Arc::default(),
            threads: Vec::new(),
        };
        for _ in 0..count.max(1) {
            let queue = Arc::clone(&workers.queue);
            let thread = Thread::spawn(name, move || queue.run())?;
            workers.threads.push(thread);
        }
        Ok(workers)
    }

    /// Queues `work` without waiting.
    pub(crate) fn submit(&self, work: impl FnOnce() + Send + 'static) {
        let mut state = self.queue.state.lock();
        if !state.is_discarded {
            state.work.push_back(Box::new(work));
            drop(state);
            self.queue.changed.notify_one();
        }
    }

    /// Drops queued and later jobs. Running jobs finish.
    pub(crate) fn discard_queue(&self) {
        let mut state = self.queue.state.lock();
        state.is_discarded = true;
        let work = std::mem::take(&mut state.work);
        drop(state);
        drop(work);
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.queue.state.lock().is_closed = true;
        self.queue.changed.notify_all();
        self.threads.clear();
    }
}

/// Jobs in FIFO order. With a channel, each job would wake a second thread only to wait for its lock.
#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    work: VecDeque<Job>,
    is_discarded: bool,
    is_closed: bool,
}

impl Queue {
    fn run(&self) {
        while let Some(work) = self.next() {
            // The panic hook has logged a panic. The thread must continue, or the queue may never drain.
            drop(catch_unwind(AssertUnwindSafe(work)));
        }
    }

    fn next(&self) -> Option<Job> {
        let is_idle = |state: &mut State| state.work.is_empty() && !state.is_closed;
        let mut state = self.changed.wait_while(self.state.lock(), is_idle);
        state.work.pop_front()
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Queue").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    // Promises: log-panic
    #[test]
    fn panicking_job_does_not_end_its_thread() {
        let workers = ThreadPool::start("test", 1).expect("threads");
        let (sender, receiver) = std::sync::mpsc::channel();
        workers.submit(|| panic!("on purpose"));
        workers.submit(move || sender.send(()).expect("a receiver"));
        assert_eq!(receiver.recv(), Ok(()));
    }

    #[test]
    fn discarded_jobs_are_dropped_and_not_run() {
        let workers = ThreadPool::start("test", 1).expect("threads");
        let (begin, begun) = std::sync::mpsc::channel::<()>();
        let (sender, receiver) = std::sync::mpsc::channel();
        workers.submit(move || assert!(begun.recv().is_err()));
        workers.submit(move || sender.send(()).expect("a receiver"));
        workers.discard_queue();
        drop(begin);
        drop(workers);
        assert!(receiver.recv().is_err());
    }

    #[test]
    fn dropping_the_pool_runs_queued_jobs() {
        let done = Arc::new(AtomicU32::new(0));
        let workers = ThreadPool::start("test", 2).expect("threads");
        for _ in 0..50 {
            let done = Arc::clone(&done);
            workers.submit(move || {
                done.fetch_add(1, Ordering::SeqCst);
            });
        }
        drop(workers);
        assert_eq!(done.load(Ordering::SeqCst), 50);
    }
}
