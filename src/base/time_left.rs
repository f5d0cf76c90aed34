//! How long somebody waits for bytes; pure.

use std::time::Duration;

/// Bytes a second that are worth waiting for: below that a link is taken for dead, though drops
/// still come. A sixteenth of what a modem brought.
const SLOWEST: u64 = 4 << 10;

/// The time that who waits for bytes has left.
///
/// It begins with all of it, loses what it waits, and gains, up to what it began with, what the
/// bytes that come would have taken on the slowest link that is worth waiting for. So a slow and
/// steady link is waited for however much is read, while silence ends by the whole time and a server
/// that sends a byte now and then gains next to nothing. A read of a number of bytes ends at the
/// latest after the whole time and what they take at that speed.
#[derive(Clone, Copy, Debug)]
pub struct TimeLeft {
    whole: Duration,
    left: Duration,
}

impl TimeLeft {
    /// All of `whole`.
    pub fn new(whole: Duration) -> Self {
        Self { whole, left: whole }
    }

    /// What is left; zero when it is over.
    pub fn left(&self) -> Duration {
        self.left
    }

    /// Begins anew.
    pub fn renew(&mut self) {
        self.left = self.whole;
    }

    /// Loses the time that was waited, and gains by the bytes that came meanwhile.
    pub fn waited(&mut self, time: Duration, came: u64) {
        let gained = u128::from(came) * 1_000_000_000 / u128::from(SLOWEST);
        let gained = Duration::from_nanos(u64::try_from(gained).unwrap_or(u64::MAX));
        let left = self.left.saturating_add(gained).saturating_sub(time);
        self.left = left.min(self.whole);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(time: &TimeLeft) -> f64 {
        time.left().as_secs_f64()
    }

    /// Seconds until it is over, when `bytes` come every `pause` seconds.
    fn lasts(bytes: u64, pause: u64) -> Option<u64> {
        let mut time = TimeLeft::new(Duration::from_mins(1));
        (1..10_000).map(|number| number * pause).find(|_| {
            time.waited(Duration::from_secs(pause), bytes);
            time.left().is_zero()
        })
    }

    #[test]
    fn silence_and_drops_end_by_the_deadline_and_a_slow_link_does_not() {
        assert_eq!(lasts(0, 1), Some(60));
        assert_eq!(lasts(1, 1), Some(61));
        assert_eq!(lasts(1, 29), Some(87));
        assert_eq!(lasts(SLOWEST / 2, 1), Some(120));
        assert_eq!(lasts(SLOWEST, 1), None);
        assert_eq!(lasts(30 * SLOWEST, 29), None);
    }

    #[test]
    fn what_came_fast_buys_no_more_than_the_whole_time() {
        let mut time = TimeLeft::new(Duration::from_secs(10));
        time.waited(Duration::from_secs(4), 100 << 20);
        assert!((seconds(&time) - 10.0).abs() < 1e-9);
        time.waited(Duration::from_secs(4), u64::MAX);
        time.waited(Duration::from_secs(9), 0);
        assert!((seconds(&time) - 1.0).abs() < 1e-9);
        time.waited(Duration::from_secs(9), 0);
        assert!(time.left().is_zero());
    }
}
