//! The immutable tree of entries, with the seek points to reach their bytes.
//!
//! Built in one pass by a [`Builder`], saved and loaded by [`store`], and then only read: flat
//! arrays behind accessors that check every offset, so that a damaged file is an error and never
//! a panic.

use crate::base::extent::{Extent, Plain};
use crate::base::path::ArchivePath;
use crate::codec::SeekPoint;
use crate::tar::{Device, Timestamp};

/// An entry's number: the order of its first appearance in the archive. The root is 1, implied
/// directories count when the first member below them appears. Fixed by the index format, so a
/// mount may show it before the scan ends.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ino(pub u32);

impl Ino {
    /// The archive's root directory.
    pub const ROOT: Self = Self(1);
}

/// The immutable tree of one archive.
#[derive(Debug)]
pub struct Index {}

/// One entry, by reference into the index. Accessors never fail: what a damaged index says is
/// checked when the entry is looked up.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    index: &'a Index,
}

/// What an entry is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind<'a> {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link to this target.
    Symlink(&'a [u8]),
    /// A character device.
    CharDevice(Device),
    /// A block device.
    BlockDevice(Device),
    /// A FIFO.
    Fifo,
}

/// A stored piece of a file's content; what lies between pieces is a hole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Where it lies in the file.
    pub offset: u64,
    /// Where its bytes lie in the plain stream.
    pub plain: Extent<Plain>,
}

/// A name in a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Child<'a> {
    /// One component.
    pub name: &'a [u8],
    /// The entry it names.
    pub ino: Ino,
    /// How many names come before it in the directory; names are in byte order.
    pub number: u32,
}

/// Plain bytes between neighbouring seek points: the unit of decoding, caching and verifying.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Span {
    /// Which one, from the front.
    pub number: u32,
    /// The bytes it makes.
    pub plain: Extent<Plain>,
    /// xxh3-64 of those bytes.
    pub hash: u64,
    /// Where decoding can start for it: `None` when only an earlier span has a seek point.
    pub seek_point: Option<SeekPoint>,
}

impl Index {
    /// Entry `ino`; `None` when there is none, e.g. because a later member replaced it.
    pub fn entry(&self, ino: Ino) -> Option<Entry<'_>> {
        todo!("{ino:?}")
    }

    /// The entry called `name` in directory `parent`.
    pub fn lookup(&self, parent: Ino, name: &[u8]) -> Option<Entry<'_>> {
        todo!("{parent:?} {name:?}")
    }

    /// The entry at `path`, no link followed.
    pub fn find(&self, path: &ArchivePath) -> Option<Entry<'_>> {
        todo!("{path:?}")
    }

    /// Directory `parent`'s names in byte order, from the `from`th on; nothing for other entries.
    pub fn children(&self, parent: Ino, from: u32) -> impl Iterator<Item = Child<'_>> {
        let _ = (parent, from);
        std::iter::empty()
    }

    /// The path of the name under which `ino` first appeared.
    pub fn path(&self, ino: Ino) -> Option<ArchivePath> {
        todo!("{ino:?}")
    }

    /// Entries alive, the root included.
    pub fn entry_count(&self) -> u64 {
        todo!()
    }

    /// Whether any entry has an extended attribute or ACL.
    pub fn has_xattrs(&self) -> bool {
        todo!()
    }

    /// Bytes of all files, hard links counted once, holes not counted.
    pub fn stored_bytes(&self) -> u64 {
        todo!()
    }

    /// The number of the span that holds plain byte `offset`; `None` past the end.
    pub fn span_at(&self, offset: Plain) -> Option<u32> {
        todo!("{offset:?}")
    }

    /// Span `number`, its window decompressed; `None` past the last or when damaged.
    pub fn span(&self, number: u32) -> Option<Span> {
        todo!("{number}")
    }
}

impl<'a> Entry<'a> {
    /// Its number.
    pub fn ino(&self) -> Ino {
        todo!("{:?}", self.index)
    }
    /// What it is.
    pub fn kind(&self) -> Kind<'a> {
        todo!()
    }
    /// Permission bits, the low twelve.
    pub fn mode(&self) -> u32 {
        todo!()
    }
    /// Owner.
    pub fn uid(&self) -> u32 {
        todo!()
    }
    /// Group.
    pub fn gid(&self) -> u32 {
        todo!()
    }
    /// Owner's name as the archive gives it; empty when it gives none.
    pub fn user(&self) -> &'a [u8] {
        todo!()
    }
    /// Group's name as the archive gives it; empty when it gives none.
    pub fn group(&self) -> &'a [u8] {
        todo!()
    }
    /// Bytes as a reader sees them; the target's length of a symbolic link.
    pub fn size(&self) -> u64 {
        todo!()
    }
    /// Bytes that are stored, holes left out.
    pub fn stored_bytes(&self) -> u64 {
        todo!()
    }
    /// Time of last modification.
    pub fn mtime(&self) -> Timestamp {
        todo!()
    }
    /// Names of this entry; of a directory 2 and one for every directory in it.
    pub fn link_count(&self) -> u32 {
        todo!()
    }
    /// The directory in which it first appeared; the root's is the root.
    pub fn parent(&self) -> Ino {
        todo!()
    }
    /// Extended attributes by name; ACLs under their pax keywords, as text (see [`crate::tar::Member::xattrs`]).
    pub fn xattrs(&self) -> impl Iterator<Item = (&'a [u8], &'a [u8])> + use<'a> {
        std::iter::empty()
    }
    /// The stored pieces of a file's content that touch `offset..offset + len`, ascending, whole.
    pub fn pieces(&self, offset: u64, len: u64) -> impl Iterator<Item = Piece> + use<'a> {
        let _ = (offset, len);
        std::iter::empty()
    }
}
