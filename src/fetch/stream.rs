//! A source's bytes in order, as whoever reads them sees it.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::{BoxStream, StreamExt};
use tokio::runtime::Handle;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, JoinSet};

use super::demand::Demand;
use super::request::ChunkBytes;
use super::scheduler;
use super::{DEFAULT_CHUNK_LEN, DEFAULT_CONNECTIONS, MinSpeed};
use crate::base::buffer_pool::BufferPool;
use crate::base::extent::Packed;
use crate::base::stats::Stats;
use crate::source::{Access, Cause, Error, RetryForever, Source};

/// Bytes of the pieces into which a source without ranges is cut: few enough to be on their way
/// soon, enough for the queue to hold what a moment's hesitation of the reader takes.
const PIECE_LEN: usize = 1 << 20;

/// Chunks asked for and not yet read, at the most; their bytes are bounded by the pool.
const QUEUE_LEN: usize = 64;

/// How far ahead, and in what pieces.
#[derive(Clone, Debug)]
pub struct Config {
    /// The longest chunk, in bytes, at the most.
    pub chunk_len: u64,
    /// Requests in flight at once, at the most.
    pub connections: usize,
    /// What is too slow.
    pub min_speed: MinSpeed,
    /// Whether it goes on when the source cannot be reached for long.
    pub retry_forever: RetryForever,
    /// Where the chunks' memory comes from: its budget bounds how far ahead is read.
    pub pool: BufferPool,
    /// What counts requests.
    pub stats: Arc<Stats>,
}

impl Config {
    /// The default lengths and numbers with memory from `pool`, counted by `stats`.
    pub fn new(pool: BufferPool, stats: Arc<Stats>) -> Self {
        Self {
            chunk_len: DEFAULT_CHUNK_LEN,
            connections: DEFAULT_CONNECTIONS,
            min_speed: MinSpeed::default(),
            retry_forever: RetryForever::default(),
            pool,
            stats,
        }
    }
}

/// A source's bytes from one offset to the end, in order, requested ahead.
///
/// Dropping it cancels what is in flight.
#[derive(Debug)]
pub struct Stream {
    source: Arc<dyn Source>,
    next_chunks: mpsc::Receiver<NextChunk>,
    /// What landed and was not yet handed on.
    rest: Bytes,
    demand: Arc<Demand>,
    state: State,
    scheduler_handle: AbortHandle,
    /// Owns the driver; dropped last, after nobody receives any more.
    _scheduler: JoinSet<()>,
}

/// A hold on a stream.
#[derive(Clone, Debug)]
pub struct StreamControl {
    demand: Arc<Demand>,
    scheduler: AbortHandle,
}

impl StreamControl {
    /// Everything before this was asked for; 0 when nothing was, or the source has no ranges.
    pub fn requested_end(&self) -> Packed {
        self.demand.requested_end()
    }

    /// As [`StreamControl::requested_end`], and nothing more will be: who reads on gets no more than that.
    pub fn stop_requesting(&self) -> Packed {
        self.demand.stop_requesting()
    }

    /// Ends the stream: who waits for it, and who reads on, gets [`Cause::Cancelled`].
    pub fn cancel(&self) {
        self.scheduler.abort();
    }
}

#[derive(Debug)]
enum State {
    Active,
    Ended,
    Failed(Error),
}

/// What comes next, on its way or arrived.
#[derive(Debug)]
pub(super) enum NextChunk {
    /// A chunk of `len` bytes; fewer are the last of a source of unknown length.
    Chunk {
        len: u64,
        response: oneshot::Receiver<Result<ChunkBytes, Error>>,
    },
    /// A piece of a source without ranges.
    Piece(Result<Bytes, Error>),
    /// There was nothing more to ask for.
    End,
}

/// Nobody receives any more.
#[derive(Debug)]
pub(super) struct ReceiverClosed;

impl<T> From<mpsc::error::SendError<T>> for ReceiverClosed {
    fn from(_: mpsc::error::SendError<T>) -> Self {
        Self
    }
}

impl Stream {
    /// Starts to fetch `source` from `start` to its end.
    ///
    /// Buffers are taken from the pool in the order of the stream, so a pool of a single chunk
    /// suffices, provided that whoever receives a chunk lets go of it without waiting for more.
    pub fn start(handle: &Handle, source: Arc<dyn Source>, start: Packed, config: Config) -> Self {
        let (sender, next_chunks) = mpsc::channel(QUEUE_LEN.max(2 * config.connections));
        let demand = Arc::<Demand>::default();
        let mut scheduler = JoinSet::new();
        let supply_task = run_supplier(
            Arc::clone(&source),
            start,
            config,
            Arc::clone(&demand),
            sender,
        );
        let scheduler_handle = scheduler.spawn_on(supply_task, handle);
        Self {
            source,
            scheduler_handle,
            next_chunks,
            rest: Bytes::new(),
            demand,
            state: State::Active,
            _scheduler: scheduler,
        }
    }

    /// A hold on the stream for others than who reads it.
    pub fn control(&self) -> StreamControl {
        StreamControl {
            demand: Arc::clone(&self.demand),
            scheduler: self.scheduler_handle.clone(),
        }
    }

    /// The next chunk, never empty; waits for it. `None` at the end, and ever after.
    ///
    /// Only for threads outside the runtime.
    ///
    /// # Errors
    /// When the source fails; again at each further call.
    #[expect(
        clippy::should_implement_trait,
        reason = "an error stays, an iterator's would not"
    )]
    pub fn next(&mut self) -> Result<Option<Bytes>, Error> {
        if !self.rest.is_empty() {
            return Ok(Some(std::mem::take(&mut self.rest)));
        }
        match &self.state {
            State::Active => {}
            State::Ended => return Ok(None),
            State::Failed(error) => return Err(error.clone()),
        }
        let result = self.receive();
        match &result {
            Ok(Some(_)) => {}
            Ok(None) => self.state = State::Ended,
            Err(error) => self.state = State::Failed(error.clone()),
        }
        if !matches!(self.state, State::Active) {
            self.next_chunks.close();
        }
        result
    }

    fn receive(&mut self) -> Result<Option<Bytes>, Error> {
        let cancelled = || Error::new(self.source.location(), Cause::Cancelled);
        let next_chunk = match self.next_chunks.try_recv() {
            Err(TryRecvError::Empty) => self.demand.time_wait(|| self.next_chunks.blocking_recv()),
            next_chunk => next_chunk.ok(),
        };
        // A driver that goes away without a word was stopped with its runtime.
        match next_chunk.ok_or_else(cancelled)? {
            NextChunk::End => Ok(None),
            NextChunk::Piece(bytes) => bytes.map(Some),
            NextChunk::Chunk { len, mut response } => {
                let result = match response.try_recv() {
                    Err(oneshot::error::TryRecvError::Empty) => {
                        self.demand.time_wait(|| response.blocking_recv()).ok()
                    }
                    result => result.ok(),
                };
                let result = result.ok_or_else(cancelled)??;
                self.demand.record_read(result.len());
                if result.len() < len {
                    self.state = State::Ended;
                }
                let ChunkBytes { front, rest } = result;
                if front.is_empty() {
                    return Ok((!rest.is_empty()).then_some(rest));
                }
                self.rest = rest;
                Ok(Some(front))
            }
        }
    }
}

async fn run_supplier(
    source: Arc<dyn Source>,
    start: Packed,
    config: Config,
    demand: Arc<Demand>,
    sender: mpsc::Sender<NextChunk>,
) {
    // An error here says that nobody receives any more, and so does nobody miss the rest.
    drop(match source.access() {
        Access::Ranges => scheduler::run(source, start, config, &demand, &sender).await,
        Access::Stream => forward(source.as_ref(), start, &config.pool, &sender).await,
    });
}

/// Cuts a source that gives its bytes once into pieces, as fast as they are taken.
async fn forward(
    source: &dyn Source,
    start: Packed,
    pool: &BufferPool,
    sender: &mpsc::Sender<NextChunk>,
) -> Result<(), ReceiverClosed> {
    let mut piece_reader = PieceReader {
        pieces: source.stream(),
        rest: Bytes::new(),
    };
    if let Err(error) = piece_reader.skip(start.0).await {
        return Ok(sender.send(NextChunk::Piece(Err(error))).await?);
    }
    loop {
        let mut buffer = pool.acquire_async(PIECE_LEN).await;
        let mut filled = 0;
        let result = piece_reader.fill(&mut buffer, &mut filled).await;
        let is_last = filled < buffer.len();
        buffer.truncate(filled);
        if filled > 0 {
            sender.send(NextChunk::Piece(Ok(buffer.freeze()))).await?;
        }
        if let Err(error) = result {
            return Ok(sender.send(NextChunk::Piece(Err(error))).await?);
        }
        if is_last {
            return Ok(sender.send(NextChunk::End).await?);
        }
    }
}

/// A stream of pieces, of which any number of bytes can be drawn.
struct PieceReader<'a> {
    pieces: BoxStream<'a, Result<Bytes, Error>>,
    /// What the last piece held too much.
    rest: Bytes,
}

impl PieceReader<'_> {
    /// Fills `buffer`; `filled` counts, and falls short of it only at the end or after an error.
    async fn fill(&mut self, buffer: &mut [u8], filled: &mut usize) -> Result<(), Error> {
        while let Some(room) = buffer.get_mut(*filled..).filter(|room| !room.is_empty()) {
            if !self.fill_rest().await? {
                break;
            }
            let taken = self.rest.split_to(room.len().min(self.rest.len()));
            if let Some(target) = room.get_mut(..taken.len()) {
                target.copy_from_slice(&taken);
            }
            *filled += taken.len();
        }
        Ok(())
    }

    /// Drops the next `count` bytes, or as many as there are.
    async fn skip(&mut self, mut count: u64) -> Result<(), Error> {
        while count > 0 && self.fill_rest().await? {
            let len =
                usize::try_from(count).map_or(self.rest.len(), |count| count.min(self.rest.len()));
            drop(self.rest.split_to(len));
            count -= len as u64;
        }
        Ok(())
    }

    /// Sees to it that `rest` holds something; false at the end.
    async fn fill_rest(&mut self) -> Result<bool, Error> {
        while self.rest.is_empty() {
            match self.pieces.next().await {
                Some(piece) => self.rest = piece?,
                None => return Ok(false),
            }
        }
        Ok(true)
    }
}
