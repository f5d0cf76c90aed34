//! How many requests a server bears; shared by everyone who reads from it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::base::stats::Stats;
use crate::source::Cause;

/// Lets every request pass, until the server complains (429, 503). Then half as many as were under
/// way may be at once; one more after each round of that many that went well, until there are as
/// many as ever. While a pause lasts that the server asked for, none begins.
#[derive(Debug)]
pub(super) struct Gate {
    /// With so many requests at once the complaint is forgotten.
    most: usize,
    /// No longer pause is kept.
    timeout: Duration,
    state: Mutex<State>,
    changed: Notify,
    stats: Arc<Stats>,
}

#[derive(Debug, Default)]
struct State {
    under_way: usize,
    /// `None` while the server does not complain.
    allowed: Option<usize>,
    /// Requests that went well since the number was changed.
    well: usize,
    /// Complaints that were acted upon.
    complaints: u64,
    closed_until: Option<Instant>,
}

/// A request under way, until dropped.
#[derive(Debug)]
pub(super) struct Pass<'a> {
    gate: &'a Gate,
    /// Complaints before it: later ones were not about it.
    complaints: u64,
}

impl Gate {
    pub(super) fn new(most: usize, timeout: Duration, stats: Arc<Stats>) -> Self {
        Self {
            most,
            timeout,
            state: Mutex::default(),
            changed: Notify::new(),
            stats,
        }
    }

    /// Requests that may be under way at once.
    pub(super) fn allowed(&self) -> usize {
        self.lock().allowed.unwrap_or(usize::MAX)
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
        let complaints = state.complaints;
        drop(state);
        // Several passes may have come back with only one of those who wait told of it.
        self.changed.notify_one();
        Ok(Pass {
            gate: self,
            complaints,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pass<'_> {
    /// The server complained about this request, and asked for a pause of `asked`.
    pub(super) fn complained(&self, asked: Option<Duration>) {
        let gate = self.gate;
        let mut state = gate.lock();
        // What was sent together is refused together, and says one thing only.
        if self.complaints == state.complaints {
            state.complaints += 1;
            state.allowed = Some((state.under_way / 2).max(1));
            state.well = 0;
            gate.stats.source_slowdowns.increment();
        }
        // Nobody waits for what is further away; each read hears of it from the server itself.
        if let Some(asked) = asked.filter(|&asked| asked < gate.timeout) {
            state.closed_until = state.closed_until.max(Some(Instant::now() + asked));
        }
    }

    /// The request went well.
    pub(super) fn went_well(&self) {
        let mut state = self.gate.lock();
        let Some(allowed) = state.allowed else {
            return;
        };
        state.well += 1;
        if state.well >= allowed {
            state.well = 0;
            state.allowed = Some(allowed + 1).filter(|&allowed| allowed < self.gate.most);
        }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.gate.lock().under_way -= 1;
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
