//! The mount table of this process.

use std::fs;
use std::path::Path;

/// Whether `path` is a mountpoint. It must be absolute and contain no blanks.
pub(crate) fn is_mounted(path: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("readable");
    table.contains(&*path.to_string_lossy())
}
