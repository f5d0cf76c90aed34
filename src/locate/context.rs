//! Opens a SOURCE with the settings of one run.

use std::any::Any;
use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use serde::{Deserialize, Serialize};
use tokio::runtime::{Builder, Handle, Runtime};

use super::error::{Error, MAX_PARTS};
use super::glob;
use super::spec::{SourceSpec, TreeSpec};
use crate::archive::scan::{self, Digest, MemoryShare};
use crate::archive::{
    Archive, Callback, DiskCacheMode, OpenError, OpenOptions, TreeOrigin, Volume, WaitFor,
    detect_compression,
};
use crate::base::descriptor_limit::{NETWORK_DESCRIPTORS, check_descriptor_limit};
use crate::base::extent::{Extent, Packed};
use crate::base::sha256::Sha256;
use crate::base::stats::Stats;
use crate::codec::Compression;
use crate::image::{self, Image, ImageOrArtifact, LayerIndexes, Layout, Platform, Transport};
use crate::index::store::{self, Store};
use crate::index::{Locator, MemoryLimit};
use crate::layers::{Layer, LayeredArchive};
use crate::source::documents::MAX_LAYERS;
use crate::source::{
    self, Access, Fingerprint, Join, MemorySource, Repository, RetryForever, Revalidation, Slice,
    Source, SourceDirectory, location_text,
};
use crate::tar;

/// Maximum number of parts of a joined source that are opened at the same time.
const MAX_CONCURRENT_OPENS: usize = 8;

/// Starts the threads for the network. All other work has threads of its own.
///
/// # Errors
/// If the system has no more threads or descriptors.
pub fn start_network() -> io::Result<Runtime> {
    check_descriptor_limit(NETWORK_DESCRIPTORS)?;
    Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("tarfs-net")
        .enable_all()
        .build()
}

/// Which published indexes are used.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct PublishedIndexChoice {
    /// The weakest origin of a tree that is accepted. A name with a digest raises it to that of a manifest.
    pub least_origin: TreeOrigin,
    /// Whether the search begins before it is known that an index is needed, to save time.
    pub is_searched_early: bool,
    /// Whether an archive is not opened without a published index, unless an index is saved.
    pub is_required: bool,
    /// Location of the only published index that is used.
    pub location: Option<String>,
    /// SHA-256 of the published index.
    pub sha256: Option<Sha256>,
}

impl PublishedIndexChoice {
    /// The location of the published index that a user names by `path`, if that is a URL, or else the file of a saved
    /// one.
    pub fn place_of(path: &Path) -> (Option<String>, Option<PathBuf>) {
        let name = source::canonical_os_name(path.as_os_str());
        match name.to_str().filter(|name| source::is_url(name)) {
            Some(url) => (Some(url.to_owned()), None),
            None => (None, Some(path.to_owned())),
        }
    }
}

/// Displays the progress of indexing until its result is dropped, from the packed length and scan counters.
pub type ProgressFn = Arc<dyn Fn(Option<u64>, &Arc<Stats>) -> Box<dyn Any + Send> + Send + Sync>;

/// [`Archive::open`] or [`Archive::open_early`].
type OpenFn = fn(Arc<dyn Source>, &OpenOptions, &Handle, &Arc<Stats>) -> Result<Archive, OpenError>;

/// The opened sources of a tree.
#[derive(Clone, Debug)]
pub struct Sources {
    /// The layers, from the bottom. There is always one.
    pub layers: Vec<Layer>,
    /// Whether they form layers. An artifact of a registry is an archive.
    pub is_layered: bool,
}

/// Settings with which a SOURCE is opened.
#[derive(Clone)]
pub struct OpenContext {
    /// Runtime of the network. Sources are opened on threads outside of it.
    pub network: Handle,
    /// Options of each source. Headers and client certificate are for the host of `headers_origin` only.
    pub source: source::Options,
    /// Location whose host receives the headers; see [`SourceSpec::origin`].
    pub headers_origin: String,
    /// Options of the archives of SOURCE; enclosing archives share the memory of the scan.
    /// [`archive_options`](Self::archive_options) sets the digest and the options of layers.
    pub archive: OpenOptions,
    /// Whether decoded data of compressed enclosing archives is cached on disk.
    pub enclosing_disk_cache: DiskCacheMode,
    /// Expected SHA-256 of an archive's packed bytes, or of an image's manifest.
    pub expected_sha256: Option<Sha256>,
    /// Platform of an image; `None` for this machine's.
    pub platform: Option<Platform>,
    /// Version that a mount shows, if this process continues it.
    pub shown_version: Option<String>,
    /// Which published indexes are used.
    pub published_index: PublishedIndexChoice,
    /// Display of the progress.
    pub progress: Option<ProgressFn>,
}

impl fmt::Debug for OpenContext {
    /// Omits headers, because they are often credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenContext")
            .field("archive", &self.archive)
            .finish_non_exhaustive()
    }
}

impl OpenContext {
    /// Settings without headers, caches and a progress display.
    pub fn new(network: Handle) -> Self {
        Self {
            network,
            source: source::Options::default(),
            headers_origin: String::new(),
            archive: OpenOptions::default(),
            enclosing_disk_cache: DiskCacheMode::Enabled { limit_bytes: None },
            expected_sha256: None,
            platform: None,
            shown_version: None,
            published_index: PublishedIndexChoice::default(),
            progress: None,
        }
    }

    /// Returns the options with which each archive of `tree` is opened, if they form layers as
    /// [`Sources::is_layered`] says.
    pub fn archive_options(&self, tree: &TreeSpec, is_layered: bool) -> OpenOptions {
        let mut options = self.archive.clone();
        if tree.enclosing_archives() > 0 {
            let share = MemoryShare::Enclosed;
            (options.scan.memory, options.scan.memory_share) =
                (share.of(options.scan.memory), share);
        }
        // The digest of an image is that of its manifest, which contains those of its layers.
        let expected = self.expected_sha256.filter(|_| !tree.source.is_image());
        options.scan.sha256 = expected.map_or(Digest::Ignore, Digest::Expect);
        if is_layered {
            options.layer = Some(tree.whiteouts.unwrap_or_default());
            options.scan.tar.accepts_empty = true;
            // An entry that one layer lacks may be in another one.
            options.should_log_problems = false;
        }
        options
    }

    /// Opens and completely indexes `tree`.
    ///
    /// # Errors
    /// A source cannot be opened, or the layers form no valid tree.
    pub fn open(&self, tree: &TreeSpec) -> Result<Arc<dyn Volume>, Error> {
        self.open_with(tree, Archive::open)
    }

    /// Opens `tree` as [`open`](Self::open) does, but a single archive as [`Archive::open_early`] does.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_early(&self, tree: &TreeSpec) -> Result<Arc<dyn Volume>, Error> {
        self.open_with(tree, Archive::open_early)
    }

    fn open_with(&self, tree: &TreeSpec, open_archive: OpenFn) -> Result<Arc<dyn Volume>, Error> {
        let stats = &self.source.stats;
        if tree.is_layered() {
            let Sources { layers, is_layered } = self.open_sources(tree)?;
            let options = self.archive_options(tree, is_layered);
            if let ([layer], false) = (&*layers, is_layered) {
                let options = OpenOptions {
                    published_index: layer.published_index.clone(),
                    ..options
                };
                let source = Arc::clone(&layer.source);
                return self.open_single(source, &options, open_archive);
            }
            let lens = layers.iter().map(|layer| layer.source.fingerprint().len);
            let _progress = self.start_progress(lens.sum(), stats);
            let whiteouts = tree.whiteouts.unwrap_or_default();
            let layered = LayeredArchive::open(&layers, &options, whiteouts, &self.network, stats)?;
            return Ok(Arc::new(layered));
        }
        let mut options = self.archive_options(tree, false);
        // Its first request is sent before the archive's answer arrives.
        let is_pinned = self.expected_sha256.is_some();
        options.published_index = self.published_index(&tree.source, is_pinned);
        self.open_single(self.open_source(&tree.source)?, &options, open_archive)
    }

    fn open_single(
        &self,
        source: Arc<dyn Source>,
        options: &OpenOptions,
        open_archive: OpenFn,
    ) -> Result<Arc<dyn Volume>, Error> {
        let stats = &self.source.stats;
        let progress = self.start_progress(source.fingerprint().len, stats);
        let archive = open_archive(source, options, &self.network, stats)?;
        if let Some(progress) = progress {
            archive.on_available(WaitFor::End, Callback::new(move || drop(progress)));
        }
        Ok(Arc::new(archive))
    }

    fn start_progress(
        &self,
        total_bytes: Option<u64>,
        stats: &Arc<Stats>,
    ) -> Option<Box<dyn Any + Send>> {
        let start = self.progress.as_ref()?;
        Some(start(total_bytes, stats))
    }

    /// Opens the sources of all layers, from the bottom, with all layers of each image.
    ///
    /// # Errors
    /// A source is unreachable or not of the expected kind.
    pub fn open_sources(&self, tree: &TreeSpec) -> Result<Sources, Error> {
        if tree.sources().filter(|spec| spec.is_stdin()).count() > 1 {
            return Err(Error::StdinTwice);
        }
        let share = enclosing_share(tree.enclosing_archives());
        let mut is_layered = tree.is_layered();
        let mut layers = Vec::new();
        for (number, spec) in tree.sources().enumerate() {
            let expected = self.expected_sha256.filter(|_| number == 0);
            if !spec.is_image() {
                let published_index = self.published_index(spec, expected.is_some());
                let source = self.open_part(spec, share)?;
                let digest = expected.map_or(Digest::Ignore, Digest::Expect);
                layers.push(Layer {
                    source,
                    digest,
                    published_index,
                });
                continue;
            }
            let (opened, indexes) = self.open_image_or_artifact(spec, expected, share)?;
            let sources = match opened {
                ImageOrArtifact::Image(image) => {
                    image.layers.into_iter().map(|layer| layer.source).collect()
                }
                ImageOrArtifact::Artifact { archive, .. } => {
                    is_layered &= !tree.may_be_artifact();
                    vec![archive]
                }
            };
            layers.extend(sources.into_iter().map(|source| Layer {
                published_index:
                    indexes.as_ref().and_then(|indexes| {
                        self.index_of_layer(indexes, &*source, expected.is_some())
                    }),
                source,
                digest: Digest::Ignore,
            }));
        }
        if layers.len() > MAX_LAYERS {
            return Err(Error::TooManyLayers(layers.len()));
        }
        if layers.is_empty() {
            // An image without layers is an empty tree, like an image with one empty layer.
            let source = Arc::new(MemorySource::new("an image without layers", Bytes::new()));
            layers.push(Layer {
                source,
                digest: Digest::Expect(Sha256::of(b"")),
                published_index: None,
            });
        }
        Ok(Sources { layers, is_layered })
    }

    /// Opens the image at `spec`.
    ///
    /// # Errors
    /// It is no image, or the image is unreachable or invalid.
    pub fn open_image(&self, spec: &SourceSpec) -> Result<Image, Error> {
        let share = enclosing_share(spec.enclosing_archives());
        let (opened, _) = self.open_image_or_artifact(spec, self.expected_sha256, share)?;
        match opened {
            ImageOrArtifact::Image(image) => Ok(*image),
            ImageOrArtifact::Artifact { location, .. } => Err(Error::ArtifactAsImage(location)),
        }
    }

    /// Opens an image, or the artifact of a registry, and compares its digest with the expected one.
    fn open_image_or_artifact(
        &self,
        spec: &SourceSpec,
        expected: Option<Sha256>,
        share: MemoryShare,
    ) -> Result<(ImageOrArtifact, Option<Arc<LayerIndexes>>), Error> {
        let (opened, indexes) = if let SourceSpec::Registry(name) = spec {
            let (opened, repository) = self.open_in_registry(name)?;
            let indexes = self.layer_indexes(&opened, &repository);
            (opened, Some(Arc::new(indexes)))
        } else {
            let image = self.open_stored_image(spec, share)?;
            (ImageOrArtifact::Image(Box::new(image)), None)
        };
        let (location, found) = match &opened {
            ImageOrArtifact::Image(image) => (&image.location, image.digest),
            ImageOrArtifact::Artifact {
                location, digest, ..
            } => (location, *digest),
        };
        match expected {
            Some(expected) if found != expected => Err(Error::ImageDigestMismatch {
                location: location.clone(),
                expected,
                found,
            }),
            _ => Ok((opened, indexes)),
        }
    }

    /// The indexes that are published for `opened` in `repository`.
    pub(super) fn layer_indexes(
        &self,
        opened: &ImageOrArtifact,
        repository: &Arc<Repository>,
    ) -> LayerIndexes {
        let subject = match opened {
            ImageOrArtifact::Image(image) => image.digest,
            ImageOrArtifact::Artifact { digest, .. } => *digest,
        };
        LayerIndexes::new(Arc::clone(repository), subject, self.network.clone())
    }

    pub(super) fn open_in_registry(
        &self,
        name: &str,
    ) -> Result<(ImageOrArtifact, Arc<Repository>), Error> {
        self.check_image_options()?;
        let opening = Repository::open(name, self.source_options(name));
        let repository = Arc::new(self.network.block_on(opening)?);
        let platform = self.platform.as_ref();
        let store = self.archive.cache_dir.as_deref().map(Store::new);
        let image = Arc::clone(&repository);
        let opened = image::open_in_registry(image, store, platform, &self.network)?;
        Ok((opened, repository))
    }

    fn check_image_options(&self) -> Result<(), Error> {
        let published = &self.published_index;
        if self.archive.index_file.is_some() || published.location.is_some() {
            return Err(Error::IndexOfImage("--index"));
        }
        if published.sha256.is_some() {
            return Err(Error::IndexOfImage("--index-sha256"));
        }
        if self.archive.scan.compression.is_some() {
            return Err(Error::CompressionOfImage);
        }
        Ok(())
    }

    fn open_stored_image(&self, spec: &SourceSpec, share: MemoryShare) -> Result<Image, Error> {
        let SourceSpec::Image {
            transport,
            outer,
            name,
        } = spec
        else {
            return Err(Error::NotAnImage);
        };
        self.check_image_options()?;
        let location = spec.origin();
        if location.is_empty() {
            return Err(Error::NoImagePath(transport.name()));
        }
        let layout = match transport {
            Transport::Oci if source::is_url(location) => {
                return Err(Error::ImageDirectoryUrl(transport.name()));
            }
            Transport::Oci => {
                let stats = Arc::clone(&self.source.stats);
                Layout::Directory(SourceDirectory::open(Path::new(location), stats)?)
            }
            Transport::OciArchive | Transport::DockerArchive if outer.is_stdin() => {
                return Err(Error::ImageInStdin);
            }
            Transport::OciArchive | Transport::DockerArchive => {
                let source = self.open_part(outer, share)?;
                Layout::Archive(Arc::new(self.open_enclosing_archive(source, share)?))
            }
        };
        let platform = self.platform.as_ref();
        Ok(image::open(
            *transport,
            name.as_deref(),
            &layout,
            platform,
            (&self.network, &self.source),
        )?)
    }

    /// Opens the archive or part at `spec`. The manifest of an artifact must have the expected digest.
    ///
    /// # Errors
    /// It is an image, or unreachable, or not of the expected kind or digest.
    pub fn open_source(&self, spec: &SourceSpec) -> Result<Arc<dyn Source>, Error> {
        let share = enclosing_share(spec.enclosing_archives());
        if !spec.is_in_registry() {
            return self.open_part(spec, share);
        }
        let expected = self.expected_sha256;
        archive_of(self.open_image_or_artifact(spec, expected, share)?.0)
    }

    fn open_part(&self, spec: &SourceSpec, share: MemoryShare) -> Result<Arc<dyn Source>, Error> {
        match spec {
            SourceSpec::Plain(location) => self.network.block_on(self.open_location(location)),
            SourceSpec::Join(parts) => self.open_join(parts, share),
            SourceSpec::Image { .. } => Err(Error::ImageAsArchive),
            SourceSpec::Registry(name) => archive_of(self.open_in_registry(name)?.0),
            SourceSpec::Member { outer, .. } | SourceSpec::Slice { outer, .. }
                if outer.is_stdin() =>
            {
                Err(Error::PartOfStdin)
            }
            SourceSpec::Member { outer, path } => {
                let archive = self.open_part(outer, share)?;
                let archive = Arc::new(self.open_enclosing_archive(archive, share)?);
                Ok(archive.file(path)?)
            }
            SourceSpec::Slice { outer, start, len } => {
                open_slice(self.open_part(outer, share)?, *start, *len)
            }
        }
    }

    /// Opens the parts of a joined source. Locations are opened at the same time.
    fn open_join(
        &self,
        parts: &[SourceSpec],
        share: MemoryShare,
    ) -> Result<Arc<dyn Source>, Error> {
        let is_origin = |part: &SourceSpec| part.origin() == OsStr::new(&self.headers_origin);
        if !self.source.mirror_urls.is_empty() && parts.iter().any(is_origin) {
            return Err(Error::MirrorsOfParts);
        }
        let is_offline = self.source.revalidation == Revalidation::Never;
        let mut expanded = Vec::new();
        for part in parts {
            match part {
                part if is_offline && source::is_url(part.origin()) => {
                    return Err(Error::OfflineParts);
                }
                part if part.is_stdin() => return Err(Error::PartOfStdin),
                SourceSpec::Plain(location) => {
                    let files = glob::expand(location)?.into_iter();
                    expanded.extend(files.map(SourceSpec::Plain));
                }
                part => expanded.push(part.clone()),
            }
        }
        if expanded.len() > MAX_PARTS {
            return Err(Error::TooManyParts);
        }
        let opening = expanded.iter().map(|part| async move {
            match part {
                SourceSpec::Plain(location) => self.open_location(location).await.map(Some),
                _ => Ok(None),
            }
        });
        let opening = stream::iter(opening).buffered(MAX_CONCURRENT_OPENS);
        let opened: Vec<_> = self.network.block_on(opening.try_collect())?;
        let opened = opened.into_iter().zip(&expanded);
        let sources =
            opened.map(|(source, part)| source.map_or_else(|| self.open_part(part, share), Ok));
        Ok(Arc::new(Join::new(sources.collect::<Result<_, _>>()?)?))
    }

    async fn open_location(&self, location: &OsStr) -> Result<Arc<dyn Source>, Error> {
        let location = &*location_text(location);
        if location.is_empty() {
            return Err(Error::Empty);
        }
        let mut options = self.source_options(location);
        options.known_version = self.known_version(location);
        Ok(source::open(location, options).await?)
    }

    /// Returns the options for `location`, without headers if they belong to another host.
    pub(super) fn source_options(&self, location: &str) -> source::Options {
        if location == self.headers_origin {
            self.source.clone()
        } else {
            self.source.for_other(location, &self.headers_origin)
        }
    }

    /// Returns the version at `url` to use without an answer of its server: that which the mount shows, or the
    /// one used last, of those with saved indexes.
    fn known_version(&self, url: &str) -> Option<Fingerprint> {
        if self.source.revalidation == Revalidation::Required {
            return None;
        }
        let shown = self.shown_version.as_deref().unwrap_or_default();
        let versions = self
            .saved_indexes(url)
            .into_iter()
            .filter_map(|(saved, used)| {
                let is_shown = shown.contains(&saved.fingerprint);
                let version = Fingerprint::parse_strong_etag(&saved.fingerprint)?;
                Some((is_shown, used, version))
            });
        let last = versions.max_by_key(|&(is_shown, used, _)| (is_shown, used));
        last.map(|(.., version)| version)
    }

    /// Returns the keys of all saved indexes of `url`, and when they were last used; none of a path.
    pub(super) fn saved_indexes(&self, url: &str) -> Vec<(Locator, SystemTime)> {
        let Some(locator) = source::canonical_location(url, &self.source) else {
            return Vec::new();
        };
        let store = self.archive.cache_dir.as_deref().map(Store::new);
        let files = store.and_then(|store| store.files().ok());
        let files = files.unwrap_or_default().into_iter();
        let saved = files.filter_map(|file| Some((store::origin(&file)?.locator, file.used)));
        saved
            .filter(|(saved, _)| saved.canonical == locator)
            .collect()
    }

    fn open_enclosing_archive(
        &self,
        source: Arc<dyn Source>,
        share: MemoryShare,
    ) -> Result<Archive, Error> {
        // The user wants the progress of the layers. Decoded bytes are not counted; the source counts reads.
        let stats = Arc::new(Stats::default());
        let options = OpenOptions {
            scan: scan::Options {
                compression: None,
                tar: tar::Options::default(),
                allow_truncated: false,
                allow_skipping: true,
                retry_forever: RetryForever::default(),
                memory: share.of(self.archive.scan.memory),
                memory_share: share,
                sha256: Digest::Ignore,
                ..self.archive.scan.clone()
            },
            cache_dir: self.archive.cache_dir.clone(),
            index_memory: MemoryLimit::new(self.archive.index_memory.bytes()),
            // Files of an uncompressed archive are read as ranges of its source.
            disk_cache: if self.is_uncompressed(&source)? {
                DiskCacheMode::IndexOnly
            } else {
                self.enclosing_disk_cache
            },
            ..OpenOptions::default()
        };
        let _progress = self.start_progress(source.fingerprint().len, &stats);
        let archive = Archive::open(source, &options, &self.network, &stats);
        archive.map_err(Error::EnclosingArchive)
    }

    /// Whether the archive is uncompressed, so that its files are ranges of `source`.
    fn is_uncompressed(&self, source: &Arc<dyn Source>) -> Result<bool, Error> {
        Ok(source.access() != Access::Stream
            && detect_compression(&self.network, source)? == Some(Compression::None))
    }
}

/// The memory of each of `count` enclosing archives.
fn enclosing_share(count: u64) -> MemoryShare {
    MemoryShare::Enclosing { count }
}

fn archive_of(opened: ImageOrArtifact) -> Result<Arc<dyn Source>, Error> {
    match opened {
        ImageOrArtifact::Image(_) => Err(Error::ImageAsArchive),
        ImageOrArtifact::Artifact { archive, .. } => Ok(archive),
    }
}

fn open_slice(
    whole: Arc<dyn Source>,
    start: u64,
    len: Option<u64>,
) -> Result<Arc<dyn Source>, Error> {
    let all = whole.fingerprint().len.unwrap_or(u64::MAX);
    let end = start.checked_add(len.unwrap_or_default());
    if end.is_none_or(|end| end > all) {
        let location = whole.location().to_owned();
        return Err(Error::OutOfRange {
            location,
            start,
            len,
            all,
        });
    }
    let len = len.unwrap_or(all - start);
    let name = format!("{}: {len} bytes from {start}", whole.location());
    match Slice::new(whole, Extent::with_len(Packed(start), len), &name) {
        Ok(slice) => Ok(Arc::new(slice)),
        Err(error) => Err(Error::Slice { name, error }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: nested-everywhere
    #[tokio::test]
    async fn outer_archives_share_one_fraction_of_the_memory() {
        let mut context = OpenContext::new(Handle::current());
        context.archive.scan.memory = 64 << 20;
        let memory = |text: &str| {
            let tree = TreeSpec::from(SourceSpec::from(text));
            let own = context.archive_options(&tree, false).scan.memory;
            let enclosing = enclosing_share(tree.enclosing_archives());
            let enclosing = enclosing.of(context.archive.scan.memory);
            (own >> 20, enclosing >> 20)
        };
        assert_eq!(memory("a.tar"), (64, 16));
        assert_eq!(memory("oci-archive:a"), (48, 16));
        assert_eq!(memory("docker-archive:tar:a!/b"), (48, 8));
    }
}
