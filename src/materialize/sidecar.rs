//! A hidden file beside a destination, private to its owner, locked by one process.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, Stat, fstat};
use rustix::io::Errno;

use crate::base::NAME_MAX;
use crate::base::regular_file::foreign_writer;
use crate::base::time::nanoseconds;
use crate::materialize::lock::is_locked;

/// Attributes of a complete entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct StatSnapshot {
    pub(crate) inode: u64,
    pub(crate) size: i64,
    pub(crate) mtime: (i64, u64),
    pub(crate) ctime: (i64, u64),
}

impl StatSnapshot {
    /// Whether `stat` matches in everything but the ctime.
    pub(crate) fn matches_except_ctime(&self, stat: &Stat) -> bool {
        let ctime = self.ctime;
        *self
            == Self {
                ctime,
                ..Self::of(stat)
            }
    }

    pub(crate) fn of(stat: &Stat) -> Self {
        Self {
            inode: stat.st_ino,
            size: stat.st_size,
            mtime: (stat.st_mtime, nanoseconds(stat.st_mtime_nsec)),
            ctime: (stat.st_ctime, nanoseconds(stat.st_ctime_nsec)),
        }
    }
}

/// Opens and locks the file at `path`, and creates it if `is_new`. Fails with [`Errno::ACCESS`] when it is a
/// link, has another name or is not a regular file, or another user could have written it; with [`Errno::WOULDBLOCK`] when another
/// process has locked it, which the lock of the directory does not show on file systems that lock only files.
pub(crate) fn open(path: &Path, is_new: bool) -> Result<File, Errno> {
    let mut flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    flags.set(OFlags::CREATE, is_new);
    let file = rustix::fs::openat(CWD, path, flags, Mode::from_raw_mode(0o600))?;
    let stat = fstat(&file)?;
    let is_ours = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
        && stat.st_nlink == 1
        && foreign_writer(&stat, &[rustix::process::geteuid().as_raw()]).is_none();
    if !is_ours {
        return Err(Errno::ACCESS);
    }
    if is_locked(&file) {
        return Err(Errno::WOULDBLOCK);
    }
    Ok(file.into())
}

/// The path of `.NAME` plus `suffix` beside `directory`; `None` when `directory` has no name.
pub(crate) fn path(directory: &Path, suffix: &[u8]) -> Option<PathBuf> {
    let name = directory.file_name()?.as_bytes();
    let name = name.get(..NAME_MAX - 1 - suffix.len()).unwrap_or(name);
    let name = [b".", name, suffix].concat();
    Some(directory.with_file_name(OsString::from_vec(name)))
}

pub(crate) fn boot_id() -> Vec<u8> {
    std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: sync-locked
    #[test]
    fn sidecar_of_a_process_that_ends_is_opened() {
        let directory = tempfile::tempdir().expect("new");
        let path = directory.path().join("file");
        let held = open(&path, true).expect("new");
        assert_eq!(open(&path, false).err(), Some(Errno::WOULDBLOCK));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| open(&path, false).map(drop));
            drop(held);
            assert_eq!(waiting.join().expect("no panic"), Ok(()));
        });
    }
}
