//! A file that a walk has found.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::io;

use super::parallel_walk::{Level, push_component};
use super::tree::{Batch, Candidate, FileKind, Metadata, Name, Tree};

/// A file in a directory, whose attributes are read at most once.
#[derive(Debug)]
pub struct Item<'a, T: Tree> {
    tree: &'a T,
    directory: &'a T::Directory,
    name: Name<'a>,
    start: &'a [u8],
    path: Cow<'a, [u8]>,
    depth: usize,
    metadata: OnceCell<Metadata>,
}

impl<'a, T: Tree> Item<'a, T> {
    /// The starting point `name` in `directory`.
    pub fn at_start(tree: &'a T, directory: &'a T::Directory, name: Name<'a>) -> Self {
        Self {
            tree,
            directory,
            name,
            start: name.name,
            path: Cow::Borrowed(name.name),
            depth: 0,
            metadata: OnceCell::new(),
        }
    }

    /// The names of `batch`, read from the directory `level`.
    pub fn of_batch<S>(
        tree: &'a T,
        level: &'a Level<T, S>,
        batch: &'a Batch,
    ) -> impl Iterator<Item = Item<'a, T>> {
        let (above, start, depth) = (level.path(), level.start(), level.depth() + 1);
        batch.iter().map(move |name| {
            let mut path = Vec::with_capacity(above.len() + 1 + name.name.len());
            path.extend_from_slice(&above);
            push_component(&mut path, name.name);
            Item {
                tree,
                directory: level.directory(),
                name,
                start,
                path: Cow::Owned(path),
                depth,
                metadata: OnceCell::new(),
            }
        })
    }
}

impl<T: Tree> Candidate for Item<'_, T> {
    fn path(&self) -> &[u8] {
        &self.path
    }

    fn start(&self) -> &[u8] {
        self.start
    }

    fn name(&self) -> &[u8] {
        // Slashes at the end of a starting point belong to no name.
        let name = self.name.name;
        let end = name.iter().rposition(|&byte| byte != b'/');
        let Some(name) = end.and_then(|end| name.get(..=end)) else {
            return name;
        };
        name.rsplit(|&byte| byte == b'/').next().unwrap_or(name)
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn kind(&self) -> FileKind {
        self.name.kind
    }

    fn metadata(&self) -> io::Result<Metadata> {
        if let Some(found) = self.metadata.get() {
            return Ok(*found);
        }
        let found = self.tree.metadata(self.directory, self.name)?;
        Ok(*self.metadata.get_or_init(|| found))
    }

    fn target(&self) -> io::Result<Cow<'_, [u8]>> {
        self.tree.target(self.directory, self.name)
    }

    fn user(&self) -> io::Result<Option<Cow<'_, [u8]>>> {
        let metadata = self.metadata()?;
        Ok(self.tree.user(&metadata))
    }

    fn group(&self) -> io::Result<Option<Cow<'_, [u8]>>> {
        let metadata = self.metadata()?;
        Ok(self.tree.group(&metadata))
    }

    fn is_empty_directory(&self) -> io::Result<bool> {
        let directory = self.tree.open(self.directory, self.name)?;
        let mut batch = Batch::default();
        self.tree.read(&directory, &mut 0, &mut batch)?;
        Ok(batch.is_empty())
    }
}
