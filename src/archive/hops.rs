//! When a scan of a plain archive goes on behind a payload instead of through it; pure.

use std::time::Duration;

/// Payloads that lack less are streamed: their bytes get hashes, and are soon here.
const LARGE: u64 = 8 << 20;

/// As long as nobody knows how fast the source is, only payloads that lack so much are passed over.
const HUGE: u64 = 64 << 20;

/// A run of so many bytes tells how fast the source is.
const TELLING: u64 = 8 << 20;

/// A hop costs a round trip in which nothing comes, and some more until requests are as many and as
/// long as before.
const ROUND_TRIPS: u32 = 3;

/// What is known of the source, from the runs in which it was streamed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Hops {
    /// The shortest time from a first request to its bytes.
    round_trip: Option<Duration>,
    /// Bytes a second, the most that was seen.
    best_rate: Option<f64>,
}

impl Hops {
    /// A run has brought `bytes` in `took`, of which the first came after `first`.
    pub(super) fn saw(&mut self, bytes: u64, took: Duration, first: Duration) {
        self.round_trip = Some(self.round_trip.map_or(first, |known| known.min(first)));
        let flowed = took.saturating_sub(first).as_secs_f64();
        if bytes >= TELLING && flowed > 0.0 {
            #[expect(clippy::cast_precision_loss, reason = "an estimate")]
            let rate = bytes as f64 / flowed;
            self.best_rate = Some(self.best_rate.map_or(rate, |known| known.max(rate)));
        }
    }

    /// Whether a payload of which `missing` bytes have not been asked for is passed over.
    pub(super) fn is_worth(&self, missing: u64) -> bool {
        let (Some(rate), Some(round_trip)) = (self.best_rate, self.round_trip) else {
            return missing >= HUGE;
        };
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let streaming = missing as f64 / rate;
        missing >= LARGE && streaming > (round_trip * ROUND_TRIPS).as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn who_knows_nothing_passes_over_what_is_huge() {
        let hops = Hops::default();
        assert!(hops.is_worth(64 * MIB));
        assert!(!hops.is_worth(63 * MIB));
    }

    #[test]
    fn a_short_run_tells_nothing_of_the_rate() {
        let mut hops = Hops::default();
        hops.saw(MIB, ms(1000), ms(40));
        assert!(!hops.is_worth(63 * MIB));
    }

    #[test]
    fn on_a_fast_link_far_away_streaming_is_faster_than_hopping() {
        let mut hops = Hops::default();
        hops.saw(400 * MIB, ms(1040), ms(40));
        // 400 MiB a second: 48 MiB in the time of three round trips.
        assert!(!hops.is_worth(47 * MIB));
        assert!(hops.is_worth(49 * MIB));
    }

    #[test]
    fn on_a_slow_link_all_that_is_large_is_passed_over() {
        let mut hops = Hops::default();
        hops.saw(10 * MIB, ms(1040), ms(40));
        assert!(hops.is_worth(8 * MIB));
        assert!(!hops.is_worth(8 * MIB - 1));
    }

    #[test]
    fn a_run_that_was_disturbed_changes_nothing() {
        let mut hops = Hops::default();
        hops.saw(400 * MIB, ms(1040), ms(40));
        hops.saw(10 * MIB, ms(9000), ms(3000));
        assert!(!hops.is_worth(47 * MIB));
    }
}
