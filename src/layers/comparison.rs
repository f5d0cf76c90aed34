//! Comparison of a merged tree with its layers, some of which have indexes that others made.
//!
//! Each layer compares its own entries and names with its headers. In the merged tree an entry may also be below the
//! directories of upper layers, and have names that hard links of upper layers give to it.

use std::iter;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::vec;

use crate::archive::{Archive, Compared, NumberSet, ReadError, TreePart, Volume};
use crate::base::archive_path::ArchivePath;
use crate::base::resolve::{self, Component, MAX_LINKS};
use crate::index::MissingRow;
use crate::index::{EntryKind, Index, Ino, LayerIno, LazyIndex, MergedIndex};

/// Maximum number of names that are looked up in layers to prove one.
const MAX_LOOKUPS: u32 = 1 << 20;

/// An entry of a layer, or a name in this directory of it.
#[derive(Debug)]
struct LayerPart {
    layer: u32,
    ino: Ino,
    name: Option<Vec<u8>>,
}

/// The layers of a merged tree, and the parts of that tree that equal their headers.
#[derive(Debug)]
pub(super) struct LayerComparison {
    layers: Vec<Arc<Archive>>,
    merged: Arc<MergedIndex>,
    /// Entries that matched with the directories above.
    entries: NumberSet,
    /// Names that matched, or that the comparison of the entry covers.
    names: NumberSet,
}

impl LayerComparison {
    /// A comparison, if some layer needs one.
    pub(super) fn new(layers: &[Arc<Archive>], merged: &Arc<MergedIndex>) -> Option<Arc<Self>> {
        let is_needed = layers.iter().any(|layer| layer.is_compared());
        is_needed.then(|| {
            Arc::new(Self {
                layers: layers.to_vec(),
                merged: Arc::clone(merged),
                entries: NumberSet::default(),
                names: NumberSet::default(),
            })
        })
    }

    /// As [`Volume::must_compare`].
    pub(super) fn must_compare(&self, part: TreePart<'_>) -> bool {
        let (parent, name) = match part {
            TreePart::Entry(ino) => return !self.entries.contains(ino.0),
            TreePart::Name(parent, name) => (parent, name),
        };
        let index = &self.merged.index;
        let Some(dirent) = index.find_dirent(parent, name) else {
            return false;
        };
        let entry = index.named_ino(dirent).and_then(|ino| index.entry(ino));
        let Some(entry) = entry.filter(|entry| entry.kind() != EntryKind::Directory) else {
            return false;
        };
        if entry.kind().is_special() && !self.entries.contains(entry.ino().0) {
            return true;
        }
        if self.names.contains(dirent.0) {
            return false;
        }
        // The comparison reports rows that are missing.
        let is_first = self.is_first_name(parent, name, entry.ino());
        let is_first = is_first.unwrap_or(false);
        if is_first {
            self.names.insert(dirent.0);
        }
        !is_first
    }

    /// Whether the layer of `ino` has it first under this name.
    fn is_first_name(&self, parent: Ino, name: &[u8], ino: Ino) -> Result<bool, MissingRow> {
        let Some((layer, ino)) = self.locate(ino) else {
            return Ok(false);
        };
        let path = self.path_in(parent, name);
        layer.index().read(|index| index.path(ino) == Some(path))
    }

    fn locate(&self, ino: Ino) -> Option<(&Arc<Archive>, Ino)> {
        let LayerIno { layer, ino } = self.merged.layer_ino(ino)?;
        Some((self.layers.get(layer as usize)?, ino))
    }

    fn path_in(&self, parent: Ino, name: &[u8]) -> ArchivePath {
        let mut path = self.merged.index.path(parent).unwrap_or_default();
        path.push(name);
        path
    }

    /// As [`Volume::compare`].
    pub(super) fn compare(self: &Arc<Self>, part: TreePart<'_>, done: Compared) {
        match part {
            TreePart::Entry(ino) => self.compare_entries(&[ino], done),
            TreePart::Name(parent, name) => {
                let found = self.merged.index.lookup(parent, name);
                let Some(ino) = found.map(|entry| entry.ino()) else {
                    return done(Err(ReadError::NotAFile));
                };
                let Some((layer, _)) = self.locate(ino) else {
                    return done(Err(ReadError::NotAFile));
                };
                let (this, name) = (Arc::clone(self), name.to_vec());
                layer.run(move || this.compare_name((parent, name), ino, done));
            }
        }
    }

    /// Compares `inos` and the directories above in the merged tree.
    fn compare_entries(self: &Arc<Self>, inos: &[Ino], done: Compared) {
        let index = &self.merged.index;
        let chain = |ino: &Ino| iter::once(*ino).chain(index.directories_above(*ino));
        let unknown = inos.iter().flat_map(chain);
        let unknown = unknown.filter(|ino| !self.entries.contains(ino.0));
        let unknown: Vec<Ino> = unknown.collect();
        // The directories first.
        let parts = unknown.iter().rev().filter_map(|&ino| {
            let LayerIno { layer, ino } = self.merged.layer_ino(ino)?;
            let name = None;
            Some(LayerPart { layer, ino, name })
        });
        let parts: Vec<_> = parts.collect();
        let this = Arc::clone(self);
        let compared = move |compared: Result<(), ReadError>| {
            if compared.is_ok() {
                for ino in &unknown {
                    this.entries.insert(ino.0);
                }
            }
            done(compared);
        };
        self.compare_parts(parts.into_iter(), Box::new(compared));
    }

    fn compare_parts(self: &Arc<Self>, mut parts: vec::IntoIter<LayerPart>, done: Compared) {
        while let Some(part) = parts.next() {
            let layer = self.layers.get(part.layer as usize);
            let Some(layer) = layer.filter(|layer| layer.is_compared()) else {
                continue;
            };
            let tree_part = match &part.name {
                Some(name) => TreePart::Name(part.ino, name),
                None if layer.must_compare(TreePart::Entry(part.ino)) => TreePart::Entry(part.ino),
                None => continue,
            };
            let this = Arc::clone(self);
            let compared = move |compared: Result<(), ReadError>| match compared {
                Ok(()) => this.compare_parts(parts, done),
                Err(error) => done(Err(error)),
            };
            return layer.compare(tree_part, Box::new(compared));
        }
        done(Ok(()));
    }

    /// Compares a name of `ino`, and then its entry and the directories above both.
    fn compare_name(self: &Arc<Self>, (parent, name): (Ino, Vec<u8>), ino: Ino, done: Compared) {
        let parts = match self.parts_of_name(parent, &name, ino) {
            Ok(Some(parts)) => parts,
            Ok(None) => {
                let path = self.path_in(parent, &name);
                let mismatch = self.locate(ino);
                let mismatch = mismatch.map(|(layer, _)| layer.report_mismatch(&path));
                return done(Err(mismatch.unwrap_or(ReadError::IndexMismatch)));
            }
            Err(missing) => return done(Err(missing.into())),
        };
        let this = Arc::clone(self);
        let dirent = self.merged.index.find_dirent(parent, &name);
        let done = move |compared: Result<(), ReadError>| {
            if let (Ok(()), Some(dirent)) = (&compared, dirent) {
                this.names.insert(dirent.0);
            }
            done(compared);
        };
        let this = Arc::clone(self);
        let compared = move |compared: Result<(), ReadError>| match compared {
            Ok(()) => this.compare_entries(&[parent, ino], Box::new(done)),
            Err(error) => done(Err(error)),
        };
        self.compare_parts(parts.into_iter(), Box::new(compared));
    }

    /// The parts of layers that make `name` in `parent` a name of `ino`; `None` if none do.
    fn parts_of_name(
        &self,
        parent: Ino,
        name: &[u8],
        ino: Ino,
    ) -> Result<Option<Vec<LayerPart>>, MissingRow> {
        let Some(target) = self.merged.layer_ino(ino) else {
            return Ok(None);
        };
        let layers = self
            .layers
            .iter()
            .filter_map(|layer| layer.complete_index());
        let layers = layers.map(LazyIndex::into_tree);
        let layers: Vec<Arc<Index>> = layers.collect::<Result<_, _>>()?;
        let directory = self.merged.index.path(parent).unwrap_or_default();
        let own = layers.get(target.layer as usize).and_then(|index| {
            let directory = index.find(&directory)?.ino();
            let named = index.lookup(directory, name)?;
            (named.ino() == target.ino).then_some(directory)
        });
        if let Some(ino) = own {
            let (layer, name) = (target.layer, Some(name.to_vec()));
            return Ok(Some(vec![LayerPart { layer, ino, name }]));
        }
        let mut search = Search {
            layers: &layers,
            target,
            found: Vec::new(),
            paths_left: MAX_LINKS,
            lookups_left: MAX_LOOKUPS,
        };
        let is_found = search.find(&self.path_in(parent, name), 0..u32::MAX);
        Ok(is_found.then_some(search.found))
    }
}

/// Search for the names in layers that make a path one of an entry.
struct Search<'a> {
    /// From the bottom.
    layers: &'a [Arc<Index>],
    target: LayerIno,
    found: Vec<LayerPart>,
    paths_left: usize,
    lookups_left: u32,
}

impl Search<'_> {
    /// Whether `path` leads to the target in the layers of `range`, perhaps by hard links to lower ones.
    fn find(&mut self, path: &ArchivePath, range: Range<u32>) -> bool {
        let Some((directory, name)) = path.split_last().filter(|_| self.paths_left > 0) else {
            return false;
        };
        self.paths_left -= 1;
        let mut tree = LayersTree {
            search: self,
            range,
        };
        let Ok(directory) = resolve::directory(&mut tree, directory.components()) else {
            return false;
        };
        // Of the names in layers, the top one counts.
        for &part in directory.iter().rev() {
            let Some(index) = self.layers.get(part.layer as usize) else {
                continue;
            };
            let entry = index.lookup(part.ino, name);
            let entry = entry.filter(|entry| !entry.is_whiteout_only());
            let link = index.unresolved_target(part.ino, name);
            if entry.is_none() && link.is_none() {
                continue;
            }
            self.add(part, name);
            let is_target = |ino| (part.layer, ino) == (self.target.layer, self.target.ino);
            return match (entry, link) {
                (Some(entry), _) => is_target(entry.ino()),
                (None, Some(target)) => self.find_target(target, part.layer),
                (None, None) => false,
            };
        }
        false
    }

    /// As [`Self::find`], of the target of a hard link in `layer`: below it, or else within it.
    fn find_target(&mut self, target: &[u8], layer: u32) -> bool {
        let (path, len) = (ArchivePath::sanitize(target).path, self.found.len());
        [0..layer, layer..layer.saturating_add(1)]
            .into_iter()
            .any(|range| {
                self.found.truncate(len);
                self.find(&path, range)
            })
    }

    fn add(&mut self, directory: LayerIno, name: &[u8]) {
        self.found.push(LayerPart {
            layer: directory.layer,
            ino: directory.ino,
            name: Some(name.to_vec()),
        });
    }
}

/// Some of the layers as one tree. It ignores whiteouts, so it has what a merge of them has, and more.
struct LayersTree<'s, 'a> {
    search: &'s mut Search<'a>,
    range: Range<u32>,
}

/// A path through layers ends early, or costs too many lookups.
struct Missing;

impl resolve::PathLookup for LayersTree<'_, '_> {
    /// The directories of layers that a merge would make one of, from the bottom.
    type Directory = Rc<[LayerIno]>;
    type Error = Missing;

    fn root(&self) -> Self::Directory {
        let numbers = (0_u32..).zip(self.search.layers);
        let numbers = numbers.filter(|(layer, _)| self.range.contains(layer));
        let ino = Ino::ROOT;
        numbers.map(|(layer, _)| LayerIno { layer, ino }).collect()
    }

    fn is_chroot(&self) -> bool {
        true
    }

    fn step(
        &mut self,
        parent: &Self::Directory,
        name: &[u8],
    ) -> Result<Component<Self::Directory>, Missing> {
        let mut directories = Vec::new();
        for &part in parent.iter().rev() {
            let left = self.search.lookups_left.checked_sub(1);
            self.search.lookups_left = left.ok_or(Missing)?;
            let index = self.search.layers.get(part.layer as usize);
            let entry = index.and_then(|index| index.lookup(part.ino, name));
            let Some(entry) = entry.filter(|entry| !entry.is_whiteout_only()) else {
                continue;
            };
            match entry.kind() {
                EntryKind::Directory => directories.push(LayerIno {
                    layer: part.layer,
                    ino: entry.ino(),
                }),
                _ if !directories.is_empty() => break,
                EntryKind::Symlink(target) => {
                    self.search.add(part, name);
                    return Ok(Component::Link(target.to_vec()));
                }
                _ => return Ok(Component::Other),
            }
        }
        if directories.is_empty() {
            return Ok(Component::Missing);
        }
        directories.reverse();
        Ok(Component::Directory(directories.into()))
    }

    fn imply(&mut self, _: &Self::Directory, _: &[u8]) -> Result<Self::Directory, Missing> {
        Err(Missing)
    }
}
