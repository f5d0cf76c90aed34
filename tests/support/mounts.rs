//! The mount table of this process.

use std::fs;
use std::path::Path;

/// Lines of `/proc/self/mountinfo` about mounts at or below `path`, which must be absolute and contain no blanks.
pub(crate) fn mount_lines(path: &Path) -> Vec<String> {
    let table = fs::read("/proc/self/mountinfo").expect("readable");
    // Mountpoints of other tests are not UTF-8.
    let table = String::from_utf8_lossy(&table);
    let is_below = |line: &&str| {
        let mountpoint = line.split(' ').nth(4);
        mountpoint.is_some_and(|mountpoint| Path::new(mountpoint).starts_with(path))
    };
    table.lines().filter(is_below).map(str::to_owned).collect()
}

/// Whether something is mounted at or below `path`, as for [`mount_lines`].
pub(crate) fn is_mounted(path: &Path) -> bool {
    !mount_lines(path).is_empty()
}
