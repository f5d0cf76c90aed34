//! From flags to a source, a scan's options, or an archive.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::runtime::Runtime;

use super::args::{CacheArgs, SavedIndexArgs, SourceArgs};
use super::copy::CopySource;
use super::headers::{self, Header};
use super::layers::{self, LayerArgs};
use super::mount::{MountArgs, OpenedArchive};
use super::nested::NestedSource;
use super::output::{Progress, ProgressOptions};
use super::prefetch::Mode;
use super::resolve::{self, OuterArchiveOptions};
use super::status_source::ArchiveStatus;
use super::{environment, privileges};
use crate::archive::{Archive, Callback, DiskCacheMode, IndexGuard, OpenOptions, WaitFor, scan};
use crate::base::stats::Stats;
use crate::fetch;
use crate::image::{ImageRef, Transport};
use crate::index::MemoryLimit;
use crate::layers::LayeredArchive;
use crate::source::{self, Certificates, Fingerprint, Retry, Source};
use crate::tar;

/// The network's threads; everything else has threads of its own.
///
/// # Errors
/// When the system has no thread left to give.
pub(super) fn start_network_runtime() -> anyhow::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("tarfs-net")
        .enable_all()
        .build()
        .context("cannot start the network's threads")
}

/// The archive at the path or URL that `args` name, with these headers and no others. If a process before this one
/// knew its version, see [`source::Options::known_version`].
///
/// # Errors
/// When it cannot be reached, or is none.
pub(super) fn open_source_with(
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

/// How stubborn a source is. Who gives a number means it.
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

/// How the archive that `args` name is scanned.
pub(super) fn scan_options(args: &SourceArgs) -> scan::Options {
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
        // What is asked of an image is asked of its manifest, which speaks for the layers.
        sha256: args
            .expect_sha256
            .filter(|_| resolve::image_reference(args).is_none())
            .map_or(scan::Digest::Ignore, scan::Digest::Expect),
        ..scan::Options::default()
    }
}

/// How a verb opens SOURCE and what is laid over it.
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a setting of its own"
)]
#[derive(Debug)]
pub(super) struct OpenRequest<'a> {
    pub source: &'a SourceArgs,
    pub layers: &'a LayerArgs,
    pub cache: &'a CacheArgs,
    /// What is to be done with decoded data.
    pub spooling: DiskCacheMode,
    /// Whether an index to be made may lack hashes of what nobody has to read for it.
    pub hops: bool,
    /// Whether an archive whose version nothing proves is scanned whatever was saved of it.
    pub should_rescan_unproven: bool,
    /// Whether members that are damaged or not in the tree are logged.
    pub should_log_problems: bool,
    /// Whether no progress is shown.
    pub quiet: bool,
}

/// What a verb has opened: one archive, or several as one tree.
#[derive(Debug)]
pub(super) enum OpenedTree {
    Archive(Box<Archive>),
    LayeredArchive(LayeredArchive),
}

impl OpenedTree {
    /// All of it.
    pub(super) fn index(&self) -> IndexGuard<'_> {
        match self {
            Self::Archive(archive) => archive.index(),
            Self::LayeredArchive(stack) => IndexGuard::Complete(stack.index()),
        }
    }
}

impl OpenRequest<'_> {
    /// How each archive is opened.
    pub(super) fn options(&self) -> OpenOptions {
        let mut options = open_options(self.source, &self.cache.saved, self.spooling);
        options.scan.allow_skipping = self.hops;
        options.should_rescan_unproven = self.should_rescan_unproven;
        options.should_log_problems = self.should_log_problems;
        options
    }

    /// Whether it is several archives; see [`LayerArgs::is_layered`].
    ///
    /// # Errors
    /// When something is asked that several cannot do.
    fn is_layered(&self) -> anyhow::Result<bool> {
        let index = self.cache.saved.index.as_deref();
        self.layers.is_layered(self.source, index)
    }

    /// All of SOURCE and what is laid over it, with its index.
    ///
    /// # Errors
    /// When it cannot be opened, or is read from standard input, which gives it only once.
    pub(super) fn open(&self, network: &Runtime, stats: &Arc<Stats>) -> anyhow::Result<OpenedTree> {
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

/// What a mount serves.
///
/// # Errors
/// When it cannot be opened.
pub(super) fn open_for_mount(args: &MountArgs, stats: Arc<Stats>) -> anyhow::Result<OpenedArchive> {
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
        spooling: disk_cache_policy(&args.cache),
        // What is fetched anyway had better be fetched while the scan goes by.
        hops: args.prefetch.prefetch != Mode::All,
        // The copy holds files of an earlier scan.
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
        // Users wait, but the supervisor does so as long as the source cannot be reached.
        options.scan.retry_forever.enable();
    }
    let archive = if args.waits_for_index() {
        Archive::open(source, &options, network.handle(), &stats)?
    } else {
        let archive = Archive::open_early(source, &options, network.handle(), &stats)?;
        // Nobody waits at a terminal any more, and the mount is there when the network comes back.
        options.scan.retry_forever.enable();
        archive
    };
    archive.on_available(WaitFor::End, Callback::new(move || drop(progress)));
    let archive = Arc::new(archive);
    let (recording, prefetch_notes) =
        super::prefetch::start(&args.prefetch, (&args.source, &headers), &archive, &network)?;
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

/// What the kernel lists as the source of a mount of `args`, which are [absolute](with_absolute_paths).
pub(super) fn mount_source_name(args: &SourceArgs) -> String {
    source::redact(&args.source.to_string_lossy())
}

/// What is to be done with decoded data.
pub(super) fn disk_cache_policy(cache: &CacheArgs) -> DiskCacheMode {
    if cache.no_disk_cache {
        return DiskCacheMode::Disabled;
    }
    DiskCacheMode::Enabled {
        limit_bytes: cache.cache_size.map(|size| size.0),
    }
}

/// Longest file of certificates that is read, in bytes.
const MAX_CERTIFICATES_LEN: u64 = 16 << 20;

/// The certificates in the file that --cacert names, if it is given.
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

/// The same source wherever the process goes: a mount leaves the directory it was started in, and
/// its status should name a path that everyone understands.
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

/// The same source wherever the process goes.
pub(super) fn absolute_source(source: &OsString) -> OsString {
    let text = source.to_str();
    if let Some(nested) = text.and_then(NestedSource::parse) {
        return match absolute_source(&nested.outer.into()).into_string() {
            Ok(outer) => NestedSource { outer, ..nested }.to_string().into(),
            Err(_) => source.clone(),
        };
    }
    if let Some(mut reference) = text.and_then(ImageRef::parse) {
        let place = match reference.transport {
            // Which is refused as it is.
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
        // Below a directory with a colon in its name it would be read as another place.
        let is_same = ImageRef::parse(&absolute).as_ref() == Some(&reference);
        return if is_same {
            absolute.into()
        } else {
            source.clone()
        };
    }
    // Without its scheme a URL is not found, and the error should name it as it is.
    let is_path =
        text.is_none_or(|text| text != "-" && !text.contains("://") && !source::lacks_scheme(text));
    match std::path::absolute(source) {
        Ok(path) if is_path => path.into(),
        _ => source.clone(),
    }
}

/// Shows how the indexing of what has so many packed bytes goes, unless `quiet`.
pub(super) fn start_indexing_progress(
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

/// How the archive that the arguments name is opened.
pub(super) fn open_options(
    args: &SourceArgs,
    saved: &SavedIndexArgs,
    spooling: DiskCacheMode,
) -> OpenOptions {
    OpenOptions {
        scan: scan_options(args),
        cache_dir: saved.cache_dir.directory().ok(),
        index_file: saved.index.clone(),
        index_memory: MemoryLimit::new(args.index_memory.0),
        should_rescan_unproven: false,
        should_log_problems: false,
        layer: None,
        disk_cache: spooling,
    }
}

#[cfg(test)]
mod tests {
    use super::super::args::tests::parse_source;
    use super::*;

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
