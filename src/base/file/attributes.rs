//! Owner, mode, times and extended attributes of a file.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::buffer::spare_capacity;
use rustix::fs::{AtFlags, Gid, Mode, Timespec, Timestamps, UTIME_OMIT, Uid, XattrFlags};
use rustix::io::Errno;

use super::chmod::chmod_at;
use super::syscalls;
use crate::base::time::Timestamp;

/// Maximum size of a name list (`XATTR_LIST_MAX`) and of a value (`XATTR_SIZE_MAX`) on Linux.
const MAX_XATTR_BYTES: usize = 64 * 1024;

/// Names and values of extended attributes.
pub(crate) type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// A file whose attributes are read or set.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AttributeTarget<'a> {
    Open(BorrowedFd<'a>),
    /// A name in a directory. A link is not followed. An empty name is the directory itself, which may be open for its
    /// path alone.
    Name(BorrowedFd<'a>, &'a [u8]),
}

impl<'a> AttributeTarget<'a> {
    pub(crate) fn named(directory: &'a impl AsFd, name: &'a [u8]) -> Self {
        Self::Name(directory.as_fd(), name)
    }

    /// Sets owner and group; `None` keeps them.
    pub(crate) fn chown(self, user: Option<u32>, group: Option<u32>) -> Result<(), Errno> {
        let (user, group) = (user.map(Uid::from_raw), group.map(Gid::from_raw));
        match self {
            Self::Open(fd) => rustix::fs::fchown(fd, user, group),
            Self::Name(directory, name) => {
                let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH;
                rustix::fs::chownat(directory, name, user, group, flags)
            }
        }
    }

    /// Sets the mode. Not for symbolic links, which have none.
    pub(crate) fn chmod(self, mode: u32) -> Result<(), Errno> {
        match self {
            Self::Open(fd) => rustix::fs::fchmod(fd, Mode::from_raw_mode(mode)),
            Self::Name(directory, name) => chmod_at(directory, name, mode),
        }
    }

    /// Sets the time of last modification, and that of last access unless it is `None`.
    pub(crate) fn set_times(self, mtime: Timestamp, atime: Option<Timestamp>) -> Result<(), Errno> {
        let omitted = Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_OMIT,
        };
        let time = |time: Timestamp| Timespec {
            tv_sec: time.seconds,
            tv_nsec: time.nanoseconds.into(),
        };
        let times = Timestamps {
            last_access: atime.map_or(omitted, time),
            last_modification: time(mtime),
        };
        match self {
            Self::Open(fd) => rustix::fs::futimens(fd, &times),
            Self::Name(directory, name) => {
                let mut flags = AtFlags::SYMLINK_NOFOLLOW;
                flags.set(AtFlags::EMPTY_PATH, name.is_empty());
                rustix::fs::utimensat(directory, name, &times, flags)
            }
        }
    }

    pub(crate) fn set_xattr(self, name: &[u8], value: &[u8]) -> Result<(), Errno> {
        let flags = XattrFlags::empty();
        match self {
            Self::Open(fd) => rustix::fs::fsetxattr(fd, name, value, flags),
            Self::Name(directory, file) => {
                let set = syscalls::setxattrat(directory, file, name, value);
                or_by_path(set, directory, file, |path| {
                    rustix::fs::lsetxattr(path, name, value, flags)
                })
            }
        }
    }

    pub(crate) fn remove_xattr(self, name: &[u8]) -> Result<(), Errno> {
        match self {
            Self::Open(fd) => rustix::fs::fremovexattr(fd, name),
            Self::Name(directory, file) => {
                let removed = syscalls::removexattrat(directory, file, name);
                or_by_path(removed, directory, file, |path| {
                    rustix::fs::lremovexattr(path, name)
                })
            }
        }
    }

    /// Names of the extended attributes; none if the file system has none.
    fn xattr_names(self) -> Result<Vec<u8>, Errno> {
        let mut names = Vec::with_capacity(MAX_XATTR_BYTES);
        let listed = match self {
            Self::Open(fd) => rustix::fs::flistxattr(fd, spare_capacity(&mut names)).map(drop),
            Self::Name(directory, file) => {
                let listed = syscalls::listxattrat(directory, file, &mut names);
                or_by_path(listed, directory, file, |path| {
                    rustix::fs::llistxattr(path, spare_capacity(&mut names)).map(drop)
                })
            }
        };
        match listed {
            Err(Errno::OPNOTSUPP) => Ok(Vec::new()),
            listed => listed.map(|()| names),
        }
    }

    pub(crate) fn xattr(self, name: &[u8]) -> Result<Vec<u8>, Errno> {
        let mut value = Vec::with_capacity(MAX_XATTR_BYTES);
        match self {
            Self::Open(fd) => {
                rustix::fs::fgetxattr(fd, name, spare_capacity(&mut value))?;
            }
            Self::Name(directory, file) => {
                let read = syscalls::getxattrat(directory, file, name, &mut value);
                or_by_path(read, directory, file, |path| {
                    rustix::fs::lgetxattr(path, name, spare_capacity(&mut value)).map(drop)
                })?;
            }
        }
        value.shrink_to_fit();
        Ok(value)
    }

    /// Whether it has an extended attribute whose name `selects` accepts.
    pub(crate) fn has_xattr(self, selects: impl Fn(&[u8]) -> bool) -> Result<bool, Errno> {
        let names = self.xattr_names()?;
        Ok(names.split(|&byte| byte == 0).any(selects))
    }

    /// The extended attributes whose names `selects` accepts. One that is removed meanwhile is left out.
    pub(crate) fn xattrs(self, selects: impl Fn(&[u8]) -> bool) -> Result<Xattrs, Errno> {
        let names = self.xattr_names()?;
        let names = names.split(|&byte| byte == 0);
        let mut xattrs = Vec::new();
        for name in names.filter(|name| !name.is_empty() && selects(name)) {
            match self.xattr(name) {
                Ok(value) => xattrs.push((name.to_vec(), value)),
                Err(Errno::NODATA) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(xattrs)
    }
}

/// `result`, or for kernels before 6.13 that of `by_path`, whose calls take no directory.
fn or_by_path(
    result: Result<(), Errno>,
    directory: BorrowedFd<'_>,
    name: &[u8],
    by_path: impl FnOnce(&[u8]) -> Result<(), Errno>,
) -> Result<(), Errno> {
    match result {
        // A descriptor that is open for its path alone is refused, too.
        Err(Errno::NOSYS | Errno::PERM | Errno::BADF) => {
            // The kernel follows only the link of the descriptor in it.
            let directory = descriptor_path(directory).into_bytes();
            match name {
                b"" => by_path(&directory),
                [b'/', ..] => by_path(name),
                name => by_path(&[&*directory, b"/", name].concat()),
            }
        }
        result => result,
    }
}

fn descriptor_path(file: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}
