//! Lookup of paths below a directory of this machine, inside which their links stay.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, openat, readlinkat};
use rustix::io::Errno;

use super::archive_path::ArchivePath;
use super::resolve::{self, Component};

/// The files below a directory, for [`resolve`]. It creates nothing.
struct RootedTree {
    root: Arc<OwnedFd>,
    is_chroot: bool,
}

/// A directory; `None` if it is missing, with all below it.
type DirectoryFd = Option<Arc<OwnedFd>>;

impl resolve::PathLookup for RootedTree {
    type Directory = DirectoryFd;
    type Error = Errno;

    fn root(&self) -> DirectoryFd {
        Some(Arc::clone(&self.root))
    }

    fn is_chroot(&self) -> bool {
        self.is_chroot
    }

    fn step(&mut self, parent: &DirectoryFd, name: &[u8]) -> Result<Component<DirectoryFd>, Errno> {
        let Some(parent) = parent else {
            return Ok(Component::Missing);
        };
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = match openat(parent, name, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(Component::Missing),
            found => found?,
        };
        Ok(match FileType::from_raw_mode(fstat(&found)?.st_mode) {
            FileType::Directory => Component::Directory(Some(Arc::new(found))),
            FileType::Symlink => Component::Link(readlinkat(&found, "", Vec::new())?.into_bytes()),
            _ => Component::Other,
        })
    }

    fn imply(&mut self, _: &DirectoryFd, _: &[u8]) -> Result<DirectoryFd, Errno> {
        Ok(None)
    }
}

/// The path without links of the directory at `path`, as a process sees it whose root is `root`. It may be missing. `None`
/// if it cannot be a directory.
pub fn directory_in_chroot(root: &Path, path: &[u8]) -> Option<ArchivePath> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut tree = RootedTree {
        root: Arc::new(openat(CWD, root, flags, Mode::empty()).ok()?),
        is_chroot: true,
    };
    let components = path.split(|&byte| byte == b'/');
    let found = resolve::directory_with_path(&mut tree, components);
    found.ok().map(|(_, path)| path)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_of_a_directory_are_followed_as_after_chroot() {
        let place = tempfile::tempdir().expect("a directory");
        let path = |name: &str| place.path().join(name);
        fs::create_dir_all(path("a/b")).expect("made");
        fs::write(path("file"), "").expect("written");
        for (link, target) in [
            ("x", "a/b"),
            ("y", "x/../c"),
            ("out", "../etc"),
            ("host", "/a/b"),
            ("loop", "loop"),
        ] {
            symlink(target, path(link)).expect("made");
        }
        let find = |path: &str| {
            let found = directory_in_chroot(place.path(), path.as_bytes());
            found.map(|path| path.to_string())
        };
        for (path, expected) in [
            ("/host/d", Some("a/b/d")),
            ("out", Some("etc")),
            ("y/", Some("a/c")),
            ("/..", Some(".")),
            ("file", None),
            ("loop", None),
        ] {
            assert_eq!(find(path).as_deref(), expected, "{path}");
        }
    }
}
