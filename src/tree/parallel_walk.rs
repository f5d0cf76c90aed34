//! A walk over a [`Tree`] by several threads.
//!
//! Tasks are taken from the end of a queue, so that a walk goes down before it goes on, and the queue holds a few
//! directories' names. Where a task takes system calls, all threads share one queue. Otherwise a thread keeps its tasks,
//! and shares them only while another has none. A directory is left when all below it is done.

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroUsize;
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::base::sync::{Condvar, Mutex};
use crate::base::thread::Thread;

use super::interface::{Batch, Name, Tree, push_component};
use super::item::{Item, Place};

/// Names of a directory that one thread visits at once, if that takes system calls.
pub(super) const CALL_CHUNK: usize = 64;
/// Likewise, if it takes none.
const CHUNK: usize = 4096;
/// Most threads of a walk that adds threads by itself.
const MAX_THREADS: usize = 64;
/// Shorter tasks do not add threads.
const MIN_WAIT: Duration = Duration::from_micros(200);

/// A directory on the way of a walk.
#[expect(missing_debug_implementations, reason = "trees have no form for it")]
pub struct Level<T: Tree, S> {
    /// The directory above; `None` for a starting point.
    pub parent: Option<Arc<Self>>,
    /// Its name; of a starting point, the path that was given.
    pub name: Vec<u8>,
    /// Its number.
    pub inode: u64,
    /// Number of directories above it, down from the starting point.
    pub depth: usize,
    handle: Mutex<Handle<T>>,
    open: Arc<OpenLevels<T, S>>,
    /// State of the visitor.
    pub state: S,
    /// Its reading, and tasks and directories below it that are not done.
    pending: AtomicUsize,
}

struct Handle<T: Tree> {
    /// `None` while the directory is closed.
    directory: Option<Arc<T::Directory>>,
    /// Set when it is closed.
    identity: (u64, u64),
}

/// The directories below starting points that were opened last. Others are closed, so that a tree may be deeper
/// than the limit of open files.
pub(crate) struct OpenLevels<T: Tree, S> {
    max: usize,
    levels: Mutex<VecDeque<Weak<Level<T, S>>>>,
}

impl<T: Tree, S> OpenLevels<T, S> {
    /// Keeps open as many directories of `tree` as a walk may that keeps open directories of `trees` trees.
    pub(crate) fn new(tree: &T, trees: usize) -> Arc<Self> {
        let max = tree.max_open();
        Arc::new(Self {
            max: max.map_or(usize::MAX, |max| (max / trees.max(1)).max(2)),
            levels: Mutex::default(),
        })
    }

    /// Adds an open directory, and closes the one that was opened first if there are too many.
    fn add(&self, tree: &T, level: &Arc<Level<T, S>>) {
        if self.max == usize::MAX {
            return;
        }
        let oldest = {
            let mut levels = self.levels.lock();
            levels.push_back(Arc::downgrade(level));
            let has_too_many = levels.len() > self.max;
            has_too_many.then(|| levels.pop_front()).flatten()
        };
        let Some(oldest) = oldest.and_then(|level| level.upgrade()) else {
            return;
        };
        let mut handle = oldest.handle.lock();
        // Without an identity it stays open.
        if let Some(Ok(identity)) = handle.directory.as_ref().map(|it| tree.identity(it)) {
            handle.identity = identity;
            handle.directory = None;
        }
    }
}

impl<T: Tree, S> Level<T, S> {
    /// The directory `name` in `parent`, which is not open yet.
    fn new(
        parent: Option<&Arc<Self>>,
        name: Name<'_>,
        open: &Arc<OpenLevels<T, S>>,
        state: S,
    ) -> Self {
        Self {
            parent: parent.cloned(),
            name: name.name.to_owned(),
            inode: name.inode,
            depth: parent.map_or(0, |parent| parent.depth + 1),
            handle: Mutex::new(Handle {
                directory: None,
                identity: (0, 0),
            }),
            open: Arc::clone(open),
            state,
            pending: AtomicUsize::new(1),
        }
    }

    /// The open directory `start`.
    pub(crate) fn at_start(start: Start<T, S>, open: &Arc<OpenLevels<T, S>>) -> Arc<Self> {
        let name = Name::directory(&start.path, start.inode);
        let level = Self::new(None, name, open, start.state);
        level.handle.lock().directory = Some(Arc::new(start.directory));
        Arc::new(level)
    }

    /// Opens the directory `name` in `self`.
    ///
    /// # Errors
    /// As [`Tree::open`].
    pub(crate) fn open_child(
        self: &Arc<Self>,
        tree: &T,
        name: Name<'_>,
        state: S,
    ) -> io::Result<Arc<Self>> {
        let child = Arc::new(Self::new(Some(self), name, &self.open, state));
        child.open_first(tree)?;
        Ok(child)
    }

    /// Opens the directory for the first time.
    fn open_first(self: &Arc<Self>, tree: &T) -> io::Result<()> {
        let parent = self.parent.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let directory = tree.open(&*parent.open(tree)?, self.as_name())?;
        self.handle.lock().directory = Some(Arc::new(directory));
        self.open.add(tree, self);
        Ok(())
    }

    /// The open directory. It is opened again if it was closed.
    ///
    /// # Errors
    /// As [`Tree::open`], or another directory has its path now.
    pub fn open(self: &Arc<Self>, tree: &T) -> io::Result<Arc<T::Directory>> {
        let (mut closed, mut level) = (Vec::new(), self);
        let mut directory = loop {
            if let Some(directory) = &level.handle.lock().directory {
                break Arc::clone(directory);
            }
            closed.push(level);
            // Starting points are never closed.
            level = level.parent.as_ref().ok_or(io::ErrorKind::NotFound)?;
        };
        while let Some(level) = closed.pop() {
            directory = Arc::new(tree.open(&directory, level.as_name())?);
            // Those in which the walk goes on soon.
            if closed.len() < self.open.max / 2 {
                level.set_open(tree, &directory)?;
            }
        }
        Ok(directory)
    }

    /// Keeps `directory`, which was opened again.
    fn set_open(self: &Arc<Self>, tree: &T, directory: &Arc<T::Directory>) -> io::Result<()> {
        let mut handle = self.handle.lock();
        if tree.identity(directory)? != handle.identity {
            return Err(io::Error::other("the directory was moved"));
        }
        handle.directory = Some(Arc::clone(directory));
        drop(handle);
        self.open.add(tree, self);
        Ok(())
    }

    /// Opens the directory above again if it is closed, because the way from an open one may be long.
    fn open_parent(&self, tree: &T) {
        let Some(parent) = &self.parent else {
            return;
        };
        if parent.handle.lock().directory.is_some() {
            return;
        }
        let directory = self.handle.lock().directory.clone();
        if let Some(directory) = directory
            && let Ok(above) = tree.open(&directory, Name::directory(b"..", parent.inode))
        {
            // It is opened on the other way if this one fails.
            drop(parent.set_open(tree, &Arc::new(above)));
        }
    }

    /// Its name in the directory above.
    pub fn as_name(&self) -> Name<'_> {
        Name::directory(&self.name, self.inode)
    }

    /// Its place, if it is open as `directory`, and its path is `path`.
    pub fn place<'a>(&'a self, directory: &'a T::Directory, path: &'a [u8]) -> Place<'a, T> {
        Place {
            directory,
            inode: self.inode,
            path,
            start: self.start(),
            depth: self.depth,
        }
    }

    /// The path that was given as its starting point.
    pub fn start(&self) -> &[u8] {
        let mut level = self;
        while let Some(parent) = &level.parent {
            level = parent;
        }
        &level.name
    }

    /// Its path, which begins with its starting point.
    pub fn path(&self) -> Vec<u8> {
        let mut names = Vec::with_capacity(self.depth + 1);
        let mut level = self;
        names.push(&*level.name);
        while let Some(parent) = &level.parent {
            level = parent;
            names.push(&*level.name);
        }
        let mut path = Vec::new();
        for name in names.into_iter().rev() {
            push_component(&mut path, name);
        }
        path
    }
}

impl<T: Tree, S> Drop for Level<T, S> {
    fn drop(&mut self) {
        // A recursive drop of a deep tree would overflow the stack.
        let mut above = self.parent.take();
        while let Some(mut level) = above.and_then(Arc::into_inner) {
            above = level.parent.take();
        }
    }
}

/// Names of an open directory, for a [`Visitor`].
#[expect(missing_debug_implementations, reason = "trees have no form for it")]
pub struct Visit<'a, T: Tree, S> {
    tree: &'a T,
    /// The directory.
    pub level: &'a Arc<Level<T, S>>,
    /// The same, while it is open.
    pub place: Place<'a, T>,
    batch: &'a Batch,
    numbers: Range<usize>,
}

impl<T: Tree, S> Visit<'_, T, S> {
    /// The names with their numbers, as [`Visitor::visit`] is to give them.
    pub fn names(&self) -> impl Iterator<Item = (usize, Name<'_>)> {
        let numbers = self.numbers.clone();
        numbers.filter_map(|number| Some((number, self.batch.get(number)?)))
    }

    /// The files with the numbers of their names.
    pub fn items(&self) -> impl Iterator<Item = (usize, Item<'_, T>)> {
        let names = self.names();
        names.map(|(number, name)| (number, Item::in_directory(self.tree, &self.place, name)))
    }

    /// The place of the name with this number among all names of the directory.
    pub fn place_of(&self, number: usize) -> u64 {
        self.batch.first().saturating_add(number as u64)
    }
}

/// Receives the files of a walk, in several threads.
pub trait Visitor<T: Tree>: Send + Sync + 'static {
    /// State of a directory, from its opening until it is left.
    type State: Send + Sync + 'static;

    /// Whether a visit takes system calls for each name. Then a thread visits fewer names at once.
    fn makes_calls(&self) -> bool {
        true
    }

    /// Number of trees in which a directory is open for each one of the walk, which is one of them.
    fn open_trees(&self) -> usize {
        1
    }

    /// Most names of a directory that one thread visits at once.
    fn chunk(&self) -> usize {
        if self.makes_calls() {
            CALL_CHUNK
        } else {
            CHUNK
        }
    }

    /// Visits names of a directory. Adds to `descend` the numbers of the directories to walk next, with their states.
    /// A break ends the walk.
    fn visit(
        &self,
        names: &Visit<'_, T, Self::State>,
        descend: &mut Vec<(usize, Self::State)>,
    ) -> ControlFlow<()>;

    /// Whether a directory is done, after all below it has been visited and left. Otherwise it is read again, from
    /// its beginning.
    fn is_done(&self, _: &Arc<Level<T, Self::State>>) -> bool {
        true
    }

    /// Leaves a directory, when all below it has been visited and left.
    fn leave(&self, _: &Arc<Level<T, Self::State>>) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    /// Reports and leaves a directory that could not be opened.
    fn skip(&self, level: &Arc<Level<T, Self::State>>, error: io::Error) -> ControlFlow<()> {
        self.report(&level.path(), error);
        self.leave(level)
    }

    /// Reports that the directory at `path` cannot be opened or read.
    fn report(&self, path: &[u8], error: io::Error);

    /// Reports that the file at `path` cannot be examined.
    fn report_file(&self, path: &[u8], error: io::Error) {
        self.report(path, error);
    }
}

/// A directory at which a walk starts.
#[derive(Debug)]
pub struct Start<T: Tree, S> {
    /// Its path as it was given.
    pub path: Vec<u8>,
    /// Its number.
    pub inode: u64,
    /// The open directory.
    pub directory: T::Directory,
    /// Its state.
    pub state: S,
}

/// Walks over the directories `starts` of `tree`, and what is below them, without the starting points themselves.
/// The order is that of `starts` and of the names in a directory, except for what threads do at the same time. A
/// directory is visited before what is below it. Returns whether a visitor ended the walk.
///
/// It has at most `jobs` threads with the caller's, or one for each processor, and more while they mostly wait for the
/// file system, up to 64.
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
        None => {
            let count = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
            (count.min(MAX_THREADS), MAX_THREADS)
        }
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
                    return above.map_or(ControlFlow::Continue(()), |it| self.complete(it, next));
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
        let read = directory.and_then(|it| self.tree.read(&it, &mut position, &mut batch));
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

#[cfg(test)]
mod tests {
    use std::borrow::Cow;
    use std::collections::{BTreeMap, BTreeSet};

    use super::super::{FileKind, IndexTree, Metadata};
    use super::*;
    use crate::index::test_support::{directory, file, index};
    use crate::index::{Index, Ino, LazyIndex};

    /// An index in which directories called `closed` cannot be opened.
    struct TestTree(IndexTree);

    impl TestTree {
        fn new(index: Index) -> Arc<Self> {
            Arc::new(Self(IndexTree::new(LazyIndex::new(Arc::new(index)), true)))
        }
    }

    impl Tree for TestTree {
        type Directory = Ino;

        fn open(&self, parent: &Ino, name: Name<'_>) -> io::Result<Ino> {
            if name.name == b"closed" {
                return Err(io::ErrorKind::PermissionDenied.into());
            }
            self.0.open(parent, name)
        }

        fn read(&self, directory: &Ino, position: &mut u64, batch: &mut Batch) -> io::Result<()> {
            self.0.read(directory, position, batch)
        }

        fn metadata(&self, directory: &Ino, name: Name<'_>) -> io::Result<Metadata> {
            self.0.metadata(directory, name)
        }

        fn target(&self, directory: &Ino, name: Name<'_>) -> io::Result<Cow<'_, [u8]>> {
            self.0.target(directory, name)
        }

        fn user(&self, metadata: &Metadata) -> io::Result<Option<Cow<'_, [u8]>>> {
            self.0.user(metadata)
        }

        fn group(&self, metadata: &Metadata) -> io::Result<Option<Cow<'_, [u8]>>> {
            self.0.group(metadata)
        }
    }

    /// Records the calls of a walk, and ends it at the name `quit`.
    ///
    /// Directories called `again` are read twice.
    #[derive(Default)]
    struct Recorder(Mutex<Vec<String>>);

    impl Recorder {
        fn record(&self, call: &str, path: &[u8]) {
            let path = String::from_utf8_lossy(path);
            self.0.lock().push(format!("{call} {path}"));
        }
    }

    impl Visitor<TestTree> for Recorder {
        type State = ();

        fn visit(
            &self,
            names: &Visit<'_, TestTree, ()>,
            descend: &mut Vec<(usize, ())>,
        ) -> ControlFlow<()> {
            for (number, item) in names.items() {
                assert_ne!(item.name(), b"panic", "a visitor may panic");
                self.record("visit", item.path());
                if item.name() == b"quit" {
                    return ControlFlow::Break(());
                }
                if item.kind() == FileKind::Directory {
                    descend.push((number, ()));
                }
            }
            ControlFlow::Continue(())
        }

        fn is_done(&self, level: &Arc<Level<TestTree, ()>>) -> bool {
            if level.name != b"again" {
                return true;
            }
            let call = String::from_utf8_lossy(&level.path()).into_owned() + " is read again";
            let mut calls = self.0.lock();
            let is_done = calls.contains(&call);
            if !is_done {
                calls.push(call);
            }
            is_done
        }

        fn leave(&self, level: &Arc<Level<TestTree, ()>>) -> ControlFlow<()> {
            self.record("leave", &level.path());
            ControlFlow::Continue(())
        }

        fn report(&self, path: &[u8], _: io::Error) {
            self.record("report", path);
        }
    }

    fn calls(index: Index, threads: usize) -> (Vec<String>, ControlFlow<()>) {
        let recorder = Arc::new(Recorder::default());
        let start = Start {
            path: b".".to_vec(),
            inode: 1,
            directory: Ino::ROOT,
            state: (),
        };
        let jobs = NonZeroUsize::new(threads);
        let flow = walk_parallel(&TestTree::new(index), &recorder, vec![start], jobs);
        let calls = std::mem::take(&mut *recorder.0.lock());
        (calls, flow)
    }

    #[test]
    fn one_thread_goes_down_before_it_goes_on() {
        let index = index(&[file("a/b/c", 0..1), file("a/d", 0..1), file("e/f", 0..1)]);
        let (calls, flow) = calls(index, 1);
        let expected = "visit ./a,visit ./e,visit ./a/b,visit ./a/d,visit ./a/b/c,leave ./a/b,leave ./a,\
                        visit ./e/f,leave ./e,leave .";
        assert_eq!(calls.join(","), expected);
        assert_eq!(flow, ControlFlow::Continue(()));
    }

    #[test]
    fn many_threads_visit_each_name_once_and_leave_directories_last() {
        let mut members = Vec::new();
        for number in 0..3000 {
            members.push(file(&format!("flat/{number}"), 0..1));
            members.push(file(&format!("d{}/e{}/f", number % 7, number), 0..1));
        }
        let (calls, _) = calls(index(&members), 8);
        let mut places = BTreeMap::new();
        for (number, call) in calls.iter().enumerate() {
            assert!(places.insert(call.as_str(), number).is_none(), "{call}");
        }
        // The root, 8 directories in it and 3,000 below them are left; all but the root are visited, too.
        assert_eq!(calls.len(), 3009 + 3008 + 6000);
        for (call, number) in &places {
            let Some(path) = call.strip_prefix("leave ") else {
                continue;
            };
            if let Some((above, _)) = path.rsplit_once('/') {
                assert!(places[&*format!("visit {path}")] < *number, "{path}");
                assert!(places[&*format!("leave {above}")] > *number, "{path}");
            }
        }
    }

    #[test]
    fn a_break_ends_the_walk_of_all_threads() {
        let mut members: Vec<_> = (0..1000)
            .map(|number| file(&format!("d{number}/f"), 0..1))
            .collect();
        members.push(file("a/quit", 0..1));
        for threads in [1, 8] {
            let (calls, flow) = calls(index(&members), threads);
            assert_eq!(flow, ControlFlow::Break(()));
            assert!(!calls.contains(&"leave .".to_owned()), "{threads}");
        }
    }

    /// Waits at each directory, and records the thread.
    #[derive(Default)]
    struct SlowVisitor(Mutex<BTreeSet<String>>);

    impl Visitor<TestTree> for SlowVisitor {
        type State = ();

        fn visit(
            &self,
            names: &Visit<'_, TestTree, ()>,
            descend: &mut Vec<(usize, ())>,
        ) -> ControlFlow<()> {
            let thread = std::thread::current().id();
            self.0.lock().insert(format!("{thread:?}"));
            std::thread::sleep(2 * MIN_WAIT);
            let directories = names
                .names()
                .filter(|(_, found)| found.kind == FileKind::Directory);
            descend.extend(directories.map(|(number, _)| (number, ())));
            ControlFlow::Continue(())
        }

        fn report(&self, _: &[u8], _: io::Error) {}
    }

    #[test]
    fn a_fixed_number_of_threads_stays_while_they_wait() {
        let members: Vec<_> = (0..200)
            .map(|number| file(&format!("d{number}/f"), 0..1))
            .collect();
        let tree = TestTree::new(index(&members));
        for threads in [1, 3] {
            let visitor = Arc::new(SlowVisitor::default());
            let start = Start {
                path: b".".to_vec(),
                inode: 1,
                directory: Ino::ROOT,
                state: (),
            };
            let jobs = NonZeroUsize::new(threads);
            let flow = walk_parallel(&tree, &visitor, vec![start], jobs);
            assert_eq!(flow, ControlFlow::Continue(()));
            assert!(visitor.0.lock().len() <= threads, "{threads}");
        }
    }

    #[test]
    fn directory_that_cannot_be_opened_is_reported_and_skipped() {
        let index = index(&[directory("closed", 0o755), file("open/f", 0..1)]);
        let (calls, flow) = calls(index, 1);
        let expected = "visit ./closed,visit ./open,report ./closed,leave ./closed,visit ./open/f,\
                        leave ./open,leave .";
        assert_eq!(calls.join(","), expected);
        assert_eq!(flow, ControlFlow::Continue(()));
    }

    // Promises: rm-others
    #[test]
    fn directory_that_is_not_done_is_read_again() {
        let index = index(&[file("again/a/f", 0..1), file("b", 0..1)]);
        let (calls, _) = calls(index, 1);
        let once = "visit ./again/a,visit ./again/a/f,leave ./again/a";
        let expected = format!(
            "visit ./again,visit ./b,{once},./again is read again,{once},leave ./again,leave ."
        );
        assert_eq!(calls.join(","), expected);
    }

    #[test]
    fn a_deep_tree_is_walked_without_recursion() {
        let index = index(&[file(&("a/".repeat(8_000) + "f"), 0..1)]);
        let (calls, _) = calls(index, 2);
        assert_eq!(calls.len(), 8_000 + 1 + 8_001);
    }

    #[test]
    #[should_panic(expected = "a visitor may panic")]
    fn a_panic_of_a_visitor_ends_the_walk() {
        let mut members: Vec<_> = (0..1000)
            .map(|number| file(&format!("d{number}/f"), 0..1))
            .collect();
        members.push(file("a/panic", 0..1));
        let (calls, _) = calls(index(&members), 8);
        assert!(calls.is_empty(), "it has ended");
    }
}
