//! A source's bytes in order, as the reader sees them.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::{BoxStream, StreamExt};
use tokio::runtime::Handle;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, JoinSet};

use super::demand::Demand;
use super::request::ChunkBytes;
use super::scheduler::{self, Config, NextChunk, ReceiverClosed};
use crate::base::buffer_pool::BufferPool;
use crate::base::extent::Packed;
use crate::source::{Access, Cause, Error, Source};

/// Length in bytes of pieces of a source without ranges, short to arrive soon, and long to bridge pauses.
const PIECE_LEN: usize = 1 << 20;

/// Maximum number of chunks requested and not read. The pool bounds their bytes.
const QUEUE_LEN: usize = 64;

/// A source's bytes from one offset to the end, fetched ahead. Dropping it cancels the requests in flight.
#[derive(Debug)]
pub struct Stream {
    source: Arc<dyn Source>,
    next_chunks: mpsc::Receiver<NextChunk>,
    rest: Bytes,
    demand: Arc<Demand>,
    state: State,
    scheduler_handle: AbortHandle,
    /// Owns the scheduler task; dropped last, after the receiver.
    _scheduler: JoinSet<()>,
}

/// Controls a stream from outside its reader.
#[derive(Clone, Debug)]
pub struct StreamControl {
    demand: Arc<Demand>,
    scheduler: AbortHandle,
}

impl StreamControl {
    /// End of the requested bytes; 0 if none were requested, or the source has no ranges.
    pub fn requested_end(&self) -> Packed {
        self.demand.requested_end()
    }

    /// Stops further requests, and returns [`StreamControl::requested_end`], where the reader's bytes end.
    pub fn stop_requesting(&self) -> Packed {
        self.demand.stop_requesting()
    }

    /// Cancels the stream. Its reader gets [`Cause::Cancelled`].
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

impl Stream {
    /// Starts to fetch `source` from `start` to its end.
    /// A pool of a single chunk suffices, if the reader drops each chunk before it waits for the next.
    pub fn start(handle: &Handle, source: Arc<dyn Source>, start: Packed, config: Config) -> Self {
        let (sender, next_chunks) = mpsc::channel(QUEUE_LEN.max(2 * config.connections));
        let demand = Arc::<Demand>::default();
        let mut scheduler = JoinSet::new();
        let (supply, shared) = (Arc::clone(&source), Arc::clone(&demand));
        let cancel_token = config.cancel_token.clone();
        let supply = async move {
            // An error means that the receiver was dropped, so the rest is not needed.
            drop(match supply.access() {
                Access::Ranges => scheduler::run(supply, start, config, &shared, &sender).await,
                Access::Stream => forward(supply.as_ref(), start, &config.pool, &sender).await,
            });
        };
        let until_cancelled = async move {
            tokio::select! {
                () = cancel_token.cancelled() => {}
                () = supply => {}
            }
        };
        let scheduler_handle = scheduler.spawn_on(until_cancelled, handle);
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

    /// Returns a control of the stream for other threads than the reader.
    pub fn control(&self) -> StreamControl {
        StreamControl {
            demand: Arc::clone(&self.demand),
            scheduler: self.scheduler_handle.clone(),
        }
    }

    /// Waits for the next chunk, never empty; `None` at the end. Only for threads outside the runtime.
    ///
    /// # Errors
    /// If the source fails, at this and each further call.
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
        // The scheduler ended without a result, because it was cancelled, or its runtime stopped.
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

struct PieceReader<'a> {
    pieces: BoxStream<'a, Result<Bytes, Error>>,
    rest: Bytes,
}

impl PieceReader<'_> {
    /// Fills `buffer`, and counts in `filled`. It fills less only at the end or after an error.
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

    async fn skip(&mut self, mut count: u64) -> Result<(), Error> {
        while count > 0 && self.fill_rest().await? {
            let len =
                usize::try_from(count).map_or(self.rest.len(), |count| count.min(self.rest.len()));
            drop(self.rest.split_to(len));
            count -= len as u64;
        }
        Ok(())
    }

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
