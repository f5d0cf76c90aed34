//! Reads that timed out, to recognize the kernel's retry. If a read-ahead fails, the kernel at once retries
//! the single page that the caller wants. Without this list the caller would wait for two timeouts.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::base::sync::Mutex;
use crate::index::Ino;

/// Time in which the kernel retries, even on a busy machine. A later read has its own timeout.
const KERNEL_RETRY_WINDOW: Duration = Duration::from_millis(250);

/// Maximum length of the list: as many reads as may fail at the same time.
const MAX_TIMED_OUT_READS: usize = 64;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RequestedRange {
    pub caller: u32,
    pub ino: Ino,
    pub offset: u64,
    pub len: u32,
}

impl RequestedRange {
    fn covers(&self, other: Self) -> bool {
        let end = |range: &Self| range.offset.saturating_add(u64::from(range.len));
        (self.caller, self.ino) == (other.caller, other.ino)
            && self.offset <= other.offset
            && end(self) >= end(&other)
    }
}

#[derive(Debug, Default)]
pub(super) struct TimedOutReads {
    recent: Mutex<VecDeque<(RequestedRange, Instant)>>,
    /// Lets readers skip the lock.
    is_nonempty: AtomicBool,
}

impl TimedOutReads {
    pub(super) fn record(&self, range: RequestedRange, now: Instant) {
        if range.caller == 0 {
            // Any thread of a PID namespace that this process cannot see.
            return;
        }
        let mut failed = self.recent.lock();
        if failed.len() == MAX_TIMED_OUT_READS {
            failed.pop_front();
        }
        failed.push_back((range, now));
        self.is_nonempty.store(true, Ordering::Release);
    }

    /// Whether `range` is part of a read that timed out just now. Each read matches once.
    pub(super) fn is_kernel_retry(&self, range: RequestedRange, now: Instant) -> bool {
        if !self.is_nonempty.load(Ordering::Acquire) {
            return false;
        }
        let mut failed = self.recent.lock();
        failed.retain(|(_, when)| now.saturating_duration_since(*when) < KERNEL_RETRY_WINDOW);
        let found = failed.iter().position(|(failed, _)| failed.covers(range));
        if let Some(position) = found {
            failed.remove(position);
        }
        self.is_nonempty
            .store(!failed.is_empty(), Ordering::Release);
        found.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(caller: u32, ino: u32, offset: u64, len: u32) -> RequestedRange {
        RequestedRange {
            caller,
            ino: Ino(ino),
            offset,
            len,
        }
    }

    // Promises: fault-read-ahead
    #[test]
    fn retry_within_timed_out_read_is_recognized_once() {
        let (timed_out_reads, start) = (TimedOutReads::default(), Instant::now());
        let ahead = range(7, 2, 8192, 8192);
        timed_out_reads.record(ahead, start);
        for other in [
            range(8, 2, 8192, 4096),
            range(7, 3, 8192, 4096),
            range(7, 2, 4096, 8192),
            range(7, 2, 12_288, 8192),
        ] {
            assert!(!timed_out_reads.is_kernel_retry(other, start), "{other:?}");
        }
        assert!(timed_out_reads.is_kernel_retry(range(7, 2, 12_288, 4096), start));
        assert!(!timed_out_reads.is_kernel_retry(range(7, 2, 12_288, 4096), start));
        timed_out_reads.record(ahead, start);
        assert!(!timed_out_reads.is_kernel_retry(ahead, start + KERNEL_RETRY_WINDOW));
        assert!(!timed_out_reads.is_kernel_retry(ahead, start));
        let unseen = range(0, 2, 8192, 8192);
        timed_out_reads.record(unseen, start);
        assert!(!timed_out_reads.is_kernel_retry(unseen, start));
    }

    #[test]
    fn only_latest_timed_out_reads_are_remembered() {
        let (timed_out_reads, start) = (TimedOutReads::default(), Instant::now());
        let numbered = |number| range(number, 2, 0, 4096);
        for number in 1..=65 {
            timed_out_reads.record(numbered(number), start);
        }
        assert!(!timed_out_reads.is_kernel_retry(numbered(1), start));
        assert!((2..=65).all(|number| timed_out_reads.is_kernel_retry(numbered(number), start)));
    }
}
