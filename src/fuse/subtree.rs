//! The part of the archive that a mount shows, its inode numbers and directory listings.

use fuser::INodeNo;

use crate::base::archive_path::ArchivePath;
use crate::base::escape::escape;
use crate::base::resolve::PathError;
use crate::index::{Entry, EntryKind, Index, Ino};

/// Longest name in a listing (`FUSE_NAME_MAX`). The kernel rejects a listing with a longer name.
const FUSE_NAME_MAX_BYTES: usize = 1024;

/// A directory as a mount's root, which must be inode 1. Every other inode number is the index's [`Ino`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Subtree {
    /// The directory that is the root.
    pub root: Ino,
    /// Id of the archive in a directory of archives; 0 for the only one of a mount.
    archive: u32,
}

/// Why a directory cannot be a mount's root.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SubtreeError {
    /// The path does not exist.
    #[error("{}: not in the archive (`tarfs find` shows what is)", escape(.0))]
    Missing(Vec<u8>),
    /// The path leads nowhere.
    #[error("{}", escape(.0))]
    Unresolved(Vec<u8>, #[source] PathError),
    /// The path is not a directory.
    #[error("{0} is not a directory")]
    NotADirectory(ArchivePath),
    /// There is no directory to descend into, or more than one.
    #[error("there is no single directory in {0} to strip")]
    Ambiguous(ArchivePath),
}

impl Subtree {
    /// The whole archive.
    pub const WHOLE: Self = Self::of_archive(0);

    /// The whole archive `archive` of a directory of archives. Its root has the id as its inode number.
    pub(super) const fn of_archive(archive: u32) -> Self {
        Self {
            root: Ino::ROOT,
            archive,
        }
    }

    /// The directory at `path`, which [`Index::resolve`] finds, or the directory `strip` levels below. Each level must have
    /// exactly one directory. Files beside it are not shown.
    ///
    /// # Errors
    /// When there is no such directory.
    pub fn new(index: &Index, path: &[u8], strip: usize) -> Result<Self, SubtreeError> {
        let found = index.resolve_with_path(path, true);
        let found = found.map_err(|error| SubtreeError::Unresolved(path.to_vec(), error))?;
        let found = found.ok_or_else(|| SubtreeError::Missing(path.to_vec()))?;
        let mut directory = found.path;
        if found.entry.kind() != EntryKind::Directory {
            return Err(SubtreeError::NotADirectory(directory));
        }
        let mut root = found.entry.ino();
        for _ in 0..strip {
            let (name, ino) = only_directory(index, root)
                .ok_or_else(|| SubtreeError::Ambiguous(directory.clone()))?;
            directory.push(name);
            root = ino;
        }
        Ok(Self { root, archive: 0 })
    }

    pub(super) fn inode(self, ino: Ino) -> INodeNo {
        if ino == self.root {
            INodeNo(u64::from(self.archive).max(INodeNo::ROOT.0))
        } else {
            INodeNo(u64::from(self.archive) << u32::BITS | u64::from(ino.0))
        }
    }

    pub(super) fn entry(self, index: &Index, inode: INodeNo) -> Option<Entry<'_>> {
        if inode == self.inode(self.root) {
            return index.entry(self.root);
        }
        let number = inode.0.checked_sub(u64::from(self.archive) << u32::BITS)?;
        index.entry(Ino(u32::try_from(number).ok()?))
    }

    /// Whether the first name of `ino` is below the root.
    pub(super) fn contains(self, index: &Index, ino: Ino) -> bool {
        let is_root = |directory| directory == self.root;
        is_root(Ino::ROOT) || is_root(ino) || index.directories_above(ino).any(is_root)
    }

    /// Calls `add` for each entry of `directory` from `offset` on, until `add` is full. `add` also gets the
    /// next entry's offset. `.` has offset 0, `..` has 1, and the names follow.
    pub(super) fn list<'a>(
        self,
        index: &'a Index,
        directory: Entry<'a>,
        offset: u64,
        mut add: impl FnMut(Entry<'a>, u64, &[u8]) -> bool,
    ) {
        if offset == 0 && add(directory, 1, b".") {
            return;
        }
        // The root is its own parent.
        let parent = Some(directory.parent()).filter(|_| directory.ino() != self.root);
        let parent = parent.and_then(|parent| index.entry(parent));
        if offset <= 1 && add(parent.unwrap_or(directory), 2, b"..") {
            return;
        }
        let Ok(from) = u32::try_from(offset.saturating_sub(2)) else {
            return;
        };
        for child in index.children(directory.ino(), from) {
            if is_listable_name(child.name)
                && let Some(entry) = index.entry(child.ino)
                && add(entry, next_offset(child.number), child.name)
            {
                return;
            }
        }
    }
}

pub(super) fn is_listable_name(name: &[u8]) -> bool {
    name.len() <= FUSE_NAME_MAX_BYTES
}

pub(super) fn next_offset(number: u32) -> u64 {
    u64::from(number) + 3
}

fn only_directory(index: &Index, parent: Ino) -> Option<(&[u8], Ino)> {
    let is_directory = |entry: Entry<'_>| entry.kind() == EntryKind::Directory;
    let children = index.children(parent, 0);
    let mut directories = children.filter(|child| index.entry(child.ino).is_some_and(is_directory));
    let only = directories.next()?;
    let is_only = directories.next().is_none();
    is_only.then_some((only.name, only.ino))
}
