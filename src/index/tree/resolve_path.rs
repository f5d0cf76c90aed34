//! Lookup of paths that go through symbolic links of the archive.

use super::{Entry, EntryKind, Index, Ino};
use crate::base::archive_path::ArchivePath;
use crate::base::resolve::{self, Component, PathError, ResolveError};

/// Resolves paths through the symbolic links of an index, and creates nothing.
pub(crate) struct IndexResolver<'a> {
    index: &'a Index,
    pub(crate) is_chroot: bool,
    /// Whether directories that do not exist are passed, because a lower layer may have them.
    pub(crate) passes_missing: bool,
    /// The links on the way.
    pub(crate) links: Vec<Ino>,
}

/// A name on the way does not exist.
#[derive(Debug)]
pub(crate) struct Missing;

/// An entry at the end of a path.
#[derive(Clone, Debug)]
pub struct Resolved<'a> {
    /// The entry.
    pub entry: Entry<'a>,
    /// The directory that holds the name; the root for itself.
    pub parent: Ino,
    /// The path without links.
    pub path: ArchivePath,
}

impl<'a> IndexResolver<'a> {
    pub(crate) fn new(index: &'a Index) -> Self {
        Self {
            index,
            is_chroot: false,
            passes_missing: false,
            links: Vec::new(),
        }
    }
}

impl resolve::PathLookup for IndexResolver<'_> {
    type Directory = Ino;
    type Error = Missing;

    fn root(&self) -> Ino {
        Ino::ROOT
    }

    fn is_chroot(&self) -> bool {
        self.is_chroot
    }

    fn step(&mut self, parent: &Ino, name: &[u8]) -> Result<Component<Ino>, Missing> {
        let Some(entry) = self.index.lookup(*parent, name) else {
            return Ok(Component::Missing);
        };
        Ok(match entry.kind() {
            EntryKind::Directory => Component::Directory(entry.ino()),
            EntryKind::Symlink(target) => {
                self.links.push(entry.ino());
                Component::Link(target.to_vec())
            }
            _ => Component::Other,
        })
    }

    fn imply(&mut self, _: &Ino, _: &[u8]) -> Result<Ino, Missing> {
        // No directory has this number, so nothing exists below.
        self.passes_missing.then_some(Ino(0)).ok_or(Missing)
    }
}

impl Index {
    /// The entry at `path`, as in a mount: links before the last component are followed inside the archive, and with
    /// `follows_last` that one, too. `None` if a name does not exist.
    ///
    /// # Errors
    /// The path leads outside of the archive, or through a file that is no directory.
    pub fn resolve(&self, path: &[u8], follows_last: bool) -> Result<Option<Entry<'_>>, PathError> {
        let found = self.resolve_with_path(path, follows_last)?;
        Ok(found.map(|found| found.entry))
    }

    /// As [`Self::resolve`], and returns the path to the entry without links.
    ///
    /// # Errors
    /// As [`Self::resolve`].
    pub fn resolve_with_path(
        &self,
        path: &[u8],
        follows_last: bool,
    ) -> Result<Option<Resolved<'_>>, PathError> {
        let (directory, mut path, name) =
            match resolve::file(&mut IndexResolver::new(self), path, follows_last) {
                Ok(place) => place,
                Err(ResolveError::Tree(Missing)) => return Ok(None),
                Err(ResolveError::Path(error)) => return Err(error),
            };
        let (entry, parent) = if let Some(name) = name {
            path.push(&name);
            (self.lookup(directory, &name), directory)
        } else {
            let entry = self.entry(directory);
            (entry, entry.map_or(directory, |entry| entry.parent()))
        };
        Ok(entry.map(|entry| Resolved {
            entry,
            parent,
            path,
        }))
    }

    /// The symbolic links by which [`Self::resolve`] finds `path`, and directory and name of the entry at its end unless
    /// that is a directory.
    pub(crate) fn steps_on(
        &self,
        path: &[u8],
        follows_last: bool,
    ) -> (Vec<Ino>, Option<(Ino, Vec<u8>)>) {
        let mut resolver = IndexResolver::new(self);
        // Even a failure depends on the links that were followed.
        let place = resolve::file(&mut resolver, path, follows_last).ok();
        let last = place.and_then(|(directory, _, name)| Some((directory, name?)));
        (resolver.links, last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::test_support::{file, index, symlink};

    // Promises: walk-paths, image-archive
    #[test]
    fn path_through_links_resolves_as_in_a_mount() {
        let index = index(&[
            file("usr/bin/sh", 0..1),
            symlink("bin", "usr/bin"),
            symlink("usr/back", "../bin"),
            symlink("sh", "bin/sh"),
            symlink("out", "../etc"),
            symlink("host", "/usr"),
            symlink("loop", "loop"),
        ]);
        let resolve = |path: &str, follows: bool| {
            let found = index.resolve(path.as_bytes(), follows);
            found.map(|entry| entry.map(|entry| entry.ino()))
        };
        let shell = resolve("usr/bin/sh", false);
        assert!(matches!(shell, Ok(Some(_))));
        for path in ["bin/sh", "usr/back/sh", "/./bin//sh", "bin/../bin/sh"] {
            assert_eq!(resolve(path, false), shell, "{path}");
        }
        assert_eq!(resolve("sh", true), shell);
        assert_ne!(resolve("sh", false), shell);
        assert_eq!(resolve("bin/", false), resolve("usr/bin", false));
        assert_eq!(resolve("bin/.", false), resolve("usr/bin", false));
        assert_eq!(resolve("", false), Ok(Some(Ino::ROOT)));
        assert_eq!(resolve("bin/none", false), Ok(None));
        assert_eq!(resolve("none/sh", false), Ok(None));
        for (path, expected) in [
            ("bin/../f", None),
            ("bin/../bin/./sh", Some("usr/bin/sh")),
            ("usr/back/", Some("usr/bin")),
            ("bin/..", Some("usr")),
            ("/", Some(".")),
        ] {
            let found = index.resolve_with_path(path.as_bytes(), false);
            let found = found.map(|found| found.map(|found| found.path.to_string()));
            assert_eq!(found, Ok(expected.map(str::to_owned)), "{path}");
        }
        for (path, error) in [
            ("out/passwd", PathError::EscapesRoot),
            ("host/bin", PathError::EscapesRoot),
            ("..", PathError::AboveRoot),
            ("loop/x", PathError::TooManyLinks),
            ("bin/sh/x", PathError::NotADirectory),
            ("bin/sh/", PathError::NotADirectory),
        ] {
            assert_eq!(resolve(path, false), Err(error), "{path}");
        }
    }
}
