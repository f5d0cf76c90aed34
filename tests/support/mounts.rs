//! The mount table of this process.

use std::fs;
use std::path::Path;

/// The mount table, as in `/proc/self/mountinfo`. Other tests have mountpoints that are not UTF-8.
pub(crate) fn mount_table() -> String {
    let table = fs::read("/proc/self/mountinfo").expect("readable");
    String::from_utf8_lossy(&table).into_owned()
}

/// Whether `path` is a mountpoint. It must be absolute and contain no blanks.
pub(crate) fn is_mounted(path: &Path) -> bool {
    mount_table().contains(&*path.to_string_lossy())
}
