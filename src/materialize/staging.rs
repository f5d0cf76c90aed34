//! Atomic output: builds a tree under a temporary name, then renames it.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, fstat, renameat, renameat_with};
use rustix::io::Errno;

use super::error::{Error, StepError, WithAction, errno_of};
use super::write::{
    AttributeTarget, CHANGE_MODE, Directory, copy_attributes, default_acl_mode, is_empty,
    sync_file_system, umask,
};
use crate::base::NAME_MAX;
use crate::base::mount_point::is_mount;
use crate::base::publish::{SUFFIX_LEN, random_suffix};
use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::tree::remove_tree;

const MAX_NAME_ATTEMPTS: usize = 16;
/// Bounds the removal of a tree that a writer may still use.
const MAX_REMOVAL_ATTEMPTS: usize = 20;
const REMOVAL_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Destination of a tree that appears completely or not at all.
///
/// Dropping it before [`Staging::commit`] removes the written tree.
#[derive(Debug)]
pub struct Staging {
    destination: PathBuf,
    /// Opened before anything was written.
    parent: OwnedFd,
    parent_path: PathBuf,
    name: Vec<u8>,
    stage: Mutex<Stage>,
    /// Set by [`Staging::interrupt`].
    pub(super) stop_error: Arc<OnceLock<Error>>,
    stats: Arc<Stats>,
}

#[derive(Debug)]
enum Stage {
    /// No directory was made.
    Planned,
    /// The tree is in `temporary`. `replaces` means that the destination is an empty directory.
    Building { temporary: Vec<u8>, replaces: bool },
    /// The tree was renamed or removed.
    Finished,
}

impl Staging {
    /// Checks that `destination` is missing or an empty directory. Makes nothing.
    ///
    /// # Errors
    /// [`Error::NotEmpty`] when something exists there, [`Error::CannotRename`] when the kernel cannot rename
    /// to it, and [`Error::Destination`] when it cannot be read.
    pub fn new(destination: &Path, stats: Arc<Stats>) -> Result<Self, Error> {
        const NAMELESS: &str = "has no name to give to a new directory";
        let nameless = || Error::CannotRename(destination.to_owned(), NAMELESS);
        let name = destination.file_name().ok_or_else(nameless)?;
        // Without a trailing slash, which would follow a link.
        let mut place = destination.with_file_name(name);
        if std::fs::symlink_metadata(&place).is_ok_and(|status| status.is_symlink()) {
            place = std::fs::canonicalize(&place)
                .map_err(|error| Error::Destination(destination.to_owned(), errno_of(&error)))?;
        }
        let name = place.file_name().ok_or_else(nameless)?.as_bytes().to_vec();
        let parent_path = match place.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent = rustix::fs::openat(CWD, &parent_path, flags, Mode::empty())
            .map_err(|errno| Error::Destination(parent_path.clone(), errno))?;
        let staging = Self {
            destination: destination.to_owned(),
            parent,
            parent_path,
            name,
            stage: Mutex::new(Stage::Planned),
            stop_error: Arc::default(),
            stats,
        };
        staging.check_destination()?;
        Ok(staging)
    }

    /// Makes the directory for the tree. Also returns the final mode, unless a member sets another one.
    pub(super) fn create(&self) -> Result<(Directory, u32), Error> {
        let mut stage = self.stage.lock();
        if !matches!(*stage, Stage::Planned) {
            return Err(Error::Interrupted);
        }
        let replaced = self.check_destination()?;
        let temporary = self
            .make_directory()
            .with_action("make a directory beside it")
            .map_err(|error| self.staging_error(error))?;
        *stage = Stage::Building {
            temporary: temporary.clone(),
            replaces: replaced.is_some(),
        };
        self.prepare_directory(&temporary, replaced.as_ref())
            .map_err(|error| self.staging_error(error))
    }

    /// Renames the finished tree to its destination.
    ///
    /// With `sync`, the tree is on disk before it appears, and its name is on disk on return.
    ///
    /// # Errors
    /// [`Error::NotEmpty`] when something else exists there now, [`Error::Sync`], and errors of the system.
    /// After an error nothing has appeared, except when syncing the name failed.
    pub fn commit(&self, sync: bool) -> Result<(), Error> {
        if sync {
            sync_file_system(&self.parent, &self.destination, &self.stats)?;
        }
        let mut stage = self.stage.lock();
        let Stage::Building {
            temporary,
            replaces,
        } = &*stage
        else {
            return Err(Error::Interrupted);
        };
        self.rename(temporary, *replaces)
            .map_err(|errno| match errno {
                Errno::EXIST | Errno::NOTEMPTY | Errno::NOTDIR => {
                    Error::NotEmpty(self.destination.clone())
                }
                Errno::BUSY | Errno::XDEV => self.mount_point_error(),
                errno => {
                    let action = "rename the finished tree to it";
                    self.staging_error(StepError { action, errno })
                }
            })?;
        *stage = Stage::Finished;
        drop(stage);
        if sync {
            rustix::fs::fsync(&self.parent)
                .map_err(|errno| Error::Sync(self.parent_path.clone(), errno))?;
        }
        Ok(())
    }

    /// Removes the written tree, unless it was committed.
    ///
    /// # Errors
    /// When a part of it cannot be removed.
    pub fn discard(&self) -> Result<(), Error> {
        // Locked during the removal, so that nothing can be committed meanwhile.
        let mut stage = self.stage.lock();
        let Stage::Building { temporary, .. } = std::mem::replace(&mut *stage, Stage::Finished)
        else {
            return Ok(());
        };
        let mut removed = remove_tree(&self.parent, &temporary);
        for _ in 1..MAX_REMOVAL_ATTEMPTS {
            // A writer has not seen the error yet, or its file is still open on NFS.
            if !matches!(removed, Err(Errno::NOTEMPTY | Errno::BUSY)) {
                break;
            }
            std::thread::sleep(REMOVAL_RETRY_DELAY);
            removed = remove_tree(&self.parent, &temporary);
        }
        let temporary = std::ffi::OsStr::from_bytes(&temporary);
        removed.map_err(|errno| Error::Leftover(self.parent_path.join(temporary), errno))
    }

    /// Like [`Staging::discard`], from another thread. The run ends with [`Error::Interrupted`].
    ///
    /// # Errors
    /// When a part of it cannot be removed.
    pub fn interrupt(&self) -> Result<(), Error> {
        drop(self.stop_error.set(Error::Interrupted));
        self.discard()
    }

    /// The existing empty directory at the destination, if any.
    fn check_destination(&self) -> Result<Option<OwnedFd>, Error> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let failed = |errno| Error::Destination(self.destination.clone(), errno);
        let found = match rustix::fs::openat(&self.parent, &*self.name, flags, Mode::empty()) {
            Ok(found) => found,
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(failed(errno)),
        };
        if is_mount(&self.parent, &self.name) {
            return Err(self.mount_point_error());
        }
        if !is_empty(&found).map_err(failed)? {
            return Err(Error::NotEmpty(self.destination.clone()));
        }
        Ok(Some(found))
    }

    /// Makes a temporary directory that only this user can access.
    fn make_directory(&self) -> Result<Vec<u8>, Errno> {
        for _ in 0..MAX_NAME_ATTEMPTS {
            let temporary = temporary_name(&self.name);
            match rustix::fs::mkdirat(&self.parent, &*temporary, Mode::RWXU) {
                Err(Errno::EXIST) => {}
                made => return made.map(|()| temporary),
            }
        }
        Err(Errno::EXIST)
    }

    /// Opens the new directory with the attributes of the `replaced` one except the mode, which it returns.
    fn prepare_directory(
        &self,
        temporary: &[u8],
        replaced: Option<&OwnedFd>,
    ) -> Result<(Directory, u32), StepError> {
        const STAT_DIRECTORY: &str = "look at the new directory beside it";
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(&self.parent, temporary, flags, Mode::empty())
            .with_action("open the new directory beside it")?;
        let mode = match replaced {
            Some(replaced) => {
                copy_attributes(replaced.as_fd(), directory.as_fd())
                    .with_action("give its attributes to the new directory")?;
                let mode = fstat(&directory).with_action(STAT_DIRECTORY)?.st_mode & 0o7777;
                let changed = AttributeTarget::Open(directory.as_fd()).chmod(mode & 0o7000 | 0o700);
                changed.with_action(CHANGE_MODE)?;
                mode
            }
            None => new_directory_mode(&directory).with_action(STAT_DIRECTORY)?,
        };
        Ok((Directory::top(directory).with_action(STAT_DIRECTORY)?, mode))
    }

    fn rename(&self, temporary: &[u8], replaces: bool) -> Result<(), Errno> {
        let (parent, name) = (&self.parent, &*self.name);
        if replaces {
            // The kernel refuses if the destination is no longer empty.
            return renameat(parent, temporary, parent, name);
        }
        match renameat_with(parent, temporary, parent, name, RenameFlags::NOREPLACE) {
            // NFS and others lack `RENAME_NOREPLACE`. An empty directory made meanwhile is replaced there.
            Err(Errno::INVAL | Errno::NOSYS) => {
                match rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(_) => Err(Errno::EXIST),
                    Err(Errno::NOENT) => renameat(parent, temporary, parent, name),
                    Err(errno) => Err(errno),
                }
            }
            renamed => renamed,
        }
    }

    fn mount_point_error(&self) -> Error {
        Error::CannotRename(self.destination.clone(), "is a mount point")
    }

    fn staging_error(&self, error: StepError) -> Error {
        Error::Staging(self.destination.clone(), error.action, error.errno)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // A caller that needs the error calls `discard`.
        drop(self.discard());
    }
}

/// Mode that mkdir(2) gives a directory beside the new one, by the inherited default ACL or the umask.
fn new_directory_mode(directory: &OwnedFd) -> Result<u32, Errno> {
    let special = fstat(directory)?.st_mode & 0o7000;
    Ok(special | default_acl_mode(directory.as_fd()).unwrap_or(0o777 & !umask()))
}

/// A hidden, random name that contains `name`. Killed runs leave their directories.
fn temporary_name(name: &[u8]) -> Vec<u8> {
    const MARK: &[u8] = b".tarfs-";
    let name = name
        .get(..NAME_MAX - 1 - MARK.len() - SUFFIX_LEN)
        .unwrap_or(name);
    [b".", name, MARK, random_suffix().as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_name_is_hidden_descriptive_and_short_enough() {
        let name = temporary_name(b"tree");
        assert!(name.starts_with(b".tree.tarfs-"));
        assert_eq!(name.len(), b".tree.tarfs-".len() + SUFFIX_LEN);
        assert_ne!(name, temporary_name(b"tree"));
        let long = temporary_name(&[b'n'; NAME_MAX]);
        assert_eq!(long.len(), NAME_MAX);
        assert!(long.get(..20).is_some_and(|head| head.starts_with(b".nnn")));
    }
}
