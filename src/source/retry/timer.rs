//! Time that a read waits for bytes.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::base::stall_timeout::StallTimeout;
use crate::base::stats::Stats;
use crate::source::{Cause, Obstacle};

/// Maximum queueing time of a stream's request, in read timeouts, while the server answers others.
const QUEUE_TIMEOUT_FACTOR: u32 = 10;

const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Time without a byte after which a source counts as unreachable.
const UNREACHABLE_AFTER: Duration = Duration::from_secs(2);

/// Counts a read of an unreachable source in the gauge; stops when dropped.
#[derive(Debug)]
struct UnreachableMark {
    stats: Arc<Stats>,
    is_counted: bool,
}

impl UnreachableMark {
    fn set(&mut self, is_counted: bool) {
        match (self.is_counted, is_counted) {
            (false, true) => self.stats.unreachable_reads.increment(),
            (true, false) => self.stats.unreachable_reads.decrement(),
            _ => {}
        }
        self.is_counted = is_counted;
    }
}

impl Drop for UnreachableMark {
    fn drop(&mut self) {
        self.set(false);
    }
}

/// Measures a read's waiting time; its owner reports the received bytes.
#[derive(Debug)]
pub(crate) struct Timer {
    time: StallTimeout,
    last_check: Instant,
    counted: u64,
    is_alive: bool,
    /// Time of the last byte, or the start of the wait.
    last_receipt: Instant,
    /// Remaining queueing time that does not count.
    queue_left: Duration,
    unreachable: UnreachableMark,
}

impl Timer {
    /// Starts the timer after `received` bytes that it did not wait for.
    pub(crate) fn new(timeout: Duration, received: u64, stats: &Arc<Stats>) -> Self {
        Self {
            time: StallTimeout::new(timeout),
            last_check: Instant::now(),
            counted: received,
            is_alive: false,
            last_receipt: Instant::now(),
            queue_left: timeout.saturating_mul(QUEUE_TIMEOUT_FACTOR),
            unreachable: UnreachableMark {
                stats: Arc::clone(stats),
                is_counted: false,
            },
        }
    }

    pub(crate) fn set_unreachable(&mut self) {
        self.unreachable.set(true);
    }

    /// Updates and returns the remaining time, after `received` bytes.
    pub(crate) fn update(&mut self, received: u64) -> Duration {
        let waited = self.last_check.elapsed();
        self.record_wait(received, waited)
    }

    /// As [`update`](Self::update), but after [`wait_until_expired`](Self::wait_until_expired) only its steps
    /// count, not the time when this process was stopped (by a debugger, or a container's freezer).
    pub(crate) fn update_running(&mut self, received: u64) -> Duration {
        let waited = self.last_check.elapsed().min(CHECK_INTERVAL * 2);
        self.record_wait(received, waited)
    }

    fn record_wait(&mut self, received: u64, waited: Duration) -> Duration {
        let new_bytes = received.saturating_sub(self.counted);
        self.time.record_wait(waited, new_bytes);
        (self.last_check, self.counted) = (Instant::now(), received);
        if new_bytes > 0 {
            self.is_alive = true;
            self.last_receipt = self.last_check;
            self.unreachable.set(false);
        } else if self.last_receipt.elapsed() >= UNREACHABLE_AFTER {
            self.unreachable.set(true);
        }
        self.time.remaining()
    }

    /// Ignores the time since the last check, because nothing waited.
    pub(crate) fn ignore_elapsed(&mut self) {
        self.last_check = Instant::now();
        self.last_receipt = self.last_check;
    }

    /// Waits until the time expires, and returns the cause. Up to [`QUEUE_TIMEOUT_FACTOR`] timeouts do not
    /// count while `is_queued`, because the server answers other requests. Cancel safe.
    pub(crate) async fn wait_until_expired(
        &mut self,
        received: impl Fn() -> u64,
        is_queued: impl Fn() -> bool,
    ) -> Cause {
        let mut left = self.update(received());
        while !left.is_zero() {
            tokio::time::sleep(left.min(CHECK_INTERVAL)).await;
            if is_queued() && !self.queue_left.is_zero() {
                self.queue_left = self.queue_left.saturating_sub(self.last_check.elapsed());
                self.ignore_elapsed();
            } else {
                left = self.update_running(received());
            }
        }
        let obstacle = if self.is_alive {
            Obstacle::TooSlow
        } else {
            Obstacle::Timeout
        };
        Cause::Unreachable {
            obstacle,
            detail: String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: caller-timeout
    #[test]
    fn time_while_the_process_is_stopped_does_not_count() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build();
        runtime.expect("a runtime").block_on(async {
            let mut timer = Timer::new(Duration::from_mins(1), 0, &Arc::default());
            tokio::time::advance(Duration::from_hours(1)).await;
            assert!(timer.update_running(0) >= Duration::from_secs(58));
            tokio::time::advance(Duration::from_hours(1)).await;
            assert!(timer.update(0).is_zero(), "no other caller updated it");
            let mut timer = Timer::new(Duration::from_mins(1), 0, &Arc::default());
            let begun = Instant::now();
            timer.wait_until_expired(|| 0, || false).await;
            let lasted = begun.elapsed();
            assert!((60..62).contains(&lasted.as_secs()), "{lasted:?}");
        });
    }
}
