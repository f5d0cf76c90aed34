//! Open directories of the destination, and lookups in them that follow no links.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::base::archive_path::ArchivePath;
use crate::base::xattr::posix_acl;

/// An open directory; clones share the descriptor.
#[derive(Clone, Debug)]
pub(crate) struct Directory(Arc<Handle>);

/// A directory that may have been closed.
#[derive(Clone, Debug, Default)]
pub(crate) struct WeakDirectory(Weak<Handle>);

impl WeakDirectory {
    pub(crate) fn upgrade(&self) -> Option<Directory> {
        self.0.upgrade().map(Directory)
    }
}

#[derive(Debug)]
struct Handle {
    fd: OwnedFd,
    identity: Identity,
    /// New entries inherit an ACL, which changes their modes.
    inherits_acl: bool,
    /// The path without links, if the lookup followed links.
    resolved_path: OnceLock<ArchivePath>,
    creates_as_process_owner: OnceLock<bool>,
    open: Arc<AtomicUsize>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Identity of a directory, independent of the path.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) struct Identity {
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

impl Identity {
    pub(crate) fn of(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
        }
    }
}

/// By identity, whatever led there.
impl PartialEq for Directory {
    fn eq(&self, other: &Self) -> bool {
        self.identity() == other.identity()
    }
}

impl Directory {
    /// Opens the destination. Links in its own path are followed, because the user chose it.
    pub(crate) fn open_top(path: &Path) -> Result<Self, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Self::top(rustix::fs::openat(CWD, path, flags, Mode::empty())?)
    }

    pub(crate) fn top(fd: OwnedFd) -> Result<Self, Errno> {
        let inherits_acl = has_default_acl(&fd);
        Self::new(fd, inherits_acl, &Arc::default())
    }

    fn new(fd: OwnedFd, inherits_acl: bool, open: &Arc<AtomicUsize>) -> Result<Self, Errno> {
        let identity = Identity::of(&rustix::fs::fstat(&fd)?);
        open.fetch_add(1, Ordering::Relaxed);
        Ok(Self(Arc::new(Handle {
            fd,
            identity,
            inherits_acl,
            resolved_path: OnceLock::new(),
            creates_as_process_owner: OnceLock::new(),
            open: Arc::clone(open),
        })))
    }

    /// Opens the directory `name`. One that `is_new` inherits the default ACL.
    pub(crate) fn open_child(&self, name: &[u8], is_new: bool) -> Result<Self, Errno> {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = |how| rustix::fs::openat(self, name, flags | how, Mode::empty());
        let fd = match open(OFlags::RDONLY) {
            // Even if we may not read it, entries may be allowed in it.
            Err(Errno::ACCESS) => open(OFlags::PATH),
            result => result,
        }?;
        let inherits_acl = if is_new {
            self.inherits_acl()
        } else {
            has_default_acl(&fd)
        };
        let child = Self::new(fd, inherits_acl, &self.0.open)?;
        if let Some(path) = self.resolved_path_of(name) {
            child.set_resolved_path(path);
        }
        Ok(child)
    }

    /// Another descriptor of the directory, with a resolved path of its own.
    pub(super) fn duplicate(&self) -> Result<Self, Errno> {
        let fd = rustix::io::fcntl_dupfd_cloexec(self, 0)?;
        Self::new(fd, self.inherits_acl(), &self.0.open)
    }

    pub(crate) fn downgrade(&self) -> WeakDirectory {
        WeakDirectory(Arc::downgrade(&self.0))
    }

    pub(crate) fn identity(&self) -> Identity {
        self.0.identity
    }

    pub(crate) fn inherits_acl(&self) -> bool {
        self.0.inherits_acl
    }

    pub(super) fn open_count(&self) -> usize {
        self.0.open.load(Ordering::Relaxed)
    }

    /// Path of `name` without links, which may change later; `None` if this directory's lookup followed none.
    pub(crate) fn resolved_path_of(&self, name: &[u8]) -> Option<ArchivePath> {
        let mut path = self.0.resolved_path.get()?.clone();
        path.push(name);
        Some(path)
    }

    /// The place of the last component of `path` in this directory, without the links that its lookup followed.
    pub(crate) fn place_of(&self, path: &ArchivePath) -> ArchivePath {
        let resolved_path = self.resolved_path_of(name_of(path));
        resolved_path.unwrap_or_else(|| path.clone())
    }

    pub(super) fn set_resolved_path(&self, path: ArchivePath) {
        drop(self.0.resolved_path.set(path));
    }

    /// Whether entries made here belong to our user and group; `None` before the first file. They do not in
    /// some set-group-id directories, and on `grpid` and idmapped mounts.
    pub(super) fn creates_as_process_owner(&self) -> Option<bool> {
        self.0.creates_as_process_owner.get().copied()
    }

    pub(super) fn set_creates_as_process_owner(&self, is_process_owner: bool) {
        self.0.creates_as_process_owner.set(is_process_owner).ok();
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

fn has_default_acl(fd: &OwnedFd) -> bool {
    rustix::fs::fgetxattr_query(fd, posix_acl::Kind::Default.attribute()).is_ok()
}

pub(crate) fn lstat_at(directory: &Directory, name: &[u8]) -> Result<Stat, Errno> {
    rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
}

/// Whether `name` is a directory, and not a link to one.
pub(crate) fn is_directory(directory: &Directory, name: &[u8]) -> bool {
    lstat_at(directory, name)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
}

/// Whether a directory has no entries.
pub(crate) fn is_empty(directory: impl AsFd) -> Result<bool, Errno> {
    for entry in Dir::read_from(directory)? {
        if !matches!(entry?.file_name().to_bytes(), b"." | b"..") {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Last component of a path; empty for the root.
pub(crate) fn name_of(path: &ArchivePath) -> &[u8] {
    path.components().next_back().unwrap_or_default()
}

/// Path of the parent directory; empty for the root and its direct entries.
pub(crate) fn parent_of(path: &ArchivePath) -> &[u8] {
    let bytes = path.as_bytes();
    let slash = bytes.iter().rposition(|&byte| byte == b'/');
    bytes.get(..slash.unwrap_or(0)).unwrap_or_default()
}
