//! Decoded spans on disk: what would cost more to make again than to read back.
//!
//! One sparse file for each archive: plain byte *n* lies at file offset *n*, and whatever is not
//! kept is a hole. There is no table of contents, because none is needed: a reader knows the
//! checksums of each span's blocks from the index, so a hole, a torn write and a foreign file are simply not what it
//! looks for. For the same reason any number of processes may write one file, punch holes into
//! it, or be killed at any moment.

mod file;
mod order;
mod queue;
mod shelf;
mod uncached;

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;

use crate::base::extent::{Extent, Plain};
use crate::base::free_list::FreeList;
use crate::base::random_reads::Wait;
use crate::base::stats::Stats;
use crate::base::thread::Thread;
use file::SpoolFile;
use order::Order;
use queue::{Item, Queue};

pub use queue::Patience;
pub use shelf::{Shelf, Spooled};

/// The spans of one archive on disk. What is kept is written by a thread of its own, and can be
/// read from the moment it was taken.
#[derive(Debug)]
pub struct Spool {
    shared: Arc<Shared>,
    /// Ends when the queue is closed; always there but while dropping.
    writer: Option<Thread<()>>,
}

/// How a spool is kept.
#[derive(Clone, Debug)]
pub struct SpoolOptions {
    /// Bytes that may wait to be written.
    pub queue_bytes: u64,
    /// Whether its bytes cannot be had again, so that no part of it may go while it is in use.
    pub is_only_copy: bool,
    /// Where the memory of what is read comes from.
    pub free_list: FreeList,
    /// What counts.
    pub stats: Arc<Stats>,
}

/// Why there is no spool.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the disk cache {path}")]
pub struct SpoolError {
    /// Which file.
    path: String,
    /// Why.
    #[source]
    source: io::Error,
}

/// How much disk is used at this moment, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SpoolUse {
    /// By this spool.
    pub held_bytes: u64,
    /// By all spools of the directory.
    pub all_bytes: u64,
    /// What these may take.
    pub limit_bytes: u64,
}

/// Skipped spans that are remembered, at the most.
const MAX_SKIPPED: usize = 1 << 16;

/// A use is told to other processes when the last one was told so long ago.
const USE_TOLD_EVERY: Duration = Duration::from_mins(1);

#[derive(Debug)]
struct Shared {
    shelf: Shelf,
    options: SpoolOptions,
    queue: Queue,
    place: Mutex<Place>,
    order: Mutex<Order>,
    trouble: Mutex<Trouble>,
    /// Where spans lie that were not taken because the disk was too slow, in the order of time.
    skipped: Mutex<VecDeque<Extent<Plain>>>,
}

/// Where the spool is.
#[derive(Debug)]
struct Place {
    file: Arc<SpoolFile>,
    /// Whether the file has the name by which later mounts find it.
    published: bool,
    use_told: Option<Instant>,
}

/// Why something is not in the spool that might be.
#[derive(Clone, Debug, Default)]
struct Trouble {
    /// The disk said no; nothing is written any more.
    failure: Option<String>,
    /// There was no room, or something had to go for other spans.
    no_room: bool,
}

impl Spool {
    /// A new spool on `shelf` that disappears when dropped, unless published. What dead processes
    /// have left of theirs is removed.
    ///
    /// # Errors
    /// When the file cannot be made.
    pub fn create(shelf: Shelf, options: SpoolOptions) -> Result<Self, SpoolError> {
        shelf.clean();
        let file = shelf
            .made()
            .and_then(|directory| SpoolFile::create(&directory));
        Self::start(shelf, options, file, None)
    }

    /// The spool of `content` that other mounts have published, or an empty one.
    ///
    /// # Errors
    /// When there is none and it cannot be made.
    pub fn open(shelf: Shelf, content: &str, options: SpoolOptions) -> Result<Self, SpoolError> {
        shelf.clean();
        let name = name(content, &options);
        let directory = shelf.made();
        let file = directory.and_then(|directory| SpoolFile::open(&directory, &name, true));
        Self::start(shelf, options, file, Some(&name))
    }

    fn start(
        shelf: Shelf,
        options: SpoolOptions,
        file: io::Result<SpoolFile>,
        published: Option<&str>,
    ) -> Result<Self, SpoolError> {
        let path = shelf.path().join(published.unwrap_or_default());
        let failed = |source| SpoolError {
            path: path.display().to_string(),
            source,
        };
        let shared = Arc::new(Shared {
            shelf,
            queue: Queue::new(options.queue_bytes),
            options,
            place: Mutex::new(Place {
                file: Arc::new(file.map_err(failed)?),
                published: published.is_some(),
                use_told: None,
            }),
            order: Mutex::default(),
            trouble: Mutex::default(),
            skipped: Mutex::default(),
        });
        let writer = Thread::spawn("tarfs-cache", {
            let shared = Arc::clone(&shared);
            move || shared.write_all()
        });
        Ok(Self {
            shared,
            writer: Some(writer.map_err(failed)?),
        })
    }

    /// Keeps a span that goes by, if there is room on disk, and room in the queue within the
    /// patience.
    pub fn keep(&self, extent: Extent<Plain>, bytes: Bytes, patience: Patience) {
        self.push(Item::new(extent, bytes), patience);
    }

    /// As [`Spool::keep`] for a span that was skipped before: it is not remembered as skipped again.
    pub fn keep_skipped(&self, extent: Extent<Plain>, bytes: Bytes, patience: Patience) {
        let item = Item {
            is_retry: true,
            ..Item::new(extent, bytes)
        };
        self.push(item, patience);
    }

    /// As [`Spool::keep`] for a span that was wanted: those that were wanted longest ago make
    /// room for it.
    pub fn keep_wanted(&self, extent: Extent<Plain>, bytes: Bytes, patience: Patience) {
        let item = Item {
            displaces: !self.shared.options.is_only_copy,
            ..Item::new(extent, bytes)
        };
        self.push(item, patience);
    }

    fn push(&self, item: Item, patience: Patience) {
        if self.shared.trouble().failure.is_some() {
            return;
        }
        let skipped = (item.extent, item.is_retry);
        if !self.shared.queue.push(item, patience) {
            self.shared.skipped([skipped]);
        }
    }

    /// Where up to `max` spans lie that were not taken because the disk was too slow; each is named once.
    /// None when there is no room for them either.
    pub fn take_skipped(&self, max: usize) -> Vec<Extent<Plain>> {
        let is_full = {
            let trouble = self.shared.trouble();
            trouble.failure.is_some() || trouble.no_room
        };
        let mut skipped = self.shared.lock_skipped();
        if is_full {
            skipped.clear();
        }
        let taken = skipped.len().min(max);
        skipped.drain(..taken).collect()
    }

    /// Whether the spans that wait to be written fill more than half of the queue.
    pub fn is_busy(&self) -> bool {
        self.shared.queue.is_half_full()
    }

    /// The plain bytes of the span at `extent` as the spool has them; `None` when not all of them are kept. The caller verifies them, and says so by
    /// [`Spool::used`].
    pub fn read(&self, extent: Extent<Plain>) -> Option<Bytes> {
        if let Some(bytes) = self.shared.queue.find(extent) {
            return Some(bytes);
        }
        let file = Arc::clone(&self.shared.place().file);
        let memory = file.read(extent, &self.shared.options.free_list)?;
        Some(memory.freeze())
    }

    /// The plain bytes of `part` of a span, as the spool has them: anything where it has them not. `None`
    /// when they cannot be read, and with [`Wait::Never`] when a disk would have to be waited for. The
    /// caller verifies them.
    pub fn read_part(&self, part: Extent<Plain>, wait: Wait) -> Option<Bytes> {
        if let Some(bytes) = self.shared.queue.find_part(part) {
            return Some(bytes);
        }
        let file = Arc::clone(&self.shared.place().file);
        let memory = file.read_part(part, &self.shared.options.free_list, wait)?;
        Some(memory.freeze())
    }

    /// Whether all bytes of `extent` were written or wait for it; they may be damaged.
    pub fn covers(&self, extent: Extent<Plain>) -> bool {
        if self.shared.queue.find_part(extent).is_some() {
            return true;
        }
        let file = Arc::clone(&self.shared.place().file);
        file.covers(extent)
    }

    /// The span at `extent` is good and was wanted: it goes later than others.
    pub fn used(&self, extent: Extent<Plain>) {
        self.shared.order().used(extent);
        let mut place = self.shared.place();
        let is_told = |told: Instant| told.elapsed() < USE_TOLD_EVERY;
        if !place.use_told.is_some_and(is_told) {
            place.use_told = Some(Instant::now());
            let file = Arc::clone(&place.file);
            drop(place);
            file.set_used(SystemTime::now());
        }
    }

    /// Waits until all that was taken is written or given up.
    pub fn flush(&self) {
        self.shared.queue.drain();
    }

    /// Gives the spool the name by which later mounts of the same `content` find it. When there is
    /// one that holds more it becomes this one.
    ///
    /// # Errors
    /// When it cannot be renamed.
    pub fn publish(&self, content: &str) -> io::Result<()> {
        let name = name(content, &self.shared.options);
        let ours = Arc::clone(&self.shared.place().file);
        let found = self.shared.shelf.found();
        let other = found.and_then(|directory| SpoolFile::open(&directory, &name, false));
        let fuller = other.ok().filter(|other| {
            !self.shared.options.is_only_copy && other.held_bytes() > ours.held_bytes()
        });
        let file = if let Some(fuller) = fuller {
            ours.remove();
            self.shared.order().clear();
            fuller
        } else {
            ours.renamed(&name)?
        };
        let mut place = self.shared.place();
        place.file = Arc::new(file);
        place.published = true;
        Ok(())
    }

    /// Why something is not kept that might be, for the user.
    pub fn trouble(&self) -> Option<String> {
        let trouble = self.shared.trouble().clone();
        if trouble.failure.is_some() || !trouble.no_room {
            return trouble.failure;
        }
        let (_, limit) = self.shared.shelf.held_and_limit();
        Some(format!(
            "all archives together may take {limit} bytes of disk"
        ))
    }

    /// Whether so many bytes, the whole archive's, are on disk or on their way there.
    pub fn holds(&self, bytes: u64) -> bool {
        let held_bytes = self.shared.place().file.held_bytes();
        held_bytes.saturating_add(self.shared.options.queue_bytes) >= bytes
    }

    /// How much disk is used.
    pub fn disk_use(&self) -> SpoolUse {
        let (all_bytes, limit_bytes) = self.shared.shelf.held_and_limit();
        SpoolUse {
            held_bytes: self.shared.place().file.held_bytes(),
            all_bytes,
            limit_bytes,
        }
    }
}

impl Drop for Spool {
    /// Writes what waits: it was hard to come by, and is little.
    fn drop(&mut self) {
        self.shared.queue.close();
        drop(self.writer.take());
        let place = self.shared.place();
        let is_empty = place.file.held_bytes() == 0;
        // Not what another process has open or opens now, nor what took its name.
        let is_useless = is_empty && place.file.is_ours_alone() && place.file.has_name();
        if !place.published || is_useless {
            place.file.remove();
        }
    }
}

/// The file name of the spool of `content`.
fn name(content: &str, options: &SpoolOptions) -> String {
    let ending = if options.is_only_copy {
        shelf::WHOLE
    } else {
        shelf::PART
    };
    format!("{content}{ending}")
}

impl Shared {
    /// The writer's work.
    fn write_all(&self) {
        // A limit may be lower than it was.
        if let Some(_turn) = self.shelf.turn() {
            self.make_room(0, !self.options.is_only_copy);
        }
        while let Some(item) = self.queue.next() {
            if self.trouble().failure.is_some() {
                continue;
            }
            match self.write(&item) {
                Ok(()) => {}
                Err(error) => {
                    let text = format!("cannot write the disk cache: {error}");
                    tracing::warn!("{text}; nothing more is kept on disk");
                    self.trouble().failure = Some(text);
                }
            }
        }
    }

    fn write(&self, item: &Item) -> io::Result<()> {
        self.find_again();
        let len = item.bytes.len() as u64;
        let Some(_turn) = self.shelf.turn() else {
            if self.options.is_only_copy {
                return Err(ErrorKind::TimedOut.into());
            }
            // Nor would the others get one: whoever waits for them would do so for minutes.
            let given_up = self.queue.give_up();
            let items = std::iter::once(item).chain(&given_up);
            self.skipped(items.map(|item| (item.extent, item.is_retry)));
            return Ok(());
        };
        if !self.make_room(len, item.displaces) {
            self.lacks_room();
            return Ok(());
        }
        let file = Arc::clone(&self.place().file);
        // A slow disk holds nobody up as long as the page cache takes its part.
        let is_behind = self.queue.is_behind();
        if let Err(error) = file.write(item.extent.start(), &item.bytes, is_behind) {
            // Others may need what a part of a span would take.
            file.punch(item.extent);
            return Err(error);
        }
        self.options.stats.disk_cache_written_bytes.add(len);
        self.order().used(item.extent);
        Ok(())
    }

    /// Looks for the file by its name when it has gone from the directory: what is written to it
    /// then is found by no one else, and counts against no limit.
    fn find_again(&self) {
        let place = self.place();
        if !place.published || self.options.is_only_copy || place.file.has_name() {
            return;
        }
        let name = place.file.name().to_owned();
        drop(place);
        let directory = self.shelf.made();
        // Who reads meanwhile does so from the old one.
        if let Ok(file) = directory.and_then(|directory| SpoolFile::open(&directory, &name, true)) {
            self.place().file = Arc::new(file);
            self.order().clear();
        }
    }

    /// Sees to it that `needed` bytes more can be written. Archives that no one uses give way
    /// first, then other spans of this one, if they may; or what others use, as long as this one
    /// has less than its share.
    fn make_room(&self, needed: u64, displaces: bool) -> bool {
        let spools = self.shelf.spools();
        let mut missing = self.shelf.missing(&spools, needed);
        if missing == 0 {
            return true;
        }
        let file = Arc::clone(&self.place().file);
        let (ours, others): (Vec<_>, Vec<_>) = spools.iter().partition(|spool| spool.is(&file));
        let (used, unused): (Vec<_>, Vec<_>) =
            others.into_iter().partition(|spool| spool.is_in_use());
        let displaced = used.iter().chain(&ours).filter(|_| displaces);
        let all = unused.iter().chain(displaced);
        if all.map(|spool| spool.held_bytes).sum::<u64>() < missing {
            // Whatever went, it would not be enough.
            return false;
        }
        let mut freed = 0;
        for spool in &unused {
            if freed < missing {
                freed += spool.shrink(missing - freed);
            }
        }
        missing = missing.saturating_sub(freed);
        if missing > 0 && displaces {
            let share = self.shelf.share(&spools, used.len() + 1);
            let parts = used.iter().filter(|spool| spool.may_lose_parts());
            let largest = parts.max_by_key(|spool| spool.held_bytes);
            let own = file.held_bytes();
            freed = match largest {
                Some(largest) if own + needed <= share && largest.held_bytes > own => {
                    largest.shrink(missing)
                }
                _ => 0,
            };
            missing = missing.saturating_sub(freed);
            if missing > 0 {
                self.lacks_room();
                missing = missing.saturating_sub(self.evict(&file, missing));
            }
        }
        missing == 0
    }

    /// Gives `wanted` bytes of the own spool back, if there are so many: first what no one has
    /// used since it was opened, then what was used longest ago.
    fn evict(&self, file: &SpoolFile, wanted: u64) -> u64 {
        let mut freed = 0;
        let mut at = Plain(0);
        while freed < wanted
            && let Some(data) = file.next_data(at)
        {
            let unknown = self.order().first_unknown(data);
            // Between two known spans the edges of blocks stay.
            let blocks = unknown.and_then(|unknown| file.whole_blocks(unknown));
            if let Some(blocks) = blocks {
                let len = blocks
                    .len()
                    .min(wanted - freed)
                    .next_multiple_of(shelf::STEP);
                let part = Extent::with_len(blocks.start(), len.min(blocks.len()));
                freed += file.punch(part);
                at = part.end();
            } else {
                at = unknown.map_or(data.end(), |unknown| unknown.end());
            }
        }
        while freed < wanted {
            let Some(oldest) = self.order().take_oldest() else {
                break;
            };
            freed += file.punch(oldest);
        }
        self.options.stats.disk_cache_evicted_bytes.add(freed);
        freed
    }

    /// Counts spans that are not written because the disk is too slow, and remembers where they lie, unless
    /// they were skipped before.
    fn skipped(&self, spans: impl IntoIterator<Item = (Extent<Plain>, bool)>) {
        let mut skipped = self.lock_skipped();
        for (extent, is_retry) in spans {
            self.options.stats.disk_cache_skipped_spans.increment();
            if !is_retry && skipped.len() < MAX_SKIPPED {
                skipped.push_back(extent);
            }
        }
    }

    fn lock_skipped(&self) -> MutexGuard<'_, VecDeque<Extent<Plain>>> {
        self.skipped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lacks_room(&self) {
        let mut trouble = self.trouble();
        if !trouble.no_room {
            trouble.no_room = true;
            drop(trouble);
            tracing::warn!("the archive needs more disk than the disk cache may take");
        }
    }

    fn place(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn order(&self) -> MutexGuard<'_, Order> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn trouble(&self) -> MutexGuard<'_, Trouble> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const SPAN: u64 = 256 << 10;

    /// A directory where files take no more than their bytes do: a disk may add records, the more
    /// the worse its free space is scattered.
    pub(super) fn directory() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").expect("a directory")
    }

    /// For so many spans.
    fn shelf(directory: &Path, spans: u64) -> Shelf {
        Shelf::new(directory.to_owned(), Some(spans * SPAN + shelf::MARGIN))
    }

    fn options() -> SpoolOptions {
        SpoolOptions {
            queue_bytes: 4 << 20,
            is_only_copy: false,
            free_list: FreeList::new(0),
            stats: Arc::default(),
        }
    }

    fn only_copy() -> SpoolOptions {
        SpoolOptions {
            is_only_copy: true,
            ..options()
        }
    }

    fn open(shelf: &Shelf, content: &str) -> Spool {
        Spool::open(shelf.clone(), content, options()).expect("a spool")
    }

    fn extent(number: u64) -> Extent<Plain> {
        Extent::with_len(Plain(number * SPAN), SPAN)
    }

    fn bytes(number: u64) -> Bytes {
        let byte = u8::try_from(number % 255 + 1).expect("small");
        vec![byte; usize::try_from(SPAN).expect("small")].into()
    }

    /// Keeps these spans as reads do, and waits until they are written.
    fn want(spool: &Spool, numbers: impl IntoIterator<Item = u64>) {
        for number in numbers {
            spool.keep_wanted(extent(number), bytes(number), Patience::Endless);
        }
        spool.flush();
    }

    /// Of the first spans those that are there and whole.
    fn kept(spool: &Spool) -> Vec<u64> {
        let is_kept = |number: &u64| spool.read(extent(*number)) == Some(bytes(*number));
        (0..20).filter(is_kept).collect()
    }

    #[test]
    fn what_is_kept_is_there_at_once_and_for_the_next_one() {
        let directory = directory();
        let shelf = shelf(directory.path(), 100);
        let spool = open(&shelf, "a");
        for number in 0..10 {
            spool.keep(extent(number), bytes(number), Patience::No);
            assert_eq!(spool.read(extent(number)), Some(bytes(number)));
        }
        drop(spool);
        let spool = open(&shelf, "a");
        assert_eq!(kept(&spool), (0..10).collect::<Vec<_>>());
        assert_eq!(spool.trouble(), None);
        let expected = SpoolUse {
            held_bytes: 10 * SPAN,
            all_bytes: 10 * SPAN,
            limit_bytes: 100 * SPAN + shelf::MARGIN,
        };
        assert_eq!(spool.disk_use(), expected);
    }

    #[test]
    fn what_was_read_longest_ago_makes_room_for_what_is_read() {
        let directory = directory();
        let shelf = shelf(directory.path(), 4);
        let spool = open(&shelf, "a");
        want(&spool, 0..4);
        spool.used(extent(0));
        want(&spool, 4..6);
        assert_eq!(kept(&spool), [0, 3, 4, 5]);
        assert_eq!(spool.disk_use().held_bytes, 4 * SPAN);
        assert!(spool.trouble().is_some());
        assert_eq!(
            spool.shared.options.stats.disk_cache_evicted_bytes.get(),
            2 * SPAN
        );
        drop(spool);
        // What an earlier mount has left counts as older than anything used since.
        let spool = open(&shelf, "a");
        spool.used(extent(0));
        want(&spool, [8]);
        assert_eq!(kept(&spool), [0, 4, 5, 8]);
        want(&spool, [9, 10, 11]);
        assert_eq!(kept(&spool), [8, 9, 10, 11]);
    }

    #[test]
    fn what_goes_by_displaces_nothing() {
        let directory = directory();
        let shelf = shelf(directory.path(), 4);
        let spool = open(&shelf, "a");
        for number in 0..6 {
            spool.keep(extent(number), bytes(number), Patience::Endless);
        }
        spool.flush();
        assert_eq!(kept(&spool), [0, 1, 2, 3]);
        let trouble = spool.trouble().expect("no room");
        assert!(trouble.contains("1114112 bytes"), "{trouble}");
    }

    #[test]
    fn archives_that_no_one_uses_make_room_first_and_the_oldest_of_them() {
        let directory = directory();
        let shelf = shelf(directory.path(), 6);
        for (content, minutes) in [("old", 2), ("older", 3), ("new", 1)] {
            let spool = open(&shelf, content);
            want(&spool, 0..2);
            let file = Arc::clone(&spool.shared.place().file);
            drop(spool);
            file.set_used(SystemTime::now() - Duration::from_mins(minutes));
        }
        let spool = open(&shelf, "a");
        want(&spool, 0..3);
        assert_eq!(kept(&spool), [0, 1, 2]);
        assert_eq!(spool.trouble(), None);
        assert!(!directory.path().join("disk-cache/older.data").exists());
        assert_eq!(kept(&open(&shelf, "old")), [1]);
        assert_eq!(kept(&open(&shelf, "new")), [0, 1]);
    }

    #[test]
    fn archives_in_use_share_what_there_is() {
        let directory = directory();
        let shelf = shelf(directory.path(), 8);
        let first = open(&shelf, "first");
        want(&first, 0..8);
        let second = open(&shelf, "second");
        want(&second, 0..10);
        assert_eq!(kept(&second), [6, 7, 8, 9]);
        assert_eq!(kept(&first), [4, 5, 6, 7]);
        want(&first, 10..16);
        assert_eq!(kept(&second), [6, 7, 8, 9]);
        assert_eq!(kept(&first), [12, 13, 14, 15]);
        assert_eq!(first.disk_use().all_bytes, 8 * SPAN);
    }

    #[test]
    fn one_archive_is_shared_by_all_who_use_it() {
        let directory = directory();
        let shelf = shelf(directory.path(), 8);
        let spools = [open(&shelf, "a"), open(&shelf, "a")];
        want(&spools[0], 0..4);
        want(&spools[1], 2..6);
        for spool in &spools {
            assert_eq!(kept(spool), (0..6).collect::<Vec<_>>());
        }
        want(&spools[0], 10..16);
        for spool in &spools {
            assert_eq!(kept(spool).len(), 8);
            assert_eq!(spool.disk_use().held_bytes, 8 * SPAN);
        }
    }

    #[test]
    fn the_only_copy_stays_whole_while_it_is_in_use() {
        let directory = directory();
        let shelf = shelf(directory.path(), 4);
        let copy = Spool::create(shelf.clone(), only_copy()).expect("a spool");
        for number in 0..3 {
            copy.keep(extent(number), bytes(number), Patience::Endless);
        }
        copy.flush();
        let other = open(&shelf, "other");
        want(&other, 0..3);
        assert_eq!(kept(&other), [2]);
        copy.publish("a").expect("renamed");
        want(&other, 3..6);
        assert_eq!(kept(&other), [5]);
        assert_eq!(kept(&copy), [0, 1, 2]);
        copy.keep(extent(9), bytes(9), Patience::Endless);
        copy.flush();
        assert!(copy.trouble().is_some(), "not at its own expense");
        assert_eq!(kept(&copy), [0, 1, 2]);
        drop(copy);
        want(&other, 6..8);
        assert_eq!(kept(&other), [5, 6, 7], "all of it goes at once");
    }

    #[test]
    fn a_limit_that_is_lower_now_is_kept_from_the_beginning() {
        let directory = directory();
        want(&open(&shelf(directory.path(), 10), "a"), 0..10);
        let spool = open(&shelf(directory.path(), 3), "a");
        want(&spool, []);
        drop(spool);
        let spool = open(&shelf(directory.path(), 3), "a");
        assert_eq!(kept(&spool), [7, 8, 9]);
    }

    #[test]
    fn only_a_published_spool_with_something_in_it_outlives_its_owner() {
        let directory = directory();
        let shelf = shelf(directory.path(), 10);
        let spool = Spool::create(shelf.clone(), options()).expect("a spool");
        want(&spool, [0]);
        drop(spool);
        drop(open(&shelf, "empty"));
        assert!(shelf.spools().is_empty());

        let spool = Spool::create(shelf.clone(), options()).expect("a spool");
        want(&spool, [0]);
        spool.publish("known").expect("renamed");
        want(&spool, [1]);
        drop(spool);
        assert_eq!(kept(&open(&shelf, "known")), [0, 1]);
    }

    #[test]
    fn of_two_spools_of_one_archive_the_fuller_one_stays() {
        let directory = directory();
        let shelf = shelf(directory.path(), 100);
        let made = |spans| {
            let spool = Spool::create(shelf.clone(), options()).expect("a spool");
            want(&spool, 0..spans);
            spool
        };
        let (less, more, least) = (made(2), made(5), made(1));
        for spool in [&less, &more, &least] {
            spool.publish("a").expect("renamed");
        }
        assert_eq!(kept(&least), [0, 1, 2, 3, 4], "the other one is better");
        // Whose file was replaced goes on with the other one as soon as it writes.
        want(&less, [7]);
        for spool in [&less, &more, &least] {
            assert_eq!(kept(spool), [0, 1, 2, 3, 4, 7]);
        }
        assert_eq!(shelf.spools().len(), 1);
    }

    #[test]
    fn deleted_disk_cache_file_is_begun_again() {
        let directory = directory();
        let shelf = shelf(directory.path(), 100);
        let spool = open(&shelf, "a");
        want(&spool, 0..2);
        std::fs::remove_file(directory.path().join("disk-cache/a.data")).expect("there");
        assert_eq!(kept(&spool), [0, 1], "still open");
        want(&spool, 2..4);
        drop(spool);
        assert_eq!(kept(&open(&shelf, "a")), [2, 3]);
    }

    #[test]
    fn a_turn_that_does_not_come_is_waited_for_once() {
        let directory = directory();
        let shelf = shelf(directory.path(), 100);
        let spool = open(&shelf, "a");
        want(&spool, [0]);
        let turn = shelf.turn().expect("no one writes");
        for number in 1..9 {
            spool.keep_wanted(extent(number), bytes(number), Patience::No);
        }
        let skipped = &spool.shared.options.stats.disk_cache_skipped_spans;
        while skipped.get() == 0 {
            std::thread::yield_now();
        }
        drop(turn);
        spool.flush();
        assert_eq!(skipped.get(), 8);
        want(&spool, [9]);
        assert_eq!(kept(&spool), [0, 9]);
    }

    #[test]
    fn what_dead_processes_left_unfinished_is_removed() {
        let directory = directory();
        let shelf = shelf(directory.path(), 100);
        let living = Spool::create(shelf.clone(), options()).expect("a spool");
        want(&living, [0]);
        std::fs::write(directory.path().join("disk-cache/.1-0.data"), b"left").expect("written");
        drop(open(&shelf, "a"));
        assert!(!directory.path().join("disk-cache/.1-0.data").exists());
        living.publish("b").expect("still there");
        assert_eq!(kept(&living), [0]);
    }
}
