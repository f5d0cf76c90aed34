//! Policy for skipping payloads in a scan of a plain archive; pure.

use std::time::Duration;

/// Payloads with fewer missing bytes are streamed, which takes little time and gives their bytes hashes.
const MIN_SKIP_BYTES: u64 = 8 << 20;

/// Minimum of missing bytes for a skip while the speed of the source is unknown.
const MIN_SKIP_BYTES_UNMEASURED: u64 = 64 << 20;

/// Minimum length of a run that measures the speed of the source.
const MIN_SAMPLE_BYTES: u64 = 8 << 20;

/// Cost of a skip, in round trips: one without data, and some until requests are as many and long as before.
const SKIP_COST_ROUND_TRIPS: u32 = 3;

/// Speed of the source, measured in runs of streaming.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SkipPolicy {
    /// Shortest time from a first request to its bytes.
    round_trip: Option<Duration>,
    /// Highest rate measured, in bytes per second.
    best_rate: Option<f64>,
}

impl SkipPolicy {
    /// Records a run that brought `bytes` in `took`, the first of them after `first`.
    pub(super) fn record_run(&mut self, bytes: u64, took: Duration, first: Duration) {
        self.round_trip = Some(self.round_trip.map_or(first, |known| known.min(first)));
        let streaming_secs = took.saturating_sub(first).as_secs_f64();
        if bytes >= MIN_SAMPLE_BYTES && streaming_secs > 0.0 {
            #[expect(clippy::cast_precision_loss, reason = "an estimate")]
            let rate = bytes as f64 / streaming_secs;
            self.best_rate = Some(self.best_rate.map_or(rate, |known| known.max(rate)));
        }
    }

    /// Whether to skip a payload of which `missing` bytes have not been requested.
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

    // Promises: fetch-skips
    #[test]
    fn fast_distant_link_streams_medium_payloads() {
        let mut policy = SkipPolicy::default();
        policy.record_run(400 * MIB, ms(1040), ms(40));
        // At 400 MiB per second, three round trips take as long as 48 MiB.
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
