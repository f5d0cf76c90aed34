//! Several indexes as one: the arrays of a tree whose names come from the trees of layers.
//!
//! What is seen of which layer is decided elsewhere and handed in as a [`Plan`]; this file only
//! moves rows. The plain streams of the layers lie one behind the other in one address space, so
//! that pieces, holes and spans of the merged index are what they are of any other.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::sync::Arc;

use super::blocks::MIN_BLOCK_LEN;
use super::entry::{
    DIRECTORY, Dirent, Extra, FILE, NONE, Name, PieceRow, Record, SYMLINK, SpanRow, Xattr,
};
use super::memory::Charge;
use super::{
    Arrays, Index, Ino, MemoryLimit, Options, Origin, Problem, TooMuchMemory, Totals, names, tree,
};
use crate::base::extent::Packed;

/// An entry of one of several indexes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Place {
    /// Which index, from the bottom.
    pub layer: u32,
    /// Its number there.
    pub ino: Ino,
}

/// A directory of the merged tree, or another entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Surface {
    /// Whose number it has in the order of entries: of several directories that are one, the lowest.
    pub place: Place,
    /// Whose attributes it shows.
    pub attributes: Place,
}

/// A name of the merged tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Named<'a> {
    /// The directory it is in, by its number in [`Plan::directories`].
    pub directory: u32,
    /// One component.
    pub name: &'a [u8],
    /// What it names; of a directory [`Surface::place`].
    pub target: Place,
}

/// What a merged tree consists of.
#[derive(Clone, Debug, Default)]
pub struct Plan<'a> {
    /// All its directories, the root first.
    pub directories: Vec<Surface>,
    /// All its names, none twice in a directory. Of several for one entry the first one is its path.
    pub names: Vec<Named<'a>>,
    /// Entries of the layers that nothing could be made of, and the first of them.
    pub problem_count: u64,
    /// See [`Self::problem_count`]; each with its layer, counted from 0.
    pub problems: Vec<(usize, Problem)>,
}

/// A merged tree, and where its entries come from.
#[derive(Debug)]
pub struct Merged {
    /// The tree. Its plain stream is those of the layers, one behind the other; no decoding can
    /// start anywhere in it.
    pub index: Arc<Index>,
    /// The first members that are damaged or not in the tree, each with its layer, counted from 0. The index
    /// has the same.
    pub problems: Vec<(usize, Problem)>,
    /// For each number of an entry, 0 included, where its content is.
    places: Vec<Place>,
    /// For each layer, for each number there, the one in the merged tree; 0 when nothing is seen.
    numbers: Vec<Vec<u32>>,
}

/// Why layers cannot be merged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MergeError {
    /// There are more entries, or more that belongs to them, than numbers.
    #[error("the layers together have more entries than one tree can have")]
    TooLarge,
    /// The merge needs more memory than is allowed.
    #[error(transparent)]
    TooMuchMemory(#[from] TooMuchMemory),
}

impl Merged {
    /// Which entry of which layer `ino` is; of a directory the lowest.
    pub fn place(&self, ino: Ino) -> Option<Place> {
        let place = self.places.get(ino.0 as usize).copied();
        place.filter(|place| place.ino != Ino(0))
    }

    /// The number that an entry of a layer has here; `None` when it is not seen.
    pub fn number(&self, place: Place) -> Option<Ino> {
        let numbers = self.numbers.get(place.layer as usize)?;
        let number = numbers.get(place.ino.0 as usize)?;
        (*number != 0).then_some(Ino(*number))
    }

    /// What this holds on to besides the index, in bytes.
    pub fn memory_bytes(&self) -> usize {
        table_bytes(&self.numbers, &self.places)
    }
}

/// The bytes of the tables of [`Merged`].
fn table_bytes(numbers: &[Vec<u32>], places: &Vec<Place>) -> usize {
    let numbers = numbers.iter().map(names::capacity_bytes);
    numbers.sum::<usize>() + names::capacity_bytes(places)
}

/// Makes one index of `layers`, from the bottom, as `plan` says. Attributes whose names `hides` are
/// left out. `origin` is what it is to be known by; its plain bytes are set here. The memory of the
/// index and of its tables counts against `limit` while the index lives.
///
/// Numbers are given in the order of the layers, and of the entries in each: they depend on
/// nothing but the indexes.
///
/// # Errors
/// When it does not fit into an index, or into the limit.
pub fn merge(
    layers: &[&Index],
    plan: &Plan<'_>,
    hides: impl Fn(&[u8]) -> bool,
    origin: Origin,
    limit: &MemoryLimit,
) -> Result<Merged, MergeError> {
    let mut charge = limit.charge();
    let (numbers, places) = number(layers, plan, &mut charge)?;
    let table_bytes = table_bytes(&numbers, &places);
    let mut plain_bytes = 0_u64;
    let indexes = layers.to_vec();
    let mut layers: Vec<_> = layers
        .iter()
        .map(|index| {
            let start = plain_bytes;
            plain_bytes = plain_bytes.saturating_add(index.origin.plain_bytes);
            Layer {
                arrays: &index.arrays,
                start,
                extras: HashMap::new(),
                sets: HashMap::new(),
            }
        })
        .collect();
    let mut arrays = Arrays {
        owners: vec![Name::default()],
        extras: vec![Extra::default()],
        ..Arrays::default()
    };
    charge.reserve(&mut arrays.records, places.len())?;
    charge.reserve(&mut arrays.dirents, plan.names.len())?;
    let spans = indexes.iter().map(|index| index.arrays.spans.len());
    charge.reserve(&mut arrays.spans, spans.sum())?;
    let mut attributes: Vec<Place> = Vec::new();
    charge.reserve(&mut attributes, places.len())?;
    attributes.extend_from_slice(&places);
    let attribute_bytes = names::capacity_bytes(&attributes);
    let mut merging = Merging {
        arrays,
        owners: HashMap::new(),
        hides: &hides,
        charge,
        other_bytes: table_bytes + attribute_bytes,
    };
    merging.arrays.records.push(Record::default());
    for directory in &plan.directories {
        let number = number_of(&numbers, directory.place) as usize;
        if let Some(place) = attributes.get_mut(number) {
            *place = directory.attributes;
        }
    }
    for place in attributes.get(1..).unwrap_or_default() {
        let layer = layers.get_mut(place.layer as usize);
        let layer = layer.ok_or(MergeError::TooLarge)?;
        let record = merging.record(layer, place.ino)?;
        merging.arrays.records.push(record);
        merging.check_memory()?;
    }
    drop(attributes);
    merging.other_bytes -= attribute_bytes;
    merging.link(plan, &numbers)?;
    for layer in &layers {
        merging.spans(layer);
    }
    let Merging {
        mut arrays,
        mut charge,
        ..
    } = merging;
    // The order of the names.
    charge.add(arrays.dirents.len() * size_of::<u32>())?;
    tree::sort(&mut arrays);
    arrays.shrink();
    let counts = indexes.iter().map(|index| index.problem_count());
    let problem_count = counts.fold(plan.problem_count, u64::saturating_add);
    let totals = Totals::of(&arrays, problem_count);
    let problems = problems(&indexes, plan);
    let of_layers = problems.iter().map(|(layer, problem)| Problem {
        what: format!("layer {}: {}", layer + 1, problem.what),
        ..problem.clone()
    });
    let mut index = Index {
        arrays,
        names: None,
        replaced: None,
        origin: Origin {
            plain_bytes,
            ..origin
        },
        // Bytes are read, and verified, layer by layer.
        block_len: MIN_BLOCK_LEN,
        digested: Packed(0),
        totals,
        problems: of_layers.collect(),
        charge,
    };
    let index_bytes = index.memory_bytes();
    index.charge.set(index_bytes + table_bytes)?;
    Ok(Merged {
        index: Arc::new(index),
        problems,
        places,
        numbers,
    })
}

/// The first members that are damaged or not in the merged tree.
fn problems(layers: &[&Index], plan: &Plan<'_>) -> Vec<(usize, Problem)> {
    let own = layers.iter().enumerate().flat_map(|(number, layer)| {
        let problems = layer.problems().iter();
        problems.map(move |problem| (number, problem.clone()))
    });
    let problems = own.chain(plan.problems.iter().cloned());
    problems.take(Options::default().max_problems).collect()
}

/// Gives a number to whatever `plan` names: for each layer by its numbers, and back.
fn number(
    layers: &[&Index],
    plan: &Plan<'_>,
    charge: &mut Charge,
) -> Result<(Vec<Vec<u32>>, Vec<Place>), MergeError> {
    let nobody = Place {
        layer: 0,
        ino: Ino(0),
    };
    let mut numbers: Vec<Vec<u32>> = Vec::new();
    for index in layers {
        let count = index.arrays.records.len();
        let mut unseen = Vec::new();
        charge.reserve(&mut unseen, count)?;
        unseen.resize(count, 0);
        numbers.push(unseen);
    }
    let directories = plan.directories.iter().map(|directory| directory.place);
    for place in directories.chain(plan.names.iter().map(|named| named.target)) {
        let numbers = numbers.get_mut(place.layer as usize);
        if let Some(number) = numbers.and_then(|numbers| numbers.get_mut(place.ino.0 as usize)) {
            *number = 1;
        }
    }
    let seen = numbers.iter().flatten().filter(|&&number| number != 0);
    let mut places = Vec::new();
    charge.reserve(&mut places, 1 + seen.count())?;
    places.push(nobody);
    for (layer, numbers) in (0_u32..).zip(&mut numbers) {
        for (ino, number) in (0_u32..).zip(numbers.iter_mut()) {
            if *number == 0 {
                continue;
            }
            let next = u32::try_from(places.len()).ok().filter(|&next| next < NONE);
            *number = next.ok_or(MergeError::TooLarge)?;
            places.push(Place {
                layer,
                ino: Ino(ino),
            });
        }
    }
    if u32::try_from(plan.names.len()).is_err() {
        return Err(MergeError::TooLarge);
    }
    Ok((numbers, places))
}

fn number_of(numbers: &[Vec<u32>], place: Place) -> u32 {
    let numbers = numbers.get(place.layer as usize);
    let number = numbers.and_then(|numbers| numbers.get(place.ino.0 as usize));
    number.copied().unwrap_or_default()
}

/// An index that rows are taken from.
struct Layer<'a> {
    arrays: &'a Arrays,
    /// Where its plain stream begins in that of the whole.
    start: u64,
    /// Which rows of extras have become which.
    extras: HashMap<u32, u32>,
    /// Which sets of attributes, by the place of their first and their number, have become which.
    sets: HashMap<(u32, u32), (u32, u32)>,
}

/// The index that rows are put into.
struct Merging<'a, 'h> {
    arrays: Arrays,
    owners: HashMap<&'a [u8], u16>,
    hides: &'h dyn Fn(&[u8]) -> bool,
    charge: Charge,
    /// The memory of the merge besides the arrays.
    other_bytes: usize,
}

/// Bytes that an entry of [`Layer::extras`] or [`Layer::sets`] may take while its table grows.
const TABLE_ENTRY_BYTES: usize = 64;

impl<'a> Merging<'a, '_> {
    /// Counts the memory that the arrays have now.
    fn check_memory(&mut self) -> Result<(), TooMuchMemory> {
        let bytes = self.arrays.memory_bytes() + self.other_bytes;
        self.charge.set(bytes)
    }

    /// The record of entry `ino` of `layer`, without names.
    fn record(&mut self, layer: &mut Layer<'a>, ino: Ino) -> Result<Record, MergeError> {
        let arrays = layer.arrays;
        let record = arrays.record(ino.0);
        let mut record = *record.ok_or(MergeError::TooLarge)?;
        record.user = self.owner(arrays, record.user.get()).into();
        record.group = self.owner(arrays, record.group.get()).into();
        record.extra = self.extra(layer, record.extra.get())?.into();
        record.dirent = NONE.into();
        record.links = 0.into();
        match record.kind() {
            FILE => record.data = record.data.get().saturating_add(layer.start).into(),
            SYMLINK => {
                let target = arrays.arena.stretch(record.data.get(), record.size.get());
                let offset = self.arrays.arena.push(target.unwrap_or_default());
                record.data = (offset as u64).into();
            }
            DIRECTORY => {
                record.data = 0.into();
                record.children = 0.into();
                record.links = 2.into();
            }
            _ => {}
        }
        Ok(record)
    }

    /// The row of an owner's name; 0, the empty name, when there are too many.
    fn owner(&mut self, arrays: &'a Arrays, row: u16) -> u16 {
        let name = arrays.owners.get(usize::from(row));
        let name = name.and_then(|&name| arrays.arena.name(name));
        let name = name.unwrap_or_default();
        if name.is_empty() {
            return 0;
        }
        match self.owners.entry(name) {
            Slot::Occupied(known) => *known.get(),
            Slot::Vacant(unknown) => {
                let Ok(row) = u16::try_from(self.arrays.owners.len()) else {
                    return 0;
                };
                let stored = self.arrays.arena.push_name(name);
                names::push(&mut self.arrays.owners, stored);
                *unknown.insert(row)
            }
        }
    }

    fn extra(&mut self, layer: &mut Layer<'a>, row: u32) -> Result<u32, MergeError> {
        let Some(extra) = layer.arrays.extras.get(row as usize).filter(|_| row != 0) else {
            return Ok(0);
        };
        if let Some(&known) = layer.extras.get(&row) {
            return Ok(known);
        }
        self.other_bytes += TABLE_ENTRY_BYTES;
        let mut extra = *extra;
        let (first, count) = self.set(layer, row, extra.xattr.get(), extra.xattr_count.get())?;
        extra.xattr = first.into();
        extra.xattr_count = count.into();
        if extra.sparse.get() == 1 {
            let map = layer.arrays.map(row).unwrap_or_default();
            extra.piece = count_of(&self.arrays.pieces)?.into();
            for piece in map {
                let plain = piece.plain.get().saturating_add(layer.start).into();
                names::push(&mut self.arrays.pieces, PieceRow { plain, ..*piece });
                self.check_memory()?;
            }
            // What lay outside is left out.
            extra.piece_count = count_of(map)?.into();
        } else if count == 0 {
            layer.extras.insert(row, 0);
            return Ok(0);
        }
        let number = count_of(&self.arrays.extras)?;
        names::push(&mut self.arrays.extras, extra);
        layer.extras.insert(row, number);
        Ok(number)
    }

    /// The place of the attributes of row `extra`, and their number.
    fn set(
        &mut self,
        layer: &mut Layer<'a>,
        extra: u32,
        first: u32,
        count: u32,
    ) -> Result<(u32, u32), MergeError> {
        if let Some(&known) = layer.sets.get(&(first, count)) {
            return Ok(known);
        }
        self.other_bytes += TABLE_ENTRY_BYTES;
        let start = count_of(&self.arrays.xattrs)?;
        for (name, value) in layer.arrays.xattrs(extra) {
            if (self.hides)(name) {
                continue;
            }
            let xattr = Xattr {
                name: self.arrays.arena.push_name(name),
                value_offset: (self.arrays.arena.push(value) as u64).into(),
                value_len: (value.len() as u64).into(),
            };
            names::push(&mut self.arrays.xattrs, xattr);
            self.check_memory()?;
        }
        let set = (start, count_of(&self.arrays.xattrs)? - start);
        layer.sets.insert((first, count), set);
        Ok(set)
    }

    /// Adds the names, and counts them.
    fn link(&mut self, plan: &Plan<'_>, numbers: &[Vec<u32>]) -> Result<(), TooMuchMemory> {
        for named in &plan.names {
            let directory = plan.directories.get(named.directory as usize);
            let parent = directory.map_or(0, |directory| number_of(numbers, directory.place));
            let ino = number_of(numbers, named.target);
            let Some(record) = self.arrays.records.get_mut(ino as usize) else {
                continue;
            };
            let is_directory = record.is_directory();
            if !is_directory {
                record.links = record.links.get().saturating_add(1).into();
            }
            if is_directory && let Some(parent) = self.arrays.records.get_mut(parent as usize) {
                parent.links = parent.links.get().saturating_add(1).into();
            }
            self.arrays.dirents.push(Dirent {
                name: self.arrays.arena.push_name(named.name),
                ino: ino.into(),
                parent: parent.into(),
            });
            self.check_memory()?;
        }
        Ok(())
    }

    /// Where the spans of `layer` lie; decoding them is for the layer.
    fn spans(&mut self, layer: &Layer<'_>) {
        let rows = layer.arrays.spans.iter().map(|row| SpanRow {
            plain: row.plain.get().saturating_add(layer.start).into(),
            packed: 0.into(),
            window_offset: 0.into(),
            window_len: 0.into(),
            state: 0.into(),
            bit: SpanRow::NO_SEEK_POINT.into(),
            checksum: 0.into(),
            flags: SpanRow::UNHASHED.into(),
        });
        self.arrays.spans.extend(rows);
    }
}

/// How many `rows` there are.
fn count_of<T>(rows: &[T]) -> Result<u32, MergeError> {
    u32::try_from(rows.len()).map_err(|_| MergeError::TooLarge)
}
