//! State that the threads of prefetch share, and the messages to the tracker.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;

use super::options::{PrefetchMode, PrefetchState};
use crate::base::sync::Mutex;
use crate::index::Ino;

/// Number of pending reads at which they are sent to the tracker.
const MAX_PENDING_READS: usize = 16;

const MAX_PENDING_READ_BYTES: u64 = 128 << 10;

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) mode: PrefetchMode,
    pub(super) inbox: SyncSender<Message>,
    pub(super) pending_messages: AtomicU64,
    pub(super) pending_reads: Mutex<PendingReads>,
    /// Whether the tracker sleeps and must be woken to see them.
    pub(super) is_asleep: AtomicBool,
    pub(super) outstanding: AtomicU32,
    pub(super) full: SpanCounts,
    /// Whether [`PrefetchMode::All`] has queued all spans.
    pub(super) is_full_queued: AtomicBool,
    pub(super) replay: SpanCounts,
    /// Spans of a local archive that the disk cache skipped at first.
    pub(super) skipped: SpanCounts,
}

#[derive(Debug, Default)]
pub(super) struct SpanCounts {
    pub(super) should_wait_for_disk: bool,
    pub(super) total: AtomicU64,
    pub(super) queued: AtomicU64,
    pub(super) done: Arc<AtomicU64>,
    pub(super) outstanding: Arc<AtomicU32>,
}

#[derive(Debug)]
pub(super) enum Message {
    Reads(Vec<ReadEvent>),
    /// A run of lookups by name, and the last inode of it.
    Names(Ino),
    /// Spans were filled, reads are pending, or prefetch ends.
    Wake,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ReadEvent {
    pub(super) ino: Ino,
    pub(super) offset: u64,
    pub(super) len: u32,
}

/// Reads that the tracker gets together, because waking a thread costs more than answering a read.
#[derive(Debug, Default)]
pub(super) struct PendingReads {
    pub(super) reads: Vec<ReadEvent>,
    pub(super) bytes: u64,
}

impl PendingReads {
    /// Adds a read, and returns all reads when it is time to send them.
    pub(super) fn add(&mut self, read: ReadEvent) -> Option<Vec<ReadEvent>> {
        self.reads.push(read);
        self.bytes = self.bytes.saturating_add(read.len.into());
        if self.reads.len() < MAX_PENDING_READS && self.bytes < MAX_PENDING_READ_BYTES {
            return None;
        }
        self.bytes = 0;
        let next = Vec::with_capacity(MAX_PENDING_READS);
        Some(std::mem::replace(&mut self.reads, next))
    }

    pub(super) fn take(&mut self) -> Vec<ReadEvent> {
        self.bytes = 0;
        std::mem::take(&mut self.reads)
    }
}

impl Shared {
    pub(super) fn new(mode: PrefetchMode, inbox: SyncSender<Message>) -> Self {
        Self {
            mode,
            inbox,
            // Busy until the tracker has looked for the first time.
            pending_messages: AtomicU64::new(1),
            pending_reads: Mutex::default(),
            is_asleep: AtomicBool::default(),
            outstanding: AtomicU32::default(),
            full: SpanCounts::default(),
            is_full_queued: AtomicBool::default(),
            replay: SpanCounts::default(),
            skipped: SpanCounts {
                should_wait_for_disk: true,
                ..SpanCounts::default()
            },
        }
    }

    /// Queues `message` if there is room. Otherwise the receiver is awake anyway.
    pub(super) fn send(&self, message: Message) {
        self.pending_messages.fetch_add(1, Ordering::SeqCst);
        if self.inbox.try_send(message).is_err() {
            self.message_done();
        }
    }

    pub(super) fn message_done(&self) {
        self.pending_messages.fetch_sub(1, Ordering::SeqCst);
    }

    pub(super) fn state(&self) -> PrefetchState {
        let queued = self.full.queued.load(Ordering::SeqCst);
        let is_busy = self.full.outstanding.load(Ordering::SeqCst) > 0;
        if self.mode != PrefetchMode::All {
            PrefetchState::Off
        } else if is_busy || !self.is_full_queued.load(Ordering::SeqCst) {
            PrefetchState::Running
        } else if self.full.done() < queued {
            PrefetchState::Incomplete
        } else if queued < self.full.total.load(Ordering::SeqCst) {
            PrefetchState::Full
        } else {
            PrefetchState::Complete
        }
    }
}

impl SpanCounts {
    pub(super) fn done(&self) -> u64 {
        self.done.load(Ordering::SeqCst)
    }
}
