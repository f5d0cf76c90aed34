//! The trees of layers, from the bottom, as the one tree that they make together; pure.
//!
//! A directory over a directory: the names of both, and the attributes of the upper one, unless only
//! paths speak of it. Anything else replaces what lies below it. What a layer says to be gone is gone
//! from the layers below it, and never from itself.
//!
//! A mount, a listing and `materialize` take the tree from here.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;

use crate::base::path::ArchivePath;
use crate::base::resolve::{self, Step};
use crate::codec::Compression;
use crate::index::{
    self, Builder, Entry, Index, Ino, Kind, Locator, Merged, Named, Options, Origin, Place, Plan,
    Problem, Refused, Surface, TooLarge, UnresolvedLink, Whiteouts,
};

/// Links in a chain of links to what their layer holds in the end; in a longer one those in front find
/// nothing.
const MAX_CHAIN: usize = 64;

/// The tree that `layers` make, from the bottom; without layers it is empty.
///
/// # Errors
/// When it has more entries than a tree can have.
pub fn merge(layers: &[&Index], whiteouts: Whiteouts) -> Result<Merged, TooLarge> {
    if layers.is_empty() {
        let empty = Builder::new(Options::default()).finish(Origin::default());
        return linked(&[&empty], whiteouts).tree();
    }
    linked(layers, whiteouts).tree()
}

/// `layers`, with their hard links to lower ones.
fn linked<'a>(layers: &'a [&'a Index], whiteouts: Whiteouts) -> Layers<'a> {
    let marks = layers.iter().map(|index| marks(index, whiteouts));
    let mut stack = Layers {
        indexes: layers,
        whiteouts,
        marks: marks.collect(),
        links: vec![HashMap::new(); layers.len()],
        missing: Vec::new(),
        missing_count: 0,
    };
    for number in 0..layers.len() {
        stack.find_links(number);
    }
    stack
}

/// What a layer removes in one directory.
#[derive(Clone, Debug, Default)]
struct Marks<'a> {
    /// All that the layers below have there.
    is_opaque: bool,
    /// What of that has these names.
    names: HashSet<&'a [u8]>,
}

/// What a layer removes of those below it, by its own directories.
fn marks(index: &Index, whiteouts: Whiteouts) -> HashMap<Ino, Marks<'_>> {
    let mut marks: HashMap<Ino, Marks<'_>> = HashMap::new();
    for whiteout in index.whiteouts() {
        let marks = marks.entry(whiteout.parent).or_default();
        match whiteout.name {
            Some(name) => drop(marks.names.insert(name)),
            None => marks.is_opaque = true,
        }
    }
    if whiteouts != Whiteouts::Overlay {
        return marks;
    }
    for ino in (Ino::ROOT.0..=index.last_ino().0).map(Ino) {
        let Some(directory) = index.entry(ino) else {
            continue;
        };
        if whiteouts.is_opaque(&directory) {
            marks.entry(ino).or_default().is_opaque = true;
        }
        for child in index.children(ino, 0) {
            let entry = index.entry(child.ino);
            if entry.is_some_and(|entry| whiteouts.is_whiteout(&entry)) {
                marks.entry(ino).or_default().names.insert(child.name);
            }
        }
    }
    marks
}

/// Names that hard links to lower layers are, by the directory of the layer they lie in.
type Links<'a> = HashMap<Ino, BTreeMap<&'a [u8], Place>>;

/// Layers, what they remove, and what their hard links to lower ones have turned out to name.
struct Layers<'a> {
    indexes: &'a [&'a Index],
    whiteouts: Whiteouts,
    marks: Vec<HashMap<Ino, Marks<'a>>>,
    links: Vec<Links<'a>>,
    /// The first links whose targets are nowhere.
    missing: Vec<(usize, Problem)>,
    missing_count: u64,
}

/// What a name stands for: one entry, or directories from the bottom; nothing if it is not seen.
type Parts = Vec<Place>;

impl<'a> Layers<'a> {
    /// What all of them make.
    fn tree(&self) -> Result<Merged, TooLarge> {
        let mut laying = Laying {
            layers: self,
            plan: Plan {
                problem_count: self.missing_count,
                problems: self.missing.clone(),
                ..Plan::default()
            },
            pending: Vec::new(),
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
        let is_over_directory = below.is_some_and(|&below| self.is_directory(below));
        let entry = self.entry(place);
        if entry.is_some_and(|entry| entry.is_unseen()) && !is_over_directory {
            // It says what is gone from a directory that is not there.
            return;
        }
        if !(is_over_directory && self.is_directory(place)) {
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
            if marks.is_some_and(|marks| marks.is_opaque || marks.names.contains(name)) {
                named.clear();
            }
            let entry = index.lookup(part.ino, name);
            if let Some(entry) = entry.filter(|entry| self.shows(name, entry)) {
                let (layer, ino) = (part.layer, entry.ino());
                self.lay(&mut named, Place { layer, ino });
            }
            if let Some(&place) = self.links_in(part).and_then(|links| links.get(name)) {
                self.lay(&mut named, place);
            }
        }
        named
    }

    /// Whether `entry`, called `name`, is one of the merged tree.
    fn shows(&self, name: &[u8], entry: &Entry<'_>) -> bool {
        self.is_meant(name, entry) && !self.whiteouts.leads_elsewhere(entry)
    }

    /// Whether `entry`, called `name`, is more than a way to say what is gone.
    fn is_meant(&self, name: &[u8], entry: &Entry<'_>) -> bool {
        !self.whiteouts.takes_name(name) && !self.whiteouts.is_whiteout(entry)
    }

    /// The hard links to lower layers that directory `part` holds.
    fn links_in(&self, part: Place) -> Option<&BTreeMap<&'a [u8], Place>> {
        self.links.get(part.layer as usize)?.get(&part.ino)
    }

    /// What directory `part` says to be gone from what lies below it.
    fn marks_in(&self, part: Place) -> Option<&Marks<'a>> {
        self.marks.get(part.layer as usize)?.get(&part.ino)
    }

    /// Looks for the targets of those links of layer `number` that the layer did not hold when they came:
    /// in the layers below it, which are done, and then in what the layer holds in the end.
    fn find_links(&mut self, number: usize) {
        let (Some(index), Ok(layer)) = (self.indexes.get(number).copied(), u32::try_from(number))
        else {
            return;
        };
        let links: Vec<_> = index.unresolved_links().collect();
        let mut below = Stacked {
            layers: self,
            count: number,
        };
        let in_layer = own_targets(index, &links);
        let targets = links.iter().map(|link| {
            let target = ArchivePath::sanitize(link.target).path;
            below.find(&target)
        });
        let targets: Vec<_> = targets.collect();
        for (start, link) in links.iter().enumerate() {
            let mut at = start;
            let mut found = None;
            for _ in 0..MAX_CHAIN {
                found = targets.get(at).copied().flatten();
                match in_layer.get(at) {
                    _ if found.is_some() => break,
                    Some(&Own::Entry(ino)) => {
                        found = Some(Place { layer, ino });
                        break;
                    }
                    Some(&Own::Link(next)) => at = next,
                    Some(Own::Nothing) | None => break,
                }
            }
            match (found, self.links.get_mut(number)) {
                (Some(place), Some(links)) => {
                    let links = links.entry(link.parent).or_default();
                    links.insert(link.name, place);
                }
                _ => self.miss(index, number, link),
            }
        }
    }

    /// Notes that the target of `link` is nowhere.
    fn miss(&mut self, index: &Index, number: usize, link: &UnresolvedLink<'_>) {
        let mut path = index.path(link.parent).unwrap_or_default();
        path.push(link.name);
        if path
            .components()
            .any(|name| self.whiteouts.takes_name(name))
        {
            return;
        }
        self.missing_count += 1;
        if self.missing.len() < Options::default().max_problems {
            let problem = Problem {
                path: Some(path),
                offset: None,
                what: Refused::MissingTarget.to_string(),
            };
            self.missing.push((number, problem));
        }
    }
}

/// What the layer itself holds in the end at a hard link's target.
#[derive(Clone, Copy, Debug)]
enum Own {
    Entry(Ino),
    /// Another one of such links, by its place among them.
    Link(usize),
    Nothing,
}

/// What layer `index` itself holds in the end at the targets of `links`.
fn own_targets(index: &Index, links: &[UnresolvedLink<'_>]) -> Vec<Own> {
    let by_name: HashMap<_, _> = (links.iter().map(|link| (link.parent, link.name)))
        .zip(0..)
        .collect();
    let own = |target: &ArchivePath| {
        let (directory, name) = target.split_last()?;
        let parent = resolve::directory(&mut Way(index), directory.components()).ok()?;
        match index.lookup(parent, name) {
            Some(entry) if entry.kind() == Kind::Directory => None,
            Some(entry) => Some(Own::Entry(entry.ino())),
            None => by_name.get(&(parent, name)).copied().map(Own::Link),
        }
    };
    let targets = links.iter().map(|link| {
        let target = ArchivePath::sanitize(link.target).path;
        own(&target).unwrap_or(Own::Nothing)
    });
    targets.collect()
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

    fn is_chroot(&self) -> bool {
        true
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

    fn is_chroot(&self) -> bool {
        true
    }

    fn step(&mut self, parent: &Ino, name: &[u8]) -> Result<Step<Ino>, Missing> {
        let entry = self.0.lookup(*parent, name);
        Ok(step(entry.filter(|entry| !entry.is_unseen()), |ino| ino))
    }

    fn imply(&mut self, _parent: &Ino, _name: &[u8]) -> Result<Ino, Missing> {
        Err(Missing)
    }
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
}

impl<'a> Laying<'a, '_> {
    fn run(&mut self) -> Result<(), TooLarge> {
        self.directory(self.layers.roots(self.layers.indexes.len()))?;
        while let Some((directory, parts)) = self.pending.pop() {
            self.names(directory, &parts)?;
        }
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

    /// The names of a directory that consists of `parts`.
    fn names(&mut self, directory: u32, parts: &[Place]) -> Result<(), TooLarge> {
        let mut names: Vec<(&'a [u8], Parts)> = Vec::new();
        let mut numbers: HashMap<&'a [u8], usize> = HashMap::new();
        for &part in parts {
            // First, so that it concerns what lies below alone, wherever it stands.
            if let Some(marks) = self.layers.marks_in(part) {
                if marks.is_opaque {
                    for (_, parts) in &mut names {
                        parts.clear();
                    }
                }
                for &name in &marks.names {
                    let number = numbers.get(name).copied();
                    if let Some((_, parts)) = number.and_then(|number| names.get_mut(number)) {
                        parts.clear();
                    }
                }
            }
            for (name, place) in self.entries(part) {
                let number = *numbers.entry(name).or_insert_with(|| {
                    names.push((name, Vec::new()));
                    names.len() - 1
                });
                if let Some((_, parts)) = names.get_mut(number) {
                    self.layers.lay(parts, place);
                }
            }
        }
        for (name, parts) in names {
            self.name(directory, name, parts)?;
        }
        Ok(())
    }

    /// What of directory `part` is an entry, and the hard links to lower layers that it holds.
    fn entries(&mut self, part: Place) -> Vec<(&'a [u8], Place)> {
        let mut entries = Vec::new();
        let Some(index) = self.layers.index(part.layer) else {
            return entries;
        };
        for child in index.children(part.ino, 0) {
            let Some(entry) = index.entry(child.ino) else {
                continue;
            };
            if !self.layers.is_meant(child.name, &entry) {
                continue;
            }
            if self.layers.shows(child.name, &entry) {
                let (layer, ino) = (part.layer, child.ino);
                entries.push((child.name, Place { layer, ino }));
            } else {
                self.leave_out(index, part, child.name);
            }
        }
        let links = self.layers.links_in(part).into_iter().flatten();
        entries.extend(links.map(|(&name, &place)| (name, place)));
        entries
    }

    /// Notes that nothing is made of `name` in directory `part`.
    fn leave_out(&mut self, index: &Index, part: Place, name: &[u8]) {
        const ELSEWHERE: &str = "what it is lies elsewhere in the layers below: redirects and \
                                 metacopies are not followed";
        self.plan.problem_count += 1;
        if self.plan.problems.len() < Options::default().max_problems {
            let mut path = index.path(part.ino).unwrap_or_default();
            path.push(name);
            let problem = Problem {
                path: Some(path),
                offset: None,
                what: ELSEWHERE.to_owned(),
            };
            self.plan.problems.push((part.layer as usize, problem));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::index::sample::{directory, file, hard_link, layer, member, symlink};
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
            let layers: Vec<_> = layers.iter().map(|members| layer(members, whiteouts)).collect();
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
