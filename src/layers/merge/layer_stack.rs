//! Layers above each other, and the entries behind their names; pure.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use crate::index::{
    Charge, Entry, EntryKind, Index, Ino, LayerIno, MemoryLimit, Problem, TooMuchMemory,
    WhiteoutFormat,
};

const REDIRECTED: &str =
    "what it is lies elsewhere in the layers below: redirects and metacopies are not followed";

pub(super) const MISSING_ENTRY: &str =
    "the index of its layer is damaged and lacks it; delete it and open the image again";

/// Stands for all names in a removal: an opaque directory.
const ALL_NAMES: &[u8] = b"";

/// Directory of a layer, and a name that it hides in lower layers.
type Removal<'a> = (Ino, &'a [u8]);

/// A hard link to a lower layer: the directory and the name in the layer, and the entry.
pub(super) type Link<'a> = (Ino, &'a [u8], LayerIno);

/// Layers, their removals, and the resolved targets of their hard links to lower layers.
pub(super) struct Layers<'a> {
    pub(super) indexes: &'a [&'a Index],
    pub(super) whiteouts: WhiteoutFormat,
    removals: Vec<Vec<Removal<'a>>>,
    pub(super) links: Vec<Vec<Link<'a>>>,
    /// The first links without a target.
    pub(super) missing: Vec<(usize, Problem)>,
    pub(super) missing_count: u64,
    pub(super) charge: Charge,
}

/// The entries behind a name: one entry, or directories from the bottom. Empty if hidden.
pub(super) type Parts = Vec<LayerIno>;

/// The effect of a layer's directory on one of its names, in order of application.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum LayerAction {
    /// Hides the entry of the layers below.
    Remove,
    Entry(Ino),
    /// Contains a hard link to this entry of a lower layer.
    Link(LayerIno),
}

pub(super) fn roots(layers: Range<u32>) -> Parts {
    let ino = Ino::ROOT;
    layers.map(|layer| LayerIno { layer, ino }).collect()
}

impl<'a> Layers<'a> {
    /// Layers whose hard links to lower layers are not resolved yet.
    pub(super) fn new(
        indexes: &'a [&'a Index],
        whiteouts: WhiteoutFormat,
        limit: &MemoryLimit,
    ) -> Result<Self, TooMuchMemory> {
        let mut charge = limit.charge();
        // The lowest layer has nothing to remove.
        let mut removals = vec![Vec::new()];
        for index in indexes.iter().skip(1) {
            removals.push(removals_of(index, whiteouts, &mut charge)?);
        }
        Ok(Self {
            indexes,
            whiteouts,
            removals,
            links: Vec::new(),
            missing: Vec::new(),
            missing_count: 0,
            charge,
        })
    }

    pub(super) fn index(&self, layer: u32) -> Option<&'a Index> {
        self.indexes.get(layer as usize).copied()
    }

    pub(super) fn entry(&self, layer_ino: LayerIno) -> Option<Entry<'a>> {
        self.index(layer_ino.layer)?.entry(layer_ino.ino)
    }

    pub(super) fn is_directory(&self, layer_ino: LayerIno) -> bool {
        let kind = self.entry(layer_ino).map(|entry| entry.kind());
        kind == Some(EntryKind::Directory)
    }

    /// Applies `action` to `parts`, the entries of `name` so far. The error says why the layer adds no entry.
    pub(super) fn apply(
        &self,
        parts: &mut Parts,
        layer: u32,
        name: &[u8],
        action: LayerAction,
    ) -> Result<(), &'static str> {
        let layer_ino = match action {
            LayerAction::Remove => {
                parts.clear();
                return Ok(());
            }
            LayerAction::Entry(ino) => LayerIno { layer, ino },
            LayerAction::Link(layer_ino) => layer_ino,
        };
        let entry = self.entry(layer_ino).ok_or(MISSING_ENTRY)?;
        if let LayerAction::Entry(_) = action {
            if self.whiteouts.is_reserved_name(name) || self.whiteouts.is_whiteout(&entry) {
                return Ok(());
            }
            if self.whiteouts.is_redirected(&entry) {
                return Err(REDIRECTED);
            }
        }
        let below = parts.last();
        let is_over_directory = below.is_some_and(|&below| self.is_directory(below));
        if entry.is_whiteout_only() && !is_over_directory {
            // It only hides names of a directory that does not exist below.
            return Ok(());
        }
        if !is_over_directory || entry.kind() != EntryKind::Directory {
            parts.clear();
        }
        parts.push(layer_ino);
        Ok(())
    }

    /// The `parts` of a directory from the highest opaque one up.
    pub(super) fn visible<'p>(&self, parts: &'p [LayerIno]) -> &'p [LayerIno] {
        let opaque = |&part: &LayerIno| self.removes(part, ALL_NAMES);
        let lowest = parts.iter().rposition(opaque).unwrap_or(0);
        parts.get(lowest..).unwrap_or_default()
    }

    pub(super) fn look_up(&self, parts: &[LayerIno], name: &[u8]) -> Parts {
        let mut named = Parts::new();
        for &part in self.visible(parts) {
            let index = self.index(part.layer);
            let entry = index.and_then(|index| index.lookup(part.ino, name));
            let actions = [
                self.removes(part, name).then_some(LayerAction::Remove),
                entry.map(|entry| LayerAction::Entry(entry.ino())),
                self.link(part, name).map(LayerAction::Link),
            ];
            for action in actions.into_iter().flatten() {
                // The planner applies it, too, and records the problem.
                self.apply(&mut named, part.layer, name, action).ok();
            }
        }
        named
    }

    pub(super) fn actions_by_name(&self, parts: &[LayerIno]) -> ActionsByName<'a, '_> {
        let mut actions = ActionsByName::default();
        for &part in parts {
            let removals = self.removals_in(part).iter();
            let removals = removals.map(|&(_, name)| (name, LayerAction::Remove));
            let children = self.index(part.layer).into_iter();
            let children = children
                .flat_map(move |index| index.children_by_name(part.ino, 0))
                .map(|child| (child.name, LayerAction::Entry(child.ino)));
            let links = self.links_in(part).iter();
            let links = links.map(|&(_, name, layer_ino)| (name, LayerAction::Link(layer_ino)));
            actions.add(part, removals);
            actions.add(part, children);
            actions.add(part, links);
        }
        actions
    }

    fn removals_in(&self, part: LayerIno) -> &[Removal<'a>] {
        let removals = self.removals.get(part.layer as usize);
        rows_of(removals, part.ino, |&(directory, _)| directory)
    }

    fn removes(&self, part: LayerIno, name: &[u8]) -> bool {
        let removals = self.removals.get(part.layer as usize);
        removals.is_some_and(|removals| removals.binary_search(&(part.ino, name)).is_ok())
    }

    pub(super) fn links_in(&self, part: LayerIno) -> &[Link<'a>] {
        let links = self.links.get(part.layer as usize);
        rows_of(links, part.ino, |&(directory, ..)| directory)
    }

    fn link(&self, part: LayerIno, name: &[u8]) -> Option<LayerIno> {
        let links = self.links.get(part.layer as usize)?;
        let key = |&(directory, name, _): &Link<'a>| (directory, name);
        let number = links.binary_search_by(|link| key(link).cmp(&(part.ino, name)));
        links.get(number.ok()?).map(|&(.., layer_ino)| layer_ino)
    }
}

/// The whiteouts of a layer, sorted by directory and name.
fn removals_of<'a>(
    index: &'a Index,
    whiteouts: WhiteoutFormat,
    charge: &mut Charge,
) -> Result<Vec<Removal<'a>>, TooMuchMemory> {
    let mut removals = Vec::new();
    charge.reserve(&mut removals, index.whiteouts().count())?;
    for whiteout in index.whiteouts() {
        let name = whiteout.name.unwrap_or(ALL_NAMES);
        charge.push(&mut removals, (whiteout.parent, name))?;
    }
    let entries = index.entries();
    for directory in entries.filter(|_| whiteouts == WhiteoutFormat::Overlay) {
        let ino = directory.ino();
        if whiteouts.is_opaque(&directory) {
            charge.push(&mut removals, (ino, ALL_NAMES))?;
        }
        for child in index.children(ino, 0) {
            let entry = index.entry(child.ino);
            if entry.is_some_and(|entry| whiteouts.is_whiteout(&entry)) {
                charge.push(&mut removals, (ino, child.name))?;
            }
        }
    }
    removals.sort_unstable();
    removals.dedup();
    Ok(removals)
}

/// The part of `rows`, sorted by directory, that belongs to `directory`.
fn rows_of<T>(rows: Option<&Vec<T>>, directory: Ino, ino: impl Fn(&T) -> Ino) -> &[T] {
    let rows = rows.map(Vec::as_slice).unwrap_or_default();
    let start = rows.partition_point(|row| ino(row) < directory);
    let rows = rows.get(start..).unwrap_or_default();
    let end = rows.partition_point(|row| ino(row) == directory);
    rows.get(..end).unwrap_or_default()
}

type Actions<'a, 's> = Box<dyn Iterator<Item = (&'a [u8], LayerAction)> + 's>;

/// Merges the actions of several directories, sorted by name, then in the order of application.
#[derive(Default)]
pub(super) struct ActionsByName<'a, 's> {
    streams: Vec<(LayerIno, Actions<'a, 's>)>,
    /// The next action of each stream: the name, the number of the stream, the action.
    next: BinaryHeap<Reverse<(&'a [u8], usize, LayerAction)>>,
}

impl<'a, 's> ActionsByName<'a, 's> {
    /// Adds the sorted `actions` of directory `part`, above those added before.
    pub(super) fn add(
        &mut self,
        part: LayerIno,
        actions: impl Iterator<Item = (&'a [u8], LayerAction)> + 's,
    ) {
        let mut actions = Box::new(actions);
        if let Some((name, action)) = actions.next() {
            self.next.push(Reverse((name, self.streams.len(), action)));
            self.streams.push((part, actions));
        }
    }
}

impl<'a> Iterator for ActionsByName<'a, '_> {
    type Item = (&'a [u8], LayerIno, LayerAction);

    fn next(&mut self) -> Option<Self::Item> {
        let Reverse((name, number, action)) = self.next.pop()?;
        let (part, actions) = self.streams.get_mut(number)?;
        // Skips names that a damaged index repeats.
        if let Some((name, action)) = actions.find(|&(next, _)| next > name) {
            self.next.push(Reverse((name, number, action)));
        }
        Some((name, *part, action))
    }
}
