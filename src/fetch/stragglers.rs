//! Detection of straggling requests; pure.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::{MinSpeed, per_second};

pub(super) const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum number of cuts of one chunk's request, because more do not help.
const MAX_CUTS: u32 = 3;

/// Ratio of another request's speed to a slow one's from which the slow one is a straggler.
const MIN_SPEED_RATIO: u64 = 2;

pub(super) const HEDGE_FACTOR: u32 = 3;

/// Minimum multiple of its peers' duration before a request is cut, because a slow server answers all late.
const CUT_WAIT_FACTOR: u32 = 2;

/// Minimum delay before a hedge, because a server may pause for a moment.
pub(super) const MIN_HEDGE_DELAY: Duration = Duration::from_millis(500);

const MIN_PEERS: usize = 3;
const MAX_PEERS: usize = 16;

/// Detects stragglers among the requests in flight, which have numbers.
///
/// A request is cut and sent again for the rest if it is slower than [`MinSpeed`], over the time given there
/// or twice its peers' duration if longer. Another request, in flight or completed meanwhile, must be that
/// fast and twice as fast as this one. So requests on a uniformly slow link are never cut. A request without
/// an answer is cut only after three others were answered sooner, because a server may answer in turns.
/// A request is hedged if nothing is left to request, after half a second and three times its peers' median.
/// Only observed time counts. A process that was stopped or had no CPU time sees no late requests.
#[derive(Debug, Default)]
pub(super) struct StragglerDetector {
    min_speed: MinSpeed,
    requests: BTreeMap<u64, Request>,
    /// Durations of the last requests, newest first.
    peers: VecDeque<Duration>,
    last_check: Duration,
}

#[derive(Clone, Copy, Debug, Default)]
struct Request {
    sent_at: Duration,
    age: Duration,
    /// Bytes received at the last speed sample, and the time since.
    received: u64,
    since_sample: Duration,
    /// Speed in bytes per second of the fastest request that completed meanwhile.
    fastest_peer: u64,
    cuts: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum StragglerAction {
    /// Drop it and request the rest again.
    Cut,
    /// Request the rest a second time. Repeated at each check while the request is late.
    Hedge,
}

impl StragglerDetector {
    pub(super) fn new(min_speed: MinSpeed) -> Self {
        Self {
            min_speed,
            ..Self::default()
        }
    }

    pub(super) fn on_sent(&mut self, number: u64, now: Duration) {
        let request = Request {
            sent_at: now,
            ..Request::default()
        };
        self.requests.insert(number, request);
    }

    /// Records that a request ended. `came` holds its bytes and duration, unless it failed.
    pub(super) fn on_completed(&mut self, number: u64, came: Option<(u64, Duration)>) {
        self.requests.remove(&number);
        let Some((len, took)) = came else {
            return;
        };
        self.peers.truncate(MAX_PEERS - 1);
        self.peers.push_front(took);
        let speed = per_second(len, took);
        for request in self.requests.values_mut() {
            request.fastest_peer = request.fastest_peer.max(speed);
        }
    }

    pub(super) fn check(
        &mut self,
        now: Duration,
        received: impl Fn(u64) -> u64,
        is_all_requested: bool,
    ) -> Vec<(u64, StragglerAction)> {
        let elapsed = now.saturating_sub(self.last_check).min(CHECK_INTERVAL * 2);
        self.last_check = now;
        for request in self.requests.values_mut() {
            let elapsed = elapsed.min(now.saturating_sub(request.sent_at));
            request.age += elapsed;
            request.since_sample += elapsed;
        }
        let mut actions = self.find_slow(&received);
        if is_all_requested {
            actions.extend(
                self.find_late()
                    .map(|number| (number, StragglerAction::Hedge)),
            );
        }
        actions
    }

    fn find_slow(&mut self, received: &impl Fn(u64) -> u64) -> Vec<(u64, StragglerAction)> {
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
                (number, per_second(came, request.since_sample))
            })
            .collect();
        let wait = wait.max(self.median_duration().unwrap_or_default() * CUT_WAIT_FACTOR);
        let mut actions = Vec::new();
        for &(number, speed) in &speeds {
            let others = speeds.iter().filter(|&&(other, _)| other != number);
            let fastest = others.map(|&(_, speed)| speed).max().unwrap_or(0);
            let Some(request) = self.requests.get_mut(&number) else {
                continue;
            };
            if request.since_sample < wait {
                continue;
            }
            let fastest = fastest.max(request.fastest_peer);
            // A request without an answer may only be queued, while too few durations of peers are known.
            let may_wait = received(number) == 0 && self.peers.len() < MIN_PEERS;
            let is_exception = fastest >= least && fastest / MIN_SPEED_RATIO >= speed && !may_wait;
            if speed < least && is_exception && request.cuts < MAX_CUTS {
                request.cuts += 1;
                actions.push((number, StragglerAction::Cut));
            }
            request.received = received(number);
            request.since_sample = Duration::ZERO;
        }
        actions
    }

    fn find_late(&self) -> impl Iterator<Item = u64> {
        let limit = self
            .median_duration()
            .map(|took| (took * HEDGE_FACTOR).max(MIN_HEDGE_DELAY));
        self.requests
            .iter()
            .filter(move |(_, request)| limit.is_some_and(|limit| request.age >= limit))
            .map(|(&number, _)| number)
    }

    fn median_duration(&self) -> Option<Duration> {
        let mut peers: Vec<Duration> = self.peers.iter().copied().collect();
        peers.sort_unstable();
        let median = peers.get(peers.len() / 2).copied();
        median.filter(|_| peers.len() >= MIN_PEERS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn detector(bytes_per_second: u64, wait: u64) -> StragglerDetector {
        StragglerDetector::new(MinSpeed {
            bytes_per_second,
            wait: ms(wait),
        })
    }

    fn watch(
        detector: &mut StragglerDetector,
        (from, until): (u64, u64),
        speed: impl Fn(u64) -> u64,
        is_all_requested: bool,
    ) -> Vec<(u64, u64, StragglerAction)> {
        let mut found = Vec::new();
        for now in (from..=until).step_by(100) {
            let received = |number| speed(number) * now / 1000;
            let actions = detector.check(ms(now), received, is_all_requested);
            found.extend(actions.iter().map(|&(number, what)| (now, number, what)));
        }
        found
    }

    #[test]
    fn slow_request_among_fast_ones_is_cut_up_to_the_limit() {
        let mut detector = detector(64 * KIB, 1000);
        (0..4).for_each(|number| detector.on_sent(number, ms(0)));
        let speed = |number| if number == 2 { KIB } else { 128 * KIB };
        let cuts = watch(&mut detector, (0, 10_000), speed, false);
        let expected = [1000, 2000, 3000].map(|at| (at, 2, StragglerAction::Cut));
        assert_eq!(cuts, expected);
    }

    #[test]
    fn uniformly_slow_link_is_not_cut() {
        let mut detector = detector(64 * KIB, 1000);
        (0..4).for_each(|number| detector.on_sent(number, ms(0)));
        let speed = |number| 10 * KIB * (number + 1);
        assert_eq!(watch(&mut detector, (0, 10_000), speed, false), []);
    }

    #[test]
    fn straggler_is_compared_with_requests_completed_meanwhile() {
        let mut detector = detector(64 * KIB, 1000);
        (0..4).for_each(|number| detector.on_sent(number, ms(0)));
        (1..3).for_each(|number| detector.on_completed(number, Some((1 << 20, ms(100)))));
        let cuts = watch(&mut detector, (0, 1000), |_| 0, false);
        assert_eq!(cuts, [], "it may wait for its turn");
        detector.on_completed(3, Some((1 << 20, ms(100))));
        let cuts = watch(&mut detector, (1100, 2000), |_| 0, false);
        assert_eq!(cuts, [(2000, 0, StragglerAction::Cut)]);
        detector.on_completed(0, None);
        detector.on_sent(2, ms(1000));
        let cuts = watch(&mut detector, (1100, 5000), |_| 0, false);
        assert_eq!(cuts, [], "nothing came since");
    }

    #[test]
    fn slow_server_gets_twice_its_usual_time_before_a_cut() {
        let mut detector = detector(64 * KIB, 1000);
        for number in 1..=3 {
            detector.on_sent(number, ms(0));
            detector.on_completed(number, Some((1 << 20, ms(1500))));
        }
        detector.on_sent(0, ms(0));
        detector.on_sent(4, ms(0));
        detector.on_completed(4, Some((1 << 20, ms(1500))));
        let cuts = watch(&mut detector, (0, 3500), |_| 0, false);
        assert_eq!(cuts, [(3000, 0, StragglerAction::Cut)]);
    }

    #[test]
    fn zero_minimum_speed_cuts_nothing() {
        for (speed, wait) in [(0, 1000), (64 * KIB, 0)] {
            let mut detector = detector(speed, wait);
            detector.on_sent(0, ms(0));
            detector.on_sent(1, ms(0));
            detector.on_completed(1, Some((1 << 20, ms(100))));
            assert_eq!(watch(&mut detector, (0, 5000), |_| 0, false), []);
        }
    }

    fn with_peers(peers: &[u64]) -> StragglerDetector {
        let mut detector = detector(0, 0);
        for (number, &took) in (1..).zip(peers) {
            detector.on_sent(number, ms(0));
            detector.on_completed(number, Some((1 << 20, ms(took))));
        }
        detector.on_sent(0, ms(0));
        detector
    }

    fn first_hedge(peers: &[u64], is_all_requested: bool) -> Option<u64> {
        let mut detector = with_peers(peers);
        let found = watch(&mut detector, (0, 10_000), |_| 0, is_all_requested);
        found.first().map(|&(now, number, action)| {
            assert_eq!((number, action), (0, StragglerAction::Hedge));
            now
        })
    }

    #[test]
    fn last_request_is_hedged_after_three_times_the_median() {
        assert_eq!(first_hedge(&[300, 400, 9000, 400, 500], true), Some(1200));
        assert_eq!(first_hedge(&[30, 40, 50], true), Some(500));
        assert_eq!(first_hedge(&[30, 40, 50], false), None);
        assert_eq!(first_hedge(&[30, 40], true), None, "too few to compare");
    }

    #[test]
    fn only_the_most_recent_peers_count() {
        let mut peers = vec![5000; 20];
        peers.extend([20; 16]);
        assert_eq!(first_hedge(&peers, true), Some(500));
    }

    #[test]
    fn unobserved_time_makes_no_request_late() {
        let mut detector = with_peers(&[30, 40, 50]);
        assert_eq!(detector.check(ms(100), |_| 0, true), []);
        assert_eq!(detector.check(ms(60_000), |_| 0, true), []);
        let found = watch(&mut detector, (60_100, 60_500), |_| 0, true);
        assert_eq!(found.first(), Some(&(60_200, 0, StragglerAction::Hedge)));
    }
}
