//! Root of a mount, which priming opens without keeping the mount in use.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Weak;

use rustix::fs::{CWD, fstat, makedev};
use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, open_tree};

/// Root of a mount.
#[derive(Clone, Debug)]
pub(in crate::fuse) enum MountRoot {
    /// The one at this path, if it has this device number.
    Path(PathBuf, u64),
    /// That of a detached copy.
    Copy(Weak<OwnedFd>),
}

impl MountRoot {
    /// That of the mount on `mountpoint` with a device number.
    pub(in crate::fuse) fn at(mountpoint: &Path, (major, minor): (u32, u32)) -> Self {
        Self::Path(mountpoint.to_owned(), makedev(major, minor))
    }

    /// Opens a detached copy, which ends with its descriptor. So umount(8) never finds the mount busy. Only root may copy a
    /// mount.
    pub(super) fn open(&self) -> io::Result<OwnedFd> {
        let (mountpoint, device) = match self {
            Self::Path(mountpoint, device) => (mountpoint, *device),
            Self::Copy(copy) => {
                let copy = copy.upgrade().ok_or(Errno::NOTCONN)?;
                return copy.try_clone();
            }
        };
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let root = open_tree(CWD, mountpoint, flags)?;
        // Another mount may cover this one.
        if fstat(&root)?.st_dev != device {
            return Err(Errno::XDEV.into());
        }
        Ok(root)
    }
}
