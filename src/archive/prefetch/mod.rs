//! Prefetch: threads that fill the caches ahead of readers.
//!
//! The tracker thread receives every read and finds [sequential readers](sequential). It
//! also pushes small files into the kernel's page cache. No other thread does that, and the tracker
//! thread answers no read, because a push waits for a reader of the same page. Worker threads fetch
//! and decode [spans](crate::archive::read::batch) while no read does.

pub(super) mod access_log;
pub(super) mod available_memory;
pub(super) mod lag_limit;
pub(super) mod lookup_runs;
pub(super) mod rate_limit;
pub(super) mod replay;
pub(super) mod scan_push;
pub(super) mod sequential;

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::archive::live_index::{Callback, WaitFor};
use crate::archive::read::Reader;
use crate::base::extent::{Extent, Plain};
use crate::base::sync::Mutex;
use crate::base::thread::Thread;
use crate::base::thread_pool::ThreadPool;
use crate::index::{Entry, Index, Ino, Kind};
use access_log::{AccessLog, AccessedRange};
use lookup_runs::LookupRuns;
use rate_limit::RateLimit;
use replay::Replay;
use scan_push::{PushProgress, ScanPusher};
use sequential::{FileRead, FillRange, Limits, PushRange, ReadStreams};

/// Maximum number of messages in the queue of the tracker.
///
/// Reads that find it full are dropped, so the tracker only sees less.
const MAX_QUEUED_MESSAGES: usize = 1024;

/// Maximum number of plain bytes that are filled ahead of a reader, whatever the memory.
const MAX_FILL_BYTES: u64 = 32 << 20;

/// Maximum number of plain bytes that are pushed ahead of a reader.
///
/// That is enough for a reader that only reads. A larger window takes longer to push than the
/// reader takes to overtake it. Of 10,500 files in a plain tar, some 7,900 were pushed in time with
/// 1 to 4 MiB, and 3,700 with 16.
const MAX_PUSH_BYTES: u64 = 2 << 20;

/// Maximum length of a pushed file. For longer ones, the kernel's own read-ahead is as good.
const MAX_PUSHED_FILE_BYTES: u64 = 512 << 10;

/// Maximum number of windows in the push queue. A new one displaces the oldest, which its reader
/// has passed.
const MAX_PUSH_WINDOWS: usize = 16;

/// Maximum number of entries that are examined for one window.
const MAX_WINDOW_ENTRIES: u32 = 1 << 16;

/// Entries that are examined before the tracker checks for messages again.
const ENTRIES_PER_TURN: u32 = 256;

/// Spans in one prefetch request.
const BATCH_SPANS: usize = 8;

/// Maximum number of replay requests in flight, enough to keep a distant server busy.
const MAX_REPLAY_REQUESTS: u32 = 4;

/// Interval between checks that the disk cache still holds all spans.
const DISK_CACHE_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Spans in one request for skipped spans, for which the disk was too slow before.
///
/// The number is small so that all fit into the disk cache's queue.
const SKIPPED_BATCH_SPANS: usize = 4;

/// Interval between checks whether the disk is still busy.
const DISK_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Number of threads that fetch.
const FETCH_THREADS: usize = 4;

/// Data that is prefetched.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum PrefetchMode {
    /// Prefetches nothing.
    Off,
    /// Prefetches data that sequential readers of a file or a tree will need next.
    #[default]
    ReadAhead,
    /// Does that, and prefetches everything else from front to back, while there is space.
    All,
}

/// Options of prefetch.
#[derive(Default)]
pub struct PrefetchOptions {
    /// Data to prefetch.
    pub mode: PrefetchMode,
    /// Maximum number of bytes fetched per second; `None` is unlimited.
    pub bytes_per_second: Option<u64>,
    /// Accesses of an earlier run, which are prefetched in the same order.
    ///
    /// Called once the index is complete.
    pub replay: Option<Profile>,
    /// Whether to record accesses.
    ///
    /// Recording disables pushes, because the kernel does not report reads that its page cache
    /// answers.
    pub record: bool,
}

/// Looks up the accesses of a profile in the index of an archive.
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

/// Progress of prefetch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrefetchProgress {
    /// Data that is prefetched.
    pub mode: PrefetchMode,
    /// State of [`PrefetchMode::All`].
    pub state: PrefetchState,
    /// Spans that [`PrefetchMode::All`] has filled, or found in a cache.
    pub done_spans: u64,
    /// Spans of the archive.
    pub total_spans: u64,
    /// Spans of the replay that were filled, or found in a cache.
    pub replayed_spans: u64,
    /// Spans of the replay.
    pub replay_spans: u64,
}

/// State of [`PrefetchMode::All`].
///
/// The state of several archives is the least of their states.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum PrefetchState {
    /// It fetches while no reader does.
    Running,
    /// Some spans could not be filled.
    Incomplete,
    /// The caches have no space left.
    Full,
    /// All spans are cached, and nothing is left to fetch.
    Complete,
    /// It is not requested.
    Off,
}

/// The kernel's page cache, which answers reads of pushed files without a request.
pub trait PageCache: Send + Sync + fmt::Debug {
    /// Whether the file can be stored, and was not stored yet.
    fn can_store(&self, ino: Ino) -> bool;

    /// Whether the mounted subtree contains the file.
    fn is_visible(&self, index: &Index, ino: Ino) -> bool;

    /// Makes these regular files storable if possible, and returns how many were not before.
    ///
    /// The caller must not hold an [`IndexGuard`](crate::archive::IndexGuard) of a growing index.
    fn prime_inodes(&self, files: &[Ino]) -> usize;

    /// Primes the dentries of `ino` and of the names that follow it in its directory.
    ///
    /// Then opening them needs no lookups. Does nothing if too few names follow to be worth it.
    fn prime_dentries(&self, index: &Index, ino: Ino);

    /// Stores `bytes` from `offset` on, in whole pages except at the end of the file.
    ///
    /// May wait for a reader of the same page.
    ///
    /// # Errors
    /// When they cannot be stored.
    fn store(&self, ino: Ino, offset: u64, bytes: &[u8]) -> io::Result<()>;
}

/// Prefetches until it is dropped.
#[derive(Debug)]
pub(crate) struct Prefetcher {
    reader: Arc<Reader>,
    shared: Arc<Shared>,
    pages: Arc<OnceLock<Arc<dyn PageCache>>>,
    inbox: SyncSender<Message>,
    is_over: Arc<AtomicBool>,
    /// Whether reads can cause any prefetch.
    is_tracking: bool,
    access_log: Option<Mutex<AccessLog>>,
    lookup_runs: Mutex<LookupRuns>,
    thread: Option<Thread<()>>,
}

/// State that the threads of prefetch share.
#[derive(Debug, Default)]
struct Shared {
    mode: PrefetchMode,
    /// Messages that the tracker has not processed yet.
    pending_messages: AtomicU64,
    /// Reads that were not sent to the tracker yet.
    pending_reads: Mutex<PendingReads>,
    /// Whether the tracker sleeps and must be woken to see them.
    is_asleep: AtomicBool,
    /// Unfinished jobs, for any purpose.
    outstanding: AtomicU32,
    full: SpanCounts,
    /// Whether [`PrefetchMode::All`] has queued all spans.
    is_full_queued: AtomicBool,
    replay: SpanCounts,
    /// Spans of a local archive that the disk cache skipped at first.
    skipped: SpanCounts,
}

/// Counts of spans for one purpose.
#[derive(Debug, Default)]
struct SpanCounts {
    /// Whether to wait while the disk cache is busy.
    should_wait_for_disk: bool,
    total: AtomicU64,
    queued: AtomicU64,
    done: Arc<AtomicU64>,
    outstanding: Arc<AtomicU32>,
}

#[derive(Debug)]
enum Message {
    Reads(Vec<ReadEvent>),
    /// A run of lookups by name, and the last inode of it.
    Names(Ino),
    /// Spans were filled, reads are pending, or prefetch ends.
    Wake,
}

/// A read request of the kernel.
#[derive(Clone, Copy, Debug)]
struct ReadEvent {
    ino: Ino,
    offset: u64,
    len: u32,
}

/// Reads that are sent to the tracker together, or picked up when it polls.
///
/// Waking a thread costs more than answering a read.
#[derive(Debug, Default)]
struct PendingReads {
    reads: Vec<ReadEvent>,
    bytes: u64,
}

/// Number of pending reads at which they are sent to the tracker.
const MAX_PENDING_READS: usize = 16;
/// Number of pending read bytes at which they are sent to the tracker.
const MAX_PENDING_READ_BYTES: u64 = 128 << 10;

/// Time for which the tracker polls after a message before it must be woken.
///
/// A read after a pause, such as that of a marker, wakes it at once.
const IDLE_POLL_TIMEOUT: Duration = Duration::from_millis(1);

impl PendingReads {
    /// Adds a read, and returns all reads when it is time to send them.
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
    /// When the system cannot start a thread.
    pub(crate) fn start(reader: Arc<Reader>, options: PrefetchOptions) -> io::Result<Self> {
        let (sender, receiver) = sync_channel(MAX_QUEUED_MESSAGES);
        let pages = Arc::<OnceLock<_>>::default();
        let shared = Arc::new(Shared {
            mode: options.mode,
            // Busy until the tracker has looked for the first time.
            pending_messages: AtomicU64::new(1),
            skipped: SpanCounts {
                should_wait_for_disk: true,
                ..SpanCounts::default()
            },
            ..Shared::default()
        });
        let limits = limits(&reader, &options);
        // A replay skips spans that were read in the meantime.
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

    pub(crate) fn note_read(&self, ino: Ino, offset: u64, len: u32) {
        if let Some(access_log) = &self.access_log {
            let index = self.reader.live_index.read();
            let size = index.entry(ino).map(|entry| entry.size());
            drop(index);
            let len = size
                .unwrap_or_default()
                .saturating_sub(offset)
                .min(len.into());
            let mut access_log = access_log.lock();
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

    pub(crate) fn note_lookup(&self, ino: Ino) {
        if !self.is_tracking || self.pages.get().is_none() {
            return;
        }
        let place = |index: &Arc<Index>| index.listing_position(ino);
        let Some((directory, number)) = self.reader.live_index.completed().and_then(place) else {
            return;
        };
        let mut lookup_runs = self.lookup_runs.lock();
        if lookup_runs.step(directory, number) {
            self.shared.send(&self.inbox, Message::Names(ino));
        }
    }

    /// Whether no work is pending.
    pub(crate) fn is_idle(&self) -> bool {
        // The order matters: the tracker counts a pending message before it takes pending reads.
        self.shared.pending_reads().reads.is_empty()
            && self.shared.pending_messages.load(Ordering::SeqCst) == 0
            && self.shared.outstanding.load(Ordering::SeqCst) == 0
    }

    pub(crate) fn set_page_cache(&self, pages: Arc<dyn PageCache>) {
        if self.access_log.is_none() {
            drop(self.pages.set(pages));
            self.shared.send(&self.inbox, Message::Wake);
        }
    }

    /// Recorded accesses and the number of reads, if there were more than `reads` of them.
    pub(crate) fn accesses_since(&self, reads: u64) -> Option<(Vec<AccessedRange>, u64)> {
        let access_log = self.access_log.as_ref()?.lock();
        (access_log.read_count() > reads).then(|| (access_log.ranges(), access_log.read_count()))
    }

    pub(crate) fn progress(&self) -> PrefetchProgress {
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
    /// Queues `message` if there is room. Otherwise the receiver is awake anyway.
    fn send(&self, inbox: &SyncSender<Message>, message: Message) {
        self.pending_messages.fetch_add(1, Ordering::SeqCst);
        if inbox.try_send(message).is_err() {
            self.message_done();
        }
    }

    fn pending_reads(&self) -> std::sync::MutexGuard<'_, PendingReads> {
        self.pending_reads.lock()
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

/// Limits of read-ahead.
fn limits(reader: &Reader, options: &PrefetchOptions) -> Limits {
    if options.mode == PrefetchMode::Off {
        return Limits {
            fill_bytes: 0,
            push_bytes: 0,
        };
    }
    Limits {
        // As for a replay: that much may be read before a span is needed, and must not evict it.
        fill_bytes: (reader.span_cache.budget() / 8 * 3).min(MAX_FILL_BYTES),
        push_bytes: MAX_PUSH_BYTES.min(reader.memory_bytes / 8),
    }
}

/// The spans that contain the accesses of a profile.
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
        // The span cache evicts the least recently used spans. Those are spans that were filled but
        // not read yet, once as many bytes have been read since.
        replay.set_max_ahead_bytes(reader.span_cache.budget() / 8 * 3);
    }
    replay
}

/// Bytes of the span cache that prefetch may fill; `None` if spans are cached on disk.
fn free_cache_bytes(reader: &Reader, index: &Index) -> Option<u64> {
    // The first span stands for all. Spans without a hash are not cached on disk.
    let is_kept = index.is_hashed()
        && index
            .span(0)
            .is_some_and(|span| reader.should_cache_on_disk(&span));
    (!is_kept).then(|| reader.span_cache.budget() / 4 * 3)
}

/// Progress of [`PrefetchMode::All`] through the archive, from front to back.
#[derive(Debug)]
struct FullPrefetch {
    next: u32,
    /// Remaining bytes of the span cache; `None` if spans are cached on disk.
    free_bytes: Option<u64>,
}

impl FullPrefetch {
    /// Reserves `needed` bytes of the span cache for another purpose.
    fn new(reader: &Reader, index: &Index, needed: u64) -> Self {
        Self {
            next: 0,
            free_bytes: free_cache_bytes(reader, index)
                .map(|free_bytes| free_bytes.saturating_sub(needed)),
        }
    }

    /// Returns the next spans to fill; none when it has finished.
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

/// The tracker thread: follows readers and plans prefetch.
struct AccessTracker {
    streams: ReadStreams,
    profile: Option<Profile>,
    /// Whether the index is complete, and `begin` has run.
    has_begun: bool,
    /// Time of the last check whether the disk cache holds everything. Other processes may evict
    /// parts.
    last_disk_check: Option<Instant>,
    replay: Replay,
    full_prefetch: Option<FullPrefetch>,
    shared: Arc<Shared>,
    push_jobs: VecDeque<PushJob>,
    max_push_bytes: u64,
    /// Pusher of files that the scan passes, while the scan runs and there is memory.
    scan_pusher: Option<ScanPusher>,
    /// Whether a callback will wake the tracker when the scan has advanced.
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
    /// Whether the marker file, which is not pushed, has been passed.
    is_marked: bool,
}

/// Result of one step of a push.
#[derive(PartialEq, Eq)]
enum Step {
    More,
    /// Bytes that it needs are in flight.
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
                            for read in reads {
                                self.on_read(read);
                            }
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

    /// Waits for the next message; returns `Empty` if there is other work.
    fn next(&mut self, inbox: &Receiver<Message>) -> Result<Message, TryRecvError> {
        match inbox.recv_timeout(IDLE_POLL_TIMEOUT) {
            Ok(message) => return Ok(message),
            Err(RecvTimeoutError::Disconnected) => return Err(TryRecvError::Disconnected),
            Err(RecvTimeoutError::Timeout) => {}
        }
        self.shared.is_asleep.store(true, Ordering::SeqCst);
        // Checked after the flag is set, so that no read is missed.
        if self.process_pending_reads() {
            self.shared.is_asleep.store(false, Ordering::SeqCst);
            return Err(TryRecvError::Empty);
        }
        let message = inbox.recv();
        self.shared.is_asleep.store(false, Ordering::SeqCst);
        message.map_err(|_| TryRecvError::Disconnected)
    }

    /// Processes pending reads; returns false if there are none.
    fn process_pending_reads(&mut self) -> bool {
        // Keeps `is_idle` false in the meantime.
        self.shared.pending_messages.fetch_add(1, Ordering::SeqCst);
        let reads = self.shared.pending_reads().take();
        for &read in &reads {
            self.on_read(read);
        }
        if !reads.is_empty() {
            // Reads make room for further replay.
            self.refill_queue();
        }
        self.shared.message_done();
        !reads.is_empty()
    }

    fn on_read(&mut self, ReadEvent { ino, offset, len }: ReadEvent) {
        // Read-ahead starts after the scan, which reads in archive order and is ahead of readers
        // itself.
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
        // If reads need no spans, the kernel's own read-ahead is enough.
        if let Some(range) = wanted.fill
            && !reader.reads_here()
        {
            let range = FillRange {
                // A read fetches the end of a file itself, if that is less than a span.
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

    /// Queues fills that do not depend on readers.
    ///
    /// Queues few at once, so that read-ahead waits only for a few.
    fn refill_queue(&mut self) {
        if !self.queue_requested() {
            self.queue_skipped();
        }
    }

    /// Queues the fills that the user requested.
    ///
    /// Returns false if there are none left and the index is complete.
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

    /// Queues spans that were decoded, but not cached because the disk was too slow.
    ///
    /// Those of a remote archive must be fetched again, so they wait for a read.
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

    /// Plans the replay and [`PrefetchMode::All`].
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

    /// Ends [`PrefetchMode::All`] as incomplete, because the scan failed and the index will never
    /// be complete.
    fn stop_full_prefetch(&self) {
        self.shared.full.queued.store(1, Ordering::SeqCst);
        self.shared.is_full_queued.store(true, Ordering::SeqCst);
    }

    /// Continues the first push window, or else the scan pusher.
    ///
    /// Returns true if it must wait.
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

    /// Continues the scan pusher; returns true if it must wait.
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

/// Worker threads that fill spans.
struct FillWorkers {
    // Dropped before the decoders, because it submits work to them.
    fetchers: ThreadPool,
    decoders: Arc<ThreadPool>,
    /// Rate limit, and the start of its clock.
    rate: Option<Arc<(Mutex<RateLimit>, Instant)>>,
    shared: Arc<Shared>,
    wake: SyncSender<Message>,
    reader: Arc<Reader>,
}

impl FillWorkers {
    /// Whether fills are outstanding.
    fn is_busy(&self) -> bool {
        self.shared.outstanding.load(Ordering::SeqCst) > 0
    }

    /// Queues fills of `numbers`, which wait until no read fills a span and the rate allows it.
    ///
    /// If some windows of a span are cached, it fetches only missing ones from `from` on.
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
            // Small parts, because one large part would exceed the rate for long.
            let part = if rate.is_some() { 1 } else { numbers.len() };
            while let Some((now, rest)) = numbers.split_at_checked(part.min(numbers.len())) {
                // Waits before it claims spans, because no read may wait for a waiting fill.
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
                        let mut rate = rate.lock();
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
                            let filled = counts.as_ref();
                            batch.decode(&reader, &packed, reserved, &decoders, filled, done);
                        }
                        Err(error) => tracing::debug!(%error, "cannot prefetch"),
                    }
                }
            }
        });
    }
}

/// Waits until the rate limit allows a fetch; returns false if prefetch ends.
fn wait_for_rate(reader: &Reader, rate: Option<&(Mutex<RateLimit>, Instant)>) -> bool {
    let Some((rate, since)) = rate else {
        return true;
    };
    loop {
        let wait = rate.lock().wait_time(since.elapsed());
        if wait == Duration::ZERO {
            return true;
        }
        if !reader.read_priority.pause(wait) {
            return false;
        }
    }
}

/// Waits until the disk cache accepts more; returns false if the archive is closed.
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

/// Counts an outstanding job, and wakes the tracker when dropped.
struct PendingJob {
    shared: Arc<Shared>,
    /// Counter of outstanding jobs with the same purpose.
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
        // Counts a message before the job ends, so that `is_idle` is never true in between.
        self.shared.pending_messages.fetch_add(1, Ordering::SeqCst);
        if let Some(purpose) = &self.purpose {
            purpose.fetch_sub(1, Ordering::SeqCst);
        }
        self.shared.outstanding.fetch_sub(1, Ordering::SeqCst);
        self.shared.send(&self.wake, Message::Wake);
        self.shared.message_done();
    }
}

/// The spans that contain `extent`.
fn spans_covering(index: &Index, extent: Extent<Plain>) -> Range<u32> {
    let last = extent.end().0.checked_sub(1).map(Plain);
    let first = index.span_at(extent.start());
    let last = last.and_then(|last| index.span_at(last));
    match (first, last) {
        (Some(first), Some(last)) => first..last.saturating_add(1),
        _ => 0..0,
    }
}

/// The spans that belong to `range`.
fn spans_in(index: &Index, range: FillRange) -> impl Iterator<Item = u32> {
    let (start, end) = (range.extent.start(), range.extent.end());
    let first = index.span_at(start).unwrap_or(u32::MAX);
    (first..index.span_count()).map_while(move |number| {
        let span = index.span_extent(number)?;
        let holds_end = range.includes_last && span.start() < end;
        (span.end() <= end || holds_end).then_some(number)
    })
}

/// Converts a read of `len` bytes at `offset` to plain bytes; `None` if it needs none.
pub(crate) fn file_read(entry: Entry<'_>, offset: u64, len: u64) -> Option<FileRead> {
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
