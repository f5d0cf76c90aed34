//! Opens SOURCE with the settings of the command line.

use std::any::Any;
use std::fs::File;
use std::io::{self, IsTerminal};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::runtime::Runtime;

use super::args::{CacheArgs, CacheDirArgs, LayerArgs, Mode, MountArgs, SourceArgs};
use crate::cli::daemon::opened_archive::OpenedArchive;
use crate::cli::daemon::prefetch;
use crate::cli::ui::output::{self, UsageError};
use crate::cli::ui::progress::{self, ProgressOptions, Work};
use tarfs::Stats;
use tarfs::archive::directory::ArchiveDirectory;
use tarfs::archive::{Archive, DiskCacheMode, TreeOrigin, Volume, scan};
use tarfs::fetch;
use tarfs::image::Image;
use tarfs::index::MemoryLimit;
use tarfs::index::store::RowsToLoad;
use tarfs::internal::bounded_read::{MAX_SETTINGS_BYTES, read_at_most};
use tarfs::internal::environment;
use tarfs::internal::thread::processors;
use tarfs::locate::{self, OpenContext, ProgressFn, SourceSpec, TreeSpec};
use tarfs::source::{
    self, Certificates, ClientCertificate, ClientCertificateError, Identity, Retry, Revalidation,
    UserHeaders, Via,
};
use tarfs::tar;

/// Starts the threads for the network, and returns the settings with which a verb opens SOURCE. All other work has
/// threads of its own. Reads the files of headers and certificates.
pub(crate) fn open_context(
    args: &SourceArgs,
    cache_dir: &CacheDirArgs,
    stats: &Arc<Stats>,
    quiet: bool,
) -> anyhow::Result<(Runtime, OpenContext)> {
    let (network, mut context) = context_without_cache_size(args, cache_dir, stats, quiet)?;
    let limit_bytes = environment::cache_size().map_err(UsageError)?;
    context.enclosing_disk_cache = DiskCacheMode::Enabled { limit_bytes };
    Ok((network, context))
}

/// The same settings without a limit for the cache, which a flag of the verb sets.
fn context_without_cache_size(
    args: &SourceArgs,
    cache_dir: &CacheDirArgs,
    stats: &Arc<Stats>,
    quiet: bool,
) -> anyhow::Result<(Runtime, OpenContext)> {
    let network = locate::start_network().context("cannot start the network")?;
    let mut context = OpenContext::new(network.handle().clone());
    context.source = source_options(args, stats)?;
    context.headers_origin = args.origin().to_string_lossy().into_owned();
    context.archive.scan = scan_options(args);
    context.archive.cache_dir = cache_dir.directory().ok();
    context.archive.index_memory = MemoryLimit::new(args.index_memory.0);
    context.expected_sha256 = args.expect_sha256;
    context.platform.clone_from(&args.platform);
    context.progress = (!quiet).then(|| Arc::new(start_indexing_progress) as ProgressFn);
    Ok((network, context))
}

fn apply_cache_flags(context: &mut OpenContext, cache: &CacheArgs, least_origin: TreeOrigin) {
    context.source.revalidation = if cache.offline {
        Revalidation::Never
    } else {
        Revalidation::UnlessUnreachable
    };
    cache.saved.apply(context, least_origin);
    context.enclosing_disk_cache = if cache.no_disk_cache {
        DiskCacheMode::Disabled
    } else {
        DiskCacheMode::Enabled {
            limit_bytes: cache.cache_size.map(|size| size.0),
        }
    };
}

/// Shows the progress of indexing until the returned value is dropped.
fn start_indexing_progress(total_bytes: Option<u64>, stats: &Arc<Stats>) -> Box<dyn Any + Send> {
    let options = ProgressOptions {
        verb: "indexing",
        total_bytes,
        work: Work::Read,
        stats: Arc::clone(stats),
    };
    Box::new(progress::start(options, false))
}

fn source_options(args: &SourceArgs, stats: &Arc<Stats>) -> anyhow::Result<source::Options> {
    let headers = UserHeaders::new(&args.headers).map_err(anyhow::Error::msg)?;
    Ok(source::Options {
        identity: Arc::new(Identity {
            headers: headers.load().map_err(anyhow::Error::msg)?,
            reload: headers.loader(),
            netrc: environment::netrc(),
            certificate: load_client_certificate(args)?,
        }),
        allow_insecure_redirects: args.allow_insecure_redirects,
        endpoint_url: args.endpoint_url.clone(),
        hosts_dir: args.hosts_dir.clone(),
        certificates: load_certificates(args.server.cacert.as_deref())?,
        mirror_urls: args.server.mirror_urls.clone(),
        via: parse_via(args)?,
        connections: args.connections,
        timeout: Duration::from_secs(args.timeout),
        retry: Retry::with_limit(args.retries),
        stats: Arc::clone(stats),
        ..source::Options::default()
    })
}

fn parse_via(args: &SourceArgs) -> anyhow::Result<Option<Via>> {
    let prefix = args.server.via.as_deref();
    let via = prefix.map(|prefix| Via::new(prefix, args.server.via_credentials));
    let via = via.transpose();
    via.map_err(|error| UsageError(format!("--via: {error}")).into())
}

fn scan_options(args: &SourceArgs) -> scan::Options {
    let mut options = scan::Options {
        compression: args.compression,
        tar: tar::Options {
            ignore_zeros: args.ignore_zeros,
            accepts_empty: false,
            limits: tar::Limits {
                entries: args.max_entries.unwrap_or(u64::MAX),
                ..tar::Limits::default()
            },
        },
        allow_truncated: args.allow_truncated,
        connections: args.connections,
        chunk_len: args.chunk_size.0,
        min_speed: fetch::MinSpeed {
            bytes_per_second: args.min_speed.0,
            wait: Duration::from_secs(args.min_speed_wait),
        },
        workers: processors(),
        ..scan::Options::default()
    };
    options.set_memory(args.memory.0);
    options
}

fn load_certificates(file: Option<&Path>) -> anyhow::Result<Certificates> {
    let Some(path) = file else {
        return Ok(Certificates::default());
    };
    let pem = read_pem("--cacert", path)?;
    Certificates::from_pem(&pem).with_context(|| format!("--cacert {}", path.display()))
}

fn load_client_certificate(args: &SourceArgs) -> anyhow::Result<Option<ClientCertificate>> {
    let Some(certificate) = &args.server.cert else {
        return Ok(None);
    };
    let certificates = read_pem("--cert", certificate)?;
    let (flag, file) = match &args.server.key {
        Some(key) => ("--key", key),
        None => ("--cert", certificate),
    };
    let loaded = ClientCertificate::from_pem(&certificates, &read_pem(flag, file)?);
    let (flag, file) = match loaded {
        Err(ClientCertificateError::Certificate(_)) => ("--cert", certificate),
        _ => (flag, file),
    };
    let loaded = loaded.with_context(|| format!("{flag} {}", file.display()));
    loaded.map(Some)
}

/// Reads the file at `path`, which `flag` names.
fn read_pem(flag: &str, path: &Path) -> anyhow::Result<Vec<u8>> {
    let read = File::open(path).and_then(|file| read_at_most(file, MAX_SETTINGS_BYTES));
    read.with_context(|| format!("{flag} {}", path.display()))
}

/// Opens the image that SOURCE names. A SOURCE that names no image is an error.
pub(crate) fn open_image(
    args: &SourceArgs,
    cache_dir: &CacheDirArgs,
    quiet: bool,
) -> anyhow::Result<Image> {
    let (_network, context) = open_context(args, cache_dir, &Arc::default(), quiet)?;
    Ok(context.open_image(&args.source)?)
}

/// Opens and fully indexes SOURCE and its layers, and loads `rows` of a saved index; all if there are layers, because
/// merging needs them. Refuses standard input, because it can be read only once. The volume uses the network's threads.
pub(crate) fn open_tree(
    args: &SourceArgs,
    layers: &LayerArgs,
    cache: &CacheArgs,
    least_origin: TreeOrigin,
    rows: RowsToLoad,
) -> anyhow::Result<(Runtime, Arc<dyn Volume>)> {
    let quiet = !io::stderr().is_terminal();
    let opened = tree_context(args, layers, cache, least_origin, quiet);
    let (network, tree, mut context) = opened?;
    context.archive.scan.allow_skipping = true;
    if !tree.is_layered() {
        context.archive.index_rows = rows;
    }
    let volume = context.open(&tree)?;
    let notes = foreign_tree_notes(&*volume);
    notes.for_each(|note| output::print_error(format_args!("note: {note}")));
    Ok((network, volume))
}

/// Notes about trees for which neither the archive nor the user nor the image's manifest vouches.
fn foreign_tree_notes(volume: &dyn Volume) -> impl Iterator<Item = String> {
    let archives = volume.archives().into_iter();
    archives.filter_map(Archive::foreign_tree_note)
}

/// Returns the tree of SOURCE and its layers, and the settings to open it for a listing. Refuses standard input.
pub(crate) fn tree_context(
    args: &SourceArgs,
    layers: &LayerArgs,
    cache: &CacheArgs,
    least_origin: TreeOrigin,
    quiet: bool,
) -> anyhow::Result<(Runtime, TreeSpec, OpenContext)> {
    let (tree, cache_dir) = (layers.tree(args), &cache.saved.cache_dir);
    let opened = context_without_cache_size(args, cache_dir, &Arc::default(), quiet);
    let (network, mut context) = opened?;
    apply_cache_flags(&mut context, cache, least_origin);
    ensure!(
        tree.is_layered() || !tree.source.is_stdin(),
        "standard input can only be materialized"
    );
    Ok((network, tree, context))
}

pub(crate) fn open_for_mount(args: &MountArgs, stats: Arc<Stats>) -> anyhow::Result<OpenedArchive> {
    // A mount leaves its current directory, and its status should show paths that are valid everywhere.
    let tree = args.layers.tree(&args.source).absolute();
    let is_layered = tree.is_layered();
    let is_early = !args.waits_for_index() && (!is_layered || tree.may_be_artifact());
    let shows_progress = args.waits_for_index() || is_layered;
    let quiet = !(args.foreground || shows_progress && io::stderr().is_terminal());
    let (network, context) = mount_context(args, &stats, quiet)?;
    if tree.source.is_place() {
        return open_directory(args, &tree.source, context, (stats, network));
    }
    let retry_forever = &context.archive.scan.retry_forever;
    if args.shown_version.is_some() && !is_layered {
        // Callers wait, but the supervisor does not count the time of an outage.
        retry_forever.enable();
    }
    let volume = if is_early {
        let volume = context.open_early(&tree)?;
        // No user waits at the terminal any more. The mount works again when the network does.
        retry_forever.enable();
        volume
    } else {
        context.open(&tree)?
    };
    for note in foreign_tree_notes(&*volume) {
        tracing::warn!("{note}");
    }
    let (recording, prefetch_notes) = prefetch::start(&args.prefetch, &context, &volume)?;
    let (name, has_disk_cache) = (tree.source.redacted(), !args.cache.no_disk_cache);
    Ok(OpenedArchive {
        prefetch_notes,
        recording,
        ..OpenedArchive::new(name, &volume, is_layered, has_disk_cache, (stats, network))
    })
}

/// Lists the archives of the place `spec`. They are opened when they are used.
fn open_directory(
    args: &MountArgs,
    spec: &SourceSpec,
    context: OpenContext,
    process: (Arc<Stats>, Runtime),
) -> anyhow::Result<OpenedArchive> {
    let context = OpenContext {
        progress: None,
        ..context
    };
    let archives = context.open_archives(spec, args.prefetch.prefetch.into())?;
    let listing = archives.listing();
    listing
        .notes
        .iter()
        .for_each(|note| tracing::warn!("{note}"));
    let root = Arc::clone(&archives.root) as Arc<dyn Volume>;
    let (name, has_disk_cache) = (spec.redacted(), !args.cache.no_disk_cache);
    Ok(OpenedArchive {
        directory: Some(Arc::new(archives)),
        ..OpenedArchive::new(name, &root, false, has_disk_cache, process)
    })
}

fn mount_context(
    args: &MountArgs,
    stats: &Arc<Stats>,
    quiet: bool,
) -> anyhow::Result<(Runtime, OpenContext)> {
    let cache_dir = &args.cache.saved.cache_dir;
    let opened = context_without_cache_size(&args.source, cache_dir, stats, quiet);
    let (network, mut context) = opened?;
    let is_copied = args.copy_to.is_some();
    let least_origin = if is_copied {
        TreeOrigin::WRITTEN
    } else {
        TreeOrigin::SHOWN
    };
    apply_cache_flags(&mut context, &args.cache, least_origin);
    context.archive.disk_cache = context.enclosing_disk_cache;
    // `--prefetch all` fetches everything, so the scan does it on its way.
    context.archive.scan.allow_skipping = args.prefetch.prefetch != Mode::All;
    // The copy contains files from an earlier scan.
    context.archive.should_rescan_unproven = is_copied;
    context.archive.should_log_problems = true;
    context.shown_version.clone_from(&args.shown_version);
    if args.shown_version.is_some() && !args.cache.offline {
        context.source.revalidation = Revalidation::UnlessLate;
    }
    Ok((network, context))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::parse_source;

    // Promises: limit-metadata
    #[test]
    fn metadata_bytes_limit_grows_with_memory() {
        let kept = |flags: &[&str]| {
            let source = parse_source(&[flags, &["a.tar"]].concat());
            scan_options(&source).tar.limits.metadata_bytes
        };
        assert_eq!(kept(&[]), tar::Limits::default().metadata_bytes);
        assert_eq!(kept(&["--memory=1GiB"]), 2 << 30);
    }
}
