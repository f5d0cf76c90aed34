//! Selection of members, and their output paths.

use std::collections::BTreeMap;
use std::convert::Infallible;

use super::error::{Cause, Problems};
use crate::base::archive_path::ArchivePath;
use crate::base::glob::Glob;
use crate::base::resolve::{self, PathError, ResolveError, Step};
use crate::index::MAX_SYMLINK_TARGET_BYTES;
use crate::tar::{Member, MemberKind};

/// Maximum memory of the links that are kept to resolve paths. With more, no link is followed.
const MAX_LINK_BYTES: usize = 64 << 20;
/// Memory of a link beside its path and its target.
const LINK_BYTES: usize = 128;

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
            found: false,
        })
    }

    fn selects(&self, path: &ArchivePath, place: Option<&ArchivePath>) -> bool {
        let resolved = self.resolved.as_ref().and_then(|it| it.as_ref().ok());
        let is_there = |resolved| place.is_some_and(|place| place.starts_with(resolved));
        path.starts_with(&self.path) || resolved.is_some_and(is_there)
    }

    pub(super) fn resolve(
        &mut self,
        find: impl FnOnce(&ArchivePath) -> Result<ArchivePath, PathError>,
    ) {
        let found = find(&self.path);
        self.resolved = (found.as_ref() != Ok(&self.path)).then_some(found);
    }
}

/// Symbolic links of an archive, in the order of which a run resolves paths. Every other name is taken for a directory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PathLinks {
    /// Whether paths select what is behind links. Otherwise errors name it.
    is_followed: bool,
    targets: BTreeMap<ArchivePath, Vec<u8>>,
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

    /// The path without links, as those seen so far lead. The last component is not followed.
    fn resolve(&self, path: &ArchivePath) -> Result<ArchivePath, PathError> {
        let found = resolve::file(&mut SeenLinks(&self.targets), path.as_bytes(), false);
        let (_, mut place, name) = found.map_err(|error| match error {
            ResolveError::Path(error) => error,
            ResolveError::Tree(never) => match never {},
        })?;
        if let Some(name) = name {
            place.push(&name);
        }
        Ok(place)
    }

    /// Notes the member at `place`, which replaces what was there. Returns whether that changes where paths lead.
    fn note(&mut self, place: ArchivePath, kind: &MemberKind) -> bool {
        let target = match kind {
            MemberKind::Symlink(target) if target.len() <= MAX_SYMLINK_TARGET_BYTES => target,
            _ => return self.targets.remove(&place).is_some(),
        };
        let bytes = place.as_bytes().len() + target.len() + LINK_BYTES;
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > MAX_LINK_BYTES {
            // Without all links, a path could lead to another file.
            self.targets = BTreeMap::new();
            return true;
        }
        self.targets.insert(place, target.clone());
        true
    }
}

/// The links of a [`PathLinks`] by their paths without links.
struct SeenLinks<'a>(&'a BTreeMap<ArchivePath, Vec<u8>>);

impl resolve::Tree for SeenLinks<'_> {
    type Directory = ArchivePath;
    type Error = Infallible;

    fn root(&self) -> ArchivePath {
        ArchivePath::root()
    }

    fn step(&mut self, parent: &ArchivePath, name: &[u8]) -> Result<Step<ArchivePath>, Infallible> {
        let mut path = parent.clone();
        path.push(name);
        let target = self.0.get(&path).cloned();
        Ok(target.map_or(Step::Directory(path), Step::Link))
    }

    fn imply(&mut self, parent: &ArchivePath, _: &[u8]) -> Result<ArchivePath, Infallible> {
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
        let mut is_listed = self.paths.is_empty();
        let has_links = self.paths.iter().any(|it| it.resolved.is_some());
        let place = (has_links && self.links.is_followed).then(|| self.links.resolve(path).ok());
        let place = place.flatten();
        for selected in &mut self.paths {
            if selected.selects(path, place.as_ref()) {
                selected.found = true;
                is_listed = true;
            }
        }
        let matched = |globs: &[Glob]| globs.iter().any(|glob| glob.matches(path.as_bytes()));
        is_listed && !matched(&self.exclude) && (self.include.is_empty() || matched(&self.include))
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
        if self.paths.is_empty() || self.links.bytes > MAX_LINK_BYTES || !may_matter {
            return;
        }
        let Ok(place) = self.links.resolve(path) else {
            return;
        };
        if self.links.note(place, kind) {
            let links = &self.links;
            let paths = self.paths.iter_mut();
            paths.for_each(|selected| selected.resolve(|path| links.resolve(path)));
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

    #[test]
    fn links_that_lead_nowhere_are_errors() {
        let out = place_of("l/f", &[("l", Some("../f"))]);
        assert_eq!(out, Some(Err(PathError::EscapesRoot)));
        let round = place_of("a/x", &[("a", Some("b")), ("b", Some("a"))]);
        assert_eq!(round, Some(Err(PathError::TooManyLinks)));
    }

    #[test]
    fn no_link_is_followed_once_there_are_too_many() {
        let [one, other] = ["c", "d"].map(|name| name.repeat(MAX_LINK_BYTES / 2));
        let members = [("a", Some("b")), (&*one, Some("t")), (&*other, Some("t"))];
        assert_eq!(place_of("a/x", &members[..2]), Some(Ok("b/x".to_owned())));
        assert_eq!(place_of("a/x", &members), None);
    }

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
