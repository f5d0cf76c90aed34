//! When a scan of a plain archive goes on behind a payload instead of through it; pure.

use std::time::Duration;

/// Payloads that lack less are streamed: their bytes get hashes, and are soon here.
const MIN_SKIP_BYTES: u64 = 8 << 20;

/// As long as nobody knows how fast the source is, only payloads that lack so much are passed over.
const MIN_SKIP_BYTES_UNMEASURED: u64 = 64 << 20;

/// A run of so many bytes tells how fast the source is.
const MIN_SAMPLE_BYTES: u64 = 8 << 20;

/// A hop costs a round trip in which nothing comes, and some more until requests are as many and as
/// long as before.
const SKIP_COST_ROUND_TRIPS: u32 = 3;

/// What is known of the source, from the runs in which it was streamed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SkipPolicy {
    /// The shortest time from a first request to its bytes.
    round_trip: Option<Duration>,
    /// Bytes a second, the most that was seen.
    best_rate: Option<f64>,
}

impl SkipPolicy {
    /// A run has brought `bytes` in `took`, of which the first came after `first`.
    pub(super) fn record_run(&mut self, bytes: u64, took: Duration, first: Duration) {
        self.round_trip = Some(self.round_trip.map_or(first, |known| known.min(first)));
        let streaming_secs = took.saturating_sub(first).as_secs_f64();
        if bytes >= MIN_SAMPLE_BYTES && streaming_secs > 0.0 {
            #[expect(clippy::cast_precision_loss, reason = "an estimate")]
            let rate = bytes as f64 / streaming_secs;
            self.best_rate = Some(self.best_rate.map_or(rate, |known| known.max(rate)));
        }
    }

    /// Whether a payload of which `missing` bytes have not been asked for is passed over.
    pub(super) fn should_skip(&self, missing: u64) -> bool {
        let (Some(rate), Some(round_trip)) = (self.best_rate, self.round_trip) else {
            return missing >= MIN_SKIP_BYTES_UNMEASURED;
        };
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let streaming_time = missing as f64 / rate;
        missing >= MIN_SKIP_BYTES
            && streaming_time > (round_trip * SKIP_COST_ROUND_TRIPS).as_secs_f64()
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
    fn unmeasured_source_skips_only_huge_payloads() {
        let policy = SkipPolicy::default();
        assert!(policy.should_skip(64 * MIB));
        assert!(!policy.should_skip(63 * MIB));
    }

    #[test]
    fn short_run_does_not_set_the_rate() {
        let mut policy = SkipPolicy::default();
        policy.record_run(MIB, ms(1000), ms(40));
        assert!(!policy.should_skip(63 * MIB));
    }

    #[test]
    fn fast_distant_link_streams_medium_payloads() {
        let mut policy = SkipPolicy::default();
        policy.record_run(400 * MIB, ms(1040), ms(40));
        // 400 MiB a second: 48 MiB in the time of three round trips.
        assert!(!policy.should_skip(47 * MIB));
        assert!(policy.should_skip(49 * MIB));
    }

    #[test]
    fn slow_link_skips_all_large_payloads() {
        let mut policy = SkipPolicy::default();
        policy.record_run(10 * MIB, ms(1040), ms(40));
        assert!(policy.should_skip(8 * MIB));
        assert!(!policy.should_skip(8 * MIB - 1));
    }

    #[test]
    fn disturbed_run_changes_nothing() {
        let mut policy = SkipPolicy::default();
        policy.record_run(400 * MIB, ms(1040), ms(40));
        policy.record_run(10 * MIB, ms(9000), ms(3000));
        assert!(!policy.should_skip(47 * MIB));
    }
}
