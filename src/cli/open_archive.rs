//! Opens SOURCE with the settings of the command line.

use std::any::Any;
use std::fs::File;
use std::io::{self, IsTerminal};
use std::path::{self, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::runtime::Runtime;

use super::args::{CacheArgs, CacheDirArgs, LayerArgs, Mode, MountArgs, SourceArgs};
use crate::cli::ui::output::{self, UsageError};
use crate::cli::ui::progress::{self, ProgressOptions, Work};
use tarfs::Stats;
use tarfs::archive::{Archive, DiskCacheMode, TreeOrigin, Volume};
use tarfs::image::Image;
use tarfs::index::store::RowsToLoad;
use tarfs::internal::bounded_read::{MAX_SETTINGS_BYTES, read_at_most};
use tarfs::internal::environment::Environment;
use tarfs::locate::{
    self, ArchiveSpec, CacheSpec, OpenContext, OpenSpec, OpenSpecError, ProgressFn, ServerSpec,
    SourceSpec, TreeSpec, UserSpec,
};
use tarfs::serve::{MountSpec, PrefetchSpec, SocketPeers};
use tarfs::source::{ClientCertificateError, Revalidation};

/// Starts the threads for the network, and returns the settings with which a verb opens SOURCE. All other work has
/// threads of its own. Reads the files of headers and certificates.
pub(crate) fn open_context(
    args: &SourceArgs,
    cache_dir: &CacheDirArgs,
    stats: &Arc<Stats>,
    quiet: bool,
) -> anyhow::Result<(Runtime, OpenContext)> {
    let spec = spec_with_cache_size(args, cache_dir)?;
    start(&spec, args, stats, quiet)
}

/// Starts the threads for the network, and returns the settings that `spec` describes.
pub(crate) fn start(
    spec: &OpenSpec,
    args: &SourceArgs,
    stats: &Arc<Stats>,
    quiet: bool,
) -> anyhow::Result<(Runtime, OpenContext)> {
    let network = locate::start_network().context("cannot start the network")?;
    let context = spec.context(network.handle().clone(), stats);
    let mut context = context.map_err(|error| named_error(args, error))?;
    context.archive.peers = Some(Arc::new(SocketPeers::of_user()));
    context.progress = (!quiet).then(|| Arc::new(start_indexing_progress) as ProgressFn);
    Ok((network, context))
}

/// The error with the flag, and the file, that has the unusable setting.
fn named_error(args: &SourceArgs, error: OpenSpecError) -> anyhow::Error {
    let server = &args.server;
    let (flag, file) = match &error {
        OpenSpecError::Headers(_) => return anyhow::Error::msg(error),
        OpenSpecError::Via(_) => return UsageError(format!("--via: {error}")).into(),
        OpenSpecError::Trusted(_) => ("--cacert", &server.cacert),
        OpenSpecError::Client(ClientCertificateError::Certificate(_)) => ("--cert", &server.cert),
        OpenSpecError::Client(_) if server.key.is_none() => ("--cert", &server.cert),
        OpenSpecError::Client(_) => ("--key", &server.key),
    };
    let file = file.clone().unwrap_or_default();
    anyhow::Error::new(error).context(format!("{flag} {}", file.display()))
}

/// Returns the description of an opening of SOURCE, without caches. Reads the files of certificates.
fn spec(args: &SourceArgs, cache_dir: &CacheDirArgs) -> anyhow::Result<OpenSpec> {
    let server = &args.server;
    let read = |flag, path: &Option<PathBuf>| {
        let path = path.as_deref();
        path.map(|path| read_pem(flag, path)).transpose()
    };
    let certificate = read("--cert", &server.cert)?;
    let key = read("--key", &server.key)?.or_else(|| certificate.clone());
    Ok(OpenSpec {
        user: UserSpec {
            environment: Environment::current(),
            origin: args.origin().to_string_lossy().into_owned(),
            headers: args.headers.clone(),
            netrc: tarfs::internal::environment::netrc().map(Into::into),
            certificate: certificate.zip(key),
        },
        server: ServerSpec {
            trusted: read("--cacert", &server.cacert)?,
            allow_insecure_redirects: args.allow_insecure_redirects,
            endpoint_url: args.endpoint_url.clone(),
            hosts_dir: args.hosts_dir.clone().into(),
            mirror_urls: server.mirror_urls.clone(),
            via: server.via.clone().map(|via| (via, server.via_credentials)),
            connections: args.connections,
            timeout: Duration::from_secs(args.timeout),
            retries: args.retries,
            revalidation: Revalidation::default(),
            chunk_len: args.chunk_size.0,
            min_speed: args.min_speed.0,
            min_speed_wait: Duration::from_secs(args.min_speed_wait),
        },
        archive: ArchiveSpec {
            compression: args.compression,
            platform: args.platform.clone(),
            expected_sha256: args.expect_sha256,
            ignore_zeros: args.ignore_zeros,
            allow_truncated: args.allow_truncated,
            max_entries: args.max_entries,
            memory: args.memory.0,
            index_memory: args.index_memory.0,
            ..ArchiveSpec::default()
        },
        cache: CacheSpec {
            directory: cache_dir.directory().ok().map(Into::into),
            ..CacheSpec::default()
        },
    })
}

/// As [`spec`], with the size of the cache that the environment names.
pub(crate) fn spec_with_cache_size(
    args: &SourceArgs,
    cache_dir: &CacheDirArgs,
) -> anyhow::Result<OpenSpec> {
    let mut spec = spec(args, cache_dir)?;
    let limit_bytes = tarfs::internal::environment::cache_size().map_err(UsageError)?;
    spec.cache.enclosing_archives = DiskCacheMode::Enabled { limit_bytes };
    Ok(spec)
}

/// As [`spec`], with the caches of a verb that accepts trees of the origin `least_origin`.
fn cached_spec(
    args: &SourceArgs,
    cache: &CacheArgs,
    least_origin: TreeOrigin,
) -> anyhow::Result<OpenSpec> {
    let mut spec = spec(args, &cache.saved.cache_dir)?;
    spec.server.revalidation = if cache.offline {
        Revalidation::Never
    } else {
        Revalidation::UnlessUnreachable
    };
    cache.saved.apply(&mut spec.cache, least_origin);
    spec.cache.enclosing_archives = if cache.no_disk_cache {
        DiskCacheMode::Disabled
    } else {
        DiskCacheMode::Enabled {
            limit_bytes: cache.cache_size.map(|size| size.0),
        }
    };
    Ok(spec)
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
    let (tree, spec) = (layers.tree(args), cached_spec(args, cache, least_origin)?);
    let (network, context) = start(&spec, args, &Arc::default(), quiet)?;
    ensure!(
        tree.is_layered() || !tree.source.is_stdin(),
        "standard input can only be materialized"
    );
    Ok((network, tree, context))
}

/// The description of the mount of `args`, with absolute paths, because a mount leaves its current directory.
pub(crate) fn mount_spec(args: &MountArgs) -> anyhow::Result<MountSpec> {
    let is_copied = args.copy_to.is_some();
    let least_origin = if is_copied {
        TreeOrigin::WRITTEN
    } else {
        TreeOrigin::SHOWN
    };
    let mut open = cached_spec(&args.source, &args.cache, least_origin)?;
    open.cache.archives = open.cache.enclosing_archives;
    // `--prefetch all` fetches everything, so the scan does it on its way.
    open.archive.allow_skipping = args.prefetch.prefetch != Mode::All;
    // The copy contains files from an earlier scan.
    open.archive.should_rescan_unproven = is_copied;
    open.archive.should_log_problems = true;
    let absolute = |path: &Path| path::absolute(path).map(PathBuf::into_os_string);
    let open = open.for_other_process();
    let open = open.and_then(|open| open.check().map(|()| open));
    let open = open.map_err(|error| named_error(&args.source, error))?;
    let record = args.prefetch.record.as_deref();
    let replay = args.prefetch.replay.as_deref().map(SourceSpec::from);
    Ok(MountSpec {
        tree: args.layers.tree(&args.source).absolute(),
        open,
        root: args.root.clone().unwrap_or_default(),
        strip_components: args.strip_components,
        waits_for_index: args.waits_for_index(),
        options: args.mount_options()?,
        xattrs: args.xattrs.filter(),
        is_writable: args.writable,
        prefetch: PrefetchSpec {
            mode: args.prefetch.prefetch.into(),
            bytes_per_second: args.prefetch.prefetch_rate.map(|rate| rate.0),
            replay: replay.map(|profile| profile.absolute().to_string()),
            record: record.map(absolute).transpose()?,
        },
        idle_timeout: Duration::from_secs(args.idle_timeout),
        mountpoint: absolute(&args.mountpoint)?,
        copy_to: args.copy_to.as_deref().map(absolute).transpose()?,
        metrics: args.metrics,
        runtime_dir: super::environment::runtime_dir().into(),
        is_in_other_namespace: args.namespace.is_some(),
        ends_with_monitor: args.foreground,
        reports_index: args.foreground && super::environment::notify_socket().is_some(),
    })
}
