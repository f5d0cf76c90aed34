//! Removal of trees.

use std::ffi::OsStr;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat, unlinkat};
use rustix::io::Errno;

use super::super::directory_tree::{DirectoryTree, is_root, metadata_of};
use super::super::parallel_walk::{Level, Start, Visit, Visitor};
use super::super::tree::{FileKind, Name, Tree};
use super::log::{ChangeLog, Verbosity, quote};

/// Most readings of a directory that is not empty after its names were removed. A file system may move names to
/// positions that were read already.
const MAX_READINGS: u32 = 64;

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
}

/// Removes the files of a walk.
#[derive(Debug)]
pub struct Remover {
    tree: Arc<DirectoryTree>,
    options: RemoveOptions,
    log: Arc<ChangeLog>,
}

/// A directory that is being removed.
#[derive(Debug, Default)]
pub struct Removed {
    /// The directory that holds it and its name there, if it is a starting point.
    start: Option<(OwnedFd, Vec<u8>)>,
    /// Whether a file below it remains.
    has_rest: AtomicBool,
    /// Whether a name was removed since it was last read from its beginning.
    is_changed: AtomicBool,
    readings: AtomicU32,
}

type Directory = Level<DirectoryTree, Removed>;

impl Remover {
    /// Tells `log` about each file. A `tree` that stays on one file system keeps it from crossing mount points.
    pub fn new(tree: Arc<DirectoryTree>, options: RemoveOptions, log: Arc<ChangeLog>) -> Self {
        Self { tree, options, log }
    }

    /// Removes the file at `path`, or returns the directory at which a walk must start.
    pub fn start(&self, path: &[u8]) -> Option<Start<DirectoryTree, Removed>> {
        match self.try_start(path) {
            Ok(start) => start,
            Err(error) => {
                self.fail(path, &error);
                None
            }
        }
    }

    fn try_start(&self, path: &[u8]) -> io::Result<Option<Start<DirectoryTree, Removed>>> {
        let end = path.iter().rposition(|&byte| byte != b'/');
        let clean = path.get(..end.map_or(0, |end| end + 1)).unwrap_or(path);
        let slash = clean.iter().rposition(|&byte| byte == b'/');
        let (above, name) = clean.split_at(slash.map_or(0, |slash| slash + 1));
        let found = metadata_of(as_path(if clean.is_empty() { path } else { clean }))?;
        if found.kind != FileKind::Directory {
            if clean.len() < path.len() {
                return Err(Errno::NOTDIR.into());
            }
            let above = open_above(above)?;
            self.is_gone(unlink(&above, name, AtFlags::empty()), "", path);
            return Ok(None);
        }
        if !self.options.recursive && !self.options.empty_directories {
            return Err(Errno::ISDIR.into());
        }
        if matches!(name, b"." | b"..") {
            let text = "refusing to remove '.' or '..' directory: skipping";
            self.log.fail_with(&format!("{text} {}", quote(path)));
            return Ok(None);
        }
        if self.options.recursive && !self.options.root && is_root(&found) {
            self.log.fail_on_root(path);
            return Ok(None);
        }
        let name = if name.is_empty() { b"." } else { name };
        let parent = open_above(above)?;
        if !self.options.recursive {
            let result = unlink(&parent, name, AtFlags::REMOVEDIR);
            self.is_gone(result, "directory ", path);
            return Ok(None);
        }
        let opened = self.tree.open(&parent, Name::directory(name, found.inode));
        Ok(match opened {
            Ok(directory) => Some(Start {
                path: path.to_owned(),
                inode: found.inode,
                directory,
                state: Removed {
                    start: Some((parent, name.to_owned())),
                    ..Removed::default()
                },
            }),
            Err(error) => {
                self.remove_closed(&parent, name, path, &error);
                None
            }
        })
    }

    /// Reports that the file at `path` remains.
    fn fail(&self, path: &[u8], error: &io::Error) {
        if self.is_missing(error) {
            return;
        }
        if error.kind() == io::ErrorKind::CrossesDevices {
            let path = quote(path);
            let text = format!("skipping {path}, since it's on a different device");
            return self.log.fail_with(&text);
        }
        self.log.fail("cannot remove", path, error);
    }

    /// Tells the outcome of a removal. Returns whether the file is gone.
    fn is_gone(&self, result: io::Result<()>, kind: &str, path: &[u8]) -> bool {
        match result {
            Ok(()) => {
                let line = || format!("removed {kind}{}", quote(path));
                self.log.write(Verbosity::Changes, line);
                true
            }
            Err(error) => {
                self.fail(path, &error);
                self.is_missing(&error)
            }
        }
    }

    /// Removes a directory that could not be opened, if it is empty. Returns whether it is gone.
    fn remove_closed(
        &self,
        directory: &OwnedFd,
        name: &[u8],
        path: &[u8],
        error: &io::Error,
    ) -> bool {
        let is_denied = error.kind() == io::ErrorKind::PermissionDenied;
        if is_denied && let Ok(()) = unlink(directory, name, AtFlags::REMOVEDIR) {
            return self.is_gone(Ok(()), "directory ", path);
        }
        self.fail(path, error);
        self.is_missing(error)
    }

    /// Whether the file does not exist, which is no error.
    fn is_missing(&self, error: &io::Error) -> bool {
        let kinds = [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory];
        self.options.force && kinds.contains(&error.kind())
    }
}

fn as_path(path: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(path))
}

fn unlink(directory: &OwnedFd, name: &[u8], flags: AtFlags) -> io::Result<()> {
    Ok(unlinkat(directory, name, flags)?)
}

fn open_above(path: &[u8]) -> io::Result<OwnedFd> {
    let path = if path.is_empty() { b"." } else { path };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat(CWD, path, flags, Mode::empty())?)
}

impl Visitor<DirectoryTree> for Remover {
    type State = Removed;

    fn visit(
        &self,
        names: &Visit<'_, DirectoryTree, Removed>,
        descend: &mut Vec<(usize, Removed)>,
    ) -> ControlFlow<()> {
        for (number, item) in names.items() {
            if item.kind() == FileKind::Directory {
                descend.push((number, Removed::default()));
                continue;
            }
            let result = unlink(names.place.directory, item.name(), AtFlags::empty());
            let is_gone = self.is_gone(result, "", item.path());
            names.level.state.note(is_gone);
        }
        ControlFlow::Continue(())
    }

    fn is_done(&self, level: &Arc<Directory>) -> bool {
        let state = &level.state;
        if state.has_rest.load(Ordering::Relaxed) {
            return true;
        }
        let remove = |above: &OwnedFd, name: &[u8]| unlink(above, name, AtFlags::REMOVEDIR);
        let result = match (&level.parent, &state.start) {
            (Some(parent), _) => {
                let above = parent.open(&self.tree);
                above.and_then(|above| remove(&above, &level.name))
            }
            (None, Some((above, name))) => remove(above, name),
            (None, None) => Ok(()),
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
        state.note(self.is_gone(result, "directory ", &level.path()));
        true
    }

    fn leave(&self, level: &Arc<Directory>) -> ControlFlow<()> {
        if let Some(parent) = &level.parent {
            let has_rest = level.state.has_rest.load(Ordering::Relaxed);
            parent.state.note(!has_rest);
        }
        ControlFlow::Continue(())
    }

    fn skip(&self, level: &Arc<Directory>, error: io::Error) -> ControlFlow<()> {
        if let Some(parent) = &level.parent {
            let path = level.path();
            let is_gone = match parent.open(&self.tree) {
                Ok(above) => self.remove_closed(&above, &level.name, &path, &error),
                Err(_) => self.is_gone(Err(error), "directory ", &path),
            };
            parent.state.note(is_gone);
        }
        ControlFlow::Continue(())
    }

    fn report(&self, path: &[u8], error: io::Error) {
        self.fail(path, &error);
    }
}

impl Removed {
    /// Notes that a name in it is gone, or remains.
    fn note(&self, is_gone: bool) {
        let fact = if is_gone {
            &self.is_changed
        } else {
            &self.has_rest
        };
        // Each name takes a call, which takes longer than this.
        fact.store(true, Ordering::Relaxed);
    }
}
