//! Pushes the small files ahead of a sequential reader into the kernel's page cache.

use super::fill_workers::FillWorkers;
use super::options::PageCache;
use super::sequential::{FileRead, PushRange};
use crate::base::extent::Plain;
use crate::index::{Index, Ino};

/// Maximum length of a pushed file. For longer ones, the kernel's own read-ahead is as good.
const MAX_PUSHED_FILE_BYTES: u64 = 512 << 10;

/// Maximum number of entries that are examined for one window.
const MAX_WINDOW_ENTRIES: u32 = 1 << 16;

pub(super) struct PushJob {
    pub(super) stream: u64,
    push: PushRange,
    next: u32,
    steps: u32,
    /// Whether the marker file, which is not pushed, has been passed.
    is_marked: bool,
}

#[derive(PartialEq, Eq)]
pub(super) enum PushStatus {
    More,
    /// Bytes that it needs are in flight.
    Blocked,
    Done,
}

impl PushJob {
    /// Starts after `ino`, the file that stream number `stream` reads.
    pub(super) fn new(stream: u64, push: PushRange, ino: Ino) -> Self {
        Self {
            stream,
            push,
            next: ino.0.saturating_add(1),
            steps: 0,
            is_marked: false,
        }
    }

    pub(super) fn step(
        &mut self,
        index: &Index,
        pages: &dyn PageCache,
        reached: Plain,
        fill_workers: &FillWorkers,
    ) -> PushStatus {
        let (reader, ino) = (&fill_workers.reader, Ino(self.next));
        if ino > index.last_ino() || self.steps == MAX_WINDOW_ENTRIES {
            return PushStatus::Done;
        }
        let entry = index.entry(ino);
        let file =
            entry.and_then(|entry| Some((entry, FileRead::new(entry, 0, entry.size())?.file)));
        let Some((entry, file)) = file.filter(|(_, file)| file.start() >= self.push.extent.start())
        else {
            self.next_entry();
            return PushStatus::More;
        };
        if file.start() >= self.push.extent.end() {
            return PushStatus::Done;
        }
        let is_candidate = entry.size() <= MAX_PUSHED_FILE_BYTES && file.start() >= reached;
        if is_candidate {
            pages.prime_dentries(index, ino);
        }
        if !is_candidate || !pages.can_store(ino) {
            self.next_entry();
            return PushStatus::More;
        }
        if !self.is_marked && file.start() >= self.push.marker {
            self.is_marked = true;
            self.next_entry();
            return PushStatus::More;
        }
        let len = u32::try_from(entry.size()).unwrap_or(u32::MAX);
        let bytes = reader.read_cached(ino, 0, len);
        if bytes.is_none() && fill_workers.is_busy() {
            return PushStatus::Blocked;
        }
        self.next_entry();
        if let Some(bytes) = bytes
            && let Ok(stored) = pages.store(ino, 0, &bytes)
        {
            reader.stats.pushed_files.increment();
            reader.stats.pushed_bytes.add(stored);
        }
        PushStatus::More
    }

    fn next_entry(&mut self) {
        self.next = self.next.saturating_add(1);
        self.steps += 1;
    }
}
