//! Packed bytes for decoding, verified by digests of their blocks. Blocks that the scan skipped have none.

use std::sync::Arc;

use bytes::Bytes;
use tokio::runtime::Handle;

use super::first_read_hashes::FirstReadHashes;
use crate::archive::error::{Error, ReadError};
use crate::archive::live_index::LiveIndex;
use crate::base::buffer_pool::BufferPool;
use crate::base::cancel_token::CancelToken;
use crate::base::extent::{Extent, Packed};
use crate::base::free_list::FreeList;
use crate::base::random_reads::Wait;
use crate::base::sha256::Sha256;
use crate::base::stats::Stats;
use crate::fetch;
use crate::index::import::SpanDigests;
use crate::index::{Blocks, Index};
use crate::source::{self, Cause, IsIntact, Slice, Source};

/// Maximum length of an extent that one request fetches. Longer ones, only without seek points, are streamed.
const MAX_SINGLE_REQUEST_BYTES: u64 = 16 << 20;

/// Length of the chunks of packed bytes that are pushed to the decoder of a stream.
const STREAM_CHUNK_BYTES: u64 = 2 << 20;

/// Memory for such a stream: the input before a decoder's first output (see `MIN_MEMORY`), and two chunks.
const STREAM_BUFFER_BYTES: u64 = 8 * STREAM_CHUNK_BYTES;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FetchMode {
    Normal,
    /// By one request without a deadline, because no reader waits for it.
    Background,
    /// By a request that shares no cache and no connection with the previous one.
    Refetch,
}

pub(crate) struct Request {
    pub(super) extent: Extent<Packed>,
    pub(super) blocks: Blocks,
}

/// Verified packed bytes, in order: fetched at once, or streamed.
pub(super) enum PackedBytes {
    Fetched(Option<Bytes>),
    Streamed(Box<Streamed>),
}

/// A stream of packed bytes, read in whole blocks.
pub(super) struct Streamed {
    request: Request,
    pieces: StreamPieces,
    /// Bytes that were fetched, but neither verified nor returned.
    rest: Bytes,
    /// Number of the block at the start of `rest`.
    next: usize,
}

enum StreamPieces {
    Stream {
        stream: fetch::Stream,
        source: Arc<dyn Source>,
    },
    OnDemand {
        network: Handle,
        source: Arc<dyn Source>,
        rest: Extent<Packed>,
        pool: BufferPool,
    },
}

/// Reads packed bytes of the source, and verifies them.
#[derive(Debug)]
pub(crate) struct PackedReader {
    source: Arc<dyn Source>,
    network: Handle,
    ranges: fetch::RangeReader,
    free_list: FreeList,
    /// Digests that came with an imported index.
    digests: Option<SpanDigests>,
    first_read_hashes: FirstReadHashes,
    stats: Arc<Stats>,
}

impl PackedReader {
    /// Reads `source`, within the memory of `budget`, until `cancel_token` ends that.
    pub(crate) fn new(
        source: Arc<dyn Source>,
        network: Handle,
        budget: BufferPool,
        free_list: FreeList,
        stats: Arc<Stats>,
        cancel_token: CancelToken,
    ) -> Self {
        let ranges = fetch::RangeReader::new(
            network.clone(),
            Arc::clone(&source),
            budget,
            Arc::clone(&stats),
            cancel_token,
        );
        Self {
            source,
            network,
            ranges,
            free_list,
            digests: None,
            first_read_hashes: FirstReadHashes::default(),
            stats,
        }
    }

    /// Compares later reads with `digests`, which came with an imported index.
    pub(crate) fn set_digests(&mut self, digests: SpanDigests) {
        self.digests = Some(digests);
    }

    pub(super) fn digests(&self) -> Option<&SpanDigests> {
        self.digests.as_ref()
    }

    pub(crate) fn source(&self) -> &Arc<dyn Source> {
        &self.source
    }

    /// Ends all fetches at once when it is cancelled.
    pub(super) fn cancel_token(&self) -> &CancelToken {
        self.ranges.cancel_token()
    }

    /// Reads and verifies `blocks` of a local source on the calling thread. `None` if bytes are unreadable, wrong, or,
    /// with [`Wait::NoWait`], not in the page cache.
    pub(super) fn read_inline(&self, blocks: &Blocks, wait: Wait) -> Option<Bytes> {
        let extent = blocks.extent();
        let len = usize::try_from(extent.len()).ok()?;
        let mut bytes = self.free_list.allocate(len, 0);
        let read = self.source.read_inline(extent.start(), &mut bytes, wait)?;
        let is_intact = read.is_ok() && self.mismatch(blocks, &bytes).is_none();
        is_intact.then(|| bytes.freeze())
    }

    /// Fetches `requested` by one request; fails if it is unavailable or differs from the scanned bytes.
    pub(super) fn fetch_verified(
        &self,
        requested: &Request,
        mode: FetchMode,
    ) -> Result<Bytes, Error> {
        let extent = requested.blocks.extent();
        let pool = BufferPool::with_free_list(extent.len(), self.free_list.clone());
        let bytes = match mode {
            FetchMode::Normal => self.ranges.read(extent, &pool)?,
            FetchMode::Background => self.ranges.read_unhedged(extent, &pool)?,
            FetchMode::Refetch => {
                let is_intact = |bytes: &[u8]| self.mismatch(&requested.blocks, bytes).is_none();
                fetch::read_uncached(&self.network, &self.source, extent, &pool, &is_intact)?
            }
        };
        match self.mismatch(&requested.blocks, &bytes) {
            Some(packed) => Err(Error::BlockMismatch { packed }),
            None => Ok(requested.slice(extent, &bytes)),
        }
    }

    /// Start of the first block or range that differs in `bytes`. A skipped block is compared with its first read, and
    /// with an imported index, each whole range with its digest.
    fn mismatch(&self, blocks: &Blocks, bytes: &[u8]) -> Option<Packed> {
        let other = blocks.mismatch(bytes);
        other.or_else(|| {
            if let Some(digests) = &self.digests {
                let mut inside = digests.inside(blocks.extent());
                let differs = |(range, digest): &&(Extent<Packed>, Sha256)| {
                    Sha256::of(slice_of(*range, blocks.extent(), bytes)) != *digest
                };
                return inside.find(differs).map(|(range, _)| range.start());
            }
            let mut unseen = blocks.undigested_blocks(bytes);
            let (number, _) =
                unseen.find(|(number, block)| !self.first_read_hashes.matches(*number, block))?;
            blocks.stream_block(number)
        })
    }

    /// Opens `requested`. Fails as [`Self::fetch_verified`] does; a stream does so only as it is read.
    pub(super) fn open(&self, requested: Request, mode: FetchMode) -> Result<PackedBytes, Error> {
        if requested.extent.len() <= MAX_SINGLE_REQUEST_BYTES {
            let bytes = self.fetch_verified(&requested, mode)?;
            return Ok(PackedBytes::Fetched(Some(bytes)));
        }
        let extent = requested.blocks.extent();
        let source = Arc::clone(&self.source);
        let pool = BufferPool::new(STREAM_BUFFER_BYTES);
        let pieces = match mode {
            FetchMode::Normal | FetchMode::Background => {
                let config = fetch::Config {
                    chunk_len: STREAM_CHUNK_BYTES,
                    connections: 2,
                    cancel_token: self.cancel_token().clone(),
                    ..fetch::Config::new(pool, Arc::clone(&self.stats))
                };
                // Bounded, so that nothing behind the extent is fetched ahead.
                let part = Slice::new(Arc::clone(&source), extent, source.location())?;
                let part = Arc::new(part);
                let stream = fetch::Stream::start(&self.network, part, Packed(0), config);
                StreamPieces::Stream { stream, source }
            }
            FetchMode::Refetch => StreamPieces::OnDemand {
                network: self.network.clone(),
                source,
                rest: extent,
                pool,
            },
        };
        Ok(PackedBytes::Streamed(Box::new(Streamed {
            request: requested,
            pieces,
            rest: Bytes::new(),
            next: 0,
        })))
    }
}

impl Request {
    /// The request for `extent`, cut to scanned blocks. Fails if the index lacks its digests.
    pub(super) fn find(live_index: &LiveIndex, extent: Extent<Packed>) -> Result<Self, ReadError> {
        let find = |index: &Index| (index.blocks(extent), index.is_complete());
        let (blocks, is_complete) = live_index.read(find)?;
        let blocks = blocks?.ok_or(if is_complete {
            ReadError::Index
        } else {
            ReadError::Unscanned
        })?;
        let extent = blocks.extent().intersection(&extent);
        let extent = extent.ok_or(ReadError::Index)?;
        Ok(Self { extent, blocks })
    }

    /// Bytes of memory for the request, without those of a decoder.
    pub(super) fn buffer_bytes(&self) -> u64 {
        self.blocks.extent().len().min(STREAM_BUFFER_BYTES)
    }

    pub(crate) fn slice(&self, fetched: Extent<Packed>, bytes: &Bytes) -> Bytes {
        bytes.slice_ref(slice_of(self.extent, fetched, bytes))
    }
}

/// The part `wanted` of `bytes`, those of the extent `fetched`.
fn slice_of(wanted: Extent<Packed>, fetched: Extent<Packed>, bytes: &[u8]) -> &[u8] {
    let wanted = fetched.intersection(&wanted).unwrap_or_default();
    let place = |at: Packed| usize::try_from(at.0.saturating_sub(fetched.start().0));
    let range = place(wanted.start()).ok().zip(place(wanted.end()).ok());
    let slice = range.and_then(|(start, end)| bytes.get(start..end.min(bytes.len())));
    slice.unwrap_or_default()
}

impl PackedBytes {
    pub(crate) fn next(&mut self) -> Result<Option<Bytes>, Error> {
        match self {
            Self::Fetched(bytes) => Ok(bytes.take()),
            Self::Streamed(stream) => stream.next(),
        }
    }
}

impl Streamed {
    fn next(&mut self) -> Result<Option<Bytes>, Error> {
        let blocks = &self.request.blocks;
        let block = blocks.block(self.next);
        if block.is_empty() {
            return Ok(None);
        }
        let len = usize::try_from(block.len()).unwrap_or(usize::MAX);
        let mut bytes = self.rest.split_to(len.min(self.rest.len()));
        while bytes.len() < len {
            // After corrupt bytes a piece consists of whole blocks, of which this is the first.
            let is_intact = |bytes: &[u8]| blocks.all_match(self.next, bytes);
            self.rest = self.pieces.next(&is_intact)?;
            let more = self.rest.split_to((len - bytes.len()).min(self.rest.len()));
            bytes = if bytes.is_empty() {
                more
            } else {
                [bytes, more].concat().into()
            };
        }
        if !blocks.matches(self.next, &bytes) {
            let packed = block.start();
            return Err(Error::BlockMismatch { packed });
        }
        self.next += 1;
        Ok(Some(self.request.slice(block, &bytes)))
    }
}

impl StreamPieces {
    /// Returns the next bytes of the source, at least one.
    fn next(&mut self, is_intact: IsIntact<'_>) -> Result<Bytes, Error> {
        match self {
            Self::Stream { stream, source } => match stream.next()? {
                Some(bytes) if !bytes.is_empty() => Ok(bytes),
                _ => Err(truncated(source)),
            },
            Self::OnDemand {
                network,
                source,
                rest,
                pool,
            } => {
                let piece = Extent::with_len(rest.start(), rest.len().min(STREAM_CHUNK_BYTES));
                let after = Extent::new(piece.end(), rest.end()).filter(|_| !piece.is_empty());
                let after = after.ok_or_else(|| truncated(source))?;
                let bytes = fetch::read_uncached(network, source, piece, pool, is_intact)?;
                *rest = after;
                Ok(bytes)
            }
        }
    }
}

fn truncated(source: &Arc<dyn Source>) -> Error {
    source::Error::new(source.location(), Cause::Truncated).into()
}
