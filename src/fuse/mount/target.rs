//! The place and the identity of a mount.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::error::UnmountError;
use super::mountinfo::{self, CurrentMount};
use super::namespace::{Namespace, os_path};
use super::overlay::OverlayKind;
use super::pinned::{PinnedMount, UnmountMode};
use super::superblock::SuperblockWatch;
use super::syscalls;
use crate::base::mount_point::UniqueMountId;

/// The place and the identity of a mount in the kernel's table of mounts.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MountTarget {
    /// Absolute, without symbolic links.
    #[serde(with = "os_path")]
    pub mountpoint: PathBuf,
    /// Major and minor number of the top file system: the overlay or the mount itself.
    pub device: (u32, u32),
    /// The overlay over the mount, with the mount's own device number.
    pub overlay: Option<(OverlayKind, (u32, u32))>,
    /// The mount's namespace, unless it is this process's own.
    pub namespace: Option<Namespace>,
    /// The mount's unique number, if it may be one of several of its file system that are served apart. Not for an overlay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) mount_id: Option<UniqueMountId>,
}

impl MountTarget {
    /// Whether it is attached, even if covered; false on an error. Sends it no request.
    pub fn is_mounted(&self) -> bool {
        self.find().is_ok_and(|found| found.is_some())
    }

    /// Finds the mount in the kernel's table, because a directory above it may have been renamed. `None` when detached.
    /// If it is gone, another mount of its file system, such as a bind mount. The device number identifies that while a process
    /// holds its connection.
    ///
    /// # Errors
    /// When the kernel's table of mounts cannot be read.
    pub fn find(&self) -> io::Result<Option<CurrentMount>> {
        if let Some(mount_id) = self.mount_id
            && let Ok(Some((mount_id, path))) = mount_id.find()
        {
            return Ok(Some(CurrentMount { mount_id, path }));
        }
        let table = match &self.namespace {
            Some(namespace) => namespace.table()?,
            None => mountinfo::read_table()?,
        };
        let (fs_type, mountpoint) = (self.fs_type(), &self.mountpoint);
        Ok(mountinfo::find(&table, self.device, fs_type, mountpoint))
    }

    /// Unmounts the top file system. With `connection` only its mount, because device numbers are reused.
    pub(super) fn unmount(
        &self,
        mode: UnmountMode,
        connection: Option<BorrowedFd<'_>>,
    ) -> Result<(), UnmountError> {
        if let Some(namespace) = &self.namespace {
            let force = mode != UnmountMode::IfIdle;
            return namespace.unmount(&self.mountpoint, self.device, force, connection);
        }
        let is_target = |mount: &PinnedMount| {
            let (mount, id) = (&mount.mount, self.mount_id);
            id.is_none_or(|_| UniqueMountId::of(mount) == id)
                && connection
                    .is_none_or(|connection| syscalls::is_mount_of_connection(connection, mount))
        };
        let (mountpoint, device) = (self.current_mountpoint(), Some(self.device));
        syscalls::unmount_if(self.fs_type(), &mountpoint, device, mode, is_target)
    }

    /// Whether the mount itself is in the tree of mounts, as far as is known. Sends no request.
    pub fn is_attached(&self) -> bool {
        match self.mount_id {
            Some(mount_id) => !matches!(mount_id.find(), Ok(None)),
            None => !matches!(self.find(), Ok(None)),
        }
    }

    /// A watch for its end, if it is on top at its mountpoint, and the kernel accepts one.
    pub fn watch_end(&self) -> Option<SuperblockWatch> {
        let mountpoint = self.current_mountpoint();
        let top = mountinfo::top_mount(&mountpoint).ok().flatten();
        top.filter(|top| top.device == self.device)?;
        SuperblockWatch::try_on(&mountpoint)
    }

    /// Whether both are the same mount, whose mountpoint may have been renamed.
    pub fn is_same_mount(&self, other: &Self) -> bool {
        self.device == other.device && self.mount_id == other.mount_id
    }

    /// Takes it out of the tree of mounts, even while it is in use.
    ///
    /// # Errors
    /// As of [`Mount::unmount`](super::Mount::unmount).
    pub fn detach(&self) -> Result<(), UnmountError> {
        self.unmount(UnmountMode::Detach, None)
    }

    /// Whether this namespace has other mounts of the file system, such as bind mounts.
    pub(super) fn has_bind_mounts(&self) -> bool {
        self.namespace.is_none() && mountinfo::has_several_mounts(self.device)
    }

    /// Its mountpoint now, or the last known one if it is detached.
    pub(super) fn current_mountpoint(&self) -> PathBuf {
        let found = self.find().ok().flatten();
        found.map_or_else(|| self.mountpoint.clone(), |found| found.path)
    }

    pub(super) fn fs_type(&self) -> &'static str {
        let overlay = self.overlay.map(|(overlay, _)| overlay.fs_type());
        overlay.unwrap_or(syscalls::TARFS_FS_TYPE)
    }

    /// The number of the mount itself, which an overlay may cover.
    pub fn lower_device(&self) -> (u32, u32) {
        self.overlay.map_or(self.device, |(_, device)| device)
    }
}
