//! A mount before a process serves it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::mount::{UnmountFlags, unmount};

use super::error::{MountError, UnmountError};
use super::mountinfo;
use super::namespace::OpenNamespace;
use super::options::MountOptions;
use super::pinned::{UnmountMode, proc_fd_path};
use super::syscalls::{self, Connection, TARFS_FS_TYPE};
use super::target::MountTarget;
use crate::base::mount_point::UniqueMountId;

/// A mount that no process serves yet. Its users wait. Dropping it unmounts, unless it was [given](Self::give) away.
#[derive(Debug)]
pub struct NewMount {
    /// The mount's place.
    pub target: MountTarget,
    /// The FUSE device of the connection. `None` for a mount of a file system that a process serves already.
    pub device: Option<OwnedFd>,
    /// The mount's root, which keeps the mount in use. `None` if mount(2) or the helper mounted it.
    pub root: Option<OwnedFd>,
    /// A detached copy of it, of which others can be made.
    pub template: Option<OwnedFd>,
    guard: UnmountGuard,
}

/// Unmounts the mount when dropped, if it is still there.
#[derive(Debug)]
struct UnmountGuard(Option<(MountTarget, UnmountMode)>);

impl Drop for UnmountGuard {
    fn drop(&mut self) {
        let target = self.0.take();
        let unmounted = target.map(|(target, mode)| target.unmount(mode, None));
        if let Some(Err(error)) = unmounted
            && !matches!(error, UnmountError::NotMounted(_))
        {
            tracing::warn!(%error, "cannot unmount");
        }
    }
}

impl NewMount {
    /// Mounts on the directory `mountpoint`. mount(8) lists `source` unless `options` name another.
    ///
    /// # Errors
    /// When it cannot be mounted; then nothing is mounted.
    pub fn on(mountpoint: &Path, source: &str, options: &MountOptions) -> Result<Self, MountError> {
        let mountpoint = syscalls::open_mountpoint(mountpoint)?;
        let source = options.fsname.as_deref().unwrap_or(source);
        let Connection {
            device,
            root,
            template,
        } = syscalls::mount(&mountpoint, source, options)?;
        // Fail if the table cannot be read, because a later cleanup needs it, too.
        let path = mountpoint.path();
        let found = if let Some(root) = &root {
            mountinfo::find_by_root(root, TARFS_FS_TYPE)
        } else {
            let number = path
                .as_ref()
                .map(|path| mountinfo::device_at(path, TARFS_FS_TYPE));
            match (&path, number) {
                (Ok(path), Ok(number)) => number.map(|found| Some((found?, path.clone()))),
                _ => Ok(None),
            }
        };
        let found = found
            .map_err(MountError::from)
            .and_then(|found| found.ok_or(MountError::NotReady));
        let (number, mountpoint) = found.inspect_err(|_| {
            if let Ok(path) = &path {
                syscalls::unmount_or_warn(TARFS_FS_TYPE, path, None);
            }
        })?;
        let target = MountTarget {
            mountpoint,
            device: number,
            overlay: None,
            namespace: None,
            mount_id: root.as_ref().and_then(UniqueMountId::findable),
        };
        Ok(Self {
            // Mounts of one file system differ by that number alone.
            template: template.filter(|_| target.mount_id.is_some()),
            ..Self::new(target, Some(device), root)
        })
    }

    /// Mounts a copy of the mount `template` on the directory `mountpoint`. The process that serves it serves both. Calls
    /// `announce` before the copy is attached, because this process may be killed after that.
    ///
    /// # Errors
    /// As [`on`](Self::on) and `announce`, and before Linux 6.15.
    pub fn copy(
        mountpoint: &Path,
        template: impl AsFd,
        announce: impl FnOnce(&MountTarget) -> io::Result<()>,
    ) -> Result<Self, MountError> {
        let mountpoint = syscalls::open_mountpoint(mountpoint)?;
        let root = syscalls::copy_mount(template)?;
        let target = MountTarget {
            mountpoint: mountpoint.path()?,
            device: syscalls::device_number(&root)?,
            overlay: None,
            namespace: None,
            mount_id: Some(UniqueMountId::of(&root).ok_or(MountError::NotReady)?),
        };
        announce(&target)?;
        syscalls::attach(&root, &mountpoint)?;
        if UniqueMountId::findable(&root).is_none() {
            unmount(proc_fd_path(&root), UnmountFlags::DETACH).ok();
            return Err(MountError::NotReady);
        }
        // It would keep the mount in use.
        drop(root);
        Ok(Self::new(target, None, None))
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
            mount_id: None,
        };
        namespace.attach(root.try_clone()?, mountpoint)?;
        Ok(Self::new(target, Some(device), Some(root)))
    }

    fn new(target: MountTarget, device: Option<OwnedFd>, root: Option<OwnedFd>) -> Self {
        // Force would end the connection of the mounts that share it.
        let mode = if device.is_some() {
            UnmountMode::Force
        } else {
            UnmountMode::Detach
        };
        Self {
            guard: UnmountGuard(Some((target.clone(), mode))),
            target,
            device,
            root,
            template: None,
        }
    }

    /// Its descriptors, for [`of_monitor`](Self::of_monitor).
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let all = [&self.device, &self.root, &self.template];
        all.into_iter().flatten().map(AsFd::as_fd)
    }

    /// The mount at `target` with these `descriptors`, which another process has made, and unmounts if it is not served.
    pub fn of_monitor(target: MountTarget, descriptors: Vec<OwnedFd>) -> Self {
        let mut descriptors = descriptors.into_iter();
        Self {
            guard: UnmountGuard(None),
            target,
            device: descriptors.next(),
            root: descriptors.next(),
            template: descriptors.next(),
        }
    }

    /// Leaves it to the process that serves it, which unmounts it.
    #[must_use]
    pub fn give(mut self) -> Self {
        self.guard.0 = None;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: shared-pages
    #[test]
    #[ignore = "needs root and /dev/fuse"]
    fn copy_that_is_given_up_leaves_the_connection_to_others() {
        let directory = tempfile::tempdir().expect("a directory");
        let (first, second) = (directory.path().join("1"), directory.path().join("2"));
        for place in [&first, &second] {
            std::fs::create_dir(place).expect("made");
        }
        let options = MountOptions::default();
        let mount = NewMount::on(&first, "sample.tar", &options).expect("root runs the tests");
        let template = mount.template.as_ref().expect("Linux 6.15 runs the tests");
        let mut announced = None;
        let announce = |target: &MountTarget| {
            announced = Some(target.clone());
            Ok(())
        };
        let copy = NewMount::copy(&second, template, announce).expect("made");
        assert_eq!(announced.as_ref(), Some(&copy.target));
        let (target, copied) = (mount.target.clone(), copy.target.clone());
        assert!(copied.is_attached() && copied.device == target.device);
        drop(copy);
        assert!(!copied.is_attached() && target.is_attached());
        let device = mount.device.as_ref().expect("a connection");
        assert!(syscalls::is_connected(device));
    }
}
