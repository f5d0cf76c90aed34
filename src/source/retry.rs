//! How often, and after which pauses, a request is repeated; pure but for the dice.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// How stubborn a source is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Retry {
    /// How many times a request is sent before its failure is final; at least one.
    pub attempts: u32,
    /// The pause after the first failure, doubled after each further one.
    pub first_pause: Duration,
    /// No pause is longer, whatever the server asks for.
    pub longest_pause: Duration,
}

impl Default for Retry {
    /// Five attempts within about two seconds: enough for a restarted server or a dropped
    /// connection, short enough for someone who waits at a terminal for a wrong address.
    fn default() -> Self {
        Self {
            attempts: 5,
            first_pause: Duration::from_millis(100),
            longest_pause: Duration::from_secs(10),
        }
    }
}

impl Retry {
    /// How long to wait after `attempts` failures, when the server asked for `asked`; `None` to
    /// give up.
    pub(super) fn pause(&self, attempts: u32, asked: Option<Duration>) -> Option<Duration> {
        if attempts >= self.attempts {
            return None;
        }
        let doublings = attempts.saturating_sub(1).min(16);
        let pause = self.first_pause.saturating_mul(1 << doublings);
        Some(pause.max(asked.unwrap_or_default()).min(self.longest_pause))
    }
}

/// Something between half of `pause` and all of it, so that requests that failed together do not
/// come back together.
pub(super) fn spread(pause: Duration) -> Duration {
    let dice = RandomState::new().hash_one(pause);
    let half = pause / 2;
    half + half.mul_f64(f64::from((dice & 0xffff) as u16) / 65_536.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_then_it_is_over() {
        let retry = Retry {
            attempts: 6,
            first_pause: Duration::from_millis(100),
            longest_pause: Duration::from_millis(500),
        };
        let pauses: Vec<_> = (1..=6)
            .map(|attempts| retry.pause(attempts, None))
            .collect();
        let expected = [Some(100), Some(200), Some(400), Some(500), Some(500), None];
        assert_eq!(
            pauses,
            expected.map(|pause| pause.map(Duration::from_millis))
        );
    }

    #[test]
    fn a_server_may_ask_for_patience_within_bounds() {
        let retry = Retry::default();
        let asked = Some(Duration::from_secs(2));
        assert_eq!(retry.pause(1, asked), asked);
        assert_eq!(
            retry.pause(1, Some(Duration::from_hours(24))),
            Some(retry.longest_pause)
        );
    }

    #[test]
    fn pauses_are_spread_but_never_longer() {
        let pause = Duration::from_millis(100);
        for _ in 0..100 {
            let spread = spread(pause);
            assert!(pause / 2 <= spread && spread <= pause, "{spread:?}");
        }
    }
}
