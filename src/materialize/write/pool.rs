//! Writer threads for regular files, each with its own queue.
//!
//! A file whose name is still queued is sent to the same queue, so the last member of that name wins. Another
//! file follows the previous file of its directory, because two threads that create files in one directory
//! wait for each other. It changes queue only if the other queue has much less work. A caller that needs a
//! certain file waits for that file alone.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;

use super::context::Context;
use super::directory::Identity;
use super::file::FileWriter;
use super::job::Job;
use crate::archive::scan::PayloadEnd;
use crate::base::sync::{Condvar, Mutex, MutexGuard};
use crate::base::thread::Thread;

/// Maximum number of items in a queue. With more, a directory of many files does not starve the other queues.
/// With fewer, the descriptors of their directories stay within the usual limit of 1024.
const MAX_QUEUE_ITEMS: usize = 192;

/// Small files queued before a polling writer is woken. A wakeup for each cost as much as writing.
const WAKE_BATCH_ITEMS: usize = 64;
/// Time that a writer polls before it sleeps.
const POLL_TIMEOUT: Duration = Duration::from_millis(1);
/// Minimum size of a content that wakes the writer immediately.
const WAKE_BYTES: usize = 512 * 1024;
/// Cost of a file besides its content, in bytes written in the same time.
const FILE_COST_BYTES: u64 = 16 * 1024;
/// Load difference at which a directory changes to the idlest queue: about 1 ms of work.
const MIN_IMBALANCE_BYTES: u64 = 1024 * 1024;

/// The writer threads and their queues. Used only by the scan thread.
#[derive(Debug)]
pub(crate) struct WriterPool {
    queues: Arc<WriterQueues>,
    threads: Vec<Thread<()>>,
    /// Last queued file of each name, by the name's hash. A collision only costs an unnecessary wait.
    in_flight: HashMap<u64, QueuedFile>,
    hasher: RandomState,
    /// Number of files queued so far, and the number of the last one.
    queued: u64,
    directory: Option<Identity>,
    /// Queue of the last file, for its pieces.
    current: usize,
}

/// A file's queue, and its number among all files of the run, from 1.
#[derive(Clone, Copy, Debug)]
struct QueuedFile {
    queue: usize,
    number: u64,
}

/// All queues. Every writer sees the others' progress.
#[derive(Debug)]
struct WriterQueues(Vec<WriterQueue>);

#[derive(Debug, Default)]
struct WriterQueue {
    state: Mutex<QueueState>,
    filled: Condvar,
    /// Signals an empty queue, or a file that was started or finished.
    drained: Condvar,
    /// Number of the file being written, or of the last one.
    started: AtomicU64,
    /// Number of the last finished file.
    done: AtomicU64,
    /// Number of threads that wait for `drained`. A wakeup is a system call even without waiters.
    waiting: AtomicUsize,
    /// In bytes, queued or in progress; see [`Item::load`].
    load: AtomicU64,
}

#[derive(Debug, Default)]
struct QueueState {
    queue: VecDeque<Item>,
    closed: bool,
    /// Number of the file queued last.
    queued: u64,
    writer: WriterState,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum WriterState {
    #[default]
    Working,
    /// Checks its queue again after [`POLL_TIMEOUT`].
    Polling,
    Parked,
}

/// For each writer, the last file queued at some moment.
#[derive(Debug)]
pub(crate) struct Watermark(Vec<u64>);

#[derive(Debug)]
enum Item {
    /// A file with its complete content.
    Whole(u64, Job, Bytes),
    /// A file whose content follows.
    Begin(u64, Job),
    /// The next piece of that file.
    Piece(Bytes),
    /// The end of that file.
    End(PayloadEnd),
}

impl WriterPool {
    /// Starts `count` threads, at least one.
    pub(crate) fn start(count: usize, context: &Arc<Context>) -> io::Result<Self> {
        let count = count.max(1);
        let mut writers = Self {
            queues: Arc::new(WriterQueues(
                (0..count).map(|_| WriterQueue::default()).collect(),
            )),
            threads: Vec::new(),
            in_flight: HashMap::new(),
            hasher: RandomState::new(),
            queued: 0,
            directory: None,
            current: 0,
        };
        for number in 0..count {
            let queues = Arc::clone(&writers.queues);
            let context = Arc::clone(context);
            let work = move || queues.run_writer(number, &context);
            writers
                .threads
                .push(Thread::spawn(&format!("tarfs-writer-{number}"), work)?);
        }
        Ok(writers)
    }

    pub(crate) fn count(&self) -> usize {
        self.threads.len()
    }

    /// Queues a file with its complete content.
    pub(crate) fn write_file(&mut self, job: Job, bytes: Bytes) {
        let number = self.assign_queue(&job).number;
        self.push(Item::Whole(number, job, bytes));
    }

    /// Queues a file. Its content follows by [`Self::write_piece`], its end by [`Self::end_file`].
    pub(crate) fn begin_file(&mut self, job: Job) {
        let number = self.assign_queue(&job).number;
        self.push(Item::Begin(number, job));
    }

    pub(crate) fn write_piece(&self, bytes: Bytes) {
        self.push(Item::Piece(bytes));
    }

    pub(crate) fn end_file(&self, end: PayloadEnd) {
        self.push(Item::End(end));
    }

    /// Waits until no file of this name in this directory is queued.
    pub(crate) fn wait_for_name(&mut self, directory: Identity, name: &[u8]) {
        let key = self.hasher.hash_one((directory, name));
        if let Some(queued_file) = self.in_flight.remove(&key)
            && let Some(queue) = self.queues.0.get(queued_file.queue)
        {
            queue.wait_for(queued_file.number);
        }
    }

    pub(crate) fn wait_for_all(&mut self) {
        self.in_flight.clear();
        for queue in &self.queues.0 {
            let queued = queue.state.lock().queued;
            queue.wait_for(queued);
        }
    }

    pub(crate) fn watermark(&self) -> Watermark {
        Watermark(
            self.queues
                .0
                .iter()
                .map(|queue| queue.state.lock().queued)
                .collect(),
        )
    }

    /// Whether all files that were queued at `watermark` are finished.
    pub(crate) fn has_reached(&self, watermark: &Watermark) -> bool {
        let mut queues = self.queues.0.iter().zip(&watermark.0);
        queues.all(|(queue, &queued)| queue.is_done(queued))
    }

    /// Finishes the queued files and ends the threads. Panics when a thread panicked.
    pub(crate) fn close(mut self) {
        for queue in &self.queues.0 {
            queue.close();
        }
        for thread in self.threads.drain(..) {
            thread.join();
        }
    }

    /// Chooses the job's queue and notes its name as in flight.
    fn assign_queue(&mut self, job: &Job) -> QueuedFile {
        let is_in_flight = |queued_file: &QueuedFile| {
            let queue = self.queues.0.get(queued_file.queue);
            queue.is_some_and(|queue| !queue.is_done(queued_file.number))
        };
        if self.in_flight.len() >= 8 * MAX_QUEUE_ITEMS * self.queues.0.len() {
            self.in_flight
                .retain(|_, queued_file| is_in_flight(queued_file));
        }
        let directory = job.directory.identity();
        let key = self.hasher.hash_one((directory, job.name()));
        let namesake = self.in_flight.get(&key).copied().filter(is_in_flight);
        self.current = match namesake {
            Some(queued_file) => queued_file.queue,
            None => self.choose_queue(directory),
        };
        self.directory = Some(directory);
        self.queued += 1;
        let queued_file = QueuedFile {
            queue: self.current,
            number: self.queued,
        };
        self.in_flight.insert(key, queued_file);
        queued_file
    }

    fn choose_queue(&self, directory: Identity) -> usize {
        let load = |queue: &WriterQueue| queue.load.load(Ordering::Relaxed);
        let loads = || self.queues.0.iter().map(load).enumerate();
        let (least_loaded, least) = loads().min_by_key(|&(_, load)| load).unwrap_or_default();
        let stays = self.directory == Some(directory)
            && loads().any(|(queue, load)| {
                queue == self.current && load <= least.saturating_add(MIN_IMBALANCE_BYTES)
            });
        if stays { self.current } else { least_loaded }
    }

    fn push(&self, item: Item) {
        if let Some(queue) = self.queues.0.get(self.current) {
            queue.push(item);
        }
    }
}

impl Drop for WriterPool {
    /// Ends the threads. Dropping their handles waits for them.
    fn drop(&mut self) {
        for queue in &self.queues.0 {
            queue.close();
        }
    }
}

impl WriterQueue {
    /// Waits while the queue is full. A closed queue drops the item.
    fn push(&self, item: Item) {
        let mut state = self.state.lock();
        if state.queue.len() >= MAX_QUEUE_ITEMS {
            state = self.wait(state, |state| {
                state.queue.len() < MAX_QUEUE_ITEMS || state.closed
            });
        }
        if state.closed {
            return;
        }
        if let Item::Whole(number, ..) | Item::Begin(number, _) = item {
            state.queued = number;
        }
        let is_large = item.is_large();
        self.load.fetch_add(item.load(), Ordering::Relaxed);
        state.queue.push_back(item);
        let is_batch_full = is_large || state.queue.len() >= WAKE_BATCH_ITEMS;
        if state.writer == WriterState::Parked || is_batch_full {
            self.wake(&mut state);
        }
    }

    fn wake(&self, state: &mut QueueState) {
        if state.writer != WriterState::Working {
            state.writer = WriterState::Working;
            self.filled.notify_one();
        }
    }

    fn wait<'a>(
        &self,
        mut state: MutexGuard<'a, QueueState>,
        condition: impl Fn(&QueueState) -> bool,
    ) -> MutexGuard<'a, QueueState> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        self.wake(&mut state);
        while !condition(&state) {
            state = self.drained.wait(state);
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        state
    }

    fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        state.writer = WriterState::Working;
        drop(state);
        self.filled.notify_all();
        self.drained.notify_all();
    }

    fn is_done(&self, number: u64) -> bool {
        self.done.load(Ordering::SeqCst) >= number
    }

    fn wait_for(&self, number: u64) {
        if !self.is_done(number) {
            drop(self.wait(self.state.lock(), |_| self.is_done(number)));
        }
    }

    /// Waits until all files before `number` in this queue are finished.
    fn wait_for_earlier(&self, number: u64) {
        drop(self.wait(self.state.lock(), |state| {
            self.started.load(Ordering::SeqCst) > number || self.is_done(state.queued)
        }));
    }

    fn mark_started(&self, number: u64) {
        self.started.store(number, Ordering::SeqCst);
        self.notify_waiters();
    }

    fn mark_done(&self) {
        self.done
            .store(self.started.load(Ordering::SeqCst), Ordering::SeqCst);
        self.notify_waiters();
    }

    fn notify_waiters(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            drop(self.state.lock());
            self.drained.notify_all();
        }
    }

    /// Takes all queued items; `None` when the queue is closed and empty.
    fn take_items(&self, items: &mut VecDeque<Item>) -> Option<()> {
        let mut state = self.state.lock();
        if state.queue.is_empty() && !state.closed {
            state.writer = WriterState::Polling;
            let is_polling = |state: &mut QueueState| state.writer == WriterState::Polling;
            let (woken, _) = self
                .filled
                .wait_timeout_while(state, POLL_TIMEOUT, is_polling);
            state = woken;
        }
        while state.queue.is_empty() {
            if state.closed {
                return None;
            }
            state.writer = WriterState::Parked;
            state = self.filled.wait(state);
        }
        state.writer = WriterState::Working;
        std::mem::swap(&mut state.queue, items);
        drop(state);
        self.notify_waiters();
        Some(())
    }
}

impl Item {
    /// Cost in bytes written in the same time.
    fn load(&self) -> u64 {
        match self {
            Self::Whole(_, _, bytes) => FILE_COST_BYTES + bytes.len() as u64,
            Self::Begin(..) => FILE_COST_BYTES,
            Self::Piece(bytes) => bytes.len() as u64,
            Self::End { .. } => 0,
        }
    }

    fn is_large(&self) -> bool {
        match self {
            Self::Whole(_, _, bytes) => bytes.len() >= WAKE_BYTES,
            Self::Piece(_) => true,
            Self::Begin(..) | Self::End { .. } => false,
        }
    }
}

impl WriterQueues {
    fn run_writer(&self, own: usize, context: &Context) {
        let Some(queue) = self.0.get(own) else {
            return;
        };
        let _exit_guard = ExitGuard(queue);
        let mut items = VecDeque::new();
        let mut open = None;
        while queue.take_items(&mut items).is_some() {
            for item in items.drain(..) {
                let load = item.load();
                open = self.handle_item(queue, item, open, context);
                queue.load.fetch_sub(load, Ordering::Relaxed);
            }
        }
    }

    /// Handles one item. Returns the file that is still open.
    fn handle_item(
        &self,
        queue: &WriterQueue,
        item: Item,
        open: Option<FileWriter>,
        context: &Context,
    ) -> Option<FileWriter> {
        // After a fatal error, the writer only empties its queue.
        let is_running = context.problems.fatal().is_none();
        match item {
            Item::Whole(number, job, bytes) => {
                queue.mark_started(number);
                if is_running
                    && let Some(file) = self.create(number, job, context)
                    && let Some(file) = file.write(&bytes, context)
                {
                    file.finish(PayloadEnd::Complete, context);
                }
                queue.mark_done();
                None
            }
            Item::Begin(number, job) => {
                queue.mark_started(number);
                if is_running {
                    self.create(number, job, context)
                } else {
                    None
                }
            }
            Item::Piece(bytes) if is_running => open.and_then(|file| file.write(&bytes, context)),
            Item::Piece(_) => open,
            Item::End(end) => {
                if let Some(file) = open.filter(|_| is_running) {
                    file.finish(end, context);
                }
                queue.mark_done();
                None
            }
        }
    }

    fn create(&self, number: u64, job: Job, context: &Context) -> Option<FileWriter> {
        FileWriter::create(job, context, || self.wait_for_earlier(number))
    }

    /// Waits, in all queues, for files before `number`. No deadlock: a file waits only for earlier ones.
    fn wait_for_earlier(&self, number: u64) {
        for queue in &self.0 {
            if queue.started.load(Ordering::SeqCst) != number {
                queue.wait_for_earlier(number);
            }
        }
    }
}

/// Releases all waiters when a writer thread ends, even by a panic.
struct ExitGuard<'a>(&'a WriterQueue);

impl Drop for ExitGuard<'_> {
    fn drop(&mut self) {
        self.0.started.store(u64::MAX, Ordering::SeqCst);
        self.0.done.store(u64::MAX, Ordering::SeqCst);
        self.0.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::archive_path::ArchivePath;
    use crate::materialize::test_support;
    use crate::materialize::write::Directory;

    /// Two queues and a job in the destination. No file is written.
    fn writers() -> (WriterPool, impl Fn(&[u8]) -> Job) {
        let directory = Directory::open_top(&std::env::temp_dir()).expect("a directory");
        let job = move |name: &[u8]| Job {
            directory: directory.clone(),
            name: None,
            path: ArchivePath::sanitize(name).path,
            number: 0,
            atime: None,
            member: Box::new(test_support::file(name, b"").0),
        };
        (
            WriterPool::start(2, &test_support::context()).expect("threads"),
            job,
        )
    }

    fn add_load(writers: &WriterPool, queued_file: QueuedFile) {
        let queue = writers.queues.0.get(queued_file.queue).expect("a queue");
        queue.load.store(2 * MIN_IMBALANCE_BYTES, Ordering::Relaxed);
    }

    #[test]
    fn same_name_goes_to_the_same_queue_under_any_load() {
        let (mut writers, job) = writers();
        let first = writers.assign_queue(&job(b"name"));
        add_load(&writers, first);
        assert_ne!(writers.assign_queue(&job(b"other")).queue, first.queue);
        assert_eq!(writers.assign_queue(&job(b"name")).queue, first.queue);
    }

    #[test]
    fn directory_changes_queue_only_on_large_imbalance() {
        let (mut writers, job) = writers();
        let first = writers.assign_queue(&job(b"a"));
        let queue = writers.queues.0.get(first.queue).expect("a queue");
        queue.load.store(MIN_IMBALANCE_BYTES, Ordering::Relaxed);
        assert_eq!(writers.assign_queue(&job(b"b")).queue, first.queue);
        add_load(&writers, first);
        assert_ne!(writers.assign_queue(&job(b"c")).queue, first.queue);
    }
}
