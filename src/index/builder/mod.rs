//! Builds the tree that GNU tar would leave on disk from members in archive order.
//!
//! Later members replace earlier ones as `tar -x` replaces files. A new entry gets a new number, and its
//! hard-linked siblings keep the old one. A directory over a directory updates it, and nothing replaces one
//! that is not empty. Unlike in GNU tar, a hard link may precede its target, and missing parents are created
//! even through symbolic links.
//!
//! For a layer ([`Options::whiteouts`]) the tree is what `umoci unpack` and containerd make of its members
//! alone. Anything replaces a directory. A hard link to a missing target links to that of the lower layers.

pub(super) mod build_tree;
pub(super) mod forward_links;
pub(super) mod inode_rows;
mod links;

use self::forward_links::ForwardLinks;

use std::mem;

use self::build_tree::{BuildTree, CreatingResolver, MemberError, Options, ROOT};
use crate::base::NAME_MAX;
use crate::base::archive_path::ArchivePath;
use crate::base::escape::escape;
use crate::base::extent::{Extent, Packed, Plain};
use crate::base::resolve;
use crate::codec::{Compression, SeekPoint};
use crate::index::arrays::row_table::RowTable;
use crate::index::arrays::sort::SortedNames;
use crate::index::arrays::{MAX_MEMBER_PATH_BYTES, NameTable, capacity_bytes, push_row};
use crate::index::blocks::{self, NewDigests};
use crate::index::memory_limit::{Charge, MemoryLimit, TooMuchMemory};
use crate::index::problem::Problem;
use crate::index::storage::row_types::{DIRECTORY, InodeRow, SpanRow, UnresolvedRow};
use crate::index::tree::{Index, Ino, Origin, Totals};
use crate::index::whiteouts::NameKind;
use crate::tar::{Member, MemberKind};

/// The effect of a member on the tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placement {
    /// Created this entry, or updated it (a directory).
    Entry(Ino),
    /// Added a name to this entry.
    Link(Ino),
    /// Added a name whose target [`Builder::finish`] finds, in a layer perhaps in a layer below.
    Forward,
    /// Removed an entry of lower layers.
    Whiteout,
}

/// State of the completion of an index. Afterwards it has the old names, which take long to free.
#[derive(Debug)]
pub(crate) struct Completion {
    names: SortedNames,
    totals: Totals,
    old_names: Option<NameTable>,
}

/// Builds an index in one pass, with at most 160 bytes per entry besides the names.
#[derive(Debug)]
pub struct Builder {
    tree: BuildTree,
    owners: RowTable,
    /// Rows of extras without a sparse map, by their set of attributes.
    attribute_sets: RowTable,
    forward: ForwardLinks,
    charge: Charge,
    /// Not returned by [`take_problems`](Self::take_problems) yet.
    unreported: Vec<Problem>,
}

impl Builder {
    /// An empty tree: a root, mode 0755, owned by 0:0.
    pub fn new(options: Options) -> Self {
        Self {
            tree: BuildTree::new(options),
            owners: RowTable::new(),
            attribute_sets: RowTable::new(),
            forward: ForwardLinks::default(),
            charge: MemoryLimit::none().charge(),
            unreported: Vec::new(),
        }
    }

    /// Counts the memory of the builder, and later of its index, against `limit`.
    #[must_use]
    pub fn with_memory_limit(mut self, limit: &MemoryLimit) -> Self {
        self.charge = limit.charge();
        self
    }

    /// Counts the current memory of the builder.
    ///
    /// # Errors
    /// When it exceeds the limit.
    pub fn check_memory(&mut self) -> Result<(), TooMuchMemory> {
        let bytes = self.memory_bytes();
        self.charge.set(bytes as u64)
    }

    /// The index so far, without listings, and with replaced entries if [`Options::keeps_replaced`].
    pub fn index(&self) -> &Index {
        &self.tree.index
    }

    /// Sets the source's compression, and its length if known, for readers before the end of the scan.
    pub fn set_compression(&mut self, compression: Compression, packed_bytes: Option<u64>) {
        let origin = &mut self.tree.index.origin;
        origin.compression = compression;
        origin.packed_bytes = packed_bytes.unwrap_or(u64::MAX);
    }

    /// Adds the next member.
    ///
    /// # Errors
    /// When the tree cannot contain it. Then it becomes a problem, and the previous entry stays.
    pub fn add_member(&mut self, member: &Member) -> Result<Placement, MemberError> {
        let name = ArchivePath::sanitize(&member.name);
        let is_root = name.path.is_root() && !name.has_parent_component;
        let totals = &mut self.tree.index.totals;
        totals.has_global_keywords |= member.has_global_keywords;
        totals.file_bytes = totals.file_bytes.saturating_add(member.size);
        let counted = if is_root {
            Ok(())
        } else {
            self.tree.count_member()
        };
        let placed = if let Err(error) = counted {
            Err(error)
        } else if name.has_parent_component {
            Err(MemberError::ParentComponent)
        } else if let Some((directory, meaning)) = self.whiteout(&name.path) {
            self.insert_whiteout(&directory, meaning)
        } else {
            self.insert(&name.path, member)
        };
        if let Err(error) = placed
            && (error == MemberError::TooManyEntries || !self.is_hidden(&name.path))
        {
            let what = match error {
                // The path lacks the component.
                MemberError::ParentComponent => {
                    format!("{error}: {}", escape(&member.name))
                }
                error => error.to_string(),
            };
            self.add_problem(Problem {
                path: Some(name.path),
                offset: Some(member.header),
                what,
            });
        }
        placed
    }

    /// Entries whose attributes changed since the last call, up to a limit. Not new entries, nor directories
    /// with one more subdirectory.
    pub fn take_dirty_inodes(&mut self) -> Vec<Ino> {
        mem::take(&mut self.tree.dirty)
    }

    /// Records a member that is damaged or not in the tree.
    pub fn add_problem(&mut self, problem: Problem) {
        let index = &mut self.tree.index;
        index.totals.problems += 1;
        if index.totals.problems <= self.tree.options.max_reported_problems {
            self.unreported.push(problem.clone());
        }
        if index.problems.len() < self.tree.options.max_problems {
            index.problems.push(problem);
        }
    }

    /// New problems since the last call, of the first [`Options::max_reported_problems`].
    pub fn take_problems(&mut self) -> Vec<Problem> {
        mem::take(&mut self.unreported)
    }

    /// Appends a span, with the checksums of its blocks if the scan read its bytes. The caller adds spans in
    /// order and without gaps, so bytes between two belong to the first.
    pub fn add_span(
        &mut self,
        plain: Extent<Plain>,
        checksums: Option<&[u64]>,
        seek_point: Option<&SeekPoint>,
    ) {
        let arrays = &mut self.tree.index.arrays;
        let mut row = SpanRow {
            plain: plain.start().0.into(),
            checksum: (arrays.checksums.len() as u64).into(),
            bit: SpanRow::NO_SEEK_POINT.into(),
            flags: checksums.map_or(SpanRow::UNHASHED, |_| 0).into(),
            ..SpanRow::default()
        };
        for &checksum in checksums.unwrap_or_default() {
            push_row(arrays.checksums.vec_mut(), checksum.into());
        }
        if let Some(point) = seek_point
            && let Ok(window_len) = u32::try_from(point.window.len())
        {
            row.packed = point.packed.0.into();
            row.window_offset = (arrays.windows.push(&point.window) as u64).into();
            row.window_len = window_len.into();
            row.state = point.state.into();
            row.bit = u32::from(point.bit).into();
        }
        push_row(arrays.spans.vec_mut(), row);
        let index = &mut self.tree.index;
        index.origin.plain_bytes = plain.end().0;
        // The scan skips bytes only in uncompressed archives.
        if checksums.is_none() && index.origin.compression == Compression::None {
            index.skip_blocks(Packed(plain.end().0));
        }
    }

    /// Marks all of the packed stream as bytes without digests of their blocks.
    pub(in crate::index) fn add_undigested(&mut self, packed_bytes: u64) {
        let index = &mut self.tree.index;
        index.block_len = blocks::block_len(Some(packed_bytes));
        index.skip_blocks(Packed(packed_bytes));
    }

    /// Adds digests of blocks of the packed stream. Blocks in a gap before them get none.
    pub fn add_digests(&mut self, new: &NewDigests) {
        let index = &mut self.tree.index;
        index.block_len = new.block_len;
        index
            .arrays
            .blocks
            .vec_mut()
            .resize(blocks::block_count(new.first), blocks::UNKNOWN_DIGEST);
        for &digest in &new.digests {
            push_row(index.arrays.blocks.vec_mut(), digest);
        }
        index.digested = new.end;
    }

    /// Memory of the builder in bytes: capacities, not lengths, and what it takes to complete the index.
    pub fn memory_bytes(&self) -> usize {
        self.tree.index.memory_bytes()
            + SortedNames::memory_bytes(&self.tree.index.arrays)
            + self.owners.memory_bytes()
            + self.attribute_sets.memory_bytes()
            + capacity_bytes(&self.forward.links)
            + capacity_bytes(&self.forward.waiting)
    }

    /// Resolves forward links and returns the index.
    pub fn finish(mut self, origin: Origin) -> Index {
        while self.resolve_forward_links() {}
        let mut completion = self.prepare_completion();
        while self.apply(&mut completion) {}
        self.complete(&mut completion, origin);
        self.into_index()
    }

    /// Does what takes long before the index is complete, and needs no exclusive access. The tree must not change
    /// any more, but for [`apply`](Self::apply).
    pub(crate) fn prepare_completion(&self) -> Completion {
        let Index { arrays, totals, .. } = &self.tree.index;
        Completion {
            names: SortedNames::of(arrays),
            totals: totals.recount(arrays),
            old_names: None,
        }
    }

    /// Applies a small step of the completion. Returns whether there are more.
    pub(crate) fn apply(&mut self, completion: &mut Completion) -> bool {
        completion.names.apply(&mut self.tree.index.arrays)
    }

    /// Completes the index after the last step.
    pub(crate) fn complete(&mut self, completion: &mut Completion, origin: Origin) {
        let index = &mut self.tree.index;
        completion.names.complete(&mut index.arrays);
        completion.old_names = index.names.take();
        index.totals = completion.totals;
        index.origin = origin;
        // The index is smaller than the builder, so the limit holds.
        let _is_less = self.charge.set(index.memory_bytes() as u64).is_ok();
    }

    /// The index of a [completed](Self::complete) builder.
    pub(crate) fn into_index(self) -> Index {
        Index {
            charge: self.charge,
            ..self.tree.index
        }
    }

    fn insert(&mut self, path: &ArchivePath, member: &Member) -> Result<Placement, MemberError> {
        let kind = &member.kind;
        let Some((directory, name)) = path.split_last() else {
            if *kind != MemberKind::Directory {
                return Err(MemberError::RootNotDirectory);
            }
            self.update_directory(ROOT, member);
            return Ok(Placement::Entry(Ino::ROOT));
        };
        let is_layer = self.tree.is_layer();
        let header = member.header.0;
        check_path_len(path)?;
        let parent = self.make_parent(&directory, name, kind)?;
        if let MemberKind::HardLink(target) = kind {
            let target = ArchivePath::sanitize(target).path;
            return if is_layer {
                self.insert_layer_link((parent, name), &target, header)
            } else {
                self.insert_link((parent, name), &target, header)
            };
        }
        let existing = self.tree.find(parent, name);
        if let Some(number) = existing
            && *kind == MemberKind::Directory
        {
            let ino = self.tree.dirent(number).ino.get();
            if self.tree.inode(ino).is_directory() {
                self.update_directory(ino, member);
                return Ok(Placement::Entry(Ino(ino)));
            }
        }
        let inode = self.new_inode(kind, member)?;
        let Some(number) = existing else {
            let ino = self.tree.add(parent, name, inode)?;
            return Ok(Placement::Entry(Ino(ino)));
        };
        let ino = self.tree.replace(number, inode)?;
        if is_layer && *kind == MemberKind::Directory {
            // The replaced entry had removed that of lower layers, even a directory.
            self.add_whiteout(ino, b"")?;
        }
        Ok(Placement::Entry(Ino(ino)))
    }

    /// Resolves the path `directory` of a member called `name`, and creates what is missing. A link on the way in whose
    /// place the member is becomes a directory, as if the member had removed it before. A layer only replaces it, as
    /// programs that apply layers do.
    fn make_parent(
        &mut self,
        directory: &ArchivePath,
        name: &[u8],
        kind: &MemberKind,
    ) -> Result<u32, MemberError> {
        loop {
            let mut growing = CreatingResolver(&mut self.tree);
            let components = directory.components();
            let (parent, is_own_link) = resolve::parent(&mut growing, components, name)?;
            let own_link = self.tree.find(parent, name);
            match own_link.filter(|_| is_own_link && !self.tree.is_layer()) {
                Some(number) if self.is_replaced_by(number, kind)? => {
                    self.tree.count_member()?;
                    self.tree.replace(number, InodeRow::implied_directory())?;
                }
                _ => return Ok(parent),
            }
        }
    }

    /// Parses `path` as a whiteout: directory and meaning; `None` for an entry.
    fn whiteout<'p>(&self, path: &'p ArchivePath) -> Option<(ArchivePath, NameKind<'p>)> {
        let (directory, name) = path.split_last()?;
        match self.tree.options.whiteouts?.classify_name(name) {
            NameKind::Entry => None,
            meaning => Some((directory, meaning)),
        }
    }

    /// Whether the layer does not show `path`, because a component is reserved for whiteouts.
    fn is_hidden(&self, path: &ArchivePath) -> bool {
        let whiteouts = self.tree.options.whiteouts;
        whiteouts.is_some_and(|format| path.components().any(|name| format.is_reserved_name(name)))
    }

    /// Adds a whiteout in the literal path `directory`. Another type there already hides all entries below.
    fn insert_whiteout(
        &mut self,
        directory: &ArchivePath,
        meaning: NameKind<'_>,
    ) -> Result<Placement, MemberError> {
        let name = match meaning {
            NameKind::Whiteout(b"" | b"." | b"..") | NameKind::Entry => None,
            NameKind::Whiteout(name) => Some(name),
            NameKind::Opaque => Some(&b""[..]),
        };
        let is_hidden = self.is_hidden(directory);
        // No entry can have such a long name.
        let longest = directory.components().chain(name).map(<[u8]>::len).max();
        let Some(name) = name.filter(|_| !is_hidden && longest <= Some(NAME_MAX)) else {
            return Ok(Placement::Whiteout);
        };
        check_path_len(directory)?;
        let mut ino = ROOT;
        for component in directory.components() {
            let unseen = InodeRow {
                flags: (InodeRow::IMPLIED | InodeRow::WHITEOUT_ONLY).into(),
                ..InodeRow::implied_directory()
            };
            ino = match self.tree.find(ino, component) {
                Some(number) => self.tree.dirent(number).ino.get(),
                None => self.tree.add(ino, component, unseen)?,
            };
            if !self.tree.inode(ino).is_directory() {
                return Ok(Placement::Whiteout);
            }
        }
        self.add_whiteout(ino, name)?;
        Ok(Placement::Whiteout)
    }

    /// Records that directory `ino` hides `name` of lower layers, or all names if it is empty.
    fn add_whiteout(&mut self, ino: u32, name: &[u8]) -> Result<(), MemberError> {
        self.tree.check_capacity(name)?;
        let arrays = &mut self.tree.index.arrays;
        let row = UnresolvedRow {
            name: arrays.arena.push_name(name),
            parent: ino.into(),
            ..UnresolvedRow::default()
        };
        push_row(arrays.unresolved.vec_mut(), row);
        Ok(())
    }

    fn update_directory(&mut self, ino: u32, member: &Member) {
        let mut attributes = self.attributes(DIRECTORY, member);
        attributes.size = member.header.0.into();
        let inode = self.tree.inode_mut(ino);
        attributes.links = inode.links;
        attributes.children = inode.children;
        attributes.dirent = inode.dirent;
        *inode = attributes;
        self.tree.mark_dirty(ino);
    }
}

fn check_path_len(path: &ArchivePath) -> Result<(), MemberError> {
    if path.as_bytes().len() > MAX_MEMBER_PATH_BYTES {
        return Err(MemberError::NameTooLong);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
