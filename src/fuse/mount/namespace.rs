//! Mounts in another mount namespace. A short-lived thread enters it to attach or unmount, and resolves only
//! the mountpoint's path there. The daemon executes no file of that namespace, because they may be hostile.
//! It keeps no descriptor of the namespace, because the mount would then outlive its container.

#![expect(unsafe_code, reason = "rustix has no safe unshare(2)")]

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, fstat, open, openat, openat2};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, UnmountFlags, move_mount};
use rustix::process::fchdir;
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};
use serde::{Deserialize, Serialize};

use super::error::{MountError, UnmountError};
use super::mountinfo;
use super::syscalls::{self, TARFS_FS_TYPE};
use crate::base::mount_point::mount_id;
use crate::base::thread::Thread;

/// Timeout for work in another namespace, whose file systems may not answer.
const NAMESPACE_TIMEOUT: Duration = Duration::from_secs(10);

/// A mount namespace, identified by path and inode.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Namespace {
    /// A file in this process's own namespace that names it, such as `/proc/PID/ns/mnt`.
    #[serde(with = "os_path")]
    pub path: PathBuf,
    /// Device and inode of that file, unique while the namespace exists.
    pub identity: (u64, u64),
}

/// Serialization of a path that need not be UTF-8.
pub(super) mod os_path {
    use std::ffi::OsString;
    use std::path::{Path, PathBuf};

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
        path.as_os_str().serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(source: D) -> Result<PathBuf, D::Error> {
        OsString::deserialize(source).map(PathBuf::from)
    }
}

/// A mount namespace with an open descriptor.
#[derive(Debug)]
pub struct OpenNamespace {
    pub(super) namespace: Namespace,
    descriptor: OwnedFd,
}

impl OpenNamespace {
    /// Opens the namespace that the file at `path` names.
    ///
    /// # Errors
    /// When this process cannot enter it.
    pub fn open(path: &Path) -> Result<Self, MountError> {
        let at = |cause| MountError::Namespace(path.to_owned(), cause);
        let descriptor = open_file(path).map_err(at)?;
        let namespace = Namespace {
            path: path.to_owned(),
            identity: identity(&descriptor).map_err(at)?,
        };
        let entered = descriptor.try_clone().map_err(at)?;
        run_in_namespace(entered, |_| Ok(())).map_err(at)?;
        Ok(Self {
            namespace,
            descriptor,
        })
    }

    /// Checks that `mountpoint` is a directory in the namespace.
    ///
    /// # Errors
    /// When it is not.
    pub fn check(&self, mountpoint: &Path) -> Result<(), MountError> {
        let path = mountpoint.to_owned();
        self.run(mountpoint, move |_| open_mountpoint(&path).map(drop))
    }

    pub(super) fn attach(&self, mount: OwnedFd, mountpoint: &Path) -> Result<(), MountError> {
        let path = mountpoint.to_owned();
        self.run(mountpoint, move |_| {
            let directory = open_mountpoint(&path)?;
            let flags =
                MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
            Ok(move_mount(&mount, "", &directory, "", flags)?)
        })
    }

    fn run(
        &self,
        mountpoint: &Path,
        work: impl FnOnce(&EnteredNamespace) -> io::Result<()> + Send + 'static,
    ) -> Result<(), MountError> {
        let descriptor = self.descriptor.try_clone()?;
        let result = run_in_namespace(descriptor, work);
        result.map_err(|cause| MountError::at(mountpoint, cause))
    }
}

impl Namespace {
    pub(super) fn table(&self) -> io::Result<Vec<u8>> {
        run_in_namespace(self.reopen()?, EnteredNamespace::table)
    }

    /// Unmounts the archive with the number `device`, which was mounted at `mountpoint` in the namespace.
    /// `force` unmounts it while it is in use. With `connection`, unmounts only the mount with that
    /// connection. Fails with [`UnmountError::NotMounted`] also when another mount covers it.
    pub(super) fn unmount(
        &self,
        mountpoint: &Path,
        device: (u32, u32),
        force: bool,
        connection: Option<BorrowedFd<'_>>,
    ) -> Result<(), UnmountError> {
        let path = mountpoint.to_owned();
        let unmount = || {
            let connection = connection.map(|borrowed| borrowed.try_clone_to_owned());
            let connection = connection.transpose()?;
            let is_target = move |mount: &OwnedFd| {
                let connection = connection.as_ref();
                connection
                    .is_none_or(|connection| syscalls::is_mount_of_connection(connection, mount))
            };
            run_in_namespace(self.reopen()?, move |entered_namespace| {
                entered_namespace.unmount(&path, device, force, is_target)
            })
        };
        unmount().map_err(|cause| UnmountError::at(mountpoint, cause))
    }

    /// Opens the namespace by its path, or by a process in `/proc` if the path now names another one.
    fn reopen(&self) -> io::Result<OwnedFd> {
        let open = |path: &Path| {
            let opened = open_file(path).ok()?;
            (identity(&opened).ok()? == self.identity).then_some(opened)
        };
        if let Some(opened) = open(&self.path) {
            return Ok(opened);
        }
        let mut processes = fs::read_dir("/proc")?.flatten();
        let found = processes.find_map(|process| open(&process.path().join("ns/mnt")));
        found.ok_or_else(|| Errno::NOENT.into())
    }
}

struct EnteredNamespace {
    /// The thread's directory in the `/proc` of its own namespace. The other `/proc` may be forged.
    thread: OwnedFd,
}

impl EnteredNamespace {
    /// Moves the calling thread into the namespace for the rest of its life.
    fn enter(descriptor: impl AsFd) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let thread = open("/proc/thread-self", flags, Mode::empty())?;
        // SAFETY: FS gives this thread a root and a working directory of its own, which setns(2) demands.
        // Only FILES, which is not set, concerns descriptors.
        unsafe { unshare_unsafe(UnshareFlags::FS) }?;
        move_into_link_name_space(descriptor.as_fd(), Some(LinkNameSpaceType::Mount))?;
        Ok(Self { thread })
    }

    fn table(&self) -> io::Result<Vec<u8>> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let table = openat(&self.thread, "mountinfo", flags, Mode::empty())?;
        let mut bytes = Vec::new();
        File::from(table).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn unmount(
        &self,
        mountpoint: &Path,
        device: (u32, u32),
        force: bool,
        is_target: impl FnOnce(&OwnedFd) -> bool,
    ) -> io::Result<()> {
        let found = mountinfo::find(&self.table()?, device, TARFS_FS_TYPE, mountpoint);
        let found = found.ok_or(Errno::NOENT)?;
        let (id, current_path) = (found.mount_id, found.path);
        let name = current_path.file_name().unwrap_or(".".as_ref());
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let parent = current_path.parent().unwrap_or(&current_path);
        let parent = openat2(CWD, parent, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
        let mount = openat(&parent, name, flags, Mode::empty())?;
        if mount_id(&mount)? != Some(id) || !is_target(&mount) {
            return Err(Errno::NOENT.into());
        }
        drop(mount);
        fchdir(&parent)?;
        let mut flags = UnmountFlags::NOFOLLOW;
        flags.set(UnmountFlags::FORCE | UnmountFlags::DETACH, force);
        Ok(rustix::mount::unmount(name, flags)?)
    }
}

fn run_in_namespace<T: Send + 'static>(
    descriptor: OwnedFd,
    work: impl FnOnce(&EnteredNamespace) -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (sender, result) = mpsc::channel();
    let thread = Thread::spawn("tarfs-namespace", move || {
        let result = EnteredNamespace::enter(descriptor)
            .and_then(|entered_namespace| work(&entered_namespace));
        // The caller may have timed out.
        drop(sender.send(result));
    })?;
    result.recv_timeout(NAMESPACE_TIMEOUT).unwrap_or_else(|_| {
        // A file system of the other namespace does not answer. The thread ends with this process.
        std::mem::forget(thread);
        Err(io::ErrorKind::TimedOut.into())
    })
}

/// Opens the directory at `path`. Rejects magic links, because they lead out of the namespace.
fn open_mountpoint(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_MAGICLINKS;
    Ok(openat2(CWD, path, flags, Mode::empty(), resolve)?)
}

/// Opens a file without blocking on a FIFO.
fn open_file(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(open(path, flags, Mode::empty())?)
}

fn identity(file: impl AsFd) -> io::Result<(u64, u64)> {
    let stat = fstat(file)?;
    Ok((stat.st_dev, stat.st_ino))
}
