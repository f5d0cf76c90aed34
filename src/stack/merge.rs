//! The trees of layers, from the bottom, as the one tree that they make together; pure.
//!
//! A directory over a directory: the names of both, and the attributes of the upper one, unless only
//! paths speak of it. Anything else replaces what lies below it. What a layer says to be gone is gone
//! from the layers below it, and never from itself.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;

use super::links::{self, Unsettled};
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
    linked(layers, whiteouts).tree()
}

/// `layers`, with their hard links to lower ones.
fn linked<'a>(layers: &'a [&'a Index], whiteouts: Whiteouts) -> Layers<'a> {
    let mut stack = Layers {
        indexes: layers,
        whiteouts,
        links: vec![HashMap::new(); layers.len()],
        marks: Vec::with_capacity(layers.len()),
        settled: 0,
    };
    for number in 0..layers.len() {
        stack.find_links(number);
    }
    stack
}

/// Names that hard links to lower layers are, by the directory of the layer they lie in.
type Links<'a> = HashMap<Ino, BTreeMap<&'a [u8], Place>>;

/// Layers, and what their hard links to lower ones have turned out to name: by directory.
struct Layers<'a> {
    indexes: &'a [&'a Index],
    whiteouts: Whiteouts,
    links: Vec<Links<'a>>,
    /// What hard links say to be gone from below their layers, by directory.
    marks: Vec<HashMap<Ino, HashSet<Meaning<'a>>>>,
    /// How many links have found their targets, or want none.
    settled: u64,
}

/// What a name stands for: one entry, or directories from the bottom; nothing if it is not seen.
type Parts = Vec<Place>;

impl<'a> Layers<'a> {
    /// What all of them make.
    fn tree(&self) -> Result<Merged, TooLarge> {
        let mut laying = Laying {
            layers: self,
            plan: Plan::default(),
            pending: Vec::new(),
            left_out: Cell::new(0),
        };
        laying.run()?;
        let hides = |name: &[u8]| self.whiteouts.hides_xattr(name);
        let origin = origin(self.indexes, self.whiteouts);
        index::merge(self.indexes, &laying.plan, hides, origin)
    }

    fn index(&self, layer: u32) -> Option<&'a Index> {
        self.indexes.get(layer as usize).copied()
    }

    fn entry(&self, place: Place) -> Option<Entry<'a>> {
        self.index(place.layer)?.entry(place.ino)
    }

    fn is_directory(&self, place: Place) -> bool {
        let kind = self.entry(place).map(|entry| entry.kind());
        kind == Some(Kind::Directory)
    }

    /// What the root of the lowest `count` layers consists of.
    fn roots(&self, count: usize) -> Parts {
        let ino = Ino::ROOT;
        let layers = (0..).zip(self.indexes.iter().take(count));
        layers.map(|(layer, _)| Place { layer, ino }).collect()
    }

    /// Lays `place` over what `parts` are.
    fn lay(&self, parts: &mut Parts, place: Place) {
        let below = parts.last();
        let joins =
            self.is_directory(place) && below.is_some_and(|&below| self.is_directory(below));
        if !joins {
            parts.clear();
        }
        parts.push(place);
    }

    /// What `name` stands for in the directory that consists of `parts`.
    fn named(&self, parts: &[Place], name: &[u8]) -> Parts {
        let mut named = Parts::new();
        for &part in parts {
            let Some(index) = self.index(part.layer) else {
                continue;
            };
            let marks = self.marks_in(part);
            let is_marked = marks.is_some_and(|marks| {
                marks.contains(&Meaning::Opaque) || marks.contains(&Meaning::Hides(name))
            });
            if is_marked || self.whiteouts.hides(index, part.ino, name) {
                named.clear();
            }
            let entry = index.lookup(part.ino, name);
            if entry.is_some_and(|entry| self.is_hidden(index, name, &entry)) {
                named.clear();
            }
            if let Some(entry) = entry.filter(|entry| self.shows(index, name, entry)) {
                let (layer, ino) = (part.layer, entry.ino());
                self.lay(&mut named, Place { layer, ino });
            }
            if let Some(&place) = self.links_in(part).and_then(|links| links.get(name)) {
                self.lay(&mut named, place);
            }
        }
        named
    }

    /// Whether something is made of `entry`, called `name`.
    fn shows(&self, index: &Index, name: &[u8], entry: &Entry<'_>) -> bool {
        self.whiteouts.meaning(name, entry) == Meaning::Entry && self.can_show(index, entry)
    }

    /// Whether `entry`, called `name`, takes the place of what lies below, and is not shown.
    fn is_hidden(&self, index: &Index, name: &[u8], entry: &Entry<'_>) -> bool {
        names_hidden(index, self.whiteouts, entry)
            && self.whiteouts.meaning(name, entry) == Meaning::Entry
    }

    /// Whether what means an entry can be one.
    fn can_show(&self, index: &Index, entry: &Entry<'_>) -> bool {
        !self.whiteouts.leads_elsewhere(entry) && !names_hidden(index, self.whiteouts, entry)
    }

    /// The hard links to lower layers that directory `part` holds.
    fn links_in(&self, part: Place) -> Option<&BTreeMap<&'a [u8], Place>> {
        self.links.get(part.layer as usize)?.get(&part.ino)
    }

    /// What the hard links in directory `part` say to be gone from what lies below it.
    fn marks_in(&self, part: Place) -> Option<&HashSet<Meaning<'a>>> {
        self.marks.get(part.layer as usize)?.get(&part.ino)
    }

    /// Looks for the targets of those links of layer `number` that the layer does not hold itself, the
    /// layers below it being done.
    fn find_links(&mut self, number: usize) {
        let Some(index) = self.indexes.get(number).copied() else {
            return;
        };
        let unsettled = Unsettled::of(index, self.whiteouts);
        self.marks.push(unsettled.marks);
        self.settled += unsettled.others;
        if number == 0 {
            // Nothing lies below it.
            return;
        }
        // With this layer: a way to something below may lead through it. Its own links come last, as
        // none leads to another one's name.
        let mut found = Vec::new();
        let mut way = Stacked {
            layers: self,
            count: number + 1,
        };
        for (&(parent, name), end) in unsettled.names.iter().zip(links::ends(&unsettled.links)) {
            let target = end.and_then(|end| way.find(&end));
            found.extend(target.map(|place| (parent, name, place)));
        }
        self.settled += found.len() as u64;
        if let Some(links) = self.links.get_mut(number) {
            for (parent, name, place) in found {
                links.entry(parent).or_default().insert(name, place);
            }
        }
    }
}

/// The lowest layers, looked at name by name: a tree of them, which is long to make, would be needed for
/// each layer with links to those below it.
struct Stacked<'a, 'l> {
    layers: &'l Layers<'a>,
    count: usize,
}

impl Stacked<'_, '_> {
    /// What a hard link to `path` would be another name of.
    fn find(&mut self, path: &ArchivePath) -> Option<Place> {
        let (directory, name) = path.split_last()?;
        let parent = resolve::directory(self, directory.components()).ok()?;
        let place = self.layers.named(&parent, name).first().copied()?;
        (!self.layers.is_directory(place)).then_some(place)
    }
}

impl resolve::Tree for Stacked<'_, '_> {
    type Directory = Rc<Parts>;
    type Error = Missing;

    fn root(&self) -> Rc<Parts> {
        Rc::new(self.layers.roots(self.count))
    }

    fn step(&mut self, parent: &Rc<Parts>, name: &[u8]) -> Result<Step<Rc<Parts>>, Missing> {
        let parts = self.layers.named(parent, name);
        let first = parts.first().and_then(|&place| self.layers.entry(place));
        Ok(step(first, |_| Rc::new(parts)))
    }

    fn imply(&mut self, _parent: &Rc<Parts>, _name: &[u8]) -> Result<Rc<Parts>, Missing> {
        Err(Missing)
    }
}

/// What `entry` is for who passes it, in the shape that `directory` gives to one.
fn step<D>(entry: Option<Entry<'_>>, directory: impl FnOnce(Ino) -> D) -> Step<D> {
    let Some(entry) = entry else {
        return Step::Missing;
    };
    match entry.kind() {
        Kind::Directory => Step::Directory(directory(entry.ino())),
        Kind::Symlink(target) => Step::Link(target.to_vec()),
        _ => Step::Other,
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
        Ok(step(self.0.lookup(*parent, name), |ino| ino))
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

impl<'a> Laying<'a, '_> {
    fn run(&mut self) -> Result<(), TooLarge> {
        let indexes = self.layers.indexes;
        let problems = indexes.iter().map(|index| index.problem_count());
        let problems = problems.fold(0, u64::saturating_add);
        self.plan.problems = problems.saturating_sub(self.layers.settled);
        self.directory(self.layers.roots(indexes.len()))?;
        while let Some((directory, parts)) = self.pending.pop() {
            match parts.as_slice() {
                [only] => self.names_of_one(directory, *only)?,
                _ => self.names_of_many(directory, &parts)?,
            }
        }
        self.plan.problems = self.plan.problems.saturating_add(self.left_out.get());
        Ok(())
    }

    /// Plans a directory that consists of `parts`, one at least; its place.
    fn directory(&mut self, parts: Parts) -> Result<Option<Place>, TooLarge> {
        let Some(&place) = parts.first() else {
            return Ok(None);
        };
        let is_spoken_of = |part: &&Place| {
            let entry = self.layers.entry(**part);
            entry.is_some_and(|entry| !entry.is_implied())
        };
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
        let target = if self.layers.is_directory(first) {
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
                    self.layers.lay(parts, place);
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
        let Some(index) = self.layers.index(part.layer) else {
            return;
        };
        let whiteouts = self.layers.whiteouts;
        let directory = index.entry(part.ino);
        if directory.is_some_and(|directory| whiteouts.is_opaque(&directory)) {
            hides(None);
        }
        let marks = self.layers.marks_in(part).into_iter().flatten();
        let mut say = |meaning: Meaning<'a>| match meaning {
            Meaning::Entry => {}
            Meaning::Hides(name) => hides(Some(name)),
            Meaning::Opaque => hides(None),
        };
        marks.for_each(|&meaning| say(meaning));
        for child in index.children(part.ino, 0) {
            let Some(entry) = index.entry(child.ino) else {
                continue;
            };
            if self.layers.is_hidden(index, child.name, &entry) {
                say(Meaning::Hides(child.name));
            }
            say(whiteouts.meaning(child.name, &entry));
        }
    }

    /// Calls `put` with what of directory `part` is an entry.
    fn entries(&self, part: Place, mut put: impl FnMut(&'a [u8], Place)) {
        let Some(index) = self.layers.index(part.layer) else {
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
            if self.layers.can_show(index, &entry) {
                let (layer, ino) = (part.layer, child.ino);
                put(child.name, Place { layer, ino });
            } else {
                self.left_out.set(self.left_out.get() + 1);
            }
        }
    }

    /// Calls `put` with the hard links to lower layers that directory `part` holds.
    fn links(&self, part: Place, mut put: impl FnMut(&'a [u8], Place)) {
        for (&name, &place) in self.layers.links_in(part).into_iter().flatten() {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::index::sample::{directory, file, hard_link, index, member, symlink};
    use crate::tar::{self, Device, Member};

    /// Few, so that they meet.
    const NAMES: [&str; 8] = ["a", "b", "d", "d/a", "d/b", "d/d", "d/d/a", "l/a"];

    fn a_member() -> impl Strategy<Value = Member> {
        let name = || prop::sample::select(&NAMES[..]);
        let hidden = |name: &str| match name.rsplit_once('/') {
            Some((parent, name)) => format!("{parent}/.wh.{name}"),
            None => format!(".wh.{name}"),
        };
        let none = tar::Kind::CharDevice(Device { major: 0, minor: 0 });
        prop_oneof![
            3 => name().prop_map(|name| file(name, 0..1)),
            2 => name().prop_map(|name| directory(name, 0o755)),
            1 => name().prop_map(move |name| file(&hidden(name), 0..0)),
            1 => name().prop_map(|name| file(&format!("{name}/.wh..wh..opq"), 0..0)),
            1 => name().prop_map(move |name| member(name, none.clone())),
            1 => (name(), name()).prop_map(|(name, target)| symlink(name, target)),
            3 => (name(), name()).prop_map(|(name, target)| hard_link(name, target)),
            1 => (name(), name()).prop_map(move |(name, target)| hard_link(&hidden(name), target)),
            1 => (name(), name())
                .prop_map(|(name, target)| hard_link(&format!("{name}/.wh..wh..opq"), target)),
        ]
    }

    proptest! {
        /// A link finds by itself what the whole tree has where it leads.
        #[test]
        fn a_name_alone_is_what_it_is_in_the_whole_tree(
            layers in prop::collection::vec(prop::collection::vec(a_member(), 0..8), 1..5),
            whiteouts in prop::sample::select(
                &[Whiteouts::Oci, Whiteouts::Overlay, Whiteouts::Keep][..]
            ),
        ) {
            let layers: Vec<_> = layers.iter().map(|members| index(members)).collect();
            let indexes: Vec<_> = layers.iter().collect();
            let stack = linked(&indexes, whiteouts);
            let whole = stack.tree().expect("small");
            let in_whole = |path: &ArchivePath| {
                let (directory, name) = path.split_last()?;
                let way = &mut Way(&whole.index);
                let parent = resolve::directory(way, directory.components()).ok()?;
                let entry = whole.index.lookup(parent, name)?;
                let is_directory = entry.kind() == Kind::Directory;
                (!is_directory).then(|| whole.place(entry.ino()))?
            };
            let mut way = Stacked { layers: &stack, count: indexes.len() };
            for name in NAMES.iter().chain(&["l", "d/d/d", "a/b"]) {
                let path = ArchivePath::sanitize(name.as_bytes()).path;
                prop_assert_eq!(way.find(&path), in_whole(&path), "{}", name);
            }
        }
    }
}
