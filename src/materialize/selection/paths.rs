//! Requested paths, and the links of the archive that they go through.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::archive_path::ArchivePath;
use crate::base::resolve::{self, Component, PathError, ResolveError};
use crate::index;
use crate::tar::MemberKind;

/// Maximum memory of the links that are kept to resolve paths. With more, no link is followed.
pub(super) const MAX_LINK_BYTES: usize = 64 << 20;
/// Memory of a link beside its path and its target.
const LINK_BYTES: usize = 128;
/// Maximum memory of the places on the way of one path.
const MAX_WALK_BYTES: usize = 1 << 20;
/// Maximum number of times that one path is resolved. With more it leads nowhere.
const MAX_RESOLUTIONS: usize = 256;

/// A path requested by name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SelectedPath {
    /// Path in the archive, before components are stripped.
    pub path: ArchivePath,
    /// Where the links lead that were seen so far, if it goes through one.
    pub(super) resolved: Option<Result<ArchivePath, PathError>>,
    /// How often it was resolved.
    pub(super) resolutions: usize,
    pub(super) found: bool,
}

impl SelectedPath {
    /// Parses a path from the user. A leading `./` or `/` and a trailing slash are ignored. `None` if it has a `..`, which
    /// a run in the order of the archive cannot resolve.
    pub fn new(path: &[u8]) -> Option<Self> {
        let sanitized = ArchivePath::sanitize(path);
        (!sanitized.has_parent_component).then_some(Self {
            path: sanitized.path,
            resolved: None,
            resolutions: 0,
            found: false,
        })
    }

    pub(super) fn resolve(
        &mut self,
        find: impl FnOnce(&ArchivePath) -> Result<ArchivePath, PathError>,
    ) {
        self.resolutions += 1;
        let found = if self.resolutions > MAX_RESOLUTIONS {
            Err(PathError::TooManyLinks)
        } else {
            find(&self.path)
        };
        self.resolved = (found.as_ref() != Ok(&self.path)).then_some(found);
    }
}

/// Places with the numbers of requested paths.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct PlaceSet(pub(super) BTreeSet<(ArchivePath, usize)>);

impl PlaceSet {
    pub(super) fn has(&self, place: &ArchivePath) -> bool {
        let mut found = self.0.range((place.clone(), 0)..);
        found.next().is_some_and(|(found, _)| found == place)
    }

    /// Removes `place`, and returns its numbers.
    pub(super) fn take(&mut self, place: &ArchivePath) -> Vec<usize> {
        let range = (place.clone(), 0)..=(place.clone(), usize::MAX);
        let taken: Vec<_> = self.0.range(range).cloned().collect();
        for entry in &taken {
            self.0.remove(entry);
        }
        taken.into_iter().map(|(_, number)| number).collect()
    }

    /// The numbers of the places below `place`.
    pub(super) fn below(&self, place: &ArchivePath) -> impl Iterator<Item = usize> {
        let mut first = place.clone();
        first.push(b"\0");
        let below = self.0.range((first, 0)..);
        let below = below.take_while(move |(found, _)| found.starts_with(place));
        below.map(|(_, number)| *number)
    }
}

/// A link of an archive.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct SeenLink {
    target: Vec<u8>,
    /// Number of its member, which other names of it share.
    inode: u64,
}

/// Links of an archive, in the order of which a run resolves paths. Every other name is taken for a directory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PathLinks {
    /// Whether paths select what is behind links. Otherwise errors name it.
    pub(super) is_followed: bool,
    /// Whether there were too many links, so that none is followed.
    pub(super) is_full: bool,
    pub(super) targets: BTreeMap<ArchivePath, SeenLink>,
    /// Number of links so far.
    pub(super) count: u64,
    /// Places that requested paths reach through links.
    pub(super) passed: PlaceSet,
    /// The requested paths, and where links lead them if they are followed.
    pub(super) selected: PlaceSet,
    /// Those of [`Self::selected`] at which nothing was found yet.
    pub(super) missing: PlaceSet,
    /// Memory that links take.
    pub(super) bytes: usize,
}

impl PathLinks {
    /// Follows links that come before what they lead to.
    #[must_use]
    pub fn followed() -> Self {
        Self {
            is_followed: true,
            ..Self::default()
        }
    }

    /// The path without links, as those seen so far lead. The last component is not followed. Adds the places on the way
    /// to `passed`.
    pub(super) fn resolve(
        &self,
        path: &ArchivePath,
        passed: &mut Vec<ArchivePath>,
    ) -> Result<ArchivePath, PathError> {
        let mut tree = SeenLinks {
            targets: &self.targets,
            passed,
            bytes: 0,
        };
        let found = resolve::file(&mut tree, path.as_bytes(), false);
        let (_, mut place, name) = found.map_err(|error| match error {
            ResolveError::Path(error) | ResolveError::Tree(error) => error,
        })?;
        if let Some(name) = name {
            place.push(&name);
        }
        Ok(place)
    }

    /// The place of the member at `path`, and whether the way there goes through the link in this place.
    pub(super) fn place_of(&self, path: &ArchivePath) -> Option<(ArchivePath, bool)> {
        let (above, name) = path.split_last()?;
        let mut tree = SeenLinks {
            targets: &self.targets,
            passed: &mut Vec::new(),
            bytes: 0,
        };
        let found = resolve::parent(&mut tree, above.components(), name).ok();
        let (mut place, is_own_link) = found?;
        place.push(name);
        Some((place, is_own_link))
    }

    /// Whether a member of `kind` replaces the link at `place`.
    pub(super) fn is_replaced_by(&self, place: &ArchivePath, kind: &MemberKind) -> bool {
        let inode = |link: &SeenLink| link.inode;
        let is_itself = || match kind {
            MemberKind::HardLink(target) => {
                self.hard_linked(target).map(inode) == self.targets.get(place).map(inode)
            }
            _ => false,
        };
        index::check_kind(kind).is_ok() && !is_itself()
    }

    /// Notes the member at `place`, which replaces what was there unless it is malformed. Returns whether that changes
    /// where paths lead.
    pub(super) fn note(&mut self, place: &ArchivePath, kind: &MemberKind) -> bool {
        if index::check_kind(kind).is_err() {
            return false;
        }
        self.count += 1;
        let link = match kind {
            MemberKind::Symlink(target) => Some(SeenLink {
                target: target.clone(),
                inode: self.count,
            }),
            // It is another name of the link at its target, if there is one.
            MemberKind::HardLink(target) => self.hard_linked(target).cloned(),
            _ => None,
        };
        let target = link.as_ref().map(|link| link.target.clone());
        let old = self.targets.remove(place).map(|old| old.target);
        let is_changed = old != target;
        if let Some(old) = old {
            self.bytes -= link_bytes(place, &old);
        }
        if let Some(link) = link {
            self.bytes += link_bytes(place, &link.target);
            self.targets.insert(place.clone(), link);
        }
        is_changed
    }

    /// The link of which a hard link to `target` is another name.
    pub(super) fn hard_linked(&self, target: &[u8]) -> Option<&SeenLink> {
        let target = ArchivePath::sanitize(target).path;
        let target = self.resolve(&target, &mut Vec::new()).ok()?;
        self.targets.get(&target)
    }

    /// Adds the requested path with this number, where it leads now.
    pub(super) fn add(&mut self, number: usize, selected: &SelectedPath) {
        if let Some(Ok(place)) = &selected.resolved
            && self.is_followed
        {
            self.bytes += link_bytes(place, b"");
            self.selected.0.insert((place.clone(), number));
            if !selected.found {
                self.missing.0.insert((place.clone(), number));
            }
        }
    }

    /// Resolves the requested path with this number again.
    pub(super) fn update(&mut self, number: usize, selected: &mut SelectedPath) {
        if let Some(Ok(place)) = selected.resolved.take() {
            let entry = (place, number);
            self.missing.0.remove(&entry);
            if self.selected.0.remove(&entry) {
                self.bytes -= link_bytes(&entry.0, b"");
            }
        }
        let mut passed = Vec::new();
        selected.resolve(|path| self.resolve(path, &mut passed));
        self.add(number, selected);
        // The others are known by its name.
        passed.retain(|place| !selected.path.starts_with(place));
        for place in passed {
            let bytes = link_bytes(&place, b"");
            if self.passed.0.insert((place, number)) {
                self.bytes += bytes;
            }
        }
    }

    /// Takes the numbers of requested paths that may go through `place`.
    pub(super) fn take_passing(&mut self, place: &ArchivePath) -> BTreeSet<usize> {
        let taken = self.passed.take(place);
        self.bytes -= taken.len() * link_bytes(place, b"");
        taken
            .into_iter()
            .chain(self.selected.below(place))
            .collect()
    }
}

/// Memory of a link, or of a place.
fn link_bytes(place: &ArchivePath, target: &[u8]) -> usize {
    place.as_bytes().len() + target.len() + LINK_BYTES
}

/// The links of a [`PathLinks`] by their paths without links.
struct SeenLinks<'a> {
    targets: &'a BTreeMap<ArchivePath, SeenLink>,
    passed: &'a mut Vec<ArchivePath>,
    /// Memory of the places on the way.
    pub(super) bytes: usize,
}

impl resolve::PathLookup for SeenLinks<'_> {
    type Directory = ArchivePath;
    type Error = PathError;

    fn root(&self) -> ArchivePath {
        ArchivePath::root()
    }

    fn step(
        &mut self,
        parent: &ArchivePath,
        name: &[u8],
    ) -> Result<Component<ArchivePath>, PathError> {
        let mut path = parent.clone();
        path.push(name);
        self.bytes += link_bytes(&path, b"");
        if self.bytes > MAX_WALK_BYTES {
            return Err(PathError::TooManyLinks);
        }
        self.passed.push(path.clone());
        let target = self.targets.get(&path).map(|link| link.target.clone());
        Ok(target.map_or(Component::Directory(path), Component::Link))
    }

    fn imply(&mut self, parent: &ArchivePath, _: &[u8]) -> Result<ArchivePath, PathError> {
        Ok(parent.clone())
    }
}
