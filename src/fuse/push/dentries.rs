//! Dentry priming: makes the kernel list a directory of this mount before a caller asks for names. One
//! READDIRPLUS request returns some hundred names, and saves a lookup for each. The daemon can then push
//! their files into the page cache.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, Mode, OFlags, RawDir, ResolveFlags, SeekFrom, openat2, seek, statat};

use crate::fuse::subtree::{Subtree, next_offset};
use crate::index::{Index, Ino};

/// Buffer size of a pass: some 300 names. Before Linux 6.15 a request had one page, some 20 names.
const READDIR_BUFFER_BYTES: usize = 64 << 10;

/// Minimum number of following names that justifies the four requests of a priming pass.
const MIN_NAMES_TO_PRIME: u32 = 4;

/// Makes the kernel list `directory` from child `number` on, unless too few names follow. `open_root` opens the mount. After
/// an error the kernel looks up each name.
pub(super) fn prime_dentries(
    open_root: impl FnOnce() -> io::Result<OwnedFd>,
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
    let root = open_root()?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let directory = openat2(&root, &path[..], flags, Mode::empty(), resolve)?;
    // The kernel asks for attributes only at the start of a directory, or just after a lookup in it.
    statat(&directory, child.name, AtFlags::SYMLINK_NOFOLLOW)?;
    seek(&directory, SeekFrom::Start(next_offset(child.number)))?;
    let mut buffer = vec![MaybeUninit::uninit(); READDIR_BUFFER_BYTES];
    // Advancing the iterator again would send another request.
    let mut entries = RawDir::new(&directory, &mut buffer);
    entries.next().transpose()?;
    Ok(())
}

fn path_in_mount(subtree: Subtree, index: &Index, directory: Ino) -> Option<Vec<u8>> {
    if directory == subtree.root {
        return Some(b".".to_vec());
    }
    let path = index.path(directory)?;
    if subtree.root == Ino::ROOT {
        return Some(path.as_bytes().to_vec());
    }
    let root = index.path(subtree.root)?;
    let below = path.starts_with(&root).then_some(path)?;
    let below = below.strip_components(root.components().count())?;
    Some(below.as_bytes().to_vec())
}
