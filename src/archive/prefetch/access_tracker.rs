//! The tracker thread: follows readers, and decides what to prefetch.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use super::access_log::AccessedRange;
use super::fill_workers::{FillThreads, FillWorkers};
use super::options::{PageCache, PrefetchMode, PrefetchOptions, Profile};
use super::page_caches::PageCaches;
use super::push_job::{PushJob, PushStatus};
use super::replay::Replay;
use super::scan_push::{PushProgress, ScanPusher};
use super::sequential::{FileRead, FillRange, Limits, ReadStreams};
use super::shared::{Message, ReadEvent, Shared};
use crate::archive::live_index::{Callback, WaitFor};
use crate::archive::read::Reader;
use crate::base::extent::{Extent, Plain};
use crate::index::Index;

/// Maximum number of plain bytes that are filled ahead of a reader, whatever the memory.
const MAX_FILL_BYTES: u64 = 32 << 20;

/// Maximum number of plain bytes that are pushed ahead of a reader.
/// A larger window takes longer to push than the reader takes to overtake it. Of 10,500 files in a plain tar,
/// some 7,900 were pushed in time with 1 to 4 MiB, and 3,700 with 16.
const MAX_PUSH_BYTES: u64 = 2 << 20;

/// Maximum number of windows in the push queue. A new one displaces the oldest, which its reader has passed.
const MAX_PUSH_WINDOWS: usize = 16;

/// Entries that are examined before the tracker checks for messages again.
const ENTRIES_PER_TURN: u32 = 256;

const BATCH_SPANS: usize = 8;

/// Maximum number of replay requests in flight, enough to keep a distant server busy.
const MAX_REPLAY_REQUESTS: u32 = 4;

const DISK_CACHE_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Spans in one request for spans that a slow disk skipped, few enough to fit into the disk cache's queue.
const SKIPPED_BATCH_SPANS: usize = 4;

/// Time of polling after a message. A read after a pause, such as of a marker, wakes the tracker at once.
const IDLE_POLL_TIMEOUT: Duration = Duration::from_millis(1);

pub(super) struct AccessTracker {
    streams: ReadStreams,
    profile: Option<Profile>,
    /// Whether the index is complete, and `begin` has run.
    has_begun: bool,
    /// Bytes that the disk cache stores of the whole archive.
    stored_bytes: u64,
    /// Last check whether the disk cache holds everything, because other processes may evict parts.
    last_disk_check: Option<Instant>,
    replay: Replay,
    full_prefetch: Option<FullPrefetch>,
    /// Memory that prefetch may use, in bytes.
    span_cache_bytes: u64,
    shared: Arc<Shared>,
    push_jobs: VecDeque<PushJob>,
    max_push_bytes: u64,
    scan_pusher: Option<ScanPusher>,
    /// Whether a callback will wake the tracker when the scan has advanced.
    is_wakeup_pending: Arc<AtomicBool>,
    pages: Arc<PageCaches>,
    fill_workers: FillWorkers,
    reader: Arc<Reader>,
}

impl AccessTracker {
    pub(super) fn new(
        reader: &Arc<Reader>,
        threads: FillThreads,
        shared: &Arc<Shared>,
        pages: &Arc<PageCaches>,
        options: PrefetchOptions,
    ) -> Self {
        let limits = limits(reader, options.mode);
        let pushes = limits.push_bytes > 0;
        Self {
            streams: ReadStreams::new(limits),
            max_push_bytes: limits.push_bytes,
            push_jobs: VecDeque::new(),
            scan_pusher: pushes.then(|| ScanPusher::new(reader)).flatten(),
            is_wakeup_pending: Arc::default(),
            pages: Arc::clone(pages),
            profile: options.replay,
            has_begun: false,
            stored_bytes: u64::MAX,
            last_disk_check: None,
            replay: Replay::default(),
            full_prefetch: None,
            span_cache_bytes: reader.spans.memory().budget()
                / options.other_archives.saturating_add(1),
            fill_workers: FillWorkers::new(reader, threads, shared, options.bytes_per_second),
            shared: Arc::clone(shared),
            reader: Arc::clone(reader),
        }
    }

    pub(super) fn run(mut self, inbox: &Receiver<Message>, is_over: &AtomicBool) {
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
                        Message::Names(ino) => {
                            let index = self.reader.live_index.completed();
                            if let Some(index) = index {
                                let pages = &self.pages;
                                // Without rows of the index there is nothing to prime.
                                let primed = index.read(|index| pages.prime_dentries(index, ino));
                                primed.unwrap_or_default();
                            }
                        }
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

    fn process_pending_reads(&mut self) -> bool {
        // Keeps `is_idle` false in the meantime.
        self.shared.pending_messages.fetch_add(1, Ordering::SeqCst);
        let reads = self.shared.pending_reads.lock().take();
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
        // Read-ahead starts after the scan, which reads in archive order and is ahead of readers itself.
        let reader = Arc::clone(&self.reader);
        let Some(index) = reader.live_index.completed() else {
            return;
        };
        let found = index.read(|index| {
            let file_read = FileRead::new(index.entry(ino)?, offset, len.into())?;
            let spans = spans_covering(index, file_read.wanted);
            Some((file_read, spans))
        });
        let Ok(Some((file_read, spans))) = found else {
            return;
        };
        for span in spans {
            self.replay.mark_read(span);
        }
        // Without pushes, skipped bytes must not count as read from the page cache.
        let push_bytes = self.max_push_bytes * u64::from(!self.pages.is_empty());
        self.streams.limits.push_bytes = push_bytes;
        let Some(wanted) = self.streams.record_read(&file_read) else {
            return;
        };
        // If reads need no spans, the kernel's own read-ahead is enough.
        if let Some(range) = wanted.fill
            && !reader.is_read_locally()
        {
            let range = FillRange {
                // A read fetches the end of a file itself, if that is less than a span.
                includes_last: range.includes_last && reader.windows().is_none(),
                ..range
            };
            let numbers = index.read(|index| spans_in(index, range).collect::<Vec<_>>());
            let numbers = numbers.unwrap_or_default();
            for batch in numbers.chunks(BATCH_SPANS) {
                self.fill_workers
                    .submit(batch.to_vec(), file_read.wanted.end(), None);
            }
        }
        if let Some(push) = wanted.push {
            if self.push_jobs.len() == MAX_PUSH_WINDOWS {
                self.push_jobs.pop_front();
            }
            self.push_jobs
                .push_back(PushJob::new(wanted.stream, push, ino));
        }
    }

    /// Queues fills that do not depend on readers, few at once, so that read-ahead waits only for a few.
    fn refill_queue(&mut self) {
        if !self.queue_requested() {
            self.queue_skipped();
        }
    }

    /// Queues the fills that the user requested; returns false if none are left and the index is complete.
    fn queue_requested(&mut self) -> bool {
        let reader = Arc::clone(&self.reader);
        let Some(index) = reader.live_index.completed() else {
            if reader.live_index.is_scan_over() {
                // The scan failed, so the index will never be complete.
                self.shared.full.queued.store(1, Ordering::SeqCst);
                self.shared.is_full_queued.store(true, Ordering::SeqCst);
            }
            return true;
        };
        if !self.has_begun {
            self.has_begun = true;
            let begun = index.read(|index| {
                self.begin(index);
                self.stored_bytes = reader.spans.stored_bytes(index);
            });
            // It then prefetches less. Reads report the rows that are missing.
            begun.unwrap_or_default();
        }
        if self
            .last_disk_check
            .is_none_or(|last| last.elapsed() > DISK_CACHE_CHECK_INTERVAL)
        {
            self.last_disk_check = Some(Instant::now());
            let disk_cache = reader.spans.disk();
            let is_here =
                disk_cache.is_some_and(|disk_cache| disk_cache.has_at_least(self.stored_bytes));
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
            let numbers = index.read(|index| full_prefetch.next(index));
            let numbers = numbers.unwrap_or_default();
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

    /// Queues spans that were decoded, but not cached because the disk was too slow. Those of a remote
    /// archive must be fetched again, so they wait for a read.
    fn queue_skipped(&self) {
        let reader = &self.reader;
        let (Some(disk_cache), Some(index)) = (reader.spans.disk(), reader.live_index.completed())
        else {
            return;
        };
        let is_busy = self.shared.skipped.outstanding.load(Ordering::SeqCst) > 0;
        if is_busy || self.shared.mode == PrefetchMode::Off || reader.packed.source().is_remote() {
            return;
        }
        let skipped = disk_cache.take_skipped(SKIPPED_BATCH_SPANS);
        let numbers = index.read(|index| {
            let spans = skipped.iter();
            let numbers = spans.filter_map(|extent| index.span_at(extent.start()));
            numbers.collect::<BTreeSet<u32>>()
        });
        let numbers = numbers.unwrap_or_default();
        if !numbers.is_empty() {
            let numbers = numbers.into_iter().collect();
            self.fill_workers
                .submit(numbers, Plain(0), Some(&self.shared.skipped));
        }
    }

    fn begin(&mut self, index: &Index) {
        let accessed = self.profile.take().map(|profile| profile(index));
        let free_bytes = self.free_cache_bytes(index);
        self.replay = build_replay(index, &accessed.unwrap_or_default());
        if free_bytes.is_some_and(|free_bytes| self.replay.bytes() > free_bytes) {
            // The span cache evicts a filled but unread span once as many bytes have been read since.
            self.replay.max_ahead_bytes = Some(self.span_cache_bytes / 8 * 3);
        }
        let spans = u64::try_from(self.replay.len()).unwrap_or(u64::MAX);
        self.shared.replay.total.store(spans, Ordering::SeqCst);
        let spans = index.span_count().into();
        self.shared.full.total.store(spans, Ordering::SeqCst);
        self.full_prefetch = (self.shared.mode == PrefetchMode::All).then(|| FullPrefetch {
            next: 0,
            // The rest of the span cache is for the replay.
            free_bytes: free_bytes.map(|free_bytes| free_bytes.saturating_sub(self.replay.bytes())),
        });
    }

    /// Bytes of the span cache that prefetch may fill; `None` if spans are cached on disk.
    fn free_cache_bytes(&self, index: &Index) -> Option<u64> {
        // All spans are like the first. Spans without a hash are not cached on disk.
        let first = index.span(0).ok().flatten();
        let is_kept = index.is_hashed() == Ok(true)
            && first.is_some_and(|span| self.reader.should_cache_on_disk(&span));
        (!is_kept).then(|| self.span_cache_bytes / 4 * 3)
    }

    /// Continues the first push window, or else the scan pusher; returns true if it must wait.
    fn push(&mut self) -> bool {
        if self.pages.is_empty() {
            return true;
        }
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
            let step = |index: &Index| job.step(index, &*self.pages, reached, &self.fill_workers);
            match index.read(step).unwrap_or(PushStatus::Done) {
                PushStatus::More => {}
                PushStatus::Blocked => return true,
                PushStatus::Done => {
                    self.push_jobs.pop_front();
                    return false;
                }
            }
        }
        false
    }

    fn push_scanned(&mut self) -> bool {
        let Some(scan_pusher) = &mut self.scan_pusher else {
            return true;
        };
        match scan_pusher.step(&self.reader, &*self.pages) {
            PushProgress::More => return false,
            PushProgress::Done => self.scan_pusher = None,
            PushProgress::Until(offset) => {
                if !self.is_wakeup_pending.swap(true, Ordering::SeqCst) {
                    let is_pending = Arc::clone(&self.is_wakeup_pending);
                    let shared = Arc::clone(&self.shared);
                    let callback = move || {
                        is_pending.store(false, Ordering::SeqCst);
                        shared.send(Message::Wake);
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

fn limits(reader: &Reader, mode: PrefetchMode) -> Limits {
    if mode == PrefetchMode::Off {
        return Limits::default();
    }
    Limits {
        // As for a replay: that much may be read before a span is needed, and must not evict it.
        fill_bytes: (reader.spans.memory().budget() / 8 * 3).min(MAX_FILL_BYTES),
        push_bytes: MAX_PUSH_BYTES.min(reader.memory_bytes / 8),
    }
}

fn build_replay(index: &Index, accessed: &[AccessedRange]) -> Replay {
    let spans = accessed.iter().flat_map(|accessed| {
        let entry = index.entry(accessed.ino);
        let file_read = entry.and_then(|entry| FileRead::new(entry, accessed.offset, accessed.len));
        file_read
            .into_iter()
            .flat_map(|file_read| spans_covering(index, file_read.wanted))
    });
    let spans = spans.filter_map(|number| Some((number, index.span_extent(number)?.len())));
    Replay::new(spans, None)
}

/// Progress of [`PrefetchMode::All`] through the archive, from front to back.
#[derive(Debug)]
struct FullPrefetch {
    next: u32,
    free_bytes: Option<u64>,
}

impl FullPrefetch {
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

fn spans_covering(index: &Index, extent: Extent<Plain>) -> Range<u32> {
    let last = extent.end().0.checked_sub(1).map(Plain);
    let first = index.span_at(extent.start());
    let last = last.and_then(|last| index.span_at(last));
    match (first, last) {
        (Some(first), Some(last)) => first..last.saturating_add(1),
        _ => 0..0,
    }
}

fn spans_in(index: &Index, range: FillRange) -> impl Iterator<Item = u32> {
    let (start, end) = (range.extent.start(), range.extent.end());
    let first = index.span_at(start).unwrap_or(u32::MAX);
    (first..index.span_count()).map_while(move |number| {
        let span = index.span_extent(number)?;
        let holds_end = range.includes_last && span.start() < end;
        (span.end() <= end || holds_end).then_some(number)
    })
}
