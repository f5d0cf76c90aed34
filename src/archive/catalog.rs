//! The index that everyone reads while the scan still makes it, and who waits for what of it.
//!
//! Whoever looks holds no lock across a wait: what is not there yet is asked for with something
//! to do [when it comes](Catalog::when), on the scan's thread, or when the scan is over. Who gives up
//! meanwhile is forgotten before such are more than all others (see [`Waiting::sweep`]).

use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, mpsc};

use crate::base::extent::Plain;
use crate::index::{Builder, Index, Ino, Origin};

/// Whether somebody still waits.
pub type Wanted = Arc<dyn Fn() -> bool + Send + Sync>;

/// What is to be done when something is known.
pub struct Then {
    work: Box<dyn FnOnce() + Send>,
    wanted: Option<Wanted>,
}

impl std::fmt::Debug for Then {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Then")
            .field("is_wanted", &self.is_wanted())
            .finish_non_exhaustive()
    }
}

impl Then {
    /// `work`, whatever comes.
    pub fn new(work: impl FnOnce() + Send + 'static) -> Self {
        Self {
            work: Box::new(work),
            wanted: None,
        }
    }

    /// `work` for somebody who may give up: once it is not `wanted` any more, which must be cheap to
    /// tell and waits for nobody, it may be dropped instead of done.
    pub fn while_wanted(wanted: Wanted, work: impl FnOnce() + Send + 'static) -> Self {
        Self {
            work: Box::new(work),
            wanted: Some(wanted),
        }
    }

    /// Does it.
    pub fn run(self) {
        (self.work)();
    }

    fn is_wanted(&self) -> bool {
        self.wanted.as_ref().is_none_or(|wanted| wanted())
    }
}

/// So many may wait before it is asked who of them has given up.
const FEW: usize = 64;

/// Who is told whose attributes members have changed.
pub type Watcher = Box<dyn Fn(Vec<Ino>) + Send + Sync>;

/// What can be waited for. Each also ends with the scan, whatever that found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Awaited {
    /// Any entry but the root.
    Member,
    /// An entry of this name in this directory.
    Name(Ino, Vec<u8>),
    /// A span, and thereby verified bytes, up to this offset.
    Plain(Plain),
    /// The end of the scan.
    End,
}

/// An index, complete or under construction.
pub(super) struct Catalog {
    complete: OnceLock<Arc<Index>>,
    /// `None` once there is nothing more to build.
    growing: RwLock<Option<Builder>>,
    waiting: Mutex<Waiting>,
    /// How many wait, so that a scan for which no one waits takes no lock for them.
    waiting_count: AtomicUsize,
    watcher: OnceLock<Watcher>,
}

impl std::fmt::Debug for Catalog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Catalog")
            .field("complete", &self.complete)
            .field("waiting", &self.waiting)
            .finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Waiting {
    /// The scan is over: complete, or failed.
    is_over: bool,
    thens: Vec<(Awaited, Then)>,
    /// How many were left when it was asked last who has given up, or fewer if they are.
    swept: usize,
}

impl Waiting {
    /// Takes out those who have given up, once there are twice as many as were left the last time: so
    /// each is asked about a few times on average, and those who have given up, of whom a reader who is
    /// killed again and again makes as many as it likes, are never more than the others or [`FEW`].
    fn sweep(&mut self) -> Vec<(Awaited, Then)> {
        if self.thens.len() < FEW.max(2 * self.swept) {
            return Vec::new();
        }
        let given_up = self
            .thens
            .extract_if(.., |(_, then)| !then.is_wanted())
            .collect();
        self.swept = self.thens.len();
        given_up
    }
}

impl std::fmt::Debug for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiting")
            .field("is_over", &self.is_over)
            .field("count", &self.thens.len())
            .finish_non_exhaustive()
    }
}

/// The index as far as it is known. While one of these lives the scan cannot go on; whoever has
/// one neither waits nor asks for another.
#[derive(Debug)]
pub enum Known<'a> {
    /// All of it.
    Complete(&'a Index),
    /// What the scan has come to.
    Growing(RwLockReadGuard<'a, Option<Builder>>),
}

impl Deref for Known<'_> {
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

impl Catalog {
    /// Of an index that is known already.
    pub(super) fn complete(index: Index) -> Self {
        Self {
            complete: OnceLock::from(Arc::new(index)),
            growing: RwLock::new(None),
            waiting: Mutex::new(Waiting {
                is_over: true,
                ..Waiting::default()
            }),
            waiting_count: AtomicUsize::new(0),
            watcher: OnceLock::new(),
        }
    }

    /// Of what `builder` will hold.
    pub(super) fn growing(builder: Builder) -> Self {
        Self {
            complete: OnceLock::new(),
            growing: RwLock::new(Some(builder)),
            waiting: Mutex::default(),
            waiting_count: AtomicUsize::new(0),
            watcher: OnceLock::new(),
        }
    }

    /// The index as far as it is known.
    pub(super) fn known(&self) -> Known<'_> {
        if let Some(index) = self.complete.get() {
            return Known::Complete(index);
        }
        let growing = self.growing.read().unwrap_or_else(PoisonError::into_inner);
        if growing.is_some() {
            return Known::Growing(growing);
        }
        drop(growing);
        // It was completed in between, and with the lock held.
        Known::Complete(self.complete.wait())
    }

    /// The index, when all of it is known.
    pub(super) fn completed(&self) -> Option<&Arc<Index>> {
        self.complete.get()
    }

    /// Whether the scan is over, so that what is not known now never will be.
    pub(super) fn is_over(&self) -> bool {
        self.complete.get().is_some() || self.waiting().is_over
    }

    /// Does `then` as soon as what is `awaited` is there or the scan is over: at once, on this
    /// thread, or later on the scan's. `then` looks again: it may have been the end. Once it is not
    /// wanted any more it may never be done.
    pub(super) fn when(&self, awaited: Awaited, then: Then) {
        let mut waiting = self.waiting();
        // Counted before it looks, so that the scan, which looks after it builds, misses no one.
        self.waiting_count.fetch_add(1, Ordering::SeqCst);
        if !waiting.is_over && !is_there(&self.known(), &awaited) {
            waiting.thens.push((awaited, then));
            let given_up = waiting.sweep();
            self.waiting_count
                .fetch_sub(given_up.len(), Ordering::SeqCst);
            // They are dropped without the lock: nobody knows what else they hold.
            drop(waiting);
            return;
        }
        self.waiting_count.fetch_sub(1, Ordering::SeqCst);
        drop(waiting);
        then.run();
    }

    /// Waits, on this thread, for what is `awaited` or the end of the scan.
    pub(super) fn wait_for(&self, awaited: Awaited) {
        let (sender, closed) = mpsc::channel::<()>();
        self.when(awaited, Then::new(move || drop(sender)));
        // Nothing is ever sent.
        closed.recv().unwrap_or_default();
    }

    /// Has `watcher` told of changes, on the scan's thread, which must not be made to wait. The first
    /// word counts.
    pub(super) fn watch(&self, watcher: Watcher) {
        drop(self.watcher.set(watcher));
    }

    /// Lets `grow` add to what is known.
    pub(super) fn grow<T>(&self, grow: impl FnOnce(&mut Builder) -> T) -> Option<T> {
        let grown = {
            let mut growing = self.growing.write().unwrap_or_else(PoisonError::into_inner);
            let builder = growing.as_mut();
            builder.map(|builder| {
                let grown = grow(builder);
                (grown, builder.take_changes(), builder.take_problems())
            })
        };
        if self.waiting_count.load(Ordering::SeqCst) > 0 {
            self.tell();
        }
        let (grown, changes, problems) = grown?;
        for problem in problems {
            tracing::warn!("{problem}");
        }
        if let Some(watcher) = self.watcher.get()
            && !changes.is_empty()
        {
            watcher(changes);
        }
        Some(grown)
    }

    /// Tells those whose wait has come to its end.
    fn tell(&self) {
        let mut waiting = self.waiting();
        let known = self.known();
        let due: Vec<_> = waiting
            .thens
            .extract_if(.., |(awaited, _)| is_there(&known, awaited))
            .collect();
        waiting.swept = waiting.swept.min(waiting.thens.len());
        drop(known);
        drop(waiting);
        self.run(due);
    }

    /// Completes the index: nothing grows any more. Those who wait are told by
    /// [`end`](Self::end).
    pub(super) fn finish(&self, origin: Origin) {
        // By itself, so that the watcher hears of what that changes.
        self.grow(Builder::settle);
        let mut growing = self.growing.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(builder) = growing.take() {
            let index = builder.finish(origin);
            // With the lock held, so that no one finds neither.
            assert!(
                self.complete.set(Arc::new(index)).is_ok(),
                "there is one builder"
            );
        }
    }

    /// The scan is over, whether it completed the index or not.
    pub(super) fn end(&self) {
        let mut waiting = self.waiting();
        waiting.is_over = true;
        let due = std::mem::take(&mut waiting.thens);
        drop(waiting);
        self.run(due);
    }

    fn run(&self, due: Vec<(Awaited, Then)>) {
        self.waiting_count.fetch_sub(due.len(), Ordering::SeqCst);
        for (_, then) in due {
            then.run();
        }
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_there(index: &Index, awaited: &Awaited) -> bool {
    match awaited {
        Awaited::Member => index.entry_count() > 1,
        Awaited::Name(parent, name) => index.lookup(*parent, name).is_some(),
        Awaited::Plain(offset) => index.origin().plain_bytes >= offset.0,
        Awaited::End => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::extent::Extent;
    use crate::index::Options;
    use crate::index::sample::file;

    fn catalog() -> Arc<Catalog> {
        Arc::new(Catalog::growing(Builder::new(Options::default())))
    }

    /// Says when it was done.
    fn then(done: &Arc<AtomicUsize>) -> Then {
        let done = Arc::clone(done);
        Then::new(move || {
            done.fetch_add(1, Ordering::SeqCst);
        })
    }

    fn grow(catalog: &Catalog, name: &str) {
        let member = file(name, 0..1);
        let placed = catalog.grow(|builder| builder.member(&member));
        assert!(placed.expect("growing").is_ok());
    }

    #[test]
    fn who_waits_is_told_when_it_comes_and_not_before() {
        let (catalog, done) = (catalog(), Arc::<AtomicUsize>::default());
        let name = |name: &[u8]| Awaited::Name(Ino::ROOT, name.to_vec());
        catalog.when(name(b"b"), then(&done));
        catalog.when(Awaited::Plain(Plain(10)), then(&done));
        grow(&catalog, "a");
        assert_eq!(done.load(Ordering::SeqCst), 0);
        catalog.when(name(b"a"), then(&done));
        assert_eq!(done.load(Ordering::SeqCst), 1, "it is there already");
        grow(&catalog, "b");
        assert_eq!(done.load(Ordering::SeqCst), 2);
        let span = |start, len| {
            let plain = Extent::with_len(Plain(start), len);
            catalog.grow(|builder| builder.span(plain, Some(&[0]), None));
        };
        span(0, 9);
        assert_eq!(done.load(Ordering::SeqCst), 2);
        span(9, 1);
        assert_eq!(done.load(Ordering::SeqCst), 3);
        assert_eq!(catalog.waiting_count.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_watcher_hears_of_what_changes_and_not_of_what_is_new() {
        let mut builder = Builder::new(Options {
            keeps_replaced: true,
            ..Options::default()
        });
        builder.member(&file("a", 0..1)).expect("placed");
        // The root's.
        builder.take_changes();
        let (catalog, heard) = (Catalog::growing(builder), Arc::<Mutex<Vec<_>>>::default());
        let told = Arc::clone(&heard);
        catalog.watch(Box::new(move |changes| {
            told.lock().expect("no panic").extend(changes);
        }));
        grow(&catalog, "b");
        assert_eq!(*heard.lock().expect("no panic"), []);
        grow(&catalog, "a");
        let heard = heard.lock().expect("no panic");
        assert!(heard.contains(&Ino(2)));
    }

    #[test]
    fn the_end_tells_everyone_and_who_comes_later_does_not_wait() {
        let (catalog, done) = (catalog(), Arc::<AtomicUsize>::default());
        catalog.when(Awaited::Name(Ino::ROOT, b"a".to_vec()), then(&done));
        catalog.when(Awaited::End, then(&done));
        catalog.finish(Origin::default());
        assert_eq!(done.load(Ordering::SeqCst), 0, "the spool is still open");
        assert!(catalog.known().is_complete());
        catalog.end();
        assert_eq!(done.load(Ordering::SeqCst), 2);
        catalog.when(Awaited::Plain(Plain(10)), then(&done));
        assert_eq!(done.load(Ordering::SeqCst), 3);
        assert_eq!(catalog.grow(|_| ()), None);
    }

    #[test]
    fn a_scan_that_failed_keeps_what_it_found() {
        let catalog = catalog();
        grow(&catalog, "a");
        catalog.end();
        assert!(catalog.is_over() && catalog.completed().is_none());
        assert!(catalog.known().lookup(Ino::ROOT, b"a").is_some());
        // Returns.
        catalog.wait_for(Awaited::End);
    }

    #[test]
    fn who_gives_up_is_forgotten_and_nobody_else() {
        let (catalog, done) = (catalog(), Arc::<AtomicUsize>::default());
        let name = |number: usize| Awaited::Name(Ino::ROOT, number.to_string().into_bytes());
        let patient = 3 * FEW;
        for number in 0..patient {
            catalog.when(name(number), then(&done));
        }
        let held = Arc::new(());
        let most = 2 * patient;
        for round in 0..10 * patient {
            let held = Arc::clone(&held);
            let given_up = Then::while_wanted(Arc::new(|| false), move || drop(held));
            catalog.when(name(round), given_up);
            assert!(catalog.waiting().thens.len() <= most, "round {round}");
        }
        assert!(Arc::strong_count(&held) <= most - patient + 1);
        let left = catalog.waiting().thens.len();
        assert_eq!(catalog.waiting_count.load(Ordering::SeqCst), left);
        catalog.end();
        assert_eq!(done.load(Ordering::SeqCst), patient);
        assert_eq!(catalog.waiting_count.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn many_who_waited_once_let_no_more_wait_who_have_given_up() {
        let (catalog, done) = (catalog(), Arc::<AtomicUsize>::default());
        for _ in 0..10 * FEW {
            let awaited = Awaited::Name(Ino::ROOT, b"a".to_vec());
            catalog.when(awaited, then(&done));
        }
        grow(&catalog, "a");
        assert_eq!(done.load(Ordering::SeqCst), 10 * FEW);
        for _ in 0..10 * FEW {
            let given_up = Then::while_wanted(Arc::new(|| false), || ());
            catalog.when(Awaited::End, given_up);
        }
        assert!(catalog.waiting().thens.len() <= FEW);
    }

    #[test]
    fn no_one_is_missed_however_wait_and_growth_meet() {
        for round in 0..200 {
            let (catalog, done) = (catalog(), Arc::<AtomicUsize>::default());
            std::thread::scope(|scope| {
                let growing = scope.spawn(|| (0..20).for_each(|n| grow(&catalog, &n.to_string())));
                for number in 0..20 {
                    let name = number.to_string().into_bytes();
                    catalog.when(Awaited::Name(Ino::ROOT, name), then(&done));
                }
                growing.join().expect("grown");
            });
            assert_eq!(done.load(Ordering::SeqCst), 20, "round {round}");
        }
    }
}
