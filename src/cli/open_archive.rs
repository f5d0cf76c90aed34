//! Opens sources and archives from the command-line flags.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::runtime::Runtime;

use super::args::{CacheArgs, LayerArgs, Mode, MountArgs, SavedIndexArgs, SourceArgs};
use super::environment;
use super::layers;
use super::nested::NestedSource;
use super::resolve::{self, OuterArchiveOptions};
use crate::cli::args::headers::{self, Header};
use crate::cli::commands::copy::CopySource;
use crate::cli::commands::mount::OpenedArchive;
use crate::cli::daemon::privileges;
use crate::cli::daemon::status_source::ArchiveStatus;
use crate::cli::ui::output::{Progress, ProgressOptions};
use tarfs::archive::{Archive, Callback, DiskCacheMode, IndexGuard, OpenOptions, WaitFor, scan};
use tarfs::base::stats::Stats;
use tarfs::fetch;
use tarfs::image::{ImageRef, Transport};
use tarfs::index::MemoryLimit;
use tarfs::layers::LayeredArchive;
use tarfs::source::{self, Certificates, Fingerprint, Retry, Source};
use tarfs::tar;

/// Starts the threads for the network. All other work has threads of its own.
///
/// # Errors
/// The system cannot create a thread.
pub(crate) fn start_network_runtime() -> anyhow::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("tarfs-net")
        .enable_all()
        .build()
        .context("cannot start the network's threads")
}

/// Opens the archive at the path or URL in `args`, with only these headers.
///
/// For the version that an earlier process knew, see [`source::Options::known_version`].
///
/// # Errors
/// The source is unreachable or cannot be read.
pub(crate) fn open_source_with(
    headers: &[Header],
    args: &SourceArgs,
    known_version: Option<Fingerprint>,
    network: &Runtime,
    stats: &Arc<Stats>,
) -> anyhow::Result<Arc<dyn Source>> {
    let headers = headers.iter().cloned();
    let options = source::Options {
        headers: headers.map(|header| (header.name, header.value)).collect(),
        allow_insecure_redirects: args.allow_insecure_redirects,
        certificates: load_certificates(args.cacert.as_deref())?,
        known_version,
        connections: args.connections,
        timeout: Duration::from_secs(args.timeout),
        retry: retry_options(args),
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

/// Returns the retry policy. An explicit --retries also limits the retries during an outage.
fn retry_options(args: &SourceArgs) -> Retry {
    let default = Retry::default();
    Retry {
        attempts: args
            .retries
            .map_or(default.attempts, |retries| retries.saturating_add(1)),
        retries_outages: args.retries.is_none(),
        ..default
    }
}

/// Returns the options for the scan of the archive in `args`.
pub(crate) fn scan_options(args: &SourceArgs) -> scan::Options {
    scan::Options {
        compression: args.compression,
        tar: tar::Options {
            ignore_zeros: args.ignore_zeros,
            accepts_empty: false,
            limits: tar::Limits {
                entries: args.max_entries.unwrap_or(u64::MAX),
                metadata_bytes: tar::Limits::metadata_bytes_for(args.memory.0),
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
        memory: LayerArgs::default().memory_budget(args),
        workers: environment::processors(),
        // The digest of an image is that of its manifest, which contains those of its layers.
        sha256: args
            .expect_sha256
            .filter(|_| resolve::image_reference(args).is_none())
            .map_or(scan::Digest::Ignore, scan::Digest::Expect),
        ..scan::Options::default()
    }
}

/// Settings with which a verb opens SOURCE and its layers.
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a setting of its own"
)]
#[derive(Debug)]
pub(crate) struct OpenRequest<'a> {
    pub source: &'a SourceArgs,
    pub layers: &'a LayerArgs,
    pub cache: &'a CacheArgs,
    /// Whether decoded data is stored on disk.
    pub disk_cache: DiskCacheMode,
    /// Whether a new index may lack hashes of members that the scan can skip.
    pub allow_skipping: bool,
    /// Whether to ignore a saved index of an archive whose version cannot be proven.
    pub should_rescan_unproven: bool,
    /// Whether to log members that are damaged or missing from the tree.
    pub should_log_problems: bool,
    /// Whether to hide the progress.
    pub quiet: bool,
}

/// The opened SOURCE: one archive, or several layers as one tree.
#[derive(Debug)]
pub(crate) enum OpenedTree {
    Archive(Box<Archive>),
    LayeredArchive(LayeredArchive),
}

impl OpenedTree {
    /// Returns the index of the whole tree.
    pub(crate) fn index(&self) -> IndexGuard<'_> {
        match self {
            Self::Archive(archive) => archive.index(),
            Self::LayeredArchive(stack) => IndexGuard::Complete(stack.index()),
        }
    }
}

impl OpenRequest<'_> {
    /// Returns the options with which each archive is opened.
    pub(crate) fn options(&self) -> OpenOptions {
        let mut options = open_options(self.source, &self.cache.saved, self.disk_cache);
        options.scan.allow_skipping = self.allow_skipping;
        options.should_rescan_unproven = self.should_rescan_unproven;
        options.should_log_problems = self.should_log_problems;
        options
    }

    /// Whether SOURCE consists of several archives; see [`LayerArgs::is_layered`].
    ///
    /// # Errors
    /// A flag is not supported for several archives.
    fn is_layered(&self) -> anyhow::Result<bool> {
        let index = self.cache.saved.index.as_deref();
        self.layers.is_layered(self.source, index)
    }

    /// Opens SOURCE and its layers, and indexes them completely.
    ///
    /// # Errors
    /// SOURCE cannot be opened, or is standard input, which can be read only once.
    pub(crate) fn open(&self, network: &Runtime, stats: &Arc<Stats>) -> anyhow::Result<OpenedTree> {
        privileges::disable_core_dumps(self.source, self.layers);
        let headers = headers::load_all(&self.source.headers)?;
        if self.is_layered()? {
            let outer = OuterArchiveOptions::from_cache_args(self.cache, self.quiet);
            let layers =
                layers::open_sources(self.source, self.layers, &headers, &outer, network, stats)?;
            let stack = layers::open_layered(&layers, self, network, stats)?;
            return Ok(OpenedTree::LayeredArchive(stack));
        }
        if self.source.source == "-" {
            anyhow::bail!("standard input can only be materialized");
        }
        let outer = OuterArchiveOptions {
            count: self.layers.outer_archive_count(self.source),
            ..OuterArchiveOptions::from_cache_args(self.cache, self.quiet)
        };
        let source = resolve::open_source(&headers, self.source, &outer, network, stats)?;
        let _progress = start_indexing_progress(source.fingerprint().len, stats, self.quiet);
        let archive = Archive::open(source, &self.options(), network.handle(), stats)?;
        Ok(OpenedTree::Archive(Box::new(archive)))
    }
}

/// Opens the archive that a mount serves.
///
/// # Errors
/// The archive cannot be opened.
pub(crate) fn open_for_mount(args: &MountArgs, stats: Arc<Stats>) -> anyhow::Result<OpenedArchive> {
    let network = start_network_runtime()?;
    let headers = headers::load_all(&args.source.headers)?;
    let (source, layers) = (
        with_absolute_paths(&args.source),
        layers::with_absolute_paths(&args.layers),
    );
    let has_terminal = io::stderr().is_terminal();
    let request = OpenRequest {
        source: &source,
        layers: &layers,
        cache: &args.cache,
        disk_cache: disk_cache_policy(&args.cache),
        // `--prefetch all` fetches everything, so the scan does it on its way.
        allow_skipping: args.prefetch.prefetch != Mode::All,
        // The copy contains files from an earlier scan.
        should_rescan_unproven: args.copy_to.is_some(),
        should_log_problems: true,
        quiet: !(args.foreground || args.waits_for_index() && has_terminal),
    };
    if request.is_layered()? {
        let request = OpenRequest {
            quiet: !(args.foreground || has_terminal),
            ..request
        };
        let outer = OuterArchiveOptions {
            shown_version: args.shown_version.clone(),
            ..OuterArchiveOptions::from_cache_args(&args.cache, request.quiet)
        };
        let opened = layers::open_sources(&source, &layers, &headers, &outer, &network, &stats)?;
        return layers::open_for_mount(args, &opened, &request, network, stats);
    }
    let outer = OuterArchiveOptions {
        count: layers.outer_archive_count(&source),
        shown_version: args.shown_version.clone(),
        ..OuterArchiveOptions::from_cache_args(&args.cache, request.quiet)
    };
    let name = mount_source_name(&source);
    let source = resolve::open_source(&headers, &source, &outer, &network, &stats)?;
    let progress = start_indexing_progress(source.fingerprint().len, &stats, request.quiet);
    let options = request.options();
    if args.shown_version.is_some() {
        // Callers wait, but the supervisor does not count the time of an outage.
        options.scan.retry_forever.enable();
    }
    let archive = if args.waits_for_index() {
        Archive::open(source, &options, network.handle(), &stats)?
    } else {
        let archive = Archive::open_early(source, &options, network.handle(), &stats)?;
        // No user waits at the terminal any more. The mount works again when the network does.
        options.scan.retry_forever.enable();
        archive
    };
    archive.on_available(WaitFor::End, Callback::new(move || drop(progress)));
    let archive = Arc::new(archive);
    let (recording, prefetch_notes) = crate::cli::daemon::prefetch::start(
        &args.prefetch,
        (&args.source, &headers),
        &archive,
        &network,
    )?;
    Ok(OpenedArchive {
        name,
        location: archive.source().location().to_owned(),
        layers: Vec::new(),
        version: archive.source().fingerprint().to_string(),
        is_strong: archive.source().fingerprint().is_strong(),
        content: Arc::<Archive>::clone(&archive),
        stats,
        copy_source: CopySource::from_archive(&archive),
        status_source: Box::new(ArchiveStatus {
            archive,
            has_disk_cache: !args.cache.no_disk_cache,
            prefetch_notes,
        }),
        recording,
        network,
    })
}

/// Returns the name that the kernel lists as the mount's source.
///
/// The paths in `args` are [absolute](with_absolute_paths).
pub(crate) fn mount_source_name(args: &SourceArgs) -> String {
    source::redact(&args.source.to_string_lossy())
}

/// Returns whether and how decoded data is stored on disk.
pub(crate) fn disk_cache_policy(cache: &CacheArgs) -> DiskCacheMode {
    if cache.no_disk_cache {
        return DiskCacheMode::Disabled;
    }
    DiskCacheMode::Enabled {
        limit_bytes: cache.cache_size.map(|size| size.0),
    }
}

/// Maximum length of the --cacert file, in bytes.
const MAX_CERTIFICATES_LEN: u64 = 16 << 20;

/// Loads the certificates of --cacert.
fn load_certificates(file: Option<&Path>) -> anyhow::Result<Certificates> {
    let Some(path) = file else {
        return Ok(Certificates::default());
    };
    let read = || {
        let mut pem = Vec::new();
        let mut file = File::open(path)?.take(MAX_CERTIFICATES_LEN + 1);
        file.read_to_end(&mut pem).map(|_| pem)
    };
    let name = || format!("--cacert {}", path.display());
    let pem = read().with_context(name)?;
    if pem.len() as u64 > MAX_CERTIFICATES_LEN {
        bail!("{}: it is longer than {MAX_CERTIFICATES_LEN} bytes", name());
    }
    Certificates::from_pem(&pem).with_context(name)
}

/// Makes the paths in `args` absolute.
///
/// A mount leaves its current directory, and its status should show paths that are valid everywhere.
fn with_absolute_paths(args: &SourceArgs) -> SourceArgs {
    SourceArgs {
        source: absolute_source(&args.source),
        cacert: args.cacert.as_ref().map(|path| {
            let absolute = std::path::absolute(path);
            absolute.unwrap_or_else(|_| path.clone())
        }),
        ..args.clone()
    }
}

/// Makes the path in a SOURCE absolute.
pub(crate) fn absolute_source(source: &OsString) -> OsString {
    let text = source.to_str();
    if let Some(nested) = text.and_then(NestedSource::parse) {
        return match absolute_source(&nested.outer.into()).into_string() {
            Ok(outer) => NestedSource { outer, ..nested }.to_string().into(),
            Err(_) => source.clone(),
        };
    }
    if let Some(mut reference) = text.and_then(ImageRef::parse) {
        let place = match reference.transport {
            // Opening it fails, and the error shows it unchanged.
            Transport::Oci if reference.location.contains("://") => None,
            Transport::Oci => std::path::absolute(&reference.location)
                .ok()
                .map(Into::into),
            Transport::OciArchive | Transport::DockerArchive => {
                Some(absolute_source(&reference.location.clone().into()))
            }
        };
        if !reference.location.is_empty()
            && let Some(Ok(place)) = place.map(OsString::into_string)
        {
            reference.location = place;
        }
        let absolute = reference.to_string();
        // A colon in the current directory's name would change how the reference is parsed.
        let is_same = ImageRef::parse(&absolute).as_ref() == Some(&reference);
        return if is_same {
            absolute.into()
        } else {
            source.clone()
        };
    }
    // A URL without a scheme is not found, and the error should show it unchanged.
    let is_path =
        text.is_none_or(|text| text != "-" && !text.contains("://") && !source::lacks_scheme(text));
    match std::path::absolute(source) {
        Ok(path) if is_path => path.into(),
        _ => source.clone(),
    }
}

/// Shows the progress of indexing `total_bytes` of compressed data, unless `quiet`.
pub(crate) fn start_indexing_progress(
    total_bytes: Option<u64>,
    stats: &Arc<Stats>,
    quiet: bool,
) -> Progress {
    let options = ProgressOptions {
        verb: "indexing",
        total_bytes,
        stats: Arc::clone(stats),
    };
    Progress::start(options, quiet)
}

/// Returns the options with which the archive in `args` is opened.
pub(crate) fn open_options(
    args: &SourceArgs,
    saved: &SavedIndexArgs,
    disk_cache: DiskCacheMode,
) -> OpenOptions {
    OpenOptions {
        scan: scan_options(args),
        cache_dir: saved.cache_dir.directory().ok(),
        index_file: saved.index.clone(),
        index_memory: MemoryLimit::new(args.index_memory.0),
        should_rescan_unproven: false,
        should_log_problems: false,
        layer: None,
        disk_cache,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::parse_source;

    #[test]
    fn kept_bytes_limit_grows_with_the_memory() {
        let kept = |flags: &[&str]| {
            let source = parse_source(&[flags, &["a.tar"]].concat());
            scan_options(&source).tar.limits.metadata_bytes
        };
        assert_eq!(kept(&[]), tar::Limits::default().metadata_bytes);
        assert_eq!(kept(&["--memory=1GiB"]), 2 << 30);
    }
}
