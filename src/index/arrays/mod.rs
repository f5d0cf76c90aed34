//! The arrays of an index, under construction or complete, with checked accessors.

mod places;
pub(super) mod row_table;
pub(super) mod sort;

use std::ops::Range;

use xxhash_rust::xxh3::xxh3_64_with_seed;
use zerocopy::little_endian::{U32, U64};

use super::blocks::BlockDigest;
use super::storage::Rows;
use super::storage::row_types::{
    BLOCK_DEVICE, CHAR_DEVICE, DIRECTORY, Dirent, ExtraRow, FIFO, FILE, InodeRow, LinkRow, NONE,
    Name, PieceRow, SYMLINK, SpanRow, UnresolvedRow, XattrRow,
};
use crate::base::archive_path::ArchivePath;
use crate::base::resolve::MAX_LINKS;
use places::Places;
use row_table::RowTable;

/// Maximum bytes of a member's path.
pub(super) const MAX_MEMBER_PATH_BYTES: usize = 65_535;

/// Maximum bytes of a symbolic link's target: the limit of Linux.
pub(crate) const MAX_SYMLINK_TARGET_BYTES: usize = 4095;

/// Maximum bytes of an entry's path, which also ends cycles of parents in a damaged file. No valid entry has a longer
/// one, because the builder follows at most so many links on the path of a member.
const MAX_ENTRY_PATH_BYTES: usize =
    MAX_MEMBER_PATH_BYTES + MAX_LINKS * (MAX_SYMLINK_TARGET_BYTES + 1);

/// Maximum number of directories above an entry. Each has a name and a slash.
pub(super) const MAX_DIRECTORIES_ABOVE: usize = MAX_ENTRY_PATH_BYTES / 2;

#[derive(Debug, Default)]
pub(super) struct Arrays {
    /// By inode number. Number 0 is unused.
    pub(super) inodes: Rows<InodeRow>,
    pub(super) dirents: Rows<Dirent>,
    /// Dirent numbers, sorted by name within each directory's range.
    pub(super) by_name: Rows<U32>,
    pub(super) arena: Arena,
    /// The first is empty.
    pub(super) owners: Rows<Name>,
    /// Attributes and sparse maps. Row 0 means "none".
    pub(super) extras: Rows<ExtraRow>,
    pub(super) xattrs: Rows<XattrRow>,
    pub(super) pieces: Rows<PieceRow>,
    pub(super) spans: Rows<SpanRow>,
    pub(super) blocks: Rows<BlockDigest>,
    /// Checksums of the blocks of spans, adjacent for each span.
    pub(super) checksums: Rows<U64>,
    pub(super) windows: Arena,
    pub(super) unresolved: Rows<UnresolvedRow>,
    /// Hard links, sorted by the offset of the name.
    pub(super) links: Rows<LinkRow>,
    /// Where dirents are while they are sorted.
    pub(super) places: Option<Places>,
}

pub(super) fn is_valid_component(name: &[u8]) -> bool {
    !matches!(name, b"" | b"." | b"..") && !name.iter().any(|byte| matches!(byte, 0 | b'/'))
}

/// Whether `kind` is the type of an entry, and not of what no archive contains, such as a socket.
fn is_known_type(kind: u16) -> bool {
    matches!(
        kind,
        FILE | DIRECTORY | SYMLINK | CHAR_DEVICE | BLOCK_DEVICE | FIFO
    )
}

impl Arrays {
    pub(super) fn new() -> Self {
        Self {
            owners: vec![Name::default()].into(),
            extras: vec![ExtraRow::default()].into(),
            ..Self::default()
        }
    }

    /// The row of `ino`, if it is an entry with a valid type.
    pub(super) fn inode(&self, ino: u32) -> Option<&InodeRow> {
        let inode = self.inodes.get(usize::try_from(ino).ok()?)?;
        match inode.kind() {
            SYMLINK => self.target(inode).map(|_| inode),
            kind => is_known_type(kind).then_some(inode),
        }
    }

    /// The target of a link; `None` if it is longer than any that the builder accepts.
    pub(super) fn target(&self, link: &InodeRow) -> Option<&[u8]> {
        let len = link.children.get();
        let max_bytes = match link.kind() {
            SYMLINK => MAX_SYMLINK_TARGET_BYTES,
            _ => MAX_MEMBER_PATH_BYTES,
        };
        (len as usize <= max_bytes)
            .then(|| self.arena.bytes_at(link.data.get(), len.into()))
            .flatten()
    }

    pub(super) fn owner(&self, row: u16) -> &[u8] {
        let name = self.owners.get(usize::from(row));
        name.and_then(|&name| self.arena.name(name))
            .unwrap_or_default()
    }

    pub(super) fn push_owner(&mut self, name: &[u8]) -> Option<u16> {
        let row = u16::try_from(self.owners.len()).ok()?;
        let name = self.arena.push_name(name);
        push_row(self.owners.vec_mut(), name);
        Some(row)
    }

    pub(super) fn push_xattr(&mut self, name: &[u8], value: &[u8]) {
        let xattr = XattrRow {
            name: self.arena.push_name(name),
            value_offset: (self.arena.push(value) as u64).into(),
            value_len: (value.len() as u64).into(),
        };
        push_row(self.xattrs.vec_mut(), xattr);
    }

    /// Bytes of an entry that are stored, without holes; 0 unless it is a file.
    pub(super) fn stored_bytes(&self, inode: &InodeRow) -> u64 {
        if inode.kind() != FILE {
            return 0;
        }
        match self.extra(inode.extra.get()) {
            Some(extra) if extra.sparse.get() == 1 => extra.stored_bytes.get(),
            _ => inode.size.get(),
        }
    }

    pub(super) fn dirent(&self, number: u32) -> Option<&Dirent> {
        self.dirents.get(usize::try_from(number).ok()?)
    }

    /// As [`Self::live_dirent`], for a dirent of directory `parent` only. A directory has one dirent, and
    /// that one parent, so a walk from the root cannot cycle in any file.
    pub(super) fn child(&self, parent: u32, number: u32) -> Option<(&[u8], u32, u16)> {
        let is_its_own = self.dirent(number)?.parent.get() == parent;
        is_its_own.then(|| self.live_dirent(number)).flatten()
    }

    /// As [`Self::child`], but uses inodes of directories only. A damaged file may name others that do not exist.
    pub(super) fn child_name(&self, parent: u32, number: u32) -> Option<(&[u8], u32, u16)> {
        let dirent = self.dirent(number)?;
        match dirent.name.kind() {
            kind if !is_known_type(kind) => None,
            DIRECTORY => self.child(parent, number),
            kind => {
                let name = self.arena.name(dirent.name)?;
                let is_its_own = dirent.parent.get() == parent && is_valid_component(name);
                is_its_own.then_some((name, dirent.ino.get(), kind))
            }
        }
    }

    /// Name, number and type of a live inode from dirent `number`; of a directory only under its own dirent.
    pub(super) fn live_dirent(&self, number: u32) -> Option<(&[u8], u32, u16)> {
        let dirent = self.dirent(number)?;
        let ino = dirent.ino.get();
        let is_first = |inode: &InodeRow| self.first_dirent(ino, inode) == number;
        let (name, kind) = self.name_and_kind(dirent, is_first)?;
        Some((name, ino, kind))
    }

    /// Name and type of a live inode; of a directory only if the dirent `is_first`.
    pub(super) fn name_and_kind(
        &self,
        dirent: &Dirent,
        is_first: impl FnOnce(&InodeRow) -> bool,
    ) -> Option<(&[u8], u16)> {
        let inode = self.inode(dirent.ino.get())?;
        if inode.is_directory() && !is_first(inode) {
            return None;
        }
        let name = self.arena.name(dirent.name)?;
        is_valid_component(name).then_some((name, inode.kind()))
    }

    /// Offset of the header of the hard link that is dirent `number`; `None` if another member has that name.
    pub(super) fn link_header(&self, number: u32) -> Option<u64> {
        self.header_of_link(self.dirent(number)?.name)
    }

    /// Offset of the header of the last hard link called `name`, which need not have a dirent.
    pub(super) fn header_of_link(&self, name: Name) -> Option<u64> {
        let (offset, links) = (name.offset(), &self.links);
        let after = links.partition_point(|link| link.name_offset.get() <= offset);
        let link = links.get(after.checked_sub(1)?)?;
        (link.name_offset.get() == offset).then(|| link.header.get())
    }

    /// The dirent under which `ino` first appeared, whose row is `inode`; [`NONE`] for the root.
    pub(super) fn first_dirent(&self, ino: u32, inode: &InodeRow) -> u32 {
        let number = inode.dirent.get();
        let places = self.places.as_ref();
        places.map_or(number, |places| places.find_first(ino, number))
    }

    /// Numbers of a directory's dirents; empty for all else. The dirents may not exist.
    pub(super) fn child_numbers(&self, ino: u32) -> Range<u32> {
        let range = || {
            let inode = self.inode(ino).filter(|inode| inode.is_directory())?;
            let first = u32::try_from(inode.data.get()).ok()?;
            let end = first.checked_add(inode.children.get())?;
            (end as usize <= self.dirents.len()).then_some(first..end)
        };
        range().unwrap_or(0..0)
    }

    /// The dirent at position `rank` of [`Self::by_name`], if it is one of `siblings`.
    pub(super) fn dirent_by_rank(&self, rank: u32, siblings: &Range<u32>) -> Option<u32> {
        let dirent = self.by_name.get(usize::try_from(rank).ok()?)?.get();
        siblings.contains(&dirent).then_some(dirent)
    }

    /// The path of dirent `number`; `None` when it does not lead up to the root, or is longer than a valid one.
    pub(super) fn path(&self, mut number: u32) -> Option<ArchivePath> {
        let mut names = Vec::new();
        let mut len = 0;
        while number != NONE {
            let dirent = self.dirent(number)?;
            let (name, ..) = self.live_dirent(number)?;
            len += name.len() + 1;
            if len > MAX_ENTRY_PATH_BYTES {
                return None;
            }
            names.push(name);
            number = match dirent.parent.get() {
                1 => NONE,
                parent => {
                    let inode = self.inode(parent).filter(|inode| inode.is_directory());
                    self.first_dirent(parent, inode?)
                }
            };
        }
        let mut path = ArchivePath::root();
        for name in names.iter().rev() {
            path.push(name);
        }
        Some(path)
    }

    /// Row `number` of the extras; `None` for 0, which most entries have, and which need not be loaded.
    fn extra(&self, number: u32) -> Option<&ExtraRow> {
        (number != 0)
            .then(|| self.extras.get(number as usize))
            .flatten()
    }

    /// The attributes of row `extra`, by name. Stops at the first that is out of range.
    pub(super) fn xattrs(&self, extra: u32) -> impl Iterator<Item = (&[u8], &[u8])> {
        let rows = self.extra(extra).and_then(|extra| {
            let first = extra.xattr.get() as usize;
            self.xattrs
                .range(first..first.checked_add(extra.xattr_count.get() as usize)?)
        });
        rows.unwrap_or_default().iter().map_while(|xattr| {
            let value = self
                .arena
                .bytes_at(xattr.value_offset.get(), xattr.value_len.get())?;
            Some((self.arena.name(xattr.name)?, value))
        })
    }

    /// The sparse map of row `extra`; `None` when there is none, empty when it is out of range.
    pub(super) fn sparse_pieces(&self, extra: u32) -> Option<&[PieceRow]> {
        let extra = self.extra(extra)?;
        if extra.sparse.get() != 1 {
            return None;
        }
        let first = extra.piece.get() as usize;
        let end = first.checked_add(extra.piece_count.get() as usize)?;
        Some(self.pieces.range(first..end).unwrap_or_default())
    }

    /// Frees the spare room of array `number`. Returns false past the last.
    pub(super) fn shrink(&mut self, number: usize) -> bool {
        match number {
            0 => self.inodes.vec_mut().shrink_to_fit(),
            1 => self.dirents.vec_mut().shrink_to_fit(),
            2 => self.by_name.vec_mut().shrink_to_fit(),
            3 => self.arena.0.vec_mut().shrink_to_fit(),
            4 => self.owners.vec_mut().shrink_to_fit(),
            5 => self.extras.vec_mut().shrink_to_fit(),
            6 => self.xattrs.vec_mut().shrink_to_fit(),
            7 => self.pieces.vec_mut().shrink_to_fit(),
            8 => self.spans.vec_mut().shrink_to_fit(),
            9 => self.blocks.vec_mut().shrink_to_fit(),
            10 => self.checksums.vec_mut().shrink_to_fit(),
            11 => self.windows.0.vec_mut().shrink_to_fit(),
            12 => self.unresolved.vec_mut().shrink_to_fit(),
            13 => self.links.vec_mut().shrink_to_fit(),
            _ => return false,
        }
        true
    }

    /// Capacities, not lengths.
    pub(super) fn memory_bytes(&self) -> usize {
        self.inodes.capacity_bytes()
            + self.dirents.capacity_bytes()
            + self.by_name.capacity_bytes()
            + self.arena.0.capacity_bytes()
            + self.owners.capacity_bytes()
            + self.extras.capacity_bytes()
            + self.xattrs.capacity_bytes()
            + self.pieces.capacity_bytes()
            + self.spans.capacity_bytes()
            + self.blocks.capacity_bytes()
            + self.checksums.capacity_bytes()
            + self.windows.0.capacity_bytes()
            + self.unresolved.capacity_bytes()
            + self.links.capacity_bytes()
            + self.places.as_ref().map_or(0, Places::memory_bytes)
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Arena(pub(super) Rows<u8>);

impl Arena {
    pub(super) fn name(&self, name: Name) -> Option<&[u8]> {
        self.bytes_at(name.offset(), name.len())
    }

    pub(super) fn bytes_at(&self, offset: u64, len: u64) -> Option<&[u8]> {
        let end = usize::try_from(offset.checked_add(len)?).ok()?;
        self.0.range(usize::try_from(offset).ok()?..end)
    }

    pub(super) fn push(&mut self, bytes: &[u8]) -> usize {
        let offset = self.0.len();
        let all = self.0.vec_mut();
        reserve(all, bytes.len());
        all.extend_from_slice(bytes);
        offset
    }

    /// Appends `bytes`, at most 65,535 of them, as a name.
    pub(super) fn push_name(&mut self, bytes: &[u8]) -> Name {
        let offset = self.push(bytes);
        Name::new(offset, bytes.len()).expect("a name fits 16 bits, and memory 44")
    }
}

/// Appends to a vector that grows by a quarter, because doubling could waste half of an index's memory.
pub(super) fn push_row<T>(rows: &mut Vec<T>, row: T) {
    reserve(rows, 1);
    rows.push(row);
}

fn reserve<T>(rows: &mut Vec<T>, more: usize) {
    if rows.capacity() - rows.len() < more {
        rows.reserve_exact(more.max(rows.len() / 4).max(64));
    }
}

pub(super) fn capacity_bytes<T>(rows: &Vec<T>) -> usize {
    rows.capacity() * size_of::<T>()
}

/// Finds dirents by directory and name.
#[derive(Debug)]
pub(super) struct NameTable(RowTable);

impl NameTable {
    pub(super) fn new() -> Self {
        Self(RowTable::new())
    }

    pub(super) fn find(&self, arrays: &Arrays, parent: u32, name: &[u8]) -> Option<u32> {
        let places = arrays.places.as_ref();
        let place = |number| places.map_or(number, |places| places.find(number));
        let found = self.0.find(hash(self.0.seed, parent, name), |number| {
            arrays.dirent(place(number)).is_some_and(|dirent| {
                let is_in_parent = dirent.ino.get() != 0 && dirent.parent.get() == parent;
                is_in_parent && arrays.arena.name(dirent.name) == Some(name)
            })
        });
        found.map(place)
    }

    /// Adds dirent `number`, called `name` in directory `parent`.
    pub(super) fn add(&mut self, parent: u32, name: &[u8], number: u32) {
        self.0.add(hash(self.0.seed, parent, name), number);
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.0.memory_bytes()
    }
}

fn hash(seed: u64, parent: u32, name: &[u8]) -> u64 {
    // An odd factor gives different parents different seeds.
    let parent = u64::from(parent).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    xxh3_64_with_seed(name, seed.wrapping_add(parent))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::test_support::{directory, file, index, symlink};
    use crate::index::{Index, Ino};

    #[test]
    fn arena_range_past_the_end_is_none() {
        let mut arena = Arena::default();
        assert_eq!(arena.push(b"abc"), 0);
        assert_eq!(arena.bytes_at(1, 2), Some(&b"bc"[..]));
        assert_eq!(arena.bytes_at(3, 0), Some(&b""[..]));
        assert_eq!(arena.bytes_at(1, 3), None);
        assert_eq!(arena.bytes_at(u64::MAX, 2), None);
    }

    // Promises: published-impossible
    #[test]
    fn path_and_target_longer_than_any_valid_one_are_none() {
        let mut index = index(&[directory("a/b/c/d", 0o755), symlink("l", "a")]);
        let arrays = &mut index.arrays;
        let is_link = |row: &&InodeRow| row.kind() == SYMLINK;
        let link = *arrays.inodes.iter().find(is_link).expect("a link");
        assert_eq!(arrays.target(&link), Some(&b"a"[..]));
        let long = vec![b'n'; MAX_MEMBER_PATH_BYTES];
        let name = arrays.arena.push_name(&long);
        let of_len = |len: usize| InodeRow {
            data: name.offset().into(),
            children: u32::try_from(len).expect("short").into(),
            ..link
        };
        let is_valid = |len| arrays.target(&of_len(len)).is_some();
        assert!(is_valid(MAX_SYMLINK_TARGET_BYTES) && !is_valid(MAX_SYMLINK_TARGET_BYTES + 1));
        let numbers = 0..u32::try_from(arrays.dirents.len()).expect("few");
        assert!(numbers.clone().all(|number| arrays.path(number).is_some()));
        // One place in the arena serves any number of rows.
        for dirent in arrays.dirents.vec_mut() {
            let kind = dirent.name.kind();
            dirent.name = name.with_kind(kind);
        }
        let lens = numbers.map(|number| arrays.path(number).map(|path| path.as_bytes().len()));
        let three = 3 * MAX_MEMBER_PATH_BYTES + 2;
        let lens: Vec<_> = lens.collect();
        assert!(
            lens.contains(&Some(three)) && lens.contains(&None),
            "{lens:?}"
        );
    }

    // Promises: published-impossible
    #[test]
    fn entry_of_an_unknown_type_or_with_a_nul_is_none() {
        const SOCKET: u16 = 0o140_000;
        let mut index = index(&[file("a", 0..1), file("b", 0..1)]);
        let names = |index: &Index| -> Vec<Vec<u8>> {
            let listed = index.names(Ino::ROOT, 0, true);
            let listed: Vec<_> = listed.map(|child| child.name.to_vec()).collect();
            assert_eq!(index.children(Ino::ROOT, 0).count(), listed.len());
            listed
        };
        assert_eq!(names(&index), [b"a", b"b"]);
        let nul = index.arrays.arena.push_name(b"\0");
        let [first, second] = index.arrays.dirents.vec_mut().as_mut_slice() else {
            panic!("two names");
        };
        first.name = first.name.with_kind(SOCKET);
        let socket = first.ino.get();
        second.name = nul.with_kind(second.name.kind());
        let inode = index.arrays.inodes.get_mut(socket as usize);
        inode.expect("an entry").mode = (SOCKET | 0o644).into();
        assert!(names(&index).is_empty());
        assert!(index.entry(Ino(socket)).is_none());
    }

    #[test]
    fn directories_above_an_entry_end_in_a_circle_of_parents() {
        let mut index = index(&[directory("a/b", 0o755), file("a/b/f", 0..1)]);
        let path = ArchivePath::sanitize(b"a/b/f").path;
        let above = |index: &Index, ino| index.directories_above(ino).collect::<Vec<_>>();
        let entry = index.find(&path).expect("there").ino();
        let [b, a, root] = above(&index, entry)[..] else {
            panic!("three directories");
        };
        assert_eq!(root, Ino::ROOT);
        assert_eq!(above(&index, root), []);
        for dirent in index.arrays.dirents.vec_mut() {
            if dirent.ino.get() == a.0 {
                dirent.parent = b.0.into();
            }
        }
        let circle = above(&index, entry);
        assert_eq!(circle.len(), MAX_DIRECTORIES_ABOVE);
        assert!(!circle.contains(&Ino::ROOT));
    }

    #[test]
    fn capacity_stays_within_a_quarter_of_the_content() {
        let mut rows = Vec::new();
        for row in 0..10_000_u32 {
            push_row(&mut rows, row);
        }
        assert!(capacity_bytes(&rows) <= 10_000 * 4 * 5 / 4);
    }
}
