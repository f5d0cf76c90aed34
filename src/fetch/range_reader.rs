//! Reads of single ranges, with hedged requests.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::time::{Instant, MissedTickBehavior};

use super::stragglers::{CHECK_INTERVAL, HEDGE_FACTOR, MIN_HEDGE_DELAY};
use crate::base::buffer_pool::{Buffer, BufferPool};
use crate::base::cancel_token::CancelToken;
use crate::base::extent::{Extent, Packed};
use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::source::{Cause, Error, ReadHandle, ReadMode, Source};

const MIN_LATENCY_SAMPLES: usize = 3;
const MAX_LATENCY_SAMPLES: usize = 16;

/// One read in this many may be hedged, plus one.
const READS_PER_HEDGE: u64 = 20;

/// Reads ranges of one source for blocked readers.
/// It hedges a read once if no bytes arrived for half a second and for three times the median latency. It
/// hedges at most one read in twenty, only into spare memory, and never while the server is throttling.
#[derive(Debug)]
pub struct RangeReader {
    handle: Handle,
    source: Arc<dyn Source>,
    hedge_pool: BufferPool,
    latency_stats: Mutex<LatencyStats>,
    stats: Arc<Stats>,
    cancel_token: CancelToken,
}

#[derive(Debug, Default)]
struct LatencyStats {
    latencies: VecDeque<Duration>,
    reads: u64,
    hedges: u64,
}

#[derive(Debug, Default)]
struct StallClock {
    received: u64,
    stalled_for: Duration,
}

impl RangeReader {
    /// Creates a reader of `source`, with memory for hedges from `hedge_pool`, that `cancel_token` ends.
    pub fn new(
        handle: Handle,
        source: Arc<dyn Source>,
        hedge_pool: BufferPool,
        stats: Arc<Stats>,
        cancel_token: CancelToken,
    ) -> Self {
        Self {
            handle,
            source,
            hedge_pool,
            latency_stats: Mutex::default(),
            stats,
            cancel_token,
        }
    }

    /// Ends all reads with an error when it is cancelled, now and later.
    pub fn cancel_token(&self) -> &CancelToken {
        &self.cancel_token
    }

    /// As [`read`](super::read), until it is cancelled.
    ///
    /// # Errors
    /// If the source cannot be read there.
    pub fn read_unhedged(&self, extent: Extent<Packed>, pool: &BufferPool) -> Result<Bytes, Error> {
        let buffer = super::acquire_buffer(&self.source, pool, extent)?;
        self.block_on(self.source.read_at(extent.start(), buffer))
    }

    fn block_on(
        &self,
        reading: impl Future<Output = Result<Bytes, Error>>,
    ) -> Result<Bytes, Error> {
        super::block_on_read(&self.handle, &self.source, async {
            tokio::select! {
                biased;
                () = self.cancel_token.cancelled() => {
                    Err(Error::new(self.source.location(), Cause::Cancelled))
                }
                result = reading => result,
            }
        })
    }

    /// As [`RangeReader::read_unhedged`], with a hedge if the source is remote.
    ///
    /// # Errors
    /// If the source cannot be read there.
    pub fn read(&self, extent: Extent<Packed>, pool: &BufferPool) -> Result<Bytes, Error> {
        if !self.source.is_remote() {
            return self.read_unhedged(extent, pool);
        }
        let buffer = super::acquire_buffer(&self.source, pool, extent)?;
        self.block_on(self.read_hedged(extent.start(), buffer))
    }

    /// Fills `buffer` from a remote source, as [`RangeReader::read`] does, but does not block.
    ///
    /// # Errors
    /// If the source cannot be read there.
    pub async fn read_hedged(&self, start: Packed, buffer: Buffer) -> Result<Bytes, Error> {
        let len = buffer.len();
        self.latency_stats.lock().reads += 1;
        let read_handle = ReadHandle::default();
        let mode = ReadMode::Controlled(&read_handle);
        let first = self.source.read(start, buffer, mode);
        let result = tokio::select! {
            biased;
            result = first => result,
            result = self.send_hedge(start, len, &read_handle) => Ok(result),
        };
        if let (Ok(_), Some(latency)) = (&result, read_handle.latency()) {
            self.latency_stats.lock().record(latency);
        }
        result
    }

    /// Hedges a stalled read. Never returns if that fails, because the first request may still succeed.
    async fn send_hedge(&self, start: Packed, len: usize, read_handle: &ReadHandle) -> Bytes {
        let buffer = loop {
            self.wait_for_stall(read_handle).await;
            if self.source.max_concurrent_reads() == usize::MAX
                && let Some(buffer) = self.hedge_pool.try_acquire(len)
            {
                if self.latency_stats.lock().take_hedge_credit() {
                    break buffer;
                }
                return std::future::pending().await;
            }
        };
        self.stats.source_hedges.increment();
        match self.source.read_at(start, buffer).await {
            Ok(bytes) => bytes,
            Err(error) => {
                tracing::debug!(cause = %error.cause, "the hedged request failed");
                std::future::pending().await
            }
        }
    }

    async fn wait_for_stall(&self, read_handle: &ReadHandle) {
        let mut ticks = tokio::time::interval(CHECK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut stall, mut last_check) = (StallClock::default(), Instant::now());
        loop {
            ticks.tick().await;
            let now = Instant::now();
            stall.update(read_handle.received(), now - last_check);
            last_check = now;
            let limit = self.latency_stats.lock().hedge_delay();
            if limit.is_some_and(|limit| stall.stalled_for >= limit) {
                return;
            }
        }
    }
}

impl StallClock {
    /// Records `received` bytes, `elapsed` after the last check. Only observed time counts.
    fn update(&mut self, received: u64, elapsed: Duration) {
        if received == self.received {
            self.stalled_for += elapsed.min(CHECK_INTERVAL * 2);
        } else {
            *self = Self {
                received,
                stalled_for: Duration::ZERO,
            };
        }
    }
}

impl LatencyStats {
    fn record(&mut self, latency: Duration) {
        self.latencies.truncate(MAX_LATENCY_SAMPLES - 1);
        self.latencies.push_front(latency);
    }

    /// Time without bytes after which a read is hedged; `None` until enough latencies are known.
    fn hedge_delay(&self) -> Option<Duration> {
        if self.latencies.len() < MIN_LATENCY_SAMPLES {
            return None;
        }
        let mut latencies: Vec<Duration> = self.latencies.iter().copied().collect();
        latencies.sort_unstable();
        let median = latencies.get(latencies.len() / 2)?;
        Some((*median * HEDGE_FACTOR).max(MIN_HEDGE_DELAY))
    }

    fn take_hedge_credit(&mut self) -> bool {
        let may = self.hedges * READS_PER_HEDGE <= self.reads;
        self.hedges += u64::from(may);
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn hedge_delay(latencies: &[u64]) -> Option<Duration> {
        let mut latency_stats = LatencyStats::default();
        for &latency in latencies {
            latency_stats.record(ms(latency));
        }
        latency_stats.hedge_delay()
    }

    #[test]
    fn hedge_delay_is_three_times_the_median_latency() {
        assert_eq!(hedge_delay(&[1, 1]), None, "too few to know");
        assert_eq!(hedge_delay(&[1, 1, 1]), Some(MIN_HEDGE_DELAY));
        assert_eq!(hedge_delay(&[2000, 1, 1900]), Some(ms(5700)));
        let mut latencies = vec![5000; 20];
        latencies.extend([400; 16]);
        assert_eq!(
            hedge_delay(&latencies),
            Some(ms(1200)),
            "only the last ones count"
        );
    }

    // Promises: request-slow
    #[test]
    fn at_most_one_read_in_twenty_is_hedged() {
        let mut latency_stats = LatencyStats::default();
        let mut hedges = Vec::new();
        for read in 1..=100 {
            latency_stats.reads = read;
            if latency_stats.take_hedge_credit() {
                hedges.push(read);
            }
        }
        assert_eq!(hedges, [1, 20, 40, 60, 80, 100]);
    }

    #[test]
    fn stall_clock_resets_on_bytes_and_ignores_unobserved_time() {
        let mut stall = StallClock::default();
        stall.update(0, ms(100));
        stall.update(0, ms(60_000));
        assert_eq!(stall.stalled_for, CHECK_INTERVAL * 3);
        stall.update(1, ms(100));
        assert_eq!(stall.stalled_for, Duration::ZERO);
        stall.update(1, ms(50));
        assert_eq!(stall.stalled_for, ms(50));
    }
}
