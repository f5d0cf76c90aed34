//! Retry policy and pauses; pure except for randomness.

pub(super) mod attempts;
mod timer;

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::{Cause, Error};

pub(super) use self::attempts::Failure;

/// Default limit of the pauses between attempts.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// Retry policy of a source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Retry {
    /// Maximum number of consecutive attempts without substantial progress; at least one.
    pub attempts: u32,
    /// Whether outages are retried beyond that, within the timeout (see [`Cause::is_outage`]).
    pub retries_outages: bool,
    /// Maximum pause after the first failure; doubled after each further one.
    pub initial_pause: Duration,
    /// Limit of all pauses, unless the server asks for a longer one.
    pub max_pause: Duration,
}

impl Default for Retry {
    /// Five attempts take at most three seconds. That suffices for a restarted server or a dropped
    /// connection, and reports a wrong address soon.
    fn default() -> Self {
        Self {
            attempts: 5,
            retries_outages: true,
            initial_pause: Duration::from_millis(200),
            max_pause: MAX_PAUSE,
        }
    }
}

impl Retry {
    /// The policy with at most `retries` retries of a request, also in an outage; the default one for `None`.
    pub fn with_limit(retries: Option<u32>) -> Self {
        let default = Self::default();
        retries.map_or(default, |retries| Self {
            attempts: retries.saturating_add(1),
            retries_outages: false,
            ..default
        })
    }

    fn pause(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(16);
        let pause = self.initial_pause.saturating_mul(1 << doublings);
        pause.min(self.max_pause)
    }

    /// The pause before the next attempt, after `failures` in a row, within `left` of the timeout. Fails with
    /// the cause if no further attempt should follow.
    pub(super) fn next_pause(
        &self,
        failures: u32,
        cause: Cause,
        retry_after: Option<Duration>,
        left: Duration,
        jitter: &Jitter,
    ) -> Result<Duration, Cause> {
        let should_retry = failures < self.attempts || (self.retries_outages && cause.is_outage());
        if !should_retry {
            return Err(cause);
        }
        if let Some(retry_after) = retry_after.filter(|&retry_after| retry_after >= left) {
            return Err(match cause {
                // It names the server that asks for the pause.
                Cause::CredentialsUnavailable { .. } => cause,
                _ => Cause::Busy(retry_after),
            });
        }
        let pause = retry_after.unwrap_or_default() + jitter.spread(self.pause(failures));
        if pause < left { Ok(pause) } else { Err(cause) }
    }
}

/// Time for which a server that has a substitute is not asked after a failure; doubled after each further one.
const INITIAL_BLOCK: Duration = Duration::from_secs(5);
const MAX_BLOCK: Duration = Duration::from_mins(1);

/// The same after a failure that will probably repeat, such as another version, wrong bytes or a refusal.
pub(super) const LONG_BLOCK: Duration = Duration::from_mins(5);

/// Minimum time for which a server is not asked after a failure by `cause`.
pub(super) fn min_block(cause: &Cause, retry_after: Option<Duration>) -> Duration {
    let requested = retry_after.filter(|_| cause.is_transient());
    let usual = if cause.is_transient() || cause.is_descriptor_limit() {
        Duration::ZERO
    } else {
        LONG_BLOCK
    };
    requested.unwrap_or(usual).min(LONG_BLOCK)
}

/// Failures of a server that has a substitute.
#[derive(Clone, Debug, Default)]
pub(super) struct FailureBlock {
    failures: u32,
    failed_at: Option<Instant>,
    until: Option<Instant>,
}

impl FailureBlock {
    /// End of the time in which it is not asked; `None` if it may be asked.
    pub(super) fn until(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|&until| until > now)
    }

    /// Records the success of a request that `started` then. After a failure, older ones prove nothing.
    pub(super) fn record_success(&mut self, started: Instant) {
        if self.failed_at.is_none_or(|failed| failed <= started) {
            *self = Self::default();
        }
    }

    /// Blocks the server, and for `min_block` at least. Requests that fail together count once. Returns whether it
    /// is the first failure in a row.
    pub(super) fn record_failure(&mut self, now: Instant, min_block: Duration) -> bool {
        let is_new = self.until(now).is_none();
        self.failures += u32::from(is_new);
        self.failed_at = Some(now);
        let doublings = self.failures.saturating_sub(1).min(6);
        let block = (INITIAL_BLOCK * (1 << doublings)).min(MAX_BLOCK);
        self.until = self.until.max(Some(now + block.max(min_block)));
        is_new && self.failures == 1
    }

    /// Repeats `attempt` whenever the server may be asked, until it succeeds. Warns of the first failure.
    pub(super) async fn repeat<T, A: Future<Output = Result<T, Error>>>(
        mut self,
        mut attempt: impl FnMut() -> A,
    ) -> T {
        loop {
            let now = match attempt().await {
                Ok(done) => return done,
                Err(error) => {
                    let (cause, now) = (&error.cause, Instant::now());
                    if self.record_failure(now, min_block(cause, cause.retry_after())) {
                        tracing::warn!("{error}: {cause}");
                    } else {
                        tracing::debug!(%cause, "{error}");
                    }
                    now
                }
            };
            tokio::time::sleep_until(self.until(now).unwrap_or(now)).await;
        }
    }
}

/// Full jitter, so that requests that failed together are not retried together.
#[derive(Debug)]
pub(super) struct Jitter(AtomicU64);

impl Jitter {
    /// The same seed gives the same pauses; without a seed they are random.
    pub(super) fn new(seed: Option<u64>) -> Self {
        Self(
            seed.unwrap_or_else(|| RandomState::new().hash_one(()))
                .into(),
        )
    }

    fn spread(&self, pause: Duration) -> Duration {
        // SplitMix64. Each value is used once, by any caller.
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut random = self.0.fetch_add(STEP, Ordering::Relaxed);
        random = (random ^ (random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        random = (random ^ (random >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        pause.mul_f64(f64::from((random >> 48) as u16) / 65_536.0)
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
            retries_outages: false,
            initial_pause: Duration::ZERO,
            max_pause: Duration::ZERO,
        }
    }

    fn unreachable() -> Cause {
        Cause::Unreachable {
            obstacle: Obstacle::Refused,
            detail: String::new(),
        }
    }

    // Promises: retry-pauses
    #[test]
    fn pauses_double_up_to_the_maximum() {
        let retry = Retry {
            initial_pause: Duration::from_millis(100),
            max_pause: Duration::from_millis(500),
            ..retry()
        };
        let pauses = [1, 2, 3, 4, u32::MAX].map(|failures| retry.pause(failures));
        assert_eq!(pauses, [100, 200, 400, 500, 500].map(Duration::from_millis));
    }

    // Promises: retry-which, retry-how-long
    #[test]
    fn retries_end_after_the_limit_except_during_an_outage() {
        let persistent = Retry {
            retries_outages: true,
            ..retry()
        };
        for (cause, ends) in [
            (Cause::Http(501), true),
            (Cause::Truncated, true),
            (Cause::Http(500), false),
            (Cause::Http(522), false),
            (Cause::Http(429), false),
            (unreachable(), false),
        ] {
            assert!(
                retry()
                    .next_pause(2, cause.clone(), None, LEFT, &Jitter::new(None))
                    .is_ok()
            );
            assert!(
                retry()
                    .next_pause(3, cause.clone(), None, LEFT, &Jitter::new(None))
                    .is_err()
            );
            let next = persistent.next_pause(3, cause.clone(), None, LEFT, &Jitter::new(None));
            assert_eq!(next.is_err(), ends, "{cause}");
        }
        let next =
            persistent.next_pause(3, unreachable(), None, Duration::ZERO, &Jitter::new(None));
        assert!(next.is_err(), "the time is over");
    }

    // Promises: retry-pauses
    #[test]
    fn retry_after_is_honoured_within_the_timeout() {
        let next = |retry_after| {
            let retry_after = Some(Duration::from_secs(retry_after));
            retry().next_pause(1, Cause::Http(503), retry_after, LEFT, &Jitter::new(None))
        };
        assert_eq!(next(59).ok(), Some(Duration::from_secs(59)));
        assert!(matches!(next(60), Err(Cause::Busy(retry_after)) if retry_after == LEFT));
        assert!(matches!(next(u64::MAX), Err(Cause::Busy(_))));
    }

    // Promises: retry-pauses
    #[test]
    fn jitter_spreads_pauses_over_their_whole_length() {
        let pause = Duration::from_millis(100);
        let jittered = |seed| -> Vec<Duration> {
            let jitter = Jitter::new(seed);
            (0..200).map(|_| jitter.spread(pause)).collect()
        };
        assert_eq!(jittered(Some(1)), jittered(Some(1)));
        assert_ne!(jittered(Some(1)), jittered(Some(2)));
        let jittered = jittered(None);
        assert!(
            jittered.iter().all(|&spread| spread < pause),
            "{jittered:?}"
        );
        assert!(
            jittered.iter().any(|&spread| spread < pause / 4),
            "{jittered:?}"
        );
        assert!(
            jittered.iter().any(|&spread| spread > pause / 4 * 3),
            "{jittered:?}"
        );
    }
}
