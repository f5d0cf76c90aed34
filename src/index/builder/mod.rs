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

use std::mem;

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use self::build_tree::{
    BuildTree, CreatingResolver, MAX_NAME_BYTES, MemberError, NameError, Options, ROOT,
    TargetResolver, check_kind, implied_directory,
};
use crate::base::archive_path::ArchivePath;
use crate::base::escape::escape;
use crate::base::extent::{Extent, Packed, Plain};
use crate::base::resolve::{self, PathError, ResolveError};
use crate::base::xattr::XATTR_NAME_MAX;
use crate::codec::{Compression, SeekPoint};
use crate::index::arrays::row_table::RowTable;
use crate::index::arrays::sort::SortedNames;
use crate::index::arrays::{MAX_MEMBER_PATH_BYTES, NameTable, capacity_bytes, push_row};
use crate::index::blocks::{self, NewDigests};
use crate::index::memory_limit::{Charge, MemoryLimit, TooMuchMemory};
use crate::index::problem::Problem;
use crate::index::storage::row_types::{
    BLOCK_DEVICE, CHAR_DEVICE, DIRECTORY, Dirent, ExtraRow, FIFO, FILE, FORWARD_LINK, InodeRow,
    LinkRow, NONE, PieceRow, SYMLINK, SpanRow, UnresolvedRow,
};
use crate::index::tree::{Index, Ino, Origin, Totals};
use crate::index::whiteouts::NameKind;
use crate::tar::{Member, MemberKind, RECORD, Segment};

/// Maximum number of passes over forward hard links, first and last link in turn; usually one resolves all.
/// Each pass resolves at least one of those that wait for each other.
pub(crate) const MAX_FORWARD_LINK_PASSES: usize = 40;

/// Forward links that one step of [`Builder::resolve_forward_links`] looks up.
const FORWARD_LINKS_PER_STEP: usize = 1024;

/// Maximum bytes of the name of a user or group; longer ones are dropped. `useradd` takes 32.
pub(in crate::index) const MAX_OWNER_NAME_BYTES: usize = 1024;

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

enum LinkTarget {
    Entry(u32),
    /// No entry yet, or a link whose own target is missing.
    Missing,
    /// Not known yet, because the path leads through a link without a target.
    ThroughForwardLink,
}

/// Hard links that precede their targets.
#[derive(Debug, Default)]
struct ForwardLinks {
    /// Not looked up in this pass yet, the next one last.
    links: Vec<u32>,
    /// Those of this pass whose targets are missing.
    waiting: Vec<u32>,
    /// Number of links of the last pass.
    pass_len: Option<usize>,
    passes: usize,
    /// Whether the remaining links have no targets.
    is_last_pass: bool,
}

impl ForwardLinks {
    /// Begins a pass over the links that wait. Returns false if there are none.
    fn begin_pass(&mut self) -> bool {
        self.links = mem::take(&mut self.waiting);
        self.passes += 1;
        let len = self.links.len();
        let is_stuck = self.pass_len.replace(len) == Some(len);
        if is_stuck || self.passes == MAX_FORWARD_LINK_PASSES {
            self.is_last_pass = true;
            // The first one first.
            self.links.reverse();
        }
        len > 0
    }
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
                    self.tree.replace(number, implied_directory())?;
                }
                _ => return Ok(parent),
            }
        }
    }

    /// Whether a member of `kind` replaces the link whose dirent is `number`.
    fn is_replaced_by(&self, number: u32, kind: &MemberKind) -> Result<bool, MemberError> {
        check_kind(kind)?;
        let MemberKind::HardLink(target) = kind else {
            return Ok(true);
        };
        let target = ArchivePath::sanitize(target).path;
        check_path_len(&target)?;
        Ok(match self.find_link_target(&target)? {
            LinkTarget::Entry(ino) => {
                ino != self.tree.dirent(number).ino.get() && !self.tree.inode(ino).is_directory()
            }
            LinkTarget::Missing | LinkTarget::ThroughForwardLink => false,
        })
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
        let Some(name) = name.filter(|_| !is_hidden && longest <= Some(MAX_NAME_BYTES)) else {
            return Ok(Placement::Whiteout);
        };
        check_path_len(directory)?;
        let mut ino = ROOT;
        for component in directory.components() {
            let unseen = InodeRow {
                flags: (InodeRow::IMPLIED | InodeRow::WHITEOUT_ONLY).into(),
                ..implied_directory()
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

    /// Adds a name for `target`, if it exists, even over another entry, as in GNU tar.
    fn insert_link(
        &mut self,
        (parent, name): (u32, &[u8]),
        target: &ArchivePath,
        header: u64,
    ) -> Result<Placement, MemberError> {
        check_path_len(target)?;
        let existing = self.tree.find(parent, name);
        let LinkTarget::Entry(ino) = self.find_link_target(target)? else {
            return match existing {
                Some(_) => Err(MemberError::MissingTarget),
                None => self.insert_forward_link((parent, name), target, None, header),
            };
        };
        self.link_name((parent, name), existing, ino, header)?;
        Ok(Placement::Link(Ino(ino)))
    }

    fn link_name(
        &mut self,
        (parent, name): (u32, &[u8]),
        existing: Option<u32>,
        ino: u32,
        header: u64,
    ) -> Result<(), MemberError> {
        let number = match existing {
            // Also for a directory's own name.
            Some(number) if self.tree.dirent(number).ino.get() == ino => return Ok(()),
            _ if self.tree.inode(ino).is_directory() => return Err(MemberError::LinkToDirectory),
            Some(number) => {
                self.tree.relink(number, ino)?;
                number
            }
            None => self.tree.link(parent, name, ino)?,
        };
        self.add_link_row(number, header);
        Ok(())
    }

    /// Records where the header of the hard link that is dirent `number` begins.
    fn add_link_row(&mut self, number: u32, header: u64) {
        let row = LinkRow {
            name_offset: self.tree.dirent(number).name.offset().into(),
            header: header.into(),
        };
        push_row(self.tree.index.arrays.links.vec_mut(), row);
    }

    /// Adds a name for the entry at `target` in the layer so far, or else in the lower layers.
    fn insert_layer_link(
        &mut self,
        (parent, name): (u32, &[u8]),
        target: &ArchivePath,
        header: u64,
    ) -> Result<Placement, MemberError> {
        check_path_len(target)?;
        let Some((directory, target_name)) = target.split_last() else {
            return Err(MemberError::LinkToDirectory);
        };
        let way =
            resolve::directory_with_path(&mut TargetResolver(&self.tree), directory.components());
        let (directory, mut target) = match way {
            Ok(found) => found,
            Err(ResolveError::Path(refusal)) => return Err(refusal.into()),
            Err(ResolveError::Tree(_)) => return Err(MemberError::MissingTarget),
        };
        target.push(target_name);
        let existing = self.tree.find(parent, name);
        let found = directory.and_then(|directory| self.tree.find(directory, target_name));
        let found = found.map(|number| self.tree.dirent(number).ino.get());
        let Some(ino) = found.filter(|&ino| !self.tree.inode(ino).is_whiteout_only()) else {
            return self.insert_forward_link((parent, name), &target, existing, header);
        };
        self.link_name((parent, name), existing, ino, header)?;
        if self.tree.is_forward_link(ino) {
            return Ok(Placement::Forward);
        }
        Ok(Placement::Link(Ino(ino)))
    }

    /// Gives a link whose target may still appear the name `name`, whose present dirent is `existing`.
    fn insert_forward_link(
        &mut self,
        (parent, name): (u32, &[u8]),
        target: &ArchivePath,
        existing: Option<u32>,
        header: u64,
    ) -> Result<Placement, MemberError> {
        let target = target.as_bytes();
        let inode = InodeRow {
            mode: FORWARD_LINK.into(),
            data: (self.tree.index.arrays.arena.push(target) as u64).into(),
            // A path has at most 65,535 bytes.
            children: u32::try_from(target.len()).unwrap_or_default().into(),
            size: header.into(),
            ..InodeRow::default()
        };
        let ino = match existing {
            Some(number) => self.tree.replace(number, inode)?,
            None => self.tree.add(parent, name, inode)?,
        };
        push_row(&mut self.forward.links, ino);
        Ok(Placement::Forward)
    }

    fn find_link_target(&self, path: &ArchivePath) -> Result<LinkTarget, MemberError> {
        let Some((directory, name)) = path.split_last() else {
            return Ok(LinkTarget::Entry(ROOT));
        };
        let parent =
            match resolve::directory(&mut TargetResolver(&self.tree), directory.components()) {
                Ok(parent) => parent,
                Err(ResolveError::Tree(NameError::Missing)) => return Ok(LinkTarget::Missing),
                Err(ResolveError::Tree(NameError::Forward)) => {
                    return Ok(LinkTarget::ThroughForwardLink);
                }
                Err(ResolveError::Path(refusal)) => return Err(refusal.into()),
            };
        let number = parent.and_then(|parent| self.tree.find(parent, name));
        let ino = number.map(|number| self.tree.dirent(number).ino.get());
        let ino = ino.filter(|&ino| !self.tree.is_forward_link(ino));
        Ok(ino.map_or(LinkTarget::Missing, LinkTarget::Entry))
    }

    /// Resolves the next forward links after the last member, the last one first, as on disk. Retries links that
    /// wait for other links. Links without a target become problems. Returns whether there are more.
    pub fn resolve_forward_links(&mut self) -> bool {
        if self.tree.is_layer() {
            self.finish_layer();
            return false;
        }
        for _ in 0..FORWARD_LINKS_PER_STEP {
            let Some(ino) = self.forward.links.pop() else {
                if !self.forward.begin_pass() {
                    return false;
                }
                continue;
            };
            if self.forward.is_last_pass {
                self.drop_link_without_target(ino);
            } else if !self.resolve_forward_link(ino) {
                self.forward.waiting.push(ino);
            }
        }
        true
    }

    fn drop_link_without_target(&mut self, ino: u32) {
        let error = match self.find_link_target(&self.target_path(ino)) {
            Ok(LinkTarget::ThroughForwardLink) => {
                MemberError::Unreachable(PathError::NotADirectory)
            }
            _ => MemberError::MissingTarget,
        };
        self.drop_link(ino, error);
    }

    /// Whether the link no longer waits for its target.
    fn resolve_forward_link(&mut self, forward: u32) -> bool {
        if !self.tree.is_forward_link(forward) {
            // A later member replaced it.
            return true;
        }
        let InodeRow { dirent, size, .. } = *self.tree.inode(forward);
        let number = dirent.get();
        let resolved = match self.find_link_target(&self.target_path(forward)) {
            Ok(LinkTarget::Missing | LinkTarget::ThroughForwardLink) => return false,
            Ok(LinkTarget::Entry(ino)) if self.tree.inode(ino).is_directory() => {
                Err(MemberError::LinkToDirectory)
            }
            Ok(LinkTarget::Entry(ino)) => {
                let relinked = self.tree.relink(number, ino);
                relinked.inspect(|()| self.add_link_row(number, size.get()))
            }
            Err(error) => Err(error),
        };
        if let Err(error) = resolved {
            self.drop_link(forward, error);
        }
        true
    }

    fn target_path(&self, forward: u32) -> ArchivePath {
        let inode = self.tree.inode(forward);
        let target = self.tree.index.arrays.target(inode);
        ArchivePath::sanitize(target.unwrap_or_default()).path
    }

    fn drop_link(&mut self, forward: u32, error: MemberError) {
        let number = self.tree.inode(forward).dirent.get();
        let dirent = self.tree.dirent(number);
        let directory = self.tree.inode(dirent.parent.get()).dirent.get();
        let arrays = &self.tree.index.arrays;
        let mut path = arrays.path(directory).unwrap_or_default();
        path.push(arrays.arena.name(dirent.name).unwrap_or_default());
        self.add_problem(Problem {
            path: Some(path),
            offset: None,
            what: error.to_string(),
        });
        self.tree.unlink(number);
    }

    /// Turns forward links into links to the layers below.
    fn finish_layer(&mut self) {
        self.tree.prune_replaced_directories();
        if mem::take(&mut self.forward).links.is_empty() {
            return;
        }
        for number in 0..self.tree.dirent_count() {
            let Dirent { name, ino, parent } = *self.tree.dirent(number);
            if ino.get() == 0 || !self.tree.is_forward_link(ino.get()) {
                continue;
            }
            let inode = *self.tree.inode(ino.get());
            let row = UnresolvedRow {
                name,
                target_offset: inode.data,
                target_len: inode.children,
                parent,
            };
            push_row(self.tree.index.arrays.unresolved.vec_mut(), row);
            if inode.dirent.get() == number {
                // Further names have rows of their own.
                self.add_link_row(number, inode.size.get());
            }
            self.tree.unlink(number);
        }
        let links = self.tree.index.arrays.links.vec_mut();
        // A replaced link of the same name has an earlier header.
        links.sort_unstable_by_key(|link| (link.name_offset.get(), link.header.get()));
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

    fn new_inode(&mut self, kind: &MemberKind, member: &Member) -> Result<InodeRow, MemberError> {
        check_kind(kind)?;
        let mut inode = self.attributes(type_bits(kind), member);
        inode.size = member.header.0.into();
        match kind {
            MemberKind::File => {
                inode.data = member.payload.start().0.into();
                inode.size = member.size.into();
                let headers = member.payload.start().0.saturating_sub(member.header.0);
                inode.children = u32::try_from(headers / RECORD).unwrap_or_default().into();
                let totals = &mut self.tree.index.totals;
                totals.stored_bytes = totals.stored_bytes.saturating_add(member.payload.len());
                if let Some(map) = &member.sparse {
                    inode.extra = self.sparse_map(inode.extra.get(), member, map)?.into();
                }
            }
            MemberKind::Symlink(target) => {
                // In any archive, because Linux has no other mode for a symbolic link.
                inode.mode = (SYMLINK | 0o777).into();
                inode.data = (self.tree.index.arrays.arena.push(target) as u64).into();
                inode.children = u32::try_from(target.len()).unwrap_or_default().into();
            }
            MemberKind::CharDevice(device) | MemberKind::BlockDevice(device) => {
                inode.set_device(*device);
            }
            MemberKind::Directory | MemberKind::HardLink(_) | MemberKind::Fifo => {}
        }
        Ok(inode)
    }

    fn attributes(&mut self, type_bits: u16, member: &Member) -> InodeRow {
        let permissions = u16::try_from(member.mode & 0o7777).unwrap_or_default();
        let mut inode = InodeRow {
            uid: member.uid.into(),
            gid: member.gid.into(),
            user: self.owner_row(&member.user).into(),
            group: self.owner_row(&member.group).into(),
            mode: (type_bits | permissions).into(),
            extra: self.attribute_set(&member.xattrs).into(),
            dirent: NONE.into(),
            ..InodeRow::default()
        };
        inode.set_mtime(member.mtime);
        inode
    }

    fn sparse_map(
        &mut self,
        extra: u32,
        member: &Member,
        map: &[Segment],
    ) -> Result<u32, MemberError> {
        let count = |rows: usize| u32::try_from(rows).map_err(|_| MemberError::TooManyEntries);
        let arrays = &mut self.tree.index.arrays;
        let mut row = arrays
            .extras
            .get(extra as usize)
            .copied()
            .unwrap_or_default();
        let first = arrays.pieces.len();
        let mut plain = member.payload.start().0;
        for segment in map.iter().filter(|segment| segment.len > 0) {
            let piece = PieceRow {
                offset: segment.offset.into(),
                plain: plain.into(),
                len: segment.len.into(),
            };
            push_row(arrays.pieces.vec_mut(), piece);
            plain = plain.saturating_add(segment.len);
        }
        row.sparse = 1.into();
        row.piece = count(first)?.into();
        row.piece_count = count(arrays.pieces.len() - first)?.into();
        row.stored_bytes = (plain - member.payload.start().0).into();
        let number = count(arrays.extras.len())?;
        push_row(arrays.extras.vec_mut(), row);
        Ok(number)
    }

    /// The row of an owner's name; 0, the empty name, when the table is full.
    fn owner_row(&mut self, name: &[u8]) -> u16 {
        if name.is_empty() || name.len() > MAX_OWNER_NAME_BYTES {
            return 0;
        }
        let arrays = &mut self.tree.index.arrays;
        let hash = xxh3_64_with_seed(name, self.owners.seed);
        let is_same = |row: u32| u16::try_from(row).is_ok_and(|row| arrays.owner(row) == name);
        if let Some(row) = self.owners.find(hash, is_same) {
            return u16::try_from(row).unwrap_or_default();
        }
        let Some(row) = arrays.push_owner(name) else {
            return 0;
        };
        self.owners.add(hash, row.into());
        row
    }

    /// The row of extras for a set of attributes; 0 for none. Equal sets share a row.
    fn attribute_set(&mut self, xattrs: &[(Vec<u8>, Vec<u8>)]) -> u32 {
        let set: Vec<(&[u8], &[u8])> = xattrs
            .iter()
            .filter(|(name, _)| name.len() <= XATTR_NAME_MAX)
            .map(|(name, value)| (&**name, &**value))
            .collect();
        let arrays = &mut self.tree.index.arrays;
        let (Ok(row), Ok(first), Ok(count)) = (
            u32::try_from(arrays.extras.len()),
            u32::try_from(arrays.xattrs.len()),
            u32::try_from(set.len()),
        ) else {
            return 0;
        };
        if count == 0 {
            return 0;
        }
        let hash = hash_set(self.attribute_sets.seed, &set);
        let is_same = |row: u32| arrays.xattrs(row).eq(set.iter().copied());
        if let Some(known) = self.attribute_sets.find(hash, is_same) {
            return known;
        }
        for (name, value) in &set {
            arrays.push_xattr(name, value);
        }
        let extra = ExtraRow {
            xattr: first.into(),
            xattr_count: count.into(),
            ..ExtraRow::default()
        };
        push_row(arrays.extras.vec_mut(), extra);
        self.attribute_sets.add(hash, row);
        self.tree.index.totals.has_xattrs = true;
        row
    }
}

fn check_path_len(path: &ArchivePath) -> Result<(), MemberError> {
    if path.as_bytes().len() > MAX_MEMBER_PATH_BYTES {
        return Err(MemberError::NameTooLong);
    }
    Ok(())
}

fn type_bits(kind: &MemberKind) -> u16 {
    match kind {
        MemberKind::File => FILE,
        MemberKind::Directory => DIRECTORY,
        MemberKind::Symlink(_) => SYMLINK,
        MemberKind::HardLink(_) => FORWARD_LINK,
        MemberKind::CharDevice(_) => CHAR_DEVICE,
        MemberKind::BlockDevice(_) => BLOCK_DEVICE,
        MemberKind::Fifo => FIFO,
    }
}

fn hash_set(seed: u64, set: &[(&[u8], &[u8])]) -> u64 {
    let mut hasher = Xxh3::with_seed(seed);
    for (name, value) in set {
        for part in [*name, *value] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
    }
    hasher.digest()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::base::span_hash;

    use super::*;
    use crate::index::test_support::{directory, file, hard_link, index, layer, member, symlink};
    use crate::index::whiteouts::WhiteoutFormat;
    use crate::tar::{Device, Timestamp};

    /// Every name of the tree: path, type letter, mode, number of links, size.
    fn listing(index: &Index) -> Vec<String> {
        let mut lines = Vec::new();
        let mut stack = vec![(Ino::ROOT, String::new())];
        while let Some((directory, prefix)) = stack.pop() {
            for child in index.children(directory, 0) {
                let entry = index.entry(child.ino).unwrap();
                let path = format!("{prefix}{}", String::from_utf8_lossy(child.name));
                lines.push(format!(
                    "{path} {} {:o} {} {}",
                    letter(&entry.kind()),
                    entry.mode(),
                    entry.link_count(),
                    entry.size()
                ));
                stack.push((child.ino, format!("{path}/")));
            }
        }
        lines.sort_unstable();
        lines
    }

    fn letter(kind: &crate::index::EntryKind<'_>) -> char {
        use crate::index::EntryKind;
        match kind {
            EntryKind::File => 'f',
            EntryKind::Directory => 'd',
            EntryKind::Symlink(_) => 'l',
            EntryKind::CharDevice(_) => 'c',
            EntryKind::BlockDevice(_) => 'b',
            EntryKind::Fifo => 'p',
        }
    }

    fn problems(index: &Index) -> Vec<String> {
        let text = |problem: &Problem| {
            let path = problem.path.as_ref().expect("members have names");
            format!("{path}: {}", problem.what)
        };
        index.problems().iter().map(text).collect()
    }

    // Promises: implied-in-mount, implied-written
    #[test]
    fn missing_parent_directories_are_created() {
        let index = index(&[Member {
            mtime: Timestamp {
                seconds: 7,
                nanoseconds: 8,
            },
            ..file("a/b/c", 512..515)
        }]);
        assert_eq!(
            listing(&index),
            ["a d 755 3 0", "a/b d 755 2 0", "a/b/c f 644 1 3"]
        );
        assert_eq!(index.entry(Ino(2)).unwrap().mtime(), Timestamp::default());
        assert_eq!(index.path(Ino(4)).unwrap().to_string(), "a/b/c");
        assert_eq!(index.entry(Ino(4)).unwrap().parent(), Ino(3));
    }

    // Promises: tree-repeated-name
    #[test]
    fn a_later_file_gets_a_new_number_and_its_old_siblings_keep_theirs() {
        let index = index(&[file("f", 0..1), hard_link("g", "f"), file("f", 5..7)]);
        assert_eq!(listing(&index), ["f f 644 1 2", "g f 644 1 1"]);
        assert_eq!(index.lookup(Ino::ROOT, b"f").unwrap().ino(), Ino(3));
        assert_eq!(index.path(Ino(2)).unwrap().to_string(), "g");
    }

    #[test]
    fn a_name_that_became_a_link_is_younger_than_the_name_it_links_to() {
        let index = index(&[file("x", 0..1), file("y", 0..2), hard_link("x", "y")]);
        assert_eq!(index.path(Ino(3)).unwrap().to_string(), "y");
        assert_eq!(listing(&index), ["x f 644 2 2", "y f 644 2 2"]);
    }

    // Promises: inode-number
    #[test]
    fn a_replaced_number_stays_a_gap() {
        let index = index(&[file("f", 0..1), file("f", 5..7)]);
        assert!(index.entry(Ino(2)).is_none());
        assert_eq!((index.entry_count(), index.last_ino()), (2, Ino(3)));
    }

    // Promises: scan-grows
    #[test]
    fn changed_attributes_mark_inodes_dirty() {
        let mut builder = Builder::new(Options {
            keeps_replaced: true,
            ..Options::default()
        });
        let mut changes = |member: Member| {
            builder.add_member(&member).unwrap();
            builder.take_dirty_inodes()
        };
        let (d, f) = (Ino(2), Ino(3));
        assert_eq!(changes(directory("d", 0o755)), []);
        assert_eq!(changes(file("d/f", 0..1)), []);
        assert_eq!(changes(hard_link("d/g", "d/f")), [f]);
        assert_eq!(changes(directory("d", 0o700)), [d]);
        assert_eq!(changes(file("d/f", 5..7)), [f]);
        assert_eq!(changes(hard_link("d/g", "d/f")), [f, Ino(4)]);
        // Its target comes later. The builder reports it when it resolves the link.
        assert_eq!(changes(hard_link("d/h", "d/i")), []);
        assert_eq!(changes(file("d/i", 7..8)), []);
        builder.resolve_forward_links();
        assert!(builder.take_dirty_inodes().contains(&Ino(6)));
    }

    // Promises: scan-grows, scan-waits, inode-number
    #[test]
    fn growing_index_looks_up_names_but_lists_none() {
        let mut builder = Builder::new(Options {
            keeps_replaced: true,
            ..Options::default()
        });
        assert!(builder.add_member(&file("d/f", 0..1)).is_ok());
        let index = builder.index();
        assert!(!index.is_complete());
        let d = index.lookup(Ino::ROOT, b"d").unwrap();
        assert_eq!((d.ino(), d.link_count()), (Ino(2), 2));
        assert_eq!(index.lookup(Ino(2), b"f").unwrap().size(), 1);
        assert!(index.lookup(Ino(2), b"g").is_none());
        assert_eq!(index.children(Ino(2), 0).count(), 0);
        assert_eq!(index.children_by_name(Ino(2), 0).count(), 0);
        assert_eq!(index.path(Ino(3)).unwrap().to_string(), "d/f");
        assert_eq!((index.entry_count(), index.stored_bytes()), (3, 1));

        assert!(builder.add_member(&hard_link("d/g", "h")).is_ok());
        let waits = builder.index().lookup(Ino(2), b"g");
        assert!(waits.is_none(), "its type is not known yet");

        assert!(builder.add_member(&file("d/f", 5..7)).is_ok());
        let index = builder.index();
        assert_eq!(index.lookup(Ino(2), b"f").unwrap().ino(), Ino(5));
        let replaced = index.entry(Ino(3)).unwrap();
        assert_eq!((replaced.size(), replaced.link_count()), (1, 0));
        let index = builder.finish(Origin::default());
        assert!(index.is_complete());
        assert_eq!(index.entry(Ino(3)).unwrap().size(), 1);
        assert_eq!(listing(&index), ["d d 755 2 0", "d/f f 644 1 2"]);
    }

    // Promises: tree-directory-again
    #[test]
    fn a_directory_over_a_directory_updates_it() {
        let index = index(&[
            directory("d", 0o755),
            file("d/x", 0..1),
            directory("d", 0o700),
        ]);
        assert_eq!(listing(&index), ["d d 700 2 0", "d/x f 644 1 1"]);
    }

    #[test]
    fn directory_replaces_non_directory() {
        for before in [
            file("d", 0..1),
            symlink("d", "e"),
            member("d", MemberKind::Fifo),
        ] {
            let index = index(&[
                directory("e", 0o755),
                before,
                directory("d", 0o700),
                file("d/x", 0..1),
            ]);
            assert_eq!(
                listing(&index),
                ["d d 700 2 0", "d/x f 644 1 1", "e d 755 2 0"]
            );
        }
    }

    // Promises: tree-nonempty-directory
    #[test]
    fn file_replaces_empty_directory_but_not_full_one() {
        let index = index(&[
            file("f", 0..1),
            directory("a", 0o755),
            directory("b", 0o755),
            directory("c", 0o755),
            file("d/x", 0..1),
            file("a", 0..2),
            symlink("b", "q"),
            hard_link("c", "f"),
            file("d", 0..2),
            hard_link("d", "f"),
        ]);
        assert_eq!(
            listing(&index),
            [
                "a f 644 1 2",
                "b l 777 1 1",
                "c f 644 2 1",
                "d d 755 2 0",
                "d/x f 644 1 1",
                "f f 644 2 1"
            ]
        );
        assert_eq!(
            problems(&index),
            ["d: a directory that is not empty is in its place"; 2]
        );
        assert_eq!(index.entry(Ino::ROOT).unwrap().link_count(), 3);
    }

    // Promises: hardlink-itself
    #[test]
    fn a_hard_link_to_itself_changes_nothing() {
        let index = index(&[
            file("f", 0..1),
            hard_link("f", "./f"),
            hard_link("g", "/f"),
            hard_link("g", "f"),
            // A directory can have no other name, but it already has this one.
            directory("d", 0o755),
            hard_link("d", "d"),
        ]);
        let expected = ["d d 755 2 0", "f f 644 2 1", "g f 644 2 1"];
        assert_eq!(listing(&index), expected);
        assert_eq!(index.problem_count(), 0);
    }

    // Promises: hardlink-symlink
    #[test]
    fn a_hard_link_to_a_symbolic_link_names_the_link() {
        let index = index(&[symlink("s", "f"), hard_link("g", "s")]);
        assert_eq!(listing(&index), ["g l 777 2 1", "s l 777 2 1"]);
    }

    // Promises: link-itself
    #[test]
    fn a_layer_replaces_a_link_on_the_way_to_its_own_place() {
        let members = [symlink("e", "."), file("e/e", 0..1)];
        assert_eq!(listing(&index(&members)), ["e d 755 2 0", "e/e f 644 1 1"]);
        let layer = layer(&members, WhiteoutFormat::Oci);
        assert_eq!(listing(&layer), ["e f 644 1 1"]);
    }

    // Promises: link-inside
    #[test]
    fn a_hard_link_is_found_through_a_symbolic_link() {
        let index = index(&[
            file("usr/lib/x", 0..1),
            symlink("lib", "usr/lib"),
            hard_link("lib/y", "lib/x"),
        ]);
        assert_eq!(index.entry(Ino(4)).unwrap().link_count(), 2);
        assert!(
            index
                .find(&ArchivePath::sanitize(b"usr/lib/y").path)
                .is_some()
        );
    }

    // Promises: hardlink-lost, gnu-hardlink-directory
    #[test]
    fn hard_link_to_directory_is_rejected_and_old_entry_stays() {
        let index = index(&[
            directory("d", 0o755),
            file("g", 0..1),
            hard_link("g", "d"),
            hard_link("r", "."),
        ]);
        assert_eq!(listing(&index), ["d d 755 2 0", "g f 644 1 1"]);
        assert_eq!(index.problem_count(), 2);
    }

    fn whiteouts(index: &Index) -> Vec<String> {
        let text = |whiteout: crate::index::Whiteout<'_>| {
            let parent = index.path(whiteout.parent).unwrap_or_default();
            let name = whiteout.name.unwrap_or(b"*");
            format!("{parent}/{}", name.escape_ascii())
        };
        let mut found: Vec<_> = index.whiteouts().map(text).collect();
        found.sort_unstable();
        found
    }

    // Promises: whiteout-scope
    #[test]
    fn whiteout_in_layer_names_its_literal_path() {
        let index = layer(
            &[
                symlink("d", "/e"),
                file("d/.wh.a", 0..0),
                symlink("s", "r"),
                file("s/.wh.b", 0..0),
                file("g/h/.wh.c", 0..0),
                file("g/.wh..wh..opq", 0..0),
                hard_link("g/.wh.x", "nothing"),
                file(&format!(".wh.{}", "n".repeat(255)), 0..0),
                file(&format!(".wh.{}", "n".repeat(256)), 0..0),
                file(".wh...", 0..0),
                file(".wh..wh.aufs", 0..0),
            ],
            WhiteoutFormat::Oci,
        );
        let long = format!("./{}", "n".repeat(255));
        let expected = ["./.wh.aufs", &long, "g/*", "g/h/c", "g/x"];
        assert_eq!(whiteouts(&index), expected);
        let unseen = |path: &str| {
            let entry = index.find(&ArchivePath::sanitize(path.as_bytes()).path);
            entry.map(|entry| entry.is_whiteout_only())
        };
        assert_eq!([unseen("g"), unseen("g/h")], [Some(true); 2]);
        assert_eq!([unseen("e"), unseen("r")], [None; 2]);
        assert_eq!(index.problem_count(), 0);
    }

    // Promises: layer-replaces
    #[test]
    fn file_in_layer_replaces_a_full_directory() {
        let index = layer(
            &[
                file("q/x", 0..1),
                file("q/y/z", 0..1),
                hard_link("kept", "q/x"),
                file("q/.wh.a", 0..0),
                file("q", 0..2),
                file("r/x", 0..1),
                symlink("r", "t"),
                directory("r", 0o700),
                file("r/w", 0..1),
            ],
            WhiteoutFormat::Oci,
        );
        assert_eq!(
            listing(&index),
            [
                "kept f 644 1 1",
                "q f 644 1 2",
                "r d 700 2 0",
                "r/w f 644 1 1"
            ]
        );
        assert_eq!(whiteouts(&index), ["r/*"]);
        assert_eq!(index.entry_count(), 5);
        assert_eq!(index.problem_count(), 0);
    }

    // Promises: layerlink-target
    #[test]
    fn link_in_layer_before_its_target_is_left_to_lower_layers() {
        let index = layer(
            &[
                symlink("s", "/d"),
                hard_link("l", "s/f"),
                hard_link("m", "l"),
                file("l", 0..1),
                hard_link("n", "l"),
                file("x/f", 0..1),
                hard_link("x", "y"),
            ],
            WhiteoutFormat::Oci,
        );
        let links: Vec<_> = index
            .unresolved_links()
            .map(|link| (link.name.to_vec(), link.target.to_vec()))
            .collect();
        let link = |name: &[u8], target: &[u8]| (name.to_vec(), target.to_vec());
        assert_eq!(links, [link(b"m", b"d/f"), link(b"x", b"y")]);
        assert_eq!(
            listing(&index),
            ["l f 644 2 1", "n f 644 2 1", "s l 777 1 2"]
        );
    }

    #[test]
    fn unresolved_links_of_a_layer_have_their_headers() {
        let at = |header: u64, member: Member| Member {
            header: Plain(header),
            ..member
        };
        let index = layer(
            &[
                at(0, file("own", 0..1)),
                at(1024, hard_link("h", "own")),
                at(2048, hard_link("l", "below")),
                at(3072, hard_link("h", "below")),
                at(4096, hard_link("m", "l")),
            ],
            WhiteoutFormat::Oci,
        );
        let found = [&b"h"[..], b"l", b"m"].map(|name| {
            let target = index.unresolved_target(Ino::ROOT, name);
            (target, index.unresolved_header(Ino::ROOT, name))
        });
        let of = |header| (Some(&b"below"[..]), Some(Plain(header)));
        assert_eq!(found, [of(3072), of(2048), of(4096)]);
        assert_eq!(index.unresolved_header(Ino::ROOT, b"own"), None);
    }

    // Promises: whiteout-hidden
    #[test]
    fn file_in_layer_is_shown_by_links_to_hidden_directories() {
        let index = layer(
            &[
                file(".wh..wh.plnk/1.2", 0..1),
                hard_link("a", ".wh..wh.plnk/1.2"),
            ],
            WhiteoutFormat::Oci,
        );
        assert_eq!(index.lookup(Ino::ROOT, b"a").map(|a| a.size()), Some(1));
    }

    // Promises: hardlink-early
    #[test]
    fn forward_links_find_their_targets_in_chains() {
        let index = index(&[
            hard_link("a", "b"),
            hard_link("b", "d/c"),
            hard_link("never", "nothing"),
            file("d/c", 0..3),
            hard_link("also", "a"),
        ]);
        assert_eq!(
            listing(&index),
            [
                "a f 644 4 3",
                "also f 644 4 3",
                "b f 644 4 3",
                "d d 755 2 0",
                "d/c f 644 4 3"
            ]
        );
        assert_eq!(
            problems(&index),
            ["never: the target of the hard link is missing"]
        );
        assert_eq!(
            index
                .path(index.lookup(Ino::ROOT, b"a").unwrap().ino())
                .unwrap()
                .to_string(),
            "d/c"
        );
    }

    // Promises: hardlink-early
    #[test]
    fn forward_links_find_their_targets_behind_each_other() {
        let ways = [
            [hard_link("x", "l/f"), hard_link("l", "s")],
            [hard_link("l", "s"), hard_link("x", "l/f")],
        ];
        for links in ways {
            let rest = [directory("d", 0o755), symlink("s", "d"), file("d/f", 0..3)];
            let index = index(&[&links[..], &rest[..]].concat());
            assert_eq!(problems(&index), Vec::<String>::new());
            let ino = |path: &str| {
                let path = ArchivePath::sanitize(path.as_bytes()).path;
                index.find(&path).expect("there").ino()
            };
            assert_eq!(ino("x"), ino("d/f"));
            assert_eq!(ino("l"), ino("s"));
        }
    }

    #[test]
    fn forward_links_in_a_circle_end() {
        let index = index(&[
            hard_link("a", "b"),
            hard_link("b", "a"),
            hard_link("c", "a"),
            hard_link("s", "s"),
            hard_link("d", "e"),
            directory("e", 0o755),
        ]);
        assert_eq!(listing(&index), ["e d 755 2 0"]);
        assert_eq!(index.problem_count(), 5);
        assert_eq!(index.entry(Ino::ROOT).unwrap().link_count(), 3);
    }

    #[test]
    fn member_replaces_forward_link_of_its_name() {
        let index = index(&[hard_link("a", "b"), file("a", 0..3), file("b", 0..1)]);
        assert_eq!(listing(&index), ["a f 644 1 3", "b f 644 1 1"]);
        assert_eq!(index.problem_count(), 0);
    }

    // Promises: root-time, root-member
    #[test]
    fn the_root_takes_attributes_and_nothing_else() {
        let at = |seconds, member: Member| Member {
            mtime: Timestamp {
                seconds,
                nanoseconds: 5,
            },
            ..member
        };
        let members = [
            at(7, file("f", 0..1)),
            at(8, file("g", 0..1)),
            at(9, directory("./", 0o700)),
            at(10, symlink(".", "f")),
            at(11, file("..", 0..1)),
        ];
        let root = |index: &Index| {
            let root = index.entry(Ino::ROOT).unwrap();
            let Timestamp {
                seconds,
                nanoseconds,
            } = root.mtime();
            (root.mode(), seconds, nanoseconds)
        };
        assert_eq!(root(&index(&members[..2])), (0o755, 0, 0));
        let index = index(&members);
        assert_eq!(root(&index), (0o700, 9, 5));
        assert_eq!(
            problems(&index),
            [
                ".: only a directory can take the root's place",
                ".: the name contains '..': .."
            ]
        );
    }

    // Promises: link-outside
    #[test]
    fn member_paths_do_not_escape_the_root() {
        let index = index(&[
            symlink("l", "/etc"),
            file("l/x", 0..1),
            file("f", 0..1),
            file("f/x", 0..1),
        ]);
        assert_eq!(
            problems(&index),
            [
                "l/x: a symbolic link on the way leads outside the root",
                "f/x: something on the way is not a directory"
            ]
        );
    }

    // Promises: names-length
    #[test]
    fn names_too_long_for_linux_are_rejected() {
        let long = "x".repeat(256);
        let index = index(&[
            file(&long, 0..1),
            file(&format!("{long}/y"), 0..1),
            file(&"a/".repeat(40_000), 0..1),
            symlink("e", ""),
            symlink("l", &"y".repeat(4096)),
        ]);
        assert_eq!(index.entry_count(), 1);
        assert_eq!(index.problem_count(), 5);
    }

    // Promises: hostile-device-number
    #[test]
    fn device_number_that_linux_would_cut_is_a_problem() {
        let device = |(major, minor)| {
            let device = Device { major, minor };
            index(&[member("d", MemberKind::CharDevice(device))]).problem_count()
        };
        assert_eq!([(0, 0), (4095, 1_048_575)].map(device), [0, 0]);
        assert_eq!([(4096, 0), (0, 1_048_576)].map(device), [1, 1]);
    }

    // Promises: names-length
    #[test]
    fn a_deep_path_is_walked_without_recursion() {
        let path = "a/".repeat(32_000) + "f";
        let index = index(&[file(&path, 0..1)]);
        assert_eq!(
            index.path(index.last_ino()).unwrap().as_bytes(),
            path.as_bytes()
        );
    }

    #[test]
    fn entries_have_the_offset_of_their_first_header() {
        // Beyond what 32 bits of records can say.
        let far = 5 << 40;
        let at = |header: u64, records: u64, member: Member| Member {
            header: Plain(header),
            payload: Extent::with_len(Plain(header + records * RECORD), member.payload.len()),
            ..member
        };
        let index = index(&[
            at(0, 1, directory("d/", 0o755)),
            at(far, 3, file("d/f", 0..7)),
            at(far + 2048, 1, symlink("l", "d")),
            at(far + 4096, 2, hard_link("h", "d/f")),
            at(far + 8192, 1, file("i/empty", 0..0)),
        ]);
        let header = |path: &str| {
            let path = ArchivePath::sanitize(path.as_bytes()).path;
            index.find(&path).unwrap().header().map(|header| header.0)
        };
        assert_eq!(header("d"), Some(0));
        assert_eq!(header("d/f"), Some(far));
        assert_eq!(header("l"), Some(far + 2048));
        assert_eq!(header("i/empty"), Some(far + 8192));
        assert_eq!(header("i"), None, "implied");
        let link = |name: &[u8]| index.link_header(index.find_dirent(Ino::ROOT, name).unwrap());
        assert_eq!(link(b"h"), Some(Plain(far + 4096)));
        assert_eq!(link(b"l"), None);
    }

    // Promises: hostile-memory, limit-index-entries
    #[test]
    fn member_beyond_max_entries_is_rejected() {
        let options = Options {
            max_entries: 4,
            max_problems: 1,
            max_reported_problems: 0,
            keeps_replaced: false,
            whiteouts: None,
        };
        let mut builder = Builder::new(options);
        assert_eq!(
            builder.add_member(&file("a/b", 0..1)),
            Ok(Placement::Entry(Ino(3)))
        );
        assert_eq!(
            builder.add_member(&file("c", 0..1)),
            Err(MemberError::TooManyEntries)
        );
        assert_eq!(
            builder.add_member(&file("a/b", 0..1)),
            Err(MemberError::TooManyEntries)
        );
        let index = builder.finish(Origin::default());
        assert_eq!(listing(&index), ["a d 755 2 0", "a/b f 644 1 1"]);
        assert_eq!((index.problems().len(), index.problem_count()), (1, 2));
    }

    #[test]
    fn equal_attributes_share_a_row() {
        let with = |name: &str, value: &str| Member {
            xattrs: vec![(b"user.a".to_vec(), value.as_bytes().to_vec())],
            user: b"root".to_vec(),
            group: b"wheel".to_vec(),
            ..file(name, 0..1)
        };
        let index = index(&[
            with("a", "1"),
            with("b", "1"),
            with("c", "2"),
            file("d", 0..1),
        ]);
        let xattrs = |ino| index.entry(Ino(ino)).unwrap().xattrs().collect::<Vec<_>>();
        assert_eq!(xattrs(3), [(&b"user.a"[..], &b"1"[..])]);
        assert_eq!(xattrs(4), [(&b"user.a"[..], &b"2"[..])]);
        assert_eq!(xattrs(5), []);
        assert_eq!(index.arrays.extras.len(), 3);
        assert_eq!(index.arrays.owners.len(), 3);
        let entry = index.entry(Ino(2)).unwrap();
        assert_eq!((entry.user(), entry.group()), (&b"root"[..], &b"wheel"[..]));
        assert!(index.has_xattrs());
    }

    #[test]
    fn a_sparse_file_has_its_pieces_and_keeps_its_attributes() {
        let segment = |offset, len| Segment { offset, len };
        let index = index(&[Member {
            sparse: Some(vec![segment(10, 5), segment(100, 20), segment(1000, 0)]),
            size: 1000,
            xattrs: vec![(b"user.a".to_vec(), b"1".to_vec())],
            ..file("s", 512..537)
        }]);
        let entry = index.entry(Ino(2)).unwrap();
        let pieces = |offset, len| {
            let piece = |piece: crate::index::Piece| {
                (piece.offset, piece.plain.start().0, piece.plain.len())
            };
            entry.pieces(offset, len).map(piece).collect::<Vec<_>>()
        };
        assert_eq!(pieces(0, u64::MAX), [(10, 512, 5), (100, 517, 20)]);
        assert_eq!(pieces(0, 10), []);
        assert_eq!(pieces(14, 1), [(10, 512, 5)]);
        assert_eq!(pieces(15, 86), [(100, 517, 20)]);
        assert_eq!(pieces(119, 1), [(100, 517, 20)]);
        assert_eq!(pieces(120, 1000), []);
        assert_eq!(
            (entry.size(), entry.stored_bytes(), index.stored_bytes()),
            (1000, 25, 25)
        );
        assert_eq!(entry.xattrs().count(), 1);
    }

    #[test]
    fn spans_end_where_the_next_begins() {
        let mut builder = Builder::new(Options::default());
        let point = SeekPoint {
            packed: crate::base::extent::Packed(40),
            bit: 3,
            plain: Plain(100),
            state: 9,
            window: bytes::Bytes::from_static(b"window"),
        };
        builder.add_span(Extent::with_len(Plain(0), 100), Some(&[1]), None);
        builder.add_span(Extent::with_len(Plain(100), 50), Some(&[2]), Some(&point));
        let index = builder.finish(Origin {
            plain_bytes: 150,
            ..Origin::default()
        });
        let at = |offset| index.span_at(Plain(offset));
        assert_eq!(
            [at(0), at(99), at(100), at(149), at(150)],
            [Some(0), Some(0), Some(1), Some(1), None]
        );
        let span = index.span(1).unwrap().unwrap();
        assert_eq!(span.plain, Extent::with_len(Plain(100), 50));
        let hash = span_hash::of_checksums([2].into_iter());
        assert_eq!((span.hash, span.seek_point), (Some(hash), Some(point)));
        assert_eq!(index.span(0).unwrap().unwrap().seek_point, None);
        assert_eq!(index.span(2), Ok(None));
    }

    /// A model of extraction with maps: the same rules, written for clarity.
    #[derive(Default)]
    struct Model {
        names: std::collections::BTreeMap<String, usize>,
        /// (is a directory, size or mode)
        inodes: Vec<(bool, u64)>,
    }

    impl Model {
        fn is_directory(&self, path: &str) -> bool {
            path.is_empty()
                || self
                    .names
                    .get(path)
                    .is_some_and(|&inode| self.inodes[inode].0)
        }

        fn put(&mut self, path: &str, inode: (bool, u64)) {
            self.names.insert(path.to_owned(), self.inodes.len());
            self.inodes.push(inode);
        }

        fn make_parents(&mut self, path: &str) -> bool {
            for (slash, _) in path.match_indices('/') {
                let parent = &path[..slash];
                if !self.names.contains_key(parent) {
                    self.put(parent, (true, 0o755));
                }
                if !self.is_directory(parent) {
                    return false;
                }
            }
            true
        }

        fn can_replace(&self, path: &str) -> bool {
            let inside = format!("{path}/");
            !self.names.keys().any(|name| name.starts_with(&inside))
        }

        fn apply(&mut self, step: &Step) -> bool {
            let path = step.path();
            if !self.make_parents(path) {
                return false;
            }
            match step {
                Step::Directory(_, mode) if self.is_directory(path) => {
                    let inode = self.names[path];
                    self.inodes[inode].1 = u64::from(*mode);
                    true
                }
                Step::Directory(_, mode) => {
                    self.put(path, (true, u64::from(*mode)));
                    true
                }
                Step::File(_, size) => {
                    let fits = self.can_replace(path);
                    if fits {
                        self.put(path, (false, *size));
                    }
                    fits
                }
                Step::Link(_, target) => {
                    let Some(&inode) = self.names.get(target) else {
                        return false;
                    };
                    // A link to itself exists already, of any type.
                    if path == target {
                        return true;
                    }
                    let fits = !self.inodes[inode].0 && self.can_replace(path);
                    if fits {
                        self.names.insert(path.to_owned(), inode);
                    }
                    fits
                }
            }
        }

        fn listing(&self) -> Vec<String> {
            let line = |(path, &inode): (&String, &usize)| {
                let inside = format!("{path}/");
                let (is_directory, number) = self.inodes[inode];
                if is_directory {
                    let holds = |name: &&String| {
                        name.strip_prefix(&inside)
                            .is_some_and(|rest| !rest.contains('/'))
                            && self.is_directory(name)
                    };
                    let links = 2 + self.names.keys().filter(holds).count();
                    format!("{path} d {number:o} {links} 0")
                } else {
                    let links = self.names.values().filter(|&&other| other == inode).count();
                    format!("{path} f 644 {links} {number}")
                }
            };
            let mut lines: Vec<String> = self.names.iter().map(line).collect();
            lines.sort_unstable();
            lines
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        File(String, u64),
        Directory(String, u32),
        Link(String, String),
    }

    impl Step {
        fn path(&self) -> &str {
            match self {
                Self::File(path, _) | Self::Directory(path, _) | Self::Link(path, _) => path,
            }
        }

        fn member(&self) -> Member {
            match self {
                Self::File(path, size) => file(path, 0..*size),
                Self::Directory(path, mode) => directory(path, *mode),
                Self::Link(path, target) => hard_link(path, target),
            }
        }
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let path = || "[ab](/[ab]){0,3}";
        let step = prop_oneof![
            (path(), 0..1000_u64).prop_map(|(path, size)| Step::File(path, size)),
            (path(), 0..0o1000_u32).prop_map(|(path, mode)| Step::Directory(path, mode)),
            (path(), path()).prop_map(|(path, target)| Step::Link(path, target)),
        ];
        prop::collection::vec(step, 0..40)
    }

    proptest! {
        #[test]
        fn tree_equals_model_of_extraction(steps in steps()) {
            let mut model = Model::default();
            let mut builder = Builder::new(Options::default());
            for step in &steps {
                // The model does not support links to missing targets.
                if matches!(step, Step::Link(_, target) if !model.names.contains_key(target)) {
                    continue;
                }
                prop_assert_eq!(builder.add_member(&step.member()).is_ok(), model.apply(step), "{:?}", step);
            }
            let index = builder.finish(Origin::default());
            prop_assert_eq!(listing(&index), model.listing());
            prop_assert_eq!(index.entry_count(), model.names.values().collect::<std::collections::BTreeSet<_>>().len() as u64 + 1);
            for number in 1..=index.last_ino().0 {
                let Some(entry) = index.entry(Ino(number)) else { continue };
                let path = index.path(entry.ino()).unwrap();
                prop_assert_eq!(index.find(&path).unwrap().ino(), entry.ino());
            }
        }
    }

    #[test]
    fn children_are_listed_in_archive_order() {
        let index = index(&[
            file("d/m", 0..1),
            file("z", 1..2),
            file("d/a", 2..3),
            file("c", 3..4),
            hard_link("b", "z"),
            hard_link("a", "z"),
            file("z", 4..5),
        ]);
        let names = |parent: &str, from| -> Vec<String> {
            let parent = index.find(&ArchivePath::sanitize(parent.as_bytes()).path);
            index
                .children(parent.unwrap().ino(), from)
                .map(|child| format!("{}{}", child.number, child.name.escape_ascii()))
                .collect()
        };
        // The first z still exists as b and a. The second one is last.
        assert_eq!(names("", 0), ["0d", "1b", "2a", "3c", "4z"]);
        assert_eq!(names("", 3), ["3c", "4z"]);
        assert_eq!(names("d", 0), ["0m", "1a"]);
    }

    // Promises: limit-index-entries, memory-index
    #[test]
    fn index_of_100k_names_in_one_directory_stays_small() {
        let count = 100_000_usize;
        let mut builder = Builder::new(Options::default());
        let mut name_bytes = 0;
        for number in (0..count).rev() {
            let name = format!("file-{number}");
            name_bytes += name.len();
            builder.add_member(&file(&name, 0..1)).unwrap();
        }
        let building = builder.memory_bytes();
        assert!(
            building <= 160 * count + name_bytes,
            "{building} bytes for {count} entries"
        );
        let index = builder.finish(Origin::default());
        assert!(index.memory_bytes() <= 85 * count + name_bytes);
        assert_eq!(index.children(Ino::ROOT, 0).count(), count);
        assert_eq!(
            index.lookup(Ino::ROOT, b"file-77").unwrap().ino(),
            Ino(99_924)
        );
        let page: Vec<_> = index
            .children_by_name(Ino::ROOT, 99_999)
            .map(|child| (child.name, child.number))
            .collect();
        assert_eq!(page, [(&b"file-99999"[..], 99_999)]);
        let last = index.children(Ino::ROOT, 99_999).next().unwrap();
        assert_eq!((last.name, last.number), (&b"file-0"[..], 99_999));
    }
}
