//! Sets attributes of new entries in the order that the kernel needs.
//!
//! The owner is first, because chown(2) clears set-id bits and capabilities. ACLs follow the mode, which is
//! part of them. Times are last.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;

use super::context::Context;
use crate::base::AttributeTarget;
use crate::base::archive_path::ArchivePath;
use crate::base::escape::escape;
use crate::base::xattr::posix_acl;
use crate::materialize::error::{StepError, WithAction};
use crate::tar::Timestamp;

pub(crate) const CHANGE_MODE: &str = "change the mode";
pub(crate) const CHANGE_TIMES: &str = "change the time of last modification";
const SET_ID_BITS: u32 = 0o6000;

/// Attribute that gives a program rights of root.
pub(crate) const CAPABILITIES: &[u8] = b"security.capability";

/// Attributes to set on an entry. A failed extended attribute is only a warning, as in GNU tar.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attributes<'a> {
    /// The entry's path, for messages.
    pub(crate) path: &'a ArchivePath,
    pub(crate) owner: Option<(u32, u32)>,
    pub(crate) mode: Option<u32>,
    pub(crate) mtime: Timestamp,
    /// Time of last access, if it is kept.
    pub(crate) atime: Option<Timestamp>,
    pub(crate) xattrs: &'a [(Vec<u8>, Vec<u8>)],
    pub(crate) removes_inherited_acls: bool,
    /// Removes the extended attributes of an earlier tree.
    pub(crate) removes_xattrs: bool,
    pub(crate) context: &'a Context,
}

impl Attributes<'_> {
    /// Sets all attributes even if one fails, and returns the first failure. If the owner cannot be set, the entry gets
    /// no set-id bits and no capabilities, which would be those of another owner.
    pub(crate) fn apply(self, target: AttributeTarget<'_>) -> Result<(), StepError> {
        let chown = self.owner.map_or(Ok(()), |owner| chown(target, owner));
        if self.removes_xattrs {
            self.remove_xattrs(target);
        }
        self.set_non_acls(target, chown.is_ok());
        // Inherited ACLs would distort the mode.
        if self.removes_inherited_acls {
            self.remove_inherited_acls(target);
        }
        let mode = self.mode.map(|mode| match chown {
            Ok(()) => mode,
            Err(_) => mode & !SET_ID_BITS,
        });
        let chmod = mode.map_or(Ok(()), |mode| target.chmod(mode));
        let chmod = chmod.with_action(CHANGE_MODE);
        self.set_acls(target);
        let times = target.set_times(self.mtime, self.atime);
        chown.and(chmod).and(times.with_action(CHANGE_TIMES))
    }

    fn selected(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let xattrs = self.xattrs.iter().map(|(name, value)| (&**name, &**value));
        xattrs.filter(|(name, _)| self.context.policy.xattrs.selects(name))
    }

    fn set_non_acls(self, target: AttributeTarget<'_>, has_owner: bool) {
        let selected = self.selected();
        for (name, value) in selected.filter(|(name, _)| has_owner || *name != CAPABILITIES) {
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

    fn remove_xattrs(self, target: AttributeTarget<'_>) {
        let policy = &self.context.policy;
        // The comparison has read them before.
        let names = target.xattrs(|name| policy.replaces_xattr(name));
        for (name, _) in names.unwrap_or_default() {
            self.remove_xattr(target, &name);
        }
    }

    fn remove_inherited_acls(self, target: AttributeTarget<'_>) {
        for name in posix_acl::Kind::ALL.map(posix_acl::Kind::attribute) {
            self.remove_xattr(target, name.as_bytes());
        }
    }

    fn remove_xattr(self, target: AttributeTarget<'_>, name: &[u8]) {
        match target.remove_xattr(name) {
            // Removing a default ACL from a non-directory is refused, and unnecessary.
            Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::ACCESS) => {}
            Err(errno) => self.warn(name, errno),
        }
    }

    fn warn(self, name: &[u8], errno: Errno) {
        self.context.problems.warn(&format!(
            "{}: cannot set the extended attribute {}: {errno}",
            self.path,
            escape(name)
        ));
    }
}

/// Sets owner and group. The highest value means "do not change", as in chown(2).
fn chown(target: AttributeTarget<'_>, (user, group): (u32, u32)) -> Result<(), StepError> {
    let wanted = |number: u32| Some(number).filter(|&number| number != u32::MAX);
    let changed = target.chown(wanted(user), wanted(group));
    changed.with_action("change the owner")
}

/// Copies owner, mode and extended attributes of `from` to the new directory `to`.
pub(crate) fn copy_attributes(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<(), Errno> {
    let (old, new) = (rustix::fs::fstat(from)?, rustix::fs::fstat(to)?);
    let (source, target) = (AttributeTarget::Open(from), AttributeTarget::Open(to));
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid) {
        target.chown(Some(old.st_uid), Some(old.st_gid))?;
    }
    for inherited in posix_acl::Kind::ALL.map(posix_acl::Kind::attribute) {
        let name = inherited.as_bytes();
        if source.xattr(name).is_err() && target.xattr(name).is_ok() {
            target.remove_xattr(name)?;
        }
    }
    for (name, value) in source.xattrs(|_| true)? {
        // The system set equal labels on both, and we may not set them.
        if target.xattr(&name).as_ref() != Ok(&value) {
            target.set_xattr(&name, &value)?;
        }
    }
    target.chmod(old.st_mode & 0o7777)
}

/// Permission bits that the default ACL of `directory` gives to new entries.
pub(crate) fn default_acl_mode(directory: BorrowedFd<'_>) -> Option<u32> {
    let name = posix_acl::Kind::Default.attribute();
    let value = AttributeTarget::Open(directory)
        .xattr(name.as_bytes())
        .ok()?;
    posix_acl::mode_of_xattr(&value)
}
