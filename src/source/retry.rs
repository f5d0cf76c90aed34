//! How often, and after which pauses, a request is repeated; pure but for the dice.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::Cause;

/// How stubborn a source is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Retry {
    /// How many times in a row a request may fail without having brought anything worth the name;
    /// at least one.
    pub attempts: u32,
    /// Whether a source that was opened is asked beyond that, as long as there is time, when the
    /// server cannot be reached or says that it cannot serve now.
    pub persists: bool,
    /// The longest pause after the first failure, doubled after each further one.
    pub first_pause: Duration,
    /// No pause is longer, unless the server asks for it.
    pub longest_pause: Duration,
}

impl Default for Retry {
    /// Five attempts within three seconds at the most: enough for a restarted server or a dropped
    /// connection, short enough for someone who waits at a terminal for a wrong address.
    fn default() -> Self {
        Self {
            attempts: 5,
            persists: true,
            first_pause: Duration::from_millis(200),
            longest_pause: Duration::from_secs(5),
        }
    }
}

impl Retry {
    /// How long to wait at the most after `failures` in a row.
    fn pause(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(16);
        let pause = self.first_pause.saturating_mul(1 << doublings);
        pause.min(self.longest_pause)
    }

    /// How long to wait before the next attempt, after `failures` in a row of which the last was
    /// for `cause`, when the server asked for `asked` and there is `left` to wait.
    ///
    /// # Errors
    /// Why there should be no further attempt.
    pub(super) fn next(
        &self,
        failures: u32,
        cause: Cause,
        asked: Option<Duration>,
        left: Duration,
        jitter: &Jitter,
    ) -> Result<Duration, Cause> {
        let goes_on = failures < self.attempts || (self.persists && cause.is_outage());
        if !goes_on {
            return Err(cause);
        }
        if let Some(asked) = asked.filter(|&asked| asked >= left) {
            return Err(Cause::Busy(asked));
        }
        let pause = asked.unwrap_or_default() + jitter.spread(self.pause(failures));
        if pause < left { Ok(pause) } else { Err(cause) }
    }
}

/// What spreads pauses, so that requests that failed together do not come back together (full
/// jitter).
#[derive(Debug)]
pub(super) struct Jitter(AtomicU64);

impl Jitter {
    /// The same pauses for the same seed; others each time without one.
    pub(super) fn new(seed: Option<u64>) -> Self {
        Self(
            seed.unwrap_or_else(|| RandomState::new().hash_one(()))
                .into(),
        )
    }

    /// Something between nothing and `pause`.
    fn spread(&self, pause: Duration) -> Duration {
        // SplitMix64: each number is used once, by whoever comes.
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut dice = self.0.fetch_add(STEP, Ordering::Relaxed);
        dice = (dice ^ (dice >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        dice = (dice ^ (dice >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        pause.mul_f64(f64::from((dice >> 48) as u16) / 65_536.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Obstacle;

    const LEFT: Duration = Duration::from_mins(1);

    fn retry() -> Retry {
        Retry {
            attempts: 3,
            persists: false,
            first_pause: Duration::ZERO,
            longest_pause: Duration::ZERO,
        }
    }

    fn unreachable() -> Cause {
        Cause::Unreachable {
            obstacle: Obstacle::Refused,
            detail: String::new(),
        }
    }

    #[test]
    fn pauses_double_up_to_the_longest() {
        let retry = Retry {
            first_pause: Duration::from_millis(100),
            longest_pause: Duration::from_millis(500),
            ..retry()
        };
        let pauses = [1, 2, 3, 4, u32::MAX].map(|failures| retry.pause(failures));
        assert_eq!(pauses, [100, 200, 400, 500, 500].map(Duration::from_millis));
    }

    #[test]
    fn what_fails_too_often_is_given_up_unless_the_server_is_out_of_reach_for_now() {
        let persistent = Retry {
            persists: true,
            ..retry()
        };
        for (cause, ends) in [
            (Cause::Http(500), true),
            (Cause::Truncated, true),
            (Cause::Http(503), false),
            (Cause::Http(429), false),
            (unreachable(), false),
        ] {
            assert!(
                retry()
                    .next(2, cause.clone(), None, LEFT, &Jitter::new(None))
                    .is_ok()
            );
            assert!(
                retry()
                    .next(3, cause.clone(), None, LEFT, &Jitter::new(None))
                    .is_err()
            );
            let next = persistent.next(3, cause.clone(), None, LEFT, &Jitter::new(None));
            assert_eq!(next.is_err(), ends, "{cause}");
        }
        let next = persistent.next(3, unreachable(), None, Duration::ZERO, &Jitter::new(None));
        assert!(next.is_err(), "the time is over");
    }

    #[test]
    fn a_server_may_ask_for_patience_as_long_as_there_is_time() {
        let next = |asked| {
            let asked = Some(Duration::from_secs(asked));
            retry().next(1, Cause::Http(503), asked, LEFT, &Jitter::new(None))
        };
        assert_eq!(next(59).ok(), Some(Duration::from_secs(59)));
        assert!(matches!(next(60), Err(Cause::Busy(asked)) if asked == LEFT));
        assert!(matches!(next(u64::MAX), Err(Cause::Busy(_))));
    }

    #[test]
    fn pauses_are_spread_over_all_the_time_and_never_longer() {
        let pause = Duration::from_millis(100);
        let spreads = |seed| -> Vec<Duration> {
            let jitter = Jitter::new(seed);
            (0..200).map(|_| jitter.spread(pause)).collect()
        };
        assert_eq!(spreads(Some(1)), spreads(Some(1)));
        assert_ne!(spreads(Some(1)), spreads(Some(2)));
        let spreads = spreads(None);
        assert!(spreads.iter().all(|&spread| spread < pause), "{spreads:?}");
        assert!(
            spreads.iter().any(|&spread| spread < pause / 4),
            "{spreads:?}"
        );
        assert!(
            spreads.iter().any(|&spread| spread > pause / 4 * 3),
            "{spreads:?}"
        );
    }
}
