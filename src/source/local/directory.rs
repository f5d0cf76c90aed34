//! A directory whose files are opened as sources.

use std::fs::Metadata;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat};
use rustix::io::Errno;

use super::file;
use crate::base::regular_file;
use crate::base::stats::Stats;
use crate::source::location::shown_path;
use crate::source::{Cause, Error, Source};

const BENEATH: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_MAGICLINKS);

/// An open directory. Files are opened only below it, whatever names and symbolic links say.
#[derive(Debug)]
pub(crate) struct SourceDirectory {
    directory: OwnedFd,
    path: PathBuf,
    name: String,
    stats: Arc<Stats>,
}

impl SourceDirectory {
    pub(crate) fn open(path: &Path, stats: Arc<Stats>) -> Result<Self, Error> {
        let name = shown_path(path);
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        match openat(CWD, path, flags, Mode::empty()) {
            Ok(directory) => Ok(Self {
                directory,
                path: path.to_owned(),
                name,
                stats,
            }),
            Err(error) => Err(Error::new(name, std::io::Error::from(error).into())),
        }
    }

    /// Its path, as it was given.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Name for the user.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Attributes of the regular file at the relative path `name`, which is below this directory.
    pub(crate) fn metadata(&self, name: &str) -> Option<Metadata> {
        regular_file::open(&self.directory, name, BENEATH)
            .ok()??
            .metadata()
            .ok()
    }

    /// Opens the regular file at the relative path `name`. A path that is not below this directory is an error.
    pub(crate) fn open_file(&self, name: &str) -> Result<Arc<dyn Source>, Error> {
        self.open_checked(name, None)
    }

    /// As [`open_file`](Self::open_file), for a file that vouches for the file `archive`. Only root, this user and the
    /// owner of `archive` may be able to write it.
    pub(crate) fn open_beside(&self, archive: &str, name: &str) -> Result<Arc<dyn Source>, Error> {
        self.open_checked(name, Some(archive))
    }

    fn open_checked(&self, name: &str, archive: Option<&str>) -> Result<Arc<dyn Source>, Error> {
        let path = self.path.join(name);
        let open = |name: &str| match regular_file::open(&self.directory, name, BENEATH) {
            Ok(Some(opened)) => Ok(opened),
            Ok(None) => Err(Cause::Unsupported("a file that is not regular".to_owned())),
            Err(error) if Errno::from_io_error(&error) == Some(Errno::XDEV) => Err(
                Cause::Unsupported("a file outside the directory".to_owned()),
            ),
            Err(error) => Err(error.into()),
        };
        let source = open(name).and_then(|opened| {
            if let Some(archive) = archive {
                let owner = open(archive)?.metadata()?.uid();
                file::check_writers(&self.directory, name, &opened, owner)?;
            }
            file::from_file(opened, &path, Arc::clone(&self.stats))
        });
        source.map_err(|cause| Error::new(shown_path(&path), cause))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    // Promises: image-archive
    #[test]
    fn only_regular_files_below_the_directory_are_opened() {
        let directory = tempfile::tempdir().expect("a directory");
        let inside = directory.path().join("inside");
        fs::create_dir_all(inside.join("deep")).expect("made");
        fs::write(directory.path().join("outside"), "secret").expect("written");
        fs::write(inside.join("deep/file"), "here").expect("written");
        for (target, link) in [
            ("deep/file", "good"),
            ("../outside", "climbs"),
            ("/etc/passwd", "absolute"),
        ] {
            symlink(target, inside.join(link)).expect("linked");
        }
        let fifo = rustix::fs::FileType::Fifo;
        let path = inside.join("fifo");
        rustix::fs::mknodat(CWD, &path, fifo, Mode::RUSR, 0).expect("made");

        let directory = SourceDirectory::open(&inside, Arc::default()).expect("a directory");
        for name in ["deep/file", "good", "deep/../good"] {
            let file = directory.open_file(name).expect("a file below it");
            assert_eq!(file.fingerprint().len, Some(4), "{name}");
        }
        for name in [
            "climbs",
            "absolute",
            "../outside",
            "/etc/passwd",
            "fifo",
            "deep",
        ] {
            let opened = directory.open_file(name).map_err(|error| error.cause);
            assert!(matches!(opened, Err(Cause::Unsupported(_))), "{name}");
        }
        let missing = directory.open_file("missing").map_err(|error| error.cause);
        assert!(matches!(missing, Err(Cause::NotFound)));
    }
}
