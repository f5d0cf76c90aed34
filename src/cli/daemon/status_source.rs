//! The archive's part of a mount's status, for one archive or several layers.

use std::sync::Arc;

use super::control_socket::{DiskCacheUsage, IndexState, MemoryUse, Phase, PrefetchStatus};
use super::prefetch::NotesFn;
use tarfs::archive::{Archive, PrefetchMode, PrefetchProgress, PrefetchState};
use tarfs::base::error_chain::error_chain;
use tarfs::index::Index;
use tarfs::layers::LayeredArchive;

/// Source of an archive's part of a status, queried for each status.
pub(crate) trait StatusSource {
    /// Returns notes about degraded operation.
    ///
    /// For example, reads decode from the start because the disk cache was lost.
    fn notes(&self) -> Vec<String>;

    /// Returns the progress of the index. Also called when the scan ends.
    fn index(&self) -> IndexState;

    /// Returns the members that are damaged or missing from the tree.
    fn damage(&self) -> Damage;

    /// Returns the use of memory.
    fn memory(&self) -> MemoryUse;

    /// Returns the use of disk.
    fn disk_cache(&self) -> Option<DiskCacheUsage>;

    /// Returns the progress of the prefetch.
    fn prefetch(&self) -> PrefetchStatus;
}

/// Maximum number of damaged members that a status names.
const MAX_NAMED_DAMAGED: usize = 10;

/// Members that are damaged or missing from the tree.
pub(crate) struct Damage {
    /// Their number.
    pub members: u64,
    /// The first ones, one per line.
    pub named: Vec<String>,
}

/// Status of one archive.
pub(crate) struct ArchiveStatus {
    /// The archive.
    pub archive: Arc<Archive>,
    /// Whether the disk cache is enabled.
    pub has_disk_cache: bool,
    /// Notes about the parts of prefetching that are not available.
    pub prefetch_notes: NotesFn,
}

/// Status of several layers as one tree.
pub(crate) struct LayeredStatus {
    /// The layers.
    pub stack: Arc<LayeredArchive>,
    /// Whether the disk cache is enabled.
    pub has_disk_cache: bool,
}

impl StatusSource for ArchiveStatus {
    fn notes(&self) -> Vec<String> {
        let mut notes = notes(&self.archive, self.has_disk_cache);
        notes.extend((self.prefetch_notes)());
        notes
    }

    fn index(&self) -> IndexState {
        let archive = &self.archive;
        let failure = archive.failure();
        let phase = match (&failure, archive.index().is_complete()) {
            (Some(_), _) => Phase::Failed,
            (None, true) => Phase::Complete,
            (None, false) => Phase::Scanning,
        };
        IndexState {
            phase,
            scanned_bytes: archive.stats().scanned_packed_bytes.get(),
            of_bytes: archive.source().fingerprint().len,
            failure: failure.map(|failure| error_chain(&*failure)),
        }
    }

    fn damage(&self) -> Damage {
        damage(&self.archive.index())
    }

    fn memory(&self) -> MemoryUse {
        memory_use(&self.archive)
    }

    fn disk_cache(&self) -> Option<DiskCacheUsage> {
        disk_cache_use(&self.archive)
    }

    fn prefetch(&self) -> PrefetchStatus {
        let progress = self.archive.prefetch_progress();
        progress.map(prefetch_status).unwrap_or_default()
    }
}

impl StatusSource for LayeredStatus {
    fn notes(&self) -> Vec<String> {
        let mut all = Vec::new();
        for layer in self.stack.layers() {
            let location = layer.source().location();
            let of_layer = notes(layer, self.has_disk_cache).into_iter();
            all.extend(of_layer.map(|note| format!("{location}: {note}")));
        }
        all
    }

    /// The index was complete before the mount.
    fn index(&self) -> IndexState {
        let layers = self.stack.layers();
        let lens = layers.iter().map(|layer| layer.source().fingerprint().len);
        // All layers share one set of counters.
        let counted = layers.first().map(|layer| layer.stats());
        IndexState {
            phase: Phase::Complete,
            scanned_bytes: counted.map_or(0, |stats| stats.scanned_packed_bytes.get()),
            of_bytes: lens.sum(),
            failure: None,
        }
    }

    fn damage(&self) -> Damage {
        damage(self.stack.index())
    }

    /// The layers share all memory except that of their indexes.
    fn memory(&self) -> MemoryUse {
        let layers = self.stack.layers();
        let indexes = layers.iter().map(|layer| layer.memory_use().index_bytes);
        let shared = layers.first().map(|layer| memory_use(layer));
        MemoryUse {
            index_bytes: indexes.sum::<u64>() + self.stack.memory_bytes(),
            ..shared.unwrap_or_default()
        }
    }

    fn disk_cache(&self) -> Option<DiskCacheUsage> {
        let uses = self
            .stack
            .layers()
            .iter()
            .filter_map(|layer| disk_cache_use(layer));
        uses.reduce(|one, other| DiskCacheUsage {
            held_bytes: one.held_bytes + other.held_bytes,
            // Each layer may have seen the total at a different time.
            all_bytes: one.all_bytes.max(other.all_bytes),
            limit_bytes: one.limit_bytes,
        })
    }

    fn prefetch(&self) -> PrefetchStatus {
        let layers = self.stack.layers().iter();
        let sum = layers
            .filter_map(|layer| layer.prefetch_progress())
            .reduce(|one, other| PrefetchProgress {
                mode: one.mode,
                state: one.state.min(other.state),
                done_spans: one.done_spans + other.done_spans,
                total_spans: one.total_spans + other.total_spans,
                // A profile exists only for a single archive.
                replayed_spans: 0,
                replay_spans: 0,
            });
        sum.map(prefetch_status).unwrap_or_default()
    }
}

/// Returns notes about degraded reads of an archive.
fn notes(archive: &Archive, has_disk_cache: bool) -> Vec<String> {
    let mut notes = archive.notes();
    notes.extend(archive.disk_cache_problem());
    let doubt = archive.source().fingerprint().doubt();
    notes.extend(doubt.map(|doubt| {
        format!(
            "the version of the archive cannot be proven: {doubt}; a saved index is compared with \
             samples of the archive, and decoded data of earlier mounts is not used"
        )
    }));
    if !has_disk_cache && archive.has_unseekable_spans() {
        notes.push(
            "parts of the stream cannot be decoded from the middle: without a disk cache \
             (--no-disk-cache) reads there decode from the start of their frame"
                .to_owned(),
        );
    }
    notes
}

fn damage(index: &Index) -> Damage {
    let named = index.problems().iter().take(MAX_NAMED_DAMAGED);
    Damage {
        members: index.problem_count(),
        named: named.map(ToString::to_string).collect(),
    }
}

fn memory_use(archive: &Archive) -> MemoryUse {
    let used = archive.memory_use();
    MemoryUse {
        budget_bytes: used.budget_bytes,
        spans_bytes: used.spans_bytes,
        reads_bytes: used.reads_bytes,
        decoders_bytes: used.decoders_bytes,
        index_bytes: used.index_bytes,
    }
}

fn disk_cache_use(archive: &Archive) -> Option<DiskCacheUsage> {
    let used = archive.disk_cache_use()?;
    Some(DiskCacheUsage {
        held_bytes: used.held_bytes,
        all_bytes: used.all_bytes,
        limit_bytes: used.limit_bytes,
    })
}

fn prefetch_status(progress: PrefetchProgress) -> PrefetchStatus {
    let what = match progress.mode {
        PrefetchMode::Off => "none",
        PrefetchMode::ReadAhead => "ahead",
        PrefetchMode::All => "all",
    };
    let state = match progress.state {
        PrefetchState::Running => "running",
        PrefetchState::Incomplete => "incomplete",
        PrefetchState::Full => "full",
        PrefetchState::Complete => "complete",
        PrefetchState::Off => "off",
    };
    PrefetchStatus {
        what: what.to_owned(),
        state: state.to_owned(),
        done_spans: progress.done_spans,
        total_spans: progress.total_spans,
        replayed_spans: progress.replayed_spans,
        replay_spans: progress.replay_spans,
    }
}
