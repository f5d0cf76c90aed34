//! Removal of trees.

use std::io;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rustix::fd::AsFd;
use rustix::fs::{Access, AtFlags, accessat, unlinkat};
use rustix::io::Errno;

use super::directory_tree::{DirectoryTree, OpenDirectory};
use super::interface::{FileKind, Name, Tree, is_missing};
use super::walk::{CALL_CHUNK, Level, Start, Visit, Visitor, walk_parallel};
use crate::base::mount_point::is_mount;
use crate::base::sync::Mutex;

/// Most readings of a directory that is not empty after its names were removed. A file system may move names to
/// positions that were read already.
const MAX_READINGS: u32 = 64;

/// Receives the outcomes of a removal, from several threads.
pub trait RemovalLog: Send + Sync + 'static {
    /// A file was removed, or a `kind` of file other than a regular one.
    fn report_removed(&self, kind: &str, path: &[u8]);

    /// The file at `path` remains.
    fn fail(&self, path: &[u8], error: &io::Error);

    /// Whether to do `action` to the file at `path`. Asked if [`RemoveOptions::asks`].
    fn agrees(&self, action: &str, path: &[u8]) -> bool;
}

/// The first error of a removal. One about a mount is replaced by another one.
#[derive(Debug, Default)]
struct FirstError(Mutex<Option<Errno>>);

impl RemovalLog for FirstError {
    fn report_removed(&self, _: &str, _: &[u8]) {}

    fn fail(&self, _: &[u8], error: &io::Error) {
        let error = Errno::from_io_error(error).unwrap_or(Errno::IO);
        let mut first = self.0.lock();
        *first = first.filter(|&first| first != Errno::XDEV).or(Some(error));
    }

    fn agrees(&self, _: &str, _: &[u8]) -> bool {
        true
    }
}

/// Removes the directory `name` in `parent`, if it exists, with all below it, whatever the modes are. No link is
/// followed, and what is mounted below stays.
///
/// # Errors
/// The first error, after everything else is removed. `XDEV` if only what is mounted remains. `NOTEMPTY` and `BUSY`
/// may be temporary, because another process still writes there.
pub fn remove_tree(parent: impl AsFd, name: &[u8]) -> Result<(), Errno> {
    let to_errno = |error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
    let parent = parent.as_fd().try_clone_to_owned().map_err(to_errno)?;
    let parent = OpenDirectory::from(parent);
    let tree = Arc::new(DirectoryTree::to_remove());
    let directory = match tree.open(&parent, Name::directory(name, 0)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened.map_err(to_errno)?,
    };
    let start = Start {
        path: name.to_owned(),
        inode: 0,
        directory,
        state: Removed::start(parent, name),
    };
    let options = RemoveOptions {
        force: true,
        ..RemoveOptions::default()
    };
    let log = Arc::new(FirstError::default());
    let remover = Remover::new(Arc::clone(&tree), options, Arc::clone(&log));
    let _never_broken = walk_parallel(&tree, &Arc::new(remover), vec![start], NonZeroUsize::new(1));
    let first = *log.0.lock();
    first.map_or(Ok(()), Err)
}

/// Options of [`Remover`].
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RemoveOptions {
    /// Whether directories are removed with what is below them.
    pub recursive: bool,
    /// Whether empty directories are removed.
    pub empty_directories: bool,
    /// Whether missing files are no errors.
    pub force: bool,
    /// Whether `/` may be removed.
    pub root: bool,
    /// Whether [`RemovalLog::agrees`] is asked about each file.
    pub asks: bool,
}

/// Removes the files of a walk.
#[derive(Debug)]
pub struct Remover<L> {
    pub(crate) tree: Arc<DirectoryTree>,
    pub(crate) options: RemoveOptions,
    pub(crate) log: Arc<L>,
}

/// A directory that is being removed.
#[derive(Debug, Default)]
pub struct Removed {
    /// The directory that holds it and its name there, if it is a starting point.
    start: Option<(OpenDirectory, Vec<u8>)>,
    /// Whether a file below it remains.
    has_remaining_files: AtomicBool,
    /// Whether a name was removed since it was last read from its beginning.
    is_changed: AtomicBool,
    readings: AtomicU32,
    /// Whether its removal was agreed to.
    is_agreed: AtomicBool,
}

type Directory = Level<DirectoryTree, Removed>;

impl<L: RemovalLog> Remover<L> {
    /// Reports each file to `log`. A `tree` that stays on one file system keeps it from crossing mount points.
    pub fn new(tree: Arc<DirectoryTree>, options: RemoveOptions, log: Arc<L>) -> Self {
        Self { tree, options, log }
    }

    /// Removes the file `name` in `directory`, unless the answer to a question is no. Returns whether it is gone.
    pub(crate) fn remove(
        &self,
        directory: &OpenDirectory,
        name: &[u8],
        (flags, kind): (AtFlags, &str),
        path: &[u8],
    ) -> bool {
        match self.may_unlink(directory, name, path) {
            Ok(true) => self.report_outcome(self.unlink(directory, name, flags), kind, path),
            Ok(false) => false,
            Err(error) => self.report_outcome(Err(error), kind, path),
        }
    }

    /// Whether the file `name` in `directory` may be removed.
    fn may_unlink(&self, directory: &OpenDirectory, name: &[u8], path: &[u8]) -> io::Result<bool> {
        if !self.options.asks {
            return Ok(true);
        }
        let file = self.tree.metadata(directory, Name::directory(name, 0))?;
        let kind = match file.kind {
            FileKind::File if file.size == 0 => "regular empty file",
            FileKind::File => "regular file",
            FileKind::Directory => "directory",
            FileKind::Symlink => "symbolic link",
            FileKind::CharDevice => "character special file",
            FileKind::BlockDevice => "block special file",
            FileKind::Fifo => "fifo",
            FileKind::Socket => "socket",
        };
        let protection = match file.kind {
            FileKind::Symlink => "",
            _ => protection(directory, name),
        };
        Ok(self.log.agrees(&format!("remove {protection}{kind}"), path))
    }

    /// Whether a directory may be walked. For an empty one, only its removal is a question.
    pub(crate) fn may_descend(
        &self,
        (parent, name): (&OpenDirectory, &[u8]),
        is_empty: impl FnOnce() -> bool,
        path: &[u8],
    ) -> bool {
        if !self.options.asks || is_empty() {
            return true;
        }
        let action = format!("descend into {}directory", protection(parent, name));
        self.log.agrees(&action, path)
    }

    /// Logs the outcome of a removal. Returns whether the file is gone.
    pub(crate) fn report_outcome(&self, result: io::Result<()>, kind: &str, path: &[u8]) -> bool {
        match result {
            Ok(()) => {
                self.log.report_removed(kind, path);
                true
            }
            // It is gone, which is no error.
            Err(error) if self.options.force && is_missing(&error) => true,
            Err(error) => {
                self.log.fail(path, &error);
                false
            }
        }
    }

    pub(crate) fn unlink(
        &self,
        directory: impl AsFd,
        name: &[u8],
        flags: AtFlags,
    ) -> io::Result<()> {
        Ok(match unlinkat(&directory, name, flags) {
            Err(Errno::BUSY) if self.tree.is_one_file_system && is_mount(&directory, name) => {
                Err(Errno::XDEV)
            }
            result => result,
        }?)
    }

    /// Removes a directory that could not be opened, if it is empty. Returns whether it is gone.
    pub(crate) fn remove_closed(
        &self,
        directory: &OpenDirectory,
        name: &[u8],
        path: &[u8],
        error: io::Error,
    ) -> bool {
        let is_denied = error.kind() == io::ErrorKind::PermissionDenied;
        let result = match is_denied.then(|| self.may_unlink(directory, name, path)) {
            Some(Ok(true)) => self.unlink(directory, name, AtFlags::REMOVEDIR),
            Some(Ok(false)) => return false,
            _ => Err(io::ErrorKind::PermissionDenied.into()),
        };
        self.report_outcome(result.map_err(|_| error), "directory ", path)
    }
}

/// The words of a question about a file that this process may not write.
fn protection(directory: &OpenDirectory, name: &[u8]) -> &'static str {
    match accessat(directory, name, Access::WRITE_OK, AtFlags::EACCESS) {
        Ok(()) => "",
        Err(_) => "write-protected ",
    }
}

impl<L: RemovalLog> Visitor<DirectoryTree> for Remover<L> {
    type State = Removed;

    fn is_sequential(&self) -> bool {
        self.options.asks
    }

    fn chunk(&self) -> usize {
        // A question about a directory is followed by those about the files in it.
        if self.options.asks { 1 } else { CALL_CHUNK }
    }

    fn visit(
        &self,
        names: &Visit<'_, DirectoryTree, Removed>,
        descend: &mut Vec<(usize, Removed)>,
    ) -> ControlFlow<()> {
        for (number, item) in names.items() {
            if item.kind() == FileKind::Directory {
                let is_empty = || item.is_empty_directory().unwrap_or_default();
                let place = (names.place.directory, item.name());
                if self.may_descend(place, is_empty, item.path()) {
                    descend.push((number, Removed::default()));
                } else {
                    names.level.state.record_outcome(false);
                }
                continue;
            }
            let directory = names.place.directory;
            let how = (AtFlags::empty(), "");
            let is_gone = self.remove(directory, item.name(), how, item.path());
            names.level.state.record_outcome(is_gone);
        }
        ControlFlow::Continue(())
    }

    fn is_done(&self, level: &Arc<Directory>) -> bool {
        let state = &level.state;
        if state.has_remaining_files.load(Ordering::Relaxed) {
            return true;
        }
        let remove = |above: &OpenDirectory, name: &[u8]| {
            if !state.is_agreed.load(Ordering::Relaxed) {
                match self.may_unlink(above, name, &level.path()) {
                    Ok(is_agreed) => state.is_agreed.store(is_agreed, Ordering::Relaxed),
                    Err(error) => return Some(Err(error)),
                }
            }
            let is_agreed = state.is_agreed.load(Ordering::Relaxed);
            is_agreed.then(|| self.unlink(above, name, AtFlags::REMOVEDIR))
        };
        let result = match (&level.parent, &state.start) {
            (Some(parent), _) => match parent.open(&self.tree) {
                Ok(above) => remove(&above, &level.name),
                Err(error) => Some(Err(error)),
            },
            (None, Some((above, name))) => remove(above, name),
            (None, None) => Some(Ok(())),
        };
        let Some(result) = result else {
            state.record_outcome(false);
            return true;
        };
        let is_changed = state.is_changed.swap(false, Ordering::Relaxed);
        let kinds = [
            io::ErrorKind::DirectoryNotEmpty,
            io::ErrorKind::AlreadyExists,
        ];
        let has_names = matches!(&result, Err(error) if kinds.contains(&error.kind()));
        if has_names && is_changed && state.readings.fetch_add(1, Ordering::Relaxed) < MAX_READINGS
        {
            return false;
        }
        state.record_outcome(self.report_outcome(result, "directory ", &level.path()));
        true
    }

    fn leave(&self, level: &Arc<Directory>) -> ControlFlow<()> {
        if let Some(parent) = &level.parent {
            let has_remaining_files = level.state.has_remaining_files.load(Ordering::Relaxed);
            parent.state.record_outcome(!has_remaining_files);
        }
        ControlFlow::Continue(())
    }

    fn skip(&self, level: &Arc<Directory>, error: io::Error) -> ControlFlow<()> {
        if let Some(parent) = &level.parent {
            let path = level.path();
            let is_gone = match parent.open(&self.tree) {
                Ok(above) => self.remove_closed(&above, &level.name, &path, error),
                Err(_) => self.report_outcome(Err(error), "directory ", &path),
            };
            parent.state.record_outcome(is_gone);
        }
        ControlFlow::Continue(())
    }

    fn report(&self, path: &[u8], error: io::Error) {
        self.report_outcome(Err(error), "", path);
    }
}

impl Removed {
    /// Of the starting point `name` in `parent`.
    pub(crate) fn start(parent: OpenDirectory, name: &[u8]) -> Self {
        Self {
            start: Some((parent, name.to_owned())),
            ..Self::default()
        }
    }

    /// Records that a name in it is gone, or remains.
    fn record_outcome(&self, is_gone: bool) {
        let fact = if is_gone {
            &self.is_changed
        } else {
            &self.has_remaining_files
        };
        // Each name takes a call, which takes longer than this.
        fact.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use rustix::fd::OwnedFd;
    use rustix::fs::{Mode, OFlags, openat};

    use super::*;

    // Promises: atomic-ended
    #[test]
    fn remove_tree_with_closed_modes_leaves_link_targets() {
        let place = tempfile::tempdir().expect("a directory");
        let outside = place.path().join("outside");
        fs::create_dir(&outside).expect("made");
        fs::write(outside.join("kept"), "x").expect("written");
        let tree = place.path().join("tree");
        for directory in ["a/b/c", "d", "e/f"] {
            fs::create_dir_all(tree.join(directory)).expect("made");
            fs::write(tree.join(directory).join("file"), "x").expect("written");
            symlink(&outside, tree.join(directory).join("link")).expect("made");
        }
        fs::create_dir(tree.join("a/empty")).expect("made");
        for directory in ["a/b/c", "a", "d"] {
            let none = fs::Permissions::from_mode(0o000);
            fs::set_permissions(tree.join(directory), none).expect("ours");
        }
        let parent = File::open(place.path()).expect("a directory");
        assert_eq!(remove_tree(&parent, b"tree"), Ok(()));
        assert!(!tree.exists());
        assert!(outside.join("kept").exists());
        assert_eq!(remove_tree(&parent, b"tree"), Ok(()), "gone already");
        symlink(&outside, &tree).expect("new");
        assert_eq!(remove_tree(&parent, b"tree"), Err(Errno::NOTDIR));
        assert!(outside.join("kept").exists());
    }

    // Promises: atomic-ended
    #[test]
    fn remove_tree_works_at_any_depth() {
        let place = tempfile::tempdir().expect("a directory");
        let parent = File::open(place.path()).expect("a directory");
        let mut here = OwnedFd::from(parent.try_clone().expect("a descriptor"));
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        for _ in 0..3000 {
            rustix::fs::mkdirat(&here, "d", Mode::RWXU).expect("made");
            here = openat(&here, "d", flags, Mode::empty()).expect("there");
        }
        drop(here);
        assert_eq!(remove_tree(&parent, b"d"), Ok(()));
        assert!(!place.path().join("d").exists());
    }
}
