//! The archive that a mount serves, and its part of the mount's status.

use std::sync::Arc;

use tokio::runtime::Runtime;

use super::control_socket::{IndexState, Phase, PrefetchStatus};
use super::prefetch::NotesFn;
use crate::cli::periodic::PeriodicThread;
use crate::cli::ui::output;
use tarfs::Stats;
use tarfs::archive::{
    Archive, DiskCacheUsage, PrefetchMode, PrefetchProgress, PrefetchState, Volume,
};
use tarfs::locate::SourceArchives;

const MAX_NAMED_DAMAGED: usize = 10;

pub(crate) struct OpenedArchive {
    pub content: Arc<dyn Volume>,
    /// SOURCE, absolute and without secrets, which the kernel lists and mount(8) compares with fstab.
    pub name: String,
    /// Location and number of layers, as logs and the status show it.
    pub location: String,
    /// Names of the layers, from the bottom, if SOURCE is opened as layers.
    pub layers: Vec<String>,
    /// Pinned version of the archive.
    pub version: String,
    /// Whether `version` differs for any two contents.
    pub is_strong: bool,
    pub stats: Arc<Stats>,
    pub has_disk_cache: bool,
    /// Notes about the parts of prefetching that are not available.
    pub prefetch_notes: NotesFn,
    /// The archives, if SOURCE is a directory of archives.
    pub directory: Option<Arc<SourceArchives>>,
    /// Recorder of read files, if the user wants one; ends with the mount.
    pub recording: Option<PeriodicThread>,
    /// Runtime that reads need. Declared last, so that it is dropped last.
    pub network: Runtime,
}

impl OpenedArchive {
    /// Returns `content`, opened from SOURCE `name`, without prefetch.
    pub(crate) fn new(
        name: String,
        content: &Arc<dyn Volume>,
        is_layered: bool,
        has_disk_cache: bool,
        (stats, network): (Arc<Stats>, Runtime),
    ) -> Self {
        let archives = content.archives();
        let sources = archives.iter().map(|archive| archive.source());
        let locations = sources.clone().map(|source| source.location().to_owned());
        let locations: Vec<_> = locations.collect();
        let versions = sources
            .clone()
            .map(|source| source.fingerprint().to_string());
        Self {
            name,
            location: display_name(&locations),
            version: versions.collect::<Vec<_>>().join(", "),
            is_strong: sources
                .clone()
                .all(|source| source.fingerprint().is_strong()),
            layers: if is_layered { locations } else { Vec::new() },
            content: Arc::clone(content),
            stats,
            has_disk_cache,
            prefetch_notes: Box::new(Vec::new),
            directory: None,
            recording: None,
            network,
        }
    }

    /// Returns notes about degraded operation, for example after the disk cache was lost.
    pub(crate) fn notes(&self) -> Vec<String> {
        let mut all = Vec::new();
        for archive in self.content.archives() {
            let location = archive.source().location();
            let notes = notes(archive, self.has_disk_cache).into_iter();
            all.extend(notes.map(|note| {
                if self.layers.is_empty() {
                    note
                } else {
                    format!("{location}: {note}")
                }
            }));
        }
        all.extend((self.prefetch_notes)());
        all
    }

    /// Returns the progress of the index. Also called when the scan ends.
    pub(crate) fn index(&self) -> IndexState {
        let archives = self.content.archives();
        let failure = archives.iter().find_map(|archive| archive.failure());
        let phase = match (&failure, self.content.index().is_complete()) {
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

    /// Returns the number of members that are damaged or missing from the tree, and names the first ones, one per line.
    pub(crate) fn damage(&self) -> (u64, Vec<String>) {
        let index = self.content.index();
        let named = index.problems().iter().take(MAX_NAMED_DAMAGED);
        (
            index.problem_count(),
            named.map(ToString::to_string).collect(),
        )
    }

    pub(crate) fn disk_cache(&self) -> Option<DiskCacheUsage> {
        let archives = self.content.archives().into_iter();
        let uses = archives.filter_map(Archive::disk_cache_use);
        uses.reduce(|one, other| DiskCacheUsage {
            held_bytes: one.held_bytes + other.held_bytes,
            // Each layer may have seen the total at a different time.
            all_bytes: one.all_bytes.max(other.all_bytes),
            limit_bytes: one.limit_bytes,
        })
    }

    pub(crate) fn prefetch(&self) -> PrefetchStatus {
        let archives = self.content.archives().into_iter();
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

/// Returns one name for all layers.
fn display_name(locations: &[String]) -> String {
    match locations {
        [] => String::new(),
        [only] => only.clone(),
        [bottom, _] => format!("{bottom} + 1 layer"),
        [bottom, above @ ..] => format!("{bottom} + {} layers", above.len()),
    }
}
