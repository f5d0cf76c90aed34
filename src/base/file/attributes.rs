//! Owner, mode, times and extended attributes of a file.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::buffer::spare_capacity;
use rustix::fs::{AtFlags, Gid, Mode, Timespec, Timestamps, UTIME_OMIT, Uid, XattrFlags};
use rustix::io::Errno;

use super::chmod::{chmod_at, open_for_attributes};
use super::syscalls;
use crate::base::time::Timestamp;
use crate::base::xattr::{XATTR_LIST_MAX, XATTR_SIZE_MAX};

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
        let set = |way: Way<'_>| match way {
            Way::Open(fd) => rustix::fs::fsetxattr(fd, name, value, flags),
            Way::Name(directory, file) => syscalls::setxattrat(directory, file, name, value),
            Way::Path(path) => rustix::fs::setxattr(path, name, value, flags),
            Way::Link(path) => rustix::fs::lsetxattr(path, name, value, flags),
        };
        self.with_xattrs(set)
    }

    pub(crate) fn remove_xattr(self, name: &[u8]) -> Result<(), Errno> {
        self.with_xattrs(|way| match way {
            Way::Open(fd) => rustix::fs::fremovexattr(fd, name),
            Way::Name(directory, file) => syscalls::removexattrat(directory, file, name),
            Way::Path(path) => rustix::fs::removexattr(path, name),
            Way::Link(path) => rustix::fs::lremovexattr(path, name),
        })
    }

    /// Names of the extended attributes; none if the file system has none.
    fn xattr_names(self) -> Result<Vec<u8>, Errno> {
        let mut names = Vec::with_capacity(XATTR_LIST_MAX);
        let listed = self.with_xattrs(|way| match way {
            Way::Open(fd) => rustix::fs::flistxattr(fd, spare_capacity(&mut names)).map(drop),
            Way::Name(directory, file) => syscalls::listxattrat(directory, file, &mut names),
            Way::Path(path) => rustix::fs::listxattr(path, spare_capacity(&mut names)).map(drop),
            Way::Link(path) => rustix::fs::llistxattr(path, spare_capacity(&mut names)).map(drop),
        });
        match listed {
            Err(Errno::OPNOTSUPP) => Ok(Vec::new()),
            listed => listed.map(|()| names),
        }
    }

    pub(crate) fn xattr(self, name: &[u8]) -> Result<Vec<u8>, Errno> {
        let mut value = Vec::with_capacity(XATTR_SIZE_MAX);
        self.with_xattrs(|way| {
            let room = |value| spare_capacity(value);
            match way {
                Way::Open(fd) => rustix::fs::fgetxattr(fd, name, room(&mut value)).map(drop),
                Way::Name(directory, file) => {
                    syscalls::getxattrat(directory, file, name, &mut value)
                }
                Way::Path(path) => rustix::fs::getxattr(path, name, room(&mut value)).map(drop),
                Way::Link(path) => rustix::fs::lgetxattr(path, name, room(&mut value)).map(drop),
            }
        })?;
        value.shrink_to_fit();
        Ok(value)
    }

    /// Calls `call` for the file, in the first way that the kernel has.
    fn with_xattrs(self, call: impl FnMut(Way<'_>) -> Result<(), Errno>) -> Result<(), Errno> {
        self.with_ways(call, |errno| {
            // Linux before 6.13, or a filter of system calls that is older. A descriptor that is open for its path alone is
            // refused, too.
            matches!(errno, Errno::NOSYS | Errno::PERM | Errno::BADF)
        })
    }

    fn with_ways(
        self,
        mut call: impl FnMut(Way<'_>) -> Result<(), Errno>,
        is_missing: impl FnOnce(Errno) -> bool,
    ) -> Result<(), Errno> {
        let (directory, name) = match self {
            Self::Open(fd) => return call(Way::Open(fd)),
            Self::Name(directory, name) => (directory, name),
        };
        match call(Way::Name(directory, name)) {
            Err(errno) if is_missing(errno) => {}
            done => return done,
        }
        // The kernel follows only the link of the descriptor in it.
        let above = format!("/proc/self/fd/{}", directory.as_raw_fd()).into_bytes();
        let done = match name {
            b"" => call(Way::Path(&above)),
            [b'/', ..] => call(Way::Link(name)),
            name => call(Way::Link(&[&*above, b"/", name].concat())),
        };
        match done {
            // Without /proc.
            Err(Errno::NOENT) => call(Way::Open(open_for_attributes(directory, name)?.as_fd())),
            done => done,
        }
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

/// A way to name a file in a call about extended attributes.
enum Way<'a> {
    /// A call that takes an open file.
    Open(BorrowedFd<'a>),
    /// A call that takes a name in a directory, which Linux has since 6.13.
    Name(BorrowedFd<'a>, &'a [u8]),
    /// A call that follows a link at the end of a path.
    Path(&'a [u8]),
    /// A call that follows none.
    Link(&'a [u8]),
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::symlink;

    use rustix::fs::{OFlags, openat};

    use super::*;

    #[test]
    fn extended_attributes_are_set_in_each_way_and_no_link_is_followed() {
        let place = tempfile::tempdir_in("/var/tmp").expect("a directory");
        fs::write(place.path().join("f"), "").expect("space");
        symlink("f", place.path().join("l")).expect("new");
        let at = File::open(place.path()).expect("a directory");
        let path_only = OFlags::PATH | OFlags::CLOEXEC;
        let file = openat(&at, "f", path_only, Mode::empty()).expect("there");
        let set = |target: AttributeTarget<'_>, value: &[u8], is_missing: bool| {
            let flags = XattrFlags::empty();
            let call = |way: Way<'_>| match way {
                Way::Open(fd) => rustix::fs::fsetxattr(fd, "user.a", value, flags),
                Way::Name(..) if is_missing => Err(Errno::NOSYS),
                Way::Name(at, name) => syscalls::setxattrat(at, name, b"user.a", value),
                Way::Path(path) => rustix::fs::setxattr(path, "user.a", value, flags),
                Way::Link(path) => rustix::fs::lsetxattr(path, "user.a", value, flags),
            };
            target.with_ways(call, |errno| {
                matches!(errno, Errno::NOSYS | Errno::BADF | Errno::PERM)
            })
        };
        let value = |target: AttributeTarget<'_>| target.xattr(b"user.a");
        let targets = [
            AttributeTarget::named(&at, b"f"),
            AttributeTarget::named(&file, b""),
            AttributeTarget::named(&at, b""),
        ];
        for (number, is_missing) in [(1, false), (2, true)] {
            for target in targets {
                assert_eq!(set(target, &[number], is_missing), Ok(()), "{target:?}");
                assert_eq!(value(target), Ok(vec![number]), "{target:?}");
            }
            let link = AttributeTarget::named(&at, b"l");
            assert!(set(link, b"3", is_missing).is_err());
            assert_eq!(value(targets[0]), Ok(vec![number]));
        }
        let reopened = open_for_attributes(at.as_fd(), b"f").expect("a regular file");
        assert_eq!(value(AttributeTarget::Open(reopened.as_fd())), Ok(vec![2]));
        let link = open_for_attributes(at.as_fd(), b"l");
        assert_eq!(link.err(), Some(Errno::OPNOTSUPP));
    }
}
