//! Which members are wanted, and where each goes. Pure.

use crate::base::glob::Glob;
use crate::base::archive_path::ArchivePath;
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
    pub paths: Vec<Wanted>,
}

/// A path that was asked for by name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wanted {
    /// As it lies in the archive, before components are stripped.
    pub path: ArchivePath,
    /// Whether a member was it, or was below it.
    found: bool,
}

impl Wanted {
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
pub(super) struct Placed {
    /// From the destination.
    pub(super) path: ArchivePath,
    /// What was cut from the front of its name to keep it inside.
    pub(super) stripped: Vec<u8>,
}

/// A wanted member that is refused because its name has a `..` component.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Climbs(pub(super) ArchivePath);

impl Selection {
    /// Whether the member at `path` is wanted; notes which [`Self::paths`] were found.
    pub fn admits(&mut self, path: &ArchivePath) -> bool {
        let mut asked = self.paths.is_empty();
        for wanted in &mut self.paths {
            if path.starts_with(&wanted.path) {
                wanted.found = true;
                asked = true;
            }
        }
        let matched = |globs: &[Glob]| globs.iter().any(|glob| glob.matches(path.as_bytes()));
        asked && !matched(&self.exclude) && (self.include.is_empty() || matched(&self.include))
    }

    /// Where a member or a hard link's target lies once components are stripped; `None` when
    /// nothing is left of it.
    pub fn place(&self, path: ArchivePath) -> Option<ArchivePath> {
        if self.strip_components == 0 {
            return Some(path);
        }
        path.strip_components(self.strip_components)
    }

    /// Where a wanted member goes; `None` when it is not wanted or nothing is left of its name.
    /// A file whose name ends in a slash becomes the directory that it says it is.
    ///
    /// # Errors
    /// [`Climbs`] when it is wanted and must not be made.
    pub(super) fn take(&mut self, member: &mut Member) -> Result<Option<Placed>, Climbs> {
        let name = ArchivePath::sanitize(&member.name);
        if !self.admits(&name.path) {
            return Ok(None);
        }
        if name.has_parent_component {
            return Err(Climbs(name.path));
        }
        if name.has_trailing_slash && member.kind == Kind::File {
            member.kind = Kind::Directory;
        }
        Ok(self.place(name.path).map(|path| Placed {
            path,
            stripped: name.stripped,
        }))
    }

    /// Which paths were found, for [`Selection::set_found`].
    pub(super) fn found(&self) -> Vec<u8> {
        let found = self.paths.iter().map(|wanted| wanted.found.into());
        found.collect()
    }

    /// Notes which paths an earlier run has found.
    pub(super) fn set_found(&mut self, found: &[u8]) {
        for (wanted, found) in self.paths.iter_mut().zip(found) {
            wanted.found |= *found != 0;
        }
    }

    /// The paths that were asked for and never met.
    pub fn missing(&self) -> impl Iterator<Item = &ArchivePath> {
        self.paths
            .iter()
            .filter(|wanted| !wanted.found)
            .map(|wanted| &wanted.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> ArchivePath {
        ArchivePath::sanitize(name.as_bytes()).path
    }

    #[test]
    fn everything_is_wanted_unless_told_otherwise() {
        assert!(Selection::default().admits(&path("a/b")));
        assert!(Selection::default().admits(&path("./")));
    }

    #[test]
    fn a_path_takes_what_is_below_it() {
        let mut selection = Selection {
            paths: vec![Wanted::new(b"./a/b/"), Wanted::new(b"nowhere")],
            ..Selection::default()
        };
        assert!(selection.admits(&path("a/b")));
        assert!(selection.admits(&path("a/b/c")));
        assert!(!selection.admits(&path("a/bc")));
        assert!(!selection.admits(&path("a")));
        assert_eq!(selection.missing().collect::<Vec<_>>(), [&path("nowhere")]);
    }

    #[test]
    fn exclusion_beats_inclusion() {
        let mut selection = Selection {
            exclude: vec![Glob::new(b"*.o")],
            include: vec![Glob::new(b"src")],
            ..Selection::default()
        };
        assert!(selection.admits(&path("x/src/a.c")));
        assert!(!selection.admits(&path("x/src/a.o")));
        assert!(!selection.admits(&path("x/doc")));
    }

    #[test]
    fn members_too_short_to_strip_are_left_out() {
        let selection = Selection {
            strip_components: 1,
            ..Selection::default()
        };
        assert_eq!(selection.place(path("top/")), None);
        assert_eq!(selection.place(path("top/a/b")), Some(path("a/b")));
    }
}
