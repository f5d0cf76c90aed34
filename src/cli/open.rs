//! From flags to a source, a scan's options, or an archive.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::runtime::Runtime;

use super::args::{CacheArgs, SavedArgs, SourceArgs};
use super::control::{IndexState, MemoryUse, Phase, PrefetchStatus, SpoolUse};
use super::copy::Original;
use super::given::{self, Outer};
use super::headers::{self, Header};
use super::layers::{self, LayerArgs};
use super::mount::{MountArgs, Opened};
use super::output::{self, Progress, Task};
use super::prefetch::Mode;
use super::{privileges, settings};
use crate::archive::{Ahead, Archive, Awaited, OpenOptions, PrefetchState, Spooling, Then, scan};
use crate::base::stats::Stats;
use crate::fetch;
use crate::image::Reference;
use crate::index::Index;
use crate::source::{self, Retry, Source};
use crate::tar;

/// The network's threads; everything else has threads of its own.
///
/// # Errors
/// When the system has no thread left to give.
pub(super) fn network() -> anyhow::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("tarfs-net")
        .enable_all()
        .build()
        .context("cannot start the network's threads")
}

/// The archive at the path or URL that `args` name, with these headers and no others.
///
/// # Errors
/// When it cannot be reached, or is none.
pub(super) fn source_with(
    headers: &[Header],
    args: &SourceArgs,
    network: &Runtime,
    stats: &Arc<Stats>,
) -> anyhow::Result<Arc<dyn Source>> {
    let headers = headers.iter().cloned();
    let options = source::Options {
        headers: headers.map(|header| (header.name, header.value)).collect(),
        connections: args.connections,
        timeout: Duration::from_secs(args.timeout),
        retry: retry(args),
        stats: Arc::clone(stats),
        ..source::Options::default()
    };
    let spec = args
        .source
        .to_str()
        .context("SOURCE is not UTF-8; rename it")?;
    anyhow::ensure!(!spec.is_empty(), "SOURCE is empty (name a path or a URL)");
    Ok(network.block_on(source::open(spec, options))?)
}

/// How stubborn a source is. Who gives a number means it.
fn retry(args: &SourceArgs) -> Retry {
    let usual = Retry::default();
    Retry {
        attempts: args
            .retries
            .map_or(usual.attempts, |retries| retries.saturating_add(1)),
        persists: args.retries.is_none(),
        ..usual
    }
}

/// How the archive that `args` name is scanned.
pub(super) fn scan_options(args: &SourceArgs) -> scan::Options {
    scan::Options {
        compression: args.compression,
        tar: tar::Options {
            ignore_zeros: args.ignore_zeros,
            limits: tar::Limits {
                entries: args.max_entries.unwrap_or(u64::MAX),
                kept_bytes: tar::Limits::kept_bytes_with(args.memory.0),
                ..tar::Limits::default()
            },
        },
        allow_truncated: args.allow_truncated,
        spans: false,
        connections: args.connections,
        chunk_len: args.chunk_size.0,
        min_speed: fetch::MinSpeed {
            bytes_per_second: args.min_speed.0,
            wait: Duration::from_secs(args.min_speed_wait),
        },
        persistence: source::Persistence::default(),
        memory: LayerArgs::default().memory(args),
        lenders: Vec::new(),
        workers: settings::processors(),
        hops: false,
        // What is asked of an image is asked of its manifest, which speaks for the layers.
        sha256: args
            .expect_sha256
            .filter(|_| given::reference(args).is_none())
            .map_or(scan::Digest::Ignore, scan::Digest::Expect),
        bookmarks: false,
        resume: None,
        saved: None,
    }
}

/// The archive that a mount serves.
///
/// # Errors
/// When it cannot be opened.
pub(super) fn for_mount(args: &MountArgs) -> anyhow::Result<Opened> {
    let network = network()?;
    let stats = Arc::new(Stats::default());
    let spooling = spooling(&args.cache);
    let quiet = !args.foreground;
    let headers = headers::all(&args.source.headers)?;
    let outer = Outer::with(&args.cache, quiet);
    if args.layers.make_a_stack(&args.source) {
        let (source, layers) = (absolute(&args.source), layers::absolute(&args.layers));
        let opened = layers::sources(&source, &layers, &headers, &outer, &network, &stats)?;
        return layers::for_mount(args, &opened, &layers, network, stats);
    }
    let source = source_with(&headers, &absolute(&args.source), &network, &stats)?;
    let progress = indexing(source.fingerprint().len, &stats, quiet);
    let mut options = open_options(&args.source, &args.cache.saved, spooling);
    // What is fetched anyway had better be fetched while the scan goes by.
    options.scan.hops = args.prefetch.prefetch != Mode::All;
    let archive = if args.waits() {
        Archive::open(source, &options, network.handle(), &stats)?
    } else {
        let archive = Archive::open_early(source, &options, network.handle(), &stats)?;
        // Nobody waits at a terminal any more, and the mount is there when the network comes back.
        options.scan.persistence.begin();
        archive
    };
    archive.when(Awaited::End, Then::new(move || drop(progress)));
    let archive = Arc::new(archive);
    let (background, said) =
        super::prefetch::start(&args.prefetch, (&args.source, &headers), &archive, &network)?;
    let (noted, used, scanned) = (archive.clone(), archive.clone(), archive.clone());
    let spooled = archive.clone();
    let asked = archive.clone();
    let is_spooled = !args.cache.no_spool;
    Ok(Opened {
        location: archive.source().location().to_owned(),
        layers: Vec::new(),
        version: archive.source().fingerprint().to_string(),
        is_strong: archive.source().fingerprint().is_strong(),
        content: Arc::<Archive>::clone(&archive),
        stats,
        original: Original::of(&archive),
        notes: Box::new(move || [notes(&noted, is_spooled), said()].concat()),
        index: Box::new(move || index_state(&scanned)),
        memory: Box::new(move || memory_use(&used)),
        spool: Box::new(move || spool_use(&spooled)),
        prefetch: Box::new(move || prefetch_status(&asked)),
        recording: background,
        network,
    })
}

/// What is to be done with decoded data.
pub(super) fn spooling(cache: &CacheArgs) -> Spooling {
    if cache.no_spool {
        return Spooling::Refused;
    }
    Spooling::ToDisk {
        limit_bytes: cache.cache_size.map(|size| size.0),
    }
}

/// What is not as it could be.
fn notes(archive: &Archive, is_spooled: bool) -> Vec<String> {
    let mut notes = layer_notes(archive, is_spooled);
    notes.extend(lost(&archive.index()));
    notes
}

/// What is not as it could be with the bytes of an archive.
pub(super) fn layer_notes(archive: &Archive, is_spooled: bool) -> Vec<String> {
    let mut notes = archive.notes();
    notes.extend(archive.spool_trouble());
    if !is_spooled && archive.has_long_ways() {
        notes.push(
            "parts of the stream cannot be decoded from the middle: without a spool (--no-spool) \
             reads there decode from the start of their frame"
                .to_owned(),
        );
    }
    notes
}

/// What of a tree is not there, if anything.
pub(super) fn lost(index: &Index) -> Option<String> {
    let lost = index.problem_count();
    (lost > 0).then(|| format!("{lost} members are not in the tree"))
}

fn index_state(archive: &Archive) -> IndexState {
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
        failure: failure.map(|failure| output::chain_of(&*failure)),
    }
}

pub(super) fn prefetch_status(archive: &Archive) -> PrefetchStatus {
    let Some(progress) = archive.prefetch_progress() else {
        return PrefetchStatus::default();
    };
    let what = match progress.ahead {
        Ahead::None => "none",
        Ahead::Readers => "ahead",
        Ahead::All => "all",
    };
    let state = match progress.state {
        PrefetchState::Off => "off",
        PrefetchState::Running => "running",
        PrefetchState::Full => "full",
        PrefetchState::Incomplete => "incomplete",
        PrefetchState::Complete => "complete",
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

pub(super) fn memory_use(archive: &Archive) -> MemoryUse {
    let used = archive.memory_use();
    MemoryUse {
        budget_bytes: used.budget_bytes,
        spans_bytes: used.spans_bytes,
        reads_bytes: used.reads_bytes,
        decoders_bytes: used.decoders_bytes,
        index_bytes: used.index_bytes,
    }
}

pub(super) fn spool_use(archive: &Archive) -> Option<SpoolUse> {
    let used = archive.spool_use()?;
    Some(SpoolUse {
        held_bytes: used.held_bytes,
        all_bytes: used.all_bytes,
        limit_bytes: used.limit_bytes,
    })
}

/// The same source wherever the process goes: a mount leaves the directory it was started in, and
/// its status should name a path that everyone understands.
fn absolute(args: &SourceArgs) -> SourceArgs {
    SourceArgs {
        source: absolute_path(&args.source),
        ..args.clone()
    }
}

/// The same source wherever the process goes.
pub(super) fn absolute_path(source: &OsString) -> OsString {
    let text = source.to_str();
    if let Some(mut reference) = text.and_then(Reference::parse) {
        if !reference.place.contains("://")
            && let Ok(path) = std::path::absolute(&reference.place)
            && let Some(path) = path.to_str()
        {
            path.clone_into(&mut reference.place);
        }
        let absolute = reference.to_string();
        // Below a directory with a colon in its name it would be read as another place.
        let is_same = Reference::parse(&absolute).as_ref() == Some(&reference);
        return if is_same {
            absolute.into()
        } else {
            source.clone()
        };
    }
    let is_path = text.is_none_or(|text| text != "-" && !text.contains("://"));
    match std::path::absolute(source) {
        Ok(path) if is_path => path.into(),
        _ => source.clone(),
    }
}

/// The archive that the arguments name, with its index; shows progress unless `quiet`. With `hops`
/// an index to be made may lack hashes of what nobody has to read for it.
///
/// # Errors
/// When it cannot be opened.
pub(super) fn archive(
    args: &SourceArgs,
    cache: &CacheArgs,
    spooling: Spooling,
    network: &Runtime,
    stats: &Arc<Stats>,
    hops: bool,
    quiet: bool,
) -> anyhow::Result<Archive> {
    if args.source == "-" {
        anyhow::bail!("standard input can only be materialized");
    }
    privileges::guard(args, &LayerArgs::default());
    let source = source_with(&headers::all(&args.headers)?, args, network, stats)?;
    let _progress = indexing(source.fingerprint().len, stats, quiet);
    let mut options = open_options(args, &cache.saved, spooling);
    options.scan.hops = hops;
    Ok(Archive::open(source, &options, network.handle(), stats)?)
}

/// Shows how the indexing of what has so many packed bytes goes, unless `quiet`.
pub(super) fn indexing(total_bytes: Option<u64>, stats: &Arc<Stats>, quiet: bool) -> Progress {
    let task = Task {
        verb: "indexing",
        total_bytes,
        stats: Arc::clone(stats),
    };
    Progress::start(task, quiet)
}

/// Where indexes and decoded data are kept, if anywhere.
pub(super) fn cache_dir(saved: &SavedArgs) -> Option<PathBuf> {
    match &saved.cache_dir {
        Some(directory) => Some(directory.clone()),
        None => settings::cache_dir().ok(),
    }
}

/// How the archive that the arguments name is opened.
pub(super) fn open_options(
    args: &SourceArgs,
    saved: &SavedArgs,
    spooling: Spooling,
) -> OpenOptions {
    OpenOptions {
        scan: scan_options(args),
        cache_dir: cache_dir(saved),
        index_file: saved.index.clone(),
        spooling,
    }
}

#[cfg(test)]
mod tests {
    use super::super::args::tests::source;
    use super::*;

    #[test]
    fn what_an_archive_may_keep_grows_with_the_memory() {
        let kept = |flags: &[&str]| {
            let source = source(&[flags, &["a.tar"]].concat());
            scan_options(&source).tar.limits.kept_bytes
        };
        assert_eq!(kept(&[]), tar::Limits::default().kept_bytes);
        assert_eq!(kept(&["--memory=1GiB"]), 2 << 30);
    }
}
