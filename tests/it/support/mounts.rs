//! What is mounted.

use std::fs;
use std::path::Path;

/// Whether something is mounted on `path`, which is absolute and holds no blanks.
pub(crate) fn is_mounted(path: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("readable");
    table.contains(&*path.to_string_lossy())
}
