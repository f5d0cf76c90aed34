//! The driver: requests in flight, in the order in which their bytes are wanted.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::{BoxStream, StreamExt};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;

use super::plan::Plan;
use super::{CHUNK_LEN, CONNECTIONS};
use crate::base::buffer::Pool;
use crate::base::extent::Packed;
use crate::source::{Access, Cause, Error, Source};

/// Bytes of the pieces into which a source without ranges is cut: few enough to be on their way
/// soon, enough for the queue to hold what a moment's hesitation of the reader takes.
const PIECE_LEN: usize = 1 << 20;

/// How far ahead, and in what pieces.
#[derive(Clone, Debug)]
pub struct Config {
    /// The longest chunk, in bytes.
    pub chunk_len: u64,
    /// Requests in flight at once.
    pub connections: usize,
    /// Where the chunks' memory comes from: its budget bounds how far ahead is read.
    pub pool: Pool,
}

impl Config {
    /// The default lengths and numbers with memory from `pool`.
    pub fn new(pool: Pool) -> Self {
        Self {
            chunk_len: CHUNK_LEN,
            connections: CONNECTIONS,
            pool,
        }
    }
}

/// A source's bytes from one offset to the end, in order, requested ahead.
///
/// Dropping it cancels what is in flight.
#[derive(Debug)]
pub struct Stream {
    source: Arc<dyn Source>,
    flights: mpsc::Receiver<Flight>,
    state: State,
    /// Owns the driver; dropped last, after nobody receives any more.
    _driver: JoinSet<()>,
}

#[derive(Debug)]
enum State {
    Flowing,
    Ended,
    Failed(Error),
}

/// What comes next, on its way or arrived.
#[derive(Debug)]
enum Flight {
    /// A chunk of `len` bytes; fewer are the last of a source of unknown length.
    Chunk {
        len: u64,
        bytes: oneshot::Receiver<Result<Bytes, Error>>,
    },
    /// A piece of a source without ranges.
    Piece(Result<Bytes, Error>),
    /// There was nothing more to ask for.
    End,
}

impl Stream {
    /// Starts to fetch `source` from `start` to its end.
    ///
    /// Buffers are taken from the pool in the order of the stream, so a pool of a single chunk
    /// suffices, provided that whoever receives a chunk lets go of it without waiting for more.
    pub fn start(handle: &Handle, source: Arc<dyn Source>, start: Packed, config: Config) -> Self {
        // Bytes are bounded by the pool; this only keeps the queue as short as it needs to be.
        let (sender, flights) = mpsc::channel(2 * config.connections.max(1));
        let mut driver = JoinSet::new();
        driver.spawn_on(drive(Arc::clone(&source), start, config, sender), handle);
        Self {
            source,
            flights,
            state: State::Flowing,
            _driver: driver,
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
        match &self.state {
            State::Flowing => {}
            State::Ended => return Ok(None),
            State::Failed(error) => return Err(error.clone()),
        }
        let landed = self.land();
        match &landed {
            Ok(Some(_)) => {}
            Ok(None) => self.state = State::Ended,
            Err(error) => self.state = State::Failed(error.clone()),
        }
        if !matches!(self.state, State::Flowing) {
            self.flights.close();
        }
        landed
    }

    fn land(&mut self) -> Result<Option<Bytes>, Error> {
        let cancelled = || Error::new(self.source.location(), Cause::Cancelled);
        // A driver that goes away without a word was stopped with its runtime.
        match self.flights.blocking_recv().ok_or_else(cancelled)? {
            Flight::End => Ok(None),
            Flight::Piece(bytes) => bytes.map(Some),
            Flight::Chunk { len, bytes } => {
                let bytes = bytes.blocking_recv().map_err(|_| cancelled())??;
                if (bytes.len() as u64) < len {
                    self.state = State::Ended;
                }
                Ok((!bytes.is_empty()).then_some(bytes))
            }
        }
    }
}

async fn drive(
    source: Arc<dyn Source>,
    start: Packed,
    config: Config,
    sender: mpsc::Sender<Flight>,
) {
    // An error here says that nobody receives any more, and so does nobody miss the rest.
    drop(match source.access() {
        Access::Ranges => fetch(source, start, config, &sender).await,
        Access::Stream => forward(source.as_ref(), start, &config.pool, &sender).await,
    });
}

type Gone = mpsc::error::SendError<Flight>;

/// Requests chunk after chunk, up to `connections` at once.
async fn fetch(
    source: Arc<dyn Source>,
    start: Packed,
    config: Config,
    sender: &mpsc::Sender<Flight>,
) -> Result<(), Gone> {
    let end = Packed(source.fingerprint().len.unwrap_or(u64::MAX));
    let connections = Arc::new(Semaphore::new(config.connections.max(1)));
    let mut requests = JoinSet::new();
    for chunk in Plan::new(start, end, config.chunk_len) {
        // Never closed, so there is always a permit, though not at once.
        let permit = Arc::clone(&connections).acquire_owned().await;
        let Ok(len) = usize::try_from(chunk.len()) else {
            break;
        };
        let buffer = config.pool.take_async(len).await;
        let (done, bytes) = oneshot::channel();
        let flight = Flight::Chunk {
            len: chunk.len(),
            bytes,
        };
        let source = Arc::clone(&source);
        requests.spawn(async move {
            let read = source.read_at(chunk.start(), buffer).await;
            drop(permit);
            // Nobody receives any more: then nobody misses it.
            drop(done.send(read));
        });
        sender.send(flight).await?;
        while requests.try_join_next().is_some() {}
    }
    sender.send(Flight::End).await?;
    while requests.join_next().await.is_some() {}
    Ok(())
}

/// Cuts a source that gives its bytes once into pieces, as fast as they are taken.
async fn forward(
    source: &dyn Source,
    start: Packed,
    pool: &Pool,
    sender: &mpsc::Sender<Flight>,
) -> Result<(), Gone> {
    let mut tap = Tap {
        pieces: source.stream(),
        rest: Bytes::new(),
    };
    if let Err(error) = tap.skip(start.0).await {
        return sender.send(Flight::Piece(Err(error))).await;
    }
    loop {
        let mut buffer = pool.take_async(PIECE_LEN).await;
        let mut filled = 0;
        let result = tap.fill(&mut buffer, &mut filled).await;
        let is_last = filled < buffer.len();
        buffer.truncate(filled);
        if filled > 0 {
            sender.send(Flight::Piece(Ok(buffer.freeze()))).await?;
        }
        if let Err(error) = result {
            return sender.send(Flight::Piece(Err(error))).await;
        }
        if is_last {
            return sender.send(Flight::End).await;
        }
    }
}

/// A stream of pieces, of which any number of bytes can be drawn.
struct Tap<'a> {
    pieces: BoxStream<'a, Result<Bytes, Error>>,
    /// What the last piece held too much.
    rest: Bytes,
}

impl Tap<'_> {
    /// Fills `buffer`; `filled` counts, and falls short of it only at the end or after an error.
    async fn fill(&mut self, buffer: &mut [u8], filled: &mut usize) -> Result<(), Error> {
        while let Some(room) = buffer.get_mut(*filled..).filter(|room| !room.is_empty()) {
            if !self.draw().await? {
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
        while count > 0 && self.draw().await? {
            let len =
                usize::try_from(count).map_or(self.rest.len(), |count| count.min(self.rest.len()));
            drop(self.rest.split_to(len));
            count -= len as u64;
        }
        Ok(())
    }

    /// Sees to it that `rest` holds something; false at the end.
    async fn draw(&mut self) -> Result<bool, Error> {
        while self.rest.is_empty() {
            match self.pieces.next().await {
                Some(piece) => self.rest = piece?,
                None => return Ok(false),
            }
        }
        Ok(true)
    }
}
