//! Mount points, by descriptors. Bind mounts of one file system differ by their mount ids alone.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::{AtFlags, Mode, OFlags, StatxAttributes, StatxFlags, fstat, openat, statx};
use rustix::io::Errno;

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
    fn mount_point_is_found_by_its_attribute_and_by_its_mount_id() {
        let root = File::open("/").expect("a directory");
        for (name, expected) in [(&b"proc"[..], true), (b"tmp/.", false), (b"none", false)] {
            assert_eq!(is_mount(&root, name), expected);
            assert_eq!(is_on_other_mount(&root, name), expected);
        }
    }
}
