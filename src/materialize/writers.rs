//! Threads that write regular files, each with its own queue.
//!
//! All files of one directory go through one queue, in archive order, so a name that comes twice
//! ends as its last. Whoever needs a certain file to be there first waits for that one alone.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use super::context::Context;
use super::file::{Job, OpenFile};
use super::root::Identity;
use crate::base::task::Thread;

/// Items that wait in one queue: enough that a directory of many files does not starve the other
/// queues, few enough that the descriptors of their directories stay within the usual 1024.
const QUEUE_ITEMS: usize = 192;

/// The writer threads and what is on its way to them; belongs to the scan's thread.
#[derive(Debug)]
pub(super) struct Writers {
    shards: Vec<Arc<Shard>>,
    threads: Vec<Thread<()>>,
    /// Which file of which queue last claimed a name, by the name's hash. Two names with one hash
    /// cost a needless wait, no more.
    in_flight: HashMap<u64, Ticket>,
    hasher: RandomState,
    /// Where the pieces of the file at hand go.
    streaming: usize,
    context: Arc<Context>,
}

/// A file's place in its queue.
#[derive(Clone, Copy, Debug)]
struct Ticket {
    shard: usize,
    number: u64,
}

#[derive(Debug, Default)]
struct Shard {
    state: Mutex<State>,
    /// The queue is no longer empty, or closed.
    filled: Condvar,
    /// The queue is no longer full, or an awaited file is done.
    drained: Condvar,
    /// Number of the last file that is done; they count from 1.
    done: AtomicU64,
    /// Someone waits for `done` to grow.
    awaited: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Item>,
    closed: bool,
    /// Files queued so far.
    queued: u64,
}

#[derive(Debug)]
enum Item {
    /// A file with all its content.
    Whole(Job, Bytes),
    /// A file whose content follows.
    Begin(Job),
    /// The next piece of it.
    Piece(Bytes),
    /// It is complete, or the archive ends.
    End { cut: bool },
}

impl Writers {
    /// Starts `count` threads, at least one.
    ///
    /// # Errors
    /// When the system has no thread left to give.
    pub(super) fn start(count: usize, context: &Arc<Context>) -> io::Result<Self> {
        let mut writers = Self {
            shards: Vec::new(),
            threads: Vec::new(),
            in_flight: HashMap::new(),
            hasher: RandomState::new(),
            streaming: 0,
            context: Arc::clone(context),
        };
        for number in 0..count.max(1) {
            let shard = Arc::new(Shard::default());
            writers.shards.push(Arc::clone(&shard));
            let context = Arc::clone(context);
            let work = move || shard.work(&context);
            writers
                .threads
                .push(Thread::spawn(&format!("writer-{number}"), work)?);
        }
        Ok(writers)
    }

    /// Queues a file with all its content.
    pub(super) fn write(&mut self, job: Job, bytes: Bytes) {
        let shard = self.claim(&job);
        self.push(shard, Item::Whole(job, bytes));
    }

    /// Queues a file; its content follows by [`Self::piece`], its end by [`Self::end`].
    pub(super) fn begin(&mut self, job: Job) {
        self.streaming = self.claim(&job);
        self.push(self.streaming, Item::Begin(job));
    }

    /// Queues the next piece of the file begun last.
    pub(super) fn piece(&mut self, bytes: Bytes) {
        self.push(self.streaming, Item::Piece(bytes));
    }

    /// Queues the end of the file begun last.
    pub(super) fn end(&mut self, cut: bool) {
        self.push(self.streaming, Item::End { cut });
    }

    /// Waits until no file of this name in this directory is queued.
    pub(super) fn settle(&mut self, directory: Identity, name: &[u8]) {
        let key = self.hasher.hash_one((directory, name));
        if let Some(ticket) = self.in_flight.remove(&key)
            && let Some(shard) = self.shards.get(ticket.shard)
        {
            shard.wait(ticket.number);
        }
    }

    /// Waits until nothing is queued.
    pub(super) fn settle_all(&mut self) {
        self.in_flight.clear();
        for shard in &self.shards {
            let queued = shard.lock().queued;
            shard.wait(queued);
        }
    }

    /// Links and directories that made room for something else so far.
    pub(super) fn replacements(&self) -> usize {
        self.context.replacements.load(Ordering::Acquire)
    }

    /// Writes what is queued and ends the threads.
    ///
    /// # Panics
    /// When a thread panicked.
    pub(super) fn close(mut self) {
        for shard in &self.shards {
            shard.close();
        }
        for thread in self.threads.drain(..) {
            thread.join();
        }
    }

    /// Notes that the job's name is on its way, and says where to.
    fn claim(&mut self, job: &Job) -> usize {
        let directory = job.directory.identity();
        let count = self.shards.len() as u64;
        let shard = usize::try_from(self.hasher.hash_one(directory) % count).unwrap_or(0);
        let Some(queue) = self.shards.get(shard) else {
            return 0;
        };
        let number = {
            let mut state = queue.lock();
            state.queued += 1;
            state.queued
        };
        if self.in_flight.len() >= 8 * QUEUE_ITEMS * self.shards.len() {
            let shards = &self.shards;
            self.in_flight.retain(|_, ticket| {
                shards
                    .get(ticket.shard)
                    .is_some_and(|shard| !shard.is_done(ticket.number))
            });
        }
        let name = super::root::name_of(&job.path);
        let key = self.hasher.hash_one((directory, name));
        self.in_flight.insert(key, Ticket { shard, number });
        shard
    }

    fn push(&self, shard: usize, item: Item) {
        if let Some(shard) = self.shards.get(shard) {
            shard.push(item);
        }
    }
}

impl Drop for Writers {
    /// Lets the threads end, which their handles wait for.
    fn drop(&mut self) {
        for shard in &self.shards {
            shard.close();
        }
    }
}

impl Shard {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while the queue is full; on a closed queue the item is dropped.
    fn push(&self, item: Item) {
        let mut state = self.lock();
        while state.queue.len() >= QUEUE_ITEMS && !state.closed {
            state = self
                .drained
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        if state.closed {
            return;
        }
        state.queue.push_back(item);
        // The thread only sleeps on an empty queue.
        if state.queue.len() == 1 {
            self.filled.notify_one();
        }
    }

    fn close(&self) {
        self.lock().closed = true;
        self.filled.notify_all();
        self.drained.notify_all();
    }

    fn is_done(&self, number: u64) -> bool {
        self.done.load(Ordering::SeqCst) >= number
    }

    /// Waits for file `number` to be done.
    fn wait(&self, number: u64) {
        if self.is_done(number) {
            return;
        }
        let mut state = self.lock();
        self.awaited.store(true, Ordering::SeqCst);
        while !self.is_done(number) {
            state = self
                .drained
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        self.awaited.store(false, Ordering::SeqCst);
    }

    fn finish_one(&self) {
        self.done.fetch_add(1, Ordering::SeqCst);
        if self.awaited.load(Ordering::SeqCst) {
            drop(self.lock());
            self.drained.notify_all();
        }
    }

    /// Takes everything that is queued; `None` when the queue is closed and empty.
    fn take(&self, items: &mut VecDeque<Item>) -> Option<()> {
        let mut state = self.lock();
        while state.queue.is_empty() {
            if state.closed {
                return None;
            }
            state = self
                .filled
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        std::mem::swap(&mut state.queue, items);
        drop(state);
        self.drained.notify_all();
        Some(())
    }

    /// A writer's life.
    fn work(&self, context: &Context) {
        let _farewell = Farewell(self);
        let mut items = VecDeque::new();
        let mut open = None;
        while self.take(&mut items).is_some() {
            for item in items.drain(..) {
                open = self.handle(item, open, context);
            }
        }
    }

    /// One step of it; returns the file that is still open.
    fn handle(&self, item: Item, open: Option<OpenFile>, context: &Context) -> Option<OpenFile> {
        // After the end of everything the queue is only emptied.
        let alive = context.problems.fatal().is_none();
        match item {
            Item::Whole(job, bytes) => {
                if alive
                    && let Some(file) = OpenFile::create(job, context)
                    && let Some(file) = file.write(&bytes, context)
                {
                    file.finish(false, context);
                }
                self.finish_one();
                None
            }
            Item::Begin(job) if alive => OpenFile::create(job, context),
            Item::Begin(_) => None,
            Item::Piece(bytes) if alive => open.and_then(|file| file.write(&bytes, context)),
            Item::Piece(_) => open,
            Item::End { cut } => {
                if let Some(file) = open.filter(|_| alive) {
                    file.finish(cut, context);
                }
                self.finish_one();
                None
            }
        }
    }
}

/// Lets nobody wait for a thread that is gone, even by a panic.
struct Farewell<'a>(&'a Shard);

impl Drop for Farewell<'_> {
    fn drop(&mut self) {
        self.0.done.store(u64::MAX, Ordering::SeqCst);
        self.0.close();
    }
}
