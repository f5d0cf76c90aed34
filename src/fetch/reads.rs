//! Reads of single ranges for those who wait for them, and a second request for one that straggles.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::time::{Instant, MissedTickBehavior};

use super::laggards::{HEDGE_AFTER, LONGER, TICK};
use crate::base::buffer::Pool;
use crate::base::extent::{Extent, Packed};
use crate::base::stats::Stats;
use crate::source::{Error, Source, Watch};

/// Answers of which the time is known, at the least and at the most.
const FEWEST_ANSWERS: usize = 3;
const MOST_ANSWERS: usize = 16;

/// One read in so many may be sent twice, and one more.
const READS_PER_HEDGE: u64 = 20;

/// Reads ranges of one source on behalf of those who wait.
///
/// A read from which nothing has come for three times as long as answers take (the median of the
/// last ones), and half a second, is sent a second time beside the first, once; what comes first
/// counts. That is done for one read in twenty at the most, never while the source's server complains,
/// and only into memory that is to spare.
#[derive(Debug)]
pub struct Reads {
    handle: Handle,
    source: Arc<dyn Source>,
    /// For second requests.
    spare: Pool,
    habits: Mutex<Habits>,
    stats: Arc<Stats>,
}

/// How long the source takes to answer, and how often it was not waited for; pure.
#[derive(Debug, Default)]
struct Habits {
    latencies: VecDeque<Duration>,
    reads: u64,
    hedges: u64,
}

/// How long nothing has come; pure.
#[derive(Debug, Default)]
struct Silence {
    received: u64,
    lasts: Duration,
}

impl Reads {
    /// For reads of `source`, with memory for second requests from `spare`.
    pub fn new(handle: Handle, source: Arc<dyn Source>, spare: Pool, stats: Arc<Stats>) -> Self {
        Self {
            handle,
            source,
            spare,
            habits: Mutex::default(),
            stats,
        }
    }

    /// As [`read`](super::read).
    ///
    /// # Errors
    /// When the source cannot be read there.
    pub fn read(&self, extent: Extent<Packed>, pool: &Pool) -> Result<Bytes, Error> {
        let len = super::whole_len(&self.source, extent)?;
        let buffer = super::take(&self.source, pool, len)?;
        if !self.source.is_remote() {
            let reading = self.source.read_at(extent.start(), buffer);
            return super::wait(&self.handle, &self.source, reading);
        }
        self.habits().reads += 1;
        let watch = Watch::default();
        let first = self.source.read_watched(extent.start(), buffer, &watch);
        let landed = super::wait(&self.handle, &self.source, async {
            tokio::select! {
                biased;
                landed = first => landed,
                landed = self.second(extent.start(), len, &watch) => Ok(landed),
            }
        });
        if let (Ok(_), Some(latency)) = (&landed, watch.latency()) {
            self.habits().answered(latency);
        }
        landed
    }

    /// Waits until the read straggles, and asks for the same. Never returns if that fails, or cannot
    /// be done: the first request may still succeed.
    async fn second(&self, start: Packed, len: usize, watch: &Watch) -> Bytes {
        let buffer = loop {
            self.silence(watch).await;
            if self.source.bearable_reads() == usize::MAX
                && let Some(buffer) = self.spare.try_take(len)
            {
                if self.habits().may_hedge() {
                    break buffer;
                }
                return std::future::pending().await;
            }
        };
        self.stats.source_hedges.increment();
        match self.source.read_at(start, buffer).await {
            Ok(bytes) => bytes,
            Err(error) => {
                tracing::debug!(cause = %error.cause, "the second request failed");
                std::future::pending().await
            }
        }
    }

    /// Waits until nothing has come for too long.
    async fn silence(&self, watch: &Watch) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut silence, mut looked) = (Silence::default(), Instant::now());
        loop {
            ticks.tick().await;
            let now = Instant::now();
            silence.look(watch.received(), now - looked);
            looked = now;
            let limit = self.habits().limit();
            if limit.is_some_and(|limit| silence.lasts >= limit) {
                return;
            }
        }
    }

    fn habits(&self) -> MutexGuard<'_, Habits> {
        self.habits.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Silence {
    /// So many bytes are there, `passed` after it was looked at last. Only time counts in which
    /// someone looked.
    fn look(&mut self, received: u64, passed: Duration) {
        if received == self.received {
            self.lasts += passed.min(TICK * 2);
        } else {
            *self = Self {
                received,
                lasts: Duration::ZERO,
            };
        }
    }
}

impl Habits {
    fn answered(&mut self, latency: Duration) {
        self.latencies.truncate(MOST_ANSWERS - 1);
        self.latencies.push_front(latency);
    }

    /// How long nothing may come; `None` while too little is known.
    fn limit(&self) -> Option<Duration> {
        if self.latencies.len() < FEWEST_ANSWERS {
            return None;
        }
        let mut latencies: Vec<Duration> = self.latencies.iter().copied().collect();
        latencies.sort_unstable();
        let median = latencies.get(latencies.len() / 2)?;
        Some((*median * LONGER).max(HEDGE_AFTER))
    }

    /// Counts a second request, if there may be one.
    fn may_hedge(&mut self) -> bool {
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

    fn limit(latencies: &[u64]) -> Option<Duration> {
        let mut habits = Habits::default();
        for &latency in latencies {
            habits.answered(ms(latency));
        }
        habits.limit()
    }

    #[test]
    fn a_server_that_thinks_for_long_is_given_three_times_as_long() {
        assert_eq!(limit(&[1, 1]), None, "too few to know");
        assert_eq!(limit(&[1, 1, 1]), Some(HEDGE_AFTER));
        assert_eq!(limit(&[2000, 1, 1900]), Some(ms(5700)));
        let mut latencies = vec![5000; 20];
        latencies.extend([400; 16]);
        assert_eq!(
            limit(&latencies),
            Some(ms(1200)),
            "only the last ones count"
        );
    }

    #[test]
    fn one_read_in_twenty_is_sent_twice_at_the_most() {
        let mut habits = Habits::default();
        let mut hedges = Vec::new();
        for read in 1..=100 {
            habits.reads = read;
            if habits.may_hedge() {
                hedges.push(read);
            }
        }
        assert_eq!(hedges, [1, 20, 40, 60, 80, 100]);
    }

    #[test]
    fn bytes_break_a_silence_and_time_in_which_nobody_looked_does_not_count() {
        let mut silence = Silence::default();
        silence.look(0, ms(100));
        silence.look(0, ms(60_000));
        assert_eq!(silence.lasts, TICK * 3);
        silence.look(1, ms(100));
        assert_eq!(silence.lasts, Duration::ZERO);
        silence.look(1, ms(50));
        assert_eq!(silence.lasts, ms(50));
    }
}
