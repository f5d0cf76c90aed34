//! A destination that the user cannot write to: one report instead of one per entry.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Access, AtFlags, CWD, accessat, statat};
use rustix::io::Errno;

use super::directory::Directory;
use crate::base::archive_path::ArchivePath;
use crate::materialize::error::{Error, Problems, StepError};

/// Refuses an empty directory that is not writable. A non-empty one may contain writable directories.
///
/// # Errors
/// When `path` is such a directory.
pub fn check_empty_destination(path: &Path) -> Result<(), Error> {
    let wanted = Access::WRITE_OK | Access::EXEC_OK;
    match accessat(CWD, path, wanted, AtFlags::EACCESS) {
        Err(errno @ (Errno::ACCESS | Errno::PERM | Errno::ROFS)) if is_empty_directory(path) => {
            Err(Error::Unwritable(path.to_owned(), errno))
        }
        _ => Ok(()),
    }
}

/// Whether `path` is a directory with no entries.
pub fn is_empty_directory(path: &Path) -> bool {
    fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
}

#[derive(Debug)]
pub(crate) struct Unwritable {
    path: PathBuf,
    top: Directory,
    was_reported: AtomicBool,
}

impl Unwritable {
    /// The destination at `path`, open as `top`; `None` when it is writable.
    pub(crate) fn of(path: &Path, top: &Directory) -> Option<Self> {
        let wanted = Access::WRITE_OK | Access::EXEC_OK;
        let flags = AtFlags::EACCESS;
        match accessat(top, ".", wanted, flags) {
            Err(Errno::ACCESS | Errno::PERM) => Some(Self {
                path: path.to_owned(),
                top: top.clone(),
                was_reported: AtomicBool::new(false),
            }),
            _ => None,
        }
    }

    /// Counts `path` among `problems`, and reports the destination once, if the destination explains `error`. Returns
    /// whether it does.
    pub(crate) fn absorb(&self, path: &ArchivePath, error: StepError, problems: &Problems) -> bool {
        let is_refused = matches!(error.errno, Errno::ACCESS | Errno::PERM);
        if !is_refused || !self.is_directly_in(path) {
            return false;
        }
        if !self.was_reported.swap(true, Ordering::Relaxed) {
            problems.report(&format!(
                "{}: cannot write to the destination directory: {} (name a directory that you \
                 may write to)",
                self.path.display(),
                error.errno,
            ));
        }
        problems.add_count(1);
        true
    }

    /// Whether the entry at `path`, or its first directory, must be made in the destination itself.
    fn is_directly_in(&self, path: &ArchivePath) -> bool {
        let mut components = path.components();
        let Some(first) = components.next() else {
            return false;
        };
        let found = statat(&self.top, first, AtFlags::SYMLINK_NOFOLLOW);
        components.next().is_none() || matches!(found, Err(Errno::NOENT))
    }
}
