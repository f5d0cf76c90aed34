//! Selection of members, and their output paths.

use super::error::{Cause, Problems};
use crate::base::archive_path::ArchivePath;
use crate::base::glob::Glob;
use crate::base::resolve::{MAX_LINKS, PathError};
use crate::tar::{Member, MemberKind};

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
    /// Whether links that come before what they lead to are followed in [`Self::paths`].
    pub follows_links: bool,
}

/// A path requested by name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SelectedPath {
    /// Path in the archive, before components are stripped.
    pub path: ArchivePath,
    /// The same file without the links that were seen on its path, one more each time.
    resolved: Vec<ArchivePath>,
    found: bool,
}

impl SelectedPath {
    /// Parses a path from the user. A leading `./` or `/` and a trailing slash are ignored. `None` if it has a `..`, which
    /// a run in the order of the archive cannot resolve.
    pub fn new(path: &[u8]) -> Option<Self> {
        let sanitized = ArchivePath::sanitize(path);
        (!sanitized.has_parent_component).then(|| Self {
            path: sanitized.path,
            resolved: Vec::new(),
            found: false,
        })
    }

    fn selects(&self, path: &ArchivePath, follows_links: bool) -> bool {
        let mut resolved = self.resolved.iter().filter(|_| follows_links);
        path.starts_with(&self.path) || resolved.any(|resolved| path.starts_with(resolved))
    }

    /// Replaces the link at `link` in its path, and then those of which the new path goes through one.
    fn note_link(&mut self, link: &ArchivePath, target: &[u8]) {
        let last = self.resolved.last().unwrap_or(&self.path);
        let is_above = last != link && last.starts_with(link);
        if !is_above || self.resolved.len() >= MAX_LINKS {
            return;
        }
        let rest = last.components().skip(link.components().count());
        if let Some(mut resolved) = link.follow(target) {
            rest.for_each(|name| resolved.push(name));
            self.resolved.push(resolved);
        }
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
        for selected in &mut self.paths {
            if selected.selects(path, self.follows_links) {
                selected.found = true;
                is_listed = true;
            }
        }
        let matched = |globs: &[Glob]| globs.iter().any(|glob| glob.matches(path.as_bytes()));
        is_listed && !matched(&self.exclude) && (self.include.is_empty() || matched(&self.include))
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
        if let MemberKind::Symlink(target) = &member.kind {
            let paths = self.paths.iter_mut();
            paths.for_each(|selected| selected.note_link(&name.path, target));
        }
        if !self.selects(&name.path) {
            return None;
        }
        if name.has_parent_component {
            problems.add(&name.path, Cause::ParentComponent);
            return None;
        }
        Some(OutputPath {
            path: self.strip_path(name.path)?,
            stripped: name.stripped,
        })
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
            let mut resolved = selected.resolved.clone();
            let cause = match resolved.pop() {
                Some(last) if last == selected.path || resolved.contains(&last) => {
                    Cause::Rejected(PathError::TooManyLinks)
                }
                Some(last) => Cause::ThroughLink(last),
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
        for follows_links in [true, false] {
            let mut selection = Selection {
                paths: selected(&["bin/sh"]),
                follows_links,
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
            let resolved = selection.paths.first().and_then(|it| it.resolved.last());
            assert_eq!(resolved, Some(&path("system/bin/sh")));
        }
    }

    #[test]
    fn loop_of_links_ends() {
        let mut selected = SelectedPath::new(b"a/x").expect("no `..`");
        for _ in 0..MAX_LINKS {
            selected.note_link(&path("a"), b"b");
            selected.note_link(&path("b"), b"a");
        }
        assert_eq!(selected.resolved.len(), MAX_LINKS);
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
