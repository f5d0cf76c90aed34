//! Mount points, by descriptors. Bind mounts of one file system differ by their mount ids alone.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use rustix::fs::{AtFlags, Mode, OFlags, StatxAttributes, StatxFlags, fstat, openat, statx};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::syscalls::statmount;

/// Selects the unique number of a mount (`STATX_MNT_ID_UNIQUE` of Linux 6.8).
const MNT_ID_UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);

/// Selects the numbers of a mount (`STATMOUNT_MNT_BASIC`), and its mountpoint (`STATMOUNT_MNT_POINT`).
const BASIC_AND_MOUNTPOINT: u64 = 0x2 | 0x10;

/// Places in `struct statmount`: the mount id of the table of mounts, the attributes, where the mountpoint is among the texts,
/// and the texts.
const OLD_ID_AT: usize = 56;
const ATTRIBUTES_AT: usize = 64;
const MOUNTPOINT_AT: usize = 108;
const TEXTS_AT: usize = 512;

/// Number of a mount that no later mount gets. That of the table of mounts is used again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct UniqueMountId(u64);

impl UniqueMountId {
    /// That of the mount of `descriptor`. `None` before Linux 6.8. Sends no request.
    pub(crate) fn of(descriptor: impl AsFd) -> Option<Self> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let found = statx(&descriptor, "", flags, MNT_ID_UNIQUE).ok()?;
        let has_it = found.stx_mask & MNT_ID_UNIQUE.bits() != 0;
        has_it.then_some(Self(found.stx_mnt_id))
    }

    /// As [`Self::of`], if the mount is attached, and statmount(2) can tell. Some sandboxes permit only statx(2).
    pub(crate) fn findable(descriptor: impl AsFd) -> Option<Self> {
        let id = Self::of(descriptor)?;
        matches!(id.find(), Ok(Some(_))).then_some(id)
    }

    /// The mount's id in the table of mounts, and its mountpoint. `None` if it is not attached in this namespace.
    ///
    /// # Errors
    /// If the kernel does not tell.
    pub(crate) fn find(self) -> io::Result<Option<(u32, PathBuf)>> {
        let Some(found) = self.ask()? else {
            return Ok(None);
        };
        let mountpoint = || {
            let texts = found.get(TEXTS_AT..)?;
            let text = texts.get(usize::try_from(number(&found, MOUNTPOINT_AT)?).ok()?..)?;
            let text = text.split(|&byte| byte == 0).next()?;
            Some(PathBuf::from(OsString::from_vec(text.to_owned())))
        };
        let found = number(&found, OLD_ID_AT).zip(mountpoint());
        let is_path = |(_, path): &(u32, PathBuf)| path.is_absolute();
        // A mountpoint outside of this process's root directory has none.
        let found = found.filter(is_path).map(Some);
        found.ok_or_else(|| Errno::INVAL.into())
    }

    /// The mount's attributes (`MOUNT_ATTR_RDONLY` and others of linux/mount.h). `None` if it is not attached.
    ///
    /// # Errors
    /// As of [`Self::find`].
    pub(crate) fn attributes(self) -> io::Result<Option<u32>> {
        let found = self.ask()?;
        Ok(found.and_then(|found| number(&found, ATTRIBUTES_AT)))
    }

    /// The answer of statmount(2).
    fn ask(self) -> io::Result<Option<Vec<u8>>> {
        // A path has at most 4096 bytes.
        let mut buffer = vec![0; TEXTS_AT + (16 << 10)];
        match statmount(self.0, BASIC_AND_MOUNTPOINT, &mut buffer) {
            Err(Errno::NOENT) => Ok(None),
            asked => Ok(asked.map(|()| Some(buffer))?),
        }
    }
}

/// The number at `at` of a `struct statmount`. Attributes have 64 bits, of which the upper ones are not in use.
fn number(found: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*found.get(at..)?.first_chunk()?))
}

/// The mount id of `descriptor`. statx(2) without attributes sends no request, and has it since Linux 5.8.
/// Before Linux 5.14 a process that is not dumpable cannot read its `/proc/self/fdinfo`, unless it is root's.
pub(crate) fn mount_id(descriptor: impl AsFd) -> io::Result<Option<u32>> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    if let Ok(found) = statx(&descriptor, "", flags, StatxFlags::empty())
        && StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::MNT_ID)
    {
        return Ok(u32::try_from(found.stx_mnt_id).ok());
    }
    let number = descriptor.as_fd().as_raw_fd();
    let fdinfo = fs::read_to_string(format!("/proc/self/fdinfo/{number}"))?;
    let id = fdinfo.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    Ok(id.and_then(|id| id.trim().parse().ok()))
}

/// Whether two open files are on different mounts.
pub(crate) fn are_on_different_mounts(one: impl AsFd, other: impl AsFd) -> Result<bool, Errno> {
    Ok(match (mount_id(&one), mount_id(&other)) {
        (Ok(Some(one)), Ok(Some(other))) => one != other,
        _ => fstat(one)?.st_dev != fstat(other)?.st_dev,
    })
}

/// Whether something is mounted on the file `name` in `directory`.
pub(crate) fn is_mount(directory: impl AsFd, name: &[u8]) -> bool {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
    match statx(&directory, name, flags, StatxFlags::empty()) {
        Ok(found)
            if found
                .stx_attributes_mask
                .contains(StatxAttributes::MOUNT_ROOT) =>
        {
            found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)
        }
        // Before Linux 5.8.
        _ => is_on_other_mount(directory, name),
    }
}

fn is_on_other_mount(directory: impl AsFd, name: &[u8]) -> bool {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(&directory, name, flags, Mode::empty())
        .and_then(|file| are_on_different_mounts(file, directory))
        .unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn unique_number_leads_to_the_mountpoint() {
        let proc = File::open("/proc").expect("a directory");
        let unique = UniqueMountId::of(&proc).expect("Linux 6.8 runs the tests");
        let (id, path) = unique.find().expect("readable").expect("mounted");
        assert_eq!(path, PathBuf::from("/proc"));
        assert_eq!(Some(id), mount_id(&proc).expect("readable"));
        assert_eq!(UniqueMountId::findable(&proc), Some(unique));
        assert!(unique.attributes().expect("readable").is_some());
        let none = UniqueMountId(u64::MAX - 1).find();
        assert!(none.expect("readable").is_none());
    }

    #[test]
    fn mount_point_is_found_by_its_attribute_and_by_its_mount_id() {
        let root = File::open("/").expect("a directory");
        for (name, expected) in [(&b"proc"[..], true), (b"tmp/.", false), (b"none", false)] {
            assert_eq!(is_mount(&root, name), expected);
            assert_eq!(is_on_other_mount(&root, name), expected);
        }
    }
}
