//! Detects the end of a file system, which is the end of its last mount and last user. A detached mount lives
//! while a process has a file or directory of it open. inotify(7) reports its end (`IN_UNMOUNT`) without
//! keeping it alive.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};

use crate::base::wait::is_readable;

/// A watch for the end of a file system, with its inotify descriptor.
#[derive(Debug)]
pub struct SuperblockWatch(pub OwnedFd);

impl SuperblockWatch {
    /// Watches the file system whose root is mounted on `mountpoint`.
    ///
    /// # Errors
    /// When the root is unreadable, or this user has no inotify instances left.
    pub fn on(mountpoint: &Path) -> io::Result<Self> {
        let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        // inotify always reports the end. This event never occurs, because a root is not deleted.
        let events = WatchFlags::DELETE_SELF | WatchFlags::ONLYDIR;
        inotify::add_watch(&watch, mountpoint, events)?;
        Ok(Self(watch))
    }

    /// As [`on`](Self::on); `None` on an error.
    pub fn try_on(mountpoint: &Path) -> Option<Self> {
        Self::on(mountpoint)
            .inspect_err(|error| tracing::debug!(%error, "cannot watch for the end of the mount"))
            .ok()
    }

    /// Whether the file system has ended.
    pub fn has_ended(&self) -> bool {
        self.wait(Some(Duration::ZERO))
    }

    /// Waits until the file system has ended, for at most `timeout`. Returns whether it has ended.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        is_readable(&self.0, timeout)
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{Mode, OFlags, open};
    use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

    use super::*;

    // Promises: upper-temporary
    #[test]
    #[ignore = "needs root"]
    fn superblock_watch_reports_end_after_last_user() {
        let place = tempfile::tempdir().expect("a directory");
        let flags = MountFlags::empty();
        mount("none", place.path(), "tmpfs", flags, None).expect("root runs the tests");
        let watch = SuperblockWatch::on(place.path()).expect("readable");
        let user = open(
            place.path(),
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        );
        unmount(place.path(), UnmountFlags::DETACH).expect("mounted");
        assert!(!watch.has_ended());
        drop(user);
        assert!(watch.wait(Some(Duration::from_secs(10))));
        assert!(watch.has_ended());
    }
}
