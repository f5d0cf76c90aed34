//! The driver: requests in flight, in the order in which their bytes are wanted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinError, JoinSet};
use tokio::time::MissedTickBehavior;

use super::appetite::Appetite;
use super::flight::Flight;
use super::laggards::{Laggards, TICK, Verdict};
use super::pace::{Landing, Moment, PATIENCE, Pace};
use super::plan::Plan;
use super::stream::{Coming, Config, Gone};
use crate::base::buffer::{Buffer, Pool};
use crate::base::extent::{Extent, Packed};
use crate::source::{Continuation, Source, Watch};

/// Reads of a local source at once: one, and the next.
const LOCAL_READS: usize = 2;

/// Requests `source` chunk after chunk from `start` to its end.
///
/// Buffers are taken in the order of the chunks, but for the second one of a request that is sent
/// twice, which nobody waits for.
///
/// # Errors
/// When nobody receives any more.
pub(super) async fn drive(
    source: Arc<dyn Source>,
    start: Packed,
    config: Config,
    appetite: &Appetite,
    sender: &mpsc::Sender<Coming>,
) -> Result<(), Gone> {
    let mut driver = Driver::new(source, start, config);
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut has_ended = false;
    while !(has_ended && driver.requests.is_empty()) {
        driver.tell_source();
        let chunk = driver.plan.peek(driver.pace.chunk_len());
        let may_launch = !has_ended && driver.may_launch(appetite);
        let may_grow = driver.pace.may_grow() && appetite.is_waiting();
        let is_watching = driver.is_remote && !driver.requests.is_empty();
        tokio::select! {
            biased;
            () = sender.closed() => return Err(Gone),
            Some(ended) = driver.requests.join_next() => driver.landed(&ended, appetite),
            () = appetite.changes() => driver.look(appetite),
            () = tokio::time::sleep(PATIENCE), if may_grow => driver.look(appetite),
            _ = ticks.tick(), if is_watching => driver.patrol(),
            room = room(sender, &driver.config.pool, chunk), if may_launch => {
                let (place, chunk) = room?;
                has_ended = chunk.is_none();
                if let Some((chunk, _)) = &chunk
                    && !appetite.asks(chunk.end())
                {
                    return Err(Gone);
                }
                place.send(chunk.map_or(Coming::End, |(chunk, buffer)| {
                    driver.launch(chunk, buffer)
                }));
            }
        }
    }
    Ok(())
}

/// A place in the queue, and then a buffer for `chunk`, if there is one.
///
/// # Cancel safety
/// Nothing is taken until the future is ready.
async fn room<'a>(
    sender: &'a mpsc::Sender<Coming>,
    pool: &Pool,
    chunk: Option<Extent<Packed>>,
) -> Result<(mpsc::Permit<'a, Coming>, Option<(Extent<Packed>, Buffer)>), Gone> {
    let place = sender.reserve().await?;
    let Some(chunk) = chunk else {
        return Ok((place, None));
    };
    // Longer than memory is longer than any budget.
    let len = usize::try_from(chunk.len()).map_err(|_| Gone)?;
    Ok((place, Some((chunk, pool.take_async(len).await))))
}

struct Driver {
    source: Arc<dyn Source>,
    config: Config,
    started: Instant,
    is_remote: bool,
    plan: Plan,
    pace: Pace,
    laggards: Laggards,
    continuation: Arc<Continuation>,
    /// Where the last request of a stream ends.
    stream_end: u64,
    /// The number of the stream's first read, while there is one.
    stream_from: Option<u64>,
    /// Whether the source knows that its server is serial.
    has_told: bool,
    /// Those of `requests`, by number.
    flights: BTreeMap<u64, Arc<Flight>>,
    /// Each returns its number, and how many bytes came unless it failed.
    requests: JoinSet<(u64, Option<u64>)>,
    launched: u64,
    asked_bytes: u64,
    landed_bytes: u64,
}

impl Driver {
    fn new(source: Arc<dyn Source>, start: Packed, config: Config) -> Self {
        let is_remote = source.is_remote();
        let connections = if is_remote {
            config.connections
        } else {
            config.connections.min(LOCAL_READS)
        };
        let end = Packed(source.fingerprint().len.unwrap_or(u64::MAX));
        Self {
            started: Instant::now(),
            is_remote,
            plan: Plan::new(start, end),
            pace: Pace::new(
                connections,
                config.chunk_len,
                config.pool.budget(),
                source.answer_cost(),
            ),
            laggards: Laggards::new(config.min_speed),
            continuation: Arc::default(),
            stream_end: 0,
            stream_from: None,
            has_told: false,
            flights: BTreeMap::new(),
            requests: JoinSet::new(),
            launched: 0,
            asked_bytes: 0,
            landed_bytes: 0,
            source,
            config,
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Whether another request is wanted now.
    fn may_launch(&self, appetite: &Appetite) -> bool {
        let (read, _) = appetite.sums();
        let most = self.pace.requests().min(self.source.bearable_reads());
        // A stream begins beside what is under way, which may take as long as the stream.
        let in_flight = match self.stream_from {
            Some(first) if self.source.bearable_reads() > 1 => self.flights.range(first..).count(),
            _ => self.requests.len(),
        };
        in_flight < most && self.asked_bytes.saturating_sub(read) < self.pace.ahead()
    }

    fn launch(&mut self, chunk: Extent<Packed>, buffer: Buffer) -> Coming {
        let number = self.launched;
        self.launched += 1;
        self.plan.pass(chunk);
        self.asked_bytes += chunk.len();
        self.laggards.launched(number, self.now());
        let watch = self.watch(chunk);
        self.pace.launched();
        let flight = Arc::new(Flight::new(chunk, watch));
        self.flights.insert(number, Arc::clone(&flight));
        let (done, landing) = oneshot::channel();
        let source = Arc::clone(&self.source);
        let (pool, stats) = (self.config.pool.clone(), Arc::clone(&self.config.stats));
        self.requests.spawn(async move {
            let landed = flight.land(source.as_ref(), buffer, &pool, &stats).await;
            let len = landed.as_ref().ok().map(super::flight::Landed::len);
            // Nobody receives any more: then nobody misses it.
            drop(done.send(landed));
            (number, len)
        });
        let in_flight = self.requests.len() as u64;
        self.config.stats.source_peak_requests.raise(in_flight);
        Coming::Chunk {
            len: chunk.len(),
            landing,
        }
    }

    /// Tells the source when its server turns out to be serial, because other reads learn it too late.
    fn tell_source(&mut self) {
        if self.pace.is_surely_serial() && self.plan.is_done() && !self.has_told {
            self.has_told = true;
            self.source.limit_reads();
        }
    }

    /// A watch over the read of `chunk`. Where one request after the other is sent, each one asks for more
    /// than the one before, up to all the rest.
    fn watch(&mut self, chunk: Extent<Packed>) -> Watch {
        let watch = Watch::ahead(self.config.persistence.clone());
        let is_alone = self.pace.is_single() || self.source.bearable_reads() == 1;
        // Also for a chunk across the end of the stream before: the rest of it is asked for with more.
        if is_alone && chunk.end().0 > self.stream_end {
            self.stream_end = chunk.end().0.saturating_add(self.pace.stream_len());
            self.pace.began_stream();
        }
        let len = self.source.fingerprint().len;
        let end = len.map_or(0, |len| len.min(self.stream_end));
        let beyond = end.saturating_sub(chunk.end().0);
        // Also where nothing more is to be asked for: what is kept may be what this one wants.
        let beyond = if is_alone { beyond } else { 0 };
        watch.followed_by(beyond, Arc::clone(&self.continuation))
    }

    fn landed(&mut self, ended: &Result<(u64, Option<u64>), JoinError>, appetite: &Appetite) {
        // One that panicked has said so, and its reader finds it gone.
        let Ok((number, len)) = *ended else {
            return;
        };
        let Some(flight) = self.flights.remove(&number) else {
            return;
        };
        let took = flight.began().elapsed();
        self.laggards.landed(number, len.map(|len| (len, took)));
        let Some(len) = len else {
            return;
        };
        self.landed_bytes += len;
        if len < flight.extent().len() {
            self.plan.end();
        }
        let landing = Landing {
            start: flight.extent().start().0,
            len,
            took,
            latency: flight.watch().latency(),
            cost: flight.watch().cost(),
        };
        self.pace.landed(self.moment(appetite), landing);
        self.look(appetite);
        let first = self.stream_from.unwrap_or(self.launched);
        self.stream_from = self.pace.is_single().then_some(first);
    }

    /// Looks whether the reader starves.
    fn look(&mut self, appetite: &Appetite) {
        self.pace.look(self.moment(appetite));
    }

    fn moment(&self, appetite: &Appetite) -> Moment {
        let coming = self
            .flights
            .values()
            .map(|flight| flight.watch().received());
        let (read, waited) = appetite.sums();
        Moment {
            now: self.now(),
            received: self.landed_bytes + coming.sum::<u64>(),
            read,
            waited,
            in_flight: self.requests.len(),
            is_cheap: self.flights.values().all(|flight| flight.is_cheap()),
        }
    }

    /// Looks for requests that have fallen behind.
    fn patrol(&mut self) {
        let flights = &self.flights;
        let received = |number| {
            let flight = flights.get(&number);
            flight.map_or(0, |flight| flight.watch().received())
        };
        // Where nobody knows the end, nobody knows that nothing is left to ask for.
        let is_all_asked = self.plan.is_done() && self.source.fingerprint().len.is_some();
        for (number, verdict) in self.laggards.look(self.now(), received, is_all_asked) {
            let Some(flight) = self.flights.get(&number) else {
                continue;
            };
            tracing::debug!(number, ?verdict, "a request has fallen behind");
            // Where answers wait for each other, another request would only wait again.
            let is_waiting = flight.watch().received() == 0;
            let is_serial = self.pace.is_serial() || self.pace.is_crowded();
            match verdict {
                _ if is_waiting && is_serial => {}
                Verdict::Cut => flight.watch().cut(),
                // A server that has too much to do is not given the same to do twice.
                Verdict::Hedge
                    if self.pace.is_single() || self.source.bearable_reads() < usize::MAX => {}
                Verdict::Hedge => flight.hedge(),
            }
        }
    }
}
