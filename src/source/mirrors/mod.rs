//! Several URLs of the same bytes as one source.
//!
//! Each read goes to the mirror that will probably finish it first, and continues at another one if that
//! fails or is slow. SOURCE itself is the first mirror. It identifies the source, and the others are compared
//! with it before they are used.

mod first_success;
mod load;
mod open;
mod senders;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::FutureExt;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

use self::load::{MirrorLoad, Progress};
use self::senders::Senders;
use super::http::fill::{Outcome, ReadHistory, Servers, fill_buffer};
use super::retry::{LONG_BLOCK, min_block};
use super::{Cause, Error, Http, IsIntact, ReadHandle, ReadMode, Reading, Source, SourceInfo};
use crate::base::buffer_pool::{Buffer, BufferPool};
use crate::base::extent::Packed;
use crate::base::sync::Mutex;

pub(super) use first_success::first_success;
pub use open::{UnopenedMirror, in_order, open};

/// Interval at which the progress of a read is checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Time without an answer after which the next server is asked, too, if they are asked in order.
pub(super) const HEAD_START: Duration = Duration::from_secs(2);

/// Ratio of the times without bytes after which a read abandons the same mirror again.
const ABANDON_FACTOR: u32 = 4;

/// Several URLs of the same bytes.
#[derive(Debug)]
pub(crate) struct Mirrors {
    info: SourceInfo,
    /// It identifies the source; SOURCE itself unless that could not be opened.
    first: Arc<Mirror>,
    /// All mirrors, of which it is the first.
    list: MirrorList,
    /// Whether each is asked only while those before it fail.
    is_ordered: bool,
    /// Which mirrors sent the last bytes.
    senders: Mutex<Senders>,
    /// Opens the other mirrors; aborted when dropped.
    _opening: JoinSet<()>,
}

/// Open mirrors with the same bytes. Others are added at the end.
type MirrorList = Arc<Mutex<Vec<Arc<Mirror>>>>;

#[derive(Debug)]
struct Mirror {
    http: Http,
    load: Mutex<MirrorLoad>,
    /// Each read in flight has a clone.
    reads: Arc<()>,
}

pub(in crate::source) struct ReadingMirror {
    number: usize,
    mirror: Arc<Mirror>,
    _read: Arc<()>,
}

impl AsRef<Http> for ReadingMirror {
    fn as_ref(&self) -> &Http {
        &self.mirror.http
    }
}

impl Mirror {
    fn new(http: Http) -> Arc<Self> {
        let load = MirrorLoad::new(http.response_cost().unwrap_or_default());
        Arc::new(Self {
            http,
            load: Mutex::new(load),
            reads: Arc::default(),
        })
    }

    fn in_flight(&self) -> u32 {
        let reads = Arc::strong_count(&self.reads).saturating_sub(1);
        u32::try_from(reads).unwrap_or(u32::MAX)
    }

    fn load(&self) -> MirrorLoad {
        let mut load = self.load.lock().clone();
        load.in_flight = self.in_flight();
        load
    }
}

fn loads(mirrors: &[Arc<Mirror>]) -> Vec<MirrorLoad> {
    mirrors.iter().map(|mirror| mirror.load()).collect()
}

impl Mirrors {
    fn new(
        info: SourceInfo,
        first: Arc<Mirror>,
        list: MirrorList,
        is_ordered: bool,
        opening: JoinSet<()>,
    ) -> Arc<Self> {
        Arc::new(Self {
            info,
            first,
            list,
            is_ordered,
            senders: Mutex::default(),
            _opening: opening,
        })
    }

    fn mirrors(&self) -> Vec<Arc<Mirror>> {
        self.list.lock().clone()
    }

    /// Reads `len` bytes past all caches, from the first mirror whose bytes are intact. Blocks those that sent other
    /// ones. If none has intact bytes, returns others.
    async fn read_intact(
        &self,
        offset: Packed,
        len: usize,
        is_intact: IsIntact<'_>,
    ) -> Result<Bytes, Error> {
        let (mirrors, now) = (self.mirrors(), Instant::now());
        let range = offset.0..offset.0.saturating_add(len as u64);
        let senders = Mutex::new(self.senders.lock().of(&range));
        let mut order: Vec<usize> = (0..mirrors.len()).collect();
        order.sort_by_cached_key(|number| {
            let is_suspect = senders.lock().contains(number);
            let is_usable = mirrors.get(*number).map(|one| one.load().is_usable(now));
            (is_suspect, is_usable != Some(true))
        });
        let pool = BufferPool::new((len as u64).saturating_mul(mirrors.len() as u64));
        let mut attempts = Vec::new();
        for &number in &order {
            let (pool, senders) = (&pool, &senders);
            let Some(mirror) = mirrors.get(number) else {
                continue;
            };
            attempts.push(async move {
                let buffer = pool.acquire_async(len).await;
                let reading = mirror
                    .http
                    .read(offset, buffer, ReadMode::Uncached(is_intact));
                let bytes = reading.await.map_err(Err)?;
                if is_intact(&bytes) {
                    return Ok(bytes);
                }
                senders.lock().push(number);
                Err(Ok(bytes))
            });
        }
        match first_success(attempts, HEAD_START).await {
            Ok((place, bytes)) => {
                let right = order.get(place);
                let senders = senders.lock();
                for number in senders.iter().filter(|&number| Some(number) != right) {
                    if let Some(mirror) = mirrors.get(*number) {
                        let mut load = mirror.load.lock();
                        load.record_failure(Instant::now(), LONG_BLOCK);
                    }
                }
                Ok(bytes)
            }
            Err(results) => {
                let (wrong, mut errors): (Vec<_>, Vec<_>) =
                    results.into_iter().partition(Result::is_ok);
                let last = wrong.into_iter().next().or_else(|| errors.pop());
                last.unwrap_or_else(|| Err(Error::new(self.location(), Cause::silent_server())))
            }
        }
    }
}

impl Servers for Mirrors {
    type Server = ReadingMirror;

    fn first(&self) -> &Http {
        &self.first.http
    }

    fn choose(&self, history: &ReadHistory, left: u64) -> Option<ReadingMirror> {
        let (mirrors, now) = (self.mirrors(), Instant::now());
        let mut loads = loads(&mirrors);
        for &failed in &history.failed {
            loads.get_mut(failed)?.is_excluded = true;
        }
        let has_usable = loads.iter().any(|load| load.is_usable(now));
        // Those that failed in earlier reads are asked if all others have failed twice.
        if !has_usable && !history.failed.is_empty() && !history.has_paused {
            return None;
        }
        let mut usable = loads.iter().map(|load| load.is_usable(now));
        let first_usable = usable.position(|is_usable| is_usable && self.is_ordered);
        let number = first_usable.or_else(|| load::choose(&loads, left, now))?;
        let mirror = mirrors.get(number).map(Arc::clone)?;
        Some(ReadingMirror {
            number,
            _read: Arc::clone(&mirror.reads),
            mirror,
        })
    }

    async fn wait_for_better(
        &self,
        current: &ReadingMirror,
        history: &ReadHistory,
        read_handle: &ReadHandle,
        left: u64,
    ) {
        let number = current.number;
        let before = read_handle.received();
        let abandoned = history.abandoned.iter().filter(|&&one| one == number);
        let times = u32::try_from(abandoned.count()).unwrap_or(u32::MAX);
        let (mut progress, mut last_check) = (Progress::default(), Instant::now());
        let mut ticks = tokio::time::interval(CHECK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let now = Instant::now();
            let elapsed = (now - last_check).min(CHECK_INTERVAL * 2);
            last_check = now;
            let received = read_handle.received().saturating_sub(before);
            progress.update(received, elapsed);
            let (mirror, in_flight) = (&current.mirror, current.mirror.in_flight());
            mirror.load.lock().record_progress(&progress, in_flight);
            let mut loads = loads(&self.mirrors());
            for other in history.failed.iter().chain([&number]) {
                if let Some(load) = loads.get_mut(*other) {
                    load.is_excluded = true;
                }
            }
            let share = u32::try_from(4 * loads.len()).unwrap_or(u32::MAX).max(1);
            let has_other = loads.iter().any(|load| load.is_usable(now));
            let shortest = if self.is_ordered {
                HEAD_START
            } else {
                Duration::ZERO
            };
            let usual = mirror.load.lock().max_silence().max(shortest);
            // If no other is known to work, this one has more time.
            let factor = if has_other { 1 } else { ABANDON_FACTOR };
            let share = mirror.http.timeout() / share;
            let limit = usual.saturating_mul(factor).min(share);
            let times = ABANDON_FACTOR.saturating_pow(times);
            if loads.len() > 1 && progress.silent >= limit.saturating_mul(times) {
                return;
            }
            let left = left.saturating_sub(received);
            // Only once, because this machine may be the slow one.
            let may_be_outpaced = !self.is_ordered && history.abandoned.is_empty();
            if may_be_outpaced && progress.is_outpaced(&loads, left, now) {
                return;
            }
        }
    }

    fn record(
        &self,
        server: &ReadingMirror,
        history: &mut ReadHistory,
        started: Instant,
        outcome: Outcome<'_>,
    ) {
        let (number, mirror, now) = (server.number, &server.mirror, Instant::now());
        let mut load = mirror.load.lock();
        match outcome {
            Outcome::Received {
                start,
                end,
                read_handle,
            } => {
                load.record_success(started);
                let latency = read_handle.latency();
                load.record_speed(end - start, now - started, latency, mirror.in_flight());
                self.senders.lock().add(start..end, number);
            }
            Outcome::Abandoned { was_in_flight } => {
                history.failed.push(number);
                history.abandoned.push(number);
                // A read that waits for its turn is no failure.
                if was_in_flight {
                    load.record_failure(now, Duration::ZERO);
                }
            }
            Outcome::Failed(failure) => {
                history.failed.push(number);
                load.record_failure(now, min_block(&failure.cause, failure.retry_after));
            }
        }
    }
}

impl Source for Mirrors {
    fn info(&self) -> &SourceInfo {
        &self.info
    }

    fn read<'a>(&'a self, offset: Packed, mut buffer: Buffer, mode: ReadMode<'a>) -> Reading<'a> {
        async move {
            let read_handle = match mode {
                ReadMode::Uncached(is_intact) => {
                    let len = buffer.len();
                    drop(buffer);
                    return self.read_intact(offset, len, is_intact).await;
                }
                ReadMode::Controlled(read_handle) => read_handle,
                ReadMode::Whole => &ReadHandle::default(),
            };
            fill_buffer(self, offset.0, &mut buffer, read_handle).await?;
            Ok(buffer.freeze())
        }
        .boxed()
    }

    fn max_concurrent_reads(&self) -> usize {
        let mirrors = self.mirrors().into_iter();
        let limits = mirrors.map(|mirror| mirror.http.max_concurrent_reads());
        limits.fold(0, usize::saturating_add)
    }

    fn limit_to_one_read(&self) {
        for mirror in self.mirrors() {
            mirror.http.limit_to_one_read();
        }
    }

    fn response_cost(&self) -> Option<Duration> {
        self.first.http.response_cost()
    }

    fn outage(&self) -> Option<&'static str> {
        let mut mirrors = self.mirrors().into_iter();
        let outage = self.first.http.outage();
        outage.filter(|_| mirrors.all(|mirror| mirror.http.outage().is_some()))
    }

    fn is_remote(&self) -> bool {
        true
    }
}
