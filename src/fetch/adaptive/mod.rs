//! Adaptive number of concurrent requests and chunk length; pure.

mod link;

use self::link::{CROWDED_FACTOR, Link, MAX_SPEED_SAMPLES, MIN_CROWDED_COST};

pub(crate) use self::link::{CHEAP_FACTOR, CompletedChunk};

use std::time::Duration;

use crate::fetch::per_second;

/// Initial and minimum number of requests in flight. On loopback no number is faster.
const INITIAL_REQUESTS: usize = 4;

/// Length of the first chunk in bytes, short so that decoding starts early.
const INITIAL_CHUNK_LEN: u64 = 256 << 10;

/// Minimum chunk length in bytes that a small budget determines.
const MIN_BUDGET_CHUNK_LEN: u64 = 64 << 10;

/// Chunks of the budget that are not in flight: the one being read, and the next.
const SPARE_CHUNKS: u64 = 2;

/// Minimum waiting time of the reader before requests are added. It is longer than a hiccup, and short
/// enough to reach sixteen requests within one round trip of 40 ms.
pub(super) const MIN_STARVING_TIME: Duration = Duration::from_millis(5);

/// Window for the share of waiting time, and length of the startup phase.
const AVERAGING_WINDOW: Duration = Duration::from_millis(100);

/// Speed in bytes per second that counts as fast while the reader's speed is unknown.
const FAST_BYTES_PER_SECOND: u64 = 500_000_000;

/// Factor by which the requests' speed should exceed the reader's: three to two.
const HEADROOM: (u64, u64) = (3, 2);

/// Fetch-ahead in multiples of the bytes that may be in flight, to bridge a hiccup within the CPU caches.
const FETCH_AHEAD_FACTOR: u64 = 3;

/// Minimum length of a round, because shorter ones measure noise.
const MIN_ROUND_TIME: Duration = Duration::from_millis(100);

/// Requests that test whether the server is serial.
const PROBE_REQUESTS: usize = 2;

/// Latency from which an answer is slow, and may cost the server more than its bytes.
const SLOW_RESPONSE: Duration = Duration::from_millis(100);

/// Multiple of its chunk's transfer time from which a slow answer is costly.
const COSTLY_FACTOR: u32 = 2;

/// Chunks of a round in which one response is streamed.
const STREAM_ROUND_CHUNKS: usize = 16;

/// Minimum length of such a round, as a multiple of the answer's cost.
const STREAM_ROUND_FACTOR: u32 = 4;

/// Maximum bytes of the first streamed request; each later one asks for four times as many, so that a proxy
/// that stores a whole range first does not get all. If costs rise with offsets, one asks for all the rest.
const INITIAL_STREAM_LEN: u64 = 1 << 30;
const STREAM_GROWTH: u64 = 4;
/// Cheap answers that justify doubling the requests. Each may cost at most a quarter of its transfer time.
const MIN_CHEAP_RESPONSES: usize = 2;
/// Answers needed to detect costs that rise with offsets. One fewer suffices to delay a doubling.
const MIN_RISING_SAMPLES: usize = 5;

/// Rounds before the first trial, and after a successful one.
const MIN_TRIAL_PAUSE: u32 = 8;

const MAX_TRIAL_PAUSE: u32 = 64;

/// Controls the number of requests in flight and the length of the next chunk.
///
/// It starts with four requests, and doubles them when the reader starves (waited for 5 ms and a quarter of
/// its time) and all requests in flight are slower than 1.5 times the reader. Their speed is the median of
/// the last ones, and the reader's is that between its waits, or 500 MB/s during startup, so that a busy
/// machine rarely looks like a slow network. If half of the requests would suffice, it halves them.
///
/// More requests are not always better. So after enough rounds in which the reader waited, a trial halves the
/// number for a round of as many chunks as may be in flight. The number stays if the throughput is nearly the
/// same. Otherwise it is reverted, and the next trial, after twice as many rounds, tries the other direction.
///
/// After a slow answer the transfer starts with two requests, of which the first asks for more than its
/// chunk. The server is serial if the second answer arrives much later than the first, or both much later
/// than the previous answer. Then only the first response is streamed, because more requests cost more.
///
/// If answers cost much more than the cheapest one and their transfer, no requests are added. A trial of one
/// streamed request follows if they cost twice their transfer, and one transfers twice as fast as all
/// together, or at once if costs rise with offsets, because each request then costs more than all before.
/// Once there are answers, a doubling needs proof: as many answers as requests, two cheap ones, or requests
/// that have all been transferring for four times their answers' cost.
///
/// A chunk's transfer should take eight times the latency, and at least 50 ms. Lengths are powers of two, for
/// reuse of buffers. The budget must hold two chunks more than may ever be in flight.
#[derive(Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a finding of its own"
)]
pub(super) struct AdaptiveConcurrency {
    max_requests: usize,
    max_chunk_len: u64,
    requests: usize,
    /// Length of the next chunk in bytes, before `max_chunk_len` applies.
    chunk_len: u64,
    link: Link,
    last_sample: Sample,
    round: Round,
    trial: Option<Trial>,
    is_streaming: bool,
    /// Bytes after its chunk that the next streamed request may ask for.
    pub(super) stream_len: u64,
    serial_probe: Option<SerialProbe>,
    /// Cost of the answer before the first request.
    prior_cost: Duration,
    /// Chunks completed since the number of requests changed.
    completed: usize,
    pub(super) is_serial: bool,
    /// Whether a trial took place. After it, waiting alone adds no requests.
    has_tried: bool,
    tries_fewer_requests: bool,
    /// Rounds since the last trial, and rounds required before the next.
    rounds_since_trial: u32,
    trial_pause: u32,
}

/// Measurements of a transfer: totals since its start.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    pub(super) now: Duration,
    /// Bytes received, including those of unfinished chunks.
    pub(super) received: u64,
    pub(super) read: u64,
    pub(super) waited: Duration,
    pub(super) in_flight: usize,
    /// Whether each of them has been transferring for at least [`CHEAP_FACTOR`] times its answer's cost.
    pub(super) is_cheap: bool,
}

/// A round: as many completed chunks as may be in flight.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    /// Chunks that were in flight before the round.
    outstanding: usize,
    left: usize,
    began: Sample,
}

#[derive(Clone, Copy, Debug, Default)]
struct SerialProbe {
    sent_requests: usize,
    /// Cost of the answer that arrived first.
    first: Option<Duration>,
}

#[derive(Clone, Copy, Debug)]
struct Trial {
    /// Number of requests before, and whether one response was streamed.
    requests: usize,
    is_streaming: bool,
    is_for_rising_costs: bool,
    /// Bytes per second before the trial.
    rate: u64,
}

impl AdaptiveConcurrency {
    pub(super) fn new(
        connections: usize,
        chunk_len: u64,
        budget: u64,
        response_cost: Option<Duration>,
    ) -> Self {
        let max_requests = connections.max(1);
        let share = budget / (max_requests as u64).saturating_add(SPARE_CHUNKS);
        let is_slow = response_cost.is_some_and(|cost| cost >= SLOW_RESPONSE);
        let serial_probe = (is_slow && max_requests > 1).then(SerialProbe::default);
        let requests = match serial_probe {
            Some(_) => PROBE_REQUESTS,
            None => INITIAL_REQUESTS.min(max_requests),
        };
        Self {
            max_requests,
            max_chunk_len: chunk_len.min(share.max(MIN_BUDGET_CHUNK_LEN)).max(1),
            requests,
            chunk_len: INITIAL_CHUNK_LEN,
            link: Link::default(),
            last_sample: Sample::default(),
            round: Round {
                left: requests,
                ..Round::default()
            },
            trial: None,
            is_streaming: max_requests == 1,
            stream_len: INITIAL_STREAM_LEN,
            serial_probe,
            prior_cost: response_cost.unwrap_or_default(),
            completed: 0,
            is_serial: false,
            has_tried: false,
            tries_fewer_requests: true,
            rounds_since_trial: 0,
            trial_pause: MIN_TRIAL_PAUSE,
        }
    }

    pub(super) fn requests(&self) -> usize {
        match self.serial_probe {
            // No further request is allowed until both are answered.
            Some(serial_probe) if serial_probe.sent_requests >= PROBE_REQUESTS => 0,
            _ => self.requests,
        }
    }

    pub(super) fn is_streaming(&self) -> bool {
        match self.serial_probe {
            Some(serial_probe) => serial_probe.sent_requests == 0,
            None => self.is_streaming,
        }
    }

    pub(super) fn on_stream_started(&mut self) {
        self.stream_len = self.stream_len.saturating_mul(STREAM_GROWTH);
    }

    /// Whether the server has been serial for long enough to inform other reads.
    pub(super) fn is_confirmed_serial(&self) -> bool {
        self.is_serial && self.completed >= STREAM_ROUND_CHUNKS
    }

    /// Whether requests delay each other, so that answers cost more than the cheapest and their transfer.
    pub(super) fn is_crowded(&self) -> bool {
        let link = &self.link;
        let (Some(cost), Some(transfer), Some(least)) = (
            link.median(|speed| speed.cost),
            link.median(|speed| speed.transfer),
            link.min_cost,
        ) else {
            return false;
        };
        cost >= MIN_CROWDED_COST.max(least * CROWDED_FACTOR).max(transfer)
    }

    pub(super) fn chunk_len(&self) -> u64 {
        self.chunk_len.min(self.max_chunk_len)
    }

    /// Maximum number of bytes that are requested and not yet read.
    pub(super) fn fetch_ahead_bytes(&self) -> u64 {
        // Fetch far ahead, because a server may pause the only response if the client does not drain it.
        if self.is_streaming && self.max_requests > 1 {
            return self.max_chunk_len.saturating_mul(self.max_requests as u64);
        }
        let in_flight = self.chunk_len().saturating_mul(self.requests as u64);
        in_flight.saturating_mul(FETCH_AHEAD_FACTOR)
    }

    pub(super) fn may_grow(&self) -> bool {
        let is_open = self.serial_probe.is_none() && !self.is_streaming && !self.has_tried;
        is_open && self.requests < self.max_requests
    }

    pub(super) fn on_sent(&mut self) {
        if let Some(serial_probe) = &mut self.serial_probe {
            serial_probe.sent_requests += 1;
        }
        if self.link.latency.is_none() {
            self.chunk_len = self.chunk_len.saturating_mul(2);
        }
    }

    pub(super) fn update(&mut self, sample: Sample) {
        let waiting = sample.waited.saturating_sub(self.last_sample.waited);
        let all = sample.now.saturating_sub(self.last_sample.now);
        let is_starving = waiting >= MIN_STARVING_TIME && waiting * 4 >= all;
        // During startup the reader takes each chunk at once, without processing time.
        let is_beginning = sample.now < AVERAGING_WINDOW
            && per_second(sample.received, sample.now) >= FAST_BYTES_PER_SECOND;
        let is_scarce = sample.in_flight >= self.requests
            && !is_beginning
            && !self.is_sufficient(self.requests, sample);
        // Before the first answer, a doubling needs no proof.
        let is_proven = self.link.speeds.is_empty()
            || sample.is_cheap
            || self.completed >= MIN_CHEAP_RESPONSES && self.link.is_cheap()
            || self.completed >= self.requests
                && !self.link.is_last_costly()
                && !self.link.is_rising(MIN_RISING_SAMPLES - 1);
        if is_starving && is_scarce && is_proven && self.may_grow() && !self.is_crowded() {
            self.rounds_since_trial = 0;
            self.set_requests(sample, self.requests.saturating_mul(2));
        } else if all < AVERAGING_WINDOW {
            return;
        } else if waiting * 4 < all
            && self.trial.is_none()
            && self.requests > INITIAL_REQUESTS
            && self.is_sufficient(self.requests / 2, sample)
        {
            self.set_requests(sample, self.requests / 2);
            self.has_tried = false;
        }
        self.last_sample = sample;
    }

    /// Whether this many requests exceed the reader's speed by the headroom.
    fn is_sufficient(&self, requests: usize, sample: Sample) -> bool {
        let demand = per_second(sample.read, sample.now.saturating_sub(sample.waited));
        let speed = self.link.median(|speed| speed.whole);
        speed.is_some_and(|speed| {
            let supply = speed.saturating_mul(requests as u64);
            supply.saturating_mul(HEADROOM.1) >= demand.saturating_mul(HEADROOM.0)
        })
    }

    pub(super) fn on_completed(&mut self, sample: Sample, chunk: CompletedChunk) {
        self.link.on_completed(chunk);
        if let Some(len) = self.link.chunk_len() {
            self.chunk_len = len;
        }
        if let Some(serial_probe) = self.serial_probe {
            self.judge_probe(sample, serial_probe, chunk);
            return;
        }
        let took = sample.now.saturating_sub(self.round.began.now);
        let received = sample.received.saturating_sub(self.round.began.received);
        let waited = sample.waited.saturating_sub(self.round.began.waited);
        let (rate, is_reader_fed) = (per_second(received, took), waited * 4 < took);
        self.completed += 1;
        if self.trial.is_none()
            && !self.is_streaming
            && !is_reader_fed
            && self.is_rising_and_costly(chunk)
        {
            self.try_streaming(sample, rate, true);
            return;
        }
        // Do not wait for the end of a round with costly answers, because it takes long.
        if self.trial.is_none() && took >= MIN_ROUND_TIME && !is_reader_fed && self.is_costly(rate)
        {
            self.try_streaming(sample, rate, false);
            return;
        }
        if self.round.outstanding > 0 {
            self.round.outstanding -= 1;
            if self.round.outstanding == 0 {
                self.round = self.next_round(sample);
            }
            return;
        }
        self.round.left = self.round.left.saturating_sub(1);
        if self.round.left > 0 || took < self.min_round_time() {
            return;
        }
        self.round = self.next_round(sample);
        match self.trial.take() {
            Some(trial) => self.end_trial(sample, trial, rate, is_reader_fed),
            None if !is_reader_fed => self.start_trial_when_due(sample, rate),
            None => {}
        }
    }

    fn judge_probe(&mut self, sample: Sample, serial_probe: SerialProbe, chunk: CompletedChunk) {
        let cost = chunk.cost.unwrap_or_default();
        let is_parallel = match serial_probe.first {
            _ if cost < SLOW_RESPONSE => true,
            // The shorter answer arrives first, even if requested last, unless the server sends both late.
            Some(first) => {
                let (least, most) = (cost.min(first), cost.max(first));
                most < least * 3 / 2 && least < self.prior_cost * 3 / 2
            }
            None if serial_probe.sent_requests < PROBE_REQUESTS => true,
            None => {
                self.serial_probe = Some(SerialProbe {
                    first: Some(cost),
                    ..serial_probe
                });
                return;
            }
        };
        self.serial_probe = None;
        self.is_streaming = !is_parallel;
        self.is_serial = !is_parallel;
        self.set_requests(sample, if is_parallel { INITIAL_REQUESTS } else { 1 });
    }

    fn min_round_time(&self) -> Duration {
        let cost = self.link.median(|speed| speed.cost);
        let answers = cost.filter(|_| self.is_streaming);
        MIN_ROUND_TIME.max(answers.unwrap_or_default() * STREAM_ROUND_FACTOR)
    }

    /// Whether requests cost more than their transfer, at `rate` bytes per second in total.
    fn is_costly(&self, rate: u64) -> bool {
        let link = &self.link;
        let (Some(cost), Some(transfer), Some(content)) = (
            link.median(|speed| speed.cost),
            link.median(|speed| speed.transfer),
            link.median(|speed| speed.content),
        ) else {
            return false;
        };
        !self.is_streaming
            && self.link.speeds.len() >= MAX_SPEED_SAMPLES
            && cost >= SLOW_RESPONSE.max(transfer * COSTLY_FACTOR)
            && content / 2 >= rate
            && self.may_try_streaming()
    }

    /// Whether costs rise with offsets, and that of `last` is at least twice its transfer time.
    fn is_rising_and_costly(&self, last: CompletedChunk) -> bool {
        let (Some(cost), Some(latency)) = (last.cost, last.latency) else {
            return false;
        };
        let transfer = last.duration.saturating_sub(latency);
        cost >= transfer * COSTLY_FACTOR
            && self.link.is_last_costly()
            && self.link.is_rising(MIN_RISING_SAMPLES)
            && self.may_try_streaming()
    }

    fn may_try_streaming(&self) -> bool {
        self.rounds_since_trial + 1 >= self.trial_pause.saturating_sub(MIN_TRIAL_PAUSE)
    }

    fn try_streaming(&mut self, sample: Sample, rate: u64, is_for_rising_costs: bool) {
        self.trial = Some(Trial {
            requests: self.requests,
            is_streaming: false,
            is_for_rising_costs,
            rate,
        });
        self.rounds_since_trial = 0;
        self.is_streaming = true;
        if is_for_rising_costs {
            self.stream_len = u64::MAX;
        }
        self.has_tried = true;
        self.set_requests(sample, 1);
    }

    fn start_trial_when_due(&mut self, sample: Sample, rate: u64) {
        self.rounds_since_trial += 1;
        if self.rounds_since_trial < self.trial_pause {
            return;
        }
        self.rounds_since_trial = 0;
        if self.requests <= INITIAL_REQUESTS {
            self.tries_fewer_requests = false;
        } else if self.requests >= self.max_requests {
            self.tries_fewer_requests = true;
        }
        let requests = if self.is_streaming {
            INITIAL_REQUESTS
        } else if self.tries_fewer_requests {
            (self.requests / 2).max(INITIAL_REQUESTS)
        } else {
            self.requests.saturating_mul(2)
        };
        let (before, is_streaming) = (self.requests, self.is_streaming);
        self.is_streaming = false;
        if self.set_requests(sample, requests) {
            self.has_tried = true;
            self.trial = Some(Trial {
                requests: before,
                is_streaming,
                is_for_rising_costs: false,
                rate,
            });
        } else {
            self.is_streaming = is_streaming;
        }
    }

    fn end_trial(&mut self, sample: Sample, trial: Trial, rate: u64, is_reader_fed: bool) {
        let is_good = if self.requests < trial.requests {
            rate >= trial.rate / 16 * 15
        } else {
            rate / 8 * 7 >= trial.rate
        };
        if is_good || is_reader_fed {
            self.trial_pause = if trial.is_for_rising_costs {
                MAX_TRIAL_PAUSE
            } else {
                MIN_TRIAL_PAUSE
            };
            self.is_serial &= !trial.is_streaming;
            self.has_tried &= !trial.is_streaming;
        } else {
            self.is_streaming = trial.is_streaming;
            self.has_tried = true;
            self.set_requests(sample, trial.requests);
            self.tries_fewer_requests = !self.tries_fewer_requests;
            self.trial_pause = (self.trial_pause * 2).min(MAX_TRIAL_PAUSE);
        }
    }

    fn next_round(&self, sample: Sample) -> Round {
        Round {
            outstanding: 0,
            left: if self.is_streaming {
                STREAM_ROUND_CHUNKS
            } else {
                self.requests
            },
            began: sample,
        }
    }

    fn set_requests(&mut self, sample: Sample, requests: usize) -> bool {
        let before = self.requests;
        self.requests = requests.clamp(1, self.max_requests);
        self.completed = 0;
        self.round = self.next_round(sample);
        self.round.outstanding = before;
        self.requests != before
    }
}

#[cfg(test)]
mod tests;
