//! Merges several indexes into one tree with names from all layers. The caller's [`MergePlan`] decides which
//! entries are visible; this file only copies rows. The layers' plain streams follow each other in one
//! address space, so pieces, holes and spans keep their meaning.

use std::collections::HashMap;
use std::sync::Arc;

use super::arrays::sort::SortedNames;
use super::arrays::{Arrays, capacity_bytes, push_row};
use super::blocks::MIN_BLOCK_LEN;
use super::builder::build_tree::Options;
use super::memory_limit::{Charge, MemoryLimit, TooMuchMemory};
use super::problem::Problem;
use super::storage::row_types::{
    DIRECTORY, Dirent, ExtraRow, FILE, InodeRow, NONE, PieceRow, SYMLINK, SpanRow,
};
use super::tree::{Index, Ino, Origin, Totals};
use crate::base::extent::Packed;

/// An entry of one of several indexes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LayerIno {
    /// Number of the index, from the bottom.
    pub layer: u32,
    /// Its number in that index.
    pub ino: Ino,
}

/// A directory of the merged tree, made of one or more directories of layers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MergedDirectory {
    /// The lowest of the directories that it merges. Its position decides the inode number.
    pub lowest: LayerIno,
    /// The directory whose attributes it shows.
    pub attributes: LayerIno,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MergedName<'a> {
    /// The directory that contains it, by its number in [`MergePlan::directories`].
    pub directory: u32,
    pub name: &'a [u8],
    /// The entry it names; for a directory, [`MergedDirectory::lowest`].
    pub target: LayerIno,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct MergePlan<'a> {
    /// All its directories, the root first.
    pub directories: Vec<MergedDirectory>,
    /// All its names, each once per directory. The first name of an entry is its path.
    pub names: Vec<MergedName<'a>>,
    /// Number of entries of the layers that cannot be merged.
    pub problem_count: u64,
    /// The first of those entries, each with its layer, counted from 0.
    pub problems: Vec<(usize, Problem)>,
}

/// A merged tree, with the mapping of its entries to the layers.
#[derive(Debug)]
pub struct MergedIndex {
    /// The tree. Its plain stream is those of the layers in order, without seek points.
    pub index: Arc<Index>,
    /// The problems of the index, each with its layer, counted from 0.
    pub problems: Vec<(usize, Problem)>,
    /// For each merged inode number, 0 included, the entry with its content or attributes.
    layer_inos: Vec<LayerIno>,
    /// For each layer and each inode number there, the merged number; 0 if not visible.
    numbers: Vec<Vec<u32>>,
}

/// Why layers cannot be merged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MergeError {
    /// There are more entries, or rows that belong to them, than numbers.
    #[error("the layers together have more entries than one tree can have")]
    TooLarge,
    /// The merge exceeds the memory limit.
    #[error(transparent)]
    TooMuchMemory(#[from] TooMuchMemory),
}

impl MergedIndex {
    /// The entry of a layer behind `ino`; for a directory, the one whose attributes it shows.
    pub fn layer_ino(&self, ino: Ino) -> Option<LayerIno> {
        let layer_ino = self.layer_inos.get(ino.0 as usize).copied();
        layer_ino.filter(|layer_ino| layer_ino.ino != Ino(0))
    }

    /// The merged number of an entry of a layer; `None` when it is not visible.
    pub fn merged_ino(&self, layer_ino: LayerIno) -> Option<Ino> {
        let number = merged_ino_of(&self.numbers, layer_ino);
        (number != 0).then_some(Ino(number))
    }

    /// Memory of this table in bytes, without the index.
    pub fn memory_bytes(&self) -> usize {
        table_bytes(&self.numbers, &self.layer_inos)
    }
}

fn table_bytes(numbers: &[Vec<u32>], layer_inos: &Vec<LayerIno>) -> usize {
    let numbers = numbers.iter().map(capacity_bytes);
    numbers.sum::<usize>() + capacity_bytes(layer_inos)
}

/// Merges `layers`, from the bottom, as `plan` says. Leaves out attributes whose names `hides`. `origin`
/// identifies the merged index, but this function sets its plain bytes. Index and tables count against
/// `limit` while the index lives. Numbers depend only on the order of the layers and their entries. A merge that does
/// not fit into an index is an error.
pub(crate) fn merge(
    layers: &[&Index],
    plan: &MergePlan<'_>,
    hides: impl Fn(&[u8]) -> bool,
    origin: Origin,
    limit: &MemoryLimit,
) -> Result<MergedIndex, MergeError> {
    let mut charge = limit.charge();
    let (numbers, layer_inos) = assign_inos(layers, plan, &mut charge)?;
    let table_bytes = table_bytes(&numbers, &layer_inos);
    let (mut sources, plain_bytes) = SourceLayer::of_all(layers);
    let mut merger = Merger {
        arrays: Arrays::new(),
        hides: &hides,
        charge,
        other_bytes: table_bytes,
    };
    let (arrays, charge) = (&mut merger.arrays, &mut merger.charge);
    charge.reserve(arrays.inodes.vec_mut(), layer_inos.len())?;
    charge.reserve(arrays.dirents.vec_mut(), plan.names.len())?;
    let spans = layers.iter().map(|index| index.arrays.spans.len());
    charge.reserve(arrays.spans.vec_mut(), spans.sum())?;
    merger.add_inodes(&mut sources, &layer_inos)?;
    merger.add_dirents(plan, &numbers)?;
    for source in &sources {
        merger.add_spans(source);
    }
    let (arrays, mut charge) = merger.finish()?;
    let problem_count = layers.iter().map(|index| index.totals.problems);
    let problem_count = problem_count.fold(plan.problem_count, u64::saturating_add);
    let problems = problems(layers, plan);
    let mut index = Index {
        totals: Totals::of(&arrays, problem_count),
        arrays,
        names: None,
        replaced: None,
        origin: Origin {
            plain_bytes,
            ..origin
        },
        // Readers fetch and verify bytes layer by layer.
        block_len: MIN_BLOCK_LEN,
        digested: Packed(0),
        problems: problems.iter().map(with_layer).collect(),
        is_published: layers.iter().any(|layer| layer.is_published),
        file: None,
        charge: MemoryLimit::none().charge(),
    };
    charge.set((index.memory_bytes() + table_bytes) as u64)?;
    index.charge = charge;
    Ok(MergedIndex {
        index: Arc::new(index),
        problems,
        layer_inos,
        numbers,
    })
}

/// A problem whose description names its layer.
fn with_layer((layer, problem): &(usize, Problem)) -> Problem {
    Problem {
        what: format!("layer {}: {}", layer + 1, problem.what),
        ..problem.clone()
    }
}

fn problems(layers: &[&Index], plan: &MergePlan<'_>) -> Vec<(usize, Problem)> {
    let own = layers.iter().enumerate().flat_map(|(number, layer)| {
        let problems = layer.problems().iter().cloned();
        problems.map(move |problem| (number, problem))
    });
    let problems = own.chain(plan.problems.iter().cloned());
    problems.take(Options::default().max_problems).collect()
}

/// Assigns a number to each entry that `plan` names; returns the maps in both directions.
fn assign_inos(
    layers: &[&Index],
    plan: &MergePlan<'_>,
    charge: &mut Charge,
) -> Result<(Vec<Vec<u32>>, Vec<LayerIno>), MergeError> {
    let mut numbers: Vec<Vec<u32>> = Vec::new();
    for index in layers {
        let count = index.arrays.inodes.len();
        let mut unseen = Vec::new();
        charge.reserve(&mut unseen, count)?;
        unseen.resize(count, 0);
        numbers.push(unseen);
    }
    let directories = plan.directories.iter().map(|directory| directory.lowest);
    for layer_ino in directories.chain(plan.names.iter().map(|named| named.target)) {
        let numbers = numbers.get_mut(layer_ino.layer as usize);
        if let Some(number) = numbers.and_then(|numbers| numbers.get_mut(layer_ino.ino.0 as usize))
        {
            *number = 1;
        }
    }
    let seen = numbers.iter().flatten().filter(|&&number| number != 0);
    let mut layer_inos = Vec::new();
    charge.reserve(&mut layer_inos, 1 + seen.count())?;
    layer_inos.push(LayerIno {
        layer: 0,
        ino: Ino(0),
    });
    for (layer, numbers) in (0_u32..).zip(&mut numbers) {
        for (ino, number) in (0_u32..).zip(numbers.iter_mut()) {
            if *number == 0 {
                continue;
            }
            let next = u32::try_from(layer_inos.len())
                .ok()
                .filter(|&next| next < NONE);
            *number = next.ok_or(MergeError::TooLarge)?;
            layer_inos.push(LayerIno {
                layer,
                ino: Ino(ino),
            });
        }
    }
    if u32::try_from(plan.names.len()).is_err() {
        return Err(MergeError::TooLarge);
    }
    for MergedDirectory { lowest, attributes } in &plan.directories {
        let number = merged_ino_of(&numbers, *lowest);
        if let Some(layer_ino) = layer_inos.get_mut(number as usize) {
            *layer_ino = *attributes;
        }
        let numbers = numbers.get_mut(attributes.layer as usize);
        if let Some(upper) = numbers.and_then(|numbers| numbers.get_mut(attributes.ino.0 as usize))
        {
            *upper = number;
        }
    }
    Ok((numbers, layer_inos))
}

fn merged_ino_of(numbers: &[Vec<u32>], layer_ino: LayerIno) -> u32 {
    let numbers = numbers.get(layer_ino.layer as usize);
    let number = numbers.and_then(|numbers| numbers.get(layer_ino.ino.0 as usize));
    number.copied().unwrap_or_default()
}

struct SourceLayer<'a> {
    arrays: &'a Arrays,
    /// Start of its plain stream in that of the whole.
    start: u64,
    /// From old to new row.
    extras: HashMap<u32, u32>,
    /// From old to new first row and count.
    xattr_sets: HashMap<(u32, u32), (u32, u32)>,
}

impl<'a> SourceLayer<'a> {
    /// All `layers`, and the length of their plain streams together.
    fn of_all(layers: &[&'a Index]) -> (Vec<Self>, u64) {
        let mut plain_bytes = 0_u64;
        let sources = layers.iter().map(|index| {
            let start = plain_bytes;
            plain_bytes = plain_bytes.saturating_add(index.origin.plain_bytes);
            Self {
                arrays: &index.arrays,
                start,
                extras: HashMap::new(),
                xattr_sets: HashMap::new(),
            }
        });
        (sources.collect(), plain_bytes)
    }
}

struct Merger<'h> {
    arrays: Arrays,
    hides: &'h dyn Fn(&[u8]) -> bool,
    charge: Charge,
    /// Memory of the merge without the arrays.
    other_bytes: usize,
}

/// Bytes of one entry of [`SourceLayer::extras`] or [`SourceLayer::xattr_sets`] while the table grows.
const TABLE_ENTRY_BYTES: usize = 64;

impl Merger<'_> {
    fn check_memory(&mut self) -> Result<(), TooMuchMemory> {
        let bytes = self.arrays.memory_bytes() + self.other_bytes;
        self.charge.set(bytes as u64)
    }

    fn add_inodes(
        &mut self,
        layers: &mut [SourceLayer<'_>],
        layer_inos: &[LayerIno],
    ) -> Result<(), MergeError> {
        self.arrays.inodes.vec_mut().push(InodeRow::default());
        for layer_ino in layer_inos.get(1..).unwrap_or_default() {
            let layer = layers.get_mut(layer_ino.layer as usize);
            let layer = layer.ok_or(MergeError::TooLarge)?;
            let inode = self.copy_inode(layer, layer_ino.ino)?;
            self.arrays.inodes.vec_mut().push(inode);
            self.check_memory()?;
        }
        Ok(())
    }

    fn copy_inode(
        &mut self,
        layer: &mut SourceLayer<'_>,
        ino: Ino,
    ) -> Result<InodeRow, MergeError> {
        let arrays = layer.arrays;
        let inode = arrays.inode(ino.0);
        let mut inode = *inode.ok_or(MergeError::TooLarge)?;
        if inode.kind() != FILE {
            // The layer has the headers.
            inode.size = 0.into();
        }
        // Owners of layers are their numbers, because the names belong to another system.
        (inode.user, inode.group) = (0.into(), 0.into());
        inode.extra = self.copy_extra(layer, inode.extra.get())?.into();
        inode.dirent = NONE.into();
        inode.links = 0.into();
        match inode.kind() {
            FILE => inode.data = inode.data.get().saturating_add(layer.start).into(),
            SYMLINK => {
                let target = arrays.target(&inode);
                let offset = self.arrays.arena.push(target.unwrap_or_default());
                inode.data = (offset as u64).into();
            }
            DIRECTORY => {
                inode.data = 0.into();
                inode.children = 0.into();
                inode.links = 2.into();
            }
            _ => {}
        }
        Ok(inode)
    }

    fn copy_extra(&mut self, layer: &mut SourceLayer<'_>, row: u32) -> Result<u32, MergeError> {
        let Some(extra) = layer.arrays.extras.get(row as usize).filter(|_| row != 0) else {
            return Ok(0);
        };
        if let Some(&known) = layer.extras.get(&row) {
            return Ok(known);
        }
        self.other_bytes += TABLE_ENTRY_BYTES;
        let mut extra = *extra;
        let (first, count) = self.copy_xattr_set(layer, row, &extra)?;
        extra.xattr = first.into();
        extra.xattr_count = count.into();
        if extra.sparse.get() == 1 {
            let map = layer.arrays.sparse_pieces(row).unwrap_or_default();
            extra.piece = row_count(&self.arrays.pieces)?.into();
            for piece in map {
                let plain = piece.plain.get().saturating_add(layer.start).into();
                push_row(self.arrays.pieces.vec_mut(), PieceRow { plain, ..*piece });
                self.check_memory()?;
            }
            // Rows that were out of range are left out.
            extra.piece_count = row_count(map)?.into();
        } else if count == 0 {
            // All attributes are hidden, and an extra has nothing else but a sparse map.
            layer.extras.insert(row, 0);
            return Ok(0);
        }
        let number = row_count(&self.arrays.extras)?;
        push_row(self.arrays.extras.vec_mut(), extra);
        layer.extras.insert(row, number);
        Ok(number)
    }

    fn copy_xattr_set(
        &mut self,
        layer: &mut SourceLayer<'_>,
        row: u32,
        extra: &ExtraRow,
    ) -> Result<(u32, u32), MergeError> {
        let key = (extra.xattr.get(), extra.xattr_count.get());
        if let Some(&known) = layer.xattr_sets.get(&key) {
            return Ok(known);
        }
        self.other_bytes += TABLE_ENTRY_BYTES;
        let start = row_count(&self.arrays.xattrs)?;
        for (name, value) in layer.arrays.xattrs(row) {
            if (self.hides)(name) {
                continue;
            }
            self.arrays.push_xattr(name, value);
            self.check_memory()?;
        }
        let set = (start, row_count(&self.arrays.xattrs)? - start);
        layer.xattr_sets.insert(key, set);
        Ok(set)
    }

    fn add_dirents(
        &mut self,
        plan: &MergePlan<'_>,
        numbers: &[Vec<u32>],
    ) -> Result<(), TooMuchMemory> {
        for named in &plan.names {
            let directory = plan.directories.get(named.directory as usize);
            let parent = directory.map_or(0, |directory| merged_ino_of(numbers, directory.lowest));
            let ino = merged_ino_of(numbers, named.target);
            let Some(inode) = self.arrays.inodes.get_mut(ino as usize) else {
                continue;
            };
            if !inode.is_directory() {
                inode.add_links(1);
            } else if let Some(parent) = self.arrays.inodes.get_mut(parent as usize) {
                parent.add_links(1);
            }
            self.arrays.dirents.vec_mut().push(Dirent {
                name: self.arrays.arena.push_name(named.name),
                ino: ino.into(),
                parent: parent.into(),
            });
            self.check_memory()?;
        }
        Ok(())
    }

    /// Copies the span boundaries of `layer`. Only the layer itself can decode spans.
    fn add_spans(&mut self, layer: &SourceLayer<'_>) {
        let rows = layer.arrays.spans.iter().map(|row| SpanRow {
            plain: row.plain.get().saturating_add(layer.start).into(),
            bit: SpanRow::NO_SEEK_POINT.into(),
            flags: SpanRow::UNHASHED.into(),
            ..SpanRow::default()
        });
        self.arrays.spans.vec_mut().extend(rows);
    }

    /// The sorted arrays, and the charge for their memory and that of the tables.
    fn finish(self) -> Result<(Arrays, Charge), TooMuchMemory> {
        let (mut arrays, mut charge) = (self.arrays, self.charge);
        charge.add(SortedNames::memory_bytes(&arrays))?;
        SortedNames::sort_all(&mut arrays);
        Ok((arrays, charge))
    }
}

fn row_count<T>(rows: &[T]) -> Result<u32, MergeError> {
    u32::try_from(rows.len()).map_err(|_| MergeError::TooLarge)
}
