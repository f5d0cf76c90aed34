//! Has the kernel hear of names before anyone asks: it is made to list directories of this mount.
//!
//! Who opens files one after the other by their paths makes the kernel ask for each name. A listing
//! tells it some hundred names at once, and the files behind them can be pushed into the page cache.
//! Nobody stands in the mount for that, which would be in the way of who unmounts it: it happens in
//! a copy of it that is attached nowhere, and goes with the descriptor.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, Mode, OFlags, RawDir, ResolveFlags, SeekFrom, fstat, openat2, seek, statat,
};
use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, open_tree};

use super::Subtree;
use crate::index::{Index, Ino};

/// What the kernel asks for at once: some 300 names of 50 bytes. Before Linux 6.15 it was a page, some
/// 20 names.
const READDIR_BUFFER_BYTES: usize = 64 << 10;

/// How many names of a directory must follow for a listing to be worth its four requests.
const MIN_NAMES_TO_PRIME: u32 = 4;

/// Makes the kernel hear of child `number` of `directory` and of what follows it there, on the mount at
/// `mountpoint` with the device number `device`; nothing happens where that is not worth it.
///
/// # Errors
/// When it cannot be done; then readers ask by themselves. Others than root may make no copy of a
/// mount.
pub(super) fn prime_dentries(
    (mountpoint, device): (&Path, u64),
    subtree: Subtree,
    index: &Index,
    (directory, number): (Ino, u32),
) -> io::Result<()> {
    let child = index.children(directory, number).next();
    let remaining = index.entry(directory).map(|entry| entry.child_count());
    let remaining = remaining.unwrap_or_default().saturating_sub(number);
    let (Some(child), Some(path)) = (child, path_in_mount(subtree, index, directory)) else {
        return Ok(());
    };
    if remaining < MIN_NAMES_TO_PRIME {
        return Ok(());
    }
    let root = clone_mount(mountpoint, device)?;
    let directory = open_directory(&root, &path, OFlags::RDONLY)?;
    // The kernel asks for names with their attributes only in directories in which it has just
    // asked for one, and from the beginning.
    statat(&directory, child.name, AtFlags::SYMLINK_NOFOLLOW)?;
    seek(
        &directory,
        SeekFrom::Start(super::next_offset(child.number)),
    )?;
    let mut buffer = vec![MaybeUninit::uninit(); READDIR_BUFFER_BYTES];
    // One request; the next name would be another one's.
    let mut listing = RawDir::new(&directory, &mut buffer);
    listing.next().transpose()?;
    Ok(())
}

/// A copy of the mount at `mountpoint` that is attached nowhere.
pub(super) fn clone_mount(mountpoint: &Path, device: u64) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let root = open_tree(CWD, mountpoint, flags)?;
    // Something else may have been mounted on top.
    if fstat(&root)?.st_dev != device {
        return Err(Errno::XDEV.into());
    }
    Ok(root)
}

/// `directory` as a path below the mount's root; `None` when it is not there.
fn path_in_mount(subtree: Subtree, index: &Index, directory: Ino) -> Option<Vec<u8>> {
    if directory == subtree.root() {
        return Some(b".".to_vec());
    }
    let path = index.path(directory)?;
    if subtree.root() == Ino::ROOT {
        return Some(path.as_bytes().to_vec());
    }
    let root = index.path(subtree.root())?;
    let below = path.starts_with(&root).then_some(path)?;
    let below = below.strip_components(root.components().count())?;
    Some(below.as_bytes().to_vec())
}

fn open_directory(root: &OwnedFd, path: &[u8], access: OFlags) -> rustix::io::Result<OwnedFd> {
    let flags = access | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    openat2(root, path, flags, Mode::empty(), resolve)
}
