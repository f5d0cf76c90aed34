//! Concurrency limit of a server, shared by all readers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::source::Cause;

/// Minimum wait for an answer before a request is overtaken by two completely answered later ones. A server
/// of one connection at a time makes it wait for the end of that connection.
const MIN_OVERTAKEN_WAIT: Duration = Duration::from_millis(100);

/// Minimum wait as a multiple of the duration of one of these two.
const OVERTAKEN_FACTOR: u32 = 4;

const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Successes before the limit is raised after a starvation. They double after each further one.
const MIN_SUCCESSES_TO_RAISE: usize = 16;
const MAX_SUCCESSES_TO_RAISE: usize = 1024;

/// Divisor of that number after each successful raise on a server that was considered serial.
const SERIAL_DECAY: usize = 4;

/// Factor for the rounds before a raise, after one that was throttled, and their maximum.
const FAILED_RAISE_FACTOR: usize = 4;
const MAX_ROUNDS: usize = 256;

/// Limits the requests in flight after the server throttles (429, 503).
///
/// Requests are unlimited until then, and after that limited to half of those in flight. The limit rises by
/// one after each round of that many successes. A raise that leads to throttling makes the next one wait four
/// times as many rounds, because a server with a fixed limit throttles each time. No request starts during a
/// pause that the server asked for.
///
/// Some servers leave connections waiting until others are closed. Requests there are resent once
/// [overtaken](Permit::overtaken). The limit is then the number of answered requests, and rises ever later.
#[derive(Debug)]
pub(super) struct ConcurrencyLimiter {
    /// Limit at which throttling is forgotten.
    max_requests: usize,
    timeout: Duration,
    state: Mutex<State>,
    changed: Notify,
    stats: Arc<Stats>,
    created: Instant,
    /// Time of the last bytes for any request, in milliseconds after `created`.
    last_bytes_millis: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    in_flight: usize,
    throttled_requests: usize,
    /// `None` while the server does not throttle.
    limit: Option<usize>,
    /// Successful requests since the limit changed.
    successes: usize,
    /// Successes needed for a raise, after a request was overtaken or the server found serial; else `limit`.
    successes_to_raise: Option<usize>,
    /// Whether the limit was raised since the last throttling, and additional rounds before the next raise.
    was_raised: bool,
    extra_rounds: usize,
    throttle_count: u64,
    paused_until: Option<Instant>,
    permits_issued: u64,
    /// Send times of unanswered requests, by permit number.
    unanswered: BTreeMap<u64, Instant>,
    /// The last two successful permits, newest first, and their durations.
    last_successes: [Option<(u64, Duration)>; 2],
    /// Whether a lone request was withdrawn since the last success; another is then not withdrawn.
    was_only_request: bool,
    /// Whether the limit is for a serial server, and not for one that leaves connections waiting.
    is_serial: bool,
}

impl State {
    /// Whether the unanswered `permit`, sent at `sent`, waited too long after two later ones were answered.
    /// With a limit of one, the server may be serving another connection.
    fn is_overtaken(&self, permit: u64, sent: Instant) -> bool {
        let [_, Some((other, took))] = self.last_successes else {
            return false;
        };
        let max_wait = (took * OVERTAKEN_FACTOR).max(MIN_OVERTAKEN_WAIT);
        let is_alone = self.starves_connections() && self.limit == Some(1);
        if other > permit {
            sent.elapsed() >= max_wait
        } else {
            is_alone && !self.was_only_request && sent.elapsed() >= max_wait * 2
        }
    }

    /// Whether the server was found to leave connections waiting.
    fn starves_connections(&self) -> bool {
        self.successes_to_raise.is_some() && self.limit.is_some() && !self.is_serial
    }

    fn succeeded(&mut self, permit: u64, took: Duration) {
        self.was_only_request = false;
        let mut latest = [
            Some((permit, took)),
            self.last_successes[0],
            self.last_successes[1],
        ];
        latest.sort_unstable_by_key(|success| std::cmp::Reverse(success.map(|(permit, _)| permit)));
        let [last, before, _] = latest;
        self.last_successes = [last, before];
    }
}

#[derive(Debug)]
pub(super) struct Permit<'a> {
    limiter: &'a ConcurrencyLimiter,
    number: u64,
    sent: Instant,
    /// Throttle count at its start. Later throttlings do not concern it.
    throttle_count: u64,
    is_throttled: AtomicBool,
}

impl ConcurrencyLimiter {
    pub(super) fn new(max_requests: usize, timeout: Duration, stats: Arc<Stats>) -> Self {
        Self {
            max_requests,
            timeout,
            state: Mutex::default(),
            changed: Notify::new(),
            stats,
            created: Instant::now(),
            last_bytes_millis: AtomicU64::new(0),
        }
    }

    pub(super) fn received_within(&self, time: Duration) -> bool {
        self.last_bytes().is_some_and(|last| last.elapsed() <= time)
    }

    fn last_bytes(&self) -> Option<Instant> {
        let millis = self.last_bytes_millis.load(Ordering::Relaxed);
        (millis > 0).then(|| self.created + Duration::from_millis(millis))
    }

    pub(super) fn limit(&self) -> usize {
        self.state.lock().limit.unwrap_or(usize::MAX)
    }

    pub(super) fn starves_connections(&self) -> bool {
        self.state.lock().starves_connections()
    }

    /// Sets the limit to one, because the server was found to be serial.
    pub(super) fn limit_to_one(&self) {
        let mut state = self.state.lock();
        state.limit = Some(1);
        state.successes = 0;
        state.successes_to_raise = Some(MAX_SUCCESSES_TO_RAISE);
        state.is_serial = true;
    }

    /// Waits for a permit.
    ///
    /// # Cancel safety
    /// No permit is taken until the future is ready.
    pub(super) async fn acquire(&self, left: Duration) -> Result<Permit<'_>, Cause> {
        loop {
            let closed = match self.try_acquire() {
                Ok(permit) => return Ok(permit),
                Err(closed) => closed,
            };
            match closed {
                Some(pause) => {
                    // This waiter does not use its notification, so pass it on.
                    self.changed.notify_one();
                    if pause >= left {
                        return Err(Cause::Busy(pause));
                    }
                    tokio::time::sleep(pause).await;
                }
                None => self.changed.notified().await,
            }
        }
    }

    /// Takes a permit without waiting. The error is the remaining pause; `None` if all are in use.
    fn try_acquire(&self) -> Result<Permit<'_>, Option<Duration>> {
        let mut state = self.state.lock();
        if let Some(until) = state.paused_until {
            let pause = until.saturating_duration_since(Instant::now());
            if !pause.is_zero() {
                return Err(Some(pause));
            }
            state.paused_until = None;
        }
        if state
            .limit
            .is_some_and(|max_requests| state.in_flight >= max_requests)
        {
            return Err(None);
        }
        state.in_flight += 1;
        state.permits_issued += 1;
        let (number, throttle_count) = (state.permits_issued, state.throttle_count);
        let sent = Instant::now();
        state.unanswered.insert(number, sent);
        drop(state);
        // Several permits may have been released with only one waiter notified.
        self.changed.notify_one();
        Ok(Permit {
            limiter: self,
            number,
            sent,
            throttle_count,
            is_throttled: AtomicBool::new(false),
        })
    }

    /// Returns the state of the request with `permit`. An overtaken one no longer counts as unanswered.
    fn check(&self, permit: &Permit<'_>) -> RequestState {
        let mut state = self.state.lock();
        if !state.unanswered.contains_key(&permit.number) {
            return RequestState::Answered;
        }
        if !state.is_overtaken(permit.number, permit.sent) {
            return RequestState::Waiting;
        }
        let waiting = state.unanswered.iter();
        let overtaken = waiting.filter(|&(&permit, &sent)| state.is_overtaken(permit, sent));
        let answered = state.in_flight.saturating_sub(overtaken.count()).max(1);
        state.was_only_request |= state.in_flight == 1;
        state.unanswered.remove(&permit.number);
        if state.limit.is_none_or(|limit| answered < limit) {
            state.limit = Some(answered);
            state.successes = 0;
            let successes_to_raise = state
                .successes_to_raise
                .map_or(MIN_SUCCESSES_TO_RAISE, |successes_to_raise| {
                    successes_to_raise.saturating_mul(2)
                });
            state.successes_to_raise = Some(successes_to_raise.min(MAX_SUCCESSES_TO_RAISE));
            state.is_serial = false;
        }
        self.stats.source_starved_retries.increment();
        RequestState::Overtaken
    }
}

enum RequestState {
    Waiting,
    Answered,
    Overtaken,
}

impl Permit<'_> {
    /// Records a throttled request, for which the server asked for `pause`. Returns whether an
    /// unthrottled request is in flight. If so, the server may be refusing the concurrency.
    pub(super) fn throttled(&self, pause: Option<Duration>) -> bool {
        let limiter = self.limiter;
        let mut state = limiter.state.lock();
        if !self.is_throttled.swap(true, Ordering::Relaxed) {
            state.throttled_requests += 1;
        }
        // Requests sent together are throttled together, and count once.
        if self.throttle_count == state.throttle_count {
            state.throttle_count += 1;
            if std::mem::take(&mut state.was_raised) {
                let rounds = (state.extra_rounds + 1).saturating_mul(FAILED_RAISE_FACTOR);
                state.extra_rounds = rounds.min(MAX_ROUNDS) - 1;
            }
            state.limit = Some((state.in_flight / 2).max(1));
            state.successes = 0;
            state.successes_to_raise = None;
            limiter.stats.source_slowdowns.increment();
        }
        // Longer pauses exceed the timeout. Each read gets them from the server itself.
        if let Some(pause) = pause.filter(|&pause| pause < limiter.timeout) {
            state.paused_until = state.paused_until.max(Some(Instant::now() + pause));
        }
        state.in_flight > state.throttled_requests
    }

    pub(super) fn answered(&self) {
        self.limiter.state.lock().unanswered.remove(&self.number);
    }

    pub(super) fn received(&self) {
        let millis = self.limiter.created.elapsed().as_millis();
        let millis = u64::try_from(millis).unwrap_or(u64::MAX).max(1);
        self.limiter
            .last_bytes_millis
            .store(millis, Ordering::Relaxed);
    }

    /// Waits until the server has sent no bytes for `idle`, to any request, since this one was sent. On a
    /// serial server, this request waits for those before. Cancel safe.
    pub(super) async fn wait_until_silent(&self, idle: Duration) {
        loop {
            let last_bytes = self
                .limiter
                .last_bytes()
                .map_or(self.sent, |last| last.max(self.sent));
            let left = idle.saturating_sub(last_bytes.elapsed());
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left).await;
        }
    }

    /// Waits until the request is overtaken, and lowers the limit; never returns once answered. Cancel safe.
    pub(super) async fn overtaken(&self) {
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            match self.limiter.check(self) {
                RequestState::Waiting => {}
                RequestState::Answered => return std::future::pending().await,
                RequestState::Overtaken => return,
            }
        }
    }

    pub(super) fn succeeded(&self) {
        let mut state = self.limiter.state.lock();
        state.succeeded(self.number, self.sent.elapsed());
        let Some(limit) = state.limit else {
            return;
        };
        state.successes += 1;
        let rounds = limit.saturating_mul(state.extra_rounds + 1);
        if state.successes >= state.successes_to_raise.unwrap_or(rounds) {
            state.successes = 0;
            state.was_raised = true;
            state.limit = Some(limit + 1).filter(|&limit| limit < self.limiter.max_requests);
            // If the server is not serial after all, each raise makes the next one faster.
            if state.is_serial {
                let successes_to_raise = state.successes_to_raise.map(|successes_to_raise| {
                    (successes_to_raise / SERIAL_DECAY).max(MIN_SUCCESSES_TO_RAISE)
                });
                state.successes_to_raise = successes_to_raise;
            }
        }
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut state = self.limiter.state.lock();
        state.in_flight -= 1;
        if *self.is_throttled.get_mut() {
            state.throttled_requests -= 1;
        }
        state.unanswered.remove(&self.number);
        drop(state);
        self.limiter.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    const LEFT: Duration = Duration::from_mins(1);

    fn limiter(max_requests: usize) -> ConcurrencyLimiter {
        ConcurrencyLimiter::new(max_requests, LEFT, Arc::default())
    }

    fn acquire_permits(limiter: &ConcurrencyLimiter, count: usize) -> Vec<Permit<'_>> {
        let enter = |_| limiter.acquire(LEFT).now_or_never();
        let permits = (0..count).map_while(enter);
        permits.map(|permit| permit.expect("open")).collect()
    }

    // Promises: request-rejected
    #[test]
    fn requests_are_unlimited_until_the_server_throttles() {
        let limiter = limiter(16);
        let out = acquire_permits(&limiter, 100);
        assert_eq!(out.len(), 100);
        for permit in &out {
            permit.throttled(None);
        }
        assert_eq!(limiter.limit(), 50, "once for all that were sent together");
        assert_eq!(limiter.stats.source_slowdowns.get(), 1);
        drop(out);
        let out = acquire_permits(&limiter, 100);
        assert_eq!(out.len(), 50);
        out[0].throttled(None);
        assert_eq!(limiter.limit(), 25);
        drop(out);
        for _ in 0..10 {
            acquire_permits(&limiter, 1)[0].throttled(None);
        }
        assert_eq!(limiter.limit(), 1);
    }

    // Promises: request-rejected
    #[test]
    fn throttling_all_requests_is_not_for_concurrency() {
        let limiter = limiter(16);
        let mut out = acquire_permits(&limiter, 3);
        assert!(out[0].throttled(None) && out[1].throttled(None));
        assert!(!out[2].throttled(None), "none is served");
        out.truncate(1);
        assert!(!out[0].throttled(None), "the only one");
    }

    // Promises: request-rejected
    #[test]
    fn limit_rises_by_one_each_round_up_to_the_maximum() {
        let limiter = limiter(4);
        acquire_permits(&limiter, 1)[0].throttled(None);
        let mut rounds = Vec::new();
        for _ in 0..6 {
            acquire_permits(&limiter, 1)[0].succeeded();
            rounds.push(limiter.limit());
        }
        assert_eq!(rounds, [2, 2, 3, 3, 3, usize::MAX]);
        assert_eq!(acquire_permits(&limiter, 100).len(), 100);
    }

    // Promises: request-rejected
    #[test]
    fn throttled_raise_is_retried_after_four_times_as_many_rounds() {
        let limiter = limiter(16);
        let mut rounds = Vec::new();
        for _ in 0..4 {
            acquire_permits(&limiter, 1)[0].throttled(None);
            let mut successes = 0;
            while limiter.limit() == 1 {
                acquire_permits(&limiter, 1)[0].succeeded();
                successes += 1;
            }
            rounds.push(successes);
        }
        assert_eq!(rounds, [1, 4, 16, 64]);
    }

    #[test]
    fn waiter_gets_a_released_permit() {
        let limiter = limiter(16);
        acquire_permits(&limiter, 5)[0].throttled(None);
        let mut out = acquire_permits(&limiter, 5);
        assert_eq!(out.len(), 2);
        let mut one = Box::pin(limiter.acquire(LEFT));
        let mut two = Box::pin(limiter.acquire(LEFT));
        assert!((&mut one).now_or_never().is_none() && (&mut two).now_or_never().is_none());
        out.clear();
        let one = one.now_or_never().expect("told").expect("open");
        drop((two.now_or_never().expect("told"), one));
        assert_eq!(acquire_permits(&limiter, 5).len(), 2);
    }

    fn run<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime");
        runtime.block_on(future)
    }

    #[test]
    fn request_is_resent_once_two_later_ones_are_answered() {
        run(async {
            let limiter = limiter(16);
            let out = acquire_permits(&limiter, 4);
            let waits = out[0].overtaken();
            tokio::pin!(waits);
            let long = Duration::from_secs(5);
            let one_later = tokio::time::timeout(long, &mut waits).await;
            assert!(one_later.is_err(), "no request was answered");
            out[2].answered();
            out[2].succeeded();
            let one_later = tokio::time::timeout(long, &mut waits).await;
            assert!(one_later.is_err(), "one alone may have been quick");
            out[3].answered();
            out[3].succeeded();
            let two_later = tokio::time::timeout(long * 20, &mut waits).await;
            assert!(two_later.is_ok(), "two have overtaken it");
            assert_eq!(limiter.limit(), 2, "as many as were answered");
            assert!(limiter.starves_connections());
            assert_eq!(limiter.stats.source_starved_retries.get(), 1);
        });
    }

    #[test]
    fn answered_request_is_never_resent() {
        run(async {
            let limiter = limiter(16);
            let out = acquire_permits(&limiter, 3);
            for permit in &out {
                permit.answered();
            }
            out[1].succeeded();
            out[2].succeeded();
            let waits = tokio::time::timeout(LEFT, out[0].overtaken());
            assert!(waits.await.is_err());
            assert_eq!(limiter.limit(), usize::MAX);
        });
    }

    #[test]
    fn raise_after_starvation_waits_twice_as_long_each_time() {
        run(async {
            let limiter = limiter(16);
            let mut rests = Vec::new();
            for _ in 0..3 {
                let out = acquire_permits(&limiter, 3);
                for permit in out.iter().skip(1) {
                    permit.answered();
                    permit.succeeded();
                }
                if let [first, ..] = out.as_slice() {
                    tokio::time::timeout(LEFT, first.overtaken())
                        .await
                        .expect("two have overtaken it");
                }
                drop(out);
                let limit = limiter.limit();
                let mut successes = 0;
                while limiter.limit() == limit {
                    let permit = acquire_permits(&limiter, 1).pop().expect("one may pass");
                    permit.answered();
                    permit.succeeded();
                    drop(permit);
                    successes += 1;
                }
                rests.push((limit, successes));
            }
            assert_eq!(
                rests,
                [
                    (2, MIN_SUCCESSES_TO_RAISE),
                    (2, MIN_SUCCESSES_TO_RAISE * 2),
                    (2, MIN_SUCCESSES_TO_RAISE * 4)
                ]
            );
        });
    }

    // Promises: request-limits
    #[test]
    fn serial_server_gets_one_request_until_many_succeed() {
        let limiter = limiter(16);
        limiter.limit_to_one();
        for _ in 1..MAX_SUCCESSES_TO_RAISE {
            let out = acquire_permits(&limiter, 4);
            assert_eq!(out.len(), 1);
            out[0].answered();
            out[0].succeeded();
        }
        let mut rests = Vec::new();
        let mut successes = 0;
        while limiter.limit() < usize::MAX {
            let limit = limiter.limit();
            acquire_permits(&limiter, 1)[0].succeeded();
            successes += 1;
            if limiter.limit() > limit {
                rests.push(std::mem::take(&mut successes));
            }
        }
        assert_eq!(rests[..5], [1, 256, 64, 16, 16]);
        assert_eq!(rests.len(), 15, "up to as many as ever");
    }

    // Promises: retry-pauses
    #[test]
    fn retry_after_pauses_all_requests() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let limiter = limiter(16);
            acquire_permits(&limiter, 1)[0].throttled(Some(Duration::from_millis(20)));
            assert!(limiter.acquire(LEFT).now_or_never().is_none());
            let result = limiter.acquire(Duration::from_millis(1)).await;
            assert!(matches!(result, Err(Cause::Busy(_))), "{result:?}");
            assert!(limiter.acquire(LEFT).await.is_ok(), "it ends");
            acquire_permits(&limiter, 1)[0].throttled(Some(LEFT));
            assert_eq!(
                acquire_permits(&limiter, 1).len(),
                1,
                "longer than any request waits"
            );
        });
    }
}
