//! The tree that a mount serves, and its part of the mount's status.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::failure::Failure;
use super::mount_spec::MountSpec;
use super::prefetch::{self, Notes};
use super::server::{Granted, TreeMemory};
use super::status::{IndexState, Phase, PrefetchStatus};
use super::volumes::Shareable;
use crate::archive::directory::ArchiveDirectory;
use crate::archive::{
    Archive, DiskCacheMode, DiskCacheUsage, PrefetchMode, PrefetchProgress, PrefetchState, Volume,
};
use crate::base::periodic::PeriodicThread;
use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::locate::{OpenContext, SourceArchives, describe};

const MAX_NAMED_DAMAGED: usize = 10;

/// Number of the next tree.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

/// Time for which the version of a source on a server needs no check before another mount shares it.
const CONFIRMED_TIME: Duration = Duration::from_secs(10);

/// The tree that a mount serves.
pub struct Opened {
    /// A number that no other tree of this process has.
    pub number: u64,
    /// The tree.
    pub volume: Arc<dyn Volume>,
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
    /// Counters of its work.
    pub stats: Arc<Stats>,
    has_disk_cache: bool,
    /// Notes about the parts of prefetching that are not available.
    prefetch_notes: Notes,
    /// The archives, if SOURCE is a directory of archives.
    pub(super) directory: Option<Arc<SourceArchives>>,
    /// Its memory, unless it is a directory.
    _memory: Option<Granted>,
    /// Recorder of read files, if the user wants one.
    recording: Mutex<Option<PeriodicThread>>,
    /// When a check of its version last began.
    confirmed: Mutex<Instant>,
}

impl Shareable for Arc<Opened> {
    fn is_usable(&self) -> bool {
        let archives = self.volume.archives();
        archives.iter().all(|archive| archive.failure().is_none())
    }

    fn close(&self) {
        self.volume.close();
        self.end_recording();
    }
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opened")
            .field("location", &self.location)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

impl Opened {
    /// Opens the tree of `spec` with the settings `context`, and memory of `memory`, and starts its prefetch.
    ///
    /// # Errors
    /// If it cannot be opened, or the system cannot start a thread.
    pub(super) fn open(
        spec: &MountSpec,
        mut context: OpenContext,
        memory: &TreeMemory,
    ) -> Result<Self, Failure> {
        let begun = Instant::now();
        if spec.tree.source.is_place() {
            return Self::open_directory(spec, context);
        }
        let granted = memory.grant(context.archive.scan.memory);
        context.archive.cut_memory(granted.bytes);
        let (tree, is_layered) = (&spec.tree, spec.tree.is_layered());
        let stats = Arc::clone(&context.source.stats);
        let retry_forever = context.archive.scan.retry_forever.clone();
        if context.shown_version.is_some() && !is_layered {
            // Callers wait, but the monitor does not count the time of an outage.
            retry_forever.enable();
        }
        // The kernel knows the files of a mount that is continued, so the index must be complete before its next request.
        let waits_for_index = spec.waits_for_index || context.shown_version.is_some();
        let is_early = !waits_for_index && (!is_layered || tree.may_be_artifact());
        let volume = if is_early {
            let volume = context.open_early(tree)?;
            // No user waits at the terminal any more. The mount works again when the network does.
            retry_forever.enable();
            volume
        } else {
            context.open(tree)?
        };
        let notes = volume.archives().into_iter();
        for note in notes.filter_map(Archive::foreign_tree_note) {
            tracing::warn!("{note}");
        }
        let (recording, prefetch_notes) = prefetch::start(&spec.prefetch, &context, &volume)?;
        Ok(Self {
            prefetch_notes,
            recording: Mutex::new(recording),
            confirmed: Mutex::new(begun),
            _memory: Some(granted),
            ..Self::new(spec, &volume, is_layered, stats)
        })
    }

    /// Whether a mount that was requested at `requested` and opens the same tree with `context` would get this version.
    /// Asks the servers, unless it is known.
    ///
    /// # Errors
    /// If a source cannot be opened.
    pub(super) fn is_current(
        &self,
        spec: &MountSpec,
        context: impl FnOnce() -> Result<OpenContext, Failure>,
        requested: Instant,
    ) -> Result<bool, Failure> {
        let confirmed = *self.confirmed.lock();
        if confirmed >= requested {
            return Ok(true);
        }
        if !self.is_strong {
            // It may be another archive that looks the same.
            return Ok(false);
        }
        let archives = self.volume.archives();
        let own = archives
            .iter()
            .map(|archive| archive.source().fingerprint());
        let is_remote = own.clone().all(|found| !found.is_local());
        if is_remote && requested - confirmed < CONFIRMED_TIME {
            return Ok(true);
        }
        let begun = Instant::now();
        let found = context()?.open_sources(&spec.tree)?;
        let found = found.layers.iter().map(|layer| layer.source.fingerprint());
        let is_current = own.eq(found);
        if is_current {
            *self.confirmed.lock() = begun;
        }
        Ok(is_current)
    }

    /// Lists the archives of a directory. They are opened when they are used.
    fn open_directory(spec: &MountSpec, context: OpenContext) -> Result<Self, Failure> {
        let stats = Arc::clone(&context.source.stats);
        let context = OpenContext {
            progress: None,
            ..context
        };
        let archives = context.open_archives(&spec.tree.source, spec.prefetch.mode)?;
        let listing = archives.listing();
        listing
            .notes
            .iter()
            .for_each(|note| tracing::warn!("{note}"));
        let root = Arc::clone(&archives.root) as Arc<dyn Volume>;
        Ok(Self {
            directory: Some(Arc::new(archives)),
            ..Self::new(spec, &root, false, stats)
        })
    }

    fn new(
        spec: &MountSpec,
        volume: &Arc<dyn Volume>,
        is_layered: bool,
        stats: Arc<Stats>,
    ) -> Self {
        let archives = volume.archives();
        let sources = archives.iter().map(|archive| archive.source());
        let locations = sources.clone().map(|source| source.location().to_owned());
        let locations: Vec<_> = locations.collect();
        let versions = sources
            .clone()
            .map(|source| source.fingerprint().to_string());
        Self {
            number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
            name: spec.tree.source.redacted(),
            location: display_name(&locations),
            version: versions.collect::<Vec<_>>().join(", "),
            is_strong: sources
                .clone()
                .all(|source| source.fingerprint().is_strong()),
            layers: if is_layered { locations } else { Vec::new() },
            volume: Arc::clone(volume),
            stats,
            has_disk_cache: spec.open.cache.archives != DiskCacheMode::Disabled,
            prefetch_notes: Notes::default(),
            directory: None,
            _memory: None,
            recording: Mutex::default(),
            confirmed: Mutex::new(Instant::now()),
        }
    }

    /// Writes the last recorded reads to disk.
    fn end_recording(&self) {
        drop(self.recording.lock().take());
    }

    /// Returns notes about degraded operation, for example after the disk cache was lost.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut all = Vec::new();
        for archive in self.volume.archives() {
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
        all.extend(self.prefetch_notes.lock().iter().cloned());
        all
    }

    /// Progress of the index. Also called when the scan ends.
    pub fn index(&self) -> IndexState {
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
            failure: failure.map(|failure| describe(&*failure)),
        }
    }

    /// Returns the number of members that are damaged or missing from the tree, and names the first ones, one per line.
    pub fn damage(&self) -> (u64, Vec<String>) {
        let index = self.volume.index();
        let named = index.problems().iter().take(MAX_NAMED_DAMAGED);
        (
            index.problem_count(),
            named.map(ToString::to_string).collect(),
        )
    }

    pub(super) fn disk_cache(&self) -> Option<DiskCacheUsage> {
        let archives = self.volume.archives().into_iter();
        let uses = archives.filter_map(Archive::disk_cache_use);
        uses.reduce(|one, other| DiskCacheUsage {
            held_bytes: one.held_bytes + other.held_bytes,
            // Each layer may have seen the total at a different time.
            all_bytes: one.all_bytes.max(other.all_bytes),
            limit_bytes: one.limit_bytes,
        })
    }

    pub(super) fn prefetch(&self) -> PrefetchStatus {
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

/// Returns one name for all layers.
fn display_name(locations: &[String]) -> String {
    match locations {
        [] => String::new(),
        [only] => only.clone(),
        [bottom, _] => format!("{bottom} + 1 layer"),
        [bottom, above @ ..] => format!("{bottom} + {} layers", above.len()),
    }
}
