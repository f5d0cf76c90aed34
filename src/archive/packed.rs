//! Packed bytes for decoding, fetched and verified against the digests of their blocks.
//!
//! Nothing that a source gives is decoded before its block has the digest that the scan took. Blocks
//! that the scan skipped have none.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tokio::runtime::Handle;
use xxhash_rust::xxh3::xxh3_64;

use super::error::Error;
use super::read::{ReadError, Reader};
use crate::base::buffer_pool::BufferPool;
use crate::base::extent::{Extent, Packed, Plain};
use crate::base::random_reads::Wait;
use crate::codec::Compression;
use crate::fetch;
use crate::index::Blocks;
use crate::source::{self, Cause, RetryForever, Source};

/// Packed extents up to this length are fetched by one request; longer ones, which occur only
/// without seek points, as a stream.
const MAX_SINGLE_REQUEST_BYTES: u64 = 16 << 20;

/// Packed bytes pushed at once to a decoder that reads a stream of them.
const STREAM_CHUNK_BYTES: u64 = 2 << 20;

/// Packed bytes of such a stream that are in memory at once: what a decoder waits for before it
/// gives anything out (see [`MIN_MEMORY`](super::scan::MIN_MEMORY)) and a chunk at both ends.
const STREAM_BUFFER_BYTES: u64 = 8 * STREAM_CHUNK_BYTES;

/// How packed bytes are fetched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FetchMode {
    /// As any read.
    Normal,
    /// As nobody waits for it: by one request, however long it takes.
    Background,
    /// By a request that shares no cache and no connection with the one before.
    Refetch,
}

/// An extent of packed bytes to decode from, and the blocks that it lies in.
pub(super) struct Request {
    extent: Extent<Packed>,
    blocks: Blocks,
}

/// Verified packed bytes in order: fetched at once, or as they are needed.
pub(super) enum PackedBytes {
    Fetched(Option<Bytes>),
    Streamed(Box<Streamed>),
}

/// Whole blocks of a stream of packed bytes.
pub(super) struct Streamed {
    request: Request,
    pieces: StreamPieces,
    /// Fetched, and neither verified nor handed on.
    rest: Bytes,
    /// The number of the block that `rest` begins with.
    next: usize,
}

/// Where the bytes of a stream come from.
enum StreamPieces {
    /// Ahead of the decoder.
    ReadAhead {
        stream: fetch::Stream,
        source: Arc<dyn Source>,
    },
    /// Piece by piece, each only when it is needed.
    OnDemand {
        network: Handle,
        source: Arc<dyn Source>,
        rest: Extent<Packed>,
        pool: BufferPool,
    },
}

impl Reader {
    /// What has to be fetched for `extent`, of which nothing counts that the scan has not come to.
    ///
    /// # Errors
    /// When the index has no digests of these bytes, or not yet.
    pub(super) fn request(&self, extent: Extent<Packed>) -> Result<Request, ReadError> {
        let index = self.live_index.read();
        let Some(blocks) = index.blocks(extent) else {
            return Err(if index.is_complete() {
                ReadError::Index
            } else {
                ReadError::Unscanned
            });
        };
        let extent = blocks.extent().intersection(&extent);
        let extent = extent.ok_or(ReadError::Index)?;
        Ok(Request { extent, blocks })
    }

    /// Whether any plain bytes can be read as they are from a local disk.
    pub(super) fn reads_here(&self) -> bool {
        self.source.can_read_inline() && self.compression() == Compression::None
    }

    /// The plain bytes `extent` of a local archive that is not packed, read on the calling thread and
    /// verified: the blocks that they lie in, and no more. `None` for any other archive, with
    /// [`Wait::Never`] for what is not in the page cache, and for what cannot be read or verified: to make
    /// the whole span tells why.
    pub(super) fn read_here(&self, extent: Extent<Plain>, wait: Wait) -> Option<Bytes> {
        if !self.reads_here() {
            return None;
        }
        let wanted = Extent::with_len(Packed(extent.start().0), extent.len());
        let blocks = self.live_index.read().blocks(wanted)?;
        let fetched = blocks.extent();
        if fetched.intersection(&wanted) != Some(wanted) {
            return None;
        }
        let len = usize::try_from(fetched.len()).ok()?;
        let mut bytes = self.free_list.allocate(len, 0);
        let read = self.source.read_inline(fetched.start(), &mut bytes, wait)?;
        if read.is_err() || self.mismatch(&blocks, &bytes).is_some() {
            return None;
        }
        let request = Request {
            extent: wanted,
            blocks,
        };
        Some(request.slice(fetched, &bytes.freeze()))
    }

    /// Fetches what is `requested`, by one request, and verifies it.
    ///
    /// # Errors
    /// When the bytes cannot be had, or are not those that were scanned.
    pub(super) fn fetch_verified(
        &self,
        requested: &Request,
        mode: FetchMode,
    ) -> Result<Bytes, Error> {
        let extent = requested.blocks.extent();
        let pool = BufferPool::with_free_list(extent.len(), self.free_list.clone());
        let bytes = match mode {
            FetchMode::Normal => self.reads.read(extent, &pool)?,
            FetchMode::Background => fetch::read(&self.network, &self.source, extent, &pool)?,
            FetchMode::Refetch => fetch::read_uncached(&self.network, &self.source, extent, &pool)?,
        };
        match self.mismatch(&requested.blocks, &bytes) {
            Some(packed) => Err(Error::BlockMismatch { packed }),
            None => Ok(requested.slice(extent, &bytes)),
        }
    }
}

impl Reader {
    /// The first byte of the first of `blocks` that `bytes` differ in; or, of those that the scan skipped,
    /// of any that is not as it was when it was first read.
    fn mismatch(&self, blocks: &Blocks, bytes: &[u8]) -> Option<Packed> {
        let other = blocks.mismatch(bytes);
        other.or_else(|| {
            let mut unseen = blocks.undigested_blocks(bytes);
            let (number, _) =
                unseen.find(|(number, block)| !self.first_read_hashes.matches(*number, block))?;
            blocks.stream_block(number)
        })
    }
}

/// Hashes that share one allocation.
const HASHES_PER_LEAF: usize = 512;

/// What blocks without digests had in them when they were first read: eight bytes for each block near
/// one that was read.
#[derive(Debug, Default)]
pub(super) struct FirstReadHashes {
    /// Hashes of blocks that follow each other; zero stands for none.
    leaves: Mutex<HashMap<usize, Box<[u64]>>>,
}

impl FirstReadHashes {
    /// Whether block `number` is `block`, as far as it was read before.
    fn matches(&self, number: usize, block: &[u8]) -> bool {
        let hash = xxh3_64(block).max(1);
        let mut leaves = self.leaves.lock().unwrap_or_else(PoisonError::into_inner);
        let leaf = leaves.entry(number / HASHES_PER_LEAF);
        let leaf = leaf.or_insert_with(|| vec![0; HASHES_PER_LEAF].into());
        let Some(first) = leaf.get_mut(number % HASHES_PER_LEAF) else {
            return false;
        };
        if *first == 0 {
            *first = hash;
        }
        *first == hash
    }
}

impl Request {
    /// Bytes of memory that serving it takes, but for what a decoder needs.
    pub(super) fn buffer_bytes(&self) -> u64 {
        self.blocks.extent().len().min(STREAM_BUFFER_BYTES)
    }

    /// How many bytes are wanted.
    pub(super) fn len(&self) -> u64 {
        self.extent.len()
    }

    /// The blocks that are fetched.
    pub(super) fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Whether each block has a digest.
    pub(super) fn is_digested(&self) -> bool {
        self.blocks.are_all_digested()
    }

    /// What is wanted of `bytes`, which are those of `fetched`.
    pub(super) fn slice(&self, fetched: Extent<Packed>, bytes: &Bytes) -> Bytes {
        let Some(wanted) = fetched.intersection(&self.extent) else {
            return Bytes::new();
        };
        let place = |at: Packed| {
            let offset = usize::try_from(at.0 - fetched.start().0);
            offset.map_or(bytes.len(), |offset| offset.min(bytes.len()))
        };
        bytes.slice(place(wanted.start())..place(wanted.end()))
    }
}

impl PackedBytes {
    /// Those that are `requested`, of `reader`'s source.
    ///
    /// # Errors
    /// When they cannot be had, or are not those that were scanned; of a stream only as it is read.
    pub(super) fn open(
        reader: &Reader,
        requested: Request,
        mode: FetchMode,
    ) -> Result<Self, Error> {
        if requested.len() <= MAX_SINGLE_REQUEST_BYTES {
            let bytes = reader.fetch_verified(&requested, mode)?;
            return Ok(Self::Fetched(Some(bytes)));
        }
        let extent = requested.blocks.extent();
        let source = Arc::clone(&reader.source);
        let pool = BufferPool::new(STREAM_BUFFER_BYTES);
        let pieces = match mode {
            FetchMode::Normal | FetchMode::Background => {
                let config = fetch::Config {
                    chunk_len: STREAM_CHUNK_BYTES,
                    connections: 2,
                    min_speed: fetch::MinSpeed::default(),
                    retry_forever: RetryForever::default(),
                    pool,
                    stats: Arc::clone(&reader.stats),
                };
                let start = extent.start();
                let stream = Arc::clone(&source);
                let stream = fetch::Stream::start(&reader.network, stream, start, config);
                StreamPieces::ReadAhead { stream, source }
            }
            FetchMode::Refetch => StreamPieces::OnDemand {
                network: reader.network.clone(),
                source,
                rest: extent,
                pool,
            },
        };
        Ok(Self::Streamed(Box::new(Streamed {
            request: requested,
            pieces,
            rest: Bytes::new(),
            next: 0,
        })))
    }

    /// The next bytes; `None` at the end of what was requested.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(super) fn next(&mut self) -> Result<Option<Bytes>, Error> {
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
            self.rest = self.pieces.next()?;
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
    /// The next bytes of the source, at least one.
    fn next(&mut self) -> Result<Bytes, Error> {
        match self {
            Self::ReadAhead { stream, source } => match stream.next()? {
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
                let bytes = fetch::read_uncached(network, source, piece, pool)?;
                *rest = after;
                Ok(bytes)
            }
        }
    }
}

fn truncated(source: &Arc<dyn Source>) -> Error {
    source::Error::new(source.location(), Cause::Truncated).into()
}
