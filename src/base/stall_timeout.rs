//! Timeout of a read that waits for bytes; pure.

use std::time::Duration;

/// Minimum speed in bytes per second: a sixteenth of a modem's. A slower link counts as dead.
pub(crate) const MIN_BYTES_PER_SECOND: u64 = 4 << 10;

/// Timeout that received bytes extend, up to the limit, by their transfer time at the minimum speed.
///
/// So a slow but steady link never times out, but a server that sends an occasional byte does. A read ends at
/// the latest after the limit plus its transfer time at that speed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StallTimeout {
    limit: Duration,
    remaining: Duration,
}

impl StallTimeout {
    pub(crate) fn new(limit: Duration) -> Self {
        Self {
            limit,
            remaining: limit,
        }
    }

    /// Remaining time; zero once expired.
    pub(crate) fn remaining(&self) -> Duration {
        self.remaining
    }

    pub(crate) fn reset(&mut self) {
        self.remaining = self.limit;
    }

    /// Subtracts the time waited, and adds the gain of the bytes received meanwhile.
    pub(crate) fn record_wait(&mut self, time: Duration, received: u64) {
        let gained = u128::from(received) * 1_000_000_000 / u128::from(MIN_BYTES_PER_SECOND);
        let gained = Duration::from_nanos(u64::try_from(gained).unwrap_or(u64::MAX));
        let remaining = self.remaining.saturating_add(gained).saturating_sub(time);
        self.remaining = remaining.min(self.limit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(time: &StallTimeout) -> f64 {
        time.remaining().as_secs_f64()
    }

    /// Seconds until the timeout, if `bytes` arrive every `pause` seconds.
    fn seconds_until_timeout(bytes: u64, pause: u64) -> Option<u64> {
        let mut time = StallTimeout::new(Duration::from_mins(1));
        (1..10_000).map(|number| number * pause).find(|_| {
            time.record_wait(Duration::from_secs(pause), bytes);
            time.remaining().is_zero()
        })
    }

    // Promises: time-deadline
    #[test]
    fn stalled_and_trickling_links_time_out_and_slow_ones_do_not() {
        assert_eq!(seconds_until_timeout(0, 1), Some(60));
        assert_eq!(seconds_until_timeout(1, 1), Some(61));
        assert_eq!(seconds_until_timeout(1, 29), Some(87));
        assert_eq!(
            seconds_until_timeout(MIN_BYTES_PER_SECOND / 2, 1),
            Some(120)
        );
        assert_eq!(seconds_until_timeout(MIN_BYTES_PER_SECOND, 1), None);
        assert_eq!(seconds_until_timeout(30 * MIN_BYTES_PER_SECOND, 29), None);
    }

    #[test]
    fn fast_bytes_extend_the_timeout_up_to_its_limit() {
        let mut time = StallTimeout::new(Duration::from_secs(10));
        time.record_wait(Duration::from_secs(4), 100 << 20);
        assert!((seconds(&time) - 10.0).abs() < 1e-9);
        time.record_wait(Duration::from_secs(4), u64::MAX);
        time.record_wait(Duration::from_secs(9), 0);
        assert!((seconds(&time) - 1.0).abs() < 1e-9);
        time.record_wait(Duration::from_secs(9), 0);
        assert!(time.remaining().is_zero());
    }
}
