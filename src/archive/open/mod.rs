//! Opens an archive: with a saved index that still matches, or by a scan.

pub(super) mod background_scan;
pub(super) mod resources;
pub(super) mod saved_index;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use tokio::runtime::Handle;

use crate::archive::Archive;
use crate::archive::error::Error;
use crate::archive::live_index::{LiveIndex, WaitFor};
use crate::archive::read::disk_cache_policy::{ScanDiskCache, should_cache_spans};
use crate::archive::read::packed::FirstReadHashes;
use crate::archive::read::single_flight::SingleFlight;
use crate::archive::read::windows::Windows;
use crate::archive::read::{ReadError, Reader};
use crate::archive::scan::{self, Digest};
use crate::base::buffer_pool::BufferPool;
use crate::base::error_chain::error_chain;
use crate::base::extent::{Extent, Packed, Plain};
use crate::base::free_list::FreeList;
use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::cache::{DiskCache, DiskCacheDir, DiskCacheOptions};
use crate::codec::{self, Compression, Detected};
use crate::fetch;
use crate::index::store::{self, IndexLock, Store};
use crate::index::{self, Builder, Index, Locator, MemoryLimit, Origin, WhiteoutFormat};
use crate::source::{Access, Source};
use crate::tar;
use background_scan::BackgroundScan;
use resources::{FREE_LIST_DIVISOR, MemoryBudgets, SharedResources};

/// Options for opening an archive.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Options of the scan, which runs if no saved index matches. Its memory is the archive's
    /// memory. During the scan, buffers and cached spans share it.
    pub scan: scan::Options,
    /// Directory for saved indexes; `None` saves and finds none.
    pub cache_dir: Option<PathBuf>,
    /// Index file to use; no other index is searched for.
    pub index_file: Option<PathBuf>,
    /// Memory limit for indexes, in addition to the scan's memory.
    pub index_memory: MemoryLimit,
    /// Whether to ignore saved data if nothing proves the source's version.
    ///
    /// For a caller that holds files of an earlier scan.
    pub should_rescan_unproven: bool,
    /// Whether to log damaged members, and members that are not in the tree, during the scan.
    pub should_log_problems: bool,
    /// Whether expensive spans are cached on disk.
    pub disk_cache: DiskCacheMode,
    /// Whiteout format, if the archive is a layer. A whiteout removes entries of the layers below.
    pub layer: Option<WhiteoutFormat>,
}

/// Maximum number of damaged members that are logged. All are counted.
const MAX_LOGGED_PROBLEMS: u64 = 10_000;

/// Disk caching of spans that are expensive to fetch or decode again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DiskCacheMode {
    /// Caches nothing, because the caller wants only the tree.
    IndexOnly,
    /// Writes spans to a file next to the index.
    ///
    /// `limit_bytes` limits all such files together. `None` allows the whole disk but a tenth of
    /// it.
    Enabled {
        /// The limit.
        limit_bytes: Option<u64>,
    },
    /// Fetches and decodes spans again whenever they are read.
    Disabled,
}

/// Reason why an archive cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The archive cannot be read.
    #[error("{location}{}", member_text(.member.as_deref()))]
    Archive {
        /// Location of the archive, without secrets.
        location: String,
        /// Member at which the error happened.
        member: Option<Vec<u8>>,
        /// The error.
        #[source]
        error: Box<Error>,
    },
    /// The given index file cannot be used: it is not an index.
    #[error(transparent)]
    Index(store::Error),
    /// The given index file belongs to another archive, or to another version of this one.
    #[error(
        "the index {path} does not belong to {location} as it is now; \
         make a new one with `tarfs index --output`"
    )]
    ForeignIndex {
        /// Path of the index file.
        path: String,
        /// Location of the archive.
        location: String,
    },
    /// The source can be read only once, and there is no disk cache to keep its bytes.
    #[error(
        "{location}: the server gives no byte ranges, so files can only be read from a disk cache; \
         allow one (no --no-disk-cache, enough --cache-size), or use `tarfs materialize`"
    )]
    NoDiskCache {
        /// Location of the archive, without secrets.
        location: String,
        /// Reason why the disk cache failed, if it was tried.
        #[source]
        cause: Option<DiskCacheFailure>,
    },
    /// A thread cannot be started.
    #[error("cannot start a thread")]
    Threads(#[source] std::io::Error),
}

/// Reason why a disk cache failed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct DiskCacheFailure(String);

fn member_text(member: Option<&[u8]>) -> String {
    member.map_or_else(String::new, |name| {
        format!(": in member '{}'", name.escape_ascii())
    })
}

impl Archive {
    /// Opens the archive at `source`, with a matching saved index or by a scan.
    ///
    /// Saves the index after a scan. If that fails, the archive has a note for the user, and no
    /// error.
    ///
    /// # Errors
    /// When the archive cannot be read, or `options` cannot be met.
    pub fn open(
        source: Arc<dyn Source>,
        options: &OpenOptions,
        network: &Handle,
        stats: &Arc<Stats>,
    ) -> Result<Self, OpenError> {
        Self::open_early(source, options, network, stats)?.wait_until_scanned()
    }

    /// Opens number `layer` of several archives that share memory and threads.
    ///
    /// Otherwise as [`Archive::open`]. During the scan the archive also has the memory that
    /// `options` give.
    ///
    /// # Errors
    /// As [`Archive::open`].
    pub fn open_layer(
        source: Arc<dyn Source>,
        options: &OpenOptions,
        (resources, layer): (&SharedResources, u16),
        network: &Handle,
        stats: &Arc<Stats>,
    ) -> Result<Self, OpenError> {
        let resources = Some((resources.clone(), layer));
        Self::open_with(source, options, resources, network, stats)?.wait_until_scanned()
    }

    /// Waits until the scan is over.
    fn wait_until_scanned(self) -> Result<Self, OpenError> {
        self.reader.live_index.wait_for(WaitFor::End);
        self.check_scan_result()?;
        Ok(self)
    }

    /// Opens an archive, and returns when the scan has found the first member.
    ///
    /// Otherwise as [`Archive::open`]. The rest of the tree appears during the scan. With an
    /// expected digest, it returns only after the whole archive has been verified.
    ///
    /// # Errors
    /// As [`Archive::open`], for errors up to that point. [`Archive::failure`] returns later
    /// errors.
    pub fn open_early(
        source: Arc<dyn Source>,
        options: &OpenOptions,
        network: &Handle,
        stats: &Arc<Stats>,
    ) -> Result<Self, OpenError> {
        Self::open_with(source, options, None, network, stats)
    }

    fn open_with(
        source: Arc<dyn Source>,
        options: &OpenOptions,
        resources: Option<(SharedResources, u16)>,
        network: &Handle,
        stats: &Arc<Stats>,
    ) -> Result<Self, OpenError> {
        let options = &OpenOptions {
            scan: options.scan.for_source(&*source),
            ..options.clone()
        };
        let free_list = match &resources {
            Some((resources, _)) => resources.free_list.clone(),
            None => FreeList::new(options.scan.memory / FREE_LIST_DIVISOR),
        };
        let opener = Opener {
            locator: locator(&*source, options),
            store: options
                .cache_dir
                .as_ref()
                .map(|directory| Store::new(directory)),
            source,
            options: options.clone(),
            network: network.clone(),
            stats: Arc::clone(stats),
            resources,
            free_list,
        };
        let found = if let Some(path) = &options.index_file {
            opener.open_index_file(path)?
        } else {
            let found = opener.find_saved_index()?;
            if let Some(reader) = &found {
                opener.check_entry_count(&reader.live_index.read())?;
                if let Some(in_use) = reader.in_use.get() {
                    in_use.touch();
                }
            }
            found
        };
        match found {
            Some(reader) => opener.build_archive(Arc::new(reader)),
            None => opener.start_scan(),
        }
    }
}

/// An archive that is being opened.
pub(crate) struct Opener {
    pub(crate) source: Arc<dyn Source>,
    pub(crate) locator: Locator,
    pub(crate) store: Option<Store>,
    pub(crate) options: OpenOptions,
    pub(crate) network: Handle,
    pub(crate) stats: Arc<Stats>,
    /// Resources shared with other archives, and the number of this archive among them.
    resources: Option<(SharedResources, u16)>,
    /// Free list that provides the memory of spans.
    free_list: FreeList,
}

/// Builds the locator that ties saved state to this archive and these options.
pub(crate) fn locator(source: &dyn Source, options: &OpenOptions) -> Locator {
    let scan = &options.scan;
    let compression = scan.compression.map(|compression| compression.to_string());
    let layer = match options.layer {
        None => "",
        Some(WhiteoutFormat::Oci) => " layer=oci",
        Some(WhiteoutFormat::Overlay | WhiteoutFormat::Keep) => " layer=other",
    };
    Locator {
        canonical: source.locator().to_owned(),
        fingerprint: source.fingerprint().to_string(),
        options: format!(
            "compression={} ignore-zeros={} allow-truncated={}{layer}",
            compression.as_deref().unwrap_or("auto"),
            scan.tar.ignore_zeros,
            scan.allow_truncated,
        ),
    }
}

/// Reads the index at `path`, and checks that its archive is as long as `source`.
pub(crate) fn read_index_file(
    path: &Path,
    source: &dyn Source,
    limit: &MemoryLimit,
) -> Result<Index, OpenError> {
    let index = store::read(path, limit).map_err(OpenError::Index)?;
    let len = source.fingerprint().len;
    if len.is_some_and(|len| len != index.origin().packed_bytes) {
        return Err(foreign_index(path, source));
    }
    Ok(index)
}

fn foreign_index(path: &Path, source: &dyn Source) -> OpenError {
    OpenError::ForeignIndex {
        path: path.display().to_string(),
        location: source.location().to_owned(),
    }
}

/// Marks the saved index as in use for the lifetime of `reader`.
pub(crate) fn hold_index(reader: &Reader, in_use: Option<IndexLock>) {
    if let Some(in_use) = in_use {
        // The slot is empty, because a reader loads or saves its index only once.
        drop(reader.in_use.set(in_use));
    }
}

impl Opener {
    /// Finds a saved index that matches the source, as far as cheap checks can tell.
    fn find_saved_index(&self) -> Result<Option<Reader>, OpenError> {
        let Some(store) = self.store.as_ref().filter(|_| !self.must_rescan()) else {
            return Ok(None);
        };
        let (index, in_use) = match store.find_locked(&self.locator, &self.options.index_memory) {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(None),
            Err(error) => {
                // The scan will replace the damaged file.
                tracing::warn!(error = error_chain(&error), "cannot use the saved index");
                return Ok(None);
            }
        };
        if !self.matches_expected_digest(&index)? {
            return Ok(None);
        }
        let disk_cache = self.open_disk_cache(&index);
        let reader = self.build_reader(LiveIndex::complete(index), disk_cache);
        hold_index(&reader, in_use);
        Ok(self.matches_source(&reader).then_some(reader))
    }

    /// Whether `index` has the expected digest, and the source still has it.
    ///
    /// Only a strong validator proves that, because no other validator covers all bytes.
    ///
    /// # Errors
    /// When the index proves that the archive has another digest.
    fn matches_expected_digest(&self, index: &Index) -> Result<bool, OpenError> {
        // The locator contains only the plain digest that the source itself names.
        let own = self.source.fingerprint().plain_sha256();
        if let Digest::Expect(expected) = self.options.scan.plain_sha256
            && own != Some(expected)
        {
            return Ok(false);
        }
        let Digest::Expect(expected) = self.options.scan.sha256 else {
            return Ok(true);
        };
        let origin = index.origin();
        let is_ours = self.source.fingerprint().is_strong() && origin.locator == self.locator;
        match origin.sha256.filter(|_| is_ours) {
            None => Ok(false),
            Some(found) if found == expected => Ok(true),
            Some(found) => Err(self.archive_error(Error::DigestMismatch { expected, found }, None)),
        }
    }

    /// Whether saved data must be ignored, because the source's version is unproven.
    fn must_rescan(&self) -> bool {
        self.options.should_rescan_unproven && self.source.fingerprint().doubt().is_some()
    }

    /// Whether the index belongs to the source, and the source's bytes are available.
    ///
    /// Proven by a strong validator, or by samples read from the source itself.
    fn matches_source(&self, reader: &Reader) -> bool {
        match (
            self.source.fingerprint().is_strong(),
            self.has_byte_ranges(),
        ) {
            (true, true) => true,
            // The disk cache must hold every span, because a lost one cannot be fetched again
            // during the mount.
            (true, false) => reader.is_fully_on_disk(),
            (false, _) => {
                let is_hashed = reader.live_index.read().is_hashed();
                is_hashed && reader.verify_samples(Reader::verify_source).is_ok()
            }
        }
    }

    fn has_byte_ranges(&self) -> bool {
        self.source.access() == Access::Ranges
    }

    /// Opens the index at `path`.
    ///
    /// Returns `None` if the archive must be scanned anyway, to verify its digest.
    fn open_index_file(&self, path: &Path) -> Result<Option<Reader>, OpenError> {
        let index = read_index_file(path, &*self.source, &self.options.index_memory)?;
        // An index file can claim any digest, so it proves none.
        if self.options.scan.expects_digest() || self.must_rescan() {
            return Ok(None);
        }
        self.check_entry_count(&index)?;
        // The file may come from another machine or URL, so only the bytes prove that it matches.
        let disk_cache = self.open_disk_cache(&index);
        let is_ours =
            self.source.fingerprint().is_strong() && index.origin().locator == self.locator;
        if !is_ours && !index.is_hashed() {
            return Err(foreign_index(path, &*self.source));
        }
        let reader = self.build_reader(LiveIndex::complete(index), disk_cache);
        let verified = match (is_ours, reader.live_index.read().is_hashed()) {
            (true, false) => Ok(()),
            (true, true) => reader.verify_samples(Reader::verify),
            (false, _) => reader.verify_samples(Reader::verify_source),
        };
        match verified {
            Ok(()) => Ok(Some(reader)),
            Err(
                ReadError::Damaged { .. }
                | ReadError::Index
                | ReadError::Unscanned
                | ReadError::NotAFile,
            ) => Err(foreign_index(path, &*self.source)),
            Err(
                ReadError::Changed(error)
                | ReadError::NotFound(error)
                | ReadError::Unreachable(error)
                | ReadError::TimedOut(error)
                | ReadError::AccessDenied(error),
            ) => Err(self.archive_error(Error::clone(&error), None)),
        }
    }

    /// Starts a scan and returns when it has found the first member.
    ///
    /// With an expected digest, returns when the whole archive has been verified.
    fn start_scan(self) -> Result<Archive, OpenError> {
        let disk_cache = self.create_disk_cache()?;
        let cached = disk_cache.clone();
        let disk_cache_writer =
            cached.map(|disk_cache| ScanDiskCache::new(disk_cache, &*self.source));
        let builder = Builder::new(index::Options {
            keeps_replaced: true,
            whiteouts: self.options.layer,
            max_entries: self.max_inodes(),
            max_reported_problems: if self.options.should_log_problems {
                MAX_LOGGED_PROBLEMS
            } else {
                0
            },
            ..index::Options::default()
        })
        .with_memory_limit(&self.options.index_memory);
        let reader = Arc::new(self.build_reader(LiveIndex::growing(builder), disk_cache));
        let mut archive = self.build_archive(Arc::clone(&reader))?;
        let awaited = if self.options.scan.expects_digest() {
            WaitFor::End
        } else {
            WaitFor::Member
        };
        let background_scan =
            BackgroundScan::start(self, disk_cache_writer, reader).map_err(OpenError::Threads)?;
        archive.background_scan = Some(background_scan);
        archive.reader.live_index.wait_for(awaited);
        if archive.reader.live_index.is_scan_over() {
            archive.check_scan_result()?;
        }
        Ok(archive)
    }

    /// The packed format, if it can be detected before the scan starts.
    fn compression(&self) -> Option<Compression> {
        let requested = self.options.scan.compression;
        let len = self.source.fingerprint().len?;
        if requested.is_some() || self.source.is_remote() || !self.has_byte_ranges() {
            return requested;
        }
        let len = len.min(codec::detect::DETECT_LEN as u64);
        let first = Extent::with_len(Packed(0), len);
        // If this read fails, the scan reports why.
        let bytes = fetch::read(&self.network, &self.source, first, &BufferPool::new(len)).ok()?;
        match codec::detect(&bytes) {
            Detected::Supported(compression) => Some(compression),
            Detected::Unsupported(_)
            | Detected::Encrypted(_)
            | Detected::WebPage
            | Detected::Unknown => None,
        }
    }

    /// Maximum number of entries, not counting the root.
    fn max_entries(&self) -> u64 {
        let most = index::Options::default().max_entries;
        self.options.scan.tar.limits.entries.min(most.into())
    }

    /// Maximum number of inodes, including the root's and 0.
    fn max_inodes(&self) -> u32 {
        let numbers = self.max_entries().saturating_add(2);
        u32::try_from(numbers).unwrap_or(u32::MAX)
    }

    /// Checks the entry limit for an index that was built with another limit, or none.
    fn check_entry_count(&self, index: &Index) -> Result<(), OpenError> {
        let entries = index.entry_count().saturating_sub(1);
        let limit = self.max_entries();
        if entries > limit {
            return Err(self.archive_error(Error::TooManyEntries { entries, limit }, None));
        }
        Ok(())
    }

    /// Error for the member `name` with its header at `at`, which exceeds the entry limit.
    pub(crate) fn too_many_entries(&self, name: &[u8], at: Plain) -> Error {
        let limit = self.max_entries();
        Error::Tar(tar::Error {
            offset: at,
            cause: tar::Cause::too_many_entries(name, limit),
        })
    }

    /// Directory of disk caches; `None` if they are disabled or no directory is available.
    fn disk_cache_dir(&self) -> Option<DiskCacheDir> {
        resources::disk_cache_dir(&self.options)
    }

    fn disk_cache_options(&self) -> DiskCacheOptions {
        DiskCacheOptions {
            queue_bytes: self.queue_bytes(),
            is_only_copy: !self.has_byte_ranges(),
            free_list: self.free_list.clone(),
            stats: Arc::clone(&self.stats),
        }
    }

    /// Creates the disk cache that the scan fills; `None` if it is disabled.
    fn create_disk_cache(&self) -> Result<Option<Arc<DiskCache>>, OpenError> {
        let is_needed =
            !self.has_byte_ranges() && self.options.disk_cache != DiskCacheMode::IndexOnly;
        if !should_cache_spans(&*self.source, self.compression()) {
            return Ok(None);
        }
        let Some(disk_cache_dir) = self.disk_cache_dir() else {
            return if is_needed {
                Err(self.no_disk_cache_error(None))
            } else {
                Ok(None)
            };
        };
        match DiskCache::create(disk_cache_dir, self.disk_cache_options()) {
            Ok(disk_cache) => Ok(Some(Arc::new(disk_cache))),
            Err(error) if is_needed => Err(self.no_disk_cache_error(Some(error_chain(&error)))),
            Err(error) => {
                tracing::warn!(
                    error = error_chain(&error),
                    "cannot open the disk cache; decoded data is not cached on disk"
                );
                Ok(None)
            }
        }
    }

    /// Opens the disk cache for a saved index.
    ///
    /// It is an earlier mount's cache, or a new one that reads fill.
    fn open_disk_cache(&self, index: &Index) -> Option<Arc<DiskCache>> {
        let disk_cache_dir = self.disk_cache_dir()?;
        if !should_cache_spans(&*self.source, Some(index.origin().compression)) {
            return None;
        }
        let disk_cache = if self.source.fingerprint().doubt().is_some() {
            // The cache is private to this process, because the source may have changed since
            // others read it.
            DiskCache::create(disk_cache_dir, self.disk_cache_options())
        } else {
            DiskCache::open(
                disk_cache_dir,
                &disk_cache_name(index.origin()),
                self.disk_cache_options(),
            )
        };
        match disk_cache {
            Ok(disk_cache) => Some(Arc::new(disk_cache)),
            Err(error) => {
                tracing::warn!(
                    error = error_chain(&error),
                    "cannot open the disk cache; decoded data is not cached on disk"
                );
                None
            }
        }
    }

    fn build_reader(&self, live_index: LiveIndex, disk_cache: Option<Arc<DiskCache>>) -> Reader {
        let (budgets, number) = match &self.resources {
            Some((resources, number)) => (resources.budgets.clone(), *number),
            None => (MemoryBudgets::new(&self.options), 0),
        };
        let MemoryBudgets {
            span_cache,
            budget,
            broker,
            read_priority,
            memory_bytes,
        } = budgets;
        // A scan must not use spans that were decoded for a saved index that did not match.
        let layer = 2 * number + u16::from(!live_index.is_scan_over());
        let (network, source) = (self.network.clone(), Arc::clone(&self.source));
        let stats = Arc::clone(&self.stats);
        Reader {
            reads: fetch::RangeReader::new(network, source, budget.clone(), stats),
            source: Arc::clone(&self.source),
            live_index,
            span_cache,
            free_list: self.free_list.clone(),
            disk_cache,
            far_decode_lock: Mutex::default(),
            single_flight: SingleFlight::default(),
            windows: Windows::default(),
            read_priority,
            layer,
            lag_limit: Arc::default(),
            network: self.network.clone(),
            budget,
            broker,
            memory_bytes,
            stats: Arc::clone(&self.stats),
            first_read_hashes: FirstReadHashes::default(),
            in_use: OnceLock::new(),
            is_closed: AtomicBool::default(),
        }
    }

    /// Builds the archive of `reader`, without a scan.
    fn build_archive(&self, reader: Arc<Reader>) -> Result<Archive, OpenError> {
        let workers = match &self.resources {
            Some((resources, _)) => Arc::clone(&resources.workers),
            None => resources::start_read_workers().map_err(OpenError::Threads)?,
        };
        Ok(Archive {
            background_scan: None,
            prefetch: OnceLock::new(),
            has_shared_workers: self.resources.is_some(),
            workers,
            reader,
        })
    }

    /// Maximum bytes that wait to be written to disk.
    fn queue_bytes(&self) -> u64 {
        resources::queue_bytes(&self.options)
    }

    /// Half the memory, for buffers and decoders during the scan.
    pub(crate) fn half_memory(&self) -> u64 {
        resources::half_memory(&self.options)
    }

    /// Memory for the buffers of the scan.
    pub(crate) fn scan_memory(&self) -> u64 {
        self.half_memory().max(scan::MIN_MEMORY)
    }

    pub(crate) fn archive_error(&self, error: Error, member: Option<Vec<u8>>) -> OpenError {
        OpenError::Archive {
            location: self.source.location().to_string(),
            member,
            error: Box::new(error),
        }
    }

    pub(crate) fn no_disk_cache_error(&self, cause: Option<String>) -> OpenError {
        OpenError::NoDiskCache {
            location: self.source.location().to_string(),
            cause: cause.map(DiskCacheFailure),
        }
    }
}

/// Name under which a disk cache is found again.
pub(crate) fn disk_cache_name(origin: &Origin) -> String {
    if origin.content_id == [0; 32] {
        // Part of the archive was not read, so only its location and version identify it.
        let name = origin.locator.file_name();
        return name.trim_end_matches(".idx").to_owned();
    }
    blake3::Hash::from(origin.content_id).to_hex().to_string()
}
