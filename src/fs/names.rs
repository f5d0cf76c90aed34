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
    AtFlags, CWD, Mode, OFlags, RawDir, ResolveFlags, SeekFrom, StatxFlags, fstat, openat2, seek,
    statat, statx,
};
use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, open_tree};

use super::View;
use crate::base::path::ArchivePath;
use crate::index::{Index, Ino};

/// What the kernel asks for at once: some 300 names of 50 bytes. Before Linux 6.15 it was a page, some
/// 20 names.
const LISTING_BYTES: usize = 64 << 10;

/// How deep the directories may lie whose files are looked up; each on the way is held open.
const MOST_STEPS: usize = 64;

/// How many names of a directory must follow for a listing to be worth its four requests.
const FEWEST_NAMES: u32 = 4;

/// Makes the kernel hear of `ino` and of what follows it in its directory, on the mount at
/// `mountpoint` with the device number `device`; false when that is not worth it.
///
/// # Errors
/// When it cannot be done; then readers ask by themselves. Others than root may make no copy of a
/// mount.
pub(super) fn learn(
    mountpoint: &Path,
    device: u64,
    view: View,
    index: &Index,
    ino: Ino,
) -> io::Result<bool> {
    let Some((directory, number)) = index.place(ino) else {
        return Ok(false);
    };
    let child = index.children(directory, number).next();
    let follow = index.entry(directory).map(|entry| entry.child_count());
    let follow = follow.unwrap_or_default().saturating_sub(number);
    let (Some(child), Some(path)) = (child, path_of(view, index, directory)) else {
        return Ok(false);
    };
    if follow < FEWEST_NAMES {
        return Ok(false);
    }
    let root = copy_of(mountpoint, device)?;
    let directory = open_directory(&root, &path, OFlags::RDONLY)?;
    // The kernel asks for names with their attributes only in directories in which it has just
    // asked for one, and from the beginning.
    statat(&directory, child.name, AtFlags::SYMLINK_NOFOLLOW)?;
    seek(
        &directory,
        SeekFrom::Start(super::offset_behind(child.number)),
    )?;
    let mut buffer = vec![MaybeUninit::uninit(); LISTING_BYTES];
    // One request; the next name would be another one's.
    let mut listing = RawDir::new(&directory, &mut buffer);
    listing.next().transpose()?;
    Ok(true)
}

/// Makes the kernel hear of `files` one by one, as there are no listings before the end of a scan.
///
/// # Errors
/// As [`learn`]; a single file that is not there is none.
pub(super) fn look_up<'a>(
    mountpoint: &Path,
    device: u64,
    files: impl IntoIterator<Item = &'a ArchivePath>,
) -> io::Result<()> {
    let mut files = files.into_iter().peekable();
    if files.peek().is_none() {
        return Ok(());
    }
    let mut way = Way {
        root: copy_of(mountpoint, device)?,
        steps: Vec::new(),
    };
    for path in files {
        let mut components = path.components();
        let Some(name) = components.next_back() else {
            continue;
        };
        if let Ok(directory) = way.to(components) {
            // The name alone, not what may have become of its attributes since.
            let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
            // Who is not there is not there.
            let _there = statx(directory, name, flags, StatxFlags::TYPE).is_ok();
        }
    }
    Ok(())
}

/// The way to a directory, from the root on. Each name is asked for as often as it is looked up while
/// there is a scan, so what two ways have in common is gone once.
struct Way {
    root: OwnedFd,
    /// Each with its name in the one before.
    steps: Vec<(Vec<u8>, OwnedFd)>,
}

impl Way {
    /// Goes to the directory with these components.
    fn to<'a>(
        &mut self,
        components: impl Iterator<Item = &'a [u8]>,
    ) -> rustix::io::Result<&OwnedFd> {
        let mut depth = 0;
        for name in components {
            if depth == MOST_STEPS {
                return Err(Errno::NAMETOOLONG);
            }
            if self.steps.get(depth).is_none_or(|(step, _)| step != name) {
                self.steps.truncate(depth);
                let directory = open_directory(self.last(), name, OFlags::PATH)?;
                self.steps.push((name.to_vec(), directory));
            }
            depth += 1;
        }
        self.steps.truncate(depth);
        Ok(self.last())
    }

    fn last(&self) -> &OwnedFd {
        self.steps
            .last()
            .map_or(&self.root, |(_, directory)| directory)
    }
}

/// A copy of the mount at `mountpoint` that is attached nowhere.
fn copy_of(mountpoint: &Path, device: u64) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let root = open_tree(CWD, mountpoint, flags)?;
    // Something else may have been mounted on top.
    if fstat(&root)?.st_dev != device {
        return Err(Errno::XDEV.into());
    }
    Ok(root)
}

/// Whether an error of [`learn`] will be the same for every directory: not permitted, not known to
/// this kernel, or not our mount any more.
pub(super) fn is_final(error: &io::Error) -> bool {
    let finals = [Errno::PERM, Errno::NOSYS, Errno::INVAL, Errno::XDEV];
    Errno::from_io_error(error).is_some_and(|error| finals.contains(&error))
}

/// `directory` as a path below the mount's root; `None` when it is not there.
fn path_of(view: View, index: &Index, directory: Ino) -> Option<Vec<u8>> {
    if directory == view.root() {
        return Some(b".".to_vec());
    }
    let path = index.path(directory)?;
    if view.root() == Ino::ROOT {
        return Some(path.as_bytes().to_vec());
    }
    let root = index.path(view.root())?;
    let below = path.starts_with(&root).then_some(path)?;
    let below = below.strip_components(root.components().count())?;
    Some(below.as_bytes().to_vec())
}

fn open_directory(root: &OwnedFd, path: &[u8], access: OFlags) -> rustix::io::Result<OwnedFd> {
    let flags = access | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    openat2(root, path, flags, Mode::empty(), resolve)
}
