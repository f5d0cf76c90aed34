//! The tree under construction: growing arrays, and a table from names to dirents.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;
use xxhash_rust::xxh3::xxh3_64_with_seed;
use zerocopy::little_endian::U32;

use super::arrays::Arrays;
use super::blocks::MIN_BLOCK_LEN;
use super::builder::{MAX_NAME_BYTES, MemberError, Options};
use super::dirty::DirtyInodes;
use super::rows::{DIRECTORY, Dirent, ExtraRow, FORWARD_LINK, InodeRow, NONE, Name, SYMLINK};
use super::tree::Totals;
use super::{Index, MemoryLimit, Origin, arena};
use crate::base::extent::Packed;
use crate::base::resolve::{self, Step};

/// The root's record.
pub(super) const ROOT: u32 = 1;

#[derive(Debug)]
pub(super) struct BuildTree {
    /// The index so far.
    pub(super) index: Index,
    /// Maximum number of records.
    max_records: u32,
    /// Whether it is a layer, where anything replaces a directory, even a full one.
    is_layer: bool,
    /// Entries whose attributes changed.
    pub(super) dirty: DirtyInodes,
}

/// Hash table of dirents by parent and name, while building.
#[derive(Debug)]
pub(super) struct NameTable {
    /// Dirent numbers only, of 4 bytes and a control byte each.
    dirents: HashTable<u32>,
    /// Random per process, so that no archive can contain names that collide.
    seed: u64,
}

impl NameTable {
    fn new() -> Self {
        Self {
            dirents: HashTable::new(),
            seed: RandomState::new().hash_one(0_u8),
        }
    }

    /// The dirent called `name` in `parent`.
    pub(super) fn find(&self, arrays: &Arrays, parent: u32, name: &[u8]) -> Option<u32> {
        let same = |&number: &u32| {
            arrays.dirent(number).is_some_and(|dirent| {
                let alive = dirent.ino.get() != 0;
                alive
                    && dirent.parent.get() == parent
                    && arrays.arena.name(dirent.name) == Some(name)
            })
        };
        self.dirents
            .find(hash(self.seed, parent, name), same)
            .copied()
    }

    /// Adds dirent `number`, which `arrays` already contain.
    fn add(&mut self, arrays: &Arrays, number: u32) {
        let seed = self.seed;
        let hash_of = |&number: &u32| {
            let dirent = arrays
                .dirent(number)
                .expect("the table holds dirents of this tree");
            let name = arrays.arena.name(dirent.name).unwrap_or_default();
            hash(seed, dirent.parent.get(), name)
        };
        self.dirents
            .insert_unique(hash_of(&number), number, hash_of);
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.dirents.allocation_size()
    }
}

impl BuildTree {
    /// A tree with only a root.
    pub(super) fn new(options: Options) -> Self {
        let arrays = Arrays {
            records: vec![InodeRow::default(), implied_directory()],
            owners: vec![Name::default()],
            extras: vec![ExtraRow::default()],
            ..Arrays::default()
        };
        let index = Index {
            arrays,
            names: Some(NameTable::new()),
            replaced: options.keeps_replaced.then(HashMap::new),
            origin: Origin::default(),
            block_len: MIN_BLOCK_LEN,
            digested: Packed(0),
            totals: Totals {
                entries: 1,
                ..Totals::default()
            },
            problems: Vec::new(),
            charge: MemoryLimit::none().charge(),
        };
        Self {
            index,
            max_records: options.max_entries,
            is_layer: options.whiteouts.is_some(),
            dirty: DirtyInodes::new(options.keeps_replaced),
        }
    }

    pub(super) fn arrays(&self) -> &Arrays {
        &self.index.arrays
    }

    pub(super) fn arrays_mut(&mut self) -> &mut Arrays {
        &mut self.index.arrays
    }

    pub(super) fn record(&self, ino: u32) -> &InodeRow {
        let record = self.index.arrays.records.get(ino as usize);
        record.expect("numbers come from this tree")
    }

    pub(super) fn record_mut(&mut self, ino: u32) -> &mut InodeRow {
        let record = self.index.arrays.records.get_mut(ino as usize);
        record.expect("numbers come from this tree")
    }

    pub(super) fn dirent(&self, number: u32) -> &Dirent {
        let dirent = self.index.arrays.dirents.get(number as usize);
        dirent.expect("numbers come from this tree")
    }

    fn dirent_mut(&mut self, number: u32) -> &mut Dirent {
        let dirent = self.index.arrays.dirents.get_mut(number as usize);
        dirent.expect("numbers come from this tree")
    }

    /// The dirent called `name` in `parent`.
    pub(super) fn find(&self, parent: u32, name: &[u8]) -> Option<u32> {
        let names = self.index.names.as_ref()?;
        names.find(&self.index.arrays, parent, name)
    }

    /// Gives `record` a number and the new name `name` in `parent`.
    pub(super) fn add(
        &mut self,
        parent: u32,
        name: &[u8],
        record: InodeRow,
    ) -> Result<u32, MemberError> {
        self.check_name(name)?;
        let ino = self.allocate_ino(record)?;
        let dirent = self.add_dirent(parent, name, ino);
        self.set_first_name(ino, dirent);
        Ok(ino)
    }

    /// Adds `record` under a new number, and points dirent `number` to it.
    pub(super) fn replace(&mut self, number: u32, record: InodeRow) -> Result<u32, MemberError> {
        self.check_replaceable(number)?;
        let ino = self.allocate_ino(record)?;
        self.release_target(number);
        self.dirent_mut(number).ino = ino.into();
        self.set_first_name(ino, number);
        if record.is_directory() {
            self.increment_links(self.dirent(number).parent.get());
        }
        Ok(ino)
    }

    /// Sets the first name of a new entry.
    fn set_first_name(&mut self, ino: u32, dirent: u32) {
        let record = self.record_mut(ino);
        record.dirent = dirent.into();
        record.links = (1 + u32::from(record.is_directory())).into();
    }

    /// Gives `ino` the new name `name` in `parent`.
    pub(super) fn link(&mut self, parent: u32, name: &[u8], ino: u32) -> Result<(), MemberError> {
        self.check_name(name)?;
        self.add_dirent(parent, name, ino);
        self.increment_links(ino);
        Ok(())
    }

    /// Makes dirent `number` a name of `ino`, which is not a directory.
    pub(super) fn relink(&mut self, number: u32, ino: u32) -> Result<(), MemberError> {
        self.check_replaceable(number)?;
        self.release_target(number);
        // Dirents of one entry have the order of their offsets in the arena.
        let name = self
            .index
            .arrays
            .arena
            .name(self.dirent(number).name)
            .unwrap_or_default()
            .to_vec();
        let name = self.index.arrays.arena.push_name(&name);
        let dirent = self.dirent_mut(number);
        dirent.name = name;
        dirent.ino = ino.into();
        self.increment_links(ino);
        Ok(())
    }

    /// Removes dirent `number`, which must not name a directory.
    ///
    /// It stays in the arrays until they are sorted.
    pub(super) fn unlink(&mut self, number: u32) {
        self.release_target(number);
        let parent = self.dirent(number).parent.get();
        self.dirent_mut(number).ino = 0.into();
        let parent = self.record_mut(parent);
        parent.children = parent.children.get().saturating_sub(1).into();
    }

    fn check_replaceable(&self, number: u32) -> Result<(), MemberError> {
        let record = self.record(self.dirent(number).ino.get());
        if record.is_directory() && record.children.get() > 0 && !self.is_layer {
            return Err(MemberError::NotEmpty);
        }
        Ok(())
    }

    /// Removes the name `number` from its entry.
    ///
    /// If that was a directory, [`Self::prune_replaced_directories`] later removes its contents.
    fn release_target(&mut self, number: u32) {
        let Dirent { ino, parent, .. } = *self.dirent(number);
        self.dirty.mark(ino.get());
        let record = self.record_mut(ino.get());
        if record.is_directory() {
            self.remove_inode(ino.get());
            let parent = self.record_mut(parent.get());
            parent.links = parent.links.get().saturating_sub(1).into();
        } else {
            record.links = record.links.get().saturating_sub(1).into();
            if record.links.get() == 0 {
                self.remove_inode(ino.get());
            }
        }
    }

    /// Removes entry `ino`, which has no name left. Readers that have it open keep it.
    fn remove_inode(&mut self, ino: u32) {
        let mut record = std::mem::take(self.record_mut(ino));
        self.index.totals.entries = self.index.totals.entries.saturating_sub(1);
        if let Some(replaced) = &mut self.index.replaced
            && record.kind() != FORWARD_LINK
        {
            record.links = 0.into();
            record.dirent = NONE.into();
            replaced.insert(ino, record);
        }
    }

    fn increment_links(&mut self, ino: u32) {
        self.dirty.mark(ino);
        let record = self.record_mut(ino);
        record.links = record.links.get().saturating_add(1).into();
    }

    /// The next number.
    fn allocate_ino(&mut self, record: InodeRow) -> Result<u32, MemberError> {
        let ino = u32::try_from(self.index.arrays.records.len()).unwrap_or(NONE);
        if ino >= self.max_records {
            return Err(MemberError::TooManyEntries);
        }
        arena::push(&mut self.index.arrays.records, record);
        self.index.totals.entries += 1;
        Ok(ino)
    }

    /// Removes the contents of replaced directories.
    pub(super) fn prune_replaced_directories(&mut self) {
        let count = u32::try_from(self.index.arrays.records.len()).unwrap_or(NONE);
        // A directory has a higher number than its parent, and never moves.
        for ino in ROOT + 1..count {
            let record = self.record(ino);
            if record.is_directory() {
                let parent = self.dirent(record.dirent.get()).parent.get();
                if !self.record(parent).is_directory() {
                    self.remove_inode(ino);
                }
            }
        }
        for number in 0..self.index.arrays.dirents.len() {
            let number = u32::try_from(number).unwrap_or(NONE);
            let Dirent { ino, parent, .. } = *self.dirent(number);
            if ino.get() == 0 || self.record(parent.get()).is_directory() {
                continue;
            }
            // The loop above already removed directories.
            if self.record(ino.get()).mode.get() != 0 {
                self.release_target(number);
            }
            self.dirent_mut(number).ino = 0.into();
        }
    }

    /// Checks that a dirent with this name can be added.
    fn check_name(&self, name: &[u8]) -> Result<(), MemberError> {
        if name.len() > MAX_NAME_BYTES {
            return Err(MemberError::NameTooLong);
        }
        if self.index.arrays.dirents.len() >= NONE as usize {
            return Err(MemberError::TooManyEntries);
        }
        Ok(())
    }

    /// Checks that one more name without a dirent can be added.
    pub(super) fn check_capacity(&self, name: &[u8]) -> Result<(), MemberError> {
        self.check_name(name)?;
        let arrays = &self.index.arrays;
        if arrays.records.len() + arrays.unresolved.len() >= self.max_records as usize {
            return Err(MemberError::TooManyEntries);
        }
        Ok(())
    }

    /// Adds a dirent for a new name.
    fn add_dirent(&mut self, parent: u32, name: &[u8], ino: u32) -> u32 {
        let number = u32::try_from(self.index.arrays.dirents.len()).expect("checked by check_name");
        let dirent = Dirent {
            name: self.index.arrays.arena.push_name(name),
            ino: ino.into(),
            parent: parent.into(),
        };
        arena::push(&mut self.index.arrays.dirents, dirent);
        let Index { arrays, names, .. } = &mut self.index;
        if let Some(names) = names {
            names.add(arrays, number);
        }
        let is_directory = self.record(ino).is_directory();
        let parent = self.record_mut(parent);
        parent.children = parent.children.get().saturating_add(1).into();
        parent.links = parent
            .links
            .get()
            .saturating_add(u32::from(is_directory))
            .into();
        number
    }

    /// The directory `name` in directory `parent` of a layer, for whiteouts below it.
    ///
    /// Creates it as `unseen` when it is missing. `None` when another type of entry replaces the directory of
    /// lower layers.
    pub(super) fn whiteout_directory(
        &mut self,
        parent: u32,
        name: &[u8],
        unseen: InodeRow,
    ) -> Result<Option<u32>, MemberError> {
        let Some(number) = self.find(parent, name) else {
            return self.add(parent, name, unseen).map(Some);
        };
        let ino = self.dirent(number).ino.get();
        Ok(self.record(ino).is_directory().then_some(ino))
    }

    /// Whether `ino` is a hard link whose target is not known yet.
    pub(super) fn is_forward_link(&self, ino: u32) -> bool {
        self.record(ino).kind() == FORWARD_LINK
    }

    /// The step that dirent `number` adds to path resolution.
    fn step_through(&self, number: u32) -> Step<u32> {
        let ino = self.dirent(number).ino.get();
        match self.index.arrays.record(ino) {
            Some(record) if record.is_directory() => Step::Directory(ino),
            Some(record) if record.kind() == SYMLINK => {
                let target = self
                    .index
                    .arrays
                    .arena
                    .bytes_at(record.data.get(), record.size.get());
                Step::Link(target.unwrap_or_default().to_vec())
            }
            _ => Step::Other,
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.index.memory_bytes()
    }

    /// Drops the table, sorts the dirents in place, and updates all references to them.
    pub(super) fn into_sorted(self) -> Index {
        let Self { mut index, .. } = self;
        index.names = None;
        index.arrays.dirents.retain(|dirent| dirent.ino.get() != 0);
        sort_dirents(&mut index.arrays);
        index
    }
}

/// Sorts the dirents in place, and updates ranges, first dirents and name order.
pub(super) fn sort_dirents(arrays: &mut Arrays) {
    arrays.dirents.sort_unstable_by(|left, right| {
        let key = |dirent: &Dirent| (dirent.parent.get(), dirent.ino.get());
        let by_age = || left.name.offset().cmp(&right.name.offset());
        key(left).cmp(&key(right)).then_with(by_age)
    });
    sort_names(arrays);
    set_child_ranges(arrays);
    set_first_dirents(arrays);
}

/// Computes the order of names in each directory.
fn sort_names(arrays: &mut Arrays) {
    let count = u32::try_from(arrays.dirents.len()).expect("checked by check_name");
    let mut by_name: Vec<U32> = (0..count).map(U32::from).collect();
    let mut rest = by_name.as_mut_slice();
    for siblings in arrays
        .dirents
        .chunk_by(|left, right| left.parent == right.parent)
    {
        let (ours, after) = rest.split_at_mut(siblings.len());
        let name = |number: &U32| {
            let dirent = arrays.dirent(number.get())?;
            arrays.arena.name(dirent.name)
        };
        ours.sort_unstable_by(|left, right| name(left).cmp(&name(right)));
        rest = after;
    }
    arrays.by_name = by_name;
}

/// Sets the range of dirents of each directory.
fn set_child_ranges(arrays: &mut Arrays) {
    let mut number = 0_u64;
    for siblings in arrays
        .dirents
        .chunk_by(|left, right| left.parent == right.parent)
    {
        let parent = siblings.first().map_or(0, |dirent| dirent.parent.get());
        if let Some(record) = arrays.records.get_mut(parent as usize) {
            record.data = number.into();
            record.children = u32::try_from(siblings.len()).unwrap_or(u32::MAX).into();
        }
        number += siblings.len() as u64;
    }
}

/// Sets the first dirent of each entry.
///
/// The builder appends names to the arena as they appear, so the first one has the lowest offset.
fn set_first_dirents(arrays: &mut Arrays) {
    for record in &mut arrays.records {
        record.dirent = NONE.into();
    }
    for (number, dirent) in (0_u32..).zip(&arrays.dirents) {
        let Some(record) = arrays.records.get_mut(dirent.ino.get() as usize) else {
            continue;
        };
        let first = arrays.dirents.get(record.dirent.get() as usize);
        if first.is_none_or(|first| dirent.name.offset() < first.name.offset()) {
            record.dirent = number.into();
        }
    }
}

fn hash(seed: u64, parent: u32, name: &[u8]) -> u64 {
    // An odd factor gives different parents different seeds.
    let parent = u64::from(parent).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    xxh3_64_with_seed(name, seed.wrapping_add(parent))
}

/// The record of an implied directory, which no member describes.
///
/// GNU tar gives it the time of extraction, and mode 0777 without the umask. Here it depends neither on the
/// run nor on the order of the members. Its time is 0, as in reproducible archives.
pub(super) fn implied_directory() -> InodeRow {
    InodeRow {
        mode: (DIRECTORY | 0o755).into(),
        links: 2.into(),
        dirent: NONE.into(),
        flags: InodeRow::IMPLIED.into(),
        ..InodeRow::default()
    }
}

/// Resolves the path of a new member, and creates missing directories.
pub(super) struct CreatingResolver<'a>(pub(super) &'a mut BuildTree);

impl resolve::Tree for CreatingResolver<'_> {
    type Directory = u32;
    type Error = MemberError;

    fn root(&self) -> u32 {
        ROOT
    }

    fn is_chroot(&self) -> bool {
        self.0.is_layer
    }

    fn step(&mut self, parent: &u32, name: &[u8]) -> Result<Step<u32>, MemberError> {
        let Some(number) = self.0.find(*parent, name) else {
            return Ok(Step::Missing);
        };
        let record = self.0.record_mut(self.0.dirent(number).ino.get());
        if record.is_whiteout_only() {
            record.flags = InodeRow::IMPLIED.into();
        }
        Ok(self.0.step_through(number))
    }

    fn imply(&mut self, parent: &u32, name: &[u8]) -> Result<u32, MemberError> {
        self.0.add(*parent, name, implied_directory())
    }
}

/// Resolves a hard link's target in a layer, and creates nothing.
///
/// Returns `None` for a missing directory, which may be in a layer below.
pub(super) struct LayerResolver<'a>(pub(super) &'a BuildTree);

impl resolve::Tree for LayerResolver<'_> {
    type Directory = Option<u32>;
    type Error = std::convert::Infallible;

    fn root(&self) -> Option<u32> {
        Some(ROOT)
    }

    fn is_chroot(&self) -> bool {
        true
    }

    fn step(
        &mut self,
        parent: &Option<u32>,
        name: &[u8],
    ) -> Result<Step<Option<u32>>, Self::Error> {
        let number = parent.and_then(|parent| self.0.find(parent, name));
        Ok(match number.map(|number| self.0.step_through(number)) {
            None => Step::Missing,
            Some(Step::Directory(ino)) => Step::Directory(Some(ino)),
            Some(Step::Link(target)) => Step::Link(target),
            Some(Step::Other | Step::Missing) => Step::Other,
        })
    }

    fn imply(&mut self, _parent: &Option<u32>, _name: &[u8]) -> Result<Option<u32>, Self::Error> {
        Ok(None)
    }
}

/// Resolves a hard link's target, and creates nothing.
pub(super) struct ReadOnlyResolver<'a>(pub(super) &'a BuildTree);

/// Why resolution stops before the target.
#[derive(Debug)]
pub(super) enum NameError {
    /// A name is missing.
    Missing,
    /// A component is a hard link whose own target is not known yet.
    Forward,
}

impl resolve::Tree for ReadOnlyResolver<'_> {
    type Directory = u32;
    type Error = NameError;

    fn root(&self) -> u32 {
        ROOT
    }

    fn step(&mut self, parent: &u32, name: &[u8]) -> Result<Step<u32>, NameError> {
        match self.0.find(*parent, name) {
            None => Ok(Step::Missing),
            Some(number) if self.0.is_forward_link(self.0.dirent(number).ino.get()) => {
                Err(NameError::Forward)
            }
            Some(number) => Ok(self.0.step_through(number)),
        }
    }

    fn imply(&mut self, _parent: &u32, _name: &[u8]) -> Result<u32, NameError> {
        Err(NameError::Missing)
    }
}
