//! How many requests at once, and how long a chunk; pure.

use std::collections::VecDeque;
use std::time::Duration;

use super::per_second;

/// Requests in flight at first, and at the least: on loopback no number is faster.
const FIRST: usize = 4;

/// Bytes of the first chunk: decoding starts early.
const FIRST_CHUNK: u64 = 256 << 10;

/// Bytes of the shortest chunk that the link leads to.
const SHORT_CHUNK: u64 = 1 << 20;

/// The shortest chunk that a small budget leads to, in bytes.
const SHORTEST_CHUNK: u64 = 64 << 10;

/// Round trips that a chunk's bytes should take to come: the pause before them is then a ninth of
/// the connection's time.
const ROUND_TRIPS: u32 = 8;

/// How long a chunk's bytes should take at least: the longer, the less a request costs; but the
/// reader waits for whole chunks.
const SHORTEST_TRANSFER: Duration = Duration::from_millis(50);

/// Chunks of the budget that are not in flight: the one in the reader's hands, and the next.
const SPARE_CHUNKS: u64 = 2;

/// How long the reader must have waited before there are more requests: more than a hiccup, and
/// short enough for sixteen to be on their way within one round trip of 40 ms.
pub(super) const PATIENCE: Duration = Duration::from_millis(5);

/// Over how long the share of waiting is taken; and how long everything begins.
const MEMORY: Duration = Duration::from_millis(100);

/// Bytes a second that are not slow, as long as it is not known what the reader can take.
const FAST: u64 = 500_000_000;

/// How much more than the reader takes the requests should be able to bring: three for two.
const PLENTY: (u64, u64) = (3, 2);

/// Bytes that may be asked for and not yet read, as a multiple of those that may be in flight:
/// what landed carries the reader over a hiccup, and more would only have left the processor's
/// caches, and new memory been touched, when it is read.
const AHEAD: u64 = 3;

/// Requests by which is judged what one can bring.
const MOST_SPEEDS: usize = 8;

/// Rounds shorter than this tell more about the moment than about the link.
const SHORTEST_ROUND: Duration = Duration::from_millis(100);

/// Requests that find out whether answers wait for each other.
const OPENING: usize = 2;

/// An answer that takes so long is slow: it may cost the server more than the bytes do.
const SLOW_ANSWER: Duration = Duration::from_millis(100);

/// How many times as long as the bytes of its chunk a slow answer must take to cost more than them.
const COSTLY: u32 = 2;

/// Chunks of a round in which one request is read as a stream.
const STREAM_ROUND: usize = 16;

/// How many times as long as an answer takes such a round lasts, at the least.
const STREAM_ANSWERS: u32 = 4;

/// Bytes that the first such request asks for, at most. Each one asks for four times as many as the one
/// before, so that a proxy that stores a whole range before it answers is not given all at once. Where costs rise
/// with offsets one request asks for all the rest.
const FIRST_STREAM: u64 = 1 << 30;
const STREAM_GROWTH: u64 = 4;

/// How many times as much as the cheapest answer a late one costs where requests wait for each other, and
/// how much it costs at least.
const CROWDED: u32 = 4;
const CROWDED_ANSWER: Duration = Duration::from_millis(20);

/// Answers that suffice for twice as many requests, where each cost at most a quarter of the time of its bytes.
const FEWEST_CHEAP: usize = 2;
pub(super) const CHEAP: u32 = 4;

/// Answers by which is judged whether costs rise with offsets; one fewer is reason enough to wait and see.
const RISING: usize = 5;

/// Of how many pairs of answers one at most may be the other way round where costs rise with offsets.
const PAIRS: usize = 8;

/// Rounds before the first trial, and after one that went well.
const REST: u32 = 8;

/// Rounds between two trials, at the most.
const LONGEST_REST: u32 = 64;

/// Decides how many requests may be in flight and how long the next chunk is.
///
/// It begins with four requests. Their number doubles, up to the limit, whenever the reader has
/// spent a quarter of its time waiting, at least 5 ms, and the requests look too few: all were in
/// flight, and at the speed of the last ones (the median) they do not bring half as much again as
/// the reader takes while it need not wait; in the beginning, when that is not known, they bring
/// less than 500 MB/s. So a busy machine is rarely taken for a slow network. Where half of them
/// would suffice by the same measure, half of them are given up.
///
/// More is not always better: once there have been enough rounds (of as many chunks as may be in
/// flight) in which the reader had to wait, half as many are tried for a round, and kept for
/// nearly the same throughput. What does not prove itself is taken back, then the other direction
/// is tried, and each failure doubles the rounds until the next trial.
///
/// A request may cost the server much whatever its length, and more of them cost more. So when the answer
/// before was slow, the transfer begins with two requests, and the first one asks for more than its chunk.
/// If the second answer comes much later than the first, or both much later than the answer before, the
/// server is serial: the first answer is read on as a stream, and there is no other request. Answers that
/// cost much more than the cheapest one, and more than their bytes, lead to no more requests. If they cost
/// twice as much as their bytes, and one of them brings its bytes twice as fast as all together do, one
/// request that is read as a stream is tried. It is tried at once where costs rise with offsets, because each
/// request sent meanwhile costs more than all before. So there is also no doubling, once there are answers,
/// before as many came as there are requests, or two that cost little, or before the content of all that are
/// under way has been coming for four times as long as their answers cost.
///
/// A chunk's bytes should take eight times as long to come as a request to be answered, and at
/// least 50 ms. The length is a power of two, so that buffers fit again, and never so long that
/// the budget would not hold two chunks more than may ever be in flight.
#[derive(Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a finding of its own"
)]
pub(super) struct Pace {
    most_requests: usize,
    longest_chunk: u64,
    requests: usize,
    /// Bytes of the next chunk, but for `longest_chunk`.
    chunk_len: u64,
    link: Link,
    glance: Moment,
    round: Round,
    trial: Option<Trial>,
    /// Whether one long request is read as a stream.
    is_single: bool,
    /// Bytes that the next request of a stream asks for.
    stream_len: u64,
    opening: Option<Opening>,
    /// What the answer before the first request cost.
    probe_cost: Duration,
    /// Chunks that came since the number of requests was changed.
    came: usize,
    /// Whether answers were seen to wait for each other.
    is_serial: bool,
    /// Whether there was a trial: from then on, waiting alone leads to no more requests.
    has_tried: bool,
    tries_fewer: bool,
    /// Rounds since the last trial, and how many there should be.
    rested: u32,
    rest: u32,
}

/// How things are: sums from the beginning up to now.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Moment {
    /// Time.
    pub(super) now: Duration,
    /// Bytes that came, those of chunks in flight included.
    pub(super) received: u64,
    /// Bytes that the reader took.
    pub(super) read: u64,
    /// How long the reader waited for them.
    pub(super) waited: Duration,
    /// Requests that are under way.
    pub(super) in_flight: usize,
    /// Whether the content of each of them has been coming for at least [`CHEAP`] times as long as its answer
    /// cost.
    pub(super) is_cheap: bool,
}

/// A chunk that came.
#[derive(Clone, Copy, Debug)]
pub(super) struct Landing {
    /// Where it begins in the source.
    pub(super) start: u64,
    /// Its bytes.
    pub(super) len: u64,
    /// From the request to its last byte.
    pub(super) took: Duration,
    /// From the request to the beginning of the answer; `None` where nobody was asked.
    pub(super) latency: Option<Duration>,
    /// Of that, what was not spent on the way.
    pub(super) cost: Option<Duration>,
}

/// What one connection was measured to do.
#[derive(Debug, Default)]
struct Link {
    /// The shortest time from a request to its answer.
    latency: Option<Duration>,
    /// What the cheapest answer cost.
    least_cost: Option<Duration>,
    /// Of the last requests.
    speeds: VecDeque<Speed>,
}

/// What one request was measured to do.
#[derive(Clone, Copy, Debug)]
struct Speed {
    /// Where its chunk begins.
    start: u64,
    /// Bytes a second from the request on.
    whole: u64,
    /// From the answer on.
    content: u64,
    /// What the answer cost, and how long its bytes took after that.
    cost: Duration,
    transfer: Duration,
}

/// As many landings as there may be requests in flight.
#[derive(Clone, Copy, Debug)]
struct Round {
    /// Landings that were on their way before it.
    earlier: usize,
    left: usize,
    began: Moment,
}

/// Two requests, by which is found out whether answers wait for each other.
#[derive(Clone, Copy, Debug, Default)]
struct Opening {
    launched: usize,
    /// What the first answer cost that came.
    first: Option<Duration>,
}

/// Another number of requests for a round.
#[derive(Clone, Copy, Debug)]
struct Trial {
    /// Requests before, and whether they were a single one.
    requests: usize,
    is_single: bool,
    /// Whether costs rose with offsets.
    is_rise: bool,
    /// Bytes a second before.
    rate: u64,
}

impl Pace {
    /// At most `connections` requests of at most `chunk_len` bytes, into buffers of together
    /// `budget` bytes. The answer before cost `answer_cost`.
    pub(super) fn new(
        connections: usize,
        chunk_len: u64,
        budget: u64,
        answer_cost: Option<Duration>,
    ) -> Self {
        let most_requests = connections.max(1);
        let share = budget / (most_requests as u64).saturating_add(SPARE_CHUNKS);
        let is_slow = answer_cost.is_some_and(|cost| cost >= SLOW_ANSWER);
        let opening = (is_slow && most_requests > 1).then(Opening::default);
        let requests = match opening {
            Some(_) => OPENING,
            None => FIRST.min(most_requests),
        };
        Self {
            most_requests,
            longest_chunk: chunk_len.min(share.max(SHORTEST_CHUNK)).max(1),
            requests,
            chunk_len: FIRST_CHUNK,
            link: Link::default(),
            glance: Moment::default(),
            round: Round::begin(Moment::default(), 0, requests),
            trial: None,
            is_single: most_requests == 1,
            stream_len: FIRST_STREAM,
            opening,
            probe_cost: answer_cost.unwrap_or_default(),
            came: 0,
            is_serial: false,
            has_tried: false,
            tries_fewer: true,
            rested: 0,
            rest: REST,
        }
    }

    /// Requests that may be in flight now.
    pub(super) fn requests(&self) -> usize {
        match self.opening {
            // No other one, before both are answered.
            Some(opening) if opening.launched >= OPENING => 0,
            _ => self.requests,
        }
    }

    /// Whether the next request should be a long one, to be read as a stream.
    pub(super) fn is_single(&self) -> bool {
        match self.opening {
            Some(opening) => opening.launched == 0,
            None => self.is_single,
        }
    }

    /// Bytes behind its chunk that the next request may ask for, to be read as a stream.
    pub(super) fn stream_len(&self) -> u64 {
        self.stream_len
    }

    /// A request of a stream was sent: the next one may ask for more.
    pub(super) fn began_stream(&mut self) {
        self.stream_len = self.stream_len.saturating_mul(STREAM_GROWTH);
    }

    /// Whether the server was seen to answer one request after the other.
    pub(super) fn is_serial(&self) -> bool {
        self.is_serial
    }

    /// Whether the server was seen to do so for long enough that other reads should know it.
    pub(super) fn is_surely_serial(&self) -> bool {
        self.is_serial && self.came >= STREAM_ROUND
    }

    /// Whether requests wait for each other: answers cost much more than the cheapest one did, and more
    /// than their bytes.
    pub(super) fn is_crowded(&self) -> bool {
        let link = &self.link;
        let (Some(cost), Some(transfer), Some(least)) = (
            link.median(|speed| speed.cost),
            link.median(|speed| speed.transfer),
            link.least_cost,
        ) else {
            return false;
        };
        cost >= CROWDED_ANSWER.max(least * CROWDED).max(transfer)
    }

    /// Bytes of the next chunk.
    pub(super) fn chunk_len(&self) -> u64 {
        self.chunk_len.min(self.longest_chunk)
    }

    /// Bytes that may be asked for and not yet read.
    pub(super) fn ahead(&self) -> u64 {
        // A server may pause an answer of which nothing is taken, and it is the only one.
        if self.is_single && self.most_requests > 1 {
            return self.longest_chunk.saturating_mul(self.most_requests as u64);
        }
        let in_flight = self.chunk_len().saturating_mul(self.requests as u64);
        in_flight.saturating_mul(AHEAD)
    }

    /// Whether waiting can still lead to more requests.
    pub(super) fn may_grow(&self) -> bool {
        let is_open = self.opening.is_none() && !self.is_single && !self.has_tried;
        is_open && self.requests < self.most_requests
    }

    /// A chunk was asked for.
    pub(super) fn launched(&mut self) {
        if let Some(opening) = &mut self.opening {
            opening.launched += 1;
        }
        if self.link.latency.is_none() {
            self.chunk_len = self.chunk_len.saturating_mul(2);
        }
    }

    /// Looks whether the reader starves.
    pub(super) fn look(&mut self, moment: Moment) {
        let waiting = moment.waited.saturating_sub(self.glance.waited);
        let all = moment.now.saturating_sub(self.glance.now);
        let is_starving = waiting >= PATIENCE && waiting * 4 >= all;
        // While everything begins, a reader takes what it gets without having worked on it.
        let is_beginning = moment.now < MEMORY && per_second(moment.received, moment.now) >= FAST;
        let is_scarce = moment.in_flight >= self.requests
            && !is_beginning
            && !self.suffice(self.requests, moment);
        // Where nothing came yet, many must be on their way before it does.
        let is_proven = self.link.speeds.is_empty()
            || moment.is_cheap
            || self.came >= FEWEST_CHEAP && self.link.is_cheap()
            || self.came >= self.requests
                && !self.link.is_last_costly()
                && !self.link.is_rising(RISING - 1);
        if is_starving && is_scarce && is_proven && self.may_grow() && !self.is_crowded() {
            self.rested = 0;
            self.change(moment, self.requests.saturating_mul(2));
        } else if all < MEMORY {
            return;
        } else if waiting * 4 < all
            && self.trial.is_none()
            && self.requests > FIRST
            && self.suffice(self.requests / 2, moment)
        {
            self.change(moment, self.requests / 2);
            self.has_tried = false;
        }
        self.glance = moment;
    }

    /// Whether so many requests can bring more than the reader takes.
    fn suffice(&self, requests: usize, moment: Moment) -> bool {
        let demand = per_second(moment.read, moment.now.saturating_sub(moment.waited));
        self.link.speed().is_some_and(|speed| {
            let supply = speed.saturating_mul(requests as u64);
            supply.saturating_mul(PLENTY.1) >= demand.saturating_mul(PLENTY.0)
        })
    }

    /// Takes note of a chunk that came.
    pub(super) fn landed(&mut self, moment: Moment, landing: Landing) {
        self.link.landed(landing);
        if let Some(len) = self.link.chunk_len() {
            self.chunk_len = len;
        }
        if let Some(opening) = self.opening {
            self.opened(moment, opening, landing);
            return;
        }
        let took = moment.now.saturating_sub(self.round.began.now);
        let received = moment.received.saturating_sub(self.round.began.received);
        let waited = moment.waited.saturating_sub(self.round.began.waited);
        let (rate, is_fed) = (per_second(received, took), waited * 4 < took);
        self.came += 1;
        if self.trial.is_none() && !self.is_single && !is_fed && self.rises_to(landing) {
            self.try_single(moment, rate, true);
            return;
        }
        // A round of costly answers takes long, and its end is not waited for.
        if self.trial.is_none() && took >= SHORTEST_ROUND && !is_fed && self.is_costly(rate) {
            self.try_single(moment, rate, false);
            return;
        }
        if self.round.earlier > 0 {
            self.round.earlier -= 1;
            if self.round.earlier == 0 {
                self.round = self.next_round(moment);
            }
            return;
        }
        self.round.left = self.round.left.saturating_sub(1);
        if self.round.left > 0 || took < self.shortest_round() {
            return;
        }
        self.round = self.next_round(moment);
        match self.trial.take() {
            Some(trial) => self.judge(moment, trial, rate, is_fed),
            None if !is_fed => self.try_another(moment, rate),
            None => {}
        }
    }

    /// Takes note of an answer to one of the first two requests.
    fn opened(&mut self, moment: Moment, opening: Opening, landing: Landing) {
        let cost = landing.cost.unwrap_or_default();
        let is_parallel = match opening.first {
            _ if cost < SLOW_ANSWER => true,
            // The shorter one comes first, also where it was asked for last. A server that begins to send
            // when it has worked on both sends both late.
            Some(first) => {
                let (least, most) = (cost.min(first), cost.max(first));
                most < least * 3 / 2 && least < self.probe_cost * 3 / 2
            }
            None if opening.launched < OPENING => true,
            None => {
                self.opening = Some(Opening {
                    first: Some(cost),
                    ..opening
                });
                return;
            }
        };
        self.opening = None;
        self.is_single = !is_parallel;
        self.is_serial = !is_parallel;
        self.change(moment, if is_parallel { FIRST } else { 1 });
    }

    fn shortest_round(&self) -> Duration {
        let cost = self.link.median(|speed| speed.cost);
        let answers = cost.filter(|_| self.is_single);
        SHORTEST_ROUND.max(answers.unwrap_or_default() * STREAM_ANSWERS)
    }

    /// Whether requests, which together bring `rate` bytes a second, cost more than their bytes.
    fn is_costly(&self, rate: u64) -> bool {
        let link = &self.link;
        let (Some(cost), Some(transfer), Some(content)) = (
            link.median(|speed| speed.cost),
            link.median(|speed| speed.transfer),
            link.median(|speed| speed.content),
        ) else {
            return false;
        };
        !self.is_single
            && self.link.speeds.len() >= MOST_SPEEDS
            && cost >= SLOW_ANSWER.max(transfer * COSTLY)
            && content / 2 >= rate
            && self.may_try_single()
    }

    /// Whether costs rise with offsets, and that of `last` is high: twice as long as its bytes take.
    fn rises_to(&self, last: Landing) -> bool {
        let (Some(cost), Some(latency)) = (last.cost, last.latency) else {
            return false;
        };
        let transfer = last.took.saturating_sub(latency);
        cost >= transfer * COSTLY
            && self.link.is_last_costly()
            && self.link.is_rising(RISING)
            && self.may_try_single()
    }

    /// Whether the last trial in vain is long ago, or was not.
    fn may_try_single(&self) -> bool {
        self.rested + 1 >= self.rest.saturating_sub(REST)
    }

    /// Tries one long request, read as a stream.
    fn try_single(&mut self, moment: Moment, rate: u64, is_rise: bool) {
        self.trial = Some(Trial {
            requests: self.requests,
            is_single: false,
            is_rise,
            rate,
        });
        self.rested = 0;
        self.is_single = true;
        if is_rise {
            self.stream_len = u64::MAX;
        }
        self.has_tried = true;
        self.change(moment, 1);
    }

    /// Begins a trial when it is time.
    fn try_another(&mut self, moment: Moment, rate: u64) {
        self.rested += 1;
        if self.rested < self.rest {
            return;
        }
        self.rested = 0;
        if self.requests <= FIRST {
            self.tries_fewer = false;
        } else if self.requests >= self.most_requests {
            self.tries_fewer = true;
        }
        let requests = if self.is_single {
            FIRST
        } else if self.tries_fewer {
            (self.requests / 2).max(FIRST)
        } else {
            self.requests.saturating_mul(2)
        };
        let (before, is_single) = (self.requests, self.is_single);
        self.is_single = false;
        if self.change(moment, requests) {
            self.has_tried = true;
            self.trial = Some(Trial {
                requests: before,
                is_single,
                is_rise: false,
                rate,
            });
        } else {
            self.is_single = is_single;
        }
    }

    fn judge(&mut self, moment: Moment, trial: Trial, rate: u64, is_fed: bool) {
        let is_good = if self.requests < trial.requests {
            rate >= trial.rate / 16 * 15
        } else {
            rate / 8 * 7 >= trial.rate
        };
        if is_good || is_fed {
            self.rest = if trial.is_rise { LONGEST_REST } else { REST };
            self.is_serial &= !trial.is_single;
            self.has_tried &= !trial.is_single;
        } else {
            self.is_single = trial.is_single;
            self.has_tried = true;
            self.change(moment, trial.requests);
            self.tries_fewer = !self.tries_fewer;
            self.rest = (self.rest * 2).min(LONGEST_REST);
        }
    }

    fn next_round(&self, moment: Moment) -> Round {
        let landings = if self.is_single {
            STREAM_ROUND
        } else {
            self.requests
        };
        Round::begin(moment, 0, landings)
    }

    /// Sets the number of requests; whether that changes it.
    fn change(&mut self, moment: Moment, requests: usize) -> bool {
        let before = self.requests;
        self.requests = requests.clamp(1, self.most_requests);
        self.came = 0;
        self.round = self.next_round(moment);
        self.round.earlier = before;
        self.requests != before
    }
}

impl Link {
    fn landed(&mut self, landing: Landing) {
        let Some(latency) = landing.latency else {
            return;
        };
        self.latency = Some(self.latency.map_or(latency, |known| known.min(latency)));
        let cost = landing.cost.unwrap_or_default();
        self.least_cost = Some(self.least_cost.map_or(cost, |known| known.min(cost)));
        self.speeds.truncate(MOST_SPEEDS - 1);
        let transfer = landing.took.saturating_sub(latency);
        self.speeds.push_front(Speed {
            start: landing.start,
            whole: per_second(landing.len, landing.took),
            content: per_second(landing.len, transfer),
            cost,
            transfer,
        });
    }

    /// The median of the last ones.
    fn median<T: Ord + Copy>(&self, measure: impl Fn(&Speed) -> T) -> Option<T> {
        let mut speeds: Vec<T> = self.speeds.iter().map(measure).collect();
        speeds.sort_unstable_by(|one, other| other.cmp(one));
        speeds.get(speeds.len() / 2).copied()
    }

    /// Whether so many answers at the least cost the more the further back their bytes lie: most pairs of them
    /// say so, and hardly one the opposite. An eighth of the highest cost says nothing.
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
        costs.len() >= answers && rises * 2 >= pairs && falls * PAIRS <= pairs
    }

    /// Whether each answer cost at most a quarter of the time that its bytes took.
    fn is_cheap(&self) -> bool {
        let mut speeds = self.speeds.iter();
        speeds.all(|speed| speed.cost * CHEAP <= speed.transfer)
    }

    /// Whether the last answer cost much more than the cheapest one, and more than its bytes.
    fn is_last_costly(&self) -> bool {
        let (Some(last), Some(least)) = (self.speeds.front(), self.least_cost) else {
            return false;
        };
        last.cost >= CROWDED_ANSWER.max(least * CROWDED).max(last.transfer)
    }

    /// Bytes a second of a request, round trip included.
    fn speed(&self) -> Option<u64> {
        self.median(|speed| speed.whole)
    }

    /// How long a chunk should be.
    fn chunk_len(&self) -> Option<u64> {
        let rate = self.median(|speed| speed.content)?;
        let transfer = (self.latency? * ROUND_TRIPS).max(SHORTEST_TRANSFER);
        let bytes = u128::from(rate) * transfer.as_micros() / 1_000_000;
        let shorts = u64::try_from(bytes).unwrap_or(u64::MAX) / SHORT_CHUNK;
        Some(SHORT_CHUNK << shorts.max(1).ilog2())
    }
}

impl Round {
    fn begin(began: Moment, earlier: usize, requests: usize) -> Self {
        Self {
            earlier,
            left: requests,
            began,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const BUDGET: u64 = 64 * MIB;

    /// A link, and whoever reads what comes over it.
    #[derive(Clone, Copy)]
    struct World {
        /// In milliseconds.
        round_trip: u64,
        /// Bytes a millisecond: of a connection, of all, and of the reader.
        per_connection: u64,
        in_all: u64,
        reader: u64,
        /// Bytes to be read.
        len: u64,
        server: Server,
    }

    /// What a request costs the server.
    #[derive(Clone, Copy)]
    enum Server {
        /// Nothing.
        Ready,
        /// So many milliseconds, for all requests at once.
        Parallel(u64),
        /// So many milliseconds, for one request after the other; answers begin when no request is left.
        Serial(u64),
        /// As long as it takes to unpack all before its first byte: so many bytes a millisecond on each of two
        /// processors, which all requests share. Who asks is answered, or not, before that.
        Unpacking(u64),
    }

    /// A transfer, in steps of a millisecond.
    struct Transfer {
        world: World,
        pace: Pace,
        /// Requests and length of chunks, as if someone had chosen well, or not.
        fixed: Option<(usize, u64)>,
        /// In order, until read.
        requests: VecDeque<Request>,
        asked: u64,
        /// Where the answer that may be read on ends.
        stream_end: u64,
        /// Requests that the server got.
        sent: u64,
        received: u64,
        read: u64,
        now: u64,
        waited: u64,
        most_requests: usize,
        /// When there were as many requests as ever.
        grown: u64,
    }

    #[derive(Clone, Copy)]
    struct Request {
        began: u64,
        /// Whether it goes on in the answer to the one before.
        is_continued: bool,
        /// Whether it was to be read as a stream.
        is_single: bool,
        /// When its answer begins.
        answered: u64,
        /// Bytes that must be unpacked before it begins.
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

    impl World {
        /// What the answer before the first request cost.
        fn probe_cost(self) -> Option<Duration> {
            match self.server {
                Server::Parallel(cost) | Server::Serial(cost) => Some(ms(cost)),
                Server::Ready | Server::Unpacking(_) => None,
            }
        }

        fn transfer(self, fixed: Option<(usize, u64)>) -> Transfer {
            let mut transfer = Transfer {
                world: self,
                pace: Pace::new(16, 8 * MIB, BUDGET, self.probe_cost()),
                fixed,
                requests: VecDeque::new(),
                asked: 0,
                stream_end: 0,
                sent: 0,
                received: 0,
                read: 0,
                now: 0,
                waited: 0,
                most_requests: 0,
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

        /// As the controller has it, and how much longer than with the best of all fixed settings
        /// it takes, in percent.
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
        fn moment(&self) -> Moment {
            Moment {
                now: ms(self.now),
                received: self.received,
                read: self.read,
                waited: ms(self.waited),
                in_flight: self.in_flight(),
                is_cheap: self.is_cheap(),
            }
        }

        fn is_cheap(&self) -> bool {
            let mut flying = self.requests.iter().filter(|it| it.is_in_flight());
            flying.all(|request| {
                let cost = request.answered
                    - request.began
                    - self.world.round_trip.min(request.answered - request.began);
                request.received > 0 && self.now - request.answered >= cost * u64::from(CHEAP)
            })
        }

        /// Requests that may be in flight, trials apart.
        fn settled(&self) -> usize {
            let trial = self.pace.trial.as_ref();
            trial.map_or(self.pace.requests, |trial| trial.requests)
        }

        fn in_flight(&self) -> usize {
            let requests = self.requests.iter();
            requests.filter(|request| request.is_in_flight()).count()
        }

        fn request(&mut self) {
            self.pace.look(self.moment());
            if self.pace.requests() > self.most_requests {
                (self.most_requests, self.grown) = (self.pace.requests(), self.now);
            }
            loop {
                let chosen = (self.pace.requests(), self.pace.chunk_len());
                let (most, len) = self.fixed.unwrap_or(chosen);
                let len = len.min(self.world.len - self.asked);
                let held: u64 = self.requests.iter().map(|request| request.len).sum();
                let is_single = self.fixed.is_none() && self.pace.is_single();
                // A stream begins beside what is under way.
                let is_counted =
                    |request: &&Request| request.is_in_flight() && request.is_single >= is_single;
                let in_flight = self.requests.iter().filter(is_counted).count();
                if len == 0 || in_flight >= most || held + len > BUDGET {
                    return;
                }
                let is_continued = is_single && self.asked < self.stream_end;
                self.stream_end = match (is_single, is_continued) {
                    (true, true) => self.stream_end,
                    (true, false) => {
                        let end = (self.asked + len).saturating_add(self.pace.stream_len());
                        self.pace.began_stream();
                        end
                    }
                    (false, _) if self.pace.opening.is_some() => self.stream_end,
                    (false, _) => 0,
                };
                self.sent += u64::from(!is_continued);
                let answered = self.answered(is_continued);
                self.requests.push_back(Request {
                    began: self.now,
                    is_continued,
                    is_single,
                    answered,
                    before: match self.world.server {
                        Server::Unpacking(_) if !is_continued => self.asked,
                        _ => 0,
                    },
                    start: self.asked,
                    len,
                    received: 0,
                    read: 0,
                });
                self.pace.launched();
                self.asked += len;
            }
        }

        /// When the answer to a request that is sent now begins, also of those that wait with it.
        fn answered(&mut self, is_continued: bool) -> u64 {
            let sent = self.now + self.world.round_trip;
            if is_continued {
                return self.now;
            }
            match self.world.server {
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

        /// Lets the server unpack for a millisecond; returns how many bytes it has for each request that flows.
        fn unpack(&mut self) -> u64 {
            let Server::Unpacking(speed) = self.world.server else {
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
            let (world, now) = (self.world, self.now);
            let flows = |request: &Request| request.is_in_flight() && now > request.answered;
            let mut flowing = self
                .requests
                .iter()
                .filter(|request| flows(request))
                .count();
            let (mut left, mut landings) = (world.in_all, Vec::new());
            for request in self.requests.iter_mut().filter(|request| flows(request)) {
                let share = (left / flowing as u64)
                    .min(world.per_connection)
                    .min(unpacked);
                let came = share.min(request.len - request.received);
                (left, flowing) = (left - came, flowing - 1);
                request.received += came;
                self.received += came;
                if !request.is_in_flight() {
                    landings.push(Landing {
                        start: request.start,
                        len: request.len,
                        took: ms(now - request.began),
                        latency: Some(ms(request.answered - request.began)),
                        cost: Some(ms(
                            (request.answered - request.began).saturating_sub(world.round_trip)
                        )),
                    });
                }
            }
            for landing in landings {
                self.pace.landed(self.moment(), landing);
            }
        }

        fn consume(&mut self) {
            let mut appetite = self.world.reader;
            while appetite > 0 {
                let Some(front) = self
                    .requests
                    .front_mut()
                    .filter(|front| !front.is_in_flight())
                else {
                    self.waited += u64::from(appetite == self.world.reader);
                    return;
                };
                let bite = appetite.min(front.len - front.read);
                front.read += bite;
                appetite -= bite;
                self.read += bite;
                if front.read == front.len {
                    self.requests.pop_front();
                }
            }
        }
    }

    const LOOPBACK: World = World {
        round_trip: 0,
        per_connection: 1_000_000,
        in_all: 1_500_000,
        reader: 500_000,
        len: 400 * MIB,
        server: Server::Ready,
    };

    #[test]
    fn serial_server_gets_one_request_at_once() {
        let world = World {
            server: Server::Serial(500),
            len: 240 * MIB,
            ..LOOPBACK
        };
        let transfer = world.transfer(None);
        assert!(transfer.pace.is_serial() && transfer.pace.is_single());
        assert_eq!((transfer.most_requests, transfer.sent), (2, 2));
        assert!(transfer.pace.is_surely_serial());
        let short = World {
            len: 2 * MIB,
            ..world
        };
        let transfer = short.transfer(None);
        assert!(transfer.pace.is_serial() && !transfer.pace.is_surely_serial());
    }

    #[test]
    fn server_that_thinks_about_all_requests_at_once_gets_many() {
        let world = World {
            server: Server::Parallel(500),
            per_connection: 20_000,
            ..LOOPBACK
        };
        let transfer = world.transfer(None);
        assert!(!transfer.pace.is_serial());
        assert_eq!(transfer.settled(), 16);
    }

    #[test]
    fn server_that_unpacks_from_the_front_gets_one_request() {
        let world = World {
            server: Server::Unpacking(240_000),
            len: 240 * MIB,
            ..LOOPBACK
        };
        let transfer = world.transfer(None);
        assert!(transfer.pace.is_single() && !transfer.pace.is_serial());

        assert!(transfer.sent < 20, "{} requests", transfer.sent);
        let stream = world.len / 240_000;
        assert!(transfer.now < stream * 5 / 4, "{} ms", transfer.now);
    }

    #[test]
    fn stream_asks_for_four_times_as_much_each_time() {
        let world = World {
            server: Server::Serial(500),
            len: 16_384 * MIB,
            reader: 100_000,
            ..LOOPBACK
        };
        let transfer = world.transfer(None);
        // 1 GiB, 4 GiB, and the rest; one more found out that the server is serial.
        assert_eq!(transfer.sent, 4);
    }

    #[test]
    fn a_reader_that_never_waits_gets_no_more_connections() {
        let (transfer, longer) = LOOPBACK.run();
        assert_eq!(transfer.most_requests, FIRST);
        assert!(longer <= 5, "{longer} %");
    }

    #[test]
    fn what_begins_fast_is_not_taken_for_slow() {
        // The reader takes what it gets at once, until what it hands on to is busy.
        let world = World {
            per_connection: 200_000,
            in_all: 800_000,
            reader: 5_000_000,
            len: 64 * MIB,
            ..LOOPBACK
        };
        let (transfer, _) = world.run();
        assert!(transfer.now < 100, "{} ms", transfer.now);
        assert_eq!(transfer.most_requests, FIRST);
    }

    #[test]
    fn connections_that_are_no_longer_needed_are_given_up_soon() {
        let mut pace = Pace::new(16, 8 * MIB, BUDGET, None);
        for now in [10, 20] {
            pace.look(Moment {
                now: ms(now),
                waited: ms(now),
                in_flight: 16,
                ..Moment::default()
            });
        }
        assert_eq!(pace.requests(), 16);
        // From now on the reader takes 100 bytes a millisecond, and each request brings 50.
        for now in 3..=5 {
            let moment = Moment {
                now: ms(now * 100),
                waited: ms(20),
                received: now * 10_000,
                read: now * 10_000,
                in_flight: 2,
                is_cheap: false,
            };
            pace.landed(
                moment,
                Landing {
                    start: 0,
                    len: 500,
                    took: ms(10),
                    latency: Some(ms(0)),
                    cost: None,
                },
            );
            pace.look(moment);
        }
        assert_eq!(pace.requests(), FIRST);
    }

    #[test]
    fn no_more_is_asked_for_than_three_times_what_may_be_in_flight() {
        let mut pace = Pace::new(16, 2 * MIB, BUDGET, None);
        assert_eq!(pace.ahead(), 3 * MIB);
        for _ in 0..10 {
            pace.launched();
        }
        assert_eq!(pace.ahead(), 24 * MIB);
    }

    #[test]
    fn slow_connections_are_many_at_once() {
        let world = World {
            per_connection: 60_000,
            ..LOOPBACK
        };
        let (transfer, longer) = world.run();
        assert_eq!(transfer.settled(), 16);
        assert!(transfer.grown <= 30, "after {} ms", transfer.grown);
        assert!(longer <= 10, "{longer} %");
    }

    #[test]
    fn a_long_round_trip_is_filled_before_it_is_over() {
        // A window of 4 MiB is what a connection can have on its way.
        let world = World {
            round_trip: 40,
            per_connection: 4 * MIB / 40,
            ..LOOPBACK
        };
        let (transfer, longer) = world.run();
        assert_eq!(transfer.settled(), 16);
        assert!(transfer.grown <= 40, "after {} ms", transfer.grown);
        assert!(longer <= 10, "{longer} %");
    }

    #[test]
    fn connections_that_bring_nothing_are_given_up() {
        let world = World {
            round_trip: 5,
            per_connection: 200_000,
            in_all: 200_000,
            len: 4096 * MIB,
            ..LOOPBACK
        };
        let (transfer, longer) = world.run();
        assert_eq!(transfer.most_requests, 16);
        assert_eq!(transfer.settled(), FIRST);
        assert!(longer <= 10, "{longer} %");
    }

    #[test]
    fn what_was_given_up_wrongly_is_not_given_up_for_long() {
        let world = World {
            per_connection: 60_000,
            reader: 2_000_000,
            len: 8192 * MIB,
            ..LOOPBACK
        };
        let (transfer, longer) = world.run();
        assert!(transfer.pace.has_tried);
        assert_eq!(transfer.settled(), 16);
        assert!(longer <= 5, "{longer} %");
    }

    #[test]
    fn a_slow_reader_gets_as_many_connections_as_it_needs() {
        let world = World {
            per_connection: 20_000,
            reader: 100_000,
            ..LOOPBACK
        };
        let (transfer, longer) = world.run();
        assert_eq!(transfer.settled(), 8);
        assert!(longer <= 5, "{longer} %");
    }

    fn measured(latency: u64, took: u64, len: u64) -> u64 {
        let mut pace = Pace::new(16, 64 * MIB, 1 << 40, None);
        let landing = Landing {
            start: 0,
            len,
            took: ms(took),
            latency: Some(ms(latency)),
            cost: None,
        };
        pace.landed(Moment::default(), landing);
        pace.chunk_len()
    }

    #[test]
    fn a_chunk_takes_eight_times_as_long_as_a_request_and_is_a_power_of_two() {
        assert_eq!(measured(40, 140, 5_000_000), 8 * MIB);
        assert_eq!(measured(40, 140, 6_000_000), 16 * MIB);
        assert_eq!(measured(40, 40, 5_000_000), 64 * MIB);
        assert_eq!(measured(0, 100, 5 * MIB), 2 * MIB, "50 ms");
        assert_eq!(measured(1, 101, MIB), MIB, "and is worth asking for");
    }

    #[test]
    fn chunks_double_until_something_is_measured() {
        let mut pace = Pace::new(2, 2 * MIB, 1 << 40, None);
        let mut lens = Vec::new();
        for _ in 0..5 {
            lens.push(pace.chunk_len());
            pace.launched();
        }
        assert_eq!(lens, [MIB / 4, MIB / 2, MIB, 2 * MIB, 2 * MIB]);
    }

    #[test]
    fn the_budget_holds_two_chunks_more_than_are_in_flight() {
        for (connections, budget) in [(1, 16), (4, 16), (16, 64), (64, 16), (256, 64)] {
            let mut pace = Pace::new(connections, 8 * MIB, budget * MIB, None);
            for _ in 0..10 {
                pace.launched();
            }
            let held = (connections as u64 + 2) * pace.chunk_len();
            assert!(held <= budget * MIB, "{connections} with {budget} MiB");
        }
        assert!(Pace::new(1, 1, 0, None).chunk_len() > 0);
    }

    #[test]
    fn no_limit_is_exceeded() {
        for most in [1, 2, 3, 5] {
            let mut pace = Pace::new(most, MIB, BUDGET, None);
            for now in 0..100 {
                pace.look(Moment {
                    now: ms(now * 10),
                    waited: ms(now * 10),
                    in_flight: 100,
                    ..Moment::default()
                });
            }
            assert_eq!(pace.requests(), most);
        }
    }
}
