//! Speed and failures of mirrors, and the choice among them; pure but for the caller's clock.

use std::time::Duration;

use tokio::time::Instant;

use crate::base::stall_timeout::MIN_BYTES_PER_SECOND;
use crate::source::retry::FailureBlock;

/// Minimum number of KiB from which a speed is measured.
const MIN_SAMPLE_KIB: u64 = 64;

/// Ratio of speeds from which the lower one is slow. A slow mirror gets no reads.
const SLOW_FACTOR: u64 = 4;

/// Number of reads after which a mirror can count as slow. The first ones come alone, and may measure too little.
const MIN_SAMPLES: u32 = 4;

/// Time without reads after which a mirror gets one while others are busy, so that its speed is measured again.
const PROBE_INTERVAL: Duration = Duration::from_secs(30);

/// Time of a read before its speed is compared with that of another mirror.
const MIN_OBSERVED_TIME: Duration = Duration::from_millis(150);

/// Time of a read after which its speed is the first measurement of its mirror, so that others need not wait for its end.
const FIRST_MEASUREMENT_TIME: Duration = Duration::from_millis(100);

/// Ratio of the times from which a read continues at the faster mirror, and the time that this may cost.
const SWITCH_FACTOR: u32 = 3;
const SWITCH_COST: Duration = Duration::from_millis(50);

/// Time without bytes, in usual latencies and at least, after which a read continues at another mirror.
const SILENCE_FACTOR: u32 = 4;
const MIN_SILENCE: Duration = Duration::from_millis(500);

/// Measured load and speed of one mirror.
#[derive(Clone, Debug, Default)]
pub(super) struct MirrorLoad {
    latency: Duration,
    /// Nanoseconds for each KiB of all its reads together; `None` before the first measurement.
    nanos_per_kib: Option<u64>,
    /// Number of measurements.
    samples: u32,
    /// Number of reads in flight, which the caller counts.
    pub(super) in_flight: u32,
    /// Whether this read must not use it, as the caller sets it.
    pub(super) is_excluded: bool,
    last_read: Option<Instant>,
    block: FailureBlock,
}

impl MirrorLoad {
    pub(super) fn new(latency: Duration) -> Self {
        Self {
            latency,
            ..Self::default()
        }
    }

    pub(super) fn record_success(&mut self, started: Instant) {
        self.block.record_success(started);
        self.last_read = Some(Instant::now());
    }

    /// Records `len` bytes of one of `in_flight` reads, which came in `elapsed` with this latency. Few bytes are no
    /// measurement.
    pub(super) fn record_speed(
        &mut self,
        len: u64,
        elapsed: Duration,
        latency: Option<Duration>,
        in_flight: u32,
    ) {
        if let Some(latency) = latency {
            self.latency = (self.latency * 2 + latency) / 3;
        }
        let kib = len / 1024;
        if kib < MIN_SAMPLE_KIB {
            return;
        }
        // The first bytes came with the latency, so at least a part of the time is transfer.
        let transfer = elapsed.saturating_sub(latency.unwrap_or_default());
        let nanos = saturating_u64(transfer.max(elapsed / 8).as_nanos());
        let measured = nanos / kib / u64::from(in_flight.max(1));
        let known = self.nanos_per_kib.unwrap_or(measured);
        self.nanos_per_kib = Some((known / 3 * 2 + measured / 3).max(1));
        self.samples = self.samples.saturating_add(1);
    }

    /// Records the speed of one of `in_flight` reads that have not ended, if there is no measurement.
    pub(super) fn record_progress(&mut self, progress: &Progress, in_flight: u32) {
        if self.nanos_per_kib.is_none() && progress.elapsed >= FIRST_MEASUREMENT_TIME {
            self.record_speed(progress.received, progress.elapsed, None, in_flight);
        }
    }

    /// Blocks the mirror for a while, at least for `min_block`. After that it gets one read, as if it were new.
    pub(super) fn record_failure(&mut self, now: Instant, min_block: Duration) {
        (self.nanos_per_kib, self.samples) = (None, 0);
        self.block.record_failure(now, min_block);
    }

    pub(super) fn is_usable(&self, now: Instant) -> bool {
        !self.is_excluded && self.block.until(now).is_none()
    }

    /// Time without bytes after which a read should continue elsewhere.
    pub(super) fn max_silence(&self) -> Duration {
        (self.latency * SILENCE_FACTOR).max(MIN_SILENCE)
    }

    /// Rank for one more read of `len` bytes. `best` is the lowest cost of a usable mirror.
    fn rank(&self, len: u64, best: u64, may_probe: bool, now: Instant) -> Rank {
        let is_fast = self.nanos_per_kib.map_or(self.in_flight == 0, |own| {
            self.samples < MIN_SAMPLES || own <= best.saturating_mul(SLOW_FACTOR)
        });
        let is_old = |last| now.saturating_duration_since(last) >= PROBE_INTERVAL;
        let is_probed = may_probe && self.in_flight == 0 && self.last_read.is_some_and(is_old);
        let cost = self.nanos_per_kib.unwrap_or(best);
        let nanos = (len / 1024).saturating_mul(cost);
        let nanos = nanos.saturating_mul(u64::from(self.in_flight) + 1);
        let estimate = self.latency + Duration::from_nanos(if is_probed { 0 } else { nanos });
        (self.block.until(now), !is_fast && !is_probed, estimate)
    }
}

/// End of the block of a mirror, whether it is too slow, and the estimated time. The lowest rank is the best.
type Rank = (Option<Instant>, bool, Duration);

/// Returns the rank of each mirror for one more read of `len` bytes. With `may_probe`, slow ones are measured again.
fn ranks(
    loads: &[MirrorLoad],
    len: u64,
    may_probe: bool,
    now: Instant,
) -> impl Iterator<Item = (usize, Rank)> {
    let usable = loads.iter().filter(|load| load.is_usable(now));
    let best = usable.filter_map(|load| load.nanos_per_kib).min();
    let best = best.unwrap_or(0);
    let included = loads
        .iter()
        .enumerate()
        .filter(|(_, load)| !load.is_excluded);
    included.map(move |(number, load)| (number, load.rank(len, best, may_probe, now)))
}

/// Chooses the mirror for a read of `len` bytes. If all failed, it is the one that may be tried first. `None` if all
/// are excluded.
pub(super) fn choose(loads: &[MirrorLoad], len: u64, now: Instant) -> Option<usize> {
    // A lone read does not wait for a measurement.
    let is_busy = loads.iter().any(|load| load.in_flight > 0);
    let best = ranks(loads, len, is_busy, now).min_by_key(|&(_, rank)| rank);
    best.map(|(number, _)| number)
}

/// Progress of a read at one mirror. Only observed time counts.
#[derive(Debug, Default)]
pub(super) struct Progress {
    received: u64,
    elapsed: Duration,
    /// Time without bytes. A trickle does not end it.
    pub(super) silent: Duration,
}

impl Progress {
    /// Records that `received` bytes are there, `elapsed` after the last call.
    pub(super) fn update(&mut self, received: u64, elapsed: Duration) {
        self.elapsed += elapsed;
        let new_bytes = received.saturating_sub(self.received).saturating_mul(1000);
        let worth = Duration::from_millis(new_bytes / MIN_BYTES_PER_SECOND);
        self.silent = (self.silent + elapsed).saturating_sub(worth);
        self.received = received;
    }

    /// Whether the read of `left` more bytes should continue at one of `loads`, because that is much faster.
    pub(super) fn is_outpaced(&self, loads: &[MirrorLoad], left: u64, now: Instant) -> bool {
        let other = ranks(loads, left, false, now).map(|(_, rank)| rank).min();
        let Some((None, false, estimate)) = other else {
            return false;
        };
        let nanos = self.elapsed.as_nanos() * u128::from(left) / u128::from(self.received.max(1));
        let here = Duration::from_nanos(saturating_u64(nanos));
        self.elapsed >= MIN_OBSERVED_TIME
            && self.received > 0
            && here > estimate * SWITCH_FACTOR + SWITCH_COST
    }
}

fn saturating_u64(number: u128) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::retry::LONG_BLOCK;

    const MIB: u64 = 1 << 20;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// A mirror that sends a MiB in this time, with reads in flight.
    fn load(millis_per_mib: u64, in_flight: u32) -> MirrorLoad {
        MirrorLoad {
            latency: ms(1),
            nanos_per_kib: Some(millis_per_mib * 1_000_000 / 1024),
            in_flight,
            ..MirrorLoad::default()
        }
    }

    fn chosen(loads: &[MirrorLoad], now: Instant) -> usize {
        choose(loads, MIB, now).expect("one is included")
    }

    // Promises: mirror-choice
    #[test]
    fn read_goes_to_the_mirror_that_finishes_it_first() {
        let now = Instant::now();
        for (in_flight, expected) in [(0, 1), (8, 1), (10, 0), (16, 0)] {
            let loads = [load(100, 0), load(10, in_flight)];
            assert_eq!(chosen(&loads, now), expected, "{in_flight} in flight");
        }
        assert_eq!(chosen(&[load(1, 1), load(1, 0)], now), 1);
        // A mirror of unknown speed gets one read.
        let unknown = MirrorLoad::new(ms(1));
        assert_eq!(chosen(&[load(1, 1), unknown.clone()], now), 1);
        let busy = MirrorLoad {
            in_flight: 1,
            ..unknown.clone()
        };
        assert_eq!(chosen(&[load(1, 9), busy.clone()], now), 0);
        assert_eq!(chosen(&[busy, unknown], now), 1);
    }

    // Promises: mirror-choice
    #[test]
    fn failed_mirror_is_blocked_for_longer_each_time() {
        let now = Instant::now();
        let mut loads = [load(1, 0), load(10, 0)];
        let mut at = now;
        for seconds in [5, 10, 20, 40, 60, 60] {
            // Reads that fail together count once.
            (0..8).for_each(|_| loads[0].record_failure(at, Duration::ZERO));
            assert_eq!(chosen(&loads, at), 1);
            at += Duration::from_secs(seconds);
            assert!(!loads[0].is_usable(at - ms(1)) && loads[0].is_usable(at));
            // Then it gets one read.
            loads[1].in_flight = 100;
            assert_eq!(chosen(&loads, at), 0);
            loads[0].in_flight = 1;
            assert_eq!(chosen(&loads, at), 1);
            loads[0].in_flight = 0;
        }
        loads[0].record_failure(at, Duration::ZERO);
        let now = at;
        loads[1].record_failure(now, LONG_BLOCK);
        assert_eq!(chosen(&loads, now), 0, "it is free sooner");
        loads[0].record_success(now - ms(1));
        assert!(!loads[0].is_usable(now));
        loads[0].record_success(now);
        assert!(loads[0].is_usable(now));
        assert!(!loads[1].is_usable(now + LONG_BLOCK - ms(1)));
        assert!(loads[1].is_usable(now + LONG_BLOCK));
    }

    // Promises: mirror-choice
    #[test]
    fn speed_is_that_of_all_reads_together() {
        let mut measured = MirrorLoad::new(ms(10));
        measured.record_speed(1000, ms(10), Some(ms(10)), 1);
        assert_eq!(measured.nanos_per_kib, None, "too few bytes");
        for _ in 0..20 {
            measured.record_speed(MIB, ms(110), Some(ms(10)), 4);
        }
        let cost = measured.nanos_per_kib.expect("measured");
        assert!(cost.abs_diff(100_000_000 / 1024 / 4) < 500, "{cost}");
        measured.record_speed(MIB, Duration::MAX, None, 0);
        measured.record_speed(u64::MAX, Duration::ZERO, None, 1);
    }

    // Promises: mirror-choice
    #[test]
    fn slow_mirror_gets_one_read_in_a_while() {
        let start = Instant::now();
        let mut loads = [load(10, 64), load(41, 0)];
        assert_eq!(chosen(&loads, start), 1, "it is not measured enough");
        loads[1].samples = MIN_SAMPLES;
        loads[1].last_read = Some(start);
        let soon = start + PROBE_INTERVAL - ms(1);
        assert_eq!(chosen(&loads, soon), 0);
        let due = soon + ms(1);
        assert_eq!(chosen(&loads, due), 1);
        loads[1].in_flight = 1;
        assert_eq!(chosen(&loads, due), 0, "one read");
        (loads[1].in_flight, loads[1].last_read) = (0, Some(due));
        assert_eq!(chosen(&loads, due), 0, "it has been measured");
        loads[0].in_flight = 0;
        assert_eq!(chosen(&loads, due + PROBE_INTERVAL), 0, "a lone read");
        // Without the other one it is used.
        loads[0].record_failure(due, Duration::ZERO);
        assert_eq!(chosen(&loads, due), 1);
        let mut enough = [load(10, 64), load(39, 0)];
        enough[1].samples = MIN_SAMPLES;
        assert_eq!(chosen(&enough, start), 1);
    }

    #[test]
    fn first_speed_is_measured_during_a_read() {
        let mut progress = Progress::default();
        let mut measured = MirrorLoad::default();
        for (received, speed) in [(MIB / 2, None), (MIB, Some(100_000_000 / 1024 / 2))] {
            progress.update(received, ms(50));
            measured.record_progress(&progress, 2);
            assert_eq!(measured.nanos_per_kib, speed);
        }
        progress.update(MIB + 1, ms(5000));
        measured.record_progress(&progress, 2);
        assert_eq!(measured.samples, 1);
    }

    // Promises: mirror-choice
    #[test]
    fn slow_read_continues_at_a_better_mirror() {
        let now = Instant::now();
        let is_outpaced = |received: u64, elapsed: u64, loads: &[MirrorLoad]| {
            let mut progress = Progress::default();
            progress.update(received, ms(elapsed));
            progress.is_outpaced(loads, MIB, now)
        };
        let mut current = load(10_000, 1);
        current.is_excluded = true;
        let fast = [current, load(1000, 0)];
        // The rest takes ten seconds here, and one there.
        assert!(is_outpaced(25_000, 250, &fast));
        assert!(!is_outpaced(12_500, 125, &fast), "too early");
        let is_left = is_outpaced(90_000, 250, &fast);
        assert!(!is_left, "less than three times as slow");
        let mut blocked = fast;
        blocked[1].record_failure(now, Duration::ZERO);
        assert!(!is_outpaced(25_000, 250, &blocked), "there is no other");
        assert_eq!(choose(&blocked, MIB, now), Some(1), "it is the only one");
        blocked[1].is_excluded = true;
        assert_eq!(choose(&blocked, MIB, now), None);
    }
}
