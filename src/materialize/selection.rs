//! Selection of members, and their output paths.

use super::error::{Cause, Problems};
use crate::base::archive_path::ArchivePath;
use crate::base::glob::Glob;
use crate::tar::Member;

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
}

/// A path requested by name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SelectedPath {
    /// Path in the archive, before components are stripped.
    pub path: ArchivePath,
    found: bool,
}

impl SelectedPath {
    /// Parses a path from the user. A leading `./` or `/` and a trailing slash are ignored.
    pub fn new(path: &[u8]) -> Self {
        Self {
            path: ArchivePath::sanitize(path).path,
            found: false,
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
            if path.starts_with(&selected.path) {
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

    fn unmatched_paths(&self) -> impl Iterator<Item = &ArchivePath> {
        let unmatched = self.paths.iter().filter(|selected| !selected.found);
        unmatched.map(|selected| &selected.path)
    }

    pub(super) fn report_unmatched_paths(&self, problems: &Problems) {
        for path in self.unmatched_paths() {
            problems.add(path, Cause::NotFound);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> ArchivePath {
        ArchivePath::sanitize(name.as_bytes()).path
    }

    #[test]
    fn default_selection_selects_everything() {
        assert!(Selection::default().selects(&path("a/b")));
        assert!(Selection::default().selects(&path("./")));
    }

    #[test]
    fn selected_path_includes_its_descendants() {
        let mut selection = Selection {
            paths: vec![SelectedPath::new(b"./a/b/"), SelectedPath::new(b"nowhere")],
            ..Selection::default()
        };
        assert!(selection.selects(&path("a/b")));
        assert!(selection.selects(&path("a/b/c")));
        assert!(!selection.selects(&path("a/bc")));
        assert!(!selection.selects(&path("a")));
        assert_eq!(
            selection.unmatched_paths().collect::<Vec<_>>(),
            [&path("nowhere")]
        );
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
