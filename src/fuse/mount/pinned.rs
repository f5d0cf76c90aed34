//! A mount that is pinned by descriptors from its check to its unmount.
//!
//! If both calls took a path, another user could rename a directory in between, and we would unmount the
//! wrong mount. umount(2) accepts only paths, but a path may lead through `/proc/self/fd`.
//!
//! umount(2) unmounts the top mount at a place, even one stacked there in between. No call prevents this.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use rustix::fs::{Mode, OFlags, fstatfs, open, openat};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use super::mountinfo;
use crate::base::thread::Thread;

#[derive(Debug)]
pub(super) struct PinnedMount {
    entry: MountpointEntry,
    pub(super) mount: OwnedFd,
    pub(super) device: (u32, u32),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum UnmountMode {
    IfIdle,
    /// Unmount it while in use, and end its connection, so that no caller keeps waiting for a reply.
    Force,
    /// Leave the mount and its connection to processes that use it.
    Detach,
}

impl PinnedMount {
    /// Pins the top mount at `mountpoint`, if it has the type `fs_type`. `mountpoint` is canonical. Sends no
    /// request to the mount itself, which may be dead or slow.
    pub(super) fn open(mountpoint: &Path, fs_type: &str) -> io::Result<Option<Self>> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let parent = mountpoint.parent().unwrap_or(mountpoint);
        let name = mountpoint.file_name().unwrap_or(".".as_ref()).to_owned();
        let parent = open(parent, flags, Mode::empty())?;
        let mount = openat(&parent, &name, flags, Mode::empty())?;
        let found = mountinfo::find_by_root(&mount, fs_type)?;
        Ok(found.map(|(device, _)| Self {
            entry: MountpointEntry { parent, name },
            mount,
            device,
        }))
    }

    /// Unmounts the mount. Returns the place with an error.
    pub(super) fn unmount(self, mode: UnmountMode) -> Result<(), (Errno, MountpointEntry)> {
        let Self { entry, mount, .. } = self;
        // Through the descriptor: if another process has unmounted it, nothing is left to do.
        let by_descriptor =
            |mount: &OwnedFd, flags| rustix::mount::unmount(proc_fd_path(mount), flags);
        let result = match mode {
            UnmountMode::IfIdle => {
                // Our own descriptor would keep the mount busy.
                drop(mount);
                let path = entry.parent_path().join(&entry.name);
                rustix::mount::unmount(path, UnmountFlags::NOFOLLOW)
            }
            UnmountMode::Force => by_descriptor(&mount, UnmountFlags::FORCE | UnmountFlags::DETACH),
            UnmountMode::Detach => by_descriptor(&mount, UnmountFlags::DETACH),
        };
        result.map_err(|errno| (errno, entry))
    }
}

/// Answer of a mount's process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Liveness {
    /// A process serves the mount.
    Alive,
    /// No process serves the mount any more.
    Dead,
    /// The process does not answer within seconds, because it is stopped or hangs.
    Silent,
}

/// Timeout for the answer of a mount's process, which waits for nothing.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Asks the process of `mount` for the free space, which the kernel never caches.
pub(super) fn ask_for_liveness(mount: impl AsFd) -> io::Result<Liveness> {
    let mount = mount.as_fd().try_clone_to_owned()?;
    let (sender, answer) = sync_channel(1);
    let ask = move || {
        let is_dead = matches!(fstatfs(mount), Err(Errno::NOTCONN | Errno::CONNABORTED));
        let liveness = if is_dead {
            Liveness::Dead
        } else {
            Liveness::Alive
        };
        // The receiver may have given up.
        sender.send(liveness).ok();
    };
    let thread = Thread::spawn("tarfs-liveness", ask)?;
    let answer = answer.recv_timeout(ANSWER_TIMEOUT);
    if answer.is_err() {
        // It cannot be joined before the process answers. It ends with this process.
        std::mem::forget(thread);
    }
    Ok(answer.unwrap_or(Liveness::Silent))
}

/// The place of a mount, which may have ended.
#[derive(Debug)]
pub(super) struct MountpointEntry {
    /// The parent directory. A mountpoint itself cannot be renamed or removed.
    parent: OwnedFd,
    pub(super) name: OsString,
}

impl MountpointEntry {
    pub(super) fn parent_path(&self) -> PathBuf {
        proc_fd_path(&self.parent)
    }
}

/// A path that leads to the open file whatever its name is. Valid in this process only.
pub(super) fn proc_fd_path(descriptor: impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", descriptor.as_fd().as_raw_fd()))
}
