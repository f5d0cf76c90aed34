//! Change times (ctime): file systems that keep them reliably, and when they are settled.

use std::fs::Metadata;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use rustix::fs::fstatfs;
use rustix::time::{ClockId, Timespec, clock_gettime};

/// Magic numbers of file systems whose change times only this kernel sets.
///
/// Others take them from a server, a process, or an image. Overlayfs is not listed, because it does so for
/// lower layers and reuses device numbers.
const TRUSTED_FILE_SYSTEMS: [u32; 7] = [
    0x0000_EF53, // ext2, ext3, ext4
    0x5846_5342, // xfs
    0x9123_683E, // btrfs
    0xF2F5_2010, // f2fs
    0x2FC1_2FC1, // zfs
    0xCA45_1A4E, // bcachefs
    0x0102_1994, // tmpfs
];

/// Major device number of loop devices.
const LOOP_MAJOR: u32 = 7;

/// Whether this kernel sets a new change time for each change of `file`. False if the file system cannot be
/// determined.
pub fn is_trustworthy(file: impl AsFd, metadata: &Metadata) -> bool {
    // Any program may have written the image file of a loop device.
    let is_loop = rustix::fs::major(metadata.dev()) == LOOP_MAJOR;
    !is_loop && fstatfs(file).is_ok_and(|system| is_trusted(system.f_type.into()))
}

/// On some machines `f_type` is a signed word, but the magic numbers have 32 bits.
fn is_trusted(f_type: i128) -> bool {
    TRUSTED_FILE_SYSTEMS
        .iter()
        .any(|&magic| i128::from(magic) == f_type & 0xFFFF_FFFF)
}

/// The clock from which the kernel sets change times.
pub fn now() -> Timespec {
    clock_gettime(ClockId::RealtimeCoarse)
}

/// Whether every change after `now` gets a change time other than that of `metadata`.
pub fn is_settled(metadata: &Metadata, now: Timespec) -> bool {
    let changed = (metadata.ctime(), metadata.ctime_nsec());
    // Small inodes of ext store only seconds.
    let now_nsec = if changed.1 == 0 { 0 } else { now.tv_nsec };
    changed < (now.tv_sec, now_nsec)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    #[test]
    fn change_times_of_tmpfs_are_trusted_and_of_proc_are_not() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("file");
        fs::write(&path, "").unwrap();
        for (path, expected) in [(path.as_path(), true), ("/proc/version".as_ref(), false)] {
            let file = File::open(path).unwrap();
            let metadata = file.metadata().unwrap();
            assert_eq!(is_trustworthy(&file, &metadata), expected);
        }
    }

    #[test]
    fn a_change_is_settled_when_the_clock_has_ticked() {
        let file = tempfile::tempfile().unwrap();
        let metadata = file.metadata().unwrap();
        let at = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
        let (seconds, nanoseconds) = (metadata.ctime(), metadata.ctime_nsec());
        assert!(!is_settled(&metadata, at(seconds - 1, 999_999_999)));
        assert!(!is_settled(&metadata, at(seconds, nanoseconds)));
        assert!(is_settled(&metadata, at(seconds + 1, 0)));
        let is_next = is_settled(&metadata, at(seconds, nanoseconds + 1));
        assert_eq!(
            is_next,
            nanoseconds != 0,
            "whole seconds tick once a second"
        );
    }
}
