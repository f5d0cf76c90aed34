//! Removal of files and directories that are given by their paths.

use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat};
use rustix::io::Errno;

use super::log::{ChangeLog, Verbosity, quote};
use crate::tree::{
    DirectoryTree, FileKind, Name, OpenDirectory, RemovalLog, Removed, Remover, Start, Tree,
    Visitor, is_root, metadata_of,
};

impl RemovalLog for ChangeLog {
    fn report_removed(&self, kind: &str, path: &[u8]) {
        let line = || format!("removed {kind}{}", quote(path));
        self.write(Verbosity::Changes, line);
    }

    fn fail(&self, path: &[u8], error: &io::Error) {
        if error.kind() == io::ErrorKind::CrossesDevices {
            let path = quote(path);
            let text = format!("skipping {path}, since it's on a different device");
            return self.fail_with(&text);
        }
        Self::fail(self, "cannot remove", path, error);
    }

    fn agrees(&self, action: &str, path: &[u8]) -> bool {
        let agreed = ask(&format!("{action} {}", quote(path)));
        // Without an answer nothing is removed.
        agreed.unwrap_or_else(|error| {
            self.fail_with(&format!("cannot ask: {error}"));
            false
        })
    }
}

/// Asks `question` on standard error. Returns whether the line on standard input begins with a `y`.
///
/// # Errors
/// As reading and writing.
pub fn ask(question: &str) -> io::Result<bool> {
    io::stderr().write_all(format!("tarfs: {question}? ").as_bytes())?;
    let (mut first, mut bytes) = (None, io::stdin().lock().bytes());
    // The rest of the line may be of any length.
    while let Some(byte) = bytes.next().transpose()?.filter(|&byte| byte != b'\n') {
        first.get_or_insert(byte);
    }
    Ok(matches!(first, Some(b'y' | b'Y')))
}

impl Remover<ChangeLog> {
    /// Removes the file at `path`, or returns the directory at which a walk must start.
    pub fn start(&self, path: &[u8]) -> Option<Start<DirectoryTree, Removed>> {
        match self.try_start(path) {
            Ok(start) => start,
            Err(error) => {
                self.report(path, error);
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
            self.remove(&above, name, (AtFlags::empty(), ""), path);
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
        // `None` if it cannot be read.
        let has_names = || Some(std::fs::read_dir(as_path(path)).ok()?.next().is_some());
        if !self.options.recursive {
            if self.options.asks && has_names() == Some(true) {
                // That needs no question.
                self.report_outcome(Err(Errno::NOTEMPTY.into()), "", path);
            } else {
                self.remove(&parent, name, (AtFlags::REMOVEDIR, "directory "), path);
            }
            return Ok(None);
        }
        if !self.may_descend((&parent, name), || has_names() == Some(false), path) {
            return Ok(None);
        }
        let opened = self.tree.open(&parent, Name::directory(name, found.inode));
        Ok(match opened {
            Ok(directory) => Some(Start {
                path: path.to_owned(),
                inode: found.inode,
                directory,
                state: Removed::start(parent, name),
            }),
            Err(error) => {
                self.remove_closed(&parent, name, path, error);
                None
            }
        })
    }
}

fn as_path(path: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(path))
}

fn open_above(path: &[u8]) -> io::Result<OpenDirectory> {
    let path = if path.is_empty() { b"." } else { path };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat(CWD, path, flags, Mode::empty())?.into())
}
