//! The entries of an archive, as a [`Tree`].

use std::borrow::Cow;
use std::io;
use std::sync::Arc;

use crate::base::archive_path::ArchivePath;
use crate::index::{Entry, EntryKind, Index, Ino};

use super::tree::{Batch, FileKind, Metadata, Name, Tree};

/// Names that are read at once.
const READ_NAMES: usize = 4096;

/// The entries of a complete index.
#[derive(Debug)]
pub struct IndexTree {
    index: Arc<Index>,
}

impl IndexTree {
    /// The directory of which starting points are names. They are found by their numbers alone.
    pub const BASE: Ino = Ino::ROOT;

    /// Type and number of the entry at `path`.
    pub fn find(&self, path: &ArchivePath) -> Option<(FileKind, u64)> {
        let entry = self.index.find(path)?;
        Some((kind(entry.kind()), entry.ino().0.into()))
    }

    /// The entries of `index`.
    pub fn new(index: Arc<Index>) -> Self {
        Self { index }
    }

    /// The index.
    pub fn index(&self) -> &Index {
        &self.index
    }

    fn entry(&self, inode: u64) -> io::Result<Entry<'_>> {
        let ino = u32::try_from(inode).ok();
        let entry = ino.and_then(|ino| self.index.entry(Ino(ino)));
        entry.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn owner(&self, metadata: &Metadata, of: impl Fn(Entry<'_>) -> &[u8]) -> Option<Cow<'_, [u8]>> {
        let entry = self.entry(metadata.inode).ok()?;
        let name = of(entry);
        (!name.is_empty()).then(|| Cow::Owned(name.to_owned()))
    }
}

impl Tree for IndexTree {
    type Directory = Ino;

    fn open(&self, _: &Ino, name: Name<'_>) -> io::Result<Ino> {
        match self.entry(name.inode)? {
            entry if entry.kind() == EntryKind::Directory => Ok(entry.ino()),
            _ => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    fn read(&self, directory: &Ino, position: &mut u64, batch: &mut Batch) -> io::Result<()> {
        let from = u32::try_from(*position).unwrap_or(u32::MAX);
        for child in self.index.children(*directory, from).take(READ_NAMES) {
            *position = u64::from(child.number) + 1;
            if let Some(entry) = self.index.entry(child.ino) {
                batch.push(child.name, kind(entry.kind()), child.ino.0.into());
            }
        }
        Ok(())
    }

    fn metadata(&self, _: &Ino, name: Name<'_>) -> io::Result<Metadata> {
        Ok(metadata(&self.entry(name.inode)?))
    }

    fn target(&self, _: &Ino, name: Name<'_>) -> io::Result<Cow<'_, [u8]>> {
        match self.entry(name.inode)?.kind() {
            EntryKind::Symlink(target) => Ok(Cow::Borrowed(target)),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn user(&self, metadata: &Metadata) -> Option<Cow<'_, [u8]>> {
        self.owner(metadata, |entry| entry.user())
    }

    fn group(&self, metadata: &Metadata) -> Option<Cow<'_, [u8]>> {
        self.owner(metadata, |entry| entry.group())
    }
}

fn kind(kind: EntryKind<'_>) -> FileKind {
    match kind {
        EntryKind::File => FileKind::File,
        EntryKind::Directory => FileKind::Directory,
        EntryKind::Symlink(_) => FileKind::Symlink,
        EntryKind::CharDevice(_) => FileKind::CharDevice,
        EntryKind::BlockDevice(_) => FileKind::BlockDevice,
        EntryKind::Fifo => FileKind::Fifo,
    }
}

/// The attributes of `entry`, as a mount shows them.
pub fn metadata(entry: &Entry<'_>) -> Metadata {
    let mtime = entry.mtime();
    Metadata {
        kind: kind(entry.kind()),
        mode: entry.mode(),
        links: entry.link_count().into(),
        uid: entry.uid(),
        gid: entry.gid(),
        size: entry.size(),
        blocks: entry.stored_bytes().div_ceil(512),
        device: match entry.kind() {
            EntryKind::CharDevice(device) | EntryKind::BlockDevice(device) => {
                (device.major, device.minor)
            }
            _ => (0, 0),
        },
        inode: entry.ino().0.into(),
        file_system: 0,
        atime: mtime,
        mtime,
        ctime: mtime,
    }
}
