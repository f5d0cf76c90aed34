//! Why a mount or an unmount failed.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

pub(super) const FUSE_DEVICE: &str = "/dev/fuse";
/// The helper that mounts for ordinary users: setuid root, part of libfuse 3.
pub(super) const FUSERMOUNT: &str = "fusermount3";

/// Why a mount failed.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The kernel has no FUSE, or this container hides it.
    #[error("cannot mount: there is no FUSE device at {FUSE_DEVICE}")]
    NoDevice,
    /// This process may not mount, and the helper is not installed.
    #[error("cannot mount: not permitted, and {FUSERMOUNT} is not installed")]
    NoFusermount,
    /// The helper failed.
    #[error("cannot mount on {}: {}", .0.display(), .1)]
    Fusermount(PathBuf, String),
    /// The mountpoint is missing or out of reach.
    #[error("cannot mount on {}", .0.display())]
    Mountpoint(PathBuf, #[source] io::Error),
    /// The mountpoint is not a directory.
    #[error("cannot mount on {}: not a directory", .0.display())]
    NotADirectory(PathBuf),
    /// This process cannot enter the mount namespace that this file names.
    #[error("cannot enter the mount namespace {}", .0.display())]
    Namespace(PathBuf, #[source] io::Error),
    /// The kernel rejected the mount, or another system call failed.
    #[error("cannot mount")]
    System(#[from] io::Error),
    /// The overlay failed. The second value is whether fuse-overlayfs is installed.
    #[error("cannot make it writable")]
    Overlay(#[source] io::Error, bool),
    /// The overlay's options have so many bytes, more than the second number, which the kernel reads.
    #[error(
        "cannot make it writable: the names of the overlay's directories take {0} bytes, and the \
         kernel reads {1}"
    )]
    OverlayOptionsTooLong(usize, usize),
    /// A mount is at the mountpoint, and its process does not answer.
    #[error("cannot mount on {}: the process of the mount there does not answer", .0.display())]
    Silent(PathBuf),
    /// The mount did not answer, and was unmounted again.
    #[error("the mount did not answer in time")]
    NotReady,
}

impl MountError {
    pub(super) fn at(path: &Path, cause: io::Error) -> Self {
        match cause.kind() {
            io::ErrorKind::NotADirectory => Self::NotADirectory(path.to_owned()),
            _ => Self::Mountpoint(path.to_owned(), cause),
        }
    }

    /// Advice for the user.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoDevice => Some(
                "load the module (`modprobe fuse`) or give the container the device \
                 (`--device /dev/fuse --cap-add SYS_ADMIN`); \
                 `tarfs materialize` works without it",
            ),
            Self::NoFusermount => Some(
                "install it (Debian: `apt install fuse3`) or mount as root; \
                 `tarfs materialize` works without it",
            ),
            Self::Fusermount(_, message) if message.contains("user_allow_other") => {
                Some("add the line `user_allow_other` to /etc/fuse.conf, or mount as root")
            }
            Self::Fusermount(_, message) if message.contains(FUSE_DEVICE) => {
                Some("`tarfs materialize` works without it")
            }
            Self::Fusermount(_, message) if message.contains("no write access") => {
                Some("mount on a directory of your own, or as root")
            }
            Self::Mountpoint(_, cause) if cause.kind() == io::ErrorKind::NotFound => {
                Some("make the directory first")
            }
            Self::Mountpoint(_, cause) if cause.kind() == io::ErrorKind::NotConnected => {
                Some("a dead mount is in the way: `umount -l` removes it")
            }
            Self::Silent(_) => {
                Some("continue its process if it is stopped, or remove the mount with `umount -l`")
            }
            Self::NotADirectory(_) => Some("mount on a directory"),
            Self::Namespace { .. } => {
                Some("name a process, or a file like /proc/PID/ns/mnt, and mount as root")
            }
            Self::Overlay(cause, has_fuse_overlayfs) => overlay_hint(cause, *has_fuse_overlayfs),
            Self::OverlayOptionsTooLong { .. } => {
                Some("name a directory with a shorter path with --upper")
            }
            Self::Fusermount { .. }
            | Self::Mountpoint { .. }
            | Self::System(_)
            | Self::NotReady => None,
        }
    }
}

fn overlay_hint(cause: &io::Error, has_fuse_overlayfs: bool) -> Option<&'static str> {
    match Errno::from_io_error(cause)? {
        Errno::PERM | Errno::ACCESS | Errno::NODEV if !has_fuse_overlayfs => Some(
            "mount as root with overlayfs in the kernel, or install fuse-overlayfs \
             (Debian: `apt install fuse-overlayfs`)",
        ),
        Errno::INVAL | Errno::OPNOTSUPP => Some(
            "overlayfs takes changes on a local file system only, not on an overlay, FUSE or NFS: \
             name a directory on another one with --upper",
        ),
        _ => None,
    }
}

impl From<Errno> for MountError {
    fn from(errno: Errno) -> Self {
        Self::System(errno.into())
    }
}

/// Why an unmount failed.
#[derive(Debug, thiserror::Error)]
pub enum UnmountError {
    /// A process has an open file or its working directory in it.
    #[error("{} is in use", .0.display())]
    Busy(PathBuf),
    /// No tarfs mount is at that path.
    #[error("{} is not a tarfs mount", .0.display())]
    NotMounted(PathBuf),
    /// Another user of this name and number mounted it.
    #[error("cannot unmount {}: it was mounted by {}", .0.display(), .1)]
    NotOwner(PathBuf, String),
    /// The system call failed.
    #[error("cannot unmount {}", .0.display())]
    System(PathBuf, #[source] io::Error),
}

impl UnmountError {
    pub(super) fn at(mountpoint: &Path, cause: io::Error) -> Self {
        let mountpoint = mountpoint.to_owned();
        match Errno::from_io_error(&cause) {
            Some(Errno::BUSY) => Self::Busy(mountpoint),
            Some(Errno::INVAL | Errno::NOENT) => Self::NotMounted(mountpoint),
            _ => Self::System(mountpoint, cause),
        }
    }

    /// Advice for the user.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Busy(_) => {
                Some("`fuser -vm` lists the processes that use it; `--lazy` unmounts anyway")
            }
            Self::NotOwner { .. } => Some("unmount as that user or as root"),
            Self::NotMounted(_) | Self::System { .. } => None,
        }
    }
}
