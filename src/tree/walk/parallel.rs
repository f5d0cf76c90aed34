//! A walk over a [`Tree`] by several threads.
//!
//! Tasks are taken from the end of a queue, so that a walk goes down before it goes on, and the queue holds a few
//! directories' names. Where a task takes system calls, all threads share one queue. Otherwise a thread keeps its tasks,
//! and shares them only while another has none. A directory is left when all below it is done.

use std::num::NonZeroUsize;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::level::{Level, OpenLevels, Start};
use super::visitor::{Visit, Visitor};
use crate::base::sync::{Condvar, Mutex};
use crate::base::thread::{Thread, processors};

use crate::tree::interface::{Batch, Tree, push_component};

/// Most threads of a walk that adds threads by itself.
const MAX_THREADS: usize = 64;
/// Shorter tasks do not add threads.
pub(super) const MIN_WAIT: Duration = Duration::from_micros(200);

/// Walks over the directories `starts` of `tree`, and what is below them, without the starting points themselves.
/// The order is that of `starts` and of the names in a directory, except for what threads do at the same time. A
/// directory is visited before what is below it. Returns whether a visitor ended the walk.
///
/// It has at most `jobs` threads with the caller's, or one for each processor, and more while they mostly wait for the
/// file system, up to 64. A sequential visitor has one.
///
/// # Panics
/// If `visitor` panics.
pub fn walk_parallel<T: Tree + Send + 'static, V: Visitor<T>>(
    tree: &Arc<T>,
    visitor: &Arc<V>,
    starts: Vec<Start<T, V::State>>,
    jobs: Option<NonZeroUsize>,
) -> ControlFlow<()> {
    let (threads, max_threads) = match jobs {
        _ if visitor.is_sequential() => (1, 1),
        None => (processors().min(MAX_THREADS), MAX_THREADS),
        Some(count) => (count.get(), count.get()),
    };
    let open = OpenLevels::new(&**tree, visitor.open_trees());
    // Each thread holds some more.
    let most = (open.max / 4).max(1);
    let (threads, max_threads) = (threads.min(most), max_threads.min(most));
    let starts = starts.into_iter().rev();
    let tasks: Vec<_> = starts
        .map(|start| Task::read_from_start(Level::at_start(start, &open)))
        .collect();
    let walk = Arc::new(Walk {
        tree: Arc::clone(tree),
        visitor: Arc::clone(visitor),
        threads,
        max_threads,
        queue: Mutex::new(Queue {
            unfinished: tasks.len(),
            tasks,
            thread_count: 1,
            threads: Vec::new(),
        }),
        changed: Condvar::default(),
        idle: AtomicUsize::new(0),
        is_stopped: AtomicBool::new(false),
    });
    if tree.is_in_memory() {
        let mut queue = walk.queue.lock();
        (1..threads).for_each(|_| Walk::spawn(&walk, &mut queue));
    }
    Walk::run_tasks(&walk);
    let mut queue = walk.queue.lock();
    // A thread may add others until all have ended.
    while let Some(thread) = queue.threads.pop() {
        drop(queue);
        thread.join();
        queue = walk.queue.lock();
    }
    if walk.is_stopped.load(Ordering::Relaxed) {
        ControlFlow::Break(())
    } else {
        ControlFlow::Continue(())
    }
}

enum Task<T: Tree, S> {
    Open(Arc<Level<T, S>>),
    Read {
        level: Arc<Level<T, S>>,
        position: u64,
        /// Names that were read before.
        count: u64,
    },
    Visit {
        level: Arc<Level<T, S>>,
        batch: Arc<Batch>,
        numbers: Range<usize>,
    },
}

impl<T: Tree, S> Task<T, S> {
    fn read_from_start(level: Arc<Level<T, S>>) -> Self {
        Self::Read {
            level,
            position: 0,
            count: 0,
        }
    }
}

struct Queue<T: Tree, S> {
    tasks: Vec<Task<T, S>>,
    /// Tasks that are queued, and threads that run some.
    unfinished: usize,
    /// Threads that were started, and the caller's.
    thread_count: usize,
    /// Those that are not joined.
    threads: Vec<Thread<()>>,
}

struct Walk<T: Tree, V: Visitor<T>> {
    tree: Arc<T>,
    visitor: Arc<V>,
    /// Most threads unless they mostly wait.
    threads: usize,
    max_threads: usize,
    queue: Mutex<Queue<T, V::State>>,
    changed: Condvar,
    /// Threads that wait for a task. Changed only under the lock of the queue, as the next one.
    idle: AtomicUsize,
    is_stopped: AtomicBool,
}

/// Ends the walk if a visitor panics, so that no other thread waits for this one.
struct StopOnPanic<'a, T: Tree, V: Visitor<T>>(&'a Walk<T, V>);

impl<T: Tree, V: Visitor<T>> Drop for StopOnPanic<'_, T, V> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop();
        }
    }
}

impl<T: Tree + Send + 'static, V: Visitor<T>> Walk<T, V> {
    /// Adds a thread. Without it the walk only takes longer.
    fn spawn(walk: &Arc<Self>, queue: &mut Queue<T, V::State>) {
        let walk = Arc::clone(walk);
        if let Ok(thread) = Thread::spawn("tarfs-walk", move || Self::run_tasks(&walk)) {
            queue.thread_count += 1;
            queue.threads.push(thread);
        }
    }

    /// Runs tasks until the walk ends.
    fn run_tasks(walk: &Arc<Self>) {
        let stop = StopOnPanic(walk);
        while let Some(task) = walk.next_task() {
            if walk.tree.is_in_memory() {
                let flow = walk.run_all(task);
                Self::finish(walk, Vec::new(), flow, 0);
                continue;
            }
            let (started, cpu) = (Instant::now(), thread_time());
            let mut next = Vec::new();
            let flow = walk.run(task, &mut next);
            let elapsed = started.elapsed();
            let is_waiting = elapsed > MIN_WAIT && elapsed > 2 * thread_time().saturating_sub(cpu);
            let max_threads = if is_waiting {
                walk.max_threads
            } else {
                walk.threads
            };
            Self::finish(walk, next, flow, max_threads);
        }
        drop(stop);
    }

    /// Runs a task and those that follow, but for the half that other threads take when they have none.
    fn run_all(&self, task: Task<T, V::State>) -> ControlFlow<()> {
        let mut tasks = vec![task];
        while let Some(task) = tasks.pop() {
            self.run(task, &mut tasks)?;
            if self.is_stopped.load(Ordering::Relaxed) {
                return ControlFlow::Break(());
            }
            if tasks.len() > 1 && self.idle.load(Ordering::Relaxed) > 0 {
                // Those that were to come last.
                self.share(tasks.drain(..tasks.len() / 2));
            }
        }
        ControlFlow::Continue(())
    }

    /// Adds tasks to the queue.
    fn share(&self, tasks: impl ExactSizeIterator<Item = Task<T, V::State>>) {
        if tasks.len() == 0 {
            return;
        }
        let mut queue = self.queue.lock();
        queue.unfinished += tasks.len();
        let awakened = tasks.len().min(self.idle.load(Ordering::Relaxed));
        queue.tasks.extend(tasks);
        (0..awakened).for_each(|_| self.changed.notify_one());
    }

    fn next_task(&self) -> Option<Task<T, V::State>> {
        let mut queue = self.queue.lock();
        loop {
            if self.is_stopped.load(Ordering::Relaxed) || queue.unfinished == 0 {
                return None;
            }
            if let Some(task) = queue.tasks.pop() {
                return Some(task);
            }
            self.idle.fetch_add(1, Ordering::Relaxed);
            queue = self.changed.wait(queue);
            self.idle.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Finishes a task, and adds a thread if there is work for it and there are fewer than `max_threads`.
    fn finish(
        walk: &Arc<Self>,
        next: Vec<Task<T, V::State>>,
        flow: ControlFlow<()>,
        max_threads: usize,
    ) {
        if flow.is_break() {
            return walk.stop();
        }
        walk.share(next.into_iter());
        let mut queue = walk.queue.lock();
        queue.unfinished -= 1;
        if queue.unfinished == 0 {
            walk.changed.notify_all();
        }
        let is_needed = !queue.tasks.is_empty() && walk.idle.load(Ordering::Relaxed) == 0;
        if is_needed && queue.thread_count < max_threads {
            Self::spawn(walk, &mut queue);
        }
    }

    /// Runs a task, and collects those that follow, the first one last.
    fn run(&self, task: Task<T, V::State>, next: &mut Vec<Task<T, V::State>>) -> ControlFlow<()> {
        match task {
            Task::Open(level) => {
                if let Err(error) = level.open_first(&self.tree) {
                    self.visitor.skip(&level, error)?;
                    let above = level.parent.clone();
                    let complete = |above| self.complete(above, next);
                    return above.map_or(ControlFlow::Continue(()), complete);
                }
                self.read(level, (0, 0), next)
            }
            Task::Read {
                level,
                position,
                count,
            } => self.read(level, (position, count), next),
            Task::Visit {
                level,
                batch,
                numbers,
            } => {
                self.visit(&level, &batch, numbers, next)?;
                self.complete(level, next)
            }
        }
    }

    fn read(
        &self,
        level: Arc<Level<T, V::State>>,
        (mut position, count): (u64, u64),
        next: &mut Vec<Task<T, V::State>>,
    ) -> ControlFlow<()> {
        let mut batch = Batch::default();
        let directory = level.open(&self.tree);
        let read = directory.and_then(|open| self.tree.read(&open, &mut position, &mut batch));
        for (name, error) in batch.take_failed() {
            let mut path = level.path();
            push_component(&mut path, &name);
            self.visitor.report_file(&path, error);
        }
        if let Err(error) = read {
            self.visitor.report(&level.path(), error);
        }
        if batch.is_empty() {
            return self.complete(level, next);
        }
        batch.set_first(count);
        // Its reading goes on after the directories that were found.
        next.push(Task::Read {
            level: Arc::clone(&level),
            position,
            count: count + batch.len() as u64,
        });
        let chunk = self.visitor.chunk().max(1);
        if batch.len() <= chunk {
            return self.visit(&level, &batch, 0..batch.len(), next);
        }
        let batch = Arc::new(batch);
        let chunks = batch.len().div_ceil(chunk);
        level.pending.fetch_add(chunks, Ordering::Relaxed);
        for from in (0..batch.len()).step_by(chunk).rev() {
            next.push(Task::Visit {
                level: Arc::clone(&level),
                batch: Arc::clone(&batch),
                numbers: from..batch.len().min(from.saturating_add(chunk)),
            });
        }
        ControlFlow::Continue(())
    }

    fn visit(
        &self,
        level: &Arc<Level<T, V::State>>,
        batch: &Batch,
        numbers: Range<usize>,
        next: &mut Vec<Task<T, V::State>>,
    ) -> ControlFlow<()> {
        let directory = match level.open(&self.tree) {
            Ok(directory) => directory,
            Err(error) => {
                self.visitor.report(&level.path(), error);
                return ControlFlow::Continue(());
            }
        };
        let (path, mut descend) = (level.path(), Vec::new());
        let names = Visit {
            tree: &*self.tree,
            level,
            place: level.place(&directory, &path),
            batch,
            numbers,
        };
        self.visitor.visit(&names, &mut descend)?;
        level.pending.fetch_add(descend.len(), Ordering::Relaxed);
        for (number, state) in descend.into_iter().rev() {
            if let Some(found) = batch.get(number) {
                let below = Level::new(Some(level), found, &level.open, state);
                next.push(Task::Open(Arc::new(below)));
            }
        }
        ControlFlow::Continue(())
    }

    /// Counts a task of `level` as done, and leaves all directories that are done with it.
    fn complete(
        &self,
        mut level: Arc<Level<T, V::State>>,
        next: &mut Vec<Task<T, V::State>>,
    ) -> ControlFlow<()> {
        while level.pending.fetch_sub(1, Ordering::AcqRel) == 1 {
            level.open_parent(&self.tree);
            if !self.visitor.is_done(&level) {
                level.pending.store(1, Ordering::Relaxed);
                next.push(Task::read_from_start(level));
                break;
            }
            self.visitor.leave(&level)?;
            let Some(parent) = level.parent.clone() else {
                break;
            };
            level = parent;
        }
        ControlFlow::Continue(())
    }
}

impl<T: Tree, V: Visitor<T>> Walk<T, V> {
    fn stop(&self) {
        let mut queue = self.queue.lock();
        self.is_stopped.store(true, Ordering::Relaxed);
        queue.tasks.clear();
        self.changed.notify_all();
    }
}

/// Processor time of this thread.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}
