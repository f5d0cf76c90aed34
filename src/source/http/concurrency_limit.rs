//! How many requests a server bears; shared by everyone who reads from it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::base::stats::Stats;
use crate::source::Cause;

/// How long a request may remain without an answer, at the least, while two that were sent later have been
/// answered whole. On a server that answers one connection at a time it waits until that one is closed.
const MIN_OVERTAKEN_WAIT: Duration = Duration::from_millis(100);

/// How many times as long as one of these two took.
const OVERTAKEN_FACTOR: u32 = 4;

/// How often to look.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Requests that go well before one more is tried than a server has answered at once; twice as many after
/// each try in vain, up to the last number.
const MIN_SUCCESSES_TO_RAISE: usize = 16;
const MAX_SUCCESSES_TO_RAISE: usize = 1024;

/// How many times fewer requests go well before one more is tried, each time that one more went well on a
/// server that was taken for a serial one.
const SERIAL_DECAY: usize = 4;

/// How many times as many rounds must go well before one more is tried, after one more led to a complaint;
/// and at most.
const FAILED_RAISE_FACTOR: usize = 4;
const MAX_ROUNDS: usize = 256;

/// Lets every request pass, until the server complains (429, 503). Then half as many as were under
/// way may be at once; one more after each round of that many that went well, until there are as
/// many as ever. Each time that one more leads to a complaint, it takes four times as many rounds, because a
/// server with a fixed limit complains each time. While a pause lasts that the server asked for, none begins.
///
/// A server may also leave some connections waiting until others are closed. Requests there are
/// [overtaken](Permit::overtaken) by later ones, and have to be sent anew; from then on no more may be under way
/// at once than were answered, and one more is tried after a rest that doubles with each try in vain.
#[derive(Debug)]
pub(super) struct ConcurrencyLimiter {
    /// With so many requests at once the complaint is forgotten.
    max_requests: usize,
    /// No longer pause is kept.
    timeout: Duration,
    state: Mutex<State>,
    changed: Notify,
    stats: Arc<Stats>,
    created: Instant,
    /// When bytes last came for any request, in milliseconds after `created`.
    last_bytes_millis: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    in_flight: usize,
    /// Of these, those that the server complained about.
    throttled_requests: usize,
    /// `None` while the server does not complain.
    limit: Option<usize>,
    /// Requests that went well since the number was changed.
    successes: usize,
    /// Well-gone requests for one more: as many as are allowed, or a rest after one was overtaken or the
    /// scan found that the server answers one after the other.
    successes_to_raise: Option<usize>,
    /// Whether the number was raised since the last complaint, and rounds until it is raised, minus one.
    was_raised: bool,
    extra_rounds: usize,
    /// Complaints that were acted upon.
    throttle_count: u64,
    paused_until: Option<Instant>,
    /// Passes given out so far.
    permits_issued: u64,
    /// When those under way that have no answer were sent, by the number of their pass.
    unanswered: BTreeMap<u64, Instant>,
    /// The last two passes, in their order, with which requests went well, and how long those took.
    last_successes: [Option<(u64, Duration)>; 2],
    /// Whether a request was taken back since one went well that had no answer either when it was the only one.
    was_only_request: bool,
    /// Whether the number is small because the server answers one after the other, and not because it
    /// leaves connections waiting.
    is_serial: bool,
}

impl State {
    /// Whether `permit`, sent at `sent`, has no answer while two later ones were answered whole, for too long.
    /// Where one request is allowed at once, another connection may be the one that is served.
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

    /// Whether the server was seen to leave connections waiting.
    fn starves_connections(&self) -> bool {
        self.successes_to_raise.is_some() && self.limit.is_some() && !self.is_serial
    }

    /// A request with `permit` went well, and took so long.
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

/// A request under way, until dropped.
#[derive(Debug)]
pub(super) struct Permit<'a> {
    limiter: &'a ConcurrencyLimiter,
    number: u64,
    sent: Instant,
    /// Complaints before it: later ones were not about it.
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

    /// Whether bytes came for any request within the last `time`.
    pub(super) fn received_within(&self, time: Duration) -> bool {
        self.last_bytes().is_some_and(|last| last.elapsed() <= time)
    }

    /// When bytes last came for any request.
    fn last_bytes(&self) -> Option<Instant> {
        let millis = self.last_bytes_millis.load(Ordering::Relaxed);
        (millis > 0).then(|| self.created + Duration::from_millis(millis))
    }

    /// Requests that may be under way at once.
    pub(super) fn limit(&self) -> usize {
        self.lock().limit.unwrap_or(usize::MAX)
    }

    /// Whether the server was seen to leave connections waiting.
    pub(super) fn starves_connections(&self) -> bool {
        self.lock().starves_connections()
    }

    /// Allows one request at once, because the server was seen to answer one after the other.
    pub(super) fn limit_to_one(&self) {
        let mut state = self.lock();
        state.limit = Some(1);
        state.successes = 0;
        state.successes_to_raise = Some(MAX_SUCCESSES_TO_RAISE);
        state.is_serial = true;
    }

    /// Waits until another request may be sent.
    ///
    /// # Errors
    /// When the server asked for a pause that does not end within `left`.
    ///
    /// # Cancel safety
    /// Nothing is taken until the future is ready.
    pub(super) async fn acquire(&self, left: Duration) -> Result<Permit<'_>, Cause> {
        loop {
            let closed = match self.try_acquire() {
                Ok(permit) => return Ok(permit),
                Err(closed) => closed,
            };
            match closed {
                Some(pause) => {
                    // Who was told that it is its turn, and does not take it, tells the next one.
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

    /// A pass; or how long it is closed, unless all passes are out.
    fn try_acquire(&self) -> Result<Permit<'_>, Option<Duration>> {
        let mut state = self.lock();
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
        // Several passes may have come back with only one of those who wait told of it.
        self.changed.notify_one();
        Ok(Permit {
            limiter: self,
            number,
            sent,
            throttle_count,
            is_throttled: AtomicBool::new(false),
        })
    }

    /// Where the request with `permit` stands; one that is overtaken is from now on no longer waited for.
    fn check(&self, permit: &Permit<'_>) -> RequestState {
        let mut state = self.lock();
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

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How a request fares among the others.
enum RequestState {
    Waiting,
    Answered,
    Overtaken,
}

impl Permit<'_> {
    /// The server complained about this request, and asked for a pause of `asked`. Returns whether another
    /// request is under way that it did not complain about: then it may be their number that it refuses.
    pub(super) fn throttled(&self, asked: Option<Duration>) -> bool {
        let limiter = self.limiter;
        let mut state = limiter.lock();
        if !self.is_throttled.swap(true, Ordering::Relaxed) {
            state.throttled_requests += 1;
        }
        // What was sent together is refused together, and says one thing only.
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
        // Nobody waits for what is further away; each read hears of it from the server itself.
        if let Some(asked) = asked.filter(|&asked| asked < limiter.timeout) {
            state.paused_until = state.paused_until.max(Some(Instant::now() + asked));
        }
        state.in_flight > state.throttled_requests
    }

    /// The server has begun to answer the request.
    pub(super) fn answered(&self) {
        self.limiter.lock().unanswered.remove(&self.number);
    }

    /// Bytes of the answer came.
    pub(super) fn received(&self) {
        let millis = self.limiter.created.elapsed().as_millis();
        let millis = u64::try_from(millis).unwrap_or(u64::MAX).max(1);
        self.limiter
            .last_bytes_millis
            .store(millis, Ordering::Relaxed);
    }

    /// Waits until no bytes have come from the server for `idle` since the request was sent, to whichever
    /// request: on a server that answers one request after the other, this one waits for those before.
    ///
    /// # Cancel safety
    /// Nothing is lost.
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

    /// Waits until the request is overtaken: it has no answer, and two that were sent later have all of theirs.
    /// Then no more requests are allowed than the server answers. Never returns once it was
    /// [answered](Self::answered).
    ///
    /// # Cancel safety
    /// Nothing is lost.
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

    /// The request went well.
    pub(super) fn succeeded(&self) {
        let mut state = self.limiter.lock();
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
            // What proves wrong of a serial server is corrected faster with each request more.
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
        let mut state = self.limiter.lock();
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

    #[test]
    fn throttling_all_requests_is_not_for_concurrency() {
        let limiter = limiter(16);
        let mut out = acquire_permits(&limiter, 3);
        assert!(out[0].throttled(None) && out[1].throttled(None));
        assert!(!out[2].throttled(None), "none is served");
        out.truncate(1);
        assert!(!out[0].throttled(None), "the only one");
    }

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
            assert!(one_later.is_err(), "nobody was answered");
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

    #[test]
    fn retry_after_pauses_all_requests() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
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
                "nobody would wait for that"
            );
        });
    }
}
