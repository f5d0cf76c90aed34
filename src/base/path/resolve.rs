//! Path resolution in a tree with symbolic links. Index, mount and materialize share this resolver, so a
//! member has the same place in all of them. Links before the last component are followed inside the root:
//! with `lib -> usr/lib`, `lib/x` is `usr/lib/x`. Absolute links, and those that climb above the root, are
//! not followed. The kernel follows none, because each step names one component in an open directory.

use std::fmt::Debug;
use std::io;

use rustix::io::Errno;

use super::archive_path::ArchivePath;

/// Maximum number of links in one path, as in Linux (`path_resolution(7)`).
pub const MAX_LINKS: usize = 40;

/// A tree that can be walked one component at a time.
pub(crate) trait PathLookup {
    /// A directory of the tree. Clones name the same directory.
    type Directory: Clone;
    type Error;

    fn root(&self) -> Self::Directory;

    /// Whether absolute targets start at the root and `..` does not climb above it, as after chroot(2).
    fn is_chroot(&self) -> bool {
        false
    }

    /// Looks up `name` in `parent` without following it. A missing name is [`Component::Missing`].
    fn step(
        &mut self,
        parent: &Self::Directory,
        name: &[u8],
    ) -> Result<Component<Self::Directory>, Self::Error>;

    /// Creates the directory `name` in `parent`, which a member below it implies.
    fn imply(
        &mut self,
        parent: &Self::Directory,
        name: &[u8],
    ) -> Result<Self::Directory, Self::Error>;
}

/// A component of a path, looked up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Component<D> {
    Directory(D),
    Link(Vec<u8>),
    Other,
    Missing,
}

/// Reason why a path does not resolve inside the root.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PathError {
    /// A link on the path is absolute or climbs above the root.
    #[error("a symbolic link on the way leads outside the root")]
    EscapesRoot,
    /// The path itself climbs above the root.
    #[error("its `..` leads above the root")]
    AboveRoot,
    /// An entry on the path is neither a directory nor a link to one.
    #[error("something on the way is not a directory")]
    NotADirectory,
    /// More than [`MAX_LINKS`] links.
    #[error("too many levels of symbolic links")]
    TooManyLinks,
}

impl From<PathError> for io::Error {
    /// With the error number of links in a circle, as the kernel has it.
    fn from(error: PathError) -> Self {
        match error {
            PathError::TooManyLinks => Errno::LOOP.into(),
            _ => Self::other(error),
        }
    }
}

impl PathError {
    /// The error of a `..` above the root, which is the path's own or that of a link.
    fn of_climb(is_own: bool) -> Self {
        if is_own {
            Self::AboveRoot
        } else {
            Self::EscapesRoot
        }
    }
}

/// Error of a path resolution: from the path or from the tree.
#[derive(Debug)]
pub(crate) enum ResolveError<E> {
    Path(PathError),
    Tree(E),
}

/// Resolves `components` from the root to a directory, and creates missing ones.
pub(crate) fn directory<'a, T: PathLookup>(
    tree: &mut T,
    components: impl Iterator<Item = &'a [u8]>,
) -> Result<T::Directory, ResolveError<T::Error>> {
    Ok(walk_components(tree, components)?.current())
}

/// As [`directory`], and returns the path to it without links.
pub(crate) fn directory_with_path<'a, T: PathLookup>(
    tree: &mut T,
    components: impl Iterator<Item = &'a [u8]>,
) -> Result<(T::Directory, ArchivePath), ResolveError<T::Error>> {
    let walk = walk_components(tree, components)?;
    Ok((walk.current(), walk.path()))
}

/// As [`directory`], for the entry `name` in it. Also returns whether the way goes through this entry, which is then a
/// link, as `e` is for the path `e/e` after `e -> .`. A member with that path removes the link, as GNU tar does, and its
/// path must be resolved again.
pub(crate) fn parent<'a, T: PathLookup<Directory: PartialEq>>(
    tree: &mut T,
    components: impl Iterator<Item = &'a [u8]>,
    name: &[u8],
) -> Result<(T::Directory, bool), ResolveError<T::Error>> {
    let walk = walk_components(tree, components)?;
    let directory = walk.current();
    let mut links = walk.links.iter();
    let is_own_link = links.any(|(parent, link)| *parent == directory && link == name);
    Ok((directory, is_own_link))
}

/// The components of `path` joined by single slashes, without `.`. A `..` stays, because only a lookup finds its place.
pub fn without_dots(path: &[u8]) -> Vec<u8> {
    let names = path.split(|&byte| byte == b'/');
    let names = names.filter(|name| !matches!(*name, b"" | b"."));
    names.collect::<Vec<_>>().join(&b'/')
}

/// A directory, its path without links, and the name of a file in it unless the directory itself is meant.
type ParentAndName<T> = (<T as PathLookup>::Directory, ArchivePath, Option<Vec<u8>>);

/// Resolves `path` to a directory and the name of a file in it, or to a directory alone if the path ends with a slash,
/// a dot, or at the root. A link is followed at the end only if `follows_last`.
pub(crate) fn file<T: PathLookup>(
    tree: &mut T,
    path: &[u8],
    follows_last: bool,
) -> Result<ParentAndName<T>, ResolveError<T::Error>> {
    let last = if follows_last {
        Last::Followed
    } else {
        Last::Kept
    };
    let mut walk = Walk::new(tree);
    let name = walk.walk(tree, path, last)?;
    Ok((walk.current(), walk.path(), name))
}

/// Treatment of the last component of a path.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Last {
    /// It is a directory, or a link to one.
    Entered,
    /// It may be any file. A link is followed.
    Followed,
    /// It may be any file.
    Kept,
}

fn walk_components<'a, T: PathLookup>(
    tree: &mut T,
    components: impl Iterator<Item = &'a [u8]>,
) -> Result<Walk<T::Directory>, ResolveError<T::Error>> {
    let mut walk = Walk::new(tree);
    for component in components {
        walk.walk(tree, component, Last::Entered)?;
    }
    Ok(walk)
}

struct Walk<D> {
    root: D,
    ancestors: Vec<(Vec<u8>, D)>,
    /// The links that were followed, with their directories.
    links: Vec<(D, Vec<u8>)>,
}

impl<D: Clone> Walk<D> {
    fn new<T: PathLookup<Directory = D>>(tree: &T) -> Self {
        Self {
            root: tree.root(),
            ancestors: Vec::new(),
            links: Vec::new(),
        }
    }

    fn current(&self) -> D {
        let last = self.ancestors.last();
        last.map_or(&self.root, |(_, directory)| directory).clone()
    }

    /// The path of the current directory, without links.
    fn path(&self) -> ArchivePath {
        let mut path = ArchivePath::default();
        for (name, _) in &self.ancestors {
            path.push(name);
        }
        path
    }

    /// Returns the last component, unless it was entered.
    fn walk<T: PathLookup<Directory = D>>(
        &mut self,
        tree: &mut T,
        path: &[u8],
        last: Last,
    ) -> Result<Option<Vec<u8>>, ResolveError<T::Error>> {
        let split = |path: &[u8]| -> Vec<_> {
            let names = path.split(|&byte| byte == b'/').rev().enumerate();
            // Of those that stay where they are, only the last one means a directory.
            let names = names.filter(|&(place, name)| place == 0 || !matches!(name, b"" | b"."));
            names.map(|(_, name)| name.to_vec()).collect()
        };
        // Components still to walk, with the next one last. A link pushes those of its target.
        let mut pending = split(path);
        let mut own = pending.len();
        while let Some(name) = pending.pop() {
            let is_own = pending.len() < own;
            own = own.min(pending.len());
            match name.as_slice() {
                b"" | b"." => continue,
                b".." => {
                    if self.ancestors.pop().is_none() && !tree.is_chroot() {
                        return Err(ResolveError::Path(PathError::of_climb(is_own)));
                    }
                    continue;
                }
                _ => {}
            }
            let current = self.current();
            let is_last = last != Last::Entered && pending.is_empty();
            match tree.step(&current, &name).map_err(ResolveError::Tree)? {
                Component::Link(_) if is_last && last == Last::Kept => return Ok(Some(name)),
                Component::Directory(_) | Component::Missing | Component::Other if is_last => {
                    return Ok(Some(name));
                }
                Component::Directory(directory) => self.ancestors.push((name, directory)),
                Component::Missing => {
                    let made = tree.imply(&current, &name).map_err(ResolveError::Tree)?;
                    self.ancestors.push((name, made));
                }
                Component::Other => return Err(ResolveError::Path(PathError::NotADirectory)),
                Component::Link(target) => {
                    if self.links.len() == MAX_LINKS {
                        return Err(ResolveError::Path(PathError::TooManyLinks));
                    }
                    self.links.push((current, name));
                    if target.first() == Some(&b'/') {
                        if !tree.is_chroot() {
                            return Err(ResolveError::Path(PathError::EscapesRoot));
                        }
                        self.ancestors.clear();
                    }
                    pending.extend(split(&target));
                }
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::convert::Infallible;

    use super::*;

    /// Paths from the root, each a directory, a link, or another file.
    #[derive(Default)]
    struct TestTree {
        steps: BTreeMap<String, Component<String>>,
        is_chroot: bool,
    }

    impl TestTree {
        fn with(entries: &[(&str, Option<&str>)]) -> Self {
            let mut tree = Self::default();
            for (path, target) in entries {
                let step = match target {
                    Some("") => Component::Other,
                    Some(target) => Component::Link(target.as_bytes().to_vec()),
                    None => Component::Directory((*path).to_owned()),
                };
                tree.steps.insert((*path).to_owned(), step);
            }
            tree
        }

        fn resolve(&mut self, path: &str) -> Result<String, PathError> {
            match directory(self, path.split('/').map(str::as_bytes)) {
                Ok(directory) => Ok(directory),
                Err(ResolveError::Path(refusal)) => Err(refusal),
                Err(ResolveError::Tree(never)) => match never {},
            }
        }
    }

    impl PathLookup for TestTree {
        type Directory = String;
        type Error = Infallible;

        fn root(&self) -> String {
            String::new()
        }

        fn is_chroot(&self) -> bool {
            self.is_chroot
        }

        fn step(&mut self, parent: &String, name: &[u8]) -> Result<Component<String>, Infallible> {
            let path = format!("{parent}/{}", String::from_utf8_lossy(name));
            Ok(self.steps.get(&path).cloned().unwrap_or(Component::Missing))
        }

        fn imply(&mut self, parent: &String, name: &[u8]) -> Result<String, Infallible> {
            let path = format!("{parent}/{}", String::from_utf8_lossy(name));
            self.steps
                .insert(path.clone(), Component::Directory(path.clone()));
            Ok(path)
        }
    }

    // Promises: link-inside
    #[test]
    fn symlink_inside_the_root_is_followed() {
        let mut tree = TestTree::with(&[
            ("/lib", Some("usr/lib")),
            ("/usr", None),
            ("/usr/lib", None),
        ]);
        assert_eq!(tree.resolve("lib/x"), Ok("/usr/lib/x".to_owned()));
    }

    // Promises: link-inside, gnu-link-missing
    #[test]
    fn dangling_symlink_creates_its_target() {
        let mut tree = TestTree::with(&[("/lib", Some("usr/lib"))]);
        assert_eq!(tree.resolve("lib"), Ok("/usr/lib".to_owned()));
    }

    // Promises: link-inside
    #[test]
    fn parent_component_inside_the_root_is_followed() {
        let mut tree = TestTree::with(&[("/a", None), ("/a/b", Some("../c/./")), ("/c", None)]);
        assert_eq!(tree.resolve("a/b/d"), Ok("/c/d".to_owned()));
    }

    #[test]
    fn only_a_slash_or_dot_at_the_end_means_a_directory() {
        let mut tree = TestTree::with(&[("/a", Some(".//./b/./")), ("/b", None), ("/f", Some(""))]);
        let mut place = |path: &str| {
            let found = file(&mut tree, path.as_bytes(), true).ok();
            found.map(|(directory, _, name)| (directory, name))
        };
        assert_eq!(place("./a"), Some(("/b".to_owned(), None)));
        let found = Some((String::new(), Some(b"f".to_vec())));
        assert_eq!(place(".//./f"), found);
        assert_eq!((place("f/"), place("f/.")), (None, None));
    }

    #[test]
    fn way_to_a_parent_may_go_through_the_entry_itself() {
        let mut tree = TestTree::with(&[
            ("/a", None),
            ("/a/l", Some("..")),
            ("/e", Some(".")),
            ("/f", Some("e/a/l/e")),
        ]);
        let mut place = |directory: &str, name: &str| {
            let components = directory.split('/').map(str::as_bytes);
            parent(&mut tree, components, name.as_bytes()).ok()
        };
        let root = |is_own_link| Some((String::new(), is_own_link));
        assert_eq!(place("e", "e"), root(true));
        assert_eq!(place("e", "f"), root(false));
        assert_eq!(place("f/e", "f"), root(true));
        assert_eq!(place("f", "e"), root(true));
        assert_eq!(place("f", "l"), root(false));
        assert_eq!(place("f/a", "l"), Some(("/a".to_owned(), true)));
        assert_eq!(place("a", "l"), Some(("/a".to_owned(), false)));
    }

    // Promises: link-outside
    #[test]
    fn symlink_that_leads_outside_is_rejected() {
        let mut tree = TestTree::with(&[("/a", Some("../b")), ("/c", Some("/etc"))]);
        assert_eq!(tree.resolve("a/x"), Err(PathError::EscapesRoot));
        assert_eq!(tree.resolve("c/x"), Err(PathError::EscapesRoot));
    }

    // Promises: walk-paths
    #[test]
    fn path_that_climbs_above_the_root_blames_no_link() {
        let mut tree = TestTree::with(&[("/a", None), ("/a/l", Some("../a")), ("/b", Some(".."))]);
        let mut find = |path: &str| file(&mut tree, path.as_bytes(), true).err();
        for (path, error) in [
            ("../a", PathError::AboveRoot),
            ("a/../../a", PathError::AboveRoot),
            ("a/l/../..", PathError::AboveRoot),
            ("b/a", PathError::EscapesRoot),
        ] {
            let found = find(path);
            assert!(
                matches!(found, Some(ResolveError::Path(found)) if found == error),
                "{path}: {found:?}"
            );
        }
    }

    // Promises: layer-links
    #[test]
    fn escaping_symlink_restarts_at_the_root_after_chroot() {
        let mut tree = TestTree::with(&[
            ("/a", None),
            ("/a/b", Some("../../../c")),
            ("/d", Some("/a/b/e")),
        ]);
        tree.is_chroot = true;
        assert_eq!(tree.resolve("a/b/x"), Ok("/c/x".to_owned()));
        assert_eq!(tree.resolve("d/x"), Ok("/c/e/x".to_owned()));
    }

    // Promises: link-outside
    #[test]
    fn symlink_loop_is_rejected() {
        let mut tree = TestTree::with(&[("/a", Some("b")), ("/b", Some("a"))]);
        assert_eq!(tree.resolve("a/x"), Err(PathError::TooManyLinks));
    }

    // Promises: link-outside
    #[test]
    fn file_as_intermediate_component_is_rejected() {
        let mut tree = TestTree::with(&[("/a", Some(""))]);
        assert_eq!(tree.resolve("a/x"), Err(PathError::NotADirectory));
    }
}
