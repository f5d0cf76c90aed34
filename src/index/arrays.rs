//! The arrays of an index, under construction or complete, and the checked ways into them.

use zerocopy::little_endian::{U32, U64};

use super::arena::{Arena, capacity_bytes};
use super::blocks::BlockDigest;
use super::rows::{
    DIRECTORY, Dirent, ExtraRow, InodeRow, NONE, Name, PieceRow, SYMLINK, SpanRow, TYPE_MASK,
    UnresolvedRow, XattrRow,
};
use crate::base::archive_path::ArchivePath;

/// How many components a path may have. Below what [`super::Limits`] allow, 64 KiB of name and
/// 40 links of 4 KiB each, no entry lies deeper; in a damaged file it ends circles of parents.
const MAX_DEPTH: usize = 1 << 17;

/// Everything but the facts about the whole.
#[derive(Debug, Default)]
pub(super) struct Arrays {
    /// By inode number; number 0 is nobody's.
    pub(super) records: Vec<InodeRow>,
    pub(super) dirents: Vec<Dirent>,
    /// The places of the dirents of each directory, where these lie, in the order of their names.
    pub(super) by_name: Vec<U32>,
    pub(super) arena: Arena,
    /// Names of users and groups; the first is empty.
    pub(super) owners: Vec<Name>,
    /// The first stands for "none".
    pub(super) extras: Vec<ExtraRow>,
    pub(super) xattrs: Vec<XattrRow>,
    pub(super) pieces: Vec<PieceRow>,
    pub(super) spans: Vec<SpanRow>,
    /// Digests of the blocks of the packed stream.
    pub(super) blocks: Vec<BlockDigest>,
    /// Checksums of the blocks of spans; those of one span adjoin.
    pub(super) checksums: Vec<U64>,
    /// The windows of all seek points.
    pub(super) windows: Arena,
    /// Hard links whose targets a layer below may have.
    pub(super) unresolved: Vec<UnresolvedRow>,
}

/// Whether `name` can be a component of a path.
pub(super) fn is_valid_component(name: &[u8]) -> bool {
    !matches!(name, b"" | b"." | b"..") && !name.contains(&b'/')
}

impl Arrays {
    /// The record of a number that has an entry, of a type that entries can have.
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

    /// As [`Self::live_dirent`], of a dirent that directory `parent` lists: only its own count. As a directory
    /// has one dirent, and that one parent, no file can make a walk from the root go in circles.
    pub(super) fn child(&self, parent: u32, number: u32) -> Option<(&[u8], u32)> {
        let is_its_own = self.dirent(number)?.parent.get() == parent;
        is_its_own.then(|| self.live_dirent(number)).flatten()
    }

    /// What dirent `number` says: a name and the number of a live record. A directory counts only
    /// under its own dirent.
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

    /// The numbers of a directory's dirents; empty for everything else. They need not exist.
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

    /// As [`Self::child`], of the dirent whose name comes at place `number` of [`Self::by_name`];
    /// it must be one of `siblings`.
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

    /// The attributes of row `extra`, by name. Stops at what lies outside.
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

    /// The map of row `extra`; `None` when the file is not sparse, empty when the map lies outside.
    pub(super) fn sparse_pieces(&self, extra: u32) -> Option<&[PieceRow]> {
        let extra = self.extras.get(extra as usize)?;
        if extra.sparse.get() != 1 {
            return None;
        }
        let first = extra.piece.get() as usize;
        let end = first.checked_add(extra.piece_count.get() as usize)?;
        Some(self.pieces.get(first..end).unwrap_or_default())
    }

    /// Gives back what was kept for growing.
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

    /// What the arrays hold on to, in bytes: capacities, not lengths.
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
