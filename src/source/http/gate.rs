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
const OVERTAKEN: Duration = Duration::from_millis(100);

/// How many times as long as one of these two took.
const OVERTAKEN_TIMES: u32 = 4;

/// How often to look.
const TICK: Duration = Duration::from_millis(50);

/// Requests that go well before one more is tried than a server has answered at once; twice as many after
/// each try in vain, up to the last number.
const REST: usize = 16;
const LONGEST_REST: usize = 1024;

/// How many times fewer requests go well before one more is tried, each time that one more went well on a
/// server that was taken for a serial one.
const SERIAL_REST_FALL: usize = 4;

/// How many times as many rounds must go well before one more is tried, after one more led to a complaint;
/// and at most.
const VAIN_RISE: usize = 4;
const MAX_ROUNDS: usize = 256;

/// Lets every request pass, until the server complains (429, 503). Then half as many as were under
/// way may be at once; one more after each round of that many that went well, until there are as
/// many as ever. Each time that one more leads to a complaint, it takes four times as many rounds, because a
/// server with a fixed limit complains each time. While a pause lasts that the server asked for, none begins.
///
/// A server may also leave some connections waiting until others are closed. Requests there are
/// [overtaken](Pass::overtaken) by later ones, and have to be sent anew; from then on no more may be under way
/// at once than were answered, and one more is tried after a rest that doubles with each try in vain.
#[derive(Debug)]
pub(super) struct Gate {
    /// With so many requests at once the complaint is forgotten.
    most: usize,
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
    under_way: usize,
    /// Of these, those that the server complained about.
    refused: usize,
    /// `None` while the server does not complain.
    allowed: Option<usize>,
    /// Requests that went well since the number was changed.
    well: usize,
    /// Well-gone requests for one more: as many as are allowed, or a rest after one was overtaken or the
    /// scan found that the server answers one after the other.
    rest: Option<usize>,
    /// Whether the number was raised since the last complaint, and rounds until it is raised, minus one.
    has_risen: bool,
    extra_rounds: usize,
    /// Complaints that were acted upon.
    complaints: u64,
    closed_until: Option<Instant>,
    /// Passes given out so far.
    passes: u64,
    /// When those under way that have no answer were sent, by the number of their pass.
    unanswered: BTreeMap<u64, Instant>,
    /// The last two passes, in their order, with which requests went well, and how long those took.
    last_well: [Option<(u64, Duration)>; 2],
    /// Whether a request was taken back since one went well that had no answer either when it was the only one.
    was_alone: bool,
    /// Whether the number is small because the server answers one after the other, and not because it
    /// leaves connections waiting.
    is_serial: bool,
}

impl State {
    /// Whether `pass`, sent at `sent`, has no answer while two later ones were answered whole, for too long.
    /// Where one request is allowed at once, another connection may be the one that is served.
    fn is_overtaken(&self, pass: u64, sent: Instant) -> bool {
        let [_, Some((other, took))] = self.last_well else {
            return false;
        };
        let patience = (took * OVERTAKEN_TIMES).max(OVERTAKEN);
        let is_alone = self.is_narrow() && self.allowed == Some(1);
        if other > pass {
            sent.elapsed() >= patience
        } else {
            is_alone && !self.was_alone && sent.elapsed() >= patience * 2
        }
    }

    /// Whether the server was seen to leave connections waiting.
    fn is_narrow(&self) -> bool {
        self.rest.is_some() && self.allowed.is_some() && !self.is_serial
    }

    /// A request with `pass` went well, and took so long.
    fn went_well(&mut self, pass: u64, took: Duration) {
        self.was_alone = false;
        let mut wells = [Some((pass, took)), self.last_well[0], self.last_well[1]];
        wells.sort_unstable_by_key(|well| std::cmp::Reverse(well.map(|(pass, _)| pass)));
        let [last, before, _] = wells;
        self.last_well = [last, before];
    }
}

/// A request under way, until dropped.
#[derive(Debug)]
pub(super) struct Pass<'a> {
    gate: &'a Gate,
    number: u64,
    sent: Instant,
    /// Complaints before it: later ones were not about it.
    complaints: u64,
    is_refused: AtomicBool,
}

impl Gate {
    pub(super) fn new(most: usize, timeout: Duration, stats: Arc<Stats>) -> Self {
        Self {
            most,
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
    pub(super) fn allowed(&self) -> usize {
        self.lock().allowed.unwrap_or(usize::MAX)
    }

    /// Whether the server was seen to leave connections waiting.
    pub(super) fn is_narrow(&self) -> bool {
        self.lock().is_narrow()
    }

    /// Allows one request at once, because the server was seen to answer one after the other.
    pub(super) fn limit_to_one(&self) {
        let mut state = self.lock();
        state.allowed = Some(1);
        state.well = 0;
        state.rest = Some(LONGEST_REST);
        state.is_serial = true;
    }

    /// Waits until another request may be sent.
    ///
    /// # Errors
    /// When the server asked for a pause that does not end within `left`.
    ///
    /// # Cancel safety
    /// Nothing is taken until the future is ready.
    pub(super) async fn enter(&self, left: Duration) -> Result<Pass<'_>, Cause> {
        loop {
            let closed = match self.try_enter() {
                Ok(pass) => return Ok(pass),
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
    fn try_enter(&self) -> Result<Pass<'_>, Option<Duration>> {
        let mut state = self.lock();
        if let Some(until) = state.closed_until {
            let pause = until.saturating_duration_since(Instant::now());
            if !pause.is_zero() {
                return Err(Some(pause));
            }
            state.closed_until = None;
        }
        if state.allowed.is_some_and(|most| state.under_way >= most) {
            return Err(None);
        }
        state.under_way += 1;
        state.passes += 1;
        let (number, complaints) = (state.passes, state.complaints);
        let sent = Instant::now();
        state.unanswered.insert(number, sent);
        drop(state);
        // Several passes may have come back with only one of those who wait told of it.
        self.changed.notify_one();
        Ok(Pass {
            gate: self,
            number,
            sent,
            complaints,
            is_refused: AtomicBool::new(false),
        })
    }

    /// Where the request with `pass` stands; one that is overtaken is from now on no longer waited for.
    fn look(&self, pass: &Pass<'_>) -> Standing {
        let mut state = self.lock();
        if !state.unanswered.contains_key(&pass.number) {
            return Standing::Answered;
        }
        if !state.is_overtaken(pass.number, pass.sent) {
            return Standing::Waiting;
        }
        let waiting = state.unanswered.iter();
        let overtaken = waiting.filter(|&(&pass, &sent)| state.is_overtaken(pass, sent));
        let answered = state.under_way.saturating_sub(overtaken.count()).max(1);
        state.was_alone |= state.under_way == 1;
        state.unanswered.remove(&pass.number);
        if state.allowed.is_none_or(|allowed| answered < allowed) {
            state.allowed = Some(answered);
            state.well = 0;
            let rest = state.rest.map_or(REST, |rest| rest.saturating_mul(2));
            state.rest = Some(rest.min(LONGEST_REST));
            state.is_serial = false;
        }
        self.stats.source_starved_retries.increment();
        Standing::Overtaken
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How a request fares among the others.
enum Standing {
    Waiting,
    Answered,
    Overtaken,
}

impl Pass<'_> {
    /// The server complained about this request, and asked for a pause of `asked`. Returns whether another
    /// request is under way that it did not complain about: then it may be their number that it refuses.
    pub(super) fn complained(&self, asked: Option<Duration>) -> bool {
        let gate = self.gate;
        let mut state = gate.lock();
        if !self.is_refused.swap(true, Ordering::Relaxed) {
            state.refused += 1;
        }
        // What was sent together is refused together, and says one thing only.
        if self.complaints == state.complaints {
            state.complaints += 1;
            if std::mem::take(&mut state.has_risen) {
                let rounds = (state.extra_rounds + 1).saturating_mul(VAIN_RISE);
                state.extra_rounds = rounds.min(MAX_ROUNDS) - 1;
            }
            state.allowed = Some((state.under_way / 2).max(1));
            state.well = 0;
            state.rest = None;
            gate.stats.source_slowdowns.increment();
        }
        // Nobody waits for what is further away; each read hears of it from the server itself.
        if let Some(asked) = asked.filter(|&asked| asked < gate.timeout) {
            state.closed_until = state.closed_until.max(Some(Instant::now() + asked));
        }
        state.under_way > state.refused
    }

    /// The server has begun to answer the request.
    pub(super) fn answered(&self) {
        self.gate.lock().unanswered.remove(&self.number);
    }

    /// Bytes of the answer came.
    pub(super) fn received(&self) {
        let millis = self.gate.created.elapsed().as_millis();
        let millis = u64::try_from(millis).unwrap_or(u64::MAX).max(1);
        self.gate.last_bytes_millis.store(millis, Ordering::Relaxed);
    }

    /// Waits until no bytes have come from the server for `idle` since the request was sent, to whichever
    /// request: on a server that answers one request after the other, this one waits for those before.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(super) async fn server_is_silent(&self, idle: Duration) {
        loop {
            let heard = self
                .gate
                .last_bytes()
                .map_or(self.sent, |last| last.max(self.sent));
            let left = idle.saturating_sub(heard.elapsed());
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
            tokio::time::sleep(TICK).await;
            match self.gate.look(self) {
                Standing::Waiting => {}
                Standing::Answered => return std::future::pending().await,
                Standing::Overtaken => return,
            }
        }
    }

    /// The request went well.
    pub(super) fn went_well(&self) {
        let mut state = self.gate.lock();
        state.went_well(self.number, self.sent.elapsed());
        let Some(allowed) = state.allowed else {
            return;
        };
        state.well += 1;
        let rounds = allowed.saturating_mul(state.extra_rounds + 1);
        if state.well >= state.rest.unwrap_or(rounds) {
            state.well = 0;
            state.has_risen = true;
            state.allowed = Some(allowed + 1).filter(|&allowed| allowed < self.gate.most);
            // What proves wrong of a serial server is corrected faster with each request more.
            if state.is_serial {
                let rest = state.rest.map(|rest| (rest / SERIAL_REST_FALL).max(REST));
                state.rest = rest;
            }
        }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        state.under_way -= 1;
        if *self.is_refused.get_mut() {
            state.refused -= 1;
        }
        state.unanswered.remove(&self.number);
        drop(state);
        self.gate.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    const LEFT: Duration = Duration::from_mins(1);

    fn gate(most: usize) -> Gate {
        Gate::new(most, LEFT, Arc::default())
    }

    fn passes(gate: &Gate, count: usize) -> Vec<Pass<'_>> {
        let enter = |_| gate.enter(LEFT).now_or_never();
        let passes = (0..count).map_while(enter);
        passes.map(|pass| pass.expect("open")).collect()
    }

    #[test]
    fn everyone_passes_until_the_server_complains() {
        let gate = gate(16);
        let out = passes(&gate, 100);
        assert_eq!(out.len(), 100);
        for pass in &out {
            pass.complained(None);
        }
        assert_eq!(gate.allowed(), 50, "once for all that were sent together");
        assert_eq!(gate.stats.source_slowdowns.get(), 1);
        drop(out);
        let out = passes(&gate, 100);
        assert_eq!(out.len(), 50);
        out[0].complained(None);
        assert_eq!(gate.allowed(), 25);
        drop(out);
        for _ in 0..10 {
            passes(&gate, 1)[0].complained(None);
        }
        assert_eq!(gate.allowed(), 1);
    }

    #[test]
    fn refusal_of_all_requests_is_not_for_their_number() {
        let gate = gate(16);
        let mut out = passes(&gate, 3);
        assert!(out[0].complained(None) && out[1].complained(None));
        assert!(!out[2].complained(None), "none is served");
        out.truncate(1);
        assert!(!out[0].complained(None), "the only one");
    }

    #[test]
    fn one_more_after_each_round_until_there_are_as_many_as_ever() {
        let gate = gate(4);
        passes(&gate, 1)[0].complained(None);
        let mut rounds = Vec::new();
        for _ in 0..6 {
            passes(&gate, 1)[0].went_well();
            rounds.push(gate.allowed());
        }
        assert_eq!(rounds, [2, 2, 3, 3, 3, usize::MAX]);
        assert_eq!(passes(&gate, 100).len(), 100);
    }

    #[test]
    fn rise_that_leads_to_a_complaint_is_repeated_after_four_times_as_many_rounds() {
        let gate = gate(16);
        let mut rounds = Vec::new();
        for _ in 0..4 {
            passes(&gate, 1)[0].complained(None);
            let mut well = 0;
            while gate.allowed() == 1 {
                passes(&gate, 1)[0].went_well();
                well += 1;
            }
            rounds.push(well);
        }
        assert_eq!(rounds, [1, 4, 16, 64]);
    }

    #[test]
    fn who_waits_passes_when_another_comes_back() {
        let gate = gate(16);
        passes(&gate, 5)[0].complained(None);
        let mut out = passes(&gate, 5);
        assert_eq!(out.len(), 2);
        let mut one = Box::pin(gate.enter(LEFT));
        let mut two = Box::pin(gate.enter(LEFT));
        assert!((&mut one).now_or_never().is_none() && (&mut two).now_or_never().is_none());
        out.clear();
        let one = one.now_or_never().expect("told").expect("open");
        drop((two.now_or_never().expect("told"), one));
        assert_eq!(passes(&gate, 5).len(), 2);
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
    fn requests_without_an_answer_are_sent_anew_once_two_later_ones_are_answered() {
        run(async {
            let gate = gate(16);
            let out = passes(&gate, 4);
            let waits = out[0].overtaken();
            tokio::pin!(waits);
            let long = Duration::from_secs(5);
            let one_later = tokio::time::timeout(long, &mut waits).await;
            assert!(one_later.is_err(), "nobody was answered");
            out[2].answered();
            out[2].went_well();
            let one_later = tokio::time::timeout(long, &mut waits).await;
            assert!(one_later.is_err(), "one alone may have been quick");
            out[3].answered();
            out[3].went_well();
            let two_later = tokio::time::timeout(long * 20, &mut waits).await;
            assert!(two_later.is_ok(), "two have overtaken it");
            assert_eq!(gate.allowed(), 2, "as many as were answered");
            assert!(gate.is_narrow());
            assert_eq!(gate.stats.source_starved_retries.get(), 1);
        });
    }

    #[test]
    fn a_request_with_an_answer_is_never_sent_anew() {
        run(async {
            let gate = gate(16);
            let out = passes(&gate, 3);
            for pass in &out {
                pass.answered();
            }
            out[1].went_well();
            out[2].went_well();
            let waits = tokio::time::timeout(LEFT, out[0].overtaken());
            assert!(waits.await.is_err());
            assert_eq!(gate.allowed(), usize::MAX);
        });
    }

    #[test]
    fn one_more_than_was_answered_is_tried_after_a_rest_that_doubles() {
        run(async {
            let gate = gate(16);
            let mut rests = Vec::new();
            for _ in 0..3 {
                let out = passes(&gate, 3);
                for pass in out.iter().skip(1) {
                    pass.answered();
                    pass.went_well();
                }
                if let [first, ..] = out.as_slice() {
                    tokio::time::timeout(LEFT, first.overtaken())
                        .await
                        .expect("two have overtaken it");
                }
                drop(out);
                let allowed = gate.allowed();
                let mut well = 0;
                while gate.allowed() == allowed {
                    let pass = passes(&gate, 1).pop().expect("one may pass");
                    pass.answered();
                    pass.went_well();
                    drop(pass);
                    well += 1;
                }
                rests.push((allowed, well));
            }
            assert_eq!(rests, [(2, REST), (2, REST * 2), (2, REST * 4)]);
        });
    }

    #[test]
    fn serial_server_gets_one_request_at_once_for_long() {
        let gate = gate(16);
        gate.limit_to_one();
        for _ in 1..LONGEST_REST {
            let out = passes(&gate, 4);
            assert_eq!(out.len(), 1);
            out[0].answered();
            out[0].went_well();
        }
        let mut rests = Vec::new();
        let mut well = 0;
        while gate.allowed() < usize::MAX {
            let allowed = gate.allowed();
            passes(&gate, 1)[0].went_well();
            well += 1;
            if gate.allowed() > allowed {
                rests.push(std::mem::take(&mut well));
            }
        }
        assert_eq!(rests[..5], [1, 256, 64, 16, 16]);
        assert_eq!(rests.len(), 15, "up to as many as ever");
    }

    #[test]
    fn a_pause_is_everyones() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let gate = gate(16);
            passes(&gate, 1)[0].complained(Some(Duration::from_millis(20)));
            assert!(gate.enter(LEFT).now_or_never().is_none());
            let refused = gate.enter(Duration::from_millis(1)).await;
            assert!(matches!(refused, Err(Cause::Busy(_))), "{refused:?}");
            assert!(gate.enter(LEFT).await.is_ok(), "it ends");
            passes(&gate, 1)[0].complained(Some(LEFT));
            assert_eq!(passes(&gate, 1).len(), 1, "nobody would wait for that");
        });
    }
}
