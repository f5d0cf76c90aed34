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

use crate::archive::IsWanted;
use crate::base::stats::Stats;
use crate::base::thread::Thread;
use crate::base::stall_timeout::StallTimeout;

/// Between two looks at those who wait; who has waited for less is not looked at.
const ROUND: Duration = Duration::from_millis(250);

/// Where more passes between two looks, this process was stopped (a debugger, the freezer of a
/// container), and no more than a round counts.
const LONGEST_ROUND: Duration = Duration::from_secs(1);

/// How long nothing may come for somebody who waits, unless it was set otherwise.
pub(super) const TIMEOUT: Duration = Duration::from_mins(1);

/// The bit of SIGKILL in a mask of signals. The kernel sets it for every other signal that ends a
/// process, too, but for those that leave a core.
const KILL: u64 = 1 << 8;

/// The bits of the signals that end a process with a core, unless it wants something else: QUIT, ILL,
/// TRAP, ABRT, BUS, FPE, SEGV, XCPU, XFSZ and SYS (signal(7)).
const CORE: u64 =
    1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 10 | 1 << 23 | 1 << 24 | 1 << 30;

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
    pub(super) fn wanted(&self) -> IsWanted {
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
    what: For,
    time: StallTimeout,
    /// When it was looked at, and what had come by then.
    looked: Instant,
    came: Came,
}

/// What somebody waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum For {
    /// That the scan comes to something; whatever else comes is of no help.
    TheScan,
    /// Bytes of a file, wherever they come from.
    Bytes,
}

/// What shows whether somebody is brought nearer to an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Came {
    /// Bytes from the source: as drops they are no reason to wait.
    received: u64,
    /// Something that changes with each piece of work that is done with them.
    done: u64,
}

/// How many plain bytes the scan has passed; `None` when it is over.
pub(super) type Scanned = Box<dyn Fn() -> Option<u64> + Send + Sync>;

/// Everyone who waits.
pub(super) struct Patience {
    stats: Arc<Stats>,
    scanned: Scanned,
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
    /// Who waits is told that it was in vain when for `timeout` nothing worth the name was fetched or
    /// decoded of what they wait for, as `stats` and `scanned` tell.
    pub(super) fn new(timeout: Duration, stats: Arc<Stats>, scanned: Scanned) -> Self {
        Self {
            stats,
            scanned,
            timeout,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Keeps `reply` to the thread `caller`, which waits for `what`, until somebody takes it.
    pub(super) fn keep<R: Refusal>(&self, reply: R, caller: u32, what: For) -> Kept<R> {
        let slot = Arc::new(Mutex::new(Some(reply)));
        let waiting = Waiting {
            waiter: Arc::clone(&slot) as Arc<dyn Waiter + Sync>,
            caller,
            what,
            time: StallTimeout::new(self.timeout),
            looked: Instant::now(),
            came: self.came((self.scanned)(), what),
        };
        let mut state = lock(&self.state);
        if state.waiting.is_empty() {
            self.changed.notify_one();
        }
        state.waiting.push(waiting);
        Kept(slot)
    }

    /// What has come for who waits for `what`, the scan being at `scanned`.
    fn came(&self, scanned: Option<u64>, what: For) -> Came {
        let stats = &self.stats;
        match (scanned, what) {
            (Some(plain), For::TheScan) => Came {
                received: stats.scan_received_bytes.get(),
                done: plain.wrapping_add(stats.scanned_packed_bytes.get()),
            },
            (None, _) | (_, For::Bytes) => Came {
                received: stats.source_read_bytes.get(),
                done: (stats.decoded_bytes.get()).wrapping_add(stats.disk_cache_read_bytes.get()),
            },
        }
    }

    /// Looks at those who have waited for a while, and tells those who wait in vain. The last `stood` did
    /// not count.
    fn look(&self, now: Instant, stood: Duration) {
        let scanned = (self.scanned)();
        let mut old = Vec::new();
        lock(&self.state).waiting.retain_mut(|waiting| {
            if waiting.waiter.is_answered() {
                return false;
            }
            let came = self.came(scanned, waiting.what);
            if came.done == waiting.came.done {
                let received = came.received.saturating_sub(waiting.came.received);
                let waited = now.saturating_duration_since(waiting.looked);
                let waited = waited.saturating_sub(stood);
                waiting.time.record_wait(waited, received);
            } else {
                waiting.time.reset();
            }
            (waiting.looked, waiting.came) = (now, came);
            let is_late = waiting.time.remaining().is_zero();
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
                self.stats.timed_out_requests.increment();
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
            let begun = Instant::now();
            let round = self.changed.wait_timeout_while(state, ROUND, going);
            let is_over = round.unwrap_or_else(PoisonError::into_inner).0.is_over;
            if is_over {
                return;
            }
            let now = Instant::now();
            let passed = Some(now - begun).filter(|&passed| passed > LONGEST_ROUND);
            let stood = passed.map(|passed| passed.saturating_sub(ROUND));
            self.look(now, stood.unwrap_or_default());
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
    status.is_some_and(|status| status.is_ok_and(|status| has_fatal_signal(&status)))
}

/// Whether a thread with this `/proc/PID/status` has got a signal that ends it (proc(5)).
fn has_fatal_signal(status: &str) -> bool {
    let signals = |names: &[&str]| {
        let lines = status.lines().filter_map(|line| line.split_once(':'));
        lines
            .filter(|(name, _)| names.contains(name))
            .filter_map(|(_, mask)| u64::from_str_radix(mask.trim(), 16).ok())
            .fold(0, |all, mask| all | mask)
    };
    let pending = signals(&["SigPnd", "ShdPnd"]);
    let survived = signals(&["SigBlk", "SigIgn", "SigCgt"]);
    pending & (KILL | CORE & !survived) != 0
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
        Patience::new(TIMEOUT, Arc::default(), Box::new(|| Some(0)))
    }

    fn look(patience: &Patience, now: Instant) {
        patience.look(now, Duration::ZERO);
    }

    fn keep(patience: &Patience) -> (Kept<Reply>, Receiver<Vain>) {
        keep_for(patience, For::TheScan)
    }

    fn keep_for(patience: &Patience, what: For) -> (Kept<Reply>, Receiver<Vain>) {
        let (sender, told) = channel();
        (patience.keep(Reply(sender), std::process::id(), what), told)
    }

    #[test]
    fn who_waits_while_nothing_comes_is_refused_once() {
        let patience = patience();
        let (kept, told) = keep(&patience);
        let start = Instant::now();
        look(&patience, start + TIMEOUT / 2);
        assert!(told.try_recv().is_err());
        let wanted = kept.wanted();
        assert!(wanted());
        look(&patience, start + TIMEOUT * 2);
        assert_eq!(told.try_recv(), Ok(Vain::Late));
        assert!(!wanted());
        assert!(kept.take().is_none(), "it was given");
        look(&patience, start + TIMEOUT * 3);
        assert_eq!(patience.stats.timed_out_requests.get(), 1);
        assert!(lock(&patience.state).waiting.is_empty());
    }

    #[test]
    fn while_the_process_stood_still_nobody_waited() {
        let patience = patience();
        let (_kept, told) = keep(&patience);
        let stopped = TIMEOUT * 3;
        let now = Instant::now() + TIMEOUT / 2 + stopped;
        patience.look(now, stopped);
        assert!(told.try_recv().is_err());
        look(&patience, now + TIMEOUT / 4);
        assert!(told.try_recv().is_err());
        look(&patience, now + TIMEOUT);
        assert_eq!(told.try_recv(), Ok(Vain::Late));
    }

    #[test]
    fn who_waits_while_something_comes_waits_on() {
        let patience = patience();
        let (kept, told) = keep(&patience);
        let start = Instant::now();
        for round in 1..5 {
            patience.stats.scan_received_bytes.add(1 << 20);
            look(&patience, start + TIMEOUT / 2 * round);
        }
        for round in 5..9 {
            patience.stats.scanned_packed_bytes.increment();
            look(&patience, start + TIMEOUT / 2 * round);
        }
        assert!(told.try_recv().is_err());
        assert!(kept.take().is_some());
        look(&patience, start + TIMEOUT * 10);
        assert!(told.try_recv().is_err(), "it was answered");
    }

    #[test]
    fn drops_are_not_waited_for() {
        for what in [For::TheScan, For::Bytes] {
            let patience = patience();
            let (_kept, told) = keep_for(&patience, what);
            let start = Instant::now();
            for round in 1..5 {
                patience.stats.scan_received_bytes.increment();
                patience.stats.source_read_bytes.increment();
                look(&patience, start + TIMEOUT / 2 * round);
            }
            assert_eq!(told.try_recv(), Ok(Vain::Late), "{what:?}");
        }
    }

    #[test]
    fn what_comes_for_others_is_no_reason_to_wait_for_the_scan_unless_that_is_over() {
        let come = |scanned: Option<u64>, what| {
            let patience = Patience::new(TIMEOUT, Arc::default(), Box::new(move || scanned));
            let (_kept, told) = keep_for(&patience, what);
            let start = Instant::now();
            for round in 1..5 {
                patience.stats.source_read_bytes.add(1 << 20);
                patience.stats.decoded_bytes.add(1 << 20);
                patience.stats.disk_cache_read_bytes.add(1 << 20);
                look(&patience, start + TIMEOUT / 2 * round);
            }
            told.try_recv().ok()
        };
        assert_eq!(come(Some(7), For::TheScan), Some(Vain::Late));
        assert_eq!(come(Some(7), For::Bytes), None);
        assert_eq!(come(None, For::TheScan), None);
    }

    #[test]
    fn who_is_forgotten_is_told_at_once() {
        let patience = patience();
        let (kept, told) = keep(&patience);
        drop(kept);
        assert_eq!(told.try_recv(), Ok(Vain::Ended));
        look(&patience, Instant::now());
        assert!(lock(&patience.state).waiting.is_empty());
    }

    const TERM: u64 = 1 << 14;
    const QUIT: u64 = 1 << 2;

    #[test]
    fn signals_that_end_a_thread_are_found_in_its_status() {
        let status = |thread: u64, process: u64, caught: u64| {
            format!(
                "Name:\tcat\nSigQ:\t0/1\nSigPnd:\t{thread:016x}\nShdPnd:\t{process:016x}\n\
                 SigBlk:\t0000000000000000\nSigCgt:\t{caught:016x}\n"
            )
        };
        assert!(has_fatal_signal(&status(KILL, TERM, 0)));
        assert!(!has_fatal_signal(&status(0, TERM, 0)), "not yet");
        assert!(has_fatal_signal(&status(0, QUIT, 0)));
        assert!(!has_fatal_signal(&status(0, QUIT, QUIT)));
        assert!(!has_fatal_signal("Name:\tcat\nSigPnd:\tnonsense\n"));
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
