//! A fixed set of named threads that run work in the order it came.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use super::task::Thread;

type Work = Box<dyn FnOnce() + Send>;

/// Threads that share one queue. Dropping them runs what is queued, unless it was
/// [abandoned](Self::abandon), and joins.
///
/// The queue has no bound of its own, because whoever fills it is bounded: a decoder by the
/// pieces that may lie between it and its consumer, a mount by the kernel's requests.
#[derive(Debug)]
pub struct Workers {
    // Before the threads: they end when the queue is dropped.
    queue: Option<Sender<Work>>,
    threads: Vec<Thread<()>>,
    /// Whether what is queued is dropped instead of run.
    abandoned: Arc<AtomicBool>,
}

impl Workers {
    /// `count` threads called `name`.
    ///
    /// # Errors
    /// When the system has no thread left to give.
    pub fn start(name: &str, count: usize) -> io::Result<Self> {
        let (queue, work) = channel::<Work>();
        let work = Arc::new(Mutex::new(work));
        let abandoned = Arc::new(AtomicBool::new(false));
        let threads = (0..count.max(1))
            .map(|_| {
                let work = Arc::clone(&work);
                let abandoned = Arc::clone(&abandoned);
                Thread::spawn(name, move || run(&work, &abandoned))
            })
            .collect::<io::Result<_>>()?;
        Ok(Self {
            queue: Some(queue),
            threads,
            abandoned,
        })
    }

    /// Queues `work`, without waiting.
    pub fn submit(&self, work: impl FnOnce() + Send + 'static) {
        if let Some(queue) = &self.queue {
            // Cannot fail while the threads live, and they live as long as the queue.
            drop(queue.send(Box::new(work)));
        }
    }

    /// Says that no one waits for what is queued: it is dropped, what runs already ends.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        drop(self.queue.take());
        self.threads.clear();
    }
}

fn run(work: &Mutex<Receiver<Work>>, abandoned: &AtomicBool) {
    loop {
        let next = work.lock().unwrap_or_else(PoisonError::into_inner).recv();
        match next {
            Ok(work) if abandoned.load(Ordering::Relaxed) => drop(work),
            // The panic was told by the hook, and what the work held was dropped; the thread
            // must live on, or the queue would fill for ever.
            Ok(work) => drop(catch_unwind(AssertUnwindSafe(work))),
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn a_panic_costs_no_thread() {
        let workers = Workers::start("test", 1).expect("threads");
        let (sender, receiver) = std::sync::mpsc::channel();
        workers.submit(|| panic!("on purpose"));
        workers.submit(move || sender.send(()).expect("someone listens"));
        assert_eq!(receiver.recv(), Ok(()));
    }

    #[test]
    fn abandoned_work_is_dropped_and_not_run() {
        let workers = Workers::start("test", 1).expect("threads");
        let (begin, begun) = std::sync::mpsc::channel::<()>();
        let (sender, receiver) = std::sync::mpsc::channel();
        workers.submit(move || assert!(begun.recv().is_err()));
        workers.submit(move || sender.send(()).expect("someone listens"));
        workers.abandon();
        drop(begin);
        drop(workers);
        assert!(receiver.recv().is_err());
    }

    #[test]
    fn dropping_workers_finishes_what_is_queued() {
        let done = Arc::new(AtomicU32::new(0));
        let workers = Workers::start("test", 2).expect("threads");
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
