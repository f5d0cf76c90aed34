//! Sets attributes of new entries in the order that the kernel needs.
//!
//! The owner is first, because chown(2) clears set-id bits and capabilities. ACLs follow the mode, which is
//! part of them. Times are last.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::buffer::spare_capacity;
use rustix::fs::{AtFlags, Gid, Mode, Timespec, Timestamps, UTIME_OMIT, Uid, XattrFlags};
use rustix::io::Errno;

use super::context::Context;
use crate::base::archive_path::ArchivePath;
use crate::base::chmod::chmod_at;
use crate::base::posix_acl;
use crate::base::xattr_filter::XattrFilter;
use crate::materialize::error::{StepError, WithAction};
use crate::tar::Timestamp;

/// Maximum size of a name list (`XATTR_LIST_MAX`) and of a value (`XATTR_SIZE_MAX`) on Linux.
const MAX_XATTR_BYTES: usize = 64 * 1024;

/// Names and values of extended attributes.
type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

#[derive(Clone, Copy, Debug)]
pub(crate) enum AttributeTarget<'a> {
    Open(BorrowedFd<'a>),
    /// Does not follow a link.
    Name(BorrowedFd<'a>, &'a [u8]),
}

impl<'a> AttributeTarget<'a> {
    pub(crate) fn named(directory: &'a impl AsFd, name: &'a [u8]) -> Self {
        Self::Name(directory.as_fd(), name)
    }

    pub(crate) fn chown(self, (user, group): (u32, u32)) -> Result<(), StepError> {
        // chown(2) reads the highest value as "do not change".
        let valid = |number: u32| Some(number).filter(|&number| number != u32::MAX);
        let (user, group) = (
            valid(user).map(Uid::from_raw),
            valid(group).map(Gid::from_raw),
        );
        match self {
            Self::Open(fd) => rustix::fs::fchown(fd, user, group),
            Self::Name(directory, name) => {
                rustix::fs::chownat(directory, name, user, group, AtFlags::SYMLINK_NOFOLLOW)
            }
        }
        .with_action("change the owner")
    }

    /// Sets the mode. Not for symbolic links, which have none.
    pub(crate) fn chmod(self, mode: u32) -> Result<(), StepError> {
        match self {
            Self::Open(fd) => rustix::fs::fchmod(fd, Mode::from_raw_mode(mode)),
            Self::Name(directory, name) => chmod_at(directory, name, mode),
        }
        .with_action("change the mode")
    }

    pub(crate) fn set_mtime(self, mtime: Timestamp) -> Result<(), StepError> {
        let times = Timestamps {
            last_access: Timespec {
                tv_sec: 0,
                tv_nsec: UTIME_OMIT,
            },
            last_modification: Timespec {
                tv_sec: mtime.seconds,
                tv_nsec: mtime.nanoseconds.into(),
            },
        };
        match self {
            Self::Open(fd) => rustix::fs::futimens(fd, &times),
            Self::Name(directory, name) => {
                rustix::fs::utimensat(directory, name, &times, AtFlags::SYMLINK_NOFOLLOW)
            }
        }
        .with_action("change the time of last modification")
    }

    fn set_xattr(self, name: &[u8], value: &[u8]) -> Result<(), Errno> {
        match self {
            Self::Open(fd) => rustix::fs::fsetxattr(fd, name, value, XattrFlags::empty()),
            Self::Name(directory, entry) => {
                let path = entry_path(directory, entry);
                rustix::fs::lsetxattr(path, name, value, XattrFlags::empty())
            }
        }
    }

    /// Names of the extended attributes.
    fn list_xattrs(self) -> Result<Vec<Vec<u8>>, Errno> {
        let mut names = Vec::with_capacity(MAX_XATTR_BYTES);
        let room = spare_capacity(&mut names);
        let listed = match self {
            Self::Open(fd) => rustix::fs::flistxattr(fd, room),
            Self::Name(directory, entry) => {
                rustix::fs::llistxattr(entry_path(directory, entry), room)
            }
        };
        if listed != Err(Errno::OPNOTSUPP) {
            listed?;
        }
        let names = names.split(|&byte| byte == 0).map(<[u8]>::to_vec);
        Ok(names.filter(|name| !name.is_empty()).collect())
    }

    fn xattr(self, name: &[u8]) -> Result<Vec<u8>, Errno> {
        let mut value = Vec::with_capacity(MAX_XATTR_BYTES);
        let room = spare_capacity(&mut value);
        match self {
            Self::Open(fd) => rustix::fs::fgetxattr(fd, name, room),
            Self::Name(directory, entry) => {
                rustix::fs::lgetxattr(entry_path(directory, entry), name, room)
            }
        }?;
        value.shrink_to_fit();
        Ok(value)
    }

    /// The extended attributes that `filter` selects, in the form of a member's.
    pub(crate) fn xattrs(self, filter: &XattrFilter) -> Result<Xattrs, StepError> {
        const ACTION: &str = "read the extended attributes";
        if !(filter.xattrs || filter.acls) {
            return Ok(Vec::new());
        }
        let mut xattrs = Vec::new();
        for name in self.list_xattrs().with_action(ACTION)? {
            if filter.selects(&name) {
                match self.xattr(&name) {
                    Ok(value) => xattrs.push((name, value)),
                    Err(Errno::NODATA) => {}
                    Err(errno) => return Err(errno).with_action(ACTION),
                }
            }
        }
        Ok(xattrs)
    }

    fn remove_xattr(self, name: &str) -> Result<(), Errno> {
        match self {
            Self::Open(fd) => rustix::fs::fremovexattr(fd, name),
            Self::Name(directory, entry) => {
                rustix::fs::lremovexattr(entry_path(directory, entry), name)
            }
        }
    }
}

/// Attributes to set on an entry. A failed extended attribute is only a warning, as in GNU tar.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attributes<'a> {
    /// The entry's path, for messages.
    pub(crate) path: &'a ArchivePath,
    pub(crate) owner: Option<(u32, u32)>,
    pub(crate) mode: Option<u32>,
    pub(crate) mtime: Timestamp,
    pub(crate) xattrs: &'a [(Vec<u8>, Vec<u8>)],
    pub(crate) removes_inherited_acls: bool,
    pub(crate) context: &'a Context,
}

impl Attributes<'_> {
    /// Sets all attributes even if one fails, and returns the first failure.
    pub(crate) fn apply(self, target: AttributeTarget<'_>) -> Result<(), StepError> {
        let chown = self.owner.map_or(Ok(()), |owner| target.chown(owner));
        self.set_non_acls(target);
        // Inherited ACLs would distort the mode.
        if self.removes_inherited_acls {
            self.remove_inherited_acls(target);
        }
        let chmod = self.mode.map_or(Ok(()), |mode| target.chmod(mode));
        self.set_acls(target);
        let times = target.set_mtime(self.mtime);
        chown.and(chmod).and(times)
    }

    fn selected(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let xattrs = self.xattrs.iter().map(|(name, value)| (&**name, &**value));
        xattrs.filter(|(name, _)| self.context.policy.xattrs.selects(name))
    }

    fn set_non_acls(self, target: AttributeTarget<'_>) {
        for (name, value) in self.selected() {
            if posix_acl::Kind::of(name).is_none()
                && let Err(errno) = target.set_xattr(name, value)
            {
                self.warn(name, errno);
            }
        }
    }

    fn set_acls(self, target: AttributeTarget<'_>) {
        for kind in posix_acl::Kind::ALL {
            match posix_acl::find(self.selected(), kind, &self.context.policy.accounts) {
                Ok(None) => {}
                Ok(Some(acl)) => {
                    let name = kind.attribute().as_bytes();
                    if let Err(errno) = target.set_xattr(name, &acl.bytes) {
                        self.warn(name, errno);
                    }
                    if acl.unmapped > 0 {
                        self.context.problems.warn(&format!(
                            "{}: {} entries of the ACL {} name users or groups that this user \
                             namespace does not map, left out",
                            self.path,
                            acl.unmapped,
                            kind.attribute()
                        ));
                    }
                }
                Err(posix_acl::InvalidAcl) => self.context.problems.warn(&format!(
                    "{}: the ACL {} is malformed or names an unknown user or group, left out",
                    self.path,
                    kind.attribute()
                )),
            }
        }
    }

    fn remove_inherited_acls(self, target: AttributeTarget<'_>) {
        for name in posix_acl::Kind::ALL.map(posix_acl::Kind::attribute) {
            match target.remove_xattr(name) {
                // Removing a default ACL from a non-directory is refused, and unnecessary.
                Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::ACCESS) => {}
                Err(errno) => self.warn(name.as_bytes(), errno),
            }
        }
    }

    fn warn(self, name: &[u8], errno: Errno) {
        self.context.problems.warn(&format!(
            "{}: cannot set the extended attribute {}: {errno}",
            self.path,
            name.escape_ascii()
        ));
    }
}

/// Copies owner, mode and extended attributes of `from` to the new directory `to`.
pub(crate) fn copy_attributes(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<(), Errno> {
    let (old, new) = (rustix::fs::fstat(from)?, rustix::fs::fstat(to)?);
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid) {
        let (user, group) = (Uid::from_raw(old.st_uid), Gid::from_raw(old.st_gid));
        rustix::fs::fchown(to, Some(user), Some(group))?;
    }
    let (source, target) = (AttributeTarget::Open(from), AttributeTarget::Open(to));
    for inherited in posix_acl::Kind::ALL.map(posix_acl::Kind::attribute) {
        let name = inherited.as_bytes();
        if source.xattr(name).is_err() && target.xattr(name).is_ok() {
            target.remove_xattr(inherited)?;
        }
    }
    for name in source.list_xattrs()? {
        let value = source.xattr(&name)?;
        // The system set equal labels on both, and we may not set them.
        if target.xattr(&name).as_ref() != Ok(&value) {
            target.set_xattr(&name, &value)?;
        }
    }
    rustix::fs::fchmod(to, Mode::from_raw_mode(old.st_mode & 0o7777))
}

/// Permission bits that the default ACL of `directory` gives to new entries.
pub(crate) fn default_acl_mode(directory: BorrowedFd<'_>) -> Option<u32> {
    let name = posix_acl::Kind::Default.attribute();
    let value = AttributeTarget::Open(directory)
        .xattr(name.as_bytes())
        .ok()?;
    posix_acl::mode_of_xattr(&value)
}

/// Path of the entry through `/proc/self/fd`, for calls that take no directory descriptor. The kernel follows
/// only the link of the descriptor in it.
fn entry_path(directory: BorrowedFd<'_>, name: &[u8]) -> Vec<u8> {
    let mut path = format!("/proc/self/fd/{}", directory.as_raw_fd()).into_bytes();
    path.push(b'/');
    path.extend_from_slice(name);
    path
}
