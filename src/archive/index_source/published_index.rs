//! Loads an index that is published beside an archive.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use tokio::runtime::Handle;

use super::tree_origin::TreeOrigin;
use crate::base::error_chain::error_chain;
use crate::base::extent::{Extent, Packed};
use crate::base::sha256::Sha256;
use crate::base::stats::Stats;
use crate::fetch;
use crate::index::format::framed::{self, PackedIndex};
use crate::index::import::ImportError;
use crate::index::{Index, Locator, MemoryLimit, TooMuchMemory, format};
use crate::source::{self, Access, Fingerprint, Source};

/// Opens the source of an index. Blocks, with a deadline.
pub type FindIndex = Arc<dyn Fn() -> Result<Arc<dyn Source>, source::Error> + Send + Sync>;

/// Finds a digest. Blocks, with a deadline.
pub type FindDigest = Arc<dyn Fn() -> Result<Sha256, source::Error> + Send + Sync>;

/// Where an index is that can replace a scan, in the order in which they are tried.
#[derive(Clone)]
pub enum IndexPlace {
    /// An index of this program. The text distinguishes its publishers.
    Index(FindIndex, String),
    /// A SOCI ztoc.
    Ztoc(FindIndex),
    /// The eStargz TOC in the archive, if it has this digest.
    EstargzToc(FindDigest),
}

/// The indexes of an archive that a run accepts.
#[derive(Clone)]
pub struct PublishedIndex {
    /// The indexes, and who vouches for each, in the order in which they are tried.
    pub places: Vec<(TreeOrigin, IndexPlace)>,
    /// Runtime that reads it.
    pub network: Handle,
    /// Counters of its reads.
    pub stats: Arc<Stats>,
    /// Whether the user named it, so that the archive is not opened without it.
    pub is_required: bool,
    /// SHA-256 of the whole published index, if the user pins it.
    pub sha256: Option<Sha256>,
}

impl fmt::Debug for IndexPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Index(..) => "Index",
            Self::Ztoc(_) => "Ztoc",
            Self::EstargzToc(_) => "EstargzToc",
        })
    }
}

impl fmt::Debug for PublishedIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PublishedIndex")
            .field("is_required", &self.is_required)
            .field("sha256", &self.sha256)
            .field("places", &self.places)
            .finish_non_exhaustive()
    }
}

/// Why a published index is not used.
#[derive(Debug, thiserror::Error)]
pub enum PublishedIndexError {
    /// It cannot be opened.
    #[error(transparent)]
    Source(#[from] source::Error),
    /// It is no index, damaged, or of another version.
    #[error("{location}")]
    Format {
        /// Its location, without secrets.
        location: String,
        /// The reason.
        #[source]
        error: format::Error,
    },
    /// Its server gives no byte ranges.
    #[error("{0}: its server gives no byte ranges")]
    NoRanges(String),
    /// It describes another archive, another version of it, or one read with other options.
    #[error("{0} does not belong to the archive as it is now, or to these options")]
    Foreign(String),
    /// Headers of the archive cannot prove it.
    #[error(
        "{0}: global headers of the archive set attributes, so it cannot be compared with the archive"
    )]
    GlobalHeaders(String),
    /// It has another SHA-256 than the user expects.
    #[error("{location} has the SHA-256 {found}, and --index-sha256 is {expected}")]
    Sha256 {
        /// Its location, without secrets.
        location: String,
        /// Of its bytes.
        found: Sha256,
        /// By the user.
        expected: Sha256,
    },
    /// It is another program's table of contents, and unusable.
    #[error("{location}")]
    Import {
        /// Its location, without secrets.
        location: String,
        /// The reason.
        #[source]
        error: ImportError,
    },
    /// The archive cannot be compared with it.
    #[error("cannot compare the archive with its published index")]
    Compare(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// The packed bytes of a published index, from its source.
#[derive(Debug)]
struct SourceIndex {
    source: Arc<dyn Source>,
    network: Handle,
    stats: Arc<Stats>,
    has_reported: AtomicBool,
    /// All bytes of a pinned index, which cannot be exchanged after their digest is compared.
    pinned: Option<Bytes>,
}

impl PackedIndex for SourceIndex {
    /// Once, because every use of a row fails while the server is away.
    fn report_failure(&self, error: &io::Error) {
        if !self.has_reported.swap(true, Ordering::Relaxed) {
            tracing::warn!(%error, "cannot load a part of the published index");
        }
    }

    fn read(&self, range: Range<u64>) -> io::Result<Bytes> {
        if let Some(pinned) = &self.pinned {
            let place = |at| usize::try_from(at).unwrap_or(usize::MAX);
            let range = place(range.start)..place(range.end);
            let bytes = pinned.get(range).map(|bytes| pinned.slice_ref(bytes));
            return bytes.ok_or_else(|| io::ErrorKind::UnexpectedEof.into());
        }
        let extent = Extent::with_len(Packed(range.start), range.end.saturating_sub(range.start));
        self.stats.index_reads.increment();
        self.stats.index_read_bytes.add(extent.len());
        let read = fetch::read(&self.network, &self.source, extent);
        read.map_err(|error| io::Error::other(error_chain(&error)))
    }
}

/// Opens what `find` finds, and returns it with its location and length.
fn open_packed(
    published: &PublishedIndex,
    find: &FindIndex,
) -> Result<(SourceIndex, String, u64), PublishedIndexError> {
    let source = find()?;
    let location = source.location().to_owned();
    let len = source.fingerprint().len;
    let (Access::Ranges, Some(len)) = (source.access(), len) else {
        return Err(PublishedIndexError::NoRanges(location));
    };
    let packed = SourceIndex {
        source,
        network: published.network.clone(),
        stats: Arc::clone(&published.stats),
        has_reported: AtomicBool::new(false),
        pinned: None,
    };
    Ok((packed, location, len))
}

/// Reads all of the table of contents that `find` finds, of at most `limit` bytes, and returns it with its location. It
/// must have the digest by which it was found.
pub(crate) fn read_toc(
    published: &PublishedIndex,
    find: &FindIndex,
    limit: u64,
) -> Result<(Bytes, String), PublishedIndexError> {
    let (packed, location, len) = open_packed(published, find)?;
    let expected = packed.source.fingerprint().sha256();
    match read_all(&packed, len, limit) {
        Ok(bytes) if expected.is_none_or(|expected| Sha256::of(&bytes) == expected) => {
            Ok((bytes, location))
        }
        Ok(_) => Err(PublishedIndexError::Foreign(location)),
        Err(error) => Err(PublishedIndexError::Format { location, error }),
    }
}

/// Opens the index that `find` finds, and returns it with its location.
pub(crate) fn load(
    published: &PublishedIndex,
    find: &FindIndex,
    limit: &MemoryLimit,
) -> Result<(Index, String), PublishedIndexError> {
    let (mut packed, location, len) = open_packed(published, find)?;
    let unusable = |error| PublishedIndexError::Format {
        location: location.clone(),
        error,
    };
    if let Some(expected) = published.sha256 {
        let bytes = read_all(&packed, len, limit.bytes()).map_err(unusable)?;
        check_sha256(&bytes, expected, &location)?;
        packed.pinned = Some(bytes);
    }
    let index = framed::open(Box::new(packed), len, limit).map_err(unusable)?;
    Ok((index, location))
}

/// Whether validators prove that `index` has the version of `fingerprint`; `None` if it is of another archive, or
/// made with other options than `locator` has.
pub(crate) fn is_bound(
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
    let found = Sha256::of(bytes);
    if found == expected {
        return Ok(());
    }
    Err(PublishedIndexError::Sha256 {
        location: location.to_owned(),
        found,
        expected,
    })
}
