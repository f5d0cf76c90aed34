//! Checks that saved data belongs to a source, and builds the reader of an archive.

use std::ops::Deref;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use tokio::runtime::Handle;

use super::resources::{MemoryBudgets, SharedResources};
use crate::archive::error::{Error, OpenError};
use crate::archive::index_source::saved_index::{IndexLocation, SavedIndex};
use crate::archive::index_source::tree_origin::{TreeOrigin, TreeSource};
use crate::archive::live_index::LiveIndex;
use crate::archive::options::{DiskCacheMode, OpenOptions};
use crate::archive::peers::{PeerArchive, Peers, index_of_peer};
use crate::archive::read::Reader;
use crate::archive::read::packed::PackedReader;
use crate::archive::read::span_store::SpanStore;
use crate::archive::read::windows::WindowFetches;
use crate::archive::scan::disk_cache_policy::{recovery_cost, should_cache_spans};
use crate::archive::scan::options::Digest;
use crate::base::buffer_pool::BufferPool;
use crate::base::error_chain::error_chain;
use crate::base::extent::{Extent, Packed, Plain};
use crate::base::free_list::FreeList;
use crate::base::stats::Stats;
use crate::cache::{DiskCache, DiskCacheError, DiskCacheOptions};
use crate::codec::{self, Compression, Detected};
use crate::fetch;
use crate::index::store::{self, IndexLock, RowsToLoad, Store};
use crate::index::{self, Index, LazyIndex, Locator, MemoryLimit, Origin, WhiteoutFormat};
use crate::source::{self, Access, Source};
use crate::tar;

pub(crate) struct Opener {
    pub(crate) source: Arc<dyn Source>,
    pub(crate) locator: Locator,
    pub(crate) store: Option<Store>,
    pub(crate) options: OpenOptions,
    pub(crate) network: Handle,
    pub(crate) stats: Arc<Stats>,
    /// Resources shared with other archives, and the number of this archive among them.
    pub(super) resources: Option<(SharedResources, u32)>,
    pub(super) free_list: FreeList,
    /// Memory of queued disk writes.
    pub(super) write_pool: BufferPool,
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
        canonical: source.canonical_location().to_owned(),
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

pub(super) fn keep_index_lock(reader: &Reader, index_lock: Option<IndexLock>) {
    if let Some(index_lock) = index_lock {
        index_lock.touch();
        // The slot is empty, because a reader loads or saves its index only once.
        drop(reader.index_lock.set(index_lock));
    }
}

impl Opener {
    /// Finds a saved index that matches the source, as far as cheap checks can tell.
    pub(super) fn find_saved_index(&self) -> Result<Option<Reader>, OpenError> {
        let Some(store) = self.store.as_ref().filter(|_| !self.must_rescan()) else {
            return Ok(None);
        };
        let (index, index_lock) = match store.find_locked(
            &self.locator,
            &self.options.index_memory,
            self.options.index_rows,
        ) {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(None),
            Err(error) => {
                // The scan will replace the damaged file.
                tracing::warn!(error = error_chain(&error), "cannot use the saved index");
                return Ok(None);
            }
        };
        if index.is_published() || !self.matches_expected_digest(&index)? {
            return Ok(None);
        }
        let disk_cache = self.open_disk_cache(&index);
        let reader = self.build_reader(LiveIndex::complete(index), disk_cache, None);
        keep_index_lock(&reader, index_lock);
        Ok(self.matches_source(&reader).then_some(reader))
    }

    /// Gets the index of another process that has the archive open, as far as cheap checks can tell.
    pub(super) fn find_peer_index(&self) -> Result<Option<Reader>, OpenError> {
        let Some(peers) = self.peers().filter(|_| !self.must_rescan()) else {
            return Ok(None);
        };
        let found = index_of_peer(peers, &self.locator, &self.options.index_memory);
        let Some(index) = found else {
            return Ok(None);
        };
        if !self.matches_expected_digest(&index)? {
            return Ok(None);
        }
        let disk_cache = self.open_disk_cache(&index);
        let reader = self.build_reader(LiveIndex::complete(index), disk_cache, None);
        if !self.matches_source(&reader) {
            return Ok(None);
        }
        self.stats.peer_indexes.increment();
        Ok(Some(reader))
    }

    /// Other processes that may have the archive.
    fn peers(&self) -> Option<&Arc<dyn Peers>> {
        self.options.peers.as_ref()
    }

    /// Whether `index` has the expected digest, and the source still has it; an error if it has another one.
    /// Only a strong validator proves that, because no other validator covers all bytes.
    fn matches_expected_digest(&self, index: &Index) -> Result<bool, OpenError> {
        let known = index.origin().plain_sha256;
        if let Digest::Expect(expected) = self.options.scan.plain_sha256
            && known != Some(expected)
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

    /// Whether the index belongs to the source, and the source's bytes are available. Proven by a strong
    /// validator, or by samples read from the source itself.
    fn matches_source(&self, reader: &Reader) -> bool {
        let is_strong = self.source.fingerprint().is_strong();
        match (is_strong, self.has_byte_ranges()) {
            (true, true) => true,
            // The disk cache must hold every span, because a lost one cannot be fetched again.
            (true, false) => reader.is_fully_on_disk(),
            (false, _) => {
                let is_hashed = reader.live_index.read(Index::is_hashed);
                matches!(is_hashed, Ok(Ok(true)))
                    && reader.verify_samples(Reader::verify_source).is_ok()
            }
        }
    }

    fn has_byte_ranges(&self) -> bool {
        self.source.access() == Access::Ranges
    }

    /// Opens the index at `path`; `None` if the archive must be scanned anyway, to verify its digest, or to end with the
    /// error of a truncated archive.
    pub(super) fn open_index_file(&self, path: &Path) -> Result<Option<Reader>, OpenError> {
        let index = read_index_file(path, &*self.source, &self.options.index_memory)?;
        // An index file can claim any digest, so it proves none.
        if is_refused(&index, &self.options)
            || self.options.scan.expects_digest()
            || self.must_rescan()
        {
            return Ok(None);
        }
        self.check_limits(&LazyIndex::new(&index))?;
        // The file may come from another machine or URL, so only the bytes prove that it matches.
        let disk_cache = self.open_disk_cache(&index);
        if !index.is_hashed().map_err(OpenError::IndexRows)? {
            return Err(foreign_index(path, &*self.source));
        }
        let tree = TreeSource {
            origin: TreeOrigin::User,
            location: path.display().to_string(),
        };
        let reader = self.build_reader(LiveIndex::complete(index), disk_cache, Some(tree));
        // Samples are decoded.
        self.check_decoder_memory(&reader)?;
        let Err(error) = reader.verify_samples(Reader::verify_source) else {
            return Ok(Some(reader));
        };
        Err(match error.archive_error() {
            Some(error) => self.archive_error(error.clone(), None),
            None => foreign_index(path, &*self.source),
        })
    }

    fn compression(&self) -> Option<Compression> {
        let requested = self.options.scan.compression;
        self.source.fingerprint().len?;
        if requested.is_some() || self.source.is_remote() || !self.has_byte_ranges() {
            return requested;
        }
        // If this read fails, the scan reports why.
        detect_compression(&self.network, &self.source).ok()?
    }

    /// Maximum number of entries, not counting the root.
    pub(super) fn max_entries(&self) -> u64 {
        max_entries(&self.options)
    }

    pub(super) fn check_limits(
        &self,
        index: &LazyIndex<impl Deref<Target = Index>>,
    ) -> Result<(), OpenError> {
        check_limits(&*self.source, &self.options, index)
    }

    /// Checks that the memory suffices to decode the stream, as its scan would, if the caller wants to read it.
    pub(super) fn check_decoder_memory(&self, reader: &Reader) -> Result<(), OpenError> {
        let index = reader.live_index.lock();
        let origin = index.origin();
        let needed_bytes = origin.decoder_bytes;
        let reads = self.options.disk_cache != DiskCacheMode::IndexOnly;
        if !reads || needed_bytes <= reader.broker.limit_bytes() {
            return Ok(());
        }
        let error = codec::Error {
            compression: origin.compression,
            packed: Packed(0),
            cause: codec::Cause::over_limit(&reader.broker, needed_bytes),
        };
        Err(self.archive_error(Error::Codec(error), None))
    }

    pub(crate) fn too_many_entries(&self, name: &[u8], at: Plain) -> Error {
        let limit = self.max_entries();
        Error::Tar(tar::Error {
            offset: at,
            cause: tar::Cause::too_many_entries(name, limit),
        })
    }

    fn disk_cache_options(&self) -> DiskCacheOptions {
        DiskCacheOptions {
            write_pool: self.write_pool.clone(),
            is_only_copy: !self.has_byte_ranges(),
            free_list: self.free_list.clone(),
            read_rate: Arc::default(),
            stats: Arc::clone(&self.stats),
        }
    }

    pub(super) fn create_disk_cache(&self) -> Result<Option<Arc<DiskCache>>, OpenError> {
        let is_needed =
            !self.has_byte_ranges() && self.options.disk_cache != DiskCacheMode::IndexOnly;
        if !should_cache_spans(&*self.source, self.compression()) {
            return Ok(None);
        }
        let disk_cache_dir = match self.options.disk_cache_dir() {
            Some(disk_cache_dir) => disk_cache_dir,
            None if is_needed => return Err(self.no_disk_cache_error(None)),
            None => return Ok(None),
        };
        match DiskCache::create(disk_cache_dir, self.disk_cache_options()) {
            Err(error) if is_needed => Err(self.no_disk_cache_error(Some(error_chain(&error)))),
            opened => Ok(usable_disk_cache(opened)),
        }
    }

    /// Opens an earlier mount's disk cache for a saved index, or a new one that reads fill.
    fn open_disk_cache(&self, index: &Index) -> Option<Arc<DiskCache>> {
        self.open_disk_cache_named(index, &disk_cache_name(index.origin()))
    }

    pub(super) fn open_disk_cache_named(
        &self,
        index: &Index,
        name: &str,
    ) -> Option<Arc<DiskCache>> {
        let disk_cache_dir = self.options.disk_cache_dir()?;
        if !should_cache_spans(&*self.source, Some(index.origin().compression)) {
            return None;
        }
        let disk_cache = if self.source.fingerprint().doubt().is_some() {
            // Private to this process, because the source may have changed since others read it.
            DiskCache::create(disk_cache_dir, self.disk_cache_options())
        } else {
            DiskCache::open(disk_cache_dir, name, self.disk_cache_options())
        };
        let disk_cache = usable_disk_cache(disk_cache)?;
        // The cost needs all spans of the index.
        if !index.is_on_demand() {
            disk_cache.set_recovery_cost(recovery_cost(index));
        }
        Some(disk_cache)
    }

    /// Builds the reader of an index, which is this user's own unless it has a `foreign_tree`.
    pub(super) fn build_reader(
        &self,
        live_index: LiveIndex,
        disk_cache: Option<Arc<DiskCache>>,
        foreign_tree: Option<TreeSource>,
    ) -> Reader {
        let (budgets, number) = if let Some((resources, number)) = &self.resources {
            (resources.budgets.clone(), *number)
        } else {
            let options = &self.options;
            let share = options.scan.memory_share;
            let budgets = MemoryBudgets::new(options.budget(), share, &options.scan.reclaimers);
            (budgets, 0)
        };
        // A scan must not use spans that were decoded for a saved index that did not match.
        let is_scanned_now = !live_index.is_scan_over();
        let span_owner = 2 * number + u32::from(is_scanned_now);
        let is_proven = self.source.fingerprint().doubt().is_none();
        let is_own_version = foreign_tree.is_none() && (is_scanned_now || is_proven);
        let (network, source) = (self.network.clone(), Arc::clone(&self.source));
        let stats = Arc::clone(&self.stats);
        let to_peer =
            |peers| PeerArchive::new(peers, &self.locator, self.source.fingerprint(), &stats);
        let peer = self.peers().and_then(to_peer);
        let (budget, free_list) = (budgets.budget.clone(), self.free_list.clone());
        let cancel_token = self.options.scan.cancel_token.child();
        Reader {
            packed: PackedReader::new(source, network, budget, free_list, stats, cancel_token),
            live_index,
            name: self.locator.file_name(),
            peer,
            spans: SpanStore::new(budgets.span_cache, span_owner, disk_cache, is_own_version),
            free_list: self.free_list.clone(),
            has_expected_digest: self.options.scan.expects_digest(),
            window_fetches: WindowFetches::default(),
            read_priority: budgets.read_priority.for_archive(),
            lag_limit: Arc::default(),
            budget: budgets.budget,
            broker: budgets.broker,
            memory_bytes: budgets.memory_bytes,
            stats: Arc::clone(&self.stats),
            tree: foreign_tree.unwrap_or_default(),
            header_checks: None,
            index_lock: OnceLock::new(),
        }
    }

    pub(crate) fn archive_error(&self, error: Error, member: Option<Vec<u8>>) -> OpenError {
        archive_error(&*self.source, error, member)
    }

    pub(super) fn no_disk_cache_error(&self, cause: Option<String>) -> OpenError {
        OpenError::NoDiskCache {
            location: self.source.location().to_string(),
            cause: cause.map(Into::into),
        }
    }
}

fn archive_error(source: &dyn Source, error: Error, member: Option<Vec<u8>>) -> OpenError {
    OpenError::Archive {
        location: source.location().to_string(),
        member,
        error: Box::new(error),
    }
}

fn max_entries(options: &OpenOptions) -> u64 {
    let most = index::Options::default().max_entries;
    options.scan.tar.limits.entries.min(most.into())
}

/// Checks the limits for an index that was built with other limits, or none, as a scan does.
fn check_limits(
    source: &dyn Source,
    options: &OpenOptions,
    index: &LazyIndex<impl Deref<Target = Index>>,
) -> Result<(), OpenError> {
    let limits = &options.scan.tar.limits;
    let (entries, limit) = (index.member_count(), max_entries(options));
    if entries > limit {
        let error = Error::TooManyEntries { entries, limit };
        return Err(archive_error(source, error, None));
    }
    let (bytes, limit) = (index.file_bytes(), limits.size);
    if bytes > limit {
        let error = Error::TooLarge { bytes, limit };
        return Err(archive_error(source, error, None));
    }
    let origin = index.origin();
    let limit = limits.stream_bytes(entries);
    if origin.plain_bytes > limit {
        let cause = tar::Cause::TooLong {
            members: entries,
            limit,
        };
        let offset = Plain(limit);
        let error = tar::Error { offset, cause }.into();
        return Err(archive_error(source, error, None));
    }
    Ok(())
}

/// Whether `index` is of a truncated archive, and only whole ones are wanted. Files behind the cut would look as if they
/// did not exist.
pub(super) fn is_refused(index: &Index, options: &OpenOptions) -> bool {
    index.origin().is_truncated && !options.scan.allow_truncated
}

impl SavedIndex {
    /// Finds the index that `options` name; `None` if no validator proves that it has the source's version, or if the
    /// archive must be scanned to end with the error of a truncated one.
    ///
    /// # Errors
    /// When the given index file is not an index, or belongs to another archive, and when the archive exceeds limits of the
    /// user by its index.
    pub fn find(source: &dyn Source, options: &OpenOptions) -> Result<Option<Self>, OpenError> {
        let fingerprint = source.fingerprint().clone();
        let location = match (&options.index_file, &options.cache_dir) {
            (Some(path), _) => {
                let index = read_index_file(path, source, &options.index_memory)?;
                if is_refused(&index, options) {
                    return Ok(None);
                }
                IndexLocation::File(Arc::new(index))
            }
            _ if !fingerprint.is_strong() => return Ok(None),
            (None, Some(directory)) => IndexLocation::Store(Store::new(directory)),
            (None, None) => IndexLocation::Nowhere,
        };
        let saved = Self {
            location,
            published: options.published_index.clone(),
            peers: options.peers.clone(),
            locator: locator(source, options),
            limit: options.index_memory.clone(),
            fingerprint,
            digest: options.scan.for_source(source).sha256.expected(),
        };
        // A scan checks them, too, but only while it reads.
        let limits = &options.scan.tar.limits;
        let is_limited = (limits.entries, limits.size) != (u64::MAX, u64::MAX);
        if is_limited
            && !options.scan.expects_digest()
            && let Some(index) = saved.load_own(RowsToLoad::Names)
        {
            check_limits(source, options, &LazyIndex::new(index))?;
        }
        Ok(Some(saved))
    }
}

/// Detects the packed format by the first bytes of `source`, which has byte ranges; `None` if it is none.
pub(crate) fn detect_compression(
    network: &Handle,
    source: &Arc<dyn Source>,
) -> Result<Option<Compression>, source::Error> {
    let len = source.fingerprint().len.unwrap_or_default();
    let first = Extent::with_len(Packed(0), len.min(codec::detect::DETECT_LEN as u64));
    let bytes = fetch::read(network, source, first)?;
    Ok(match codec::detect(&bytes) {
        Detected::Supported(compression) => Some(compression),
        _ => None,
    })
}

fn usable_disk_cache(opened: Result<DiskCache, DiskCacheError>) -> Option<Arc<DiskCache>> {
    let log = |error: &DiskCacheError| {
        tracing::warn!(
            error = error_chain(error),
            "cannot open the disk cache; decoded data is not cached on disk"
        );
    };
    opened.inspect_err(log).ok().map(Arc::new)
}

pub(crate) fn disk_cache_name(origin: &Origin) -> String {
    if origin.content_id == [0; 32] {
        // Part of the archive was not read, so only its location and version identify it.
        return disk_cache_name_of(&origin.locator);
    }
    blake3::Hash::from(origin.content_id).to_hex().to_string()
}

/// The name of a disk cache of the archive at a place, in one version, whatever its content is.
pub(super) fn disk_cache_name_of(locator: &Locator) -> String {
    let name = locator.file_name();
    name.trim_end_matches(".idx").to_owned()
}
