//! The index that readers use while the scan builds it, and the callbacks that wait for it.
//! A waiting reader holds no lock. It registers a callback for an entry or for plain bytes.

use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Instant;

use super::error::ReadError;
use crate::base::extent::Plain;
use crate::base::stats::Stats;
use crate::base::sync::{Mutex, RwLock, RwLockReadGuard};
use crate::index::MissingRow;
use crate::index::{Builder, Index, Ino, LazyIndex, Origin, Span};

/// Tells whether the caller still waits.
pub type IsWanted = Arc<dyn Fn() -> bool + Send + Sync>;

/// Work to run when an awaited part of the index is available.
pub struct Callback {
    work: Box<dyn FnOnce() + Send>,
    wanted: Option<IsWanted>,
}

impl std::fmt::Debug for Callback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Callback")
            .field("is_wanted", &self.is_wanted())
            .finish_non_exhaustive()
    }
}

impl Callback {
    /// Creates a callback that always runs.
    pub fn new(work: impl FnOnce() + Send + 'static) -> Self {
        Self {
            work: Box::new(work),
            wanted: None,
        }
    }

    /// A callback that may be dropped once `wanted` returns false. `wanted` must be cheap and not block.
    pub fn while_wanted(wanted: IsWanted, work: impl FnOnce() + Send + 'static) -> Self {
        Self {
            work: Box::new(work),
            wanted: Some(wanted),
        }
    }

    /// Runs the work.
    pub fn run(self) {
        (self.work)();
    }

    fn is_wanted(&self) -> bool {
        self.wanted.as_ref().is_none_or(|wanted| wanted())
    }
}

/// Number of waiters that triggers a sweep of cancelled ones.
const MIN_SWEEP_LEN: usize = 64;

/// Receives the inodes whose attributes later members have changed. Returns whether it wants more.
pub type Watcher = Box<dyn Fn(&[Ino]) -> bool + Send + Sync>;

/// Part of the index that a callback awaits. Each wait also ends with the scan, whatever the result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum WaitFor {
    /// Any entry except the root.
    Member,
    /// An entry of this name in this directory.
    Name(Ino, Vec<u8>),
    /// Plain bytes up to this offset, with the whole span of the last one.
    Plain(Plain),
    /// The complete index. The scan may still have to save it.
    Index,
    /// The end of the scan.
    End,
}

#[derive(Default)]
pub(super) struct LiveIndex {
    complete: OnceLock<Arc<Index>>,
    growing: RwLock<Option<Builder>>,
    waiters: Mutex<Waiters>,
    /// Number of waiters, so that a scan without waiters takes no lock.
    waiter_count: AtomicUsize,
    watchers: Mutex<Vec<Watcher>>,
    stats: Arc<Stats>,
}

impl std::fmt::Debug for LiveIndex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LiveIndex")
            .field("complete", &self.complete)
            .field("waiters", &self.waiters)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Waiters {
    is_scan_over: bool,
    callbacks: Vec<(WaitFor, Callback)>,
    /// Number of waiters after the last sweep, or fewer if some have run since.
    len_after_sweep: usize,
}

impl Waiters {
    /// Removes cancelled waiters once the number of all has doubled since the last sweep, because a reader
    /// killed again and again adds many. They never outnumber the others, or [`MIN_SWEEP_LEN`].
    fn sweep(&mut self) -> Vec<(WaitFor, Callback)> {
        if self.callbacks.len() < MIN_SWEEP_LEN.max(2 * self.len_after_sweep) {
            return Vec::new();
        }
        let cancelled = self
            .callbacks
            .extract_if(.., |(_, callback)| !callback.is_wanted())
            .collect();
        self.len_after_sweep = self.callbacks.len();
        cancelled
    }
}

/// Read access to the index as far as it is built. The scan cannot continue while a guard exists, so its
/// holder must neither wait nor take another.
pub type IndexGuard<'a> = LazyIndex<BuiltIndex<'a>>;

/// The index as far as it is built.
#[derive(Debug)]
pub enum BuiltIndex<'a> {
    /// The complete index.
    Complete(&'a Index),
    /// The part that the scan has built.
    Growing(RwLockReadGuard<'a, Option<Builder>>),
}

impl Deref for BuiltIndex<'_> {
    type Target = Index;

    fn deref(&self) -> &Index {
        match self {
            Self::Complete(index) => index,
            Self::Growing(builder) => builder
                .as_ref()
                .map(Builder::index)
                .expect("checked when the guard was made"),
        }
    }
}

impl LiveIndex {
    pub(super) fn complete(index: Index) -> Self {
        Self {
            complete: OnceLock::from(Arc::new(index)),
            waiters: Mutex::new(Waiters {
                is_scan_over: true,
                ..Waiters::default()
            }),
            ..Self::default()
        }
    }

    pub(super) fn growing(builder: Builder, stats: &Arc<Stats>) -> Self {
        Self {
            growing: RwLock::new(Some(builder)),
            stats: Arc::clone(stats),
            ..Self::default()
        }
    }

    /// Locks the index as far as it is built.
    pub(super) fn lock(&self) -> IndexGuard<'_> {
        if let Some(index) = self.complete.get() {
            return IndexGuard::new(BuiltIndex::Complete(index));
        }
        let growing = self.growing.read();
        if growing.is_some() {
            return IndexGuard::new(BuiltIndex::Growing(growing));
        }
        drop(growing);
        // The index was completed in between, under the lock.
        IndexGuard::new(BuiltIndex::Complete(self.complete.wait()))
    }

    /// As [`LazyIndex::read`], of the index as far as it is built. `access` must not wait for anything else.
    pub(super) fn read<T>(&self, access: impl FnOnce(&Index) -> T) -> Result<T, MissingRow> {
        self.lock().read(access)
    }

    pub(super) fn span(&self, number: u32) -> Result<Span, ReadError> {
        let span = self.read(|index| index.span(number))??;
        span.ok_or(ReadError::Index)
    }

    pub(super) fn completed(&self) -> Option<LazyIndex> {
        self.complete.get().cloned().map(LazyIndex::new)
    }

    pub(super) fn is_scan_over(&self) -> bool {
        self.complete.get().is_some() || self.waiters.lock().is_scan_over
    }

    /// As `Volume::on_available`. `callback` must check the index, because a scan may end without the entry.
    /// Returns whether it has to wait.
    pub(super) fn on_available(&self, awaited: WaitFor, callback: Callback) -> bool {
        let mut waiters = self.waiters.lock();
        // Counted before the check. The scan checks the count after it adds entries, so it misses no waiter.
        self.waiter_count.fetch_add(1, Ordering::SeqCst);
        if !waiters.is_scan_over && !self.has(&awaited) {
            waiters.callbacks.push((awaited, callback));
            let cancelled = waiters.sweep();
            self.waiter_count
                .fetch_sub(cancelled.len(), Ordering::SeqCst);
            // Dropped without the lock, because callbacks may hold any other resources.
            drop(waiters);
            return true;
        }
        self.waiter_count.fetch_sub(1, Ordering::SeqCst);
        drop(waiters);
        callback.run();
        false
    }

    /// As [`on_available`](Self::on_available), for a caller that waits, which `scan_waits` counts.
    pub(super) fn await_part(&self, awaited: WaitFor, callback: Callback) {
        if self.on_available(awaited, callback) {
            self.stats.scan_waits.increment();
        }
    }

    /// Whether the awaited part is available now.
    pub(super) fn has(&self, awaited: &WaitFor) -> bool {
        is_available(&self.lock(), awaited)
    }

    pub(super) fn wait_for(&self, awaited: WaitFor) {
        let (sender, closed) = mpsc::channel::<()>();
        self.await_part(awaited, Callback::new(move || drop(sender)));
        // No message is ever sent; the channel only closes.
        closed.recv().unwrap_or_default();
    }

    pub(super) fn watch(&self, watcher: Watcher) {
        let mut watchers = self.watchers.lock();
        // Nothing changes after the scan, which drops the watchers at its end.
        if !self.is_scan_over() {
            watchers.push(watcher);
        }
    }

    /// Changes the builder, if there is one still, without readers. `change` must be short.
    fn change<T>(&self, change: impl FnOnce(&mut Option<Builder>) -> T) -> T {
        let mut growing = self.growing.write();
        let start = Instant::now();
        let changed = change(&mut growing);
        drop(growing);
        let held = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.stats.index_lock_peak_microseconds.record_max(held);
        changed
    }

    pub(super) fn grow<T>(&self, grow: impl FnOnce(&mut Builder) -> T) -> Option<T> {
        let grown = self.change(|growing| {
            let builder = growing.as_mut()?;
            let grown = grow(builder);
            Some((grown, builder.take_dirty_inodes(), builder.take_problems()))
        });
        if self.waiter_count.load(Ordering::SeqCst) > 0 {
            self.notify_waiters();
        }
        let (grown, changes, problems) = grown?;
        for problem in problems {
            tracing::warn!("{problem}");
        }
        if !changes.is_empty() {
            let mut watchers = self.watchers.lock();
            watchers.retain(|watcher| watcher(&changes));
        }
        Some(grown)
    }

    fn notify_waiters(&self) {
        let mut waiters = self.waiters.lock();
        let index = self.lock();
        let due: Vec<_> = waiters
            .callbacks
            .extract_if(.., |(awaited, _)| is_available(&index, awaited))
            .collect();
        waiters.len_after_sweep = waiters.len_after_sweep.min(waiters.callbacks.len());
        drop(index);
        drop(waiters);
        self.run_callbacks(due);
    }

    /// Completes the index, and wakes its waiters. [`end_scan`](Self::end_scan) then wakes the remaining ones.
    pub(super) fn finish(&self, origin: Origin) {
        // Separate calls, so that the watcher receives these changes.
        while self.grow(Builder::resolve_forward_links) == Some(true) {}
        // Only this thread changes the builder, so the shared lock keeps no reader waiting.
        let completion = self
            .growing
            .read()
            .as_ref()
            .map(Builder::prepare_completion);
        let Some(mut completion) = completion else {
            return;
        };
        let has_more = |growing: &mut Option<Builder>, completion: &mut _| {
            let builder = growing.as_mut();
            builder.is_some_and(|builder| builder.apply(completion))
        };
        while self.change(|growing| has_more(growing, &mut completion)) {}
        self.change(|growing| {
            if let Some(builder) = growing {
                builder.complete(&mut completion, origin);
            }
            // A reader always finds the builder or the index, because nothing between these can panic.
            if let Some(builder) = growing.take() {
                self.complete.get_or_init(|| Arc::new(builder.into_index()));
            }
        });
        // Frees the old names without the lock.
        drop(completion);
        self.notify_waiters();
    }

    /// Marks the scan as over and runs all callbacks. The index may be complete or not.
    pub(super) fn end_scan(&self) {
        let mut waiters = self.waiters.lock();
        waiters.is_scan_over = true;
        let due = std::mem::take(&mut waiters.callbacks);
        drop(waiters);
        drop(std::mem::take(&mut *self.watchers.lock()));
        self.run_callbacks(due);
    }

    fn run_callbacks(&self, due: Vec<(WaitFor, Callback)>) {
        self.waiter_count.fetch_sub(due.len(), Ordering::SeqCst);
        for (_, callback) in due {
            callback.run();
        }
    }
}

fn is_available(index: &IndexGuard<'_>, awaited: &WaitFor) -> bool {
    match awaited {
        WaitFor::Member => index.entry_count() > 1,
        WaitFor::Name(parent, name) => {
            let is_found = index.try_read(|index| index.lookup(*parent, name).is_some());
            is_found.unwrap_or(true)
        }
        WaitFor::Plain(offset) => index.origin().plain_bytes >= offset.0,
        WaitFor::Index => index.is_complete(),
        WaitFor::End => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::archive_path::ArchivePath;
    use crate::base::extent::Extent;
    use crate::index::Options;
    use crate::index::test_support::file;

    fn live_index() -> Arc<LiveIndex> {
        let builder = Builder::new(Options::default());
        Arc::new(LiveIndex::growing(builder, &Arc::default()))
    }

    fn counting_callback(done: &Arc<AtomicUsize>) -> Callback {
        let done = Arc::clone(done);
        Callback::new(move || {
            done.fetch_add(1, Ordering::SeqCst);
        })
    }

    fn grow(live_index: &LiveIndex, name: &str) {
        let member = file(name, 0..1);
        let placed = live_index.grow(|builder| builder.add_member(&member));
        assert!(placed.expect("growing").is_ok());
    }

    // Promises: scan-waits
    #[test]
    fn callback_runs_once_its_entry_exists_and_not_before() {
        let (live_index, done) = (live_index(), Arc::<AtomicUsize>::default());
        let name = |name: &[u8]| WaitFor::Name(Ino::ROOT, name.to_vec());
        live_index.on_available(name(b"b"), counting_callback(&done));
        live_index.on_available(WaitFor::Plain(Plain(10)), counting_callback(&done));
        grow(&live_index, "a");
        assert_eq!(done.load(Ordering::SeqCst), 0);
        live_index.on_available(name(b"a"), counting_callback(&done));
        assert_eq!(done.load(Ordering::SeqCst), 1, "the entry exists already");
        grow(&live_index, "b");
        assert_eq!(done.load(Ordering::SeqCst), 2);
        let span = |start, len| {
            let plain = Extent::with_len(Plain(start), len);
            live_index.grow(|builder| builder.add_span(plain, Some(&[0]), None));
        };
        span(0, 9);
        assert_eq!(done.load(Ordering::SeqCst), 2);
        span(9, 1);
        assert_eq!(done.load(Ordering::SeqCst), 3);
        assert_eq!(live_index.waiter_count.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn watcher_is_notified_of_changed_not_of_new_entries() {
        let mut builder = Builder::new(Options {
            keeps_replaced: true,
            ..Options::default()
        });
        builder.add_member(&file("a", 0..1)).expect("placed");
        // Drops the change of the root.
        builder.take_dirty_inodes();
        let (live_index, changed) = (
            LiveIndex::growing(builder, &Arc::default()),
            Arc::<Mutex<Vec<_>>>::default(),
        );
        let recorded = Arc::clone(&changed);
        live_index.watch(Box::new(move |changes| {
            recorded.lock().extend(changes);
            false
        }));
        let others = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&others);
        live_index.watch(Box::new(move |_| {
            counted.fetch_add(1, Ordering::SeqCst);
            true
        }));
        grow(&live_index, "b");
        assert_eq!(*changed.lock(), []);
        grow(&live_index, "a");
        let first = changed.lock().clone();
        assert!(first.contains(&Ino(2)));
        grow(&live_index, "a");
        assert_eq!(*changed.lock(), first, "it wanted no more");
        assert_eq!(others.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn end_of_scan_runs_all_callbacks_and_later_ones_at_once() {
        let (live_index, done) = (live_index(), Arc::<AtomicUsize>::default());
        live_index.on_available(
            WaitFor::Name(Ino::ROOT, b"a".to_vec()),
            counting_callback(&done),
        );
        live_index.on_available(WaitFor::End, counting_callback(&done));
        live_index.on_available(WaitFor::Index, counting_callback(&done));
        live_index.finish(Origin::default());
        assert_eq!(done.load(Ordering::SeqCst), 1, "the scan is not over");
        assert!(live_index.lock().is_complete());
        live_index.end_scan();
        assert_eq!(done.load(Ordering::SeqCst), 3);
        live_index.on_available(WaitFor::Plain(Plain(10)), counting_callback(&done));
        assert_eq!(done.load(Ordering::SeqCst), 4);
        assert_eq!(live_index.grow(|_| ()), None);
    }

    // Promises: memory-lock
    #[test]
    fn names_are_found_while_the_index_is_completed() {
        let live_index = live_index();
        let names: Vec<_> = (0..60_000).map(|number| format!("d/{number:x}")).collect();
        for name in &names {
            grow(&live_index, name);
        }
        let find = |name: &str| {
            let (index, path) = (
                live_index.lock(),
                ArchivePath::sanitize(name.as_bytes()).path,
            );
            let index = index.tree().expect("rows");
            let entry = index.find(&path).expect("there");
            assert_eq!(index.path(entry.ino()), Some(path), "{name}");
            assert_eq!(entry.parent(), Ino(2), "{name}");
        };
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| {
                // Until the index was complete for a whole round.
                let mut rest = 2;
                while rest > 0 {
                    rest -= i32::from(live_index.completed().is_some());
                    names.iter().step_by(97).for_each(|name| find(name));
                }
            });
            live_index.finish(Origin::default());
            reading.join().expect("found");
        });
        let index = live_index.lock();
        let index = index.tree().expect("rows");
        assert_eq!(index.children(Ino(2), 0).count(), names.len());
    }

    #[test]
    fn panic_in_a_change_leaves_index_readable_and_waiters_notified() {
        let live_index = live_index();
        grow(&live_index, "a");
        let change = || live_index.grow(|_| panic!("on purpose"));
        let change = std::panic::catch_unwind(std::panic::AssertUnwindSafe(change));
        assert!(change.is_err());
        assert!(live_index.has(&WaitFor::Name(Ino::ROOT, b"a".to_vec())));
        live_index.end_scan();
        live_index.wait_for(WaitFor::Index);
    }

    // Promises: scan-fails
    #[test]
    fn failed_scan_keeps_the_entries_found() {
        let live_index = live_index();
        grow(&live_index, "a");
        live_index.end_scan();
        assert!(live_index.is_scan_over() && live_index.completed().is_none());
        assert!(live_index.has(&WaitFor::Name(Ino::ROOT, b"a".to_vec())));
        // Must return.
        live_index.wait_for(WaitFor::End);
    }

    // Promises: caller-killed
    #[test]
    fn sweep_removes_cancelled_waiters_and_no_others() {
        let (live_index, done) = (live_index(), Arc::<AtomicUsize>::default());
        let name = |number: usize| WaitFor::Name(Ino::ROOT, number.to_string().into_bytes());
        let waiting = 3 * MIN_SWEEP_LEN;
        for number in 0..waiting {
            live_index.on_available(name(number), counting_callback(&done));
        }
        let token = Arc::new(());
        let max_waiters = 2 * waiting;
        for round in 0..10 * waiting {
            let token = Arc::clone(&token);
            let cancelled = Callback::while_wanted(Arc::new(|| false), move || drop(token));
            live_index.on_available(name(round), cancelled);
            assert!(
                live_index.waiters.lock().callbacks.len() <= max_waiters,
                "round {round}"
            );
        }
        assert!(Arc::strong_count(&token) <= max_waiters - waiting + 1);
        let left = live_index.waiters.lock().callbacks.len();
        assert_eq!(live_index.waiter_count.load(Ordering::SeqCst), left);
        live_index.end_scan();
        assert_eq!(done.load(Ordering::SeqCst), waiting);
        assert_eq!(live_index.waiter_count.load(Ordering::SeqCst), 0);
    }

    // Promises: caller-killed
    #[test]
    fn cancelled_waiters_stay_few_after_many_waiters() {
        let (live_index, done) = (live_index(), Arc::<AtomicUsize>::default());
        for _ in 0..10 * MIN_SWEEP_LEN {
            let awaited = WaitFor::Name(Ino::ROOT, b"a".to_vec());
            live_index.on_available(awaited, counting_callback(&done));
        }
        grow(&live_index, "a");
        assert_eq!(done.load(Ordering::SeqCst), 10 * MIN_SWEEP_LEN);
        for _ in 0..10 * MIN_SWEEP_LEN {
            let cancelled = Callback::while_wanted(Arc::new(|| false), || ());
            live_index.on_available(WaitFor::End, cancelled);
        }
        assert!(live_index.waiters.lock().callbacks.len() <= MIN_SWEEP_LEN);
    }

    #[test]
    fn concurrent_waits_and_growth_miss_no_waiter() {
        for round in 0..200 {
            let (live_index, done) = (live_index(), Arc::<AtomicUsize>::default());
            std::thread::scope(|scope| {
                let growing =
                    scope.spawn(|| (0..20).for_each(|n| grow(&live_index, &n.to_string())));
                for number in 0..20 {
                    let name = number.to_string().into_bytes();
                    live_index
                        .on_available(WaitFor::Name(Ino::ROOT, name), counting_callback(&done));
                }
                growing.join().expect("grown");
            });
            assert_eq!(done.load(Ordering::SeqCst), 20, "round {round}");
        }
    }
}
