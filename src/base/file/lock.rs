//! Locks of files by flock(2), which end with the process: with a timeout, and with the name of the holder.

use std::fmt;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock, fstat, major, minor};
use rustix::io::Errno;

/// Interval between attempts to lock, because flock(2) has no timeout.
pub const RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// Kind of a lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LockKind {
    /// Other processes can have a shared lock, too.
    Shared,
    /// No other process has a lock.
    Exclusive,
}

/// Locks `file` until its last descriptor is closed. Waits up to `timeout` for other processes.
///
/// # Errors
/// `WOULDBLOCK` while another process holds a lock, and other errors where the file system has no locks.
pub fn lock(file: impl AsFd, kind: LockKind, timeout: Duration) -> Result<(), Errno> {
    let operation = match kind {
        LockKind::Shared => FlockOperation::NonBlockingLockShared,
        LockKind::Exclusive => FlockOperation::NonBlockingLockExclusive,
    };
    let start = Instant::now();
    loop {
        match flock(&file, operation) {
            Err(Errno::WOULDBLOCK) if start.elapsed() < timeout => {
                std::thread::sleep(RETRY_INTERVAL);
            }
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

/// A process that has locked a file, as far as this system tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LockHolder {
    /// Number of the process, and of its user.
    process: Option<(u32, Option<u32>)>,
}

impl LockHolder {
    /// The process that has locked `file`.
    pub fn of(file: impl AsFd) -> Self {
        let stat = fstat(file);
        let locks = fs::read_to_string("/proc/locks");
        let pid = match (stat, &locks) {
            (Ok(stat), Ok(locks)) => {
                let device = (major(stat.st_dev), minor(stat.st_dev));
                find_holder(locks, device, stat.st_ino)
            }
            _ => None,
        };
        let user = |pid| fs::metadata(format!("/proc/{pid}")).map(|found| found.uid());
        Self {
            process: pid.map(|pid| (pid, user(pid).ok())),
        }
    }
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.process {
            Some((pid, Some(user))) => write!(f, "process {pid} of user {user}"),
            Some((pid, None)) => write!(f, "process {pid}"),
            None => f.write_str("another process"),
        }
    }
}

/// The process that has locked the file, by the text of `/proc/locks`.
fn find_holder(locks: &str, (major, minor): (u32, u32), inode: u64) -> Option<u32> {
    let file = format!("{major:02x}:{minor:02x}:{inode}");
    let mut lines = locks.lines().map(str::split_ascii_whitespace);
    lines.find_map(|mut fields| {
        // A process that waits has an arrow here.
        let is_flock = fields.nth(1) == Some("FLOCK");
        let pid = fields.nth(2)?.parse().ok()?;
        (is_flock && fields.next() == Some(&*file) && pid > 0).then_some(pid)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_holder_is_this_process_while_it_holds_the_lock() {
        let place = tempfile::tempdir().expect("a directory");
        let open = || fs::File::open(place.path()).expect("there");
        let (held, other) = (open(), open());
        lock(&held, LockKind::Shared, Duration::ZERO).expect("free");
        lock(&other, LockKind::Shared, Duration::ZERO).expect("shared");
        drop(held);
        let third = open();
        let exclusive = || lock(&third, LockKind::Exclusive, Duration::ZERO);
        assert_eq!(exclusive(), Err(Errno::WOULDBLOCK));
        drop(other);
        assert_eq!(exclusive(), Ok(()));
        assert_eq!(LockHolder::default().to_string(), "another process");
    }

    // Promises: sync-locked
    #[test]
    fn lock_holder_is_found_by_device_and_inode() {
        let locks = "\
            1: POSIX  ADVISORY  WRITE 11 08:02:77 0 EOF\n\
            2: FLOCK  ADVISORY  READ  12 08:02:7 0 EOF\n\
            3: FLOCK  ADVISORY  READ  0 fd:0a:77 0 EOF\n\
            3: FLOCK  ADVISORY  READ  13 fd:0a:77 0 EOF\n\
            3: -> FLOCK  ADVISORY  WRITE 14 fd:0a:77 0 EOF\n";
        assert_eq!(find_holder(locks, (0xfd, 10), 77), Some(13));
        assert_eq!(find_holder(locks, (8, 2), 77), None);
        assert_eq!(find_holder(locks, (8, 2), 7), Some(12));
        assert_eq!(find_holder("\n1: FLOCK", (8, 2), 7), None);
    }
}
