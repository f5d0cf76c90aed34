//! File system of the destination: its sync, and the number of writers for its type.

use std::os::fd::AsFd;
use std::path::Path;

use crate::base::stats::Stats;
use crate::base::thread::processors;
use crate::materialize::error::Error;

/// Number of writers on a local file system, at most one per processor. The kernel makes a file without
/// waiting, so writers only share the processors. Two nearly halved the time of one on two cores (0.74 s to
/// 0.44 s for a root filesystem of 920 MB onto tmpfs). A network or a decoder is rarely faster than four.
/// Spare writers cost little, because a file goes to another writer only when its own is behind.
const LOCAL_WRITERS: std::ops::RangeInclusive<usize> = 2..=4;

/// Number of writers on a remote file system: as many as the concurrent requests to a web server. Making a
/// file waits for several round trips, in which the processor is idle.
const REMOTE_WRITERS: usize = 16;

/// Remote file systems by `f_type` of statfs(2), from linux/magic.h and then from coreutils' stat(1).
const REMOTE_FS_TYPES: [(u32, &str); 15] = [
    (0x6969, "NFS_SUPER_MAGIC"),
    (0x517B, "SMB_SUPER_MAGIC"),
    (0xFF53_4D42, "CIFS_SUPER_MAGIC"),
    (0xFE53_4D42, "SMB2_SUPER_MAGIC"),
    (0x00C3_6400, "CEPH_SUPER_MAGIC"),
    (0x0102_1997, "V9FS_MAGIC"),
    // FUSE: sshfs and s3fs, also virtiofs, and local file systems in user space.
    (0x6573_5546, "FUSE_SUPER_MAGIC"),
    (0x5346_414F, "AFS_SUPER_MAGIC"),
    (0x6B41_4653, "AFS_FS_MAGIC"),
    (0x7375_7245, "CODA_SUPER_MAGIC"),
    (0x7461_636F, "OCFS2_SUPER_MAGIC"),
    (0x0BD0_0BD0, "Lustre"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
    (0xAAD7_AAEA, "PanFS"),
];

pub(crate) fn default_writer_count(destination: impl AsFd) -> usize {
    if is_on_remote(destination) {
        REMOTE_WRITERS
    } else {
        processors().clamp(*LOCAL_WRITERS.start(), *LOCAL_WRITERS.end())
    }
}

/// Whether `directory` is on a remote file system. If statfs(2) fails, the next step there reports the problem.
pub(crate) fn is_on_remote(directory: impl AsFd) -> bool {
    rustix::fs::fstatfs(directory).is_ok_and(|status| is_remote(status.f_type.into()))
}

/// On some machines `f_type` is a signed word, but the numbers have 32 bits.
fn is_remote(f_type: i128) -> bool {
    REMOTE_FS_TYPES
        .iter()
        .any(|&(magic, _)| i128::from(magic) == f_type & 0xFFFF_FFFF)
}

/// Syncs the file system of `directory`. Also fails for any write-back error since the descriptor was opened.
pub(crate) fn sync_file_system(
    directory: impl AsFd,
    path: &Path,
    stats: &Stats,
) -> Result<(), Error> {
    rustix::fs::syncfs(directory).map_err(|errno| Error::Sync(path.to_owned(), errno))?;
    stats.synced_file_systems.increment();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: write-threads
    #[test]
    fn network_and_fuse_file_systems_are_remote() {
        let tmpfs = 0x0102_1994;
        let local = [tmpfs, 0xEF53, 0x5846_5342, 0x9123_683E, 0x794C_7630, 0];
        assert!(!local.into_iter().any(is_remote));
        let [nfs, cifs, fuse] = [0x6969, 0xFF53_4D42, 0x6573_5546];
        assert!([nfs, cifs, fuse].into_iter().all(is_remote));
        let cifs_with_a_sign = i32::from_ne_bytes(0xFF53_4D42_u32.to_ne_bytes());
        assert!(is_remote(cifs_with_a_sign.into()));
    }

    #[test]
    fn writer_count_depends_on_the_file_system_type() {
        let proc = std::fs::File::open("/proc").expect("mounted");
        assert!(LOCAL_WRITERS.contains(&default_writer_count(proc)));
    }
}
