//! Which requests have fallen behind, and what to do about it; pure.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::{MinSpeed, per_second};

/// How often to look.
pub(super) const TICK: Duration = Duration::from_millis(100);

/// How often one chunk's request is cut, at the most: where the next one is no faster either,
/// asking again and again helps nobody.
const MOST_CUTS: u32 = 3;

/// How many times as fast another request must be for a slow one to be the exception.
const FASTER: u64 = 2;

/// How many times as long as its peers a request takes before it is sent a second time.
pub(super) const LONGER: u32 = 3;

/// How many times as long as its peers a request takes at least before it is cut: where servers
/// think for long, all of them do.
const PATIENT: u32 = 2;

/// No request is sent a second time before this: a server may think for a moment.
pub(super) const HEDGE_AFTER: Duration = Duration::from_millis(500);

/// Peers of which the time is known, at the least and at the most.
const FEWEST_PEERS: usize = 3;
const MOST_PEERS: usize = 16;

/// Watches over requests in flight, each known by its number.
///
/// A request is cut, to be sent again for the rest, when it is slower than [`MinSpeed`] over the
/// time given there, or over twice the time that its peers take if that is longer, while another
/// one in flight, or one that came during its life, was at least that fast and twice as fast as
/// this one. So a link that is slow as a whole is left in peace. A request without an answer is cut only
/// when three others are known to have been answered sooner, because a server may answer in turns.
///
/// A request is hedged when nothing is left to ask for and it takes three times as long as its
/// peers did (the median of the last ones), and half a second.
///
/// Only time counts in which someone looked: when the whole process was stopped, or starved of
/// processors, nobody fell behind.
#[derive(Debug)]
pub(super) struct Laggards {
    min_speed: MinSpeed,
    requests: BTreeMap<u64, Request>,
    /// How long the last ones took.
    peers: VecDeque<Duration>,
    looked: Duration,
}

#[derive(Clone, Copy, Debug, Default)]
struct Request {
    began: Duration,
    age: Duration,
    /// Bytes that had come when its speed was taken last, and how long ago that is.
    received: u64,
    since: Duration,
    /// Bytes a second of the fastest that came while it was in flight.
    fastest_peer: u64,
    cuts: u32,
}

/// What to do about a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    /// Drop it and ask for the rest anew.
    Cut,
    /// Ask for the rest a second time. Said again as long as it holds.
    Hedge,
}

impl Laggards {
    pub(super) fn new(min_speed: MinSpeed) -> Self {
        Self {
            min_speed,
            requests: BTreeMap::new(),
            peers: VecDeque::new(),
            looked: Duration::ZERO,
        }
    }

    /// A request was sent at `now`.
    pub(super) fn launched(&mut self, number: u64, now: Duration) {
        let request = Request {
            began: now,
            ..Request::default()
        };
        self.requests.insert(number, request);
    }

    /// A request ended; `came` says how many bytes took how long, unless it failed.
    pub(super) fn landed(&mut self, number: u64, came: Option<(u64, Duration)>) {
        self.requests.remove(&number);
        let Some((len, took)) = came else {
            return;
        };
        self.peers.truncate(MOST_PEERS - 1);
        self.peers.push_front(took);
        let speed = per_second(len, took);
        for request in self.requests.values_mut() {
            request.fastest_peer = request.fastest_peer.max(speed);
        }
    }

    /// What to do at `now`, when `received` tells how many bytes have come by request, and
    /// `is_all_asked` whether nothing is left to ask for.
    pub(super) fn look(
        &mut self,
        now: Duration,
        received: impl Fn(u64) -> u64,
        is_all_asked: bool,
    ) -> Vec<(u64, Verdict)> {
        let passed = now.saturating_sub(self.looked).min(TICK * 2);
        self.looked = now;
        for request in self.requests.values_mut() {
            let passed = passed.min(now.saturating_sub(request.began));
            request.age += passed;
            request.since += passed;
        }
        let mut verdicts = self.cut(&received);
        if is_all_asked {
            verdicts.extend(self.late().map(|number| (number, Verdict::Hedge)));
        }
        verdicts
    }

    fn cut(&mut self, received: &impl Fn(u64) -> u64) -> Vec<(u64, Verdict)> {
        let MinSpeed {
            bytes_per_second: least,
            wait,
        } = self.min_speed;
        if least == 0 || wait.is_zero() {
            return Vec::new();
        }
        let speeds: Vec<(u64, u64)> = self
            .requests
            .iter()
            .map(|(&number, request)| {
                let came = received(number).saturating_sub(request.received);
                (number, per_second(came, request.since))
            })
            .collect();
        let wait = wait.max(self.usual().unwrap_or_default() * PATIENT);
        let mut verdicts = Vec::new();
        for &(number, speed) in &speeds {
            let others = speeds.iter().filter(|&&(other, _)| other != number);
            let fastest = others.map(|&(_, speed)| speed).max().unwrap_or(0);
            let Some(request) = self.requests.get_mut(&number) else {
                continue;
            };
            if request.since < wait {
                continue;
            }
            let fastest = fastest.max(request.fastest_peer);
            // Without an answer it may only wait for its turn, as long as it is not known how long those
            // of others took.
            let may_wait = received(number) == 0 && self.peers.len() < FEWEST_PEERS;
            let is_exception = fastest >= least && fastest / FASTER >= speed && !may_wait;
            if speed < least && is_exception && request.cuts < MOST_CUTS {
                request.cuts += 1;
                verdicts.push((number, Verdict::Cut));
            }
            request.received = received(number);
            request.since = Duration::ZERO;
        }
        verdicts
    }

    /// The requests that take far longer than others did.
    fn late(&self) -> impl Iterator<Item = u64> {
        let limit = self.usual().map(|took| (took * LONGER).max(HEDGE_AFTER));
        self.requests
            .iter()
            .filter(move |(_, request)| limit.is_some_and(|limit| request.age >= limit))
            .map(|(&number, _)| number)
    }

    /// How long requests take: the median of the last ones, if there are enough.
    fn usual(&self) -> Option<Duration> {
        let mut peers: Vec<Duration> = self.peers.iter().copied().collect();
        peers.sort_unstable();
        let median = peers.get(peers.len() / 2).copied();
        median.filter(|_| peers.len() >= FEWEST_PEERS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn laggards(bytes_per_second: u64, wait: u64) -> Laggards {
        Laggards::new(MinSpeed {
            bytes_per_second,
            wait: ms(wait),
        })
    }

    /// Looks ten times a second up to `until`, with bytes a second by request.
    fn watch(
        laggards: &mut Laggards,
        (from, until): (u64, u64),
        speed: impl Fn(u64) -> u64,
        is_all_asked: bool,
    ) -> Vec<(u64, u64, Verdict)> {
        let mut said = Vec::new();
        for now in (from..=until).step_by(100) {
            let received = |number| speed(number) * now / 1000;
            let verdicts = laggards.look(ms(now), received, is_all_asked);
            said.extend(verdicts.iter().map(|&(number, what)| (now, number, what)));
        }
        said
    }

    #[test]
    fn what_crawls_among_the_fast_is_cut_a_few_times() {
        let mut laggards = laggards(64 * KIB, 1000);
        (0..4).for_each(|number| laggards.launched(number, ms(0)));
        let speed = |number| if number == 2 { KIB } else { 128 * KIB };
        let cuts = watch(&mut laggards, (0, 10_000), speed, false);
        let expected = [1000, 2000, 3000].map(|at| (at, 2, Verdict::Cut));
        assert_eq!(cuts, expected);
    }

    #[test]
    fn a_slow_link_is_left_in_peace() {
        let mut laggards = laggards(64 * KIB, 1000);
        (0..4).for_each(|number| laggards.launched(number, ms(0)));
        let speed = |number| 10 * KIB * (number + 1);
        assert_eq!(watch(&mut laggards, (0, 10_000), speed, false), []);
    }

    #[test]
    fn what_is_left_behind_is_held_against_those_that_came_meanwhile() {
        let mut laggards = laggards(64 * KIB, 1000);
        (0..4).for_each(|number| laggards.launched(number, ms(0)));
        (1..3).for_each(|number| laggards.landed(number, Some((1 << 20, ms(100)))));
        let cuts = watch(&mut laggards, (0, 1000), |_| 0, false);
        assert_eq!(cuts, [], "it may wait for its turn");
        laggards.landed(3, Some((1 << 20, ms(100))));
        let cuts = watch(&mut laggards, (1100, 2000), |_| 0, false);
        assert_eq!(cuts, [(2000, 0, Verdict::Cut)]);
        laggards.landed(0, None);
        laggards.launched(2, ms(1000));
        let cuts = watch(&mut laggards, (1100, 5000), |_| 0, false);
        assert_eq!(cuts, [], "nothing came since");
    }

    #[test]
    fn a_server_that_thinks_for_long_is_given_the_time_that_it_took_before() {
        let mut laggards = laggards(64 * KIB, 1000);
        for number in 1..=3 {
            laggards.launched(number, ms(0));
            laggards.landed(number, Some((1 << 20, ms(1500))));
        }
        laggards.launched(0, ms(0));
        laggards.launched(4, ms(0));
        laggards.landed(4, Some((1 << 20, ms(1500))));
        let cuts = watch(&mut laggards, (0, 3500), |_| 0, false);
        assert_eq!(cuts, [(3000, 0, Verdict::Cut)]);
    }

    #[test]
    fn zero_cuts_nothing() {
        for (speed, wait) in [(0, 1000), (64 * KIB, 0)] {
            let mut laggards = laggards(speed, wait);
            laggards.launched(0, ms(0));
            laggards.launched(1, ms(0));
            laggards.landed(1, Some((1 << 20, ms(100))));
            assert_eq!(watch(&mut laggards, (0, 5000), |_| 0, false), []);
        }
    }

    fn last_of(peers: &[u64]) -> Laggards {
        let mut laggards = laggards(0, 0);
        for (number, &took) in (1..).zip(peers) {
            laggards.launched(number, ms(0));
            laggards.landed(number, Some((1 << 20, ms(took))));
        }
        laggards.launched(0, ms(0));
        laggards
    }

    fn first_hedge(peers: &[u64], is_all_asked: bool) -> Option<u64> {
        let mut laggards = last_of(peers);
        let said = watch(&mut laggards, (0, 10_000), |_| 0, is_all_asked);
        said.first().map(|&(now, number, verdict)| {
            assert_eq!((number, verdict), (0, Verdict::Hedge));
            now
        })
    }

    #[test]
    fn the_last_one_is_hedged_when_it_takes_three_times_as_long() {
        assert_eq!(first_hedge(&[300, 400, 9000, 400, 500], true), Some(1200));
        assert_eq!(first_hedge(&[30, 40, 50], true), Some(500));
        assert_eq!(first_hedge(&[30, 40, 50], false), None);
        assert_eq!(first_hedge(&[30, 40], true), None, "too few to compare");
    }

    #[test]
    fn only_the_last_peers_count() {
        let mut peers = vec![5000; 20];
        peers.extend([20; 16]);
        assert_eq!(first_hedge(&peers, true), Some(500));
    }

    #[test]
    fn time_in_which_nobody_looked_makes_nobody_late() {
        let mut laggards = last_of(&[30, 40, 50]);
        assert_eq!(laggards.look(ms(100), |_| 0, true), []);
        assert_eq!(laggards.look(ms(60_000), |_| 0, true), []);
        let said = watch(&mut laggards, (60_100, 60_500), |_| 0, true);
        assert_eq!(said.first(), Some(&(60_200, 0, Verdict::Hedge)));
    }
}
