//! Several URLs of the same bytes as one source.
//!
//! Each read goes to the mirror that will probably finish it first, and continues at another one if that
//! fails or is slow. SOURCE itself is the first mirror. It identifies the source, and the others are compared
//! with it before they are used.

mod load;
mod open;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

use self::load::{MirrorLoad, Progress};
use super::{Error, Http, ReadHandle, Source, SourceInfo};
use crate::base::buffer_pool::Buffer;
use crate::base::extent::Packed;
use crate::base::stats::Stats;
use crate::base::sync::Mutex;

pub(super) use open::{in_order, open};

/// Interval at which the progress of a read is checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

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
    stats: Arc<Stats>,
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
    fn mirrors(&self) -> Vec<Arc<Mirror>> {
        self.list.lock().clone()
    }

    /// Whether another mirror than this one can be used.
    fn has_others(&self, number: usize) -> bool {
        let (loads, now) = (loads(&self.mirrors()), Instant::now());
        let mut usable = (0..).zip(loads).filter(|(_, load)| load.is_usable(now));
        usable.any(|(other, _)| other != number)
    }

    fn choose(&self, loads: &[MirrorLoad], left: u64, now: Instant) -> usize {
        let mut usable = loads.iter().map(|load| load.is_usable(now));
        let first_usable = usable.position(|is_usable| is_usable && self.is_ordered);
        first_usable.unwrap_or_else(|| load::choose(loads, left, now))
    }

    async fn fill_buffer(
        &self,
        offset: u64,
        buffer: &mut Buffer,
        read_handle: &ReadHandle,
    ) -> Result<(), Error> {
        let mut state = self.first.http.start_fill(offset, buffer, read_handle)?;
        let mut may_switch = !self.is_ordered;
        while state.filled < buffer.len() {
            let (mirrors, started) = (self.mirrors(), Instant::now());
            let (loads, before) = (loads(&mirrors), state.filled);
            let left = (buffer.len() - before) as u64;
            let number = self.choose(&loads, left, started);
            let Some(mirror) = mirrors.get(number) else {
                break;
            };
            let has_others = self.has_others(number);
            let _read = Arc::clone(&mirror.reads);
            let (http, fill) = (&mirror.http, &mut state);
            let filling = http.continue_fill(offset, buffer, fill, read_handle, has_others);
            let end = tokio::select! {
                biased;
                filled = filling => filled.map(|()| true),
                // Only once, because this machine may be the slow one.
                () = self.wait_for_better(number, read_handle, left), if may_switch => Ok(false),
            };
            // A cut of the dropped request must not end the next one.
            let was_in_flight = read_handle.is_in_flight();
            read_handle.set_in_flight(false);
            let (mut load, now) = (mirror.load.lock(), Instant::now());
            match end {
                Ok(true) => {
                    let came = state.filled.saturating_sub(before) as u64;
                    let latency = read_handle.latency();
                    load.record_success(started);
                    load.record_speed(came, now - started, latency, mirror.in_flight());
                    continue;
                }
                Ok(false) => {
                    may_switch = false;
                    // A read that waits for its turn is no failure.
                    if was_in_flight {
                        load.record_failure(now, false);
                    }
                }
                Err(error) => {
                    load.record_failure(now, !error.cause.is_transient());
                    drop(load);
                    if !self.has_others(number) {
                        return Err(error);
                    }
                    tracing::debug!(cause = %error.cause, "{error}");
                }
            }
            self.stats.source_mirror_switches.increment();
        }
        Ok(())
    }

    /// Waits until a read of `left` bytes at the mirror `number` should continue at another one. Cancel safe.
    async fn wait_for_better(&self, number: usize, read_handle: &ReadHandle, left: u64) {
        let before = read_handle.received();
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
            let mirrors = self.mirrors();
            if let Some(mirror) = mirrors.get(number) {
                let in_flight = mirror.in_flight();
                mirror.load.lock().record_progress(&progress, in_flight);
            }
            let (loads, left) = (loads(&mirrors), left.saturating_sub(received));
            if progress.should_switch(&loads, number, left, now) {
                return;
            }
        }
    }
}

impl Source for Mirrors {
    fn info(&self) -> &SourceInfo {
        &self.info
    }

    fn read_at(&self, offset: Packed, buffer: Buffer) -> BoxFuture<'_, Result<Bytes, Error>> {
        async move {
            let read_handle = ReadHandle::default();
            self.read_with_handle(offset, buffer, &read_handle).await
        }
        .boxed()
    }

    fn read_with_handle<'a>(
        &'a self,
        offset: Packed,
        mut buffer: Buffer,
        read_handle: &'a ReadHandle,
    ) -> BoxFuture<'a, Result<Bytes, Error>> {
        async move {
            self.fill_buffer(offset.0, &mut buffer, read_handle).await?;
            Ok(buffer.freeze())
        }
        .boxed()
    }

    fn read_uncached(&self, offset: Packed, buffer: Buffer) -> BoxFuture<'_, Result<Bytes, Error>> {
        // One of the others may have sent wrong bytes.
        for mirror in self.mirrors().iter().skip(1) {
            mirror.load.lock().record_failure(Instant::now(), true);
        }
        self.first.http.read_uncached(offset, buffer)
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
