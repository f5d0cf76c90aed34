//! An index from an earlier scan, which lets a new scan decode in parallel.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;

use super::published_index::{self, IndexPlace, PublishedIndex};
use crate::archive::peers::{PeerArchive, Peers, index_of_peer};
use crate::base::archive_path::ArchivePath;
use crate::base::extent::Packed;
use crate::base::sha256::Sha256;
use crate::base::stats::Stats;
use crate::codec::seek_point::MAX_SPAN_LEN;
use crate::codec::{Compression, DecodedSpans, ExpectedSpan, SeekRange};
use crate::index::store::{RowsToLoad, Store};
use crate::index::{Index, Ino, Locator, MemoryLimit};
use crate::source::Fingerprint;

/// A saved index of the source's current version, if one exists. Loaded only for a stream that benefits.
#[derive(Clone, Debug)]
pub struct SavedIndex {
    pub(crate) location: IndexLocation,
    /// Where an index is published, for use if none is saved.
    pub(crate) published: Option<PublishedIndex>,
    /// Other processes that may have it.
    pub(crate) peers: Option<Arc<dyn Peers>>,
    pub(crate) locator: Locator,
    pub(crate) limit: MemoryLimit,
    pub(crate) fingerprint: Fingerprint,
    /// Expected digest of the packed bytes, if any.
    pub(crate) digest: Option<Sha256>,
}

#[derive(Clone, Debug)]
pub(crate) enum IndexLocation {
    Store(Store),
    File(Arc<Index>),
    /// There is no directory for saved indexes.
    Nowhere,
}

impl SavedIndex {
    /// Whether the archive may contain one of `paths`, or an entry below it.
    ///
    /// True if a path's first component exists, or a member has no place in the tree. `None` without an
    /// index, and with one that is not compared with the archive yet: an index file, or a published index.
    pub fn may_have_any(&self, paths: &[ArchivePath]) -> Option<bool> {
        let index = self.load_saved(RowsToLoad::All)?;
        let may_have = |path: &ArchivePath| {
            let first = path.components().next();
            first.is_none_or(|first| index.lookup(Ino::ROOT, first).is_some())
        };
        Some(index.problem_count() > 0 || paths.iter().any(may_have))
    }

    /// Loads the index that the user names, or has saved.
    pub(crate) fn load_own(&self, rows: RowsToLoad) -> Option<Arc<Index>> {
        match &self.location {
            IndexLocation::File(index) => Some(Arc::clone(index)),
            _ => self.load_saved(rows).or_else(|| self.load_from_peer()),
        }
    }

    /// Gets the index of another process that has the archive open.
    fn load_from_peer(&self) -> Option<Arc<Index>> {
        let peers = self.peers.as_ref()?;
        index_of_peer(peers, &self.locator, &self.limit).map(Arc::new)
    }

    fn load_saved(&self, rows: RowsToLoad) -> Option<Arc<Index>> {
        let IndexLocation::Store(store) = &self.location else {
            return None;
        };
        let found = store.find_locked(&self.locator, &self.limit, rows);
        let found =
            found.inspect_err(|error| tracing::debug!(%error, "cannot use the saved index"));
        let (index, _) = found.ok()??;
        (!index.is_published()).then(|| Arc::new(index))
    }

    /// Loads all of the published index, if it is proven to be of the source's version.
    fn load_published(&self) -> Option<Arc<Index>> {
        let published = self.published.as_ref()?;
        let find = published.places.iter().find_map(|(_, place)| match place {
            IndexPlace::Index(find, _) => Some(find),
            IndexPlace::Ztoc(_) | IndexPlace::EstargzToc(_) => None,
        })?;
        let (index, _) = published_index::load(published, find, &self.limit)
            .inspect_err(|error| tracing::debug!(%error, "cannot use the published index"))
            .ok()?;
        let is_bound = published_index::is_bound(&index, &self.fingerprint, &self.locator);
        is_bound.filter(|&is_bound| is_bound)?;
        index.load_all_rows().ok()?;
        Some(Arc::new(index))
    }

    /// Seek ranges for decoding a stream of `compression` with a pool of `pool_bytes`, and where their spans may be
    /// decoded already. `None` if they would not help.
    pub(crate) fn seek_ranges(
        self,
        compression: Compression,
        pool_bytes: u64,
        stats: &Arc<Stats>,
    ) -> Option<(SeekRanges, Option<Arc<dyn DecodedSpans>>)> {
        if compression == Compression::None {
            return None;
        }
        let is_strong = self.fingerprint.is_strong();
        let to_peer = |peers| PeerArchive::new(peers, &self.locator, &self.fingerprint, stats);
        let peer = self.peers.as_ref().filter(|_| is_strong).and_then(to_peer);
        let peer = peer.filter(PeerArchive::exists);
        let own = if may_have_windows(compression) {
            self.load_own(RowsToLoad::All)
        } else {
            // Only the bytes of a peer help, so nothing waits for its scan.
            Some(
                self.load_saved(RowsToLoad::All)
                    .filter(|_| peer.is_some())?,
            )
        };
        let is_foreign = own.is_none() || matches!(self.location, IndexLocation::File(_));
        let index = own.or_else(|| self.load_published())?;
        let origin = index.origin();
        // A packed digest does not verify data decoded from foreign seek points, or those of other bytes.
        if self.digest.is_some() && (is_foreign || origin.sha256 != self.digest) {
            return None;
        }
        let is_useful = if may_have_windows(compression) {
            let has_jobs = peer.is_some() && have_all_jobs(&index, pool_bytes);
            (index.has_windows() || has_jobs) && index.seek_offset(0) == Some(Packed(0))
        } else {
            index.seek_offset(0).is_some()
        };
        let fits = origin.compression == compression
            && self
                .fingerprint
                .len
                .is_none_or(|len| len == origin.packed_bytes)
            && is_useful;
        fits.then(|| {
            let index_of_peer = Arc::clone(&index);
            let decoded = peer.map(|peer| {
                Arc::new(PeerSpans {
                    peer,
                    index: index_of_peer,
                }) as _
            });
            (SeekRanges { index, next: 0 }, decoded)
        })
    }
}

/// Whether seek points of streams of `compression` may have windows. Decoders of others are parallel without an index.
pub(crate) fn may_have_windows(compression: Compression) -> bool {
    matches!(compression, Compression::Gzip | Compression::Lz4)
}

/// Whether all ranges of `index` are short enough for jobs.
fn have_all_jobs(index: &Arc<Index>, pool_bytes: u64) -> bool {
    let index = Arc::clone(index);
    SeekRanges { index, next: 0 }.all(|range| range.fits_job(pool_bytes))
}

/// The spans of an index that peers have.
#[derive(Debug)]
struct PeerSpans {
    peer: PeerArchive,
    index: Arc<Index>,
}

impl DecodedSpans for PeerSpans {
    fn find(&self, number: u32, expected: ExpectedSpan) -> Option<Bytes> {
        self.peer.span(number, expected, self.index.block_len())
    }
}

/// Iterates over the ranges between the seek points of an index.
#[derive(Debug)]
pub(crate) struct SeekRanges {
    index: Arc<Index>,
    next: u32,
}

impl Iterator for SeekRanges {
    type Item = SeekRange;

    fn next(&mut self) -> Option<SeekRange> {
        let index = &self.index;
        let seek_point = index.span(self.next).ok()??.seek_point?;
        let following = (self.next + 1..index.span_count())
            .find_map(|number| Some((number, index.seek_offset(number)?)));
        let (until, end) =
            following.unwrap_or((index.span_count(), Packed(index.origin().packed_bytes)));
        // A longer span is invalid. Dropping it leaves the range incomplete, which is an error.
        let first_span = self.next;
        let spans = (first_span..until)
            .map_while(|number| {
                let span = index.span(number).ok()??;
                Some(ExpectedSpan {
                    len: span.plain.len(),
                    hash: span.hash?,
                })
            })
            .take_while(|span| span.len <= MAX_SPAN_LEN)
            .collect::<VecDeque<_>>();
        self.next = until;
        (!spans.is_empty()).then_some(SeekRange {
            seek_point,
            end,
            first_span,
            spans,
            block_len: index.block_len(),
        })
    }
}
