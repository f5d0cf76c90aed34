//! Pending replies: FUSE requests that wait, their timeout, and the check for killed callers.
//!
//! A request ends soon after its caller is killed, and times out when the work for it makes no progress.
//!
//! fuser answers `FUSE_INTERRUPT` itself, with "not implemented". After that a killed caller would wait
//! for the daemon's reply, so the watchdog polls callers that have waited for a while.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fuser::{
    Errno, ReplyAttr, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEntry, ReplyLseek,
    ReplyOpen, ReplyXattr,
};

use super::caller;
use crate::archive::IsWanted;
use crate::base::stall_timeout::StallTimeout;
use crate::base::stats::Stats;
use crate::base::sync::{Condvar, Mutex};
use crate::base::thread::Thread;

/// Interval between two sweeps over the pending requests.
const SWEEP_INTERVAL: Duration = Duration::from_millis(250);

/// Longest gap between two sweeps that counts in full. In a longer one a debugger or a container's freezer
/// suspended this process, and one interval counts.
const SUSPEND_THRESHOLD: Duration = Duration::from_secs(1);

pub(super) const DEFAULT_TIMEOUT: Duration = Duration::from_mins(1);

#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum WaitError {
    #[error("the calling process was killed")]
    CallerKilled,
    #[error("no data arrived for as long as --timeout allows")]
    TimedOut,
    #[error("the archive was closed")]
    Closed,
    #[error("a part of the index cannot be loaded")]
    IndexUnavailable,
}

impl WaitError {
    pub(super) fn errno(self) -> Errno {
        match self {
            Self::CallerKilled => Errno::EINTR,
            Self::TimedOut => Errno::ETIMEDOUT,
            Self::Closed | Self::IndexUnavailable => Errno::EIO,
        }
    }
}

pub(super) trait FailReply: Send + 'static {
    fn fail_with(self, errno: Errno);

    fn fail(self, why: WaitError)
    where
        Self: Sized,
    {
        self.fail_with(why.errno());
    }
}

macro_rules! impl_fail_reply {
    ($($reply:ty),+) => {
        $(impl FailReply for $reply {
            fn fail_with(self, errno: Errno) {
                self.error(errno);
            }
        })+
    };
}

impl_fail_reply!(
    ReplyAttr,
    ReplyData,
    ReplyDirectory,
    ReplyDirectoryPlus,
    ReplyEntry,
    ReplyLseek,
    ReplyOpen,
    ReplyXattr
);

/// A reply, given once by the archive or the watchdog. Dropping it fails with [`WaitError::Closed`].
#[derive(Debug)]
pub(super) struct PendingReply<R: FailReply>(Arc<Mutex<Option<R>>>);

impl<R: FailReply> PendingReply<R> {
    /// The reply, unless the request was answered already.
    pub(super) fn take(self) -> Option<R> {
        self.0.lock().take()
    }

    pub(super) fn pending_check(&self) -> IsWanted {
        let slot = Arc::clone(&self.0);
        Arc::new(move || !slot.is_answered())
    }
}

impl<R: FailReply> Drop for PendingReply<R> {
    fn drop(&mut self) {
        self.0.fail(WaitError::Closed);
    }
}

trait ReplySlot: Send {
    fn is_answered(&self) -> bool;

    /// Fails the request; false if it was answered before.
    fn fail(&self, why: WaitError) -> bool;
}

impl<R: FailReply> ReplySlot for Mutex<Option<R>> {
    fn is_answered(&self) -> bool {
        self.lock().is_none()
    }

    fn fail(&self, why: WaitError) -> bool {
        let reply = self.lock().take();
        reply.map(|reply| reply.fail(why)).is_some()
    }
}

struct PendingRequest {
    slot: Arc<dyn ReplySlot + Sync>,
    /// The calling thread, or 0 in a PID namespace that this process cannot see.
    caller: u32,
    reason: WaitReason,
    time: StallTimeout,
    /// Time of the last sweep, and the progress that it saw.
    checked_at: Instant,
    progress: ProgressMark,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WaitReason {
    /// The scan. Only its progress counts.
    Scan,
    /// The bytes of a file, from any source.
    Bytes,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ProgressMark {
    /// Bytes from the source. A trickle of them does not extend the timeout.
    received: u64,
    /// Changes with each piece of work on those bytes.
    done: u64,
}

/// Returns how many plain bytes the scan has passed; `None` after its end.
pub(super) type ScanPosition = Box<dyn Fn() -> Option<u64> + Send + Sync>;

pub(super) struct PendingReplies {
    /// Counters of the mount.
    stats: Arc<Stats>,
    /// Counters of the work of its volume, which other mounts may share.
    work: Arc<Stats>,
    scan_position: ScanPosition,
    pub(super) timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    requests: Vec<PendingRequest>,
    is_stopped: bool,
}

impl std::fmt::Debug for PendingReplies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PendingReplies")
            .field("timeout", &self.timeout)
            .field("waiting", &self.state.lock().requests.len())
            .finish_non_exhaustive()
    }
}

impl PendingReplies {
    /// `counters` are those of the mount and those of the work of its volume.
    pub(super) fn new(
        timeout: Duration,
        counters: (Arc<Stats>, Arc<Stats>),
        scan_position: ScanPosition,
    ) -> Self {
        let (stats, work) = counters;
        Self {
            stats,
            work,
            scan_position,
            timeout,
            state: Mutex::default(),
            changed: Condvar::default(),
        }
    }

    pub(super) fn register<R: FailReply>(
        &self,
        reply: R,
        caller: u32,
        reason: WaitReason,
    ) -> PendingReply<R> {
        let slot = Arc::new(Mutex::new(Some(reply)));
        let request = PendingRequest {
            slot: Arc::clone(&slot) as Arc<dyn ReplySlot + Sync>,
            caller,
            reason,
            time: StallTimeout::new(self.timeout),
            checked_at: Instant::now(),
            progress: self.progress((self.scan_position)(), reason),
        };
        let mut state = self.state.lock();
        if state.requests.is_empty() {
            self.changed.notify_one();
        }
        state.requests.push(request);
        PendingReply(slot)
    }

    fn progress(&self, scan_position: Option<u64>, reason: WaitReason) -> ProgressMark {
        let work = &self.work;
        match (scan_position, reason) {
            (Some(plain), WaitReason::Scan) => ProgressMark {
                received: work.scan_received_bytes.get(),
                done: plain.wrapping_add(work.scanned_packed_bytes.get()),
            },
            (None, _) | (_, WaitReason::Bytes) => ProgressMark {
                received: work.source_read_bytes.get(),
                done: (work.decoded_bytes.get()).wrapping_add(work.disk_cache_read_bytes.get()),
            },
        }
    }

    /// Fails requests that timed out or whose callers were killed. Time `suspended` does not count.
    fn sweep(&self, now: Instant, suspended: Duration) {
        let scan_position = (self.scan_position)();
        let mut unanswered = Vec::new();
        self.state.lock().requests.retain_mut(|request| {
            if request.slot.is_answered() {
                return false;
            }
            let progress = self.progress(scan_position, request.reason);
            if progress.done == request.progress.done {
                let received = progress.received.saturating_sub(request.progress.received);
                let waited = now.saturating_duration_since(request.checked_at);
                let waited = waited.saturating_sub(suspended);
                request.time.record_wait(waited, received);
            } else {
                request.time.reset();
            }
            (request.checked_at, request.progress) = (now, progress);
            let is_timed_out = request.time.remaining().is_zero();
            unanswered.push((Arc::clone(&request.slot), request.caller, is_timed_out));
            true
        });
        // Unlocked, because this reads `/proc` and writes to the kernel.
        for (slot, caller, is_timed_out) in unanswered {
            if caller::is_killed(caller) {
                if slot.fail(WaitError::CallerKilled) {
                    self.stats.interrupted_requests.increment();
                }
            } else if is_timed_out && slot.fail(WaitError::TimedOut) {
                self.stats.timed_out_requests.increment();
            }
        }
    }

    /// Sweeps at [`SWEEP_INTERVAL`] while requests are pending, until the [`Watchdog`] is dropped.
    fn run_watchdog(&self) {
        loop {
            let state = self.state.lock();
            let idle = |state: &mut State| !state.is_stopped && state.requests.is_empty();
            let state = self.changed.wait_while(state, idle);
            let is_running = |state: &mut State| !state.is_stopped;
            let begun = Instant::now();
            let (state, _) = self
                .changed
                .wait_timeout_while(state, SWEEP_INTERVAL, is_running);
            let is_stopped = state.is_stopped;
            drop(state);
            if is_stopped {
                return;
            }
            let now = Instant::now();
            let passed = Some(now - begun).filter(|&passed| passed > SUSPEND_THRESHOLD);
            let suspended = passed.map(|passed| passed.saturating_sub(SWEEP_INTERVAL));
            self.sweep(now, suspended.unwrap_or_default());
        }
    }
}

/// The thread that fails pending requests. Dropping it stops the thread.
#[derive(Debug)]
pub(super) struct Watchdog {
    pending_replies: Arc<PendingReplies>,
    _thread: Thread<()>,
}

impl Watchdog {
    pub(super) fn start(pending_replies: &Arc<PendingReplies>) -> io::Result<Self> {
        let shared = Arc::clone(pending_replies);
        Ok(Self {
            pending_replies: Arc::clone(pending_replies),
            _thread: Thread::spawn("tarfs-pending", move || shared.run_watchdog())?,
        })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.pending_replies.state.lock().is_stopped = true;
        self.pending_replies.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    struct Reply(Sender<WaitError>);

    impl FailReply for Reply {
        fn fail_with(self, _errno: Errno) {}

        fn fail(self, why: WaitError) {
            self.0.send(why).unwrap_or_default();
        }
    }

    fn pending_replies() -> PendingReplies {
        PendingReplies::new(DEFAULT_TIMEOUT, Default::default(), Box::new(|| Some(0)))
    }

    fn sweep(pending_replies: &PendingReplies, now: Instant) {
        pending_replies.sweep(now, Duration::ZERO);
    }

    fn register(pending_replies: &PendingReplies) -> (PendingReply<Reply>, Receiver<WaitError>) {
        register_for(pending_replies, WaitReason::Scan)
    }

    fn register_for(
        pending_replies: &PendingReplies,
        reason: WaitReason,
    ) -> (PendingReply<Reply>, Receiver<WaitError>) {
        let (sender, errors) = channel();
        (
            pending_replies.register(Reply(sender), std::process::id(), reason),
            errors,
        )
    }

    // Promises: caller-timeout
    #[test]
    fn pending_reply_without_progress_times_out_once() {
        let pending_replies = pending_replies();
        let (pending, errors) = register(&pending_replies);
        let start = Instant::now();
        sweep(&pending_replies, start + DEFAULT_TIMEOUT / 2);
        assert!(errors.try_recv().is_err());
        let wanted = pending.pending_check();
        assert!(wanted());
        sweep(&pending_replies, start + DEFAULT_TIMEOUT * 2);
        assert_eq!(errors.try_recv(), Ok(WaitError::TimedOut));
        assert!(!wanted());
        assert!(pending.take().is_none(), "it was given");
        sweep(&pending_replies, start + DEFAULT_TIMEOUT * 3);
        assert_eq!(pending_replies.stats.timed_out_requests.get(), 1);
        assert!(pending_replies.state.lock().requests.is_empty());
    }

    // Promises: caller-timeout
    #[test]
    fn time_while_process_is_suspended_does_not_count() {
        let pending_replies = pending_replies();
        let (_pending, errors) = register(&pending_replies);
        let stopped = DEFAULT_TIMEOUT * 3;
        let now = Instant::now() + DEFAULT_TIMEOUT / 2 + stopped;
        pending_replies.sweep(now, stopped);
        assert!(errors.try_recv().is_err());
        sweep(&pending_replies, now + DEFAULT_TIMEOUT / 4);
        assert!(errors.try_recv().is_err());
        sweep(&pending_replies, now + DEFAULT_TIMEOUT);
        assert_eq!(errors.try_recv(), Ok(WaitError::TimedOut));
    }

    // Promises: caller-timeout
    #[test]
    fn pending_reply_with_progress_stays_pending() {
        let pending_replies = pending_replies();
        let (pending, errors) = register(&pending_replies);
        let start = Instant::now();
        for round in 1..5 {
            pending_replies.work.scan_received_bytes.add(1 << 20);
            sweep(&pending_replies, start + DEFAULT_TIMEOUT / 2 * round);
        }
        for round in 5..9 {
            pending_replies.work.scanned_packed_bytes.increment();
            sweep(&pending_replies, start + DEFAULT_TIMEOUT / 2 * round);
        }
        assert!(errors.try_recv().is_err());
        assert!(pending.take().is_some());
        sweep(&pending_replies, start + DEFAULT_TIMEOUT * 10);
        assert!(errors.try_recv().is_err(), "it was answered");
    }

    // Promises: caller-extended
    #[test]
    fn trickle_of_bytes_does_not_extend_timeout() {
        for reason in [WaitReason::Scan, WaitReason::Bytes] {
            let pending_replies = pending_replies();
            let (_pending, errors) = register_for(&pending_replies, reason);
            let start = Instant::now();
            for round in 1..5 {
                pending_replies.work.scan_received_bytes.increment();
                pending_replies.work.source_read_bytes.increment();
                sweep(&pending_replies, start + DEFAULT_TIMEOUT / 2 * round);
            }
            assert_eq!(errors.try_recv(), Ok(WaitError::TimedOut), "{reason:?}");
        }
    }

    // Promises: caller-extended
    #[test]
    fn other_progress_does_not_extend_wait_for_running_scan() {
        let outcome = |scan_position: Option<u64>, reason| {
            let pending_replies = PendingReplies::new(
                DEFAULT_TIMEOUT,
                Default::default(),
                Box::new(move || scan_position),
            );
            let (_pending, errors) = register_for(&pending_replies, reason);
            let start = Instant::now();
            for round in 1..5 {
                pending_replies.work.source_read_bytes.add(1 << 20);
                pending_replies.work.decoded_bytes.add(1 << 20);
                pending_replies.work.disk_cache_read_bytes.add(1 << 20);
                sweep(&pending_replies, start + DEFAULT_TIMEOUT / 2 * round);
            }
            errors.try_recv().ok()
        };
        assert_eq!(
            outcome(Some(7), WaitReason::Scan),
            Some(WaitError::TimedOut)
        );
        assert_eq!(outcome(Some(7), WaitReason::Bytes), None);
        assert_eq!(outcome(None, WaitReason::Scan), None);
    }

    #[test]
    fn dropped_pending_reply_fails_at_once() {
        let pending_replies = pending_replies();
        let (pending, errors) = register(&pending_replies);
        drop(pending);
        assert_eq!(errors.try_recv(), Ok(WaitError::Closed));
        sweep(&pending_replies, Instant::now());
        assert!(pending_replies.state.lock().requests.is_empty());
    }

    #[test]
    fn watchdog_stops_while_reply_is_pending() {
        let pending_replies = Arc::new(pending_replies());
        let watchdog = Watchdog::start(&pending_replies).expect("a thread");
        let (_pending, errors) = register(&pending_replies);
        drop(watchdog);
        assert!(errors.try_recv().is_err());
    }
}
