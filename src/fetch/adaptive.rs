//! Adaptive number of concurrent requests and chunk length; pure.

use std::collections::VecDeque;
use std::time::Duration;

use super::per_second;

/// Initial and minimum number of requests in flight. On loopback no number is faster.
const INITIAL_REQUESTS: usize = 4;

/// Length of the first chunk in bytes, short so that decoding starts early.
const INITIAL_CHUNK_LEN: u64 = 256 << 10;

/// Minimum chunk length in bytes that the link's speed determines.
const MIN_LINK_CHUNK_LEN: u64 = 1 << 20;

/// Minimum chunk length in bytes that a small budget determines.
const MIN_BUDGET_CHUNK_LEN: u64 = 64 << 10;

/// Round trips that a chunk's transfer should take. The pause before it then wastes a ninth of the time.
const TRANSFER_ROUND_TRIPS: u32 = 8;

/// Minimum transfer time of a chunk. Longer chunks mean cheaper requests, but the reader waits for them.
const MIN_TRANSFER_TIME: Duration = Duration::from_millis(50);

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

const MAX_SPEED_SAMPLES: usize = 8;

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

/// Cost from which answers count as crowded: a multiple of the cheapest answer's cost, and a minimum.
const CROWDED_FACTOR: u32 = 4;
const MIN_CROWDED_COST: Duration = Duration::from_millis(20);

/// Cheap answers that justify doubling the requests. Each may cost at most a quarter of its transfer time.
const MIN_CHEAP_RESPONSES: usize = 2;
pub(super) const CHEAP_FACTOR: u32 = 4;

/// Answers needed to detect costs that rise with offsets. One fewer suffices to delay a doubling.
const MIN_RISING_SAMPLES: usize = 5;

/// Divisor for the pairs of answers that may contradict rising costs: at most one in eight.
const FALLING_PAIR_DIVISOR: usize = 8;

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

#[derive(Clone, Copy, Debug)]
pub(super) struct CompletedChunk {
    pub(super) start: u64,
    pub(super) len: u64,
    /// Time from the request to the last byte.
    pub(super) duration: Duration,
    /// Time from the request to the start of the answer; `None` if no request was sent.
    pub(super) latency: Option<Duration>,
    /// The part of the latency that is not network time.
    pub(super) cost: Option<Duration>,
}

#[derive(Debug, Default)]
struct Link {
    /// Lowest latency.
    latency: Option<Duration>,
    min_cost: Option<Duration>,
    /// Speeds of the last requests, newest first.
    speeds: VecDeque<SpeedSample>,
}

#[derive(Clone, Copy, Debug)]
struct SpeedSample {
    start: u64,
    /// Bytes per second, counted from the request.
    whole: u64,
    /// Bytes per second, counted from the start of the answer.
    content: u64,
    /// Cost of the answer, and transfer time after it.
    cost: Duration,
    transfer: Duration,
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

impl Link {
    fn on_completed(&mut self, chunk: CompletedChunk) {
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

    fn median<T: Ord + Copy>(&self, measure: impl Fn(&SpeedSample) -> T) -> Option<T> {
        let mut speeds: Vec<T> = self.speeds.iter().map(measure).collect();
        speeds.sort_unstable_by(|one, other| other.cmp(one));
        speeds.get(speeds.len() / 2).copied()
    }

    /// Whether costs of at least `answers` answers rise with their offsets: at least half of the pairs rise,
    /// and at most one in eight falls. Differences up to an eighth of the highest cost count as noise.
    fn is_rising(&self, answers: usize) -> bool {
        let mut costs: Vec<_> = self.speeds.iter().map(|it| (it.start, it.cost)).collect();
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

    fn is_cheap(&self) -> bool {
        let mut speeds = self.speeds.iter();
        speeds.all(|speed| speed.cost * CHEAP_FACTOR <= speed.transfer)
    }

    fn is_last_costly(&self) -> bool {
        let (Some(last), Some(least)) = (self.speeds.front(), self.min_cost) else {
            return false;
        };
        last.cost
            >= MIN_CROWDED_COST
                .max(least * CROWDED_FACTOR)
                .max(last.transfer)
    }

    fn chunk_len(&self) -> Option<u64> {
        let rate = self.median(|speed| speed.content)?;
        let transfer = (self.latency? * TRANSFER_ROUND_TRIPS).max(MIN_TRANSFER_TIME);
        let bytes = u128::from(rate) * transfer.as_micros() / 1_000_000;
        let shorts = u64::try_from(bytes).unwrap_or(u64::MAX) / MIN_LINK_CHUNK_LEN;
        Some(MIN_LINK_CHUNK_LEN << shorts.max(1).ilog2())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const BUDGET: u64 = 64 * MIB;

    #[derive(Clone, Copy)]
    struct Simulation {
        /// Milliseconds of a round trip.
        round_trip: u64,
        /// Bytes per millisecond: of a connection, of all together, and of the reader.
        connection_rate: u64,
        total_rate: u64,
        reader: u64,
        len: u64,
        server: Server,
    }

    /// Cost of a request for the server.
    #[derive(Clone, Copy)]
    enum Server {
        Ready,
        /// Milliseconds, in parallel for all requests.
        Parallel(u64),
        /// Milliseconds, for one request after another. Answers begin when no request is left.
        Serial(u64),
        /// The time to unpack all bytes, after the header. Two shared processors unpack this many a ms.
        Unpacking(u64),
    }

    /// A transfer, in steps of a millisecond.
    struct Transfer {
        simulation: Simulation,
        concurrency: AdaptiveConcurrency,
        /// Fixed number of requests and chunk length, instead of the adaptive ones.
        fixed: Option<(usize, u64)>,
        requests: VecDeque<Request>,
        requested_bytes: u64,
        /// End of the response that may be streamed.
        stream_end: u64,
        sent: u64,
        received: u64,
        read: u64,
        now: u64,
        waited: u64,
        max_requests: usize,
        /// Time at which the number of requests reached its maximum.
        grown: u64,
    }

    #[derive(Clone, Copy)]
    struct Request {
        began: u64,
        /// Whether it continues the response of the one before.
        is_continued: bool,
        is_streaming: bool,
        /// Time at which its answer begins.
        answered: u64,
        /// Bytes that the server must unpack before it begins.
        before: u64,
        start: u64,
        len: u64,
        received: u64,
        read: u64,
    }

    impl Request {
        fn is_in_flight(&self) -> bool {
            self.received < self.len
        }
    }

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    impl Simulation {
        fn prior_cost(self) -> Option<Duration> {
            match self.server {
                Server::Parallel(cost) | Server::Serial(cost) => Some(ms(cost)),
                Server::Ready | Server::Unpacking(_) => None,
            }
        }

        fn transfer(self, fixed: Option<(usize, u64)>) -> Transfer {
            let mut transfer = Transfer {
                simulation: self,
                concurrency: AdaptiveConcurrency::new(16, 8 * MIB, BUDGET, self.prior_cost()),
                fixed,
                requests: VecDeque::new(),
                requested_bytes: 0,
                stream_end: 0,
                sent: 0,
                received: 0,
                read: 0,
                now: 0,
                waited: 0,
                max_requests: 0,
                grown: 0,
            };
            while transfer.read < self.len {
                assert!(transfer.now < 1_000_000, "it ends");
                transfer.request();
                transfer.now += 1;
                transfer.receive();
                transfer.consume();
            }
            transfer
        }

        /// Runs the controller. Returns how much longer it takes than the best fixed setting, in percent.
        fn run(self) -> (Transfer, u64) {
            let settings = [1, 2, 4, 8, 16].into_iter().flat_map(|most| {
                [MIB, 2 * MIB, 3 * MIB, 4 * MIB, 8 * MIB].map(move |len| (most, len))
            });
            let best = settings.map(|fixed| self.transfer(Some(fixed)).now).min();
            let transfer = self.transfer(None);
            let best = best.expect("there are some");
            let longer = (transfer.now * 100 / best).saturating_sub(100);
            (transfer, longer)
        }
    }

    impl Transfer {
        fn sample(&self) -> Sample {
            Sample {
                now: ms(self.now),
                received: self.received,
                read: self.read,
                waited: ms(self.waited),
                in_flight: self.in_flight(),
                is_cheap: self.is_cheap(),
            }
        }

        fn is_cheap(&self) -> bool {
            let mut in_flight = self.requests.iter().filter(|it| it.is_in_flight());
            in_flight.all(|request| {
                let cost = request.answered
                    - request.began
                    - self
                        .simulation
                        .round_trip
                        .min(request.answered - request.began);
                request.received > 0
                    && self.now - request.answered >= cost * u64::from(CHEAP_FACTOR)
            })
        }

        fn requests_without_trial(&self) -> usize {
            let trial = self.concurrency.trial.as_ref();
            trial.map_or(self.concurrency.requests, |trial| trial.requests)
        }

        fn in_flight(&self) -> usize {
            let requests = self.requests.iter();
            requests.filter(|request| request.is_in_flight()).count()
        }

        fn request(&mut self) {
            self.concurrency.update(self.sample());
            if self.concurrency.requests() > self.max_requests {
                (self.max_requests, self.grown) = (self.concurrency.requests(), self.now);
            }
            loop {
                let chosen = (self.concurrency.requests(), self.concurrency.chunk_len());
                let (most, len) = self.fixed.unwrap_or(chosen);
                let len = len.min(self.simulation.len - self.requested_bytes);
                let held: u64 = self.requests.iter().map(|request| request.len).sum();
                let is_streaming = self.fixed.is_none() && self.concurrency.is_streaming();
                // A streamed request starts beside those in flight.
                let is_counted = |request: &&Request| {
                    request.is_in_flight() && request.is_streaming >= is_streaming
                };
                let in_flight = self.requests.iter().filter(is_counted).count();
                if len == 0 || in_flight >= most || held + len > BUDGET {
                    return;
                }
                let is_continued = is_streaming && self.requested_bytes < self.stream_end;
                self.stream_end = match (is_streaming, is_continued) {
                    (true, true) => self.stream_end,
                    (true, false) => {
                        let end = (self.requested_bytes + len)
                            .saturating_add(self.concurrency.stream_len);
                        self.concurrency.on_stream_started();
                        end
                    }
                    (false, _) if self.concurrency.serial_probe.is_some() => self.stream_end,
                    (false, _) => 0,
                };
                self.sent += u64::from(!is_continued);
                let answered = self.answered(is_continued);
                self.requests.push_back(Request {
                    began: self.now,
                    is_continued,
                    is_streaming,
                    answered,
                    before: match self.simulation.server {
                        Server::Unpacking(_) if !is_continued => self.requested_bytes,
                        _ => 0,
                    },
                    start: self.requested_bytes,
                    len,
                    received: 0,
                    read: 0,
                });
                self.concurrency.on_sent();
                self.requested_bytes += len;
            }
        }

        /// Time at which the answer to a request sent now begins; also set for requests that wait with it.
        fn answered(&mut self, is_continued: bool) -> u64 {
            let sent = self.now + self.simulation.round_trip;
            if is_continued {
                return self.now;
            }
            match self.simulation.server {
                Server::Ready | Server::Unpacking(_) => sent,
                Server::Parallel(cost) => sent + cost,
                Server::Serial(cost) => {
                    let now = self.now;
                    let is_waiting =
                        |request: &&mut Request| !request.is_continued && request.answered > now;
                    let waiting: Vec<_> = self.requests.iter_mut().filter(is_waiting).collect();
                    let last = waiting.iter().map(|request| request.answered).max();
                    let answered = last.unwrap_or(sent) + cost;
                    for request in waiting {
                        request.answered = answered;
                    }
                    answered
                }
            }
        }

        /// Unpacks for a millisecond; returns the unpacked bytes for each request in transfer.
        fn unpack(&mut self) -> u64 {
            let Server::Unpacking(speed) = self.simulation.server else {
                return u64::MAX;
            };
            let now = self.now;
            let share = speed.min(speed * 2 / (self.in_flight() as u64).max(1));
            for request in self.requests.iter_mut().filter(|it| it.before > 0) {
                request.before = request.before.saturating_sub(share);
                request.answered = now;
            }
            share
        }

        fn receive(&mut self) {
            let unpacked = self.unpack();
            let (simulation, now) = (self.simulation, self.now);
            let flows = |request: &Request| request.is_in_flight() && now > request.answered;
            let mut flowing = self
                .requests
                .iter()
                .filter(|request| flows(request))
                .count();
            let (mut left, mut completed_chunks) = (simulation.total_rate, Vec::new());
            for request in self.requests.iter_mut().filter(|request| flows(request)) {
                let share = (left / flowing as u64)
                    .min(simulation.connection_rate)
                    .min(unpacked);
                let completed = share.min(request.len - request.received);
                (left, flowing) = (left - completed, flowing - 1);
                request.received += completed;
                self.received += completed;
                if !request.is_in_flight() {
                    completed_chunks.push(CompletedChunk {
                        start: request.start,
                        len: request.len,
                        duration: ms(now - request.began),
                        latency: Some(ms(request.answered - request.began)),
                        cost: Some(ms((request.answered - request.began)
                            .saturating_sub(simulation.round_trip))),
                    });
                }
            }
            for chunk in completed_chunks {
                self.concurrency.on_completed(self.sample(), chunk);
            }
        }

        fn consume(&mut self) {
            let mut wanted = self.simulation.reader;
            while wanted > 0 {
                let Some(front) = self
                    .requests
                    .front_mut()
                    .filter(|front| !front.is_in_flight())
                else {
                    self.waited += u64::from(wanted == self.simulation.reader);
                    return;
                };
                let consumed = wanted.min(front.len - front.read);
                front.read += consumed;
                wanted -= consumed;
                self.read += consumed;
                if front.read == front.len {
                    self.requests.pop_front();
                }
            }
        }
    }

    const LOOPBACK: Simulation = Simulation {
        round_trip: 0,
        connection_rate: 1_000_000,
        total_rate: 1_500_000,
        reader: 500_000,
        len: 400 * MIB,
        server: Server::Ready,
    };

    // Promises: request-rejected
    #[test]
    fn serial_server_gets_one_request_at_once() {
        let simulation = Simulation {
            server: Server::Serial(500),
            len: 240 * MIB,
            ..LOOPBACK
        };
        let transfer = simulation.transfer(None);
        assert!(transfer.concurrency.is_serial && transfer.concurrency.is_streaming());
        assert_eq!((transfer.max_requests, transfer.sent), (2, 2));
        assert!(transfer.concurrency.is_confirmed_serial());
        let short = Simulation {
            len: 2 * MIB,
            ..simulation
        };
        let transfer = short.transfer(None);
        assert!(transfer.concurrency.is_serial && !transfer.concurrency.is_confirmed_serial());
    }

    // Promises: request-limits
    #[test]
    fn server_with_parallel_latency_gets_many_requests() {
        let simulation = Simulation {
            server: Server::Parallel(500),
            connection_rate: 20_000,
            ..LOOPBACK
        };
        let transfer = simulation.transfer(None);
        assert!(!transfer.concurrency.is_serial);
        assert_eq!(transfer.requests_without_trial(), 16);
    }

    // Promises: request-limits
    #[test]
    fn server_that_decompresses_from_the_start_gets_one_request() {
        let simulation = Simulation {
            server: Server::Unpacking(240_000),
            len: 240 * MIB,
            ..LOOPBACK
        };
        let transfer = simulation.transfer(None);
        assert!(transfer.concurrency.is_streaming() && !transfer.concurrency.is_serial);

        assert!(transfer.sent < 20, "{} requests", transfer.sent);
        let stream = simulation.len / 240_000;
        assert!(transfer.now < stream * 5 / 4, "{} ms", transfer.now);
    }

    // Promises: request-rejected
    #[test]
    fn each_stream_request_is_four_times_as_long() {
        let simulation = Simulation {
            server: Server::Serial(500),
            len: 16_384 * MIB,
            reader: 100_000,
            ..LOOPBACK
        };
        let transfer = simulation.transfer(None);
        // Requests of 1 GiB, 4 GiB and the rest; a further one detected that the server is serial.
        assert_eq!(transfer.sent, 4);
    }

    #[test]
    fn reader_that_never_waits_gets_no_more_requests() {
        let (transfer, longer) = LOOPBACK.run();
        assert_eq!(transfer.max_requests, INITIAL_REQUESTS);
        assert!(longer <= 5, "{longer} %");
    }

    #[test]
    fn fast_start_does_not_add_requests() {
        // The reader takes bytes at once, until its consumer is busy.
        let simulation = Simulation {
            connection_rate: 200_000,
            total_rate: 800_000,
            reader: 5_000_000,
            len: 64 * MIB,
            ..LOOPBACK
        };
        let (transfer, _) = simulation.run();
        assert!(transfer.now < 100, "{} ms", transfer.now);
        assert_eq!(transfer.max_requests, INITIAL_REQUESTS);
    }

    #[test]
    fn unneeded_requests_are_dropped_soon() {
        let mut concurrency = AdaptiveConcurrency::new(16, 8 * MIB, BUDGET, None);
        for now in [10, 20] {
            concurrency.update(Sample {
                now: ms(now),
                waited: ms(now),
                in_flight: 16,
                ..Sample::default()
            });
        }
        assert_eq!(concurrency.requests(), 16);
        // From now on the reader takes 100 bytes a millisecond, and each request transfers 50.
        for now in 3..=5 {
            let sample = Sample {
                now: ms(now * 100),
                waited: ms(20),
                received: now * 10_000,
                read: now * 10_000,
                in_flight: 2,
                is_cheap: false,
            };
            concurrency.on_completed(
                sample,
                CompletedChunk {
                    start: 0,
                    len: 500,
                    duration: ms(10),
                    latency: Some(ms(0)),
                    cost: None,
                },
            );
            concurrency.update(sample);
        }
        assert_eq!(concurrency.requests(), INITIAL_REQUESTS);
    }

    #[test]
    fn fetch_ahead_is_three_times_the_bytes_in_flight() {
        let mut concurrency = AdaptiveConcurrency::new(16, 2 * MIB, BUDGET, None);
        assert_eq!(concurrency.fetch_ahead_bytes(), 3 * MIB);
        for _ in 0..10 {
            concurrency.on_sent();
        }
        assert_eq!(concurrency.fetch_ahead_bytes(), 24 * MIB);
    }

    #[test]
    fn slow_connections_lead_to_many_requests() {
        let simulation = Simulation {
            connection_rate: 60_000,
            ..LOOPBACK
        };
        let (transfer, longer) = simulation.run();
        assert_eq!(transfer.requests_without_trial(), 16);
        assert!(transfer.grown <= 30, "after {} ms", transfer.grown);
        assert!(longer <= 10, "{longer} %");
    }

    #[test]
    fn long_round_trip_is_filled_within_one_round_trip() {
        // A connection can have a window of 4 MiB in flight.
        let simulation = Simulation {
            round_trip: 40,
            connection_rate: 4 * MIB / 40,
            ..LOOPBACK
        };
        let (transfer, longer) = simulation.run();
        assert_eq!(transfer.requests_without_trial(), 16);
        assert!(transfer.grown <= 40, "after {} ms", transfer.grown);
        assert!(longer <= 10, "{longer} %");
    }

    #[test]
    fn requests_that_add_no_throughput_are_dropped() {
        let simulation = Simulation {
            round_trip: 5,
            connection_rate: 200_000,
            total_rate: 200_000,
            len: 4096 * MIB,
            ..LOOPBACK
        };
        let (transfer, longer) = simulation.run();
        assert_eq!(transfer.max_requests, 16);
        assert_eq!(transfer.requests_without_trial(), INITIAL_REQUESTS);
        assert!(longer <= 10, "{longer} %");
    }

    #[test]
    fn wrongly_dropped_requests_are_restored_soon() {
        let simulation = Simulation {
            connection_rate: 60_000,
            reader: 2_000_000,
            len: 8192 * MIB,
            ..LOOPBACK
        };
        let (transfer, longer) = simulation.run();
        assert!(transfer.concurrency.has_tried);
        assert_eq!(transfer.requests_without_trial(), 16);
        assert!(longer <= 5, "{longer} %");
    }

    #[test]
    fn slow_reader_gets_as_many_requests_as_it_needs() {
        let simulation = Simulation {
            connection_rate: 20_000,
            reader: 100_000,
            ..LOOPBACK
        };
        let (transfer, longer) = simulation.run();
        assert_eq!(transfer.requests_without_trial(), 8);
        assert!(longer <= 5, "{longer} %");
    }

    fn measured(latency: u64, took: u64, len: u64) -> u64 {
        let mut concurrency = AdaptiveConcurrency::new(16, 64 * MIB, 1 << 40, None);
        let chunk = CompletedChunk {
            start: 0,
            len,
            duration: ms(took),
            latency: Some(ms(latency)),
            cost: None,
        };
        concurrency.on_completed(Sample::default(), chunk);
        concurrency.chunk_len()
    }

    #[test]
    fn chunk_takes_eight_round_trips_and_is_a_power_of_two() {
        assert_eq!(measured(40, 140, 5_000_000), 8 * MIB);
        assert_eq!(measured(40, 140, 6_000_000), 16 * MIB);
        assert_eq!(measured(40, 40, 5_000_000), 64 * MIB);
        assert_eq!(measured(0, 100, 5 * MIB), 2 * MIB, "50 ms");
        assert_eq!(measured(1, 101, MIB), MIB, "and is worth asking for");
    }

    #[test]
    fn chunk_length_doubles_until_the_first_measurement() {
        let mut concurrency = AdaptiveConcurrency::new(2, 2 * MIB, 1 << 40, None);
        let mut lens = Vec::new();
        for _ in 0..5 {
            lens.push(concurrency.chunk_len());
            concurrency.on_sent();
        }
        assert_eq!(lens, [MIB / 4, MIB / 2, MIB, 2 * MIB, 2 * MIB]);
    }

    #[test]
    fn the_budget_holds_two_chunks_more_than_are_in_flight() {
        for (connections, budget) in [(1, 16), (4, 16), (16, 64), (64, 16), (256, 64)] {
            let mut concurrency =
                AdaptiveConcurrency::new(connections, 8 * MIB, budget * MIB, None);
            for _ in 0..10 {
                concurrency.on_sent();
            }
            let held = (connections as u64 + 2) * concurrency.chunk_len();
            assert!(held <= budget * MIB, "{connections} with {budget} MiB");
        }
        assert!(AdaptiveConcurrency::new(1, 1, 0, None).chunk_len() > 0);
    }

    #[test]
    fn no_limit_is_exceeded() {
        for most in [1, 2, 3, 5] {
            let mut concurrency = AdaptiveConcurrency::new(most, MIB, BUDGET, None);
            for now in 0..100 {
                concurrency.update(Sample {
                    now: ms(now * 10),
                    waited: ms(now * 10),
                    in_flight: 100,
                    ..Sample::default()
                });
            }
            assert_eq!(concurrency.requests(), most);
        }
    }
}
