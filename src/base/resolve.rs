//! Where a member's path leads in a tree that holds symbolic links.
//!
//! Index, mount and materialize share this one resolver, so a member lands in the same place in
//! all of them: links met on the way to the last component are followed as long as they stay
//! inside the root (`lib -> usr/lib`, then `lib/x`, is `usr/lib/x`); a link that leads outside,
//! because its target is absolute or climbs above the root, is never followed. The kernel
//! follows nothing for us: every step names one component of one open directory.

use std::fmt::Debug;

use super::path::ArchivePath;

/// Links that one path may lead through, as Linux's own limit (`path_resolution(7)`).
pub const MAX_LINKS: usize = 40;

/// A tree that can be walked one component at a time.
pub trait Tree {
    /// A directory of the tree. Clones name the same directory.
    type Directory: Clone;
    /// Why a step failed for reasons of its own, e.g. the operating system's.
    type Error;

    /// The root.
    fn root(&self) -> Self::Directory;

    /// Whether links that lead outside lead inside, as after chroot(2): an absolute target starts at the
    /// root, and nothing climbs above it.
    fn is_chroot(&self) -> bool {
        false
    }

    /// What `name` is in `parent`, without following it.
    ///
    /// # Errors
    /// Only when the tree cannot be asked; a missing name is [`Step::Missing`].
    fn step(
        &mut self,
        parent: &Self::Directory,
        name: &[u8],
    ) -> Result<Step<Self::Directory>, Self::Error>;

    /// Makes the directory `name` in `parent`, because a member below it implies it.
    ///
    /// # Errors
    /// When it cannot be made.
    fn imply(
        &mut self,
        parent: &Self::Directory,
        name: &[u8],
    ) -> Result<Self::Directory, Self::Error>;
}

/// What one name in one directory is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step<D> {
    /// A directory.
    Directory(D),
    /// A symbolic link and its target.
    Link(Vec<u8>),
    /// Something else.
    Other,
    /// Nothing.
    Missing,
}

/// Why a path leads nowhere inside the root.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    /// A symbolic link on the way is absolute or climbs above the root.
    #[error("a symbolic link on the way leads outside the root")]
    Outside,
    /// Something on the way is neither a directory nor a link to one.
    #[error("something on the way is not a directory")]
    NotADirectory,
    /// More than [`MAX_LINKS`] links.
    #[error("too many levels of symbolic links")]
    TooManyLinks,
}

/// A path that could not be resolved: refused by rule, or the tree failed.
#[derive(Debug)]
pub enum ResolveError<E> {
    /// The path leads nowhere inside the root.
    Refused(Refusal),
    /// The tree could not be asked or extended.
    Tree(E),
}

/// The directory that `components` lead to from the root, made where nothing is.
///
/// # Errors
/// [`ResolveError::Refused`] when the way leads outside, through a non-directory or in circles;
/// [`ResolveError::Tree`] when a step fails.
pub fn directory<'a, T: Tree>(
    tree: &mut T,
    components: impl Iterator<Item = &'a [u8]>,
) -> Result<T::Directory, ResolveError<T::Error>> {
    Ok(way(tree, components)?.here())
}

/// As [`directory`], with the way to it that leads through no link.
///
/// # Errors
/// As for [`directory`].
pub fn place<'a, T: Tree>(
    tree: &mut T,
    components: impl Iterator<Item = &'a [u8]>,
) -> Result<(T::Directory, ArchivePath), ResolveError<T::Error>> {
    let way = way(tree, components)?;
    let mut path = ArchivePath::default();
    for (name, _) in &way.below {
        path.push(name);
    }
    Ok((way.here(), path))
}

fn way<'a, T: Tree>(
    tree: &mut T,
    components: impl Iterator<Item = &'a [u8]>,
) -> Result<Way<T::Directory>, ResolveError<T::Error>> {
    let mut way = Way {
        root: tree.root(),
        below: Vec::new(),
        links: 0,
    };
    for component in components {
        way.walk(tree, component)?;
    }
    Ok(way)
}

/// The directories from the root to where we stand.
struct Way<D> {
    root: D,
    /// Those below it, with their names.
    below: Vec<(Vec<u8>, D)>,
    links: usize,
}

impl<D: Clone> Way<D> {
    fn here(&self) -> D {
        let last = self.below.last();
        last.map_or(&self.root, |(_, directory)| directory).clone()
    }

    fn walk<T: Tree<Directory = D>>(
        &mut self,
        tree: &mut T,
        name: &[u8],
    ) -> Result<(), ResolveError<T::Error>> {
        // Components still to walk, the next one last; links put theirs on top.
        let mut pending = vec![name.to_vec()];
        while let Some(name) = pending.pop() {
            match name.as_slice() {
                b"" | b"." => continue,
                b".." => {
                    if self.below.pop().is_none() && !tree.is_chroot() {
                        return Err(ResolveError::Refused(Refusal::Outside));
                    }
                    continue;
                }
                _ => {}
            }
            let here = self.here();
            match tree.step(&here, &name).map_err(ResolveError::Tree)? {
                Step::Directory(directory) => self.below.push((name, directory)),
                Step::Missing => {
                    let made = tree.imply(&here, &name).map_err(ResolveError::Tree)?;
                    self.below.push((name, made));
                }
                Step::Other => return Err(ResolveError::Refused(Refusal::NotADirectory)),
                Step::Link(target) => {
                    self.links += 1;
                    if self.links > MAX_LINKS {
                        return Err(ResolveError::Refused(Refusal::TooManyLinks));
                    }
                    if target.first() == Some(&b'/') {
                        if !tree.is_chroot() {
                            return Err(ResolveError::Refused(Refusal::Outside));
                        }
                        self.below.clear();
                    }
                    pending.extend(target.split(|&byte| byte == b'/').rev().map(<[u8]>::to_vec));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::convert::Infallible;

    use super::*;

    /// Paths from the root, each a directory, a link, or something else.
    #[derive(Default)]
    struct Toy {
        steps: BTreeMap<String, Step<String>>,
        is_chroot: bool,
    }

    impl Toy {
        fn with(entries: &[(&str, Option<&str>)]) -> Self {
            let mut toy = Self::default();
            for (path, target) in entries {
                let step = match target {
                    Some("") => Step::Other,
                    Some(target) => Step::Link(target.as_bytes().to_vec()),
                    None => Step::Directory((*path).to_owned()),
                };
                toy.steps.insert((*path).to_owned(), step);
            }
            toy
        }

        fn lead(&mut self, path: &str) -> Result<String, Refusal> {
            match directory(self, path.split('/').map(str::as_bytes)) {
                Ok(directory) => Ok(directory),
                Err(ResolveError::Refused(refusal)) => Err(refusal),
                Err(ResolveError::Tree(never)) => match never {},
            }
        }
    }

    impl Tree for Toy {
        type Directory = String;
        type Error = Infallible;

        fn root(&self) -> String {
            String::new()
        }

        fn is_chroot(&self) -> bool {
            self.is_chroot
        }

        fn step(&mut self, parent: &String, name: &[u8]) -> Result<Step<String>, Infallible> {
            let path = format!("{parent}/{}", String::from_utf8_lossy(name));
            Ok(self.steps.get(&path).cloned().unwrap_or(Step::Missing))
        }

        fn imply(&mut self, parent: &String, name: &[u8]) -> Result<String, Infallible> {
            let path = format!("{parent}/{}", String::from_utf8_lossy(name));
            self.steps
                .insert(path.clone(), Step::Directory(path.clone()));
            Ok(path)
        }
    }

    #[test]
    fn a_link_inside_the_root_is_followed() {
        let mut toy = Toy::with(&[
            ("/lib", Some("usr/lib")),
            ("/usr", None),
            ("/usr/lib", None),
        ]);
        assert_eq!(toy.lead("lib/x"), Ok("/usr/lib/x".to_owned()));
    }

    #[test]
    fn a_dangling_link_implies_its_target() {
        let mut toy = Toy::with(&[("/lib", Some("usr/lib"))]);
        assert_eq!(toy.lead("lib"), Ok("/usr/lib".to_owned()));
    }

    #[test]
    fn climbing_inside_the_root_is_fine() {
        let mut toy = Toy::with(&[("/a", None), ("/a/b", Some("../c/./")), ("/c", None)]);
        assert_eq!(toy.lead("a/b/d"), Ok("/c/d".to_owned()));
    }

    #[test]
    fn links_that_lead_outside_are_refused() {
        let mut toy = Toy::with(&[("/a", Some("../b")), ("/c", Some("/etc"))]);
        assert_eq!(toy.lead("a/x"), Err(Refusal::Outside));
        assert_eq!(toy.lead("c/x"), Err(Refusal::Outside));
    }

    #[test]
    fn links_that_lead_outside_start_at_the_root_after_chroot() {
        let mut toy = Toy::with(&[
            ("/a", None),
            ("/a/b", Some("../../../c")),
            ("/d", Some("/a/b/e")),
        ]);
        toy.is_chroot = true;
        assert_eq!(toy.lead("a/b/x"), Ok("/c/x".to_owned()));
        assert_eq!(toy.lead("d/x"), Ok("/c/e/x".to_owned()));
    }

    #[test]
    fn circles_end() {
        let mut toy = Toy::with(&[("/a", Some("b")), ("/b", Some("a"))]);
        assert_eq!(toy.lead("a/x"), Err(Refusal::TooManyLinks));
    }

    #[test]
    fn a_file_on_the_way_is_refused() {
        let mut toy = Toy::with(&[("/a", Some(""))]);
        assert_eq!(toy.lead("a/x"), Err(Refusal::NotADirectory));
    }
}
