//! The files of a directory of this machine, as a [`Tree`].

use std::borrow::Cow;
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::buffer::spare_capacity;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{
    AtFlags, CWD, Mode, OFlags, RawDir, ResolveFlags, SeekFrom, StatxFlags, StatxTimestamp,
    lgetxattr, llistxattr, openat, openat2, readlinkat, seek, statx,
};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::base::passwd::AccountNames;
use crate::tar::Timestamp;

use super::tree::{Batch, FileId, FileKind, Metadata, Name, Tree, Xattr};

/// Room for the names that one system call reads, in bytes. Half a page less than what the allocator maps anew.
const READ_BYTES: usize = 126 << 10;

/// Longest list or value of extended attributes (`XATTR_SIZE_MAX`), in bytes.
const XATTR_BYTES: usize = 64 << 10;

/// Most directories that a walk keeps open.
const MAX_OPEN_DIRECTORIES: usize = 4096;

/// Files of this machine, by paths relative to the current directory.
#[derive(Debug, Default)]
pub struct DirectoryTree {
    names: AccountNames,
    /// Whether mount points cannot be opened.
    pub is_one_file_system: bool,
}

impl DirectoryTree {
    /// The files of this machine, with the names of its users.
    pub fn new() -> Self {
        Self {
            names: AccountNames::load_system(),
            is_one_file_system: false,
        }
    }

    /// The current directory, of which starting points are names.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn base(&self) -> io::Result<OwnedFd> {
        Ok(openat(
            CWD,
            ".",
            OFlags::PATH | OFlags::CLOEXEC,
            Mode::empty(),
        )?)
    }
}

impl Tree for DirectoryTree {
    type Directory = OwnedFd;

    fn open(&self, parent: &OwnedFd, name: Name<'_>) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if self.is_one_file_system {
            let resolve = ResolveFlags::NO_XDEV;
            return Ok(openat2(parent, name.name, flags, Mode::empty(), resolve)?);
        }
        Ok(openat(parent, name.name, flags, Mode::empty())?)
    }

    fn read(&self, directory: &OwnedFd, position: &mut u64, batch: &mut Batch) -> io::Result<()> {
        seek(directory, SeekFrom::Start(*position))?;
        let mut buffer = Vec::with_capacity(READ_BYTES);
        let mut entries = RawDir::new(directory, buffer.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = entry?;
            *position = entry.next_entry_cookie();
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                let kind = match FileKind::from_mode(entry.file_type().as_raw_mode()) {
                    Some(kind) => kind,
                    // It may be gone.
                    None => match stat(directory, name, AtFlags::empty(), StatxFlags::TYPE) {
                        Ok(found) => found.kind,
                        Err(_) => continue,
                    },
                };
                batch.push(name, kind, entry.ino());
            }
            // The two names alone are not the end.
            if entries.is_buffer_empty() && !batch.is_empty() {
                break;
            }
        }
        Ok(())
    }

    fn metadata(&self, directory: &OwnedFd, name: Name<'_>) -> io::Result<Metadata> {
        let mask = StatxFlags::BASIC_STATS;
        stat(directory, name.name, AtFlags::empty(), mask)
    }

    fn xattrs(&self, directory: &OwnedFd, name: Name<'_>) -> io::Result<Vec<Xattr>> {
        let mut path = match name.name {
            [b'/', ..] => Vec::new(),
            _ => format!("/proc/self/fd/{}/", directory.as_raw_fd()).into_bytes(),
        };
        path.extend_from_slice(name.name);
        let mut names = Vec::with_capacity(XATTR_BYTES);
        match llistxattr(&*path, spare_capacity(&mut names)) {
            Ok(_) => {}
            Err(Errno::NOTSUP) => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        }
        let mut xattrs = Vec::new();
        for name in names
            .split(|&byte| byte == 0)
            .filter(|name| !name.is_empty())
        {
            let mut value = Vec::with_capacity(XATTR_BYTES);
            lgetxattr(&*path, name, spare_capacity(&mut value))?;
            xattrs.push((name.to_owned(), value));
        }
        Ok(xattrs)
    }

    fn max_open(&self) -> Option<usize> {
        let limit = getrlimit(Resource::Nofile).current;
        let limit = limit.and_then(|limit| usize::try_from(limit).ok());
        // The rest is for descriptors that threads hold for a moment.
        let half = limit.unwrap_or(usize::MAX).saturating_sub(32) / 2;
        Some(half.clamp(4, MAX_OPEN_DIRECTORIES))
    }

    fn identity(&self, directory: &OwnedFd) -> io::Result<FileId> {
        Ok(metadata_of_open(directory)?.id())
    }

    fn target(&self, directory: &OwnedFd, name: Name<'_>) -> io::Result<Cow<'_, [u8]>> {
        let target = readlinkat(directory, name.name, Vec::new())?;
        Ok(Cow::Owned(CString::into_bytes(target)))
    }

    fn content(&self, directory: &OwnedFd, name: Name<'_>) -> io::Result<Box<dyn Read + '_>> {
        // Without waiting, if it is a FIFO by now.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(openat(directory, name.name, flags, Mode::empty())?);
        if !file.metadata()?.is_file() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Box::new(file))
    }

    fn user(&self, metadata: &Metadata) -> Option<Cow<'_, [u8]>> {
        self.names.user(metadata.uid).map(Cow::Borrowed)
    }

    fn group(&self, metadata: &Metadata) -> Option<Cow<'_, [u8]>> {
        self.names.group(metadata.gid).map(Cow::Borrowed)
    }
}

/// The attributes of the file at `path`, without following a link.
///
/// # Errors
/// As lstat(2).
pub fn metadata_of(path: &Path) -> io::Result<Metadata> {
    let path = path.as_os_str().as_bytes();
    stat(CWD, path, AtFlags::empty(), StatxFlags::BASIC_STATS)
}

/// The attributes of an open file.
///
/// # Errors
/// As fstat(2).
pub(super) fn metadata_of_open(file: impl AsFd) -> io::Result<Metadata> {
    stat(file, b"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
}

/// Whether these are the attributes of `/`.
pub(super) fn is_root(found: &Metadata) -> bool {
    let root = metadata_of(Path::new("/"));
    root.is_ok_and(|root| root.id() == found.id())
}

fn stat(
    directory: impl AsFd,
    name: &[u8],
    flags: AtFlags,
    mask: StatxFlags,
) -> io::Result<Metadata> {
    let found = statx(directory, name, flags | AtFlags::SYMLINK_NOFOLLOW, mask)?;
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
