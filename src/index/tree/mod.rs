//! The index and its entries.

pub(super) mod lazy;
mod loading;
mod origin;
mod resolve_path;
mod spans;
mod xattrs;

pub use origin::{Locator, Origin};
pub(crate) use spans::MAX_DECODE_COST;
pub use spans::Span;

pub(crate) use resolve_path::IndexResolver;

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::iter;
use std::ops::Range;
use std::sync::Arc;

use crate::base::archive_path::ArchivePath;
use crate::base::extent::{Extent, Packed, Plain};
use crate::tar::{Device, RECORD, Timestamp};

use crate::index::arrays::{Arrays, MAX_DIRECTORIES_ABOVE, NameTable, is_valid_component};
use crate::index::memory_limit::Charge;
use crate::index::problem::Problem;
use crate::index::storage::OnDemand;
use crate::index::storage::row_types::{
    BLOCK_DEVICE, CHAR_DEVICE, DIRECTORY, FIFO, FILE, InodeRow, NONE, PieceRow, SYMLINK,
    UnresolvedRow,
};

pub use resolve_path::Resolved;

/// An entry's number: the order of its first appearance in the archive, from the root's 1 on. An implied
/// directory appears with the first member below it. The index format fixes the numbers, so a mount may show
/// them before the scan ends.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ino(pub u32);

impl Ino {
    /// The archive's root directory.
    pub const ROOT: Self = Self(1);
}

/// A name in a directory, by its place among all names of a complete index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DirentNumber(pub(crate) u32);

/// The immutable tree of one archive, or the part known so far ([`Builder::index`](super::Builder::index)).
#[derive(Debug)]
pub struct Index {
    pub(super) arrays: Arrays,
    /// Finds names before the index is finished and they are sorted.
    pub(super) names: Option<NameTable>,
    /// Replaced entries, if the builder keeps them.
    pub(super) replaced: Option<BTreeMap<u32, InodeRow>>,
    pub(super) origin: Origin,
    /// In bytes.
    pub(super) block_len: u64,
    /// End of the packed bytes whose digests are known.
    pub(super) digested: Packed,
    pub(super) totals: Totals,
    /// The first, up to [`Options::max_problems`](super::Options::max_problems).
    pub(super) problems: Vec<Problem>,
    /// Whether it was found beside the archive, instead of made from its bytes.
    pub(super) is_published: bool,
    /// The file whose rows are loaded on demand.
    pub(super) file: Option<Arc<OnDemand>>,
    pub(super) charge: Charge,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Totals {
    pub(super) entries: u64,
    pub(super) stored_bytes: u64,
    /// Members that were added, without the root, and implied directories.
    pub(super) members: u64,
    /// Bytes of the files among them, holes included.
    pub(super) file_bytes: u64,
    pub(super) has_xattrs: bool,
    /// Whether global pax headers set attributes of members.
    pub(super) has_global_keywords: bool,
    pub(super) problems: u64,
}

impl Totals {
    pub(super) fn of(arrays: &Arrays, problems: u64) -> Self {
        let totals = Self {
            problems,
            ..Self::default()
        };
        totals.recount(arrays)
    }

    /// The same totals, but with those of the live entries in `arrays`.
    pub(super) fn recount(self, arrays: &Arrays) -> Self {
        let mut totals = Self {
            entries: 0,
            stored_bytes: 0,
            has_xattrs: !arrays.xattrs.is_empty(),
            ..self
        };
        for inode in &arrays.inodes {
            totals.entries += u64::from(inode.mode.get() != 0);
            let stored = arrays.stored_bytes(inode);
            totals.stored_bytes = totals.stored_bytes.saturating_add(stored);
        }
        totals
    }
}

/// One entry, by reference. Accessors never fail: lookup checks the rows, and iterators skip invalid ones.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    arrays: &'a Arrays,
    ino: Ino,
    inode: &'a InodeRow,
}

/// The type of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EntryKind<'a> {
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

impl EntryKind<'_> {
    /// Whether it is a device or a FIFO, which the kernel opens by itself.
    pub(crate) fn is_special(self) -> bool {
        matches!(
            self,
            Self::CharDevice(_) | Self::BlockDevice(_) | Self::Fifo
        )
    }
}

/// A stored piece of a file's content. The gaps between pieces are holes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Offset in the file.
    pub offset: u64,
    /// The bytes in the plain stream.
    pub plain: Extent<Plain>,
}

/// A name in a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Child<'a> {
    /// One component.
    pub name: &'a [u8],
    /// The entry it names.
    pub ino: Ino,
    /// The type of the entry, as the type bits of `st_mode`.
    pub file_type: u16,
    /// Number of names before it in the directory, in the order of the iterator.
    pub number: u32,
}

/// A hard link of a layer whose target the layer did not contain yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnresolvedLink<'a> {
    /// The directory of the link.
    pub parent: Ino,
    /// Its name there.
    pub name: &'a [u8],
    /// The path of its target.
    pub target: &'a [u8],
}

/// A whiteout: one entry, or a whole directory, of lower layers that a layer removes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Whiteout<'a> {
    /// The directory of the removed name.
    pub parent: Ino,
    /// The removed name; `None` removes all names (an opaque directory).
    pub name: Option<&'a [u8]>,
}

impl Index {
    /// Entry `ino`; `None` when there is none, for example because a later member replaced it.
    pub fn entry(&self, ino: Ino) -> Option<Entry<'_>> {
        let replaced = || self.replaced.as_ref()?.get(&ino.0);
        Some(Entry {
            arrays: &self.arrays,
            ino,
            inode: self.arrays.inode(ino.0).or_else(replaced)?,
        })
    }

    /// The entries of the tree in archive order, the root first. They are the same in an index that its scan has built,
    /// in a saved, and in a published one: entries that later members replaced are in none.
    pub fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        (Ino::ROOT.0..=self.last_ino().0).filter_map(|number| {
            Some(Entry {
                arrays: &self.arrays,
                ino: Ino(number),
                inode: self.arrays.inode(number)?,
            })
        })
    }

    /// Whether a look-up finds each name that a directory lists, and with the same entry. It is so unless others made the
    /// index.
    pub(crate) fn finds_what_it_lists(&self) -> bool {
        let is_found = |parent: Ino, child: &Child<'_>| {
            let found = self.lookup(parent, child.name);
            found.is_some_and(|found| found.ino() == child.ino)
        };
        let mut directories = self
            .entries()
            .filter(|entry| entry.kind() == EntryKind::Directory);
        directories.all(|directory| {
            let mut children = self.children(directory.ino(), 0);
            children.all(|child| is_found(directory.ino(), &child))
        })
    }

    /// Whether the index contains the whole archive. Before that there are no listings.
    pub fn is_complete(&self) -> bool {
        self.names.is_none()
    }

    /// The entry called `name` in directory `parent`.
    pub fn lookup(&self, parent: Ino, name: &[u8]) -> Option<Entry<'_>> {
        let dirent = self.find_dirent(parent, name)?;
        self.entry(self.named_ino(dirent)?)
    }

    /// The dirent called `name` in directory `parent`.
    pub(crate) fn find_dirent(&self, parent: Ino, name: &[u8]) -> Option<DirentNumber> {
        let arrays = &self.arrays;
        if let Some(names) = &self.names {
            return names.find(arrays, parent.0, name).map(DirentNumber);
        }
        let siblings = arrays.child_numbers(parent.0);
        let mut numbers = siblings.clone();
        while !numbers.is_empty() {
            let middle = numbers.start + (numbers.end - numbers.start) / 2;
            let dirent = arrays.dirent_by_rank(middle, &siblings)?;
            let (found, ..) = arrays.child(parent.0, dirent)?;
            match name.cmp(found) {
                Ordering::Less => numbers.end = middle,
                Ordering::Greater => numbers.start = middle + 1,
                Ordering::Equal => return Some(DirentNumber(dirent)),
            }
        }
        None
    }

    pub(crate) fn named_ino(&self, dirent: DirentNumber) -> Option<Ino> {
        Some(Ino(self.arrays.dirent(dirent.0)?.ino.get()))
    }

    /// The dirent under which `ino` first appeared; `None` for the root.
    pub(crate) fn first_name(&self, ino: Ino) -> Option<DirentNumber> {
        self.first_dirent(ino)
            .filter(|&number| number != NONE)
            .map(DirentNumber)
    }

    pub(crate) fn path_of(&self, dirent: DirentNumber) -> Option<ArchivePath> {
        self.arrays.path(dirent.0)
    }

    /// Plain offset of the header of the hard link that made a name; `None` if another member did.
    pub(crate) fn link_header(&self, dirent: DirentNumber) -> Option<Plain> {
        self.arrays.link_header(dirent.0).map(Plain)
    }

    /// The entry at `path`, without following links.
    pub fn find(&self, path: &ArchivePath) -> Option<Entry<'_>> {
        let mut components = path.components();
        components.try_fold(self.entry(Ino::ROOT)?, |entry, name| {
            self.lookup(entry.ino, name)
        })
    }

    /// Names in directory `parent`, in archive order, from number `from` on; empty for other types. The order
    /// is that of first appearance, so reading the files in it reads the archive front to back.
    pub fn children(&self, parent: Ino, from: u32) -> impl Iterator<Item = Child<'_>> {
        let arrays = &self.arrays;
        self.list(parent, from, move |number, _| {
            arrays.child(parent.0, number)
        })
    }

    /// As [`Self::children`], or in the order of the names' bytes. Of the inodes only those of directories are used,
    /// so in a damaged index others may not exist.
    pub fn names(
        &self,
        parent: Ino,
        from: u32,
        is_sorted: bool,
    ) -> impl Iterator<Item = Child<'_>> {
        let arrays = &self.arrays;
        self.list(parent, from, move |number, siblings| {
            let by_rank = || arrays.dirent_by_rank(number, siblings);
            let dirent = if is_sorted { by_rank()? } else { number };
            arrays.child_name(parent.0, dirent)
        })
    }

    /// As [`Self::children`], in the order of the names' bytes.
    pub fn children_by_name(&self, parent: Ino, from: u32) -> impl Iterator<Item = Child<'_>> {
        let arrays = &self.arrays;
        self.list(parent, from, move |rank, siblings| {
            arrays.child(parent.0, arrays.dirent_by_rank(rank, siblings)?)
        })
    }

    fn list<'a>(
        &'a self,
        parent: Ino,
        from: u32,
        child: impl Fn(u32, &Range<u32>) -> Option<(&'a [u8], u32, u16)>,
    ) -> impl Iterator<Item = Child<'a>> {
        let siblings = self.child_numbers(parent);
        let first = siblings.start;
        (first.saturating_add(from)..siblings.end).filter_map(move |number| {
            let (name, ino, file_type) = child(number, &siblings)?;
            Some(Child {
                name,
                ino: Ino(ino),
                file_type,
                number: number - first,
            })
        })
    }

    fn child_numbers(&self, parent: Ino) -> Range<u32> {
        if self.is_complete() {
            self.arrays.child_numbers(parent.0)
        } else {
            0..0
        }
    }

    /// The path of the name under which `ino` first appeared.
    pub fn path(&self, ino: Ino) -> Option<ArchivePath> {
        self.arrays.path(self.first_dirent(ino)?)
    }

    /// The directories above `ino`, the nearest first. In a damaged index they may form a circle, so no more are returned
    /// than a path can have.
    pub(crate) fn directories_above(&self, ino: Ino) -> impl Iterator<Item = Ino> {
        let parent = move |&ino: &Ino| {
            let entry = self.entry(ino).filter(|_| ino != Ino::ROOT);
            entry.map(|entry| entry.parent())
        };
        iter::successors(parent(&ino), parent).take(MAX_DIRECTORIES_ABOVE)
    }

    fn first_dirent(&self, ino: Ino) -> Option<u32> {
        let inode = self.arrays.inode(ino.0)?;
        Some(self.arrays.first_dirent(ino.0, inode))
    }

    /// Directory, and number in [`Self::children`], where `ino` first appeared; `None` without listings.
    pub fn listing_position(&self, ino: Ino) -> Option<(Ino, u32)> {
        let number = self.first_dirent(ino)?;
        let parent = Ino(self.arrays.dirent(number)?.parent.get());
        let siblings = self.child_numbers(parent);
        let within = siblings.contains(&number);
        within.then(|| (parent, number - siblings.start))
    }

    /// The highest number of an entry. There are gaps where a later member replaced an entry.
    pub fn last_ino(&self) -> Ino {
        let count = self.arrays.inodes.len();
        Ino(u32::try_from(count).map_or(NONE, |count| count.saturating_sub(1)))
    }

    /// Number of live entries, including the root.
    pub fn entry_count(&self) -> u64 {
        self.totals.entries
    }

    /// Number of members of the archive, without the root, and of implied directories. Members that later ones replaced,
    /// that have no place in the tree, and hard links count.
    pub fn member_count(&self) -> u64 {
        self.totals.members
    }

    /// Bytes of the files of these members, holes included.
    pub fn file_bytes(&self) -> u64 {
        self.totals.file_bytes
    }

    /// Whether any entry has an extended attribute or ACL.
    pub fn has_xattrs(&self) -> bool {
        self.totals.has_xattrs
    }

    /// Whether global pax headers set attributes of members, so that the header of a member does not have all.
    pub(crate) fn has_global_keywords(&self) -> bool {
        self.totals.has_global_keywords
    }

    /// Whether any entry has the extended attribute `name`. Scans all attributes.
    pub fn has_xattr(&self, name: &[u8]) -> bool {
        self.xattr_names().any(|known| known == name)
    }

    /// Names of extended attributes and pax keywords of ACLs of all entries, with repetitions.
    pub fn xattr_names(&self) -> impl Iterator<Item = &[u8]> {
        let names = self.arrays.xattrs.iter().map(|xattr| xattr.name);
        names.filter_map(|name| self.arrays.arena.name(name))
    }

    /// Bytes of all files. Hard links count once, holes do not count.
    pub fn stored_bytes(&self) -> u64 {
        self.totals.stored_bytes
    }

    /// Hard links of a layer, in order, to targets in layers below or later in it. They are no entries.
    #[doc(hidden)]
    pub fn unresolved_links(&self) -> impl Iterator<Item = UnresolvedLink<'_>> {
        self.unresolved_rows().filter_map(|(row, name, target)| {
            let is_link = is_valid_component(name) && !target.is_empty();
            is_link.then_some(UnresolvedLink {
                parent: Ino(row.parent.get()),
                name,
                target,
            })
        })
    }

    /// The path of the target of the unresolved link called `name` in directory `parent`.
    pub(crate) fn unresolved_target(&self, parent: Ino, name: &[u8]) -> Option<&[u8]> {
        Some(self.find_unresolved_link(parent, name)?.1)
    }

    /// Plain offset of the header of that link.
    pub(crate) fn unresolved_header(&self, parent: Ino, name: &[u8]) -> Option<Plain> {
        let (row, _) = self.find_unresolved_link(parent, name)?;
        self.arrays.header_of_link(row.name).map(Plain)
    }

    fn find_unresolved_link(&self, parent: Ino, name: &[u8]) -> Option<(&UnresolvedRow, &[u8])> {
        let mut links = self.unresolved_rows();
        let found = links.find(|(row, found, target)| {
            row.parent.get() == parent.0 && *found == name && !target.is_empty()
        });
        found.map(|(row, _, target)| (row, target))
    }

    /// Whiteouts of the layer: names of lower layers that it removes.
    #[doc(hidden)]
    pub fn whiteouts(&self) -> impl Iterator<Item = Whiteout<'_>> {
        self.unresolved_rows().filter_map(|(row, name, target)| {
            let is_whiteout = target.is_empty() && (name.is_empty() || is_valid_component(name));
            is_whiteout.then_some(Whiteout {
                parent: Ino(row.parent.get()),
                name: (!name.is_empty()).then_some(name),
            })
        })
    }

    fn unresolved_rows(&self) -> impl Iterator<Item = (&UnresolvedRow, &[u8], &[u8])> {
        self.arrays.unresolved.iter().filter_map(|row| {
            let arena = &self.arrays.arena;
            let name = arena.name(row.name)?;
            let target = match row.target_len.get() {
                0 => &[][..],
                len => arena.bytes_at(row.target_offset.get(), len.into())?,
            };
            // A later member may have replaced the directory.
            let is_directory = self.arrays.inode(row.parent.get())?.is_directory();
            is_directory.then_some((row, name, target))
        })
    }

    /// The source that the index was made from.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The first members that are damaged or not in the tree.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// Number of members that are damaged or not in the tree.
    pub fn problem_count(&self) -> u64 {
        self.totals.problems
    }

    /// Whether it was found beside the archive, instead of made from its bytes, so that its entries must be
    /// compared with the archive. Index files keep this.
    pub fn is_published(&self) -> bool {
        self.is_published
    }

    /// The same index, as one that was found beside the archive.
    pub(crate) fn into_published(self) -> Self {
        Self {
            is_published: true,
            ..self
        }
    }
}

impl<'a> Entry<'a> {
    /// Its number.
    pub fn ino(&self) -> Ino {
        self.ino
    }

    /// The type of the entry.
    pub fn kind(&self) -> EntryKind<'a> {
        match self.inode.kind() {
            DIRECTORY => EntryKind::Directory,
            SYMLINK => EntryKind::Symlink(self.arrays.target(self.inode).unwrap_or_default()),
            CHAR_DEVICE => EntryKind::CharDevice(self.inode.device()),
            BLOCK_DEVICE => EntryKind::BlockDevice(self.inode.device()),
            FIFO => EntryKind::Fifo,
            _ => EntryKind::File,
        }
    }

    /// Plain offset of the first header of its member; `None` for an implied directory.
    pub(crate) fn header(&self) -> Option<Plain> {
        let (data, children) = (self.inode.data.get(), self.inode.children.get());
        match self.inode.kind() {
            FILE => Some(Plain(data.checked_sub(u64::from(children) * RECORD)?)),
            _ if self.is_implied() => None,
            _ => Some(Plain(self.inode.size.get())),
        }
    }

    /// Permission bits, the low twelve.
    pub fn mode(&self) -> u32 {
        u32::from(self.inode.mode.get() & 0o7777)
    }

    /// Uses all rows that describe the entry, so that they are loaded.
    pub fn load_rows(&self) {
        self.xattrs().for_each(drop);
        self.pieces(0, 1).for_each(drop);
        self.arrays.dirent(self.first_dirent());
    }

    /// Owner.
    pub fn uid(&self) -> u32 {
        self.inode.uid.get()
    }

    /// Group.
    pub fn gid(&self) -> u32 {
        self.inode.gid.get()
    }

    /// Owner's name from the archive; empty without one.
    pub fn user(&self) -> &'a [u8] {
        self.arrays.owner(self.inode.user.get())
    }

    /// Group's name from the archive; empty without one.
    pub fn group(&self) -> &'a [u8] {
        self.arrays.owner(self.inode.group.get())
    }

    /// Size for a reader: bytes of a file, target length of a symbolic link, else 0.
    pub fn size(&self) -> u64 {
        match self.inode.kind() {
            FILE => self.inode.size.get(),
            SYMLINK => self.inode.children.get().into(),
            _ => 0,
        }
    }

    /// Bytes that are stored, without holes.
    pub fn stored_bytes(&self) -> u64 {
        self.arrays.stored_bytes(self.inode)
    }

    /// Whether it is an implied directory: only paths of entries below it mention it.
    pub fn is_implied(&self) -> bool {
        self.inode.is_implied()
    }

    /// Whether it is an implied directory with the attributes that a scan gives it.
    pub(crate) fn is_unchanged_implied(&self) -> bool {
        self.inode.is_unchanged_implied()
    }

    /// Whether only whiteouts below this directory of a layer mention it, so that the layer has none.
    pub fn is_whiteout_only(&self) -> bool {
        self.inode.is_whiteout_only()
    }

    /// Time of last modification.
    pub fn mtime(&self) -> Timestamp {
        self.inode.mtime()
    }

    /// Number of names of this entry; for a directory 2, plus one for each subdirectory.
    pub fn link_count(&self) -> u32 {
        self.inode.links.get()
    }

    /// Number of names in a directory; 0 for all other entries.
    pub fn child_count(&self) -> u32 {
        let numbers = self.arrays.child_numbers(self.ino.0);
        numbers.end - numbers.start
    }

    fn first_dirent(&self) -> u32 {
        self.arrays.first_dirent(self.ino.0, self.inode)
    }

    /// The directory in which it first appeared. The root is its own parent.
    pub fn parent(&self) -> Ino {
        let dirent = self.arrays.dirent(self.first_dirent());
        dirent.map_or(Ino::ROOT, |dirent| Ino(dirent.parent.get()))
    }

    /// Extended attributes by name; ACLs as in [`crate::tar::Member::xattrs`].
    pub fn xattrs(&self) -> impl Iterator<Item = (&'a [u8], &'a [u8])> + use<'a> {
        self.arrays.xattrs(self.inode.extra.get())
    }

    /// Stored pieces of a file's content that touch `offset..offset + len`, ascending, whole.
    pub fn pieces(&self, offset: u64, len: u64) -> impl Iterator<Item = Piece> + use<'a> {
        let (whole, map) = match self.arrays.sparse_pieces(self.inode.extra.get()) {
            _ if self.inode.kind() != FILE => (None, &[][..]),
            Some(map) => (None, map),
            None => (Some(self.inode.whole_piece()), &[][..]),
        };
        let size = self.size();
        let end = offset.saturating_add(len);
        let is_before =
            move |row: &PieceRow| row.offset.get().saturating_add(row.len.get()) <= offset;
        let rest = map
            .get(map.partition_point(is_before)..)
            .unwrap_or_default();
        whole
            .into_iter()
            .chain(rest.iter().copied())
            .scan(0, move |previous_end, row| {
                let piece_end = row.offset.get().checked_add(row.len.get())?;
                row.plain.get().checked_add(row.len.get())?;
                let ordered = *previous_end <= row.offset.get() && piece_end <= size;
                *previous_end = piece_end;
                ordered.then_some(row)
            })
            .filter(move |row| row.len.get() > 0 && !is_before(row))
            .take_while(move |row| row.offset.get() < end)
            .map(|row| Piece {
                offset: row.offset.get(),
                plain: Extent::with_len(Plain(row.plain.get()), row.len.get()),
            })
    }

    /// The pieces before `end`, the last one cut there.
    pub(crate) fn pieces_before(&self, end: u64) -> impl Iterator<Item = Piece> + use<'a> {
        self.pieces(0, end).map(move |piece| {
            let len = piece.plain.len().min(end.saturating_sub(piece.offset));
            let plain = Extent::with_len(piece.plain.start(), len);
            Piece { plain, ..piece }
        })
    }

    /// Offset of the first byte that is not before `end` of the plain bytes.
    pub(crate) fn cut_offset(&self, end: Plain) -> Option<u64> {
        let mut pieces = self.pieces(0, u64::MAX);
        let cut = pieces.find(|piece| piece.plain.end() > end)?;
        let available = end.0.saturating_sub(cut.plain.start().0);
        Some(cut.offset.saturating_add(available))
    }
}
