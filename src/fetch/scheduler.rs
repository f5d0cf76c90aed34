//! Schedules the requests of a stream in the order of their bytes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, MissedTickBehavior};

use super::adaptive::{AdaptiveConcurrency, CompletedChunk, MIN_STARVING_TIME, Sample};
use super::chunks::Chunks;
use super::demand::Demand;
use super::request::{ChunkBytes, ChunkRequest};
use super::stragglers::{CHECK_INTERVAL, StragglerAction, StragglerDetector};
use super::{DEFAULT_CHUNK_LEN, DEFAULT_CONNECTIONS, MinSpeed};
use crate::base::buffer_pool::{Buffer, BufferPool};
use crate::base::cancel_token::CancelToken;
use crate::base::extent::{Extent, Packed};
use crate::base::stats::Stats;
use crate::source::{Continuation, Error, ReadHandle, RetryForever, Source};

/// Maximum number of concurrent reads of a local source: the current and the next one.
const MAX_LOCAL_READS: usize = 2;

/// Limits of a stream.
#[derive(Clone, Debug)]
pub struct Config {
    /// Maximum length of a chunk, in bytes.
    pub chunk_len: u64,
    /// Maximum number of requests in flight.
    pub connections: usize,
    /// Threshold of a slow request.
    pub min_speed: MinSpeed,
    /// Whether reads continue when the source is unreachable for long.
    pub retry_forever: RetryForever,
    /// Ends the stream, whose reader gets [`Cause::Cancelled`](crate::source::Cause::Cancelled).
    pub cancel_token: CancelToken,
    /// Supplies the chunks' memory. Its budget bounds the fetch-ahead.
    pub pool: BufferPool,
    /// Counters.
    pub stats: Arc<Stats>,
}

impl Config {
    /// Creates the default configuration with memory from `pool` and counters in `stats`.
    pub fn new(pool: BufferPool, stats: Arc<Stats>) -> Self {
        Self {
            chunk_len: DEFAULT_CHUNK_LEN,
            connections: DEFAULT_CONNECTIONS,
            min_speed: MinSpeed::default(),
            retry_forever: RetryForever::default(),
            cancel_token: CancelToken::default(),
            pool,
            stats,
        }
    }
}

#[derive(Debug)]
pub(super) enum NextChunk {
    /// A chunk of `len` bytes. Fewer bytes mark the end of a source of unknown length.
    Chunk {
        len: u64,
        response: oneshot::Receiver<Result<ChunkBytes, Error>>,
    },
    Piece(Result<Bytes, Error>),
    End,
}

#[derive(Debug)]
pub(super) struct ReceiverClosed;

impl<T> From<mpsc::error::SendError<T>> for ReceiverClosed {
    fn from(_: mpsc::error::SendError<T>) -> Self {
        Self
    }
}

/// Requests `source` chunk by chunk from `start` to its end, and acquires buffers in that order. The only
/// exception is a hedge's buffer, for which no task waits.
pub(super) async fn run(
    source: Arc<dyn Source>,
    start: Packed,
    config: Config,
    demand: &Demand,
    sender: &mpsc::Sender<NextChunk>,
) -> Result<(), ReceiverClosed> {
    let mut scheduler = Scheduler::new(source, start, config);
    let mut ticks = tokio::time::interval(CHECK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut has_ended = false;
    while !(has_ended && scheduler.requests.is_empty()) {
        scheduler.report_serial_server();
        let chunk = scheduler.chunks.peek(scheduler.concurrency.chunk_len());
        let may_launch = !has_ended && scheduler.may_launch(demand);
        let may_grow = scheduler.concurrency.may_grow() && demand.is_waiting();
        let is_watching = scheduler.is_remote && !scheduler.requests.is_empty();
        tokio::select! {
            biased;
            () = sender.closed() => return Err(ReceiverClosed),
            Some(ended) = scheduler.requests.join_next() => scheduler.on_completed(&ended, demand),
            () = demand.wait_for_change() => scheduler.update_concurrency(demand),
            () = tokio::time::sleep(MIN_STARVING_TIME), if may_grow => scheduler.update_concurrency(demand),
            _ = ticks.tick(), if is_watching => scheduler.check_stragglers(),
            acquired = acquire_slot(sender, &scheduler.config.pool, chunk), if may_launch => {
                let (slot, chunk) = acquired?;
                has_ended = chunk.is_none();
                if let Some((chunk, _)) = &chunk
                    && !demand.request_until(chunk.end())
                {
                    return Err(ReceiverClosed);
                }
                slot.send(chunk.map_or(NextChunk::End, |(chunk, buffer)| {
                    scheduler.send_request(chunk, buffer)
                }));
            }
        }
    }
    Ok(())
}

/// Reserves a slot in the queue, and then a buffer for `chunk`, if any. Cancelled, it reserves nothing.
async fn acquire_slot<'a>(
    sender: &'a mpsc::Sender<NextChunk>,
    pool: &BufferPool,
    chunk: Option<Extent<Packed>>,
) -> Result<
    (
        mpsc::Permit<'a, NextChunk>,
        Option<(Extent<Packed>, Buffer)>,
    ),
    ReceiverClosed,
> {
    let slot = sender.reserve().await?;
    let Some(chunk) = chunk else {
        return Ok((slot, None));
    };
    // A length beyond `usize` exceeds any budget.
    let len = usize::try_from(chunk.len()).map_err(|_| ReceiverClosed)?;
    Ok((slot, Some((chunk, pool.acquire_async(len).await))))
}

struct Scheduler {
    source: Arc<dyn Source>,
    config: Config,
    started: Instant,
    is_remote: bool,
    chunks: Chunks,
    concurrency: AdaptiveConcurrency,
    stragglers: StragglerDetector,
    continuation: Arc<Continuation>,
    stream_end: u64,
    /// Number of the first request while one long response is streamed.
    first_streamed: Option<u64>,
    has_reported_serial: bool,
    in_flight: BTreeMap<u64, Arc<ChunkRequest>>,
    /// Each task returns its number, and its bytes unless it failed.
    requests: JoinSet<(u64, Option<u64>)>,
    sent_requests: u64,
    requested_bytes: u64,
    received_bytes: u64,
}

impl Scheduler {
    fn new(source: Arc<dyn Source>, start: Packed, config: Config) -> Self {
        let is_remote = source.is_remote();
        let connections = if is_remote {
            config.connections
        } else {
            config.connections.min(MAX_LOCAL_READS)
        };
        let end = Packed(source.fingerprint().len.unwrap_or(u64::MAX));
        Self {
            started: Instant::now(),
            is_remote,
            chunks: Chunks::new(start, end),
            concurrency: AdaptiveConcurrency::new(
                connections,
                config.chunk_len,
                config.pool.budget(),
                source.response_cost(),
            ),
            stragglers: StragglerDetector::new(config.min_speed),
            continuation: Arc::default(),
            stream_end: 0,
            first_streamed: None,
            has_reported_serial: false,
            in_flight: BTreeMap::new(),
            requests: JoinSet::new(),
            sent_requests: 0,
            requested_bytes: 0,
            received_bytes: 0,
            source,
            config,
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn may_launch(&self, demand: &Demand) -> bool {
        let (read, _) = demand.read_and_waited();
        let most = self
            .concurrency
            .requests()
            .min(self.source.max_concurrent_reads());
        // A streamed request starts beside those in flight, which may take as long as the stream.
        let active = match self.first_streamed {
            Some(first) if self.source.max_concurrent_reads() > 1 => {
                self.in_flight.range(first..).count()
            }
            _ => self.requests.len(),
        };
        active < most
            && self.requested_bytes.saturating_sub(read) < self.concurrency.fetch_ahead_bytes()
    }

    fn send_request(&mut self, chunk: Extent<Packed>, buffer: Buffer) -> NextChunk {
        let number = self.sent_requests;
        self.sent_requests += 1;
        self.chunks.advance_past(chunk);
        self.requested_bytes += chunk.len();
        self.stragglers.on_sent(number, self.now());
        let read_handle = self.read_handle(chunk);
        self.concurrency.on_sent();
        let request = Arc::new(ChunkRequest::new(chunk, read_handle));
        self.in_flight.insert(number, Arc::clone(&request));
        let (done, completed) = oneshot::channel();
        let source = Arc::clone(&self.source);
        let (pool, stats) = (self.config.pool.clone(), Arc::clone(&self.config.stats));
        self.requests.spawn(async move {
            let result = request
                .receive(source.as_ref(), buffer, &pool, &stats)
                .await;
            let len = result.as_ref().ok().map(ChunkBytes::len);
            // An error means that the receiver was dropped, so the result is not needed.
            drop(done.send(result));
            (number, len)
        });
        let peak = self.requests.len() as u64;
        self.config.stats.source_peak_requests.record_max(peak);
        NextChunk::Chunk {
            len: chunk.len(),
            response: completed,
        }
    }

    /// Informs the source that its server is serial, because other reads would detect it too late.
    fn report_serial_server(&mut self) {
        if self.concurrency.is_confirmed_serial()
            && self.chunks.is_done()
            && !self.has_reported_serial
        {
            self.has_reported_serial = true;
            self.source.limit_to_one_read();
        }
    }

    /// The handle to read `chunk`. Requests sent one at a time each ask for more than the one before.
    fn read_handle(&mut self, chunk: Extent<Packed>) -> ReadHandle {
        let read_handle = ReadHandle::for_stream(self.config.retry_forever.clone());
        let is_alone = self.concurrency.is_streaming() || self.source.max_concurrent_reads() == 1;
        // A chunk across the end of the last streamed request also starts a new one.
        if is_alone && chunk.end().0 > self.stream_end {
            self.stream_end = chunk.end().0.saturating_add(self.concurrency.stream_len);
            self.concurrency.on_stream_started();
        }
        let len = self.source.fingerprint().len;
        let end = len.map_or(0, |len| len.min(self.stream_end));
        let beyond = end.saturating_sub(chunk.end().0);
        // Pass the continuation even with nothing to add, because its kept response may have this chunk.
        let beyond = if is_alone { beyond } else { 0 };
        read_handle.with_continuation(beyond, Arc::clone(&self.continuation))
    }

    fn on_completed(&mut self, ended: &Result<(u64, Option<u64>), JoinError>, demand: &Demand) {
        // A panicked task has logged its panic, and its reader sees its channel closed.
        let Ok((number, len)) = *ended else {
            return;
        };
        let Some(request) = self.in_flight.remove(&number) else {
            return;
        };
        let duration = request.started.elapsed();
        self.stragglers
            .on_completed(number, len.map(|len| (len, duration)));
        let Some(len) = len else {
            return;
        };
        self.received_bytes += len;
        if len < request.extent.len() {
            self.chunks.end();
        }
        let completed = CompletedChunk {
            start: request.extent.start().0,
            len,
            duration,
            latency: request.read_handle.latency(),
            cost: request.read_handle.cost(),
        };
        self.concurrency
            .on_completed(self.sample(demand), completed);
        self.update_concurrency(demand);
        let first = self.first_streamed.unwrap_or(self.sent_requests);
        self.first_streamed = self.concurrency.is_streaming().then_some(first);
    }

    fn update_concurrency(&mut self, demand: &Demand) {
        self.concurrency.update(self.sample(demand));
    }

    fn sample(&self, demand: &Demand) -> Sample {
        let coming = self
            .in_flight
            .values()
            .map(|request| request.read_handle.received());
        let (read, waited) = demand.read_and_waited();
        Sample {
            now: self.now(),
            received: self.received_bytes + coming.sum::<u64>(),
            read,
            waited,
            in_flight: self.requests.len(),
            is_cheap: self.in_flight.values().all(|request| request.is_cheap()),
        }
    }

    fn check_stragglers(&mut self) {
        let in_flight = &self.in_flight;
        let received = |number| {
            let request = in_flight.get(&number);
            request.map_or(0, |request| request.read_handle.received())
        };
        // Without a known length, more may be left to request.
        let is_all_requested = self.chunks.is_done() && self.source.fingerprint().len.is_some();
        for (number, action) in self
            .stragglers
            .check(self.now(), received, is_all_requested)
        {
            let Some(request) = self.in_flight.get(&number) else {
                continue;
            };
            tracing::debug!(number, ?action, "a request is a straggler");
            // Where requests are served one after another, a new request would only wait again.
            let is_waiting = request.read_handle.received() == 0;
            let is_serial = self.concurrency.is_serial || self.concurrency.is_crowded();
            match action {
                _ if is_waiting && is_serial => {}
                StragglerAction::Cut => request.read_handle.cut(),
                // An overloaded server does not get the same request twice.
                StragglerAction::Hedge
                    if self.concurrency.is_streaming()
                        || self.source.max_concurrent_reads() < usize::MAX => {}
                StragglerAction::Hedge => request.request_hedge(),
            }
        }
    }
}
