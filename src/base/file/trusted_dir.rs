//! Directories and files that belong to this user and that no other user can change. Cached data is partly
//! trusted, so no other user may replace a name by a link or file. Each directory is opened before it is
//! checked, and the last step to a file never follows a link.

use std::fs::{DirBuilder, File};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, fstat, mkdirat, open, openat, readlinkat,
    renameat, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;

use super::regular_file::{ForeignWriter, foreign_writer};
use crate::base::resolve::MAX_LINKS;
use crate::base::time::{nanoseconds, system_time};

/// Reason why a file or directory is rejected.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{} {why}", .path.display())]
pub struct PermissionProblem {
    path: PathBuf,
    why: &'static str,
}

impl PermissionProblem {
    fn error(path: PathBuf, why: &'static str) -> io::Error {
        io::Error::new(ErrorKind::PermissionDenied, Self { path, why })
    }

    /// Returns the permission problem in `error`, if it is one.
    pub fn from_error(error: &io::Error) -> Option<&Self> {
        error.get_ref()?.downcast_ref()
    }
}

/// An open directory in which no other user can change this user's files. Only this user or root can write to
/// it, or it is sticky as `/tmp`, where others can only create names. Subdirectories are private.
#[derive(Debug)]
pub struct TrustedDir {
    descriptor: OwnedFd,
    path: PathBuf,
}

impl TrustedDir {
    /// Opens the directory at `path`. A last component that is a link must belong to this user or root. Fails
    /// with a [`PermissionProblem`] if another user owns the directory or can write to it.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        // Drops a trailing slash, which would make the kernel follow a link.
        let named: PathBuf = path.components().collect();
        let mut path = named.clone();
        for _ in 0..MAX_LINKS {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let found = open(&path, flags, Mode::empty())?;
            let stat = fstat(&found)?;
            if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
                return Self::open_at(found, Path::new("."), named, is_protected);
            }
            if stat.st_uid != 0 && !is_ours(&stat) {
                return Err(PermissionProblem::error(
                    named,
                    "is another user's symbolic link",
                ));
            }
            let target = readlinkat(&found, "", Vec::new())?.into_bytes();
            let target = PathBuf::from(std::ffi::OsString::from_vec(target));
            path = path.parent().unwrap_or(Path::new("/")).join(target);
        }
        Err(Errno::LOOP.into())
    }

    /// Opens the directory at `path`, and creates a missing one and its parents for this user only.
    ///
    /// # Errors
    /// If it cannot be created, or is not a directory. [`PermissionProblem`] if others could change it.
    pub fn create(path: &Path) -> io::Result<Self> {
        match Self::open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                DirBuilder::new().recursive(true).mode(0o700).create(path)?;
                Self::open(path)
            }
            opened => opened,
        }
    }

    /// Opens the subdirectory `name`, which must not be a link.
    pub(crate) fn open_dir(&self, name: &str) -> io::Result<Self> {
        let path = self.path.join(name);
        Self::open_at(&self.descriptor, Path::new(name), path, |_| false)
    }

    /// As [`open_dir`](Self::open_dir), but creates a missing subdirectory for this user only.
    pub(crate) fn create_dir(&self, name: &str) -> io::Result<Self> {
        match mkdirat(&self.descriptor, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => self.open_dir(name),
            Err(errno) => Err(errno.into()),
        }
    }

    fn open_at(
        directory: impl AsFd,
        name: &Path,
        path: PathBuf,
        may_be_shared: impl Fn(&Stat) -> bool,
    ) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let descriptor = openat(directory, name, flags, Mode::empty()).map_err(io::Error::from)?;
        let stat = fstat(&descriptor)?;
        if may_be_shared(&stat) {
            return Ok(Self { descriptor, path });
        }
        match own_foreign_writer(&stat) {
            None => Ok(Self { descriptor, path }),
            Some(ForeignWriter::Owner(_)) => {
                Err(PermissionProblem::error(path, "belongs to another user"))
            }
            Some(ForeignWriter::OtherUsers) => {
                let why = "can be written to by other users (`chmod go-w` closes it)";
                Err(PermissionProblem::error(path, why))
            }
        }
    }

    /// Opens the regular file `name` without blocking, as a FIFO could. A file that it creates is private.
    /// Fails with a [`PermissionProblem`] if it is not regular, or owned or writable by another user.
    pub(crate) fn file(&self, name: &str, flags: OFlags) -> io::Result<File> {
        let untrusted = |why| PermissionProblem::error(self.path.join(name), why);
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let descriptor = match openat(&self.descriptor, name, flags, Mode::RUSR | Mode::WUSR) {
            Err(Errno::LOOP) => return Err(untrusted("is a symbolic link")),
            opened => opened?,
        };
        let stat = fstat(&descriptor)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(untrusted("is not a regular file"));
        }
        match own_foreign_writer(&stat) {
            None => Ok(descriptor.into()),
            Some(ForeignWriter::Owner(_)) => Err(untrusted("belongs to another user")),
            Some(ForeignWriter::OtherUsers) => Err(untrusted("can be written to by other users")),
        }
    }

    pub(crate) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(renameat(&self.descriptor, from, &self.descriptor, to)?)
    }

    pub(crate) fn remove(&self, name: &str) -> io::Result<()> {
        Ok(unlinkat(&self.descriptor, name, AtFlags::empty())?)
    }

    /// Returns the state of `name`, which must be a regular file of this user.
    pub(crate) fn stat_file(&self, name: &str) -> io::Result<FileInfo> {
        let stat = statat(&self.descriptor, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || !is_ours(&stat) {
            let why = "is not a regular file of this user";
            return Err(PermissionProblem::error(self.path.join(name), why));
        }
        Ok(FileInfo {
            identity: (stat.st_dev, stat.st_ino),
            held_bytes: u64::try_from(stat.st_blocks)
                .unwrap_or_default()
                .saturating_mul(512),
            modified: system_time(stat.st_mtime, nanoseconds(stat.st_mtime_nsec)),
        })
    }

    /// Lists the names that are UTF-8, unordered.
    pub(crate) fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.descriptor)? {
            let entry = entry?;
            match entry.file_name().to_str() {
                Ok("." | "..") | Err(_) => {}
                Ok(name) => names.push(name.to_owned()),
            }
        }
        Ok(names)
    }
}

/// State of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileInfo {
    /// Device and inode.
    pub identity: (u64, u64),
    /// Bytes of disk that it occupies.
    pub held_bytes: u64,
    /// Modification time, which may have been set explicitly.
    pub modified: SystemTime,
}

impl AsFd for TrustedDir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Opens the file at `path` for appending; a new one is private to this user. The last component may be a
/// link of this user or root, such as `/dev/stderr`. Writes never block, and a pipe takes as much as fits.
///
/// # Errors
/// If it cannot be opened, or is a pipe without a reader. [`PermissionProblem`] for another user's link.
pub fn open_append(path: &Path) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::CLOEXEC;
    let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY;
    let mode = Mode::RUSR | Mode::WUSR;
    match open(path, flags | OFlags::NOFOLLOW, mode) {
        Err(Errno::LOOP) => {}
        opened => return Ok(opened?.into()),
    }
    let link = statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW)?;
    if link.st_uid != 0 && !is_ours(&link) {
        let why = "is another user's symbolic link";
        return Err(PermissionProblem::error(path.to_owned(), why));
    }
    Ok(open(path, flags, mode)?.into())
}

fn is_protected(stat: &Stat) -> bool {
    match foreign_writer(stat, &[0, geteuid().as_raw()]) {
        None => true,
        Some(ForeignWriter::OtherUsers) => Mode::from_raw_mode(stat.st_mode).contains(Mode::SVTX),
        Some(ForeignWriter::Owner(_)) => false,
    }
}

/// The user beside this one who can change a file in the state `stat`.
fn own_foreign_writer(stat: &Stat) -> Option<ForeignWriter> {
    foreign_writer(stat, &[geteuid().as_raw()])
}

fn is_ours(stat: &Stat) -> bool {
    stat.st_uid == geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};

    use rustix::fs::mknodat;

    use super::*;

    fn problem_of<T: std::fmt::Debug>(result: io::Result<T>) -> String {
        let error = result.expect_err("refused");
        let untrusted = PermissionProblem::from_error(&error).map(ToString::to_string);
        untrusted.unwrap_or_else(|| panic!("{error}"))
    }

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).expect("there").mode() & 0o7777
    }

    // Promises: secret-modes
    #[test]
    fn created_files_and_directories_are_private() {
        let place = tempfile::tempdir().expect("a directory");
        let path = place.path().join("a/b");
        assert!(TrustedDir::open(&path).is_err());
        let directory = TrustedDir::create(&path).expect("made");
        let inner = directory.create_dir("c").expect("made");
        inner
            .file("f", OFlags::RDWR | OFlags::CREATE)
            .expect("made");
        for (name, expected) in [("a", 0o700), ("a/b", 0o700), ("a/b/c", 0o700)] {
            assert_eq!(mode(&place.path().join(name)), expected, "{name}");
        }
        assert_eq!(mode(&path.join("c/f")), 0o600);
        let found = inner.stat_file("f").expect("there");
        let metadata = fs::metadata(path.join("c/f")).expect("there");
        assert_eq!(found.identity, (metadata.dev(), metadata.ino()));
        assert_eq!(Some(found.modified), metadata.modified().ok());
        inner.rename("f", "g").expect("renamed");
        assert_eq!(inner.names().expect("readable"), ["g"]);
        inner.remove("g").expect("removed");
        assert!(inner.names().expect("readable").is_empty());
    }

    // Promises: trust-cache
    #[test]
    fn directory_writable_by_others_is_rejected() {
        let place = tempfile::tempdir().expect("a directory");
        for bad in [0o777, 0o720] {
            fs::set_permissions(place.path(), Permissions::from_mode(bad)).expect("set");
            let told = problem_of(TrustedDir::create(place.path()));
            assert!(told.contains("by other users"), "{told}");
        }
        fs::create_dir(place.path().join("inner")).expect("made");
        let open = Permissions::from_mode(0o1777);
        fs::set_permissions(place.path().join("inner"), open).expect("set");
        for fine in [0o755, 0o1777] {
            fs::set_permissions(place.path(), Permissions::from_mode(fine)).expect("set");
            let directory = TrustedDir::open(place.path()).expect("fine");
            assert!(problem_of(directory.create_dir("inner")).contains("by other users"));
            directory.create_dir(&fine.to_string()).expect("made");
        }
    }

    // Promises: trust-cache
    #[test]
    #[ignore = "needs root"]
    fn files_of_another_user_are_rejected() {
        let place = tempfile::tempdir().expect("a directory");
        let theirs = place.path().join("theirs");
        fs::create_dir(&theirs).expect("made");
        let directory = TrustedDir::open(place.path()).expect("fine");
        fs::write(place.path().join("file"), b"").expect("written");
        chown(&theirs, Some(1), None).expect("root runs the tests");
        chown(place.path().join("file"), Some(1), None).expect("root");
        let told = [
            problem_of(TrustedDir::create(&theirs)),
            problem_of(directory.create_dir("theirs")),
            problem_of(directory.file("file", OFlags::RDONLY)),
        ];
        for told in told {
            assert!(told.ends_with("belongs to another user"), "{told}");
        }
    }

    // Promises: trust-cache
    #[test]
    #[ignore = "needs root"]
    fn only_own_links_are_followed_and_only_to_directories() {
        let place = tempfile::tempdir().expect("a directory");
        let path = |name: &str| place.path().join(name);
        fs::create_dir(path("real")).expect("made");
        fs::write(path("real/file"), b"").expect("written");
        symlink("real", path("ours")).expect("made");
        symlink("ours", path("again")).expect("made");
        symlink("loop", path("loop")).expect("made");
        symlink(path("real"), path("theirs")).expect("made");
        lchown(path("theirs"), Some(1), None).expect("root runs the tests");
        TrustedDir::open(&path("again")).expect("followed");
        assert!(TrustedDir::open(&path("loop")).is_err());
        for theirs in ["theirs", "theirs/", "theirs/."] {
            let told = problem_of(TrustedDir::create(&path(theirs)));
            assert!(told.contains("symbolic link"), "{told}");
        }
        let directory = TrustedDir::open(place.path()).expect("fine");
        assert!(directory.create_dir("ours").is_err());
        let real = TrustedDir::open(&path("real")).expect("fine");
        symlink("file", path("real/link")).expect("made");
        let create = OFlags::RDWR | OFlags::CREATE;
        assert!(problem_of(real.file("link", create)).contains("symbolic link"));
        assert!(real.stat_file("link").is_err());
        assert!(problem_of(directory.file("real", OFlags::RDONLY)).contains("not a regular file"));
    }

    // Promises: secret-modes, trust-cache
    #[test]
    #[ignore = "needs root"]
    fn log_file_is_private_and_foreign_links_are_rejected() {
        let place = tempfile::tempdir().expect("a directory");
        let path = |name: &str| place.path().join(name);
        open_append(&path("new")).expect("made");
        assert_eq!(mode(&path("new")), 0o600);
        symlink("new", path("ours")).expect("made");
        open_append(&path("ours")).expect("followed");
        mknodat(CWD, path("pipe"), FileType::Fifo, Mode::RWXU, 0).expect("made");
        let unread = open_append(&path("pipe")).expect_err("it does not wait for a reader");
        assert_eq!(Errno::from_io_error(&unread), Some(Errno::NXIO));
        symlink("victim", path("theirs")).expect("made");
        lchown(path("theirs"), Some(1), None).expect("root runs the tests");
        assert!(problem_of(open_append(&path("theirs"))).contains("symbolic link"));
        assert!(!path("victim").exists());
    }
}
