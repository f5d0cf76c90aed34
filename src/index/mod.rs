//! The immutable tree of entries, with the seek points to reach their bytes.
//!
//! Built in one pass by a [`Builder`], saved and loaded by [`store`], and then only read: flat
//! arrays behind accessors that check every offset, so that a damaged file is an error and never
//! a panic.

mod arena;
mod arrays;
mod blocks;
mod build_tree;
mod builder;
mod checksums;
mod dirty;
pub mod format;
mod locator;
mod memory;
mod merge;
mod problem;
mod rows;
pub mod store;
#[cfg(test)]
pub(crate) mod test_support;
mod whiteouts;

use std::cmp::Ordering;
use std::collections::HashMap;
use std::ops::Range;

use bytes::Bytes;

use crate::base::archive_path::ArchivePath;
use crate::base::extent::{Extent, Packed, Plain};
use crate::base::sha256::Sha256;
use crate::base::span_hash;
use crate::codec::{Compression, SeekPoint};
use crate::tar::{Device, Timestamp};

use arrays::Arrays;
use build_tree::NameTable;
use rows::{
    BLOCK_DEVICE, CHAR_DEVICE, DIRECTORY, FIFO, FILE, InodeRow, NONE, PieceRow, SYMLINK, SpanRow,
};

pub use blocks::{BlockDigest, BlockHasher, Blocks, NewDigests, block_len};
pub use builder::{Builder, MemberError, Options, Placement};
pub use checksums::SpanChecksums;
pub use locator::Locator;
pub use memory::{Charge, MemoryLimit, TooMuchMemory};
pub use merge::{LayerIno, MergeError, MergePlan, MergedDirectory, MergedIndex, MergedName, merge};
pub use problem::Problem;
pub use store::Store;
pub use whiteouts::{NameKind, WhiteoutFormat};

/// How often hard links that came before their targets are looked at in the end, first and last in turn:
/// each time at least one more of those finds its own that wait for each other, usually all do.
pub const MAX_FORWARD_LINK_PASSES: usize = 40;

/// An entry's number: the order of its first appearance in the archive. The root is 1, implied
/// directories count when the first member below them appears. Fixed by the index format, so a
/// mount may show it before the scan ends.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ino(pub u32);

impl Ino {
    /// The archive's root directory.
    pub const ROOT: Self = Self(1);
}

/// The immutable tree of one archive; or, from [`Builder::index`], as much of it as is known.
#[derive(Debug)]
pub struct Index {
    arrays: Arrays,
    /// What finds names while more of them come; afterwards they are sorted.
    names: Option<NameTable>,
    /// Entries that later members replaced, if they are kept at all.
    replaced: Option<HashMap<u32, InodeRow>>,
    origin: Origin,
    /// The length of the blocks that have digests.
    block_len: u64,
    /// Where the packed bytes end whose digests are known.
    digested: Packed,
    totals: Totals,
    /// The first ones, as many as are kept.
    problems: Vec<Problem>,
    /// The memory of the index, counted against a limit.
    charge: Charge,
}

/// What an index was made from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Origin {
    /// What it is found by.
    pub locator: Locator,
    /// The BLAKE3 digest of the packed bytes; zeros when some of them were not seen.
    pub content_id: [u8; 32],
    /// SHA-256 of the packed bytes, if someone wanted to know.
    pub sha256: Option<Sha256>,
    /// How they are packed.
    pub compression: Compression,
    /// How many they are.
    pub packed_bytes: u64,
    /// How many they make.
    pub plain_bytes: u64,
}

impl Default for Origin {
    /// An empty source.
    fn default() -> Self {
        Self {
            locator: Locator::default(),
            content_id: [0; 32],
            sha256: None,
            compression: Compression::None,
            packed_bytes: 0,
            plain_bytes: 0,
        }
    }
}

/// Sums over all entries, so that nobody has to visit them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Totals {
    entries: u64,
    stored_bytes: u64,
    has_xattrs: bool,
    problems: u64,
}

impl Totals {
    fn of(arrays: &Arrays, problems: u64) -> Self {
        let mut totals = Self {
            problems,
            has_xattrs: !arrays.xattrs.is_empty(),
            ..Self::default()
        };
        for record in arrays
            .records
            .iter()
            .filter(|record| record.mode.get() != 0)
        {
            totals.entries += 1;
            let stored = stored_bytes(arrays, record);
            totals.stored_bytes = totals.stored_bytes.saturating_add(stored);
        }
        totals
    }
}

/// One entry, by reference into the index. Accessors never fail: what a damaged index says is
/// checked when the entry is looked up, or left out of what an iterator yields.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    arrays: &'a Arrays,
    ino: Ino,
    record: &'a InodeRow,
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
    /// How many names come before it in the directory, in the order asked for.
    pub number: u32,
}

/// A hard link of a layer to what the layer did not hold when the link came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnresolvedLink<'a> {
    /// The directory it would lie in.
    pub parent: Ino,
    /// Its name there.
    pub name: &'a [u8],
    /// The path of its target.
    pub target: &'a [u8],
}

/// What a layer removes of the layers below it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Whiteout<'a> {
    /// In this directory,
    pub parent: Ino,
    /// what has this name; everything, when there is none.
    pub name: Option<&'a [u8]>,
}

/// Plain bytes between neighbouring seek points: the unit of decoding, caching and verifying.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Span {
    /// Which one, from the front.
    pub number: u32,
    /// The bytes it makes.
    pub plain: Extent<Plain>,
    /// Their hash, as [`SpanHasher`](crate::base::span_hash::SpanHasher) takes it with the blocks of
    /// [`Index::block_len`]; `None` when the scan passed over them.
    pub hash: Option<u64>,
    /// Where decoding can start for it: `None` when only an earlier span has a seek point.
    pub seek_point: Option<SeekPoint>,
}

impl Index {
    /// Entry `ino`; `None` when there is none, e.g. because a later member replaced it and that is
    /// not kept.
    pub fn entry(&self, ino: Ino) -> Option<Entry<'_>> {
        let replaced = || self.replaced.as_ref()?.get(&ino.0);
        Some(Entry {
            arrays: &self.arrays,
            ino,
            record: self.arrays.record(ino.0).or_else(replaced)?,
        })
    }

    /// Whether all of the archive is in it: before that there are no listings.
    pub fn is_complete(&self) -> bool {
        self.names.is_none()
    }

    /// The entry called `name` in directory `parent`.
    pub fn lookup(&self, parent: Ino, name: &[u8]) -> Option<Entry<'_>> {
        let arrays = &self.arrays;
        if let Some(names) = &self.names {
            let dirent = arrays.dirent(names.find(arrays, parent.0, name)?)?;
            return self.entry(Ino(dirent.ino.get()));
        }
        let siblings = arrays.child_numbers(parent.0);
        let mut numbers = siblings.clone();
        while !numbers.is_empty() {
            let middle = numbers.start + (numbers.end - numbers.start) / 2;
            let (found, ino) = arrays.child_by_rank(parent.0, middle, &siblings)?;
            match name.cmp(found) {
                Ordering::Less => numbers.end = middle,
                Ordering::Greater => numbers.start = middle + 1,
                Ordering::Equal => return self.entry(Ino(ino)),
            }
        }
        None
    }

    /// The entry at `path`, no link followed.
    pub fn find(&self, path: &ArchivePath) -> Option<Entry<'_>> {
        let mut components = path.components();
        components.try_fold(self.entry(Ino::ROOT)?, |entry, name| {
            self.lookup(entry.ino, name)
        })
    }

    /// Directory `parent`'s names in the order of their entries' first appearance, from the
    /// `from`th on; nothing for other entries. Who reads files in this order reads the archive from
    /// front to back.
    pub fn children(&self, parent: Ino, from: u32) -> impl Iterator<Item = Child<'_>> {
        let numbers = self.child_numbers(parent);
        let first = numbers.start;
        (first.saturating_add(from)..numbers.end).filter_map(move |number| {
            let (name, ino) = self.arrays.child(parent.0, number)?;
            Some(Child {
                name,
                ino: Ino(ino),
                number: number - first,
            })
        })
    }

    /// As [`Self::children`], in the order of the names' bytes.
    pub fn children_by_name(&self, parent: Ino, from: u32) -> impl Iterator<Item = Child<'_>> {
        let siblings = self.child_numbers(parent);
        let first = siblings.start;
        (first.saturating_add(from)..siblings.end).filter_map(move |number| {
            let (name, ino) = self.arrays.child_by_rank(parent.0, number, &siblings)?;
            Some(Child {
                name,
                ino: Ino(ino),
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
        self.arrays.path(self.arrays.record(ino.0)?.dirent.get())
    }

    /// Where the name under which `ino` first appeared is listed: its directory, and its number among
    /// that one's [`children`](Self::children); `None` while there are no listings.
    pub fn listing_position(&self, ino: Ino) -> Option<(Ino, u32)> {
        let number = self.arrays.record(ino.0)?.dirent.get();
        let parent = Ino(self.arrays.dirent(number)?.parent.get());
        let siblings = self.child_numbers(parent);
        let within = siblings.contains(&number);
        within.then(|| (parent, number - siblings.start))
    }

    /// Numbers given out: entries have numbers from 1 (the root) up to here, with gaps where a
    /// later member replaced one.
    pub fn last_ino(&self) -> Ino {
        let count = self.arrays.records.len();
        Ino(u32::try_from(count).map_or(NONE, |count| count.saturating_sub(1)))
    }

    /// Entries alive, the root included.
    pub fn entry_count(&self) -> u64 {
        self.totals.entries
    }

    /// Whether any entry has an extended attribute or ACL.
    pub fn has_xattrs(&self) -> bool {
        self.totals.has_xattrs
    }

    /// Whether any entry has the extended attribute `name`; looks at all there are.
    pub fn has_xattr(&self, name: &[u8]) -> bool {
        self.xattr_names().any(|known| known == name)
    }

    /// Names of extended attributes and pax keywords of ACLs of all entries, with repetitions.
    pub fn xattr_names(&self) -> impl Iterator<Item = &[u8]> {
        let names = self.arrays.xattrs.iter().map(|xattr| xattr.name);
        names.filter_map(|name| self.arrays.arena.name(name))
    }

    /// Bytes of all files, hard links counted once, holes not counted.
    pub fn stored_bytes(&self) -> u64 {
        self.totals.stored_bytes
    }

    /// Hard links of a layer to what it did not hold when they came, in its order: they mean what lies below
    /// it, or what the layer holds in the end. None of them is an entry.
    pub fn unresolved_links(&self) -> impl Iterator<Item = UnresolvedLink<'_>> {
        let rows = self.arrays.unresolved.iter();
        rows.filter_map(|row| {
            let parent = row.parent.get();
            let arena = &self.arrays.arena;
            let name = arena.name(row.name)?;
            let target = arena.bytes_at(row.target_offset.get(), row.target_len.get().into())?;
            let is_directory = self.arrays.record(parent)?.is_directory();
            let is_link = is_directory && arrays::is_valid_component(name) && !target.is_empty();
            is_link.then_some(UnresolvedLink {
                parent: Ino(parent),
                name,
                target,
            })
        })
    }

    /// What a layer removes of the layers below it.
    pub fn whiteouts(&self) -> impl Iterator<Item = Whiteout<'_>> {
        let rows = self.arrays.unresolved.iter();
        rows.filter(|row| row.target_len.get() == 0)
            .filter_map(|row| {
                let name = self.arrays.arena.name(row.name)?;
                let parent = row.parent.get();
                // Something may have replaced it.
                let is_directory = self.arrays.record(parent)?.is_directory();
                let is_name = name.is_empty() || arrays::is_valid_component(name);
                (is_directory && is_name).then_some(Whiteout {
                    parent: Ino(parent),
                    name: (!name.is_empty()).then_some(name),
                })
            })
    }

    /// What the index was made from.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The first members that are damaged or not in the tree.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// How many members are damaged or not in the tree.
    pub fn problem_count(&self) -> u64 {
        self.totals.problems
    }

    /// Counts the memory of the index against `limit` as long as the index lives.
    ///
    /// # Errors
    /// When the indexes that share the limit have more than it allows.
    pub fn charge_to(&mut self, limit: &MemoryLimit) -> Result<(), TooMuchMemory> {
        self.charge = limit.charge();
        self.charge.set(self.memory_bytes())
    }

    /// What the index holds on to, in bytes.
    pub fn memory_bytes(&self) -> usize {
        let names = self.names.as_ref().map_or(0, NameTable::memory_bytes);
        let replaced = self.replaced.as_ref().map_or(0, HashMap::capacity);
        self.arrays.memory_bytes() + names + replaced * (size_of::<InodeRow>() + 8)
    }

    /// How many spans the plain stream has.
    pub fn span_count(&self) -> u32 {
        u32::try_from(self.arrays.spans.len()).unwrap_or(u32::MAX)
    }

    /// The number of the span that holds plain byte `offset`; `None` past the end.
    pub fn span_at(&self, offset: Plain) -> Option<u32> {
        if offset.0 >= self.origin.plain_bytes {
            return None;
        }
        let spans = &self.arrays.spans;
        let after = spans.partition_point(|span| span.plain.get() <= offset.0);
        u32::try_from(after).ok()?.checked_sub(1)
    }

    /// The plain bytes of span `number`; `None` past the last or when damaged.
    pub fn span_extent(&self, number: u32) -> Option<Extent<Plain>> {
        let spans = &self.arrays.spans;
        let row = spans.get(number as usize)?;
        let next = spans.get(number as usize + 1);
        let end = next.map_or(self.origin.plain_bytes, |next| next.plain.get());
        Extent::new(Plain(row.plain.get()), Plain(end))
    }

    /// Where in the packed stream decoding can start for span `number`; `None` when it cannot.
    pub fn seek_offset(&self, number: u32) -> Option<Packed> {
        let row = self.arrays.spans.get(number as usize)?;
        (row.bit.get() != SpanRow::NO_SEEK_POINT).then(|| Packed(row.packed.get()))
    }

    /// Whether every packed byte has a digest and every span a hash, so that all bytes can be told
    /// from those of another version.
    pub fn is_hashed(&self) -> bool {
        let (mut spans, mut blocks) = (self.arrays.spans.iter(), self.arrays.blocks.iter());
        self.digested.0 >= self.origin.packed_bytes
            && blocks.all(|digest| *digest != blocks::UNKNOWN_DIGEST)
            && spans.all(|row| row.flags.get() & SpanRow::UNHASHED == 0)
    }

    /// Notes that the packed bytes up to `end` were skipped: what was not digested by now is not.
    fn skip_blocks(&mut self, end: Packed) {
        let rows = &mut self.arrays.blocks;
        // The digest of a block's front is not the block's.
        rows.truncate(blocks::block_count(self.digested.0 / self.block_len));
        let count = blocks::block_count(end.0.div_ceil(self.block_len));
        rows.resize(count, blocks::UNKNOWN_DIGEST);
        self.digested = end;
    }

    /// The length of the blocks that have digests, in bytes.
    pub fn block_len(&self) -> u64 {
        self.block_len
    }

    /// The blocks that hold the bytes of `extent`, as far as their digests are known: without a
    /// scan that goes on these are all blocks up to the end of the packed stream.
    pub fn blocks(&self, extent: Extent<Packed>) -> Option<Blocks> {
        Blocks::of(self, extent)
    }

    /// Whether decoding refers, at some seek point, to plain bytes before it.
    pub fn has_windows(&self) -> bool {
        !self.arrays.windows.0.is_empty()
    }

    /// Span `number`, its window as the codec packed it; `None` past the last or when damaged.
    pub fn span(&self, number: u32) -> Option<Span> {
        let row = self.arrays.spans.get(number as usize)?;
        Some(Span {
            number,
            plain: self.span_extent(number)?,
            hash: match row.flags.get() & SpanRow::UNHASHED {
                0 => Some(span_hash::of_checksums(
                    self.span_checksums(number)?.checksums(),
                )),
                _ => None,
            },
            seek_point: match row.bit.get() {
                SpanRow::NO_SEEK_POINT => None,
                bit => Some(self.seek_point(row, u8::try_from(bit).ok()?)?),
            },
        })
    }

    /// The checksums of the blocks of span `number`; `None` when it has none, or the index is damaged.
    pub fn span_checksums(&self, number: u32) -> Option<SpanChecksums<'_>> {
        SpanChecksums::of(self, number)
    }

    fn seek_point(&self, row: &SpanRow, bit: u8) -> Option<SeekPoint> {
        let (offset, len) = (row.window_offset.get(), row.window_len.get());
        let window = self.arrays.windows.bytes_at(offset, len.into())?;
        Some(SeekPoint {
            packed: Packed(row.packed.get()),
            bit,
            plain: Plain(row.plain.get()),
            state: row.state.get(),
            window: Bytes::copy_from_slice(window),
        })
    }
}

impl<'a> Entry<'a> {
    /// Its number.
    pub fn ino(&self) -> Ino {
        self.ino
    }

    /// What it is.
    pub fn kind(&self) -> Kind<'a> {
        match self.record.kind() {
            DIRECTORY => Kind::Directory,
            SYMLINK => Kind::Symlink(self.target()),
            CHAR_DEVICE => Kind::CharDevice(self.record.device()),
            BLOCK_DEVICE => Kind::BlockDevice(self.record.device()),
            FIFO => Kind::Fifo,
            _ => Kind::File,
        }
    }

    fn target(&self) -> &'a [u8] {
        let arena = &self.arrays.arena;
        let target = arena.bytes_at(self.record.data.get(), self.record.size.get());
        target.unwrap_or_default()
    }

    /// Permission bits, the low twelve.
    pub fn mode(&self) -> u32 {
        u32::from(self.record.mode.get() & 0o7777)
    }

    /// Owner.
    pub fn uid(&self) -> u32 {
        self.record.uid.get()
    }

    /// Group.
    pub fn gid(&self) -> u32 {
        self.record.gid.get()
    }

    /// Owner's name as the archive gives it; empty when it gives none.
    pub fn user(&self) -> &'a [u8] {
        self.owner(self.record.user.get())
    }

    /// Group's name as the archive gives it; empty when it gives none.
    pub fn group(&self) -> &'a [u8] {
        self.owner(self.record.group.get())
    }

    fn owner(&self, row: u16) -> &'a [u8] {
        let arrays = self.arrays;
        let name = arrays.owners.get(usize::from(row));
        name.and_then(|&name| arrays.arena.name(name))
            .unwrap_or_default()
    }

    /// Bytes as a reader sees them; the target's length of a symbolic link; 0 for all else.
    pub fn size(&self) -> u64 {
        match self.record.kind() {
            FILE | SYMLINK => self.record.size.get(),
            _ => 0,
        }
    }

    /// Bytes that are stored, holes left out.
    pub fn stored_bytes(&self) -> u64 {
        stored_bytes(self.arrays, self.record)
    }

    /// Whether it is a directory that only the paths of what lies in it speak of.
    pub fn is_implied(&self) -> bool {
        self.record.is_directory() && self.record.flags.get() & InodeRow::IMPLIED != 0
    }

    /// Whether it is a directory of a layer that only whiteouts below it speak of: the layer has none there.
    pub fn is_whiteout_only(&self) -> bool {
        self.record.is_whiteout_only()
    }

    /// Time of last modification.
    pub fn mtime(&self) -> Timestamp {
        self.record.mtime()
    }

    /// Names of this entry; of a directory 2 and one for every directory in it.
    pub fn link_count(&self) -> u32 {
        self.record.links.get()
    }

    /// How many names a directory has; 0 for all else.
    pub fn child_count(&self) -> u32 {
        self.arrays
            .child_numbers(self.ino.0)
            .len()
            .try_into()
            .unwrap_or(u32::MAX)
    }

    /// The directory in which it first appeared; the root's is the root.
    pub fn parent(&self) -> Ino {
        let dirent = self.arrays.dirent(self.record.dirent.get());
        dirent.map_or(Ino::ROOT, |dirent| Ino(dirent.parent.get()))
    }

    /// Extended attributes by name; ACLs under their pax keywords, as text (see [`crate::tar::Member::xattrs`]).
    pub fn xattrs(&self) -> impl Iterator<Item = (&'a [u8], &'a [u8])> + use<'a> {
        self.arrays.xattrs(self.record.extra.get())
    }

    /// The stored pieces of a file's content that touch `offset..offset + len`, ascending, whole.
    pub fn pieces(&self, offset: u64, len: u64) -> impl Iterator<Item = Piece> + use<'a> {
        let size = self.size();
        let end = offset.saturating_add(len);
        let rows = self.rows().map(|(first, rest)| {
            let after = |row: &PieceRow| row.offset.get().saturating_add(row.len.get()) <= offset;
            let skipped = rest.partition_point(after);
            first
                .into_iter()
                .chain(rest.get(skipped..).unwrap_or_default().iter().copied())
        });
        rows.into_iter()
            .flatten()
            .scan(0, move |previous_end, row| {
                let piece_end = row.offset.get().checked_add(row.len.get())?;
                row.plain.get().checked_add(row.len.get())?;
                let ordered = *previous_end <= row.offset.get() && piece_end <= size;
                *previous_end = piece_end;
                ordered.then_some(row)
            })
            .filter(move |row| {
                row.len.get() > 0 && row.offset.get().saturating_add(row.len.get()) > offset
            })
            .take_while(move |row| row.offset.get() < end)
            .map(|row| Piece {
                offset: row.offset.get(),
                plain: Extent::with_len(Plain(row.plain.get()), row.len.get()),
            })
    }

    /// A file's pieces as rows: one of its own making when it is not sparse, or those of its map.
    fn rows(&self) -> Option<(Option<PieceRow>, &'a [PieceRow])> {
        if self.record.kind() != FILE {
            return None;
        }
        let map = self.arrays.sparse_pieces(self.record.extra.get());
        Some(match map {
            Some(map) => (None, map),
            None => (Some(whole(self.record)), &[]),
        })
    }
}

/// The one piece of a file without a map.
fn whole(record: &InodeRow) -> PieceRow {
    PieceRow {
        offset: 0.into(),
        plain: record.data,
        len: record.size,
    }
}

fn stored_bytes(arrays: &Arrays, record: &InodeRow) -> u64 {
    if record.kind() != FILE {
        return 0;
    }
    match arrays.extras.get(record.extra.get() as usize) {
        Some(extra) if extra.sparse.get() == 1 => extra.stored_bytes.get(),
        _ => record.size.get(),
    }
}
