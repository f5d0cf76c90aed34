//! Converts index entries into the attributes that stat(2) shows; pure.

use std::time::SystemTime;

use fuser::{FileAttr, FileType, INodeNo};
use serde::{Deserialize, Serialize};

use crate::base::time::system_time;
use crate::index::{Entry, EntryKind};
use crate::tar::Timestamp;

/// Unit of `st_blocks`, by POSIX.
const BLOCK_BYTES: u64 = 512;
/// `st_blksize`: the page size. The kernel derives the inode's block shift from it.
pub(super) const BLKSIZE: u32 = 4096;

/// The owners and modes that a mount shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Ownership {
    /// Owner of every entry.
    pub uid: Option<u32>,
    /// Group of every entry.
    pub gid: Option<u32>,
    /// Permission bits to clear in every mode.
    pub umask: u32,
}

pub(super) fn attributes(
    entry: Entry<'_>,
    mode: u32,
    inode: INodeNo,
    ownership: &Ownership,
) -> FileAttr {
    let time = time_of(entry.mtime());
    let kind = entry.kind();
    FileAttr {
        ino: inode,
        size: size(kind, entry.size()),
        blocks: entry.stored_bytes().div_ceil(BLOCK_BYTES),
        atime: time,
        mtime: time,
        ctime: time,
        crtime: time,
        kind: file_type(kind),
        perm: permissions(mode, ownership.umask),
        nlink: entry.link_count(),
        uid: ownership.uid.unwrap_or(entry.uid()),
        gid: ownership.gid.unwrap_or(entry.gid()),
        rdev: rdev(kind),
        blksize: BLKSIZE,
        flags: 0,
    }
}

pub(super) fn negative_entry() -> FileAttr {
    FileAttr {
        ino: INodeNo(0),
        size: 0,
        blocks: 0,
        atime: SystemTime::UNIX_EPOCH,
        mtime: SystemTime::UNIX_EPOCH,
        ctime: SystemTime::UNIX_EPOCH,
        crtime: SystemTime::UNIX_EPOCH,
        kind: FileType::RegularFile,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 0,
        flags: 0,
    }
}

pub(super) fn file_type(kind: EntryKind<'_>) -> FileType {
    match kind {
        EntryKind::File => FileType::RegularFile,
        EntryKind::Directory => FileType::Directory,
        EntryKind::Symlink(_) => FileType::Symlink,
        EntryKind::CharDevice(_) => FileType::CharDevice,
        EntryKind::BlockDevice(_) => FileType::BlockDevice,
        EntryKind::Fifo => FileType::NamedPipe,
    }
}

/// The size of an entry, cut to the largest signed offset, because the kernel reads no larger file.
fn size(kind: EntryKind<'_>, size: u64) -> u64 {
    match kind {
        EntryKind::File | EntryKind::Symlink(_) => size.min(i64::MAX as u64),
        EntryKind::Directory
        | EntryKind::CharDevice(_)
        | EntryKind::BlockDevice(_)
        | EntryKind::Fifo => 0,
    }
}

fn permissions(mode: u32, umask: u32) -> u16 {
    // umask(2) has nine bits. The set-user-id, set-group-id and sticky bits stay.
    let bits = mode & 0o7777 & !(umask & 0o777);
    u16::try_from(bits).unwrap_or(0)
}

/// The number of a device. No index has one that does not fit.
fn rdev(kind: EntryKind<'_>) -> u32 {
    match kind {
        EntryKind::CharDevice(device) | EntryKind::BlockDevice(device) => {
            device.linux_number().unwrap_or(0)
        }
        _ => 0,
    }
}

/// `time` as a `SystemTime`, or 1970 if the type cannot hold it.
fn time_of(time: Timestamp) -> SystemTime {
    system_time(time.seconds, time.nanoseconds.into())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::tar::Device;
    use rustix::fs::makedev;

    #[test]
    fn rdev_matches_makedev() {
        for (major, minor) in [(1, 3), (8, 0), (259, 70_000), (0xfff, 0xf_ffff)] {
            let kind = EntryKind::CharDevice(Device { major, minor });
            assert_eq!(u64::from(rdev(kind)), makedev(major, minor));
        }
        assert_eq!(rdev(EntryKind::File), 0);
    }

    // Promises: times-nanoseconds
    #[test]
    fn time_before_1970_adds_nanoseconds() {
        let time = |seconds, nanoseconds| {
            time_of(Timestamp {
                seconds,
                nanoseconds,
            })
        };
        let half = Duration::from_millis(500);
        assert_eq!(time(-1, 500_000_000), SystemTime::UNIX_EPOCH - half);
        assert_eq!(time(0, 500_000_000), SystemTime::UNIX_EPOCH + half);
    }

    #[test]
    fn extreme_timestamps_do_not_panic() {
        for seconds in [i64::MIN, i64::MAX] {
            let time = time_of(Timestamp {
                seconds,
                nanoseconds: 999_999_999,
            });
            assert!(time.duration_since(SystemTime::UNIX_EPOCH).is_ok() || seconds < 0);
        }
    }

    // Promises: owner-mount
    #[test]
    fn umask_clears_permissions_and_keeps_set_user_id() {
        assert_eq!(permissions(0o4777, 0o022), 0o4755);
        assert_eq!(permissions(0o4777, 0o7777), 0o4000);
        assert_eq!(permissions(0o644, 0), 0o644);
    }

    #[test]
    fn size_is_clamped_to_i64_max() {
        assert_eq!(size(EntryKind::File, u64::MAX), i64::MAX as u64);
        assert_eq!(size(EntryKind::Directory, 7), 0);
        assert_eq!(size(EntryKind::Symlink(b"abc"), 3), 3);
    }
}
