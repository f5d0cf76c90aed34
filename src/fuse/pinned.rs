//! A mount held by descriptors between the look at it and its unmount: were it named by its path both
//! times, somebody who renames a directory on the way in between would have another one taken out.
//!
//! umount(2) knows no other names than paths, but takes one through a descriptor in `/proc`. It always
//! takes what lies on top of where that leads; so if somebody mounts over the very same place in
//! between, which only who may mount there can, it is that mount which goes. Linux has no call that
//! would rule that out.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, fstatfs, open, openat, statx};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use super::mountinfo;

/// An archive's mount that can be reached by its path.
#[derive(Debug)]
pub(super) struct PinnedMount {
    /// The directory that holds the mountpoint. A mountpoint itself cannot be renamed or removed.
    parent: OwnedFd,
    /// What the mountpoint is called there.
    name: OsString,
    /// Its root.
    mount: OwnedFd,
    /// Major and minor number of its file system.
    pub(super) device: (u32, u32),
}

impl PinnedMount {
    /// What lies on top at `mountpoint`, an absolute path without symbolic links, if that is a mount of
    /// the type `fs_type`. Asks nothing of the mount itself, which may be dead or slow.
    ///
    /// # Errors
    /// When the kernel's table cannot be read, or the path leads nowhere.
    pub(super) fn open(mountpoint: &Path, fs_type: &str) -> io::Result<Option<Self>> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let parent = mountpoint.parent().unwrap_or(mountpoint);
        let name = mountpoint.file_name().unwrap_or(".".as_ref()).to_owned();
        let parent = open(parent, flags, Mode::empty())?;
        let mount = openat(&parent, &name, flags, Mode::empty())?;
        let found = match mount_id(&mount)? {
            Some(id) => mountinfo::device_by_mount_id(id, fs_type)?,
            None => None,
        };
        Ok(found.map(|device| Self {
            parent,
            name,
            mount,
            device,
        }))
    }

    /// Whether nobody serves it any more.
    pub(super) fn is_dead(&self) -> bool {
        is_dead(&self.mount)
    }

    /// Takes it out of the tree and leaves it to those who use it, its connection with it. The place
    /// comes back with the error.
    pub(super) fn detach(self) -> Result<(), (Errno, MountpointEntry)> {
        let entry = MountpointEntry {
            parent: self.parent,
            name: self.name,
        };
        let result = rustix::mount::unmount(proc_fd_path(&self.mount), UnmountFlags::DETACH);
        result.map_err(|errno| (errno, entry))
    }

    /// Takes it out; `force` does it under the feet of those who use it. The place comes back with the
    /// error.
    pub(super) fn unmount(self, force: bool) -> Result<(), (Errno, MountpointEntry)> {
        let entry = MountpointEntry {
            parent: self.parent,
            name: self.name,
        };
        let result = if force {
            // By itself: if somebody else has taken it out there is nothing left to do.
            // FORCE ends the connection, so that nobody keeps waiting for an answer.
            let flags = UnmountFlags::FORCE | UnmountFlags::DETACH;
            rustix::mount::unmount(proc_fd_path(&self.mount), flags)
        } else {
            // Or it would be in use, by us.
            drop(self.mount);
            let path = entry.parent_path().join(&entry.name);
            rustix::mount::unmount(path, UnmountFlags::NOFOLLOW)
        };
        result.map_err(|errno| (errno, entry))
    }
}

impl AsFd for PinnedMount {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.mount.as_fd()
    }
}

/// Whether nobody serves the mount whose root is `mount` any more. The kernel may still know its
/// attributes, so the free space is asked for, which it never keeps.
pub(super) fn is_dead(mount: impl AsFd) -> bool {
    matches!(fstatfs(mount), Err(Errno::NOTCONN | Errno::CONNABORTED))
}

/// Where a mount is, or was.
#[derive(Debug)]
pub(super) struct MountpointEntry {
    parent: OwnedFd,
    /// What it is called in its [directory](Self::parent_path).
    pub(super) name: OsString,
}

impl MountpointEntry {
    /// The directory that holds it, as a path for this process.
    pub(super) fn parent_path(&self) -> PathBuf {
        proc_fd_path(&self.parent)
    }
}

/// Where `descriptor` leads, as a path for this process.
pub(super) fn proc_fd_path(descriptor: impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", descriptor.as_fd().as_raw_fd()))
}

/// The number of the mount that `descriptor` is on.
///
/// statx(2) for no attributes asks the file system nothing, and names the mount since Linux 5.8. Before
/// Linux 5.14 a process that is not dumpable cannot read its own `/proc/self/fdinfo`, unless it is root's.
pub(super) fn mount_id(descriptor: impl AsFd) -> io::Result<Option<u32>> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    if let Ok(found) = statx(&descriptor, "", flags, StatxFlags::empty())
        && StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::MNT_ID)
    {
        return Ok(u32::try_from(found.stx_mnt_id).ok());
    }
    let number = descriptor.as_fd().as_raw_fd();
    let fdinfo = fs::read_to_string(format!("/proc/self/fdinfo/{number}"))?;
    let id = fdinfo.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    Ok(id.and_then(|id| id.trim().parse().ok()))
}
