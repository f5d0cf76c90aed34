//! Replies that wait until what they say is known, and who gives up on them: no request outlives its
//! caller by more than a moment, or goes on when nothing comes any more.
//!
//! The kernel would tell us of a caller that got a signal (`FUSE_INTERRUPT`), but the library answers
//! that by itself, with "not implemented", and is not asked again. From then on who was killed waits
//! for our answer all the same, as nothing else ends a request that was taken. So whoever has waited
//! for a while is looked at.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, io};

use fuser::{Errno, ReplyDirectory, ReplyDirectoryPlus, ReplyEntry};

use crate::archive::Wanted;
use crate::base::stats::Stats;
use crate::base::task::Thread;

/// How often those who wait are looked at; who has waited for less is not.
const ROUND: Duration = Duration::from_millis(250);

/// How long nothing may come for somebody who waits, unless it was set otherwise.
pub(super) const TIMEOUT: Duration = Duration::from_mins(1);

/// The bit of SIGKILL in a mask of signals. The kernel sets it for every other signal that ends a
/// process, too.
const KILL: u64 = 1 << 8;

/// Why somebody waited in vain.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum Vain {
    /// Who asked is about to die.
    #[error("who asked was killed")]
    Killed,
    /// Nothing comes.
    #[error("nothing has come for as long as --timeout allows")]
    Late,
    /// Nobody is left to answer.
    #[error("the archive was closed")]
    Ended,
}

impl Vain {
    /// As the kernel hands it to programs.
    pub(super) fn errno(self) -> Errno {
        match self {
            Self::Killed => Errno::EINTR,
            Self::Late => Errno::ETIMEDOUT,
            Self::Ended => Errno::EIO,
        }
    }
}

/// What can be refused to who has waited in vain.
pub(super) trait Refusal: Send + 'static {
    /// Answers that it was in vain.
    fn refuse(self, why: Vain);
}

macro_rules! refusals {
    ($($reply:ty),+) => {
        $(impl Refusal for $reply {
            fn refuse(self, why: Vain) {
                self.error(why.errno());
            }
        })+
    };
}

refusals!(ReplyDirectory, ReplyDirectoryPlus, ReplyEntry);

/// A reply that whoever comes first may give: who knows the answer, or who gives up. Dropped, it says
/// that nobody is left to answer.
#[derive(Debug)]
pub(super) struct Kept<R: Refusal>(Arc<Mutex<Option<R>>>);

impl<R: Refusal> Kept<R> {
    /// The reply, unless it was given already.
    pub(super) fn take(self) -> Option<R> {
        lock(&self.0).take()
    }

    /// Whether the reply is still to be given.
    pub(super) fn wanted(&self) -> Wanted {
        let slot = Arc::clone(&self.0);
        Arc::new(move || !slot.is_answered())
    }
}

impl<R: Refusal> Drop for Kept<R> {
    fn drop(&mut self) {
        self.0.refuse(Vain::Ended);
    }
}

/// A kept reply whose kind does not matter.
trait Waiter: Send {
    fn is_answered(&self) -> bool;

    /// Answers that it was in vain; false when somebody was faster.
    fn refuse(&self, why: Vain) -> bool;
}

impl<R: Refusal> Waiter for Mutex<Option<R>> {
    fn is_answered(&self) -> bool {
        lock(self).is_none()
    }

    fn refuse(&self, why: Vain) -> bool {
        let reply = lock(self).take();
        reply.map(|reply| reply.refuse(why)).is_some()
    }
}

/// Somebody who waits.
struct Waiting {
    waiter: Arc<dyn Waiter + Sync>,
    /// The thread that asked; 0 where it is of no namespace that we see.
    caller: u32,
    /// Since when nothing has come for anybody.
    since: Instant,
    /// How much had come by then.
    came: u64,
}

/// Everyone who waits.
pub(super) struct Patience {
    stats: Arc<Stats>,
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: Vec<Waiting>,
    is_over: bool,
}

impl std::fmt::Debug for Patience {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Patience")
            .field("timeout", &self.timeout)
            .field("waiting", &lock(&self.state).waiting.len())
            .finish_non_exhaustive()
    }
}

impl Patience {
    /// Who waits is told that it was in vain when for `timeout` nothing was fetched or decoded, as
    /// `stats` tell.
    pub(super) fn new(timeout: Duration, stats: Arc<Stats>) -> Self {
        Self {
            stats,
            timeout,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Keeps `reply` to the thread `caller` until somebody takes it.
    pub(super) fn keep<R: Refusal>(&self, reply: R, caller: u32) -> Kept<R> {
        let slot = Arc::new(Mutex::new(Some(reply)));
        let waiting = Waiting {
            waiter: Arc::clone(&slot) as Arc<dyn Waiter + Sync>,
            caller,
            since: Instant::now(),
            came: self.came(),
        };
        let mut state = lock(&self.state);
        if state.waiting.is_empty() {
            self.changed.notify_one();
        }
        state.waiting.push(waiting);
        Kept(slot)
    }

    /// Something that changes whenever somebody is brought nearer to an answer.
    fn came(&self) -> u64 {
        let stats = &self.stats;
        [
            &stats.source_read_bytes,
            &stats.scanned_packed_bytes,
            &stats.decoded_bytes,
            &stats.unspooled_bytes,
        ]
        .map(crate::base::stats::Counter::get)
        .into_iter()
        .fold(0, u64::wrapping_add)
    }

    /// Looks at those who have waited for a while, and tells those who wait in vain.
    fn look(&self, now: Instant) {
        let came = self.came();
        let mut old = Vec::new();
        lock(&self.state).waiting.retain_mut(|waiting| {
            if waiting.waiter.is_answered() {
                return false;
            }
            if waiting.came != came {
                (waiting.came, waiting.since) = (came, now);
            }
            let is_late = now.duration_since(waiting.since) >= self.timeout;
            old.push((Arc::clone(&waiting.waiter), waiting.caller, is_late));
            true
        });
        // Without the lock: the kernel is asked, and told.
        for (waiter, caller, is_late) in old {
            if is_killed(caller) {
                if waiter.refuse(Vain::Killed) {
                    self.stats.interrupted_requests.increment();
                }
            } else if is_late && waiter.refuse(Vain::Late) {
                self.stats.late_requests.increment();
            }
        }
    }

    /// Looks again and again, until it is [over](Self::end).
    fn watch(&self) {
        loop {
            let state = lock(&self.state);
            let idle = |state: &mut State| !state.is_over && state.waiting.is_empty();
            let state = self.changed.wait_while(state, idle);
            let state = state.unwrap_or_else(PoisonError::into_inner);
            let going = |state: &mut State| !state.is_over;
            let round = self.changed.wait_timeout_while(state, ROUND, going);
            let is_over = round.unwrap_or_else(PoisonError::into_inner).0.is_over;
            if is_over {
                return;
            }
            self.look(Instant::now());
        }
    }

    /// Nobody is looked at any more.
    fn end(&self) {
        lock(&self.state).is_over = true;
        self.changed.notify_all();
    }
}

/// Watches over those who wait while it lives.
#[derive(Debug)]
pub(super) struct Watch {
    patience: Arc<Patience>,
    _thread: Thread<()>,
}

impl Watch {
    /// Begins.
    ///
    /// # Errors
    /// When the system has no thread left to give.
    pub(super) fn over(patience: &Arc<Patience>) -> io::Result<Self> {
        let watched = Arc::clone(patience);
        Ok(Self {
            patience: Arc::clone(patience),
            _thread: Thread::spawn("tarfs-patience", move || watched.watch())?,
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.patience.end();
    }
}

/// Whether the thread is about to die.
fn is_killed(thread: u32) -> bool {
    // Who cannot be looked at, or is gone because nothing kept it, counts as alive: its answer comes
    // by and by.
    let status = (thread != 0).then(|| fs::read_to_string(format!("/proc/{thread}/status")));
    status.is_some_and(|status| status.is_ok_and(|status| pending(&status) & KILL != 0))
}

/// The signals that wait for a thread or for its process, as `/proc/PID/status` has them.
fn pending(status: &str) -> u64 {
    status
        .lines()
        .filter_map(|line| {
            line.strip_prefix("SigPnd:")
                .or(line.strip_prefix("ShdPnd:"))
        })
        .filter_map(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .fold(0, |all, mask| all | mask)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// Says what it was refused with.
    struct Reply(Sender<Vain>);

    impl Refusal for Reply {
        fn refuse(self, why: Vain) {
            // A test that is over listens no more.
            self.0.send(why).unwrap_or_default();
        }
    }

    fn patience() -> Patience {
        Patience::new(TIMEOUT, Arc::default())
    }

    fn keep(patience: &Patience) -> (Kept<Reply>, Receiver<Vain>) {
        let (sender, told) = channel();
        (patience.keep(Reply(sender), std::process::id()), told)
    }

    #[test]
    fn who_waits_while_nothing_comes_is_refused_once() {
        let patience = patience();
        let (kept, told) = keep(&patience);
        let start = Instant::now();
        patience.look(start + TIMEOUT / 2);
        assert!(told.try_recv().is_err());
        let wanted = kept.wanted();
        assert!(wanted());
        patience.look(start + TIMEOUT * 2);
        assert_eq!(told.try_recv(), Ok(Vain::Late));
        assert!(!wanted());
        assert!(kept.take().is_none(), "it was given");
        patience.look(start + TIMEOUT * 3);
        assert_eq!(patience.stats.late_requests.get(), 1);
        assert!(lock(&patience.state).waiting.is_empty());
    }

    #[test]
    fn who_waits_while_something_comes_waits_on() {
        let patience = patience();
        let (kept, told) = keep(&patience);
        let start = Instant::now();
        for round in 1..5 {
            patience.stats.source_read_bytes.increment();
            patience.look(start + TIMEOUT * round);
        }
        assert!(told.try_recv().is_err());
        assert!(kept.take().is_some());
        patience.look(start + TIMEOUT * 10);
        assert!(told.try_recv().is_err(), "it was answered");
    }

    #[test]
    fn who_is_forgotten_is_told_at_once() {
        let patience = patience();
        let (kept, told) = keep(&patience);
        drop(kept);
        assert_eq!(told.try_recv(), Ok(Vain::Ended));
        patience.look(Instant::now());
        assert!(lock(&patience.state).waiting.is_empty());
    }

    #[test]
    fn signals_that_wait_are_found_in_a_status() {
        let status =
            "Name:\tcat\nSigQ:\t0/1\nSigPnd:\t0000000000000100\nShdPnd:\t0000000000004000\n";
        assert_eq!(pending(status), KILL | 1 << 14);
        assert_eq!(pending("Name:\tcat\nSigPnd:\tnonsense\n"), 0);
        assert!(!is_killed(std::process::id()));
        assert!(!is_killed(0));
    }

    #[test]
    fn a_watch_ends_with_its_owner_whoever_waits() {
        let patience = Arc::new(patience());
        let watch = Watch::over(&patience).expect("a thread");
        let (_kept, told) = keep(&patience);
        drop(watch);
        assert!(told.try_recv().is_err());
    }
}
