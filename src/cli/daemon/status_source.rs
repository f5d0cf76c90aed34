//! The archive's part of a mount's status, for one archive or several layers.

use std::sync::Arc;

use super::control_socket::{IndexState, Phase, PrefetchStatus};
use super::prefetch::NotesFn;
use crate::cli::ui::output;
use tarfs::archive::{
    Archive, DiskCacheUsage, PrefetchMode, PrefetchProgress, PrefetchState, Volume,
};

const MAX_NAMED_DAMAGED: usize = 10;

/// Members that are damaged or missing from the tree.
pub(crate) struct Damage {
    pub members: u64,
    /// The first ones, one per line.
    pub named: Vec<String>,
}

/// Source of an archive's part of a status, queried for each status.
pub(crate) struct StatusSource {
    pub volume: Arc<dyn Volume>,
    pub is_layered: bool,
    pub has_disk_cache: bool,
    /// Notes about the parts of prefetching that are not available.
    pub prefetch_notes: NotesFn,
}

impl StatusSource {
    /// Returns notes about degraded operation, for example after the disk cache was lost.
    pub(crate) fn notes(&self) -> Vec<String> {
        let mut all = Vec::new();
        for archive in self.volume.archives() {
            let location = archive.source().location();
            let notes = notes(archive, self.has_disk_cache).into_iter();
            all.extend(notes.map(|note| {
                if self.is_layered {
                    format!("{location}: {note}")
                } else {
                    note
                }
            }));
        }
        all.extend((self.prefetch_notes)());
        all
    }

    /// Returns the progress of the index. Also called when the scan ends.
    pub(crate) fn index(&self) -> IndexState {
        let archives = self.volume.archives();
        let failure = archives.iter().find_map(|archive| archive.failure());
        let phase = match (&failure, self.volume.index().is_complete()) {
            (Some(_), _) => Phase::Failed,
            (None, true) => Phase::Complete,
            (None, false) => Phase::Scanning,
        };
        let lens = archives
            .iter()
            .map(|archive| archive.source().fingerprint().len);
        // All layers share one set of counters.
        let stats = archives.first().map(|archive| archive.stats());
        IndexState {
            phase,
            scanned_bytes: stats.map_or(0, |stats| stats.scanned_packed_bytes.get()),
            of_bytes: lens.sum(),
            failure: failure.map(|failure| output::describe(&*failure)),
        }
    }

    pub(crate) fn damage(&self) -> Damage {
        let index = self.volume.index();
        let named = index.problems().iter().take(MAX_NAMED_DAMAGED);
        Damage {
            members: index.problem_count(),
            named: named.map(ToString::to_string).collect(),
        }
    }

    pub(crate) fn disk_cache(&self) -> Option<DiskCacheUsage> {
        let archives = self.volume.archives().into_iter();
        let uses = archives.filter_map(Archive::disk_cache_use);
        uses.reduce(|one, other| DiskCacheUsage {
            held_bytes: one.held_bytes + other.held_bytes,
            // Each layer may have seen the total at a different time.
            all_bytes: one.all_bytes.max(other.all_bytes),
            limit_bytes: one.limit_bytes,
        })
    }

    pub(crate) fn prefetch(&self) -> PrefetchStatus {
        let archives = self.volume.archives().into_iter();
        let sum = archives
            .filter_map(Archive::prefetch_progress)
            .reduce(|one, other| PrefetchProgress {
                mode: one.mode,
                state: one.state.min(other.state),
                done_spans: one.done_spans + other.done_spans,
                total_spans: one.total_spans + other.total_spans,
                replayed_spans: one.replayed_spans + other.replayed_spans,
                replay_spans: one.replay_spans + other.replay_spans,
            });
        sum.map(prefetch_status).unwrap_or_default()
    }
}

fn notes(archive: &Archive, has_disk_cache: bool) -> Vec<String> {
    let mut notes = archive.notes();
    notes.extend(archive.disk_cache_problem());
    let outage = archive.source().outage();
    notes.extend(outage.map(|outage| format!("{outage}, so only cached data can be read")));
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
