//! Finds targets of hard links that a layer does not contain yet; pure.
//!
//! The search walks the layers below name by name, because a merged tree for each layer with such links would
//! take long to build. It caches directories and names. The work of a merge is bounded, because symbolic
//! links could cross layers with thousands of directories on each path again and again.

use std::collections::HashMap;

use super::layer_stack::{Layers, Parts, roots};
use crate::base::archive_path::ArchivePath;
use crate::base::resolve::{self, Component, ResolveError};
use crate::index::{
    Charge, EntryKind, Index, Ino, LayerIno, MemoryLimit, Options, Problem, TooMuchMemory,
    UnresolvedLink, WhiteoutFormat,
};

/// Maximum work that all hard links of a merge share, which takes a few seconds. A step to a name costs 1,
/// and 1 more for each layer searched. 100 layers with links in 50 directories each need a tenth.
pub(super) const MAX_SHARED_WORK: u64 = 10_000_000;

/// Work of each link before it uses the shared work, so that a target in a cached directory is found.
const WORK_PER_LINK: u64 = 64;

/// Problem text for a link without a target. The link has replaced the entry at its path.
pub(super) const MISSING_TARGET: &str = "the target of the hard link is missing, and all else that the layer has at \
                              its path or below it is left out";

/// Problem text for a link whose search exceeds the allowed work.
pub(super) const TOO_MUCH_WORK: &str = "the target of the hard link is not looked up: the links of the layers lead \
                             through too many directories";

/// Bytes of an entry in a table of names or paths, besides its text.
const TABLE_ENTRY_BYTES: usize = 192;

pub(super) fn problem_at(directory: ArchivePath, name: &[u8], what: &str) -> Problem {
    let mut path = directory;
    path.push(name);
    Problem {
        path: Some(path),
        offset: None,
        what: what.to_owned(),
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CrossLinkTarget {
    Entry(LayerIno),
    /// Another hard link of the same layer, by its number in order of directories and names.
    Link(u32),
    /// There is no entry, or it is a directory.
    Missing,
    TooMuchWork,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct WorkBudget {
    /// Of all links.
    pub(super) shared: u64,
    /// Remaining work of the current link alone.
    link: u64,
}

impl WorkBudget {
    pub(super) fn new(shared: u64) -> Self {
        Self { shared, link: 0 }
    }

    fn spend(&mut self, work: u64) -> Result<(), WalkError> {
        let own = work.min(self.link);
        let shared = self.shared.checked_sub(work - own);
        self.shared = shared.ok_or(WalkError::TooMuchWork)?;
        self.link -= own;
        Ok(())
    }
}

#[derive(Debug, thiserror::Error)]
pub(super) enum WalkError {
    #[error("the path ends early")]
    Missing,
    #[error("too much work")]
    TooMuchWork,
    #[error(transparent)]
    TooMuchMemory(#[from] TooMuchMemory),
}

/// Stacks `indexes`, from the bottom, and resolves their hard links to lower layers.
pub(super) fn link_layers<'a>(
    indexes: &'a [&'a Index],
    whiteouts: WhiteoutFormat,
    limit: &MemoryLimit,
    work: &mut WorkBudget,
) -> Result<Layers<'a>, TooMuchMemory> {
    let mut layers = Layers::new(indexes, whiteouts, limit)?;
    for (number, index) in (0..).zip(indexes) {
        find_links(&mut layers, number, index, limit, work)?;
    }
    Ok(layers)
}

/// Resolves the links of layer `number` to the layers below, which must be resolved already.
fn find_links<'a>(
    layers: &mut Layers<'a>,
    number: u32,
    index: &'a Index,
    limit: &MemoryLimit,
    work: &mut WorkBudget,
) -> Result<(), TooMuchMemory> {
    let mut charge = limit.charge();
    let mut links = Vec::new();
    charge.reserve(&mut links, index.unresolved_links().count())?;
    links.extend(index.unresolved_links());
    links.sort_unstable_by_key(|link| (link.parent, link.name));
    links.dedup_by_key(|link| (link.parent, link.name));
    // Includes the numbers of the longest chain.
    charge.add(links.len() * (size_of::<CrossLinkTarget>() + size_of::<usize>()))?;
    let targets = find_targets(layers, number, &links, work, limit)?;
    let mut found = Vec::new();
    layers.charge.reserve(&mut found, links.len())?;
    // Links of a directory are adjacent.
    let mut directory = (Ino(0), ArchivePath::root());
    for (link, target) in links.iter().zip(targets) {
        if let CrossLinkTarget::Entry(layer_ino) = target {
            found.push((link.parent, link.name, layer_ino));
            continue;
        }
        if directory.0 != link.parent {
            directory = (link.parent, index.path(link.parent).unwrap_or_default());
        }
        let mut names = directory.1.components().chain([link.name]);
        if names.any(|name| layers.whiteouts.is_reserved_name(name)) {
            continue;
        }
        layers.missing_count += 1;
        if layers.missing.len() < Options::default().max_problems {
            let what = match target {
                CrossLinkTarget::TooMuchWork => TOO_MUCH_WORK,
                _ => MISSING_TARGET,
            };
            let problem = problem_at(directory.1.clone(), link.name, what);
            layers.missing.push((number as usize, problem));
        }
    }
    layers.links.push(found);
    Ok(())
}

/// Finds the targets of sorted `links`. Searches below layer `number` first, and then its own final tree.
fn find_targets(
    layers: &Layers<'_>,
    number: u32,
    links: &[UnresolvedLink<'_>],
    work: &mut WorkBudget,
    limit: &MemoryLimit,
) -> Result<Vec<CrossLinkTarget>, TooMuchMemory> {
    let mut targets = Vec::with_capacity(links.len());
    let mut below = Resolver::new(layers, number, None, &mut *work, limit.charge());
    for link in links {
        targets.push(below.find_target(link.target)?);
    }
    drop(below);
    let mut own = Resolver::new(layers, number, Some(links), work, limit.charge());
    for (target, link) in targets.iter_mut().zip(links) {
        if *target == CrossLinkTarget::Missing {
            *target = own.find_target(link.target)?;
        }
    }
    resolve_chains(&mut targets);
    Ok(targets)
}

/// Replaces links to links by the end of their chain. A cyclic chain has no target.
fn resolve_chains(targets: &mut [CrossLinkTarget]) {
    let mut passed = Vec::new();
    for start in 0..targets.len() {
        let mut end = CrossLinkTarget::Missing;
        let mut at = start;
        while let Some(target) = targets.get_mut(at) {
            end = *target;
            let CrossLinkTarget::Link(next) = end else {
                break;
            };
            // A cycle through this link ends here.
            *target = CrossLinkTarget::Missing;
            passed.push(at);
            at = next as usize;
        }
        for at in passed.drain(..) {
            if let Some(target) = targets.get_mut(at) {
                *target = end;
            }
        }
    }
}

/// Resolves paths in the layers below one, or in one layer alone.
pub(super) struct Resolver<'r, 'a> {
    layers: &'r Layers<'a>,
    /// For one layer alone, its links that are not entries.
    own_links: Option<&'r [UnresolvedLink<'a>]>,
    /// The cached directories, the root first.
    directories: Vec<Directory>,
    /// Cached results of paths: numbers of directories.
    paths: HashMap<ArchivePath, Option<u32>>,
    work: &'r mut WorkBudget,
    charge: Charge,
}

struct Directory {
    parts: Parts,
    names: HashMap<Box<[u8]>, LookupResult>,
}

#[derive(Clone, Copy, Debug)]
enum LookupResult {
    /// A directory, by its number.
    Directory(u32),
    /// Anything else.
    Entry(LayerIno),
    Nothing,
}

impl<'r, 'a> Resolver<'r, 'a> {
    /// A resolver for the layers below `number`, or for layer `number` alone with its `own_links`.
    pub(super) fn new(
        layers: &'r Layers<'a>,
        number: u32,
        own_links: Option<&'r [UnresolvedLink<'a>]>,
        work: &'r mut WorkBudget,
        charge: Charge,
    ) -> Self {
        let layer_numbers = own_links.map_or(0..number, |_| number..number + 1);
        let root = Directory {
            parts: roots(layer_numbers),
            names: HashMap::new(),
        };
        Self {
            layers,
            own_links,
            directories: vec![root],
            paths: HashMap::new(),
            work,
            charge,
        }
    }

    pub(super) fn find_target(&mut self, target: &[u8]) -> Result<CrossLinkTarget, TooMuchMemory> {
        self.work.link = WORK_PER_LINK;
        match self.find(target) {
            Ok(target) => Ok(target),
            Err(WalkError::Missing) => Ok(CrossLinkTarget::Missing),
            Err(WalkError::TooMuchWork) => Ok(CrossLinkTarget::TooMuchWork),
            Err(WalkError::TooMuchMemory(error)) => Err(error),
        }
    }

    fn find(&mut self, target: &[u8]) -> Result<CrossLinkTarget, WalkError> {
        let target = ArchivePath::sanitize(target).path;
        let (directory, name) = target.split_last().ok_or(WalkError::Missing)?;
        let directory = self.find_directory(directory)?;
        match self.look_up(directory, name)?.first() {
            Some(&layer_ino) if self.layers.is_directory(layer_ino) => Err(WalkError::Missing),
            Some(&layer_ino) => Ok(CrossLinkTarget::Entry(layer_ino)),
            None => self.own_link(directory, name).ok_or(WalkError::Missing),
        }
    }

    fn own_link(&self, directory: u32, name: &[u8]) -> Option<CrossLinkTarget> {
        let part = self.directories.get(directory as usize)?.parts.first()?;
        let links = self.own_links?;
        let found = links.binary_search_by(|link| (link.parent, link.name).cmp(&(part.ino, name)));
        Some(CrossLinkTarget::Link(u32::try_from(found.ok()?).ok()?))
    }

    fn find_directory(&mut self, path: ArchivePath) -> Result<u32, WalkError> {
        if let Some(&known) = self.paths.get(&path) {
            return known.ok_or(WalkError::Missing);
        }
        let found = match resolve::directory(self, path.components()) {
            Ok(directory) => Some(directory),
            Err(ResolveError::Path(_) | ResolveError::Tree(WalkError::Missing)) => None,
            Err(ResolveError::Tree(error)) => return Err(error),
        };
        self.charge.add(path.as_bytes().len() + TABLE_ENTRY_BYTES)?;
        self.paths.insert(path, found);
        found.ok_or(WalkError::Missing)
    }

    fn look_up(&mut self, directory: u32, name: &[u8]) -> Result<Parts, WalkError> {
        let directory = self.directories.get(directory as usize);
        let parts = &directory.ok_or(WalkError::Missing)?.parts;
        self.work.spend(1 + parts.len() as u64)?;
        if self.own_links.is_none() {
            return Ok(self.layers.look_up(parts, name));
        }
        let own = |part: &LayerIno| {
            let entry = self.layers.index(part.layer)?.lookup(part.ino, name)?;
            let (layer, ino) = (part.layer, entry.ino());
            (!entry.is_whiteout_only()).then_some(LayerIno { layer, ino })
        };
        Ok(parts.iter().filter_map(own).collect())
    }

    fn look_up_and_remember(
        &mut self,
        parent: u32,
        name: &[u8],
    ) -> Result<LookupResult, WalkError> {
        let parts = self.look_up(parent, name)?;
        let found = match parts.first() {
            None => LookupResult::Nothing,
            Some(&layer_ino) if self.layers.is_directory(layer_ino) => {
                let number = u32::try_from(self.directories.len());
                self.charge.add(parts.capacity() * size_of::<LayerIno>())?;
                let directory = Directory {
                    parts,
                    names: HashMap::new(),
                };
                self.charge.push(&mut self.directories, directory)?;
                LookupResult::Directory(number.map_err(|_| WalkError::TooMuchWork)?)
            }
            Some(&layer_ino) => LookupResult::Entry(layer_ino),
        };
        self.charge.add(name.len() + TABLE_ENTRY_BYTES)?;
        if let Some(parent) = self.directories.get_mut(parent as usize) {
            parent.names.insert(name.into(), found);
        }
        Ok(found)
    }
}

impl resolve::PathLookup for Resolver<'_, '_> {
    type Directory = u32;
    type Error = WalkError;

    fn root(&self) -> u32 {
        0
    }

    fn is_chroot(&self) -> bool {
        true
    }

    fn step(&mut self, parent: &u32, name: &[u8]) -> Result<Component<u32>, WalkError> {
        let directory = self.directories.get(*parent as usize);
        let known = directory.and_then(|directory| directory.names.get(name));
        let found = match known.copied() {
            Some(found) => {
                self.work.spend(1)?;
                found
            }
            None => self.look_up_and_remember(*parent, name)?,
        };
        let layer_ino = match found {
            LookupResult::Directory(number) => return Ok(Component::Directory(number)),
            LookupResult::Nothing => return Ok(Component::Missing),
            LookupResult::Entry(layer_ino) => layer_ino,
        };
        let entry = self.layers.entry(layer_ino);
        let Some(EntryKind::Symlink(target)) = entry.map(|entry| entry.kind()) else {
            return Ok(Component::Other);
        };
        // Counts components that are no steps too, such as `.` and `..`.
        let components = target.split(|&byte| byte == b'/').count();
        self.work.spend(components as u64)?;
        Ok(Component::Link(target.to_vec()))
    }

    fn imply(&mut self, _: &u32, _: &[u8]) -> Result<u32, WalkError> {
        Err(WalkError::Missing)
    }
}
