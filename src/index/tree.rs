//! The tree under construction: arrays that grow, and a table from names to dirents.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;
use xxhash_rust::xxh3::xxh3_64_with_seed;
use zerocopy::little_endian::U32;

use super::arrays::Arrays;
use super::blocks::MIN_BLOCK_LEN;
use super::builder::{MAX_NAME, Options, Refused};
use super::change::Changes;
use super::entry::{DIRECTORY, Dirent, Extra, FORWARD, NONE, Name, Record, SYMLINK};
use super::{Index, MemoryLimit, Origin, Totals, names};
use crate::base::extent::Packed;
use crate::base::resolve::{self, Step};

/// The root's record.
pub(super) const ROOT: u32 = 1;

#[derive(Debug)]
pub(super) struct Tree {
    /// The index so far.
    pub(super) index: Index,
    /// How many records there may be.
    max_records: u32,
    /// Whether it is a layer's: there anything replaces a directory, full or not.
    is_layer: bool,
    /// What is not as it was.
    pub(super) changes: Changes,
}

/// Dirents by parent and name, while more of them come.
#[derive(Debug)]
pub(super) struct NameTable {
    /// Numbers only: 4 bytes and a control byte each.
    dirents: HashTable<u32>,
    /// Differs from run to run, so that no archive can be made whose names collide.
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

    /// Adds dirent `number`, which is in `arrays` already.
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

impl Tree {
    /// A tree of a root and nothing else.
    pub(super) fn new(options: Options) -> Self {
        let arrays = Arrays {
            records: vec![Record::default(), implied()],
            owners: vec![Name::default()],
            extras: vec![Extra::default()],
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
            changes: Changes::new(options.keeps_replaced),
        }
    }

    pub(super) fn arrays(&self) -> &Arrays {
        &self.index.arrays
    }

    pub(super) fn arrays_mut(&mut self) -> &mut Arrays {
        &mut self.index.arrays
    }

    pub(super) fn record(&self, ino: u32) -> &Record {
        let record = self.index.arrays.records.get(ino as usize);
        record.expect("numbers come from this tree")
    }

    pub(super) fn record_mut(&mut self, ino: u32) -> &mut Record {
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
    pub(super) fn add(&mut self, parent: u32, name: &[u8], record: Record) -> Result<u32, Refused> {
        self.check_name(name)?;
        let ino = self.number(record)?;
        let dirent = self.name(parent, name, ino);
        self.settle_in(ino, dirent);
        Ok(ino)
    }

    /// Puts `record` under a new number where dirent `number` leads.
    pub(super) fn replace(&mut self, number: u32, record: Record) -> Result<u32, Refused> {
        self.check_replaceable(number)?;
        let ino = self.number(record)?;
        self.vacate(number);
        self.dirent_mut(number).ino = ino.into();
        self.settle_in(ino, number);
        if record.is_directory() {
            self.count_link(self.dirent(number).parent.get());
        }
        Ok(ino)
    }

    /// Tells a new entry its only name.
    fn settle_in(&mut self, ino: u32, dirent: u32) {
        let record = self.record_mut(ino);
        record.dirent = dirent.into();
        record.links = (1 + u32::from(record.is_directory())).into();
    }

    /// Gives `ino` the new name `name` in `parent`.
    pub(super) fn link(&mut self, parent: u32, name: &[u8], ino: u32) -> Result<(), Refused> {
        self.check_name(name)?;
        self.name(parent, name, ino);
        self.count_link(ino);
        Ok(())
    }

    /// Makes dirent `number` a name of `ino`, which is not a directory.
    pub(super) fn relink(&mut self, number: u32, ino: u32) -> Result<(), Refused> {
        self.check_replaceable(number)?;
        self.vacate(number);
        // The dirents of one entry tell their age by their offset in the arena.
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
        self.count_link(ino);
        Ok(())
    }

    /// Takes away dirent `number`, which is not a directory's. It stays in the arrays until they
    /// are sorted.
    pub(super) fn unlink(&mut self, number: u32) {
        self.vacate(number);
        let parent = self.dirent(number).parent.get();
        self.dirent_mut(number).ino = 0.into();
        let parent = self.record_mut(parent);
        parent.children = parent.children.get().saturating_sub(1).into();
    }

    fn check_replaceable(&self, number: u32) -> Result<(), Refused> {
        let record = self.record(self.dirent(number).ino.get());
        if record.is_directory() && record.children.get() > 0 && !self.is_layer {
            return Err(Refused::NotEmpty);
        }
        Ok(())
    }

    /// Forgets what dirent `number` names. [`Self::prune`] forgets what is in it.
    fn vacate(&mut self, number: u32) {
        let Dirent { ino, parent, .. } = *self.dirent(number);
        self.changes.note(ino.get());
        let record = self.record_mut(ino.get());
        if record.is_directory() {
            self.bury(ino.get());
            let parent = self.record_mut(parent.get());
            parent.links = parent.links.get().saturating_sub(1).into();
        } else {
            record.links = record.links.get().saturating_sub(1).into();
            if record.links.get() == 0 {
                self.bury(ino.get());
            }
        }
    }

    /// Takes away entry `ino`, which has no name left. Who may have it open already keeps it.
    fn bury(&mut self, ino: u32) {
        let mut record = std::mem::take(self.record_mut(ino));
        self.index.totals.entries = self.index.totals.entries.saturating_sub(1);
        if let Some(replaced) = &mut self.index.replaced
            && record.kind() != FORWARD
        {
            record.links = 0.into();
            record.dirent = NONE.into();
            replaced.insert(ino, record);
        }
    }

    fn count_link(&mut self, ino: u32) {
        self.changes.note(ino);
        let record = self.record_mut(ino);
        record.links = record.links.get().saturating_add(1).into();
    }

    /// The next number.
    fn number(&mut self, record: Record) -> Result<u32, Refused> {
        let ino = u32::try_from(self.index.arrays.records.len()).unwrap_or(NONE);
        if ino >= self.max_records {
            return Err(Refused::Full);
        }
        names::push(&mut self.index.arrays.records, record);
        self.index.totals.entries += 1;
        Ok(ino)
    }

    /// Forgets what is in directories that were replaced.
    pub(super) fn prune(&mut self) {
        let count = u32::try_from(self.index.arrays.records.len()).unwrap_or(NONE);
        // A directory's number is higher than that of the directory it is in, and it never moves.
        for ino in ROOT + 1..count {
            let record = self.record(ino);
            if record.is_directory() {
                let parent = self.dirent(record.dirent.get()).parent.get();
                if !self.record(parent).is_directory() {
                    self.bury(ino);
                }
            }
        }
        for number in 0..self.index.arrays.dirents.len() {
            let number = u32::try_from(number).unwrap_or(NONE);
            let Dirent { ino, parent, .. } = *self.dirent(number);
            if ino.get() == 0 || self.record(parent.get()).is_directory() {
                continue;
            }
            // A directory is gone by now.
            if self.record(ino.get()).mode.get() != 0 {
                self.vacate(number);
            }
            self.dirent_mut(number).ino = 0.into();
        }
    }

    /// Whether there can be another dirent with this name.
    fn check_name(&self, name: &[u8]) -> Result<(), Refused> {
        if name.len() > MAX_NAME {
            return Err(Refused::NameTooLong);
        }
        if self.index.arrays.dirents.len() >= NONE as usize {
            return Err(Refused::Full);
        }
        Ok(())
    }

    /// Whether one more name can be remembered that is no dirent's.
    pub(super) fn check_more(&self, name: &[u8]) -> Result<(), Refused> {
        self.check_name(name)?;
        let arrays = &self.index.arrays;
        if arrays.records.len() + arrays.unresolved.len() >= self.max_records as usize {
            return Err(Refused::Full);
        }
        Ok(())
    }

    /// A dirent for a name that is not there yet.
    fn name(&mut self, parent: u32, name: &[u8], ino: u32) -> u32 {
        let number = u32::try_from(self.index.arrays.dirents.len()).expect("checked by check_name");
        let dirent = Dirent {
            name: self.index.arrays.arena.push_name(name),
            ino: ino.into(),
            parent: parent.into(),
        };
        names::push(&mut self.index.arrays.dirents, dirent);
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

    /// What `name` in directory `parent` of a layer is to whiteouts below it: a directory, made when nothing
    /// is there. `None` when it is something else, which replaces what lower layers have.
    pub(super) fn whiteout_directory(
        &mut self,
        parent: u32,
        name: &[u8],
        unseen: Record,
    ) -> Result<Option<u32>, Refused> {
        let Some(number) = self.find(parent, name) else {
            return self.add(parent, name, unseen).map(Some);
        };
        let ino = self.dirent(number).ino.get();
        Ok(self.record(ino).is_directory().then_some(ino))
    }

    /// Whether `ino` is a hard link whose target has not come yet.
    pub(super) fn is_forward(&self, ino: u32) -> bool {
        self.record(ino).kind() == FORWARD
    }

    /// What dirent `number` is to a path that leads through it.
    fn step(&self, number: u32) -> Step<u32> {
        let ino = self.dirent(number).ino.get();
        match self.index.arrays.record(ino) {
            Some(record) if record.is_directory() => Step::Directory(ino),
            Some(record) if record.kind() == SYMLINK => {
                let target = self
                    .index
                    .arrays
                    .arena
                    .stretch(record.data.get(), record.size.get());
                Step::Link(target.unwrap_or_default().to_vec())
            }
            _ => Step::Other,
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.index.memory_bytes()
    }

    /// Drops the table, sorts the dirents in place and tells directories and entries where
    /// theirs are now, and what the order of their names is.
    pub(super) fn into_sorted(self) -> Index {
        let Self { mut index, .. } = self;
        index.names = None;
        index.arrays.dirents.retain(|dirent| dirent.ino.get() != 0);
        sort(&mut index.arrays);
        index
    }
}

/// Sorts the dirents in place and tells directories and entries where theirs are now, and what the
/// order of their names is.
pub(super) fn sort(arrays: &mut Arrays) {
    arrays.dirents.sort_unstable_by(|left, right| {
        let key = |dirent: &Dirent| (dirent.parent.get(), dirent.ino.get());
        let by_age = || left.name.offset().cmp(&right.name.offset());
        key(left).cmp(&key(right)).then_with(by_age)
    });
    sort_names(arrays);
    place_children(arrays);
    place_first_names(arrays);
}

/// Fills in the order of names in each directory.
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

/// Fills in where each directory's dirents are.
fn place_children(arrays: &mut Arrays) {
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

/// Fills in under which dirent each entry first appeared: names are appended to the arena as they
/// appear, so it is the one whose name lies first.
fn place_first_names(arrays: &mut Arrays) {
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
    // An odd factor keeps the seeds of different parents different.
    let parent = u64::from(parent).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    xxh3_64_with_seed(name, seed.wrapping_add(parent))
}

/// A directory that only the paths below it imply. GNU tar gives it the time of extraction and the mode that
/// the umask leaves of 0777. Here it does not depend on the run or on the order of the members: its time is
/// 0, as in reproducible archives.
pub(super) fn implied() -> Record {
    Record {
        mode: (DIRECTORY | 0o755).into(),
        links: 2.into(),
        dirent: NONE.into(),
        flags: Record::IMPLIED.into(),
        ..Record::default()
    }
}

/// The tree as the way to a new member: makes the directories that are missing.
pub(super) struct Growing<'a>(pub(super) &'a mut Tree);

impl resolve::Tree for Growing<'_> {
    type Directory = u32;
    type Error = Refused;

    fn root(&self) -> u32 {
        ROOT
    }

    fn is_chroot(&self) -> bool {
        self.0.is_layer
    }

    fn step(&mut self, parent: &u32, name: &[u8]) -> Result<Step<u32>, Refused> {
        let Some(number) = self.0.find(*parent, name) else {
            return Ok(Step::Missing);
        };
        let record = self.0.record_mut(self.0.dirent(number).ino.get());
        if record.is_unseen() {
            record.flags = Record::IMPLIED.into();
        }
        Ok(self.0.step(number))
    }

    fn imply(&mut self, parent: &u32, name: &[u8]) -> Result<u32, Refused> {
        self.0.add(*parent, name, implied())
    }
}

/// The tree of a layer as the way to a hard link's target: makes nothing. What is missing may be in a layer
/// below, and is `None`.
pub(super) struct Incomplete<'a>(pub(super) &'a Tree);

impl resolve::Tree for Incomplete<'_> {
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
        Ok(match number.map(|number| self.0.step(number)) {
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

/// The tree as the way to a hard link's target: makes nothing.
pub(super) struct Existing<'a>(pub(super) &'a Tree);

/// Why the way to a target ends before the target.
#[derive(Debug)]
pub(super) enum Unknown {
    /// Nothing is there.
    Missing,
    /// A hard link whose own target has not come yet is on the way.
    Forward,
}

impl resolve::Tree for Existing<'_> {
    type Directory = u32;
    type Error = Unknown;

    fn root(&self) -> u32 {
        ROOT
    }

    fn step(&mut self, parent: &u32, name: &[u8]) -> Result<Step<u32>, Unknown> {
        match self.0.find(*parent, name) {
            None => Ok(Step::Missing),
            Some(number) if self.0.is_forward(self.0.dirent(number).ino.get()) => {
                Err(Unknown::Forward)
            }
            Some(number) => Ok(self.0.step(number)),
        }
    }

    fn imply(&mut self, _parent: &u32, _name: &[u8]) -> Result<u32, Unknown> {
        Err(Unknown::Missing)
    }
}
