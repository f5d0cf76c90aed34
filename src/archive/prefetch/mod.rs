//! Ahead of readers: threads that fill the caches before a read needs them.
//! 1. The prefetcher sends each read and lookup to the tracker thread.
//! 2. The tracker finds [sequential readers](sequential), and plans what to fill and to push.
//! 3. Worker threads fetch and decode [spans](crate::archive::read::batch) while no read does.
//! 4. The tracker pushes files into the kernel's page cache: those that a scan [passes](scan_push), and later
//!    small ones ahead of a reader. A push waits for a reader of the same page, so only the tracker pushes, and
//!    it answers no read.

pub(super) mod access_log;
mod access_tracker;
mod available_memory;
mod fill_workers;
mod lookup_runs;
pub(super) mod options;
mod page_caches;
mod push_job;
mod rate_limit;
mod replay;
mod scan_push;
mod sequential;
mod shared;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;

use self::access_log::{AccessLog, AccessedRange};
use self::access_tracker::AccessTracker;
pub(super) use self::fill_workers::FillThreads;
use self::lookup_runs::LookupRuns;
use self::options::{PageCache, PrefetchMode, PrefetchOptions, PrefetchProgress};
use self::page_caches::PageCaches;
use self::shared::{Message, ReadEvent, Shared};
use super::live_index::{Callback, WaitFor};
use super::read::Reader;
use crate::base::sync::Mutex;
use crate::base::thread::Thread;
use crate::index::{Index, Ino, LazyIndex};

/// Maximum number of messages in the queue of the tracker. If it is full, reads are dropped.
const MAX_QUEUED_MESSAGES: usize = 1024;

#[derive(Debug)]
pub(crate) struct Prefetcher {
    reader: Arc<Reader>,
    shared: Arc<Shared>,
    pages: Arc<PageCaches>,
    is_over: Arc<AtomicBool>,
    is_tracking: bool,
    access_log: Option<Mutex<AccessLog>>,
    lookup_runs: Mutex<LookupRuns>,
    thread: Option<Thread<()>>,
}

impl Prefetcher {
    pub(crate) fn start(
        reader: &Arc<Reader>,
        threads: FillThreads,
        options: PrefetchOptions,
    ) -> io::Result<Self> {
        let (inbox, receiver) = sync_channel(MAX_QUEUED_MESSAGES);
        let shared = Arc::new(Shared::new(options.mode, inbox));
        let pages = Arc::<PageCaches>::default();
        let access_log = options.record.then(Mutex::default);
        // A replay skips spans that were read in the meantime.
        let is_tracking = options.mode != PrefetchMode::Off || options.replay.is_some();
        let tracker = AccessTracker::new(reader, threads, &shared, &pages, options);
        if reader.live_index.completed().is_none() {
            let shared = Arc::clone(&shared);
            let callback = Callback::new(move || shared.send(Message::Wake));
            reader.live_index.on_available(WaitFor::End, callback);
        }
        let is_over = Arc::<AtomicBool>::default();
        let ends = Arc::clone(&is_over);
        let thread = Thread::spawn("tarfs-follow", move || tracker.run(&receiver, &ends))?;
        Ok(Self {
            reader: Arc::clone(reader),
            shared,
            pages,
            is_over,
            is_tracking,
            access_log,
            lookup_runs: Mutex::default(),
            thread: Some(thread),
        })
    }

    pub(crate) fn report_read(&self, ino: Ino, offset: u64, len: u32) {
        if let Some(access_log) = &self.access_log {
            let size = |index: &Index| Some(index.entry(ino)?.size());
            let size = self.reader.live_index.read(size).ok().flatten();
            let size = size.unwrap_or_default();
            access_log.lock().add_read(ino, size, offset, len);
        }
        if !self.is_tracking {
            return;
        }
        let reads = self
            .shared
            .pending_reads
            .lock()
            .add(ReadEvent { ino, offset, len });
        if let Some(reads) = reads {
            self.shared.send(Message::Reads(reads));
        } else if self.shared.is_asleep.load(Ordering::SeqCst)
            && self.shared.is_asleep.swap(false, Ordering::SeqCst)
        {
            self.shared.send(Message::Wake);
        }
    }

    pub(crate) fn report_lookup(&self, ino: Ino) {
        if !self.is_tracking || self.pages.is_empty() {
            return;
        }
        let place = |index: LazyIndex| index.read(|index| index.listing_position(ino)).ok()?;
        let Some((directory, number)) = self.reader.live_index.completed().and_then(place) else {
            return;
        };
        if self.lookup_runs.lock().step(directory, number) {
            self.shared.send(Message::Names(ino));
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        // The order matters: the tracker counts a pending message before it takes pending reads.
        self.shared.pending_reads.lock().reads.is_empty()
            && self.shared.pending_messages.load(Ordering::SeqCst) == 0
            && self.shared.outstanding.load(Ordering::SeqCst) == 0
    }

    pub(crate) fn add_page_cache(&self, pages: Arc<dyn PageCache>) {
        if self.access_log.is_none() {
            self.pages.add(pages);
            self.shared.send(Message::Wake);
        }
    }

    pub(crate) fn accesses_since(&self, reads: u64) -> Option<(Vec<AccessedRange>, u64)> {
        self.access_log.as_ref()?.lock().ranges_since(reads)
    }

    pub(crate) fn progress(&self) -> PrefetchProgress {
        let shared = &self.shared;
        PrefetchProgress {
            mode: shared.mode,
            state: shared.state(),
            done_spans: shared.full.done(),
            total_spans: self.reader.live_index.lock().span_count().into(),
            replayed_spans: shared.replay.done(),
            replay_spans: shared.replay.total.load(Ordering::SeqCst),
        }
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.shared.send(Message::Wake);
        drop(self.thread.take());
    }
}
