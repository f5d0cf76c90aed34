//! From a source to an archive: by a saved index that still fits, or by one pass over it.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};

use tokio::runtime::Handle;

use super::Archive;
use super::background_scan::BackgroundScan;
use super::disk_cache_policy::{ScanDiskCache, should_cache_spans};
use super::error::Error;
use super::live_index::{LiveIndex, WaitFor};
use super::packed::FirstReadHashes;
use super::read::{ReadError, Reader};
use super::resources::{self, FREE_LIST_DIVISOR, MemoryBudgets, SharedResources};
use super::scan::{self, Digest};
use super::single_flight::SingleFlight;
use super::windows::Windows;
use crate::base::buffer_pool::BufferPool;
use crate::base::extent::{Extent, Packed, Plain};
use crate::base::free_list::FreeList;
use crate::base::stats::Stats;
use crate::cache::{DiskCache, DiskCacheDir, DiskCacheOptions};
use crate::codec::{self, Compression, Detected};
use crate::fetch;
use crate::index::store::{self, IndexLock, Store};
use crate::index::{self, Builder, Index, Locator, MemoryLimit, Origin, WhiteoutFormat};
use crate::source::{Access, Source};
use crate::tar;

/// How an archive is opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// How it is scanned when no saved index fits. Its memory is the archive's: while scanning
    /// it is shared between buffers and kept spans.
    pub scan: scan::Options,
    /// Where indexes are saved and found, if anywhere.
    pub cache_dir: Option<PathBuf>,
    /// An index file to use instead of looking for one.
    pub index_file: Option<PathBuf>,
    /// What indexes may have of memory, on top of that of the scan.
    pub index_memory: MemoryLimit,
    /// Whether an archive whose version nothing proves is scanned whatever was saved of it: for a
    /// caller that has files of an earlier scan.
    pub should_rescan_unproven: bool,
    /// Whether members that are damaged or not in the tree are logged as the scan finds them.
    pub should_log_problems: bool,
    /// What to do with bytes that cost more to make again than to read back from disk.
    pub disk_cache: DiskCacheMode,
    /// How the archive says what of the layers below it is gone, if it is a layer.
    pub layer: Option<WhiteoutFormat>,
}

/// Damaged members of an archive that are logged; all are counted.
const MAX_LOGGED_PROBLEMS: u64 = 10_000;

/// What to do with plain bytes that come from far away, or take long to decode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DiskCacheMode {
    /// Nothing: the tree is all that is wanted.
    IndexOnly,
    /// Write them to a file beside the index. All such files together take up to so many bytes;
    /// `None` is all the disk has but a tenth of it.
    Enabled {
        /// The limit.
        limit_bytes: Option<u64>,
    },
    /// Fetch and decode them again whenever they are read.
    Disabled,
}

/// Why an archive cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It cannot be read.
    #[error("{location}{}", member_text(.member.as_deref()))]
    Archive {
        /// Where it is, without secrets.
        location: String,
        /// The member it happened in.
        member: Option<Vec<u8>>,
        /// Why.
        #[source]
        error: Box<Error>,
    },
    /// The index file that was to be used is none, or is another archive's.
    #[error(transparent)]
    Index(store::Error),
    /// The index file that was to be used belongs to another archive, or another version of it.
    #[error(
        "the index {path} does not belong to {location} as it is now; \
         make a new one with `tarfs index --output`"
    )]
    ForeignIndex {
        /// Which file.
        path: String,
        /// Which archive.
        location: String,
    },
    /// The source gives its bytes once, and there is nowhere to keep them.
    #[error(
        "{location}: the server gives no byte ranges, so files can only be read from a disk cache; \
         allow one (no --no-disk-cache, enough --cache-size), or use `tarfs materialize`"
    )]
    NoDiskCache {
        /// Where it is, without secrets.
        location: String,
        /// Why the disk cache failed, if it was tried.
        #[source]
        cause: Option<DiskCacheFailure>,
    },
    /// No thread could be started.
    #[error("cannot start a thread")]
    Threads(#[source] std::io::Error),
}

/// Why a disk cache failed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct DiskCacheFailure(String);

fn member_text(member: Option<&[u8]>) -> String {
    member.map_or_else(String::new, |name| {
        format!(": in member '{}'", name.escape_ascii())
    })
}

impl Archive {
    /// Opens the archive at `source`: with a saved index if one fits, else by scanning it. A
    /// fresh index is saved; that it could not be is a note, not an error.
    ///
    /// # Errors
    /// When the archive cannot be read, or `options` cannot be satisfied.
    pub fn open(
        source: Arc<dyn Source>,
        options: &OpenOptions,
        network: &Handle,
        stats: &Arc<Stats>,
    ) -> Result<Self, OpenError> {
        Self::open_early(source, options, network, stats)?.wait_until_scanned()
    }

    /// As [`Archive::open`], for one of several archives with one memory and the same threads:
    /// number `layer` of them. While it is scanned it has the memory that `options` say besides.
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

    /// Waits for the end of the scan.
    fn wait_until_scanned(self) -> Result<Self, OpenError> {
        self.reader.live_index.wait_for(WaitFor::End);
        self.check_scan_result()?;
        Ok(self)
    }

    /// As [`Archive::open`], but returns as soon as the scan has found the first member: the rest
    /// of the tree appears while it goes on. An archive that must have a certain digest is returned
    /// when all of it has.
    ///
    /// # Errors
    /// As [`Archive::open`], as far as anything is wrong before that. What goes wrong later is
    /// told by [`Archive::failure`].
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

/// An archive being opened.
pub(super) struct Opener {
    pub(super) source: Arc<dyn Source>,
    pub(super) locator: Locator,
    pub(super) store: Option<Store>,
    pub(super) options: OpenOptions,
    pub(super) network: Handle,
    pub(super) stats: Arc<Stats>,
    /// What it has together with others, and which of them it is.
    resources: Option<(SharedResources, u16)>,
    /// Where the memory of spans comes from.
    free_list: FreeList,
}

/// What makes saved state belong to this archive, read this way.
pub(super) fn locator(source: &dyn Source, options: &OpenOptions) -> Locator {
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

/// The index in the file at `path`, if it is of an archive as long as `source`.
pub(super) fn read_index_file(
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

/// Says as long as `reader` lives that the saved index is in use.
pub(super) fn hold_index(reader: &Reader, in_use: Option<IndexLock>) {
    if let Some(in_use) = in_use {
        // It has none: it has read its index, or made it, once.
        drop(reader.in_use.set(in_use));
    }
}

impl Opener {
    /// The saved index, if there is one that fits the bytes as far as can be told cheaply.
    fn find_saved_index(&self) -> Result<Option<Reader>, OpenError> {
        let Some(store) = self.store.as_ref().filter(|_| !self.must_rescan()) else {
            return Ok(None);
        };
        let (index, in_use) = match store.find_locked(&self.locator, &self.options.index_memory) {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(None),
            Err(error) => {
                // A damaged file is replaced by what the scan finds.
                tracing::warn!(error = error_chain(&error), "a saved index cannot be used");
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

    /// Whether `index` was made from bytes with the digest that is wanted, if one is, and the source
    /// still gives the same: only a strong validator says so, as nothing else speaks of all bytes.
    ///
    /// # Errors
    /// When it says that the digest is another one.
    fn matches_expected_digest(&self, index: &Index) -> Result<bool, OpenError> {
        // The locator of the saved index contains the source's own plain digest, and no other one.
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

    /// Whether only a scan of this process counts.
    fn must_rescan(&self) -> bool {
        self.options.should_rescan_unproven && self.source.fingerprint().doubt().is_some()
    }

    /// Whether the index belongs to the bytes and they can be had: by a strong validator, or by
    /// samples that come from the source itself.
    fn matches_source(&self, reader: &Reader) -> bool {
        match (
            self.source.fingerprint().is_strong(),
            self.has_byte_ranges(),
        ) {
            (true, true) => true,
            // All of it, or a part that is lost could not be had again while the mount lasts.
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

    /// The index in the file at `path`; `None` when the archive must be read all the same, for its
    /// digest.
    fn open_index_file(&self, path: &Path) -> Result<Option<Reader>, OpenError> {
        let index = read_index_file(path, &*self.source, &self.options.index_memory)?;
        // Whoever made the file may have written any digest into it.
        if self.options.scan.expects_digest() || self.must_rescan() {
            return Ok(None);
        }
        self.check_entry_count(&index)?;
        // The file may have been made elsewhere, from another URL: only the bytes can tell.
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

    /// Starts a scan, and returns when it has come to the first member; with an expected digest when
    /// all of the archive has it.
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

    /// The packed format, for sources that tell it at once; `None` when it is not known yet.
    fn compression(&self) -> Option<Compression> {
        let requested = self.options.scan.compression;
        let len = self.source.fingerprint().len?;
        if requested.is_some() || self.source.is_remote() || !self.has_byte_ranges() {
            return requested;
        }
        let len = len.min(codec::detect::DETECT_LEN as u64);
        let first = Extent::with_len(Packed(0), len);
        // The scan will say what is wrong.
        let bytes = fetch::read(&self.network, &self.source, first, &BufferPool::new(len)).ok()?;
        match codec::detect(&bytes) {
            Detected::Supported(compression) => Some(compression),
            Detected::Unsupported(_)
            | Detected::Encrypted(_)
            | Detected::WebPage
            | Detected::Unknown => None,
        }
    }

    /// How many entries there may be, the root aside.
    fn max_entries(&self) -> u64 {
        let most = index::Options::default().max_entries;
        self.options.scan.tar.limits.entries.min(most.into())
    }

    /// As many numbers, that of the root and 0 included.
    fn max_inodes(&self) -> u32 {
        let numbers = self.max_entries().saturating_add(2);
        u32::try_from(numbers).unwrap_or(u32::MAX)
    }

    /// What an index says that was made with another limit, or none.
    fn check_entry_count(&self, index: &Index) -> Result<(), OpenError> {
        let entries = index.entry_count().saturating_sub(1);
        let limit = self.max_entries();
        if entries > limit {
            return Err(self.archive_error(Error::TooManyEntries { entries, limit }, None));
        }
        Ok(())
    }

    /// That the member called `name`, whose header is at `at`, needs one entry too many.
    pub(super) fn too_many_entries(&self, name: &[u8], at: Plain) -> Error {
        let limit = self.max_entries();
        Error::Tar(tar::Error {
            offset: at,
            cause: tar::Cause::too_many_entries(name, limit),
        })
    }

    /// Where disk caches lie; `None` when none are wanted, or there is nowhere to put them.
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

    /// A disk cache to fill while scanning, unless none is wanted.
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
                tracing::warn!(error = error_chain(&error), "nothing is kept on disk");
                Ok(None)
            }
        }
    }

    /// The disk cache for an index that was found: an earlier mount's, or a new one, which fills as
    /// spans are made.
    fn open_disk_cache(&self, index: &Index) -> Option<Arc<DiskCache>> {
        let disk_cache_dir = self.disk_cache_dir()?;
        if !should_cache_spans(&*self.source, Some(index.origin().compression)) {
            return None;
        }
        let disk_cache = if self.source.fingerprint().doubt().is_some() {
            // Of this process alone: nothing tells whether the source still is what others have read.
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
                tracing::warn!(error = error_chain(&error), "nothing is kept on disk");
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
        // What was made by a saved index that did not fit is nothing to who scans.
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

    /// The archive of `reader`, without a pass.
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

    /// What may wait to be written to disk.
    fn queue_bytes(&self) -> u64 {
        resources::queue_bytes(&self.options)
    }

    /// Half the memory, which buffers and decoders have while the archive is read.
    pub(super) fn half_memory(&self) -> u64 {
        resources::half_memory(&self.options)
    }

    /// What a scan has for its buffers.
    pub(super) fn scan_memory(&self) -> u64 {
        self.half_memory().max(scan::MIN_MEMORY)
    }

    pub(super) fn archive_error(&self, error: Error, member: Option<Vec<u8>>) -> OpenError {
        OpenError::Archive {
            location: self.source.location().to_string(),
            member,
            error: Box::new(error),
        }
    }

    pub(super) fn no_disk_cache_error(&self, cause: Option<String>) -> OpenError {
        OpenError::NoDiskCache {
            location: self.source.location().to_string(),
            cause: cause.map(DiskCacheFailure),
        }
    }
}

/// What a disk cache is found by.
pub(super) fn disk_cache_name(origin: &Origin) -> String {
    if origin.content_id == [0; 32] {
        // Not all of it was seen: it is known by its place and version alone.
        let name = origin.locator.file_name();
        return name.trim_end_matches(".idx").to_owned();
    }
    blake3::Hash::from(origin.content_id).to_hex().to_string()
}

/// An error and its causes.
pub(super) fn error_chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", error_chain(cause)),
        None => error.to_string(),
    }
}
