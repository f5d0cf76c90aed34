//! The directory of a copy, and the ledger beside it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, Stat, fstat};
use rustix::io::Errno;

use super::super::beside;
use super::super::problem::Error;
use super::super::root::Root;
use super::super::staging::is_empty;
use super::ledger::{Ledger, Owner};
use crate::base::archive_path::ArchivePath;

/// What the ledger of `tree` is called: `.tree.tarfs-state`.
const MARK: &[u8] = b".tarfs-state";

/// An open directory whose ledger nobody else uses.
#[derive(Debug)]
pub(super) struct Place {
    /// Absolute, without symbolic links.
    pub(super) directory: PathBuf,
    top: OwnedFd,
    ledger: File,
    ledger_path: PathBuf,
}

impl Place {
    /// Opens `directory`, which is made if it is missing, and takes its ledger, which is made if
    /// the directory is empty.
    ///
    /// # Errors
    /// [`Error::Foreign`] when there is something in it and no ledger beside it, [`Error::Taken`],
    /// and what the system says.
    pub(super) fn open(directory: &Path) -> Result<Self, Error> {
        let failed = |error: io::Error| Error::Destination {
            path: directory.to_owned(),
            errno: errno(&error),
        };
        match std::fs::create_dir(directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed(error));
            }
            _ => {}
        }
        let directory = std::fs::canonicalize(directory).map_err(failed)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = rustix::fs::openat(CWD, &directory, flags, Mode::empty());
        let failed = |errno| Error::Destination {
            path: directory.clone(),
            errno,
        };
        let top = open.map_err(failed)?;
        let ledger_path = beside::path(&directory, MARK).ok_or_else(|| Error::Unmovable {
            path: directory.clone(),
            why: "has no name to give to a file beside it",
        })?;
        let is_new = is_empty(&top).map_err(failed)?;
        let ledger = match beside::open(&ledger_path, is_new) {
            Ok(ledger) => ledger,
            Err(Errno::NOENT) => return Err(Error::Foreign { path: directory }),
            Err(Errno::WOULDBLOCK) => return Err(Error::Taken { path: directory }),
            Err(errno) => {
                return Err(Error::Ledger {
                    path: ledger_path,
                    action: "open the record of what is whole",
                    errno,
                });
            }
        };
        Ok(Self {
            directory,
            top,
            ledger,
            ledger_path,
        })
    }

    /// The ledger, if it is that of `content`; a new one in an empty directory.
    ///
    /// # Errors
    /// [`Error::Foreign`] when another tree is there, and what the system says.
    pub(super) fn ledger(&self, content: u128, boot: u64) -> Result<Ledger, Error> {
        let failed = |error: io::Error| {
            self.broken("read or write the record of what is whole")(errno(&error))
        };
        let stat = fstat(&self.top).map_err(self.broken("look at the directory"))?;
        let owner = Owner {
            content,
            directory: stat.st_ino,
        };
        let file = self.ledger.try_clone().map_err(failed)?;
        let file = match Ledger::open(file, owner, boot).map_err(failed)? {
            Ok(ledger) => return Ok(ledger),
            Err(file) => file,
        };
        if !is_empty(&self.top).map_err(self.broken("look into the directory"))? {
            return Err(Error::Foreign {
                path: self.directory.clone(),
            });
        }
        Ledger::create(file, owner, boot).map_err(failed)
    }

    /// The error that the ledger cannot be used.
    pub(super) fn broken(&self, action: &'static str) -> impl Fn(Errno) -> Error {
        move |errno| Error::Ledger {
            path: self.ledger_path.clone(),
            action,
            errno,
        }
    }

    /// The directory as a destination.
    pub(super) fn root(&self) -> Result<Root, Errno> {
        Root::at(rustix::io::fcntl_dupfd_cloexec(&self.top, 0)?)
    }

    /// What lies at `path`, through no link and on no other file system; a regular file can be
    /// read. Links and special files are not opened, only looked at.
    pub(super) fn open_entry(&self, path: &ArchivePath, is_file: bool) -> Result<OwnedFd, Errno> {
        let how = if is_file {
            // Whatever is there by now, opening it must not wait.
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

/// The system's number for `error`.
pub(super) fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// Whether `stat` is of a regular file.
pub(super) fn is_file(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    #[test]
    fn a_directory_has_one_user_and_is_nobody_elses() {
        let base = tempfile::tempdir().expect("a directory");
        let copy = base.path().join("copy");
        let place = Place::open(&copy).expect("made");
        assert!(base.path().join(".copy.tarfs-state").exists());
        assert!(matches!(Place::open(&copy), Err(Error::Taken { .. })));
        place.ledger(7, 1).expect("new");
        drop(place);
        std::fs::write(copy.join("file"), "x").expect("written");
        let place = Place::open(&copy).expect("ours");
        place.ledger(7, 1).expect("still ours");
        assert!(matches!(place.ledger(8, 1), Err(Error::Foreign { .. })));
        drop(place);
        std::fs::remove_file(base.path().join(".copy.tarfs-state")).expect("there");
        assert!(matches!(Place::open(&copy), Err(Error::Foreign { .. })));
        assert!(!base.path().join(".copy.tarfs-state").exists());
    }

    #[test]
    fn a_ledger_that_others_can_write_to_is_not_believed() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let base = tempfile::tempdir().expect("a directory");
        let copy = base.path().join("copy");
        let ledger = base.path().join(".copy.tarfs-state");
        drop(Place::open(&copy).expect("made"));
        let open = std::fs::Permissions::from_mode(0o622);
        std::fs::set_permissions(&ledger, open).expect("ours");
        assert!(matches!(Place::open(&copy), Err(Error::Ledger { .. })));
        std::fs::rename(&ledger, base.path().join("elsewhere")).expect("there");
        symlink("elsewhere", &ledger).expect("made");
        assert!(matches!(Place::open(&copy), Err(Error::Ledger { .. })));
    }

    #[test]
    fn entries_are_not_looked_for_behind_links() {
        let base = tempfile::tempdir().expect("a directory");
        let place = Place::open(&base.path().join("copy")).expect("made");
        std::fs::create_dir(place.directory.join("a")).expect("made");
        std::fs::write(place.directory.join("a/file"), "x").expect("written");
        std::os::unix::fs::symlink("a", place.directory.join("l")).expect("made");
        let open = |path: &[u8]| {
            let path = ArchivePath::sanitize(path).path;
            place.open_entry(&path, true).map(drop)
        };
        assert_eq!(open(b"a/file"), Ok(()));
        assert_eq!(open(b"l/file"), Err(Errno::LOOP));
        assert_eq!(open(b"l"), Err(Errno::LOOP));
    }

    #[test]
    fn the_longest_name_has_a_ledger_too() {
        let name = "n".repeat(beside::NAME_BYTES);
        let path = beside::path(&Path::new("/x").join(name), MARK).expect("a name");
        assert_eq!(path.file_name().map(OsStr::len), Some(beside::NAME_BYTES));
        assert_eq!(beside::path(Path::new("/"), MARK), None);
    }
}
