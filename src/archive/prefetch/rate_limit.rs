//! Rate limit in bytes per second; pure.

use std::time::Duration;

/// Allows an average rate. A caller that spent more must wait until its debt is paid off.
#[derive(Clone, Copy, Debug)]
pub(super) struct RateLimit {
    bytes_per_second: u64,
    /// Time at which all spent bytes are paid off.
    free_at: Duration,
}

impl RateLimit {
    /// Starts without debt. The minimum rate is one byte per second.
    pub(super) fn new(bytes_per_second: u64) -> Self {
        Self {
            bytes_per_second: bytes_per_second.max(1),
            free_at: Duration::ZERO,
        }
    }

    /// Time to wait at `now` before spending more. All calls must count time from the same start.
    pub(super) fn wait_time(&self, now: Duration) -> Duration {
        self.free_at.saturating_sub(now)
    }

    /// Spends `bytes` at `now`. Unused budget does not accumulate.
    pub(super) fn spend(&mut self, now: Duration, bytes: u64) {
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second);
        let time = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        self.free_at = self.free_at.max(now).saturating_add(time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn caller_that_spent_a_second_of_bytes_waits_a_second() {
        let mut rate = RateLimit::new(1000);
        assert_eq!(rate.wait_time(SECOND), Duration::ZERO);
        rate.spend(SECOND, 1000);
        assert_eq!(rate.wait_time(SECOND), SECOND);
        assert_eq!(rate.wait_time(SECOND * 3 / 2), SECOND / 2);
        rate.spend(SECOND * 3 / 2, 500);
        assert_eq!(rate.wait_time(SECOND * 3 / 2), SECOND);
        assert_eq!(rate.wait_time(SECOND * 5), Duration::ZERO);
    }

    #[test]
    fn idle_time_is_not_saved_up() {
        let mut rate = RateLimit::new(1000);
        rate.spend(100 * SECOND, 1000);
        assert_eq!(rate.wait_time(100 * SECOND), SECOND);
    }

    #[test]
    fn extreme_spending_does_not_overflow() {
        let mut rate = RateLimit::new(0);
        rate.spend(SECOND, u64::MAX);
        rate.spend(SECOND, u64::MAX);
        assert!(rate.wait_time(SECOND) > 100 * SECOND);
    }

    proptest! {
        // Promises: ahead-rate
        #[test]
        fn bytes_passed_stay_within_the_limit_and_one_spending(
            spendings in prop::collection::vec((0..2000_u64, 1..5000_u64), 1..50)
        ) {
            let mut rate = RateLimit::new(1000);
            let (mut now, mut passed) = (Duration::ZERO, 0);
            for (pause, bytes) in spendings {
                now += Duration::from_millis(pause);
                now += rate.wait_time(now);
                prop_assert!(passed <= u64::try_from(now.as_millis()).expect("short") + 1);
                rate.spend(now, bytes);
                passed += bytes;
            }
        }
    }
}
