//! Selection of members, and their output paths.

use std::collections::{BTreeMap, BTreeSet};

use super::error::{Cause, Problems};
use crate::base::archive_path::ArchivePath;
use crate::base::glob::Glob;
use crate::base::resolve::{self, PathError, ResolveError, Step};
use crate::index;
use crate::tar::{Member, MemberKind};

/// Maximum memory of the links that are kept to resolve paths. With more, no link is followed.
const MAX_LINK_BYTES: usize = 64 << 20;
/// Memory of a link beside its path and its target.
const LINK_BYTES: usize = 128;
/// Maximum memory of the places on the way of one path.
const MAX_WALK_BYTES: usize = 1 << 20;
/// Maximum number of times that one path is resolved. With more it leads nowhere.
const MAX_RESOLUTIONS: usize = 256;

/// The members to take from an archive; by default all.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Selection {
    /// Number of leading components to drop. Members with no more components are skipped. Targets of hard
    /// links lose them too, targets of symbolic links do not.
    pub strip_components: usize,
    /// Members that match one of these are skipped. This overrides the other fields.
    pub exclude: Vec<Glob>,
    /// If not empty, only members that match one of these are selected.
    pub include: Vec<Glob>,
    /// If not empty, only these members and their descendants are selected.
    pub paths: Vec<SelectedPath>,
    /// The links that [`Self::paths`] go through.
    pub links: PathLinks,
}

/// A path requested by name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SelectedPath {
    /// Path in the archive, before components are stripped.
    pub path: ArchivePath,
    /// Where the links lead that were seen so far, if it goes through one.
    resolved: Option<Result<ArchivePath, PathError>>,
    /// How often it was resolved.
    resolutions: usize,
    found: bool,
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
struct PlaceSet(BTreeSet<(ArchivePath, usize)>);

impl PlaceSet {
    fn has(&self, place: &ArchivePath) -> bool {
        let mut found = self.0.range((place.clone(), 0)..);
        found.next().is_some_and(|(found, _)| found == place)
    }

    /// Removes `place`, and returns its numbers.
    fn take(&mut self, place: &ArchivePath) -> Vec<usize> {
        let range = (place.clone(), 0)..=(place.clone(), usize::MAX);
        let taken: Vec<_> = self.0.range(range).cloned().collect();
        for entry in &taken {
            self.0.remove(entry);
        }
        taken.into_iter().map(|(_, number)| number).collect()
    }

    /// The numbers of the places below `place`.
    fn below(&self, place: &ArchivePath) -> impl Iterator<Item = usize> {
        let mut first = place.clone();
        first.push(b"\0");
        let below = self.0.range((first, 0)..);
        let below = below.take_while(move |(found, _)| found.starts_with(place));
        below.map(|(_, number)| *number)
    }
}

/// A link of an archive.
#[derive(Clone, PartialEq, Eq, Debug)]
struct SeenLink {
    target: Vec<u8>,
    /// Number of its member, which other names of it share.
    inode: u64,
}

/// Links of an archive, in the order of which a run resolves paths. Every other name is taken for a directory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PathLinks {
    /// Whether paths select what is behind links. Otherwise errors name it.
    is_followed: bool,
    /// Whether there were too many links, so that none is followed.
    is_full: bool,
    targets: BTreeMap<ArchivePath, SeenLink>,
    /// Number of links so far.
    count: u64,
    /// Places that requested paths reach through links.
    passed: PlaceSet,
    /// The requested paths, and where links lead them if they are followed.
    selected: PlaceSet,
    /// Those of [`Self::selected`] at which nothing was found yet.
    missing: PlaceSet,
    /// Memory that links take.
    bytes: usize,
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
    fn resolve(
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
    fn place_of(&self, path: &ArchivePath) -> Option<(ArchivePath, bool)> {
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
    fn is_replaced_by(&self, place: &ArchivePath, kind: &MemberKind) -> bool {
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
    fn note(&mut self, place: &ArchivePath, kind: &MemberKind) -> bool {
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
    fn hard_linked(&self, target: &[u8]) -> Option<&SeenLink> {
        let target = ArchivePath::sanitize(target).path;
        let target = self.resolve(&target, &mut Vec::new()).ok()?;
        self.targets.get(&target)
    }

    /// Adds the requested path with this number, where it leads now.
    fn add(&mut self, number: usize, selected: &SelectedPath) {
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
    fn update(&mut self, number: usize, selected: &mut SelectedPath) {
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
    fn take_passing(&mut self, place: &ArchivePath) -> BTreeSet<usize> {
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
    bytes: usize,
}

impl resolve::Tree for SeenLinks<'_> {
    type Directory = ArchivePath;
    type Error = PathError;

    fn root(&self) -> ArchivePath {
        ArchivePath::root()
    }

    fn step(&mut self, parent: &ArchivePath, name: &[u8]) -> Result<Step<ArchivePath>, PathError> {
        let mut path = parent.clone();
        path.push(name);
        self.bytes += link_bytes(&path, b"");
        if self.bytes > MAX_WALK_BYTES {
            return Err(PathError::TooManyLinks);
        }
        self.passed.push(path.clone());
        let target = self.targets.get(&path).map(|link| link.target.clone());
        Ok(target.map_or(Step::Directory(path), Step::Link))
    }

    fn imply(&mut self, parent: &ArchivePath, _: &[u8]) -> Result<ArchivePath, PathError> {
        Ok(parent.clone())
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct OutputPath {
    pub(super) path: ArchivePath,
    /// Prefix removed from the name to keep it inside the destination.
    pub(super) stripped: Vec<u8>,
}

impl Selection {
    /// Whether the member at `path` is selected. Notes the [`Self::paths`] found.
    pub fn selects(&mut self, path: &ArchivePath) -> bool {
        let is_listed = self.paths.is_empty() || self.lists(path);
        let matched = |globs: &[Glob]| globs.iter().any(|glob| glob.matches(path.as_bytes()));
        is_listed && !matched(&self.exclude) && (self.include.is_empty() || matched(&self.include))
    }

    /// Whether one of the requested paths leads to `path` or above it.
    fn lists(&mut self, path: &ArchivePath) -> bool {
        self.add_paths();
        let links = &mut self.links;
        let follows = links.is_followed && !links.targets.is_empty();
        let place = follows.then(|| links.resolve(path, &mut Vec::new()));
        let place = place.and_then(Result::ok).filter(|place| place != path);
        let mut is_listed = false;
        for start in [Some(path.clone()), place].into_iter().flatten() {
            let above = |path: &ArchivePath| path.split_last().map(|(above, _)| above);
            for place in std::iter::successors(Some(start), above) {
                is_listed |= links.selected.has(&place);
                for number in links.missing.take(&place) {
                    if let Some(selected) = self.paths.get_mut(number) {
                        selected.found = true;
                    }
                }
            }
        }
        is_listed
    }

    /// Adds the requested paths to the table by which they are found.
    fn add_paths(&mut self) {
        if !self.links.selected.0.is_empty() {
            return;
        }
        for (number, selected) in self.paths.iter().enumerate() {
            let entry = (selected.path.clone(), number);
            self.links.missing.0.insert(entry.clone());
            self.links.selected.0.insert(entry);
            self.links.add(number, selected);
        }
    }

    /// Whether every member is selected under its own name.
    pub(super) fn is_whole(&self) -> bool {
        let lists = [self.exclude.len(), self.include.len(), self.paths.len()];
        self.strip_components == 0 && lists == [0; 3]
    }

    /// Path of a member, or of a hard link's target, after stripping. `None` if no component remains.
    pub fn strip_path(&self, path: ArchivePath) -> Option<ArchivePath> {
        if self.strip_components == 0 {
            return Some(path);
        }
        path.strip_components(self.strip_components)
    }

    /// Output path of a selected member; `None` if it is not selected or no component remains. A
    /// name with `..` is added to `problems`.
    pub(super) fn select_member(
        &mut self,
        member: &Member,
        problems: &Problems,
    ) -> Option<OutputPath> {
        let name = ArchivePath::sanitize(&member.name);
        if !name.has_parent_component {
            self.note_member(&name.path, &member.kind);
        }
        if !self.selects(&name.path) {
            return None;
        }
        if name.has_parent_component {
            let cause = Cause::ParentComponent(member.name.clone());
            problems.add(&name.path, cause);
            return None;
        }
        Some(OutputPath {
            path: self.strip_path(name.path)?,
            stripped: name.stripped,
        })
    }

    fn note_member(&mut self, path: &ArchivePath, kind: &MemberKind) {
        let may_matter = matches!(kind, MemberKind::Symlink(_)) || !self.links.targets.is_empty();
        if self.paths.is_empty() || self.links.is_full || !may_matter {
            return;
        }
        while let Some((place, is_own_link)) = self.links.place_of(path) {
            if !(is_own_link && self.links.is_replaced_by(&place, kind)) {
                return self.note_place(&place, kind);
            }
            self.note_place(&place, &MemberKind::Directory);
        }
    }

    /// Notes a member at `place`, and resolves the requested paths again that go through it.
    fn note_place(&mut self, place: &ArchivePath, kind: &MemberKind) {
        if !self.links.note(place, kind) {
            return;
        }
        self.add_paths();
        for number in self.links.take_passing(place) {
            if let Some(selected) = self.paths.get_mut(number)
                && self.links.bytes <= MAX_LINK_BYTES
            {
                self.links.update(number, selected);
            }
        }
        if self.links.bytes > MAX_LINK_BYTES {
            // Without all links, a path could lead to another file.
            self.links = PathLinks {
                is_full: true,
                ..PathLinks::default()
            };
            for selected in &mut self.paths {
                selected.resolved = None;
            }
        }
    }

    pub(super) fn found_flags(&self) -> Vec<u8> {
        let found = self.paths.iter().map(|selected| selected.found.into());
        found.collect()
    }

    /// Marks the paths that an earlier run found.
    pub(super) fn merge_found_flags(&mut self, found: &[u8]) {
        for (selected, found) in self.paths.iter_mut().zip(found) {
            selected.found |= *found != 0;
        }
    }

    pub(super) fn report_unmatched_paths(&self, problems: &Problems) {
        for selected in self.paths.iter().filter(|selected| !selected.found) {
            let cause = match selected.resolved.clone() {
                Some(Err(error)) => Cause::Rejected(error),
                Some(Ok(place)) => Cause::ThroughLink(place),
                None => Cause::NotFound,
            };
            problems.add(&selected.path, cause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> ArchivePath {
        ArchivePath::sanitize(name.as_bytes()).path
    }

    fn selected(paths: &[&str]) -> Vec<SelectedPath> {
        let paths = paths.iter().map(|path| SelectedPath::new(path.as_bytes()));
        paths.collect::<Option<_>>().expect("no `..`")
    }

    // Promises: select-missing
    #[test]
    fn selected_path_with_parent_component_is_refused() {
        for path in ["..", "../a", "a/..", "a/../b"] {
            assert_eq!(SelectedPath::new(path.as_bytes()), None, "{path}");
        }
        assert!(SelectedPath::new(b"/a/..b/").is_some());
    }

    #[test]
    fn default_selection_selects_everything() {
        assert!(Selection::default().selects(&path("a/b")));
        assert!(Selection::default().selects(&path("./")));
    }

    // Promises: select-path, select-missing, gnu-arguments
    #[test]
    fn selected_path_includes_its_descendants() {
        let mut selection = Selection {
            paths: selected(&["./a/b/", "nowhere"]),
            ..Selection::default()
        };
        assert!(selection.selects(&path("a/b")));
        assert!(selection.selects(&path("a/b/c")));
        assert!(!selection.selects(&path("a/bc")));
        assert!(!selection.selects(&path("a")));
        let found: Vec<_> = selection.paths.iter().map(|it| it.found).collect();
        assert_eq!(found, [true, false]);
    }

    // Promises: select-path
    #[test]
    fn selected_path_goes_through_links_that_were_seen() {
        let problems = Problems::default();
        for links in [PathLinks::followed(), PathLinks::default()] {
            let follows_links = links.is_followed;
            let mut selection = Selection {
                paths: selected(&["bin/sh"]),
                links,
                ..Selection::default()
            };
            let mut select = |name: &str, target: Option<&str>| {
                let target = target.map(|it| MemberKind::Symlink(it.as_bytes().to_vec()));
                let member = Member::new(name, target.unwrap_or(MemberKind::File));
                selection.select_member(&member, &problems).is_some()
            };
            assert!(!select("system/bin/sh", None));
            for (link, target) in [
                ("bin", "usr/./bin"),
                ("usr", "x/../system"),
                ("none", "bin"),
                ("system/bin/sh", "/outside"),
            ] {
                assert!(!select(link, Some(target)) || link == "system/bin/sh");
            }
            assert_eq!(select("system/bin/sh", None), follows_links);
            assert!(!select("usr/bin/other", None));
            let resolved = selection.paths.first().and_then(|it| it.resolved.clone());
            assert_eq!(resolved, Some(Ok(path("system/bin/sh"))));
        }
    }

    fn note(selection: &mut Selection, name: &str, kind: MemberKind) -> bool {
        let member = Member::new(name, kind);
        let selected = selection.select_member(&member, &Problems::default());
        selected.is_some()
    }

    fn link(target: &str) -> MemberKind {
        MemberKind::Symlink(target.as_bytes().to_vec())
    }

    fn following(paths: &[&str]) -> Selection {
        Selection {
            paths: selected(paths),
            links: PathLinks::followed(),
            ..Selection::default()
        }
    }

    // Promises: select-path
    #[test]
    fn hard_link_to_a_symbolic_link_is_followed() {
        let mut selection = following(&["h/f"]);
        note(&mut selection, "l", link("d"));
        note(&mut selection, "h", MemberKind::HardLink(b"./l".to_vec()));
        assert!(note(&mut selection, "d/f", MemberKind::File));
        // Its name becomes one of a file.
        note(&mut selection, "h", MemberKind::HardLink(b"d/f".to_vec()));
        assert!(!note(&mut selection, "d/f", MemberKind::File));
        assert!(note(&mut selection, "h/f", MemberKind::File));
    }

    // Promises: link-itself
    #[test]
    fn link_on_the_way_to_its_own_place_is_removed_first() {
        let mut selection = following(&["e/f"]);
        note(&mut selection, "e", link("."));
        note(&mut selection, "h", MemberKind::HardLink(b"e".to_vec()));
        for kind in [
            link(""),
            MemberKind::HardLink(b"e".to_vec()),
            MemberKind::HardLink(b"h".to_vec()),
        ] {
            note(&mut selection, "e/e", kind);
        }
        assert!(note(&mut selection, "f", MemberKind::File));
        note(&mut selection, "e/e", link("d"));
        assert!(!note(&mut selection, "f", MemberKind::File));
        assert!(note(&mut selection, "e/f", MemberKind::File));
        let mut selection = following(&["e/e/f"]);
        note(&mut selection, "e", link("."));
        note(&mut selection, "e/e", link("d"));
        assert!(note(&mut selection, "e/d/f", MemberKind::File));
    }

    #[test]
    fn malformed_member_replaces_no_link() {
        let mut selection = following(&["l/f"]);
        note(&mut selection, "l", link("d"));
        let device = crate::tar::Device {
            major: u32::MAX,
            minor: 0,
        };
        for kind in [
            link(""),
            link(&"x".repeat(5_000)),
            MemberKind::CharDevice(device),
        ] {
            note(&mut selection, "l", kind);
        }
        assert!(note(&mut selection, "d/f", MemberKind::File));
    }

    // Promises: select-limits
    #[test]
    fn links_resolve_only_the_paths_that_go_through_them() {
        let names: Vec<_> = (0..5_000).map(|number| format!("d{number}/f")).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        let mut selection = following(&names);
        for number in 0..30_000 {
            note(&mut selection, &format!("l{number}"), link("d1"));
        }
        note(&mut selection, "d0", link("d00"));
        note(&mut selection, "d00", link("d000"));
        let resolutions: usize = selection.paths.iter().map(|it| it.resolutions).sum();
        assert_eq!(resolutions, 2);
        for number in 1..5_000 {
            assert!(note(
                &mut selection,
                &format!("d{number}/f"),
                MemberKind::File
            ));
        }
        assert!(note(&mut selection, "d000/f", MemberKind::File));
        assert!(selection.paths.iter().all(|it| it.found));
        assert!(
            selection
                .links
                .missing
                .0
                .iter()
                .all(|(path, _)| *path == self::path("d0/f"))
        );
    }

    // Promises: select-limits
    #[test]
    fn memory_of_replaced_links_is_free_again() {
        let mut selection = following(&["l/f"]);
        let long = "x".repeat(4_000);
        for number in 0..3 * MAX_LINK_BYTES / long.len() {
            note(
                &mut selection,
                "other",
                link(&format!("{number}{}", &long[8..])),
            );
            note(&mut selection, "other", MemberKind::File);
        }
        for target in ["a", "b/c"] {
            note(&mut selection, "l", link(target));
            assert!(note(
                &mut selection,
                &format!("{target}/f"),
                MemberKind::File
            ));
        }
        note(&mut selection, "l", MemberKind::Directory);
        assert!(!selection.links.is_full);
        assert!(selection.links.targets.is_empty());
        assert!(selection.links.bytes < 1024, "{}", selection.links.bytes);
    }

    // Promises: select-limits
    #[test]
    fn links_that_are_replaced_too_often_are_not_followed() {
        let mut selection = following(&["l/f", "k/f"]);
        note(&mut selection, "k", link("d"));
        for number in 0..1_000 {
            note(&mut selection, "l", link(&format!("d{number}")));
        }
        let [l, k] = &selection.paths[..] else {
            panic!("two paths");
        };
        assert_eq!(l.resolved, Some(Err(PathError::TooManyLinks)));
        assert_eq!(k.resolved, Some(Ok(path("d/f"))));
    }

    // Promises: select-limits
    #[test]
    fn steps_through_long_links_are_bounded() {
        let mut selection = following(&["l0/f"]);
        let turns = "x/../".repeat(800);
        for number in 0..30 {
            note(
                &mut selection,
                &format!("l{number}"),
                link(&format!("{turns}l{}", number + 1)),
            );
        }
        let resolved = selection.paths.first().and_then(|it| it.resolved.clone());
        assert_eq!(resolved, Some(Err(PathError::TooManyLinks)));
    }

    /// Where `wanted` leads after these links, and `None` as target for a directory.
    fn place_of(
        wanted: &str,
        members: &[(&str, Option<&str>)],
    ) -> Option<Result<String, PathError>> {
        let mut selection = Selection {
            paths: selected(&[wanted]),
            links: PathLinks::followed(),
            ..Selection::default()
        };
        for (name, target) in members {
            let target = target.map(|it| MemberKind::Symlink(it.as_bytes().to_vec()));
            let kind = target.unwrap_or(MemberKind::Directory);
            selection.select_member(&Member::new(*name, kind), &Problems::default());
        }
        let resolved = selection.paths.first().and_then(|it| it.resolved.clone());
        resolved.map(|found| found.map(|path| path.to_string()))
    }

    // Promises: select-path
    #[test]
    fn parent_of_a_link_is_that_of_its_target() {
        let (x, l) = (("x", Some("a/b")), ("l", Some("x/../c")));
        let expected = Some(Ok("a/c/f".to_owned()));
        assert_eq!(place_of("l/f", &[x, l]), expected);
        assert_eq!(place_of("l/f", &[l, x]), expected);
        // The name of the link goes through a link itself.
        let inner = ("x/l", Some("../c"));
        assert_eq!(place_of("x/l/f", &[x, inner]), expected);
        assert_eq!(place_of("a/b/l/f", &[x, inner]), expected);
        // A later member replaces the link.
        let found = place_of("l/f", &[x, l, ("x", None)]);
        assert_eq!(found, Some(Ok("c/f".to_owned())));
        assert_eq!(place_of("l/f", &[x, l, ("l", None)]), None);
    }

    // Promises: select-limits
    #[test]
    fn links_that_lead_nowhere_are_errors() {
        let out = place_of("l/f", &[("l", Some("../f"))]);
        assert_eq!(out, Some(Err(PathError::EscapesRoot)));
        let round = place_of("a/x", &[("a", Some("b")), ("b", Some("a"))]);
        assert_eq!(round, Some(Err(PathError::TooManyLinks)));
    }

    // Promises: select-limits
    #[test]
    fn no_link_is_followed_once_there_are_too_many() {
        let long = "c".repeat((1 << 20) - 200);
        let names: Vec<_> = (0..65).map(|number| format!("{long}{number}")).collect();
        let names = names.iter().map(|name| (name.as_str(), Some("t")));
        let members: Vec<_> = std::iter::once(("a", Some("b"))).chain(names).collect();
        assert_eq!(place_of("a/x", &members[..2]), Some(Ok("b/x".to_owned())));
        assert_eq!(place_of("a/x", &members), None);
    }

    // Promises: select-exclude, gnu-include
    #[test]
    fn exclude_overrides_include() {
        let mut selection = Selection {
            exclude: vec![Glob::new(b"*.o")],
            include: vec![Glob::new(b"src")],
            ..Selection::default()
        };
        assert!(selection.selects(&path("x/src/a.c")));
        assert!(!selection.selects(&path("x/src/a.o")));
        assert!(!selection.selects(&path("x/doc")));
    }

    // Promises: select-strip
    #[test]
    fn strip_components_drops_short_paths() {
        let selection = Selection {
            strip_components: 1,
            ..Selection::default()
        };
        assert_eq!(selection.strip_path(path("top/")), None);
        assert_eq!(selection.strip_path(path("top/a/b")), Some(path("a/b")));
    }
}
