//! Deletions of an update: entries that the source lacks, without mount points and the directories that hold them.

use std::io;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::base::archive_path::ArchivePath;
use crate::base::sync::Mutex;
use crate::tree::{FileKind, Level, Name, Start, Tree, Visit, Visitor, walk_parallel};

/// Entries that a deletion removes with all below them, and mount points, which stay.
#[derive(Default, Debug)]
pub(super) struct Deletion {
    pub(super) removed: Vec<ArchivePath>,
    pub(super) mounts: Vec<ArchivePath>,
}

/// Finds the mount points below a directory.
#[derive(Default)]
struct MountFinder(Mutex<Deletion>);

/// A directory that is to be deleted.
#[derive(Default)]
struct Deleted {
    holds_mount: AtomicBool,
    /// Names that are removed alone, if the directory stays.
    names: Mutex<Vec<Vec<u8>>>,
}

impl Deletion {
    /// Plans to remove the entries `extra` of the directory `top`. Below mount points `tree` has no files.
    pub(super) fn plan<T: Tree + Send + 'static>(
        tree: &Arc<T>,
        top: &T::Directory,
        extra: Vec<ArchivePath>,
    ) -> Self {
        let finder = Arc::new(MountFinder::default());
        for path in extra {
            let name = Name::directory(path.as_bytes(), 0);
            let directory = match tree.metadata(top, name) {
                Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
                    finder.0.lock().mounts.push(path);
                    continue;
                }
                Ok(found) if found.kind == FileKind::Directory => tree.open(top, name).ok(),
                // The removal reports what cannot be examined.
                _ => None,
            };
            let Some(directory) = directory else {
                finder.0.lock().removed.push(path);
                continue;
            };
            let start = Start {
                path: path.as_bytes().to_owned(),
                inode: 0,
                directory,
                state: Deleted::default(),
            };
            let one = NonZeroUsize::new(1);
            let _never_broken = walk_parallel(tree, &finder, vec![start], one);
        }
        let mut found = std::mem::take(&mut *finder.0.lock());
        found.mounts.sort_unstable();
        found
    }
}

impl<T: Tree + Send + 'static> Visitor<T> for MountFinder {
    type State = Deleted;

    fn visit(
        &self,
        names: &Visit<'_, T, Deleted>,
        descend: &mut Vec<(usize, Deleted)>,
    ) -> ControlFlow<()> {
        let state = &names.level.state;
        for (number, item) in names.items() {
            match item.metadata() {
                Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
                    state.holds_mount.store(true, Ordering::Relaxed);
                    let path = ArchivePath::sanitize(item.path()).path;
                    self.0.lock().mounts.push(path);
                }
                Ok(found) if found.kind == FileKind::Directory => {
                    descend.push((number, Deleted::default()));
                }
                _ => state.names.lock().push(item.name().to_owned()),
            }
        }
        ControlFlow::Continue(())
    }

    fn leave(&self, level: &Arc<Level<T, Deleted>>) -> ControlFlow<()> {
        let holds_mount = level.state.holds_mount.load(Ordering::Relaxed);
        if holds_mount {
            let path = ArchivePath::sanitize(&level.path()).path;
            let names = std::mem::take(&mut *level.state.names.lock());
            let removed = names.iter().map(|name| {
                let mut path = path.clone();
                path.push(name);
                path
            });
            self.0.lock().removed.extend(removed);
        }
        match &level.parent {
            Some(parent) if holds_mount => parent.state.holds_mount.store(true, Ordering::Relaxed),
            Some(parent) => parent.state.names.lock().push(level.name.clone()),
            None if holds_mount => {}
            None => {
                let path = ArchivePath::sanitize(&level.name).path;
                self.0.lock().removed.push(path);
            }
        }
        ControlFlow::Continue(())
    }

    fn report(&self, _: &[u8], _: io::Error) {
        // The removal reports it.
    }
}
