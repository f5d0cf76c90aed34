//! The writer thread: writes queued spans, and evicts others to make room.

use std::io;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::OFlags;

use super::Shared;
use super::cache_dir;
use super::cache_file::CacheFile;
use super::write_queue::PendingWrite;
use crate::base::extent::{Extent, Plain};
use crate::base::shared_dir::SharedFile;

impl Shared {
    pub(super) fn run_writer(&self) {
        // The limit may be lower than before.
        if let Some(_lock) = self.cache_dir.lock_for_write() {
            self.free_space(0, !self.options.is_only_copy);
        }
        while let Some(item) = self.queue.next() {
            if self.problems.lock().failure.is_some() {
                continue;
            }
            if let Err(error) = self.write(&item) {
                let text = format!("cannot write the disk cache: {error}");
                tracing::warn!("{text}; the disk cache stores nothing more");
                self.problems.lock().failure = Some(text);
            }
        }
    }

    pub(super) fn write(&self, item: &PendingWrite) -> io::Result<()> {
        self.reopen_if_removed();
        let len = item.sparse.stored_bytes();
        let Some(_lock) = self.cache_dir.lock_for_write() else {
            if self.options.is_only_copy {
                return Err(ErrorKind::TimedOut.into());
            }
            // Other queued spans would fail to get the lock too, and their writers would wait for minutes.
            let cancelled = self.queue.cancel_waiting();
            for item in std::iter::once(item).chain(&cancelled) {
                self.record_skipped(item);
            }
            return Ok(());
        };
        if !self.free_space(len, item.may_evict) {
            self.report_full();
            return Ok(());
        }
        let file = Arc::clone(&self.current.lock().file);
        // A slow disk blocks no writer while the page cache accepts the bytes.
        let has_backlog = self.queue.has_backlog();
        if let Err(error) = file.write(&item.sparse, &item.bytes, has_backlog) {
            // Frees the blocks of a partly written span for other spans.
            file.punch_hole(item.sparse.extent());
            return Err(error);
        }
        self.options.stats.disk_cache_written_bytes.add(len);
        let (extent, cost) = (item.sparse.extent(), item.sparse.cost());
        self.held.lock().add(extent, cost, item.reads);
        // A span in the page cache would be read too fast.
        if !has_backlog && self.options.read_rate.needs_sample() {
            drop(self.read_measured(&file, &item.sparse));
        }
        Ok(())
    }

    /// Reopens the file by its name if it was removed: no reader finds its bytes, and no limit counts them.
    fn reopen_if_removed(&self) {
        let current = self.current.lock();
        if !current.is_published || self.options.is_only_copy || current.file.has_name() {
            return;
        }
        let name = current.file.name.clone();
        drop(current);
        let directory = self.cache_dir.directory.create();
        // Concurrent reads continue in the old file.
        if let Ok(file) =
            directory.and_then(|directory| CacheFile::open(&directory, &name, OFlags::CREATE))
        {
            file.set_recovery_cost(self.recovery_cost.load(Ordering::Relaxed));
            self.current.lock().file = Arc::new(file);
            self.held.lock().clear();
        }
    }

    /// Frees space for `needed` more bytes. An archive at its own limit evicts its own. Otherwise it evicts
    /// unused archives first, in their [order](cache_dir::in_eviction_order). With `may_evict` it then evicts
    /// from a larger archive in use, while this one is below its fair share, and last from this one.
    fn free_space(&self, needed: u64, may_evict: bool) -> bool {
        let file = Arc::clone(&self.current.lock().file);
        let excess = (file.held_bytes().saturating_add(needed)).saturating_sub(self.max_bytes);
        if excess > 0 && (!may_evict || self.evict_own(&file, excess) < excess) {
            return false;
        }
        let files = self.cache_dir.files().unwrap_or_default();
        let mut missing = self.cache_dir.bytes_to_free(&files, needed);
        if missing == 0 {
            return true;
        }
        let (ours, others): (Vec<_>, Vec<_>) =
            files.iter().partition(|listed| file.is_same_file(listed));
        let (used, unused): (Vec<_>, Vec<_>) =
            others.into_iter().partition(|info| info.is_in_use());
        let displaced = used.iter().chain(&ours).filter(|_| may_evict);
        let all = unused.iter().chain(displaced);
        if all.map(|info| info.held_bytes).sum::<u64>() < missing {
            return false;
        }
        let mut freed = 0;
        for info in cache_dir::in_eviction_order(unused) {
            if freed < missing {
                freed += self.evict(info, missing - freed);
            }
        }
        missing = missing.saturating_sub(freed);
        if missing > 0 && may_evict {
            let share = self.cache_dir.fair_share(&files, used.len() + 1);
            let own = file.held_bytes();
            let larger = used
                .iter()
                .filter(|info| cache_dir::can_evict_parts(info) && info.held_bytes > own);
            // The largest, unless others that have more than their share cost less.
            let largest = larger.max_by_key(|info| {
                let weighed = info.held_bytes / cache_dir::recovery_cost(info);
                let has_more = info.held_bytes > share;
                (has_more, if has_more { weighed } else { info.held_bytes })
            });
            freed = match largest {
                Some(largest) if own + needed <= share => self.evict(largest, missing),
                _ => 0,
            };
            missing = missing.saturating_sub(freed);
            if missing > 0 {
                self.report_full();
                missing = missing.saturating_sub(self.evict_own(&file, missing));
            }
        }
        missing == 0
    }

    /// Evicts `wanted` bytes of another archive.
    pub(super) fn evict(&self, other: &SharedFile, wanted: u64) -> u64 {
        let freed = cache_dir::evict(other, wanted);
        self.options.stats.disk_cache_evicted_bytes.add(freed);
        freed
    }

    /// Evicts `wanted` bytes of this archive: those not used since the file was opened, then the least [valuable](super::valued_extents).
    fn evict_own(&self, file: &CacheFile, wanted: u64) -> u64 {
        let mut freed = 0;
        let mut at = Plain(0);
        while freed < wanted
            && let Some(data) = file.next_data(at)
        {
            let unknown = self.held.lock().first_untracked(data);
            // Blocks on the edges, which known spans share, stay.
            let blocks = unknown.and_then(|unknown| file.whole_blocks(unknown));
            if let Some(blocks) = blocks {
                let len = blocks
                    .len()
                    .min(wanted - freed)
                    .next_multiple_of(super::cache_dir::EVICTION_STEP_BYTES);
                let part = Extent::with_len(blocks.start(), len.min(blocks.len()));
                freed += file.punch_hole(part);
                at = part.end();
            } else {
                at = unknown.map_or(data.end(), |unknown| unknown.end());
            }
        }
        while freed < wanted {
            let Some(least) = self.held.lock().pop_least_valuable() else {
                break;
            };
            freed += file.punch_hole(least);
        }
        self.options.stats.disk_cache_evicted_bytes.add(freed);
        freed
    }

    fn report_full(&self) {
        let mut problems = self.problems.lock();
        if !problems.is_full {
            problems.is_full = true;
            drop(problems);
            tracing::warn!("the disk cache is too small for the archive");
        }
    }
}
