//! An index that is published beside an archive, and its use instead of a scan.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Weak};

use bytes::Bytes;
use tokio::runtime::Handle;

use super::opener::{Opener, disk_cache_name_of};
use crate::archive::error::{OpenError, PublishedIndexError, ReadError};
use crate::archive::live_index::LiveIndex;
use crate::archive::options::PublishedIndex;
use crate::archive::read::Reader;
use crate::archive::read::header_check::HeaderChecks;
use crate::archive::scan::digest::sha256;
use crate::base::buffer_pool::BufferPool;
use crate::base::error_chain::error_chain;
use crate::base::extent::{Extent, Packed};
use crate::base::sha256::Sha256;
use crate::base::stats::Stats;
use crate::base::thread_pool::ThreadPool;
use crate::fetch;
use crate::index::published::{self, PackedIndex};
use crate::index::{Index, Locator, MemoryLimit, TooMuchMemory, format};
use crate::source::{Access, Cause, Fingerprint, Source};

/// Longest published index that is loaded as a whole in the background. Of longer ones, only what is used.
const MAX_BACKGROUND_BYTES: u64 = 16 << 20;

/// The packed bytes of a published index, from its source.
#[derive(Debug)]
struct SourceIndex {
    source: Arc<dyn Source>,
    network: Handle,
    stats: Arc<Stats>,
}

impl PackedIndex for SourceIndex {
    fn read(&self, range: Range<u64>) -> io::Result<Bytes> {
        let extent = Extent::with_len(Packed(range.start), range.end.saturating_sub(range.start));
        self.stats.index_reads.increment();
        self.stats.index_read_bytes.add(extent.len());
        let pool = BufferPool::new(extent.len().max(1));
        let read = fetch::read(&self.network, &self.source, extent, &pool);
        read.map_err(|error| io::Error::other(error_chain(&error)))
    }
}

impl Opener {
    /// Opens the archive by its published index, if there is one that matches.
    ///
    /// # Errors
    /// When the user requires it, and it is missing, unusable or does not match.
    pub(super) fn open_published_index(&self) -> Result<Option<Reader>, OpenError> {
        let Some(published) = &self.options.published_index else {
            return Ok(None);
        };
        if !self.may_trust_published(published) {
            return Ok(None);
        }
        let reader = self.try_published_index(published);
        match reader {
            Ok(reader) => {
                self.check_entry_count(&reader.live_index.read())?;
                self.stats.published_indexes.increment();
                Ok(Some(reader))
            }
            Err(error) if published.is_required => Err(OpenError::PublishedIndex(Box::new(error))),
            Err(error) if is_absent(&error) => {
                tracing::debug!(error = error_chain(&error), "there is no published index");
                Ok(None)
            }
            Err(error) => {
                let error = error_chain(&error);
                tracing::warn!("not using the published index: {error}");
                Ok(None)
            }
        }
    }

    /// Whether an index may replace reading the archive. A digest that the user expects must be computed,
    /// unless the user also pins the index. The digest by which a source is known may be claimed by an index.
    fn may_trust_published(&self, published: &PublishedIndex) -> bool {
        let fingerprint = self.source.fingerprint();
        let scan = &self.options.scan;
        let is_own = scan.sha256.expected() == fingerprint.sha256()
            && scan.plain_sha256.expected() == fingerprint.plain_sha256();
        let is_proven = fingerprint.doubt().is_none() || !self.options.should_rescan_unproven;
        (is_own || published.sha256.is_some())
            && is_proven
            && self.source.access() == Access::Ranges
    }

    fn try_published_index(
        &self,
        published: &PublishedIndex,
    ) -> Result<Reader, PublishedIndexError> {
        let limit = &self.options.index_memory;
        let (index, location) = load(published, limit)?;
        let Some(is_bound) = is_bound(&index, self.source.fingerprint(), &self.locator) else {
            return Err(PublishedIndexError::Foreign(location));
        };
        // Named by this archive's place and version, because the index may claim any content ID.
        let disk_cache = self.open_disk_cache_named(&index, &disk_cache_name_of(&self.locator));
        let mut reader = self.build_reader(LiveIndex::complete(index), disk_cache);
        reader.header_checks = Some(HeaderChecks::new(location.clone()));
        if !is_bound {
            compare_samples(&reader, &location)?;
        }
        Ok(reader)
    }
}

/// Opens the published index, and returns it with its location.
pub(super) fn load(
    published: &PublishedIndex,
    limit: &MemoryLimit,
) -> Result<(Index, String), PublishedIndexError> {
    let source = (published.find)()?;
    let location = source.location().to_owned();
    let len = source.fingerprint().len;
    let (Access::Ranges, Some(len)) = (source.access(), len) else {
        return Err(PublishedIndexError::NoRanges(location));
    };
    let unusable = |error| PublishedIndexError::Format {
        location: location.clone(),
        error,
    };
    let packed = SourceIndex {
        source,
        network: published.network.clone(),
        stats: Arc::clone(&published.stats),
    };
    let index = match published.sha256 {
        None => published::open(Box::new(packed), len, limit).map_err(unusable)?,
        Some(expected) => {
            let bytes = read_all(&packed, len, limit.bytes()).map_err(unusable)?;
            check_sha256(&bytes, expected, &location)?;
            published::open(Box::new(LoadedIndex(bytes)), len, limit).map_err(unusable)?
        }
    };
    Ok((index, location))
}

/// Whether validators prove that `index` has the version of `fingerprint`; `None` if it is of another archive, or
/// made with other options than `locator` has.
pub(super) fn is_bound(
    index: &Index,
    fingerprint: &Fingerprint,
    locator: &Locator,
) -> Option<bool> {
    let origin = index.origin();
    let is_other = fingerprint
        .len
        .is_some_and(|len| len != origin.packed_bytes)
        || origin.locator.options != locator.options;
    let is_same_version = origin.locator.fingerprint == locator.fingerprint;
    let sha256 = fingerprint.sha256();
    let has_same_digest = sha256.is_some() && sha256 == origin.sha256;
    (!is_other).then(|| fingerprint.is_strong() && (is_same_version || has_same_digest))
}

/// Whether there is just no index. Object stores answer so with "forbidden" if a user may not list the bucket, and
/// other servers with a page.
fn is_absent(error: &PublishedIndexError) -> bool {
    match error {
        PublishedIndexError::Source(error) => matches!(
            error.cause,
            Cause::NotFound | Cause::Unauthorized(_) | Cause::Denied(_) | Cause::Offline
        ),
        PublishedIndexError::Format { error, .. } => matches!(error, format::Error::NotAnIndex),
        PublishedIndexError::NoRanges(_) => true,
        _ => false,
    }
}

/// A published index in memory. Its bytes cannot be exchanged after their digest is compared.
#[derive(Debug)]
struct LoadedIndex(Bytes);

impl PackedIndex for LoadedIndex {
    fn read(&self, range: Range<u64>) -> io::Result<Bytes> {
        let place = |at| usize::try_from(at).map_err(|_| io::ErrorKind::UnexpectedEof);
        let (start, end) = (place(range.start)?, place(range.end)?);
        if start > end || end > self.0.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(self.0.slice(start..end))
    }
}

/// Reads all of a published index of at most `limit` bytes.
fn read_all(packed: &SourceIndex, len: u64, limit: u64) -> Result<Bytes, format::Error> {
    if len > limit {
        return Err(TooMuchMemory { limit }.into());
    }
    Ok(packed.read(0..len)?)
}

fn check_sha256(
    bytes: &Bytes,
    expected: Sha256,
    location: &str,
) -> Result<(), PublishedIndexError> {
    let found = sha256(bytes);
    if found == expected {
        return Ok(());
    }
    Err(PublishedIndexError::Sha256 {
        location: location.to_owned(),
        found,
        expected,
    })
}

/// Compares samples of the archive with an index whose version is not proven.
fn compare_samples(reader: &Reader, location: &str) -> Result<(), PublishedIndexError> {
    let compared = published::with_loading(|| {
        reader.verify_samples(Reader::verify_source)?;
        reader.verify_header_samples()
    });
    match compared {
        Ok(Ok(())) => Ok(()),
        Ok(Err(ReadError::Damaged { .. } | ReadError::Index | ReadError::IndexMismatch)) => {
            Err(PublishedIndexError::Foreign(location.to_owned()))
        }
        Ok(Err(error)) => Err(PublishedIndexError::Read(error)),
        Err(_) => Err(PublishedIndexError::Read(ReadError::IndexUnavailable)),
    }
}

/// Loads all rows of a short published index on `threads`, so that later uses need not wait.
pub(super) fn load_in_background(reader: &Reader, threads: &Arc<ThreadPool>) {
    let index = reader.live_index.completed();
    if let Some(index) = index.filter(|index| index.is_on_demand())
        && index.published_bytes() <= MAX_BACKGROUND_BYTES
    {
        submit_load(threads, Arc::downgrade(index));
    }
}

/// Loads one request of rows, and then submits itself again. Ends with the archive, and at an error.
fn submit_load(threads: &Arc<ThreadPool>, index: Weak<Index>) {
    let weak_threads = Arc::downgrade(threads);
    threads.submit(move || {
        let loaded = index.upgrade().map(|index| index.load_next_rows());
        if let (Some(Ok(true)), Some(threads)) = (loaded, weak_threads.upgrade()) {
            submit_load(&threads, index);
        }
    });
}
