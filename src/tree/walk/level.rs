//! Directories on the way of a walk, of which a bounded number is open.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Weak};

use crate::base::sync::Mutex;

use crate::tree::interface::{Name, Tree, push_component};
use crate::tree::item::Place;

/// A directory on the way of a walk.
#[expect(missing_debug_implementations, reason = "trees have no form for it")]
pub struct Level<T: Tree, S> {
    /// The directory above; `None` for a starting point.
    pub parent: Option<Arc<Self>>,
    /// Its name; of a starting point, the path that was given.
    pub name: Vec<u8>,
    /// Its number.
    pub inode: u64,
    /// Number of directories above it, down from the starting point.
    pub depth: usize,
    handle: Mutex<Handle<T>>,
    pub(super) open: Arc<OpenLevels<T, S>>,
    /// State of the visitor.
    pub state: S,
    /// Its reading, and tasks and directories below it that are not done.
    pub(super) pending: AtomicUsize,
}

struct Handle<T: Tree> {
    /// `None` while the directory is closed.
    directory: Option<Arc<T::Directory>>,
    /// Set when it is closed.
    identity: (u64, u64),
}

/// The directories below starting points that were opened last. Others are closed, so that a tree may be deeper
/// than the limit of open files.
pub(crate) struct OpenLevels<T: Tree, S> {
    pub(super) max: usize,
    levels: Mutex<VecDeque<Weak<Level<T, S>>>>,
}

impl<T: Tree, S> OpenLevels<T, S> {
    /// Keeps open as many directories of `tree` as a walk may that keeps open directories of `trees` trees.
    pub(crate) fn new(tree: &T, trees: usize) -> Arc<Self> {
        let max = tree.max_open();
        Arc::new(Self {
            max: max.map_or(usize::MAX, |max| (max / trees.max(1)).max(2)),
            levels: Mutex::default(),
        })
    }

    /// Adds an open directory, and closes the one that was opened first if there are too many.
    fn add(&self, tree: &T, level: &Arc<Level<T, S>>) {
        if self.max == usize::MAX {
            return;
        }
        let oldest = {
            let mut levels = self.levels.lock();
            levels.push_back(Arc::downgrade(level));
            let has_too_many = levels.len() > self.max;
            has_too_many.then(|| levels.pop_front()).flatten()
        };
        let Some(oldest) = oldest.and_then(|level| level.upgrade()) else {
            return;
        };
        let mut handle = oldest.handle.lock();
        // Without an identity it stays open.
        if let Some(Ok(identity)) = handle.directory.as_ref().map(|open| tree.identity(open)) {
            handle.identity = identity;
            handle.directory = None;
        }
    }
}

impl<T: Tree, S> Level<T, S> {
    /// The directory `name` in `parent`, which is not open yet.
    pub(super) fn new(
        parent: Option<&Arc<Self>>,
        name: Name<'_>,
        open: &Arc<OpenLevels<T, S>>,
        state: S,
    ) -> Self {
        Self {
            parent: parent.cloned(),
            name: name.name.to_owned(),
            inode: name.inode,
            depth: parent.map_or(0, |parent| parent.depth + 1),
            handle: Mutex::new(Handle {
                directory: None,
                identity: (0, 0),
            }),
            open: Arc::clone(open),
            state,
            pending: AtomicUsize::new(1),
        }
    }

    /// The open directory `start`.
    pub(crate) fn at_start(start: Start<T, S>, open: &Arc<OpenLevels<T, S>>) -> Arc<Self> {
        let name = Name::directory(&start.path, start.inode);
        let level = Self::new(None, name, open, start.state);
        level.handle.lock().directory = Some(Arc::new(start.directory));
        Arc::new(level)
    }

    pub(crate) fn open_child(
        self: &Arc<Self>,
        tree: &T,
        name: Name<'_>,
        state: S,
    ) -> io::Result<Arc<Self>> {
        let child = Arc::new(Self::new(Some(self), name, &self.open, state));
        child.open_first(tree)?;
        Ok(child)
    }

    /// Opens the directory for the first time.
    pub(super) fn open_first(self: &Arc<Self>, tree: &T) -> io::Result<()> {
        let parent = self.parent.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let directory = tree.open(&*parent.open(tree)?, self.as_name())?;
        self.handle.lock().directory = Some(Arc::new(directory));
        self.open.add(tree, self);
        Ok(())
    }

    /// The open directory. It is opened again if it was closed.
    ///
    /// # Errors
    /// As [`Tree::open`], or another directory has its path now.
    pub fn open(self: &Arc<Self>, tree: &T) -> io::Result<Arc<T::Directory>> {
        let (mut closed, mut level) = (Vec::new(), self);
        let mut directory = loop {
            if let Some(directory) = &level.handle.lock().directory {
                break Arc::clone(directory);
            }
            closed.push(level);
            // Starting points are never closed.
            level = level.parent.as_ref().ok_or(io::ErrorKind::NotFound)?;
        };
        while let Some(level) = closed.pop() {
            directory = Arc::new(tree.open(&directory, level.as_name())?);
            // Those in which the walk goes on soon.
            if closed.len() < self.open.max / 2 {
                level.set_open(tree, &directory)?;
            }
        }
        Ok(directory)
    }

    /// Keeps `directory`, which was opened again.
    fn set_open(self: &Arc<Self>, tree: &T, directory: &Arc<T::Directory>) -> io::Result<()> {
        let mut handle = self.handle.lock();
        if tree.identity(directory)? != handle.identity {
            return Err(io::Error::other("the directory was moved"));
        }
        handle.directory = Some(Arc::clone(directory));
        drop(handle);
        self.open.add(tree, self);
        Ok(())
    }

    /// Opens the directory above again if it is closed, because the way from an open one may be long.
    pub(super) fn open_parent(&self, tree: &T) {
        let Some(parent) = &self.parent else {
            return;
        };
        if parent.handle.lock().directory.is_some() {
            return;
        }
        let directory = self.handle.lock().directory.clone();
        if let Some(directory) = directory
            && let Ok(above) = tree.open(&directory, Name::directory(b"..", parent.inode))
        {
            // It is opened on the other way if this one fails.
            drop(parent.set_open(tree, &Arc::new(above)));
        }
    }

    /// Its name in the directory above.
    pub fn as_name(&self) -> Name<'_> {
        Name::directory(&self.name, self.inode)
    }

    /// Its place, if it is open as `directory`, and its path is `path`.
    pub fn place<'a>(&'a self, directory: &'a T::Directory, path: &'a [u8]) -> Place<'a, T> {
        Place {
            directory,
            inode: self.inode,
            path,
            start: self.start(),
            depth: self.depth,
        }
    }

    /// The path that was given as its starting point.
    pub fn start(&self) -> &[u8] {
        let mut level = self;
        while let Some(parent) = &level.parent {
            level = parent;
        }
        &level.name
    }

    /// Its path, which begins with its starting point.
    pub fn path(&self) -> Vec<u8> {
        let mut names = Vec::with_capacity(self.depth + 1);
        let mut level = self;
        names.push(&*level.name);
        while let Some(parent) = &level.parent {
            level = parent;
            names.push(&*level.name);
        }
        let mut path = Vec::new();
        for name in names.into_iter().rev() {
            push_component(&mut path, name);
        }
        path
    }
}

impl<T: Tree, S> Drop for Level<T, S> {
    fn drop(&mut self) {
        // A recursive drop of a deep tree would overflow the stack.
        let mut above = self.parent.take();
        while let Some(mut level) = above.and_then(Arc::into_inner) {
            above = level.parent.take();
        }
    }
}

/// A directory at which a walk starts.
#[derive(Debug)]
pub struct Start<T: Tree, S> {
    /// Its path as it was given.
    pub path: Vec<u8>,
    /// Its number.
    pub inode: u64,
    /// The open directory.
    pub directory: T::Directory,
    /// Its state.
    pub state: S,
}
