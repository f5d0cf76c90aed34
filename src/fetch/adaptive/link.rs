//! Speed and round trips of the link, measured by its chunks.

use std::collections::VecDeque;
use std::time::Duration;

use crate::fetch::per_second;

/// Minimum chunk length in bytes that the link's speed determines.
const MIN_LINK_CHUNK_LEN: u64 = 1 << 20;

/// Round trips that a chunk's transfer should take. The pause before it then wastes a ninth of the time.
const TRANSFER_ROUND_TRIPS: u32 = 8;

/// Minimum transfer time of a chunk. Longer chunks mean cheaper requests, but the reader waits for them.
const MIN_TRANSFER_TIME: Duration = Duration::from_millis(50);

pub(super) const MAX_SPEED_SAMPLES: usize = 8;

/// Cost from which answers count as crowded: a multiple of the cheapest answer's cost, and a minimum.
pub(super) const CROWDED_FACTOR: u32 = 4;

pub(super) const MIN_CROWDED_COST: Duration = Duration::from_millis(20);

pub(crate) const CHEAP_FACTOR: u32 = 4;

/// Divisor for the pairs of answers that may contradict rising costs: at most one in eight.
const FALLING_PAIR_DIVISOR: usize = 8;

#[derive(Clone, Copy, Debug)]
pub(crate) struct CompletedChunk {
    pub(crate) start: u64,
    pub(crate) len: u64,
    /// Time from the request to the last byte.
    pub(crate) duration: Duration,
    /// Time from the request to the start of the answer; `None` if no request was sent.
    pub(crate) latency: Option<Duration>,
    /// The part of the latency that is not network time.
    pub(crate) cost: Option<Duration>,
}

#[derive(Debug, Default)]
pub(super) struct Link {
    /// Lowest latency.
    pub(super) latency: Option<Duration>,
    pub(super) min_cost: Option<Duration>,
    /// Speeds of the last requests, newest first.
    pub(super) speeds: VecDeque<SpeedSample>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct SpeedSample {
    pub(super) start: u64,
    /// Bytes per second, counted from the request.
    pub(super) whole: u64,
    /// Bytes per second, counted from the start of the answer.
    pub(super) content: u64,
    /// Cost of the answer, and transfer time after it.
    pub(super) cost: Duration,
    pub(super) transfer: Duration,
}

impl Link {
    pub(super) fn on_completed(&mut self, chunk: CompletedChunk) {
        let Some(latency) = chunk.latency else {
            return;
        };
        self.latency = Some(self.latency.map_or(latency, |known| known.min(latency)));
        let cost = chunk.cost.unwrap_or_default();
        self.min_cost = Some(self.min_cost.map_or(cost, |known| known.min(cost)));
        self.speeds.truncate(MAX_SPEED_SAMPLES - 1);
        let transfer = chunk.duration.saturating_sub(latency);
        self.speeds.push_front(SpeedSample {
            start: chunk.start,
            whole: per_second(chunk.len, chunk.duration),
            content: per_second(chunk.len, transfer),
            cost,
            transfer,
        });
    }

    pub(super) fn median<T: Ord + Copy>(&self, measure: impl Fn(&SpeedSample) -> T) -> Option<T> {
        let mut speeds: Vec<T> = self.speeds.iter().map(measure).collect();
        speeds.sort_unstable_by(|one, other| other.cmp(one));
        speeds.get(speeds.len() / 2).copied()
    }

    /// Whether costs of at least `answers` answers rise with their offsets: at least half of the pairs rise,
    /// and at most one in eight falls. Differences up to an eighth of the highest cost count as noise.
    pub(super) fn is_rising(&self, answers: usize) -> bool {
        let mut costs: Vec<_> = self
            .speeds
            .iter()
            .map(|sample| (sample.start, sample.cost))
            .collect();
        costs.sort_unstable();
        let highest = costs.iter().map(|&(_, cost)| cost).max();
        let noise = highest.unwrap_or_default() / 8;
        let (mut pairs, mut rises, mut falls) = (0, 0, 0);
        for (index, &(_, cost)) in costs.iter().enumerate() {
            for &(_, other) in costs.iter().skip(index + 1) {
                pairs += 1;
                rises += usize::from(other > cost + noise);
                falls += usize::from(other + noise < cost);
            }
        }
        costs.len() >= answers && rises * 2 >= pairs && falls * FALLING_PAIR_DIVISOR <= pairs
    }

    pub(super) fn is_cheap(&self) -> bool {
        let mut speeds = self.speeds.iter();
        speeds.all(|speed| speed.cost * CHEAP_FACTOR <= speed.transfer)
    }

    pub(super) fn is_last_costly(&self) -> bool {
        let (Some(last), Some(least)) = (self.speeds.front(), self.min_cost) else {
            return false;
        };
        last.cost
            >= MIN_CROWDED_COST
                .max(least * CROWDED_FACTOR)
                .max(last.transfer)
    }

    pub(super) fn chunk_len(&self) -> Option<u64> {
        let rate = self.median(|speed| speed.content)?;
        let transfer = (self.latency? * TRANSFER_ROUND_TRIPS).max(MIN_TRANSFER_TIME);
        let bytes = u128::from(rate) * transfer.as_micros() / 1_000_000;
        let shorts = u64::try_from(bytes).unwrap_or(u64::MAX) / MIN_LINK_CHUNK_LEN;
        Some(MIN_LINK_CHUNK_LEN << shorts.max(1).ilog2())
    }
}
