//! Reads that the kernel asks for once more at once after they have failed.
//!
//! What it reads ahead for somebody may fail; then it asks again, for the one page that is wanted, and
//! only that failure is who reads told of. Whoever had waited until the deadline would wait so long
//! twice.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::index::Ino;

/// How soon the kernel asks again, on a busy machine too; whoever asks later waits anew.
const AT_ONCE: Duration = Duration::from_millis(250);

/// Failures remembered: as many as may fail together.
const REMEMBERED: usize = 64;

/// What somebody asks for: who, and which bytes of which file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Asked {
    /// The thread that reads.
    pub caller: u32,
    /// The file.
    pub ino: Ino,
    /// Where it begins.
    pub offset: u64,
    /// How many bytes.
    pub len: u32,
}

impl Asked {
    fn covers(&self, other: Self) -> bool {
        let end = |asked: &Self| asked.offset.saturating_add(u64::from(asked.len));
        (self.caller, self.ino) == (other.caller, other.ino)
            && self.offset <= other.offset
            && end(self) >= end(&other)
    }
}

/// The last reads that came to their deadline, and when.
#[derive(Debug, Default)]
pub(super) struct Encores {
    failed: Mutex<VecDeque<(Asked, Instant)>>,
    /// Whether there are any: nobody else takes the lock.
    has_some: AtomicBool,
}

impl Encores {
    /// Remembers that `asked` came to its deadline.
    pub(super) fn failed(&self, asked: Asked, now: Instant) {
        if asked.caller == 0 {
            // Anyone of a namespace that we do not see.
            return;
        }
        let mut failed = self.lock();
        if failed.len() == REMEMBERED {
            failed.pop_front();
        }
        failed.push_back((asked, now));
        self.has_some.store(true, Ordering::Release);
    }

    /// Whether `asked` is part of what came to its deadline just now; this is said once.
    pub(super) fn is_one(&self, asked: Asked, now: Instant) -> bool {
        if !self.has_some.load(Ordering::Acquire) {
            return false;
        }
        let mut failed = self.lock();
        failed.retain(|(_, when)| now.saturating_duration_since(*when) < AT_ONCE);
        let found = failed.iter().position(|(failed, _)| failed.covers(asked));
        if let Some(position) = found {
            failed.remove(position);
        }
        self.has_some.store(!failed.is_empty(), Ordering::Release);
        found.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(Asked, Instant)>> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(caller: u32, ino: u32, offset: u64, len: u32) -> Asked {
        Asked {
            caller,
            ino: Ino(ino),
            offset,
            len,
        }
    }

    #[test]
    fn a_part_of_what_just_failed_is_refused_once_to_who_had_waited() {
        let (encores, start) = (Encores::default(), Instant::now());
        let ahead = asked(7, 2, 8192, 8192);
        encores.failed(ahead, start);
        for other in [
            asked(8, 2, 8192, 4096),
            asked(7, 3, 8192, 4096),
            asked(7, 2, 4096, 8192),
            asked(7, 2, 12_288, 8192),
        ] {
            assert!(!encores.is_one(other, start), "{other:?}");
        }
        assert!(encores.is_one(asked(7, 2, 12_288, 4096), start));
        assert!(!encores.is_one(asked(7, 2, 12_288, 4096), start));
        encores.failed(ahead, start);
        assert!(!encores.is_one(ahead, start + AT_ONCE));
        assert!(!encores.is_one(ahead, start));
        let unseen = asked(0, 2, 8192, 8192);
        encores.failed(unseen, start);
        assert!(!encores.is_one(unseen, start));
    }

    #[test]
    fn only_the_last_are_remembered() {
        let (encores, start) = (Encores::default(), Instant::now());
        let numbered = |number| asked(number, 2, 0, 4096);
        for number in 1..=65 {
            encores.failed(numbered(number), start);
        }
        assert!(!encores.is_one(numbered(1), start));
        assert!((2..=65).all(|number| encores.is_one(numbered(number), start)));
    }
}
