//! A mount before a process serves it.

use std::os::fd::OwnedFd;
use std::path::Path;

use super::error::MountError;
use super::mountinfo;
use super::namespace::OpenNamespace;
use super::options::MountOptions;
use super::syscalls::{self, Connection, TARFS_FS_TYPE};
use super::target::MountTarget;

/// A mount that no process serves yet. Its users wait. The process that made it may give it to another one.
#[derive(Debug)]
pub struct NewMount {
    /// The mount's place.
    pub target: MountTarget,
    /// The FUSE device of the connection.
    pub device: OwnedFd,
    /// The mount's root, which keeps the mount in use. `None` if mount(2) or the helper mounted it.
    pub root: Option<OwnedFd>,
}

impl NewMount {
    /// Mounts on the directory `mountpoint`. mount(8) lists `source` unless `options` name another.
    ///
    /// # Errors
    /// When it cannot be mounted; then nothing is mounted.
    pub fn on(mountpoint: &Path, source: &str, options: &MountOptions) -> Result<Self, MountError> {
        let mountpoint = syscalls::open_mountpoint(mountpoint)?;
        let source = options.fsname.as_deref().unwrap_or(source);
        let Connection { device, root } = syscalls::mount(&mountpoint, source, options)?;
        // Fail if the table cannot be read, because a later cleanup needs it, too.
        let found = if let Some(root) = &root {
            mountinfo::find_by_root(root, TARFS_FS_TYPE)?
        } else {
            let path = mountpoint.path()?;
            let number = mountinfo::device_at(&path, TARFS_FS_TYPE)?;
            number.map(|number| (number, path))
        };
        let (number, mountpoint) = found.ok_or(MountError::NotReady)?;
        let target = MountTarget {
            mountpoint,
            device: number,
            overlay: None,
            namespace: None,
        };
        Ok(Self {
            target,
            device,
            root,
        })
    }

    /// As [`on`](Self::on), in another mount namespace.
    ///
    /// # Errors
    /// As [`on`](Self::on).
    pub fn in_namespace(
        (namespace, mountpoint): (&OpenNamespace, &Path),
        source: &str,
        options: &MountOptions,
    ) -> Result<Self, MountError> {
        let source = options.fsname.as_deref().unwrap_or(source);
        let (device, root) = syscalls::create_detached(source, options)?;
        let target = MountTarget {
            mountpoint: mountpoint.to_owned(),
            device: syscalls::device_number(&root)?,
            overlay: None,
            namespace: Some(namespace.namespace.clone()),
        };
        namespace.attach(root.try_clone()?, mountpoint)?;
        Ok(Self {
            target,
            device,
            root: Some(root),
        })
    }
}
