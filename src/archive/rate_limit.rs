//! A limit on bytes a second; pure.

use std::time::Duration;

/// Lets so many bytes a second pass on the average: who has spent more waits until it is paid off.
#[derive(Clone, Copy, Debug)]
pub(super) struct RateLimit {
    bytes_per_second: u64,
    /// When everything is paid that was spent.
    free_at: Duration,
}

impl RateLimit {
    /// Starts with nothing spent; less than a byte a second is a byte a second.
    pub(super) fn new(bytes_per_second: u64) -> Self {
        Self {
            bytes_per_second: bytes_per_second.max(1),
            free_at: Duration::ZERO,
        }
    }

    /// How long to wait at `now` before spending more. Times count from any beginning, the same for
    /// all calls.
    pub(super) fn wait_time(&self, now: Duration) -> Duration {
        self.free_at.saturating_sub(now)
    }

    /// Spends `bytes` at `now`. What was not spent before is lost.
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
