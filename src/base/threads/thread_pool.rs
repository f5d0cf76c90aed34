//! Named threads that run jobs in FIFO order, as many as there is work for.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::thread::Thread;
use crate::base::sync::{Condvar, Mutex};

/// Time without a job after which a thread ends. The first one stays.
const IDLE_TIME: Duration = Duration::from_secs(10);

type Job = Box<dyn FnOnce() + Send>;

/// Threads that share one queue. Dropping the pool runs the queued jobs and joins the threads. The queue is
/// unbounded, because decoders bound their pieces, and the kernel a mount's requests.
#[derive(Debug)]
pub(crate) struct ThreadPool {
    name: String,
    max_threads: usize,
    queue: Arc<Queue>,
    threads: Mutex<Vec<Thread<()>>>,
}

impl ThreadPool {
    /// A pool of one thread, which grows to `max_threads` while more jobs wait.
    pub(crate) fn start(name: &str, max_threads: usize) -> io::Result<Self> {
        let pool = Self {
            name: name.to_owned(),
            max_threads,
            queue: Arc::default(),
            threads: Mutex::default(),
        };
        pool.queue.state.lock().running = 1;
        pool.start_thread(true)?;
        Ok(pool)
    }

    fn start_thread(&self, is_first: bool) -> io::Result<()> {
        let queue = Arc::clone(&self.queue);
        let thread = Thread::spawn(&self.name, move || queue.run(is_first))?;
        let mut threads = self.threads.lock();
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(())
    }

    /// Queues `work` without waiting.
    pub(crate) fn submit(&self, work: impl FnOnce() + Send + 'static) {
        let mut state = self.queue.state.lock();
        if state.is_discarded {
            return;
        }
        state.work.push_back(Box::new(work));
        let grows = state.work.len() > state.idle && state.running < self.max_threads;
        state.running += usize::from(grows);
        drop(state);
        self.queue.changed.notify_one();
        // The other threads do the work of one that cannot be started.
        if grows && self.start_thread(false).is_err() {
            self.queue.state.lock().running -= 1;
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
        self.threads.get_mut().clear();
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
    /// Number of threads, and how many of them wait for a job.
    running: usize,
    idle: usize,
    is_discarded: bool,
    is_closed: bool,
}

impl Queue {
    fn run(&self, is_first: bool) {
        while let Some(work) = self.next(is_first) {
            // The panic hook has logged a panic. The thread must continue, or the queue may never drain.
            drop(catch_unwind(AssertUnwindSafe(work)));
        }
    }

    /// Waits for a job. `None` if there will be none, or there was none for long and the thread is not the first.
    fn next(&self, is_first: bool) -> Option<Job> {
        let is_idle = |state: &mut State| state.work.is_empty() && !state.is_closed;
        let mut state = self.state.lock();
        state.idle += 1;
        if is_first {
            state = self.changed.wait_while(state, is_idle);
        } else {
            (state, _) = self.changed.wait_timeout_while(state, IDLE_TIME, is_idle);
        }
        state.idle -= 1;
        let work = state.work.pop_front();
        state.running -= usize::from(work.is_none());
        work
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
    fn waiting_jobs_get_threads_up_to_the_maximum() {
        let workers = ThreadPool::start("test", 3).expect("threads");
        let (arrive, arrived) = std::sync::mpsc::channel();
        let (leave, leaving) = std::sync::mpsc::channel::<()>();
        let leaving = Arc::new(Mutex::new(leaving));
        for _ in 0..5 {
            let (arrive, leaving) = (arrive.clone(), Arc::clone(&leaving));
            workers.submit(move || {
                arrive.send(()).expect("a receiver");
                leaving.lock().recv().expect("a sender");
            });
        }
        for _ in 0..3 {
            arrived.recv().expect("it runs");
        }
        assert_eq!(workers.queue.state.lock().running, 3);
        assert_eq!(workers.queue.state.lock().work.len(), 2);
        for _ in 0..5 {
            leave.send(()).expect("a receiver");
        }
        drop(workers);
        assert_eq!(arrived.iter().take(2).count(), 2);
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
