//! A mount that is pinned by descriptors from its check to its unmount.
//!
//! With a path in both calls, another user could rename a directory in between, and we would unmount
//! the wrong mount. umount(2) accepts only paths, but a path may lead through `/proc/self/fd`.
//!
//! umount(2) always unmounts the top mount at a place. If another mount is stacked there in between,
//! that one is unmounted instead. Linux has no call that prevents this.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, fstatfs, open, openat};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use super::mountinfo;

/// An archive's mount, pinned by open descriptors.
#[derive(Debug)]
pub(super) struct PinnedMount {
    entry: MountpointEntry,
    /// The root of the mount.
    mount: OwnedFd,
    /// Major and minor number of its file system.
    pub(super) device: (u32, u32),
}

/// How to unmount.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum UnmountMode {
    /// Fail while the mount is in use.
    IfIdle,
    /// Unmount it while it is in use, and end its connection, so that no caller keeps waiting for a
    /// reply.
    Force,
    /// Leave the mount and its connection to processes that use it.
    Detach,
}

impl PinnedMount {
    /// Pins the top mount at `mountpoint`, if it has the type `fs_type`.
    ///
    /// `mountpoint` is an absolute path without symbolic links. Sends no request to the mount itself,
    /// which may be dead or slow.
    ///
    /// # Errors
    /// When the kernel's table of mounts cannot be read, or the path does not exist.
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

impl AsFd for PinnedMount {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.mount.as_fd()
    }
}

/// Whether no process serves the mount with the root `mount` any more.
///
/// Asks for the free space, which the kernel never caches.
pub(super) fn is_dead(mount: impl AsFd) -> bool {
    matches!(fstatfs(mount), Err(Errno::NOTCONN | Errno::CONNABORTED))
}

/// The place of a mount, which may have ended.
#[derive(Debug)]
pub(super) struct MountpointEntry {
    /// The parent directory. A mountpoint itself cannot be renamed or removed.
    parent: OwnedFd,
    /// The name of the mountpoint in its [directory](Self::parent_path).
    pub(super) name: OsString,
}

impl MountpointEntry {
    /// The parent directory, as a path for this process.
    pub(super) fn parent_path(&self) -> PathBuf {
        proc_fd_path(&self.parent)
    }
}

/// The path through `/proc` to the file of `descriptor`, for this process.
pub(super) fn proc_fd_path(descriptor: impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", descriptor.as_fd().as_raw_fd()))
}
