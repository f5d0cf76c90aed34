//! The tree under construction.

use std::collections::BTreeMap;

use crate::base::NAME_MAX;
use crate::base::extent::Packed;
use crate::base::resolve::{self, Component, PathError, ResolveError};
use crate::index::arrays::{Arrays, MAX_SYMLINK_TARGET_BYTES, NameTable, push_row};
use crate::index::blocks::MIN_BLOCK_LEN;
use crate::index::memory_limit::MemoryLimit;
use crate::index::storage::row_types::{Dirent, FORWARD_LINK, InodeRow, NONE, SYMLINK};
use crate::index::tree::{Index, Ino, Origin, Totals};
use crate::index::whiteouts::WhiteoutFormat;
use crate::tar::MemberKind;

pub(in crate::index) const ROOT: u32 = 1;

/// Maximum number of pending dirty inodes; more are lost.
const MAX_DIRTY_INODES: usize = 4096;

/// Limits and options of a builder, beyond the parser's limits on members.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Maximum number of entries; later ones are rejected. The default, 2²⁶, is about 6 GiB of index. A
    /// member of two kilobytes may imply a thousand directories, so a limit on members is not enough.
    pub max_entries: u32,
    /// Maximum number of stored problems. All are counted.
    pub max_problems: usize,
    /// Maximum number of problems that [`take_problems`](super::Builder::take_problems) returns.
    pub max_reported_problems: u64,
    /// Whether readers use the tree while it grows. Then replaced entries, which may be open, stay without a
    /// name, and [changed entries](super::Builder::take_dirty_inodes) are recorded.
    pub keeps_replaced: bool,
    /// How the archive marks removed entries of lower layers, if it is a layer.
    pub whiteouts: Option<WhiteoutFormat>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            max_entries: 1 << 26,
            max_problems: 100,
            max_reported_problems: 0,
            keeps_replaced: false,
            whiteouts: None,
        }
    }
}

/// Why the tree does not contain a member. The other members are not affected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MemberError {
    /// Its path does not resolve inside the root.
    #[error(transparent)]
    Unreachable(#[from] PathError),
    /// Its name has a `..` component.
    #[error("the name contains '..'")]
    ParentComponent,
    /// It would replace a directory that is not empty.
    #[error("a directory that is not empty is in its place")]
    NotEmpty,
    /// It would replace the root, which must be a directory.
    #[error("only a directory can take the root's place")]
    RootNotDirectory,
    /// The archive does not contain a hard link's target, or the target is such a link itself.
    #[error("the target of the hard link is missing")]
    MissingTarget,
    /// A hard link's target is a directory.
    #[error("the target of the hard link is a directory")]
    LinkToDirectory,
    /// A component is longer than 255 bytes, or the path than 65,535.
    #[error("the name is too long")]
    NameTooLong,
    /// A symbolic link's target is empty or longer than 4,095 bytes.
    #[error("the target of the symbolic link is empty or too long")]
    BadTarget,
    /// Linux has fewer bits for device numbers.
    #[error("the device number is too large for Linux")]
    BadDevice,
    /// [`Options::max_entries`] or the width of a field is exceeded.
    #[error("the archive has more entries than are allowed")]
    TooManyEntries,
}

/// Checks what a member of `kind` says beside its name. With an error it does not replace what is in its place. The
/// target of a symbolic link, and the number of a device, must be such as Linux can hold.
pub(crate) fn check_kind(kind: &MemberKind) -> Result<(), MemberError> {
    match kind {
        MemberKind::Symlink(target)
            if target.is_empty() || target.len() > MAX_SYMLINK_TARGET_BYTES =>
        {
            Err(MemberError::BadTarget)
        }
        MemberKind::CharDevice(device) | MemberKind::BlockDevice(device)
            if device.linux_number().is_none() =>
        {
            Err(MemberError::BadDevice)
        }
        _ => Ok(()),
    }
}

impl From<ResolveError<Self>> for MemberError {
    fn from(error: ResolveError<Self>) -> Self {
        match error {
            ResolveError::Path(refusal) => refusal.into(),
            ResolveError::Tree(error) => error,
        }
    }
}

#[derive(Debug)]
pub(in crate::index) struct BuildTree {
    pub(in crate::index) index: Index,
    pub(in crate::index) options: Options,
    /// Entries whose attributes, link count included, changed, if readers use the tree.
    pub(in crate::index) dirty: Vec<Ino>,
}

impl BuildTree {
    pub(in crate::index) fn new(options: Options) -> Self {
        let index = Index {
            arrays: Arrays {
                inodes: vec![InodeRow::default(), InodeRow::implied_directory()].into(),
                ..Arrays::new()
            },
            names: Some(NameTable::new()),
            replaced: options.keeps_replaced.then(BTreeMap::new),
            origin: Origin::default(),
            block_len: MIN_BLOCK_LEN,
            digested: Packed(0),
            totals: Totals {
                entries: 1,
                ..Totals::default()
            },
            problems: Vec::new(),
            is_published: false,
            file: None,
            charge: MemoryLimit::none().charge(),
        };
        Self {
            index,
            options,
            dirty: Vec::new(),
        }
    }

    pub(in crate::index) fn is_layer(&self) -> bool {
        self.options.whiteouts.is_some()
    }

    pub(in crate::index) fn mark_dirty(&mut self, ino: u32) {
        let has_room = self.options.keeps_replaced && self.dirty.len() < MAX_DIRTY_INODES;
        if has_room && self.dirty.last() != Some(&Ino(ino)) {
            self.dirty.push(Ino(ino));
        }
    }

    pub(in crate::index) fn inode(&self, ino: u32) -> &InodeRow {
        let inode = self.index.arrays.inodes.get(ino as usize);
        inode.expect("numbers come from this tree")
    }

    pub(in crate::index) fn inode_mut(&mut self, ino: u32) -> &mut InodeRow {
        let inode = self.index.arrays.inodes.get_mut(ino as usize);
        inode.expect("numbers come from this tree")
    }

    pub(in crate::index) fn dirent(&self, number: u32) -> &Dirent {
        let dirent = self.index.arrays.dirents.get(number as usize);
        dirent.expect("numbers come from this tree")
    }

    fn dirent_mut(&mut self, number: u32) -> &mut Dirent {
        let dirent = self.index.arrays.dirents.get_mut(number as usize);
        dirent.expect("numbers come from this tree")
    }

    pub(in crate::index) fn find(&self, parent: u32, name: &[u8]) -> Option<u32> {
        let names = self.index.names.as_ref()?;
        names.find(&self.index.arrays, parent, name)
    }

    pub(in crate::index) fn add(
        &mut self,
        parent: u32,
        name: &[u8],
        inode: InodeRow,
    ) -> Result<u32, MemberError> {
        self.check_name(name)?;
        let ino = self.allocate_ino(inode)?;
        let dirent = self.add_dirent(parent, name, ino);
        self.set_first_name(ino, dirent);
        Ok(ino)
    }

    pub(in crate::index) fn replace(
        &mut self,
        number: u32,
        inode: InodeRow,
    ) -> Result<u32, MemberError> {
        self.check_replaceable(number)?;
        let ino = self.allocate_ino(inode)?;
        self.release_target(number);
        self.dirent_mut(number).ino = ino.into();
        self.set_first_name(ino, number);
        if inode.is_directory() {
            self.increment_links(self.dirent(number).parent.get());
        }
        Ok(ino)
    }

    fn set_first_name(&mut self, ino: u32, dirent: u32) {
        let inode = self.inode_mut(ino);
        inode.dirent = dirent.into();
        inode.links = (1 + u32::from(inode.is_directory())).into();
    }

    /// Adds a name for `ino`, which is not a directory. Returns its dirent.
    pub(in crate::index) fn link(
        &mut self,
        parent: u32,
        name: &[u8],
        ino: u32,
    ) -> Result<u32, MemberError> {
        self.check_name(name)?;
        let number = self.add_dirent(parent, name, ino);
        self.increment_links(ino);
        Ok(number)
    }

    /// Makes dirent `number` a name of `ino`, which is not a directory.
    pub(in crate::index) fn relink(&mut self, number: u32, ino: u32) -> Result<(), MemberError> {
        self.check_replaceable(number)?;
        self.release_target(number);
        // Dirents of one entry have the order of their offsets in the arena.
        let name = self.dirent(number).name;
        let arena = &mut self.index.arrays.arena;
        let name = arena.name(name).unwrap_or_default().to_vec();
        let name = arena.push_name(&name);
        let dirent = self.dirent_mut(number);
        dirent.name = name;
        dirent.ino = ino.into();
        self.increment_links(ino);
        Ok(())
    }

    /// Removes dirent `number`, which must not name a directory. It stays until the arrays are sorted.
    pub(in crate::index) fn unlink(&mut self, number: u32) {
        self.release_target(number);
        let parent = self.dirent(number).parent.get();
        self.dirent_mut(number).ino = 0.into();
        let parent = self.inode_mut(parent);
        parent.children = parent.children.get().saturating_sub(1).into();
    }

    fn check_replaceable(&self, number: u32) -> Result<(), MemberError> {
        let inode = self.inode(self.dirent(number).ino.get());
        if inode.is_directory() && inode.children.get() > 0 && !self.is_layer() {
            return Err(MemberError::NotEmpty);
        }
        Ok(())
    }

    /// Removes a name from its entry. A directory's contents remain for [`Self::prune_replaced_directories`].
    fn release_target(&mut self, number: u32) {
        let Dirent { ino, parent, .. } = *self.dirent(number);
        self.mark_dirty(ino.get());
        let inode = self.inode_mut(ino.get());
        if inode.is_directory() {
            self.remove_inode(ino.get());
            self.inode_mut(parent.get()).remove_link();
        } else {
            inode.remove_link();
            if inode.links.get() == 0 {
                self.remove_inode(ino.get());
            }
        }
    }

    /// Removes an entry without names. Readers that have it open keep it.
    fn remove_inode(&mut self, ino: u32) {
        let mut inode = std::mem::take(self.inode_mut(ino));
        self.index.totals.entries = self.index.totals.entries.saturating_sub(1);
        if let Some(replaced) = &mut self.index.replaced
            && inode.kind() != FORWARD_LINK
        {
            inode.links = 0.into();
            inode.dirent = NONE.into();
            replaced.insert(ino, inode);
        }
    }

    /// Counts one more member or implied directory.
    pub(in crate::index) fn count_member(&mut self) -> Result<(), MemberError> {
        let members = &mut self.index.totals.members;
        *members += 1;
        // Two numbers are those of the root and of no entry.
        if *members + 2 > self.options.max_entries.into() {
            return Err(MemberError::TooManyEntries);
        }
        Ok(())
    }

    fn increment_links(&mut self, ino: u32) {
        self.mark_dirty(ino);
        self.inode_mut(ino).add_links(1);
    }

    fn allocate_ino(&mut self, inode: InodeRow) -> Result<u32, MemberError> {
        let ino = u32::try_from(self.index.arrays.inodes.len()).unwrap_or(NONE);
        if ino >= self.options.max_entries {
            return Err(MemberError::TooManyEntries);
        }
        push_row(self.index.arrays.inodes.vec_mut(), inode);
        self.index.totals.entries += 1;
        Ok(ino)
    }

    /// Including removed ones.
    pub(in crate::index) fn dirent_count(&self) -> u32 {
        u32::try_from(self.index.arrays.dirents.len()).unwrap_or(NONE)
    }

    pub(in crate::index) fn prune_replaced_directories(&mut self) {
        let count = u32::try_from(self.index.arrays.inodes.len()).unwrap_or(NONE);
        // A directory has a higher number than its parent, and never moves.
        for ino in ROOT + 1..count {
            let inode = self.inode(ino);
            if inode.is_directory() {
                let parent = self.dirent(inode.dirent.get()).parent.get();
                if !self.inode(parent).is_directory() {
                    self.remove_inode(ino);
                }
            }
        }
        for number in 0..self.dirent_count() {
            let Dirent { ino, parent, .. } = *self.dirent(number);
            if ino.get() == 0 || self.inode(parent.get()).is_directory() {
                continue;
            }
            // The loop above already removed directories.
            if self.inode(ino.get()).mode.get() != 0 {
                self.release_target(number);
            }
            self.dirent_mut(number).ino = 0.into();
        }
    }

    fn check_name(&self, name: &[u8]) -> Result<(), MemberError> {
        if name.len() > NAME_MAX {
            return Err(MemberError::NameTooLong);
        }
        if self.dirent_count() == NONE {
            return Err(MemberError::TooManyEntries);
        }
        Ok(())
    }

    /// Checks that one more name without a dirent can be added.
    pub(in crate::index) fn check_capacity(&self, name: &[u8]) -> Result<(), MemberError> {
        self.check_name(name)?;
        let arrays = &self.index.arrays;
        if arrays.inodes.len() + arrays.unresolved.len() >= self.options.max_entries as usize {
            return Err(MemberError::TooManyEntries);
        }
        Ok(())
    }

    fn add_dirent(&mut self, parent: u32, name: &[u8], ino: u32) -> u32 {
        let number = self.dirent_count();
        let dirent = Dirent {
            name: self.index.arrays.arena.push_name(name),
            ino: ino.into(),
            parent: parent.into(),
        };
        push_row(self.index.arrays.dirents.vec_mut(), dirent);
        if let Some(names) = &mut self.index.names {
            names.add(parent, name, number);
        }
        let is_directory = self.inode(ino).is_directory();
        let parent = self.inode_mut(parent);
        parent.children = parent.children.get().saturating_add(1).into();
        parent.add_links(is_directory.into());
        number
    }

    pub(in crate::index) fn is_forward_link(&self, ino: u32) -> bool {
        self.inode(ino).kind() == FORWARD_LINK
    }

    fn step_through(&self, number: u32) -> Component<u32> {
        let ino = self.dirent(number).ino.get();
        match self.index.arrays.inode(ino) {
            Some(inode) if inode.is_directory() => Component::Directory(ino),
            Some(inode) if inode.kind() == SYMLINK => {
                let target = self.index.arrays.target(inode);
                Component::Link(target.unwrap_or_default().to_vec())
            }
            _ => Component::Other,
        }
    }
}

/// Resolves the path of a new member, and creates missing directories.
pub(in crate::index) struct CreatingResolver<'a>(pub(super) &'a mut BuildTree);

impl resolve::PathLookup for CreatingResolver<'_> {
    type Directory = u32;
    type Error = MemberError;

    fn root(&self) -> u32 {
        ROOT
    }

    fn is_chroot(&self) -> bool {
        self.0.is_layer()
    }

    fn step(&mut self, parent: &u32, name: &[u8]) -> Result<Component<u32>, MemberError> {
        let Some(number) = self.0.find(*parent, name) else {
            return Ok(Component::Missing);
        };
        let inode = self.0.inode_mut(self.0.dirent(number).ino.get());
        if inode.is_whiteout_only() {
            inode.flags = InodeRow::IMPLIED.into();
        }
        Ok(self.0.step_through(number))
    }

    fn imply(&mut self, parent: &u32, name: &[u8]) -> Result<u32, MemberError> {
        self.0.count_member()?;
        self.0.add(*parent, name, InodeRow::implied_directory())
    }
}

#[derive(Debug)]
pub(in crate::index) enum NameError {
    Missing,
    /// A component is a hard link whose own target is not known yet.
    Forward,
}

/// Resolves a hard link's target, and creates nothing. In a layer, a missing directory is `None`, because it
/// may be in a layer below.
pub(in crate::index) struct TargetResolver<'a>(pub(super) &'a BuildTree);

impl resolve::PathLookup for TargetResolver<'_> {
    type Directory = Option<u32>;
    type Error = NameError;

    fn root(&self) -> Option<u32> {
        Some(ROOT)
    }

    fn is_chroot(&self) -> bool {
        self.0.is_layer()
    }

    fn step(
        &mut self,
        parent: &Option<u32>,
        name: &[u8],
    ) -> Result<Component<Option<u32>>, NameError> {
        let Some(number) = parent.and_then(|parent| self.0.find(parent, name)) else {
            return Ok(Component::Missing);
        };
        if !self.0.is_layer() && self.0.is_forward_link(self.0.dirent(number).ino.get()) {
            return Err(NameError::Forward);
        }
        Ok(match self.0.step_through(number) {
            Component::Directory(ino) => Component::Directory(Some(ino)),
            Component::Link(target) => Component::Link(target),
            Component::Other | Component::Missing => Component::Other,
        })
    }

    fn imply(&mut self, _: &Option<u32>, _: &[u8]) -> Result<Option<u32>, NameError> {
        if self.0.is_layer() {
            Ok(None)
        } else {
            Err(NameError::Missing)
        }
    }
}
