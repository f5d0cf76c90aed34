//! A file that a walk has found.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::io;

use super::interface::{Batch, Content, FileKind, Metadata, Name, Tree, Xattr, push_component};

/// A file in a directory, whose attributes are read at most once.
#[derive(Debug)]
pub struct Item<'a, T: Tree> {
    tree: &'a T,
    directory: &'a T::Directory,
    name: Name<'a>,
    parent: u64,
    start: &'a [u8],
    /// Path of its directory; `None` for a starting point.
    above: Option<&'a [u8]>,
    path: OnceCell<Vec<u8>>,
    depth: usize,
    metadata: OnceCell<Metadata>,
}

/// An open directory, and its place in a walk.
#[derive(Debug)]
pub struct Place<'a, T: Tree> {
    /// The directory.
    pub directory: &'a T::Directory,
    /// Its number.
    pub inode: u64,
    /// Its path, which begins with its starting point.
    pub path: &'a [u8],
    /// The path of its starting point.
    pub start: &'a [u8],
    /// Number of directories between it and the starting point, whose depth is 0.
    pub depth: usize,
}

impl<'a, T: Tree> Item<'a, T> {
    /// The starting point `name` in `directory`.
    pub fn at_start(tree: &'a T, directory: &'a T::Directory, name: Name<'a>) -> Self {
        Self {
            tree,
            directory,
            name,
            parent: 0,
            start: name.name,
            above: None,
            path: OnceCell::new(),
            depth: 0,
            metadata: OnceCell::new(),
        }
    }

    /// The file `name` in the directory `place`.
    pub fn in_directory(tree: &'a T, place: &Place<'a, T>, name: Name<'a>) -> Self {
        Self {
            parent: place.inode,
            start: place.start,
            above: Some(place.path),
            depth: place.depth + 1,
            ..Self::at_start(tree, place.directory, name)
        }
    }

    /// The same starting point, in the directory with this number.
    #[must_use]
    pub fn with_parent(self, parent: u64) -> Self {
        Self { parent, ..self }
    }

    /// The same file, at this path.
    #[must_use]
    pub(crate) fn called(self, path: &[u8]) -> Self {
        Self {
            above: Some(b""),
            path: OnceCell::from(path.to_owned()),
            ..self
        }
    }

    pub(crate) fn set_metadata(&mut self, metadata: Metadata) {
        self.metadata = OnceCell::from(metadata);
    }

    /// Opens a regular file for reading.
    pub(crate) fn content(&self) -> io::Result<Box<dyn Content + '_>> {
        self.tree.content(self.directory, self.name)
    }

    /// Whether only paths of other files imply the directory.
    pub(crate) fn is_implied(&self) -> io::Result<bool> {
        self.tree.is_implied(self.name)
    }

    /// Opens it, if it is a directory.
    ///
    /// # Errors
    /// As [`Tree::open`].
    pub fn open(&self) -> io::Result<T::Directory> {
        self.tree.open(self.directory, self.name)
    }

    /// Its extended attributes, as they are set on a file.
    ///
    /// # Errors
    /// As [`Tree::xattrs`].
    pub fn xattrs(&self) -> io::Result<Vec<Xattr>> {
        self.tree.xattrs(self.directory, self.name)
    }

    /// Whether it has an ACL, as far as that can be read.
    pub(crate) fn has_acl(&self) -> io::Result<bool> {
        self.tree.has_acl(self.directory, self.name)
    }

    /// The bytes of its access ACL, if it has one.
    pub(crate) fn access_acl(&self) -> io::Result<Option<Vec<u8>>> {
        self.tree.access_acl(self.directory, self.name)
    }

    /// The file's number.
    pub fn inode(&self) -> u64 {
        self.name.inode
    }

    /// The number of its directory; 0 for a starting point that names none.
    pub(crate) fn parent(&self) -> u64 {
        self.parent
    }

    /// Offset of its first stored byte in the plain archive, if it has any.
    pub(crate) fn offset(&self) -> io::Result<Option<u64>> {
        self.tree.offset(self.name)
    }

    /// The path from the starting point on, which begins with the starting point as it was given.
    pub fn path(&self) -> &[u8] {
        let Some(above) = self.above else {
            return self.name.name;
        };
        self.path.get_or_init(|| {
            let mut path = Vec::with_capacity(above.len() + 1 + self.name.name.len());
            self.push_path(&mut path);
            path
        })
    }

    pub(crate) fn push_path(&self, output: &mut Vec<u8>) {
        let start = output.len();
        output.extend_from_slice(self.above.unwrap_or_default());
        if output.len() == start {
            output.extend_from_slice(self.name.name);
        } else {
            push_component(output, self.name.name);
        }
    }

    /// The starting point as it was given.
    pub fn start(&self) -> &[u8] {
        self.start
    }

    /// The last component of the path.
    pub fn name(&self) -> &[u8] {
        // Slashes at the end of a starting point belong to no name.
        let name = self.name.name;
        let end = name.iter().rposition(|&byte| byte != b'/');
        let Some(name) = end.and_then(|end| name.get(..=end)) else {
            return name;
        };
        name.rsplit(|&byte| byte == b'/').next().unwrap_or(name)
    }

    /// Number of directories between it and the starting point, whose depth is 0.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// The type.
    pub fn kind(&self) -> FileKind {
        self.name.kind
    }

    /// The type of the file itself, even if links are followed.
    pub(crate) fn unfollowed_kind(&self) -> io::Result<FileKind> {
        self.tree.kind(self.directory, self.name, false)
    }

    /// The type of the file behind a link, even if links are not followed.
    pub(crate) fn target_kind(&self) -> io::Result<FileKind> {
        match self.kind() {
            FileKind::Symlink => self.tree.kind(self.directory, self.name, true),
            kind => Ok(kind),
        }
    }

    /// The attributes.
    ///
    /// # Errors
    /// As [`Tree::metadata`].
    pub fn metadata(&self) -> io::Result<Metadata> {
        if let Some(found) = self.metadata.get() {
            return Ok(*found);
        }
        let found = self.tree.metadata(self.directory, self.name)?;
        Ok(*self.metadata.get_or_init(|| found))
    }

    /// The target of a symbolic link.
    pub(crate) fn target(&self) -> io::Result<Cow<'_, [u8]>> {
        self.tree.target(self.directory, self.name)
    }

    /// The owner's name, if any.
    pub(crate) fn user(&self) -> io::Result<Option<Cow<'_, [u8]>>> {
        self.tree.user(&self.metadata()?)
    }

    /// The group's name, if any.
    pub(crate) fn group(&self) -> io::Result<Option<Cow<'_, [u8]>>> {
        self.tree.group(&self.metadata()?)
    }

    /// Whether a directory has no names. Not for other types.
    pub(crate) fn is_empty_directory(&self) -> io::Result<bool> {
        let directory = self.tree.open(self.directory, self.name)?;
        let mut batch = Batch::default();
        self.tree.read(&directory, &mut 0, &mut batch)?;
        let has_names = !batch.is_empty() || !batch.take_failed().is_empty();
        Ok(!has_names)
    }
}
