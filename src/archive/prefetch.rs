//! The threads that are ahead of readers.
//!
//! One thread hears of every read, finds out [where readers go](super::ahead), and pushes small
//! files into the kernel's page cache; it is the only one that does so, and it answers no read: to
//! push a page waits for whoever reads that page at the moment. Others fetch and decode
//! [spans](super::make), when no read does.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::ahead::{Limits, Make, Push, Runs, Touch};
use super::catalog::{Awaited, Then};
use super::passing::{Passed, Passing};
use super::rate::Rate;
use super::read::Reader;
use super::recorder::{Recorder, Touched};
use super::replay::Replay;
use super::walks::Walks;
use crate::base::extent::{Extent, Plain};
use crate::base::thread::Thread;
use crate::base::thread_pool::ThreadPool;
use crate::index::{Entry, Index, Ino, Kind};

/// Messages that may wait to be heard of; reads that find no room are forgotten, which only makes it
/// see less.
const INBOX: usize = 1024;

/// Plain bytes made ahead of a reader, at the most, however much memory there is.
const MOST_MADE: u64 = 32 << 20;

/// Plain bytes pushed ahead of a reader, at the most: enough to be ahead of one who only reads. More
/// takes longer to push than the reader needs to overtake it: of 10,500 files in a plain tar some
/// 7,900 were pushed in time with 1 to 4 MiB, 3,700 with 16.
const MOST_PUSHED: u64 = 2 << 20;

/// Longer files are not pushed: their own read-ahead by the kernel does as well.
const LONGEST_PUSHED: u64 = 512 << 10;

/// Windows that wait to be pushed; older ones give way, as their readers are past them.
const MOST_WINDOWS: usize = 16;

/// Entries looked at for one window.
const MOST_STEPS: u32 = 1 << 16;

/// Entries looked at before reads are heard again.
const STEPS: u32 = 256;

/// Spans of a request that is made ahead.
const BATCH: usize = 8;

/// Requests of a replay at once: as many as a distant server needs to be busy.
const REPLAYS: u32 = 4;

/// How often to look whether a spool still holds everything.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Spans of a request that is made because the disk was too slow for them before: few, so that all find room
/// in the queue of the disk cache.
const SKIPPED_BATCH: usize = 4;

/// How often to look whether the disk is still busy.
const DISK_PAUSE: Duration = Duration::from_millis(50);

/// Threads that fetch.
const FETCHERS: usize = 4;

/// What is prepared without being asked for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Ahead {
    /// Nothing.
    None,
    /// What readers who go through a file or a tree will want next.
    #[default]
    Readers,
    /// That, and everything else from front to back, as far as it can be kept.
    All,
}

/// What to prepare, and how.
#[derive(Default)]
pub struct Prefetch {
    /// What.
    pub ahead: Ahead,
    /// Bytes that may be fetched a second; no limit when `None`.
    pub bytes_per_second: Option<u64>,
    /// Tells what was read before in this order, and will be again; asked once the index is
    /// complete.
    pub replay: Option<Profile>,
    /// Whether to remember what is read. Then nothing is pushed: the kernel does not tell of reads
    /// that it can answer.
    pub record: bool,
}

/// What there is of a profile in an archive.
pub type Profile = Box<dyn FnOnce(&Index) -> Vec<Touched> + Send>;

impl fmt::Debug for Prefetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prefetch")
            .field("ahead", &self.ahead)
            .field("bytes_per_second", &self.bytes_per_second)
            .field("record", &self.record)
            .finish_non_exhaustive()
    }
}

/// How far it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrefetchProgress {
    /// What is prepared.
    pub ahead: Ahead,
    /// How far [`Ahead::All`] is.
    pub state: PrefetchState,
    /// Spans that it made, or found to be kept already.
    pub done_spans: u64,
    /// Spans of the archive.
    pub total_spans: u64,
    /// Spans of the replay that were made, or found to be kept already.
    pub replayed_spans: u64,
    /// Spans of the replay.
    pub replay_spans: u64,
}

/// How far fetching everything is. Of several archives the least state is that of all.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum PrefetchState {
    /// It goes on when no one reads.
    Running,
    /// Some parts could not be made.
    Incomplete,
    /// There is no more room to keep what it makes.
    Full,
    /// Everything is kept, and nothing is fetched any more.
    Complete,
    /// It is not wanted.
    Off,
}

/// Keeps whole files for readers who then need not ask: the kernel's page cache.
pub trait PageCache: Send + Sync + fmt::Debug {
    /// Whether the file can be kept, and was not yet.
    fn wants(&self, ino: Ino) -> bool;

    /// Whether someone may find the file there.
    fn shows(&self, index: &Index, ino: Ino) -> bool;

    /// Sees to it that these regular files can be kept, if that is possible, and says how many could
    /// not before. Whoever calls holds no [`Known`](super::Known) of an index that grows.
    fn introduce(&self, files: &[Ino]) -> usize;

    /// Sees to it that whoever opens `ino` and what follows it in its directory by name need not ask
    /// for each, if that takes long enough for them to be worth it.
    fn learn(&self, index: &Index, ino: Ino);

    /// Keeps `bytes` from `offset` on, whole pages but for the end of the file. May wait for
    /// whoever reads it at this moment.
    ///
    /// # Errors
    /// When they cannot be kept.
    fn store(&self, ino: Ino, offset: u64, bytes: &[u8]) -> io::Result<()>;
}

/// Prepares what will be read, until dropped.
#[derive(Debug)]
pub(super) struct Engine {
    reader: Arc<Reader>,
    shared: Arc<Shared>,
    pages: Arc<OnceLock<Arc<dyn PageCache>>>,
    inbox: SyncSender<Message>,
    is_over: Arc<AtomicBool>,
    /// Whether reads lead to anything.
    follows: bool,
    recorder: Option<Mutex<Recorder>>,
    walks: Mutex<Walks>,
    thread: Option<Thread<()>>,
}

/// What others may know of the work.
#[derive(Debug, Default)]
struct Shared {
    ahead: Ahead,
    /// Messages that were not heard of yet.
    unheard: AtomicU64,
    /// Reads that nobody was told of yet.
    seen: Mutex<Seen>,
    /// Whether the follower must be woken to look for them.
    asleep: AtomicBool,
    /// Jobs that are not done yet, whatever for.
    outstanding: AtomicU32,
    all: Tally,
    /// Whether [`Ahead::All`] has nothing more to ask for.
    all_asked: AtomicBool,
    replay: Tally,
    /// Spans of a local archive that the disk cache did not take at first.
    skipped: Tally,
}

/// Spans of one purpose.
#[derive(Debug, Default)]
struct Tally {
    /// Whether nothing is made while the disk cache is busy.
    waits_for_disk: bool,
    total: AtomicU64,
    asked: AtomicU64,
    done: Arc<AtomicU64>,
    outstanding: Arc<AtomicU32>,
}

#[derive(Debug)]
enum Message {
    Reads(Vec<Read>),
    /// Names are asked for one after the other, this the last.
    Names(Ino),
    /// Spans were made, reads wait to be looked for, or it is over.
    Look,
}

/// A read, as the kernel asked for it.
#[derive(Clone, Copy, Debug)]
struct Read {
    ino: Ino,
    offset: u64,
    len: u32,
}

/// Reads that wait to be told of together, or until the follower looks: to wake a thread costs more
/// than to answer a read.
#[derive(Debug, Default)]
struct Seen {
    reads: Vec<Read>,
    bytes: u64,
}

/// So many reads are told of together,
const SEEN_READS: usize = 16;
/// or reads of so many bytes.
const SEEN_BYTES: u64 = 128 << 10;

/// So long the follower looks again after a read before it must be woken for the next one. A read
/// that comes after a silence, such as that of a marker, is heard of at once.
const LINGER: Duration = Duration::from_millis(1);

impl Seen {
    /// Takes in a read; all of them when it is time to tell.
    fn add(&mut self, read: Read) -> Option<Vec<Read>> {
        self.reads.push(read);
        self.bytes = self.bytes.saturating_add(read.len.into());
        if self.reads.len() < SEEN_READS && self.bytes < SEEN_BYTES {
            return None;
        }
        self.bytes = 0;
        let next = Vec::with_capacity(SEEN_READS);
        Some(std::mem::replace(&mut self.reads, next))
    }

    fn take(&mut self) -> Vec<Read> {
        self.bytes = 0;
        std::mem::take(&mut self.reads)
    }
}

impl Engine {
    /// # Errors
    /// When the system has no thread left to give.
    pub(super) fn start(reader: Arc<Reader>, options: Prefetch) -> io::Result<Self> {
        let (sender, receiver) = sync_channel(INBOX);
        let pages = Arc::<OnceLock<_>>::default();
        let shared = Arc::new(Shared {
            ahead: options.ahead,
            // Until it has looked for the first time.
            unheard: AtomicU64::new(1),
            skipped: Tally {
                waits_for_disk: true,
                ..Tally::default()
            },
            ..Shared::default()
        });
        let limits = limits(&reader, &options);
        // A replay leaves out what was read meanwhile.
        let follows = options.ahead != Ahead::None || options.replay.is_some();
        let rate = options.bytes_per_second.map(Rate::new);
        let follower = Follower {
            runs: Runs::new(limits),
            most_pushed: limits.pushed,
            pushes: VecDeque::new(),
            passing: (limits.pushed > 0).then(|| Passing::new(&reader)).flatten(),
            will_be_told: Arc::default(),
            pages: Arc::clone(&pages),
            profile: options.replay,
            is_begun: false,
            looked: None,
            replay: Replay::default(),
            sweep: None,
            maker: Maker {
                fetchers: ThreadPool::start("tarfs-fetch", FETCHERS)?,
                decoders: Arc::new(ThreadPool::start("tarfs-ahead", 2)?),
                rate: rate.map(|rate| Arc::new((Mutex::new(rate), Instant::now()))),
                shared: Arc::clone(&shared),
                wake: sender.clone(),
                reader: Arc::clone(&reader),
            },
            shared: Arc::clone(&shared),
            reader: Arc::clone(&reader),
        };
        if reader.catalog.completed().is_none() {
            let (shared, wake) = (Arc::clone(&shared), sender.clone());
            let then = move || shared.tell(&wake, Message::Look);
            reader.catalog.when(Awaited::End, Then::new(then));
        }
        let is_over = Arc::<AtomicBool>::default();
        let ends = Arc::clone(&is_over);
        let thread = Thread::spawn("tarfs-follow", move || follower.run(&receiver, &ends))?;
        Ok(Self {
            reader,
            shared,
            pages,
            inbox: sender,
            is_over,
            follows,
            recorder: options.record.then(Mutex::default),
            walks: Mutex::default(),
            thread: Some(thread),
        })
    }

    pub(super) fn saw_read(&self, ino: Ino, offset: u64, len: u32) {
        if let Some(recorder) = &self.recorder {
            let index = self.reader.catalog.known();
            let size = index.entry(ino).map(|entry| entry.size());
            drop(index);
            let len = size
                .unwrap_or_default()
                .saturating_sub(offset)
                .min(len.into());
            let mut recorder = recorder.lock().unwrap_or_else(PoisonError::into_inner);
            recorder.read(ino, offset, len);
        }
        if !self.follows {
            return;
        }
        let reads = self.shared.seen().add(Read { ino, offset, len });
        if let Some(reads) = reads {
            self.shared.tell(&self.inbox, Message::Reads(reads));
        } else if self.shared.asleep.load(Ordering::SeqCst)
            && self.shared.asleep.swap(false, Ordering::SeqCst)
        {
            self.shared.tell(&self.inbox, Message::Look);
        }
    }

    pub(super) fn saw_lookup(&self, ino: Ino) {
        if !self.follows || self.pages.get().is_none() {
            return;
        }
        let place = |index: &Arc<Index>| index.place(ino);
        let Some((directory, number)) = self.reader.catalog.completed().and_then(place) else {
            return;
        };
        let mut walks = self.walks.lock().unwrap_or_else(PoisonError::into_inner);
        if walks.step(directory, number) {
            self.shared.tell(&self.inbox, Message::Names(ino));
        }
    }

    /// Whether nothing is on its way.
    pub(super) fn is_idle(&self) -> bool {
        // In this order: reads that were seen are unheard before they are taken.
        self.shared.seen().reads.is_empty()
            && self.shared.unheard.load(Ordering::SeqCst) == 0
            && self.shared.outstanding.load(Ordering::SeqCst) == 0
    }

    pub(super) fn push_into(&self, pages: Arc<dyn PageCache>) {
        if self.recorder.is_none() {
            drop(self.pages.set(pages));
            self.shared.tell(&self.inbox, Message::Look);
        }
    }

    /// What was read, if there was a read since there had been `reads` of them, and how many there
    /// are now.
    pub(super) fn recorded(&self, reads: u64) -> Option<(Vec<Touched>, u64)> {
        let recorder = self.recorder.as_ref()?.lock();
        let recorder = recorder.unwrap_or_else(PoisonError::into_inner);
        (recorder.reads() > reads).then(|| (recorder.ranges(), recorder.reads()))
    }

    pub(super) fn progress(&self) -> PrefetchProgress {
        let shared = &self.shared;
        PrefetchProgress {
            ahead: shared.ahead,
            state: shared.state(),
            done_spans: shared.all.done(),
            total_spans: self.reader.catalog.known().span_count().into(),
            replayed_spans: shared.replay.done(),
            replay_spans: shared.replay.total.load(Ordering::SeqCst),
        }
    }
}

impl Shared {
    /// Puts `message` into the inbox, if there is room: else its reader is awake anyway.
    fn tell(&self, inbox: &SyncSender<Message>, message: Message) {
        self.unheard.fetch_add(1, Ordering::SeqCst);
        if inbox.try_send(message).is_err() {
            self.heard();
        }
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn heard(&self) {
        self.unheard.fetch_sub(1, Ordering::SeqCst);
    }

    fn state(&self) -> PrefetchState {
        let is_busy = self.all.outstanding.load(Ordering::SeqCst) > 0;
        if self.ahead != Ahead::All {
            PrefetchState::Off
        } else if is_busy || !self.all_asked.load(Ordering::SeqCst) {
            PrefetchState::Running
        } else if self.all.done() < self.all.asked() {
            PrefetchState::Incomplete
        } else if self.all.asked() < self.all.total.load(Ordering::SeqCst) {
            PrefetchState::Full
        } else {
            PrefetchState::Complete
        }
    }
}

impl Tally {
    fn done(&self) -> u64 {
        self.done.load(Ordering::SeqCst)
    }

    fn asked(&self) -> u64 {
        self.asked.load(Ordering::SeqCst)
    }
}

/// How far to be ahead of readers.
fn limits(reader: &Reader, options: &Prefetch) -> Limits {
    if options.ahead == Ahead::None {
        return Limits { made: 0, pushed: 0 };
    }
    Limits {
        // As for a replay: as much is read until it is needed, and must not take its place.
        made: (reader.memory.budget() / 8 * 3).min(MOST_MADE),
        pushed: MOST_PUSHED.min(reader.memory_bytes / 8),
    }
}

/// The spans that hold what is to be replayed.
fn replay(reader: &Reader, index: &Index, touched: &[Touched]) -> Replay {
    let spans = touched.iter().flat_map(|touched| {
        let entry = index.entry(touched.ino);
        let touch = entry.and_then(|entry| touch(entry, touched.offset, touched.len));
        touch
            .into_iter()
            .flat_map(|touch| covering(index, touch.wanted))
    });
    let spans = spans.filter_map(|number| Some((number, index.span_extent(number)?.len())));
    let mut replay = Replay::new(spans, None);
    if let Some(room) = room(reader, index)
        && replay.bytes() > room
    {
        // Memory lets go of what was used longest ago, and that is what was made and is not read
        // yet, once as much has been read since.
        replay.limit(reader.memory.budget() / 8 * 3);
    }
    replay
}

/// Bytes of memory that may be filled without regard to readers; `None` when what is made is kept
/// on disk.
fn room(reader: &Reader, index: &Index) -> Option<u64> {
    // As the first one, so the others; but what has no hash is kept nowhere.
    let is_kept = index.is_hashed() && index.span(0).is_some_and(|span| reader.keeps(&span));
    (!is_kept).then(|| reader.memory.budget() / 4 * 3)
}

/// Goes through the archive from front to back.
#[derive(Debug)]
struct Sweep {
    next: u32,
    /// Bytes that memory still has room for; `None` when what is made is kept on disk.
    room: Option<u64>,
}

impl Sweep {
    /// Leaves room for as many bytes in memory as are needed for something else.
    fn new(reader: &Reader, index: &Index, needed: u64) -> Self {
        Self {
            next: 0,
            room: room(reader, index).map(|room| room.saturating_sub(needed)),
        }
    }

    /// The next spans to make; none when it is over.
    fn next(&mut self, index: &Index) -> Vec<u32> {
        let mut numbers = Vec::new();
        while numbers.len() < BATCH {
            let Some(extent) = index.span_extent(self.next) else {
                break;
            };
            if let Some(room) = &mut self.room {
                let Some(rest) = room.checked_sub(extent.len()) else {
                    break;
                };
                *room = rest;
            }
            numbers.push(self.next);
            self.next += 1;
        }
        numbers
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.reader.foreground.close();
        self.shared.tell(&self.inbox, Message::Look);
        drop(self.thread.take());
    }
}

/// Follows readers.
struct Follower {
    runs: Runs,
    profile: Option<Profile>,
    /// Whether the index is complete, and what depends on that has begun.
    is_begun: bool,
    /// When it was last looked whether all is in the spool, of which others may take parts away.
    looked: Option<Instant>,
    replay: Replay,
    sweep: Option<Sweep>,
    shared: Arc<Shared>,
    pushes: VecDeque<Pushing>,
    most_pushed: u64,
    /// What the scan passes, while it does and there is room.
    passing: Option<Passing>,
    /// Whether the scan will tell when it has come further.
    will_be_told: Arc<AtomicBool>,
    pages: Arc<OnceLock<Arc<dyn PageCache>>>,
    maker: Maker,
    reader: Arc<Reader>,
}

/// A window that is being pushed.
struct Pushing {
    run: u64,
    push: Push,
    next: u32,
    steps: u32,
    /// Whether the file is past that was left out.
    is_marked: bool,
}

/// What became of a step.
#[derive(PartialEq, Eq)]
enum Step {
    More,
    /// Bytes are on their way that it needs.
    Blocked,
    Over,
}

impl Follower {
    fn run(mut self, inbox: &Receiver<Message>, is_over: &AtomicBool) {
        self.feed();
        self.shared.heard();
        let mut is_blocked = false;
        while !is_over.load(Ordering::SeqCst) {
            let message = if is_blocked {
                self.next(inbox)
            } else {
                inbox.try_recv()
            };
            match message {
                Ok(message) => {
                    match message {
                        Message::Reads(reads) => reads.into_iter().for_each(|read| self.hear(read)),
                        Message::Names(ino) => self.learn(ino),
                        Message::Look => {}
                    }
                    self.hear_seen();
                    self.feed();
                    self.shared.heard();
                    is_blocked = false;
                }
                Err(TryRecvError::Empty) => is_blocked = self.push(),
                Err(TryRecvError::Disconnected) => return,
            }
        }
    }

    /// The next message, when there is nothing to do but wait; none when there is something to do.
    fn next(&mut self, inbox: &Receiver<Message>) -> Result<Message, TryRecvError> {
        match inbox.recv_timeout(LINGER) {
            Ok(message) => return Ok(message),
            Err(RecvTimeoutError::Disconnected) => return Err(TryRecvError::Disconnected),
            Err(RecvTimeoutError::Timeout) => {}
        }
        self.shared.asleep.store(true, Ordering::SeqCst);
        // After that, so that no read is missed.
        if self.hear_seen() {
            self.shared.asleep.store(false, Ordering::SeqCst);
            return Err(TryRecvError::Empty);
        }
        let message = inbox.recv();
        self.shared.asleep.store(false, Ordering::SeqCst);
        message.map_err(|_| TryRecvError::Disconnected)
    }

    /// Hears of the reads that nobody was told of; false when there are none.
    fn hear_seen(&mut self) -> bool {
        // Not idle meanwhile.
        self.shared.unheard.fetch_add(1, Ordering::SeqCst);
        let reads = self.shared.seen().take();
        for &read in &reads {
            self.hear(read);
        }
        if !reads.is_empty() {
            // What was read makes room for what is to be replayed.
            self.feed();
        }
        self.shared.heard();
        !reads.is_empty()
    }

    fn hear(&mut self, Read { ino, offset, len }: Read) {
        // A scan goes by in the order of the archive, and is ahead of readers itself.
        let reader = Arc::clone(&self.reader);
        let Some(index) = reader.catalog.completed() else {
            return;
        };
        let entry = index.entry(ino);
        let Some(touch) = entry.and_then(|entry| touch(entry, offset, len.into())) else {
            return;
        };
        for span in covering(index, touch.wanted) {
            self.replay.read(span);
        }
        let can_push = self.pages.get().is_some();
        self.runs
            .push_at_most(if can_push { self.most_pushed } else { 0 });
        let Some(wanted) = self.runs.read(&touch) else {
            return;
        };
        // Where reads need no spans the kernel's own read-ahead does.
        if let Some(make) = wanted.make
            && !reader.reads_here()
        {
            let make = Make {
                // A read fetches the end of a file by itself if that is less than a span.
                with_last: make.with_last && reader.layout().is_none(),
                ..make
            };
            let numbers: Vec<_> = spans(index, make).collect();
            for batch in numbers.chunks(BATCH) {
                self.maker.submit(batch.to_vec(), touch.wanted.end(), None);
            }
        }
        if let Some(push) = wanted.push {
            if self.pushes.len() == MOST_WINDOWS {
                self.pushes.pop_front();
            }
            self.pushes.push_back(Pushing {
                run: wanted.run,
                push,
                next: ino.0.saturating_add(1),
                steps: 0,
                is_marked: false,
            });
        }
    }

    fn learn(&self, ino: Ino) {
        if let (Some(pages), Some(index)) = (self.pages.get(), self.reader.catalog.completed()) {
            pages.learn(index, ino);
        }
    }

    /// Asks for what is to be made without regard to readers: little at once, so that what readers
    /// will want next waits for little.
    fn feed(&mut self) {
        if !self.feed_wanted() {
            self.feed_skipped();
        }
    }

    /// As [`feed`](Self::feed) for what the user wants; false when there is none, and the index is complete.
    fn feed_wanted(&mut self) -> bool {
        let reader = Arc::clone(&self.reader);
        let Some(index) = reader.catalog.completed() else {
            if reader.catalog.is_over() {
                self.give_up();
            }
            return true;
        };
        if !self.is_begun {
            self.is_begun = true;
            self.begin(index);
        }
        if self
            .looked
            .is_none_or(|looked| looked.elapsed() > LOOK_EVERY)
        {
            self.looked = Some(Instant::now());
            let spool = reader.spool.as_ref();
            let is_here = spool.is_some_and(|spool| spool.holds(index.origin().plain_bytes));
            self.runs.all_is_here(is_here);
        }
        while self.shared.replay.outstanding.load(Ordering::SeqCst) < REPLAYS {
            let numbers = self.replay.next(BATCH);
            if numbers.is_empty() {
                break;
            }
            self.maker
                .submit(numbers, Plain(0), Some(&self.shared.replay));
        }
        if self.shared.replay.outstanding.load(Ordering::SeqCst) > 0
            || self.shared.all.outstanding.load(Ordering::SeqCst) > 0
        {
            return true;
        }
        if let Some(sweep) = &mut self.sweep {
            let numbers = sweep.next(index);
            if numbers.is_empty() {
                self.shared.all_asked.store(true, Ordering::SeqCst);
                self.sweep = None;
            } else {
                self.maker.submit(numbers, Plain(0), Some(&self.shared.all));
            }
        }
        self.sweep.is_some()
    }

    /// Asks for spans that were made before, but not kept, because the disk was too slow. Those of a remote
    /// archive would have to be fetched again: they wait for a read.
    fn feed_skipped(&self) {
        let reader = &self.reader;
        let (Some(spool), Some(index)) = (&reader.spool, reader.catalog.completed()) else {
            return;
        };
        let is_busy = self.shared.skipped.outstanding.load(Ordering::SeqCst) > 0;
        if is_busy || self.shared.ahead == Ahead::None || reader.source.is_remote() {
            return;
        }
        let skipped = spool.take_skipped(SKIPPED_BATCH);
        let numbers = skipped
            .iter()
            .filter_map(|extent| index.span_at(extent.start()));
        let numbers: BTreeSet<u32> = numbers.collect();
        if !numbers.is_empty() {
            let numbers = numbers.into_iter().collect();
            self.maker
                .submit(numbers, Plain(0), Some(&self.shared.skipped));
        }
    }

    /// Finds out what there is to be made without regard to readers.
    fn begin(&mut self, index: &Index) {
        let touched = self.profile.take().map(|profile| profile(index));
        self.replay = replay(&self.reader, index, &touched.unwrap_or_default());
        let spans = u64::try_from(self.replay.len()).unwrap_or(u64::MAX);
        self.shared.replay.total.store(spans, Ordering::SeqCst);
        let spans = index.span_count().into();
        self.shared.all.total.store(spans, Ordering::SeqCst);
        self.sweep = (self.shared.ahead == Ahead::All)
            .then(|| Sweep::new(&self.reader, index, self.replay.bytes()));
    }

    /// The scan failed: there will never be an index of everything.
    fn give_up(&self) {
        self.shared.all.asked.store(1, Ordering::SeqCst);
        self.shared.all_asked.store(true, Ordering::SeqCst);
    }

    /// Goes on with the first window, or what the scan passes; true when there is nothing to do but
    /// wait.
    fn push(&mut self) -> bool {
        let Some(pages) = self.pages.get() else {
            return true;
        };
        let Some(pushing) = self.pushes.front_mut() else {
            return self.push_passing();
        };
        let Some(index) = self.reader.catalog.completed() else {
            return true;
        };
        let Some(reached) = self.runs.reached(pushing.run) else {
            self.pushes.pop_front();
            return false;
        };
        for _ in 0..STEPS {
            match pushing.step(index, &**pages, reached, &self.maker) {
                Step::More => {}
                Step::Blocked => return true,
                Step::Over => {
                    self.pushes.pop_front();
                    return false;
                }
            }
        }
        false
    }

    /// Goes on with what the scan passes; true when there is nothing to do but wait.
    fn push_passing(&mut self) -> bool {
        let (Some(passing), Some(pages)) = (&mut self.passing, self.pages.get()) else {
            return true;
        };
        match passing.step(&self.reader, &**pages) {
            Passed::More => return false,
            Passed::All => self.passing = None,
            Passed::Until(offset) => {
                if !self.will_be_told.swap(true, Ordering::SeqCst) {
                    let told = Arc::clone(&self.will_be_told);
                    let (shared, wake) = (Arc::clone(&self.shared), self.maker.wake.clone());
                    let then = move || {
                        told.store(false, Ordering::SeqCst);
                        shared.tell(&wake, Message::Look);
                    };
                    let awaited = Awaited::Plain(offset);
                    self.reader.catalog.when(awaited, Then::new(then));
                }
            }
        }
        true
    }
}

impl Pushing {
    fn step(
        &mut self,
        index: &Index,
        pages: &dyn PageCache,
        reached: Plain,
        maker: &Maker,
    ) -> Step {
        let (reader, ino) = (&maker.reader, Ino(self.next));
        if ino > index.last_ino() || self.steps == MOST_STEPS {
            return Step::Over;
        }
        let entry = index.entry(ino);
        let file = entry.and_then(|entry| Some((entry, touch(entry, 0, entry.size())?.file)));
        let Some((entry, file)) = file.filter(|(_, file)| file.start() >= self.push.extent.start())
        else {
            self.pass();
            return Step::More;
        };
        if file.start() >= self.push.extent.end() {
            return Step::Over;
        }
        let is_apt = entry.size() <= LONGEST_PUSHED && file.start() >= reached;
        if is_apt {
            pages.learn(index, ino);
        }
        if !is_apt || !pages.wants(ino) {
            self.pass();
            return Step::More;
        }
        if !self.is_marked && file.start() >= self.push.marker {
            self.is_marked = true;
            self.pass();
            return Step::More;
        }
        let len = u32::try_from(entry.size()).unwrap_or(u32::MAX);
        let bytes = reader.peek(ino, 0, len);
        if bytes.is_none() && maker.is_busy() {
            return Step::Blocked;
        }
        self.pass();
        if let Some(bytes) = bytes
            && pages.store(ino, 0, &bytes).is_ok()
        {
            reader.stats.pushed_files.increment();
            reader.stats.pushed_bytes.add(bytes.len() as u64);
        }
        Step::More
    }

    fn pass(&mut self) {
        self.next = self.next.saturating_add(1);
        self.steps += 1;
    }
}

/// Has spans made by other threads.
struct Maker {
    // Before the decoders, for whom they have work.
    fetchers: ThreadPool,
    decoders: Arc<ThreadPool>,
    /// And since when its times count.
    rate: Option<Arc<(Mutex<Rate>, Instant)>>,
    shared: Arc<Shared>,
    wake: SyncSender<Message>,
    reader: Arc<Reader>,
}

impl Maker {
    /// Whether spans are on their way.
    fn is_busy(&self) -> bool {
        self.shared.outstanding.load(Ordering::SeqCst) > 0
    }

    /// Has `numbers` made, when no read makes a span and the rate allows it. Of spans that are here in
    /// part nothing is fetched before `from`.
    fn submit(&self, numbers: Vec<u32>, from: Plain, purpose: Option<&Tally>) {
        let tally = purpose.map(|tally| {
            tally
                .asked
                .fetch_add(numbers.len() as u64, Ordering::SeqCst);
            Arc::clone(&tally.done)
        });
        let on_its_way = Arc::new(OnItsWay::new(self, purpose));
        let (reader, decoders) = (Arc::clone(&self.reader), Arc::clone(&self.decoders));
        let rate = self.rate.clone();
        let waits_for_disk = purpose.is_some_and(|tally| tally.waits_for_disk);
        self.fetchers.submit(move || {
            let rate = rate.as_deref();
            let mut numbers = numbers.as_slice();
            // By a rate in small parts, or it would be exceeded for long.
            let part = if rate.is_some() { 1 } else { numbers.len() };
            while let Some((now, rest)) = numbers.split_at_checked(part.min(numbers.len())) {
                // No claim is held meanwhile: no read shall wait for who waits.
                if now.is_empty()
                    || !pause(&reader, rate)
                    || waits_for_disk && !await_disk(&reader)
                    || !reader.foreground.await_idle()
                {
                    return;
                }
                numbers = rest;
                for batch in reader.batches(now.iter().copied(), from, tally.as_deref()) {
                    if let Some((rate, since)) = rate {
                        let mut rate = rate.lock().unwrap_or_else(PoisonError::into_inner);
                        rate.spend(since.elapsed(), batch.packed_bytes());
                    }
                    let Ok(reserved) = reader.reserve_batch(&batch, 2) else {
                        return;
                    };
                    match reader.fetch_batch(&batch) {
                        Ok(packed) => {
                            reader
                                .stats
                                .prefetched_packed_bytes
                                .add(packed.len() as u64);
                            let on_its_way = Arc::clone(&on_its_way);
                            let done = move || drop(on_its_way);
                            let made = tally.as_ref();
                            batch.decode(&reader, &packed, reserved, &decoders, made, done);
                        }
                        Err(error) => tracing::debug!(%error, "not fetched ahead"),
                    }
                }
            }
        });
    }
}

/// Waits until something may be fetched; false when it is over.
fn pause(reader: &Reader, rate: Option<&(Mutex<Rate>, Instant)>) -> bool {
    let Some((rate, since)) = rate else {
        return true;
    };
    loop {
        let wait = rate
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .wait(since.elapsed());
        if wait == Duration::ZERO {
            return true;
        }
        if !reader.foreground.pause(wait) {
            return false;
        }
    }
}

/// Waits until the disk cache can take more; false when the archive is closed.
fn await_disk(reader: &Reader) -> bool {
    let is_busy = || reader.spool.as_ref().is_some_and(|spool| spool.is_busy());
    while is_busy() {
        if !reader.foreground.pause(DISK_PAUSE) {
            return false;
        }
    }
    true
}

/// Tells the follower when dropped.
struct OnItsWay {
    shared: Arc<Shared>,
    /// Counts those of the same purpose.
    purpose: Option<Arc<AtomicU32>>,
    wake: SyncSender<Message>,
}

impl OnItsWay {
    fn new(maker: &Maker, purpose: Option<&Tally>) -> Self {
        let purpose = purpose.map(|tally| Arc::clone(&tally.outstanding));
        maker.shared.outstanding.fetch_add(1, Ordering::SeqCst);
        if let Some(purpose) = &purpose {
            purpose.fetch_add(1, Ordering::SeqCst);
        }
        Self {
            shared: Arc::clone(&maker.shared),
            purpose,
            wake: maker.wake.clone(),
        }
    }
}

impl Drop for OnItsWay {
    fn drop(&mut self) {
        // Counted before it is done, so that it is never idle in between.
        self.shared.unheard.fetch_add(1, Ordering::SeqCst);
        if let Some(purpose) = &self.purpose {
            purpose.fetch_sub(1, Ordering::SeqCst);
        }
        self.shared.outstanding.fetch_sub(1, Ordering::SeqCst);
        self.shared.tell(&self.wake, Message::Look);
        self.shared.heard();
    }
}

/// The spans that hold `extent`.
fn covering(index: &Index, extent: Extent<Plain>) -> Range<u32> {
    let last = extent.end().0.checked_sub(1).map(Plain);
    let first = index.span_at(extent.start());
    let last = last.and_then(|last| index.span_at(last));
    match (first, last) {
        (Some(first), Some(last)) => first..last.saturating_add(1),
        _ => 0..0,
    }
}

/// The spans that `make` means.
fn spans(index: &Index, make: Make) -> impl Iterator<Item = u32> {
    let (start, end) = (make.extent.start(), make.extent.end());
    let first = index.span_at(start).unwrap_or(u32::MAX);
    (first..index.span_count()).map_while(move |number| {
        let span = index.span_extent(number)?;
        let holds_end = make.with_last && span.start() < end;
        (span.end() <= end || holds_end).then_some(number)
    })
}

/// A read of `len` bytes at `offset` of `entry`, in plain bytes; `None` when it needs none.
pub(super) fn touch(entry: Entry<'_>, offset: u64, len: u64) -> Option<Touch> {
    if !matches!(entry.kind(), Kind::File) {
        return None;
    }
    let first = entry.pieces(0, entry.size()).next()?;
    let file = Extent::with_len(first.plain.start(), entry.stored_bytes());
    let piece = entry.pieces(offset, len).next()?;
    let inside = offset.saturating_sub(piece.offset);
    let start = Plain(piece.plain.start().0.checked_add(inside)?);
    let end = Plain(start.0.saturating_add(len)).min(file.end());
    let wanted = Extent::new(start, end)?;
    Some(Touch { wanted, file })
}
