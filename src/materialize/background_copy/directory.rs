//! The directory of a background copy, and the ledger beside it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, Stat, fstat};
use rustix::io::Errno;

use super::ledger::{Ledger, TreeId};
use crate::base::archive_path::ArchivePath;
use crate::base::lock::LockHolder;
use crate::materialize::error::{Error, errno_of};
use crate::materialize::lock::DestinationLock;
use crate::materialize::sidecar;
use crate::materialize::write::{Directory, is_empty};

/// Suffix of a ledger's name. The ledger of `tree` is `.tree.tarfs-state`.
const LEDGER_SUFFIX: &[u8] = b".tarfs-state";

#[derive(Debug)]
pub(super) struct CopyDirectory {
    /// Absolute, without symbolic links.
    pub(super) path: PathBuf,
    pub(super) top: DestinationLock,
    ledger: File,
    ledger_path: PathBuf,
}

impl CopyDirectory {
    /// Opens and locks `directory` and its ledger. Makes a missing directory, and a ledger in an empty one. Fails
    /// with [`Error::NotACopy`] when a non-empty directory has no ledger.
    pub(super) fn open(directory: &Path) -> Result<Self, Error> {
        let failed = |error: io::Error| Error::Destination(directory.to_owned(), errno_of(&error));
        if let Err(error) = std::fs::create_dir(directory)
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(failed(error));
        }
        let directory = std::fs::canonicalize(directory).map_err(failed)?;
        let failed = |errno| Error::Destination(directory.clone(), errno);
        let top = DestinationLock::acquire(&directory)?;
        let ledger_path = sidecar::path(&directory, LEDGER_SUFFIX).ok_or_else(|| {
            Error::CannotRename(directory.clone(), "has no name to give to a file beside it")
        })?;
        let is_new = is_empty(&top).map_err(failed)?;
        let ledger = match sidecar::open(&ledger_path, is_new) {
            Ok(ledger) => ledger,
            Err(Errno::NOENT) => return Err(Error::NotACopy(directory)),
            Err(Errno::WOULDBLOCK) => {
                return Err(Error::InUse(ledger_path, LockHolder::default()));
            }
            Err(errno) => {
                let action = "open the list of complete files";
                return Err(Error::Ledger(ledger_path, action, errno));
            }
        };
        Ok(Self {
            path: directory,
            top,
            ledger,
            ledger_path,
        })
    }

    /// The ledger if it is of `content`, or a new one if the directory is empty; else [`Error::NotACopy`].
    pub(super) fn ledger(&self, content: u128, boot_id: u64) -> Result<Ledger, Error> {
        let failed = |error: io::Error| {
            self.ledger_error("read or write the list of complete files")(errno_of(&error))
        };
        let stat = fstat(&self.top).map_err(self.ledger_error("look at the directory"))?;
        let tree_id = TreeId {
            content,
            directory: stat.st_ino,
        };
        let file = self.ledger.try_clone().map_err(failed)?;
        let file = match Ledger::open(file, tree_id, boot_id).map_err(failed)? {
            Ok(ledger) => return Ok(ledger),
            Err(file) => file,
        };
        if !is_empty(&self.top).map_err(self.ledger_error("look into the directory"))? {
            return Err(Error::NotACopy(self.path.clone()));
        }
        Ledger::create(file, tree_id, boot_id).map_err(failed)
    }

    pub(super) fn ledger_error(&self, action: &'static str) -> impl Fn(Errno) -> Error {
        move |errno| Error::Ledger(self.ledger_path.clone(), action, errno)
    }

    pub(super) fn destination(&self) -> Result<Directory, Errno> {
        Directory::top(rustix::io::fcntl_dupfd_cloexec(&self.top, 0)?)
    }

    /// Opens the entry at `path`, without following links or leaving the file system. A regular file is
    /// opened for reading, other entries with `O_PATH`.
    pub(super) fn open_entry(&self, path: &ArchivePath, is_file: bool) -> Result<OwnedFd, Errno> {
        let how = if is_file {
            // `O_NONBLOCK`, because opening a FIFO in the entry's place would block.
            OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY
        } else {
            OFlags::PATH
        };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        rustix::fs::openat2(
            self.top.as_fd(),
            path.as_bytes(),
            how | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
            resolve,
        )
    }
}

pub(super) fn is_file(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    // Promises: copy-owner, copy-lock
    #[test]
    fn copy_directory_is_locked_and_bound_to_one_archive() {
        let base = tempfile::tempdir().expect("a directory");
        let copy = base.path().join("copy");
        let copy_directory = CopyDirectory::open(&copy).expect("made");
        assert!(base.path().join(".copy.tarfs-state").exists());
        assert!(matches!(
            CopyDirectory::open(&copy),
            Err(Error::InUse { .. })
        ));
        copy_directory.ledger(7, 1).expect("new");
        drop(copy_directory);
        std::fs::write(copy.join("file"), "x").expect("written");
        let copy_directory = CopyDirectory::open(&copy).expect("ours");
        copy_directory.ledger(7, 1).expect("still ours");
        assert!(matches!(
            copy_directory.ledger(8, 1),
            Err(Error::NotACopy { .. })
        ));
        drop(copy_directory);
        std::fs::remove_file(base.path().join(".copy.tarfs-state")).expect("there");
        assert!(matches!(
            CopyDirectory::open(&copy),
            Err(Error::NotACopy { .. })
        ));
        assert!(!base.path().join(".copy.tarfs-state").exists());
    }

    #[test]
    fn ledger_writable_by_others_is_rejected() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let base = tempfile::tempdir().expect("a directory");
        let copy = base.path().join("copy");
        let ledger = base.path().join(".copy.tarfs-state");
        drop(CopyDirectory::open(&copy).expect("made"));
        let open = std::fs::Permissions::from_mode(0o622);
        std::fs::set_permissions(&ledger, open).expect("ours");
        assert!(matches!(
            CopyDirectory::open(&copy),
            Err(Error::Ledger { .. })
        ));
        std::fs::rename(&ledger, base.path().join("elsewhere")).expect("there");
        symlink("elsewhere", &ledger).expect("made");
        assert!(matches!(
            CopyDirectory::open(&copy),
            Err(Error::Ledger { .. })
        ));
    }

    // Promises: copy-changed
    #[test]
    fn copy_entries_are_not_opened_through_symlinks() {
        let base = tempfile::tempdir().expect("a directory");
        let copy_directory = CopyDirectory::open(&base.path().join("copy")).expect("made");
        std::fs::create_dir(copy_directory.path.join("a")).expect("made");
        std::fs::write(copy_directory.path.join("a/file"), "x").expect("written");
        std::os::unix::fs::symlink("a", copy_directory.path.join("l")).expect("made");
        let open = |path: &[u8]| {
            let path = ArchivePath::sanitize(path).path;
            copy_directory.open_entry(&path, true).map(drop)
        };
        assert_eq!(open(b"a/file"), Ok(()));
        assert_eq!(open(b"l/file"), Err(Errno::LOOP));
        assert_eq!(open(b"l"), Err(Errno::LOOP));
    }

    #[test]
    fn ledger_name_fits_for_the_longest_directory_name() {
        let name = "n".repeat(crate::base::NAME_MAX);
        let path = sidecar::path(&Path::new("/x").join(name), LEDGER_SUFFIX).expect("a name");
        assert_eq!(
            path.file_name().map(OsStr::len),
            Some(crate::base::NAME_MAX)
        );
        assert_eq!(sidecar::path(Path::new("/"), LEDGER_SUFFIX), None);
    }
}
