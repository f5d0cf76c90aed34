//! The files of a directory of this machine, as a [`Tree`].

use std::borrow::Cow;
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Seek};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{
    AtFlags, CWD, Mode, OFlags, RawDir, ResolveFlags, SeekFrom, StatxFlags, StatxTimestamp, openat,
    openat2, readlinkat, seek, statx,
};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::base::AttributeTarget;
use crate::base::chmod::{OWNER_RWX, chmod_at};
use crate::base::mount_point::{are_on_different_mounts, is_mount};
use crate::base::passwd::Accounts;
use crate::base::xattr::posix_acl;
use crate::tar::Timestamp;

use super::interface::{
    Batch, Content, FileId, FileKind, FollowedLinks, Metadata, Name, Tree, Xattr, is_missing,
};

/// Room for the names that one system call reads, in bytes. Half a page less than what the allocator maps anew.
const READ_BYTES: usize = 126 << 10;

/// Most directories that a walk keeps open.
const MAX_OPEN_DIRECTORIES: usize = 4096;

/// Most directories that a removal on behalf of another verb keeps open.
const MAX_REMOVAL_DIRECTORIES: usize = 16;

/// A directory of this machine that is open for reading.
#[derive(Debug)]
pub struct OpenDirectory {
    descriptor: OwnedFd,
    /// The position from which the kernel reads on.
    position: AtomicU64,
}

impl From<OwnedFd> for OpenDirectory {
    fn from(descriptor: OwnedFd) -> Self {
        Self {
            descriptor,
            position: AtomicU64::new(0),
        }
    }
}

impl AsFd for OpenDirectory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl OpenDirectory {
    /// Makes the kernel read from `position` on. Returns whether there may be names.
    fn set_position(&self, position: u64) -> io::Result<bool> {
        if self.position.load(Ordering::Relaxed) == position {
            return Ok(true);
        }
        match seek(self, SeekFrom::Start(position)) {
            Ok(_) => Ok(true),
            // Some file systems refuse to seek in a directory that was removed.
            Err(Errno::INVAL) if rustix::fs::fstat(self)?.st_nlink == 0 => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// Files of this machine, by paths relative to the current directory.
#[derive(Debug, Default)]
pub struct DirectoryTree {
    accounts: Accounts,
    /// Whether mount points can be neither opened nor examined.
    pub is_one_file_system: bool,
    follows_links: bool,
    /// Whether directories get the permissions of the owner when they are opened.
    unlocks: bool,
    /// Most directories that a walk keeps open, if that is fewer than usual.
    open_limit: Option<usize>,
}

impl DirectoryTree {
    /// The files of this machine, with the names of its users.
    pub fn new() -> Self {
        Self {
            accounts: Accounts::load_system(),
            ..Self::default()
        }
    }

    /// The same files, except for what is mounted below a directory.
    pub fn on_one_file_system() -> Self {
        Self {
            is_one_file_system: true,
            ..Self::new()
        }
    }

    /// The same files, with those behind `links` in the places of the links if they are all.
    #[must_use]
    pub fn following(self, links: FollowedLinks) -> Self {
        Self {
            follows_links: links == FollowedLinks::All,
            ..self
        }
    }

    /// Files that are removed whatever their modes are, except for what is mounted below. It keeps few directories open.
    pub(super) fn to_remove() -> Self {
        Self {
            is_one_file_system: true,
            unlocks: true,
            open_limit: Some(MAX_REMOVAL_DIRECTORIES),
            ..Self::default()
        }
    }

    /// The current directory, of which starting points are names.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn base(&self) -> io::Result<OpenDirectory> {
        self.base_at(Path::new("."))
    }

    /// The directory at `path`, of which starting points are names. A link is followed.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn base_at(&self, path: &Path) -> io::Result<OpenDirectory> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(openat(CWD, path, flags, Mode::empty())?.into())
    }
}

impl Tree for DirectoryTree {
    type Directory = OpenDirectory;

    fn open(&self, parent: &OpenDirectory, name: Name<'_>) -> io::Result<OpenDirectory> {
        let open = || open_directory(parent, name.name, self);
        if !self.unlocks {
            return Ok(open()?.into());
        }
        let opened = match open() {
            Err(Errno::ACCESS) => {
                chmod_at(parent, name.name, OWNER_RWX)?;
                open()
            }
            opened => opened,
        }?;
        if rustix::fs::fstat(&opened)?.st_mode & OWNER_RWX != OWNER_RWX {
            // Root needs no permission. Other users soon see an error.
            let _not_ours = chmod_at(&opened, b"", OWNER_RWX);
        }
        Ok(opened.into())
    }

    fn read(
        &self,
        directory: &OpenDirectory,
        position: &mut u64,
        batch: &mut Batch,
    ) -> io::Result<()> {
        if !directory.set_position(*position)? {
            return Ok(());
        }
        let mask = StatxFlags::TYPE | StatxFlags::INO;
        let mut buffer = Vec::with_capacity(READ_BYTES);
        let mut entries = RawDir::new(directory, buffer.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = match entry {
                // The directory was removed.
                Err(Errno::NOENT) => break,
                entry => entry?,
            };
            *position = entry.next_entry_cookie();
            directory.position.store(*position, Ordering::Relaxed);
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                let kind = FileKind::from_mode(entry.file_type().as_raw_mode());
                let is_known = !(self.follows_links && kind == Some(FileKind::Symlink));
                let (kind, inode) = match kind.filter(|_| is_known) {
                    Some(kind) => (kind, entry.ino()),
                    None => match stat_file(directory, name, mask, self.follows_links) {
                        Ok(found) => (found.kind, found.inode),
                        Err(error) => {
                            batch.fail(name, error);
                            continue;
                        }
                    },
                };
                batch.push(name, kind, inode);
            }
            // The two names alone are not the end.
            if entries.is_buffer_empty() && !batch.is_empty() {
                break;
            }
        }
        Ok(())
    }

    fn metadata(&self, directory: &OpenDirectory, name: Name<'_>) -> io::Result<Metadata> {
        let name = name.name;
        if self.is_one_file_system && name != b"." && is_mount(directory, name) {
            return Err(Errno::XDEV.into());
        }
        stat_file(directory, name, StatxFlags::BASIC_STATS, self.follows_links)
    }

    fn kind(
        &self,
        directory: &OpenDirectory,
        name: Name<'_>,
        follows: bool,
    ) -> io::Result<FileKind> {
        let mut flags = AtFlags::empty();
        flags.set(AtFlags::SYMLINK_NOFOLLOW, !follows);
        Ok(stat(directory, name.name, flags, StatxFlags::TYPE)?.kind)
    }

    fn xattrs(&self, directory: &OpenDirectory, name: Name<'_>) -> io::Result<Vec<Xattr>> {
        Ok(AttributeTarget::named(directory, name.name).xattrs(|_| true)?)
    }

    fn has_acl(&self, directory: &OpenDirectory, name: Name<'_>) -> io::Result<bool> {
        let target = AttributeTarget::named(directory, name.name);
        let is_acl = |name: &[u8]| posix_acl::Kind::of(name).is_some();
        Ok(name.kind != FileKind::Symlink && target.has_xattr(is_acl).unwrap_or(false))
    }

    fn access_acl(&self, directory: &OpenDirectory, name: Name<'_>) -> io::Result<Option<Vec<u8>>> {
        let target = AttributeTarget::named(directory, name.name);
        let is_link = name.kind == FileKind::Symlink;
        let acl = (!is_link).then(|| target.xattr(posix_acl::Kind::Access.attribute().as_bytes()));
        Ok(acl.and_then(Result::ok))
    }

    fn follows_links(&self) -> bool {
        self.follows_links
    }

    fn max_open(&self) -> Option<usize> {
        let limit = getrlimit(Resource::Nofile).current;
        let limit = limit.and_then(|limit| usize::try_from(limit).ok());
        // The rest is for descriptors that threads hold for a moment.
        let half = limit.unwrap_or(usize::MAX).saturating_sub(32) / 2;
        Some(half.clamp(4, self.open_limit.unwrap_or(MAX_OPEN_DIRECTORIES)))
    }

    fn identity(&self, directory: &OpenDirectory) -> io::Result<FileId> {
        Ok(metadata_of_open(directory)?.id())
    }

    fn target(&self, directory: &OpenDirectory, name: Name<'_>) -> io::Result<Cow<'_, [u8]>> {
        let target = readlinkat(directory, name.name, Vec::new())?;
        Ok(Cow::Owned(CString::into_bytes(target)))
    }

    fn content(
        &self,
        directory: &OpenDirectory,
        name: Name<'_>,
    ) -> io::Result<Box<dyn Content + '_>> {
        // Without waiting, if it is a FIFO by now.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(openat(directory, name.name, flags, Mode::empty())?);
        if !file.metadata()?.is_file() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Box::new(file))
    }

    fn user(&self, metadata: &Metadata) -> io::Result<Option<Cow<'_, [u8]>>> {
        Ok(self.accounts.user_name(metadata.uid).map(Cow::Borrowed))
    }

    fn group(&self, metadata: &Metadata) -> io::Result<Option<Cow<'_, [u8]>>> {
        Ok(self.accounts.group_name(metadata.gid).map(Cow::Borrowed))
    }
}

impl Content for File {
    fn hole(&mut self) -> io::Result<u64> {
        let position = self.stream_position()?;
        let end = match seek(&*self, SeekFrom::Data(position)) {
            Ok(data) => data,
            // No data follows.
            Err(Errno::NXIO) => self.metadata()?.len(),
            // A file system that cannot report holes has none.
            Err(Errno::INVAL | Errno::NOTSUP) => position,
            Err(error) => return Err(error.into()),
        };
        self.seek(io::SeekFrom::Start(position))?;
        Ok(end.saturating_sub(position))
    }

    fn skip(&mut self, len: u64) -> io::Result<()> {
        let len = i64::try_from(len).unwrap_or(i64::MAX);
        self.seek_relative(len)
    }
}

fn open_directory(
    parent: &OpenDirectory,
    name: &[u8],
    tree: &DirectoryTree,
) -> Result<OwnedFd, Errno> {
    let mut flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    flags.set(OFlags::NOFOLLOW, !tree.follows_links);
    if tree.is_one_file_system {
        match openat2(parent, name, flags, Mode::empty(), ResolveFlags::NO_XDEV) {
            // Linux before 5.6, or a filter of system calls that is older.
            Err(Errno::NOSYS | Errno::PERM) => {}
            opened => return opened,
        }
    }
    let opened = openat(parent, name, flags, Mode::empty())?;
    if tree.is_one_file_system && are_on_different_mounts(&opened, parent)? {
        return Err(Errno::XDEV);
    }
    Ok(opened)
}

/// Whether symbolic links lead to each other.
pub fn is_link_loop(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::LOOP.raw_os_error())
}

/// The attributes of the file at `path`, without following a link.
///
/// # Errors
/// As lstat(2).
pub fn metadata_of(path: &Path) -> io::Result<Metadata> {
    let path = path.as_os_str().as_bytes();
    stat_file(CWD, path, StatxFlags::BASIC_STATS, false)
}

/// The attributes of the file at `path`, or behind the link there unless that leads to nothing.
///
/// # Errors
/// As stat(2).
pub fn followed_metadata_of(path: &Path) -> io::Result<Metadata> {
    let path = path.as_os_str().as_bytes();
    stat_file(CWD, path, StatxFlags::BASIC_STATS, true)
}

pub(crate) fn metadata_of_open(file: impl AsFd) -> io::Result<Metadata> {
    stat(file, b"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
}

/// Whether these are the attributes of `/`.
pub(crate) fn is_root(found: &Metadata) -> bool {
    let root = metadata_of(Path::new("/"));
    root.is_ok_and(|root| root.id() == found.id())
}

/// The attributes of a file, with `follows` of the file behind a link unless that leads to nothing.
fn stat_file(
    directory: impl AsFd,
    name: &[u8],
    mask: StatxFlags,
    follows: bool,
) -> io::Result<Metadata> {
    if follows {
        match stat(&directory, name, AtFlags::empty(), mask) {
            Err(error) if is_missing(&error) => {}
            found => return found,
        }
    }
    stat(directory, name, AtFlags::SYMLINK_NOFOLLOW, mask)
}

fn stat(
    directory: impl AsFd,
    name: &[u8],
    flags: AtFlags,
    mask: StatxFlags,
) -> io::Result<Metadata> {
    let found = statx(directory, name, flags, mask)?;
    let mode = u32::from(found.stx_mode);
    Ok(Metadata {
        kind: FileKind::from_mode(mode).unwrap_or(FileKind::File),
        mode: mode & 0o7777,
        links: found.stx_nlink.into(),
        uid: found.stx_uid,
        gid: found.stx_gid,
        size: found.stx_size,
        blocks: found.stx_blocks,
        device: (found.stx_rdev_major, found.stx_rdev_minor),
        inode: found.stx_ino,
        file_system: rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor),
        atime: time(found.stx_atime),
        mtime: time(found.stx_mtime),
        ctime: time(found.stx_ctime),
    })
}

fn time(time: StatxTimestamp) -> Timestamp {
    Timestamp {
        seconds: time.tv_sec,
        nanoseconds: time.tv_nsec,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    fn names(tree: &DirectoryTree, directory: &OpenDirectory, mut position: u64) -> Vec<Vec<u8>> {
        let mut batch = Batch::default();
        let read = tree.read(directory, &mut position, &mut batch);
        read.expect("the directory can be read");
        batch.iter().map(|name| name.name.to_owned()).collect()
    }

    // Promises: rm-others
    #[test]
    fn removed_directory_is_read_as_empty() {
        let place = tempfile::tempdir().expect("a directory");
        let path = place.path().join("d");
        fs::create_dir(&path).expect("new");
        fs::write(path.join("f"), "").expect("space");
        let open = || OpenDirectory::from(OwnedFd::from(File::open(&path).expect("there")));
        let (read, unread) = (open(), open());
        let tree = DirectoryTree::default();
        assert_eq!(names(&tree, &read, 0), [b"f"]);
        assert_eq!(names(&tree, &read, 0), [b"f"], "from its beginning again");
        fs::remove_dir_all(&path).expect("ours");
        // At its start, again from its start, and where another descriptor of it was.
        for (directory, position) in [(&unread, 0), (&read, 0), (&unread, 77)] {
            assert!(names(&tree, directory, position).is_empty());
        }
    }
}
