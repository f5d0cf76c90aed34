//! The threads that are ahead of readers.
//!
//! One thread hears of every read, finds out [where readers go](super::sequential), and pushes small
//! files into the kernel's page cache; it is the only one that does so, and it answers no read: to
//! push a page waits for whoever reads that page at the moment. Others fetch and decode
//! [spans](super::batch), when no read does.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::access_log::{AccessLog, AccessedRange};
use super::live_index::{Callback, WaitFor};
use super::lookup_runs::LookupRuns;
use super::rate_limit::RateLimit;
use super::read::Reader;
use super::replay::Replay;
use super::scan_push::{PushProgress, ScanPusher};
use super::sequential::{FileRead, FillRange, Limits, PushRange, ReadStreams};
use crate::base::extent::{Extent, Plain};
use crate::base::thread::Thread;
use crate::base::thread_pool::ThreadPool;
use crate::index::{Entry, Index, Ino, Kind};

/// Messages that may wait to be heard of; reads that find no room are forgotten, which only makes it
/// see less.
const MAX_QUEUED_MESSAGES: usize = 1024;

/// Plain bytes made ahead of a reader, at the most, however much memory there is.
const MAX_FILL_BYTES: u64 = 32 << 20;

/// Plain bytes pushed ahead of a reader, at the most: enough to be ahead of one who only reads. More
/// takes longer to push than the reader needs to overtake it: of 10,500 files in a plain tar some
/// 7,900 were pushed in time with 1 to 4 MiB, 3,700 with 16.
const MAX_PUSH_BYTES: u64 = 2 << 20;

/// Longer files are not pushed: their own read-ahead by the kernel does as well.
const MAX_PUSHED_FILE_BYTES: u64 = 512 << 10;

/// Windows that wait to be pushed; older ones give way, as their readers are past them.
const MAX_PUSH_WINDOWS: usize = 16;

/// Entries looked at for one window.
const MAX_WINDOW_ENTRIES: u32 = 1 << 16;

/// Entries looked at before reads are heard again.
const ENTRIES_PER_TURN: u32 = 256;

/// Spans of a request that is made ahead.
const BATCH_SPANS: usize = 8;

/// Requests of a replay at once: as many as a distant server needs to be busy.
const MAX_REPLAY_REQUESTS: u32 = 4;

/// How often to look whether a disk cache still holds everything.
const DISK_CACHE_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Spans of a request that is made because the disk was too slow for them before: few, so that all find room
/// in the queue of the disk cache.
const SKIPPED_BATCH_SPANS: usize = 4;

/// How often to look whether the disk is still busy.
const DISK_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Threads that fetch.
const FETCH_THREADS: usize = 4;

/// What is prepared without being asked for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum PrefetchMode {
    /// Nothing.
    Off,
    /// What readers who go through a file or a tree will want next.
    #[default]
    ReadAhead,
    /// That, and everything else from front to back, as far as it can be kept.
    All,
}

/// What to prepare, and how.
#[derive(Default)]
pub struct PrefetchOptions {
    /// What.
    pub mode: PrefetchMode,
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
pub type Profile = Box<dyn FnOnce(&Index) -> Vec<AccessedRange> + Send>;

impl fmt::Debug for PrefetchOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefetchOptions")
            .field("mode", &self.mode)
            .field("bytes_per_second", &self.bytes_per_second)
            .field("record", &self.record)
            .finish_non_exhaustive()
    }
}

/// How far it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrefetchProgress {
    /// What is prepared.
    pub mode: PrefetchMode,
    /// How far [`PrefetchMode::All`] is.
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
    fn can_store(&self, ino: Ino) -> bool;

    /// Whether someone may find the file there.
    fn is_visible(&self, index: &Index, ino: Ino) -> bool;

    /// Sees to it that these regular files can be kept, if that is possible, and says how many could
    /// not before. Whoever calls holds no [`IndexGuard`](super::IndexGuard) of an index that grows.
    fn prime_inodes(&self, files: &[Ino]) -> usize;

    /// Sees to it that whoever opens `ino` and what follows it in its directory by name need not ask
    /// for each, if that takes long enough for them to be worth it.
    fn prime_dentries(&self, index: &Index, ino: Ino);

    /// Keeps `bytes` from `offset` on, whole pages but for the end of the file. May wait for
    /// whoever reads it at this moment.
    ///
    /// # Errors
    /// When they cannot be kept.
    fn store(&self, ino: Ino, offset: u64, bytes: &[u8]) -> io::Result<()>;
}

/// Prepares what will be read, until dropped.
#[derive(Debug)]
pub(super) struct Prefetcher {
    reader: Arc<Reader>,
    shared: Arc<Shared>,
    pages: Arc<OnceLock<Arc<dyn PageCache>>>,
    inbox: SyncSender<Message>,
    is_over: Arc<AtomicBool>,
    /// Whether reads lead to anything.
    is_tracking: bool,
    access_log: Option<Mutex<AccessLog>>,
    lookup_runs: Mutex<LookupRuns>,
    thread: Option<Thread<()>>,
}

/// What others may know of the work.
#[derive(Debug, Default)]
struct Shared {
    mode: PrefetchMode,
    /// Messages that were not heard of yet.
    pending_messages: AtomicU64,
    /// Reads that nobody was told of yet.
    pending_reads: Mutex<PendingReads>,
    /// Whether the follower must be woken to look for them.
    is_asleep: AtomicBool,
    /// Jobs that are not done yet, whatever for.
    outstanding: AtomicU32,
    full: SpanCounts,
    /// Whether [`PrefetchMode::All`] has nothing more to ask for.
    is_full_queued: AtomicBool,
    replay: SpanCounts,
    /// Spans of a local archive that the disk cache did not take at first.
    skipped: SpanCounts,
}

/// Spans of one purpose.
#[derive(Debug, Default)]
struct SpanCounts {
    /// Whether nothing is made while the disk cache is busy.
    should_wait_for_disk: bool,
    total: AtomicU64,
    queued: AtomicU64,
    done: Arc<AtomicU64>,
    outstanding: Arc<AtomicU32>,
}

#[derive(Debug)]
enum Message {
    Reads(Vec<ReadEvent>),
    /// Names are asked for one after the other, this the last.
    Names(Ino),
    /// Spans were made, reads wait to be looked for, or it is over.
    Wake,
}

/// A read, as the kernel asked for it.
#[derive(Clone, Copy, Debug)]
struct ReadEvent {
    ino: Ino,
    offset: u64,
    len: u32,
}

/// Reads that wait to be told of together, or until the follower looks: to wake a thread costs more
/// than to answer a read.
#[derive(Debug, Default)]
struct PendingReads {
    reads: Vec<ReadEvent>,
    bytes: u64,
}

/// So many reads are told of together,
const MAX_PENDING_READS: usize = 16;
/// or reads of so many bytes.
const MAX_PENDING_READ_BYTES: u64 = 128 << 10;

/// So long the follower looks again after a read before it must be woken for the next one. A read
/// that comes after a silence, such as that of a marker, is heard of at once.
const IDLE_POLL_TIMEOUT: Duration = Duration::from_millis(1);

impl PendingReads {
    /// Takes in a read; all of them when it is time to tell.
    fn add(&mut self, read: ReadEvent) -> Option<Vec<ReadEvent>> {
        self.reads.push(read);
        self.bytes = self.bytes.saturating_add(read.len.into());
        if self.reads.len() < MAX_PENDING_READS && self.bytes < MAX_PENDING_READ_BYTES {
            return None;
        }
        self.bytes = 0;
        let next = Vec::with_capacity(MAX_PENDING_READS);
        Some(std::mem::replace(&mut self.reads, next))
    }

    fn take(&mut self) -> Vec<ReadEvent> {
        self.bytes = 0;
        std::mem::take(&mut self.reads)
    }
}

impl Prefetcher {
    /// # Errors
    /// When the system has no thread left to give.
    pub(super) fn start(reader: Arc<Reader>, options: PrefetchOptions) -> io::Result<Self> {
        let (sender, receiver) = sync_channel(MAX_QUEUED_MESSAGES);
        let pages = Arc::<OnceLock<_>>::default();
        let shared = Arc::new(Shared {
            mode: options.mode,
            // Until it has looked for the first time.
            pending_messages: AtomicU64::new(1),
            skipped: SpanCounts {
                should_wait_for_disk: true,
                ..SpanCounts::default()
            },
            ..Shared::default()
        });
        let limits = limits(&reader, &options);
        // A replay leaves out what was read meanwhile.
        let is_tracking = options.mode != PrefetchMode::Off || options.replay.is_some();
        let rate = options.bytes_per_second.map(RateLimit::new);
        let tracker = AccessTracker {
            streams: ReadStreams::new(limits),
            max_push_bytes: limits.push_bytes,
            push_jobs: VecDeque::new(),
            scan_pusher: (limits.push_bytes > 0)
                .then(|| ScanPusher::new(&reader))
                .flatten(),
            is_wakeup_pending: Arc::default(),
            pages: Arc::clone(&pages),
            profile: options.replay,
            has_begun: false,
            last_disk_check: None,
            replay: Replay::default(),
            full_prefetch: None,
            fill_workers: FillWorkers {
                fetchers: ThreadPool::start("tarfs-fetch", FETCH_THREADS)?,
                decoders: Arc::new(ThreadPool::start("tarfs-ahead", 2)?),
                rate: rate.map(|rate| Arc::new((Mutex::new(rate), Instant::now()))),
                shared: Arc::clone(&shared),
                wake: sender.clone(),
                reader: Arc::clone(&reader),
            },
            shared: Arc::clone(&shared),
            reader: Arc::clone(&reader),
        };
        if reader.live_index.completed().is_none() {
            let (shared, wake) = (Arc::clone(&shared), sender.clone());
            let callback = move || shared.send(&wake, Message::Wake);
            reader
                .live_index
                .on_available(WaitFor::End, Callback::new(callback));
        }
        let is_over = Arc::<AtomicBool>::default();
        let ends = Arc::clone(&is_over);
        let thread = Thread::spawn("tarfs-follow", move || tracker.run(&receiver, &ends))?;
        Ok(Self {
            reader,
            shared,
            pages,
            inbox: sender,
            is_over,
            is_tracking,
            access_log: options.record.then(Mutex::default),
            lookup_runs: Mutex::default(),
            thread: Some(thread),
        })
    }

    pub(super) fn note_read(&self, ino: Ino, offset: u64, len: u32) {
        if let Some(access_log) = &self.access_log {
            let index = self.reader.live_index.read();
            let size = index.entry(ino).map(|entry| entry.size());
            drop(index);
            let len = size
                .unwrap_or_default()
                .saturating_sub(offset)
                .min(len.into());
            let mut access_log = access_log.lock().unwrap_or_else(PoisonError::into_inner);
            access_log.add(ino, offset, len);
        }
        if !self.is_tracking {
            return;
        }
        let reads = self
            .shared
            .pending_reads()
            .add(ReadEvent { ino, offset, len });
        if let Some(reads) = reads {
            self.shared.send(&self.inbox, Message::Reads(reads));
        } else if self.shared.is_asleep.load(Ordering::SeqCst)
            && self.shared.is_asleep.swap(false, Ordering::SeqCst)
        {
            self.shared.send(&self.inbox, Message::Wake);
        }
    }

    pub(super) fn note_lookup(&self, ino: Ino) {
        if !self.is_tracking || self.pages.get().is_none() {
            return;
        }
        let place = |index: &Arc<Index>| index.listing_position(ino);
        let Some((directory, number)) = self.reader.live_index.completed().and_then(place) else {
            return;
        };
        let mut lookup_runs = self
            .lookup_runs
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if lookup_runs.step(directory, number) {
            self.shared.send(&self.inbox, Message::Names(ino));
        }
    }

    /// Whether nothing is on its way.
    pub(super) fn is_idle(&self) -> bool {
        // In this order: reads that were seen are unheard before they are taken.
        self.shared.pending_reads().reads.is_empty()
            && self.shared.pending_messages.load(Ordering::SeqCst) == 0
            && self.shared.outstanding.load(Ordering::SeqCst) == 0
    }

    pub(super) fn set_page_cache(&self, pages: Arc<dyn PageCache>) {
        if self.access_log.is_none() {
            drop(self.pages.set(pages));
            self.shared.send(&self.inbox, Message::Wake);
        }
    }

    /// What was read, if there was a read since there had been `reads` of them, and how many there
    /// are now.
    pub(super) fn accesses_since(&self, reads: u64) -> Option<(Vec<AccessedRange>, u64)> {
        let access_log = self.access_log.as_ref()?.lock();
        let access_log = access_log.unwrap_or_else(PoisonError::into_inner);
        (access_log.read_count() > reads).then(|| (access_log.ranges(), access_log.read_count()))
    }

    pub(super) fn progress(&self) -> PrefetchProgress {
        let shared = &self.shared;
        PrefetchProgress {
            mode: shared.mode,
            state: shared.state(),
            done_spans: shared.full.done(),
            total_spans: self.reader.live_index.read().span_count().into(),
            replayed_spans: shared.replay.done(),
            replay_spans: shared.replay.total.load(Ordering::SeqCst),
        }
    }
}

impl Shared {
    /// Puts `message` into the inbox, if there is room: else its reader is awake anyway.
    fn send(&self, inbox: &SyncSender<Message>, message: Message) {
        self.pending_messages.fetch_add(1, Ordering::SeqCst);
        if inbox.try_send(message).is_err() {
            self.message_done();
        }
    }

    fn pending_reads(&self) -> std::sync::MutexGuard<'_, PendingReads> {
        self.pending_reads
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn message_done(&self) {
        self.pending_messages.fetch_sub(1, Ordering::SeqCst);
    }

    fn state(&self) -> PrefetchState {
        let is_busy = self.full.outstanding.load(Ordering::SeqCst) > 0;
        if self.mode != PrefetchMode::All {
            PrefetchState::Off
        } else if is_busy || !self.is_full_queued.load(Ordering::SeqCst) {
            PrefetchState::Running
        } else if self.full.done() < self.full.queued() {
            PrefetchState::Incomplete
        } else if self.full.queued() < self.full.total.load(Ordering::SeqCst) {
            PrefetchState::Full
        } else {
            PrefetchState::Complete
        }
    }
}

impl SpanCounts {
    fn done(&self) -> u64 {
        self.done.load(Ordering::SeqCst)
    }

    fn queued(&self) -> u64 {
        self.queued.load(Ordering::SeqCst)
    }
}

/// How far to be ahead of readers.
fn limits(reader: &Reader, options: &PrefetchOptions) -> Limits {
    if options.mode == PrefetchMode::Off {
        return Limits {
            fill_bytes: 0,
            push_bytes: 0,
        };
    }
    Limits {
        // As for a replay: as much is read until it is needed, and must not take its place.
        fill_bytes: (reader.span_cache.budget() / 8 * 3).min(MAX_FILL_BYTES),
        push_bytes: MAX_PUSH_BYTES.min(reader.memory_bytes / 8),
    }
}

/// The spans that hold what is to be replayed.
fn build_replay(reader: &Reader, index: &Index, accessed: &[AccessedRange]) -> Replay {
    let spans = accessed.iter().flat_map(|accessed| {
        let entry = index.entry(accessed.ino);
        let file_read = entry.and_then(|entry| file_read(entry, accessed.offset, accessed.len));
        file_read
            .into_iter()
            .flat_map(|file_read| spans_covering(index, file_read.wanted))
    });
    let spans = spans.filter_map(|number| Some((number, index.span_extent(number)?.len())));
    let mut replay = Replay::new(spans, None);
    if let Some(free_bytes) = free_cache_bytes(reader, index)
        && replay.bytes() > free_bytes
    {
        // Memory lets go of what was used longest ago, and that is what was made and is not read
        // yet, once as much has been read since.
        replay.set_max_ahead_bytes(reader.span_cache.budget() / 8 * 3);
    }
    replay
}

/// Bytes of memory that may be filled without regard to readers; `None` when what is made is kept
/// on disk.
fn free_cache_bytes(reader: &Reader, index: &Index) -> Option<u64> {
    // As the first one, so the others; but what has no hash is kept nowhere.
    let is_kept = index.is_hashed()
        && index
            .span(0)
            .is_some_and(|span| reader.should_cache_on_disk(&span));
    (!is_kept).then(|| reader.span_cache.budget() / 4 * 3)
}

/// Goes through the archive from front to back.
#[derive(Debug)]
struct FullPrefetch {
    next: u32,
    /// Bytes that memory still has room for; `None` when what is made is kept on disk.
    free_bytes: Option<u64>,
}

impl FullPrefetch {
    /// Leaves room for as many bytes in memory as are needed for something else.
    fn new(reader: &Reader, index: &Index, needed: u64) -> Self {
        Self {
            next: 0,
            free_bytes: free_cache_bytes(reader, index)
                .map(|free_bytes| free_bytes.saturating_sub(needed)),
        }
    }

    /// The next spans to make; none when it is over.
    fn next(&mut self, index: &Index) -> Vec<u32> {
        let mut numbers = Vec::new();
        while numbers.len() < BATCH_SPANS {
            let Some(extent) = index.span_extent(self.next) else {
                break;
            };
            if let Some(free_bytes) = &mut self.free_bytes {
                let Some(rest) = free_bytes.checked_sub(extent.len()) else {
                    break;
                };
                *free_bytes = rest;
            }
            numbers.push(self.next);
            self.next += 1;
        }
        numbers
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.reader.read_priority.close();
        self.shared.send(&self.inbox, Message::Wake);
        drop(self.thread.take());
    }
}

/// Follows readers.
struct AccessTracker {
    streams: ReadStreams,
    profile: Option<Profile>,
    /// Whether the index is complete, and what depends on that has begun.
    has_begun: bool,
    /// When it was last looked whether all is in the disk cache, of which others may take parts away.
    last_disk_check: Option<Instant>,
    replay: Replay,
    full_prefetch: Option<FullPrefetch>,
    shared: Arc<Shared>,
    push_jobs: VecDeque<PushJob>,
    max_push_bytes: u64,
    /// What the scan passes, while it does and there is room.
    scan_pusher: Option<ScanPusher>,
    /// Whether the scan will tell when it has come further.
    is_wakeup_pending: Arc<AtomicBool>,
    pages: Arc<OnceLock<Arc<dyn PageCache>>>,
    fill_workers: FillWorkers,
    reader: Arc<Reader>,
}

/// A window that is being pushed.
struct PushJob {
    stream: u64,
    push: PushRange,
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
    Done,
}

impl AccessTracker {
    fn run(mut self, inbox: &Receiver<Message>, is_over: &AtomicBool) {
        self.refill_queue();
        self.shared.message_done();
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
                        Message::Reads(reads) => {
                            reads.into_iter().for_each(|read| self.on_read(read))
                        }
                        Message::Names(ino) => self.prime_dentries(ino),
                        Message::Wake => {}
                    }
                    self.process_pending_reads();
                    self.refill_queue();
                    self.shared.message_done();
                    is_blocked = false;
                }
                Err(TryRecvError::Empty) => is_blocked = self.push(),
                Err(TryRecvError::Disconnected) => return,
            }
        }
    }

    /// The next message, when there is nothing to do but wait; none when there is something to do.
    fn next(&mut self, inbox: &Receiver<Message>) -> Result<Message, TryRecvError> {
        match inbox.recv_timeout(IDLE_POLL_TIMEOUT) {
            Ok(message) => return Ok(message),
            Err(RecvTimeoutError::Disconnected) => return Err(TryRecvError::Disconnected),
            Err(RecvTimeoutError::Timeout) => {}
        }
        self.shared.is_asleep.store(true, Ordering::SeqCst);
        // After that, so that no read is missed.
        if self.process_pending_reads() {
            self.shared.is_asleep.store(false, Ordering::SeqCst);
            return Err(TryRecvError::Empty);
        }
        let message = inbox.recv();
        self.shared.is_asleep.store(false, Ordering::SeqCst);
        message.map_err(|_| TryRecvError::Disconnected)
    }

    /// Hears of the reads that nobody was told of; false when there are none.
    fn process_pending_reads(&mut self) -> bool {
        // Not idle meanwhile.
        self.shared.pending_messages.fetch_add(1, Ordering::SeqCst);
        let reads = self.shared.pending_reads().take();
        for &read in &reads {
            self.on_read(read);
        }
        if !reads.is_empty() {
            // What was read makes room for what is to be replayed.
            self.refill_queue();
        }
        self.shared.message_done();
        !reads.is_empty()
    }

    fn on_read(&mut self, ReadEvent { ino, offset, len }: ReadEvent) {
        // A scan goes by in the order of the archive, and is ahead of readers itself.
        let reader = Arc::clone(&self.reader);
        let Some(index) = reader.live_index.completed() else {
            return;
        };
        let entry = index.entry(ino);
        let Some(file_read) = entry.and_then(|entry| file_read(entry, offset, len.into())) else {
            return;
        };
        for span in spans_covering(index, file_read.wanted) {
            self.replay.mark_read(span);
        }
        let can_push = self.pages.get().is_some();
        self.streams
            .set_max_push_bytes(if can_push { self.max_push_bytes } else { 0 });
        let Some(wanted) = self.streams.record_read(&file_read) else {
            return;
        };
        // Where reads need no spans the kernel's own read-ahead does.
        if let Some(range) = wanted.fill
            && !reader.reads_here()
        {
            let range = FillRange {
                // A read fetches the end of a file by itself if that is less than a span.
                includes_last: range.includes_last && reader.layout().is_none(),
                ..range
            };
            let numbers: Vec<_> = spans_in(index, range).collect();
            for batch in numbers.chunks(BATCH_SPANS) {
                self.fill_workers
                    .submit(batch.to_vec(), file_read.wanted.end(), None);
            }
        }
        if let Some(push) = wanted.push {
            if self.push_jobs.len() == MAX_PUSH_WINDOWS {
                self.push_jobs.pop_front();
            }
            self.push_jobs.push_back(PushJob {
                stream: wanted.stream,
                push,
                next: ino.0.saturating_add(1),
                steps: 0,
                is_marked: false,
            });
        }
    }

    fn prime_dentries(&self, ino: Ino) {
        if let (Some(pages), Some(index)) = (self.pages.get(), self.reader.live_index.completed()) {
            pages.prime_dentries(index, ino);
        }
    }

    /// Asks for what is to be made without regard to readers: little at once, so that what readers
    /// will want next waits for little.
    fn refill_queue(&mut self) {
        if !self.queue_requested() {
            self.queue_skipped();
        }
    }

    /// As [`refill_queue`](Self::refill_queue) for what the user wants; false when there is none, and the index is complete.
    fn queue_requested(&mut self) -> bool {
        let reader = Arc::clone(&self.reader);
        let Some(index) = reader.live_index.completed() else {
            if reader.live_index.is_scan_over() {
                self.stop_full_prefetch();
            }
            return true;
        };
        if !self.has_begun {
            self.has_begun = true;
            self.begin(index);
        }
        if self
            .last_disk_check
            .is_none_or(|last| last.elapsed() > DISK_CACHE_CHECK_INTERVAL)
        {
            self.last_disk_check = Some(Instant::now());
            let disk_cache = reader.disk_cache.as_ref();
            let is_here = disk_cache
                .is_some_and(|disk_cache| disk_cache.has_at_least(index.origin().plain_bytes));
            self.streams.set_all_on_disk(is_here);
        }
        while self.shared.replay.outstanding.load(Ordering::SeqCst) < MAX_REPLAY_REQUESTS {
            let numbers = self.replay.next(BATCH_SPANS);
            if numbers.is_empty() {
                break;
            }
            self.fill_workers
                .submit(numbers, Plain(0), Some(&self.shared.replay));
        }
        if self.shared.replay.outstanding.load(Ordering::SeqCst) > 0
            || self.shared.full.outstanding.load(Ordering::SeqCst) > 0
        {
            return true;
        }
        if let Some(full_prefetch) = &mut self.full_prefetch {
            let numbers = full_prefetch.next(index);
            if numbers.is_empty() {
                self.shared.is_full_queued.store(true, Ordering::SeqCst);
                self.full_prefetch = None;
            } else {
                self.fill_workers
                    .submit(numbers, Plain(0), Some(&self.shared.full));
            }
        }
        self.full_prefetch.is_some()
    }

    /// Asks for spans that were made before, but not kept, because the disk was too slow. Those of a remote
    /// archive would have to be fetched again: they wait for a read.
    fn queue_skipped(&self) {
        let reader = &self.reader;
        let (Some(disk_cache), Some(index)) = (&reader.disk_cache, reader.live_index.completed())
        else {
            return;
        };
        let is_busy = self.shared.skipped.outstanding.load(Ordering::SeqCst) > 0;
        if is_busy || self.shared.mode == PrefetchMode::Off || reader.source.is_remote() {
            return;
        }
        let skipped = disk_cache.take_skipped(SKIPPED_BATCH_SPANS);
        let numbers = skipped
            .iter()
            .filter_map(|extent| index.span_at(extent.start()));
        let numbers: BTreeSet<u32> = numbers.collect();
        if !numbers.is_empty() {
            let numbers = numbers.into_iter().collect();
            self.fill_workers
                .submit(numbers, Plain(0), Some(&self.shared.skipped));
        }
    }

    /// Finds out what there is to be made without regard to readers.
    fn begin(&mut self, index: &Index) {
        let accessed = self.profile.take().map(|profile| profile(index));
        self.replay = build_replay(&self.reader, index, &accessed.unwrap_or_default());
        let spans = u64::try_from(self.replay.len()).unwrap_or(u64::MAX);
        self.shared.replay.total.store(spans, Ordering::SeqCst);
        let spans = index.span_count().into();
        self.shared.full.total.store(spans, Ordering::SeqCst);
        self.full_prefetch = (self.shared.mode == PrefetchMode::All)
            .then(|| FullPrefetch::new(&self.reader, index, self.replay.bytes()));
    }

    /// The scan failed: there will never be an index of everything.
    fn stop_full_prefetch(&self) {
        self.shared.full.queued.store(1, Ordering::SeqCst);
        self.shared.is_full_queued.store(true, Ordering::SeqCst);
    }

    /// Goes on with the first window, or what the scan passes; true when there is nothing to do but
    /// wait.
    fn push(&mut self) -> bool {
        let Some(pages) = self.pages.get() else {
            return true;
        };
        let Some(job) = self.push_jobs.front_mut() else {
            return self.push_scanned();
        };
        let Some(index) = self.reader.live_index.completed() else {
            return true;
        };
        let Some(reached) = self.streams.reached(job.stream) else {
            self.push_jobs.pop_front();
            return false;
        };
        for _ in 0..ENTRIES_PER_TURN {
            match job.step(index, &**pages, reached, &self.fill_workers) {
                Step::More => {}
                Step::Blocked => return true,
                Step::Done => {
                    self.push_jobs.pop_front();
                    return false;
                }
            }
        }
        false
    }

    /// Goes on with what the scan passes; true when there is nothing to do but wait.
    fn push_scanned(&mut self) -> bool {
        let (Some(scan_pusher), Some(pages)) = (&mut self.scan_pusher, self.pages.get()) else {
            return true;
        };
        match scan_pusher.step(&self.reader, &**pages) {
            PushProgress::More => return false,
            PushProgress::Done => self.scan_pusher = None,
            PushProgress::Until(offset) => {
                if !self.is_wakeup_pending.swap(true, Ordering::SeqCst) {
                    let is_pending = Arc::clone(&self.is_wakeup_pending);
                    let (shared, wake) = (Arc::clone(&self.shared), self.fill_workers.wake.clone());
                    let callback = move || {
                        is_pending.store(false, Ordering::SeqCst);
                        shared.send(&wake, Message::Wake);
                    };
                    let awaited = WaitFor::Plain(offset);
                    self.reader
                        .live_index
                        .on_available(awaited, Callback::new(callback));
                }
            }
        }
        true
    }
}

impl PushJob {
    fn step(
        &mut self,
        index: &Index,
        pages: &dyn PageCache,
        reached: Plain,
        fill_workers: &FillWorkers,
    ) -> Step {
        let (reader, ino) = (&fill_workers.reader, Ino(self.next));
        if ino > index.last_ino() || self.steps == MAX_WINDOW_ENTRIES {
            return Step::Done;
        }
        let entry = index.entry(ino);
        let file = entry.and_then(|entry| Some((entry, file_read(entry, 0, entry.size())?.file)));
        let Some((entry, file)) = file.filter(|(_, file)| file.start() >= self.push.extent.start())
        else {
            self.next_entry();
            return Step::More;
        };
        if file.start() >= self.push.extent.end() {
            return Step::Done;
        }
        let is_candidate = entry.size() <= MAX_PUSHED_FILE_BYTES && file.start() >= reached;
        if is_candidate {
            pages.prime_dentries(index, ino);
        }
        if !is_candidate || !pages.can_store(ino) {
            self.next_entry();
            return Step::More;
        }
        if !self.is_marked && file.start() >= self.push.marker {
            self.is_marked = true;
            self.next_entry();
            return Step::More;
        }
        let len = u32::try_from(entry.size()).unwrap_or(u32::MAX);
        let bytes = reader.read_cached(ino, 0, len);
        if bytes.is_none() && fill_workers.is_busy() {
            return Step::Blocked;
        }
        self.next_entry();
        if let Some(bytes) = bytes
            && pages.store(ino, 0, &bytes).is_ok()
        {
            reader.stats.pushed_files.increment();
            reader.stats.pushed_bytes.add(bytes.len() as u64);
        }
        Step::More
    }

    fn next_entry(&mut self) {
        self.next = self.next.saturating_add(1);
        self.steps += 1;
    }
}

/// Has spans made by other threads.
struct FillWorkers {
    // Before the decoders, for whom they have work.
    fetchers: ThreadPool,
    decoders: Arc<ThreadPool>,
    /// And since when its times count.
    rate: Option<Arc<(Mutex<RateLimit>, Instant)>>,
    shared: Arc<Shared>,
    wake: SyncSender<Message>,
    reader: Arc<Reader>,
}

impl FillWorkers {
    /// Whether spans are on their way.
    fn is_busy(&self) -> bool {
        self.shared.outstanding.load(Ordering::SeqCst) > 0
    }

    /// Has `numbers` made, when no read makes a span and the rate allows it. Of spans that are here in
    /// part nothing is fetched before `from`.
    fn submit(&self, numbers: Vec<u32>, from: Plain, purpose: Option<&SpanCounts>) {
        let counts = purpose.map(|counts| {
            counts
                .queued
                .fetch_add(numbers.len() as u64, Ordering::SeqCst);
            Arc::clone(&counts.done)
        });
        let pending_job = Arc::new(PendingJob::new(self, purpose));
        let (reader, decoders) = (Arc::clone(&self.reader), Arc::clone(&self.decoders));
        let rate = self.rate.clone();
        let should_wait_for_disk = purpose.is_some_and(|counts| counts.should_wait_for_disk);
        self.fetchers.submit(move || {
            let rate = rate.as_deref();
            let mut numbers = numbers.as_slice();
            // By a rate in small parts, or it would be exceeded for long.
            let part = if rate.is_some() { 1 } else { numbers.len() };
            while let Some((now, rest)) = numbers.split_at_checked(part.min(numbers.len())) {
                // No claim is held meanwhile: no read shall wait for who waits.
                if now.is_empty()
                    || !wait_for_rate(&reader, rate)
                    || should_wait_for_disk && !wait_for_disk(&reader)
                    || !reader.read_priority.wait_until_idle()
                {
                    return;
                }
                numbers = rest;
                for batch in reader.batches(now.iter().copied(), from, counts.as_deref()) {
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
                            let pending_job = Arc::clone(&pending_job);
                            let done = move || drop(pending_job);
                            let made = counts.as_ref();
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
fn wait_for_rate(reader: &Reader, rate: Option<&(Mutex<RateLimit>, Instant)>) -> bool {
    let Some((rate, since)) = rate else {
        return true;
    };
    loop {
        let wait = rate
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .wait_time(since.elapsed());
        if wait == Duration::ZERO {
            return true;
        }
        if !reader.read_priority.pause(wait) {
            return false;
        }
    }
}

/// Waits until the disk cache can take more; false when the archive is closed.
fn wait_for_disk(reader: &Reader) -> bool {
    let is_busy = || {
        reader
            .disk_cache
            .as_ref()
            .is_some_and(|disk_cache| disk_cache.is_busy())
    };
    while is_busy() {
        if !reader.read_priority.pause(DISK_POLL_INTERVAL) {
            return false;
        }
    }
    true
}

/// Tells the follower when dropped.
struct PendingJob {
    shared: Arc<Shared>,
    /// Counts those of the same purpose.
    purpose: Option<Arc<AtomicU32>>,
    wake: SyncSender<Message>,
}

impl PendingJob {
    fn new(fill_workers: &FillWorkers, purpose: Option<&SpanCounts>) -> Self {
        let purpose = purpose.map(|counts| Arc::clone(&counts.outstanding));
        fill_workers
            .shared
            .outstanding
            .fetch_add(1, Ordering::SeqCst);
        if let Some(purpose) = &purpose {
            purpose.fetch_add(1, Ordering::SeqCst);
        }
        Self {
            shared: Arc::clone(&fill_workers.shared),
            purpose,
            wake: fill_workers.wake.clone(),
        }
    }
}

impl Drop for PendingJob {
    fn drop(&mut self) {
        // Counted before it is done, so that it is never idle in between.
        self.shared.pending_messages.fetch_add(1, Ordering::SeqCst);
        if let Some(purpose) = &self.purpose {
            purpose.fetch_sub(1, Ordering::SeqCst);
        }
        self.shared.outstanding.fetch_sub(1, Ordering::SeqCst);
        self.shared.send(&self.wake, Message::Wake);
        self.shared.message_done();
    }
}

/// The spans that hold `extent`.
fn spans_covering(index: &Index, extent: Extent<Plain>) -> Range<u32> {
    let last = extent.end().0.checked_sub(1).map(Plain);
    let first = index.span_at(extent.start());
    let last = last.and_then(|last| index.span_at(last));
    match (first, last) {
        (Some(first), Some(last)) => first..last.saturating_add(1),
        _ => 0..0,
    }
}

/// The spans that `range` means.
fn spans_in(index: &Index, range: FillRange) -> impl Iterator<Item = u32> {
    let (start, end) = (range.extent.start(), range.extent.end());
    let first = index.span_at(start).unwrap_or(u32::MAX);
    (first..index.span_count()).map_while(move |number| {
        let span = index.span_extent(number)?;
        let holds_end = range.includes_last && span.start() < end;
        (span.end() <= end || holds_end).then_some(number)
    })
}

/// A read of `len` bytes at `offset` of `entry`, in plain bytes; `None` when it needs none.
pub(super) fn file_read(entry: Entry<'_>, offset: u64, len: u64) -> Option<FileRead> {
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
    Some(FileRead { wanted, file })
}
