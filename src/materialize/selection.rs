//! Which members are wanted, and where each goes. Pure.

use crate::base::archive_path::ArchivePath;
use crate::base::glob::Glob;
use crate::tar::{Kind, Member};

/// What to take from an archive; everything, by default.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Leading components to drop; members with no more than these are left out, targets of hard
    /// links lose them too, targets of symbolic links do not.
    pub strip_components: usize,
    /// Members that one of these matches are left out, whatever else says.
    pub exclude: Vec<Glob>,
    /// When not empty, only members that one of these matches are taken.
    pub include: Vec<Glob>,
    /// When not empty, only these members and those below them are taken.
    pub paths: Vec<SelectedPath>,
}

/// A path that was asked for by name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SelectedPath {
    /// As it lies in the archive, before components are stripped.
    pub path: ArchivePath,
    /// Whether a member was it, or was below it.
    found: bool,
}

impl SelectedPath {
    /// A path as the user wrote it; a leading `./` or `/` and a trailing slash mean nothing.
    pub fn new(path: &[u8]) -> Self {
        Self {
            path: ArchivePath::sanitize(path).path,
            found: false,
        }
    }
}

/// Where a member goes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct OutputPath {
    /// From the destination.
    pub(super) path: ArchivePath,
    /// What was cut from the front of its name to keep it inside.
    pub(super) stripped: Vec<u8>,
}

/// A wanted member that is refused because its name has a `..` component.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ParentComponent(pub(super) ArchivePath);

impl Selection {
    /// Whether the member at `path` is wanted; notes which [`Self::paths`] were found.
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

    /// Where a member or a hard link's target lies once components are stripped; `None` when
    /// nothing is left of it.
    pub fn strip_path(&self, path: ArchivePath) -> Option<ArchivePath> {
        if self.strip_components == 0 {
            return Some(path);
        }
        path.strip_components(self.strip_components)
    }

    /// Where a wanted member goes; `None` when it is not wanted or nothing is left of its name.
    /// A file whose name ends in a slash becomes the directory that it says it is.
    ///
    /// # Errors
    /// [`ParentComponent`] when it is wanted and must not be made.
    pub(super) fn select_member(
        &mut self,
        member: &mut Member,
    ) -> Result<Option<OutputPath>, ParentComponent> {
        let name = ArchivePath::sanitize(&member.name);
        if !self.selects(&name.path) {
            return Ok(None);
        }
        if name.has_parent_component {
            return Err(ParentComponent(name.path));
        }
        if name.has_trailing_slash && member.kind == Kind::File {
            member.kind = Kind::Directory;
        }
        Ok(self.strip_path(name.path).map(|path| OutputPath {
            path,
            stripped: name.stripped,
        }))
    }

    /// Which paths were found, for [`Selection::merge_found_flags`].
    pub(super) fn found_flags(&self) -> Vec<u8> {
        let found = self.paths.iter().map(|selected| selected.found.into());
        found.collect()
    }

    /// Notes which paths an earlier run has found.
    pub(super) fn merge_found_flags(&mut self, found: &[u8]) {
        for (selected, found) in self.paths.iter_mut().zip(found) {
            selected.found |= *found != 0;
        }
    }

    /// The paths that were asked for and never met.
    pub fn unmatched_paths(&self) -> impl Iterator<Item = &ArchivePath> {
        self.paths
            .iter()
            .filter(|selected| !selected.found)
            .map(|selected| &selected.path)
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
