//! Retries of a series of attempts.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::timer::Timer;
use super::{Jitter, Retry};
use crate::base::stats::Stats;
use crate::source::{Cause, Class, Error, Options};

/// Maximum number of retries without a pause after refused concurrency, from the initial four to one.
const MAX_IMMEDIATE_RETRIES: u32 = 2;

/// Bytes that count as progress, after which failures are counted anew.
pub(crate) const MIN_PROGRESS_BYTES: u64 = 64 << 10;

/// A failed attempt.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) cause: Cause,
    pub(crate) retry_after: Option<Duration>,
    /// Whether the server may have refused the concurrency; the limiter then waits for fewer requests.
    pub(crate) is_for_concurrency: bool,
}

impl Failure {
    /// Order of the failures of several servers: a greater one will probably end sooner, or says more.
    pub(crate) fn hope(&self) -> impl Ord + use<> {
        let pause = Reverse(self.retry_after);
        let is_there = self.cause.class() != Class::NotFound;
        (self.cause.is_outage(), self.may_end(), is_there, pause)
    }

    /// Whether a server that has answered correctly may soon do so again. One of its nodes may be faulty.
    pub(crate) fn may_end(&self) -> bool {
        self.cause.is_transient() || matches!(self.cause, Cause::Protocol(_))
    }
}

impl From<Cause> for Failure {
    fn from(cause: Cause) -> Self {
        Self {
            retry_after: cause.retry_after(),
            cause,
            is_for_concurrency: false,
        }
    }
}

pub(crate) fn protocol_failure(how: &str) -> Failure {
    Cause::Protocol(how.to_owned()).into()
}

pub(crate) struct RetryState {
    pub(crate) retry: Retry,
    jitter: Arc<Jitter>,
    /// Whether the server has answered before.
    pub(crate) is_open: bool,
    attempts: u32,
    /// Consecutive attempts without substantial progress.
    failures: u32,
    immediate_retries: u32,
    /// Bytes present at the last failure that followed progress.
    pub(crate) progress_mark: u64,
    started: Instant,
    pub(crate) stats: Arc<Stats>,
}

impl RetryState {
    pub(crate) fn new(retry: Retry, jitter: Arc<Jitter>, stats: Arc<Stats>) -> Self {
        Self {
            retry,
            jitter,
            is_open: false,
            attempts: 0,
            failures: 0,
            immediate_retries: 0,
            progress_mark: 0,
            started: Instant::now(),
            stats,
        }
    }

    /// Pauses before the next attempt, within `left` of the timeout; fails if none should follow.
    pub(crate) async fn pause_after(
        &mut self,
        failure: Failure,
        received: u64,
        left: Duration,
    ) -> Result<(), Cause> {
        self.attempts += 1;
        if received.saturating_sub(self.progress_mark) >= MIN_PROGRESS_BYTES {
            self.progress_mark = received;
            (self.failures, self.immediate_retries) = (0, 0);
        }
        self.failures += 1;
        let Failure {
            cause,
            retry_after,
            is_for_concurrency,
        } = failure;
        // One node of a server that has answered correctly may be faulty.
        let is_slip = self.is_open && matches!(cause, Cause::Protocol(_));
        if !cause.is_transient() && !is_slip {
            return Err(cause);
        }
        tracing::debug!(attempt = self.attempts, %cause, "an attempt failed");
        if is_for_concurrency
            && retry_after.is_none()
            && self.immediate_retries < MAX_IMMEDIATE_RETRIES
        {
            self.immediate_retries += 1;
            self.stats.source_retries.increment();
            return Ok(());
        }
        let failures = self.failures - self.immediate_retries;
        let pause = self
            .retry
            .next_pause(failures, cause, retry_after, left, &self.jitter)?;
        self.stats.source_retries.increment();
        tokio::time::sleep(pause).await;
        Ok(())
    }

    /// Counts an attempt after which another server is asked without a pause.
    pub(crate) fn count_attempt(&mut self) {
        self.attempts += 1;
    }

    pub(crate) fn count_timeout(&mut self) {
        self.attempts += 1;
        self.stats.source_timeouts.increment();
    }

    pub(crate) fn error(&self, location: &str, cause: Cause) -> Error {
        Error {
            location: location.to_owned(),
            is_upload: false,
            attempts: self.attempts.max(1),
            elapsed: self.started.elapsed(),
            cause,
        }
    }
}

/// Retries and deadline of one operation. Its owner counts what it receives.
pub(crate) struct Attempts {
    pub(crate) retry_state: RetryState,
    pub(crate) timer: Timer,
}

impl Attempts {
    /// Starts an operation with the policy and the counters of `options`, after `received` bytes.
    pub(crate) fn new(options: &Options, jitter: &Arc<Jitter>, received: u64) -> Self {
        let (jitter, stats) = (Arc::clone(jitter), Arc::clone(&options.stats));
        let timer = Timer::new(options.timeout, received, &stats);
        let mut retry_state = RetryState::new(options.retry, jitter, stats);
        retry_state.progress_mark = received;
        Self { retry_state, timer }
    }

    /// Runs `attempt` until the deadline, whose cause is the error. [`Timer::wait_until_expired`] explains the others.
    ///
    /// # Cancel safety
    /// That of `attempt`.
    pub(crate) async fn run<T>(
        &mut self,
        attempt: impl Future<Output = T>,
        received: impl Fn() -> u64,
        is_queued: impl Fn() -> bool,
    ) -> Result<T, Cause> {
        tokio::select! {
            biased;
            done = attempt => Ok(done),
            expired = self.timer.wait_until_expired(received, is_queued) => {
                self.retry_state.count_timeout();
                Err(expired)
            }
        }
    }

    /// Pauses after `failure`, and counts the pause as waiting for more than `received` bytes. `progress` is what
    /// earlier failures had not. Fails if no attempt should follow. Cancel safe.
    pub(crate) async fn pause_after(
        &mut self,
        failure: Failure,
        received: u64,
        progress: u64,
    ) -> Result<(), Cause> {
        if failure.cause.is_outage() {
            self.timer.set_unreachable();
        }
        let left = self.timer.update_running(received);
        self.retry_state
            .pause_after(failure, progress, left)
            .await?;
        self.timer.update(received);
        Ok(())
    }

    /// Repeats `attempt` until it succeeds, or none should follow. `received` counts its bytes, and `progress` is
    /// that of the operation before.
    pub(crate) async fn repeat<T, A: Future<Output = Result<T, Failure>>>(
        &mut self,
        received: impl Fn() -> u64,
        progress: u64,
        mut attempt: impl FnMut() -> A,
    ) -> Result<T, Cause> {
        loop {
            match self.run(attempt(), &received, || false).await? {
                Ok(done) => return Ok(done),
                Err(failure) => self.pause_after(failure, received(), progress).await?,
            }
        }
    }
}

/// Repeats `attempt` until it succeeds, with the pauses and timeouts of `options`. `progress` counts its bytes.
///
/// It does not wait for the end of an outage, because a wrong address should be reported soon.
pub(crate) async fn repeat<T, A: Future<Output = Result<T, Failure>>>(
    location: &str,
    options: &Options,
    jitter: &Arc<Jitter>,
    progress: &AtomicU64,
    attempt: impl FnMut() -> A,
) -> Result<T, Error> {
    let progress = || progress.load(Ordering::Relaxed);
    let mut attempts = Attempts::new(options, jitter, progress());
    attempts.retry_state.retry.retries_outages = false;
    let done = attempts.repeat(progress, 0, attempt).await;
    done.map_err(|cause| attempts.retry_state.error(location, cause))
}

/// Logs the first failed read and the first success after it. Failures in between are not logged.
#[derive(Debug, Default)]
pub(crate) struct OutageLog(AtomicBool);

impl OutageLog {
    pub(crate) fn report_failure(&self, error: &Error, pause: Duration) {
        if !self.0.swap(true, Ordering::Relaxed) {
            let seconds = pause.as_secs();
            let cause = &error.cause;
            tracing::warn!("{error}: {cause}; retrying in {seconds} s and without limit");
        }
    }

    /// Notes a failure that the caller reports.
    pub(crate) fn begin(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_under_way(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn report_recovery(&self, location: &str) {
        if self.0.load(Ordering::Relaxed) && self.0.swap(false, Ordering::Relaxed) {
            tracing::info!("{location} can be read again");
        }
    }
}
