//! Opens SOURCE: an archive, a part of another source, or an image with its layers.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use tokio::runtime::Runtime;

use super::args::{CacheArgs, CacheDirArgs, LayerArgs, SourceArgs};
use super::nested::{NestedSource, Part};
use super::open_archive;
use crate::cli::args::headers::{self, Header};
use crate::cli::daemon::privileges;
use tarfs::archive::{Archive, DiskCacheMode, OpenOptions, scan};
use tarfs::base::buffer_pool::BufferPool;
use tarfs::base::extent::{Extent, Packed};
use tarfs::base::stats::Stats;
use tarfs::codec::{self, Compression, Detected};
use tarfs::fetch;
use tarfs::image::{self, Image, ImageRef, Layout, Transport};
use tarfs::index::MemoryLimit;
use tarfs::index::store::Store;
use tarfs::source::{self, Access, Fingerprint, Slice, Source, SourceDirectory};
use tarfs::tar;

/// Divisor of --memory for the archives around SOURCE.
///
/// Of an uncompressed one, only the index needs memory.
const OUTER_MEMORY_DIVISOR: u64 = 4;

/// Options for an archive around SOURCE, if there is one.
#[derive(Clone, Debug)]
pub(crate) struct OuterArchiveOptions {
    /// Directory for its index, if there is one.
    pub cache_dir: Option<PathBuf>,
    /// Whether decoded data of a compressed one is stored on disk.
    pub disk_cache: DiskCacheMode,
    /// Whether to hide the progress.
    pub quiet: bool,
    /// Number of archives around SOURCE, which share their memory.
    pub count: u64,
    /// Version that the mount shows, if this process is a successor.
    pub shown_version: Option<String>,
}

impl OuterArchiveOptions {
    /// Options for a verb that has no --cache-size, with the default limit.
    pub(crate) fn new(cache_dir: &CacheDirArgs, quiet: bool) -> Self {
        Self {
            cache_dir: cache_dir.directory().ok(),
            disk_cache: DiskCacheMode::Enabled { limit_bytes: None },
            quiet,
            count: 1,
            shown_version: None,
        }
    }

    /// Options with the same cache limit as the archive inside.
    pub(crate) fn from_cache_args(cache: &CacheArgs, quiet: bool) -> Self {
        Self {
            disk_cache: open_archive::disk_cache_policy(cache),
            ..Self::new(&cache.saved.cache_dir, quiet)
        }
    }

    /// Returns the version at `url` that the mount shows, if this process is a successor.
    ///
    /// Of the versions with saved indexes, takes the one used last.
    fn known_version(&self, url: &str) -> Option<Fingerprint> {
        let shown = self.shown_version.as_ref()?;
        let place = source::locator(url)?;
        let store = Store::new(self.cache_dir.as_ref()?);
        let files = store.files().ok()?.into_iter();
        let versions = files.filter_map(|file| {
            let saved = file.origin()?.locator;
            let is_shown = shown.contains(&saved.fingerprint);
            let version = Fingerprint::parse_strong_etag(&saved.fingerprint)?;
            (saved.canonical == place).then_some((is_shown, file.used, version))
        });
        let last = versions.max_by_key(|&(is_shown, used, _)| (is_shown, used));
        last.map(|(.., version)| version)
    }

    /// Opens the archive at `source`, to read the files in it.
    fn open(
        &self,
        source: Arc<dyn Source>,
        args: &SourceArgs,
        network: &Runtime,
    ) -> anyhow::Result<Archive> {
        // Its source counts what is read, and decoded bytes are not counted. The user wants the progress of
        // the layers.
        let stats = Arc::new(Stats::default());
        let is_plain = is_plain(&source, network)?;
        let options = OpenOptions {
            scan: scan::Options {
                compression: None,
                tar: tar::Options::default(),
                allow_truncated: false,
                allow_skipping: true,
                memory: args.memory.0 / OUTER_MEMORY_DIVISOR / self.count.max(1),
                sha256: scan::Digest::Ignore,
                ..open_archive::scan_options(args)
            },
            cache_dir: self.cache_dir.clone(),
            index_file: None,
            index_memory: MemoryLimit::new(args.index_memory.0),
            should_rescan_unproven: false,
            should_log_problems: false,
            layer: None,
            // Files of an uncompressed archive are read as ranges of its source.
            disk_cache: if is_plain {
                DiskCacheMode::IndexOnly
            } else {
                self.disk_cache
            },
        };
        let _progress =
            open_archive::start_indexing_progress(source.fingerprint().len, &stats, self.quiet);
        let archive = Archive::open(source, &options, network.handle(), &stats);
        archive.context("the archive around SOURCE")
    }
}

/// Returns the image that SOURCE names; `None` for a path or a URL.
pub(crate) fn image_reference(args: &SourceArgs) -> Option<ImageRef> {
    ImageRef::parse(args.source.to_str()?)
}

/// Refuses flags for a single archive if SOURCE is an image.
///
/// # Errors
/// `args` name an image, and --index or --compression is given.
pub(crate) fn reject_single_archive_flags(
    args: &SourceArgs,
    index: Option<&Path>,
) -> anyhow::Result<()> {
    if image_reference(args).is_none() {
        return Ok(());
    }
    anyhow::ensure!(
        index.is_none(),
        "--index cannot be used with an image, because each layer has its own index (leave it out)"
    );
    anyhow::ensure!(
        args.compression.is_none(),
        "--compression cannot be used with an image, because each layer has its own format (leave it out)"
    );
    Ok(())
}

/// Returns the location of the file or directory that contains `source`.
///
/// That is `source` itself if it is not a part of another one.
pub(crate) fn outermost_location(source: &OsStr) -> Option<String> {
    let mut place = source.to_str()?.to_owned();
    while let Some(outer) = outer_spec(&place) {
        place = outer;
    }
    Some(place)
}

/// Returns the source of which `spec` is a part, or which contains it.
fn outer_spec(spec: &str) -> Option<String> {
    let image = ImageRef::parse(spec).map(|reference| reference.location);
    image.or_else(|| NestedSource::parse(spec).map(|nested| nested.outer))
}

/// Returns the part of `memory` that `count` archives around SOURCE leave.
pub(crate) fn memory_without_outer(memory: u64, count: u64) -> u64 {
    match count {
        0 => memory,
        _ => memory - memory / OUTER_MEMORY_DIVISOR,
    }
}

/// Number of archives around `source`.
pub(crate) fn outer_archive_count(source: &OsStr) -> u64 {
    let mut count = 0;
    let mut spec = source.to_str().map(str::to_owned);
    while let Some(part) = spec {
        let is_in_archive = match ImageRef::parse(&part) {
            Some(reference) => reference.transport != Transport::Oci,
            None => NestedSource::parse(&part)
                .is_some_and(|nested| matches!(nested.part, Part::File(_))),
        };
        count += u64::from(is_in_archive);
        spec = outer_spec(&part);
    }
    count
}

/// Opens the archive or part in `args`, with only these headers.
///
/// # Errors
/// The source is unreachable or not of the expected kind.
pub(crate) fn open_source(
    headers: &[Header],
    args: &SourceArgs,
    outer: &OuterArchiveOptions,
    network: &Runtime,
    stats: &Arc<Stats>,
) -> anyhow::Result<Arc<dyn Source>> {
    let Some(nested) = args.source.to_str().and_then(NestedSource::parse) else {
        let known_version = args
            .source
            .to_str()
            .and_then(|url| outer.known_version(url));
        return open_archive::open_source_with(headers, args, known_version, network, stats);
    };
    anyhow::ensure!(
        nested.outer != "-",
        "a part of an archive needs random access, which standard input does not offer (store it in \
         a file first)"
    );
    let outer_args = SourceArgs {
        source: nested.outer.into(),
        ..args.clone()
    };
    let whole = open_source(headers, &outer_args, outer, network, stats)?;
    match nested.part {
        Part::File(path) => {
            let archive = outer.open(whole, args, network)?;
            Ok(Arc::new(archive).file(&path)?)
        }
        Part::Range { start, len } => {
            let all = whole.fingerprint().len.unwrap_or(u64::MAX);
            let end = start.checked_add(len.unwrap_or_default());
            anyhow::ensure!(
                end.is_some_and(|end| end <= all),
                "{}: {} bytes from {start}: it has only {all} bytes",
                whole.location(),
                len.map_or_else(|| "the".to_owned(), |len| len.to_string())
            );
            let len = len.unwrap_or(all - start);
            let name = format!("{}: {len} bytes from {start}", whole.location());
            let bytes = Extent::with_len(Packed(start), len);
            let slice = Slice::new(whole, bytes, &name);
            Ok(Arc::new(slice.context(name)?))
        }
    }
}

/// Opens the archives of SOURCE, the lowest layer first, with only these headers.
///
/// A SOURCE that is no image is [one archive](open_source).
///
/// # Errors
/// The source is unreachable or not of the expected kind.
pub(crate) fn open_layers(
    headers: &[Header],
    args: &SourceArgs,
    outer: &OuterArchiveOptions,
    network: &Runtime,
    stats: &Arc<Stats>,
) -> anyhow::Result<Vec<Arc<dyn Source>>> {
    let Some(reference) = image_reference(args) else {
        return Ok(vec![open_source(headers, args, outer, network, stats)?]);
    };
    let image = open_image_with(&reference, headers, args, outer, network, stats)?;
    Ok(image.layers.into_iter().map(|layer| layer.source).collect())
}

/// Opens the image at `reference`, with all headers of the command line.
///
/// # Errors
/// The image is unreachable or invalid, or a header is.
pub(crate) fn open_image(
    reference: &ImageRef,
    args: &SourceArgs,
    outer: &OuterArchiveOptions,
    network: &Runtime,
    stats: &Arc<Stats>,
) -> anyhow::Result<Image> {
    reject_single_archive_flags(args, None)?;
    privileges::disable_core_dumps(args, &LayerArgs::default());
    let headers = headers::load_all(&args.headers)?;
    open_image_with(reference, &headers, args, outer, network, stats)
}

fn open_image_with(
    reference: &ImageRef,
    headers: &[Header],
    args: &SourceArgs,
    outer: &OuterArchiveOptions,
    network: &Runtime,
    stats: &Arc<Stats>,
) -> anyhow::Result<Image> {
    let kind = reference.transport.name();
    anyhow::ensure!(
        !reference.location.is_empty(),
        "SOURCE has no path (write {kind}:PATH)"
    );
    let is_url = reference.location.contains("://");
    let layout = match reference.transport {
        Transport::Oci if is_url => anyhow::bail!(
            "{kind}: is for directories on this machine (put the image into an archive for \
             oci-archive:URL)"
        ),
        Transport::Oci => Layout::Directory(SourceDirectory::open(
            Path::new(&reference.location),
            Arc::clone(stats),
        )?),
        Transport::OciArchive | Transport::DockerArchive => {
            anyhow::ensure!(
                reference.location != "-",
                "an image needs random access, which standard input does not offer (store it in a file first)"
            );
            let args = SourceArgs {
                source: reference.location.clone().into(),
                ..args.clone()
            };
            let source = open_source(headers, &args, outer, network, stats)?;
            let archive = outer.open(source, &args, network)?;
            Layout::Archive(Arc::new(archive))
        }
    };
    let platform = args.platform.as_ref();
    let image = image::open(reference, &layout, platform, network.handle())?;
    if let Some(expected) = args.expect_sha256 {
        let (location, found) = (&image.location, image.digest);
        anyhow::ensure!(
            found == expected,
            "{location}: the image's digest is sha256:{found}, not sha256:{expected}"
        );
    }
    Ok(image)
}

/// Whether the archive is uncompressed, so that its files are ranges of `source`.
fn is_plain(source: &Arc<dyn Source>, network: &Runtime) -> anyhow::Result<bool> {
    if source.access() == Access::Stream {
        return Ok(false);
    }
    let len = source.fingerprint().len.unwrap_or_default();
    let first = Extent::with_len(Packed(0), len.min(codec::detect::DETECT_LEN as u64));
    let bytes = fetch::read(
        network.handle(),
        source,
        first,
        &BufferPool::new(first.len().max(1)),
    )?;
    let found = codec::detect(&bytes);
    Ok(matches!(found, Detected::Supported(Compression::None)))
}
