//! The trees of layers, from the bottom, as the one tree that they make together; pure.
//!
//! A directory over a directory: the names of both, and the attributes of the upper one, unless only
//! paths speak of it. Anything else replaces what lies below it. What a layer says to be gone is gone
//! from the layers below it, and never from itself.

use std::cell::Cell;
use std::collections::HashMap;

use super::links::{self, Link};
use super::whiteouts::{Meaning, Whiteouts};
use crate::base::path::ArchivePath;
use crate::base::resolve::{self, ResolveError, Step};
use crate::codec::Compression;
use crate::index::{
    self, Entry, Index, Ino, Kind, Locator, Merged, Named, Origin, Place, Plan, Surface, TooLarge,
};

/// The tree that `layers` make, from the bottom.
///
/// # Errors
/// When it has more entries than a tree can have.
pub fn merge(layers: &[&Index], whiteouts: Whiteouts) -> Result<Merged, TooLarge> {
    let mut stack = Layers {
        indexes: layers,
        whiteouts,
        links: vec![HashMap::new(); layers.len()],
        found: 0,
    };
    for number in 1..layers.len() {
        stack.find_links(number)?;
    }
    stack.upto(layers.len())
}

/// Names that hard links to lower layers are, by the directory of the layer they lie in.
type Links<'a> = HashMap<Ino, Vec<(&'a [u8], Place)>>;

/// Layers, and what their hard links to lower ones have turned out to name: by directory.
struct Layers<'a> {
    indexes: &'a [&'a Index],
    whiteouts: Whiteouts,
    links: Vec<Links<'a>>,
    /// How many links have found their targets.
    found: u64,
}

impl Layers<'_> {
    /// What the lowest `count` layers make.
    fn upto(&self, count: usize) -> Result<Merged, TooLarge> {
        let indexes = self.indexes.get(..count).unwrap_or_default();
        let mut laying = Laying {
            layers: self,
            plan: Plan::default(),
            pending: Vec::new(),
            left_out: Cell::new(0),
        };
        laying.run(indexes)?;
        let hides = |name: &[u8]| self.whiteouts.hides_xattr(name);
        index::merge(
            indexes,
            &laying.plan,
            hides,
            origin(indexes, self.whiteouts),
        )
    }

    /// Looks for the targets of those links of layer `number` that the layer does not hold itself.
    fn find_links(&mut self, number: usize) -> Result<(), TooLarge> {
        let Some(index) = self.indexes.get(number).copied() else {
            return Ok(());
        };
        let unresolved: Vec<_> = index.unresolved_links().collect();
        if unresolved.is_empty() {
            return Ok(());
        }
        let links: Vec<_> = unresolved
            .iter()
            .map(|link| {
                let mut path = index.path(link.parent).unwrap_or_default();
                path.push(link.name);
                let target = ArchivePath::sanitize(link.target).path;
                Link { path, target }
            })
            .collect();
        // With this layer: a way to something below may lead through it.
        let tree = self.upto(number + 1)?;
        for (link, end) in unresolved.iter().zip(links::ends(&links)) {
            let target = end.and_then(|end| find(&tree, &end));
            if let (Some(place), Some(links)) = (target, self.links.get_mut(number)) {
                let siblings = links.entry(link.parent).or_default();
                siblings.push((link.name, place));
                self.found += 1;
            }
        }
        Ok(())
    }
}

/// What a hard link to `path` in `tree` would be another name of.
fn find(tree: &Merged, path: &ArchivePath) -> Option<Place> {
    let (directory, name) = path.split_last()?;
    let parent = resolve::directory(&mut Way(&tree.index), directory.components()).ok()?;
    let entry = tree.index.lookup(parent, name)?;
    match entry.kind() {
        Kind::Directory => None,
        _ => tree.place(entry.ino()),
    }
}

/// The way through a complete tree.
struct Way<'a>(&'a Index);

/// The way ends before its end.
#[derive(Debug)]
struct Missing;

impl resolve::Tree for Way<'_> {
    type Directory = Ino;
    type Error = Missing;

    fn root(&self) -> Ino {
        Ino::ROOT
    }

    fn step(&mut self, parent: &Ino, name: &[u8]) -> Result<Step<Ino>, Missing> {
        Ok(match self.0.lookup(*parent, name) {
            None => Step::Missing,
            Some(entry) => match entry.kind() {
                Kind::Directory => Step::Directory(entry.ino()),
                Kind::Symlink(target) => Step::Link(target.to_vec()),
                _ => Step::Other,
            },
        })
    }

    fn imply(&mut self, _parent: &Ino, _name: &[u8]) -> Result<Ino, Missing> {
        Err(Missing)
    }
}

/// Where `path` lies in `index`: the same entry by a way through directories alone. `None` when
/// the way ends before its last component.
pub fn canonical(index: &Index, path: &ArchivePath) -> Option<ArchivePath> {
    let (directory, name) = path.split_last()?;
    let parent = match resolve::directory(&mut Way(index), directory.components()) {
        Ok(parent) => parent,
        Err(ResolveError::Refused(_) | ResolveError::Tree(Missing)) => return None,
    };
    let mut canonical = index.path(parent)?;
    canonical.push(name);
    Some(canonical)
}

/// What the whole is known by: it is the same as long as the layers are, and in the same order.
fn origin(layers: &[&Index], whiteouts: Whiteouts) -> Origin {
    let mut hasher = blake3::Hasher::new();
    hasher.update(format!("{whiteouts:?}").as_bytes());
    let mut packed_bytes = 0_u64;
    for origin in layers.iter().map(|index| index.origin()) {
        packed_bytes = packed_bytes.saturating_add(origin.packed_bytes);
        hasher.update(&origin.content_id);
        hasher.update(origin.locator.file_name().as_bytes());
    }
    Origin {
        locator: Locator::default(),
        content_id: *hasher.finalize().as_bytes(),
        sha256: None,
        compression: Compression::None,
        packed_bytes,
        plain_bytes: 0,
    }
}

/// A plan in the making.
struct Laying<'a, 'l> {
    layers: &'l Layers<'a>,
    plan: Plan<'a>,
    /// Directories whose names are still to come: their numbers in the plan, and which directories
    /// of the layers they are, from the bottom.
    pending: Vec<(u32, Vec<Place>)>,
    /// Entries that nothing can be made of.
    left_out: Cell<u64>,
}

/// What a name stands for: one entry, or directories from the bottom.
type Parts = Vec<Place>;

impl<'a> Laying<'a, '_> {
    fn run(&mut self, indexes: &[&'a Index]) -> Result<(), TooLarge> {
        let problems = indexes.iter().map(|index| index.problem_count());
        let problems = problems.fold(0, u64::saturating_add);
        self.plan.problems = problems.saturating_sub(self.layers.found);
        let roots = (0_u32..).zip(indexes).map(|(layer, _)| Place {
            layer,
            ino: Ino::ROOT,
        });
        self.directory(roots.collect())?;
        while let Some((directory, parts)) = self.pending.pop() {
            match parts.as_slice() {
                [only] => self.names_of_one(directory, *only)?,
                _ => self.names_of_many(directory, &parts)?,
            }
        }
        self.plan.problems = self.plan.problems.saturating_add(self.left_out.get());
        Ok(())
    }

    fn index(&self, layer: u32) -> Option<&'a Index> {
        self.layers.indexes.get(layer as usize).copied()
    }

    fn entry(&self, place: Place) -> Option<Entry<'a>> {
        self.index(place.layer)?.entry(place.ino)
    }

    /// Plans a directory that consists of `parts`, one at least; its place.
    fn directory(&mut self, parts: Parts) -> Result<Option<Place>, TooLarge> {
        let Some(&place) = parts.first() else {
            return Ok(None);
        };
        let is_spoken_of =
            |part: &&Place| self.entry(**part).is_some_and(|entry| !entry.is_implied());
        let attributes = *parts.iter().rev().find(is_spoken_of).unwrap_or(&place);
        let number = u32::try_from(self.plan.directories.len()).map_err(|_| TooLarge)?;
        self.plan.directories.push(Surface { place, attributes });
        self.pending.push((number, parts));
        Ok(Some(place))
    }

    fn name(&mut self, directory: u32, name: &'a [u8], parts: Parts) -> Result<(), TooLarge> {
        let Some(&first) = parts.first() else {
            return Ok(());
        };
        let target = if self.is_directory(first) {
            self.directory(parts)?
        } else {
            Some(first)
        };
        self.plan.names.extend(target.map(|target| Named {
            directory,
            name,
            target,
        }));
        Ok(())
    }

    fn is_directory(&self, place: Place) -> bool {
        let kind = self.entry(place).map(|entry| entry.kind());
        kind == Some(Kind::Directory)
    }

    /// The names of a directory that one layer alone has: as they are.
    fn names_of_one(&mut self, directory: u32, part: Place) -> Result<(), TooLarge> {
        let mut names = Vec::new();
        self.entries(part, |name, place| names.push((name, place)));
        self.links(part, |name, place| names.push((name, place)));
        for (name, place) in names {
            self.name(directory, name, vec![place])?;
        }
        Ok(())
    }

    /// The names of a directory that several layers have.
    fn names_of_many(&mut self, directory: u32, parts: &[Place]) -> Result<(), TooLarge> {
        let mut names: Vec<(&'a [u8], Parts)> = Vec::new();
        let mut numbers: HashMap<&'a [u8], usize> = HashMap::new();
        for &part in parts {
            // First, so that it concerns what lies below alone, wherever it stands.
            self.hidden(part, |hidden| match hidden {
                Some(name) => {
                    let number = numbers.get(name).copied();
                    let hidden = number.and_then(|number| names.get_mut(number));
                    if let Some((_, parts)) = hidden {
                        parts.clear();
                    }
                }
                None => names.iter_mut().for_each(|(_, parts)| parts.clear()),
            });
            let mut put = |name: &'a [u8], place: Place| {
                let number = *numbers.entry(name).or_insert_with(|| {
                    names.push((name, Vec::new()));
                    names.len() - 1
                });
                if let Some((_, parts)) = names.get_mut(number) {
                    let joins = self.is_directory(place)
                        && parts.last().is_some_and(|&below| self.is_directory(below));
                    if !joins {
                        parts.clear();
                    }
                    parts.push(place);
                }
            };
            self.entries(part, &mut put);
            self.links(part, &mut put);
        }
        for (name, parts) in names {
            self.name(directory, name, parts)?;
        }
        Ok(())
    }

    /// Calls `hides` with what `part` says to be gone from what lies below it, `None` for all.
    fn hidden(&self, part: Place, mut hides: impl FnMut(Option<&'a [u8]>)) {
        let Some(index) = self.index(part.layer) else {
            return;
        };
        let whiteouts = self.layers.whiteouts;
        let directory = index.entry(part.ino);
        if directory.is_some_and(|directory| whiteouts.is_opaque(&directory)) {
            hides(None);
        }
        for child in index.children(part.ino, 0) {
            let Some(entry) = index.entry(child.ino) else {
                continue;
            };
            match whiteouts.meaning(child.name, &entry) {
                Meaning::Entry => {}
                Meaning::Hides(name) => hides(Some(name)),
                Meaning::Opaque => hides(None),
            }
        }
    }

    /// Calls `put` with what of directory `part` is an entry.
    fn entries(&self, part: Place, mut put: impl FnMut(&'a [u8], Place)) {
        let Some(index) = self.index(part.layer) else {
            return;
        };
        let whiteouts = self.layers.whiteouts;
        for child in index.children(part.ino, 0) {
            let Some(entry) = index.entry(child.ino) else {
                continue;
            };
            if whiteouts.meaning(child.name, &entry) != Meaning::Entry {
                continue;
            }
            if whiteouts.leads_elsewhere(&entry) || names_hidden(index, whiteouts, &entry) {
                self.left_out.set(self.left_out.get() + 1);
            } else {
                let (layer, ino) = (part.layer, child.ino);
                put(child.name, Place { layer, ino });
            }
        }
    }

    /// Calls `put` with the hard links to lower layers that directory `part` holds.
    fn links(&self, part: Place, mut put: impl FnMut(&'a [u8], Place)) {
        let links = self.layers.links.get(part.layer as usize);
        let siblings = links.and_then(|links| links.get(&part.ino));
        for &(name, place) in siblings.into_iter().flatten() {
            put(name, place);
        }
    }
}

/// Whether `entry` is a further name of what lies where nothing is shown.
pub fn names_hidden(index: &Index, whiteouts: Whiteouts, entry: &Entry<'_>) -> bool {
    if entry.kind() == Kind::Directory || entry.link_count() < 2 || whiteouts != Whiteouts::Oci {
        return false;
    }
    let path = index.path(entry.ino());
    path.is_some_and(|path| path.components().any(|name| whiteouts.takes_name(name)))
}
