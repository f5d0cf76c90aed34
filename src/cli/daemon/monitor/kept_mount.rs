//! The mount that a monitor keeps: its connection, and what is left of it after its server.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use tarfs::fuse::{MountTarget, SuperblockWatch};

/// A mount whose connection is kept.
pub(super) struct KeptMount {
    pub(super) target: MountTarget,
    /// The FUSE mount below an overlay, which leaves the tree soon.
    pub(super) lower: Option<MountTarget>,
    /// The connection. While it is open, the kernel does not reuse the mount's device number.
    pub(super) device: OwnedFd,
    /// The watch for the end of the mount, once it answers.
    pub(super) end: Option<SuperblockWatch>,
}

impl KeptMount {
    pub(super) fn is_mounted(&self) -> bool {
        let (device, end) = (self.device.as_fd(), self.end.as_ref());
        let is_mounted = |target| tarfs::fuse::is_still_mounted(target, device, end);
        is_mounted(&self.target) || self.lower.as_ref().is_some_and(is_mounted)
    }

    /// Whether the mount itself is in the tree of mounts, whatever other mounts its file system has.
    pub(super) fn is_attached(&self) -> bool {
        self.target.is_attached() && self.is_mounted()
    }

    /// Unmounts it and closes its connection, so that requests that wait for a reply fail. False if it stays, because it is
    /// below another mount.
    pub(super) fn unmount(self) -> bool {
        let number = self.target.lower_device();
        let is_gone = self.unmount_alone();
        // Its bind mounts, unless another mount of the file system is continued.
        tarfs::fuse::unmount_dead_mounts(Some(number), Duration::ZERO);
        is_gone
    }

    /// As [`Self::unmount`], but leaves other mounts of the file system to their monitors.
    pub(super) fn unmount_alone(self) -> bool {
        for target in [Some(&self.target), self.lower.as_ref()]
            .into_iter()
            .flatten()
        {
            let (device, end) = (self.device.as_fd(), self.end.as_ref());
            if let Err(error) = tarfs::fuse::clear_dead_mounts(target, device, end) {
                tracing::error!(%error, "cannot unmount the dead mount");
            }
        }
        let is_mounted = self.is_attached();
        if is_mounted {
            tracing::error!("the dead mount is below another mount and stays");
        }
        !is_mounted
    }
}
