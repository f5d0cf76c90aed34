//! The arrays of an index, under construction or complete, and their checked accessors.

use zerocopy::little_endian::{U32, U64};

use super::arena::{Arena, capacity_bytes};
use super::blocks::BlockDigest;
use super::rows::{
    DIRECTORY, Dirent, ExtraRow, InodeRow, NONE, Name, PieceRow, SYMLINK, SpanRow, TYPE_MASK,
    UnresolvedRow, XattrRow,
};
use crate::base::archive_path::ArchivePath;

/// Maximum number of components of a path.
///
/// [`super::Limits`] allow 64 KiB of name and 40 links of 4 KiB each, so no valid entry is deeper. In a
/// damaged file the maximum ends cycles of parents.
const MAX_DEPTH: usize = 1 << 17;

/// All arrays of an index, without the facts about the whole.
#[derive(Debug, Default)]
pub(super) struct Arrays {
    /// By inode number. Number 0 is unused.
    pub(super) records: Vec<InodeRow>,
    pub(super) dirents: Vec<Dirent>,
    /// Numbers of the dirents of each directory, within its range, sorted by name.
    pub(super) by_name: Vec<U32>,
    pub(super) arena: Arena,
    /// Names of users and groups; the first is empty.
    pub(super) owners: Vec<Name>,
    /// Attributes and sparse maps. The first row means "none".
    pub(super) extras: Vec<ExtraRow>,
    pub(super) xattrs: Vec<XattrRow>,
    pub(super) pieces: Vec<PieceRow>,
    pub(super) spans: Vec<SpanRow>,
    /// Digests of the blocks of the packed stream.
    pub(super) blocks: Vec<BlockDigest>,
    /// Checksums of the blocks of spans. Those of one span are adjacent.
    pub(super) checksums: Vec<U64>,
    /// The windows of all seek points.
    pub(super) windows: Arena,
    /// Hard links whose targets may be in a layer below.
    pub(super) unresolved: Vec<UnresolvedRow>,
}

/// Whether `name` can be a component of a path.
pub(super) fn is_valid_component(name: &[u8]) -> bool {
    !matches!(name, b"" | b"." | b"..") && !name.contains(&b'/')
}

impl Arrays {
    /// The record of `ino`, if it is an entry with a valid type.
    pub(super) fn record(&self, ino: u32) -> Option<&InodeRow> {
        let record = self.records.get(usize::try_from(ino).ok()?)?;
        match record.kind() {
            0 | TYPE_MASK => None,
            SYMLINK => self
                .arena
                .bytes_at(record.data.get(), record.size.get())
                .map(|_| record),
            _ => Some(record),
        }
    }

    pub(super) fn dirent(&self, number: u32) -> Option<&Dirent> {
        self.dirents.get(usize::try_from(number).ok()?)
    }

    /// As [`Self::live_dirent`], for a dirent that directory `parent` lists.
    ///
    /// Only dirents of that parent count. As a directory has one dirent, and that one parent, a walk from the
    /// root cannot cycle in any file.
    pub(super) fn child(&self, parent: u32, number: u32) -> Option<(&[u8], u32)> {
        let is_its_own = self.dirent(number)?.parent.get() == parent;
        is_its_own.then(|| self.live_dirent(number)).flatten()
    }

    /// Name and number of a live record from dirent `number`.
    ///
    /// A directory counts only under its own dirent.
    pub(super) fn live_dirent(&self, number: u32) -> Option<(&[u8], u32)> {
        let dirent = self.dirent(number)?;
        let ino = dirent.ino.get();
        let record = self.record(ino)?;
        if record.is_directory() && record.dirent.get() != number {
            return None;
        }
        let name = self.arena.name(dirent.name)?;
        is_valid_component(name).then_some((name, ino))
    }

    /// Numbers of a directory's dirents; empty for all else. The dirents may not exist.
    pub(super) fn child_numbers(&self, ino: u32) -> std::ops::Range<u32> {
        let none = 0..0;
        let Some(record) = self.record(ino).filter(|record| record.kind() == DIRECTORY) else {
            return none;
        };
        let Ok(first) = u32::try_from(record.data.get()) else {
            return none;
        };
        match first.checked_add(record.children.get()) {
            Some(end) if usize::try_from(end).is_ok_and(|end| end <= self.dirents.len()) => {
                first..end
            }
            _ => none,
        }
    }

    /// As [`Self::child`], for the dirent at position `number` of [`Self::by_name`].
    ///
    /// It must be one of `siblings`.
    pub(super) fn child_by_rank(
        &self,
        parent: u32,
        number: u32,
        siblings: &std::ops::Range<u32>,
    ) -> Option<(&[u8], u32)> {
        let dirent = self.by_name.get(usize::try_from(number).ok()?)?.get();
        siblings
            .contains(&dirent)
            .then(|| self.child(parent, dirent))
            .flatten()
    }

    /// The path of dirent `number`; `None` when it does not lead up to the root.
    pub(super) fn path(&self, mut number: u32) -> Option<ArchivePath> {
        let mut names = Vec::new();
        while number != NONE {
            if names.len() == MAX_DEPTH {
                return None;
            }
            let dirent = self.dirent(number)?;
            let (name, _) = self.live_dirent(number)?;
            names.push(name);
            number = match dirent.parent.get() {
                1 => NONE,
                parent => self
                    .record(parent)
                    .filter(|record| record.is_directory())?
                    .dirent
                    .get(),
            };
        }
        let mut path = ArchivePath::root();
        for name in names.iter().rev() {
            path.push(name);
        }
        Some(path)
    }

    /// The attributes of row `extra`, by name. Stops at the first that is out of range.
    pub(super) fn xattrs(&self, extra: u32) -> impl Iterator<Item = (&[u8], &[u8])> {
        let rows = self.extras.get(extra as usize).and_then(|extra| {
            let first = extra.xattr.get() as usize;
            self.xattrs
                .get(first..first.checked_add(extra.xattr_count.get() as usize)?)
        });
        rows.unwrap_or_default().iter().map_while(|xattr| {
            let value = self
                .arena
                .bytes_at(xattr.value_offset.get(), xattr.value_len.get())?;
            Some((self.arena.name(xattr.name)?, value))
        })
    }

    /// The sparse map of row `extra`.
    ///
    /// `None` when the file is not sparse; empty when the map is out of range.
    pub(super) fn sparse_pieces(&self, extra: u32) -> Option<&[PieceRow]> {
        let extra = self.extras.get(extra as usize)?;
        if extra.sparse.get() != 1 {
            return None;
        }
        let first = extra.piece.get() as usize;
        let end = first.checked_add(extra.piece_count.get() as usize)?;
        Some(self.pieces.get(first..end).unwrap_or_default())
    }

    /// Frees unused capacity.
    pub(super) fn shrink(&mut self) {
        self.records.shrink_to_fit();
        self.dirents.shrink_to_fit();
        self.by_name.shrink_to_fit();
        self.arena.0.shrink_to_fit();
        self.owners.shrink_to_fit();
        self.extras.shrink_to_fit();
        self.xattrs.shrink_to_fit();
        self.pieces.shrink_to_fit();
        self.spans.shrink_to_fit();
        self.blocks.shrink_to_fit();
        self.checksums.shrink_to_fit();
        self.windows.0.shrink_to_fit();
        self.unresolved.shrink_to_fit();
    }

    /// Memory of the arrays in bytes: capacities, not lengths.
    pub(super) fn memory_bytes(&self) -> usize {
        capacity_bytes(&self.records)
            + capacity_bytes(&self.dirents)
            + capacity_bytes(&self.by_name)
            + capacity_bytes(&self.arena.0)
            + capacity_bytes(&self.owners)
            + capacity_bytes(&self.extras)
            + capacity_bytes(&self.xattrs)
            + capacity_bytes(&self.pieces)
            + capacity_bytes(&self.spans)
            + capacity_bytes(&self.blocks)
            + capacity_bytes(&self.checksums)
            + capacity_bytes(&self.windows.0)
            + capacity_bytes(&self.unresolved)
    }
}
